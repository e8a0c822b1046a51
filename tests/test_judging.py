from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.tiny import Ended, parity, report, rlspec, run_folder, tokens, training


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, shift in (("base0", 0.0), ("base1", 0.01), ("feat0", 0.02)):
        log(tmp_path / f"{name}.jsonl", shift)
    return tmp_path


def log(path, shift, seconds=1.0):
    rows = [{"step": s, "loss": 4 / s + shift * (s > 1), "step_time": seconds} for s in range(1, 7)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


LOGS = ("base0.jsonl", "base1.jsonl", "feat0.jsonl")
JSONL = ("--reader", "jsonl", "--metric", "loss")


def judged(*arguments) -> dict:
    done = rlspec("judge", *arguments, "-o", "out.json")
    assert done.code in (0, 1, 3, 4), done.err
    return json.loads(Path("out.json").read_text())


def refused(*arguments) -> str:
    before = sorted(Path.cwd().rglob("*"))
    done = rlspec("judge", *arguments)
    assert done.code == 2 and done.out == "" and done.err.startswith("error: ") and done.err.count("\n") == 1, done
    assert sorted(Path.cwd().rglob("*")) == before
    return done.err


# Roles


def test_roles_by_name_in_the_order_of_names(here):
    made = judged("feat0.jsonl", "base1.jsonl", "base0.jsonl", *JSONL)
    assert [(arm["name"], arm["role"], Path(arm["log"]).name) for arm in made["arms"]] == [
        ("base0", "base", "base0.jsonl"),
        ("base1", "base", "base1.jsonl"),
        ("feat0", "feature", "feat0.jsonl"),
    ]
    assert made["verdicts"][0]["statistic"] == pytest.approx(2.0) and made["outcome"] == "PASS"
    assert {arm["status"] for arm in made["arms"]} == {"read"} and {arm["steps"] for arm in made["arms"]} == {6}


def test_roles_by_option_give_any_name_a_role_and_the_first_base_is_base0(here):
    for name, new in zip(LOGS, ("tue.jsonl", "mon.jsonl", "base9.jsonl"), strict=True):
        (here / name).rename(here / new)
    made = judged("--base", "mon.jsonl", "--base", "tue.jsonl", "--feature", "base9.jsonl", *JSONL)
    assert [Path(arm["log"]).name for arm in made["arms"]] == ["mon.jsonl", "tue.jsonl", "base9.jsonl"]
    assert made["verdicts"][0]["statistic"] == pytest.approx(1.0)  # against mon, which is 0.01 off


def test_options_and_names_can_be_mixed(here):
    (here / "base1.jsonl").rename(here / "other.jsonl")
    made = judged("base0.jsonl", "feat0.jsonl", "--base", "other.jsonl", *JSONL)
    assert [Path(arm["log"]).name for arm in made["arms"]] == ["other.jsonl", "base0.jsonl", "feat0.jsonl"]


def test_what_the_roles_lack_is_told(here):
    assert "loose.jsonl: base or feature?" in refused(*LOGS, here / log(here / "loose.jsonl", 0).name, *JSONL)
    assert "two base logs" in refused("base0.jsonl", "feat0.jsonl", *JSONL)
    assert "2 base and 0 feature logs" in refused("base0.jsonl", "base1.jsonl", *JSONL)
    assert "stands twice" in refused("base0.jsonl", "./base0.jsonl", "feat0.jsonl", *JSONL)
    (here / "base2.jsonl").symlink_to("base0.jsonl")
    assert "stands twice" in refused(*LOGS, "base2.jsonl", *JSONL)
    assert "there is no file base7.jsonl" in refused(*LOGS, "base7.jsonl", *JSONL)
    (here / "base8").mkdir()
    assert "base8 is a folder" in refused(*LOGS, "base8", *JSONL)


# Readers, metrics, options


def test_reader_and_metric_must_be_known(here):
    assert "name the --reader" in refused(*LOGS)
    assert "did you mean 'jsonl'" in refused(*LOGS, "--reader", "json")
    assert "--metric" in refused(*LOGS, "--reader", "jsonl")
    assert "pattern" in refused(*LOGS, *JSONL, "--pattern", "x")
    assert "pattern" in refused(*LOGS, "--reader", "regex", "--metric", "loss")
    assert "step" in refused(*LOGS, "--reader", "regex", "--metric", "loss", "--pattern", "loss (?P<loss>.*)")
    for pattern in ("x{99999999999999999999}", "(" * 10):
        assert "is no regular expression" in refused(*LOGS, "--reader", "regex", "--pattern", pattern)
    assert "did you mean 'training'" in refused(*LOGS, *JSONL, "--contract", "trainin")
    assert "has no row" in refused(*LOGS, *JSONL, "--contract", "ws1")


def test_an_option_that_would_be_ignored_is_refused(here):
    a, b = tokens(here / "a.jsonl"), tokens(here / "b.jsonl", 0.001)
    for option in (["--metric", "loss"], ["--reader", "jsonl"], ["--base", "base0.jsonl"], ["--pattern", "x"]):
        assert f"{option[0]} has no meaning here" in refused(a, b, "--kind", "parity", *option)
    assert "--metric has no meaning" in refused(*LOGS, *JSONL, "--kind", "performance")
    rlspec("run", training(here / "work"))
    assert "--metric has no meaning here: a run is judged by its own spec" in refused(run_folder(), "--metric", "loss")


def test_a_log_alone_is_not_judged(here):
    assert "base0.jsonl alone cannot be judged" in refused("base0.jsonl")
    assert "nothing to judge" in refused()
    assert "no run 'nowhere'" in refused("nowhere")


def test_a_copied_log_is_no_run_of_its_own(here):
    """A copy is told by what cannot repeat; two equal logs without it are a deterministic training."""
    (here / "feat0.jsonl").write_bytes((here / "base0.jsonl").read_bytes())
    made = judged(*LOGS, *JSONL)
    assert made["outcome"] == "PASS" and "the logs of base0 and feat0 are the same to the byte" in made["notes"][0]
    rows = [json.loads(line) for line in (here / "base0.jsonl").read_text().splitlines()]
    for more, held in (
        ([{"step_time": 1 + row["step"] / 8} for row in rows], "6 values of step_time"),
        ([{"at": f"2026-10-03 11:20:0{row['step']}"} for row in rows], "6 clock times"),
        ([{"_timestamp": 1790000000.5 + row["step"]} for row in rows], "6 time stamps"),
        ([{"timestep": row["step"]} for row in rows], ""),
    ):
        text = "".join(json.dumps({**row, **one}) + "\n" for row, one in zip(rows, more, strict=True))
        for name in ("base0.jsonl", "feat0.jsonl"):
            (here / name).write_text(text)
        (verdict,) = judged(*LOGS, *JSONL)["verdicts"]
        assert verdict["status"] == ("ERROR" if held else "PASS")
        assert not held or f"the log of base0 to the byte, with {held}: a copy, and no run" in verdict["reason"]
    for name in LOGS:  # the copy of a base log makes no floor either, nor a difference in time
        (here / name).write_text((here / "base0.jsonl").read_text().replace('timestep": ', 'elapsed": 0.12'))
    assert judged(*LOGS, *JSONL)["outcome"] == "ERROR" == judged("out.json")["outcome"]
    assert judged("base0.jsonl", "feat0.jsonl", "--reader", "jsonl", "--kind", "performance")["outcome"] == "ERROR"


def dated(path, seed, losses, sample=""):
    """A log of torchtitan; the clock and the speed are those of `seed`."""
    path.write_text(
        "".join(
            f"{sample.format(step)}2026-10-0{seed} 11:20:{2 * step:02},{step}0{seed} - root - INFO - step: {step}  "
            f"loss: {loss:.5f}  grad_norm: 1.{step}  tps: 1,{step}0{seed}\n"
            for step, loss in enumerate(losses, 1)
        )
    )
    return path


def test_a_log_that_was_touched_is_a_copy_all_the_same(here):
    losses = {name: [4 / step + shift for step in range(1, 9)] for name, shift in (("base0", 0), ("base1", 0.01))}
    logs = [dated(here / f"{name}.log", seed, losses[name]) for seed, name in enumerate(losses, 1)]
    text = logs[1].read_text()
    given = (*logs, feature := here / "feat0.log", "--reader", "torchtitan", "--metric", "loss")
    lines = text.splitlines(keepends=True)
    for touched in (
        text.replace("\n", " \n"),
        text.replace("\n", "\r\n"),
        "2026-11-30 09:00:00,123 - root - INFO - another job\n" + text,
        text.replace("  tps: ", "  memory: 1.00GiB(1%)  tps: "),
        "".join([*lines[:-1], lines[-1].replace("loss: 0.5", "loss: 0.6")]),
    ):
        feature.write_text(touched, newline="")
        (verdict,) = judged(*given)["verdicts"]
        held = "feat0.log has the values of base1 and 8 clock times of it: a copy, and no run of its own"
        assert verdict["status"] == "ERROR" and verdict["reason"] == held, touched


def test_a_run_with_the_values_of_another_and_a_clock_of_its_own_is_a_run(here):
    """As of a stack that has few ways to go. Dates of the data are the same in two runs."""
    losses, sample = [4 / step for step in range(1, 9)], "sample of 2024-01-01 10:00:0{}.123 at "
    logs = [
        dated(here / f"{name}.log", seed, [loss + 0.01 * (seed == 2) for loss in losses], sample)
        for seed, name in enumerate(("base0", "base1", "feat0"), 1)
    ]
    made = judged(*logs, "--reader", "torchtitan", "--metric", "loss")
    assert made["outcome"] == "PASS" and made["verdicts"][0]["statistic"] == 0


def test_a_touched_copy_is_told_by_the_times_of_its_steps(here):
    def write(name, shift, seed, blank=""):
        rows = [{"step": s, "loss": 4 / s + shift, "step_time": 1 + s * seed / 8} for s in range(1, 7)]
        (here / name).write_text("".join(json.dumps(row) + f"{blank}\n" for row in rows))

    for name, shift, seed in zip(LOGS, (0.0, 0.01, 0.01), (1, 3, 5), strict=True):
        write(name, shift, seed)
    assert judged(*LOGS, *JSONL)["outcome"] == "PASS"
    write("feat0.jsonl", 0.01, 3, " ")
    (verdict,) = judged(*LOGS, *JSONL)["verdicts"]
    assert (
        verdict["status"] == "ERROR" and "has the values of base1 and 6 values of step_time of it" in verdict["reason"]
    )


def test_several_metrics_and_one_that_nobody_prints(here):
    made = judged(*LOGS, "--reader", "jsonl", "--metric", "loss", "--metric", "step_time", "--metric", "acc")
    found = {v["subject"]: v["status"] for v in made["verdicts"]}
    assert found == {"loss": "PASS", "step_time": "ERROR", "acc": "ERROR"}  # a constant, and a metric that is not there


def test_a_regex_and_an_own_contract(here):
    for name in LOGS:
        lines = [json.loads(line) for line in (here / name).read_text().splitlines()]
        (here / name).write_text("".join(f"at {row['step']}: {row['loss']!r}\n" for row in lines))
    row = "{judgment: drift, limits: {pass_below: 0.5, fail_above: 1.5}, source: s, date: '2026-11-29', reason: strict}"
    (here / "strict.yaml").write_text(f"name: strict\nrows:\n  - {row}\n")
    pattern = r"at (?P<step>\d+): (?P<loss>\S+)"
    given = (*LOGS, "--reader", "regex", "--metric", "loss", "--pattern", pattern)
    assert judged(*given)["outcome"] == "PASS"
    made = judged(*given, "--contract", "./strict.yaml")
    assert made["outcome"] == "FAIL" and made["contract"]["name"] == "strict"
    assert judged("out.json")["outcome"] == "FAIL"  # pattern, metric and contract are in the report
    assert judged("out.json", "--contract", "training")["outcome"] == "PASS"


def test_exit_codes_and_the_options_that_change_them(here):
    assert rlspec("judge", *LOGS, *JSONL).code == 0
    log(here / "feat0.jsonl", 0.04)
    assert rlspec("judge", *LOGS, *JSONL).code == 3
    done = rlspec("judge", *LOGS, *JSONL, "--investigate-ok")
    assert done.code == 0 and "INVESTIGATE" in done.out
    log(here / "feat0.jsonl", 0.2)
    assert rlspec("judge", *LOGS, *JSONL, "--investigate-ok", "--blocked-ok").code == 1
    log(here / "base1.jsonl", math.nan)
    assert rlspec("judge", *LOGS, *JSONL).code == 4


def test_performance_of_logs(here):
    log(here / "feat0.jsonl", 0.02, seconds=0.9)
    made = judged("base0.jsonl", "feat0.jsonl", "--reader", "jsonl", "--kind", "performance")
    assert made["outcome"] == "MEASURED" and [v["judgment"] for v in made["verdicts"]] == ["step_time"]
    assert made["verdicts"][0]["statistic"] == pytest.approx(-10.0)
    assert "one run per arm" in made["verdicts"][0]["reason"]


# A report again


def test_a_report_of_logs_is_judged_again_from_anywhere(here, monkeypatch):
    made = judged(*LOGS, *JSONL)
    (here / "deep").mkdir()
    monkeypatch.chdir(here / "deep")
    again = judged(here / "out.json")
    assert again["verdicts"] == made["verdicts"] and again["arms"] == made["arms"]


def test_logs_that_changed_or_went_are_refused(here):
    judged(*LOGS, *JSONL)
    log(here / "base1.jsonl", 0.02)
    assert "base1.jsonl, the log of base1, is not what was judged" in refused("out.json")
    (here / "base1.jsonl").unlink()
    assert "base1.jsonl, the log of base1, is not here any more" in refused("out.json")


def test_a_file_that_is_no_report_is_refused(here):
    for text, words in (("", "is no JSON"), ("{}", "is no report"), ('{"schema_version": 2}', "is no report")):
        (here / "x.json").write_text(text)
        assert words in refused("x.json")


def test_a_run_is_judged_by_folder_by_name_and_by_report_and_its_report_stays(here):
    rlspec("run", training(here / "work"))
    folder, made = run_folder(), report()
    kept = (folder / "report.json").read_bytes()
    (folder / "report.json").rename(here / "moved.json")
    for given in (folder, folder.name, here / "moved.json"):
        assert judged(given)["verdicts"] == made["verdicts"]
        (folder / "report.json").write_bytes(kept)
    assert judged(folder / "report.json")["verdicts"] == made["verdicts"]
    row = "{judgment: drift, limits: {pass_below: 1e-9, fail_above: 2e-9}, source: s, date: '2026-11-29', reason: no}"
    (here / "strict.yaml").write_text(f"name: strict\nrows:\n  - {row}\n")
    assert rlspec("judge", folder, "--contract", "./strict.yaml").code == 1
    assert rlspec("judge", here / "moved.json", "--contract", "./strict.yaml").code == 1
    assert (folder / "report.json").read_bytes() == kept
    (folder / "report.json").unlink()
    assert rlspec("judge", folder).code == made["exit_code"] and report()["verdicts"] == made["verdicts"]


def test_a_run_whose_folder_is_gone_cannot_be_judged_again(here):
    rlspec("run", training(here / "work"))
    folder = run_folder()
    (folder / "report.json").rename(here / "moved.json")
    (folder / "plan.json").unlink()
    assert "is not here" in refused("moved.json")


def test_a_plan_with_edited_rows_is_refused(here):
    rlspec("run", training(here / "work"))
    plan = run_folder() / "plan.json"
    plan.write_text(plan.read_text().replace('"fail_above": 5.0', '"fail_above": 50.0'))
    done = rlspec("judge", run_folder())
    assert done.code == 4 and "digest" in done.err


def test_a_run_is_judged_again_without_its_spec(here):
    rlspec("run", training(here / "work"))
    made = report()
    (here / "work" / "spec.yaml").unlink()
    (here / "work" / "train.py.j2").unlink()
    (here / "work" / "counter").unlink()
    (here / "work").rmdir()
    assert judged(run_folder())["verdicts"] == made["verdicts"]


def test_report_prints_again_and_judges_nothing(here):
    path = training(here / "work")
    done = rlspec("run", path)
    for given in (run_folder(), run_folder().name, run_folder() / "report.json"):
        assert rlspec("report", given).out == done.out
    assert rlspec("report", run_folder(), "-o", "r.md", "-o", "r.xml", "-o", "deep/r.json").code == 0
    assert (here / "r.md").read_text().startswith("### ") and (here / "r.xml").read_text().startswith("<?xml")
    assert json.loads((here / "deep" / "r.json").read_text())["verdicts"] == report()["verdicts"]
    stands = json.loads((run_folder() / "report.json").read_text())
    edited = stands | {"outcome": "FAIL", "exit_code": 1}
    edited["verdicts"] = [{**stands["verdicts"][0], "status": "FAIL"}]
    (run_folder() / "report.json").write_text(json.dumps(edited))
    for given in (run_folder(), run_folder() / "report.json"):
        assert "loss FAIL is not what its measurements give, drift loss PASS" in rlspec("report", given).err
    Path("lone.json").write_text(json.dumps(edited))  # without records there is nothing to derive it from
    assert rlspec("report", "lone.json").code == 0
    (run_folder() / "report.json").unlink()
    said = rlspec("report", run_folder())
    assert said.code == 2 and "rlspec judge" in said.err
    assert rlspec("report", "nowhere").code == 2


@pytest.mark.parametrize(
    ("options", "figure"), [(JSONL, "floor"), (("--reader", "jsonl", "--kind", "performance"), "difference_percent")]
)
def test_a_report_that_lacks_a_figure_is_refused_and_no_traceback(here, options, figure):
    made = judged(*LOGS, *options)
    del made["verdicts"][0]["evidence"][figure]
    (here / "out.json").write_text(json.dumps(made))
    done = rlspec("report", "out.json")
    assert (done.code, done.out) == (4, "") and "has been edited since" in done.err and f"no {figure}" in done.err, done


# Parity


def test_parity_of_two_files_the_rollout_first(here):
    made = judged(tokens(here / "a.jsonl"), tokens(here / "b.jsonl", 0.1), "--kind", "parity")
    by_name = {v["judgment"]: v for v in made["verdicts"]}
    assert by_name["max_abs_dlogp"]["status"] == "FAIL" and by_name["max_abs_dlogp"]["statistic"] == pytest.approx(0.1)
    assert by_name["mean_abs_dlogp"]["evidence"]["mean_dlogp"] == pytest.approx(-0.1)  # train − rollout
    assert [arm["role"] for arm in made["arms"]] == ["rollout", "train"]
    assert judged("out.json")["verdicts"] == made["verdicts"]


def test_a_report_of_parity_says_what_the_files_of_the_spec_give(here):
    done = rlspec("run", parity(here / "work"))
    path = run_folder() / "report.json"
    stands = json.loads(path.read_text())
    assert rlspec("report", path).out == done.out
    first, *others = stands["verdicts"]
    path.write_text(json.dumps({**stands, "verdicts": [{**first, "statistic": 0.05}, *others]}))
    told = rlspec("report", path).out
    assert "0.05 " not in told and "the report\n      says others" in told
    forged = {**first, "status": "FAIL" if first["status"] == "PASS" else "PASS"}
    outcome = {"outcome": "FAIL", "exit_code": 1} if forged["status"] == "FAIL" else {"outcome": "PASS", "exit_code": 0}
    path.write_text(json.dumps({**stands, **outcome, "verdicts": [forged, *others]}))
    assert "is not what its measurements give" in rlspec("report", path).err
    for arm in stands["arms"]:
        Path(arm["log"]).unlink()
    assert rlspec("report", path).err == ""  # nothing is left to derive it from


def test_parity_wants_two_different_files(here):
    a = tokens(here / "a.jsonl")
    assert "takes two files" in refused(a, "--kind", "parity")
    assert "takes two files" in refused(a, a, a, "--kind", "parity")
    assert "stands twice" in refused(a, a, "--kind", "parity")
    assert "there is no file" in refused(a, "nothing.jsonl", "--kind", "parity")


def test_bytes_that_are_no_log_probs_are_an_error_with_place(here):
    (here / "b.jsonl").write_bytes(b'{"sample": "s0", "position": 0, "token": 1, "logprob": -1}\n\xff\n')
    done = rlspec("judge", tokens(here / "a.jsonl"), here / "b.jsonl", "--kind", "parity")
    assert done.code == 4 and "b.jsonl:2" in done.out and isinstance(done, Ended)


def test_a_parity_run_is_judged_again(here):
    rlspec("run", parity(here / "work"))
    assert judged(run_folder())["verdicts"] == report()["verdicts"]
