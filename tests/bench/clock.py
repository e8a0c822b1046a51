"""How the benches of kernels time a call, and a rehearsal, in which each call is made once and nothing is timed.

A call below 100 us is timed in a CUDA graph of some calls, warmed for 20 ms and measured for 10; a longer one alone, at
steady heat: 300 ms of the same work, then 150 ms measured. Sides that are compared run one after the other, then in
reversed order, and the two readings are averaged, so that heat falls on all of them alike.

The first call of a Triton kernel compiles it. Under `rehearsal` the functions below make a call and give 1 us, so that
a part can go through all its timings beforehand, beside others, and then finds everything compiled.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

Call = Callable[[], Any]
Side = tuple[Call, int]  # what to run, and how many calls it makes

LONG_US = 100
SHORT, LONG = (20e3, 10e3), (300e3, 150e3)  # us of warm-up, us measured
READINGS = 5

_rehearsing: ContextVar[bool] = ContextVar("rehearsing", default=False)


@contextmanager
def rehearsal() -> Iterator[None]:
    token = _rehearsing.set(True)
    try:
        yield
    finally:
        _rehearsing.reset(token)


def graph(calls: list[Call], least: int = 8) -> Side:
    """The replay of a graph of the calls, gone through so often that the start of a graph does not count."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # for what the call reads
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.synchronize()
    if _rehearsing.get():
        return calls[0], 1
    calls = calls * -(-least // len(calls)) if elapsed(calls[0], 1) < 2000 else (calls * 2)[:2]
    made = torch.cuda.CUDAGraph()
    with torch.cuda.graph(made):
        for call in calls:
            call()
    return made.replay, len(calls)


def steady(run: Call, calls: int = 1, heat: tuple[float, float] | None = None) -> float:
    """Microseconds a call: the median of five readings, after a warm-up. `heat` is as SHORT and LONG."""
    run()
    torch.cuda.synchronize()
    if _rehearsing.get():
        return 1.0
    once = elapsed(run, 1)
    warm, measured = heat or (SHORT if once / calls < LONG_US else LONG)
    elapsed(run, int(warm / once) + 1)
    times = int(measured / READINGS / once) + 1
    return statistics.median(elapsed(run, times) for _ in range(READINGS)) / calls


def there_and_back(sides: Mapping[str, Side], heat: tuple[float, float] | None = None) -> dict[str, float]:
    """Microseconds a call of each side, from two readings in opposite order."""
    there = {name: steady(*side, heat) for name, side in sides.items()}
    if _rehearsing.get():
        return there
    back = {name: steady(*sides[name], heat) for name in reversed(sides)}
    return {name: (there[name] + back[name]) / 2 for name in sides}


def elapsed(call: Call, times: int) -> float:
    """Microseconds of one of `times` calls back to back, behind another one: how long a launch takes does not count."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()
    start.record()
    for _ in range(times):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / times
