"""Specs that are run through the command line, several in a call, as a team runs its suite."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]


class Outcome(NamedTuple):
    """What the call that ran a spec said and ended with, its report (None without one) and the report's file."""

    done: subprocess.CompletedProcess[str]
    made: Any = None
    path: Path | None = None


def rlspec(folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """`rlspec words`, begun in `folder`."""
    folder.mkdir(exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "rlspec", *map(str, words)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def run(folder: Path, specs: Iterable[Path], *options: str) -> dict[Path, Outcome]:
    """One call in `folder`, where nothing has run: the outcome of each spec."""
    specs = list(specs)
    done = rlspec(folder, "run", *specs, *options)
    found = {}
    for path in folder.glob("workspace/*/*/*/report.json"):
        if path.parent.name != "latest":
            made = json.loads(path.read_text(encoding="utf-8"))
            found[Path(made["spec"]["path"])] = Outcome(done, made, path)
    return {spec: found.get(spec, Outcome(done)) for spec in specs}


def together(top: Path, suites: dict[str, list[Path]], *options: str) -> dict[Path, Outcome]:
    """A call a suite, in the folder of its name, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        parts = pool.map(lambda name: run(top / name, suites[name], *options), suites)
        return {spec: outcome for part in parts for spec, outcome in part.items()}
