"""Which process stands where in a mesh, and what processes along one axis send each other, with gradients.

Rank (p·dp + d)·cp + c is stage p of the pipeline, replica d of the data, piece c of the sequence; so the dp·cp ranks of
a stage stand in a row. Number s of them holds the experts of number s mod ep, as replica s div ep.

`torch.distributed` makes the groups; nccl and gloo both do all that is asked of them here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from rlspec.device.job import Job
from rlspec.device.settings import Settings


@dataclass(frozen=True)
class Peers:
    """The processes along an axis: this one is number `rank` of `world`. Without a group they are all of the job."""

    rank: int = 0
    world: int = 1
    group: Any = None

    @classmethod
    def of(cls, job: Job, parts: Sequence[Sequence[int]]) -> Peers:
        """This process's part, of `parts` of one size that hold every rank once. All processes call it alike."""
        (mine,) = (ranks for ranks in parts if job.rank in ranks)
        group = None
        if 1 < len(mine) < job.world:
            groups = [dist.new_group(list(ranks)) for ranks in parts]
            group = groups[parts.index(mine)]
        return cls(mine.index(job.rank), len(mine), group)

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over the peers, in place."""
        if self.world > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor


@dataclass(frozen=True)
class Mesh:
    """This process's peers: `pipeline` (pp), `stage` (dp·cp), `context` (cp), `experts` (ep) and those who hold the
    same experts. `replica` of the data, from 0.
    """

    pipeline: Peers
    stage: Peers
    context: Peers
    experts: Peers
    expert_replicas: Peers

    @property
    def replica(self) -> int:
        return self.stage.rank // self.context.world

    @classmethod
    def of(cls, settings: Settings, job: Job) -> Mesh:
        """Raises ValueError if the job has not the processes that the settings ask for."""
        if job.world != settings.world:
            shape = f"pp·dp·cp = {settings.pp}·{settings.dp}·{settings.cp}"
            raise ValueError(f"the mesh has {shape} = {settings.world} processes, and {job.world} were started")
        size, cp, ep = settings.dp * settings.cp, settings.cp, settings.ep
        stages = [range(start, start + size) for start in range(0, job.world, size)]
        stage = Peers.of(job, stages)
        alike = [ranks[number::ep] for ranks in stages for number in range(ep)]
        return cls(
            pipeline=Peers.of(job, [range(number, job.world, size) for number in range(size)]),
            stage=stage,
            context=Peers.of(job, [range(start, start + cp) for start in range(0, job.world, cp)]),
            experts=Peers.of(job, [range(start, start + ep) for start in range(0, job.world, ep)]),
            expert_replicas=stage if ep == 1 else Peers.of(job, alike),
        )


def gather(x: Tensor, peers: Peers) -> Tensor:
    """[peers, *shape of x] of all the peers, in their order. The gradient of x is the sum of what flows back to it."""
    return _Gather.apply(x, peers)  # type: ignore[no-any-return]


def exchange(rows: Tensor, peers: Peers, give: Sequence[int], take: Sequence[int]) -> Tensor:
    """The first `give[0]` of the rows go to peer 0, the next to peer 1; back come `take[0]` of peer 0, and so on."""
    return _Exchange.apply(rows, peers, tuple(give), tuple(take))  # type: ignore[no-any-return]


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers) -> Tensor:
        ctx.peers = peers
        found = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(peers.world)]
        dist.all_gather(found, x.contiguous(), group=peers.group)
        return torch.stack(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        # Summed in fp32, so that narrow gradients are rounded once, as if one process had summed them.
        wide = upstream.to(torch.promote_types(upstream.dtype, torch.float32), copy=True).contiguous()
        return ctx.peers.sum(wide)[ctx.peers.rank].to(upstream.dtype), None


class _Exchange(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, peers: Peers, give: tuple[int, ...], take: tuple[int, ...]) -> Tensor:
        ctx.peers, ctx.give, ctx.take = peers, give, take
        return all_to_all(rows, peers, give, take)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None]:
        return all_to_all(upstream, ctx.peers, ctx.take, ctx.give), None, None, None


def all_to_all(rows: Tensor, peers: Peers, give: Sequence[int], take: Sequence[int]) -> Tensor:
    """As `exchange`, without gradients."""
    found = rows.new_empty(sum(take), *rows.shape[1:])
    dist.all_to_all_single(found, rows.contiguous(), list(take), list(give), group=peers.group)
    return found
