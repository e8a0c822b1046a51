"""The operators that specs of kind `operators` can name: class of tolerance, tensors, gradients. Plain data; no torch.

The classes are those of the contracts' rows. A tensor with a row a token is restored by logical identity; a parameter
has one gradient for the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlspec import layouts
from rlspec.workloads import Tier

IMPLEMENTATIONS = ("reference", "canonical", "torch", "triton", "cuda", "fastest")
DEFAULT = "torch"  # of an operator that a mapping leaves out
OWN_KERNELS = ("triton", "cuda", "fastest")  # implementations whose kernels must be seen to run
JUDGMENTS = ("forward_accuracy", "forward_invariance", "gradient_accuracy", "gradient_invariance")


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """`tensors`: token inputs with a gradient; `parameters`: weights with one; `of_keys`: a row per key, not query."""

    family: str
    outputs: tuple[str, ...] = ("out",)
    tensors: tuple[str, ...] = ("x",)
    parameters: tuple[str, ...] = ()
    of_keys: tuple[str, ...] = ()
    not_applicable: str = ""
    experts: bool = False
    linear: bool = False  # in its weight: twice the weight is twice the result, to the bit
    backward_moves: bool = False  # the gradient is the upstream one, so no kernel need run


NODES: Mapping[str, Node] = {
    "embedding": Node(family="elementwise", tensors=(), parameters=("weight",), linear=True),
    "rms_norm": Node(family="reduction", parameters=("weight",), linear=True),
    "det_gemm": Node(family="reduction", parameters=("weight",), linear=True),
    "qk_norm": Node(family="reduction", parameters=("weight",), linear=True),
    "rope": Node(family="elementwise"),
    "attention": Node(family="attention", tensors=("query", "key", "value"), of_keys=("key", "value")),
    "silu": Node(family="elementwise"),
    "swiglu": Node(family="elementwise", tensors=("gate", "up")),
    "residual_add": Node(family="elementwise", tensors=("residual", "x"), backward_moves=True),
    "lm_head": Node(family="reduction", parameters=("weight",), linear=True),
    "logprob": Node(family="logprob", tensors=("logits",)),
    "batch_invariant_logprob": Node(family="logprob", tensors=("logits",)),
    "linear_logprob": Node(family="logprob", parameters=("weight",)),
    "router": Node(
        family="reduction", outputs=("probabilities", "weights", "experts"), parameters=("weight",), experts=True
    ),
    "grouped_gemm": Node(family="reduction", tensors=("rows",), parameters=("weight",), experts=True, linear=True),
    "combine": Node(family="elementwise", tensors=("rows", "weights"), experts=True),
    "pack": Node(
        family="elementwise",
        not_applicable="a layout helper: it copies rows and computes nothing; packed layouts use it",
    ),
}


# What of a tier's `routings` an operator is judged in, and the products that experts make.
_ROUTINGS = {
    "router": ("even", "skewed", "tied", "sigmoid"),
    "grouped_gemm": ("even", "skewed"),
    "combine": ("even", "skewed"),
}
# Forms since cases 2: rotated and normalised are the heads of keys, too, which are fewer; and next to eps only rows as
# small as its root tell. The fill `published` has small rows everywhere.
_KEYS = {"rope": ("", "keys"), "qk_norm": ("", "keys")}
_SMALL = {"rms_norm": ("", "small"), "qk_norm": ("", "small keys")}
_PRODUCTS = {"grouped_gemm": ("gate_up", "down")}
# Forms since cases 3: options and dtypes with which the decoder calls an operator, in one profile or the other, and
# that no form above has. "narrow": in the working dtype what is otherwise fp32; "fp32": the other way round.
_OPTIONS = {
    "rms_norm": ("rounded",),
    "qk_norm": ("rounded keys",),
    "rope": ("narrow keys",),
    "residual_add": ("narrow",),
    "lm_head": ("fp32",),
    "logprob": ("fp32",),
    "router": ("choice", "narrow", "narrow choice"),
    "combine": ("narrow",),
}


def implemented(operator: str) -> tuple[str, ...]:
    """The implementations of the catalogue that have the operator."""
    return tuple(name for name in IMPLEMENTATIONS if not (name == "cuda" and NODES[operator].experts))


def implementation_of(operator: str, given: str | Mapping[str, str] | None) -> str:
    """What an arm that is given one name for all, or a mapping from operator to name, runs for an operator."""
    return given or DEFAULT if not isinstance(given, Mapping) else given.get(operator, DEFAULT)


def variants(operator: str, tier: Tier) -> tuple[str, ...]:
    """The forms in which an operator is judged in a tier: those of its inputs, then those of its options."""
    return (*_inputs(operator, tier), *(_OPTIONS.get(operator, ()) if tier.options else ()))


def _inputs(operator: str, tier: Tier) -> tuple[str, ...]:
    """Projections, scales of logits, ways to route, else one."""
    if operator == "det_gemm":
        return tier.projections
    if NODES[operator].family == "logprob":
        return tuple(f"scale {scale:g}" for scale in tier.logit_scales)
    if NODES[operator].experts:
        known = [name for name in tier.routings if name in _ROUTINGS[operator]]
        return tuple(f"{way} {name}" if way else name for way in _PRODUCTS.get(operator, ("",)) for name in known)
    return _more(operator, tier) if tier.cases >= 2 else ("",)


def _more(operator: str, tier: Tier) -> tuple[str, ...]:
    if tier.fill != "published" and operator in _SMALL:
        return _SMALL[operator]
    return _KEYS.get(operator, ("",))


def tiers(operator: str, chosen: Sequence[Tier]) -> Iterator[Tier]:
    """The tiers in which an operator is judged."""
    return (tier for tier in chosen if operator in tier.operators)


def judged(tier: Tier, judgments: Sequence[str]) -> tuple[str, ...]:
    """The judgments that are made in a tier, of those that are asked for."""
    return tuple(name for name in judgments if not tier.judgments or name in tier.judgments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """One comparison that a cell must hold: of `tensor` in `configuration`, over `tokens` (0: a parameter)."""

    variant: str
    tensor: str
    configuration: str
    tokens: int


def expected(operator: str, tier: Tier, judgment: str, device: str) -> Iterator[Expected]:
    """Every comparison of a cell, in order. `device`: cpu or cuda; streams are left out on a CPU."""
    node, accuracy = NODES[operator], judgment.endswith("accuracy")
    gradient = judgment.startswith("gradient")
    for variant in variants(operator, tier):
        for layout in layouts.of(tier):
            if left_out(layout, device) or (layout.name == layouts.CANONICAL and not accuracy):
                continue
            if layout.how == "other_process" and accuracy:
                continue  # only digests come back from there
            for name, samples in compared(layout, tier, accuracy=accuracy):
                for tensor in (*(f"d{one}" for one in node.tensors),) if gradient else node.outputs:
                    yield Expected(
                        variant=variant,
                        tensor=tensor,
                        configuration=name,
                        tokens=sum(_rows(node, tensor.removeprefix("d"), tier, index) for index in samples),
                    )
            if gradient and layout.parameters:
                for tensor in node.parameters:
                    yield Expected(variant=variant, tensor=f"d{tensor}", configuration=layout.name, tokens=0)


def compared(layout: layouts.Layout, tier: Tier, *, accuracy: bool) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """What is compared of a layout: bits sample by sample where each runs alone, accuracy over all of its tokens.

    An error over a token or two says little; equality says as much over one element as over all.
    """
    if accuracy:
        return ((layout.name, tuple(range(len(tier.samples)))),)
    return layouts.configurations(layout, tier)


def _rows(node: Node, tensor: str, tier: Tier, index: int) -> int:
    sample = tier.samples[index]
    return sample.length if tensor in node.of_keys else sample.queries


def left_out(layout: layouts.Layout, device: str) -> bool:
    return layout.how == "other_stream" and device != "cuda"


def accuracy_problem(line: Mapping[str, Any], limits: Mapping[str, float]) -> str | None:
    """Why the numbers of a comparison leave the limits of their row, or None. Raises KeyError for a missing number."""
    if not line["nonfinite"] <= 0:
        return f"{line['nonfinite']:,} of {line['elements']:,} elements are not finite"
    if "baseline_ratio" not in limits:
        if not line["violations"] <= 0:
            return f"{line['violations']:,} of {line['elements']:,} elements are outside"
        return None if float(line["excess"]) <= 0 else f"an element is {float(line['excess']):g} outside"
    yardstick, ratio = line["yardstick"], limits["baseline_ratio"]
    if not all(math.isfinite(float(value)) for value in yardstick.values()):
        return "plain torch itself is not finite here, so there is nothing to be measured by"
    for name, what in (("rms", "RMS"), ("max_abs", "largest")):
        allowed = max(ratio * float(yardstick[f"torch_{name}"]), float(yardstick[f"rounding_{name}"]))
        if not float(line[name]) <= allowed:
            found, most = _told_apart(float(line[name]), allowed)
            return f"{what} error {found}; plain torch allows {most} (ratio {ratio:g})"
    if not float(line["relative_rms"]) <= limits["relative_rms"]:
        found, most = _told_apart(float(line["relative_rms"]), limits["relative_rms"])
        return f"RMS error {found} of the reference's RMS, above {most}"
    return None


def _told_apart(found: float, most: float) -> tuple[str, str]:
    """Three digits of both, or as many more as it takes for them to differ."""
    told = [(f"{found:.{digits}g}", f"{most:.{digits}g}") for digits in range(3, 18)]
    return next((pair for pair in told if pair[0] != pair[1]), told[-1])
