"""The embedded trainer under the host: what it recorded before is kept until a new try is whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SPEC = """
kind: correctness
question: q
model: tiny-dense
mesh: {}
sequence_length: 16
dtype: fp32
trainer: {name: embedded, settings: {global_batch_size: 1, max_steps: 2}}
arms:
  - {name: base0, role: base}
  - {name: base1, role: base, perturb: {weights: 1ulp}}
  - {name: feat0, role: feature, implementation: {attention: reference}}
"""


def rlspec(folder, *arguments, cache=None):
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "XDG_CACHE_HOME": cache or str(folder / "cache")}
    command = [sys.executable, "-m", "rlspec", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_a_second_try_that_fails_leaves_the_first_record(tmp_path):
    (tmp_path / "spec.yaml").write_text(SPEC)
    done = rlspec(tmp_path, "run", "spec.yaml")
    assert done.returncode in (0, 1, 3), done.stdout + done.stderr
    run = next((tmp_path / "workspace").glob("*/*/2*"))
    records = next(run.glob("*feat0.records.jsonl"))
    before = records.read_bytes()
    planned = json.loads((run / "plan.json").read_text())
    assert planned["arms"][2]["implementation"] == {"attention": "reference"}
    assert json.loads(before.splitlines()[0])["reader"] == "embedded" and b'"data"' in before
    done = rlspec(tmp_path, "run", "spec.yaml", "--resume", "--arm", "feat0", cache="/dev/null")
    assert done.returncode == 4 and "feat0" in done.stdout, done.stdout + done.stderr
    assert records.read_bytes() == before
    assert rlspec(tmp_path, "judge", str(run)).returncode in (0, 1, 3)
