"""Likely causes of a log-prob difference.

Each hint is a text, empty unless its numbers are convincing, those numbers, and whether they are of a kind that no
rounding gives: then a difference has a cause that limits do not measure, however small it is.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from operator import add, mul
from typing import Any

from rlspec.pairing import Pair, mean

LAGS = (0, -2, -1, 1, 2)
GAIN = 0.2  # what a lag must correlate better than none
PLAUSIBLE = 1e100  # products of larger log-probs overflow, and no cause is worth guessing
ROUNDING = 1e-5  # log-probs in fp32 are this exact, and may all be off by one step
DISTINCT = 16  # log-probs: of fewer, differences may be alike by chance, as of one prompt that is repeated
MANY = 64  # tokens, where a share of signs or a rough correlation is to say something


@dataclass(frozen=True, slots=True)
class Hint:
    """`text` is empty unless the numbers convince. `sure`: no rounding does that. `beside`: say it beside a PASS."""

    text: str = ""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    sure: bool = False
    beside: bool = False


def find(pair: Pair) -> dict[str, Hint]:
    """All hints by name that have numbers."""
    plausible = any(pair.d) and min(min(pair.rollout), min(pair.train)) > -PLAUSIBLE
    found = {name: hint(pair) for name, hint in HINTS.items()} if plausible else {}
    return {name: hint for name, hint in found.items() if hint.numbers}


def _large(pair: Pair) -> bool:
    """Enough different tokens, and differences that fp32 does not give."""
    return len(set(pair.train)) >= DISTINCT and mean(pair.size) >= ROUNDING


def _divided(pair: Pair) -> Hint:
    """Least squares through the origin, rollout = train / T: log-probs divided by T, as no sampler has them."""
    tt, rt, dd = _dot(pair.train, pair.train), _dot(pair.rollout, pair.train), _dot(pair.d, pair.d)
    spread = math.fsum(value * value for value in _centred(pair.rollout))
    if not (tt > 0 and rt > 0 and dd > 0 and spread > 0 and rt / tt > 0):
        return Hint()
    scale = rt / tt
    left = array("d", (r - scale * t for r, t in zip(pair.rollout, pair.train, strict=True)))
    explained, of_rollout = 1 - _dot(left, left) / dd, 1 - _dot(left, left) / spread
    constant = math.fsum(pair.d) ** 2 / len(pair.d) / dd
    halved = sum(abs(rest) <= size / 2 for rest, size in zip(left, pair.size, strict=True)) / len(left)
    numbers = {"divisor": 1 / scale, "explained": explained, "of_rollout": of_rollout, "halved": halved}
    if not (explained >= 0.9 and explained > constant and of_rollout >= 0.9 and halved >= 0.8):  # not of one token
        return Hint(numbers=numbers)
    text = (
        f"rollout = train / {1 / scale:.4g} explains {explained:.1%} of d: log-probs that were divided by "
        f"{1 / scale:.4g} after the softmax, as no sampler does; a temperature divides logits"
    )
    return Hint(text, numbers, sure=_large(pair), beside=_large(pair))


def _temperature(pair: Pair) -> Hint:
    """Does d follow the log-prob? With a = 1 / T, log_softmax(a z) is a log_softmax(z) + (a - 1) H, where H is Rényi's
    entropy of order a: d = (1 - a) (log-prob + H). H is of all logits, so the tokens' log-probs do not give T.

    The correlation is with the mean of both sides: with noise of one size on both it is 0 (Bland and Altman, 1986).
    """
    middle = array("d", map(mul, map(add, pair.rollout, pair.train), repeat(0.5)))
    along, together = _correlation(pair.d, middle), _correlation(pair.rollout, pair.train)
    signs = min(sum(map((0.0).__lt__, pair.d)), sum(map((0.0).__gt__, pair.d))) / len(pair.d)
    numbers = {"correlation_of_d": along, "correlation": together}
    halves = (_correlation(pair.d[half::2], middle[half::2]) for half in (0, 1))  # one far token is in one of them
    convincing = len(pair.d) >= MANY and abs(along) >= 0.6 and together >= 0.9 and signs >= 0.05
    convincing = convincing and all(math.copysign(1, along) * half >= 0.5 for half in halves)
    if not (convincing and mean(pair.size) >= ROUNDING):
        return Hint(numbers=numbers)
    less, wider = ("below", "wider") if along < 0 else ("above", "narrower")
    text = (
        f"d follows the log-prob (correlation {along:.2f}) and the rollout's are spread {wider} than train's: as from "
        f"a temperature of the rollout {less} train's, or another scale of its logits; declare `temperature` in both "
        "files to have it checked"
    )
    return Hint(text, numbers, beside=len(pair.d) >= 4 * MANY)


def _shift(pair: Pair) -> Hint:
    """Correlation of rollout[i] with train[i + lag] within sequences."""
    by_lag = _correlations(pair)
    if 0 not in by_lag:
        return Hint()
    numbers = {"correlation_by_lag": {f"{lag:+d}" if lag else "0": value for lag, value in by_lag.items()}}
    best = max(by_lag, key=by_lag.__getitem__)
    if best == 0 or not (by_lag[best] >= 0.8 and by_lag[best] - by_lag[0] >= GAIN):
        return Hint(numbers=numbers)
    text = (
        f"the rollout's log-prob of a token follows train's {abs(best)} {'after' if best > 0 else 'before'} it "
        f"(correlation {by_lag[best]:.3f} at lag {best:+d}, {by_lag[0]:.3f} at lag 0): one side's log-probs are "
        "shifted against the tokens, as by an off-by-one"
    )
    return Hint(text, numbers, sure=_large(pair), beside=_large(pair))


def _correlations(pair: Pair) -> dict[int, float]:
    """By lag, where there are 32 tokens or more; empty where nothing varies, and lag 0 alone where none is better."""
    by_lag: dict[int, float] = {}
    for lag in LAGS:  # 0 first
        if by_lag.get(0, 0.0) > 1 - GAIN:
            break
        cuts = [(a - min(lag, 0), b - max(lag, 0)) for a, b in pair.spans.values() if b - a > abs(lag)]
        ours = array("d", chain.from_iterable(pair.rollout[a:b] for a, b in cuts))
        theirs = array("d", chain.from_iterable(pair.train[a + lag : b + lag] for a, b in cuts))
        if len(ours) >= 32 and min(ours) < max(ours) and min(theirs) < max(theirs):
            by_lag[lag] = _correlation(ours, theirs)
    return by_lag


def _offset(pair: Pair) -> Hint:
    """One constant, or one sign throughout: what renormalising over the kept tokens does."""
    centre = mean(pair.d)
    spread = math.sqrt(mean([(x - centre) ** 2 for x in pair.d]))
    up, down = sum(map((0.0).__lt__, pair.d)), sum(map((0.0).__gt__, pair.d))
    share = max(up, down) / max(1, up + down)
    numbers = {"mean": centre, "standard_deviation": spread, "kept_mass": math.exp(-abs(centre)), "one_sided": share}
    side = "rollout" if centre < 0 else "train"
    if len(pair.d) >= 8 and spread <= 0.1 * abs(centre):
        kept = f"kept mass exp({-abs(centre):.3g}) = {math.exp(-abs(centre)):.3g}"
        text = f"d is nearly constant, {centre:.4g}: {kept}, the {side} file looks renormalised over top-p or top-k"
        return Hint(text, numbers, sure=_large(pair), beside=_large(pair))
    if up + down >= MANY and share >= 0.98 and max(pair.size) <= math.log(2):
        kept = f"kept mass down to {math.exp(-max(pair.size)):.3g}"
        sign = f"{share:.1%} of d have one sign, mean {centre:.4g}"
        text = f"{sign}: {kept}, if {side} is renormalised over top-p or top-k; a temperature does it to greedy tokens"
        return Hint(text, numbers, beside=_large(pair))
    return Hint(numbers=numbers)


def _growth(pair: Pair) -> Hint:
    """Least squares of |d| on the distance from a sequence's first position."""
    starts = chain.from_iterable([pair.positions[a]] * (b - a) for a, b in pair.spans.values())
    distance = [float(position - start) for position, start in zip(pair.positions, starts, strict=True)]
    x, y = _centred(distance), _centred(pair.size)
    xx, yy, xy = _dot(x, x), _dot(y, y), _dot(x, y)
    if not (xx > 0 and yy > 0):
        return Hint()
    slope, correlation, longest = xy / xx, _correlation(distance, pair.size), max(distance)
    first = mean(pair.size) - slope * mean(distance)
    last = first + slope * longest
    numbers = {"slope_per_token": slope, "correlation": correlation, "fitted_first": first, "fitted_last": last}
    convincing = correlation >= 0.3 and correlation * math.sqrt(len(x)) >= 6
    if not (convincing and last >= 2 * first):
        return Hint(numbers=numbers)
    text = (
        f"|d| grows along a sequence, {slope:.3g} a token (correlation {correlation:.2f}), to about {last:.3g} after "
        f"{longest:.0f}: error carried from token to token, as from a stale or coarse KV cache"
    )
    return Hint(text, numbers)


def _dot(one: Iterable[float], other: Iterable[float]) -> float:
    return math.fsum(map(mul, one, other))


def _correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Pearson's, within -1 and 1 whatever the rounding; 0 where a side does not vary."""
    x, y = _centred(one), _centred(other)
    scale = math.sqrt(_dot(x, x)) * math.sqrt(_dot(y, y))
    return max(-1.0, min(1.0, _dot(x, y) / scale)) if scale > 0 else 0.0


def _centred(values: Sequence[float]) -> array[float]:
    centre = mean(values)
    return array("d", [value - centre for value in values])


HINTS: Mapping[str, Callable[[Pair], Hint]] = {
    "divided": _divided,
    "temperature": _temperature,
    "shift": _shift,
    "offset": _offset,
    "growth": _growth,
}
