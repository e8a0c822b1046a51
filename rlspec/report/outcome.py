"""What a whole report came out as: the status, why, what to do next, and what the exit code means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from rlspec.report import rows
from rlspec.report.text import clean

SHOWN = 4
MEANS = {
    "ERROR": "could not be judged",
    "FAIL": "outside the limits",
    "INVESTIGATE": "to be looked at by a person",
    "BLOCKED": "blocked, since this machine lacks what the spec requires",
}
CAUSES = {
    "zero_envelope": "if the change may not move a bit, set zero_envelope: fail; if it may, add a base arm with "
    "perturb: {weights: 1ulp}, whose drift is a floor",
    "unstable": "give the fixture a learning-rate warm-up, then run again",
    "split_features": "look at the feature run that stands out; do the arms run what you think?",
    "split_bases": "look at the base run that stands out; did it run the same code on the same machine?",
    "spike": "look at the logs around that step; a base run that does the same settles it",
    "late": "train longer: does the difference grow?",
    "resolution": "print the metric with the same digits in all arms, and run again those that have fewer",
    "machine": "run all arms again on the same nodes",
}
SAID = {"PASS": "within the limits", "MEASURED": "measured and not gated", "N/A": "not applicable"}
EXITS = {
    0: "nothing failed",
    1: "a judgment failed",
    3: "a person must look",
    4: "something could not be judged",
    5: "blocked, or nothing was judged",
    130: "interrupted",
    143: "terminated",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """`why` goes on where the status ends, `steps` say what to do, `exit` explains the exit code."""

    status: str
    why: str
    steps: tuple[str, ...]
    exit: str


def of(report: Mapping[str, Any]) -> Outcome:
    """The outcome of a report."""
    return Outcome(status=report["outcome"], why=_why(report), steps=tuple(_steps(report)), exit=_exit(report))


def failed_arms(report: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [arm for arm in report["arms"] if arm["status"] == "failed"]


def report_file(report: Mapping[str, Any]) -> str:
    """Where the JSON report of a run lies; empty for logs that were judged without one."""
    return f"{clean(report['run']['folder'])}/report.json" if report["run"] else ""


def _why(report: Mapping[str, Any]) -> str:
    verdicts, status = report["verdicts"], report["outcome"]
    if report["expect"] is not None:
        return _expected(report["expect"], status)
    if status in MEANS and verdicts:
        same = [verdict for verdict in verdicts if verdict["status"] == status]
        own = {"operator", "configuration"} & set(same[0]["evidence"])
        named = "" if own else f": {_names(same)}"
        return f": {len(same)} of {_judgments(len(verdicts))} {MEANS[status]}{named}"
    count = {one: sum(verdict["status"] == one for verdict in verdicts) for one in SAID}
    said = ", ".join(f"{_judgments(count[one])} {SAID[one]}" for one in SAID if count[one])
    return f": {said or 'nothing was judged'}"


def _expected(expect: Mapping[str, Any], status: str) -> str:
    if expect["met"]:
        return f", as expected: this spec is a control that must come out {clean(expect['status'])}"
    problems = expect["problems"] or [f"expected {expect['status']}, got {status}"]
    return f", not as expected: {'; '.join(map(clean, problems))}"


def _judgments(count: int) -> str:
    return f"{count} judgment{'s' * (count != 1)}"


def _names(verdicts: Sequence[Mapping[str, Any]]) -> str:
    names = [rows.title(verdict) for verdict in verdicts]
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _steps(report: Mapping[str, Any]) -> list[str]:
    expect = report["expect"]
    if expect is not None and expect["met"]:
        return []
    if expect is not None and report["outcome"] not in ("ERROR", "BLOCKED"):
        return ["find out why this control does not do what it is there for"]
    steps = [f"read {clean(arm['log'])} (arm {clean(arm['name'])})" for arm in failed_arms(report) if arm["log"]]
    return steps or _STEPS.get(report["outcome"], _none)(report)


def _error(report: Mapping[str, Any]) -> list[str]:
    logs = [clean(arm["log"]) for arm in report["arms"] if arm["log"]]
    folders = {PurePath(log).parent for log in logs}
    where = f"in {folders.pop()}/" if len(folders) == 1 and PurePath(logs[0]).parent.name else ", ".join(logs)
    return [f"read the reason above; the logs are {where}" if logs else "read the reason above"]


def _fail(report: Mapping[str, Any]) -> list[str]:
    steps = []
    base, feature = (
        {clean(arm["commit"][:7]) for arm in report["arms"] if arm["role"] == role and arm["commit"]}
        for role in ("base", "feature")
    )
    if len(base) == len(feature) == 1 and base != feature:
        steps.append(f"find the change that did it: git log --oneline {base.pop()}..{feature.pop()}")
    if apart := {name for verdict in report["verdicts"] for name in verdict["evidence"].get("surroundings", ())}:
        named = ", ".join(map(clean, sorted(apart)[:SHOWN]))
        steps.append(f"run all arms again in one environment before you blame the code; now they differ in {named}")
    return steps or ["read the reasons above; -v prints every figure"]


def _investigate(report: Mapping[str, Any]) -> list[str]:
    causes = {verdict["evidence"].get("cause") for verdict in report["verdicts"] if verdict["status"] == "INVESTIGATE"}
    cause = causes.pop() if len(causes) == 1 else ""
    if cause == "grey_band":
        more = "raise max_base_runs" if report["run"] else "judge again with one more base log"
        return [f"{more}: another base run may settle it"]
    return [CAUSES.get(str(cause), "read the reasons above and decide; --investigate-ok makes this exit 0")]


def _blocked(report: Mapping[str, Any]) -> list[str]:
    return ["run it where the requirement is met; --blocked-ok makes this exit 0"] if report["verdicts"] else []


def _none(report: Mapping[str, Any]) -> list[str]:
    return []


def _exit(report: Mapping[str, Any]) -> str:
    code = report["exit_code"]
    meaning = EXITS.get(code, "see the documentation")
    if code == 0 and report["expect"] is not None:
        meaning = "as expected"
    elif code == 0 and report["outcome"] in MEANS:
        meaning = "allowed by an option"
    elif code == 1 and report["expect"] is not None:
        meaning = "not as expected"
    return f"exit {code}: {meaning}"


_STEPS = {"ERROR": _error, "FAIL": _fail, "INVESTIGATE": _investigate, "BLOCKED": _blocked}
