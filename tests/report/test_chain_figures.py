"""Chain reports in words: one row a judgment, what parts where, arm beside arm."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from rlspec import contract, reports
from rlspec.checks import chain
from rlspec.model import Result
from rlspec.report import chain_figures, markdown, terminal
from tests.chain_runs import CONTROLS, line, measured, spec


def report(**arms):
    """Of arms by name, as measured."""
    for name, found in arms.items():
        found["run"]["arm"] = name
    made = chain.parse(spec(arms=[{"name": name, "implementation": "canonical"} for name in arms]))
    rows = contract.load("strict", CONTROLS)
    results = [Result(arm=arm, records=Path("r"), measured=arms[arm.name]) for arm in made.arms]
    return reports.build(made, rows, (), {}, chain.judge(made, results, rows), None, results)


def spoilt():
    found = measured()
    for name in ("BN/packed", "B1/full"):
        line(found, "forward_invariance", name).update(differing=2, digest="x", first=None)
        place = {"layer": 1, "name": "mlp.act", "operator": "swiglu", "sample": "c1", "position": 4, "tokens": 2}
        trace = next(one for one in found["traces"] if (one["judgment"], one["configuration"]) ==
                     ("forward_invariance", name))  # fmt: skip
        trace.update(first=place, differing=3, depth=[0.0, 1e-3])
        next(one for one in found["cells"] if one["name"] == name)["digest"] = "other"
    return found


def test_one_row_a_judgment():
    ((arm, rows),) = chain_figures.tables(report(a=measured()))
    assert arm == "a" and len(rows) == 7 and {row["status"] for row in rows} == {"PASS"}
    by_name = {row["judgment"]: row for row in rows}
    assert by_name["gradient_invariance"]["compared"] == "200" and by_name["gradient_invariance"]["of"] == "8"
    assert by_name["forward_invariance"]["largest"] == "equal to the bit"
    assert by_name["train_inference_parity"]["largest"] == "max |d| 0"


def test_configurations_that_part_at_one_place_stand_together():
    made = report(a=spoilt())
    ((status, named, reason, more),) = chain_figures.troubles(made)
    assert (status, named) == ("FAIL", "a forward_invariance B1/full, BN/packed (red verdict)")
    assert "they part at layer 1, mlp.act (swiglu), sample c1 position 4" in reason
    assert more == ["drift of the residual stream by layer: ·█  layer 1 0.001, layer 1 0.001"]
    (row,) = (row for row in next(chain_figures.tables(made))[1] if row["judgment"] == "forward_invariance")
    assert (row["status"], row["of"], row["largest"]) == ("FAIL", "2 of 7", "4 differing")


def test_numbers_of_one_of_several_name_it():
    found = spoilt()
    line(found, "forward_invariance", "BN/packed").update(differing=5)
    ((_, named, reason, _),) = chain_figures.troubles(report(a=found))
    assert "B1/full, BN/packed" in named and reason.startswith("B1/full: logprob: 2 of 11")


def test_one_reason_for_all_judgments_is_said_once():
    made = report(a=measured())
    for one in made["verdicts"]:
        one.update(status="ERROR", reason="arm a: it fell over")
    ((status, named, reason, _),) = chain_figures.troubles(made)
    assert (status, reason) == ("ERROR", "arm a: it fell over")
    assert named.startswith("a forward_accuracy, forward_invariance, ") and "BN/packed" not in named


@pytest.mark.parametrize("render", [lambda made: terminal.render(made, width=80, color=False), markdown.render])
def test_every_format_names_the_place(render):
    text = " ".join(render(report(a=spoilt())).replace("&#95;", "_").split())
    assert "mlp.act (swiglu)" in text and "swiglu" in text and "weights are seeded (3)" in text


def test_arms_side_by_side():
    other = measured()
    next(one for one in other["logprobs"] if one["execution"] == "BN/full")["values"][0] += 0.25
    line(other, "gradient_invariance", "B1/full", "lm_head.weight")["against_digest"] = "x"
    found = dict(chain_figures.across(report(a=measured(), b=other)))
    assert found["b beside a, BN/full"][0] == {"of": "log-probs", "differing": "1 of 11", "max |d|": "0.25"}
    assert found["b beside a, BN/full"][1]["of"] == "gradients"
    same = dict(chain_figures.across(report(a=measured(), b=measured())))
    assert [row["differing"] for row in same["b beside a, BN/full"]] == ["0 of 11", "0 of 25"]


def test_parity_is_a_table_where_log_probs_differ():
    found = measured()
    one = next(one for one in found["logprobs"] if one["execution"] == "B1/paged")
    one.update(values=[value + 0.5 for value in one["values"]], digest="x")
    rows = dict(chain_figures.across(report(a=found)))["log-probs of a as trained, against those of inference"]
    assert [row["differing"] for row in rows] == ["0 of 11", "0 of 11", "11 of 11", "0 of 11", "0 of 11"]
    assert rows[2]["max |d|"] == "0.5" and rows[2]["outliers"] == "3"


def test_bars():
    assert chain_figures.bars([0, 1e-6, 1e-3, 1, math.inf, "inf"]) == "·▁▄█!!"
    assert chain_figures.bars([0.0, 0.0]) == "··"


def test_a_blocked_run_has_no_table():
    assert not chain_figures.is_chain({"kind": "chain", "verdicts": [{"evidence": {"category": "blocked_hardware"}}]})


def test_a_row_never_says_equal_beside_fail():
    found = measured()
    one = line(found, "kv_cache", "b1/paged", "attention", "reference")
    one["rms"] = 100 * float(one["yardstick"]["torch_rms"])
    (row,) = (row for row in next(chain_figures.tables(report(a=found)))[1] if row["judgment"] == "kv_cache")
    assert (row["status"], row["largest"]) == ("FAIL", "no bit differs, errors outside: 1")
    found["comparisons"].remove(one)
    (row,) = (row for row in next(chain_figures.tables(report(a=found)))[1] if row["judgment"] == "kv_cache")
    assert (row["status"], row["largest"]) == ("ERROR", "the others: equal to the bit")
