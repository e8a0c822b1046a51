"""Between logical tokens and the slots of a call's grid: tables to grids, and results back by identity."""

from __future__ import annotations

import torch
from torch import Tensor

from rlspec.device import cases
from rlspec.device.cases import PADS, Input
from rlspec.device.operators import Segment, Segments
from rlspec.layouts import Call, Layout
from rlspec.workloads import Tier

STRIDED, SPREAD = "strided", "spread"  # how a layout's tensors lie: as views, or with no two elements side by side


def physical(one: Input, table: Tensor, layout: Layout, call: Call, tier: Tier) -> Tensor:
    """[rows, width, …] of a call: rows of table [tokens + 1, …], the layout's pads elsewhere, laid out as it says."""
    index, width = _slots(call, tier, keys=one.keys)
    index = index.to(table.device)
    grid = table.index_select(0, index).unflatten(0, (call.rows, width))
    if one.data and layout.pads != "zero":
        pads = index == len(table) - 1
        grid = torch.where(pads.view(call.rows, width, *[1] * (grid.dim() - 2)), PADS[layout.pads], grid)
    return _laid(grid, layout, wider_rows=one.data)


def upstream(table: Tensor, layout: Layout, call: Call, tier: Tier) -> Tensor:
    """The gradient of an output of a call, [rows, width, …] of table [tokens + 1, …]."""
    index, width = _slots(call, tier, keys=False)
    grid = table.index_select(0, index.to(table.device)).unflatten(0, (call.rows, width))
    return _laid(grid, layout, wider_rows=False)


def restore(
    into: dict[str, Tensor],
    name: str,
    grid: Tensor,
    call: Call,
    tier: Tier,
    *,
    keys: bool,
    poison: float = float("nan"),
) -> None:
    """Write what the samples that are judged have in a grid into `into[name]`, [tokens, ...] in canonical order."""
    width = call.key_width if keys else call.width
    starts, _ = _starts(tier, keys)
    slots, places = [], []
    for run in call.key_runs if keys else call.runs:
        if run.sample < len(tier.samples) and run.sample not in call.changed:
            slot, place = run.row * width + run.column, starts[run.sample] + run.position
            slots += range(slot, slot + run.length)
            places += range(place, place + run.length)
    if name not in into:
        count = sum(sample.length if keys else sample.queries for sample in tier.samples)
        value = poison if grid.is_floating_point() else -1
        into[name] = torch.full((count, *grid.shape[2:]), value, dtype=grid.dtype, device=grid.device)
    rows = grid.flatten(0, 1)[torch.tensor(slots, device=grid.device)]
    into[name][torch.tensor(places, device=grid.device)] = rows.to(into[name].dtype)


def segments_of(call: Call, device: torch.device) -> Segments:
    """The segments of a call: each run's queries meet the keys of the same sample up to their own positions."""
    keys = {(run.row, run.sample): run for run in call.key_runs}
    entries: list[Segment] = []
    for run in call.runs:
        key = keys[run.row, run.sample]
        entries.append(Segment(run.row, run.column, run.length, key.column, run.position + run.length))
    return Segments(tuple(entries), call.rows, call.width, call.key_width, device)


def _slots(call: Call, tier: Tier, *, keys: bool) -> tuple[Tensor, int]:
    """For each slot of a grid the row of the tables, and the grid's width."""
    width = call.key_width if keys else call.width
    starts, total = _starts(tier, keys)
    index = torch.full((call.rows * width,), total * cases.copies(tier), dtype=torch.int64)
    for run in call.key_runs if keys else call.runs:
        first = starts[run.sample] + run.position + (total if run.sample in call.changed else 0)
        slot = run.row * width + run.column
        index[slot : slot + run.length] = torch.arange(first, first + run.length)
    return index, width


def _starts(tier: Tier, keys: bool) -> tuple[list[int], int]:
    """For each sample the row of its position 0 in a table, and the rows of one copy."""
    starts, total = [], 0
    for sample in (*tier.samples, *tier.company):
        starts.append(total if keys else total - sample.first)
        total += sample.length if keys else sample.queries
    return starts, total


def _laid(grid: Tensor, layout: Layout, *, wider_rows: bool) -> Tensor:
    """The same values as a view: of a wider row, as of a fused projection, or of every second token or element."""
    if layout.how == SPREAD:
        base = _garbage(grid, (*grid.shape, 2))
        return base[..., 0].copy_(grid)
    if layout.how != STRIDED:
        return grid
    if wider_rows and grid.dim() > 2:
        base = _garbage(grid, (*grid.shape[:-1], 2 * grid.shape[-1]))
        return base[..., : grid.shape[-1]].copy_(grid)
    base = torch.zeros(grid.shape[0], 2 * grid.shape[1], *grid.shape[2:], dtype=grid.dtype, device=grid.device)
    return base[:, ::2].copy_(grid)


def _garbage(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """What no right result can be made of: NaN, and of ids the lowest."""
    value = float("nan") if like.is_floating_point() else 0
    return torch.full(shape, value, dtype=like.dtype, device=like.device)
