"""How sharp the perturbed envelope is: `python tests/bench/bench_controls.py [--model NAME] [--dp 2] [--seeds 20]`.

The embedded trainer as base, as a feature with attention written out, and with each planted fault that a ratio judges;
then once for each perturbation seed. Prints by metric the smallest and the largest ratio over the seeds: harmless must
stay below 3, each fault must be above 5 on the metric that catches it. With --dp 2 it starts itself under torchrun.

`--weights 60` instead asks how often the harmless arms are taken for faults: as many initial weights and data orders,
each with one perturbed run. In a mixture of experts that is how often a near-tie of the router falls to the other side
in one of the runs, and it grows with the tokens of a run: layers × steps × batch × sequence length.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
METRICS = ("cross-entropy-loss", "load-balance-loss", "gradient-norm")
# These end in ERROR, or in FAIL for a NaN, before there is a ratio.
NOT_BY_RATIO = ("nan_at_step_7", "truncated", "data_order", "constant_metric", "forced_routing")
HARMLESS: Mapping[str, Any] = {
    "attention: reference": {"attention": "reference"},
    "all reference": "reference",
}


def configuration(model: str, dp: int, given: argparse.Namespace) -> dict[str, Any]:
    from rlspec import catalog

    return {
        "kind": "correctness",
        "model": catalog.model(model, ROOT / "specs"),
        "mesh": {"pp": 1, "dp": dp, "cp": 1, "ep": 1},
        "sequence_length": given.sequence_length,
        "dtype": given.dtype,
        "steps": given.steps,
        "settings": {"global_batch_size": given.batch, "seed": given.seed},
        "spec_dir": ".",
    }


def curves(settings, job, kind=None, margins=None, **options) -> dict[str, list[float]]:
    """The metrics of a run; `margins` gets by how much each token's last chosen expert beat the next, in logits."""
    from rlspec.device.trainer import Trainer

    trainer = (kind or Trainer)(settings, job, **options)
    if margins is not None:
        trainer.model.operators.router = watched(trainer.model.operators.router, margins)
    rows = list(trainer.run())
    return {name: [row.metrics[name] for row in rows] for name in METRICS if name in rows[0].metrics}


def watched(router, margins):
    def call(x, weight, *, top_k, **options):
        routing = router(x, weight, top_k=top_k, **options)
        scores = routing.probabilities.detach().double().log().sort(-1, descending=True).values
        margins.append(scores[:, top_k - 1] - scores[:, top_k])
        return routing

    return call


def drift(a: list[float], b: list[float]) -> float:
    """Mean |b - a| over the steps from the second on."""
    return sum(abs(x - y) for x, y in zip(a[1:], b[1:], strict=True)) / (len(a) - 1)


def bench(given: argparse.Namespace) -> bool:
    from dataclasses import replace

    from rlspec.device import faults, settings
    from rlspec.device.job import join

    with join() as job:
        plain = settings.read(configuration(given.model, job.world, given))
        began = time.perf_counter()
        base = curves(plain, job)
        seconds = time.perf_counter() - began
        arms = {name: curves(plain, job, implementation=made) for name, made in HARMLESS.items()}
        for name in faults.FAULTS:
            try:
                kind = faults.trainer(replace(plain, fault=name))
            except ValueError:
                continue  # it cannot show on this mesh or model
            if name not in NOT_BY_RATIO:
                arms[name] = curves(plain, job, kind)
        floors = []
        for seed in range(1, given.seeds + 1):
            moved = curves(plain, job, perturbation={"weights": "1ulp", "seed": seed})
            floors.append({metric: drift(base[metric], moved[metric]) for metric in base})
        if job.rank:
            return True
    good = report(given, job.world, seconds, base, arms, floors)
    if plain.balanced:
        print(near_ties(plain, job))
    return good


def near_ties(plain, job) -> str:
    """Of rank 0 alone: by how much rounding would have to grow to send one token of the run to another expert."""
    from dataclasses import replace

    import torch

    from rlspec.device.job import Job

    alone, found = Job(job.device), []
    for options in ({}, {"perturbation": {"weights": "1ulp", "seed": 1}}, {"implementation": "reference"}):
        margins = []
        curves(replace(plain, dp=1), alone, margins=margins, **options)
        found.append(torch.cat(margins))
    moved = max((found[0] - other).abs().max().item() for other in found[1:])
    smallest = found[0].min().item()
    return f"smallest router margin of {len(found[0])}: {smallest:.2g}; rounding moves a margin by {moved:.2g} at most"


def false_alarms(given: argparse.Namespace) -> bool:
    """One process only."""
    from dataclasses import replace

    from rlspec.device import settings
    from rlspec.device.job import join

    ratios: dict[tuple[str, str], list[float]] = {}
    with join() as job:
        plain = settings.read(configuration(given.model, 1, given))
        for seed in range(1, given.weights + 1):
            seeded = replace(plain, seed=seed)
            base, moved = curves(seeded, job), curves(seeded, job, perturbation={"weights": "1ulp", "seed": seed})
            for name, made in HARMLESS.items():
                arm = curves(seeded, job, implementation=made)
                for metric in base:
                    found = drift(base[metric], arm[metric]) / drift(base[metric], moved[metric])
                    ratios.setdefault((name, metric), []).append(found)
    print(f"{given.model}, {size(given)}, {given.weights} initial weights, one perturbed run each")
    for (name, metric), found in ratios.items():
        above = ", ".join(f"above {limit}: {sum(not ratio <= limit for ratio in found)}" for limit in (3, 5))
        print(f"{name:<26}{metric:<22}{above}, largest {max(found):.2f}", flush=True)
    return all(ratio < 3 for found in ratios.values() for ratio in found)


def size(given: argparse.Namespace) -> str:
    return f"{given.batch} × {given.sequence_length} tokens, {given.steps} steps, {given.dtype}"


def report(given, dp, seconds, base, arms, floors) -> bool:
    print(f"{given.model}, dp {dp}, {size(given)}, {given.seeds} seeds; {seconds:.1f} s a run")
    head = "".join(f"{metric:>28}" for metric in base)
    print(f"{'smallest to largest ratio':<26}{head}   caught by")
    good = True
    for name, curve in arms.items():
        cells, caught = [], []
        for metric in base:
            ratios = [drift(base[metric], curve[metric]) / floor[metric] for floor in floors]
            cells.append(f"{min(ratios):.3g} to {max(ratios):.3g}")
            if min(ratios) > 5:
                caught.append(metric)
            if name in HARMLESS:
                good &= max(ratios) < 3
        good &= name in HARMLESS or bool(caught)
        print(f"{name:<26}" + "".join(f"{cell:>28}" for cell in cells) + "   " + (", ".join(caught) or "-"), flush=True)
    floor = "".join(f"{min(f[m] for f in floors):>16.2g} to {max(f[m] for f in floors):<8.2g}" for m in base)
    print(f"{'floor':<26}{floor}")
    return good


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="tiny-moe")
    parser.add_argument("--dp", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=3, help="of weights and data; the shipped specs have 3")
    parser.add_argument("--weights", type=int, default=0)
    parser.add_argument("--sequence-length", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--dtype", default="fp32")
    given = parser.parse_args()
    if given.dp > 1 and "RANK" not in os.environ:
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={given.dp}"]
        return subprocess.run([*run, *sys.argv], env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode
    return 0 if (false_alarms if given.weights else bench)(given) else 1


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
