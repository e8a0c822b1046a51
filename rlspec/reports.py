"""The report of a run, as `schemas/report.schema.json` describes it."""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import rlspec
from rlspec import contract as contracts
from rlspec import measurements, plan, runs, verdicts, workloads
from rlspec.checks import chain, operators
from rlspec.errors import BLOCKED, ERROR, FAIL, INVESTIGATE, OK, RunError
from rlspec.model import Expect, Result, Row, Spec, Status, Step, Verdict

_TIMED = ("base", ("feature", "difference_percent", "figure", "interval", "medians", "steps"))
TOGETHER: Mapping[str, tuple[str, tuple[str, ...]]] = {  # judgment -> a figure of it, and those that stand beside it
    "drift": ("envelope", ("floor", "base_runs")),
    **dict.fromkeys(("step_time", "throughput", "peak_memory"), _TIMED),
}
CACHES = ("_CACHE_DIR", "_CACHE_PATH", "_CACHE_ROOT")  # how variables end that name the place of a cache


def now() -> str:
    """The time in UTC, as reports and plans hold it."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def digest(path: Path) -> str:
    """SHA-256 of a file, of a folder that of the names and contents of its files."""
    made = hashlib.sha256()
    if path.is_dir():
        for inner in sorted(path.rglob("*")):
            if inner.is_file():
                made.update(f"{inner.relative_to(path)}\0{digest(inner)}\0".encode())
        return made.hexdigest()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            made.update(block)
    return made.hexdigest()


def build(
    spec: Spec,
    contract: contracts.Contract,
    steps: Sequence[Step],
    states: Mapping[str, Mapping[str, Any]],
    made: Sequence[Verdict],
    folder: runs.Folder | None,
    results: Sequence[Result] = (),
    arms: Sequence[Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """The report, as `schemas/report.schema.json` describes it. `arms`: of an earlier report, instead of the steps."""
    statuses = [verdict.status for verdict in made]
    report: dict[str, Any] = {
        "schema_version": 1,
        "rlspec": rlspec.__version__,
        "created": now(),
        "kind": spec.kind,
        "name": spec.name,
        "question": spec.question,
        "outcome": verdicts.worst(statuses),
        "exit_code": verdicts.exit_code(statuses),
        "expect": None,
        "spec": {"path": str(spec.path), "digest": spec.digest} if spec.digest else None,
        "contract": {"name": contract.name, "digest": contract.digest},
        "model": spec.model or None,
        "tag": plan.tag(spec) or None,
        "dtype": spec.dtype,
        "mesh": {axis: getattr(spec.mesh, axis) for axis in ("pp", "dp", "cp", "ep")} if spec.trainer else None,
        "sequence_length": spec.sequence_length if spec.trainer else None,
        "run": {"name": folder.name, "folder": str(folder.workspace)} if folder else None,
        "overrides": [],
        "arms": arms if arms is not None else [_arm_report(step, states.get(step.arm.name)) for step in steps],
        "verdicts": [_verdict_report(verdict) for verdict in made],
        "counts": {"judged": sum(s not in ("ERROR", "BLOCKED") for s in statuses), "expected": len(statuses)},
        "notes": _remarks(steps, states),
    }
    if spec.workload:
        report |= _measured(spec, contract, results)
        report["notes"] += chain.remarks(spec) if spec.chain else []
        report["seal"] = measurements.seal(report)
    return expected(spec, report)


def unedited(path: Path, report: Mapping[str, Any]) -> None:
    """Raise RunError if a report does not agree with itself: outcome, exit code and verdicts, seal and numbers."""
    statuses = [one["status"] for one in report["verdicts"]]
    if report["outcome"] != verdicts.worst(statuses):
        raise RunError(f"{path} has been edited since: its outcome {report['outcome']} is not that of its verdicts")
    expect = report["expect"]
    if expect is not None and expect["met"] and (expect["problems"] or expect["status"] != report["outcome"]):
        raise RunError(f"{path} has been edited since: its outcome is not the one that `expect` says it has met")
    if report["exit_code"] not in _exit_codes(statuses, expect):
        raise RunError(f"{path} has been edited since: its exit code {report['exit_code']} is not that of its verdicts")
    for one in report["verdicts"]:
        first, others = TOGETHER.get(one["judgment"], ("", ()))
        if one["evidence"].get(first) is not None and (
            gone := [name for name in others if name not in one["evidence"]]
        ):
            raise RunError(f"{path} has been edited since: {one['judgment']} has a figure {first}, but no {gone[0]}")
    if "seal" in report:
        sealed(path, report)


def _exit_codes(statuses: Sequence[Status], expect: Mapping[str, Any] | None) -> set[int]:
    """What a run with these verdicts may have exited with; options allow INVESTIGATE and BLOCKED."""
    code = verdicts.exit_code(statuses)
    if expect is not None:
        code = _held(code, met=expect["met"])
    return {code, OK} if code in (INVESTIGATE, BLOCKED) else {code}


def sealed(path: Path, report: Mapping[str, Any]) -> None:
    """Raise RunError unless the seal is that of all that the verdicts are derived from."""
    if measurements.seal(report) != report["seal"]:
        raise RunError(f"{path} has been edited since: its seal is not that of the measurements and limits in it")


def _measured(spec: Spec, contract: contracts.Contract, results: Sequence[Result]) -> dict[str, Any]:
    """All that the verdicts of cells can be derived from again, and a seal over what was measured."""
    measured, load = {result.arm.name: result.measured for result in results}, spec.workload
    return {
        "spec": {"path": str(spec.path), "digest": spec.digest, "data": dict(spec.data)},
        "contract": contracts.whole(contract),
        "workload": {"name": load["name"], "digest": workloads.digest(load), "data": dict(load)},
        **({"chain": dict(spec.chain)} if spec.chain else {"operators": list(operators.chosen(spec))}),
        "measured": measured,
    }


def _remarks(steps: Sequence[Step], states: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What to know before believing any verdict: arms that are the same, settings that differ undeclared."""
    said = []
    bases = {_content(step): step.arm.name for step in reversed(steps) if step.arm.role == "base" and step.argv}
    for step in steps:
        base = bases.get(_content(step))
        if step.arm.role == "feature" and step.argv and base is not None:
            where = f" at commit {step.commit[:12]}" if step.commit else ""
            said.append(f"{step.arm.name} runs what {base} runs{where}: this compares the code with itself")
    seen = {step.arm.name: (states.get(step.arm.name) or {}).get("observed") for step in steps}
    surroundings = {step.arm.name: _undeclared(one, step, steps) for step in steps if (one := seen[step.arm.name])}
    names = sorted({key for values in surroundings.values() for key in values})
    for key in names:
        values = {name: surroundings[name].get(key, "unset") for name in surroundings}
        said += _differing(key, values)
    versions = {name: one.get("versions") or {} for name, one in seen.items() if one}
    for package in sorted({package for found in versions.values() for package in found}):
        values = {name: str(found[package]) for name, found in versions.items() if package in found}
        said += _differing(package, values)
    return said


def _differing(what: str, values: Mapping[str, str]) -> list[str]:
    if len(set(values.values())) < 2:
        return []
    return [f"{what} differed: {', '.join(f'{name} {value}' for name, value in values.items())}"]


def _content(step: Step) -> str:
    arm = step.arm
    return repr((step.commit, arm.implementation, sorted(arm.environment.items()), arm.perturb, arm.command))


def _undeclared(observed: Mapping[str, Any], own: Step, steps: Sequence[Step]) -> dict[str, str]:
    """Determinism-relevant variables that an arm saw and that no arm's `environment` declares.

    One that names a file of the arm itself, such as where NCCL dumps its traces, must differ and is left out, and so is
    the place of a cache, which torch sets by itself once it compiles.
    """
    left_out = {key for step in steps for key in step.arm.environment}
    found = {key: str(value) for key, value in (observed.get("environment") or {}).items()}
    left_out |= {key for key, value in found.items() if key.endswith(CACHES) or own.stem in value}
    return {key: value for key, value in found.items() if key not in left_out}


def _arm_report(step: Step, state: Mapping[str, Any] | None) -> dict[str, Any]:
    state = state or {"status": "skipped", "reason": "it has not run"}
    reused = state.get("reused_from")
    return {
        "name": step.arm.name,
        "role": step.arm.role,
        "status": "reused" if reused and state["status"] == "done" else state["status"],
        "revision": step.arm.revision,
        "commit": step.commit or state.get("commit"),
        "seconds": state.get("seconds"),
        "steps": state.get("steps"),
        "log": state.get("log") or (str(step.records) if step.arm.records else None),
        "log_digest": state.get("log_digest"),
        "reason": state.get("reason"),
        "tail": list(state.get("tail") or ()),
        "provenance": state.get("observed"),
    }


def _verdict_report(verdict: Verdict) -> dict[str, Any]:
    return {
        "judgment": verdict.judgment,
        "subject": verdict.subject,
        "status": verdict.status,
        "statistic": verdict.statistic,
        "reason": verdict.reason,
        "row": contracts.plain(verdict.row) if isinstance(verdict.row, Row) else None,
        "evidence": dict(verdict.evidence),
        "notes": list(verdict.notes),
    }


def _elsewhere(want: Expect, report: Mapping[str, Any]) -> list[str]:
    """What is wrong with where the verdicts of the expected status say that two runs part."""
    assert want.at is not None
    found = [v["evidence"].get("first_divergence") for v in report["verdicts"] if v["status"] == want.status]
    places = [{key: one[key] for key in want.at} for one in found if one]
    due = ", ".join(f"{key} {value}" for key, value in want.at.items())
    if not places:
        return [f"expected a divergence at {due}, and no verdict names one"]
    wrong = [place for place in places if place != dict(want.at)]
    named = ", ".join(f"{key} {value}" for key, value in wrong[0].items()) if wrong else ""
    return [f"expected the divergence at {due}, got {named}"] if wrong else []


def expected(spec: Spec, report: dict[str, Any]) -> dict[str, Any]:
    """Hold the outcome against `expect:`; met is exit 0, not met 1, an unexpected ERROR or BLOCKED keeps its code."""
    want = spec.expect
    if want is None:
        return report
    problems = []
    if report["outcome"] != want.status:
        problems.append(f"expected {want.status}, got {report['outcome']}")
    for name, status in want.judgments.items():
        found = [v["status"] for v in report["verdicts"] if name in (v["subject"], v["judgment"])]
        if not found or verdicts.worst(found) != status:
            problems.append(f"{name}: expected {status}, got {verdicts.worst(found) if found else 'no verdict'}")
    for arm in report["arms"] if want.judgments else ():
        if arm["status"] in ("failed", "skipped"):  # no judgment that is named has been made
            problems.append(f"arm {arm['name']} {arm['status']}: {arm['reason']}")
    if want.category is not None:
        seen = {str(v["evidence"].get("category")) for v in report["verdicts"] if v["status"] == want.status}
        if seen != {want.category}:
            problems.append(f"expected the category {want.category}, got {', '.join(sorted(seen)) or 'none'}")
    if want.at is not None:
        problems += _elsewhere(want, report)
    report["expect"] = {"status": want.status, "met": not problems, "problems": problems}
    report["exit_code"] = _held(report["exit_code"], met=not problems)
    return report


def _held(code: int, *, met: bool) -> int:
    return OK if met else code if code in (ERROR, BLOCKED) else FAIL
