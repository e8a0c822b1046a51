from __future__ import annotations

from pathlib import Path

import pytest

from rlspec import checkout
from rlspec.changes import verify
from rlspec.errors import RunError, SpecError
from rlspec.repository import isolation
from tests.gitrepo import ODD, commit, git, state


def test_what_an_arm_did_to_tracked_files_is_saved_and_undone(repo: Path, folder: Path) -> None:
    before, base, head = state(repo), git(repo, "rev-parse", "main"), git(repo, "rev-parse", "HEAD")
    with isolation(repo, "checkout", [base, head], folder) as trees:
        trees.tree(base)
        (repo / "model.py").write_text("lr = 'by the arm'\n")
        (repo / ODD).unlink()
        (repo / "made.py").write_text("made\n")
        (repo / "staged.py").write_text("staged\n")
        git(repo, "add", "staged.py", "model.py")
        trees.tree(head)
        assert verify(repo, head) is None
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
    with isolation(repo, "checkout", [head], folder) as trees:
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
    monkeypatch.setattr(checkout, "in_the_way", lambda root, commit_: [])
    with isolation(repo, "checkout", [target], folder) as trees:
        (repo / "run.log").write_text("the user's own\n")
        with pytest.raises(RunError, match="git checkout of .* failed"):
            trees.tree(target)
    assert (repo / "run.log").read_text() == "the user's own\n"
    assert git(repo, "rev-parse", "--abbrev-ref", "HEAD") == "feature"


def test_files_of_an_arm_in_the_way_of_the_restore_are_set_aside(repo: Path, folder: Path) -> None:
    before, base = state(repo), git(repo, "rev-parse", "main")
    with isolation(repo, "checkout", [base], folder) as trees:
        trees.tree(base)
        (repo / "new").write_text("a file where the branch has a folder\n")
        (repo / "model.py").write_text("changed too\n")
    assert (folder / "set-aside" / "new").read_text().startswith("a file where")
    assert any("set-aside" in note for note in trees.notes)
    assert state(repo) == before


def test_a_restore_over_a_moved_head(repo: Path, folder: Path) -> None:
    before, base = state(repo), git(repo, "rev-parse", "main")
    with isolation(repo, "checkout", [base], folder) as trees:
        trees.tree(base)
        git(repo, "checkout", "-q", "main")
        commit(repo, "by the arm", {"model.py": "lr = 7\n"})
        assert "HEAD" in str(verify(repo, base))
    assert state(repo) == before


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
    with isolation(repo, "checkout", [base], folder) as trees:
        trees.tree(base)
        assert verify(repo, base, [repo / "spec.yaml", repo / "second.yaml"]) is None
        (repo / "model.py").write_text("by the arm\n")
        assert (repo / "spec.yaml").read_text() == "kind: performance\n"
    assert state(repo) == before
    older = git(repo, "rev-parse", "main~1")
    with pytest.raises(SpecError, match="spec.yaml"), isolation(repo, "checkout", [older], folder):
        pytest.fail("entered")
    assert state(repo) == before


def test_the_folder_that_the_user_stands_in_stays(repo: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if tuple(map(int, git(repo, "version").split()[2].split(".")[:2])) < (2, 35):
        pytest.skip("git before 2.35 removes it")
    monkeypatch.chdir(repo / "new")
    number, base = Path.cwd().stat().st_ino, git(repo, "rev-parse", "main")
    with isolation(repo, "checkout", [base], folder) as trees:
        trees.tree(base)
        assert Path.cwd().exists() and not (repo / "new" / "added.py").exists()
    assert (repo / "new").stat().st_ino == number and (repo / "new" / "added.py").exists()


def test_a_git_that_does_not_end_is_named(repo: Path) -> None:
    checkout.await_git(repo)
    (repo / ".git" / "index.lock").touch()
    with pytest.raises(RunError, match="index.lock exists: .* delete the file and run again"):
        checkout.await_git(repo, 0.1)
