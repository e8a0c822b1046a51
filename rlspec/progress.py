"""How far an arm is, from what it prints: the step that a line is about, and one line of progress on a stream."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

from rlspec.escapes import ESCAPES_IN_BYTES

LINE = 1 << 14  # bytes at the beginning of a line that are looked at
FRAME = 0.1  # seconds between two rewritings of a terminal's line
STEP = re.compile(
    rb"(?<!validate )\b(?:global_)?(?:step|iteration)\b[\"']?"
    rb"(?:[\s:=]*(\d{1,12})\s*/\s*(\d{1,12})\b|\s*[:=]\s*(\d{1,12})\b)",
    re.IGNORECASE,
)
SUMMARY = b"train_loss"  # of a whole run, in the last dict of transformers' Trainer
LOSS = re.compile(
    rb"(?<![\w-])(?<!balancing )(?<!balance )(?:cross-entropy-|lm[ _]|train_)?loss[\"']?\s*[:=]?\s*[\"']?"
    rb"([-+]?(?:nan|inf|\d+(?:\.\d*)?(?:e[-+]?\d+)?))\b",
    re.IGNORECASE,
)


def step_of(line: bytes) -> tuple[int, int | None] | None:
    """The step that a line of output is about, and of how many, whatever trainer printed it."""
    match = STEP.search(_plain(line))
    if match is None:
        return None
    step, of, alone = match.groups()
    return (int(alone), None) if step is None else (int(step), int(of))


def _plain(line: bytes) -> bytes:
    return ESCAPES_IN_BYTES.sub(b"", line[:LINE])


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
        self._every = FRAME if self._terminal else every
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
        line = _plain(line)
        found, loss = step_of(line), LOSS.search(line)
        if line.startswith(b"{") and SUMMARY in line:
            loss = None
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
        except (OSError, ValueError):  # ValueError: the stream is closed
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
