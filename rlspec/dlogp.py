"""Parity of two engines: d = train − rollout over one token stream, its aggregates, verdicts and likely causes.

The rollout's policy drew the tokens, so with r = exp(d) the mean of r − 1 − d estimates KL(rollout ‖ train); the other
direction would not. Sides go by role, never by the order of files. Sums are exact (math.fsum).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from heapq import nlargest
from itertools import chain
from operator import itemgetter, mul, ne, sub
from pathlib import Path
from typing import Any

from rlspec import logprobs
from rlspec.errors import SpecError
from rlspec.logprobs import LogProbs, shown
from rlspec.model import Judgment, Row, Status, Verdict

STANDARD = ("max_abs_dlogp", "mean_abs_dlogp", "approx_kl", "clip_fraction", "sequence_outliers")
SUBJECT = "logprob"
_PERMILLE = {"50": 500, "99": 990, "99.9": 999}
_NAMED = 10
_LAGS = (-2, -1, 0, 1, 2)
_PLAUSIBLE = 1e6  # products of larger log-probs overflow, and no cause is worth guessing


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    """Both files joined by sample and position, in the rollout's order; all columns are of one length."""

    spans: Mapping[str, tuple[int, int]]
    positions: array[int]
    tokens: array[int]
    rollout: array[float]
    train: array[float]
    d: array[float]
    size: array[float]
    peaks: Sequence[tuple[float, str]]
    flips: Sequence[bool] | None


def judge(rollout: Path, train: Path, judgments: Sequence[Judgment], resolve: Callable[[str], Row]) -> list[Verdict]:
    """One verdict a judgment, in their order. Unusable or different files give ERROR to all; a missing file or row
    raises SpecError."""
    asked = [(judgment.check, *_row(judgment.check, resolve)) for judgment in judgments]
    if _same_file(rollout, train):
        reason = f"self-comparison: rollout and train are the same file, {train}; give the file that each engine wrote"
        return _errors(asked, [reason])
    try:
        ours, theirs = logprobs.read(rollout), logprobs.read(train)
    except logprobs.BadLogProbs as error:
        return _errors(asked, [str(error)])
    notes = logprobs.remarks(ours, theirs)
    problems = logprobs.identity(ours, theirs)
    if problems:
        return _lead(_errors(asked, problems), notes, {})
    pair = _join(ours, theirs)
    evidence = _evidence(pair, ours, theirs)
    verdicts = [_verdict(pair, check, row, limits, evidence) for check, row, limits in asked]
    numbers: dict[str, Any] = {}
    statuses = {verdict.status for verdict in verdicts}
    if "FAIL" in statuses or "PASS" not in statuses:
        found = {name: hint(pair) for name, hint in _HINTS.items()} if _plausible(pair) else {}
        notes += [text for text, _ in found.values() if text]
        numbers = {"hints": {name: values for name, (_, values) in found.items() if values}}
    if pair.flips is not None:
        notes.append(_routing_note(evidence["routing"]))
    return _lead(verdicts, notes, numbers)


def approx_kl(d: Sequence[float]) -> float:
    """mean(exp(d) - 1 - d) over one token or more, without cancellation for small d; inf where it overflows."""
    return _mean([math.expm1(x) - x for x in d]) if max(d) < 709.0 else math.inf


def outside(d: Iterable[float], low: float, high: float) -> int:
    """How many exp(d) lie outside [low, high]; bounds above 0."""
    least, most = math.log(low), math.log(high)
    return sum(not least <= x <= most for x in d)


def _mean(values: Sequence[float]) -> float:
    try:
        return math.fsum(values) / len(values)
    except OverflowError:
        return math.inf


def _row(check: str, resolve: Callable[[str], Row]) -> tuple[Row, dict[str, float]]:
    """The row of a judgment and its limits; for outliers also `above`, the limit of one token."""
    if check not in STANDARD:
        close = get_close_matches(check, STANDARD, 1)
        raise SpecError(f"unknown judgment {check!r}; " + (f"did you mean {close[0]}?" if close else f"use {STANDARD}"))
    row = resolve(check)
    limits = dict(row.limits)
    if row.status in ("applicable", "optional") and "max" not in limits:
        raise SpecError(f"row {row.id} has no limit `max`")
    if check == "clip_fraction":
        limits = {"low": 0.8, "high": 1.2, **limits}
        if not 0 < limits["low"] < limits["high"]:
            raise SpecError(f"row {row.id}: clip range [{limits['low']:g}, {limits['high']:g}] is not 0 < low < high")
    if check == "sequence_outliers":
        token_row = resolve("max_abs_dlogp")
        if "max" not in token_row.limits:
            raise SpecError(f"sequence_outliers counts by the limit `max` of row {token_row.id}, which has none")
        limits["above"] = token_row.limits["max"]
    return row, limits


def _same_file(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:  # missing or unreadable: reading says so
        return False


def _errors(asked: Iterable[tuple[str, Row, Mapping[str, float]]], problems: list[str]) -> list[Verdict]:
    return [
        Verdict(
            judgment=check,
            subject=SUBJECT,
            status="ERROR",
            reason="; ".join(problems),
            row=row,
            evidence={"problems": problems},
        )
        for check, row, _ in asked
    ]


def _lead(verdicts: list[Verdict], notes: Sequence[str], numbers: Mapping[str, Any]) -> list[Verdict]:
    """Notes and numbers of the whole comparison go to one verdict, that of max_abs_dlogp or else the first."""
    at = next((at for at, verdict in enumerate(verdicts) if verdict.judgment == "max_abs_dlogp"), 0)
    return [
        replace(verdict, notes=tuple(notes), evidence={**verdict.evidence, **numbers}) if index == at else verdict
        for index, verdict in enumerate(verdicts)
    ]


def _join(ours: LogProbs, theirs: LogProbs) -> _Pair:
    train, routing = theirs.logprobs, theirs.routing
    if list(ours.spans.items()) != list(theirs.spans.items()):
        train = array("d")
        routing = None if routing is None else array("Q")
        for start, stop in map(theirs.spans.__getitem__, ours.spans):
            train.extend(theirs.logprobs[start:stop])
            if routing is not None and theirs.routing is not None:
                routing.extend(theirs.routing[start:stop])
    d = array("d", map(sub, train, ours.logprobs))
    size = array("d", map(abs, d))
    return _Pair(
        spans=ours.spans,
        positions=ours.positions,
        tokens=ours.tokens,
        rollout=ours.logprobs,
        train=train,
        d=d,
        size=size,
        peaks=[(max(size[start:stop]), name) for name, (start, stop) in ours.spans.items()],
        flips=None if ours.routing is None or routing is None else [*map(ne, ours.routing, routing)],
    )


def _evidence(pair: _Pair, ours: LogProbs, theirs: LogProbs) -> dict[str, Any]:
    total = len(pair.d)
    ordered = sorted(pair.size)
    worst = nlargest(_NAMED, pair.peaks, key=itemgetter(0))
    evidence: dict[str, Any] = {
        "tokens": total,
        "sequences": len(pair.spans),
        "worst_token": _worst(pair, worst[0][1]),
        "worst_sequences": [{"sample": shown(name), "max_abs_dlogp": peak} for peak, name in worst],
        "percentiles": {name: ordered[-(-part * total // 1000) - 1] for name, part in _PERMILLE.items()},
        "mean_dlogp": _mean(pair.d),
        "positive_share": sum(map((0.0).__lt__, pair.d)) / total,
        "semantics": {"rollout": dict(ours.semantics), "train": dict(theirs.semantics)},
    }
    if pair.flips is not None:
        calm = [size for size, flip in zip(pair.size, pair.flips, strict=True) if not flip]
        evidence["routing"] = {
            "tokens": total,
            "flips": total - len(calm),
            "max_abs_dlogp_without_flips": max(calm, default=None),
        }
    return evidence


def _worst(pair: _Pair, name: str) -> dict[str, Any]:
    start, stop = pair.spans[name]
    at = max(range(start, stop), key=pair.size.__getitem__)
    return {
        "sample": shown(name),
        "position": pair.positions[at],
        "token": pair.tokens[at],
        "rollout": pair.rollout[at],
        "train": pair.train[at],
        "dlogp": pair.d[at],
    }


def _verdict(pair: _Pair, check: str, row: Row, limits: Mapping[str, float], evidence: Mapping[str, Any]) -> Verdict:
    value, what, detail, more = _STATISTICS[check](pair, limits, evidence)
    status, relation = _status(value, row, limits)
    reason = row.reason if status == "N/A" else f"{what} is {relation}; {detail}"
    return Verdict(
        judgment=check,
        subject=SUBJECT,
        status=status,
        reason=reason,
        statistic=value,
        row=row,
        evidence={**evidence, **more},
    )


def _status(value: float, row: Row, limits: Mapping[str, float]) -> tuple[Status, str]:
    if row.status in ("out_of_scope", "not_applicable"):
        return "N/A", row.reason
    if not math.isfinite(value):
        return "FAIL", f"{value}, not a finite number"
    if row.status == "measured":
        return "MEASURED", f"{value:.6g}, reported and not gated"
    limit = limits["max"]
    number = f"{value:.6g}" if value == limit or f"{value:.6g}" != f"{limit:.6g}" else repr(value)
    return ("PASS", f"{number}, within {limit:g}") if value <= limit else ("FAIL", f"{number}, above {limit:g}")


_Statistic = tuple[float, str, str, dict[str, Any]]


def _max_abs(pair: _Pair, limits: Mapping[str, float], evidence: Mapping[str, Any]) -> _Statistic:
    at = evidence["worst_token"]
    detail = (
        f"largest at sample {at['sample']} position {at['position']} token {at['token']}: rollout {at['rollout']:.6g}, "
        f"train {at['train']:.6g} ({_over(pair)})"
    )
    return max(pair.size), "max |d|", detail, {}


def _mean_abs(pair: _Pair, limits: Mapping[str, float], evidence: Mapping[str, Any]) -> _Statistic:
    return _mean(pair.size), "mean |d|", f"mean d {evidence['mean_dlogp']:.6g} ({_over(pair)})", {}


def _approx_kl(pair: _Pair, limits: Mapping[str, float], evidence: Mapping[str, Any]) -> _Statistic:
    return approx_kl(pair.d), "mean(exp(d) - 1 - d)", f"d = train - rollout ({_over(pair)})", {}


def _clip(pair: _Pair, limits: Mapping[str, float], evidence: Mapping[str, Any]) -> _Statistic:
    count, total = outside(pair.d, limits["low"], limits["high"]), len(pair.d)
    interval = f"[{limits['low']:g}, {limits['high']:g}]"
    more = {"outside": count, "low": limits["low"], "high": limits["high"]}
    return count / total, f"share of exp(d) outside {interval}", f"{count} of {total} tokens", more


def _outliers(pair: _Pair, limits: Mapping[str, float], evidence: Mapping[str, Any]) -> _Statistic:
    above = limits["above"]
    bad = [(peak, name) for peak, name in pair.peaks if not peak <= above]
    names = [shown(name) for _, name in bad[:_NAMED]]
    more = f" and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
    detail = f"of {len(pair.peaks)} sequences" + (f": {', '.join(names)}{more}" if bad else "")
    return float(len(bad)), f"count of sequences with |d| above {above:g}", detail, {"outliers": names, "above": above}


def _over(pair: _Pair) -> str:
    return f"{len(pair.d)} tokens, {len(pair.spans)} sequences"


_STATISTICS: Mapping[str, Callable[[_Pair, Mapping[str, float], Mapping[str, Any]], _Statistic]] = {
    "max_abs_dlogp": _max_abs,
    "mean_abs_dlogp": _mean_abs,
    "approx_kl": _approx_kl,
    "clip_fraction": _clip,
    "sequence_outliers": _outliers,
}

# Likely causes. Each gives a text, empty unless the numbers are convincing, and the numbers.
_Hint = tuple[str, dict[str, Any]]


def _plausible(pair: _Pair) -> bool:
    return any(pair.d) and min(min(pair.rollout), min(pair.train)) > -_PLAUSIBLE


def _dot(one: Iterable[float], other: Iterable[float]) -> float:
    return math.fsum(map(mul, one, other))


def _temperature(pair: _Pair) -> _Hint:
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


def _shift(pair: _Pair) -> _Hint:
    """Correlation of rollout[i] with train[i + lag] within sequences."""
    ours, theirs = _centred(pair.rollout), _centred(pair.train)
    scale = math.sqrt(_dot(ours, ours)) * math.sqrt(_dot(theirs, theirs)) / len(ours)
    if not scale > 0:
        return "", {}
    by_lag: dict[int, float] = {}
    for lag in _LAGS:
        cuts = [(a - min(lag, 0), b - max(lag, 0)) for a, b in pair.spans.values() if b - a > abs(lag)]
        count = sum(b - a for a, b in cuts)
        if count >= 32:
            products = (map(mul, ours[a:b], theirs[a + lag : b + lag]) for a, b in cuts)
            by_lag[lag] = math.fsum(chain.from_iterable(products)) / count / scale
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


def _offset(pair: _Pair) -> _Hint:
    mean = _mean(pair.d)
    spread = math.sqrt(_mean([(x - mean) ** 2 for x in pair.d]))
    up, down = sum(map((0.0).__lt__, pair.d)), sum(map((0.0).__gt__, pair.d))
    share = max(up, down) / max(1, up + down)
    numbers = {"mean": mean, "standard_deviation": spread, "kept_mass": math.exp(-abs(mean)), "one_sided": share}
    side = "rollout" if mean < 0 else "train"
    if len(pair.d) >= 8 and spread <= 0.1 * abs(mean):
        kept = f"kept mass exp({-abs(mean):.3g}) = {math.exp(-abs(mean)):.3g}"
        text = f"d is nearly constant, {mean:.4g}: {kept}, the {side} file looks renormalised over top-p or top-k"
        return text, numbers
    if len(pair.d) >= 64 and share >= 0.98 and max(pair.size) <= math.log(2):
        kept = f"kept mass down to {math.exp(-max(pair.size)):.3g}"
        text = f"{share:.1%} of d have one sign, mean {mean:.4g}: {kept}, if {side} is renormalised over top-p or top-k"
        return text, numbers
    return "", numbers


def _growth(pair: _Pair) -> _Hint:
    """Least squares of |d| on the distance from a sequence's first position."""
    starts = chain.from_iterable([pair.positions[a]] * (b - a) for a, b in pair.spans.values())
    distance = [float(position - start) for position, start in zip(pair.positions, starts, strict=True)]
    x, y = _centred(distance), _centred(pair.size)
    xx, yy, xy = _dot(x, x), _dot(y, y), _dot(x, y)
    if not (xx > 0 and yy > 0):
        return "", {}
    slope, correlation, longest = xy / xx, xy / math.sqrt(xx) / math.sqrt(yy), max(distance)
    first = _mean(pair.size) - slope * _mean(distance)
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


def _centred(values: Sequence[float]) -> array[float]:
    mean = _mean(values)
    return array("d", [value - mean for value in values])


def _routing_note(routing: Mapping[str, Any]) -> str:
    calm = routing["max_abs_dlogp_without_flips"]
    rest = "no token has the same experts on both sides" if calm is None else f"max |d| of the others is {calm:.6g}"
    return f"routing: {routing['flips']} of {routing['tokens']} tokens went to other experts; {rest}"


_HINTS: Mapping[str, Callable[[_Pair], _Hint]] = {
    "temperature": _temperature,
    "shift": _shift,
    "offset": _offset,
    "growth": _growth,
}
