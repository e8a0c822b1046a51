"""Commands to run under `execute`, the processes that they leave, and how a test waits for them."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from rlspec import child
from rlspec.launch import Outcome, execute

LONG = 300.0  # seconds in which whatever a test waits for has come, on the busiest machine
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


def wait_for(condition: Callable[[], bool]) -> None:
    """Until the condition holds. AssertionError where that never comes."""
    until = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < until, "it never came about"
        time.sleep(0.02)


@contextmanager
def time_flies_once(condition: Callable[[], bool]) -> Iterator[None]:
    """A day passes for what waits for a child at the moment at which the condition holds: its time limit is over."""
    gone = [0.0]

    def monotonic() -> float:
        if not gone[0] and condition():
            gone[0] = 86400.0
        return time.monotonic() + gone[0]

    with mock.patch.object(child, "time", SimpleNamespace(monotonic=monotonic, sleep=time.sleep)):
        yield
    assert gone[0], "the condition never held"


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
