"""Each file in bad_specs/ holds one mistake; its first line is the place, the code and the exact message."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlspec import linting
from rlspec.rules import RULES

FOLDER = Path(__file__).parent / "bad_specs"
FILES = sorted(FOLDER.glob("*.yaml"))
ELSEWHERE = {"RL219", "RL231", "RL401"}  # about several files, other repositories or catalog data: test_linting.py


def line(problem):
    word = "warning: " if problem.severity == "warning" else ""
    return f"{problem.line}:{problem.column}: {problem.rule} {word}{problem.message}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_message(path):
    expected = path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
    _, problems = linting.lint([path])
    assert expected in [line(problem) for problem in problems]
    severe = [problem for problem in problems if problem.severity == "error"]
    assert {problem.rule for problem in severe} <= {path.stem[:5]}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_name_says_the_rule(path):
    assert path.stem[:5] in RULES


def test_every_rule_has_a_bad_spec():
    assert {path.stem[:5] for path in FILES} | ELSEWHERE == set(RULES)


def test_hints():
    without = []
    for path in FILES:
        _, problems = linting.lint([path])
        without += [path.stem for problem in problems if problem.rule == path.stem[:5] and not problem.hint]
    assert without == NO_HINT


NO_HINT: list[str] = []
