"""Keys and values of earlier calls: what the decoder takes as `cache` in prefill, chunked prefill and decode.

Both kinds store [layer, block, kv_head, place, head_dim]. The contiguous one gives each sample one block, as long as a
sample may get; the paged one gives it blocks of few places, its pages, in whatever order they are free, and keeps their
list: position p of a sample stands in place p mod size of its page number p div size.

Promise. What was written is what is read, to the bit. A slot of the grid that is in no span is never stored, so pads
take no position: positions count the tokens of the sample alone. Nothing stays of a sample that has left.

How. The cursor of a sample is a number on the host. Each call moves tables of its slots to the device; a write is an
indexed copy by one of them, without a sync: by one kernel where `backend` is "triton" or "cuda", or none where the
kernel that made keys and values has put them into their `slots`. Memory that holds no
token holds `unwritten`, NaN if left out, so that an operator that reads too far is seen. It must be 0 for one that
multiplies by 0 what it does not see, as torch's does.

Limits. No gradients. Samples may share a row (packed); the last row must hold one, as the number of rows follows from
the spans. A call that ended in an error leaves its cache unfinished, and it is refused from then on.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlspec import nodes
from rlspec.architecture import Architecture
from rlspec.device import native
from rlspec.device.decoder import Span
from rlspec.device.operators import Segment, Segments
from rlspec.errors import RunError

_STORING = ("extend", "write")  # what a subclass that stores otherwise overrides
_TOLERANT = ("reference", "torch")  # of attention: they multiply by 0 what they do not see, so NaN would leak
_PAGES_DIVIDE = 512  # the shortest split of attention over keys


class Part(NamedTuple):
    """One sample in one call: its tokens stand in `span` and take the positions from `position` up to `stop`."""

    sample: Hashable
    span: Span
    position: int

    @property
    def stop(self) -> int:
        return self.position + self.span.length

    def __str__(self) -> str:
        return f"sample {self.sample!r}, position {self.position}"


class Slots(NamedTuple):
    """Where a layer's keys and values of a call are stored: in `keys` and `values` [blocks, Hkv, places, D].

    `places` int64 [2, B·T]: block and place of each slot of the grid, block -1 for one that is not stored.
    """

    keys: Tensor
    values: Tensor
    places: Tensor


class Selected(NamedTuple):
    """A cache for a call that holds some of its samples, span i being of sample i."""

    cache: _Cache
    samples: tuple[Hashable, ...]

    def begin(self, spans: Sequence[Span], width: int) -> Segments:
        return self.cache.begin(spans, width, self.samples)

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return self.cache.extend(layer, keys, values)

    def slots(self, layer: int, keys: Tensor, values: Tensor) -> Slots | None:
        return self.cache.slots(layer, keys, values)

    def stored(self, layer: int, keys: Tensor, values: Tensor) -> None:
        self.cache.stored(layer, keys, values)


def unwritten(implementation: str | Mapping[str, str]) -> float:
    """What memory is to hold before it is written, for the attention of an implementation."""
    return 0.0 if nodes.implementation_of("attention", implementation) in _TOLERANT else math.nan


class _Cache(ABC):
    """What the two kinds share. They say which blocks a sample has, and where in them a position stands."""

    def __init__(
        self,
        model: Architecture,
        blocks: int,
        places: int,
        dtype: torch.dtype,
        device: torch.device | str,
        fill: float,
        backend: str | None,
    ) -> None:
        if min(blocks, places) < 1 or not dtype.is_floating_point:
            raise ValueError(f"there is no cache of {blocks} blocks of {places} positions in {dtype}")
        shape = (model.num_hidden_layers, blocks, model.num_key_value_heads, places, model.head_dim)
        self.keys, self.values = (torch.full(shape, fill, dtype=dtype, device=device) for _ in range(2))
        self.unwritten, self.backend = fill, backend
        self.parts: tuple[Part, ...] = ()
        self._lengths: dict[Hashable, int] = {}
        self._blocks: dict[Hashable, list[int]] = {}
        self._free = list(reversed(range(blocks)))
        self._all: Tensor | None = None
        self._stored: tuple[tuple[Tensor, Tensor], tuple[int, int]] | None = None
        self._next = self.layers = shape[0]  # the layer that is written next; past the last one no call is under way

    @property
    def lengths(self) -> dict[Hashable, int]:
        """The open samples in the order of opening, and how many positions of each are written in all layers."""
        return dict(self._lengths)

    def of(self, *samples: Hashable) -> Selected:
        """The cache for a call of these samples alone. Without it, a call holds all that are open."""
        return Selected(self, samples)

    def open(self, *samples: Hashable) -> None:
        """Samples enter, without positions. ValueError for one that is open, RunError where there is no room."""
        for sample in samples:
            if sample in self._lengths:
                raise ValueError(f"sample {sample!r} is open already, at position {self._lengths[sample]}")
            self._blocks[sample] = self._first_blocks(sample)
            self._lengths[sample] = 0

    def close(self, *samples: Hashable) -> None:
        """Samples leave. Their blocks are filled with `unwritten` and are free."""
        for sample in samples:
            position = self._cursor(sample)
            if self._next < self.layers:
                raise RunError(f"sample {sample!r}, position {position}: left before layer {self._next} of a call")
            for block in self._blocks.pop(sample):
                self.keys[:, block].fill_(self.unwritten)
                self.values[:, block].fill_(self.unwritten)
                self._free.append(block)
            del self._lengths[sample]

    def begin(self, spans: Sequence[Span], width: int, samples: Sequence[Hashable] | None = None) -> Segments:
        """Reserve positions for the tokens of a call, which stand in [B, width]: span i is of sample i.

        `samples`: default all open ones. Raises ValueError for samples and spans that do not fit, RunError after a call
        that was not finished and where there is no room; then nothing is reserved.
        """
        if self._next < self.layers:
            raise RunError(f"{self.parts[0]}: the call before ended at layer {self._next} of {self.layers}")
        samples = tuple(self._lengths) if samples is None else tuple(samples)
        if not samples or len(spans) != len(samples) or len(set(samples)) < len(samples):
            raise ValueError(f"{len(spans)} spans for samples {list(samples)}: each needs one of its own")
        parts = tuple(Part(sample, span, self._cursor(sample)) for sample, span in zip(samples, spans, strict=True))
        starts, keys = _side_by_side(parts)
        entries = tuple(Segment(*part.span, start, part.stop) for part, start in zip(parts, starts, strict=True))
        segments = Segments(entries, max(span.row for span in spans) + 1, width, keys, self.keys.device)
        self._reserve(parts)
        self.parts, self.segments, self._next = parts, segments, 0
        new = self._table((part, part.span.start, part.position) for part in parts)
        self._new, self._all, self._stored = new.to(self.keys.device), None, None
        if self.backend in _WRITERS:
            _ = segments.table  # now, so that attention finds it at rest
            places = torch.full((2, segments.rows * width), -1)
            places[:, new[0] * width + new[1]] = new[2:]
            self._places_of_grid = places.to(self.keys.device)
        return segments

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """`write`, then keys and values [B, S, Hkv, D] of all positions of the call's samples, as its segments say."""
        self.write(layer, keys, values)
        return self._grid(self.keys[layer]), self._grid(self.values[layer])

    def slots(self, layer: int, keys: Tensor, values: Tensor) -> Slots | None:
        """Where `write` is going to store such keys and values, for the kernel that makes them.

        None where it would refuse them or copy them without a kernel, and where it is not the one of this class.
        """
        own = all(getattr(getattr(self, name), "__func__", None) is getattr(_Cache, name) for name in _STORING)
        able = own and self.backend in _WRITERS and _packed(self.keys) and self.parts and layer == self._next
        fits = able and all(self._fits(one) for one in (keys, values))
        return Slots(self.keys[layer], self.values[layer], self._places_of_grid) if fits else None

    def stored(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """These have been put into the slots of the layer that is written next: `write` of just them need not."""
        assert layer == self._next
        self._stored = (keys, values), (keys._version, values._version)

    def _is_stored(self, keys: Tensor, values: Tensor) -> bool:
        if self._stored is None:
            return False
        (stored_keys, stored_values), versions = self._stored
        same = keys is stored_keys and values is stored_values
        return same and (keys._version, values._version) == versions

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store a layer's [B, T, Hkv, D] of the call, layers ascending; after the last one the cursors move.

        Raises RunError for another layer than the next, ValueError for tensors that do not fit or have gradients.
        """
        self._check(layer, keys, values)
        pairs = ((self.keys[layer], keys), (self.values[layer], values))
        if self._is_stored(keys, values):
            pass
        elif self.backend in _WRITERS and _packed(keys, values, self.keys):
            _WRITERS[self.backend](pairs, self._new)
        else:
            row, column, block, place = self._new
            for store, new in pairs:
                store[block, :, place] = new[row, column]
        self._next, self._stored = self._next + 1, None
        if self._next == self.layers:
            self._lengths.update({part.sample: part.stop for part in self.parts})

    def read(self, layer: int, sample: Hashable) -> tuple[Tensor, Tensor]:
        """Copies of what was written, keys and values [positions, Hkv, D], at the positions of `lengths`."""
        if not 0 <= layer < self.layers:
            raise ValueError(f"sample {sample!r}: there is no layer {layer} of {self.layers}")
        block, place = self._places(sample, torch.arange(self._cursor(sample))).to(self.keys.device)
        return self.keys[layer][block, :, place], self.values[layer][block, :, place]

    def strays(self) -> int:
        """How many elements outside the valid positions do not hold `unwritten`: 0, or pads were stored. Syncs."""
        count = self._written(self.keys) + self._written(self.values)
        for sample in self._lengths:
            for layer in range(self.layers):
                count -= sum(self._written(part) for part in self.read(layer, sample))
        return count

    def _written(self, x: Tensor) -> int:
        return int((~x.isnan() if math.isnan(self.unwritten) else x != self.unwritten).sum())

    def _cursor(self, sample: Hashable) -> int:
        if sample not in self._lengths:
            raise ValueError(f"sample {sample!r} is not open; open are {list(self._lengths)}")
        return self._lengths[sample]

    def _check(self, layer: int, keys: Tensor, values: Tensor) -> None:
        if not self.parts:
            raise RunError(f"layer {layer} was written before a call began")
        if layer != self._next:
            state = "written a second time in a call" if layer < self._next else f"written before layer {self._next}"
            raise RunError(f"{self.parts[0]}: layer {layer} of {self.layers} was {state}")
        for name, x in (("keys", keys), ("values", values)):
            if not self._fits(x):
                needed = f"{self.keys.dtype} {self._shape} on {self.keys.device}"
                found = f"{x.dtype} {list(x.shape)} on {x.device}"
                raise ValueError(f"{self.parts[0]}, layer {layer}: {name} must be {needed}, not {found}")
            if x.requires_grad and torch.is_grad_enabled():
                raise ValueError(f"{self.parts[0]}, layer {layer}: a cache has no gradients, use torch.no_grad()")

    @property
    def _shape(self) -> list[int]:
        """Of a call's keys, and of its values."""
        return [self.segments.rows, self.segments.queries, self.keys.shape[2], self.keys.shape[4]]

    def _fits(self, x: Tensor) -> bool:
        return list(x.shape) == self._shape and x.dtype == self.keys.dtype and x.device == self.keys.device

    def _grid(self, store: Tensor) -> Tensor:
        """[blocks, Hkv, places, D] of one layer -> [B, S, Hkv, D]: each sample at the key start of its segment."""
        if self._all is None:
            entries = zip(self.parts, self.segments.entries, strict=True)
            self._all = self._table((part, entry.key_start, 0) for part, entry in entries).to(store.device)
        row, column, block, place = self._all
        grid = store.new_full((self.segments.rows, self.segments.keys, *store.shape[1::2]), self.unwritten)
        grid[row, column] = store[block, :, place]
        return grid

    def _table(self, pieces: Iterable[tuple[Part, int, int]]) -> Tensor:
        """int64 [4, tokens], on the host: row, column, block and place of the positions from the third number on,
        columns from the second."""
        columns = []
        for part, column, first in pieces:
            positions = torch.arange(first, part.stop)
            grid = torch.stack((torch.full_like(positions, part.span.row), positions - first + column))
            columns.append(torch.cat((grid, self._places(part.sample, positions))))
        return torch.cat(columns, 1)

    def _places(self, sample: Hashable, positions: Tensor) -> Tensor:
        """int64 [2, positions]: block and place of each, on the host."""
        blocks, size = torch.tensor(self._blocks[sample], dtype=torch.int64), self.keys.shape[3]
        return torch.stack((blocks[positions // size], positions % size))

    @abstractmethod
    def _first_blocks(self, sample: Hashable) -> list[int]:
        """The blocks of a sample that enters. Raises RunError where there is none."""

    @abstractmethod
    def _reserve(self, parts: Sequence[Part]) -> None:
        """Room for the positions of a call, or RunError and nothing reserved."""


class ContiguousCache(_Cache):
    """[layer, sample, kv_head, position, head_dim]: up to `samples` samples at once, of up to `positions` each."""

    def __init__(
        self,
        model: Architecture,
        *,
        samples: int,
        positions: int,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        unwritten: float = math.nan,
        backend: str | None = None,
    ) -> None:
        super().__init__(model, samples, positions, dtype, device, unwritten, backend)

    def _first_blocks(self, sample: Hashable) -> list[int]:
        if not self._free:
            raise RunError(f"sample {sample!r}, position 0: all {self.keys.shape[1]} places for samples are taken")
        return [self._free.pop()]

    def _reserve(self, parts: Sequence[Part]) -> None:
        size = self.keys.shape[3]
        for part in parts:
            if part.stop > size:
                raise RunError(f"sample {part.sample!r}, position {size}: the cache holds {size} positions a sample")

    def _grid(self, store: Tensor) -> Tensor:
        """A view where row r is block r + constant for every part; else a copy, as for two samples in one row."""
        shifts = {self._blocks[part.sample][0] - part.span.row for part in self.parts}
        first = min(shifts)
        if len(shifts) > 1 or first < 0:
            return super()._grid(store)
        return store[first : first + self.segments.rows, :, : self.segments.keys].transpose(1, 2)


class PagedCache(_Cache):
    """[layer, page, kv_head, slot, head_dim]: `pages` pages of `page_size` positions, for as many samples as fit.

    `extend` gathers for operators that cannot page. One that can is called by a decoder whose `attend` does instead

        cache.write(layer, key, value)
        out, lse = rlspec.kernels.attention.paged(query, *cache.pages(layer), segments.table, scale=scale)
    """

    def __init__(
        self,
        model: Architecture,
        *,
        pages: int,
        page_size: int,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        unwritten: float = math.nan,
        backend: str | None = None,
    ) -> None:
        if page_size < 1 or _PAGES_DIVIDE % page_size:
            raise ValueError(f"page_size {page_size} must be a power of two up to {_PAGES_DIVIDE}")
        super().__init__(model, pages, page_size, dtype, device, unwritten, backend)

    def pages(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values [pages, page_size, Hkv, D] as views, and the block table int32 [n, most pages] of the call.

        Line i lists the pages of segment i from position 0 of its sample, then -1.
        """
        return self.keys[layer].transpose(1, 2), self.values[layer].transpose(1, 2), self._listed

    def _first_blocks(self, sample: Hashable) -> list[int]:
        return []

    def _reserve(self, parts: Sequence[Part]) -> None:
        size, left = self.keys.shape[3], len(self._free)
        needs = [-(-part.stop // size) - len(self._blocks[part.sample]) for part in parts]
        for part, need in zip(parts, needs, strict=True):
            if need > left:
                position = (len(self._blocks[part.sample]) + left) * size
                raise RunError(f"sample {part.sample!r}, position {position}: no page is free of {self.keys.shape[1]}")
            left -= need
        for part, need in zip(parts, needs, strict=True):
            self._blocks[part.sample] += [self._free.pop() for _ in range(need)]
        lists = [torch.tensor(self._blocks[part.sample], dtype=torch.int32) for part in parts]
        self._listed = pad_sequence(lists, batch_first=True, padding_value=-1).to(self.keys.device)


def _packed(*tensors: Tensor) -> bool:
    """Heads in packs of 16 bytes, which start at multiples of 16 bytes."""
    return all(
        one.data_ptr() % 16 == 0
        and one.stride(-1) == 1
        and not any(steps * one.element_size() % 16 for steps in (*one.stride()[:-1], one.shape[-1]))
        for one in tensors
    )


def _triton(pairs: Sequence[tuple[Tensor, Tensor]], table: Tensor) -> None:
    from rlspec.kernels import kv_cache

    (keys, new_keys), (values, new_values) = pairs
    kv_cache.write(keys, values, new_keys, new_values, table)


def _cuda(pairs: Sequence[tuple[Tensor, Tensor]], table: Tensor) -> None:
    (keys, new_keys), (values, new_values) = pairs
    assert keys.stride() == values.stride() and table.is_contiguous()
    pack = 16 // keys.element_size()
    strides = [step // pack for one in (keys, new_keys, new_values) for step in one.stride()[:3]]
    sizes = (table.shape[1], keys.shape[1], keys.shape[3] // pack, *strides)
    native.load("kv_cache").call("kv_cache_write", keys, values, new_keys, new_values, table, *sizes)


# Keys and values in one launch, by the family of kernels whose run they belong to.
_WRITERS: Mapping[str | None, Callable[..., None]] = {"triton": _triton, "cuda": _cuda}


def _side_by_side(parts: Sequence[Part]) -> tuple[list[int], int]:
    """The first key slot of each part, where samples of one row stand one after the other, and the longest row."""
    ends: dict[int, int] = {}
    starts = []
    for part in parts:
        starts.append(ends.get(part.span.row, 0))
        ends[part.span.row] = starts[-1] + part.stop
    return starts, max(ends.values())
