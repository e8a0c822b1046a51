"""Files of log-probs: read one into columns, and say whether two speak of the same tokens.

One JSON object a line: a token `{"sample": "s0", "position": 8, "token": 42, "logprob": -0.7}`, or a sequence, in which
the last three (and `routing`) are lists of one length. `temperature`, `top_p`, `top_k` and `processed` say what the
log-prob is of, not how the token was drawn. The experts of a token are one list, or one list a layer.
"""

from __future__ import annotations

import codecs
import json
import math
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from hashlib import blake2b
from itertools import pairwise
from operator import sub
from pathlib import Path
from typing import Any

from rlspec.errors import RunError, SpecError

HIGHEST = 1e-6  # the log-prob of a sure token, rounded in fp32, may lie a little above 0
_REQUIRED = ("sample", "position", "token", "logprob")
_INT64 = 2**63
_EXAMPLES = 5
_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "fp8"}
_DIFFERENT = {
    "weights": "the policy that generated is not the one that scored",
    "temperature": "these are log-probs of two distributions",
    "top_p": "these are log-probs of two distributions",
    "top_k": "these are log-probs of two distributions",
    "processed": "a log-prob after temperature, top-p and top-k is not comparable to a raw one",
}


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
    except RecursionError:
        raise BadLogProbs(f"{path}:{number}: nested too deeply") from None
    except OSError as error:
        raise SpecError(f"cannot read log-probs from {path}: {error.strerror or error}") from error
    return columns.finished()


def identity(rollout: LogProbs, train: LogProbs) -> list[str]:
    """Every reason why the two files must not be compared; empty if there is none."""
    both = [name for name in rollout.spans if name in train.spans]
    problems = [_samples("rollout", rollout, train), _samples("train", train, rollout)]
    problems += [_positions(rollout, train, both), _token_ids(rollout, train, both)]
    ours, theirs = rollout.semantics, train.semantics
    problems += [
        f"different {key}: rollout {ours[key]}, train {theirs[key]}; {why}"
        for key, why in _DIFFERENT.items()
        if key in ours and key in theirs and ours[key] != theirs[key]
    ]
    return [problem for problem in problems if problem]


def remarks(rollout: LogProbs, train: LogProbs) -> list[str]:
    """What does not forbid the comparison but may explain its numbers."""
    notes = [*rollout.notes, *train.notes]
    ours, theirs = rollout.semantics, train.semantics
    for key in (*_DIFFERENT, "head_dtype"):
        if (key in ours) != (key in theirs):
            side, value = ("rollout", ours[key]) if key in ours else ("train", theirs[key])
            notes.append(f"only the {side} file declares {key} ({value}); the other is taken to agree")
    if "head_dtype" in ours and "head_dtype" in theirs and ours["head_dtype"] != theirs["head_dtype"]:
        notes.append(
            f"head_dtype differs: rollout {ours['head_dtype']}, train {theirs['head_dtype']}; a finer head on one side "
            "only sets the two further apart than on neither: give both the same"
        )
    if (rollout.routing is None) != (train.routing is None):
        side = "train" if rollout.routing is None else "rollout"
        notes.append(f"only the {side} file has routing, so routing flips cannot be counted")
    return notes


def shown(sample: str) -> str:
    """A sample's name as one printable line of at most 80 characters."""
    plain = sample if sample.isprintable() and sample.strip() == sample else ascii(sample)
    return plain if len(plain) <= 80 else plain[:77] + "..."


def _samples(side: str, here: LogProbs, there: LogProbs) -> str:
    missing = [shown(name) for name in here.spans if name not in there.spans]
    if not missing:
        return ""
    return f"{len(missing)} of {len(here.spans)} samples are in the {side} file only: {_some(missing)}"


def _positions(rollout: LogProbs, train: LogProbs, names: Iterable[str]) -> str:
    found = []
    for name, ours, theirs in _pairs(names, rollout.spans, train.spans):
        mine, other = rollout.positions[ours], train.positions[theirs]
        if mine == other:
            continue
        offsets = set(map(sub, other, mine)) if len(mine) == len(other) else set()
        if len(offsets) == 1:
            found.append(f"sample {shown(name)}: train counts positions {offsets.pop():+d} against the rollout")
            continue
        more, less = sorted({*mine} - {*other}), sorted({*other} - {*mine})
        only = [f"{_some(more)} in the rollout only"] * bool(more) + [f"{_some(less)} in train only"] * bool(less)
        found.append(f"sample {shown(name)}: {', '.join(only)}")
    return f"positions differ in {len(found)} samples: {_some(found, '; ')}" if found else ""


def _token_ids(rollout: LogProbs, train: LogProbs, names: Iterable[str]) -> str:
    common, found = 0, []
    for name, ours, theirs in _pairs(names, rollout.spans, train.spans):
        mine, other = rollout.tokens[ours], train.tokens[theirs]
        if mine == other and rollout.positions[ours] == train.positions[theirs]:
            common += len(mine)
            continue
        known = dict(zip(rollout.positions[ours], mine, strict=True))
        for position, token in zip(train.positions[theirs], other, strict=True):
            if position in known:
                common += 1
                if known[position] != token:
                    found.append((name, position, known[position], token))
    texts = [f"sample {shown(name)} position {at}: rollout {one}, train {two}" for name, at, one, two in found[:3]]
    return f"token ids differ at {len(found)} of {common} positions: {'; '.join(texts)}" if found else ""


def _pairs(
    names: Iterable[str], ours: Mapping[str, tuple[int, int]], theirs: Mapping[str, tuple[int, int]]
) -> Iterator[tuple[str, slice, slice]]:
    return ((name, slice(*ours[name]), slice(*theirs[name])) for name in names)


def _some(items: Sequence[object], joint: str = ", ") -> str:
    more = f" and {len(items) - _EXAMPLES} more" if len(items) > _EXAMPLES else ""
    return joint.join(map(str, items[:_EXAMPLES])) + more


class _Columns:
    """A file being read. `add` is the hot path: it only asks whether a line is good; others find out what is wrong."""

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
        entry = self._entry(number, raw)
        if entry is None:
            return
        try:
            sample, position = entry.pop("sample"), entry.pop("position")
            token, logprob = entry.pop("token"), entry.pop("logprob")
        except KeyError as error:
            raise self._bad(number, _absent(error.args[0], entry)) from None
        index = self.names.get(sample) if type(sample) is str else None
        if index is None:
            index = self._name(number, sample)
        routing = entry.pop("routing", None)
        if entry != self.rest:
            self._declare(number, entry)
        if list in (type(position), type(token), type(logprob)):
            self._sequence(number, index, sample, (position, token, logprob, routing))
        else:
            self._token(number, index, position, token, logprob, routing)

    def finished(self) -> LogProbs:
        total = len(self.logprobs)
        if not total:
            raise BadLogProbs(f"{self.path} holds no tokens")
        if self.routing and len(self.routing) != total:
            have = f"{len(self.routing)} of {total} tokens"
            raise BadLogProbs(f"{self.path} has routing for {have}; give it for all or none")
        if not self.ordered:
            self._sort()
        stops = [bisect_left(self.samples, index + 1) for index in range(len(self.names))]
        ignored = f"{self.path.name}: unknown keys were ignored: {_some([*map(shown, self.unknown)])}"
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

    def _entry(self, number: int, raw: bytes) -> dict[str, Any] | None:
        try:
            text = raw.removeprefix(codecs.BOM_UTF8).decode().strip()
            if not text:
                return None
            entry, end = _DECODER.raw_decode(text)
            # Every key has one colon: more colons than keys and the sample's name account for may be a key twice.
            more = text.count(":") - len(entry) if type(entry) is dict else 0
            if more and ("\\" in text or more != str(entry.get("sample")).count(":")):
                _STRICT.raw_decode(text)
        except UnicodeDecodeError:
            raise self._bad(number, "not UTF-8 text") from None
        except _TwiceError as error:
            raise self._bad(number, f"key {error} twice in one object") from None
        except ValueError:
            raise self._bad(number, "not a whole JSON object: torn or damaged") from None
        if type(entry) is not dict or end != len(text):
            raise self._bad(number, "expected one JSON object and nothing else on the line")
        return entry

    def _name(self, number: int, sample: Any) -> int:
        name = str(sample) if type(sample) is int else sample
        if type(name) is not str or not name:
            raise self._bad(number, f"sample is {_kind(sample)}, expected a name: text or a whole number")
        return self.names.setdefault(name, len(self.names))

    def _declare(self, number: int, rest: dict[str, Any]) -> None:
        for key in (key for key in rest if key not in _OPTIONAL):
            close = get_close_matches(key.lower(), [*_REQUIRED, "routing", *_OPTIONAL], 1, 0.8)
            if close:
                raise self._bad(number, f"unknown key {shown(key)}; did you mean {close[0]}?")
            self.unknown.setdefault(key)
        known = {key: self._value(number, key, rest[key]) for key in _OPTIONAL if rest.get(key) is not None}
        if self.semantics is None:
            self.semantics = known
        for key in _OPTIONAL:
            if known.get(key) != self.semantics.get(key):
                was, now = (source.get(key, "undeclared") for source in (self.semantics, known))
                raise self._bad(number, f"{key} is {now} here and {was} before: one file has one {key}")
        self.rest = rest

    def _value(self, number: int, key: str, value: Any) -> Any:
        right, expected = _OPTIONAL[key]
        if not right(value):
            raise self._bad(number, f"{key} is {_kind(value)}, expected {expected}")
        if key == "top_k":
            return max(value, 0)
        if key == "head_dtype":
            plain = value.lower().removeprefix("torch.")
            return _DTYPES.get(plain, plain)
        return str(value) if key == "weights" else value

    def _sequence(self, number: int, index: int, sample: str, lists: tuple[Any, Any, Any, Any]) -> None:
        *needed, routing = lists
        given = needed if routing is None else [*needed, routing]
        lengths = {len(column) if type(column) is list else -1 for column in given}
        if len(lengths) != 1 or -1 in lengths:
            counts = [f"{len(column)}" if type(column) is list else _kind(column) for column in given]
            names = ["position", "token", "logprob", "routing"]
            told = ", ".join(f"{name} {count}" for name, count in zip(names, counts, strict=False))
            raise self._bad(number, f"sample {shown(str(sample))}: a sequence needs lists of one length, found {told}")
        if lengths == {0}:
            raise self._bad(number, f"sample {shown(str(sample))} has no tokens; leave it out of both files")
        for position, token, logprob, experts in zip(*needed, routing or [None] * lengths.pop(), strict=True):
            self._token(number, index, position, token, logprob, experts)

    def _token(self, number: int, index: int, position: Any, token: Any, logprob: Any, routing: Any) -> None:
        if not (
            type(position) is int
            and type(token) is int
            and 0 <= position < _INT64
            and 0 <= token < _INT64
            and (type(logprob) is float or type(logprob) is int)
            and -1e308 < logprob <= HIGHEST
        ):
            name = shown([*self.names][index])
            raise self._bad(number, f"sample {name}: {_trouble(position, token, logprob)}")
        if index < self.last_index or (index == self.last_index and position <= self.last_position):
            self.ordered = False
        self.last_index, self.last_position = index, position
        self.samples.append(index)
        self.lines.append(number)
        self.positions.append(position)
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if routing is not None:
            self.routing.append(self._experts(number, routing))

    def _experts(self, number: int, routing: Any) -> int:
        one = [routing] if type(routing) is int else routing
        layers = one if type(one) is list and one and all(type(layer) is list for layer in one) else [one]
        if not one or not all(type(layer) is list and all(type(expert) is int for expert in layer) for layer in layers):
            raise self._bad(number, "routing of a token is a list of expert numbers, or one such list a layer")
        text = ";".join(",".join(map(str, sorted(layer))) for layer in layers)
        return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")

    def _sort(self) -> None:
        order = sorted(range(len(self.positions)), key=self.positions.__getitem__)
        order.sort(key=self.samples.__getitem__)
        for name in ("samples", "lines", "positions", "tokens", "logprobs", "routing"):
            column = getattr(self, name)
            if column:
                setattr(self, name, array(column.typecode, map(column.__getitem__, order)))
        for at, (before, after) in enumerate(pairwise(zip(self.samples, self.positions, strict=True)), 1):
            if before == after:
                name = shown([*self.names][after[0]])
                first = f"already given in line {self.lines[at - 1]}"
                raise self._bad(self.lines[at], f"sample {name}: duplicate position {after[1]}, {first}")

    def _bad(self, number: int, message: str) -> BadLogProbs:
        return BadLogProbs(f"{self.path}:{number}: {message}")


class _TwiceError(Exception):
    """A key that stands twice in one object."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entry = dict(pairs)
    if len(entry) != len(pairs):
        keys = [key for key, _ in pairs]
        raise _TwiceError(shown(next(key for key in keys if keys.count(key) > 1)))
    return entry


def _absent(key: str, entry: Mapping[str, Any]) -> str:
    free = [name for name in entry if name not in _OPTIONAL and name not in _REQUIRED]
    close = get_close_matches(key, free, 1, 0.5)
    return f"no {key}" + (f"; is it {shown(close[0])}? The key must be called {key}" if close else "")


def _trouble(position: Any, token: Any, logprob: Any) -> str:
    """What is wrong with a token that was refused."""
    if type(position) is not int or not 0 <= position < _INT64:
        return f"position is {_kind(position)}, expected a whole number from 0"
    if type(token) is not int or not 0 <= token < _INT64:
        return f"position {position}: token is {_kind(token)}, expected a token id, a whole number from 0"
    where = f"position {position}: logprob is {_kind(logprob)}"
    if type(logprob) not in (int, float):
        return f"{where}, expected a number"
    if logprob > HIGHEST and logprob < math.inf:
        return f"{where}, above 0: a probability above 1 is impossible"
    return f"{where}, not a finite log-prob"


def _kind(value: Any) -> str:
    if value is None or type(value) is bool:
        return json.dumps(value)
    if type(value) is str:
        return f"the text {shown(value)}"
    if type(value) is list:
        return "a list"
    if type(value) is dict:
        return "an object"
    return shown(repr(value))


def _is_text(value: Any) -> bool:
    return type(value) is str and value != ""


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and -1e308 < value < 1e308


_OPTIONAL: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "engine": (_is_text, "a name"),
    "temperature": (lambda value: _is_number(value) and value >= 0, "a number from 0"),
    "top_p": (lambda value: _is_number(value) and 0 < value <= 1, "a number above 0, at most 1"),
    "top_k": (lambda value: type(value) is int, "a whole number (0 or -1: off)"),
    "weights": (lambda value: type(value) is int or _is_text(value), "a hash or a version of the weights"),
    "processed": (lambda value: value in ("raw", "processed"), "raw or processed"),
    "head_dtype": (_is_text, "a dtype such as bf16 or fp32"),
}
_DECODER = json.JSONDecoder()
_STRICT = json.JSONDecoder(object_pairs_hook=_unique)
