"""The linear layers of E experts: each row times its expert's weight, with the data gradient and the weight gradient.

    y[m, n]          = round( Σ_k x[m, k] · weight[e, n, k] )       k ascending; e the expert of row m
    dx[m, k]         = round( Σ_n dy[m, n] · weight[e, n, k] )      n ascending
    dweight[e, n, k] = Σ_m dy[m, n] · x[m, k]                       m ascending over the rows of e, resumed from fp32

Rows stand by expert: those of expert e are offsets[e] … offsets[e + 1] − 1; their number is not known to the host.

Promise. Each element is one fp32 chain: the reduced index ascends in groups of 16 that start at multiples of 16, each
group is one step of the matrix unit, and the result is rounded once. How many rows its expert has, and which, decides
in which tile a row is computed and when, never this order; nothing splits K. So a row has the bits of the same row
alone, and those of a dense layer with that weight. The weight gradient of an expert is one chain over its rows: blocks
of 16 from its first row on, as they come; `Gradient` carries what is left of a block from call to call, so that any cut
into calls has the same bits. No atomics.

How. A table, made on the device, says for each tile of rows which expert it is of and where it starts; the grid is what
M rows and E experts can need at most, and programs beyond the last tile do nothing. No host sync, no compilation that
depends on rows, and a graph may be replayed with other offsets.

fp32 is multiplied outside the matrix unit, by a chain of fused multiply-adds, with one tile for all sizes.

Limits. bf16, fp16, fp32; CUDA from compute capability 9.0 (tensor memory access), or CPU fp32 under the interpreter.
Tensor memory access wants rows that start at multiples of 16 bytes; other shapes go through `_plain`, same order and
same bits, slower. Fewer than 2³¹ rows.

Sources. Matrix unit: PTX ISA, wgmma and mma.sync. Groups of rows behind a table: Gale et al. 2022, arXiv:2211.15841.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton.tools.tensor_descriptor import TensorDescriptor

GROUP = 16
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
IDS = 32  # tiles that a program of the table places


class Tile(NamedTuple):
    """Rows × columns of the result a program, `depth` of the reduced index a step of its loop.

    `swap` puts the weight first, where the matrix unit wants 64; `half`: an expert's last tile has half the rows if
    those will do.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    swap: bool = False
    half: bool = False


# By rows an expert would have if all had the same; measured on an H200, see tests/bench/results.
TILES: tuple[tuple[float, Tile], ...] = (
    (4, Tile(16, 128, 128, 4, 4, swap=True)),
    (16, Tile(32, 128, 128, 4, 4, swap=True)),
    (float("inf"), Tile(128, 256, 64, 8, 4, half=True)),
)
DATA_TILES: tuple[tuple[float, Tile], ...] = (
    (8, Tile(16, 128, 128, 4, 4)),
    (float("inf"), Tile(128, 256, 64, 8, 3, half=True)),
)
FOLD_TILE = Tile(128, 128, 32, 4, 5)
PLAIN = Tile(64, 64, GROUP, 4, 3)


def _tile(table: tuple[tuple[float, Tile], ...], rows: int, experts: int) -> Tile:
    return next(tile for most, tile in table if rows <= most * experts)


# ---- kernels ----


@triton.jit(do_not_specialize=["most"], do_not_specialize_on_alignment=["offsets"])
def _schedule(
    offsets, experts_of, rows_of, most, experts, ROWS: tl.constexpr, BLOCK: tl.constexpr, IDS: tl.constexpr
):  # fmt: skip
    """For each tile of ROWS rows its expert and its first row; expert -1 beyond the last tile."""
    expert = tl.arange(0, BLOCK)
    start = tl.load(offsets + expert, mask=expert < experts, other=0).to(tl.int32)
    stop = tl.load(offsets + expert + 1, mask=expert < experts, other=0).to(tl.int32)
    tiles = tl.where(expert < experts, tl.cdiv(stop - start, ROWS), 0)
    upto = tl.cumsum(tiles, 0)
    tile = tl.program_id(0) * IDS + tl.arange(0, IDS)
    mine = tl.sum((upto[None, :] <= tile[:, None]).to(tl.int32), 1)
    shift = start - (upto - tiles) * ROWS
    row = tile * ROWS + tl.sum(tl.where(expert[None, :] == mine[:, None], shift[None, :], 0), 1)
    tl.store(experts_of + tile, tl.where(mine < experts, mine, -1), mask=tile < most)
    tl.store(rows_of + tile, row, mask=tile < most)


@triton.jit
def _chain(
    x, weight, acc, m, e, n, steps,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, ALONG: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    # The promise in one place: steps ascend, inside a step the matrix unit ascends by 16, all into one accumulator.
    # Elements outside x or the expert's weight arrive as zeros.
    for step in range(steps):
        a = x.load([m, step * DEPTH])
        if ALONG:
            b = weight.load([e, step * DEPTH, n]).reshape(DEPTH, COLUMNS)
            acc = tl.dot(a, b, acc, input_precision="ieee")
        elif SWAP:
            b = weight.load([e, n, step * DEPTH]).reshape(COLUMNS, DEPTH)
            acc = tl.dot(b, a.T, acc, input_precision="ieee")
        else:
            b = weight.load([e, n, step * DEPTH]).reshape(COLUMNS, DEPTH)
            acc = tl.dot(a, b.T, acc, input_precision="ieee")
    return acc


@triton.jit
def _one_tile(
    x, weight, out, stop, e, m, n, columns, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, ALONG: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    row = m + tl.arange(0, ROWS)
    column = n + tl.arange(0, COLUMNS)
    steps = tl.cdiv(width, DEPTH)
    # Rows beyond the expert's last are those of the next: computed, for they are there, and not stored.
    if SWAP:
        acc = tl.zeros((COLUMNS, ROWS), tl.float32)
        acc = _chain(x, weight, acc, m, e, n, steps, COLUMNS, DEPTH, ALONG, SWAP)
        places = row.to(tl.int64)[None, :] * columns + column[:, None]
        inside = (row < stop)[None, :] & (column < columns)[:, None]
    else:
        acc = tl.zeros((ROWS, COLUMNS), tl.float32)
        acc = _chain(x, weight, acc, m, e, n, steps, COLUMNS, DEPTH, ALONG, SWAP)
        places = row.to(tl.int64)[:, None] * columns + column[None, :]
        inside = (row < stop)[:, None] & (column < columns)[None, :]
    tl.store(out + places, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["offsets"])
def _tiles(
    x, half, weight, out, offsets, experts_of, rows_of, columns, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    ALONG: tl.constexpr, SWAP: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    # The tiles of one expert follow one another, so that its weight is read from memory once.
    tiles_n = tl.cdiv(columns, COLUMNS)
    n = tl.program_id(0) % tiles_n * COLUMNS
    e = tl.load(experts_of + tl.program_id(0) // tiles_n)
    if e < 0:
        return
    m = tl.load(rows_of + tl.program_id(0) // tiles_n)
    stop = tl.load(offsets + e + 1).to(tl.int32)
    if HALF and stop - m <= ROWS // 2:
        _one_tile(half, weight, out, stop, e, m, n, columns, width, ROWS // 2, COLUMNS, DEPTH, ALONG, SWAP)
    else:
        _one_tile(x, weight, out, stop, e, m, n, columns, width, ROWS, COLUMNS, DEPTH, ALONG, SWAP)


@triton.jit(do_not_specialize_on_alignment=["offsets"])
def _plain(
    x, weight, out, offsets, experts_of, rows_of, columns, width, x_row, x_step, w_expert, w_column, w_step,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """As `_tiles`, any strides: out[m, n] = Σ_k x[m, k] · weight[e, n, k]."""
    tiles_n = tl.cdiv(columns, COLUMNS)
    e = tl.load(experts_of + tl.program_id(0) // tiles_n)
    if e < 0:
        return
    row = tl.load(rows_of + tl.program_id(0) // tiles_n) + tl.arange(0, ROWS).to(tl.int64)[:, None]
    column = (tl.program_id(0) % tiles_n * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)[None, :]
    inside = row < tl.load(offsets + e + 1)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    weight += e.to(tl.int64) * w_expert
    for first in range(0, width, DEPTH):
        step = (first + tl.arange(0, DEPTH)).to(tl.int64)
        left = inside & (step[None, :] < width)
        right = (column < columns) & (step[:, None] < width)
        left = tl.load(x + row * x_row + step[None, :] * x_step, mask=left, other=0.0)
        right = tl.load(weight + column * w_column + step[:, None] * w_step, mask=right, other=0.0)
        acc = tl.dot(left, right, acc, input_precision="ieee")
    tl.store(out + row * columns + column, acc.to(out.dtype.element_ty), mask=inside & (column < columns))


@triton.jit
def _range(offsets, carried, e, MODE: tl.constexpr, GROUP: tl.constexpr):
    """First row and end of what is added of an expert.

    0: the rows of `offsets`. 1: behind `carried` rows, with room for 15 before each expert, the whole blocks. 2: the
    carried rows themselves, 16 places an expert.
    """
    if MODE == 2:
        start = e * GROUP
        stop = start + tl.load(carried + e)
    else:
        start, stop = tl.load(offsets + e).to(tl.int32), tl.load(offsets + e + 1).to(tl.int32)
        if MODE == 1:
            count = stop - start + tl.load(carried + e)
            start += e * (GROUP - 1)
            stop = start + count // GROUP * GROUP
    return start, stop


@triton.jit
def _last_step(dy, x, start, stop, column, place, columns, width, dy_row, x_row, DEPTH: tl.constexpr):
    # The rows of the next expert are replaced, not multiplied, by zeros: they may be NaN.
    row = (start + tl.arange(0, DEPTH)).to(tl.int64)
    live = row < stop
    a = tl.load(
        dy + row[:, None] * dy_row + column[None, :], mask=live[:, None] & (column < columns)[None, :], other=0.0
    )
    b = tl.load(x + row[:, None] * x_row + place[None, :], mask=live[:, None] & (place < width)[None, :], other=0.0)
    return a, b


@triton.jit(do_not_specialize_on_alignment=["offsets"])
def _fold(
    dy_blocks, x_blocks, dy, x, out, offsets, carried, columns, width, dy_row, x_row,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
    MODE: tl.constexpr, RESUME: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """out [E, N, K]: of each expert dyᵀ · x over its rows, on top of what out holds if RESUME."""
    e = tl.program_id(1)
    start, stop = _range(offsets, carried, e, MODE, GROUP)
    if RESUME and stop <= start:
        return
    tiles_k = tl.cdiv(width, WIDTH)
    n, k = tl.program_id(0) // tiles_k * COLUMNS, tl.program_id(0) % tiles_k * WIDTH
    column, place = n + tl.arange(0, COLUMNS), k + tl.arange(0, WIDTH)
    places = out + e.to(tl.int64) * columns * width + n.to(tl.int64) * width + k
    places += tl.arange(0, COLUMNS)[:, None] * width + tl.arange(0, WIDTH)[None, :]
    inside = (column < columns)[:, None] & (place < width)[None, :]
    # The chain goes on from the stored value; to add two finished sums would be another rounding.
    acc = tl.load(places, mask=inside, other=0.0) if RESUME else tl.zeros((COLUMNS, WIDTH), tl.float32)
    if BLOCKS:
        whole = (stop - start) // DEPTH
        for step in range(whole):
            t = start + step * DEPTH
            acc = tl.dot(dy_blocks.load([t, n]).T, x_blocks.load([t, k]), acc)
        start += whole * DEPTH
        if start < stop:
            a, b = _last_step(dy, x, start, stop, column, place, columns, width, dy_row, x_row, DEPTH)
            acc = tl.dot(a.T, b, acc)
    else:
        for first in range(start, stop, DEPTH):
            a, b = _last_step(dy, x, first, stop, column, place, columns, width, dy_row, x_row, DEPTH)
            acc = tl.dot(tl.trans(a), b, acc, input_precision="ieee")
    tl.store(places, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["stride"], do_not_specialize_on_alignment=["offsets", "rows", "experts"])
def _gather(source, rows, experts, carried, out, stride, width, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """The row for each place, behind the carried rows of its expert."""
    p = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    e = tl.load(experts + p).to(tl.int32)
    place = (p + e * (GROUP - 1) + tl.load(carried + e)).to(tl.int64)
    value = tl.load(source + tl.load(rows + p).to(tl.int64) * stride + column, mask=column < width)
    tl.store(out + place * width + column, value, mask=column < width)


@triton.jit(do_not_specialize_on_alignment=["offsets"])
def _carry(out, kept, offsets, carried, after, width, GROUP: tl.constexpr, BLOCK: tl.constexpr, OUT: tl.constexpr):
    """Carried rows go in front of an expert's new ones; or (OUT) what is left of its last block is carried."""
    e, i = tl.program_id(0) // GROUP, tl.program_id(0) % GROUP
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    before = tl.load(carried + e)
    start = tl.load(offsets + e).to(tl.int32)
    count = tl.load(offsets + e + 1).to(tl.int32) - start + before
    start += e * (GROUP - 1)
    here = tl.program_id(0).to(tl.int64) * width + column
    if OUT:
        left = count % GROUP
        place = (start + count - left + i).to(tl.int64) * width + column
        tl.store(after + e, left)
        if i < left:
            tl.store(kept + here, tl.load(out + place, mask=column < width), mask=column < width)
    elif i < before:
        place = (start + i).to(tl.int64) * width + column
        tl.store(out + place, tl.load(kept + here, mask=column < width), mask=column < width)


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


class Table(NamedTuple):
    """Expert and first row of each tile of rows, int32 [most]."""

    experts: Tensor
    rows: Tensor
    most: int


def _table(rows: int, offsets: Tensor, tile: Tile) -> tuple[Table, Launch]:
    """No more tiles than this: whole ones, and one that is not whole of each expert that has rows."""
    experts = len(offsets) - 1
    most = rows // tile.rows + min(experts, rows)
    made = [torch.empty(most, dtype=torch.int32, device=offsets.device) for _ in range(2)]
    args = (offsets, *made, most, experts, tile.rows, triton.next_power_of_2(experts), IDS)
    return Table(*made, most), Launch(_schedule, (triton.cdiv(most, IDS),), args, {"num_warps": 4})


def _product(
    x: Tensor, weight: Tensor, out: Tensor, offsets: Tensor, table: Table, tile: Tile, along: bool = False
) -> Launch:
    """out [M, N] = x [M, K] · weight [E, N, K]ᵀ by expert; `along`: weight is [E, K, N]."""
    columns, width = out.shape[1], x.shape[1]
    block = [1, tile.depth, tile.columns] if along else [1, tile.columns, tile.depth]
    rows = (_described(x, [tile.rows, tile.depth]), _described(x, [tile.rows // 2, tile.depth]))
    sizes = (tile.rows, tile.columns, tile.depth, along, tile.swap and not along, tile.half)
    args = (*rows, _described(weight, block), out, offsets, table.experts, table.rows, columns, width, *sizes)
    tiles = table.most * triton.cdiv(columns, tile.columns)
    return Launch(_tiles, (tiles,), args, {"num_warps": tile.warps, "num_stages": tile.stages})


def _plain_product(
    x: Tensor, weight: Tensor, out: Tensor, offsets: Tensor, table: Table, along: bool = False
) -> Launch:
    columns, width = out.shape[1], x.shape[1]
    strides = (*x.stride(), weight.stride(0), *(weight.stride()[:0:-1] if along else weight.stride()[1:]))
    tile = (PLAIN.rows, PLAIN.columns, PLAIN.depth)
    args = (x, weight, out, offsets, table.experts, table.rows, columns, width, *strides, *tile)
    tiles = table.most * triton.cdiv(columns, PLAIN.columns)
    return Launch(_plain, (tiles,), args, {"num_warps": PLAIN.warps, "num_stages": PLAIN.stages})


def _weight_product(
    dy: Tensor, x: Tensor, out: Tensor, offsets: Tensor, carried: Tensor, mode: int, resume: bool, tile: Tile
) -> Launch:
    experts, columns, width = out.shape
    blocks = tile.depth > GROUP
    wide = (_described(dy, [tile.depth, tile.rows]), _described(x, [tile.depth, tile.columns])) if blocks else (dy, x)
    grid = (triton.cdiv(columns, tile.rows) * triton.cdiv(width, tile.columns), experts)
    sizes = (columns, width, dy.stride(0), x.stride(0), tile.rows, tile.columns, tile.depth, GROUP)
    args = (*wide, dy, x, out, offsets, carried, *sizes, mode, resume, blocks)
    return Launch(_fold, grid, args, {"num_warps": tile.warps, "num_stages": tile.stages})


def _described(tensor: Tensor, block: list[int]) -> TensorDescriptor:
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block)


def _suits(tensor: Tensor) -> bool:
    """Tensor memory access can read it: unit stride inside a row, rows that start at multiples of 16 bytes."""
    size, (*strides, last) = tensor.element_size(), tensor.stride()
    apart = strides[-1] >= tensor.shape[-1] and not any(stride * size % 16 for stride in strides)
    return apart and last == 1 and tensor.data_ptr() % 16 == 0


def _through_tma(*tensors: Tensor) -> bool:
    return tensors[0].dtype != torch.float32 and all(map(_suits, tensors))


def _forward(x: Tensor, weight: Tensor, offsets: Tensor, along: bool = False) -> Tensor:
    (rows, _), experts = x.shape, weight.shape[0]
    out = torch.empty((rows, weight.shape[2 if along else 1]), dtype=x.dtype, device=x.device)
    fast = _through_tma(x, weight)
    tile = _tile(DATA_TILES if along else TILES, rows, experts) if fast else PLAIN
    table, schedule = _table(rows, offsets, tile)
    schedule(x.device)
    operands = (x, weight, out, offsets, table)
    launch = _product(*operands, tile, along) if fast else _plain_product(*operands, along)
    launch(x.device)
    return out


def _weight_gradient(
    dy: Tensor, x: Tensor, out: Tensor, offsets: Tensor, carried: Tensor, mode: int, resume: bool
) -> None:
    tile = FOLD_TILE if _through_tma(dy, x) else PLAIN
    _weight_product(dy, x, out, offsets, carried, mode, resume, tile)(x.device)


# ---- public ----


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, offsets)
        return _forward(_rows(x), weight, offsets)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, offsets = ctx.saved_tensors
        dy = _rows(dy.to(weight.dtype))
        dx = dweight = None
        if ctx.needs_input_grad[0]:
            dx = _forward(dy, weight, offsets, along=True)
        if ctx.needs_input_grad[1]:
            dweight = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
            _weight_gradient(dy, _rows(x), dweight, offsets, offsets, 0, False)
        return dx, dweight, None


def grouped_gemm(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """y [M, N] of rows x [M, K] that stand by expert, weight [E, N, K], offsets int64 [E + 1] from 0 to M.

    Differentiable in x and weight. A gradient dy is rounded once to the dtype of the weight if it is wider. The
    gradient of the weight that autograd asks for is one chain an expert over its rows in the order given, rounded once;
    across calls use `Gradient`. dy must be finite on pads. Offsets on CUDA are not looked at: rows that they leave out
    are not written.
    Raises ValueError for other shapes, empty tensors, dtypes that differ or are not bf16, fp16, fp32, CPU tensors (fp32
    is taken under the interpreter), and offsets on a CPU that leave out rows.
    """
    _check(x, weight.dtype, "x and weight")
    if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[2] or not x.numel() or not weight.numel():
        raise ValueError(f"x {list(x.shape)} and weight {list(weight.shape)}: grouped_gemm takes [M, K] and [E, N, K]")
    if offsets.dtype != torch.int64 or offsets.shape != (len(weight) + 1,) or not offsets.is_contiguous():
        raise ValueError(f"offsets {offsets.dtype} {list(offsets.shape)}: int64 [{len(weight) + 1}] is due")
    if not x.device == weight.device == offsets.device:
        raise ValueError(f"x, weight and offsets are on {x.device}, {weight.device} and {offsets.device}")
    _check_offsets(offsets, len(x))
    return _Grouped.apply(x, weight, offsets)


class Gradient:
    """The gradient of one weight over calls: `add` rows as they come, then `finish`.

    Of each expert the rows of all calls are one sequence, cut into blocks of 16; the accumulator fp32 [E, N, K] is
    resumed block after block, and the rows of a block that is not whole are carried: 15 an expert at most, on the
    device. So the bits are those of one call with all rows in that order. All calls must have one dtype.
    """

    def __init__(self, accumulator: Tensor) -> None:
        if accumulator.dim() != 3 or accumulator.dtype != torch.float32 or not accumulator.is_contiguous():
            raise ValueError(
                f"accumulator {accumulator.dtype} {list(accumulator.shape)}: contiguous fp32 [E, N, K] is due"
            )
        self._accumulator = accumulator
        self._kept: tuple[Tensor, Tensor] | None = None
        self._carried = torch.zeros(len(accumulator), dtype=torch.int32, device=accumulator.device)

    def add(self, x: Tensor, dy: Tensor, rows: Tensor, experts: Tensor, offsets: Tensor) -> None:
        """dy [R, N] and x [R, K]; `rows` int64 [M]: which of them, by expert; `experts` int64 [M]; offsets [E + 1].

        Raises ValueError for what does not fit, offsets on a CPU too. No host sync: what the index tensors hold on CUDA
        is not looked at.
        """
        self._check(x, dy, rows, experts, offsets)
        if self._kept is None:
            shape = len(self._accumulator) * GROUP
            self._kept = tuple(torch.zeros((shape, y.shape[1]), dtype=y.dtype, device=y.device) for y in (dy, x))  # type: ignore[assignment]
        assert self._kept is not None
        places = len(rows) + (GROUP - 1) * len(self._accumulator)
        packed = []
        after = torch.empty_like(self._carried)
        for source, kept in zip((_rows(dy), _rows(x)), self._kept, strict=True):
            out = torch.empty((places, source.shape[1]), dtype=source.dtype, device=source.device)
            _move_launch(out, kept, offsets, self._carried, after, False)(x.device)
            _gather_launch(source, rows, experts, self._carried, out)(x.device)
            packed.append(out)
        _weight_gradient(*packed, self._accumulator, offsets, self._carried, 1, True)
        for out, kept in zip(packed, self._kept, strict=True):
            _move_launch(out, kept, offsets, self._carried, after, True)(x.device)
        self._carried = after

    def finish(self) -> Tensor:
        """The accumulator, with the carried rows in it."""
        if self._kept is not None:
            _weight_gradient(*self._kept, self._accumulator, self._carried, self._carried, 2, True)
            self._kept = None
        return self._accumulator

    def _check(self, x: Tensor, dy: Tensor, rows: Tensor, experts: Tensor, offsets: Tensor) -> None:
        _check(x, dy.dtype, "x and dy")
        count, columns, width = self._accumulator.shape
        if x.dim() != 2 or dy.dim() != 2 or len(x) != len(dy) or (dy.shape[1], x.shape[1]) != (columns, width):
            raise ValueError(f"x {list(x.shape)} and dy {list(dy.shape)} do not fit {list(self._accumulator.shape)}")
        if rows.dim() != 1 or not len(rows) or experts.shape != rows.shape or offsets.shape != (count + 1,):
            shapes = f"rows {list(rows.shape)}, experts {list(experts.shape)}, offsets {list(offsets.shape)}"
            raise ValueError(f"{shapes}: [M], [M] and [{count + 1}] are due")
        if {rows.dtype, experts.dtype, offsets.dtype} != {torch.int64}:
            raise ValueError(f"rows, experts and offsets are int64, not {rows.dtype}, {experts.dtype}, {offsets.dtype}")
        if len({one.device for one in (x, dy, rows, experts, offsets, self._accumulator)}) > 1:
            raise ValueError(f"x, dy, rows, experts and offsets must be on {self._accumulator.device}")
        if self._kept is not None and self._kept[0].dtype != x.dtype:
            raise ValueError(f"rows in {x.dtype} after rows in {self._kept[0].dtype}")
        _check_offsets(offsets, len(rows))


def _move_launch(out: Tensor, kept: Tensor, offsets: Tensor, carried: Tensor, after: Tensor, leave: bool) -> Launch:
    width, block = out.shape[1], 2048
    args = (out, kept, offsets, carried, after, width, GROUP, block, leave)
    return Launch(_carry, (len(kept), triton.cdiv(width, block)), args, {"num_warps": 4})


def _gather_launch(source: Tensor, rows: Tensor, experts: Tensor, carried: Tensor, out: Tensor) -> Launch:
    width, block = out.shape[1], 2048
    args = (source, rows, experts, carried, out, source.stride(0), width, GROUP, block)
    return Launch(_gather, (len(rows), triton.cdiv(width, block)), args, {"num_warps": 4})


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def _check_offsets(offsets: Tensor, rows: int) -> None:
    if offsets.device.type == "cpu" and (offsets[0] != 0 or offsets[-1] != rows or (offsets.diff() < 0).any()):
        raise ValueError(f"offsets {offsets.tolist()} of {rows} rows: they ascend from 0 to all rows")


def _check(x: Tensor, other: torch.dtype, names: str) -> None:
    if x.dtype != other or x.dtype not in DTYPES:
        raise ValueError(f"{names} are {x.dtype} and {other}: they must both be bf16, fp16 or fp32")
    if x.is_cuda:
        return
    if x.device.type != "cpu" or isinstance(_plain, triton.JITFunction):
        raise ValueError(f"{names} are on {x.device}: the kernels run on CUDA")
    if x.dtype != torch.float32:
        raise ValueError(f"{names} are {x.dtype}: the interpreter is right for fp32 only")
