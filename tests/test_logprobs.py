from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlspec import logprobs
from rlspec.errors import RunError, SpecError
from rlspec.logprobs import BadLogProbs, LogProbs

GOOD = '{"sample": "s0", "position": 8, "token": 42, "logprob": -0.5}'


def entry(
    sample: object = "s0", position: object = 8, token: object = 42, logprob: object = -0.5, **more: object
) -> str:
    return json.dumps({"sample": sample, "position": position, "token": token, "logprob": logprob, **more})


def stored(path: Path, *lines: str) -> LogProbs:
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return logprobs.read(path)


def refusal(path: Path, *lines: str) -> str:
    with pytest.raises(BadLogProbs) as caught:
        stored(path, *lines)
    return str(caught.value)


def rows(read: LogProbs) -> list[tuple[str, int, int, float]]:
    return [
        (name, *row)
        for name, (start, stop) in read.spans.items()
        for row in list(zip(read.positions, read.tokens, read.logprobs, strict=True))[start:stop]
    ]


def test_tokens_and_sequences_read_alike(tmp_path: Path) -> None:
    tokens = stored(tmp_path / "a", entry("s0", 8, 1, -0.5), entry("s0", 9, 2, -1.5), entry("s1", 0, 3, -2))
    lists = stored(tmp_path / "b", entry("s0", [8, 9], [1, 2], [-0.5, -1.5]), entry("s1", [0], [3], [-2]))
    assert rows(tokens) == rows(lists) == [("s0", 8, 1, -0.5), ("s0", 9, 2, -1.5), ("s1", 0, 3, -2.0)]
    assert tokens.spans == {"s0": (0, 2), "s1": (2, 3)}
    assert tokens.routing is None and tokens.notes == () and tokens.semantics == {}


def test_interleaved_and_descending_rows_are_sorted_within_samples(tmp_path: Path) -> None:
    lines = [entry("b", 9, 4), entry("a", 1, 1), entry("b", 8, 3, -0.25), entry("a", 0, 0)]
    got = stored(tmp_path / "f", *lines)
    assert rows(got) == [("b", 8, 3, -0.25), ("b", 9, 4, -0.5), ("a", 0, 0, -0.5), ("a", 1, 1, -0.5)]


def test_whole_numbers_blank_lines_and_a_byte_order_mark_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"\xef\xbb\xbf" + entry(3, 0, 0, 0).encode() + b"\r\n\n" + entry("3", 1, 5, 1e-6).encode())
    assert rows(logprobs.read(path)) == [("3", 0, 0, 0.0), ("3", 1, 5, 1e-6)]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (entry(logprob=None), "position 8: logprob is null, expected a number"),
        (entry(logprob=True), "logprob is true, expected a number"),
        (entry(logprob="-0.5"), "logprob is the text -0.5, expected a number"),
        (entry(logprob={}), "logprob is an object"),
        (entry(logprob=float("nan")), "logprob is nan, not a finite log-prob"),
        (entry(logprob=float("-inf")), "logprob is -inf, not a finite log-prob"),
        (entry(logprob=float("inf")), "logprob is inf, not a finite log-prob"),
        (GOOD.replace("-0.5", "-1e999"), "logprob is -inf"),
        (GOOD.replace("-0.5", "-1" + "0" * 400), "not a finite log-prob"),
        (GOOD.replace("-0.5", "-1" + "0" * 9000), "f.jsonl:2: "),
        (entry(logprob=1.1e-6), "logprob is 1.1e-06, above 0: a probability above 1 is impossible"),
        (entry(logprob=1), "logprob is 1, above 0"),
        (entry(position=8.0), "position is 8.0, expected a whole number from 0"),
        (entry(position=True), "position is true"),
        (entry(position=-1), "position is -1"),
        (entry(position=2**63), "position is 9223372036854775808"),
        (entry(token=1.5), "token is 1.5, expected a token id"),
        (entry(token=-1), "token is -1, expected a token id"),
        (entry(token="42"), "token is the text 42"),
        (entry(sample=None), "sample is null, expected a name"),
        (entry(sample=1.5), "sample is 1.5"),
        (entry(sample=""), "sample is the text"),
        (entry(sample=["s0"]), "sample is a list"),
        (GOOD[:-1], "not a whole JSON object"),
        (GOOD[20:], "not a whole JSON object"),
        (GOOD + GOOD, "one JSON object and nothing else"),
        (f"[{GOOD}]", "one JSON object and nothing else"),
        ("7", "one JSON object"),
        ("null", "one JSON object"),
        ("\x00", "not a whole JSON object"),
        ("[" * 100_000, "nested too deeply"),
        (GOOD[:-1] + ', "sample": "s9"}', "key sample twice"),
        (GOOD[:-1] + ', "logprob" : -9}', "key logprob twice"),
        (GOOD[:-1].replace("s0", "a:b:c") + ', "token": 7}', "key token twice"),
        (GOOD[:-1].replace("s0", r"a\u003ab") + ', "token": 7}', "key token twice"),
        ('{"sample": "s0", "position": 8, "token": 42, "logprobs": -1}', "no logprob; is it logprobs?"),
        ('{"sample": "s0", "position": 8, "token_id": 42, "logprob": -1}', "no token; is it token_id?"),
        ('{"position": 8, "token": 42, "logprob": -1}', "no sample"),
        (entry(temprature=1.0), "unknown key temprature; did you mean temperature?"),
        (entry(Top_P=1.0), "unknown key Top_P; did you mean top_p?"),
        (entry(temperature="0.7"), "temperature is the text 0.7, expected a number from 0"),
        (entry(temperature=float("nan")), "temperature is nan"),
        (entry(top_p=0), "top_p is 0, expected a number above 0"),
        (entry(top_k=2.5), "top_k is 2.5"),
        (entry(processed="cooked"), "processed is the text cooked, expected raw or processed"),
        (entry(weights=[]), "weights is a list"),
        (entry(position=[8, 9], token=[1, 2], logprob=[-1]), "one length, found position 2, token 2, logprob 1"),
        (entry(position=8, token=[1], logprob=[-1]), "lists of one length, found position 8, token 1, logprob 1"),
        (entry(position=[8], token=[1], logprob=[-1], routing=[1, 2]), "logprob 1, routing 2"),
        (entry(position=[], token=[], logprob=[]), "sample s0 has no tokens"),
        (entry(position=[8, 9], token=[1, 2], logprob=[-1, None]), "position 9: logprob is null"),
        (entry(position=[9, 9], token=[1, 2], logprob=[-1, -1]), "duplicate position 9"),
        (entry(routing=[1.5]), "routing of a token is a list of expert numbers"),
        (entry(routing=[]), "routing of a token"),
        (entry(routing=[[1], 2]), "routing of a token"),
    ],
)
def test_a_bad_line_is_refused_with_its_place(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "f.jsonl"
    told = refusal(path, entry("good", routing=[0] if "routing" in line else None), line)
    assert f"{path}:2: " in told
    assert words in told


def test_bad_log_probs_are_run_errors() -> None:
    assert issubclass(BadLogProbs, RunError)


@pytest.mark.parametrize("text", [b"", b"\n \n"])
def test_a_file_without_tokens_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "f").write_bytes(text)
    with pytest.raises(BadLogProbs, match="holds no tokens"):
        logprobs.read(tmp_path / "f")


def test_bytes_that_are_not_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(GOOD.encode() + b'\n{"sample": "\xff"}\n')
    with pytest.raises(BadLogProbs, match=":2: not UTF-8"):
        logprobs.read(tmp_path / "f")


def test_a_name_may_hold_colons_and_escapes(tmp_path: Path) -> None:
    got = stored(tmp_path / "f", entry("gsm8k:12:0"), entry('a"b\\:ä'))
    assert list(got.spans) == ["gsm8k:12:0", 'a"b\\:ä']


def test_a_missing_file_and_a_folder_are_the_users_fault(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="none.jsonl: No such file"):
        logprobs.read(tmp_path / "none.jsonl")
    with pytest.raises(SpecError, match="directory"):
        logprobs.read(tmp_path)


def test_a_duplicate_names_both_lines(tmp_path: Path) -> None:
    told = refusal(tmp_path / "f", entry("s0", 8), entry("s1", 8), entry("s0", 9), entry("s0", 8))
    assert "f:4: sample s0: duplicate position 8, already given in line 1" in told
    assert "duplicate" in refusal(tmp_path / "f", entry("s0", 8), entry("s0", 8))
    assert "duplicate" in refusal(tmp_path / "f", entry(7, 8), entry("7", 8))


@pytest.mark.parametrize("key", ["temperature", "weights", "top_p", "processed", "engine"])
def test_one_file_has_one_meaning(tmp_path: Path, key: str) -> None:
    one, two = {"processed": ("raw", "processed"), "temperature": (1, 0.5), "top_p": (1, 0.5)}.get(key, ("a", "b"))
    more: dict[str, Any] = {key: one}
    assert f"{key} is {two} here and {one} before" in refusal(tmp_path / "f", entry(**more), entry("s1", **{key: two}))
    assert f"{key} is undeclared here" in refusal(tmp_path / "f", entry(**more), entry("s1"))
    assert f"{key} is {one} here and undeclared before" in refusal(tmp_path / "f", entry(), entry("s1", **more))


def test_equal_ways_to_say_a_thing_agree(tmp_path: Path) -> None:
    one = entry(top_k=-1, head_dtype="torch.float32", temperature=1, weights=3, top_p=None)
    two = entry("s1", top_k=0, head_dtype="fp32", temperature=1.0, weights="3")
    got = stored(tmp_path / "f", one, two)
    assert got.semantics == {"top_k": 0, "head_dtype": "fp32", "temperature": 1, "weights": "3"}


def test_foreign_keys_are_ignored_with_a_note(tmp_path: Path) -> None:
    got = stored(tmp_path / "f", entry(text=" the", rank={"a": 1}), entry("s1", text=" cat"))
    assert got.notes == ("f: unknown keys were ignored: text, rank",)


def test_routing_is_a_set_of_experts_a_layer(tmp_path: Path) -> None:
    same = stored(tmp_path / "a", entry(routing=[3, 5]), entry("s1", routing=[5, 3]), entry("s2", routing=[[5, 3]]))
    assert same.routing is not None and len(set(same.routing)) == 1
    layers = stored(tmp_path / "b", entry("s", [0, 1], [1, 2], [-1, -1], routing=[[[1], [2]], [[2], [1]]]))
    assert layers.routing is not None and len(set(layers.routing)) == 2
    unsorted = stored(tmp_path / "c", entry("s1", 9, routing=2), entry("s1", 8, routing=1), entry("s1", 7, routing=2))
    assert unsorted.routing is not None and unsorted.routing[0] == unsorted.routing[2] != unsorted.routing[1]
    assert "routing for 1 of 2 tokens" in refusal(tmp_path / "d", entry(routing=[1]), entry("s1"))


def test_names_that_cannot_be_printed_are_escaped() -> None:
    assert logprobs.shown("gsm8k:12 ä") == "gsm8k:12 ä"
    assert logprobs.shown("a\x1b[31m\n") == r"'a\x1b[31m\n'"
    assert logprobs.shown("\ud800").isascii()
    assert len(logprobs.shown("x" * 500)) == 80


def pair(tmp_path: Path, ours: list[str], theirs: list[str]) -> tuple[LogProbs, LogProbs]:
    return stored(tmp_path / "rollout", *ours), stored(tmp_path / "train", *theirs)


def test_the_order_of_lines_is_no_identity_problem(tmp_path: Path) -> None:
    lines = [entry("s0", 8), entry("s0", 9), entry("s1", 8)]
    assert logprobs.identity(*pair(tmp_path, lines, lines[::-1])) == []
    assert logprobs.remarks(*pair(tmp_path, lines, lines[::-1])) == []


def test_samples_on_one_side_are_named(tmp_path: Path) -> None:
    problems = logprobs.identity(*pair(tmp_path, [entry("a"), entry("b")], [entry("a"), entry("c"), entry("d")]))
    assert problems == [
        "1 of 2 samples are in the rollout file only: b",
        "2 of 3 samples are in the train file only: c, d",
    ]


def test_positions_on_one_side_are_named(tmp_path: Path) -> None:
    ours = [entry("s0", at) for at in range(8, 18)] + [entry("s1", 8)]
    theirs = [entry("s0", 8), entry("s0", 99), entry("s1", 8)]
    (told,) = logprobs.identity(*pair(tmp_path, ours, theirs))
    assert told == (
        "positions differ in 1 samples: sample s0: 9, 10, 11, 12, 13 and 4 more in the rollout only, 99 in train only"
    )


def test_another_way_to_count_positions_is_recognised(tmp_path: Path) -> None:
    ours, theirs = [entry("s0", 8), entry("s0", 9)], [entry("s0", 7), entry("s0", 8)]
    problems = logprobs.identity(*pair(tmp_path, ours, theirs))
    assert problems[0] == "positions differ in 1 samples: sample s0: train counts positions -1 against the rollout"


def test_other_tokens_are_named_with_both_ids_and_counted(tmp_path: Path) -> None:
    ours = [entry("s2", at, 5) for at in range(6)]
    theirs = [entry("s2", at, 6 if at > 1 else 5) for at in range(6)]
    (told,) = logprobs.identity(*pair(tmp_path, ours, theirs))
    assert told.startswith("token ids differ at 4 of 6 positions: sample s2 position 2: rollout 5, train 6; ")


@pytest.mark.parametrize(
    ("key", "one", "two"),
    [
        ("weights", "b7e1", "41d0"),
        ("temperature", 0.7, 1.0),
        ("top_p", 0.9, 1),
        ("top_k", 50, -1),
        ("processed", "raw", "processed"),
    ],
)
def test_other_meanings_are_problems_and_one_sided_ones_are_remarks(
    tmp_path: Path, key: str, one: object, two: object
) -> None:
    (told,) = logprobs.identity(*pair(tmp_path, [entry(**{key: one})], [entry(**{key: two})]))
    assert told.startswith(f"different {key}: rollout {one}, train ")
    files = pair(tmp_path, [entry()], [entry(**{key: one})])
    assert logprobs.identity(*files) == []
    assert logprobs.remarks(*files) == [f"only the train file declares {key} ({one}); the other is taken to agree"]


def test_another_head_dtype_is_a_remark(tmp_path: Path) -> None:
    files = pair(tmp_path, [entry(head_dtype="bf16")], [entry(head_dtype="fp32")])
    assert logprobs.identity(*files) == []
    (told,) = logprobs.remarks(*files)
    assert "rollout bf16, train fp32" in told and "than on neither" in told


def test_routing_on_one_side_is_a_remark(tmp_path: Path) -> None:
    (told,) = logprobs.remarks(*pair(tmp_path, [entry(routing=[1])], [entry()]))
    assert told == "only the rollout file has routing, so routing flips cannot be counted"
