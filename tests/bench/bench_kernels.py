"""Checks and timings of the kernels: `python tests/bench/bench_kernels.py [--only NAME] [--json FILE] [--limit S]`.

Each tests/bench/kernels_NAME.py is a part with two functions, `checks(device)` that yields (name, ok, detail), and
`timings(device)` that yields dicts with kernel, shape, ours_us, baseline, baseline_us and floor_us. A part runs in a
child process of its own under a time limit, so a kernel that hangs or kills its context harms no other part; what it
had said by then is kept. Prints the timings as a table and the checks that fail; exits 1 if there are any, if none ran,
or if a part does not come to its end.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
COLUMNS = ("kernel", "shape", "ours us", "baseline", "baseline us", "ratio", "floor us", "of floor")


def main(words: Sequence[str] | None = None) -> int:
    """Run the parts; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="NAME", help="a part; may be given again")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results there")
    parser.add_argument("--limit", type=float, default=240, metavar="S", help="seconds for one part (240)")
    parser.add_argument("--part", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    if given.part:
        return _say(given.part)
    parts = {path.stem.removeprefix("kernels_"): path for path in sorted(FOLDER.glob("kernels_*.py"))}
    unknown = set(given.only or ()) - set(parts)
    if unknown:
        parser.error(f"no part {', '.join(sorted(unknown))}; there are: {', '.join(parts) or 'none'}")
    results = {name: _run(path, given.limit) for name, path in parts.items() if name in (given.only or parts)}
    if given.json:
        given.json.write_text(json.dumps({"date": str(datetime.date.today()), "parts": results}, indent=1) + "\n")
    return _report(results)


def _say(path: Path) -> int:
    """In the child: one line of JSON for each result, as soon as it is there."""
    import torch

    sys.path.insert(0, str(ROOT))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    part = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(part)
    device = torch.device("cuda")
    for kind, found in _found(part, device):
        print(json.dumps({kind: found}), flush=True)
    return 0


def _found(part: Any, device: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    import torch
    import triton

    versions = {"torch": torch.__version__, "triton": triton.__version__, "device": torch.cuda.get_device_name(device)}
    yield "versions", versions
    for name, ok, detail in part.checks(device):
        yield "check", {"name": name, "ok": bool(ok), "detail": str(detail)}
    for row in part.timings(device):
        yield "timing", row


def _run(path: Path, limit: float) -> dict[str, Any]:
    """What the part found, and `error`: None, or why it did not come to its end."""
    command = [sys.executable, __file__, "--part", str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, cwd=ROOT)
        out, failure = done.stdout, f"exit code {done.returncode}\n{done.stderr[-3000:]}" if done.returncode else None
    except subprocess.TimeoutExpired as late:
        # What a child has said before its end is bytes here even where text was asked for.
        said = late.stdout or b""
        out = said.decode(errors="replace") if isinstance(said, bytes) else said
        failure = f"not done after {limit:g} s"
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("{") and line.endswith("}")]
    found = {kind: [line[kind] for line in lines if kind in line] for kind in ("versions", "check", "timing")}
    return {
        "versions": found["versions"][0] if found["versions"] else {},
        "checks": found["check"],
        "timings": found["timing"],
        "error": failure,
    }


def _report(results: dict[str, dict[str, Any]]) -> int:
    rows = [_row(row) for part in results.values() for row in part["timings"]]
    for versions in {json.dumps(part["versions"]) for part in results.values()}:
        print(versions)
    if rows:
        print(_table(COLUMNS, rows))
    bad = [check for part in results.values() for check in part["checks"] if not check["ok"]]
    count = sum(len(part["checks"]) for part in results.values())
    print(f"\n{count - len(bad)} of {count} checks hold")
    for check in bad:
        print(f"FAILED {check['name']}: {check['detail']}")
    broken = {name: part["error"] for name, part in results.items() if part["error"]}
    for name, failure in broken.items():
        print(f"part {name}: {failure}")
    return 1 if bad or broken or not count else 0


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    ours, baseline, floor = row["ours_us"], row.get("baseline_us"), row.get("floor_us")
    return (
        row["kernel"],
        row["shape"],
        f"{ours:.1f}",
        row.get("baseline") or "",
        f"{baseline:.1f}" if baseline else "",
        f"{ours / baseline:.2f}" if baseline else "",
        f"{floor:.1f}" if floor else "",
        f"{ours / floor:.2f}" if floor else "",
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
