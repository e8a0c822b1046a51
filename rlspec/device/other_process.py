"""The canonical calls in a process of their own, of which only digests come back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from rlspec import layouts, nodes
from rlspec.device import comparing, observe
from rlspec.device.bench import Bench, subject
from rlspec.device.execution import NoBackward, run
from rlspec.device.operators import resolve
from rlspec.nodes import NODES
from rlspec.workloads import Tier

ONLY_CANONICAL = "RLSPEC_CANONICAL_DIGESTS"


def key(operator: str, tier: Tier, variant: str, tensor: str) -> str:
    """The name of a tensor among all digests."""
    return "|".join((operator, tier.name, variant, tensor))


def digests_of(on: Bench) -> Mapping[str, str]:
    """Run the run file once more, for its digests alone; none where that process fails or no tier asks for it."""
    if not any("other_process" in tier.layouts for tier in on.workload.tiers):
        return {}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "digests.json"
        environment = {**os.environ, ONLY_CANONICAL: str(place)}
        done = subprocess.run([sys.executable, str(on.run_file)], env=environment, check=False)
        if done.returncode or not place.is_file():
            print(f"the process for the layout other_process ended with {done.returncode}", flush=True)
            return {}
        return json.loads(place.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def canonical_digests(on: Bench) -> Iterator[tuple[str, str]]:
    """What that process is for: key and fingerprint of each result of each canonical call."""
    for operator in on.operators:
        for tier in nodes.tiers(operator, on.workload.tiers):
            if NODES[operator].not_applicable or "other_process" not in tier.layouts:
                continue
            try:
                yield from _of_cell(on, operator, tier)
            except Exception as error:  # the cell itself meets the same in the process that judges it
                print(f"{operator} {tier.name}: {type(error).__name__}: {error}", flush=True)


def _of_cell(on: Bench, operator: str, tier: Tier) -> Iterator[tuple[str, str]]:
    candidate = resolve(operator, on.implementation_of(operator))
    judged = nodes.judged(tier, on.judgments)
    backward, forward = (any(name.startswith(way) for name in judged) for way in ("gradient", "forward"))
    both = backward and forward
    for variant in nodes.variants(operator, tier):
        one = subject(on, operator, tier, variant, candidate)
        try:
            found = run(one, layouts.of(tier)[0], observe.Seen(), backward=backward, both=both)
        except NoBackward:
            found = run(one, layouts.of(tier)[0], observe.Seen(), backward=False, both=both)
        for name, tensor in {**found.outputs, **found.gradients}.items():
            yield key(operator, tier, variant, name), comparing.fingerprint(tensor)
