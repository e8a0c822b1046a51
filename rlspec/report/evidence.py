"""What a verdict stands on: the sentences that a screen shows, and every figure.

Reads evidence leniently: a figure that a verdict does not carry is left out, never made up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rlspec.report import cell_figures, chain_figures, drift_figures, parity_figures, rows, timing_figures
from rlspec.report.text import clean, flat, number


def speaks(verdict: rows.Verdict) -> bool:
    """Whether the reason says more than table and sentences do."""
    return bool(verdict["status"] not in ("PASS", "MEASURED") or verdict["statistic"] is None)


def sentences(verdict: rows.Verdict) -> list[str]:
    """What to say below the table by default, beside the reason."""
    return list(_SENTENCES.get(verdict["judgment"], _nothing)(verdict))


def figures(verdict: rows.Verdict) -> list[rows.Figure]:
    """Every figure of the verdict as (name, value)."""
    own = chain_figures.figures if "configuration" in verdict["evidence"] else None
    found = [*(own or _FIGURES.get(verdict["judgment"], _all))(verdict), *_row(verdict["row"])]
    return [(name, value) for name, value in found if value not in ("", rows.EMPTY)]


def _nothing(verdict: rows.Verdict) -> Iterator[str]:
    yield from ()


def _all(verdict: rows.Verdict) -> Iterator[rows.Figure]:
    yield "value", number(verdict["statistic"], rows.limit_values(verdict), digits=6)
    for key, value in verdict["evidence"].items():
        yield clean(key).replace("_", " "), flat(value)


def _row(row: Mapping[str, Any] | None) -> Iterator[rows.Figure]:
    if row is not None:
        yield "contract row", clean(row["id"])
        yield "its limits", flat(row["limits"])
        yield "why these", f"{clean(row['reason'])} ({clean(row['source'])}, {clean(row['date'])})"


_SENTENCES: Mapping[str, Callable[[rows.Verdict], Iterator[str]]] = {
    "drift": drift_figures.sentences,
    **dict.fromkeys(rows.TIMING, timing_figures.sentences),
    **dict.fromkeys(rows.PARITY, parity_figures.sentences),
}
_FIGURES: Mapping[str, Callable[[rows.Verdict], Iterator[rows.Figure]]] = {
    "drift": drift_figures.figures,
    **dict.fromkeys(rows.TIMING, timing_figures.figures),
    **dict.fromkeys(rows.PARITY, parity_figures.figures),
    **dict.fromkeys(cell_figures.COLUMNS, cell_figures.figures),
}
