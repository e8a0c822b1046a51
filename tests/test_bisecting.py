from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import subprocess

import pytest

from rlspec import bisecting, runs
from rlspec.bisecting import Search
from rlspec.interrupts import Interrupted
from tests.gitrepo import CONFIGURATION, commit, configured, git, worktrees
from tests.tiny import PATTERN, rlspec, run_folder, save

COMMITS = [f"c{number}" for number in range(32)]
RUN_FILE = "import train\ntrain.main()\n"
# Each start draws its own rounding from a counter beside the repository, as two runs of one code differ.
TRAIN = """
import os

SHIFT = {shift}
BREAK = {broken}


def main():
    place = os.environ["COUNTER"]
    number = os.path.getsize(place) if os.path.exists(place) else 0
    open(place, "a").write("x")
    if BREAK:
        raise AttributeError("no such setting")
    for step in range(1, 13):
        mixed = 10007 * number + 101 * step + 12345
        for factor in (2654435761, 2246822519, 3266489917):
            mixed = (mixed ^ mixed >> 15) * factor % 2**32
        noise = mixed / 2**32
        loss = 4 / step + (step > 1) * (2e-3 * noise - 1e-3 + SHIFT)
        print(f"step {{step}}/12 loss={{loss!r}} step_time=0.1")
"""


def search(turn, broken=(), unsure=()):
    """A search over 32 commits that are bad from `turn` on; how many were tried."""
    made, tried = Search(commits=COMMITS), 0
    while (commit := made.next()) is not None:
        number, tried = COMMITS.index(commit), tried + 1
        status = "FAIL" if number >= turn else "PASS"
        made.found[commit] = "skipped" if number in broken else "INVESTIGATE" if number in unsure else status
    return made, tried


@pytest.mark.parametrize("turn", range(32))
def test_a_commit_among_32_takes_at_most_six_feature_arms(turn):
    made, tried = search(turn)
    assert list(made.suspects) == [COMMITS[turn]] and tried <= 6


@pytest.mark.parametrize("turn", range(32))
def test_what_cannot_run_is_skipped_and_stays_a_suspect(turn):
    made, tried = search(turn, broken={5, 15, 16, 17})
    assert COMMITS[turn] in made.suspects and tried <= 10
    assert set(made.suspects[:-1]) <= {"c5", "c15", "c16", "c17"} and made.found.get(made.suspects[-1]) != "PASS"


def test_a_midpoint_that_is_neither_ends_the_search():
    made, tried = search(20, unsure={15})
    assert tried == 2 and made.undecided == "c15" and made.next() is None and len(made.suspects) == 32
    made, tried = search(40)
    assert tried == 1 and made.found["c31"] == "PASS", "the verdict does not turn"


def history(number):
    """What is committed as change `number`: from 19 on the loss is higher, 15 and 17 cannot run."""
    return TRAIN.format(shift=0.05 if number >= 19 else 0.0, broken=number in (15, 17)) + f"\n# change {number}\n"


@pytest.fixture(scope="module")
def line(tmp_path_factory):
    """A repository whose `main` has 32 commits after the tag `good`; `side` leaves it before that."""
    root = tmp_path_factory.mktemp("line") / "repo"
    root.mkdir()
    git(root, "init", "-q", "-b", "main", "--template=")
    commit(root, "first", {".gitignore": "*.log\n", "specs/run.py.j2": RUN_FILE})
    git(root, "checkout", "-q", "-b", "side")
    commit(root, "side", {"side.txt": ""})
    git(root, "checkout", "-q", "main")
    commit(root, "trainer", {"train.py": TRAIN.format(shift=0.0, broken=False)})
    git(root, "tag", "good")
    stream = ""
    for number in range(32):
        said, text = f"change {number}", history(number)
        stream += f"commit refs/heads/main\ncommitter tester <t@example.org> {1700000000 + number} +0000\n"
        stream += f"data {len(said)}\n{said}\n" + ("from refs/heads/main^0\n" if number == 0 else "")
        stream += f"M 100644 inline train.py\ndata {len(text)}\n{text}\n"
    subprocess.run(["git", "-C", str(root), "fast-import", "--quiet"], input=stream.encode(), check=True)
    git(root, "reset", "-q", "--hard", "main")
    return root


@pytest.fixture
def project(line, monkeypatch, tmp_path):
    for name in os.environ.keys() - configured(os.environ).keys():
        monkeypatch.delenv(name)
    for name, value in CONFIGURATION.items():
        monkeypatch.setenv(name, value)
    root = tmp_path / "re po"
    shutil.copytree(line, root)
    git(root, "update-index", "-q", "--refresh")
    monkeypatch.chdir(root)
    monkeypatch.setenv("COUNTER", str(tmp_path / "counter"))
    monkeypatch.setenv("COLUMNS", "200")
    return root


def spec(repo):
    """A spec that is not committed, since it does not count as a change."""
    data = {
        "kind": "correctness",
        "question": "Where does the loss move?",
        "model": "char-gpt",
        "mesh": {"pp": 1},
        "trainer": {
            "name": "command",
            "template": "run.py.j2",
            "command": ["{python}", "{run_file}"],
            "reader": {"name": "regex", "pattern": PATTERN},
            "steps": 12,
        },
        "arms": [
            {"name": "base0", "role": "base", "revision": "main"},
            {"name": "base1", "role": "base", "revision": "main"},
            {"name": "feat0", "role": "feature", "revision": "HEAD"},
        ],
        "judgments": [{"check": "drift", "metric": "loss"}],
    }
    return save(repo / "specs" / "spec.yaml", data)


def starts(tmp_path):
    return (tmp_path / "counter").stat().st_size


def test_the_planted_commit_is_found(project, tmp_path):
    path = spec(project)
    before = git(project, "for-each-ref"), git(project, "rev-parse", "HEAD")
    done = rlspec("bisect", path, "--good", "good", "--bad", "main")
    assert done.code == 0, done.out + done.err
    culprit = git(project, "rev-parse", "main~12")
    assert f"the culprit is {culprit[:12]} change 19: FAIL, loss: " in done.out and "2 base runs" in done.out
    tried = [line for line in done.out.splitlines() if line.startswith(("PASS", "FAIL", "skipped"))]
    again = [line.rpartition(" change ")[2] for line in tried if line.endswith(", once more")]
    assert again == ["19, once more", "18, once more"] and [line[:4] for line in tried[-2:]] == ["FAIL", "PASS"]
    assert len(tried) <= 10 and "skipped      " + git(project, "rev-parse", "main~16")[:12] + " change 15" in tried
    assert starts(tmp_path) == 2 + len(tried), "the envelope is measured once"
    assert worktrees(project) == 1 and git(project, "status", "--porcelain") == "?? specs/spec.yaml"
    assert (git(project, "for-each-ref"), git(project, "rev-parse", "HEAD")) == before
    again = rlspec("bisect", path, "--good", "good", "--bad", "main", "--resume")
    assert again.out == done.out and starts(tmp_path) == 2 + len(tried), "all of it is known"


def test_an_interrupted_search_goes_on(project, tmp_path, monkeypatch):
    path = spec(project)
    real, calls = bisecting.pipeline.run, []

    def cut_off(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise Interrupted(signal.SIGINT)
        return real(*arguments)

    monkeypatch.setattr(bisecting.pipeline, "run", cut_off)
    done = rlspec("bisect", path, "--good", "good", "--bad", "main")
    assert done.code == 130 and "--resume goes on" in done.err and starts(tmp_path) == 4
    assert rlspec("bisect", path, "--good", "good", "--bad", "main~1", "--resume").code == 2, "another end"
    there = project.rename(tmp_path / "mounted elsewhere")
    monkeypatch.chdir(there)
    path = there / path.relative_to(project)
    done = rlspec("bisect", path, "--good", "good", "--bad", "main", "--resume")
    assert done.code == 0 and "change 19: FAIL" in done.out
    assert starts(tmp_path) == 2 + done.out.count("PASS ") + done.out.count("FAIL ") + done.out.count("skipped ")


def test_an_interrupted_first_run_keeps_its_base_arms(project, tmp_path, monkeypatch):
    path = spec(project)
    real = bisecting.pipeline.arms.run

    def cut_off(session, step):
        if step.arm.role == "feature":
            raise Interrupted(signal.SIGTERM)
        return real(session, step)

    monkeypatch.setattr(bisecting.pipeline.arms, "run", cut_off)
    assert rlspec("bisect", path, "--good", "good", "--bad", "main").code == 143 and starts(tmp_path) == 2
    monkeypatch.setattr(bisecting.pipeline.arms, "run", real)
    monkeypatch.setattr(Search, "next", lambda self: None if self.found else self.commits[-1])
    rlspec("bisect", path, "--good", "good", "--bad", "main", "--resume")
    assert starts(tmp_path) == 3 + 2, "two of them to be sure"


def test_added_base_runs_stay_for_the_commits_to_come(project, tmp_path, monkeypatch):
    """A commit in the grey band has base runs added; it stays there, so the search says what it knows and stops."""
    git(project, "checkout", "-q", "-b", "grey", "good")
    shifts = [0.0, 0.0027, 0.05]
    for number, shift in enumerate(shifts):
        commit(project, f"grey {number}", {"train.py": TRAIN.format(shift=shift, broken=False) + f"# {number}\n"})
    path = spec(project)
    done = rlspec("bisect", path, "--good", "good", "--bad", "grey")
    done = dataclasses.replace(done, out=" ".join(done.out.split()))
    assert done.code == 3, done.out
    assert "stopped at" in done.out and "grey 1, which is INVESTIGATE, loss: " in done.out, done.out
    assert "the turn lies in the 2 commits up to" in done.out and "the floor, of 4 base runs" in done.out
    assert starts(tmp_path) == 2 + 1 + 1 + 3, "two base runs, the bad end, a midpoint, another with two base runs more"
    assert {arm["name"] for arm in runs.load(run_folder() / "plan.json")["arms"]} == {f"base{n}" for n in range(4)} | {
        "feat0"
    }


@pytest.mark.parametrize(
    ("which", "status", "words"),
    [
        ("bad", "PASS", "change 19, FAIL at first, is PASS once more"),
        ("before", "FAIL", "first, the good end, is FAIL once more"),
    ],
)
def test_a_second_run_that_disagrees_makes_it_uncertain(project, tmp_path, monkeypatch, which, status, words):
    """A commit that was good or bad by luck: what the second run says is planted."""
    real, made = bisecting._outcome, []

    def outcome(report):
        made.append(report)
        again = len(made) == (2 if which == "bad" else 3)
        return (status, "planted") if again else real(report)

    monkeypatch.setattr(bisecting, "_outcome", outcome)
    path = spec(project)
    git(project, "checkout", "-q", "-b", "luck", "good")
    commit(project, "first", {"first.txt": ""})
    commit(project, "change 19", {"train.py": history(19)})
    done = rlspec("bisect", path, "--good", "luck~1", "--bad", "luck")
    assert done.code == 3 and "not certain: " in done.out and words in done.out, done.out
    assert starts(tmp_path) == 2 + len(made) == (4 if which == "bad" else 5)


@pytest.mark.parametrize(
    ("good", "bad", "code", "words"),
    [
        ("main", "good", 2, "is not before"),
        ("good", "good", 2, "is not before"),
        ("side", "main", 2, "where it began"),
        ("good", "nowhere", 2, "is no commit"),
        ("good", "good-again", 4, "is PASS: the verdict does not turn"),
        ("good", "main~16", 4, "could not run: exited with 1: AttributeError: no such setting"),
        ("main~16", "main", 4, "base0, at the good end, failed"),
    ],
)
def test_ends_between_which_nothing_is_found(project, good, bad, code, words):
    git(project, "branch", "good-again", "main~31")
    path = spec(project)
    done = rlspec("bisect", path, "--good", good, "--bad", bad)
    assert done.code == code and words in done.out + done.err, done.out + done.err


def test_specs_that_cannot_be_bisected(project):
    path = spec(project)
    data = {"kind": "performance", "model": "char-gpt", "mesh": {"pp": 1}, "question": "q"}
    trainer = {"name": "command", "command": ["true"], "reader": {"name": "jsonl"}}
    arms = [{"name": "a", "role": "base"}, {"name": "b", "role": "feature", "environment": {"A": "1"}}]
    save(project / "specs" / "other.yaml", {**data, "trainer": trainer, "arms": arms})
    done = rlspec("bisect", project / "specs" / "other.yaml", "--good", "good", "--bad", "main")
    assert done.code == 2 and "kind correctness" in done.err
    assert "no search of" in rlspec("bisect", path, "--good", "good", "--bad", "main", "--resume").err
    assert os.listdir(project / "workspace" / "bisect") == []
