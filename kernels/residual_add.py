"""residual_add(residual, x) = residual + x in fp32, rounded once to the dtype of the residual.

The gradient of the residual is dy itself, that of x is dy in the dtype of x: one rounding if that is narrower.

Promise: an element's bits depend on the two elements that it is made of.
Limits: bf16, fp16 and fp32; x may be narrower than the residual, as bf16 contributions to a stream of fp32 are.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def residual_add(residual: Tensor, x: Tensor) -> Tensor:
    """residual + x, elementwise: one shape, bf16, fp16 or fp32, x as the residual or narrower; result as the residual.

    Raises ValueError for other dtypes, for shapes or devices that differ, for empty tensors, and for a device without
    Triton.
    """
    if residual.dtype not in DTYPES or x.dtype not in DTYPES:
        raise ValueError(f"residual_add takes bf16, fp16 or fp32, not {residual.dtype} and {x.dtype}")
    if residual.dtype not in (x.dtype, torch.float32):
        raise ValueError(f"residual_add: x of {x.dtype} does not fit into a residual of {residual.dtype}")
    if residual.shape != x.shape or residual.device != x.device:
        raise ValueError(
            f"residual_add: residual {list(residual.shape)} on {residual.device} does not match "
            f"x {list(x.shape)} on {x.device}"
        )
    if x.numel() == 0:
        raise ValueError(f"residual_add takes no empty tensors: {list(x.shape)}")
    return _ResidualAdd.apply(residual, x)


class _ResidualAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, residual: Tensor, x: Tensor) -> Tensor:
        ctx.dtype = x.dtype
        out = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)
        _launch(_rows(residual), _rows(x), out)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.to(ctx.dtype)


@triton.jit
def _in_turn(BEHIND: tl.constexpr):
    # Launched behind another kernel while that one is at work: wait for it, and let the next one come as near.
    if BEHIND:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def _forward(residual, x, out, residual_row, x_row, width, blocks, BLOCK: tl.constexpr, BEHIND: tl.constexpr = False):
    _in_turn(BEHIND)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    a = tl.load(residual + row * residual_row + column, mask=inside).to(tl.float32)
    b = tl.load(x + row * x_row + column, mask=inside).to(tl.float32)
    tl.store(out + row * width + column, (a + b).to(out.dtype.element_ty), mask=inside)


def _launch(residual: Tensor, x: Tensor, out: Tensor) -> None:
    """One program a row and block of columns.

    Only the width and strides that follow from it reach the compiler, and no row count.
    """
    rows, width = x.shape
    block = min(triton.next_power_of_2(width), 4096)
    blocks = triton.cdiv(width, block)
    strides = [one.stride(0) if rows > 1 else width for one in (residual, x)]
    with _device(x):
        _forward[(rows * blocks,)](
            residual, x, out, *strides, width, blocks, BLOCK=block, num_warps=4, enable_fp_fusion=False, **_behind(x)
        )


def _behind(x: Tensor) -> dict[str, bool]:
    """Options of a launch that may begin before the kernel in front of it has ended."""
    return {"BEHIND": True, "launch_pdl": True} if x.is_cuda else {}


def _rows(x: Tensor) -> Tensor:
    """[..., W] -> [rows, W] with columns side by side: a view where there is one."""
    rows = x.reshape(-1, x.shape[-1] if x.dim() else 1)
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _device(x: Tensor) -> AbstractContextManager[object]:
    if x.is_cuda:
        return torch.cuda.device(x.device)
    if isinstance(_forward, triton.JITFunction):
        raise ValueError(f"residual_add runs on a CUDA device, not on {x.device}")
    return nullcontext()
