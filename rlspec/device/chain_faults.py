"""Faults that controls plant into a chain: what engines and trainers got wrong, one small class a fault.

An arm with `fault: NAME` runs them in place of what `lives` gives others: a training pass, an engine of inference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlspec import layouts
from rlspec.device.chain_inference import Engine, InferenceDecoder
from rlspec.device.chain_model import Trained, TrainingPass
from rlspec.device.chain_trace import WatchedDecoder
from rlspec.device.decoder import Cache, Decoder, Site, Span
from rlspec.device.gradients import Run
from rlspec.device.kv_cache import ContiguousCache, PagedCache
from rlspec.device.operators import Segment, Segments
from rlspec.layouts import Call, Layout

LAYER = 1  # where a fault of one layer lies


class Training(TrainingPass):
    """A training pass whose gradients can be traced."""

    decoder_type = WatchedDecoder


@dataclass(frozen=True, kw_only=True)
class Lives:
    """What trains and what infers."""

    training: type[TrainingPass] = Training
    engine: type[Engine] = Engine


def lives(fault: str | None) -> Lives:
    """Raises ValueError for a fault that nobody knows."""
    if fault is None:
        return Lives()
    if fault not in FAULTS:
        raise ValueError(f"unknown fault {fault!r}; known: {', '.join(FAULTS)}")
    return FAULTS[fault]


# Training


class _LeftPositions(WatchedDecoder):
    def forward(self, tokens: Tensor, **options: Any) -> Any:
        spans = options["spans"]
        if any(span.start for span in spans) and len({span.row for span in spans}) == len(spans):
            positions = torch.zeros_like(tokens)
            for row, start, length in spans:
                first = 1 if start else 0
                positions[row, start : start + length] = torch.arange(first, first + length, device=tokens.device)
            options["positions"] = positions
        return super().forward(tokens, **options)


class LeftPositions(Training):
    """The positions of a sample behind pads begin at 1."""

    decoder_type = _LeftPositions


class _NoBoundaries(WatchedDecoder):
    def attention_forward(self, at: Site, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        segments = at.chunk.segments
        if len({entry.row for entry in segments.entries}) == len(segments.entries):
            return super().attention_forward(at, query, key, value)
        whole = Segments((Segment(0, 0, query.shape[1], 0, key.shape[1]),), 1, query.shape[1], key.shape[1], key.device)
        return self.operators.attention.forward(query, key, value, whole, scale=self._scale)  # type: ignore[attr-defined,no-any-return]


class NoBoundaries(Training):
    """Samples that are packed into one row see each other: cu_seqlens never reach attention."""

    decoder_type = _NoBoundaries


class ShiftedMask(Training):
    """The mask of active tokens lies one token too far."""

    def _predicting(self, run: layouts.Run) -> tuple[int, slice]:
        row, slots = super()._predicting(run)
        return row, slice(slots.start + 1, slots.stop + 1)


class LocalMean(Training):
    """The loss of a call is divided by the active tokens of that call."""

    def denominator(self, call: Call) -> int:
        return sum(self.tier.samples[run.sample].active for run in call.runs)


class _ForgottenEdge(WatchedDecoder):
    def attention_forward(self, at: Site, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if at.chunk.index:
            value = value.clone()
            value[:, at.chunk.start - 1] = 0
        return super().attention_forward(at, query, key, value)


class ForgottenEdge(Training):
    """The last value of a chunk is not there for the next."""

    decoder_type = _ForgottenEdge


class _PerChunk(WatchedDecoder):
    def attend(self, sites: Sequence[Site], parts: Any, cache: Cache | None) -> list[Tensor]:
        return Decoder.attend(self, sites, parts, cache) if len(sites) > 1 else super().attend(sites, parts, cache)


class PerChunkBackward(Training):
    """Attention goes back chunk by chunk."""

    decoder_type = _PerChunk


class DroppedGradient(Training):
    """The gradient of one weight never arrives."""

    def run(self, layout: Layout, **options: Any) -> Trained:
        found = super().run(layout, **options)
        found.gradients[f"model.layers.{LAYER}.self_attn.k_norm.weight"].zero_()
        return found


def _other_eps(decoder: type[Decoder]) -> Any:
    class _OtherEps(decoder):  # type: ignore[misc,valid-type]
        def operate(self, at: Site, name: str, operator: str, *arguments: Any, **options: Any) -> Any:
            if at.layer == LAYER and name == "input_layernorm":
                options["eps"] = 1e-3
            return super().operate(at, name, operator, *arguments, **options)

    return _OtherEps


class OtherEps(Training):
    """One norm of one layer has another eps: in training, and in `OtherEpsEngine` in inference too."""

    decoder_type = _other_eps(WatchedDecoder)


class OtherEpsEngine(Engine):
    """See `OtherEps`."""

    decoder_type = _other_eps(InferenceDecoder)


# Inference


class _Head(InferenceDecoder):
    def operate(self, at: Site, name: str, operator: str, *arguments: Any, **options: Any) -> Any:
        if operator == "lm_head":
            options["out_dtype"] = self.dtype
            return super().operate(at, name, operator, *arguments, **options).float()
        return super().operate(at, name, operator, *arguments, **options)


class HeadInWorkingDtype(Engine):
    """Logits in the working dtype, where training has them in fp32."""

    decoder_type = _Head


class _Temperature(InferenceDecoder):
    def operate(self, at: Site, name: str, operator: str, *arguments: Any, **options: Any) -> Any:
        if operator == "logprob":
            logits, *others = arguments
            arguments = (logits / 0.7, *others)
        return super().operate(at, name, operator, *arguments, **options)


class Temperature(Engine):
    """Log-probs after a temperature of 0.7."""

    decoder_type = _Temperature


class StaleCache(Engine):
    """What the first call of a sample leaves in the cache was made with the weights of an earlier step."""

    def _call(
        self, walk: Any, ids: Any, spans: Sequence[Span], runs: Sequence[Run], width: int, cache: Any, *rest: Any
    ) -> None:
        first = cache is not None and not any(cache.lengths.values())
        trace = walk.trace
        if first:
            walk.trace = None  # a prefix that is found in the cache is not computed
            kept = {name: parameter.clone() for name, parameter in self.decoder.named_parameters()}
            for name, parameter in self.decoder.named_parameters():
                if "v_proj" in name:
                    parameter.mul_(1.25)
        super()._call(walk, ids, spans, runs, width, cache, *rest)
        if first:
            walk.trace = trace
            for name, parameter in self.decoder.named_parameters():
                parameter.copy_(kept[name])


def _through_pads(cache: Any) -> Any:
    class _ThroughPads(cache):  # type: ignore[misc]
        def begin(self, spans: Sequence[Span], width: int, samples: Any = None) -> Segments:
            if width > 1:
                spans = [Span(span.row, 0, width) for span in spans]
            return super().begin(spans, width, samples)  # type: ignore[no-any-return]

    return _ThroughPads


class CountedPads(Engine):
    """Pads are stored, and move the cursor."""

    contiguous = _through_pads(ContiguousCache)
    paged = _through_pads(PagedCache)

    def cache(self, kind: str, samples: Any) -> Any:
        longest = max(sample.length for sample in samples)
        return super().cache(kind, [_Roomy(length=2 * longest) for _ in samples])


@dataclass(frozen=True, kw_only=True)
class _Roomy:
    length: int


class ForgottenKey(Engine):
    """The key before each chunk of a prompt is overwritten with the one before it."""

    def _call(
        self, walk: Any, ids: Any, spans: Sequence[Span], runs: Sequence[Run], width: int, cache: Any, *rest: Any
    ) -> None:
        if cache is not None and width > 1:
            for run in runs:
                if run.position > 1:
                    block, place = cache._places(run.sample, torch.tensor([run.position - 2, run.position - 1]))
                    cache.keys[:, block[1], :, place[1]] = cache.keys[:, block[0], :, place[0]]
        super()._call(walk, ids, spans, runs, width, cache, *rest)


FAULTS: Mapping[str, Lives] = {
    "stale_cache": Lives(engine=StaleCache),
    "left_positions": Lives(training=LeftPositions),
    "no_boundaries": Lives(training=NoBoundaries),
    "shifted_mask": Lives(training=ShiftedMask),
    "counted_pads": Lives(engine=CountedPads),
    "head_in_working_dtype": Lives(engine=HeadInWorkingDtype),
    "other_eps": Lives(training=OtherEps, engine=OtherEpsEngine),
    "other_eps_in_training": Lives(training=OtherEps),
    "forgotten_edge": Lives(training=ForgottenEdge),
    "forgotten_key": Lives(engine=ForgottenKey),
    "dropped_gradient": Lives(training=DroppedGradient),
    "local_mean": Lives(training=LocalMean),
    "per_chunk_backward": Lives(training=PerChunkBackward),
    "temperature": Lives(engine=Temperature),
}
