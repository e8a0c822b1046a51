from __future__ import annotations

import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from rlspec import checkout, repository
from rlspec.errors import RunError, SpecError
from tests.gitrepo import Child, git, state, worktrees
from tests.processes import LONG, wait_for


@pytest.mark.parametrize("kind", ["worktree", "checkout"])
@pytest.mark.parametrize("failure", [RunError, KeyboardInterrupt])
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


def test_remove_worktree(repo: Path, tmp_path: Path) -> None:
    place = tmp_path / "left behind"
    git(repo, "worktree", "add", "-q", "--detach", str(place), "main")
    (place / "made.bin").write_bytes(b"made")
    repository.remove_worktree(place)
    assert not place.exists()
    assert worktrees(repo) == 1
    orphan = tmp_path / "orphan"
    orphan.mkdir()
    (orphan / ".git").write_text("gitdir: /nowhere/at/all\n")
    repository.remove_worktree(orphan)
    assert not orphan.exists()


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


@pytest.mark.parametrize("kind", ["worktree", "checkout"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 143)])
def test_signal_in_the_middle_of_an_arm(repo: Path, folder: Path, kind: str, number: int, code: int) -> None:
    before, base = state(repo), git(repo, "rev-parse", "main")
    with Child(ARM, repo, folder, kind, base) as child:
        os.killpg(child.pid, number)
        assert child.wait(LONG) == code
    assert state(repo) == before
    assert worktrees(repo) == 1
    assert repository.repair(repo) == []


@pytest.mark.parametrize("kind", ["worktree", "checkout"])
def test_the_next_run_repairs_after_a_kill(repo: Path, folder: Path, kind: str) -> None:
    before, base = state(repo), git(repo, "rev-parse", "main")
    with Child(ARM, repo, folder, kind, base) as child:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait(LONG)
    if kind == "checkout":
        assert git(repo, "rev-parse", "HEAD") == base and state(repo) != before
        (repo / "model.py").write_text("half written by the killed arm\n")
    else:
        assert len(list(folder.iterdir())) == 1
    second = Child(ARM, repo, folder, kind, base)
    with second as child:
        assert child.communicate("")[0] == ""
    assert f"rlspec (pid {second.process.pid}" not in second.lines[0]
    assert "was cut off" in second.lines[0] and second.lines[-1] == "ready"
    assert ("back on feature" if kind == "checkout" else "worktrees are removed") in second.lines[0]
    assert state(repo) == before
    assert worktrees(repo) == 1
    assert [path.name for path in folder.iterdir()] == ([f"{base[:12]}.patch"] if kind == "checkout" else [])
    assert repository.repair(repo) == []


def test_repair_around_a_spec_that_the_kill_took_off_the_tree(repo: Path, folder: Path) -> None:
    spec = repo / "new" / "added.py"
    before, base = state(repo), git(repo, "rev-parse", "main")
    assert repository.repair_around(spec) == [] and repository.repair_around(folder) == []
    with Child(ARM, repo, folder, "checkout", base) as child:
        assert not spec.parent.exists()
        with pytest.raises(SpecError, match="is using"):
            repository.repair_around(spec)
        child.kill()
        child.wait(LONG)
    assert "back on feature" in repository.repair_around(spec)[0]
    assert state(repo) == before


def test_repair_removes_worktrees_whose_folder_is_gone(repo: Path, folder: Path) -> None:
    base = git(repo, "rev-parse", "main")
    with Child(ARM, repo, folder, "worktree", base) as child:
        child.kill()
        child.wait(LONG)
    subprocess.run(["rm", "-rf", str(folder)], check=True)
    assert "worktrees are removed" in repository.repair(repo)[0]
    assert worktrees(repo) == 1


def test_repair_leaves_a_tree_that_was_moved_by_hand(repo: Path, folder: Path) -> None:
    base = git(repo, "rev-parse", "main")
    with Child(ARM, repo, folder, "checkout", base) as child:
        child.kill()
        child.wait(LONG)
    git(repo, "checkout", "-q", "main")
    (repo / "model.py").write_text("work of the user\n")
    before = state(repo)
    assert "was moved since and stays as it is" in repository.repair(repo)[0]
    assert state(repo) == before
    assert repository.repair(repo) == []


def test_repair_says_what_a_cut_off_git_leaves(repo: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = git(repo, "rev-parse", "main")
    monkeypatch.setattr(repository, "undo", lambda journal: [])
    with repository.isolation(repo, "checkout", [base], folder):
        (repo / "model.py").write_text("lr = 1\n")  # switched already, but HEAD and index were not
    monkeypatch.undo()
    lock = repo / ".git" / "index.lock"
    lock.touch()
    monkeypatch.setattr(checkout.await_git, "__defaults__", (0.1,))
    with pytest.raises(RunError, match="index.lock exists"):
        repository.repair(repo)
    lock.unlink()
    lines = repository.repair(repo)
    assert "is on feature already" in lines[0] and "model.py" in lines[1]
    assert repository.repair(repo) == []


def slow(repo: Path, folder: Path) -> tuple[Path, Path]:
    """From now on a checkout of model.py makes the first file, then waits for the second."""
    began, go = folder / "began", folder / "go"
    (repo / ".git" / "info").mkdir(exist_ok=True)
    (repo / ".git" / "info" / "attributes").write_text("model.py filter=slow\n")
    git(repo, "config", "filter.slow.smudge", f"touch '{began}'; until [ -e '{go}' ]; do sleep 0.01; done; cat")
    git(repo, "config", "filter.slow.clean", "cat")
    return began, go


def test_interrupt_while_git_switches_to_the_arm(repo: Path, folder: Path, tmp_path: Path) -> None:
    before, base = state(repo), git(repo, "rev-parse", "main")
    began, go = slow(repo, tmp_path)
    with Child(ARM, repo, folder, "checkout", base, wait=False) as child:
        wait_for(began.exists)
        os.killpg(child.pid, signal.SIGINT)
        go.touch()
        assert child.wait(LONG) == -signal.SIGINT
        assert child.stdout is not None and child.stdout.read() == "", "the arm must not start"
    assert state(repo) == before
    assert not (repo / ".git" / "index.lock").exists()


def test_interrupts_during_the_restore(repo: Path, folder: Path, tmp_path: Path) -> None:
    before, base = state(repo), git(repo, "rev-parse", "main")
    began, go = slow(repo, tmp_path)
    go.touch()
    with Child(ARM, repo, folder, "checkout", base) as child:
        began.unlink()
        go.unlink()
        os.killpg(child.pid, signal.SIGINT)
        wait_for(began.exists)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            os.killpg(child.pid, number)
        go.touch()
        assert child.wait(LONG) in (-signal.SIGINT, 143)
    assert state(repo) == before
    assert repository.repair(repo) == []


def test_kill_while_git_switches(repo: Path, folder: Path, tmp_path: Path) -> None:
    before, base = state(repo), git(repo, "rev-parse", "main")
    began, go = slow(repo, tmp_path)
    with Child(ARM, repo, folder, "checkout", base, wait=False) as child:
        wait_for(began.exists)
        os.killpg(child.pid, signal.SIGKILL)
        child.wait(LONG)
    threading.Timer(0.1, go.touch).start()
    assert "was cut off while" in repository.repair(repo)[0], "git went on alone, and repair waited for it"
    assert state(repo) == before
