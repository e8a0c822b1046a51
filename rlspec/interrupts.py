"""Signals that ask rlspec to end: raised as Interrupted, or held back while something must not be torn."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """A signal asked rlspec to end. Not an `Exception`, so that only `finally` and context managers meet it."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(signum).name}")
        self.signum = signum

    @property
    def exit_code(self) -> int:
        return 128 + self.signum


@contextmanager
def signals() -> Iterator[None]:
    """Turn SIGINT, SIGTERM and SIGHUP (as SIGTERM; left ignored under nohup) into Interrupted in the main thread.

    The second signal is swallowed, so that an impatient Ctrl-C does not tear the clean-up (`launch.execute` then kills
    at once); every later one raises again, so that nothing can make rlspec deaf.
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
def noted() -> Iterator[list[int]]:
    """Inside, the three signals do nothing but enter the list that is yielded."""
    numbers: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # handlers run in the main thread only
        yield numbers
        return

    def handler(signum: int, frame: FrameType | None) -> None:
        numbers.append(signum)

    caught = [s for s in SIGNALS if signal.getsignal(s) not in (signal.SIG_IGN, None)]
    before = _swap(dict.fromkeys(caught, handler))
    try:
        yield numbers
    finally:
        _swap(before)


@contextmanager
def postponed() -> Iterator[None]:
    """Inside, the three signals wait; the first that came is raised at the end, even after an exception."""
    numbers: list[int] = []
    try:
        with noted() as numbers:
            yield
    finally:
        for signum in numbers[:1]:
            signal.raise_signal(signum)


def _swap(handlers: Mapping[signal.Signals, Any]) -> dict[signal.Signals, Any]:
    """Set handlers and return those before, with no signal in between."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # may raise for a handler that was due already
        return {signum: signal.signal(signum, handler) for signum, handler in handlers.items()}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
