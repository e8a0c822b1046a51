"""A parity verdict in words: the worst token and sequences, and what might explain them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlspec.report import rows
from rlspec.report.text import clean, flat, number


def sentences(verdict: rows.Verdict) -> Iterator[str]:
    """The worst token, or the sequences that stand out, where the reason is not printed."""
    evidence, silent = verdict["evidence"], verdict["status"] in ("PASS", "MEASURED")
    if silent and verdict["judgment"] == "max_abs_dlogp" and (at := evidence.get("worst_token")):
        yield f"Worst token: {_token(at)}."
        yield f"{_compared(evidence)} compared."
    if silent and verdict["judgment"] == "sequence_outliers" and verdict["statistic"]:
        yield f"{clean(verdict['reason'])}."


def figures(verdict: rows.Verdict) -> Iterator[rows.Figure]:
    """Every figure; those of the whole comparison once, with the largest difference."""
    evidence = verdict["evidence"]
    get = evidence.get
    yield "value", number(verdict["statistic"], rows.limit_values(verdict), digits=6)
    if "outside" in evidence:
        low, high = number(get("low")), number(get("high"))
        yield "tokens with exp(d) outside the clip range", f"{number(evidence['outside'])} (range {low} to {high})"
    yield "outliers", ", ".join(map(clean, get("outliers", ())))
    if verdict["judgment"] != "max_abs_dlogp":
        return
    if get("tokens") is not None:
        yield "compared", _compared(evidence)
    if at := get("worst_token"):
        yield "worst token", f"{_token(at)}, d {number(at['dlogp'], digits=6)}"
    yield (
        "worst sequences",
        ", ".join(f"{clean(one['sample'])} {number(one['max_abs_dlogp'])}" for one in get("worst_sequences", ())),
    )
    yield "percentiles of |d|", ", ".join(f"{clean(q)} % {number(d)}" for q, d in get("percentiles", {}).items())
    yield "mean d", number(get("mean_dlogp"))
    if get("positive_share") is not None:
        yield "tokens with d above 0", f"{100 * evidence['positive_share']:.3g} %"
    for side, declared in get("semantics", {}).items():
        yield f"{clean(side)} declares", flat(declared)
    yield "routing", flat(get("routing", {}))
    for name, values in get("hints", {}).items():
        yield f"cause looked for: {clean(name)}", flat(values)


def _token(at: Mapping[str, Any]) -> str:
    where = f"sample {clean(at['sample'])} position {at['position']} token {at['token']}"
    return f"{where}, rollout {number(at['rollout'])}, train {number(at['train'])}"


def _compared(evidence: Mapping[str, Any]) -> str:
    return f"{number(evidence.get('tokens'))} tokens of {number(evidence.get('sequences'))} sequences"
