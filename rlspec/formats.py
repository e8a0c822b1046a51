"""What a step line looks like in each log format; those of JSON and of Python dicts are in `json_formats`."""

from __future__ import annotations

import csv
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rlspec.errors import SpecError
from rlspec.printed import is_absent
from rlspec.shapes import STEP, Shape, at_most, loose, same_format, shape_of

DIGITS = frozenset("0123456789.")
# How a number goes on behind its first digits: more digits, a fraction, an exponent, thousands.
MORE = re.compile(r"\d|[.,]\d|[eE][+-]?\d", re.ASCII)
# How one begins before its last digits: digits, a point or a minus that is no hyphen, an exponent, thousands.
BEGUN = re.compile(r"\d$|\d,$|(?<![A-Za-z_.])\.$|(?<![\w.)\]-])-$|\d\.?[eE][+-]?$", re.ASCII)
ZEROS = re.compile(r"(?<![\d.,-])(?<!\d[eE])(?<!\d[eE]\+)0+$", re.ASCII)  # that begin a number and change nothing
BESIDE = DIGITS | set(",-+eE")  # characters by which a number may go on or begin, so that a closer look is due
THOUSANDS = re.compile(r"\d{1,3}(?:,\d{3})+", re.ASCII)
LONGEST = 40  # characters beside a group that are looked at
# What launchers put before a line: [rank0]:, a task number of srun, (Actor pid=123).
PREFIX = re.compile(r"(?:\[[^\]\s,]{1,40}\]: ?|\d{1,6}: |\([^(),]{0,60}\bpid=\d+[^(),]{0,60}\) )*", re.ASCII)


class BadLine(Exception):
    """A line that ought to be a step line and cannot be read; `metric` is `"*"` where no metric can be trusted."""

    def __init__(self, metric: str, text: str) -> None:
        super().__init__(text)
        self.metric = metric


@dataclass(frozen=True, slots=True)
class Line:
    """One step line, values as printed and without units; a field of value None is there but holds no value.

    `faults` says of a metric why the value on this line cannot be trusted.
    """

    step: str
    fields: Mapping[str, str | None]
    total: str | None = None
    faults: Mapping[str, str] | None = None


class Format(ABC):
    """Parses lines in the order of the log.

    `stripped` says that trailing zeros of numbers may be left out, `float32` that values are kept as such, `counted`
    that lines say no step and are numbered.
    """

    stripped = False
    float32 = False
    counted = False

    @abstractmethod
    def parse(self, text: str) -> Line | None:
        """None where the line is no step line. Raises BadLine."""

    def shape(self, text: str, decimals: Mapping[str, int]) -> Shape | None:
        """A shape from a line that `parse` has accepted.

        `decimals` has the most decimals seen of each metric that is wanted, EXACT_DIGITS where its values are exact.
        """
        return None

    def end(self) -> Line | None:
        """The step line that the end of the log completes, where one takes several lines of text."""
        return None

    def recognises(self, head: str) -> bool:
        """Whether a file that begins like this has the format, where single lines do not tell."""
        return False

    def steps(self) -> Sequence[str]:
        """Step numbers to take at the end of the log, if there is one for each line parsed."""
        return ()

    def notes(self) -> list[str]:
        """What was skipped, once all lines are parsed."""
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
        parts, values, end = [loose(text[: head.start(1)]), STEP], {"step": head[1]}, head.end(1)
        if self._head.groups > 1:
            parts += [loose(text[end : head.start(2)]), re.escape(head[2])]
            end = head.end(2)
        for found in self._field.finditer(text, head.end()):
            name, value = found[1], self._unit.sub("", found[2])
            pattern = same_format(value) if name in decimals else r"[^\s|:]+"
            if pattern is None:
                return None
            if name in decimals:
                pattern, values[name] = f"({pattern})", value
            parts += [loose(text[end : found.start(1)]), re.escape(name)]
            parts += [loose(text[found.end(1) : found.start(2)]), pattern]
            end = found.start(2) + len(value)
        return shape_of(text, [*parts, loose(text[end:])], values)


class Csv(Format):
    """A header that names a column `step`, then one row a step; no cell spans lines."""

    stripped = True

    def __init__(self) -> None:
        self._header: list[str] = []
        self._headers = 0

    def parse(self, text: str) -> Line | None:
        if not text.strip():
            return None
        row = _cells(PREFIX.sub("", text, count=1))
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
        empty: list[str] = []
        if '"' in text:
            return None
        for name, cell in zip(self._header, text.split(","), strict=False):
            pattern = STEP if name == "step" else r'[^,"\r\n]*'
            if name == "step":
                values[name] = cell
            elif is_absent(cell):
                pattern = re.escape(cell)
                empty.append(name)
            elif name in decimals:
                known = at_most(cell, decimals[name])
                if known is None:
                    return None
                pattern, values[name] = f"({known})", cell
            parts.append(pattern)
        return shape_of(text, [",".join(parts)], values, empty)

    def notes(self) -> list[str]:
        return [f"the header is repeated {self._headers} times"] if self._headers else []

    def _take_header(self, row: list[str]) -> None:
        self._header = row
        if "step" not in row:
            raise BadLine("*", f"is the header and names no column 'step', only {', '.join(row)[:200]}")
        if len(set(row)) < len(row):
            name = repeated(row)
            raise BadLine("*" if name == "step" else name, f"is the header and names the column {name!r} twice")


def _cells(text: str) -> list[str]:
    try:
        return [cell.strip() for row in csv.reader([text], strict=True) for cell in row]
    except csv.Error as error:
        raise BadLine("*", f"is no row of a table: {error}") from error


def compiled(pattern: str) -> re.Pattern[str]:
    """A user's pattern. SpecError where it is none, and where it counts or nests beyond what re can."""
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise SpecError(f"pattern {pattern!r} is no regular expression: {error}") from error


def metrics_of(pattern: str) -> list[str]:
    """The metrics that a user's pattern names. SpecError as `compiled`."""
    return [name for name in compiled(pattern).groupindex if name not in ("step", "steps")]


class Regex(Format):
    """Lines in which the user's pattern is found: named groups `step`, one a metric, and `steps` if it likes."""

    stripped = True

    def __init__(self, pattern: str | None) -> None:
        if not pattern:
            raise SpecError("reader regex needs a pattern (--pattern RE) with the named groups step and one a metric")
        self._pattern = compiled(pattern)
        if "step" not in self._pattern.groupindex:
            raise SpecError(f"pattern {pattern!r} has no group named step: write the number as (?P<step>\\d+)")
        self._groups = tuple(self._pattern.groupindex.items())

    def parse(self, text: str) -> Line | None:
        found = self._pattern.search(text)
        if found is None or found["step"] is None:
            return None
        fields: dict[str, str | None] = {}
        cut = {}
        spans = found.regs
        for name, group in self._groups:
            start, end = spans[group]
            if start < 0:
                continue  # a group that took no part is no field of this line
            fields[name] = text[start:end]
            near = (text[end : end + 1] in BESIDE and MORE.match(text, end)) or text[start - 1 : start] in BESIDE
            if near and (said := _part(found, name)):
                cut[name] = said
        for name in ("step", "steps") if cut else ():
            if name in cut:
                raise BadLine("*", cut[name])
        return Line(fields.pop("step") or "", fields, fields.pop("steps", None), cut)


def _part(found: re.Match[str], name: str) -> str:
    """Of a group that holds a part of a number only, such as 1.0950 of 1.0950e+03: what stands there; or nothing."""
    value, text, (start, end) = found[name], found.string, found.span(name)
    before, behind = text[max(0, start - LONGEST) : start], text[end : end + LONGEST]
    goes_on = value[-1:] in DIGITS and bool(MORE.match(behind))
    if goes_on and behind[0] == ",":
        goes_on = _thousands(before + value, behind) and not any(other == end + 1 for other, _ in found.regs[1:])
    begun = value[:1] in DIGITS and bool(BEGUN.search(before)) and not ZEROS.search(before)
    if begun and before[-1] == ",":
        begun = _thousands(before, value + behind) and not any(other == start - 1 for _, other in found.regs[1:])
    if not goes_on and not begun:
        return ""
    first = re.split(r"[^\w.,+-]", before)[-1] if begun else ""
    last = re.match(r"(?:,\d|[\w.+-])*", behind, re.ASCII)
    assert last
    how = "the number goes on" if goes_on else "the number begins before it"
    return f"has {name} {value!r}, and {how}: {(first + value + last[0])[:80]!r}; let the group {name} take all of it"


def _thousands(before: str, behind: str) -> bool:
    """Whether a number with separators such as 11,860 reaches over the place between two texts, and no list does."""
    head, tail = re.search(r"\.?[\d,]*$", before, re.ASCII), re.match(r"[\d,]*", behind, re.ASCII)
    assert head and tail
    return bool(THOUSANDS.fullmatch((head[0] + tail[0]).strip(",")))


def repeated(names: Iterable[str]) -> str:
    """The most frequent of some names."""
    return Counter(names).most_common(1)[0][0]
