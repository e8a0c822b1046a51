from __future__ import annotations

import copy
from pathlib import Path

import pytest

from rlspec import contract, document, linting, nodes, reports
from rlspec.checks import CHECKS, operators
from rlspec.model import Result
from tests import benches
from tests.tiny import rlspec, save

HERE = benches.ROOT
SPEC = {
    "kind": "operators",
    "question": "Right?",
    "model": "tiny-dense",
    "workload": "tiny",
    "operators": ["silu", "rope"],
    "arms": [{"name": "a", "implementation": "torch"}],
}


def data(**changes):
    """A spec; a key that is None is left out."""
    return {key: value for key, value in {**SPEC, **changes}.items() if value is not None}


def problems(folder, **changes):
    _, found = linting.lint([save(folder / "spec.yaml", data(**changes))])
    return [(problem.rule, problem.line, problem.message, problem.hint) for problem in found]


def parsed(folder, **changes):
    read, found = document.read(save(folder / "spec.yaml", data(**changes)))
    assert read is not None and not found
    return operators.parse(read)


# Lint


def test_a_sound_spec(tmp_path):
    assert problems(tmp_path) == [] and CHECKS["operators"] is operators
    assert problems(tmp_path, operators=None, arms=[{"name": "a", "implementation": "mine:table"}]) == []
    assert problems(tmp_path, arms=[{"name": "a", "implementation": {"silu": "triton", "rope": "mine:rope"}}]) == []


def test_unknown_operators(tmp_path):
    ((rule, line, message, hint),) = problems(tmp_path, operators=["silu", "rop"])
    assert (rule, message) == ("RL311", "unknown operator 'rop'") and "did you mean 'rope'" in hint and line == 7
    arms = [{"name": "a", "implementation": {"silu": "torch", "rope": "torch", "swiglo": "torch"}}]
    ((rule, _, message, hint),) = problems(tmp_path, arms=arms)
    assert (rule, message) == ("RL311", "unknown operator 'swiglo'") and "did you mean 'swiglu'" in hint


@pytest.mark.parametrize("implementation", ["tritn", {"silu": "tritn", "rope": "torch"}])
def test_unknown_implementations(tmp_path, implementation):
    ((rule, _, message, hint),) = problems(tmp_path, arms=[{"name": "a", "implementation": implementation}])
    assert rule == "RL312" and message.startswith("unknown implementation 'tritn'")
    assert "did you mean 'triton'" in hint and "module:table" in hint


def test_a_mapping_covers_the_operators(tmp_path):
    arms = [{"name": "a", "implementation": {"silu": "torch"}}]
    ((rule, _, message, _),) = problems(tmp_path, arms=arms)
    assert (rule, message) == ("RL312", "arm a names no implementation of rope")
    ((rule, _, message, _),) = problems(tmp_path, operators=None, arms=arms)
    assert (rule, message) == ("RL312", "a mapping of implementations needs operators: to be named")


def test_a_table_of_ones_own_has_the_operators(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    source, arms = tmp_path / "mine.py", [{"name": "a", "implementation": "mine:table"}]
    source.write_text("table: dict = {'silu': print, 'gelu': print}\n", encoding="utf-8")
    ((rule, line, message, hint),) = problems(tmp_path, arms=arms)
    assert (rule, message) == ("RL312", "mine:table of arm a has no operator rope") and "it has silu" in hint
    assert line and problems(tmp_path, arms=arms, operators=["silu"]) == []
    mapping = {"silu": "mine:table", "rope": "mine:table"}
    ((_, _, message, _),) = problems(tmp_path, arms=[{"name": "a", "implementation": mapping}])
    assert message == "mine:table of arm a has no operator rope"
    ((_, _, message, hint),) = problems(tmp_path, arms=arms, operators=None)
    assert "rms_norm, det_gemm" in message and "pack" not in message and "router" not in message
    assert problems(tmp_path, arms=[{**arms[0], "environment": {"PYTHONPATH": "/elsewhere"}}]) == []
    for unread in ("table = {'silu': 1}\ntable['rope'] = 1\n", "table = {**known}\n", "table = dict(silu=1)\n",
                   "def table(x): ...\n", "table = {'silu': 1\n", "if True:\n    table = {}\n"):  # fmt: skip
        source.write_text(unread, encoding="utf-8")
        assert problems(tmp_path, arms=arms) == [], unread
    (tmp_path / "later").mkdir()
    (tmp_path / "later" / "mine.py").write_text("table = {'silu': 1, 'rope': 1}\n", encoding="utf-8")
    source.write_text("table = {'silu': 1}\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "later"))
    assert len(problems(tmp_path, arms=arms)) == 1, "what lies beside the spec is what runs"
    source.unlink()
    assert problems(tmp_path, arms=arms) == []


@pytest.mark.parametrize("implementation", ["./mine.py:table", ":table", "mine:", "mine:table:more"])
def test_what_is_no_module_and_table(tmp_path, implementation):
    ((rule, _, message, _),) = problems(tmp_path, arms=[{"name": "a", "implementation": implementation}])
    assert rule == "RL312" and "is no module:table" in message


def test_models_that_operators_are_not_judged_for(tmp_path):
    ((rule, _, message, hint),) = problems(tmp_path, model="gpt-oss-20b")
    assert rule == "RL313" and "is of type gpt_oss" in message and "qwen3 and qwen3_moe" in hint
    entry = {"name": "m", "model_type": "qwen3", "layers": 1, "hidden_size": 64, "vocabulary_size": 9}
    (tmp_path / "models").mkdir()
    save(tmp_path / "models" / "m.yaml", entry)
    ((rule, _, message, _),) = problems(tmp_path, model="m")
    assert rule == "RL313" and "does not say its heads, kv_heads, head_dim, rope_theta, rms_norm_eps" in message
    ((rule, _, message, _),) = problems(tmp_path, model="tiny-dens")
    assert rule == "RL201" and "unknown model 'tiny-dens'" in message


def test_a_workload_that_compares_a_layout_with_itself(tmp_path):
    (tmp_path / "workloads").mkdir()
    own = benches.data(permutation=[0, 1, 2])
    save(tmp_path / "workloads" / "small.yaml", own)
    ((rule, _, message, hint),) = problems(tmp_path, workload="small")
    assert rule == "RL314" and hint == "correct the workload"
    assert message == "workload small: tier one: BN/permuted and BN/full are the same layout"
    ((rule, _, message, hint),) = problems(tmp_path, workload="wid")
    assert rule == "RL201" and "unknown workload 'wid'" in message and "wide" in hint


def test_experts_of_a_dense_model(tmp_path):
    ((rule, line, message, _),) = problems(tmp_path, operators=["silu", "router"])
    assert (rule, line) == ("RL315", 7) and "router belongs to a mixture of experts, and tiny-dense is dense" in message
    assert problems(tmp_path, operators=["silu", "router"], model="tiny-moe") == []


def test_judgments_need_rows(tmp_path):
    assert problems(tmp_path, contract="strict") == []
    found = problems(tmp_path, contract="training")
    assert found and {rule for rule, *_ in found} == {"RL224"} and "forward_accuracy" in found[0][2]


def test_fp8_is_refused_before_anything_runs(tmp_path):
    found = problems(tmp_path, dtype="fp8")
    assert {rule for rule, *_ in found} == {"RL224"} and all("is out of scope" in message for _, _, message, _ in found)


# What is judged


def test_without_a_list_the_workload_s_operators_that_the_model_has(tmp_path):
    dense = operators.chosen(parsed(tmp_path, operators=None))
    moe = operators.chosen(parsed(tmp_path, operators=None, model="tiny-moe"))
    assert set(moe) - set(dense) == {"router", "grouped_gemm", "combine"} and "pack" in dense and len(dense) == 14
    assert operators.chosen(parsed(tmp_path)) == ("silu", "rope")
    ws1 = operators.chosen(parsed(tmp_path, operators=None, model="qwen3-8b", workload="ws1"))
    assert len(ws1) == 12 and "residual_add" not in ws1


def test_defaults(tmp_path):
    spec = parsed(tmp_path)
    assert (spec.dtype, spec.contract) == ("bf16", "ws1") and [j.check for j in spec.judgments] == [*nodes.JUDGMENTS]
    assert [arm.role for arm in spec.arms] == ["candidate"] and spec.workload["name"] == "tiny"


def test_the_run_file_is_told_what_is_the_same_for_all_arms(tmp_path):
    spec = parsed(tmp_path, operators=["silu", "attention"], judgments=["forward_accuracy", "forward_invariance"],
                  requires={"device": "cpu"})  # fmt: skip
    told = operators.context(spec, contract.load("ws1", HERE))
    assert told["operators"] == ["silu", "attention"] and told["judgments"] == [
        "forward_accuracy",
        "forward_invariance",
    ]
    assert told["limits"] == {
        "forward_accuracy": {"attention": {"atol": 5e-2, "rtol": 2e-2}, "elementwise": {"atol": 2e-2, "rtol": 1.6e-2}},
        "forward_invariance": dict.fromkeys(("attention", "elementwise"), {"differing_elements": 0}),
    }
    assert told["model"]["hidden_size"] == 64 and told["workload"] == spec.workload and told["device"] == "cpu"
    assert Path(told["spec_dir"]) == tmp_path.resolve() and "arms" not in told


def test_a_row_that_is_out_of_scope_has_no_limits(tmp_path):
    told = operators.context(parsed(tmp_path, dtype="fp8"), contract.load("ws1", HERE))
    assert told["limits"]["gradient_accuracy"] == {"elementwise": None}


# Verdicts


def verdicts(folder, measured=None, failure=None, workload=None, **changes):
    """Of a spec on the small workload."""
    read, _ = document.read(save(folder / "spec.yaml", data(**changes)))
    read.data["workload"] = workload or benches.data(operators=("silu", "rope", "pack"))
    spec = operators.parse(read)
    results = [Result(arm=arm, records=Path("r"), measured=measured, failure=failure) for arm in spec.arms]
    return spec, operators.judge(spec, results, contract.load(spec.contract, HERE))


def whole(*names, **changes):
    return {"environment": benches.CPU, "cells": [benches.cell(name, benches.tier(), **changes) for name in names]}


def test_a_verdict_a_cell_with_arm_operator_and_tier(tmp_path):
    arms = [{"name": name, "implementation": "torch"} for name in ("a", "b")]
    _, made = verdicts(tmp_path, whole("silu", "rope"), arms=arms)
    assert [(v.subject, v.judgment) for v in made] == [
        (f"{arm}/{operator}/one", judgment)
        for arm in ("a", "b")
        for operator in ("silu", "rope")
        for judgment in nodes.JUDGMENTS
    ]
    assert {v.status for v in made} == {"PASS"} and {v.evidence["category"] for v in made} == {"green"}
    first = made[0]
    assert {key: first.evidence[key] for key in ("arm", "operator", "tier", "counted")} == {
        "arm": "a",
        "operator": "silu",
        "tier": "one",
        "counted": True,
    }
    assert first.row.id == "ws1/forward_accuracy/elementwise/bf16" and first.evidence["operators_of_torch"] == ["silu"]


def test_what_ran_is_what_was_seen_and_nothing_seen_is_null(tmp_path):
    _, made = verdicts(tmp_path, whole("silu", "rope"))
    assert made[0].evidence["kernels"] is None and made[0].evidence["device"] == "cpu"
    seen = {"triton": ["k"], "native": [], "torch": [], "profiled": None, "calls_without_launch": 0}
    _, made = verdicts(tmp_path, whole("silu", "rope", seen=seen))
    assert made[0].evidence["kernels"] == ["k"]
    _, made = verdicts(tmp_path, whole("silu", "rope", seen={**seen, "profiled": ["k", "memset"]}))
    assert made[0].evidence["kernels"] == ["k", "memset"]


def test_a_cell_that_is_missing_is_an_error_and_the_others_stand(tmp_path):
    _, made = verdicts(tmp_path, whole("silu"))
    assert {v.status for v in made if "/silu/" in v.subject} == {"PASS"}
    assert {(v.status, v.evidence["category"]) for v in made if "/rope/" in v.subject} == {("ERROR", "missing")}


def test_an_arm_that_failed_is_an_error_of_all_its_cells_but_those_that_nobody_runs(tmp_path):
    _, made = verdicts(tmp_path, failure="exit status 3", operators=["silu", "pack"])
    by = {(v.subject.split("/")[1], v.status, v.evidence["category"], v.reason[:26]) for v in made}
    assert by == {
        ("silu", "ERROR", "process", "arm a: exit status 3"),
        ("pack", "N/A", "not_applicable", "a layout helper: it copies"),
    }


def test_uncounted_tiers_are_judged_and_say_so(tmp_path):
    _, made = verdicts(
        tmp_path, whole("silu", "rope"), workload=benches.data(operators=("silu", "rope"), counted=False)
    )
    assert made and not any(v.evidence["counted"] for v in made)


def test_the_published_counts(tmp_path):
    arms = [{"name": name, "implementation": name} for name in ("triton", "cuda")]
    spec = parsed(tmp_path, arms=arms, operators=None, model="qwen3-8b", workload="ws1")
    results = [Result(arm=arm, records=Path("r"), failure="it has not run") for arm in spec.arms]
    made = operators.judge(spec, results, contract.load("ws1", HERE))
    counted = [verdict for verdict in made if verdict.evidence["counted"]]
    assert len(counted) == 192 and sum(verdict.status == "N/A" for verdict in counted) == 16
    assert {v.subject for v in made if not v.evidence["counted"]} == {"triton/attention/long", "cuda/attention/long"}


# expect


def held(folder, want, measured=None, **changes):
    spec, made = verdicts(folder, measured or whole("silu", "rope"), expect=want, **changes)
    return reports.build(spec, contract.load("ws1", HERE), (), {}, made, None, [])


def red(**changes):
    found = whole("silu", "rope")
    line = next(one for one in found["cells"][0]["comparisons"] if one["judgment"] == "forward_invariance")
    line |= {"differing": 3, "digest": "other", **changes}
    return found


@pytest.mark.parametrize(
    ("want", "problem"),
    [
        ({"status": "FAIL", "category": "red_verdict"}, None),
        ({"status": "FAIL", "judgments": {"forward_invariance": "FAIL", "forward_accuracy": "PASS"}}, None),
        ({"status": "FAIL", "judgments": {"a/silu/one": "FAIL", "a/rope/one": "PASS"}}, None),
        ({"status": "FAIL", "category": "red_no_backward"}, "expected the category red_no_backward, got red_verdict"),
        ({"status": "PASS"}, "expected PASS, got FAIL"),
        ({"status": "FAIL", "judgments": {"forward_accuracy": "FAIL"}}, "forward_accuracy: expected FAIL, got PASS"),
    ],
)
def test_a_control_expects_status_and_category(tmp_path, want, problem):
    made = held(tmp_path, want, red())
    assert made["expect"]["problems"] == ([] if problem is None else [problem]) and made["outcome"] == "FAIL"
    assert made["exit_code"] == (0 if problem is None else 1)


def test_a_control_that_expects_an_error_of_one_category_and_gets_another(tmp_path):
    gone = whole("silu", "rope")
    gone["cells"][0]["comparisons"].pop()
    assert held(tmp_path, {"status": "ERROR", "category": "broken"}, gone)["exit_code"] == 0
    made = held(tmp_path, {"status": "ERROR", "category": "red_provenance"}, copy.deepcopy(gone))
    assert made["exit_code"] == 4 and "got broken" in made["expect"]["problems"][0]


# A machine that has not what is required


def test_no_gpu_is_blocked_with_the_reason_and_nothing_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rlspec.machine.gpus", list)
    save(tmp_path / "spec.yaml", data(requires={"device": "cuda"}))
    done = rlspec("run", "spec.yaml", "-o", "out.json")
    assert done.code == 5 and "BLOCKED" in done.out, done
    made = benches.json.loads((tmp_path / "out.json").read_text())
    assert {v["status"] for v in made["verdicts"]} == {"BLOCKED"}
    assert {v["evidence"]["category"] for v in made["verdicts"]} == {"blocked_hardware"}
    assert not list(tmp_path.rglob("*.records.jsonl"))


def test_layouts_are_looked_at_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "workloads").mkdir()
    save(tmp_path / "workloads" / "small.yaml", benches.data(chunk=9))
    save(tmp_path / "spec.yaml", data(workload="small"))
    done = rlspec("run", "spec.yaml")
    assert done.code == 2 and "RL314" in done.err + done.out and not (tmp_path / "workspace").exists()
