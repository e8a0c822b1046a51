"""What rlspec keeps in the common git directory while it runs: a lock, and a journal to undo by after a kill."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlspec import locks
from rlspec.errors import RunError
from rlspec.git import common_dir
from rlspec.mounts import Move


@contextmanager
def lock(repo: Path, what: str = "run") -> Iterator[None]:
    """Keep a second rlspec off the repository and its worktrees, on this machine or another (see `locks`).

    SpecError while another one holds it.
    """
    with locks.held(_state(repo) / "lock", what, repo):
        yield


def place(repo: Path) -> Path:
    """The journal of a repository; it exists while there is something to undo."""
    return _state(repo) / "journal.json"


def write(file: Path, data: Mapping[str, Any]) -> None:
    """On disk as a whole, or not at all."""
    draft = file.with_suffix(".tmp")
    file.parent.mkdir(exist_ok=True)
    with draft.open("w", encoding="utf-8") as stream:
        json.dump({**locks.signature(), "common": str(_common(file)), **data}, stream)
        stream.flush()
        os.fsync(stream.fileno())
    draft.replace(file)


def read(file: Path) -> dict[str, Any]:
    """Its paths as they are here. RunError if it cannot be read: what a run left must then be undone by hand."""
    try:
        data: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(
            f"{file}: the journal of an earlier run cannot be read: {error}; put the work tree back by hand "
            "(`git status`, `git worktree list`), then delete the file"
        ) from error
    return data if "common" not in data else Move(Path(data["common"]), _common(file)).value(data)


def is_mine(file: Path) -> bool:
    """Whether this process wrote it; another one may have, if our lock was taken from us."""
    now, then = locks.signature(), read(file)
    return all(then[key] == now[key] for key in ("pid", "host"))


def _state(repo: Path) -> Path:
    return common_dir(repo) / "rlspec"


def _common(file: Path) -> Path:
    return file.parent.parent
