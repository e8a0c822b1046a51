from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlspec import logprobs
from rlspec.errors import RunError, SpecError
from rlspec.logprobs import BadLogProbs, LogProbs
from tests.logprob_files import entry, refusal, stored


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


def test_bad_log_probs_are_run_errors() -> None:
    assert issubclass(BadLogProbs, RunError)


@pytest.mark.parametrize("text", [b"", b"\n \n"])
def test_a_file_without_tokens_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "f").write_bytes(text)
    with pytest.raises(BadLogProbs, match="holds no tokens"):
        logprobs.read(tmp_path / "f")


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
