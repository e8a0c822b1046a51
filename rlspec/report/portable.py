"""A report as evidence for others: every number of it, and no path, host or environment of the machine that made it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from rlspec.surroundings import UNDECLARED

OBSERVED = ("commit", "dirty", "run_file_digest", "processes", "ranks", "world_size", "versions", "device", "flags")
MACHINE = ("arch", "os", "cpu", "driver")


def portable(report: Mapping[str, Any]) -> dict[str, Any]:
    """The report without what tells of one machine alone; what its verdicts are derived from stays as it is."""
    spec = report["spec"]
    return {
        **report,
        "spec": spec and {**spec, "path": _name(spec["path"]) if spec["path"].startswith("/") else spec["path"]},
        "run": None,
        "overrides": [_override(text) for text in report["overrides"]],
        "arms": [_arm(arm) for arm in report["arms"]],
        "verdicts": [_verdict(verdict) for verdict in report["verdicts"]],
        "notes": [note.replace(spec["path"], _name(spec["path"])) if spec else note for note in report["notes"]],
    }


def _verdict(verdict: Mapping[str, Any]) -> dict[str, Any]:
    """Without the names of the variables in which the shells of the arms differed."""
    evidence = {key: value for key, value in verdict["evidence"].items() if key != "surroundings"}
    return {**verdict, "notes": [_before_names(note) for note in verdict["notes"]], "evidence": evidence}


def _before_names(note: str) -> str:
    text, found, _ = note.partition(UNDECLARED)
    return text + found


def _override(text: str) -> str:
    """A setting laid over the spec; a path of this machine in it is shortened to its name."""
    key, _, value = text.partition("=")
    return f"{key}={_name(value)}" if value.startswith("/") else text


def _arm(arm: Mapping[str, Any]) -> dict[str, Any]:
    seen = arm["provenance"]
    kept = seen and {name: seen[name] for name in OBSERVED if name in seen}
    if kept and seen.get("machine"):
        kept["machine"] = {name: seen["machine"].get(name) for name in MACHINE}
    return {**arm, "log": arm["log"] and _name(arm["log"]), "tail": [], "provenance": kept}


def _name(path: str) -> str:
    return PurePath(path).name
