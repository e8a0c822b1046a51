from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rlspec import repository
from rlspec.errors import RunError, SpecError

ODD = "odd näme\nwith *newline*.txt"


@pytest.fixture(autouse=True)
def _own_git_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    for who in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{who}_NAME", "tester")
        monkeypatch.setenv(f"GIT_{who}_EMAIL", "tester@example.org")


def git(repo: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(repo), *arguments], check=True, capture_output=True)
    return os.fsdecode(done.stdout).strip()


def commit(repo: Path, message: str, files: dict[str, str]) -> str:
    for name, text in files.items():
        (repo / name).parent.mkdir(parents=True, exist_ok=True)
        (repo / name).write_text(text)
    git(repo, "--literal-pathspecs", "add", "-A", "--force", "--", *files)
    git(repo, "commit", "-q", "-m", message)
    return git(repo, "rev-parse", "HEAD")


def state(repo: Path) -> tuple[str, ...]:
    """What must be the same before and after: branch, commit, index, status with ignored files, and their bytes."""
    names = (git(repo, "ls-files", "--others", "-z") + git(repo, "ls-files", "-z")).split("\0")
    return (
        git(repo, "rev-parse", "--abbrev-ref", "HEAD"),
        git(repo, "rev-parse", "HEAD"),
        git(repo, "ls-files", "-s", "-z"),
        git(repo, "status", "--porcelain", "--ignored", "-z"),
        *(f"{name}: {(repo / name).read_bytes()!r}" for name in names if (repo / name).is_file()),
    )


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """`main` has one commit, `feature` (checked out) one more that changes, adds and removes files."""
    root = tmp_path / "re po"
    root.mkdir()
    git(root, "init", "-q", "-b", "main")
    commit(root, "base", {"model.py": "lr = 1\n", ODD: "odd\n", "old/gone.py": "x\n", ".gitignore": "cache/\n*.log\n"})
    git(root, "checkout", "-q", "-b", "feature")
    git(root, "rm", "-q", "old/gone.py")
    commit(root, "feature", {"model.py": "lr = 2\n", "new/added.py": "y\n"})
    (root / "cache").mkdir()
    (root / "cache" / "weights.bin").write_bytes(b"\0weights")
    (root / "run.log").write_text("kept\n")
    return root


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run folder"


# --- revisions and clean trees


def test_top(repo: Path, tmp_path: Path) -> None:
    assert repository.top(repo / "new" / "added.py") == repo
    assert repository.top(repo / "no" / "such" / "spec.yaml") == repo
    assert repository.top(tmp_path) is None
    assert repository.top(repo / ".git") is None


def test_environment_does_not_redirect(repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "-q")
    commit(other, "other", {"a": "a"})
    head = git(repo, "rev-parse", "HEAD")
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other / ".git" / "index"))
    assert repository.top(repo) == repo
    assert repository.resolve(repo, "HEAD") == head
    assert repository.changes(repo) == []


def test_resolve(repo: Path) -> None:
    head, base = git(repo, "rev-parse", "feature"), git(repo, "rev-parse", "main")
    git(repo, "tag", "-a", "-m", "annotated", "v1", "main")
    for revision in ("HEAD", "feature", head, head[:12], "refs/heads/feature"):
        assert repository.resolve(repo, revision) == head
    for revision in ("main", "HEAD~1", "v1", "v1^{commit}", "feature^"):
        assert repository.resolve(repo, revision) == base


@pytest.mark.parametrize("revision", ["", " ", "-main", "--all", "main\n", "ma\0in"])
def test_resolve_malformed(repo: Path, revision: str) -> None:
    with pytest.raises(SpecError, match="malformed"):
        repository.resolve(repo, revision)


def test_resolve_unknown_names_what_is_near(repo: Path) -> None:
    git(repo, "update-ref", "refs/remotes/origin/topic", "main")
    with pytest.raises(SpecError, match=r"'featre' is no commit of .*nearest: feature; .*git fetch"):
        repository.resolve(repo, "featre")
    with pytest.raises(SpecError, match="nearest: origin/topic"):
        repository.resolve(repo, "topic")
    for revision in ("main..feature", "^main", "main:model.py", "0" * 40):
        with pytest.raises(SpecError, match="is no commit"):
            repository.resolve(repo, revision)


def test_resolve_ambiguous_and_shallow(repo: Path, tmp_path: Path) -> None:
    git(repo, "tag", "main", "feature")
    with pytest.raises(SpecError, match="ambiguous.*refs/heads"):
        repository.resolve(repo, "main")
    assert repository.resolve(repo, "refs/heads/main") == git(repo, "rev-parse", "refs/heads/main")
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{repo}", "shallow")
    with pytest.raises(SpecError, match="--unshallow"):
        repository.resolve(tmp_path / "shallow", "HEAD~1")


def test_outside_of_a_repository(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no git work tree"):
        repository.resolve(tmp_path, "main")


def test_changes(repo: Path) -> None:
    assert repository.changes(repo) == []
    (repo / ODD).write_text("changed\n")
    (repo / "model.py").unlink()
    (repo / "sub dir").mkdir()
    (repo / "sub dir" / "b.py").write_text("b")
    (repo / "staged.py").write_text("s")
    git(repo, "add", "staged.py")
    odd = ascii(ODD)
    expected = ["added staged.py", "deleted model.py", f"modified {odd}", "untracked sub dir/b.py"]
    assert sorted(repository.changes(repo)) == expected
    assert sorted(repository.changes(repo / "new")) == expected


def test_changes_are_seen_whatever_the_configuration_says(repo: Path) -> None:
    git(repo, "config", "status.showUntrackedFiles", "no")
    git(repo, "config", "core.fsmonitor", "true-enough")
    git(repo, "config", "core.quotePath", "true")
    (repo / "ü.py").write_text("u")
    assert repository.changes(repo) == ["untracked ü.py"]


@pytest.mark.parametrize("flag", ["--assume-unchanged", "--skip-worktree"])
def test_changes_that_git_was_told_to_overlook(repo: Path, flag: str) -> None:
    git(repo, "update-index", flag, "model.py", "new/added.py")
    assert repository.changes(repo) == []
    (repo / "model.py").write_text("lr = 3\n")
    assert repository.changes(repo) == ["modified, though git was told to overlook it: model.py"]


def test_ignored_paths_do_not_count(repo: Path) -> None:
    (repo / "specs").mkdir()
    (repo / "specs" / "mine.yaml").write_text("kind: correctness\n")
    (repo / "specs" / "link.yaml").symlink_to("mine.yaml")
    (repo / "workspace" / "deep").mkdir(parents=True)
    (repo / "workspace" / "deep" / "plan.json").write_text("{}")
    ignore = [repo / "specs" / "link.yaml", repo / "workspace"]
    assert repository.changes(repo, ignore) == []
    assert repository.changes(repo, [repo / "workspace"]) == ["untracked specs/link.yaml", "untracked specs/mine.yaml"]
    assert len(repository.changes(repo, [repo])) == 3, "a root that holds the repository would hide every change"
    assert len(repository.changes(repo, [repo.parent])) == 3


def test_require_clean(repo: Path) -> None:
    repository.require_clean(repo)
    for number in range(12):
        (repo / f"u{number:02}.py").write_text("u")
    with pytest.raises(SpecError) as error:
        repository.require_clean(repo)
    text = str(error.value)
    assert "untracked u00.py" in text and "u09.py" in text and "u10.py" not in text
    assert "and 2 more" in text and "git stash -u" in text


def test_verify(repo: Path) -> None:
    head = git(repo, "rev-parse", "HEAD")
    assert repository.verify(repo, head) is None
    (repo / "left.txt").write_text("untracked files are no change of the commit")
    assert repository.verify(repo, head) is None
    (repo / "model.py").write_text("lr = 9\n")
    assert "modified model.py" in str(repository.verify(repo, head))
    assert repository.verify(repo, head, [repo / "model.py"]) is None
    git(repo, "commit", "-qam", "moved")
    assert "HEAD" in str(repository.verify(repo, head))


# --- lock


def test_lock_refuses_a_second(repo: Path) -> None:
    other = repo.parent / "linked"
    git(repo, "worktree", "add", "-q", "--detach", str(other))
    with repository.lock(repo, "run specs/a.yaml"):
        for place in (repo, other):
            with (
                pytest.raises(SpecError, match=rf"run specs/a.yaml \(pid {os.getpid()} on .*since 20"),
                repository.lock(place),
            ):
                pass
    with repository.lock(other):
        pass
    assert repository.changes(repo) == []


def test_lock_dies_with_its_process(repo: Path) -> None:
    code = "import sys, pathlib; from rlspec.repository import lock\n"
    code += "with lock(pathlib.Path(sys.argv[1])): print('ready', flush=True); sys.stdin.read()"
    with _child(code, repo) as child:
        with pytest.raises(SpecError, match=f"pid {child.pid}"), repository.lock(repo):
            pass
        child.kill()
        child.wait()
    with repository.lock(repo):
        pass


# --- isolation


def test_worktrees(repo: Path, folder: Path) -> None:
    before, base, head = state(repo), git(repo, "rev-parse", "main"), git(repo, "rev-parse", "HEAD")
    with repository.isolation(repo, "worktree", [base, head, base], folder) as trees:
        assert (trees.tree(base) / "model.py").read_text() == "lr = 1\n"
        assert (trees.tree(head) / "model.py").read_text() == "lr = 2\n"
        assert (trees.tree(base) / ODD).exists()
        assert len(list(folder.iterdir())) == 2
        assert repository.verify(trees.tree(base), base) is None
        (trees.tree(base) / "build").mkdir()
        (trees.tree(base) / "model.py").write_text("broken\n")
        assert "modified" in str(repository.verify(trees.tree(base), base))
        assert state(repo) == before
    assert trees.notes == []
    assert list(folder.iterdir()) == []
    assert state(repo) == before
    assert git(repo, "worktree", "list", "--porcelain").count("worktree ") == 1


@pytest.mark.parametrize("kind", ["worktree", "checkout"])
@pytest.mark.parametrize("failure", [RunError, KeyboardInterrupt, SystemExit])
def test_the_tree_comes_back_after_an_exception(
    repo: Path, folder: Path, kind: str, failure: type[BaseException]
) -> None:
    before, base = state(repo), git(repo, "rev-parse", "main")
    with pytest.raises(failure), repository.isolation(repo, kind, [base], folder) as trees:
        assert (trees.tree(base) / "model.py").read_text() == "lr = 1\n"
        raise failure
    assert state(repo) == before
    assert repository.repair(repo) == []
    assert not folder.exists() or list(folder.iterdir()) == []


def test_checkout(repo: Path, folder: Path) -> None:
    before, base, head = state(repo), git(repo, "rev-parse", "main"), git(repo, "rev-parse", "HEAD")
    with repository.isolation(repo, "checkout", [base, head], folder) as trees:
        for commit_, text in ((base, "lr = 1\n"), (base, "lr = 1\n"), (head, "lr = 2\n"), (base, "lr = 1\n")):
            assert trees.tree(commit_) == repo
            assert (repo / "model.py").read_text() == text
            assert repository.verify(repo, commit_) is None
            assert git(repo, "rev-parse", "--abbrev-ref", "HEAD") == "HEAD"
            assert (repo / "cache" / "weights.bin").read_bytes() == b"\0weights"
    assert trees.notes == []
    assert state(repo) == before


def test_checkout_from_a_detached_head(repo: Path, folder: Path) -> None:
    base, head = git(repo, "rev-parse", "main"), git(repo, "rev-parse", "feature")
    git(repo, "checkout", "-q", "--detach", head)
    before = state(repo)
    with repository.isolation(repo, "checkout", [base], folder) as trees:
        trees.tree(base)
    assert state(repo) == before


@pytest.mark.parametrize("kind", ["worktree", "checkout"])
def test_a_branch_that_moves_is_not_followed(repo: Path, folder: Path, kind: str) -> None:
    base = repository.resolve(repo, "main")
    with repository.isolation(repo, kind, [base], folder) as trees:
        git(repo, "update-ref", "refs/heads/main", "feature")
        tree = trees.tree(base)
        assert (tree / "model.py").read_text() == "lr = 1\n"
        assert repository.verify(tree, base) is None


def test_a_worktree_of_the_branch_that_is_checked_out(repo: Path, folder: Path) -> None:
    head = repository.resolve(repo, "feature")
    with repository.isolation(repo, "worktree", [head], folder) as trees:
        assert trees.tree(head) != repo and (trees.tree(head) / "model.py").read_text() == "lr = 2\n"


def test_checkout_in_a_linked_worktree(repo: Path, folder: Path) -> None:
    other = repo.parent / "linked"
    git(repo, "worktree", "add", "-q", "-b", "side", str(other), "main")
    before, mine, head = state(repo), state(other), git(repo, "rev-parse", "feature")
    with repository.isolation(other, "checkout", [head], folder) as trees:
        assert trees.tree(head) == other and state(repo) == before
    assert state(other) == mine and state(repo) == before


@pytest.mark.parametrize("kind", ["worktree", "checkout"])
def test_hooks_do_not_run(repo: Path, folder: Path, kind: str) -> None:
    for name in ("post-checkout", "reference-transaction", "post-index-change"):
        hook = repo / ".git" / "hooks" / name
        hook.parent.mkdir(exist_ok=True)
        hook.write_text(f"#!/bin/sh\ntouch '{repo}/hook ran'\n")
        hook.chmod(0o755)
    base = repository.resolve(repo, "main")
    with repository.isolation(repo, kind, [base], folder) as trees:
        trees.tree(base)
    assert not (repo / "hook ran").exists()


def test_what_an_arm_did_to_tracked_files_is_saved_and_undone(repo: Path, folder: Path) -> None:
    before, base, head = state(repo), git(repo, "rev-parse", "main"), git(repo, "rev-parse", "HEAD")
    with repository.isolation(repo, "checkout", [base, head], folder) as trees:
        trees.tree(base)
        (repo / "model.py").write_text("lr = 'by the arm'\n")
        (repo / ODD).unlink()
        (repo / "made.py").write_text("made\n")
        (repo / "staged.py").write_text("staged\n")
        git(repo, "add", "staged.py", "model.py")
        trees.tree(head)
        assert repository.verify(repo, head) is None
        (repo / "model.py").write_text("lr = 'again'\n")
    first, second = sorted(folder.glob("*.patch"))
    assert {first.name, second.name} == {f"{base[:12]}.patch", f"{head[:12]}.patch"}
    saved = (folder / f"{base[:12]}.patch").read_text()
    assert "by the arm" in saved and "staged.py" in saved
    assert (repo / "made.py").read_text() == "made\n" and (repo / "staged.py").read_text() == "staged\n"
    assert sum("tracked files" in note for note in trees.notes) == 2
    assert "made.py, staged.py" in trees.notes[-1]
    (repo / "made.py").unlink()
    (repo / "staged.py").unlink()
    assert state(repo) == before


def test_names_that_look_like_patterns(repo: Path, folder: Path) -> None:
    commit(repo, "patterns", {":(odd)*.py": "1\n", "[m]odel.py": "1\n"})
    before, head = state(repo), git(repo, "rev-parse", "HEAD")
    with repository.isolation(repo, "checkout", [head], folder) as trees:
        trees.tree(head)
        for name in (":(odd)*.py", "[m]odel.py", ODD):
            (repo / name).write_text("2\n")
    assert state(repo) == before
    assert ":(odd)*.py" in trees.notes[0]


def test_git_itself_refuses_what_appears_in_the_last_moment(
    repo: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git(repo, "checkout", "-q", "main")
    target = commit(repo, "tracks the log", {"run.log": "theirs\n"})
    git(repo, "checkout", "-q", "feature")
    monkeypatch.setattr(repository, "_in_the_way", lambda root, commit_: [])
    with repository.isolation(repo, "checkout", [target], folder) as trees:
        (repo / "run.log").write_text("the user's own\n")
        with pytest.raises(RunError, match="git checkout of .* failed"):
            trees.tree(target)
    assert (repo / "run.log").read_text() == "the user's own\n"
    assert git(repo, "rev-parse", "--abbrev-ref", "HEAD") == "feature"


def test_files_of_an_arm_in_the_way_of_the_restore_are_set_aside(repo: Path, folder: Path) -> None:
    before, base = state(repo), git(repo, "rev-parse", "main")
    with repository.isolation(repo, "checkout", [base], folder) as trees:
        trees.tree(base)
        (repo / "new").write_text("a file where the branch has a folder\n")
        (repo / "model.py").write_text("changed too\n")
    assert (folder / "set-aside" / "new").read_text().startswith("a file where")
    assert any("set-aside" in note for note in trees.notes)
    assert state(repo) == before


def test_a_restore_over_a_moved_head(repo: Path, folder: Path) -> None:
    before, base = state(repo), git(repo, "rev-parse", "main")
    with repository.isolation(repo, "checkout", [base], folder) as trees:
        trees.tree(base)
        git(repo, "checkout", "-q", "main")
        commit(repo, "by the arm", {"model.py": "lr = 7\n"})
        assert "HEAD" in str(repository.verify(repo, base))
    assert state(repo) == before


def test_checkout_refuses_to_overwrite_an_ignored_file(repo: Path, folder: Path) -> None:
    git(repo, "checkout", "-q", "main")
    target = commit(repo, "tracks a log", {"tracked.log": "theirs\n"})
    git(repo, "checkout", "-q", "feature")
    (repo / "tracked.log").write_text("the user's own\n")
    before = state(repo)
    assert repository.changes(repo) == []
    with (
        pytest.raises(SpecError, match=r"overwrite tracked.log"),
        repository.isolation(repo, "checkout", [target], folder),
    ):
        pytest.fail("entered")
    assert state(repo) == before
    with repository.isolation(repo, "worktree", [target], folder) as trees:
        assert (trees.tree(target) / "tracked.log").read_text() == "theirs\n"


def test_an_edited_spec_survives_a_checkout(repo: Path, folder: Path) -> None:
    git(repo, "checkout", "-q", "main")
    commit(repo, "spec", {"spec.yaml": "kind: correctness\n"})
    git(repo, "checkout", "-q", "feature")
    git(repo, "rebase", "-q", "main")
    base = git(repo, "rev-parse", "main")
    (repo / "spec.yaml").write_text("kind: performance\n")
    (repo / "second.yaml").write_text("kind: parity\n")
    git(repo, "add", "second.yaml")
    before = state(repo)
    with repository.isolation(repo, "checkout", [base], folder) as trees:
        trees.tree(base)
        assert repository.verify(repo, base, [repo / "spec.yaml", repo / "second.yaml"]) is None
        (repo / "model.py").write_text("by the arm\n")
        assert (repo / "spec.yaml").read_text() == "kind: performance\n"
    assert state(repo) == before
    older = git(repo, "rev-parse", "main~1")
    with pytest.raises(SpecError, match="spec.yaml"), repository.isolation(repo, "checkout", [older], folder):
        pytest.fail("entered")
    assert state(repo) == before


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
        repository.isolation(repo, "checkout", [head], folder),
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
        repository.isolation(repo, "worktree", [head], folder),
    ):
        pytest.fail("entered")
    with (
        pytest.raises(SpecError, match="other submodule commits"),
        repository.isolation(repo, "checkout", [base], folder),
    ):
        pytest.fail("entered")
    with repository.isolation(repo, "checkout", [head], folder) as trees:
        assert (trees.tree(head) / "third" / "library" / "lib.py").exists()
        git(repo, "config", "submodule.third/library.ignore", "all")
        (repo / "third" / "library" / "lib.py").write_text("2\n")
        assert "third/library" in str(repository.verify(repo, head))


def test_a_worktree_that_cannot_start_leaves_nothing(repo: Path, folder: Path) -> None:
    base, head = git(repo, "rev-parse", "main"), git(repo, "rev-parse", "HEAD")
    (repo / ".git" / "info").mkdir(exist_ok=True)
    (repo / ".git" / "info" / "attributes").write_text("model.py filter=picky\n")
    git(repo, "config", "filter.picky.smudge", "grep 'lr = 2'")
    git(repo, "config", "filter.picky.required", "true")
    with (
        pytest.raises(RunError, match="(?s)^git worktree failed.*model.py"),
        repository.isolation(repo, "worktree", [head, base], folder),
    ):
        pytest.fail("entered")
    assert git(repo, "worktree", "list", "--porcelain").count("worktree ") == 1
    assert list(folder.iterdir()) == []
    assert repository.repair(repo) == []


@pytest.mark.parametrize("kind", ["worktree", "checkout"])
def test_a_commit_that_is_needed_later(repo: Path, folder: Path, kind: str) -> None:
    git(repo, "checkout", "-q", "main")
    blocked = commit(repo, "tracks the log", {"run.log": "theirs\n"})
    git(repo, "checkout", "-q", "feature")
    (repo / "run.log").write_text("the user's own\n")
    before, base, head = state(repo), git(repo, "rev-parse", "main~1"), git(repo, "rev-parse", "HEAD")
    with repository.isolation(repo, kind, [head], folder) as trees:
        trees.tree(head)
        assert (trees.tree(base) / "model.py").read_text() == "lr = 1\n"
        if kind == "checkout":
            with pytest.raises(SpecError, match="run.log"):
                trees.tree(blocked)
    assert state(repo) == before
    assert git(repo, "worktree", "list", "--porcelain").count("worktree ") == 1


def test_remove_worktree(repo: Path, tmp_path: Path) -> None:
    place = tmp_path / "left behind"
    git(repo, "worktree", "add", "-q", "--detach", str(place), "main")
    (place / "made.bin").write_bytes(b"made")
    repository.remove_worktree(place)
    assert not place.exists()
    assert git(repo, "worktree", "list", "--porcelain").count("worktree ") == 1
    orphan = tmp_path / "orphan"
    orphan.mkdir()
    (orphan / ".git").write_text("gitdir: /nowhere/at/all\n")
    repository.remove_worktree(orphan)
    assert not orphan.exists()


def test_a_folder_where_a_worktree_should_go_is_not_touched(repo: Path, folder: Path) -> None:
    base, head = git(repo, "rev-parse", "main"), git(repo, "rev-parse", "HEAD")
    place = folder / base[:12]
    place.mkdir(parents=True)
    (place / "precious.txt").write_text("precious")
    with pytest.raises(RunError, match="in the way"), repository.isolation(repo, "worktree", [head, base], folder):
        pytest.fail("entered")
    assert (place / "precious.txt").read_text() == "precious"
    assert git(repo, "worktree", "list", "--porcelain").count("worktree ") == 1


def test_other_worktrees_of_the_user_are_not_forgotten(repo: Path, folder: Path) -> None:
    other = repo.parent / "unmounted"
    git(repo, "worktree", "add", "-q", "--detach", str(other))
    other.rename(repo.parent / "away")
    head = git(repo, "rev-parse", "HEAD")
    with repository.isolation(repo, "worktree", [head], folder):
        pass
    (repo.parent / "away").rename(other)
    assert git(other, "rev-parse", "HEAD") == head


# --- signals and kills

ARM = """
import pathlib, signal, sys
from rlspec import repository
repo, folder, kind, commit = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3], sys.argv[4]
def end(number, frame): raise SystemExit(128 + number)
signal.signal(signal.SIGTERM, end)
with repository.lock(repo):
    for line in repository.repair(repo): print(line, flush=True)
    with repository.isolation(repo, kind, [commit], folder) as trees:
        tree = trees.tree(commit)
        print("ready", flush=True)
        sys.stdin.read()
"""


class _child:
    """A process that has printed `ready`; its end is awaited."""

    def __init__(self, code: str, *arguments: object, wait: bool = True) -> None:
        command = [sys.executable, "-c", code, *map(str, arguments)]
        root = str(Path(repository.__file__).parents[1])
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": root},
            start_new_session=True,
        )  # fmt: skip
        self.lines: list[str] = []
        if wait:
            assert self.process.stdout is not None
            for line in self.process.stdout:
                self.lines.append(line.strip())
                if line.strip() == "ready":
                    break

    def __enter__(self) -> subprocess.Popen[str]:
        return self.process

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


def _eventually(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 30
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


@pytest.mark.parametrize("kind", ["worktree", "checkout"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 143)])
def test_signal_in_the_middle_of_an_arm(repo: Path, folder: Path, kind: str, number: int, code: int) -> None:
    before, base = state(repo), git(repo, "rev-parse", "main")
    with _child(ARM, repo, folder, kind, base) as child:
        os.killpg(child.pid, number)
        assert child.wait(30) == code
    assert state(repo) == before
    assert git(repo, "worktree", "list", "--porcelain").count("worktree ") == 1
    assert repository.repair(repo) == []


@pytest.mark.parametrize("kind", ["worktree", "checkout"])
def test_the_next_run_repairs_after_a_kill(repo: Path, folder: Path, kind: str) -> None:
    before, base = state(repo), git(repo, "rev-parse", "main")
    with _child(ARM, repo, folder, kind, base) as child:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait(30)
    if kind == "checkout":
        assert git(repo, "rev-parse", "HEAD") == base and state(repo) != before
        (repo / "model.py").write_text("half written by the killed arm\n")
    else:
        assert len(list(folder.iterdir())) == 1
    second = _child(ARM, repo, folder, kind, base)
    with second as child:
        assert child.communicate("")[0] == ""
    assert f"rlspec (pid {second.process.pid}" not in second.lines[0]
    assert "was cut off" in second.lines[0] and second.lines[-1] == "ready"
    assert ("back on feature" if kind == "checkout" else "worktrees are removed") in second.lines[0]
    assert state(repo) == before
    assert git(repo, "worktree", "list", "--porcelain").count("worktree ") == 1
    assert [path.name for path in folder.iterdir()] == ([f"{base[:12]}.patch"] if kind == "checkout" else [])
    assert repository.repair(repo) == []


def test_repair_around_a_spec_that_the_kill_took_off_the_tree(repo: Path, folder: Path) -> None:
    spec = repo / "new" / "added.py"
    before, base = state(repo), git(repo, "rev-parse", "main")
    assert repository.repair_around(spec) == [] and repository.repair_around(folder) == []
    with _child(ARM, repo, folder, "checkout", base) as child:
        assert not spec.parent.exists()
        with pytest.raises(SpecError, match="is using"):
            repository.repair_around(spec)
        child.kill()
        child.wait(30)
    assert "back on feature" in repository.repair_around(spec)[0]
    assert state(repo) == before


def test_the_folder_that_the_user_stands_in_stays(repo: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if tuple(map(int, git(repo, "version").split()[2].split(".")[:2])) < (2, 35):
        pytest.skip("git before 2.35 removes it")
    monkeypatch.chdir(repo / "new")
    number, base = Path.cwd().stat().st_ino, git(repo, "rev-parse", "main")
    with repository.isolation(repo, "checkout", [base], folder) as trees:
        trees.tree(base)
        assert Path.cwd().exists() and not (repo / "new" / "added.py").exists()
    assert (repo / "new").stat().st_ino == number and (repo / "new" / "added.py").exists()


def test_repair_removes_worktrees_whose_folder_is_gone(repo: Path, folder: Path) -> None:
    base = git(repo, "rev-parse", "main")
    with _child(ARM, repo, folder, "worktree", base) as child:
        child.kill()
        child.wait(30)
    subprocess.run(["rm", "-rf", str(folder)], check=True)
    assert "worktrees are removed" in repository.repair(repo)[0]
    assert git(repo, "worktree", "list", "--porcelain").count("worktree ") == 1


def test_repair_leaves_a_tree_that_was_moved_by_hand(repo: Path, folder: Path) -> None:
    base = git(repo, "rev-parse", "main")
    with _child(ARM, repo, folder, "checkout", base) as child:
        child.kill()
        child.wait(30)
    git(repo, "checkout", "-q", "main")
    (repo / "model.py").write_text("work of the user\n")
    before = state(repo)
    assert "was moved since and stays as it is" in repository.repair(repo)[0]
    assert state(repo) == before
    assert repository.repair(repo) == []


def test_repair_says_what_a_cut_off_git_leaves(repo: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = git(repo, "rev-parse", "main")
    monkeypatch.setattr(repository, "_undo", lambda journal: [])
    with repository.isolation(repo, "checkout", [base], folder):
        (repo / "model.py").write_text("lr = 1\n")  # switched already, but HEAD and index were not
    monkeypatch.undo()
    lock = repo / ".git" / "index.lock"
    lock.touch()
    monkeypatch.setattr(repository._await_git, "__defaults__", (0.1,))
    with pytest.raises(RunError, match="index.lock exists"):
        repository.repair(repo)
    lock.unlink()
    lines = repository.repair(repo)
    assert "is on feature already" in lines[0] and "model.py" in lines[1]
    assert repository.repair(repo) == []


def _slow(repo: Path, marker: Path) -> None:
    """From now on a checkout of model.py says that it began, then takes a while."""
    (repo / ".git" / "info").mkdir(exist_ok=True)
    (repo / ".git" / "info" / "attributes").write_text("model.py filter=slow\n")
    git(repo, "config", "filter.slow.smudge", f"touch '{marker}'; sleep 0.4; cat")
    git(repo, "config", "filter.slow.clean", "cat")


def test_interrupt_while_git_switches_to_the_arm(repo: Path, folder: Path, tmp_path: Path) -> None:
    before, base, marker = state(repo), git(repo, "rev-parse", "main"), tmp_path / "began"
    _slow(repo, marker)
    with _child(ARM, repo, folder, "checkout", base, wait=False) as child:
        assert _eventually(marker.exists)
        os.killpg(child.pid, signal.SIGINT)
        assert child.wait(30) == -signal.SIGINT
        assert child.stdout is not None and child.stdout.read() == "", "the arm must not start"
    assert state(repo) == before
    assert not (repo / ".git" / "index.lock").exists()


def test_interrupts_during_the_restore(repo: Path, folder: Path, tmp_path: Path) -> None:
    before, base, marker = state(repo), git(repo, "rev-parse", "main"), tmp_path / "began"
    _slow(repo, marker)
    with _child(ARM, repo, folder, "checkout", base) as child:
        marker.unlink()
        os.killpg(child.pid, signal.SIGINT)
        assert _eventually(marker.exists)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            os.killpg(child.pid, number)
        assert child.wait(30) in (-signal.SIGINT, 143)
    assert state(repo) == before
    assert repository.repair(repo) == []


def test_kill_while_git_switches(repo: Path, folder: Path, tmp_path: Path) -> None:
    before, base, marker = state(repo), git(repo, "rev-parse", "main"), tmp_path / "began"
    _slow(repo, marker)
    with _child(ARM, repo, folder, "checkout", base, wait=False) as child:
        assert _eventually(marker.exists)
        os.killpg(child.pid, signal.SIGKILL)
        child.wait(30)
    assert "was cut off while" in repository.repair(repo)[0], "git went on alone, and repair waited for it"
    assert state(repo) == before
