"""The part `gemm` of bench_kernels.py: det_gemm, linear_logprob and rms_norm at the shapes of Qwen3-8B.

Products of both families, Triton and CUDA, beside the same reading of cuBLAS; the norms of Triton. Timing: clock.py;
graphs rotate through weights larger than the cache. floor: the larger of operations over 790 TFLOP/s and bytes over
4.3 TB/s, the rates of cuBLAS and of a copy on an H200.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rlspec.device import cuda_gemm, native
from rlspec.kernels import det_gemm as gemm
from rlspec.kernels import rms_norm as norm
from rlspec.kernels.det_gemm import det_gemm, fold
from rlspec.kernels.linear_logprob import linear_logprob
from rlspec.kernels.rms_norm import rms_norm
from tests.bench.clock import Call, there_and_back
from tests.bench.clock import graph as _graph

# Name: columns of the result and reduced width.
LAYERS = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gateup": (24576, 4096),
    "down": (4096, 12288),
    "lm_head": (151936, 4096),
}
ROWS = (1, 16, 32, 64, 128, 256, 512, 1024, 4096)
FEW_ROWS = (64, 128, 256)
TOKENS, NORM_TOKENS = 4096, 16384
COLD = 300e6
BF16, EPS = torch.bfloat16, 1e-6


class Family(NamedTuple):
    det_gemm: Callable[..., Tensor]
    data_gradient: Callable[..., Tensor]
    fold: Callable[..., None]
    linear_logprob: Callable[..., Tensor]


TRITON = Family(det_gemm, gemm._data_gradient, fold, linear_logprob)
CUDA = Family(cuda_gemm.det_gemm, cuda_gemm._data_gradient, cuda_gemm.fold, cuda_gemm.linear_logprob)


def checks(device: torch.device) -> Iterator[tuple[str, bool, str]]:
    """Bits over the table of tiles, row counts, cuts of the rows, and captured graphs."""
    for kind in KINDS:
        yield from kind(device)


def _tiles(device: torch.device) -> Iterator[tuple[str, bool, str]]:
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


def _rows(device: torch.device) -> Iterator[tuple[str, bool, str]]:
    x, weight = _random(device, 1030, 4096), _random(device, 6144, 4096)
    yield "gemm: rows", *_rows_agree(lambda x: det_gemm(x, weight), x)
    weight, targets = _random(device, 20000, 4096) / 64, torch.arange(1030, device=device) * 19
    yield "linear_logprob: rows", *_rows_agree(lambda x, t: linear_logprob(x, weight, t), x, targets)
    weight = _random(device, 4096)
    yield "rms_norm: rows", *_rows_agree(lambda x: rms_norm(x, weight, eps=EPS), x)


def _folds(device: torch.device) -> Iterator[tuple[str, bool, str]]:
    x = _random(device, 1000, 4096)
    total, parts = torch.zeros(2, 6144, 4096, device=device)
    dy, blocks = _random(device, 1000, 6144), _blocks(1000)
    fold(total, x, dy, blocks)
    for first, last in pairwise((0, 4, 32, len(blocks))):
        fold(parts, x, dy, blocks[first:last].to(device))
    yield "fold: cuts, gathered and in place", torch.equal(total, parts), ""
    yield "graph", *_captured(device)


KINDS = (_tiles, _rows, _folds)


def timings(device: torch.device) -> Iterator[dict[str, Any]]:
    families = {"triton": TRITON} | ({} if native.missing(device) else {"cuda": CUDA})
    for name in LAYERS:
        yield from _products(device, families, name)
    yield from _gradients(device, families)
    yield from _few_rows(device, families)
    yield from _head(device, families)
    yield from _norms(device)


def _products(device: torch.device, families: dict[str, Family], name: str) -> Iterator[dict[str, Any]]:
    columns, width = LAYERS[name]
    weights = [_random(device, columns, width) for _ in range(_copies(columns * width * 2))]
    for rows in ROWS:
        x = _random(device, rows, width)
        ours = {name: [_bind(one.det_gemm, x, weight) for weight in weights] for name, one in families.items()}
        theirs = [_bind(F.linear, x, weight) for weight in weights]
        floor = _floor(2 * rows * columns * width, 2 * (rows * width + columns * width + rows * columns))
        yield from _beside(f"gemm {name}", f"M={rows}", ours, "cuBLAS", theirs, floor)


def _gradients(device: torch.device, families: dict[str, Family]) -> Iterator[dict[str, Any]]:
    blocks, ragged = _blocks(TOKENS), torch.cat((_blocks(1000), _blocks(TOKENS - 1000, 1000))).to(device)
    chosen = ragged[ragged >= 0].long()
    for name in ("qkv", "o", "gateup", "down"):
        columns, width = LAYERS[name]
        x, dy = _random(device, TOKENS, width), _random(device, TOKENS, columns)
        weight, total = _random(device, columns, width), torch.zeros(columns, width, device=device)
        work, moved = 2 * TOKENS * columns * width, 2 * (TOKENS * width + columns * width + TOKENS * columns)
        ours = {name: [_bind(one.data_gradient, dy, weight)] for name, one in families.items()}
        theirs = [_bind(torch.mm, dy, weight)]
        yield from _beside(f"dx {name}", f"M={TOKENS}", ours, "cuBLAS", theirs, _floor(work, moved))
        floor = _floor(work, moved + 6 * columns * width)
        resumed = partial(torch.addmm, total, out_dtype=torch.float32, out=total)
        theirs = [partial(resumed, dy.t(), x)]
        ours = {name: [_bind(one.fold, total, x, dy, blocks)] for name, one in families.items()}
        yield from _beside(f"dw {name}", f"M={TOKENS}", ours, "cuBLAS beta=1", theirs, floor)
        if name == "gateup":  # rows of a table on the device, as samples of a batch have them
            theirs = [lambda: resumed(dy.index_select(0, chosen).t(), x.index_select(0, chosen))]  # noqa: B023
            ours = {name: [_bind(one.fold, total, x, dy, ragged)] for name, one in families.items()}
            yield from _beside(f"dw {name}, gathered", f"M={TOKENS}", ours, "index_select, cuBLAS", theirs, floor)


def _few_rows(device: torch.device, families: dict[str, Family]) -> Iterator[dict[str, Any]]:
    columns, width = LAYERS["down"]
    weights = [_random(device, columns, width) for _ in range(_copies(columns * width * 2))]
    for rows in FEW_ROWS:
        dy = _random(device, rows, columns)
        ours = {name: [_bind(one.data_gradient, dy, weight) for weight in weights] for name, one in families.items()}
        theirs = [_bind(torch.mm, dy, weight) for weight in weights]
        floor = _floor(2 * rows * columns * width, 2 * (rows * width + columns * width + rows * columns))
        yield from _beside("dx down", f"M={rows}", ours, "cuBLAS", theirs, floor)


def _head(device: torch.device, families: dict[str, Family]) -> Iterator[dict[str, Any]]:
    columns, width = LAYERS["lm_head"]
    x, weight = _random(device, TOKENS, width), _random(device, columns, width) / 64
    targets = torch.randint(columns, (TOKENS,), device=device)
    work, size = 2 * TOKENS * columns * width, 2 * width * (TOKENS + columns)
    ours = {name: [_bind(one.linear_logprob, x, weight, targets)] for name, one in families.items()}
    theirs = [_bind(F.linear, x, weight)]
    yield from _beside("linear_logprob", f"M={TOKENS}", ours, "cuBLAS logits", theirs, _floor(work, size))
    leaves, gradient = (x.requires_grad_(), weight.requires_grad_()), torch.ones(TOKENS, device=device)

    def both(value: Callable[[], Tensor]) -> list[Call]:
        return [lambda: torch.autograd.grad(value(), leaves, gradient)]

    ours = {name: both(_bind(one.linear_logprob, x, weight, targets)) for name, one in families.items()}
    theirs = both(lambda: F.cross_entropy(F.linear(x, weight).float(), targets, reduction="none"))
    what = "linear_logprob forward + backward"
    yield from _beside(what, f"M={TOKENS}", ours, "cuBLAS + cross_entropy", theirs, _floor(3 * work, 0))


def _norms(device: torch.device) -> Iterator[dict[str, Any]]:
    for name, shape in (("rms_norm", (NORM_TOKENS, 4096)), ("qk_norm", (1, NORM_TOKENS, 32, 128))):
        x, dy, weight = _random(device, *shape), _random(device, *shape), _random(device, shape[-1])
        size, say = 2 * x.numel(), " x ".join(map(str, shape))
        ours, theirs = [lambda: rms_norm(x, weight, eps=EPS)], [lambda: F.rms_norm(x, weight.shape, weight, EPS)]  # noqa: B023
        yield _row(name, say, ours, "F.rms_norm", theirs, _floor(0, 2 * size))
        _, root = torch.ops.aten._fused_rms_norm(x, weight.shape, weight, EPS)
        rows, dx = norm._rows(x), torch.empty_like(x)
        ours = [_bind(norm._data_launch(rows, weight, norm._rows(dy), dx, EPS), device)]
        backward = torch.ops.aten._fused_rms_norm_backward
        theirs = [_bind(backward, dy, x, weight.shape, root, weight, [True, False])]
        yield _row(f"{name} data gradient", say, ours, "F.rms_norm backward", theirs, _floor(0, 3 * size))
        total = torch.zeros(shape[-1], device=device)
        heads = x.shape[2] if x.dim() == 4 else 1
        positions = (x.view(-1, heads, shape[-1]), dy.view(-1, heads, shape[-1]))
        blocks = _blocks(NORM_TOKENS).to(device)
        ours = [lambda: norm.fold(total, *positions, blocks, eps=EPS)]  # noqa: B023
        theirs = [_bind(backward, dy, x, weight.shape, root, weight, [False, True])]
        yield _row(f"{name} weight gradient", say, ours, "F.rms_norm backward", theirs, _floor(0, 2 * size))


def _row(
    kernel: str, shape: str, ours: list[Call], baseline: str, theirs: list[Call], floor_us: float
) -> dict[str, Any]:
    (row,) = _beside(kernel, shape, {"triton": ours}, baseline, theirs, floor_us)
    return row


def _beside(
    kernel: str, shape: str, ours: dict[str, list[Call]], baseline: str, theirs: list[Call], floor_us: float
) -> Iterator[dict[str, Any]]:
    """A row for each family, against one reading of the baseline."""
    times = there_and_back({name: _graph(calls) for name, calls in {**ours, baseline: theirs}.items()})
    for name in ours:
        figures = {"ours_us": times[name], "baseline": baseline, "baseline_us": times[baseline], "floor_us": floor_us}
        yield {"kernel": kernel, "shape": shape, "backend": name, **figures}


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
