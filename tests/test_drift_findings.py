from __future__ import annotations

import math
from dataclasses import replace

import pytest

from rlspec.model import Judgment
from tests.drift_runs import CURVE, judge, run, shifted, three


def test_step_sets() -> None:
    base, other, _ = three(0.125, total=32)
    found = judge([base, other, run("feat0", shifted(0.125)[:31], total=32)])
    assert found.status == "ERROR" and "feat0 is missing step 32" in found.reason and "ends at step 31" in found.reason
    died = judge([base, other, run("feat0", [*CURVE[:6], math.nan], total=32)])
    assert died.status == "ERROR" and any("nan at step 7" in note for note in died.notes)
    assert judge([run(name, [1.0], total=1) for name in ("base0", "base1", "feat0")]).status == "ERROR"


def test_joined_by_step_number_not_by_position() -> None:
    steps = [*range(1, 17), *range(18, 34)]
    found = judge([*three(0.125)[:2], run("feat0", CURVE, steps=steps)])
    assert found.status == "ERROR" and any(note.startswith("feat0 is missing step 17") for note in found.notes)


def test_faults_and_absent_metrics() -> None:
    base, other, feature = three(-0.125)
    found = judge([base, other, replace(feature, faults={"loss": "step 17 is there twice, with 3.1 and 3.2"})])
    assert found.status == "ERROR" and found.reason == "feat0: step 17 is there twice, with 3.1 and 3.2"
    assert judge([base, replace(other, faults={"*": "truncated"}), feature]).status == "ERROR"
    assert judge([base, other, replace(feature, faults={"lr": "irrelevant"})]).status == "PASS"
    found = judge([base, other, run("feat0", CURVE, metric="lr")])
    assert found.status == "ERROR" and found.reason == "loss is missing in feat0, though printed by base0, base1"
    found = judge([base, other, feature], Judgment(check="drift", metric="aux"))
    assert found.status == "ERROR" and "no run prints aux" in found.reason


def test_different_data_stop_everything() -> None:
    base, other, feature = three(-0.125)
    found = judge([base, replace(other, data={1: "a", 2: "b"}), replace(feature, data={2: "c", 3: "d"})])
    assert found.status == "ERROR" and found.reason.startswith("different data at step 2: base1 read b")
    same = judge([base, replace(other, data={1: "a", 2: "b"}), replace(feature, data={2: "b", 3: "d"})])
    assert same.status == "PASS"


@pytest.mark.parametrize(
    ("metric", "value", "said"),
    [("loss", -1.0, "placeholder"), ("load-balance-loss", 1.0, "forced routing"), ("loss", 2.5, "constant 2.5")],
)
def test_a_constant_cannot_fail(metric: str, value: float, said: str) -> None:
    runs = [run(name, [value] * 8, metric=metric) for name in ("base0", "base1", "feat0")]
    found = judge(runs, Judgment(check="drift", metric=metric))
    assert found.status == "ERROR" and "cannot fail" in found.reason and said in found.reason


def test_a_constant_base_alone_is_a_zero_floor() -> None:
    found = judge([run("base0", [1.0] * 8), run("base1", [1.0] * 8), run("feat0", [0.5] * 8)])
    assert (found.status, found.evidence["floor"]) == ("INVESTIGATE", "zero")
