"""Two config.json of one family or another: each thing that differs is told, and told once."""

from __future__ import annotations

import json
import os

import pytest

from rlspec import weight_folders
from rlspec.architecture import Unimplemented

BOTH = {"num_hidden_layers": 2, "hidden_size": 64}


@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        ({"num_experts": 8}, {"num_experts": 4}, [("experts", 8, 4)]),
        ({"n_routed_experts": 8}, {"n_routed_experts": 4}, [("experts", 8, 4)]),
        ({"num_experts_per_tok": 2}, {"num_experts_per_tok": 4}, [("experts.top_k", 2, 4)]),
        ({"norm_topk_prob": None}, {"norm_topk_prob": True}, [("norm_topk_prob", None, True)]),
        ({"num_experts": 8, "n_routed_experts": 1}, {"num_experts": 8, "n_routed_experts": 2},
         [("n_routed_experts", 1, 2)]),
        ({"rope_parameters": {"rope_theta": 1.0}}, {"rope_parameters": {"rope_theta": 2.0}},
         [("rope_theta", 1.0, 2.0)]),
        ({"hidden_act": "silu", "use_cache": True}, {"hidden_act": "gelu"}, [("hidden_act", "silu", "gelu")]),
    ],
)  # fmt: skip
def test_what_differs_is_told_once(one, other, told):
    assert list(weight_folders.apart({**BOTH, **one}, {**BOTH, **other})) == told


def test_a_config_that_cannot_be_read_is_named(tmp_path):
    assert weight_folders.unfit(BOTH, tmp_path) is None and weight_folders.config(tmp_path) is None
    (tmp_path / "config.json").write_text("{bad")
    assert weight_folders.unfit(BOTH, tmp_path).startswith("its config.json: Expecting property name")
    assert weight_folders.config(tmp_path) is None


@pytest.mark.parametrize("kind", ["folder", "link to nothing", "pipe"])
def test_a_config_that_is_no_file_is_not_a_config_that_is_not_there(tmp_path, kind):
    path = tmp_path / "config.json"
    made = {"folder": path.mkdir, "link to nothing": lambda: path.symlink_to("x"), "pipe": lambda: os.mkfifo(path)}
    made[kind]()
    assert weight_folders.unfit(BOTH, tmp_path) == "its config.json is no file that can be read"


@pytest.mark.parametrize(
    ("there", "told"),
    [
        ({"num_attention_heads": "4"}, "heads is 4, and '4' there"),
        ({"num_attention_heads": 8}, "heads is 4, and 8 there"),
        ({"model_type": "llama"}, "model_type is qwen3, and llama there"),
    ],
)
def test_a_value_of_another_type_is_told_as_one(tmp_path, there, told):
    (tmp_path / "config.json").write_text(json.dumps(there))
    assert weight_folders.unfit({"heads": 4, "model_type": "qwen3"}, tmp_path) == told


def test_a_config_of_more_than_the_decoder_does_is_not_of_another_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**BOTH, "attn_logit_softcapping": 50.0}))
    with pytest.raises(Unimplemented, match=r"config\.json: .*: key attn_logit_softcapping is not implemented"):
        weight_folders.unfit(BOTH, tmp_path)
    assert weight_folders.unfit({**BOTH, "hidden_size": 32}, tmp_path) == "hidden_size is 32, and 64 there"


@pytest.mark.parametrize(
    ("model", "count"),
    [({"experts": {"count": 8}}, 8), ({"n_routed_experts": 64}, 64), ({}, 0), ({"num_experts": 0}, 0)],
)
def test_experts_are_counted_as_the_family_spells_them(model, count):
    assert weight_folders.described({**BOTH, **model})["experts"] == count
