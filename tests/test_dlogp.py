from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlspec import dlogp
from rlspec.errors import RunError, SpecError
from rlspec.model import Judgment, Row, RowStatus, Verdict

Token = tuple[str, int, int, float]


def row(check: str, status: RowStatus = "applicable", **limits: float) -> Row:
    return Row(
        contract="test",
        judgment=check,
        subject="*",
        dtype="*",
        status=status,
        limits=limits,
        source="a test",
        date="2026-01-01",
        reason="because of the test",
    )


ROWS = {
    "max_abs_dlogp": row("max_abs_dlogp", max=0.06),
    "mean_abs_dlogp": row("mean_abs_dlogp", "measured"),
    "approx_kl": row("approx_kl", max=0.05),
    "clip_fraction": row("clip_fraction", max=0.0, low=0.8, high=1.2),
    "sequence_outliers": row("sequence_outliers", "measured"),
}
STRICT = {check: row(check, max=0.06 if check == "max_abs_dlogp" else 0.05) for check in dlogp.STANDARD} | {
    "clip_fraction": row("clip_fraction", max=0.0),
    "sequence_outliers": row("sequence_outliers", max=0.0),
}


def lines(tokens: Sequence[Token], **more: Any) -> str:
    keys = ("sample", "position", "token", "logprob")
    return "".join(json.dumps({**dict(zip(keys, token, strict=True)), **more}) + "\n" for token in tokens)


def files(folder: Path, rollout: str, train: str) -> tuple[Path, Path]:
    ours, theirs = folder / "rollout.jsonl", folder / "train.jsonl"
    ours.write_text(rollout, encoding="utf-8")
    theirs.write_text(train, encoding="utf-8")
    return ours, theirs


def judged(
    ours: Path, theirs: Path, rows: dict[str, Row] = ROWS, checks: Sequence[str] = dlogp.STANDARD
) -> dict[str, Verdict]:
    verdicts = dlogp.judge(ours, theirs, [Judgment(check=check) for check in checks], rows.__getitem__)
    assert [verdict.judgment for verdict in verdicts] == list(checks)
    return {verdict.judgment: verdict for verdict in verdicts}


def compared(
    folder: Path, train: Sequence[Token], to_rollout: Callable[[int, Token], float], rows: dict[str, Row] = ROWS
) -> dict[str, Verdict]:
    rollout = [(*token[:3], min(0.0, to_rollout(at, token))) for at, token in enumerate(train)]
    return judged(*files(folder, lines(rollout), lines(train)), rows)


def stream(sequences: int = 16, length: int = 16, seed: int = 0) -> list[Token]:
    rng = random.Random(seed)
    return [
        (f"s{sequence}", 8 + at, rng.randrange(150_000), -0.5 - rng.expovariate(0.5))
        for sequence in range(sequences)
        for at in range(length)
    ]


def statuses(verdicts: dict[str, Verdict]) -> str:
    return " ".join(verdicts[check].status for check in dlogp.STANDARD)


def hint(verdicts: dict[str, Verdict], word: str) -> str:
    return "".join(note for note in verdicts["max_abs_dlogp"].notes if word in note)


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


def test_the_direction_is_train_minus_rollout(tmp_path: Path) -> None:
    down = compared(tmp_path, stream(), lambda at, token: token[3] + 0.2)
    up = compared(tmp_path, stream(), lambda at, token: token[3] - 0.2)
    assert down["max_abs_dlogp"].evidence["mean_dlogp"] == pytest.approx(-0.2)
    assert up["max_abs_dlogp"].evidence["mean_dlogp"] == pytest.approx(0.2)
    # exp(-0.2) lies in [0.8, 1.2], exp(0.2) does not
    assert (down["clip_fraction"].statistic, up["clip_fraction"].statistic) == (0.0, 1.0)


def test_small_noise_passes_without_hints(tmp_path: Path) -> None:
    rng = random.Random(1)
    got = compared(tmp_path, stream(), lambda at, token: token[3] + rng.gauss(0, 0.008))
    assert statuses(got) == "PASS MEASURED PASS PASS MEASURED"
    assert all(verdict.notes == () for verdict in got.values())


def test_equal_numbers_in_two_files_pass(tmp_path: Path) -> None:
    got = compared(tmp_path, stream(), lambda at, token: token[3])
    assert statuses(got) == "PASS MEASURED PASS PASS MEASURED"
    assert all(verdict.statistic == 0.0 for verdict in got.values())


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


def test_percentiles_are_nearest_ranks(tmp_path: Path) -> None:
    train = [("a", at, at, -1000.0) for at in range(1, 1001)]
    got = compared(tmp_path, train, lambda at, token: -1000.0 + token[1])
    assert got["max_abs_dlogp"].evidence["percentiles"] == {"50": 500.0, "99": 990.0, "99.9": 999.0}


def test_more_outliers_than_named_are_counted(tmp_path: Path) -> None:
    got = compared(tmp_path, stream(), lambda at, token: token[3] - 0.5)
    assert got["sequence_outliers"].statistic == 16.0
    assert got["sequence_outliers"].reason.endswith("s8, s9 and 6 more")


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
        rollout = [(*token[:3], far) for token in stream()]
        got = judged(*files(tmp_path, lines(rollout), lines(stream())), STRICT)
        assert statuses(got) == "FAIL FAIL FAIL FAIL FAIL"
        assert got["approx_kl"].statistic == math.inf
    both = [(*token[:3], -1e307) for token in stream()]
    assert statuses(compared(tmp_path, both, lambda at, token: -0.1, STRICT)) == "FAIL FAIL FAIL FAIL FAIL"


def test_approx_kl_keeps_small_numbers() -> None:
    assert dlogp.approx_kl([1e-6, -1e-6]) == pytest.approx(5e-13, rel=1e-3)
    assert dlogp.approx_kl([1e-8]) == pytest.approx(5e-17, rel=0.05, abs=0)
    assert dlogp.approx_kl([1000.0]) == math.inf
    assert dlogp.outside([math.nan, 0.0], 0.8, 1.2) == 1


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
    assert compared(tmp_path, stream(), lambda at, token: -900.0, rows)["approx_kl"].status == "FAIL"


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


# Mutations: nothing but SpecError and RunError comes out, and no damage turns into a PASS.

_NUMBERS = (-1, 2**70, 1.5, -0.0, 1e-7, -1e308, math.nan, math.inf)
_VALUES: tuple[Any, ...] = (*_NUMBERS, None, True, "x", "", [], [1], {}, [[0]])
_EXTRAS = ("temperature", "top_p", "top_k", "weights", "processed", "routing", "engine", "head_dtype", "tokens", "z")


def _in_bytes(rng: random.Random, text: bytes) -> bytes:
    at, length = rng.randrange(len(text)), rng.choice((0, 1, 1, 5, 200))
    return text[:at] + rng.randbytes(rng.choice((0, 1, 1, 3))) + text[at + length :]


def _in_digits(rng: random.Random, text: bytes) -> bytes:
    at = rng.choice([at for at, byte in enumerate(text) if chr(byte) in "0123456789-.:,"])
    return text[:at] + rng.choice("0123456789-.e,:").encode() + text[at + 1 :]


def _in_lines(rng: random.Random, text: bytes) -> bytes:
    kept = text.splitlines(keepends=True)
    at, to = rng.randrange(len(kept)), rng.randrange(len(kept))
    kind = rng.randrange(5)
    if kind == 0:
        del kept[at]
    elif kind == 1:
        kept.insert(to, kept[at])
    elif kind == 2:
        kept[at], kept[to] = kept[to], kept[at]
    elif kind == 3:
        kept = kept[: at + 1]
    else:
        kept[at] = kept[at][: rng.randrange(len(kept[at]))] + kept[to]
    return b"".join(kept)


def _in_values(rng: random.Random, text: bytes) -> bytes:
    kept = text.decode().splitlines()
    at = rng.randrange(len(kept))
    entry = json.loads(kept[at])
    key = rng.choice((*entry, *_EXTRAS))
    if rng.random() < 0.2:
        entry.pop(key, None)
    elif isinstance(entry.get(key), list) and rng.random() < 0.7:
        entry[key][rng.randrange(len(entry[key]))] = rng.choice(_VALUES)
    else:
        entry[key] = rng.choice(_VALUES)
    kept[at] = json.dumps(entry)
    return ("\n".join(kept) + "\n").encode()


def _by_sequence(tokens: Sequence[Token]) -> str:
    names = list(dict.fromkeys(token[0] for token in tokens))
    grouped = {name: [token for token in tokens if token[0] == name] for name in names}
    keys = ("position", "token", "logprob")
    columns = {name: zip(*(token[1:] for token in own), strict=True) for name, own in grouped.items()}
    entries = [{"sample": name, **dict(zip(keys, lists, strict=True))} for name, lists in columns.items()]
    return "".join(json.dumps(entry) + "\n" for entry in entries)


def _plainly(text: bytes) -> dict[tuple[str, int], tuple[int, float]]:
    """A second, naive reader of what was accepted."""
    found: dict[tuple[str, int], tuple[int, float]] = {}
    for line in filter(None, map(str.strip, text.decode("utf-8-sig").split("\n"))):
        entry = json.loads(line)
        columns = [entry[key] for key in ("position", "token", "logprob")]
        columns = columns if isinstance(columns[0], list) else [[column] for column in columns]
        for position, token, logprob in zip(*columns, strict=True):
            assert (str(entry["sample"]), position) not in found
            assert type(position) is int and type(token) is int and type(logprob) in (int, float)
            assert math.isfinite(logprob) and logprob <= 1e-6
            found[str(entry["sample"]), position] = (token, logprob)
    return found


@pytest.mark.parametrize("form", [lines, _by_sequence])
@pytest.mark.parametrize("mutate", [_in_bytes, _in_digits, _in_lines, _in_values])
def test_damage_never_passes(
    tmp_path: Path, mutate: Callable[[random.Random, bytes], bytes], form: Callable[[Sequence[Token]], str]
) -> None:
    rng = random.Random(f"{mutate.__name__} {form.__name__}")
    train = stream(4, 6)
    near = form([(*token[:3], token[3] - 0.01) for token in train]).encode()
    far = form([(*token[:3], token[3] - 0.7 - rng.random()) for token in train]).encode()
    truth = form(train).encode()
    ours, theirs = tmp_path / "rollout.jsonl", tmp_path / "train.jsonl"
    for trial in range(120):
        good = trial % 2 == 0
        left, right = (near if good else far), truth
        for _ in range(rng.choice((1, 1, 2))):
            if rng.random() < 0.5:
                left = mutate(rng, left) or left
            else:
                right = mutate(rng, right) or right
        ours.write_bytes(left)
        theirs.write_bytes(right)
        try:
            got = judged(ours, theirs)
        except (SpecError, RunError):
            continue
        passed = [check for check, verdict in got.items() if verdict.status == "PASS"]
        if not good:
            assert passed == []
        elif passed:
            one, two = _plainly(left), _plainly(right)
            assert {key: token for key, (token, _) in one.items()} == {key: token for key, (token, _) in two.items()}
            d = [two[key][1] - one[key][1] for key in one]
            assert "max_abs_dlogp" not in passed or max(map(abs, d)) <= 0.06
            assert "clip_fraction" not in passed or all(0.8 <= math.exp(x) <= 1.2 for x in d)
            assert "approx_kl" not in passed or math.fsum(math.exp(x) - 1 - x for x in d) / len(d) <= 0.05
