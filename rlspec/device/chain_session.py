"""One arm of a chain while it runs: its bench, its lines, its weights, and where it is."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from rlspec import chain_sizes, chains
from rlspec.chain_sizes import Memory
from rlspec.chains import Cell
from rlspec.device import chain_faults
from rlspec.device.chain_bench import ChainBench
from rlspec.device.chain_faults import Lives
from rlspec.device.chain_inference import Engine
from rlspec.device.chain_lines import Lines
from rlspec.device.chain_model import TrainingPass, logical_weights
from rlspec.device.decoder import Decoder
from rlspec.device.operators import Operators
from rlspec.workloads import Sample


@dataclass
class Session:
    """`at` is what runs now, for messages; `decoder` has the weights once they are there."""

    on: ChainBench
    lines: Lines
    decoder: Decoder | None = None
    at: str = ""

    @property
    def lives(self) -> Lives:
        """What trains and what infers: those with the arm's fault, if it has one."""
        return chain_faults.lives(self.on.fault)

    @property
    def samples(self) -> tuple[Sample, ...]:
        return self.on.chain.tier.samples

    @property
    def names(self) -> list[str]:
        return [sample.id for sample in self.samples]

    @property
    def layers(self) -> int:
        return self.on.model.num_hidden_layers

    @property
    def memory(self) -> Memory:
        bits = 8 * self.on.dtype.itemsize
        return chain_sizes.memory(self.on.chain, self.on.model, bits=bits, backward=self.backward)

    @property
    def wide(self) -> torch.dtype:
        """The dtype of references."""
        return torch.float64 if self.on.dtype == torch.float32 else torch.float32

    def asked(self, *judgments: str) -> bool:
        """Whether the spec asks for one of these."""
        return bool(set(judgments) & set(self.on.judgments))

    @property
    def backward(self) -> bool:
        """Whether anything asks for gradients; else no operator need have a backward."""
        return self.asked(*chains.GRADIENTS)

    def step(self, name: str) -> None:
        """Where the run is, for messages; also what a person who waits sees."""
        self.at = name
        print(f"at {name}", flush=True)

    def total_memory(self) -> int:
        """Bytes of the GPU, or of the machine."""
        if self.on.device.type == "cuda":
            return int(torch.cuda.get_device_properties(self.on.device).total_memory)
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def alone(self) -> Cell:
        """One sample a call: the smallest graphs."""
        return next(cell for cell in chains.cells(self.on.chain, ("B1/full",)) if cell.name == "B1/full")

    def training(self, kind: type[TrainingPass], operators: Operators, **options: Any) -> TrainingPass:
        """A pass over the samples of the tier."""
        tier, on = self.on.chain.tier, self.on
        assert self.decoder is not None
        loss_weights = logical_weights(tier) if on.chain.loss_weights == "logical" else None
        tokens = [on.tokens(sample) for sample in (*tier.samples, *tier.company)]
        options |= {"loss_weights": loss_weights, "pad_token": on.pad_token, "backward": self.backward}
        return kind(self.decoder, operators, tier, tokens, **options)

    def engine(self) -> Engine:
        """The arm's engine of inference."""
        on = self.on
        assert self.decoder is not None
        return self.lives.engine(
            self.decoder,
            on.operators(),
            tokens=on.tokens,
            pad_token=on.pad_token,
            page_size=on.chain.page_size,
            unwritten=on.unwritten,
        )
