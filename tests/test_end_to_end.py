"""Three real arms from a git repository made of the example trainer, in both isolations, and cut off in every way."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import LONG, wait_for

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "specs" / "examples" / "char-gpt"


def git(repo, *arguments):
    done = subprocess.run(["git", "-C", repo, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def repo(tmp_path, monkeypatch):
    """main, harmless and harmful, with an ignored file and the user on a branch of their own."""
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "a user")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "user@example.org")
    made = tmp_path / "trainer"
    made.mkdir()
    git(made, "init", "-q", "-b", "main")
    shutil.copy(EXAMPLE / "train.py", made)
    (made / ".gitignore").write_text("cache/\n")
    (made / "specs").mkdir()
    shutil.copy(EXAMPLE / "branch.py.j2", made / "specs")
    spec = (EXAMPLE / "branch.yaml").read_text()
    shorter = (("steps: 32", "steps: 12"), ("size: 8", "size: 4"), ("accumulation: 8", "accumulation: 2"))
    for long, short in shorter:
        assert long in spec
        spec = spec.replace(long, short)
    (made / "specs" / "branch.yaml").write_text(spec)
    commit(made, "main")
    for name in ("harmless", "harmful"):
        git(made, "checkout", "-q", "-b", name, "main")
        git(made, "apply", EXAMPLE / f"{name}.patch")
        commit(made, name)
    git(made, "checkout", "-q", "-b", "mine", "main")
    (made / "cache").mkdir()
    (made / "cache" / "kept").write_text("ignored, and mine")
    return made


def commit(made, message):
    git(made, "add", "-A")
    git(made, "commit", "-q", "-m", message)


def state(repo):
    kept = (repo / "cache" / "kept").read_text()
    head, status = git(repo, "symbolic-ref", "HEAD"), git(repo, "status", "--porcelain")
    return (
        head,
        git(repo, "rev-parse", "HEAD"),
        git(repo, "ls-files", "-s"),
        status,
        kept,
        git(repo, "worktree", "list"),
    )


def command(repo, *arguments):
    return [sys.executable, "-m", "rlspec", *arguments]


def environment():
    return {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1", "COLUMNS": "100"}


def rlspec(repo, *arguments):
    done = subprocess.run(command(repo, *arguments), cwd=repo, env=environment(), capture_output=True, text=True)
    assert "Traceback (most recent call last)" not in done.stderr, done.stderr
    return done


def report(repo):
    return json.loads((repo / "workspace/validate-correctness/char-gpt/latest/report.json").read_text())


def spec(repo, branch, isolation, *, slow=False):
    """The example's spec with another feature branch; `slow` arms sleep, so that there is a middle to be cut off in."""
    text = (repo / "specs" / "branch.yaml").read_text().replace("revision: HEAD", f"revision: {branch}")
    assert f"revision: {branch}" in text
    path = repo / "specs" / "branch.yaml"
    path.write_text(text.replace("kind: correctness", f"kind: correctness\nisolation: {isolation}"))
    if slow:
        template = repo / "specs" / "branch.py.j2"
        sleeping = "import time\nprint('sleeping', flush=True)\ntime.sleep(600)\n\nimport train\n"
        template.write_text(template.read_text().replace("import train\n", sleeping))
    commit(repo, "spec")
    return path


@pytest.mark.parametrize("isolation", ["worktree", "checkout"])
def test_harmless_passes_and_harmful_fails(repo, isolation):
    path = spec(repo, "harmful", isolation)
    before = state(repo)
    done = rlspec(repo, "run", path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert state(repo) == before
    made = report(repo)
    assert [arm["commit"] for arm in made["arms"]] == [
        git(repo, "rev-parse", name) for name in ("main", "main", "harmful")
    ]
    assert {arm["status"] for arm in made["arms"]} == {"done"}
    # While the true norm is above the clip, the loss is right and the gradient norm alone shows the fault.
    assert {v["subject"]: v["status"] for v in made["verdicts"]}["grad_norm"] == "FAIL"
    for arm in made["arms"]:
        imported = arm["provenance"]["imported"]["train"]
        assert all(("workspace" in file) == (isolation == "worktree") for file in imported), imported

    path.write_text(path.read_text().replace("revision: harmful", "revision: harmless"))
    commit(repo, "other branch")
    run = made["run"]["name"]
    done = rlspec(repo, "run", path, "--from", run, "--arm", "feat0")
    made = report(repo)
    assert done.returncode in (0, 3), done.stdout + done.stderr
    assert [arm["status"] for arm in made["arms"]] == ["reused", "reused", "done"]
    assert made["arms"][2]["commit"] == git(repo, "rev-parse", "harmless")
    assert {v["status"] for v in made["verdicts"]} <= {"PASS", "INVESTIGATE"}
    assert all(v["reason"] for v in made["verdicts"])


@pytest.mark.parametrize("isolation", ["worktree", "checkout"])
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda s: s.name)
def test_cut_off_in_the_middle_of_an_arm(repo, isolation, signum):
    path = spec(repo, "harmless", isolation, slow=True)
    before = state(repo)
    child = subprocess.Popen(
        command(repo, "run", path),
        cwd=repo,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    logs = repo / "logging"
    wait_for(lambda: any("sleeping" in log.read_text(errors="replace") for log in logs.rglob("*base0.log")))
    child.send_signal(signum)
    _, stderr = child.communicate(timeout=LONG)
    if signum != signal.SIGKILL:
        assert child.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}[signum], stderr
        assert "Traceback" not in stderr
        assert state(repo) == before
        return
    assert child.returncode == -signal.SIGKILL
    quick = repo / "specs" / "branch.py.j2"
    if isolation == "checkout":
        assert git(repo, "rev-parse", "--abbrev-ref", "HEAD") == "HEAD"  # left where the arm was
    again = rlspec(repo, "run", path, "--set", "time_limit=1s")  # ends soon, and that is all it is for
    assert again.returncode == 4, again.stdout + again.stderr
    assert "was cut off" in again.stderr and quick.exists()
    assert state(repo) == before


def test_a_dirty_tree_is_refused_and_nothing_is_written(repo):
    (repo / "train.py").write_text("x = 1\n")
    done = rlspec(repo, "run", "specs/branch.yaml")
    assert done.returncode == 2 and "train.py" in done.stderr
    assert not (repo / "workspace").exists() and not (repo / "logging").exists()


def test_an_unknown_revision_is_refused_before_anything_runs(repo):
    path = spec(repo, "harmles", "worktree")
    for action in ("plan", "run"):
        done = rlspec(repo, action, path)
        assert done.returncode == 2 and "harmless" in done.stderr, done.stderr
    assert not (repo / "workspace").exists()


def test_an_arm_that_crashes_is_an_error_with_its_last_lines_and_can_be_run_and_judged_again(repo):
    path = spec(repo, "harmless", "worktree")
    template = repo / "specs" / "branch.py.j2"
    text = template.read_text()
    marker = repo / "cache" / "fixed"
    # The machine fails once: the same file, the same commit, and the second time it works.
    template.write_text(
        text + f"\nif not Path({str(marker)!r}).exists() and 'feat0' in __file__:\n    raise SystemError('a bad day')\n"
    )
    commit(repo, "template")
    done = rlspec(repo, "run", path, "--set", "trainer.steps=12")
    made = report(repo)
    assert done.returncode == 4 and made["outcome"] == "ERROR"
    assert [arm["status"] for arm in made["arms"]] == ["done", "done", "failed"]
    assert "a bad day" in " ".join(made["arms"][2]["tail"]) and Path(made["arms"][2]["log"]).exists()
    kept = [arm["provenance"] for arm in made["arms"][:2]]
    marker.write_text("")
    done = rlspec(repo, "run", path, "--set", "trainer.steps=12", "--retry-errors")
    made = report(repo)
    assert done.returncode in (0, 3), done.stdout + done.stderr
    assert [arm["provenance"] for arm in made["arms"][:2]] == kept
    judging_again_gives_the_same_verdicts_and_refuses_edited_records(repo, made)


def judging_again_gives_the_same_verdicts_and_refuses_edited_records(repo, made):
    folder = Path(made["run"]["folder"])
    done = rlspec(repo, "judge", made["run"]["name"], "-o", repo / "cache" / "again.json")
    again = json.loads((repo / "cache" / "again.json").read_text())
    assert done.returncode == made["exit_code"] and again["verdicts"] == made["verdicts"]
    records = next(folder.glob("*feat0.records.jsonl"))
    records.write_text(records.read_text().replace('"loss": ', '"loss": 1', 1))
    done = rlspec(repo, "judge", folder)
    assert done.returncode == 4 and "digest" in done.stderr
