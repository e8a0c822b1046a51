"""`rlspec judge report.json` of operators: the verdicts once more from the numbers, and no report that was touched."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import pytest

from rlspec import measurements, workloads
from tests import benches
from tests.tiny import rlspec, run_folder, save

SPEC = {
    "kind": "operators",
    "question": "Right?",
    "model": "tiny-dense",
    "workload": "small",
    "operators": ["silu", "det_gemm", "pack"],
    "arms": [{"name": "a", "implementation": "torch"}],
    "contract": "ws1",
    "requires": {"device": "cpu"},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A real run: its folder and its report."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "workloads").mkdir()
    workload = benches.data(operators=("silu", "det_gemm", "pack"), layouts=["singletons", "permuted", "repeated"])
    save(folder / "workloads" / "small.yaml", workload)
    save(folder / "spec.yaml", SPEC)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        done = rlspec("run", "spec.yaml", "-o", "kept.json")
        assert done.code == 1, done.out + done.err  # the weight gradients of torch follow the layout
        return run_folder(), json.loads((folder / "kept.json").read_text())


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A folder without run, spec, workload or contract."""
    place = tmp_path / "elsewhere"
    place.mkdir()
    monkeypatch.chdir(place)
    return place


@pytest.fixture
def given(run):
    return copy.deepcopy(run[1])


def judge(made, *options):
    Path("report.json").write_text(json.dumps(made), encoding="utf-8")
    done = rlspec("judge", "report.json", "-o", "again.json", *options)
    return done, None if "error" in done.err else json.loads(Path("again.json").read_text(encoding="utf-8"))


def refused(made, *options):
    done, _ = judge(made, *options)
    assert done.code == 4 and done.out == "" and done.err.count("\n") == 1, done
    return done.err


def of(made, operator, judgment):
    (verdict,) = [v for v in made["verdicts"] if v["subject"] == f"a/{operator}/one" and v["judgment"] == judgment]
    return verdict


def lines(made, operator="silu"):
    return next(cell for cell in made["measured"]["a"]["cells"] if cell["operator"] == operator)["comparisons"]


def resealed(made):
    return {**made, "seal": measurements.seal(made)}


def test_the_run_found_what_torch_does(given):
    assert of(given, "silu", "forward_accuracy")["status"] == "PASS"
    found = of(given, "det_gemm", "gradient_invariance")
    assert found["status"] == "FAIL" and found["evidence"]["category"] == "red_verdict"
    assert of(given, "pack", "forward_accuracy")["status"] == "N/A" and given["counts"]["expected"] == 12


def test_a_report_gives_the_same_verdicts_elsewhere(elsewhere, given):
    done, made = judge(given)
    assert made["verdicts"] == given["verdicts"] and made["outcome"] == given["outcome"]
    assert done.code == given["exit_code"] == 1 and made["arms"] == given["arms"]
    for key in ("measured", "seal", "workload", "operators", "contract"):
        assert made[key] == given[key], key
    assert not any("are not those" in note for note in made["notes"])


def test_a_report_judged_again_can_be_judged_again(elsewhere, given):
    _, made = judge(given)
    _, again = judge(made)
    assert again["verdicts"] == given["verdicts"]


def test_a_blocked_report_is_printed_again(run, tmp_path, monkeypatch):
    shutil.copytree(run[0].parents[3] / "workloads", tmp_path / "workloads")
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "spec.yaml", {**SPEC, "requires": {"commands": ["no-such-program"]}})
    assert rlspec("run", "spec.yaml", "-o", "blocked.json").code == 5
    done = rlspec("report", "blocked.json")
    assert done.code == 0 and "no-such-program" in done.out and "exit 5" in done.out, done.err
    made = json.loads(Path("blocked.json").read_text())
    made["verdicts"][0] |= {"evidence": {"operator": "silu"}}
    assert printed(made).out == done.out
    expect = {"status": "BLOCKED", "met": True, "problems": []}
    assert "what it says of `expect`" in printed({**made, "expect": expect, "exit_code": 0}).err


def test_the_run_folder_is_judged_from_its_records(run, monkeypatch):
    folder, given = run
    monkeypatch.chdir(folder.parents[3])
    done = rlspec("judge", folder, "-o", "again.json")
    made = json.loads(Path("again.json").read_text(encoding="utf-8"))
    assert done.code == 1 and [v["status"] for v in made["verdicts"]] == [v["status"] for v in given["verdicts"]]


def test_records_of_the_run_folder_that_were_edited_are_refused(run, tmp_path, monkeypatch):
    folder, _ = run
    top = tmp_path / "copy"
    shutil.copytree(folder.parents[3], top, symlinks=True)
    monkeypatch.chdir(top)
    (records,) = (top / folder.relative_to(folder.parents[3])).glob("*.records.jsonl")
    text = records.read_text().splitlines(keepends=True)
    records.write_text("".join([*text[:3], *text[4:]]))
    done = rlspec("judge", records.parent)
    assert done.code in (2, 4) and "digest" in done.err


def test_a_plan_that_was_edited_is_refused_and_so_is_one_without_seal_that_asks_for_less(run, tmp_path, monkeypatch):
    folder, given = run
    top = tmp_path / "copy"
    shutil.copytree(folder.parents[3], top, symlinks=True)
    monkeypatch.chdir(top)
    path = top / folder.relative_to(folder.parents[3]) / "plan.json"
    plan = json.loads(path.read_text())
    edited = copy.deepcopy(plan)
    edited["spec"]["data"]["judgments"] = ["forward_accuracy"]
    fewer = {**plan, "operators": ["silu", "pack"]}
    for one, message in (
        (edited, "its seal is not the digest of what stands in it"),
        ({**plan, "arms": [{**plan["arms"][0], "role": "base"}]}, "its seal is not the digest of what stands in it"),
        (without_seal(edited), "arm a measured gradient_accuracy of silu in tier one, which it does not ask for"),
        (without_seal(fewer), "arm a measured det_gemm in tier one, which it does not ask for"),
    ):
        path.write_text(json.dumps(one))
        done = rlspec("judge", path.parent)
        assert (done.code, done.out) == (4, "") and message in done.err, done
    path.write_text(json.dumps(without_seal(plan)))  # of an older rlspec
    assert rlspec("judge", path.parent, "-o", "again.json").code == 1
    made = json.loads(Path("again.json").read_text())
    assert made["verdicts"] == given["verdicts"] and "the plan has no seal" in made["notes"][-1]


def without_seal(plan):
    return {key: value for key, value in plan.items() if key != "seal"}


# Touched


def test_one_row_less(elsewhere, given):
    del lines(given)[3]
    assert "has been edited since" in refused(given)


@pytest.mark.parametrize("key", ["digest", "against_digest", "differing", "elements", "limits"])
def test_one_number_or_digest_edited(elsewhere, given, key):
    line = next(one for one in lines(given, "det_gemm") if one.get("differing"))
    line[key] = 0 if key == "differing" else {"differing_elements": 1e9} if key == "limits" else "0"
    assert "its seal is not that of" in refused(given)


def test_one_error_edited(elsewhere, given):
    lines(given)[0]["max_abs"] = 0.0
    assert "edited since" in refused(given)


def test_a_row_less_under_a_new_seal_is_an_error_of_its_cell(elsewhere, given):
    gone = next(one for one in lines(given) if one["judgment"] == "gradient_invariance")
    lines(given).remove(gone)
    done, made = judge(resealed(given))
    found = of(made, "silu", "gradient_invariance")
    assert done.code == 4 and (found["status"], found["evidence"]["category"]) == ("ERROR", "broken")
    assert "no comparison" in found["reason"] and of(made, "silu", "gradient_accuracy")["status"] == "PASS"
    assert any("the verdicts are not those that stand in" in note for note in made["notes"])


def test_a_cell_less_under_a_new_seal_is_missing(elsewhere, given):
    given["measured"]["a"]["cells"].pop()
    _, made = judge(resealed(given))
    found = of(made, "det_gemm", "forward_accuracy")
    assert (found["status"], found["evidence"]["category"]) == ("ERROR", "missing")


def test_a_digest_edited_under_a_new_seal_is_an_error_of_its_cell(elsewhere, given):
    next(one for one in lines(given) if one["judgment"] == "forward_invariance")["digest"] = "float32[0]0"
    _, made = judge(resealed(given))
    assert of(made, "silu", "forward_invariance")["evidence"]["category"] == "broken"


def test_a_difference_hidden_under_a_new_seal_is_an_error_of_its_cell(elsewhere, given):
    for line in lines(given, "det_gemm"):
        if line.get("differing"):
            line["differing"] = 0
    _, made = judge(resealed(given))
    found = of(made, "det_gemm", "gradient_invariance")
    assert found["status"] == "ERROR" and "the digests differ, and no element does" in found["reason"]


def test_an_edited_workload(elsewhere, given):
    given["workload"]["data"]["tiers"][0]["layouts"].pop()
    assert "has been edited since" in refused(given)
    assert "the workload has been edited since" in refused(resealed(given))


def test_another_workload_under_its_own_digest_is_an_error_of_the_cells(elsewhere, given):
    workload = given["workload"]
    workload["data"]["tiers"][0]["permutation"] = [1, 2, 0]
    workload["digest"] = workloads.digest(workload["data"])
    _, made = judge(resealed(given))
    found = of(made, "silu", "forward_invariance")
    assert found["status"] == "ERROR" and found["reason"] == "the layouts are not those of the workload"


def test_edited_limits_of_the_contract(elsewhere, given):
    row = next(row for row in given["contract"]["rows"] if row["judgment"] == "forward_accuracy")
    row["limits"]["atol"] = 1.0
    assert "the contract's rows do not have the digest" in refused(resealed(given))


@pytest.mark.parametrize("edit", ["operators", "judgments", "arms", "expect"])
def test_what_was_asked_cannot_be_made_less(elsewhere, given, edit):
    if edit == "operators":
        given["operators"].remove("det_gemm")
    else:
        given["spec"]["data"][edit] = {"judgments": ["forward_accuracy"], "arms": [], "expect": "FAIL"}[edit]
    assert "has been edited since" in refused(given)


@pytest.mark.parametrize("edit", ["operators", "judgments", "arms"])
def test_less_under_a_new_seal_is_not_what_was_measured(elsewhere, given, edit):
    if edit == "operators":
        given["operators"].remove("det_gemm")
    else:
        given["spec"]["data"][edit] = {"judgments": ["forward_accuracy"], "arms": []}[edit]
    assert ("not those of its spec" if edit == "arms" else "does not ask for") in refused(resealed(given))


@pytest.mark.parametrize("key", ["seal", "workload", "operators"])
def test_a_report_without_what_its_verdicts_rest_on(elsewhere, given, key):
    del given[key]
    assert refused(given)


def test_a_report_of_another_kind(elsewhere, given):
    assert "does not hold all that its verdicts are derived from" in refused({**given, "kind": "correctness"})


def test_measurements_that_are_taken_out_are_missed(elsewhere, given):
    given["measured"] = {}
    assert "does not hold all that its verdicts are derived from" in refused(given)


def test_a_report_that_does_not_agree_with_itself_is_not_printed(elsewhere, given):
    for edit in ({"outcome": "PASS"}, {"verdicts": [{**one, "status": "PASS"} for one in given["verdicts"]]}):
        done = printed({**given, **edit})
        assert done.code == 4 and "is not that of its verdicts" in done.err, done
    for expect in ({**MET, "status": "PASS"}, {**MET, "problems": ["silu: expected PASS, got FAIL"]}):
        done = printed({**given, "expect": expect, "exit_code": 0})
        assert done.code == 4 and "its outcome is not the one that `expect` says it has met" in done.err, done
    next(iter(given["measured"].values()))["cells"].pop()
    Path("report.json").write_text(json.dumps(given))
    assert "its seal is not that of" in rlspec("report", "report.json").err


def test_a_report_that_says_other_verdicts_than_its_numbers_give_is_not_printed(elsewhere, given):
    passed = [{**one, "status": "PASS" if one["status"] == "FAIL" else one["status"]} for one in given["verdicts"]]
    edited = {**given, "verdicts": passed, "outcome": "PASS", "exit_code": 0}
    fewer = [one for one in passed if one["judgment"] != "gradient_invariance"]
    unsealed = {key: value for key, value in edited.items() if key != "seal"}
    for made, message in (
        ({**given, "exit_code": 0}, "its exit code 0 is not that of its verdicts"),
        (edited, "the verdict gradient_invariance a/det_gemm/one PASS is not what its measurements give"),
        ({**edited, "verdicts": fewer}, "is not what its measurements give"),
        (unsealed, "it does not hold all that its verdicts are derived from"),
        ({**unsealed, "kind": "correctness"}, "it does not hold all that its verdicts are derived from"),
    ):
        Path("report.json").write_text(json.dumps(made))
        done = rlspec("report", "report.json")
        assert (done.code, done.out) == (4, "") and message in done.err, done


MET = {"status": "FAIL", "met": True, "problems": []}


def printed(made, *options):
    Path("report.json").write_text(json.dumps(made))
    return rlspec("report", "report.json", *options)


def test_what_is_expected_is_what_the_spec_says(elsewhere, given):
    met, told = {**given, "expect": MET, "exit_code": 0}, "what it says of `expect` is not what its spec"
    done = printed(met)
    assert (done.code, done.out) == (4, "") and told in done.err, done
    met["spec"]["data"]["expect"] = {"status": "FAIL", "judgments": {"gradient_invariance": "FAIL"}}
    done = printed(resealed(met))
    assert "FAIL, as expected" in done.out and "exit 0: as expected" in done.out
    assert judge(resealed(met))[0].code == 0
    met["arms"][0] |= {"status": "failed", "reason": "killed"}  # judgments that are named ask for arms that ran
    assert told in printed(resealed(met)).err
    met["spec"]["data"]["expect"] = "PASS"
    assert told in printed({**resealed(met), "expect": {**MET, "met": False}, "exit_code": 1}).err


def test_words_and_figures_of_a_verdict_are_those_that_the_measurements_give(elsewhere, given):
    due = printed(given, "-o", "due.xml", "-v").out
    assert "says others" not in due
    for key, other in (
        ("reason", "all comparisons are equal to the bit (a flaky host)"),
        ("statistic", 0.5),
        ("notes", ["a flaky host"]),
        ("evidence", {}),
    ):
        edited = copy.deepcopy(given)
        of(edited, "det_gemm", "gradient_invariance")[key] = other
        done = printed(edited, "-o", "edited.xml", "-v")
        assert done.code == 0 and ("the report says others" in " ".join(done.out.split())) == (key != "evidence"), done
        assert set(due.splitlines()) <= set(done.out.splitlines()) and "flaky" not in done.out
        assert Path("edited.xml").read_text().count("<failure") == Path("due.xml").read_text().count("<failure") == 1
        assert "flaky" not in Path("edited.xml").read_text()


def test_cells_in_a_report_of_another_kind_are_derived_from_nothing(elsewhere, given):
    bare = {key: value for key, value in given.items() if key not in ("seal", "measured")}
    passed = [{**one, "status": "PASS"} for one in bare["verdicts"]]
    done = printed({**bare, "kind": "performance", "verdicts": passed, "outcome": "PASS", "exit_code": 0})
    assert (done.code, done.out) == (4, "") and "it does not hold all that its verdicts are derived from" in done.err


def test_edited_verdicts_do_not_last(elsewhere, given):
    of(given, "det_gemm", "gradient_invariance")["status"] = "PASS"
    done, made = judge(given)
    assert of(made, "det_gemm", "gradient_invariance")["status"] == "FAIL" and done.code == 1
    assert any("the verdicts are not those that stand in" in note for note in made["notes"])


def test_another_contract_needs_another_run(elsewhere, given):
    done, made = judge(given, "--contract", "strict")
    accuracy = of(made, "silu", "forward_accuracy")
    assert done.code == 4 and accuracy["status"] == "ERROR" and accuracy["evidence"]["category"] == "broken"
    assert "are not those of strict/forward_accuracy/elementwise/bf16" in accuracy["reason"]
    assert of(made, "silu", "forward_invariance")["status"] == "PASS"
