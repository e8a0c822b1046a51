"""Each broken operator is caught by the judgment meant for it, and right ones pass: all of them run through the CLI."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import yaml

from rlspec.cells import CATEGORIES
from rlspec.nodes import JUDGMENTS
from tests import suites

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "specs" / "controls" / "operators"
CONTROLS = sorted(FOLDER.glob("*.yaml"))
RIGHT = [ROOT / "specs" / "operators" / f"{name}.yaml" for name in ("cpu", "cpu-moe")]
# Fault -> the judgments that must be red, and the category. No other judgment may be anything but PASS.
RED = {
    "layout-sensitive-sum": (["forward_invariance"], "red_verdict"),
    "kernel-by-row-count": (["forward_invariance"], "red_verdict"),
    "split-k-by-rows": (["forward_invariance"], "red_verdict"),
    "ties-by-higher-expert": (["forward_accuracy"], "red_verdict"),
    "split-k-by-expert-load": (["forward_invariance"], "red_verdict"),
    "combine-in-arrival-order": (["forward_invariance"], "red_verdict"),
    "eps-outside-the-root": (["forward_accuracy", "gradient_accuracy"], "red_verdict"),
    "eps-of-its-own": (["forward_accuracy", "gradient_accuracy"], "red_verdict"),
    "rope-base": (["forward_accuracy", "gradient_accuracy"], "red_verdict"),
    "key-at-a-block-edge": (["forward_accuracy", "gradient_accuracy"], "red_verdict"),
    "head-of-a-group": (["forward_accuracy", "gradient_accuracy"], "red_verdict"),
    "first-upstream-value": (["gradient_accuracy", "gradient_invariance"], "red_verdict"),
    "first-batch-row": (["gradient_accuracy", "gradient_invariance"], "red_verdict"),
    "attention-backward-per-chunk": (["gradient_invariance"], "red_verdict"),
    "weight-gradient-in-call-order": (["gradient_invariance"], "red_verdict"),
    "fallback-in-all-calls": (JUDGMENTS, "red_provenance"),
    "fallback-in-some-calls": (JUDGMENTS, "red_provenance"),
    "fallback-in-the-backward": (JUDGMENTS, "red_provenance"),
    "fallback-behind-a-decoy": (JUDGMENTS, "red_provenance"),
    "stale-output": (["forward_accuracy", "forward_invariance"], "red_verdict"),
    "zero-gradient": (["gradient_accuracy"], "red_verdict"),
    "other-zero-without-gradients": (["forward_accuracy", "forward_invariance"], "red_without_gradients"),
    "zero-flip": (["forward_invariance"], "red_verdict"),
    "last-stride-ignored": (["forward_accuracy", "forward_invariance"], "red_verdict"),
    "strides-ignored": (["forward_accuracy", "forward_invariance"], "red_verdict"),
    "no-backward": (["gradient_accuracy", "gradient_invariance"], "red_no_backward"),
    "no-backward-for-keys": (["gradient_accuracy", "gradient_invariance"], "red_no_backward"),
    "wrong-dtype": (JUDGMENTS, "raised"),
    "writes-into-its-input": (JUDGMENTS, "raised"),
    "keeps-its-weight": (JUDGMENTS, "raised"),
    "gives-its-memory-again": (JUDGMENTS, "raised"),
    "autograd-unlike-its-backward": (JUDGMENTS, "raised"),
    "raises": (JUDGMENTS, "raised"),
    "cannot-fail": (["gradient_accuracy"], "cannot_fail"),
}
UNHARMED = "broken/swiglu/tiny"  # in the arm of `raises`
OF_RECORDS = {"missing", "broken", "process"}  # no operator's fault: tests/test_cells.py
# Control, module, the line with the fault, and what stands there without it.
CURED = [
    ("split-k-by-rows", "broken.py", "\nFEW = 8\n", "\nFEW = 0\n"),
    ("key-at-a-block-edge", "broken.py", "\nBLOCK = 16\n", "\nBLOCK = 64\n"),
    ("zero-gradient", "broken.py", "up), torch.zeros_like)", "up), torch.clone)"),
    ("fallback-in-some-calls", "fallback.py", "\nFEW = 8\n", "\nFEW = 0\n"),
]


def cured(top):
    """Copies of the controls, each with its fault taken out."""
    for name, module, fault, cure in CURED:
        folder = top / name
        shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("__pycache__"))
        text = (folder / module).read_text(encoding="utf-8")
        assert text.count(fault) == 1, name
        (folder / module).write_text(text.replace(fault, cure), encoding="utf-8")
        yield folder / f"{name}.yaml"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Of each spec, the right ones and the controls, those of `cured` as well."""
    top = tmp_path_factory.mktemp("operators")
    half = len(CONTROLS) // 2
    parts = {"first": CONTROLS[:half], "second": CONTROLS[half:], "right": RIGHT, "cured": list(cured(top))}
    return suites.together(top, parts) | {"top": top}


def test_every_fault_has_its_control():
    assert {spec.stem for spec in CONTROLS} == set(RED)


def test_every_judgment_and_every_category_has_its_fault():
    assert {one for red, category in RED.values() if category == "red_verdict" for one in red} == set(JUDGMENTS)
    red = {category for category, status in CATEGORIES.items() if status in ("FAIL", "ERROR")}
    assert {category for _, category in RED.values()} == red - OF_RECORDS


@pytest.mark.parametrize("spec", CONTROLS, ids=lambda spec: spec.stem)
def test_control(outcomes, spec):
    done, made, _ = outcomes[spec]
    assert done.returncode == 0 and made["expect"]["met"], done.stdout + done.stderr
    assert {arm["status"] for arm in made["arms"]} == {"done"}  # a control that crashes proves nothing
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("spec", CONTROLS, ids=lambda spec: spec.stem)
def test_it_is_caught_by_the_judgment_meant_for_it_and_by_no_other(outcomes, spec):
    red, category = RED[spec.stem]
    _, made, _ = outcomes[spec]
    broken = [one for one in made["verdicts"] if (spec.stem, one["subject"]) != ("raises", UNHARMED)]
    assert len(broken) == len(JUDGMENTS)
    for verdict in broken:
        due = (CATEGORIES[category], category) if verdict["judgment"] in red else ("PASS", "green")
        assert (verdict["status"], verdict["evidence"]["category"]) == due, verdict["reason"]


@pytest.mark.parametrize("spec", CONTROLS, ids=lambda spec: spec.stem)
def test_a_control_says_what_becomes_of_every_judgment(spec):
    told = yaml.safe_load(spec.read_text(encoding="utf-8"))["expect"]
    assert told["category"] == RED[spec.stem][1]
    due = {"broken/silu/tiny", UNHARMED} if spec.stem == "raises" else set(JUDGMENTS)
    assert set(told["judgments"]) == due


@pytest.mark.parametrize("name", [one[0] for one in CURED])
def test_a_control_without_its_fault_is_not_met(outcomes, name):
    done, made, _ = outcomes[outcomes["top"] / name / f"{name}.yaml"]
    assert done.returncode == 1 and not made["expect"]["met"], done.stdout + done.stderr
    assert {verdict["status"] for verdict in made["verdicts"]} == {"PASS"}, done.stdout


def test_an_operator_that_raises_leaves_the_others_of_its_arm_alone(outcomes):
    _, made, _ = outcomes[FOLDER / "raises.yaml"]
    assert {one["status"] for one in made["verdicts"] if one["subject"] == UNHARMED} == {"PASS"}
    told = next(one for one in made["verdicts"] if one["subject"] == "broken/silu/tiny")
    assert told["reason"].startswith("RuntimeError: planted (in BN/full")
    assert 'RuntimeError("planted")' in "".join(told["evidence"]["tail"])


def test_the_loose_contract_passes_what_the_strict_one_refuses_and_says_so(tmp_path):
    spec = FOLDER / "cannot-fail.yaml"
    done, made, _ = suites.run(tmp_path, [spec], "--set", "contract=ws1")[spec]
    assert done.returncode == 1 and made["outcome"] == "PASS", done.stdout + done.stderr  # the control expects ERROR
    (gradient,) = (one for one in made["verdicts"] if one["judgment"] == "gradient_accuracy")
    assert any(note.startswith("cannot_fail") for note in gradient["notes"])


@pytest.mark.parametrize("spec", RIGHT, ids=lambda spec: spec.stem)
def test_the_right_operators_pass(outcomes, spec):
    done, made, _ = outcomes[spec]
    assert done.returncode == 0 and made["outcome"] == "PASS", done.stdout + done.stderr
    assert {verdict["status"] for verdict in made["verdicts"]} <= {"PASS", "N/A"}


def test_an_operator_that_ends_its_process_is_an_error_that_says_how(tmp_path):
    spec = tmp_path / "spec.yaml"
    text = (ROOT / "specs" / "examples" / "own-operators" / "spec.yaml").read_text(encoding="utf-8")
    spec.write_text(text.replace("[silu, rms_norm]", "[silu]"), encoding="utf-8")
    (tmp_path / "my_kernels.py").write_text("import os\ntable = {'silu': lambda x: os.abort()}\n", encoding="utf-8")
    done, made, _ = suites.run(tmp_path / "own", [spec])[spec]
    assert done.returncode == 4 and "Traceback" not in done.stderr, done.stderr
    assert {(one["status"], one["reason"]) for one in made["verdicts"]} == {("ERROR", "arm mine: killed by SIGABRT")}


def test_the_example_of_own_operators_shows_one_green_and_one_red(tmp_path):
    spec = ROOT / "specs" / "examples" / "own-operators" / "spec.yaml"
    done, made, _ = suites.run(tmp_path / "own", [spec])[spec]
    assert done.returncode == 1, done.stdout + done.stderr
    statuses = {(one["evidence"]["operator"], one["judgment"]): one["status"] for one in made["verdicts"]}
    assert [name for name, status in statuses.items() if status != "PASS"] == [("rms_norm", "forward_invariance")]
    shown, printed = readme("$ rlspec run specs/examples/own-operators/spec.yaml\n"), done.stdout
    assert {re.sub(NUMBER, "#", line) for line in shown} <= {re.sub(NUMBER, "#", line) for line in printed.splitlines()}
    of = r"of (\d+) comparisons"
    assert re.findall(of, "\n".join(shown)) == re.findall(of, printed)


NUMBER = r"\d[\d,.]*"  # how many elements differ, and by how much, is this machine's


def readme(command):
    """The lines that README shows below a command."""
    _, _, rest = (ROOT / "README.md").read_text(encoding="utf-8").partition(command)
    return rest.partition("```")[0].splitlines()
