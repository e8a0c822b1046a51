from __future__ import annotations

import html
import re

import pytest

from rlspec.report import markdown
from tests.report import samples


@pytest.mark.parametrize("name", samples.NAMES)
def test_golden(name: str) -> None:
    assert markdown.render(samples.load(name)) == samples.golden(name, "md")


@pytest.mark.parametrize("text", ["a|b", "<b>", "&amp;", "\\|", "`x`", "*x*", "_x_", "[a](b)", "~~x~~", "a\nb", "\\"])
def test_escape_leaves_no_character_that_markdown_reads(text: str) -> None:
    escaped = markdown.escape(text)
    assert not set("|<>`*[]~\\\n") & set(escaped)
    assert html.unescape(escaped) == text.replace("\n", " ")


def test_names_with_underscores_stay_readable() -> None:
    assert markdown.escape("max_abs_dlogp") == "max_abs_dlogp"


def test_no_name_or_reason_breaks_the_table() -> None:
    report = samples.load("correctness-fail")
    nasty = "x | y\n<script> \\| `|` </details>"
    for one in report["verdicts"]:
        one |= {"subject": nasty, "reason": nasty, "notes": [nasty]}
    report["arms"][0]["name"] = nasty
    report["question"] = nasty
    text = markdown.render(report)
    for block in re.findall(r"(?m)(?:^\|.*\n)+", text):
        assert len({line.count("|") for line in block.splitlines()}) == 1
    assert "<script" not in text
    assert text.count("<details>") == text.count("</details>") == 1 + len(report["verdicts"])


def test_a_log_cannot_leave_its_fence() -> None:
    report = samples.load("correctness-error")
    report["arms"][2]["tail"] = ["```", "````", "# heading", "x" * 5000]
    lines = markdown.render(report).splitlines()
    start = lines.index("`````text")
    assert lines[start + 1 : start + 4] == ["```", "````", "# heading"]
    assert len(lines[start + 4]) < 500
    assert lines[start + 5] == "`````"


def test_status_reason_next_and_exit_code_are_said() -> None:
    text = markdown.render(samples.load("correctness-fail"))
    assert text.startswith("### FAIL: correctness: qwen3-fused-router\n")
    assert "- next: find the change that did it: git log --oneline 1a2b3c4..9f8e7d6" in text
    assert "- exit 1: a judgment failed" in text
    assert "8.19 times" in text


def test_no_verdicts_are_said() -> None:
    report = {**samples.load("blocked"), "verdicts": []}
    assert "Nothing was judged." in markdown.render(report)
