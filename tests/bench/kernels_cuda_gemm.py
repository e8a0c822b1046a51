"""The part `cuda_gemm` of bench_kernels.py: bits of csrc/det_gemm.cu and csrc/linear_logprob.cu beside Triton's.

Their times are in the part `gemm`, beside the same reading of cuBLAS.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rlspec.device import cuda_gemm as cuda
from rlspec.kernels import det_gemm as triton_gemm
from rlspec.kernels import linear_logprob as triton_head
from tests.bench.kernels_gemm import _blocks, _random, _rows_agree


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


def _product(x: Tensor, weight: Tensor, tile: cuda.Tile) -> Tensor:
    out = torch.full((x.shape[0], weight.shape[0]), float("nan"), device=x.device)
    cuda._product(x, weight, out, tile)
    return out
