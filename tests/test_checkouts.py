"""Arms without a revision: the work tree is the same for all of them, from begin to end, or it is said."""

from __future__ import annotations

import os
import shutil

import pytest

from rlspec import pipeline
from tests.gitrepo import commit, git
from tests.tiny import report, rlspec, run_folder, statuses, training

# Arms that are told to edit a file while they run, as a user does who works on.
RUN_FILE = """import os, sys
sys.path.insert(0, {{ spec_dir | py }})
import mine
if os.environ["EDIT"]:
    with open(os.path.join({{ spec_dir | py }}, os.environ["EDIT"]), "a") as file:
        file.write(" ")
"""
ARMS = [
    {"name": "base0", "role": "base", "environment": {"EDIT": ""}},
    {"name": "base1", "role": "base", "environment": {"EDIT": ""}},
    {"name": "feat0", "role": "feature", "environment": {"EDIT": ""}},
]


def spec(folder, edit=""):
    arms = [*ARMS[:2], {**ARMS[2], "environment": {"EDIT": edit}}]
    path = training(folder, arms=arms)
    path.write_text(path.read_text().replace("  - -S\n", ""))
    template = folder / "train.py.j2"
    template.write_text(RUN_FILE + template.read_text())
    return path


@pytest.fixture(params=["git", "folder"])
def here(request, repo, tmp_path, monkeypatch):
    """What the trainer reads, committed, or in a folder that git knows nothing of; the spec is neither."""
    folder = repo if request.param == "git" else tmp_path / "folder"
    kept = {
        "mine.py": "\n",
        "notes.txt": "\n",
        "README.md": "\n",
        "unused.py": "\n",
        "other.yaml": "kind: performance\n",
    }
    commit(repo, "trainer", kept)
    if request.param == "folder":
        shutil.copytree(repo, folder, ignore=shutil.ignore_patterns(".git"))
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def between(monkeypatch):
    """Do something after an arm has run and before the next one does."""
    real, todo = pipeline.arms.run, {}

    def run(session, step):
        state = real(session, step)
        todo.pop(step.arm.name, lambda: None)()
        return state

    monkeypatch.setattr(pipeline.arms, "run", run)
    return todo


def test_code_that_changes_while_an_arm_runs_is_an_error_and_is_never_reused(here):
    path = spec(here, edit="mine.py")
    assert rlspec("run", path).code == 4
    arm = report()["arms"][2]
    assert arm["status"] == "failed" and arm["reason"].startswith("mine.py changed while the arm ran"), arm
    done = rlspec("run", path, "--resume")
    assert "base0: stays as it ran, though the code that it ran has changed" in done.err
    assert list(statuses(report()).values()) == ["reused", "reused", "failed"], "nothing runs, so nothing is dropped"
    rlspec("run", path, "--from", run_folder().name)
    assert "reused" not in statuses(report()).values()


def test_what_the_trainer_writes_itself_and_imports_is_no_edit(here):
    path = spec(here)
    template = here / "train.py.j2"
    made = f"open({str(here / 'made.py')!r}, 'w').write(f'at = {{os.getpid()}}')\nimport made\n"
    template.write_text(template.read_text().replace("import mine\n", f"import mine\n{made}"))
    assert rlspec("run", path).code in (0, 1, 3)
    notes = [note for note in report()["notes"] if note.startswith("made.py, which git does not track, changed")]
    assert set(statuses(report()).values()) == {"done"} and len(notes) == 1
    rlspec("run", path, "--from", run_folder().name)
    assert set(statuses(report()).values()) == {"reused"}


def test_code_of_another_repository_that_changes_while_an_arm_runs_is_an_error(repo, tmp_path, monkeypatch):
    monkeypatch.chdir(repo)
    other = tmp_path / "other"
    git(tmp_path, "init", "-q", str(other))
    commit(other, "library", {"lib.py": "\n"})
    path = spec(repo, edit=os.path.relpath(other / "lib.py", repo))
    template = repo / "train.py.j2"
    found = f"sys.path.insert(0, {str(other)!r})\nimport lib\n"
    template.write_text(template.read_text().replace("import mine\n", found))
    assert rlspec("run", path).code == 4
    reason = report()["arms"][2]["reason"]
    assert reason.startswith(f"{other / 'lib.py'} changed while the arm ran"), reason


def test_what_no_arm_reads_may_change(here):
    path = spec(here)
    rlspec("run", path)
    for file in ("README.md", "notes.txt", "unused.py", "spec.yaml", "other.yaml"):
        with (here / file).open("a") as opened:
            opened.write("# more\n")
    rlspec("run", path, "--from", run_folder().name)
    assert set(statuses(report()).values()) == {"reused"}


def test_code_that_changes_between_two_arms_is_an_error_and_both_are_tried_again(here, between):
    path = spec(here)
    between["base0"] = lambda: (here / "mine.py").write_text("x = 1\n")
    assert rlspec("run", path).code == 4
    assert report()["arms"][1]["reason"].startswith("mine.py changed after base0 ran, so the two arms did not run")
    done = rlspec("run", path, "--retry-errors")
    assert set(statuses(report()).values()) == {"done"} and "base0: runs again, since the code" in done.err


def test_other_files_that_git_tracks_and_the_trainer_may_read_are_told_and_not_reused(repo, monkeypatch, between):
    monkeypatch.chdir(repo)
    commit(repo, "trainer", {"mine.py": "\n", "cfg.json": "{}\n"})
    path = spec(repo, edit="cfg.json")
    between["base0"] = lambda: (repo / "cfg.json").write_text("[]\n")
    rlspec("run", path)
    assert {"cfg.json changed after base0 ran, and the next arm ran with it", "cfg.json changed while feat0 ran"} <= {
        *report()["notes"]
    }
    done = rlspec("run", path, "--from", run_folder().name)
    assert done.err.count("runs again, since cfg.json changed since then") == 3, done.err
