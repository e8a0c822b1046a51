"""A wrong gradient is blamed on the parameter that the backward meets first, and on what that may have come through."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlspec import catalog, chain_backward, chain_sizes

SPECS = Path(__file__).parents[1] / "specs"
DENSE, SPARSE = (chain_sizes.of(catalog.model(name, SPECS)) for name in ("tiny-dense", "tiny-moe"))
TIED = chain_sizes.of({**catalog.model("tiny-dense", SPECS), "tie_word_embeddings": True})
LAYER = "model.layers.1."


def blamed(model, sound):
    """Where `sound` gradients are right and all others wrong."""
    wrong = [name for name in model.parameter_shapes() if not any(one in name for one in sound)]
    first = chain_backward.first(reversed(wrong))
    return first, chain_backward.through(first, model, lambda name: name not in wrong)


HEAD, LATER = ("lm_head", "model.norm"), ("lm_head", "model.norm", "layers.2.", "layers.3.")
MLP = (*LATER, *(f"layers.1.mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")))


@pytest.mark.parametrize(
    ("model", "sound", "first", "through"),
    [
        (DENSE, (), "lm_head.weight", ["logprob"]),
        (DENSE, ("lm_head",), "model.norm.weight", ["lm_head"]),
        (TIED, (), "model.norm.weight", ["lm_head", "logprob"]),
        (DENSE, HEAD, "model.layers.3.mlp.down_proj.weight", ["residual_add", "norm"]),
        (DENSE, LATER, f"{LAYER}mlp.down_proj.weight", ["residual_add", "input_layernorm of layer 2"]),
        (DENSE, (*LATER, "1.mlp.down"), f"{LAYER}mlp.up_proj.weight", ["activation", "down_proj"]),
        (DENSE, (*LATER, "1.mlp.down", "1.mlp.up"), f"{LAYER}mlp.gate_proj.weight", ["activation"]),
        (DENSE, MLP, f"{LAYER}post_attention_layernorm.weight", ["gate_proj", "up_proj"]),
        (DENSE, (*MLP, "1.post"), f"{LAYER}self_attn.o_proj.weight", ["residual_add", "post_attention_layernorm"]),
        (DENSE, (*MLP, "1.post", "1.self_attn.o"), f"{LAYER}self_attn.v_proj.weight", ["attention", "o_proj"]),
        (DENSE, (*MLP, "1.post", "1.self_attn.o", "1.self_attn.v", "1.self_attn.q_norm"),
         f"{LAYER}self_attn.k_norm.weight", ["rope", "attention"]),
        (DENSE, (*MLP, "1.post", "_norm", "1.self_attn.o", "1.self_attn.v"), f"{LAYER}self_attn.k_proj.weight",
         ["k_norm"]),
        (DENSE, (*MLP, "1.post", "1.self_attn"), f"{LAYER}input_layernorm.weight", ["q_proj", "k_proj", "v_proj"]),
        (DENSE, ("lm_head", "norm", "layers."), "model.embed_tokens.weight",
         ["residual_add", "input_layernorm of layer 0"]),
        (SPARSE, LATER, f"{LAYER}mlp.experts.down_proj", ["combine", "residual_add", "input_layernorm of layer 2"]),
        (SPARSE, (*LATER, "1.mlp.experts.down"), f"{LAYER}mlp.gate.weight", ["combine"]),
        (SPARSE, (*LATER, "1.mlp."), f"{LAYER}post_attention_layernorm.weight", ["gate", "gate_up_proj"]),
    ],
)  # fmt: skip
def test_the_operators_that_the_first_wrong_gradient_came_through(model, sound, first, through):
    assert blamed(model, sound) == (first, through)


def test_where_what_comes_behind_is_right_only_the_sum_itself_is_wrong():
    for name in ("self_attn.k_norm.weight", "self_attn.o_proj.weight", "mlp.down_proj.weight"):
        assert chain_backward.through(f"{LAYER}{name}", DENSE, lambda other: True) == []
    assert chain_backward.through("model.norm.weight", DENSE, lambda other: True) == []
    # What goes into a norm of the stream has another way beside it, so that nothing behind can clear it.
    assert chain_backward.through(f"{LAYER}input_layernorm.weight", DENSE, lambda other: True)


@pytest.mark.parametrize("model", [DENSE, SPARSE, TIED])
def test_every_parameter_has_its_place_on_the_way_back(model):
    ordered = sorted(model.parameter_shapes(), key=lambda name: chain_backward._turn(name))
    assert ordered[-1] == "model.embed_tokens.weight" and len(set(map(chain_backward._turn, ordered))) == len(ordered)
    assert all(chain_backward.through(name, model, lambda other: False) for name in ordered)
