"""What one arm of a chain spec is run on: model, weights, workload and implementation, from its run file and plan."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlspec import chains, nodes, workloads
from rlspec.chains import Cell, Sizes
from rlspec.device import architecture, fills, weights
from rlspec.device.bench import DTYPES
from rlspec.device.decoder import Decoder
from rlspec.device.operators import Operators
from rlspec.workloads import Chain, Sample, Workload

TOLERANT = ("reference", "torch")  # of attention: they multiply by 0 what they do not see, so NaN would leak


@dataclass(frozen=True, kw_only=True)
class ChainBench:
    """What one arm is run on. `limits`: judgment -> limits of its accuracy row, None where it has none."""

    arm: str
    implementation: str | Mapping[str, str]
    fault: str | None
    workload: Workload
    chain: Chain
    cells: tuple[Cell, ...]
    model: architecture.Architecture
    sizes: Sizes
    profile: str
    weights: Mapping[str, Any]
    judgments: tuple[str, ...]
    limits: Mapping[str, Mapping[str, float] | None]
    dtype: torch.dtype
    device: torch.device
    spec_dir: Path

    def implementation_of(self, operator: str) -> str:
        return nodes.implementation_of(operator, self.implementation)

    def operators(self) -> Operators:
        """Those of the arm."""
        return Operators(self.implementation)

    def tokens(self, sample: Sample) -> Sequence[int]:
        """The ids of a sample, below the vocabulary."""
        below = self.model.vocab_size
        if sample.tokens:
            return [token % below for token in sample.tokens]
        seed = self.workload.tiers[0].seed
        return fills.integers(seed, sample.id, range(sample.length), 1, below, 0).flatten().tolist()

    @property
    def pad_token(self) -> int:
        return self.workload.pad_token % self.model.vocab_size

    @property
    def unwritten(self) -> float:
        """What memory of a cache holds before it is written."""
        return 0.0 if self.implementation_of("attention") in TOLERANT else float("nan")

    def decoder(self) -> Decoder:
        """With its weights, in the working dtype. Raises ValueError for files that are not what is pinned."""
        options: dict[str, Any] = {"dtype": self.dtype, "master_dtype": self.dtype, "profile": self.profile}
        if self.weights["source"] == "seeded":
            made = Decoder(self.model, self.operators(), device=self.device, **options)
            made.requires_grad_(False)
            weights.seeded(made, self.weights["seed"])
            return made
        made = Decoder(self.model, self.operators(), device="meta", **options)
        made.requires_grad_(False)
        folder = Path(os.environ.get("RLSPEC_SPEC_DIR", self.spec_dir)) / self.weights["path"]
        weights.load(made, folder, self.weights["pins"], device=self.device)
        return made


def bench(config: Mapping[str, Any], arm: Mapping[str, Any]) -> ChainBench:
    """From a run file's configuration and the arm's entry in plan.json. Raises ValueError."""
    sys.path.append(os.environ.get("RLSPEC_SPEC_DIR", config["spec_dir"]))  # a user's operators lie beside the spec
    if config["dtype"] not in DTYPES:
        raise ValueError(f"chains are run in {', '.join(DTYPES)}, not in {config['dtype']}")
    cuda = torch.cuda.is_available() and config["device"] != "cpu"
    if config["device"] == "cuda" and not cuda:
        raise ValueError("the spec requires a CUDA device, and torch sees none")
    workload = workloads.of(config["workload"])
    chain = chains.asked(workload)
    return ChainBench(
        arm=arm["name"],
        implementation=arm.get("implementation") or nodes.DEFAULT,
        fault=arm.get("fault"),
        workload=workload,
        chain=chain,
        cells=chains.cells(chain, config["cells"]),
        model=architecture.read(config["model"]),
        sizes=chains.sizes(config["model"]),
        profile=config["profile"],
        weights=config["weights"],
        judgments=tuple(config["judgments"]),
        limits=config["limits"],
        dtype=DTYPES[config["dtype"]],
        device=torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu"),
        spec_dir=Path(config["spec_dir"]),
    )
