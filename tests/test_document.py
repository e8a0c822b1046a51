from __future__ import annotations

from pathlib import Path

import pytest

from rlspec import document

HERE = Path("spec.yaml")


def parse(text):
    return document.parse(text.encode() if isinstance(text, str) else text, HERE)


def one(text):
    made, problems = parse(text)
    assert made is None and len(problems) == 1, problems
    return problems[0]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("3e-4", 3e-4),
        ("1E5", 1e5),
        ("-.5", -0.5),
        ("5.", 5.0),
        ("010", 10),
        ("0o17", 15),
        ("0x1F", 31),
        ("+3", 3),
        ("on", "on"),
        ("no", "no"),
        ("yes", "yes"),
        ("true", True),
        ("False", False),
        ("12:30:45", "12:30:45"),
        ("1_000", "1_000"),
        ("2026-11-29", "2026-11-29"),
        ("~", None),
        ("", None),
        ("null", None),
        ("'5'", "5"),
        ("0b1", "0b1"),
        ("e5", "e5"),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text, value):
    made, _ = parse(f"key: {text}\n")
    assert made.data["key"] == value and type(made.data["key"]) is type(value)


def test_aliases_are_refused_before_what_they_stand_for_is_built(monkeypatch):
    monkeypatch.setattr(document, "_Builder", None)
    lines = ["a0: &a0 [x, x]", *(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 40))]
    made, problems = parse("\n".join(lines))
    assert made is None and {problem.rule for problem in problems} == {"RL003"}


def test_marks():
    made, _ = parse("a: 1\nb:\n  - x\n  - {c/d: 2}\n")
    assert made.values["/a"] == (1, 4)
    assert made.keys["/b"] == (2, 1)
    assert made.values["/b/1/c~1d"] == (4, 11)


def test_keys_are_text():
    made, _ = parse("on: 1\n5: 2\n")
    assert made.data == {"on": 1, "5": 2}


def test_duplicate_key_names_both_lines():
    problem = one("a: 1\nb: 2\na: 3\n")
    assert (problem.rule, problem.line, problem.column) == ("RL002", 3, 1)
    assert "line 1" in problem.message


def test_all_duplicates_are_reported():
    _, problems = parse("a: 1\na: 2\nb: {c: 1, c: 2}\n")
    assert [p.line for p in problems] == [2, 3]


@pytest.mark.parametrize("text", ["a: &x 1\n", "a: &x 1\nb: *x\n", "a: !!str 1\n", "a: !foo {}\n", "<<: *x\n"])
def test_anchors_and_tags_are_refused(text):
    _, problems = parse(text)
    assert problems and {p.rule for p in problems} <= {"RL003", "RL001"}


def test_a_star_in_a_text_is_no_alias():
    made, problems = parse("a: '*x & !y'\n")
    assert not problems and made.data == {"a": "*x & !y"}


@pytest.mark.parametrize("text", [".inf", "-.inf", ".nan", "1e999"])
def test_numbers_are_finite(text):
    assert one(f"a: {text}\n").rule == "RL004"


@pytest.mark.parametrize(
    "raw",
    [b"\xff\xfe", b"a: \x80\n", b"a: [1\n", b"a: \x00\n", b"---\na: 1\n---\nb: 2\n", b"{" * 100_000, b"- " * 100_000,
     b"? " * 5000, b"a: " + b"9" * 5000, b"%YAML 9.9\n---\na: 1\n", b"\t- a: 1"],
)  # fmt: skip
def test_garbage_is_a_problem_not_a_traceback(raw):
    made, problems = parse(raw)
    assert made is None and problems and all(p.line >= 1 for p in problems)


def test_missing_file():
    made, problems = document.read(Path("nowhere.yaml"))
    assert made is None and problems[0].rule == "RL001"


def test_empty_file_is_nothing():
    made, problems = parse("")
    assert made.data is None and not problems
