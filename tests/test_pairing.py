from __future__ import annotations

from pathlib import Path

import pytest

from rlspec.logprobs import LogProbs
from rlspec.pairing import identity, join, remarks
from tests.logprob_files import entry, stored


def pair(tmp_path: Path, ours: list[str], theirs: list[str]) -> tuple[LogProbs, LogProbs]:
    return stored(tmp_path / "rollout", *ours), stored(tmp_path / "train", *theirs)


def test_the_order_of_lines_is_no_identity_problem(tmp_path: Path) -> None:
    lines = [entry("s0", 8), entry("s0", 9), entry("s1", 8)]
    assert identity(*pair(tmp_path, lines, lines[::-1])) == []
    assert remarks(*pair(tmp_path, lines, lines[::-1])) == []


def test_samples_on_one_side_are_named(tmp_path: Path) -> None:
    problems = identity(*pair(tmp_path, [entry("a"), entry("b")], [entry("a"), entry("c"), entry("d")]))
    assert problems == [
        "1 of 2 samples are in the rollout file only: b",
        "2 of 3 samples are in the train file only: c, d",
    ]


def test_positions_on_one_side_are_named(tmp_path: Path) -> None:
    ours = [entry("s0", at) for at in range(8, 18)] + [entry("s1", 8)]
    theirs = [entry("s0", 8), entry("s0", 99), entry("s1", 8)]
    (told,) = identity(*pair(tmp_path, ours, theirs))
    assert told == (
        "positions differ in 1 samples: sample s0: 9, 10, 11, 12, 13 and 4 more in the rollout only, 99 in train only"
    )


def test_another_way_to_count_positions_is_recognised(tmp_path: Path) -> None:
    ours, theirs = [entry("s0", 8), entry("s0", 9)], [entry("s0", 7), entry("s0", 8)]
    problems = identity(*pair(tmp_path, ours, theirs))
    assert problems[0] == "positions differ in 1 samples: sample s0: train counts positions -1 against the rollout"


def test_other_tokens_are_named_with_both_ids_and_counted(tmp_path: Path) -> None:
    ours = [entry("s2", at, 5) for at in range(6)]
    theirs = [entry("s2", at, 6 if at > 1 else 5) for at in range(6)]
    (told,) = identity(*pair(tmp_path, ours, theirs))
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
    (told,) = identity(*pair(tmp_path, [entry(**{key: one})], [entry(**{key: two})]))
    assert told.startswith(f"different {key}: rollout {one}, train ")
    files = pair(tmp_path, [entry()], [entry(**{key: one})])
    assert identity(*files) == []
    assert remarks(*files) == [f"only the train file declares {key} ({one}); the other is taken to agree"]


def test_other_files_with_the_same_tensors_are_one_policy(tmp_path: Path) -> None:
    one, two = {"weights": "b7e1", "tensors": "5a"}, {"weights": "41d0", "tensors": "5a"}
    files = pair(tmp_path, [entry(**one)], [entry(**two)])
    assert identity(*files) == []
    assert remarks(*files) == [
        "the files of the weights are other ones, and the tensors in them are the same to the bit"
    ]
    for other in ({"weights": "41d0", "tensors": "5b"}, {"weights": "41d0"}):  # a file of before has no tensors
        (told,) = identity(*pair(tmp_path, [entry(**one)], [entry(**other)]))
        assert told.startswith("different weights: rollout b7e1, train 41d0")
    assert identity(*pair(tmp_path, [entry(**one)], [entry(weights="b7e1")])) == []


def test_another_head_dtype_is_a_remark(tmp_path: Path) -> None:
    files = pair(tmp_path, [entry(head_dtype="bf16")], [entry(head_dtype="fp32")])
    assert identity(*files) == []
    (told,) = remarks(*files)
    assert "rollout bf16, train fp32" in told and "than on neither" in told


def test_routing_on_one_side_is_a_remark(tmp_path: Path) -> None:
    (told,) = remarks(*pair(tmp_path, [entry(routing=[1])], [entry()]))
    assert told == "only the rollout file has routing, so routing flips cannot be counted"


def test_both_files_are_joined_in_the_rollouts_order(tmp_path: Path) -> None:
    ours = [entry("a", 0, 1, -1, routing=[1]), entry("b", 0, 2, -2, routing=[1]), entry("b", 1, 3, -3, routing=[1])]
    theirs = [
        entry("b", 1, 3, -3.5, routing=[2]),
        entry("a", 0, 1, -1.25, routing=[1]),
        entry("b", 0, 2, -2, routing=[1]),
    ]
    joined = join(*pair(tmp_path, ours, theirs))
    assert list(joined.train) == [-1.25, -2.0, -3.5] and list(joined.d) == [-0.25, 0.0, -0.5]
    assert list(joined.peaks) == [(0.25, "a"), (0.5, "b")] and joined.flips == [False, False, True]
