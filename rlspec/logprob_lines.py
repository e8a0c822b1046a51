"""One line of a log-prob file: what it may hold, and what is wrong with one that cannot be used."""

from __future__ import annotations

import codecs
import json
import math
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from hashlib import blake2b
from typing import Any

HIGHEST = 1e-6  # the log-prob of a sure token, rounded in fp32, may lie a little above 0
INT64 = 2**63
REQUIRED = ("sample", "position", "token", "logprob")
EXAMPLES = 5
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "fp8"}


class BadEntry(Exception):
    """A line that cannot be used; says why, not where."""


class _TwiceError(Exception):
    """A key that stands twice in one object."""


def entry(raw: bytes) -> dict[str, Any] | None:
    """The JSON object of a line, None for a blank one. Raises BadEntry."""
    try:
        text = raw.removeprefix(codecs.BOM_UTF8).decode().strip()
        if not text:
            return None
        found, end = _DECODER.raw_decode(text)
        # Every key has one colon: more colons than keys and the sample's name account for may be a key twice.
        more = text.count(":") - len(found) if type(found) is dict else 0
        if more and ("\\" in text or more != str(found.get("sample")).count(":")):
            _STRICT.raw_decode(text)
    except UnicodeDecodeError:
        raise BadEntry("not UTF-8 text") from None
    except _TwiceError as error:
        raise BadEntry(f"key {error} twice in one object") from None
    except ValueError:
        raise BadEntry("not a whole JSON object: torn or damaged") from None
    if type(found) is not dict or end != len(text):
        raise BadEntry("expected one JSON object and nothing else on the line")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise _TwiceError(shown(next(key for key in keys if keys.count(key) > 1)))
    return found


_DECODER = json.JSONDecoder()
_STRICT = json.JSONDecoder(object_pairs_hook=_unique)


def sample_name(sample: Any) -> str:
    """A sample's name as text. Raises BadEntry."""
    name = str(sample) if type(sample) is int else sample
    if type(name) is not str or not name:
        raise BadEntry(f"sample is {_kind(sample)}, expected a name: text or a whole number")
    return name


def semantics(rest: Mapping[str, Any]) -> dict[str, Any]:
    """The optional keys that an entry declares, equal ways to say a thing made one. Raises BadEntry."""
    for key in unknown(rest):
        close = get_close_matches(key.lower(), [*REQUIRED, "routing", *OPTIONAL], 1, 0.8)
        if close:
            raise BadEntry(f"unknown key {shown(key)}; did you mean {close[0]}?")
    return {key: _declared(key, rest[key]) for key in OPTIONAL if rest.get(key) is not None}


def unknown(rest: Mapping[str, Any]) -> list[str]:
    """Keys that are neither required nor optional."""
    return [key for key in rest if key not in OPTIONAL]


def _declared(key: str, value: Any) -> Any:
    right, expected = OPTIONAL[key]
    if not right(value):
        raise BadEntry(f"{key} is {_kind(value)}, expected {expected}")
    if key == "top_k":
        return max(value, 0)
    if key == "head_dtype":
        plain = value.lower().removeprefix("torch.")
        return DTYPES.get(plain, plain)
    return str(value) if key == "weights" else value


def _is_text(value: Any) -> bool:
    return type(value) is str and value != ""


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and -1e308 < value < 1e308


OPTIONAL: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "engine": (_is_text, "a name"),
    "temperature": (lambda value: _is_number(value) and value >= 0, "a number from 0"),
    "top_p": (lambda value: _is_number(value) and 0 < value <= 1, "a number above 0, at most 1"),
    "top_k": (lambda value: type(value) is int, "a whole number (0 or -1: off)"),
    "weights": (lambda value: type(value) is int or _is_text(value), "a hash or a version of the weights"),
    "tensors": (_is_text, "a hash of the weights' tensors"),
    "processed": (lambda value: value in ("raw", "processed"), "raw or processed"),
    "head_dtype": (_is_text, "a dtype such as bf16 or fp32"),
}


def length(sample: str, columns: Sequence[Any]) -> int:
    """The one length of a sequence's position, token and logprob lists, and of routing if given. Raises BadEntry."""
    lengths = {len(column) if type(column) is list else -1 for column in columns}
    if len(lengths) != 1 or -1 in lengths:
        counts = [f"{len(column)}" if type(column) is list else _kind(column) for column in columns]
        names = ["position", "token", "logprob", "routing"]
        told = ", ".join(f"{name} {count}" for name, count in zip(names, counts, strict=False))
        raise BadEntry(f"sample {shown(sample)}: a sequence needs lists of one length, found {told}")
    if lengths == {0}:
        raise BadEntry(f"sample {shown(sample)} has no tokens; leave it out of both files")
    return lengths.pop()


def experts(routing: Any) -> int:
    """A digest of the experts of one token, whatever their order within a layer. Raises BadEntry."""
    one = [routing] if type(routing) is int else routing
    layers = one if type(one) is list and one and all(type(layer) is list for layer in one) else [one]
    if not one or not all(type(layer) is list and all(type(expert) is int for expert in layer) for layer in layers):
        raise BadEntry("routing of a token is a list of expert numbers, or one such list a layer")
    text = ";".join(",".join(map(str, sorted(layer))) for layer in layers)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def absence(key: str, found: Mapping[str, Any]) -> str:
    """What to say of a required key that is missing."""
    free = [name for name in found if name not in OPTIONAL and name not in REQUIRED]
    close = get_close_matches(key, free, 1, 0.5)
    return f"no {key}" + (f"; is it {shown(close[0])}? The key must be called {key}" if close else "")


def trouble(position: Any, token: Any, logprob: Any) -> str:
    """What is wrong with a token that was refused."""
    if type(position) is not int or not 0 <= position < INT64:
        return f"position is {_kind(position)}, expected a whole number from 0"
    if type(token) is not int or not 0 <= token < INT64:
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


def shown(sample: str) -> str:
    """A sample's name as one printable line of at most 80 characters."""
    plain = sample if sample.isprintable() and sample.strip() == sample else ascii(sample)
    return plain if len(plain) <= 80 else plain[:77] + "..."


def some(items: Sequence[object], joint: str = ", ") -> str:
    """The first few of some items, and how many more there are."""
    more = f" and {len(items) - EXAMPLES} more" if len(items) > EXAMPLES else ""
    return joint.join(map(str, items[:EXAMPLES])) + more
