"""The gradients of all parameters of a model over the calls of one cell, each summed by whoever its operator names.

An operator with `weight_gradient` owns the sum: it is handed the rows of every call, which the logical order alone
then adds up (`rlspec.device.gradients`). Of any other operator the gradients that autograd gave are added in fp32 in
the order in which they come, as in a trainer: those bits are of the layout.

A call that is cut into chunks meets its samples in turns, and autograd goes through them backwards. So the rows of a
weight wait for the last chunk of the call and are handed over together. Nothing waits from one call to the next: a
weight takes one fp32 accumulator, two where it is used in two places, which are added once at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from rlspec.device.gradients import Identity, WeightGradient
from rlspec.errors import RunError


class Use(NamedTuple):
    """Where the model uses a parameter: a tied table also as `lm_head.weight`."""

    parameter: str
    name: str


class Ledger:
    """See the module. `lengths`: of the samples of the workload.

    `accumulated_by`: parameter -> "operator", or "autograd" where any part of the sum is autograd's.
    Calls come one after the other: `begin`, then `hand` and `take` while gradients flow, then `end`. RunError for rows
    that come twice, too early or never, with the name of the weight.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = tuple(lengths)
        self.accumulated_by: dict[str, str] = {}
        self._owners: dict[Use, WeightGradient] = {}
        self._sums: dict[str, Tensor] = {}
        self._waiting: dict[Use, dict[int, dict[str, Tensor]]] = {}
        self._identity, self._chunks = Identity((), 0), 1

    def begin(self, chunks: Sequence[Identity]) -> None:
        """A call, with the identity of the rows of each of its chunks."""
        self._identity, self._chunks = joined(chunks), len(chunks)

    def hand(
        self, use: Use, make: Callable[[], WeightGradient], chunk: int, x: Tensor, dy: Tensor, **more: Tensor
    ) -> None:
        """The rows of one chunk, x, dy and what else `add` takes, each [B, columns, ...].

        `make` starts the gradient of a weight not yet met.
        """
        here = self._waiting.setdefault(use, {})
        if chunk in here:
            raise RunError(f"{use.name}: chunk {chunk} came twice in one call")
        here[chunk] = {name: rows.flatten(0, 1) for name, rows in {"x": x, "dy": dy, **more}.items()}
        if len(here) < self._chunks:
            return
        parts = [self._waiting[use][index] for index in range(self._chunks)]
        del self._waiting[use]
        if use not in self._owners:
            self._owners[use] = make()
        with _named(use):
            whole = {name: _cat([part[name] for part in parts]) for name in parts[0]}
            self._owners[use].add(whole.pop("x"), whole.pop("dy"), self._identity, **whole)
        self.accumulated_by.setdefault(use.parameter, "operator")

    def take(self, use: Use, leaf: Tensor) -> None:
        """The gradient that has arrived at a leaf, which then forgets it."""
        assert leaf.grad is not None
        if use.parameter not in self._sums:
            self._sums[use.parameter] = torch.zeros(leaf.shape, dtype=torch.float32, device=leaf.device)
        self._sums[use.parameter] += leaf.grad
        leaf.grad = None
        self.accumulated_by[use.parameter] = "autograd"

    def end(self) -> None:
        """The call is over: no chunk may be missing."""
        for use, here in self._waiting.items():
            missing = min(set(range(self._chunks)) - set(here))
            raise RunError(f"{use.name}: chunk {missing} of the call never came")

    def finish(self, parameters: Iterable[str]) -> dict[str, Tensor]:
        """fp32, in the shapes of the parameters. Of a weight used in two places: the sum, each part finished."""
        totals = dict(self._sums)
        for use, owner in self._owners.items():
            with _named(use):
                part = owner.finish()
            totals[use.parameter] = totals[use.parameter].add_(part) if use.parameter in totals else part
        names = list(parameters)
        if missing := [name for name in names if name not in totals]:
            raise RunError(f"no gradient of {missing[0]} ever came")
        return {name: totals[name] for name in names}


def joined(parts: Sequence[Identity]) -> Identity:
    """The identity of the rows of these, one after the other."""
    runs, rows = [], 0
    for part in parts:
        runs += [run._replace(row=run.row + rows) for run in part.runs]
        rows += part.rows
    return Identity(tuple(runs), rows)


def _cat(rows: Sequence[Tensor]) -> Tensor:
    return rows[0] if len(rows) == 1 else torch.cat(list(rows))


@contextmanager
def _named(use: Use) -> Iterator[None]:
    """Say whose rows it was."""
    try:
        yield
    except RunError as error:
        raise RunError(f"{use.name}: {error}") from error
