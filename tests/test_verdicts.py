from __future__ import annotations

from itertools import permutations, product
from typing import get_args

import pytest

from rlspec.model import Status
from rlspec.verdicts import CODES_WORST_FIRST, EXIT_CODES, WORST_FIRST, combine, exit_code, worst


def test_every_status_has_a_place_and_a_code() -> None:
    assert set(WORST_FIRST) == set(EXIT_CODES) == set(get_args(Status))


@pytest.mark.parametrize(
    ("statuses", "one", "code"),
    [
        (["PASS"], "PASS", 0),
        (["MEASURED"], "MEASURED", 0),
        (["PASS", "MEASURED", "N/A"], "PASS", 0),
        (["MEASURED", "N/A"], "MEASURED", 0),
        (["PASS", "FAIL"], "FAIL", 1),
        (["FAIL", "INVESTIGATE"], "FAIL", 1),
        (["PASS", "INVESTIGATE", "BLOCKED"], "INVESTIGATE", 3),
        (["ERROR", "FAIL"], "ERROR", 4),
        (["PASS", "BLOCKED"], "BLOCKED", 5),
        (["N/A"], "N/A", 5),
        ([], "BLOCKED", 5),
    ],
)
def test_worst_and_its_exit_code(statuses: list[Status], one: Status, code: int) -> None:
    for order in permutations(statuses):
        assert worst(order) == one
        assert exit_code(order) == code


def test_exit_0_needs_a_judgment_and_nothing_bad() -> None:
    for statuses in product(get_args(Status), repeat=3):
        clean = set(statuses) <= {"PASS", "MEASURED", "N/A"} and bool(set(statuses) & {"PASS", "MEASURED"})
        assert (exit_code(statuses) == 0) == clean


def test_the_code_is_that_of_the_worst_status_among_several_specs() -> None:
    for a, b in product(get_args(Status), repeat=2):
        assert combine([exit_code([a]), exit_code([b])]) in {exit_code([a]), exit_code([b])}
    assert combine([exit_code(["PASS"]), exit_code(["N/A"])]) == 5


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ([0], 0),
        ([0, 5], 5),
        ([5, 3], 3),
        ([3, 1], 1),
        ([1, 4], 4),
        ([4, 1, 3, 5, 0], 4),
        ([4, 130], 130),
        ([0, 2], 2),
        ([], 5),
    ],
)
def test_combine(codes: list[int], code: int) -> None:
    assert combine(codes) == code
    assert combine(reversed(codes)) == code


def test_an_unknown_code_is_not_taken_for_success() -> None:
    with pytest.raises(ValueError):
        combine([0, 7])
    assert len(set(CODES_WORST_FIRST)) == 8
