"""`rlspec judge`: find out what is to be judged and with which roles, then hand over to the pipeline."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlspec import (
    chain_records,
    chains,
    copies,
    logs,
    measurements,
    nodes,
    pipeline,
    reports,
    resuming,
    reuse,
    runs,
    schema,
    unasked,
    verdicts,
    workloads,
)
from rlspec import contract as contracts
from rlspec.arms import state_of
from rlspec.checks import CHECKS
from rlspec.errors import RunError, SpecError
from rlspec.formats import metrics_of
from rlspec.model import Arm, Document, Result, Spec, Step
from rlspec.reports import build, digest, sealed

MEASURED = ("operators", "chain")  # kinds whose reports hold what their verdicts are derived from
CELLS = {*nodes.JUDGMENTS, *chains.JUDGMENTS, chains.ACROSS}  # their judgments
DERIVED = ("question", "outcome", "expect", "model", "tag", "dtype", "verdicts", "counts")


def judge(
    *,
    files: Sequence[Path],
    reader: str | None,
    kind: str | None,
    metrics: Sequence[str],
    pattern: str | None,
    contract: str | None,
    bases: Sequence[Path],
    features: Sequence[Path],
) -> dict[str, Any]:
    """The report on logs, on a run or on a report.json. Raises SpecError or RunError."""
    kind_given, kind = kind, kind or "correctness"
    if not files and not bases and not features:
        raise SpecError("nothing to judge: name logs, or a run")
    given = {"--reader": reader, "--metric": metrics, "--pattern": pattern, "--base": bases, "--feature": features}
    if len(files) == 1 and not bases and not features and reader is None and kind != "parity":
        if _is_log(files[0]):
            raise SpecError(f"{files[0]} alone cannot be judged: name base and feature logs and their --reader")
        _refuse({**given, "--kind": kind_given}, "a run is judged by its own spec")
        return _again(files[0], contract)
    if kind == "parity":
        _refuse(given, "kind parity reads two files of log-probs, the rollout's and then the trainer's")
        return _parity(files, contract)
    if kind == "performance":
        _refuse({"--metric": metrics}, "kind performance judges step_time, throughput and peak_memory")
    folders = reader in logs.READERS and logs.READERS[reader].folders
    roles = _roles(files, bases, features, 2 if kind == "correctness" else 1, folders)
    if reader is None:
        raise SpecError(f"name the --reader of the logs; {schema.suggestion('', logs.READERS)}")
    if reader not in logs.READERS:
        raise SpecError(f"unknown reader {reader!r}; {schema.suggestion(reader, logs.READERS)}")
    if reader == "regex" and pattern and not metrics:
        metrics = metrics_of(pattern)
    if kind == "correctness" and not metrics and not logs.READERS[reader].metrics:
        raise SpecError(f"reader {reader} has no usual metrics; name them with --metric")
    return judge_logs(
        Source(
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
    return path.is_file() and not path.name.endswith((".json", ".json.gz"))


def _again(path: Path, contract: str | None) -> dict[str, Any]:
    """Judge a run again, or the logs that a report names."""
    if path.is_file() and not (path.parent / "plan.json").is_file():
        return _from_report(path, contract)
    return rejudge(runs.find(runs.root(Path.cwd()), str(path)), contract)


def _from_report(path: Path, contract: str | None) -> dict[str, Any]:
    made = runs.given(path, "report")
    source, run = made.get("source"), made["run"]
    if made.get("measured") or made.get("seal"):
        return _from_measured(path, made, contract)
    if source is None:
        if run and (Path(run["folder"]) / "plan.json").is_file():
            return rejudge(runs.find(Path.cwd(), run["folder"]), contract)
        lost = f"the run folder {run['folder']} that it names is not here" if run else "it names neither run nor logs"
        raise SpecError(f"{path}: {lost}, so nothing can be judged again")
    files = []
    for arm in made["arms"]:
        log = Path(arm["log"] or "")
        if not arm["log"] or not log.exists():
            raise SpecError(f"{path}: {log}, the log of {arm['name']}, is not here any more")
        if digest(log) != arm["log_digest"]:
            raise SpecError(f"{path}: {log}, the log of {arm['name']}, is not what was judged: its digest differs")
        files.append((arm["role"], log))
    return judge_logs(
        Source(
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
    return judge_logs(Source(kind="parity", files=sides, reader="", contract=contract))


def _roles(
    files: Sequence[Path], bases: Sequence[Path], features: Sequence[Path], least: int, folders: bool
) -> tuple[tuple[str, Path], ...]:
    by_name = sorted(files, key=lambda path: path.name)
    base = [*bases, *(path for path in by_name if path.stem.startswith("base"))]
    feature = [*features, *(path for path in by_name if path.stem.startswith("feat"))]
    for path in files:
        if not path.exists():
            raise SpecError(f"there is no file {path}")
    loose = [path for path in files if path not in base and path not in feature]
    if loose:
        raise SpecError(f"{loose[0]}: base or feature? name it base… or feat…, or say --base FILE or --feature FILE")
    _distinct([*base, *feature], folders)
    if len(base) < least or not feature:
        wanted = "two base logs (their difference is the floor)" if least == 2 else "a base log"
        here = f"{len(base)} base and {len(feature)} feature logs"
        raise SpecError(f"{wanted} and a feature log are needed, here are {here}")
    return (*(("base", path.absolute()) for path in base), *(("feature", path.absolute()) for path in feature))


def _distinct(paths: Sequence[Path], folders: bool = False) -> None:
    for path in paths:
        if not (path.is_file() or (folders and path.is_dir())):
            raise SpecError(f"{path} is a folder, name the file in it" if path.is_dir() else f"there is no file {path}")
    inodes = [_inodes(path) for path in paths]
    for path, mine in zip(paths, inodes, strict=True):
        if sum(not mine.isdisjoint(other) for other in inodes) > 1:
            raise SpecError(f"{path} stands twice: a file compared with itself proves nothing")


def _inodes(path: Path) -> set[tuple[int, int]]:
    """What tells a file, or the files of a folder, whatever their names are."""
    files = [path] if path.is_file() else [path, *path.rglob("*")]
    return {(file.stat().st_dev, file.stat().st_ino) for file in files}


def rejudge(folder: runs.Folder, contract_name: str | None = None) -> dict[str, Any]:
    """Judge a finished run again from its records. Raises SpecError or RunError."""
    planned = runs.load(folder.plan, "plan")
    if planned.get("seal", due := runs.seal(planned)) != due:
        raise RunError(f"{folder.plan} has been edited since: its seal is not the digest of what stands in it")
    seen = {**planned["spec"], "path": str(runs.spec_of(folder, planned))}
    spec = resuming.with_added(_planned_spec({**planned, "spec": seen}), planned)
    contract = _planned_contract(folder.plan, planned, contract_name)
    steps = CHECKS[spec.kind].expand(spec, folder.workspace, folder.logging)
    by_name = {arm["name"]: arm for arm in planned["arms"]}
    states: dict[str, dict[str, Any]] = {}
    for step in steps:
        if step.provenance.exists():
            states[step.arm.name] = reuse.seen_here(folder, runs.load(step.provenance))
            _untouched(step, states[step.arm.name])
        elif not step.argv:
            states[step.arm.name] = state_of(step, "done")
    steps = tuple(dataclasses.replace(s, commit=by_name[s.arm.name].get("commit")) for s in steps)
    results = pipeline.results_of(spec, steps, states) if spec.workload else ()
    _asked_for(folder.plan, spec, results)
    made = pipeline.judge_states(spec, contract, steps, states)
    report = build(spec, contract, steps, states, made, folder, results)
    report["overrides"] = planned.get("overrides", [])
    if "seal" not in planned:
        report["notes"].append("the plan has no seal, as those of an older rlspec: an edit of it would not be seen")
    return report


def _asked_for(path: Path, spec: Spec, results: Sequence[Result]) -> None:
    """Raise RunError where an arm measured what is not asked for: else what failed could be left out."""
    for result in results:
        if result.measured is not None and (more := unasked.first(spec, result.measured)):
            said = f"arm {result.arm.name} measured {more}, which it does not ask for"
            raise RunError(f"{path} has been edited since: {said}")


def _planned_spec(planned: Mapping[str, Any]) -> Spec:
    """The spec of a plan or report, with the workload and the operators that it had then."""
    given, data = planned["spec"], dict(planned["spec"]["data"])
    if planned.get("workload"):
        workload = planned["workload"]
        data |= {"workload": workload.get("data", workload)}
        data |= {name: planned[name] for name in ("operators", "chain") if planned.get(name)}
    document = Document(path=Path(given["path"]), data=data, keys={}, values={}, digest=given["digest"])
    return CHECKS[planned["kind"]].parse(document)


def _planned_contract(path: Path, planned: Mapping[str, Any], name: str | None) -> contracts.Contract:
    if name:
        return contracts.load(name, Path.cwd())
    given = planned["contract"]
    contract = contracts.from_rows(given["name"], given["rows"], given.get("cannot_fail", "note"))
    if contract.digest != given["digest"]:
        raise RunError(f"{path}: the contract's rows do not have the digest that stands beside them")
    return contract


def _from_measured(path: Path, given: dict[str, Any], contract_name: str | None) -> dict[str, Any]:
    """Judge the cells of a report again, from the numbers in it. Raises RunError if they were touched."""
    _holds(path, given, "measured")
    (chain_records if given["kind"] == "chain" else measurements).check(path, given["measured"])
    spec, contract = _planned_spec(given), _planned_contract(path, given, contract_name)
    names = [arm.name for arm in spec.arms]
    if [arm["name"] for arm in given["arms"]] != names or not given["measured"].keys() <= set(names):
        raise RunError(f"{path} has been edited since: its arms are not those of its spec")
    reasons = {arm["name"]: arm["reason"] for arm in given["arms"]}
    results = [
        Result(arm=arm, records=path, measured=given["measured"].get(arm.name), failure=reasons.get(arm.name))
        for arm in spec.arms
    ]
    _asked_for(path, spec, results)
    made = CHECKS[spec.kind].judge(spec, results, contract)
    report = build(spec, contract, (), {}, made, None, results, given["arms"])
    report |= {key: given[key] for key in ("overrides", "spec")}
    report["seal"] = measurements.seal(report)
    if _said(given) != _said(report):
        report["notes"].append(f"the verdicts are not those that stand in {path}")
    return report


def _holds(path: Path, given: Mapping[str, Any], *more: str) -> None:
    """Raise RunError unless a report holds, as it was written, what its verdicts are derived from."""
    needed = ("seal", "workload", given["kind"], "contract", "spec", *more)
    if any(not given.get(name) for name in needed) or "data" not in given["spec"] or "rows" not in given["contract"]:
        raise RunError(f"{path} has been edited since: it does not hold all that its verdicts are derived from")
    sealed(path, given)
    workload = given["workload"]
    if workloads.digest(workload["data"]) != workload["digest"]:
        raise RunError(f"{path}: the workload has been edited since: it does not have the digest beside it")


def _said(report: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    return [(one["judgment"], one["subject"], one["status"]) for one in report["verdicts"]]


def unedited(path: Path, report: dict[str, Any]) -> dict[str, Any]:
    """The report, to be printed; in the words of today where its measurements give them.

    Raises RunError if it does not agree with itself, or says other verdicts than its measurements give.
    """
    reports.unedited(path, report)
    named = {one["judgment"] for one in report["verdicts"]}
    if (
        report["kind"] not in MEASURED
        and named.isdisjoint(CELLS)
        and not (report.get("measured") or report.get("seal"))
    ):
        if _is_blocked(report) or not _has_records(path.parent, report):
            return report
        derived = rejudge(runs.find(runs.root(Path.cwd()), str(path.parent)))
    else:
        derived = _not_run(path, report) if _is_blocked(report) else _from_measured(path, report, None)
    _agree(path, report, derived)
    return _in_words_of(derived, report)


def _has_records(folder: Path, report: Mapping[str, Any]) -> bool:
    """Whether a report lies in the folder of its run, and what its arms recorded is there, or in the spec's files."""
    given = [Path(arm["log"]) for arm in report["arms"] if arm["log"]]
    recorded = any(folder.glob("*.records.jsonl")) or (bool(given) and all(file.is_file() for file in given))
    return recorded and (folder / "plan.json").is_file()


def _agree(path: Path, report: Mapping[str, Any], derived: Mapping[str, Any]) -> None:
    """Raise RunError at the first verdict that is not the derived one, or if `expect` is not."""
    for said, due in itertools.zip_longest(_said(report), _said(derived)):
        if said != due:
            stands, derives = (" ".join(one) if one else "none" for one in (said, due))
            judge = f"`rlspec judge {path}` tells all"
            raise RunError(f"{path}: the verdict {stands} is not what its measurements give, {derives}; {judge}")
    if _expects(report) != _expects(derived):
        raise RunError(f"{path} has been edited since: what it says of `expect` is not what its spec and verdicts give")


def _is_blocked(report: Mapping[str, Any]) -> bool:
    """Whether nothing was measured, for want of what the spec requires."""
    measured = any((report.get("measured") or {}).values())
    return not measured and {one["status"] for one in report["verdicts"]} == {"BLOCKED"}


def _not_run(path: Path, given: dict[str, Any]) -> dict[str, Any]:
    """A report of which nothing ran: its verdicts rest on a machine alone, what is expected of them on its spec."""
    _holds(path, given)
    evidence = {"category": "blocked_hardware"}
    made = [{**one, "statistic": None, "evidence": evidence, "notes": []} for one in given["verdicts"]]
    code = verdicts.exit_code([one["status"] for one in made])
    return reports.expected(_planned_spec(given), {**given, "verdicts": made, "expect": None, "exit_code": code})


def _expects(report: Mapping[str, Any]) -> tuple[str, bool] | None:
    expect = report["expect"]
    return expect and (expect["status"], expect["met"])


def _in_words_of(derived: Mapping[str, Any], report: Mapping[str, Any]) -> dict[str, Any]:
    """The report with all that follows from its seal; that other words stood there is noted."""
    notes, nonfinite = list(report["notes"]), report.get("nonfinite") or {}
    if _words(derived) != _words(report):
        notes.append("reasons and figures are those that the measurements give today; the report says others")
    left = {place: number for place, number in nonfinite.items() if not place.startswith("/verdicts/")}
    return {**report, **{key: derived[key] for key in DERIVED}, "notes": notes, "nonfinite": left}


def _words(report: Mapping[str, Any]) -> list[tuple[str, float | None, list[str]]]:
    """What is told of each verdict; a number that is not finite is none, as in a file."""
    numbers = (one["statistic"] for one in report["verdicts"])
    finite = [number if number is not None and math.isfinite(number) else None for number in numbers]
    said = zip(finite, report["verdicts"], strict=True)
    return [(one["reason"], number, list(one["notes"])) for number, one in said]


def _untouched(step: Step, state: Mapping[str, Any]) -> None:
    wanted = state.get("records_digest")
    if state.get("status") == "done" and wanted and step.records.exists() and digest(step.records) != wanted:
        what = "is not what arm {} wrote" if step.argv else "has changed since arm {} was judged"
        raise RunError(f"{step.records} {what.format(step.arm.name)}: its digest differs from its provenance")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The logs of `rlspec judge`, with their roles."""

    kind: str
    files: tuple[tuple[str, Path], ...]
    reader: str
    pattern: str | None = None
    metrics: tuple[str, ...] = ()
    contract: str | None = None


def judge_logs(source: Source) -> dict[str, Any]:
    """Judge logs that somebody else's launcher left. Raises SpecError."""
    spec = _spec_of(source)
    contract = contracts.load(spec.contract, Path.cwd())
    arms = list(zip(spec.arms, (path for _, path in source.files), strict=True))
    states = {arm.name: {"status": "read", "log": str(path), "log_digest": digest(path)} for arm, path in arms}
    read = {
        arm.name: copies.Read(path, states[arm.name]["log_digest"], source.reader, source.pattern) for arm, path in arms
    }
    results = copies.refused(_read_results(spec, source, arms), read)
    made = CHECKS[spec.kind].judge(spec, results, contract)
    steps = [_no_step(arm, path) for arm, path in arms]
    for result in results:
        if result.run is not None:
            lengths = [len(series.steps) for series in result.run.series.values()]
            states[result.arm.name]["steps"] = max(lengths, default=0)  # type: ignore[assignment]
    report = build(spec, contract, steps, states, made, None)
    report.update(tag=None, mesh=None, sequence_length=None, dtype=None)  # logs do not say
    if not any(result.run and copies.COPY in result.run.faults.get("*", "") for result in results):
        for name, twin in copies.twins(read).items():
            report["notes"].append(f"the logs of {twin} and {name} are the same to the byte: is one a copy?")
    report["source"] = {
        "reader": source.reader,
        "pattern": source.pattern,
        "metrics": list(source.metrics),
        "contract": source.contract,
    }
    return report


def _no_step(arm: Arm, path: Path) -> Step:
    return Step(tag="", arm=arm, argv=(), run_file=None, log=path, records=path, provenance=path)


def _spec_of(source: Source) -> Spec:
    """The spec that logs of unknown origin stand for."""
    counts: dict[str, int] = {}
    arms = []
    for role, path in source.files:
        short = {"base": "base", "feature": "feat"}.get(role, role)
        number = counts[role] = counts.get(role, -1) + 1
        name = short if role in ("rollout", "train") else f"{short}{number}"
        arms.append({"name": name, "role": role, **({"records": str(path)} if source.kind == "parity" else {})})
    data: dict[str, Any] = {"kind": source.kind, "arms": arms}
    if source.contract:
        data["contract"] = source.contract
    if source.kind != "parity":
        reader = {"name": source.reader, **({"pattern": source.pattern} if source.pattern else {})}
        trainer = {"name": "command", "command": ["{python}"], "reader": reader}
        data |= {"mesh": {}, "trainer": trainer}
    if source.metrics and source.kind == "correctness":
        data["judgments"] = [{"check": "drift", "metric": metric} for metric in source.metrics]
    document = Document(path=Path("logs"), data=data, keys={}, values={}, digest="")
    return dataclasses.replace(CHECKS[source.kind].parse(document), name="logs")


def _read_results(spec: Spec, source: Source, arms: Sequence[tuple[Arm, Path]]) -> Iterator[Result]:
    if source.kind == "parity":
        for arm, path in arms:
            yield Result(arm=arm, records=path)
        return
    for arm, path in arms:
        found = logs.read(path, source.reader, arm, metrics=source.metrics, pattern=source.pattern)
        folders = logs.READERS[source.reader].folders
        if not folders and (told := logs.survived(path, found, source.reader, source.pattern)):
            found = dataclasses.replace(found, notes=(*found.notes, told))
        yield Result(arm=arm, records=path, run=found)
