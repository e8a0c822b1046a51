"""silu(x) = x / (1 + exp(-x)), and its gradient dy · s · (1 + x · (1 - s)) with s = 1 / (1 + exp(-x)).

Promise: an element's bits depend on that element alone. fp32 arithmetic whose contraction to fma is switched off, so
that all variants of the compiled code agree, and one rounding at the end; `exp` is the hardware's exp2 of x · log2(e).
Limits: bf16, fp16 and fp32; not twice differentiable. x is read in place if its rows can be, else from a copy.
Source: Elfwing et al. 2018, arXiv:1702.03118.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def silu(x: Tensor) -> Tensor:
    """x · sigmoid(x), elementwise: any shape, bf16, fp16 or fp32, result as x.

    Raises ValueError for another dtype, an empty tensor, and a device without Triton.
    """
    if x.dtype not in DTYPES:
        raise ValueError(f"silu takes bf16, fp16 or fp32, not {x.dtype}")
    if x.numel() == 0:
        raise ValueError(f"silu takes no empty tensor: {list(x.shape)}")
    return _Silu.apply(x)


class _Silu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        rows = _rows(x)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _launch(_forward, rows, rows, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        rows, dy = _rows(x), _rows(grad)
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _launch(_backward, rows, rows, dy, dx)
        return dx


@triton.jit
def _sigmoid(x):
    # exp(-x) overflows to inf for x < -88, and 1 / inf is the 0 that it should be.
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _forward(x, out, x_row, width, blocks, BLOCK: tl.constexpr):
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    v = tl.load(x + row * x_row + column, mask=inside).to(tl.float32)
    y = v / (1.0 + tl.exp(-v))
    tl.store(out + row * width + column, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(x, dy, dx, x_row, dy_row, width, blocks, BLOCK: tl.constexpr):
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    v = tl.load(x + row * x_row + column, mask=inside).to(tl.float32)
    g = tl.load(dy + row * dy_row + column, mask=inside).to(tl.float32)
    s = _sigmoid(v)
    d = g * (s * (1.0 + v * (1.0 - s)))
    tl.store(dx + row * width + column, d.to(dx.dtype.element_ty), mask=inside)


def _launch(kernel, like: Tensor, *tensors: Tensor) -> None:
    """One program a row and block of columns; the last tensor is the contiguous result.

    Only the width and strides that follow from it reach the compiler, and no row count.
    """
    rows, width = like.shape
    block = min(triton.next_power_of_2(width), 2048)
    blocks = triton.cdiv(width, block)
    strides = [one.stride(0) if rows > 1 else width for one in tensors[:-1]]
    with _device(like):
        kernel[(rows * blocks,)](*tensors, *strides, width, blocks, BLOCK=block, num_warps=4, enable_fp_fusion=False)


def _rows(x: Tensor) -> Tensor:
    """[..., W] -> [rows, W] with columns side by side: a view where there is one."""
    rows = x.reshape(-1, x.shape[-1] if x.dim() else 1)
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _device(x: Tensor) -> AbstractContextManager[object]:
    if x.is_cuda:
        return torch.cuda.device(x.device)
    if isinstance(_forward, triton.JITFunction):
        raise ValueError(f"silu runs on a CUDA device, not on {x.device}")
    return nullcontext()
