"""The table of README.md: every number is there, and every test that it names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
LINES = (HERE / "README.md").read_text(encoding="utf-8").splitlines()
ROWS = [line.strip("| ").split(" | ") for line in LINES if re.match(r"\| \d", line)]


def functions(path):
    return {
        node.name for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.FunctionDef)
    }


OWN = functions(HERE / "test_review.py") | functions(HERE / "test_weaknesses.py")


def named():
    return [name for row in ROWS for name in re.findall(r"`([\w/.:]*test_[\w/.:]+)`", row[2])]


def test_every_number_has_a_row():
    assert [int(row[0]) for row in ROWS] == [*range(1, 36), *range(1, 11)]


def test_every_row_has_a_test_or_a_reason():
    for number, _, here in ROWS:
        assert "test_" in here or re.match(r"chain|kernels: |not applicable: |as \d", here), number


def test_every_test_is_there():
    for name in named():
        path, _, function = name.rpartition("::")
        known = functions(HERE.parent / path) if path else OWN
        assert function in known, name


def test_every_test_here_is_in_the_table():
    assert {name for name in OWN if name.startswith("test_")} <= set(named())
