"""What the arms of a chain spec measured, as plain data: read from records.jsonl or a report, and checked for form."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlspec.errors import RunError
from rlspec.measurements import ACCURACY, formed, lines

SCHEMA_VERSION = 1
Types = tuple[type, ...]
_TEXT: Types = (str,)
_MAYBE_TEXT: Types = (str, type(None))
_WHOLE: Types = (int,)
_NUMBER: Types = (int, float, str)
_SECONDS: Types = (int, float)
_MAYBE: Types = (int, float, type(None))
_FORMS: Mapping[str, Mapping[str, Types]] = {
    "run": {
        "schema_version": _WHOLE, "arm": _TEXT, "kind": _TEXT, "environment": (dict,), "implementation": (str, dict),
        "profile": _TEXT, "dtype": _TEXT, "fingerprint": _TEXT, "blocked": _MAYBE_TEXT, "cells": (dict,),
        "parameters": _WHOLE, "estimate_gib": _SECONDS, "faulty": _MAYBE_TEXT,
    },
    "weights": {"source": _TEXT, "seed": (int, type(None)), "path": _MAYBE_TEXT, "pinned": (bool,), "digest": _TEXT},
    "phase": {"name": _TEXT, "seconds": _SECONDS, "peak_gib": _MAYBE, "error": (dict, type(None))},
    "cell": {
        "name": _TEXT, "layout": _TEXT, "chunk": _WHOLE, "seconds": _SECONDS, "calls": _WHOLE, "loss": _NUMBER,
        "summed_by_autograd": _WHOLE, "digest": _TEXT,
    },
    "logprobs": {"execution": _TEXT, "values": (list,), "digest": _TEXT},
    "execution": {"name": _TEXT, "calls": (list,)},
    "trace": {
        "judgment": _TEXT, "configuration": _TEXT, "nodes": _WHOLE, "differing": _WHOLE, "first": (dict, type(None)),
        "depth": (list,),
    },
    "depth": {"configuration": _TEXT, "probes": _WHOLE, "nodes": (list,)},
    "operator": {
        "operator": _TEXT, "implementation": _TEXT, "backend": _MAYBE_TEXT, "calls": _WHOLE, "dtypes": (list,),
        "seen": (dict,),
    },
    "profile": {"profiled": (list, type(None))},
    "kernels": {"triton": (list,), "native": (list,), "weights": _MAYBE_TEXT},
    "comparison": {
        "judgment": _TEXT, "configuration": _TEXT, "tensor": _TEXT, "against": _TEXT, "shape": (list,), "dtype": _TEXT,
        "against_dtype": _TEXT, "elements": _WHOLE, "limits": (dict, type(None)), "digest": _TEXT,
        "against_digest": _TEXT, "first": (dict, type(None)),
    },
}  # fmt: skip
_OPTIONAL: Mapping[str, Types] = {"yardstick": (dict,), "differing": (int, type(None)), "dlogp": (list,), **ACCURACY}
_CONFIG: Mapping[str, Types] = {"config": _MAYBE_TEXT}  # SHA-256 of the config.json beside files of weights
_ROUTES: Mapping[str, Types] = {"routes": (dict,)}  # of a mixture of experts; older records have none
_ROUTED: Mapping[str, Types] = {
    "choices": _WHOLE, "tokens": _WHOLE, "of": _WHOLE, "wrong": _WHOLE, "widest": _NUMBER,
}  # fmt: skip
# Of records whose lines tell which calls a decoder met; a report may be of an rlspec that did not.
CALLS = "calls_seen"
_MORE: Mapping[str, Mapping[str, Types]] = {
    "depth": _ROUTES, "weights": _CONFIG, "run": {CALLS: (bool,), "backward": (bool,)}, "cell": {"ran": (list,)},
    "trace": {"apart": (list,)}, "comparison": _OPTIONAL,
}  # fmt: skip
_LISTS = {  # records of which there are many -> where an arm has them
    "phase": "phases", "cell": "cells", "logprobs": "logprobs", "trace": "traces", "operator": "operators",
    "comparison": "comparisons", "execution": "executions",
}  # fmt: skip
_SINGLE = ("run", "weights", "depth", "profile", "kernels")
_LATER = ("executions",)
_NAMES = {"phases": "name", "cells": "name", "logprobs": "execution", "operators": "operator", "executions": "name"}


def read(path: Path, arm: str) -> dict[str, Any]:
    """What an arm measured, with `environment` and lists of lines. Raises RunError with the line."""
    found: dict[str, Any] = {name: [] for name in _LISTS.values()} | dict.fromkeys(_SINGLE)
    ended = False
    for number, line in lines(path):
        place, kind = f"{path}:{number}", line.pop("record", None)
        if (number == 1) != (kind == "run") or ended:
            raise RunError(f"{place}: a {kind!r} line is not due here")
        if kind == "end":
            ended = line.get("lines") == number - 1
            if not ended:
                raise RunError(f"{place}: {number - 1} lines are here, the end counts {line.get('lines')}")
        elif kind in _SINGLE:
            if found[kind] is not None:
                raise RunError(f"{place}: a second {kind!r} line")
            found[kind] = line
        elif kind in _LISTS:
            found[_LISTS[kind]].append(line)
        else:
            raise RunError(f"{place}: unknown record {kind!r}")
    if not ended:
        raise RunError(f"{path}: the records break off: the process left early, with exit code 0")
    if (found["run"]["schema_version"], found["run"].get("arm")) != (SCHEMA_VERSION, arm):
        raise RunError(f"{path}: the records of arm {found['run'].get('arm')!r}, not of {arm}, or of another version")
    _check(str(path), found)
    return found


def check(path: Path, measured: Mapping[str, Any]) -> None:
    """Raises RunError where what a report holds of its arms has not the form that `read` gives."""
    for name, arm in measured.items():
        if arm is not None:
            always = [one for one in _LISTS.values() if one not in _LATER]
            formed(f"{path}: arm {name}", arm, {**dict.fromkeys(always, (list,)),
                                                **dict.fromkeys(_SINGLE, (dict, type(None)))},
                   dict.fromkeys(_LATER, (list,)))  # fmt: skip
            _check(f"{path}: arm {name}", arm)


def _check(place: str, arm: Mapping[str, Any]) -> None:
    if arm["run"] is None:
        raise RunError(f"{place}: no line says what ran")
    for kind in _SINGLE:
        if arm[kind] is not None:
            formed(f"{place}, {kind}", arm[kind], _FORMS[kind], _MORE.get(kind, {}))
    if (arm["depth"] or {}).get("routes"):
        formed(f"{place}, routes", arm["depth"]["routes"], _ROUTED)
    formed(f"{place}, environment", arm["run"]["environment"],
           {"device": _TEXT, "tf32": (bool,), "autocast": (bool,)}, None)  # fmt: skip
    for kind, name in _LISTS.items():
        for number, line in enumerate(arm.get(name, ())):
            if not isinstance(line, dict):
                raise RunError(f"{place}, {kind} {number}: no JSON object")
            formed(f"{place}, {kind} {number}", line, _FORMS[kind], _MORE.get(kind, {}))
    for name, key in _NAMES.items():
        said = [line[key] for line in arm.get(name, ())]
        if twice := [one for one in said if said.count(one) > 1]:
            raise RunError(f"{place}: two lines of {name} for {twice[0]}")
    for one in arm["phases"]:
        if one["error"] is not None:
            formed(f"{place}, phase", one["error"], {"message": _TEXT, "tail": (list,), "no_backward": (bool,)})
    for one in arm["logprobs"]:
        if not all(isinstance(v, float) or v in ("nan", "inf", "-inf") or type(v) is int for v in one["values"]):
            raise RunError(f"{place}, log-probs of {one['execution']}: what is no number stands there")
