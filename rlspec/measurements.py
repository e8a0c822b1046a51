"""What the arms of an operator spec measured, as plain data: read from records.jsonl or a report, and checked for form.

`environment` says where an arm ran; a cell (operator and tier) says what ran in it and holds its comparisons.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlspec import workloads
from rlspec.errors import RunError

SCHEMA_VERSION = 1
_NOTHING: dict[str, tuple[type, ...]] = {}
Types = tuple[type, ...]
_TEXT: Types = (str,)
_MAYBE_TEXT: Types = (str, type(None))
_WHOLE: Types = (int,)
_NUMBER: Types = (int, float, str)  # what is not finite stands there as text
_ENVIRONMENT: Mapping[str, Types] = {"device": _TEXT, "tf32": (bool,), "autocast": (bool,)}
_SEEN: Mapping[str, Types] = {
    "triton": (list,),
    "native": (list,),
    "torch": (list,),
    "profiled": (list, type(None)),
    "calls_without_launch": _WHOLE,
}
_CELL: Mapping[str, Types] = {
    "operator": _TEXT,
    "tier": _TEXT,
    "implementation": _TEXT,
    "backend": _MAYBE_TEXT,
    "blocked": _MAYBE_TEXT,
    "no_backward": _MAYBE_TEXT,
    "error": (dict, type(None)),
    "provenance": _MAYBE_TEXT,
    "seen": (dict,),
    "passed_by": (dict,),
    "layouts": (dict,),
}
# Where forwards without gradients and with them part; a report may be of an rlspec that ran one of the two.
_BOTH: Mapping[str, Types] = {"without_gradients": (list,)}
_COMPARISON: Mapping[str, Types] = {
    "operator": _TEXT,
    "tier": _TEXT,
    "judgment": _TEXT,
    "variant": _TEXT,
    "tensor": _TEXT,
    "configuration": _TEXT,
    "against": _TEXT,
    "tokens": _WHOLE,
    "shape": (list,),
    "dtype": _TEXT,
    "against_dtype": _TEXT,
    "elements": _WHOLE,
    "limits": (dict, type(None)),
    "digest": _TEXT,
    "against_digest": _TEXT,
    "first": (dict, type(None)),
}
ACCURACY: Mapping[str, Types] = {
    "nonfinite": _WHOLE,
    "violations": _WHOLE,
    "excess": _NUMBER,
    "max_abs": _NUMBER,
    "rms": _NUMBER,
    "relative_rms": _NUMBER,
    "relative_peak": _NUMBER,
    "cosine": _NUMBER,
    "ulps": (dict,),
}
INVARIANCE: Mapping[str, Types] = {"differing": (int, type(None))}  # None: only the digests are known
_OPTIONAL: Mapping[str, Types] = {"accumulated_by": _TEXT, "yardstick": (dict,), **ACCURACY, **INVARIANCE}


def read(path: Path, arm: str) -> dict[str, Any]:
    """What an arm measured: `environment`, and `cells` with their `comparisons`. Raises RunError with the line."""
    environment: dict[str, Any] | None = None
    cells: list[dict[str, Any]] = []
    waiting: list[dict[str, Any]] = []
    count, ended = 0, False
    for number, line in lines(path):
        place, kind = f"{path}:{number}", line.pop("record", None)
        if (number == 1) != (kind == "run") or ended:
            raise RunError(f"{place}: a {kind!r} line is not due here")
        if kind == "run":
            environment = _environment(place, line, arm)
        elif kind == "comparison":
            waiting.append(formed(place, line, _COMPARISON, _OPTIONAL))
            count += 1
        elif kind == "cell":
            cells.append(
                {**_cell(place, formed(place, line, _BOTH, None)), "comparisons": _of_cell(place, line, waiting)}
            )
            waiting = []
        elif kind == "end":
            ended = (line.get("cells"), line.get("comparisons")) == (len(cells), count)
            if not ended:
                raise RunError(f"{place}: {len(cells)} cells and {count} comparisons are here, the end disagrees")
        else:
            raise RunError(f"{place}: unknown record {kind!r}")
    if environment is None or not ended:
        raise RunError(
            f"{path}: the records break off after {len(cells)} cells: the process left early, with exit code 0"
        )
    return _single(str(path), {"environment": environment, "cells": cells})


def check(path: Path, measured: Mapping[str, Any]) -> None:
    """Raises RunError where what a report holds of its arms has not the form that `read` gives."""
    for name, arm in measured.items():
        if arm is None:
            continue
        place = f"{path}: arm {name}"
        formed(place, arm, {"environment": (dict,), "cells": (list,)})
        formed(place, arm["environment"], _ENVIRONMENT, None)
        for number, cell in enumerate(arm["cells"]):
            at = f"{place}, cell {number}"
            _cell(at, {key: value for key, value in cell.items() if key != "comparisons"})
            for line in _of_cell(at, cell, cell.get("comparisons", [])):
                formed(at, line, _COMPARISON, _OPTIONAL)
        _single(place, arm)


def seal(report: Mapping[str, Any]) -> str:
    """SHA-256 over all that a report's verdicts are derived from, as canonical JSON: any edit breaks it."""
    own = "chain" if report["kind"] == "chain" else "operators"
    basis = {name: report.get(name) for name in ("kind", own, "contract", "workload", "measured")}
    data = (report.get("spec") or {}).get("data")
    return workloads.digest({**basis, "spec": data})


def lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number and content of each line of a records.jsonl. Raises RunError."""
    try:
        texts = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise RunError(f"{path} is no UTF-8 text: {error.reason} at byte {error.start}") from None
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text, parse_constant=_refuse)
        except ValueError as error:
            raise RunError(f"{path}:{number}: no JSON: {error}") from None
        if not isinstance(line, dict):
            raise RunError(f"{path}:{number}: no JSON object")
        yield number, line


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")


def _environment(place: str, line: Mapping[str, Any], arm: str) -> dict[str, Any]:
    if line.get("schema_version") != SCHEMA_VERSION or line.get("arm") != arm:
        raise RunError(f"{place}: the records of arm {line.get('arm')!r}, not of {arm}, or of another version")
    found = line.get("environment")
    if not isinstance(found, dict):
        raise RunError(f"{place}: environment missing")
    return dict(formed(place, found, _ENVIRONMENT, None))


def _cell(place: str, line: Mapping[str, Any]) -> Mapping[str, Any]:
    formed(place, line, _CELL, _BOTH)
    formed(place, line["seen"], _SEEN)
    if line["error"] is not None:
        formed(place, line["error"], {"message": _TEXT, "tail": (list,)})
    return line


def _of_cell(place: str, cell: Mapping[str, Any], lines: Any) -> list[dict[str, Any]]:
    if not isinstance(lines, list) or not all(isinstance(line, dict) for line in lines):
        raise RunError(f"{place}: the comparisons are no list of objects")
    if any((line.get("operator"), line.get("tier")) != (cell["operator"], cell["tier"]) for line in lines):
        raise RunError(f"{place}: comparisons of another cell stand with this one")
    return lines


def _single(place: str, arm: dict[str, Any] | Mapping[str, Any]) -> dict[str, Any]:
    names = [(cell["operator"], cell["tier"]) for cell in arm["cells"]]
    for name in names:
        if names.count(name) > 1:
            raise RunError(f"{place}: two cells for {name[0]} in tier {name[1]}")
    return dict(arm)


def _is(value: Any, types: Types) -> bool:
    if isinstance(value, bool):
        return bool in types
    if types is _NUMBER and isinstance(value, str):
        return value in ("nan", "inf", "-inf")
    return isinstance(value, types)


def formed(
    place: str,
    line: Mapping[str, Any],
    wanted: Mapping[str, Types],
    optional: Mapping[str, Types] | None = _NOTHING,
) -> dict[str, Any]:
    """The line, whose keys are the wanted ones and, of others, only `optional`; None allows any other."""
    if missing := wanted.keys() - line.keys():
        raise RunError(f"{place}: {', '.join(sorted(missing))} missing")
    if optional is not None and (unknown := line.keys() - wanted.keys() - optional.keys()):
        raise RunError(f"{place}: unknown {', '.join(sorted(unknown))}; is it of a newer rlspec?")
    for key, value in line.items():
        types = wanted.get(key) or (optional or {}).get(key)
        if types and not _is(value, types):
            raise RunError(f"{place}: {key} is {value!r}")
    return dict(line)
