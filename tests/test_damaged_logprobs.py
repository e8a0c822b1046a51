"""Damaged files: nothing but SpecError and RunError comes out, and no damage turns into a PASS."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlspec.errors import RunError, SpecError
from tests.parity_files import Token, judged, lines, stream

_NUMBERS = (-1, 2**70, 1.5, -0.0, 1e-7, -1e308, math.nan, math.inf)
_VALUES: tuple[Any, ...] = (*_NUMBERS, None, True, "x", "", [], [1], {}, [[0]])
_EXTRAS = ("temperature", "top_p", "top_k", "weights", "processed", "routing", "engine", "head_dtype", "tokens", "z")


def _in_bytes(rng: random.Random, text: bytes) -> bytes:
    at, length = rng.randrange(len(text)), rng.choice((0, 1, 1, 5, 200))
    return text[:at] + rng.randbytes(rng.choice((0, 1, 1, 3))) + text[at + length :]


def _in_digits(rng: random.Random, text: bytes) -> bytes:
    at = rng.choice([at for at, byte in enumerate(text) if chr(byte) in "0123456789-.:,"])
    return text[:at] + rng.choice("0123456789-.e,:").encode() + text[at + 1 :]


def _in_lines(rng: random.Random, text: bytes) -> bytes:
    kept = text.splitlines(keepends=True)
    at, to = rng.randrange(len(kept)), rng.randrange(len(kept))
    kind = rng.randrange(5)
    if kind == 0:
        del kept[at]
    elif kind == 1:
        kept.insert(to, kept[at])
    elif kind == 2:
        kept[at], kept[to] = kept[to], kept[at]
    elif kind == 3:
        kept = kept[: at + 1]
    else:
        kept[at] = kept[at][: rng.randrange(len(kept[at]))] + kept[to]
    return b"".join(kept)


def _in_values(rng: random.Random, text: bytes) -> bytes:
    kept = text.decode().splitlines()
    at = rng.randrange(len(kept))
    entry = json.loads(kept[at])
    key = rng.choice((*entry, *_EXTRAS))
    if rng.random() < 0.2:
        entry.pop(key, None)
    elif isinstance(entry.get(key), list) and rng.random() < 0.7:
        entry[key][rng.randrange(len(entry[key]))] = rng.choice(_VALUES)
    else:
        entry[key] = rng.choice(_VALUES)
    kept[at] = json.dumps(entry)
    return ("\n".join(kept) + "\n").encode()


def _by_sequence(tokens: Sequence[Token]) -> str:
    names = list(dict.fromkeys(token[0] for token in tokens))
    grouped = {name: [token for token in tokens if token[0] == name] for name in names}
    keys = ("position", "token", "logprob")
    columns = {name: zip(*(token[1:] for token in own), strict=True) for name, own in grouped.items()}
    entries = [{"sample": name, **dict(zip(keys, lists, strict=True))} for name, lists in columns.items()]
    return "".join(json.dumps(entry) + "\n" for entry in entries)


def _plainly(text: bytes) -> dict[tuple[str, int], tuple[int, float]]:
    """A second, naive reader of what was accepted."""
    found: dict[tuple[str, int], tuple[int, float]] = {}
    for line in filter(None, map(str.strip, text.decode("utf-8-sig").split("\n"))):
        entry = json.loads(line)
        columns = [entry[key] for key in ("position", "token", "logprob")]
        columns = columns if isinstance(columns[0], list) else [[column] for column in columns]
        for position, token, logprob in zip(*columns, strict=True):
            assert (str(entry["sample"]), position) not in found
            assert type(position) is int and type(token) is int and type(logprob) in (int, float)
            assert math.isfinite(logprob) and logprob <= 1e-6
            found[str(entry["sample"]), position] = (token, logprob)
    return found


@pytest.mark.parametrize("form", [lines, _by_sequence])
@pytest.mark.parametrize("mutate", [_in_bytes, _in_digits, _in_lines, _in_values])
def test_damage_never_passes(
    tmp_path: Path, mutate: Callable[[random.Random, bytes], bytes], form: Callable[[Sequence[Token]], str]
) -> None:
    rng = random.Random(f"{mutate.__name__} {form.__name__}")
    train = stream(4, 6)
    near = form([(*token[:3], token[3] - 0.01) for token in train]).encode()
    far = form([(*token[:3], token[3] - 0.7 - rng.random()) for token in train]).encode()
    truth = form(train).encode()
    ours, theirs = tmp_path / "rollout.jsonl", tmp_path / "train.jsonl"
    for trial in range(120):
        good = trial % 2 == 0
        left, right = (near if good else far), truth
        for _ in range(rng.choice((1, 1, 2))):
            if rng.random() < 0.5:
                left = mutate(rng, left) or left
            else:
                right = mutate(rng, right) or right
        ours.write_bytes(left)
        theirs.write_bytes(right)
        try:
            got = judged(ours, theirs)
        except (SpecError, RunError):
            continue
        passed = [check for check, verdict in got.items() if verdict.status == "PASS"]
        if not good:
            assert passed == []
        elif passed:
            one, two = _plainly(left), _plainly(right)
            assert {key: token for key, (token, _) in one.items()} == {key: token for key, (token, _) in two.items()}
            d = [two[key][1] - one[key][1] for key in one]
            assert "max_abs_dlogp" not in passed or max(map(abs, d)) <= 0.06
            assert "clip_fraction" not in passed or all(0.8 <= math.exp(x) <= 1.2 for x in d)
            assert "approx_kl" not in passed or math.fsum(math.exp(x) - 1 - x for x in d) / len(d) <= 0.05
