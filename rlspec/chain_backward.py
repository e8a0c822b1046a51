"""The way back through a model: in which parameter a wrong gradient shows first, and what that one came through.

A weight whose own gradient is right may still pass a wrong one on, so operators with a weight are on the way, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rlspec.architecture import Architecture

# The parameters of a layer as the backward meets them.
_ORDER = (
    "down_proj", "gate", "gate_up_proj", "up_proj", "gate_proj", "post_attention_layernorm", "o_proj", "v_proj",
    "k_norm", "q_norm", "k_proj", "q_proj", "input_layernorm",
)  # fmt: skip
# Parameter -> the operators from its own result on to the parameters that are met before it, those included.
_THROUGH = {
    "lm_head": ("logprob",),
    "norm": ("lm_head",),
    "gate": ("combine",),
    "gate_up_proj": ("activation", "down_proj"),
    "up_proj": ("activation", "down_proj"),
    "gate_proj": ("activation", "down_proj"),
    "post_attention_layernorm": ("gate_proj", "up_proj"),
    "o_proj": ("residual_add", "post_attention_layernorm"),
    "v_proj": ("attention", "o_proj"),
    "k_norm": ("rope", "attention", "o_proj"),
    "q_norm": ("rope", "attention", "o_proj"),
    "k_proj": ("k_norm",),
    "q_proj": ("q_norm",),
    "input_layernorm": ("q_proj", "k_proj", "v_proj"),
    "embed_tokens": ("residual_add", "input_layernorm of layer 0"),
}
_TIED = {"norm": ("logprob",), "embed_tokens": ("the tied lm_head",)}  # what else, where the head has no parameter
# Parameter -> those whose gradients come through its operator and from nowhere else.
_TAKERS = {
    "lm_head": ("norm",), "norm": ("down_proj",), "down_proj": ("gate_up_proj", "up_proj", "gate_proj"),
    "o_proj": ("v_proj", "k_norm", "q_norm"), "k_norm": ("k_proj",), "q_norm": ("q_proj",),
}  # fmt: skip


def first(parameters: Iterable[str]) -> str:
    """The one that the backward meets before the others."""
    return min(parameters, key=_turn)


def through(parameter: str, model: Architecture, right: Callable[[str], bool]) -> list[str]:
    """Whose backward may be why the gradient is wrong, the nearest first; none where only its own sum can be.

    `right`: whether the gradient of another parameter surely is.
    """
    last, layer = _last(parameter), _layer(parameter)

    def sound(name: str) -> bool:
        """Whether all others that take what this operator passes on are right."""
        takers = [one for one in _takers(name, layer, model) if one != parameter]
        return bool(takers) and all(map(right, takers))

    return [] if sound(last) else [name for name in _way(last, layer, model) if not sound(name)]


def _way(last: str, layer: int | None, model: Architecture) -> tuple[str, ...]:
    if last == "down_proj" and layer is not None:
        behind = f"input_layernorm of layer {layer + 1}" if layer + 1 < model.num_hidden_layers else "norm"
        return (*(("combine",) if model.num_experts else ()), "residual_add", behind)
    if last == "post_attention_layernorm" and model.num_experts:
        return "gate", "gate_up_proj"
    return (*_THROUGH[last], *(_TIED.get(last, ()) if model.tie_word_embeddings else ()))


def _takers(name: str, layer: int | None, model: Architecture) -> list[str]:
    at, wanted = model.num_hidden_layers - 1 if name == "norm" else layer, _TAKERS.get(name, ())
    return [one for one in model.parameter_shapes() if _last(one) in wanted and _layer(one) == at]


def _turn(parameter: str) -> tuple[int, int, int]:
    layer, last = _layer(parameter), _last(parameter)
    if layer is None:
        return {"lm_head": 0, "norm": 1}.get(last, 3), 0, 0
    return 2, -layer, _ORDER.index(last)


def _layer(parameter: str) -> int | None:
    number = parameter.removeprefix("model.layers.").partition(".")[0]
    return int(number) if number.isdigit() else None


def _last(parameter: str) -> str:
    return parameter.removesuffix(".weight").rpartition(".")[2]
