from __future__ import annotations

import json

import pytest

from rlspec import token_files
from rlspec.errors import SpecError
from rlspec.token_files import BadTokens, Stream

GOOD = {"sample": "s0", "prompt": [5, 17], "response": [9, 4]}


def stored(tmp_path, *entries):
    path = tmp_path / "tokens.jsonl"
    path.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in entries))
    return path


def test_samples_in_order(tmp_path):
    path = stored(tmp_path, GOOD, "", {"sample": 1, "prompt": [0], "length": 3})
    assert token_files.read(path) == (
        Stream(sample="s0", prompt=(5, 17), response=(9, 4), length=2),
        Stream(sample="1", prompt=(0,), response=None, length=3),
    )


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ('{"sample": "s0", "prompt": [1]', ":2: not a whole JSON object"),
        ({**GOOD, "sample": "s1", "respnse": [1]}, ":2: unknown key respnse"),
        ({"prompt": [1], "response": [1]}, ":2: no sample"),
        ({"sample": "s1", "response": [1]}, ":2: no prompt"),
        ({"sample": "s1", "prompt": [1]}, "neither a response nor a length"),
        ({**GOOD, "sample": "s1", "length": 2}, "both a response and a length"),
        ({"sample": "s1", "prompt": [], "length": 2}, "prompt must be a list of at least one"),
        ({"sample": "s1", "prompt": [1], "response": []}, "response must be a list of at least one"),
        ({"sample": "s1", "prompt": [1.0], "length": 2}, "prompt must hold token ids"),
        ({"sample": "s1", "prompt": [-1], "length": 2}, "prompt must hold token ids"),
        ({"sample": "s1", "prompt": [True], "length": 2}, "prompt must hold token ids"),
        ({"sample": "s1", "prompt": [1], "length": 0}, "length must be a whole number from 1"),
        ({"sample": "s1", "prompt": [1], "length": 10**12}, "prompt and length come to more than 1,048,576 tokens"),
        (GOOD, ":2: sample s0 stands there twice"),
    ],
)
def test_refused(tmp_path, entry, message):
    with pytest.raises(BadTokens) as caught:
        token_files.read(stored(tmp_path, GOOD, entry))
    assert message in str(caught.value)


def test_no_samples_and_no_file(tmp_path):
    with pytest.raises(BadTokens, match="holds no samples"):
        token_files.read(stored(tmp_path))
    with pytest.raises(SpecError, match="cannot read tokens"):
        token_files.read(tmp_path / "none.jsonl")


def drawn(tmp_path, positions):
    path = tmp_path / "rollout.jsonl"
    columns = {"position": positions, "token": [7] * len(positions), "logprob": [-1.0] * len(positions)}
    path.write_text(json.dumps({"sample": "s0", **columns}) + "\n")
    return path


def test_responses_that_a_rollout_drew(tmp_path):
    streams = token_files.read(stored(tmp_path, {"sample": "s0", "prompt": [5, 17], "length": 9}))
    (found,) = token_files.generated(streams, drawn(tmp_path, [2, 3, 4]))
    assert found == Stream(sample="s0", prompt=(5, 17), response=(7, 7, 7), length=3)


@pytest.mark.parametrize("positions", [[3, 4], [2, 4], [1, 2]])
def test_responses_that_are_not_there_whole(tmp_path, positions):
    streams = token_files.read(stored(tmp_path, {"sample": "s0", "prompt": [5, 17], "length": 9}))
    with pytest.raises(BadTokens, match="sample s0 has no response from position 2 on"):
        token_files.generated(streams, drawn(tmp_path, positions))
