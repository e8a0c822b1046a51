"""Lines of real trainers, logs made of them, and rough changes to such logs."""

from __future__ import annotations

import json
import random

PITH = (
    "2026-10-03 11:20:{0:02d} | INFO | step {0:08d}/{total:08d} | step-time 4.8{0:02d} sec | "
    "cross-entropy-loss 11.{0:04d} | load-balance-loss 1.09{0:04d} | learning-rate 1.281250e-06 | "
    "gradient-norm 49.5{0:03d} | tokens-per-second 1{0:02d},084 | peak-gpu-memory 61.2{1} GB"
)
TITAN = (
    "[rank0]:[titan] 2026-10-05 10:14:27,415 - root - INFO - \x1b[31mstep: {0:2d}  \x1b[32mloss:  8.10{0:03d}  "
    "\x1b[38;2;180;60;0mgrad_norm:  1.5{0:03d}  \x1b[38;2;54;234;195mmemory: 24.31GiB(30.71%)  "
    "\x1b[34mtps: 12,7{0:02d}  \x1b[36mtflops: 1,414.22  \x1b[35mmfu: 38.62%\x1b[39m"
)
MEGATRON = (
    " [2026-10-07 07:15:40.484878] iteration {0:8d}/{total:8d} | consumed samples: {0:12d} | "
    "elapsed time per iteration (ms): 812.{1} | learning rate: 3.125000E-07 | lm loss: 1.0{0:04d}0E+01 | "
    "load_balancing_loss: 1.09{0:04d}E+00 | loss scale: 1.0 | grad norm: 49.9{0:02d} | "
    "number of skipped iterations: {skipped:3d} | number of nan iterations:   0 |"
)


def pith(steps, total=32):
    return [PITH.format(step, step % 10, total=total) for step in steps]


def megatron(steps, total=32, skipped=0):
    return [MEGATRON.format(step, step % 10, total=total, skipped=skipped) for step in steps]


def points(run, metric):
    series = run.series[metric]
    assert series.metric == metric and series.arm == "base0"
    return dict(zip(series.steps, series.values, strict=True))


def samples():
    """Logs of every reader that has shapes, with the odd lines that real logs have."""
    draw = random.Random(7)
    yield "pithtrain", pith(range(1, 40), total=39), {}
    yield "torchtitan", [TITAN.format(step) for step in range(1, 40)], {}
    yield "megatron", megatron(range(1, 40), total=39), {}
    for digits in (4, 17):
        rows = [{"step": s, "loss": round(draw.random() * 20, digits), "t": "a:b", "lr": 1e-5 * s} for s in range(40)]
        yield "jsonl", [json.dumps({**row, "grad_norm": draw.choice([1, 1.5, 12.25])}) for row in rows], {}
        yield (
            "jsonl",
            [json.dumps({"loss": r["loss"], "step": r["step"], "n": None}, separators=(",", ":")) for r in rows],
            {},
        )
        yield "csv", ["lr,step,loss,t,gap", *(f"{r['lr']},{r['step']},{r['loss']},a," for r in rows)], {}
    yield "huggingface", [f"{{'loss': '{draw.random():.4g}', 'grad_norm': {draw.random()}}}" for _ in range(40)], {}
    yield (
        "regex",
        [f"it {s}/39 loss={draw.random():.5f}" for s in range(40)],
        {"pattern": r"it (?P<step>\S+)/(?P<steps>\S+) loss=(?P<loss>\S+)"},
    )


def said(run):
    series = {name: (list(s.steps), list(map(repr, s.values)), s.resolution) for name, s in run.series.items()}
    return series, run.faults, run.notes, run.steps_expected


def mutate(raw, draw):
    """A few rough changes, or many small ones to characters of which numbers are made."""
    junk = [bytes([draw.randrange(256)]), b"nan", b"1e5", b"9" * 30, b"\n", b'"', b"{'loss': ", b" | ", b"\r"]
    small = draw.random() < 0.5
    for _ in range(draw.randrange(1, 40 if small else 6)):
        at, kind = draw.randrange(len(raw) + 1), draw.randrange(3 if small else 5)
        piece = bytes([draw.choice(b'0123456789 .,-+eE:|x"')]) if small else draw.choice(junk)
        if kind == 0:
            raw = raw[:at] + piece + raw[at:]
        elif kind == 1:
            raw = raw[:at] + piece + raw[at + len(piece) :]
        elif kind == 2:
            raw = raw[:at] + raw[at + (1 if small else draw.randrange(1, 30)) :]
        elif kind == 3:
            start = draw.randrange(len(raw) + 1)
            raw = raw[:at] + raw[start : start + draw.randrange(200)] + raw[at:]
        else:
            raw = raw[: max(at, 200)]
    return raw
