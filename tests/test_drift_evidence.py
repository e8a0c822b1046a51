from __future__ import annotations

from dataclasses import replace

import pytest

from tests.drift_runs import CURVE, DRIFT, judge, run, shifted, three


def test_every_figure_is_printed() -> None:
    found = judge(three([0.5 if at % 2 else -0.25 for at in range(32)], total=32, resolution=0.005))
    evidence = found.evidence
    assert (evidence["floor"], evidence["base_runs"], evidence["base_runs_counted"]) == ("steady", 2, 2)
    assert (evidence["steps_judged"], evidence["steps"]) == (31, "31 of 31")
    assert evidence["base_steps_differing"] == "31 of 31" and evidence["lag1"] is not None
    assert evidence["envelope"] == evidence["diluted_envelope"] == pytest.approx(0.125)
    balance = evidence["sign_balance"]
    assert (balance["positive"], balance["negative"], balance["zero"]) == (16, 15, 0)
    assert evidence["largest_contribution"]["value"] == pytest.approx(0.5)
    assert evidence["largest_contribution"]["share"] == pytest.approx(0.5 / (16 * 0.5 + 15 * 0.25))
    assert evidence["run_mean_t"]["df"] == 1 and 0 < evidence["run_mean_t"]["p"] < 1
    assert evidence["smallest_offset"]["absolute"] == pytest.approx(0.375)
    assert evidence["smallest_offset"]["percent"] == pytest.approx(37.5 / (sum(CURVE[1:]) / 31))
    assert evidence["caught_offset"]["absolute"] == pytest.approx(1.6 * 5 * 0.125)
    assert evidence["ratio"] == evidence["diluted_ratio"] == found.statistic
    assert evidence["envelope_in_resolution_units"] == pytest.approx(12.5)
    assert not any("resolution" in note for note in found.notes)


def test_step_1_is_shown_and_not_gated() -> None:
    found = judge(three([70.0, *[-0.125] * 31], [0.0, *[0.125] * 31], resolution=5e-5))
    assert found.status == "PASS" and found.statistic == pytest.approx(1)
    step = found.evidence["step_1"]
    assert step["values"] == {"base0": 4.0, "base1": 4.0, "feat0": 74.0}
    assert (step["base_delta"], step["feature_delta"], step["resolution"]) == (0.0, 70.0, 5e-5)
    (note,) = [note for note in found.notes if "step 1 is not gated" in note]
    assert note.endswith("as if the forward itself had moved")


def test_a_gradient_norm_at_step_1_moves_by_the_forward_or_the_backward() -> None:
    runs = three([70.0, *[0.125] * 31], [0.0, *[0.125] * 31], metric="grad_norm")
    (note,) = [note for note in judge(runs, replace(DRIFT, metric="grad_norm")).notes if "step 1" in note]
    assert note.endswith("from base0 by 70 and the base runs by 0: as if the forward or the backward itself had moved")


def test_a_floor_near_the_resolution_is_warned_of() -> None:
    found = judge(three(-0.0002, 0.0002, resolution=5e-5))
    assert found.status == "PASS" and any("resolution" in note for note in found.notes)
    assert found.evidence["envelope_in_resolution_units"] == pytest.approx(2)


def test_one_sided_drift_is_said() -> None:
    assert any("sign balance: feat0 is below base0 on all 31" in note for note in judge(three(-0.2)).notes)


def test_strides_and_logs_that_count_from_0_or_begin_late() -> None:
    every = [run(name, shifted(by, CURVE[:4]), steps=[10, 20, 30, 40], total=40)
             for name, by in (("base0", 0.0), ("base1", 0.125), ("feat0", 0.25))]  # fmt: skip
    found = judge(every)
    assert found.status == "PASS" and found.evidence["step_1"] is None
    assert "steps judged 4 of 4 printed (every 10th)" in found.notes
    assert any("begins at step 10" in note for note in found.notes)
    found = judge(three(0.25, steps=range(32), total=32))
    assert found.evidence["steps_judged"] == 31 and found.evidence["step_1"]["step"] == 0
    found = judge(three(0.25, steps=range(5, 37)))
    assert found.evidence["steps"] == "32 of 32 printed"


def test_an_unknown_machine_is_said() -> None:
    a, b, c = three(5.0)
    found = judge([replace(a, machine={"gpu": "H100"}), b, c])
    assert found.status == "FAIL" and any("no machine fingerprint from base1, feat0" in note for note in found.notes)
