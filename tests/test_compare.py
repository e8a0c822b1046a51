from __future__ import annotations

import math
import random
import statistics
from array import array
from collections.abc import Sequence

import pytest

from rlspec import compare
from rlspec.model import Arm, Run, Series


def series(values: Sequence[float], steps: Sequence[int] | None = None, arm: str = "base0") -> Series:
    steps = range(1, len(values) + 1) if steps is None else steps
    return Series(arm=arm, metric="loss", steps=array("q", steps), values=array("d", values))


def run(arm: str, steps: Sequence[int], total: int | None = None, **more: object) -> Run:
    one = series([float(step) for step in steps], steps, arm)
    return Run(arm=Arm(name=arm, role="base"), series={"loss": one}, steps_expected=total, **more)  # type: ignore[arg-type]


def pair(a: Sequence[float], b: Sequence[float], start: int = 0) -> compare.Pair:
    one, other = series(a), series(b, arm="base1")
    return compare.pair(one, other, compare.deltas(one, other, start))


def test_deltas_over_several_chunks_are_b_minus_a() -> None:
    a, b = [float(at) for at in range(20_000)], [at * 1.5 for at in range(20_000)]
    assert list(compare.deltas(series(a), series(b), 1)) == [y - x for x, y in zip(a[1:], b[1:], strict=True)]


def test_a_pair_counts_and_averages_judged_steps_only() -> None:
    found = pair([9, 1, 2, 3], [0, 1.5, 2, 2], start=1)
    assert (found.steps, found.differing, found.sparse) == (3, 2, False)
    assert found.mean == pytest.approx(-0.5 / 3)
    assert found.floor == found.mean_abs == 0.5


def test_a_sparse_floor_is_the_mean_where_the_runs_differ() -> None:
    found = pair([1] * 10, [1] * 8 + [1.5, 0.75])
    assert found.sparse and found.mean_abs == pytest.approx(0.075) and found.floor == pytest.approx(0.375)
    assert not pair([1] * 4, [1, 1, 2, 2]).sparse  # exactly half is not fewer than half
    assert not pair([1] * 4, [1] * 4).sparse and pair([1] * 4, [1] * 4).floor == 0


def test_lag1_is_the_autocorrelation_about_the_mean() -> None:
    delta = array("d", [random.Random(1).gauss(5, 1) for _ in range(500)])
    centre = statistics.fmean(delta)
    expected = sum((a - centre) * (b - centre) for a, b in zip(delta, delta[1:], strict=False))
    expected /= sum((a - centre) ** 2 for a in delta)
    assert compare.lag1(delta) == pytest.approx(expected)
    assert compare.lag1(array("d", [1, -1] * 50)) == pytest.approx(-0.99)
    assert compare.lag1(array("d", [2, 2, 2])) is None and compare.lag1(array("d", [2])) is None


def test_sign_balance() -> None:
    found = compare.sign_balance(array("d", [1, -2, 0, 3, -0.0]))
    assert found == {"positive": 2, "negative": 1, "zero": 2, "share": 2 / 3}
    assert compare.sign_balance(array("d", [0.0]))["share"] is None


@pytest.mark.parametrize(
    ("delta", "expected"), [([1, -3, 2], (1, -3)), ([0, 3, -3], (1, 3)), ([-3, 3], (0, -3)), ([0, 0], (0, 0))]
)
def test_largest(delta: list[float], expected: tuple[int, float]) -> None:
    assert compare.largest(array("d", delta)) == expected


def test_first_non_finite_is_found_and_a_sum_that_overflows_is_none() -> None:
    assert compare.first_non_finite(series([1, math.nan, math.inf])) == 1
    assert compare.first_non_finite(series([1, -math.inf, math.inf])) == 1
    assert compare.first_non_finite(series([1e308, 1e308, 1e308])) is None


def test_mean_never_raises() -> None:
    assert compare.mean([1, 2], 2) == 1.5
    assert math.isnan(compare.mean([1e308] * 3, 3)) and math.isnan(compare.mean([math.inf, -math.inf], 2))


def test_single_value_needs_every_step_of_every_run() -> None:
    assert compare.single_value([series([1, 1, 1]), series([1, 1, 1])]) == 1
    assert compare.single_value([series([7, 1, 1]), series([8, 1, 1])]) == 1  # judged steps are what the gate sees
    assert compare.single_value([series([1, 1, 1]), series([1, 2, 1])]) is None
    assert compare.single_value([series([1, 1, 1]), series([2, 2, 2])]) is None
    assert compare.single_value([series([1, 2]), series([1, 2])]) is None


def naive_jump(values: Sequence[float]) -> int | None:
    for at in range(3, len(values)):
        if values[at] > 8 * statistics.median(values[max(0, at - 8) : at]):
            return at + 1
    return None


def test_a_jump_is_found_where_the_rule_says() -> None:
    steady = [1.0] * 20
    found = compare.find_jump(series([*steady, 8.5, 1.0]))
    assert found == compare.Jump(arm="base0", step=21, before=1.0, value=8.5)
    assert compare.find_jump(series([*steady, 8.0])) is None
    assert compare.find_jump(series([50.0, 40.0, 20.0, 5.0, 1.0, 0.1])) is None  # a high start that decays
    assert compare.find_jump(series([1.0, 1.0, 90.0, 1.0])) is None  # the third step may
    assert compare.find_jump(series([1.0, 1.0, 1.0, 90.0])) is not None
    assert compare.find_jump(series([1.0, math.nan, math.inf, math.nan, 90.0])) is not None
    assert compare.find_jump(series([math.nan] * 5)) is None


def test_the_block_filter_of_jumps_hides_none() -> None:
    chance = random.Random(3)
    for size in [*range(1, 12), 255, 256, 300, 700]:
        for spread in (0.3, 0.9, 1.5):
            values = [math.exp(chance.gauss(0, spread)) for _ in range(size)]
            found = compare.find_jump(series(values))
            assert (found.step if found else None) == naive_jump(values)


@pytest.mark.parametrize(
    ("level", "df", "t"),
    [
        (0.95, 1, 12.7062047364), (0.95, 2, 4.30265272975), (0.95, 3, 3.18244630528), (0.95, 4, 2.7764451052),
        (0.95, 7, 2.36462425159), (0.95, 10, 2.22813885196), (0.99, 5, 4.03214298356), (0.5, 1, 1.0),
        (0.95, 120, 1.97993040505),
    ],
)  # fmt: skip
def test_student_t_agrees_with_the_tables(level: float, df: int, t: float) -> None:
    assert compare.t_quantile(level, df) == pytest.approx(t, rel=1e-9)
    assert compare.t_two_sided(-t, df) == pytest.approx(1 - level, rel=1e-9)


def test_t_at_the_ends() -> None:
    assert compare.t_two_sided(0, 3) == 1 and compare.t_two_sided(math.inf, 1) == 0


def test_run_mean_t_is_the_prediction_interval() -> None:
    found = compare.run_mean_t([1.0, 2.0, 3.0], [5.0])
    assert found["t"] == pytest.approx(3 / math.sqrt(4 / 3)) and found["df"] == 2
    assert found["p"] == pytest.approx(compare.t_two_sided(3 / math.sqrt(4 / 3), 2))
    assert compare.run_mean_t([1.0, 1.0], [5.0]) == {"t": None, "df": 1, "p": None}
    assert compare.run_mean_t([0.0, math.nan], [5.0])["t"] is None


@pytest.mark.parametrize(
    ("steps", "total"),
    [
        (range(1, 33), 32), (range(1, 33), None), (range(0, 32), 32), (range(0, 33), 32), (range(5, 33), 32),
        (range(10, 41, 10), 40), (range(10, 41, 10), 45), ([1, 10, 20, 30], 32), ([1, 10, 20, 30, 32], 32),
        (range(1, 40, 10), 40), ([1], 1), ([10], 12),
    ],
)  # fmt: skip
def test_whole_step_sets(steps: Sequence[int], total: int | None) -> None:
    assert compare.findings("loss", [run("base0", steps, total), run("feat0", steps, total)]) == []


@pytest.mark.parametrize(
    ("steps", "total", "said"),
    [
        (range(1, 32), 32, "every run is missing step 32 of loss (expected T = 32, it ends at step 31)"),
        ([*range(1, 17), *range(18, 33)], 32, "every run is missing step 17 of loss (expected T = 32)"),
        ([*range(1, 17), *range(18, 33)], None, "every run is missing step 17 of loss (the runs reach step 32)"),
        (range(1, 35), 32, "every run has steps 33, 34 of loss beyond the expected T = 32"),
        (range(10, 31, 10), 40, "every run is missing step 40"),
        (range(0, 31), 32, "every run is missing step 31"),
        ([10, 20, 40, 50, 60], None, "every run is missing step 30"),
        ([10, 20, 30, 35, 40, 50, 60], None, "steps 30 and 35 are 5 apart, the others 10"),
        (range(1, 10), 10**15, "steps 10, 11, 12, 13, 14, … of loss (expected T = 1000000000000000, it ends"),
        ([*range(1, 10), 10**15], None, "steps 10, 11, 12, 13, 14, …"),
    ],
)
def test_holes_that_all_runs_share(steps: Sequence[int], total: int | None, said: str) -> None:
    (found,) = compare.findings("loss", [run("base0", steps, total), run("feat0", steps, total)])
    assert said in found


def test_the_run_that_lacks_a_step_is_named() -> None:
    whole = run("base0", range(1, 33))
    (found,) = compare.findings("loss", [whole, run("feat0", range(1, 31))])
    assert found == "feat0 is missing steps 31, 32 of loss (the runs reach step 32, it ends at step 30)"
    (found,) = compare.findings("loss", [whole, run("feat0", range(2, 33))])
    assert found.startswith("feat0 is missing step 1 of loss")
    (found,) = compare.findings("loss", [run("base0", range(1, 33), 32), run("feat0", range(1, 34), 32)])
    assert found == "feat0 has step 33 of loss beyond the expected T = 32"
    (found,) = compare.findings("loss", [run("base0", range(1, 33), 32), run("feat0", range(1, 65), 64)])
    assert found == "the runs expect different numbers of steps: base0 32, feat0 64"


def test_faults_and_absence_come_before_steps() -> None:
    whole = run("base0", range(1, 5))
    broken = run("feat0", [], faults={"loss": "step 3 is there twice"})
    assert compare.findings("loss", [whole, broken]) == ["feat0: step 3 is there twice"]
    assert compare.findings("loss", [whole, run("feat0", [1], faults={"*": "feat0 has no line"})]) == [
        "feat0 has no line"
    ]
    assert compare.findings("loss", [whole, run("feat0", [])]) == ["loss is missing in feat0, though printed by base0"]
    assert compare.findings("lr", [whole]) == ["no run prints lr; they print loss"]
    assert compare.findings("loss", [whole, whole]) == ["several runs are called base0: give each its own name"]


def test_machine_differences_ignore_what_only_one_run_knows() -> None:
    a = run("a", [1], machine={"torch": "2.5", "gpu": "H200"})
    b = run("b", [1], machine={"torch": "2.6", "gpu": "H200", "image": "x"})
    assert compare.machine_differences([a, b, run("c", [1])]) == {"torch": {"a": "2.5", "b": "2.6"}}
