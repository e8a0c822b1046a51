from __future__ import annotations

import json
import math

import pytest

from rlspec.readers import READERS
from tests.log_samples import points

NANOTRON = (
    "\x1b[2;3m11/29 14:03:12 [INFO|DP=0|PP=1|TP=0|node7]\x1b[0m: iteration: {0} / 32 | consumed_samples: {0:12d} | "
    "elapsed_time_per_iteration_ms: 812.{0} | tokens_per_sec: 4.03{0}000E+04 | "
    "tokens_per_sec_per_gpu: 5.041000E+03 | global_batch_size:    16 | lm_loss: 1.0873{0}0E+01 | lr: 1.844E-06 | "
    "model_tflops_per_gpu: 213.70 | grad_norm: 37.44{0}"
)
SHORT = (
    "11/29 14:03:12 [INFO|DP=0|PP=1]: iteration: {0} / 32 | consumed_tokens: 1.05M | "
    "elapsed_time_per_iteration_ms: 1.2{0}K | tokens_per_sec: 40.{0}K | global_batch_size: 16 | lm_loss: 10.{0} | "
    "lr: 1.84e-06 | grad_norm: 37.{0}"
)
OLMO = """2026-11-29 14:03:12.482 host:0 olmo_core.train.callbacks:62 INFO [step={0}/32,epoch=1,eta=0:00:31]
    optim/total grad norm=37.4{0}
    train/CE loss=10.8{0}
    throughput/device/TPS=5,04{0}
    system/GPU active mem (GiB)=61.2{0}"""
VERL = (
    "\x1b[36m(TaskRunner pid=123)\x1b[0m step:{0} - actor/entropy:0.323{0} - training/rollout_probs_diff_valid:1 - "
    "training/rollout_probs_diff_mean:0.003{0} - actor/pg_loss:0.001{0} - actor/ppo_kl:-0.0001 - "
    "actor/grad_norm:np.float64(0.02010000000000{0}1) - val-core/openai/gsm8k/reward/mean@1:0.5 - "
    "perf/max_memory_allocated_gb:62.447 - perf/throughput:812.4 - timing_s/step:162.{0}"
)
SLIME = (
    "(MegatronTrainRayActor pid=123) [2026-11-29 14:03:12] model.py:612 - step {0}: {{'train/loss': 0.001{0}, "
    "'train/pg_loss': 0.0012, 'train/entropy_loss': 0.323{0}1234567890123, 'train/ppo_kl': -0.0, "
    "'train/grad_norm': nan}}"
)


def test_nanotron(log):
    run = log([NANOTRON.format(step) for step in (1, 2, 3)], "nanotron")
    assert run.steps_expected == 32 and not run.faults
    assert points(run, "lm_loss") == {1: 10.8731, 2: 10.8732, 3: 10.8733}
    assert run.series["lm_loss"].resolution == 5e-6 and run.series["grad_norm"].resolution == 5e-4
    assert points(run, "grad_norm")[2] == 37.442 and points(run, "tokens_per_sec")[2] == 40320
    name, factor = READERS["nanotron"].timing["step_time"]
    assert math.isclose(points(run, name)[2] * factor, 0.8122)


def test_nanotron_with_shortened_numbers(log):
    run = log([SHORT.format(step) for step in (1, 2, 3)], "nanotron")
    assert points(run, "tokens_per_sec") == {1: 40100, 2: 40200, 3: 40300} and not run.faults
    assert points(run, "lm_loss")[3] == 10.3 and run.series["lm_loss"].resolution == 5e-2
    assert run.series["tokens_per_sec"].resolution == 50
    run = log([SHORT.format(0).replace("37.0", "37").replace("10.0", "nan"), SHORT.format(1)], "nanotron")
    assert run.series["grad_norm"].resolution == 5e-2, "trailing zeros are stripped"
    assert math.isnan(points(run, "lm_loss")[0])


def test_olmo_blocks(log):
    text = "\n".join(f"{OLMO.format(step)}\nother line x=1" for step in (1, 2)) + "\n" + OLMO.format(3) + "\n"
    run = log(text, "olmo")
    assert run.steps_expected == 32 and not run.faults
    assert points(run, "train/CE loss") == {1: 10.81, 2: 10.82, 3: 10.83}
    assert points(run, "throughput/device/TPS")[3] == 5043
    assert run.series["optim/total grad norm"].resolution == 5e-3
    assert points(run, "system/GPU active mem (GiB)") == {1: 61.21, 2: 61.22, 3: 61.23}
    ranked = "\n".join(f"[rank0]:{line}" for line in text.splitlines())
    assert points(log(ranked + "\n", "olmo"), "train/CE loss") == points(run, "train/CE loss")
    late = log(OLMO.format(1).replace("step=1/32", "step=1,203/2,000") + "\n", "olmo")
    assert points(late, "train/CE loss") == {1203: 10.81} and late.steps_expected == 2000


def test_olmo_ends_within_a_block(log):
    memory = "system/GPU active mem (GiB)"
    run = log(OLMO.format(1) + "\n" + OLMO.format(2)[:-1], "olmo")
    assert "fewer digits" in run.faults[memory] and list(run.series["train/CE loss"].steps) == [1, 2]
    double = OLMO.format(2).replace("TPS=5,042", "TPS=5,042\n    train/CE loss=9.99")
    run = log([OLMO.format(1), double], "olmo")
    assert "which is no number" in run.faults["train/CE loss"], "one name twice in a block"


def test_verl(log):
    validation = "(TaskRunner pid=123) step:0 - val-core/openai/gsm8k/reward/mean@1:0.25"
    run = log([validation, *(VERL.format(step) for step in (1, 2, 3))], "verl")
    assert not run.faults and not run.notes
    assert points(run, "actor/pg_loss") == {1: 0.0011, 2: 0.0012, 3: 0.0013}
    assert points(run, "actor/grad_norm")[3] == 0.0201000000000031 and points(run, "timing_s/step")[3] == 162.3
    assert points(log([VERL.format(1)], "verl", metrics=["actor/ppo_kl"]), "actor/ppo_kl") == {1: -0.0001}
    name = "val-core/openai/gsm8k/reward/mean@1"
    assert points(log([validation, VERL.format(1)], "verl", metrics=[name]), name) == {0: 0.25, 1: 0.5}
    old = [f"step:{step} - actor/pg_loss:0.00{step} - actor/grad_norm:0.020" for step in (1, 2)]
    assert log(old, "verl").series["actor/pg_loss"].resolution == 5e-4


def test_verl_zeros_that_are_no_measurement(log):
    void = VERL.format(2).replace("_valid:1", "_valid:0").replace("diff_mean:0.0032", "diff_mean:0.0")
    run = log([VERL.format(1), void], "verl", metrics=["training/rollout_probs_diff_mean"])
    assert points(run, "training/rollout_probs_diff_mean") == {1: 0.0031}
    assert "no measurement" in run.notes[0] and "1 steps" in run.notes[0]


@pytest.mark.parametrize("torn", ["step:2 - actor/pg_loss:0.1 - actor/gra", "step:2 - a:1 - a:2"])
def test_verl_torn_lines(log, torn):
    assert "line 2 has" in log([VERL.format(1), torn, VERL.format(3)], "verl").faults["*"]


def test_slime(log):
    perf = "(MegatronTrainRayActor pid=123) [2026-11-29 14:03:12] model.py:90 - perf 3: {'perf/rollout_time': 1.5}"
    run = log([SLIME.format(0), perf, SLIME.format(1), SLIME.format(2)], "slime")
    assert not run.faults and points(run, "train/loss") == {0: 0.001, 1: 0.0011, 2: 0.0012}
    assert list(run.series["train/loss"].steps) == [0, 1, 2] and math.isnan(points(run, "train/grad_norm")[1])
    assert run.series["train/entropy_loss"].resolution == 0.0
    assert "line 1" in log([SLIME.format(1)[:-30]], "slime").faults["*"]


def event(key, value, **metadata):
    body = {"namespace": "", "time_ms": 1700000000000, "event_type": "POINT_IN_TIME", "key": key, "value": value}
    return ":::MLLOG " + json.dumps({**body, "metadata": {"file": "train.py", "lineno": 7, **metadata}})


def test_mllog(log):
    lines = [
        event("submission_benchmark", "llama31_8b"), event("seed", 1234),
        *(f"0: {event('train_loss', 8.25 / step, step_num=step, samples_count=16 * step)}" for step in (1, 2, 3)),
        event("tracked_stats", {"throughput": 812.5, "train_loss2": 1.5}, step_num=3),
        event("eval_accuracy", 0.5, epoch_num=1), event("run_stop", None, status="success", step_num=3),
    ]  # fmt: skip
    run = log(lines, "mllog")
    assert points(run, "train_loss") == {1: 8.25, 2: 4.125, 3: 2.75} and not run.faults
    assert run.notes == ("base0.log: 1 events that count epoch_num and no step_num were skipped",)
    assert points(log(lines, "mllog", metrics=["throughput"]), "throughput") == {3: 812.5}
    counted = log([event("train_loss", 2.5, samples_count=16)], "mllog")
    assert points(counted, "train_loss") == {16: 2.5} and counted.notes == ("base0.log: steps are samples_count",)
    assert math.isnan(points(log([event("train_loss", math.nan, step_num=1)], "mllog"), "train_loss")[1])
    assert "line 1 is no MLLOG event" in log([lines[2][:-9]], "mllog").faults["*"]
    latin = event("train_loss", 2.5, step_num=1).encode() + b" \xe9\n"
    assert "is no MLLOG event" in log(latin, "mllog").faults["*"]
    latin = b"\xe9 " + event("train_loss", 2.5, step_num=1).encode() + b"\n"
    assert points(log(latin, "mllog"), "train_loss") == {1: 2.5}


@pytest.mark.parametrize(
    ("line", "reader"),
    [(NANOTRON, "nanotron"), (SHORT, "nanotron"), (OLMO, "olmo"), (VERL, "verl"), (SLIME, "slime")],
)
def test_the_right_reader_is_named(log, line, reader):
    assert f"(--reader {reader})" in log(line.format(3) + "\n", "pithtrain").faults["*"]
    assert "(--reader mllog)" in log([event("train_loss", 2.5, step_num=1)], "pithtrain").faults["*"]
