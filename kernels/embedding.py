"""embedding: y[r] = weight[tokens[r]]; in the backward, row v of the gradient is the sum of dy[r] over tokens[r] = v.

The sum of one id is a serial chain in fp32, one row after the other in the order given, rounded once at the end. No
atomics, and no scan over [V, R]: a stable sort brings the rows of an id side by side without changing their order, and
the program that stands on the first of them walks to the last.

`fold` resumes the chains from a stored fp32 accumulator, so the cut of the rows into calls does not reach the bits:
acc, then ((acc + dy[0]) + dy[1]) + ..., however many calls that took.

Promise: a row of y is a copy; a row of the gradient depends on the rows of that id and their order alone.
Limits: bf16, fp16 and fp32; not twice differentiable; the gradient of autograd is dense [V, H]. An id outside
[0, V) cannot be refused without waiting for the device: its row of y is NaN, its dy goes nowhere. A hot id costs one
chain of dependent additions, not a tree.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def embedding(tokens: Tensor, weight: Tensor, *, validate: bool = False) -> Tensor:
    """tokens [...] int64, weight [V, H] -> [..., H] in the dtype of the weight: bf16, fp16 or fp32.

    The row of an id outside [0, V) is NaN. With `validate` such an id raises ValueError, at the price of a device sync.
    Raises ValueError for other dtypes, shapes, devices that differ, empty tensors, and a device without Triton.
    """
    if tokens.dtype != torch.int64 or weight.dtype not in DTYPES:
        raise ValueError(f"embedding takes int64 tokens, bf16, fp16 or fp32 weight, not {tokens.dtype}, {weight.dtype}")
    if weight.dim() != 2 or weight.stride(1) != 1:
        raise ValueError(f"embedding takes a weight [V, H] whose columns lie side by side, not {list(weight.shape)}")
    if tokens.device != weight.device:
        raise ValueError(f"embedding: tokens are on {tokens.device}, weight on {weight.device}")
    if tokens.numel() == 0 or weight.numel() == 0:
        raise ValueError(f"embedding takes no empty tensors: {list(tokens.shape)}, {list(weight.shape)}")
    if validate:
        low, high = (int(bound) for bound in torch.aminmax(tokens))
        if low < 0 or high >= len(weight):
            raise ValueError(f"embedding: token ids from {low} to {high} for a weight of {len(weight)} rows")
    return _Embedding.apply(tokens, weight)


def fold(accumulator: Tensor, tokens: Tensor, dy: Tensor, blocks: Tensor) -> None:
    """Add the rows of dy to the rows of the accumulator that their tokens name, one by one in the order of `blocks`.

    accumulator [V, H] fp32 contiguous, changed in place; tokens [R] int64; dy [R, H] bf16, fp16 or fp32; blocks int32
    [B, 16]: the row for each place, -1 for none. A row whose id is outside [0, V) goes nowhere.
    Raises ValueError for other dtypes and shapes, devices that differ, empty tensors, and a device without Triton.
    """
    shapes = f"accumulator {list(accumulator.shape)}, tokens {list(tokens.shape)}, dy {list(dy.shape)}"
    if accumulator.dtype != torch.float32 or dy.dtype not in DTYPES:
        raise ValueError(f"fold takes an fp32 accumulator, bf16, fp16 or fp32 dy, not {accumulator.dtype}, {dy.dtype}")
    if tokens.dtype != torch.int64 or blocks.dtype != torch.int32:
        raise ValueError(f"fold takes int64 tokens and int32 blocks, not {tokens.dtype} and {blocks.dtype}")
    if accumulator.dim() != 2 or not accumulator.is_contiguous() or dy.shape != (*tokens.shape, accumulator.shape[1]):
        raise ValueError(f"fold takes a contiguous accumulator [V, H], tokens [R], dy [R, H], not {shapes}")
    if tokens.dim() != 1 or blocks.dim() != 2 or blocks.shape[1] != 16:
        raise ValueError(f"fold takes tokens [R] and blocks [B, 16], not {shapes}, blocks {list(blocks.shape)}")
    if len({one.device for one in (accumulator, tokens, dy, blocks)}) > 1:
        raise ValueError(f"fold: {shapes} and blocks are not on one device")
    if tokens.numel() == 0 or blocks.numel() == 0:
        raise ValueError(f"fold takes no empty tensors: {shapes}, blocks {list(blocks.shape)}")
    rows = blocks.flatten()
    none = len(accumulator)
    ids = torch.where(rows < 0, none, tokens.index_select(0, rows.clamp(min=0)))
    _add(accumulator, ids, rows, dy, resume=True)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.weight = weight.shape, weight.dtype
        ids = tokens.contiguous().flatten()
        vocabulary, width = weight.shape
        out = torch.empty(*tokens.shape, width, dtype=weight.dtype, device=weight.device)
        block = min(triton.next_power_of_2(width), 4096)
        blocks = triton.cdiv(width, block)
        with _device(weight):
            _forward[(len(ids) * blocks,)](
                ids, weight, out, weight.stride(0), vocabulary, width, blocks,
                BLOCK=block, num_warps=4, enable_fp_fusion=False,
            )  # fmt: skip
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[None, Tensor]:
        (tokens,) = ctx.saved_tensors
        shape, dtype = ctx.weight
        total = torch.zeros(shape, dtype=dtype, device=grad.device)
        rows = torch.arange(tokens.numel(), dtype=torch.int32, device=grad.device)
        _add(total, tokens.flatten(), rows, grad.reshape(-1, shape[1]), resume=False)
        return None, total


@triton.jit
def _forward(tokens, weight, out, weight_row, vocabulary, width, blocks, BLOCK: tl.constexpr):
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(tokens + row)
    reach = tl.where((token >= 0) & (token < vocabulary), width, 0)
    value = tl.load(weight + token * weight_row + column, mask=column < reach, other=float("nan"))
    tl.store(out + row * width + column, value, mask=column < width)


@triton.jit
def _rows8(dy, dy_row, rows, at, end, column, width):
    """The 8 rows of dy from place `at`, [8, BLOCK] fp32. A row past the end is -0, which leaves every sum as it is."""
    place = at + tl.arange(0, 8)
    row = tl.load(rows + place, mask=place < end, other=0).to(tl.int64)
    mask = (place < end)[:, None] & (column < width)[None, :]
    return tl.load(dy + row[:, None] * dy_row + column[None, :], mask=mask, other=-0.0).to(tl.float32)


@triton.jit
def _add8(acc, x, BLOCK: tl.constexpr):
    """acc + x[0] + x[1] + ... + x[7], from left to right. Each `split` parts rows by the last bit of their number."""
    x_0, x_1 = tl.split(tl.reshape(tl.trans(x), (BLOCK, 4, 2)))
    x_00, x_10 = tl.split(tl.reshape(x_0, (BLOCK, 2, 2)))
    x_01, x_11 = tl.split(tl.reshape(x_1, (BLOCK, 2, 2)))
    x0, x4 = tl.split(x_00)
    x1, x5 = tl.split(x_01)
    x2, x6 = tl.split(x_10)
    x3, x7 = tl.split(x_11)
    return acc + x0 + x1 + x2 + x3 + x4 + x5 + x6 + x7


@triton.jit
def _backward(total, ids, ends, rows, dy, dy_row, vocabulary, width, blocks, RESUME: tl.constexpr, BLOCK: tl.constexpr):
    """ids ascending, where the run of each ends, and the row of dy for each.

    Works where a run begins, in one block of columns: 16 loads at a time that wait for no sum, then 16 sums in order.
    """
    at = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(ids + at)
    before = tl.load(ids + at - 1, mask=at > 0, other=-1)
    if (token != before) & (token >= 0) & (token < vocabulary):
        end = tl.load(ends + at)
        to = total + token * width + column
        acc = tl.zeros([BLOCK], tl.float32)
        if RESUME:
            acc = tl.load(to, mask=column < width).to(tl.float32)
        while at < end:
            low = _rows8(dy, dy_row, rows, at, end, column, width)
            high = _rows8(dy, dy_row, rows, at + 8, end, column, width)
            acc = _add8(_add8(acc, low, BLOCK), high, BLOCK)
            at += 16
        tl.store(to, acc.to(total.dtype.element_ty), mask=column < width)


def _add(total: Tensor, ids: Tensor, rows: Tensor, dy: Tensor, *, resume: bool) -> None:
    """total[ids[k]] += dy[rows[k]] for k ascending; without `resume` from 0, for the ids that occur."""
    vocabulary, width = total.shape
    dy = dy if dy.stride(1) == 1 else dy.contiguous()
    # One warp a program: then ptxas keeps 8 rows in flight, and with four warps 2.
    block = min(triton.next_power_of_2(width), 256)
    blocks = triton.cdiv(width, block)
    with _device(total):
        ids, order = ids.sort(stable=True)
        rows = rows.index_select(0, order)
        ends = torch.searchsorted(ids, ids, right=True)
        stride = dy.stride(0) if len(dy) > 1 else width
        _backward[(len(ids) * blocks,)](
            total, ids, ends, rows, dy, stride, vocabulary, width, blocks,
            RESUME=resume, BLOCK=block, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip


def _device(x: Tensor) -> AbstractContextManager[object]:
    if x.is_cuda:
        return torch.cuda.device(x.device)
    if isinstance(_forward, triton.JITFunction):
        raise ValueError(f"embedding runs on a CUDA device, not on {x.device}")
    return nullcontext()
