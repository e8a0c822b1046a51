"""The decoder of one process of a mesh: a stage of its layers, a piece of each sequence, a share of the experts.

Context parallelism cuts a sequence into 2·cp equal pieces and gives process c the pieces c and 2·cp − 1 − c (zigzag),
so that all processes meet about as many keys. Keys and values of all pieces are gathered; a query then meets the keys
that it would have met in one process, in the same order, so only gradients are summed in other places. Both pieces are
handed to attention as rows of their own: they meet the same keys, whose gradients a kernel writes once a segment.

Expert parallelism sends each routed row to the process that holds its expert and brings the result back. There the
rows of an expert stand in the order of the processes that sent them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from rlspec.architecture import Architecture
from rlspec.device import mesh as meshes
from rlspec.device.decoder import Cache, Decoder, Part, RouterStatistics, Site, Span
from rlspec.device.mesh import Mesh, Peers
from rlspec.device.operators import Dispatch, Operators, Segment, Segments


def part(model: Architecture, mesh: Mesh) -> Part:
    """What this process holds: even runs of layers and of experts. Raises ValueError where the model is not to be cut.

    The messages name the key of the mesh.
    """
    layers, experts, pp, ep = model.num_hidden_layers, model.num_experts, mesh.pipeline.world, mesh.experts.world
    if pp > layers:
        raise ValueError(f"mesh: pp {pp} stages need a layer each, and the model has {layers}")
    if pp > 1 and model.tie_word_embeddings:
        raise ValueError(f"mesh: pp {pp} parts the embedding from the head, and this model ties them")
    if ep > 1 and not experts:
        raise ValueError(f"mesh: ep {ep} parts experts, and this model is dense")
    if experts % ep:
        raise ValueError(f"mesh: ep {ep} does not divide the {experts} experts of the model")
    stage, number = mesh.pipeline.rank, mesh.experts.rank
    return Part(
        range(layers * stage // pp, layers * (stage + 1) // pp),
        range(experts * number // ep, experts * (number + 1) // ep),
    )


def zigzag(length: int, context: Peers) -> Tensor:
    """int64 [length / cp]: the positions of a sequence that are this process's, in its order."""
    if context.world == 1:
        return torch.arange(length)
    pieces = torch.arange(length).chunk(2 * context.world)
    return torch.cat((pieces[context.rank], pieces[2 * context.world - 1 - context.rank]))


def attach(x: Tensor, term: Tensor) -> Tensor:
    """x, with `term` (one number) added to the loss that x will be part of, in this process or in a later stage."""
    return _Attach.apply(x, term)  # type: ignore[no-any-return]


class _Attach(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, term: Tensor) -> Tensor:
        ctx.one = torch.ones_like(term)
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor]:
        return upstream, ctx.one


class Context:
    """The keys and values that the queries of this process meet: a cache of the decoder that remembers nothing."""

    def __init__(self, peers: Peers, device: torch.device) -> None:
        self.peers, self.device = peers, device
        self.numbers = (peers.rank, 2 * peers.world - 1 - peers.rank)  # of this process's pieces in a sequence

    def begin(self, spans: Sequence[Span], width: int) -> Segments:
        # Where each position of the sequence stands in the pieces as they are gathered.
        pieces = [zigzag(width * self.peers.world, Peers(rank, self.peers.world)) for rank in range(self.peers.world)]
        self.order = torch.cat(pieces).argsort().to(self.device)
        piece, keys = width // 2, width * self.peers.world
        places = [(row, slot, number) for row, _, _ in spans for slot, number in enumerate(self.numbers)]
        alone = tuple(Segment(2 * row + slot, 0, piece, 0, (number + 1) * piece) for row, slot, number in places)
        self.pieces = Segments(alone, 2 * len(spans), piece, keys, self.device)
        entries = tuple(Segment(row, slot * piece, piece, 0, (number + 1) * piece) for row, slot, number in places)
        return Segments(entries, len(spans), width, keys, self.device)

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        pieces = meshes.gather(torch.stack((keys, values)), self.peers)  # [cp, 2, B, T / cp, Hkv, D]
        keys, values = pieces.permute(1, 2, 0, 3, 4, 5).flatten(2, 3).index_select(2, self.order).unbind(0)
        return keys, values


class ParallelDecoder(Decoder):
    """`stage` instead of `forward`; on a mesh of one process they are the same."""

    def __init__(self, model: Architecture, operators: Operators, mesh: Mesh, **options: Any) -> None:
        super().__init__(model, operators, part=part(model, mesh), **options)
        self.mesh = mesh
        device = torch.device(options.get("device", "cpu"))
        self.context = Context(mesh.context, device) if mesh.context.world > 1 else None

    @cached_property
    def last(self) -> bool:
        """Whether the stage ends in log-probs."""
        return self.part.layers.stop == self.architecture.num_hidden_layers

    @property
    def stream_dtype(self) -> torch.dtype:
        """Of what goes from stage to stage, [B, T / cp, H]."""
        return self._kept(self.profile.residual)

    def stage(
        self,
        tokens: Tensor,
        targets: Tensor,
        *,
        stream: Tensor | None = None,
        positions: Tensor | None = None,
        force_balanced: bool = False,
    ) -> tuple[Tensor, RouterStatistics | None]:
        """Through this process's layers: `tokens` and `targets` int64 [B, T / cp], whole sequences in the order of
        `zigzag`, and from the second stage on the `stream` of the one before.

        Returns the stream, or log-probs fp32 [B, T / cp] of the last stage, and the statistics of its own layers.
        """
        spans = [Span(row, 0, tokens.shape[1]) for row in range(tokens.shape[0])]
        (chunk,) = chunks = self._chunks(tokens, spans, positions, None, self.context, force_balanced)
        outside = [Site(chunk, None, None)]
        streams = self._embed(outside, tokens) if stream is None else [stream]
        (stream,), routed = self._layers(chunks, streams, self.context, None)
        router = self._statistics(chunks, spans, routed) if self.architecture.num_experts else None
        return (self._head(outside[0], stream, targets) if self.last else stream), router

    def attend(
        self, sites: Sequence[Site], parts: Sequence[tuple[Tensor, Tensor, Tensor]], cache: Cache | None
    ) -> list[Tensor]:
        if self.context is None:
            return super().attend(sites, parts, cache)
        (at,), ((query, key, value),) = sites, parts
        assert at.layer is not None
        keys, values = (x.repeat_interleave(2, 0) for x in self.context.extend(at.layer, key, value))
        pieces, scale = query.unflatten(1, (2, -1)).flatten(0, 1), self.architecture.head_dim**-0.5
        out = self._run(at, "self_attn", "attention", pieces, keys, values, self.context.pieces, scale=scale)
        return [out.unflatten(0, (-1, 2)).flatten(1, 2)]

    def _balanced(self, rows: int, width: int, device: torch.device) -> Tensor | None:
        whole = super()._balanced(rows, width * self.mesh.context.world, device)
        assert whole is not None
        return whole[:, zigzag(whole.shape[1], self.mesh.context).to(device)] if self.context else whole

    def _through_experts(self, at: Site, rows: Tensor, dispatch: Dispatch) -> tuple[Tensor, Tensor, Tensor]:
        peers = self.mesh.experts
        if peers.world == 1:
            return super()._through_experts(at, rows, dispatch)
        given = dispatch.offsets.diff().unflatten(0, (peers.world, -1))
        one_each = [1] * peers.world
        taken = meshes.all_to_all(given, peers, one_each, one_each)
        give, take = given.sum(1).tolist(), taken.sum(1).tolist()
        arrived = meshes.exchange(rows, peers, give, take)
        if not len(arrived):  # No token came to these experts; the others wait for the way back all the same.
            return arrived, arrived, meshes.exchange(arrived, peers, take, give)
        held = torch.arange(len(self.part.experts), device=rows.device).repeat(peers.world)
        here = Dispatch.of(held.repeat_interleave(taken.flatten()).unsqueeze(1), len(self.part.experts))
        both, activated, down = super()._through_experts(at, arrived[here.tokens], here)
        return both, activated, meshes.exchange(down[here.inverse], peers, take, give)
