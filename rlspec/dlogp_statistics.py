"""The aggregates of d = train - rollout that a contract limits, each with the words for its verdict."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rlspec.logprob_lines import shown
from rlspec.pairing import Pair, mean

NAMED = 10  # outlying sequences that are named
EXP_OVERFLOWS = 709.0

Statistic = tuple[float, str, str, dict[str, Any]]  # value, what it is, details, further evidence


def approx_kl(d: Sequence[float]) -> float:
    """mean(exp(d) - 1 - d) over one token or more, without cancellation for small d; inf where it overflows."""
    return mean([math.expm1(x) - x for x in d]) if max(d) < EXP_OVERFLOWS else math.inf


def outside(d: Iterable[float], low: float, high: float) -> int:
    """How many exp(d) lie outside [low, high]; bounds above 0."""
    least, most = math.log(low), math.log(high)
    return sum(not least <= x <= most for x in d)


def _max_abs(pair: Pair, limits: Mapping[str, float], evidence: Mapping[str, Any]) -> Statistic:
    at = evidence["worst_token"]
    detail = (
        f"largest at sample {at['sample']} position {at['position']} token {at['token']}: rollout {at['rollout']:.6g}, "
        f"train {at['train']:.6g} ({_over(pair)})"
    )
    return max(pair.size), "max |d|", detail, {}


def _mean_abs(pair: Pair, limits: Mapping[str, float], evidence: Mapping[str, Any]) -> Statistic:
    return mean(pair.size), "mean |d|", f"mean d {evidence['mean_dlogp']:.6g} ({_over(pair)})", {}


def _approx_kl(pair: Pair, limits: Mapping[str, float], evidence: Mapping[str, Any]) -> Statistic:
    return approx_kl(pair.d), "mean(exp(d) - 1 - d)", f"d = train - rollout ({_over(pair)})", {}


def _clip(pair: Pair, limits: Mapping[str, float], evidence: Mapping[str, Any]) -> Statistic:
    count, total = outside(pair.d, limits["low"], limits["high"]), len(pair.d)
    interval = f"[{limits['low']:g}, {limits['high']:g}]"
    more = {"outside": count, "low": limits["low"], "high": limits["high"]}
    return count / total, f"share of exp(d) outside {interval}", f"{count} of {total} tokens", more


def _outliers(pair: Pair, limits: Mapping[str, float], evidence: Mapping[str, Any]) -> Statistic:
    above = limits["above"]
    bad = [(peak, name) for peak, name in pair.peaks if not peak <= above]
    names = [shown(name) for _, name in bad[:NAMED]]
    more = f" and {len(bad) - NAMED} more" if len(bad) > NAMED else ""
    detail = f"of {len(pair.peaks)} sequences" + (f": {', '.join(names)}{more}" if bad else "")
    return float(len(bad)), f"count of sequences with |d| above {above:g}", detail, {"outliers": names, "above": above}


def _over(pair: Pair) -> str:
    return f"{len(pair.d)} tokens, {len(pair.spans)} sequences"


STATISTICS: Mapping[str, Callable[[Pair, Mapping[str, float], Mapping[str, Any]], Statistic]] = {
    "max_abs_dlogp": _max_abs,
    "mean_abs_dlogp": _mean_abs,
    "approx_kl": _approx_kl,
    "clip_fraction": _clip,
    "sequence_outliers": _outliers,
}
