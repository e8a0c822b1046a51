"""A report as evidence for others: every number of it, and no path, host or environment of the machine that made it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

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
    }


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
