"""Why a command failed: the traceback in its log that came first, and one sentence about it."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlspec.escapes import ESCAPES

SEARCHED = 4 << 20  # bytes at the end of a log in which a cause is looked for
NEAR = 200  # a traceback of unknown rank counts as the cause within this many lines of the end
SENTENCE = "error: "  # how the last line begins of a command that says why it ended
LONGEST = 2000  # characters of such a sentence, which may name many tensors
FRAMES = 400  # lines after which a traceback without an end is given up
HINTS = {"SIGKILL": " (out of memory?)", "SIGBUS": " (shared memory full?)"}
BY_SHELL = (signal.SIGABRT, signal.SIGBUS, signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM)
CANNOT_RUN = frozenset({"AttributeError", "ImportError", "ModuleNotFoundError", "TypeError"})

RANK = re.compile(r"\[[a-z_]+(\d{1,9})\]: ?")
TRACEBACK = "Traceback (most recent call last):"
HEADER = re.compile(r"(?:\[[a-z_]+\d{1,9}\]: ?)*" + re.escape(TRACEBACK) + "$")
CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
RAISED = re.compile(r"((?:[\w<>]+\.)+\w+|[A-Z]\w*)(?:: |:?$)")
FRAME = re.compile(r'^\s+File "(.+)", line \d+', re.MULTILINE)
ROOT_CAUSE = "Root Cause (first observed failure):"
FAILED_RANK = re.compile(r"^\s*rank\s*: (\d{1,9})\b.*\n\s*exitcode\s*: (-?\d{1,9})\b", re.MULTILINE)
AGENT = ("ChildFailedError", "SignalException")


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What a log says of a failure; `rank` is None without torchrun, `traceback` may be empty."""

    rank: int | None = None
    exitcode: int = 1
    traceback: Sequence[str] = ()

    @property
    def error(self) -> str:
        """The last line of the traceback that is not indented, such as `ValueError: 3 is no good`."""
        return next((line.rstrip(": ") for line in reversed(self.traceback) if line[:1].strip()), "")

    @property
    def text(self) -> str:
        """`rank 1 exited with 2: ValueError: …`, or `ValueError: …` where there are no ranks."""
        if self.rank is None:
            return self.error
        if self.exitcode < 0:
            return f"rank {self.rank} was killed by {_signal_name(-self.exitcode)}"
        return f"rank {self.rank} exited with {self.exitcode}" + (f": {self.error}" if self.traceback else "")


def reason(returncode: int, cause: Failure | None, tail: Sequence[str]) -> str:
    """Why a command ended with a return code other than 0, negative for a signal; `tail` has its last lines."""
    if returncode < 0:
        return f"killed by {_signal_name(-returncode)}"
    if cause is not None:
        return cause.text if cause.rank is not None else f"exited with {returncode}: {cause.text}"
    if tail and (said := tail[-1].strip()).startswith(SENTENCE):
        return f"exited with {returncode}: {said.removeprefix(SENTENCE)[:LONGEST]}"
    by = f" (as after {_signal_name(returncode - 128)})" if returncode - 128 in BY_SHELL else ""
    last = f"the last line it printed: {tail[-1].strip()[:200]}" if tail else "it printed nothing"
    return f"exited with {returncode}{by}; {last}"


def _signal_name(signum: int) -> str:
    try:
        name = signal.Signals(signum).name
    except ValueError:
        name = f"signal {signum}"
    return name + HINTS.get(name, "")


def could_not_run(traceback_text: str, run_file: Path) -> bool:
    """Whether the traceback ends in the run file itself, as when the trainer's interface has moved."""
    frames = FRAME.findall(traceback_text)
    raised = [match for match in map(RAISED.match, traceback_text.splitlines()) if match]
    if not frames or not raised:
        return False
    return Path(frames[-1]).name == run_file.name and raised[-1].group(1).rpartition(".")[2] in CANNOT_RUN


def find(log: Path) -> Failure | None:
    """The first cause of a failure that the log of a command shows; None if it shows none.

    torchrun's exit code is always 1, so its root-cause block and the ranks' tracebacks say more. The block's order is
    as coarse as the agent's polling. Where the rank it names raised, the rank whose traceback came first counts: the
    others fail because that one is gone.
    """
    lines = _end_of(log)
    tracebacks = [one for one in _tracebacks(lines) if not one.of_agent]
    near = [one.lines for one in tracebacks if one.rank is None and one.end >= len(lines) - NEAR]
    by_rank = {one.rank: one.lines for one in tracebacks if one.rank is not None}  # in order of each rank's first
    block = _root_cause(lines)
    named = FAILED_RANK.search(block)
    if named is None:
        found = near[-1:] or list(by_rank.values())[:1]
        return Failure(traceback=found[0]) if found else None
    rank, exitcode = map(int, named.groups())
    if rank not in by_rank:
        return Failure(rank=rank, exitcode=exitcode, traceback=_recorded(block) or next(iter(near), ()))
    first, traceback = next(iter(by_rank.items()))
    codes = {int(its_rank): int(code) for its_rank, code in FAILED_RANK.findall("\n".join(lines))}
    return Failure(rank=first, exitcode=codes.get(first, 1), traceback=traceback)


def survived(log: Path, begins: Callable[[Sequence[str]], int] = lambda lines: 0) -> str:
    """A note on the first traceback near the end of the log of a run that ended well, empty if there is none.

    A trainer that catches its own exception and exits with 0 has not trained what it should have. `begins` gives the
    line from which on that is so: before it a trainer may try what is not installed.
    """
    lines = _end_of(log)
    if not any(TRACEBACK in line for line in lines):
        return ""
    begin = begins(lines) if log.stat().st_size <= SEARCHED else 0
    first = next((one for one in _tracebacks(lines) if one.end >= begin and not one.of_agent and one.lines), None)
    error = "" if first is None else Failure(traceback=first.lines).error[:200]
    return f"the log holds a traceback: {error}; did this run train to its end?" if error else ""


def _end_of(log: Path) -> list[str]:
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - SEARCHED))
        text = ESCAPES.sub("", file.read().decode(errors="replace"))
    return [line.rstrip("\r") for line in text.split("\n")]


def _root_cause(lines: Sequence[str]) -> str:
    """torchrun's last root-cause block and what follows it, or nothing."""
    start = max((number for number, line in enumerate(lines) if line.strip() == ROOT_CAUSE), default=len(lines))
    return "\n".join(lines[start:])


def _recorded(block: str) -> list[str]:
    """The traceback inside torchrun's block, there if the script's main function is decorated with `record`."""
    _, found, text = block.partition("traceback : " + TRACEBACK)
    lines = [line[2:] for line in text.splitlines()[1:]]
    end = next((number for number, line in enumerate(lines) if RAISED.match(line)), -1)
    return [TRACEBACK, *lines[: end + 1]] if found and end >= 0 else []


@dataclass(slots=True)
class _Traceback:
    """A traceback in a log; `rank` is that of the line prefix, `end` the number of its last line."""

    rank: int | None
    end: int
    lines: list[str]

    @property
    def of_agent(self) -> bool:
        return bool(self.lines) and any(name in self.lines[-1] for name in AGENT)


def _tracebacks(lines: Sequence[str]) -> list[_Traceback]:
    """All tracebacks by their first lines; those of several ranks may be interleaved, chained ones are one."""
    found: list[_Traceback] = []
    unfinished: dict[int | None, _Traceback] = {}
    for number, prefixed in enumerate(lines):
        rank, line = _rank_of(prefixed)
        if rank not in unfinished:
            if line.startswith(CHAINED):
                unfinished.update((rank, one) for one in found if one.rank == rank)  # the last one stays
            elif line == TRACEBACK:
                unfinished[rank] = _Traceback(rank, number, [])
                found.append(unfinished[rank])
        if rank not in unfinished:
            continue
        one, raised = unfinished[rank], bool(RAISED.match(line))
        if raised or line[:1].isspace() or line == TRACEBACK or line.startswith(CHAINED):
            one.lines.append(line)
        if raised or len(one.lines) > FRAMES:
            one.end = number
            del unfinished[rank]
    return found


def _rank_of(line: str) -> tuple[int | None, str]:
    """The rank in the prefix of a line, None without one, and the line without prefixes."""
    rank = None
    if header := HEADER.search(line):  # behind a progress bar or another rank's line that lacked its end so far
        line = line[header.start() :]
    while prefix := RANK.match(line):
        rank, line = int(prefix.group(1)), line[prefix.end() :]
    return rank, line
