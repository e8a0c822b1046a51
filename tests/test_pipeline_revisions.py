"""Runs whose arms name revisions: what is resolved, isolated, built, observed and refused."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

from rlspec import pipeline, provenance, repository
from rlspec.interrupts import Interrupted
from tests.gitrepo import commit, git, state, worktrees
from tests.tiny import report, rlspec, run_folder, save, statuses

# The run file only starts what the tree holds; `train` is the package of the repository under test.
RUN_FILE = "import train\ntrain.main()\n"
TRAIN = """\
import os
import subprocess
import time

SHIFT = {shift}


def main():
    drift = float(os.environ.get("DRIFT", "0"))
    if "LEAVE" in os.environ:
        open(os.environ["LEAVE"], "w").close()
    if "MOVE" in os.environ:
        subprocess.run(["git", "-C", os.environ["MOVE"], "branch", "-q", "-f", "change", "main"], check=True)
    for step in range(1, 7):
        took = 0.1 + step / 1000 + time.perf_counter() % 1 / 1e8
        print(f"step {{step}}/6 loss={{4 / step + (step > 1) * (SHIFT + drift)!r}} step_time={{took!r}}")
"""
PATTERN = r"step (?P<step>\d+)/(?P<steps>\d+) loss=(?P<loss>\S+) step_time=(?P<step_time>\S+)"


@pytest.fixture
def repo(repo, monkeypatch):
    """A trainer with main and change, which is further away; the user is on a branch of their own."""
    git(repo, "checkout", "-q", "main")
    files = {"train.py": TRAIN.format(shift=0.0), "specs/run.py.j2": RUN_FILE, ".gitignore": "cache/\n*.log\nbuilt\n"}
    commit(repo, "trainer", files)
    git(repo, "checkout", "-q", "-b", "change")
    commit(repo, "change", {"train.py": TRAIN.format(shift=0.001)})
    git(repo, "checkout", "-q", "-b", "mine", "main")
    monkeypatch.chdir(repo)
    return repo


def spec(repo, environment=None, **changes):
    """A spec that is not committed, since it does not count as a change."""
    data = {
        "kind": "correctness",
        "question": "Does the change train like main?",
        "model": "char-gpt",
        "mesh": {"pp": 1},
        "trainer": {
            "name": "command",
            "template": "run.py.j2",
            "command": ["{python}", "{run_file}"],
            "reader": {"name": "regex", "pattern": PATTERN},
            "steps": 6,
        },
        "arms": [
            {"name": "base0", "role": "base", "revision": "main", "environment": environment or {}},
            {"name": "base1", "role": "base", "revision": "main", "environment": {"DRIFT": "0.001"}},
            {"name": "feat0", "role": "feature", "revision": "change"},
        ],
        "judgments": [{"check": "drift", "metric": "loss", "max_base_runs": 2}],
        **changes,
    }
    return save(repo / "specs" / "spec.yaml", data)


def imported(made):
    return {arm["name"]: arm["provenance"]["imported"]["train"] for arm in made["arms"]}


@pytest.mark.parametrize("isolation", ["worktree", "checkout"])
def test_each_arm_runs_its_own_commit_and_the_tree_comes_back(repo, isolation):
    path = spec(repo, isolation=isolation)
    before = state(repo)
    done = rlspec("run", path)
    made = report()
    assert done.code == 0, done.err
    assert made["verdicts"][0]["statistic"] == pytest.approx(1)  # 0.001 away by the commit, 0.001 by the floor
    main, change = git(repo, "rev-parse", "main"), git(repo, "rev-parse", "change")
    assert {arm["name"]: arm["commit"] for arm in made["arms"]} == {"base0": main, "base1": main, "feat0": change}
    status, *files = state(repo)
    status = status.replace("! logging/\0", "").replace("! workspace/\0", "")
    own = (f"{repo / 'logging'}/", f"{repo / 'workspace'}/")
    assert (status, *(file for file in files if not file.startswith(own))) == before and worktrees(repo) == 1
    for name, (file,) in imported(made).items():
        place = run_folder() / (change if name == "feat0" else main)[:12] if isolation == "worktree" else repo
        assert Path(file) == place / "train.py", name


def test_a_commit_is_resolved_once_even_if_the_branch_moves(repo):
    change = git(repo, "rev-parse", "change")
    assert rlspec("run", spec(repo, {"MOVE": str(repo)})).code == 0
    assert git(repo, "rev-parse", "change") == git(repo, "rev-parse", "main")
    assert report()["arms"][2]["commit"] == change and report()["verdicts"][0]["statistic"] == pytest.approx(1)


@pytest.mark.parametrize(("isolation", "lines"), [("worktree", 2), ("checkout", 3)])
def test_build_runs_in_the_tree_of_the_arm(repo, isolation, lines):
    log = repo.parent / "built"
    command = ["sh", "-c", f"git rev-parse HEAD >> {log}; touch built; test -z \"$RLSPEC_NO_SUCH\""]  # fmt: skip
    assert rlspec("run", spec(repo, isolation=isolation, build=[command])).code == 0
    main, change = git(repo, "rev-parse", "main"), git(repo, "rev-parse", "change")
    assert log.read_text().split() == [main, main, change][3 - lines :]


def test_a_dirty_tree_and_another_rlspec_are_refused_before_anything_is_written(repo):
    path = spec(repo)
    (repo / "train.py").write_text("x = 1\n")
    done = rlspec("run", path)
    assert done.code == 2 and "modified train.py" in done.err and "git stash" in done.err
    git(repo, "checkout", "--", "train.py")
    with repository.lock(repo):
        done = rlspec("run", path)
    assert done.code == 2 and "is using" in done.err
    assert not (repo / "workspace").exists() and not (repo / "logging").exists()


def test_what_cannot_be_isolated_is_refused_and_leaves_nothing(repo):
    (repo / "cache" / "new").write_text("ignored, and in the way of what the commit holds")
    git(repo, "checkout", "-q", "change")
    commit(repo, "adds an ignored file", {"cache/new": "committed"})
    git(repo, "checkout", "-q", "mine")
    (repo / "cache").mkdir(exist_ok=True)
    (repo / "cache" / "new").write_text("mine")
    done = rlspec("run", spec(repo, isolation="checkout"))
    assert done.code == 2 and "cache/new" in done.err and "isolation: worktree" in done.err, done
    assert not (repo / "workspace").exists() and (repo / "cache" / "new").read_text() == "mine"


def test_an_import_from_another_tree_is_an_error_of_the_arm(repo):
    (repo / "specs" / "run.py.j2").write_text(f"import sys\nsys.path.insert(0, {str(repo)!r})\n{RUN_FILE}")
    git(repo, "commit", "-qam", "a template that looks elsewhere")
    done = rlspec("run", spec(repo))
    arm = report()["arms"][0]
    assert done.code == 4 and arm["status"] == "failed" and statuses(report())["feat0"] == "skipped"
    assert "train was imported from" in arm["reason"] and "isolation: checkout" in arm["reason"]


@pytest.mark.parametrize("isolation", ["worktree", "checkout"])
def test_an_arm_that_uses_nothing_of_its_tree_is_an_error(repo, isolation):
    """Else a package that is installed elsewhere would be compared with itself, whatever the commits are."""
    template = "for step in range(1, 7):\n    print(f'step {step}/6 loss={4 / step!r} step_time=0.1')\n"
    (repo / "specs" / "run.py.j2").write_text(template)
    git(repo, "commit", "-qam", "a template that imports nothing")
    assert rlspec("run", spec(repo, isolation=isolation)).code == 4
    assert "no Python file of" in report()["arms"][0]["reason"]


def test_a_copy_installed_elsewhere_of_what_the_branch_changes_is_an_error(repo, monkeypatch):
    """The tree keeps its package where nothing looks; other files of it were used, so the tree is not unused."""
    for branch, shift in (("main", 0.0), ("change", 0.001)):
        git(repo, "checkout", "-q", branch)
        commit(repo, "moved", {"python/train/__init__.py": TRAIN.format(shift=shift), "launch.py": RUN_FILE})
        git(repo, "rm", "-q", "train.py")
        commit(repo, "launched", {"specs/run.py.j2": "import launch\n"})
    place = repo.parent / "site-packages" / "train" / "__init__.py"
    place.parent.mkdir(parents=True)
    place.write_text(TRAIN.format(shift=0.0))
    monkeypatch.setenv("PYTHONPATH", str(place.parents[1]))
    assert rlspec("run", spec(repo)).code == 4
    assert f"train was imported from {place}" in report()["arms"][0]["reason"]


def test_what_differs_and_is_neither_used_nor_built_is_said_beside_the_verdict(repo):
    git(repo, "checkout", "-q", "-B", "change", "main")
    commit(repo, "a kernel", {"csrc/k.cu": "// faster\n", "README.md": "said\n"})
    done = rlspec("run", spec(repo))
    (note,) = report()["notes"]
    assert "the commits differ in csrc/k.cu and the spec has no `build:`" in note and "note: the commits" in done.out


@pytest.mark.parametrize(("isolation", "later"), [("worktree", "base1"), ("checkout", "base1, feat0")])
def test_what_an_arm_leaves_to_the_next_one_in_its_tree_is_said(repo, isolation, later):
    build = [["touch", "built"]]  # ignored by git, and there before the arm
    path = spec(repo, {"LEAVE": "state.log"}, isolation=isolation, build=build)
    assert rlspec("run", path).code == 0
    (note,) = report()["notes"]
    assert note.startswith(f"state.log appeared or changed while base0 ran, in the tree in which {later} ran after")


def test_code_of_another_repository_is_the_same_for_all_commits(repo, tmp_path):
    other = tmp_path / "other"
    git(tmp_path, "init", "-q", str(other))
    commit(other, "library", {"lib.py": "\n"})
    edit = (
        f"import os, sys\nsys.path.append({str(other)!r})\nimport lib\n"
        f"if 'EDIT' in os.environ and not os.path.exists({str(tmp_path / 'edited')!r}):\n"
        f"    open({str(tmp_path / 'edited')!r}, 'w').close()\n    open(lib.__file__, 'a').write('#')\n"
    )
    commit(repo, "edits", {"specs/run.py.j2": edit + RUN_FILE})
    path = spec(repo, {"EDIT": "1"})
    assert rlspec("run", path).code == 4
    (failed,) = (arm for arm in report()["arms"] if arm["status"] == "failed")
    assert failed["reason"].startswith(f"{other / 'lib.py'} changed while the arm ran"), failed
    rlspec("run", path, "--retry-errors")
    assert set(statuses(report()).values()) == {"done"}
    (other / "lib.py").write_text("SHIFT = 1\n")
    done = rlspec("run", path, "--arm", "feat0", "--from", run_folder().name)
    assert done.code == 2 and "cannot be used: " in done.err and "lib.py, outside its tree, changed" in done.err


def test_the_record_of_an_arm_holds_what_was_observed_and_no_secret(repo, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hunter2-hunter2")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    rlspec("run", spec(repo))
    for arm in report()["arms"]:
        seen = arm["provenance"]
        assert seen["commit"] == arm["commit"] and seen["dirty"] is False
        assert provenance.machine(seen).keys() >= {"cpu"} and seen["versions"]["python"]
        assert seen["environment"]["CUDA_DEVICE_MAX_CONNECTIONS"] == "1" and seen["processes"] >= 1
    written = [path for root in ("workspace", "logging") for path in (repo / root).rglob("*") if path.is_file()]
    assert len(written) > 10 and not [path for path in written if b"hunter2" in path.read_bytes()]


def test_a_run_that_goes_on_keeps_its_commits(repo):
    path = spec(repo)
    rlspec("run", path, "--arm", "base0")
    change = git(repo, "rev-parse", "change")
    git(repo, "branch", "-q", "-f", "change", "main")
    done = rlspec("run", path, "--resume")
    assert done.code == 0 and report()["arms"][2]["commit"] == change
    main, name = git(repo, "rev-parse", "main"), run_folder().name
    (note,) = (note for note in report()["notes"] if "goes on with" in note)
    assert note.startswith(f"change is at {main[:12]} now; {name} goes on with {change[:12]}") and note in done.err
    for option in ("--resume", "--retry-errors"):
        done = rlspec("run", path, option)  # nothing is left to do but to say again what was found of another commit
        assert done.code == 2 and f"change moved from {change[:12]} to {main[:12]}" in done.err, done
    assert f"--from {name}" in done.err
    done = rlspec("run", path, "--from", run_folder().name)  # a new run resolves anew, and so feat0 is another one
    assert statuses(report()) == {"base0": "reused", "base1": "reused", "feat0": "done"}
    assert "feat0: runs again, since the commit differs" in done.err


def test_a_failed_arm_is_tried_again_at_its_commit_and_where_the_branch_is_now_is_said(repo):
    path = spec(repo)
    commit(repo, "broken", {"train.py": "def main():\n    raise SystemExit('bad')\n"})
    git(repo, "branch", "-q", "-f", "change", "mine")
    assert rlspec("run", path).code == 4
    broken = commit(repo, "fixed", {"train.py": TRAIN.format(shift=0.001)}) and git(repo, "rev-parse", "change")
    git(repo, "branch", "-q", "-f", "change", "mine")
    done = rlspec("run", path, "--retry-errors")
    assert done.code == 4 and f"goes on with {broken[:12]}" in done.err and "--from" in done.err


def test_an_interrupt_before_anything_ran_leaves_nothing_to_go_on_with(repo, monkeypatch):
    def cut_off(*_):
        raise Interrupted(signal.SIGINT)

    path = spec(repo)
    monkeypatch.setattr(pipeline.runs, "publish", cut_off)
    done = rlspec("run", path)
    assert done.code == 130 and "before anything of" in done.err and "--resume" not in done.err
    assert not list((repo / "workspace").glob("*/*/*")) and worktrees(repo) == 1


def test_an_unknown_revision_names_the_nearest(repo):
    path = spec(repo)
    path.write_text(path.read_text().replace("revision: change", "revision: chnge"))
    for action in ("run", "plan"):
        done = rlspec(action, path)
        assert done.code == 2 and "nearest: change" in done.err
    assert not (repo / "workspace").exists()


def test_performance_of_two_commits(repo):
    arms = [
        {"name": name, "role": role, "revision": revision}
        for name, role, revision in (
            ("base0", "base", "main"),
            ("feat0", "feature", "change"),
            ("feat1", "feature", "change"),
            ("base1", "base", "main"),
        )
    ]
    done = rlspec("run", spec(repo, kind="performance", arms=arms, judgments=["step_time"]))
    (verdict,) = report()["verdicts"]
    assert done.code == 0 and verdict["status"] == "MEASURED"
    assert verdict["evidence"]["base"] == pytest.approx(0.104, abs=1e-6)
    assert verdict["evidence"]["degrees"] == 2 and verdict["statistic"] == pytest.approx(0, abs=1e-4)


def test_the_user_may_stand_anywhere(repo, monkeypatch, tmp_path):
    path = spec(repo, repository=str(repo))
    place = tmp_path / "elsewhere"
    place.mkdir()
    monkeypatch.chdir(place)
    assert rlspec("run", path).code == 0
    assert (place / "workspace").is_dir() and not (repo / "workspace").exists() and worktrees(repo) == 1
    plan = json.loads((run_folder() / "plan.json").read_text())
    assert plan["spec"]["path"] == str(path)
    assert subprocess.run(["git", "-C", repo, "status", "--porcelain"], capture_output=True, text=True).stdout == (
        "?? specs/spec.yaml\n"
    )
