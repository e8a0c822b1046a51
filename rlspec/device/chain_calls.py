"""The calls of a decoder as they reach it: their grids, their samples, their chunks and the memory of their cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn


@dataclass
class Call:
    """One call on a grid [rows, width]; `cache`: blocks, and the places of each, of what it reads; none without one."""

    rows: int
    width: int
    spans: list[list[int]]
    cache: tuple[int, int]
    chunks: set[int] = field(default_factory=set)

    def trained(self) -> list[Any]:
        """For a record."""
        return [self.rows, self.width, len(self.chunks), self.spans]

    def inferred(self) -> list[int]:
        """For a record."""
        return [self.rows, self.width, *self.cache]


@contextmanager
def watched(decoder: nn.Module) -> Iterator[list[Call]]:
    """Every call within, in order."""
    calls: list[Call] = []

    def see(_: nn.Module, given: tuple[Any, ...], options: dict[str, Any]) -> None:
        tokens: Tensor = given[0]
        held = options.get("cache")
        cache = getattr(held, "cache", held)  # the whole, where some of its samples are called alone
        size = (0, 0) if cache is None else (cache.keys.shape[1], cache.keys.shape[3])
        calls.append(Call(*tokens.shape, [list(span) for span in options["spans"]], size))

    handle = decoder.register_forward_pre_hook(see, with_kwargs=True)
    try:
        yield calls
    finally:
        handle.remove()
