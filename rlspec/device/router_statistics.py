"""Whether the `statistics` that a router promises are right, and free of where a sample's rows lie.

Scores of few digits sum exactly in fp32 in any order, so there the sums must be those of the reference, without a
tolerance; of others, two arrangements of the same rows must have the same bits. The gradient of a sum is copied to its
rows, so it is exact, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rlspec.device import comparing, fills, reference
from rlspec.device.autograd import differentiate
from rlspec.workloads import Sample, Tier

_GAP = 3  # rows of pads before each sample of an arrangement that is not packed
_SCORES, _EXPERTS, _UPSTREAM = 14, 15, 16  # offsets of the fills

Statistics = Callable[..., tuple[Tensor, Tensor]]


class _Placed(NamedTuple):
    """Rows of samples somewhere between pads; `pieces` in the order of the workload."""

    probabilities: Tensor
    experts: Tensor
    pieces: list[tuple[int, int]]


def check(
    statistics: Statistics, tier: Tier, experts: int, top_k: int, device: torch.device, *, backward: bool
) -> None:
    """Raises ValueError with what is wrong."""
    scores = [_rows(sample, tier, experts, device) for sample in tier.samples]
    chosen = [
        fills.integers(tier.seed, sample.id, range(sample.length), top_k, experts, _EXPERTS).to(device)
        for sample in tier.samples
    ]
    order = range(len(scores))
    for exact in (True, False):
        tables = [(one * 64).round() / 64 if exact else one for one in scores]
        packed = _placed(tables, chosen, order, 0)
        apart = _placed(tables, chosen, [*reversed(order)], _GAP)
        for together in (False, True):
            name = f"statistics(together={together})"
            found = _called(name, statistics, packed, together)
            _right(name, found, packed, together, exact=exact)
            moved = _called(name, statistics, apart, together)
            for what, here, there in zip(("counts", "sums"), found, moved, strict=True):
                if not comparing.identical(here, there):
                    raise ValueError(f"{name}: the {what} follow where the rows of the samples lie")
            if backward and exact:
                _goes_back(name, statistics, apart, together, tier)


def _rows(sample: Sample, tier: Tier, experts: int, device: torch.device) -> Tensor:
    return fills.rows("hashed", tier.seed, sample.id, range(sample.length), experts, _SCORES, device).abs()


def _placed(scores: Sequence[Tensor], chosen: Sequence[Tensor], order: Iterable[int], gap: int) -> _Placed:
    """The samples in this order, each behind pads, which hold what no sum may read."""
    lengths = [len(one) for one in scores]
    rows = sum(lengths) + gap * len(lengths)
    probabilities = torch.full((rows, scores[0].shape[1]), float("nan"), device=scores[0].device)
    experts = torch.zeros(rows, chosen[0].shape[1], dtype=torch.int64, device=scores[0].device)
    first, starts = 0, {}
    for index in order:
        first += gap
        starts[index] = first
        probabilities[first : first + lengths[index]] = scores[index]
        experts[first : first + lengths[index]] = chosen[index]
        first += lengths[index]
    return _Placed(probabilities, experts, [(starts[index], length) for index, length in enumerate(lengths)])


def _called(name: str, statistics: Statistics, on: _Placed, together: bool) -> tuple[Tensor, Tensor]:
    counts, sums = statistics(on.probabilities, on.experts, on.pieces, together=together)
    shape = (1 if together else len(on.pieces), on.probabilities.shape[1])
    for what, one, dtype in (("counts", counts, torch.int64), ("sums", sums, torch.float32)):
        if (tuple(one.shape), one.dtype) != (shape, dtype):
            raise ValueError(f"{name}: the {what} are {one.dtype} {list(one.shape)}, {dtype} {list(shape)} is due")
    return counts.clone(), sums.clone()  # an operator may give the same memory again


def _right(name: str, found: tuple[Tensor, Tensor], on: _Placed, together: bool, *, exact: bool) -> None:
    counts, sums = reference.router_statistics(on.probabilities.double(), on.experts, on.pieces, together=together)
    if not torch.equal(found[0], counts):
        raise ValueError(f"{name}: the counts are not those of the choices")
    if exact and not torch.equal(found[1].double(), sums):
        raise ValueError(f"{name}: the sums are not those of the scores, which are exact here")


def _goes_back(name: str, statistics: Statistics, on: _Placed, together: bool, tier: Tier) -> None:
    leaf = on.probabilities.detach().requires_grad_()
    _, sums = statistics(leaf, on.experts, on.pieces, together=together)
    if not sums.requires_grad:
        raise ValueError(f"{name}: no gradient flows through the sums")
    dy = fills.rows("hashed", tier.seed, "sums", range(len(sums)), sums.shape[1], _UPSTREAM, sums.device)
    (found,) = differentiate([sums], [leaf], [dy])
    if found is None:
        raise ValueError(f"{name}: no gradient reaches the scores")
    want = torch.zeros_like(found)
    for index, (first, length) in enumerate(on.pieces):
        want[first : first + length] = dy[0 if together else index]
    if not torch.equal(found, want):
        raise ValueError(f"{name}: the gradient of the sums is not that of each of their rows")
