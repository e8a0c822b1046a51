from __future__ import annotations

import dataclasses
from array import array
from pathlib import Path

import pytest

from rlspec import contract, document
from rlspec.checks import CHECKS, correctness
from rlspec.errors import SpecError
from rlspec.model import Judgment, Result, Run, Series

ROOT = Path(__file__).parents[2]
ROWS = contract.load("training", ROOT)


def parsed(path=ROOT / "specs" / "correctness" / "qwen3-30b-a3b.yaml", **changes):
    read, problems = document.read(path)
    assert not problems
    return correctness.parse(dataclasses.replace(read, data={**read.data, **changes}))


def results(spec, **losses):
    """A result an arm from {arm: {metric: values}}; an arm that is missing has failed."""
    found = []
    for arm in spec.arms:
        if arm.name not in losses:
            found.append(Result(arm=arm, records=Path("r"), failure="it crashed"))
            continue
        series = {name: made(arm.name, name, values) for name, values in losses[arm.name].items()}
        found.append(Result(arm=arm, records=Path("r"), run=Run(arm=arm, series=series)))
    return found


def made(arm, metric, values):
    return Series(arm=arm, metric=metric, steps=array("q", range(1, len(values) + 1)), values=array("d", values))


def alike(**more):
    """Three arms of pithtrain whose ratio is 1 in every metric."""
    names = ("cross-entropy-loss", "load-balance-loss", "gradient-norm")
    values = {"base0": [5, 4, 3, 2], "base1": [5, 4.1, 3.1, 2.1], "feat0": [5, 3.9, 2.9, 1.9], **more}
    return {arm: dict.fromkeys(names, [float(v) for v in series]) for arm, series in values.items()}


def test_a_spec_is_filled_in():
    spec = parsed()
    assert (spec.kind, spec.name, spec.model) == ("correctness", "correctness/qwen3-30b-a3b", "qwen3-30b-a3b")
    assert (spec.mesh.pp, spec.mesh.dp, spec.mesh.cp, spec.mesh.ep, spec.mesh.expert_dp) == (2, 8, 1, 8, 1)
    assert spec.time_limit == 7200 and spec.isolation == "worktree" and spec.trainer.steps == 32
    assert spec.trainer.reader == "pithtrain" and spec.launch.world_size == 16
    assert spec.trainer.settings["start_learning_rate"] == 1e-6 and spec.trainer.settings["global_batch_size"] == 1024


def test_one_step_an_arm_in_order_with_the_tag_in_every_name():
    steps = correctness.expand(parsed(), Path("w"), Path("l"))
    assert [step.arm.name for step in steps] == ["base0", "base1", "feat0"]
    assert {str(step.log) for step in steps} == {f"l/pp2-dp8-cp1-ep8-seq2048-bf16-{s.arm.name}.log" for s in steps}
    assert steps[0].records == Path("w/pp2-dp8-cp1-ep8-seq2048-bf16-base0.records.jsonl")


def test_a_verdict_a_judgment():
    spec = parsed()
    verdicts = correctness.judge(spec, results(spec, **alike()), ROWS)
    assert [v.subject for v in verdicts] == ["cross-entropy-loss", "load-balance-loss", "gradient-norm"]
    assert {v.status for v in verdicts} == {"PASS"} and {round(v.statistic, 9) for v in verdicts} == {1}
    assert {v.row.id for v in verdicts} == {"training/drift/*/*"}


def test_without_judgments_every_usual_metric_that_is_printed_is_judged():
    spec = parsed(judgments=["drift"])
    found = {arm: {"cross-entropy-loss": series["gradient-norm"], "tokens": [1.0]} for arm, series in alike().items()}
    verdicts = correctness.judge(spec, results(spec, **found), ROWS)
    assert [(v.subject, v.status) for v in verdicts] == [("cross-entropy-loss", "PASS")]
    empty = correctness.judge(spec, results(spec, base0={}, base1={}, feat0={}), ROWS)
    assert [(v.subject, v.status) for v in empty] == [("cross-entropy-loss", "ERROR")]


def test_a_loss_that_no_run_has_is_an_error_and_another_metric_that_none_could_be_read_of_is_named():
    spec, norms = parsed(judgments=["drift"]), {a: {"gradient-norm": s["gradient-norm"]} for a, s in alike().items()}
    verdicts = correctness.judge(spec, results(spec, **norms), ROWS)
    assert [(v.subject, v.status) for v in verdicts] == [("cross-entropy-loss", "ERROR"), ("gradient-norm", "PASS")]
    losses = {arm: {"cross-entropy-loss": series["gradient-norm"]} for arm, series in norms.items()}
    faults = {"gradient-norm": "base0.log line 1 has gradient-norm 'x', which is no number"}
    found = results(spec, **losses)
    found[0] = dataclasses.replace(found[0], run=dataclasses.replace(found[0].run, faults=faults))
    (verdict,) = correctness.judge(spec, found, ROWS)
    assert verdict.status == "PASS"
    assert verdict.notes[-1] == f"gradient-norm was not judged: {faults['gradient-norm']}"


def test_an_arm_that_failed_makes_every_verdict_an_error_that_names_it():
    spec = parsed()
    runs = alike()
    del runs["base1"], runs["feat0"]
    verdicts = correctness.judge(spec, results(spec, **runs), ROWS)
    assert {v.status for v in verdicts} == {"ERROR"} and len(verdicts) == 3
    assert {v.reason for v in verdicts} == {"arm base1: it crashed; arm feat0: it crashed"}


def test_a_metric_that_is_missing_or_not_finite_is_never_a_pass():
    spec = parsed()
    runs = alike()
    runs["feat0"] = {**runs["feat0"], "gradient-norm": [5.0, float("nan"), 2.0, 1.0]}
    del runs["base1"]["load-balance-loss"]
    statuses = {v.subject: v.status for v in correctness.judge(spec, results(spec, **runs), ROWS)}
    assert statuses == {"cross-entropy-loss": "PASS", "load-balance-loss": "ERROR", "gradient-norm": "FAIL"}


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("gradient-norm", [1.0, float("nan"), 1.0, 1.0], "gradient-norm is nan at step 2, not a finite number"),
        ("number of nan iterations", [0, 0, 3, 3], "number of nan iterations is 3 at step 3"),
    ],
)
def test_a_loss_is_no_pass_where_gradients_that_nobody_judges_were_nan(name, values, said):
    spec, runs = parsed(judgments=[{"check": "drift", "metric": "cross-entropy-loss"}]), alike()
    runs["feat0"][name] = values
    (verdict,) = correctness.judge(spec, results(spec, **runs), ROWS)
    assert (verdict.status, verdict.reason) == ("FAIL", f"feat0: {said}")
    runs["base1"][name] = values
    (verdict,) = correctness.judge(spec, results(spec, **runs), ROWS)
    assert verdict.status == "INVESTIGATE" and verdict.reason.endswith(
        f"feat0: {said}, as in the base runs (base1: {said})"
    )
    runs["feat0"][name] = [0.0] * 4
    assert [v.status for v in correctness.judge(spec, results(spec, **runs), ROWS)] == ["PASS"]
    runs["feat0"]["cross-entropy-loss"] = [5, 14, 13, 12]
    runs["feat0"][name] = values
    (verdict,) = correctness.judge(spec, results(spec, **runs), ROWS)
    assert verdict.status == "FAIL" and "times the" in verdict.reason


def test_base_arms_of_different_seeds_are_named_beside_the_verdict():
    seeds = {"base0": {"DATA_SEED": "1"}, "base1": {"DATA_SEED": "2"}}
    spec = parsed(arms=[{**arm, "environment": seeds.get(arm["name"], {})} for arm in parsed().data["arms"]])
    notes = " ".join(correctness.judge(spec, results(spec, **alike()), ROWS)[0].notes)
    assert "the base arms differ in DATA_SEED (1 in base0, 2 in base1), so the floor is" in notes
    spec = parsed(arms=[{**arm, "environment": seeds["base0"]} for arm in parsed().data["arms"]])
    assert "SEED" not in " ".join(correctness.judge(spec, results(spec, **alike()), ROWS)[0].notes)


def test_a_contract_without_the_row_is_refused():
    spec = parsed()
    with pytest.raises(SpecError, match="has no row for ws1/drift"):
        correctness.judge(spec, results(spec, **alike()), contract.load("ws1", ROOT))


def grey(spec, feature=(5, 4.4, 3.4, 2.4)):
    return correctness.judge(spec, results(spec, **alike(feat0=feature)), ROWS)


def test_an_open_verdict_asks_for_a_copy_of_the_last_base_arm():
    spec = parsed()
    verdicts = grey(spec)
    assert {v.status for v in verdicts} == {"INVESTIGATE"}
    arm = correctness.more(spec, verdicts)
    assert (arm.name, arm.role, arm.revision) == ("base2", "base", "main")
    assert correctness.more(spec, correctness.judge(spec, results(spec, **alike()), ROWS)) is None


def test_no_more_base_runs_than_allowed():
    verdicts = grey(parsed())
    judgments = tuple(dataclasses.replace(judgment, max_base_runs=2) for judgment in parsed().judgments)
    assert correctness.more(dataclasses.replace(parsed(), judgments=judgments), verdicts) is None
    one_more = (*judgments[:2], dataclasses.replace(judgments[2], max_base_runs=3))
    assert correctness.more(dataclasses.replace(parsed(), judgments=one_more), verdicts).name == "base2"


def test_a_fail_asks_only_where_it_must_be_confirmed():
    spec = parsed()
    verdicts = grey(spec, (5, 9, 8, 7))
    assert {v.status for v in verdicts} == {"FAIL"} and correctness.more(spec, verdicts) is None
    sure = dataclasses.replace(spec, judgments=(Judgment(check="drift", confirm_fail=True),))
    assert correctness.more(sure, verdicts).name == "base2"


def test_every_kind_has_the_whole_interface():
    for kind, check in CHECKS.items():
        assert all(callable(getattr(check, name)) for name in ("lint", "parse", "expand", "judge", "more")), kind
