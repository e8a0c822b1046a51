from __future__ import annotations

import json

import pytest

from rlspec import catalog, config_json
from rlspec.errors import SpecError

MODELS = ["qwen3-30b-a3b", "qwen3.5-35b-a3b", "deepseek-v2-lite", "gpt-oss-20b", "gpt-oss-120b", "qwen3-8b", "char-gpt"]


@pytest.fixture
def own(tmp_path):
    """A repository with a model of its own, and a folder deep in it."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "mine.yaml").write_text("name: mine\nlayers: 3\n")
    (tmp_path / "specs" / "deep").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize("name", MODELS)
def test_shipped_models(tmp_path, name):
    found = catalog.model(name, tmp_path)
    assert found["name"] == name
    assert {"layers", "hidden_size"} <= set(found)
    assert catalog.checked("models", catalog.find("models", name, tmp_path))[1] == []


def test_shipped_models_of_the_mixture_of_experts_kind_say_how_they_are_balanced(tmp_path):
    for name in MODELS[:5]:
        found = catalog.model(name, tmp_path)
        assert found["experts"]["count"] >= 32 and found["tokenizer"], name
        assert found["load_balance_type"] == ("sequence" if name == "deepseek-v2-lite" else "global-batch"), name


def test_own_entries_are_found_from_below_and_go_before_shipped_ones(own):
    deep = own / "specs" / "deep"
    assert catalog.home(deep) == own and catalog.model("mine", deep) == {"name": "mine", "layers": 3}
    (own / "models" / "qwen3-8b.yaml").write_text("name: qwen3-8b\nlayers: 1\n")
    assert catalog.model("qwen3-8b", deep)["layers"] == 1
    assert {"mine", "qwen3-30b-a3b"} <= set(catalog.entries("models", deep))


def test_what_one_caller_changes_another_one_does_not_see(tmp_path):
    for _ in range(2):
        entry, tier = catalog.model("qwen3-30b-a3b", tmp_path), catalog.workload("tiny", tmp_path)["tiers"][0]
        assert entry["experts"].pop("count") and tier.pop("name")


def test_the_search_ends_at_the_top_of_the_repository(own):
    (own / "specs" / ".git").mkdir()
    assert catalog.home(own / "specs" / "deep") is None
    with pytest.raises(SpecError, match="unknown model 'mine'; .*known: char-gpt, "):
        catalog.model("mine", own / "specs" / "deep")


def test_a_path_is_relative_to_the_spec(own):
    assert catalog.model("../../models/mine.yaml", own / "specs" / "deep")["name"] == "mine"
    with pytest.raises(SpecError, match="unknown model 'nowhere/mine.yaml'"):
        catalog.model("nowhere/mine.yaml", own)


def test_a_hugging_face_config(own):
    config = {"num_hidden_layers": 48, "hidden_size": 2048, "num_experts": 128, "vocab_size": 151936, "other": 1}
    (own / "Qwen3").mkdir()
    (own / "Qwen3" / "config.json").write_text(json.dumps(config))
    assert catalog.model("Qwen3/config.json", own) == {
        "name": "Qwen3",
        "layers": 48,
        "hidden_size": 2048,
        "vocabulary_size": 151936,
        "experts": {"count": 128},
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not a readable config.json"),
        ("[]", "holds one object"),
        ("[" * 200_000, "nested too deep"),
        ('{"vocab_size": 5, "vocab_size": 6}', "key 'vocab_size' stands twice"),
        ('{"rms_norm_eps": NaN}', "NaN is not a finite number"),
        ('{"rope_theta": 1e999}', "1e999 is not a finite number"),
        ('{"num_hidden_layers": 1' + "0" * 30 + "}", "num_hidden_layers 1(0+) is outside 0 to 1024"),
        ('{"num_hidden_layers": 1' + "0" * 400 + "}", "num_hidden_layers a number of 1329 bits is outside 0 to 1024"),
        ('{"num_experts": 65537}', "num_experts 65537 is outside 0 to 65536"),
        ('{"hidden_size": "64"}', "hidden_size is '64', not int"),
        (" " * (1 << 20) + "{}", "has at most 1048576"),
    ],
)
def test_a_config_that_cannot_be_read(own, text, words):
    (own / "config.json").write_text(text)
    with pytest.raises(SpecError, match=f"config.json: .*{words}"):
        catalog.model("./config.json", own)


def test_an_entry_with_a_mistake_is_told_with_its_place(own):
    (own / "models" / "mine.yaml").write_text("name: mine\nlayer: 3\n")
    with pytest.raises(SpecError, match=r"mine.yaml:2:1: unknown key 'layer'"):
        catalog.model("mine", own)


def test_a_file_that_is_no_yaml(own):
    (own / "models" / "mine.yaml").write_text("a: [")
    with pytest.raises(SpecError, match="mine.yaml:"):
        catalog.model("mine", own)


def test_a_template_gets_the_whole_config(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "rope_theta": 1e6, "num_hidden_layers": 2}')
    assert catalog.whole("./config.json", tmp_path) == {
        "model_type": "qwen3",
        "rope_theta": 1e6,
        "num_hidden_layers": 2,
    }
    assert catalog.whole("qwen3-8b", tmp_path)["layers"] == 36


def test_sizes_of_entries_have_the_limits_of_config_json(own):
    for key, theirs in {"layers": "num_hidden_layers", "vocabulary_size": "vocab_size", "heads": "num_attention_heads",
                        "hidden_size": "hidden_size", "head_dim": "head_dim"}.items():  # fmt: skip
        (own / "models" / "mine.yaml").write_text(f"name: mine\n{key}: {config_json.LIMITS[theirs]}\n")
        assert catalog.model("mine", own)
        (own / "models" / "mine.yaml").write_text(f"name: mine\n{key}: {config_json.LIMITS[theirs] + 1}\n")
        with pytest.raises(SpecError, match=rf"mine.yaml:2:\d+: {key}: .* is above {config_json.LIMITS[theirs]}"):
            catalog.model("mine", own)
