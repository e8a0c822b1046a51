"""JUnit XML: a test suite for each report, a test case for each verdict."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any
from xml.etree import ElementTree as ET

from rlspec.report import evidence, outcome, rows
from rlspec.report.text import clean, log_line

Report = Mapping[str, Any]
Verdict = Mapping[str, Any]

ILLEGAL = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def render(*reports: Report) -> str:
    """FAIL and INVESTIGATE are failures, ERROR is an error, N/A and BLOCKED are skipped, PASS and MEASURED pass.

    A control that came out as expected passes as a whole; what it came out as stands in its output.
    """
    suites = ET.Element("testsuites")
    suites.extend(map(suite, reports))
    ET.indent(suites)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(suites, encoding="unicode") + "\n"


def suite(report: Report) -> ET.Element:
    """The test suite of one report."""
    cases = [_case(report, verdict) for verdict in report["verdicts"]]
    if report["expect"] is not None:
        cases.append(_expectation(report))
    if not cases:
        cases.append(_nothing_judged(report))
    made = ET.Element("testsuite", name=_text(_suite_name(report)), timestamp=report["created"][:19])
    made.set("tests", str(len(cases)))
    for attribute, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        made.set(attribute, str(sum(case.find(tag) is not None for case in cases)))
    made.set("time", f"{sum(arm['seconds'] or 0 for arm in report['arms']):.3f}")
    properties = ET.SubElement(made, "properties")
    for name, value in _properties(report).items():
        ET.SubElement(properties, "property", name=name, value=_text(value))
    made.extend(cases)
    return made


def _suite_name(report: Report) -> str:
    return rows.name(report).replace(": ", ".", 1)


def _properties(report: Report) -> dict[str, str]:
    found = {
        "rlspec": report["rlspec"],
        "model": report["model"],
        "tag": report["tag"],
        "contract": (report["contract"] or {}).get("name"),
        "run": (report["run"] or {}).get("folder"),
        "status": report["outcome"],
        "exit_code": str(report["exit_code"]),
    }
    commits = {f"commit {arm['name']}": arm["commit"] for arm in report["arms"]}
    return {name: value for name, value in {**found, **commits}.items() if value}


def _case(report: Report, verdict: Verdict) -> ET.Element:
    subject = "" if verdict["subject"] in rows.WHOLE else f"[{verdict['subject']}]"
    case = ET.Element("testcase", classname=_text(_suite_name(report)), name=_text(verdict["judgment"] + subject))
    met = report["expect"] is not None and report["expect"]["met"]
    if not met:
        _RESULTS[verdict["status"]](case, report, verdict)
    ET.SubElement(case, "system-out").text = _text("\n".join(_output(verdict)))
    return case


def _output(verdict: Verdict) -> list[str]:
    lines = [f"{verdict['status']}: {clean(verdict['reason'])}"]
    lines += [f"{name}: {value}" for name, value in evidence.figures(verdict)]
    return lines + [f"note: {clean(note)}" for note in verdict["notes"]]


def _passed(case: ET.Element, report: Report, verdict: Verdict) -> None:
    """Nothing to add: a case without a mark has passed."""


def _failure(case: ET.Element, report: Report, verdict: Verdict) -> None:
    mark = ET.SubElement(case, "failure", type=verdict["status"], message=_text(clean(verdict["reason"])))
    mark.text = _text(" ".join(evidence.sentences(verdict)))


def _error(case: ET.Element, report: Report, verdict: Verdict) -> None:
    mark = ET.SubElement(case, "error", type=verdict["status"], message=_text(clean(verdict["reason"])))
    tails = [line for arm in outcome.failed_arms(report) for line in _arm_tail(arm)]
    mark.text = _text("\n".join(tails))


def _arm_tail(arm: Mapping[str, Any]) -> list[str]:
    return [f"arm {arm['name']}: {clean(arm['reason'] or '')}", f"log {arm['log']}", *map(log_line, arm["tail"])]


def _skipped(case: ET.Element, report: Report, verdict: Verdict) -> None:
    ET.SubElement(case, "skipped", message=_text(f"{verdict['status']}: {clean(verdict['reason'])}"))


_RESULTS: dict[str, Callable[[ET.Element, Report, Verdict], None]] = {
    "PASS": _passed,
    "MEASURED": _passed,
    "FAIL": _failure,
    "INVESTIGATE": _failure,
    "ERROR": _error,
    "BLOCKED": _skipped,
    "N/A": _skipped,
}


def _expectation(report: Report) -> ET.Element:
    expect = report["expect"]
    case = ET.Element("testcase", classname=_text(_suite_name(report)), name=f"expect[{expect['status']}]")
    if not expect["met"]:
        message = "; ".join(map(clean, expect["problems"])) or f"expected {expect['status']}, got {report['outcome']}"
        ET.SubElement(case, "failure", type=report["outcome"], message=_text(message))
    return case


def _nothing_judged(report: Report) -> ET.Element:
    case = ET.Element("testcase", classname=_text(_suite_name(report)), name="judged")
    ET.SubElement(case, "error", type=report["outcome"], message="nothing was judged")
    return case


def _text(value: object) -> str:
    return ILLEGAL.sub("", str(value))
