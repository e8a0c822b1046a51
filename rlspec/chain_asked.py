"""What one arm of a chain spec is held against, and where in its records a thing stands."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlspec import chains, nodes
from rlspec.architecture import Architecture
from rlspec.chains import Cell
from rlspec.model import Row
from rlspec.workloads import Chain

PARITY = "train_inference_parity"
GATING = ("applicable", "optional")  # of a row, by its status
Lines = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What one arm is held against. `resolve(judgment, subject)` gives a row of the contract, and `cannot_fail`
    says what becomes of one that zeros pass."""

    chain: Chain
    cells: tuple[Cell, ...]
    model: Architecture
    judgments: tuple[str, ...]
    implementation: str | Mapping[str, str] | None
    weights: Mapping[str, Any]
    profile: str
    dtype: str
    device: str | None
    fault: str | None
    resolve: Callable[[str, str], Row]
    cannot_fail: str = "note"

    def row(self, judgment: str) -> Row:
        """The row of a judgment. Of accuracy: that of a whole model; with pinned weights the absolute one, if any."""
        if judgment not in chains.ACCURACY:
            return self.resolve(judgment, "logprob" if judgment.startswith("forward") else "reduction")
        if self.weights["source"] != "seeded":
            own = self.resolve(judgment, "logprob" if judgment.startswith("forward") else "reduction")
            if "atol" in own.limits:
                return own
        return self.resolve(judgment, chains.SUBJECT)

    def limits(self, judgment: str) -> Mapping[str, float]:
        """Of what is measured as an error: those of accuracy, and of attention through a cache."""
        row = self.resolve("forward_accuracy", "attention") if judgment == "kv_cache" else self.row(judgment)
        return dict(row.limits)

    def beside(self, judgment: str) -> Mapping[str, float]:
        """The limits to plain torch that hold beside those of an absolute row of accuracy; none beside other rows."""
        if judgment not in chains.ACCURACY or "atol" not in self.row(judgment).limits:
            return {}
        row = self.resolve(judgment, chains.SUBJECT)
        gates = row.status in GATING and "baseline_ratio" in row.limits
        return row.limits if gates else {}

    def problem(self, line: Mapping[str, Any]) -> str | None:
        """Why an error leaves its limits, or None."""
        # An absolute limit was fitted to other weights: zeros pass it where a gradient is small, and plain torch ran.
        both = (line["limits"], self.beside(line["judgment"]))
        return next(filter(None, (nodes.accuracy_problem(line, limits) for limits in both if limits)), None)

    def gates_nodes(self, judgment: str) -> bool:
        """Whether a node that errs by more than that is no PASS of the log-probs, or is told of alone."""
        return self.resolve(judgment, chains.SUBJECT).status in GATING

    def ratio(self, judgment: str) -> float | None:
        """How far a node may err beside plain torch: by the row of a whole model, whichever judges the log-probs."""
        return self.resolve(judgment, chains.SUBJECT).limits.get("baseline_ratio")


def bits(value: float) -> tuple[float, float]:
    """Equal for the same bits of a finite number: 0 is not -0."""
    return value, math.copysign(1.0, value)


def trace_of(measured: Mapping[str, Any], judgment: str, name: str) -> Mapping[str, Any] | None:
    """Where a configuration parts from what it is compared with."""
    found = (one for one in measured["traces"] if (one["judgment"], one["configuration"]) == (judgment, name))
    return next(found, None)


def has(measured: Mapping[str, Any], *names: str) -> bool:
    """Whether there are log-probs of these executions."""
    return set(names) <= {line["execution"] for line in measured["logprobs"]}


def values_of(measured: Mapping[str, Any], name: str) -> list[float] | None:
    """The log-probs of an execution."""
    line = next((one for one in measured["logprobs"] if one["execution"] == name), None)
    return None if line is None else [float(value) for value in line["values"]]
