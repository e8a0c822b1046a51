from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from rlspec import contract, linting, planning
from rlspec.checks import CHECKS
from rlspec.report.text import columns
from tests.tiny import parity, rlspec, training

ROOT = Path(__file__).parents[1]
SHIPPED = sorted([*(ROOT / "specs").glob("*/*.yaml"), ROOT / "specs" / "quickstart.yaml"])
SPECS = [path for path in SHIPPED if path.parent.name in ("correctness", "parity", "specs")]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


@pytest.fixture
def repo(here, monkeypatch):
    """A repository with main and a tag, and a spec whose arms name both."""
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "a user")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "user@example.org")
    roles = (("base0", "base", "main"), ("base1", "base", "main"), ("feat0", "feature", "v1"))
    arms = [{"name": name, "role": role, "revision": revision} for name, role, revision in roles]
    path = training(here / "work", arms=arms)
    for words in (["init", "-q", "-b", "main"], ["add", "-A"], ["commit", "-qm", "one"], ["tag", "v1"]):
        subprocess.run(["git", "-C", here / "work", *words], check=True)
    return path


def text(path, width=80):
    (document,), _ = linting.lint([path])
    return planning.text(document, width)


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
@pytest.mark.parametrize("width", [80, 50])
def test_no_line_is_wider_than_the_terminal(path, width, monkeypatch):
    # The shipped ones name revisions of the repository that they lie in, which a test has not.
    monkeypatch.setattr(planning.pipeline, "resolve_revisions", lambda spec: (Path("/repo"), Commits()))
    assert [line for line in text(path, width).splitlines() if columns(line) > width] == []


class Commits(dict):
    def __missing__(self, revision):
        return "0123456789abcdef"


CONTROLS = ROOT / "specs" / "controls"


@pytest.mark.parametrize(
    ("control", "arms"),
    [
        ("training/rope-base", {"feat0": "rope_base"}),
        ("training/constant-metric", dict.fromkeys(("base0", "base1", "feat0"), "constant_metric")),
        ("chain/temperature", {"faulty": "temperature"}),
    ],
)
def test_a_planted_fault_is_told_of_its_arm(control, arms):
    told, name = {}, ""
    for line in text(CONTROLS / f"{control}.yaml").partition("arms, one after the other\n")[2].splitlines():
        name = line.split()[0] if line.startswith("  ") and line[2:3].strip() else name
        if "with the planted fault " in line:
            told[name] = line.split()[-1]
    assert told == arms


def test_a_run_file_is_that_of_a_run_without_the_fault():
    """So that arms of role base, which have none, can be taken from the run of another control."""
    (document,), _ = linting.lint([CONTROLS / "training" / "rope-base.yaml"])
    spec = CHECKS[document.data["kind"]].parse(document)
    assert "fault" not in spec.trainer.settings and [arm.fault for arm in spec.arms] == [None, None, "rope_base"]


def test_the_whole_plan(here):
    path = training(here / "work", time_limit="30m")
    digest = contract.load("training", here).digest[:12]
    assert text(path).splitlines() == PLAN.format(digest=digest).splitlines()


PLAN = """\
correctness: spec
Does it train alike?

  model       char-gpt
  mesh        pp 1, dp 1, cp 1, ep 1; world size 1; dp of experts 1
  sequence    128 tokens, bf16
  tag         pp1-dp1-cp1-ep1-seq128-bf16
  trainer     command, 6 steps, log read by regex
  settings    seed 3
  launch      local, 1 node of 1 process
  time limit  30m an arm
  contract    training, digest {digest}
  by default  dtype bf16, isolation worktree, contract training

judgments
  drift loss
    PASS below 3, FAIL above 5, INVESTIGATE between (training/drift/*/*)
    INVESTIGATE adds base runs, up to 4 in all
    base runs equal to the bit, and the feature not: INVESTIGATE

arms, one after the other
  base0       base, the files as they lie here
              $ python -S pp1-dp1-cp1-ep1-seq128-bf16-base0.py
  base1       base, the files as they lie here
              $ python -S pp1-dp1-cp1-ep1-seq128-bf16-base1.py
  feat0       feature, the files as they lie here
              OFFSET=0
              $ python -S pp1-dp1-cp1-ep1-seq128-bf16-feat0.py

files
  workspace/validate-correctness/char-gpt/<UTC time>-spec/
    plan.json report.json
    pp1-dp1-cp1-ep1-seq128-bf16-<arm> .py .records.jsonl .provenance.json
  logging/validate-correctness/char-gpt/<UTC time>-spec/
    pp1-dp1-cp1-ep1-seq128-bf16-<arm> .log

cost
  3 arms of 1 process, and up to 2 added base runs
  at most 1.5 process-hours (arms × processes × time_limit), and 0.5 for each
  added run
"""


def test_revisions_are_shown_as_commits(repo):
    commit = subprocess.run(["git", "-C", repo.parent, "rev-parse", "v1"], capture_output=True, text=True).stdout
    found = text(repo, 200)
    assert f"feature, v1 = {commit[:12]}" in found
    assert f"repository  {repo.parent.resolve()}, isolation worktree" in found


def test_an_unknown_revision_is_refused(repo):
    repo.write_text(repo.read_text().replace("revision: v1", "revision: v2"))
    done = rlspec("plan", repo)
    assert done.code == 2 and "'v2'" in done.err


def test_torchrun_is_shown_as_it_would_start(here):
    path = training(here / "work", launch={"name": "torchrun", "processes_per_node": 4}, mesh={"pp": 2})
    path.write_text(path.read_text().replace("  - -S\n", ""))
    found = text(path)
    assert "$ python -m torch.distributed.run --nnodes 1 --nproc-per-node 4" in found
    assert "launch      torchrun, 1 node of 4 processes" in found and "dp 2" in found and "of 4 processes" in found


def test_judgments_say_their_terms(here):
    terms = {"judge": "calibrated", "confirm_fail": True, "zero_envelope": "fail"}
    arms = [{"name": f"base{n}", "role": "base"} for n in range(3)] + [
        {"name": "feat0", "role": "feature", "environment": {"A": "b c"}}
    ]
    found = text(training(here / "work", judgments=[{"check": "drift", "metric": "loss", **terms}], arms=arms))
    for count, limits in ((3, "below 3.2, FAIL above 5.8"), (4, "below 2.65, FAIL above 4.3"), (5, "below 2.35")):
        assert f"PASS {limits}" in found and f"drift_calibrated_{count}" in found
    assert "INVESTIGATE or a first FAIL adds base runs, up to 4 in all" in found
    assert "and the feature not: FAIL" in found and "A='b c'" in found


def test_parity_names_files_or_commands(here):
    found = text(parity(here / "work"))
    assert "rollout, the file rollout.jsonl" in found and "logging/" not in found and "cost" not in found
    assert "max_abs_dlogp: PASS up to 0.06, FAIL above (ws1/max_abs_dlogp/*/bf16)" in found
    assert "mean_abs_dlogp: MEASURED, never gated" in found


def test_a_slurm_job_says_what_it_asks_for():
    found = " ".join(text_of_pithtrain().split())
    assert "srun --nodes=2 --gpus-per-node=8 torchrun --nnodes=2 --nproc-per-node=8" in found
    assert "at most 96 GPU-hours" in found and "commands srun" in found


def text_of_pithtrain():
    (document,), _ = linting.lint([ROOT / "specs" / "correctness" / "qwen3-30b-a3b.yaml"])
    data = {**document.data, "arms": [{**arm, "revision": None} for arm in document.data["arms"]]}
    for arm in data["arms"]:
        del arm["revision"]
    return planning.text(type(document)(path=document.path, data=data, keys={}, values={}, digest=""))


def test_plan_and_dry_run_write_nothing(here):
    path = training(here / "work")
    before = sorted(here.rglob("*"))
    plan, dry = rlspec("plan", path, "--set", "trainer.steps=9"), rlspec("run", path, "--dry-run")
    assert plan.code == dry.code == 0 and "9 steps" in plan.out and "6 steps" in dry.out
    assert sorted(here.rglob("*")) == before


def test_render_writes_the_run_files_and_nothing_else(here):
    path = training(here / "work")
    done = rlspec("render", path, "--set", "trainer.settings.seed=41")
    files = [Path(line) for line in done.out.splitlines()]
    assert [file.name[-8:] for file in files] == ["base0.py", "base1.py", "feat0.py"]
    assert len({file.read_bytes() for file in files}) == 1 and "1000003 * 41" in files[0].read_text()
    assert sorted(file.name for file in files[0].parent.iterdir()) == [file.name for file in files]
    assert rlspec("list", "runs").out == "no runs\n"  # nothing ran


def test_render_says_why_there_is_nothing_to_render(here):
    done = rlspec("render", parity(here / "work"))
    assert done.code == 2 and "no template" in done.err and not (here / "workspace").exists()
