from __future__ import annotations

import json

import pytest
import yaml

from tests.tiny import rlspec, save, training


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def change(path, edit):
    data = yaml.safe_load(path.read_text())
    edit(data)
    save(path, data)


def test_an_arm_whose_code_has_changed_runs_again(here):
    (here / "mine.py").write_text("OFFSET = 0.0\n")
    path = training(here)
    template = here / "train.py.j2"
    template.write_text(f"import sys\nsys.path.insert(0, {str(here)!r})\nimport mine\n" + template.read_text())
    change(path, lambda data: data["trainer"].update(command=["{python}", "{run_file}"]))
    first = rlspec("run", path)
    assert first.code in (0, 1, 3), first
    run = next((here / "workspace").glob("*/*/2*"))
    again = rlspec("run", path, "--from", run.name)
    assert "runs again" not in again.err, again.err
    (here / "mine.py").write_text("OFFSET = 1.0\n")
    again = rlspec("run", path, "--from", run.name)
    assert again.err.count("runs again, since the code that it ran has changed") == 3, again.err


def test_another_reader_is_another_arm(here):
    path = training(here)
    rlspec("run", path)
    run = next((here / "workspace").glob("*/*/2*"))
    assert json.loads((run / "plan.json").read_text())["arms"][0]["reader"][0] == "regex"
    change(path, lambda data: data["trainer"]["reader"].update(pattern=data["trainer"]["reader"]["pattern"] + " ?"))
    again = rlspec("run", path, "--from", run.name)
    assert again.err.count("runs again, since the reader differs") == 3, again.err
