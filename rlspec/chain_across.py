"""One arm of a chain held against the first: on the same weights and tokens, log-probs and gradients, to the bit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from rlspec.cells import Finding
from rlspec.chain_asked import Asked, bits, values_of
from rlspec.chain_truth import clash, cut_short, ended, unseen
from rlspec.layouts import CANONICAL
from rlspec.model import Row

Measured = Mapping[str, Any]


def judge(first: Measured, mine: Measured, of_first: Asked, of_mine: Asked, row: Row) -> Finding:
    """What is different in the canonical cell; gradients are told by their digests, and must be there."""
    for measured, asked in ((first, of_first), (mine, of_mine)):
        if found := _stopped(measured, asked):
            return found
    if first["weights"]["digest"] != mine["weights"]["digest"]:
        return Finding(category="red_provenance", reason="the two arms ran on different weights")
    pairs = list(zip(values_of(first, CANONICAL) or (), values_of(mine, CANONICAL) or (), strict=True))
    apart = [abs(a - b) for a, b in pairs if bits(a) != bits(b)]
    theirs, ours = gradients(first), gradients(mine)
    other = [name for name in ours if ours[name] != theirs[name]]
    evidence = {
        "comparisons": len(pairs) + len(ours), "outside": len(apart) + len(other), "failing": other[:20],
        "beside": first["run"]["arm"], "differing": len(apart), "max_abs_dlogp": max(apart, default=0.0),
    }  # fmt: skip
    statistic = float(len(apart) + len(other))
    if row.status == "measured":
        return Finding(category="measured", reason="not gated", statistic=statistic, evidence=evidence)
    if not apart and not other:
        reason = f"{len(pairs):,} log-probs and {len(ours):,} gradients are equal to the bit"
        return Finding(category="green", reason=reason, statistic=statistic, evidence=evidence)
    reason = "; ".join(_differences(pairs, apart, ours, other))
    return Finding(category="red_verdict", reason=reason, statistic=statistic, evidence=evidence)


def _differences(
    pairs: list[tuple[float, float]], apart: list[float], ours: Mapping[str, str], other: list[str]
) -> Iterator[str]:
    if apart:
        yield f"{len(apart):,} of {len(pairs):,} log-probs differ to the bit, max |d| {max(apart):.6g}"
    if other:
        yield f"{len(other):,} of {len(ours):,} gradients differ, first on the way back that of {other[-1]}"


def _stopped(measured: Measured, asked: Asked) -> Finding | None:
    """Why an arm cannot be held against another, or None."""
    if stopped := ended(measured, asked):
        return stopped
    if hidden := unseen(measured):
        return Finding(category="red_provenance", reason=hidden)
    values = values_of(measured, CANONICAL) or ()
    names, due = set(gradients(measured)), set(asked.model.parameter_shapes())
    if failed := cut_short(measured, "forward_invariance", missing=not values or names != due):
        return failed
    if len(values) != (active := asked.chain.tier.active):
        reason = f"{len(values)} log-probs of {measured['run']['arm']}, {active} tokens are active"
        return Finding(category="broken", reason=reason)
    if not all(map(math.isfinite, values)):
        return Finding(category="red_verdict", reason=f"a log-prob of {measured['run']['arm']} is not finite")
    if names != due:
        return Finding(category="broken", reason=f"{min(names ^ due)}: no gradient, or one that nobody asked for")
    broken = clash(measured, asked)
    return Finding(category="broken", reason=broken) if broken else None


def gradients(measured: Measured) -> dict[str, str]:
    """Digests of the canonical cell, by the comparisons that hold it against others; `clash` sees that they agree."""
    found = {}
    for line in measured["comparisons"]:
        if line["judgment"] == "gradient_invariance":
            found[line["tensor"]] = line["against_digest"]
        elif (line["judgment"], line["configuration"]) == ("gradient_accuracy", CANONICAL):
            found[line["tensor"]] = line["digest"]
    return found
