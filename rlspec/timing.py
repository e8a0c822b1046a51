"""Step time, throughput and peak memory: one figure a run, MEASURED and never gated.

Steps of a run are never pooled: they share the run's own offset, so an interval over steps finds differences between
identical arms. An interval needs several runs an arm and is taken over their figures.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from rlspec import compare, joining, student
from rlspec.model import Run, Series, Verdict

UNITS = {"step_time": "s", "throughput": "tokens/s", "peak_memory": "GiB"}
LEVEL = 0.95  # of the interval
ROLES = ("base", "feature")


def judge_timing(check: str, runs: Sequence[Run], metric: str, factor: float, scope: str = "") -> Verdict:
    """MEASURED: per run the median over steps ≥ 2 (`peak_memory`: the maximum), and feature against base in percent.

    `factor` turns printed values into seconds, tokens/s or GiB; `scope` says of what, e.g. "per device".
    ERROR where a run cannot be read, lacks the metric or a step, or holds a value that is not finite.
    """
    assert check in UNITS
    notes = [joining.attributed(run.arm.name, note) for run in runs for note in run.notes]
    if found := _findings(metric, runs):
        return Verdict(
            judgment=check,
            subject=metric,
            status="ERROR",
            reason=found[0],
            evidence={"findings": found, "steps_judged": None},
            notes=(*found[1:], *notes),
        )
    evidence = _evidence(check, runs, metric, factor, scope)
    return Verdict(
        judgment=check,
        subject=metric,
        status="MEASURED",
        statistic=evidence["difference_percent"],
        reason=_reason(evidence),
        evidence=evidence,
        notes=(*notes, *_remarks(runs, runs[0].series[metric])),
    )


def _findings(metric: str, runs: Sequence[Run]) -> list[str]:
    roles = {run.arm.role for run in runs}
    found = [f"there is no {role} run to measure: add an arm of role {role}" for role in ROLES if role not in roles]
    found += joining.findings(metric, runs) if runs else []
    for run in runs:
        found += joining.non_finite(metric, run)
        steps = run.series[metric].steps if joining.has(run, metric) else None
        if steps and len(steps) == compare.first_judged(steps):
            found.append(
                f"{run.arm.name} has step {steps[0]} of {metric} only, which carries compilation: train more steps"
            )
    return found


def _evidence(check: str, runs: Sequence[Run], metric: str, factor: float, scope: str) -> dict[str, Any]:
    steps = runs[0].series[metric].steps
    start = compare.first_judged(steps)
    figures = {run.arm.name: _figure(check, run.series[metric], start) * factor for run in runs}
    by_role = {role: [figures[run.arm.name] for run in runs if run.arm.role == role] for role in ROLES}
    evidence: dict[str, Any] = {
        "figure": _name(check),
        "unit": UNITS[check],
        "scope": scope,
        "factor": factor,
        "medians": figures,
        "by_role": by_role,
        **_difference(by_role["base"], by_role["feature"]),
        "steps_judged": len(steps) - start,
        "steps": f"{steps[start]} to {steps[-1]}",
    }
    machines = joining.machine_differences(runs)
    return {**evidence, "machines_differ": machines} if machines else evidence


def _name(check: str) -> str:
    return "maximum" if check == "peak_memory" else "median"


def _figure(check: str, series: Series, start: int) -> float:
    kept = series.values[start:]
    return max(kept) if _name(check) == "maximum" else statistics.median(kept)


def _difference(base: list[float], feature: list[float]) -> dict[str, Any]:
    """Feature minus base, also in percent of the base, with the interval of the percentage."""
    centre, other = (compare.mean(values, len(values)) for values in (base, feature))
    percent = 100 * compare.divide(other - centre, centre)
    return {
        "base": centre,
        "feature": other,
        "difference": other - centre,
        "difference_percent": percent if math.isfinite(percent) else None,
        **_interval(base, feature, centre, other, percent),
    }


def _interval(base: list[float], feature: list[float], centre: float, other: float, percent: float) -> dict[str, Any]:
    """Student's t over the figures of the runs, with a pooled variance."""
    if min(len(base), len(feature)) < 2 or not math.isfinite(percent):
        why = "one run per arm: no interval" if min(len(base), len(feature)) < 2 else "no interval"
        return {"interval_percent": None, "interval": why, "degrees": None}
    degrees = len(base) + len(feature) - 2
    apart = [*(value - centre for value in base), *(value - other for value in feature)]
    squares = sum(value * value for value in apart)
    error = math.sqrt(squares / degrees * (1 / len(base) + 1 / len(feature)))
    half = abs(100 * student.t_quantile(LEVEL, degrees) * error / centre)
    text = f"{LEVEL:.0%} interval {percent - half:+.2f} % to {percent + half:+.2f} %"
    return {
        "interval_percent": [percent - half, percent + half],
        "interval": f"{text} (t over run figures, pooled variance, {degrees} degrees of freedom)",
        "degrees": degrees,
    }


def _remarks(runs: Sequence[Run], series: Series) -> list[str]:
    said = []
    if machines := joining.machine_differences(runs):
        said.append(f"the arms ran on machines that differ in {', '.join(machines)}: the difference may be theirs")
    for role in ROLES:
        if len(groups := joining.alike([run for run in runs if run.arm.role == role])) > 1:
            kinds = " and ".join(", ".join(run.arm.name for run in group) for group in groups)
            said.append(f"the {role} arms {kinds} have other settings: a figure of both is of neither")
    if compare.first_judged(series.steps) == 0:
        said.append(f"the log begins at step {series.steps[0]}: every printed step is counted")
    return said


def _reason(evidence: dict[str, Any]) -> str:
    unit = f"{evidence['unit']} {evidence['scope']}".strip()
    percent = evidence["difference_percent"]
    change = f"{percent:+.2f} %" if percent is not None else "no percentage, since the base is 0"
    values = f"base {evidence['base']:.6g}, feature {evidence['feature']:.6g} {unit}: {change}"
    return f"{values}, {evidence['figure']} over steps {evidence['steps']} ({evidence['interval']})"
