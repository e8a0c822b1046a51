"""Each fault planted into a chain is caught by the judgment meant for it, at its layer and operator.

All of it runs through the command line, as do the reports that are judged again.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from rlspec.chains import JUDGMENTS
from tests import suites

ROOT = Path(__file__).parents[1]
CONTROLS = sorted((ROOT / "specs" / "controls" / "chain").glob("*.yaml"))
RIGHT = ROOT / "specs" / "chain" / "tiny-cpu.yaml"
# Fault -> the judgments that must be red, and where runs part: no other judgment may be anything but PASS.
ACCURACY, INVARIANCE = ["forward_accuracy", "gradient_accuracy"], ["forward_invariance", "gradient_invariance"]
PARITY, DECODE, CACHE = "train_inference_parity", "decode_prefill", "kv_cache"
RED = {
    "stale-cache": ([PARITY, DECODE, CACHE], {(0, "attention")}),
    "left-positions": (INVARIANCE, {(0, "rope")}),
    "no-boundaries": ([*INVARIANCE, *ACCURACY], {(0, "attention")}),
    "shifted-mask": ([*ACCURACY, PARITY], {(None, "loss"), (None, "lm_head")}),
    "counted-pads": ([DECODE, CACHE], {(0, "rope")}),
    "head-in-working-dtype": ([PARITY], {(None, "lm_head")}),
    "other-eps": (ACCURACY, {(1, "rms_norm")}),
    "other-eps-in-training": ([*ACCURACY, PARITY], {(1, "rms_norm")}),
    "forgotten-edge": (INVARIANCE, {(0, "attention")}),
    "forgotten-key": ([PARITY, DECODE, CACHE], {(0, "attention")}),
    "dropped-gradient": (["gradient_accuracy"], {(1, "qk_norm")}),
    "local-mean": (["gradient_invariance"], {(None, "loss")}),
    "per-chunk-backward": (["gradient_invariance"], {(1, "attention")}),
    "temperature": ([PARITY], {(None, "logprob")}),
}


ALONE = "no-boundaries"  # what its run prints is looked at


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Of each spec."""
    top = tmp_path_factory.mktemp("chains")
    alone, others = ([spec for spec in CONTROLS if (spec.stem == ALONE) is one] for one in (True, False))
    parts = {"alone": alone, "first": [RIGHT, *others[:5]], "second": others[5:]}
    return {spec.stem: found for spec, found in suites.together(top, parts).items()} | {"top": top}


def test_every_fault_has_its_control():
    schema = json.loads((ROOT / "schemas/chain.schema.json").read_text())
    faults = set(schema["properties"]["arms"]["items"]["properties"]["fault"]["enum"])
    planted = {yaml.safe_load(path.read_text())["arms"][0]["fault"] for path in CONTROLS}
    assert {path.stem for path in CONTROLS} == set(RED) and faults == planted
    assert {path.stem.replace("-", "_") for path in CONTROLS} == faults


def test_the_right_model_passes_every_judgment(outcomes):
    done, made, _ = outcomes["tiny-cpu"]
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stdout + done.stderr
    assert {one["status"] for one in made["verdicts"]} == {"PASS"}
    assert {one["judgment"] for one in made["verdicts"]} == set(JUDGMENTS)
    compared = [one for one in made["measured"]["canonical"]["comparisons"] if one["judgment"] == "gradient_invariance"]
    assert len(compared) == 9 * 47  # 2 + 4 layers × 11 + 1 tensors


@pytest.mark.parametrize("spec", CONTROLS, ids=lambda spec: spec.stem)
def test_control(outcomes, spec):
    done, made, _ = outcomes[spec.stem]
    assert done.returncode == 0 and made["expect"]["met"], done.stdout + done.stderr
    assert {arm["status"] for arm in made["arms"]} == {"done"}  # a control that crashes proves nothing


@pytest.mark.parametrize("spec", CONTROLS, ids=lambda spec: spec.stem)
def test_it_is_caught_by_the_judgment_meant_for_it_and_by_no_other(outcomes, spec):
    red, at = RED[spec.stem]
    _, made, _ = outcomes[spec.stem]
    wrong = {one["judgment"] for one in made["verdicts"] if one["status"] != "PASS"}
    assert wrong == set(red)
    failing = [one for one in made["verdicts"] if one["status"] == "FAIL"]
    assert {one["evidence"]["category"] for one in failing} == {"red_verdict"}
    named = [one["evidence"].get("first_divergence") for one in failing]
    places = {(one["layer"], one["operator"]) for one in named if one}
    assert places == at


@pytest.mark.parametrize("spec", CONTROLS, ids=lambda spec: spec.stem)
def test_a_control_says_what_becomes_of_every_judgment(spec):
    assert set(yaml.safe_load(spec.read_text())["expect"]["judgments"]) == set(JUDGMENTS)


def test_no_arm_waits_for_the_compiler_of_torch(outcomes):
    imported = outcomes["tiny-cpu"].made["arms"][0]["provenance"]["imported"]
    assert "torch" in imported and "sympy" not in imported


# Reports judged again


def test_a_portable_report_gives_the_same_verdicts_anywhere(outcomes):
    folder = outcomes["top"] / "again"
    _, before, source = outcomes["no-boundaries"]
    assert suites.rlspec(folder, "report", source, "--portable", "-o", "portable.json.gz").returncode == 0
    done = suites.rlspec(folder, "judge", "portable.json.gz", "-o", "again.json")
    again = json.loads((folder / "again.json").read_text())
    assert done.returncode == 0 and again["expect"]["met"], done.stdout + done.stderr
    keys = ("judgment", "subject", "status", "reason", "statistic")
    assert [[one[key] for key in keys] for one in again["verdicts"]] == [
        [one[key] for key in keys] for one in before["verdicts"]
    ]
    assert not [note for note in again["notes"] if "verdicts are not those" in note]


def test_a_run_is_judged_again_from_its_records(outcomes):
    folder = outcomes["top"] / "first"
    done = suites.rlspec(folder, "judge", folder / "workspace/validate-chain/tiny-dense/latest")
    assert done.returncode == 0, done.stdout + done.stderr


def edited(outcomes, change, reseal):
    from rlspec import measurements

    folder = outcomes["top"] / "edited"
    folder.mkdir(exist_ok=True)
    made = json.loads(json.dumps(outcomes["tiny-cpu"][1]))
    change(made["measured"]["canonical"])
    made["run"] = None
    if reseal:
        made["seal"] = measurements.seal({k: v for k, v in made.items() if k != "nonfinite"})
    (folder / "e.json").write_text(json.dumps(made))
    done = suites.rlspec(folder, "judge", "e.json", "-o", "out.json")
    out = folder / "out.json"
    found = json.loads(out.read_text()) if out.exists() else None
    out.unlink(missing_ok=True)
    return done, found


def test_an_edit_breaks_the_seal(outcomes):
    done, _ = edited(outcomes, lambda arm: arm["comparisons"].pop(), reseal=False)
    assert done.returncode == 4 and "has been edited" in done.stderr


@pytest.mark.parametrize("what", ["comparisons", "logprobs", "cells", "operators"])
def test_missing_rows_are_refused_even_under_a_new_seal(outcomes, what):
    done, made = edited(outcomes, lambda arm: arm[what].pop(), reseal=True)
    assert done.returncode == 4, done.stdout
    assert "ERROR" in {one["status"] for one in made["verdicts"]}


def test_what_a_person_sees(outcomes):
    done, *_ = outcomes["no-boundaries"]
    lines = done.stdout.splitlines()
    assert any(line.startswith("forward_invariance") and "FAIL" in line and "1 of 7" in line for line in lines)
    whole = " ".join(done.stdout.split())
    assert "they part at layer 0, self_attn (attention), sample c1 position 0" in whole
    assert "drift of the residual stream by layer" in whole and "weights are seeded (3)" in whole


def test_markdown_names_the_place_too(outcomes):
    folder = outcomes["top"] / "alone"
    assert suites.rlspec(folder, "report", outcomes["no-boundaries"][2], "-o", "r.md").returncode == 0
    text = (folder / "r.md").read_text()
    assert "layer 0, self&#95;attn (attention)" in text or "layer 0, self_attn (attention)" in text
