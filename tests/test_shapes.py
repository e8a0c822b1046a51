from __future__ import annotations

import random

import pytest

from rlspec import logs
from rlspec.columns import Table
from tests.log_samples import mutate, points, said, samples


@pytest.mark.parametrize("number", range(10))
def test_any_bytes_are_read_alike_with_and_without_shapes(log, monkeypatch, number):
    """Mutated logs never raise, and lines read in bulk give what the same lines give one by one."""
    reader, lines, options = list(samples())[number]
    draw = random.Random(number)
    monkeypatch.setattr(logs, "BLOCK", 1500)
    logs_read = [("\n".join(lines) + "\n").encode()]
    logs_read += [mutate(logs_read[0], draw) for _ in range(60)]
    for raw in logs_read:
        monkeypatch.setattr(logs, "SHAPES", 100)
        fast = said(log(raw, reader, **options))
        monkeypatch.setattr(logs, "SHAPES", 0)
        assert said(log(raw, reader, **options)) == fast


def test_a_late_odd_line_is_not_taken_by_the_shape(log, monkeypatch):
    monkeypatch.setattr(logs, "BLOCK", 300)
    rows = [f'{{"step": {step}, "loss": 0.1234567890{step}}}' for step in range(10, 60)]
    assert log(rows, "jsonl").series["loss"].resolution == 5e-13
    assert log([*rows, '{"step": 60, "loss": 123.123456789012}'], "jsonl").series["loss"].resolution == 0
    assert "line 51" in log([*rows, '{"step": 060, "loss": 0.1}'], "jsonl").faults["*"]
    cells = ["step,loss,late", *(f"{step},0.5," for step in range(60))]
    assert points(log([*cells, "60,0.5,2.5"], "csv"), "late") == {60: 2.5}


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("number", range(8))
def test_shapes_are_found(log, monkeypatch, number, end):
    """Nearly all lines of a regular log go the fast way."""
    reader, lines, options = list(samples())[number]
    taken = []
    extend = Table.extend
    monkeypatch.setattr(Table, "extend", lambda *given: (taken.append(len(given[-1])), extend(*given)))
    monkeypatch.setattr(logs, "BLOCK", 300)
    log(end.join(lines) + end, reader, **options)
    assert sum(taken) >= len(lines) // 2
