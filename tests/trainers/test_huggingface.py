"""The run file of trainer huggingface: rendered for models of two sorts, and run with transformers itself."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import runpy
from pathlib import Path

import pytest

from rlspec import architecture, records
from rlspec.model import Arm
from tests.tiny import report, rlspec, run_folder, save, statuses

ROOT = Path(__file__).parents[2]
needs = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torch", "transformers", "accelerate")),
    reason="the Hugging Face trainer needs torch, transformers and accelerate",
)


def spec(folder, model="tiny-moe", **settings):
    data = {
        "kind": "correctness",
        "question": "Alike with other numbers of threads?",
        "model": model,
        "mesh": {"pp": 1},
        "sequence_length": 32,
        "dtype": "fp32",
        "trainer": {"name": "huggingface", "settings": {"global_batch_size": 4, "micro_batch_size": 2, **settings}},
        "arms": [
            {"name": "base0", "role": "base", "environment": {"OMP_NUM_THREADS": "1"}},
            {"name": "base1", "role": "base", "environment": {"OMP_NUM_THREADS": "2"}},
            {"name": "feat0", "role": "feature", "environment": {"OMP_NUM_THREADS": "3"}},
        ],
    }
    return save(folder / "spec.yaml", data)


@needs
def test_an_arm_is_judged_from_all_digits(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = rlspec("run", spec(tmp_path, max_steps=3), "--arm", "base0")
    assert statuses(report())["base0"] == "done", done.out + done.err
    (path,) = run_folder().glob("*-base0.records.jsonl")
    run = records.read(path, Arm(name="base0", role="base"))
    assert list(run.series["loss"].steps) == list(run.series["grad_norm"].steps) == [1, 2, 3] and not run.faults
    assert run.series["loss"].resolution == 0 and 5 < run.series["loss"].values[0] < 6
    assert list(run.series["step_time"].steps) == [2, 3] and "tokens_per_second" in run.series
    seen = next(arm for arm in report()["arms"] if arm["name"] == "base0")["provenance"]
    assert seen["versions"]["transformers"] and seen["ranks"] is None
    (state,) = run_folder().glob("*-base0.trainer_state.json")
    rates = [entry["learning_rate"] for entry in json.loads(state.read_text())["log_history"] if "loss" in entry]
    assert rates[-1] == pytest.approx(1e-5) and rates[0] == pytest.approx(4e-6), "a warm-up to the last step"


def rendered(tmp_path, monkeypatch, model):
    monkeypatch.chdir(tmp_path)
    done = rlspec("render", spec(tmp_path, model))
    assert done.code == 0, done.err
    return runpy.run_path(done.out.splitlines()[0], run_name="run_file")


@needs
def test_models(tmp_path, monkeypatch):
    moe = rendered(tmp_path, monkeypatch, "tiny-moe")["configuration"]()
    assert moe.model_type == "qwen3_moe" and moe.num_experts == 8 and moe.vocab_size == 257 and moe.head_dim == 16
    made = rendered(tmp_path, monkeypatch, "tiny-moe")["Corpus"]
    prose = made(None, 257)
    assert len(prose) > 1000 and prose[1]["input_ids"].shape == (32,)
    with pytest.raises(SystemExit, match="the corpus nowhere has no 32 tokens in a row"):
        made("nowhere", 257)
    with pytest.raises(SystemExit, match="has token 226, the model 100"):
        made(None, 100)
    with pytest.raises(SystemExit, match="kv_lora_rank.*config.json"):
        rendered(tmp_path, monkeypatch, "deepseek-v2-lite")["configuration"]()
    (tmp_path / "own").mkdir()
    config = {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 64, "vocab_size": 300, "dtype": "bfloat16"}
    (tmp_path / "own" / "config.json").write_text(json.dumps(config))
    own = rendered(tmp_path, monkeypatch, "own/config.json")["configuration"]()
    assert own.model_type == "llama" and own.hidden_size == 64 and own.dtype is None


def test_what_it_cannot_do_is_refused(tmp_path):
    path = spec(tmp_path)
    done = rlspec("lint", path)
    assert done.code == 0, done.out
    launch = "launch: {name: torchrun, processes_per_node: 2}\n"
    path.write_text(path.read_text().replace("  pp: 1\n", "  pp: 1\n  ep: 2\n") + launch)
    assert "RL229" in rlspec("lint", path).out and rlspec("lint", path).code == 2
    path = spec(tmp_path, logging_nan_inf_filter=True)
    assert "RL214" in rlspec("lint", path).out


def test_a_run_file_translates_entries_as_the_host_reads_them():
    """It stands alone, so it has a table of its own; of keys that the host does not read, too."""
    text = (ROOT / "templates" / "training" / "huggingface.py.j2").read_text(encoding="utf-8")
    names, experts = (
        ast.literal_eval(re.search(rf"^{table} = (\{{.*?^\}})", text, re.DOTALL | re.MULTILINE)[1])
        for table in ("NAMES", "EXPERTS")
    )
    assert architecture.NAMES.items() <= names.items() and experts == architecture.EXPERTS
