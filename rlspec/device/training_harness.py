"""Trains an arm of the embedded trainer, for worker.py: what makes runs repeat, the log and records.jsonl."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import torch

from rlspec.device import faults, job, settings
from rlspec.device.settings import Settings
from rlspec.device.trainer import Row, Trainer

FORMATS = {
    "step-time": "{:.3f} sec",
    "cross-entropy-loss": "{:.4f}",
    "load-balance-loss": "{:.6f}",
    "learning-rate": "{:.6e}",
    "gradient-norm": "{:.4f}",
    "tokens-per-second": "{:,.0f}",
    "peak-gpu-memory": "{:.2f} GB",
}


def main(config: Mapping[str, Any], arm: Mapping[str, Any], records: Path) -> None:
    """Train as the run file's `config` says. Raises ValueError for what it lacks or cannot be."""
    options = settings.read({**config, "settings": {**config["settings"], "fault": arm.get("fault")}})
    make_repeatable(options)
    with job.join() as joined:
        kind = faults.trainer(options)
        implementation = arm.get("implementation") or "torch"
        if joined.rank == 0:
            _say(f"launch({config!r}, arm={arm['name']!r}, implementation={implementation!r}, {_flags(joined)})")
        _train(kind, options, joined, arm, records)


def _train(kind: type[Trainer], options: Settings, joined: job.Job, arm: Mapping[str, Any], path: Path) -> None:
    implementation = arm.get("implementation") or "torch"
    trainer = kind(options, joined, implementation=implementation, perturbation=arm.get("perturb"))
    notes = [f"{arm['name']} has the planted fault {options.fault}"] if kind in faults.FAULTS.values() else []
    rows = trainer.run()
    if joined.rank != 0:
        for _ in rows:
            pass
        return
    with Records(path, arm["name"], options.steps, notes) as records:
        for row in rows:
            records.step(row)
            _say(log_line(row, options.steps))


def make_repeatable(options: Settings) -> None:
    """Seeds, fp32 products in fp32, and torch's deterministic algorithms where the settings ask for them."""
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("highest")
    if options.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # As torch.use_deterministic_algorithms, which imports torch's compiler to tell it, too; that takes a second.
    torch.set_deterministic_debug_mode("error" if options.deterministic else "default")


def _flags(joined: job.Job) -> str:
    where = f"device={str(joined.device)!r}, processes={joined.world}, backend={joined.backend!r}"
    deterministic = torch.are_deterministic_algorithms_enabled()
    return f"{where}, threads={torch.get_num_threads()}, deterministic={deterministic}"


def _say(text: str) -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} | INFO | {text}", flush=True)


def log_line(row: Row, steps: int) -> str:
    """`step 00000003/00000032 | step-time 4.812 sec | …`."""
    shown = [f"{name} {FORMATS[name].format(value)}" for name, value in row.metrics.items()]
    return " | ".join([f"step {row.step:08d}/{steps:08d}", *shown])


class Records:
    """records.jsonl, written line by line. The line `end` comes only if the run came to its end."""

    def __init__(self, path: Path, arm: str, steps: int, notes: list[str]) -> None:
        self.path, self.count = path, 0
        self.head = {"record": "run", "schema_version": 1, "arm": arm, "reader": "embedded", "steps_expected": steps,
                     "resolution": {}, "faults": {}, "notes": notes}  # fmt: skip

    def __enter__(self) -> Records:
        self.file: TextIO = self.path.open("w", encoding="utf-8")
        self._write(self.head)
        return self

    def step(self, row: Row) -> None:
        metrics = {name: value if math.isfinite(value) else repr(value) for name, value in row.metrics.items()}
        self._write({"record": "step", "step": row.step, "metrics": metrics, "data": row.data})
        self.count += 1

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self.file:
            if kind is None:
                self._write({"record": "end", "steps": self.count})

    def _write(self, line: Mapping[str, Any]) -> None:
        self.file.write(json.dumps(line, allow_nan=False) + "\n")
        self.file.flush()
