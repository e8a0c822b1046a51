from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlspec import snapshot
from rlspec.errors import RunError
from tests.gitrepo import ODD, commit, git


def since(then: snapshot.Snapshot) -> list[str]:
    return snapshot.differing(then.top, then.head, then.changed)


def test_a_tree_of_git(repo: Path) -> None:
    (repo / "model.py").write_text("lr = 3\n")
    (repo / "mine.py").write_text("")
    (repo / "data.bin").write_text("")
    then = snapshot.take(repo / "new")
    assert then.top == repo and set(then.changed) == {"model.py", "mine.py"} and since(then) == []
    commit(repo, "as it was", {"model.py": "lr = 3\n", "mine.py": ""})
    assert since(then) == [], "the same files, by another commit"
    (repo / ODD).write_text("even\n")
    (repo / "mine.py").unlink()
    (repo / "data.bin").write_text("more")
    (repo / "other.py").write_text("no arm of then can have run it")
    assert since(then) == ["mine.py", ODD]
    commit(repo, "changed", {ODD: "even\n", "model.py": "lr = 4\n"})
    assert since(then) == ["mine.py", "model.py", ODD]
    with pytest.raises(RunError):
        snapshot.differing(repo, "0" * 40, {})


def test_a_folder_and_a_repository_without_a_commit(tmp_path: Path) -> None:
    for name in ("a.py", "deep/b.py", "cfg.json", ".venv/c.py", "workspace/d.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    then = snapshot.take(tmp_path)
    assert (set(then.changed), then.beside) == ({"a.py", "deep/b.py"}, None) and snapshot.left(then, []) == []
    (tmp_path / "deep" / "b.py").write_text("")
    assert since(then) == ["deep/b.py"]
    git(tmp_path, "init", "-q")
    then = snapshot.take(tmp_path)
    assert then.head is None and "a.py" in then.changed and since(then) == []
    (tmp_path / "a.py").unlink()
    assert since(then) == ["a.py"]


def test_what_was_left(repo: Path) -> None:
    own = repo / "workspace"
    (own / "tree").mkdir(parents=True)
    (repo / "old.txt").write_text("")
    then = snapshot.take(repo)
    assert snapshot.left(then, [own]) == []
    for name in ("new.txt", "run2.log", "cache/more", "workspace/mine", "lib/__pycache__/x.pyc", "old.txt"):
        (repo / name).parent.mkdir(parents=True, exist_ok=True)
        (repo / name).write_text("more")
    os.utime(repo / "cache", ns=(0, then.beside["cache/"] + 1))  # type: ignore[index]
    assert snapshot.left(then, [own]) == ["cache/", "new.txt", "run2.log"]
    assert snapshot.left(then, [repo.parent]) == ["cache/", "new.txt", "run2.log", "workspace/mine"]
