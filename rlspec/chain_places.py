"""Where two runs of a chain part: the node that a failing configuration is blamed on, and the drift behind it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlspec import chains
from rlspec.chain_asked import Asked, trace_of

LOSS = {"layer": None, "name": "loss", "operator": "loss", "phase": "forward"}


def place(first: Mapping[str, Any] | None) -> str:
    """Where two runs part, as the end of a sentence."""
    if not first:
        return ""
    layer = "" if first["layer"] is None else f"layer {first['layer']}, "
    at = f", sample {first['sample']} position {first['position']}" if "sample" in first else ""
    way = {"backward": "; on the way back they part at ", "weight gradient": "; they part in the sum of "}
    return f"{way.get(first.get('phase', ''), '; they part at ')}{layer}{first['name']} ({first['operator']}){at}"


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
    ratio = asked.limits(judgment).get("baseline_ratio")
    for layer, node, operator, error, theirs, size in (measured["depth"] or {}).get("nodes", ()):
        allowed = float(theirs) * (ratio or 2) + size * 2**-9  # an exact node may still round
        if not float(error) <= allowed:
            return {"layer": layer, "name": node, "operator": operator, "phase": "forward"}
    return _of_parameter(tensors[-1]) if judgment == "gradient_accuracy" else dict(LOSS)


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
        return [_over(error, size) for _, node, _, error, _, size in nodes_ if node == "mlp.residual"]
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
