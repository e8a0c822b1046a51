"""Linear layers whose bits do not depend on the batch: y = x · weightᵀ, its data gradient and its weight gradient.

    y[m, n]       = round( Σ_k x[m, k] · weight[n, k] )         k ascending
    dx[m, k]      = round( Σ_n dy[m, n] · weight[n, k] )        n ascending
    dweight[n, k] = Σ_t dy[t, n] · x[t, k]                      t ascending, resumed from an fp32 accumulator

Promise. Each element is one fp32 chain: the reduced index ascends in groups of 16 that start at multiples of 16, each
group is one step of the matrix unit, and the result is rounded once. Tile, number of rows, position of the row, grid,
pipeline depth, operand order and persistence decide who computes an element and when, never this order. On Hopper the
bits of such a chain did not differ between tiles, nor between mma.sync and wgmma with either operand first; so tiles
are chosen from a table for speed, and a test compares every entry of the table. A sum over rows may be cut at
multiples of 16 and resumed from memory: 16 zero rows add nothing, 8 would move a group's edge.

fp32 is multiplied outside the matrix unit, by a chain of fused multiply-adds, with one tile for all sizes.

Limits. bf16, fp16, fp32; CUDA from compute capability 9.0 (tensor memory access), or CPU fp32 under the interpreter.
Tensor memory access wants rows that start at multiples of 16 bytes; other shapes go through `_plain`, same order and
same bits, slower. A last partial group of 16 is filled up with zeros, always at the end.

Sources. Matrix unit: PTX ISA, wgmma and mma.sync. Persistent loop and grouped tiles: Triton's matmul tutorials.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton.tools.tensor_descriptor import TensorDescriptor

# Rows of a block of the weight gradient, and the groups of the chain: the depth of one step of the matrix unit.
GROUP = 16
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Tile(NamedTuple):
    """Who computes what: rows × columns of the result a program, `depth` of the reduced index a step of its loop.

    stripe: for few rows; result stored from registers. `swap` puts the weight first, where the matrix unit wants 64.
    single: one tile a program, stored through tensor memory access.
    steady: programs stay and walk over tiles; the loads of the next tile start under the last steps of this one.
    thirds: as single, but 96 or 192 columns, by two accumulators of which the second has half the columns of the first.
    """

    kind: str
    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    swap: bool = False


# Tiles by the largest number of rows they serve. Measured on an H200 for the shapes of an 8B model, see `_family`.
_LARGE = Tile("steady", 128, 256, 64, 8, 4)
TILES: dict[str, tuple[tuple[float, Tile], ...]] = {
    "square": (
        (16, Tile("stripe", 16, 64, 256, 4, 5, swap=True)),
        (32, Tile("stripe", 32, 64, 128, 4, 8, swap=True)),
        (64, Tile("stripe", 64, 32, 256, 4, 4)),
        (128, Tile("single", 64, 64, 128, 4, 6)),
        (256, Tile("steady", 64, 128, 128, 4, 4)),
        (512, Tile("steady", 128, 128, 64, 4, 5)),
        (float("inf"), _LARGE),
    ),
    "wider": (
        (16, Tile("stripe", 16, 64, 256, 4, 5, swap=True)),
        (32, Tile("stripe", 32, 64, 256, 4, 4, swap=True)),
        (64, Tile("stripe", 64, 64, 128, 4, 5, swap=True)),
        (128, Tile("stripe", 128, 64, 128, 4, 4, swap=True)),
        (256, Tile("thirds", 64, 192, 64, 4, 5)),
        (512, Tile("thirds", 128, 192, 64, 4, 4)),
        (1024, Tile("steady", 128, 128, 64, 4, 5)),
        (float("inf"), _LARGE),
    ),
    "wide": (
        (16, Tile("stripe", 16, 64, 128, 4, 4)),
        (32, Tile("stripe", 32, 64, 256, 4, 4, swap=True)),
        (64, Tile("steady", 64, 64, 128, 4, 6)),
        (128, Tile("steady", 64, 128, 128, 4, 4)),
        (256, Tile("steady", 128, 128, 64, 4, 6)),
        (float("inf"), _LARGE),
    ),
    "vocabulary": (
        (16, Tile("stripe", 16, 128, 128, 4, 5, swap=True)),
        (32, Tile("stripe", 32, 128, 128, 4, 4, swap=True)),
        (64, Tile("stripe", 64, 128, 128, 8, 4, swap=True)),
        (128, Tile("steady", 128, 128, 64, 4, 5)),
        (float("inf"), _LARGE),
    ),
    "data gradient": (
        (128, Tile("single", 64, 64, 128, 4, 6)),
        (256, Tile("steady", 64, 128, 128, 4, 4)),
        (512, Tile("steady", 128, 128, 64, 4, 5)),
        (float("inf"), _LARGE),
    ),
}
FOLD_TILE = Tile("single", 128, 256, 64, 8, 3)
# Of gates and of ups each, for all the rows that it serves; half as many rows where these suffice.
GATED_TILE = Tile("gated", 16, 64, 128, 4, 3, swap=True)


def _family(columns: int) -> str:
    """Of a weight of so many rows: the measured layer that it resembles (N×K 4096², 4096×12288, 6144×4096, ...)."""
    if columns >= 65536:
        return "vocabulary"
    if columns >= 16384:
        return "wide"
    return "wider" if columns > 5120 else "square"


def _tile(family: str, rows: int) -> Tile:
    return next(tile for most, tile in TILES[family] if rows <= most)


_AT_REST = ContextVar("at rest", default=False)


@contextmanager
def weights_at_rest(rest: bool = True) -> Iterator[None]:
    """Inside, products of few rows begin to read their weight while kernels before them are at work: none may write it.

    Safe for weights that were written before a kernel that lets nothing start before it has ended, as `embedding` is
    one. The bits are the same. `rest` False: not so, inside of where it is.
    """
    token = _AT_REST.set(rest)
    try:
        yield
    finally:
        _AT_REST.reset(token)


# ---- kernels ----


@triton.jit
def _place(tile, tiles_m, tiles_n):
    # Eight tiles down before one to the right: programs that run together share rows of x and of the weight in L2.
    of_group = 8 * tiles_n
    first = tile // of_group * 8
    height = min(tiles_m - first, 8)
    return first + tile % of_group % height, tile % of_group // height


@triton.jit
def _turn(step):
    # 0, as soon as the kernel in front has ended: a load that starts there waits for it, others do not. Said to be
    # pure, or the compiler would not pipeline the loop, and to depend on the step, or it would wait before the loop.
    return tl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.b32 $0, 0;", "=r,r", [step], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _chain(
    x, weight, acc, m, n, steps,
    DEPTH: tl.constexpr, ALONG: tl.constexpr, SWAP: tl.constexpr, AHEAD: tl.constexpr = False,
):  # fmt: skip
    # The promise in one place: steps ascend, inside a step the matrix unit ascends by 16, all into one accumulator.
    # Elements outside x or weight arrive as zeros. AHEAD: the first tile of the weight is asked for before x is there.
    for step in range(steps):
        if AHEAD:
            b = weight.load([n, step * DEPTH])
            a = x.load([m + _turn(step), step * DEPTH])
        elif ALONG:
            # The reduced index runs along the rows of the weight (data gradient); no transposed copy is made.
            a = x.load([m, step * DEPTH])
            b = weight.load([step * DEPTH, n])
        else:
            a = x.load([m, step * DEPTH])
            b = weight.load([n, step * DEPTH])
        if ALONG:
            acc = tl.dot(a, b, acc, input_precision="ieee")
        elif SWAP:
            acc = tl.dot(b, a.T, acc, input_precision="ieee")
        else:
            acc = tl.dot(a, b.T, acc, input_precision="ieee")
    return acc


@triton.jit
def _split(acc):
    left, right = tl.split(tl.permute(tl.reshape(acc, (acc.shape[0], 2, acc.shape[1] // 2)), (0, 2, 1)))
    return left, right


@triton.jit
def _store(out, acc, m, n, COLUMNS: tl.constexpr, PARTS: tl.constexpr):
    # In parts, so that the buffer of the store leaves shared memory to the loads.
    if PARTS == 1:
        out.store([m, n], acc.to(out.dtype))
    elif PARTS == 2:
        left, right = _split(acc)
        out.store([m, n], left.to(out.dtype))
        out.store([m, n + COLUMNS // 2], right.to(out.dtype))
    else:
        left, right = _split(acc)
        _store(out, left, m, n, COLUMNS // 2, 2)
        _store(out, right, m, n + COLUMNS // 2, COLUMNS // 2, 2)


@triton.jit(do_not_specialize=["rows", "columns", "width"])
def _stripe(
    x, weight, out, rows, columns, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SWAP: tl.constexpr, AT_REST: tl.constexpr,
    BEHIND: tl.constexpr = False,
):  # fmt: skip
    if BEHIND and not AT_REST:
        tl.extra.cuda.gdc_wait()
    AHEAD: tl.constexpr = BEHIND and AT_REST
    tiles_m = tl.cdiv(rows, ROWS)
    m = tl.program_id(0) % tiles_m * ROWS
    n = tl.program_id(0) // tiles_m * COLUMNS
    row = (m + tl.arange(0, ROWS)).to(tl.int64)
    column = n + tl.arange(0, COLUMNS)
    steps = tl.cdiv(width, DEPTH)
    if SWAP:
        acc = _chain(x, weight, tl.zeros((COLUMNS, ROWS), tl.float32), m, n, steps, DEPTH, False, True, AHEAD)
        places = row[None, :] * columns + column[:, None]
        inside = (row[None, :] < rows) & (column[:, None] < columns)
    else:
        acc = _chain(x, weight, tl.zeros((ROWS, COLUMNS), tl.float32), m, n, steps, DEPTH, False, False, AHEAD)
        places = row[:, None] * columns + column[None, :]
        inside = (row[:, None] < rows) & (column[None, :] < columns)
    if BEHIND and ROWS <= 32:
        # No earlier: blocks of a next product would crowd where multiprocessors are free.
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(out + places, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "columns", "width"])
def _gated(
    x, weight, out, activated, rows, columns, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, AT_REST: tl.constexpr,
    BEHIND: tl.constexpr = False,
):  # fmt: skip
    """As `_stripe` with SWAP, `columns` rows of the weight for gates and as many for ups; and swiglu of the two."""
    if BEHIND and not AT_REST:
        tl.extra.cuda.gdc_wait()
    n = tl.program_id(0) * COLUMNS
    gate = tl.zeros((COLUMNS, ROWS), tl.float32)
    up = tl.zeros((COLUMNS, ROWS), tl.float32)
    for step in range(tl.cdiv(width, DEPTH)):
        b = weight.load([n, step * DEPTH])
        c = weight.load([columns + n, step * DEPTH])
        m = 0
        if BEHIND and AT_REST:
            m = _turn(step)
        a = x.load([m, step * DEPTH]).T
        gate = tl.dot(b, a, gate, input_precision="ieee")
        up = tl.dot(c, a, up, input_precision="ieee")
    if BEHIND:
        tl.extra.cuda.gdc_launch_dependents()
    # What `rlspec.kernels.swiglu` makes of the rounded results.
    row, column = tl.arange(0, ROWS).to(tl.int64)[None, :], n + tl.arange(0, COLUMNS)[:, None]
    inside = (row < rows) & (column < columns)
    gate = gate.to(out.dtype.element_ty)
    up = up.to(out.dtype.element_ty)
    places = out + row * (2 * columns) + column
    tl.store(places, gate, mask=inside)
    tl.store(places + columns, up, mask=inside)
    g = gate.to(tl.float32)
    y = g / (1.0 + tl.exp(-g)) * up.to(tl.float32)
    tl.store(activated + row * columns + column, y.to(activated.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "columns", "width"])
def _tiles(
    x, weight, out, rows, columns, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    ALONG: tl.constexpr, PARTS: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    tiles_m = tl.cdiv(rows, ROWS)
    tiles_n = tl.cdiv(columns, COLUMNS)
    steps = tl.cdiv(width, DEPTH)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=FLATTEN):
        m, n = _place(tile, tiles_m, tiles_n)
        acc = tl.zeros((ROWS, COLUMNS), tl.float32)
        acc = _chain(x, weight, acc, m * ROWS, n * COLUMNS, steps, DEPTH, ALONG, False)
        _store(out, acc, m * ROWS, n * COLUMNS, COLUMNS, PARTS)


@triton.jit(do_not_specialize=["rows", "columns", "width"])
def _thirds(
    x, first, second, first_out, second_out, rows, columns, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    # Tensors in Triton have powers of two; these tiles divide some layers evenly among 132 multiprocessors.
    FIRST: tl.constexpr = COLUMNS // 3 * 2
    tiles_m = tl.cdiv(rows, ROWS)
    tiles_n = tl.cdiv(columns, COLUMNS)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        m, n = _place(tile, tiles_m, tiles_n)
        left = tl.zeros((ROWS, FIRST), tl.float32)
        right = tl.zeros((ROWS, COLUMNS // 3), tl.float32)
        for step in range(tl.cdiv(width, DEPTH)):
            a = x.load([m * ROWS, step * DEPTH])
            b = first.load([n * COLUMNS, step * DEPTH])
            c = second.load([n * COLUMNS + FIRST, step * DEPTH])
            left = tl.dot(a, b.T, left, input_precision="ieee")
            right = tl.dot(a, c.T, right, input_precision="ieee")
        _store(first_out, left, m * ROWS, n * COLUMNS, FIRST, PARTS)
        _store(second_out, right, m * ROWS, n * COLUMNS + FIRST, COLUMNS // 3, PARTS)


@triton.jit(do_not_specialize=["steps"])
def _fold(
    dy, x, out, columns, width, steps,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, RESUME: tl.constexpr,
):  # fmt: skip
    n, k = _place(tl.program_id(0), tl.cdiv(columns, COLUMNS), tl.cdiv(width, WIDTH))
    row, column = tl.arange(0, COLUMNS)[:, None], tl.arange(0, WIDTH)[None, :]
    # 64 bits for the corner of the tile, 32 inside it: registers are what this kernel is short of.
    places = out + (n.to(tl.int64) * COLUMNS * width + k * WIDTH) + (row * width + column)
    inside = (row < columns - n * COLUMNS) & (column < width - k * WIDTH)
    # The chain goes on from the stored value; to add two finished sums would be another rounding.
    acc = tl.load(places, mask=inside, other=0.0) if RESUME else tl.zeros((COLUMNS, WIDTH), tl.float32)
    for step in range(steps):
        a = dy.load([step * DEPTH, n * COLUMNS]).T
        acc = tl.dot(a, x.load([step * DEPTH, k * WIDTH]), acc, input_precision="ieee")
    tl.store(places, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "columns", "width"])
def _plain(
    a, b, out, rows, columns, width, a_row, a_step, b_row, b_step,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, RESUME: tl.constexpr,
):  # fmt: skip
    """out[m, n] = (out[m, n] if RESUME) + Σ_k a[m, k] · b[n, k], any strides. All fp32 sums are made here."""
    m, n = _place(tl.program_id(0), tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS))
    row = (m * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = (n * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)[None, :]
    places = out + row * columns + column
    inside = (row < rows) & (column < columns)
    acc = tl.load(places, mask=inside, other=0.0) if RESUME else tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, width, DEPTH):
        step = (first + tl.arange(0, DEPTH)).to(tl.int64)
        left = (row < rows) & (step[None, :] < width)
        right = (column < columns) & (step[:, None] < width)
        left = tl.load(a + row * a_row + step[None, :] * a_step, mask=left, other=0.0)
        right = tl.load(b + column * b_row + step[:, None] * b_step, mask=right, other=0.0)
        acc = tl.dot(left, right, acc, input_precision="ieee")
    tl.store(places, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _gather(source, table, out, rows, width, stride, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(table + place).to(tl.int64) + tl.zeros_like(column)
    inside = (column < width) & (row >= 0) & (row < rows)
    # -1 is a zero row. A row that does not exist must show: the host cannot look at a table on the device.
    missing = tl.where((row < -1) | (row >= rows), float("nan"), 0.0)
    value = tl.load(source + row * stride + column, mask=inside, other=missing)
    tl.store(out + place * width + column, value, mask=column < width)


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


def _behind(x: Tensor) -> dict[str, bool]:
    """Options of a launch that may begin before the kernel in front of it has ended."""
    return {"BEHIND": True, "launch_pdl": True} if x.is_cuda else {}


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def _product(x: Tensor, weight: Tensor, out: Tensor, tile: Tile, along: bool = False) -> Launch:
    """out [M, N] = x [M, K] · weight [N, K]ᵀ; `along`: weight is [K, N]. Rows must suit tensor memory access."""
    (rows, width), columns = x.shape, out.shape[1]
    tiles = triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns)
    if tile.kind == "thirds":
        assert not along
        return _thirds_product(x, weight, out, tile, tiles)
    wanted = [tile.depth, tile.columns] if along else [tile.columns, tile.depth]
    sources = (_described(x, [tile.rows, tile.depth]), _described(weight, wanted))
    sizes = (rows, columns, width, tile.rows, tile.columns, tile.depth)
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    if tile.kind == "stripe":
        return Launch(_stripe, (tiles,), (*sources, out, *sizes, tile.swap, _AT_REST.get()), options | _behind(x))
    # A part of at most 32 KiB beside 192 KiB of loads is what fits into the shared memory of a multiprocessor.
    parts = max(1, tile.rows * tile.columns * out.element_size() // 32768)
    target = _described(out, [tile.rows, tile.columns // parts])
    programs = tiles if tile.kind == "single" else min(tiles, _processors(x.device))
    return Launch(_tiles, (programs,), (*sources, target, *sizes, along, parts, tile.kind == "steady"), options)


def _gated_product(x: Tensor, weight: Tensor, out: Tensor, activated: Tensor, tile: Tile = GATED_TILE) -> Launch:
    """out [M, 2·N] = x [M, K] · weight [2·N, K]ᵀ and activated [M, N] = swiglu of its halves."""
    (rows, width), columns = x.shape, activated.shape[1]
    height = tile.rows if rows > tile.rows // 2 else tile.rows // 2
    sizes = (rows, columns, width, height, tile.columns, tile.depth)
    sources = (_described(x, [height, tile.depth]), _described(weight, [tile.columns, tile.depth]))
    args = (*sources, out, activated, *sizes, _AT_REST.get())
    # As `swiglu` is compiled: nothing is contracted.
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": False}
    return Launch(_gated, (triton.cdiv(columns, tile.columns),), args, options | _behind(x))


def _thirds_product(x: Tensor, weight: Tensor, out: Tensor, tile: Tile, tiles: int) -> Launch:
    part, parts = tile.columns // 3, out.element_size() // 2
    weights = (_described(weight, [2 * part, tile.depth]), _described(weight, [part, tile.depth]))
    targets = (_described(out, [tile.rows, 2 * part // parts]), _described(out, [tile.rows, part // parts]))
    sizes = (x.shape[0], out.shape[1], x.shape[1], tile.rows, tile.columns, tile.depth, parts)
    args = (_described(x, [tile.rows, tile.depth]), *weights, *targets, *sizes)
    return Launch(_thirds, (tiles,), args, {"num_warps": tile.warps, "num_stages": tile.stages})


def _plain_product(a: Tensor, b: Tensor, out: Tensor, resume: bool = False) -> Launch:
    """out [M, N] = a [M, K] · b [N, K]ᵀ, on top of what out holds if `resume`; any strides of a and b."""
    (rows, width), columns = a.shape, b.shape[0]
    args = (a, b, out, rows, columns, width, *a.stride(), *b.stride(), 64, 64, GROUP, resume)
    tiles = triton.cdiv(rows, 64) * triton.cdiv(columns, 64)
    return Launch(_plain, (tiles,), args, {"num_warps": 4, "num_stages": 3})


def _weight_product(dy: Tensor, x: Tensor, out: Tensor, resume: bool, tile: Tile = FOLD_TILE) -> Launch:
    """out [N, K] = dy [T, N]ᵀ · x [T, K], on top of what out holds if `resume`."""
    (columns, width), steps = out.shape, triton.cdiv(x.shape[0], tile.depth)
    tiles = triton.cdiv(columns, tile.rows) * triton.cdiv(width, tile.columns)
    sources = (_described(dy, [tile.depth, tile.rows]), _described(x, [tile.depth, tile.columns]))
    args = (*sources, out, columns, width, steps, tile.rows, tile.columns, tile.depth, resume)
    return Launch(_fold, (tiles,), args, {"num_warps": tile.warps, "num_stages": tile.stages})


def _described(tensor: Tensor, block: list[int]) -> TensorDescriptor:
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block)


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
    tile = _tile(_family(columns), rows)
    fast = _through_tma(x, weight) and (tile.kind == "stripe" or _suits(out))
    launch = _product(x, weight, out, tile) if fast else _plain_product(x, weight, out)
    launch(x.device)
    return out


def _data_gradient(dy: Tensor, weight: Tensor) -> Tensor:
    dx = torch.empty((dy.shape[0], weight.shape[1]), dtype=weight.dtype, device=dy.device)
    if _through_tma(dy, weight, dx):
        launch = _product(dy, weight, dx, _tile("data gradient", dy.shape[0]), along=True)
    else:
        launch = _plain_product(dy, weight.t(), dx)
    launch(dy.device)
    return dx


def _weight_gradient(dy: Tensor, x: Tensor, out: Tensor, resume: bool) -> None:
    if _through_tma(dy, x):
        _weight_product(dy, x, out, resume)(x.device)
    else:
        _plain_product(dy.t(), x.t(), out, resume)(x.device)


# ---- public ----


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

    Differentiable. A gradient dy is rounded once to the dtype of the weight if it is wider. dx is in the dtype of x.
    The gradient of the weight that autograd asks for is one `fold` over all rows in the order given, in blocks of 16
    from row 0, rounded once to the dtype of the weight; across calls use `fold` itself. dy must be finite on pads.
    Raises ValueError for other shapes, empty tensors, dtypes that differ or are not bf16, fp16, fp32, and CPU tensors
    (fp32 is taken under the interpreter).
    """
    _check_operands(x, weight, "x", "weight")
    if weight.dim() != 2 or x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x {list(x.shape)} and weight {list(weight.shape)}: det_gemm takes [..., K] and [N, K]")
    out_dtype = out_dtype or x.dtype
    if out_dtype not in DTYPES:
        raise ValueError(f"out_dtype {out_dtype}: det_gemm gives bf16, fp16 or fp32")
    return _Linear.apply(x, weight, out_dtype)


def lm_head(x: Tensor, weight: Tensor, *, out_dtype: torch.dtype) -> Tensor:
    """Logits: x [..., H], weight [V, H] -> [..., V] in `out_dtype`; fp32 is the unrounded chain. See `det_gemm`."""
    return det_gemm(x, weight, out_dtype)


GATED = _gated.__name__
# Whether so much of a weight at rest is asked for ahead that kernels before it would wait for their own loads: not for
# the one or two tiles of a program.
MUCH_AHEAD = False


def gate_up(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor] | None:
    """det_gemm(x, weight) [..., 2·N] and the swiglu of its halves [..., N], of x [..., K] and weight [2·N, K].

    Without gradients; the bits are those of `det_gemm` and `rlspec.kernels.swiglu`. None where there is no kernel for
    both: more than 16 rows, fp32, or rows that tensor memory access cannot read.
    """
    _check_operands(x, weight, "x", "weight")
    if weight.dim() != 2 or x.dim() == 0 or x.shape[-1] != weight.shape[1] or weight.shape[0] % 2:
        raise ValueError(f"x {list(x.shape)} and weight {list(weight.shape)}: gate_up takes [..., K] and [2·N, K]")
    rows = _rows(x)
    if rows.shape[0] > GATED_TILE.rows or not _through_tma(rows, weight):
        return None
    out, activated = (rows.new_empty((rows.shape[0], weight.shape[0] // halves)) for halves in (1, 2))
    _gated_product(rows, weight, out, activated)(x.device)
    return out.view(*x.shape[:-1], -1), activated.view(*x.shape[:-1], -1)


def fold(accumulator: Tensor, x: Tensor, dy: Tensor, blocks: Tensor | None = None) -> None:
    """accumulator += dyᵀ · x over the rows that `blocks` names, resumed in place: the gradient of a linear's weight.

    accumulator fp32 [N, K] contiguous, x [R, K], dy [R, N] of one dtype, blocks int32 [B, 16]: rows of x and dy, block
    after block; -1 is a zero row in both, whatever x and dy hold elsewhere. Each element continues one fp32 chain, a
    block a step, so any cut of the sequence of blocks over calls gives the same bits, provided that every call uses
    the same dtype.

    Without `blocks` all rows are added where they lie, in their order, the last block filled up with zero rows.
    `blocks` may be a CPU tensor: it is checked, and rows that follow one another, with -1 only at the very end, are
    read where they lie. Other tables make a gathered copy of the rows first. On the device the table is not looked at:
    rows are always gathered, and one that does not exist makes the accumulator NaN. A graph can capture all but
    the second of these.
    Raises ValueError for other shapes, dtypes, devices, an empty table, and rows out of range in a CPU table.
    """
    _check_operands(x, dy, "x", "dy")
    shapes = f"accumulator {list(accumulator.shape)}, x {list(x.shape)}, dy {list(dy.shape)}"
    if x.dim() != 2 or dy.dim() != 2 or x.shape[0] != dy.shape[0]:
        raise ValueError(f"{shapes}: fold takes [N, K], [R, K], [R, N]")
    if tuple(accumulator.shape) != (dy.shape[1], x.shape[1]):
        raise ValueError(f"{shapes}: fold takes [N, K], [R, K], [R, N]")
    if accumulator.dtype != torch.float32 or not accumulator.is_contiguous() or accumulator.device != x.device:
        raise ValueError("accumulator: fold adds into a contiguous fp32 tensor on the device of x")
    if blocks is None:
        dy, x = _rows(dy), _rows(x)
    else:
        _check_blocks(blocks, x)
        dy, x = _placed(dy, x, blocks)
    if x.shape[0]:
        _weight_gradient(dy, x, accumulator, resume=True)


def _placed(dy: Tensor, x: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """dy and x with the rows of the table one after another; missing rows at the end count as zero rows."""
    if blocks.device.type == "cpu":
        table = blocks.flatten()
        count = int((table >= 0).sum())
        first = int(table[0]) if count else 0
        if torch.equal(table[:count], torch.arange(first, first + count, dtype=table.dtype)):
            return _rows(dy[first : first + count]), _rows(x[first : first + count])
        if x.is_cuda:
            blocks = blocks.pin_memory().to(x.device, non_blocking=True)
    return _gathered(dy, blocks), _gathered(x, blocks)


def _gathered(source: Tensor, blocks: Tensor) -> Tensor:
    source, table = _rows(source), blocks.contiguous()
    width, block = source.shape[1], 2048
    out = torch.empty((table.numel(), width), dtype=source.dtype, device=source.device)
    args = (source, table, out, source.shape[0], width, source.stride(0), block)
    Launch(_gather, (table.numel(), triton.cdiv(width, block)), args, {"num_warps": 4})(source.device)
    return out


def _rows(x: Tensor) -> Tensor:
    """[..., K] -> [rows, K] with unit stride inside a row; copied only if x does not lie like that."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _check_operands(one: Tensor, other: Tensor, name: str, other_name: str) -> None:
    names = f"{name} and {other_name}"
    if one.dtype != other.dtype or one.dtype not in DTYPES:
        raise ValueError(f"{names} are {one.dtype} and {other.dtype}: they must both be bf16, fp16 or fp32")
    if one.device != other.device:
        raise ValueError(f"{names} are on {one.device} and {other.device}")
    if not one.numel() or not other.numel():
        raise ValueError(f"{names} are {list(one.shape)} and {list(other.shape)}: an empty tensor")
    if one.is_cuda:
        return
    if one.device.type != "cpu" or isinstance(_plain, triton.JITFunction):
        raise ValueError(f"{names} are on {one.device}: the kernels run on CUDA")
    if one.dtype != torch.float32:
        raise ValueError(f"{names} are {one.dtype}: the interpreter is right for fp32 only")


def _check_blocks(blocks: Tensor, x: Tensor) -> None:
    if blocks.dtype != torch.int32 or blocks.dim() != 2 or blocks.shape[1] != GROUP or not blocks.shape[0]:
        raise ValueError(f"blocks {blocks.dtype} {list(blocks.shape)}: rows come as int32 [B, {GROUP}]")
    if blocks.device.type == "cpu":
        low, high = int(blocks.min()), int(blocks.max())
        if low < -1 or high >= x.shape[0]:
            raise ValueError(f"blocks name rows {low} to {high} of {x.shape[0]}; -1 is a zero row")
    elif blocks.device != x.device:
        raise ValueError(f"blocks are on {blocks.device}, x on {x.device}")
