"""Checks and timings of the kernels: `python tests/bench/bench_kernels.py [--only PART] [--json FILE] [--budget S]`.

Each tests/bench/kernels_PART.py has `checks(device)`, which yields (name, ok, detail), and `timings(device)`, which
yields dicts with kernel, shape, ours_us, baseline, baseline_us, floor_us and, unless the part is of one family,
backend. Where a part has KINDS, `checks` goes over them, so that some children can share them out.

First, beside each other: nvcc builds csrc/, the checks run, and the timings are rehearsed (clock.py), which compiles
what they need. Then, with nothing else on the GPU, one part after the other is timed, in the child that rehearsed it.
A kernel that hangs or kills its context harms no other part. What the budget does not let begin or end is listed as not
run. The results are written after every row, so that a call that is killed keeps what was done; `summary.py` makes a
table of them. Exits 1 if a check fails, a child fails, or something was not run, and 2 without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
sys.path.insert(0, str(ROOT))

from tests.bench import gpu  # noqa: E402


class Part(NamedTuple):
    cuts: int = 1  # children that share its checks
    timed: bool = True  # or by another part, beside the same readings of the baseline


# In the order of their timings: what the memory bounds comes before what heats the chip up to its limit of power.
PARTS: Mapping[str, Part] = {
    "invariant_mode": Part(cuts=2),
    "rows": Part(cuts=2),
    "cuda_rows": Part(cuts=7),
    "moe": Part(cuts=4),
    "attention": Part(cuts=13),
    "gemm": Part(cuts=3),
    "liger": Part(),
    "cuda_attention": Part(cuts=7, timed=False),
    "cuda_gemm": Part(timed=False),
}
LONGEST = ("cuda_rows checks 0", "cuda_rows checks 1", "attention checks", "invariant_mode", "gemm rehearsal")
BEFOREHAND = 0.5  # of the budget, at most, for builds, checks and rehearsals
ONCE = "driver_version,clocks.max.sm,clocks.mem,power.limit"
QUIETLY: Mapping[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
OFTEN = "clocks.sm,power.draw,temperature.gpu"


def main(words: Sequence[str] | None = None) -> int:
    """Run the parts; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=PARTS, metavar="PART", help="a part; may be given again")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results there")
    parser.add_argument("--budget", type=float, default=480, metavar="S", help="seconds for the whole (480)")
    parser.add_argument("--commit", help="what ran, where git cannot say it")
    parser.add_argument("--children", type=int, default=24, metavar="N", help="checks and rehearsals at a time (24)")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    if given.child:
        return _child(*given.child)
    gpu.needed("kernels are checked and timed on a CUDA device")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    chosen = {name: part for name, part in PARTS.items() if name in (given.only or PARTS)}
    book = Book(given.json, given.commit)
    bench = Bench(book, time.monotonic() + given.budget)
    try:
        bench.beforehand(chosen, time.monotonic() + BEFOREHAND * given.budget, given.children)
        bench.timings([name for name, part in chosen.items() if part.timed])
    finally:
        bench.end()
        book.write()
    return book.report()


# ---- the children ----


def _child(task: str, name: str = "", first: str = "0", step: str = "1") -> int:
    """One line of JSON for each thing found, as soon as it is there."""
    found = {"build": _build, "checks": _checks, "timings": _timings}[task](name, int(first), int(step))
    for kind, one in found:
        print(json.dumps({kind: one}), flush=True)
    return 0


def _build(*_: Any) -> Iterator[tuple[str, Any]]:
    """All of csrc/, side by side."""
    from concurrent.futures import ThreadPoolExecutor

    from rlspec import nvcc

    def build(name: str) -> tuple[str, bool, str]:
        try:
            nvcc.build(name)
        except nvcc.CompileError as error:
            return name, False, str(error)[-3000:]
        return name, True, ""

    with ThreadPoolExecutor(16) as pool:
        for name, ok, detail in pool.map(build, nvcc.names()):
            yield "check", {"name": f"csrc/{name}.cu builds", "ok": ok, "detail": detail}


def _part(name: str) -> tuple[Any, Any]:
    import torch

    return importlib.import_module(f"tests.bench.kernels_{name}"), torch.device("cuda")


def _checks(name: str, first: int, step: int) -> Iterator[tuple[str, Any]]:
    part, device = _part(name)
    if kinds := getattr(part, "KINDS", None):
        part.KINDS = kinds[first::step]
    for title, ok, detail in part.checks(device):
        yield "check", {"name": title, "ok": bool(ok), "detail": str(detail)}


def _timings(name: str, *_: Any) -> Iterator[tuple[str, Any]]:
    import torch
    import triton

    from tests.bench import clock

    part, device = _part(name)
    family = "cuda" if name.startswith("cuda_") else "triton"
    with clock.rehearsal():
        rows = [{"backend": family, **row} for row in part.timings(device)]
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    versions = {"torch": torch.__version__, "triton": triton.__version__, "device": torch.cuda.get_device_name(device)}
    yield "ready", {"rows": [_key(row) for row in rows], "versions": versions}
    if sys.stdin.readline():  # nothing comes from a parent that is gone
        for row in part.timings(device):
            yield "timing", {"backend": family, **row}


def _key(row: Mapping[str, Any]) -> str:
    """A row's name, whatever stands beside it."""
    return f"{row['backend']} {row['kernel']}, {row['shape']}"


# ---- the parent ----


class Child:
    """A process whose lines come into an inbox, as (child, line), at its end (child, None)."""

    def __init__(self, title: str, words: Sequence[str], inbox: queue.Queue[tuple[Child, str | None]]) -> None:
        self.title, self.part = title, words[1] if len(words) > 1 else ""
        self.began, self.killed, self.rows = time.monotonic(), False, list[str]()
        self._said = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        command = [sys.executable, __file__, "--child", *words]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._said}
        self.process = subprocess.Popen(command, cwd=ROOT, text=True, errors="replace", **pipes)  # type: ignore[call-overload]
        threading.Thread(target=self._read, args=(inbox,), daemon=True).start()

    def _read(self, inbox: queue.Queue[tuple[Child, str | None]]) -> None:
        for line in self.process.stdout:
            inbox.put((self, line))
        self.process.wait()
        inbox.put((self, None))

    def go(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write("go\n")
            self.process.stdin.flush()

    def failure(self) -> str | None:
        """Why it ended before its time, with its last words."""
        if self.killed or not self.process.returncode:
            return None
        self._said.seek(0)
        return f"exit code {self.process.returncode}\n{self._said.read()[-3000:]}"

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def kill(self) -> None:
        if self.process.poll() is None:
            self.killed = True
            self.process.kill()


class Bench:
    """The children, one inbox, and what comes of it into the book."""

    def __init__(self, book: Book, end: float) -> None:
        self.book, self._end, self._began = book, end, time.monotonic()
        self._inbox: queue.Queue[tuple[Child, str | None]] = queue.Queue()
        self._alive: set[Child] = set()
        self._ready: dict[str, Child] = {}

    def beforehand(self, parts: Mapping[str, Part], deadline: float, width: int) -> None:
        """Builds, checks and rehearsals, `width` at a time, the longest first."""
        waiting = [("build", ["build"])] if any(name != "liger" for name in parts) else []
        waiting += [(f"{name} rehearsal", ["timings", name]) for name, part in parts.items() if part.timed]
        cuts = [(name, cut, part.cuts) for name, part in parts.items() for cut in range(part.cuts)]
        waiting += [(f"{name} checks {cut}", ["checks", name, str(cut), str(many)]) for name, cut, many in cuts]
        waiting.sort(key=lambda one: not one[0].startswith(("build", *LONGEST)))
        active: set[Child] = set()
        while waiting or active:
            while waiting and len(active) < width:
                active.add(self._start(*waiting.pop(0)))
            child, message = self._hear(deadline)
            if child is None:
                break
            if message is None or "ready" in message:
                active.discard(child)
                self.book.seconds[child.title] = round(child.seconds, 1)
                print(f"{child.title}: {child.seconds:.1f} s", flush=True)
                self.book.write()
        for child in active:
            self.book.not_run.append(f"{child.title}: not done after {child.seconds:.0f} s")
            child.kill()
        self.book.not_run += [f"{title}: did not begin" for title, _ in waiting]
        self.book.seconds["beforehand"] = round(time.monotonic() - self._began, 1)

    def timings(self, names: Sequence[str]) -> None:
        self.book.about |= _asked_once()
        meter = Meter()
        try:
            for name in names:
                if child := self._ready.get(name):
                    self._time(name, child, meter)
                else:
                    self.book.not_run.append(f"{name} timings: not rehearsed")
        finally:
            meter.end()

    def _time(self, name: str, child: Child, meter: Meter) -> None:
        began, got = time.monotonic(), len(self.book.timings)
        if began < self._end:
            child.go()
        while self._hear(self._end, child)[1] is not None:
            pass
        child.kill()
        done = {_key(row) for row in self.book.timings[got:]}
        self.book.not_run += [row for row in dict.fromkeys(child.rows) if row not in done]
        self.book.seconds[name] = round(time.monotonic() - began, 1)
        self.book.clocks[name] = meter.since_last()
        self.book.write()

    def end(self) -> None:
        for child in self._alive:
            child.kill()
        self.book.seconds["whole"] = round(time.monotonic() - self._began, 1)

    def _start(self, title: str, words: Sequence[str]) -> Child:
        child = Child(title, words, self._inbox)
        self._alive.add(child)
        return child

    def _hear(self, deadline: float, of: Child | None = None) -> tuple[Child | None, dict[str, Any] | None]:
        """The next message, or that of one child; (child, None) at its end, (None, None) when time is up."""
        while True:
            try:
                child, line = self._inbox.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return None, None
            message = None if line is None else self._take(child, line)
            if line is None:
                self._alive.discard(child)
                self._ready = {name: one for name, one in self._ready.items() if one is not child}
                if failure := child.failure():
                    self.book.failed(child.title, failure)
            if (line is None or message) and of in (None, child):
                return child, message

    def _take(self, child: Child, line: str) -> dict[str, Any]:
        if not (line.startswith('{"') and line.endswith("}\n")):
            return {}
        message: dict[str, Any] = json.loads(line)
        if "check" in message:
            self.book.check(child.part or "build", **message["check"])
        if "timing" in message:
            self.book.timing(child.part, message["timing"])
        if "ready" in message:
            child.rows = message["ready"]["rows"]
            self.book.about |= message["ready"]["versions"]
            self._ready[child.part] = child
        return message


class Meter:
    """What nvidia-smi says of the GPU's clock, power and heat, each second; nothing if it does not answer."""

    def __init__(self) -> None:
        self._seen: queue.SimpleQueue[str] = queue.SimpleQueue()
        try:
            self._process = subprocess.Popen([*_smi(OFTEN), "-lms", "1000"], text=True, **QUIETLY)
        except OSError:
            self._process = None
            return
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._process.stdout:
            self._seen.put(line)

    def since_last(self) -> dict[str, float]:
        lines = [self._seen.get() for _ in range(self._seen.qsize())]
        rows = [[float(one) for one in line.split(",")] for line in lines if re.fullmatch(r"[\d., ]+\n", line)]
        if not rows:
            return {}
        clocks, power, heat = zip(*rows, strict=True)
        return {"lowest_mhz": min(clocks), "highest_mhz": max(clocks), "highest_w": max(power), "highest_c": max(heat)}

    def end(self) -> None:
        if self._process:
            self._process.kill()


class Book:
    """The results: said as they come, written to a file, and judged at the end."""

    def __init__(self, path: Path | None, commit: str | None) -> None:
        self.path = path
        self.about: dict[str, Any] = {
            "date": str(datetime.date.today()),
            "commit": commit or _commit(),
            "nvcc": _nvcc(),
        }
        self.seconds: dict[str, float] = {}
        self.clocks: dict[str, dict[str, float]] = {}
        self.held: dict[str, int] = {}
        self.bad: list[dict[str, str]] = []
        self.errors: dict[str, str] = {}
        self.not_run: list[str] = []
        self.timings: list[dict[str, Any]] = []

    def check(self, part: str, name: str, ok: bool, detail: str) -> None:
        self.held[part] = self.held.get(part, 0) + ok
        if not ok:
            self.bad.append({"part": part, "name": name, "detail": detail})
            print(f"FAILED {name}: {detail}", flush=True)

    def timing(self, part: str, row: Mapping[str, Any]) -> None:
        rounded = {key: round(one, 2) if isinstance(one, float) else one for key, one in row.items()}
        self.timings.append({"part": part, **rounded})
        self.write()
        ratios = [f"{row['ours_us'] / row[key]:.2f}" for key in ("baseline_us", "floor_us") if row.get(key)]
        print(f"{_key(row)}: {row['ours_us']:.1f} us, {row.get('baseline') or 'floor'} {' '.join(ratios)}", flush=True)

    def failed(self, title: str, failure: str) -> None:
        self.errors[title] = failure
        print(f"FAILED {title}: {failure}", flush=True)

    def write(self) -> None:
        """One row of timings a line."""
        if not self.path:
            return
        whole = {
            **self.about,
            "seconds": self.seconds,
            "clocks": self.clocks,
            "checks": {"held": self.held, "failed": self.bad},
            "errors": self.errors,
            "not_run": self.not_run,
        }
        rows = ",\n".join("  " + json.dumps(row) for row in self.timings)
        text = json.dumps(whole, indent=1).removesuffix("\n}") + ',\n "timings": [\n' + rows + "\n ]\n}\n"
        draft = self.path.with_name(self.path.name + ".draft")
        draft.write_text(text, encoding="utf-8")
        draft.replace(self.path)

    def report(self) -> int:
        """Print the summary and all that is wrong; the exit code."""
        from tests.bench import summary

        print(json.dumps(self.about), json.dumps(self.seconds), sep="\n")
        print(f"\n{summary.table(self.timings)}\n")
        held = sum(self.held.values())
        print(f"{held} of {held + len(self.bad)} checks hold; {len(self.timings)} timings")
        for one in self.bad:
            print(f"FAILED {one['name']}: {one['detail']}")
        for title, failure in self.errors.items():
            print(f"FAILED {title}: {failure.splitlines()[0]} {failure.splitlines()[-1]}")
        for one in self.not_run:
            print(f"not run: {one}")
        return 1 if self.bad or self.errors or self.not_run or not (held or self.timings) else 0


def _smi(query: str) -> list[str]:
    one = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
    return ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", *(["-i", one] if one else [])]


def _asked_once() -> dict[str, str]:
    try:
        done = subprocess.run(_smi(ONCE), text=True, timeout=10, **QUIETLY)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return dict(zip(ONCE.split(","), (one.strip() for one in done.stdout.split(",")), strict=False))


def _commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + (" and changes" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _nvcc() -> str:
    from rlspec import nvcc

    compiler = nvcc.find()
    release = re.search(r"release ([\d.]+)", nvcc.version(compiler)) if compiler else None
    return release[1] if release else "none"


if __name__ == "__main__":
    sys.exit(main())
