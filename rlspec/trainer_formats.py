"""What the step lines of nanotron, OLMo-core, verl, slime and MLPerf look like."""

from __future__ import annotations

import json
import re
from collections import Counter
from decimal import Decimal
from typing import Any

from rlspec.formats import PREFIX, BadLine, Format, Line, Text
from rlspec.json_formats import dict_pairs
from rlspec.printed import Shortened, Token

_SUFFIXES = {"K": 3, "M": 6, "G": 9, "B": 9, "T": 12, "P": 15, "E": 18}


class Nanotron(Text):
    """`iteration: 3 / 32 | …`, either with a format of its own for each field or all with three digits and K, M, B."""

    _short = re.compile(r"(-?\d+(?:\.\d+)?)([KMGBTPE])", re.ASCII)

    def __init__(self) -> None:
        super().__init__(
            head=r"\biteration:\s*([+-]?\d\S*)\s*/\s*([^\s|]+)\s*(?=\|)",
            fields=r"\|\s*([^\s:|]+)\s*:\s*([^|]*?)\s*(?=\||$)",
        )

    def parse(self, text: str) -> Line | None:
        line = super().parse(text)
        if line is None:
            return None
        short = "e" not in (line.fields.get("lm_loss") or "e").lower()
        return Line(line.step, {name: _spelled(value, short) for name, value in line.fields.items()}, line.total)

    def shape(self, text: str, decimals: object) -> None:
        return None


def _spelled(value: str | None, short: bool) -> str | None:
    found = Nanotron._short.fullmatch(value or "")
    if found is not None:
        return Shortened(format(Decimal(found[1]).scaleb(_SUFFIXES[found[2]]), "f"))
    return Shortened(value) if short and value is not None and re.fullmatch(r"-?\d[\d.e+-]*", value) else value


class Olmo(Format):
    """A head `[step=3/32,epoch=1]`, then a line for each value, indented by four spaces: `    train/CE loss=10.87`."""

    _head = re.compile(r"\[step=([\d,]+)/([\d,]+)[,\]]", re.ASCII)
    _field = re.compile(r" {3,4}(\S[^=]*?)=(\S.*?) *$")  # PREFIX takes a space, too

    def __init__(self) -> None:
        self._open: Line | None = None
        self._fields: dict[str, str | None] = {}

    def parse(self, text: str) -> Line | None:
        """The block that this line ends; a field belongs to the block above it."""
        found = self._field.match(PREFIX.sub("", text, count=1))
        if found is not None and self._open is not None:
            name, value = found[1], found[2]
            before = self._fields.get(name, value)
            self._fields[name] = value if before == value else f"{before} and {value}"
            return None
        done, head = self.end(), self._head.search(text)
        if head is not None:
            self._open = Line(head[1], {}, head[2])
        return done

    def end(self) -> Line | None:
        done, fields = self._open, self._fields
        self._open, self._fields = None, {}
        return None if done is None else Line(done.step, fields, done.total)


class Verl(Format):
    """`step:3 - actor/pg_loss:0.0012 - actor/ppo_kl:-0.0001 - …`; step 0 is validation only.

    Where verl found no token to compare it prints 0 for what would have been measured; that is no measurement.
    """

    stripped = True
    _head = re.compile(r"(?:^|\s)step:(\d+)(?= - |\s*$)", re.ASCII)
    _valid = re.compile(r"(.*)_valid$")

    def __init__(self) -> None:
        self._unmeasured: Counter[str] = Counter()

    def parse(self, text: str) -> Line | None:
        head = self._head.search(text)
        if head is None:
            return None
        if self._head.search(text, head.end()):
            raise BadLine("*", "holds two step lines that run into each other")
        fields: dict[str, str | None] = {}
        for part in text[head.end() :].split(" - ")[1:]:
            name, colon, value = part.strip().rpartition(":")
            if not colon or name in fields:
                raise BadLine("*", f"has {part.strip()[:60]!r}, " + ("twice" if colon else "which is no key:value"))
            fields[name] = value
        return Line(head[1], self._measured(fields))

    def _measured(self, fields: dict[str, str | None]) -> dict[str, str | None]:
        for name, value in list(fields.items()):
            found = self._valid.fullmatch(name)
            if found is not None and value in ("0", "0.0", "0.000"):
                void = [key for key in fields if key.startswith(found[1] + "_")]
                self._unmeasured[found[1]] += 1
                fields |= dict.fromkeys(void)
        return fields

    def notes(self) -> list[str]:
        return [
            f"{name}_valid is 0 at {count} steps, so the zeros of {name} there are no measurement and were left out"
            for name, count in self._unmeasured.items()
        ]


class Slime(Format):
    """`… step 3: {'train/loss': 0.0012, …}`, a dict of Python's; `perf 3: {…}` counts rollouts and is no step line."""

    stripped = True
    _head = re.compile(r"(?:^|[\s\]])step (\d+): (?=\{)", re.ASCII)

    def parse(self, text: str) -> Line | None:
        head = self._head.search(text)
        if head is None:
            return None
        fields = dict_pairs(text[head.end() :].strip())
        if not fields:
            raise BadLine("*", f"has a dict for step {head[1]} that cannot be read")
        return Line(head[1], fields)


class MLLog(Format):
    """MLPerf's `:::MLLOG {json}`: an event a line, with a `key`, a `value` and its step in `metadata`.

    `value` is a number, or for `tracked_stats` a dict of numbers. The first of STEPS that an event with a value has is
    the step of the whole log; events that count something else (an epoch, where others count samples) are skipped.
    """

    stripped = True
    _token = ":::MLLOG"
    STEPS = ("step_num", "step", "step_number", "iteration", "samples_count", "epoch_num", "epoch_count")

    def __init__(self) -> None:
        self._counts = ""
        self._other: Counter[str] = Counter()

    def parse(self, text: str) -> Line | None:
        _, token, body = text.partition(self._token)
        if not token:
            return None
        if self._token in body:
            raise BadLine("*", "holds two MLLOG events that run into each other")
        try:
            event = json.loads(body, parse_float=Token, parse_int=Token, parse_constant=Token)
        except (ValueError, RecursionError) as error:
            raise BadLine("*", f"is no MLLOG event: {error}") from error
        fields = _numbers(event) if isinstance(event, dict) else {}
        metadata = event.get("metadata") if fields else None
        counted = [name for name in self.STEPS if isinstance(metadata, dict) and isinstance(metadata.get(name), Token)]
        if not counted or not isinstance(metadata, dict):
            return None
        self._counts = self._counts or counted[0]
        if self._counts not in counted:
            self._other[counted[0]] += 1
            return None
        return Line(metadata[self._counts], fields)

    def notes(self) -> list[str]:
        said = [f"steps are {self._counts}"] if self._counts not in ("", *self.STEPS[:4]) else []
        return said + [f"{count} events that count {name} and no {self._counts} were skipped"
                       for name, count in self._other.items()]  # fmt: skip


def _numbers(event: dict[str, Any]) -> dict[str, str | None]:
    """The numbers of an event by name; a number written as text is none."""
    key, value = event.get("key"), event.get("value")
    pairs = value if isinstance(value, dict) else {key: value}
    return {str(name): number for name, number in pairs.items() if isinstance(number, Token)}
