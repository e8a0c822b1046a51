"""Files of log-probs, read into columns.

One JSON object a line: a token `{"sample": "s0", "position": 8, "token": 42, "logprob": -0.7}`, or a sequence, in which
the last three (and `routing`) are lists of one length. `temperature`, `top_p`, `top_k` and `processed` say what the
log-prob is of, not how the token was drawn. The experts of a token, one list, or one list a layer, are those of the
position whose logits give its log-prob.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise, repeat
from pathlib import Path
from typing import Any

from rlspec import logprob_lines as lines
from rlspec.errors import RunError, SpecError
from rlspec.logprob_lines import HIGHEST, INT64, BadEntry, shown, some


class BadLogProbs(RunError):
    """The content of a log-prob file cannot be used; names the file, the line and what stands there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogProbs:
    """One file, a row a token, sorted by sample (in the file's order) and position.

    `spans` maps a sample to its (start, stop) in the columns. `semantics` holds the optional keys that the file
    declares. `routing` is one digest a token of the experts that it went to, None if the file does not say.
    """

    path: Path
    spans: Mapping[str, tuple[int, int]]
    positions: array[int]
    tokens: array[int]
    logprobs: array[float]
    semantics: Mapping[str, Any]
    routing: array[int] | None = None
    notes: tuple[str, ...] = ()


def read(path: Path) -> LogProbs:
    """A log-prob file in memory. Raises SpecError if it cannot be opened, BadLogProbs if its content is unusable."""
    columns = _Columns(path)
    number = 1
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                columns.add(number, raw)
    except BadEntry as bad:
        raise BadLogProbs(f"{path}:{number}: {bad}") from None
    except RecursionError:
        raise BadLogProbs(f"{path}:{number}: nested too deeply") from None
    except OSError as error:
        raise SpecError(f"cannot read log-probs from {path}: {error.strerror or error}") from error
    return columns.finished()


class _Columns:
    """A file being read. `add` is the hot path: it only asks if a line is good, and `lines` finds out what is wrong."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.names: dict[str, int] = {}
        self.samples, self.lines = array("q"), array("q")
        self.positions, self.tokens, self.logprobs = array("q"), array("q"), array("d")
        self.routing = array("Q")
        self.rest: dict[str, Any] | None = None
        self.semantics: dict[str, Any] | None = None
        self.unknown: dict[str, None] = {}
        self.last_index = self.last_position = -1
        self.ordered = True

    def add(self, number: int, raw: bytes) -> None:
        """One line. Raises BadEntry."""
        entry = lines.entry(raw)
        if entry is None:
            return
        try:
            sample, position = entry.pop("sample"), entry.pop("position")
            token, logprob = entry.pop("token"), entry.pop("logprob")
        except KeyError as error:
            raise BadEntry(lines.absence(error.args[0], entry)) from None
        index = self.names.get(sample) if type(sample) is str else None
        if index is None:
            index = self.names.setdefault(lines.sample_name(sample), len(self.names))
        routing = entry.pop("routing", None)
        if entry != self.rest:
            self._declare(entry)
        if list in (type(position), type(token), type(logprob)):
            self._sequence(number, index, str(sample), (position, token, logprob), routing)
        else:
            self._token(number, index, position, token, logprob, routing)

    def finished(self) -> LogProbs:
        """The columns in order. Raises BadLogProbs."""
        total = len(self.logprobs)
        if not total:
            raise BadLogProbs(f"{self.path} holds no tokens")
        if self.routing and len(self.routing) != total:
            have = f"{len(self.routing)} of {total} tokens"
            raise BadLogProbs(f"{self.path} has routing for {have}; give it for all or none")
        if not self.ordered:
            self._sort()
        stops = [bisect_left(self.samples, index + 1) for index in range(len(self.names))]
        ignored = f"{self.path.name}: unknown keys were ignored: {some([*map(shown, self.unknown)])}"
        return LogProbs(
            path=self.path,
            spans=dict(zip(self.names, zip([0, *stops[:-1]], stops, strict=True), strict=True)),
            positions=self.positions,
            tokens=self.tokens,
            logprobs=self.logprobs,
            semantics=self.semantics or {},
            routing=self.routing or None,
            notes=(ignored,) if self.unknown else (),
        )

    def _declare(self, rest: dict[str, Any]) -> None:
        known = lines.semantics(rest)
        self.unknown.update(dict.fromkeys(lines.unknown(rest)))
        if self.semantics is None:
            self.semantics = known
        for key in lines.OPTIONAL:
            if known.get(key) != self.semantics.get(key):
                was, now = (source.get(key, "undeclared") for source in (self.semantics, known))
                raise BadEntry(f"{key} is {now} here and {was} before: one file has one {key}")
        self.rest = rest

    def _sequence(self, number: int, index: int, sample: str, needed: tuple[Any, Any, Any], routing: Any) -> None:
        count = lines.length(sample, needed if routing is None else [*needed, routing])
        for position, token, logprob, experts in zip(*needed, routing or repeat(None, count), strict=True):
            self._token(number, index, position, token, logprob, experts)

    def _token(self, number: int, index: int, position: Any, token: Any, logprob: Any, routing: Any) -> None:
        if not (
            type(position) is int
            and type(token) is int
            and 0 <= position < INT64
            and 0 <= token < INT64
            and (type(logprob) is float or type(logprob) is int)
            and -1e308 < logprob <= HIGHEST
        ):
            raise BadEntry(f"sample {shown([*self.names][index])}: {lines.trouble(position, token, logprob)}")
        if index < self.last_index or (index == self.last_index and position <= self.last_position):
            self.ordered = False
        self.last_index, self.last_position = index, position
        self.samples.append(index)
        self.lines.append(number)
        self.positions.append(position)
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if routing is not None:
            self.routing.append(lines.experts(routing))

    def _sort(self) -> None:
        order = sorted(range(len(self.positions)), key=self.positions.__getitem__)
        order.sort(key=self.samples.__getitem__)
        for name in ("samples", "lines", "positions", "tokens", "logprobs", "routing"):
            column = getattr(self, name)
            if column:
                setattr(self, name, array(column.typecode, map(column.__getitem__, order)))
        for at, (before, after) in enumerate(pairwise(zip(self.samples, self.positions, strict=True)), 1):
            if before == after:
                what = f"sample {shown([*self.names][after[0]])}: duplicate position {after[1]}"
                first = f"already given in line {self.lines[at - 1]}"
                raise BadLogProbs(f"{self.path}:{self.lines[at]}: {what}, {first}")
