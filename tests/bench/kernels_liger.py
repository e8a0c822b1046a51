"""The part `liger` of bench_kernels.py: our kernels beside those of Liger Kernel, where it can be imported.

Forward, and forward with backward, as a training step calls them, timed as in clock.py with less warm-up. Liger waits
for the GPU in its losses, so no graph: what Python adds to a call is in the figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from rlspec.kernels.linear_logprob import linear_logprob
from rlspec.kernels.logprob import logprob
from rlspec.kernels.rms_norm import rms_norm
from rlspec.kernels.rope import rope
from rlspec.kernels.swiglu import swiglu
from tests.bench.clock import Call, there_and_back
from tests.bench.kernels_gemm import BF16, EPS, LAYERS, NORM_TOKENS, TOKENS, _random

Run = Callable[..., Any]
HEAT = (100e3, 100e3)


def checks(device: torch.device) -> Iterator[tuple[str, bool, str]]:
    """Both sides compute the same thing, within a bf16 rounding or two."""
    for name, ours, theirs, tensors in _pairs(device, rows=64):
        ours, theirs = (_flat(call(*tensors)) for call in (ours, theirs))  # theirs may write into its inputs
        error = ((ours if ours.shape == theirs.shape else ours.mean()) - theirs).abs().max().item()
        yield f"liger {name}: the same function", error <= 0.1, f"they differ by {error:.1e} at most"


def timings(device: torch.device) -> Iterator[dict[str, Any]]:
    for name, ours, theirs, tensors in _pairs(device, rows=None):
        shape = " x ".join(map(str, tensors[0].shape))
        for said, way in (("", _forward), (" forward + backward", _both)):
            times = there_and_back({"ours": (way(ours, tensors), 1), "Liger": (way(theirs, tensors), 1)}, HEAT)
            figures = {"ours_us": times["ours"], "baseline": "Liger", "baseline_us": times["Liger"]}
            yield {"kernel": f"{name}{said}", "shape": shape, "backend": "triton", **figures}


def _pairs(device: torch.device, rows: int | None) -> Iterator[tuple[str, Run, Run, list[Tensor]]]:
    """Name, ours, theirs, and the tensors that both take; `rows`, or as many as the tables have."""
    if find_spec("liger_kernel") is None:
        return
    from liger_kernel.ops import (
        LigerCrossEntropyFunction,
        LigerFusedLinearCrossEntropyFunction,
        LigerRMSNormFunction,
        LigerRopeFunction,
        LigerSiLUMulFunction,
    )

    many, few = rows or NORM_TOKENS, rows or TOKENS
    vocabulary, width = LAYERS["lm_head"]
    targets = torch.arange(few, device=device) * 37 % vocabulary
    weight = _random(device, width)
    yield (
        "rms_norm",
        lambda x: rms_norm(x, weight, eps=EPS),
        lambda x: LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "gemma", False),
        [_random(device, many, width)],
    )
    yield "swiglu", swiglu, LigerSiLUMulFunction.apply, [_random(device, many, 12288), _random(device, many, 12288)]
    angles = torch.randn(1, many, 64, device=device)
    cos, sin = angles.cos().to(BF16), angles.sin().to(BF16)
    twice = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    yield (
        "rope of 32 heads and of 8",
        lambda q, k: (rope(q, cos, sin), rope(k, cos, sin)),
        lambda q, k: _rotated(LigerRopeFunction, q, k, *twice),
        [_random(device, 1, many, 32, 128), _random(device, 1, many, 8, 128)],
    )
    yield (
        "logprob",
        lambda logits: logprob(logits, targets),
        lambda logits: -LigerCrossEntropyFunction.apply(logits, targets, None)[0],
        [_random(device, few, vocabulary)],
    )
    head = _random(device, vocabulary, width) / 64
    yield (
        "linear_logprob",
        lambda x: linear_logprob(x, head, targets),
        lambda x: -LigerFusedLinearCrossEntropyFunction.apply(x, head, targets)[0],
        [_random(device, few, width)],
    )


def _rotated(function: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Liger rotates in place, with the heads before the tokens."""
    q, k = function.apply(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    return q.transpose(1, 2), k.transpose(1, 2)


def _flat(made: Any) -> Tensor:
    return torch.cat([one.float().flatten() for one in (made if isinstance(made, tuple) else (made,))])


def _forward(call: Run, tensors: list[Tensor]) -> Call:
    def run() -> None:
        with torch.no_grad():
            call(*tensors)

    return run


def _both(call: Run, tensors: list[Tensor]) -> Call:
    leaves = [one.detach().clone().requires_grad_() for one in tensors]

    def run() -> None:
        out = call(*leaves)
        torch.autograd.grad(out, leaves, [torch.ones_like(one) for one in (out if isinstance(out, tuple) else (out,))])

    return run
