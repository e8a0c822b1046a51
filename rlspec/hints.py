"""Likely causes of a log-prob difference.

Each hint is a text, empty unless its numbers are convincing, and those numbers.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from operator import mul
from typing import Any

from rlspec.pairing import Pair, mean

LAGS = (-2, -1, 0, 1, 2)
PLAUSIBLE = 1e6  # products of larger log-probs overflow, and no cause is worth guessing

Hint = tuple[str, dict[str, Any]]


def find(pair: Pair) -> tuple[list[str], dict[str, Any]]:
    """The texts of all convincing hints, and `hints`: name to numbers."""
    plausible = any(pair.d) and min(min(pair.rollout), min(pair.train)) > -PLAUSIBLE
    found = {name: hint(pair) for name, hint in HINTS.items()} if plausible else {}
    numbers = {name: values for name, (_, values) in found.items() if values}
    return [text for text, _ in found.values() if text], {"hints": numbers}


def _temperature(pair: Pair) -> Hint:
    """Least squares through the origin, rollout = train / T: right for divided log-probs, rough for divided logits."""
    tt, rt, dd = _dot(pair.train, pair.train), _dot(pair.rollout, pair.train), _dot(pair.d, pair.d)
    if not (tt > 0 and rt > 0 and dd > 0):
        return "", {}
    scale = rt / tt
    if not scale > 0:
        return "", {}
    left = math.fsum((r - scale * t) ** 2 for r, t in zip(pair.rollout, pair.train, strict=True))
    explained = 1 - left / dd
    constant = math.fsum(pair.d) ** 2 / len(pair.d) / dd
    numbers = {"temperature": 1 / scale, "explained": explained}
    if not (explained >= 0.9 and explained > constant):
        return "", numbers
    text = (
        f"rollout = train / {1 / scale:.4g} explains {explained:.1%} of d: the rollout's log-probs look taken at "
        f"temperature {1 / scale:.4g} of train's; declare `temperature` in both files to have it checked"
    )
    return text, numbers


def _shift(pair: Pair) -> Hint:
    """Correlation of rollout[i] with train[i + lag] within sequences."""
    by_lag = _correlations(pair)
    if 0 not in by_lag:
        return "", {}
    numbers = {"correlation_by_lag": {f"{lag:+d}" if lag else "0": value for lag, value in by_lag.items()}}
    best = max(by_lag, key=by_lag.__getitem__)
    if best == 0 or not (by_lag[best] >= 0.8 and by_lag[best] - by_lag[0] >= 0.2):
        return "", numbers
    text = (
        f"the rollout's log-prob of a token follows train's {abs(best)} {'after' if best > 0 else 'before'} it "
        f"(correlation {by_lag[best]:.3f} at lag {best:+d}, {by_lag[0]:.3f} at lag 0): one side's log-probs are "
        "shifted against the tokens, as by an off-by-one"
    )
    return text, numbers


def _correlations(pair: Pair) -> dict[int, float]:
    """By lag, where there are 32 tokens or more; empty where nothing varies."""
    ours, theirs = _centred(pair.rollout), _centred(pair.train)
    scale = math.sqrt(_dot(ours, ours)) * math.sqrt(_dot(theirs, theirs)) / len(ours)
    by_lag: dict[int, float] = {}
    for lag in LAGS if scale > 0 else ():
        cuts = [(a - min(lag, 0), b - max(lag, 0)) for a, b in pair.spans.values() if b - a > abs(lag)]
        count = sum(b - a for a, b in cuts)
        if count >= 32:
            products = (map(mul, ours[a:b], theirs[a + lag : b + lag]) for a, b in cuts)
            by_lag[lag] = math.fsum(chain.from_iterable(products)) / count / scale
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
        return text, numbers
    if len(pair.d) >= 64 and share >= 0.98 and max(pair.size) <= math.log(2):
        kept = f"kept mass down to {math.exp(-max(pair.size)):.3g}"
        sign = f"{share:.1%} of d have one sign, mean {centre:.4g}"
        return f"{sign}: {kept}, if {side} is renormalised over top-p or top-k", numbers
    return "", numbers


def _growth(pair: Pair) -> Hint:
    """Least squares of |d| on the distance from a sequence's first position."""
    starts = chain.from_iterable([pair.positions[a]] * (b - a) for a, b in pair.spans.values())
    distance = [float(position - start) for position, start in zip(pair.positions, starts, strict=True)]
    x, y = _centred(distance), _centred(pair.size)
    xx, yy, xy = _dot(x, x), _dot(y, y), _dot(x, y)
    if not (xx > 0 and yy > 0):
        return "", {}
    slope, correlation, longest = xy / xx, xy / math.sqrt(xx) / math.sqrt(yy), max(distance)
    first = mean(pair.size) - slope * mean(distance)
    last = first + slope * longest
    numbers = {"slope_per_token": slope, "correlation": correlation, "fitted_first": first, "fitted_last": last}
    convincing = correlation >= 0.3 and correlation * math.sqrt(len(x)) >= 6
    if not (convincing and last >= 2 * first):
        return "", numbers
    text = (
        f"|d| grows along a sequence, {slope:.3g} a token (correlation {correlation:.2f}), to about {last:.3g} after "
        f"{longest:.0f}: error carried from token to token, as from a stale or coarse KV cache"
    )
    return text, numbers


def _dot(one: Iterable[float], other: Iterable[float]) -> float:
    return math.fsum(map(mul, one, other))


def _centred(values: Sequence[float]) -> array[float]:
    centre = mean(values)
    return array("d", [value - centre for value in values])


HINTS: Mapping[str, Callable[[Pair], Hint]] = {
    "temperature": _temperature,
    "shift": _shift,
    "offset": _offset,
    "growth": _growth,
}
