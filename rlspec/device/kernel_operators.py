"""The operators of the catalogue that both families of kernels have, of one family: `triton` or `cuda`.

A family is its functions, by the names and with the signatures of `rlspec.kernels`. Each callable made here has
`backend`, and what else the catalogue says that an operator may promise. The kernels take bf16, fp16 and fp32, and are
documented in their files. They look at no value from the host: on CUDA an id or target outside gives NaN, as finding
it would take a host sync. On a CPU, where only Triton's interpreter runs them, it is a ValueError.
Signatures: `rlspec.device.operators`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from rlspec.device import checking
from rlspec.device.gradients import LogprobGradient, WeightGradient
from rlspec.device.operators import Segments

# The catalogue knows no ignored targets, so no target may look like one.
_NO_TARGET = torch.iinfo(torch.int64).min

Operator = TypeVar("Operator", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The functions of a family. Those with `fold` add blocks of rows to a weight's gradient, in order."""

    backend: str
    embedding: Callable[..., Tensor]
    embedding_fold: Callable[..., None]
    rms_norm: Callable[..., Tensor]
    norm_fold: Callable[..., None]
    rope: Callable[..., Tensor]
    attention: Callable[..., Tensor]
    attention_forward: Callable[..., tuple[Tensor, Tensor]]
    attention_backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    det_gemm: Callable[..., Tensor]
    lm_head: Callable[..., Tensor]
    matrix_fold: Callable[..., None]
    silu: Callable[..., Tensor]
    swiglu: Callable[..., Tensor]
    residual_add: Callable[..., Tensor]
    logprob: Callable[..., Tensor]
    batch_invariant_logprob: Callable[..., Tensor]
    linear_logprob: Callable[..., Tensor]
    head_fold: Callable[..., None]


def promising(backend: str, **promises: Callable[..., Any]) -> Callable[[Operator], Operator]:
    """Decorate an operator with its backend and with what else it promises."""

    def decorate(operator: Operator) -> Operator:
        for name, value in {"backend": backend, **promises}.items():
            setattr(operator, name, value)
        return operator

    return decorate


def table(kernels: Kernels) -> Mapping[str, Callable[..., Any]]:
    """Operator -> callable."""
    operator = partial(promising, kernels.backend)
    gradients, attend = _Gradients(kernels), _Attention(kernels)

    @operator(weight_gradient=gradients.embedding)
    def embedding(tokens: Tensor, weight: Tensor) -> Tensor:
        """[B, T] int64, [V, H] -> [B, T, H]. The row of an id outside is NaN on CUDA."""
        return kernels.embedding(tokens, weight, validate=not tokens.is_cuda)

    @operator(weight_gradient=gradients.norm)
    def rms_norm(x: Tensor, weight: Tensor, *, eps: float, round_before_weight: bool = False) -> Tensor:
        """[..., H], [H] -> [..., H]; also over heads."""
        return kernels.rms_norm(x, weight, eps=eps, round_before_weight=round_before_weight)

    @operator()
    def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, T, heads, D], [B, T, D/2] twice -> as x. The tables get no gradient."""
        return kernels.rope(x, cos, sin)

    @operator(forward=attend.forward, backward=attend.backward)
    def attention(query: Tensor, key: Tensor, value: Tensor, segments: Segments, *, scale: float) -> Tensor:
        """[B, T, Hq, D], [B, S, Hkv, D] twice -> [B, T, Hq, D]."""
        checking.attention(query, key, value, segments, scale)
        if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
            _own_keys(segments)
        return kernels.attention(query, key, value, segments.table, scale=scale, **_longest(segments))

    @operator(weight_gradient=gradients.matrix)
    def det_gemm(x: Tensor, weight: Tensor) -> Tensor:
        """[..., K], [N, K] -> [..., N]."""
        return kernels.det_gemm(x, weight)

    @operator()
    def silu(x: Tensor) -> Tensor:
        """x · sigmoid(x)."""
        return kernels.silu(x)

    @operator()
    def swiglu(gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) · up, rounded once."""
        return kernels.swiglu(gate, up)

    @operator()
    def residual_add(residual: Tensor, x: Tensor) -> Tensor:
        """residual + x, in the dtype of the residual."""
        return kernels.residual_add(residual, x)

    @operator(weight_gradient=gradients.matrix)
    def lm_head(x: Tensor, weight: Tensor, *, out_dtype: torch.dtype) -> Tensor:
        """[..., H], [V, H] -> [..., V] in `out_dtype`."""
        return kernels.lm_head(x, weight, out_dtype=out_dtype)

    @operator()
    def logprob(logits: Tensor, targets: Tensor) -> Tensor:
        """[..., V], [...] int64 -> [...] fp32. A target outside gives NaN on CUDA."""
        return kernels.logprob(logits, targets, ignore_index=_NO_TARGET, validate=not logits.is_cuda)

    @operator()
    def batch_invariant_logprob(logits: Tensor, targets: Tensor) -> Tensor:
        """As `logprob`, streaming each row from left to right."""
        return kernels.batch_invariant_logprob(
            logits, targets, ignore_index=_NO_TARGET, validate=not logits.is_cuda
        )  # fmt: skip

    @operator(weight_gradient=gradients.head)
    def linear_logprob(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """[..., H], [V, H], [...] int64 -> [...] fp32, without logits in memory. A target outside gives NaN on CUDA."""
        return kernels.linear_logprob(x, weight, targets, ignore_index=_NO_TARGET)

    made = (
        *(embedding, rms_norm, rope, attention, det_gemm, silu, swiglu, residual_add, lm_head),
        *(logprob, batch_invariant_logprob, linear_logprob),
    )
    return {one.__name__: one for one in made}


def _own_keys(segments: Segments) -> None:
    if segments.keys_are_shared:
        raise ValueError(
            "segments of a row share keys, whose gradients a kernel writes once a segment: give each a row of its own"
        )


@dataclass(frozen=True)
class _Gradients:
    """The sums of weights' gradients over calls, in canonical order."""

    kernels: Kernels

    def embedding(self, weight: Tensor, *, lengths: Sequence[int] | None = None) -> WeightGradient:
        """Of a table [V, H], from ids int64 [R] and dy [R, H]: each id's rows in order."""
        return WeightGradient(zeros(weight), self.kernels.embedding_fold, lengths)

    def matrix(self, weight: Tensor, *, lengths: Sequence[int] | None = None) -> WeightGradient:
        """Of a weight [N, K], from x [R, K] and dy [R, N], which is rounded to the dtype of x if that differs."""

        def fold(accumulator: Tensor, x: Tensor, dy: Tensor, blocks: Tensor | None = None) -> None:
            self.kernels.matrix_fold(accumulator, x, dy.to(x.dtype), blocks)

        return WeightGradient(zeros(weight), fold, lengths, straight=True)

    def norm(
        self, weight: Tensor, *, eps: float, round_before_weight: bool = False, lengths: Sequence[int] | None = None
    ) -> WeightGradient:
        """Of a norm's weight [H], from x and dy, [R, H] or [R, heads, H]. The inner rounding is passed over."""

        def fold(accumulator: Tensor, x: Tensor, dy: Tensor, blocks: Tensor) -> None:
            if x.dim() == 2:
                x, dy = x.unsqueeze(1), dy.unsqueeze(1)
            self.kernels.norm_fold(accumulator, x, dy, blocks, eps=eps)

        return WeightGradient(zeros(weight), fold, lengths)

    def head(self, weight: Tensor, *, lengths: Sequence[int] | None = None) -> WeightGradient:
        """Of the weight [V, H] of `linear_logprob`, from x [R, H], dy [R] and targets int64 [R]."""

        def fold(accumulator: Tensor, x: Tensor, pairs: Tensor, blocks: Tensor) -> None:
            self.kernels.head_fold(accumulator, x, weight, pairs[:, 1].long(), pairs[:, 0].float(), blocks)

        return LogprobGradient(zeros(weight), fold, lengths)


@dataclass(frozen=True)
class _Attention:
    """The two halves of attention, for what calls its backward once a sample."""

    kernels: Kernels

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, segments: Segments, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        """As `attention`, and the log-sum-exp fp32 [B, T, Hq], -inf on pads."""
        checking.attention(query, key, value, segments, scale)
        return self.kernels.attention_forward(query, key, value, segments.table, scale=scale, **_longest(segments))

    def backward(
        self,
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
        """Gradients of query, key and value of whole samples, on what `forward` gave, in whatever chunks."""
        checking.attention(query, key, value, segments, scale)
        _own_keys(segments)
        given = (query, key, value, out, lse, grad_out, segments.table)
        return self.kernels.attention_backward(*given, scale=scale, **_longest(segments))


def zeros(weight: Tensor) -> Tensor:
    """For the gradient of a weight, in fp32."""
    return torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)


def _longest(segments: Segments) -> dict[str, int]:
    """Bounds on the lengths, from the host's copy of the table: they size the grid of the attention kernels alone."""
    return {
        "max_query": max((segment.query_length for segment in segments.entries), default=1),
        "max_key": max((segment.key_length for segment in segments.entries), default=1),
    }
