"""Entry of the run files: finds its arm in plan.json, sets what makes runs repeat, trains or runs what is judged."""

from __future__ import annotations

import gc
import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import torch

from rlspec.device import faults, job, settings
from rlspec.device.settings import Settings
from rlspec.device.trainer import Row, Trainer

FORMATS = {
    "step-time": "{:.3f} sec",
    "cross-entropy-loss": "{:.4f}",
    "load-balance-loss": "{:.6f}",
    "learning-rate": "{:.6e}",
    "gradient-norm": "{:.4f}",
    "tokens-per-second": "{:,.0f}",
    "peak-gpu-memory": "{:.2f} GB",
}


def main(run_file: str, config: Mapping[str, Any]) -> None:
    """Run the arm that the run file's name tells of. Raises ValueError for what its plan or configuration lacks."""
    gc.freeze()  # torch brings half a million objects, which no collection need look through again
    path = Path(run_file).absolute()
    if config["kind"] == "operators":
        from rlspec.device import bench, operator_harness

        operator_harness.main(bench.bench(path, config, find_arm(path)), _records_of(path))
        return
    if config["kind"] == "chain":
        from rlspec.device import chain_bench, chain_harness

        chain_harness.main(chain_bench.bench(config, find_arm(path)), _records_of(path))
        return
    arm = find_arm(path)
    options = settings.read({**config, "settings": {**config["settings"], "fault": arm.get("fault")}})
    make_repeatable(options)
    with job.join() as joined:
        kind = faults.trainer(options)
        implementation = arm.get("implementation") or "torch"
        if joined.rank == 0:
            _say(f"launch({config!r}, arm={arm['name']!r}, implementation={implementation!r}, {_flags(joined)})")
        _train(kind, options, joined, arm, _records_of(path))


def _train(kind: type[Trainer], options: Settings, joined: job.Job, arm: Mapping[str, Any], path: Path) -> None:
    implementation = arm.get("implementation") or "torch"
    trainer = kind(options, joined, implementation=implementation, perturbation=arm.get("perturb"))
    notes = [f"{arm['name']} has the planted fault {options.fault}"] if kind in faults.FAULTS.values() else []
    rows = trainer.run()
    if joined.rank != 0:
        for _ in rows:
            pass
        return
    with Records(path, arm["name"], options.steps, notes) as records:
        for row in rows:
            records.step(row)
            _say(log_line(row, options.steps))


def _records_of(run_file: Path) -> Path:
    return Path(os.environ.get("RLSPEC_RECORDS") or run_file.with_name(f"{run_file.stem}.records.jsonl"))


def find_arm(run_file: Path) -> Mapping[str, Any]:
    """The arm whose stem is the run file's, from the plan.json beside it."""
    plan = run_file.with_name("plan.json")
    if not plan.is_file():
        raise ValueError(f"{plan} is missing: `rlspec run` writes it beside its run files, and arms differ in it alone")
    arms: list[dict[str, Any]] = json.loads(plan.read_text(encoding="utf-8"))["arms"]
    for arm in arms:
        if arm["stem"] == run_file.stem:
            return arm
    raise ValueError(f"{plan} has no arm with the stem {run_file.stem!r}; it has {', '.join(a['stem'] for a in arms)}")


def make_repeatable(options: Settings) -> None:
    """Seeds, fp32 products in fp32, and torch's deterministic algorithms where the settings ask for them."""
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("highest")
    if options.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # As torch.use_deterministic_algorithms, which imports torch's compiler to tell it, too; that takes a second.
    torch.set_deterministic_debug_mode("error" if options.deterministic else "default")


def _flags(joined: job.Job) -> str:
    where = f"device={str(joined.device)!r}, processes={joined.world}, backend={joined.backend!r}"
    deterministic = torch.are_deterministic_algorithms_enabled()
    return f"{where}, threads={torch.get_num_threads()}, deterministic={deterministic}"


def _say(text: str) -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} | INFO | {text}", flush=True)


def log_line(row: Row, steps: int) -> str:
    """`step 00000003/00000032 | step-time 4.812 sec | …`."""
    shown = [f"{name} {FORMATS[name].format(value)}" for name, value in row.metrics.items()]
    return " | ".join([f"step {row.step:08d}/{steps:08d}", *shown])


class Records:
    """records.jsonl, written line by line. The line `end` comes only if the run came to its end."""

    def __init__(self, path: Path, arm: str, steps: int, notes: list[str]) -> None:
        self.path, self.count = path, 0
        self.head = {"record": "run", "schema_version": 1, "arm": arm, "reader": "embedded", "steps_expected": steps,
                     "resolution": {}, "faults": {}, "notes": notes}  # fmt: skip

    def __enter__(self) -> Records:
        self.file: TextIO = self.path.open("w", encoding="utf-8")
        self._write(self.head)
        return self

    def step(self, row: Row) -> None:
        metrics = {name: value if math.isfinite(value) else repr(value) for name, value in row.metrics.items()}
        self._write({"record": "step", "step": row.step, "metrics": metrics, "data": row.data})
        self.count += 1

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self.file:
            if kind is None:
                self._write({"record": "end", "steps": self.count})

    def _write(self, line: Mapping[str, Any]) -> None:
        self.file.write(json.dumps(line, allow_nan=False) + "\n")
        self.file.flush()
