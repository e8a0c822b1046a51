"""What this machine has, asked of its own tools: for `requires` and for `doctor`."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlspec import nvcc

_GPU = re.compile(
    r"\s*(?P<name>.+?)\s*,\s*(?P<major>\d+)\.(?P<minor>\d+)\s*,\s*(?:(?P<mib>\d+)|[^,]*?)\s*,\s*(?P<driver>\S+)\s*",
    re.ASCII,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU; `memory_gib` is 0 where its driver does not say."""

    name: str
    capability: tuple[int, int]
    memory_gib: float
    driver: str


def gpus() -> list[Gpu]:
    """The GPUs that nvidia-smi lists; none where it is not there or fails."""
    query = "--query-gpu=name,compute_cap,memory.total,driver_version"
    lines = _output(["nvidia-smi", query, "--format=csv,noheader,nounits"]).splitlines()
    return [
        Gpu(
            name=found["name"],
            capability=(int(found["major"]), int(found["minor"])),
            memory_gib=float(found["mib"] or 0) / 1024,  # [N/A] where memory is shared with the host
            driver=found["driver"],
        )
        for found in filter(None, map(_GPU.fullmatch, lines))
    ]


def _output(argv: list[str]) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, timeout=20, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else ""


def unmet(requires: Mapping[str, Any], *, pinned: bool = False, estimate: float | None = None) -> list[str]:
    """Each requirement that this machine does not meet, as a sentence.

    `pinned`: the spec has weights with pins. `estimate`: GiB of GPU memory that the run is thought to need.
    """
    reasons = [f"program {name!r} is not on PATH" for name in requires.get("commands", ()) if not shutil.which(name)]
    if requires.get("pinned_weights") and not pinned:
        reasons.append("pinned weights are needed, and the spec has none")
    reasons += [f"package {name!r} is not installed here" for name in requires.get("packages", ()) if not version(name)]
    reasons += [f"there is no folder {name} with weights" for name in requires.get("weights", ()) if not _holds(name)]
    wants_gpu = requires.get("device") == "cuda" or {"capability", "gpus", "memory_gib"} & set(requires)
    if not wants_gpu:
        return reasons
    here = gpus()
    if not here:
        return [*reasons, "no CUDA device here (nvidia-smi lists none)"]
    if (count := requires.get("gpus", 1)) > len(here):
        reasons.append(f"{count} GPUs are needed, here: {len(here)}")
    if text := requires.get("capability"):
        need = tuple(int(part) for part in text.removeprefix(">=").split("."))
        fits = [gpu.capability >= need if text.startswith(">=") else gpu.capability == need for gpu in here]
        if not all(fits):
            found = sorted({".".join(map(str, gpu.capability)) for gpu in here})
            reasons.append(f"compute capability {text} is needed, here: {', '.join(found)}")
    if need_gib := requires.get("memory_gib"):
        least = min(gpu.memory_gib for gpu in here)
        if not least >= need_gib:
            more = f" ({estimate:.0f} by estimate)" if estimate is not None else ""
            reasons.append(f"{need_gib:g} GiB of GPU memory are needed{more}, here: {least:.1f} GiB")
    return reasons


def _holds(folder: str) -> bool:
    return (Path(folder) / "config.json").is_file()


def version(distribution: str) -> str | None:
    """The installed version, without importing anything."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def facts() -> list[tuple[str, str]]:
    """What `doctor` prints of this machine."""
    here = gpus()
    rows = [("GPU", f"{gpu.name}, {gpu.memory_gib:.0f} GiB, sm_{gpu.capability[0]}{gpu.capability[1]}") for gpu in here]
    rows = rows or [("GPU", "none that nvidia-smi lists; specs that require one are BLOCKED here")]
    if here:
        rows.append(("driver", here[0].driver))
    for label, name in (("torch", "torch"), ("triton", "triton"), ("wandb", "wandb")):
        rows.append((label, version(name) or "not installed"))
    for label, command in (("git", "git"), ("slurm", "srun")):
        rows.append((label, shutil.which(command) or "not on PATH"))
    return [*rows, ("nvcc", nvcc.find() or "not on PATH"), ("kernels", nvcc.state())]
