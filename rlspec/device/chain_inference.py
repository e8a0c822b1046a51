"""The model as an inference engine runs it: prefill whole or in chunks, and token by token through a KV cache.

No graph, no accumulators: the parameters of the trained decoder, the operators of the arm, one call at a time. A run
(`Walk`) takes the samples of a decode case through the columns of their grid, a call for each piece of columns; what
stands in a slot of no sample is a pad token that no cache stores. Each token's log-prob is that of the next token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from operator import is_ as operator_is
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlspec.device import observe
from rlspec.device.chain_trace import Key, Trace
from rlspec.device.decoder import Decoder, Node, Site, Span, side_by_side
from rlspec.device.gradients import Run
from rlspec.device.kv_cache import ContiguousCache, PagedCache
from rlspec.device.operators import Operators, resolve
from rlspec.workloads import Sample

LOGITS, QUERY, ATTENTION = "lm_head", "self_attn.q_rope", "self_attn"
KEYS, VALUES = "self_attn.k_rope", "self_attn.v_proj"

# Implementations whose product of a row and a row of the weight depends on nothing else, so that weights whose rows
# follow one another may be multiplied as one.
APART = ("canonical", "triton", "cuda")
# What makes several operators at once, by implementation of all of them.
TOGETHER = {"triton": "rlspec.kernels.rms_norm", "cuda": "rlspec.device.cuda_rows"}
_JOINED = ("residual_add", "rms_norm", "qk_norm", "rope")
# What reads a weight at rest ahead of its turn, and multiplies gate and up and activates them at once.
PRODUCTS = {"triton": "rlspec.kernels.det_gemm", "cuda": "rlspec.device.cuda_gemm"}
# What reads keys and values at rest ahead of its turn.
CACHED = {"triton": "rlspec.kernels.attention"}
# Projections of the same rows, by the one that is called first.
_PROJECTIONS = {
    "self_attn.q_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_proj": ("mlp.gate_proj", "mlp.up_proj"),
}


class Ahead(NamedTuple):
    """The result of an operator call that is still to come: a kernel that was launched before made it too."""

    operator: str
    arguments: tuple[Tensor, ...]
    versions: tuple[int, ...]
    options: dict[str, Any]
    result: Tensor
    kernel: str | None

    @classmethod
    def of(
        cls, operator: str, arguments: tuple[Tensor, ...], result: Tensor, kernel: str | None, **options: Any
    ) -> Ahead:
        return cls(operator, arguments, tuple(one._version for one in arguments), options, result, kernel)

    def answers(self, operator: str, arguments: Sequence[Any], options: Mapping[str, Any]) -> bool:
        """Whether it is the result of just this call: on these tensors, none of them written to since."""
        same = len(arguments) == len(self.arguments) and all(map(operator_is, arguments, self.arguments))
        untouched = same and tuple(one._version for one in arguments) == self.versions
        return untouched and operator == self.operator and options == self.options


class InferenceDecoder(Decoder):
    """`Decoder` on the parameters of another one.

    Without gradients, projections of the same rows are one product, and where an implementation has a kernel for
    several operators, it runs at the first of them. Each is called through `operate` all the same, and shown: a call
    that is just the one that was foreseen gets the result that is there, any other is computed.
    """

    # Of a call under way: the module of kernels of several operators, that of products, that of attention if what
    # earlier calls wrote is at rest, whether products do gate and up at once, whether weights may be multiplied as one,
    # what is foreseen, by chunk, and the cache's keys and values of a layer into which the call's have just been put.
    _together: Any
    _products: Any
    _cached: Any
    _gated: bool
    _apart: bool
    _ahead: dict[int, list[Ahead]]
    _cache: Any
    _filled: tuple[tuple[Tensor, int], ...]

    @classmethod
    def of(cls, decoder: Decoder, operators: Operators) -> InferenceDecoder:
        made = cls(decoder.architecture, operators, dtype=decoder.dtype, device="meta")
        made.profile = decoder.profile
        for name, parameter in decoder.named_parameters():
            path, _, last = name.rpartition(".")
            made.get_submodule(path).register_parameter(last, parameter)
        return made

    def forward(self, tokens: Tensor, **options: Any) -> Any:
        stored = all(parameter.dtype == self.dtype for parameter in self.parameters())
        able = stored and not torch.is_grad_enabled()
        module = TOGETHER.get(self._shipped(*_JOINED) or "") if able else None
        products = PRODUCTS.get(self._shipped("det_gemm") or "")
        self._apart = able and self._shipped("det_gemm") in APART
        # What was written before the embedding's kernel is at rest behind it, as nothing overtakes that one; the table
        # of a call's segments, too, which a cache makes when the call begins.
        fenced = self._shipped("embedding") is not None
        cached = CACHED.get(self._shipped("attention") or "") if fenced else None
        modules = (import_module(one) if one else None for one in (module, products, cached))
        self._together, self._products, self._cached = modules
        self._gated = able and self.profile.swiglu and self._shipped("det_gemm", "swiglu") in PRODUCTS
        self._ahead, self._cache, self._filled = {}, options.get("cache"), ()
        try:
            # Weights that are used as they are.
            with self._weights_at_rest(fenced and stored and type(self).weight is Decoder.weight):
                return super().forward(tokens, **options)
        finally:
            self._together, self._products, self._cached = None, None, None
            self._gated, self._apart = False, False
            self._ahead, self._cache, self._filled = {}, None, ()

    def _weights_at_rest(self, rest: bool) -> AbstractContextManager[None]:
        return nullcontext() if self._products is None else self._products.weights_at_rest(rest)

    def _shipped(self, *operators: str) -> str | None:
        """The implementation of the catalogue that all of these run on; None if there is no such one."""
        names = {self.operators.implementations[operator] for operator in operators}
        name = names.pop()
        own = names or ":" in name
        own = own or any(getattr(self.operators, operator) is not resolve(operator, name) for operator in operators)
        return None if own else name

    def operate(self, at: Site, name: str, operator: str, *arguments: Any, **options: Any) -> Any:
        foreseen = self._ahead.get(at.chunk.index, [])
        for number, ahead in enumerate(foreseen):
            if ahead.answers(operator, arguments, options):
                observe.again(ahead.kernel, native=self.operators.implementations[operator] == "cuda")
                return foreseen.pop(number).result
        if operator == "residual_add" and self._together is not None and not options:
            return self._add(at, name, *arguments)
        if operator == "det_gemm" and self._apart and name in _PROJECTIONS and not options:
            return self._multiply(at, name, *arguments)
        if operator == "rms_norm":
            arguments = (arguments[0].to(self.dtype), *arguments[1:])
        with self._cache_at_rest(at, *arguments[1:3]) if operator == "attention" else nullcontext():
            return super().operate(at, name, operator, *arguments, **options)

    def _cache_at_rest(self, at: Site, *stores: Tensor) -> AbstractContextManager[None]:
        # Where a kernel has just put the call's keys and values, and torch nothing since, the others are of earlier
        # calls, unless they are the new ones of another segment.
        if self._cached is None or not self._filled or at.chunk.segments.keys_are_shared:
            return nullcontext()
        pairs = zip(stores, self._filled, strict=True)
        rest = all(_within(store, filled) and filled._version == version for store, (filled, version) in pairs)
        return self._cached.cache_at_rest() if rest else nullcontext()  # type: ignore[no-any-return]

    def _multiply(self, at: Site, name: str, x: Tensor, weight: Tensor) -> Tensor:
        """This product, those of the other projections of x, and swiglu of gate and up."""
        weights = [self.weight(f"model.layers.{at.layer}.{one}.weight") for one in _PROJECTIONS[name]]
        whole = side_by_side(weights) if weights[0] is weight else None
        if whole is None:
            return super().operate(at, name, "det_gemm", x, weight)  # type: ignore[no-any-return]
        both = self._products.gate_up(x, whole) if name == "mlp.gate_proj" and self._gated else None
        product = super().operate(at, name, "det_gemm", x, whole) if both is None else both[0]
        parts = product.split([len(one) for one in weights], -1)
        foreseen = zip(weights[1:], parts[1:], strict=True)
        self._ahead[at.chunk.index] = [Ahead.of("det_gemm", (x, one), part, None) for one, part in foreseen]
        if both is not None:
            self._ahead[at.chunk.index].append(Ahead.of("swiglu", parts, both[1], self._products.GATED))
        return parts[0]  # type: ignore[no-any-return]

    def _add(self, at: Site, name: str, residual: Tensor, x: Tensor) -> Tensor:
        """The sum, and the norm that reads it next."""
        assert at.layer is not None
        last = at.layer + 1 == self.architecture.num_hidden_layers
        if name == "self_attn.residual":
            norm = f"model.layers.{at.layer}.post_attention_layernorm"
        else:
            norm = "model.norm" if last else f"model.layers.{at.layer + 1}.input_layernorm"
        weight, options = self.weight(norm + ".weight"), self._norm_options
        made = self._together.residual_norm(residual, x, weight, **options)
        if made is None:
            return super().operate(at, name, "residual_add", residual, x)  # type: ignore[no-any-return]
        total, normal = made
        self._ahead[at.chunk.index] = [Ahead.of("rms_norm", (total, weight), normal, self._together.OF_SUM, **options)]
        return total

    def _read(self, x: Tensor) -> Tensor:
        foreseen = any(ahead.arguments[0] is x for several in self._ahead.values() for ahead in several)
        return x if foreseen else super()._read(x)

    def _rotate_both(self, at: Site, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        self._filled = ()
        if self._together is not None:
            weights = [self.weight(f"model.layers.{at.layer}.self_attn.{name}_norm.weight") for name in "qk"]
            options, tables, slots = self._norm_options, (at.chunk.cos, at.chunk.sin), self._slots(at, key, value)
            made = self._together.rotated_heads(query, key, *weights, *tables, value=value, slots=slots, **options)
            if made is not None:
                if slots is not None:
                    self._cache.stored(at.layer, made[3], value)
                    self._filled = tuple((one, one._version) for one in (slots.keys, slots.values))
                kernel, foreseen = self._together.ROTATED, []
                for x, weight, normed, rotated in zip((query, key), weights, made[:2], made[2:], strict=True):
                    foreseen.append(Ahead.of("qk_norm", (x, weight), normed, kernel, **options))
                    foreseen.append(Ahead.of("rope", (normed, *tables), rotated, kernel))
                self._ahead[at.chunk.index] = foreseen
        return super()._rotate_both(at, query, key, value)

    def _slots(self, at: Site, key: Tensor, value: Tensor) -> Any:
        """Where attention is going to store keys and values; None where it may do otherwise."""
        ask = getattr(self._cache, "slots", None)
        return None if ask is None or type(self).attend is not Decoder.attend else ask(at.layer, key, value)

    @property
    def _norm_options(self) -> dict[str, Any]:
        return {"eps": self.architecture.rms_norm_eps, "round_before_weight": not self.profile.norm_rounds_once}

    def _project(self, at: Site, name: str, x: Tensor) -> Tensor:
        # Attention, just before it, would wait for keys and values.
        if name == "self_attn.o_proj" and self._products is not None and self._products.MUCH_AHEAD:
            with self._weights_at_rest(False):
                return super()._project(at, name, x)
        return super()._project(at, name, x)


def _within(view: Tensor, store: Tensor) -> bool:
    """Whether a tensor begins in the memory of a dense one."""
    return 0 <= view.data_ptr() - store.data_ptr() < store.numel() * store.element_size()


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
        options["backend"] = self.decoder.operators.implementations["attention"]
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
        trace: bool | Trace = False,
    ) -> Walk:
        """Every piece of `columns` is one call; without a cache (None) there may be one piece alone.

        `wanted`: sample -> positions whose logits are kept. `store`: what went to the cache is kept too. `trace`: every
        node is digested, in one that is given or in a new one.
        """
        width = width or max(sample.length for sample in samples)
        starts = [width - sample.length if left else 0 for sample in samples]
        if trace is True:
            trace = Trace([sample.length for sample in samples], self.device)
        walk = Walk(trace or None)
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
