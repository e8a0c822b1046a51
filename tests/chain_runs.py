"""A small chain, run once in this process, for tests of what is made of its records."""

from __future__ import annotations

import copy
import tempfile
from functools import cache
from pathlib import Path

from rlspec import chain_records, contract, document
from rlspec.checks import chain
from rlspec.model import Result

CONTROLS = Path(__file__).parents[1] / "specs" / "controls" / "chain"


def spec(**changes):
    """The spec of the controls, without a fault."""
    read, problems = document.read(CONTROLS / "dropped-gradient.yaml")
    assert not problems
    data = {key: value for key, value in read.data.items() if key != "expect"}
    data |= {"arms": [{"name": "a", "implementation": "canonical"}], "question": "q", **changes}
    return document.Document(path=CONTROLS / "made.yaml", data=data, keys={}, values={}, digest="d")


@cache
def _measured(contract_name):
    import torch

    from rlspec.device import chain_bench, chain_harness

    made = chain.parse(spec(contract=contract_name))
    config = chain.context(made, contract.load(contract_name, CONTROLS))
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "records.jsonl"
        chain_harness.main(chain_bench.bench(config, {"name": "a", "implementation": "canonical"}), path)
        torch.set_num_threads(threads)
        return chain_records.read(path, "a")


def measured(contract_name="strict"):
    """What the arm measured: yours to spoil."""
    return copy.deepcopy(_measured(contract_name))


def judged(found, rows="strict", **changes):
    """(judgment, configuration) -> verdict, by a contract or the one of that name."""
    rows = contract.load(rows, CONTROLS) if isinstance(rows, str) else rows
    made = chain.parse(spec(contract=rows.name, **changes))
    result = Result(arm=made.arms[0], records=Path("r"), measured=found)
    verdicts = chain.judge(made, [result], rows)
    return {(one.judgment, one.evidence["configuration"]): one for one in verdicts}


def line(found, judgment, configuration, tensor=None, against=None):
    """The comparison of that name, to be changed."""
    return next(
        one for one in found["comparisons"]
        if (one["judgment"], one["configuration"]) == (judgment, configuration)
        and tensor in (None, one["tensor"]) and against in (None, one["against"])
    )  # fmt: skip
