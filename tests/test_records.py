from __future__ import annotations

import json
import math
from array import array
from dataclasses import replace

import pytest

from rlspec import records, schema
from rlspec.errors import RunError
from rlspec.model import Arm, Run, Series

ARM = Arm(name="base0", role="base")
LOSS = [0.1 + 0.2, math.nan, 1e-310, -math.inf]


@pytest.fixture
def path(tmp_path):
    series = Series(
        arm="base0", metric="loss", steps=array("q", [1, 2, 4, 5]), values=array("d", LOSS), resolution=5e-5
    )
    few = Series(arm="base0", metric="grad_norm", steps=array("q", [1, 5]), values=array("d", [1.5, 2.5]))
    run = Run(arm=ARM, series={"loss": series, "grad_norm": few}, steps_expected=5, notes=("n",), data={2: "ab"})
    records.write(run, tmp_path / "x.records.jsonl", "jsonl")
    return tmp_path / "x.records.jsonl"


def test_round_trip_keeps_every_bit(path):
    run = records.read(path, ARM)
    assert run.series["loss"].values.tobytes() == array("d", LOSS).tobytes()
    assert list(run.series["grad_norm"].steps) == [1, 5]
    assert run.series["loss"].resolution == 5e-5 and run.steps_expected == 5
    assert run.notes == ("n",) and run.data == {2: "ab"} and not run.faults


def test_that_lines_were_counted_is_kept(path):
    run = records.read(path, ARM)
    assert not run.series["loss"].counted and '"counted"' not in path.read_text()
    records.write(replace(run, series={"loss": replace(run.series["loss"], counted=True)}), path, "huggingface")
    assert records.read(path, ARM).series["loss"].counted
    test_lines_obey_the_schema_and_hold_no_nan_token(path)


def test_lines_obey_the_schema_and_hold_no_nan_token(path):
    for line in path.read_text().splitlines():
        assert not schema.check_value(json.loads(line, parse_constant=pytest.fail), "records")


def test_a_file_without_its_end_is_at_fault(path):
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]))
    assert "not written to its end" in records.read(path, ARM).faults["*"]


@pytest.mark.parametrize(
    ("line", "text", "words"),
    [
        (1, '{"record": "step", "step": 1, "metrics": {"loss": NaN}}', "not JSON"),
        (1, '{"record": "step", "step": 1, "metrics": {"loss": true}}', "not a number"),
        (1, '{"record": "step", "step": 1, "metrics": {"loss": null}}', "not a number"),
        (1, '{"record": "step", "step": 1, "metrics": {"loss": 1, "loss": 2}}', "twice"),
        (2, '{"record": "step", "step": 1, "metrics": {}}', "ascend"),
        (1, '{"record": "step", "step": 1.5, "metrics": {}}', "whole number"),
        (1, '{"record": "step", "step": 1e30, "metrics": {}}', "whole number"),
        (1, '{"record": "step", "step": 1000000000000000000000, "metrics": {}}', "ascend"),
        (1, '{"record": []}', "not a record"),
        (1, '{"record": "step", "step": 1, "metrics": {}, "x": 1}', "unknown key"),
        (1, '{"record": "st', ":2:"),
        (1, "[]", "not a record"),
        (0, '{"record": "run", "schema_version": 2, "arm": "base0"}', "schema_version"),
        (0, '{"record": "run", "schema_version": 1, "arm": "feat0"}', "feat0"),
        (5, '{"record": "end", "steps": 3}', "4 steps are here"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(path, line, text, words):
    lines = path.read_text().splitlines()
    lines[line] = text
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(RunError, match=words):
        records.read(path, ARM)


def test_empty_and_missing(tmp_path):
    (tmp_path / "e").write_text("")
    with pytest.raises(RunError, match="empty"):
        records.read(tmp_path / "e", ARM)
    with pytest.raises(RunError):
        records.read(tmp_path / "nowhere", ARM)
