"""The reports in specs/chain/evidence derive their verdicts again, and hold nothing of one machine."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from rlspec import chains, judging, measurements
from rlspec.errors import RunError

FOLDER = Path(__file__).parents[1] / "specs" / "chain" / "evidence"
LAYERS = {
    "qwen3-30b-a3b-8-layers": 8, "qwen3-8b-backends": 36, "qwen3-8b-long": 36, "qwen3-8b-long-cuda": 36,
    "qwen3-8b-torch": 36,
}  # fmt: skip
FILES = [FOLDER / f"{name}.json.gz" for name in LAYERS]


def again(path):
    return judging.judge(files=[path], reader=None, kind=None, metrics=(), pattern=None, contract=None,
                         bases=(), features=())  # fmt: skip


def read(name):
    return json.loads(gzip.decompress((FOLDER / f"{name}.json.gz").read_bytes()))


def digests(report):
    [arm] = report["measured"].values()
    return {(one["judgment"], one["configuration"], one["tensor"]): one["digest"] for one in arm["comparisons"]}


def verdicts(report):
    return [(one["judgment"], one["subject"], one["status"]) for one in report["verdicts"]]


def test_every_file_is_told_of():
    assert {path.name.removesuffix(".json.gz") for path in FOLDER.glob("*.gz")} == set(LAYERS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_verdicts_are_derived_again(path):
    given = json.loads(gzip.decompress(path.read_bytes()))
    assert verdicts(again(path)) == verdicts(given)
    assert given["counts"]["judged"] == given["counts"]["expected"] >= 36


def test_the_two_backends_agree_in_one_run_and_in_two():
    [across] = [one for one in read("qwen3-8b-backends")["verdicts"] if one["judgment"] == "cross_arm_invariance"]
    assert (across["status"], across["reason"]) == ("PASS", "27 log-probs and 399 gradients are equal to the bit")
    triton, cuda = (digests(read(name)) for name in ("qwen3-8b-long", "qwen3-8b-long-cuda"))
    assert len(triton) == 4029 and triton == cuda


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_row_that_is_removed_is_refused(path, tmp_path):
    given = json.loads(gzip.decompress(path.read_bytes()))
    next(arm for arm in given["measured"].values() if arm)["comparisons"].pop()
    (tmp_path / "report.json").write_text(json.dumps(given))
    with pytest.raises(RunError, match="edited"):
        again(tmp_path / "report.json")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_nothing_in_it_is_of_one_machine_and_the_model_has_the_layers_it_says(path):
    text = gzip.decompress(path.read_bytes()).decode()
    report = json.loads(text)
    assert report["run"] is None and "/site-packages/" not in text and '"host"' not in text
    assert report["chain"]["model"]["layers"] == LAYERS[path.name.removesuffix(".json.gz")]
    assert path.name.startswith(report["model"])
    assert f"`{path.name}`" in (FOLDER / "README.md").read_text()


@pytest.mark.parametrize("left_out", ["kv_cache", "train_inference_parity", "gradient_invariance"])
def test_a_judgment_that_is_left_out_under_a_new_seal_is_still_measured(left_out, tmp_path):
    given = read("qwen3-8b-long")
    given["spec"]["data"]["judgments"] = [name for name in chains.JUDGMENTS if name != left_out]
    (tmp_path / "report.json").write_text(json.dumps({**given, "seal": measurements.seal(given)}))
    with pytest.raises(RunError, match=f"measured {left_out} of .*, which it does not ask for"):
        again(tmp_path / "report.json")
