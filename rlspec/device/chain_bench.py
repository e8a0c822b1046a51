"""What one arm of a chain spec is run on: model, weights, workload and implementation, from its run file and plan."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlspec import chains, weight_folders
from rlspec.chains import Cell
from rlspec.device import fills, weight_files, weights
from rlspec.device.bench import Arm, fields
from rlspec.device.decoder import Decoder
from rlspec.device.kv_cache import unwritten
from rlspec.device.operators import Operators
from rlspec.workloads import Chain, Sample


@dataclass(frozen=True, kw_only=True)
class ChainBench(Arm):
    """What one arm is run on. `limits`: judgment -> limits of its accuracy row, None where it has none."""

    fault: str | None
    chain: Chain
    cells: tuple[Cell, ...]
    entry: Mapping[str, Any]
    profile: str
    weights: Mapping[str, Any]
    limits: Mapping[str, Mapping[str, float] | None]
    spec_dir: Path

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
        return unwritten(self.implementation)

    def decoder(self) -> Decoder:
        """With its weights, in the working dtype.

        Raises ValueError for files that are not what is pinned, and for a config.json beside them of another model, or
        of one that the decoder does not run.
        """
        options: dict[str, Any] = {"dtype": self.dtype, "master_dtype": self.dtype, "profile": self.profile}
        if self.weights["source"] == "seeded":
            made = Decoder(self.model, self.operators(), device=self.device, **options)
            made.requires_grad_(False)
            weights.seeded(made, self.weights["seed"])
            return made
        made = Decoder(self.model, self.operators(), device="meta", **options)
        made.requires_grad_(False)
        assert self.folder is not None
        if other := weight_folders.unfit(self.entry, self.folder):
            weight_files.refuse(self.folder, [f"they are not of the model of the spec: {other}"])
        weights.load(made, self.folder, self.weights["pins"], device=self.device)
        return made

    @property
    def folder(self) -> Path | None:
        """That of the weights, if they are files."""
        at = Path(os.environ.get("RLSPEC_SPEC_DIR", self.spec_dir))
        return at / self.weights["path"] if "path" in self.weights else None


def bench(config: Mapping[str, Any], arm: Mapping[str, Any]) -> ChainBench:
    """From a run file's configuration and the arm's entry in plan.json. Raises ValueError."""
    common = fields(config, arm)
    chain = chains.asked(common["workload"])
    return ChainBench(
        fault=arm.get("fault"),
        chain=chain,
        cells=chains.cells(chain, config["cells"]),
        entry=config["model"],
        profile=config["profile"],
        weights=config["weights"],
        limits=config["limits"],
        spec_dir=Path(config["spec_dir"]),
        **common,
    )
