"""Physical layouts of logical tokens. Logical identity = (sample, position in the unpadded sample).

A layout is one or more calls of an operator. Each call is a grid of slots; its runs say which slots hold which
consecutive positions of which sample, and slots in no run are pads. `restore` is the way back. Plain integers, no
torch: host and device derive the same layouts from the same workload.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

from rlspec.workloads import Sample, Tier

CANONICAL = "BN/full"


class Run(NamedTuple):
    """`length` slots of row `row` from column `column`: positions of `sample` from `position` on."""

    sample: int
    position: int
    length: int
    row: int
    column: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call on a grid [rows, width] of queries and a grid [rows, key_width] of keys and values.

    `changed`: samples that stand there with other content, so that nothing of theirs is judged.
    """

    rows: int
    width: int
    runs: tuple[Run, ...]
    key_width: int
    key_runs: tuple[Run, ...]
    changed: tuple[int, ...] = ()

    @property
    def slots(self) -> int:
        return self.rows * self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """All calls of one cell of the batch and chunk matrix. `how` names what else differs: strides, stream, process."""

    name: str
    calls: tuple[Call, ...]
    split: bool = False
    how: str = ""
    pads: str = "zero"

    @property
    def digest(self) -> str:
        """SHA-256 of everything but the name: two layouts that agree in it would compare a thing with itself."""
        text = json.dumps({**asdict(self), "name": ""}, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def ordered(self) -> bool:
        """Whether each call goes on in the logical order, samples ascending and positions in them, where one ended."""
        ends = [sorted((run.sample, run.position) for run in call.runs) for call in self.calls]
        return all(before[-1] < after[0] for before, after in zip(ends, ends[1:], strict=False))

    @property
    def parameters(self) -> bool:
        """Whether its parameter gradients are those of the canonical layout."""
        return not any(call.changed for call in self.calls)


@functools.lru_cache(maxsize=64)
def of(tier: Tier) -> tuple[Layout, ...]:
    """The canonical layout of a tier, then the others in the order of the workload.

    Raises ValueError where a layout could not differ from the canonical one, or does not restore.
    """
    made = [_full(tier)]
    for name in tier.layouts:
        if name not in LAYOUTS:
            raise ValueError(f"tier {tier.name}: unknown layout {name!r}; known: {', '.join(LAYOUTS)}")
        made.append(LAYOUTS[name](tier))
    seen: dict[str, str] = {}
    for layout in made:
        check(layout, tier)
        if layout.digest in seen:
            raise ValueError(f"tier {tier.name}: {layout.name} and {seen[layout.digest]} are the same layout")
        seen[layout.digest] = layout.name
    return tuple(made)


def configurations(layout: Layout, tier: Tier) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """What is compared of a layout: its name with all samples, or one name a sample where each runs alone."""
    if not layout.split:
        return ((layout.name, tuple(range(len(tier.samples)))),)
    return tuple((f"{layout.name}/{sample.id}", (index,)) for index, sample in enumerate(tier.samples))


def restore(layout: Layout, tier: Tier) -> dict[tuple[int, int], tuple[int, int]]:
    """(sample, position) -> (call, slot of its grid) for every query that is judged.

    Raises ValueError for a run outside its grid, two runs in one slot, a query twice or one that is missing.
    """
    check(layout, tier)
    return {
        (run.sample, run.position + step): (number, run.row * call.width + run.column + step)
        for number, call in enumerate(layout.calls)
        for run in call.runs
        if _judged(run, call, tier)
        for step in range(run.length)
    }


def check(layout: Layout, tier: Tier) -> None:
    """Raises ValueError where a layout does not restore, as `restore` says."""
    for number, call in enumerate(layout.calls):
        _check_slots(layout, number, call)
    ranges = sorted(
        (run.sample, run.position, run.length) for call in layout.calls for run in call.runs if _judged(run, call, tier)
    )
    for index, sample in enumerate(tier.samples):
        due = sample.first
        for _, position, length in (one for one in ranges if one[0] == index):
            if position < due:
                raise ValueError(f"{layout.name}: sample {index} position {position} stands twice")
            if position > due or position + length > sample.length:
                raise ValueError(_odd(layout, index, min(position, due) if position > due else sample.length))
            due = position + length
        if due != sample.length:
            raise ValueError(_odd(layout, index, due))


def _odd(layout: Layout, sample: int, position: int) -> str:
    return f"{layout.name}: sample {sample} position {position} is missing or none of the tier's"


def _judged(run: Run, call: Call, tier: Tier) -> bool:
    return run.sample < len(tier.samples) and run.sample not in call.changed


def _check_slots(layout: Layout, number: int, call: Call) -> None:
    end = dict.fromkeys(range(call.rows), 0)
    for run in sorted(call.runs, key=lambda run: (run.row, run.column)):
        if not (0 <= run.row < call.rows and run.column >= 0 and run.column + run.length <= call.width):
            raise ValueError(f"{layout.name}: {run} does not lie in {call.rows} × {call.width} slots")
        if run.column < end[run.row]:
            raise ValueError(f"{layout.name}: two tokens in slot {run.row * call.width + run.column} of call {number}")
        end[run.row] = run.column + run.length


def _everyone(tier: Tier) -> tuple[Sample, ...]:
    return (*tier.samples, *tier.company)


def _packed(tier: Tier, order: Sequence[int], changed: tuple[int, ...] = ()) -> Call:
    samples, runs, keys, column, key_column = _everyone(tier), [], [], 0, 0
    for index in order:
        sample = samples[index]
        runs.append(Run(index, sample.first, sample.queries, 0, column))
        keys.append(Run(index, 0, sample.length, 0, key_column))
        column, key_column = column + sample.queries, key_column + sample.length
    return Call(rows=1, width=column, runs=tuple(runs), key_width=key_column, key_runs=tuple(keys), changed=changed)


def _padded(tier: Tier, left: bool, length: int) -> Call:
    samples = tier.samples
    longest = max(sample.length for sample in samples)
    if length <= longest:
        raise ValueError(f"tier {tier.name}: padded_length {length} leaves the longest sample, {longest}, without pads")
    most = max(sample.queries for sample in samples)
    width = length - (longest - most)
    runs = [Run(i, s.first, s.queries, i, width - s.queries if left else 0) for i, s in enumerate(samples)]
    keys = [Run(i, 0, s.length, i, length - s.length if left else 0) for i, s in enumerate(samples)]
    return Call(rows=len(samples), width=width, runs=tuple(runs), key_width=length, key_runs=tuple(keys))


def _pieces(tier: Tier, size: int) -> tuple[Call, ...]:
    """Sample by sample in chunks of `size` queries; the keys of a chunk are all positions up to its end."""
    if not 0 < size < max(sample.queries for sample in tier.samples):
        raise ValueError(f"tier {tier.name}: chunk {size} splits no sample")
    calls = []
    for index, sample in enumerate(tier.samples):
        for start in range(sample.first, sample.length, size):
            stop = min(start + size, sample.length)
            calls.append(_alone(index, start, stop))
    return tuple(calls)


def _alone(index: int, start: int, stop: int) -> Call:
    runs, keys = (Run(index, start, stop - start, 0, 0),), (Run(index, 0, stop, 0, 0),)
    return Call(rows=1, width=stop - start, runs=runs, key_width=stop, key_runs=keys)


def _full(tier: Tier) -> Layout:
    return Layout(name=CANONICAL, calls=(_packed(tier, range(len(tier.samples))),))


def _several(tier: Tier, what: str) -> None:
    if len(tier.samples) < 2:
        raise ValueError(f"tier {tier.name}: {what} of a single sample is the canonical layout")


def _chunked(tier: Tier) -> Layout:
    """Chunk by chunk with all samples that reach it, as continuous batching prefills: samples interleave."""
    size, samples = tier.chunk, tier.samples
    _pieces(tier, size)  # splits something
    calls = []
    for start in range(0, max(sample.queries for sample in samples), size):
        runs, keys, column, key_column = [], [], 0, 0
        for index, sample in enumerate(samples):
            length = min(size, sample.queries - start)
            if length > 0:
                begin = sample.first + start
                runs.append(Run(index, begin, length, 0, column))
                keys.append(Run(index, 0, begin + length, 0, key_column))
                column, key_column = column + length, key_column + begin + length
        calls.append(Call(rows=1, width=column, runs=tuple(runs), key_width=key_column, key_runs=tuple(keys)))
    return Layout(name="BN/chunked", calls=tuple(calls))


def _singletons(tier: Tier) -> Layout:
    _several(tier, "singletons")
    calls = tuple(alone(index, sample) for index, sample in enumerate(tier.samples))
    return Layout(name="B1/full", calls=calls, split=True)


def alone(index: int, sample: Sample) -> Call:
    """One sample whole, in a call of its own."""
    return replace(
        _alone(index, sample.first, sample.length),
        key_width=sample.length,
        key_runs=(Run(index, 0, sample.length, 0, 0),),
    )


def _singletons_chunked(tier: Tier) -> Layout:
    """One sample at a time, in chunks."""
    _several(tier, "singletons")
    return Layout(name="B1/chunked", calls=_pieces(tier, tier.chunk), split=True)


def _permuted(tier: Tier) -> Layout:
    _several(tier, "permutation")
    if sorted(tier.permutation) != list(range(len(tier.samples))):
        raise ValueError(f"tier {tier.name}: {list(tier.permutation)} is no permutation of its samples")
    return Layout(name="BN/permuted", calls=(_packed(tier, tier.permutation),))


def _padded_right(tier: Tier) -> Layout:
    return Layout(name="BN/padded_right", calls=(_padded(tier, False, tier.padded_length),))


def _padded_left(tier: Tier) -> Layout:
    return Layout(name="BN/padded_left", calls=(_padded(tier, True, tier.padded_length),))


def _padded_more(tier: Tier) -> Layout:
    """Another pad amount and pads of another value."""
    call = _padded(tier, False, tier.padded_length + 13)
    return Layout(name="BN/padded_more", calls=(call,), pads="large")


def _padded_nan(tier: Tier) -> Layout:
    """Pads that hold NaN on either side: nothing of them may leak."""
    return Layout(name="BN/padded_nan", calls=(_padded(tier, True, tier.padded_length + 1),), pads="nan")


def _packed_with(tier: Tier) -> Layout:
    """The judged samples behind the company of the tier."""
    if not tier.company:
        raise ValueError(f"tier {tier.name}: packed_with needs company")
    count = len(tier.samples)
    order = [*range(count, count + len(tier.company)), *range(count)]
    return Layout(name="BN/packed", calls=(_packed(tier, order),))


def _neighbours(tier: Tier) -> Layout:
    """Two calls with everyone; in each the content of every second sample is another one."""
    _several(tier, "changed neighbours")
    count = len(tier.samples)
    calls = tuple(_packed(tier, range(count), changed=tuple(range(1 - odd, count, 2))) for odd in (0, 1))
    return Layout(name="BN/neighbours", calls=calls, how="neighbours")


def _groups(size: int) -> Callable[[Tier], Layout]:
    def make(tier: Tier) -> Layout:
        indexes = range(len(tier.samples))
        if not size < len(tier.samples):
            raise ValueError(f"tier {tier.name}: groups of {size} are the canonical layout")
        calls = tuple(_packed(tier, indexes[start : start + size]) for start in range(0, len(indexes), size))
        return Layout(name=f"B{size}/full", calls=calls)

    return make


def _decode(tier: Tier) -> Layout:
    """One query a call, as a server decodes."""
    return Layout(name="B1/decode", calls=_pieces(tier, 1))


def _batched_decode(tier: Tier) -> Layout:
    """One query of every sample a call, against keys padded to the longest; samples that have ended drop out."""
    calls = []
    for step in range(max(sample.queries for sample in tier.samples)):
        here = [(i, s.first + step) for i, s in enumerate(tier.samples) if s.first + step < s.length]
        longest = max(position for _, position in here) + 1
        calls.append(
            Call(
                rows=len(here),
                width=1,
                runs=tuple(Run(i, position, 1, row, 0) for row, (i, position) in enumerate(here)),
                key_width=longest,
                key_runs=tuple(Run(i, 0, position + 1, row, 0) for row, (i, position) in enumerate(here)),
            )
        )
    return Layout(name="BN/decode", calls=tuple(calls))


def _again(name: str) -> Callable[[Tier], Layout]:
    """The canonical call once more, in another way."""
    return lambda tier: replace(_full(tier), name=f"BN/{name}", how=name)


LAYOUTS: Mapping[str, Callable[[Tier], Layout]] = {
    "chunked": _chunked,
    "singletons": _singletons,
    "singletons_chunked": _singletons_chunked,
    "permuted": _permuted,
    "padded_right": _padded_right,
    "padded_left": _padded_left,
    "padded_more": _padded_more,
    "padded_nan": _padded_nan,
    "packed_with": _packed_with,
    "neighbours": _neighbours,
    "groups_of_2": _groups(2),
    "groups_of_16": _groups(16),
    "decode": _decode,
    "batched_decode": _batched_decode,
    "strided": _again("strided"),
    "repeated": _again("repeated"),
    "other_stream": _again("other_stream"),
    "other_process": _again("other_process"),
}
