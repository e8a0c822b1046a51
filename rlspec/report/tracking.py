"""Send a finished run to Weights & Biases: one W&B run an arm, and one for the verdicts.

wandb is started in a process of its own, with an explicit mode, no terminal and a time limit, so that it can neither
prompt nor hang the verdict. What stands in the run folder stays the truth; wandb gets a copy of it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlspec import records, runs
from rlspec.errors import RunError
from rlspec.model import Arm

TIME_LIMIT_S = 300.0


def wanted(report: Mapping[str, Any]) -> bool:
    """Whether the run's spec has a `wandb` key that is not disabled."""
    run = report.get("run")
    return run is not None and _settings(Path(run["folder"])) is not None


def _settings(folder: Path) -> dict[str, Any] | None:
    given = runs.load(folder / "plan.json")["spec"]["data"].get("wandb")
    return None if given is None or given.get("mode") == "disabled" else {"mode": "offline", **given}


def send(report: Mapping[str, Any]) -> str | None:
    """Log the run in a child process; why it did not work, or None."""
    folder = Path(report["run"]["folder"])
    settings = _settings(folder)
    assert settings is not None
    environment = {
        **os.environ,
        "WANDB_MODE": settings["mode"],
        "WANDB_DIR": str(folder),
        "WANDB_INIT_TIMEOUT": "60",
        "WANDB_SILENT": "true",
        "WANDB_CONSOLE": "off",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")])),
    }
    command = [sys.executable, "-m", "rlspec.report.tracking", str(folder)]
    try:
        done = subprocess.run(
            command, env=environment, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, timeout=TIME_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return f"wandb did not end within {TIME_LIMIT_S:.0f} s; the records in {folder} are whole"
    if done.returncode == 0:
        return None
    last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:] or ["no message"]
    return f"wandb ended with {done.returncode}: {last[0]}; the records in {folder} are whole"


def log(folder: Path) -> None:
    """Log the arms and the verdicts of a run folder. Runs in the child."""
    import wandb

    settings, report = _settings(folder), runs.load(folder / "report.json")
    assert settings is not None
    common = {
        "project": settings["project"],
        "entity": settings.get("entity"),
        "mode": settings["mode"],
        "group": f"{report['kind']}/{report['model']}",
        "dir": str(folder),
        "reinit": "finish_previous",
    }
    for arm in report["arms"]:
        config = {key: arm[key] for key in ("role", "status", "revision", "commit")}
        config |= {"spec": report["spec"], "mesh": report["mesh"], "dtype": report["dtype"], "rlspec_run": folder.name}
        with wandb.init(**common, name=_stem(report, arm["name"]), job_type=arm["name"], config=config) as run:
            for step, values in _history(folder, report, arm):
                run.log(values, step=step)
            run.summary.update({"status": arm["status"], "seconds": arm["seconds"]})
    with wandb.init(**common, name=_stem(report, "verdict"), job_type="verdict") as run:
        run.summary.update({"outcome": report["outcome"], "exit_code": report["exit_code"]})
        for verdict in report["verdicts"]:
            key = f"{verdict['judgment']}/{verdict['subject']}"
            run.summary.update({f"{key}/status": verdict["status"], f"{key}/statistic": verdict["statistic"]})


def _stem(report: Mapping[str, Any], name: str) -> str:
    return f"{report['tag']}-{name}" if report["tag"] else name


def _history(folder: Path, report: Mapping[str, Any], arm: Mapping[str, Any]) -> Iterator[tuple[int, dict[str, float]]]:
    """Step and metrics of an arm, as its records have them; nothing for an arm that has none."""
    try:
        run = records.read(
            folder / f"{_stem(report, arm['name'])}.records.jsonl", Arm(name=arm["name"], role=arm["role"])
        )
    except RunError:
        return
    by_step: dict[int, dict[str, float]] = {}
    for name, series in run.series.items():
        for step, value in zip(series.steps, series.values, strict=True):
            by_step.setdefault(step, {})[f"train/{name}"] = value
    yield from sorted(by_step.items())


if __name__ == "__main__":
    log(Path(sys.argv[1]))
