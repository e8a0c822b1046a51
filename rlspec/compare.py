"""Arithmetic on series that are joined by step: deltas, floors, signs, jumps. It knows no limit and no verdict.

Every function takes whole arrays and stays in C loops, so a million steps cost tens of milliseconds each.
"""

from __future__ import annotations

import math
import operator
import statistics
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

from rlspec.model import Series

JUMP_FACTOR = 8.0
JUMP_WINDOW = 8
JUMP_AFTER = 3  # the first three steps have too little before them to jump from
TENTHS = 10
_CHUNK = 8192  # values turned into Python floats at a time
_BLOCK = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """What run b has above run a over the judged steps.

    Of each tenth of them `peaks` has the largest |delta| and `tenths` the mean, `tenth_floors` the floor.
    """

    a: str
    b: str
    steps: int
    differing: int
    mean: float
    mean_abs: float
    peaks: Sequence[float]
    tenths: Sequence[float]
    tenth_floors: Sequence[float]

    @property
    def sparse(self) -> bool:
        """Whether the runs differ, but on fewer than half of the steps."""
        return _few(self.differing, self.steps)

    @property
    def floor(self) -> float:
        """Mean |delta|; where the pair is sparse, over the steps on which it differs only."""
        return _undiluted(self.mean_abs, self.differing, self.steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Jump:
    """A value far above the median of those before it."""

    arm: str
    step: int
    before: float
    value: float


def first_judged(steps: Sequence[int]) -> int:
    """Index of the first judged step: step 1 (or 0, in logs that count from 0) precedes any update."""
    return 1 if steps[0] in (0, 1) else 0


def start(series: Series) -> int:
    """Index of the first value that counts: of counted lines the first, which may be the mean of several steps."""
    return 0 if series.counted else first_judged(series.steps)


def spacing(steps: Sequence[int]) -> int:
    """How far apart steps are printed: the most frequent distance, the larger one of two equally frequent."""
    if len(steps) < 2:
        return max(steps[0], 1)
    if steps[-1] - steps[0] == len(steps) - 1:
        return 1
    apart = Counter(gaps(steps))
    return max(apart, key=lambda gap: (apart[gap], gap))


def gaps(steps: Sequence[int]) -> list[int]:
    """The distances of neighbouring steps."""
    return list(map(operator.sub, islice(steps, 1, None), steps))


def first_non_finite(series: Series) -> int | None:
    """Index of the first value that is nan or infinite."""
    if math.isfinite(sum(series.values)):
        return None
    return next((at for at, value in enumerate(series.values) if not math.isfinite(value)), None)


def single_value(series: Sequence[Series]) -> float | None:
    """The one value of all series, over all steps or over two or more judged ones; None if anything varies."""
    value, judged = series[0].values[-1], len(series[0].values) - start(series[0])
    enough = judged if judged > 1 else len(series[0].values)
    tails = [one.values[-enough:] for one in series if one.values[-enough] == value == one.values[-1]]
    constant = len(tails) == len(series) and all(tail.count(value) == enough for tail in tails)
    return value if constant else None


def deltas(a: Series, b: Series, start: int) -> array[float]:
    """b - a from index `start` on. Both have the same steps (see `joining.findings`)."""
    assert len(a.values) == len(b.values)
    return _mapped(operator.sub, b.values, a.values, start=start)


def pair(a: Series, b: Series, delta: array[float]) -> Pair:
    """What `delta`, that is b - a, says of two runs."""
    tenths = [delta[begin:end] for begin, end in pairwise(cuts(len(delta)))]
    means = [sum(map(abs, tenth)) / len(tenth) for tenth in tenths]
    return Pair(
        a=a.arm,
        b=b.arm,
        steps=len(delta),
        differing=len(delta) - delta.count(0.0),
        mean=mean(delta, len(delta)),
        mean_abs=mean(map(abs, delta), len(delta)),
        peaks=[max(max(tenth), -min(tenth)) for tenth in tenths],
        tenths=means,
        tenth_floors=[
            _undiluted(size, len(tenth) - tenth.count(0.0), len(tenth))
            for size, tenth in zip(means, tenths, strict=True)
        ],
    )


def cuts(steps: int) -> list[int]:
    """Where tenths of so many steps begin, and their end; of fewer than ten steps each is one."""
    parts = min(TENTHS, steps)
    return [steps * part // parts for part in range(parts + 1)]


def _few(differing: int, steps: int) -> bool:
    return 0 < 2 * differing < steps


def _undiluted(mean_abs: float, differing: int, steps: int) -> float:
    """Mean |delta|, of few steps that differ over those only."""
    return mean_abs * (steps / differing) if _few(differing, steps) else mean_abs


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


def mean(values: Iterable[float], count: int) -> float:
    """Correctly rounded sum over count; nan where the sum does not fit a double."""
    try:
        return math.fsum(values) / count
    except (OverflowError, ValueError):
        return math.nan


def divide(a: float, b: float) -> float:
    """a / b, nan for b = 0."""
    return a / b if b else math.nan


def _mapped(function: Callable[..., float], *arrays: array[float], start: int = 0) -> array[float]:
    out = array("d")
    for begin in range(start, len(arrays[0]), _CHUNK):
        out.fromlist(list(map(function, *(one[begin : begin + _CHUNK] for one in arrays))))
    return out
