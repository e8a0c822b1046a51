from __future__ import annotations

from pathlib import Path

import pytest

from rlspec import contract
from rlspec.errors import SpecError

HERE = Path(__file__).parent
BASE = {"source": "s", "date": "2026-11-29", "reason": "r"}


def made(*rows):
    return contract.from_rows("c", [{**BASE, **row} for row in rows])


def test_the_most_exact_row_holds():
    rows = made(
        {"judgment": "j", "limits": {"max": 1}},
        {"judgment": "j", "dtype": "bf16", "limits": {"max": 2}},
        {"judgment": "j", "subject": "loss", "limits": {"max": 3}},
    )
    assert rows.resolve("j").limits["max"] == 1
    assert rows.resolve("j", "x", "bf16").limits["max"] == 2
    assert rows.resolve("j", "loss", "bf16").limits["max"] == 3


def test_a_missing_row_is_an_error_with_the_nearest_name():
    with pytest.raises(SpecError, match="did you mean 'approx_kl'"):
        made({"judgment": "approx_kl"}).resolve("aprox_kl")


def test_two_rows_for_one_key():
    with pytest.raises(SpecError, match="two rows"):
        made({"judgment": "j"}, {"judgment": "j"})


def test_digest_follows_the_limits():
    one, two = made({"judgment": "j", "limits": {"max": 1}}), made({"judgment": "j", "limits": {"max": 2}})
    assert one.digest != two.digest
    assert contract.from_rows("c", [{k: v for k, v in contract.plain(r).items() if k != "id"} for r in one.rows]) == one


def test_shipped_contracts():
    training = contract.load("training", HERE)
    assert training.resolve("drift", "loss").limits == {"pass_below": 3.0, "fail_above": 5.0}
    assert training.resolve("drift_calibrated_4").limits == {"pass_below": 2.65, "fail_above": 4.3}
    ws1 = contract.load("ws1", HERE)
    assert ws1.resolve("max_abs_dlogp", "*", "bf16").limits["max"] == 0.06
    assert ws1.resolve("clip_fraction", "*", "bf16").limits == {"max": 0.0, "low": 0.8, "high": 1.2}
    assert ws1.resolve("mean_abs_dlogp", "*", "bf16").status == "measured"


def test_unknown_contract():
    with pytest.raises(SpecError, match="did you mean 'training'"):
        contract.load("trainig", HERE)
