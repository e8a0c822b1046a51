"""The command line as a user meets it: help, exit codes, what goes to which stream, what is refused."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import click
import pytest
import yaml
from jsonschema import Draft7Validator

from rlspec import cli, schema
from tests.gitrepo import commit, git
from tests.processes import LONG, wait_for
from tests.tiny import parity, report, rlspec, run_folder, save, starts, statuses, training

ROOT = Path(__file__).parents[1]
COMMANDS = sorted(cli.main.commands)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def process(here, *arguments, **options):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80"}
    command = [sys.executable, "-m", "rlspec", *map(str, arguments)]
    return subprocess.Popen(command, cwd=here, env=environment, stderr=subprocess.PIPE, text=True, **options)


# Help


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_fits_80_columns_and_explains_every_option(here, command):
    done = rlspec(*filter(None, [command]), "--help")
    assert done.code == 0 and [line for line in done.out.splitlines() if len(line) > 80] == []
    chosen = cli.main.commands[command] if command else cli.main
    for option in chosen.params:
        if isinstance(option, click.Option):
            assert option.help and option.help.rstrip().endswith("."), option
    assert chosen.help and "\b" not in done.out and "  Usage" not in done.out


def test_help_names_every_command_with_a_whole_sentence(here):
    listed = rlspec("--help").out.partition("Commands:")[2].partition("Exit codes")[0]
    for command in COMMANDS:
        (line,) = [line for line in listed.splitlines() if re.match(rf"  {command} ", line)]
        assert line.endswith(".") and not line.endswith("..."), line


def test_exit_codes_are_told(here):
    told = rlspec("--help").out
    for code in ("0  PASS", "1  FAIL", "2  bad", "3  INVESTIGATE", "4  ERROR", "5  BLOCKED", "130, 143"):
        assert code in told


def test_version(here):
    from rlspec import __version__

    assert rlspec("--version").out == f"rlspec, version {__version__}\n"


def test_every_option_has_a_variable(here, monkeypatch):
    training(here / "work")
    monkeypatch.setenv("RLSPEC_LINT_FORMAT", "json")
    assert rlspec("lint", "work").out == "[]\n"
    monkeypatch.setenv("RLSPEC_RUN_DRY_RUN", "1")
    monkeypatch.setenv("RLSPEC_RUN_SET", "trainer.steps=9")
    done = rlspec("run", "work")
    assert "9 steps" in done.out and not (here / "workspace").exists()
    for command in cli.main.commands.values():
        for option in command.params:
            if isinstance(option, click.Option):
                assert re.fullmatch(f"RLSPEC_{command.name.upper()}_[A-Z_]+", option.envvar), option


def test_completion(here):
    done = process(here, stdout=subprocess.PIPE)
    done.communicate()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "_RLSPEC_COMPLETE": "bash_complete"}
    environment |= {"COMP_WORDS": "rlspec li", "COMP_CWORD": "1"}
    code = "from rlspec.cli import main; main(prog_name='rlspec')"
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True).stdout
    assert found.split() == ["plain,lint", "plain,list"]


# Usage


@pytest.mark.parametrize(
    "arguments",
    [["nonsense"], ["run"], ["run", "x.yaml", "--nonsense"], ["list", "things"], ["judge"], ["lint", "nowhere"],
     ["run", "nowhere"], ["plan", "nowhere"], ["schema", "x"], ["init", "x"], ["clean", "--keep", "-1"],
     ["judge", "a", "b", "--kind", "x"], ["report", "x"], ["render", "nowhere"], ["doctor", "nowhere"]],
)  # fmt: skip
def test_bad_usage_exits_2_and_writes_nothing(here, arguments):
    done = rlspec(*arguments)
    assert done.code == 2 and done.out == "" and done.err
    assert list(here.iterdir()) == []


def test_a_message_says_what_is_there_instead(here):
    assert "did you mean 'correctness'" in rlspec("init", "corectness").err
    assert "did you mean 'plan'" in rlspec("schema", "plam").err
    assert "there is no nowhere" in rlspec("run", "nowhere").err


def test_the_errors_of_the_machine_exit_4(here, monkeypatch):
    path = training(here / "work")
    monkeypatch.setattr("rlspec.pipeline.runs.create", broken)
    done = rlspec("run", path)
    assert done.code == 4 and done.err == "error: /full: No space left on device\n"


def broken(*_):
    raise OSError(28, "No space left on device", "/full")


def test_an_interrupt_outside_of_a_run_exits_130(here, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("rlspec.linting.lint", interrupted)
    assert rlspec("lint", ".").code == 130


# init, schema


@pytest.mark.parametrize("kind", schema.KINDS)
def test_a_spec_of_init_lints_once_it_is_filled_in(here, kind):
    assert kind in rlspec("init", "--help").out
    (here / "x.yaml").write_text(rlspec("init", kind).out)
    done = rlspec("lint", "x.yaml")
    assert done.code == 2 and {line.split()[1] for line in done.out.splitlines() if "hint" not in line} >= {"RL005"}
    text = (here / "x.yaml").read_text()
    filled = {
        "<one sentence, shown at the top of every report>": "Does it?",
        "<run.py.j2>": "run.py.j2",
        "<your-branch>": "fused-router",
        "<rollout.jsonl>": "rollout.jsonl",
        "<train.jsonl>": "train.jsonl",
    }
    for placeholder, value in filled.items():
        text = text.replace(placeholder, value)
    (here / "x.yaml").write_text(text)
    for name in ("run.py.j2", "rollout.jsonl", "train.jsonl"):
        (here / name).write_text("")
    done = rlspec("lint", "x.yaml", "--strict")
    assert done.code == 0 and done.out == "" and done.err == "1 files, 0 errors, 0 warnings\n"


@pytest.mark.parametrize("name", [*schema.KINDS, "model", "contract", "pins", "records", "plan", "report"])
def test_schemas_are_draft_7_and_whole(here, name):
    loaded = json.loads(rlspec("schema", name).out)
    Draft7Validator.check_schema(loaded)
    assert "common.schema.json" not in json.dumps(loaded)


# lint


def bad(here):
    training(here / "work")
    save(here / "bad.yaml", {"kind": "correctnes"})
    return here / "bad.yaml"


def test_lint_text_json_and_github(here, monkeypatch):
    bad(here)
    done = rlspec("lint", ".")
    place = "bad.yaml:1:7: RL106 unknown kind 'correctnes'"
    assert done.code == 2 and done.out.splitlines()[0] == place and "  hint: did you mean 'correctness'?" in done.out
    assert done.err == "2 files, 1 errors, 0 warnings\n"
    (row,) = json.loads(rlspec("lint", ".", "--format", "json").out)
    assert [row[key] for key in ("path", "line", "column", "rule", "severity")] == ["bad.yaml", 1, 7, "RL106", "error"]
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    found = rlspec("lint", ".").out
    assert found.startswith("::error file=bad.yaml,line=1,col=7,title=RL106::unknown kind") and found.count("\n") == 1
    assert rlspec("lint", ".", "--format", "text").out.startswith(place)


def test_a_message_with_line_ends_is_one_annotation(here):
    save(here / "bad.yaml", {"kind": "a%\nb"})
    found = rlspec("lint", ".", "--format", "github").out
    assert found.count("\n") == 1 and "%25" in found


def test_warnings_do_not_count_unless_strict(here):
    path = training(here / "work")
    path.write_text(path.read_text().replace("question: Does it train alike?\n", ""))
    done = rlspec("lint", path)
    assert done.code == 0 and "RL228 warning" in done.out and done.err == "1 files, 0 errors, 1 warnings\n"
    done = rlspec("lint", path, "--strict")
    assert done.code == 2 and done.err == "1 files, 1 errors, 0 warnings\n"
    assert rlspec("plan", path).err.startswith(f"{path}:1:1: RL228 warning")


def test_lint_of_no_spec_at_all_is_a_mistake(here):
    assert rlspec("lint", ".").code == 2 and "no .yaml file" in rlspec("lint", ".").err


# run


def test_several_specs_run_in_order_and_the_worst_exit_code_counts(here):
    training(here / "a", name="first", expect="FAIL")  # not met: 1
    training(here / "b", name="second", requires={"commands": ["no-such-program"]})
    training(here / "c", name="third")
    done = rlspec("run", "a", "b", "c")
    assert done.code == 1 and re.findall("correctness: (.*)", done.out) == ["first", "second", "third"]
    assert rlspec("run", "b", "c").code == 5 and rlspec("run", "b", "c", "--blocked-ok").code == 0
    (here / "c" / "train.py.j2").write_text("raise SystemExit('boom')\n")
    assert rlspec("run", ".").code == 4


def test_one_bad_spec_keeps_all_from_running(here):
    training(here / "a")
    arms = (("base0", "base", "main"), ("base1", "base", "main"), ("feat0", "feature", "HEAD"))
    arms = [{"name": name, "role": role, "revision": revision} for name, role, revision in arms]
    training(here / "b", repository="nowhere", arms=arms)
    done = rlspec("run", ".")
    assert done.code == 2 and "nowhere" in done.err and starts(here / "a") == 0 and not (here / "workspace").exists()
    save(here / "b" / "spec.yaml", {"kind": "correctness"})
    done = rlspec("run", ".")
    assert done.code == 2 and "b/spec.yaml:1:1: RL102" in done.out and starts(here / "a") == 0


def test_k_picks_specs_by_name(here):
    training(here / "a", name="one")
    training(here / "b", name="second")
    assert rlspec("run", ".", "-k", "eco").code == 0
    assert starts(here / "a") == 0 and starts(here / "b") == 3
    done = rlspec("run", ".", "-k", "third")
    assert done.code == 2 and "whose name contains 'third'" in done.err


def test_a_report_for_several_specs_is_refused_before_anything_runs(here):
    training(here / "a")
    training(here / "b")
    done = rlspec("run", ".", "-o", "x.json")
    assert done.code == 2 and "several specs" in done.err and starts(here / "a") == 0


def test_one_report_of_a_suite_of_specs(here):
    """JUnit and Markdown hold all of them, also a spec that could not run."""
    training(here / "a", name="one")
    training(here / "b", name="second")
    third = training(here / "c", name="third")
    third.write_text(third.read_text().replace("- name: ", "- revision: HEAD\n  name: "))
    git(here, "init", "-q")
    commit(here, "a spec", {"c/spec.yaml": third.read_text()})
    done = rlspec("run", "a", "b", "c", "-o", "all.xml", "-o", "all.md")
    assert done.code == 4 and starts(here / "b") == 3, done.err
    suites = ElementTree.parse(here / "all.xml").getroot().findall("testsuite")
    assert [(one.get("name"), one.get("errors")) for one in suites] == [
        ("correctness.one", "0"), ("correctness.second", "0"), ("correctness.third", "1")]  # fmt: skip
    assert "uncommitted changes" in suites[2].find("testcase/error").get("message")
    assert [(here / "all.md").read_text().count(name) > 0 for name in ("one", "second", "third")] == [True] * 3
    (here / "folder.xml").mkdir()
    done = rlspec("run", "a", "b", "-o", "folder.xml")
    assert done.code == 4 and "cannot write the report" in done.err and starts(here / "b") == 6
    assert not list(here.glob(".*.partial"))


def test_the_report_of_a_suite_is_no_change_that_stops_its_later_specs(here):
    for name in ("a", "b"):
        path = training(here / name, name=name)
        path.write_text(path.read_text().replace("- name: ", "- revision: HEAD\n  name: "))
    files = {str(path.relative_to(here)): path.read_text() for path in here.glob("[ab]/*")}
    git(here, "init", "-q")
    commit(here, "specs", {**files, ".gitignore": "counter\n"})
    rlspec("run", "a", "b", "-o", "all.xml")
    assert "uncommitted" not in (here / "all.xml").read_text() and starts(here / "b") > 0


def test_an_error_that_a_suite_met_is_not_the_one_that_a_control_waits_for(here):
    training(here / "a")
    path = training(here / "c", expect={"status": "ERROR"})
    path.write_text(path.read_text().replace("- name: ", "- revision: HEAD\n  name: "))
    git(here, "init", "-q")
    commit(here, "a spec", {"c/spec.yaml": path.read_text()})
    assert rlspec("run", "a", "c", "-o", "all.xml").code == 4
    suite = ElementTree.parse(here / "all.xml").getroot().findall("testsuite")[1]
    assert suite.find("testcase[@name='expect[ERROR]']/failure") is not None


def test_reports_in_every_format(here):
    path = training(here / "work")
    assert rlspec("run", path, "-o", "r.json", "-o", "r.md", "-o", "deep/r.xml").code == 0
    assert json.loads((here / "r.json").read_text()) == report()
    assert "| status |" in (here / "r.md").read_text() and "<testsuite" in (here / "deep" / "r.xml").read_text()


def test_a_report_that_cannot_be_written_does_not_hide_the_verdict(here):
    path = training(here / "work")
    (here / "file").write_text("")
    done = rlspec("run", path, "-o", "file/r.json")
    assert done.code == 4 and "PASS  drift loss" in done.out and "file/r.json" in done.err
    assert report()["outcome"] == "PASS"


def test_the_table_goes_to_stdout_and_progress_to_stderr(here):
    done = rlspec("run", training(here / "work"))
    assert "feat0  step 6/6" in done.err and "step 6/6" not in done.out
    assert "ratio" in done.out and "PASS" not in done.err and "\x1b" not in done.out
    assert [line for line in done.out.splitlines() if len(line) > 80] == []


def test_colour_and_job_summary(here, monkeypatch):
    path = training(here / "work")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(here / "summary.md"))
    assert "\x1b[" in rlspec("run", path).out
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in rlspec("report", run_folder()).out
    assert (here / "summary.md").read_text().startswith("### PASS")


def test_verbose_prints_every_figure(here):
    rlspec("run", training(here / "work"))
    short, long = rlspec("report", run_folder()).out, rlspec("report", run_folder(), "-v").out
    assert "lag-1 autocorrelation" in long and "lag-1 autocorrelation" not in short


def test_set_is_linted_and_recorded(here):
    path = training(here / "work")
    done = rlspec("run", path, "--set", "trainer.stepz=3")
    assert done.code == 2 and "RL101" in done.out and not (here / "workspace").exists()
    assert rlspec("run", path, "--set", "dtype=fp32", "--set", "trainer.steps=4").code == 0
    assert report()["tag"].endswith("-fp32") and report()["overrides"] == ["dtype=fp32", "trainer.steps=4"]
    assert "set dtype=fp32, trainer.steps=4" in rlspec("report", run_folder()).out


def test_a_reader_that_leaves_does_not_change_the_exit_code(here):
    path = training(here / "work", expect="FAIL")
    (read, write) = os.pipe()
    os.close(read)
    child = process(here, "run", path, stdout=write)
    os.close(write)
    _, stderr = child.communicate(timeout=LONG)
    assert child.returncode == 1 and "Traceback" not in stderr and "BrokenPipe" not in stderr
    assert report()["outcome"] == "PASS"


def test_a_reader_that_leaves_a_list(here):
    (read, write) = os.pipe()
    os.close(read)
    child = process(here, "explain", "training", stdout=write)
    os.close(write)
    assert child.communicate(timeout=LONG)[1] == "" and child.returncode == 4


def test_closed_streams_do_not_change_the_exit_code(here):
    path = training(here / "work", expect="FAIL")
    command = f'exec "$0" -m rlspec run "{path}" <&- >&- 2>&-'
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["sh", "-c", command, sys.executable], cwd=here, env=environment, timeout=LONG)
    assert done.returncode == 1 and report()["outcome"] == "PASS"


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"])
def test_an_interrupted_run_goes_on_later(here, signum, code):
    path = training(here / "work")
    data = yaml.safe_load(path.read_text())
    data["arms"][1]["environment"] = {"SLEEP_AT": "3"}
    save(path, data)
    child = process(here, "run", path, stdout=subprocess.PIPE)
    wait_for(lambda: any("step 2/6" in log.read_text() for log in here.glob("logging/*/*/2*/*base1.log")))
    child.send_signal(signum)
    _, stderr = child.communicate(timeout=LONG)
    assert child.returncode == code and f"rlspec run {path} --resume" in stderr and "Traceback" not in stderr
    assert not (run_folder() / "report.json").exists()
    template = here / "work" / "train.py.j2"
    kept = template.read_text()
    template.write_text(kept.replace("600", "0"))
    refused = rlspec("run", path, "--resume")  # the run file would be another one
    assert refused.code == 2 and "base0.py is not what the template renders" in refused.err
    template.write_text(kept)
    done = rlspec("run", path, "--resume", "--set", "time_limit=1s")
    assert done.code == 2 and "was started with no --set, not with --set time_limit=1s" in done.err
    assert rlspec("judge", run_folder()).code == 4 and statuses(report())["base0"] == "done"


def test_parity_from_the_command_line(here):
    done = rlspec("run", parity(here / "work"))
    assert done.code == 0 and "max_abs_dlogp" in done.out and "PASS" in done.out
