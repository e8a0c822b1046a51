"""Entry of the run files: finds its arm in plan.json and hands it to the harness of its kind."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def main(run_file: str, config: Mapping[str, Any]) -> None:
    """Run the arm that the run file's name tells of. Raises ValueError for what its plan or configuration lacks."""
    path = Path(run_file).absolute()
    arm, records = find_arm(path), _records_of(path)
    if config["kind"] == "operators":
        with _uncollected():
            from rlspec.device import bench, operator_harness
        operator_harness.main(bench.bench(path, config, arm), records)
    elif config["kind"] == "chain":
        with _uncollected():
            from rlspec.device import chain_bench, chain_harness
        chain_harness.main(chain_bench.bench(config, arm), records)
    else:
        with _uncollected():
            from rlspec.device import training_harness
        training_harness.main(config, arm, records)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Imports within: no collection looks through the half a million objects of torch, now or later."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collecting:
            gc.enable()


def _records_of(run_file: Path) -> Path:
    return Path(os.environ.get("RLSPEC_RECORDS") or run_file.with_name(f"{run_file.stem}.records.jsonl"))


def find_arm(run_file: Path) -> Mapping[str, Any]:
    """The arm whose stem is the run file's, from the plan.json beside it."""
    plan = run_file.with_name("plan.json")
    if not plan.is_file():
        raise ValueError(f"{plan} is missing: `rlspec run` writes it beside its run files, and arms differ in it alone")
    arms: list[dict[str, Any]] = json.loads(plan.read_text(encoding="utf-8"))["arms"]
    for arm in arms:
        if arm["stem"] == run_file.stem:
            return arm
    raise ValueError(f"{plan} has no arm with the stem {run_file.stem!r}; it has {', '.join(a['stem'] for a in arms)}")
