"""One test a weakness of the published evidence, by its number; see README.md."""

from __future__ import annotations

from dataclasses import replace

from rlspec import contract, nodes, verdicts
from rlspec.device import canonical
from tests import benches


def test_2_each_tier_is_measured_for_itself(tmp_path, monkeypatch):
    calls = []
    table = benches.table(monkeypatch, silu=lambda x: calls.append(tuple(x.shape[:2])) or canonical.silu(x))
    changed = benches.data(layouts=["permuted"])
    changed["tiers"].append({**changed["tiers"][0], "name": "two", "samples": ["t2", "t3"], "permutation": [1, 0]})
    on = benches.bench(tmp_path, ["silu"], table)
    both = replace(on, workload=benches.workloads.of(changed))
    found = benches.measured(both)["cells"]
    assert [cell["tier"] for cell in found] == ["one", "two"]
    assert calls[:4] == [(1, 11)] * 4 and calls[-4:] == [(1, 6)] * 4  # each without gradients too
    assert found[0]["layouts"] != found[1]["layouts"]
    digests = [{line["digest"] for line in cell["comparisons"]} for cell in found]
    assert not digests[0] & digests[1]


def test_3_nothing_judged_is_no_pass():
    for statuses in ([], ["N/A"], ["N/A"] * 4):
        assert verdicts.worst(statuses) != "PASS" and verdicts.exit_code(statuses) != 0


def test_3_nothing_compared_is_no_pass():
    rows = contract.load("ws1", benches.ROOT)
    whole = benches.cell("silu", benches.tier())
    empty = [{**line, "elements": 0, "shape": [0, 2]} for line in whole["comparisons"]]
    for comparisons in ([], empty):
        cell = {**whole, "comparisons": comparisons}
        for judgment in nodes.JUDGMENTS:
            measured = {"environment": benches.CPU, "cells": [cell]}
            row = rows.resolve(judgment, "elementwise", "bf16")
            found = benches.judge(measured, "silu", benches.tier(), judgment, row)
            assert (found.category, found.status) == ("broken", "ERROR")


def test_6_packing_is_compared_to_the_bit(tmp_path, monkeypatch):
    table = benches.table(monkeypatch, silu=lambda x: canonical.silu(x) * (1 + 2.0**-7 * (x.shape[1] == 13)))
    on = benches.bench(tmp_path, ["silu"], table, layouts=["packed_with"], company=["t3"])
    found = benches.judged(on)
    assert found["silu", "forward_accuracy"].status == "PASS"
    assert found["silu", "forward_invariance"].status == "FAIL"
