from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import replace

import pytest

from rlspec import joining
from rlspec.model import Arm, Run, Series


def run(arm: str, steps: Sequence[int], total: int | None = None, **more: object) -> Run:
    values = array("d", map(float, steps))
    one = Series(arm=arm, metric="loss", steps=array("q", steps), values=values)
    return Run(arm=Arm(name=arm, role="base"), series={"loss": one}, steps_expected=total, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        ({"SEED": "1"}, {"SEED": "2"}, {"SEED": "1 in base0, 2 in base1"}),
        ({}, {"DATA_SEED": "2"}, {"DATA_SEED": "nothing in base0, 2 in base1"}),
        ({"ARGS": "--seed 1 -v"}, {"ARGS": "--seed 2 -v"}, {"ARGS": "--seed 1 -v in base0, --seed 2 -v in base1"}),
        ({"SEED": "1", "OMP_NUM_THREADS": "1"}, {"SEED": "1", "OMP_NUM_THREADS": "2"}, {}),
    ],
)
def test_seeds_that_differ(one: dict[str, str], other: dict[str, str], said: dict[str, str]) -> None:
    assert joining.seeds({"base0": one, "base1": other}) == said


@pytest.mark.parametrize(
    ("steps", "total"),
    [
        (range(1, 33), 32), (range(1, 33), None), (range(0, 32), 32), (range(0, 33), 32), (range(5, 33), 32),
        (range(10, 41, 10), 40), (range(10, 41, 10), 45), ([1, 10, 20, 30], 32), ([1, 10, 20, 30, 32], 32),
        (range(1, 40, 10), 40), ([1], 1), ([10], 12),
    ],
)  # fmt: skip
def test_whole_step_sets(steps: Sequence[int], total: int | None) -> None:
    assert joining.findings("loss", [run("base0", steps, total), run("feat0", steps, total)]) == []


@pytest.mark.parametrize(
    ("steps", "total", "said"),
    [
        (range(1, 32), 32, "every run is missing step 32 of loss (expected T = 32, it ends at step 31)"),
        ([*range(1, 17), *range(18, 33)], 32, "every run is missing step 17 of loss (expected T = 32)"),
        ([*range(1, 17), *range(18, 33)], None, "every run is missing step 17 of loss (the runs reach step 32)"),
        (range(1, 35), 32, "every run has steps 33, 34 of loss beyond the expected T = 32"),
        (range(10, 31, 10), 40, "every run is missing step 40"),
        (range(0, 31), 32, "every run is missing step 31"),
        ([10, 20, 40, 50, 60], None, "every run is missing step 30"),
        ([10, 20, 30, 35, 40, 50, 60], None, "steps 30 and 35 are 5 apart, the others 10"),
        (range(1, 10), 10**15, "steps 10, 11, 12, 13, 14, … of loss (expected T = 1000000000000000, it ends"),
        ([*range(1, 10), 10**15], None, "steps 10, 11, 12, 13, 14, …"),
    ],
)
def test_holes_that_all_runs_share(steps: Sequence[int], total: int | None, said: str) -> None:
    (found,) = joining.findings("loss", [run("base0", steps, total), run("feat0", steps, total)])
    assert said in found


def test_the_run_that_lacks_a_step_is_named() -> None:
    whole = run("base0", range(1, 33))
    (found,) = joining.findings("loss", [whole, run("feat0", range(1, 31))])
    assert found == "feat0 is missing steps 31, 32 of loss (the runs reach step 32, it ends at step 30)"
    (found,) = joining.findings("loss", [whole, run("feat0", range(2, 33))])
    assert found.startswith("feat0 is missing step 1 of loss")
    (found,) = joining.findings("loss", [run("base0", range(1, 33), 32), run("feat0", range(1, 34), 32)])
    assert found == "feat0 has step 33 of loss beyond the expected T = 32"
    (found,) = joining.findings("loss", [run("base0", range(1, 33), 32), run("feat0", range(1, 65), 64)])
    assert found == "the runs expect different numbers of steps: base0 32, feat0 64; give all the same"


def test_faults_and_absence_come_before_steps() -> None:
    whole = run("base0", range(1, 5))
    broken = run("feat0", [], faults={"loss": "step 3 is there twice"})
    assert joining.findings("loss", [whole, broken]) == ["feat0: step 3 is there twice"]
    assert joining.findings("loss", [whole, run("feat0", [1], faults={"*": "feat0 has no line"})]) == [
        "feat0 has no line"
    ]
    assert joining.findings("loss", [whole, run("feat0", [])]) == ["loss is missing in feat0, though printed by base0"]
    assert joining.findings("lr", [whole]) == ["no run prints lr; they print loss"]
    assert joining.findings("loss", [whole, whole]) == ["several runs are called base0: give each its own name"]


def test_machine_differences_ignore_what_only_one_run_knows() -> None:
    a = run("a", [1], machine={"torch": "2.5", "gpu": "H200"})
    b = run("b", [1], machine={"torch": "2.6", "gpu": "H200", "image": "x"})
    assert joining.machine_differences([a, b, run("c", [1])]) == {"torch": {"a": "2.5", "b": "2.6"}}


def test_the_first_value_that_is_not_finite_is_named() -> None:
    series = Series(arm="feat0", metric="loss", steps=array("q", [1, 2]), values=array("d", [1.5, math.nan]))
    broken = Run(arm=Arm(name="feat0", role="feature"), series={"loss": series})
    assert joining.non_finite("loss", broken) == ["feat0: loss is nan at step 2, not a finite number"]
    assert joining.non_finite("lr", broken) == joining.non_finite("loss", run("base0", [1, 2])) == []


@pytest.mark.parametrize(
    ("values", "groups"),
    [
        ({"SEED": ("1", "2"), "OUT": ("seed1", "seed2")}, 1),
        ({"TORCH_RNG": ("1", "2"), "RUN_NAME": ("a", "b"), "LOG_DIR": ("runs/a", "runs/b")}, 1),
        ({"rng_state": ("1", "2"), "METRICS": ("/tmp/a/m.jsonl", "/tmp/b/m.jsonl")}, 1),
        ({"SEED": ("1", "2"), "FUSED": ("1", "0")}, 2),
        ({"SEED": ("1", "2"), "DATA_DIR": ("/tmp/a", "/tmp/b")}, 2),
        ({"PYTHONPATH": ("/tmp/a", "/tmp/b")}, 2),
        ({"INIT_FROM": ("/tmp/a.pt", "/tmp/b.pt")}, 2),
        ({"FAN_OUT": ("3", "4")}, 2),
        ({"DROPOUT": ("half", "none")}, 2),
        ({"OUTPUT_DTYPE": ("bf16", "fp32")}, 2),
        ({"LOG_PROBS": ("true", "false")}, 2),
        ({"TEACHER": ("qwen/small", "qwen/large")}, 2),
        ({"STRING": ("a", "b")}, 2),
    ],
)
def test_runs_of_one_sample_differ_in_seeds_and_in_places_to_write_to(
    values: dict[str, tuple[str, str]], groups: int
) -> None:
    arms = [{name: pair[at] for name, pair in values.items()} for at in (0, 1)]
    runs = [replace(run("feat0", [1]), arm=Arm(name="feat0", role="feature", environment=one)) for one in arms]
    assert len(joining.alike(runs)) == groups
