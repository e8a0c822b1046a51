"""What an operator refuses, one function for each operator of the catalogue, shared by implementations in torch.

All raise ValueError with the shapes, dtypes or devices at fault. Nothing here computes, and only `in_range` reads
values: token ids, targets and chosen experts. On a CPU that costs nothing. On a CUDA device it is a host sync, which
`sync=False` leaves out: then the gather that follows must refuse the index by itself, as torch's do (a device assert).
`sync=None` looks nowhere, as in a graph, whose tensors hold no values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from rlspec.device.operators import Dispatch, Segments

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def embedding(tokens: Tensor, weight: Tensor, *, sync: bool | None = True) -> None:
    """int64 ids of any shape, weight [V, H]."""
    _floats(weight=weight)
    _one_device(tokens=tokens, weight=weight)
    _dims("weight", weight, 2, "[vocabulary, width]")
    in_range("tokens", tokens, weight.shape[0], sync=sync)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> None:
    """x [..., H] and weight [H] of one dtype; eps at least 0."""
    _floats(x=x, weight=weight)
    _one_device(x=x, weight=weight)
    _one_dtype(x=x, weight=weight)
    if x.dim() < 1 or weight.shape != x.shape[-1:]:
        raise ValueError(f"weight {list(weight.shape)} does not fit x {list(x.shape)}: it must be [width of x]")
    if not 0 <= eps < float("inf"):
        raise ValueError(f"eps must be a finite number of at least 0, not {eps}")


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """x [B, T, heads, D] with D even, both tables [B, T, D/2] of one dtype."""
    _floats(x=x, cos=cos, sin=sin)
    _one_device(x=x, cos=cos, sin=sin)
    _one_dtype(cos=cos, sin=sin)
    _dims("x", x, 4, "[rows, tokens, heads, width]")
    half = (*x.shape[:2], x.shape[3] // 2)
    if x.shape[3] % 2 or cos.shape != half or sin.shape != half:
        shapes = f"x {list(x.shape)}, cos {list(cos.shape)}, sin {list(sin.shape)}"
        raise ValueError(f"{shapes}: the tables must be [rows, tokens, width / 2] and the width even")


def attention(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float) -> None:
    """The grid and the heads: `Segments.check`."""
    segments.check(query, key, value)
    _floats(query=query, key=key, value=value)
    _one_device(query=query, key=key, value=value)
    if segments.device.type != query.device.type:
        raise ValueError(f"the segments are on {segments.device}, the query on {query.device}")
    if not abs(scale) < float("inf"):
        raise ValueError(f"scale must be finite, not {scale}")


def linear(x: Tensor, weight: Tensor, out_dtype: torch.dtype | None = None) -> None:
    """x [..., K] and weight [N, K] of one dtype: det_gemm, lm_head."""
    _floats(x=x, weight=weight)
    _one_device(x=x, weight=weight)
    _one_dtype(x=x, weight=weight)
    _dims("weight", weight, 2, "[columns out, columns in]")
    if x.dim() < 1 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x {list(x.shape)} and weight {list(weight.shape)} must share their last dimension")
    if out_dtype is not None and out_dtype not in FLOATS:
        raise ValueError(f"the results must be floating point, not {out_dtype}")


def pointwise(**tensors: Tensor) -> None:
    """Tensors of one shape, dtype and device: silu, swiglu."""
    _floats(**tensors)
    _one_device(**tensors)
    _one_dtype(**tensors)
    _one_shape(**tensors)


def residual_add(residual: Tensor, x: Tensor) -> None:
    """One shape; x no wider than the residual, whose dtype the sum has."""
    _floats(residual=residual, x=x)
    _one_device(residual=residual, x=x)
    _one_shape(residual=residual, x=x)
    if torch.promote_types(residual.dtype, x.dtype) != residual.dtype:
        raise ValueError(f"x of {x.dtype} does not fit into a residual of {residual.dtype}")


def logprob(logits: Tensor, targets: Tensor, *, sync: bool | None = True) -> None:
    """logits [..., V], int64 targets [...] below V."""
    _floats(logits=logits)
    _one_device(logits=logits, targets=targets)
    _targets(logits, targets, "logits")
    in_range("targets", targets, logits.shape[-1], sync=sync)


def linear_logprob(x: Tensor, weight: Tensor, targets: Tensor, *, sync: bool = True) -> None:
    """x [..., H] and weight [V, H] of one dtype, int64 targets [...] below V."""
    linear(x, weight)
    _one_device(x=x, targets=targets)
    _targets(x, targets, "x")
    in_range("targets", targets, weight.shape[0], sync=sync)


def router(
    x: Tensor,
    weight: Tensor,
    top_k: int,
    logits_dtype: torch.dtype,
    choice: Tensor | None,
    scoring: str = "softmax",
    *,
    sync: bool = True,
) -> None:
    """x [N, H] and weight [E, H] of one dtype, 1 ≤ top_k ≤ E, choice int64 [N, top_k] below E."""
    linear(x, weight, logits_dtype)
    if scoring not in ("softmax", "sigmoid"):
        raise ValueError(f"unknown scoring {scoring!r}; known: softmax, sigmoid")
    _dims("x", x, 2, "[tokens, width]")
    experts = weight.shape[0]
    if not 1 <= top_k <= experts:
        raise ValueError(f"top_k {top_k} is not in 1 … {experts}, the number of experts")
    if choice is None:
        return
    _one_device(x=x, choice=choice)
    if choice.shape != (len(x), top_k):
        raise ValueError(f"choice must be [{len(x)}, {top_k}], not {list(choice.shape)}")
    in_range("choice", choice, experts, sync=sync)


def grouped_gemm(rows: Tensor, weight: Tensor, dispatch: Dispatch) -> None:
    """rows [M, K] and weight [E, N, K] of one dtype, with M rows and E experts in the dispatch."""
    _floats(rows=rows, weight=weight)
    _one_device(rows=rows, weight=weight, order=dispatch.order)
    _one_dtype(rows=rows, weight=weight)
    _dims("rows", rows, 2, "[rows, columns in]")
    _dims("weight", weight, 3, "[experts, columns out, columns in]")
    if rows.shape[1] != weight.shape[2]:
        raise ValueError(f"rows {list(rows.shape)} and weight {list(weight.shape)} must share their last dimension")
    if (len(rows), len(weight)) != (len(dispatch.order), dispatch.count):
        given = f"{len(rows)} rows and {len(weight)} experts"
        wanted = f"{len(dispatch.order)} rows to {dispatch.count} experts"
        raise ValueError(f"{given}, but the dispatch is of {wanted}")


def combine(rows: Tensor, weights: Tensor, dispatch: Dispatch) -> None:
    """rows [N·k, H], weights [N, k], with N·k rows and k slots a token in the dispatch."""
    _floats(rows=rows, weights=weights)
    _one_device(rows=rows, weights=weights, order=dispatch.order)
    _dims("rows", rows, 2, "[rows, width]")
    _dims("weights", weights, 2, "[tokens, slots]")
    if (len(rows), weights.numel(), weights.shape[1]) != (weights.numel(), len(dispatch.order), dispatch.top_k):
        shapes = f"rows {list(rows.shape)}, weights {list(weights.shape)}"
        raise ValueError(f"{shapes}: the dispatch is of {len(dispatch.order)} rows, {dispatch.top_k} a token")


def in_range(name: str, ids: Tensor, limit: int, *, sync: bool | None = True) -> None:
    """int64 `ids`, at least one, all in 0 … limit − 1. A host sync on CUDA, unless `sync` is False: not looked at.

    With None nothing is looked at but dtype and shape.
    """
    if ids.dtype != torch.int64:
        raise ValueError(f"{name} must be int64, not {ids.dtype}")
    if not ids.numel():
        raise ValueError(f"{name} {list(ids.shape)} is empty")
    if sync is None or (ids.device.type != "cpu" and not sync):
        return
    low, high = (int(end) for end in ids.aminmax())
    if low < 0 or high >= limit:
        raise ValueError(f"{name} must be in 0 … {limit - 1}, and there is {low if low < 0 else high}")


def _floats(**tensors: Tensor) -> None:
    for name, x in tensors.items():
        if x.dtype not in FLOATS:
            raise ValueError(f"{name} must be floating point, not {x.dtype}")
        if not x.numel():
            raise ValueError(f"{name} {list(x.shape)} is empty")


def _one_device(**tensors: Tensor) -> None:
    if len({x.device for x in tensors.values()}) > 1:
        raise ValueError("on different devices: " + ", ".join(f"{name} {x.device}" for name, x in tensors.items()))


def _one_dtype(**tensors: Tensor) -> None:
    if len({x.dtype for x in tensors.values()}) > 1:
        raise ValueError("of different dtypes: " + ", ".join(f"{name} {x.dtype}" for name, x in tensors.items()))


def _one_shape(**tensors: Tensor) -> None:
    first, *others = (x.shape for x in tensors.values())  # in a graph they have no hash
    if any(shape != first for shape in others):
        raise ValueError("of different shapes: " + ", ".join(f"{name} {list(x.shape)}" for name, x in tensors.items()))


def _dims(name: str, x: Tensor, count: int, wanted: str) -> None:
    if x.dim() != count:
        raise ValueError(f"{name} must be {wanted}, not {list(x.shape)}")


def _targets(x: Tensor, targets: Tensor, name: str) -> None:
    if x.dim() < 1 or targets.shape != x.shape[:-1]:
        raise ValueError(f"targets {list(targets.shape)} do not fit {name} {list(x.shape)}: one for each row")
