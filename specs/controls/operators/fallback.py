"""Operators that declare Triton and do not always keep to it. The values are right; what ran is not what was said."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function

BLOCK = 1024
FEW = 8


@triton.jit
def _sum(left, right, out, count, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(left + place, mask=place < count).to(tl.float32)
    b = tl.load(right + place, mask=place < count).to(tl.float32)
    tl.store(out + place, a + b, mask=place < count)


@triton.jit
def _silu(source, out, count, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(source + place, mask=place < count).to(tl.float32)
    tl.store(out + place, x / (1 + tl.exp(-x)), mask=place < count)


class _ResidualAdd(Function):
    @staticmethod
    def forward(ctx: Any, residual: Tensor, x: Tensor) -> Tensor:
        ctx.dtype = x.dtype
        out = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)
        grid = (triton.cdiv(out.numel(), BLOCK),)
        _sum[grid](residual.contiguous(), x.contiguous(), out, out.numel(), BLOCK=BLOCK)
        return out

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor]:
        return upstream, upstream.to(ctx.dtype)


def _launched(residual: Tensor, x: Tensor) -> Tensor:
    return _ResidualAdd.apply(residual, x)


def _never_launched(residual: Tensor, x: Tensor) -> Tensor:
    return residual + x


def _launched_for_many_rows(residual: Tensor, x: Tensor) -> Tensor:
    few = x.numel() // x.shape[-1] < FEW
    return residual + x if few else _launched(residual, x)


def _launched_beside_torch(x: Tensor) -> Tensor:
    zeros = torch.zeros(x.shape, device=x.device)
    _launched(zeros, x.detach())
    return F.silu(x)


class _Silu(Function):
    """Forward by a kernel, backward by torch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _silu[(triton.cdiv(x.numel(), BLOCK),)](x.contiguous(), out, x.numel(), BLOCK=BLOCK)
        return out

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        share = torch.sigmoid(x)
        return upstream * share * (1 + x * (1 - share))


def _launched_forward_alone(x: Tensor) -> Tensor:
    return _Silu.apply(x)


for _one in (_launched_forward_alone, _launched, _never_launched, _launched_for_many_rows, _launched_beside_torch):
    _one.backend = "triton"  # type: ignore[attr-defined]

in_all_calls = {"residual_add": _never_launched}
in_some_calls = {"residual_add": _launched_for_many_rows}
in_the_backward = {"silu": _launched_forward_alone}
behind_a_decoy = {"silu": _launched_beside_torch}
