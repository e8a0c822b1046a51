from __future__ import annotations

import math

import pytest

from tests.log_samples import pith, points


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
    ("text", "whole"),
    [
        ("1.0950e+03", "1.0950e+03"),
        ("1.0950E2,", "1.0950E2"),
        ("10.95.5", "10.95.5"),
        ("10.95, 7", ""),
        ("10.95epoch", ""),
    ],
)
def test_a_group_that_holds_a_part_of_a_number_is_a_fault(log, text, whole):
    lines = [f"step {step}/2 loss={text} gn=2.5" for step in (1, 2)]
    pattern = r"step (?P<step>\d+)/(?P<steps>\d+) loss=(?P<loss>\d+\.\d+).* gn=(?P<grad_norm>\S+)"
    run = log(lines, "regex", pattern=pattern)
    assert points(run, "grad_norm") == {1: 2.5, 2: 2.5}
    assert (f"line 1 has loss '{whole[:6].rstrip('.')}" in run.faults["loss"]) if whole else not run.faults
    assert not whole or f"goes on: {whole!r}; let the group loss take all of it" in run.faults["loss"]
    assert "line 1 has step '1'" in log(["at 1.5 2"], "regex", pattern=r"at (?P<step>\d+)").faults["*"]


@pytest.mark.parametrize(
    ("pattern", "text", "whole"),
    [
        (r".*(?P<loss>\d+\.\d+) ", "10.9919 ", "10.9919"),
        (r".*?(?P<loss>\d+\.\d+)", "11,860.00", "11,860.00"),
        (r"(?P<loss>[\d.]+)", "11,860.00", "11,860.00"),
        (r"(?P<loss>[\d.]+)", "1,311,860, 7", "1,311,860"),
        (r"-?(?P<loss>[\d.]+)", "-1.5", "-1.5"),
        (r"\d*\.(?P<loss>\d+)", ".5", ".5"),
        (r"\d*(?P<loss>\.\d+)", "1.5", "1.5"),
        (r"1e-(?P<loss>\d+)", "1e-05", "1e-05"),
        (r"10*(?P<loss>\d+)", "1000", "1000"),
        (r"0*(?P<loss>\d+)", "0012", ""),  # zeros at the beginning say nothing
        (r"[a-z]+[-.](?P<loss>[\d.]+)", "run-1.5", ""),  # a hyphen
        (r"\.*(?P<loss>[\d.]+)", "...1.5", ""),
        (r"(?P<loss>[\d.]+)", "1.5,200", ""),  # lists
        (r"(?P<loss>\d+)", "15,2000", ""),
        (r"(?P<loss>\d+),(?P<more>\d+)", "15,200", ""),
        (r"(?P<more>\d+),(?P<loss>\S+)", "15,200.5", ""),
        (r"(?P<loss>\d+)", "12,300,4.5", ""),
    ],
)
def test_a_group_that_begins_or_ends_inside_a_number_is_a_fault(log, pattern, text, whole):
    run = log([f"step {step} loss={text}" for step in (1, 2)], "regex", pattern=rf"step (?P<step>\d+) loss={pattern}")
    assert set(run.faults) == ({"loss"} if whole else set())
    assert not whole or f": {whole!r}; let the group loss take all of it" in run.faults["loss"]


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


@pytest.mark.parametrize("prefix", ["[rank0]:", "0: ", "(Actor pid=123) ", "\x1b]0;title\x07", "\x1b[2K\x1b[1;31m"])
def test_prefixes_and_escapes(log, prefix):
    assert points(log([prefix + line for line in pith([1, 2])], "pithtrain"), "gradient-norm") == {
        1: 49.5001,
        2: 49.5002,
    }
    lines = [f'{prefix}{{"step": {step}, "loss": 1.5}}' for step in (1, 2)]
    assert points(log(lines, "jsonl"), "loss") == {1: 1.5, 2: 1.5}
