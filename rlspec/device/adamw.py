"""AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101), the arithmetic torch's own.

`torch.optim.AdamW` imports torch's compiler when it is made, which takes longer than a small model trains; the function
that it calls for its steps does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw


class AdamW:
    """As `torch.optim.AdamW`, to the bit; a group has its `params`, and its `lr` before each step."""

    def __init__(
        self, groups: Iterable[Mapping[str, Any]], *, betas: Sequence[float], eps: float, weight_decay: float
    ) -> None:
        self.betas, self.eps = betas, eps
        self.param_groups = [{"weight_decay": weight_decay, **group} for group in groups]
        self.state: dict[Tensor, dict[str, Tensor]] = {}

    def zero_grad(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            states = [self._state(p) for p in parameters]
            gradients, first, second, steps = (
                [p.grad for p in parameters],
                *([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step")),
            )
            adamw(
                parameters, gradients, first, second, [], steps,
                amsgrad=False, beta1=self.betas[0], beta2=self.betas[1], lr=group["lr"],
                weight_decay=group["weight_decay"], eps=self.eps, maximize=False,
            )  # fmt: skip

    def _state(self, parameter: Tensor) -> dict[str, Tensor]:
        if parameter not in self.state:
            moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            self.state[parameter] = {"step": torch.tensor(0.0), **moments}
        return self.state[parameter]
