"""The token stream of a parity spec: what both engines are asked to score.

One JSON object a line, `{"sample": "s0", "prompt": [5, 17], "response": [9, 4]}`. Log-probs are of the response's
tokens; their positions count from the prompt's first. Where an engine generates, `"length": 2` may stand in place of
the response.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlspec import logprob_lines as lines
from rlspec import logprobs
from rlspec.errors import RunError, SpecError
from rlspec.logprob_lines import INT64, BadEntry, shown

KEYS = ("sample", "prompt", "response", "length")
MOST = 1 << 20  # tokens of a sample, far above any model's context: an engine would go on without end


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """One sample: `response` is None where it is still to be generated, of `length` tokens. `line`: of the file."""

    sample: str
    prompt: tuple[int, ...]
    response: tuple[int, ...] | None
    length: int
    line: int = field(default=0, compare=False)


class BadTokens(RunError):
    """The content of a token file cannot be used; names the file, the line and what stands there."""


def read(path: Path) -> tuple[Stream, ...]:
    """All samples of a file, in order. Raises SpecError if it cannot be opened, BadTokens for its content."""
    found: dict[str, Stream] = {}
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if (stream := _line(path, number, raw)) is None:
                    continue
                if stream.sample in found:
                    raise BadTokens(f"{path}:{number}: sample {shown(stream.sample)} stands there twice")
                found[stream.sample] = stream
    except OSError as error:
        raise SpecError(f"cannot read tokens from {path}: {error.strerror or error}") from error
    if not found:
        raise BadTokens(f"{path} holds no samples")
    return tuple(found.values())


def _line(path: Path, number: int, raw: bytes) -> Stream | None:
    try:
        entry = lines.entry(raw)
        return None if entry is None else replace(_stream(entry), line=number)
    except BadEntry as bad:
        raise BadTokens(f"{path}:{number}: {bad}") from None
    except RecursionError:
        raise BadTokens(f"{path}:{number}: nested too deeply") from None


def _stream(entry: dict[str, Any]) -> Stream:
    if unknown := [key for key in entry if key not in KEYS]:
        raise BadEntry(f"unknown key {shown(unknown[0])}; a sample has {', '.join(KEYS)}")
    if "sample" not in entry or "prompt" not in entry:
        raise BadEntry(f"no {'prompt' if 'sample' in entry else 'sample'}")
    name = lines.sample_name(entry["sample"])
    if ("response" in entry) == ("length" in entry):
        both = "both a response and a length" if "response" in entry else "neither a response nor a length"
        raise BadEntry(f"sample {shown(name)} has {both}")
    prompt = _ids(name, "prompt", entry["prompt"])
    if "response" in entry:
        response = _ids(name, "response", entry["response"])
        return Stream(sample=name, prompt=prompt, response=response, length=len(response))
    length = entry["length"]
    if type(length) is not int or length < 1:
        raise BadEntry(f"sample {shown(name)}: length must be a whole number from 1")
    if length > MOST - len(prompt):
        raise BadEntry(f"sample {shown(name)}: prompt and length come to more than {MOST:,} tokens")
    return Stream(sample=name, prompt=prompt, response=None, length=length)


def _ids(name: str, key: str, given: Any) -> tuple[int, ...]:
    if type(given) is not list or not given:
        raise BadEntry(f"sample {shown(name)}: {key} must be a list of at least one token id")
    if not all(type(token) is int and 0 <= token < INT64 for token in given):
        raise BadEntry(f"sample {shown(name)}: {key} must hold token ids, whole numbers from 0")
    return tuple(given)


def generated(streams: tuple[Stream, ...], records: Path) -> tuple[Stream, ...]:
    """The samples with the responses that a rollout drew and wrote. Raises BadTokens where one is not there, whole."""
    drawn = logprobs.read(records)
    found = []
    for stream in streams:
        start, stop = drawn.spans.get(stream.sample, (0, 0))
        first = len(stream.prompt)
        if list(drawn.positions[start:stop]) != list(range(first, first + stop - start)) or start == stop:
            raise BadTokens(f"{records}: sample {shown(stream.sample)} has no response from position {first} on")
        found.append(replace(stream, response=tuple(drawn.tokens[start:stop]), length=stop - start))
    return tuple(found)
