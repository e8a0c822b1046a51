from __future__ import annotations

import math
import random
import statistics
from array import array
from collections.abc import Sequence

import pytest

from rlspec import compare
from rlspec.model import Series


def series(values: Sequence[float], steps: Sequence[int] | None = None, arm: str = "base0") -> Series:
    steps = range(1, len(values) + 1) if steps is None else steps
    return Series(arm=arm, metric="loss", steps=array("q", steps), values=array("d", values))


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


def test_tenths_of_the_judged_steps() -> None:
    found = pair([0] * 25, [1, -3] + [0] * 21 + [2, -5], start=0)
    assert compare.cuts(25) == [0, 2, 5, 7, 10, 12, 15, 17, 20, 22, 25] and compare.cuts(3) == [0, 1, 2, 3]
    assert found.peaks == [3, *[0] * 8, 5] and found.tenths == [2, *[0] * 8, pytest.approx(7 / 3)]
    assert found.tenth_floors == found.tenths, "two of three steps differ"
    assert pair([0] * 30, [0] * 28 + [0, 6]).tenth_floors[-1] == 6, "one of three"


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
