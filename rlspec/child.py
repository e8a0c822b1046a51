"""A started command with all its descendants: wait for them, signal them, leave none behind."""

from __future__ import annotations

import ctypes
import errno
import os
import selectors
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from rlspec.errors import RunError
from rlspec.interrupts import Interrupted, noted
from rlspec.output import Output

MARK = "RLSPEC_CHILD"
KILL_WAIT = 5.0  # seconds after which a killed process counts as stuck in the kernel
LAST_WORDS = 1.0  # seconds to read what stopped processes left in the pipe
POLL = 0.1  # seconds
BLOCK = 1 << 16  # bytes


class Child:
    """The process of a command in a session of its own, drained into `output`; times in seconds.

    Descendants are found in /proc by the session or by the mark in their environment, which they inherit.
    """

    def __init__(
        self,
        argv: Sequence[str],
        cwd: Path,
        environment: Mapping[str, str],
        output: Output,
        on_tick: Callable[[], None] | None,
    ) -> None:
        mark = uuid.uuid4().hex
        outer = os.environ.get(MARK)
        self._on_tick = on_tick
        self.process = _popen(argv, cwd, {**environment, MARK: f"{outer}:{mark}" if outer else mark})
        self._mark = mark.encode()
        self._output = output
        assert self.process.stdout is not None
        self._pipe = self.process.stdout
        self._open = True
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._pipe, selectors.EVENT_READ)

    def exited(self) -> bool:
        return self.process.poll() is not None

    def gone(self) -> bool:
        return self.exited() and not self._members()

    def over(self) -> bool:
        return self.exited() and not self._open and not self._members()

    def wait(self, condition: Callable[[], bool], seconds: float | None, hurry: Sequence[int] = ()) -> bool:
        """Drain until `condition` holds; False if it does not in time, or as soon as `hurry` has an entry."""
        until = None if seconds is None else time.monotonic() + seconds
        while not condition():
            left = POLL if until is None else until - time.monotonic()
            if left <= 0 or hurry:
                return False
            self._pump(min(left, POLL))
        return True

    def stop(self, sequence: Sequence[signal.Signals], grace: float, hurry: Sequence[int] = ()) -> None:
        """Send each signal with `grace` seconds to obey it, then kill whatever is left. RunError if that fails."""
        for signum in sequence:
            self._send(signum)
            if self.wait(self.gone, grace, hurry):
                break
        until = time.monotonic() + KILL_WAIT
        while not self.gone():
            self._send(signal.SIGKILL)
            if time.monotonic() > until:
                left = _listed(self._members())
                raise RunError(f"could not kill {left}: stuck in the kernel? end them before the next run")
            self._pump(POLL)
        self.wait(self.over, LAST_WORDS)

    def abandon(self, grace: float) -> tuple[str, ...]:
        """Stop what outlived the command, and say so."""
        members = self._members()
        self.stop((signal.SIGTERM,), grace)
        if members:
            return (f"still running {grace:g} s after the command had ended, and stopped: {_listed(members)}",)
        return (f"its output was still held open {grace:g} s after the command had ended, by a process not found",)

    def give_up(self, error: BaseException, grace: float) -> None:
        """Stop everything because of an exception; one more signal and all are killed at once."""
        self._on_tick = self._output.on_line = None
        by_user = isinstance(error, KeyboardInterrupt)
        by_user |= isinstance(error, Interrupted) and error.signum == signal.SIGINT
        with noted() as hurry:
            self.stop((signal.SIGINT, signal.SIGTERM) if by_user else (signal.SIGTERM,), grace, hurry)

    def close(self) -> None:
        self._selector.close()
        self._pipe.close()

    def _members(self) -> dict[int, str]:
        return members(self.process.pid, self._mark)

    def _pump(self, seconds: float) -> None:
        if not self._open and not self.exited():
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(seconds)
        elif not self._open:
            time.sleep(seconds)
        elif self._selector.select(seconds):
            block = os.read(self._pipe.fileno(), BLOCK)
            if block:
                self._output.feed(block)
            else:
                self._open = False
                self._selector.unregister(self._pipe)
        if self._on_tick is not None:
            self._on_tick()

    def _send(self, signum: signal.Signals) -> None:
        alive = not self.exited()
        if alive:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signum)
        if not alive or signum == signal.SIGKILL:
            for pid in self._members():
                with suppress(ProcessLookupError):
                    os.kill(pid, signum)


def members(session: int, mark: bytes) -> dict[int, str]:
    """The living processes of a session, or with the mark in their environment: pid to name. Empty without /proc."""
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")) if os.path.isdir("/proc") else ():
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            head, _, rest = Path("/proc", name, "stat").read_bytes().rpartition(b")")
            state, _parent, _group, its_session = rest.split()[:4]
            if state in (b"Z", b"X"):
                continue
            if int(its_session) == session or mark in Path("/proc", name, "environ").read_bytes():
                found[int(name)] = head.partition(b"(")[2].decode(errors="replace")
    return found


def _listed(processes: Mapping[int, str]) -> str:
    return ", ".join(f"{name} (pid {pid})" for pid, name in processes.items())


def _popen(argv: Sequence[str], cwd: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            list(argv),
            cwd=cwd,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
    except OSError as error:
        raise RunError(f"cannot start {argv[0]!r}: {_start_trouble(argv[0], cwd, environment, error)}") from error


def _die_with_parent() -> None:
    """A child of an rlspec that was killed gets SIGTERM (Linux), and does not compute on beside the next run."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, int(signal.SIGTERM))


def _start_trouble(command: str, cwd: Path, environment: Mapping[str, str], error: OSError) -> str:
    if not cwd.is_dir():
        return f"its folder {cwd} does not exist"
    if isinstance(error, FileNotFoundError):
        if "/" not in command and shutil.which(command, path=environment.get("PATH", os.defpath)) is None:
            return "no such command on PATH; install it, or give its full path in `command`"
        if (cwd / command).is_file():
            return "the interpreter in its first line does not exist; correct it, or put one first in `command`"
        return f"no such file (from {cwd}); correct the path in `command`"
    if isinstance(error, PermissionError):
        return "it is not executable; chmod +x it, or put its interpreter first in `command`"
    if error.errno == errno.ENOEXEC:
        return "it is no program; put its interpreter first in `command`"
    return error.strerror or str(error)
