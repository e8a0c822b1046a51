"""Where two runs of a chain part: the node that a failing configuration is blamed on, and the drift behind it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlspec import chains
from rlspec.chain_asked import Asked, trace_of
from rlspec.layouts import CANONICAL

LOSS = {"layer": None, "name": "loss", "operator": "loss", "phase": "forward"}


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
    return f"{way}{layer}{first['name']} ({first['operator']}){at}"


def divergence(
    measured: Mapping[str, Any], judgment: str, name: str, tensors: Sequence[str], asked: Asked
) -> dict[str, Any] | None:
    """The node at which a failing configuration leaves what it is compared with, if that is known."""
    if judgment not in chains.ACCURACY:
        trace = trace_of(measured, judgment, name)
        if trace and trace["first"]:
            return dict(trace["first"])
        return _of_parameter(tensors[-1]) if judgment == "gradient_invariance" and tensors else None
    trace = trace_of(measured, "forward_invariance", name)
    if trace and trace["first"]:  # the cell has left the canonical one, of which the depth tells
        return dict(trace["first"])
    for layer, node, operator in _beyond(measured, asked.limits(judgment)):
        return {"layer": layer, "name": node, "operator": operator, "phase": "forward"}
    return _of_parameter(tensors[-1]) if judgment == "gradient_accuracy" else dict(LOSS)


def _beyond(measured: Mapping[str, Any], limits: Mapping[str, float]) -> Iterator[tuple[int | None, str, str]]:
    """Nodes that err by more than the row allows beside plain torch, in the order of the forward."""
    ratio = limits.get("baseline_ratio")
    for layer, node, operator, error, theirs, size in (measured["depth"] or {}).get("nodes", ()):
        allowed = float(theirs) * (ratio or 2) + float(size) * 2**-9  # an exact node may still round
        if not float(error) <= allowed:
            yield layer, node, operator


def misrouted(measured: Mapping[str, Any], limits: Mapping[str, float]) -> str | None:
    """Why the experts that the arm took are no near ties of the model in fp32, or None."""
    routes = (measured["depth"] or {}).get("routes")
    if not routes or not routes["choices"]:
        return None
    if routes["wrong"]:
        return f"{routes['wrong']} choices of experts are not those of the arm's own scores"
    found = next((layer for layer, _, operator in _beyond(measured, limits) if operator == "router"), None)
    if found is None or "baseline_ratio" not in limits:  # an absolute row says nothing of scores
        return None
    return f"{_others(routes)}, and the router's scores err by more than the row allows, first in layer {found}"


def rerouted(measured: Mapping[str, Any], judgment: str, name: str) -> tuple[str, ...]:
    """Near ties: whose experts the errors were measured with."""
    routes = (measured["depth"] or {}).get("routes")
    if not routes or not routes["choices"] or judgment not in chains.ACCURACY or name != CANONICAL:
        return ()
    gap = f"where its scores are {float(routes['widest']):.2g} apart at most"
    return (f"{judgment}: {_others(routes)}, {gap}; errors are against fp32 with the arm's experts",)


def _others(routes: Mapping[str, Any]) -> str:
    return f"{routes['tokens']:,} of {routes['of']:,} tokens took other experts than fp32 would have"


def _of_parameter(name: str) -> dict[str, Any]:
    """The node of a parameter whose gradient alone is wrong; the backward meets the last parameter first."""
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
