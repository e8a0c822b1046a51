"""A lock that holds on a shared file system: a file made by O_EXCL, whose time is its holder's sign of life.

flock does not reach other machines everywhere; making a file that must not exist does, on NFS since version 3. A holder
of this machine is gone when its process is; one of another machine when its file has not been touched for `SILENT`
seconds. The ages of files are compared with each other, since the clocks of machines differ from the file server's.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rlspec.errors import RunError, SpecError

BEAT = 20.0  # seconds between two signs of life
SILENT = 300.0  # seconds without one after which a holder on another machine is given up
TRIES = 5  # at a lock that others take and leave meanwhile


def signature() -> dict[str, Any]:
    """Who writes this: pid, host, since when (UTC)."""
    since = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"pid": os.getpid(), "host": socket.gethostname(), "since": since}


@contextlib.contextmanager
def held(file: Path, what: str, place: Path) -> Iterator[None]:
    """Hold the lock `file` of `place` for a command `what`. The folder of the file is made, not its parents.

    SpecError while another one holds it, or where no file can be made. A holder whose lock is taken from it (it slept
    for too long, or somebody deleted the file) is sent SIGTERM, and the end is a RunError that says so.
    """
    token = uuid.uuid4().hex
    mine = {**signature(), **_machine(), "began": _began(os.getpid()), "what": what, "token": token}
    _acquire(file, json.dumps(mine), place)
    over, lost = threading.Event(), threading.Event()
    beat = threading.Thread(target=_beat, args=(file, token, over, lost), daemon=True)
    beat.start()
    try:
        yield
    except BaseException as error:
        if lost.is_set():
            raise RunError(_lost(file, place)) from error
        raise
    finally:
        over.set()
        beat.join()
        with contextlib.suppress(OSError):  # the folder may be gone; and the lock ends with this process in any case
            _remove(file, lambda found: found.token == token)
    if lost.is_set():
        raise RunError(_lost(file, place))


@dataclass(frozen=True, slots=True)
class _Found:
    """A lock as it lies there; `data` is empty while it is being written. `touched` by the file system's clock."""

    data: dict[str, Any]
    touched: float

    @property
    def token(self) -> str | None:
        return self.data.get("token")

    @property
    def gone(self) -> bool | None:
        """Whether the process that holds it has ended; None if only its signs of life can tell."""
        if any(self.data.get(key) != value for key, value in _machine().items()):
            return None
        return _ended(self.data["pid"], self.data.get("began"))


def _acquire(file: Path, text: str, place: Path) -> None:
    try:
        file.parent.mkdir(exist_ok=True)
        for _ in range(TRIES):
            if _make(file, text):
                return
            _take_away(file, place)
    except OSError as error:
        words = f"cannot be made to lock {place}: {error.strerror}; make its folder writable"
        raise SpecError(f"{error.filename or file}: {words}") from error
    raise SpecError(
        f"{file}: {place} cannot be locked; if no rlspec is at work there, delete {file} and {_right(file)}"
    )


def _take_away(file: Path, place: Path) -> None:
    """Delete a lock whose holder is gone. SpecError where it is not, or not known to be."""
    found = _look(file)
    if found is None:
        return  # just given back
    gone = found.gone
    age = 0.0 if gone is not None else _now(file) - found.touched
    if not (gone or age > SILENT):
        raise SpecError(_refusal(found, age, file, place))
    if not _remove(file, lambda still: still == found):
        time.sleep(BEAT / 100)  # another one is at it


def _remove(file: Path, due: Callable[[_Found], bool]) -> bool:
    """Delete a lock that is `due`. One process at a time may, else the second would delete what the first has made."""
    right = _right(file)
    if not _make(right, ""):
        return False
    try:
        found = _look(file)
        if found is not None and due(found):
            file.unlink(missing_ok=True)
    finally:
        right.unlink(missing_ok=True)
    return True


def _right(file: Path) -> Path:
    return file.with_name(f"{file.name}.break")


def _make(file: Path, text: str) -> bool:
    """Make a file, on disk before anything else is done; False if there is one."""
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        return False
    with open(descriptor, "w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(descriptor)
        os.utime(descriptor)  # by the clock of the file system, as every sign of life
    return True


def _look(file: Path) -> _Found | None:
    """What lies there now: to open a file asks the server, while the times of a path may come from a cache."""
    try:
        with file.open(encoding="utf-8", errors="replace") as stream:
            touched, text = os.fstat(stream.fileno()).st_mtime, stream.read()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESTALE):
            return None
        raise
    try:
        data = json.loads(text)
    except ValueError:
        data = None
    return _Found(data if isinstance(data, dict) and isinstance(data.get("pid"), int) else {}, touched)


def _now(file: Path) -> float:
    """The time by the clock of the file system."""
    probe = file.with_name(f"{file.name}.{uuid.uuid4().hex}")
    try:
        _make(probe, "")
        return probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)


def _beat(file: Path, token: str, over: threading.Event, lost: threading.Event) -> None:
    while not over.wait(BEAT):
        with contextlib.suppress(OSError):  # the file server does not answer: the next beat tells
            found = _look(file)
            if found is None or found.token != token:
                lost.set()
                os.kill(os.getpid(), signal.SIGTERM)
                return
            os.utime(file)


def _machine() -> dict[str, Any]:
    """Where a pid means the same process: this boot of this host, in this container."""
    boot, namespace = None, None
    with contextlib.suppress(OSError):  # not Linux
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = os.readlink("/proc/self/ns/pid")
    return {"host": socket.gethostname(), "boot": boot, "namespace": namespace}


def _stat(pid: int) -> list[str]:
    """The fields of a process from its state on; none where they cannot be seen."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _began(pid: int) -> str | None:
    return next(iter(_stat(pid)[19:]), None)


def _ended(pid: int, began: str | None) -> bool:
    """Whether a process of this machine is gone, or its number is another's by now."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # somebody else's
    fields = _stat(pid)
    return bool(fields) and (fields[0] in "ZX" or fields[19] != began)


def _refusal(found: _Found, age: float, file: Path, place: Path) -> str:
    data = found.data
    if not data:
        who = f"another rlspec (it has not said which; {age:.0f} s ago)"
    else:
        who = f"another rlspec {data['what']} (pid {data['pid']} on {data['host']}, since {data['since']})"
    if found.gone is False:
        return f"{who} is using {place}; wait for it or end it with `kill {data['pid']}` (its lock is {file})"
    return (
        f"{who} is using {place}; its last sign of life is {age:.0f} s old. Wait for it or end it there; if it is no "
        f"more, the lock is void {SILENT / 60:.0f} min after the last sign, or at once if you delete {file}"
    )


def _lost(file: Path, place: Path) -> str:
    return (
        f"the lock {file} was taken from this process, which was silent for {SILENT / 60:.0f} min, or deleted: another "
        f"one may be using {place}, so this one has stopped"
    )
