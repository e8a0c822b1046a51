from __future__ import annotations

from pathlib import Path

import pytest

from rlspec.changes import changes
from rlspec.errors import SpecError
from rlspec.git import resolve, top
from tests.gitrepo import commit, git


def test_top(repo: Path, tmp_path: Path) -> None:
    assert top(repo / "new" / "added.py") == repo
    assert top(repo / "no" / "such" / "spec.yaml") == repo
    assert top(tmp_path) is None
    assert top(repo / ".git") is None


def test_environment_does_not_redirect(repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "-q")
    commit(other, "other", {"a": "a"})
    head = git(repo, "rev-parse", "HEAD")
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other / ".git" / "index"))
    assert top(repo) == repo
    assert resolve(repo, "HEAD") == head
    assert changes(repo) == []


def test_resolve(repo: Path) -> None:
    head, base = git(repo, "rev-parse", "feature"), git(repo, "rev-parse", "main")
    git(repo, "tag", "-a", "-m", "annotated", "v1", "main")
    for revision in ("HEAD", "feature", head, head[:12], "refs/heads/feature"):
        assert resolve(repo, revision) == head
    for revision in ("main", "HEAD~1", "v1", "v1^{commit}", "feature^"):
        assert resolve(repo, revision) == base


@pytest.mark.parametrize("revision", ["", " ", "-main", "--all", "main\n", "ma\0in"])
def test_resolve_malformed(tmp_path: Path, revision: str) -> None:
    with pytest.raises(SpecError, match="malformed"):
        resolve(tmp_path, revision)


def test_resolve_unknown_names_what_is_near(repo: Path) -> None:
    git(repo, "update-ref", "refs/remotes/origin/topic", "main")
    with pytest.raises(SpecError, match=r"'featre' is no commit of .*nearest: feature; .*git fetch"):
        resolve(repo, "featre")
    with pytest.raises(SpecError, match="nearest: origin/topic"):
        resolve(repo, "topic")
    for revision in ("main..feature", "^main", "main:model.py", "0" * 40):
        with pytest.raises(SpecError, match="is no commit"):
            resolve(repo, revision)


def test_resolve_ambiguous_and_shallow(repo: Path, tmp_path: Path) -> None:
    git(repo, "tag", "main", "feature")
    with pytest.raises(SpecError, match="ambiguous.*refs/heads"):
        resolve(repo, "main")
    assert resolve(repo, "refs/heads/main") == git(repo, "rev-parse", "refs/heads/main")
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{repo}", "shallow")
    with pytest.raises(SpecError, match="--unshallow"):
        resolve(tmp_path / "shallow", "HEAD~1")


def test_outside_of_a_repository(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no git work tree"):
        resolve(tmp_path, "main")
