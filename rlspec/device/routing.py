"""Which experts the routers of a model chose, seen while it runs: what the files of log-probs call `routing`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rlspec.device.decoder import Node


class Routes:
    """The choices of one call, layer by layer, until they are taken.

    They are what a router hands to its experts, ties and groups of experts decided. A router of transformers is a
    module whose class is named so (`Qwen3MoeTopKRouter`, from version 5 on); one that gives no numbers shows none.
    """

    def __init__(self) -> None:
        self.layers: list[Tensor] = []

    def watch(self, model: nn.Module) -> None:
        """See the routers of a model of transformers from now on."""
        for module in model.modules():
            if type(module).__name__.lower().endswith("router"):
                module.register_forward_hook(self._seen)

    def capture(self, node: Node, tensor: Tensor) -> None:
        """For a call of our own decoder."""
        if node.name == "mlp.gate.choice":
            self.layers.append(tensor.flatten(0, -2))

    def taken(self, ids: Tensor) -> Tensor:
        """Of the call with these token ids [B, T]: int64 [B, T, layers, top-k], or [B, T, 0, 0] where nothing was seen.

        Routers that were called twice, or on other rows than those of the grid, cannot be told by token: nothing, too.
        """
        layers, self.layers = self.layers, []
        if {one.shape[0] for one in layers} != {ids.numel()} or len({one.shape for one in layers}) != 1:
            return torch.zeros(*ids.shape, 0, 0, dtype=torch.int64)
        return torch.stack(layers, 1).unflatten(0, ids.shape)

    def _seen(self, module: nn.Module, arguments: Any, result: Any) -> None:
        outputs = result if isinstance(result, tuple) else (result,)
        whole = [one for one in outputs if isinstance(one, Tensor) and one.ndim > 1 and one.dtype == torch.int64]
        if len(whole) == 1:
            self.layers.append(whole[0].flatten(0, -2))
