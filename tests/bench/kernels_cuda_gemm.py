"""The part `cuda_gemm` of bench_kernels.py: csrc/det_gemm.cu and csrc/linear_logprob.cu at the shapes of Qwen3-8B.

Method, shapes and floors are those of kernels_gemm.py. Each shape is timed against cuBLAS and against Triton's kernel,
whose bits are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlspec.device import cuda_gemm as cuda
from rlspec.kernels import det_gemm as triton_gemm
from rlspec.kernels import linear_logprob as triton_head
from tests.bench.kernels_gemm import (
    LAYERS,
    ROWS,
    TOKENS,
    Call,
    _bind,
    _blocks,
    _copies,
    _floor,
    _graph,
    _random,
    _rows_agree,
    _steady,
)


def checks(device: torch.device) -> Iterator[tuple[str, bool, str]]:
    """Bits: every tile of the tables, row counts, tables of rows, and the fused head, beside Triton's."""
    x, weight = _random(device, 200, 5000), _random(device, 416, 5000)
    wanted = torch.empty(200, 416, device=device)
    triton_gemm._plain_product(x, weight, wanted)(device)
    bad = [tile for tile in (*cuda.FEW, *cuda.MANY) if not torch.equal(_product(x, weight, tile), wanted)]
    yield "gemm: all tiles give the bits of Triton, fp32 out", not bad, ", ".join(map(str, bad))
    x, weight = _random(device, 1030, 4096), _random(device, 6144, 4096)
    yield "gemm: rows", *_rows_agree(lambda x: cuda.det_gemm(x, weight), x)
    dy, blocks = _random(device, 1000, 6144), torch.cat((_blocks(333), _blocks(667, 333)))
    totals = torch.zeros(3, 6144, 4096, device=device)
    triton_gemm.fold(totals[0], x[:1000], dy, blocks)
    cuda.fold(totals[1], x[:1000], dy, blocks)
    cuda.fold(totals[2], x[:1000], dy, blocks[:7].to(device))
    cuda.fold(totals[2], x[:1000], dy, blocks[7:].to(device))
    same = torch.equal(totals[0], totals[1]) and torch.equal(totals[0], totals[2])
    yield "fold: ragged and cut, the bits of Triton", same, ""
    weight, targets = _random(device, 20000, 4096) / 64, torch.arange(1030, device=device) * 19
    yield "linear_logprob: rows", *_rows_agree(lambda x, t: cuda.linear_logprob(x, weight, t), x, targets)
    ours, theirs = (module.linear_logprob(x, weight, targets) for module in (cuda, triton_head))
    yield "linear_logprob: the bits of Triton", torch.equal(ours, theirs), ""


def timings(device: torch.device) -> Iterator[dict[str, Any]]:
    for name in LAYERS:
        yield from _products(device, name)
    yield from _gradients(device)
    yield from _head(device)


def _product(x: Tensor, weight: Tensor, tile: cuda.Tile) -> Tensor:
    out = torch.full((x.shape[0], weight.shape[0]), float("nan"), device=x.device)
    cuda._product(x, weight, out, tile)
    return out


def _products(device: torch.device, name: str) -> Iterator[dict[str, Any]]:
    columns, width = LAYERS[name]
    weights = [_random(device, columns, width) for _ in range(_copies(columns * width * 2))]
    for rows in ROWS:
        x = _random(device, rows, width)
        ours, theirs, triton = (
            [_bind(function, x, weight) for weight in weights]
            for function in (cuda.det_gemm, F.linear, triton_gemm.det_gemm)
        )
        floor = _floor(2 * rows * columns * width, 2 * (rows * width + columns * width + rows * columns))
        yield from _beside(f"gemm {name}", f"M={rows}", ours, {"cuBLAS": theirs, "triton": triton}, floor)


def _gradients(device: torch.device) -> Iterator[dict[str, Any]]:
    blocks, ragged = _blocks(TOKENS), torch.cat((_blocks(1000), _blocks(TOKENS - 1000, 1000))).to(device)
    for name in ("qkv", "gateup", "down"):
        columns, width = LAYERS[name]
        x, dy = _random(device, TOKENS, width), _random(device, TOKENS, columns)
        weight, total = _random(device, columns, width), torch.zeros(columns, width, device=device)
        work, moved = 2 * TOKENS * columns * width, 2 * (TOKENS * width + columns * width + TOKENS * columns)
        peers = {
            "cuBLAS": [_bind(torch.mm, dy, weight)],
            "triton": [_bind(triton_gemm._data_gradient, dy, weight)],
        }
        ours = [_bind(cuda._data_gradient, dy, weight)]
        yield from _beside(f"dx {name}", f"T={TOKENS}", ours, peers, _floor(work, moved))
        floor = _floor(work, moved + 6 * columns * width)
        for table, what in ((blocks, ""), (ragged, ", ragged")):
            library = [lambda: torch.addmm(total, dy.t(), x, out_dtype=torch.float32, out=total)]  # noqa: B023
            peers = {"cuBLAS beta=1": library, "triton": [_bind(triton_gemm.fold, total, x, dy, table)]}
            ours = [_bind(cuda.fold, total, x, dy, table)]
            yield from _beside(f"dw {name}{what}", f"T={TOKENS}", ours, peers, floor)


def _head(device: torch.device) -> Iterator[dict[str, Any]]:
    columns, width = LAYERS["lm_head"]
    x, weight = _random(device, TOKENS, width), _random(device, columns, width) / 64
    targets = torch.randint(columns, (TOKENS,), device=device)
    work, size = 2 * TOKENS * columns * width, 2 * width * (TOKENS + columns)
    ours = [_bind(cuda.linear_logprob, x, weight, targets)]
    peers = {
        "cuBLAS logits": [_bind(F.linear, x, weight)],
        "triton": [_bind(triton_head.linear_logprob, x, weight, targets)],
    }
    yield from _beside("linear_logprob", f"M={TOKENS}", ours, peers, _floor(work, size))
    leaves, gradient = (x.requires_grad_(), weight.requires_grad_()), torch.ones(TOKENS, device=device)

    def both(value: Call) -> list[Call]:
        return [lambda: torch.autograd.grad(value(), leaves, gradient)]

    ours = both(lambda: cuda.linear_logprob(x, weight, targets))
    peers = {
        "cuBLAS + cross_entropy": both(lambda: F.cross_entropy(F.linear(x, weight).float(), targets, reduction="none")),
        "triton": both(lambda: triton_head.linear_logprob(x, weight, targets)),
    }
    yield from _beside("linear_logprob, fwd + bwd", f"M={TOKENS}", ours, peers, _floor(3 * work, 0))


def _beside(
    kernel: str, shape: str, ours: list[Call], peers: dict[str, list[Call]], floor_us: float
) -> Iterator[dict[str, Any]]:
    """A row for each peer; measured in the order ours, peers, and back again."""
    graphs = [_graph(calls) for calls in (ours, *peers.values())]
    there, back = [_steady(*one) for one in graphs], [_steady(*one) for one in reversed(graphs)]
    ours_us, *theirs = ((first + last) / 2 for first, last in zip(there, reversed(back), strict=True))
    for name, peer_us in zip(peers, theirs, strict=True):
        times = {"ours_us": ours_us, "baseline": name, "baseline_us": peer_us}
        yield {"kernel": kernel, "shape": shape, **times, "floor_us": floor_us}
