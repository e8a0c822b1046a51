from __future__ import annotations

import math
from dataclasses import replace

import pytest

from rlspec.drift import default_metrics, judge_drift, wants_base_run
from rlspec.errors import SpecError
from rlspec.model import Judgment, Row, Verdict
from tests.drift_runs import CURVE, DRIFT, JUMPY, LIMITS, judge, late, row, run, shifted, three

# The ratio and its limits


@pytest.mark.parametrize(
    ("offset", "status"),
    [(0.25, "PASS"), (0.375, "INVESTIGATE"), (0.5, "INVESTIGATE"), (0.625, "INVESTIGATE"), (0.6251, "FAIL")],
)
def test_both_limits_belong_to_the_grey_band(offset: float, status: str) -> None:
    curve = [float(at) for at in range(32)]
    runs = [run("base0", curve), run("base1", shifted(0.125, curve)), run("feat0", shifted(offset, curve))]
    found = judge(runs)
    assert found.status == status and found.statistic == pytest.approx(offset / 0.125, rel=1e-12)
    assert ("(one envelope)" in found.reason) == (status == "FAIL")


def test_the_limits_are_those_of_the_row() -> None:
    found = judge_drift(DRIFT, three(0.5), lambda name: row(name, {"pass_below": 6, "fail_above": 7}))
    assert found.status == "PASS" and "below 6" in found.reason
    assert found.evidence["smallest_offset"]["absolute"] == pytest.approx(0.75)
    with pytest.raises(SpecError, match="training/drift/.* has no limit fail_above"):
        judge_drift(DRIFT, three(0.5), lambda name: row(name, {"pass_below": 6}))


def test_pooling_features_does_not_hide_one() -> None:
    found = judge([*three(0.125), run("feat1", shifted(0.9))])
    assert found.status == "INVESTIGATE" and any("feat1 alone reads" in note for note in found.notes)


def test_feature_runs_of_other_settings_are_judged_by_themselves() -> None:
    def declared(made, **environment):
        return replace(made, arm=replace(made.arm, environment=environment))

    runs = [*three(0.125)[:2], declared(run("feat0", shifted(-0.125)), FUSED="1"), run("feat1", shifted(0.6))]
    found = judge(runs)
    assert found.status == "INVESTIGATE" and found.statistic == pytest.approx(4.8) and "feat1 drifts" in found.reason
    assert any(note.startswith("feat0 of other settings: PASS, feat0 drifts 0.125") for note in found.notes)
    alike = [*runs[:2], *(declared(one, SEED=str(at)) for at, one in enumerate(runs[2:]))]
    assert judge(alike).statistic == pytest.approx((0.125 + 0.6 + 0.25 + 0.475) / 4 / 0.125), "seeds are of one sample"


@pytest.mark.parametrize(("bases", "used"), [(3, "3"), (4, "4"), (5, "5"), (6, "5")])
def test_calibrated_limits_go_by_the_number_of_base_runs(bases: int, used: str) -> None:
    runs = [run(f"base{at}", shifted(at / 8)) for at in range(bases)] + [run("feat0", shifted(0.3))]
    found = judge(runs, replace(DRIFT, judge="calibrated"))
    assert found.row is not None and found.row.judgment == f"drift_calibrated_{used}"
    assert found.evidence["limits"]["pass_below"] == LIMITS[f"drift_calibrated_{used}"][0]


def test_calibrated_needs_three_base_runs_that_count() -> None:
    for runs in (three(0.25), [*three(0.25), run("base2", CURVE)]):
        found = judge(runs, replace(DRIFT, judge="calibrated"))
        assert found.status == "ERROR" and "needs three base runs, 2 count" in found.reason
        assert wants_base_run(DRIFT, found, len(runs) - 1) is (len(runs) > 3), "lint has seen to the first"
        assert not wants_base_run(replace(DRIFT, max_base_runs=len(runs) - 1), found, len(runs) - 1)


def test_a_feature_that_equals_a_base_run() -> None:
    for offset, base in ((0.125, "base1"), (0.0, "base0")):  # as on a stack that goes one of two ways
        found = judge(three(offset))
        said = f"feat0 equals {base} to the bit though base runs differ: is it a run of its own?"
        assert found.status == "PASS" and said in found.notes
    base, other, feature = three(0.0)
    moved = run("base1", other.series["loss"].values, perturb={"weights": "1ulp", "seed": 1})
    assert not any("run of its own" in note for note in judge([base, moved, feature]).notes)
    found = judge([base, moved, run("feat0", shifted(0.125))])
    assert (found.status, found.evidence["cause"]) == ("INVESTIGATE", "same_run")


def test_flips_of_the_last_printed_digit_are_no_floor_for_what_differs_on_many_more_steps() -> None:
    coarse = {"resolution": 0.005}
    for feature, base, status in (
        (0.028, late(0.01, 1), "INVESTIGATE"), (late(0.02, 11), late(0.01, 1), "INVESTIGATE"),
        (late(0.01, 10), late(0.01, 1), "PASS"), (0.02, late(0.01, 15), "PASS"),
    ):  # fmt: skip
        found = judge(three(feature, base, **coarse))
        assert found.status == status and found.statistic is not None and found.statistic < 3
    reason = judge(three(0.028, late(0.01, 1), **coarse)).reason
    assert reason.endswith("units of the last printed digit (0.01) on 1 steps at most, and feat0 differs on 31 of 31")
    assert wants_base_run(DRIFT, judge(three(0.028, late(0.01, 1), **coarse)), 2), "another may differ on as many"
    assert judge(three(0.028, late(0.01, 1))).status == "PASS", "at full precision an event is an event"
    for pooled in ((late(0.01, 1), 0.02), (0.02, late(0.01, 1))):
        features = [run(f"feat{at}", shifted(by), **coarse) for at, by in enumerate(pooled)]
        assert judge([*three(0.0, late(0.01, 1), **coarse)[:2], *features]).status == "INVESTIGATE"


# Without a ratio


def test_identical_to_the_bit() -> None:
    found = judge(three(0, 0, resolution=5e-5))
    assert (found.status, found.statistic, found.evidence["floor"]) == ("PASS", None, "zero")
    assert "identical to the bit" in found.reason and "0.0001" in found.reason
    assert any("resolution" in note for note in found.notes)
    assert "full precision" in judge(three(0, 0)).reason


def test_a_reproducible_base_and_a_feature_that_moved() -> None:
    runs = three([0.0] * 9 + [1e-7] * 23, 0)
    found = judge(runs)
    assert (found.status, found.statistic) == ("INVESTIGATE", None) and "bit-reproducible" in found.reason
    assert found.evidence["first_difference"]["step"] == 10 and "on 23 of 31 steps" in found.reason
    assert judge(runs, replace(DRIFT, zero_envelope="fail")).status == "FAIL"
    assert judge(three([1.0] + [0.0] * 31, 0)).status == "PASS"  # step 1 alone


def test_equal_bits_are_equal_on_an_unstable_fixture_too() -> None:
    found = judge(three(0, 0, others={"grad_norm": JUMPY}))
    assert found.status == "PASS" and any("unstable" in note for note in found.notes)


# In doubt


@pytest.mark.parametrize("offset", [0.125, 0.5, 5.0])
def test_an_unstable_fixture_settles_nothing(offset: float) -> None:
    base, other, feature = three(offset)
    other = run("base1", shifted(0.125), others={"grad_norm": JUMPY})
    found = judge([base, other, feature])
    assert (found.status, found.evidence["floor"], found.evidence["cause"]) == ("INVESTIGATE", "unstable", "unstable")
    assert "unstable fixture: gradient norm of base1 jumps from 0.9 to 12.4 at step 17" in found.reason
    assert "warm-up" in found.reason and found.statistic == pytest.approx(offset / 0.125)


def test_machines_that_differ() -> None:
    here, there = {"gpu": "H100", "torch": "2.5"}, {"gpu": "H200", "torch": "2.5"}

    def judged(offset: float, base: float = 0.125, judgment: Judgment = DRIFT) -> Verdict:
        a, b, c = three(offset, base)
        return judge([replace(a, machine=here), replace(b, machine=here), replace(c, machine=there)], judgment)

    assert judged(0.25).status == "PASS" and any(
        "about half of steady offsets of 0.375" in note for note in judged(0.25).notes
    )
    failed = judged(5.0)
    assert failed.status == "INVESTIGATE" and failed.evidence["cause"] == "machine"
    assert "re-run on the same nodes before you blame the code" in failed.reason and "gpu" in failed.reason
    assert failed.evidence["machines_differ"]["gpu"] == {"base0": "H100", "base1": "H100", "feat0": "H200"}
    assert judged(0.5).evidence["cause"] == "grey_band"
    assert judged(0.5, 0.0, replace(DRIFT, zero_envelope="fail")).status == "INVESTIGATE"


# Fails closed


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite(bad: float) -> None:
    values = [0.125] * 6 + [bad] * 26
    found = judge(three(values))
    assert found.status == "FAIL" and f"feat0: loss is {bad} at step 7" in found.reason
    found = judge(three(0.125, values))
    assert found.status == "ERROR" and f"base1: loss is {bad} at step 7" in found.reason
    assert judge(three(values, values)).status == "ERROR"
    assert judge(three([bad, *[0.125] * 31])).status == "FAIL"


def test_a_feature_that_is_not_finite_fails_on_any_floor() -> None:
    for base in (0.0, late(0.125, 2), 0.125):
        bad = judge(three([0.125] * 31 + [math.nan], base, others={"grad_norm": JUMPY}))
        assert bad.status == "FAIL"


def test_too_few_runs() -> None:
    base, other, feature = three(0.125)
    assert "needs two base runs" in judge([base, feature]).reason
    assert judge([base, other]).status == judge([]).status == "ERROR"


@pytest.mark.parametrize("status", ["not_applicable", "out_of_scope"])
def test_a_row_that_does_not_apply(status: str) -> None:
    found = judge_drift(DRIFT, three(9.0), lambda name: row(name, status=status))
    assert (found.status, found.reason) == ("N/A", "written down")


def test_a_measured_row_is_not_gated_but_still_fails_closed() -> None:
    def measured(name: str) -> Row:
        return row(name, {}, "measured")

    for offset, base in ((9.0, 0.125), (0.0, 0.0), (1.0, 0.0)):
        assert judge_drift(DRIFT, three(offset, base), measured).status == "MEASURED"
    assert judge_drift(DRIFT, three([math.nan] * 32), measured).status == "FAIL"


@pytest.mark.parametrize(
    ("base", "feature"),
    [(1e308, -1e308), (-1e308, 1.0), (1.0, 1e308), (1.0, -1e308), (5e-324, 1e308), (5e-324, 0.0), (1e308, 0.0)],
)
def test_values_at_the_ends_of_a_double_never_pass(base: float, feature: float) -> None:
    curve = [1e308, *[0.0] * 30, 1e308]
    runs = [run("base0", curve), run("base1", [0.0, *[base] * 31]), run("feat0", [0.0, *[feature] * 30, -1e308])]
    found = judge_drift(DRIFT, runs, row)
    assert found.status in ("FAIL", "ERROR")


def test_a_base_difference_beyond_a_double_is_no_floor() -> None:
    runs = [run("base0", [0.0, *[1e308] * 31]), run("base1", [0.0, *[-1e308] * 31]), run("feat0", CURVE)]
    found = judge_drift(DRIFT, runs, row)
    assert found.status == "ERROR" and "do not fit a double" in found.reason


# Around the judgment


def test_notes_of_the_runs_are_passed_on_once() -> None:
    a, b, c = three(0.25)
    notes = ("step 4 merged", "base0: step 5 merged")
    found = judge([replace(a, notes=notes), replace(b, notes=("step 4 merged",)), c])
    assert found.notes[:3] == ("base0: step 4 merged", "base0: step 5 merged", "base1: step 4 merged")


def test_default_metrics_are_those_that_some_run_prints() -> None:
    a, b, c = three(0.25)
    c = run("feat0", CURVE, others={"aux": CURVE})
    assert default_metrics(["aux", "norm", "loss"], [a, b, c]) == ("aux", "loss")
    assert default_metrics(["loss"], []) == ()


def test_what_a_further_base_run_is_asked_for() -> None:
    confirm = replace(DRIFT, confirm_fail=True)
    grey, failed, passed = judge(three(0.5)), judge(three(5.0)), judge(three(0.125))
    assert wants_base_run(DRIFT, grey, 2) and wants_base_run(DRIFT, grey, 3) and not wants_base_run(DRIFT, grey, 4)
    assert wants_base_run(confirm, failed, 2) and not wants_base_run(DRIFT, failed, 2)
    assert not wants_base_run(replace(confirm, max_base_runs=2), failed, 2)
    assert not wants_base_run(confirm, judge([*three(5.0), run("base2", shifted(0.3))]), 3)
    assert wants_base_run(confirm, judge([*three(5.0), run("base2", CURVE)]), 3)
    assert not wants_base_run(confirm, judge(three(0.5, 0)), 2)
    assert not wants_base_run(replace(confirm, zero_envelope="fail"), judge(three(0.5, 0)), 2)
    assert not wants_base_run(confirm, judge(three([math.nan] * 32)), 2)
    assert not wants_base_run(confirm, judge(three(0.5, others={"grad_norm": JUMPY})), 2)
    assert not wants_base_run(confirm, passed, 2)
