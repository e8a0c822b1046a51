"""A timing verdict in words: what was taken of which steps, and the figure of every run."""

from __future__ import annotations

from collections.abc import Iterator

from rlspec.report import rows
from rlspec.report.text import clean, number, percent


def sentences(verdict: rows.Verdict) -> Iterator[str]:
    """What the figures are, and whether an interval could be given."""
    evidence = verdict["evidence"]
    if "base" not in evidence:
        return
    interval = clean(evidence["interval"])
    yield f"{clean(evidence['figure']).capitalize()} over steps {clean(evidence['steps'])}, measured and not gated."
    yield f"{interval[:1].upper()}{interval[1:]}."
    if len(evidence["medians"]) > 2:
        runs = ", ".join(f"{clean(arm)} {number(value)}" for arm, value in evidence["medians"].items())
        yield f"By run: {runs} {rows.unit(evidence)}."


def figures(verdict: rows.Verdict) -> Iterator[rows.Figure]:
    """The figure of every run and their difference."""
    evidence = verdict["evidence"]
    for arm, value in evidence.get("medians", {}).items():
        yield f"{clean(arm)}, {clean(evidence['figure'])}", f"{number(value, digits=6)} {rows.unit(evidence)}"
    yield "feature - base", f"{number(evidence.get('difference'))} {rows.unit(evidence)}"
    yield "difference", percent(evidence.get("difference_percent"))
    yield "interval", clean(evidence.get("interval", ""))
    yield "metric, as printed", clean(verdict["subject"])
    yield "steps", clean(evidence.get("steps", ""))
    yield from rows.machines(evidence.get("machines_differ"))
