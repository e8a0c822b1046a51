"""Implementation `fastest`: of each operator the kernel, of `triton` or of `cuda`, that was the faster one on an H200.

The two have the same bits, so the choice may follow the shape. It rests on `tests/bench/results/`: products
of few rows and of the layers o and down go to Triton, of more rows and of the wider layers to CUDA; prefill and decode
of few samples to CUDA, decode of many to Triton, the sums of an embedding's and of a matrix's gradient over calls to
CUDA. What is nearly level stays with Triton, such as the backward of attention that runs once a sample, and so do the
operators of experts, which it alone has. Autograd goes back through the kernels of the family that ran forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

from torch import Tensor

from rlspec.device import cuda_operators as cuda
from rlspec.device import triton_operators as triton
from rlspec.device.kernel_operators import table
from rlspec.kernels import det_gemm as _det_gemm

# Rows from which CUDA is faster, by the layer of Qwen3-8B that a weight resembles.
PRODUCTS = {"wider": 128, "wide": 128, "vocabulary": 256}
DECODED, SAMPLES = 8, 8  # queries up to which a call decodes, and samples up to which CUDA then is faster


def _either(name: str, by_cuda: Callable[..., bool]) -> Callable[..., Any]:
    """The kernel `name` of the family that `by_cuda` says, asked with the arguments of the call."""

    def call(*arguments: Any, **options: Any) -> Any:
        family = cuda.KERNELS if by_cuda(*arguments, **options) else triton.KERNELS
        return getattr(family, name)(*arguments, **options)

    return call


def product(x: Tensor, weight: Tensor, **options: Any) -> bool:
    """Whether x [..., K] times weight [N, K] is for CUDA."""
    if weight.dim() != 2 or not x.numel() or x.element_size() != 2:
        return False  # of what is wrong Triton's kernel tells
    family = _det_gemm._family(weight.shape[0])
    return family in PRODUCTS and x.numel() // x.shape[-1] >= PRODUCTS[family]


def attends(query: Tensor, key: Tensor, value: Tensor, segments: Tensor, **options: Any) -> bool:
    """Whether attention over these segments is for CUDA: heads of 128 were timed, of 64 are taken to be alike."""
    fits = query.shape[-1] in (64, 128) and query.element_size() == 2
    decodes = (options.get("max_query") or query.shape[1]) <= DECODED
    return fits and not (decodes and len(segments) > SAMPLES)


def folds(accumulator: Tensor, x: Tensor, dy: Tensor, blocks: Tensor | None = None) -> bool:
    """Whether the resumed sum of a matrix's gradient is for CUDA."""
    return x.element_size() == 2


KERNELS = replace(
    triton.KERNELS,
    backend="fastest",
    embedding_fold=cuda.KERNELS.embedding_fold,
    attention=_either("attention", attends),
    attention_forward=_either("attention_forward", attends),
    det_gemm=_either("det_gemm", product),
    lm_head=_either("lm_head", product),
    matrix_fold=_either("matrix_fold", folds),
    linear_logprob=_either("linear_logprob", lambda x, weight, *rest, **options: product(x, weight)),
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


def _renamed(operator: Callable[..., Any]) -> Callable[..., Any]:
    """One of Triton's operators with all that it promises, under this implementation's name."""

    @wraps(operator)
    def call(*arguments: Any, **options: Any) -> Any:
        return operator(*arguments, **options)

    call.backend = KERNELS.backend  # type: ignore[attr-defined]
    return call


router = _renamed(triton.router)
grouped_gemm = _renamed(triton.grouped_gemm)
combine = _renamed(triton.combine)
