"""What one arm of an operator spec is judged on, and each operator with its inputs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rlspec import layouts, nodes, workloads
from rlspec.device import architecture, cases, observe
from rlspec.device.execution import Subject, run
from rlspec.device.operators import resolve
from rlspec.workloads import Tier, Workload

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What one arm is judged on. `limits`: judgment -> class -> limits of its row, None where it has none."""

    run_file: Path
    arm: str
    implementation: str | Mapping[str, str]
    workload: Workload
    model: architecture.Architecture
    operators: tuple[str, ...]
    judgments: tuple[str, ...]
    limits: Mapping[str, Mapping[str, Mapping[str, float] | None]]
    dtype: torch.dtype
    device: torch.device

    def implementation_of(self, operator: str) -> str:
        return nodes.implementation_of(operator, self.implementation)


def bench(run_file: Path, config: Mapping[str, Any], arm: Mapping[str, Any]) -> Bench:
    """From a run file's configuration and the arm's entry in plan.json. Raises ValueError."""
    sys.path.append(
        os.environ.get("RLSPEC_SPEC_DIR", config["spec_dir"])
    )  # a user's operators lie beside the spec, and shadow nothing
    if config["dtype"] not in DTYPES:
        raise ValueError(f"operators are judged in {', '.join(DTYPES)}, not in {config['dtype']}")
    cuda = torch.cuda.is_available() and config["device"] != "cpu"
    if config["device"] == "cuda" and not cuda:
        raise ValueError("the spec requires a CUDA device, and torch sees none")
    return Bench(
        run_file=run_file,
        arm=arm["name"],
        implementation=arm.get("implementation") or nodes.DEFAULT,
        workload=workloads.of(config["workload"]),
        model=architecture.read(config["model"]),
        operators=tuple(config["operators"]),
        judgments=tuple(config["judgments"]),
        limits=config["limits"],
        dtype=DTYPES[config["dtype"]],
        device=torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu"),
    )


def subject(on: Bench, operator: str, tier: Tier, variant: str, candidate: Callable[..., Any] | None) -> Subject:
    """An operator with its tables, weights and upstream gradients, whose shapes a run of plain torch tells."""
    assert candidate is not None
    case = cases.of(operator, variant, on.model, on.workload)
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
