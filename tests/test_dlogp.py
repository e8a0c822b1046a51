from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rlspec import dlogp
from rlspec.errors import SpecError
from rlspec.model import Row, RowStatus
from tests.parity_files import ROWS, STRICT, Token, compared, files, hint, judged, lines, row, statuses, stream


def test_the_aggregates_by_hand(tmp_path: Path) -> None:
    train = [("a", 0, 1, -1.0), ("a", 1, 2, -2.0), ("b", 0, 3, -3.0), ("b", 1, 4, -4.0)]
    shifts = [0.25, -0.25, 0.0, 0.01]  # d = train - rollout
    got = compared(tmp_path, train, lambda at, token: token[3] - shifts[at])
    assert statuses(got) == "FAIL MEASURED PASS FAIL MEASURED"
    want = sum(math.exp(d) - 1 - d for d in shifts) / 4
    assert got["max_abs_dlogp"].statistic == 0.25
    assert got["mean_abs_dlogp"].statistic == pytest.approx(0.51 / 4)
    assert got["approx_kl"].statistic == pytest.approx(want)
    assert got["clip_fraction"].statistic == 0.5
    assert got["sequence_outliers"].statistic == 1.0
    worst = got["max_abs_dlogp"].evidence["worst_token"]
    assert worst == {"sample": "a", "position": 0, "token": 1, "rollout": -1.25, "train": -1.0, "dlogp": 0.25}
    evidence = got["approx_kl"].evidence
    assert (evidence["tokens"], evidence["sequences"], evidence["positive_share"]) == (4, 2, 0.5)
    assert evidence["mean_dlogp"] == pytest.approx(0.0025)
    assert evidence["percentiles"] == {"50": pytest.approx(0.01), "99": 0.25, "99.9": 0.25}
    assert [one["sample"] for one in evidence["worst_sequences"]] == ["a", "b"]
    assert all(verdict.row is ROWS[check] and verdict.subject == "logprob" for check, verdict in got.items())


def test_equal_numbers_in_two_files_pass(tmp_path: Path) -> None:
    got = compared(tmp_path, stream(), lambda at, token: token[3])
    assert statuses(got) == "PASS MEASURED PASS PASS MEASURED"
    assert all(verdict.statistic == 0.0 for verdict in got.values())


def test_a_copy_of_a_file_is_never_a_pass(tmp_path: Path) -> None:
    text = lines(stream(), engine="one", weights="a")
    got = judged(*files(tmp_path, text, text))
    assert statuses(got) == " ".join(["ERROR"] * 5)
    assert all(
        "self-comparison" in verdict.reason and "rollout.jsonl to the byte" in verdict.reason
        for verdict in got.values()
    )


@pytest.mark.parametrize("touched", ["\n{}", "{}\n\n", "crlf", "reordered"])
def test_a_copy_whose_bytes_were_touched_is_one_all_the_same(tmp_path: Path, touched: str) -> None:
    text = lines(stream(), engine="one", weights="a")
    turned = "\n".join(text.splitlines()[::-1]) + "\n"
    copy = {"crlf": text.replace("\n", "\r\n"), "reordered": turned}.get(touched) or touched.format(text)
    got = judged(*files(tmp_path, text, copy))
    assert statuses(got) == " ".join(["ERROR"] * 5)
    assert all("self-comparison" in verdict.reason and "engine one" in verdict.reason for verdict in got.values())
    other = copy.replace('"one"', '"two"')
    assert statuses(judged(*files(tmp_path, text, other))).startswith("PASS")  # engines may agree to the bit


@pytest.mark.parametrize("named", ["none", "one", "both"])
def test_equal_log_probs_without_two_engines_may_be_a_copy(tmp_path: Path, named: str) -> None:
    train = stream()
    columns = ("position", "token", "logprob")
    whole = ""  # the same values, a line a sample
    for name in dict.fromkeys(token[0] for token in train):
        own = zip(*[token[1:] for token in train if token[0] == name], strict=True)
        whole += json.dumps({"sample": name, **dict(zip(columns, map(list, own), strict=True))}) + "\n"
    told = {} if named == "none" else {"engine": "one"}
    theirs = whole.replace("}", ', "engine": "two"}') if named == "both" else whole
    got = judged(*files(tmp_path, lines(train, **told), theirs))
    assert statuses(got).startswith("PASS")
    assert bool(hint(got, "train.jsonl is that of rollout.jsonl, and no two engines")) == (named != "both")


@pytest.mark.parametrize(
    ("how", "rounded"),
    [
        ("3 decimals", lambda value: round(value, 3)),
        ("bf16", lambda value: float(torch.tensor(value).bfloat16())),
        ("fp16", lambda value: float(torch.tensor(value).half())),
    ],
)
def test_the_other_file_rounded_may_be_a_copy(tmp_path: Path, how: str, rounded: Callable[[float], float]) -> None:
    got = compared(tmp_path, stream(), lambda at, token: rounded(token[3]))
    assert statuses(got).startswith("PASS") and hint(got, f"that of train.jsonl rounded to {how}: is it a copy")
    got = compared(tmp_path, stream(), lambda at, token: rounded(token[3] - 0.001 * (at % 2)))
    assert not hint(got, "a copy")  # of another engine, with few digits


def test_the_order_of_lines_does_not_matter(tmp_path: Path) -> None:
    rng = random.Random(2)
    train = stream()
    rollout = [(*token[:3], token[3] - rng.random() * 0.3) for token in train]
    straight = judged(*files(tmp_path, lines(rollout), lines(train)))
    mixed = judged(*files(tmp_path, lines(rollout), lines(rng.sample(train, len(train)))))
    back = judged(*files(tmp_path, lines(rollout[::-1]), lines(train)))
    for check in dlogp.STANDARD:
        assert straight[check].statistic == mixed[check].statistic == back[check].statistic
    assert straight["max_abs_dlogp"].reason == mixed["max_abs_dlogp"].reason == back["max_abs_dlogp"].reason


def test_percentiles_are_nearest_ranks(tmp_path: Path) -> None:
    train = [("a", at, at, -1000.0 - at) for at in range(1, 1001)]
    got = compared(tmp_path, train, lambda at, token: token[3] - token[1])
    assert got["max_abs_dlogp"].evidence["percentiles"] == {"50": 500.0, "99": 990.0, "99.9": 999.0}


def test_a_limit_itself_is_within_and_the_next_number_is_not(tmp_path: Path) -> None:
    train = [("a", 0, 1, -1.0)]
    at = {**ROWS, "max_abs_dlogp": row("max_abs_dlogp", max=0.25)}
    assert compared(tmp_path, train, lambda _, token: -1.25, at)["max_abs_dlogp"].status == "PASS"
    over = compared(tmp_path, train, lambda _, token: -1.25 - 1e-15, at)["max_abs_dlogp"]
    assert over.status == "FAIL" and "0.25000000000000" in over.reason
    nothing = {**ROWS, "max_abs_dlogp": row("max_abs_dlogp", max=math.nan)}
    assert compared(tmp_path, train, lambda _, token: -1.0, nothing)["max_abs_dlogp"].status == "FAIL"


def test_huge_differences_fail_without_a_traceback(tmp_path: Path) -> None:
    for far in (-800.0, -3.4e38, -1e307):
        rollout = [(*token[:3], far * (1 + at % 2 / 100)) for at, token in enumerate(stream())]
        got = judged(*files(tmp_path, lines(rollout), lines(stream())), STRICT)
        assert statuses(got) == "FAIL FAIL FAIL FAIL FAIL"
        assert got["approx_kl"].statistic == math.inf
    both = [(*token[:3], -1e307 - at * 1e300) for at, token in enumerate(stream())]
    assert statuses(compared(tmp_path, both, lambda at, token: -0.1 - at / 1e4, STRICT)) == "FAIL FAIL FAIL FAIL FAIL"


@pytest.mark.parametrize("status", ["not_applicable", "out_of_scope"])
def test_a_row_that_does_not_apply_gives_its_reason(tmp_path: Path, status: RowStatus) -> None:
    rows = {**ROWS, "approx_kl": row("approx_kl", status)}
    got = compared(tmp_path, stream(), lambda at, token: token[3], rows)["approx_kl"]
    assert (got.status, got.reason) == ("N/A", "because of the test")


def test_an_optional_row_is_judged(tmp_path: Path) -> None:
    rows = {**ROWS, "approx_kl": row("approx_kl", "optional", max=1e-9)}
    assert compared(tmp_path, stream(), lambda at, token: token[3] - 0.01, rows)["approx_kl"].status == "FAIL"


def test_a_measured_value_that_is_not_finite_fails(tmp_path: Path) -> None:
    rows = {**ROWS, "approx_kl": row("approx_kl", "measured")}
    assert compared(tmp_path, stream(), lambda at, token: -900.0 - at, rows)["approx_kl"].status == "FAIL"


@pytest.mark.parametrize(
    ("check", "rows", "words"),
    [
        ("aprox_kl", ROWS, "unknown judgment 'aprox_kl'; did you mean approx_kl?"),
        ("approx_kl", {"approx_kl": row("approx_kl")}, "test/approx_kl/\\*/\\* has no limit"),
        ("approx_kl", {"approx_kl": row("approx_kl", "optional")}, "has no limit"),
        ("clip_fraction", {"clip_fraction": row("clip_fraction", max=0, low=1.2, high=0.8)}, "is not 0 < low < high"),
        ("clip_fraction", {"clip_fraction": row("clip_fraction", max=0, low=0.0)}, "is not 0 < low < high"),
        ("sequence_outliers", {**ROWS, "max_abs_dlogp": row("max_abs_dlogp", "measured")}, "which has none"),
    ],
)
def test_a_judgment_without_a_usable_row_is_the_users_fault(
    tmp_path: Path, check: str, rows: dict[str, Row], words: str
) -> None:
    paths = files(tmp_path, lines(stream()), lines(stream()))
    with pytest.raises(SpecError, match=words):
        judged(*paths, rows, [check])


def test_missing_files_are_the_users_fault(tmp_path: Path) -> None:
    ours, theirs = files(tmp_path, lines(stream()), lines(stream()))
    for pair in ((ours, tmp_path / "none"), (tmp_path / "none", theirs), (tmp_path, theirs)):
        with pytest.raises(SpecError):
            judged(*pair)


@pytest.mark.parametrize("way", ["same", "symlink", "hardlink"])
def test_one_file_given_twice_is_no_comparison(tmp_path: Path, way: str) -> None:
    ours, theirs = files(tmp_path, lines(stream()), lines(stream()))
    theirs.unlink()
    if way == "symlink":
        theirs.symlink_to(ours)
    elif way == "hardlink":
        os.link(ours, theirs)
    got = judged(ours, ours if way == "same" else theirs)
    assert {verdict.status for verdict in got.values()} == {"ERROR"}
    assert all("self-comparison" in verdict.reason and verdict.statistic is None for verdict in got.values())


def test_unusable_files_give_one_error_to_every_judgment(tmp_path: Path) -> None:
    ours, theirs = files(tmp_path, lines(stream()), lines(stream())[:-10])
    got = judged(ours, theirs)
    assert {(verdict.status, verdict.reason) for verdict in got.values()} == {
        ("ERROR", f"{theirs}:256: not a whole JSON object: torn or damaged")
    }


def test_identity_comes_before_numbers(tmp_path: Path) -> None:
    train = stream()
    other = [(*train[0][:2], train[0][2] + 1, train[0][3]), *train[1:]]
    got = judged(*files(tmp_path, lines(train, weights="a"), lines(other, weights="b")))
    assert {verdict.status for verdict in got.values()} == {"ERROR"}
    told = got["approx_kl"]
    assert "token ids differ at 1 of 256 positions: sample s0 position 8" in told.reason
    assert "different weights: rollout a, train b" in told.reason
    assert len(told.evidence["problems"]) == 2 and told.statistic is None


def test_remarks_stand_on_one_verdict(tmp_path: Path) -> None:
    paths = files(tmp_path, lines(stream(), head_dtype="bf16"), lines(stream(), head_dtype="fp32", engine="trainer"))
    got = judged(*paths)
    assert [bool(got[check].notes) for check in dlogp.STANDARD] == [True, False, False, False, False]
    assert "head_dtype differs" in got["max_abs_dlogp"].notes[0]
    assert got["approx_kl"].evidence["semantics"]["train"] == {"engine": "trainer", "head_dtype": "fp32"}
    assert judged(*paths, checks=["approx_kl"])["approx_kl"].notes


def test_routing_flips_are_told_apart(tmp_path: Path) -> None:
    rng = random.Random(6)
    train = stream()
    flipped = set(rng.sample(range(len(train)), 30))
    ours = [(*t[:3], t[3] - (0.4 if at in flipped else 0.01) * rng.choice((1, -1))) for at, t in enumerate(train)]
    rollout = "".join(lines([token], routing=[[1, 2], [3, 4 + (at in flipped)]]) for at, token in enumerate(ours))
    got = judged(*files(tmp_path, rollout, lines(train[::-1], routing=[[2, 1], [4, 3]])))
    told = got["max_abs_dlogp"].evidence["routing"]
    assert (told["tokens"], told["flips"]) == (256, 30)
    assert told["max_abs_dlogp_without_flips"] == pytest.approx(0.01)
    assert hint(got, "routing: 30 of 256 tokens went to other experts; max |d| of the others is 0.01")


def test_sure_tokens_are_no_constant_file(tmp_path: Path) -> None:
    train = [(name, at, token, -2.4e-7 * (at % 2)) for name, at, token, _ in stream(2, 4)]
    assert statuses(compared(tmp_path, train, lambda at, token: 0.0)).startswith("PASS")
    for level in (-0.004, -0.005):  # nearly sure, and all the same: nothing that a model gives
        assert statuses(compared(tmp_path, train, lambda at, token, level=level: level)).startswith("ERROR")


def test_one_log_prob_for_all_tokens_of_a_sample_is_an_error(tmp_path: Path) -> None:
    train = [(name, at, token, -1.0 - int(name[1:]) / 8) for name, at, token, _ in stream(8, 16)]
    for to_rollout in (lambda at, token: token[3] - 1e-3, lambda at, token: token[3] - 1e-3 * (at % 3)):
        got = compared(tmp_path, train, to_rollout)
        assert got["approx_kl"].status == "ERROR" and "have one log-prob on the" in got["approx_kl"].reason


def test_constants_on_both_sides_are_an_error(tmp_path: Path) -> None:
    train = [("a", position, 1, -1.0) for position in range(4)]
    got = compared(tmp_path, train, lambda at, token: token[3])
    assert statuses(got) == " ".join(["ERROR"] * 5)
    assert "cannot fail" in got["max_abs_dlogp"].reason


@pytest.mark.parametrize(
    ("level", "to_rollout"),
    [(True, lambda at, token: -1.0003), (False, lambda at, token: -2.0), (True, lambda at, token: -1.0 - at / 1e4)],
)
def test_a_constant_on_either_side_is_an_error(
    tmp_path: Path, level: bool, to_rollout: Callable[[int, Token], float]
) -> None:
    train = [(*token[:3], -1.0) if level else token for token in stream()]
    got = compared(tmp_path, train, to_rollout)
    assert statuses(got) == " ".join(["ERROR"] * 5)
    assert "a constant: these are not the log-probs of the 256 tokens" in got["max_abs_dlogp"].reason
    assert statuses(compared(tmp_path, train[:2], lambda at, token: token[3] - 0.001)).startswith("PASS")
