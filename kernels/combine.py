"""The weighted sum of what the experts gave a token.

    out[t]     = round( Σ_j w[t, j] · rows[r(t, j)] )      slots j ascending, from 0: one fused multiply-add each
    drows[r]   = round( w[t, j] · dout[t] )                (t, j) the token and slot of row r
    dw[t, j]   = Σ_h dout[t, h] · rows[r(t, j), h]         a fixed tree over the row

Rows stand in any order, that of the experts; r(t, j) = inverse[t · k + j].

Promise. A token's bits depend on its own rows, its weights, k and H: one program a token (and block of columns) adds
its slots in their order, so neither the order of the rows nor of the programs shows; no atomics. The tree of dw follows
from H and the dtype alone, for which rows are brought to one alignment, by a copy if need be. fp32 inside, one
rounding.

Limits. bf16, fp16, fp32 rows, up to 65536 wide; weights are read as fp32. A place outside is not looked for: on CUDA
`inverse` is not read by the host.

Source. The order of slots is that of transformers' Qwen3MoE: as the router chose them, the highest score first.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDEST = 65536


# ---- kernels ----


@triton.jit
def _forward(rows, weights, inverse, out, SLOTS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    acc = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(SLOTS):
        row = tl.load(inverse + token * SLOTS + slot)
        weight = tl.load(weights + token * SLOTS + slot).to(tl.float32)
        value = tl.load(rows + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        acc = tl.fma(value, tl.zeros_like(value) + weight, acc)
    tl.store(out + token * WIDTH + column, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    rows, weights, inverse, upstream, drows, dweights,
    SLOTS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, WEIGHTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One program a token: its upstream row is read once, each of its slots' rows once."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    dy = tl.load(upstream + token * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    for slot in tl.static_range(SLOTS):
        place = token * SLOTS + slot
        row = tl.load(inverse + place)
        if ROWS:
            weight = tl.load(weights + place).to(tl.float32)
            tl.store(drows + row * WIDTH + column, (dy * weight).to(drows.dtype.element_ty), mask=inside)
        if WEIGHTS:
            value = tl.load(rows + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
            tl.store(dweights + place, tl.sum(dy * value, 0).to(dweights.dtype.element_ty))


# ---- launches ----


class Launch(NamedTuple):
    """A kernel with all it needs, to be run, or only compiled by a test."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]

    def __call__(self, device: torch.device) -> None:
        with _on(device):
            self.kernel[self.grid](*self.args, **self.options)


def _on(device: torch.device) -> AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _forward_launch(rows: Tensor, weights: Tensor, inverse: Tensor, out: Tensor) -> Launch:
    (tokens, slots), width = weights.shape, rows.shape[1]
    block = min(triton.next_power_of_2(width), 2048)
    args = (rows, weights, inverse, out, slots, width, block)
    return Launch(_forward, (tokens, triton.cdiv(width, block)), args, {"num_warps": max(1, block // 512)})


def _backward_launch(
    rows: Tensor, weights: Tensor, inverse: Tensor, upstream: Tensor, drows: Tensor | None, dweights: Tensor | None
) -> Launch:
    (tokens, slots), width = weights.shape, rows.shape[1]
    block = triton.next_power_of_2(width)
    made = (rows if drows is None else drows, weights if dweights is None else dweights)
    args = (rows, weights, inverse, upstream, *made, slots, width, block, dweights is not None, drows is not None)
    return Launch(_backward, (tokens,), args, {"num_warps": min(32, max(1, block // 512)), "enable_fp_fusion": False})


# ---- public ----


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, inverse: Tensor) -> Tensor:
        rows, weights = _aligned(rows), weights.contiguous()
        ctx.save_for_backward(rows, weights, inverse)
        out = torch.empty((weights.shape[0], rows.shape[1]), dtype=rows.dtype, device=rows.device)
        _forward_launch(rows, weights, inverse, out)(rows.device)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, weights, inverse = ctx.saved_tensors
        drows = torch.empty_like(rows) if ctx.needs_input_grad[0] else None
        dweights = torch.empty_like(weights) if ctx.needs_input_grad[1] else None
        _backward_launch(rows, weights, inverse, _aligned(upstream), drows, dweights)(rows.device)
        return drows, dweights, None


def combine(rows: Tensor, weights: Tensor, inverse: Tensor) -> Tensor:
    """rows [N·k, H], weights [N, k], inverse int64 [N·k] -> [N, H] in the dtype of the rows.

    Differentiable in rows and weights. `inverse` is a permutation of the rows.
    Raises ValueError for other shapes, empty tensors, other dtypes and devices, and CPU tensors (fp32 rows and weights
    are taken under the interpreter).
    """
    shapes = f"rows {list(rows.shape)}, weights {list(weights.shape)}, inverse {list(inverse.shape)}"
    if rows.dim() != 2 or weights.dim() != 2 or not rows.numel() or not weights.numel():
        raise ValueError(f"{shapes}: combine takes [N·k, H], [N, k] and [N·k]")
    if len(rows) != weights.numel() or inverse.shape != (len(rows),) or rows.shape[1] > WIDEST:
        raise ValueError(f"{shapes}: combine takes [N·k, H], [N, k] and [N·k], H at most {WIDEST}")
    if rows.dtype not in DTYPES or weights.dtype not in DTYPES or inverse.dtype != torch.int64:
        given = f"{rows.dtype}, {weights.dtype}, {inverse.dtype}"
        raise ValueError(f"rows, weights and inverse are {given}: bf16, fp16 or fp32, and int64 are due")
    if not rows.device == weights.device == inverse.device:
        raise ValueError(f"rows, weights and inverse are on {rows.device}, {weights.device} and {inverse.device}")
    if not rows.is_cuda and (rows.device.type != "cpu" or isinstance(_forward, triton.JITFunction)):
        raise ValueError(f"rows are on {rows.device}: the kernels run on CUDA")
    if not rows.is_cuda and {rows.dtype, weights.dtype} != {torch.float32}:
        raise ValueError(f"rows are {rows.dtype}: the interpreter is right for fp32 only")
    return _Combine.apply(rows, weights, inverse.contiguous())


def _aligned(x: Tensor) -> Tensor:
    """Contiguous rows from a multiple of 16 bytes on, which the layout of threads follows from; else a copy."""
    fits = x.is_contiguous() and x.data_ptr() % 16 == 0
    return x if fits else x.clone(memory_format=torch.contiguous_format)
