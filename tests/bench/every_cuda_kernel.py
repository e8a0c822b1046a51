"""Every CUDA kernel, for `sanitize.py`: forward, backward and the sums of weights' gradients, at small sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from rlspec.device.gradients import Identity, Run
from rlspec.device.operators import Operators, Segment, Segments

DEVICE, BF16 = torch.device("cuda"), torch.bfloat16
ROWS, WIDTH, COLUMNS, VOCABULARY = (1, 17, 130, 300), 256, 320, 1000


def calls() -> Iterator[tuple[str, Callable[[], None]]]:
    operators = Operators("cuda")
    for rows in ROWS:
        x, ids = _random(1, rows, WIDTH), torch.arange(rows, device=DEVICE)[None] * 7 % VOCABULARY
        table, norm = _random(VOCABULARY, WIDTH), _random(WIDTH)
        logits = _random(1, rows, VOCABULARY)
        heads = _random(1, rows, 8, 64)
        angles = torch.randn(1, rows, 32, device=DEVICE)
        cases: dict[str, tuple[Callable[..., Tensor], list[Tensor], list[Any], dict[str, Any]]] = {
            "embedding": (operators.embedding, [], [ids, table], {}),
            "rms_norm": (operators.rms_norm, [x, norm], [], {"eps": 1e-6}),
            "qk_norm": (operators.rms_norm, [heads, _random(64)], [], {"eps": 1e-6}),
            "rope": (operators.rope, [heads], [angles.cos(), angles.sin()], {}),
            "det_gemm": (operators.det_gemm, [x, _random(COLUMNS, WIDTH)], [], {}),
            "silu": (operators.silu, [x], [], {}),
            "swiglu": (operators.swiglu, [x, _random(1, rows, WIDTH)], [], {}),
            "residual_add": (operators.residual_add, [x.float(), _random(1, rows, WIDTH)], [], {}),
            "lm_head": (operators.lm_head, [x, table], [], {"out_dtype": torch.float32}),
            "logprob": (operators.logprob, [logits], [ids], {}),
            "batch_invariant_logprob": (operators.batch_invariant_logprob, [logits], [ids], {}),
            "linear_logprob": (operators.linear_logprob, [x, table], [ids], {}),
        }
        for name, (operator, leaves, others, options) in cases.items():
            yield f"{name} of {rows} rows", lambda o=operator, a=leaves, b=others, c=options: _both(o, a, b, c)
        yield f"sums of {rows} rows", lambda rows=rows: _sums(operators, rows)
    yield "attention packed and padded", lambda: _attention(operators, (70, 3, 200), 64, 8)
    yield "attention of wide heads", lambda: _attention(operators, (130,), 128, 4)
    yield "attention decode", lambda: _decode(operators)


def _both(operator: Callable[..., Tensor], leaves: list[Tensor], others: list[Any], options: dict[str, Any]) -> None:
    leaves = [one.detach().requires_grad_() for one in leaves]
    out = operator(*leaves, *others, **options)
    if leaves:
        torch.autograd.grad(out, leaves, torch.ones_like(out))


def _sums(operators: Operators, rows: int) -> None:
    """One sample in a call of its own, with rows that wait for their block."""
    identity = Identity((Run(0, 0, rows, 0, rows),), rows)
    x, dy, ids = _random(rows, WIDTH), _random(rows, COLUMNS), torch.arange(rows, device=DEVICE)
    for promise, weight, pair, options in (
        (operators.det_gemm, _random(COLUMNS, WIDTH), (x, dy), {}),
        (operators.rms_norm, _random(WIDTH), (x, _random(rows, WIDTH)), {"eps": 1e-6}),
        (operators.embedding, _random(VOCABULARY, WIDTH), (ids, _random(rows, WIDTH)), {}),
    ):
        total = promise.weight_gradient(weight, lengths=(rows,), **options)  # type: ignore[attr-defined]
        total.add(*pair, identity)
        total.finish()
    fused = operators.linear_logprob.weight_gradient(_random(VOCABULARY, WIDTH), lengths=(rows,))  # type: ignore[attr-defined]
    fused.add(x, torch.ones(rows, device=DEVICE), identity, ids)
    fused.finish()


def _attention(operators: Operators, lengths: tuple[int, ...], width: int, heads: int) -> None:
    slots, entries, start = sum(lengths) + 9, [], 5
    for length in lengths:
        entries.append(Segment(0, start, length, start, length))
        start += length
    segments = Segments(tuple(entries), 1, slots, slots, DEVICE)
    leaves = [_random(1, slots, count, width).requires_grad_() for count in (heads, heads // 4, heads // 4)]
    out = operators.attention(*leaves, segments, scale=width**-0.5)
    torch.autograd.grad(out, leaves, torch.ones_like(out))


def _decode(operators: Operators) -> None:
    for keys in (1, 65, 1100):
        segments = Segments((Segment(0, 0, 1, 0, keys), Segment(1, 0, 1, 3, keys)), 2, 1, keys + 3, DEVICE)
        cache = [_random(2, keys + 3, 2, 128) for _ in range(2)]
        operators.attention(_random(2, 1, 8, 128), *cache, segments, scale=128**-0.5)


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(BF16)
