"""Start one command: drain it into its log, show progress, keep its time limit, leave no process behind."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import selectors
import shutil
import signal
import subprocess
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from rlspec.errors import RunError, SpecError
from rlspec.model import Launch

GRACE = 10.0  # seconds between two signals of rising force, and for what outlives the command
KILL_WAIT = 5.0  # seconds after which a killed process counts as stuck in the kernel
LAST_WORDS = 1.0  # seconds to read what stopped processes left in the pipe
POLL = 0.1
BLOCK = 1 << 16
LINE = 1 << 14  # bytes kept of one line; the log itself gets all of them
TAIL = 20
SEARCHED = 4 << 20  # bytes at the end of a log in which a cause is looked for
NEAR = 200  # a traceback of unknown rank counts as the cause within this many lines of the end
FRAMES = 400

MARK = "RLSPEC_CHILD"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
HINTS = {"SIGKILL": " (out of memory?)", "SIGBUS": " (shared memory full?)"}
CANNOT_RUN = frozenset({"AttributeError", "ImportError", "ModuleNotFoundError", "TypeError"})

PYTHON = re.compile(r"python[\d.]*t?")
END = re.compile(rb"([\r\n])")
STEP = re.compile(
    rb"(?<!validate )\b(?:global_)?(?:step|iteration)\b[\"']?"
    rb"(?:[\s:=]*(\d{1,12})\s*/\s*(\d{1,12})\b|\s*[:=]\s*(\d{1,12})\b)",
    re.IGNORECASE,
)
LOSS = re.compile(
    rb"(?<![\w-])(?<!balancing )(?<!balance )(?:cross-entropy-|lm[ _]|train_)?loss[\"']?\s*[:=]?\s*[\"']?"
    rb"([-+]?(?:nan|inf|\d+(?:\.\d*)?(?:e[-+]?\d+)?))\b",
    re.IGNORECASE,
)
COLOUR = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
RANK = re.compile(r"\[[a-z_]+(\d+)\]: ?")
TRACEBACK = "Traceback (most recent call last):"
CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
RAISED = re.compile(r"((?:[\w<>]+\.)+\w+|[A-Z]\w*)(?:: |:?$)")
FRAME = re.compile(r'^\s+File "(.+)", line \d+', re.MULTILINE)
ROOT_CAUSE = "Root Cause (first observed failure):"
FAILED_RANK = re.compile(r"^\s*rank\s*: (\d+).*\n\s*exitcode\s*: (-?\d+)", re.MULTILINE)
AGENT = ("ChildFailedError", "SignalException")


class Interrupted(BaseException):
    """A signal asked rlspec to end. Not an `Exception`, so that only `finally` and context managers meet it."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(signum).name}")
        self.signum = signum

    @property
    def exit_code(self) -> int:
        return 128 + self.signum


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a command ended. `returncode` is negative for a signal; `reason` is None only if all went well.

    `step` is the last step seen in the output, `traceback` the whole Python traceback that the reason stands on.
    """

    returncode: int
    seconds: float
    reason: str | None
    tail: tuple[str, ...]
    timed_out: bool
    step: int | None = None
    traceback: str | None = None
    notes: tuple[str, ...] = ()


# How the processes of a step start.


def argv(launch: Launch, command: Sequence[str]) -> tuple[str, ...]:
    """The command line that starts `command` in the way `launch` says. SpecError if there is none."""
    if launch.name not in LAUNCHERS:
        raise SpecError(f"launch: unknown launcher {launch.name!r}, allowed: {', '.join(LAUNCHERS)}")
    if not command:
        raise SpecError("launch: the command is empty")
    return LAUNCHERS[launch.name](launch, command)


def _local(launch: Launch, command: Sequence[str]) -> tuple[str, ...]:
    return tuple(command)


def _torchrun(launch: Launch, command: Sequence[str]) -> tuple[str, ...]:
    python, *rest = command
    if not PYTHON.fullmatch(Path(python).name):
        raise SpecError(f"launch torchrun: the command must begin with a Python interpreter, this one with {python!r}")
    if launch.nodes != 1:
        raise SpecError(f"launch torchrun: starts one node, nodes is {launch.nodes}; more than one needs slurm")
    if rest[:1] == ["-u"]:  # torchrun starts its ranks unbuffered by itself
        rest = rest[1:]
    if not rest:
        raise SpecError("launch torchrun: the command names no script to run")
    if rest[0].startswith("-") and rest[0] != "-m":
        raise SpecError(
            f"launch torchrun: interpreter option {rest[0]!r} would not reach the ranks; "
            "use a script or -m MODULE, and set PYTHON… variables in the arm's environment"
        )
    processes = ("--nnodes", "1", "--nproc-per-node", str(launch.processes_per_node))
    free_port = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0")
    return (python, "-m", "torch.distributed.run", *processes, *free_port, *rest)


def _slurm(launch: Launch, command: Sequence[str]) -> tuple[str, ...]:
    raise SpecError("launch slurm: this version cannot start slurm jobs yet; use local or torchrun")


LAUNCHERS: Mapping[str, Callable[[Launch, Sequence[str]], tuple[str, ...]]] = {
    "local": _local,
    "torchrun": _torchrun,
    "slurm": _slurm,
}


# Signals sent to rlspec itself.


@contextmanager
def signals() -> Iterator[None]:
    """Turn SIGINT, SIGTERM and SIGHUP (as SIGTERM; left ignored under nohup) into Interrupted in the main thread.

    The second signal is swallowed, so that an impatient Ctrl-C does not tear the clean-up (`execute` then kills at
    once); every later one raises again, so that nothing can make rlspec deaf.
    """
    count = 0

    def handler(signum: int, frame: FrameType | None) -> None:
        nonlocal count
        count += 1
        if count != 2:
            raise Interrupted(signal.SIGINT if signum == signal.SIGINT else signal.SIGTERM)

    caught = [s for s in SIGNALS if s != signal.SIGHUP or signal.getsignal(s) != signal.SIG_IGN]
    before = _swap(dict.fromkeys(caught, handler))
    try:
        yield
    finally:
        _swap(before)


@contextmanager
def _held() -> Iterator[list[int]]:
    """Inside, signals are only noted, in the list that is yielded."""
    noted: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return

    def handler(signum: int, frame: FrameType | None) -> None:
        noted.append(signum)

    caught = [s for s in SIGNALS if signal.getsignal(s) not in (signal.SIG_IGN, None)]
    before = _swap(dict.fromkeys(caught, handler))
    try:
        yield noted
    finally:
        _swap(before)


def _swap(handlers: Mapping[signal.Signals, Any]) -> dict[signal.Signals, Any]:
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # may raise for a handler that was due already
        return {signum: signal.signal(signum, handler) for signum, handler in handlers.items()}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


# One child process.


def execute(
    argv: Sequence[str],
    *,
    cwd: Path,
    environment: Mapping[str, str],
    log: Path,
    time_limit: float | None = None,
    on_line: Callable[[bytes], None] | None = None,
    on_tick: Callable[[], None] | None = None,
    grace: float = GRACE,
) -> Outcome:
    """Run `argv` to its end with its output in `log` (written anew); all times in seconds.

    The child gets no input, a session of its own and `environment` plus RLSPEC_CHILD, by which its descendants are
    found in /proc: torchrun's ranks leave its session, and none may live on beside the next arm. `on_line` gets each
    line (ended by CR or LF, cut to 16 KiB), `on_tick` is called about ten times a second. On any exception, an
    Interrupted above all, everything is stopped before it goes on. RunError if the command cannot be started, the log
    not written, or a process not be killed.
    """
    started = time.monotonic()
    child = None
    with _create(log) as sink:
        output = _Output(log, sink, on_line)
        try:
            with _held() as noted:
                child = _Child(argv, cwd, environment, output, on_tick)
            if noted:
                signal.raise_signal(noted[0])
            timed_out = not child.wait(child.exited, time_limit)
            if timed_out:
                child.stop((signal.SIGTERM,), grace)
            notes = () if child.wait(child.over, grace) else child.abandon(grace)
            output.end()
        except BaseException as error:
            if child is not None:
                child.on_tick = output.on_line = None
                user = isinstance(error, KeyboardInterrupt) or getattr(error, "signum", None) == signal.SIGINT
                with _held() as hurry:
                    child.stop((signal.SIGINT, signal.SIGTERM) if user else (signal.SIGTERM,), grace, hurry)
            raise
        finally:
            if child is not None:
                child.close()
    returncode = child.process.returncode
    cause = None if returncode == 0 or timed_out else _failure(log)
    reason = None
    if timed_out and time_limit is not None:
        where = "before any step was printed" if output.step is None else f"at step {output.step}"
        reason = f"time limit {_duration(time_limit)} reached {where}"
    elif returncode != 0:
        reason = _reason(returncode, cause, output.tail())
    return Outcome(
        returncode=returncode,
        seconds=time.monotonic() - started,
        reason=reason,
        tail=output.tail(),
        timed_out=timed_out,
        step=output.step,
        traceback="\n".join(cause.lines) if cause and cause.lines else None,
        notes=notes,
    )


def _create(log: Path) -> FileIO:
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        return log.open("wb", buffering=0)
    except OSError as error:
        raise RunError(f"cannot write the log {log}: {error.strerror}") from error


class _Output:
    """Where a child's bytes go: into the log as they come, line by line to a listener, the last lines kept."""

    def __init__(self, log: Path, sink: FileIO, on_line: Callable[[bytes], None] | None) -> None:
        self.on_line = on_line
        self.step: int | None = None
        self._log = log
        self._sink: FileIO | None = sink
        self._line = bytearray()
        self._recent: deque[bytes] = deque(maxlen=TAIL)
        self._overwritten = False  # the last line ended in CR alone: a progress bar, which the next one replaces

    def feed(self, block: bytes) -> None:
        if self._sink is not None:
            try:
                left = memoryview(block)
                while left:
                    left = left[self._sink.write(left) :]
            except OSError as error:
                self._sink = None
                raise RunError(f"cannot write the log {self._log}: {error.strerror}") from error
        *complete, rest = END.split(block)
        for text, end in zip(complete[::2], complete[1::2], strict=True):
            self._add(text)
            self.end(end)
        self._add(rest)

    def end(self, end: bytes = b"\n") -> None:
        if self._line:
            line = bytes(self._line)
            self._line.clear()
            if self._overwritten:
                self._recent.pop()
            self._recent.append(line)
            found = step_of(line)
            self.step = found[0] if found else self.step
            self._overwritten = end == b"\r"
            if self.on_line is not None:
                self.on_line(line)
        elif end == b"\n":
            self._overwritten = False

    def tail(self) -> tuple[str, ...]:
        return tuple(CONTROL.sub("", COLOUR.sub(b"", line).decode(errors="replace")) for line in self._recent)

    def _add(self, text: bytes) -> None:
        self._line += text[: LINE - len(self._line)]


class _Child:
    """A started command with all its descendants."""

    def __init__(
        self,
        argv: Sequence[str],
        cwd: Path,
        environment: Mapping[str, str],
        output: _Output,
        on_tick: Callable[[], None] | None,
    ) -> None:
        mark = uuid.uuid4().hex
        outer = os.environ.get(MARK)
        self.on_tick = on_tick
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
        return self.exited() and not self.members()

    def over(self) -> bool:
        return self.exited() and not self._open and not self.members()

    def members(self) -> dict[int, str]:
        return _members(self.process.pid, self._mark)

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
        """Send each signal with `grace` seconds to obey it, then kill whatever is left."""
        for signum in sequence:
            self._send(signum)
            if self.wait(self.gone, grace, hurry):
                break
        until = time.monotonic() + KILL_WAIT
        while not self.gone():
            self._send(signal.SIGKILL)
            if time.monotonic() > until:
                left = _listed(self.members())
                raise RunError(f"could not kill {left}: stuck in the kernel? end them before the next run")
            self._pump(POLL)
        self.wait(self.over, LAST_WORDS)

    def abandon(self, grace: float) -> tuple[str, ...]:
        """Stop what outlived the command, and say so."""
        members = self.members()
        self.stop((signal.SIGTERM,), grace)
        if members:
            return (f"still running {grace:g} s after the command had ended, and stopped: {_listed(members)}",)
        return (f"its output was still held open {grace:g} s after the command had ended, by a process not found",)

    def close(self) -> None:
        self._selector.close()
        self._pipe.close()

    def _pump(self, seconds: float) -> None:
        if not self._open:
            time.sleep(seconds)
        elif self._selector.select(seconds):
            block = os.read(self._pipe.fileno(), BLOCK)
            if block:
                self._output.feed(block)
            else:
                self._open = False
                self._selector.unregister(self._pipe)
        if self.on_tick is not None:
            self.on_tick()

    def _send(self, signum: signal.Signals) -> None:
        alive = not self.exited()
        if alive:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signum)
        if not alive or signum == signal.SIGKILL:
            for pid in self.members():
                with suppress(ProcessLookupError):
                    os.kill(pid, signum)


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
    """A child of an rlspec that was killed outright gets SIGTERM (Linux), and does not compute on beside the next run."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, int(signal.SIGTERM))


def _start_trouble(command: str, cwd: Path, environment: Mapping[str, str], error: OSError) -> str:
    if not cwd.is_dir():
        return f"its folder {cwd} does not exist"
    if isinstance(error, FileNotFoundError):
        if "/" not in command and shutil.which(command, path=environment.get("PATH", os.defpath)) is None:
            return "no such command on PATH; install it, or give its full path in `command`"
        if (cwd / command).is_file():
            return "the interpreter named in its first line does not exist"
        return f"no such file (from {cwd}); correct the path in `command`"
    if isinstance(error, PermissionError):
        return "it is not executable; chmod +x it, or put its interpreter first in `command`"
    if error.errno == errno.ENOEXEC:
        return "it is no program; put its interpreter first in `command`"
    return error.strerror or str(error)


def _members(session: int, mark: bytes) -> dict[int, str]:
    """The living processes of a session, or with the mark in their environment: pid to name."""
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


def _listed(members: Mapping[int, str]) -> str:
    return ", ".join(f"{name} (pid {pid})" for pid, name in members.items())


# Why it failed.


@dataclass(frozen=True, slots=True)
class _Failure:
    rank: int | None
    exitcode: int
    lines: Sequence[str]

    def error(self) -> str:
        return next((line.rstrip(": ") for line in reversed(self.lines) if line[:1].strip()), "")


def root_cause(log: Path) -> str | None:
    """What a failed command's log says: `rank 1 exited with 2: ValueError: …` or `ValueError: …`, or None."""
    cause = _failure(log)
    if cause is None:
        return None
    return cause.error() if cause.rank is None else _rank_reason(cause)


def could_not_run(traceback_text: str, run_file: Path) -> bool:
    """Whether the traceback ends in the run file itself, as when the trainer's interface has moved."""
    frames = FRAME.findall(traceback_text)
    raised = [match for match in map(RAISED.match, traceback_text.splitlines()) if match]
    if not frames or not raised:
        return False
    return Path(frames[-1]).name == run_file.name and raised[-1].group(1).rpartition(".")[2] in CANNOT_RUN


def _failure(log: Path) -> _Failure | None:
    """torchrun's exit code is always 1, so its root-cause block and the ranks' tracebacks say more.

    The block's order is as coarse as the agent's polling. Where the rank it names raised, the rank whose traceback
    came first counts: the others fail because that one is gone.
    """
    lines = _end_of(log)
    tracebacks = [(rank, block, end) for rank, block, end in _tracebacks(lines) if not _is_agent(block)]
    near = [block for rank, block, end in tracebacks if rank is None and end >= len(lines) - NEAR]
    raised = {rank: block for rank, block, _ in tracebacks if rank is not None}  # in order of each rank's first
    start = max((n for n, line in enumerate(lines) if line.strip() == ROOT_CAUSE), default=None)
    block = "\n".join(lines[start:]) if start is not None else ""
    named = FAILED_RANK.search(block)
    if named is None:
        found = near[-1:] or list(raised.values())[:1]
        return _Failure(None, 1, found[0]) if found else None
    rank = named.group(1)
    if rank not in raised:
        return _Failure(int(rank), int(named.group(2)), _recorded(block) or (near[:1] or [[]])[0])
    first = next(iter(raised))
    codes = dict(FAILED_RANK.findall("\n".join(lines)))
    return _Failure(int(first), int(codes.get(first, 1)), raised[first])


def _recorded(block: str) -> list[str]:
    """The traceback inside torchrun's block, there if the script's main function is decorated with `record`."""
    _, found, text = block.partition("traceback : " + TRACEBACK)
    lines = [line[2:] for line in text.splitlines()[1:]]
    end = next((n for n, line in enumerate(lines) if RAISED.match(line)), -1)
    return [TRACEBACK, *lines[: end + 1]] if found and end >= 0 else []


def _end_of(log: Path) -> list[str]:
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - SEARCHED))
        return [line.rstrip("\r") for line in COLOUR.sub(b"", file.read()).decode(errors="replace").split("\n")]


def _tracebacks(lines: Sequence[str]) -> list[tuple[str | None, list[str], int]]:
    """(rank of the line prefix, lines, number of the last line) of each traceback; chained ones are one."""
    found: list[tuple[str | None, list[str], int]] = []
    unfinished: dict[str | None, int] = {}
    for number, line in enumerate(lines):
        rank = None
        while prefix := RANK.match(line):
            rank, line = prefix.group(1), line[prefix.end() :]
        if rank not in unfinished:
            if line.startswith(CHAINED):
                unfinished.update((rank, n) for n, (its_rank, _, _) in enumerate(found) if its_rank == rank)
            elif line == TRACEBACK:
                unfinished[rank] = len(found)
                found.append((rank, [], number))
        if rank not in unfinished:
            continue
        block = found[unfinished[rank]][1]
        raised = bool(RAISED.match(line))
        if raised or line[:1].isspace() or line == TRACEBACK or line.startswith(CHAINED):
            block.append(line)
        if raised or len(block) > FRAMES:
            found[unfinished.pop(rank)] = (rank, block, number)
    return found


def _is_agent(block: Sequence[str]) -> bool:
    return bool(block) and any(name in block[-1] for name in AGENT)


def _reason(returncode: int, cause: _Failure | None, tail: Sequence[str]) -> str:
    if returncode < 0:
        return f"killed by {_signal_name(-returncode)}"
    if cause is not None and cause.rank is not None:
        return _rank_reason(cause)
    if cause is not None:
        return f"exited with {returncode}: {cause.error()}"
    by = f" (as after {_signal_name(returncode - 128)})" if returncode - 128 in (6, 7, 9, 11, 15) else ""
    last = f"the last line it printed: {tail[-1].strip()[:200]}" if tail else "it printed nothing"
    return f"exited with {returncode}{by}; {last}"


def _rank_reason(cause: _Failure) -> str:
    ended = f"was killed by {_signal_name(-cause.exitcode)}" if cause.exitcode < 0 else f"exited with {cause.exitcode}"
    return f"rank {cause.rank} {ended}" + (f": {cause.error()}" if cause.lines and cause.exitcode >= 0 else "")


def _signal_name(signum: int) -> str:
    try:
        name = signal.Signals(signum).name
    except ValueError:
        name = f"signal {signum}"
    return name + HINTS.get(name, "")


def _duration(seconds: float) -> str:
    for unit, size in (("h", 3600), ("m", 60)):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:g}{unit}"
    return f"{seconds:g}s"


# Progress.


def step_of(line: bytes) -> tuple[int, int | None] | None:
    """The step that a line of output is about, and of how many, whatever trainer printed it."""
    match = STEP.search(COLOUR.sub(b"", line[:LINE]))
    if match is None:
        return None
    step, of, alone = match.groups()
    return (int(alone), None) if step is None else (int(step), int(of))


class Progress:
    """One line on how far an arm is: rewritten in place on a terminal, else printed about every `every` seconds.

    `feed` takes lines of output, `tick` lets time pass. A stream that is gone ends the display, never the run.
    """

    def __init__(
        self,
        name: str,
        expected: int | None,
        stream: TextIO,
        *,
        every: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._expected = self._of = expected
        self._stream: TextIO | None = stream
        self._terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._every = 0.1 if self._terminal else every
        self._clock = clock
        self._step: int | None = None
        self._numbered = False
        self._loss: float | None = None
        self._first = self._last = (0, 0.0)
        self._printed = clock()
        self._shown = ""

    def start(self) -> None:
        self._print("starting")

    def feed(self, line: bytes) -> None:
        line = COLOUR.sub(b"", line[:LINE])
        found, loss = step_of(line), LOSS.search(line)
        if found is not None:
            self._numbered = True
            self._of = self._expected or found[1] or self._of
            self._reach(found[0])
        elif loss is not None and not self._numbered and line.startswith(b"{"):
            self._reach((self._step or 0) + 1)  # metrics without a step number, one dict a step
        if loss is not None and self._step is not None:
            self._loss = float(loss.group(1))
        self.tick()

    def tick(self) -> None:
        if self._clock() - self._printed >= self._every:
            self._print("" if self._step is not None else "no step yet")

    def end(self, text: str) -> None:
        """`text` says in a few words how it ended."""
        self._print(text, last=True)

    def _reach(self, step: int) -> None:
        if step != self._step:
            now = self._clock()
            if self._step is None or step < self._step:
                self._first = (step, now)
            self._step, self._last = step, (step, now)

    def _eta(self) -> str | None:
        """From the pace since the first step that was seen, so that start-up and compilation do not count."""
        (first, began), (step, reached) = self._first, self._last
        if not self._of or step <= first:
            return None
        left = (reached - began) / (step - first) * max(self._of - step, 0)
        return _clock_text(max(left - (self._clock() - reached), 0.0))

    def _print(self, text: str, last: bool = False) -> None:
        fields = [self._name]
        if self._step is not None:
            fields.append(f"step {self._step}" + (f"/{self._of}" if self._of else ""))
        if self._loss is not None:
            fields.append(f"loss {self._loss:.4f}")
        eta = None if last else self._eta()
        fields += [f"eta {eta}"] if eta else []
        fields += [text] if text else []
        self._printed = self._clock()
        try:
            self._show("  ".join(fields), last)
        except (OSError, ValueError):
            self._stream = None

    def _show(self, text: str, last: bool) -> None:
        if self._stream is None:
            return
        if not self._terminal:
            self._stream.write(text + "\n")
        elif last:
            self._stream.write("\r" + text.ljust(len(self._shown)) + "\n")
        elif (fitting := text[: _width(self._stream) - 1]) != self._shown:
            self._stream.write("\r" + fitting.ljust(len(self._shown)))
            self._shown = fitting
        self._stream.flush()


def _clock_text(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _width(stream: TextIO) -> int:
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns) > 0:
        return int(columns)
    with suppress(OSError):
        return os.get_terminal_size(stream.fileno()).columns or 80
    return 80
