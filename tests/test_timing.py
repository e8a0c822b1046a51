from __future__ import annotations

import json
import math
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from rlspec.model import Arm, Run, Series, Verdict
from rlspec.timing import judge_timing


def run(name: str, values: Sequence[float], steps: Sequence[int] | None = None, **more: Any) -> Run:
    at = array("q", range(1, len(values) + 1) if steps is None else steps)
    found = {"time": Series(arm=name, metric="time", steps=at, values=array("d", values))} if len(at) else {}
    return Run(arm=Arm(name=name, role="base" if name.startswith("base") else "feature"), series=found, **more)


def judge(runs: Sequence[Run], check: str = "step_time", factor: float = 1.0, scope: str = "") -> Verdict:
    found = judge_timing(check, runs, "time", factor, scope)
    json.dumps(found.evidence)
    return found


def test_medians_skip_step_1_and_a_stall() -> None:
    found = judge([run("base", [90, 4, 5, 4, 8]), run("feat", [80, 2, 2, 3, 3])])
    assert (found.status, found.judgment, found.subject) == ("MEASURED", "step_time", "time")
    assert found.evidence["medians"] == {"base": 4.5, "feat": 2.5} and found.evidence["steps_judged"] == 4
    assert found.statistic == pytest.approx(-100 * 2 / 4.5) and found.evidence["unit"] == "s"
    assert "one run per arm: no interval" in found.reason and "-44.44 %" in found.reason
    assert found.evidence["interval_percent"] is None


def test_peak_memory_is_a_maximum_after_step_1() -> None:
    found = judge([run("base", [90, 4, 9, 4]), run("feat", [99, 2, 2, 3])], "peak_memory")
    assert found.evidence["medians"] == {"base": 9, "feat": 3} and "maximum" in found.reason and "GiB" in found.reason


def test_factor_and_scope() -> None:
    found = judge([run("base", [1, 800, 800]), run("feat", [1, 400, 400])], factor=0.001, scope="per iteration")
    assert found.evidence["medians"] == {"base": 0.8, "feat": 0.4} and "s per iteration" in found.reason


def test_several_runs_give_a_t_interval_over_their_figures() -> None:
    runs = [run(name, [1, value, value]) for name, value in {"base0": 10, "feat0": 8, "feat1": 9, "base1": 12}.items()]
    found = judge(runs)
    assert found.evidence["by_role"] == {"base": [10, 12], "feature": [8, 9]} and found.evidence["degrees"] == 2
    error = math.sqrt((1 + 1 + 0.25 + 0.25) / 2)
    low, high = found.evidence["interval_percent"]
    assert found.statistic == pytest.approx(-250 / 11)
    assert high - low == pytest.approx(2 * 100 * 4.30265272975 * error / 11)
    assert "pooled variance" in found.reason and "no interval" not in found.reason
    assert not found.notes
    other = replace(runs[2], arm=replace(runs[2].arm, environment={"FUSED": "1"}))
    assert "the feature arms feat0 and feat1 have other settings" in judge([*runs[:2], other, runs[3]]).notes[0]


def test_one_run_of_one_role_gives_no_interval() -> None:
    assert judge([run("base0", [1, 2]), run("base1", [1, 3]), run("feat", [1, 2])]).evidence["interval_percent"] is None


def test_a_base_of_zero_has_no_percentage() -> None:
    found = judge([run("base", [0, 0]), run("feat", [1, 2])])
    assert found.status == "MEASURED" and found.statistic is None and "no percentage" in found.reason


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_values_that_are_not_finite_are_never_dropped(bad: float) -> None:
    for at in (0, 1):
        runs = [run("base", [1, 2, 3]), run("feat", [1, 2, 3])]
        runs[at] = run(runs[at].arm.name, [1, 2, bad])
        found = judge(runs)
        assert found.status == "ERROR" and f"{runs[at].arm.name}: time is {bad} at step 3" in found.reason


def test_what_cannot_be_read_is_an_error() -> None:
    whole = run("base", [1, 2, 3])
    assert judge([whole, run("feat", [])]).reason == "time is missing in feat, though printed by base"
    assert "feat is missing step 3" in judge([whole, run("feat", [1, 2])]).reason
    assert "every run is missing step 4" in judge([replace(one, steps_expected=4) for one in
                                                   (whole, run("feat", [1, 2, 3]))]).reason  # fmt: skip
    assert "step 1 of time only" in judge([run("base", [1]), run("feat", [1])]).reason
    assert judge([whole]).reason == "there is no feature run to measure: add an arm of role feature"
    assert judge([]).status == "ERROR"
    assert judge([whole, run("feat", [1, 2, 3], faults={"*": "torn"})]).reason == "feat: torn"


def test_differing_machines_and_notes_are_said() -> None:
    a = run("base", [1, 2], machine={"gpu": "a"}, notes=("step 2 merged",))
    found = judge([a, run("feat", [1, 2], machine={"gpu": "b"})])
    assert found.notes[0] == "base: step 2 merged" and "differ in gpu" in found.notes[1]


def test_a_log_that_begins_late_or_counts_from_0() -> None:
    found = judge([run("base", [1, 2], [10, 20]), run("feat", [1, 2], [10, 20])])
    assert found.evidence["steps_judged"] == 2 and "begins at step 10" in found.notes[0]
    found = judge([run("base", [9, 2, 2], range(3)), run("feat", [9, 2, 2], range(3))])
    assert found.evidence["medians"]["base"] == 2 and found.evidence["steps"] == "1 to 2"
