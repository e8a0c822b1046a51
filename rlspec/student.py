"""Student's t, for means of a few runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rlspec.compare import divide, mean


def run_mean_t(bases: Sequence[float], features: Sequence[float]) -> dict[str, Any]:
    """Are the means of the feature runs within what those of the base runs scatter by? t with k - 1 degrees.

    Two-sided prediction interval on run means: |m_f - m_b| / (s_b sqrt(1/n + 1/k)). `t` and `p` are None where the
    base runs do not scatter.
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
    for _ in range(60):  # bisection down to the last bit
        middle = (low + high) / 2
        low, high = (middle, high) if t_two_sided(middle, df) > 1 - level else (low, middle)
    return (low + high) / 2
