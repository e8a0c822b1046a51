"""Two config.json of one family or another: each thing that differs is told, and told once."""

from __future__ import annotations

import pytest

from rlspec import weight_folders

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


@pytest.mark.parametrize(
    ("model", "count"),
    [({"experts": {"count": 8}}, 8), ({"n_routed_experts": 64}, 64), ({}, 0), ({"num_experts": 0}, 0)],
)
def test_experts_are_counted_as_the_family_spells_them(model, count):
    assert weight_folders.described({**BOTH, **model})["experts"] == count
