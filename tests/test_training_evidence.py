"""The reports in specs/correctness/evidence derive their verdicts again from the records beside them."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from rlspec import contract, drift
from rlspec.model import Judgment
from rlspec.reports import digest, unedited
from tests.bench import bench_torchtitan

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "specs" / "correctness" / "evidence"
SPEC = ROOT / "specs" / "examples" / "torchtitan" / "branch.yaml"
OUTCOMES = {
    "torchtitan-harmless": {"loss": "PASS", "grad_norm": "PASS"},
    "torchtitan-harmless-again": {"loss": "PASS", "grad_norm": "PASS"},
    "torchtitan-harmful": {"loss": "FAIL", "grad_norm": "FAIL"},
    "torchtitan-fixture-harmless": {"loss": "PASS", "grad_norm": "PASS"},
    "torchtitan-fixture-harmful": {"loss": "PASS", "grad_norm": "FAIL"},
}
STEPS = {name: 32 if "fixture" in name else 64 for name in OUTCOMES}


def opened(name):
    report = json.loads(gzip.decompress((FOLDER / f"{name}.json.gz").read_bytes()))
    return report, bench_torchtitan.unpack(FOLDER / f"{name}.jsonl.gz")


def judged(runs, metric):
    rows = contract.load("training", ROOT / "specs")
    resolve = partial(rows.resolve, subject=metric)
    return drift.judge_drift(Judgment(check="drift", metric=metric), list(runs.values()), resolve)


def test_every_file_is_told_of():
    assert {path.name for path in FOLDER.glob("torchtitan-*.gz")} == {
        f"{n}.{s}.gz" for n in OUTCOMES for s in ("json", "jsonl")
    }


@pytest.mark.parametrize("name", OUTCOMES)
def test_the_verdicts_are_derived_again(name):
    report, runs = opened(name)
    unedited(FOLDER / name, report)
    assert {one["subject"]: one["status"] for one in report["verdicts"]} == OUTCOMES[name]
    for stands in report["verdicts"]:
        again = judged(runs, stands["subject"])
        assert (again.status, again.statistic) == (stands["status"], stands["statistic"])
        assert again.evidence["envelope"] == stands["evidence"]["envelope"] > 0, "the base runs differ by themselves"
        assert again.evidence["floor"] == stands["evidence"]["floor"] == "steady"


def test_a_record_that_is_edited_is_seen():
    report, runs = opened("torchtitan-harmless")
    loss = runs["feat0"].series["loss"]
    moved = replace(loss, values=[*loss.values[:-1], loss.values[-1] + 1e-3])
    edited = {**runs, "feat0": replace(runs["feat0"], series={**runs["feat0"].series, "loss": moved})}
    stands = {one["subject"]: one["statistic"] for one in report["verdicts"]}
    assert judged(edited, "loss").statistic != stands["loss"]


@pytest.mark.parametrize("base", range(2, 7))
def test_fewer_base_runs_say_the_same(base):
    for name, outcome in OUTCOMES.items():  # six steady the ratio, two would have done
        _, runs = opened(name)
        drawn = {arm: run for arm, run in runs.items() if arm == "feat0" or int(arm[4:]) < base}
        assert {metric: judged(drawn, metric).status for metric in outcome} == outcome


@pytest.mark.parametrize("name", OUTCOMES)
def test_it_says_what_ran(name):
    report, _ = opened(name)
    assert report["spec"]["digest"] == digest(SPEC), "the spec as it stands"
    arms = {arm["name"]: arm for arm in report["arms"]}
    assert list(arms) == [f"base{number}" for number in range(6)] + ["feat0"]
    assert len({arm["commit"] for arm in arms.values()}) == 2 and arms["feat0"]["commit"] != arms["base0"]["commit"]
    for arm in arms.values():
        assert arm["steps"] == STEPS[name] and "H200" in arm["provenance"]["device"]["name"]
        assert arm["provenance"]["flags"]["deterministic_algorithms"] is False, "default settings"


@pytest.mark.parametrize("name", OUTCOMES)
def test_nothing_in_it_is_of_one_machine(name):
    text = gzip.decompress((FOLDER / f"{name}.json.gz").read_bytes()).decode()
    report = json.loads(text)
    assert report["run"] is None and '"/' not in text and "=/" not in text and '"host"' not in text
    assert "repository=repo" in report["overrides"]
    assert all(arm["log"] == Path(arm["log"]).name for arm in report["arms"])


def test_the_envelope_that_the_results_tell_of(capsys):
    bench_torchtitan.envelope([FOLDER / f"torchtitan-harmless{more}.jsonl.gz" for more in ("", "-again")])
    loss, norm = capsys.readouterr().out.split("grad_norm of 12 base runs, 64 steps, 66 pairs")
    for part, ratio, quarters in ((loss, 1.46, "5e-06, 8.9e-06, 1.4e-05, 1.8e-05"),
                                  (norm, 2.07, "2e-06, 1.8e-05, 3.9e-05, 4.6e-05")):  # fmt: skip
        assert f"1320 triples of identical runs: PASS 100.0 %; largest ratio {ratio};" in part
        assert f"by quarters {quarters};" in part and "| largest | 0.0e+00 |" in part
