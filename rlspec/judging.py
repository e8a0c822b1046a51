"""`rlspec judge`: find out what is to be judged and with which roles, then hand over to the pipeline."""

from __future__ import annotations

from collections.abc import Sequence
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
    if len(files) == 1 and not bases and not features and reader is None:
        return _again(files[0], contract)
    if kind == "parity":
        return _parity(files, reader, contract)
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


def _again(path: Path, contract: str | None) -> dict[str, Any]:
    """Judge a finished run again, or the logs that a report names."""
    if path.is_file() and path.suffix == ".json" and not (path.parent / "plan.json").is_file():
        return _from_report(path)
    if path.is_file() and path.name not in ("report.json", "plan.json"):
        raise SpecError(f"{path} alone cannot be judged: name base and feature logs and a --reader")
    return pipeline.rejudge(runs.find(runs.root(Path.cwd().resolve()), str(path)), contract)


def _from_report(path: Path) -> dict[str, Any]:
    made = runs.load(path, "report")
    source = made.get("source")
    if source is None:
        run = made.get("run") or {}
        if run and (Path(run["folder"]) / "plan.json").is_file():
            return pipeline.rejudge(runs.find(Path.cwd(), run["folder"]))
        raise SpecError(f"{path}: its run folder {run.get('folder')} is not here any more, so nothing can be re-derived")
    files = []
    for arm in made["arms"]:
        log = Path(arm["log"])
        if not log.is_file():
            raise SpecError(f"{path}: its log {log} is not here any more")
        if pipeline.digest(log) != arm["log_digest"]:
            raise SpecError(f"{path}: {log} has changed since it was judged")
        files.append((arm["role"], log))
    return pipeline.judge_logs(
        pipeline.Source(
            kind=made["kind"],
            files=tuple(files),
            reader=source["reader"],
            pattern=source["pattern"],
            metrics=tuple(source["metrics"]),
            contract=source["contract"],
        )
    )


def _parity(files: Sequence[Path], reader: str | None, contract: str | None) -> dict[str, Any]:
    if len(files) != 2:
        raise SpecError(f"--kind parity takes two files, the rollout's and the trainer's, not {len(files)}")
    for path in files:
        if not path.is_file():
            raise SpecError(f"there is no file {path}")
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
    listed = [*base, *feature]
    for path in listed:
        if not path.is_file():
            raise SpecError(f"there is no file {path}")
    resolved = [path.resolve() for path in listed]
    for path in listed:
        if resolved.count(path.resolve()) > 1:
            raise SpecError(f"{path} stands twice: a log compared with itself proves nothing")
    if len(base) < least or not feature:
        wanted = "two base logs and a feature log" if least == 2 else "a base log and a feature log"
        raise SpecError(f"{wanted} are needed, here are {len(base)} and {len(feature)}")
    return (*(("base", path) for path in base), *(("feature", path) for path in feature))
