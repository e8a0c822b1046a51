"""The run file of trainer pithtrain, executed against stand-ins of four generations of its configuration."""

from __future__ import annotations

import dataclasses
import importlib.machinery
import json
import runpy
import sys
import types
from pathlib import Path

import pytest

from rlspec import catalog
from tests.tiny import rlspec, save

# What rlspec's own entries say; the stand-in has the examples of all five.
MODELS = ("deepseek-v2-lite", "gpt-oss-20b", "gpt-oss-120b", "qwen3-30b-a3b", "qwen3.5-35b-a3b")
SHARED = ("sequence_length", "max_steps", "micro_batch_size", "global_batch_size", "model", "moe_load_balance_type",
          "moe_load_balance_coef", "optimizer", "scheduler")  # fmt: skip
STRINGS = (*SHARED, "dataset", "max_lr", "min_lr", "warmup_steps", "fp8_training")
CALLABLES = (*SHARED, "lr", "fp8", "benchmark")
GENERATIONS = {
    "0.1.1": ("pretrain_language_model", "PretrainLanguageModelCfg", STRINGS, ()),
    "skills": ("pretrain_lm", "PretrainLMCfg", (*CALLABLES, "dataset"), ()),
    "dataset": ("pretrain_lm", "PretrainLMCfg", CALLABLES, ("dataset",)),
    "data": ("pretrain_lm", "PretrainLMCfg", CALLABLES, ("data",)),
}

MAKERS = {
    name: types.FunctionType((lambda: None).__code__, {}, name)
    for name in ("make_adamw_optimizer", "make_wsd_scheduler", "make_constant_scheduler")
}


def slotted(name, fields):
    """A configuration class as pith-train has them: slots without defaults, so an unknown name is an AttributeError."""
    return dataclasses.make_dataclass(name, [(field, object) for field in fields], init=False, slots=True)


def stand_in(monkeypatch, generation):
    """The modules of a generation; the list gets each configuration that is launched."""
    task, name, training_fields, own = GENERATIONS[generation]
    launched = []
    parts = {
        "distributed": slotted(
            "DistributedCfg", ("pipeline_parallel_size", "context_parallel_size", "expert_parallel_size")
        ),
        "training": slotted("TrainingCfg", training_fields),
        **({"data": slotted("DataCfg", ("dataset",))} if "data" in own else {}),
    }

    def init(self):
        for part, cls in parts.items():
            setattr(self, part, cls())

    plain = slotted(name, dict.fromkeys([*parts, *own]))
    modules = {
        "pithtrain": types.ModuleType("pithtrain"),
        "pithtrain.tasks": types.ModuleType("pithtrain.tasks"),
        f"pithtrain.tasks.{task}": types.ModuleType(f"pithtrain.tasks.{task}"),
        "pithtrain.modules": types.ModuleType("pithtrain.modules"),
        "pithtrain.modules.training": types.ModuleType("pithtrain.modules.training"),
    }
    for full, module in modules.items():
        module.__spec__ = importlib_spec(full)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, full, module)
    module = modules[f"pithtrain.tasks.{task}"]
    setattr(module, name, type(name, (plain,), {"__init__": init, "__slots__": ()}))
    module.launch = launched.append
    for maker in MAKERS:
        setattr(modules["pithtrain.modules.training"], maker, MAKERS[maker])
    return launched


def importlib_spec(name):
    return importlib.machinery.ModuleSpec(name, None, is_package=True)


def spec(folder, model="qwen3-30b-a3b", kind="correctness", mesh=None, processes=8, dtype="bf16", **settings):
    base = {"name": "base0", "role": "base"}
    data = {
        "kind": kind,
        "question": "Does pith-train train alike?",
        "model": model,
        "mesh": mesh or {"pp": 1, "ep": 8},
        "sequence_length": 2048,
        "dtype": dtype,
        "trainer": {"name": "pithtrain", "settings": {"global_batch_size": 1024, **settings}},
        "launch": {"name": "torchrun", "processes_per_node": processes},
        "arms": [
            base,
            {**base, "name": "base1", "environment": {"A": "1"}},
            {"name": "feat0", "role": "feature", "environment": {"A": "2"}},
        ],
    }
    return save(folder / "spec.yaml", data)


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """The arm's tree with the five examples in both generations' places, and a corpus beside the spec."""
    for folder in ("pretrain_lm", "pretrain_language_model"):
        for model in MODELS:
            place = tmp_path / "examples" / folder / model
            place.mkdir(parents=True)
            (place / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(monkeypatch, path, generation, world=8):
    """The configuration that the rendered run file launches."""
    done = rlspec("render", path)
    assert done.code == 0, done.out + done.err
    launched = stand_in(monkeypatch, generation)
    monkeypatch.setenv("WORLD_SIZE", str(world))
    runpy.run_path(done.out.splitlines()[0], run_name="__main__")
    (cfg,) = launched
    return cfg


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("model", MODELS)
def test_correctness_of_every_model_in_every_generation(tree, monkeypatch, model, generation):
    entry = catalog.model(model, tree)
    corpus = tree / "workspace" / "datasets" / "dclm-baseline" / "toktxt" / entry["tokenizer"]
    corpus.mkdir(parents=True)
    cfg = run(monkeypatch, spec(tree, model), generation)
    training = cfg.training
    assert training.moe_load_balance_type == ("sequence" if model == "deepseek-v2-lite" else "global-batch")
    assert (training.moe_load_balance_coef, training.micro_batch_size, training.global_batch_size) == (1e-3, 1, 1024)
    assert (training.sequence_length, training.max_steps) == (2048, 32)
    holder = {"dataset": cfg, "data": getattr(cfg, "data", None)}.get(generation, training)
    assert holder.dataset == corpus
    if generation == "0.1.1":
        assert training.model == Path("examples/pretrain_lm", model, "config.json")
        assert (training.optimizer, training.scheduler, training.fp8_training) == ("Adam", "Constant", "disabled")
        assert (training.min_lr, training.max_lr, training.warmup_steps) == (1e-6, 1e-5, 31)
        return
    folder = Path("examples/pretrain_lm", model)
    assert training.model == (folder / "config.json" if generation == "skills" else folder)
    assert training.lr == 1e-5 and training.optimizer is MAKERS["make_adamw_optimizer"] and training.fp8 is False
    warm_up = {"start_lr": 1e-6, "warmup_ratio": 1.0, "decay_ratio": 0.0}
    assert training.scheduler.func is MAKERS["make_wsd_scheduler"] and training.scheduler.keywords == warm_up
    assert training.benchmark is False


@pytest.mark.parametrize("generation", ["skills", "dataset", "data"])
@pytest.mark.parametrize("model", MODELS)
def test_performance_of_every_model(tree, monkeypatch, model, generation):
    training = run(monkeypatch, spec(tree, model, "performance", load_balance_coefficient=0), generation).training
    assert training.lr == 1e-6 and training.scheduler is MAKERS["make_constant_scheduler"]
    assert training.benchmark is True and training.max_steps == 8 and training.moe_load_balance_coef == 0


def test_performance_of_the_oldest_generation(tree, monkeypatch):
    with pytest.raises(SystemExit, match="cannot force balanced routing"):
        run(monkeypatch, spec(tree, kind="performance"), "0.1.1")
    training = run(monkeypatch, spec(tree, kind="performance", force_balanced_routing=False), "0.1.1").training
    assert (training.min_lr, training.max_lr, training.warmup_steps, training.max_steps) == (1e-6, 1e-6, 0, 8)


@pytest.mark.parametrize(
    ("mesh", "processes"), [({"pp": 1, "ep": 8}, 8), ({"pp": 2, "ep": 4}, 8), ({"pp": 2, "cp": 2, "ep": 2}, 16)]
)
def test_meshes(tree, monkeypatch, mesh, processes):
    distributed = run(monkeypatch, spec(tree, mesh=mesh, processes=processes), "data", processes).distributed
    assert distributed.pipeline_parallel_size == mesh["pp"] and distributed.expert_parallel_size == mesh["ep"]
    assert distributed.context_parallel_size == mesh.get("cp", 1)


def test_world_sizes_that_are_not_the_specs_are_refused(tree, monkeypatch):
    path = spec(tree)
    with pytest.raises(SystemExit, match="for 8 processes started by torchrun, here are 4"):
        run(monkeypatch, path, "data", 4)
    launch = "launch:\n  name: torchrun\n  processes_per_node: 8\n"
    assert launch in path.read_text()
    path.write_text(path.read_text().replace(launch, "").replace("ep: 8", "ep: 1"))
    assert "is started by torchrun" in rlspec("lint", path).out


@pytest.mark.parametrize(
    ("generation", "name", "value"), [("0.1.1", "fp8_training", "deep-gemm"), ("data", "fp8", True)]
)
def test_fp8(tree, monkeypatch, generation, name, value):
    assert getattr(run(monkeypatch, spec(tree, dtype="fp8"), generation).training, name) == value
    with pytest.raises(SystemExit, match="bf16 or fp8, not in fp32"):
        run(monkeypatch, spec(tree, dtype="fp32"), generation)


def test_a_model_of_ones_own(tree, monkeypatch):
    (tree / "own").mkdir()
    config = {"model_type": "deepseek_v2", "num_hidden_layers": 2, "hidden_size": 64, "n_routed_experts": 8}
    (tree / "own" / "config.json").write_text(json.dumps(config))
    with pytest.raises(SystemExit, match="set trainer.settings.corpus"):
        run(monkeypatch, spec(tree, "own/config.json"), "data")
    cfg = run(monkeypatch, spec(tree, "own/config.json", corpus="tokens"), "data")
    assert json.loads((cfg.training.model / "config.json").read_text()) == config, "a folder of the run's own"
    assert cfg.data.dataset == tree / "tokens" and cfg.training.moe_load_balance_type == "sequence"
    cfg = run(monkeypatch, spec(tree, "own/config.json", corpus="tokens"), "skills")
    assert cfg.training.model.name == "config.json"


def test_a_revision_that_has_moved_on(tree, monkeypatch):
    """An attribute that is gone ends in the run file itself, so the arm could not run it and nothing is judged."""
    monkeypatch.setitem(GENERATIONS, "data", (*GENERATIONS["data"][:2], CALLABLES[1:], ("data",)))
    with pytest.raises(AttributeError, match="sequence_length") as raised:
        run(monkeypatch, spec(tree), "data")
    assert raised.traceback[-1].path.name.endswith("-base0.py")


def test_a_model_that_the_tree_does_not_have(tree, monkeypatch):
    for folder in ("pretrain_lm", "pretrain_language_model"):
        (tree / "examples" / folder / "gpt-oss-20b" / "config.json").unlink()
    with pytest.raises(SystemExit, match="there is no examples/pretrain_lm/gpt-oss-20b/config.json in this tree"):
        run(monkeypatch, spec(tree, "gpt-oss-20b"), "data")
