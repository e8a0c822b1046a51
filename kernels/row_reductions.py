"""Reductions over the last dimension: sum, mean, softmax and log_softmax, and the way back of a broadcast.

    sum      y = Σ_j x[j]                             dx[j] = dy
    mean     y = (Σ_j x[j]) / width                   dx[j] = dy / width
    softmax  y[j] = exp(x[j] - top) / total           dx[j] = y[j] · (dy[j] - Σ_i dy[i] · y[i])
    log_softmax  y[j] = (x[j] - top) - log(total)     dx[j] = dy[j] - exp(y[j]) · Σ_i dy[i]
    spread   y[j] = x                                 dx = Σ_j dy[j]

with top = max_j x[j] and total = Σ_j exp(x[j] - top).

Promise. One program a row, so a row's bits depend on the row and on its width alone. Each lane owns 8 neighbouring
columns of a tile and adds tile after tile, from left to right; then the 8 columns and the lanes meet along trees. These
are written out, for the order of `tl.sum` would follow the compiler's layout, and that the alignment of pointers and
strides. The number of lanes is a function of the width. Sums and means of rows wider than 32768 are cut at multiples of
it, and the sums of the spans reduced as a row of their own. The maximum is exact in any order. fp32 with contraction to
fma switched off, IEEE quotients, one rounding at the end. Gradients use the probabilities before their rounding, made
again from x, top and total.

Limits. bf16, fp16, fp32; up to 2³⁰ columns and fewer than 2³¹ rows; not twice differentiable. A row with +inf, and one
of only -inf, has no softmax: NaN, as in torch.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SPAN = 32768
LOG2E = tl.constexpr(1.4426950408889634)


# ---- kernels ----


@triton.jit
def _columns(LANES: tl.constexpr):
    return tl.arange(0, LANES)[:, None] * 8 + tl.arange(0, 8)[None, :]


@triton.jit
def _by_lane(x, LANES: tl.constexpr):
    """[LANES, 8] -> [LANES]: ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7))."""
    left, right = tl.split(tl.reshape(x, (LANES, 4, 2)))
    left, right = tl.split(tl.reshape(left + right, (LANES, 2, 2)))
    left, right = tl.split(left + right)
    return left + right


@triton.jit
def _of_lanes(x, LANES: tl.constexpr, DEPTH: tl.constexpr):
    """[LANES] -> a scalar: neighbouring lanes, then neighbouring pairs, and so on; LANES = 2 ^ DEPTH."""
    for level in tl.static_range(DEPTH):
        left, right = tl.split(tl.reshape(x, (LANES >> (level + 1), 2)))
        x = left + right
    return tl.sum(x, 0)  # of one number


@triton.jit
def _read(x, column, width, other):
    return tl.load(x + column, mask=column < width, other=other).to(tl.float32)


@triton.jit(do_not_specialize=["x_row", "width", "spans", "count"])
def _sum(
    x, y, x_row, width, spans, count, SPAN: tl.constexpr, LANES: tl.constexpr, DEPTH: tl.constexpr, MEAN: tl.constexpr
):  # fmt: skip
    """The sum of one span of a row, divided by `count` if MEAN."""
    place = tl.program_id(0).to(tl.int64)
    column = _columns(LANES)
    first = (place % spans).to(tl.int32) * SPAN
    last = tl.minimum(first + SPAN, width)
    x += (place // spans) * x_row
    total = tl.zeros([LANES], tl.float32)
    for start in range(first, last, LANES * 8):
        total += _by_lane(_read(x, start + column, last, 0.0), LANES)
    found = _of_lanes(total, LANES, DEPTH)
    if MEAN:
        found = tl.div_rn(found, count.to(tl.float32))
    tl.store(y + place, found.to(y.dtype.element_ty))


@triton.jit(do_not_specialize=["x_row", "width"])
def _softmax(
    x, y, tops, totals, x_row, width, LANES: tl.constexpr, DEPTH: tl.constexpr, LOG: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = _columns(LANES)
    x += row * x_row
    high = tl.full([LANES], float("-inf"), tl.float32)
    for start in range(0, width, LANES * 8):
        high = tl.maximum(high, tl.max(_read(x, start + column, width, float("-inf")), 1))
    top = tl.max(high, 0)
    total = tl.zeros([LANES], tl.float32)
    for start in range(0, width, LANES * 8):
        weight = tl.exp2((_read(x, start + column, width, float("-inf")) - top) * LOG2E)
        # A row of only -inf must become NaN, and a column past the end add nothing all the same.
        total += _by_lane(tl.where(start + column < width, weight, 0.0), LANES)
    whole = _of_lanes(total, LANES, DEPTH)
    tl.store(tops + row, top)
    tl.store(totals + row, whole)
    for start in range(0, width, LANES * 8):
        below = _read(x, start + column, width, 0.0) - top
        value = below - tl.log(whole) if LOG else tl.div_rn(tl.exp2(below * LOG2E), tl.zeros_like(below) + whole)
        to = y + row * width + start + column
        tl.store(to, value.to(y.dtype.element_ty), mask=start + column < width)


@triton.jit(do_not_specialize=["x_row", "dy_row", "width"])
def _softmax_gradient(
    x, dy, dx, tops, totals, x_row, dy_row, width, LANES: tl.constexpr, DEPTH: tl.constexpr, LOG: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = _columns(LANES)
    x += row * x_row
    dy += row * dy_row
    top = tl.load(tops + row)
    whole = tl.load(totals + row)
    sums = tl.zeros([LANES], tl.float32)
    for start in range(0, width, LANES * 8):
        term = _read(dy, start + column, width, 0.0)
        if not LOG:
            below = _read(x, start + column, width, float("-inf")) - top
            p = tl.div_rn(tl.exp2(below * LOG2E), tl.zeros_like(below) + whole)
            term = tl.where(start + column < width, term * p, 0.0)
        sums += _by_lane(term, LANES)
    along = _of_lanes(sums, LANES, DEPTH)
    for start in range(0, width, LANES * 8):
        below = _read(x, start + column, width, 0.0) - top
        p = tl.div_rn(tl.exp2(below * LOG2E), tl.zeros_like(below) + whole)
        g = _read(dy, start + column, width, 0.0)
        value = g - p * along if LOG else p * (g - along)
        to = dx + row * width + start + column
        tl.store(to, value.to(dx.dtype.element_ty), mask=start + column < width)


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


def _lanes(width: int) -> tuple[int, int]:
    """Lanes, and their logarithm: a tile of 8 columns a lane covers a narrow row; wide rows take many tiles."""
    lanes = min(256, max(16, triton.next_power_of_2(triton.cdiv(width, 8))))
    return lanes, lanes.bit_length() - 1


def _launch(kernel: Any, rows: int, width: int, args: tuple[Any, ...], flag: bool) -> Launch:
    lanes, depth = _lanes(width)
    options = {"num_warps": max(1, min(4, lanes // 32)), "enable_fp_fusion": False}
    return Launch(kernel, (rows,), (*args, lanes, depth, flag), options)


def _sum_launch(x: Tensor, y: Tensor, mean: bool, count: int) -> Launch:
    """y [rows · spans] = sums of the spans of x [rows, width]."""
    rows, width = x.shape
    spans = triton.cdiv(width, SPAN)
    return _launch(_sum, rows * spans, min(width, SPAN), (x, y, x.stride(0), width, spans, count, SPAN), mean)


def _softmax_launch(x: Tensor, y: Tensor, tops: Tensor, totals: Tensor, log: bool) -> Launch:
    rows, width = x.shape
    return _launch(_softmax, rows, width, (x, y, tops, totals, x.stride(0), width), log)


def _gradient_launch(x: Tensor, dy: Tensor, dx: Tensor, tops: Tensor, totals: Tensor, log: bool) -> Launch:
    rows, width = x.shape
    args = (x, dy, dx, tops, totals, x.stride(0), dy.stride(0), width)
    return _launch(_softmax_gradient, rows, width, args, log)


def _reduced(x: Tensor, mean: bool) -> Tensor:
    y = torch.empty(x.shape[:-1], dtype=x.dtype, device=x.device)
    part = _rows(x)
    while part.shape[1] > SPAN:
        rows, spans = part.shape[0], triton.cdiv(part.shape[1], SPAN)
        sums = torch.empty((rows, spans), dtype=torch.float32, device=x.device)
        _sum_launch(part, sums, False, 1)(x.device)
        part = sums
    _sum_launch(part, y, mean, x.shape[-1])(x.device)
    return y


def _rows(x: Tensor) -> Tensor:
    """[..., width] -> [rows, width] with unit stride inside a row; copied only if x does not lie like that."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


# ---- public ----


class _Reduction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mean: bool) -> Tensor:
        ctx.shape, ctx.mean = x.shape, mean
        return _reduced(x, mean)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        each = dy / ctx.shape[-1] if ctx.mean else dy
        return each.unsqueeze(-1).expand(ctx.shape), None


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, log: bool) -> Tensor:
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        tops, totals = torch.empty((2, x.numel() // x.shape[-1]), dtype=torch.float32, device=x.device)
        _softmax_launch(_rows(x), y, tops, totals, log)(x.device)
        ctx.save_for_backward(x, tops, totals)
        ctx.log = log
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        x, tops, totals = ctx.saved_tensors
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _gradient_launch(_rows(x), _rows(dy), dx, tops, totals, ctx.log)(x.device)
        return dx, None


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, width: int) -> Tensor:
        return x.expand(*x.shape[:-1], width)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return _reduced(dy, mean=False).unsqueeze(-1), None


def row_sum(x: Tensor) -> Tensor:
    """x [..., W] -> [...], in the dtype of x. Differentiable, as all here.

    Raises ValueError for dtypes other than bf16, fp16 and fp32, scalars, empty tensors, more than 2³⁰ columns, and CPU
    tensors outside the interpreter.
    """
    _check(x, "row_sum")
    return _Reduction.apply(x, False)


def row_mean(x: Tensor) -> Tensor:
    """x [..., W] -> [...], in the dtype of x. Raises as `row_sum`."""
    _check(x, "row_mean")
    return _Reduction.apply(x, True)


def softmax(x: Tensor) -> Tensor:
    """x [..., W] -> as x, over the last dimension. Raises as `row_sum`."""
    _check(x, "softmax")
    return _Softmax.apply(x, False)


def log_softmax(x: Tensor) -> Tensor:
    """x [..., W] -> as x, over the last dimension. Raises as `row_sum`."""
    _check(x, "log_softmax")
    return _Softmax.apply(x, True)


def spread(x: Tensor, width: int) -> Tensor:
    """x [..., 1] -> a view [..., width] whose gradient is summed by `row_sum`. Raises as `row_sum`."""
    _check(x, "spread")
    if x.shape[-1] != 1 or width < 1:
        raise ValueError(f"spread takes [..., 1] and a width from 1, not {list(x.shape)} and {width}")
    return _Spread.apply(x, width)


def _check(x: Tensor, name: str) -> None:
    if x.dtype not in DTYPES:
        raise ValueError(f"{name} takes bf16, fp16 or fp32, not {x.dtype}")
    if x.dim() == 0 or x.numel() == 0 or x.shape[-1] > 2**30 or x.numel() // x.shape[-1] >= 2**31:
        raise ValueError(f"{name} takes [..., width], not empty, up to 2³⁰ columns, not {list(x.shape)}")
    if x.is_cuda:
        return
    if x.device.type != "cpu" or isinstance(_sum, triton.JITFunction):
        raise ValueError(f"{name} runs on CUDA, not on {x.device}")
    if x.dtype == torch.bfloat16:
        raise ValueError(f"{name}: the interpreter is right for fp32 and fp16 only")
