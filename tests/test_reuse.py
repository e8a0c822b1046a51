from __future__ import annotations

import json
import os
from types import SimpleNamespace

import pytest
import yaml

from rlspec import inputs
from tests.tiny import report, rlspec, run_folder, save, training


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


def test_other_tokens_or_weights_are_another_arm(here, monkeypatch):
    path = training(here)
    rlspec("run", path)
    monkeypatch.setattr(inputs, "seen", lambda spec, arm: "other")
    again = rlspec("run", path, "--from", run_folder().name)
    assert again.err.count("runs again, since its tokens or weights are not known to be those that it had") == 3


def test_what_an_arm_is_given(here):
    given = SimpleNamespace(path=here / "spec.yaml", data={"tokens": "tokens.jsonl"}, chain={})
    arm = SimpleNamespace(weights={"source": "huggingface", "path": "weights"})
    (here / "weights").mkdir()
    shard = here / "weights" / "model.safetensors"
    shard.write_bytes(b"0" * (inputs.SMALL + 1))
    seen = {inputs.seen(given, arm)}
    for name, text in (("tokens.jsonl", "a"), ("tokens.jsonl", "b"), ("weights/config.json", "{}")):
        (here / name).write_text(text)
        seen.add(inputs.seen(given, arm))
    os.utime(shard, ns=(1, 1))
    seen.add(inputs.seen(given, arm))
    shard.write_bytes(b"0" * (inputs.SMALL + 2))
    seen |= {inputs.seen(given, arm), inputs.seen(given, SimpleNamespace(weights={}))}
    assert len(seen) == 7 and None not in seen
    given.chain = {"weights": arm.weights}
    assert inputs.seen(given, SimpleNamespace(weights={})) == inputs.seen(given, arm), (
        "of a chain, whose arms share them"
    )
    assert inputs.seen(SimpleNamespace(path=given.path, data={}, chain={}), SimpleNamespace(weights={})) is None


def test_surroundings_that_differ_from_those_of_an_earlier_run_are_said_before_the_code_is_blamed(here, monkeypatch):
    monkeypatch.setenv("MYLIB_TOKEN", "s3cret")
    path = training(here)
    rlspec("run", path)
    first = run_folder()
    assert "s3cret" not in (text := "".join(file.read_text() for file in first.glob("*.provenance.json")))
    assert "MYLIB_TOKEN" not in text
    change(path, lambda data: data["arms"][2].update(environment={"OFFSET": "0.05"}))
    done = rlspec("run", path, "--from", first.name)
    assert done.code == 1 and "surroundings" not in done.out
    monkeypatch.setenv("MYLIB_SHIFT", "0.05")
    monkeypatch.setenv("SSH_TTY", "of no account")
    monkeypatch.setenv("MYLIB_TOKEN", "another")
    done = rlspec("run", path, "--from", first.name)
    (verdict,) = report()["verdicts"]
    (note,) = (note for note in verdict["notes"] if "surroundings" in note)
    assert note.startswith("base0, base1, of an earlier run, and the other arms differ") and note.endswith(
        "no arm declares: MYLIB_SHIFT"
    )
    assert done.code == 1 and "run all arms again in one environment" in " ".join(done.out.split())
    assert "surroundings" in rlspec("judge", run_folder(), "-v").out
    rlspec("report", run_folder(), "--portable", "-o", "portable.json")
    assert "MYLIB_SHIFT" not in (here / "portable.json").read_text()
    assert "surroundings" not in rlspec("run", path).out, "all of them in one run"
