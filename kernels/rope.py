"""rope: rotate the pairs (i, i + D/2) of each head by the token's angles. With c = cos[i] and s = sin[i]:

    y[i] = x[i] · c - x[i + D/2] · s        y[i + D/2] = x[i + D/2] · c + x[i] · s

The backward is the rotation by the opposite angle, the same kernel with s negated.

Promise: an element's bits depend on its pair and that pair's cos and sin. fp32 arithmetic, both products rounded (no
contraction to fma, which would treat the two halves unlike), and one rounding at the end.
Limits: bf16, fp16 and fp32; the tables may have another of these dtypes and get no gradient; all of D is rotated.
Heads of a fused qkv projection are read in place. Source: Su et al. 2021, arXiv:2104.09864; the order of the pairs is
that of the Llama and Qwen models in transformers.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, T, heads, D], cos and sin [B, T, D/2] -> as x. Each may be bf16, fp16 or fp32.

    Raises ValueError for other dtypes, for shapes or devices that do not fit, for empty tensors, for tables that
    require a gradient, and for a device without Triton.
    """
    shapes = f"x {list(x.shape)}, cos {list(cos.shape)}, sin {list(sin.shape)}"
    if any(one.dtype not in DTYPES for one in (x, cos, sin)):
        raise ValueError(f"rope takes bf16, fp16 or fp32, not {x.dtype}, {cos.dtype}, {sin.dtype}")
    if x.dim() != 4 or x.shape[3] % 2 or not cos.shape == sin.shape == (*x.shape[:2], x.shape[3] // 2):
        raise ValueError(f"rope takes x [B, T, heads, D] with an even D, cos and sin [B, T, D/2], not {shapes}")
    if not x.device == cos.device == sin.device:
        raise ValueError(f"rope: x is on {x.device}, cos on {cos.device}, sin on {sin.device}")
    if x.numel() == 0:
        raise ValueError(f"rope takes no empty tensors: {shapes}")
    if cos.requires_grad or sin.requires_grad:
        raise ValueError("rope gives no gradient to cos and sin")
    return _Rope.apply(x, cos, sin)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, False)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        return _rotate(grad, *ctx.saved_tensors, True), None, None


@triton.jit
def _in_turn(BEHIND: tl.constexpr):
    # Launched behind another kernel while that one is at work: wait for it, and let the next one come as near.
    if BEHIND:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit(do_not_specialize=["tokens"])
def _kernel(
    x, cos, sin, out, x_row, x_head, cos_row, sin_row, tokens, heads, half,
    BACK: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr, BEHIND: tl.constexpr = False,
):  # fmt: skip
    _in_turn(BEHIND)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None, None]
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[None, :, None]
    pair = tl.arange(0, PAIRS)[None, None, :]
    known = (token < tokens) & (pair < half)
    c = tl.load(cos + token * cos_row + pair, mask=known, other=0.0).to(tl.float32)
    s = tl.load(sin + token * sin_row + pair, mask=known, other=0.0).to(tl.float32)
    if BACK:
        s = -s
    inside = known & (head < heads)
    source = x + token * x_row + head * x_head + pair
    first = tl.load(source, mask=inside).to(tl.float32)
    second = tl.load(source + half, mask=inside).to(tl.float32)
    to = out + (token * heads + head) * (2 * half) + pair
    tl.store(to, (first * c - second * s).to(out.dtype.element_ty), mask=inside)
    tl.store(to + half, (second * c + first * s).to(out.dtype.element_ty), mask=inside)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    """One program a few tokens and heads. Widths and strides that follow from them reach the compiler alone."""
    *_, heads, width = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x, cos, sin = _tokens(x), _tokens(cos), _tokens(sin)
    tokens = len(x)
    pairs = triton.next_power_of_2(width // 2)
    block = min(triton.next_power_of_2(heads), max(1, 2048 // pairs))
    together = max(1, 2048 // (block * pairs))
    rows = [one.stride(0) if tokens > 1 else one[0].numel() for one in (x, cos, sin)]
    grid = triton.cdiv(tokens, together), triton.cdiv(heads, block)
    with _device(x):
        _kernel[grid](
            x, cos, sin, out, rows[0], x.stride(1), *rows[1:], tokens, heads, width // 2,
            BACK=back, TOKENS=together, HEADS=block, PAIRS=pairs, num_warps=4, enable_fp_fusion=False,
            **_behind(x),
        )  # fmt: skip
    return out


def _behind(x: Tensor) -> dict[str, bool]:
    """Options of a launch that may begin before the kernel in front of it has ended."""
    return {"BEHIND": True, "launch_pdl": True} if x.is_cuda else {}


def _tokens(x: Tensor) -> Tensor:
    """[B, T, ...] -> [B·T, ...] with the last dimension side by side: a view where there is one."""
    tokens = x.reshape(-1, *x.shape[2:])
    return tokens if tokens.stride(-1) == 1 else tokens.contiguous()


def _device(x: Tensor) -> AbstractContextManager[object]:
    if x.is_cuda:
        return torch.cuda.device(x.device)
    if isinstance(_kernel, triton.JITFunction):
        raise ValueError(f"rope runs on a CUDA device, not on {x.device}")
    return nullcontext()
