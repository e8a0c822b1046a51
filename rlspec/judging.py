"""`rlspec judge`: find out what is to be judged and with which roles, then hand over to the pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlspec import logs, pipeline, runs, schema
from rlspec.errors import SpecError


def judge(
    *,
    files: Sequence[Path],
    reader: str | None,
    kind: str,
    metrics: Sequence[str],
    pattern: str | None,
    contract: str | None,
    bases: Sequence[Path],
    features: Sequence[Path],
) -> dict[str, Any]:
    """The report on logs, on a run or on a report.json. Raises SpecError or RunError."""
    if not files and not bases and not features:
        raise SpecError("nothing to judge: name logs, or a run")
    given = {"--reader": reader, "--metric": metrics, "--pattern": pattern, "--base": bases, "--feature": features}
    if len(files) == 1 and not bases and not features and reader is None and kind != "parity":
        if _is_log(files[0]):
            raise SpecError(f"{files[0]} alone cannot be judged: name base and feature logs and their --reader")
        _refuse(given, "a run is judged by its own spec")
        return _again(files[0], contract)
    if kind == "parity":
        _refuse(given, "kind parity reads two files of log-probs, the rollout's and then the trainer's")
        return _parity(files, contract)
    if kind == "performance":
        _refuse({"--metric": metrics}, "kind performance judges step_time, throughput and peak_memory")
    roles = _roles(files, bases, features, 2 if kind == "correctness" else 1)
    if reader is None:
        raise SpecError(f"name the --reader of the logs; {schema.suggestion('', logs.READERS)}")
    if reader not in logs.READERS:
        raise SpecError(f"unknown reader {reader!r}; {schema.suggestion(reader, logs.READERS)}")
    if kind == "correctness" and not metrics and not logs.READERS[reader].metrics:
        raise SpecError(f"reader {reader} has no usual metrics; name them with --metric")
    return pipeline.judge_logs(
        pipeline.Source(
            kind=kind,
            files=roles,
            reader=reader,
            pattern=pattern,
            metrics=tuple(dict.fromkeys(metrics)),
            contract=contract,
        )
    )


def _refuse(options: Mapping[str, object], why: str) -> None:
    """An option that would be ignored is a mistake."""
    for name, value in options.items():
        if value:
            raise SpecError(f"{name} has no meaning here: {why}; leave it out")


def _is_log(path: Path) -> bool:
    return path.is_file() and path.suffix != ".json"


def _again(path: Path, contract: str | None) -> dict[str, Any]:
    """Judge a run again, or the logs that a report names."""
    if path.is_file() and not (path.parent / "plan.json").is_file():
        return _from_report(path, contract)
    return pipeline.rejudge(runs.find(runs.root(Path.cwd()), str(path)), contract)


def _from_report(path: Path, contract: str | None) -> dict[str, Any]:
    made = runs.given(path, "report")
    source, run = made.get("source"), made["run"]
    if source is None:
        if run and (Path(run["folder"]) / "plan.json").is_file():
            return pipeline.rejudge(runs.find(Path.cwd(), run["folder"]), contract)
        lost = f"the run folder {run['folder']} that it names is not here" if run else "it names neither run nor logs"
        raise SpecError(f"{path}: {lost}, so nothing can be judged again")
    files = []
    for arm in made["arms"]:
        log = Path(arm["log"] or "")
        if not log.is_file():
            raise SpecError(f"{path}: {log}, the log of {arm['name']}, is not here any more")
        if pipeline.digest(log) != arm["log_digest"]:
            raise SpecError(f"{path}: {log}, the log of {arm['name']}, is not what was judged: its digest differs")
        files.append((arm["role"], log))
    return pipeline.judge_logs(
        pipeline.Source(
            kind=made["kind"],
            files=tuple(files),
            reader=source["reader"],
            pattern=source["pattern"],
            metrics=tuple(source["metrics"]),
            contract=contract or source["contract"],
        )
    )


def _parity(files: Sequence[Path], contract: str | None) -> dict[str, Any]:
    if len(files) != 2:
        raise SpecError(f"--kind parity takes two files, the rollout's and then the trainer's, not {len(files)}")
    _distinct(files)
    sides = (("rollout", files[0].absolute()), ("train", files[1].absolute()))
    return pipeline.judge_logs(pipeline.Source(kind="parity", files=sides, reader="", contract=contract))


def _roles(
    files: Sequence[Path], bases: Sequence[Path], features: Sequence[Path], least: int
) -> tuple[tuple[str, Path], ...]:
    by_name = sorted(files, key=lambda path: path.name)
    base = [*bases, *(path for path in by_name if path.stem.startswith("base"))]
    feature = [*features, *(path for path in by_name if path.stem.startswith("feat"))]
    loose = [path for path in files if path not in base and path not in feature]
    if loose:
        raise SpecError(f"{loose[0]}: base or feature? name it base… or feat…, or say --base FILE or --feature FILE")
    _distinct([*base, *feature])
    if len(base) < least or not feature:
        wanted = "two base logs (their difference is the floor)" if least == 2 else "a base log"
        here = f"{len(base)} base and {len(feature)} feature logs"
        raise SpecError(f"{wanted} and a feature log are needed, here are {here}")
    return (*(("base", path.absolute()) for path in base), *(("feature", path.absolute()) for path in feature))


def _distinct(paths: Sequence[Path]) -> None:
    for path in paths:
        if not path.is_file():
            raise SpecError(f"{path} is a folder, name the file in it" if path.is_dir() else f"there is no file {path}")
    resolved = [path.resolve() for path in paths]
    for path in paths:
        if resolved.count(path.resolve()) > 1:
            raise SpecError(f"{path} stands twice: a file compared with itself proves nothing")
