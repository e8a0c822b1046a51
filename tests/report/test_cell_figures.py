"""Cells of operators in words; here: the bits of one arm beside those of another."""

from __future__ import annotations

import copy
import gzip
import json
from pathlib import Path

import pytest

from rlspec.report import cell_figures

EVIDENCE = Path(__file__).parents[2] / "specs" / "operators" / "evidence"


@pytest.fixture(scope="module")
def measured():
    report = json.loads(gzip.decompress((EVIDENCE / "ws1-backends.json.gz").read_bytes()))
    return report["measured"]["triton"]


def across(*arms):
    names = ("triton", "cuda", "third")
    return list(cell_figures.across({"measured": dict(zip(names, arms, strict=False))}))


def lines_of(measured, operator, judgment):
    cells = [cell for cell in measured["cells"] if cell["operator"] == operator]
    return [line for line in cells[0]["comparisons"] if line["judgment"] == judgment]


def test_equal_arms_are_equal_in_every_operator(measured):
    [(title, lines)] = across(measured, measured)
    assert title == "bits of cuda beside those of triton"
    assert [line["operator"] for line in lines][:3] == ["embedding", "rms_norm", "det_gemm"]
    assert all(value.endswith("equal") for line in lines for key, value in line.items() if key != "operator")


def test_a_digest_that_differs_shows_in_its_operator_and_direction_alone(measured):
    other = copy.deepcopy(measured)
    for line in lines_of(other, "rope", "gradient_invariance"):
        line["against_digest"] = "0" * 64
    [(_, lines)] = across(measured, other)
    by_operator = {line.pop("operator"): line for line in lines}
    assert by_operator["rope"]["forward"].endswith("equal")
    assert "differ" in by_operator["rope"]["gradient"]
    assert sum("differ" in value for line in by_operator.values() for value in line.values()) == 1


def test_what_a_layout_gave_is_not_compared(measured):
    other = copy.deepcopy(measured)
    for line in lines_of(other, "rope", "forward_invariance"):
        line["digest"] = "0" * 64
    [(_, lines)] = across(measured, other)
    assert not any("differ" in value for line in lines for value in line.values())


def test_every_arm_is_held_against_the_first(measured):
    assert [title for title, _ in across(measured, measured, measured)][1] == "bits of third beside those of triton"


def test_an_arm_that_died_is_beside_nothing(measured):
    assert across(None) == across(None, measured) == across(measured, None) == []
    assert len(across(None, measured, measured)) == 1


def test_one_arm_or_none_is_beside_nothing(measured):
    assert across(measured) == across() == []
    assert list(cell_figures.across({"measured": None})) == []


def test_verdicts_of_another_kind_are_no_cells():
    verdicts = [{"evidence": {"operator": "silu"}}]
    assert cell_figures.is_cells({"kind": "operators", "verdicts": verdicts})
    assert not cell_figures.is_cells({"kind": "correctness", "verdicts": verdicts})
