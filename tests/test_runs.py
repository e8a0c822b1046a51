from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from rlspec import runs
from rlspec.errors import RunError, SpecError

PLAN = {
    "schema_version": 1,
    "rlspec": "0",
    "created": "2026-11-29T00:00:00+00:00",
    "kind": "correctness",
    "name": "n",
    "spec": {"path": "/s.yaml", "digest": "d", "data": {}},
    "tag": "",
    "contract": {"name": "training", "digest": "d", "rows": []},
    "arms": [],
}


def made(base, stem="s", model="m", plan=True, spec="/s.yaml"):
    folder = runs.create(base, "correctness", model, stem)
    if plan:
        runs.save(folder.plan, {**PLAN, "spec": {**PLAN["spec"], "path": spec}})
    return folder


def test_a_full_disk_names_the_file(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as write() says it, without a name

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left") as caught:
        runs.save(tmp_path / "plan.json", {})
    assert caught.value.filename == str(tmp_path / "plan.json")
    with pytest.raises(SpecError, match=f"cannot make a run folder: {tmp_path}: No space left on device"):
        runs.create(tmp_path, "correctness", "m", "s")


def test_the_root_is_the_top_of_the_repository_or_the_folder_itself(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert runs.root(tmp_path / "a" / "b") == tmp_path / "a" / "b"
    (tmp_path / ".git").mkdir()
    assert runs.root(tmp_path / "a" / "b") == tmp_path


@pytest.mark.parametrize(("model", "folder"), [("./small.yaml", "small"), ("../m/a b.yml", "m_a_b"), ("..", "any")])
def test_a_model_of_ones_own_file_gives_no_hidden_folder(model, folder):
    assert runs.below("chain", model).parts == ("validate-chain", folder)


def test_both_folders_are_made_below_roots_that_git_does_not_see(tmp_path):
    folder = made(tmp_path)
    assert folder.workspace.is_dir() and folder.logging.is_dir()
    below = folder.workspace.relative_to(tmp_path / "workspace")
    assert below.parts[:2] == ("validate-correctness", "m") and folder.logging == tmp_path / "logging" / below
    for root in ("workspace", "logging"):
        assert (tmp_path / root / ".gitignore").read_text() == "*\n"


def test_an_own_gitignore_is_left_alone(tmp_path):
    (tmp_path / "workspace").mkdir()
    (tmp_path / "workspace" / ".gitignore").write_text("!keep\n")
    made(tmp_path)
    assert (tmp_path / "workspace" / ".gitignore").read_text() == "!keep\n"


def test_runs_in_one_second_get_a_suffix_and_names_are_safe(tmp_path):
    names = [made(tmp_path, stem="my spec/€", model="a/b").name for _ in range(3)]
    assert len(set(names)) == 3 and all(name.partition("-")[2].startswith("my_spec_") for name in names)
    assert [path.name for path in (tmp_path / "workspace" / "validate-correctness").iterdir()] == ["a_b"]


def test_latest_is_a_link_to_the_run_that_began_last(tmp_path):
    first, second = made(tmp_path), made(tmp_path)
    link = first.workspace.parent / "latest"
    assert not link.exists()
    runs.publish(first)
    assert link.readlink().name == first.name
    runs.publish(second)
    assert link.resolve() == second.workspace.resolve()
    assert (second.logging.parent / "latest").resolve() == second.logging.resolve()
    assert sorted(path.name for path in link.parent.iterdir()) == sorted([first.name, second.name, "latest"])


def test_something_else_named_latest_is_not_overwritten(tmp_path):
    folder = made(tmp_path)
    (folder.workspace.parent / "latest").mkdir()
    with pytest.raises(RunError, match="latest.*move it away"):
        runs.publish(folder)
    assert not list(folder.workspace.parent.glob(".latest*"))


def test_discard_leaves_nothing_of_a_run_that_was_refused(tmp_path):
    runs.discard(made(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_discard_leaves_other_runs_and_files_of_the_user(tmp_path):
    first, second = made(tmp_path), made(tmp_path)
    runs.discard(second)
    assert first.plan.exists() and not second.workspace.exists()
    (tmp_path / "workspace" / "mine").touch()
    runs.discard(first)
    assert [path.name for path in tmp_path.rglob("mine")] == ["mine"] and not (tmp_path / "logging").exists()


def test_a_run_is_found_by_name_folder_link_and_report(tmp_path, monkeypatch):
    folder = made(tmp_path)
    runs.publish(folder)
    monkeypatch.chdir(tmp_path)
    link = folder.workspace.parent / "latest"
    short = folder.workspace.relative_to(tmp_path)
    for given in (folder.name, folder.workspace, short, link, folder.report, folder.plan):
        assert runs.find(tmp_path, str(given)) == folder, given
    assert [one.name for one in runs.all_of(tmp_path)] == [folder.name]


def test_the_roots_may_be_links_to_a_larger_disk(tmp_path):
    base = tmp_path / "repo"
    base.mkdir()
    for name in ("workspace", "logging"):
        (tmp_path / f"big-{name}").mkdir()
        (base / name).symlink_to(tmp_path / f"big-{name}")
    folder = made(base)
    runs.publish(folder)
    assert runs.find(base, folder.name) == folder
    assert runs.find(base, str(folder.workspace.parent / "latest")) == folder
    assert [one.logging for one in runs.all_of(base)] == [folder.logging]


def test_a_run_folder_that_was_copied_away_can_be_named(tmp_path):
    folder = made(tmp_path / "there")
    folder.workspace.rename(tmp_path / "copied")
    assert runs.find(tmp_path, str(tmp_path / "copied")).plan == tmp_path / "copied" / "plan.json"


def test_an_unknown_run_is_told_with_the_newest_ones(tmp_path):
    with pytest.raises(SpecError, match="no run 'x'; there is none below"):
        runs.find(tmp_path, "x")
    names = [made(tmp_path).name for _ in range(4)]
    with pytest.raises(SpecError, match=f"no run 'x'; the newest are {names[3]}, {names[2]}, {names[1]}$"):
        runs.find(tmp_path, "x")


def test_two_runs_of_one_name_are_told_apart_by_folder(tmp_path):
    folder = made(tmp_path)
    twin = folder.workspace.parent.parent / "other" / folder.name
    twin.mkdir(parents=True)
    runs.save(twin / "plan.json", PLAN)
    with pytest.raises(SpecError, match="2 runs are named.*by its folder"):
        runs.find(tmp_path, folder.name)


def test_the_newest_run_of_a_spec(tmp_path):
    assert runs.latest(tmp_path, tmp_path / "s.yaml") is None
    first = made(tmp_path, spec=str(tmp_path / "s.yaml"))
    second = made(tmp_path, spec=str(tmp_path / "s.yaml"))
    made(tmp_path, stem="s", spec="/elsewhere/s.yaml")
    other = made(tmp_path, stem="t")
    other.plan.write_text("cut off")  # a run of another spec is no hindrance
    assert runs.latest(tmp_path, tmp_path / "s.yaml") == second
    second.plan.write_text("cut off")
    with pytest.raises(RunError, match="plan.json is no JSON"):
        runs.latest(tmp_path, tmp_path / "s.yaml")
    assert first.plan.exists()


def test_folders_without_a_plan_are_no_runs(tmp_path):
    folder = made(tmp_path, plan=False)
    assert list(runs.all_of(tmp_path)) == [] and list(runs.folders(tmp_path)) == [folder]


def test_json_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "x.json"
    runs.save(path, {"a": "ü", "bytes": os.fsdecode(b"\xff")})
    assert runs.load(path) == {"a": "ü", "bytes": "\udcff"}
    with pytest.raises(ValueError):
        runs.save(path, {"a": float("nan")})
    assert runs.load(path)["a"] == "ü" and [file.name for file in tmp_path.iterdir()] == ["x.json"]


@pytest.mark.parametrize(
    ("text", "words"),
    [("", "is no JSON"), ("[1]", "holds no JSON object"), ("[" * 9999, "is no JSON"), ("{}", "'.*' is a required")],
)
def test_what_is_not_as_written_is_refused(tmp_path, text, words):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(RunError, match=words):
        runs.load(path, "plan")
    with pytest.raises(SpecError, match=words):
        runs.given(path, "plan")


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(RunError, match="cannot be read: No such file"):
        runs.load(tmp_path / "x")


def test_a_folder_in_which_nothing_can_be_made(tmp_path):
    (tmp_path / "logging").write_text("")
    with pytest.raises(SpecError, match="logging.*start rlspec in another one"):
        made(tmp_path)
