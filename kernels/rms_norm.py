"""Root-mean-square norm over the last dimension; as QK-norm, over the heads of [B, T, heads, D].

    r = 1 / √(mean(x²) + eps)          y = round(x · r · w)
    n = x · r, g = dy · w              dx = round(r · (g − n · mean(g · n)))
    dw = Σ_rows dy · n                 in blocks of 16 positions: a fixed tree inside a block, then blocks ascending,
                                       one addition a block, resumed from an fp32 accumulator

Promise. A row's bits depend on the row, the weight and constants of (width, dtype). Which elements a thread adds, and
the tree that joins threads, follow from the width alone: how the compiler spreads a row over threads depends on the
alignment of pointers and strides, so every tensor is brought to one alignment that the width fixes, by a copy if need
be. Square root and quotient are the IEEE ones. fp32 inside, one rounding at the end.

Limits. bf16, fp16, fp32; width up to 65536; fewer than 2³¹ rows. x may be a view with two strides of its own, such as
the heads of a fused projection. Other layouts are copied.

Sources. Zhang and Sennrich, "Root mean square layer normalization", 2019. `round_before_weight` is the order of
roundings of transformers' Qwen3RMSNorm: y = round(round(x · r) · w).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from math import gcd
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDEST = 65536
GROUP = 16


# ---- kernels ----
# A tensor is [outer, inner, WIDTH]; its two strides come in units of UNIT elements, and UNIT is a constant of the
# width. So the compiler knows the same alignment on every call, and chooses the same layout of threads.


@triton.jit
def _in_turn(BEHIND: tl.constexpr):
    # Launched behind another kernel while that one is at work: wait for it, and let the next one come as near.
    if BEHIND:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def _root(x, eps, WIDTH: tl.constexpr):
    return tl.div_rn(1.0, tl.sqrt_rn(tl.sum(x * x, 1) / WIDTH + eps))[:, None]


@triton.jit
def _weight(weight, column, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    # Once a row, so that it comes in the layout of x and nothing is moved between threads.
    places = tl.broadcast_to(weight + column, (ROWS, column.shape[1]))
    inside = tl.broadcast_to(column < WIDTH, (ROWS, column.shape[1]))
    return tl.load(places, mask=inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["rows", "inner", "x_outer", "x_inner"])
def _forward(
    x, weight, y, rows, inner, x_outer, x_inner, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr, ROUND: tl.constexpr,
    BEHIND: tl.constexpr = False,
):  # fmt: skip
    _in_turn(BEHIND)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows)[:, None] & (column < WIDTH)
    start = ((row // inner).to(tl.int64) * x_outer + (row % inner) * x_inner)[:, None] * UNIT
    value = tl.load(x + start + column, mask=inside, other=0.0).to(tl.float32)
    w = _weight(weight, column, ROWS, WIDTH)
    value = value * _root(value, eps, WIDTH)
    if ROUND:
        value = value.to(y.dtype.element_ty).to(tl.float32)
    tl.store(y + row.to(tl.int64)[:, None] * WIDTH + column, (value * w).to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "residual_row", "x_row"])
def _of_sum(
    residual, x, weight, total, y, rows, residual_row, x_row, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr, ROUND: tl.constexpr,
    BEHIND: tl.constexpr = False,
):  # fmt: skip
    """total = residual + x, y = the norm of the total rounded to the dtype of x."""
    _in_turn(BEHIND)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows)[:, None] & (column < WIDTH)
    row = row.to(tl.int64)[:, None]
    w = _weight(weight, column, ROWS, WIDTH)
    value = tl.load(x + row * x_row * UNIT + column, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(residual + row * residual_row * UNIT + column, mask=inside, other=0.0).to(tl.float32) + value
    both = value.to(total.dtype.element_ty)
    value = both.to(y.dtype.element_ty).to(tl.float32)
    value = value * _root(value, eps, WIDTH)
    if ROUND:
        value = value.to(y.dtype.element_ty).to(tl.float32)
    tl.store(y + row * WIDTH + column, (value * w).to(y.dtype.element_ty), mask=inside)
    # Last, as it wants another layout of threads where the dtypes differ, and the way there takes longest.
    tl.store(total + row * WIDTH + column, both, mask=inside)


@triton.jit
def _product(a, b, EXACT: tl.constexpr):
    # Rounded, and never one with an addition that follows.
    if EXACT:
        return tl.extra.cuda.libdevice.mul_rn(a, b)
    return a * b


@triton.jit
def _slot(places, tokens, token, head, block_step, head_step, place_step, live):
    # Where in a layer of a cache the head of a token is stored, and whether it is.
    block = tl.load(places + token, mask=live, other=-1)
    place = tl.load(places + tokens + token, mask=live, other=0)
    return (block * block_step + place * place_step + head * head_step)[:, None], (block >= 0)[:, None]


@triton.jit
def _heads(
    program, x, weight, normed, rotated, cos, sin, rows, heads, x_token, x_head, cos_row, sin_row, eps,
    cached, places, tokens, block_step, head_step, place_step,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr, ROUND: tl.constexpr, EXACT: tl.constexpr,
    CACHED: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = WIDTH // 2
    row = program * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)[None, :]
    pair = tl.arange(0, HALF)[None, :]
    whole, half = (row < rows)[:, None] & (column < WIDTH), (row < rows)[:, None] & (pair < HALF)
    token = (row // heads).to(tl.int64)
    # All that is read, before anything is written: no load is lifted over a store.
    start = (token * x_token + (row % heads) * x_head)[:, None] * UNIT
    value = tl.load(x + start + column, mask=whole, other=0.0).to(tl.float32)
    w = _weight(weight, column, ROWS, WIDTH)
    c = tl.load(cos + token[:, None] * cos_row + pair, mask=half, other=0.0).to(tl.float32)
    s = tl.load(sin + token[:, None] * sin_row + pair, mask=half, other=0.0).to(tl.float32)
    if CACHED:
        at, kept = _slot(places, tokens, token, row % heads, block_step, head_step, place_step, row < rows)
    value = value * _root(value, eps, WIDTH)
    if ROUND:
        value = value.to(normed.dtype.element_ty).to(tl.float32)
    value = (value * w).to(normed.dtype.element_ty)
    to = row.to(tl.int64)[:, None] * WIDTH
    tl.store(normed + to + column, value, mask=whole)
    first, second = tl.split(tl.permute(tl.reshape(value.to(tl.float32), (ROWS, 2, HALF)), (0, 2, 1)))
    low = _product(first, c, EXACT) - _product(second, s, EXACT)
    high = _product(second, c, EXACT) + _product(first, s, EXACT)
    low, high = low.to(rotated.dtype.element_ty), high.to(rotated.dtype.element_ty)
    tl.store(rotated + to + pair, low, mask=half)
    tl.store(rotated + to + HALF + pair, high, mask=half)
    if CACHED:
        tl.store(cached + at + pair, low, mask=half & kept)
        tl.store(cached + at + HALF + pair, high, mask=half & kept)


@triton.jit
def _copied(
    program, x, rows, heads, x_token, x_head, cached, places, tokens, block_step, head_step, place_step,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    row = program * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)[None, :]
    token = (row // heads).to(tl.int64)
    at, kept = _slot(places, tokens, token, row % heads, block_step, head_step, place_step, row < rows)
    inside = (row < rows)[:, None] & kept & (column < WIDTH)
    start = (token * x_token + (row % heads) * x_head)[:, None] * UNIT
    tl.store(cached + at + column, tl.load(x + start + column, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["query_rows", "key_rows", "x_token", "y_token", "z_token", "query_programs", "tokens"])
def _rotated(
    x, y, x_weight, y_weight, x_normed, y_normed, x_rotated, y_rotated, cos, sin, query_programs, query_rows, key_rows,
    query_heads, key_heads, x_token, x_head, y_token, y_head, cos_row, sin_row, eps,
    z, keys, values, places, tokens, z_token, z_head, block_step, head_step, place_step,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr, ROUND: tl.constexpr, EXACT: tl.constexpr,
    CACHED: tl.constexpr, BEHIND: tl.constexpr = False,
):  # fmt: skip
    """The norms of the heads of queries x and keys y, and those rotated as in `rlspec.kernels.rope`.

    CACHED: the keys go to `keys` too, and z to `values`, layers of a cache, at `places`.
    """
    _in_turn(BEHIND)
    program = tl.program_id(0)
    key_programs = tl.cdiv(key_rows, ROWS)
    if program < query_programs:
        _heads(
            program, x, x_weight, x_normed, x_rotated, cos, sin, query_rows, query_heads, x_token, x_head,
            cos_row, sin_row, eps, keys, places, tokens, block_step, head_step, place_step,
            WIDTH, ROWS, UNIT, ROUND, EXACT, False,
        )  # fmt: skip
    elif program < query_programs + key_programs:
        _heads(
            program - query_programs, y, y_weight, y_normed, y_rotated, cos, sin, key_rows, key_heads, y_token,
            y_head, cos_row, sin_row, eps, keys, places, tokens, block_step, head_step, place_step,
            WIDTH, ROWS, UNIT, ROUND, EXACT, CACHED,
        )  # fmt: skip
    elif CACHED:
        _copied(
            program - query_programs - key_programs, z, key_rows, key_heads, z_token, z_head, values, places, tokens,
            block_step, head_step, place_step, WIDTH, ROWS, UNIT,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "inner", "x_outer", "x_inner", "dy_outer", "dy_inner"])
def _data_gradient(
    x, weight, dy, dx, rows, inner, x_outer, x_inner, dy_outer, dy_inner, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows)[:, None] & (column < WIDTH)
    outer, within = (row // inner).to(tl.int64), row % inner
    x_start = (outer * x_outer + within * x_inner)[:, None] * UNIT
    dy_start = (outer * dy_outer + within * dy_inner)[:, None] * UNIT
    value = tl.load(x + x_start + column, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(dy + dy_start + column, mask=inside, other=0.0).to(tl.float32)
    g = g * _weight(weight, column, ROWS, WIDTH)
    root = _root(value, eps, WIDTH)
    n = value * root
    mean = (tl.sum(g * n, 1) / WIDTH)[:, None]
    value = root * (g - n * mean)
    tl.store(dx + row.to(tl.int64)[:, None] * WIDTH + column, value.to(dx.dtype.element_ty), mask=inside)


@triton.jit(
    do_not_specialize=["rows", "x_outer", "x_inner", "dy_outer", "dy_inner"],
    do_not_specialize_on_alignment=["table"],
)
def _block_sums(
    x, dy, table, sums, rows, heads, x_outer, x_inner, dy_outer, dy_inner, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr,
    GROUP: tl.constexpr, TABLE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """sums [B, WIDTH] = Σ dy · n over the 16 positions of each block and their heads: position-major, head-minor.

    ROWS partial sums take every ROWS-th row each, in order; the tree of `tl.sum` joins them.
    """
    block = tl.program_id(0)
    column = tl.arange(0, BLOCK)[None, :]
    acc = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in tl.range(0, GROUP * heads, ROWS, num_stages=STAGES):
        of_block = first + tl.arange(0, ROWS)
        position = block * GROUP + of_block // heads
        head = of_block % heads
        listed = of_block < GROUP * heads
        if TABLE:
            row = tl.load(table + position, mask=listed, other=-1)
        else:
            row = tl.where(listed & (position < rows), position, -1)
        live = (row >= 0) & (row < rows)
        inside = live[:, None] & (column < WIDTH)
        outer = row.to(tl.int64)
        value = tl.load(x + (outer * x_outer + head * x_inner)[:, None] * UNIT + column, mask=inside, other=0.0)
        value = value.to(tl.float32)
        g = tl.load(dy + (outer * dy_outer + head * dy_inner)[:, None] * UNIT + column, mask=inside, other=0.0)
        term = g.to(tl.float32) * (value * _root(value, eps, WIDTH))
        # -1 is a zero row. A row that does not exist must show: the host cannot look at a table on the device.
        acc += tl.where(live[:, None], term, tl.where(row == -1, 0.0, float("nan"))[:, None])
    column = tl.arange(0, BLOCK)
    tl.store(sums + block.to(tl.int64) * WIDTH + column, tl.sum(acc, 0), mask=column < WIDTH)


@triton.jit(do_not_specialize=["blocks"])
def _chain(sums, accumulator, blocks, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """accumulator += sums[0], then += sums[1], ...: a chain, so that any cut into calls has the same bits."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < WIDTH
    acc = tl.load(accumulator + column, mask=inside, other=0.0)
    # Unrolled, so that many loads are in flight; the additions keep their order.
    many = blocks // 128 * 128
    for first in range(0, many, 128):
        places = sums + tl.cast(first, tl.int64) * WIDTH + column
        for i in tl.static_range(128):
            acc += tl.load(places + i * WIDTH, mask=inside, other=0.0)
    for block in range(many, blocks):
        acc += tl.load(sums + tl.cast(block, tl.int64) * WIDTH + column, mask=inside, other=0.0)
    tl.store(accumulator + column, acc, mask=inside)


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


def _unit(width: int, dtype: torch.dtype) -> int:
    return gcd(width, 16 // dtype.itemsize)


def _aligned(x: Tensor) -> Tensor:
    """[outer, inner, width] that starts at a multiple of 16 bytes, with strides in units of the width; else a copy."""
    unit = _unit(x.shape[-1], x.dtype)
    strides = x.stride()
    fits = strides[-1] == 1 and not any(stride % unit for stride in strides[:-1]) and x.data_ptr() % 16 == 0
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def _rows(x: Tensor) -> Tensor:
    """[..., width] -> [outer, inner, width], aligned; the last dimension before the width is the inner one."""
    inner = x.shape[-2] if x.dim() > 1 else 1
    return _aligned(x.reshape(-1, inner, x.shape[-1]))


def _steps(x: Tensor) -> tuple[int, int]:
    unit = _unit(x.shape[-1], x.dtype)
    return x.stride(0) // unit, x.stride(1) // unit


def _shape(width: int, elements: int) -> tuple[int, int]:
    """Block that holds a row, and rows a program, for about `elements` elements a program: by the width alone."""
    block = triton.next_power_of_2(width)
    return block, max(1, elements // block)


def _warps(block: int, rows: int) -> int:
    return min(32, max(4, block * rows // 1024))


def _forward_launch(x: Tensor, weight: Tensor, y: Tensor, eps: float, round_before_weight: bool) -> Launch:
    (outer, inner, width), (block, rows) = x.shape, _shape(x.shape[-1], 2048)
    args = (x, weight, y, outer * inner, inner, *_steps(x), eps, width, block, rows, _unit(width, x.dtype))
    options = {"num_warps": _warps(block, rows), **_behind(x)}
    return Launch(_forward, (triton.cdiv(outer * inner, rows),), (*args, round_before_weight), options)


def _data_launch(x: Tensor, weight: Tensor, dy: Tensor, dx: Tensor, eps: float) -> Launch:
    (outer, inner, width), (block, rows) = x.shape, _shape(x.shape[-1], 2048)
    steps = (*_steps(x), *_steps(dy))
    args = (x, weight, dy, dx, outer * inner, inner, *steps, eps, width, block, rows, _unit(width, x.dtype))
    return Launch(_data_gradient, (triton.cdiv(outer * inner, rows),), args, {"num_warps": _warps(block, rows)})


def _sums_launch(x: Tensor, dy: Tensor, blocks: Tensor | None, sums: Tensor, eps: float) -> Launch:
    (positions, heads, width), (block, rows) = x.shape, _shape(x.shape[-1], 4096)
    # Rows beyond the 16 positions of a block would have nothing to do.
    rows = min(rows, triton.next_power_of_2(GROUP * heads))
    # Three stages of both tensors where they fit into shared memory.
    stages = 3 if rows == 1 and block * x.element_size() <= 32768 else 1
    table = blocks is not None
    args = (x, dy, blocks if table else sums, sums, positions, heads, *_steps(x), *_steps(dy), eps)
    constants = (width, block, rows, _unit(width, x.dtype), GROUP, table, stages)
    return Launch(_block_sums, (sums.shape[0],), (*args, *constants), {"num_warps": _warps(block, rows)})


def _chain_launch(sums: Tensor, accumulator: Tensor) -> Launch:
    blocks, width = sums.shape
    return Launch(_chain, (triton.cdiv(width, 32),), (sums, accumulator, blocks, width, 32), {"num_warps": 1})


def _weight_gradient(accumulator: Tensor, x: Tensor, dy: Tensor, blocks: Tensor | None, eps: float) -> None:
    count = triton.cdiv(x.shape[0], GROUP) if blocks is None else blocks.shape[0]
    sums = torch.empty((count, x.shape[2]), device=x.device)
    _sums_launch(x, dy, blocks, sums, eps)(x.device)
    _chain_launch(sums, accumulator)(x.device)


def _positions(x: Tensor) -> Tensor:
    """[..., width] -> [positions, heads, width]: four dimensions are [B, T, heads, D], fewer have one head."""
    return x.reshape(-1, x.shape[-2] if x.dim() == 4 else 1, x.shape[-1])


# ---- public ----


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, round_before_weight: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _forward_launch(_rows(x), _dense(weight), y, eps, round_before_weight)(x.device)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        dx = dweight = None
        if ctx.needs_input_grad[0]:
            dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
            _data_launch(_rows(x), _dense(weight), _rows(dy), dx, ctx.eps)(x.device)
        if ctx.needs_input_grad[1]:
            total = torch.zeros(weight.shape, device=weight.device)
            _weight_gradient(total, _aligned(_positions(x)), _aligned(_positions(dy)), None, ctx.eps)
            dweight = total.to(weight.dtype)
        return dx, dweight, None, None


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, round_before_weight: bool = False) -> Tensor:
    """x / √(mean(x²) + eps) · weight. x [..., H], weight [H] -> [..., H] in the dtype of x.

    Differentiable. The gradient of the weight that autograd asks for is one `fold` over all positions in the order
    given ([B, T, heads, D] has B · T positions, other shapes one a row), rounded once. With `round_before_weight` a
    gradient passes the inner rounding as if it were not there.
    Raises ValueError for other shapes, empty tensors, dtypes that differ or are not bf16, fp16, fp32, rows wider than
    65536, 2³¹ rows or more, and CPU tensors (fp32 is taken under the interpreter).
    """
    _check_operands(x, weight, "x", "weight")
    if x.dim() == 0 or weight.dim() != 1 or x.shape[-1] != weight.shape[0]:
        raise ValueError(f"x {list(x.shape)} and weight {list(weight.shape)}: rms_norm takes [..., H] and [H]")
    return _RmsNorm.apply(x, weight, eps, round_before_weight)


OF_SUM, ROTATED = _of_sum.__name__, _rotated.__name__


def residual_norm(
    residual: Tensor, x: Tensor, weight: Tensor, *, eps: float, round_before_weight: bool = False
) -> tuple[Tensor, Tensor] | None:
    """total = residual + x, and the norm of the total rounded to the dtype of x, [..., H] each; without gradients.

    The bits are those of `rlspec.kernels.residual_add` and `rms_norm`. None for tensors that would have to be copied.
    """
    _check_operands(x, weight, "x", "weight")
    a, b = (one.reshape(-1, one.shape[-1]) for one in (residual, x))
    if _aligned(b) is not b or _aligned(a) is not a or a.stride(0) % _unit(x.shape[-1], x.dtype):
        return None
    total, y = (torch.empty(one.shape, dtype=one.dtype, device=one.device) for one in (residual, x))
    (rows, width), (block, together) = b.shape, _shape(x.shape[-1], 2048)
    unit = _unit(width, x.dtype)
    args = (a, b, _dense(weight), total, y, rows, a.stride(0) // unit, b.stride(0) // unit, eps, width, block, together)
    options = {"num_warps": _warps(block, together), **_behind(x)}
    Launch(_of_sum, (triton.cdiv(rows, together),), (*args, unit, round_before_weight), options)(x.device)
    return total, y


def rotated_heads(
    query: Tensor,
    key: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    eps: float,
    round_before_weight: bool = False,
    value: Tensor | None = None,
    slots: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """The norms of the heads of query and key [B, T, heads, D], and those rotated by cos and sin [B, T, D/2].

    Without gradients; the bits are those of `rms_norm` and `rlspec.kernels.rope`. None for a width that is no power of
    two, and for tensors that would have to be copied.
    `slots`: a layer's keys and values in a cache, [blocks, heads, places, D] of one layout, and int64 [2, B·T], block
    and place of each token, block -1 for none. Rotated keys and `value`, as key, are stored there too.
    """
    _check_operands(query, query_weight, "query", "query_weight")
    _check_operands(key, key_weight, "key", "key_weight")
    width, (x, y) = query.shape[-1], (one.reshape(-1, *one.shape[2:]) for one in (query, key))
    tables = [one.reshape(-1, one.shape[-1]) for one in (cos, sin)]
    copied = _aligned(x) is not x or _aligned(y) is not y or any(one.stride(1) != 1 for one in tables)
    if copied or width & (width - 1) or width < 2 or len(x) != len(y) or query.dtype != key.dtype:
        return None
    z = y if value is None else value.reshape(-1, *value.shape[2:])
    if slots is not None and (_aligned(z) is not z or z.shape != y.shape):
        return None
    made = [torch.empty(one.shape, dtype=one.dtype, device=one.device) for one in (query, key, query, key)]
    block, together = _shape(width, 2048)
    (tokens, query_heads, _), key_heads = x.shape, y.shape[1]
    counts = (query_heads, key_heads) if slots is None else (query_heads, key_heads, key_heads)
    programs = [triton.cdiv(tokens * heads, together) for heads in counts]
    stores = (made[3], made[3], made[3]) if slots is None else slots
    steps = (0, 0, 0) if slots is None else slots[0].stride()[:3]
    sizes = (programs[0], tokens * query_heads, tokens * key_heads, query_heads, key_heads, *_steps(x), *_steps(y))
    args = (x, y, _dense(query_weight), _dense(key_weight), *made, *tables, *sizes, *(one.stride(0) for one in tables))
    cache = (z, *stores, tokens, *_steps(z), *steps)
    constants = (eps, *cache, width, together, _unit(width, x.dtype), round_before_weight, x.is_cuda, slots is not None)
    options = {"num_warps": _warps(block, together), **_behind(x)}
    Launch(_rotated, (sum(programs),), (*args, *constants), options)(x.device)
    return made[0], made[1], made[2], made[3]


def fold(accumulator: Tensor, x: Tensor, dy: Tensor, blocks: Tensor, *, eps: float) -> None:
    """accumulator += Σ dy · x · r over the rows that `blocks` names, resumed in place: the gradient of the weight.

    accumulator fp32 [H] contiguous; x and dy [R, heads, H] of one dtype; blocks int32 [B, 16]: positions, block after
    block, -1 a zero row. A block is summed in a fixed tree, then added to the accumulator, blocks ascending: any cut
    of the sequence of blocks over calls gives the same bits.

    `blocks` may be a CPU tensor (checked, then copied) or on the device of x (not looked at; a position that does not
    exist makes the accumulator NaN; this form can be captured in a graph).
    Raises ValueError for other shapes, dtypes, devices, an empty table, and positions out of range in a CPU table.
    """
    _check_operands(x, dy, "x", "dy")
    shapes = f"accumulator {list(accumulator.shape)}, x {list(x.shape)}, dy {list(dy.shape)}"
    if x.dim() != 3 or dy.shape != x.shape or tuple(accumulator.shape) != (x.shape[2],):
        raise ValueError(f"{shapes}: fold takes [H], [R, heads, H] and [R, heads, H]")
    if accumulator.dtype != torch.float32 or not accumulator.is_contiguous() or accumulator.device != x.device:
        raise ValueError("accumulator: fold adds into a contiguous fp32 tensor on the device of x")
    _check_blocks(blocks, x)
    if blocks.device != x.device:
        blocks = blocks.pin_memory().to(x.device, non_blocking=True)
    _weight_gradient(accumulator, _aligned(x), _aligned(dy), blocks.contiguous(), eps)


def _dense(weight: Tensor) -> Tensor:
    fits = weight.is_contiguous() and weight.data_ptr() % 16 == 0
    return weight if fits else weight.clone(memory_format=torch.contiguous_format)


def _check_operands(one: Tensor, other: Tensor, name: str, other_name: str) -> None:
    names = f"{name} and {other_name}"
    if one.dtype != other.dtype or one.dtype not in DTYPES:
        raise ValueError(f"{names} are {one.dtype} and {other.dtype}: they must both be bf16, fp16 or fp32")
    if one.device != other.device:
        raise ValueError(f"{names} are on {one.device} and {other.device}")
    if not one.numel() or not other.numel():
        raise ValueError(f"{names} are {list(one.shape)} and {list(other.shape)}: an empty tensor")
    if one.shape[-1] > WIDEST or one.numel() // one.shape[-1] >= 2**31:
        raise ValueError(f"{name} {list(one.shape)}: rows up to {WIDEST} wide, fewer than 2**31 of them")
    if one.is_cuda:
        return
    if one.device.type != "cpu" or isinstance(_forward, triton.JITFunction):
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
