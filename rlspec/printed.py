"""Numbers as programs print them: their values, and how many digits say something."""

from __future__ import annotations

import math
import re
from decimal import Decimal

EXACT_DIGITS = 15  # significant digits from which on a printed double counts as exact
MAX_STEP = 2**63 - 1

# A number below 1 has no thousands: 0,947 has a decimal comma.
NUMBER = re.compile(r"[+-]?(?:(?:[1-9]\d{0,2}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)
EITHER_COMMA = re.compile(r"[+-]?[1-9]\d{0,2},\d{3}", re.ASCII)  # of thousands, or of three decimals
NONFINITE = re.compile(
    r"([+-]?)(?:(nan(?:\(\w*\))?|1\.#(?:qnan|snan|ind)0*)|inf(?:inity)?|1\.#inf0*)", re.IGNORECASE | re.ASCII
)
WRAPPED = re.compile(r"[A-Za-z_][\w.]*\(([^()]*)\)", re.ASCII)  # such as np.float64(0.3)
ABSENT = frozenset({"", "n/a", "na", "none", "null", "-", "--"})


class Token(str):
    """A number as it stood in JSON or in a Python dict, without quotes."""


class Quoted(str):
    """A number printed as text with four significant digits, trailing zeros stripped."""

    digits = 4


class Shortened(Quoted):
    """The same with three, such as 1.05M."""

    digits = 3


def is_absent(text: str) -> bool:
    """Whether a text says that there is no value."""
    return _bare(text).lower() in ABSENT


def number(text: str) -> float | None:
    """The value of a printed number, None for one that is marked absent. Raises ValueError."""
    text = _bare(text)
    if NUMBER.fullmatch(text):
        return float(text.replace(",", ""))
    if is_absent(text):
        return None
    if found := NONFINITE.fullmatch(text):
        return math.nan if found[2] else float(found[1] + "inf")
    if found := WRAPPED.fullmatch(text):
        return number(found[1])
    raise ValueError(text)


def whole_number(text: str) -> int:
    """A step number, also one written 3.0. Raises ValueError."""
    if re.fullmatch(r"\d{1,19}", text, re.ASCII):
        step = int(text)
    else:
        value = number(text)
        step = int(value) if value is not None and value.is_integer() else -1
    if not 0 <= step <= MAX_STEP:
        raise ValueError(text)
    return step


def last_digit(text: str, value: float) -> tuple[int, int] | None:
    """The decimal exponent of the last printed digit and how many are significant; None for a value that hides it."""
    if not math.isfinite(value) or (value == 0 and (isinstance(text, Quoted) or "e" in text.lower())):
        return None
    plain = _bare(text).replace(",", "")
    if found := WRAPPED.fullmatch(plain):
        plain = found[1]
    if isinstance(text, Quoted):
        return Decimal(plain).adjusted() - text.digits + 1, text.digits
    mantissa, _, exponent = plain.lower().partition("e")
    whole, _, fraction = mantissa.partition(".")
    return int(exponent or 0) - len(fraction), len((whole + fraction).lstrip("+-0"))


def form(text: str) -> tuple[bool, int, int]:
    """Whether a printed number has an exponent, and how many digits stand before and after its point."""
    mantissa, _, exponent = _bare(text).replace(",", "").lstrip("+-").lower().partition("e")
    whole, _, fraction = mantissa.partition(".")
    return bool(exponent), len(whole), len(fraction)


def _bare(text: str) -> str:
    return text.strip().strip("'\"").strip()
