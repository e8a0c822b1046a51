"""Implementation `triton`: the kernels of `rlspec.kernels`, invariant to the bit in every layout, for CUDA devices.

Each callable has `backend`, and what else the catalogue says that an operator may promise. The kernels take bf16, fp16
and fp32, and are documented in their files. They look at no value from the host: on CUDA an id or target outside gives
NaN, as finding it would take a host sync. On a CPU, where only Triton's interpreter runs them, it is a ValueError.
Signatures: `rlspec.device.operators`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from rlspec.device import checking
from rlspec.device.gradients import LogprobGradient, WeightGradient
from rlspec.device.operators import Segments
from rlspec.kernels import attention as _attention
from rlspec.kernels import det_gemm as _det_gemm
from rlspec.kernels import embedding as _embedding
from rlspec.kernels import linear_logprob as _linear_logprob
from rlspec.kernels import logprob as _logprob
from rlspec.kernels import residual_add as _residual_add
from rlspec.kernels import rms_norm as _rms_norm
from rlspec.kernels import rope as _rope
from rlspec.kernels import silu as _silu
from rlspec.kernels import swiglu as _swiglu

# The catalogue knows no ignored targets, so no target may look like one.
_NO_TARGET = torch.iinfo(torch.int64).min

Operator = TypeVar("Operator", bound=Callable[..., Any])


def embedding_gradient(weight: Tensor, *, lengths: Sequence[int] | None = None) -> WeightGradient:
    """Of a table [V, H], from ids int64 [R] and dy [R, H]: each id's rows in order."""
    return WeightGradient(_zeros(weight), _embedding.fold, lengths)


def matrix_gradient(weight: Tensor, *, lengths: Sequence[int] | None = None) -> WeightGradient:
    """Of a weight [N, K], from x [R, K] and dy [R, N], which is rounded to the dtype of x if that differs."""
    return WeightGradient(_zeros(weight), _fold_matrix, lengths, on_host=True)


def norm_gradient(
    weight: Tensor, *, eps: float, round_before_weight: bool = False, lengths: Sequence[int] | None = None
) -> WeightGradient:
    """Of a norm's weight [H], from x and dy, [R, H] or [R, heads, H]. The inner rounding is passed as if not there."""
    return WeightGradient(_zeros(weight), partial(_fold_norm, eps=eps), lengths)


def fused_head_gradient(weight: Tensor, *, lengths: Sequence[int] | None = None) -> WeightGradient:
    """Of the weight [V, H] of `linear_logprob`, from x [R, H], dy [R] and targets int64 [R]."""

    def fold(accumulator: Tensor, x: Tensor, pairs: Tensor, blocks: Tensor) -> None:
        _linear_logprob.fold(accumulator, x, weight, pairs[:, 1].long(), pairs[:, 0].float(), blocks)

    return LogprobGradient(_zeros(weight), fold, lengths)


def attention_forward(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, *, scale: float
) -> tuple[Tensor, Tensor]:
    """As `attention`, and the log-sum-exp fp32 [B, T, Hq], -inf on pads."""
    checking.attention(query, key, value, segments, scale)
    return _attention.forward(query, key, value, segments.table, scale=scale, **_longest(segments))


def attention_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    segments: Segments,
    *,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value of whole samples, on what `attention_forward` gave, in whatever chunks."""
    checking.attention(query, key, value, segments, scale)
    return _attention.backward(query, key, value, out, lse, grad_out, segments.table, scale=scale, **_longest(segments))


def _operator(**promises: Callable[..., Any]) -> Callable[[Operator], Operator]:
    """Decorate an operator with its backend and with what else it promises."""

    def decorate(operator: Operator) -> Operator:
        for name, value in {"backend": "triton", **promises}.items():
            setattr(operator, name, value)
        return operator

    return decorate


@_operator(weight_gradient=embedding_gradient)
def embedding(tokens: Tensor, weight: Tensor) -> Tensor:
    """[B, T] int64, [V, H] -> [B, T, H]. The row of an id outside is NaN on CUDA."""
    return _embedding.embedding(tokens, weight, validate=not tokens.is_cuda)


@_operator(weight_gradient=norm_gradient)
def rms_norm(x: Tensor, weight: Tensor, *, eps: float, round_before_weight: bool = False) -> Tensor:
    """[..., H], [H] -> [..., H]; also over heads."""
    return _rms_norm.rms_norm(x, weight, eps=eps, round_before_weight=round_before_weight)


@_operator()
def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[B, T, heads, D], [B, T, D/2] twice -> as x. The tables get no gradient."""
    return _rope.rope(x, cos, sin)


@_operator(forward=attention_forward, backward=attention_backward)
def attention(query: Tensor, key: Tensor, value: Tensor, segments: Segments, *, scale: float) -> Tensor:
    """[B, T, Hq, D], [B, S, Hkv, D] twice -> [B, T, Hq, D]."""
    checking.attention(query, key, value, segments, scale)
    return _attention.attention(query, key, value, segments.table, scale=scale, **_longest(segments))


@_operator(weight_gradient=matrix_gradient)
def det_gemm(x: Tensor, weight: Tensor) -> Tensor:
    """[..., K], [N, K] -> [..., N]."""
    return _det_gemm.det_gemm(x, weight)


@_operator()
def silu(x: Tensor) -> Tensor:
    """x · sigmoid(x)."""
    return _silu.silu(x)


@_operator()
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up, rounded once."""
    return _swiglu.swiglu(gate, up)


@_operator()
def residual_add(residual: Tensor, x: Tensor) -> Tensor:
    """residual + x, in the dtype of the residual."""
    return _residual_add.residual_add(residual, x)


@_operator(weight_gradient=matrix_gradient)
def lm_head(x: Tensor, weight: Tensor, *, out_dtype: torch.dtype) -> Tensor:
    """[..., H], [V, H] -> [..., V] in `out_dtype`."""
    return _det_gemm.lm_head(x, weight, out_dtype=out_dtype)


@_operator()
def logprob(logits: Tensor, targets: Tensor) -> Tensor:
    """[..., V], [...] int64 -> [...] fp32. A target outside gives NaN on CUDA."""
    return _logprob.logprob(logits, targets, ignore_index=_NO_TARGET, validate=not logits.is_cuda)


@_operator()
def batch_invariant_logprob(logits: Tensor, targets: Tensor) -> Tensor:
    """As `logprob`, streaming each row from left to right."""
    return _logprob.batch_invariant_logprob(logits, targets, ignore_index=_NO_TARGET, validate=not logits.is_cuda)


@_operator(weight_gradient=fused_head_gradient)
def linear_logprob(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """[..., H], [V, H], [...] int64 -> [...] fp32, without logits in memory. A target outside gives NaN on CUDA."""
    return _linear_logprob.linear_logprob(x, weight, targets, ignore_index=_NO_TARGET)


def _fold_matrix(accumulator: Tensor, x: Tensor, dy: Tensor, blocks: Tensor) -> None:
    _det_gemm.fold(accumulator, x, dy.to(x.dtype), blocks)


def _fold_norm(accumulator: Tensor, x: Tensor, dy: Tensor, blocks: Tensor, *, eps: float) -> None:
    if x.dim() == 2:
        x, dy = x.unsqueeze(1), dy.unsqueeze(1)
    _rms_norm.fold(accumulator, x, dy, blocks, eps=eps)


def _zeros(weight: Tensor) -> Tensor:
    return torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)


def _longest(segments: Segments) -> dict[str, int]:
    """Bounds on the lengths, from the host's copy of the table: they size the grid of the attention kernels alone."""
    return {
        "max_query": max((segment.query_length for segment in segments.entries), default=1),
        "max_key": max((segment.key_length for segment in segments.entries), default=1),
    }
