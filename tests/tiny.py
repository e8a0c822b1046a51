"""A trainer of a few lines, specs for it, and the command line called in this process."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import yaml

from rlspec.cli import main

# Each start draws its own rounding from a counter beside the spec, so two runs of one arm differ as on a real machine.
# Hardly an import, since the tests start it some two hundred times.
TRAINER = r"""
import os, sys

place = {{ spec_dir | py }}
counter = os.path.join(place, "counter")
number = os.path.getsize(counter) if os.path.exists(counter) else 0
open(counter, "w").write("x" * (number + 1))
offset = float(os.environ.get("OFFSET", "0"))
print("this is", os.path.basename(__file__), flush=True)
for step in range(1, {{ steps | py }} + 1):
    if str(step) == os.environ.get("CRASH_AT") and not os.path.exists(os.path.join(place, "fixed")):
        sys.exit(f"a bad day at step {step}")
    if str(step) == os.environ.get("SLEEP_AT"):
        __import__("time").sleep(600)
    mixed = 1000003 * {{ settings.seed | py }} + 10007 * number + 101 * step + 12345
    for factor in (2654435761, 2246822519, 3266489917):
        mixed = (mixed ^ mixed >> 15) * factor % 2**32
    noise = mixed / 2**32
    loss = 4 / step + (step > 1) * (2e-3 * noise - 1e-3 + offset)
    print(f"step {step}/{{ steps | py }} loss={loss!r} step_time={0.1 + noise / 100!r}", flush=True)
"""
PATTERN = r"step (?P<step>\d+)/(?P<steps>\d+) loss=(?P<loss>\S+) step_time=(?P<step_time>\S+)"


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


def rlspec(*arguments, answer=""):
    """`rlspec ARGUMENTS…`; anything but an exit is a traceback that a user would see, and is raised."""
    out, err = io.StringIO(), io.StringIO()
    typed = mock.patch("sys.stdin", io.StringIO(answer))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), typed:
        try:
            main([str(argument) for argument in arguments], prog_name="rlspec")
        except SystemExit as end:
            return Ended(end.code or 0, out.getvalue(), err.getvalue())
    return Ended(0, out.getvalue(), err.getvalue())


def training(folder, **changes):
    """A correctness spec for the trainer; `changes` replace keys of the top level."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py.j2").write_text(TRAINER)
    data = {
        "kind": "correctness",
        "question": "Does it train alike?",
        "model": "char-gpt",
        "mesh": {"pp": 1},
        "sequence_length": 128,
        "trainer": {
            "name": "command",
            "template": "train.py.j2",
            "command": ["{python}", "-S", "{run_file}"],
            "reader": {"name": "regex", "pattern": PATTERN},
            "steps": 6,
            "settings": {"seed": 3},
        },
        "arms": [
            {"name": "base0", "role": "base"},
            {"name": "base1", "role": "base"},
            {"name": "feat0", "role": "feature", "environment": {"OFFSET": "0"}},
        ],
        "judgments": [{"check": "drift", "metric": "loss"}],
        **changes,
    }
    return save(folder / "spec.yaml", data)


def save(path, data):
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    return path


def tokens(path, shift=0.0, samples=2):
    """A file of log-probs; d against another one is the difference of the shifts."""
    lines = [
        {"sample": f"s{sample}", "position": position, "token": 10 + position, "logprob": -1.0 - 0.1 * position - shift}
        for sample in range(samples)
        for position in range(4)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def parity(folder, rollout=0.0, train=0.001, **changes):
    """A parity spec of two files."""
    folder.mkdir(exist_ok=True)
    tokens(folder / "rollout.jsonl", rollout)
    tokens(folder / "train.jsonl", train)
    arms = [
        {"name": "rollout", "role": "rollout", "records": "rollout.jsonl"},
        {"name": "train", "role": "train", "records": "train.jsonl"},
    ]
    return save(folder / "parity.yaml", {"kind": "parity", "question": "Alike?", "arms": arms, **changes})


def run_folder():
    """The folder of the newest run below the current folder, as the link says."""
    (latest,) = Path.cwd().glob("workspace/validate-*/*/latest")
    return latest.parent / latest.readlink()


def report():
    return json.loads((run_folder() / "report.json").read_text())


def statuses(made):
    return {arm["name"]: arm["status"] for arm in made["arms"]}


def starts(folder):
    """How often the trainer was started."""
    counter = folder / "counter"
    return counter.stat().st_size if counter.exists() else 0
