"""`rlspec prepare`: start the device side's tokenizer in a process of its own, since it needs numpy."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def prepare(folder: Path, texts: Sequence[Path], tokenizer: str, end: str | None) -> int:
    """Write a corpus into `folder`; the exit code of the child, which says itself what it did or lacked."""
    command = [sys.executable, "-m", "rlspec.device.data", "prepare", "--output", str(folder), "--tokenizer", tokenizer]
    for path in texts:
        command += ["--text", str(path)]
    if end is not None:
        command += ["--end", end]
    package = str(Path(__file__).parents[1])
    search = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": search}, stdin=subprocess.DEVNULL).returncode
