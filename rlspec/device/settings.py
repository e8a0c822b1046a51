"""What a run file configures, checked once: the same for all arms. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rlspec import architecture

OF_KIND: Mapping[str, Mapping[str, Any]] = {
    "correctness": {"learning_rate": 1e-5, "force_balanced_routing": False},
    "performance": {"learning_rate": 1e-6, "force_balanced_routing": True},
}
ELSEWHERE = ("max_steps", "corpus_samples")  # what the host made `steps` of, and what only lint reads
AXES = ("pp", "dp", "cp", "ep")
CHOICES: Mapping[str, tuple[str, ...]] = {
    "kind": tuple(OF_KIND),
    "dtype": ("fp32", "bf16"),
    "master_dtype": ("fp32", "bf16"),
    "load_balance_type": ("micro-batch", "global-batch", "sequence"),
    "profile": ("ws1", "hf"),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Batch sizes in sequences; `dp` replicas, each of pp·cp processes, share a global batch. `corpus` None: the
    default one.
    """

    kind: str
    model: Mapping[str, Any]
    steps: int
    sequence_length: int
    dtype: str
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    global_batch_size: int = 8
    micro_batch_size: int = 1
    start_learning_rate: float = 1e-6
    learning_rate: float
    weight_decay: float = 0.1
    gradient_clip: float = 1.0
    load_balance_coefficient: float = 1e-3
    load_balance_type: str = "global-batch"
    force_balanced_routing: bool
    master_dtype: str = "fp32"
    profile: str = "ws1"
    deterministic: bool = False
    seed: int = 1234
    corpus: Path | None = None
    fault: str | None = None

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}; the embedded trainer knows {', '.join(allowed)}")
        if self.global_batch_size % (self.micro_batch_size * self.dp):
            parts = f"micro_batch_size·dp = {self.micro_batch_size}·{self.dp}"
            raise ValueError(f"global_batch_size {self.global_batch_size} is not divisible by {parts}")
        if self.cp > 1 and self.sequence_length % (2 * self.cp):
            length = f"sequence_length {self.sequence_length}"
            raise ValueError(f"mesh: {length} is not divisible by 2·cp = {2 * self.cp}")
        if (self.dp * self.cp) % self.ep:
            raise ValueError(f"mesh: ep {self.ep} does not divide dp·cp = {self.dp}·{self.cp}")

    @property
    def world(self) -> int:
        """Processes of the job."""
        return self.pp * self.dp * self.cp

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step on one replica."""
        return self.global_batch_size // (self.micro_batch_size * self.dp)

    @property
    def balanced(self) -> bool:
        """Whether a load-balance loss is part of the training."""
        return architecture.experts(self.model) > 0 and self.load_balance_coefficient > 0


def read(config: Mapping[str, Any]) -> Settings:
    """The settings of a run file's configuration. Raises ValueError for a key that this trainer lacks."""
    mesh, model = config["mesh"], config["model"]
    given = {key: value for key, value in config["settings"].items() if key not in ELSEWHERE}
    known = {field.name for field in fields(Settings)} - {"kind", "model", "steps", "sequence_length", "dtype", *AXES}
    if unknown := sorted(set(given) - known):
        raise ValueError(f"unknown setting {unknown[0]!r} of the embedded trainer; known: {', '.join(sorted(known))}")
    if given.get("corpus") is not None:
        given["corpus"] = Path(config["spec_dir"], given["corpus"])
    return Settings(
        kind=config["kind"],
        model=model,
        steps=config["steps"],
        sequence_length=config["sequence_length"],
        dtype=config["dtype"],
        **{axis: mesh[axis] for axis in AXES},
        **{
            **({"load_balance_type": model["load_balance_type"]} if "load_balance_type" in model else {}),
            **OF_KIND.get(config["kind"], {}),
            **given,
        },
    )
