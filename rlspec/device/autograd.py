"""Gradients from given ones, past torch's own front door, whose first call imports the compiler: half a second.

As torch.autograd.grad(…, allow_unused=True) and torch.autograd.backward behind their checks (torch/autograd/graph.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.autograd.graph import _engine_run_backward


def differentiate(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], upstream: Sequence[Tensor]
) -> list[Tensor | None]:
    """The gradients of `inputs` where those of `outputs` are `upstream`, of the same shapes; None where none arrives.

    Raises ValueError for another shape, RuntimeError for an output without a graph.
    """
    _check(outputs, upstream)
    return list(
        _engine_run_backward(
            tuple(outputs), tuple(upstream), False, False, tuple(inputs), allow_unreachable=True, accumulate_grad=False
        )
    )


def accumulate(outputs: Sequence[Tensor], upstream: Sequence[Tensor]) -> None:
    """Add to `.grad` of all leaves behind `outputs`. Raises as `differentiate` does."""
    _check(outputs, upstream)
    _engine_run_backward(
        tuple(outputs), tuple(upstream), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def _check(outputs: Sequence[Tensor], upstream: Sequence[Tensor]) -> None:
    for out, dy in zip(outputs, upstream, strict=True):  # the engine would sum what broadcasts
        if out.shape != dy.shape:
            raise ValueError(f"the gradient of a result of shape {list(out.shape)} has shape {list(dy.shape)}")
