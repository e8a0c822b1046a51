from __future__ import annotations

import pytest

from rlspec.model import Arm
from rlspec.readers import READERS
from tests.log_samples import TITAN, megatron, pith, points


def test_readers_are_complete():
    trainers = ["pithtrain", "torchtitan", "megatron", "huggingface", "nanotron", "olmo", "verl", "slime", "mllog"]
    assert list(READERS) == [*trainers, "tensorboard", "wandb", "jsonl", "csv", "regex"]
    assert all(reader.name == name and reader.about for name, reader in READERS.items())
    assert all(reader.resolution and reader.units for reader in READERS.values())
    assert all(set(reader.timing) <= {"step_time", "throughput", "peak_memory"} for reader in READERS.values())


def test_a_reader_that_knows_metrics_knows_a_loss_and_a_log_without_any_is_a_fault(log):
    assert all(bool(reader.losses) == bool(reader.metrics) for reader in READERS.values())
    lines = [TITAN.format(step).replace("loss:", "lss:") for step in (1, 2)]
    assert log(lines, "torchtitan").faults == {
        "loss": "base0.log has no loss on its step lines; they have lss, grad_norm, memory, tps, tflops, mfu"
    }
    assert not log(lines, "torchtitan", metrics=["grad_norm"]).faults
    lines = [
        line.replace(" 11.", " tensor(11.").replace("gradient-norm 49.5", "gradient-norm N/A") for line in pith([1])
    ]
    found = log(lines, "pithtrain").faults
    assert "line 1 has cross-entropy-loss 'tensor(11.0001'" in found["cross-entropy-loss"]
    assert log([lines[0].replace("N/A001", "N/A")], "pithtrain").faults["gradient-norm"] == (
        "base0.log has gradient-norm 'N/A' at line 1, and no value of it anywhere"
    )


def test_units():
    assert READERS["pithtrain"].units == "s, tokens/s of the job, GiB"
    assert READERS["torchtitan"].units == "tokens/s a device, GiB" and READERS["megatron"].units == "s"
    assert READERS["slime"].units == "no times"


def test_pithtrain(log):
    chatter = ["2026-10-03 11:19:58 | INFO | launch(cfg=PretrainLMCfg(max_steps=32, step_log=True))"]
    end = ["2026-10-03 11:19:58 | INFO | finished, checkpoint of step 32 kept"]
    run = log(chatter + pith(range(1, 33)) + end, "pithtrain")
    assert run.arm == Arm(name="base0", role="base") and run.steps_expected == 32 and not run.faults and not run.notes
    assert list(run.series) == [*READERS["pithtrain"].metrics, "step-time", "tokens-per-second", "peak-gpu-memory"]
    assert points(run, "cross-entropy-loss") == {step: 11 + step / 10000 for step in range(1, 33)}
    assert points(run, "tokens-per-second")[32] == 132084
    assert points(run, "step-time")[3] == 4.803 and points(run, "peak-gpu-memory")[3] == 61.23
    assert {name: series.resolution for name, series in run.series.items()} == {
        "cross-entropy-loss": 5e-5,
        "load-balance-loss": 5e-7,
        "gradient-norm": 5e-5,
        "step-time": 5e-4,
        "tokens-per-second": 0.5,
        "peak-gpu-memory": 5e-3,
    }


def test_torchtitan(log):
    other = "[titan] 2026-10-05 10:14:28,515 - root - INFO - validate step:  2  loss:  7.1234  memory: 1.00GiB(1.00%)"
    run = log([TITAN.format(1), TITAN.format(2), other, TITAN.format(10)], "torchtitan")
    assert run.steps_expected is None and not run.faults and not run.notes
    assert points(run, "loss") == {1: 8.10001, 2: 8.10002, 10: 8.1001}
    assert points(run, "tps") == {1: 12701, 2: 12702, 10: 12710} and points(run, "memory")[10] == 24.31
    assert run.series["loss"].resolution == 5e-6 and run.series["grad_norm"].resolution == 5e-5
    assert READERS["torchtitan"].throughput_scope == "device" and READERS["pithtrain"].throughput_scope == "job"


def test_torchtitan_without_a_rank_filter(log):
    lines = [
        line for step in (1, 2, 3) for line in (TITAN.format(step), TITAN.format(step).replace("tps: 12", "tps: 11"))
    ]
    run = log(lines, "torchtitan")
    assert set(run.faults) == {"tps"} and "LOG_RANK" in run.faults["tps"]
    assert points(run, "loss") == {1: 8.10001, 2: 8.10002, 3: 8.10003} and "merged" in run.notes[0]


def test_torchtitan_sentinel(log):
    run = log([TITAN.format(step).replace(f" 8.10{step:03d}", "-1.00000") for step in (1, 2)], "torchtitan")
    assert points(run, "loss") == {1: -1, 2: -1} and "sentinel" in run.notes[0] and "LOG_RANK" in run.notes[0]
    run = log([TITAN.format(1).replace(" 8.10001", "-1.00000"), TITAN.format(2)], "torchtitan")
    assert not run.notes


def test_megatron(log):
    other = "[Rank 0] (after 2 iterations) memory (MB) | allocated: 20117.1 | max allocated: 41822.8"
    checkpoint = "  successfully saved checkpoint from iteration      10 to /ckpt"
    run = log(["training ...", *megatron([1, 2]), other, checkpoint, *megatron([3])], "megatron")
    assert run.steps_expected == 32 and not run.faults and not run.notes
    assert points(run, "lm loss") == {1: 10.0001, 2: 10.0002, 3: 10.0003}
    assert set(run.series) == {"lm loss", "load_balancing_loss", "grad norm", "elapsed time per iteration (ms)"}
    assert run.series["lm loss"].resolution == 5e-6, "the exponent moves the last digit: 1.000010E+01"
    name, factor = READERS["megatron"].timing["step_time"]
    assert points(run, name)[2] * factor == pytest.approx(0.8122)


def test_megatron_counts_of_bad_iterations_are_noted(log):
    run = log(megatron([1, 2]) + megatron([3, 4], skipped=1), "megatron")
    assert run.notes == ("base0.log: number of skipped iterations is above 0 at 2 steps, first at step 3",)
    bad = [line.replace("iterations:   1", "iterations: nan") for line in megatron([1, 2], skipped=1)]
    run = log(bad, "megatron")
    assert run.notes == ("base0.log: number of skipped iterations is NaN at 2 steps, first at step 1",)
    run = log([line.replace("nan iterations:   0", "nan iterations:   2") for line in megatron([3])], "megatron")
    assert points(run, "number of nan iterations") == {3: 2} and run.notes
    run = log(megatron([1], skipped=2), "megatron", metrics=["number of skipped iterations"])
    assert points(run, "number of skipped iterations") == {1: 2} and run.notes


@pytest.mark.parametrize(
    ("lines", "reader", "words"),
    [
        (pith([1, 2]), "torchtitan", "reader pithtrain understands it (--reader pithtrain)"),
        ([TITAN.format(1)], "pithtrain", "reader torchtitan understands it"),
        (megatron([1]), "pithtrain", "reader megatron understands it"),
        (["{'loss': 1.5}"], "pithtrain", "reader huggingface understands it"),
        (['{"step": 1, "loss": 1.5}'], "csv", "reader jsonl understands it"),
        (["step,loss", "1,2.5"], "pithtrain", "reader csv understands it"),
        (['{"global_step": 1,', ' "log_history": []}'], "pithtrain", "reader huggingface understands it"),
        (["nothing", "here"], "pithtrain", "no step line that reader pithtrain understands (2 lines read)"),
        ("\n".join(pith([1, 2])).encode("utf-16"), "pithtrain", "UTF-16"),
        (b"", "pithtrain", "0 lines read"),
    ],
)
def test_a_log_of_another_kind(log, lines, reader, words):
    run = log(lines, reader)
    assert not run.series and words in run.faults["*"] and "base0.log" in run.faults["*"]
