"""The processes that train together: sums and maxima over them, and their device. One process needs no start-up."""

from __future__ import annotations

import gc
import importlib
import os
import resource
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Job:
    """Rank of `world` processes."""

    device: torch.device
    rank: int = 0
    world: int = 1

    @property
    def backend(self) -> str:
        """What carries tensors between the ranks: nccl or gloo, nothing in one process."""
        return str(dist.get_backend()) if self.world > 1 else "none"

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks, in place."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def maximum(self, values: Iterable[float]) -> list[float]:
        """The largest over the ranks of each value."""
        tensor = torch.tensor(list(values), dtype=torch.float64, device=self.device)
        if self.world > 1:
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
        found: list[float] = tensor.tolist()
        return found

    def now(self) -> float:
        """Seconds on the host's clock, when the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def reset_peak(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak_memory(self) -> float:
        """GiB: allocated on the GPU since `reset_peak`, without one the largest resident size of the process so far."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 2**30
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


@contextmanager
def join(environment: Mapping[str, str] = os.environ) -> Iterator[Job]:
    """The job that torchrun's variables tell of (nccl on GPUs, gloo else); without them one process.

    Meshes must be gone when the block ends, so make them in a function of their own: gloo's threads end with the last
    reference to their group, and one that still lets go of a tensor while Python shuts down aborts the process.
    Raises ValueError where processes would have to share a GPU.
    """
    world, rank = int(environment.get("WORLD_SIZE", "1")), int(environment.get("RANK", "0"))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", _gpu(environment))
        torch.cuda.set_device(device)
    elif "OMP_NUM_THREADS" not in environment:
        # More threads split sums in other places, and some of torch's scatters then add in any order.
        torch.set_num_threads(1)
    if world == 1:
        yield Job(device)
        return
    # Its functions keep, as a default, the group that there is when they are imported, as much of torch does later on.
    importlib.import_module("torch.distributed.nn")
    if device.type == "cuda":
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    yield Job(device, rank, world)
    # Not after an error: nccl ends a group when all of its ranks do, and the others still wait for the one that failed.
    dist.destroy_process_group()
    gc.collect()  # pipelines are cycles that hold a group


def _gpu(environment: Mapping[str, str]) -> int:
    """The number of this process's own GPU. Raises ValueError, in all processes alike, if there are too few."""
    mine, there = int(environment.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    needed = int(environment.get("LOCAL_WORLD_SIZE", mine + 1))
    if needed > there:
        remedy = "one process a GPU, or CUDA_VISIBLE_DEVICES set to nothing for gloo on the CPU"
        raise ValueError(f"{needed} processes of this machine see {there} GPU{'s' * (there != 1)}: {remedy}")
    return mine
