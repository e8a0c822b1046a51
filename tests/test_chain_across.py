"""One arm of a chain held against the first: nothing that is missing passes, and every bit that differs is counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlspec import chain_across, chains, contract
from rlspec.checks import chain
from rlspec.model import Result
from rlspec.report import chain_figures
from tests.chain_runs import CONTROLS, measured, spec

ACROSS = [*chains.JUDGMENTS, chains.ACROSS]


def said(verdict):
    return verdict.status, verdict.evidence["category"]


def canonical(found):
    return next(one for one in found["logprobs"] if one["execution"] == "BN/full")["values"]


def other_gradient(found):
    for one in found["comparisons"]:
        if one["tensor"] == "lm_head.weight":  # in all lines of the arm, which agree with each other
            one.update({key: "other" for key in ("digest", "against_digest") if one[key] == one["digest"]})


def across(*sides, **changes):
    """The verdict on the second arm beside the first; None stands for an arm that left nothing."""
    arms = [{"name": name, "implementation": "canonical"} for name in ("a", "b")]
    made = chain.parse(spec(**{"arms": arms, "judgments": ACROSS, **changes}))
    results = [Result(arm=arm, records=Path("r"), measured=side) for arm, side in zip(made.arms, sides, strict=True)]
    found = chain.judge(made, results, contract.load("strict", CONTROLS))
    (verdict,) = (one for one in found if one.judgment == chains.ACROSS)
    return verdict


def test_two_arms_agree_to_the_bit_or_the_judgment_across_them_fails():
    verdict = across(measured(), measured())
    assert said(verdict) == ("PASS", "green") and verdict.subject == "b/BN/full beside a"
    assert verdict.reason == "11 log-probs and 25 gradients are equal to the bit"
    second = measured()
    other_gradient(second)
    verdict = across(measured(), second)
    assert said(verdict) == ("FAIL", "red_verdict")
    assert verdict.reason == "1 of 25 gradients differ, first on the way back that of lm_head.weight"


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda m: m["weights"].update(digest="x") or m["kernels"].update(weights="x"), "ran on different weights"),
        (lambda m: canonical(m).pop(), "10 log-probs of a, 11"),
        (lambda m: m["run"].update(implementation="torch"), "implementation torch ran"),
        (lambda m: m.update(comparisons=[one for one in m["comparisons"] if one["tensor"] != "lm_head.weight"]),
         "lm_head.weight: no gradient"),
    ],
)  # fmt: skip
def test_an_arm_that_cannot_be_held_against_another(spoil, reason):
    for side in (0, 1):
        sides = [measured(), measured()]
        spoil(sides[side])
        verdict = across(*sides)
        assert verdict.status == "ERROR" and reason in verdict.reason
    assert across(measured(), None).status == across(None, measured()).status == "ERROR"


def test_a_run_without_gradients_is_not_passed_by_its_log_probs_alone():
    """Of an older rlspec, whose specs could name the judgment across arms alone."""
    verdict = across(spoilt("none"), spoilt("none"), judgments=[chains.ACROSS])
    assert said(verdict) == ("ERROR", "broken") and "no gradient" in verdict.reason


def spoilt(judgment=None):
    """Every log-prob and one gradient are others; of an arm asked for one judgment of gradients, or for all."""
    found = measured()
    canonical(found)[:] = [value - 0.5 for value in canonical(found)]
    other_gradient(found)
    found["comparisons"] = [one for one in found["comparisons"] if judgment in (None, one["judgment"])]
    return found


def test_what_is_compared_and_what_differs_are_counted_in_one_unit():
    evidence = across(measured(), spoilt()).evidence
    assert (evidence["comparisons"], evidence["outside"], evidence["differing"]) == (11 + 25, 11 + 1, 11)


@pytest.mark.parametrize("judgment", ["gradient_invariance", "gradient_accuracy"])
def test_the_table_beside_the_verdict_knows_the_same_gradients(judgment):
    arms = {"a": measured(), "b": spoilt(judgment)}
    ((_, rows),) = chain_figures.across({"verdicts": [], "measured": arms})
    assert [(row["of"], row["differing"]) for row in rows] == [("log-probs", "11 of 11"), ("gradients", "1 of 25")]
    assert len(chain_across.gradients(arms["b"])) == 25


def test_gradients_that_no_judgment_asks_for_are_not_passed_over():
    arms = [{"name": name, "implementation": name} for name in ("canonical", "torch")]
    for more in ([], ["forward_invariance"], ["gradient_invariance"], ["gradient_accuracy"]):
        made = spec(arms=arms, judgments=[*more, chains.ACROSS])
        found = [one.message for one in chain.lint(made, ()) if one.rule == "RL316"]
        told = f"{chains.ACROSS} holds gradients against each other, and no other judgment asks for them"
        assert found == ([] if "gradient" in str(more) else [told])


def test_the_legend_tells_the_judgment_across_arms_from_the_invariances():
    def legend(*names):
        return chain_figures.legend({"verdicts": [{"judgment": name} for name in names]})

    assert set(chain_figures.COMPARED) == {*chains.JUDGMENTS, chains.ACROSS}
    assert legend(*chains.JUDGMENTS).startswith("forward_ and gradient_invariance: every layout")
    assert chains.ACROSS not in legend(*chains.JUDGMENTS) and legend(chains.ACROSS).startswith(chains.ACROSS)
