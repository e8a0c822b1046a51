"""What a chain spec asks of a model and a workload: cells, executions, and every comparison that is due.

Plain integers, no torch: the device derives what it runs from here and the host what it must find, so that a row that
is missing is seen. Cells are of training. Layouts are those of a trainer: one sample a row, padded to the longest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rlspec.architecture import Architecture
from rlspec.layouts import CANONICAL, Call, Layout, Run, restore
from rlspec.workloads import Chain, Decode, Sample, Tier, Workload

INVARIANCE = ("forward_invariance", "gradient_invariance")
ACCURACY = ("forward_accuracy", "gradient_accuracy")
GRADIENTS = ("gradient_invariance", "gradient_accuracy")
STATEFUL = ("train_inference_parity", "decode_prefill", "kv_cache")
JUDGMENTS = ("forward_accuracy", "forward_invariance", "gradient_accuracy", "gradient_invariance", *STATEFUL)
ACROSS = "cross_arm_invariance"  # asked for by name alone: it needs a second arm
ONLY_GRADIENTS = "BN/micro_batches"
# Chunks of one token, where it is named. No larger chunk gives a call of one token a gradient: what it may leave is the
# last token of a sample, which predicts nothing.
TOKENS = "B1/tokens"
STANDARD = (
    *("B1/full", "BN/chunked", "B1/chunked", "BN/padded_right", "BN/padded_left", "BN/permuted", "BN/packed"),
    ONLY_GRADIENTS,
)
CELLS = (*STANDARD, TOKENS)
CACHES = ("contiguous", "paged")
RESCORE = "B1/rescore"
EXECUTIONS = (RESCORE, "B1/decode", "B1/paged", "B1/chunked", "BN/decode")  # of inference
PREFIX = "prefixes"
SUBJECT = "chain"  # of the contracts' rows for a whole model
REFERENCE, PLAIN = "reference", "torch"  # the runs that accuracy is measured by


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
    wanted = names or chain.cells or [name for name in STANDARD if name != ONLY_GRADIENTS or chain.micro_batches]
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
    chunk = 1 if name == TOKENS else tier.chunk if name.endswith("chunked") else 0
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


def check_reads(chain: Chain) -> None:
    """Raises ValueError for a decode case that reads nothing from the cache, or no second page, and for tiers alike."""
    page = chain.page_size
    for case in chain.decode:
        length = max(sample.length for sample in case.samples)
        if beyond := [at for at in case.positions if at >= length]:
            raise ValueError(
                f"decode case {case.name}: no sample has position {beyond[0]}, the longest has {length} tokens"
            )
        last = max((at for _, positions in decoded(case) for at in positions), default=0)
        if not last:
            raise ValueError(f"decode case {case.name} compares position 0 alone, which reads nothing from a cache")
        if last < page:
            raise ValueError(f"page_size {page}: no decoded position of case {case.name} lies behind the first page")
    if (longest := max(sample.length for sample in chain.tier.samples)) <= page:
        raise ValueError(f"page_size {page}: the longest sample of tier {chain.tier.name} has {longest} tokens")


def check_tokens(chain: Chain, vocabulary: int) -> None:
    """Raises ValueError for a token id that the model has not, which would be another token, the rest of a division."""
    for sample in dict.fromkeys((*chain.tier.samples, *(one for case in chain.decode for one in case.samples))):
        if sample.tokens and (most := max(sample.tokens)) >= vocabulary:
            raise ValueError(f"sample {sample.id}: token {most} is not below the vocabulary of the model, {vocabulary}")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """What an execution of inference is to be: its calls (rows and columns of the grid, longest sample), its cache."""

    cache: str | None
    calls: tuple[tuple[int, int, int], ...]


def execution(chain: Chain, name: str) -> Execution:
    """That of a configuration: generated or rescored, decoded, or stored in chunks."""
    head, _, kind = name.rpartition("/")
    alone, size = [[sample] for sample in chain.tier.samples], chain.tier.chunk
    calls: list[tuple[int, int, int]] = []
    if name in EXECUTIONS:
        for group in alone if head == "B1" else [list(chain.tier.samples)]:
            whole = [(0, max(sample.length for sample in group))]
            cut = generation(chain, group, chunk=size if kind == "chunked" else 0)
            calls += _grids(group, whole if name == RESCORE else cut)
        return Execution(cache=None if name == RESCORE else CACHES[kind == "paged"], calls=tuple(calls))
    if case := next((one for one in chain.decode if one.name == head), None):
        calls += _grids(case.samples, columns(case), case.width if case.left else 0)
        return Execution(cache=kind, calls=tuple(calls))
    for step in (size, 0):
        for group in alone:
            length = group[0].length
            pieces = [(at, min(at + (step or length), length)) for at in range(0, length, step or length)]
            calls += _grids(group, pieces)
    return Execution(cache=kind, calls=tuple(calls))


def _grids(
    samples: Sequence[Sample], pieces: Sequence[tuple[int, int]], width: int = 0
) -> Iterator[tuple[int, int, int]]:
    """The calls that hold a token, up to the last row that has one. `width`: samples end in the last of its columns."""
    starts = [width - sample.length if width else 0 for sample in samples]
    longest = max(sample.length for sample in samples)
    for first, last in pieces:
        held = [row for row, (sample, start) in enumerate(zip(samples, starts, strict=True))
                if max(first, start) < min(last, start + sample.length)]  # fmt: skip
        if held:
            yield held[-1] + 1, last - first, longest


# What must be there


def operators(model: Architecture, profile: str) -> tuple[str, ...]:
    """What no run of the model can do without."""
    always = ("embedding", "rms_norm", "qk_norm", "rope", "det_gemm", "attention", "residual_add", "lm_head", "logprob")
    experts = ("router", "grouped_gemm", "combine") if model.num_experts else ()
    return (*always, "silu" if profile == "hf" else "swiglu", *experts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """One comparison: of `tensor` in `configuration` with `against`."""

    judgment: str
    configuration: str
    tensor: str
    shape: tuple[int, ...]
    against: str
    accuracy: bool = False


def expected(
    chain: Chain, model: Architecture, judgments: Sequence[str], names: Sequence[str] = ()
) -> Iterator[Expected]:
    """Every comparison that an arm must hold, in order; log-probs of train_inference_parity stand by themselves."""
    chosen = cells(chain, names)
    active = (chain.tier.active,)
    for cell in chosen[1:]:
        if "forward_invariance" in judgments and cell.name != ONLY_GRADIENTS:
            yield _same("forward_invariance", cell.name, "logprob", active)
        if "gradient_invariance" in judgments:
            for name, shape in model.parameter_shapes().items():
                yield _same("gradient_invariance", cell.name, name, shape)
    for name in accuracy_cells(chosen):
        if "forward_accuracy" in judgments:
            yield _near("forward_accuracy", name, "logprob", active)
        if "gradient_accuracy" in judgments:
            for parameter, shape in model.parameter_shapes().items():
                yield _near("gradient_accuracy", name, parameter, shape)
    if "decode_prefill" in judgments:
        yield from _decode_prefill(chain, model)
    if "kv_cache" in judgments:
        yield from _kv_cache(chain, model)


def _same(judgment: str, configuration: str, tensor: str, shape: tuple[int, ...], against: str = CANONICAL) -> Expected:
    return Expected(judgment=judgment, configuration=configuration, tensor=tensor, shape=shape, against=against)


def _near(judgment: str, configuration: str, tensor: str, shape: tuple[int, ...]) -> Expected:
    return replace(_same(judgment, configuration, tensor, shape, REFERENCE), accuracy=True)


def _decode_prefill(chain: Chain, model: Architecture) -> Iterator[Expected]:
    for case in chain.decode:
        count = sum(len(positions) for _, positions in decoded(case))
        for cache in CACHES:
            shape = (count, model.vocab_size)
            yield _same("decode_prefill", f"{case.name}/{cache}", "logits", shape, "prefill")
        shape = (len(prefixes(chain, case)), model.vocab_size)
        yield _same("decode_prefill", f"{case.name}/{PREFIX}", "logits", shape, "prefill")


def _kv_cache(chain: Chain, model: Architecture) -> Iterator[Expected]:
    for case in chain.decode:
        for cache in CACHES:
            place, count = f"{case.name}/{cache}", len(case.samples)
            tokens = sum(sample.length for sample in case.samples)
            stored = (model.num_hidden_layers, tokens, model.num_key_value_heads, model.head_dim)
            attended = (model.num_hidden_layers, count, model.num_attention_heads, model.head_dim)
            yield _same("kv_cache", place, "keys", stored, "written")
            yield _same("kv_cache", place, "values", stored, "written")
            yield _same("kv_cache", place, "cursor", (count,), "tokens")
            yield _same("kv_cache", place, "strays", (1,), "none")
            yield _same("kv_cache", place, "attention", attended, "direct")
            yield _near("kv_cache", place, "attention", attended)
    tokens = sum(sample.length for sample in chain.tier.samples)
    stored = (model.num_hidden_layers, tokens, model.num_key_value_heads, model.head_dim)
    for cache in CACHES:
        for tensor in ("keys", "values"):
            yield _same("kv_cache", f"chunked/{cache}", tensor, stored, "once")
