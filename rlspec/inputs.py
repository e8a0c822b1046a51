"""The tokens and the weights that an arm is given: files beside its code, and others are another question."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from rlspec.model import Arm, Spec
from rlspec.reports import digest

SMALL = 1 << 20  # bytes up to which a file's content is read; of larger ones, as shards are, size and time of change


def seen(spec: Spec, arm: Arm) -> str | None:
    """A digest of them as they are now; None for an arm that is given none."""
    told = [_told(path) for path in sorted(_files(spec, arm))]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest() if told else None


def _files(spec: Spec, arm: Arm) -> Iterator[Path]:
    if tokens := spec.data.get("tokens"):
        yield spec.path.parent / tokens
    folder = (arm.weights or spec.chain.get("weights", {})).get("path")
    if folder is not None:
        yield from (path for path in (spec.path.parent / folder).glob("*") if path.is_file())


def _told(path: Path) -> list[str | int]:
    try:
        state = path.stat()
        return [path.name, state.st_size, digest(path) if state.st_size <= SMALL else state.st_mtime_ns]
    except OSError:
        return [path.name, "absent"]
