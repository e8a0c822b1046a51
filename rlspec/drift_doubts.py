"""Why the ratio of a drift may mean less than its status says: what the floor, the feature or the print hide."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlspec import compare
from rlspec.compare import Pair
from rlspec.drift_evidence import FEW_UNITS
from rlspec.envelope import Envelope
from rlspec.model import Series, Status

Doubt = tuple[str, str]  # the cause and what is said

MANY_MORE = 8  # steps beyond twice those on which base runs differ, that chance does not give

# Runs of identical code, simulated (white noise to random walks, heavy tails, late growth, amplitudes of each run),
# go beyond these in less than 1 % of cases, and in 2 % where they differ by amplitudes or the feature alone spikes.
KINDS = {3: 75.0, 4: 20.0}  # by base runs: how many times farther two kinds are from each other than each from itself
KINDS_OF_MORE = 15.0
SPIKE = 5.0  # times the farthest step of base runs, and as many times again as that is beyond its usual tenth
HEAVY = 20.0  # the most that a tail counts
LATE = 6.0  # times the farthest tenth of base runs
ENOUGH_STEPS = compare.TENTHS  # of fewer, one step is so much of the mean that the ratio shows it


def find(envelope: Envelope, status: Status, above: float) -> Doubt | None:
    """The first reason against a status that a ratio gave; `above` is the limit of FAIL."""
    if doubt := of_digits(envelope, above if status == "FAIL" else math.inf):
        return doubt
    if status != "PASS":
        return None
    return _same_run(envelope) or _rounding(envelope) or _kinds(envelope, above) or _spike(envelope) or _late(envelope)


def of_digits(envelope: Envelope, above: float = 0.0) -> Doubt | None:
    """Runs are printed to different digits, some too coarse for the floor, and that may account for the ratio.

    It does not where the least drift that the digits allow is beyond `above` times the widest floor that they allow.
    """
    if not envelope.coarse:
        return None
    base, feature = (max(one.resolution for one in side) for side in (envelope.bases, envelope.features))
    if envelope.drift - base - feature > above * (envelope.width + 2 * base):
        return None
    fine, coarse = envelope.printed
    said = f"{fine.arm} is {_digits(fine)} and {coarse.arm} {_digits(coarse)}"
    return "resolution", f"{said}, too coarse for a floor of {envelope.width:.3g}: print both alike"


def _digits(series: Series) -> str:
    return f"printed to {2 * series.resolution:g}" if series.resolution else "at full precision"


def _same_run(envelope: Envelope) -> Doubt | None:
    """A feature run that equals a base run which was perturbed on purpose. Others may: a stack can have few ways."""
    for pair in (pair for row in envelope.cross for pair in row):
        if not pair.differing and pair.a in envelope.perturbed:
            return "same_run", f"{pair.b} equals the perturbed {pair.a} to the bit: is it a run of its own?"
    return None


def _rounding(envelope: Envelope) -> Doubt | None:
    """A floor of a few flips of the last printed digit says nothing of a feature that differs on many more steps."""
    unit = 2 * envelope.resolution
    if not envelope.sparse or not unit or envelope.width >= FEW_UNITS * unit:
        return None
    bases = max(pair.differing for pair in envelope.base_pairs)
    nearest = [min(pairs, key=lambda pair: pair.differing) for pairs in envelope.columns]
    feature = max(nearest, key=lambda pair: pair.differing)
    if feature.differing <= 2 * bases + MANY_MORE:
        return None
    floor = f"the floor is {envelope.width / unit:.2g} units of the last printed digit ({unit:g})"
    where = f"on {bases} steps at most, and {feature.b} differs on {feature.differing} of {feature.steps}"
    return "rounding", f"{floor} {where}"


def kinds(envelope: Envelope) -> tuple[list[set[str]], float]:
    """The base runs in two groups, the smaller one first, and how much farther these are apart than each is wide.

    A perturbed run is apart from natural ones on purpose, so of a mixture nothing is said.
    """
    names = [run.arm for run in envelope.bases]
    if len(names) < 3 or 0 < len(envelope.perturbed) < len(names) - 1:
        return [], 0.0
    groups = [{name} for name in names]
    for pair in sorted(envelope.base_pairs, key=lambda pair: pair.floor):
        if len(groups) > 2:
            joined, rest = [group for group in groups if {pair.a, pair.b} & group], groups
            groups = [group for group in rest if group not in joined] + [set().union(*joined)]
    within = [pair for pair in envelope.base_pairs if any({pair.a, pair.b} <= group for group in groups)]
    between = [pair for pair in envelope.base_pairs if pair not in within]
    return sorted(groups, key=lambda group: (len(group), sorted(group))), compare.divide(
        _width(between), _width(within)
    )


def kinds_text(envelope: Envelope) -> str:
    """What to say of base runs of two kinds; empty where they are of one."""
    groups, apart = kinds(envelope)
    if not apart > KINDS_OF_MORE:
        return ""
    few, many = (", ".join(sorted(group)) for group in groups)
    return (
        f"the base runs are of two kinds: {few}, and {many}, {apart:.3g} times as far from each other as runs of one "
        "kind"
    )


def _kinds(envelope: Envelope, above: float) -> Doubt | None:
    """A base run that is no run of the same code widens the floor: then a feature is to be near most of the others."""
    groups, apart = kinds(envelope)
    if not apart > KINDS.get(len(envelope.bases), KINDS_OF_MORE):
        return None
    for group in (group for group in groups if len(group) > 1):
        width = _width([pair for pair in envelope.base_pairs if {pair.a, pair.b} <= group])
        drifts = [[pair.mean_abs for pair in pairs if pair.a in group] for pairs in envelope.columns]
        if all(compare.mean(drift, len(drift)) <= above * width for drift in drifts):
            return None
    return "split_bases", kinds_text(envelope)


def _width(pairs: Sequence[Pair]) -> float:
    return compare.mean((pair.floor for pair in pairs), len(pairs))


def _spike(envelope: Envelope) -> Doubt | None:
    """One step far beyond all that base runs differ by on any. A mean over many steps hides it."""
    if envelope.base_pairs[0].steps < ENOUGH_STEPS:
        return None
    peaks = sorted(max(tenth) for tenth in zip(*(pair.peaks for pair in envelope.base_pairs), strict=True))
    usual, farthest = peaks[len(peaks) // 2], peaks[-1]
    tail = min(farthest / usual, HEAVY) if usual else HEAVY
    nearest = [min(pairs, key=lambda pair: max(pair.peaks)) for pairs in envelope.columns]
    worst = max(nearest, key=lambda pair: max(pair.peaks))
    if not max(worst.peaks) > SPIKE * tail * farthest:
        return None
    step = _step_of_peak(envelope, worst)
    return "spike", (
        f"{worst.b} differs by {max(worst.peaks):.3g} at step {step}, and base runs by {farthest:.3g} at most on any"
    )


def _step_of_peak(envelope: Envelope, pair: Pair) -> int:
    runs = {run.arm: run for run in (*envelope.bases, *envelope.features)}
    at, _ = compare.largest(compare.deltas(runs[pair.a], runs[pair.b], envelope.start))
    return runs[pair.a].steps[envelope.start + at]


def _late(envelope: Envelope) -> Doubt | None:
    """A feature that parts near the end, where a mean over all steps hardly shows it."""
    if envelope.base_pairs[0].steps < ENOUGH_STEPS:
        return None
    farthest = max(max(pair.tenth_floors) for pair in envelope.base_pairs)
    nearest = [min(pairs, key=lambda pair: pair.tenths[-1]) for pairs in envelope.columns]
    worst = max(nearest, key=lambda pair: pair.tenths[-1])
    if not worst.tenths[-1] > LATE * farthest:
        return None
    steps = envelope.bases[0].steps
    first = steps[envelope.start + compare.cuts(worst.steps)[-2]]
    return "late", (
        f"{worst.b} differs by {worst.tenths[-1]:.3g} on steps {first} to {steps[-1]}, and base runs by {farthest:.3g} "
        "at most on any tenth of the steps"
    )
