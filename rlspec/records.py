"""records.jsonl: what one arm measured, one flushed line a step, full doubles, no NaN tokens.

The first line is `{"record": "run", …}`, then one `{"record": "step", "step": 3, "metrics": {…}}` a step; an `end` line
with the number of steps closes a file that was written to its end. Non-finite values are the texts nan, inf, -inf.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlspec.errors import RunError
from rlspec.model import Arm, Run, Series

SCHEMA_VERSION = 1
_KEYS = {
    "run": {"record", "schema_version", "arm", "reader", "steps_expected", "resolution", "faults", "notes", "counted"},
    "step": {"record", "step", "metrics", "data"},
    "end": {"record", "steps"},
}


def write(run: Run, path: Path, reader: str) -> None:
    """Write what a reader found in a log; never over an existing file half-way."""
    partial = path.with_suffix(".partial")
    with partial.open("w", encoding="utf-8") as file:
        for line in _lines(run, reader):
            file.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
    partial.replace(path)


def _lines(run: Run, reader: str) -> Iterator[dict[str, Any]]:
    yield {
        "record": "run",
        "schema_version": SCHEMA_VERSION,
        "arm": run.arm.name,
        "reader": reader,
        "steps_expected": run.steps_expected,
        "resolution": {name: series.resolution for name, series in run.series.items()},
        "faults": dict(run.faults),
        "notes": list(run.notes),
        **({"counted": True} if any(series.counted for series in run.series.values()) else {}),
    }
    at = {name: dict(zip(series.steps, series.values, strict=True)) for name, series in run.series.items()}
    steps = sorted({step for values in at.values() for step in values})
    for step in steps:
        metrics = {name: number(values[step]) for name, values in at.items() if step in values}
        line: dict[str, Any] = {"record": "step", "step": step, "metrics": metrics}
        if step in run.data:
            line["data"] = run.data[step]
        yield line
    yield {"record": "end", "steps": len(steps)}


def number(value: float) -> float | str:
    """As JSON holds it: what is not finite as text."""
    return value if math.isfinite(value) else repr(value)


def read(path: Path, arm: Arm) -> Run:
    """The arm's Run. Raises RunError with the line where the file is not what it should be."""
    head: dict[str, Any] = {}
    steps: dict[str, array[int]] = {}
    values: dict[str, array[float]] = {}
    data: dict[int, str] = {}
    last, count, ended = -1, 0, None
    for number, line in _parsed(path):
        kind = line["record"]
        if (number == 1) != (kind == "run") or ended is not None:
            raise RunError(f"{path}:{number}: a {kind!r} line is not due here")
        if kind == "run":
            head = _head(path, line, arm)
        elif kind == "end":
            ended = line.get("steps")
            if ended != count:
                raise RunError(f"{path}:{number}: {count} steps are here, the end line says {ended}")
        else:
            step, metrics = line.get("step"), line.get("metrics")
            if not isinstance(step, int) or isinstance(step, bool) or not isinstance(metrics, dict):
                raise RunError(f"{path}:{number}: step {step!r}; a whole number and its metrics are due")
            if not last < step < 2**63:
                raise RunError(f"{path}:{number}: step {step!r} after step {last}; steps must ascend")
            last, count = step, count + 1
            for name, value in metrics.items():
                steps.setdefault(name, array("q")).append(step)
                values.setdefault(name, array("d")).append(_decode(path, number, name, value))
            if isinstance(line.get("data"), str):
                data[step] = line["data"]
    if not head:
        raise RunError(f"{path}: empty; the arm wrote no record")
    faults = dict(head.get("faults") or {})
    if ended is None:
        faults["*"] = f"its records stop after step {last}: the file was not written to its end"
    resolution = head.get("resolution") or {}
    series = {
        name: Series(
            arm=arm.name,
            metric=name,
            steps=steps[name],
            values=values[name],
            resolution=float(resolution.get(name, 0.0)),
            counted=bool(head.get("counted")),
        )
        for name in steps
    }
    return Run(
        arm=arm,
        series=series,
        steps_expected=head.get("steps_expected"),
        faults=faults,
        notes=tuple(head.get("notes") or ()),
        data=data,
    )


def _parsed(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        file = path.open(encoding="utf-8")
    except OSError as error:
        raise RunError(f"{path}: {error.strerror}") from None
    with file:
        number = 0
        try:
            for number, text in enumerate(file, 1):
                line = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
                if not isinstance(line, dict) or str(line.get("record")) not in _KEYS:
                    raise ValueError("not a record")
                if unknown := set(line) - _KEYS[line["record"]]:
                    raise ValueError(f"unknown key {sorted(unknown)[0]!r}")
                yield number, line
        except (ValueError, RecursionError) as error:
            raise RunError(f"{path}:{number or 1}: {error}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return made


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _head(path: Path, line: dict[str, Any], arm: Arm) -> dict[str, Any]:
    if line.get("schema_version") != SCHEMA_VERSION:
        raise RunError(f"{path}:1: schema_version {line.get('schema_version')!r}; this rlspec reads {SCHEMA_VERSION}")
    if line.get("arm") != arm.name:
        raise RunError(f"{path}:1: records of arm {line.get('arm')!r}, not of {arm.name!r}")
    shapes = {"resolution": dict, "faults": dict, "notes": list}
    for key, shape in shapes.items():
        if not isinstance(line.get(key, shape()), shape):
            raise RunError(f"{path}:1: {key} must be a {shape.__name__}")
    expected = line.get("steps_expected")
    if expected is not None and (not isinstance(expected, int) or isinstance(expected, bool)):
        raise RunError(f"{path}:1: steps_expected must be an integer")
    for name, value in line.get("resolution", {}).items():
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < math.inf:
            raise RunError(f"{path}:1: resolution of {name!r} must be a number")
    return line


def _decode(path: Path, number: int, name: str, value: Any) -> float:
    if isinstance(value, str) and value in ("nan", "inf", "-inf"):
        return float(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            pass
    raise RunError(f"{path}:{number}: {name!r} is {value!r}, not a number")
