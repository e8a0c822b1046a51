"""Cells of operator specs: arm × operator × tier × judgment, from the lines that a device wrote to a verdict each.

The device measured; whether its lines are whole, agree with each other and stay within the contract is decided here,
from numbers alone, so that a report can be judged again without a device.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlspec import layouts, nodes
from rlspec.errors import RunError
from rlspec.model import Row, Status
from rlspec.workloads import Tier

SCHEMA_VERSION = 1
CATEGORIES: Mapping[str, Status] = {
    "green": "PASS",
    "red_verdict": "FAIL",
    "red_no_backward": "FAIL",
    "red_provenance": "ERROR",
    "cannot_fail": "ERROR",
    "missing": "ERROR",
    "broken": "ERROR",
    "raised": "ERROR",
    "process": "ERROR",
    "blocked_hardware": "BLOCKED",
    "not_applicable": "N/A",
    "measured": "MEASURED",
}
_CELL = {"operator", "tier", "implementation", "backend", "blocked", "no_backward", "error", "provenance", "seen",
         "passed_by", "layouts"}  # fmt: skip
_COMPARISON = {"operator", "tier", "judgment", "variant", "tensor", "configuration", "against", "tokens", "shape",
               "dtype", "against_dtype", "elements", "limits", "digest", "against_digest", "first"}  # fmt: skip
_ACCURACY = {"nonfinite", "violations", "excess", "max_abs", "rms", "relative_rms", "relative_peak", "cosine", "ulps"}
_OPTIONAL = {"accumulated_by", "yardstick", "differing"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a cell came out as. `reason` is one sentence."""

    category: str
    reason: str
    statistic: float | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def status(self) -> Status:
        return CATEGORIES[self.category]


def read(path: Path, arm: str) -> dict[str, Any]:
    """What an arm measured: `environment`, and `cells` with their `comparisons`. Raises RunError with the line."""
    environment: dict[str, Any] | None = None
    cells: list[dict[str, Any]] = []
    waiting: list[dict[str, Any]] = []
    count, ended = 0, False
    for number, line in _lines(path):
        kind = line.pop("record", None)
        if (number == 1) != (kind == "run") or ended:
            raise RunError(f"{path}:{number}: a {kind!r} line is not due here")
        if kind == "run":
            if line.get("schema_version") != SCHEMA_VERSION or line.get("arm") != arm:
                raise RunError(f"{path}:1: the records of arm {line.get('arm')!r}, not of {arm}, or of another version")
            environment = line["environment"]
        elif kind == "comparison":
            _keys(path, number, line, _COMPARISON)
            waiting.append(line)
            count += 1
        elif kind == "cell":
            _keys(path, number, line, _CELL)
            mine = [one for one in waiting if (one["operator"], one["tier"]) == (line["operator"], line["tier"])]
            if len(mine) != len(waiting):
                raise RunError(f"{path}:{number}: comparisons of another cell stand before this one")
            cells.append({**line, "comparisons": waiting})
            waiting = []
        elif kind == "end":
            ended = (line.get("cells"), line.get("comparisons")) == (len(cells), count)
            if not ended:
                raise RunError(
                    f"{path}:{number}: {len(cells)} cells and {count} comparisons are here, the end disagrees"
                )
        else:
            raise RunError(f"{path}:{number}: unknown record {kind!r}")
    if environment is None or not ended:
        raise RunError(f"{path}: the records break off: there is no end line")
    return {"environment": environment, "cells": cells}


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        texts = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from None
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
        except ValueError as error:
            raise RunError(f"{path}:{number}: no JSON: {error}") from None
        if not isinstance(line, dict):
            raise RunError(f"{path}:{number}: no JSON object")
        yield number, line


def _keys(path: Path, number: int, line: Mapping[str, Any], wanted: set[str]) -> None:
    if missing := wanted - set(line):
        raise RunError(f"{path}:{number}: {', '.join(sorted(missing))} missing")
    if unknown := set(line) - wanted - _ACCURACY - _OPTIONAL:
        raise RunError(f"{path}:{number}: unknown {', '.join(sorted(unknown))}")


def whole(path: Path, measured: Mapping[str, Any]) -> None:
    """Raises RunError where the cells of a report lack what `judge` reads."""
    for name, arm in measured.items():
        for number, cell in enumerate((arm or {"cells": ()})["cells"]):
            place = Path(f"{path}: {name}: cell")
            _keys(place, number, cell, _CELL | {"comparisons"})
            for line in cell["comparisons"]:
                _keys(place, number, line, _COMPARISON)


def seal(measured: Mapping[str, Any]) -> str:
    """SHA-256 over all cells of all arms as canonical JSON: a number or digest that is edited breaks it."""
    text = json.dumps(measured, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def judge(
    measured: Mapping[str, Any], operator: str, tier: Tier, judgment: str, row: Row, *, cannot_fail: str
) -> Finding:
    """One cell from what an arm measured, as `read` gives it."""
    node = nodes.NODES[operator]
    if node.not_applicable:
        return Finding(category="not_applicable", reason=node.not_applicable)
    if row.status in ("out_of_scope", "not_applicable"):
        return Finding(category="not_applicable", reason=row.reason)
    cell = next((one for one in measured["cells"] if (one["operator"], one["tier"]) == (operator, tier.name)), None)
    if cell is None:
        return Finding(category="missing", reason="the arm measured no such cell")
    found = _stopped(cell, measured["environment"], judgment)
    if found is None:
        lines = [line for line in cell["comparisons"] if line["judgment"] == judgment]
        broken = _broken(cell, lines, operator, tier, judgment, row, measured["environment"])
        found = Finding(category="broken", reason=broken) if broken else _compared(lines, judgment, row)
    passed = cell["passed_by"].get(judgment, [])
    if passed and found.category == "green" and cannot_fail == "error":
        found = Finding(category="cannot_fail", reason=f"the row would also pass a candidate that is {passed[0]}")
    notes = (*found.notes, *_cannot_fail(passed))
    return Finding(
        category=found.category,
        reason=found.reason,
        statistic=found.statistic,
        evidence={**found.evidence, **_ran(cell, measured["environment"])},
        notes=notes,
    )


def _stopped(cell: Mapping[str, Any], environment: Mapping[str, Any], judgment: str) -> Finding | None:
    """Why there is nothing to compare, if there is not."""
    if cell["blocked"]:
        return Finding(category="blocked_hardware", reason=cell["blocked"])
    if error := cell["error"]:
        return Finding(category="raised", reason=error["message"], evidence={"tail": list(error["tail"])})
    if cell["provenance"]:
        return Finding(category="red_provenance", reason=cell["provenance"])
    for switch in ("tf32", "autocast"):
        if environment[switch] is not False:
            return Finding(category="red_provenance", reason=f"{switch} was on")
    if judgment.startswith("gradient") and cell["no_backward"]:
        return Finding(category="red_no_backward", reason=f"no backward: {cell['no_backward']}")
    return None


def _broken(
    cell: Mapping[str, Any],
    lines: Sequence[Mapping[str, Any]],
    operator: str,
    tier: Tier,
    judgment: str,
    row: Row,
    environment: Mapping[str, Any],
) -> str | None:
    """Why the lines are not the whole truth of the cell, or None."""
    device = "cuda" if str(environment["device"]).startswith("cuda") else "cpu"
    known = {one.name: one.digest for one in layouts.of(tier) if not nodes.left_out(one, device)}
    if cell["layouts"] != known:
        return "the layouts are not those of the workload"
    wanted = {(e.variant, e.tensor, e.configuration): e for e in nodes.expected(operator, tier, judgment, device)}
    keys = Counter((line["variant"], line["tensor"], line["configuration"]) for line in lines)
    for key in wanted:
        if keys[key] != 1:
            return f"{_place(key)}: {'no comparison' if not keys[key] else f'{keys[key]} comparisons'}"
    if extra := set(keys) - set(wanted):
        return f"{_place(sorted(extra)[0])}: a comparison that nobody asked for"
    for line in lines:
        key = (line["variant"], line["tensor"], line["configuration"])
        if problem := _odd(line, wanted[key].tokens, judgment, row):
            return f"{_place(key)}: {problem}"
    return _one_canonical(lines, judgment)


def _place(key: tuple[str, str, str]) -> str:
    variant, tensor, configuration = key
    return " ".join(filter(None, (variant, tensor, "in", configuration)))


def _odd(line: Mapping[str, Any], tokens: int, judgment: str, row: Row) -> str | None:
    size = 1
    for extent in line["shape"]:
        size *= extent
    if not size == line["elements"] > 0:
        return f"{line['elements']} elements of shape {line['shape']}"
    if line["tokens"] != tokens or (tokens and line["shape"][0] != tokens):
        return f"{line['tokens']} tokens, {tokens} are due"
    if line["limits"] != dict(row.limits):
        return f"the limits {line['limits']} are not those of {row.id}; another contract needs a new run"
    accuracy = judgment.endswith("accuracy")
    if line["against"] != ("reference" if accuracy else layouts.CANONICAL):
        return f"compared with {line['against']}"
    if missing := _needed(line, row, accuracy) - set(line):
        return f"{', '.join(sorted(missing))} missing"
    if not accuracy and line["digest"] != line["against_digest"] and not line["differing"] > 0:
        return "the digests differ, and no element does"
    return None


def _needed(line: Mapping[str, Any], row: Row, accuracy: bool) -> set[str]:
    if not accuracy:
        return {"differing"}
    return _ACCURACY | ({"yardstick"} if "baseline_ratio" in row.limits and _floating(line) else set())


def _floating(line: Mapping[str, Any]) -> bool:
    return str(line["dtype"]).startswith(("float", "bfloat"))


def _one_canonical(lines: Sequence[Mapping[str, Any]], judgment: str) -> str | None:
    """All layouts are compared with one canonical run: whole tensors have one digest on the right side."""
    if judgment.endswith("accuracy"):
        return None
    seen: dict[tuple[str, str, str], str] = {}
    for line in lines:
        key = (line["variant"], line["tensor"], str(line["shape"]))
        part = line["configuration"].partition("/")[2].partition("/")[2]  # a sample alone has its own rows
        if seen.setdefault((*key[:2], f"{key[2]}{part}"), line["against_digest"]) != line["against_digest"]:
            return f"{_place((*key[:2], line['configuration']))}: another canonical run than in the lines before"
    return None


def _compared(lines: Sequence[Mapping[str, Any]], judgment: str, row: Row) -> Finding:
    accuracy = judgment.endswith("accuracy")
    problems = [(line, _problem(line, row, accuracy)) for line in lines]
    wrong = [(line, problem) for line, problem in problems if problem is not None]
    statistic = (
        max(float(line["relative_rms"]) for line in lines)
        if accuracy
        else float(sum(line["differing"] for line in lines))
    )
    evidence = {"comparisons": len(lines), "outside": len(wrong), **_worst(lines, accuracy)}
    if row.status == "measured":
        return Finding(category="measured", reason="not gated", statistic=statistic, evidence=evidence)
    if not wrong:
        what = "within the row" if accuracy else "equal to the bit"
        return Finding(
            category="green", reason=f"all {len(lines)} comparisons are {what}", statistic=statistic, evidence=evidence
        )
    line, problem = wrong[0]
    place = _place((line["variant"], line["tensor"], line["configuration"]))
    reason = f"{place}: {problem}{_where(line)}"
    more = f"; {len(wrong)} of {len(lines)} comparisons are outside"
    first = {key: line[key] for key in ("variant", "tensor", "configuration", "first")}
    return Finding(
        category="red_verdict",
        reason=reason + more,
        statistic=statistic,
        evidence={**evidence, "first_failure": first, "failing": _failing(wrong)},
    )


def _problem(line: Mapping[str, Any], row: Row, accuracy: bool) -> str | None:
    if not accuracy:
        if not line["differing"] <= row.limits["differing_elements"]:
            note = (
                f" ({line['dtype']} against {line['against_dtype']})" if line["dtype"] != line["against_dtype"] else ""
            )
            return f"{line['differing']:,} of {line['elements']:,} elements differ to the bit{note}"
        return None
    return nodes.accuracy_problem(line, row.limits if _floating(line) else {})


def _where(line: Mapping[str, Any]) -> str:
    first = line["first"]
    if not first:
        return ""
    values = f"{first['got']} is not {first['want']}"
    if "sample" not in first:
        return f", first at element {first['index']}: {values}"
    size = f" in a call of {first['call'][0]} × {first['call'][1]} tokens" if "call" in first else ""
    return (
        f", first in sample {first['sample']} position {first['position']} element {first['element']}{size}: {values}"
    )


def _worst(lines: Sequence[Mapping[str, Any]], accuracy: bool) -> dict[str, Any]:
    if not accuracy or not lines:
        return {}
    worst = max(lines, key=lambda line: float(line["relative_rms"]))
    keys = ("variant", "tensor", "configuration", "max_abs", "rms", "relative_rms", "relative_peak", "cosine", "ulps")
    return {"worst": {key: worst[key] for key in keys}}


def _failing(wrong: Sequence[tuple[Mapping[str, Any], str]]) -> list[str]:
    """Tensor and the configurations in which it fails."""
    groups: dict[str, list[str]] = {}
    for line, _ in wrong:
        groups.setdefault(" ".join(filter(None, (line["variant"], line["tensor"]))), []).append(line["configuration"])
    return [f"{name}: {', '.join(dict.fromkeys(places))}" for name, places in groups.items()]


def _ran(cell: Mapping[str, Any], environment: Mapping[str, Any]) -> dict[str, Any]:
    seen = cell["seen"]
    kernels = seen["profiled"] or [*seen["triton"], *seen["native"]] or None
    return {
        "implementation": cell["implementation"],
        "backend": cell["backend"],
        "kernels": kernels,
        "operators_of_torch": seen["torch"],
        "device": environment["device"],
        "accumulated_by": sorted({line["accumulated_by"] for line in cell["comparisons"] if "accumulated_by" in line}),
    }


def _cannot_fail(passed: Sequence[str]) -> Iterator[str]:
    if passed:
        more = f" and {len(passed) - 1} more" if len(passed) > 1 else ""
        yield f"cannot_fail: the row would also pass a candidate that is {passed[0]}{more}"
