from __future__ import annotations

import re
from typing import Any

import pytest

from rlspec.report import terminal
from rlspec.report.text import columns
from tests.report import samples

CODES = re.compile(r"\x1b\[[0-9;]*m")
WIDTHS = (40, 41, 47, 60, 79, 80, 100, 120, 200)


@pytest.mark.parametrize("name", samples.NAMES)
def test_golden(name: str) -> None:
    assert terminal.render(samples.load(name), width=80, color=False) == samples.golden(name, "80.txt")


@pytest.mark.parametrize("name", samples.NAMES)
def test_golden_verbose(name: str) -> None:
    text = terminal.render(samples.load(name), width=80, color=False, verbose=True)
    assert text == samples.golden(name, "verbose.txt")


@pytest.mark.parametrize("verbose", [False, True])
@pytest.mark.parametrize("name", samples.NAMES)
def test_no_line_is_wider_than_the_terminal_and_nothing_is_lost(name: str, verbose: bool) -> None:
    report = samples.load(name)
    for width in WIDTHS:
        text = terminal.render(report, width=width, color=False, verbose=verbose)
        assert max(map(columns, text.splitlines())) <= width
        assert not any(line != line.rstrip() for line in text.splitlines())
        squeezed = "".join(text.split())
        for one in report["verdicts"]:
            assert one["status"] in squeezed
            if one["status"] not in ("PASS", "MEASURED"):
                assert "".join(one["reason"].split()) in squeezed


@pytest.mark.parametrize("name", samples.NAMES)
def test_colour_adds_codes_and_nothing_else(name: str) -> None:
    report = samples.load(name)
    for width in (40, 80):
        plain = terminal.render(report, width=width, color=False, verbose=True)
        coloured = terminal.render(report, width=width, color=True, verbose=True)
        assert "\x1b" not in plain
        assert f"m{report['outcome']}\x1b[0m" in coloured
        assert CODES.sub("", coloured) == plain


def test_every_status_has_a_colour_of_its_own() -> None:
    assert set(terminal.COLOURS) == {"PASS", "INVESTIGATE", "FAIL", "MEASURED", "ERROR", "BLOCKED", "N/A"}
    assert len(set(terminal.COLOURS.values())) == len(terminal.COLOURS)


def test_hostile_text_stays_text() -> None:
    report = samples.load("correctness-error")
    nasty = "x\x1b[2J\x1b]0;t\x07\r\n\x9b31m\u202eFAIL " + "长" * 60 + "y" * 120
    for one in report["verdicts"]:
        one |= {"subject": nasty, "reason": nasty, "notes": [nasty]}
    report["arms"][2] |= {"name": nasty, "reason": nasty, "tail": [nasty] * 3, "log": nasty, "commit": nasty}
    report |= {"question": nasty, "name": nasty, "model": nasty, "notes": [nasty], "overrides": [nasty]}
    for width in (40, 60, 80):
        text = terminal.render(report, width=width, color=False, verbose=True)
        assert not set("\x1b\x07\r\x9b\u202e") & set(text)
        assert max(map(columns, text.splitlines())) <= width


def test_the_end_of_a_failed_arms_log_is_shown_and_counted() -> None:
    report = samples.load("correctness-error")
    report["arms"][2]["tail"] = [f"line {at}" for at in range(40)]
    text = terminal.render(report, width=80, color=False)
    assert "    line 39\n" in text and "line 28\n" in text and "line 27\n" not in text
    assert "last 12 lines of" in text
    assert "line 0\n" in terminal.render(report, width=80, color=False, verbose=True)


def test_one_reason_for_several_verdicts_is_said_once() -> None:
    text = terminal.render(samples.load("parity-error"), width=100, color=False)
    assert text.count("token ids differ") == 1
    assert "ERROR  max_abs_dlogp, mean_abs_dlogp, approx_kl, clip_fraction, sequence_outliers" in text


def test_notes_that_verdicts_share_are_said_once() -> None:
    report = samples.load("correctness-pass")
    for one in report["verdicts"]:
        one["notes"] = ["base1: three bytes were not UTF-8"]
    report["verdicts"][0]["notes"].append("only here")
    text = terminal.render(report, width=80, color=False)
    assert text.count("note: base1: three bytes were not UTF-8") == 1
    assert "  note: only here" in text


def test_counts_are_said_when_something_was_not_judged() -> None:
    assert "judged: 2 of 3 judgments" in terminal.render(samples.load("correctness-nan-base"), width=80, color=False)
    assert "judged:" not in terminal.render(samples.load("correctness-pass"), width=80, color=False)


def test_overrides_are_shown() -> None:
    text = terminal.render(samples.load("control-missed"), width=80, color=False)
    assert "set trainer.settings.learning_rate=1e-5" in text


@pytest.mark.parametrize(
    ("environ", "isatty", "color"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"TERM": "dumb"}, True, False),
        ({"TERM": "xterm"}, True, True),
        ({"NO_COLOR": "1"}, True, False),
        ({"NO_COLOR": ""}, True, True),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, True, False),
        ({"FORCE_COLOR": "1"}, False, True),
        ({"FORCE_COLOR": "1", "TERM": "dumb"}, False, True),
        ({"FORCE_COLOR": "0"}, True, False),
        ({"FORCE_COLOR": ""}, False, False),
    ],
)
def test_use_color(environ: dict[str, str], isatty: bool, color: bool) -> None:
    assert terminal.use_color(environ, isatty) is color


@pytest.mark.parametrize(
    ("environ", "width"),
    [
        ({}, 93),
        ({"COLUMNS": "120"}, 120),
        ({"COLUMNS": "7"}, 40),
        ({"COLUMNS": "300"}, 200),
        ({"COLUMNS": "0"}, 93),
        ({"COLUMNS": "-5"}, 93),
        ({"COLUMNS": "wide"}, 93),
        ({"COLUMNS": "²"}, 93),
    ],
)
def test_width(environ: dict[str, str], width: int) -> None:
    assert terminal.width(environ, 93) == width


def test_width_is_bounded_where_the_terminal_says_nonsense() -> None:
    assert (terminal.width({}, 0), terminal.width({}, 10_000)) == (40, 200)


def test_a_report_without_verdicts_or_arms_still_says_what_came_out() -> None:
    report: dict[str, Any] = {**samples.load("blocked"), "verdicts": [], "arms": [], "question": ""}
    text = terminal.render(report, width=80, color=False)
    assert "BLOCKED: nothing was judged" in text
