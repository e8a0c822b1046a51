"""Where two runs of a chain part: the node that a failing configuration is blamed on, and the drift behind it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rlspec import chain_backward, chains
from rlspec.cells import Finding
from rlspec.chain_asked import Asked, trace_of
from rlspec.layouts import CANONICAL

LOSS = {"layer": None, "name": "loss", "operator": "loss", "phase": "forward"}
# About what the nearest number is off by: half a unit in the last place of the largest significand; of the smallest,
# twice that.
HALF_ULP = {"bf16": 2.0**-9, "fp16": 2.0**-12, "fp32": 2.0**-25}
_WAYS = {"backward": "; on the way back they part at ", "weight gradient": "; they part in the sum of "}
_ERRORS = {  # errors grow on their way, so that where the first is too large need not be where it arose
    "forward": "; the first result on the way forward that errs by more than the row allows is that of ",
    "weight gradient": "; no result of the forward errs by more than the row allows, and the first gradient on the way "
    "back that does is that of ",
}


def place(first: Mapping[str, Any] | None, *, accuracy: bool = False) -> str:
    """Where two runs part, or where an error is first too large, as the end of a sentence."""
    if not first:
        return ""
    if accuracy and first == LOSS:
        return "; no result before the log-probs errs by more than the row allows"
    layer = "" if first["layer"] is None else f"layer {first['layer']}, "
    at = f", sample {first['sample']} position {first['position']}" if "sample" in first else ""
    way = (_ERRORS if accuracy else _WAYS).get(first.get("phase", ""), "; they part at ")
    through = f", which comes through {_listed(first['through'])}" if accuracy and first.get("through") else ""
    return f"{way}{layer}{first['name']} ({first['operator']}){at}{through}"


def divergence(
    measured: Mapping[str, Any], judgment: str, name: str, tensors: Sequence[str], asked: Asked
) -> dict[str, Any] | None:
    """The node at which a failing configuration leaves what it is compared with, if that is known."""
    if judgment not in chains.ACCURACY:
        trace = trace_of(measured, judgment, name)
        if trace and trace["first"]:
            return dict(trace["first"])
        return _of_parameter(chain_backward.first(tensors)) if judgment == "gradient_invariance" and tensors else None
    trace = trace_of(measured, "forward_invariance", name)
    if trace and trace["first"] and not _canonical_fails(measured, judgment, asked):
        return dict(trace["first"])  # the cell has left the canonical one, which is sound
    ratio = asked.ratio(judgment)
    if ratio is not None and (found := next(_beyond(measured, ratio, asked), None)):
        return {**dict(zip(("layer", "name", "operator"), found, strict=True)), "phase": "forward"}
    if judgment == "gradient_accuracy":
        worst = chain_backward.first(tensors)
        through = chain_backward.through(worst, asked.model, _surely_right(measured, name, asked))
        return {**_of_parameter(worst), **({"through": through} if through else {})}
    return None if ratio is None else dict(LOSS)


def _surely_right(measured: Mapping[str, Any], name: str, asked: Asked) -> Callable[[str], bool]:
    """Of a parameter, whether its gradient errs by half of what the row allows beside plain torch, or less."""
    judgment, ratio = "gradient_accuracy", asked.ratio("gradient_accuracy")
    lines = {line["tensor"]: line for line in measured["comparisons"]
             if (line["judgment"], line["configuration"]) == (judgment, name)}  # fmt: skip

    def right(tensor: str) -> bool:
        found, theirs = (float(one) for one in (lines[tensor]["rms"], lines[tensor]["yardstick"]["torch_rms"]))
        return ratio is not None and found <= ratio / 2 * theirs

    return right


def _listed(names: Sequence[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def _canonical_fails(measured: Mapping[str, Any], judgment: str, asked: Asked) -> bool:
    """Whether the canonical cell, of which the depth tells, is itself outside; one that cannot be judged is not."""
    lines = (line for line in measured["comparisons"]
             if (line["judgment"], line["configuration"]) == (judgment, CANONICAL))  # fmt: skip
    try:
        return any(asked.problem(line) for line in lines if line["limits"] is not None)
    except KeyError:
        return False


def _beyond(measured: Mapping[str, Any], ratio: float, asked: Asked) -> Iterator[tuple[int | None, str, str]]:
    """Nodes that err by more than the row allows beside plain torch, in the order of the forward."""
    for layer, node, operator, error, theirs, size in (measured["depth"] or {}).get("nodes", ()):
        if not float(error) <= _allowed(float(theirs), float(size), ratio, asked):
            yield layer, node, operator


def _allowed(theirs: float, size: float, ratio: float, asked: Asked) -> float:
    return theirs * ratio + size * HALF_ULP[asked.dtype]  # an exact node may still round


def misrouted(measured: Mapping[str, Any], judgment: str, asked: Asked) -> Finding | None:
    """Why the experts that the arm took are no near ties of the model in fp32, or None."""
    routes, ratio = (measured["depth"] or {}).get("routes"), asked.ratio(judgment)
    if not routes or not routes["choices"]:
        return None
    if routes["wrong"]:
        reason = f"{routes['wrong']} choices of experts are not those of the arm's own scores"
        return Finding(category="red_verdict", reason=reason)
    if ratio is None:
        reason = f"the contract's row {judgment}/{chains.SUBJECT} has no baseline_ratio to hold the router's scores to"
        return Finding(category="broken", reason=f"{_others(routes)}, and {reason}")
    found = next((layer for layer, _, operator in _beyond(measured, ratio, asked) if operator == "router"), None)
    if found is None:
        return None
    reason = f"the router's scores err by more than the row allows, first in layer {found}"
    return Finding(category="red_verdict", reason=f"{_others(routes)}, and {reason}")


def rerouted(measured: Mapping[str, Any], judgment: str, name: str) -> tuple[str, ...]:
    """Near ties: whose experts the errors were measured with."""
    routes = (measured["depth"] or {}).get("routes")
    if not routes or not routes["choices"] or judgment not in chains.ACCURACY or name != CANONICAL:
        return ()
    gap = f"where its scores are {float(routes['widest']):.2g} apart at most"
    return (f"{judgment}: {_others(routes)}, {gap}; errors are against fp32 with the arm's experts",)


def strayed(measured: Mapping[str, Any], judgment: str, name: str, asked: Asked) -> str:
    """What log-probs within their row do not say by themselves: results on the way there that are outside, or ""."""
    ratio, every = asked.ratio(judgment), (measured["depth"] or {}).get("nodes", ())
    if ratio is None or judgment != "forward_accuracy" or name != CANONICAL:
        return ""
    found = list(_beyond(measured, ratio, asked))
    if not found:
        return ""
    layer, node, operator = found[0]
    where = node if layer is None else f"layer {layer}, {node}"
    count = f"{len(found)} of {len(every)} results on the way err by more than the row allows beside plain torch"
    return f"{count}, first that of {where} ({operator})"


def parted(measured: Mapping[str, Any], judgment: str, name: str, asked: Asked) -> str:
    """What log-probs of inference within their row do not say: results on the way that err by more than the row of
    trained ones allows, or "".

    An error against fp32 is at least the distance from the trained result less what that one errs by.
    """
    trace, ratio = trace_of(measured, judgment, name) or {}, asked.ratio("forward_accuracy")
    if ratio is None or not trace.get("apart"):
        return ""
    every = {(layer, node): (float(error), _allowed(float(theirs), float(size), ratio, asked))
             for layer, node, _, error, theirs, size in (measured["depth"] or {}).get("nodes", ())}  # fmt: skip
    found = []
    for layer, node, operator, gap in trace["apart"]:
        if operator == "router" and gap is None:
            break  # a near tie of experts may fall the other way, and from there on nothing is comparable
        error, allowed = every.get((layer, node), (math.inf, math.inf))
        if gap is not None and float(gap) > error + allowed:
            found.append((layer, node, operator))
    if not found:
        return ""
    layer, node, operator = found[0]
    where = node if layer is None else f"layer {layer}, {node}"
    count = (
        f"{len(found)} of {len(every)} results on the way are farther from those of training than rounding puts them"
    )
    return f"{count}, first that of {where} ({operator})"


def _others(routes: Mapping[str, Any]) -> str:
    return f"{routes['tokens']:,} of {routes['of']:,} tokens took other experts than fp32 would have"


def _of_parameter(name: str) -> dict[str, Any]:
    """The node of a parameter whose gradient is wrong where no result of the forward is."""
    parts = name.removeprefix("model.layers.").removesuffix(".weight")
    number, _, rest = parts.partition(".")
    layer, short = (int(number), rest) if number.isdigit() else (None, parts)
    known = (("q_norm", "qk_norm"), ("k_norm", "qk_norm"), ("norm", "rms_norm"), ("embed", "embedding"),
             ("lm_head", "lm_head"), ("experts", "grouped_gemm"), ("mlp.gate_proj", "det_gemm"),
             ("mlp.gate", "router"))  # fmt: skip
    operator = next((operator for part, operator in known if part in short), "det_gemm")
    return {"layer": layer, "name": short, "operator": operator, "phase": "weight gradient"}


def drift(measured: Mapping[str, Any], judgment: str, name: str) -> list[Any]:
    """By layer: how far the residual stream is off, relative to itself."""
    if judgment in chains.ACCURACY:
        nodes_ = (measured["depth"] or {}).get("nodes", [])
        return [_over(error, float(size)) for _, node, _, error, _, size in nodes_ if node == "mlp.residual"]
    trace = trace_of(measured, judgment, name)
    return list(trace["depth"]) if trace else []


def _over(error: Any, size: float) -> float:
    return float(error) / size if size else float(error)


def silent(measured: Mapping[str, Any], judgment: str, name: str) -> Iterator[str]:
    """What a green configuration does not say by itself: nodes that differ all the same."""
    trace = trace_of(measured, judgment, name)
    if trace and trace["first"] and judgment not in (*chains.ACCURACY, "gradient_invariance"):
        count = f"{judgment} {name} is green, and {trace['differing']} of {trace['nodes']} nodes differ to the bit"
        yield f"{count}{place(trace['first'])}"
