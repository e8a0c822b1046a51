"""Shapes: patterns by which lines that differ in digits only are read a hundred thousand at a time.

A shape never matches a line that its format would read otherwise, and a number that it matches tells nothing new about
the digits of its metric, unless it has an exponent.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rlspec.printed import EXACT_DIGITS, NUMBER

STEP = r"(\d{1,18})"
JSON_NUMBER = r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?"


@dataclass(frozen=True, slots=True)
class Shape:
    """`pattern` matches every line; its groups are the values of `names` in order, then the text of another line.

    One of the names is `step`, empty in another line; `exponents` are names whose numbers have exponents, `empty` those
    that stand in the lines without a value.
    """

    pattern: re.Pattern[str]
    names: tuple[str, ...]
    exponents: frozenset[str]
    empty: frozenset[str]


def shape_of(text: str, parts: Iterable[str], values: Mapping[str, str], empty: Iterable[str] = ()) -> Shape | None:
    """A shape from the parts of a pattern and the values that its groups have in `text`; None if they do not fit."""
    pattern = re.compile(f"^(?:{''.join(parts)}|(.*))$", re.MULTILINE | re.ASCII)
    found = pattern.match(text)
    if found is None or found.groups() != (*values.values(), None):
        return None
    exponents = frozenset(name for name, value in values.items() if "e" in value.lower())
    return Shape(pattern, tuple(values), exponents, frozenset(empty))


def loose(text: str) -> str:
    """A pattern for text that differs in digits and in the width of gaps."""
    return re.sub(r"(?:\\ )+", " +", re.sub(r"[0-9]+", r"\\d+", re.escape(text)))


def same_format(value: str) -> str | None:
    """A pattern for the numbers that a format with a fixed number of decimals prints; None for an odd one."""
    if value in ("nan", "inf", "-inf"):
        return value
    found = re.fullmatch(r"-?[\d,]+(?:\.(\d+))?([eE][+-]\d+)?", value, re.ASCII)
    if found is None or not NUMBER.fullmatch(value):
        return None
    decimals = rf"\.\d{{{len(found[1])}}}" if found[1] else ""
    if found[2]:
        return rf"-?\d{decimals}{found[2][0]}[+-]\d{{2,3}}"
    return rf"-?(?:[1-9]\d{{0,2}}(?:,\d{{3}})+|\d{{1,3}}){decimals}" if "," in value else rf"-?\d+{decimals}"


def at_most(value: str, decimals: int) -> str | None:
    """A pattern for JSON numbers of so many decimals at most and too few digits to be exact; None for an odd one."""
    if not re.fullmatch(JSON_NUMBER, value, re.ASCII):
        return None
    if decimals >= EXACT_DIGITS or "e" in value.lower():
        return JSON_NUMBER
    spare = EXACT_DIGITS - 1 - decimals
    whole = rf"0|[1-9]\d{{0,{spare - 1}}}" if spare else "0"
    return rf"-?(?:{whole})(?:\.\d{{1,{decimals}}})?" if decimals else rf"-?(?:{whole})"
