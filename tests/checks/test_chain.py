"""Chain specs: what is due follows from spec, workload and model, and nothing that is missing or amiss passes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlspec import chains, contract, document
from rlspec.cells import CATEGORIES
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


def test_a_gradient_that_errs_behind_a_sound_forward_is_not_said_to_be_where_the_error_arose():
    found = measured()
    for name in ("model.layers.0.mlp.down_proj.weight", "model.embed_tokens.weight"):
        one = line(found, "gradient_accuracy", "BN/full", name)
        one["rms"] = 10 * float(one["yardstick"]["torch_rms"])
    reason = judged(found)["gradient_accuracy", "BN/full"].reason
    assert "the first gradient on the way back that does is that of layer 0, mlp.down_proj" in reason


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


def test_absolute_limits_hold_for_pinned_weights_alone():
    rows = contract.load("ws1", CONTROLS)
    seeded = chain.parse(spec(contract="ws1"))
    assert chain.row(seeded, "forward_accuracy", rows).subject == "chain"
    path = ROOT / "specs/chain/closeout-triton.yaml"
    assert chain.row(chain.parse(document.read(path)[0]), "forward_accuracy", rows).subject == "logprob"


def test_pins_that_nobody_knows():
    weights = {"source": "huggingface", "path": "w", "pins": "qwen"}
    with pytest.raises(SpecError, match="unknown pins 'qwen'"):
        chain.parse(spec(weights=weights))


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


def test_nan_on_both_sides_is_said_in_words():
    found = measured()
    nan = {"index": 0, "got": "nan", "want": "nan", "sample": "c1", "position": 2}
    line(found, "decode_prefill", "b1/paged").update(differing=3, digest="x", first=nan)
    verdict = judged(found)["decode_prefill", "b1/paged"]
    assert said(verdict) == ("FAIL", "red_verdict")
    assert "first at sample c1 position 2: nan on both sides, and nan agrees with nothing" in verdict.reason
