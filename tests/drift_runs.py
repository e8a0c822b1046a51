"""Runs of a short curve that differ by given offsets, and what drift says of them."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from rlspec.drift import judge_drift
from rlspec.model import Arm, Judgment, Row, Run, Series, Verdict

LIMITS = {
    "drift": (3.0, 5.0),
    "drift_calibrated_3": (3.2, 5.8),
    "drift_calibrated_4": (2.65, 4.3),
    "drift_calibrated_5": (2.35, 3.8),
}
DRIFT = Judgment(check="drift", metric="loss")
CURVE = [4 - 0.05 * at for at in range(32)]
JUMPY = [0.9] * 16 + [12.4] + [0.9] * 15


def row(name: str, limits: Mapping[str, float] | None = None, status: Any = "applicable") -> Row:
    below, above = LIMITS[name]
    return Row(
        contract="training",
        judgment=name,
        subject="*",
        dtype="*",
        status=status,
        limits={"pass_below": below, "fail_above": above} if limits is None else limits,
        source="s",
        date="2026-01-01",
        reason="written down",
    )


def run(
    name: str,
    values: Sequence[float],
    *,
    metric: str = "loss",
    steps: Sequence[int] | None = None,
    total: int | None = None,
    resolution: float = 0.0,
    perturb: Mapping[str, Any] | None = None,
    others: Mapping[str, Sequence[float]] | None = None,
    **more: Any,
) -> Run:
    at = array("q", range(1, len(values) + 1) if steps is None else steps)
    found = {
        key: Series(arm=name, metric=key, steps=at, values=array("d", given), resolution=resolution)
        for key, given in {metric: values, **(others or {})}.items()
    }
    role = "base" if name.startswith("base") else "feature"
    return Run(arm=Arm(name=name, role=role, perturb=perturb), series=found, steps_expected=total, **more)


def shifted(by: float | Sequence[float], curve: Sequence[float] = CURVE) -> list[float]:
    each = by if isinstance(by, Sequence) else [by] * len(curve)
    return [value + delta for value, delta in zip(curve, each, strict=True)]


def three(feature: float | Sequence[float], base: float | Sequence[float] = 0.125, **more: Any) -> list[Run]:
    return [run("base0", CURVE, **more), run("base1", shifted(base), **more), run("feat0", shifted(feature), **more)]


def late(value: float, count: int) -> list[float]:
    return [0.0] * (32 - count) + [value] * count


def judge(runs: Sequence[Run], judgment: Judgment = DRIFT) -> Verdict:
    found = judge_drift(judgment, runs, row)
    json.dumps(found.evidence)
    return found
