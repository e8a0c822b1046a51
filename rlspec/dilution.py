"""Tokens on which two files cannot differ, and how far they thin out the means: padding, and log-probs of exactly 0."""

from __future__ import annotations

from itertools import takewhile

from rlspec.logprob_lines import shown, some
from rlspec.pairing import Pair

DILUTED = ("mean_abs_dlogp", "approx_kl", "clip_fraction")  # shares and means; a maximum stays what it is
MANY, LONG = 8, 4  # tokens of all runs, or of one, that are no accident
SLIGHTLY, MUCH = 1.02, 1.1  # factors of a mean: fewer pads than many count where they move it much, and so do zeros


def nothing(pair: Pair) -> str | None:
    """What to say of files that are padding throughout; the others have something to compare."""
    if not all(stop - start > 1 and _run(pair, start, stop) == stop - start for start, stop in pair.spans.values()):
        return None
    return "every sample is one token id with one log-prob on both sides, over and over: this gate cannot fail"


def padding(pair: Pair) -> tuple[str, str]:
    """What looks like padding, in short and with the samples, and empty texts where nothing does.

    It is one token id with one log-prob on both sides, over and over at an end of a sample. A policy may also end in a
    loop of sure tokens: which of the two it is, the numbers do not say.
    """
    runs = {name: run for name, span in pair.spans.items() if (run := _run(pair, *span)) > 1}
    padded, total = sum(runs.values()), len(pair.d)
    factor = total / (total - padded)
    few = factor >= MUCH and max(runs.values()) >= LONG
    if not (few or (factor >= SLIGHTLY and padded >= MANY)):
        return "", ""
    short = f"{padded} of {total} tokens look like padding, {_without(factor)}"
    samples = some([f"{shown(name)} ({run})" for name, run in runs.items()])
    return short, (
        f"{short}: one token id with one log-prob on both sides, over and over at an end of {len(runs)} of "
        f"{len(pair.spans)} samples: {samples}; leave padding out of both files, or the loop of a policy that is sure"
    )


def zeros(pair: Pair) -> str:
    """The log-probs that are exactly 0 on both sides, where they are enough to move the means."""
    sure, total = sum(one == other == 0 for one, other in zip(pair.rollout, pair.train, strict=True)), len(pair.d)
    if not (MANY <= sure < total and (factor := total / (total - sure)) >= MUCH):
        return ""
    return f"{sure} of {total} tokens have log-prob 0 on both sides, as sure and as masked ones do, {_without(factor)}"


def _run(pair: Pair, start: int, stop: int) -> int:
    """How many tokens of a sample stand in the runs at its two ends; a token alone is no run."""
    last, first = _alike(pair, range(stop - 1, start - 1, -1)), _alike(pair, range(start, stop))
    if last == stop - start:
        return last
    return (last if last > 1 else 0) + (first if first > 1 else 0)


def _alike(pair: Pair, places: range) -> int:
    """How many of these places, from the first on, have its token, and its log-prob on both sides."""
    token, value = pair.tokens[places[0]], pair.rollout[places[0]]
    same = takewhile(lambda at: pair.tokens[at] == token and pair.rollout[at] == pair.train[at] == value, places)
    return sum(1 for _ in same)


def _without(factor: float) -> str:
    return f"and without them the means are {factor:.3g} times as large"
