"""One stage of a pipeline under torch's GPipe schedule: all micro-batches forwards, then all of them backwards.

What only a stage knows of the loss, its routers' load-balance terms, is attached to what leaves it: see
`rlspec.device.parallel.attach`. The schedule itself sees a stream, and log-probs at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from rlspec.device.mesh import Peers

Forward = Callable[[int, Tensor | None], Tensor]
Loss = Callable[[int, Tensor], Tensor]


class Pipeline:
    """This process's stage; `stream`: an example of what goes from stage to stage, on any device."""

    def __init__(self, peers: Peers, stream: Tensor, tokens: Tensor, device: torch.device) -> None:
        self.peers = peers
        first, last = peers.rank == 0, peers.rank == peers.world - 1
        self.module = _Module(first)
        # Both ends are said, so that torch need not run the stage to find them out.
        self.stage = PipelineStage(
            self.module, peers.rank, peers.world, device, group=peers.group,
            input_args=tokens if first else stream.requires_grad_(),
            output_args=tokens.to(torch.float32).requires_grad_() if last else stream.requires_grad_(),
        )  # fmt: skip
        self.schedule: ScheduleGPipe | None = None

    def run(self, tokens: Sequence[Tensor], forward: Forward, loss: Loss) -> None:
        """Forward and backward of all micro-batches of `tokens`; `forward` and `loss` get the number of one.

        `forward` also gets the stream from the stage before, or None; `loss` gets the log-probs, in the last stage.
        """
        self.module.forwards, self.module.number, self.loss = forward, 0, loss
        if self.schedule is None:
            self.schedule = ScheduleGPipe(self.stage, len(tokens), loss_fn=self._loss, scale_grads=False)
        whole = (torch.cat(list(tokens)),) if self.stage.is_first else ()
        numbers = torch.arange(len(tokens)) if self.stage.is_last else None
        self.schedule.step(*whole, target=numbers)

    def _loss(self, logprobs: Tensor, number: Tensor) -> Tensor:
        return self.loss(int(number), logprobs)


class _Module(nn.Module):
    """The schedule calls it once a micro-batch, in their order."""

    forwards: Forward

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.first, self.number = first, 0

    def forward(self, x: Tensor) -> Tensor:
        self.number += 1
        return self.forwards(self.number - 1, None if self.first else x)
