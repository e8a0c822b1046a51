"""Every negative control comes out as it must, and the quickstart and the spec on two ranks pass: all of it is run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import suites

ROOT = Path(__file__).parents[1]
SPECS = ROOT / "specs"
# Those of operators, of whole models and of engines have tests of their own.
KNOWN = sorted(p for p in (SPECS / "controls").rglob("*.yaml") if not {"operators", "chain", "engines"} & set(p.parts))
# tests/device/test_mesh.py and test_trainer.py train on several ranks and plant these faults, in fewer processes.
SLOW_CONTROLS = (
    "gradient-norm-of-one-stage",
    "local-token-count-cp2",
    "gradients-not-averaged",
    "positions-not-offset",
)
SLOW = [SPECS / "correctness" / f"tiny-{name}.yaml" for name in ("dense-pp2", "dense-cp2", "moe-ep2", "moe-pp2-ep2")]
SLOW += [path for path in KNOWN if path.stem in SLOW_CONTROLS]
CONTROLS = [path for path in KNOWN if path not in SLOW]
PASSING = [SPECS / "quickstart.yaml", SPECS / "correctness" / "tiny-moe-dp2.yaml"]
FIRST = SPECS / "controls" / "training" / "rope-base.yaml"
# With the settings of the first, so with its run files: what arms of role base were there need not be trained again.
NAMES = ("data-order", "decay-on-norms", "dropped-micro-batch", "learning-rate", "load-balance-twice",
         "mean-of-means", "nan-at-step-7", "truncated")  # fmt: skip
LIKE = [FIRST.with_name(f"{name}.yaml") for name in NAMES]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Of each control, and of each spec that passes."""
    top = tmp_path_factory.mktemp("controls")
    made = suites.together(top, {"whole": [spec for spec in CONTROLS if spec not in LIKE], "passing": PASSING})
    first, parts = made[FIRST], {"half": LIKE[::2], "other half": LIKE[1::2]}
    assert first.path is not None, first.done.stderr
    return made | suites.together(top, parts, "--from", str(first.path.parent))


def name(spec):
    return spec.relative_to(SPECS).with_suffix("").as_posix()


@pytest.mark.parametrize("spec", CONTROLS, ids=name)
def test_control(outcomes, spec):
    done, made, _ = outcomes[spec]
    assert done.returncode == 0 and made["expect"]["met"], done.stdout + done.stderr
    assert made["outcome"] in ("FAIL", "ERROR") and "Traceback" not in done.stderr
    statuses = [arm["status"] for arm in made["arms"]]  # a control that crashes proves nothing
    assert statuses == (["reused", "reused", "done"] if spec in LIKE else ["done"] * len(statuses))


@pytest.mark.parametrize("spec", PASSING, ids=name)
def test_passing(outcomes, spec):
    done, made, _ = outcomes[spec]
    assert done.returncode == 0 and made["outcome"] == "PASS", done.stdout + done.stderr
    assert {verdict["evidence"]["floor"] for verdict in made["verdicts"]} == {"perturbed"}


@pytest.mark.slow
@pytest.mark.parametrize("spec", SLOW, ids=name)
def test_meshes(spec, tmp_path):
    done, made, _ = suites.run(tmp_path, [spec])[spec]
    assert done.returncode == 0, done.stdout + done.stderr
    assert made["outcome"] == ("FAIL" if spec in KNOWN else "PASS")


def test_there_are_enough_controls_and_each_says_what_it_must_come_out_as():
    assert len(list((SPECS / "controls" / "training").glob("*.yaml"))) >= 10
    assert all("\nexpect:" in spec.read_text(encoding="utf-8") for spec in KNOWN)
