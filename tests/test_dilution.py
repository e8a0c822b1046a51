from __future__ import annotations

import math
import random
import struct
from pathlib import Path

import pytest

from rlspec.model import Verdict
from tests.parity_files import ROWS, Token, compared, hint, row, statuses, stream

GATED = {**ROWS, "mean_abs_dlogp": row("mean_abs_dlogp", max=0.01)}


def judged(folder: Path, train: list[Token], silent: set[int]) -> dict[str, Verdict]:
    """Noise of 0.02 on all tokens but those at `silent`, whose log-probs are those of train."""
    rng = random.Random(1)
    noise = [0.02 * rng.choice((-1, 1)) for _ in train]
    return compared(folder, train, lambda at, token: token[3] + noise[at] * (at not in silent), GATED)


def padded(pads: int, value: float = 0.0, left: bool = False) -> tuple[list[Token], set[int]]:
    """16 samples of 8 tokens, and as many pads at one end of each as are asked for."""
    train: list[Token] = []
    for name in range(16):
        real = [token for token in stream(16, 8) if token[0] == f"s{name}"]
        filled = [(f"s{name}", 100 * (not left) + at, 0, value) for at in range(pads)]
        train += [*filled, *((one, at + 200, *rest) for one, at, *rest in real)] if left else [*real, *filled]
    return train, {at for at, token in enumerate(train) if token[3] == value}


@pytest.mark.parametrize(
    ("pads", "value", "left"), [(40, 0.0, False), (9, 0.0, True), (2, 0.0, False), (9, -11.5, False)]
)
def test_padding_does_not_thin_out_a_mean(tmp_path: Path, pads: int, value: float, left: bool) -> None:
    got = judged(tmp_path, *padded(pads, value, left))
    assert got["mean_abs_dlogp"].status == ("FAIL" if pads == 2 else "INVESTIGATE")
    told = f"{16 * pads} of {16 * (8 + pads)} tokens look like padding"
    assert pads == 2 or f"{told} or masked, and without them" in got["mean_abs_dlogp"].reason
    assert f"{told}, and without them the means are {1 + pads / 8:.3g} times" in hint(got, "leave padding out")
    assert f"16 of 16 samples: s0 ({pads}), s1 ({pads})" in hint(got, "leave padding out")
    others = ("max_abs_dlogp", "clip_fraction", "approx_kl")  # far within their limits without the padding, too
    assert {got[name].status for name in others} == {"PASS"}


def test_sure_tokens_are_no_padding(tmp_path: Path) -> None:
    train, rng = stream(), random.Random(3)
    few = set(rng.sample(range(len(train)), 12)) | {14, 15}
    got = judged(tmp_path, [(*t[:3], 0.0) if at in few else t for at, t in enumerate(train)], few)
    assert statuses(got).startswith("PASS FAIL PASS") and got["max_abs_dlogp"].notes == ()
    loop = {at for at in range(len(train)) if at % 16 > 4}
    got = judged(tmp_path, [(*t[:2], 7, t[3]) if at in loop else t for at, t in enumerate(train)], loop)
    assert statuses(got).startswith("PASS PASS PASS")  # one token id, and never the same log-prob
    greedy = {at for at in range(len(train)) if at % 16 > 4}
    got = judged(tmp_path, [(*t[:3], 0.0) if at in greedy else t for at, t in enumerate(train)], greedy)
    assert got["mean_abs_dlogp"].status == "INVESTIGATE"  # 0.0063 of 0.01, and no log-prob is nearly 0
    assert "176 of 256 tokens have log-prob 0 on both sides, as masked" in hint(got, "the means are 3.2 times as large")
    sure = [(*t[:3], -1e-6 * (at % 8 == 0)) if at in greedy else t for at, t in enumerate(train)]
    got = judged(tmp_path, sure, greedy)
    assert statuses(got).startswith("PASS PASS PASS") and "as sure and as masked" in hint(got, "on both sides")


def fp32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


def of_margin(margin: float, digits: int) -> float:
    """-log(1 + exp(-margin)), where fp32 has the sum, at so many decimals."""
    return round(-math.log(fp32(1 + math.exp(-margin))), digits)


def policy(margins: list[float], digits: int = 9) -> list[Token]:
    return [(f"s{at // 64}", at % 64, 1000 + at, of_margin(margin, digits)) for at, margin in enumerate(margins)]


@pytest.mark.parametrize("value", [-100.0, -1.0, -0.005, -3.4028234663852886e38, -(2.0**-23)])
def test_a_fill_value_is_told_by_its_frequency(tmp_path: Path, value: float) -> None:
    rng = random.Random(4)
    train = stream(16, 32)
    filled = {at for at in range(len(train)) if rng.random() < 0.7}
    got = judged(tmp_path, [(*t[:3], value) if at in filled else t for at, t in enumerate(train)], filled)
    assert statuses(got).startswith("PASS INVESTIGATE PASS")
    assert f"{len(filled)} of 512 tokens look like padding or masked" in got["mean_abs_dlogp"].reason
    assert f"tokens have log-prob {value:g} on both sides, as masked" in hint(got, "on both sides")


def test_the_masked_prompt_of_a_group_of_samples_is_told(tmp_path: Path) -> None:
    train = [(*t[:2], t[1], -1.0) if t[1] < 14 else t for t in stream()]  # six tokens, the same in 16 samples
    got = judged(tmp_path, train, {at for at, token in enumerate(train) if token[3] == -1})
    assert got["mean_abs_dlogp"].status == "FAIL" and "96 of 256 tokens have log-prob -1" in hint(got, "as masked")


@pytest.mark.parametrize("value", [0.0, -100.0])
def test_masked_tokens_do_not_hide_what_no_rounding_gives(tmp_path: Path, value: float) -> None:
    rng = random.Random(4)
    train = [(*t[:3], value) if rng.random() < 0.6 else t for t in stream(16, 32)]
    got = compared(tmp_path, train, lambda at, token: token[3] + 0.02 * (token[3] != value))  # 0.98 of the mass is kept
    assert got["max_abs_dlogp"].status == got["approx_kl"].status == "INVESTIGATE"
    assert "d is nearly constant, -0.02" in got["approx_kl"].reason


def test_values_that_are_frequent_for_other_reasons_are_no_fill(tmp_path: Path) -> None:
    train = [(f"s{at // 8}", at % 8, at % 8, -1.0 - at % 8) for at in range(256)]  # one sample, over and over
    assert not hint(judged(tmp_path, train, {at for at in range(256) if at % 8 == 3}), "on both sides")
    margins = [random.Random(at).uniform(0, 9) for at in range(1024)]
    train = policy(margins, 1)  # a tenth of all are -0.1, more of them 0, and fewer -0.2
    assert sum(token[3] == -0.1 for token in train) > 1024 / 11
    assert "log-prob -0.1" not in hint(judged(tmp_path, train, set(range(0, 1024, 2))), "on both sides")


@pytest.mark.parametrize(("sure", "width", "digits"), [(10, 7, 9), (20, 6, 9), (5, 5, 9), (10, 7, 3)])
@pytest.mark.parametrize("masked", [False, True])
def test_zeros_are_masked_where_sure_tokens_do_not_explain_them(
    tmp_path: Path, sure: float, width: float, digits: int, masked: bool
) -> None:
    """Policies whose tokens lead by `sure` nats in the mean: up to three quarters of their log-probs are 0."""
    rng = random.Random(5)
    train = policy([rng.gauss(sure, width) for _ in range(1024)], digits)
    out = {at for at in range(1024) if masked and rng.random() < 0.8}
    train = [(*token[:3], 0.0) if at in out else token for at, token in enumerate(train)]
    still = {at for at, token in enumerate(train) if token[3] > -1e-3}
    noise = 0.009 * 1024 / (1024 - len(still))
    wide = {check: row(check, max=1.0) for check in ("max_abs_dlogp", "clip_fraction")}
    got = compared(
        tmp_path, train, lambda at, token: token[3] - noise * (-1) ** at * (at not in still), {**GATED, **wide}
    )
    assert got["mean_abs_dlogp"].status == ("INVESTIGATE" if masked else "PASS")


def test_the_end_of_one_sample_counts_where_it_moves_a_mean(tmp_path: Path) -> None:
    for sequences, count in ((2, 1), (16, 0)):
        train = stream(sequences, 16)
        end = set(range(len(train) - 4, len(train)))
        got = judged(tmp_path, [(*t[:2], 9, 0.0) if at in end else t for at, t in enumerate(train)], end)
        assert sum("look like padding" in note for note in got["max_abs_dlogp"].notes) == count


def test_a_file_of_nothing_else_is_no_pass(tmp_path: Path) -> None:
    train = [(*token[:2], 7, -1.0 - int(token[0][1:])) for token in stream()]
    got = judged(tmp_path, train, set(range(len(train))))
    assert got["approx_kl"].status == "ERROR" and "one token id with one log-prob" in got["approx_kl"].reason
