from __future__ import annotations

import signal
import threading

import pytest

from rlspec.interrupts import SIGNALS, Interrupted, noted, postponed, signals


def test_signals_anywhere_and_handlers_restored() -> None:
    before = [signal.getsignal(signum) for signum in SIGNALS]
    with pytest.raises(Interrupted) as caught, signals():
        signal.raise_signal(signal.SIGTERM)
    assert caught.value.exit_code == 143
    assert not isinstance(caught.value, Exception)
    assert [signal.getsignal(signum) for signum in SIGNALS] == before


def test_second_signal_does_not_tear_the_clean_up_but_the_third_is_heard() -> None:
    cleaned = []
    with pytest.raises(Interrupted), signals():
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            signal.raise_signal(signal.SIGINT)
            cleaned.append(True)
            with pytest.raises(Interrupted):
                signal.raise_signal(signal.SIGINT)
    assert cleaned


def test_postponed_signals_come_at_the_end_even_after_an_error() -> None:
    done = []
    with signals(), pytest.raises(Interrupted), postponed():
        signal.raise_signal(signal.SIGTERM)
        done.append("body")
    with signals(), pytest.raises(Interrupted) as caught, postponed():
        signal.raise_signal(signal.SIGINT)
        raise ValueError
    assert done == ["body"] and isinstance(caught.value.__context__, ValueError)


def test_noted_signals_do_nothing() -> None:
    with noted() as numbers:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGHUP)
    assert numbers == [signal.SIGINT, signal.SIGHUP]


def test_outside_the_main_thread_nothing_is_caught() -> None:
    before, seen = signal.getsignal(signal.SIGINT), []

    def work() -> None:
        with postponed(), noted():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
