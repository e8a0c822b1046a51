"""Parameter gradients whose bits do not depend on how the rows were cut into calls.

Formula. A weight's gradient is a sum over rows: of dyᵀ·x for a matrix, of dy·x·rstd for a norm, of dy for the rows of
an embedding that an id chose. A floating-point sum has the bits of its order, and autograd's order is that of the
calls. Here the order is that of the workload: samples as numbered, positions ascending, in blocks of 16 positions that
start at position 0 of each sample; the last block of a sample is filled up with zero rows.

Promise. `WeightGradient` folds block after block onto one fp32 accumulator, and carries the rows of a block that a call
leaves unfinished, 15 at most. So one call, chunks of any size, single rows, packed, padded and permuted calls give
the same bits, in bounded memory. `add` never sorts across calls: a row that comes early, twice or never is a RunError.

Limits. One sample is open at a time, so a batch that is cut into columns has to be put together again before `add`.
The fold may be any kernel that takes blocks one after the other; those of this module are of elementwise additions
and multiplications alone, which IEEE 754 rounds alike in a vector, in its tail, and on every device, where the order
inside a library's matrix product is its own affair. They are slow and plain.

Tied weights are two gradients, added once at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from rlspec.device import checking
from rlspec.errors import RunError

BLOCK = 16

Fold = Callable[..., None]
"""fold(accumulator fp32, x [R, ...], dy [R, ...], blocks int32 [n, 16]): add n blocks of rows in order, in place.

An entry of `blocks` is a row of x and dy, or -1 for a zero row. Rows that stand in no block must not be read. A fold
that is `straight` is called without `blocks` where all rows of x and dy are to be added in their order.
"""


class Run(NamedTuple):
    """`length` rows of a call, from `row`: consecutive positions, from `position`, of the sample numbered `sample`."""

    sample: int
    position: int
    length: int
    row: int
    sample_length: int


class Plan(NamedTuple):
    """What a call adds: `blocks` int32 [n, 16], and the rows int64 that wait for their block; None if there are none.

    `straight`: the rows that the blocks hold, if they follow one another and zero rows stand at the very end alone.
    """

    blocks: Tensor | None
    left: Tensor | None
    straight: slice | None


@dataclass(frozen=True)
class Identity:
    """Which logical row each of the `rows` physical rows of one call is. Rows in no run are pads.

    Kept on the host. Raises ValueError for runs that are empty, outside the call or their sample, or that overlap.
    """

    runs: tuple[Run, ...]
    rows: int

    def __post_init__(self) -> None:
        for run in self.runs:
            if min(run.sample, run.position, run.row) < 0 or run.length < 1:
                raise ValueError(f"{run}: numbers must be at least 0, the length at least 1")
            if run.row + run.length > self.rows:
                raise ValueError(f"{run} goes beyond the {self.rows} rows of the call")
            if run.position + run.length > run.sample_length:
                raise ValueError(f"{run} goes beyond the {run.sample_length} positions of its sample")
        end = 0
        for run in sorted(self.runs, key=lambda run: run.row):
            if run.row < end:
                raise ValueError(f"{run} overlaps the rows of another run")
            end = run.row + run.length
        ordered = self.ordered
        for before, run in zip(ordered, ordered[1:], strict=False):
            if before.sample == run.sample and run.position < before.position + before.length:
                raise ValueError(f"sample {run.sample}, position {run.position} stands in two rows of one call")
            if before.sample == run.sample and run.sample_length != before.sample_length:
                lengths = f"{before.sample_length} and {run.sample_length}"
                raise ValueError(f"sample {run.sample} has two lengths in one call: {lengths}")

    @classmethod
    def of(cls, samples: Sequence[int], positions: Sequence[int], sample_lengths: Sequence[int]) -> Identity:
        """From one entry a row. Sample -1: a pad, whose other entries are not looked at."""
        if not len(samples) == len(positions) == len(sample_lengths):
            counts = f"{len(samples)} samples, {len(positions)} positions, {len(sample_lengths)} sample lengths"
            raise ValueError(f"{counts}: there must be one of each a row")
        runs: list[Run] = []
        for row, entry in enumerate(zip(samples, positions, sample_lengths, strict=True)):
            sample, position, length = (int(value) for value in entry)
            if sample == -1:
                continue
            last = runs[-1] if runs else None
            if last and last == (sample, position - last.length, last.length, row - last.length, length):
                runs[-1] = last._replace(length=last.length + 1)
            else:
                runs.append(Run(sample, position, 1, row, length))
        return cls(tuple(runs), len(samples))

    @property
    def ordered(self) -> list[Run]:
        """The runs in canonical order: samples as numbered, positions ascending."""
        return sorted(self.runs)

    def plan(self, held: int, device: torch.device) -> Plan:
        """With `held` carried rows in front of the call's. Kept: all weights of a model ask for the same."""
        if (held, device) not in self._plans:
            self._plans[held, device] = _cut(self.ordered, held, device)
        return self._plans[held, device]

    @cached_property
    def _plans(self) -> dict[tuple[int, torch.device], Plan]:
        return {}


class WeightGradient:
    """The gradient of one weight over all calls of a step, in canonical order. See the head of the module.

    `accumulator` fp32 is added to in place. `lengths`: the length of each sample of the workload; then samples that
    are missing at the end are noticed too. `straight`: the fold takes rows that lie in order without a table. After an
    error nothing of the refused call has been added.
    """

    def __init__(
        self, accumulator: Tensor, fold: Fold, lengths: Sequence[int] | None = None, *, straight: bool = False
    ) -> None:
        if accumulator.dtype != torch.float32:
            raise ValueError(f"a gradient is summed in fp32, not in {accumulator.dtype}")
        if lengths is not None and (not lengths or min(lengths) < 1):
            raise ValueError(f"there must be samples, and each must have rows: lengths {list(lengths)}")
        self._accumulator = accumulator
        self._fold = fold
        self._straight = straight
        self._lengths = None if lengths is None else tuple(int(length) for length in lengths)
        self._sample, self._position, self._open_length = 0, 0, 0
        self._carry: tuple[Tensor, Tensor] | None = None
        self._finished = False

    @property
    def carried(self) -> int:
        """The rows kept until their block is complete: at most 15."""
        return 0 if self._carry is None else len(self._carry[0])

    @torch.no_grad()
    def add(self, x: Tensor, dy: Tensor, identity: Identity) -> None:
        """Take the rows of one call: x [R, ...] (int64 [R] ids of an embedding), dy [R, ...], in any order.

        Raises RunError for a row that is not the next one of the logical order, and after `finish`; ValueError for
        tensors that do not fit the identity, the calls before, or the accumulator's device. No host sync.
        """
        self._check(x, dy, identity)
        ordered = identity.ordered
        if not ordered:
            return
        after = self._follow(ordered)
        held = self.carried
        if self._carry is not None:
            x, dy = (torch.cat(pair) for pair in zip(self._carry, (x, dy), strict=True))
        plan = identity.plan(held, x.device)
        if self._straight and plan.straight:
            self._fold(self._accumulator, x[plan.straight], dy[plan.straight])
        elif plan.blocks is not None:
            self._fold(self._accumulator, x, dy, plan.blocks)
        left = plan.left
        self._carry = None if left is None else (x.index_select(0, left), dy.index_select(0, left))
        self._sample, self._position, self._open_length = after

    def finish(self) -> Tensor:
        """The sum, fp32, in the weight's shape. Raises RunError naming the first row that never came."""
        if self._finished:
            raise RunError("this gradient was finished before")
        begun = self._sample or self._position
        missing = self._position or self._sample < len(self._lengths or ()) or not begun
        if missing:
            raise RunError(f"sample {self._sample}, position {self._position} never came")
        self._finished = True
        return self._accumulator

    def _check(self, x: Tensor, dy: Tensor, identity: Identity) -> None:
        if self._finished:
            raise RunError("rows came after the gradient was finished")
        if x.dim() < 1 or dy.dim() < 1 or not len(x) == len(dy) == identity.rows:
            shapes = f"x {list(x.shape)}, dy {list(dy.shape)}"
            raise ValueError(f"{shapes}: both must have the {identity.rows} rows of the identity")
        if not x.device == dy.device == self._accumulator.device:
            devices = f"x {x.device}, dy {dy.device}, sum {self._accumulator.device}"
            raise ValueError(f"on different devices: {devices}")
        for name, now, before in zip(("x", "dy"), (x, dy), self._carry or (x, dy), strict=True):
            if (now.dtype, now.shape[1:]) != (before.dtype, before.shape[1:]):
                told = f"{now.dtype} {list(now.shape[1:])} after {before.dtype} {list(before.shape[1:])}"
                raise ValueError(f"{name} has changed between calls: rows of {told}")

    def _follow(self, ordered: Sequence[Run]) -> tuple[int, int, int]:
        """Sample, position and sample length after these runs, each of which must be the next."""
        sample, position, length = self._sample, self._position, self._open_length
        for run in ordered:
            came = f"sample {run.sample}, position {run.position}"
            if (run.sample, run.position) < (sample, position):
                raise RunError(f"{came} came twice: the next is sample {sample}, position {position}")
            if (run.sample, run.position) > (sample, position):
                raise RunError(f"sample {sample}, position {position} has not come, and {came} is here already")
            known = length if position else self._known_length(sample, run.sample_length)
            if run.sample_length != known:
                raise ValueError(f"sample {sample} has {known} positions, and {run.sample_length} in this call")
            position, length = position + run.length, known
            if position == known:
                sample, position = sample + 1, 0
        return sample, position, length

    def _known_length(self, sample: int, claimed: int) -> int:
        if self._lengths is None:
            return claimed
        if sample >= len(self._lengths):
            raise ValueError(f"sample {sample} is not one of the {len(self._lengths)} of the workload")
        return self._lengths[sample]


def tree_sum(x: Tensor, dim: int = -1) -> Tensor:
    """The sum over `dim` by adding neighbours, then neighbours of the sums: an order that the width alone decides."""
    x = x.movedim(dim, 0)
    while len(x) > 1:
        pairs = x[: len(x) // 2 * 2]
        sums = pairs[0::2] + pairs[1::2]
        x = torch.cat((sums, x[-1:])) if len(x) % 2 else sums
    return x[0]


def reciprocal_rms(x: Tensor, eps: float) -> Tensor:
    """fp64 [..., 1]: 1/√(mean(x²) + eps) over the last dimension.

    torch's root on a CPU is not the correctly rounded one, so the root is Heron's: y ← (y + z/y)/2 from a guess that
    halves the exponent. Five steps from 4 % are enough for fp64, but not for z below 1e-300, as from fp64 inputs.
    """
    wide = x.double()
    mean = tree_sum(wide * wide).unsqueeze(-1) * (1 / x.shape[-1]) + eps
    root = ((mean.view(torch.int64) >> 1) + (1023 << 51)).view(torch.float64)
    for _ in range(5):
        root = (root + mean / root) * 0.5
    return 1 / torch.where(mean == 0, mean, root)


def fold_matrix(accumulator: Tensor, x: Tensor, dy: Tensor, blocks: Tensor) -> None:
    """[N, K] += dyᵀ·x of x [R, K] and dy [R, N]: in each block the 16 products one after the other, then their sum."""
    _fits(accumulator, (dy.shape[-1], x.shape[-1]), x.dim() == dy.dim() == 2, x, dy)
    for inputs, upstream in zip(_rows(x, blocks), _rows(dy, blocks), strict=True):
        product = upstream[0].unsqueeze(-1) * inputs[0]
        for row in range(1, BLOCK):
            # Not addcmul: a vector may fuse the two roundings where its tail does not.
            product += upstream[row].unsqueeze(-1) * inputs[row]
        accumulator += product


def fold_norm(eps: float) -> Fold:
    """[H] += dy·x·rstd of x and dy [R, H] or [R, heads, H], rstd the `reciprocal_rms` of each row or head, in fp32.

    A tree over the 16·heads rows of a block, position before head; then the blocks one after the other.
    """

    def fold(accumulator: Tensor, x: Tensor, dy: Tensor, blocks: Tensor) -> None:
        _fits(accumulator, x.shape[-1:], x.dim() in (2, 3) and x.shape == dy.shape, x, dy)
        inputs, upstream = _rows(x, blocks), _rows(dy, blocks)
        products = upstream * inputs * reciprocal_rms(inputs, eps).float()
        # The rows that fill up a block have 0 · inf where eps is 0.
        products = torch.where((blocks >= 0).reshape(*blocks.shape, *[1] * (x.dim() - 1)), products, 0)
        for part in tree_sum(products.flatten(1, -2), 1):
            accumulator += part

    return fold


def fold_embedding(accumulator: Tensor, tokens: Tensor, dy: Tensor, blocks: Tensor) -> None:
    """[V, H] += dy [R, H] at the rows `tokens` int64 [R], one row after the other."""
    _fits(accumulator, (len(accumulator), dy.shape[-1]), tokens.dim() == 1 and dy.dim() == 2, tokens, dy)
    ids = torch.where(blocks.flatten() >= 0, tokens.index_select(0, blocks.flatten().clamp(min=0)), 0)
    # On CUDA `index_add_` refuses an id outside by itself.
    checking.in_range("tokens", ids, len(accumulator), sync=False)
    # Zero rows go to id 0 and change nothing there: a sum that starts at +0 is never -0.
    for row, upstream in enumerate(_rows(dy, blocks).flatten(0, 1)):
        accumulator.index_add_(0, ids[row : row + 1], upstream.unsqueeze(0))


class LogprobGradient(WeightGradient):
    """Of a fused head [V, H], whose logits' gradient follows from x, weight, target and the log-prob's own gradient.

    `fold(accumulator, x, pairs, blocks)` gets dy and target of each row as `pairs` fp64 [R, 2], which holds both.
    """

    def add(self, x: Tensor, dy: Tensor, identity: Identity, targets: Tensor) -> None:  # type: ignore[override]
        """As `WeightGradient.add`, of x [R, H], dy [R] and targets int64 [R]."""
        super().add(x, torch.stack((dy.double(), targets.double()), -1), identity)


def matrix_gradient(weight: Tensor, lengths: Sequence[int] | None = None) -> WeightGradient:
    """Of a weight [N, K], from x [R, K] and dy [R, N]."""
    return WeightGradient(_zeros(weight, 2), fold_matrix, lengths)


def norm_gradient(weight: Tensor, *, eps: float, lengths: Sequence[int] | None = None) -> WeightGradient:
    """Of a norm's weight [H], from its inputs x and dy, [R, H] or [R, heads, H]."""
    return WeightGradient(_zeros(weight, 1), fold_norm(eps), lengths)


def embedding_gradient(weight: Tensor, lengths: Sequence[int] | None = None) -> WeightGradient:
    """Of a table [V, H], from token ids int64 [R] and dy [R, H]."""
    return WeightGradient(_zeros(weight, 2), fold_embedding, lengths)


def _cut(ordered: Sequence[Run], held: int, device: torch.device) -> Plan:
    """Blocks of rows, and the rows left over, of the `held` rows in front and the rows of the runs behind them."""
    table: list[int] = []
    rows = list(range(held))
    for run in ordered:
        rows += range(held + run.row, held + run.row + run.length)
        if run.position + run.length == run.sample_length:
            rows += [-1] * (-len(rows) % BLOCK)
        whole = len(rows) // BLOCK * BLOCK
        table, rows = table + rows[:whole], rows[whole:]
    blocks = torch.tensor(table, dtype=torch.int32).reshape(-1, BLOCK) if table else None
    left = torch.tensor(rows, dtype=torch.int64) if rows else None
    moved = (None if one is None else one.to(device, non_blocking=True) for one in (blocks, left))
    return Plan(*moved, _straight(table))


def _straight(table: Sequence[int]) -> slice | None:
    real = [row for row in table if row >= 0]
    follow = real and table[: len(real)] == list(range(real[0], real[0] + len(real)))
    return slice(real[0], real[0] + len(real)) if follow else None


def _rows(x: Tensor, blocks: Tensor) -> Tensor:
    """fp32 [n, 16, ...]: the rows of the blocks. Replaced, not multiplied, by zeros: a pad may be NaN."""
    found = x.index_select(0, blocks.flatten().clamp(min=0)).float()
    real = (blocks.flatten() >= 0).reshape(-1, *[1] * (x.dim() - 1))
    return torch.where(real, found, 0).unflatten(0, (-1, BLOCK))


def _fits(accumulator: Tensor, shape: Sequence[int], right: bool, x: Tensor, dy: Tensor) -> None:
    if not right or accumulator.shape != tuple(shape):
        shapes = f"x {list(x.shape)}, dy {list(dy.shape)}"
        raise ValueError(f"{shapes} do not fit a gradient {list(accumulator.shape)}")


def _zeros(weight: Tensor, dims: int) -> Tensor:
    if weight.dim() != dims or not weight.numel():
        raise ValueError(f"a weight of {dims} dimensions is needed, not {list(weight.shape)}")
    return torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
