from __future__ import annotations

import ast
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rlspec import catalog, logs, records, render, schema, trainers
from rlspec.device import data, faults, perturb, training_harness, worker
from rlspec.device import settings as settings_module
from rlspec.device.adamw import AdamW
from rlspec.device.decoder import RouterStatistics
from rlspec.device.job import Job, join
from rlspec.device.mesh import Mesh
from rlspec.device.trainer import BETAS, EPSILON, Balance, Row, Trainer
from rlspec.model import Arm

ROOT = Path(__file__).parents[2]
HERE = Job(torch.device("cpu"))
MODELS = {name: catalog.model(name, ROOT / "specs") for name in ("tiny-dense", "tiny-moe")}
ONE_ULP = {"weights": "1ulp", "seed": 1}


@pytest.fixture(scope="module", autouse=True)
def one_thread_and_an_own_cache(tmp_path_factory):
    threads, cache = torch.get_num_threads(), os.environ.get("XDG_CACHE_HOME")
    torch.set_num_threads(1)
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    yield
    torch.set_num_threads(threads)
    os.environ.pop("XDG_CACHE_HOME")
    if cache is not None:
        os.environ["XDG_CACHE_HOME"] = cache


def configured(model="tiny-dense", *, dp=1, steps=4, dtype="fp32", length=48, kind="correctness", **settings):
    return {
        "kind": kind,
        "group": f"{kind}/{model}",
        "model": MODELS[model],
        "mesh": {"pp": 1, "dp": dp, "cp": 1, "ep": 1},
        "world_size": dp,
        "sequence_length": length,
        "dtype": dtype,
        "steps": steps,
        "settings": {"global_batch_size": 4, **settings},
        "spec_dir": str(ROOT),
    }


def surroundings(**more):
    """The environment of a process that has rlspec, and that trains on the CPU."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", **more}


def settings(model="tiny-dense", **given):
    return settings_module.read(configured(model, **given))


def curve(rows, metric):
    return [row.metrics[metric] for row in rows]


def train(given, kind=Trainer, **options):
    return list(kind(given, HERE, **options).run())


def measured(rows):
    """All that does not depend on the clock."""
    clock = ("step-time", "tokens-per-second", "peak-gpu-memory")
    return [(row.step, row.data, {k: v for k, v in row.metrics.items() if k not in clock}) for row in rows]


def by_hand(trainer, number):
    """Samples of a step as one batch, and the mask of the targets up to the last end of a document."""
    size = trainer.settings.global_batch_size
    places = trainer.order[(number - 1) * size : number * size].tolist()
    ids = torch.from_numpy(np.stack([trainer.corpus[i].tokens for i in places]))
    mask = torch.ones(ids.shape[0], ids.shape[1] - 1, dtype=torch.bool)
    for row, targets in enumerate(ids[:, 1:].tolist()):
        if data.Bytes.end in targets:
            mask[row, len(targets) - targets[::-1].index(data.Bytes.end) :] = False
    return ids, mask


def norm_of(gradients):
    return torch.cat([g.flatten() for g in gradients]).double().norm().item()


# The step


def test_the_same_run_twice_is_the_same_to_the_bit():
    first, second = (measured(train(settings("tiny-moe"))) for _ in range(2))
    assert first == second
    assert [step for step, _, _ in first] == [1, 2, 3, 4]


@pytest.mark.parametrize("micro", [1, 2])
def test_the_loss_is_the_sum_over_counted_tokens_divided_by_their_number(micro):
    trainer = Trainer(settings(micro_batch_size=micro), HERE)
    ids, mask = by_hand(trainer, 1)
    loss = -trainer.model(ids[:, :-1], targets=ids[:, 1:]).logprobs[mask].mean()
    norm = norm_of(torch.autograd.grad(loss, list(trainer.model.parameters())))
    # The samples count unequal numbers of tokens, so a mean of their means is another number.
    by_sample = -trainer.model(ids[:, :-1], targets=ids[:, 1:]).logprobs * mask
    assert abs((by_sample.sum(1) / mask.sum(1)).mean().item() - loss.item()) > 1e-4
    row = trainer.step(1)
    assert row.metrics["cross-entropy-loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert row.metrics["gradient-norm"] == pytest.approx(norm, rel=1e-6)


def test_micro_batches_change_the_rounding_only():
    one, four = (train(settings(micro_batch_size=size)) for size in (1, 4))
    for metric in ("cross-entropy-loss", "gradient-norm"):
        assert curve(one, metric) == pytest.approx(curve(four, metric), rel=1e-5)
        assert curve(one, metric) != curve(four, metric)
    assert [row.data for row in one] == [row.data for row in four]


@pytest.mark.parametrize("clip", [1.0, 1e-3, 1e6])
def test_the_update_is_adamw_after_clipping_and_norms_do_not_decay(clip):
    trainer = Trainer(settings(gradient_clip=clip, learning_rate=0.3, weight_decay=0.5, steps=2), HERE)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    ids, mask = by_hand(trainer, 1)
    loss = -trainer.model(ids[:, :-1], targets=ids[:, 1:]).logprobs[mask].mean()
    gradients = dict(zip(before, torch.autograd.grad(loss, list(trainer.model.parameters())), strict=True))
    norm = norm_of(gradients.values())
    row = trainer.step(1)
    assert row.metrics["gradient-norm"] == pytest.approx(norm, rel=1e-6)
    rate = trainer.learning_rate(1)
    for name, now in trainer.model.named_parameters():
        gradient = gradients[name] * min(1.0, clip / norm)
        assert torch.allclose(now.grad, gradient, rtol=1e-3, atol=1e-6 * clip)
        decayed = before[name] * (1 - 0.5 * rate if before[name].dim() > 1 else 1)
        # At step 1 both corrected moments are the gradient's own, so the update is its sign but where it is tiny.
        expected = decayed - rate * now.grad / (now.grad.abs() + EPSILON)
        assert torch.allclose(now, expected, rtol=1e-5, atol=1e-6), name
    assert BETAS == (0.9, 0.95)


def test_correctness_warms_up_and_performance_stays():
    rows = train(settings(steps=8, start_learning_rate=1e-6, learning_rate=1e-5))
    assert curve(rows, "learning-rate") == pytest.approx([1e-6 + 9e-6 * n / 8 for n in range(1, 9)], rel=1e-12)
    rows = train(settings(kind="performance", steps=2))
    assert curve(rows, "learning-rate") == [1e-6, 1e-6]


def test_training_lowers_the_loss():
    given = settings("tiny-moe", steps=8, start_learning_rate=1e-3, learning_rate=1e-3)
    losses = curve(train(given), "cross-entropy-loss")
    assert losses[0] == pytest.approx(math.log(257), abs=0.2) and losses[-1] < losses[0] - 0.3


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_optimizer_is_torchs_to_the_bit(dtype, device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    generator = torch.Generator().manual_seed(1)
    start = [torch.randn(shape, generator=generator).to(device, dtype) for shape in ((7, 5), (5,), (3,))]
    found = []
    for kind in (AdamW, torch.optim.AdamW):
        parameters = [torch.nn.Parameter(x.clone()) for x in start]
        groups = [{"params": parameters[:1]}, {"params": parameters[1:], "weight_decay": 0.0}]
        made = kind(groups, betas=BETAS, eps=EPSILON, weight_decay=0.1)
        generator.manual_seed(2)
        for step in range(1, 4):
            made.zero_grad()
            for parameter in parameters[: 1 + step]:  # the last one has no gradient at first
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(device, dtype)
            for group in made.param_groups:
                group["lr"] = 1e-2 * step
            made.step()
        found.append(parameters)
    for mine, theirs, before in zip(*found, start, strict=True):
        assert torch.equal(mine, theirs) and not torch.equal(mine, before)


@pytest.mark.parametrize("given", [{"dtype": "bf16"}, {"dtype": "bf16", "profile": "hf"}, {"master_dtype": "bf16"}])
def test_dtypes(given):
    made = Trainer(settings("tiny-moe", steps=2, **given), HERE)
    master = torch.bfloat16 if given.get("master_dtype") == "bf16" else torch.float32
    assert {p.dtype for p in made.model.parameters()} == {master}
    made.step(1)
    assert {state["exp_avg"].dtype for state in made.optimizer.state.values()} == {master}
    exact = train(settings("tiny-moe", steps=2))[0].metrics
    found = made.step(2).metrics
    assert 0 < abs(found["cross-entropy-loss"] - exact["cross-entropy-loss"]) < 0.1


def test_the_profiles_round_elsewhere():
    losses = {
        (dtype, profile): train(settings(steps=1, dtype=dtype, profile=profile))[0].metrics["cross-entropy-loss"]
        for dtype in ("fp32", "bf16")
        for profile in ("ws1", "hf")
    }
    assert losses["bf16", "ws1"] != losses["bf16", "hf"]
    assert losses["fp32", "ws1"] == pytest.approx(losses["fp32", "hf"], rel=1e-6)


def test_rates_and_memory_are_of_the_whole_job():
    row = train(settings(steps=1, length=32))[0]
    assert row.metrics["tokens-per-second"] == pytest.approx(4 * 32 / row.metrics["step-time"])
    assert 0.05 < row.metrics["peak-gpu-memory"] < 16


# Data


def test_the_order_is_a_permutation_by_the_seed():
    first, again = (Trainer(settings(), HERE) for _ in range(2))
    other = Trainer(settings(seed=5), HERE)
    assert sorted(first.order.tolist()) == list(range(len(first.corpus)))
    assert torch.equal(first.order, again.order) and not torch.equal(first.order, other.order)
    rows, others = train(settings()), train(settings(seed=5))
    assert len({row.data for row in [*rows, *others]}) == 8


def test_weights_come_from_the_seed_alone():
    first, second = (dict(Trainer(settings(seed=seed), HERE).model.named_parameters()) for seed in (1, 2))
    bf16 = dict(Trainer(settings(seed=1, dtype="bf16"), HERE).model.named_parameters())
    name = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(first[name], bf16[name]) and not torch.equal(first[name], second[name])


def test_a_corpus_that_is_too_small_or_of_another_vocabulary_is_refused(tmp_path):
    class Large(data.Bytes):
        vocabulary_size, end = 1000, 999

    data.prepare(["text enough for a few samples"] * 20, tmp_path, Large())
    with pytest.raises(ValueError, match=r"4 steps of 4 need 16 samples, .* has 12 of 48"):
        Trainer(settings(corpus=str(tmp_path)), HERE)
    with pytest.raises(ValueError, match="token id 999, the model's vocabulary is 257"):
        train(settings(corpus=str(tmp_path), length=16))


# Load balance


def balance_of(**given):
    made = settings("tiny-moe", **given)
    return Balance(made, Mesh.of(made, HERE))


def statistics(counts, sums, tokens, top_k=2):
    return RouterStatistics(torch.tensor(counts), torch.tensor(sums), tuple(tokens), top_k)


def test_load_balance_by_hand():
    """One layer, two sequences of four tokens, three experts, top two."""
    router = statistics([[[4, 3, 1], [2, 2, 4]]], [[[2.0, 1.5, 0.5], [1.0, 1.0, 2.0]]], [4, 4])
    f, p = np.array([6, 5, 5]) / 16, np.array([3.0, 2.5, 2.5]) / 8
    by_sequence = [3 * (np.array(c) / 8 * np.array(s) / 4).sum() for c, s in (
        ([4, 3, 1], [2.0, 1.5, 0.5]), ([2, 2, 4], [1.0, 1.0, 2.0]))]  # fmt: skip
    expected = {"micro-batch": 3 * (f * p).sum(), "sequence": np.mean(by_sequence), "global-batch": 3 * (f * p).sum()}
    for name, value in expected.items():
        balance = balance_of(load_balance_type=name)
        assert balance.loss(router).item() == pytest.approx(value, rel=1e-6), name


def test_global_counts_grow_over_the_step_and_others_do_not():
    even = statistics([[[4, 4, 0]]], [[[2.0, 1.0, 1.0]]], [4])
    odd = statistics([[[0, 4, 4]]], [[[1.0, 1.0, 2.0]]], [4])
    for name, counts in (("global-batch", [4, 8, 4]), ("micro-batch", [0, 4, 4]), ("sequence", [0, 4, 4])):
        balance = balance_of(load_balance_type=name)
        balance.loss(even)
        expected = 3 * (np.array(counts) / sum(counts) * np.array([1.0, 1.0, 2.0]) / 4).sum()
        assert balance.loss(odd).item() == pytest.approx(expected, rel=1e-6), name


def test_the_load_balance_gradient_goes_through_the_scores_alone():
    sums = torch.tensor([[[2.0, 1.5, 0.5]]], requires_grad=True)
    loss = balance_of().loss(RouterStatistics(torch.tensor([[[4, 3, 1]]]), sums, (4,), 2))
    (gradient,) = torch.autograd.grad(loss, sums)
    # Less the same for every expert, which scores that add up to one do not feel.
    assert gradient.flatten().tolist() == pytest.approx([3 * (c / 8 - 1 / 3) / 4 for c in (4, 3, 1)], rel=1e-6)


@pytest.mark.parametrize("kind", ["micro-batch", "global-batch", "sequence"])
def test_load_balance_is_recorded_without_its_coefficient_and_trained_with_it(kind):
    small, large = (
        train(settings("tiny-moe", load_balance_type=kind, load_balance_coefficient=c, steps=2)) for c in (1e-3, 1.0)
    )
    first = small[0].metrics["load-balance-loss"]
    assert 1.0 < first < 1.5 and large[0].metrics["load-balance-loss"] == pytest.approx(first, rel=1e-12)
    assert abs(large[0].metrics["gradient-norm"] - small[0].metrics["gradient-norm"]) > 1e-4


def test_the_load_balance_loss_is_absent_where_nothing_is_balanced():
    assert "load-balance-loss" not in train(settings("tiny-dense", steps=1))[0].metrics
    assert "load-balance-loss" not in train(settings("tiny-moe", steps=1, load_balance_coefficient=0))[0].metrics
    entry = MODELS["tiny-moe"]
    config = {key: value for key, value in entry.items() if key != "experts"}
    config |= {"num_local_experts": 8}  # as transformers 5 spells it
    assert replace(settings("tiny-moe"), model=config).balanced
    assert not replace(settings("tiny-moe"), model={**config, "num_local_experts": 0}).balanced


def test_the_model_entry_says_the_type_unless_the_settings_do():
    assert MODELS["tiny-moe"]["load_balance_type"] == "global-batch" == settings("tiny-moe").load_balance_type
    assert settings("tiny-moe", load_balance_type="sequence").load_balance_type == "sequence"


def test_forced_routing_balances_exactly_and_passes_over_dense_models():
    rows = train(settings("tiny-moe", kind="performance", steps=2))
    assert curve(rows, "load-balance-loss") == [1.0, 1.0]
    assert train(settings("tiny-dense", kind="performance", steps=1))


# Perturbation


def test_every_weight_moves_by_one_unit_in_the_last_place():
    plain, moved, again, other = (
        Trainer(settings("tiny-moe"), HERE, perturbation=p).model
        for p in (None, ONE_ULP, ONE_ULP, {**ONE_ULP, "seed": 2})
    )
    ups = differing = total = 0
    for a, b, c, d in zip(*(model.parameters() for model in (plain, moved, again, other)), strict=True):
        # Neighbours of one sign are neighbours as integers.
        distance = b.view(torch.int32).long() - a.view(torch.int32).long()
        assert torch.all(distance.abs() == 1) and torch.equal(b, c)
        ups, total = ups + int((b > a).sum()), total + a.numel()
        differing += int((b != d).sum())
    assert 0.49 < ups / total < 0.51 and 0.49 < differing / total < 0.51


def test_a_perturbation_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="bfloat16"):
        Trainer(settings(master_dtype="bf16"), HERE, perturbation=ONE_ULP)
    with pytest.raises(ValueError, match="'2ulp'"):
        perturb.apply(torch.nn.Linear(1, 1), {"weights": "2ulp", "seed": 1})


def drift(a, b, metric):
    return sum(abs(x - y) for x, y in zip(curve(a, metric)[1:], curve(b, metric)[1:], strict=True)) / (len(a) - 1)


@pytest.fixture(scope="module")
def envelope():
    """Base, perturbed base and their drift by metric, with the sizes of the shipped specs but fewer steps."""
    given = settings("tiny-moe", steps=8, length=64)
    base, moved = train(given), train(given, perturbation=ONE_ULP)
    metrics = ("cross-entropy-loss", "load-balance-loss", "gradient-norm")
    return given, base, {metric: drift(base, moved, metric) for metric in metrics}


def test_harmless_attention_stays_within_the_perturbed_floor(envelope):
    given, base, floor = envelope
    feature = train(given, implementation={"attention": "reference"})
    ratios = {metric: drift(base, feature, metric) / floor[metric] for metric in floor}
    assert all(0 < ratio < 3 for ratio in ratios.values()), ratios


# Faults


CAUGHT = ("mean_of_means", "learning_rate_1.05", "dropped_micro_batch", "load_balance_twice", "rope_base",
          "decay_on_norms")  # fmt: skip


@pytest.mark.parametrize("name", CAUGHT)
def test_a_fault_shows_above_the_floor_on_the_gradient_norm(name, envelope):
    given, base, floor = envelope
    kind = faults.trainer(replace(given, fault=name))
    assert kind is not Trainer
    feature = train(given, kind)
    assert drift(base, feature, "gradient-norm") / floor["gradient-norm"] > 5
    assert [row.data for row in feature] == [row.data for row in base]


def test_faults_that_end_in_error_or_nan(envelope):
    given, base, _ = envelope
    broken = curve(train(given, faults.FAULTS["nan_at_step_7"]), "cross-entropy-loss")
    assert broken[:6] == curve(base, "cross-entropy-loss")[:6] and all(math.isnan(value) for value in broken[6:])
    assert measured(train(given, faults.FAULTS["truncated"])) == measured(base)[:-1]
    other = train(given, faults.FAULTS["data_order"])
    assert all(row.data != here.data for row, here in zip(other, base, strict=True))
    for name, metric in (("constant_metric", "gradient-norm"), ("forced_routing", "load-balance-loss")):
        kind = faults.trainer(replace(given, fault=name))
        assert set(curve(train(replace(given, steps=2), kind), metric)) == {1.0}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"fault": "spelt_wrong"}, "known: local_token_count, "),
        ({"fault": "gradients_not_averaged"}, "needs dp 2"),
        ({"fault": "local_token_count"}, "needs dp 2"),
        ({"fault": "load_balance_twice"}, "needs a mixture of experts"),
        ({"fault": "mean_of_means", "micro_batch_size": 4}, "needs two micro-batches"),
        ({"fault": "nan_at_step_7", "steps": 6}, "needs seven steps"),
    ],
)
def test_a_fault_that_could_not_show_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        faults.trainer(settings(**given))


def test_a_fault_is_nothing_that_a_spec_has_by_default():
    assert settings().fault is None and faults.trainer(settings()) is Trainer
    declared = schema.load("common")["definitions"]["embedded_settings"]["properties"]
    assert declared["fault"]["enum"] == list(faults.FAULTS) and "default" not in declared["fault"]
    assert set(trainers.FAULTS_OF_ALL) <= set(faults.FAULTS)


# Settings


def test_the_schema_and_the_trainer_know_the_same_settings():
    declared = schema.load("common")["definitions"]["embedded_settings"]["properties"]
    made = settings()
    for name, shape in declared.items():
        if name not in settings_module.ELSEWHERE:
            assert hasattr(made, name)
            assert name == "global_batch_size" or shape.get("default", getattr(made, name)) == getattr(made, name)
            assert set(shape.get("enum", ())) == set(settings_module.CHOICES.get(name, shape.get("enum", ())))
    bare = settings_module.read({**configured(), "settings": {}})
    assert bare.global_batch_size == declared["global_batch_size"]["default"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"settings": {"learning_rat": 1.0}}, "unknown setting 'learning_rat'"),
        ({"settings": {"steps": 3}}, "unknown setting 'steps'"),
        ({"mesh": {"pp": 1, "dp": 1, "cp": 1, "ep": 2}}, "mesh: ep 2 does not divide dp·cp = 1·1"),
        ({"mesh": {"pp": 1, "dp": 1, "cp": 5, "ep": 1}}, "mesh: sequence_length 48 is not divisible by 2·cp = 10"),
        ({"mesh": {"pp": 1, "dp": 3, "cp": 1, "ep": 1}}, "not divisible by micro_batch_size·dp = 1·3"),
        ({"dtype": "fp8"}, "dtype is 'fp8'"),
        ({"settings": {"global_batch_size": 3, "micro_batch_size": 2}}, "not divisible"),
    ],
)
def test_settings_that_cannot_be_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        settings_module.read({**configured(), **change})


def test_a_mesh_without_its_processes_is_refused():
    with pytest.raises(ValueError, match="pp·dp·cp = 1·2·1 = 2 processes, and 1 were started"):
        Trainer(settings(dp=2), HERE)


def test_a_corpus_is_relative_to_the_spec(tmp_path):
    made = settings_module.read({**configured(corpus="corpus"), "spec_dir": str(tmp_path)})
    assert made.corpus == tmp_path / "corpus"


# Data parallelism

PARALLEL = {
    "dense": {"model": "tiny-dense"},
    "sequence": {"model": "tiny-moe", "load_balance_type": "sequence"},
    "micro-batch": {"model": "tiny-moe", "load_balance_type": "micro-batch"},
    "global-batch": {"model": "tiny-moe", "load_balance_type": "global-batch"},
    "gradients_not_averaged": {"model": "tiny-dense", "fault": "gradients_not_averaged"},
    "local_token_count": {"model": "tiny-dense", "fault": "local_token_count"},
}
SCRIPT = """
import json, sys
from rlspec.device import faults, settings
from rlspec.device.job import join

def train(config, job):
    given = settings.read(config)
    trainer = faults.trainer(given)(given, job)
    rows = [(row.metrics, row.data) for row in trainer.run()]
    weights = sum(p.detach().double().sum().item() for p in trainer.model.parameters())
    return {"rows": rows, "apart": job.maximum([weights, -weights])}

with join() as job:
    found = {name: train(config, job) for name, config in json.loads(sys.argv[1]).items()}
    if job.rank == 0:
        print("FOUND", json.dumps(found))
"""


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    script = tmp_path_factory.mktemp("ranks") / "two.py"
    script.write_text(SCRIPT)
    configs = {name: configured(dp=2, **given) for name, given in PARALLEL.items()}
    environment = surroundings(OMP_NUM_THREADS="1")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run([*command, json.dumps(configs)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("FOUND"))[6:])


@pytest.mark.parametrize("name", ["dense", "sequence", "micro-batch", "global-batch"])
def test_two_ranks_give_the_numbers_of_one(two_ranks, name):
    # Counts of the global batch are summed over both ranks at each micro-step, so two ranks are one with two samples.
    size = 2 if name == "global-batch" else 1
    alone = train(settings(micro_batch_size=size, **PARALLEL[name]))
    both = two_ranks[name]
    assert [row.data for row in alone] == [fingerprint for _, fingerprint in both["rows"]]
    for metric in ("cross-entropy-loss", "gradient-norm", *(["load-balance-loss"] if name != "dense" else [])):
        values = [metrics[metric] for metrics, _ in both["rows"]]
        assert values == pytest.approx(curve(alone, metric), rel=2e-6), metric
    assert both["apart"][0] == -both["apart"][1]  # both ranks have the same weights


@pytest.mark.parametrize("name", ["gradients_not_averaged", "local_token_count"])
def test_faults_of_two_ranks_show(two_ranks, name):
    alone = curve(train(settings(**PARALLEL["dense"])), "gradient-norm")
    values = [metrics["gradient-norm"] for metrics, _ in two_ranks[name]["rows"]]
    # At a step of which the ranks happen to count equally many tokens, the wrong mean is the right one.
    assert max(abs(a - b) for a, b in zip(alone, values, strict=True)) > 1e-4
    apart = two_ranks[name]["apart"]
    assert (apart[0] == -apart[1]) == (name != "gradients_not_averaged")


# The run file


def rendered(tmp_path, config, arms):
    """The arms' run files and their plan, as the host writes them."""
    template = ROOT / "templates" / config["kind"] / "embedded.py.j2"
    content = render.text(template, config)
    (tmp_path / "plan.json").write_text(json.dumps({"arms": arms}))
    for arm in arms:
        (tmp_path / f"{arm['stem']}.py").write_text(content)
    return [tmp_path / f"{arm['stem']}.py" for arm in arms]


def arms_of(*names, **more):
    return [
        {"name": name, "stem": f"tiny-v1.5-fp32-{name}", "role": "base" if "base" in name else "feature", **more}
        for name in names
    ]


@pytest.mark.parametrize("kind", ["correctness", "performance"])
def test_a_run_file_runs_by_itself(tmp_path, kind):
    arms = arms_of("base0", implementation={"attention": "reference"}, perturb=None)
    (file,) = rendered(tmp_path, configured("tiny-moe", kind=kind, steps=2), arms)
    command = [sys.executable, "-X", "importtime", str(file)]
    done = subprocess.run(command, env=surroundings(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "torch.optim" in done.stderr and "torch._dynamo" not in done.stderr  # the compiler takes a second to import
    read = records.read(tmp_path / "tiny-v1.5-fp32-base0.records.jsonl", Arm(name="base0", role="base"))
    alone = train(settings("tiny-moe", kind=kind, steps=2), implementation={"attention": "reference"})
    assert read.steps_expected == 2 and not read.faults and not read.notes
    assert read.data == {row.step: row.data for row in alone}
    assert set(read.series) == set(alone[0].metrics)
    assert list(read.series["cross-entropy-loss"].values) == curve(alone, "cross-entropy-loss")
    assert all(series.resolution == 0 for series in read.series.values())


def in_process(file, config, capsys):
    worker.main(str(file), config)
    return capsys.readouterr().out


def test_the_log_says_the_same_as_the_records(tmp_path, capsys):
    config = configured("tiny-moe", steps=3)
    (file,) = rendered(tmp_path, config, arms_of("base0"))
    log = tmp_path / "base0.log"
    log.write_text(in_process(file, config, capsys))
    arm = Arm(name="base0", role="base")
    exact = records.read(tmp_path / "tiny-v1.5-fp32-base0.records.jsonl", arm)
    printed = logs.read(log, "pithtrain", arm, metrics=tuple(exact.series))
    assert set(printed.series) == set(exact.series) and printed.steps_expected == 3
    for name, series in printed.series.items():
        for shown, value in zip(series.values, exact.series[name].values, strict=True):
            assert abs(shown - value) <= series.resolution * 1.001, name
    assert " | INFO | step 00000003/00000003 | step-time " in log.read_text()


def test_the_log_line_has_pith_trains_shape():
    values = (4.8117, 11.87312, 1.0345119, 1.84375e-6, 37.441, 108953.4, 61.271)
    assert training_harness.log_line(Row(3, dict(zip(training_harness.FORMATS, values, strict=True)), ""), 32) == (
        "step 00000003/00000032 | step-time 4.812 sec | cross-entropy-loss 11.8731 | load-balance-loss 1.034512 | "
        "learning-rate 1.843750e-06 | gradient-norm 37.4410 | tokens-per-second 108,953 | peak-gpu-memory 61.27 GB"
    )


def test_arms_differ_by_what_the_plan_says_of_them(tmp_path, capsys):
    config = configured(steps=2)
    base0, base1, feat0, plain = arms_of("base0", "base1", "feat0", "plainbase")
    base1 |= {"perturb": ONE_ULP}
    feat0 |= {"fault": "learning_rate_1.05"}
    files = rendered(tmp_path, config, [base0, base1, feat0, plain])
    for file in files:
        in_process(file, config, capsys)
    runs = [
        records.read(file.with_name(f"{file.stem}.records.jsonl"), Arm(name=arm["name"], role=arm["role"]))
        for file, arm in zip(files, [base0, base1, feat0, plain], strict=True)
    ]
    losses, rates = ([list(run.series[m].values) for run in runs] for m in ("cross-entropy-loss", "learning-rate"))
    assert losses[0] == losses[3] != losses[1] and abs(losses[0][0] - losses[1][0]) < 1e-6
    assert rates[0] == rates[1] and rates[2] == pytest.approx([1.05 * rate for rate in rates[0]])
    assert [bool(run.notes) for run in runs] == [False, False, True, False]


def test_a_run_file_without_its_arm_is_refused(tmp_path):
    (file,) = rendered(tmp_path, configured(), arms_of("base0"))
    with pytest.raises(ValueError, match=r"plan\.json has no arm with the stem 'other'; it has tiny-v1\.5-fp32-base0"):
        worker.main(str(file.with_name("other.py")), configured())


def test_records_are_whole_lines_at_every_moment_and_end_only_at_the_end(tmp_path):
    path, rows = tmp_path / "a.records.jsonl", train(settings(steps=2))
    path.write_text("of an earlier run")
    arm = Arm(name="base0", role="base")
    with pytest.raises(KeyboardInterrupt), training_harness.Records(path, "base0", 2, []) as writer:
        writer.step(rows[0])
        assert [json.loads(line)["record"] for line in path.read_text().splitlines()] == ["run", "step"]
        raise KeyboardInterrupt
    assert "not written to its end" in records.read(path, arm).faults["*"]
    values = dict.fromkeys(rows[0].metrics, math.inf) | {"gradient-norm": math.nan, "step-time": -math.inf}
    with training_harness.Records(path, "base0", 2, []) as writer:
        writer.step(rows[0]._replace(metrics=values))
        writer.step(rows[1])
    read = records.read(path, arm)
    assert not read.faults and math.isnan(read.series["gradient-norm"].values[0])
    assert read.series["cross-entropy-loss"].values[0] == math.inf == -read.series["step-time"].values[0]
    assert not any(schema.check_value(json.loads(line), "records") for line in path.read_text().splitlines())


def test_what_makes_runs_repeat_is_set():
    before = torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()
    try:
        for wanted in (True, False):
            training_harness.make_repeatable(settings(deterministic=wanted))
            assert torch.are_deterministic_algorithms_enabled() is wanted
            first = torch.rand(3)
            training_harness.make_repeatable(settings(deterministic=wanted))
            assert torch.equal(first, torch.rand(3)) and torch.get_float32_matmul_precision() == "highest"
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.set_float32_matmul_precision(before[1])


@pytest.mark.parametrize(("environment", "threads"), [({}, 1), ({"OMP_NUM_THREADS": "2"}, 2)])
def test_a_cpu_run_has_one_thread_unless_it_is_told_otherwise(environment, threads):
    if torch.cuda.is_available():
        pytest.skip("a GPU is used where there is one")
    torch.set_num_threads(2)
    try:
        with join(environment) as job:
            assert torch.get_num_threads() == threads and (job.rank, job.world) == (0, 1)
    finally:
        torch.set_num_threads(1)


def test_processes_that_would_share_a_gpu_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for rank in "01":
        ranks = {"WORLD_SIZE": "2", "RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2"}
        with pytest.raises(ValueError, match="2 processes of this machine see 1 GPU: one process a GPU"), join(ranks):
            pass


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("model", MODELS)
def test_a_deterministic_run_on_a_gpu_repeats_to_the_bit(tmp_path, model):
    files = rendered(tmp_path, configured(model, steps=3, deterministic=True), arms_of("base0", "base1"))
    found = []
    for file in files:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, str(file)], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0 and "device='cuda:0'" in done.stdout, done.stderr[-3000:]
        arm = Arm(name=file.stem[-5:], role="base")
        series = records.read(file.with_name(f"{file.stem}.records.jsonl"), arm).series
        found.append([list(series[metric].values) for metric in ("cross-entropy-loss", "gradient-norm")])
    assert found[0] == found[1] and len(found[0][0]) == 3


# Plain data, integers and processes, of the standard library alone.
PLAIN = (
    *("errors", "workloads", "layouts", "nodes", "chains", "chain_sizes", "token_files", "nvcc", "config_json"),
    *("architecture", "weight_folders"),
)


def test_the_device_column_imports_nothing_of_the_host():
    for path in (ROOT / "rlspec" / "device").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            ours = [n for n in names if n.split(".")[0] == "rlspec"]
            wrong = [n for n in ours if n.split(".")[1] not in ("device", "kernels", *PLAIN)]
            assert not wrong, f"{path}: {wrong}"


@pytest.mark.parametrize("kind", trainers.FIXTURES)
def test_the_fixture_of_a_kind_is_what_the_host_plans_with(kind):
    """The device column cannot import it, and a run file may leave it out."""
    found = settings(kind=kind)
    for name, value in trainers.FIXTURES[kind].items():
        assert name in settings_module.ELSEWHERE or getattr(found, name) == value, name
