"""Implementation `triton`: the kernels of `rlspec.kernels`, invariant to the bit in every layout, for CUDA devices.

The kernels are documented in their files; how they fit the signatures of the catalogue, which are those of
`rlspec.device.operators`, is told in `rlspec.device.kernel_operators`. The operators of experts are here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlspec.device import checking, expert_gradients
from rlspec.device.kernel_operators import Kernels, promising, table, zeros
from rlspec.device.operators import Dispatch, Routing
from rlspec.kernels import attention as _attention
from rlspec.kernels import combine as _combine
from rlspec.kernels import det_gemm as _det_gemm
from rlspec.kernels import embedding as _embedding
from rlspec.kernels import grouped_gemm as _grouped_gemm
from rlspec.kernels import linear_logprob as _linear_logprob
from rlspec.kernels import logprob as _logprob
from rlspec.kernels import residual_add as _residual_add
from rlspec.kernels import rms_norm as _rms_norm
from rlspec.kernels import rope as _rope
from rlspec.kernels import router as _router
from rlspec.kernels import silu as _silu
from rlspec.kernels import swiglu as _swiglu

KERNELS = Kernels(
    backend="triton",
    embedding=_embedding.embedding,
    embedding_fold=_embedding.fold,
    rms_norm=_rms_norm.rms_norm,
    norm_fold=_rms_norm.fold,
    rope=_rope.rope,
    attention=_attention.attention,
    attention_forward=_attention.forward,
    attention_backward=_attention.backward,
    det_gemm=_det_gemm.det_gemm,
    lm_head=_det_gemm.lm_head,
    matrix_fold=_det_gemm.fold,
    silu=_silu.silu,
    swiglu=_swiglu.swiglu,
    residual_add=_residual_add.residual_add,
    logprob=_logprob.logprob,
    batch_invariant_logprob=_logprob.batch_invariant_logprob,
    linear_logprob=_linear_logprob.linear_logprob,
    head_fold=_linear_logprob.fold,
)
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
_operator = partial(promising, "triton")


def router_gradient(
    weight: Tensor, *, lengths: Sequence[int] | None = None, **options: Any
) -> expert_gradients.RouterGradient:
    """Of the weight [E, H] of `router` called with `options`, from x [R, H] and the gradients of scores and weights."""
    top_k = options["top_k"]

    def fold(accumulator: Tensor, x: Tensor, rows: Tensor, blocks: Tensor) -> None:
        upstream, upstream_weights, choice = expert_gradients.parts(rows, len(weight), top_k)
        slopes = _router.slopes(x, weight, upstream, upstream_weights, choice=choice, **options)
        _router.fold(accumulator, x, slopes, blocks)

    return expert_gradients.RouterGradient(zeros(weight), fold, lengths)


def grouped_gradient(weight: Tensor, *, lengths: Sequence[int] | None = None) -> expert_gradients.ExpertGradient:
    """Of the weights [E, N, K] of `grouped_gemm`, from x [R, k, K], dy [R, k, N] and experts int64 [R, k]."""
    return expert_gradients.ExpertGradient(weight, _ExpertSums(weight), lengths)


def router_statistics(
    probabilities: Tensor, experts: Tensor, pieces: Sequence[tuple[int, int]], *, together: bool
) -> tuple[Tensor, Tensor]:
    """As `expert_gradients.statistics`; differentiable in the probabilities."""
    table = torch.tensor(pieces, dtype=torch.int32).to(experts.device, non_blocking=True)
    return _router.load_balance(probabilities, experts, table, together=together)


class _ExpertSums:
    """`expert_gradients.Sums` in one chain of the matrix unit an expert."""

    def __init__(self, weight: Tensor) -> None:
        self._gradient = _grouped_gemm.Gradient(zeros(weight))

    def add(self, x: Tensor, dy: Tensor, rows: Tensor, experts: Tensor, offsets: Tensor) -> None:
        self._gradient.add(x, dy.to(x.dtype), rows, experts, offsets)

    def finish(self) -> Tensor:
        return self._gradient.finish()


@_operator(weight_gradient=router_gradient, statistics=router_statistics)
def router(
    x: Tensor,
    weight: Tensor,
    *,
    top_k: int,
    normalise: bool,
    logits_dtype: torch.dtype,
    choice: Tensor | None = None,
    scoring: str = "softmax",
) -> Routing:
    """[N, H], [E, H] -> scores, weights and experts; of equal logits the lower expert."""
    options: dict[str, Any] = {"logits_dtype": logits_dtype, "scoring": scoring, "choice": choice}
    return Routing(*_router.router(x, weight, top_k=top_k, normalise=normalise, **options))


@_operator(weight_gradient=grouped_gradient)
def grouped_gemm(rows: Tensor, weight: Tensor, dispatch: Dispatch) -> Tensor:
    """[M, K], [E, N, K] -> [M, N]: each row times the transposed weight of its expert."""
    checking.grouped_gemm(rows, weight, dispatch)
    return _grouped_gemm.grouped_gemm(rows, weight, dispatch.offsets)


@_operator()
def combine(rows: Tensor, weights: Tensor, dispatch: Dispatch) -> Tensor:
    """[M, H], [N, k] -> [N, H]: weighted sum, slots ascending, in fp32 whatever the weights are."""
    checking.combine(rows, weights, dispatch)
    return _combine.combine(rows, weights, dispatch.inverse)
