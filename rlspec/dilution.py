"""Tokens on which two files cannot differ, and how far they thin out the means: padding, and log-probs of exactly 0."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile

from rlspec.logprob_lines import shown, some
from rlspec.pairing import Pair

DILUTED = ("mean_abs_dlogp", "approx_kl", "clip_fraction")  # shares and means; a maximum stays what it is
MANY, LONG = 8, 4  # tokens of all runs, or of one, that are no accident
SLIGHTLY, MUCH = 1.02, 1.1  # factors of a mean: fewer pads than many count where they move it much, and so do zeros
NEARLY, FEW = -1e-3, 0.05  # sure tokens are rarely 0 alone: some of their log-probs are a little below


@dataclass(frozen=True, slots=True)
class Thin:
    """What thins out the means: `factor` by which they are larger without what should not count, and notes."""

    factor: float = 1.0
    short: str = ""
    notes: tuple[str, ...] = ()


def find(pair: Pair) -> Thin:
    """Padding, and log-probs of 0 on both sides, which count as masked where none is nearly 0."""
    runs = {name: _run(pair, *span) for name, span in pair.spans.items()}
    told, padded = _padding(pair, runs)
    zeros = {at for at, (one, other) in enumerate(zip(pair.rollout, pair.train, strict=True)) if one == other == 0}
    others, total = zeros - padded, len(pair.d)
    if not (len(others) >= MANY and total / max(1, total - len(others)) >= MUCH):
        others = set()
    near = sum(NEARLY < value < 0 for side in (pair.rollout, pair.train) for value in side)
    masked = others if near < FEW * len(others) else set[int]()
    notes = (told,) * bool(told)
    if others:
        why = "as masked ones do" if masked else "as sure and as masked ones do"
        notes += (f"{len(others)} of {total} tokens have log-prob 0 on both sides, {why}, {_without(total, others)}",)
    out = padded | masked
    short = f"{len(out)} of {total} tokens look like padding or masked, {_without(total, out)}" if out else ""
    return Thin(total / max(1, total - len(out)), short, notes)


def nothing(pair: Pair) -> str | None:
    """What to say of files that are padding throughout; the others have something to compare."""
    if not all(stop - start > 1 and _run(pair, start, stop)[1] == stop - start for start, stop in pair.spans.values()):
        return None
    return "every sample is one token id with one log-prob on both sides, over and over: this gate cannot fail"


def _padding(pair: Pair, runs: Mapping[str, tuple[int, int]]) -> tuple[str, set[int]]:
    """What looks like padding, with its samples, and the places; empty where nothing does.

    It is one token id with one log-prob on both sides, over and over at an end of a sample. A policy may also end in a
    loop of sure tokens: which of the two it is, the numbers do not say.
    """
    found = {name: (first if first > 1 else 0, last if last > 1 else 0) for name, (first, last) in runs.items()}
    places = {at for name, (first, last) in found.items() for at in _ends(*pair.spans[name], first, last)}
    total, longest = len(pair.d), max(max(ends) for ends in found.values())
    factor = total / max(1, total - len(places))
    if not ((factor >= MUCH and longest >= LONG) or (factor >= SLIGHTLY and len(places) >= MANY)):
        return "", set()
    counts = {name: sum(ends) for name, ends in found.items() if any(ends)}
    samples = some([f"{shown(name)} ({count})" for name, count in counts.items()])
    return (
        f"{len(places)} of {total} tokens look like padding, {_without(total, places)}: one token id with one log-prob "
        f"on both sides, over and over at an end of {len(counts)} of {len(pair.spans)} samples: {samples}; leave "
        "padding out of both files, or the loop of a policy that is sure"
    ), places


def _ends(start: int, stop: int, first: int, last: int) -> Iterator[int]:
    yield from range(start, start + first)
    yield from range(stop - last, stop)


def _run(pair: Pair, start: int, stop: int) -> tuple[int, int]:
    """How many tokens of a sample stand in the run at its beginning, and at its end; all of them count once."""
    last = _alike(pair, range(stop - 1, start - 1, -1))
    return (0, last) if last == stop - start else (_alike(pair, range(start, stop)), last)


def _alike(pair: Pair, places: range) -> int:
    """How many of these places, from the first on, have its token, and its log-prob on both sides."""
    token, value = pair.tokens[places[0]], pair.rollout[places[0]]
    same = takewhile(lambda at: pair.tokens[at] == token and pair.rollout[at] == pair.train[at] == value, places)
    return sum(1 for _ in same)


def _without(total: int, out: Collection[int]) -> str:
    return f"and without them the means are {total / max(1, total - len(out)):.3g} times as large"
