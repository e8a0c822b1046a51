"""What an arm measured that its spec does not ask for: then its spec, or plan, asked for more when the arm ran."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlspec import chain_sizes, chains, nodes, workloads
from rlspec.chain_asked import PARITY
from rlspec.checks import operators
from rlspec.model import Spec


def first(spec: Spec, measured: Mapping[str, Any]) -> str:
    """The first of it, such as `forward_invariance of rms_norm in tier short`; empty where all is asked for."""
    found = _of_chain(spec, measured) if spec.chain else _of_operators(spec, measured)
    return next(found, "")


def _of_operators(spec: Spec, measured: Mapping[str, Any]) -> Iterator[str]:
    judgments, made = [judgment.check for judgment in spec.judgments], workloads.of(spec.workload)
    due = {
        (operator, tier.name): nodes.judged(tier, judgments)
        for operator in operators.chosen(spec)
        for tier in nodes.tiers(operator, made.tiers)
    }
    for cell in measured["cells"]:
        place = f"{cell['operator']} in tier {cell['tier']}"
        if (asked := due.get((cell["operator"], cell["tier"]))) is None:
            yield place
            continue
        for name in dict.fromkeys(line["judgment"] for line in cell["comparisons"]):
            if name not in asked:
                yield f"{name} of {place}"


def _of_chain(spec: Spec, measured: Mapping[str, Any]) -> Iterator[str]:
    judgments, chain = [judgment.check for judgment in spec.judgments], chains.asked(workloads.of(spec.workload))
    names = [cell.name for cell in chains.cells(chain, spec.chain["cells"])[1:]]
    due = {
        (one.judgment, one.configuration)
        for one in chains.expected(chain, chain_sizes.of(spec.chain["model"]), judgments, names)
    }
    for line in measured["comparisons"]:
        if (line["judgment"], line["configuration"]) not in due:
            yield f"{line['judgment']} of {line['configuration']}"
    for line in measured["logprobs"] if PARITY not in judgments else ():
        if line["execution"] in chains.EXECUTIONS:
            yield f"{PARITY} of {line['execution']}"
