"""Readers of foreign logs: from the bytes that a trainer left to a `Run`.

Lines are cleaned (colour codes, carriage returns, bad bytes), parsed by the reader's format and joined by step.
What a log leaves unsaid is absent from the run, and what it says twice is a fault of the run, never a guess.
"""

from __future__ import annotations

import difflib
import math
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import lt
from pathlib import Path

from rlspec.errors import RunError, SpecError
from rlspec.model import Arm, Run, Series
from rlspec.readers import (
    EXACT_DIGITS,
    BadLine,
    Csv,
    Dicts,
    Format,
    JsonLines,
    Line,
    Quoted,
    Regex,
    Shape,
    Text,
    is_trainer_state,
    last_digit,
    number,
    trainer_state,
    whole_number,
)

GRADIENT_NORMS = ("gradient-norm", "grad_norm", "grad norm", "grad-norm", "gradient_norm")
BLOCK = 1 << 17
SNIFFED_LINES = 200
SHAPES = 100

_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)|[()][0-9A-Z]|[@-Z\\^_=>])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """A log format. `timing` maps a judgment to the metric that holds it and the factor to s, tokens/s or GiB.

    `throughput_scope` says what the tokens/s are of: `job`, `device`, or empty where the format does not say.
    `counters` count bad steps and ought to stay 0; `sentinel` is a metric that is -1 on ranks that do not have it.
    """

    name: str
    about: str
    form: Callable[[str | None], Format]
    metrics: tuple[str, ...] = ()
    timing: Mapping[str, tuple[str, float]]
    throughput_scope: str = ""
    counters: tuple[str, ...] = ()
    sentinel: str = ""
    repeats: str = "a resumed run: keep one copy of these steps"


_CUSTOM = {
    "step_time": ("step_time", 1.0),
    "throughput": ("tokens_per_second", 1.0),
    "peak_memory": ("peak_memory_gib", 1.0),
}

READERS: dict[str, Reader] = {
    "pithtrain": Reader(
        name="pithtrain",
        about="`… | INFO | step 00000003/00000032 | step-time 4.812 sec | cross-entropy-loss 11.8731 | …`",
        form=lambda _: Text(
            head=r"\| +INFO +\| +step +([+-]?\d[^\s/|]*)/([^\s|]+)",
            fields=r"\| +([^\s|]+) +([^|]*?) *(?=\||$)",
            units=r"(?: +(?:sec|GB))?",
        ),
        metrics=("cross-entropy-loss", "load-balance-loss", "gradient-norm"),
        timing={
            "step_time": ("step-time", 1.0),
            "throughput": ("tokens-per-second", 1.0),
            "peak_memory": ("peak-gpu-memory", 1.0),
        },
        throughput_scope="job",
    ),
    "torchtitan": Reader(
        name="torchtitan",
        about="`… - INFO - step:  3  loss:  8.04040  grad_norm:  1.2345  memory: 12.34GiB(15.60%)  tps: 12,345  …`",
        form=lambda _: Text(
            head=r"- +INFO +- +step:\s*([+-]?\d\S*)",
            fields=r"\s(\w+):\s*(\S+)",
            units=r"(?:GiB(?:\([^()]*\))?|%)?",
        ),
        metrics=("loss", "grad_norm"),
        timing={"throughput": ("tps", 1.0), "peak_memory": ("memory", 1.0)},
        throughput_scope="device",
        sentinel="loss",
        repeats="several ranks print: set LOG_RANK and --local-ranks-filter to one that has the loss; or a resumed run",
    ),
    "megatron": Reader(
        name="megatron",
        about="` iteration        3/      32 | elapsed time per iteration (ms): 812.4 | lm loss: 1.087310E+01 | …`",
        form=lambda _: Text(
            head=r"iteration\s+([+-]?\d[^\s/|]*)\s*/\s*([^\s|]+)\s*(?=\|)",
            fields=r"\|\s*([^\s:|](?:[^:|]*[^\s:|])?)\s*:\s*([^|]*?)\s*(?=\||$)",
        ),
        metrics=("lm loss", "load_balancing_loss", "grad norm"),
        timing={"step_time": ("elapsed time per iteration (ms)", 0.001)},
        counters=("number of skipped iterations", "number of nan iterations"),
    ),
    "huggingface": Reader(
        name="huggingface",
        about="a dict a step, `{'loss': '5.616', 'grad_norm': '0.7746', …}`, counted from 1; or trainer_state.json",
        form=lambda _: Dicts(),
        metrics=("loss", "grad_norm"),
        timing={},
    ),
    "jsonl": Reader(
        name="jsonl",
        about='a JSON object a step with a field step, `{"step": 3, "loss": 8.0404}`',
        form=lambda _: JsonLines(),
        timing=_CUSTOM,
    ),
    "csv": Reader(
        name="csv", about="a header with a column step, then a row a step", form=lambda _: Csv(), timing=_CUSTOM
    ),
    "regex": Reader(
        name="regex",
        about="lines in which --pattern RE is found: named groups step, one a metric, and steps if there is one",
        form=Regex,
        timing=_CUSTOM,
    ),
}


def read(path: Path, reader: str, arm: Arm, *, metrics: Sequence[str] = (), pattern: str | None = None) -> Run:
    """The run that a log tells of.

    Without `metrics` the reader's default and timing metrics are taken (jsonl, csv, regex: every numeric field); the
    gradient norm comes with any choice. A metric that the log does not have is absent from the series. Raises
    SpecError where the file, the reader or the pattern cannot be used, RunError where reading the file breaks off.
    """
    chosen = _find(reader)
    if pattern is not None and reader != "regex":
        raise SpecError(f"reader {reader} takes no pattern: use --reader regex, or leave out --pattern")
    form = chosen.form(pattern)
    if path.is_dir():
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


def _find(reader: str) -> Reader:
    if reader in READERS:
        return READERS[reader]
    near = difflib.get_close_matches(reader, READERS, n=1)
    meant = f", did you mean {near[0]}?" if near else ""
    raise SpecError(f"no reader is named {reader!r}{meant} (readers: {', '.join(READERS)})")


@dataclass(slots=True)
class _Column:
    """One metric while its log is read: a value and a mark of presence for each step line."""

    stripped: bool
    values: array[float] = field(default_factory=lambda: array("d"))
    present: bytearray = field(default_factory=bytearray)
    coarsest: int | None = None
    finest: int | None = None
    exact: bool = False

    @property
    def decimals(self) -> int:
        return EXACT_DIGITS if self.exact else min(max(0, -(self.finest or 0)), EXACT_DIGITS - 1)

    @property
    def resolution(self) -> float:
        """Half a unit of the last printed digit.

        Where a program prints a fixed number of digits the coarsest last digit counts: that of the largest value for
        exponent forms and for texts of four significant digits. Where trailing zeros may have been left out the most
        decimals seen count, and one value of 15 significant digits shows that all are exact: 0.
        """
        digit = self.finest if self.stripped else self.coarsest
        return 0.0 if digit is None or (self.stripped and self.exact) else float(f"5e{digit - 1}")

    def pad(self, count: int) -> None:
        self.values.extend(array("d", [math.nan]) * count)
        self.present.extend(bytes(count))

    def append(self, text: str, value: float) -> None:
        self.values.append(value)
        self.present.append(1)
        self._note_digit(text, value)

    def extend(self, texts: Sequence[str], exponents: bool) -> None:
        """Values whose last digit is known already, unless they are written with exponents."""
        try:
            values = array("d", map(float, texts))
        except ValueError:
            values = array("d", map(float, " ".join(texts).replace(",", "").split()))
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

    def _note_digit(self, text: str, value: float) -> None:
        last = None if self.stripped and self.exact else last_digit(text, value)
        if last is None:
            return
        self.stripped &= not isinstance(text, Quoted)
        self.exact |= last[1] >= EXACT_DIGITS
        self.coarsest = last[0] if self.coarsest is None else max(last[0], self.coarsest)
        self.finest = last[0] if self.finest is None else min(last[0], self.finest)


class _Table:
    """The step lines of one log in their order. Without `wanted` every field whose first value is a number counts."""

    def __init__(self, log: str, wanted: Iterable[str], stripped: bool) -> None:
        self.columns = {name: _Column(stripped) for name in wanted}
        self.steps: array[int] = array("q")
        self.notes: list[str] = []
        self._places: array[int] = array("q")
        self._log = log
        self._open = not self.columns
        self._stripped = stripped
        self._ignored: set[str] = set()
        self._faults: dict[str, str] = {}
        self._more: Counter[str] = Counter()

    @property
    def faults(self) -> dict[str, str]:
        more = {metric: f"; {count} more like this" for metric, count in self._more.items()}
        return {metric: f"{self._log} {text}{more.get(metric, '')}" for metric, text in self._faults.items()}

    def decimals(self) -> dict[str, int]:
        return {name: column.decimals for name, column in self.columns.items()}

    def fault(self, metric: str, text: str) -> None:
        if self._faults.setdefault(metric, text) is not text:
            self._more[metric] += 1

    def add(self, place: int, step: int, fields: Mapping[str, str | None], ending: str | None = None) -> None:
        """One step line of line number `place`; `ending` is its text if the file ends there without a line end."""
        rows = len(self.steps)
        self.steps.append(step)
        self._places.append(place)
        for name, text in fields.items():
            if text is None or (name not in self.columns and (not self._open or name in self._ignored)):
                continue
            try:
                value = number(text)
            except ValueError:
                self._refuse(name, place, text)
                continue
            if value is None:
                continue
            if name not in self.columns:
                self.columns[name] = _Column(self._stripped)
                self.columns[name].pad(rows)
            column = self.columns[name]
            if ending is not None and ending.rstrip().endswith(text) and column.is_cut(text, value):
                self.fault(
                    name,
                    f"ends at line {place} within {name} {text}, which has fewer digits than the values before it "
                    "(add the missing line end if the file is whole)",
                )
            column.append(text, value)
        for column in self.columns.values():
            if len(column.values) == rows:
                column.pad(1)

    def extend(self, place: int, names: Sequence[str], exponents: Iterable[str], rows: Sequence[Sequence[str]]) -> None:
        """Step lines in bulk: the values of `names`, of which one is `step`, and a last cell that is ignored."""
        self._places.extend(range(place, place + len(rows)))
        for name, texts in zip(names, zip(*rows, strict=True), strict=False):
            if name == "step":
                self.steps.extend(map(int, texts))
            else:
                self.columns[name].extend(texts, name in exponents)
        for name in self.columns.keys() - set(names):
            self.columns[name].pad(len(rows))

    def series(self, arm: str, remedy: str) -> dict[str, Series]:
        """Every metric with a value, in ascending steps. Repeats are merged or become faults."""
        ordered = all(map(lt, self.steps, islice(self.steps, 1, None)))
        order = range(len(self.steps)) if ordered else sorted(range(len(self.steps)), key=self.steps.__getitem__)
        found: dict[str, Series] = {}
        merged: dict[str, dict[int, int]] = {}
        for name, column in self.columns.items():
            if 1 not in column.present:
                continue
            steps, values = self.steps, column.values
            if not ordered or 0 in column.present:
                rows, merged[name] = self._distinct(name, [row for row in order if column.present[row]], remedy)
                steps = array("q", [self.steps[row] for row in rows])
                values = array("d", [column.values[row] for row in rows])
            found[name] = Series(arm=arm, metric=name, steps=steps, values=values, resolution=column.resolution)
        self._note_merged({name: rows for name, rows in merged.items() if rows})
        return found

    def _note_merged(self, merged: Mapping[str, Mapping[int, int]]) -> None:
        repeats = {row: first for rows in merged.values() for row, first in rows.items()}
        if repeats:
            row, first = min(repeats.items())
            self.notes.append(
                f"{self._log} repeats {len(repeats)} step lines; the equal values of {', '.join(merged)} were merged "
                f"(the first: step {self.steps[row]}, lines {self._places[first]} and {self._places[row]})"
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
                f"has step {self.steps[row]} twice with different values of {name}: {values[first]!r} at line "
                f"{self._places[first]} and {values[row]!r} at line {self._places[row]} "
                f"({len(differing)} such lines; {remedy})",
            )
        return kept, equal

    def _refuse(self, name: str, place: int, text: str) -> None:
        if name in self.columns:
            self.fault(name, f"line {place} has {name} {text[:80]!r}, which is no number")
        else:
            self._ignored.add(name)


def _same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))


class _Log:
    """One log while it is read."""

    def __init__(self, path: Path, form: Format, wanted: Sequence[str]) -> None:
        self.path = path
        self.form = form
        self.table = _Table(path.name, wanted, form.stripped)
        self.totals: dict[int, int] = {}
        self.count = 0
        self.first_lines: list[str] = []
        self._shape: Shape | None = None
        self._shapes = 0

    def read(self) -> None:
        for text, ended in _blocks(self.path):
            if not self.count:
                text = text.removeprefix("\ufeff")
                self.first_lines = re.split("[\r\n]", text, maxsplit=SNIFFED_LINES)[:SNIFFED_LINES]
                if isinstance(self.form, Dicts) and is_trainer_state(text):
                    self._trainer_state()
                    return
            if ended:
                self._block(text)
            else:
                self.count += 1
                self._line(self.count, text, ending=True)
        self._renumber()

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
        """Lines by the shape where they have it, one by one where they do not."""
        shape = None if "\r" in text else self._shape
        rows: list[tuple[str, ...]] = shape.pattern.findall(text) if shape else [(line,) for line in text.split("\n")]
        key = shape.names.index("step") if shape else 0
        others = [index for index, row in enumerate(rows) if not row[key]] if shape else range(len(rows))
        first, start, sound = self.count + 1, 0, []
        self.count += len(rows)
        for index in [*others, len(rows)]:
            if shape and start < index:
                self.table.extend(first + start, shape.names, shape.exponents, rows[start:index])
            if index < len(rows) and self._line(first + index, rows[index][-1]):
                sound.append(rows[index][-1])
            start = index + 1
        if len(sound) * 10 > len(rows) and self._shapes < SHAPES:
            self._shapes += 1
            self._shape = self.form.shape(sound[-1], self.table.decimals()) or self._shape

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
            self.table.fault("*", f"line {place} has the step number {line.step[:40]!r}{of}: not a whole number from 0")
            return False
        if total is not None:
            self.totals.setdefault(total, place)
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


def _run(log: _Log, reader: Reader, arm: Arm, metrics: Sequence[str]) -> Run:
    table, name = log.table, log.path.name
    if len(log.totals) > 1:
        (one, first), (two, second), *_ = log.totals.items()
        table.fault("*", f"says that there are {one} steps at line {first} and {two} steps at line {second}")
    series = table.series(arm.name, reader.repeats)
    notes = [*table.notes, *(f"{name}: {note}" for note in log.form.notes())]
    if not table.steps:
        said = table.faults.get("*", name)
        none = f"no step line that reader {reader.name} understands ({log.count} lines read)"
        hint = _hint(log.first_lines, reader.name)
        return Run(arm=arm, series={}, faults={"*": f"{said}: {none}{hint}"}, notes=tuple(notes))
    for counter in reader.counters:
        notes += _counted(name, series.get(counter) if counter in metrics else series.pop(counter, None))
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


def _counted(log: str, series: Series | None) -> list[str]:
    bad = [step for step, value in zip(series.steps, series.values, strict=True) if value > 0] if series else []
    return [f"{log}: {series.metric} is above 0 at {len(bad)} steps, first at step {bad[0]}"] if series and bad else []


def _hint(lines: Sequence[str], reader: str) -> str:
    if any("\0" in line for line in lines):
        return "; it holds NUL bytes, so it is binary or UTF-16 and not UTF-8 text"
    for name in sorted(READERS.keys() - {reader, "regex"}, key=lambda name: (name == "huggingface", name)):
        if _understands(READERS[name].form(None), lines):
            return f"; reader {name} understands it (--reader {name})"
    return ""


def _understands(form: Format, lines: Sequence[str]) -> bool:
    if isinstance(form, Dicts) and is_trainer_state("\n".join(lines)):
        return True
    for text in lines:
        try:
            line = form.parse(text)
            if line is not None and line.fields and whole_number(line.step) >= 0:
                return True
        except (BadLine, ValueError):
            continue
    return False


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
        text = _ESCAPE.sub("", text)
    return text.replace("\r\n", "\n").removesuffix("\r") if "\r" in text else text
