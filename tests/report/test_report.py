"""The package itself: which writer a file gets, and where reports land."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlspec import report
from rlspec.errors import RunError, SpecError
from rlspec.report import jsonfile, junit, markdown
from tests.report import samples


def test_the_suffix_picks_the_writer() -> None:
    assert report.writer(Path("a/report.json")) is jsonfile.render
    assert report.writer(Path("report.MD")) is markdown.render
    assert report.writer(Path("junit.xml")) is junit.render


@pytest.mark.parametrize(
    ("name", "what"), [("report.pdf", "unknown suffix .pdf"), ("report", "its name has no suffix")]
)
def test_an_unknown_suffix_lists_the_known(name: str, what: str) -> None:
    with pytest.raises(SpecError) as caught:
        report.known([Path("a.json"), Path(name)])
    known = "known are .json, .md, .xml, and .gz after them"
    assert str(caught.value) == f"cannot write a report to {name}: {what}; {known}"


def test_write_makes_the_folder_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.json"
    report.write(path, samples.load("correctness-fail"))
    assert samples.parse(path.read_text(encoding="utf-8")) == samples.load("correctness-fail")
    assert [one.name for one in path.parent.iterdir()] == ["report.json"]


def test_a_report_that_cannot_be_written_is_an_error_and_the_old_one_stays(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(RunError, match="cannot write the report to .*file/report.json"):
        report.write(tmp_path / "file" / "report.json", samples.load("correctness-fail"))
    old = tmp_path / "report.json"
    old.write_text("old", encoding="utf-8")
    with pytest.raises(TypeError):
        report.write(old, {"verdicts": object()})
    assert old.read_text(encoding="utf-8") == "old"


def test_save_writes_the_runs_own_report_and_the_asked_ones(tmp_path: Path) -> None:
    made = samples.load("correctness-fail")
    made["run"]["folder"] = str(tmp_path / "run")
    report.save(made, [tmp_path / "out.md"])
    assert (tmp_path / "run" / "report.json").is_file() and (tmp_path / "out.md").is_file()
    report.save({**made, "run": None}, [tmp_path / "out.xml"])
    assert (tmp_path / "out.xml").is_file()


def test_save_of_a_report_read_again_leaves_the_run_alone(tmp_path: Path) -> None:
    made = samples.load("correctness-fail")
    made["run"]["folder"] = str(tmp_path / "run")
    report.save(made, [tmp_path / "out.json"], again=False)
    assert not (tmp_path / "run").exists() and (tmp_path / "out.json").is_file()


def test_every_writer_takes_a_report_read_as_plain_json(tmp_path: Path) -> None:
    made = samples.load("correctness-fail")
    made["verdicts"][0]["statistic"] = float("inf")
    loaded = json.loads(jsonfile.render(made))
    for suffix in report.WRITERS:
        report.write(tmp_path / f"loaded{suffix}", loaded)
        report.write(tmp_path / f"made{suffix}", made)
        assert (tmp_path / f"loaded{suffix}").read_text() == (tmp_path / f"made{suffix}").read_text()
    assert "| inf |" in (tmp_path / "loaded.md").read_text()


def test_summary_appends_to_the_job_summary(tmp_path: Path) -> None:
    path = tmp_path / "summary"
    path.write_text("before\n", encoding="utf-8")
    report.summary(samples.load("parity-pass"), {})
    report.summary(samples.load("parity-pass"), {"GITHUB_STEP_SUMMARY": str(path)})
    assert path.read_text(encoding="utf-8").startswith("before\n### PASS: parity: vllm-trainer\n")
    with pytest.raises(RunError, match="GITHUB_STEP_SUMMARY"):
        report.summary(samples.load("parity-pass"), {"GITHUB_STEP_SUMMARY": str(tmp_path)})


def test_screen_respects_the_environment_and_shortens_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = samples.load("correctness-error")
    made["run"]["folder"] = str(Path.cwd() / made["run"]["folder"])
    made["arms"][2]["log"] = str(Path.cwd() / made["arms"][2]["log"])
    text = report.screen(made, {"COLUMNS": "80"}, False)
    assert text == samples.golden("correctness-error", "80.txt")
    assert "\x1b[" in report.screen(made, {"FORCE_COLOR": "1"}, False)
    assert made["run"]["folder"].startswith("/")
