from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from rlspec.drift import wants_base_run
from rlspec.model import Run, Verdict
from tests.drift_runs import CURVE, DRIFT, judge, run, shifted


def noisy(seed: int, by: Sequence[float] | float = 0.0, steps: int = 401, scale: float = 0.001) -> list[float]:
    chance = random.Random(seed)
    return shifted(by, [2.0 + chance.gauss(0, scale) for _ in range(steps)])


def judged(feature: Sequence[float], *bases: Sequence[float]) -> Verdict:
    return judge([*(run(f"base{at}", values) for at, values in enumerate(bases)), run("feat0", feature)])


# Base runs of two kinds


@pytest.mark.parametrize("alike", [2, 4])
def test_one_odd_base_run_does_not_widen_the_floor_unseen(alike: int) -> None:
    bases = [*(noisy(at) for at in range(alike)), noisy(8, 0.2)]
    between, like_it = judged(noisy(9, 0.1), *bases), judged(noisy(9, 0.2), *bases)
    for found in (between, like_it):
        assert found.statistic is not None and found.statistic < 3
        assert (found.status, found.evidence["cause"]) == ("INVESTIGATE", "split_bases")
        assert f"of two kinds: base{alike}, and base0" in found.reason and wants_base_run(DRIFT, found, 3)
    honest = judged(noisy(9), *bases)
    assert honest.status == "PASS" and any("of two kinds" in note for note in honest.notes)


def test_a_stack_that_goes_one_of_two_ways() -> None:
    bases = [noisy(1), noisy(2), noisy(3, 0.2), noisy(4, 0.2)]
    assert [judged(noisy(9, by), *bases).status for by in (0.0, 0.1, 0.2)] == ["PASS", "INVESTIGATE", "PASS"]


def test_base_runs_that_are_perturbed_are_apart_on_purpose() -> None:
    moved = {"weights": "1ulp", "seed": 1}
    runs = [run(f"base{at}", noisy(at, 0.2 * (at == 2)), perturb=moved if at == 2 else None) for at in range(3)]
    assert judge([*runs, run("feat0", noisy(9, 0.1))]).status == "PASS"
    runs = [run(f"base{at}", noisy(at, 0.2 * (at == 2)), perturb=moved if at else None) for at in range(3)]
    assert judge([*runs, run("feat0", noisy(9, 0.1))]).evidence["cause"] == "split_bases"


# Few steps far off


@pytest.mark.parametrize(
    ("steps", "off", "cause", "said"),
    [
        (401, {200: 0.5}, "spike", "feat0 differs by 0.5 at step 201, and base runs by 0.00"),
        (401, dict.fromkeys(range(380, 401), 0.025), "spike", "at step 3"),
        (401, dict.fromkeys(range(361, 401), 0.009), "late", "on steps 362 to 401, and base runs by 0.00"),
        (32, {30: 0.025, 31: 0.025}, "late", "on steps 29 to 32"),
    ],
)
def test_a_mean_does_not_hide_a_few_steps(steps: int, off: dict[int, float], cause: str, said: str) -> None:
    bases = noisy(1, steps=steps), noisy(2, steps=steps)
    found = judged(noisy(3, [off.get(at, 0.0) for at in range(steps)], steps=steps), *bases)
    assert found.statistic is not None and found.statistic < 3
    assert (found.status, found.evidence["cause"]) == ("INVESTIGATE", cause) and said in found.reason
    assert wants_base_run(DRIFT, found, 2)
    assert judged(noisy(3, steps=steps), *bases).status == "PASS"


def test_what_base_runs_do_too_is_no_spike() -> None:
    bases = noisy(1), noisy(2, [0.4 * (at == 99) for at in range(401)])
    assert judged(noisy(3, [0.9 * (at == 200) for at in range(401)]), *bases).status == "PASS"
    tail = [0.05 * (at > 360) for at in range(401)]
    assert judged(noisy(3, tail), noisy(1), noisy(2, [-value for value in tail])).status == "PASS"


def test_of_pooled_features_the_worst_counts() -> None:
    spike = noisy(4, [0.5 * (at == 200) for at in range(401)])
    for features in ((noisy(3), spike), (spike, noisy(3))):
        runs = [
            *(run(f"base{at}", noisy(at)) for at in range(2)),
            *(run(f"feat{at}", v) for at, v in enumerate(features)),
        ]
        assert judge(runs).evidence["cause"] == "spike"


def walk(chance: random.Random) -> list[float]:
    values = [0.0]
    while len(values) < 32:
        values.append(values[-1] + chance.gauss(0, 1))
    return values


@pytest.mark.parametrize(
    "honest",
    [
        lambda chance: [chance.gauss(0, 1) for _ in range(32)],
        lambda chance: [chance.gauss(0, 1) / max(chance.random(), 0.01) ** 0.33 for _ in range(32)],
        walk,
    ],
    ids=["white", "heavy", "walk"],
)
@pytest.mark.parametrize("bases", [2, 3])
def test_runs_of_one_code_are_rarely_doubted(honest: Callable[[random.Random], list[float]], bases: int) -> None:
    chance, doubted, many = random.Random(11), 0, 60
    for _ in range(many):
        found = judged(shifted(honest(chance)), *(shifted(honest(chance)) for _ in range(bases)))
        doubted += found.evidence["cause"] in ("split_bases", "spike", "late", "resolution")
    assert doubted <= many // 50


# Digits


def printed(name: str, values: Sequence[float], digits: int | None) -> Run:
    if digits is None:
        return run(name, values)
    return run(name, [round(value, digits) for value in values], resolution=0.5 * 10**-digits)


def with_digits(base: int | None, feature: int | None, by: float, scale: float = 0.001, **more: str) -> Verdict:
    runs = [printed(f"base{at}", noisy(at, scale=scale), base) for at in range(2)]
    return judge([*runs, printed("feat0", noisy(9, by, scale=scale), feature)], replace(DRIFT, **more))


def test_digits_that_are_too_coarse_for_the_floor() -> None:
    assert [with_digits(4, digits, 0.04).status for digits in (4, None, 1, 0)] == ["FAIL", "FAIL", *["INVESTIGATE"] * 2]
    found = with_digits(4, 1, 0.04)
    assert found.statistic is not None and found.statistic < 3 and found.evidence["cause"] == "resolution"
    assert "base0 is printed to 0.0001 and feat0 printed to 0.1, too coarse for a floor of 0.00" in found.reason
    assert found.evidence["caught_offset"]["absolute"] is None and not wants_base_run(DRIFT, found, 2)
    assert with_digits(1, 4, 0.0).status == with_digits(None, 4, 0.0, 1e-6).status == "INVESTIGATE"
    assert with_digits(4, 1, 0.4).status == with_digits(None, 4, 1.0, 1e-6).status == "FAIL", "beyond all rounding"
    assert with_digits(None, 4, 0.0).status == "PASS", "finer than the floor"


def test_digits_and_base_runs_that_are_equal_as_printed() -> None:
    runs = [run("base0", CURVE), run("base1", CURVE), printed("feat0", shifted(1e-3), 1)]
    found = judge(runs, replace(DRIFT, zero_envelope="fail"))
    assert (found.status, found.evidence["cause"]) == ("INVESTIGATE", "resolution")
    runs[2] = printed("feat0", shifted(0.5), 1)
    assert judge(runs, replace(DRIFT, zero_envelope="fail")).status == "FAIL"


@pytest.mark.parametrize(
    ("top", "higher", "resolution", "coarser"), [(9.9, 10.2, 0.0005, 0.005), (1.9, 2.1, 2.0**-25, 2.0**-24)]
)
def test_as_many_significant_digits_are_the_same(top: float, higher: float, resolution: float, coarser: float) -> None:
    """Of four significant digits, and of float32, the unit goes with the largest value."""
    curve = [top, *CURVE[1:]] if top > 4 else [top, *[1.0] * 31]
    base, other, feature = (shifted(by * resolution, curve) for by in (0.0, 1.0, -2.0))
    runs = [run(f"base{at}", values, resolution=resolution) for at, values in enumerate((base, other))]
    higher_first = [higher, *feature[1:]]
    assert judge([*runs, run("feat0", higher_first, resolution=coarser)]).evidence["cause"] == "ratio"
    assert judge([*runs, run("feat0", feature, resolution=coarser)]).evidence["cause"] == "resolution"
