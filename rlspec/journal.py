"""What rlspec keeps in the common git directory while it runs: a lock, and a journal to undo by after a kill."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rlspec.errors import RunError, SpecError
from rlspec.git import common_dir


@contextmanager
def lock(repo: Path, what: str = "run") -> Iterator[None]:
    """Keep a second rlspec off the repository and its worktrees. The lock dies with the process that holds it.

    SpecError while another one holds it, RunError where the file system cannot lock.
    """
    file = _state(repo) / "lock"
    try:
        file.parent.mkdir(exist_ok=True)
        stream = open(os.open(file, os.O_RDWR | os.O_CREAT, 0o666), "r+", encoding="utf-8")  # noqa: SIM115
    except OSError as error:
        raise SpecError(
            f"{file}: cannot be opened to lock the repository: {error.strerror}; make it writable"
        ) from error
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SpecError(f"{_holder(stream.read())} is using {repo}; wait for it or end it ({file})") from None
        except OSError as error:
            raise RunError(f"{file}: this file system cannot lock: {error.strerror}") from error
        stream.truncate(0)
        json.dump({**_signature(), "what": what}, stream)
        stream.flush()
        try:
            yield
        finally:
            stream.seek(0)
            stream.truncate()


def place(repo: Path) -> Path:
    """The journal of a repository; it exists while there is something to undo."""
    return _state(repo) / "journal.json"


def write(file: Path, data: Mapping[str, Any]) -> None:
    """On disk as a whole, or not at all."""
    draft = file.with_suffix(".tmp")
    file.parent.mkdir(exist_ok=True)
    with draft.open("w", encoding="utf-8") as stream:
        json.dump({**_signature(), **data}, stream)
        stream.flush()
        os.fsync(stream.fileno())
    draft.replace(file)


def read(file: Path) -> dict[str, Any]:
    """RunError if it cannot be read: what an earlier run left must then be undone by hand."""
    try:
        data: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(
            f"{file}: the journal of an earlier run cannot be read: {error}; put the work tree back by hand "
            "(`git status`, `git worktree list`), then delete the file"
        ) from error
    return data


def _state(repo: Path) -> Path:
    return common_dir(repo) / "rlspec"


def _signature() -> dict[str, Any]:
    since = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"pid": os.getpid(), "host": socket.gethostname(), "since": since}


def _holder(text: str) -> str:
    try:
        data = json.loads(text)
    except ValueError:  # read between its two writes
        return "another rlspec"
    return f"another rlspec {data['what']} (pid {data['pid']} on {data['host']}, since {data['since']})"
