from __future__ import annotations

import json
import math
import random
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from rlspec.drift import default_metrics, judge_drift, wants_base_run
from rlspec.errors import SpecError
from rlspec.model import Arm, Judgment, Row, Run, Series, Verdict

LIMITS = {
    "drift": (3.0, 5.0),
    "drift_calibrated_3": (3.2, 5.8),
    "drift_calibrated_4": (2.65, 4.3),
    "drift_calibrated_5": (2.35, 3.8),
}
DRIFT = Judgment(check="drift", metric="loss")
CURVE = [4 - 0.05 * at for at in range(32)]


def row(name: str, limits: Mapping[str, float] | None = None, status: Any = "applicable") -> Row:
    below, above = LIMITS[name]
    return Row(
        contract="training",
        judgment=name,
        subject="*",
        dtype="*",
        status=status,
        limits={"pass_below": below, "fail_above": above} if limits is None else limits,
        source="s",
        date="2026-01-01",
        reason="written down",
    )


def run(
    name: str,
    values: Sequence[float],
    *,
    metric: str = "loss",
    steps: Sequence[int] | None = None,
    total: int | None = None,
    resolution: float = 0.0,
    perturb: Mapping[str, Any] | None = None,
    others: Mapping[str, Sequence[float]] | None = None,
    **more: Any,
) -> Run:
    at = array("q", range(1, len(values) + 1) if steps is None else steps)
    found = {
        key: Series(arm=name, metric=key, steps=at, values=array("d", given), resolution=resolution)
        for key, given in {metric: values, **(others or {})}.items()
    }
    role = "base" if name.startswith("base") else "feature"
    return Run(arm=Arm(name=name, role=role, perturb=perturb), series=found, steps_expected=total, **more)


def shifted(by: float | Sequence[float], curve: Sequence[float] = CURVE) -> list[float]:
    each = by if isinstance(by, Sequence) else [by] * len(curve)
    return [value + delta for value, delta in zip(curve, each, strict=True)]


def three(feature: float | Sequence[float], base: float | Sequence[float] = 0.125, **more: Any) -> list[Run]:
    return [run("base0", CURVE, **more), run("base1", shifted(base), **more), run("feat0", shifted(feature), **more)]


def judge(runs: Sequence[Run], judgment: Judgment = DRIFT) -> Verdict:
    found = judge_drift(judgment, runs, row)
    json.dumps(found.evidence)
    return found


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


def test_step_1_is_shown_and_not_gated() -> None:
    found = judge(three([70.0, *[0.125] * 31], [0.0, *[0.125] * 31], resolution=5e-5))
    assert found.status == "PASS" and found.statistic == pytest.approx(1)
    step = found.evidence["step_1"]
    assert step["values"] == {"base0": 4.0, "base1": 4.0, "feat0": 74.0}
    assert (step["base_delta"], step["feature_delta"], step["resolution"]) == (0.0, 70.0, 5e-5)
    assert any("step 1 is not gated" in note for note in found.notes)


def test_more_base_runs_are_pooled() -> None:
    runs = [*three(0.5), run("base2", shifted(-0.25))]
    found = judge(runs)
    drift = (0.5 + 0.375 + 0.75) / 3
    floor = (0.125 + 0.25 + 0.375) / 3
    assert found.statistic == pytest.approx(drift / floor) and found.evidence["pooled"]
    assert found.evidence["single_ratios"]["min"] == pytest.approx(1)
    assert found.evidence["single_ratios"]["max"] == pytest.approx(4)
    assert found.evidence["run_mean_t"]["df"] == 2
    assert "(one envelope)" not in judge([*three(3.0), run("base2", shifted(-0.25))]).reason


def test_pooling_features_does_not_hide_one() -> None:
    found = judge([*three(0.125), run("feat1", shifted(0.9))])
    assert found.status == "INVESTIGATE" and any("feat1 alone reads" in note for note in found.notes)


def test_every_figure_is_printed() -> None:
    found = judge(three([0.5 if at % 2 else -0.25 for at in range(32)], total=32, resolution=0.005))
    evidence = found.evidence
    assert (evidence["floor"], evidence["base_runs"], evidence["base_runs_counted"]) == ("steady", 2, 2)
    assert (evidence["steps_judged"], evidence["steps_expected"], evidence["steps"]) == (31, 31, "31 of 31")
    assert evidence["base_steps_differing"] == "31 of 31" and evidence["lag1"] is not None
    assert evidence["envelope"] == evidence["diluted_envelope"] == pytest.approx(0.125)
    balance = evidence["sign_balance"]
    assert (balance["positive"], balance["negative"], balance["zero"]) == (16, 15, 0)
    assert evidence["largest_contribution"]["value"] == pytest.approx(0.5)
    assert evidence["largest_contribution"]["share"] == pytest.approx(0.5 / (16 * 0.5 + 15 * 0.25))
    assert evidence["run_mean_t"]["df"] == 1 and 0 < evidence["run_mean_t"]["p"] < 1
    assert evidence["smallest_offset"]["absolute"] == pytest.approx(0.375)
    assert evidence["smallest_offset"]["percent"] == pytest.approx(37.5 / (sum(CURVE[1:]) / 31))
    assert evidence["ratio"] == evidence["diluted_ratio"] == found.statistic
    assert evidence["envelope_in_resolution_units"] == pytest.approx(12.5)
    assert not any("resolution" in note for note in found.notes)


def test_the_pooled_ratio_agrees_with_the_definition_on_noise() -> None:
    chance = random.Random(5)
    curves = [[value + chance.gauss(0, 0.1) for value in CURVE] for _ in range(5)]
    runs = [run(f"base{at}", curve) for at, curve in enumerate(curves[:4])] + [run("feat0", curves[4])]

    def distance(a: Sequence[float], b: Sequence[float]) -> float:
        return sum(abs(x - y) for x, y in zip(a[1:], b[1:], strict=True)) / 31

    floors = [distance(curves[a], curves[b]) for a in range(4) for b in range(a)]
    drifts = [distance(curves[a], curves[4]) for a in range(4)]
    assert judge(runs).statistic == pytest.approx((sum(drifts) / 4) / (sum(floors) / 6))


def test_a_floor_near_the_resolution_is_warned_of() -> None:
    found = judge(three(0.0002, 0.0002, resolution=5e-5))
    assert found.status == "PASS" and any("resolution" in note for note in found.notes)
    assert found.evidence["envelope_in_resolution_units"] == pytest.approx(2)


def test_one_sided_drift_is_said() -> None:
    assert any("sign balance: feat0 is below base0 on all 31" in note for note in judge(three(-0.2)).notes)


# Floors


def late(value: float, count: int) -> list[float]:
    return [0.0] * (32 - count) + [value] * count


def test_a_sparse_envelope_is_undiluted() -> None:
    found = judge(three(late(0.25, 20), late(0.125, 2)))
    drift = 20 * 0.25 / 31
    assert found.evidence["floor"] == "sparse" and found.status == "PASS"
    assert found.statistic == pytest.approx(drift / 0.125)
    assert found.evidence["diluted_ratio"] == pytest.approx(drift / (2 * 0.125 / 31)) and found.evidence["sparse"]
    assert found.evidence["envelope"] == pytest.approx(0.125)
    assert "sparse envelope: base0 and base1 differ on 2 of 31 steps" in found.notes
    assert judge(three(late(0.25, 20), late(0.125, 16))).evidence["floor"] == "steady"


def test_sparse_is_judged_per_pair() -> None:
    found = judge([*three(0.25, late(0.125, 2)), run("base2", shifted(0.5))])
    pairs = found.evidence["base_pairs"]
    assert [pair["runs"] for pair in pairs] == [["base0", "base1"], ["base0", "base2"], ["base1", "base2"]]
    assert pairs[0]["floor"] == pytest.approx(0.125) and pairs[1]["floor"] == pairs[1]["mean_abs"]
    assert found.evidence["envelope"] == pytest.approx(sum(pair["floor"] for pair in pairs) / 3)


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


def test_an_added_equal_base_run_is_not_counted() -> None:
    runs = [*three(0.5), run("base2", CURVE)]
    found = judge(runs)
    assert found.statistic == pytest.approx(4) and found.evidence["base_runs_counted"] == 2
    assert found.evidence["base_runs"] == 3 and "base2 equals base0 to the bit and is not counted" in found.notes


def test_an_equal_pair_does_not_dilute_the_floor_once_another_base_run_differs() -> None:
    found = judge([*three(0.5, 0), run("base2", shifted(0.125))])
    assert found.evidence["floor"] == "steady" and found.evidence["base_runs_counted"] == 2
    assert found.statistic == pytest.approx(4)
    assert "base1 equals base0 to the bit and is not counted" in found.notes


def test_equal_base_runs_only_are_a_zero_floor() -> None:
    found = judge([*three(0.5, 0), run("base2", CURVE)], replace(DRIFT, judge="calibrated"))
    assert (found.status, found.evidence["floor"], found.evidence["base_runs_counted"]) == ("INVESTIGATE", "zero", 2)


JUMPY = [0.9] * 16 + [12.4] + [0.9] * 15


@pytest.mark.parametrize("offset", [0.125, 0.5, 5.0])
def test_an_unstable_fixture_settles_nothing(offset: float) -> None:
    base, other, feature = three(offset)
    other = run("base1", shifted(0.125), others={"grad_norm": JUMPY})
    found = judge([base, other, feature])
    assert (found.status, found.evidence["floor"], found.evidence["cause"]) == ("INVESTIGATE", "unstable", "unstable")
    assert "unstable fixture: gradient norm of base1 jumps from 0.9 to 12.4 at step 17" in found.reason
    assert "warm-up" in found.reason and found.statistic == pytest.approx(offset / 0.125)


def test_only_a_jump_of_a_base_run_makes_the_fixture_unstable() -> None:
    base, other, _ = three(0.125)
    feature = run("feat0", shifted(0.125), others={"grad_norm": JUMPY})
    assert judge([base, other, feature]).evidence["floor"] == "steady"
    falling = run("base1", shifted(0.125), others={"gradient-norm": [50.0 / (at + 1) for at in range(32)]})
    assert judge([base, falling, feature]).status == "PASS"
    broken = run("base1", shifted(0.125), others={"grad norm": [math.nan, math.inf] * 16})
    assert judge([base, broken, feature]).status == "PASS"


def test_equal_bits_are_equal_on_an_unstable_fixture_too() -> None:
    found = judge(three(0, 0, others={"grad_norm": JUMPY}))
    assert found.status == "PASS" and any("unstable" in note for note in found.notes)


def test_a_perturbed_envelope() -> None:
    one_ulp = {"weights": "1ulp", "seed": 1}
    base, _, feature = three(0.25)
    moved = run("base1", shifted(0.125), perturb=one_ulp)
    assert judge([base, moved, feature]).evidence["floor"] == "perturbed"
    lost = judge([base, run("base1", CURVE, perturb=one_ulp), feature])
    assert lost.status == "ERROR" and "did not reach the training" in lost.reason
    printed = judge([base, run("base1", shifted(0.125), perturb=one_ulp, resolution=5e-5), feature])
    assert printed.status == "ERROR" and "full-precision" in printed.reason
    reproducible = judge([*three(0.25, 0), run("base2", shifted(0.125), perturb=one_ulp)])
    assert reproducible.evidence["floor"] == "perturbed" and reproducible.statistic == pytest.approx(2)


# Calibrated limits


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


def test_faults_and_absent_metrics() -> None:
    base, other, feature = three(0.125)
    found = judge([base, other, replace(feature, faults={"loss": "step 17 is there twice, with 3.1 and 3.2"})])
    assert found.status == "ERROR" and found.reason == "feat0: step 17 is there twice, with 3.1 and 3.2"
    assert judge([base, replace(other, faults={"*": "truncated"}), feature]).status == "ERROR"
    assert judge([base, other, replace(feature, faults={"lr": "irrelevant"})]).status == "PASS"
    found = judge([base, other, run("feat0", CURVE, metric="lr")])
    assert found.status == "ERROR" and found.reason == "loss is missing in feat0, though printed by base0, base1"
    found = judge([base, other, feature], Judgment(check="drift", metric="aux"))
    assert found.status == "ERROR" and "no run prints aux" in found.reason


def test_different_data_stop_everything() -> None:
    base, other, feature = three(0.125)
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


# Machines


def test_machines_that_differ() -> None:
    here, there = {"gpu": "H100", "torch": "2.5"}, {"gpu": "H200", "torch": "2.5"}

    def judged(offset: float, base: float = 0.125, judgment: Judgment = DRIFT) -> Verdict:
        a, b, c = three(offset, base)
        return judge([replace(a, machine=here), replace(b, machine=here), replace(c, machine=there)], judgment)

    assert judged(0.25).status == "PASS" and any("steady offset up to 0.375" in note for note in judged(0.25).notes)
    failed = judged(5.0)
    assert failed.status == "INVESTIGATE" and failed.evidence["cause"] == "machine"
    assert "re-run on the same nodes before you blame the code" in failed.reason and "gpu" in failed.reason
    assert failed.evidence["machines_differ"]["gpu"] == {"base0": "H100", "base1": "H100", "feat0": "H200"}
    assert judged(0.5).evidence["cause"] == "grey_band"
    assert judged(0.5, 0.0, replace(DRIFT, zero_envelope="fail")).status == "INVESTIGATE"


def test_an_unknown_machine_is_said() -> None:
    a, b, c = three(5.0)
    found = judge([replace(a, machine={"gpu": "H100"}), b, c])
    assert found.status == "FAIL" and any("no machine fingerprint from base1, feat0" in note for note in found.notes)


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
