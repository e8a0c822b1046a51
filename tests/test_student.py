from __future__ import annotations

import math

import pytest

from rlspec import student


@pytest.mark.parametrize(
    ("level", "df", "t"),
    [
        (0.95, 1, 12.7062047364), (0.95, 2, 4.30265272975), (0.95, 3, 3.18244630528), (0.95, 4, 2.7764451052),
        (0.95, 7, 2.36462425159), (0.95, 10, 2.22813885196), (0.99, 5, 4.03214298356), (0.5, 1, 1.0),
        (0.95, 120, 1.97993040505),
    ],
)  # fmt: skip
def test_student_t_agrees_with_the_tables(level: float, df: int, t: float) -> None:
    assert student.t_quantile(level, df) == pytest.approx(t, rel=1e-9)
    assert student.t_two_sided(-t, df) == pytest.approx(1 - level, rel=1e-9)


def test_t_at_the_ends() -> None:
    assert student.t_two_sided(0, 3) == 1 and student.t_two_sided(math.inf, 1) == 0


def test_run_mean_t_is_the_prediction_interval() -> None:
    found = student.run_mean_t([1.0, 2.0, 3.0], [5.0])
    assert found["t"] == pytest.approx(3 / math.sqrt(4 / 3)) and found["df"] == 2
    assert found["p"] == pytest.approx(student.t_two_sided(3 / math.sqrt(4 / 3), 2))
    assert student.run_mean_t([1.0, 1.0], [5.0]) == {"t": None, "df": 1, "p": None}
    assert student.run_mean_t([0.0, math.nan], [5.0])["t"] is None
