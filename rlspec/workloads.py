"""Workloads: the samples, their tokens, and the tiers in which operators meet them. Plain data; no torch.

The device column reads these from a run file's configuration, so this module imports the standard library alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

CASES = 3  # the forms that operators are judged in now; a report of before has those of its time, 1 or 2


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
    routings: tuple[str, ...]
    left_out: tuple[tuple[str, str], ...]
    cases: int
    options: bool
    fill: str

    @property
    def active(self) -> int:
        """The global count of active tokens, the denominator of the loss."""
        return sum(sample.active for sample in self.samples)

    @property
    def tokens(self) -> int:
        return sum(sample.queries for sample in self.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """Samples that are decoded together from their first token on, in a grid that they fill from the left or right.

    `positions`: what is decoded one by one and compared; what lies between goes in as one chunk. Empty: all.
    """

    name: str
    samples: tuple[Sample, ...]
    left: bool
    width: int
    positions: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """What a chain spec asks beyond the samples of its tier. `generated`: 0 is all tokens behind a prompt."""

    tier: Tier
    cells: tuple[str, ...]
    micro_batches: tuple[tuple[str, ...], ...]
    loss_weights: str
    page_size: int
    decode: tuple[Decode, ...]
    edges: tuple[int, ...]
    generated: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What a file of `specs/workloads/` says."""

    name: str
    fill: str
    pad_token: int
    operators: tuple[str, ...]
    tiers: tuple[Tier, ...]
    digest: str
    chain: Chain | None = None


def digest(data: Mapping[str, Any]) -> str:
    """SHA-256 of plain data, as a workload is, as canonical JSON: any edit changes it."""
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
        chain=_chain(data["chain"], tiers, samples) if "chain" in data else None,
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
        routings=tuple(data.get("routings", ("even",))),
        left_out=tuple(data.get("left_out", {}).items()),
        cases=whole.get("cases", 1),
        options=whole.get("cases", 1) >= 3 and data.get("options", True),
        fill=whole["fill"],
    )


def _chain(data: Mapping[str, Any], tiers: Sequence[Tier], samples: Mapping[str, Sample]) -> Chain:
    tier = next((one for one in tiers if one.name == data["tier"]), None)
    if tier is None:
        raise ValueError(f"chain: there is no tier {data['tier']!r}; known: {', '.join(one.name for one in tiers)}")
    decode = tuple(_decode(one, samples) for one in data["decode"])
    if len({one.name for one in decode}) != len(decode):
        raise ValueError("chain: two decode cases have one name")
    return Chain(
        tier=tier,
        cells=tuple(data.get("cells", ())),
        micro_batches=tuple(tuple(batch) for batch in data.get("micro_batches", ())),
        loss_weights=data.get("loss_weights", "uniform"),
        page_size=data.get("page_size", 16),
        decode=decode,
        edges=tuple(data.get("edges", ())),
        generated=data.get("generated", 0),
    )


def _decode(data: Mapping[str, Any], samples: Mapping[str, Sample]) -> Decode:
    chosen = _chosen(data["samples"], samples, f"decode case {data['name']}")
    longest = max(sample.length for sample in chosen)
    width, positions = data.get("width", longest), tuple(data.get("positions", ()))
    if width < longest:
        raise ValueError(f"decode case {data['name']}: width {width} does not hold the longest sample, {longest}")
    if list(positions) != sorted(set(positions)) or (positions and positions[0] >= longest):
        raise ValueError(f"decode case {data['name']}: the positions do not ascend, or no sample has them")
    return Decode(name=data["name"], samples=chosen, left=data.get("pads") == "left", width=width, positions=positions)


def _chosen(names: Sequence[str], samples: Mapping[str, Sample], tier: str) -> tuple[Sample, ...]:
    if missing := [name for name in names if name not in samples]:
        raise ValueError(f"tier {tier}: there is no sample {missing[0]!r}; known: {', '.join(samples)}")
    if len(set(names)) != len(names):
        raise ValueError(f"tier {tier}: a sample stands twice")
    return tuple(samples[name] for name in names)
