"""The experts that an arm took, given to the runs that its errors are measured by.

Two experts whose scores are nearly equal change places for a rounding, and with them the whole result of a layer: that
is no error of an operator, and every trained mixture of experts has such tokens. So the reference and plain torch send
each token to the arm's experts, weighted by scores of their own. That the choice itself is right is held against the
reference's scores: an expert e of the arm in the place of a better one f says score(f) - score(e) <= 2 * the arm's own
error on that token's scores, or else the arm chose against its own scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlspec.device import comparing
from rlspec.device.chain_decoder import TrainingDecoder
from rlspec.device.chain_gradients import Ledger
from rlspec.device.chain_model import TrainingPass
from rlspec.device.decoder import Node, Site, Span
from rlspec.device.gradients import Identity, Run

_ROUNDING = 2.0**-20  # of fp32 scores: the order is that of the logits, before the exponentials were rounded


class Routes:
    """What the router of an arm gave each token of the samples, by layer: `experts` [T, k], `scores` [T, E]."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.starts = [sum(lengths[:index]) for index in range(len(lengths))]
        self.tokens, self.device = sum(lengths), device
        self.experts: dict[int, Tensor] = {}
        self.scores: dict[int, Tensor] = {}

    def capture(self, node: Node, runs: tuple[Run, ...], rows: Tensor) -> None:
        """As `TrainingPass.run` takes it."""
        held = {"mlp.gate": self.scores, "mlp.gate.choice": self.experts}.get(node.name)
        if held is None or node.layer is None:
            return
        if node.layer not in held:
            held[node.layer] = torch.zeros(self.tokens, rows.shape[1], dtype=rows.dtype, device=self.device)
        for run in runs:
            at = self.starts[run.sample] + run.position
            held[node.layer][at : at + run.length] = rows[run.row : run.row + run.length]

    def places(self, identity: Identity) -> Tensor:
        """int64 [rows]: the token that each row of a chunk is, -1 for a pad."""
        made = torch.full((identity.rows,), -1, dtype=torch.int64)
        for run in identity.ordered:
            at = self.starts[run.sample] + run.position
            made[run.row : run.row + run.length] = torch.arange(at, at + run.length)
        return made.to(self.device)


class RoutedDecoder(TrainingDecoder):
    """A decoder in training that takes the experts it is given, and notes where it would have taken others."""

    routes: Routes
    others: dict[int, Tensor]
    wrong: int
    widest: float

    def follow(self, routes: Routes) -> None:
        """Before the run."""
        self.routes, self.others, self.wrong, self.widest = routes, {}, 0, 0.0

    def begin(self, ledger: Ledger, chunks: Sequence[Identity], spans: Sequence[Span]) -> None:
        super().begin(ledger, chunks, spans)
        self.places = [self.routes.places(identity) for identity in chunks]

    def operate(self, at: Site, name: str, operator: str, *arguments: Any, **options: Any) -> Any:
        if operator != "router" or at.layer is None:
            return super().operate(at, name, operator, *arguments, **options)
        places = self.places[at.chunk.index]
        choice = self.routes.experts[at.layer][places.clamp_min(0)].long()
        found = super().operate(at, name, operator, *arguments, **{**options, "choice": choice})
        self._compare(at.layer, places[places >= 0], found.probabilities.detach()[places >= 0], choice[places >= 0])
        return found

    def _compare(self, layer: int, tokens: Tensor, scores: Tensor, chosen: Tensor) -> None:
        best = scores.topk(chosen.shape[1]).values[:, -1]
        gap = best - scores.gather(1, chosen).amin(1)
        off = (self.routes.scores[layer][tokens] - scores).abs().amax(1)
        twice = (chosen.sort(1).values.diff(dim=1) == 0).any(1)
        explained = gap <= 2 * off + best * _ROUNDING
        self.wrong += int((twice | ~explained).sum())
        self.widest = max(self.widest, float(gap.max()))
        held = self.others.setdefault(layer, torch.zeros(self.routes.tokens, dtype=torch.bool, device=tokens.device))
        held[tokens] = (gap > 0) | twice

    def summary(self) -> dict[str, Any]:
        """Choices (a token in a layer) and tokens that fp32 would have sent elsewhere, and the widest gap of scores."""
        tables = list(self.others.values())
        return {
            "choices": sum(int(table.sum()) for table in tables),
            "tokens": int(torch.stack(tables).any(0).sum()) if tables else 0,
            "of": self.routes.tokens,
            "wrong": self.wrong,
            "widest": comparing.number(self.widest),
        }


class RoutedPass(TrainingPass):
    """Training along the routes of an arm: `follow` them first."""

    decoder_type = RoutedDecoder

    def follow(self, routes: Routes) -> RoutedPass:
        """Itself, on its way along `routes`."""
        assert isinstance(self.decoder, RoutedDecoder)
        self.decoder.follow(routes)
        return self
