from __future__ import annotations

import math
from pathlib import Path

import pytest

from rlspec.dlogp_statistics import approx_kl, outside
from tests.parity_files import STRICT, compared, stream


def test_the_direction_is_train_minus_rollout(tmp_path: Path) -> None:
    down = compared(tmp_path, stream(), lambda at, token: token[3] + 0.2)
    up = compared(tmp_path, stream(), lambda at, token: token[3] - 0.2)
    assert down["max_abs_dlogp"].evidence["mean_dlogp"] == pytest.approx(-0.2)
    assert up["max_abs_dlogp"].evidence["mean_dlogp"] == pytest.approx(0.2)
    # exp(-0.2) lies in [0.8, 1.2], exp(0.2) does not
    assert (down["clip_fraction"].statistic, up["clip_fraction"].statistic) == (0.0, 1.0)


def test_approx_kl_keeps_small_numbers() -> None:
    assert approx_kl([1e-6, -1e-6]) == pytest.approx(5e-13, rel=1e-3)
    assert approx_kl([1e-8]) == pytest.approx(5e-17, rel=0.05, abs=0)
    assert approx_kl([1000.0]) == math.inf
    assert outside([math.nan, 0.0], 0.8, 1.2) == 1


def test_broken_sequences_are_counted_and_named(tmp_path: Path) -> None:
    got = compared(tmp_path, stream(), lambda at, token: token[3] - 0.5 * (token[0] in ("s3", "s7") and at % 2))
    outliers = got["sequence_outliers"]
    assert (outliers.status, outliers.statistic, outliers.evidence["outliers"]) == ("MEASURED", 2.0, ["s3", "s7"])
    assert outliers.reason.endswith("of 16 sequences: s3, s7")
    strict = compared(tmp_path, stream(), lambda at, token: token[3] - 0.5 * (token[0] == "s3"), STRICT)
    assert strict["sequence_outliers"].status == "FAIL"


def test_a_sequence_just_above_the_row_is_an_outlier(tmp_path: Path) -> None:
    got = compared(tmp_path, stream(), lambda at, token: token[3] - {"s3": 0.061, "s4": 0.059}.get(token[0], 0.0))
    assert got["sequence_outliers"].evidence["outliers"] == ["s3"]


def test_more_outliers_than_named_are_counted(tmp_path: Path) -> None:
    got = compared(tmp_path, stream(), lambda at, token: token[3] - 0.5)
    assert got["sequence_outliers"].statistic == 16.0
    assert got["sequence_outliers"].reason.endswith("s8, s9 and 6 more")
