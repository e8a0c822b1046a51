"""The part `gemm` of bench_kernels.py: det_gemm, linear_logprob and rms_norm at the shapes of Qwen3-8B.

Timing: CUDA graphs of some calls that rotate through weights larger than the cache. A function runs alone until it is
at steady heat (20 ms below 100 us a call, 500 ms above), then is measured; ours and the baseline in the order A B B A.
floor: the larger of operations over 790 TFLOP/s and bytes over 4.3 TB/s, the rates of cuBLAS and of a copy on an H200.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlspec.kernels import det_gemm as gemm
from rlspec.kernels import rms_norm as norm
from rlspec.kernels.det_gemm import det_gemm, fold
from rlspec.kernels.linear_logprob import linear_logprob
from rlspec.kernels.rms_norm import rms_norm

# Name: columns of the result and reduced width.
LAYERS = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gateup": (24576, 4096),
    "down": (4096, 12288),
    "lm_head": (151936, 4096),
}
ROWS = (1, 16, 32, 64, 128, 256, 512, 1024, 4096)
TOKENS, NORM_TOKENS = 4096, 16384
COLD = 300e6
BF16, EPS = torch.bfloat16, 1e-6

Call = Callable[[], Any]


def checks(device: torch.device) -> Iterator[tuple[str, bool, str]]:
    """Bits over the table of tiles, row counts, cuts of the rows, and captured graphs."""
    x, weight = _random(device, 200, 5000), _random(device, 416, 5000)
    found = []
    for tile in sorted({tile for entries in gemm.TILES.values() for _, tile in entries}):
        out = torch.full((200, 416), float("nan"), device=device)
        gemm._product(x, weight, out, tile)(device)
        found.append(out)
    plain = torch.empty_like(found[0])
    gemm._plain_product(x, weight, plain)(device)
    bad = sum(not torch.equal(one, plain) for one in found)
    yield "gemm: all tiles give the bits of the plain kernel, fp32 out", not bad, f"{bad} of {len(found)} differ"
    x, weight = _random(device, 1030, 4096), _random(device, 6144, 4096)
    yield "gemm: rows", *_rows_agree(lambda x: det_gemm(x, weight), x)
    total, parts = torch.zeros(2, 6144, 4096, device=device)
    dy, blocks = _random(device, 1000, 6144), _blocks(1000)
    fold(total, x[:1000], dy, blocks)
    for first, last in pairwise((0, 4, 32, len(blocks))):
        fold(parts, x[:1000], dy, blocks[first:last].to(device))
    yield "fold: cuts, gathered and in place", torch.equal(total, parts), ""
    weight, targets = _random(device, 20000, 4096) / 64, torch.arange(1030, device=device) * 19
    yield "linear_logprob: rows", *_rows_agree(lambda x, t: linear_logprob(x, weight, t), x, targets)
    weight = _random(device, 4096)
    yield "rms_norm: rows", *_rows_agree(lambda x: rms_norm(x, weight, eps=EPS), x)
    yield "graph", *_captured(device)


def timings(device: torch.device) -> Iterator[dict[str, Any]]:
    for name in LAYERS:
        yield from _products(device, name)
    yield from _gradients(device)
    yield from _head(device)
    yield from _norms(device)


def _products(device: torch.device, name: str) -> Iterator[dict[str, Any]]:
    columns, width = LAYERS[name]
    weights = [_random(device, columns, width) for _ in range(_copies(columns * width * 2))]
    for rows in ROWS:
        x = _random(device, rows, width)
        ours = [_bind(det_gemm, x, weight) for weight in weights]
        theirs = [_bind(F.linear, x, weight) for weight in weights]
        size = 2 * (rows * width + columns * width + rows * columns)
        yield _row(f"gemm {name}", f"M={rows}", ours, "cuBLAS", theirs, _floor(2 * rows * columns * width, size))


def _gradients(device: torch.device) -> Iterator[dict[str, Any]]:
    blocks, ragged = _blocks(TOKENS), torch.cat((_blocks(1000), _blocks(TOKENS - 1000, 1000)))
    for name in ("qkv", "gateup", "down"):
        columns, width = LAYERS[name]
        x, dy = _random(device, TOKENS, width), _random(device, TOKENS, columns)
        weight = _random(device, columns, width)
        work, shape = 2 * TOKENS * columns * width, f"T={TOKENS}"
        moved = 2 * (TOKENS * width + columns * width + TOKENS * columns)
        ours, theirs = [_bind(gemm._data_gradient, dy, weight)], [_bind(torch.mm, dy, weight)]
        yield _row(f"dx {name}", shape, ours, "cuBLAS", theirs, _floor(work, moved))
        total = torch.zeros(columns, width, device=device)
        theirs = [lambda: torch.addmm(total, dy.t(), x, out_dtype=torch.float32, out=total)]  # noqa: B023
        floor = _floor(work, moved + 6 * columns * width)
        yield _row(f"dw {name}", shape, [_bind(fold, total, x, dy, blocks)], "cuBLAS beta=1", theirs, floor)
        if name == "gateup":
            rows = ragged.to(device)
            yield _row(f"dw {name}, gathered", shape, [_bind(fold, total, x, dy, rows)], "cuBLAS beta=1", theirs, floor)


def _head(device: torch.device) -> Iterator[dict[str, Any]]:
    columns, width = LAYERS["lm_head"]
    x, weight = _random(device, TOKENS, width), _random(device, columns, width) / 64
    targets = torch.randint(columns, (TOKENS,), device=device)
    work, size = 2 * TOKENS * columns * width, 2 * width * (TOKENS + columns)
    ours, theirs = [_bind(linear_logprob, x, weight, targets)], [_bind(F.linear, x, weight)]
    yield _row("linear_logprob", f"M={TOKENS}", ours, "cuBLAS logits", theirs, _floor(work, size))
    leaves = (x.requires_grad_(), weight.requires_grad_())

    def both(value: Callable[[], Tensor]) -> list[Call]:
        return [lambda: torch.autograd.grad(value(), leaves, gradient)]

    gradient = torch.ones(TOKENS, device=device)
    ours = both(lambda: linear_logprob(x, weight, targets))
    theirs = both(lambda: F.cross_entropy(F.linear(x, weight).float(), targets, reduction="none"))
    row = _row("linear_logprob, fwd + bwd", f"M={TOKENS}", ours, "cuBLAS + cross_entropy", theirs, _floor(3 * work, 0))
    yield row


def _norms(device: torch.device) -> Iterator[dict[str, Any]]:
    for name, shape in (("rms_norm", (NORM_TOKENS, 4096)), ("qk_norm", (1, NORM_TOKENS, 32, 128))):
        x, dy, weight = _random(device, *shape), _random(device, *shape), _random(device, shape[-1])
        size, say = 2 * x.numel(), "x".join(map(str, shape))
        ours, theirs = [lambda: rms_norm(x, weight, eps=EPS)], [lambda: F.rms_norm(x, weight.shape, weight, EPS)]  # noqa: B023
        yield _row(name, say, ours, "F.rms_norm", theirs, _floor(0, 2 * size))
        _, root = torch.ops.aten._fused_rms_norm(x, weight.shape, weight, EPS)
        rows, dx = norm._rows(x), torch.empty_like(x)
        ours = [_bind(norm._data_launch(rows, weight, norm._rows(dy), dx, EPS), device)]
        backward = torch.ops.aten._fused_rms_norm_backward
        theirs = [_bind(backward, dy, x, weight.shape, root, weight, [True, False])]
        yield _row(f"{name} dx", say, ours, "F.rms_norm backward", theirs, _floor(0, 3 * size))
        total = torch.zeros(shape[-1], device=device)
        heads = x.shape[2] if x.dim() == 4 else 1
        positions = (x.view(-1, heads, shape[-1]), dy.view(-1, heads, shape[-1]))
        blocks = _blocks(NORM_TOKENS).to(device)
        ours = [lambda: norm.fold(total, *positions, blocks, eps=EPS)]  # noqa: B023
        theirs = [_bind(backward, dy, x, weight.shape, root, weight, [False, True])]
        yield _row(f"{name} dw", say, ours, "F.rms_norm backward", theirs, _floor(0, 2 * size))


def _row(
    kernel: str, shape: str, ours: list[Call], baseline: str, theirs: list[Call], floor_us: float
) -> dict[str, Any]:
    a, b = _graph(ours), _graph(theirs)
    first, second, third, last = (_steady(*side) for side in (a, b, b, a))
    times = {"ours_us": (first + last) / 2, "baseline": baseline, "baseline_us": (second + third) / 2}
    return {"kernel": kernel, "shape": shape, **times, "floor_us": floor_us}


def _graph(calls: list[Call]) -> tuple[Call, int]:
    """A replay, and how many calls it makes; at least eight, so that the start of a graph does not count."""
    calls = calls * -(-8 // len(calls))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.synchronize()
    first = _elapsed(calls[0], 1)
    calls = calls if first < 2000 else calls[:2]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay, len(calls)


def _steady(replay: Call, calls: int) -> float:
    """Microseconds a call."""
    replay()
    once = _elapsed(replay, 1)
    warm = 20e3 if once / calls < 100 else 500e3
    _elapsed(replay, int(warm / once) + 1)
    return _elapsed(replay, int(0.5 * warm / once) + 1) / calls


def _elapsed(call: Call, times: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / times


def _rows_agree(operator: Callable[..., Tensor], *tensors: Tensor) -> tuple[bool, str]:
    """A row is the same in calls of few and of many rows."""
    whole = operator(*tensors)
    counts = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 257, 513, 1000)
    bad = [n for n in counts if not torch.equal(operator(*(one[3 : 3 + n] for one in tensors)), whole[3 : 3 + n])]
    return not bad, f"differ at {bad}" if bad else ""


def _captured(device: torch.device) -> tuple[bool, str]:
    """All operators, forward and backward, captured; replayed on other inputs."""
    x, weight, targets = _random(device, 40, 512), _random(device, 1000, 512), torch.arange(40, device=device)
    head, scale = _random(device, 512), torch.zeros(1000, 512, device=device)
    table = _blocks(40).to(device)

    def work() -> list[Tensor]:
        leaves = [one.detach().requires_grad_() for one in (x, weight, head)]
        y = rms_norm(leaves[0], leaves[2], eps=EPS)
        loss = det_gemm(y, leaves[1]).float().sum() + linear_logprob(y, leaves[1], targets).sum()
        fold(scale.zero_(), x, det_gemm(x, weight), table)
        return [scale, *torch.autograd.grad(loss, leaves)]

    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = work()
    x.copy_(_random(device, 40, 512))
    graph.replay()
    replayed = [one.clone() for one in held]
    bad = [i for i, one in enumerate(work()) if not torch.equal(one, replayed[i])]
    return not bad, f"results {bad} differ" if bad else ""


def _bind(function: Callable[..., Any], *args: Any) -> Call:
    return lambda: function(*args)


def _blocks(rows: int, first: int = 0) -> Tensor:
    table = torch.full((-(-rows // 16) * 16,), -1, dtype=torch.int32)
    table[:rows] = torch.arange(first, first + rows)
    return table.view(-1, 16)


def _copies(size: int) -> int:
    return max(2, -(-int(COLD) // size))


def _floor(operations: float, size: float) -> float:
    return max(operations / 790e6, size / 4.3e6)


def _random(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, device=device, dtype=BF16)
