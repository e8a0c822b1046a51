"""Start one command, keep its log and its time limit, and leave no process behind.

What the callers of `execute` need beside it is here too: how a signal comes back, the display of progress, and
whether a failed run file could run at all.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlspec import failure, slurm
from rlspec.child import Child
from rlspec.errors import SpecError
from rlspec.failure import could_not_run
from rlspec.interrupts import Interrupted, postponed, signals
from rlspec.model import Launch
from rlspec.output import Output, create
from rlspec.progress import Progress

__all__ = ["LAUNCHERS", "Interrupted", "Outcome", "Progress", "argv", "could_not_run", "execute", "signals"]

GRACE = 10.0  # seconds between two signals of rising force, and for what outlives the command
PYTHON = re.compile(r"python[\d.]*t?")


def argv(launch: Launch, command: Sequence[str]) -> tuple[str, ...]:
    """The command line that starts `command` in the way `launch` says. SpecError if there is none."""
    if launch.name not in LAUNCHERS:
        raise SpecError(f"launch: unknown launcher {launch.name!r}, allowed: {', '.join(LAUNCHERS)}")
    if not command:
        raise SpecError("launch: the command is empty")
    return LAUNCHERS[launch.name](launch, command)


def _local(launch: Launch, command: Sequence[str]) -> tuple[str, ...]:
    return tuple(command)


def _for_ranks(launch: Launch, command: Sequence[str]) -> tuple[str, list[str]]:
    """The interpreter, and what torchrun starts with it: a script, or -m MODULE."""
    python, *rest = command
    if not PYTHON.fullmatch(Path(python).name):
        raise SpecError(
            f"launch {launch.name}: the command must begin with a Python interpreter, this one with {python!r}"
        )
    if rest[:1] == ["-u"]:  # torchrun starts its ranks unbuffered by itself
        rest = rest[1:]
    if not rest:
        raise SpecError(f"launch {launch.name}: the command names no script to run")
    if rest[0].startswith("-") and rest[0] != "-m":
        raise SpecError(
            f"launch {launch.name}: interpreter option {rest[0]!r} would not reach the ranks; "
            "use a script or -m MODULE, and set PYTHON… variables in the arm's environment"
        )
    return python, rest


def _torchrun(launch: Launch, command: Sequence[str]) -> tuple[str, ...]:
    if launch.nodes != 1:
        raise SpecError(f"launch torchrun: starts one node, nodes is {launch.nodes}; more than one needs slurm")
    python, rest = _for_ranks(launch, command)
    processes = ("--nnodes", "1", "--nproc-per-node", str(launch.processes_per_node))
    free_port = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0")
    return (python, "-m", "torch.distributed.run", *processes, *free_port, *rest)


def _slurm(launch: Launch, command: Sequence[str]) -> tuple[str, ...]:
    python, rest = _for_ranks(launch, command)
    return slurm.argv(
        python,
        rest,
        nodes=launch.nodes,
        processes=launch.processes_per_node,
        gpus=launch.gpus,
        options=launch.options,
    )


LAUNCHERS: Mapping[str, Callable[[Launch, Sequence[str]], tuple[str, ...]]] = {
    "local": _local,
    "torchrun": _torchrun,
    "slurm": _slurm,
}


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

    The child gets no input and a session of its own; its environment is `environment` and RLSPEC_CHILD, which marks
    its descendants: torchrun's ranks leave the session, and none may live on beside the next arm. `on_line` gets each
    line (ended by CR or LF, cut to 16 KiB), `on_tick` is called about ten times a second. On any exception, an
    Interrupted above all, everything is stopped before it goes on. RunError if the command cannot be started, the log
    not written, or a process not be killed.
    """
    started, child = time.monotonic(), None
    with create(log) as sink:
        output = Output(log, sink, on_line)
        try:
            with postponed():
                child = Child(argv, cwd, environment, output, on_tick)
            if timed_out := not child.wait(child.exited, time_limit):
                child.stop((signal.SIGTERM,), grace)
            notes = () if child.wait(child.over, grace) else child.abandon(grace)
            output.end()
        except BaseException as error:
            if child is not None:
                child.give_up(error, grace)
            raise
        finally:
            if child is not None:
                child.close()
    limit = time_limit if timed_out else None
    return _outcome(child.process.returncode, limit, output, log, time.monotonic() - started, notes)


def _outcome(
    returncode: int, limit: float | None, output: Output, log: Path, seconds: float, notes: tuple[str, ...]
) -> Outcome:
    """`limit` is the time limit that was reached, if it was."""
    cause = reason = None
    if limit is not None:
        where = "before any step was printed" if output.step is None else f"at step {output.step}"
        reason = f"time limit {slurm.duration(limit)} reached {where}"
    elif returncode != 0:
        cause = failure.find(log)
        reason = failure.reason(returncode, cause, output.tail())
    return Outcome(
        returncode=returncode,
        seconds=seconds,
        reason=reason,
        tail=output.tail(),
        timed_out=limit is not None,
        step=output.step,
        traceback="\n".join(cause.traceback) if cause and cause.traceback else None,
        notes=notes,
    )
