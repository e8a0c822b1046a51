"""The reports in specs/operators/evidence derive their verdicts again, and a touched one is refused."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

from rlspec import judging
from rlspec.errors import RunError

FOLDER = Path(__file__).parents[1] / "specs" / "operators" / "evidence"
OUTCOMES = {
    "ws1-torch": {"PASS": 79, "FAIL": 13, "N/A": 8},
    "wide-torch": {"PASS": 83, "FAIL": 39},
    "wide-triton": {"PASS": 158, "N/A": 12},
    "wide-cuda": {"PASS": 158, "N/A": 12},
    "ws1-backends": {"PASS": 184, "N/A": 16},
    "wide-moe-torch": {"PASS": 10, "FAIL": 26},
    "wide-moe-triton": {"PASS": 36},
}


def again(path):
    return judging.judge(files=[path], reader=None, kind=None, metrics=(), pattern=None, contract=None,
                         bases=(), features=())  # fmt: skip


def touched(tmp_path, name, edit):
    report = json.loads(gzip.decompress((FOLDER / f"{name}.json.gz").read_bytes()))
    edit(report)
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report))
    return path


def test_every_file_is_told_of():
    assert {path.name.removesuffix(".json.gz") for path in FOLDER.glob("*.gz")} == set(OUTCOMES)


@pytest.mark.parametrize("name", OUTCOMES)
def test_the_verdicts_are_derived_again(name):
    report = again(FOLDER / f"{name}.json.gz")
    assert Counter(verdict["status"] for verdict in report["verdicts"]) == OUTCOMES[name]
    assert not any("not those that stand" in note for note in report["notes"])


def digests(name, arm):
    report = json.loads(gzip.decompress((FOLDER / f"{name}.json.gz").read_bytes()))
    keys = ("operator", "tier", "judgment", "variant", "tensor", "configuration")
    lines = (one for cell in report["measured"][arm]["cells"] for one in cell["comparisons"])
    return {tuple(one[key] for key in keys): one["digest"] for one in lines}


@pytest.mark.parametrize(
    ("triton", "cuda", "count"), [("wide-triton", "wide-cuda", 6386), ("ws1-backends", "ws1-backends", 1282)]
)
def test_the_two_backends_have_the_same_bits(triton, cuda, count):
    found = digests(triton, "triton")
    assert len(found) == count and found == digests(cuda, "cuda")


def test_a_row_that_is_removed_is_refused(tmp_path):
    def edit(report):
        report["measured"]["triton"]["cells"][3]["comparisons"].pop()

    with pytest.raises(RunError, match="edited"):
        again(touched(tmp_path, "ws1-backends", edit))


def test_a_digest_that_is_edited_is_refused(tmp_path):
    def edit(report):
        line = report["measured"]["triton"]["cells"][0]["comparisons"][0]
        line["digest"] = line["digest"][:-1] + ("0" if line["digest"][-1] != "0" else "1")

    with pytest.raises(RunError, match="edited"):
        again(touched(tmp_path, "ws1-backends", edit))


@pytest.mark.parametrize("name", OUTCOMES)
def test_nothing_in_it_is_of_one_machine(name):
    text = gzip.decompress((FOLDER / f"{name}.json.gz").read_bytes()).decode()
    report = json.loads(text)
    assert report["run"] is None and "/site-packages/" not in text and '"host"' not in text
    assert all(arm["log"] == Path(arm["log"]).name for arm in report["arms"])
