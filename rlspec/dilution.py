"""Tokens on which two files cannot differ, and how far they thin out the means: padding, and masked tokens.

Masked tokens have one fill value on both sides. A fill below 0 is told by its frequency: no softmax gives one log-prob
to so many tokens. A 0 may be a sure token's, too: in fp32 its log-prob is 0 where the other tokens have less than 1e-7
together. But then sure tokens come in all degrees, and those a little less sure have log-probs next to 0.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile

from rlspec.logprob_lines import shown, some
from rlspec.pairing import Pair

DILUTED = ("mean_abs_dlogp", "approx_kl", "clip_fraction")  # shares and means; a maximum stays what it is
MANY, LONG = 8, 4  # tokens of all runs, or of one, that are no accident; so many contexts of one value are none, either
SLIGHTLY, MUCH = 1.02, 1.1  # factors of a mean: fewer pads than many count where they move it much, and so do fills
NEARLY, FINE = 0.1, 1e-5  # sure tokens have -log-probs below the one; in fp32 the least of them are below the other
DEEPEST = 1e-18  # logits seldom lead by more than 41
PEAK = 4  # times as frequent as any value near it, where log-probs of few digits are frequent together


@dataclass(frozen=True, slots=True)
class Thin:
    """What thins out the means: `factor` by which they are larger without what should not count, and notes.

    `places` are those of padding and of fill values; of zeros some may be sure tokens, of whose d a 0 tells nothing.
    """

    factor: float = 1.0
    short: str = ""
    notes: tuple[str, ...] = ()
    places: frozenset[int] = frozenset()


def find(pair: Pair) -> Thin:
    """Padding, fill values below 0, and more log-probs of 0 on both sides than sure tokens explain."""
    runs = {name: _run(pair, *span) for name, span in pair.spans.items()}
    told, padded = _padding(pair, runs)
    same = [at for at, (one, other) in enumerate(zip(pair.rollout, pair.train, strict=True)) if one == other]
    zeros = {at for at in same if pair.train[at] == 0} - padded
    masked, of_zeros = _masked(len(zeros), _sure(pair), len(pair.d))
    fills = _fills(pair, [at for at in same if pair.train[at] < 0 and at not in padded])
    notes = [told, of_zeros, *(_told(f"{value:g}", count, len(pair.d)) for value, count in fills.items())]
    out, total = len(padded) + masked + sum(fills.values()), len(pair.d)
    short = f"{out} of {total} tokens look like padding or masked, {_without(total, out)}" if out else ""
    places = padded | {at for at in same if pair.train[at] in fills} | (zeros if masked else set())
    return Thin(total / max(1, total - out), short, tuple(filter(None, notes)), frozenset(places))


def _masked(zeros: int, sure: int, total: int) -> tuple[int, str]:
    """How many zeros sure tokens do not explain, and what to say of zeros; 0 and nothing where they are few."""
    if not _many(zeros, total):
        return 0, ""
    masked = max(0, zeros - sure)
    if not _many(masked, total):
        return 0, _told("0", zeros, total, "as sure and as masked ones do")
    return masked, _told("0", zeros, total) + (f"; some {sure} may be sure" if sure else "")


def _told(value: str, count: int, total: int, why: str = "as masked ones do") -> str:
    return f"{count} of {total} tokens have log-prob {value} on both sides, {why}, {_without(total, count)}"


def _many(count: int, total: int) -> bool:
    return count >= MANY and total >= MUCH * (total - count)


def _sure(pair: Pair) -> int:
    """How many zeros sure tokens explain: as many as lie in the fuller of the two decades next to 0, in each decade
    that is rounded to 0. None where no log-prob is next to 0, which is where fp32 ends, or digits do."""
    sides = zip(pair.rollout, pair.train, strict=True)
    near = sorted(size for values in sides if 0 < (size := -min(values)) < NEARLY)
    if not near or (near[0] > FINE and not _stepped(near)):
        return 0
    least = math.log10(near[0])
    decades = Counter(int(math.log10(size) - least) for size in near)
    return int(max(decades[0], decades[1]) * max(0.0, least - math.log10(DEEPEST)))


def _stepped(sizes: list[float]) -> bool:
    """Whether the smallest are multiples of the first, as of log-probs of few digits."""
    return all(abs(size / sizes[0] - round(size / sizes[0])) < 1e-3 for size in sizes if size < 10 * sizes[0])


def _fills(pair: Pair, same: list[int]) -> dict[float, int]:
    """How many tokens by value, of values that many different tokens share on both sides, and few others are near."""
    total, counts = len(pair.d), Counter(pair.train[at] for at in same)
    found = {value: count for value, count in counts.items() if _many(count, total)}
    if not found:
        return {}
    starts = {at: start for start, stop in pair.spans.values() for at in range(start, stop)}
    contexts: dict[float, set[tuple[int, int]]] = {value: set() for value in found}
    for at in same:
        if pair.train[at] in found:
            contexts[pair.train[at]].add((at - starts[at], pair.tokens[at]))
    others = Counter(value for value in pair.train if value not in found)
    near = {value: max((n for one, n in others.items() if 2 * value <= one <= value / 2), default=0) for value in found}
    # of one sample that is repeated, a value has one context
    return {value: n for value, n in found.items() if len(contexts[value]) >= LONG and n > PEAK * near[value]}


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
    total, pads, longest = len(pair.d), len(places), max(max(ends) for ends in found.values())
    factor = total / max(1, total - pads)
    if not ((factor >= MUCH and longest >= LONG) or (factor >= SLIGHTLY and pads >= MANY)):
        return "", set()
    counts = {name: sum(ends) for name, ends in found.items() if any(ends)}
    samples = some([f"{shown(name)} ({count})" for name, count in counts.items()])
    return (
        f"{pads} of {total} tokens look like padding, {_without(total, pads)}: one token id with one log-prob "
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


def _without(total: int, out: int) -> str:
    return f"and without them the means are {total / max(1, total - out):.3g} times as large"
