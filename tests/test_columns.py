from __future__ import annotations

import math

import pytest

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
