"""Chain specs: what is due follows from spec, workload and model, and nothing that is missing or amiss passes."""

from __future__ import annotations

import json
import re
import types
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from rlspec import catalog, chain_places, chain_sizes, chain_verdicts, chains, contract, document, machine
from rlspec.cells import CATEGORIES
from rlspec.chain_verdicts import GATED
from rlspec.checks import chain
from rlspec.errors import RunError, SpecError
from rlspec.model import Result
from tests.chain_runs import CONTROLS, judged, line, measured, spec

ROOT = Path(__file__).parents[2]
GREEN = {("PASS", "green")}
ERROR = {"message": "ValueError: no", "tail": [], "no_backward": False}


def said(verdict):
    return verdict.status, verdict.evidence["category"]


def categories(found, judgment):
    return {said(one) for (name, _), one in found.items() if name == judgment}


def test_a_whole_run_is_green_in_every_judgment():
    found = judged(measured())
    assert {said(one) for one in found.values()} == GREEN
    assert {name for name, _ in found} == set(chains.JUDGMENTS)
    assert len([name for name, _ in found if name == "forward_invariance"]) == 7
    assert len([name for name, _ in found if name == "gradient_invariance"]) == 8


def test_the_published_contract_asks_for_aggregates_and_not_for_bits():
    found = measured("ws1")
    decoded = line(found, "decode_prefill", "b1/contiguous")
    decoded.update(differing=3, digest="other", first=None)
    assert said(judged(found, "ws1")["decode_prefill", "b1/contiguous"]) == ("PASS", "green")
    decoded["dlogp"][0][0] = float(decoded["dlogp"][0][1]) + 0.07
    verdict = judged(found, "ws1")["decode_prefill", "b1/contiguous"]
    assert verdict.status == "FAIL" and "above 0.06" in verdict.reason
    del decoded["dlogp"]
    assert said(judged(found, "ws1")["decode_prefill", "b1/contiguous"]) == ("ERROR", "broken")


@pytest.mark.parametrize("expected", [0, 7, 30, -1])
def test_a_missing_comparison_is_never_a_pass(expected):
    found = measured()
    gone = found["comparisons"].pop(expected)
    verdict = judged(found)[gone["judgment"], gone["configuration"]]
    assert said(verdict) == ("ERROR", "broken") and "no comparison" in verdict.reason


def test_a_comparison_twice_or_of_nobody():
    found = measured()
    one = line(found, "forward_invariance", "BN/packed")
    found["comparisons"].append({**one})
    assert "two comparisons" in judged(found)["forward_invariance", "BN/packed"].reason
    found["comparisons"][-1]["tensor"] = "other"
    assert "nobody asked for" in judged(found)["forward_invariance", "BN/packed"].reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"digest": "float32[11]0"}, "the digests differ"),
        ({"shape": [10]}, r"shape \[10\]"),
        ({"elements": 10}, "is due"),
        ({"limits": {"atol": 1.0, "rtol": 0.0}}, "limits"),
        ({"digest": "x", "against_digest": "x"}, "another run than BN/full"),
    ],
)
def test_a_line_that_cannot_be(change, reason):
    found = measured()
    line(found, "forward_invariance", "BN/permuted").update(change)
    verdict = judged(found)["forward_invariance", "BN/permuted"]
    assert said(verdict) == ("ERROR", "broken")
    assert re.search(reason, verdict.reason), verdict.reason


def test_an_element_that_differs_under_one_digest_is_not_a_number():
    found = measured()
    line(found, "forward_invariance", "BN/permuted").update(differing=1, first=None)
    assert said(judged(found)["forward_invariance", "BN/permuted"]) == ("FAIL", "red_verdict")


def test_a_looser_limit_needs_a_new_run():
    found = measured()
    line(found, "gradient_accuracy", "BN/full", "lm_head.weight")["limits"]["baseline_ratio"] = 30.0
    assert "another contract needs a new run" in judged(found)["gradient_accuracy", "BN/full"].reason


def test_the_canonical_gradient_is_one_and_the_same():
    found = measured()
    one = line(found, "gradient_invariance", "B1/full", "lm_head.weight")
    one.update(digest="other", against_digest="other")
    assert "another tensor" in judged(found)["gradient_invariance", "BN/chunked"].reason


@pytest.mark.parametrize("judgment", ["forward_accuracy", "gradient_accuracy"])
def test_an_error_beyond_that_of_torch_fails_and_names_a_node(judgment):
    found = measured()
    for name in ("BN/full", "BN/packed"):
        one = line(found, judgment, name)
        one["rms"] = 10 * float(one["yardstick"]["torch_rms"])
    nodes = found["depth"]["nodes"]
    next(node for node in nodes if node[:2] == [1, "mlp.act"])[3] = 100.0
    verdict = judged(found)[judgment, "BN/full"]
    assert said(verdict) == ("FAIL", "red_verdict")
    first = verdict.evidence["first_divergence"]
    assert (first["layer"], first["operator"]) == (1, "swiglu")
    assert "the first result on the way forward that errs by more than the row allows is that of layer 1, mlp.act" in (
        verdict.reason
    )


@pytest.mark.parametrize(("cells", "operator"), [(("BN/full", "BN/packed"), "swiglu"), (("BN/packed",), "attention")])
def test_a_packed_cell_that_fails_with_the_canonical_one_fails_where_that_does(cells, operator):
    """Only a cell that fails alone is blamed on the node at which it leaves the canonical one."""
    found = measured()
    for name in cells:
        one = line(found, "forward_accuracy", name)
        one["rms"] = 10 * float(one["yardstick"]["torch_rms"])
    next(node for node in found["depth"]["nodes"] if node[:2] == [1, "mlp.act"])[3] = 100.0
    next(cell for cell in found["cells"] if cell["name"] == "BN/packed")["digest"] = "another"
    trace = next(one for one in found["traces"] if one["configuration"] == "BN/packed")
    trace.update(differing=9, first={"layer": 0, "name": "self_attn", "operator": "attention"})
    verdict = judged(found)["forward_accuracy", "BN/packed"]
    assert said(verdict) == ("FAIL", "red_verdict")
    assert verdict.evidence["first_divergence"]["operator"] == operator


@pytest.mark.parametrize(
    ("wrong", "times", "told"),
    [
        (("layers.0", "embed"), 10, "layer 0, mlp.down_proj (det_gemm), which comes through residual_add and "
                                    "input_layernorm of layer 1"),
        (("layers", "norm", "embed"), 10, "model.norm (rms_norm), which comes through lm_head"),
        (("layers.1.self_attn.o_proj", "layers.1.mlp.down_proj"), 10, "layer 1, mlp.down_proj (det_gemm)"),
        # A gradient that the row passes, though not by far, clears nothing that it came through.
        (("layers.1.self_attn.v_proj",), 10, "layer 1, self_attn.v_proj (det_gemm), which comes through attention"),
        (("layers.1.self_attn.v_proj", "layers.1.self_attn.k_norm/2"), 10, "layer 1, self_attn.v_proj (det_gemm), "
                                                                          "which comes through attention and o_proj"),
    ],
)  # fmt: skip
def test_a_gradient_that_errs_behind_a_sound_forward_is_not_said_to_be_where_the_error_arose(wrong, times, told):
    """A fault in the backward of what it came through shows there first."""
    found = measured()
    for one in found["comparisons"]:
        for name, _, less in (part.partition("/") for part in wrong):
            if one["judgment"] == "gradient_accuracy" and name in one["tensor"]:
                one["rms"] = float(less or times) * float(one["yardstick"]["torch_rms"])
    reason = judged(found)["gradient_accuracy", "BN/full"].reason
    assert reason.endswith(f"the first gradient on the way back that does is that of {told}")


def test_results_on_the_way_that_err_are_no_pass_of_log_probs_that_hide_them():
    found = measured()
    assert said(judged(found)["forward_accuracy", "BN/full"]) == ("PASS", "green")
    next(node for node in found["depth"]["nodes"] if node[:2] == [1, "mlp.act"])[3] = 100.0
    verdict = judged(found)["forward_accuracy", "BN/full"]
    assert said(verdict) == ("INVESTIGATE", "unsure") and not verdict.notes
    told = "results on the way err by more than the row allows beside plain torch, first that of layer 1, mlp.act"
    assert "within the row; but 1 of " in verdict.reason and told in verdict.reason


def test_weights_that_only_their_shapes_name_are_told_of():
    found = measured()
    found["weights"]["config"] = None
    told = "the folder of weights has no config.json: only the shapes of its tensors say that they are of this model"
    assert {one.notes for one in judged(found).values()} == {(told,)}


def test_experts_that_no_row_can_hold_to_fp32_are_an_error():
    found = measured()
    found["depth"]["routes"] = {"choices": 1, "tokens": 1, "of": 11, "wrong": 0, "widest": 0.1}
    asked = types.SimpleNamespace(ratio=lambda judgment: None)
    misled = chain_places.misrouted(found, "forward_accuracy", asked)
    assert misled.category == "broken" and "forward_accuracy/chain has no baseline_ratio" in misled.reason


def test_an_error_of_attention_through_a_cache_has_a_place():
    found = measured()
    one = line(found, "kv_cache", "bn-left/contiguous", "attention", "reference")
    one["rms"] = 10 * float(one["yardstick"]["torch_rms"])
    verdict = judged(found)["kv_cache", "bn-left/contiguous"]
    assert said(verdict) == ("FAIL", "red_verdict")
    assert re.search(r", largest at layer \d sample c\d position \d+: ", verdict.reason), verdict.reason
    one["limits"], one["violations"] = {"atol": 0.1, "rtol": 0.0}, 3
    assert chain_verdicts._where(one).startswith(", first at layer ")
    assert chain_verdicts._where(one | {"violations": 0}).startswith(", largest at layer ")


def test_not_a_number_is_red():
    found = measured()
    line(found, "forward_accuracy", "BN/full")["nonfinite"] = 1
    assert said(judged(found)["forward_accuracy", "BN/full"]) == ("FAIL", "red_verdict")


# Train against inference


def execution(found, name):
    return next(one for one in found["logprobs"] if one["execution"] == name)


def test_one_bit_of_one_log_prob_parts_train_from_inference():
    found = measured()
    one = execution(found, "B1/paged")
    one["values"][3] = one["values"][3] * (1 + 2**-23)
    one["digest"] = "another"
    verdict = judged(found)["train_inference_parity", "B1/paged"]
    assert said(verdict) == ("FAIL", "red_verdict") and verdict.evidence["differing"] == 1
    assert verdict.evidence["aggregates"]["max_abs_dlogp"]["value"] == verdict.statistic > 0
    assert said(judged(found, "strict")["train_inference_parity", "B1/decode"]) == ("PASS", "green")


@pytest.mark.parametrize(("gap", "status"), [(0.05, "PASS"), (0.07, "FAIL")])
def test_the_published_contract_judges_the_aggregates(gap, status):
    found = measured("ws1")
    one = execution(found, "B1/decode")
    one.update(values=[value + gap for value in one["values"]], digest="another")
    verdict = judged(found, "ws1")["train_inference_parity", "B1/decode"]
    assert verdict.status == status
    assert verdict.evidence["aggregates"]["max_abs_dlogp"]["value"] == pytest.approx(gap)
    assert verdict.evidence["aggregates"]["sequence_outliers"]["value"] == (3 if status == "FAIL" else 0)


@pytest.mark.parametrize(
    ("before", "share", "status"),
    [([], 1.01, "INVESTIGATE"), ([], 0.99, "PASS"), ([[0, "mlp.gate.choice", "router", None]], 9.0, "PASS")],
)
def test_results_of_inference_that_are_farther_off_than_rounding_puts_them(before, share, status):
    """Of a mixture of experts only before the first token that goes to others, where scores may be nearly equal."""
    found = measured("ws1")
    node = next(node for node in found["depth"]["nodes"] if node[:2] == [1, "mlp.act"])
    _, _, _, error, theirs, size = node
    gap = share * (error + 2 * theirs + size * 2.0**-9)
    trace = {"judgment": "train_inference_parity", "configuration": "B1/decode", "nodes": 9, "differing": 1,
             "first": None, "depth": [], "apart": [*before, [*node[:3], gap]]}  # fmt: skip
    found["traces"].append(trace)
    verdict = judged(found, "ws1")["train_inference_parity", "B1/decode"]
    assert verdict.status == status
    assert ("first that of layer 1, mlp.act (swiglu)" in verdict.reason) == (status == "INVESTIGATE")
    rows = [contract.plain(row) for row in contract.load("ws1", CONTROLS).rows]
    for row in rows:
        if (row["judgment"], row.get("subject")) == ("forward_accuracy", chains.SUBJECT):
            row["status"] = "measured"
    free = judged(found, contract.from_rows("mine", rows))["train_inference_parity", "B1/decode"]
    assert free.status == "PASS" and len(free.notes) == (status == "INVESTIGATE")


def test_the_limit_of_the_judgment_gates_beside_the_aggregates():
    """A contract whose aggregates are reported alone still has the row of train_inference_parity itself."""
    found = measured("ws1")
    one = execution(found, "B1/decode")
    one.update(values=[value + 0.05 for value in one["values"]], digest="another")
    rows = [contract.plain(row) for row in contract.load("ws1", CONTROLS).rows]
    for row in rows:
        if row["judgment"] in GATED:
            row["status"] = "measured"
    verdict = judged(found, contract.from_rows("mine", rows))["train_inference_parity", "B1/decode"]
    assert verdict.status == "PASS" and "max |d| 0.05, within 0.06" in verdict.reason
    assert verdict.reason.endswith("max_abs_dlogp, approx_kl, clip_fraction reported and not gated")
    for row in rows:
        if row["judgment"] == "train_inference_parity" and row["dtype"] == "bf16":
            row["limits"] = {"max": 1e-9}
    verdict = judged(found, contract.from_rows("mine", rows))["train_inference_parity", "B1/decode"]
    assert said(verdict) == ("FAIL", "red_verdict") and "max |d| 0.05 is above 1e-09" in verdict.reason
    assert judged(found, contract.from_rows("mine", rows))["train_inference_parity", "B1/rescore"].status == "PASS"


def test_sides_go_by_role():
    """d is train - inference: where inference is above, d is below 0, and the estimate of the KL is of that side."""
    found = measured("ws1")
    one = execution(found, "B1/decode")
    one.update(values=[value + 0.5 for value in one["values"]], digest="another")
    kl = judged(found, "ws1")["train_inference_parity", "B1/decode"].evidence["aggregates"]["approx_kl"]["value"]
    assert kl == pytest.approx(0.106531, rel=1e-3)  # exp(-0.5) - 1 + 0.5


@pytest.mark.parametrize(
    ("spoil", "category", "reason"),
    [
        (lambda one: one["values"].pop(), "broken", "10 log-probs of B1/decode, 11"),
        (lambda one: one["values"].__setitem__(2, "nan"), "red_verdict", "log-prob 2 of B1/decode is nan"),
        (lambda one: one.update(digest="other"), "broken", "digests"),
        (lambda one: one.update(execution="B1/other"), "broken", "no log-probs of B1/decode"),
    ],
)
def test_log_probs_that_cannot_be_compared(spoil, category, reason):
    found = measured()
    spoil(execution(found, "B1/decode"))
    verdict = judged(found)["train_inference_parity", "B1/decode"]
    assert said(verdict) == (CATEGORIES[category], category) and reason in verdict.reason


@pytest.mark.parametrize(
    ("name", "dtypes", "reason"),
    [
        ("lm_head", ["bfloat16, bfloat16 -> bfloat16"], "lm_head: a result is in bfloat16, float32 is due"),
        ("residual_add", ["float32, bfloat16 -> bfloat16"], "residual_add: a result is in bfloat16, float32"),
        ("det_gemm", ["a -> bfloat16", "a -> float32"], "det_gemm: a result is in float32, bfloat16 is due"),
    ],
)
def test_a_result_in_another_dtype_is_of_another_profile(name, dtypes, reason):
    found = measured()
    next(one for one in found["operators"] if one["operator"] == name)["dtypes"] = dtypes
    verdicts = judged(found).values()
    assert {said(one) for one in verdicts} == {("ERROR", "red_provenance")}
    assert all(reason in one.reason for one in verdicts)


@pytest.mark.parametrize(
    ("judgment", "configuration", "tensor"),
    [("gradient_invariance", "B1/full", "lm_head.weight"), ("decode_prefill", "b1/paged", "logits")],
)
def test_a_tensor_in_another_dtype_is_not_what_is_due(judgment, configuration, tensor):
    found = measured()
    line(found, judgment, configuration, tensor).update(dtype="bfloat16", against_dtype="bfloat16")
    verdict = judged(found)[judgment, configuration]
    assert said(verdict) == ("ERROR", "broken") and "it is in bfloat16, float32 is due" in verdict.reason


def test_decoded_log_probs_that_are_all_alike_cannot_fail():
    found = measured()
    for one in found["comparisons"]:
        one |= {"dlogp": [[-5.5, -5.5]] * len(one["dlogp"])} if "dlogp" in one else {}
    made = judged(found)
    assert categories(made, "decode_prefill") == {("ERROR", "broken")} and categories(made, "kv_cache") == GREEN
    assert "every log-prob that was decoded is -5.5, a constant" in made["decode_prefill", "b1/paged"].reason


# What ran


@pytest.mark.parametrize(
    ("spoil", "category", "reason"),
    [
        (lambda m: m["run"].update(blocked="no GPU"), "blocked_hardware", "no GPU"),
        (lambda m: m["run"].update(implementation="torch"), "red_provenance", "implementation torch ran"),
        (lambda m: m["run"].update(profile="hf"), "red_provenance", "profile hf"),
        (lambda m: m["run"].update(dtype="float32"), "red_provenance", "float32"),
        (lambda m: m["run"].update(faulty="local_mean"), "red_provenance", "fault local_mean"),
        (lambda m: m["run"]["environment"].update(tf32=True), "red_provenance", "tf32 was on"),
        (lambda m: m["run"]["environment"].update(device="cuda:0"), "red_provenance", "ran on cuda:0"),
        (lambda m: m["weights"].update(seed=4), "red_provenance", "weights"),
        (lambda m: m.update(weights=None), "red_provenance", "which weights"),
        (lambda m: m["operators"].pop(0), "red_provenance", "was not seen to run"),
        (lambda m: m["kernels"].update(weights="x"), "red_provenance", "the weights are not at the end"),
        (lambda m: m["phases"][-1].update(error=ERROR), "red_provenance", "what ran was not seen: ValueError"),
        (lambda m: m["operators"][0].update(backend="triton"), "red_provenance", "no triton kernel was launched"),
        (lambda m: m["run"]["cells"].pop("BN/packed"), "broken", "cells"),
        (lambda m: m["run"].update(parameters=3), "broken", "parameters"),
    ],
)
def test_what_ran_is_held_against_the_spec(spoil, category, reason):
    found = measured()
    spoil(found)
    assert {said(one) for one in judged(found).values()} == {(CATEGORIES[category], category)}
    assert all(reason in one.reason for one in judged(found).values())


def test_a_cell_of_another_layout():
    found = measured()
    next(one for one in found["cells"] if one["name"] == "BN/permuted")["chunk"] = 3
    assert categories(judged(found), "forward_invariance") == {("ERROR", "broken")}


def test_a_part_that_raised_ends_its_own_judgments_alone():
    found = measured()
    found["comparisons"] = [one for one in found["comparisons"] if one["configuration"] != "BN/packed"]
    phase = next(one for one in found["phases"] if one["name"] == "training")
    phase["error"] = {"message": "ValueError: no", "tail": ["t"], "no_backward": False}
    made = judged(found)
    assert said(made["forward_invariance", "BN/packed"]) == ("ERROR", "raised")
    assert said(made["forward_invariance", "BN/permuted"]) == ("PASS", "green")
    assert categories(made, "kv_cache") == GREEN
    phase["error"]["no_backward"] = True
    assert said(judged(found)["gradient_invariance", "BN/packed"]) == ("FAIL", "red_no_backward")


def test_nothing_is_green_that_nobody_looked_at():
    found = measured()
    for phase in found["phases"]:
        if phase["name"] in ("inference", "provenance"):
            phase["error"] = {"message": "ValueError: no", "tail": ["t"], "no_backward": False}
    made = judged(found)
    assert {said(one) for one in made.values()} == {("ERROR", "red_provenance")}
    assert "what ran was not seen" in made["forward_invariance", "BN/packed"].reason


def test_an_arm_that_left_nothing():
    made = chain.parse(spec())
    result = Result(arm=made.arms[0], records=Path("r"), failure="exit code 1")
    found = chain.judge(made, [result], contract.load("strict", CONTROLS))
    assert [one.judgment for one in found] == list(chains.JUDGMENTS)
    assert {one.status for one in found} == {"ERROR"} and "exit code 1" in found[0].reason


# Specs


def test_shipped_specs_parse_and_say_which_weights_they_need():
    closeouts = [chain.parse(document.read(path)[0]) for path in (ROOT / "specs/chain").glob("closeout*.yaml")]
    assert closeouts
    for made in closeouts:
        assert made.requires["pinned_weights"] and made.chain["weights"]["pins"]["content_hash"].startswith("fc664a19")
        assert any("weights are not here" in reason for reason in chain.unmet(made))


def test_seeded_weights_never_pass_a_closeout():
    made = chain.parse(spec(requires={"pinned_weights": True}))
    assert chain.unmet(made) == ["pinned weights are needed, and the spec has none"]


def test_too_little_memory_is_blocked_with_the_estimate_beside_what_the_spec_asks_for(monkeypatch):
    monkeypatch.setattr(machine, "gpus", lambda: [types.SimpleNamespace(memory_gib=40.0, capability=(9, 0))])
    whole = spec(model="qwen3-8b", workload="ws1-chain", requires={"device": "cuda", "memory_gib": 80})
    assert chain.unmet(chain.parse(whole)) == ["80 GiB of GPU memory are needed (78 by estimate), here: 40.0 GiB"]


def test_absolute_limits_hold_for_pinned_weights_alone():
    rows = contract.load("ws1", CONTROLS)
    seeded = chain.parse(spec(contract="ws1"))
    assert chain.row(seeded, "forward_accuracy", rows).subject == "chain"
    path = ROOT / "specs/chain/closeout-triton.yaml"
    assert chain.row(chain.parse(document.read(path)[0]), "forward_accuracy", rows).subject == "logprob"


def refused(made):
    return [problem for problem in chain.lint(made, ()) if problem.severity == "error"]


def test_a_table_of_ones_own_has_every_operator_of_the_model(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    (tmp_path / "mine.py").write_text("table = {'rms_norm': 1, 'det_gemm': 1}\n")

    def found(implementation, **changes):
        made = spec(arms=[{"name": "a", "implementation": implementation}], **changes)
        return refused(replace(made, path=tmp_path / "spec.yaml"))

    known = {"model": "tiny-dense", "workload": "tiny-chain"}
    ((rule, message, hint),) = [(one.rule, one.message, one.hint) for one in found("mine:table", **known)]
    assert rule == "RL312" and hint.endswith("it has rms_norm, det_gemm")
    assert message.startswith("mine:table of arm a has no operator embedding, qk_norm, ") and "swiglu" in message
    assert not found({"det_gemm": "mine:table", "rope": "triton"}, **known)
    (problem,) = found("mine:table", profile="hf", **known)
    assert "silu" in problem.message and "swiglu" not in problem.message
    (tmp_path / "mine.py").write_text("table = dict(silu=1)\n")
    assert not found("mine:table", **known)  # what its source does not tell, the run will


def test_pages_that_no_decoded_position_lies_behind_are_refused(tmp_path):
    data = (CONTROLS / "workloads" / "small.yaml").read_text()
    (tmp_path / "w.yaml").write_text(data.replace("page_size: 2", "page_size: 64"))
    (found,) = refused(spec(workload=str(tmp_path / "w.yaml")))
    assert found.rule == "RL314" and "page_size 64: no decoded position of case b1" in found.message
    assert not refused(spec(workload=str(tmp_path / "w.yaml"), judgments=["forward_invariance"]))


def test_token_ids_that_the_model_has_not_are_refused(tmp_path):
    data = (CONTROLS / "workloads" / "small.yaml").read_text()
    for first, told in [(91, None), (92, "sample c0: token 97 is not below the vocabulary of the model, 97")]:
        ids = f"{{id: c0, length: 6, prompt: 3, tokens: [[{first}, {first + 5}]]}}"
        (tmp_path / "w.yaml").write_text(data.replace("{id: c0, length: 6, prompt: 3}", ids))
        found = refused(spec(workload=str(tmp_path / "w.yaml")))
        assert [one.rule for one in found] == ["RL314"] * bool(told) and (not told or found[0].message.endswith(told))


def test_weights_of_another_model_than_the_declared_one_are_refused_by_the_key(tmp_path):
    made = spec(weights={"source": "huggingface", "path": str(tmp_path), "pins": "qwen3-8b"})
    assert not refused(made)  # shards alone, which are pinned
    fields = asdict(chain_sizes.of(catalog.model("small", CONTROLS)))
    config = {"model_type": "qwen3"} | {key: value for key, value in fields.items() if value}
    for change, told in [
        ({}, None),
        ({"rope_theta": 1e6}, "rope_theta is 10000.0, and 1000000.0 there"),
        ({"hidden_act": "gelu"}, 'hidden_act "gelu" is not implemented'),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "rope_scaling"),
    ]:
        (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
        found = refused(made)
        assert [problem.rule for problem in found] == ["RL305"] * (told is not None), found
        assert told is None or told in found[0].message
    (tmp_path / "config.json").write_text(json.dumps({**config, "attn_logit_softcapping": 50.0}))
    (problem,) = refused(made)
    told = "the decoder cannot build this model: key attn_logit_softcapping is not implemented"
    assert problem.pointer == "/weights/path" and problem.message == f"{tmp_path / 'config.json'}: {told}"
    letter = "our decoder runs what it implements to the letter, and nothing as something else: "
    assert problem.hint == f"{letter}name weights of a model that it runs"
    (problem,) = refused(spec(model=str(tmp_path / "config.json")))
    assert problem.rule == "RL313" and problem.message.endswith(f"config.json: {told}")
    assert problem.hint == f"{letter}name a model that it runs"
    (tmp_path / "config.json").write_text("{bad")
    (problem,) = refused(made)
    assert f"is not the one in {tmp_path}: its config.json: Expecting property name" in problem.message
    assert problem.hint == "name the model that the folder holds, or correct its config.json"


def test_pins_that_nobody_knows(tmp_path):
    weights = {"source": "huggingface", "path": "w", "pins": "qwen"}
    with pytest.raises(SpecError, match="unknown pins 'qwen'"):
        chain.parse(spec(weights=weights))
    (tmp_path / "spec.yaml").touch()
    made = replace(spec(weights={**weights, "pins": "nope.yaml"}), path=tmp_path / "spec.yaml")
    told = [(one.message, one.hint) for one in refused(made) if "pins" in one.message]
    assert told == [("unknown pins 'nope.yaml'", "known: qwen3-8b")]


PIN = {"sha256": "0aF" * 21 + "0", "bytes": 8}
PINS = {"index_sha256": None, "shards": {"a": PIN}, "content_hash": "f" * 64}
HASH = "'beef' does not have the right form"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, None),
        ({"tensor_bytes": 8, "index_sha256": "AB" * 32}, None),
        ({"shards": {"a": {"sha256": "0" * 63 + "a"}}}, "'bytes' is missing in shards.a"),
        ({"shards": {"a": {"bytes": 8}}}, "'sha256' is missing in shards.a"),
        ({"shards": {"a": {**PIN, "bytes": "8"}}}, "shards.a.bytes: an integer is due, not the text '8'"),
        ({"shards": {"a": {**PIN, "bytes": -8}}}, "shards.a.bytes: -8 is below 1"),
        ({"shards": {"a": {**PIN, "sha256": "beef"}}}, f"shards.a.sha256: {HASH}"),
        ({"shards": 3}, "shards: a mapping is due, not the number 3"),
        ({"shards": ["a"]}, "shards: a mapping is due, not a list"),
        ({"shards": {"a": 3}}, "shards.a: a mapping is due, not the number 3"),
        ({"shards": {}}, "shards: an empty mapping"),
        ({"index_sha256": 3}, "index_sha256: text or nothing is due, not the number 3"),
        ({"index_sha256": "beef"}, f"index_sha256: {HASH}"),
        ({"content_hash": None}, "content_hash: text is due, not nothing"),
        ([], "pins: a mapping is due, not a list"),
        (None, "pins: a mapping is due, not nothing"),
    ],
)
def test_pins_that_are_malformed_are_refused_by_file_and_key(tmp_path, change, told):
    path = tmp_path / "mine.yaml"
    path.write_text(json.dumps({**PINS, **change} if isinstance(change, dict) else change))
    made = spec(weights={"source": "huggingface", "path": "w", "pins": str(path)})
    found = refused(made)
    assert [one.rule for one in found] == ["RL201"] * bool(told)
    if told:
        assert re.fullmatch(rf"{path}:\d+:\d+: {re.escape(told)}", found[0].message), found[0].message
        assert "weight_files FOLDER" in found[0].hint
        with pytest.raises(SpecError, match=re.escape(told)):
            chain.parse(made)


def test_run_files_are_told_of_every_row():
    context = chain.context(chain.parse(spec()), contract.load("strict", CONTROLS))
    assert context["limits"]["forward_accuracy"] == {"baseline_ratio": 2.0, "relative_rms": 0.05}
    assert set(context["limits"]) == {"forward_accuracy", "gradient_accuracy", "kv_cache"}
    assert context["model"]["name"] == "small" and context["weights"] == {"source": "seeded", "seed": 3}


def test_records_that_break_off(tmp_path):
    from rlspec import chain_records

    path = tmp_path / "r.jsonl"
    path.write_text('{"record": "run", "schema_version": 1, "arm": "a"}\n')
    with pytest.raises(RunError, match="break off"):
        chain_records.read(path, "a")
    path.write_text('{"record": "end", "lines": 0}\n')
    with pytest.raises(RunError, match="not due here"):
        chain_records.read(path, "a")


def test_log_probs_that_are_all_alike_cannot_fail():
    found = measured()
    for one in found["logprobs"]:
        one["values"] = [0.0] * len(one["values"])
    for verdict in judged(found).values():
        assert said(verdict) == ("ERROR", "broken") and "every log-prob is 0, a constant" in verdict.reason
    found["logprobs"][0]["values"][0] = -1.0
    assert all("a constant" not in verdict.reason for verdict in judged(found).values())


def test_decoding_alone_is_not_judged_by_a_constant():
    """Logits that are all alike agree wherever they come from; no log-prob of training says so here."""
    found, asked = measured(), {"judgments": ["decode_prefill"]}
    assert {one.status for one in judged(found, **asked).values()} == {"PASS"}
    decoded = [one for one in found["comparisons"] if one["judgment"] == "decode_prefill"]
    for one in decoded:
        one["dlogp"] = [[-5.5, -5.5] for _ in one["dlogp"]]
    found["logprobs"] = []
    for verdict in judged({**found, "comparisons": decoded}, **asked).values():
        assert said(verdict) == ("ERROR", "broken") and "decoded is -5.5, a constant" in verdict.reason


def test_nan_on_both_sides_is_said_in_words():
    found = measured()
    nan = {"index": 0, "got": "nan", "want": "nan", "sample": "c1", "position": 2}
    line(found, "decode_prefill", "b1/paged").update(differing=3, digest="x", first=nan)
    verdict = judged(found)["decode_prefill", "b1/paged"]
    assert said(verdict) == ("FAIL", "red_verdict")
    assert "first at sample c1 position 2: nan on both sides, and nan agrees with nothing" in verdict.reason
