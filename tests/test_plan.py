from __future__ import annotations

from pathlib import Path

import pytest

from rlspec import plan
from rlspec.model import Arm, Judgment, Launch, Mesh, Spec, Trainer


def spec(**changes):
    fields = {
        "kind": "correctness",
        "name": "n",
        "path": Path("specs/n.yaml"),
        "digest": "",
        "question": "",
        "arms": (Arm(name="base0", role="base"), Arm(name="base1", role="base"), Arm(name="feat0", role="feature")),
        "judgments": (Judgment(check="drift"),),
        "contract": "training",
        "data": {},
        "mesh": Mesh(pp=2, dp=8, ep=8),
        "trainer": Trainer(name="pithtrain", settings={"max_steps": 32}),
    }
    return Spec(**{**fields, **changes})


def test_tag_spells_every_dimension():
    assert plan.tag(spec()) == "pp2-dp8-cp1-ep8-seq2048-bf16"
    assert plan.tag(spec(dtype="fp8", sequence_length=4096)) == "pp2-dp8-cp1-ep8-seq4096-fp8"


def test_a_changed_fixture_shows_in_the_tag():
    changed = plan.tag(spec(trainer=Trainer(name="pithtrain", settings={"max_steps": 16})))
    other = plan.tag(spec(trainer=Trainer(name="pithtrain", settings={"max_steps": 8})))
    assert changed.startswith("pp2-dp8-cp1-ep8-seq2048-bf16-fx") and len(changed.rpartition("fx")[2]) == 6
    assert changed != other


@pytest.mark.parametrize(("text", "value"), [("90s", 90), ("30m", 1800), ("2h", 7200), (None, None)])
def test_seconds(text, value):
    assert plan.seconds(text) == value


@pytest.mark.parametrize(
    ("degrees", "world", "words"),
    [((8, 1, 1), 12, "pp 8"), ((2, 3, 1), 16, "cp 3"), ((2, 1, 3), 16, "ep 3"), ((2, 4, 8), 16, None)],
)
def test_mesh_arithmetic(degrees, world, words):
    found = plan.mesh_problem(*degrees, world)
    assert (found is None) if words is None else (words in found)


def test_dp_is_inferred_and_experts_have_their_own():
    mesh = plan.mesh({"pp": 2, "cp": 2, "ep": 8}, 32)
    assert (mesh.dp, mesh.world_size, mesh.expert_dp) == (8, 32, 2)


def test_launch():
    assert plan.launch({}).world_size == 1
    assert plan.launch({"name": "slurm", "nodes": 2, "gpus_per_node": 8}) == Launch(
        name="slurm", nodes=2, processes_per_node=8, gpus=True
    )
    more = {"queue_limit": "30m", "options": ["-A x"]}
    more = plan.launch({"name": "slurm", "nodes": 2, "processes_per_node": 4, **more})
    assert (more.gpus, more.queue_limit, more.options) == (False, 1800.0, ("-A x",))


def test_base_copy_takes_the_next_name_and_seed():
    assert plan.base_copy(spec()).name == "base2"
    perturbed = Arm(name="base1", role="base", perturb={"weights": "1ulp", "seed": 7})
    arms = (Arm(name="base0", role="base"), perturbed, Arm(name="base2", role="feature"))
    copied = plan.base_copy(spec(arms=arms))
    assert copied.name == "base3" and copied.perturb == {"weights": "1ulp", "seed": 8} and copied.role == "base"


def test_run_file_suffix():
    assert plan.run_file_suffix(Path("a/run.py.j2")) == ".py"
    assert plan.run_file_suffix(Path("job.toml.jinja")) == ".toml"
