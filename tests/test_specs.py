"""What ships in specs/: entries obey their schemas, lint has no complaint, controls come out as told."""

from __future__ import annotations

import datetime
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlspec import catalog, contract, linting
from rlspec.checks import common

ROOT = Path(__file__).parents[1]
SPECS = ROOT / "specs"
EXAMPLE = SPECS / "examples" / "char-gpt"
MIXTURES = ("deepseek-v2-lite", "gpt-oss-120b", "gpt-oss-20b", "qwen3-30b-a3b", "qwen3.5-35b-a3b")


def rlspec(*words, cwd):
    command = [sys.executable, "-m", "rlspec", *map(str, words)]
    return subprocess.run(command, cwd=cwd, env={"PYTHONPATH": str(ROOT), "PATH": ""}, capture_output=True, text=True)


def test_lint_has_nothing_to_say():
    assert linting.lint([SPECS])[1] == []


@pytest.mark.parametrize("folder", ["models", "contracts"])
def test_entries_are_named_like_their_files(folder):
    names = {path.stem: catalog.checked(folder, path) for path in (SPECS / folder).glob("*.yaml")}
    assert names
    for stem, (data, problems) in names.items():
        assert data["name"] == stem and problems == []


def test_rows_tell_where_they_are_from():
    for name in catalog.entries("contracts", SPECS):
        for row in contract.load(name, SPECS).rows:
            assert len(row.source) > 5 and len(row.reason.split()) > 5, row.id
            assert datetime.date.fromisoformat(row.date) <= datetime.date.today() + datetime.timedelta(days=1), row.id


def test_limits_that_cannot_both_hold():
    for name in catalog.entries("contracts", SPECS):
        for row in contract.load(name, SPECS).rows:
            if "pass_below" in row.limits:
                assert 1 < row.limits["pass_below"] < row.limits["fail_above"], row.id
            if "low" in row.limits:
                assert row.limits["low"] < 1 < row.limits["high"], row.id


@pytest.mark.parametrize("kind", ["correctness", "performance"])
def test_a_spec_for_every_mixture_of_experts(kind):
    assert {path.stem for path in (SPECS / kind).glob("*.yaml")} >= set(MIXTURES)
    for name in MIXTURES:
        assert catalog.model(name, SPECS)["experts"]["count"] % 8 == 0


def test_every_gated_judgment_of_parity_has_a_control():
    text = "".join(path.read_text() for path in (SPECS / "controls" / "parity").glob("*.yaml"))
    for row in contract.load("ws1", SPECS).rows:
        if row.status == "applicable" and row.judgment in common.STANDARD["parity"]:
            assert f"{row.judgment}: FAIL" in text, row.judgment


@pytest.mark.parametrize("path", sorted((SPECS / "controls" / "parity").glob("*.yaml")), ids=lambda path: path.stem)
def test_parity_controls_come_out_as_told(path, tmp_path):
    done = rlspec("run", path, cwd=tmp_path)
    assert done.returncode == 0 and "as expected" in done.stdout, done.stdout + done.stderr


def test_the_parity_example_passes(tmp_path):
    done = rlspec("run", SPECS / "parity" / "example.yaml", cwd=tmp_path)
    assert done.returncode == 0 and "FAIL" not in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["harmless", "harmful"])
def test_patches_of_the_example_apply(name, tmp_path):
    shutil.copy(EXAMPLE / "train.py", tmp_path)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "apply", EXAMPLE / f"{name}.patch"], cwd=tmp_path, check=True)
    changed = (tmp_path / "train.py").read_text()
    assert changed != (EXAMPLE / "train.py").read_text()
    compile(changed, "train.py", "exec")


def test_the_example_prints_what_its_specs_read(tmp_path):
    pytest.importorskip("torch")
    command = [sys.executable, "train.py", "--steps", "2"]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    printed = subprocess.run(command, cwd=EXAMPLE, env=one_thread, capture_output=True, text=True, check=True).stdout
    lines = [line for line in printed.splitlines() if line.startswith("step ")]
    assert len(lines) == 2
    for name in ("loss", "grad_norm"):
        values = [re.search(rf"\b{name}=(\S+)", line)[1] for line in lines]
        assert all(repr(float(value)) == value for value in values) and values[0] != values[1]
    for spec in (EXAMPLE / "attention.yaml", EXAMPLE / "branch.yaml", EXAMPLE / "performance.yaml"):
        pattern = linting.lint([spec])[0][0].data["trainer"]["reader"]["pattern"]
        assert all(re.search(pattern, line) for line in lines), spec.name
