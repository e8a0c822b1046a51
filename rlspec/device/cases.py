"""How each operator of a spec is called: its inputs by logical identity, its weights, its options.

An input holds one row a logical token: first all samples of the tier and its company, then the same with other content
(for changed neighbours), then one row of pad. A physical grid is rows picked from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rlspec.architecture import Architecture
from rlspec.device import fills
from rlspec.device.decoder import rope_tables
from rlspec.device.operators import Dispatch, Segments
from rlspec.workloads import Sample, Tier, Workload

Tensors = Mapping[str, Tensor]
_CHANGED = 101  # added to the offset of an input for other content
_UPSTREAM = 3
_SMALL = 2.0**-10  # of rows whose RMS is then near the root of eps, 1e-6
_STEPS = {"coarse": 1 / 2, "less coarse": 1 / 16}
_FEW = 16  # products of coarse numbers, whose sum bf16 holds exactly
_WORKING = "the working dtype"
PADS = {"zero": 0.0, "large": 1000.0, "nan": float("nan")}


@dataclass(frozen=True, kw_only=True)
class Input:
    """One token input: `shape` a token. `made`: how, if not plainly by the fill; `keys`: a row a key, not a query."""

    shape: tuple[int, ...] = ()
    offset: int = 0
    scale: float = 1.0
    made: str = ""
    below: int = 0
    keys: bool = False
    dtype: torch.dtype | None = None

    @property
    def data(self) -> bool:
        """Whether pads may hold anything and strides be any: no ids, no tables."""
        return self.made in ("", "tied", "small", "coarse", "few products")


@dataclass(frozen=True, kw_only=True)
class Weight:
    """`made`: "tied" and "skewed" are rows of experts, with equal or nearly equal logits, and with large ones.

    "coarse" and "less coarse": few digits, for an input that has few, too.
    """

    shape: tuple[int, ...]
    offset: int
    scale: float = 1.0
    made: str = ""


@dataclass(frozen=True, kw_only=True)
class Case:
    """`call(operator, tokens, weights, segments, wide)` gives the outputs by name, each [rows, width, ...].

    `options`: what a weight gradient of the operator's own takes; `wide`: the dtype of the reference, or None.
    """

    operator: str
    inputs: Mapping[str, Input]
    weights: Mapping[str, Weight]
    call: Callable[[Callable[..., Any], Tensors, Tensors, Segments, torch.dtype | None], dict[str, Tensor]]
    options: Mapping[str, Any]


def of(operator: str, variant: str, model: Architecture, workload: Workload, dtype: torch.dtype) -> Case:
    """The case of one operator and variant in `dtype`. Raises ValueError where the model has no such operator."""
    made = _CASES[operator](operator, variant, model, workload)
    return replace(made, options={name: dtype if value is _WORKING else value for name, value in made.options.items()})


def logical(
    case: Case, tier: Tier, workload: Workload, model: Architecture, dtype: torch.dtype, device: Any
) -> Tensors:
    """Every input of the case as [tokens, changed tokens if need be, one pad], in `dtype` unless it is of its own."""
    return {name: _table(one, tier, workload, model, dtype, device) for name, one in case.inputs.items()}


def weights(case: Case, tier: Tier, workload: Workload, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    made = {}
    for name, one in case.weights.items():
        whole = fills.parameter(workload.fill, tier.seed, one.shape, one.offset, device, dtype)
        if one.made in _STEPS and workload.fill != "published":
            whole.copy_(fills.coarse(whole, _STEPS[one.made]))
        if one.made == "tied":
            made[name] = fills.tied_experts(whole, one.scale / 2)
            continue
        made[name] = whole if workload.fill == "published" else whole.mul_(one.scale)
        if one.made == "skewed":
            made[name][::8] *= 8
    return made


def upstream(
    shape: Sequence[int], tier: Tier, workload: Workload, dtype: torch.dtype, device: torch.device, offset: int
) -> Tensor:
    """The gradient of one output by logical identity: the fill on active tokens ÷ the global active count, else 0."""
    plain = Input(shape=tuple(shape), offset=_UPSTREAM + 17 * offset)
    whole = _table(plain, tier, workload, None, torch.float32, device)
    company = set(range(len(tier.samples), len(tier.samples) + len(tier.company)))
    active = []
    for index, sample in enumerate((*tier.samples, *tier.company)):
        active += [p >= sample.prompt and index not in company for p in range(sample.first, sample.length)]
    keep = torch.tensor([*active * copies(tier), False], device=device).view(-1, *[1] * len(shape))
    return torch.where(keep, whole / tier.active, 0).to(dtype)


def copies(tier: Tier) -> int:
    """How many contents of each sample the tables hold."""
    return 2 if "neighbours" in tier.layouts else 1


def _table(
    one: Input, tier: Tier, workload: Workload, model: Architecture | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    parts = [
        _rows(one, sample, changed, tier, workload, model, device)
        for changed in (0, _CHANGED)[: copies(tier)]
        for sample in (*tier.samples, *tier.company)
    ]
    whole = torch.cat([*parts, torch.zeros_like(parts[0][:1])])
    if one.made == "cos":
        whole[-1] = 1
    if one.made == "ids":
        whole[-1] = workload.pad_token % one.below
    if not whole.is_floating_point():
        return whole.to(device)
    return (whole * one.scale).to(one.dtype or dtype)


def _rows(
    one: Input, sample: Sample, changed: int, tier: Tier, workload: Workload, model: Architecture | None, device: Any
) -> Tensor:
    positions = range(0 if one.keys else sample.first, sample.length)
    if one.made in ("cos", "sin"):
        assert model is not None
        tables = rope_tables(torch.tensor([list(positions)], device=device), model, torch.float32)
        return tables[one.made == "sin"][0]
    if one.made == "ids" and sample.tokens and not changed:
        return torch.tensor([sample.tokens[p] % one.below for p in positions])
    if one.made == "targets" and sample.tokens and not changed:
        return torch.tensor([sample.tokens[(p + 1) % sample.length] % one.below for p in positions])
    if one.made == "few":
        return fills.few_experts(tier.seed, sample.id, positions, one.shape[0], one.below, one.offset + changed)
    if not one.data:
        count = one.shape[0] if one.shape else 1
        ids = fills.integers(tier.seed, sample.id, positions, count, one.below, one.offset + changed)
        if not one.shape and not changed:  # the first and the last id stand in every longer sample
            ids = torch.where(torch.tensor(positions).view(-1, 1) == 1, 0, ids)
            ids = torch.where(torch.tensor(positions).view(-1, 1) == 2, one.below - 1, ids)
        return ids if one.shape else ids[:, 0]
    width = 1
    for size in one.shape:
        width *= size
    made = fills.rows(workload.fill, tier.seed, sample.id, positions, width, one.offset + changed, device)
    if one.made == "tied":
        made = fills.tied_tokens(made, positions)
    elif one.made in ("coarse", "few products") and workload.fill != "published":
        made = fills.coarse(made)
        if one.made == "few products":
            made[:, _FEW:] = 0
    elif one.made == "small":
        made[torch.tensor(positions, device=made.device) % 2 == 1] *= _SMALL
    return made.view(len(positions), *one.shape)


# One case an operator


def _scaled(width: int) -> float:
    return 2.0 ** round(-0.5 * (width - 1).bit_length())


def _plainly(op: Any, tokens: Tensors, weights: Tensors, segments: Segments, wide: Any) -> dict[str, Tensor]:
    """An operator of token inputs and weights alone, in the order of the case."""
    return {"out": op(*tokens.values(), *weights.values())}


def _embedding(operator: str, variant: str, model: Architecture, workload: Workload) -> Case:
    return Case(
        operator=operator,
        inputs={"tokens": Input(made="ids", below=model.vocab_size)},
        weights={"weight": Weight(shape=(model.vocab_size, model.hidden_size), offset=0)},
        call=_plainly,
        options={},
    )


def _norm(operator: str, variant: str, model: Architecture, workload: Workload) -> Case:
    shape = (_heads(variant, model), model.head_dim) if operator == "qk_norm" else (model.hidden_size,)
    made = "small" if variant.startswith("small") else ""
    options = {"eps": model.rms_norm_eps}
    named = {**options, "round_before_weight": True} if variant.startswith("rounded") else options
    return Case(
        operator=operator,
        inputs={"x": Input(shape=shape, made=made)},
        weights={"weight": Weight(shape=shape[-1:], offset=1)},
        call=lambda op, tokens, weights, segments, wide: {"out": op(tokens["x"], weights["weight"], **named)},
        options=options,
    )


def _heads(variant: str, model: Architecture) -> int:
    return model.num_key_value_heads if variant.endswith("keys") else model.num_attention_heads


def _gemm(operator: str, variant: str, model: Architecture, workload: Workload) -> Case:
    queries, keys = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    shapes = {
        "q": (queries, model.hidden_size),
        "k": (keys, model.hidden_size),
        "v": (keys, model.hidden_size),
        "o": (model.hidden_size, queries),
        "gate": (model.intermediate_size or model.moe_intermediate_size, model.hidden_size),
        "up": (model.intermediate_size or model.moe_intermediate_size, model.hidden_size),
        "down": (model.hidden_size, model.intermediate_size or model.moe_intermediate_size),
    }
    if variant not in shapes:
        raise ValueError(f"unknown projection {variant!r}; known: {', '.join(shapes)}")
    shape = shapes[variant]
    return Case(
        operator=operator,
        inputs={"x": Input(shape=shape[1:])},
        weights={"weight": Weight(shape=shape, offset=2, scale=_scaled(shape[1]))},
        call=_plainly,
        options={},
    )


def _rope(operator: str, variant: str, model: Architecture, workload: Workload) -> Case:
    kept = None if variant.startswith("narrow") else torch.float32
    return Case(
        operator=operator,
        inputs={
            "x": Input(shape=(_heads(variant, model), model.head_dim)),
            "cos": Input(made="cos", dtype=kept),
            "sin": Input(made="sin", dtype=kept),
        },
        weights={},
        call=lambda op, tokens, weights, segments, wide: {"out": op(tokens["x"], tokens["cos"], tokens["sin"])},
        options={},
    )


def _attention(operator: str, variant: str, model: Architecture, workload: Workload) -> Case:
    kv = (model.num_key_value_heads, model.head_dim)
    options = {"scale": model.head_dim**-0.5}
    return Case(
        operator=operator,
        inputs={
            "query": Input(shape=(model.num_attention_heads, model.head_dim), offset=4),
            "key": Input(shape=kv, offset=5, keys=True),
            "value": Input(shape=kv, offset=6, keys=True),
        },
        weights={},
        call=lambda op, tokens, weights, segments, wide: {"out": op(*tokens.values(), segments, **options)},
        options=options,
    )


def _elementwise(*names: str) -> Callable[[str, str, Architecture, Workload], Case]:
    def make(operator: str, variant: str, model: Architecture, workload: Workload) -> Case:
        residual = operator == "residual_add"
        width = model.hidden_size if residual else model.intermediate_size or model.moe_intermediate_size
        # The stream of the decoder's profile ws1, and of its profile hf.
        kept = {} if variant == "narrow" else {"residual": torch.float32}
        return Case(
            operator=operator,
            inputs={n: Input(shape=(width,), offset=i, dtype=kept.get(n)) for i, n in enumerate(names)},
            weights={},
            call=_plainly,
            options={},
        )

    return make


def _lm_head(operator: str, variant: str, model: Architecture, workload: Workload) -> Case:
    """Logits in fp32 are of inputs whose products sum exactly in any order, so that a rounding on the way is seen."""
    kept, made, of_weight = (torch.float32, "coarse", "less coarse") if variant == "fp32" else (None, "", "")
    return Case(
        operator=operator,
        inputs={"x": Input(shape=(model.hidden_size,), made=made)},
        weights={"weight": _head(model, of_weight)},
        call=lambda op, tokens, weights, segments, wide: {
            "out": op(tokens["x"], weights["weight"], out_dtype=wide or kept or tokens["x"].dtype)
        },
        options={},
    )


def _head(model: Architecture, made: str = "") -> Weight:
    shape = (model.vocab_size, model.hidden_size)
    return Weight(shape=shape, offset=7, scale=_scaled(model.hidden_size), made=made)


def _logprob(operator: str, variant: str, model: Architecture, workload: Workload) -> Case:
    kept = torch.float32 if variant == "fp32" else None
    scale = 1.0 if kept else float(variant.removeprefix("scale "))
    return Case(
        operator=operator,
        inputs={
            "logits": Input(shape=(model.vocab_size,), offset=8, scale=scale, dtype=kept),
            "targets": Input(made="targets", below=model.vocab_size, offset=9),
        },
        weights={},
        call=_plainly,
        options={},
    )


def _linear_logprob(operator: str, variant: str, model: Architecture, workload: Workload) -> Case:
    scale = float(variant.removeprefix("scale "))
    return Case(
        operator=operator,
        inputs={
            "x": Input(shape=(model.hidden_size,), scale=scale),
            "targets": Input(made="targets", below=model.vocab_size, offset=9),
        },
        weights={"weight": _head(model)},
        call=lambda op, tokens, weights, segments, wide: {"out": op(tokens["x"], weights["weight"], tokens["targets"])},
        options={},
    )


def _router(operator: str, variant: str, model: Architecture, workload: Workload) -> Case:
    _needs_experts(operator, model)
    narrow, chosen = variant.startswith("narrow"), variant.endswith("choice")
    options = {
        "top_k": model.num_experts_per_tok,
        "normalise": model.norm_topk_prob,
        "logits_dtype": _WORKING if narrow else torch.float32,
        "scoring": "sigmoid" if variant == "sigmoid" else "softmax",
    }

    def call(
        op: Any, tokens: Tensors, weights: Tensors, segments: Segments, wide: torch.dtype | None
    ) -> dict[str, Tensor]:
        grid = tokens["x"].shape[:2]
        kept = tokens["x"].dtype if narrow else torch.float32
        given: dict[str, Any] = {**options, "logits_dtype": wide or kept}
        if chosen:
            given["choice"] = tokens["choice"].flatten(0, 1)
        found = op(tokens["x"].flatten(0, 1), weights["weight"], **given)
        return {name: getattr(found, name).unflatten(0, grid) for name in ("probabilities", "weights", "experts")}

    shape = (model.num_experts, model.hidden_size)
    # Best experts of logits in the working dtype are those of exact ones only where these have few digits.
    of_x, of_weight = _LOGITS.get(variant, ("", ""))
    inputs = {"x": Input(shape=shape[1:], made=of_x)}
    return Case(
        operator=operator,
        inputs={**inputs, "choice": _choice(model, "even")} if chosen else inputs,
        weights={"weight": Weight(shape=shape, offset=10, scale=_scaled(model.hidden_size), made=of_weight)},
        call=call,
        options=options,
    )


_LOGITS = {"tied": ("tied", "tied"), "skewed": ("", "skewed"), "narrow": ("few products", "coarse")}


def _grouped_gemm(operator: str, variant: str, model: Architecture, workload: Workload) -> Case:
    _needs_experts(operator, model)
    product, routing = variant.split()
    width, inner, count = model.hidden_size, 2 * model.moe_intermediate_size, model.num_experts_per_tok
    if product == "down":
        width, inner = model.moe_intermediate_size, model.hidden_size

    def call(
        op: Any, tokens: Tensors, weights: Tensors, segments: Segments, wide: torch.dtype | None
    ) -> dict[str, Tensor]:
        grid = tokens["rows"].shape[:2]
        dispatch = Dispatch.of(tokens["experts"].flatten(0, 1), model.num_experts)
        rows = _Moved.apply(tokens["rows"].flatten(0, 2), dispatch.order, dispatch.inverse)
        out = _Moved.apply(op(rows, weights["weight"], dispatch), dispatch.inverse, dispatch.order)
        return {"out": out.unflatten(0, (*grid, count))}

    return Case(
        operator=operator,
        inputs={
            "rows": Input(shape=(count, width)),
            "experts": _choice(model, routing),
        },
        weights={"weight": Weight(shape=(model.num_experts, inner, width), offset=12, scale=_scaled(width))},
        call=call,
        options={},
    )


def _combine(operator: str, variant: str, model: Architecture, workload: Workload) -> Case:
    _needs_experts(operator, model)
    count = model.num_experts_per_tok

    def call(
        op: Any, tokens: Tensors, weights: Tensors, segments: Segments, wide: torch.dtype | None
    ) -> dict[str, Tensor]:
        grid = tokens["rows"].shape[:2]
        dispatch = Dispatch.of(tokens["experts"].flatten(0, 1), model.num_experts)
        rows = _Moved.apply(tokens["rows"].flatten(0, 2), dispatch.order, dispatch.inverse)
        return {"out": op(rows, tokens["weights"].flatten(0, 1), dispatch).unflatten(0, grid)}

    return Case(
        operator=operator,
        inputs={
            "rows": Input(shape=(count, model.hidden_size)),
            "weights": Input(shape=(count,), offset=13, dtype=None if variant == "narrow" else torch.float32),
            "experts": _choice(model, variant),
        },
        weights={},
        call=call,
        options={},
    )


class _Moved(torch.autograd.Function):
    """The rows of a tensor in another order, and their gradients back: the harness's way, no sum of the operator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return upstream.index_select(0, inverse), None, None


def _choice(model: Architecture, routing: str) -> Input:
    made = "few" if routing == "skewed" else "experts"
    return Input(shape=(model.num_experts_per_tok,), made=made, below=model.num_experts, offset=11)


def _needs_experts(operator: str, model: Architecture) -> None:
    if not model.num_experts:
        raise ValueError(f"operator {operator} needs a mixture of experts, and this model is dense")


_CASES: Mapping[str, Callable[[str, str, Architecture, Workload], Case]] = {
    "embedding": _embedding,
    "rms_norm": _norm,
    "qk_norm": _norm,
    "det_gemm": _gemm,
    "rope": _rope,
    "attention": _attention,
    "silu": _elementwise("x"),
    "swiglu": _elementwise("gate", "up"),
    "residual_add": _elementwise("residual", "x"),
    "lm_head": _lm_head,
    "logprob": _logprob,
    "batch_invariant_logprob": _logprob,
    "linear_logprob": _linear_logprob,
    "router": _router,
    "grouped_gemm": _grouped_gemm,
    "combine": _combine,
}
