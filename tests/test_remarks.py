"""What stands under a PASS that should be read with care."""

from __future__ import annotations

import json

import pytest
import yaml

from tests.tiny import rlspec, save, training


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


def log(path, losses):
    path.write_text("".join(json.dumps({"step": n, "loss": loss}) + "\n" for n, loss in enumerate(losses, 1)))
    return path


def curve(steps, offset=0.0):
    return [3.0 - 0.01 * n + offset * (-1) ** n for n in range(steps)]


def judged(here, base0, base1, feat0):
    logs = [log(here / f"{name}.jsonl", losses) for name, losses in
            (("base0", base0), ("base1", base1), ("feat0", feat0))]  # fmt: skip
    return rlspec("judge", *logs, "--reader", "jsonl", "--metric", "loss")


def test_few_steps(here):
    assert "only 3 steps are judged" in judged(here, curve(4), curve(4, 1e-3), curve(4, 2e-3)).out
    assert "steps are judged:" not in judged(here, curve(20), curve(20, 1e-3), curve(20, 2e-3)).out


def test_a_floor_that_hides_almost_anything(here):
    out = judged(here, curve(20), [loss + 10 for loss in curve(20)], curve(20, 0.1)).out
    assert "the floor is so wide" in out and "PASS" in out


def test_a_copy_of_a_base_log(here):
    done = judged(here, curve(20), curve(20, 1e-3), curve(20))
    assert "is it a run of its own?" in done.out and "same to the byte" in done.out
    (here / "feat1.jsonl").hardlink_to(here / "base0.jsonl")
    again = rlspec("judge", *sorted(here.glob("*.jsonl")), "--reader", "jsonl", "--metric", "loss")
    assert again.code == 2 and "stands twice" in again.err


def test_a_pattern_names_its_metrics(here):
    for name, offset in (("base0", 0), ("base1", 1e-3), ("feat0", 2e-3)):
        lines = [f"it {n} nll={loss:.6f}" for n, loss in enumerate(curve(12, offset), 1)]
        (here / f"{name}.log").write_text("\n".join(lines) + "\n")
    done = rlspec(
        "judge", *sorted(here.glob("*.log")), "--reader", "regex", "--pattern", r"it (?P<step>\d+) nll=(?P<nll>\S+)"
    )
    assert done.code == 0 and "drift nll" in done.out


def test_a_thing_compared_with_itself_is_said(here):
    base0 = {"name": "base0", "role": "base", "environment": {"X": "1"}}
    arms = [base0, {"name": "base1", "role": "base"}, {"name": "feat0", "role": "feature"}]
    done = rlspec("run", training(here / "a", arms=arms))
    assert "feat0 runs what base1 runs: this compares the code with itself" in done.out


def test_settings_that_differ_undeclared_are_said(here, monkeypatch):
    path = training(here / "a")
    change = {"trainer": {**yaml.safe_load(path.read_text())["trainer"], "command": ["{python}", "{run_file}"]}}
    path = training(here / "a", **change)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    rlspec("run", path)
    run = next((here / "workspace").glob("*/*/2*"))
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    done = rlspec("run", path, "--from", run.name, "--arm", "feat0")
    assert "OMP_NUM_THREADS differed: base0 1, base1 1, feat0 3" in done.out


def test_a_variable_that_names_a_file_of_the_arm_is_no_difference(here):
    path = training(here / "a")
    own = 'os.environ["TORCH_FR_DUMP_TEMP_FILE"] = os.environ["RLSPEC_RECORDS"]\nos.environ["NCCL_X"] = str(number)\n'
    own += 'os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"/tmp/inductor-{number}"\n'
    template = here / "a" / "train.py.j2"
    template.write_text(template.read_text() + own)
    change = {"trainer": {**yaml.safe_load(path.read_text())["trainer"], "command": ["{python}", "{run_file}"]}}
    save(path, {**yaml.safe_load(path.read_text()), **change})
    done = rlspec("run", path)
    assert "NCCL_X differed: base0 0, base1 1, feat0 2" in done.out, done.out + done.err
    assert "TORCH_FR_DUMP_TEMP_FILE" not in done.out and "CACHE_DIR" not in done.out
