from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.drift_runs import CURVE, DRIFT, JUMPY, judge, late, run, shifted, three


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


def test_the_pooled_ratio_agrees_with_the_definition_on_noise() -> None:
    chance = random.Random(5)
    curves = [[value + chance.gauss(0, 0.1) for value in CURVE] for _ in range(5)]
    runs = [run(f"base{at}", curve) for at, curve in enumerate(curves[:4])] + [run("feat0", curves[4])]

    def distance(a: Sequence[float], b: Sequence[float]) -> float:
        return sum(abs(x - y) for x, y in zip(a[1:], b[1:], strict=True)) / 31

    floors = [distance(curves[a], curves[b]) for a in range(4) for b in range(a)]
    drifts = [distance(curves[a], curves[4]) for a in range(4)]
    assert judge(runs).statistic == pytest.approx((sum(drifts) / 4) / (sum(floors) / 6))


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


def test_only_a_jump_of_a_base_run_makes_the_fixture_unstable() -> None:
    base, other, _ = three(0.125)
    feature = run("feat0", shifted(-0.125), others={"grad_norm": JUMPY})
    assert judge([base, other, feature]).evidence["floor"] == "steady"
    falling = run("base1", shifted(0.125), others={"gradient-norm": [50.0 / (at + 1) for at in range(32)]})
    assert judge([base, falling, feature]).status == "PASS"
    broken = run("base1", shifted(0.125), others={"grad norm": [math.nan, math.inf] * 16})
    assert judge([base, broken, feature]).status == "PASS"


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
