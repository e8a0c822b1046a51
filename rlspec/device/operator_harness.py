"""Judge operators: every layout of every tier through a candidate, compared with a reference and with itself.

Writes records.jsonl line by line: `comparison` lines with what was measured, then one `cell` line for an operator and
tier with what was seen to run. The host decides: it holds the lines against the contract and against what had to run.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch

from rlspec import layouts, nodes
from rlspec.device import native, observe, other_process, router_statistics
from rlspec.device.bench import Bench
from rlspec.device.operators import resolve
from rlspec.device.told import told
from rlspec.device.variant import Variant
from rlspec.layouts import Layout
from rlspec.nodes import NODES
from rlspec.workloads import Tier


def main(on: Bench, records: Path) -> None:
    """Judge all operators of the bench into `records`; in a process that was asked for digests alone, only those."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    if wanted := os.environ.get(other_process.ONLY_CANONICAL):
        Path(wanted).write_text(json.dumps(dict(other_process.canonical_digests(on))), encoding="utf-8")
        return
    with records.open("w", encoding="utf-8") as file:
        writer, environment = _Writer(file), observe.environment(on.device)
        writer.line({"record": "run", "schema_version": 1, "arm": on.arm, "kind": "operators",
                     "environment": environment})  # fmt: skip
        native.prepare(on.device, map(on.implementation_of, on.operators))
        elsewhere = other_process.digests_of(on)
        due = [(name, tier) for name in on.operators if not NODES[name].not_applicable
               for tier in nodes.tiers(name, on.workload.tiers)]  # fmt: skip
        for number, (operator, tier) in enumerate(due, 1):
            said = _cell(on, operator, tier, writer, elsewhere, environment)
            print(f"step {number}/{len(due)} | {operator} {tier.name}: {said}", flush=True)
        writer.line({"record": "end", "cells": writer.cells, "comparisons": writer.comparisons})


@dataclass
class _Writer:
    file: TextIO
    cells: int = 0
    comparisons: int = 0

    def line(self, line: Mapping[str, Any]) -> None:
        self.file.write(json.dumps(line, allow_nan=False) + "\n")
        self.file.flush()
        self.cells += line["record"] == "cell"
        self.comparisons += line["record"] == "comparison"


def _cell(
    on: Bench, operator: str, tier: Tier, writer: _Writer, elsewhere: Mapping[str, str], environment: Mapping[str, Any]
) -> str:
    """Write one cell; what came of it in a few words."""
    cell, started = _Cell(on, operator, tier, elsewhere, environment), time.monotonic()
    try:
        cell.prepare()
        for line in cell.comparisons():
            writer.line({"record": "comparison", "operator": operator, "tier": tier.name, **line})
    except Exception as error:  # whatever a user's operator raises is the end of its own cell alone
        cell.error = _no_module(error, on.implementation_of(operator)) or told(error, getattr(error, "place", ""))
    summary = cell.summary()
    writer.line(summary)
    problem = cell.error["message"] if cell.error else cell.blocked
    return problem or f"measured in {time.monotonic() - started:.1f} s"


def _no_module(error: Exception, implementation: str) -> dict[str, Any] | None:
    """Where the module of an implementation is missing itself, and not one that it imports: a sentence, no frames."""
    module = implementation.partition(":")[0]
    if not isinstance(error, ModuleNotFoundError) or not f"{module}.".startswith(f"{error.name}."):
        return None
    print(f"no module {error.name} in {os.pathsep.join(sys.path)}", file=sys.stderr, flush=True)
    places = f"in the folder of the spec, PYTHONPATH{'' if os.environ.get('PYTHONPATH') else ' (not set)'}"
    message = f"{implementation}: there is no module {error.name}; looked {places} and the installed packages"
    return {"message": message, "tail": []}


@dataclass
class _Cell:
    """One operator in one tier, all judgments, all variants."""

    on: Bench
    operator: str
    tier: Tier
    elsewhere: Mapping[str, str]
    environment: Mapping[str, Any]
    backend: str | None = None
    blocked: str | None = None
    no_backward: str | None = None
    error: dict[str, Any] | None = None
    apart: list[str] = field(default_factory=list)
    seen: observe.Seen = field(default_factory=observe.Seen)
    passed_by: dict[str, list[str]] = field(default_factory=dict)
    layouts: tuple[Layout, ...] = ()
    candidate: Callable[..., Any] | None = None

    def prepare(self) -> None:
        self.candidate = resolve(self.operator, self.on.implementation_of(self.operator))
        self.backend = getattr(self.candidate, "backend", None)
        interpreted = os.environ.get("TRITON_INTERPRET") == "1" and self.backend == "triton"
        if self.backend in nodes.OWN_KERNELS and self.on.device.type != "cuda" and not interpreted:
            self.blocked = f"{self.backend} kernels need a CUDA device, and there is none here"
        elif self.on.implementation_of(self.operator) in ("cuda", "fastest"):
            self.blocked = native.missing(self.on.device)
        here = self.on.device.type
        self.layouts = tuple(one for one in layouts.of(self.tier) if not nodes.left_out(one, here))

    def summary(self) -> dict[str, Any]:
        return {
            "record": "cell",
            "operator": self.operator,
            "tier": self.tier.name,
            "implementation": self.on.implementation_of(self.operator),
            "backend": self.backend,
            "blocked": self.blocked,
            "no_backward": self.no_backward,
            "without_gradients": self.apart,
            "error": self.error,
            "provenance": None if self.error or self.blocked else self._provenance(),
            "seen": self.seen.plain(),
            "passed_by": self.passed_by,
            "layouts": {one.name: one.digest for one in self.layouts},
        }

    def _provenance(self) -> str | None:
        """What the first line of the records cannot show: state of the process that changed meanwhile."""
        now = observe.environment(self.on.device)
        changed = [f"{name} {self.environment[name]} to {value}" for name, value in now.items()
                   if value != self.environment[name]]  # fmt: skip
        return f"the operator changed {', '.join(changed)}" if changed else None

    def comparisons(self) -> Iterator[dict[str, Any]]:
        if self.blocked:
            return
        judged = nodes.judged(self.tier, self.on.judgments)
        with observe.watch() as self.seen:
            for variant in nodes.variants(self.operator, self.tier):
                yield from Variant(self, variant, judged).comparisons()
        self._statistics(judged)

    def _statistics(self, judged: Sequence[str]) -> None:
        promised, model = getattr(self.candidate, "statistics", None), self.on.model
        if self.operator == "router" and promised is not None and self.tier.options:
            backward = any(name.startswith("gradient") for name in judged)
            given = (self.tier, model.num_experts, model.num_experts_per_tok, self.on.device)
            router_statistics.check(promised, *given, backward=backward)
