"""What one arm of an operator spec is judged on, and each operator with its inputs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rlspec import architecture, layouts, nodes, workloads
from rlspec.device import beside, cases, observe
from rlspec.device.dtypes import DTYPES
from rlspec.device.execution import Subject, run
from rlspec.device.operators import resolve
from rlspec.workloads import Tier, Workload


@dataclass(frozen=True, kw_only=True)
class Arm:
    """What an arm of operators is judged on, and one of a chain run on."""

    arm: str
    implementation: str | Mapping[str, str]
    workload: Workload
    model: architecture.Architecture
    judgments: tuple[str, ...]
    dtype: torch.dtype
    device: torch.device

    def implementation_of(self, operator: str) -> str:
        return nodes.implementation_of(operator, self.implementation)


@dataclass(frozen=True, kw_only=True)
class Bench(Arm):
    """Of operators. `limits`: judgment -> class -> limits of its row, None where it has none."""

    run_file: Path
    operators: tuple[str, ...]
    limits: Mapping[str, Mapping[str, Mapping[str, float] | None]]


def fields(config: Mapping[str, Any], arm: Mapping[str, Any]) -> dict[str, Any]:
    """Of `Arm`, from a run file's configuration and the arm's entry in plan.json. Raises ValueError.

    A user's operators are found beside the spec from then on, before any others of their name.
    """
    beside.first(os.environ.get("RLSPEC_SPEC_DIR", config["spec_dir"]))
    if config["dtype"] not in DTYPES:
        raise ValueError(f"arms run in {', '.join(DTYPES)}, not in {config['dtype']}")
    cuda = torch.cuda.is_available() and config["device"] != "cpu"
    if config["device"] == "cuda" and not cuda:
        raise ValueError("the spec requires a CUDA device, and torch sees none")
    return {
        "arm": arm["name"],
        "implementation": arm.get("implementation") or nodes.DEFAULT,
        "workload": workloads.of(config["workload"]),
        "model": architecture.read(config["model"]),
        "judgments": tuple(config["judgments"]),
        "dtype": DTYPES[config["dtype"]],
        "device": torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu"),
    }


def bench(run_file: Path, config: Mapping[str, Any], arm: Mapping[str, Any]) -> Bench:
    """From a run file's configuration and the arm's entry in plan.json. Raises ValueError."""
    return Bench(
        run_file=run_file,
        operators=tuple(config["operators"]),
        limits=config["limits"],
        **fields(config, arm),
    )


def subject(on: Bench, operator: str, tier: Tier, variant: str, candidate: Callable[..., Any] | None) -> Subject:
    """An operator with its tables, weights and upstream gradients, whose shapes a run of plain torch tells."""
    assert candidate is not None
    case = cases.of(operator, variant, on.model, on.workload, on.dtype)
    plain = Subject(
        case=case,
        tier=tier,
        operator=candidate,
        tables=cases.logical(case, tier, on.workload, on.model, on.dtype, on.device),
        weights=cases.weights(case, tier, on.workload, on.dtype, on.device),
        upstream={},
        device=on.device,
    )
    shapes = run(
        replace(plain, operator=resolve(operator, "torch")), layouts.of(tier)[0], observe.Seen(), backward=False
    )
    upstream = {
        name: cases.upstream(out.shape[1:], tier, on.workload, out.dtype, on.device, index)
        for index, (name, out) in enumerate(shapes.outputs.items())
        if out.is_floating_point()
    }
    return replace(plain, upstream=upstream, like=shapes.outputs)
