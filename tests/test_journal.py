from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rlspec import journal, repository
from rlspec.changes import changes
from rlspec.errors import RunError, SpecError
from rlspec.journal import lock
from tests.gitrepo import Child, git


def test_lock_refuses_a_second(repo: Path) -> None:
    other = repo.parent / "linked"
    git(repo, "worktree", "add", "-q", "--detach", str(other))
    with lock(repo, "run specs/a.yaml"):
        for place in (repo, other):
            with (
                pytest.raises(SpecError, match=rf"run specs/a.yaml \(pid {os.getpid()} on .*since 20"),
                lock(place),
            ):
                pass
    with lock(other):
        pass
    assert changes(repo) == []


def test_lock_dies_with_its_process(repo: Path) -> None:
    code = "import sys, pathlib; from rlspec.journal import lock\n"
    code += "with lock(pathlib.Path(sys.argv[1])): print('ready', flush=True); sys.stdin.read()"
    with Child(code, repo) as child:
        with pytest.raises(SpecError, match=f"pid {child.pid}"), lock(repo):
            pass
        child.kill()
        child.wait()
    stale = repo / ".git" / "rlspec" / "lock"
    assert json.loads(stale.read_text())["pid"] == child.pid
    with lock(repo):
        assert json.loads(stale.read_text())["pid"] == os.getpid()
    assert list(stale.parent.iterdir()) == []


def test_a_journal_of_another_mount_has_the_paths_of_this_one(repo: Path) -> None:
    file = journal.place(repo)
    journal.write(file, {"top": str(repo), "worktrees": [f"{repo}/workspace/a", "/elsewhere/b"], "keep": ["a"]})
    moved = repo.parent / "mounted" / "elsewhere"
    moved.parent.mkdir()
    repo.rename(moved)
    found = journal.read(journal.place(moved))
    assert (found["top"], found["keep"]) == (str(moved), ["a"])
    assert found["worktrees"] == [f"{moved}/workspace/a", "/elsewhere/b"]
    assert journal.is_mine(journal.place(moved))


def test_a_journal_that_another_process_wrote_is_not_undone_at_our_end(repo: Path, folder: Path) -> None:
    """Whoever took our lock from us has repaired, and goes on in the same trees."""
    with repository.isolation(repo, "worktree", [git(repo, "rev-parse", "main")], folder):
        entry = json.loads(journal.place(repo).read_text())
        journal.place(repo).write_text(json.dumps({**entry, "host": "another"}))
    assert journal.place(repo).exists() and len(list(folder.iterdir())) == 1


def test_a_journal_that_cannot_be_read_names_the_way_out(repo: Path) -> None:
    file = journal.place(repo)
    journal.write(file, {"top": "x"})
    assert journal.read(file)["top"] == "x" and journal.read(file)["pid"] == os.getpid()
    file.write_text("{")
    with pytest.raises(RunError, match="journal.json: the journal of an earlier run cannot be read.*delete the file"):
        journal.read(file)
