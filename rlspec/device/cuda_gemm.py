"""Matrix products of implementation `cuda`: csrc/det_gemm.cu and csrc/linear_logprob.cu from torch.

The same functions as `rlspec.kernels.det_gemm` and `rlspec.kernels.linear_logprob`, with the same bits: formulas,
promises and the order of every sum are told there. `fold_logprob` is the `fold` of linear_logprob.

Limits. bf16, fp16, fp32 on a Hopper GPU (linear_logprob: bf16 and fp16). Tensor memory access wants dense rows that
start at multiples of 16 bytes; products of other shapes, and of fp32, go through a plain kernel, same bits, slower.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlspec.device import native

GROUP = 16  # rows of a block
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Tile(NamedTuple):
    """An entry of the table in csrc/det_gemm.cu, by its number there: rows × columns of the result a block.

    `here`: stored from registers, so that the rows of the result may begin anywhere. `along`: built for the data
    gradient too, where the reduced index runs along the rows of the weight.
    """

    number: int
    rows: int
    columns: int
    here: bool = False
    along: bool = True

    @property
    def pace(self) -> int:
        """Clocks for 64 of the reduced index: what the slowest of three parts of a multiprocessor needs.

        The matrix unit makes 2048 products a clock; shared memory, written once and read by each 64 rows, moves 128
        bytes, the way from the cache 64. Orders the tiles as measured on an H200.
        """
        loaded = 128 * (self.rows + self.columns)
        read = self.rows // 64 * 128 * (64 + self.columns)
        return max(64 * self.rows * self.columns // 2048, (loaded + read) // 128, loaded // 64)


# For up to 8 rows, where all that counts is that the weight comes without a stop: of those that fill the device best,
# the widest.
LEAN = tuple(Tile(n, 8, columns, here=True, along=False) for n, columns in ((10, 32), (11, 48), (12, 96), (13, 192)))
# For few rows: 64 columns a block, which the matrix unit takes as its rows.
FEW = (Tile(0, 16, 64, here=True, along=False), Tile(1, 32, 64, here=True, along=False))
# For more: of those that end soonest the first is taken.
MANY = (
    Tile(9, 256, 192),
    Tile(8, 128, 256),
    Tile(7, 128, 192),
    Tile(6, 128, 128),
    Tile(5, 64, 192),
    Tile(4, 64, 128),
    Tile(3, 64, 96, here=True, along=False),
    Tile(2, 64, 64),
)


@functools.lru_cache(maxsize=4096)
def _tile(rows: int, columns: int, processors: int, along: bool = False) -> Tile:
    """For a result [rows, columns]. Bits do not depend on the tile, so it is chosen for speed."""
    if rows <= 8 and not along:
        return min(LEAN, key=lambda tile: (-(-columns // tile.columns // processors) * tile.columns, -tile.columns))
    if rows <= FEW[-1].rows and not along:
        return next(tile for tile in FEW if rows <= tile.rows)

    def clocks(tile: Tile) -> int:
        tiles = -(-rows // tile.rows) * -(-columns // tile.columns)
        return -(-tiles // processors) * tile.pace

    return min((tile for tile in MANY if tile.along or not along), key=clocks)


def _processors(x: Tensor) -> int:
    return torch.cuda.get_device_properties(x.device).multi_processor_count


_AT_REST = ContextVar("at rest", default=False)
GATED = "det_gemm_gated"
# Whether so much of a weight at rest is asked for ahead that kernels before it would wait for their own loads: a whole
# ring a block is.
MUCH_AHEAD = True


@contextlib.contextmanager
def weights_at_rest(rest: bool = True) -> Iterator[None]:
    """Inside, a product of few rows begins to read its weight while kernels before it are at work: none may write it.

    Safe for weights that were written before a kernel that nothing overtakes, such as that of `embedding`: see
    csrc/launch.cuh. `residual_norm` of `rlspec.device.cuda_rows` reads its weight and residual while the kernel just
    before it, a product, is at work. The bits are the same. `rest` False: not so, inside of where it is.
    """
    token = _AT_REST.set(rest)
    try:
        yield
    finally:
        _AT_REST.reset(token)


def rests() -> bool:
    return _AT_REST.get()


# ---- launches ----


def _product(x: Tensor, weight: Tensor, out: Tensor, tile: Tile, along: bool = False) -> None:
    """out [M, N] = x [M, K] · weight [N, K]ᵀ; `along`: weight is [K, N]."""
    arguments = (x, weight, out, x.dtype, out.dtype, *_sizes(x, weight, out))
    if tile in LEAN:
        native.load("det_gemm").call("det_gemm_lean", *arguments, tile.number, rests())
    else:
        native.load("det_gemm").call("det_gemm_product", *arguments, along, tile.number)


def _gated_product(x: Tensor, weight: Tensor, out: Tensor, activated: Tensor, tile: Tile) -> None:
    """out [M, 2·N] = x [M, K] · weight [2·N, K]ᵀ and activated [M, N] = swiglu of its halves, for up to 8 rows."""
    arguments = (x, weight, out, activated, x.dtype, *_sizes(x, weight, out))
    native.load("det_gemm").call(GATED, *arguments, tile.number, rests())


def _sizes(x: Tensor, weight: Tensor, out: Tensor) -> tuple[int, ...]:
    return (x.shape[0], out.shape[1], x.shape[1], x.stride(0), weight.stride(0))


def _plain_product(a: Tensor, b: Tensor, out: Tensor, resume: bool = False) -> None:
    """out [M, N] = a [M, K] · b [N, K]ᵀ, on top of what out holds if `resume`; any strides of a and b."""
    sizes = (*out.shape, a.shape[1], *a.stride(), *b.stride())
    native.load("det_gemm").call("det_gemm_plain", a, b, out, a.dtype, out.dtype, *sizes, resume)


class Placed(NamedTuple):
    """Blocks of 16 rows of dy and x: where each starts, or -1 for those that are at their place in the copies."""

    starts: Tensor
    dy: Tensor
    x: Tensor


def _placed(dy: Tensor, x: Tensor, blocks: Tensor) -> Placed:
    """Of a table on the device: blocks whose rows lie together stay, others are copied."""
    count = blocks.shape[0]
    starts = torch.empty(-(-count // 4) * 4, dtype=torch.int32, device=x.device)
    copies = [torch.empty((count * GROUP, one.shape[1]), dtype=one.dtype, device=one.device) for one in (dy, x)]
    sizes = (count, x.shape[0], dy.shape[1], x.shape[1], dy.stride(0), x.stride(0))
    native.load("det_gemm").call("det_gemm_place_blocks", blocks, dy, x, starts, *copies, x.dtype, *sizes)
    return Placed(starts, *copies)


def _resumed_product(
    a: Tensor, b: Tensor, out: Tensor, across: bool, resume: bool, placed: Placed | None = None
) -> None:
    """out [M, N] (+)= a · b [K, N]; a is [K, M] if `across`, else [M, K]. `placed`: which rows of a and b, else all."""
    reduced = b.shape[0] if placed is None else placed.x.shape[0]
    sizes = (*out.shape, reduced, b.shape[0], a.stride(0), b.stride(0), across, resume)
    native.load("det_gemm").call("det_gemm_resumed", a, b, out, *(placed or (None,) * 3), a.dtype, out.dtype, *sizes)


def _suits(tensor: Tensor) -> bool:
    """Tensor memory access can read it: unit stride inside a row, rows that start at multiples of 16 bytes."""
    stride, size = tensor.stride(0), tensor.element_size()
    apart = stride >= tensor.shape[1] and stride * size % 16 == 0
    return apart and tensor.stride(1) == 1 and tensor.data_ptr() % 16 == 0


def _through_tma(*tensors: Tensor) -> bool:
    return tensors[0].dtype != torch.float32 and all(map(_suits, tensors))


def _forward(x: Tensor, weight: Tensor, out_dtype: torch.dtype) -> Tensor:
    rows, columns = x.shape[0], weight.shape[0]
    out = torch.empty((rows, columns), dtype=out_dtype, device=x.device)
    tile = _tile(rows, columns, _processors(x))
    if _through_tma(x, weight) and (tile.here or _suits(out)):
        _product(x, weight, out, tile)
    else:
        _plain_product(x, weight, out)
    return out


def _data_gradient(dy: Tensor, weight: Tensor) -> Tensor:
    dx = torch.empty((dy.shape[0], weight.shape[1]), dtype=weight.dtype, device=dy.device)
    if _through_tma(dy, weight, dx):
        _product(dy, weight, dx, _tile(*dx.shape, _processors(dy), along=True), along=True)
    else:
        _plain_product(dy, weight.t(), dx)
    return dx


def _weight_gradient(dy: Tensor, x: Tensor, out: Tensor, resume: bool) -> None:
    if _foldable(dy, x):
        _resumed_product(dy, x, out, across=True, resume=resume)
    else:
        _plain_product(dy.t(), x.t(), out, resume)


def _foldable(dy: Tensor, x: Tensor) -> bool:
    return _through_tma(dy, x) and x.shape[1] % 2 == 0


# ---- det_gemm ----


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, out_dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _forward(_rows(x), weight, out_dtype).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        dy = _rows(dy.to(weight.dtype))
        dx = dweight = None
        if ctx.needs_input_grad[0]:
            dx = _data_gradient(dy, weight).view(x.shape)
        if ctx.needs_input_grad[1]:
            dweight = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
            _weight_gradient(dy, _rows(x), dweight, resume=False)
        return dx, dweight, None


def det_gemm(x: Tensor, weight: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    """y = x · weightᵀ. x [..., K], weight [N, K] -> [..., N] in `out_dtype`, by default that of x.

    Differentiable, as `rlspec.kernels.det_gemm.det_gemm` tells. Raises ValueError for other shapes, empty tensors,
    dtypes that differ or are not bf16, fp16, fp32, and tensors that are not on a CUDA device.
    """
    check_linear(x, weight, out_dtype)
    _check_sizes(x, weight, "x", "weight")
    _check_device(x)
    return _Linear.apply(x, weight, out_dtype or x.dtype)


def check_linear(x: Tensor, weight: Tensor, out_dtype: torch.dtype | None = None) -> None:
    """Raise what `det_gemm` raises for shapes and dtypes."""
    _check_pair(x, weight, "x", "weight")
    if weight.dim() != 2 or x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x {list(x.shape)} and weight {list(weight.shape)}: det_gemm takes [..., K] and [N, K]")
    if out_dtype is not None and out_dtype not in DTYPES:
        raise ValueError(f"out_dtype {out_dtype}: det_gemm gives bf16, fp16 or fp32")


def lm_head(x: Tensor, weight: Tensor, *, out_dtype: torch.dtype) -> Tensor:
    """Logits: x [..., H], weight [V, H] -> [..., V] in `out_dtype`; fp32 is the unrounded chain. See `det_gemm`."""
    return det_gemm(x, weight, out_dtype)


def gate_up(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor] | None:
    """det_gemm(x, weight) [..., 2·N] and the swiglu of its halves [..., N], of x [..., K] and weight [2·N, K].

    Without gradients; the bits are those of `det_gemm` and `rlspec.device.cuda_rows.swiglu`. None where there is no
    kernel for both: more than 8 rows, fp32, or rows that tensor memory access cannot read.
    """
    _check_operands(x, weight, "x", "weight")
    if weight.dim() != 2 or x.dim() == 0 or x.shape[-1] != weight.shape[1] or weight.shape[0] % 2:
        raise ValueError(f"x {list(x.shape)} and weight {list(weight.shape)}: gate_up takes [..., K] and [2·N, K]")
    rows = _rows(x)
    if rows.shape[0] > LEAN[0].rows or not _through_tma(rows, weight):
        return None
    _check_device(x)
    out, activated = (rows.new_empty((rows.shape[0], weight.shape[0] // halves)) for halves in (1, 2))
    _gated_product(rows, weight, out, activated, _tile(rows.shape[0], weight.shape[0], _processors(x)))
    return out.view(*x.shape[:-1], -1), activated.view(*x.shape[:-1], -1)


def fold(accumulator: Tensor, x: Tensor, dy: Tensor, blocks: Tensor | None = None) -> None:
    """accumulator += dyᵀ · x over the rows that `blocks` names, resumed in place: the gradient of a linear's weight.

    accumulator fp32 [N, K] contiguous, x [R, K], dy [R, N] of one dtype, blocks int32 [B, 16]: rows of x and dy, block
    after block; -1 is a zero row in both, whatever x and dy hold elsewhere. Each element continues one fp32 chain, a
    block a step, so any cut of the sequence of blocks over calls gives the same bits.

    Without `blocks` all rows are added where they lie, in their order, the last block filled up with zero rows.
    `blocks` may be a CPU tensor: it is checked, and rows that follow one another, with -1 only at the very end, need no
    table. On the device the host does not look at the table: blocks of rows that lie together are read where they are,
    others copied first, and a row that does not exist makes the accumulator NaN. A graph can capture all of these but a
    CPU table of scattered rows.
    Raises ValueError for other shapes, dtypes, devices, an empty table, rows out of range in a CPU table, and an
    accumulator for bf16 or fp16 of an even width that does not start at a multiple of 8 bytes.
    """
    _check_operands(x, dy, "x", "dy")
    shapes = f"accumulator {list(accumulator.shape)}, x {list(x.shape)}, dy {list(dy.shape)}"
    if x.dim() != 2 or dy.dim() != 2 or x.shape[0] != dy.shape[0]:
        raise ValueError(f"{shapes}: fold takes [N, K], [R, K], [R, N]")
    if tuple(accumulator.shape) != (dy.shape[1], x.shape[1]):
        raise ValueError(f"{shapes}: fold takes [N, K], [R, K], [R, N]")
    if accumulator.dtype != torch.float32 or not accumulator.is_contiguous() or accumulator.device != x.device:
        raise ValueError("accumulator: fold adds into a contiguous fp32 tensor on the device of x")
    _check_pairs(accumulator, x)
    if blocks is not None:
        _check_blocks(blocks, x)
    _check_device(x)
    dy, x = _rows(dy), _rows(x)
    rows = slice(None) if blocks is None else _straight(blocks)
    if rows is not None:
        dy, x = dy[rows], x[rows]
        if x.shape[0]:
            _weight_gradient(dy, x, accumulator, resume=True)
        return
    on_host = blocks.device.type == "cpu"
    blocks = blocks.pin_memory().to(x.device, non_blocking=True) if on_host else blocks.contiguous()
    if _foldable(dy, x) and dy.shape[1] % 8 == x.shape[1] % 8 == 0:
        _resumed_product(dy, x, accumulator, across=True, resume=True, placed=_placed(dy, x, blocks))
    else:
        _weight_gradient(_gathered(dy, blocks), _gathered(x, blocks), accumulator, resume=True)


def _straight(blocks: Tensor) -> slice | None:
    """The rows of a table on the CPU if they follow one another, with -1 only at the very end."""
    if blocks.device.type != "cpu":
        return None
    table = blocks.flatten()
    count = int((table >= 0).sum())
    first = int(table[0]) if count else 0
    follows = torch.equal(table[:count], torch.arange(first, first + count, dtype=table.dtype))
    return slice(first, first + count) if follows else None


def _gathered(source: Tensor, blocks: Tensor) -> Tensor:
    """The rows of the table one after another: zeros for -1, NaN for a row that does not exist."""
    table = blocks.flatten().to(torch.int64)
    found = source.index_select(0, table.clamp(0, source.shape[0] - 1))
    missing = (table < -1) | (table >= source.shape[0])
    return torch.where((table == -1)[:, None], 0, torch.where(missing[:, None], float("nan"), found))


def _rows(x: Tensor) -> Tensor:
    """[..., K] -> [rows, K] with unit stride inside a row; copied only if x does not lie like that."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _check_operands(one: Tensor, other: Tensor, name: str, other_name: str) -> None:
    _check_pair(one, other, name, other_name)
    _check_sizes(one, other, name, other_name)


def _check_pair(one: Tensor, other: Tensor, name: str, other_name: str) -> None:
    names = f"{name} and {other_name}"
    if one.dtype != other.dtype or one.dtype not in DTYPES:
        raise ValueError(f"{names} are {one.dtype} and {other.dtype}: they must both be bf16, fp16 or fp32")
    if one.device != other.device:
        raise ValueError(f"{names} are on {one.device} and {other.device}")
    if not one.numel() or not other.numel():
        raise ValueError(f"{names} are {list(one.shape)} and {list(other.shape)}: an empty tensor")


def _check_sizes(one: Tensor, other: Tensor, name: str, other_name: str) -> None:
    # Not of a graph, which these would keep from having rows without an upper end.
    if max(one.numel() // one.shape[-1:].numel(), *one.shape[-1:], *other.shape) >= 2**31:
        names = f"{name} and {other_name}"
        raise ValueError(f"{names} are {list(one.shape)} and {list(other.shape)}: sizes must stay below 2^31")


def _check_device(x: Tensor) -> None:
    # The last of the checks, so that the others need no GPU.
    if not x.is_cuda:
        raise ValueError(f"tensors are on {x.device}: the kernels of `cuda` run on CUDA")


def _check_pairs(accumulator: Tensor, x: Tensor) -> None:
    # The kernel of the matrix unit reads and writes pairs of columns; fp32 and odd widths go through the plain one.
    paired = x.dtype != torch.float32 and accumulator.shape[1] % 2 == 0
    if paired and accumulator.data_ptr() % 8:
        raise ValueError("accumulator: it must start at a multiple of 8 bytes; a view into a larger one may not")


def _check_blocks(blocks: Tensor, x: Tensor) -> None:
    if blocks.dtype != torch.int32 or blocks.dim() != 2 or blocks.shape[1] != GROUP or not blocks.shape[0]:
        raise ValueError(f"blocks {blocks.dtype} {list(blocks.shape)}: rows come as int32 [B, {GROUP}]")
    if blocks.device.type == "cpu":
        low, high = int(blocks.min()), int(blocks.max())
        if low < -1 or high >= x.shape[0]:
            raise ValueError(f"blocks name rows {low} to {high} of {x.shape[0]}; -1 is a zero row")
    elif blocks.device != x.device:
        raise ValueError(f"blocks are on {blocks.device}, x on {x.device}")


# ---- linear_logprob ----

# Columns of the vocabulary of which a kernel leaves one maximum and one sum of exponentials a row.
PART = 256


def _sums_of_rows(x: Tensor, weight: Tensor, targets: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities and log-sum-exp, fp32 [rows] each."""
    (rows, width), columns = x.shape, weight.shape[0]
    tiles = -(-columns // PART)
    picked = torch.full((rows,), float("nan"), device=x.device)
    peaks, sums = torch.empty((2, rows, tiles), device=x.device)
    out, lse = torch.empty((2, rows), device=x.device)
    library = native.load("linear_logprob")
    sizes = (rows, columns, width, x.stride(0), weight.stride(0))
    library.call("linear_logprob_partial", x, weight, targets, picked, peaks, sums, x.dtype, *sizes)
    library.call("linear_logprob_join", targets, picked, peaks, sums, out, lse, rows, tiles, ignored)
    return out, lse


def _chunk(rows: int) -> int:
    """Columns of the vocabulary a time: the gradient of their logits takes about 128 MiB, never under 4096 columns."""
    return min(16384, max(4096, 2**26 // (1 << (rows - 1).bit_length())))


def _dlogits_by_columns(
    x: Tensor, weight: Tensor, targets: Tensor, lse: Tensor, gradient: Tensor, ignored: int
) -> Iterator[tuple[slice, Tensor]]:
    """Some columns of the vocabulary and the gradient of their logits, one part after the other in one buffer."""
    (rows, width), vocabulary = x.shape, weight.shape[0]
    chunk = min(_chunk(rows), -(-vocabulary // GROUP) * GROUP)
    buffer = torch.empty((rows, chunk), dtype=x.dtype, device=x.device)
    strides = (x.stride(0), weight.stride(0), chunk)
    for first in range(0, vocabulary, chunk):
        last = min(first + chunk, vocabulary)
        sizes = (rows, last - first, first, width, vocabulary, *strides, ignored)
        tensors = (x, weight, targets, lse, gradient, buffer)
        native.load("linear_logprob").call("linear_logprob_dlogits", *tensors, x.dtype, *sizes)
        yield slice(first, last), buffer[:, : last - first]


def _head_gradients(
    x: Tensor, weight: Tensor, targets: Tensor, lse: Tensor, gradient: Tensor, ignored: int, wanted: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """dx [M, H] and dweight [V, H] in the dtype of x, each if wanted."""
    dx = torch.empty(x.shape, device=x.device) if wanted[0] else None
    dweight = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device) if wanted[1] else None
    # Zero rows, so that what ignored rows hold cannot reach the weight as 0 · NaN.
    kept = _dense(torch.where((targets == ignored)[:, None], 0, x)) if wanted[1] else x
    for columns, dlogits in _dlogits_by_columns(x, weight, targets, lse, gradient, ignored):
        if dx is not None:
            _resumed(dlogits, weight[columns], dx, across=False, resume=columns.start > 0)
        if dweight is not None:
            _resumed(dlogits, kept, dweight[columns], across=True, resume=False)
    return None if dx is None else dx.to(x.dtype), dweight


def _resumed(a: Tensor, b: Tensor, out: Tensor, across: bool, resume: bool) -> None:
    """out [M, N] (+)= a · b [K, N]; a is [K, M] if `across`, else [M, K]."""
    if out.shape[1] % 2 == 0:
        _resumed_product(a, b, out, across, resume)
    else:
        _plain_product(a.t() if across else a, b.t(), out, resume)


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, ignored: int) -> Tensor:
        out, lse = _sums_of_rows(_dense(x), weight, targets, ignored)
        ctx.save_for_backward(x, weight, targets, lse)
        ctx.ignored = ignored
        return out.view(x.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight, targets, lse = ctx.saved_tensors
        gradient = gradient.reshape(-1).contiguous()
        wanted = ctx.needs_input_grad[:2]
        dx, dweight = _head_gradients(_dense(x), weight, targets, lse, gradient, ctx.ignored, wanted)
        return None if dx is None else dx.view(x.shape), dweight, None, None


def linear_logprob(x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int = -100) -> Tensor:
    """log softmax(x · weightᵀ)[target]. x [..., H], weight [V, H], targets [...] int64 -> fp32 [...].

    Differentiable, as `rlspec.kernels.linear_logprob.linear_logprob` tells. Raises ValueError for other shapes, empty
    tensors, dtypes that differ or are not bf16 or fp16, rows of the weight that do not start at multiples of 16 bytes,
    and tensors that are not on a CUDA device. A target outside [0, V) gives NaN: the host cannot look at it.
    """
    _check_head(x, weight, targets)
    check_head(x, weight, targets)
    _check_device(x)
    return _LinearLogprob.apply(x, weight, targets.reshape(-1).contiguous(), ignore_index)


def check_head(x: Tensor, weight: Tensor, targets: Tensor) -> None:
    """Raise what `linear_logprob` raises for shapes and dtypes."""
    _check_head_dtypes(x, weight, targets)
    if x.dim() == 0 or weight.dim() != 2 or x.shape[-1] != weight.shape[1] or targets.shape != x.shape[:-1]:
        shapes = f"x {list(x.shape)}, weight {list(weight.shape)}, targets {list(targets.shape)}"
        raise ValueError(f"{shapes}: linear_logprob takes [..., H], [V, H] and [...]")


def fold_logprob(accumulator: Tensor, x: Tensor, weight: Tensor, targets: Tensor, dy: Tensor, blocks: Tensor) -> None:
    """accumulator fp32 [V, H] += dweight of the rows that `blocks` int32 [B, 16] names, in its order; -1 is no row.

    x [R, H], weight [V, H], targets int64 [R], dy fp32 [R]: the gradient of the log-prob of each row. One fp32 chain an
    element of the accumulator, resumed from memory: any cut of the blocks into calls gives the same bits. Logits and
    log-sum-exp are made again. Raises ValueError as `linear_logprob`, and for an accumulator or blocks that do not fit.
    """
    _check_head(x, weight, targets)
    if accumulator.shape != weight.shape or accumulator.dtype != torch.float32 or not accumulator.is_contiguous():
        raise ValueError(f"the accumulator must be fp32 {list(weight.shape)}, dense; it is {list(accumulator.shape)}")
    _check_pairs(accumulator, x)
    if not accumulator.device == dy.device == x.device:
        raise ValueError(f"accumulator, dy and x are on {accumulator.device}, {dy.device}, {x.device}")
    if x.dim() != 2 or x.shape[1] != weight.shape[1] or not targets.shape == dy.shape == x.shape[:1]:
        shapes = f"x {list(x.shape)}, weight {list(weight.shape)}, targets {list(targets.shape)}, dy {list(dy.shape)}"
        raise ValueError(f"{shapes}: fold_logprob takes [R, H], [V, H], [R] and [R]")
    _check_blocks(blocks, x)
    _check_device(x)
    rows = blocks.flatten().to(x.device, torch.int64, non_blocking=True)
    kept, place = rows >= 0, rows.clamp(min=0)
    ignored = torch.iinfo(torch.int64).min
    gathered = _dense(torch.where(kept[:, None], x.index_select(0, place), 0))
    chosen = torch.where(kept, targets.index_select(0, place), ignored)
    upstream = torch.where(kept, dy.index_select(0, place).float(), 0)
    _, lse = _sums_of_rows(gathered, weight, chosen, ignored)
    for columns, dlogits in _dlogits_by_columns(gathered, weight, chosen, lse, upstream, ignored):
        _resumed(dlogits, gathered, accumulator[columns], across=True, resume=True)


def _dense(x: Tensor) -> Tensor:
    """[..., H] -> [rows, H], copied only if tensor memory access cannot read x where it lies."""
    rows = x.reshape(-1, x.shape[-1])
    if _suits(rows):
        return rows
    apart = 16 // x.element_size()
    copy = torch.empty((rows.shape[0], -(-rows.shape[1] // apart) * apart), dtype=x.dtype, device=x.device)
    return copy[:, : rows.shape[1]].copy_(rows)


def _check_head(x: Tensor, weight: Tensor, targets: Tensor) -> None:
    _check_head_dtypes(x, weight, targets)
    _check_sizes(x, weight, "x", "weight")
    if weight.dim() != 2 or not _suits(weight):
        raise ValueError(f"weight {list(weight.shape)}: its rows must be dense and start at multiples of 16 bytes")


def _check_head_dtypes(x: Tensor, weight: Tensor, targets: Tensor) -> None:
    if x.dtype == torch.float32:
        raise ValueError("x is fp32: linear_logprob of `cuda` takes bf16 and fp16; the one of `triton` takes fp32 too")
    _check_pair(x, weight, "x", "weight")
    if targets.dtype != torch.int64:
        raise ValueError(f"targets are {targets.dtype}: they must be int64")
    if targets.device != x.device:
        raise ValueError(f"x and targets are on {x.device} and {targets.device}")
