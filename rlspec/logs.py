"""From the bytes that a trainer left to a `Run`.

Lines are cleaned (escape sequences, carriage returns, bad bytes), parsed by the reader's format and joined by step.
What a log leaves unsaid is absent from the run, and what it says twice is a fault of the run, never a guess.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

from rlspec import failure
from rlspec.columns import Table
from rlspec.errors import RunError, SpecError
from rlspec.escapes import ESCAPES
from rlspec.formats import BadLine, Format, Line
from rlspec.joining import findings
from rlspec.json_formats import Dicts, trainer_state
from rlspec.model import Arm, Run, Series
from rlspec.printed import whole_number
from rlspec.readers import GRADIENT_NORMS, NAN_COUNTERS, READERS, Reader, find, understanding
from rlspec.recordings import Recording
from rlspec.shapes import Shape

__all__ = ["GRADIENT_NORMS", "READERS", "read", "survived"]

BLOCK = 1 << 17  # bytes
SNIFFED_LINES = 200
NAMED = 100  # step lines of which the names of the fields are kept
SHAPES = 100  # after so many shapes a log is too irregular to be worth another


def read(path: Path, reader: str, arm: Arm, *, metrics: Sequence[str] = (), pattern: str | None = None) -> Run:
    """The run that a log tells of.

    Without `metrics` the reader's default and timing metrics are taken (jsonl, csv, regex: every numeric field); the
    gradient norm comes with any choice, and a count of NaN steps that is not 0. A metric that the log does not have is
    absent from the series. Raises SpecError where the file, the reader or the pattern cannot be used, RunError where
    reading the file breaks off.
    """
    chosen = find(reader)
    if pattern is not None and reader != "regex":
        raise SpecError(f"reader {reader} takes no pattern: use --reader regex, or leave out --pattern")
    form = chosen.form(pattern)
    if path.is_dir() and not isinstance(form, Recording):
        raise SpecError(f"log {path} is a folder: name the log file in it")
    if not path.exists():
        raise SpecError(f"log {path} does not exist: check its name and the working directory")
    wanted = metrics or (chosen.metrics and (*chosen.metrics, *(name for name, _ in chosen.timing.values())))
    log = _Log(path, form, (*wanted, *GRADIENT_NORMS, *chosen.counters) if wanted else ())
    try:
        log.read()
    except OSError as error:
        if not log.count:
            raise SpecError(f"log {path} cannot be read: {error.strerror}") from error
        raise RunError(f"log {path} cannot be read beyond line {log.count}: {error.strerror}") from error
    return _run(log, chosen, arm, metrics)


def survived(path: Path, run: Run, reader: str, pattern: str | None = None) -> str:
    """A note on a traceback in the log of a run that ended well; not on one before the first step of all steps."""
    if not any(not findings(metric, [run]) for metric in run.series):
        return failure.survived(path)
    return failure.survived(path, partial(_first_step_line, form=find(reader).form(pattern)))


def _first_step_line(lines: Sequence[str], form: Format) -> int:
    """The number of the line, counted from 0; 0 as well where none is found."""
    if isinstance(form, Recording):
        return 0
    for at, line in enumerate(lines):
        try:
            if any(form.parse(piece) for piece in line.split("\r")):
                return at
        except BadLine:
            return at
    return 0


class _Log:
    """One log while it is read."""

    def __init__(self, path: Path, form: Format, wanted: Sequence[str]) -> None:
        self.path = path
        self.form = form
        self.unit = "value" if isinstance(form, Recording) else "line"
        self.table = Table(path.name, wanted, form.stripped, form.float32, self.unit)
        self.totals: dict[int, int] = {}
        self.count = 0
        self.first_lines: list[str] = []
        self.names: dict[str, None] = {}
        self._shape: Shape | None = None
        self._shapes = 0

    def read(self) -> None:
        if isinstance(self.form, Recording):
            self._recording(self.form)
            return
        text, ended = "", True
        for text, ended in _blocks(self.path):
            if not self.count:
                text = text.removeprefix("\ufeff")
                self.first_lines = re.split("[\r\n]", text, maxsplit=SNIFFED_LINES)[:SNIFFED_LINES]
                if isinstance(self.form, Dicts) and self.form.recognises(text):
                    self._trainer_state()
                    return
            if ended:
                self._block(text)
            else:
                self.count += 1
                self._line(self.count, text, ending=True)
        if (last := self.form.end()) is not None:
            self._add(self.count, last, None if ended else text)
        self._renumber()

    def _recording(self, form: Recording) -> None:
        """The values of a binary file, up to the first that is damaged."""
        file = form.files(self.path)[0]
        with file.open("rb") as stream:
            self.first_lines = _clean(stream.read(BLOCK)).split("\n")[:SNIFFED_LINES]
        try:
            for line in form.lines(self.path):
                self.count += 1
                self._add(self.count, line)
        except BadLine as bad:
            self.table.fault(bad.metric, str(bad))

    def _trainer_state(self) -> None:
        try:
            lines, notes = trainer_state(self.path.read_bytes().decode("utf-8", "replace").removeprefix("\ufeff"))
        except BadLine as bad:
            self.table.fault(bad.metric, str(bad))
            return
        self.table.notes += [f"{self.path.name} {note}" for note in notes]
        for index, line in enumerate(lines, 1):
            self._add(index, line)

    def _block(self, text: str) -> None:
        """Whole lines, by the shape if there is one. Where many do not have it, the last of them gives a new one."""
        first = self.count + 1
        if self._shape is not None and "\r" not in text:
            count, steps = self._by_shape(first, text, self._shape)
        else:
            lines = text.split("\n")
            count, steps = len(lines), [line for at, line in enumerate(lines, first) if self._line(at, line)]
        self.count += count
        if len(steps) * 10 > count and self._shapes < SHAPES:
            self._shapes += 1
            self._shape = self.form.shape(steps[-1], self.table.decimals()) or self._shape

    def _by_shape(self, first: int, text: str, shape: Shape) -> tuple[int, list[str]]:
        """Lines that have the shape in bulk, the others one by one. The number of lines, and other step lines."""
        rows: list[tuple[str, ...]] = shape.pattern.findall(text)
        step = shape.names.index("step")
        steps, start = [], 0
        for at in [*(at for at, row in enumerate(rows) if not row[step]), len(rows)]:
            if start < at:
                self.table.extend(first + start, shape.names, shape.exponents, shape.empty, rows[start:at])
            if at < len(rows) and self._line(first + at, rows[at][-1]):
                steps.append(rows[at][-1])
            start = at + 1
        return len(rows), steps

    def _line(self, place: int, text: str, ending: bool = False) -> bool:
        """Whether a line is a step line; what stands between carriage returns is a line of its own."""
        if "\r" in text:
            *pieces, text = text.split("\r")
            return any([*(self._line(place, piece) for piece in pieces), self._line(place, text, ending)])
        try:
            line = self.form.parse(text)
        except BadLine as bad:
            self.table.fault(bad.metric, f"line {place} {bad}")
            return False
        return line is not None and self._add(place, line, text if ending else None)

    def _add(self, place: int, line: Line, ending: str | None = None) -> bool:
        try:
            step = whole_number(line.step)
            total = None if line.total is None else whole_number(line.total)
        except ValueError:
            of = "" if line.total is None else f" of {line.total[:40]}"
            said = f"{self.unit} {place} has the step number {line.step[:40]!r}{of}"
            self.table.fault("*", f"{said}: not a whole number from 0")
            return False
        if total is not None:
            self.totals.setdefault(total, place)
        for metric, text in (line.faults or {}).items():
            self.table.fault(metric, f"{self.unit} {place} {text}")
        if len(self.table.steps) < NAMED:
            self.names |= dict.fromkeys(line.fields)
        self.table.add(place, step, line.fields, ending)
        return True

    def _renumber(self) -> None:
        steps = self.form.steps()
        if len(steps) != len(self.table.steps):
            return
        try:
            self.table.steps = array("q", map(whole_number, steps))
        except ValueError as error:
            self.table.fault("*", f"has the step number {str(error)[:40]!r}: not a whole number from 0")


def _blocks(path: Path) -> Iterator[tuple[str, bool]]:
    """Whole cleaned lines, a hundred kilobytes at a time, and whether the last of them has its line end."""
    pieces: list[bytes] = []
    with path.open("rb") as file:
        while chunk := file.read(BLOCK):
            head, end, tail = chunk.rpartition(b"\n")
            if end:
                yield _clean(b"".join([*pieces, head])), True
                pieces = [tail]
            else:
                pieces.append(chunk)
    if rest := b"".join(pieces):
        yield _clean(rest), False


def _clean(raw: bytes) -> str:
    text = raw.decode("utf-8", "replace")
    if "\x1b" in text:
        text = ESCAPES.sub("", text)
    return text.replace("\r\n", "\n").removesuffix("\r") if "\r" in text else text


def _run(log: _Log, reader: Reader, arm: Arm, metrics: Sequence[str]) -> Run:
    table, name = log.table, log.path.name
    if len(log.totals) > 1:
        (one, first), (two, second), *_ = log.totals.items()
        table.fault("*", f"says that there are {one} steps at line {first} and {two} steps at line {second}")
    series = {
        metric: replace(one, counted=log.form.counted) for metric, one in table.series(arm.name, reader.repeats).items()
    }
    notes = [*table.notes, *(f"{name}: {note}" for note in log.form.notes())]
    if not table.steps:
        return Run(arm=arm, series={}, faults={"*": _nothing(log, reader)}, notes=tuple(notes))
    _fault_usual(log, reader, series)
    timing = [metric for metric, _ in reader.timing.values()]
    notes += table.ambiguous(metric for metric in series if metric not in timing)
    for counter in reader.counters:
        notes += (told := _counted(name, series.get(counter)))
        if counter not in metrics and not (told and counter in NAN_COUNTERS):
            series.pop(counter, None)
    if reader.sentinel in series and all(value == -1 for value in series[reader.sentinel].values):
        notes.append(
            f"{name}: {reader.sentinel} is -1 on every step, the sentinel of a pipeline rank that has no loss: "
            "set LOG_RANK to a rank of the last stage"
        )
    return Run(
        arm=arm,
        series=series,
        steps_expected=next(iter(log.totals), None),
        faults=table.faults,
        notes=tuple(notes),
    )


def _fault_usual(log: _Log, reader: Reader, series: Mapping[str, Series]) -> None:
    """Usual metrics that stand on lines and never have a value, and the lack of any training loss, are faults."""
    table = log.table
    unread = [
        metric for metric in reader.metrics if metric in table.columns.keys() - series.keys() - table.faults.keys()
    ]
    for metric in unread:
        if told := table.without_value(metric):
            table.fault(metric, told)
    losses = [metric for metric in reader.losses if metric in table.columns]
    if losses and not set(losses) & (series.keys() | table.faults.keys()):
        others = ", ".join(islice(log.names, 8)) or "nothing"
        table.fault(losses[0], f"has no {' nor '.join(losses)} on its step lines; they have {others}")


def _counted(log: str, series: Series | None) -> list[str]:
    bad = {at: one for at, one in zip(series.steps, series.values, strict=True) if not one <= 0} if series else {}
    if series is None or not bad:
        return []
    what = "NaN" if all(map(math.isnan, bad.values())) else "above 0"
    return [f"{log}: {series.metric} is {what} at {len(bad)} steps, first at step {next(iter(bad))}"]


def _nothing(log: _Log, reader: Reader) -> str:
    """Why a log has no step line."""
    said = log.table.faults.get("*", log.path.name)
    hint = ""
    if other := understanding(log.first_lines, but=reader.name):
        hint = f"; reader {other} understands it (--reader {other})"
    elif any("\0" in line for line in log.first_lines):
        hint = "; it holds NUL bytes, so it is binary or UTF-16 and not UTF-8 text"
    return f"{said}: no step line that reader {reader.name} understands ({log.count} {log.unit}s read){hint}"
