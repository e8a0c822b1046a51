"""What a chain spec asks of a model and a workload: cells, executions, and every comparison that is due.

Plain integers, no torch: the device derives what it runs from here and the host what it must find, so that a row that
is missing is seen. Cells are of training. Layouts are those of a trainer: one sample a row, padded to the longest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from rlspec.device import architecture
from rlspec.layouts import CANONICAL, Call, Layout, Run, restore
from rlspec.workloads import Chain, Decode, Sample, Tier, Workload

INVARIANCE = ("forward_invariance", "gradient_invariance")
ACCURACY = ("forward_accuracy", "gradient_accuracy")
STATEFUL = ("train_inference_parity", "decode_prefill", "kv_cache")
JUDGMENTS = ("forward_accuracy", "forward_invariance", "gradient_accuracy", "gradient_invariance", *STATEFUL)
ONLY_GRADIENTS = "BN/micro_batches"
CELLS = (
    *("B1/full", "BN/chunked", "B1/chunked", "BN/padded_right", "BN/padded_left", "BN/permuted", "BN/packed"),
    ONLY_GRADIENTS,
)
CACHES = ("contiguous", "paged")
RESCORE = "B1/rescore"
EXECUTIONS = (RESCORE, "B1/decode", "B1/paged", "B1/chunked", "BN/decode")  # of inference
PREFIX = "prefixes"
SUBJECT = "chain"  # of the contracts' rows for a whole model
REFERENCE, PLAIN = "reference", "torch"  # the runs that accuracy is measured by
FAMILIES = ("qwen3", "qwen3_moe")
NAMES = {  # in a model entry, and in a config.json
    "layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocabulary_size": "vocab_size",
    "tie_word_embeddings": "tie_word_embeddings",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One way to lay out the samples of the tier for training; `chunk` cuts the columns, 0 does not."""

    name: str
    layout: Layout
    chunk: int = 0

    @property
    def digest(self) -> str:
        """Two cells that agree in it would compare a thing with itself."""
        return hashlib.sha256(f"{self.layout.digest} {self.chunk}".encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What the host must know of a model: enough for the shapes of its parameters and of its cache."""

    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary_size: int
    tied: bool
    experts: int
    expert_size: int

    @property
    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every trainable tensor, in the order of the forward, named as in transformers."""
        hidden, queries, keys = self.hidden_size, self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (queries, hidden),
            "self_attn.k_proj.weight": (keys, hidden),
            "self_attn.v_proj.weight": (keys, hidden),
            "self_attn.q_norm.weight": (self.head_dim,),
            "self_attn.k_norm.weight": (self.head_dim,),
            "self_attn.o_proj.weight": (hidden, queries),
            "post_attention_layernorm.weight": (hidden,),
        }
        if self.experts:
            layer |= {
                "mlp.gate.weight": (self.experts, hidden),
                "mlp.experts.gate_up_proj": (self.experts, 2 * self.expert_size, hidden),
                "mlp.experts.down_proj": (self.experts, hidden, self.expert_size),
            }
        else:
            layer |= {
                "mlp.gate_proj.weight": (self.intermediate_size, hidden),
                "mlp.up_proj.weight": (self.intermediate_size, hidden),
                "mlp.down_proj.weight": (hidden, self.intermediate_size),
            }
        made: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocabulary_size, hidden)}
        for index in range(self.layers):
            made |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
        made["model.norm.weight"] = (hidden,)
        if not self.tied:
            made["lm_head.weight"] = (self.vocabulary_size, hidden)
        return made

    @property
    def count(self) -> int:
        """Elements of all parameters."""
        return sum(map(prod, self.parameters.values()))


def sizes(model: Mapping[str, Any]) -> Sizes:
    """From a model entry or a config.json. Raises ValueError for a family, a size or a key that the decoder has not."""
    if model.get("model_type", FAMILIES[0]) not in FAMILIES:
        raise ValueError(f"it is of type {model['model_type']}; our decoder runs {' and '.join(FAMILIES)}")
    found = {ours: model.get(ours, model.get(theirs)) for ours, theirs in NAMES.items()}
    experts = model.get("experts") or {}
    count = experts.get("count", model.get("num_experts", 0)) or 0
    needed = {"layers", "hidden_size", "heads", "kv_heads", "head_dim", "vocabulary_size"}
    needed |= set() if count else {"intermediate_size"}
    if missing := sorted(name for name in needed if not isinstance(found[name], int)):
        raise ValueError(f"it does not say its {', '.join(missing)}")
    architecture.read(model)
    return Sizes(
        layers=found["layers"],
        hidden_size=found["hidden_size"],
        intermediate_size=found["intermediate_size"] or 0,
        heads=found["heads"],
        kv_heads=found["kv_heads"],
        head_dim=found["head_dim"],
        vocabulary_size=found["vocabulary_size"],
        tied=bool(found["tie_word_embeddings"]),
        experts=count,
        expert_size=experts.get("intermediate_size", model.get("moe_intermediate_size", 0)) or 0,
    )


# Cells of training


def asked(workload: Workload) -> Chain:
    """The chain part of a workload. Raises ValueError where it has none."""
    if workload.chain is None:
        raise ValueError("it has no part `chain:`, which names decode cases and micro-batches")
    return workload.chain


def cells(chain: Chain, names: Sequence[str] = ()) -> tuple[Cell, ...]:
    """The canonical cell, then the others in order; `names` keeps only these of them.

    Raises ValueError for a cell that does not restore, and for two that are the same layout.
    """
    tier = chain.tier
    if short := [sample.id for sample in tier.samples if sample.first or not 0 < sample.prompt < sample.length]:
        raise ValueError(f"sample {short[0]} needs a prompt, active tokens behind it, and all queries")
    wanted = names or chain.cells or tuple(name for name in CELLS if name != ONLY_GRADIENTS or chain.micro_batches)
    made = [Cell(name=CANONICAL, layout=Layout(name=CANONICAL, calls=tuple(_rows(tier))))]
    made += [_cell(chain, name) for name in CELLS if name in wanted]
    seen: dict[str, str] = {}
    for cell in made:
        restore(cell.layout, tier)
        if cell.digest in seen:
            raise ValueError(f"the cells {cell.name} and {seen[cell.digest]} are the same layout")
        seen[cell.digest] = cell.name
    return tuple(made)


def _cell(chain: Chain, name: str) -> Cell:
    tier = chain.tier
    everyone = [[index] for index in range(len(tier.samples))]
    if name.endswith("chunked") and not 0 < tier.chunk < max(sample.length for sample in tier.samples):
        raise ValueError(f"chunk {tier.chunk} splits no sample")
    if name.startswith("B1"):
        calls = [_call(tier, [row]) for row in everyone]
    elif name == "BN/padded_right" or name == "BN/padded_left":
        calls = [_call(tier, everyone, width=tier.padded_length, left=name.endswith("left"))]
    elif name == "BN/permuted":
        if sorted(tier.permutation) != list(range(len(tier.samples))):
            raise ValueError(f"{list(tier.permutation)} is no permutation of the samples")
        calls = [_call(tier, [[index] for index in tier.permutation])]
    elif name == "BN/packed":
        calls = [_call(tier, [[index for row in everyone for index in row]])]
    elif name == ONLY_GRADIENTS:
        calls = [_call(tier, [[index] for index in batch]) for batch in _batches(chain)]
    else:
        calls = _rows(tier)
    chunk = tier.chunk if name.endswith("chunked") else 0
    return Cell(name=name, layout=Layout(name=name, calls=tuple(calls)), chunk=chunk)


def _rows(tier: Tier) -> list[Call]:
    return [_call(tier, [[index] for index in range(len(tier.samples))])]


def _batches(chain: Chain) -> list[list[int]]:
    places = {sample.id: index for index, sample in enumerate(chain.tier.samples)}
    named = [name for batch in chain.micro_batches for name in batch]
    if named != list(places):
        held = ", ".join(named) or "nothing"
        raise ValueError(f"the micro-batches hold {held}, not the samples of the tier in order")
    return [[places[name] for name in batch] for batch in chain.micro_batches]


def _call(tier: Tier, rows: Sequence[Sequence[int]], *, width: int = 0, left: bool = False) -> Call:
    """Samples by row of a grid, packed where several stand in one."""
    lengths = [sample.length for sample in tier.samples]
    longest = max(sum(lengths[index] for index in row) for row in rows)
    if width and width <= longest:
        raise ValueError(f"padded_length {width} leaves the longest sample, {longest}, without pads")
    width, runs = width or longest, []
    for number, row in enumerate(rows):
        column = width - sum(lengths[index] for index in row) if left else 0
        for index in row:
            runs.append(Run(index, 0, lengths[index], number, column))
            column += lengths[index]
    return Call(rows=len(rows), width=width, runs=tuple(runs), key_width=width, key_runs=tuple(runs))


def accuracy_cells(chosen: Sequence[Cell]) -> tuple[str, ...]:
    """The cells whose error is measured: the canonical one, and the packed one as the farthest from it."""
    return tuple(cell.name for cell in chosen if cell.name in (CANONICAL, "BN/packed"))


# Inference


def decoded(case: Decode) -> list[tuple[int, list[int]]]:
    """(sample of the case, its positions that are decoded one by one), ascending."""
    return [
        (index, [p for p in (case.positions or range(sample.length)) if p < sample.length])
        for index, sample in enumerate(case.samples)
    ]


def columns(case: Decode) -> list[tuple[int, int]]:
    """The columns of each call in order: one for a decoded position, as many as lie between for a chunk."""
    single = {
        position + (case.width - case.samples[index].length if case.left else 0)
        for index, positions in decoded(case)
        for position in positions
    }
    cuts = sorted({0, case.width, *single, *(column + 1 for column in single)})
    return [(start, stop) for start, stop in zip(cuts, cuts[1:], strict=False)]


def prefixes(chain: Chain, case: Decode) -> list[tuple[int, int]]:
    """(sample of the case, length of a prefix that is prefilled by itself), ascending."""
    near = {1} | {edge + step for edge in chain.edges for step in (-1, 0, 1)}
    return [
        (index, length)
        for index, sample in enumerate(case.samples)
        for length in sorted({*near, sample.prompt or 1})
        if 0 < length <= sample.length
    ]


def generation(chain: Chain, samples: Sequence[Sample], *, chunk: int = 0) -> list[tuple[int, int]]:
    """The columns of each call: the prompts (those of all samples), whole or in chunks, then token by token.

    Where not every token is generated by itself, the rest is one chunk.
    """
    prompt, width = min(sample.prompt for sample in samples), max(sample.length for sample in samples)
    last = min(prompt + chain.generated, width) if chain.generated else width
    ordered = sorted({0, width, *range(prompt, last + 1), *(range(0, prompt, chunk) if chunk else ())})
    return [(start, stop) for start, stop in zip(ordered, ordered[1:], strict=False)]


# What must be there


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """One comparison: of `tensor` in `configuration` with `against`."""

    judgment: str
    configuration: str
    tensor: str
    shape: tuple[int, ...]
    against: str
    accuracy: bool = False

    @property
    def key(self) -> tuple[str, str, str]:
        return self.judgment, self.configuration, self.tensor


def expected(chain: Chain, model: Sizes, judgments: Sequence[str], names: Sequence[str] = ()) -> Iterator[Expected]:
    """Every comparison that an arm must hold, in order; log-probs of train_inference_parity stand by themselves."""
    chosen = cells(chain, names)
    active = (chain.tier.active,)
    for cell in chosen[1:]:
        if "forward_invariance" in judgments and cell.name != ONLY_GRADIENTS:
            yield _same("forward_invariance", cell.name, "logprob", active)
        if "gradient_invariance" in judgments:
            for name, shape in model.parameters.items():
                yield _same("gradient_invariance", cell.name, name, shape)
    for name in accuracy_cells(chosen):
        if "forward_accuracy" in judgments:
            yield _near("forward_accuracy", name, "logprob", active)
        if "gradient_accuracy" in judgments:
            for parameter, shape in model.parameters.items():
                yield _near("gradient_accuracy", name, parameter, shape)
    if "decode_prefill" in judgments:
        yield from _decode_prefill(chain, model)
    if "kv_cache" in judgments:
        yield from _kv_cache(chain, model)


def _same(judgment: str, configuration: str, tensor: str, shape: tuple[int, ...], against: str = CANONICAL) -> Expected:
    return Expected(judgment=judgment, configuration=configuration, tensor=tensor, shape=shape, against=against)


def _near(judgment: str, configuration: str, tensor: str, shape: tuple[int, ...]) -> Expected:
    return replace(_same(judgment, configuration, tensor, shape, REFERENCE), accuracy=True)


def _decode_prefill(chain: Chain, model: Sizes) -> Iterator[Expected]:
    for case in chain.decode:
        count = sum(len(positions) for _, positions in decoded(case))
        for cache in CACHES:
            shape = (count, model.vocabulary_size)
            yield _same("decode_prefill", f"{case.name}/{cache}", "logits", shape, "prefill")
        shape = (len(prefixes(chain, case)), model.vocabulary_size)
        yield _same("decode_prefill", f"{case.name}/{PREFIX}", "logits", shape, "prefill")


def _kv_cache(chain: Chain, model: Sizes) -> Iterator[Expected]:
    for case in chain.decode:
        for cache in CACHES:
            place, count = f"{case.name}/{cache}", len(case.samples)
            tokens = sum(sample.length for sample in case.samples)
            stored = (model.layers, tokens, model.kv_heads, model.head_dim)
            attended = (model.layers, count, model.heads, model.head_dim)
            yield _same("kv_cache", place, "keys", stored, "written")
            yield _same("kv_cache", place, "values", stored, "written")
            yield _same("kv_cache", place, "cursor", (count,), "tokens")
            yield _same("kv_cache", place, "strays", (1,), "none")
            yield _same("kv_cache", place, "attention", attended, "direct")
            yield _near("kv_cache", place, "attention", attended)
    tokens = sum(sample.length for sample in chain.tier.samples)
    stored = (model.layers, tokens, model.kv_heads, model.head_dim)
    for cache in CACHES:
        for tensor in ("keys", "values"):
            yield _same("kv_cache", f"chunked/{cache}", tensor, stored, "once")


def executions(judgments: Sequence[str]) -> tuple[str, ...]:
    """The runs whose log-probs must be there."""
    training = (CANONICAL,) if {*INVARIANCE, *ACCURACY, STATEFUL[0]} & set(judgments) else ()
    yardsticks = (REFERENCE, PLAIN) if set(ACCURACY) & set(judgments) else ()
    return (*training, *yardsticks, *(EXECUTIONS if STATEFUL[0] in judgments else ()))


# Memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on the device, from above: `calls` and `alone` are the graphs of the largest call and of one sample."""

    weights: int
    gradients: int
    calls: int
    alone: int

    @property
    def least(self) -> int:
        """At the highest point: the gradients of a cell, or those of a sample beside the reference's."""
        return self.weights + max(self.gradients + self.calls, 2 * self.gradients + self.alone)

    @property
    def resident(self) -> int:
        """The same with the gradients of the reference and of the canonical cell kept all the while."""
        return self.weights + 3 * self.gradients + self.calls


def memory(chain: Chain, model: Sizes, *, bits: int = 16) -> Memory:
    """What training needs: weights, one fp32 accumulator a weight, and a graph."""
    size, count = bits // 8, model.count
    slots = max(call.slots for cell in cells(chain) for call in cell.layout.calls)
    longest = max(sample.length for sample in chain.tier.samples)
    return Memory(
        weights=count * size,
        gradients=4 * count,
        calls=_graph(model, slots, size),
        alone=_graph(model, longest, 4),  # of the reference, in fp32
    )


def _graph(model: Sizes, slots: int, size: int) -> int:
    width = model.expert_size * 8 if model.experts else model.intermediate_size
    attention = (2 * model.heads + 2 * model.kv_heads) * model.head_dim
    kept = 6 * model.hidden_size + 2 * attention + 3 * width  # elements a token and layer that the graph holds on to
    return slots * model.layers * kept * size + 3 * 4 * slots * model.vocabulary_size + (1 << 30)
