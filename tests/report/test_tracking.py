"""A finished run in W&B's offline files, read back without a server."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from rlspec import pipeline, runs
from rlspec.report import tracking
from tests.processes import LONG

pb = pytest.importorskip("wandb.proto.wandb_internal_pb2")

TRAIN = """
import math
for step in range(1, 9):
    loss = "nan" if step == 8 and "feat0" in __file__ else repr(math.exp(-step) + ({"base0": 0, "base1": 1}).get(
        __file__[-8:-3], 2) * 1e-6 * step)
    print(f"step {step} loss={loss}")
"""
SPEC = """
kind: correctness
question: q
model: char-gpt
mesh: {}
sequence_length: 64
trainer:
  name: command
  template: run.py.j2
  command: ["{python}", "{run_file}"]
  reader: {name: regex, pattern: 'step (?P<step>\\d+) loss=(?P<loss>\\S+)'}
arms:
  - {name: base0, role: base}
  - {name: base1, role: base, environment: {A: "1"}}
  - {name: feat0, role: feature, environment: {A: "2"}}
judgments: [{check: drift, metric: loss}]
wandb: {project: numerics, mode: MODE}
"""


def records(path):
    """The records of an offline file: LevelDB's log framing around protocol buffers."""
    raw = path.read_bytes()
    assert raw[:4] == b":W&B"
    at, kept = 7, b""
    while at + 7 <= len(raw):
        left = 32768 - at % 32768
        checksum, length, kind = struct.unpack("<IHB", raw[at : at + 7])
        if left < 7 or kind == 0:
            at += left
            continue
        body = raw[at + 7 : at + 7 + length]
        assert zlib.crc32(body, zlib.crc32(bytes([kind]))) == checksum
        at += 7 + length
        kept = body if kind in (1, 2) else kept + body
        if kind in (1, 4):
            record = pb.Record()
            record.ParseFromString(kept)
            yield record


def read(path):
    made = {"history": [], "summary": {}}
    for record in records(path):
        if record.WhichOneof("record_type") == "run":
            run = record.run
            made |= {"group": run.run_group, "name": run.display_name, "project": run.project, "job": run.job_type}
        elif record.WhichOneof("record_type") == "history":
            made["history"].append(
                {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
            )
        elif record.WhichOneof("record_type") == "summary":
            found = {u.key or "/".join(u.nested_key): json.loads(u.value_json) for u in record.summary.update}
            made["summary"].update(found)
    return made


def run(tmp_path, mode):
    (tmp_path / "run.py.j2").write_text(TRAIN)
    (tmp_path / "spec.yaml").write_text(SPEC.replace("MODE", mode))
    done = subprocess.run(
        [sys.executable, "-m", "rlspec", "run", "spec.yaml"], cwd=tmp_path, capture_output=True, text=True,
        env={"PYTHONPATH": str(Path(pipeline.__file__).parents[1]), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        stdin=subprocess.DEVNULL, timeout=LONG,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert "warning" not in done.stderr
    return next((tmp_path / "workspace").glob("*/*/2*"))


def test_arms_and_verdicts_are_read_back(tmp_path):
    folder = run(tmp_path, "offline")
    logged = {made["job"]: made for made in map(read, folder.glob("wandb/offline-run-*/*.wandb"))}
    assert set(logged) == {"base0", "base1", "feat0", "verdict"}
    for name, made in logged.items():
        assert made["project"] == "numerics" and made["group"] == "correctness/char-gpt"
        assert made["name"] == f"pp1-dp1-cp1-ep1-seq64-bf16-{name}"
    losses = [row["train/loss"] for row in logged["base0"]["history"]]
    assert len(losses) == 8 and losses[0] == pytest.approx(0.36787944117144233, abs=0)
    verdict = logged["verdict"]["summary"]
    assert verdict["outcome"] == "FAIL" and verdict["exit_code"] == 1 and verdict["drift/loss/status"] == "FAIL"


def test_disabled_writes_nothing(tmp_path):
    folder = run(tmp_path, "disabled")
    assert not list(folder.glob("wandb*"))


def test_what_wandb_does_wrong_changes_no_verdict(tmp_path, monkeypatch):
    folder = run(tmp_path, "disabled")
    planned = json.loads((folder / "plan.json").read_text())
    planned["spec"]["data"]["wandb"]["mode"] = "offline"
    (folder / "plan.json").write_text(json.dumps(planned))
    made = runs.load(folder / "report.json")
    monkeypatch.setattr(tracking, "TIME_LIMIT_S", 0.01)
    assert "did not end within" in tracking.send(made)
    monkeypatch.setattr(tracking, "TIME_LIMIT_S", 60.0)
    (folder / "report.json").write_text("{")
    assert "wandb ended with 1" in tracking.send(made)
