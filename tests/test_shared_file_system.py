"""A run that goes on on another machine: its file system mounted elsewhere, the first machine perhaps still at work.

To mount elsewhere is here to rename the folder: the same files, and no path of the first machine leads anywhere.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml

from rlspec import locks, repository, runs
from tests.gitrepo import Child, commit, git, worktrees
from tests.test_locks import elsewhere
from tests.test_pipeline_revisions import RUN_FILE, TRAIN
from tests.test_pipeline_revisions import spec as spec_of_revisions
from tests.tiny import report, rlspec, run_folder, save, starts, statuses, training

ARMS = ("base0", "base1", "feat0")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The root of the runs, as the first machine sees it; `mount(name)` is how another one does."""
    root = tmp_path / "net" / "team" / "work"
    root.mkdir(parents=True)
    monkeypatch.chdir(root)
    return root


@pytest.fixture
def mount(tmp_path, monkeypatch):
    def elsewhere(name):
        (found,) = (path for path in tmp_path.iterdir() if (path / "team" / "work").is_dir())
        found.rename(tmp_path / name)
        monkeypatch.chdir(tmp_path / name / "team" / "work")
        return tmp_path / name / "team" / "work"

    return elsewhere


def trainer(here):
    """A spec whose run file imports another file, in Python that tells so; base1 crashes until `fixed` exists."""
    path = training(here / "specs")
    (here / "specs" / "mine.py").write_text("OFFSET = 0.0\n")
    template = here / "specs" / "train.py.j2"
    template.write_text("import sys\nsys.path.insert(0, {{ spec_dir | py }})\nimport mine\n" + template.read_text())
    data = yaml.safe_load(path.read_text())
    data["trainer"]["command"] = ["{python}", "{run_file}"]
    data["arms"][1]["environment"] = {"CRASH_AT": "3"}
    save(path, data)
    return path.relative_to(here)


def states():
    return {name: json.loads(next(run_folder().glob(f"*-{name}.provenance.json")).read_text()) for name in ARMS}


def test_a_run_goes_on_where_the_file_system_is_mounted_elsewhere(here, mount):
    path = trainer(here)
    assert rlspec("run", path).code == 4 and statuses(report())["feat0"] == "skipped"
    name = run_folder().name
    there = mount("data")
    (there / "specs" / "fixed").touch()
    done = rlspec("run", path, "--retry-errors")
    assert done.code in (0, 1, 3) and done.err.count("runs again") == 1, done.err  # base1, since it had failed
    made = report()
    assert statuses(made) == {"base0": "reused", "base1": "done", "feat0": "done"} and run_folder().name == name
    assert starts(there / "specs") == 4
    assert {path.read_bytes() for path in run_folder().glob("*.py")} == {next(run_folder().glob("*.py")).read_bytes()}
    assert str(there) in next(run_folder().glob("*-base0.py")).read_text()
    assert all(Path(arm["log"]).is_file() for arm in made["arms"])
    plan = runs.load(run_folder() / "plan.json", "plan")
    assert plan["root"] == str(there) and plan["spec"]["path"] == str(there / path)
    seen = {name: (state["root"], state["observed"]["run_file"]) for name, state in states().items()}
    assert seen["base0"][0] == str(here) and seen["base0"][1].startswith(f"{here}/"), "what ran there stays as observed"
    assert seen["feat0"][0] == str(there) and seen["feat0"][1].startswith(f"{there}/")


def test_a_finished_run_is_resumed_used_judged_and_told_from_another_mount(here, mount):
    path = trainer(here)
    (here / "specs" / "fixed").touch()
    rlspec("run", path)
    first, name = report(), run_folder().name
    for machine in ("data", "mnt"):
        there = mount(machine)
        for again in (["run", path, "--resume"], ["run", path, "--from", name], ["judge", name]):
            done = rlspec(*again, "-o", "again.json")
            made = json.loads((there / "again.json").read_text())
            assert done.code == first["exit_code"] and "runs again" not in done.err, (again, done)
            assert made["verdicts"] == first["verdicts"] and starts(there / "specs") == 3, again
            assert all(Path(arm["log"]).is_file() for arm in made["arms"]), again
            assert (there / made["spec"]["path"]).resolve() == there / path, again
    (there / "specs" / "mine.py").write_text("OFFSET = 1.0\n")
    done = rlspec("run", path, "--from", name)
    assert done.err.count("runs again, since the code that it ran has changed") == 3, done.err


def test_a_template_that_changed_is_refused_on_any_mount(here, mount):
    path = trainer(here)
    rlspec("run", path)
    template = mount("data") / "specs" / "train.py.j2"
    template.write_text(template.read_text() + "# another\n")
    done = rlspec("run", path, "--retry-errors")
    assert done.code == 2 and "is not what the template renders" in done.err


def test_in_what_the_machines_differ_is_said(here, mount):
    """The arms of the first machine are judged as what they are: measured on another CPU, with another Python."""
    path = trainer(here)
    rlspec("run", path, "--arm", "base0")
    state = next(run_folder().glob("*-base0.provenance.json"))
    data = json.loads(state.read_text())
    data["observed"]["machine"] |= {"host": "gpu-b", "cpu": "another CPU"}
    data["observed"]["versions"]["python"] = "3.9.1"
    state.write_text(json.dumps(data))
    (mount("data") / "specs" / "fixed").touch()
    rlspec("run", path, "--resume")
    made = report()
    assert statuses(made) == {"base0": "reused", "base1": "done", "feat0": "done"}
    assert made["verdicts"][0]["evidence"]["machines_differ"]["cpu"]["base0"] == "another CPU"
    assert any(note.startswith("python differed: base0 3.9.1, base1 3.") for note in made["notes"]), made["notes"]


@pytest.mark.parametrize("option", ["--resume", "--retry-errors"])
def test_a_run_that_another_machine_is_at_is_left_to_it(here, option):
    path = trainer(here)
    rlspec("run", path)
    before, count = report(), starts(here / "specs")
    lock = run_folder() / "lock"
    elsewhere(lock, 100)
    done = rlspec("run", path, option)
    assert done.code == 2 and "(pid 7 on gpu-b, since 20" in done.err and f"delete {lock}" in done.err
    assert rlspec("clean", "--keep", "0", "--yes").code == 2 and report() == before
    os.utime(lock, (lock.stat().st_mtime - locks.SILENT,) * 2)
    (here / "specs" / "fixed").touch()
    assert rlspec("run", path, "--retry-errors").code in (0, 1, 3)
    assert starts(here / "specs") == count + 2 and not lock.exists()


CUT_OFF = """
import pathlib, sys
from rlspec import repository
repo, folder = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
with repository.lock(repo), repository.isolation(repo, sys.argv[3], sys.argv[4:], folder) as trees:
    trees.tree(sys.argv[4])
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("isolation", ["worktree", "checkout"])
def test_a_run_of_commits_that_was_killed_there_is_repaired_and_goes_on_here(
    repo, tmp_path, monkeypatch, mount, isolation
):
    (tmp_path / "net" / "team").mkdir(parents=True)
    root = repo.rename(tmp_path / "net" / "team" / "work")
    git(root, "checkout", "-q", "main")
    files = {"train.py": TRAIN.format(shift=0.0), "specs/run.py.j2": RUN_FILE, ".gitignore": "cache/\n*.log\n"}
    commit(root, "trainer", files)
    git(root, "branch", "-q", "change")
    git(root, "worktree", "add", "-q", "--detach", str(tmp_path / "the user's own"))
    monkeypatch.chdir(root)
    path = spec_of_revisions(root, isolation=isolation).relative_to(root)
    rlspec("run", path, "--arm", "base0")
    with Child(CUT_OFF, root, run_folder(), isolation, git(root, "rev-parse", "main")) as child:
        child.kill()
        child.wait()
    there = mount("data")
    lock = there / ".git" / "rlspec" / "lock"
    lock.write_text(json.dumps({**json.loads(lock.read_text()), "host": "gpu-b"}))
    done = rlspec("run", path, "--resume")
    assert done.code == 2 and f"pid {child.pid} on gpu-b" in done.err
    os.utime(lock, (lock.stat().st_mtime - locks.SILENT - 1,) * 2)
    done = rlspec("run", path, "--resume")
    assert done.code in (0, 1, 3) and "was cut off" in done.err, done
    assert statuses(report()) == {"base0": "reused", "base1": "done", "feat0": "done"}
    assert git(there, "rev-parse", "--abbrev-ref", "HEAD") == "main" and worktrees(there) == 2
    assert not list(run_folder().glob("*/.git")) and list((there / ".git" / "rlspec").iterdir()) == []


def test_clean_leaves_worktrees_that_another_mount_made_to_the_run_that_uses_them(repo, monkeypatch):
    """Such a tree does not find its git here, so it could not be asked whether it is in use."""
    monkeypatch.chdir(repo)
    folder = runs.create(repo, "correctness", "m", "s")
    (folder.workspace / "0123456789ab").mkdir()
    (folder.workspace / "0123456789ab" / ".git").write_text("gitdir: /net/nowhere/.git/worktrees/0123456789ab\n")
    with repository.lock(repo):
        done = rlspec("clean", "--yes", "--keep", "0")
    assert done.code == 2 and "is using" in done.err and folder.workspace.exists()
    assert rlspec("clean", "--yes", "--keep", "0").code == 0 and not folder.workspace.exists()
