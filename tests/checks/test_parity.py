from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlspec import contract, document
from rlspec.checks import parity
from rlspec.errors import SpecError
from rlspec.model import Result
from tests.tiny import parity as spec_of_two_files
from tests.tiny import tokens

ROOT = Path(__file__).parents[2]
ROWS = contract.load("ws1", ROOT)


@pytest.fixture
def spec(tmp_path):
    read, problems = document.read(spec_of_two_files(tmp_path))
    assert not problems
    return parity.parse(read)


def judged(spec, **failures):
    steps = parity.expand(spec, Path("w"), Path("l"))
    results = [Result(arm=s.arm, records=s.records, failure=failures.get(s.arm.name)) for s in steps]
    return {v.judgment: v for v in parity.judge(spec, results, ROWS)}


def test_files_that_are_given_are_relative_to_the_spec_and_nothing_starts(spec, tmp_path):
    steps = parity.expand(spec, Path("w"), Path("l"))
    assert [step.records for step in steps] == [tmp_path / "rollout.jsonl", tmp_path / "train.jsonl"]
    assert [step.argv for step in steps] == [(), ()] and steps[0].provenance == Path("w/rollout.provenance.json")


def test_all_five_judgments_by_default(spec):
    found = judged(spec)
    assert {name: v.status for name, v in found.items()} == {
        "max_abs_dlogp": "PASS",
        "mean_abs_dlogp": "MEASURED",
        "approx_kl": "PASS",
        "clip_fraction": "PASS",
        "sequence_outliers": "MEASURED",
    }
    assert found["max_abs_dlogp"].statistic == pytest.approx(0.001)


def test_the_dtype_picks_the_row(tmp_path):
    read, _ = document.read(spec_of_two_files(tmp_path, dtype="fp32"))
    found = judged(parity.parse(read))
    assert found["max_abs_dlogp"].status == "FAIL" and found["max_abs_dlogp"].row.limits["max"] == 1e-5
    read, _ = document.read(spec_of_two_files(tmp_path, dtype="fp8"))
    assert any(problem.rule == "RL224" and "fp8" in problem.message for problem in parity.lint(read, ()))


def test_the_sides_are_chosen_by_role_not_by_order(tmp_path):
    path = spec_of_two_files(tmp_path, train=0.1)
    text = path.read_text()
    forth = judged(parity.parse(document.parse(text.encode(), path)[0]))
    first, second = text.index("- name: rollout"), text.index("- name: train")
    back = text[:first] + text[second:].rstrip() + "\n" + text[first:second]
    turned = judged(parity.parse(document.parse(back.encode(), path)[0]))
    signs = [one["mean_abs_dlogp"].evidence["mean_dlogp"] for one in (forth, turned)]
    assert signs[0] == signs[1] == pytest.approx(-0.1)


def test_a_side_that_failed_is_an_error_of_every_judgment(spec):
    found = judged(spec, rollout="the engine crashed")
    assert {v.status for v in found.values()} == {"ERROR"} and len(found) == 5
    assert {v.reason for v in found.values()} == {"arm rollout: the engine crashed"}


def test_files_of_different_tokens_are_an_error_before_any_number(spec, tmp_path):
    lines = (tmp_path / "train.jsonl").read_text().splitlines()
    lines[2] = json.dumps({**json.loads(lines[2]), "token": 999})
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    found = judged(spec)
    assert {v.status for v in found.values()} == {"ERROR"}
    assert "token ids differ at 1 of 8 positions: sample s0 position 2" in found["approx_kl"].reason


def test_a_file_that_went_is_told(spec, tmp_path):
    (tmp_path / "train.jsonl").unlink()
    with pytest.raises(SpecError, match="cannot read log-probs from .*train.jsonl"):
        judged(spec)


def test_fewer_judgments_and_no_further_arm(tmp_path):
    read, _ = document.read(spec_of_two_files(tmp_path, judgments=["approx_kl"]))
    spec = parity.parse(read)
    tokens(tmp_path / "train.jsonl", 3.0)
    found = judged(spec)
    assert list(found) == ["approx_kl"] and found["approx_kl"].status == "FAIL"
    assert parity.more(spec, list(found.values())) is None
