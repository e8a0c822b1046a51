"""The runs of meshes in specs/correctness/evidence: verdicts are derived again from the records beside the reports,
and what a mesh trained is read against the perturbed envelope of one process.
"""

from __future__ import annotations

import gzip
import json
from array import array
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from rlspec import contract, records
from rlspec.drift import judge_drift
from rlspec.model import Arm, Judgment

SPECS = Path(__file__).parents[1] / "specs"
FOLDER = SPECS / "correctness" / "evidence"
ROW = contract.load("training", SPECS).resolve
HEAD = '{"record": "run"'
ALONE = ("tiny-dense", "tiny-moe")  # the latter in micro-batches of 2, as those of two replicas together
# Name -> processes, each with a GPU.
MESHES = {
    "tiny-moe-dp2": 2,
    "tiny-dense-dp2": 2,
    "tiny-dense-cp2": 2,
    "tiny-dense-pp2": 2,
    "tiny-moe-ep2": 2,
    "tiny-moe-pp2-ep2": 4,
}
NAMES = [*ALONE, *MESHES]


def report(name):
    return json.loads(gzip.decompress((FOLDER / f"{name}.json.gz").read_bytes()))


def runs(folder, name):
    """By arm what its records say; the file holds those of all arms, one after the other."""
    text = gzip.decompress((FOLDER / f"{name}.jsonl.gz").read_bytes()).decode()
    arms = yaml.safe_load((SPECS / "correctness" / f"{name}.yaml").read_text())["arms"]
    found = {}
    for arm, lines in zip(arms, text.split(HEAD)[1:], strict=True):
        path = folder / f"{name}-{arm['name']}.jsonl"
        path.write_text(HEAD + lines)
        found[arm["name"]] = records.read(path, Arm(name=arm["name"], role=arm["role"], perturb=arm.get("perturb")))
    return found


def drift(metric, found):
    return judge_drift(Judgment(check="drift", metric=metric), found, ROW)


def metrics(name):
    return [told["subject"] for told in report(name)["verdicts"]]


def of_mesh(folder, name):
    """The base arms of one process, and the base arm of the mesh as a feature."""
    alone, mesh = runs(folder, "-".join(name.split("-")[:2])), runs(folder, name)["base0"]
    assert mesh.data == alone["base0"].data and len(mesh.data) == 32
    return [alone["base0"], alone["base1"], replace(mesh, arm=Arm(name="feat0", role="feature"))]


def test_every_file_is_told_of():
    there = {path.name.split(".")[0] for path in FOLDER.glob("tiny-*.gz")}
    assert there == set(NAMES)
    told = (FOLDER / "README.md").read_text()
    assert all(f"| `{name}`" in told for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_verdicts_are_derived_again(tmp_path, name):
    given, found = report(name), runs(tmp_path, name)
    assert given["outcome"] == "PASS" and len(given["verdicts"]) == (3 if "moe" in name else 2)
    for told in given["verdicts"]:
        made = drift(told["subject"], list(found.values()))
        assert (made.status, made.statistic, made.reason) == (told["status"], told["statistic"], told["reason"])
        assert made.evidence["floor"] == told["evidence"]["floor"] == "perturbed"


@pytest.mark.parametrize("name", MESHES)
def test_a_mesh_stays_within_the_envelope_of_one_process(tmp_path, name):
    found = of_mesh(tmp_path, name)
    for metric in metrics(name):
        made = drift(metric, found)
        assert made.status == "PASS" and made.evidence["floor"] == "perturbed", made.reason


def test_a_mesh_that_loses_a_millionth_does_not(tmp_path):
    bases = of_mesh(tmp_path, "tiny-dense-pp2")
    feature = bases.pop()
    for metric, series in feature.series.items():
        less = replace(series, values=array("d", [value * (1 - 1e-6) for value in series.values]))
        changed = replace(feature, series={**feature.series, metric: less})
        if metric in metrics("tiny-dense-pp2"):
            assert drift(metric, [*bases, changed]).status == "FAIL"


@pytest.mark.parametrize("name", NAMES)
def test_processes_and_devices_are_told_and_nothing_else_of_the_machine(name):
    text = gzip.decompress((FOLDER / f"{name}.json.gz").read_bytes()).decode()
    given = json.loads(text)
    assert given["run"] is None and "/site-packages/" not in text and '"host"' not in text
    for arm in given["arms"]:
        seen, processes = arm["provenance"], MESHES.get(name)
        assert "H200" in seen["device"]["name"]
        assert seen["world_size"] == (str(processes) if processes else None)
