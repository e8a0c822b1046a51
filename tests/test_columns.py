from __future__ import annotations

import math

import pytest

from rlspec import logs
from tests.log_samples import megatron, pith, points


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


def test_one_fault_of_a_metric_is_told_and_the_others_are_counted(log):
    lines = [line.replace("gradient-norm 49", "gradient-norm x49") for line in pith(range(1, 4))]
    fault = log(lines, "pithtrain").faults["gradient-norm"]
    assert fault == "base0.log line 1 has gradient-norm 'x49.5001', which is no number; 2 more like this"


def test_a_number_torn_at_the_end_of_the_file(log):
    whole = "\n".join(pith(range(1, 6)))
    assert not log(whole, "pithtrain").faults
    torn = log(whole.rpartition("005")[0] + "0", "pithtrain", metrics=["cross-entropy-loss", "gradient-norm"])
    assert "ends at line 5 within gradient-norm 49.50" in torn.faults["gradient-norm"]
    assert set(torn.faults) == {"gradient-norm"}


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


@pytest.mark.parametrize(
    ("empty", "words"),
    [
        (range(7, 11), "is missing step 7 of loss: line 7 has that step and no value (4 such lines)"),
        ((1, 2, 3), "is missing step 2 of loss: line 2"),
        ((1, 5), None),  # nothing is judged at step 1, and the hole at 5 is found where runs are joined
    ],
)
def test_a_line_whose_value_is_left_empty_is_a_missing_step(log, monkeypatch, empty, words):
    rows = [(step, "" if step in empty else f"{4 / step:.6f}") for step in range(1, 11)]
    for block in (1 << 17, 60):  # line by line, and in bulk
        monkeypatch.setattr(logs, "BLOCK", block)
        for found in (
            log(["step,loss", *(f"{step},{value}" for step, value in rows)], "csv", metrics=["loss"]),
            log([f'{{"step": {step}, "loss": {value or "null"}}}' for step, value in rows], "jsonl"),
        ):
            fault = found.faults.get("loss", "").replace("line 8", "line 7").replace("line 3", "line 2")
            assert (words in fault) if words else not fault


@pytest.mark.parametrize("block", [1 << 17, 60])  # line by line, and in bulk
def test_a_row_of_an_evaluation_is_none_of_the_training_loss(log, monkeypatch, block):
    monkeypatch.setattr(logs, "BLOCK", block)
    rows = ["step,loss,norm,eval/loss", *(f"{step},{4 / step:.6f},0.5," for step in range(1, 11))]
    assert not log([*rows, "11,,,2.5"], "csv", metrics=["loss"]).faults
    fault = log([*rows, "11,,0.5,"], "csv", metrics=["loss"]).faults["loss"]
    assert "is missing step 11 of loss" in fault, "what stands beside it is of a training step"


def test_a_value_that_is_printed_on_every_tenth_line_only_is_due_there(log):
    rows = [f'{{"step": {step}, "loss": 1.5, "eval": {2.5 if step % 10 == 0 else "null"}}}' for step in range(1, 36)]
    assert not log(rows, "jsonl").faults
    assert "missing step 40 of eval" in log([*rows, '{"step": 40, "eval": null}'], "jsonl").faults["eval"]


@pytest.mark.parametrize(("cut", "told"), [("1", True), ("10.", True), ("10.00", True), ("10.0004", False)])
def test_a_value_with_fewer_digits_than_those_around_it_is_told(log, cut, told):
    values = [f"10.{at:04d}" for at in range(20)]
    values[4] = cut
    lines = [f"{step} loss={value} [rank1] hello" for step, value in enumerate(values, 1)]
    run = log(lines, "regex", pattern=r"(?P<step>\d+) loss=(?P<loss>\S+)")
    assert not run.faults and [f"loss {cut} at line 5 (step 5), with fewer digits" in note for note in run.notes] == (
        [True] if told else []
    )


def test_fewer_digits_say_nothing_where_trailing_zeros_are_left_out_or_a_decade_ends(log):
    values = [4.1239 - 0.0001 * at for at in range(20)]  # one of them is 4.123, which is 4.1230
    assert not log([f'{{"step": {at}, "loss": {round(v, 4)}}}' for at, v in enumerate(values)], "jsonl").notes
    lines = megatron(range(1, 21))
    lines[7] = lines[7].replace("lm loss: 1.000080E+01", "lm loss: 9.9E+00")
    assert "lm loss 9.9E+00" in log(lines, "megatron").notes[0]
    for above in (1, 2):
        four = [f"10.{20 - at}" if at < above else f"9.{999 - at}" for at in range(20)]  # four significant digits
        lines = [line.replace(f"11.{at:04d}", four[at - 1]) for at, line in enumerate(pith(range(1, 21)), 1)]
        run = log(lines, "pithtrain")
        assert points(run, "cross-entropy-loss")[above] == float(four[above - 1]) > 10 and not run.notes
