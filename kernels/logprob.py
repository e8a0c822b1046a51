"""Log-probability of one target a row, and the entropy of the row:

    logprob = x[t] - lse        lse = log sum_j exp(x[j])        entropy = lse - sum_j p[j] · x[j]
    p[j] = exp(x[j] - lse)
    d x[j] = d logprob · ([j = t] - p[j]) - d entropy · p[j] · (log p[j] + entropy)

Two ways to the log-sum-exp, each with one reading of the logits:

    batch_invariant_logprob   streams: one program a row takes tiles of 256 lanes x 8 columns from left to right, and
                              each lane keeps a running maximum and the sum relative to it (online softmax)
    logprob                   cuts the row at multiples of 32768 columns into spans that run side by side, each as
                              above, so that few rows fill the chip too, and joins them in a second kernel

The work of a row is the same in both wherever the row stands: cuts lie at fixed columns, the 8 columns of a lane, the
256 lanes and the spans are added along a tree written out below, not one that the compiler makes from its layout. The
maximum is exact in any order. Differences are taken before the scaling by log2(e), so the factor of a sum whose
maximum did not move is exp2(0) = 1 exactly. A maximum of -inf counts as 0, so columns that are all -inf add nothing.

Promise: a row's bits depend on that row, its target and V alone. fp32 with contraction to fma switched off. The
gradient is formed tile by tile from the saved log-sum-exp, in the dtype of the logits: nothing of size [N, V] is fp32.
The log-sum-exp is kept in two parts, the maximum and the log of the sum: x - top is exact where it matters most.
Limits: bf16, fp16 and fp32 logits; not twice differentiable. A row of NaN, of only -inf, or with +inf gives NaN. A
target outside [0, V) cannot be refused without waiting for the device: its row gives NaN, and a NaN gradient.
Rows with the ignored target are never read: 0 for both results, zero gradient. The two ways differ in the last bits.
Source of the online sum: Milakov and Gimelshein 2018, arXiv:1805.02867.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LANES = 256
STAGES = 4
SPAN = 32768
LOG2E = tl.constexpr(1.4426950408889634)


def logprob(
    logits: Tensor, targets: Tensor, *, ignore_index: int = -100, entropy: bool = False, validate: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """logits [..., V], targets [...] int64 -> fp32 [...]; with `entropy` a pair, the second the entropy in nats.

    Both are 0, without gradient, where the target is `ignore_index`, and NaN where it is outside [0, V); with
    `validate` such a target raises ValueError, at the price of a device sync.
    Raises ValueError for other dtypes, shapes or devices that do not fit, empty tensors, a device without Triton.
    """
    return _apply("logprob", False, logits, targets, ignore_index, entropy, validate)


def batch_invariant_logprob(
    logits: Tensor, targets: Tensor, *, ignore_index: int = -100, entropy: bool = False, validate: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """As `logprob`, by streaming each row from left to right: the least traffic where there are many rows."""
    return _apply("batch_invariant_logprob", True, logits, targets, ignore_index, entropy, validate)


def _apply(
    name: str, stream: bool, logits: Tensor, targets: Tensor, ignore_index: int, entropy: bool, validate: bool
) -> Tensor | tuple[Tensor, Tensor]:
    if logits.dtype not in DTYPES or targets.dtype != torch.int64:
        raise ValueError(f"{name} takes bf16, fp16 or fp32 logits, int64 targets, not {logits.dtype}, {targets.dtype}")
    if logits.dim() == 0 or logits.shape[:-1] != targets.shape:
        raise ValueError(f"{name}: logits {list(logits.shape)} do not match targets {list(targets.shape)}")
    if logits.device != targets.device:
        raise ValueError(f"{name}: logits are on {logits.device}, targets on {targets.device}")
    if logits.numel() == 0:
        raise ValueError(f"{name} takes no empty tensors: {list(logits.shape)}")
    if validate:
        wrong = (targets != ignore_index) & ((targets < 0) | (targets >= logits.shape[-1]))
        if wrong.any():
            raise ValueError(f"{name}: target {int(targets[wrong][0])} for logits of {logits.shape[-1]} columns")
    found, spread = _Logprob.apply(logits, targets, ignore_index, entropy, stream)
    return (found, spread) if entropy else found


class _Logprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, logits: Tensor, targets: Tensor, ignored: int, entropy: bool, stream: bool
    ) -> tuple[Tensor, Tensor | None]:
        x, t = _rows(logits), targets.contiguous().flatten()
        rows, width = x.shape
        found, top, scale, spread = (torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(4))
        options = {"ENTROPY": entropy, "LANES": LANES, "STAGES": STAGES, "num_warps": 4, "enable_fp_fusion": False}
        stride = x.stride(0) if rows > 1 else width
        with _device(x):
            if stream:
                _stream[(rows,)](x, t, found, top, scale, spread, stride, width, ignored, **options)
            else:
                spans = triton.cdiv(width, SPAN)
                parts = [torch.empty(rows * spans, dtype=torch.float32, device=x.device) for _ in range(3)]
                _spans[(rows * spans,)](x, t, *parts, stride, width, spans, ignored, SPAN=SPAN, **options)
                _join[(rows,)](
                    x, t, *parts, found, top, scale, spread, stride, width, spans, ignored,
                    SPANS=triton.next_power_of_2(spans), DEPTH=(spans - 1).bit_length(), ENTROPY=entropy,
                    num_warps=1, enable_fp_fusion=False,
                )  # fmt: skip
        ctx.save_for_backward(logits, t, top, scale, spread if entropy else None)
        ctx.ignored = ignored
        return found.view(targets.shape), spread.view(targets.shape) if entropy else None

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor, grad_entropy: Tensor | None) -> tuple[Tensor, None, None, None, None]:
        logits, t, top, scale, spread = ctx.saved_tensors
        x = _rows(logits)
        rows, width = x.shape
        dx = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        block = min(triton.next_power_of_2(width), 2048)
        blocks = triton.cdiv(width, block)
        entropy = spread is not None
        dy = grad.reshape(-1).contiguous()
        more = (spread, grad_entropy.reshape(-1).contiguous()) if entropy else (scale, scale)
        with _device(x):
            _backward[(rows * blocks,)](
                x, t, top, scale, dy, *more, dx, x.stride(0) if rows > 1 else width, width, blocks, ctx.ignored,
                ENTROPY=entropy, BLOCK=block, num_warps=4, enable_fp_fusion=False,
            )  # fmt: skip
        return dx, None, None, None, None


@triton.jit
def _sum8(x, LANES: tl.constexpr):
    """[LANES, 8] -> [LANES]: ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7))."""
    a, b = tl.split(tl.reshape(x, (LANES, 4, 2)))
    a, b = tl.split(tl.reshape(a + b, (LANES, 2, 2)))
    a, b = tl.split(a + b)
    return a + b


@triton.jit
def _tree(x, N: tl.constexpr, DEPTH: tl.constexpr):
    """[N] -> a scalar: neighbours, then neighbouring pairs, and so on, for N = 2 ^ DEPTH."""
    for level in tl.static_range(DEPTH):
        a, b = tl.split(tl.reshape(x, (N >> (level + 1), 2)))
        x = a + b
    return tl.sum(x, 0)


@triton.jit
def _finite(top):
    """The maximum to subtract: 0 instead of -inf, since -inf - (-inf) is NaN."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def _shifted(total, moment, gap):
    """sum of (x - new) · exp(x - old) from sum of (x - old) · exp(x - old) and sum of exp, with gap = old - new."""
    return moment + tl.where(total == 0.0, 0.0, gap * total)


@triton.jit
def _take(value, top, total, moment, ENTROPY: tl.constexpr, LANES: tl.constexpr):
    """Add 8 columns [LANES, 8] to each lane's maximum and its sums of exp(x - top) and (x - top) · exp(x - top)."""
    high = tl.maximum(top, tl.max(value, 1))
    base = _finite(high)
    gap = top - base
    keep = tl.exp2(gap * LOG2E)
    below = value - base[:, None]
    weight = tl.exp2(below * LOG2E)
    if ENTROPY:
        moment = _shifted(total, moment, gap) * keep
        # exp(-200) is 0 in fp32, so the bound only makes 0 of -inf · 0.
        moment += _sum8(tl.maximum(below, -200.0) * weight, LANES)
    return high, total * keep + _sum8(weight, LANES), moment


@triton.jit
def _meet(top, total, moment, N: tl.constexpr, DEPTH: tl.constexpr, ENTROPY: tl.constexpr):
    """N maxima with their sums -> one: all factors from the exact maximum of all, then the tree."""
    high = tl.max(top, 0)
    gap = top - _finite(high)
    keep = tl.exp2(gap * LOG2E)
    joined = 0.0
    if ENTROPY:
        joined = _tree(_shifted(total, moment, gap) * keep, N, DEPTH)
    return high, _tree(total * keep, N, DEPTH), joined


@triton.jit
def _read(x, first, last, ENTROPY: tl.constexpr, LANES: tl.constexpr, STAGES: tl.constexpr):
    """Maximum and sums of the columns from `first`, a multiple of 8 · LANES, to `last`.

    Whole tiles come through shared memory, STAGES - 1 ahead; the last one, if it is not whole, is filled up with -inf.
    """
    at = tl.arange(0, LANES)[:, None] * 8 + tl.arange(0, 8)[None, :]
    top = tl.full([LANES], float("-inf"), tl.float32)
    total = tl.zeros([LANES], tl.float32)
    moment = tl.zeros([LANES], tl.float32)
    whole = last - (last - first) % (LANES * 8)
    for start in tl.range(first, whole, LANES * 8, num_stages=STAGES):
        value = tl.load(x + start + at).to(tl.float32)
        top, total, moment = _take(value, top, total, moment, ENTROPY, LANES)
    if whole < last:
        value = tl.load(x + whole + at, mask=whole + at < last, other=float("-inf")).to(tl.float32)
        top, total, moment = _take(value, top, total, moment, ENTROPY, LANES)
    return _meet(top, total, moment, LANES, 8, ENTROPY)


@triton.jit
def _finish(x, target, row, found, tops, scales, spread, top, total, moment, width, ENTROPY: tl.constexpr):
    """(x[t] - top) - log(total) keeps more digits than x[t] - lse, for a large maximum above all."""
    known = (target >= 0) & (target < width)
    logit = tl.load(x + target, mask=known, other=float("nan")).to(tl.float32)
    scale = tl.log(total)
    tl.store(found + row, (logit - top) - scale)
    tl.store(tops + row, top)
    tl.store(scales + row, tl.where(known, scale, float("nan")))
    if ENTROPY:
        tl.store(spread + row, tl.where(known, scale - moment / total, float("nan")))


@triton.jit
def _ignore(row, found, spread, ENTROPY: tl.constexpr):
    tl.store(found + row, 0.0)
    if ENTROPY:
        tl.store(spread + row, 0.0)


@triton.jit(do_not_specialize=["ignored"])
def _stream(
    x, targets, found, tops, scales, spread, x_row, width, ignored,
    ENTROPY: tl.constexpr, LANES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    if target == ignored:
        _ignore(row, found, spread, ENTROPY)
    else:
        x += row * x_row
        high, whole, joined = _read(x, 0, width, ENTROPY, LANES, STAGES)
        _finish(x, target, row, found, tops, scales, spread, high, whole, joined, width, ENTROPY)


@triton.jit(do_not_specialize=["ignored"])
def _spans(
    x, targets, highs, totals, moments, x_row, width, spans, ignored,
    SPAN: tl.constexpr, ENTROPY: tl.constexpr, LANES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The maximum and sums of one span."""
    place = tl.program_id(0).to(tl.int64)
    row = place // spans
    if tl.load(targets + row) != ignored:
        first = (place % spans).to(tl.int32) * SPAN
        last = tl.where(first + SPAN < width, first + SPAN, width)
        high, whole, joined = _read(x + row * x_row, first, last, ENTROPY, LANES, STAGES)
        tl.store(highs + place, high)
        tl.store(totals + place, whole)
        if ENTROPY:
            tl.store(moments + place, joined)


@triton.jit(do_not_specialize=["ignored"])
def _join(
    x, targets, highs, totals, moments, found, tops, scales, spread, x_row, width, spans, ignored,
    SPANS: tl.constexpr, DEPTH: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    """The spans of one row; places past the last are empty: maximum -inf, sums 0."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    if target == ignored:
        _ignore(row, found, spread, ENTROPY)
    else:
        span = tl.arange(0, SPANS)
        place = row * spans + span
        top = tl.load(highs + place, mask=span < spans, other=float("-inf"))
        total = tl.load(totals + place, mask=span < spans, other=0.0)
        moment = tl.zeros([SPANS], tl.float32)
        if ENTROPY:
            moment = tl.load(moments + place, mask=span < spans, other=0.0)
        high, whole, joined = _meet(top, total, moment, SPANS, DEPTH, ENTROPY)
        _finish(x + row * x_row, target, row, found, tops, scales, spread, high, whole, joined, width, ENTROPY)


@triton.jit(do_not_specialize=["ignored"])
def _backward(
    x, targets, tops, scales, dy, spread, dspread, dx, x_row, width, blocks, ignored,
    ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    to = dx + row * width + column
    target = tl.load(targets + row)
    if target == ignored:
        tl.store(to, tl.zeros([BLOCK], dx.dtype.element_ty), mask=inside)
    else:
        value = tl.load(x + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
        below = (value - tl.load(tops + row)) - tl.load(scales + row)
        p = tl.exp2(below * LOG2E)
        hit = tl.where(column == target, 1.0, 0.0)
        d = tl.load(dy + row) * (hit - p)
        if ENTROPY:
            # p · log p is 0 at p = 0, where log p may be -inf.
            d -= tl.load(dspread + row) * tl.where(p == 0.0, 0.0, p * (below + tl.load(spread + row)))
        tl.store(to, d.to(dx.dtype.element_ty), mask=inside)


def _rows(x: Tensor) -> Tensor:
    """[..., V] -> [rows, V] with columns side by side: a view where there is one."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _device(x: Tensor) -> AbstractContextManager[object]:
    if x.is_cuda:
        return torch.cuda.device(x.device)
    if isinstance(_stream, triton.JITFunction):
        raise ValueError(f"logprob runs on a CUDA device, not on {x.device}")
    return nullcontext()
