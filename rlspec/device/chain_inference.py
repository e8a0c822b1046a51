"""The model as an inference engine runs it: prefill whole or in chunks, and token by token through a KV cache.

No graph, no accumulators: the parameters of the trained decoder, the operators of the arm, one call at a time. A run
(`Walk`) takes the samples of a decode case through the columns of their grid, a call for each piece of columns; what
stands in a slot of no sample is a pad token that no cache stores. Each token's log-prob is that of the next token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlspec.device.chain_trace import Key, Trace
from rlspec.device.decoder import Decoder, Node, Span
from rlspec.device.gradients import Run
from rlspec.device.kv_cache import ContiguousCache, PagedCache
from rlspec.device.operators import Operators
from rlspec.workloads import Sample

LOGITS, QUERY, ATTENTION = "lm_head", "self_attn.q_rope", "self_attn"
KEYS, VALUES = "self_attn.k_rope", "self_attn.v_proj"


class InferenceDecoder(Decoder):
    """`Decoder` on the parameters of another one."""

    @classmethod
    def of(cls, decoder: Decoder, operators: Operators) -> InferenceDecoder:
        made = cls(decoder.architecture, operators, dtype=decoder.dtype, device="meta")
        made.profile = decoder.profile
        for name, parameter in decoder.named_parameters():
            path, _, last = name.rpartition(".")
            made.get_submodule(path).register_parameter(last, parameter)
        return made


@dataclass(eq=False)
class Walk:
    """What one run through the columns gave: by (sample, position) the log-prob of the next token, and what was asked.

    `logits`: of wanted tokens. `written`: (layer, sample, node) -> keys or values call by call, as the model made
    them. `last`: (layer, sample, node) -> query or result of attention of the sample's last token.
    """

    trace: Trace | None
    logprobs: dict[tuple[int, int], float] = field(default_factory=dict)
    logits: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    written: dict[tuple[int, int, str], list[Tensor]] = field(default_factory=dict)
    last: dict[tuple[int, int, str], Tensor] = field(default_factory=dict)

    def stored(self, layer: int, sample: int, what: str) -> Tensor:
        """[positions, Hkv, D] that the model handed to the cache."""
        rows = torch.cat(self.written[layer, sample, what])
        return rows.reshape(len(rows), -1, self.last[layer, sample, QUERY].shape[-1])


class Engine:
    """One model and one implementation at work. `walk` with a cache, `prefill` without."""

    decoder_type: type[InferenceDecoder] = InferenceDecoder
    contiguous: type[ContiguousCache] = ContiguousCache
    paged: type[PagedCache] = PagedCache

    def __init__(
        self,
        decoder: Decoder,
        operators: Operators,
        *,
        tokens: Callable[[Sample], Sequence[int]],
        pad_token: int,
        page_size: int,
        unwritten: float,
    ) -> None:
        self.decoder = self.decoder_type.of(decoder, operators)
        self.device = next(decoder.parameters()).device
        self.tokens, self.pad_token, self.page_size, self.unwritten = tokens, pad_token, page_size, unwritten

    def cache(self, kind: str, samples: Sequence[Sample]) -> Any:
        """An empty cache with room for the samples, which are open in it as 0, 1, …"""
        longest = max(sample.length for sample in samples)
        options: dict[str, Any] = {"dtype": self.decoder.dtype, "device": self.device, "unwritten": self.unwritten}
        made: Any
        if kind == "contiguous":
            made = self.contiguous(self.decoder.architecture, samples=len(samples), positions=longest, **options)
        else:
            pages = sum(-(-sample.length // self.page_size) for sample in samples)
            made = self.paged(self.decoder.architecture, pages=pages, page_size=self.page_size, **options)
        made.open(*range(len(samples)))
        return made

    def walk(
        self,
        samples: Sequence[Sample],
        columns: Sequence[tuple[int, int]],
        cache: Any,
        *,
        left: bool = False,
        width: int = 0,
        wanted: Mapping[int, Sequence[int]] | None = None,
        store: bool = False,
        trace: bool = False,
    ) -> Walk:
        """Every piece of `columns` is one call; without a cache (None) there may be one piece alone.

        `wanted`: sample -> positions whose logits are kept. `store`: what went to the cache is kept too. `trace`: every
        node is digested.
        """
        width = width or max(sample.length for sample in samples)
        starts = [width - sample.length if left else 0 for sample in samples]
        walk = Walk(Trace([sample.length for sample in samples], self.device) if trace else None)
        ids = [torch.tensor(self.tokens(sample), dtype=torch.int64, device=self.device) for sample in samples]
        for first, last in columns:
            spans, runs = [], []
            for row, (sample, start) in enumerate(zip(samples, starts, strict=True)):
                begin, end = max(first, start), min(last, start + sample.length)
                if begin < end:
                    spans.append(Span(row, begin - first, end - begin))
                    runs.append(Run(row, begin - start, end - begin, 0, sample.length))
            if spans:
                self._call(walk, ids, spans, runs, last - first, cache, wanted or {}, store)
        return walk

    def prefill(self, samples: Sequence[Sample], *, left: bool = False, width: int = 0, **asked: Any) -> Walk:
        """All in one call, without a cache."""
        width = width or max(sample.length for sample in samples)
        return self.walk(samples, [(0, width)], None, left=left, width=width, **asked)

    def _call(
        self,
        walk: Walk,
        ids: Sequence[Tensor],
        spans: Sequence[Span],
        runs: Sequence[Run],
        width: int,
        cache: Any,
        wanted: Mapping[int, Sequence[int]],
        store: bool,
    ) -> None:
        rows = max(span.row for span in spans) + 1
        tokens = torch.full((rows, width), self.pad_token, dtype=torch.int64, device=self.device)
        targets = torch.zeros_like(tokens)
        for span, run in zip(spans, runs, strict=True):
            slots = span.row, slice(span.start, span.start + span.length)
            part = slice(run.position, run.position + span.length)
            tokens[slots], targets[slots] = ids[run.sample][part], ids[run.sample].roll(-1)[part]

        def capture(node: Node, grid: Tensor) -> None:
            self._seen(walk, node, grid, spans, runs, wanted, store)

        here = None if cache is None else cache.of(*(run.sample for run in runs))
        with torch.no_grad():
            found = self.forward(tokens, targets=targets, spans=spans, cache=here, capture=capture)
        values = [found[span.row, span.start : span.start + span.length] for span in spans]
        for run, found_here in zip(runs, values, strict=True):
            for step, value in enumerate(found_here.tolist()):
                walk.logprobs[run.sample, run.position + step] = value

    def forward(self, tokens: Tensor, **arguments: Any) -> Tensor:
        """The log-probs [B, T] of a call: a door for planted faults."""
        found = self.decoder(tokens, **arguments).logprobs
        assert found is not None
        return found  # type: ignore[no-any-return]

    def _seen(
        self,
        walk: Walk,
        node: Node,
        grid: Tensor,
        spans: Sequence[Span],
        runs: Sequence[Run],
        wanted: Mapping[int, Sequence[int]],
        store: bool,
    ) -> None:
        kept = store and node.layer is not None and node.name in (QUERY, ATTENTION, KEYS, VALUES)
        if walk.trace is None and not kept and node.name != LOGITS:
            return
        parts, placed, row = [], [], 0
        for span, run in zip(spans, runs, strict=True):
            part = grid[span.row, span.start : span.start + span.length]
            parts.append(part)
            placed.append(run._replace(row=row))
            row += span.length
            if node.name == LOGITS:
                for position in wanted.get(run.sample, ()):
                    if run.position <= position < run.position + span.length:
                        walk.logits[run.sample, position] = part[position - run.position].clone()
            if kept and node.name in (KEYS, VALUES):
                walk.written.setdefault((node.layer, run.sample, node.name), []).append(part.clone())
            elif kept:
                walk.last[node.layer, run.sample, node.name] = part[-1].clone()
        if walk.trace is not None:
            walk.trace.add(Key(node.layer, node.name, node.operator), placed, torch.cat(parts))
