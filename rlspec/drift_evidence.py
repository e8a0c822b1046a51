"""What every drift verdict shows beside its ratio: figures for the report, and remarks in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rlspec import compare, joining, student
from rlspec.compare import Pair
from rlspec.envelope import Envelope
from rlspec.model import Run

FEW_UNITS = 5  # an envelope of fewer units of the last printed digit is mostly rounding
CAUGHT = 1.6  # times the limit of FAIL: in simulation at least 9 in 10 steady offsets of that size are a FAIL
ONE_SIDED_FROM = 8  # judged steps below which an equal sign on all of them is no news


def figures(envelope: Envelope, limits: tuple[float, float], runs: Sequence[Run]) -> dict[str, Any]:
    """Plain data for `Verdict.evidence`; the ratio is filled in by the verdict, where there is one."""
    steps = len(envelope.feature_delta)
    unit = 2 * envelope.resolution
    return {
        "floor": envelope.floor,
        "base_runs_counted": len(envelope.bases),
        "pooled": envelope.pooled,
        "envelope": envelope.width,
        "drift": envelope.drift,
        "ratio": None,
        "diluted_ratio": None,
        "diluted_envelope": envelope.diluted_width,
        "sparse": envelope.sparse,
        "single_ratios": _single_ratios(envelope),
        "base_pairs": [_plain(pair) for pair in envelope.base_pairs],
        "feature_pairs": [_plain(pair) for row in envelope.cross for pair in row],
        "steps_judged": steps,
        "base_steps_differing": f"{envelope.base_pairs[0].differing} of {steps}",
        "lag1": compare.lag1(envelope.base_delta),
        "sign_balance": _sign_balance(envelope),
        "step_1": _step_1(envelope),
        "largest_contribution": _largest_contribution(envelope),
        "run_mean_t": _run_mean_t(envelope),
        "smallest_offset": _offset(envelope, limits[0]),
        "caught_offset": _offset(envelope, CAUGHT * limits[1]),
        "resolution": envelope.resolution,
        "printed_unit": unit,
        "envelope_in_resolution_units": envelope.width / unit if unit else None,
        "unstable": asdict(envelope.jump) if envelope.jump else None,
        "machines_differ": envelope.machines,
        "steps": _steps(envelope, runs),
    }


def _single_ratios(envelope: Envelope) -> dict[str, float] | None:
    """Extremes of what one feature and one base pair alone would have read, either run of it as the reference."""
    drifts = {row[0].a: [pair.mean_abs for pair in row] for row in envelope.cross}
    both = [(pair, name) for pair in envelope.base_pairs if pair.floor for name in (pair.a, pair.b)]
    ratios = [drift / pair.floor for pair, name in both for drift in drifts[name]]
    return {"min": min(ratios), "max": max(ratios)} if ratios else None


def _plain(pair: Pair) -> dict[str, Any]:
    return {"runs": [pair.a, pair.b], "differing": pair.differing, "mean_abs": pair.mean_abs, "floor": pair.floor}


def _sign_balance(envelope: Envelope) -> dict[str, Any]:
    of = f"{envelope.features[0].arm} - {envelope.bases[0].arm}"
    return {"of": of, **compare.sign_balance(envelope.feature_delta)}


def _step_1(envelope: Envelope) -> dict[str, Any] | None:
    if envelope.start == 0:
        return None
    base, first = envelope.bases[0], envelope.bases[0].values[0]
    return {
        "step": base.steps[0],
        "values": {series.arm: series.values[0] for series in (*envelope.bases, *envelope.features)},
        "base_delta": envelope.bases[1].values[0] - first,
        "feature_delta": envelope.features[0].values[0] - first,
        "resolution": envelope.resolution,
    }


def _largest_contribution(envelope: Envelope) -> dict[str, Any]:
    at, value = compare.largest(envelope.feature_delta)
    total = envelope.cross[0][0].mean_abs * len(envelope.feature_delta)
    step = envelope.bases[0].steps[envelope.start + at]
    return {"step": step, "value": value, "share": compare.divide(abs(value), total) if value else None}


def _run_mean_t(envelope: Envelope) -> dict[str, Any]:
    """The means of all runs above base0's."""
    bases = [pair.mean for pair in envelope.base_pairs[: len(envelope.bases) - 1]]
    return student.run_mean_t([0.0, *bases], [pair.mean for pair in envelope.cross[0]])


def _offset(envelope: Envelope, ratio: float) -> dict[str, float | None]:
    """The steady offset that has a ratio without the feature's own noise, and in percent of the base's mean magnitude.

    That noise adds to it: of offsets at the limit of PASS about half pass, for white noise and random walks alike.
    Of none that holds where some digits are too coarse for the floor.
    """
    if envelope.coarse:
        return {"absolute": None, "percent": None}
    offset, judged = ratio * envelope.width, envelope.bases[0].values[envelope.start :]
    percent = 100 * compare.divide(offset, compare.mean(map(abs, judged), len(judged)))
    return {"absolute": _finite(offset), "percent": _finite(percent)}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _steps(envelope: Envelope, runs: Sequence[Run]) -> str:
    apart, judged = compare.spacing(envelope.bases[0].steps), len(envelope.feature_delta)
    known = any(run.steps_expected is not None for run in runs)
    printed = f" printed (every {_ordinal(apart)})" if apart > 1 else "" if known else " printed"
    return f"{judged} of {judged}{printed}"


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def remarks(
    envelope: Envelope, evidence: Mapping[str, Any], limits: tuple[float, float], runs: Sequence[Run]
) -> list[str]:
    """What a reader ought to know before believing the verdict; `evidence` holds the `figures`."""
    steps = envelope.bases[0].steps
    said = [
        f"sparse envelope: {pair.a} and {pair.b} differ on {pair.differing} of {pair.steps} steps"
        for pair in envelope.base_pairs
        if pair.sparse
    ]
    if compare.spacing(steps) > 1:
        said.append(f"steps judged {evidence['steps']}")
    if envelope.bases[0].counted:
        said.append("the lines say no steps and are counted; the first may be of several steps, so it is judged, too")
    elif envelope.start == 0:
        said.append(f"the log begins at step {steps[0]}: step 1 is not in it, every printed step is judged")
    said += _thin_remark(envelope, evidence)
    said += _resolution_remark(evidence)
    said += _step_1_remark(envelope, evidence["step_1"], limits[1])
    said += _sign_remark(envelope, evidence["sign_balance"])
    if envelope.jump and envelope.floor == "zero":
        said.append(f"the gradient norm of {envelope.jump.arm} jumps at step {envelope.jump.step} (unstable fixture)")
    return said + _seed_remark(runs) + _machine_remark(runs)


FEW_STEPS = 8
WIDE_PERCENT = 20.0


def _thin_remark(envelope: Envelope, evidence: Mapping[str, Any]) -> list[str]:
    """A verdict on few steps, a floor that hides almost anything, a feature that is no run of its own."""
    said = []
    judged, percent = evidence.get("steps_judged"), (evidence.get("smallest_offset") or {}).get("percent")
    if judged is not None and judged < FEW_STEPS:
        said.append(f"only {judged} steps are judged: a ratio of so few is a lottery")
    if percent is not None and percent > WIDE_PERCENT:
        said.append(f"the floor is so wide that half of steady offsets of {percent:.0f} % pass: look at the base runs")
    natural = [base.arm for base in envelope.bases if base.arm not in envelope.perturbed]
    equal = [pair for row in envelope.cross for pair in row if not pair.differing and pair.a in natural]
    if envelope.width > 0 and len(natural) > 1:  # those that count all differ
        said += [f"{one.b} equals {one.a} to the bit though base runs differ: is it a run of its own?" for one in equal]
    return said


def _resolution_remark(evidence: Mapping[str, Any]) -> list[str]:
    units = evidence["envelope_in_resolution_units"]
    if units is None or evidence["floor"] == "zero" or units >= FEW_UNITS:
        return []
    return [
        f"the envelope is {units:.2g} units of the last printed digit ({evidence['printed_unit']:g}): "
        f"below {FEW_UNITS} it is mostly the print's resolution; read values with more digits"
    ]


def _step_1_remark(envelope: Envelope, row: Mapping[str, Any] | None, fail_above: float) -> list[str]:
    # Of two single differences of the same size one is 20 times the other in 3 % of cases, and 5 times in 13 %.
    if row is None or not abs(row["feature_delta"]) > 4 * fail_above * abs(row["base_delta"]):
        return []
    feature, base = envelope.features[0], envelope.bases[0]
    moved = "forward or the backward" if "grad" in base.metric.lower() else "forward"
    return [
        f"step {row['step']} is not gated, but {feature.arm} differs there from {base.arm} by "
        f"{row['feature_delta']:.3g} and the base runs by {row['base_delta']:.3g}: as if the {moved} itself had moved"
    ]


def _sign_remark(envelope: Envelope, balance: Mapping[str, Any]) -> list[str]:
    moved = balance["positive"] + balance["negative"]
    if moved < ONE_SIDED_FROM or balance["share"] not in (0.0, 1.0):
        return []
    side = "above" if balance["positive"] else "below"
    feature, base = envelope.features[0].arm, envelope.bases[0].arm
    return [f"sign balance: {feature} is {side} {base} on all {moved} steps that differ"]


def _seed_remark(runs: Sequence[Run]) -> list[str]:
    differ = joining.seeds({run.arm.name: run.arm.environment for run in runs if run.arm.role == "base"})
    wide = "so the floor is what seeds differ by, and hides what is smaller"
    return [f"the base arms differ in {name} ({values}), {wide}" for name, values in differ.items()]


def _machine_remark(runs: Sequence[Run]) -> list[str]:
    silent = [run.arm.name for run in runs if not run.machine]
    if not silent or len(silent) == len(runs):
        return []
    return [f"no machine fingerprint from {', '.join(silent)}: whether it ran on the same kind is not known"]
