from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from tests.parity_files import Token, compared, hint, statuses, stream


def test_small_noise_passes_without_hints(tmp_path: Path) -> None:
    rng = random.Random(1)
    got = compared(tmp_path, stream(), lambda at, token: token[3] + rng.gauss(0, 0.008))
    assert statuses(got) == "PASS MEASURED PASS PASS MEASURED"
    assert all(verdict.notes == () for verdict in got.values())


def test_divided_log_probs_are_told_as_such(tmp_path: Path) -> None:
    rng = random.Random(3)
    got = compared(tmp_path, stream(), lambda at, token: token[3] / 0.7 + rng.gauss(0, 0.01))
    assert hint(got, "were divided by 0.6999").startswith("rollout = train / 0.6999 explains 100.0% of d")
    numbers = got["max_abs_dlogp"].evidence["hints"]["divided"]
    assert numbers["divisor"] == pytest.approx(0.7, rel=0.01) and numbers["explained"] > 0.99
    assert not hint(got, "kept mass") and not hint(got, "shift") and not hint(got, "another scale")


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


@pytest.mark.parametrize(("temperature", "where"), [(0.5, "below"), (0.9, "below"), (1.3, "above")])
def test_a_sampler_at_another_temperature_is_told_roughly(tmp_path: Path, temperature: float, where: str) -> None:
    sharp, raw = drawn(320, 0.5, temperature), drawn(320, 0.5, 1.0)
    got = compared(tmp_path, raw, lambda at, token: sharp[at][3])
    assert f"a temperature of the rollout {where} train's" in hint(got, "d follows the log-prob")
    assert not hint(got, "divided") and not hint(got, "kept mass")


def drawn(count: int, scale: float, temperature: float) -> list[Token]:
    """Tokens of a sampler at `temperature` 1, and log_softmax(logits / temperature) of each."""
    rng, found = random.Random(8), []
    for at in range(count):
        logits = [rng.gauss(0, 1 + scale * (at % 5)) for _ in range(50)]
        token = rng.choices(range(50), [math.exp(value) for value in logits])[0]
        total = math.log(math.fsum(math.exp(value / temperature) for value in logits))
        found.append((f"s{at // 16}", at % 16, token, logits[token] / temperature - total))
    return found


def test_what_explains_d_and_not_the_rollout_is_no_cause(tmp_path: Path) -> None:
    rng, level = random.Random(9), [(*token[:3], -4.0 + 0.1 * math.sin(at)) for at, token in enumerate(stream())]
    got = compared(tmp_path, level, lambda at, token: -1.0 - rng.random() / 100)
    assert got["max_abs_dlogp"].status == "FAIL" and not hint(got, "divided") and not hint(got, "follows")
    rare = compared(tmp_path, stream(), lambda at, token: token[3] - 0.5 * (at == 7) * token[3])
    assert rare["max_abs_dlogp"].status == "FAIL" and rare["max_abs_dlogp"].notes == ()
    far = [(*token[:3], -60.0) if at == 7 else token for at, token in enumerate(stream())]
    for other in (lambda at, token: token[3] + rng.gauss(10 * (at == 7), 0.01), lambda at, token: -3 - rng.random()):
        got = compared(tmp_path, far, other)
        assert not hint(got, "divided") and not hint(got, "follows")


def test_correlations_are_at_most_1(tmp_path: Path) -> None:
    train = [(*token[:3], -9.0 + (at % 40 not in (0, 39)) * 8 * math.sin(at)) for at, token in enumerate(stream(2, 40))]
    got = compared(tmp_path, train, lambda at, token: train[(at + 1) % len(train)][3])
    found = got["max_abs_dlogp"].evidence["hints"]["shift"]["correlation_by_lag"]
    assert found["+1"] == pytest.approx(1) and len(found) == 5 and all(-1 <= value <= 1 for value in found.values())


def test_what_no_rounding_does_is_no_pass_within_every_limit(tmp_path: Path) -> None:
    rng = random.Random(10)
    kept = compared(tmp_path, stream(), lambda at, token: token[3] + 0.05 + rng.gauss(0, 0.001))
    assert statuses(kept) == "INVESTIGATE MEASURED INVESTIGATE INVESTIGATE MEASURED"
    assert "d is nearly constant, -0.04986" in kept["approx_kl"].reason and kept["max_abs_dlogp"].notes == ()
    divided = compared(tmp_path, stream(), lambda at, token: token[3] / 1.002)
    assert "divided by 1.002" in divided["approx_kl"].reason and divided["approx_kl"].status == "INVESTIGATE"
    flat = [(*token[:3], -1 - 0.02 * rng.random()) for token in stream()]
    shifted = compared(tmp_path, flat, lambda at, token: flat[(at + 1) % len(flat)][3])
    assert "as by an off-by-one" in shifted["max_abs_dlogp"].reason
    few = compared(tmp_path, stream()[:8], lambda at, token: token[3] - 0.001)
    tiny = compared(tmp_path, stream(), lambda at, token: token[3] - 1e-6)
    one_prompt = [(*token[:3], -1.0 - token[1]) for token in stream(32, 2)]
    repeated = compared(tmp_path, one_prompt, lambda at, token: token[3] - 0.01)
    for honest in (few, tiny, repeated):
        assert statuses(honest) == "PASS MEASURED PASS PASS MEASURED" and honest["max_abs_dlogp"].notes == ()


def test_one_sign_throughout_is_told_beside_a_pass(tmp_path: Path) -> None:
    rng = random.Random(4)
    got = compared(tmp_path, stream(), lambda at, token: token[3] - math.log(rng.uniform(0.95, 1.0)))
    assert statuses(got) == "PASS MEASURED PASS PASS MEASURED"
    assert hint(got, "kept mass").startswith("100.0% of d have one sign")
