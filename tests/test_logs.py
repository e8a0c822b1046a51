from __future__ import annotations

import json
import math
import random

import pytest

from rlspec import logs, readers
from rlspec.errors import RunError, SpecError
from rlspec.logs import GRADIENT_NORMS, READERS, read
from rlspec.model import Arm

ARM = Arm(name="base0", role="base")
PITH = (
    "2026-10-03 11:20:{0:02d} | INFO | step {0:08d}/{total:08d} | step-time 4.8{0:02d} sec | "
    "cross-entropy-loss 11.{0:04d} | load-balance-loss 1.09{0:04d} | learning-rate 1.281250e-06 | "
    "gradient-norm 49.5{0:03d} | tokens-per-second 1{0:02d},084 | peak-gpu-memory 61.2{1} GB"
)
TITAN = (
    "[rank0]:[titan] 2026-10-05 10:14:27,415 - root - INFO - \x1b[31mstep: {0:2d}  \x1b[32mloss:  8.10{0:03d}  "
    "\x1b[38;2;180;60;0mgrad_norm:  1.5{0:03d}  \x1b[38;2;54;234;195mmemory: 24.31GiB(30.71%)  "
    "\x1b[34mtps: 12,7{0:02d}  \x1b[36mtflops: 1,414.22  \x1b[35mmfu: 38.62%\x1b[39m"
)
MEGATRON = (
    " [2026-10-07 07:15:40.484878] iteration {0:8d}/{total:8d} | consumed samples: {0:12d} | "
    "elapsed time per iteration (ms): 812.{1} | learning rate: 3.125000E-07 | lm loss: 1.0{0:04d}0E+01 | "
    "load_balancing_loss: 1.09{0:04d}E+00 | loss scale: 1.0 | grad norm: 49.9{0:02d} | "
    "number of skipped iterations: {skipped:3d} | number of nan iterations:   0 |"
)


def pith(steps, total=32):
    return [PITH.format(step, step % 10, total=total) for step in steps]


def megatron(steps, total=32, skipped=0):
    return [MEGATRON.format(step, step % 10, total=total, skipped=skipped) for step in steps]


@pytest.fixture
def log(tmp_path):
    """Write a log and read it."""

    def write_and_read(text, reader, **options):
        path = tmp_path / "base0.log"
        raw = text if isinstance(text, bytes) else ("\n".join(text) + "\n" if isinstance(text, list) else text).encode()
        path.write_bytes(raw)
        return read(path, reader, ARM, **options)

    return write_and_read


def points(run, metric):
    series = run.series[metric]
    assert series.metric == metric and series.arm == "base0"
    return dict(zip(series.steps, series.values, strict=True))


def test_readers_are_complete():
    assert list(READERS) == ["pithtrain", "torchtitan", "megatron", "huggingface", "jsonl", "csv", "regex"]
    assert all(reader.name == name and reader.about for name, reader in READERS.items())
    assert all(set(reader.timing) <= {"step_time", "throughput", "peak_memory"} for reader in READERS.values())


def test_pithtrain(log):
    chatter = ["2026-10-03 11:19:58 | INFO | launch(cfg=PretrainLMCfg(max_steps=32, step_log=True))"]
    end = ["2026-10-03 11:19:58 | INFO | finished, checkpoint of step 32 kept"]
    run = log(chatter + pith(range(1, 33)) + end, "pithtrain")
    assert run.arm is ARM and run.steps_expected == 32 and not run.faults and not run.notes
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
    run = log(megatron([1], skipped=2), "megatron", metrics=["number of skipped iterations"])
    assert points(run, "number of skipped iterations") == {1: 2} and run.notes


def test_huggingface_strings_are_counted_and_have_four_digits(log):
    lines = [
        "{'loss': '13.52', 'grad_norm': '1.522', 'epoch': '0.0625', 'train_runtime': '0.05'}",
        "{'eval_loss': '3.2', 'epoch': '0.0625'}",
        "{'loss': '3.5', 'grad_norm': '0.9', 'epoch': '0.125'}",
        "{'train_runtime': '41.7', 'train_loss': '2.994', 'epoch': '2'}",
    ]
    run = log(lines, "huggingface")
    assert points(run, "loss") == {1: 13.52, 2: 3.5} and run.steps_expected is None and not run.faults
    assert run.series["loss"].resolution == 5e-3, "13.52 has its fourth digit at 0.01"
    assert run.series["grad_norm"].resolution == 5e-4


def test_huggingface_floats_bare_tokens_and_json(log):
    lines = [
        "{'loss': 2.5306, 'grad_norm': nan, 'epoch': 0.06}",
        '{"loss": 2.5, "grad_norm": NaN, "epoch": null}',
        "{'loss': np.float64(2.25), 'grad_norm': -inf, 'done': False}",
        "{'loss': 2.4, 'grad_norm': 1.5, 'text': \"it's nan\"}",
    ]
    run = log(lines, "huggingface")
    assert list(points(run, "loss").values()) == [2.5306, 2.5, 2.25, 2.4] and run.series["loss"].resolution == 5e-5
    assert not run.faults
    norms = points(run, "grad_norm")
    assert math.isnan(norms[1]) and math.isnan(norms[2]) and norms[3] == -math.inf and norms[4] == 1.5


def test_huggingface_progress_bars(log):
    bar = "\r  3%|        | 1/32 [00:01<00:31,  1.02it/s]\r        \r"
    text = bar + "{'loss': '3.4', 'grad_norm': '1.5'}\n\x1b[A" + bar + "{'loss': '3.3', 'grad_norm': '1.6'}\n"
    assert points(log(text, "huggingface"), "loss") == {1: 3.4, 2: 3.3}


def test_huggingface_takes_steps_only_if_every_dict_has_one(log):
    assert list(
        log(["{'loss': 1.5, 'step': 10}", "{'loss': 1.4, 'step': 20}"], "huggingface").series["loss"].steps
    ) == [10, 20]
    assert list(log(["{'loss': 1.5, 'step': 10}", "{'loss': 1.4}"], "huggingface").series["loss"].steps) == [1, 2]


@pytest.mark.parametrize("torn", ["{'loss': '3.4', 'grad", "{'loss': 3.4.5}", "{'loss': 1, 'x': {'y': 2}}"])
def test_huggingface_dict_that_cannot_be_read_makes_the_count_worthless(log, torn):
    run = log(["{'loss': 3.5}", torn, "{'loss': 3.3}"], "huggingface")
    assert "line 2" in run.faults["*"] and "cannot be counted" in run.faults["*"]


def test_trainer_state(log):
    history = [
        {"epoch": 0.1, "grad_norm": 0.25, "loss": 5.615690231323242, "step": 2},
        {"epoch": 0.1, "eval_loss": 5.1, "step": 2},
        {"epoch": 0.2, "grad_norm": math.nan, "loss": 5.5, "step": 4},
        {"epoch": 0.2, "train_loss": 5.5, "step": 4},
    ]
    state = {"epoch": 1, "global_step": 4, "max_steps": 8, "log_history": history}
    run = log(json.dumps(state, indent=2), "huggingface")
    assert points(run, "loss") == {2: 5.615690231323242, 4: 5.5} and run.series["loss"].resolution == 0
    assert math.isnan(points(run, "grad_norm")[4]) and "step 4 of 8" in run.notes[0]
    torn = log(json.dumps(state, indent=2)[:-40], "huggingface")
    assert "not whole" in torn.faults["*"]


def test_jsonl(log):
    lines = [
        "starting",
        '{"event": "config", "lr": 1}',
        '{"step": 1, "loss": 3.5, "grad_norm": 0.1234567890123456, "note": "warm", "lr": "2e-05", "skip": null}',
        '[rank0]: {"step": 2, "loss": 3.25, "grad_norm": NaN, "note": "x", "lr": "1e-05", "skip": 7}',
        '{"loss": nan, "step": 3, "grad_norm": "inf", "note": "5", "lr": "N/A"}',
    ]
    run = log(lines, "jsonl")
    assert list(run.series) == ["loss", "grad_norm", "lr", "skip"] and not run.faults
    assert points(run, "lr") == {1: 2e-5, 2: 1e-5} and points(run, "skip") == {2: 7}
    assert points(run, "loss")[2] == 3.25 and math.isnan(points(run, "loss")[3])
    assert math.isnan(points(run, "grad_norm")[2]) and points(run, "grad_norm")[3] == math.inf
    assert run.notes == (
        "base0.log: 1 lines that are no JSON object were skipped",
        "base0.log: 1 JSON objects without the field step were skipped",
    )


@pytest.mark.parametrize(
    ("line", "metric", "words"),
    [
        ('{"step": 2, "loss": 3.', "*", "line 2 begins a JSON object that does not parse"),
        ("{'step': 2, 'loss': 3.5}", "*", "line 2 begins a JSON object that does not parse"),
        ('{"step": 2, "loss": 3.5}, {"step": 3}', "*", "line 2"),
        ('{"step": 2, "loss": 3.5, "loss": 3.6}', "*", "key 'loss' twice"),
        ('{"step": 2, "step": 3, "loss": 3.5}', "*", "key 'step' twice"),
        ('{"step": 2, "loss": "high"}', "loss", "line 2 has loss 'high', which is no number"),
        ('{"step": 2, "loss": true}', "loss", "line 2 has loss"),
        ('{"step": 2, "loss": [1]}', "loss", "line 2 has loss"),
        ('{"step": 2.5, "loss": 1}', "*", "line 2 has the step number '2.5'"),
        ('{"step": -2, "loss": 1}', "*", "line 2 has the step number '-2'"),
        ('{"step": 9223372036854775808, "loss": 1}', "*", "line 2 has the step number"),
        ('{"step": null, "loss": 1}', "*", "line 2 has the step number"),
        ('{"step": NaN, "loss": 1}', "*", "line 2 has the step number"),
        ('{"step": true, "loss": 1}', "*", "line 2 has the step number"),
    ],
)
def test_jsonl_faults(log, line, metric, words):
    run = log(['{"step": 1, "loss": 3.5}', line, '{"step": 4, "loss": 3.5}'], "jsonl", metrics=["loss"])
    assert words in run.faults[metric] and run.faults[metric].startswith("base0.log ")
    assert points(run, "loss")[4] == 3.5


def test_the_largest_step_number(log):
    run = log(
        ['{"step": 9223372036854775807, "loss": 1.5}', '{"step": "3", "loss": 2.5}', '{"step": 4.0, "loss": 3}'],
        "jsonl",
    )
    assert points(run, "loss") == {3: 2.5, 4: 3.0, 2**63 - 1: 1.5} and not run.faults


def test_csv(log):
    text = "\ufeffloss,step,lr,who\r\n3.25,1,,a\r\n3.125,2,1e-5,b\r\nloss,step,lr,who\r\nnan,3,2e-5,\r\n\r\n"
    run = log(text, "csv")
    assert list(run.series) == ["loss", "lr"] and not run.faults
    assert points(run, "lr") == {2: 1e-5, 3: 2e-5} and math.isnan(points(run, "loss")[3])
    assert run.series["loss"].resolution == 5e-4 and run.notes == ("base0.log: the header is repeated 1 times",)
    assert points(log('step,loss\n1,"1,234.5"\n', "csv"), "loss") == {1: 1234.5}


@pytest.mark.parametrize(
    ("text", "metric", "words"),
    [
        ("step,loss,lr\n1,2.5,1\n2,2.5\n", "*", "line 3 has 2 cells where the header names 3 columns"),
        ("step,loss,lr\n1,2.5,1\n2,2.5,1,4\n", "*", "line 3 has 4 cells"),
        ("step,loss\n1,2.5\n2,2.", "loss", "fewer digits"),
        ("step,loss\n1,0.12345678901234567\n2,0.1234", "loss", "fewer digits"),
        ('step,loss\n1,2.5\n2,"2.5\n', "*", "line 3 is no row"),
        ("loss,lr\n1,2.5\n", "*", "line 1 is the header and names no column 'step', only loss, lr"),
        ("step,loss,loss\n1,2.5,2.6\n", "loss", "names the column 'loss' twice"),
        ("step,loss\n,2.5\n", "*", "line 2 has the step number ''"),
        ("step,loss\n1,2.5\n2,2;5\n", "loss", "line 3 has loss '2;5'"),
    ],
)
def test_csv_faults(log, text, metric, words):
    assert words in log(text, "csv", metrics=["loss"]).faults[metric]


def test_regex(log):
    pattern = r"it +(?P<step>\d+) of (?P<steps>\d+): nll=(?P<loss>\S+)(?: gn=(?P<grad_norm>\S+))?"
    lines = ["it    1 of 28: nll=8.06328 (ema 8.36328)", "it 2 of 28: nll=1,007.5 gn=2.5", "it 3 of 28: nll=oops"]
    run = log(lines, "regex", pattern=pattern)
    assert run.steps_expected == 28 and points(run, "loss") == {1: 8.06328, 2: 1007.5}
    assert points(run, "grad_norm") == {2: 2.5} and run.series["loss"].resolution == 5e-6
    assert "line 3 has loss 'oops'" in run.faults["loss"]


@pytest.mark.parametrize(
    ("reader", "pattern", "words"),
    [
        ("pithtran", None, "did you mean pithtrain?"),
        ("regex", None, "needs a pattern"),
        ("regex", "", "needs a pattern"),
        ("regex", "(?P<step>", "no regular expression"),
        ("regex", r"a{99999999999}(?P<step>\d)", "no regular expression"),
        ("regex", r"(\d+)", "no group named step"),
        ("jsonl", "x", "takes no pattern"),
    ],
)
def test_what_cannot_be_used_is_refused(log, reader, pattern, words):
    with pytest.raises(SpecError, match=r".*" + words.replace("?", r"\?")):
        log(["x"], reader, pattern=pattern)


def test_files_that_cannot_be_used_are_refused(tmp_path):
    with pytest.raises(SpecError, match="does not exist"):
        read(tmp_path / "none.log", "pithtrain", ARM)
    with pytest.raises(SpecError, match="is a folder"):
        read(tmp_path, "pithtrain", ARM)


def test_reading_that_breaks_off_is_the_machines_fault(log, monkeypatch):
    def break_off(path):
        yield "\n".join(pith([1])), True
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(logs, "_blocks", break_off)
    with pytest.raises(RunError, match="beyond line 1: Input/output error"):
        log(["x"], "pithtrain")


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


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("-1.5", -1.5), ("+1.5e-3", 0.0015), ("1E+01", 10.0), (".5", 0.5), ("5.", 5.0), ("1,234,567.5", 1234567.5),
        ("'3.5'", 3.5), ("np.float64(0.3)", 0.3), ("tensor(2.5)", 2.5),
        ("inf", math.inf), ("-inf", -math.inf), ("Infinity", math.inf), ("-1.#INF", -math.inf), ("1e999", math.inf),
        ("N/A", None), ("", None), ("None", None),
    ],
)  # fmt: skip
def test_numbers(text, value):
    assert readers.number(text) == value


@pytest.mark.parametrize("text", ["nan", "NaN", "-nan", "1.#QNAN", "-1.#IND", "nan(ind)", "np.float64(nan)"])
def test_nan_forms(text):
    assert math.isnan(readers.number(text))


@pytest.mark.parametrize(
    "text", ["1,23", "1,2345", "12345,678", "1.2.3", "1_000", "0x10", "١٢", "1.5x", "nano", "e5", "1 2", "(1)"]
)
def test_what_is_no_number(text):
    with pytest.raises(ValueError):
        readers.number(text)


def test_values_that_are_not_finite_stay_in_the_series(log):
    lines = pith(range(1, 6))
    lines[2] = lines[2].replace("cross-entropy-loss 11.0003", "cross-entropy-loss nan").replace("49.5003", "inf")
    run = log(lines, "pithtrain")
    assert math.isnan(points(run, "cross-entropy-loss")[3]) and points(run, "gradient-norm")[3] == math.inf
    assert not run.faults and run.series["cross-entropy-loss"].resolution == 5e-5


def test_a_metric_missing_on_one_line_is_a_hole_there_only(log):
    lines = pith(range(1, 6))
    lines[2] = lines[2].replace(" | load-balance-loss 1.090003", "")
    lines[3] = lines[3].replace("61.24 GB", "N/A")
    run = log(lines, "pithtrain")
    assert list(run.series["load-balance-loss"].steps) == [1, 2, 4, 5]
    assert list(run.series["peak-gpu-memory"].steps) == [1, 2, 3, 5]
    assert list(run.series["cross-entropy-loss"].steps) == [1, 2, 3, 4, 5] and not run.faults


@pytest.mark.parametrize(
    ("old", "new", "metric", "words"),
    [
        ("cross-entropy-loss 11.0003", "cross-entropy-loss 11.0x03", "cross-entropy-loss", "'11.0x03'"),
        ("step-time 4.803 sec", "step-time 4803 ms", "step-time", "'4803 ms'"),
        ("gradient-norm", "cross-entropy-loss 5 | gradient-norm", "cross-entropy-loss", "'11.0003 and 5'"),
        ("step 00000003/", "step 0000x003/", "*", "'0000x003'"),
        ("step 00000003/", "step -3/", "*", "'-3'"),
        ("step 00000003/", "step 3.5/", "*", "'3.5'"),
        ("step 00000003/", "step 99999999999999999999/", "*", "'99999999999999999999'"),
        ("/00000032", "/000000x2", "*", "of 000000x2"),
        (" | peak", pith([9])[0], "*", "two step lines"),
    ],
)
def test_a_step_line_that_cannot_be_read_is_a_fault(log, old, new, metric, words):
    lines = pith(range(1, 6))
    lines[2] = lines[2].replace(old, new)
    run = log(lines, "pithtrain")
    assert words in run.faults[metric] and "line 3" in run.faults[metric]
    assert points(run, "cross-entropy-loss")[5] == 11.0005


def test_lines_that_disagree_on_the_number_of_steps(log):
    run = log(pith([1, 2]) + pith([3], total=64), "pithtrain")
    assert run.faults["*"] == "base0.log says that there are 32 steps at line 1 and 64 steps at line 3"


def test_repeats_with_equal_values_are_merged_and_noted(log):
    lines = pith([1, 2, 2, 3, 3, 4])
    lines[3:5] = [line.replace("11.0003", "nan") for line in lines[3:5]]
    run = log(lines, "pithtrain", metrics=["cross-entropy-loss"])
    assert list(run.series["cross-entropy-loss"].steps) == [1, 2, 3, 4] and not run.faults
    assert run.notes == (
        "base0.log repeats 2 step lines; the equal values of cross-entropy-loss, gradient-norm were merged "
        "(the first: step 2, lines 2 and 3)",
    )


def test_repeats_with_different_values_are_a_fault_of_that_metric(log):
    lines = pith([1, 2, 3, 2, 3, 4])
    lines[3] = lines[3].replace("11.0002", "11.5000")
    run = log(lines, "pithtrain")
    assert set(run.faults) == {"cross-entropy-loss"}
    assert (
        "step 2 twice with different values of cross-entropy-loss: 11.0002 at line 2 and 11.5 at line 4"
        in (run.faults["cross-entropy-loss"])
    )
    assert list(run.series["gradient-norm"].steps) == [1, 2, 3, 4]


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


@pytest.mark.parametrize("prefix", ["[rank0]:", "0: ", "(Actor pid=123) ", "\x1b]0;title\x07", "\x1b[2K\x1b[1;31m"])
def test_prefixes_and_escapes(log, prefix):
    assert points(log([prefix + line for line in pith([1, 2])], "pithtrain"), "gradient-norm") == {
        1: 49.5001,
        2: 49.5002,
    }
    lines = [f'{prefix}{{"step": {step}, "loss": 1.5}}' for step in (1, 2)]
    assert points(log(lines, "jsonl"), "loss") == {1: 1.5, 2: 1.5}


def test_line_ends_and_bad_bytes(log):
    raw = ("\r\n".join(pith(range(1, 6))) + "\r\n").encode()
    first, second, rest = raw.split(b"\r\n", 2)
    run = log(b"\r\n".join([first, b"bad \x97 bytes \xff", second, rest, b"half \xe2\x96"]), "pithtrain")
    assert list(run.series["gradient-norm"].steps) == [1, 2, 3, 4, 5] and not run.faults
    broken = raw.replace(b"cross-entropy-loss 11.0002", b"cross-entropy-loss 11.\x9702")
    assert "line 2 has cross-entropy-loss" in log(broken, "pithtrain").faults["cross-entropy-loss"]


def test_a_carriage_return_ends_a_line(log):
    run = log("\r".join(pith([1, 2])) + "\r\r\n" + "\n".join(pith([3])) + "\r\n", "pithtrain")
    assert list(run.series["gradient-norm"].steps) == [1, 2, 3] and not run.faults


def test_line_numbers_are_those_of_an_editor(log):
    lines = pith([1, 2, 2])
    lines[2] = lines[2].replace("11.0002", "11.5000")
    run = log(["bar 1%\rbar 2%\rbar 3%", "", *lines], "pithtrain")
    assert "11.0002 at line 4 and 11.5 at line 5" in run.faults["cross-entropy-loss"]


def test_a_number_torn_at_the_end_of_the_file(log):
    whole = "\n".join(pith(range(1, 6)))
    assert not log(whole, "pithtrain").faults
    torn = log(whole.rpartition("005")[0] + "0", "pithtrain", metrics=["cross-entropy-loss", "gradient-norm"])
    assert "ends at line 5 within gradient-norm 49.50" in torn.faults["gradient-norm"]
    assert set(torn.faults) == {"gradient-norm"}


def test_the_gradient_norm_comes_with_any_choice(log):
    assert set(log(pith([1, 2]), "pithtrain", metrics=["learning-rate"]).series) == {"learning-rate", "gradient-norm"}
    assert set(log([TITAN.format(1)], "torchtitan", metrics=["loss", "nowhere"]).series) == {"loss", "grad_norm"}
    assert set(log(megatron([1]), "megatron", metrics=["lm loss"]).series) == {"lm loss", "grad norm"}
    for name in GRADIENT_NORMS:
        line = json.dumps({"step": 1, "loss": 1.5, "other": 2, name: 0.5})
        assert set(log([line], "jsonl", metrics=["loss"]).series) == {"loss", name}


@pytest.mark.parametrize(
    ("values", "resolution"),
    [
        (["8.0", "7.9375", "7.5"], 5e-5),
        (["3.45", "3.5", "3.456789"], 5e-7),
        (["1.5", "3.4529621557985757"], 0.0),
        (["2e-05", "1.25e-05"], 5e-8),
        (["3", "4"], 0.5),
        (["NaN", "2.25"], 5e-3),
    ],
)
def test_resolution_of_numbers_with_trailing_zeros_stripped(log, values, resolution):
    lines = [f'{{"step": {step}, "loss": {value}}}' for step, value in enumerate(values)]
    assert log(lines, "jsonl").series["loss"].resolution == resolution
    rows = ["step,loss", *(f"{step},{value}" for step, value in enumerate(values))]
    assert log(rows, "csv").series["loss"].resolution == resolution


@pytest.mark.parametrize(
    ("values", "resolution"),
    [
        (["9.999000E-01", "1.087310E+01"], 5e-6),
        (["1.0E-05", "0.0E+00"], 5e-7),
        (["1.0E+05"] * 9, 5e3),
        (["2.50", "2.5"], 0.05),
    ],
)
def test_resolution_of_a_fixed_number_of_digits(log, values, resolution):
    lines = [
        line.replace("1.0000", "").replace("lm loss: ", f"lm loss: {v} | was: ")
        for line, v in zip(megatron(range(9)), values, strict=False)
    ]
    assert log(lines, "megatron").series["lm loss"].resolution == resolution


def samples():
    """Logs of every reader that has shapes, with the odd lines that real logs have."""
    draw = random.Random(7)
    yield "pithtrain", pith(range(1, 40), total=39), {}
    yield "torchtitan", [TITAN.format(step) for step in range(1, 40)], {}
    yield "megatron", megatron(range(1, 40), total=39), {}
    for digits in (4, 17):
        rows = [{"step": s, "loss": round(draw.random() * 20, digits), "t": "a:b", "lr": 1e-5 * s} for s in range(40)]
        yield "jsonl", [json.dumps({**row, "grad_norm": draw.choice([1, 1.5, 12.25])}) for row in rows], {}
        yield (
            "jsonl",
            [json.dumps({"loss": r["loss"], "step": r["step"], "n": None}, separators=(",", ":")) for r in rows],
            {},
        )
        yield "csv", ["lr,step,loss,t,gap", *(f"{r['lr']},{r['step']},{r['loss']},a," for r in rows)], {}
    yield "huggingface", [f"{{'loss': '{draw.random():.4g}', 'grad_norm': {draw.random()}}}" for _ in range(40)], {}
    yield (
        "regex",
        [f"it {s}/39 loss={draw.random():.5f}" for s in range(40)],
        {"pattern": r"it (?P<step>\S+)/(?P<steps>\S+) loss=(?P<loss>\S+)"},
    )


def said(run):
    series = {name: (list(s.steps), list(map(repr, s.values)), s.resolution) for name, s in run.series.items()}
    return series, run.faults, run.notes, run.steps_expected


def mutate(raw, draw):
    """A few rough changes, or many small ones to characters of which numbers are made."""
    junk = [bytes([draw.randrange(256)]), b"nan", b"1e5", b"9" * 30, b"\n", b'"', b"{'loss': ", b" | ", b"\r"]
    small = draw.random() < 0.5
    for _ in range(draw.randrange(1, 40 if small else 6)):
        at, kind = draw.randrange(len(raw) + 1), draw.randrange(3 if small else 5)
        piece = bytes([draw.choice(b'0123456789 .,-+eE:|x"')]) if small else draw.choice(junk)
        if kind == 0:
            raw = raw[:at] + piece + raw[at:]
        elif kind == 1:
            raw = raw[:at] + piece + raw[at + len(piece) :]
        elif kind == 2:
            raw = raw[:at] + raw[at + (1 if small else draw.randrange(1, 30)) :]
        elif kind == 3:
            start = draw.randrange(len(raw) + 1)
            raw = raw[:at] + raw[start : start + draw.randrange(200)] + raw[at:]
        else:
            raw = raw[: max(at, 200)]
    return raw


@pytest.mark.parametrize("number", range(10))
def test_any_bytes_are_read_alike_with_and_without_shapes(log, monkeypatch, number):
    """Mutated logs never raise, and lines read in bulk give what the same lines give one by one."""
    reader, lines, options = list(samples())[number]
    draw = random.Random(number)
    monkeypatch.setattr(logs, "BLOCK", 1500)
    logs_read = [("\n".join(lines) + "\n").encode()]
    logs_read += [mutate(logs_read[0], draw) for _ in range(60)]
    for raw in logs_read:
        monkeypatch.setattr(logs, "SHAPES", 100)
        fast = said(log(raw, reader, **options))
        monkeypatch.setattr(logs, "SHAPES", 0)
        assert said(log(raw, reader, **options)) == fast


def test_a_late_odd_line_is_not_taken_by_the_shape(log, monkeypatch):
    monkeypatch.setattr(logs, "BLOCK", 300)
    rows = [f'{{"step": {step}, "loss": 0.1234567890{step}}}' for step in range(10, 60)]
    assert log(rows, "jsonl").series["loss"].resolution == 5e-13
    assert log([*rows, '{"step": 60, "loss": 123.123456789012}'], "jsonl").series["loss"].resolution == 0
    assert "line 51" in log([*rows, '{"step": 060, "loss": 0.1}'], "jsonl").faults["*"]
    cells = ["step,loss,late", *(f"{step},0.5," for step in range(60))]
    assert points(log([*cells, "60,0.5,2.5"], "csv"), "late") == {60: 2.5}


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("number", range(8))
def test_shapes_are_found(log, monkeypatch, number, end):
    """Nearly all lines of a regular log go the fast way."""
    reader, lines, options = list(samples())[number]
    taken = []
    extend = logs._Table.extend
    monkeypatch.setattr(logs._Table, "extend", lambda *given: (taken.append(len(given[-1])), extend(*given)))
    monkeypatch.setattr(logs, "BLOCK", 300)
    log(end.join(lines) + end, reader, **options)
    assert sum(taken) >= len(lines) // 2
