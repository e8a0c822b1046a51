"""A chain on the device: weights that are refused, machines that are too small, operators that raise."""

from __future__ import annotations

import dataclasses
import json
import types

import pytest
import torch

from rlspec import catalog, chain_records, chains, contract
from rlspec.architecture import read
from rlspec.checks import chain
from rlspec.device import (
    chain_bench,
    chain_faults,
    chain_harness,
    chain_model,
    chain_session,
    chain_training,
    reference,
    weights,
)
from rlspec.device.chain_inference import Engine
from rlspec.device.decoder import Decoder
from rlspec.device.operators import Operators
from tests.chain_runs import CONTROLS, judged, line, spec
from tests.device.test_weight_files import write
from tests.kernels.interpreted import gpu

FEW = ["forward_invariance", "decode_prefill"]


@pytest.fixture(autouse=True)
def threads():
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)


def bench(arm=None, **changes):
    changes = {"judgments": FEW, "cells": ["BN/packed"], **changes}
    config = chain.context(chain.parse(spec(**changes)), contract.load("strict", CONTROLS))
    return chain_bench.bench(config, {"name": "a", "implementation": "canonical", **(arm or {})})


def run(on, folder):
    path = folder / "records.jsonl"
    chain_harness.main(on, path)
    return chain_records.read(path, "a")


def saved(folder, *, seed=5, **changes):
    """Files of a seeded model, with their pins as `weights:` of a run file."""
    model = read({**catalog.model("small", CONTROLS), **changes})
    made = Decoder(model, Operators("canonical"), master_dtype=torch.bfloat16)
    weights.seeded(made, seed)
    tensors = {name: parameter.detach() for name, parameter in made.named_parameters()}
    half = len(tensors) // 2
    parts = [dict(list(tensors.items())[:half]), dict(list(tensors.items())[half:])]
    return {"source": "huggingface", "path": str(folder), "pins": write(folder, *parts)}


def with_weights(given, **changes):
    return dataclasses.replace(bench(**changes), weights=given)


def test_pinned_weights_are_checked_loaded_and_named(tmp_path):
    found = run(with_weights(saved(tmp_path)), tmp_path)
    assert found["weights"]["pinned"] is True and found["weights"]["source"] == "huggingface"
    assert [phase["error"] for phase in found["phases"]] == [None] * len(found["phases"])
    assert all(line["differing"] == 0 for line in found["comparisons"])
    verdict = judged(found, judgments=FEW, cells=["BN/packed"])["forward_invariance", "BN/packed"]
    assert verdict.evidence["weights"].endswith(", no config.json") and "no config.json" in verdict.notes[-1]


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda f: next(iter(f.glob("*00002*"))).unlink(), "is missing"),
        (lambda f: flip(next(iter(f.glob("*00001*")))), "has the SHA-256"),
        (lambda f: (f / "model.safetensors.index.json").write_text("{}"), "index.json has the SHA-256"),
        (lambda f: (f / "config.json").write_text('{"rms_norm_eps": 1e-5}'), "rms_norm_eps is 1e-06, and 1e-05 there"),
        (lambda f: (f / "config.json").write_text("{}"), "num_hidden_layers is missing"),
    ],
)
def test_weights_that_are_not_what_is_pinned_are_refused_before_anything_is_allocated(tmp_path, spoil, reason):
    given = saved(tmp_path)
    spoil(tmp_path)
    found = run(with_weights(given), tmp_path)
    error = next(phase["error"] for phase in found["phases"] if phase["name"] == "weights")
    assert "are refused" in error["message"] and reason in error["message"]
    assert found["weights"] is None and not found["comparisons"]
    made = judged(found, judgments=FEW, cells=["BN/packed"])
    assert {(one.status, one.evidence["category"]) for one in made.values()} == {("ERROR", "raised")}
    assert not any("tail" in one.evidence or one.reason.startswith("ValueError") for one in made.values())


def flip(path):
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def test_a_tied_file_for_an_untied_model(tmp_path):
    found = run(with_weights(saved(tmp_path, tie_word_embeddings=True)), tmp_path)
    error = next(phase["error"] for phase in found["phases"] if phase["name"] == "weights")
    assert "lm_head.weight is missing, and this model does not tie its head" in error["message"]


def test_a_config_that_the_decoder_does_not_implement_is_refused_by_its_key():
    made = chain.parse(spec())
    config = chain.context(made, contract.load("strict", CONTROLS))
    with pytest.raises(ValueError, match="sliding_window"):
        chain_bench.bench({**config, "model": {**config["model"], "sliding_window": 128}}, {"name": "a"})


def test_too_little_memory_is_blocked_with_the_estimate(monkeypatch, tmp_path):
    whole = bench(model="qwen3-8b", workload="ws1-chain", judgments=["gradient_invariance"])
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(total_memory=40 << 30)
    )
    monkeypatch.setattr(
        chain_harness.observe, "environment", lambda device: {"device": "cuda:0", "tf32": False, "autocast": False}
    )
    on = dataclasses.replace(whole, device=torch.device("cuda", 0), implementation="torch")
    found = run(on, tmp_path)
    assert found["run"]["blocked"] == "the run is estimated to need 78 GiB of GPU memory, and here are 40 GiB"
    assert not found["phases"]


def test_too_little_memory_of_the_machine_is_blocked_too(monkeypatch, tmp_path):
    sizes = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 6 << 18}
    monkeypatch.setattr(chain_session.os, "sysconf", sizes.get)
    for judgment, need in (("gradient_invariance", 78), ("forward_invariance", 17)):
        found = run(bench(model="qwen3-8b", workload="ws1-chain", judgments=[judgment]), tmp_path)
        assert found["run"]["blocked"] == f"the run is estimated to need {need} GiB of memory, and here are 6 GiB"


@pytest.mark.parametrize(
    ("implementation", "model"),
    [("triton", "small"), ({"router": "triton"}, "tiny-moe"), ({"silu": "triton"}, "small")],
)
def test_kernels_without_their_device_are_blocked(tmp_path, implementation, model):
    asked = {"model": model, "profile": "hf" if "silu" in implementation else "ws1"}
    found = run(bench({"implementation": implementation}, **asked), tmp_path)
    assert "triton kernels need a CUDA device" in found["run"]["blocked"]
    arms = [{"name": "a", "implementation": implementation}]
    made = judged(found, arms=arms, judgments=FEW, cells=["BN/packed"], **asked)
    assert {one.status for one in made.values()} == {"BLOCKED"}


def test_an_operator_that_raises_ends_its_part_alone(tmp_path):
    on = bench({"implementation": {"embedding": "rlspec.device.reference:embedding", "swiglu": f"{__name__}:broken"}})
    found = run(on, tmp_path)
    errors = {phase["name"]: phase["error"] for phase in found["phases"]}
    assert "no gate today" in errors["training"]["message"] and "(at BN/full)" in errors["training"]["message"]
    assert errors["weights"] is None and "no gate today" in errors["inference"]["message"]


def broken(gate, up):
    raise ValueError("no gate today")


def forward_alone(operator):
    def run(*arguments, **options):
        with torch.no_grad():
            return operator(*arguments, **options)

    return run


FORWARDS = {name: forward_alone(getattr(Operators("canonical"), name))
            for name in chains.operators(read(catalog.model("small", CONTROLS)), "ws1")}  # fmt: skip


def test_kernels_without_a_backward_are_judged_where_nothing_asks_for_gradients(tmp_path):
    arm = {"name": "a", "implementation": f"{__name__}:FORWARDS"}
    asked = {"judgments": ["forward_accuracy", "forward_invariance", *chains.STATEFUL], "cells": ["BN/packed"]}
    for judgments in (asked["judgments"], ["decode_prefill"]):
        made = judged(run(bench(arm, **{**asked, "judgments": judgments}), tmp_path), arms=[arm],
                      **{**asked, "judgments": judgments})  # fmt: skip
        assert {one.status for one in made.values()} == {"PASS"} and {name for name, _ in made} == set(judgments)
        assert all("what ran was seen in forwards alone" in one.notes[0] for one in made.values())
    asked["judgments"] = ["gradient_invariance"]
    made = judged(run(bench(arm, **asked), tmp_path), arms=[arm], **asked)
    assert {(one.status, one.evidence["category"]) for one in made.values()} == {("FAIL", "red_no_backward")}


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        return 2 * dy


def doubled(gate, up):
    """The gate's gradient is wrong in a call of one token."""
    alone = gate.shape[:2] == (1, 1)
    return reference.swiglu(_Doubled.apply(gate) if alone else gate, up)


def test_a_backward_that_is_wrong_for_a_single_token_is_found(tmp_path):
    arm = {"name": "a", "implementation": {**dict.fromkeys(FORWARDS, "canonical"), "swiglu": f"{__name__}:doubled"}}
    asked = {"judgments": ["gradient_invariance"], "cells": ["B1/chunked", "B1/tokens"]}
    made = judged(run(bench(arm, **asked), tmp_path), arms=[arm], **asked)
    assert {name: one.status for (_, name), one in made.items()} == {"B1/chunked": "PASS", "B1/tokens": "FAIL"}
    assert "layer 1, mlp.act (swiglu)" in made["gradient_invariance", "B1/tokens"].reason


def otherwise_in_short_calls(gate, up):
    made = reference.swiglu(gate, up)
    return made if torch.is_grad_enabled() or gate.shape[1] > 3 else made * (1 + 2**-6)


def test_prefixes_that_leave_the_prefill_of_the_whole_say_where(tmp_path):
    given = {**dict.fromkeys(FORWARDS, "canonical"), "swiglu": f"{__name__}:otherwise_in_short_calls"}
    arm, asked = {"name": "a", "implementation": given}, {"judgments": ["decode_prefill"], "cells": ["BN/packed"]}
    made = judged(run(bench(arm, **asked), tmp_path), arms=[arm], **asked)
    assert {one.status for one in made.values()} == {"FAIL"}
    assert {"b1/prefixes", "bn-left/prefixes"} < {name for _, name in made}
    assert all("they part at layer 0, mlp.act (swiglu), sample " in one.reason for one in made.values())


def gated_otherwise(gate, up):
    """GELU for SiLU, where nothing is trained."""
    if torch.is_grad_enabled():
        return reference.swiglu(gate, up)
    return (torch.nn.functional.gelu(gate.float()) * up.float()).to(gate.dtype)


def rounded_otherwise(gate, up):
    """One more rounding, where nothing is trained."""
    if torch.is_grad_enabled():
        return reference.swiglu(gate, up)
    return torch.nn.functional.silu(gate.float()).to(gate.dtype) * up


@pytest.mark.parametrize(("swiglu", "status"), [("gated_otherwise", "INVESTIGATE"), ("rounded_otherwise", "PASS")])
def test_inference_that_computes_another_function_is_no_pass_where_log_probs_hide_it(tmp_path, swiglu, status):
    """The absolute limits of parity pass it: log-probs of small seeded weights hardly change. Rounding alone passes."""
    arm = {"name": "a", "implementation": {**dict.fromkeys(FORWARDS, "canonical"), "swiglu": f"{__name__}:{swiglu}"}}
    asked = {"judgments": ["forward_accuracy", "train_inference_parity"], "cells": ["BN/packed"]}
    found = run(bench(arm, **asked), tmp_path)
    made = judged(found, "ws1", arms=[arm], **asked)
    parity = [one for (name, _), one in made.items() if name == "train_inference_parity"]
    assert {one.status for one in parity} == {status} and any(trace.get("apart") for trace in found["traces"])
    assert made["forward_accuracy", "BN/full"].status == "PASS"
    if status != "PASS":
        assert all("layer 0, mlp.act (swiglu)" in one.reason for one in parity)


def test_an_unknown_fault():
    with pytest.raises(ValueError, match="unknown fault 'x'; known: stale_cache"):
        chain_faults.lives("x")


def test_a_mapping_of_implementations_runs_operator_by_operator(tmp_path):
    on = bench({"implementation": dict.fromkeys(("det_gemm", "attention", "lm_head"), "canonical")})
    found = run(on, tmp_path)
    seen = {line["operator"]: line["implementation"] for line in found["operators"]}
    assert seen["det_gemm"] == "canonical" and seen["rms_norm"] == "torch"


def test_seeded_weights_of_another_seed_are_other_weights(tmp_path):
    runs = [run(bench(weights={"source": "seeded", "seed": seed}), tmp_path) for seed in (1, 2)]
    assert runs[0]["weights"]["digest"] != runs[1]["weights"]["digest"]
    assert runs[0]["logprobs"][0]["digest"] != runs[1]["logprobs"][0]["digest"]


@gpu
def test_triton_kernels_keep_every_bit_of_a_small_chain(tmp_path):
    on = dataclasses.replace(
        bench(
            {"implementation": "triton"}, model="tiny-dense", workload="tiny-chain", cells=["BN/packed", "BN/chunked"]
        ),
        device=torch.device("cuda", 0),
    )
    found = run(on, tmp_path)
    assert not [phase["error"] for phase in found["phases"] if phase["error"]]
    assert all(line["differing"] == 0 for line in found["comparisons"])


def test_without_room_for_other_gradients_digests_tell_cells_apart(tmp_path, monkeypatch):
    """What fits nowhere is run again: errors of a cell that differs, which its digest alone shows."""
    monkeypatch.setattr(chain_training.Cells, "_resident", property(lambda self: False))
    judgments = ["gradient_accuracy", "gradient_invariance"]
    asked = {"judgments": judgments, "cells": ["B1/full", "BN/packed"]}
    right = judged(run(bench(**asked), tmp_path), **asked)
    assert {one.status for one in right.values()} == {"PASS"}
    arm = {"name": "a", "implementation": "canonical", "fault": "local_mean"}
    wrong = judged(run(bench(arm, **asked), tmp_path), **asked, arms=[arm])
    assert {name for name, one in wrong.items() if one.status == "FAIL"} == {("gradient_invariance", "B1/full")}
    assert "its digest differs" in wrong["gradient_invariance", "B1/full"].reason


def test_a_harness_that_runs_another_thing_than_it_says_is_no_pass(tmp_path, monkeypatch):
    """One cache for both kinds, and no chunks: all numbers agree, and nothing of either was judged."""
    cache, train = Engine.cache, chain_model.TrainingPass.run
    monkeypatch.setattr(Engine, "cache", lambda self, kind, samples: cache(self, "contiguous", samples))
    monkeypatch.setattr(
        chain_model.TrainingPass, "run", lambda self, layout, *, chunk_size, **kept: train(self, layout, **kept)
    )
    asked = {"judgments": ["forward_invariance", *chains.STATEFUL], "cells": ["BN/chunked"]}
    found = run(bench(**asked), tmp_path)
    assert all(line["differing"] == 0 for line in found["comparisons"] if "differing" in line)
    made = judged(found, **asked)
    wrong = {name: one.reason for name, one in made.items() if one.status != "PASS"}
    assert {one.evidence["category"] for one in made.values() if one.status != "PASS"} == {"broken"}
    assert set(wrong) == {("forward_invariance", "BN/chunked"), ("train_inference_parity", "B1/paged")} | {
        (judgment, f"{case}/paged") for case in ("b1", "bn-left") for judgment in ("decode_prefill", "kv_cache")
    } | {("kv_cache", "chunked/paged")}  # fmt: skip
    assert "BN/chunked: its decoder was not called as" in wrong["forward_invariance", "BN/chunked"]
    assert "given a cache of blocks of 9 positions, and paged is due" in wrong["decode_prefill", "b1/paged"]


def test_a_mixture_of_experts_keeps_its_bits(tmp_path):
    asked = {"judgments": ["gradient_invariance", "train_inference_parity"], "cells": ["BN/chunked", "BN/packed"]}
    found = run(bench(model="tiny-moe", **asked), tmp_path)
    assert {one["operator"] for one in found["operators"]} >= {"router", "grouped_gemm", "combine"}
    made = judged(found, model="tiny-moe", **asked)
    assert {one.status for one in made.values()} == {"PASS"}


@pytest.mark.parametrize(
    ("judgment", "run_of"), [("forward_accuracy", "the reference in fp32"), ("forward_invariance", "BN/full")]
)
def test_weights_that_are_no_numbers_are_blamed_on_the_first_operator_that_shows_them(
    tmp_path, monkeypatch, judgment, run_of
):
    load = chain_harness._load

    def spoilt(session):
        load(session)
        with torch.no_grad():
            dict(session.decoder.named_parameters())["model.layers.1.self_attn.q_proj.weight"][0, 0] = float("nan")

    monkeypatch.setattr(chain_harness, "_load", spoilt)
    found = run(bench(judgments=[judgment]), tmp_path)
    error = next(phase["error"] for phase in found["phases"] if phase["name"] == "training")
    place = "layer 1, self_attn.q_proj (det_gemm), sample c0 position 0"
    assert f"{run_of}: a result is not finite, first that of {place}" in error["message"]


EXPERTS = {"judgments": ["forward_accuracy", "gradient_accuracy"], "cells": ["BN/packed"], "model": "tiny-moe",
           "workload": "tiny-chain", "weights": {"source": "seeded", "seed": 1}}  # fmt: skip


def routed(folder, **arm):
    found = run(bench({"name": "a", **arm}, **EXPERTS), folder)
    return found["depth"]["routes"], judged(
        found, arms=[{"name": "a", "implementation": "canonical", **arm}], **EXPERTS
    )


def test_two_experts_that_are_nearly_equal_change_places_and_that_is_no_error(tmp_path):
    """Against fp32 with experts of its own this run errs 18 times as much as plain torch."""
    routes, made = routed(tmp_path)
    assert (routes["choices"], routes["tokens"], routes["of"], routes["wrong"]) == (1, 1, 31, 0)
    assert {one.status for one in made.values()} == {"PASS"}
    assert made["gradient_accuracy", "BN/full"].evidence["largest_ratio_to_torch"] < 2
    (note,) = made["forward_accuracy", "BN/full"].notes
    assert "1 of 31 tokens took other experts than fp32 would have, where its scores are 3.7e-05 apart" in note


def next_best(x, weight, *, top_k, choice=None, **options):
    """The best expert is left out; scores and weights are those of the experts that are taken."""
    wide = reference.router(x, weight, top_k=top_k + 1, **options).experts[:, 1:]
    return reference.router(x, weight, top_k=top_k, choice=wide, **options)


def rolled(x, weight, **options):
    """Each expert has the score of its neighbour."""
    return reference.router(x, weight.roll(1, 0), **options)


@pytest.mark.parametrize(
    ("router", "reason"),
    [
        ("next_best", "choices of experts are not those of the arm's own scores"),
        ("rolled", "and the router's scores err"),
    ],
)
def test_a_router_that_chooses_wrong_is_not_hidden_by_its_own_experts(tmp_path, router, reason):
    _, made = routed(tmp_path, implementation={"router": f"{__name__}:{router}"})
    for verdict in made.values():
        assert verdict.status == "FAIL" and reason in verdict.reason, verdict


def nudged(x, weight, **options):
    """The scores of a router in fp32 that is off by the rounding of a format half as wide."""
    return reference.router(x, weight + 2.0**-10 * weight.roll(1, 0), **options)


def test_near_ties_of_fp32_are_those_of_its_own_rounding(tmp_path):
    """An allowance of bf16 would take other experts, and scores off a thousandfold, for equal ones."""
    arm = {"name": "a", "implementation": {"router": f"{__name__}:nudged"}}
    found = run(bench(arm, dtype="fp32", **EXPERTS), tmp_path)
    assert found["depth"]["routes"]["choices"] and not found["depth"]["routes"]["wrong"]
    for verdict in judged(found, arms=[arm], dtype="fp32", **EXPERTS).values():
        assert verdict.status == "FAIL" and "the router's scores err by more than the row allows" in verdict.reason
    found["depth"]["routes"]["choices"] = 0  # as if no token had moved: then the log-probs' own error is blamed on it
    verdict = judged(found, arms=[arm], dtype="fp32", **EXPERTS)["forward_accuracy", "BN/full"]
    assert "errs by more than the row allows is that of layer 0, mlp.gate (router)" in verdict.reason


@pytest.mark.parametrize("status", ["PASS", "FAIL"])
def test_experts_of_pinned_weights_are_gated_by_the_row_of_a_whole_model(tmp_path, status):
    """The absolute row that judges the log-probs says nothing of scores."""
    given = saved(tmp_path, seed=1, **catalog.model("tiny-moe", CONTROLS))
    (tmp_path / "pins.yaml").write_text(json.dumps(given["pins"]))
    arm = {"name": "a", "implementation": "canonical" if status == "PASS" else {"router": f"{__name__}:rolled"}}
    asked = {**EXPERTS, "weights": {**given, "pins": str(tmp_path / "pins.yaml")}, "arms": [arm], "contract": "ws1"}
    config = chain.context(chain.parse(spec(**asked)), contract.load("ws1", CONTROLS))
    found = run(chain_bench.bench(config, arm), tmp_path)
    assert found["weights"]["pinned"] and found["depth"]["routes"]["choices"]
    del asked["contract"]
    for verdict in judged(found, "ws1", **asked).values():
        assert verdict.row.subject != "chain" and verdict.status == status, verdict
        assert status == "PASS" or "the router's scores err by more than the row allows" in verdict.reason
    if status == "PASS":
        _zeros_are_outside(found, asked)


def _zeros_are_outside(found, asked):
    """The published limits of gradients are above the gradients of a small model: beside plain torch zeros fail."""
    place, rows = ("gradient_accuracy", "BN/full"), contract.load("ws1", CONTROLS)
    strict = dataclasses.replace(rows, cannot_fail="error")
    loose = "the row would also pass zeros in"
    assert not any(loose in one for one in judged(found, rows, **asked)[place].notes)
    assert judged(found, strict, **asked)[place].status == "PASS"
    unjudged = [{**contract.plain(row), **({"status": "measured"} if row.subject == "chain" else {})}
                for row in rows.rows]  # fmt: skip
    alone = contract.from_rows("ws1", unjudged)
    assert any(loose in one for one in judged(found, alone, **asked)[place].notes)
    verdict = judged(found, contract.from_rows("ws1", unjudged, "error"), **asked)[place]
    assert (verdict.status, verdict.evidence["category"]) == ("ERROR", "cannot_fail") and loose in verdict.reason
    zeros = line(found, *place, "model.layers.0.self_attn.q_norm.weight")
    zeros |= {key: float(zeros[key]) / float(zeros[over]) for key, over in
              (("rms", "relative_rms"), ("max_abs", "relative_peak"))}  # fmt: skip
    assert judged(found, alone, **asked)[place].status == "PASS"
    verdict = judged(found, rows, **asked)[place]
    assert verdict.status == "FAIL" and "q_norm.weight: RMS error" in verdict.reason
    assert "plain torch allows" in verdict.reason and "(ratio 3)" in verdict.reason
