"""The router of a mixture of experts: scores of E experts, the best k of them, their weights; load statistics.

    l = round( x · weightᵀ )                      fp32, or rounded to `logits_dtype`
    p = softmax(l), or sigmoid(l)                 fp32
    e_1 … e_k                                     the k highest l, the highest first; of equal l the lower expert
    w_j = p[e_j], or p[e_j] / (w_1 + … + w_k)     fp32, slots ascending
    dx = round( dl · weight )                     dweight = Σ_t dl[t]ᵀ · x[t], resumed from an fp32 accumulator

Promise. A token's bits depend on the token, the weight and constants of (E, K, dtype). Scores are as exact as fp32: the
matrix unit sums 64 products from zero, and these parts are added in fp32, ascending; in one chain through the matrix
unit, whose additions cut bits off, near ties would fall either way. Softmax keeps the order of l, so the best are
sought among l, where no exponential has made equals of them. One program a row, in one warp, does the rest: the tree of
its sums follows from E alone. dl is fp32; for the products of the backward it is split into two numbers of the dtype of
x, high and low, so that 16 bits of it count. dweight is one chain: blocks of 16 rows, of each the high and then the low
part. The sums of `load_balance` are chains over rows ascending, and counts are integers: no atomics.

Limits. bf16, fp16, fp32; E up to 1024; no bias, no groups of experts. NaN among the l of a token is taken for the
highest, so the experts of a pad of NaN exist. A gradient passes the rounding of l as if it were not there.

Sources. Shazeer et al. 2017, arXiv:1701.06538; sigmoid: DeepSeek-V3, arXiv:2412.19437; order and normalisation are
those of transformers' Qwen3MoE. Load balance: Qiu et al. 2025, arXiv:2501.11873.
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
SCORES = ("softmax", "sigmoid")
MOST_EXPERTS = 1024
GROUP = 16
PART = 64  # products that the matrix unit adds up from zero: fixed, as the bits follow from it


# ---- kernels ----


@triton.jit(do_not_specialize=["rows"])
def _logits(
    x, weight, logits, rows, experts, width, stride, one,
    ROWS: tl.constexpr, EXPERTS: tl.constexpr, PART: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    expert = tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS)[None, :]
    acc = tl.zeros((ROWS, EXPERTS), tl.float32)
    for first in range(0, width, PART):
        step = first + tl.arange(0, PART)
        left = (row < rows) & (step[None, :] < width)
        right = (expert < experts) & (step[:, None] < width)
        left = tl.load(x + row * stride + step[None, :], mask=left, other=0.0)
        right = tl.load(weight + expert * width + step[:, None], mask=right, other=0.0)
        # `one` is 1, which the compiler does not know: it would make the sum part of the matrix unit's chain.
        acc = tl.dot(left, right, input_precision="ieee") * one + acc
    value = acc.to(ROUND).to(tl.float32)
    tl.store(logits + row * experts + expert, value, mask=(row < rows) & (expert < experts))


@triton.jit
def _exp(x):
    # x · log2(e) = t + rest: the rest, lost in t, is worth |x| units in the last place of the result.
    t = x * 1.4426950408889634
    rest = tl.fma(x, 1.4426950408889634, -t) + x * 1.925963033500e-8
    return tl.where(x < -87.0, 0.0, tl.exp2(t) * tl.fma(rest, 0.6931471805599453, 1.0))


@triton.jit
def _scores(value, SOFTMAX: tl.constexpr):
    if SOFTMAX:
        share = _exp(value - tl.max(value, 0))
        return tl.div_rn(share, tl.sum(share, 0))
    # By the exponential of −|l|, which cannot overflow.
    small = _exp(-tl.abs(value))
    share = tl.div_rn(1.0, 1.0 + small)
    return tl.where(value < 0, small * share, share)


@triton.jit
def _keys(value, expert, inside, BLOCK: tl.constexpr):
    """int64 in the order of value and, where that is equal, the other way round in the order of experts."""
    value = tl.where(value == 0, 0.0, value)
    bits = tl.where(value != value, 0x7FC00000, value.to(tl.int32, bitcast=True))
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(inside, (bits.to(tl.int64) << 32) | (BLOCK - 1 - expert), -0x7FFFFFFFFFFFFFFF)


@triton.jit
def _route(
    logits, choice, probabilities, weights, chosen,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, TOP: tl.constexpr, SLOTS: tl.constexpr,
    SOFTMAX: tl.constexpr, NORMALISE: tl.constexpr, CHOICE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    expert, slot = tl.arange(0, BLOCK), tl.arange(0, SLOTS)
    inside = expert < EXPERTS
    value = tl.load(logits + row * EXPERTS + expert, mask=inside, other=-float("inf"))
    score = _scores(value, SOFTMAX)
    tl.store(probabilities + row * EXPERTS + expert, score, mask=inside)
    given = tl.load(choice + row * TOP + slot, mask=slot < TOP, other=0) if CHOICE else tl.zeros_like(slot).to(tl.int64)
    keys = _keys(value, expert, inside, BLOCK)
    picks = given
    mine = tl.zeros((SLOTS,), tl.float32)
    total = 0.0
    for j in tl.static_range(TOP):
        if CHOICE:
            best = tl.sum(tl.where(slot == j, given, 0), 0)
        else:
            best = BLOCK - 1 - (tl.max(keys, 0) & 0xFFFFFFFF)
            picks = tl.where(slot == j, best, picks)
            keys = tl.where(expert == best, -0x7FFFFFFFFFFFFFFF, keys)
        weight = tl.sum(tl.where(expert == best, score, 0.0), 0)
        total += weight
        mine = tl.where(slot == j, weight, mine)
    if NORMALISE:
        mine = tl.div_rn(mine, tl.zeros_like(mine) + total)
    tl.store(weights + row * TOP + slot, mine, mask=slot < TOP)
    tl.store(chosen + row * TOP + slot, picks, mask=slot < TOP)


@triton.jit
def _slopes(
    logits, chosen, upstream, upstream_weights, out,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, TOP: tl.constexpr, SLOTS: tl.constexpr,
    SOFTMAX: tl.constexpr, NORMALISE: tl.constexpr,
):  # fmt: skip
    """out = dl of one row, from dp and dw."""
    row = tl.program_id(0).to(tl.int64)
    expert, slot = tl.arange(0, BLOCK), tl.arange(0, SLOTS)
    inside, used = expert < EXPERTS, slot < TOP
    value = tl.load(logits + row * EXPERTS + expert, mask=inside, other=-float("inf"))
    score = _scores(value, SOFTMAX)
    picks = tl.load(chosen + row * TOP + slot, mask=used, other=0)
    dw = tl.load(upstream_weights + row * TOP + slot, mask=used, other=0.0)
    dp = tl.load(upstream + row * EXPERTS + expert, mask=inside, other=0.0)
    total, mean = 0.0, 0.0
    if NORMALISE:
        for j in tl.static_range(TOP):
            weight = tl.sum(tl.where(expert == tl.sum(tl.where(slot == j, picks, 0), 0), score, 0.0), 0)
            total += weight
            mean = tl.fma(weight, tl.sum(tl.where(slot == j, dw, 0.0), 0), mean)
        mean = tl.div_rn(mean, total)
    for j in tl.static_range(TOP):  # a choice that was handed in may name an expert twice
        part = tl.sum(tl.where(slot == j, dw, 0.0), 0)
        if NORMALISE:
            part = tl.div_rn(part - mean, total)
        dp = tl.where(expert == tl.sum(tl.where(slot == j, picks, 0), 0), dp + part, dp)
    slope = score * (dp - tl.sum(score * dp, 0)) if SOFTMAX else dp * (score * (1.0 - score))
    tl.store(out + row * EXPERTS + expert, slope, mask=inside)


@triton.jit
def _halves(value, KIND: tl.constexpr):
    high = value.to(KIND)
    return high, (value - high.to(tl.float32)).to(KIND)


@triton.jit(do_not_specialize=["rows"])
def _data_gradient(
    slopes, weight, dx, rows, experts, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PART: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, experts, PART):
        expert = first + tl.arange(0, PART)
        left = (row < rows) & (expert[None, :] < experts)
        right = (column < width) & (expert[:, None] < experts)
        left = tl.load(slopes + row * experts + expert[None, :], mask=left, other=0.0)
        right = tl.load(weight + expert[:, None].to(tl.int64) * width + column, mask=right, other=0.0)
        if SPLIT:
            high, low = _halves(left, weight.dtype.element_ty)
            acc = tl.dot(high, right, acc)
            acc = tl.dot(low, right, acc)
        else:
            acc = tl.dot(left, right, acc, input_precision="ieee")
    tl.store(dx + row * width + column, acc.to(dx.dtype.element_ty), mask=(row < rows) & (column < width))


@triton.jit(do_not_specialize=["rows", "blocks"], do_not_specialize_on_alignment=["table"])
def _fold(
    slopes, x, table, out, rows, blocks, experts, width, stride,
    EXPERTS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """out [E, K] += Σ dl[t]ᵀ · x[t] over the rows of the table, block after block; without one, over all in order."""
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    places = out + expert[:, None].to(tl.int64) * width + column
    inside = (expert[:, None] < experts) & (column < width)
    acc = tl.load(places, mask=inside, other=0.0)
    for block in range(blocks):
        of_block = block * GROUP + tl.arange(0, GROUP)
        row = (tl.load(table + of_block) if TABLE else tl.where(of_block < rows, of_block, -1)).to(tl.int64)
        live = ((row >= 0) & (row < rows))[:, None]
        # -1 is a zero row. A row that does not exist must show: the host cannot look at a table on the device.
        missing = tl.where((row < -1) | (row >= rows), float("nan"), 0.0)[:, None]
        known = live & (expert[None, :] < experts)
        slope = tl.load(slopes + row[:, None] * experts + expert[None, :], mask=known, other=0.0)
        right = tl.load(x + row[:, None] * stride + column, mask=live & (column < width), other=0.0)
        slope = tl.trans(slope + missing)
        if SPLIT:
            high, low = _halves(slope, x.dtype.element_ty)
            acc = tl.dot(high, right, acc)
            acc = tl.dot(low, right, acc)
        else:
            acc = tl.dot(slope, right, acc, input_precision="ieee")
    tl.store(places, acc, mask=inside)


@triton.jit
def _balance(
    probabilities, chosen, pieces, counts, sums, experts, count,
    TOP: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Of one group, one piece or all of them: choices and summed scores of BLOCK experts, rows ascending."""
    group = tl.program_id(0).to(tl.int64)
    expert = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.arange(0, SLOTS)[:, None]
    inside = expert < experts
    places = group * experts + expert
    number = tl.load(counts + places, mask=inside, other=0)
    total = tl.load(sums + places, mask=inside, other=0.0)
    begin = group
    if TOGETHER:
        begin = group * 0
    for piece in range(begin, begin + count):
        first = tl.load(pieces + piece * 2).to(tl.int64)
        length = tl.load(pieces + piece * 2 + 1)
        for step in range(length):
            row = first + step
            total += tl.load(probabilities + row * experts + expert, mask=inside, other=0.0)
            picks = tl.load(chosen + row * TOP + slot, mask=slot < TOP, other=-1)
            number += tl.sum((picks == expert[None, :]).to(tl.int64), 0)
    tl.store(counts + places, number, mask=inside)
    tl.store(sums + places, total, mask=inside)


@triton.jit
def _spread(upstream, pieces, out, experts, BLOCK: tl.constexpr, TOGETHER: tl.constexpr):
    """out[row] = the gradient of the group's sums, for every row of one piece."""
    piece = tl.program_id(0).to(tl.int64)
    expert = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first = tl.load(pieces + piece * 2).to(tl.int64)
    length = tl.load(pieces + piece * 2 + 1)
    group = piece
    if TOGETHER:
        group = piece * 0
    value = tl.load(upstream + group * experts + expert, mask=expert < experts, other=0.0)
    for step in range(length):
        tl.store(out + (first + step) * experts + expert, value, mask=expert < experts)


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


_TRITON = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def _logits_launch(x: Tensor, weight: Tensor, logits: Tensor, rounded: torch.dtype) -> Launch:
    (rows, width), experts = x.shape, weight.shape[0]
    # The number of rows may choose the tile of the matrix unit, whose bits are those of any other.
    few = 64 if rows > 1024 else 16
    tile, columns = (16, 16) if x.dtype == torch.float32 else (few, min(64, triton.next_power_of_2(max(experts, 16))))
    grid = (triton.cdiv(rows, tile), triton.cdiv(experts, columns))
    args = (x, weight, logits, rows, experts, width, x.stride(0), 1.0, tile, columns, PART, _TRITON[rounded])
    return Launch(_logits, grid, args, {"num_warps": 4, "num_stages": 4})


def _route_launch(logits: Tensor, choice: Tensor | None, made: tuple[Tensor, ...], how: tuple[Any, ...]) -> Launch:
    top_k, normalise, softmax = how
    sizes = (logits.shape[1], triton.next_power_of_2(logits.shape[1]), top_k, triton.next_power_of_2(top_k))
    args = (logits, made[2] if choice is None else choice, *made, *sizes, softmax, normalise, choice is not None)
    return Launch(_route, (logits.shape[0],), args, {"num_warps": 1})


def _slopes_launch(
    logits: Tensor, chosen: Tensor, upstream: Tensor, upstream_weights: Tensor, out: Tensor, how: tuple[Any, ...]
) -> Launch:
    top_k, normalise, softmax = how
    sizes = (logits.shape[1], triton.next_power_of_2(logits.shape[1]), top_k, triton.next_power_of_2(top_k))
    args = (logits, chosen, upstream, upstream_weights, out, *sizes, softmax, normalise)
    return Launch(_slopes, (logits.shape[0],), args, {"num_warps": 1})


def _data_launch(slopes: Tensor, weight: Tensor, dx: Tensor) -> Launch:
    (rows, experts), width = slopes.shape, weight.shape[1]
    split = weight.dtype != torch.float32
    tile, columns = (64, 128) if split else (16, 16)
    grid = (triton.cdiv(rows, tile), triton.cdiv(width, columns))
    args = (slopes, weight, dx, rows, experts, width, tile, columns, PART, split)
    return Launch(_data_gradient, grid, args, {"num_warps": 4, "num_stages": 2})


def _fold_launch(slopes: Tensor, x: Tensor, blocks: Tensor | None, out: Tensor) -> Launch:
    (rows, experts), width = slopes.shape, x.shape[1]
    split, table = x.dtype != torch.float32, blocks is not None
    tile, columns = (32, 64) if split else (16, 16)
    count = triton.cdiv(rows, GROUP) if blocks is None else blocks.shape[0]
    grid = (triton.cdiv(experts, tile), triton.cdiv(width, columns))
    sizes = (rows, count, experts, width, x.stride(0), tile, columns, GROUP, split, table)
    return Launch(_fold, grid, (slopes, x, blocks if table else slopes, out, *sizes), {"num_warps": 4, "num_stages": 6})


def _balance_launch(
    probabilities: Tensor, chosen: Tensor, pieces: Tensor, counts: Tensor, sums: Tensor, together: bool
) -> Launch:
    experts, top_k = probabilities.shape[1], chosen.shape[1]
    count = len(pieces) if together else 1
    args = (probabilities, chosen, pieces, counts, sums, experts, count, top_k, triton.next_power_of_2(top_k), 32)
    return Launch(_balance, (counts.shape[0], triton.cdiv(experts, 32)), (*args, together), {"num_warps": 1})


def _scored(x: Tensor, weight: Tensor, rounded: torch.dtype) -> Tensor:
    logits = torch.empty((x.shape[0], weight.shape[0]), dtype=torch.float32, device=x.device)
    _logits_launch(_rows(x), weight.contiguous(), logits, rounded)(x.device)
    return logits


def _slopes_of(
    logits: Tensor, chosen: Tensor, upstream: Tensor, upstream_weights: Tensor, how: tuple[Any, ...]
) -> Tensor:
    out = torch.empty_like(logits)
    _slopes_launch(logits, chosen, _aligned(upstream), _aligned(upstream_weights), out, how)(logits.device)
    return out


# ---- public ----


class _Router(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, how: tuple[Any, ...], rounded: torch.dtype, choice: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits = _scored(x, weight, rounded)
        weights = torch.empty((x.shape[0], how[0]), dtype=torch.float32, device=x.device)
        chosen = torch.empty(weights.shape, dtype=torch.int64, device=x.device)
        probabilities = torch.empty_like(logits)
        given = None if choice is None else choice.contiguous()
        _route_launch(logits, given, (probabilities, weights, chosen), how)(x.device)
        ctx.save_for_backward(x, weight, logits, chosen)
        ctx.how = how
        ctx.mark_non_differentiable(chosen)
        return probabilities, weights, chosen

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, upstream_weights: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        x, weight, logits, chosen = ctx.saved_tensors
        slopes = _slopes_of(logits, chosen, upstream, upstream_weights, ctx.how)
        dx = dweight = None
        if ctx.needs_input_grad[0]:
            dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
            _data_launch(slopes, weight.contiguous(), dx)(x.device)
        if ctx.needs_input_grad[1]:
            total = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
            _fold_launch(slopes, _rows(x), None, total)(x.device)
            dweight = total.to(weight.dtype)
        return dx, dweight, None, None, None


def router(
    x: Tensor,
    weight: Tensor,
    *,
    top_k: int,
    normalise: bool,
    logits_dtype: torch.dtype = torch.float32,
    scoring: str = "softmax",
    choice: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """x [N, H], weight [E, H] -> scores fp32 [N, E], weights fp32 [N, k], experts int64 [N, k].

    `choice` int64 [N, k] replaces the best k; on CUDA it is not looked at, and the weight of an expert outside is 0.
    Differentiable in x and weight. The gradient of the weight that autograd asks for is one `fold` over all rows in
    the order given, rounded once; across calls use `slopes` and `fold`.
    Raises ValueError for other shapes, empty tensors, dtypes that differ or are not bf16, fp16, fp32, more than 1024
    experts, top_k outside 1 … E, unknown scoring, and CPU tensors (fp32 is taken under the interpreter).
    """
    _check(x, weight, top_k, logits_dtype, scoring)
    if choice is not None:
        if choice.dtype != torch.int64 or choice.shape != (x.shape[0], top_k) or choice.device != x.device:
            raise ValueError(f"choice {choice.dtype} {list(choice.shape)}: int64 [{x.shape[0]}, {top_k}] is due")
        if not choice.is_cuda and not 0 <= int(choice.min()) <= int(choice.max()) < weight.shape[0]:
            raise ValueError(f"choice must be in 0 … {weight.shape[0] - 1}")
    return _Router.apply(x, weight, (top_k, normalise, scoring == "softmax"), logits_dtype, choice)


def slopes(
    x: Tensor,
    weight: Tensor,
    upstream: Tensor,
    upstream_weights: Tensor,
    *,
    top_k: int,
    normalise: bool,
    logits_dtype: torch.dtype = torch.float32,
    scoring: str = "softmax",
    choice: Tensor | None = None,
) -> Tensor:
    """dl fp32 [N, E] of a `router` called like that, from the gradients of its scores [N, E] and weights [N, k].

    The forward runs again, with the bits it had. Raises what `router` raises, and ValueError for other gradients.
    """
    _, _, chosen = router(
        x.detach(), weight.detach(), top_k=top_k, normalise=normalise, logits_dtype=logits_dtype, scoring=scoring,
        choice=choice,
    )  # fmt: skip
    due = (x.shape[0], weight.shape[0]), (x.shape[0], top_k)
    if (tuple(upstream.shape), tuple(upstream_weights.shape)) != due:
        raise ValueError(f"gradients {list(upstream.shape)}, {list(upstream_weights.shape)}: {list(due)} are due")
    how = (top_k, normalise, scoring == "softmax")
    return _slopes_of(_scored(x, weight, logits_dtype), chosen, upstream, upstream_weights, how)


def fold(accumulator: Tensor, x: Tensor, slopes: Tensor, blocks: Tensor) -> None:
    """accumulator += dlᵀ · x over the rows that `blocks` names, resumed in place: the gradient of the weight.

    accumulator fp32 [E, H] contiguous, x [R, H], slopes fp32 [R, E], blocks int32 [B, 16]: rows, block after block; -1
    is a zero row. Each element continues one fp32 chain, so any cut of the blocks over calls gives the same bits.
    A table on the CPU is checked and copied; on the device a row that does not exist makes the accumulator NaN.
    Raises ValueError for other shapes, dtypes, devices, an empty table, and rows out of range in a CPU table.
    """
    shapes = f"accumulator {list(accumulator.shape)}, x {list(x.shape)}, slopes {list(slopes.shape)}"
    if x.dim() != 2 or slopes.dim() != 2 or len(x) != len(slopes) or not x.numel() or not slopes.numel():
        raise ValueError(f"{shapes}: fold takes [E, H], [R, H], [R, E]")
    if tuple(accumulator.shape) != (slopes.shape[1], x.shape[1]):
        raise ValueError(f"{shapes}: fold takes [E, H], [R, H], [R, E]")
    if accumulator.dtype != torch.float32 or not accumulator.is_contiguous() or accumulator.device != x.device:
        raise ValueError("accumulator: fold adds into a contiguous fp32 tensor on the device of x")
    if slopes.dtype != torch.float32 or slopes.device != x.device:
        raise ValueError(f"slopes {slopes.dtype} on {slopes.device}: fp32 on the device of x is due")
    _check_device(x)
    _check_blocks(blocks, x)
    if blocks.device != x.device:
        blocks = blocks.pin_memory().to(x.device, non_blocking=True)
    _fold_launch(slopes.contiguous(), _rows(x), blocks.contiguous(), accumulator)(x.device)


class _LoadBalance(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, probabilities: Tensor, chosen: Tensor, pieces: Tensor, together: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(pieces)
        ctx.shape, ctx.together = probabilities.shape, together
        groups = 1 if together else len(pieces)
        counts = torch.zeros((groups, probabilities.shape[1]), dtype=torch.int64, device=probabilities.device)
        sums = torch.zeros(counts.shape, dtype=torch.float32, device=probabilities.device)
        args = (probabilities.contiguous(), chosen.contiguous(), pieces, counts, sums, together)
        _balance_launch(*args)(probabilities.device)
        ctx.mark_non_differentiable(counts)
        return counts, sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        (pieces,) = ctx.saved_tensors
        out = torch.zeros(ctx.shape, dtype=torch.float32, device=upstream.device)
        grid = (len(pieces), triton.cdiv(ctx.shape[1], 32))
        args = (upstream.contiguous(), pieces, out, ctx.shape[1], 32, ctx.together)
        Launch(_spread, grid, args, {"num_warps": 1})(upstream.device)
        return out, None, None, None


def load_balance(probabilities: Tensor, chosen: Tensor, pieces: Tensor, *, together: bool) -> tuple[Tensor, Tensor]:
    """What load-balance losses are made of: counts int64 [G, E] of choices, and summed scores fp32 [G, E].

    probabilities fp32 [N, E] and chosen int64 [N, k] as `router` gives them; pieces int32 [n, 2]: first row and length
    of each sequence, which do not overlap; other rows are pads. A loss by sequence takes G = n (`together` False), one
    by micro-batch G = 1: all pieces in their order. One by global batch takes the latter and adds up the counts of all
    micro-batches and ranks: integers, so in any order. Sums are chains over rows ascending, free of where rows lie.
    Differentiable in the scores. Raises ValueError for other shapes, dtypes and devices.
    """
    given = f"probabilities {list(probabilities.shape)}, chosen {list(chosen.shape)}, pieces {list(pieces.shape)}"
    if probabilities.dim() != 2 or chosen.dim() != 2 or len(chosen) != len(probabilities) or not chosen.numel():
        raise ValueError(f"{given}: load_balance takes [N, E], [N, k], [n, 2]")
    if pieces.dim() != 2 or pieces.shape[1] != 2 or not len(pieces):
        raise ValueError(f"{given}: load_balance takes [N, E], [N, k], [n, 2]")
    if (probabilities.dtype, chosen.dtype, pieces.dtype) != (torch.float32, torch.int64, torch.int32):
        raise ValueError(f"{probabilities.dtype}, {chosen.dtype}, {pieces.dtype}: fp32, int64 and int32 are due")
    if not probabilities.device == chosen.device == pieces.device:
        raise ValueError(f"on {probabilities.device}, {chosen.device} and {pieces.device}")
    _check_device(probabilities)
    return _LoadBalance.apply(probabilities, chosen, pieces.contiguous(), together)


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def _aligned(x: Tensor) -> Tensor:
    """fp32 with rows at one alignment, which the layout of threads follows from; else a copy."""
    fits = x.dtype == torch.float32 and x.is_contiguous() and x.data_ptr() % 16 == 0
    return x if fits else x.float().clone(memory_format=torch.contiguous_format)


def _check(x: Tensor, weight: Tensor, top_k: int, logits_dtype: torch.dtype, scoring: str) -> None:
    if x.dtype != weight.dtype or x.dtype not in DTYPES:
        raise ValueError(f"x and weight are {x.dtype} and {weight.dtype}: they must both be bf16, fp16 or fp32")
    if x.device != weight.device:
        raise ValueError(f"x and weight are on {x.device} and {weight.device}")
    shapes = f"x {list(x.shape)} and weight {list(weight.shape)}"
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"{shapes}: router takes [N, H] and [E, H]")
    if not x.numel() or not weight.numel():
        raise ValueError(f"{shapes}: an empty tensor")
    if weight.shape[0] > MOST_EXPERTS or not 1 <= top_k <= weight.shape[0]:
        raise ValueError(f"top_k {top_k} of {weight.shape[0]} experts: 1 … E, and at most {MOST_EXPERTS} experts")
    if logits_dtype not in DTYPES or scoring not in SCORES:
        raise ValueError(f"logits in {logits_dtype}, scoring {scoring}: bf16, fp16 or fp32, and {' or '.join(SCORES)}")
    _check_device(x)
    if not x.is_cuda and x.dtype != torch.float32:
        raise ValueError(f"x is {x.dtype}: the interpreter is right for fp32 only")


def _check_device(x: Tensor) -> None:
    if not x.is_cuda and (x.device.type != "cpu" or isinstance(_route, triton.JITFunction)):
        raise ValueError(f"x is on {x.device}: the kernels run on CUDA")


def _check_blocks(blocks: Tensor, x: Tensor) -> None:
    if blocks.dtype != torch.int32 or blocks.dim() != 2 or blocks.shape[1] != GROUP or not blocks.shape[0]:
        raise ValueError(f"blocks {blocks.dtype} {list(blocks.shape)}: rows come as int32 [B, {GROUP}]")
    if blocks.device.type == "cpu":
        low, high = int(blocks.min()), int(blocks.max())
        if low < -1 or high >= x.shape[0]:
            raise ValueError(f"blocks name rows {low} to {high} of {x.shape[0]}; -1 is a zero row")
    elif blocks.device != x.device:
        raise ValueError(f"blocks are on {blocks.device}, x on {x.device}")
