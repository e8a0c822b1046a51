from __future__ import annotations

from typing import Any
from xml.etree import ElementTree as ET

import pytest

from rlspec.report import junit
from tests.report import samples

MARKS = ("failure", "error", "skipped")


def suite(report: dict[str, Any]) -> ET.Element:
    found = ET.fromstring(junit.render(report)).find("testsuite")
    assert found is not None
    return found


def with_statuses(*statuses: str) -> dict[str, Any]:
    report = samples.load("correctness-pass")
    report["verdicts"] = [samples.verdict(subject=f"m{at}", status=one) for at, one in enumerate(statuses)]
    return report


@pytest.mark.parametrize("name", samples.NAMES)
def test_golden(name: str) -> None:
    assert junit.render(samples.load(name)) == samples.golden(name, "xml")


@pytest.mark.parametrize("name", samples.NAMES)
def test_the_counts_are_those_of_the_cases(name: str) -> None:
    made = suite(samples.load(name))
    cases = made.findall("testcase")
    assert int(made.attrib["tests"]) == len(cases)
    for attribute, mark in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        assert int(made.attrib[attribute]) == sum(case.find(mark) is not None for case in cases)


def test_a_case_a_verdict_with_the_mark_of_its_status() -> None:
    made = suite(with_statuses("PASS", "MEASURED", "FAIL", "INVESTIGATE", "ERROR", "BLOCKED", "N/A"))
    marks = [[mark for mark in MARKS if case.find(mark) is not None] for case in made.findall("testcase")]
    assert marks == [[], [], ["failure"], ["failure"], ["error"], ["skipped"], ["skipped"]]
    assert [mark.attrib["type"] for mark in made.iter("failure")] == ["FAIL", "INVESTIGATE"]
    assert [case.attrib["name"] for case in made.findall("testcase")][:2] == ["drift[m0]", "drift[m1]"]
    assert {case.attrib["classname"] for case in made.findall("testcase")} == {"correctness.qwen3-fused-router"}


def test_an_error_carries_the_end_of_the_failed_arms_log() -> None:
    text = suite(samples.load("correctness-error")).findtext("testcase/error") or ""
    assert "torch.OutOfMemoryError: CUDA out of memory" in text
    assert "feat0.log" in text


def test_a_control_that_fails_as_expected_passes() -> None:
    made = suite(samples.load("control-met"))
    assert (made.attrib["failures"], made.attrib["errors"]) == ("0", "0")
    assert "FAIL: " in (made.findtext("testcase/system-out") or "")


def test_a_control_that_passes_is_a_failure() -> None:
    made = suite(samples.load("control-missed"))
    assert made.attrib["failures"] == "1"
    case = made.findall("testcase")[-1]
    assert case.attrib["name"] == "expect[FAIL]"
    assert [mark.attrib["message"] for mark in case.iter("failure")] == ["expected FAIL, got PASS"]


def test_nothing_judged_is_no_pass() -> None:
    report = samples.load("blocked")
    report["verdicts"] = []
    assert suite(report).attrib["errors"] == "1"


def test_characters_that_xml_forbids_are_removed() -> None:
    report = with_statuses("FAIL", "ERROR")
    nasty = "a\x00b\x1b[31m\x0b<&\"'>\ud800\ufffe]]>"
    report["verdicts"][0] |= {"reason": nasty, "subject": nasty, "notes": [nasty], "evidence": {nasty: nasty}}
    report["arms"][0] |= {"status": "failed", "reason": nasty, "tail": [nasty]}
    report["name"] = nasty
    made = suite(report)
    assert made.findall("testcase")[0].attrib["name"].startswith("drift[ab")
    assert "<&\"'>" in made.findall("testcase")[0].attrib["name"]
