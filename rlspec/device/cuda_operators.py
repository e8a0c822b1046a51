"""Implementation `cuda`: the kernels of `csrc/`, hand-written for Hopper, with the bits of `triton`.

What each promises is told in its source, in `cuda_rows`, `cuda_gemm` and `cuda_attention`, and by the file of the same
name in `rlspec.kernels`. Kernels are built with nvcc on first use (`rlspec.nvcc`) and launched through
`rlspec.device.native`. `torch.compile` and `torch.export` take each operator as one of `torch.ops.rlspec_cuda`, whose
stand-ins for graphs are here; they refuse the shapes and dtypes that the kernels refuse. Signatures:
`rlspec.device.operators`; what they have in common with `triton`: `rlspec.device.kernel_operators`. There are none for
the operators of experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlspec.device import checking, cuda_attention, cuda_gemm, cuda_rows
from rlspec.device.kernel_operators import Kernels, table
from rlspec.device.traced import like, traced

_ATTENTION = "float scale, SymInt? max_query=None, SymInt? max_key=None, Tensor? sinks=None, SymInt? window=None"
_LOGPROB = "(Tensor logits, Tensor targets, int ignore_index=-100, bool validate=False) -> Tensor"


# What a graph has in place of kernels


def _normed(x: Tensor, weight: Tensor, eps: float, round_before_weight: bool = False) -> Tensor:
    checking.rms_norm(x, weight, eps)
    cuda_rows.check_dtypes(x=x)
    return like(x)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    checking.rope(x, cos, sin)
    cuda_rows.check_dtypes(x=x, cos=cos)
    return like(x)


def _activated(x: Tensor) -> Tensor:
    checking.pointwise(x=x)
    cuda_rows.check_dtypes(x=x)
    return like(x)


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    checking.pointwise(gate=gate, up=up)
    cuda_rows.check_dtypes(gate=gate)
    return like(gate)


def _added(residual: Tensor, x: Tensor) -> Tensor:
    checking.residual_add(residual, x)
    cuda_rows.check_dtypes(residual=residual, x=x)
    return like(residual)


def _linear(x: Tensor, weight: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    cuda_gemm.check_linear(x, weight, out_dtype)
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=out_dtype or x.dtype)


def _looked_up(tokens: Tensor, weight: Tensor, validate: bool = False) -> Tensor:
    checking.embedding(tokens, weight, sync=None)
    cuda_rows.check_dtypes(weight=weight)
    return weight.new_empty((*tokens.shape, weight.shape[1]))


def _one_a_row(logits: Tensor, targets: Tensor, ignore_index: int = -100, validate: bool = False) -> Tensor:
    checking.logprob(logits, targets, sync=None)
    cuda_rows.check_dtypes(logits=logits)
    return logits.new_empty(targets.shape, dtype=torch.float32)


def _head(x: Tensor, weight: Tensor, targets: Tensor, ignore_index: int = -100) -> Tensor:
    cuda_gemm.check_head(x, weight, targets)
    return x.new_empty(targets.shape, dtype=torch.float32)


def _attended(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Tensor,
    scale: float,
    max_query: int | None = None,
    max_key: int | None = None,
    sinks: Tensor | None = None,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    cuda_attention.check_forward(query, key, value, segments, scale, window, sinks)
    return like(query), query.new_empty(query.shape[:3], dtype=torch.float32)


def _attended_alone(*arguments: Any, **options: Any) -> Tensor:
    return _attended(*arguments, **options)[0]


def _three(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    segments: Tensor,
    scale: float,
    max_query: int | None = None,
    max_key: int | None = None,
    window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    cuda_attention.check_forward(query, key, value, segments, scale, window)
    cuda_attention.check_saved(query, out, lse, grad_out)
    return like(query), like(key), like(value)


KERNELS = Kernels(
    backend="cuda",
    embedding=traced(
        "embedding", cuda_rows.embedding, "(Tensor tokens, Tensor weight, bool validate=False) -> Tensor",
        _looked_up, ("weight",),
    ),
    embedding_fold=cuda_rows.embedding_fold,
    rms_norm=traced(
        "rms_norm", cuda_rows.rms_norm,
        "(Tensor x, Tensor weight, float eps, bool round_before_weight=False) -> Tensor", _normed, ("x", "weight"),
    ),
    norm_fold=cuda_rows.norm_fold,
    rope=traced("rope", cuda_rows.rope, "(Tensor x, Tensor cos, Tensor sin) -> Tensor", _rotated, ("x",)),
    attention=traced(
        "attention", cuda_attention.attention,
        f"(Tensor query, Tensor key, Tensor value, Tensor segments, {_ATTENTION}) -> Tensor",
        _attended_alone, ("query", "key", "value"),
    ),
    attention_forward=traced(
        "attention_forward", cuda_attention.forward,
        f"(Tensor query, Tensor key, Tensor value, Tensor segments, {_ATTENTION}) -> (Tensor, Tensor)", _attended,
    ),
    attention_backward=traced(
        "attention_backward", cuda_attention.backward,
        "(Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, Tensor grad_out, Tensor segments, "
        "float scale, SymInt? max_query=None, SymInt? max_key=None, SymInt? window=None) -> (Tensor, Tensor, Tensor)",
        _three,
    ),
    det_gemm=traced(
        "det_gemm", cuda_gemm.det_gemm, "(Tensor x, Tensor weight, ScalarType? out_dtype=None) -> Tensor",
        _linear, ("x", "weight"),
    ),
    lm_head=traced(
        "lm_head", cuda_gemm.lm_head, "(Tensor x, Tensor weight, ScalarType out_dtype) -> Tensor",
        _linear, ("x", "weight"),
    ),
    matrix_fold=cuda_gemm.fold,
    silu=traced("silu", cuda_rows.silu, "(Tensor x) -> Tensor", _activated, ("x",)),
    swiglu=traced("swiglu", cuda_rows.swiglu, "(Tensor gate, Tensor up) -> Tensor", _gated, ("gate", "up")),
    residual_add=traced(
        "residual_add", cuda_rows.residual_add, "(Tensor residual, Tensor x) -> Tensor", _added, ("residual", "x")
    ),
    logprob=traced("logprob", cuda_rows.logprob, _LOGPROB, _one_a_row, ("logits",)),
    batch_invariant_logprob=traced(
        "batch_invariant_logprob", cuda_rows.batch_invariant_logprob, _LOGPROB, _one_a_row, ("logits",)
    ),
    linear_logprob=traced(
        "linear_logprob", cuda_gemm.linear_logprob,
        "(Tensor x, Tensor weight, Tensor targets, int ignore_index=-100) -> Tensor", _head, ("x", "weight"),
    ),
    head_fold=cuda_gemm.fold_logprob,
)  # fmt: skip
OPERATORS = table(KERNELS)

embedding = OPERATORS["embedding"]
rms_norm = OPERATORS["rms_norm"]
rope = OPERATORS["rope"]
attention = OPERATORS["attention"]
det_gemm = OPERATORS["det_gemm"]
silu = OPERATORS["silu"]
swiglu = OPERATORS["swiglu"]
residual_add = OPERATORS["residual_add"]
lm_head = OPERATORS["lm_head"]
logprob = OPERATORS["logprob"]
batch_invariant_logprob = OPERATORS["batch_invariant_logprob"]
linear_logprob = OPERATORS["linear_logprob"]
