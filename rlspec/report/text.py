"""Text for people: safe to print, honest when rounded, wrapped by the columns that it fills."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])")
MOST_DIGITS = 17


def clean(text: object) -> str:
    """One line that cannot move a cursor: no escape sequences or control characters, white space as single blanks."""
    return " ".join("".join(map(_safe, ESCAPES.sub("", str(text)))).split())


def log_line(text: object) -> str:
    """The same for a line of a log: blanks stay, and of a progress bar its last state."""
    states = [state for state in ESCAPES.sub("", str(text)).split("\r") if state.strip()]
    return "".join(map(_safe, (states or [""])[-1].expandtabs(4))).rstrip()


def _safe(character: str) -> str:
    category = unicodedata.category(character)
    if category in ("Cc", "Zl", "Zp"):
        return " "
    if category == "Cs":
        return "\N{REPLACEMENT CHARACTER}"
    return "" if category == "Cf" else character


def number(value: Any, near: Iterable[Any] = (), digits: int = 4) -> str:
    """`value` in `digits` digits, or in as many as keep it on its own side of each number in `near`."""
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return clean(value)
    if not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, int):
        return f"{value:,}"
    texts = (_decimal(value, precision) for precision in range(digits, MOST_DIGITS))
    return _faithful(texts, value, near)


def ratio(value: Any, near: Iterable[Any] = ()) -> str:
    """A ratio to two places, or to as many as keep it on its own side of 0 and of each number in `near`."""
    if not isinstance(value, float) or not math.isfinite(value) or abs(value) >= 1e6:
        return number(value)
    return _faithful((f"{value:.{places}f}" for places in range(2, MOST_DIGITS)), value, (0.0, *near))


def percent(value: Any) -> str:
    """A signed percentage to two places."""
    return f"{value:+.2f} %" if isinstance(value, (int, float)) and math.isfinite(value) else number(value)


def _decimal(value: float, digits: int) -> str:
    return f"{value:,.0f}" if 10**digits <= abs(value) < 1e9 else f"{value:.{digits}g}"


def _faithful(texts: Iterable[str], value: float, near: Iterable[Any]) -> str:
    limits = [limit for limit in near if isinstance(limit, (int, float))]
    for text in texts:
        shown = float(text.replace(",", ""))
        if all(_side(shown, limit) == _side(value, limit) for limit in limits):
            return text
    return repr(value)


def _side(value: float, limit: float) -> int:
    return (value > limit) - (value < limit)


def duration(seconds: Any) -> str:
    """Seconds as a person writes them: 0.4s, 41s, 3m 20s, 2h 05m."""
    if not isinstance(seconds, (int, float)) or not math.isfinite(seconds):
        return ""
    if seconds < 10:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, left = divmod(minutes, 60)
    return f"{hours}h {left:02}m" if hours else f"{minutes}m {rest:02}s" if minutes else f"{rest}s"


def flat(value: Any) -> str:
    """A number, a text, or a nest of them, in one line."""
    if isinstance(value, Mapping):
        return ", ".join(f"{clean(key).replace('_', ' ')} {flat(item)}" for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return "; ".join(map(flat, value))
    return number(value)


def columns(text: str) -> int:
    """Columns of a terminal that `text` fills; East Asian wide characters take two, combining ones none."""
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in text)
    return len(text) + wide - sum(unicodedata.category(character) in ("Mn", "Me") for character in text)


def wrap(text: str, width: int, label: str = "") -> list[str]:
    """`text` in lines of at most `width` columns; `label` stands before the first, as many blanks before the others.

    A label that takes more than half of the width is wrapped with the text.
    """
    if 2 * columns(label) > width:
        return wrap(f"{label}{text}", width, label[: len(label) - len(label.lstrip())])
    blank = " " * columns(label)
    lines: list[str] = []
    line, empty = label, True
    for word in text.split():
        if not empty and columns(line) + 1 + columns(word) > width:
            lines, line, empty = [*lines, line], blank, True
        *full, last = pieces(word, max(1, width - len(blank))) if empty else [word]
        for piece in full:
            lines, line = [*lines, line + piece], blank
        line, empty = line + last if empty else f"{line} {last}", False
    return [*lines, line]


def pieces(text: str, width: int) -> Iterator[str]:
    """`text` cut where a line of `width` columns is full, after a blank, slash or dash if one is near."""
    piece = ""
    for character in text:
        if piece and columns(piece + character) > width:
            ends = (piece.rfind(separator) + 1 for separator in " /-_")
            cut = next((end for end in ends if 2 * end >= len(piece)), len(piece))
            yield piece[:cut]
            piece = piece[cut:]
        piece += character
    yield piece
