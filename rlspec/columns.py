"""The step lines of one log as columns, one a metric, until they become series."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import lt

from rlspec.compare import spacing
from rlspec.model import Series
from rlspec.printed import EITHER_COMMA, EXACT_DIGITS, Quoted, form, is_absent, last_digit, number

VALUE, EMPTY = 1, 2  # marks of a step line: it has a value of the metric; it names the metric and has none


@dataclass(slots=True)
class Widths:
    """How many digits the values of a metric were printed with, and the first row and text of each number of decimals.

    The key is whether there is an exponent, and the decimals. Values that were read in bulk have the usual ones.
    """

    counts: Counter[tuple[bool, int]] = field(default_factory=Counter)
    first: dict[tuple[bool, int], tuple[int, str]] = field(default_factory=dict)
    zeros: set[tuple[bool, int]] = field(default_factory=set)

    def note(self, row: int, text: str) -> None:
        _, _, fraction = text.partition(".")
        if fraction.isdigit():
            width = (False, len(fraction))
            if fraction.endswith("0"):
                self.zeros.add(width)
        elif any(map(str.isdigit, text)):
            exponent, _, decimals = form(text)
            width = (exponent, decimals)
        else:
            return  # such as nan
        self.counts[width] += 1
        if width not in self.first:
            self.first[width] = row, text

    def short(self, column: Column) -> list[tuple[int, str]]:
        """Row and text of values with fewer digits than both neighbours, in a log that prints a fixed number of them.

        That it does is known of a format that says so, and where a trailing zero was kept.
        """
        if not self.counts:
            return []
        (usual, _), *_ = self.counts.most_common(1)
        odd = sum(count for width, count in self.counts.items() if width != usual)
        if 10 * odd > len(column.values) or (column.stripped and usual not in self.zeros):
            return []
        fewer = {width: found for width, found in self.first.items() if width[0] == usual[0] and width[1] < usual[1]}
        return [found for width, found in fewer.items() if self._cut(column, width, usual)]

    def _cut(self, column: Column, width: tuple[bool, int], usual: tuple[bool, int]) -> bool:
        """Where a format keeps the significant digits, decimals go with the size of a value: those say nothing."""
        row, text = self.first[width]
        own = sum(form(text)[1:])
        if own <= usual[1]:
            return True
        if self.counts[width] > 1:
            return False
        around = [at for at in (row - 1, row + 1) if 0 <= at < len(column.values) and column.present[at] == VALUE]
        values = [abs(column.values[at]) for at in around if math.isfinite(column.values[at])]
        digits = [(1 if usual[0] else len(str(int(value)))) + usual[1] for value in values]
        return bool(digits) and own < min(digits)


@dataclass(slots=True)
class Column:
    """One metric while its log is read: a value and a mark for each step line, 0 where it does not name the metric.

    `stripped` says that trailing zeros may have been left out, `coarsest` and `finest` are the decimal exponents of the
    last digits seen, `exact` that one value had all digits of a double, `float32` that values were stored as such.
    `comma` is the first text such as 9,947, `points` says that another one shows what commas are.
    """

    stripped: bool
    float32: bool = False
    values: array[float] = field(default_factory=lambda: array("d"))
    present: bytearray = field(default_factory=bytearray)
    coarsest: int | None = None
    finest: int | None = None
    exact: bool = False
    widths: Widths = field(default_factory=Widths)
    comma: str = ""
    points: bool = False

    @property
    def decimals(self) -> int:
        """The most decimals seen, `EXACT_DIGITS` where the values are exact."""
        return EXACT_DIGITS if self.exact else min(max(0, -(self.finest or 0)), EXACT_DIGITS - 1)

    @property
    def resolution(self) -> float:
        """Half a unit of the last printed digit.

        Where a program prints a fixed number of digits the coarsest last digit counts: that of the largest value for
        exponent forms and for texts of four significant digits. Where trailing zeros may have been left out the most
        decimals seen count, and one value of 15 significant digits shows that all are exact: 0. Of float32 it is half a
        unit in the last place of the largest value.
        """
        if self.float32:
            largest = max((abs(value) for value in self.values if math.isfinite(value)), default=0.0)
            return math.ldexp(1.0, math.frexp(largest)[1] - 25) if largest else 0.0
        digit = self.finest if self.stripped else self.coarsest
        return 0.0 if digit is None or (self.stripped and self.exact) else float(f"5e{digit - 1}")

    @property
    def whole(self) -> bool:
        """Whether every step line has a value."""
        return self.present.count(VALUE) == len(self.present)

    def pad(self, count: int, mark: int = 0) -> None:
        """Step lines without a value."""
        self.values.extend(array("d", [math.nan]) * count)
        self.present.extend(bytes([mark]) * count)

    def append(self, text: str, value: float) -> None:
        if not isinstance(text, Quoted):
            self.widths.note(len(self.values), text)
        self.values.append(value)
        self.present.append(VALUE)
        self._note_digit(text, value)
        if not self.points and math.isfinite(value):
            self._note_commas([text])

    def extend(self, texts: Sequence[str], exponents: bool) -> None:
        """Values whose last digit is known already, unless they are written with exponents."""
        try:
            values = array("d", map(float, texts))
        except ValueError:
            values = array("d", map(float, " ".join(texts).replace(",", "").split()))
            self._note_commas(texts)
        else:
            self.points = True
        self.values.extend(values)
        self.present.extend(b"\x01" * len(texts))
        if exponents and self.stripped:
            for text, value in zip(texts, values, strict=True):
                self._note_digit(text, value)
        elif exponents:
            largest = max(max(values), -min(values))
            index = values.index(largest) if largest in values else values.index(-largest)
            self._note_digit(texts[index], values[index])

    def is_cut(self, text: str, value: float) -> bool:
        """Whether a number has fewer digits than those before it."""
        last = last_digit(text, value)
        if last is None or self.coarsest is None or self.finest is None:
            return False
        if self.stripped and self.exact:
            return last[1] < EXACT_DIGITS
        return last[0] > (self.finest if self.stripped else self.coarsest)

    def _note_commas(self, texts: Sequence[str]) -> None:
        self.comma = self.comma or texts[0]
        self.points |= not all(map(EITHER_COMMA.fullmatch, texts))

    def _note_digit(self, text: str, value: float) -> None:
        last = None if self.float32 or (self.stripped and self.exact) else last_digit(text, value)
        if last is None:
            return
        self.stripped &= not isinstance(text, Quoted)
        self.exact |= last[1] >= EXACT_DIGITS
        self.coarsest = last[0] if self.coarsest is None else max(last[0], self.coarsest)
        self.finest = last[0] if self.finest is None else min(last[0], self.finest)


class Table:
    """The step lines of one log in their order. Without `wanted` every field whose first value is a number counts.

    `unit` is what the log counts, lines of text or values.
    """

    def __init__(
        self, log: str, wanted: Iterable[str], stripped: bool, float32: bool = False, unit: str = "line"
    ) -> None:
        self.columns = {name: Column(stripped, float32) for name in wanted}
        self.steps: array[int] = array("q")
        self.notes: list[str] = []
        self._places: array[int] = array("q")
        self._log = log
        self._open = not self.columns
        self._stripped, self._float32, self._unit = stripped, float32, unit
        self._ignored: set[str] = set()
        self._early: dict[str, list[int]] = {}
        self._void: dict[str, tuple[int, str | None]] = {}
        self._faults: dict[str, str] = {}
        self._more: Counter[str] = Counter()
        # Of each metric the others that have stood beside a value of it, and what its lines without one hold.
        self._beside: dict[str, set[str]] = {}
        self._alone: dict[str, dict[int, frozenset[str]]] = {}

    @property
    def faults(self) -> dict[str, str]:
        """Metric to why its series cannot be judged, `*` for all."""
        more = {metric: f"; {count} more like this" for metric, count in self._more.items()}
        return {metric: f"{self._log} {text}{more.get(metric, '')}" for metric, text in self._faults.items()}

    def decimals(self) -> dict[str, int]:
        """The most decimals seen of each metric, as `Format.shape` wants them."""
        return {name: column.decimals for name, column in self.columns.items()}

    def fault(self, metric: str, text: str) -> None:
        """Only the first fault of a metric is kept, the others are counted."""
        if metric in self._faults:
            self._more[metric] += 1
        else:
            self._faults[metric] = text

    def add(self, place: int, step: int, fields: Mapping[str, str | None], ending: str | None = None) -> None:
        """One step line of line number `place`; `ending` is its text if the file ends there without a line end."""
        rows = len(self.steps)
        self.steps.append(step)
        self._places.append(place)
        for name, text in fields.items():
            if name in self.columns or (self._open and name not in self._ignored):
                self._put(rows, name, text, ending)
        filled = frozenset(name for name, text in fields.items() if text is not None and not is_absent(text))
        for name, column in self.columns.items():
            if len(column.values) == rows:
                column.pad(1)
            if column.present[rows] == VALUE:
                self._beside.setdefault(name, set()).update(filled)
            elif column.present[rows] == EMPTY:
                self._alone.setdefault(name, {})[rows] = filled

    def extend(
        self,
        place: int,
        names: Sequence[str],
        exponents: Iterable[str],
        empty: Iterable[str],
        rows: Sequence[Sequence[str]],
    ) -> None:
        """Step lines in bulk: the values of `names`, of which one is `step`, and a last cell that is ignored.

        `empty` are names that stand in each of them without a value.
        """
        self._places.extend(range(place, place + len(rows)))
        filled = {*names} - {"step"}
        for name in filled:
            self._beside.setdefault(name, set()).update(filled)
        for name, texts in zip(names, zip(*rows, strict=True), strict=False):
            if name == "step":
                self.steps.extend(map(int, texts))
            else:
                self.columns[name].extend(texts, name in exponents)
        for name in self.columns.keys() - set(names):
            self.columns[name].pad(len(rows), EMPTY if name in empty else 0)

    def ambiguous(self, names: Iterable[str]) -> Iterator[str]:
        """What of some metrics is read as thousands, and may be meant with a decimal comma, since no value tells."""
        for name in names:
            if (column := self.columns[name]).comma and not column.points:
                read = f"{name} is printed like {column.comma}, which is read as {column.comma.replace(',', '')}"
                yield f"{self._log}: {read}: where that is a decimal comma, print a point"

    def without_value(self, name: str) -> str:
        """Where a metric stands that has no value on any line, empty if it stands nowhere."""
        if name not in self._void:
            return ""
        row, text = self._void[name]
        return f"has {name} {text or ''!r} at {self._unit} {self._places[row]}, and no value of it anywhere"

    def series(self, arm: str, remedy: str) -> dict[str, Series]:
        """Every metric with a value, in ascending steps. Repeats are merged or become faults."""
        ordered = all(map(lt, self.steps, islice(self.steps, 1, None)))
        order = range(len(self.steps)) if ordered else sorted(range(len(self.steps)), key=self.steps.__getitem__)
        found: dict[str, Series] = {}
        merged: dict[str, dict[int, int]] = {}
        for name, column in self.columns.items():
            if VALUE not in column.present:
                continue
            steps, values = self.steps, column.values
            if not ordered or not column.whole:
                rows, merged[name] = self._distinct(name, [r for r in order if column.present[r] == VALUE], remedy)
                steps = array("q", [self.steps[row] for row in rows])
                values = array("d", [column.values[row] for row in rows])
            found[name] = Series(arm=arm, metric=name, steps=steps, values=values, resolution=column.resolution)
            self._due(name, steps)
            self._note_short(name)
        self._note_merged({name: rows for name, rows in merged.items() if rows})
        return found

    def _due(self, name: str, steps: Sequence[int]) -> None:
        """Lines before the first and after the last value that name the metric and have none are missing steps.

        Those between are found where runs are joined. Step 0 or 1 is not judged, so nothing is due there.
        """
        marks = self.columns[name].present
        if EMPTY not in marks:
            return
        apart, first, last = spacing(steps), steps[0], steps[-1]
        outside = ((row, step) for row, step in enumerate(self.steps) if marks[row] == EMPTY and step > 1)
        rows = [row for row, step in outside if not first <= step <= last and (step - first) % apart == 0]
        rows = [row for row in rows if not self._is_of_others(name, row)]
        if rows:
            many = f" ({len(rows)} such {self._unit}s)" if rows[1:] else ""
            self.fault(
                name,
                f"is missing step {self.steps[rows[0]]} of {name}: {self._unit} {self._places[rows[0]]} has that step "
                f"and no value{many}",
            )

    def _is_of_others(self, name: str, row: int) -> bool:
        """Whether a line has values of metrics alone that never stand beside this one, as that of an evaluation has."""
        filled = self._alone.get(name, {}).get(row, frozenset())
        return bool(filled) and filled.isdisjoint(self._beside.get(name, ()))

    def _note_short(self, name: str) -> None:
        column = self.columns[name]
        for row, text in () if name in self._faults else column.widths.short(column):
            self.notes.append(
                f"{self._log} has {name} {text} at {self._unit} {self._places[row]} (step {self.steps[row]}), with "
                "fewer digits than the values around it: a line that another process wrote into?"
            )

    def _note_merged(self, merged: Mapping[str, Mapping[int, int]]) -> None:
        repeats = {row: first for rows in merged.values() for row, first in rows.items()}
        if repeats:
            row, first = min(repeats.items())
            where = f"{self._unit}s {self._places[first]} and {self._places[row]}"
            self.notes.append(
                f"{self._log} repeats {len(repeats)} step {self._unit}s; the equal values of {', '.join(merged)} were "
                f"merged (the first: step {self.steps[row]}, {where})"
            )

    def _distinct(self, name: str, rows: Sequence[int], remedy: str) -> tuple[list[int], dict[int, int]]:
        """The first row of each step, and the later rows with equal values."""
        kept: list[int] = []
        equal: dict[int, int] = {}
        differing: dict[int, int] = {}
        values = self.columns[name].values
        for row in rows:
            if not kept or self.steps[kept[-1]] != self.steps[row]:
                kept.append(row)
            else:
                (equal if _same(values[kept[-1]], values[row]) else differing)[row] = kept[-1]
        if differing:
            row, first = next(iter(differing.items()))
            self.fault(
                name,
                f"has step {self.steps[row]} twice with different values of {name}: {values[first]!r} at "
                f"{self._unit} {self._places[first]} and {values[row]!r} at {self._unit} {self._places[row]} "
                f"({len(differing)} such {self._unit}s; {remedy})",
            )
        return kept, equal

    def _put(self, row: int, name: str, text: str | None, ending: str | None) -> None:
        try:
            value = None if text is None else number(text)
        except ValueError:
            self._refuse(row, name, text or "")
            return
        if text is None or value is None:
            self._leave_empty(row, name, text)
            return
        if name not in self.columns:
            self.columns[name] = Column(self._stripped, self._float32)
            self.columns[name].pad(row)
            for early in self._early.pop(name, ()):
                self.columns[name].present[early] = EMPTY
        column = self.columns[name]
        if ending is not None and ending.rstrip().endswith(text) and column.is_cut(text, value):
            self.fault(
                name,
                f"ends at line {self._places[row]} within {name} {text}, which has fewer digits than the values before "
                "it (add the missing line end if the file is whole)",
            )
        column.append(text, value)

    def _leave_empty(self, row: int, name: str, text: str | None) -> None:
        self._void.setdefault(name, (row, text))
        if name in self.columns:
            self.columns[name].pad(1, EMPTY)
        else:
            self._early.setdefault(name, []).append(row)

    def _refuse(self, row: int, name: str, text: str) -> None:
        """In an open table a field whose first value is no number is no metric."""
        if name in self.columns:
            self.fault(name, f"{self._unit} {self._places[row]} has {name} {text[:80]!r}, which is no number")
        else:
            self._ignored.add(name)


def _same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))
