"""Commands to run under `execute`, and the processes that they leave."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlspec.launch import Outcome, execute

ENVIRONMENT = {"PATH": os.environ["PATH"], "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}


def run(folder: Path, code: str, **options: Any) -> Outcome:
    """Python code in `folder`, with its output in `arm.log`."""
    return execute([sys.executable, "-c", code], cwd=folder, environment=ENVIRONMENT, **_log(folder, options))


def shell(folder: Path, script: str, **options: Any) -> Outcome:
    return execute(["sh", "-c", script], cwd=folder, environment=ENVIRONMENT, **_log(folder, options))


def _log(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    return {"log": folder / "arm.log", **options}


def text(folder: Path) -> str:
    return (folder / "arm.log").read_text(encoding="utf-8", errors="replace")


def marked(word: str) -> list[int]:
    """Living processes whose command line holds `word`, from /proc."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line, state = (folder / "cmdline").read_bytes(), (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if word.encode() in line and state not in "ZX":
            found.append(int(folder.name))
    return found


@contextmanager
def marking(folder: Path) -> Iterator[str]:
    """A word for the command lines of a test's processes; what holds it at the end is killed, in any case."""
    word = f"marked-{folder.name}-{os.getpid()}"
    try:
        yield word
    finally:
        for pid in marked(word):
            os.kill(pid, signal.SIGKILL)
