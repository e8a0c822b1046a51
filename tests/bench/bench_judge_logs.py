"""Time and peak memory of reading three logs of a million steps: `python tests/bench/bench_judge_logs.py [STEPS]`.

Writes the logs into a temporary folder (about 240 MB a log in pithtrain form, 180 MB in jsonl form) and reads each
form in a fresh process, so that the peak is that of the three runs in memory together.
"""

from __future__ import annotations

import argparse
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
ARMS = ("base0", "base1", "feat0")


def write(folder: Path, steps: int) -> None:
    """The same three runs in both forms."""
    for arm in ARMS:
        draw = random.Random(arm)
        with (folder / f"{arm}.log").open("w") as log, (folder / f"{arm}.jsonl").open("w") as lines:
            for step in range(1, steps + 1):
                left, noise = 1 - step / steps, draw.random()
                seconds, loss, balance, norm = 4.8 + noise / 5, 4 + 8 * left + noise / 50, 1 + noise / 9, 9 + 40 * left
                log.write(
                    f"2026-10-03 {step // 3600 % 24:02d}:{step // 60 % 60:02d}:{step % 60:02d} | INFO | "
                    f"step {step:08d}/{steps:08d} | step-time {seconds:.3f} sec | cross-entropy-loss {loss:.4f} | "
                    f"load-balance-loss {balance:.6f} | learning-rate {1e-5 * left:.6e} | gradient-norm {norm:.4f} | "
                    f"tokens-per-second {524288 / seconds:,.0f} | peak-gpu-memory {61 + noise:.2f} GB\n"
                )
                lines.write(
                    f'{{"step": {step}, "loss": {loss!r}, "load_balance_loss": {balance:.6f}, "grad_norm": {norm!r}, '
                    f'"step_time": {seconds:.3f}, "tokens_per_second": {524288 / seconds:.1f}, '
                    f'"peak_memory_gib": {61 + noise:.2f}}}\n'
                )


def measure(folder: Path, suffix: str, reader: str) -> str:
    sys.path.insert(0, str(ROOT))
    from rlspec.logs import read
    from rlspec.model import Arm

    start = time.perf_counter()
    runs = [read(folder / f"{arm}{suffix}", reader, Arm(name=arm, role="base")) for arm in ARMS]
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    values = sum(len(series.values) for run in runs for series in run.series.values())
    return f"{reader:<10} {len(runs)} logs, {values:,} values: {seconds:.2f} s, peak {peak:.0f} MiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", type=int, nargs="?", default=1_000_000, metavar="STEPS", help="of each log (1000000)")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        folder, suffix, reader = given.measure
        print(measure(Path(folder), suffix, reader))
        return
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), given.steps)
        for suffix, reader in ((".log", "pithtrain"), (".jsonl", "jsonl")):
            subprocess.run([sys.executable, __file__, "--measure", folder, suffix, reader], check=True)


if __name__ == "__main__":
    main()
