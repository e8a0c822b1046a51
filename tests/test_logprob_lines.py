from __future__ import annotations

from pathlib import Path

import pytest

from rlspec import logprobs
from rlspec.logprob_lines import shown
from rlspec.logprobs import BadLogProbs
from tests.logprob_files import GOOD, entry, refusal, stored


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


def test_bytes_that_are_not_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(GOOD.encode() + b'\n{"sample": "\xff"}\n')
    with pytest.raises(BadLogProbs, match=":2: not UTF-8"):
        logprobs.read(tmp_path / "f")


def test_a_name_may_hold_colons_and_escapes(tmp_path: Path) -> None:
    got = stored(tmp_path / "f", entry("gsm8k:12:0"), entry('a"b\\:ä'))
    assert list(got.spans) == ["gsm8k:12:0", 'a"b\\:ä']


def test_equal_ways_to_say_a_thing_agree(tmp_path: Path) -> None:
    one = entry(top_k=-1, head_dtype="torch.float32", temperature=1, weights=3, top_p=None)
    two = entry("s1", top_k=0, head_dtype="fp32", temperature=1.0, weights="3")
    got = stored(tmp_path / "f", one, two)
    assert got.semantics == {"top_k": 0, "head_dtype": "fp32", "temperature": 1, "weights": "3"}


def test_names_that_cannot_be_printed_are_escaped() -> None:
    assert shown("gsm8k:12 ä") == "gsm8k:12 ä"
    assert shown("a\x1b[31m\n") == r"'a\x1b[31m\n'"
    assert shown("\ud800").isascii()
    assert len(shown("x" * 500)) == 80
