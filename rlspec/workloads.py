"""Workloads: the samples, their tokens, and the tiers in which operators meet them. Plain data; no torch.

The device column reads these from a run file's configuration, so this module imports the standard library alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One sequence. Positions from `prompt` on are active; positions before `first` are keys only, never queries."""

    id: str
    length: int
    prompt: int
    first: int = 0
    tokens: tuple[int, ...] = ()

    @property
    def queries(self) -> int:
        return self.length - self.first

    @property
    def active(self) -> int:
        return self.length - max(self.prompt, self.first)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """Samples that are judged together, `company` that only stands beside them, and the layouts that they meet."""

    name: str
    samples: tuple[Sample, ...]
    company: tuple[Sample, ...]
    layouts: tuple[str, ...]
    chunk: int
    padded_length: int
    permutation: tuple[int, ...]
    seed: int
    counted: bool
    operators: tuple[str, ...]
    judgments: tuple[str, ...]
    projections: tuple[str, ...]
    logit_scales: tuple[float, ...]
    left_out: tuple[tuple[str, str], ...]

    @property
    def active(self) -> int:
        """The global count of active tokens, the denominator of the loss."""
        return sum(sample.active for sample in self.samples)

    @property
    def tokens(self) -> int:
        return sum(sample.queries for sample in self.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What a file of `specs/workloads/` says."""

    name: str
    fill: str
    pad_token: int
    operators: tuple[str, ...]
    tiers: tuple[Tier, ...]
    digest: str


def digest(data: Mapping[str, Any]) -> str:
    """SHA-256 of the workload as canonical JSON: any edit changes it."""
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def of(data: Mapping[str, Any]) -> Workload:
    """A workload from plain data that its schema has passed. Raises ValueError for what does not fit together."""
    samples = {one.id: one for one in map(_sample, data["samples"])}
    if len(samples) != len(data["samples"]):
        raise ValueError("two samples have one id")
    tiers = tuple(_tier(tier, data, samples) for tier in data["tiers"])
    if len({tier.name for tier in tiers}) != len(tiers):
        raise ValueError("two tiers have one name")
    return Workload(
        name=data["name"],
        fill=data["fill"],
        pad_token=data["pad_token"],
        operators=tuple(data["operators"]),
        tiers=tiers,
        digest=digest(data),
    )


def _sample(data: Mapping[str, Any]) -> Sample:
    tokens = tuple(token for first, last in data.get("tokens", ()) for token in range(first, last + 1))
    sample = Sample(
        id=data["id"],
        length=data["length"],
        prompt=data.get("prompt", 0),
        first=max(0, data["length"] - data["queries"]) if "queries" in data else 0,
        tokens=tokens,
    )
    if not sample.prompt < sample.length:
        raise ValueError(f"sample {sample.id}: prompt {sample.prompt} leaves no active token of {sample.length}")
    if tokens and len(tokens) != sample.length:
        raise ValueError(f"sample {sample.id}: {len(tokens)} token ids for {sample.length} positions")
    return sample


def _tier(data: Mapping[str, Any], whole: Mapping[str, Any], samples: Mapping[str, Sample]) -> Tier:
    chosen = _chosen(data["samples"], samples, data["name"])
    if twice := set(data["samples"]) & set(data.get("company", ())):
        raise ValueError(f"tier {data['name']}: sample {min(twice)} is in samples and in company")
    return Tier(
        name=data["name"],
        samples=chosen,
        company=_chosen(data.get("company", ()), samples, data["name"]),
        layouts=tuple(data["layouts"]),
        chunk=data.get("chunk", 0),
        padded_length=data.get("padded_length", 0),
        permutation=tuple(data.get("permutation", range(len(chosen)))),
        seed=data.get("seed", whole["seed"]),
        counted=data.get("counted", True),
        operators=tuple(data.get("operators", whole["operators"])),
        judgments=tuple(data.get("judgments", ())),
        projections=tuple(data.get("projections", ())),
        logit_scales=tuple(float(scale) for scale in data.get("logit_scales", (1,))),
        left_out=tuple(data.get("left_out", {}).items()),
    )


def _chosen(names: Sequence[str], samples: Mapping[str, Sample], tier: str) -> tuple[Sample, ...]:
    if missing := [name for name in names if name not in samples]:
        raise ValueError(f"tier {tier}: there is no sample {missing[0]!r}; known: {', '.join(samples)}")
    if len(set(names)) != len(names):
        raise ValueError(f"tier {tier}: a sample stands twice")
    return tuple(samples[name] for name in names)
