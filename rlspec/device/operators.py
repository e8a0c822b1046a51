"""The operator catalogue: which operators the decoder is made of, how each is called, where each one lives.

An implementation is a name of the catalogue (`reference`, `canonical`, `torch`, `triton`, `cuda`, `fastest`), or
`module:table` with a dict operator -> callable of your own, or `module:function` where one operator alone is chosen.
Names are resolved on first use.

B rows, T tokens a row, N = B·T, S keys a row, D head width, M = N·k rows routed to experts, E experts, V vocabulary.
Results have the first tensor's dtype unless a line says otherwise; `fp32` below means fp64 if the inputs are fp64.

    embedding(tokens [B, T], weight [V, H]) -> [B, T, H], in the dtype of the weight
    rms_norm(x [..., H], weight [H], *, eps, round_before_weight=False) -> [..., H]
    qk_norm: as rms_norm, over the heads of [B, T, heads, D]
    rope(x [B, T, heads, D], cos [B, T, D/2], sin [B, T, D/2]) -> [B, T, heads, D]
    attention(query [B, T, Hq, D], key [B, S, Hkv, D], value [B, S, Hkv, D], segments, *, scale) -> [B, T, Hq, D]
    det_gemm(x [..., K], weight [N, K]) -> [..., N]
    silu(x) -> as x            swiglu(gate, up) -> as gate            residual_add(residual, x) -> as residual
    lm_head(x [..., H], weight [V, H], *, out_dtype) -> [..., V] in out_dtype
    logprob(logits [..., V], targets [...]) -> [...] fp32
    batch_invariant_logprob: as logprob, in one streaming pass over the vocabulary
    linear_logprob(x [..., H], weight [V, H], targets [...]) -> [...] fp32: lm_head and logprob in one, no logits kept
    router(x [N, H], weight [E, H], *, top_k, normalise, logits_dtype, choice=None, scoring="softmax") -> Routing;
        scoring is "softmax" or "sigmoid"; the best k are those of the highest logits, of equal ones the lower expert
    grouped_gemm(rows [M, K] in the order of dispatch, weight [E, N, K], dispatch) -> [M, N]
    combine(rows [M, H] in the order of dispatch, weights [N, k], dispatch) -> [N, H], in the dtype of the rows

Empty tensors, ids and targets outside, and dtypes, shapes or devices that do not fit are a ValueError. On CUDA, where
looking at ids and targets takes a host sync, `torch` leaves them to the assertions of torch's kernels, and `triton`
and `cuda` give NaN for their rows. Not so for experts outside: `Dispatch.of`.

Inputs and upstream gradients have any strides, those of an expanded tensor too: they are read in place or copied.

The callable of an operator may carry attributes, each of which promises something more than autograd through the call:

    weight_gradient(weight, **options) -> rlspec.device.gradients.WeightGradient: the operator owns the sum of its
        weight's gradient over calls, in canonical order. Options: eps of the norms, `lengths` of the samples, what
        `router` was called with. What its `add` takes of routed rows: `rlspec.device.expert_gradients`.
    statistics(probabilities [N, E], experts [N, k], pieces, *, together) -> (counts int64 [G, E], sums [G, E]), of
        router: what load-balance losses by sequence, micro-batch and global batch need, see `reference`.
    forward(query, key, value, segments, *, scale) -> (out, lse fp32 [B, T, Hq], -inf on pads), of attention
    backward(query, key, value, out, lse, grad_out, segments, *, scale) -> (dq, dk, dv), of attention: run once a sample
        over whole sequences, on what `forward` gave, in whatever chunks; the bits are the same in every layout.
    backend: "triton" or "cuda": what must be seen to run when the operator is called. A launcher of CUDA kernels tells
        `rlspec.device.observe.native(name)` of each launch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlspec import nodes
from rlspec.device import checking

_MODULES: Mapping[str, str] = {
    "reference": "rlspec.device.reference",
    "canonical": "rlspec.device.canonical",
    "torch": "rlspec.device.torch_operators",
    "triton": "rlspec.device.triton_operators",
    "cuda": "rlspec.device.cuda_operators",
    "fastest": "rlspec.device.fastest_operators",
}
_SAME = {"qk_norm": "rms_norm"}
CATALOGUE: Mapping[str, Mapping[str, str]] = {
    operator: {name: f"{_MODULES[name]}:{_SAME.get(operator, operator)}" for name in nodes.implemented(operator)}
    for operator, node in nodes.NODES.items()
    if not node.not_applicable
}


class Segment(NamedTuple):
    """The queries of one sample in one row, and the keys that they meet: slots of the grid, not positions.

    The last query stands at the last key: query i sees the keys up to `key_length - query_length + i`, its position.
    """

    row: int
    query_start: int
    query_length: int
    key_start: int
    key_length: int


@dataclass(frozen=True)
class Segments:
    """Which queries of a [rows, queries] grid meet which keys of a [rows, keys] grid. Slots in no segment are pads.

    It says the same for all layouts: packed (many segments in one row), padded on either side (one segment a row that
    leaves slots free), chunked and decode (more keys than queries). `table` is for kernels, `mask` for torch.
    Raises ValueError for a segment outside its grid, or with fewer keys than queries, and for overlapping queries.
    """

    entries: tuple[Segment, ...]
    rows: int
    queries: int
    keys: int
    device: torch.device

    def __post_init__(self) -> None:
        end: dict[int, int] = {}
        for entry in sorted(self.entries):
            fits = (
                0 <= entry.row < self.rows
                and min(entry.query_start, entry.key_start) >= 0
                and 0 < entry.query_length <= entry.key_length
                and entry.query_start + entry.query_length <= self.queries
                and entry.key_start + entry.key_length <= self.keys
            )
            if not fits:
                grid = f"{self.rows} rows of {self.queries} queries and {self.keys} keys"
                raise ValueError(f"{entry} does not fit into {grid}, or has fewer keys than queries")
            if entry.query_start < end.get(entry.row, 0):
                raise ValueError(f"{entry} overlaps the segment before it in row {entry.row}")
            end[entry.row] = entry.query_start + entry.query_length

    @cached_property
    def keys_are_shared(self) -> bool:
        """Some key belongs to two segments of a row, as where two pieces of one sample meet its beginning."""
        ranges = sorted((one.row, one.key_start, one.key_start + one.key_length) for one in self.entries)
        return any(a[0] == b[0] and b[1] < a[2] for a, b in itertools.pairwise(ranges))

    @property
    def whole(self) -> bool:
        """Each row is one sample from its first slot to its last, with no earlier keys: plain causal attention."""
        full = tuple(Segment(row, 0, self.queries, 0, self.queries) for row in range(self.rows))
        return self.keys == self.queries and self.entries == full

    @cached_property
    def table(self) -> Tensor:
        """int32 [segments, 5]: row, query start, query length, key start, key length."""
        return torch.tensor(self.entries, dtype=torch.int32, device=self.device).reshape(-1, 5)

    @cached_property
    def positions(self) -> Tensor:
        """int64 [rows, queries]: the position of each query in its sample, 0 on pads."""
        grid = torch.zeros(self.rows, self.queries, dtype=torch.int64)
        for row, start, length, _, keys in self.entries:
            grid[row, start : start + length] = torch.arange(keys - length, keys)
        return grid.to(self.device)

    @cached_property
    def covered(self) -> Tensor:
        """bool [rows, queries]: the query belongs to a segment, so it is no pad."""
        grid = torch.zeros(self.rows, self.queries, dtype=torch.bool)
        for row, start, length, _, _ in self.entries:
            grid[row, start : start + length] = True
        return grid.to(self.device)

    @cached_property
    def mask(self) -> Tensor:
        """bool [rows, queries, keys]: the query sees the key. The queries of pads see nothing."""
        grid = torch.zeros(self.rows, self.queries, self.keys, dtype=torch.bool)
        for row, start, length, first, keys in self.entries:
            seen = torch.ones(length, keys, dtype=torch.bool).tril(keys - length)
            grid[row, start : start + length, first : first + keys] = seen
        return grid.to(self.device)

    def check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Raise ValueError unless the tensors have this grid and heads that grouped-query attention can pair."""
        shapes = f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"
        if any(x.dim() != 4 for x in (query, key, value)):
            raise ValueError(f"{shapes}: attention takes [rows, tokens, heads, width]")
        rows, queries, heads, width = query.shape
        if (rows, queries, *key.shape[:2]) != (self.rows, self.queries, self.rows, self.keys):
            grid = f"{self.rows} rows, {self.queries} queries, {self.keys} keys"
            raise ValueError(f"{shapes}: the segments are for {grid}")
        if key.shape != value.shape or key.shape[3] != width or heads % key.shape[2]:
            raise ValueError(f"{shapes}: heads or widths do not pair")
        if not query.dtype == key.dtype == value.dtype:
            raise ValueError(f"query, key and value differ in dtype: {query.dtype}, {key.dtype}, {value.dtype}")


class Routing(NamedTuple):
    """Where the router sends N tokens: `experts` int64 [N, k] with `weights` fp32 [N, k]; all scores fp32 [N, E]."""

    probabilities: Tensor
    weights: Tensor
    experts: Tensor


@dataclass(frozen=True)
class Dispatch:
    """The order in which M = N·k routed rows stand: by expert, then by token, then by slot.

    `order` int64 [M]: n·k + j of each row, token n and slot j; `inverse` int64 [M]: the row of token n, slot j is
    `inverse[n·k + j]`; `offsets` int64 [E + 1]: the rows of expert e are offsets[e] … offsets[e + 1] − 1. All on the
    device; `sizes` alone is a host sync.
    """

    order: Tensor
    inverse: Tensor
    offsets: Tensor
    top_k: int

    @classmethod
    def of(cls, experts: Tensor, count: int) -> Dispatch:
        """From the chosen `experts` int64 [N, k] of `count` experts.

        Raises ValueError for an expert outside on a CPU. On CUDA looking would be a host sync: `sizes`, which is one,
        raises it there, and `triton` leaves the row of such an expert unwritten.
        """
        if experts.device.type == "cpu" and experts.numel():
            checking.in_range("experts", experts, count)
        chosen, order = experts.flatten().sort(stable=True)
        places = torch.arange(len(order), device=order.device)
        inverse = torch.empty_like(order).scatter(0, order, places)
        offsets = torch.searchsorted(chosen, torch.arange(count + 1, device=order.device))
        return cls(order, inverse, offsets, experts.shape[1])

    @property
    def count(self) -> int:
        """The number of experts."""
        return len(self.offsets) - 1

    @cached_property
    def tokens(self) -> Tensor:
        """[M]: the token of each row."""
        return self.order // self.top_k

    @cached_property
    def experts(self) -> Tensor:
        """[M]: the expert of (token n, slot j) at n·k + j."""
        return torch.searchsorted(self.offsets, self.inverse, right=True) - 1

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of rows of each expert. Raises ValueError for rows of experts outside."""
        sizes = tuple(self.offsets.diff().tolist())
        if sum(sizes) != len(self.order):
            outside = len(self.order) - sum(sizes)
            raise ValueError(f"experts must be in 0 … {self.count - 1}, and those of {outside} rows are not")
        return sizes


def implementations() -> tuple[str, ...]:
    """The names of the catalogue's implementations."""
    return tuple(dict.fromkeys(name for known in CATALOGUE.values() for name in known))


def resolve(operator: str, implementation: str) -> Callable[..., Any]:
    """The callable for `operator`. Raises ValueError with the known names on a miss."""
    _check(operator, implementation)
    if ":" in implementation:
        found = _load(implementation)
        if isinstance(found, Mapping):
            if operator not in found:
                raise ValueError(f"{implementation} has no operator {operator!r}; it has: {', '.join(sorted(found))}")
            found = found[operator]
    elif implementation in CATALOGUE[operator]:
        found = _load(CATALOGUE[operator][implementation])
    else:
        known = ", ".join(CATALOGUE[operator])
        raise ValueError(f"operator {operator!r} has no implementation {implementation!r}; it has: {known}")
    if not callable(found):
        raise ValueError(f"{implementation}: not callable for operator {operator!r}, but a {type(found).__name__}")
    return found


class Operators:
    """One callable for each operator of the catalogue: `Operators("torch").attention(...)`.

    `implementation` is one name for all, or a map operator -> name, in which what is left out is `default`.
    `implementations` says what was asked for, not what ran.
    """

    def __init__(self, implementation: str | Mapping[str, str] = "torch", *, default: str = "torch") -> None:
        asked = dict.fromkeys(CATALOGUE, implementation) if isinstance(implementation, str) else dict(implementation)
        for operator, name in asked.items():
            _check(operator, name)
        self.implementations = MappingProxyType({**dict.fromkeys(CATALOGUE, default), **asked})

    def __reduce__(self) -> tuple[type[Operators], tuple[dict[str, str]]]:
        """Copies and pickles hold what was asked for, and resolve it again."""
        return Operators, (dict(self.implementations),)

    def __getattr__(self, operator: str) -> Callable[..., Any]:
        if operator not in CATALOGUE:
            raise AttributeError(f"unknown operator {operator!r}; known: {', '.join(CATALOGUE)}")
        found = resolve(operator, self.implementations[operator])
        setattr(self, operator, found)
        return found


def _check(operator: str, implementation: str) -> None:
    if operator not in CATALOGUE:
        raise ValueError(f"unknown operator {operator!r}; known: {', '.join(CATALOGUE)}")
    if ":" not in implementation and implementation not in implementations():
        known = ", ".join(implementations())
        raise ValueError(f"unknown implementation {implementation!r} of {operator!r}; known: {known}, or module:table")


def _load(dotted: str) -> Any:
    path, _, name = dotted.partition(":")
    module = import_module(path)
    if not hasattr(module, name):
        raise ValueError(f"module {path!r} has no {name!r}")
    return getattr(module, name)
