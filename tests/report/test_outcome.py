from __future__ import annotations

from typing import Any

import pytest

from rlspec.report import outcome
from tests.report import samples


def report(*statuses: str, **fields: Any) -> dict[str, Any]:
    made = samples.load("correctness-pass")
    made["verdicts"] = [samples.verdict(subject=f"m{at}", status=one) for at, one in enumerate(statuses)]
    return {**made, "outcome": statuses[0] if statuses else "BLOCKED", **fields}


@pytest.mark.parametrize(
    ("statuses", "why"),
    [
        (("PASS", "PASS", "MEASURED"), ": 2 judgments within the limits, 1 judgment measured and not gated"),
        (("FAIL", "PASS"), ": 1 of 2 judgments outside the limits: drift m0"),
        (("N/A",), ": 1 judgment not applicable"),
        ((), ": nothing was judged"),
        (("ERROR",) * 6, ": 6 of 6 judgments could not be judged: drift m0, drift m1, drift m2, drift m3 and 2 more"),
    ],
)
def test_why(statuses: tuple[str, ...], why: str) -> None:
    assert outcome.of(report(*statuses)).why == why


def test_a_failed_arm_sends_to_its_log() -> None:
    steps = outcome.of(samples.load("correctness-error")).steps
    assert len(steps) == 1
    assert steps[0].startswith("read logging/") and steps[0].endswith("-feat0.log (arm feat0)")


def test_an_error_without_a_failed_arm_names_the_logs() -> None:
    assert outcome.of(samples.load("parity-error")).steps == ("read the reason above; the logs are in runs/",)
    made = report("ERROR")
    for arm in made["arms"]:
        arm["log"] = f"{arm['name']}.log"
    assert outcome.of(made).steps == ("read the reason above; the logs are base0.log, base1.log, feat0.log",)


def test_a_fail_names_the_commits_between_base_and_feature_in_that_order() -> None:
    made = report("FAIL")
    made["arms"].reverse()
    assert outcome.of(made).steps == ("find the change that did it: git log --oneline 1a2b3c4..9f8e7d6",)
    made["verdicts"][0]["evidence"] = {"surroundings": ["MYLIB_SHIFT"]}
    first, second = outcome.of(made).steps
    assert "git log" in first and second.endswith("now they differ in MYLIB_SHIFT")
    for arm in made["arms"]:
        arm["commit"] = None
    assert "git log" not in outcome.of(made).steps[0]


@pytest.mark.parametrize("cause", ["grey_band", *outcome.CAUSES, None, "new"])
def test_every_cause_of_investigate_has_a_next_step(cause: str | None) -> None:
    made = report("INVESTIGATE")
    made["verdicts"][0]["evidence"] = {"cause": cause}
    assert outcome.of(made).steps[0]


@pytest.mark.parametrize(
    ("status", "code", "met", "exit_text"),
    [
        ("PASS", 0, None, "exit 0: nothing failed"),
        ("FAIL", 1, None, "exit 1: a judgment failed"),
        ("INVESTIGATE", 3, None, "exit 3: a person must look"),
        ("INVESTIGATE", 0, None, "exit 0: allowed by an option"),
        ("ERROR", 4, None, "exit 4: something could not be judged"),
        ("BLOCKED", 5, None, "exit 5: blocked, or nothing was judged"),
        ("FAIL", 0, True, "exit 0: as expected"),
        ("PASS", 1, False, "exit 1: not as expected"),
        ("ERROR", 4, False, "exit 4: something could not be judged"),
    ],
)
def test_exit(status: str, code: int, met: bool | None, exit_text: str) -> None:
    expect = None if met is None else {"status": "FAIL", "met": met, "problems": []}
    assert outcome.of(report(status, exit_code=code, expect=expect)).exit == exit_text


def test_a_control_that_could_not_be_judged_sends_to_the_log() -> None:
    made = samples.load("correctness-error")
    made["expect"] = {"status": "FAIL", "met": False, "problems": ["expected FAIL, got ERROR"]}
    assert outcome.of(made).steps[0].startswith("read logging/")
    assert outcome.of(samples.load("control-missed")).steps[0].startswith("find out why this control")


def test_a_control_says_what_was_expected_and_what_came() -> None:
    assert outcome.of(samples.load("control-missed")).why == ", not as expected: expected FAIL, got PASS"
    assert outcome.of(samples.load("control-met")).why.startswith(", as expected")
