"""Arithmetic on series that are joined by step: deltas, floors, medians, Student's t. It knows no limit and no verdict.

Every function takes whole arrays and stays in C loops, so a million steps cost tens of milliseconds each.
"""

from __future__ import annotations

import math
import operator
import statistics
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from rlspec.model import Run, Series

GRADIENT_NORMS = ("gradient-norm", "grad_norm", "grad norm", "grad-norm", "gradient_norm")

JUMP_FACTOR = 8.0
JUMP_WINDOW = 8
JUMP_AFTER = 3  # the first three steps have too little before them to jump from

_CHUNK = 8192
_BLOCK = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """What run b has above run a over the judged steps."""

    a: str
    b: str
    steps: int
    differing: int
    mean: float
    mean_abs: float

    @property
    def sparse(self) -> bool:
        return 0 < 2 * self.differing < self.steps

    @property
    def floor(self) -> float:
        """Mean |delta|; where the pair is sparse, over the steps on which it differs only."""
        return self.mean_abs * (self.steps / self.differing) if self.sparse else self.mean_abs


@dataclass(frozen=True, slots=True, kw_only=True)
class Jump:
    """A value far above the median of those before it."""

    arm: str
    step: int
    before: float
    value: float


def mean(values: Iterable[float], count: int) -> float:
    """Correctly rounded sum over count; nan where the sum does not fit a double."""
    try:
        return math.fsum(values) / count
    except (OverflowError, ValueError):
        return math.nan


def divide(a: float, b: float) -> float:
    """a / b, nan for b = 0."""
    return a / b if b else math.nan


def first_judged(steps: Sequence[int]) -> int:
    """Index of the first judged step: step 1 (or 0, in logs that count from 0) precedes any update."""
    return 1 if steps[0] in (0, 1) else 0


def first_non_finite(series: Series) -> int | None:
    """Index of the first value that is nan or infinite."""
    if math.isfinite(sum(series.values)):
        return None
    return next((at for at, value in enumerate(series.values) if not math.isfinite(value)), None)


def single_value(series: Sequence[Series]) -> float | None:
    """The one value of all series, over all steps or over two or more judged ones; None if anything varies."""
    value, judged = series[0].values[-1], len(series[0].values) - first_judged(series[0].steps)
    enough = judged if judged > 1 else len(series[0].values)
    tails = [one.values[-enough:] for one in series if one.values[-enough] == value == one.values[-1]]
    constant = len(tails) == len(series) and all(tail.count(value) == enough for tail in tails)
    return value if constant else None


def _mapped(function: Callable[..., float], *arrays: array[float], start: int = 0) -> array[float]:
    out = array("d")
    for begin in range(start, len(arrays[0]), _CHUNK):
        out.fromlist(list(map(function, *(one[begin : begin + _CHUNK] for one in arrays))))
    return out


def deltas(a: Series, b: Series, start: int) -> array[float]:
    """b - a from index `start` on. Both have the same steps (see `findings`)."""
    assert len(a.values) == len(b.values)
    return _mapped(operator.sub, b.values, a.values, start=start)


def pair(a: Series, b: Series, delta: array[float]) -> Pair:
    return Pair(
        a=a.arm,
        b=b.arm,
        steps=len(delta),
        differing=len(delta) - delta.count(0.0),
        mean=mean(delta, len(delta)),
        mean_abs=mean(map(abs, delta), len(delta)),
    )


def lag1(delta: array[float]) -> float | None:
    """Autocorrelation at distance one; None where there is no variance or it does not fit a double."""
    if len(delta) < 2:
        return None
    centred = _mapped((-mean(delta, len(delta))).__add__, delta)
    value = divide(sum(map(operator.mul, centred, islice(centred, 1, None))), sum(map(operator.mul, centred, centred)))
    return value if math.isfinite(value) else None


def sign_balance(delta: array[float]) -> dict[str, Any]:
    """Steps above, below and at zero; `share` is that of the positive among those not zero."""
    zero = delta.count(0.0)
    positive = sum(map((0.0).__lt__, delta))
    moved = len(delta) - zero
    return {
        "positive": positive,
        "negative": moved - positive,
        "zero": zero,
        "share": positive / moved if moved else None,
    }


def largest(delta: array[float]) -> tuple[int, float]:
    """Index and value of the largest |delta|; the first one if there are several."""
    highest, lowest = max(delta), min(delta)
    if highest == -lowest:
        return min((delta.index(value), value) for value in (highest, lowest))
    value = highest if highest > -lowest else lowest
    return delta.index(value), value


def find_jump(series: Series) -> Jump | None:
    """The first step after the third that lies above 8 times the median of the up to 8 steps before it."""
    values = series.values
    for begin in range(JUMP_AFTER, len(values), _BLOCK):
        block = values[max(0, begin - JUMP_WINDOW) : begin + _BLOCK]
        if max(block) <= JUMP_FACTOR * min(block):
            continue  # no value of the block can be that far above a median of the block
        for at in range(begin, min(begin + _BLOCK, len(values))):
            before = list(filter(math.isfinite, values[max(0, at - JUMP_WINDOW) : at]))
            if before and math.isfinite(values[at]) and values[at] > JUMP_FACTOR * statistics.median(before):
                step, median = series.steps[at], statistics.median(before)
                return Jump(arm=series.arm, step=step, before=median, value=values[at])
    return None


def run_mean_t(bases: Sequence[float], features: Sequence[float]) -> dict[str, Any]:
    """Are the means of the feature runs within what those of the base runs scatter by? t with k - 1 degrees.

    Two-sided prediction interval on run means: |m_f - m_b| / (s_b sqrt(1/n + 1/k)).
    """
    k, n = len(bases), len(features)
    centre = mean(bases, k)
    scatter = math.sqrt(mean(((value - centre) * (value - centre) for value in bases), k - 1))
    t = divide(abs(mean(features, n) - centre), scatter * math.sqrt(1 / n + 1 / k))
    finite = math.isfinite(t)
    return {"t": t if finite else None, "df": k - 1, "p": t_two_sided(t, k - 1) if finite else None}


def t_two_sided(t: float, df: int) -> float:
    """P(|T| > |t|) for whole degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(abs(t) / math.sqrt(df))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = df % 2
    term, series = cosine if odd else 1.0, 0.0
    for k in range(2 + odd, df + 1, 2):
        series += term
        term *= cosine * cosine * (k - 1) / k
    inside = (angle + sine * series) * 2 / math.pi if odd else sine * series
    return max(0.0, 1 - inside)


def t_quantile(level: float, df: int) -> float:
    """The t that |T| stays below with probability `level`, e.g. 12.71 for 0.95 and one degree."""
    low, high = 0.0, 1.0
    while t_two_sided(high, df) > 1 - level:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if t_two_sided(middle, df) > 1 - level else (low, middle)
    return (low + high) / 2


def spacing(steps: Sequence[int]) -> int:
    """How far apart steps are printed: the most frequent distance, the larger one of two equally frequent."""
    if len(steps) < 2:
        return max(steps[0], 1)
    if steps[-1] - steps[0] == len(steps) - 1:
        return 1
    gaps: Counter[int] = Counter(map(operator.sub, islice(steps, 1, None), steps))
    return max(gaps, key=lambda gap: (gaps[gap], gap))


def _wanted(steps: Sequence[int], total: int | None) -> Iterator[int]:
    """`steps` with its holes filled, up to the last one that is due. Lazy: one stray step can be far away."""
    apart = spacing(steps)
    final = steps[-1] if total is None else total - 1 if steps[0] == 0 else total
    for step, following in zip(steps, islice(steps, 1, None), strict=False):
        yield from range(step, following, apart)
    yield from range(steps[-1], max(final, steps[-1]) + 1, apart)


def _listed(steps: Sequence[int]) -> str:
    text = ", ".join(map(str, steps[:5]))
    return f"step {text}" if len(steps) == 1 else f"steps {text}{', …' if steps[5:] else ''}"


def _step_findings(series: Sequence[Series], total: int | None) -> list[str]:
    steps = series[0].steps
    same = all(one.steps == steps for one in series)
    complete = steps[-1] - steps[0] == len(steps) - 1 and (total is None or steps[-1] == total - (steps[0] == 0))
    if same and complete:
        return []
    union = steps if same else sorted(set().union(*(one.steps for one in series)))
    inside = [step for step in union if total is None or step <= total]
    due = f"expected T = {total}" if total is not None else f"the runs reach step {union[-1]}"
    found = []
    for one in series[:1] if same else series:
        who = "every run" if same else one.arm
        have = set(one.steps)
        wanted = _wanted(inside, total) if inside else iter(())
        missing = list(islice((step for step in wanted if step not in have), 6))
        if missing:
            ends = f", it ends at step {one.steps[-1]}" if missing[0] > one.steps[-1] else ""
            found.append(f"{who} is missing {_listed(missing)} of {one.metric} ({due}{ends})")
        if total is not None and one.steps[-1] > total:
            extra = [step for step in one.steps if step > total]
            found.append(f"{who} has {_listed(extra)} of {one.metric} beyond the expected T = {total}")
    return found or _irregular(union)


def _irregular(steps: Sequence[int]) -> list[str]:
    apart = spacing(steps)
    gaps = list(map(operator.sub, islice(steps, 1, None), steps))
    at = next((at for at, gap in enumerate(gaps[1:-1], 1) if gap != apart), None)
    if at is None:
        return []
    where = f"steps {steps[at]} and {steps[at + 1]} are {gaps[at]} apart, the others {apart}"
    return [f"the printed steps are irregular: {where}, so a missing step cannot be told"]


def findings(metric: str, runs: Sequence[Run]) -> list[str]:
    """Why `metric` cannot be compared over `runs`: equal names, faults, absence, step sets that differ or have holes.

    Without findings, all series of `metric` have the same steps, so position joins them by step number.
    """
    names = Counter(run.arm.name for run in runs)
    if twice := [name for name, count in names.items() if count > 1]:
        return [f"several runs are called {twice[0]}: give each its own name"]
    found = [
        attributed(run.arm.name, run.faults[key]) for run in runs for key in ("*", metric) if key in run.faults
    ]
    sound = [run for run in runs if not {"*", metric} & set(run.faults)]
    absent = [run.arm.name for run in sound if not has(run, metric)]
    if not any(has(run, metric) for run in runs) and absent:
        known = sorted({name for run in runs for name in run.series if has(run, name)})
        return [*found, f"no run prints {metric}; they print {', '.join(known) or 'nothing that could be read'}"]
    if absent:
        others = ", ".join(run.arm.name for run in runs if has(run, metric))
        return [*found, f"{metric} is missing in {', '.join(absent)}, though printed by {others}"]
    if found:
        return found
    totals = {run.arm.name: run.steps_expected for run in runs if run.steps_expected is not None}
    if len(set(totals.values())) > 1:
        each = ", ".join(f"{arm} {total}" for arm, total in totals.items())
        return [f"the runs expect different numbers of steps: {each}"]
    return _step_findings([run.series[metric] for run in runs], next(iter(totals.values()), None))


def has(run: Run, metric: str) -> bool:
    return metric in run.series and len(run.series[metric].steps) > 0


def attributed(arm: str, note: str) -> str:
    return note if note.startswith(arm) else f"{arm}: {note}"


def machine_differences(runs: Sequence[Run]) -> dict[str, dict[str, str]]:
    """Keys of the machine fingerprints that differ, with the value of each arm that has one."""
    keys = sorted({key for run in runs for key in run.machine})
    values: Mapping[str, dict[str, str]] = {
        key: {run.arm.name: run.machine[key] for run in runs if key in run.machine} for key in keys
    }
    return {key: by_arm for key, by_arm in values.items() if len(set(by_arm.values())) > 1}
