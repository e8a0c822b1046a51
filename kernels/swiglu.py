"""swiglu(gate, up) = silu(gate) · up, and its gradients. With s = sigmoid(gate):

    d gate = dy · up · s · (1 + gate · (1 - s))        d up = dy · gate · s

Promise: an element's bits depend on the two elements that it is made of. fp32 arithmetic whose contraction to fma is
switched off, and one rounding at the end: silu(gate) is not rounded on the way, unlike in two separate operators.
Limits: bf16, fp16 and fp32, both inputs alike; not twice differentiable. The halves of a fused [..., 2·W] projection
are read in place. Source: Shazeer 2020, arXiv:2002.05202.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up, elementwise: gate and up of one shape and dtype (bf16, fp16 or fp32), result as gate.

    Raises ValueError for other dtypes, for shapes, dtypes or devices that differ, for empty tensors, and for a device
    without Triton.
    """
    if gate.dtype not in DTYPES or up.dtype != gate.dtype:
        raise ValueError(f"swiglu takes gate and up both in bf16, fp16 or fp32, not {gate.dtype} and {up.dtype}")
    if gate.shape != up.shape or gate.device != up.device:
        raise ValueError(
            f"swiglu: gate {list(gate.shape)} on {gate.device} does not match up {list(up.shape)} on {up.device}"
        )
    if gate.numel() == 0:
        raise ValueError(f"swiglu takes no empty tensors: {list(gate.shape)}")
    return _Swiglu.apply(gate, up)


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        out = _empty(gate)
        _launch(_forward, (_rows(gate), _rows(up)), (out,))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        results = _empty(gate), _empty(up)
        _launch(_backward, (_rows(gate), _rows(up), _rows(grad)), results)
        return results


@triton.jit
def _in_turn(BEHIND: tl.constexpr):
    # Launched behind another kernel while that one is at work: wait for it, and let the next one come as near.
    if BEHIND:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def _forward(gate, up, out, gate_row, up_row, width, blocks, BLOCK: tl.constexpr, BEHIND: tl.constexpr = False):
    _in_turn(BEHIND)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    g = tl.load(gate + row * gate_row + column, mask=inside).to(tl.float32)
    u = tl.load(up + row * up_row + column, mask=inside).to(tl.float32)
    y = g / (1.0 + tl.exp(-g)) * u
    tl.store(out + row * width + column, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    gate, up, dy, dgate, dup, gate_row, up_row, dy_row, width, blocks, BLOCK: tl.constexpr, BEHIND: tl.constexpr = False
):  # fmt: skip
    _in_turn(BEHIND)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    g = tl.load(gate + row * gate_row + column, mask=inside).to(tl.float32)
    u = tl.load(up + row * up_row + column, mask=inside).to(tl.float32)
    d = tl.load(dy + row * dy_row + column, mask=inside).to(tl.float32)
    # exp(-g) overflows to inf for g < -88, and 1 / inf is the 0 that it should be.
    s = 1.0 / (1.0 + tl.exp(-g))
    to = row * width + column
    tl.store(dgate + to, (d * u * (s * (1.0 + g * (1.0 - s)))).to(dgate.dtype.element_ty), mask=inside)
    tl.store(dup + to, (d * (g * s)).to(dup.dtype.element_ty), mask=inside)


def _launch(kernel, sources: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> None:
    """One program a row and block of columns of [rows, width] sources; the results are contiguous.

    Only the width and strides that follow from it reach the compiler, and no row count.
    """
    rows, width = sources[0].shape
    block = min(triton.next_power_of_2(width), 2048)
    blocks = triton.cdiv(width, block)
    strides = [one.stride(0) if rows > 1 else width for one in sources]
    with _device(sources[0]):
        kernel[(rows * blocks,)](
            *sources, *results, *strides, width, blocks,
            BLOCK=block, num_warps=4, enable_fp_fusion=False, **_behind(sources[0]),
        )  # fmt: skip


def _behind(x: Tensor) -> dict[str, bool]:
    """Options of a launch that may begin before the kernel in front of it has ended."""
    return {"BEHIND": True, "launch_pdl": True} if x.is_cuda else {}


def _rows(x: Tensor) -> Tensor:
    """[..., W] -> [rows, W] with columns side by side: a view where there is one."""
    rows = x.reshape(-1, x.shape[-1] if x.dim() else 1)
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _empty(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


def _device(x: Tensor) -> AbstractContextManager[object]:
    if x.is_cuda:
        return torch.cuda.device(x.device)
    if isinstance(_forward, triton.JITFunction):
        raise ValueError(f"swiglu runs on a CUDA device, not on {x.device}")
    return nullcontext()
