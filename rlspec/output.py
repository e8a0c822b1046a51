"""What a command prints: into its log as it comes, line by line to a listener, with the last lines kept."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from io import FileIO
from pathlib import Path

from rlspec.errors import RunError
from rlspec.escapes import ESCAPES
from rlspec.progress import LINE, step_of

TAIL = 20  # lines
END = re.compile(rb"([\r\n])")
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def create(log: Path) -> FileIO:
    """A new log, and its folder. RunError if it cannot be written."""
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        return log.open("wb", buffering=0)
    except OSError as error:
        raise _unwritable(log, error) from error


def _unwritable(log: Path, error: OSError) -> RunError:
    return RunError(f"cannot write the log {log}: {error.strerror}; make room for it, or its folder writable")


class Output:
    """The bytes of a command on their way. `step` is the last step that a line named.

    Lines end in CR or LF; `on_line` gets the first `LINE` bytes of each that is not empty, the log gets every byte.
    """

    def __init__(self, log: Path, sink: FileIO, on_line: Callable[[bytes], None] | None) -> None:
        self.on_line = on_line
        self.step: int | None = None
        self._log = log
        self._sink: FileIO | None = sink
        self._line = bytearray()
        self._recent: deque[bytes] = deque(maxlen=TAIL)
        self._overwritten = False  # the last line ended in CR alone: a progress bar, which the next one replaces

    def feed(self, block: bytes) -> None:
        """RunError if the log cannot be written; from then on it is left as it is."""
        self._write(block)
        *complete, rest = END.split(block)
        for text, end in zip(complete[::2], complete[1::2], strict=True):
            self._add(text)
            self.end(end)
        self._add(rest)

    def end(self, end: bytes = b"\n") -> None:
        """The line is complete."""
        if self._line:
            line = bytes(self._line)
            self._line.clear()
            self._keep(line)
            self._overwritten = end == b"\r"
            if self.on_line is not None:
                self.on_line(line)
        elif end == b"\n":
            self._overwritten = False

    def tail(self) -> tuple[str, ...]:
        """The last lines as text without control characters, of a progress bar only its last state."""
        return tuple(CONTROL.sub("", ESCAPES.sub("", line.decode(errors="replace"))) for line in self._recent)

    def _write(self, block: bytes) -> None:
        if self._sink is None:
            return
        try:
            left = memoryview(block)
            while left:
                left = left[self._sink.write(left) :]
        except OSError as error:
            self._sink = None
            raise _unwritable(self._log, error) from error

    def _add(self, text: bytes) -> None:
        self._line += text[: LINE - len(self._line)]

    def _keep(self, line: bytes) -> None:
        if self._overwritten:
            self._recent.pop()
        self._recent.append(line)
        found = step_of(line)
        self.step = found[0] if found else self.step
