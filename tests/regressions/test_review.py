"""One test a finding of the review, by its number; see README.md."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlspec import cells, contract, document, nodes, reports
from rlspec.checks import operators
from rlspec.device import bench as device_bench
from rlspec.device import canonical
from rlspec.device.execution import run
from rlspec.device.gradients import WeightGradient
from rlspec.device.observe import Seen
from rlspec.device.operators import Operators, Segment, Segments
from rlspec.model import Result
from tests import benches
from tests.tiny import rlspec, save

SPEC = {
    "kind": "operators",
    "question": "Right?",
    "model": "tiny-dense",
    "workload": "tiny",
    "operators": ["silu"],
    "arms": [{"name": "a", "implementation": "torch"}],
}
WS1 = contract.load("ws1", benches.ROOT)


def spec(folder, **changes):
    read, problems = document.read(save(folder / "spec.yaml", {**SPEC, **changes}))
    assert not problems
    return operators.parse(read)


def judge(cell, judgment, operator="silu"):
    row = WS1.resolve(judgment, nodes.NODES[operator].family, "bf16")
    measured = {"environment": benches.CPU, "cells": [cell]}
    return benches.judge(measured, operator, benches.tier(), judgment, row)


def through(tmp_path, operator, candidate, layouts, variant=""):
    on = benches.bench(tmp_path, [operator], layouts=layouts)
    one = device_bench.subject(on, operator, on.workload.tiers[0], variant, candidate)
    return [run(one, layout, Seen(), backward=True) for layout in benches.layouts.of(one.tier)]


@pytest.mark.parametrize("key", ["model", "workload", "contract"])
def test_1_a_path_that_is_missing_is_no_default(tmp_path, key):
    save(tmp_path / "spec.yaml", {**SPEC, key: "./lost.yaml"})
    for command in ("lint", "plan", "run"):
        done = rlspec(command, tmp_path / "spec.yaml")
        assert done.code == 2 and "RL201" in done.out + done.err, command


def test_1_a_probe_that_fails_relaxes_nothing(tmp_path, monkeypatch):
    from rlspec import machine

    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nexit 9\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    for requires in ({"device": "cuda"}, {"capability": "9.0"}):
        assert machine.unmet(requires), requires


def test_2_packed_and_single_calls_hand_over_to_one_owner(tmp_path, monkeypatch):
    owners = []
    real = canonical.det_gemm.weight_gradient

    def owner(*arguments, **options):
        owners.append(real(*arguments, **options))
        return owners[-1]

    monkeypatch.setattr(canonical.det_gemm, "weight_gradient", owner)
    found = through(tmp_path, "det_gemm", canonical.det_gemm, ["singletons", "permuted", "padded_right"], "k")
    assert len(owners) == 4 and all(isinstance(one, WeightGradient) for one in owners)
    assert {one.accumulated_by["dweight"] for one in found} == {"operator"}
    assert all(torch.equal(one.gradients["dweight"], found[0].gradients["dweight"]) for one in found)


@pytest.mark.parametrize("operator", ["rms_norm", "attention"])
def test_4_any_one_comparison_turns_its_verdict(operator):
    base = benches.cell(operator, benches.tier())
    for index, line in enumerate(base["comparisons"]):
        accuracy = line["judgment"].endswith("accuracy")
        wrong = {"violations": 1, "excess": 1.0} if accuracy else {"differing": 1, "digest": "x"}
        cell = {**base, "comparisons": copy.deepcopy(base["comparisons"])}
        cell["comparisons"][index] |= wrong
        statuses = {judgment: judge(cell, judgment, operator).status for judgment in nodes.JUDGMENTS}
        assert statuses == {**dict.fromkeys(nodes.JUDGMENTS, "PASS"), line["judgment"]: "FAIL"}, line


@pytest.mark.parametrize("layout", ["decode", "batched_decode"])
def test_5_decode_is_compared_with_prefill_to_the_bit(tmp_path, monkeypatch, layout):
    def attention(query, key, value, segments, *, scale):
        out = canonical.attention(query, key, value, segments, scale=scale)
        return out * (1 + 2.0**-7) if query.shape[1] == 1 else out

    for candidate, status in ((attention, "FAIL"), (canonical.attention, "PASS")):
        table = benches.table(monkeypatch, attention=candidate)
        on = benches.bench(tmp_path, ["attention"], table, layouts=[layout], judgments=nodes.JUDGMENTS[:2])
        found = benches.judged(on)
        assert found["attention", "forward_accuracy"].status == "PASS"
        assert found["attention", "forward_invariance"].status == status


@pytest.mark.parametrize("category", ["skipped", "untracked_missing_node", "", "GREEN"])
def test_10_an_unknown_category_is_no_status(category):
    with pytest.raises(KeyError):
        _ = cells.Finding(category=category, reason="").status
    assert [name for name, status in cells.CATEGORIES.items() if status == "PASS"] == ["green"]


def test_13_no_canonical_layout_is_no_agreement():
    cell = benches.cell("silu", benches.tier())
    del cell["layouts"]["BN/full"]
    assert judge(cell, "forward_invariance").status == "ERROR"
    cell = benches.cell("silu", benches.tier())
    for line in cell["comparisons"]:
        line["against"] = line["configuration"]
    for judgment in nodes.JUDGMENTS:
        assert judge(cell, judgment).status == "ERROR"


def test_17_a_frozen_weight_still_gets_its_rows(tmp_path):
    seen = []

    def rms_norm(x, weight, *, eps):
        seen.append(weight.requires_grad)
        return canonical.rms_norm(x, weight, eps=eps)

    rms_norm.weight_gradient = canonical.rms_norm.weight_gradient
    (found,) = through(tmp_path, "rms_norm", rms_norm, [])
    assert seen == [False] and found.gradients["dweight"].any()


def test_19_nothing_seen_is_copied_from_the_declaration(tmp_path, monkeypatch):
    on = benches.bench(tmp_path, ["silu"], benches.table(monkeypatch, silu=torch.nn.functional.silu))
    seen = benches.measured(on)["cells"][0]["seen"]
    assert seen["triton"] == seen["native"] == [] and seen["profiled"] is None and "silu" in seen["torch"]


def test_21_every_key_of_a_spec_reaches_the_run_file(tmp_path):
    plain = operators.context(spec(tmp_path), WS1)
    for key, value in {
        "model": "tiny-moe",
        "workload": "ws1",
        "operators": ["rope"],
        "judgments": ["forward_accuracy"],
        "dtype": "fp32",
        "requires": {"device": "cpu"},
    }.items():
        told = operators.context(spec(tmp_path, **{key: value}), WS1)
        assert told != plain, key
    assert operators.context(spec(tmp_path), contract.load("strict", benches.ROOT)) != plain


def test_22_counts_are_those_of_the_verdicts(tmp_path):
    made = spec(tmp_path, operators=["silu", "pack"])
    results = [Result(arm=arm, records=Path("r"), failure="exit status 1") for arm in made.arms]
    verdicts = operators.judge(made, results, WS1)
    report = reports.build(made, WS1, (), {}, verdicts, None, results)
    statuses = [verdict["status"] for verdict in report["verdicts"]]
    assert report["counts"] == {"judged": statuses.count("N/A"), "expected": len(statuses)}
    assert (statuses.count("N/A"), len(statuses)) == (4, 8)


def test_24_a_sample_without_a_prompt(tmp_path):
    changed = benches.data()
    changed["samples"][0]["prompt"] = 0
    tier = benches.workloads.of(changed).tiers[0]
    assert tier.samples[0].active == 6 and tier.active == 10
    on = benches.bench(tmp_path, ["silu"])
    whole = replace(on, workload=benches.workloads.of(changed))
    upstream = device_bench.subject(whole, "silu", tier, "", canonical.silu).upstream["out"]
    assert [bool(row.any()) for row in upstream[:11]] == [True] * 7 + [False] + [True] * 3


def test_25_packed_gradients_can_fail(tmp_path, monkeypatch):
    class Packed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.packed = x.shape[1] == 13
            return x * 0.5

        @staticmethod
        def backward(ctx, upstream):
            return upstream * (0.25 if ctx.packed else 0.5)

    table = benches.table(monkeypatch, silu=Packed.apply)
    on = benches.bench(tmp_path, ["silu"], table, layouts=["packed_with"], company=["t3"])
    found = benches.judged(on)
    assert found["silu", "forward_invariance"].status == "PASS"
    assert found["silu", "gradient_invariance"].status == "FAIL"


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_30_the_dtype_of_a_spec_is_that_of_operators_and_rows(tmp_path, dtype):
    on = benches.bench(tmp_path, ["silu"], "canonical", dtype=dtype, layouts=["permuted"])
    long = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[dtype]
    found = benches.judged(on)
    assert {finding.status for finding in found.values()} == {"PASS"}
    (cell,) = benches.measured(on)["cells"]
    assert {line["dtype"] for line in cell["comparisons"]} == {long}
    told = operators.context(spec(tmp_path, dtype=dtype), WS1)
    for judgment in nodes.JUDGMENTS:
        assert told["limits"][judgment]["elementwise"] == dict(WS1.resolve(judgment, "elementwise", long).limits)


def test_33_upstream_gradients_of_fp32_stay_fp32(tmp_path):
    on = benches.bench(tmp_path, ["attention"], "canonical", name="strict", dtype="fp32", layouts=["permuted"])
    assert {found.status for found in benches.judged(on, name="strict").values()} == {"PASS"}


def test_33_an_operator_that_rounds_them_is_red(tmp_path, monkeypatch):
    class Rounded(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, upstream):
            return upstream.bfloat16().float()

    table = benches.table(monkeypatch, silu=lambda x: Rounded.apply(canonical.silu(x)))
    on = benches.bench(tmp_path, ["silu"], table, name="strict", dtype="fp32", layouts=["permuted"])
    assert benches.judged(on, name="strict")["silu", "gradient_accuracy"].category == "red_verdict"


@pytest.mark.parametrize("implementation", ["reference", "torch", "canonical"])
def test_35_values_are_checked_as_keys_are(implementation):
    query, key = torch.zeros(1, 3, 4, 8), torch.zeros(1, 3, 2, 8)
    segments = Segments((Segment(0, 0, 3, 0, 3),), 1, 3, 3, torch.device("cpu"))
    attention = Operators(implementation).attention
    wrong = (key.double(), key[:, :2], key[..., :4], key.to("meta"))
    for k, v in [(key, one) for one in wrong] + [(one, key) for one in wrong]:
        with pytest.raises(ValueError):
            attention(query, k, v, segments, scale=1.0)
