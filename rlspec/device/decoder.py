"""The decoder-only model of the Qwen3 family, dense and mixture-of-experts, assembled from the operator catalogue.

The embedded trainer trains it, chain specs run it at full size in every layout; both call `Decoder.forward`.

Rounding. Weights are cast to the working dtype where they are used (the masters may be fp32). In profile `ws1` the
residual stream is fp32, each norm reads it rounded to the working dtype; norms, rotation, SwiGLU and the sum over
experts are taken in fp32 and rounded once; projections and attention leave in the working dtype; router scores, logits
and log-probs are fp32. Profile `hf` rounds where transformers does: residual stream, norm before its weight, cosines
and sines, SiLU before its product, router logits and weights, logits. With working dtype fp32 the two are one.

Layouts. Tokens stand in a grid [B, T]; `spans` says which slots each sample takes: packed, padded left or right, one a
row. `chunk_size` cuts the columns: layers outside, chunks inside, as a training step must for one attention backward
per sample. Inference in chunks, and decode, call forward again with a cache.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from rlspec.architecture import Architecture
from rlspec.device.operators import Dispatch, Operators, Routing, Segment, Segments

_AS_THE_FIRST = ("rms_norm", "qk_norm", "rope", "silu", "swiglu", "residual_add", "attention")  # argument's form
_SAME_ROWS = re.compile(r"(?<=self_attn\.)[qkv]_proj|(?<=mlp\.)(?:gate|up)_proj")


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What is kept in fp32 where the alternative is the working dtype; `norm_rounds_once`: only after the weight."""

    residual: bool
    norm_rounds_once: bool
    rope_tables: bool
    swiglu: bool
    routing: bool
    logits: bool


PROFILES = {
    "ws1": Profile(residual=True, norm_rounds_once=True, rope_tables=True, swiglu=True, routing=True, logits=True),
    "hf": Profile(residual=False, norm_rounds_once=False, rope_tables=False, swiglu=False, routing=False, logits=False),
}


class Span(NamedTuple):
    """The slots of one sample: `length` of row `row` of the grid, from column `start`."""

    row: int
    start: int
    length: int


class Node(NamedTuple):
    """One operator call of the forward: `layer` None outside the layers, `name` as its parameter where it has one."""

    layer: int | None
    name: str
    operator: str
    chunk: int


Capture = Callable[[Node, Tensor], None]


class Cache(Protocol):
    """Keys and values of earlier calls."""

    def begin(self, spans: Sequence[Span], width: int) -> Segments:
        """Once a call: reserve the slots of its tokens, which stand in [B, width]."""
        ...

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Once a layer: take [B, T, Hkv, D] of this call, give [B, S, Hkv, D] of all, S the keys of the segments."""
        ...


@dataclass(frozen=True)
class RouterStatistics:
    """What a load-balance loss needs, by mixture-of-experts layer L and sample n of the spans; pads do not count.

    `counts` int64 [L, n, E]: choices of each expert. `probability_sums` fp32 [L, n, E]: the router's softmax summed
    over the sample's tokens, with gradient. `tokens`: tokens of each sample.
    """

    counts: Tensor
    probability_sums: Tensor
    tokens: tuple[int, ...]
    top_k: int


@dataclass(frozen=True)
class Output:
    """`logits` [B, T, V], or with targets `logprobs` fp32 [B, T]; `router` of a mixture of experts."""

    logits: Tensor | None
    logprobs: Tensor | None
    router: RouterStatistics | None


@dataclass(frozen=True)
class Part:
    """What of a model one process holds: a run of its layers, and of each layer's experts a run.

    The embedding belongs to the first layer, the last norm and the head to the last one.
    """

    layers: range
    experts: range

    @classmethod
    def whole(cls, model: Architecture) -> Part:
        return cls(range(model.num_hidden_layers), range(model.num_experts))

    def rows(self, name: str, model: Architecture) -> slice | None:
        """Which rows of a parameter are held, None for none of them."""
        path = name.split(".")
        if path[1] == "layers":
            held = int(path[2]) in self.layers
        else:
            held = self.layers.start == 0 if path[1] == "embed_tokens" else self.layers.stop == model.num_hidden_layers
        if not held:
            return None
        return slice(self.experts.start, self.experts.stop) if of_experts(name) else slice(None)


def of_experts(name: str) -> bool:
    """Whether a parameter is a stack of one matrix an expert."""
    return ".mlp.experts." in name


@dataclass(frozen=True)
class Chunk:
    """Columns [start, stop) of the grid, with what all layers share on them.

    `pieces`: (sample, columns of the chunk) for each sample that has tokens here. `choice`: see `force_balanced`.
    """

    index: int
    start: int
    stop: int
    pieces: tuple[tuple[int, Span], ...]
    segments: Segments
    cos: Tensor
    sin: Tensor
    choice: Tensor | None


@dataclass(frozen=True)
class Site:
    """Where in a forward an operator is called."""

    chunk: Chunk
    layer: int | None
    capture: Capture | None

    def named(self, name: str, operator: str) -> str:
        """As a message says which call this is."""
        return f"{name} ({operator})" if self.layer is None else f"layer {self.layer}, {name} ({operator})"

    def blame(self, name: str, operator: str, error: Exception) -> None:
        """Have the error of a call say where that was; another one raised from it would hide the operator's frames."""
        if len(error.args) <= 1:
            error.args = (f"{self.named(name, operator)}: {error}",)

    def show(self, name: str, operator: str, tensor: Tensor) -> None:
        if self.capture is not None:
            self.capture(Node(self.layer, name, operator, self.chunk.index), tensor)


class Decoder(nn.Module):
    """Parameters are named as in transformers (see `Architecture.parameter_shapes`) and start uninitialised.

    `part`: what this process holds, by default all. Only `rlspec.device.parallel` can run less.
    """

    def __init__(
        self,
        architecture: Architecture,
        operators: Operators,
        *,
        dtype: torch.dtype = torch.bfloat16,
        master_dtype: torch.dtype = torch.float32,
        profile: str = "ws1",
        device: torch.device | str = "cpu",
        part: Part | None = None,
    ) -> None:
        super().__init__()
        if profile not in PROFILES:
            raise ValueError(f"unknown rounding profile {profile!r}; known: {', '.join(PROFILES)}")
        self.architecture = architecture
        self.operators = operators
        self.dtype = dtype
        self.profile = PROFILES[profile]
        self.part = part or Part.whole(architecture)
        self._allocate(master_dtype, device)

    def _allocate(self, dtype: torch.dtype, device: torch.device | str) -> None:
        """Parameters that meet the same rows lie one behind the other in one storage: see `side_by_side`.

        A copy of the module, or `.to` another device, takes them apart, which costs speed and nothing else.
        """
        shapes = self.architecture.parameter_shapes()
        for names in _neighbours(shapes):
            held = [(name, self.part.rows(name, self.architecture)) for name in names]
            counts = {name: len(range(shapes[name][0])[rows]) for name, rows in held if rows is not None}
            if counts:
                whole = torch.empty(sum(counts.values()), *shapes[names[0]][1:], dtype=dtype, device=device)
                for name, part in zip(counts, whole.split(list(counts.values())), strict=True):
                    _place(self, name, nn.Parameter(part))

    def to_empty(self, *, device: torch.device | str | int | None, recurse: bool = True) -> Decoder:
        """As of any module, with neighbours in one storage."""
        before = dict(self.named_parameters())
        assert recurse and device is not None
        self._allocate(next(iter(before.values())).dtype, torch.device(device))
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(before[name].requires_grad)
        return self

    def initialise(self, seed: int) -> None:
        """Normal(0, initializer_range), o and down ÷ √(2·layers), norms 1; the same values on every device.

        The whole model is drawn wherever a part of it is held, so a weight does not depend on how it is laid out.
        """
        generator = torch.Generator("cpu").manual_seed(seed)
        deviation = self.architecture.initializer_range
        into_stream = deviation / math.sqrt(2 * self.architecture.num_hidden_layers)
        with torch.no_grad():
            for name, shape, parameter, rows in self.laid_out():
                if len(shape) > 1:
                    spread = into_stream if "o_proj" in name or "down_proj" in name else deviation
                    drawn = torch.empty(shape).normal_(0, spread, generator=generator)
                if parameter is not None:
                    parameter.copy_(drawn[rows]) if len(shape) > 1 else parameter.fill_(1)

    def laid_out(self) -> Iterator[tuple[str, tuple[int, ...], nn.Parameter | None, slice | None]]:
        """Of each parameter of the whole model name and shape, and what is held of it with its rows, or None twice."""
        for name, shape in self.architecture.parameter_shapes().items():
            rows = self.part.rows(name, self.architecture)
            yield name, shape, None if rows is None else self.get_parameter(name), rows

    def forward(
        self,
        tokens: Tensor,
        *,
        targets: Tensor | None = None,
        spans: Sequence[Span] | None = None,
        positions: Tensor | None = None,
        chunk_size: int | None = None,
        cache: Cache | None = None,
        force_balanced: bool = False,
        capture: Capture | None = None,
    ) -> Output:
        """Logits of `tokens` int64 [B, T], or with `targets` int64 [B, T] the log-prob of each slot's target.

        `spans`: default one sample a row. `positions` int64 [B, T]: default counted from each sample's first token.
        `force_balanced` sends slot t of the grid, choice j to expert (t + j·(E // k)) mod E. `capture` gets the result
        of each operator call as [B, columns of the chunk, ...]. What stands in the slots of pads is not defined.
        Raises ValueError for shapes, dtypes, spans and combinations that do not fit.
        """
        _check_inputs(tokens, targets=targets, positions=positions)
        if cache is not None and chunk_size is not None:
            raise ValueError("with a cache, each chunk is a call of its own: leave out chunk_size")
        spans = [Span(row, 0, tokens.shape[1]) for row in range(tokens.shape[0])] if spans is None else list(spans)
        chunks = self._chunks(tokens, spans, positions, chunk_size, cache, force_balanced)

        outside = [Site(chunk, None, capture) for chunk in chunks]
        streams, routed = self._layers(chunks, self._embed(outside, tokens), cache, capture)
        head = torch.cat([self._head(at, x, targets) for at, x in zip(outside, streams, strict=True)], 1)
        router = self._statistics(chunks, spans, routed) if self.architecture.num_experts else None
        return Output(head, None, router) if targets is None else Output(None, head, router)

    def operate(self, at: Site, name: str, operator: str, *arguments: Any, **options: Any) -> Any:
        """The one door to the operators, for harnesses that own weight gradients or plant faults to override."""
        try:
            made = getattr(self.operators, operator)(*arguments, **options)
            if ":" in self.operators.implementations[operator]:  # one of the user's own
                check_result(operator, made, arguments, options)
            return made
        except Exception as error:
            at.blame(name, operator, error)
            raise

    def attend(
        self, sites: Sequence[Site], parts: Sequence[tuple[Tensor, Tensor, Tensor]], cache: Cache | None
    ) -> list[Tensor]:
        """Attention of one layer: query, key, value of each chunk -> [B, columns, Hq, D] of each chunk."""
        attended = []
        for at, (query, key, value) in zip(sites, parts, strict=True):
            if cache is not None:
                assert at.layer is not None
                key, value = cache.extend(at.layer, key, value)
            elif at.chunk.index:
                key, value = (torch.cat([part[slot] for part in parts[: at.chunk.index + 1]], 1) for slot in (1, 2))
            scale = self.architecture.head_dim**-0.5
            out = self._run(at, "self_attn", "attention", query, key, value, at.chunk.segments, scale=scale)
            attended.append(out)
        return attended

    def weight(self, name: str) -> Tensor:
        """A parameter in the working dtype."""
        return self.get_parameter(name).to(self.dtype)

    def _embed(self, outside: Sequence[Site], tokens: Tensor) -> list[Tensor]:
        table, streams = self.weight("model.embed_tokens.weight"), []
        for at in outside:
            x = self._run(at, "model.embed_tokens", "embedding", tokens[:, at.chunk.start : at.chunk.stop], table)
            streams.append(x.to(self._kept(self.profile.residual)))
        return streams

    def _layers(
        self, chunks: Sequence[Chunk], streams: list[Tensor], cache: Cache | None, capture: Capture | None
    ) -> tuple[list[Tensor], list[list[Routing]]]:
        routed: list[list[Routing]] = []
        for layer in self.part.layers:
            sites = [Site(chunk, layer, capture) for chunk in chunks]
            streams = self._attention(sites, streams, cache)
            streams, routings = self._feed_forward(sites, streams)
            routed.append(routings)
        return streams, routed

    def _attention(self, sites: list[Site], streams: list[Tensor], cache: Cache | None) -> list[Tensor]:
        parts = []
        for at, x in zip(sites, streams, strict=True):
            normal = self._norm(at, "input_layernorm", x)
            query, key, value = (self._project(at, f"self_attn.{name}_proj", normal) for name in "qkv")
            query, key, value = (y.unflatten(-1, (-1, self.architecture.head_dim)) for y in (query, key, value))
            parts.append((*self._rotate_both(at, query, key, value), value))
        result = []
        for at, x, y in zip(sites, streams, self.attend(sites, parts, cache), strict=True):
            y = self._project(at, "self_attn.o_proj", y.flatten(-2))
            result.append(self._run(at, "self_attn.residual", "residual_add", x, y))
        return result

    def _feed_forward(self, sites: list[Site], streams: list[Tensor]) -> tuple[list[Tensor], list[Routing]]:
        result, routings = [], []
        for at, x in zip(sites, streams, strict=True):
            normal = self._norm(at, "post_attention_layernorm", x)
            if self.architecture.num_experts:
                y, routing = self._experts(at, normal)
                routings.append(routing)
            else:
                gate, up = (self._project(at, f"mlp.{name}_proj", normal) for name in ("gate", "up"))
                activated = self._activate(at, gate, up)
                at.show("mlp.act", "swiglu", activated)
                y = self._project(at, "mlp.down_proj", activated)
            result.append(self._run(at, "mlp.residual", "residual_add", x, y))
        return result, routings

    def _experts(self, at: Site, x: Tensor) -> tuple[Tensor, Routing]:
        model, grid, prefix = self.architecture, x.shape[:2], f"model.layers.{at.layer}.mlp."
        rows = x.flatten(0, 1)
        routing: Routing = self.operate(
            at, "mlp.gate", "router", rows, self.weight(prefix + "gate.weight"),
            top_k=model.num_experts_per_tok, normalise=model.norm_topk_prob,
            logits_dtype=self._kept(self.profile.routing), choice=at.chunk.choice,
        )  # fmt: skip
        dispatch = Dispatch.of(routing.experts, model.num_experts)
        both, activated, down = self._through_experts(at, rows[dispatch.tokens], dispatch)
        weights = routing.weights.to(self._kept(self.profile.routing))
        combined: Tensor = self.operate(at, "mlp.experts", "combine", down, weights, dispatch).unflatten(0, grid)
        if at.capture is not None:
            at.show("mlp.gate", "router", routing.probabilities.unflatten(0, grid))
            at.show("mlp.gate.choice", "router", routing.experts.unflatten(0, grid))
            for name, operator, ordered in (
                ("mlp.experts.gate_up_proj", "grouped_gemm", both),
                ("mlp.experts.act", "swiglu", activated),
                ("mlp.experts.down_proj", "grouped_gemm", down),
            ):
                at.show(name, operator, ordered[dispatch.inverse].unflatten(0, (*grid, model.num_experts_per_tok)))
            at.show("mlp.experts", "combine", combined)
        return combined, routing

    def _through_experts(self, at: Site, rows: Tensor, dispatch: Dispatch) -> tuple[Tensor, Tensor, Tensor]:
        """[M, H] in the order of dispatch -> gate above up, their activation, and the down projection [M, H]."""

        def product(name: str, operand: Tensor) -> Tensor:
            weight = self.weight(f"model.layers.{at.layer}.mlp.experts.{name}")
            return self.operate(at, f"mlp.experts.{name}", "grouped_gemm", operand, weight, dispatch)  # type: ignore[no-any-return]

        both = product("gate_up_proj", rows)
        activated = self._activate(at, *both.chunk(2, -1))
        return both, activated, product("down_proj", activated)

    def _head(self, at: Site, x: Tensor, targets: Tensor | None) -> Tensor:
        normal = self._norm(at, "model.norm", x)
        tied = self.architecture.tie_word_embeddings
        weight = self.weight("model.embed_tokens.weight" if tied else "lm_head.weight")
        logits = self._run(at, "lm_head", "lm_head", normal, weight, out_dtype=self._kept(self.profile.logits))
        if targets is None:
            return logits
        return self._run(at, "logprob", "logprob", logits, targets[:, at.chunk.start : at.chunk.stop])

    def _run(self, at: Site, name: str, operator: str, *arguments: Any, **options: Any) -> Tensor:
        result: Tensor = self.operate(at, name, operator, *arguments, **options)
        at.show(name, operator, result)
        return result

    def _norm(self, at: Site, name: str, x: Tensor, operator: str = "rms_norm") -> Tensor:
        full = name if at.layer is None else f"model.layers.{at.layer}.{name}"
        early = not self.profile.norm_rounds_once
        eps, weight = self.architecture.rms_norm_eps, self.weight(full + ".weight")
        return self._run(at, name, operator, self._read(x), weight, eps=eps, round_before_weight=early)

    def _read(self, x: Tensor) -> Tensor:
        """What a norm reads of the residual stream."""
        return x.to(self.dtype)

    def _project(self, at: Site, name: str, x: Tensor) -> Tensor:
        return self._run(at, name, "det_gemm", x, self.weight(f"model.layers.{at.layer}.{name}.weight"))

    def _rotate_both(self, at: Site, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Query and key; `value` is there for one who stores it together with the key."""
        return self._rotate(at, "q", query), self._rotate(at, "k", key)

    def _rotate(self, at: Site, name: str, x: Tensor) -> Tensor:
        normal = self._norm(at, f"self_attn.{name}_norm", x, "qk_norm")
        return self._run(at, f"self_attn.{name}_rope", "rope", normal, at.chunk.cos, at.chunk.sin)

    def _activate(self, at: Site, gate: Tensor, up: Tensor) -> Tensor:
        if self.profile.swiglu:
            return self.operate(at, "mlp.act", "swiglu", gate, up)  # type: ignore[no-any-return]
        return self.operate(at, "mlp.act", "silu", gate) * up  # type: ignore[no-any-return]

    def _kept(self, wide: bool) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32) if wide else self.dtype

    def _chunks(
        self,
        tokens: Tensor,
        spans: Sequence[Span],
        positions: Tensor | None,
        size: int | None,
        cache: Cache | None,
        force_balanced: bool,
    ) -> list[Chunk]:
        rows, width = tokens.shape
        if size is not None and size < 1:
            raise ValueError(f"chunk_size {size} must be at least 1")
        # Also checks the spans, which a chunk would cut to fit.
        entries = tuple(Segment(row, start, length, start, length) for row, start, length in spans)
        whole = Segments(entries, rows, width, width, tokens.device)
        balanced = self._balanced(rows, width, tokens.device) if force_balanced else None
        chunks = []
        for index, start in enumerate(range(0, width, size or width)):
            stop = min(start + (size or width), width)
            pieces = _cut(spans, start, stop)
            if cache is not None:
                segments = cache.begin(spans, width)
            elif stop - start == width:
                segments = whole
            else:
                segments = _growing(pieces, spans, rows, start, stop, tokens.device)
            places = segments.positions if positions is None else positions[:, start:stop]
            cos, sin = rope_tables(places, self.architecture, self._kept(self.profile.rope_tables))
            choice = None if balanced is None else balanced[:, start:stop].flatten(0, 1)
            chunks.append(Chunk(index, start, stop, pieces, segments, cos, sin, choice))
        return chunks

    def _balanced(self, rows: int, width: int, device: torch.device) -> Tensor | None:
        experts, top_k = self.architecture.num_experts, self.architecture.num_experts_per_tok
        if not experts:
            raise ValueError("force_balanced needs a mixture of experts, and this model is dense")
        slots = torch.arange(rows * width, device=device).reshape(rows, width, 1)
        return (slots + torch.arange(top_k, device=device) * (experts // top_k)) % experts

    def _statistics(
        self, chunks: Sequence[Chunk], spans: Sequence[Span], routed: Sequence[Sequence[Routing]]
    ) -> RouterStatistics:
        counts, sums = [], []
        for routings in routed:
            chosen_here: list[list[Tensor]] = [[] for _ in spans]
            scores_here: list[list[Tensor]] = [[] for _ in spans]
            for chunk, routing in zip(chunks, routings, strict=True):
                grid = (chunk.segments.rows, chunk.stop - chunk.start)
                scores = routing.probabilities.unflatten(0, grid)
                chosen = torch.zeros_like(scores, dtype=torch.int64).scatter(-1, routing.experts.unflatten(0, grid), 1)
                for sample, (row, start, length) in chunk.pieces:
                    chosen_here[sample].append(chosen[row, start : start + length].sum(0))
                    scores_here[sample].append(scores[row, start : start + length].sum(0))
            counts.append(torch.stack([torch.stack(each).sum(0) for each in chosen_here]))
            sums.append(torch.stack([torch.stack(each).sum(0) for each in scores_here]))
        lengths = tuple(span.length for span in spans)
        return RouterStatistics(torch.stack(counts), torch.stack(sums), lengths, self.architecture.num_experts_per_tok)


def check_result(operator: str, made: Any, arguments: Sequence[Any], options: Mapping[str, Any]) -> None:
    """ValueError for a result that the next operator would be blamed for: of another type, dtype or shape than due."""
    due = _due(operator, arguments, options)
    if due is None:
        return
    if not isinstance(made, Tensor):
        raise ValueError(f"the result is a {type(made).__name__}, a tensor is due")
    shape, dtype = due
    if made.dtype != dtype:
        raise ValueError(f"the result is in {_plain(made.dtype)}, {_plain(dtype)} is due")
    if made.shape != shape:
        raise ValueError(f"the result has shape {list(made.shape)}, {list(shape)} is due")


def _due(
    operator: str, arguments: Sequence[Any], options: Mapping[str, Any]
) -> tuple[tuple[int, ...], torch.dtype] | None:
    """Shape and dtype of a result, where the arguments alone give both."""
    if operator in _AS_THE_FIRST:
        return arguments[0].shape, arguments[0].dtype
    if operator == "embedding":
        return (*arguments[0].shape, arguments[1].shape[1]), arguments[1].dtype
    if operator in ("det_gemm", "lm_head"):
        return (*arguments[0].shape[:-1], arguments[1].shape[0]), options.get("out_dtype", arguments[0].dtype)
    return (arguments[1].shape, torch.float32) if operator == "logprob" else None


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def rope_tables(positions: Tensor, model: Architecture, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """int64 [B, T] -> cosines and sines [B, T, D/2]: angle position · theta^(-2i/D), in fp32, rounded to `dtype`."""
    angles = positions.unsqueeze(-1).float() * _frequencies(model.head_dim, model.rope_theta, positions.device)
    return angles.cos().to(dtype), angles.sin().to(dtype)


@cache
def _frequencies(head_dim: int, theta: float, device: torch.device) -> Tensor:
    """fp32 [D/2], kept: a copy to the device in each call would be a wait, and none may be captured in a graph."""
    # On the CPU and in fp32, as transformers: another device's power would move the angles of late positions.
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return (1.0 / theta**exponents).to(device)


def _cut(spans: Sequence[Span], start: int, stop: int) -> tuple[tuple[int, Span], ...]:
    pieces = []
    for sample, (row, first, length) in enumerate(spans):
        begin, end = max(first, start), min(first + length, stop)
        if begin < end:
            pieces.append((sample, Span(row, begin - start, end - begin)))
    return tuple(pieces)


def _growing(
    pieces: Sequence[tuple[int, Span]], spans: Sequence[Span], rows: int, start: int, stop: int, device: torch.device
) -> Segments:
    entries = []
    for sample, (row, column, length) in pieces:
        first = spans[sample].start
        entries.append(Segment(row, column, length, first, start + column + length - first))
    return Segments(tuple(entries), rows, stop - start, stop, device)


def _check_inputs(tokens: Tensor, **others: Tensor | None) -> None:
    if tokens.dim() != 2 or tokens.dtype != torch.int64 or not tokens.numel():
        raise ValueError(f"tokens must be int64 [rows, columns], not {tokens.dtype} {list(tokens.shape)}")
    for name, other in others.items():
        if other is not None and (other.shape != tokens.shape or other.dtype != torch.int64):
            raise ValueError(f"{name} must be int64 {list(tokens.shape)}, not {other.dtype} {list(other.shape)}")


def side_by_side(tensors: Sequence[Tensor]) -> Tensor | None:
    """Matrices with rows of one length, whose rows follow one another in one storage, as one matrix; else None."""
    first = tensors[0]
    place = first.storage_offset()
    for one in tensors:
        together = one.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (together and one.is_contiguous() and one.storage_offset() == place and one.dtype == first.dtype):
            return None
        place += one.numel()
    rows, width = sum(len(one) for one in tensors), first.shape[1]
    return first.detach().as_strided((rows, width), (width, 1), first.storage_offset())


def _neighbours(names: Iterable[str]) -> Iterator[list[str]]:
    """The names in their order; those whose parameters are multiplied with the same rows are together."""
    for _, group in itertools.groupby(names, partial(_SAME_ROWS.sub, "*")):
        yield list(group)


def _place(root: nn.Module, name: str, parameter: nn.Parameter) -> None:
    *path, last = name.split(".")
    for step in path:
        if step not in root._modules:
            root.add_module(step, nn.Module())
        root = root.get_submodule(step)
    root.register_parameter(last, parameter)
