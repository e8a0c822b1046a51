from __future__ import annotations

import math
import random

import pytest

from rlspec.report.text import clean, columns, duration, flat, log_line, number, percent, pieces, ratio, wrap


def test_clean_leaves_one_line_without_control_characters() -> None:
    assert clean("a\x1b[31mred\x1b[0m\tb\r\nc\x07\u202e\u2028d") == "ared b c d"
    assert clean("\x1b]0;title\x07x \ud800") == "x \N{REPLACEMENT CHARACTER}"
    assert clean(3) == "3"


def test_log_line_keeps_blanks_and_shows_the_last_state_of_a_progress_bar() -> None:
    assert log_line("    raise \x1b[1mError\x1b[0m\n") == "    raise Error"
    assert log_line("10%\r50%\r100%\r") == "100%"
    assert log_line("") == ""


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.0, "0"),
        (0.01051234, "0.01051"),
        (3.11162e-05, "3.112e-05"),
        (476409.0, "476,409"),
        (476409, "476,409"),
        (1.5e12, "1.5e+12"),
        (math.nan, "nan"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
        (True, "True"),
        ("a\nb", "a b"),
    ],
)
def test_number(value: object, text: str) -> None:
    assert number(value) == text


def test_a_rounded_number_stays_on_its_side_of_a_limit() -> None:
    assert number(0.0600000001, near=[0.06]) == "0.0600000001"
    assert number(0.06, near=[0.06]) == "0.06"
    assert ratio(2.9999, [3.0, 5.0]) == "2.9999"
    assert ratio(5.0004, [3, 5]) == "5.0004"
    assert ratio(3.0, [3.0, 5.0]) == "3.00"
    assert ratio(0.0004) == "0.0004"
    assert ratio(math.nextafter(3.0, 0.0), [3.0]) == "2.9999999999999996"
    assert ratio(math.nan, [3.0]) == "nan"
    assert ratio(None) == "-"


def test_percent_and_duration() -> None:
    assert percent(-8.328) == "-8.33 %"
    assert percent(None) == "-"
    assert [duration(s) for s in (0.44, 41.0, 59.7, 200.2, 7500)] == ["0.4s", "41s", "1m 00s", "3m 20s", "2h 05m"]
    assert duration(None) == ""


def test_flat_puts_a_nest_in_one_line() -> None:
    assert flat({"kept_mass": 0.5, "names": ["s0", "s\n1"], "none": None}) == "kept mass 0.5, names s0; s 1, none -"


def test_columns_counts_what_a_terminal_shows() -> None:
    assert (columns("loss"), columns("损失"), columns("e\u0301")) == (4, 4, 1)


def test_wrap_keeps_every_word_and_the_width() -> None:
    words = ["fused-router", "损失函数", "x" * 50, "/a/very/long/path/to/a/log/file-of-feat0.log", "a", "é"]
    draw = random.Random(7)
    for _ in range(300):
        text = " ".join(draw.choices(words, k=draw.randint(0, 12)))
        label = draw.choice(["", "  ", "note: ", "  a label of some length: "])
        width = draw.randint(20, 90)
        lines = wrap(text, width, label)
        assert all(columns(line) <= width for line in lines)
        assert "".join("".join(lines).split()) == "".join((label + text).split())


def test_wrap_aligns_with_a_short_label_and_folds_a_long_one() -> None:
    assert wrap("one two three", 14, "note: ") == ["note: one two", "      three"]
    assert wrap("one two", 14, "  a long label: ") == ["  a long", "  label: one", "  two"]


def test_pieces_break_where_words_and_paths_do() -> None:
    assert list(pieces("workspace/run/report.json", 15)) == ["workspace/run/", "report.json"]
    assert list(pieces("x" * 25, 10)) == ["x" * 10, "x" * 10, "x" * 5]
    assert list(pieces("", 10)) == [""]
