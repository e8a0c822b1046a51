from __future__ import annotations

import random
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
