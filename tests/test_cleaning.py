from __future__ import annotations

import shutil
import subprocess

import pytest

from rlspec import cleaning, repository, runs
from tests.test_runs import made
from tests.tiny import rlspec


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def repo(here, monkeypatch):
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "a user")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "user@example.org")
    place = here / "trainer"
    git(here, "init", "-q", "-b", "main", place)
    (place / "train.py").write_text("x = 1\n")
    git(place, "add", "-A")
    git(place, "commit", "-qm", "one")
    return place


def git(place, *arguments):
    return subprocess.run(["git", "-C", place, *arguments], check=True, capture_output=True, text=True).stdout


def full(base, **options):
    folder = made(base, **options)
    (folder.logging / "x.log").write_text("x" * 2**20)
    runs.publish(folder)
    return folder


def left(here):
    return {folder.name for folder in runs.folders(here)}


def test_all_but_the_newest_runs_of_each_spec_go_after_showing_what_and_how_much(here):
    mine = [full(here, stem="s", spec="/s.yaml") for _ in range(4)]
    other = full(here, stem="t", spec="/t.yaml")
    (here / "keep").write_text("mine")
    done = rlspec("clean", "--keep", "2", "--yes")
    shown = [line.split(maxsplit=2) for line in done.out.splitlines()]
    assert [path for _, _, path in shown[:4]] == [str(p) for one in mine[:2] for p in (one.workspace, one.logging)]
    assert shown[4] == ["2.0", "MiB", "in all"] and done.out.endswith("removed 4 folders\n")
    assert left(here) == {mine[2].name, mine[3].name, other.name}
    assert not mine[0].logging.exists() and mine[3].logging.exists() and (here / "keep").exists()
    assert (other.workspace.parent / "latest").exists()


def test_nothing_goes_without_a_yes(here):
    for _ in range(2):
        full(here)
    before = left(here)
    for answer in ("", "n\n", "\n"):
        done = rlspec("clean", "--keep", "0", answer=answer)
        assert done.code == 0 and "--yes removes without asking" in done.out and left(here) == before
    assert rlspec("clean", "--keep", "0", answer="y\n").code == 0 and left(here) == set()


def test_nothing_to_remove(here):
    full(here)
    assert rlspec("clean", "--yes").out == "nothing to remove\n"


def test_keep_none_leaves_no_link_that_leads_nowhere(here):
    full(here)
    assert rlspec("clean", "--keep", "0", "--yes").code == 0
    assert sorted(path.name for path in here.rglob("*")) == [".gitignore", ".gitignore", "logging", "workspace"]


def test_folders_in_which_nothing_ran_count_as_runs_of_their_spec(here):
    places = []
    for second in range(3):
        folder = made(here, plan=second == 1)
        places.append(folder.workspace.rename(folder.workspace.with_name(f"20261129T00000{second}Z-s")))
    (places[1] / "plan.json").write_text("{")
    assert cleaning.find(here, 1).paths == (places[0], places[1])


def test_folders_of_the_users_among_the_runs_stay(here):
    places = full(here).workspace.parent, full(here).logging.parent
    mine = ["mynotes/a.txt", "20261129T000000Z-s/a.txt", "foreign/plan.json", "empty/deep/b"]
    for file in [place / name for place in places for name in mine]:
        file.parent.mkdir(parents=True)
        file.write_text("{}")
    renamed = full(here)
    for place in (renamed.workspace, renamed.logging):
        place.rename(place.with_name("the-good-one"))
    done = rlspec("clean", "--keep", "0", "--yes")
    assert "the-good-one" in done.out, "it says in its plan that it is a run"
    files = sorted(path.relative_to(here) for path in here.rglob("*") if path.is_file() and path.name != ".gitignore")
    assert files == sorted(place.relative_to(here) / name for place in places for name in mine)


def test_a_worktree_that_a_killed_run_left_goes_from_disk_and_from_gits_list(here, repo):
    folder = full(here)
    tree = folder.workspace / "0123456789ab"
    git(repo, "worktree", "add", "-q", "--detach", tree)
    done = rlspec("clean", "--yes")  # the run itself is one of those to keep
    assert str(tree) in done.out and done.out.endswith("removed 1 folders\n")
    assert folder.plan.exists() and not tree.exists() and git(repo, "worktree", "list").count("\n") == 1


def test_an_old_run_goes_with_its_worktree(here, repo):
    folder = full(here)
    git(repo, "worktree", "add", "-q", "--detach", folder.workspace / "0123456789ab")
    rlspec("clean", "--keep", "0", "--yes")
    assert not folder.workspace.exists() and git(repo, "worktree", "list").count("\n") == 1


def test_a_worktree_in_use_is_left_alone(here, repo):
    folder = full(here)
    tree = folder.workspace / "0123456789ab"
    git(repo, "worktree", "add", "-q", "--detach", tree)
    with repository.lock(repo):
        done = rlspec("clean", "--keep", "0", "--yes")
    assert done.code == 2 and "is using" in done.err and tree.exists() and folder.plan.exists()


def test_a_worktree_whose_repository_is_gone(here, repo):
    folder = full(here)
    git(repo, "worktree", "add", "-q", "--detach", folder.workspace / "0123456789ab")
    shutil.rmtree(repo)
    assert rlspec("clean", "--yes").code == 0
    assert folder.plan.exists() and not (folder.workspace / "0123456789ab").exists()


def test_what_is_reached_by_a_link_stays(here):
    folder = full(here)
    outside = here / "outside"
    outside.mkdir()
    (outside / "file").write_text("mine")
    (folder.workspace / "link").symlink_to(outside)
    (folder.workspace.parent / "20200101T000000Z-s").symlink_to(outside)
    rlspec("clean", "--keep", "0", "--yes")
    assert (outside / "file").exists() and not folder.workspace.exists()
