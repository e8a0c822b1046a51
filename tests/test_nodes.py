from __future__ import annotations

import math

import pytest

from rlspec import contract, nodes, workloads
from tests import benches

CLASSES = {"elementwise", "reduction", "attention", "logprob"}


def expected(operator, judgment, device="cpu", **changes):
    return list(nodes.expected(operator, benches.tier(**changes), judgment, device))


def test_every_operator_of_a_shipped_workload_is_a_node():
    for name in benches.SHIPPED:
        for tier in benches.shipped(name).tiers:
            assert set(tier.operators) <= set(nodes.NODES)


def test_nodes_are_the_operators_that_can_be_called_and_pack():
    from rlspec.device.operators import CATALOGUE

    assert set(nodes.NODES) == {*CATALOGUE, "pack"}
    assert [name for name, node in nodes.NODES.items() if node.not_applicable] == ["pack"]


@pytest.mark.parametrize("name", ["ws1", "strict"])
def test_every_class_has_rows(name):
    rows = contract.load(name, benches.ROOT)
    assert {node.family for node in nodes.NODES.values()} == CLASSES
    for judgment in nodes.JUDGMENTS:
        for family in CLASSES:
            assert rows.resolve(judgment, family, "bf16").status == "applicable"


def test_classes_are_those_of_the_first_closeout():
    by_class = {name: nodes.NODES[name].family for name in benches.shipped("ws1").operators}
    elementwise = ("embedding", "rope", "silu", "swiglu", "pack")
    assert by_class == {
        **dict.fromkeys(elementwise, "elementwise"),
        **dict.fromkeys(("rms_norm", "qk_norm", "lm_head", "det_gemm"), "reduction"),
        "attention": "attention",
        **dict.fromkeys(("logprob", "batch_invariant_logprob"), "logprob"),
    }


def test_variants_are_projections_and_scales():
    tier = benches.tier(projections=["q", "down"], logit_scales=[1, 16])
    assert nodes.variants("det_gemm", tier) == ("q", "down") and nodes.variants("rms_norm", tier) == ("",)
    for operator in ("logprob", "batch_invariant_logprob", "linear_logprob"):
        assert nodes.variants(operator, tier) == ("scale 1", "scale 16")


def test_experts_are_judged_in_ways_to_route():
    tier = benches.tier(routings=["skewed", "tied", "sigmoid"])
    assert nodes.variants("router", tier) == ("skewed", "tied", "sigmoid") and nodes.variants("combine", tier) == (
        "skewed",
    )
    assert nodes.variants("grouped_gemm", tier) == ("gate_up skewed", "down skewed")
    assert nodes.variants("router", benches.tier()) == ("even",)


def test_norms_and_rotations_have_the_forms_of_their_time():
    fills = {fill: workloads.of({**benches.data(fill=fill), "cases": 2}).tiers[0] for fill in ("hashed", "published")}
    assert nodes.variants("rms_norm", fills["hashed"]) == ("", "small")
    assert nodes.variants("qk_norm", fills["hashed"]) == ("", "small keys")
    assert nodes.variants("rms_norm", fills["published"]) == ("",)
    for of in fills.values():
        assert nodes.variants("rope", of) == ("", "keys") and nodes.variants("silu", of) == ("",)
    for operator in ("rope", "qk_norm", "rms_norm"):  # of a report of before
        assert nodes.variants(operator, benches.tier()) == ("",)


def test_options_of_the_decoder_are_forms_since_their_time():
    (now,) = workloads.of({**benches.data(routings=["even"]), "cases": 3}).tiers
    (left_out,) = workloads.of({**benches.data(options=False), "cases": 3}).tiers
    assert nodes.variants("rms_norm", now) == ("", "small", "rounded")
    assert nodes.variants("router", now) == ("even", "choice", "narrow", "narrow choice")
    assert nodes.variants("residual_add", now) == ("", "narrow") and nodes.variants("silu", now) == ("",)
    assert nodes.variants("rms_norm", left_out) == ("", "small") and nodes.variants("lm_head", left_out) == ("",)
    for cases in (1, 2):  # of a report of before
        (before,) = workloads.of({**benches.data(), "cases": cases}).tiers
        assert nodes.variants("residual_add", before) == ("",) and nodes.variants("router", before) == ("even",)


def test_a_tier_may_leave_out_operators_and_judgments():
    tiers = benches.shipped("ws1").tiers
    assert [tier.name for tier in nodes.tiers("attention", tiers)] == ["short", "primary", "long"]
    assert [tier.name for tier in nodes.tiers("silu", tiers)] == ["short", "primary"]
    assert nodes.judged(benches.tier(judgments=["forward_accuracy"]), nodes.JUDGMENTS) == ("forward_accuracy",)
    assert nodes.judged(benches.tier(), ("gradient_accuracy",)) == ("gradient_accuracy",)


# What a cell must hold


def test_invariance_compares_every_configuration_but_the_canonical():
    accuracy, bits = (expected("silu", f"forward_{name}") for name in ("accuracy", "invariance"))
    names = [one.configuration for one in bits]
    singles = [f"B1/full/{sample}" for sample in ("t0", "t1", "t2")]
    assert names == ["BN/chunked", *singles, "BN/permuted", "BN/padded_right", "BN/padded_nan", "BN/neighbours",
                     "BN/strided", "BN/repeated"]  # fmt: skip
    assert [one.configuration for one in accuracy] == ["BN/full", "BN/chunked", "B1/full", *names[4:]]
    assert {one.tokens for one in accuracy} == {11}
    assert [one.tokens for one in bits[1:4]] == [6, 1, 4] and bits[0].tokens == 11


def test_gradients_are_of_tensors_and_of_parameters_where_the_batch_is_whole():
    bits = expected("rms_norm", "gradient_invariance")
    weights = [one for one in bits if one.tensor == "dweight"]
    assert {one.tokens for one in weights} == {0} and {one.tensor for one in bits} == {"dx", "dweight"}
    assert [one.configuration for one in weights] == ["BN/chunked", "B1/full", "BN/permuted", "BN/padded_right",
                                                     "BN/padded_nan", "BN/strided", "BN/repeated"]  # fmt: skip


def test_keys_count_by_the_key():
    changed = {"samples": ["t0", "t2"], "permutation": [1, 0], "layouts": ["permuted"], "chunk": 0}
    bits = expected("attention", "gradient_invariance", **changed)
    assert {one.tensor: one.tokens for one in bits} == {"dquery": 10, "dkey": 10, "dvalue": 10}
    decode = next(tier for tier in benches.shipped("wide").tiers if tier.name == "decode")
    whole = {e.tensor: e.tokens for e in nodes.expected("attention", decode, "gradient_accuracy", "cpu")
             if e.configuration == "BN/full"}  # fmt: skip
    assert whole["dquery"] == decode.tokens == 276 and whole["dkey"] == sum(s.length for s in decode.samples)


def test_streams_are_for_gpus_and_other_processes_for_bits():
    changed = {"layouts": ["other_stream", "other_process"]}
    assert [e.configuration for e in expected("silu", "forward_invariance", **changed)] == ["BN/other_process"]
    assert [e.configuration for e in expected("silu", "forward_accuracy", **changed)] == ["BN/full"]
    on_gpu = expected("silu", "forward_invariance", "cuda", **changed)
    assert [e.configuration for e in on_gpu] == ["BN/other_stream", "BN/other_process"]


# Accuracy rows

PUBLISHED = {"atol": 0.01, "rtol": 0.01}
RATIO = {"baseline_ratio": 2.0, "relative_rms": 0.01}
YARDSTICK = {"torch_max_abs": 1.0, "torch_rms": 0.1, "rounding_max_abs": 0.5, "rounding_rms": 0.05}


def numbers(**changes):
    fine = {"nonfinite": 0, "elements": 2000, "violations": 0, "excess": -0.1, "rms": 0.1, "max_abs": 1.0,
            "relative_rms": 0.001, "yardstick": YARDSTICK}  # fmt: skip
    return {**fine, **changes}


@pytest.mark.parametrize("limits", [PUBLISHED, RATIO])
def test_numbers_within_a_row(limits):
    assert nodes.accuracy_problem(numbers(), limits) is None


@pytest.mark.parametrize(
    ("changes", "limits", "message"),
    [
        ({"violations": 1}, PUBLISHED, "1 of 2,000 elements are outside"),
        ({"excess": 0.5}, PUBLISHED, "an element is 0.5 outside"),
        ({"excess": "inf"}, PUBLISHED, "outside"),
        ({"excess": "nan"}, PUBLISHED, "outside"),
        ({"violations": math.nan}, PUBLISHED, "outside"),
        ({"nonfinite": 3}, PUBLISHED, "3 of 2,000 elements are not finite"),
        ({"nonfinite": 3}, RATIO, "3 of 2,000 elements are not finite"),
        ({"rms": 0.2001}, RATIO, "RMS error 0.2001; plain torch allows 0.2"),
        ({"max_abs": 2.1}, RATIO, "largest error 2.1; plain torch allows 2"),
        ({"max_abs": "inf"}, RATIO, "largest error inf"),
        ({"rms": "nan"}, RATIO, "RMS error nan"),
        ({"relative_rms": 0.011}, RATIO, "RMS error 0.011 of the reference's RMS, above 0.01"),
        ({"relative_rms": "nan"}, RATIO, "of the reference's RMS"),
        ({"yardstick": {**YARDSTICK, "torch_rms": math.nan}}, RATIO, "plain torch itself is not finite"),
    ],
)
def test_numbers_outside_a_row(changes, limits, message):
    assert message in nodes.accuracy_problem(numbers(**changes), limits)


def test_a_perfect_baseline_leaves_the_rounding_of_the_output():
    perfect = {**YARDSTICK, "torch_max_abs": 0.0, "torch_rms": 0.0}
    assert nodes.accuracy_problem(numbers(rms=0.05, max_abs=0.5, yardstick=perfect), RATIO) is None
    assert "RMS" in nodes.accuracy_problem(numbers(rms=0.051, max_abs=0.5, yardstick=perfect), RATIO)


@pytest.mark.parametrize("lost", ["nonfinite", "violations", "excess"])
def test_a_number_that_is_missing_is_never_agreement(lost):
    with pytest.raises(KeyError):
        nodes.accuracy_problem({k: v for k, v in numbers().items() if k != lost}, PUBLISHED)
