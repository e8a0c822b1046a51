"""Gradients of a mixture of experts' weights over calls, and what its load-balance losses are made of.

Canonical order. The router's weight is a matrix whose rows are tokens: see `rlspec.device.gradients`. An expert's
weight is a sum over the tokens that chose it: samples as numbered, positions ascending, then slots ascending. Of each
expert these rows are one sequence, cut into blocks of 16 from its first row on; the last block alone is filled up with
zero rows. Where the blocks of an expert begin and end is a matter of the routing, so it is free of batch, chunk,
padding and the order of dispatch, and no sample's end leaves a block half empty.

Carried between calls: at most 15 rows an expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from rlspec.device import checking, gradients
from rlspec.device.gradients import BLOCK, Identity, WeightGradient


class Sums(Protocol):
    """Adds rows [M, K] and [M, N] to the sums of their experts, in the order in which they come."""

    def add(self, x: Tensor, dy: Tensor, rows: Tensor, experts: Tensor, offsets: Tensor) -> Any:
        """`rows` int64: which of the rows, by expert and in each as they came; `experts` int64 of each; `offsets`."""
        ...

    def finish(self) -> Tensor:
        """fp32 [E, N, K]."""
        ...


class ExpertGradient(WeightGradient):
    """Of the weights [E, N, K] of a grouped product. `sums`: who adds, see `Sums`."""

    def __init__(self, weight: Tensor, sums: Sums, lengths: Sequence[int] | None = None) -> None:
        super().__init__(torch.zeros(1, device=weight.device), _nothing, lengths)
        self._sums, self._experts = sums, len(weight)

    @torch.no_grad()
    def add(self, x: Tensor, dy: Tensor, identity: Identity, experts: Tensor) -> None:  # type: ignore[override]
        """x [R, k, K] and dy [R, k, N] of each slot, experts int64 [R, k]; R as in the identity.

        Raises what `WeightGradient.add` raises, and ValueError for experts of another shape and, on a CPU, for experts
        outside. No host sync.
        """
        self._check(x, dy, identity)
        if (
            experts.dtype != torch.int64
            or x.dim() != 3
            or dy.dim() != 3
            or not x.shape[:2] == dy.shape[:2] == experts.shape
        ):
            shapes = f"x {list(x.shape)}, dy {list(dy.shape)}, experts {experts.dtype} {list(experts.shape)}"
            raise ValueError(f"{shapes}: [R, k, K], [R, k, N] and int64 [R, k] are due")
        ordered = identity.ordered
        if not ordered:
            return
        after = self._follow(ordered)
        top_k = experts.shape[1]
        slots = [torch.arange(run.row * top_k, (run.row + run.length) * top_k) for run in ordered]
        places = torch.cat(slots).to(x.device, non_blocking=True)
        mine = experts.flatten().index_select(0, places)
        checking.in_range("experts", mine, self._experts, sync=False)
        chosen, order = mine.sort(stable=True)
        offsets = torch.searchsorted(chosen, torch.arange(self._experts + 1, device=x.device))
        rows = places.index_select(0, order)
        self._sums.add(x.flatten(0, 1), dy.flatten(0, 1), rows, chosen, offsets)
        self._sample, self._position, self._open_length = after

    def finish(self) -> Tensor:
        """As `WeightGradient.finish`."""
        super().finish()
        return self._sums.finish()


class PlainSums:
    """`Sums` by `fold_matrix`: elementwise, on every device alike, and slow. One host sync a call."""

    def __init__(self, weight: Tensor) -> None:
        self._total = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        self._kept: list[tuple[Tensor, Tensor] | None] = [None] * len(weight)

    def add(self, x: Tensor, dy: Tensor, rows: Tensor, experts: Tensor, offsets: Tensor) -> None:
        ends = offsets.tolist()
        for expert, (start, stop) in enumerate(zip(ends, ends[1:], strict=False)):
            if start == stop:
                continue
            mine = x.index_select(0, rows[start:stop]), dy.index_select(0, rows[start:stop])
            kept = self._kept[expert]
            mine = mine if kept is None else tuple(torch.cat(pair) for pair in zip(kept, mine, strict=True))  # type: ignore[assignment]
            whole = len(mine[0]) // BLOCK * BLOCK
            self._fold(expert, *mine, whole)
            self._kept[expert] = (mine[0][whole:], mine[1][whole:]) if whole < len(mine[0]) else None

    def finish(self) -> Tensor:
        for expert, kept in enumerate(self._kept):
            if kept is not None:
                self._fold(expert, *kept, BLOCK)
        return self._total

    def _fold(self, expert: int, x: Tensor, dy: Tensor, count: int) -> None:
        if count:
            rows = torch.arange(count, dtype=torch.int32, device=x.device)
            gradients.fold_matrix(self._total[expert], x, dy, torch.where(rows < len(x), rows, -1).view(-1, BLOCK))


class RouterGradient(WeightGradient):
    """Of the router's weight [E, H]. `fold(accumulator, x, rows, blocks)` gets what `parts` takes apart."""

    def add(  # type: ignore[override]
        self, x: Tensor, dy: Tensor, identity: Identity, dweights: Tensor, choice: Tensor | None = None
    ) -> None:
        """x [R, H]; dy [R, E] and dweights [R, k], the gradients of the scores and of the weights.

        `choice` int64 [R, k] where the router was called with one; then in every call.
        """
        named = [] if choice is None else [choice.to(dy.dtype)]  # whole numbers below 2²⁴ are exact
        super().add(x, torch.cat((dy, dweights, *named), -1), identity)


def parts(rows: Tensor, experts: int, top_k: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients of scores and weights, and the choice or None, of rows [R, E + k] or [R, E + 2k]."""
    scores, weights, choice = rows.split((experts, top_k, rows.shape[1] - experts - top_k), -1)
    return scores, weights, choice.long() if choice.shape[1] else None


def grouped_gradient(weight: Tensor, *, lengths: Sequence[int] | None = None) -> ExpertGradient:
    """Of the weights [E, N, K] of `grouped_gemm`."""
    return ExpertGradient(weight, PlainSums(weight), lengths)


def statistics(
    probabilities: Tensor, experts: Tensor, pieces: Sequence[tuple[int, int]], *, together: bool
) -> tuple[Tensor, Tensor]:
    """What load-balance losses are made of: counts int64 [G, E] of choices, and summed scores [G, E].

    probabilities [N, E] and experts int64 [N, k] of a `Routing`; `pieces`: first row and length of each sequence in
    canonical order; other rows are pads. A loss by sequence takes G = n, one by micro-batch `together`, G = 1. One by
    global batch takes the latter and adds up the counts of all micro-batches and ranks, which are whole numbers.
    Each sum is one chain over rows ascending, so its bits are free of packing, padding and position.
    """
    count = probabilities.shape[1]
    chosen = (experts.unsqueeze(-1) == torch.arange(count, device=experts.device)).sum(1)
    counts, sums = [], []
    total = torch.zeros_like(probabilities[0])
    number = torch.zeros(count, dtype=torch.int64, device=experts.device)
    for first, length in pieces:
        if not together:
            total, number = torch.zeros_like(total), torch.zeros_like(number)
        for row in range(first, first + length):
            total = total + probabilities[row]
        number = number + chosen[first : first + length].sum(0)
        if not together:
            counts.append(number)
            sums.append(total)
    return (number.unsqueeze(0), total.unsqueeze(0)) if together else (torch.stack(counts), torch.stack(sums))


def _nothing(accumulator: Tensor, x: Tensor, dy: Tensor, blocks: Tensor) -> None:
    raise AssertionError("the sums of experts are not made here")
