"""Two log-prob files as one: whether they speak of the same tokens, and their columns side by side."""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import ne, sub
from typing import TypeVar

from rlspec.logprob_lines import shown, some
from rlspec.logprobs import LogProbs

Number = TypeVar("Number", int, float)

DIFFERENT = {
    "weights": "the policy that generated is not the one that scored",
    "temperature": "these are log-probs of two distributions",
    "top_p": "these are log-probs of two distributions",
    "top_k": "these are log-probs of two distributions",
    "processed": "a log-prob after temperature, top-p and top-k is not comparable to a raw one",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Both files joined by sample and position, in the rollout's order; all columns are of one length.

    `d` is train - rollout and `size` its magnitude; `peaks` has the largest of each sample. `flips` says of a token
    whether it went to other experts, None if a file does not say.
    """

    spans: Mapping[str, tuple[int, int]]
    positions: array[int]
    tokens: array[int]
    rollout: array[float]
    train: array[float]
    d: array[float]
    size: array[float]
    peaks: Sequence[tuple[float, str]]
    flips: Sequence[bool] | None


def join(ours: LogProbs, theirs: LogProbs) -> Pair:
    """Rollout and train as one; they have no problem of `identity`."""
    train, routing = theirs.logprobs, theirs.routing
    if list(ours.spans.items()) != list(theirs.spans.items()):
        order = [theirs.spans[name] for name in ours.spans]
        train = array("d", _reordered(train, order))
        routing = None if routing is None else array("Q", _reordered(routing, order))
    d = array("d", map(sub, train, ours.logprobs))
    size = array("d", map(abs, d))
    return Pair(
        spans=ours.spans,
        positions=ours.positions,
        tokens=ours.tokens,
        rollout=ours.logprobs,
        train=train,
        d=d,
        size=size,
        peaks=[(max(size[start:stop]), name) for name, (start, stop) in ours.spans.items()],
        flips=None if ours.routing is None or routing is None else [*map(ne, ours.routing, routing)],
    )


def without(pair: Pair, places: Collection[int]) -> Pair:
    """The pair without some of its tokens; samples that have no others are left out."""
    spans, at = {}, 0
    for name, (start, stop) in pair.spans.items():
        if kept := sum(place not in places for place in range(start, stop)):
            spans[name] = (at, at + kept)
            at += kept
    chosen = [place not in places for place in range(len(pair.d))]
    size = array("d", compress(pair.size, chosen))
    return Pair(
        spans=spans,
        positions=array("q", compress(pair.positions, chosen)),
        tokens=array("q", compress(pair.tokens, chosen)),
        rollout=array("d", compress(pair.rollout, chosen)),
        train=array("d", compress(pair.train, chosen)),
        d=array("d", compress(pair.d, chosen)),
        size=size,
        peaks=[(max(size[start:stop]), name) for name, (start, stop) in spans.items()],
        flips=None if pair.flips is None else [*compress(pair.flips, chosen)],
    )


def _reordered(column: array[Number], order: Iterable[tuple[int, int]]) -> Iterator[Number]:
    return (value for start, stop in order for value in column[start:stop])


def mean(values: Sequence[float]) -> float:
    """Exactly summed; inf where the sum does not fit a double."""
    try:
        return math.fsum(values) / len(values)
    except OverflowError:
        return math.inf


def identity(rollout: LogProbs, train: LogProbs) -> list[str]:
    """Every reason why the two files must not be compared; empty if there is none."""
    both = [name for name in rollout.spans if name in train.spans]
    problems = [_samples("rollout", rollout, train), _samples("train", train, rollout)]
    problems += [_positions(rollout, train, both), _token_ids(rollout, train, both)]
    ours, theirs = rollout.semantics, train.semantics
    problems += [
        f"different {key}: rollout {ours[key]}, train {theirs[key]}; {why}"
        for key, why in DIFFERENT.items()
        if key in ours
        and key in theirs
        and ours[key] != theirs[key]
        and not (key == "weights" and _same_tensors(ours, theirs))
    ]
    return [problem for problem in problems if problem]


def _same_tensors(ours: Mapping[str, object], theirs: Mapping[str, object]) -> bool:
    """Whether both files tell the hash of their weights' tensors, which is one however the tensors are stored."""
    return "tensors" in ours and ours["tensors"] == theirs.get("tensors")


def remarks(rollout: LogProbs, train: LogProbs) -> list[str]:
    """What does not forbid the comparison but may explain its numbers."""
    notes = [*rollout.notes, *train.notes]
    ours, theirs = rollout.semantics, train.semantics
    for key in (*DIFFERENT, "head_dtype"):
        if (key in ours) != (key in theirs):
            side, value = ("rollout", ours[key]) if key in ours else ("train", theirs[key])
            notes.append(f"only the {side} file declares {key} ({value}); the other is taken to agree")
    if _same_tensors(ours, theirs) and ours.get("weights") != theirs.get("weights"):
        notes.append("the files of the weights are other ones, and the tensors in them are the same to the bit")
    if "head_dtype" in ours and "head_dtype" in theirs and ours["head_dtype"] != theirs["head_dtype"]:
        notes.append(
            f"head_dtype differs: rollout {ours['head_dtype']}, train {theirs['head_dtype']}; a finer head on one side "
            "only sets the two further apart than on neither: give both the same"
        )
    if (rollout.routing is None) != (train.routing is None):
        side = "train" if rollout.routing is None else "rollout"
        notes.append(f"only the {side} file has routing, so routing flips cannot be counted")
    return notes


def _samples(side: str, here: LogProbs, there: LogProbs) -> str:
    missing = [shown(name) for name in here.spans if name not in there.spans]
    if not missing:
        return ""
    return f"{len(missing)} of {len(here.spans)} samples are in the {side} file only: {some(missing)}"


def _positions(rollout: LogProbs, train: LogProbs, names: Iterable[str]) -> str:
    found = []
    for name, ours, theirs in _slices(rollout, train, names):
        mine, other = rollout.positions[ours], train.positions[theirs]
        if mine != other:
            found.append(f"sample {shown(name)}: {_difference(mine, other)}")
    return f"positions differ in {len(found)} samples: {some(found, '; ')}" if found else ""


def _difference(mine: array[int], other: array[int]) -> str:
    offsets = set(map(sub, other, mine)) if len(mine) == len(other) else set()
    if len(offsets) == 1:
        return f"train counts positions {offsets.pop():+d} against the rollout"
    more, less = sorted({*mine} - {*other}), sorted({*other} - {*mine})
    only = [f"{some(more)} in the rollout only"] * bool(more) + [f"{some(less)} in train only"] * bool(less)
    return ", ".join(only)


def _token_ids(rollout: LogProbs, train: LogProbs, names: Iterable[str]) -> str:
    common, found = 0, []
    for name, ours, theirs in _slices(rollout, train, names):
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


def _slices(rollout: LogProbs, train: LogProbs, names: Iterable[str]) -> Iterator[tuple[str, slice, slice]]:
    return ((name, slice(*rollout.spans[name]), slice(*train.spans[name])) for name in names)
