from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.log_samples import points
from tests.tiny import rlspec


def test_huggingface_strings_are_counted_and_have_four_digits(log):
    lines = [
        "{'loss': '13.52', 'grad_norm': '1.522', 'epoch': '0.0625', 'train_runtime': '0.05'}",
        "{'eval_loss': '3.2', 'epoch': '0.0625'}",
        "{'loss': '3.5', 'grad_norm': '0.9', 'epoch': '0.125'}",
        "{'train_runtime': '41.7', 'train_loss': '2.994', 'epoch': '2'}",
    ]
    run = log(lines, "huggingface")
    assert points(run, "loss") == {1: 13.52, 2: 3.5} and run.steps_expected is None and not run.faults
    assert run.series["loss"].resolution == 5e-3, "13.52 has its fourth digit at 0.01"
    assert run.series["grad_norm"].resolution == 5e-4


def test_huggingface_floats_bare_tokens_and_json(log):
    lines = [
        "{'loss': 2.5306, 'grad_norm': nan, 'epoch': 0.06}",
        '{"loss": 2.5, "grad_norm": NaN, "epoch": null}',
        "{'loss': np.float64(2.25), 'grad_norm': -inf, 'done': False}",
        "{'loss': 2.4, 'grad_norm': 1.5, 'text': \"it's nan\"}",
    ]
    run = log(lines, "huggingface")
    assert list(points(run, "loss").values()) == [2.5306, 2.5, 2.25, 2.4] and run.series["loss"].resolution == 5e-5
    assert not run.faults
    norms = points(run, "grad_norm")
    assert math.isnan(norms[1]) and math.isnan(norms[2]) and norms[3] == -math.inf and norms[4] == 1.5


def test_huggingface_dicts_without_steps_may_begin_with_a_mean_so_the_first_is_judged(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def made(step):
        first = {"base0": 4.0, "base1": 4.01, "feat0": 5.0}
        for name, loss in first.items():
            lines = [{"loss": loss}, *({"loss": 3 + at / 8 + (name == "base1") / 100} for at in range(6))]
            rows = ({**line, **({"step": at} if step else {})} for at, line in enumerate(lines, 1))
            Path(f"{name}.log").write_text("".join(f"{row}\n" for row in rows))
        return rlspec("judge", *(f"{name}.log" for name in first), "--reader", "huggingface", "--metric", "loss")

    counted = made(step=False)
    said = " ".join(counted.out.split())
    assert counted.code == 1 and "judged 7 of 7" in said and "the first may be of several steps" in said
    assert made(step=True).code == 0


def test_huggingface_progress_bars(log):
    bar = "\r  3%|        | 1/32 [00:01<00:31,  1.02it/s]\r        \r"
    text = bar + "{'loss': '3.4', 'grad_norm': '1.5'}\n\x1b[A" + bar + "{'loss': '3.3', 'grad_norm': '1.6'}\n"
    assert points(log(text, "huggingface"), "loss") == {1: 3.4, 2: 3.3}


def test_huggingface_takes_steps_only_if_every_dict_has_one(log):
    assert list(
        log(["{'loss': 1.5, 'step': 10}", "{'loss': 1.4, 'step': 20}"], "huggingface").series["loss"].steps
    ) == [10, 20]
    assert list(log(["{'loss': 1.5, 'step': 10}", "{'loss': 1.4}"], "huggingface").series["loss"].steps) == [1, 2]


@pytest.mark.parametrize("torn", ["{'loss': '3.4', 'grad", "{'loss': 3.4.5}", "{'loss': 1, 'x': {'y': 2}}"])
def test_huggingface_dict_that_cannot_be_read_makes_the_count_worthless(log, torn):
    run = log(["{'loss': 3.5}", torn, "{'loss': 3.3}"], "huggingface")
    assert "line 2" in run.faults["*"] and "cannot be counted" in run.faults["*"]


def test_trainer_state(log):
    history = [
        {"epoch": 0.1, "grad_norm": 0.25, "loss": 5.615690231323242, "step": 2},
        {"epoch": 0.1, "eval_loss": 5.1, "step": 2},
        {"epoch": 0.2, "grad_norm": math.nan, "loss": 5.5, "step": 4},
        {"epoch": 0.2, "train_loss": 5.5, "step": 4},
    ]
    state = {"epoch": 1, "global_step": 4, "max_steps": 8, "log_history": history}
    run = log(json.dumps(state, indent=2), "huggingface")
    assert points(run, "loss") == {2: 5.615690231323242, 4: 5.5} and run.series["loss"].resolution == 0
    assert math.isnan(points(run, "grad_norm")[4]) and "step 4 of 8" in run.notes[0]
    torn = log(json.dumps(state, indent=2)[:-40], "huggingface")
    assert "not whole" in torn.faults["*"]


def test_jsonl(log):
    lines = [
        "starting",
        '{"event": "config", "lr": 1}',
        '{"step": 1, "loss": 3.5, "grad_norm": 0.1234567890123456, "note": "warm", "lr": "2e-05", "skip": null}',
        '[rank0]: {"step": 2, "loss": 3.25, "grad_norm": NaN, "note": "x", "lr": "1e-05", "skip": 7}',
        '{"loss": nan, "step": 3, "grad_norm": "inf", "note": "5", "lr": "N/A"}',
    ]
    run = log(lines, "jsonl")
    assert list(run.series) == ["loss", "grad_norm", "lr", "skip"] and set(run.faults) == {"lr"}
    assert points(run, "lr") == {1: 2e-5, 2: 1e-5} and points(run, "skip") == {2: 7}
    assert points(run, "loss")[2] == 3.25 and math.isnan(points(run, "loss")[3])
    assert math.isnan(points(run, "grad_norm")[2]) and points(run, "grad_norm")[3] == math.inf
    assert run.notes == (
        "base0.log: 1 lines that are no JSON object were skipped",
        "base0.log: 1 JSON objects without the field step were skipped",
    )


@pytest.mark.parametrize(
    ("line", "metric", "words"),
    [
        ('{"step": 2, "loss": 3.', "*", "line 2 begins a JSON object that does not parse"),
        ("{'step': 2, 'loss': 3.5}", "*", "line 2 begins a JSON object that does not parse"),
        ('{"step": 2, "loss": 3.5}, {"step": 3}', "*", "line 2"),
        ('{"step": 2, "loss": 3.5, "loss": 3.6}', "*", "key 'loss' twice"),
        ('{"step": 2, "step": 3, "loss": 3.5}', "*", "key 'step' twice"),
        ('{"step": 2, "loss": "high"}', "loss", "line 2 has loss 'high', which is no number"),
        ('{"step": 2, "loss": true}', "loss", "line 2 has loss"),
        ('{"step": 2, "loss": [1]}', "loss", "line 2 has loss"),
        ('{"step": 2.5, "loss": 1}', "*", "line 2 has the step number '2.5'"),
        ('{"step": -2, "loss": 1}', "*", "line 2 has the step number '-2'"),
        ('{"step": 9223372036854775808, "loss": 1}', "*", "line 2 has the step number"),
        ('{"step": null, "loss": 1}', "*", "line 2 has the step number"),
        ('{"step": NaN, "loss": 1}', "*", "line 2 has the step number"),
        ('{"step": true, "loss": 1}', "*", "line 2 has the step number"),
    ],
)
def test_jsonl_faults(log, line, metric, words):
    run = log(['{"step": 1, "loss": 3.5}', line, '{"step": 4, "loss": 3.5}'], "jsonl", metrics=["loss"])
    assert words in run.faults[metric] and run.faults[metric].startswith("base0.log ")
    assert points(run, "loss")[4] == 3.5


def test_an_object_in_an_object_is_named_by_its_path(log):
    rows = [{"step": step, "train": {"loss": 3 / step, "more": {"z": 1}}, "lr": 0.1} for step in (1, 2, 3)]
    run = log(list(map(json.dumps, rows)), "jsonl")
    assert points(run, "train/loss") == {1: 3.0, 2: 1.5, 3: 1.0}
    assert set(run.series) == {"train/loss", "train/more/z", "lr"}
    run = log(['{"step": 1, "a/b": 1, "loss": 3, "a": {"b": 2}}', '{"step": 2, "a/b": 1, "loss": 2}'], "jsonl")
    assert points(run, "loss") == {1: 3.0, 2: 2.0} and "by the path of an object" in run.faults["a/b"]


def test_the_largest_step_number(log):
    run = log(
        ['{"step": 9223372036854775807, "loss": 1.5}', '{"step": "3", "loss": 2.5}', '{"step": 4.0, "loss": 3}'],
        "jsonl",
    )
    assert points(run, "loss") == {3: 2.5, 4: 3.0, 2**63 - 1: 1.5} and not run.faults
