from __future__ import annotations

import dataclasses
from array import array
from pathlib import Path

import pytest

from rlspec import contract, document
from rlspec.checks import performance
from rlspec.model import Result, Run, Series

ROOT = Path(__file__).parents[2]
ROWS = contract.load("training", ROOT)


def parsed(path=ROOT / "specs" / "performance" / "qwen3-30b-a3b.yaml", **changes):
    read, problems = document.read(path)
    assert not problems
    return performance.parse(dataclasses.replace(read, data={**read.data, **changes}))


def results(spec, series, scale=lambda arm: 1.0):
    """The same series for each arm, its values times `scale(arm)`; the first step is slow, as with compilation."""
    found = []
    for arm in spec.arms:
        made = {
            name: Series(
                arm=arm.name,
                metric=name,
                steps=array("q", range(1, len(values) + 1)),
                values=array("d", [value * scale(arm) for value in values]),
            )
            for name, values in series.items()
        }
        found.append(Result(arm=arm, records=Path("r"), run=Run(arm=arm, series=made)))
    return found


PITHTRAIN = {
    "step-time": [99.0, 4.0, 5.0, 6.0],
    "tokens-per-second": [1.0, 200.0, 400.0, 300.0],
    "peak-gpu-memory": [1.0, 60.0, 62.0, 61.0],
}


def slower(arm):
    return 1.1 if arm.role == "feature" else 1.0


def test_medians_after_the_first_step_and_the_difference_in_percent():
    spec = parsed()
    verdicts = performance.judge(spec, results(spec, PITHTRAIN, slower), ROWS)
    found = {v.judgment: (v.status, v.subject, v.evidence["base"], round(v.statistic, 6)) for v in verdicts}
    assert found == {
        "step_time": ("MEASURED", "step-time", 5.0, 10.0),
        "throughput": ("MEASURED", "tokens-per-second", 300.0, 10.0),
        "peak_memory": ("MEASURED", "peak-gpu-memory", 62.0, 10.0),
    }
    assert {v.judgment: v.evidence["scope"] for v in verdicts} == {
        "step_time": "",
        "throughput": "job",
        "peak_memory": "",
    }


def test_a_usual_figure_that_nobody_prints_is_left_out_and_said():
    spec = parsed()
    del spec.data["judgments"]
    verdicts = performance.judge(spec, results(spec, {"step-time": PITHTRAIN["step-time"]}), ROWS)
    assert [v.judgment for v in verdicts] == ["step_time"]
    assert any("throughput, peak_memory" in note for note in verdicts[0].notes)


def test_a_figure_that_was_asked_for_and_is_missing_is_an_error():
    spec = parsed(judgments=["step_time", "throughput"])
    verdicts = performance.judge(spec, results(spec, {"step-time": PITHTRAIN["step-time"]}), ROWS)
    assert [(v.judgment, v.status) for v in verdicts] == [("step_time", "MEASURED"), ("throughput", "ERROR")]


def test_nothing_of_it_printed_is_an_error_and_no_empty_report():
    spec = parsed()
    del spec.data["judgments"]
    (verdict,) = performance.judge(spec, results(spec, {"cross-entropy-loss": [1.0, 2.0]}), ROWS)
    assert verdict.status == "ERROR" and "pithtrain" in verdict.reason


def test_a_failed_arm_is_an_error_of_every_figure():
    spec = parsed()
    found = results(spec, PITHTRAIN)
    found[1] = Result(arm=found[1].arm, records=Path("r"), failure="out of memory")
    verdicts = performance.judge(spec, found, ROWS)
    assert {v.status for v in verdicts} == {"ERROR"} and len(verdicts) == 3
    assert all("arm feat0: out of memory" in v.reason for v in verdicts)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_figure_that_is_not_finite_is_never_measured(bad):
    spec = parsed()
    series = {**PITHTRAIN, "step-time": [99.0, 4.0, bad, 6.0]}
    statuses = {v.judgment: v.status for v in performance.judge(spec, results(spec, series), ROWS)}
    assert statuses == {"step_time": "ERROR", "throughput": "MEASURED", "peak_memory": "MEASURED"}


def test_performance_never_asks_for_more_runs():
    spec = parsed()
    assert performance.more(spec, performance.judge(spec, results(spec, PITHTRAIN, slower), ROWS)) is None


def test_steps_and_settings_are_those_of_the_fixture():
    spec = parsed()
    assert spec.trainer.settings["force_balanced_routing"] is True and spec.trainer.steps == 8
    assert [step.arm.name for step in performance.expand(spec, Path("w"), Path("l"))] == [
        "base0",
        "feat0",
        "feat1",
        "base1",
    ]
