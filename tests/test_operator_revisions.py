"""Arms of an operator spec may be revisions: what lies beside the spec is then that of the commit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
RIGHT = "import torch.nn.functional as F\n\n\ndef silu(x):\n    return F.silu(x)\n\n\ntable = {'silu': silu}\n"
SPEC = """\
kind: operators
question: Is the branch as right as the tag?
model: tiny-dense
workload: tiny
operators: [silu]
arms:
  - {name: old, implementation: "mine:table", revision: v1}
  - {name: new, implementation: "mine:table", revision: v2}
judgments: [forward_accuracy]
"""


def git(folder, *words):
    identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)


def test_each_arm_runs_the_module_of_its_commit(tmp_path):
    place = tmp_path / "specs" / "kernels"
    place.mkdir(parents=True)
    git(tmp_path, "init", "-q")
    for tag, text in (("v1", RIGHT), ("v2", RIGHT.replace("F.silu(x)", "F.silu(x) * 1.5"))):
        (place / "mine.py").write_text(text)
        (place / "spec.yaml").write_text(SPEC)
        git(tmp_path, "add", "-A")
        git(tmp_path, "commit", "-q", "-m", tag)
        git(tmp_path, "tag", tag)
    done = subprocess.run(
        [sys.executable, "-m", "rlspec", "run", place / "spec.yaml", "-o", "report.json"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    made = json.loads((tmp_path / "report.json").read_text())
    assert {one["subject"]: one["status"] for one in made["verdicts"]} == {
        "old/silu/tiny": "PASS",
        "new/silu/tiny": "FAIL",
    }
