from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from rlspec.changes import changes, verify
from rlspec.errors import RunError, SpecError
from rlspec.git import resolve
from rlspec.repository import isolation, repair
from tests.gitrepo import ODD, commit, git, state, worktrees


def test_worktrees(repo: Path, folder: Path) -> None:
    before, base, head = state(repo), git(repo, "rev-parse", "main"), git(repo, "rev-parse", "HEAD")
    with isolation(repo, "worktree", [base, head, base], folder) as trees:
        assert (trees.tree(base) / "model.py").read_text() == "lr = 1\n"
        assert (trees.tree(head) / "model.py").read_text() == "lr = 2\n"
        assert (trees.tree(base) / ODD).exists()
        assert len(list(folder.iterdir())) == 2
        assert verify(trees.tree(base), base) is None
        (trees.tree(base) / "build").mkdir()
        (trees.tree(base) / "model.py").write_text("broken\n")
        assert "modified" in str(verify(trees.tree(base), base))
        assert state(repo) == before
    assert trees.notes == []
    assert list(folder.iterdir()) == []
    assert state(repo) == before
    assert worktrees(repo) == 1


def test_checkout(repo: Path, folder: Path) -> None:
    before, base, head = state(repo), git(repo, "rev-parse", "main"), git(repo, "rev-parse", "HEAD")
    with isolation(repo, "checkout", [base, head], folder) as trees:
        for commit_, text in ((base, "lr = 1\n"), (base, "lr = 1\n"), (head, "lr = 2\n"), (base, "lr = 1\n")):
            assert trees.tree(commit_) == repo
            assert (repo / "model.py").read_text() == text
            assert verify(repo, commit_) is None
            assert git(repo, "rev-parse", "--abbrev-ref", "HEAD") == "HEAD"
            assert (repo / "cache" / "weights.bin").read_bytes() == b"\0weights"
    assert trees.notes == []
    assert state(repo) == before


def test_checkout_from_a_detached_head(repo: Path, folder: Path) -> None:
    base, head = git(repo, "rev-parse", "main"), git(repo, "rev-parse", "feature")
    git(repo, "checkout", "-q", "--detach", head)
    before = state(repo)
    with isolation(repo, "checkout", [base], folder) as trees:
        trees.tree(base)
    assert state(repo) == before


def test_checkout_in_a_linked_worktree(repo: Path, folder: Path) -> None:
    other = repo.parent / "linked"
    git(repo, "worktree", "add", "-q", "-b", "side", str(other), "main")
    before, mine, head = state(repo), state(other), git(repo, "rev-parse", "feature")
    with isolation(other, "checkout", [head], folder) as trees:
        assert trees.tree(head) == other and state(repo) == before
    assert state(other) == mine and state(repo) == before


def test_a_worktree_of_the_branch_that_is_checked_out(repo: Path, folder: Path) -> None:
    head = resolve(repo, "feature")
    with isolation(repo, "worktree", [head], folder) as trees:
        assert trees.tree(head) != repo and (trees.tree(head) / "model.py").read_text() == "lr = 2\n"


@pytest.mark.parametrize("kind", ["worktree", "checkout"])
def test_a_branch_that_moves_is_not_followed(repo: Path, folder: Path, kind: str) -> None:
    base = resolve(repo, "main")
    with isolation(repo, kind, [base], folder) as trees:
        git(repo, "update-ref", "refs/heads/main", "feature")
        tree = trees.tree(base)
        assert (tree / "model.py").read_text() == "lr = 1\n"
        assert verify(tree, base) is None


@pytest.mark.parametrize("kind", ["worktree", "checkout"])
def test_hooks_do_not_run(repo: Path, folder: Path, kind: str) -> None:
    for name in ("post-checkout", "reference-transaction", "post-index-change"):
        hook = repo / ".git" / "hooks" / name
        hook.parent.mkdir(exist_ok=True)
        hook.write_text(f"#!/bin/sh\ntouch '{repo}/hook ran'\n")
        hook.chmod(0o755)
    base = resolve(repo, "main")
    with isolation(repo, kind, [base], folder) as trees:
        trees.tree(base)
    assert not (repo / "hook ran").exists()


@pytest.mark.parametrize("kind", ["worktree", "checkout"])
def test_a_commit_that_is_needed_later(repo: Path, folder: Path, kind: str) -> None:
    git(repo, "checkout", "-q", "main")
    blocked = commit(repo, "tracks the log", {"run.log": "theirs\n"})
    git(repo, "checkout", "-q", "feature")
    (repo / "run.log").write_text("the user's own\n")
    before, base, head = state(repo), git(repo, "rev-parse", "main~1"), git(repo, "rev-parse", "HEAD")
    with isolation(repo, kind, [head], folder) as trees:
        trees.tree(head)
        assert (trees.tree(base) / "model.py").read_text() == "lr = 1\n"
        if kind == "checkout":
            with pytest.raises(SpecError, match="run.log"):
                trees.tree(blocked)
    assert state(repo) == before
    assert worktrees(repo) == 1


def test_checkout_refuses_to_overwrite_an_ignored_file(repo: Path, folder: Path) -> None:
    git(repo, "checkout", "-q", "main")
    target = commit(repo, "tracks a log", {"tracked.log": "theirs\n"})
    git(repo, "checkout", "-q", "feature")
    (repo / "tracked.log").write_text("the user's own\n")
    before = state(repo)
    assert changes(repo) == []
    with (
        pytest.raises(SpecError, match=r"overwrite tracked.log"),
        isolation(repo, "checkout", [target], folder),
    ):
        pytest.fail("entered")
    assert state(repo) == before
    with isolation(repo, "worktree", [target], folder) as trees:
        assert (trees.tree(target) / "tracked.log").read_text() == "theirs\n"


@pytest.mark.parametrize(
    ("begin", "word"),
    [
        ("bisect start", "bisect"),
        ("cherry-pick clash", "cherry-pick"),
        ("merge clash", "merge"),
        ("rebase clash", "rebase"),
    ],
)
def test_checkout_refuses_an_operation_under_way(repo: Path, folder: Path, begin: str, word: str) -> None:
    git(repo, "checkout", "-q", "-b", "clash", "main")
    commit(repo, "clash", {"model.py": "lr = 5\n"})
    git(repo, "checkout", "-q", "feature")
    subprocess.run(["git", "-C", str(repo), *begin.split()], capture_output=True, check=False)
    head = git(repo, "rev-parse", "HEAD")
    with (
        pytest.raises(SpecError, match=f"a {word} is under way"),
        isolation(repo, "checkout", [head], folder),
    ):
        pytest.fail("entered")


def test_submodules(repo: Path, folder: Path, tmp_path: Path) -> None:
    library = tmp_path / "library"
    library.mkdir()
    git(library, "init", "-q")
    commit(library, "one", {"lib.py": "1\n"})
    git(repo, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(library), "third/library")
    git(repo, "commit", "-qm", "submodule")
    head, base = git(repo, "rev-parse", "HEAD"), git(repo, "rev-parse", "main")
    with (
        pytest.raises(SpecError, match="third/library.*isolation: checkout"),
        isolation(repo, "worktree", [head], folder),
    ):
        pytest.fail("entered")
    with (
        pytest.raises(SpecError, match="other submodule commits"),
        isolation(repo, "checkout", [base], folder),
    ):
        pytest.fail("entered")
    with isolation(repo, "checkout", [head], folder) as trees:
        assert (trees.tree(head) / "third" / "library" / "lib.py").exists()
        git(repo, "config", "submodule.third/library.ignore", "all")
        (repo / "third" / "library" / "lib.py").write_text("2\n")
        assert "third/library" in str(verify(repo, head))


def test_a_worktree_that_cannot_start_leaves_nothing(repo: Path, folder: Path) -> None:
    base, head = git(repo, "rev-parse", "main"), git(repo, "rev-parse", "HEAD")
    (repo / ".git" / "info").mkdir(exist_ok=True)
    (repo / ".git" / "info" / "attributes").write_text("model.py filter=picky\n")
    git(repo, "config", "filter.picky.smudge", "grep 'lr = 2'")
    git(repo, "config", "filter.picky.required", "true")
    with (
        pytest.raises(RunError, match="(?s)^git worktree failed.*model.py"),
        isolation(repo, "worktree", [head, base], folder),
    ):
        pytest.fail("entered")
    assert worktrees(repo) == 1
    assert list(folder.iterdir()) == []
    assert repair(repo) == []


def test_a_folder_where_a_worktree_should_go_is_not_touched(repo: Path, folder: Path) -> None:
    base, head = git(repo, "rev-parse", "main"), git(repo, "rev-parse", "HEAD")
    place = folder / base[:12]
    place.mkdir(parents=True)
    (place / "precious.txt").write_text("precious")
    with pytest.raises(RunError, match="in the way"), isolation(repo, "worktree", [head, base], folder):
        pytest.fail("entered")
    assert (place / "precious.txt").read_text() == "precious"
    assert worktrees(repo) == 1


def test_other_worktrees_of_the_user_are_not_forgotten(repo: Path, folder: Path) -> None:
    other = repo.parent / "unmounted"
    git(repo, "worktree", "add", "-q", "--detach", str(other))
    other.rename(repo.parent / "away")
    head = git(repo, "rev-parse", "HEAD")
    with isolation(repo, "worktree", [head], folder):
        pass
    (repo.parent / "away").rename(other)
    assert git(other, "rev-parse", "HEAD") == head
