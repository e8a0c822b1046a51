"""A mesh does not change the answer: runs on 2 and 4 processes, read against the perturbed envelope of one process.

On gloo with CPUs, and on nccl where there is a GPU for each process; one process is then a GPU's, too.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from array import array
from pathlib import Path
from unittest import mock

import pytest
import torch

from rlspec import catalog, contract
from rlspec.architecture import read
from rlspec.device import faults, parallel, reference
from rlspec.device import settings as settings_module
from rlspec.device.decoder import Decoder, Site, Span
from rlspec.device.job import Job
from rlspec.device.mesh import Mesh, Peers
from rlspec.device.operators import Operators, Segment, Segments
from rlspec.device.trainer import Trainer
from rlspec.drift import judge_drift
from rlspec.model import Arm, Judgment, Run, Series
from tests.processes import LONG

ROOT = Path(__file__).parents[2]
CPU = Job(torch.device("cpu"))
MODELS = {name: catalog.model(name, ROOT / "specs") for name in ("tiny-dense", "tiny-moe")}
ROW = contract.load("training", ROOT / "specs").resolve
METRICS = ("cross-entropy-loss", "load-balance-loss", "gradient-norm")
ALONE = Peers()


def one_ulp(seed):
    return {"weights": "1ulp", "seed": seed}


def configured(
    model="tiny-moe",
    *,
    steps=8,
    dtype="fp32",
    length=32,
    kind="correctness",
    perturb=None,
    spread=0.02,
    implementation="torch",
    **given,
):
    axes = {axis: given.pop(axis, 1) for axis in ("pp", "dp", "cp", "ep")}
    return {
        "kind": kind,
        "model": {**MODELS[model], "initializer_range": spread},
        "mesh": axes,
        "sequence_length": length,
        "dtype": dtype,
        "steps": steps,
        "settings": {"global_batch_size": 4, "seed": 3, **given},
        "spec_dir": str(ROOT),
        "perturb": perturb,
        "implementation": implementation,
    }


# What one process does: `crowded` sends every token to the experts 0 and 1.
def crowded(self, rows, width, device):
    return torch.arange(2, device=device).expand(rows, width, 2)


def train(config, here, crowd=False):
    with mock.patch.object(Decoder, "_balanced", crowded) if crowd else mock.patch.dict({}):
        given = {"perturbation": config["perturb"], "implementation": config["implementation"]}
        trainer = Trainer(settings_module.read(config), here, **given)
        return [(row.metrics, row.data) for row in trainer.run()]


# On several processes each run tells its rows, what of them the processes do not agree on, and of every piece of a
# weight that a process holds the digest, before the training and after it.
SCRIPT = """
import hashlib, json, sys
from pathlib import Path
import torch
import torch.distributed as dist
from rlspec.device import faults, parallel, settings
from rlspec.device.job import join

def crowded(self, rows, width, device):
    return torch.arange(2, device=device).expand(rows, width, 2)

def digests(model):
    return [(name, rows.indices(shape[0])[:2], hashlib.sha256(held.detach().cpu().numpy().tobytes()).hexdigest())
            for name, shape, held, rows in model.laid_out() if held is not None]

def train(config, job):
    given, asked = settings.read(config), config["implementation"]
    kind = faults.trainer(given)
    trainer = kind(given, job, perturbation=config["perturb"], implementation=asked)
    told = [digests(trainer.model)]
    rows = [(row.metrics, row.data) for row in trainer.run()]
    told.append(digests(trainer.model))
    everyone = [None] * job.world
    dist.all_gather_object(everyone, (rows, told))
    return {"rows": rows, "agreed": all(mine == rows for mine, _ in everyone),
            "weights": [told for _, told in everyone], "backend": job.backend}

honest = parallel.ParallelDecoder._balanced
with join() as job:
    found = {}
    for name, config in json.loads(sys.argv[1]).items():
        parallel.ParallelDecoder._balanced = crowded if name == "crowded" else honest
        found[name] = train(config, job)
    if job.rank == 0:
        print("FOUND", json.dumps(found))
# A thread of gloo that is still there when Python shuts down aborts the process, now and then.
threads = {task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")}
assert threads and not any("gloo" in name for name in threads), threads
"""


def start(folder, backend, processes, configs):
    script = folder / "ranks.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if backend == "nccl" and torch.cuda.device_count() < processes:
        pytest.skip(f"needs {processes} CUDA devices")
    if backend == "gloo":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [*launcher, str(script), json.dumps(configs)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("FOUND"))[6:])


@pytest.fixture(scope="module", autouse=True)
def one_thread_and_an_own_cache(tmp_path_factory):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}):
        yield
    torch.set_num_threads(threads)


# Name -> the mesh, and what one process does to have the same micro-batches (global counts grow by micro-step).
TWO = {
    "dense pp2": ({"model": "tiny-dense", "pp": 2}, {"model": "tiny-dense"}),
    "dense dp2": ({"model": "tiny-dense", "dp": 2}, {"model": "tiny-dense"}),
    "dense cp2": ({"model": "tiny-dense", "cp": 2}, {"model": "tiny-dense"}),
    "pp2": ({"pp": 2}, {}),
    "cp2": ({"cp": 2}, {}),
    "dp2·ep2": ({"dp": 2, "ep": 2}, {"micro_batch_size": 2}),
    "cp2·ep2": ({"cp": 2, "ep": 2}, {}),
    "cp2 by sequence": ({"cp": 2, "load_balance_type": "sequence"}, {"load_balance_type": "sequence"}),
    "dp2·ep2 by micro-batch": (
        {"dp": 2, "ep": 2, "load_balance_type": "micro-batch"},
        {"load_balance_type": "micro-batch"},
    ),
}
FOUR = {
    "pp2·dp2·ep2": ({"pp": 2, "dp": 2, "ep": 2}, {"micro_batch_size": 2}),
    "dp2·cp2·ep2": ({"dp": 2, "cp": 2, "ep": 2}, {"micro_batch_size": 2}),
    "pp4": ({"pp": 4}, {}),
    "cp4": ({"cp": 4}, {}),
}
FAULTY = {
    "gradient_norm_per_rank": {"dp": 2, "ep": 2},
    "gradient_norm_of_one_stage": {"model": "tiny-dense", "pp": 2},
    "local_token_count": {"model": "tiny-dense", "cp": 2},
    "positions_not_offset": {"model": "tiny-dense", "cp": 2},
}
# The kernels need GPUs.
KERNELS = {"triton pp2": {"pp": 2}, "triton cp2": {"cp": 2}, "triton dp2·ep2": {"dp": 2, "ep": 2}}
BF16 = {"steps": 2, "dtype": "bf16", "profile": "hf", "load_balance_type": "sequence"}
# Weights large enough for every expert to matter; a piece has ten tokens, so the next one begins at another expert.
FORCED = {"steps": 2, "kind": "performance", "length": 40, "spread": 0.2}
MORE = {
    "perturbed pp2": {"pp": 2, "steps": 1, "perturb": one_ulp(1)},
    "perturbed dp2·ep2": {"dp": 2, "ep": 2, "steps": 1, "perturb": one_ulp(1)},
    "bf16 pp2": {**BF16, "pp": 2},
    "bf16 cp2·ep2": {**BF16, "cp": 2, "ep": 2},
    "crowded": {**FORCED, "dp": 2, "ep": 2},
    "forced pp2": {**FORCED, "pp": 2},
    "forced cp2": {**FORCED, "cp": 2},
}


def meshes(table):
    return {name: configured(**given) for name, (given, _) in table.items()}


@pytest.fixture(scope="module", params=["gloo", pytest.param("nccl", marks=pytest.mark.gpu)])
def backend(request):
    if request.param == "nccl" and not torch.cuda.is_available():
        pytest.skip("needs CUDA devices")
    return request.param


@pytest.fixture(scope="module")
def here(backend):
    return CPU if backend == "gloo" else Job(torch.device("cuda", 0))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory, backend):
    planted = {name: configured(fault=name, **given) for name, given in FAULTY.items()}
    more = {name: configured(**given) for name, given in MORE.items()}
    if backend == "nccl":
        more |= {name: configured(steps=2, implementation="triton", **given) for name, given in KERNELS.items()}
    return start(tmp_path_factory.mktemp("two"), backend, 2, {**meshes(TWO), **planted, **more})


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory, backend):
    return start(tmp_path_factory.mktemp("four"), backend, 4, meshes(FOUR))


@pytest.fixture(scope="module")
def alone(here):
    """One process, with and without perturbation, each setting trained once."""
    made = {}

    def find(perturb=None, **given):
        key = json.dumps([perturb, given], sort_keys=True)
        if key not in made:
            made[key] = train(configured(perturb=perturb, **given), here)
        return made[key]

    return find


def run_of(name, rows, perturb=None):
    steps, metrics = array("q", range(1, len(rows) + 1)), [metrics for metrics, _ in rows]
    series = {
        metric: Series(
            arm=name, metric=metric, steps=steps, values=array("d", [m[metric] for m in metrics]), resolution=0
        )
        for metric in METRICS
        if metric in metrics[0]
    }
    return Run(arm=Arm(name=name, role=name[:4].replace("feat", "feature"), perturb=perturb), series=series)


def verdicts(alone, given, rows):
    """By metric, as of three arms in one process and a feature arm on a mesh."""
    bases = [run_of("base0", alone(**given))]
    for seed in (1, 2):
        bases.append(run_of(f"base{seed}", alone(one_ulp(seed), **given), one_ulp(seed)))
    runs = [*bases, run_of("feat0", rows)]
    return {metric: judge_drift(Judgment(check="drift", metric=metric), runs, ROW) for metric in runs[-1].series}


def passes(alone, table, name, found, backend):
    made, given = found[name], table[name][1]
    judged = verdicts(alone, given, made["rows"])
    assert ("load-balance-loss" in judged) == ("model" not in given)
    for metric, verdict in judged.items():
        assert verdict.status == "PASS" and verdict.evidence["floor"] == "perturbed", (metric, verdict.reason)
    assert made["agreed"] and made["backend"] == backend
    assert [data for _, data in made["rows"]] == [data for _, data in alone(**given)]
    return True


@pytest.mark.parametrize("name", TWO)
def test_two_processes_train_like_one(alone, two_ranks, backend, name):
    assert passes(alone, TWO, name, two_ranks, backend)


@pytest.mark.parametrize("name", FOUR)
def test_four_processes_train_like_one(alone, four_ranks, backend, name):
    assert passes(alone, FOUR, name, four_ranks, backend)


@pytest.mark.parametrize("name", FAULTY)
def test_faults_under_a_mesh_are_caught(alone, two_ranks, name):
    given = {"model": FAULTY[name]["model"]} if "model" in FAULTY[name] else {"micro_batch_size": 2}
    judged = verdicts(alone, given, two_ranks[name]["rows"])
    assert judged["gradient-norm"].status == "FAIL", judged["gradient-norm"].reason


def pieces(found, when):
    """(name, rows) -> the digests that processes tell of it."""
    told = {}
    for process in found["weights"]:
        for name, rows, digest in process[when]:
            told.setdefault((name, tuple(rows)), set()).add(digest)
    return told


@pytest.mark.parametrize("name", ["pp2", "dp2·ep2", "cp2·ep2", "perturbed pp2", "perturbed dp2·ep2"])
def test_weights_are_those_of_one_process_wherever_they_lie(two_ranks, name):
    perturb = one_ulp(1) if "perturbed" in name else None
    model = Trainer(settings_module.read(configured()), CPU, perturbation=perturb).model
    told = pieces(two_ranks[name], 0)
    for (parameter, (first, stop)), digests in told.items():
        rows = model.get_parameter(parameter).detach()[first:stop].contiguous()
        assert digests == {hashlib.sha256(rows.numpy().tobytes()).hexdigest()}, parameter
    for parameter, tensor in model.named_parameters():
        held = sorted(rows for name, rows in told if name == parameter)
        assert held[0][0] == 0 and held[-1][1] == len(tensor)
        assert all(one[1] == other[0] for one, other in zip(held, held[1:], strict=False))


@pytest.mark.parametrize("name", [*TWO, "crowded"])
def test_replicas_stay_equal_to_the_bit(two_ranks, name):
    before, after = (pieces(two_ranks[name], when) for when in (0, 1))
    assert {len(digests) for digests in after.values()} == {1}
    assert all(after[key] != before[key] for key in after)


def test_experts_to_which_no_token_comes(two_ranks, here):
    want = train(configured(micro_batch_size=2, **FORCED), here, crowd=True)
    for (here, _), (there, _) in zip(two_ranks["crowded"]["rows"], want, strict=True):
        assert here["load-balance-loss"] != 1.0  # an even load has exactly 1
        for metric in METRICS:
            assert here[metric] == pytest.approx(there[metric], rel=2e-6)


@pytest.mark.parametrize("name", ["bf16 pp2", "bf16 cp2·ep2"])
def test_narrow_streams_and_rows_go_from_process_to_process(two_ranks, here, name):
    want = train(configured(**BF16), here)
    for (here, _), (there, _) in zip(two_ranks[name]["rows"], want, strict=True):
        for metric in METRICS:
            assert here[metric] == pytest.approx(there[metric], rel=5e-3)


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_train_on_a_mesh_as_in_one_process(two_ranks, here, backend, name):
    if backend == "gloo":
        pytest.skip("kernels need CUDA devices")
    size = KERNELS[name].get("dp", 1)
    want = train(configured(steps=2, implementation="triton", micro_batch_size=size), here)
    for (mine, _), (theirs, _) in zip(two_ranks[name]["rows"], want, strict=True):
        for metric in METRICS:
            assert mine[metric] == pytest.approx(theirs[metric], rel=2e-6)


@pytest.mark.parametrize("name", ["forced pp2", "forced cp2"])
def test_forced_routing_goes_by_the_place_in_the_whole_sequence(alone, two_ranks, name):
    want = alone(**FORCED)
    for (here, _), (there, _) in zip(two_ranks[name]["rows"], want, strict=True):
        assert here["load-balance-loss"] == there["load-balance-loss"] == 1.0
        assert here["gradient-norm"] == pytest.approx(there["gradient-norm"], rel=2e-6)


FAILING = """
import sys, torch
from rlspec.device.job import join
with join() as job:
    job.sum(torch.ones(1, device=job.device))
    if job.rank == 1:
        raise ValueError("rank 1 has had enough")
    print("SUM", job.sum(torch.ones(1 << 20, device=job.device))[0].item())
"""


def test_a_rank_that_fails_ends_the_job_while_another_waits_for_it(tmp_path, backend, word):
    if backend == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("needs 2 CUDA devices")
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if backend == "gloo":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run([*launcher, str(script), word], env=environment, capture_output=True, text=True, timeout=LONG)
    assert done.returncode == 1 and "ValueError: rank 1 has had enough" in done.stderr and "SUM" not in done.stdout


# Without processes


def placed(pp=(0, 1), ep=(0, 1), cp=(0, 1)):
    return Mesh(Peers(*pp), ALONE, Peers(*cp), Peers(*ep), ALONE)


def test_stages_and_experts_part_the_model():
    model = read(MODELS["tiny-moe"])
    stages = [parallel.part(model, placed(pp=(stage, 3))).layers for stage in range(3)]
    assert [layer for layers in stages for layer in layers] == list(range(4)) and min(map(len, stages)) == 1
    shares = [parallel.part(model, placed(ep=(number, 4))).experts for number in range(4)]
    assert shares == [range(0, 2), range(2, 4), range(4, 6), range(6, 8)]


@pytest.mark.parametrize(
    ("model", "change", "mesh", "message"),
    [
        ("tiny-dense", {}, {"pp": (0, 5)}, "mesh: pp 5 stages need a layer each, and the model has 4"),
        ("tiny-dense", {"tie_word_embeddings": True}, {"pp": (0, 2)}, "mesh: pp 2 parts the embedding from the head"),
        ("tiny-dense", {}, {"ep": (0, 2)}, "mesh: ep 2 parts experts, and this model is dense"),
        ("tiny-moe", {}, {"ep": (0, 3)}, "mesh: ep 3 does not divide the 8 experts"),
    ],
)
def test_a_model_that_the_mesh_cannot_cut_is_refused(model, change, mesh, message):
    with pytest.raises(ValueError, match=message):
        parallel.part(read({**MODELS[model], **change}), placed(**mesh))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_zigzag_gives_every_position_to_one_process_and_each_query_its_keys(world):
    pieces = [parallel.zigzag(16, Peers(rank, world)) for rank in range(world)]
    assert sorted(torch.cat(pieces).tolist()) == list(range(16))
    assert len({int(piece.sum()) for piece in pieces}) == 1  # as many keys to meet
    for rank, piece in enumerate(pieces):
        context = parallel.Context(Peers(rank, world), torch.device("cpu"))
        segments = context.begin([Span(0, 0, len(piece)), Span(1, 0, len(piece))], len(piece))
        assert segments.positions.tolist() == [piece.tolist()] * 2
        assert [[int(row.sum()) - 1 for row in grid] for grid in segments.mask] == [piece.tolist()] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_a_key_that_both_pieces_meet_stands_in_a_row_of_each(rank):
    """Kernels write the gradient of a key once a segment, so segments of a row must not share keys."""
    decoder = parallel.ParallelDecoder(read(MODELS["tiny-dense"]), Operators("reference"), placed(cp=(rank, 2)))
    query, key, value = (torch.randn(2, 16, heads, 16, requires_grad=True) for heads in (4, 2, 2))
    pieces = [parallel.zigzag(16, Peers(number, 2)) for number in range(2)]
    decoder.context.begin([Span(0, 0, 8), Span(1, 0, 8)], 8)
    gathered = torch.stack([torch.stack((key[:, piece], value[:, piece])) for piece in pieces])
    mine = [tuple(x[:, pieces[rank]] for x in (query, key, value))]
    with mock.patch("rlspec.device.mesh.gather", lambda x, peers: gathered):
        (out,) = decoder.attend([Site(None, 0, None)], mine, decoder.context)
    whole = Segments(tuple(Segment(row, 0, 16, 0, 16) for row in range(2)), 2, 16, 16, torch.device("cpu"))
    want = reference.attention(query, key, value, whole, scale=0.25)[:, pieces[rank]]
    torch.testing.assert_close(out, want, rtol=1e-6, atol=1e-6)
    for here, there in zip(*(torch.autograd.grad(x.sum(), (query, key, value)) for x in (out, want)), strict=True):
        torch.testing.assert_close(here, there, rtol=1e-5, atol=1e-6)
    rows = [entry.row for entry in decoder.context.pieces.entries]
    assert rows == [0, 1, 2, 3] == list(range(decoder.context.pieces.rows))


def test_names_and_order_of_parameters_are_those_that_weights_are_drawn_in():
    for model in MODELS.values():
        architecture = read(model)
        decoder = Trainer(settings_module.read(configured(model["name"])), CPU).model
        shapes = {name: tuple(parameter.shape) for name, parameter in decoder.named_parameters()}
        assert list(shapes.items()) == list(architecture.parameter_shapes().items())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"fault": "positions_not_offset"}, "needs cp 2"),
        ({"fault": "gradient_norm_per_rank", "pp": 2}, "needs dp 2 or cp 2"),
        ({"fault": "gradient_norm_of_one_stage", "dp": 2}, "needs pp 2"),
    ],
)
def test_a_fault_that_a_mesh_cannot_show_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        faults.trainer(settings_module.read(configured(**given)))
