"""The sizes of a chain's model, from an entry or a config.json, and the memory that a run needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlspec import catalog, chain_sizes, workloads

SPECS = Path(__file__).parents[1] / "specs"


def chain(name="ws1-chain"):
    return workloads.of(catalog.workload(name, SPECS)).chain


def sizes():
    return chain_sizes.of(catalog.model("qwen3-8b", SPECS))


def test_a_config_json_says_the_same():
    config = {
        "model_type": "qwen3", "num_hidden_layers": 36, "hidden_size": 4096, "intermediate_size": 12288,
        "head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 151936,
        "tie_word_embeddings": False, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    assert chain_sizes.of(config) == sizes()


@pytest.mark.parametrize(
    ("entry", "reason"),
    [({"model_type": "gpt_oss"}, "gpt_oss"), ({"layers": 2, "hidden_size": 8}, "head_dim, heads, intermediate_size")],
)
def test_a_model_that_cannot_be_sized(entry, reason):
    with pytest.raises(ValueError, match=reason):
        chain_sizes.of(entry)


def test_memory_of_the_whole_model():
    need = chain_sizes.memory(chain(), sizes())
    assert need.weights == 2 * sizes().parameter_count() == 16381470720 and need.gradients == 2 * need.weights
    assert 100 < need.resident / 2**30 < 120  # 109.4 GiB were measured on an H200
    assert chain_sizes.memory(chain(), sizes(), backward=False).least < 20 << 30
    assert 76 < need.least / 2**30 < 80 < chain_sizes.memory(chain("long"), sizes()).least / 2**30 < 120
