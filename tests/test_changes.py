from __future__ import annotations

from pathlib import Path

import pytest

from rlspec.changes import changes, require_clean, verify
from rlspec.errors import SpecError
from tests.gitrepo import ODD, git


def test_changes(repo: Path) -> None:
    assert changes(repo) == []
    (repo / ODD).write_text("changed\n")
    (repo / "model.py").unlink()
    (repo / "sub dir").mkdir()
    (repo / "sub dir" / "b.py").write_text("b")
    (repo / "staged.py").write_text("s")
    git(repo, "add", "staged.py")
    odd = ascii(ODD)
    expected = ["added staged.py", "deleted model.py", f"modified {odd}", "untracked sub dir/b.py"]
    assert sorted(changes(repo)) == expected
    assert sorted(changes(repo / "new")) == expected


def test_changes_are_seen_whatever_the_configuration_says(repo: Path) -> None:
    git(repo, "config", "status.showUntrackedFiles", "no")
    git(repo, "config", "core.fsmonitor", "true-enough")
    git(repo, "config", "core.quotePath", "true")
    (repo / "ü.py").write_text("u")
    assert changes(repo) == ["untracked ü.py"]


@pytest.mark.parametrize("flag", ["--assume-unchanged", "--skip-worktree"])
def test_changes_that_git_was_told_to_overlook(repo: Path, flag: str) -> None:
    git(repo, "update-index", flag, "model.py", "new/added.py")
    assert changes(repo) == []
    (repo / "model.py").write_text("lr = 3\n")
    assert changes(repo) == ["modified, though git was told to overlook it: model.py"]


def test_ignored_paths_do_not_count(repo: Path) -> None:
    (repo / "specs").mkdir()
    (repo / "specs" / "mine.yaml").write_text("kind: correctness\n")
    (repo / "specs" / "link.yaml").symlink_to("mine.yaml")
    (repo / "workspace" / "deep").mkdir(parents=True)
    (repo / "workspace" / "deep" / "plan.json").write_text("{}")
    ignore = [repo / "specs" / "link.yaml", repo / "workspace"]
    assert changes(repo, ignore) == []
    assert changes(repo, [repo / "workspace"]) == ["untracked specs/link.yaml", "untracked specs/mine.yaml"]
    assert len(changes(repo, [repo])) == 3, "a root that holds the repository would hide every change"
    assert len(changes(repo, [repo.parent])) == 3


def test_require_clean(repo: Path) -> None:
    require_clean(repo)
    for number in range(12):
        (repo / f"u{number:02}.py").write_text("u")
    with pytest.raises(SpecError) as error:
        require_clean(repo)
    text = str(error.value)
    assert "untracked u00.py" in text and "u09.py" in text and "u10.py" not in text
    assert "and 2 more" in text and "git stash -u" in text


def test_verify(repo: Path) -> None:
    head = git(repo, "rev-parse", "HEAD")
    assert verify(repo, head) is None
    (repo / "left.txt").write_text("untracked files are no change of the commit")
    assert verify(repo, head) is None
    (repo / "model.py").write_text("lr = 9\n")
    assert "modified model.py" in str(verify(repo, head))
    assert verify(repo, head, [repo / "model.py"]) is None
    git(repo, "commit", "-qam", "moved")
    assert "HEAD" in str(verify(repo, head))
