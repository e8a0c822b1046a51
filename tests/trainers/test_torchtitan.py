"""The run file of trainer torchtitan: what it tells both generations, and torchtitan 0.2 itself on a CPU."""

from __future__ import annotations

import importlib.metadata
import json
import os
import runpy
import subprocess
import sys
import types
from pathlib import Path

import pytest

from rlspec import records
from rlspec.model import Arm
from tests.bench import bench_torchtitan
from tests.tiny import report, rlspec, run_folder, save, statuses
from tests.trainers import stand_ins

SHIM = Path(__file__).with_name("torchtitan_on_cpu")


def version():
    try:
        return importlib.metadata.version("torchtitan")
    except importlib.metadata.PackageNotFoundError:
        return ""


def spec(folder, path="", mesh=None, processes=1, kind="correctness", **settings):
    (folder / "models").mkdir(exist_ok=True)
    save(folder / "models" / "llama3-debug.yaml", {"name": "llama3-debug", "model_type": "llama"})
    usual = {"global_batch_size": 8, "micro_batch_size": 2, "max_steps": 6, "flavor": "debugmodel"}
    more = {"PYTHONPATH": path} if path else {}
    data = {
        "kind": kind,
        "question": "Does torchtitan train alike?",
        "model": "llama3-debug",
        "mesh": mesh or {"pp": 1},
        "sequence_length": 128,
        "dtype": "fp32",
        "trainer": {"name": "torchtitan", "settings": {**usual, **settings}},
        "arms": [
            {"name": "base0", "role": "base", "environment": more},
            {"name": "base1", "role": "base", "environment": {**more, "OFFSET": "0.0001"}},
            {"name": "feat0", "role": "feature", "environment": {**more, "OFFSET": "0.0002"}},
        ],
    }
    if processes > 1:
        data["launch"] = {"name": "torchrun", "processes_per_node": processes}
    return save(folder / "spec.yaml", data)


@pytest.mark.parametrize("generation", ["0.2", "0.3"])
def test_what_each_generation_is_told(tmp_path, monkeypatch, generation):
    pytest.importorskip("tomllib")
    monkeypatch.chdir(tmp_path)
    path = stand_ins.torchtitan(tmp_path / "stand-in", generation)
    done = rlspec("run", spec(tmp_path, path, corpus="data", tokenizer="tok", seed=7, deterministic=True))
    assert done.code == 0, done.out + done.err
    told, folder = stand_ins.told(run_folder()), run_folder()
    assert told["metrics"] == {
        "log_freq": 1, "enable_tensorboard": True, "save_tb_folder": "tb", "disable_color_printing": True,
    }  # fmt: skip
    assert told["debug"] == {"seed": 7, "deterministic": True, "moe_force_load_balance": False}
    assert told["lr_scheduler"] == {"warmup_steps": 6, "decay_ratio": 0.0}
    training = told["training"]
    assert (training["local_batch_size"], training["global_batch_size"], training["seq_len"]) == (2, 8, 128)
    assert training["mixed_precision_param"] == "float32" and training["steps"] == 6
    assert told["parallelism"] == {
        "data_parallel_shard_degree": 1, "pipeline_parallel_degree": 1, "pipeline_parallel_microbatch_size": 2,
        "context_parallel_degree": 1, "expert_parallel_degree": 1,
    }  # fmt: skip
    assert told["optimizer"] == {"name": "AdamW", "lr": 1e-5, "implementation": "for-loop"}
    if generation == "0.2":
        dump = told["job"]["dump_folder"]
        assert told["model"] == {"name": "llama3", "flavor": "debugmodel", "hf_assets_path": str(tmp_path / "tok")}
        assert (training["dataset"], training["dataset_path"]) == ("c4_test", str(tmp_path / "data"))
        assert told["activation_checkpoint"] == {"mode": "none"}
    else:
        dump = told["dump_folder"]
        assert told["dataloader"] == {"dataset": "c4_test", "dataset_path": str(tmp_path / "data")}
        assert told["hf_assets_path"] == str(tmp_path / "tok") and told["training"]["disable_cuda_graphs"] is False
        assert told["checkpoint"] == told["validator"] == {"enable": False}
    assert Path(dump).parent == folder and dump.endswith("-base0.tensorboard"), "a fresh folder for each arm"
    (first,) = folder.glob("*-base0.records.jsonl")
    run = records.read(first, Arm(name="base0", role="base"))
    assert list(run.series["loss"].values)[1] == 4.0 and run.series["step_time"].values[0] == 0.25
    assert 0 < run.series["loss"].resolution < 1e-6, "from the event file, not from five decimals"
    assert report()["verdicts"][0]["statistic"] == pytest.approx(2, rel=1e-3)


def test_performance_has_step_times_that_the_log_lacks(tmp_path, monkeypatch):
    pytest.importorskip("tomllib")
    monkeypatch.chdir(tmp_path)
    done = rlspec("run", spec(tmp_path, stand_ins.torchtitan(tmp_path / "stand-in", "0.2"), kind="performance"))
    assert done.code == 0, done.out + done.err
    told = stand_ins.told(run_folder())
    assert told["lr_scheduler"]["warmup_steps"] == 0 and told["debug"]["moe_force_load_balance"] is True
    (step_time,) = [verdict for verdict in report()["verdicts"] if verdict["judgment"] == "step_time"]
    assert step_time["status"] == "MEASURED" and "0.25" in json.dumps(step_time["evidence"])


def rendered(tmp_path, monkeypatch, **options):
    monkeypatch.chdir(tmp_path)
    no_gpu = types.SimpleNamespace(is_available=lambda: False)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=no_gpu))
    done = rlspec("render", spec(tmp_path, **options))
    assert done.code == 0, done.out + done.err
    return runpy.run_path(done.out.splitlines()[0], run_name="run_file")


@pytest.mark.parametrize(
    ("mesh", "processes", "rank", "local"),
    [({"pp": 1}, 4, 0, 2), ({"pp": 2}, 4, 2, 4), ({"pp": 4}, 4, 3, 8), ({"pp": 1, "cp": 2, "ep": 2}, 4, 0, 2)],
)
def test_meshes(tmp_path, monkeypatch, mesh, processes, rank, local):
    made = rendered(tmp_path, monkeypatch, mesh=mesh, processes=processes, kind="performance")
    assert made["printing_rank"]() == rank, "the first rank of the last stage has the loss"
    told = made["sections"]()[1]
    assert told["training"]["local_batch_size"] == local and told["lr_scheduler"]["warmup_steps"] == 0
    parallel, ep = told["parallelism"], mesh.get("ep", 1)
    assert parallel["pipeline_parallel_degree"] == mesh["pp"] and parallel["expert_parallel_degree"] == ep
    assert parallel["data_parallel_shard_degree"] == processes // mesh["pp"] // mesh.get("cp", 1)
    assert told["debug"]["moe_force_load_balance"] is True


def test_only_the_rank_that_has_the_loss_prints_steps(tmp_path, monkeypatch):
    pytest.importorskip("tomllib")
    path = stand_ins.torchtitan(tmp_path / "stand-in", "0.2")
    monkeypatch.chdir(tmp_path)
    file = rlspec("render", spec(tmp_path, mesh={"pp": 2}, processes=2)).out.splitlines()[0]
    for rank in ("0", "1"):
        environment = {**os.environ, "PYTHONPATH": path, "RANK": rank}
        done = subprocess.run([sys.executable, file], env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.count(" - INFO - step: ") == (6 if rank == "1" else 0)


def test_one_process_needs_no_torchrun(tmp_path, monkeypatch):
    """torchtitan reads LOCAL_RANK and meets its ranks at MASTER_ADDR, also when it is alone."""
    made = rendered(tmp_path, monkeypatch)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.setenv(name, "")  # so that what is set below is taken back
        monkeypatch.delenv(name)
    monkeypatch.setenv("MASTER_PORT", "29500")
    made["alone"]()
    assert [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")] == ["0", "0", "1"]
    assert os.environ["MASTER_PORT"] == "29500", "what a launcher said stands"


def test_names_that_torchtitan_must_be_told(tmp_path, monkeypatch):
    made = rendered(tmp_path, monkeypatch, model="llama4")
    assert made["family"]() == "llama4"
    made["SETTINGS"].pop("flavor")
    with pytest.raises(SystemExit, match="must say flavor"):
        made["family"]()


def test_an_option_that_torchtitan_has_no_more_is_no_fail(tmp_path, monkeypatch):
    """A configuration that moved between two revisions: the arm could not run the file."""
    monkeypatch.chdir(tmp_path)
    path = stand_ins.torchtitan(tmp_path / "stand-in", "0.3")
    registry = tmp_path / "stand-in" / "torchtitan" / "models" / "llama3" / "config_registry.py"
    registry.write_text(registry.read_text().replace("seq_len", "tokens"))
    done = rlspec("run", spec(tmp_path, path))
    assert done.code == 4 and "this arm could not run the file" in " ".join(done.out.split()), done.out
    assert "'seq_len'" in done.out


@pytest.mark.slow
@pytest.mark.skipif(not version().startswith("0.2."), reason="needs torchtitan 0.2 (pip install torchtitan==0.2.2)")
@pytest.mark.parametrize(("mesh", "processes"), [({"pp": 1}, 1), ({"pp": 1}, 2), ({"pp": 2}, 2)], ids=str)
def test_torchtitan_itself_on_a_cpu(tmp_path, monkeypatch, mesh, processes):
    """Three arms of the debug model; a CPU is bit-reproducible, so the floor is zero."""
    tokenizers = pytest.importorskip("tokenizers")
    from pydoc_data.topics import topics

    monkeypatch.chdir(tmp_path)
    texts = [topics[name] for name in sorted(topics)]
    (tmp_path / "data").mkdir()
    (tmp_path / "tok").mkdir()
    (tmp_path / "data" / "data.json").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=2048, special_tokens=["<bos>", "<eos>"])
    made.train_from_iterator(texts, trainer)
    made.save(str(tmp_path / "tok" / "tokenizer.json"))
    ends = {"bos_token": "<bos>", "eos_token": "<eos>", "add_bos_token": True, "add_eos_token": True}
    (tmp_path / "tok" / "tokenizer_config.json").write_text(json.dumps(ends))
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    if processes == 1:
        monkeypatch.setenv("RANK", "0")  # the shim acts where it sees one, and there is no torchrun
    done = rlspec("run", spec(tmp_path, str(SHIM), mesh, processes, corpus="data", tokenizer="tok", max_steps=4))
    assert statuses(report()) == {"base0": "done", "base1": "done", "feat0": "done"}, done.out + done.err
    assert done.code == 0 and [v["status"] for v in report()["verdicts"]] == ["PASS", "PASS"], done.out
    assert "identical to the bit" in done.out


@pytest.mark.slow
@pytest.mark.skipif(not version().startswith("0.2."), reason="needs torchtitan 0.2 (pip install torchtitan==0.2.2)")
def test_the_harmful_branch_of_the_example_on_a_cpu(tmp_path, monkeypatch):
    """No floor on a CPU, but the patch applies to the released package, each arm has the code of its own commit."""
    pytest.importorskip("tokenizers")
    monkeypatch.chdir(tmp_path)
    repository = tmp_path / "torchtitan"
    bench_torchtitan.prepare(repository)
    bench_torchtitan.git(repository, "checkout", "-q", "harmful")
    for name, value in {
        "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1", "RANK": "0", "PYTHONPATH": str(SHIM),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    laid_over = {"repository": repository, "requires.device": "cpu", "dtype": "fp32", "sequence_length": 64,
                 "trainer.settings.max_steps": 2}  # fmt: skip
    words = [word for key, value in laid_over.items() for word in ("--set", f"{key}={value}")]
    done = rlspec("run", bench_torchtitan.EXAMPLE / "branch.yaml", *words)
    assert set(statuses(report()).values()) == {"done"} and len(report()["arms"]) == 7, done.out + done.err
    loss, norm = (verdict["evidence"]["step_1"] for verdict in report()["verdicts"])
    assert loss["feature_delta"] == norm["base_delta"] == 0
    assert norm["values"]["feat0"] == pytest.approx(norm["values"]["base0"] / 4, rel=1e-5), "of four micro-batches"
