"""The part `cuda_rows` of bench_kernels.py: the row kernels of csrc/ beside those of Triton, whose bits they have.

Shapes, floors and ways of timing are those of kernels_rows.py; the baseline is Triton.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlspec.device import cuda_rows
from rlspec.kernels import embedding, logprob, residual_add, rms_norm, rope, silu, swiglu
from tests.bench import kernels_rows as rows
from tests.bench.kernels_rows import BF16, HEADS, HIDDEN, INNER, KV_HEADS, LOGIT_ROWS, ROWS, VOCABULARY, WIDTH
from tests.csrc import row_cases

EPS = 1e-6
KINDS = (
    row_cases.norms,
    row_cases.together,
    row_cases.norm_folds,
    row_cases.gates,
    row_cases.ropes,
    row_cases.lookups,
    row_cases.logprobs,
)


def checks(device: torch.device) -> Iterator[tuple[str, bool, str]]:
    """The bits of Triton, in every case; repeats; a row alone; a graph."""
    for kind in KINDS:
        for case in kind(row_cases.Draw(device)):
            wrong = case.differing()
            yield f"as triton: {case.name}", not wrong, "; ".join(wrong)


def timings(device: torch.device) -> Iterator[dict[str, Any]]:
    """Forward and gradients of each operator, Triton beside it."""
    yield from _norms(device)
    yield from _elementwise(device)
    yield from _tables(device)
    yield from _logprobs(device)


def _norms(device: torch.device) -> Iterator[dict[str, Any]]:
    for name, heads, width in (("rms_norm", 1, HIDDEN), ("qk_norm", HEADS, WIDTH), ("qk_norm", KV_HEADS, WIDTH)):
        shape, size = f"{ROWS} x {heads} x {width}", ROWS * heads * width * 2
        weight, copies = rows._random(device, width), max(3, 3 * HIDDEN // (heads * width))
        inputs = [rows._random(device, ROWS, 1, heads, width) for _ in range(copies)]
        ways = cuda_rows.rms_norm, rms_norm.rms_norm
        pair = [[partial(way, one, weight, eps=EPS) for one in inputs] for way in ways]
        yield rows._row(name, shape, pair[0], "triton", pair[1], 2 * size)
        upstream = [rows._random(device, ROWS, 1, heads, width) for _ in range(copies)]
        both = list(zip(inputs, upstream, strict=True))
        dx = torch.empty_like(inputs[0])
        pair = [
            [partial(cuda_rows._norm_data_gradient, x, weight, dy, EPS) for x, dy in both],
            [partial(_triton_data_gradient, x, weight, dy, dx) for x, dy in both],
        ]
        yield rows._row(f"{name} data gradient", shape, pair[0], "triton", pair[1], 3 * size)
        total, blocks = torch.zeros(width, device=device), torch.arange(ROWS, device=device).int().view(-1, 16)
        flat = [[one.view(ROWS, heads, width) for one in pair] for pair in both]
        folds = cuda_rows.norm_fold, rms_norm.fold
        pair = [[partial(fold, total, x, dy, blocks, eps=EPS) for x, dy in flat] for fold in folds]
        yield rows._row(f"{name} weight gradient", shape, pair[0], "triton", pair[1], 2 * size)


def _triton_data_gradient(x: Tensor, weight: Tensor, dy: Tensor, dx: Tensor) -> None:
    rms_norm._data_launch(rms_norm._rows(x), weight, rms_norm._rows(dy), dx, EPS)(x.device)


def _elementwise(device: torch.device) -> Iterator[dict[str, Any]]:
    size, shape = ROWS * INNER * 2, f"{ROWS} x {INNER}"
    gate, up, dy = (rows._random(device, ROWS, INNER) for _ in range(3))
    for name, ways, inputs, forward, backward in (
        ("silu", (cuda_rows.silu, silu.silu), [gate], 2, 3),
        ("swiglu", (cuda_rows.swiglu, swiglu.swiglu), [gate, up], 3, 5),
    ):
        pair = [partial(way, *inputs) for way in ways]
        yield rows._row(name, shape, pair[0], "triton", pair[1], forward * size)
        pair = [rows._backward(way, inputs, dy) for way in ways]
        yield rows._row(f"{name} backward", shape, pair[0], "triton", pair[1], backward * size)
    ways = cuda_rows.residual_add, residual_add.residual_add
    for dtype, each in ((BF16, 6), (torch.float32, 10)):
        inputs = [(rows._random(device, ROWS, HIDDEN).to(dtype), rows._random(device, ROWS, HIDDEN)) for _ in range(3)]
        pair = [[partial(way, *one) for one in inputs] for way in ways]
        name = "residual_add" if dtype == BF16 else "residual_add, fp32 + bf16"
        yield rows._row(name, f"{ROWS} x {HIDDEN}", pair[0], "triton", pair[1], each * ROWS * HIDDEN)


def _tables(device: torch.device) -> Iterator[dict[str, Any]]:
    for heads in (HEADS, KV_HEADS):
        inputs = [rows._rotary(device, ROWS, heads) for _ in range(3 * HEADS // heads)]
        size, shape = inputs[0][0].numel() * 4 + ROWS * WIDTH * 4, f"{ROWS} x {heads} x {WIDTH}"
        pair = [[partial(way, x, *tables) for x, tables, _ in inputs] for way in (cuda_rows.rope, rope.rope)]
        yield rows._row("rope", shape, pair[0], "triton", pair[1], size)
    tokens, weight = [rows._tokens(device, ROWS) for _ in range(3)], rows._random(device, VOCABULARY, HIDDEN)
    dy, shape, size = rows._random(device, ROWS, HIDDEN), f"{ROWS} of {VOCABULARY} x {HIDDEN}", ROWS * HIDDEN * 4
    ways = cuda_rows.embedding, embedding.embedding
    pair = [[partial(way, one, weight) for one in tokens] for way in ways]
    yield rows._row("embedding", shape, pair[0], "triton", pair[1], size)
    total, blocks = torch.zeros(VOCABULARY, HIDDEN, device=device), torch.arange(ROWS, device=device).int().view(-1, 16)
    moved = ROWS * HIDDEN * 2 + len(tokens[0].unique()) * HIDDEN * 8
    pair = [partial(fold, total, tokens[0], dy, blocks) for fold in (cuda_rows.embedding_fold, embedding.fold)]
    yield rows._row("embedding.fold", shape, pair[0], "triton", pair[1], moved)


def _logprobs(device: torch.device) -> Iterator[dict[str, Any]]:
    logits, targets, grads = rows._logits(device, LOGIT_ROWS)
    size, shape = logits.numel() * 2, f"{LOGIT_ROWS} x {VOCABULARY}"
    for name in ("batch_invariant_logprob", "logprob"):
        ways = getattr(cuda_rows, name), getattr(logprob, name)
        pair = [partial(way, logits, targets) for way in ways]
        yield rows._row(name, shape, pair[0], "triton", pair[1], size)
        pair = [rows._both(partial(rows._swapped, way, targets), [logits], grads) for way in ways]
        yield rows._row(f"{name} forward + backward", shape, pair[0], "triton", pair[1], 3 * size)
        for few in (1, 16, 128):
            inputs = [(logits[at : at + few], targets[at : at + few]) for at in range(0, 2048, max(few, 64))]
            pair = [[partial(way, *one) for one in inputs] for way in ways]
            yield rows._row(name, f"{few} x {VOCABULARY}", pair[0], "triton", pair[1], few * VOCABULARY * 2)
