"""Log-probabilities of target tokens straight from hidden states: the logits are never in memory.

    logit[m, v] = Σ_k x[m, k] · weight[v, k]                      fp32, not rounded
    logprob[m]  = logit[m, target] − log Σ_v exp(logit[m, v])
    dlogit      = g[m] · ([v = target] − exp(logit − lse))        fp32, rounded once to the dtype of x
    dx          = Σ_v dlogit · weight[v]       v ascending        dweight[v] = Σ_m dlogit · x[m]       m ascending

Forward. A tile of logits stays in registers and leaves one maximum and one sum of exponentials a row and 256 columns
(64 in fp32); a second kernel joins these partial results of a row in a fixed tree, from the first columns to the last.
The logits have the bits of det_gemm with fp32 output; the sum of exponentials is cut at its own 256 columns, so it may
differ in the last bit from a log-softmax over stored logits that is cut elsewhere.

Backward. Logits are made again, some thousand columns of the vocabulary at a time. dx resumes one fp32 chain from
memory, dweight of these columns is finished at once. The number of columns a time moves no bit: it is a multiple of 16.

Promise. A row's bits depend on the row, the weight and constants of (H, V, dtype): one tile for any number of rows, all
chains ascending in groups of 16, no atomics. dweight depends on the order of the rows, not on anything else.
Rows whose target is ignored give 0 and zero gradients whatever they hold, NaN included.

Limits. bf16, fp16, fp32; CUDA from compute capability 9.0, or CPU fp32 under the interpreter. Rows of the weight start
at multiples of 16 bytes (tensor memory access).

Sources. Online log-sum-exp: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018. The idea of not
storing logits: Wijmans et al., "Cut your losses in large-vocabulary language models", 2024.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton.tools.tensor_descriptor import TensorDescriptor

LOG2E = tl.constexpr(1.4426950408889634)
GROUP = 16  # rows of a block
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Tile(NamedTuple):
    """Rows × columns of logits a program, `depth` of the reduced index a step of its loop."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


MATRIX_UNIT = Tile(128, 256, 64, 8, 4)
RESUMED = MATRIX_UNIT._replace(stages=3)
MULTIPLY_ADD = Tile(64, 64, 32, 4, 2)


# ---- kernels ----


@triton.jit
def _place(tile, tiles_m, tiles_n):
    # Eight tiles down before one to the right: programs that run together share rows of x and of the weight in L2.
    of_group = 8 * tiles_n
    first = tile // of_group * 8
    height = min(tiles_m - first, 8)
    return first + tile % of_group % height, tile % of_group // height


@triton.jit
def _logits(x, weight, m, n, steps, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr):
    # Forward and backward make the same logits: one fp32 chain, k ascending.
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in range(steps):
        acc = tl.dot(x.load([m, step * DEPTH]), weight.load([n, step * DEPTH]).T, acc, input_precision="ieee")
    return acc


@triton.jit
def _halves(acc):
    return tl.split(tl.permute(tl.reshape(acc, (acc.shape[0], 2, acc.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def _seek(logits, target, first, columns):
    """The target's logit, 0 if it is not here, and the largest logit of each row."""
    column = (first + tl.arange(0, logits.shape[1]))[None, :]
    found = tl.sum(tl.where((column == target[:, None]) & (column < columns), logits, 0.0), 1)
    return found, tl.max(tl.where(column < columns, logits, float("-inf")), 1)


@triton.jit
def _mass(logits, base, first, columns):
    """Σ exp(logit − base). Subtract first: the largest term is then exactly 1, and nothing is left to contract."""
    column = (first + tl.arange(0, logits.shape[1]))[None, :]
    terms = tl.exp2((logits - base[:, None]) * LOG2E)
    return tl.sum(tl.where(column < columns, terms, 0.0), 1)


@triton.jit(do_not_specialize=["rows"])
def _partial(
    x, weight, targets, picked, peaks, sums, rows, columns, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """For each row and tile of columns: peak = max logit, sum = Σ exp(logit − peak). picked[row] = the target's."""
    tiles_m = tl.cdiv(rows, ROWS)
    tiles_n = tl.cdiv(columns, COLUMNS)
    steps = tl.cdiv(width, DEPTH)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        m, n = _place(tile, tiles_m, tiles_n)
        acc = _logits(x, weight, m * ROWS, n * COLUMNS, steps, ROWS, COLUMNS, DEPTH)
        row = m * ROWS + tl.arange(0, ROWS)
        target = tl.load(targets + row, mask=row < rows, other=-1)
        # In halves, because a thread has no registers for more.
        left, right = _halves(acc)
        found, peak = _seek(left, target, n * COLUMNS, columns)
        found_right, peak_right = _seek(right, target, n * COLUMNS + COLUMNS // 2, columns)
        peak = tl.maximum(peak, peak_right)
        # A tile of nothing but -inf counts for nothing; -inf − -inf would be NaN.
        base = tl.where(peak == float("-inf"), 0.0, peak)
        total = _mass(left, base, n * COLUMNS, columns) + _mass(right, base, n * COLUMNS + COLUMNS // 2, columns)
        here = (target >= n * COLUMNS) & (target < tl.minimum(n * COLUMNS + COLUMNS, columns))
        tl.store(picked + row, found + found_right, mask=here)
        place = row.to(tl.int64) * tiles_n + n
        tl.store(peaks + place, peak, mask=row < rows)
        tl.store(sums + place, total, mask=row < rows)


@triton.jit
def _join(targets, picked, peaks, sums, out, lse, tiles, ignored, BLOCK: tl.constexpr):
    """A row a program: all partial results of the row in one tree."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    peak = tl.load(peaks + row * tiles + n, mask=n < tiles, other=float("-inf"))
    total = tl.load(sums + row * tiles + n, mask=n < tiles, other=0.0)
    top = tl.max(peak, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    whole = base + tl.log(tl.sum(total * tl.exp2((peak - base) * LOG2E), 0))
    # `picked` was NaN before the first kernel: a target outside the vocabulary stays NaN.
    value = tl.where(tl.load(targets + row) == ignored, 0.0, tl.load(picked + row) - whole)
    tl.store(out + row, value)
    tl.store(lse + row, whole)


@triton.jit(do_not_specialize=["rows", "columns", "first"])
def _dlogits(
    x, weight, targets, lse, gradient, out, rows, columns, first, width, vocabulary, ignored,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """out [rows, columns] = the gradient of the logits of the columns from `first` on."""
    tiles_m = tl.cdiv(rows, ROWS)
    tiles_n = tl.cdiv(columns, COLUMNS)
    steps = tl.cdiv(width, DEPTH)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        m, n = _place(tile, tiles_m, tiles_n)
        acc = _logits(x, weight, m * ROWS, first + n * COLUMNS, steps, ROWS, COLUMNS, DEPTH)
        row = m * ROWS + tl.arange(0, ROWS)
        column = first + n * COLUMNS + tl.arange(0, COLUMNS)
        target = tl.load(targets + row, mask=row < rows, other=ignored)
        whole = tl.load(lse + row, mask=row < rows, other=0.0)
        g = tl.load(gradient + row, mask=row < rows, other=0.0)
        # A target that does not exist made the log-probability NaN; its gradient is NaN too.
        g = tl.where((target >= 0) & (target < vocabulary), g, float("nan"))
        p = tl.exp2((acc - whole[:, None]) * LOG2E)
        acc = g[:, None] * (tl.where(column[None, :] == target[:, None], 1.0, 0.0) - p)
        # By a select: 0 · NaN is NaN, and ignored rows may hold anything.
        acc = tl.where((target == ignored)[:, None], 0.0, acc)
        if PARTS == 1:
            out.store([m * ROWS, n * COLUMNS], acc.to(out.dtype))
        else:
            left, right = _halves(acc)
            out.store([m * ROWS, n * COLUMNS], left.to(out.dtype))
            out.store([m * ROWS, n * COLUMNS + COLUMNS // 2], right.to(out.dtype))


@triton.jit(do_not_specialize=["rows", "width"])
def _resumed(
    a, b, out, rows, columns, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, ACROSS: tl.constexpr, RESUME: tl.constexpr,
):  # fmt: skip
    """out [M, N] = (out [M, N] if RESUME) + Σ_k a[m, k] · b[k, n]; a lies as [K, M] if ACROSS, else as [M, K]."""
    m, n = _place(tl.program_id(0), tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS))
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    # 64 bits for the corner of the tile, 32 inside it: registers are what this kernel is short of.
    places = out + (m.to(tl.int64) * ROWS * columns + n * COLUMNS) + (row * columns + column)
    inside = (row < rows - m * ROWS) & (column < columns - n * COLUMNS)
    # The chain goes on from the stored value; to add two finished sums would be another rounding.
    acc = tl.load(places, mask=inside, other=0.0) if RESUME else tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in range(tl.cdiv(width, DEPTH)):
        k = step * DEPTH
        left = a.load([k, m * ROWS]).T if ACROSS else a.load([m * ROWS, k])
        acc = tl.dot(left, b.load([k, n * COLUMNS]), acc, input_precision="ieee")
    tl.store(places, acc.to(out.dtype.element_ty), mask=inside)


# ---- launches ----


class Launch(NamedTuple):
    """A kernel with all it needs, to be run, or only compiled by a test."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]

    def __call__(self, device: torch.device) -> None:
        with _on(device):
            self.kernel[self.grid](*self.args, **self.options)


def _on(device: torch.device) -> AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _steady(device: torch.device, tiles: int) -> tuple[int]:
    """Programs that stay and walk over tiles, one a multiprocessor."""
    on_gpu = device.type == "cuda"
    return (min(tiles, torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 2),)


def _tile(dtype: torch.dtype) -> Tile:
    return MULTIPLY_ADD if dtype == torch.float32 else MATRIX_UNIT


def _tiles(rows: int, columns: int, tile: Tile) -> int:
    return triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns)


def _options(tile: Tile) -> dict[str, Any]:
    return {"num_warps": tile.warps, "num_stages": tile.stages}


def _described(tensor: Tensor, *block: int) -> TensorDescriptor:
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(block))


def _partial_launch(x: Tensor, weight: Tensor, targets: Tensor, picked: Tensor, peaks: Tensor, sums: Tensor) -> Launch:
    tile, (rows, width), columns = _tile(x.dtype), x.shape, weight.shape[0]
    sources = (_described(x, tile.rows, tile.depth), _described(weight, tile.columns, tile.depth))
    args = (*sources, targets, picked, peaks, sums, rows, columns, width, *tile[:3])
    return Launch(_partial, _steady(x.device, _tiles(rows, columns, tile)), args, _options(tile))


def _forward(x: Tensor, weight: Tensor, targets: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities and log-sum-exp, fp32 [rows] each."""
    rows, tiles = x.shape[0], triton.cdiv(weight.shape[0], _tile(x.dtype).columns)
    picked = torch.full((rows,), float("nan"), device=x.device)
    peaks, sums = torch.empty((2, rows, tiles), device=x.device)
    out, lse = torch.empty((2, rows), device=x.device)
    _partial_launch(x, weight, targets, picked, peaks, sums)(x.device)
    args = (targets, picked, peaks, sums, out, lse, tiles, ignored, triton.next_power_of_2(tiles))
    Launch(_join, (rows,), args, {"num_warps": 4})(x.device)
    return out, lse


def _dlogits_launch(
    x: Tensor, weight: Tensor, targets: Tensor, lse: Tensor, gradient: Tensor, out: Tensor, first: int, ignored: int
) -> Launch:
    tile, (rows, width), columns = _tile(x.dtype), x.shape, out.shape[1]
    parts = 1 if x.dtype == torch.float32 else 2
    sources = (_described(x, tile.rows, tile.depth), _described(weight, tile.columns, tile.depth))
    target = _described(out, tile.rows, tile.columns // parts)
    sizes = (rows, columns, first, width, weight.shape[0], ignored, *tile[:3], parts)
    args = (*sources, targets, lse, gradient, target, *sizes)
    return Launch(_dlogits, _steady(x.device, _tiles(rows, columns, tile)), args, _options(tile))


def _resumed_launch(a: Tensor, b: Tensor, out: Tensor, across: bool, resume: bool = False) -> Launch:
    tile, (rows, columns) = MULTIPLY_ADD if a.dtype == torch.float32 else RESUMED, out.shape
    if a.dtype == torch.float32 and across:
        tile = tile._replace(depth=16)  # a step may end wherever a call may end
    block = (tile.depth, tile.rows) if across else (tile.rows, tile.depth)
    sources = (_described(a, *block), _described(b, tile.depth, tile.columns))
    args = (*sources, out, rows, columns, b.shape[0], *tile[:3], across, resume)
    return Launch(_resumed, (_tiles(rows, columns, tile),), args, _options(tile))


def _chunk(rows: int) -> int:
    """Columns of the vocabulary a time: the gradient of their logits takes about 128 MiB, never under 4096 columns."""
    return min(16384, max(4096, 2**26 // triton.next_power_of_2(rows)))


def _dlogits_by_columns(
    x: Tensor, weight: Tensor, targets: Tensor, lse: Tensor, gradient: Tensor, ignored: int
) -> Iterator[tuple[slice, Tensor]]:
    """Some columns of the vocabulary and the gradient of their logits, one part after the other in one buffer."""
    vocabulary, chunk = weight.shape[0], min(_chunk(x.shape[0]), triton.cdiv(weight.shape[0], 16) * 16)
    buffer = torch.empty((x.shape[0], chunk), dtype=x.dtype, device=x.device)
    for first in range(0, vocabulary, chunk):
        last = min(first + chunk, vocabulary)
        dlogits = buffer[:, : last - first]
        _dlogits_launch(x, weight, targets, lse, gradient, dlogits, first, ignored)(x.device)
        yield slice(first, last), dlogits


def _backward(
    x: Tensor, weight: Tensor, targets: Tensor, lse: Tensor, gradient: Tensor, ignored: int, wanted: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """dx [M, H] and dweight [V, H] in the dtype of x, each if wanted."""
    dx = torch.empty(x.shape, device=x.device) if wanted[0] else None
    dweight = torch.empty_like(weight, memory_format=torch.contiguous_format) if wanted[1] else None
    # Zero rows, so that what ignored rows hold cannot reach the weight as 0 · NaN.
    kept = torch.where((targets == ignored)[:, None], 0, x) if wanted[1] else x
    for columns, dlogits in _dlogits_by_columns(x, weight, targets, lse, gradient, ignored):
        if dx is not None:
            _resumed_launch(dlogits, weight[columns], dx, across=False, resume=columns.start > 0)(x.device)
        if dweight is not None:
            _resumed_launch(dlogits, kept, dweight[columns], across=True)(x.device)
    return None if dx is None else dx.to(x.dtype), dweight


# ---- public ----


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, ignored: int) -> Tensor:
        out, lse = _forward(_rows(x), weight, targets, ignored)
        ctx.save_for_backward(x, weight, targets, lse)
        ctx.ignored = ignored
        return out.view(x.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight, targets, lse = ctx.saved_tensors
        gradient = gradient.reshape(-1).contiguous()
        dx, dweight = _backward(_rows(x), weight, targets, lse, gradient, ctx.ignored, ctx.needs_input_grad[:2])
        return None if dx is None else dx.view(x.shape), dweight, None, None


def linear_logprob(x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int = -100) -> Tensor:
    """log softmax(x · weightᵀ)[target]. x [..., H], weight [V, H], targets [...] int64 -> fp32 [...].

    Differentiable in x and weight; gradients in their dtype. Where the target is `ignore_index` the result is 0 and
    the gradients are zero. The gradient of the weight is summed over the rows in the order given.
    Raises ValueError for other shapes, empty tensors, dtypes that differ or are not bf16, fp16, fp32, rows of the
    weight that do not start at multiples of 16 bytes, and CPU tensors (fp32 is taken under the interpreter). A target
    outside [0, V) raises on CPU and gives NaN on CUDA, where the host cannot look at it.
    """
    _check_tensors(x, weight, targets)
    shapes = f"x {list(x.shape)}, weight {list(weight.shape)}, targets {list(targets.shape)}"
    if weight.dim() != 2 or x.dim() == 0 or x.shape[-1] != weight.shape[1] or targets.shape != x.shape[:-1]:
        raise ValueError(f"{shapes}: linear_logprob takes [..., H], [V, H] and [...]")
    _check_rows_of_weight(weight)
    targets = targets.reshape(-1).contiguous()
    _check_targets(targets, weight.shape[0], ignore_index)
    return _LinearLogprob.apply(x, weight, targets, ignore_index)


def fold(
    accumulator: Tensor, x: Tensor, weight: Tensor, targets: Tensor, dy: Tensor, blocks: Tensor
) -> None:
    """accumulator fp32 [V, H] += dweight of the rows that `blocks` int32 [B, 16] names, in its order; -1 is no row.

    x [R, H], weight [V, H], targets int64 [R], dy fp32 [R]: the gradient of the log-prob of each row. One fp32 chain an
    element of the accumulator, resumed from memory: any cut of the blocks into calls gives the same bits. Logits and
    log-sum-exp are made again. Raises ValueError as `linear_logprob`, and for an accumulator or blocks that do not fit.
    """
    _check_tensors(x, weight, targets)
    if accumulator.shape != weight.shape or accumulator.dtype != torch.float32 or not accumulator.is_contiguous():
        raise ValueError(f"the accumulator must be fp32 {list(weight.shape)}, dense; it is {list(accumulator.shape)}")
    if not accumulator.device == dy.device == x.device:
        raise ValueError(f"accumulator, dy and x are on {accumulator.device}, {dy.device}, {x.device}")
    if x.dim() != 2 or x.shape[1] != weight.shape[1] or not targets.shape == dy.shape == x.shape[:1]:
        shapes = f"x {list(x.shape)}, weight {list(weight.shape)}, targets {list(targets.shape)}, dy {list(dy.shape)}"
        raise ValueError(f"{shapes}: fold takes [R, H], [V, H], [R] and [R]")
    _check_rows_of_weight(weight)
    _check_blocks(blocks, x)
    _check_targets(targets, weight.shape[0])
    rows = blocks.flatten().to(x.device, torch.int64, non_blocking=True)
    kept, place = rows >= 0, rows.clamp(min=0)
    ignored = torch.iinfo(torch.int64).min
    gathered = torch.where(kept[:, None], x.index_select(0, place), 0)
    chosen = torch.where(kept, targets.index_select(0, place), ignored)
    upstream = torch.where(kept, dy.index_select(0, place).float(), 0)
    _, lse = _forward(gathered, weight, chosen, ignored)
    for columns, dlogits in _dlogits_by_columns(gathered, weight, chosen, lse, upstream, ignored):
        _resumed_launch(dlogits, gathered, accumulator[columns], across=True, resume=True)(x.device)


def _check_blocks(blocks: Tensor, x: Tensor) -> None:
    if blocks.dtype != torch.int32 or blocks.dim() != 2 or blocks.shape[1] != GROUP or not blocks.shape[0]:
        raise ValueError(f"blocks {blocks.dtype} {list(blocks.shape)}: rows come as int32 [B, {GROUP}]")
    if blocks.device.type == "cpu":
        low, high = int(blocks.min()), int(blocks.max())
        if low < -1 or high >= x.shape[0]:
            raise ValueError(f"blocks name rows {low} to {high} of {x.shape[0]}; -1 is a zero row")
    elif blocks.device != x.device:
        raise ValueError(f"blocks are on {blocks.device}, x on {x.device}")


def _check_targets(targets: Tensor, vocabulary: int, ignored: int | None = None) -> None:
    """Only on a CPU: on CUDA the host cannot look, and the kernels give NaN."""
    if targets.device.type != "cpu":
        return
    outside = (targets < 0) | (targets >= vocabulary)
    if ignored is not None:
        outside = outside & (targets != ignored)
    if outside.any():
        raise ValueError(f"target {int(targets[outside][0])} is not in the vocabulary of {vocabulary}")


def _check_rows_of_weight(weight: Tensor) -> None:
    if not _suits(weight):
        raise ValueError(f"weight {list(weight.shape)}: its rows must be dense and start at multiples of 16 bytes")


def _suits(tensor: Tensor) -> bool:
    """Tensor memory access can read it: unit stride inside a row, rows that start at multiples of 16 bytes."""
    stride, size = tensor.stride(0), tensor.element_size()
    apart = stride >= tensor.shape[1] and stride * size % 16 == 0
    return apart and tensor.stride(1) == 1 and tensor.data_ptr() % 16 == 0


def _rows(x: Tensor) -> Tensor:
    """[..., H] -> [rows, H], copied only if tensor memory access cannot read x where it lies."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if _suits(rows) else rows.clone(memory_format=torch.contiguous_format)


def _check_tensors(x: Tensor, weight: Tensor, targets: Tensor) -> None:
    if x.dtype != weight.dtype or x.dtype not in DTYPES:
        raise ValueError(f"x and weight are {x.dtype} and {weight.dtype}: they must both be bf16, fp16 or fp32")
    if targets.dtype != torch.int64:
        raise ValueError(f"targets are {targets.dtype}: they must be int64")
    if not x.device == weight.device == targets.device:
        raise ValueError(f"x, weight and targets are on {x.device}, {weight.device}, {targets.device}")
    if not x.numel() or not weight.numel():
        raise ValueError(f"x and weight are {list(x.shape)} and {list(weight.shape)}: an empty tensor")
    if x.is_cuda:
        return
    if x.device.type != "cpu" or isinstance(_partial, triton.JITFunction):
        raise ValueError(f"x is on {x.device}: the kernels run on CUDA")
    if x.dtype != torch.float32:
        raise ValueError(f"x is {x.dtype}: the interpreter is right for fp32 only")
