from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rlspec import document, linting
from rlspec.errors import SpecError

ROOT = Path(__file__).parents[1]
GOOD = ROOT / "specs" / "correctness" / "qwen3-30b-a3b.yaml"
CONFIG = {
    "model_type": "qwen3", "num_hidden_layers": 4, "vocab_size": 257, "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128, "rope_theta": 1e4, "rms_norm_eps": 1e-6,
}  # fmt: skip


@pytest.fixture
def spec(tmp_path):
    shutil.copy(GOOD, tmp_path / "spec.yaml")
    return tmp_path / "spec.yaml"


def rules(*paths, **options):
    return [problem.rule for problem in linting.lint(paths, **options)[1]]


def test_all_shipped_specs_lint():
    specs, problems = linting.lint([ROOT / "specs"])
    assert problems == [] and len(specs) >= 12


def test_all_problems_of_all_files_at_once(tmp_path, spec):
    text = spec.read_text().replace("qwen3-30b-a3b", "qwen3-30b-a3").replace("sequence_length", "sequence_lenght")
    (tmp_path / "a.yaml").write_text(text)
    (tmp_path / "b.yaml").write_text("kind: x\n")
    assert sorted(rules(tmp_path)) == ["RL101", "RL106", "RL201"]


def test_specs_of_one_model_that_differ_in_size_are_warned_about(tmp_path, spec):
    (tmp_path / "other.yaml").write_text(spec.read_text().replace("sequence_length: 2048", "sequence_length: 4096"))
    assert rules(tmp_path) == ["RL219"]


def test_catalog_data_is_linted_with_its_own_schema(tmp_path):
    (tmp_path / "contracts").mkdir()
    row = "  - {judgment: drift, limits: {pass_below: 3}, source: s, date: '2026-11-29', reason: because}\n"
    path = tmp_path / "contracts" / "mine.yaml"
    path.write_text(f"name: mine\nrows:\n{row}{row}")
    assert rules(path) == ["RL401"]
    path.write_text(f"name: mine\nrows:\n{row.replace(', reason: because', '')}")
    assert rules(path) == ["RL102"]
    (tmp_path / "pins").mkdir()
    path = tmp_path / "pins" / "mine.yaml"
    path.write_text("index_sha256: null\nshards: [a]\ncontent_hash: x\n")
    assert rules(path) == ["RL103", "RL105"]


def test_own_catalog_entries_are_found_above_the_spec(tmp_path, spec):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "mine.yaml").write_text("name: mine\n")
    (tmp_path / "deep" / "er").mkdir(parents=True)
    path = tmp_path / "deep" / "er" / "s.yaml"
    path.write_text(spec.read_text().replace("model: qwen3-30b-a3b", "model: mine"))
    assert rules(path) == []
    (tmp_path / "deep" / ".git").mkdir()
    assert rules(path) == ["RL201"]


def test_a_path_that_is_not_there():
    with pytest.raises(SpecError, match="nowhere"):
        linting.lint([Path("nowhere")])


def test_overrides(spec):
    read, _ = document.read(spec)
    made = linting.override(read, ["trainer.settings.max_steps=8", "arms.2.revision=other", "question=why"])
    assert made.data["trainer"]["settings"]["max_steps"] == 8
    assert made.data["arms"][2]["revision"] == "other" and made.data["question"] == "why"
    assert read.data["question"] != "why"


@pytest.mark.parametrize("text", ["x", "=1", "arms.9.name=x", "model.x=1", "a=[1"])
def test_bad_overrides(spec, text):
    read, _ = document.read(spec)
    with pytest.raises(SpecError, match="--set"):
        linting.override(read, [text])


def test_an_override_is_linted(spec):
    assert "RL203" in rules(spec, overrides=["mesh.pp=3"])


def test_revisions_of_the_embedded_trainer_are_revisions_of_rlspec(tmp_path):
    text = (ROOT / "tests" / "bad_specs" / "RL230-fault.yaml").read_text()
    text = text.replace(", settings: {fault: mean_of_means}", "").replace("role: base}", "role: base, revision: main}")
    text = text.replace("role: base, perturb", "role: base, revision: main, perturb")
    text = text.replace("role: feature,", "role: feature, revision: main,")
    path = tmp_path / "spec.yaml"
    path.write_text(text)
    assert rules(path) == ["RL231"]
    (tmp_path / "rlspec" / "device").mkdir(parents=True)
    assert rules(path) == []


def test_samples_of_a_prepared_corpus_are_known(tmp_path):
    text = (ROOT / "tests" / "bad_specs" / "RL230-fault.yaml").read_text()
    text = text.replace("settings: {fault: mean_of_means}", "settings: {corpus: c}")
    path = tmp_path / "spec.yaml"
    path.write_text(text)
    assert rules(path) == []
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "manifest.json").write_text('{"files": [{"tokens": 6401}, {"tokens": 64}]}')
    assert rules(path) == ["RL209"]  # 100 samples of 64 tokens, 256 are needed


def test_a_pipeline_needs_a_head_of_its_own_and_a_layer_a_stage(tmp_path):
    config = {**CONFIG, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = (ROOT / "specs" / "correctness" / "tiny-dense-pp2.yaml").read_text()
    path = tmp_path / "spec.yaml"
    path.write_text(text.replace("model: tiny-dense", "model: ./config.json"))
    (problem,) = linting.lint([path])[1]
    assert problem.rule == "RL229" and "mesh: pp 2 parts the embedding from the head" in problem.message
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    assert rules(path) == []
    path.write_text(path.read_text().replace("pp: 2", "pp: 5").replace("per_node: 2", "per_node: 5"))
    assert rules(path) == ["RL229"]


@pytest.mark.parametrize("key", ["attention_bias", "attn_logit_softcapping"])
@pytest.mark.parametrize(
    ("kind", "name"),
    [("chain", "tiny-cpu"), ("operators", "cpu"), ("correctness", "tiny-dense-pp2"), ("parity", "own-decoder")],
)
def test_a_config_with_what_the_decoder_does_not_do_is_refused_by_the_name_of_the_key(tmp_path, kind, name, key):
    text = (ROOT / "specs" / kind / f"{name}.yaml").read_text()
    spec = tmp_path / "spec.yaml"
    spec.write_text("\n".join("model: ./config.json" if line[:6] == "model:" else line for line in text.splitlines()))
    (tmp_path / "tokens.jsonl").write_text('{"sample": "s0", "prompt": [5], "response": [9, 4]}')
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert "RL313" not in rules(spec)
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, key: True}))
    (problem,) = (problem for problem in linting.lint([spec])[1] if problem.rule == "RL313")
    assert key in problem.message


def test_a_model_that_is_no_text_is_one_problem(tmp_path):
    text = (ROOT / "specs" / "correctness" / "tiny-dense-pp2.yaml").read_text()
    (tmp_path / "spec.yaml").write_text(text.replace("model: tiny-dense", "model: 5"))
    assert "RL103" in rules(tmp_path / "spec.yaml")
