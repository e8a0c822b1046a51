from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from tests.parity_files import compared, hint, statuses, stream


def test_small_noise_passes_without_hints(tmp_path: Path) -> None:
    rng = random.Random(1)
    got = compared(tmp_path, stream(), lambda at, token: token[3] + rng.gauss(0, 0.008))
    assert statuses(got) == "PASS MEASURED PASS PASS MEASURED"
    assert all(verdict.notes == () for verdict in got.values())


def test_divided_log_probs_show_their_temperature(tmp_path: Path) -> None:
    rng = random.Random(3)
    got = compared(tmp_path, stream(), lambda at, token: token[3] / 0.7 + rng.gauss(0, 0.01))
    assert hint(got, "temperature").startswith("rollout = train / 0.6999 explains 100.0% of d")
    numbers = got["max_abs_dlogp"].evidence["hints"]["temperature"]
    assert numbers["temperature"] == pytest.approx(0.7, rel=0.01) and numbers["explained"] > 0.99
    assert not hint(got, "kept mass") and not hint(got, "shift")


@pytest.mark.parametrize("lag", [1, -1, 2])
def test_a_shift_shows_its_lag(tmp_path: Path, lag: int) -> None:
    train = stream(8, 32)
    values = [token[3] for token in train]
    got = compared(tmp_path, train, lambda at, token: values[(at + lag) % len(values)])
    assert f"at lag {lag:+d}" in hint(got, "off-by-one")
    assert not hint(got, "temperature") and not hint(got, "kept mass")


def test_a_constant_offset_shows_the_kept_mass(tmp_path: Path) -> None:
    mass = math.log(0.895)
    got = compared(tmp_path, stream(), lambda at, token: token[3] - mass)
    assert statuses(got) == "FAIL MEASURED PASS PASS MEASURED"
    told = hint(got, "kept mass")
    assert "nearly constant, -0.1109" in told and "0.895" in told and "top-p" in told and "rollout" in told
    other = compared(tmp_path, stream(), lambda at, token: token[3] + mass)
    assert "the train file looks renormalised" in hint(other, "kept mass")
    level = [(*token[:3], -2 - 0.01 * (at % 3)) for at, token in enumerate(stream())]
    alike = compared(tmp_path, level, lambda at, token: token[3] - mass)
    assert hint(alike, "kept mass") and not hint(alike, "temperature")


def test_a_varying_kept_mass_shows_one_sign(tmp_path: Path) -> None:
    rng = random.Random(4)
    got = compared(tmp_path, stream(), lambda at, token: token[3] - math.log(rng.uniform(0.8, 1.0)))
    assert hint(got, "kept mass").startswith("100.0% of d have one sign") and not hint(got, "nearly constant")


def test_an_error_that_grows_with_position_shows_its_slope(tmp_path: Path) -> None:
    rng = random.Random(5)
    got = compared(tmp_path, stream(8, 64), lambda at, token: token[3] + rng.gauss(0, 0.01) * (token[1] - 8))
    assert "KV cache" in hint(got, "grows along a sequence")
    flat = compared(tmp_path, stream(8, 64), lambda at, token: token[3] + rng.gauss(0, 0.2))
    assert flat["max_abs_dlogp"].status == "FAIL" and flat["max_abs_dlogp"].notes == ()
    rare = compared(tmp_path, stream(8, 64), lambda at, token: token[3] + 0.4 * (at in (60, 127)))
    assert rare["max_abs_dlogp"].status == "FAIL" and not hint(rare, "grows")
