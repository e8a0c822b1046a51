"""The figures of the command line: `python tests/bench/bench_cli.py [help lint run judge]`, best on a quiet machine.

Prints a table with what was measured beside what is required, and exits 1 if anything is above it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
LOGS = Path(__file__).with_name("bench_judge_logs.py")
SPECS, LINES, RUNS, STEPS = 100, 60, 10, 1_000_000
TRAINER = "print('\\n'.join(f'step {s}/4 loss={4 / s + 1e-3 * hash(__file__) % 1 * (s > 1)!r}' for s in range(1, 5)))\n"
SPEC = r"""
kind: correctness
question: What does the host add to the arms?
model: char-gpt
mesh: {pp: 1}
trainer:
  name: command
  template: train.py.j2
  command: ["{python}", "{run_file}"]
  reader: {name: regex, pattern: 'step (?P<step>\d+)/(?P<steps>\d+) loss=(?P<loss>\S+)'}
  steps: 4
arms:
  - {name: base0, role: base}
  - {name: base1, role: base, environment: {A: "1"}}
  - {name: feat0, role: feature, environment: {A: "2"}}
judgments: [{check: drift, metric: loss, max_base_runs: 2}]
"""
Row = tuple[str, str, float, float, str]


class Used(NamedTuple):
    """Seconds on the wall clock and of all cores together, GiB resident at most, and what went to stderr."""

    seconds: float
    cpu: float
    peak: float
    said: str


def rlspec(folder: Path, *arguments: object) -> Used:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-m", "rlspec", *map(str, arguments)]
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as told:
        start = time.perf_counter()
        child = subprocess.Popen(command, cwd=folder, env=environment, stdout=told, stderr=said)
        _, status, used = os.wait4(child.pid, 0)
        seconds = time.perf_counter() - start
        child.returncode = os.waitstatus_to_exitcode(status)
        for stream in (said, told):
            stream.seek(0)
        assert child.returncode in (0, 1, 3), told.read()[-2000:] + said.read()[-2000:]
        return Used(seconds, used.ru_utime + used.ru_stime, used.ru_maxrss / 2**20, said.read())


def times(folder: Path, *arguments: object) -> tuple[float, str]:
    """The median of several runs, and the fastest and the processor time as text: the latter tells a busy machine."""
    found = [rlspec(folder, *arguments) for _ in range(RUNS)]
    seconds, cpu = ([getattr(one, name) for one in found] for name in ("seconds", "cpu"))
    return statistics.median(seconds), f"median of {RUNS}, min {min(seconds):.3f}, cpu {statistics.median(cpu):.3f}"


def help_(folder: Path) -> Iterator[Row]:
    seconds, note = times(folder, "--help")
    yield "rlspec --help", "s", seconds, 0.15, note


def lint(folder: Path) -> Iterator[Row]:
    """The shipped specs in block style, with as many environment variables as make 60 lines of each."""
    import yaml

    shipped = [
        path for kind in ("correctness", "performance") for path in sorted((ROOT / "specs" / kind).glob("*.yaml"))
    ]
    for number in range(SPECS):
        data = yaml.safe_load(shipped[number % len(shipped)].read_text())
        count = 0
        while (text := yaml.safe_dump(data, sort_keys=False)).count("\n") < LINES:
            arm = data["arms"][count % len(data["arms"])]
            arm.setdefault("environment", {})[f"VARIABLE_{count}"] = str(count)
            count += 1
        (folder / f"spec-{number}.yaml").write_text(text)
    said = rlspec(folder, "lint", ".").said
    assert said.startswith(f"{SPECS} files, 0 errors"), said
    seconds, note = times(folder, "lint", ".")
    yield f"rlspec lint, {SPECS} specs of {LINES} lines", "s", seconds, 0.6, note


def run(folder: Path) -> Iterator[Row]:
    """Wall clock of the command less the seconds that the arms themselves took."""
    (folder / "train.py.j2").write_text(TRAINER)
    (folder / "spec.yaml").write_text(SPEC)
    overheads = []
    for _ in range(RUNS):
        seconds = rlspec(folder, "run", "spec.yaml").seconds
        (latest,) = folder.glob("workspace/*/*/latest/report.json")
        arms = json.loads(latest.read_text())["arms"]
        assert len(arms) == 3
        overheads.append(seconds - sum(arm["seconds"] for arm in arms))
    note = f"median of {RUNS}, min {min(overheads):.3f}"
    yield "host overhead of rlspec run, 3 arms", "s", statistics.median(overheads), 2.0, note


def judge(folder: Path) -> Iterator[Row]:
    writing = f"from bench_judge_logs import write; from pathlib import Path; write(Path({str(folder)!r}), {STEPS})"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(LOGS.parent), str(ROOT)])}
    subprocess.run([sys.executable, "-c", writing], env=environment, check=True)
    for unused in folder.glob("*.jsonl"):
        unused.unlink()
    logs = sorted(folder.glob("*.log"))
    for log in logs:
        log.read_bytes()  # into the page cache: what is measured is the reading, not the disk
    used = rlspec(folder, "judge", *logs, "--reader", "pithtrain")
    size = sum(log.stat().st_size for log in logs) / 2**20
    what = f"rlspec judge, 3 pithtrain logs of {STEPS:,} steps"
    yield what, "s", used.seconds, 10.0, f"once, {size:.0f} MiB of logs, cpu {used.cpu:.1f}"
    yield "  its peak memory", "GiB", used.peak, 1.0, "resident"


BENCHES: dict[str, Callable[[Path], Iterator[Row]]] = {"help": help_, "lint": lint, "run": run, "judge": judge}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="BENCH", help=f"{', '.join(BENCHES)}; all, if left out")
    names = parser.parse_args(words).names
    if unknown := [name for name in names if name not in BENCHES]:
        parser.error(f"unknown bench {unknown[0]!r}; known: {', '.join(BENCHES)}")
    missed = 0
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, Python {sys.version.split()[0]}")
    print(f"{'':<54} {'measured':>10} {'required':>11}")
    for name in names or BENCHES:
        with tempfile.TemporaryDirectory() as folder:
            for what, unit, value, limit, note in BENCHES[name](Path(folder)):
                ok = value < limit
                missed += not ok
                print(
                    f"{what:<54} {value:>6.3f} {unit:<3} < {limit:>5g} {unit:<3} {'' if ok else 'MISSED '}({note})",
                    flush=True,
                )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
