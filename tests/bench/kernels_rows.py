"""The part `rows` of bench_kernels.py: embedding, rope, silu, swiglu, residual_add, logprob at the widths of Qwen3-8B.

Timing: clock.py, with 30 ms of warm-up and 60 ms measured; under 100 us in CUDA graphs of many calls that rotate
through inputs larger than the cache. floor: bytes over 4.3 TB/s, the rate of a copy on an H200; reading alone reaches
about 4.45.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlspec.kernels.embedding import embedding, fold
from rlspec.kernels.logprob import batch_invariant_logprob, logprob
from rlspec.kernels.residual_add import residual_add
from rlspec.kernels.rope import rope
from rlspec.kernels.silu import silu
from rlspec.kernels.swiglu import swiglu
from tests.bench.clock import graph, there_and_back

BYTES_PER_US = 4.3e6
ROWS, HIDDEN, INNER, HEADS, KV_HEADS, WIDTH, VOCABULARY, LOGIT_ROWS = 16384, 4096, 12288, 32, 8, 128, 151936, 4096
BF16 = torch.bfloat16
HEAT = (30e3, 60e3)

Run = Callable[[], Any]


def checks(device: torch.device) -> Iterator[tuple[str, bool, str]]:
    """A row of a large call is the row of a small one, repeats, keeps its bits in a graph; and the error is small."""
    for kind in KINDS:
        yield from kind(device)


def _alone(device: torch.device) -> Iterator[tuple[str, bool, str]]:
    for name, call, tensors in _operators(device):
        whole = call(*tensors)
        rows = len(tensors[0])
        for part in (slice(0, 1), slice(rows - 17, rows), slice(1, rows, 3)):
            few = call(*(one[part] for one in tensors))
            ok = all(torch.equal(a, b[part]) for a, b in zip(few, whole, strict=True))
            yield f"{name}: rows {part.start}:{part.stop}:{part.step} as in the whole", ok, ""
        again = call(*tensors)
        yield f"{name}: repeats", all(torch.equal(a, b) for a, b in zip(again, whole, strict=True)), ""
    yield from _accuracy(device)


def _whole(device: torch.device) -> Iterator[tuple[str, bool, str]]:
    yield _fold(device)
    yield _compilations(device)
    yield _graph(device)


KINDS = (_alone, _whole)


def timings(device: torch.device) -> Iterator[dict[str, Any]]:
    """Forward and data gradient of each operator beside torch."""
    yield from _elementwise(device)
    yield from _tables(device)
    yield from _logprobs(device)


def _operators(device: torch.device) -> Iterator[tuple[str, Callable[..., tuple[Tensor, ...]], list[Tensor]]]:
    """Each operator, forward and gradients by row, with tensors whose first dimension is rows."""
    rows = 67
    dy = _random(device, rows, INNER)
    yield "silu", _with_gradients(silu, 1), [_random(device, rows, INNER), dy]
    yield "swiglu", _with_gradients(swiglu, 2), [_random(device, rows, INNER), _random(device, rows, INNER), dy]
    residual = _random(device, rows, INNER).float()
    yield "residual_add", _with_gradients(residual_add, 2), [residual, _random(device, rows, INNER), dy.float()]
    x, tables, dx = _rotary(device, rows, HEADS)
    yield "rope", _with_gradients(rope, 1), [x, *tables, dx]
    logits, targets, grads = _logits(device, rows)
    for way in (logprob, batch_invariant_logprob):
        yield way.__name__, _with_gradients(way, 1), [logits, targets, grads]


def _lookups(device: torch.device) -> Iterator[tuple[str, Callable[..., tuple[Tensor, ...]], list[Tensor]]]:
    """The embedding, its gradient and a fold, where a row is not by itself."""
    weight, tokens, dy = _random(device, 300, HIDDEN), _tokens(device, 64) % 300, _random(device, 64, HIDDEN)
    yield "embedding", _with_gradients(_swapped_embedding, 1), [weight, tokens, dy]
    blocks = torch.arange(64, device=device, dtype=torch.int32).view(4, 16)

    def folded(tokens: Tensor, dy: Tensor) -> tuple[Tensor]:
        total = torch.zeros(300, HIDDEN, device=device)
        fold(total, tokens, dy, blocks)
        return (total,)

    yield "embedding.fold", folded, [tokens.clone(), dy.clone()]


def _accuracy(device: torch.device) -> Iterator[tuple[str, bool, str]]:
    logits, targets, grads = _logits(device, 67)
    wide = logits.double().requires_grad_()
    gold = torch.log_softmax(wide, -1).gather(-1, targets[:, None])[:, 0]
    (slope,) = torch.autograd.grad(gold, wide, grads.double())
    for way in (logprob, batch_invariant_logprob):
        found, dx = _with_gradients(way, 1)(logits, targets, grads)
        error = (found - gold).abs().max().item()
        yield f"{way.__name__}: error against fp64", error <= 4e-6, f"{error:.2e}"
        error = ((dx - slope).norm() / slope.norm()).item()
        yield f"{way.__name__}: gradient's relative error against fp64", error <= 3e-3, f"{error:.2e}"
    gate, up = _random(device, 67, INNER), _random(device, 67, INNER)
    error = _relative(swiglu(gate, up), F.silu(gate.double()) * up.double())
    yield "swiglu: relative error against fp64", error <= 3e-3, f"{error:.2e}"


def _graph(device: torch.device) -> tuple[str, bool, str]:
    """All forwards and backwards captured in one graph, replayed on other inputs."""
    names, calls, inputs = zip(*_operators(device), *_lookups(device), strict=True)
    for call, tensors in zip(calls, inputs, strict=True):
        call(*tensors)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [call(*tensors) for call, tensors in zip(calls, inputs, strict=True)]
    for tensors in inputs:
        for one in tensors:
            one.copy_(one.flip(0))
    graph.replay()
    fresh = [call(*tensors) for call, tensors in zip(calls, inputs, strict=True)]
    bad = [
        name
        for name, ours, theirs in zip(names, captured, fresh, strict=True)
        if not all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    ]
    return "a CUDA graph gives the bits of a launch", not bad, ", ".join(bad)


def _fold(device: torch.device) -> tuple[str, bool, str]:
    tokens, dy = _tokens(device, 4096), _random(device, 4096, HIDDEN)
    blocks = torch.randperm(4096, device=device).int().view(-1, 16)
    totals = [torch.zeros(VOCABULARY, HIDDEN, device=device) for _ in range(2)]
    fold(totals[0], tokens, dy, blocks)
    for part in blocks.split([1, 100, 3, 152]):
        fold(totals[1], tokens, dy, part)
    order = blocks.flatten().long()
    hot = tokens.mode().values
    chain = torch.zeros(HIDDEN, device=device)
    for row in order[tokens[order] == hot]:
        chain += dy[row].float()
    ok = torch.equal(*totals) and torch.equal(totals[0][hot], chain)
    return "embedding.fold: any cut gives the bits of the chain", ok, f"{int((tokens == hot).sum())} rows of one id"


def _compilations(device: torch.device) -> tuple[str, bool, str]:
    """Row counts from 1 up must not compile anything anew, once rows of one and of many have been seen."""
    import rlspec.kernels.logprob as logprobs
    import rlspec.kernels.swiglu as swiglus

    kernels = logprobs._stream, logprobs._spans, logprobs._join, logprobs._backward, swiglus._forward, swiglus._backward

    def run(rows: int) -> int:
        gate, up, dy = (_random(device, rows, INNER) for _ in range(3))
        _with_gradients(swiglu, 2)(gate, up, dy)
        logits, targets, grads = _logits(device, rows)
        for way in (logprob, batch_invariant_logprob):
            _with_gradients(way, 1)(logits, targets, grads)
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    counts = [run(rows) for rows in (5, 1, 2, 15, 16, 17, 64)]
    return "no compilation for a new row count", len(set(counts)) == 1, str(counts)


def _elementwise(device: torch.device) -> Iterator[dict[str, Any]]:
    size = ROWS * INNER * 2
    gate, up, dy = (_random(device, ROWS, INNER) for _ in range(3))
    shape = f"{ROWS} x {INNER}"
    yield _row("silu", shape, partial(silu, gate), "F.silu", partial(F.silu, gate), 2 * size)
    yield _row("swiglu", shape, partial(swiglu, gate, up), "F.silu · up", partial(_torch_swiglu, gate, up), 3 * size)
    pair = _backward(silu, [gate], dy), _backward(F.silu, [gate], dy)
    yield _row("silu backward", shape, pair[0], "autograd", pair[1], 3 * size)
    pair = _backward(swiglu, [gate, up], dy), _backward(_torch_swiglu, [gate, up], dy)
    yield _row("swiglu backward", shape, pair[0], "autograd", pair[1], 5 * size)
    for dtype, each in ((BF16, 6), (torch.float32, 10)):
        inputs = [(_random(device, ROWS, HIDDEN).to(dtype), _random(device, ROWS, HIDDEN)) for _ in range(3)]
        runs = [[partial(operator, *one) for one in inputs] for operator in (residual_add, torch.add)]
        name = "residual_add" if dtype == BF16 else "residual_add, fp32 + bf16"
        yield _row(name, f"{ROWS} x {HIDDEN}", runs[0], "+", runs[1], each * ROWS * HIDDEN)


def _tables(device: torch.device) -> Iterator[dict[str, Any]]:
    for heads in (HEADS, KV_HEADS):
        inputs = [_rotary(device, ROWS, heads) for _ in range(3 * HEADS // heads)]
        size = inputs[0][0].numel() * 4 + ROWS * WIDTH * 4
        shape = f"{ROWS} x {heads} x {WIDTH}"
        there = [partial(rope, x, *tables) for x, tables, _ in inputs]
        plain = [partial(_torch_rope, x, *(torch.cat((one, one), -1).to(BF16) for one in t)) for x, t, _ in inputs]
        yield _row("rope", shape, there, "torch, bf16 tables", plain, size)
        both = [partial(_with_gradients(rope, 1), x, *tables, dy) for x, tables, dy in inputs]
        yield _row("rope forward + backward", shape, both, "", None, 2 * size)
    tokens, weight = [_tokens(device, ROWS) for _ in range(3)], _random(device, VOCABULARY, HIDDEN)
    dy = _random(device, ROWS, HIDDEN)
    shape = f"{ROWS} of {VOCABULARY} x {HIDDEN}"
    size = ROWS * HIDDEN * 2 * 2
    pair = [[partial(operator, one, weight) for one in tokens] for operator in (embedding, F.embedding)]
    yield _row("embedding", shape, pair[0], "F.embedding", pair[1], size)
    pair = [_backward(partial(operator, tokens[0]), [weight], dy) for operator in (embedding, F.embedding)]
    yield _row("embedding backward", shape, pair[0], "autograd", pair[1], weight.numel() * 2 + size)
    total = torch.zeros(VOCABULARY, HIDDEN, device=device)
    blocks = torch.arange(ROWS, device=device, dtype=torch.int32).view(-1, 16)
    moved = ROWS * HIDDEN * 2 + len(tokens[0].unique()) * HIDDEN * 8
    yield _row("embedding.fold", shape, partial(fold, total, tokens[0], dy, blocks), "", None, moved)


def _logprobs(device: torch.device) -> Iterator[dict[str, Any]]:
    logits, targets, grads = _logits(device, LOGIT_ROWS)
    size = logits.numel() * 2
    shape = f"{LOGIT_ROWS} x {VOCABULARY}"
    for way in (batch_invariant_logprob, logprob):
        name = way.__name__
        pair = [partial(one, logits, targets) for one in (way, _cross_entropy)]
        yield _row(name, shape, pair[0], "F.cross_entropy", pair[1], size)
        pair = [_both(partial(_swapped, one, targets), [logits], grads) for one in (way, _cross_entropy)]
        yield _row(f"{name} forward + backward", shape, pair[0], "F.cross_entropy", pair[1], 3 * size)
        yield _row(f"{name}, entropy", shape, partial(way, logits, targets, entropy=True), "", None, size)
    for rows in (1, 16, 128):
        inputs = [(logits[at : at + rows], targets[at : at + rows]) for at in range(0, 2048, max(rows, 64))]
        theirs = [partial(_cross_entropy, *one) for one in inputs]
        for way in (batch_invariant_logprob, logprob):
            ours = [partial(way, *one) for one in inputs]
            floor = rows * VOCABULARY * 2
            yield _row(way.__name__, f"{rows} x {VOCABULARY}", ours, "F.cross_entropy", theirs, floor)


def _row(
    kernel: str, shape: str, ours: Run | list[Run], baseline: str, theirs: Run | list[Run] | None, moved: float
) -> dict[str, Any]:
    """Lists are calls on inputs that rotate, in one graph, for what takes less than 100 us."""
    runs = {"ours": ours} | ({} if theirs is None else {"theirs": theirs})
    sides = {name: graph(one, least=1) if isinstance(one, list) else (one, 1) for name, one in runs.items()}
    times = there_and_back(sides, HEAT)
    return {
        "kernel": kernel,
        "shape": shape,
        "ours_us": times["ours"],
        "baseline": baseline,
        "baseline_us": times.get("theirs"),
        "floor_us": moved / BYTES_PER_US,
    }


def _with_gradients(operator: Callable[..., Tensor], inputs: int) -> Callable[..., tuple[Tensor, ...]]:
    """The operator on tensors whose last is the gradient of the result: the result, the gradients of the first few."""

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        leaves = [one.detach().requires_grad_() for one in tensors[:inputs]]
        y = operator(*leaves, *tensors[inputs:-1])
        return y.detach(), *torch.autograd.grad(y, leaves, tensors[-1])

    return call


def _backward(operator: Callable[..., Tensor], tensors: list[Tensor], dy: Tensor) -> Run:
    leaves = [one.detach().requires_grad_() for one in tensors]
    y = operator(*leaves)
    return lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True)


def _both(operator: Callable[..., Tensor], tensors: list[Tensor], dy: Tensor) -> Run:
    leaves = [one.detach().requires_grad_() for one in tensors]
    return lambda: torch.autograd.grad(operator(*leaves), leaves, dy)


def _torch_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As transformers has it: tables of [B, T, D] in the dtype of x."""
    first, second = x.chunk(2, -1)
    return x * cos.unsqueeze(2) + torch.cat((-second, first), -1) * sin.unsqueeze(2)


def _torch_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets, reduction="none")


def _swapped_embedding(weight: Tensor, tokens: Tensor) -> Tensor:
    return embedding(tokens, weight)


def _swapped(operator: Callable[..., Tensor], second: Tensor, first: Tensor) -> Tensor:
    return operator(first, second)


def _random(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, device=device, dtype=BF16)


def _tokens(device: torch.device, count: int) -> Tensor:
    """Ids whose frequencies fall as those of words do: the most frequent is about a seventeenth of all."""
    return (VOCABULARY ** torch.rand(count, device=device, dtype=torch.float64)).long() - 1


def _rotary(device: torch.device, rows: int, heads: int) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
    angles = torch.rand(rows, 1, WIDTH // 2, device=device) * 100
    x, dy = (_random(device, rows, 1, heads, WIDTH) for _ in range(2))
    return x, (angles.cos(), angles.sin()), dy


def _logits(device: torch.device, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    logits = _random(device, rows, VOCABULARY) * 3
    return logits, torch.randint(VOCABULARY, (rows,), device=device), torch.randn(rows, device=device)


def _relative(found: Tensor, gold: Tensor) -> float:
    return ((found - gold).norm() / gold.norm()).item()
