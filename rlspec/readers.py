"""What a step line looks like in each log format, one class a family.

A format parses one cleaned line at a time. From a line that it has parsed it can derive a `Shape`, a pattern for
lines that differ from it in digits only, by which a million lines are read in a second. A shape never matches a line
that `parse` would read otherwise, and a number that it matches tells nothing new about the digits of its metric,
unless it has an exponent.
"""

from __future__ import annotations

import ast
import csv
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal

from rlspec.errors import SpecError

EXACT_DIGITS = 15
MAX_STEP = 2**63 - 1

_NUMBER = re.compile(r"[+-]?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)
_NONFINITE = re.compile(
    r"([+-]?)(?:(nan(?:\(\w*\))?|1\.#(?:qnan|snan|ind)0*)|inf(?:inity)?|1\.#inf0*)", re.IGNORECASE | re.ASCII
)
_WRAPPED = re.compile(r"[A-Za-z_][\w.]*\(([^()]*)\)", re.ASCII)
_ABSENT = {"", "n/a", "na", "none", "null", "-", "--"}

_STEP = r"(\d{1,18})"
_JSON_STEP = r"(0|[1-9]\d{0,17})"
_JSON_NUMBER = r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?"
_PREFIX = re.compile(r"(?:\[[^\]\s,]{1,40}\]: ?|\d{1,6}: |\([^(),]{0,60}\bpid=\d+[^(),]{0,60}\) )*", re.ASCII)
_STRING = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\""
_BARE_NONFINITE = re.compile(rf"{_STRING}|(?<![\w.])-?(?:nan|inf|infinity)(?![\w.(])", re.I | re.ASCII)
_JSON_STRING = r'"[^"\\\x00-\x1f]*"'


class BadLine(Exception):
    """A line that ought to be a step line and cannot be read; `metric` is `"*"` where no metric can be trusted."""

    def __init__(self, metric: str, text: str) -> None:
        super().__init__(text)
        self.metric = metric


class Token(str):
    """A number as it stood in JSON or in a Python dict, without quotes."""


class Quoted(str):
    """A number printed as text with four significant digits, trailing zeros stripped."""


@dataclass(frozen=True, slots=True)
class Line:
    """One step line, values as printed and without units; a field of value None is there but holds no value."""

    step: str
    fields: Mapping[str, str | None]
    total: str | None = None


@dataclass(frozen=True, slots=True)
class Shape:
    """`pattern` matches every line; its groups are the values of `names` in order, then the text of another line.

    One of the names is `step`, empty in another line; `exponents` are names whose numbers have exponents.
    """

    pattern: re.Pattern[str]
    names: tuple[str, ...]
    exponents: frozenset[str]


def is_absent(text: str) -> bool:
    return _bare(text).lower() in _ABSENT


def number(text: str) -> float | None:
    """The value of a printed number, None for one that is marked absent. Raises ValueError."""
    text = _bare(text)
    if _NUMBER.fullmatch(text):
        return float(text.replace(",", ""))
    if is_absent(text):
        return None
    if found := _NONFINITE.fullmatch(text):
        return math.nan if found[2] else float(found[1] + "inf")
    if found := _WRAPPED.fullmatch(text):
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
    if found := _WRAPPED.fullmatch(plain):
        plain = found[1]
    if isinstance(text, Quoted):
        return Decimal(plain).adjusted() - 3, 4
    mantissa, _, exponent = plain.lower().partition("e")
    whole, _, fraction = mantissa.partition(".")
    return int(exponent or 0) - len(fraction), len((whole + fraction).lstrip("+-0"))


def _bare(text: str) -> str:
    return text.strip().strip("'\"").strip()


class Format:
    """Parses lines in the order of the log. `stripped` says that trailing zeros of numbers may be left out."""

    stripped = False

    def parse(self, text: str) -> Line | None:
        """None where the line is no step line. Raises BadLine."""
        raise NotImplementedError

    def shape(self, text: str, decimals: Mapping[str, int]) -> Shape | None:
        """A shape from a line that `parse` has accepted.

        `decimals` has the most decimals seen of each metric that is wanted, EXACT_DIGITS where its values are exact.
        """
        return None

    def steps(self) -> Sequence[str]:
        """Step numbers to take at the end of the log, if there is one for each line parsed."""
        return ()

    def notes(self) -> list[str]:
        return []


class Text(Format):
    """Lines with a head that holds the step (and the number of steps), then fields of a name and a value."""

    def __init__(self, head: str, fields: str, units: str = "") -> None:
        self._head = re.compile(head, re.ASCII)
        self._field = re.compile(fields, re.ASCII)
        self._unit = re.compile(units + "$", re.ASCII)

    def parse(self, text: str) -> Line | None:
        head = self._head.search(text)
        if head is None:
            return None
        if self._head.search(text, head.end()):
            raise BadLine("*", "holds two step lines that run into each other")
        fields: dict[str, str | None] = {}
        for found in self._field.finditer(text, head.end()):
            name, value = found[1], self._unit.sub("", found[2])
            fields[name] = value if fields.get(name, value) == value else f"{fields[name]} and {value}"
        return Line(head[1], fields, head[2] if self._head.groups > 1 else None)

    def shape(self, text: str, decimals: Mapping[str, int]) -> Shape | None:
        head = self._head.search(text)
        if head is None:
            return None
        parts, values, end = [_loose(text[: head.start(1)]), _STEP], {"step": head[1]}, head.end(1)
        if self._head.groups > 1:
            parts += [_loose(text[end : head.start(2)]), re.escape(head[2])]
            end = head.end(2)
        for found in self._field.finditer(text, head.end()):
            name, value = found[1], self._unit.sub("", found[2])
            pattern = _printed(value) if name in decimals else r"[^\s|:]+"
            if pattern is None:
                return None
            if name in decimals:
                pattern, values[name] = f"({pattern})", value
            parts += [_loose(text[end : found.start(1)]), re.escape(name)]
            parts += [_loose(text[found.end(1) : found.start(2)]), pattern]
            end = found.start(2) + len(value)
        return _shape(text, [*parts, _loose(text[end:])], values)


class JsonLines(Format):
    """One JSON object a line with a field `step`."""

    stripped = True

    def __init__(self) -> None:
        self._chatter = 0
        self._stepless = 0

    def parse(self, text: str) -> Line | None:
        text = _PREFIX.sub("", text, count=1).strip()
        if not text.startswith("{"):
            self._chatter += bool(text)
            return None
        pairs = _pairs(text)
        if all(name != "step" for name, _ in pairs):
            self._stepless += 1
            return None
        fields = {name: _scalar(value) for name, value in pairs}
        if len(fields) < len(pairs):
            name = _repeated(name for name, _ in pairs)
            raise BadLine("*", f"has the key {name!r} twice in one object")
        return Line(fields.pop("step") or "", fields)

    def shape(self, text: str, decimals: Mapping[str, int]) -> Shape | None:
        pairs = _pairs(text) if text.startswith("{") else []
        parts: list[tuple[str, str]] = []
        values: dict[str, str] = {}
        for name, value in pairs:
            pattern = _JSON_STEP if name == "step" else _json_pattern(value, decimals.get(name))
            if pattern is None:
                return None
            if isinstance(value, Token) and (name == "step" or name in decimals):
                values[name] = value
            parts.append((re.escape(json.dumps(name)), pattern))
        for comma, colon in ((", ", ": "), (",", ":")):
            if text == "{" + comma.join(json.dumps(name) + colon + _json_text(value) for name, value in pairs) + "}":
                inside = comma.join(name + colon + pattern for name, pattern in parts)
                return _shape(text, [r"\{", inside, r"\}"], values)
        return None

    def notes(self) -> list[str]:
        said = []
        if self._chatter:
            said.append(f"{self._chatter} lines that are no JSON object were skipped")
        if self._stepless:
            said.append(f"{self._stepless} JSON objects without the field step were skipped")
        return said


class Csv(Format):
    """A header that names a column `step`, then one row a step; no cell spans lines."""

    stripped = True

    def __init__(self) -> None:
        self._header: list[str] = []
        self._headers = 0

    def parse(self, text: str) -> Line | None:
        if not text.strip():
            return None
        row = _cells(_PREFIX.sub("", text, count=1))
        if not self._header:
            self._take_header(row)
            return None
        if "step" not in self._header:
            return None
        if row == self._header:
            self._headers += 1
            return None
        if len(row) != len(self._header):
            raise BadLine("*", f"has {len(row)} cells where the header names {len(self._header)} columns")
        fields: dict[str, str | None] = dict(zip(self._header, row, strict=True))
        return Line(fields.pop("step") or "", fields)

    def shape(self, text: str, decimals: Mapping[str, int]) -> Shape | None:
        parts: list[str] = []
        values: dict[str, str] = {}
        if '"' in text:
            return None
        for name, cell in zip(self._header, text.split(","), strict=False):
            pattern = _STEP if name == "step" else r'[^,"\r\n]*'
            if name == "step":
                values[name] = cell
            elif is_absent(cell):
                pattern = re.escape(cell)
            elif name in decimals:
                known = _at_most(cell, decimals[name])
                if known is None:
                    return None
                pattern, values[name] = f"({known})", cell
            parts.append(pattern)
        return _shape(text, [",".join(parts)], values)

    def notes(self) -> list[str]:
        return [f"the header is repeated {self._headers} times"] if self._headers else []

    def _take_header(self, row: list[str]) -> None:
        self._header = row
        if "step" not in row:
            raise BadLine("*", f"is the header and names no column 'step', only {', '.join(row)[:200]}")
        if len(set(row)) < len(row):
            name = _repeated(row)
            raise BadLine("*" if name == "step" else name, f"is the header and names the column {name!r} twice")


class Regex(Format):
    """Lines in which the user's pattern is found: named groups `step`, one a metric, and `steps` if it likes."""

    stripped = True

    def __init__(self, pattern: str | None) -> None:
        if not pattern:
            raise SpecError("reader regex needs a pattern (--pattern RE) with the named groups step and one a metric")
        try:
            self._pattern = re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise SpecError(f"pattern {pattern!r} is no regular expression: {error}") from error
        if "step" not in self._pattern.groupindex:
            raise SpecError(f"pattern {pattern!r} has no group named step: write the number as (?P<step>\\d+)")

    def parse(self, text: str) -> Line | None:
        found = self._pattern.search(text)
        if found is None or found["step"] is None:
            return None
        fields = found.groupdict()
        step, total = fields.pop("step"), fields.pop("steps", None)
        return Line(step, fields, total)


class Dicts(Format):
    """Dicts with a key `loss`, as Python or JSON prints them; they are counted, unless all of them have a step."""

    stripped = True
    _dict = re.compile(r"\{[^{}]*\}")
    _loss = re.compile(r"""\{[^{}]*?(['"])loss\1\s*:""")

    def __init__(self) -> None:
        self._own: list[str | None] = []

    def parse(self, text: str) -> Line | None:
        starts = len(self._loss.findall(text))
        if not starts:
            return None
        found = [pairs for pairs in map(_dict_pairs, self._dict.findall(text)) if "loss" in pairs]
        if len(found) != starts or starts > 1:
            raise BadLine("*", "has a dict with a loss that cannot be read, so the steps cannot be counted")
        fields = found[0]
        self._own.append(fields.pop("step", None))
        return Line(str(len(self._own)), fields)

    def steps(self) -> Sequence[str]:
        return [step for step in self._own if step is not None]


def is_trainer_state(head: str) -> bool:
    """Whether a file that begins like this is a trainer_state.json."""
    return head.lstrip().startswith("{") and '"log_history"' in head


def trainer_state(text: str) -> tuple[list[Line], list[str]]:
    """Step lines and notes from the text of a trainer_state.json. Raises BadLine."""
    try:
        state = json.loads(text, parse_float=Token, parse_int=Token, parse_constant=Token)
    except (ValueError, RecursionError) as error:
        raise BadLine("*", f"trainer_state.json is not whole: {error}") from error
    history = state.get("log_history")
    if not isinstance(history, list):
        raise BadLine("*", "log_history is no list")
    lines = []
    for entry in history:
        if isinstance(entry, dict) and "loss" in entry:
            fields = {name: _scalar(value) for name, value in entry.items()}
            lines.append(Line(fields.pop("step", None) or "null", fields))
    saved, last = state.get("global_step"), state.get("max_steps")
    return lines, [f"the trainer state was saved at step {saved} of {last}"] if saved != last else []


def _pairs(text: str) -> list[tuple[str, object]]:
    """The pairs of one JSON object, numbers as Token. Raises BadLine."""
    try:
        return _decode(text)
    except (ValueError, RecursionError) as error:
        failure = error
    try:
        return _decode(_BARE_NONFINITE.sub(lambda found: _json_constant(found[0]), text))
    except (ValueError, RecursionError):
        raise BadLine("*", f"begins a JSON object that does not parse ({failure}): one whole object a line") from None


def _decode(text: str) -> list[tuple[str, object]]:
    pairs = json.loads(text, parse_float=Token, parse_int=Token, parse_constant=Token, object_pairs_hook=_Pairs)
    assert isinstance(pairs, _Pairs)
    return pairs


class _Pairs(list[tuple[str, object]]):
    """A JSON object, told from a JSON list."""


def _json_constant(text: str) -> str:
    if text[0] in "'\"":
        return text
    return "NaN" if "nan" in text.lower() else "-Infinity" if text[0] == "-" else "Infinity"


def _json_text(value: object) -> str:
    if isinstance(value, Token):
        return value
    return json.dumps(value)


def _json_pattern(value: object, decimals: int | None) -> str | None:
    if value is None:
        return "null"
    if isinstance(value, Token):
        known = _at_most(value, decimals) if decimals is not None else _JSON_NUMBER
        return f"({known})" if known is not None and decimals is not None else known
    if decimals is not None:
        return None
    if isinstance(value, str):
        return re.escape(json.dumps(value)) if is_absent(value) else _JSON_STRING
    return "(?:true|false)" if isinstance(value, bool) else None


def _scalar(value: object) -> str | None:
    """A value as text; what is neither number nor text becomes text that no number can be."""
    return value if value is None or isinstance(value, str) else f"({type(value).__name__})"


def _repeated(names: Iterable[str]) -> str:
    """The most frequent of some names."""
    return Counter(names).most_common(1)[0][0]


def _cells(text: str) -> list[str]:
    try:
        return [cell.strip() for row in csv.reader([text], strict=True) for cell in row]
    except csv.Error as error:
        raise BadLine("*", f"is no row of a table: {error}") from error


def _dict_pairs(text: str) -> dict[str, str | None]:
    """The pairs of a flat dict in Python's or JSON's writing; empty where it is neither."""
    text = re.sub(r"\bnp\.\w+\(([^()]*)\)", r"\1", text)
    quote = "'" if "'" in text else '"'
    text = _BARE_NONFINITE.sub(lambda found: found[0] if found[0][0] in "'\"" else quote + found[0] + quote, text)
    pairs = _literal(text)
    return {str(name): _dict_value(value) for name, value in pairs.items()} if isinstance(pairs, dict) else {}


def _literal(text: str) -> object:
    if "\\" not in text and ('"' not in text or "'" not in text):
        with suppress(ValueError, RecursionError):
            return json.loads(text.replace("'", '"'), parse_float=Token, parse_int=Token)
    try:
        return ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _dict_value(value: object) -> str | None:
    if isinstance(value, str):
        return value if isinstance(value, Token) else Quoted(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return Token(repr(value))
    return _scalar(value)


def _shape(text: str, parts: Iterable[str], values: Mapping[str, str]) -> Shape | None:
    """A shape from the parts of a pattern and the values that its groups have in `text`; None if they do not fit."""
    pattern = re.compile(f"^(?:{''.join(parts)}|(.*))$", re.MULTILINE | re.ASCII)
    found = pattern.match(text)
    if found is None or found.groups() != (*values.values(), None):
        return None
    exponents = frozenset(name for name, value in values.items() if "e" in value.lower())
    return Shape(pattern, tuple(values), exponents)


def _loose(text: str) -> str:
    """A pattern for text that differs in digits and in the width of gaps."""
    return re.sub(r"(?:\\ )+", " +", re.sub(r"[0-9]+", r"\\d+", re.escape(text)))


def _printed(value: str) -> str | None:
    """A pattern for the numbers that the format of this one prints, None for an odd one."""
    if value in ("nan", "inf", "-inf"):
        return value
    found = re.fullmatch(r"-?[\d,]+(?:\.(\d+))?([eE][+-]\d+)?", value, re.ASCII)
    if found is None or not _NUMBER.fullmatch(value):
        return None
    decimals = rf"\.\d{{{len(found[1])}}}" if found[1] else ""
    if found[2]:
        return rf"-?\d{decimals}{found[2][0]}[+-]\d{{2,3}}"
    return rf"-?\d{{1,3}}(?:,\d{{3}})*{decimals}" if "," in value else rf"-?\d+{decimals}"


def _at_most(value: str, decimals: int) -> str | None:
    """A pattern for JSON numbers of so many decimals at most and too few digits to be exact; None for an odd one."""
    if not re.fullmatch(_JSON_NUMBER, value, re.ASCII):
        return None
    if decimals >= EXACT_DIGITS or "e" in value.lower():
        return _JSON_NUMBER
    spare = EXACT_DIGITS - 1 - decimals
    whole = rf"0|[1-9]\d{{0,{spare - 1}}}" if spare else "0"
    return rf"-?(?:{whole})(?:\.\d{{1,{decimals}}})?" if decimals else rf"-?(?:{whole})"
