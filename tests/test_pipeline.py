"""Runs of a real trainer of a few lines: what is executed, reused, recorded, judged, and what is left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess

import pytest
import yaml

from rlspec import launch, linting, pipeline, reports, runs, verdicts
from rlspec.checks import CHECKS
from tests.processes import time_flies_once
from tests.tiny import parity, report, rlspec, run_folder, save, starts, statuses, tokens, training

# What identical code and a small offset can come out as, by luck:
SETTLES = {"seed": 233}  # the ratio is 3.3 with two base runs of identical code, 1.7 with three
UNLUCKY = {"seed": 128}  # 6.1 with two base runs of identical code, 1.8 with three
STAYS = {"seed": 3, "offset": 0.002}  # between 3 and 5, however many base runs


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def spec(here, seed=3, offset=0.0, judgment=None, features=None, **changes):
    """A spec whose feature is off by `offset`; base arms are drawn anew at each start."""
    path = training(here / "work", **changes)
    text = path.read_text().replace("seed: 3", f"seed: {seed}").replace("OFFSET: '0'", f"OFFSET: '{offset}'")
    for key, value in (judgment or {}).items():
        text = text.replace("metric: loss", f"metric: loss\n  {key}: {value}")
    for old, new in (features or {}).items():
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    return path


def written(here):
    return (here / "workspace").exists() or (here / "logging").exists()


def test_arms_that_left_one_old_log_are_no_runs(here):
    """As a launcher does that prints a metrics file of another day."""
    path = spec(here)
    rlspec("run", path)
    (log,) = (here / "logging").rglob("*-base0.log")
    trainer = yaml.safe_load(path.read_text())["trainer"] | {"command": ["cat", str(log)]}
    done = rlspec("run", save(path, yaml.safe_load(path.read_text()) | {"trainer": trainer}))
    said = " ".join(done.out.split())
    assert done.code == 4 and "is the log of base0 to the byte, with 6 values of step_time: a copy" in said
    assert rlspec("run", path, "--from", run_folder()).code == 4
    assert rlspec("judge", run_folder()).code == 4
    shutil.rmtree(here / "logging")
    assert "and neither is there any more: was it a copy?" in " ".join(rlspec("judge", run_folder()).out.split())


# A run, its folder, its report


def test_a_run_leaves_exactly_the_files_of_the_language(here):
    done = rlspec("run", spec(here))
    assert done.code == 0, done.err
    folder = run_folder()
    stem = "pp1-dp1-cp1-ep1-seq128-bf16"
    arms = ("base0", "base1", "feat0")
    expected = {f"{stem}-{arm}{end}" for arm in arms for end in (".py", ".records.jsonl", ".provenance.json")}
    assert {path.name for path in folder.iterdir()} == expected | {"plan.json", "report.json"}
    logs = here / "logging" / folder.relative_to(here / "workspace")
    assert {path.name for path in logs.iterdir()} == {f"{stem}-{arm}.log" for arm in arms}
    assert len({path.read_bytes() for path in folder.glob("*.py")}) == 1
    assert "this is pp1-dp1-cp1-ep1-seq128-bf16-feat0" in (logs / f"{stem}-feat0.log").read_text()
    for root in ("workspace", "logging"):
        assert (here / root / ".gitignore").read_text() == "*\n"
    assert (logs.parent / "latest").resolve() == logs


def test_plan_provenance_and_report_are_whole(here):
    path = spec(here)
    rlspec("run", path, "--set", "question=Really?")
    folder, made = run_folder(), report()
    plan = runs.load(folder / "plan.json", "plan")
    assert plan["overrides"] == made["overrides"] == ["question=Really?"]
    assert plan["spec"]["data"]["question"] == made["question"] == "Really?"
    assert plan["contract"]["digest"] == made["contract"]["digest"]
    runs.load(folder / "report.json", "report")
    for arm in made["arms"]:
        state = json.loads((folder / f"{made['tag']}-{arm['name']}.provenance.json").read_text())
        assert state["run_file_digest"] == arm["provenance"]["run_file_digest"]
        assert state["status"] == arm["status"] == "done" and state["returncode"] == 0 and arm["steps"] == 6
        assert reports.digest(folder / f"{made['tag']}-{arm['name']}.records.jsonl") == state["records_digest"]
    assert made["run"]["name"] == folder.name and made["counts"] == {"judged": 1, "expected": 1}


def test_two_runs_in_one_second_and_the_link_to_the_newest(here):
    path = spec(here)
    for _ in range(2):
        assert rlspec("run", path).code in (0, 3)
    first, second = sorted((here / "workspace/validate-correctness/char-gpt").glob("2*"))
    assert run_folder() == second and (first / "report.json").exists() and (second / "report.json").exists()


def test_the_command_gets_the_interpreter_and_a_value_cannot_leave_its_quotes(here):
    evil = 'x"; import os; os.system("touch pwned")'
    path = spec(here, features={"seed: 3": f"seed: 3\n    title: {json.dumps(evil)}"})
    template = here / "work" / "train.py.j2"
    template.write_text(template.read_text() + "\nprint({{ settings.title | py }})\n")
    assert rlspec("run", path).code == 0
    log = next((here / "logging").rglob("*base0.log")).read_text()
    assert evil in log and not list(here.rglob("pwned"))


# Base runs that are added


def test_investigate_adds_a_base_run_by_itself_and_settles(here):
    done = rlspec("run", spec(here, **SETTLES))
    made = report()
    assert done.code == 0 and made["verdicts"][0]["status"] == "PASS"
    assert list(statuses(made)) == ["base0", "base1", "feat0", "base2"]
    assert made["verdicts"][0]["statistic"] == pytest.approx(1.6835334454746103, rel=1e-12)
    assert "base2: added, since loss is INVESTIGATE" in done.err
    plan = runs.load(run_folder() / "plan.json")
    assert [arm["name"] for arm in plan["arms"] if arm["added"]] == ["base2"]


def test_base_runs_are_added_up_to_max_base_runs(here):
    done = rlspec("run", spec(here, **STAYS, judgment={"max_base_runs": 3}))
    made = report()
    assert done.code == 3 and list(statuses(made)) == ["base0", "base1", "feat0", "base2"]
    assert made["verdicts"][0]["statistic"] == pytest.approx(3.8943763458220952, rel=1e-12)
    assert rlspec("run", here / "work" / "spec.yaml", "--resume", "--investigate-ok").code == 0
    assert starts(here / "work") == 4


def test_confirm_fail_adds_a_base_run_before_a_fail_is_final(here):
    assert rlspec("run", spec(here, **UNLUCKY)).code == 1
    assert list(statuses(report())) == ["base0", "base1", "feat0"]
    (here / "work" / "counter").unlink()
    assert rlspec("run", spec(here, **UNLUCKY, judgment={"confirm_fail": "true"})).code == 0
    assert list(statuses(report())) == ["base0", "base1", "feat0", "base2"]


def test_an_added_run_that_cannot_be_written_does_not_cost_the_verdict(here):
    path = spec(here, **SETTLES)
    template = here / "work" / "train.py.j2"
    # The third start edits the template, as a user might during a long run.
    edit = f"if number == 2: open({str(template)!r}, 'a').write('# edited\\n')\n"
    template.write_text(template.read_text() + edit)
    done = rlspec("run", path)
    assert done.code == 3 and any("base2 could not be added" in note for note in report()["notes"])


# Arms that fail


def crashing(here, arm="base1", **changes):
    """A spec of which one arm crashes at step 3, until a file `fixed` lies beside it."""
    path = spec(here, **changes)
    return change(path, lambda data: arm_of(data, arm).setdefault("environment", {}).update(CRASH_AT="3"))


def change(path, edit):
    import yaml

    data = yaml.safe_load(path.read_text())
    edit(data)
    return save(path, data)


def arm_of(data, name):
    return next(arm for arm in data["arms"] if arm["name"] == name)


def test_no_arm_starts_after_one_that_failed(here):
    done = rlspec("run", crashing(here))
    made = report()
    assert done.code == 4 and statuses(made) == {"base0": "done", "base1": "failed", "feat0": "skipped"}
    failed = made["arms"][1]
    assert failed["tail"][-1] == "a bad day at step 3" and failed["log"].endswith("base1.log")
    assert "arm base1" in made["verdicts"][0]["reason"] and starts(here / "work") == 2
    assert "a bad day at step 3" in done.out and "base1.log" in done.out
    assert "base1 failed; `rlspec run" in done.err and "--retry-errors` tries again" in done.err


def test_keep_going_starts_the_others(here):
    done = rlspec("run", crashing(here), "--keep-going")
    assert done.code == 4
    assert statuses(report()) == {"base0": "done", "base1": "failed", "feat0": "done"}


def test_resume_leaves_a_failed_arm_to_retry_errors_and_starts_nothing_behind_it(here):
    path = crashing(here)
    rlspec("run", path)
    run = run_folder()
    done = rlspec("run", path, "--resume")
    assert done.code == 4 and statuses(report())["feat0"] == "skipped" and starts(here / "work") == 2
    rlspec("run", path, "--resume", "--keep-going")
    assert statuses(report()) == {"base0": "reused", "base1": "failed", "feat0": "done"}
    kept = (run / "pp1-dp1-cp1-ep1-seq128-bf16-base1.provenance.json").read_bytes()
    assert rlspec("run", path, "--retry-errors").code == 4  # the old record stays until a retry succeeds
    assert (run / "pp1-dp1-cp1-ep1-seq128-bf16-base1.provenance.json").read_bytes() == kept
    (here / "work" / "fixed").touch()
    done = rlspec("run", path, "--retry-errors")
    assert done.code in (0, 1, 3) and run_folder() == run
    assert statuses(report()) == {"base0": "reused", "base1": "done", "feat0": "reused"}
    assert starts(here / "work") == 5
    assert report()["arms"][1]["log"].endswith("bf16-base1.log")


def test_a_command_that_is_not_there_is_an_error_of_its_arm(here):
    done = rlspec("run", spec(here, features={"'{python}'": "no-such-program"}))
    assert done.code == 4 and "no-such-program" in report()["arms"][0]["reason"]


def test_a_run_file_that_cannot_run_has_an_error_of_its_own(here):
    path = spec(here)
    template = here / "work" / "train.py.j2"
    template.write_text("import os\nos.no_such_name\n")
    assert rlspec("run", path).code == 4
    arm = report()["arms"][0]
    assert "could not run the file pp1-dp1-cp1-ep1-seq128-bf16-base0.py" in arm["reason"]
    assert "AttributeError" in " ".join(arm["tail"])


def test_a_log_without_a_step_and_one_that_is_too_short_are_errors(here):
    path = spec(here)
    template = here / "work" / "train.py.j2"
    whole = template.read_text()
    template.write_text("print('nothing to see')\n")
    assert rlspec("run", path).code == 4
    template.write_text(whole.replace("range(1, {{ steps | py }} + 1)", "range(1, {{ steps | py }})"))
    assert rlspec("run", path).code == 4
    assert "6" in report()["verdicts"][0]["reason"] and report()["verdicts"][0]["status"] == "ERROR"


def test_time_limit(here):
    path = change(spec(here, time_limit="1h"), lambda d: arm_of(d, "base0").update(environment={"SLEEP_AT": "2"}))
    with time_flies_once(lambda: any("step 1/" in log.read_text() for log in here.glob("logging/*/*/2*/*base0.log"))):
        assert rlspec("run", path).code == 4
    assert report()["arms"][0]["reason"].endswith("reached at step 1")


def test_build_runs_before_each_arm_and_its_failure_is_the_arms(here):
    path = spec(here, build=[["sh", "-c", "echo $OFFSET >> built"]])
    assert rlspec("run", path).code == 0
    # Without revisions there is one tree, so one build.
    assert (here / "work" / "built").read_text().splitlines() == [""]
    path = spec(here, build=[["sh", "-c", "echo no compiler >&2; exit 7"]])
    count = starts(here / "work")
    assert rlspec("run", path).code == 4 and starts(here / "work") == count
    arm = report()["arms"][0]
    assert arm["reason"].startswith("build command sh -c") and "7" in arm["reason"]
    assert arm["tail"] == ["no compiler"] and arm["log"].endswith("base0.build.log")
    assert rlspec("run", spec(here, build=[["no-such-compiler"]])).code == 4
    assert "no-such-compiler" in report()["arms"][0]["reason"]


# Arms of an earlier run


def test_from_takes_the_arms_that_are_still_valid(here):
    path = spec(here)
    rlspec("run", path)
    first = run_folder()
    change(path, lambda data: arm_of(data, "feat0").update(environment={"OFFSET": "0.05"}))
    done = rlspec("run", path, "--from", first.name)
    assert done.code == 1 and statuses(report()) == {"base0": "reused", "base1": "reused", "feat0": "done"}
    assert run_folder() != first and starts(here / "work") == 4
    assert "feat0: runs again, since the environment differs" in done.err
    rlspec("run", path, "--from", first, "--set", "trainer.steps=5")  # another run file, another tag: nothing is valid
    assert set(statuses(report()).values()) == {"done"}


def test_from_takes_over_base_runs_that_were_added(here):
    path = spec(here, **SETTLES)
    rlspec("run", path)
    first = run_folder()
    done = rlspec("run", path, "--from", first.name)
    assert done.code == 0 and set(statuses(report()).values()) == {"reused"} and starts(here / "work") == 4
    assert list(statuses(report())) == ["base0", "base1", "feat0", "base2"]


def test_records_that_were_edited_are_not_reused(here):
    path = spec(here)
    rlspec("run", path)
    first = run_folder()
    records = next(first.glob("*base1.records.jsonl"))
    records.write_text(records.read_text().replace("4.0", "4.5"))
    done = rlspec("run", path, "--from", first.name)
    assert statuses(report())["base1"] == "done" and "base1.records.jsonl is not what the arm wrote" in done.err


def test_a_complete_run_is_never_overwritten(here):
    path = spec(here)
    change(path, lambda data: data["trainer"].update(command=["{python}", "{run_file}", "cfg.json"]))
    (here / "work" / "cfg.json").touch()
    rlspec("run", path)
    first = run_folder()
    kept = {file: file.read_bytes() for file in here.rglob("*-*.*") if file.is_file()}
    (here / "work" / "cfg.json").write_text("{}")
    for option in ("--resume", "--retry-errors"):
        done = rlspec("run", path, option)
        assert done.code == 2 and f"{first.name} is complete, and since then base0 is not as it ran" in done.err, done
        assert "cfg.json, which the command names, changed" in done.err and f"--from {first.name}" in done.err
    assert kept == {file: file.read_bytes() for file in here.rglob("*-*.*") if file.is_file()}
    assert rlspec("run", path, "--from", first.name).code in (0, 1, 3) and run_folder() != first


def test_a_suite_that_was_cut_off_goes_on_and_begins_what_it_had_not_reached(here, monkeypatch):
    path = spec(here)
    suite = [path.with_name(f"{name}.yaml") for name in "abcd"]
    for file in suite:
        shutil.copy(path, file)
    assert "none of these specs has an earlier run" in rlspec("run", *suite, "--resume").err and not written(here)
    rlspec("run", suite[3])
    (old,) = here.glob("workspace/*/*/2*-d")
    for folder in here.glob("*/*/*/2*-d"):
        folder.rename(folder.with_name("20200101T000000Z-d"))
    real = pipeline.arms.run

    def run(session, step):
        if (session.spec.path.stem, step.arm.name) == ("b", "feat0"):
            raise launch.Interrupted(signal.SIGINT)
        return real(session, step)

    with monkeypatch.context() as patch:
        patch.setattr(pipeline.arms, "run", run)
        assert rlspec("run", *suite).code == 130 and starts(here / "work") == 8
    done = rlspec("run", *suite, "--resume")
    assert done.code in (0, 1, 3) and starts(here / "work") == 8 + 1 + 3 + 3, done.err
    assert len(list(here.glob("workspace/*/*/2*"))) == 5, "a and b went on, c had no run, and d an old one"
    count = starts(here / "work")
    assert rlspec("run", *suite, "--resume").code in (0, 1, 3) and starts(here / "work") == count


def test_one_arm_alone(here):
    path = spec(here)
    done = rlspec("run", path, "--arm", "base0")
    assert done.code == 4 and statuses(report()) == {"base0": "done", "base1": "skipped", "feat0": "skipped"}
    first = run_folder()
    before = sorted(here.rglob("*"))
    done = rlspec("run", path, "--from", first.name, "--arm", "feat0")
    assert done.code == 2 and "arm base1 of" in done.err and "--arm base1" in done.err
    assert sorted(here.rglob("*")) == before  # what was refused has left nothing
    assert rlspec("run", path, "--resume").code == 0
    assert statuses(report()) == {"base0": "reused", "base1": "done", "feat0": "done"}
    assert rlspec("run", path, "--resume", "--arm", "feat0").code in (0, 1, 3)
    assert statuses(report()) == {"base0": "reused", "base1": "reused", "feat0": "done"}


def test_a_run_goes_on_only_with_the_spec_that_it_began_with(here):
    path = spec(here)
    assert rlspec("run", path, "--resume").code == 2 and not written(here)
    rlspec("run", path, "--set", "trainer.settings.seed=2")
    done = rlspec("run", path, "--resume")
    assert done.code == 2 and "was started with --set trainer.settings.seed=2, not with no --set" in done.err
    assert rlspec("run", path, "--resume", "--set", "trainer.settings.seed=2").code in (0, 1, 3)
    change(path, lambda data: data["trainer"].update(steps=5))
    done = rlspec("run", path, "--resume", "--set", "trainer.settings.seed=2")
    assert done.code == 2 and "has changed since" in done.err and "--from" in done.err


# What is refused, and what is blocked, before anything is written


def test_a_repository_that_is_not_there_is_refused_before_anything_is_written(here):
    arms = (("base0", "base", "main"), ("base1", "base", "main"), ("feat0", "feature", "HEAD"))
    arms = [{"name": name, "role": role, "revision": revision} for name, role, revision in arms]
    path = spec(here, repository="nowhere", arms=arms)
    for action in ("run", "plan"):
        done = rlspec(action, path)
        assert done.code == 2 and "nowhere" in done.err and str(path) in done.err, done
    assert not written(here)


def test_a_revision_outside_of_git_says_what_to_set(here):
    data = {"arms": [{"name": n, "role": r, "revision": "main"} for n, r in
                     (("base0", "base"), ("base1", "base"), ("feat0", "feature"))]}  # fmt: skip
    done = rlspec("run", spec(here, **data))
    assert done.code == 2 and "repository:" in done.err and not written(here)


@pytest.mark.parametrize(
    "option",
    [
        ["--arm", "feat1"],
        ["--from", "nothing"],
        ["--set", "trainer.steps=x"],
        ["-k", "zz"],
        ["-o", "report.html"],
        ["-o", "report"],
        ["--resume"],
    ],
)
def test_bad_options_write_nothing(here, option):
    done = rlspec("run", spec(here), *option)
    assert done.code == 2 and done.err.count("\n") <= 2 and not written(here) and starts(here / "work") == 0


@pytest.mark.parametrize("value", ["0", "0.5"])
def test_a_variable_of_the_shell_that_would_make_arms_equal_is_refused(here, monkeypatch, value):
    monkeypatch.setenv("OFFSET", value)
    path = spec(here)
    done = rlspec("run", path)
    assert done.code == 2 and "OFFSET is set in the shell, arm feat0 declares it, and base0, base1 would" in done.err
    assert "env -u OFFSET" in done.err and not written(here)
    change(path, lambda data: [arm.update(environment={"OFFSET": "0"}) for arm in data["arms"]])
    assert rlspec("run", path).code in (0, 1, 3), "what all arms declare, no arm inherits"


def test_where_a_process_finds_its_files_may_differ_from_the_shell(here):
    path = spec(here)
    change(path, lambda data: arm_of(data, "feat0").update(environment={"PATH": f"/nowhere:{os.environ['PATH']}"}))
    assert rlspec("run", path).code in (0, 1, 3)
    change(path, lambda data: arm_of(data, "feat0").update(environment={"PATH": os.environ["PATH"]}))
    assert rlspec("run", path).code == 2, "the same value: the arms are equal"


def test_what_a_batch_system_sets_is_refused_only_where_it_makes_arms_equal_and_only_for_arms_that_run(
    here, monkeypatch
):
    path = spec(here)
    change(path, lambda data: arm_of(data, "feat0").update(environment={"OMP_NUM_THREADS": "1", "OFFSET": "0"}))
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert rlspec("run", path).code in (0, 1, 3)
    assert "base0, base1 took OMP_NUM_THREADS from the shell, where feat0 declares another value" in report()["notes"]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert rlspec("run", path).code == 2, "the same value: the arms are equal"
    monkeypatch.setenv("OFFSET", "0")
    assert rlspec("run", path, "--arm", "feat0", "--from", run_folder().name).code in (0, 1, 3)
    before = set((here / "workspace").rglob("*"))
    assert rlspec("run", path, "--arm", "base1", "--from", run_folder().name).code == 2
    assert set((here / "workspace").rglob("*")) == before


def test_a_bad_template_writes_nothing(here):
    path = spec(here)
    (here / "work" / "train.py.j2").write_text("x = {{ no_such_value | py }}\n")
    done = rlspec("run", path)
    assert done.code == 2 and "train.py.j2:1" in done.err and "no_such_value" in done.err and not written(here)


def test_an_unmet_requirement_is_blocked_with_its_reason(here):
    path = spec(here, requires={"commands": ["no-such-program"]})
    done = rlspec("run", path, "-o", here / "out.json")
    made = json.loads((here / "out.json").read_text())
    assert done.code == 5 and made["outcome"] == "BLOCKED" and not written(here) and starts(here / "work") == 0
    assert "'no-such-program' is not on PATH" in made["verdicts"][0]["reason"] and "BLOCKED" in done.out
    assert rlspec("run", path, "--blocked-ok").code == 0


# Expectations


@pytest.mark.parametrize(
    ("expect", "outcome", "code", "words"),
    [
        ("FAIL", "FAIL", 0, None),
        ("FAIL", "PASS", 1, "expected FAIL, got PASS"),
        ("PASS", "FAIL", 1, "expected PASS, got FAIL"),
        ("PASS", "INVESTIGATE", 1, "expected PASS, got INVESTIGATE"),
        ("ERROR", "ERROR", 0, None),
        ("BLOCKED", "BLOCKED", 0, None),
        ("FAIL", "ERROR", 4, "expected FAIL, got ERROR"),
        ("FAIL", "BLOCKED", 5, "expected FAIL, got BLOCKED"),
        ({"status": "FAIL", "judgments": {"loss": "FAIL"}}, "FAIL", 0, None),
        ({"status": "FAIL", "judgments": {"drift": "PASS"}}, "FAIL", 1, "drift: expected PASS, got FAIL"),
        ({"status": "FAIL", "judgments": {"x": "FAIL"}}, "FAIL", 1, "x: expected FAIL, got no verdict"),
    ],
)
def test_expect(here, expect, outcome, code, words):
    (document,), _ = linting.lint([spec(here, expect=expect)])
    read = CHECKS["correctness"].parse(document)
    verdict = {"judgment": "drift", "subject": "loss", "status": outcome}
    made = {"outcome": outcome, "exit_code": verdicts.exit_code([outcome]), "verdicts": [verdict], "arms": []}
    found = reports.expected(read, made)
    assert found["exit_code"] == code
    assert found["expect"]["met"] == (words is None) and found["expect"]["problems"] == ([words] if words else [])


def test_a_control_that_does_its_work_exits_0_and_one_that_does_not_exits_1(here):
    done = rlspec("run", spec(here, offset=0.05, expect="FAIL"))
    assert done.code == report()["exit_code"] == 0 and "as expected" in done.out and report()["outcome"] == "FAIL"
    done = rlspec("run", spec(here, expect="FAIL"))
    assert done.code == report()["exit_code"] == 1 and "expected FAIL, got PASS" in done.out


def test_an_error_that_was_not_expected_keeps_its_code_and_one_that_was_is_met(here):
    assert rlspec("run", crashing(here, expect="FAIL")).code == 4
    assert report()["expect"]["problems"] == ["expected FAIL, got ERROR"]
    assert rlspec("run", crashing(here, expect="ERROR")).code == 0
    path = spec(here, expect="PASS", requires={"commands": ["no-such-program"]})
    assert rlspec("run", path).code == 5


# Parity


def test_parity_of_two_files(here):
    path = parity(here / "work")
    done = rlspec("run", path)
    made = report()
    assert done.code == 0 and statuses(made) == {"rollout": "done", "train": "done"}
    assert made["verdicts"][0]["statistic"] == pytest.approx(0.001)
    assert made["arms"][0]["log"] == str(here / "work" / "rollout.jsonl")
    assert rlspec("run", path, "--from", run_folder().name, "--arm", "train").code == 0


DUMP = "import sys, json; sys.exit('no engine') if {fails} else open(sys.argv[1], 'w').write(open({source!r}).read())"


def dumping(here, fails="False"):
    path = parity(here / "work")
    source = here / "work" / "rollout.jsonl"
    code = DUMP.format(source=str(source), fails=fails)
    return change(path, lambda data: data["arms"].__setitem__(
        0, {"name": "rollout", "role": "rollout", "command": ["{python}", "-S", "-c", code, "{records}"]}))  # fmt: skip


def test_parity_with_a_command_that_writes_its_records(here):
    assert rlspec("run", dumping(here)).code == 0
    assert (run_folder() / "rollout.records.jsonl").exists()
    assert report()["arms"][0]["seconds"] is not None and report()["arms"][1]["seconds"] is None


def test_a_parity_command_can_be_retried(here):
    fixed = here / "work" / "fixed"
    path = dumping(here, f"not __import__('os').path.exists({str(fixed)!r})")
    assert rlspec("run", path).code == 4
    assert report()["arms"][0]["tail"] == ["no engine"]
    fixed.touch()
    done = rlspec("run", path, "--retry-errors")
    assert done.code == 0, done.out
    folder = run_folder()
    records, state = folder / "rollout.records.jsonl", folder / "rollout.provenance.json"
    assert sorted(folder.glob("*rollout*")) == [state, records]
    assert str(records) in json.loads(state.read_text())["argv"]


def test_a_parity_command_that_writes_nothing_is_an_error(here):
    path = change(dumping(here), lambda data: data["arms"][0].update(command=["true", "{records}"]))
    assert rlspec("run", path).code == 4
    assert report()["arms"][0]["reason"] == "the command wrote no rollout.records.jsonl"


def test_a_given_file_that_changed_is_not_judged_again(here):
    path = parity(here / "work")
    rlspec("run", path)
    tokens(here / "work" / "train.jsonl", 0.002)
    done = rlspec("judge", run_folder())
    assert done.code == 4 and "has changed since arm train was judged" in done.err
    assert rlspec("run", path, "--resume").code == 0
    assert report()["verdicts"][0]["statistic"] == pytest.approx(0.002)


# The folder of runs


def test_runs_lie_at_the_top_of_the_repository_that_holds_the_current_folder(here, monkeypatch):
    subprocess.run(["git", "init", "-q", here], check=True)
    (here / "deep").mkdir()
    path = spec(here)
    monkeypatch.chdir(here / "deep")
    assert rlspec("run", path).code == 0
    assert (here / "workspace").is_dir() and not (here / "deep" / "workspace").exists()


def test_a_folder_that_cannot_be_written_is_named(here):
    (here / "workspace").write_text("in the way")
    done = rlspec("run", spec(here))
    assert done.code == 2 and str(here / "workspace") in done.err and starts(here / "work") == 0


def test_what_the_machine_refuses_is_an_error_and_no_traceback(here, monkeypatch):
    (here / "gone").mkdir()
    path = spec(here)
    monkeypatch.chdir(here / "gone")
    os.rmdir(here / "gone")
    done = rlspec("run", path)
    assert done.code == 4 and done.err.startswith("error: ")
