"""What becomes an arm's records where its trainer leaves a file at full precision beside the log."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from rlspec import collecting, document, failure, plan, records
from rlspec.checks import CHECKS
from rlspec.trainers import TRAINERS, Beside
from tests.tiny import report, rlspec, run_folder, save, statuses

DATA = {
    "kind": "correctness",
    "question": "q",
    "model": "tiny-dense",
    "mesh": {"pp": 1},
    "trainer": {"name": "huggingface", "settings": {"global_batch_size": 4, "max_steps": 3}},
    "arms": [
        {"name": "base0", "role": "base"},
        {"name": "base1", "role": "base", "environment": {"A": "1"}},
        {"name": "feat0", "role": "feature", "environment": {"A": "2"}},
    ],
}


@pytest.fixture
def arm(tmp_path):
    read, _ = document.read(save(tmp_path / "spec.yaml", DATA))
    spec = CHECKS["correctness"].parse(read)
    return spec, plan.steps(spec, tmp_path, tmp_path)[0]


def state(path: Path, losses):
    history = [{"step": n, "loss": loss, "grad_norm": 1.0 / n, "step_time": 0.5} for n, loss in enumerate(losses, 1)]
    path.write_text(json.dumps({"global_step": 3, "max_steps": 3, "log_history": [*history, {"train_loss": 1.0}]}))


def test_the_file_beside_the_log_is_what_counts(arm):
    spec, step = arm
    step.log.write_text("".join(f"{{'loss': '{value}'}}\n" for value in ("5.616", "5.5", "5.4")))
    place = collecting.beside(spec, step)
    assert place.name.endswith("-base0.trainer_state.json") and place.parent == step.records.parent
    told = {}
    assert "which reader huggingface is to read" in collecting.collect(spec, step, told)
    state(place, [5.615690231323242, 5.5, 5.25])
    assert collecting.collect(spec, step, told) is None and told["steps"] == 3 and len(told["records_digest"]) == 64
    run = records.read(step.records, step.arm)
    assert list(run.series["loss"].values) == [5.615690231323242, 5.5, 5.25] and run.series["loss"].resolution == 0
    assert set(run.series) == {"loss", "grad_norm", "step_time"} and run.steps_expected == 3 and not run.faults
    collecting.clear(spec, step)
    assert not place.exists() and not step.records.exists()


def test_a_traceback_in_the_log_of_an_arm_that_ended_well_is_told(arm):
    spec, step = arm
    crash = 'Traceback (most recent call last):\n  File "t.py", line 1, in <module>\nRuntimeError: no more data\n'
    for text, told in ((crash, True), ("[rank1]: " + crash.replace("\n", "\n[rank1]: ", 2), True), ("fine\n", False)):
        step.log.write_text(text)
        state(collecting.beside(spec, step), [5.6, 5.5, 5.25])
        assert collecting.collect(spec, step, {}) is None
        notes = records.read(step.records, step.arm).notes
        assert ["the log holds a traceback: RuntimeError: no more data;" in note for note in notes] == [True] * told


def test_a_traceback_before_the_first_step_of_all_steps_is_no_news(arm, monkeypatch):
    spec, step = arm
    crash = 'Traceback (most recent call last):\n  File "t.py", line 1, in <module>\nImportError: no flash_attn\n'
    lines = "".join(f"{{'loss': '{value}', 'grad_norm': '1.5'}}\n" for value in ("5.616", "5.512", "5.403"))
    told = "the log holds a traceback: ImportError: no flash_attn; did this run train to its end?"
    for text, losses, notes in (
        (crash + lines, [5.6, 5.5, 5.25], 0),
        (crash + lines + crash, [5.6, 5.5, 5.25], 1),
        (lines[:40] + crash + lines[40:], [5.6, 5.5, 5.25], 1),
        (crash + lines, [5.6, 5.5], 1),  # a step is missing
        (crash, [5.6, 5.5, 5.25], 1),  # the log has no step line that says when training began
    ):
        step.log.write_text(text)
        state(collecting.beside(spec, step), losses)
        assert collecting.collect(spec, step, {}) is None
        assert [*records.read(step.records, step.arm).notes].count(told) == notes, text
    monkeypatch.setattr(failure, "SEARCHED", len(crash + lines))  # what stands before is not known
    state(collecting.beside(spec, step), [5.6, 5.5, 5.25])
    step.log.write_text("\n" + crash + lines)
    assert collecting.collect(spec, step, {}) is None
    assert told in records.read(step.records, step.arm).notes


def test_tags_get_the_names_of_the_log(arm, monkeypatch):
    from tests.recorded import write_events

    spec, step = arm
    names = {"loss_metrics/global_avg_loss": "loss"}
    entry = dataclasses.replace(TRAINERS["huggingface"], beside=Beside(suffix=".tb", reader="tensorboard", names=names))
    monkeypatch.setitem(TRAINERS, "huggingface", entry)
    folder = collecting.beside(spec, step)
    write_events(folder / "events.out.tfevents.1", [(1, (3.0, 1.0)), (2, (2.5, 1.0)), (2, (2.25, 1.0))])
    assert collecting.collect(spec, step, {}) is None
    run = records.read(step.records, step.arm)
    assert set(run.series) == {"loss", "grad_norm"} and "twice" in run.faults["loss"]
    collecting.clear(spec, step)
    assert not folder.exists()


def test_a_log_with_another_number_of_steps_is_a_fault(arm, monkeypatch):
    spec, step = arm
    monkeypatch.setitem(TRAINERS, "huggingface", dataclasses.replace(TRAINERS["huggingface"], beside=None))
    spec = dataclasses.replace(spec, trainer=dataclasses.replace(spec.trainer, reader="pithtrain"))
    step.log.write_text("2026 | INFO | step 00000001/00000009 | cross-entropy-loss 1.5000\n")
    assert collecting.collect(spec, step, {}) is None
    assert "has 9 steps, the spec says 3" in records.read(step.records, step.arm).faults["*"]


OWN = """
import os, sys
from pathlib import Path
from tests.recorded import write_events

offset = float(os.environ.get("OFFSET", "0"))
records = Path(os.environ["RLSPEC_RECORDS"])
folder = records.with_name(records.name.replace(".records.jsonl", ".tb"))
assert not folder.exists(), "each try begins anew"
rows = [(step, (4 / step + (step > 1) * offset * step,)) for step in range(1, 7)]
if os.path.exists(os.environ.get("TORN", "/nowhere")):
    rows = rows[:3]
write_events(folder / "events.out.tfevents.1", rows, ("loss",))
sys.exit(3 if len(rows) < 6 else 0)
"""


def test_a_trainer_of_ones_own_that_writes_event_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(OWN)
    more = {"PYTHONPATH": str(Path(__file__).parents[1]), "TORN": str(tmp_path / "torn")}
    data = {
        **DATA,
        "model": "char-gpt",
        "trainer": {
            "name": "command",
            "command": ["{python}", "train.py"],
            "reader": {"name": "tensorboard", "suffix": ".tb"},
            "steps": 6,
        },
        "arms": [
            {"name": "base0", "role": "base", "environment": more},
            {"name": "base1", "role": "base", "environment": {**more, "OFFSET": "0.001"}},
            {"name": "feat0", "role": "feature", "environment": {**more, "OFFSET": "0.002"}},
        ],
        "judgments": [{"check": "drift", "metric": "loss"}],
    }
    path = save(tmp_path / "spec.yaml", data)
    (tmp_path / "torn").touch()
    assert rlspec("run", path).code == 4 and statuses(report())["base0"] == "failed"
    (tmp_path / "torn").unlink()
    done = rlspec("run", path, "--retry-errors")
    assert done.code == 0 and report()["verdicts"][0]["statistic"] == pytest.approx(2, rel=1e-3), done.out + done.err
    folders = sorted(place.name.partition("-")[0] for place in run_folder().glob("*.tb"))
    assert folders == ["pp1"] * 3, "that of the try that failed is gone"
    path.write_text(path.read_text().replace(".tb", ".other"))
    done = rlspec("run", path, "--arm", "base0")
    assert "left no" in done.out and "which reader tensorboard is to read" in " ".join(done.out.split())
