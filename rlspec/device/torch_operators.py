"""Implementation `torch`: what a user of plain PyTorch has today, fused where torch fuses.

It promises neither batch invariance nor reproducible gradients on a GPU; operator specs judge it like any candidate.
On CUDA, ids and targets are left to the assertions of its kernels (no host sync). Signatures:
`rlspec.device.operators`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from rlspec.device import checking
from rlspec.device.operators import Dispatch, Routing, Segments


def embedding(tokens: Tensor, weight: Tensor) -> Tensor:
    """[B, T] int64, [V, H] -> [B, T, H]."""
    checking.embedding(tokens, weight, sync=False)
    return F.embedding(tokens, weight)


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, round_before_weight: bool = False) -> Tensor:
    """[..., H], [H] -> [..., H]; with `round_before_weight` the order of roundings of transformers."""
    checking.rms_norm(x, weight, eps)
    if not round_before_weight:
        return F.rms_norm(x, weight.shape, weight, eps)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[B, T, heads, D], [B, T, D/2] twice -> as x, by the rotate-half formula on doubled tables."""
    checking.rope(x, cos, sin)
    cos, sin = (torch.cat((table, table), -1).unsqueeze(-2) for table in (cos, sin))
    first, second = x.chunk(2, -1)
    return (x * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)


def attention(query: Tensor, key: Tensor, value: Tensor, segments: Segments, *, scale: float) -> Tensor:
    """[B, T, Hq, D], [B, S, Hkv, D] twice -> [B, T, Hq, D]: one call, causal if the rows are whole, else masked."""
    checking.attention(query, key, value, segments, scale)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if segments.whole:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True).transpose(1, 2)
    covered = segments.covered[:, :, None, None]
    # A query that sees nothing gives NaN in some backends, so pads see all and are dropped.
    mask = (segments.mask | ~segments.covered[:, :, None]).unsqueeze(1)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True).transpose(1, 2)
    return torch.where(covered, out, 0)


def det_gemm(x: Tensor, weight: Tensor) -> Tensor:
    """[..., K], [N, K] -> [..., N]; the name is the operator's, nothing here is determined by design."""
    checking.linear(x, weight)
    return F.linear(x, weight)


def silu(x: Tensor) -> Tensor:
    """x · sigmoid(x)."""
    checking.pointwise(x=x)
    return F.silu(x)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up, rounded after each."""
    checking.pointwise(gate=gate, up=up)
    return F.silu(gate) * up


def residual_add(residual: Tensor, x: Tensor) -> Tensor:
    """residual + x, x promoted to the dtype of the residual."""
    checking.residual_add(residual, x)
    return residual + x


def lm_head(x: Tensor, weight: Tensor, *, out_dtype: torch.dtype) -> Tensor:
    """[..., H], [V, H] -> [..., V]: a product in `out_dtype`."""
    checking.linear(x, weight, out_dtype)
    return F.linear(x.to(out_dtype), weight.to(out_dtype))


def logprob(logits: Tensor, targets: Tensor) -> Tensor:
    """[..., V], [...] int64 -> [...] fp32."""
    checking.logprob(logits, targets, sync=False)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.log_softmax(wide, -1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def batch_invariant_logprob(logits: Tensor, targets: Tensor) -> Tensor:
    """[..., V], [...] int64 -> [...] fp32: the logit less `torch.logsumexp`; the name is the operator's."""
    checking.logprob(logits, targets, sync=False)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return wide.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - torch.logsumexp(wide, -1)


def linear_logprob(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """[..., H], [V, H], [...] int64 -> [...] fp32: logits in the dtype of x, kept, then the log-softmax."""
    checking.linear_logprob(x, weight, targets, sync=False)
    return logprob(F.linear(x, weight), targets)


def router(
    x: Tensor,
    weight: Tensor,
    *,
    top_k: int,
    normalise: bool,
    logits_dtype: torch.dtype,
    choice: Tensor | None = None,
    scoring: str = "softmax",
) -> Routing:
    """[N, H], [E, H] -> as transformers: the best of the scores; `torch.topk` leaves open which of equals is first."""
    checking.router(x, weight, top_k, logits_dtype, choice, scoring, sync=False)
    logits = F.linear(x.to(logits_dtype), weight.to(logits_dtype))
    wide = torch.promote_types(logits.dtype, torch.float32)
    probabilities = F.softmax(logits, -1, dtype=wide) if scoring == "softmax" else torch.sigmoid(logits.to(wide))
    if choice is None:
        choice = probabilities.detach().topk(top_k, -1).indices
    weights = probabilities.gather(-1, choice)
    if normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return Routing(probabilities, weights, choice)


def router_statistics(
    probabilities: Tensor, experts: Tensor, pieces: Sequence[tuple[int, int]], *, together: bool
) -> tuple[Tensor, Tensor]:
    """As the reference: sums as torch makes them, counts by `torch.bincount`."""
    count = probabilities.shape[1]
    rows = [slice(first, first + length) for first, length in pieces]
    counts = torch.stack([experts[here].flatten().bincount(minlength=count) for here in rows])
    sums = torch.stack([probabilities[here].sum(0) for here in rows])
    return (counts.sum(0, keepdim=True), sums.sum(0, keepdim=True)) if together else (counts, sums)


router.statistics = router_statistics  # type: ignore[attr-defined]


def grouped_gemm(rows: Tensor, weight: Tensor, dispatch: Dispatch) -> Tensor:
    """[M, K], [E, N, K] -> [M, N]: a loop over the experts."""
    checking.grouped_gemm(rows, weight, dispatch)
    parts = zip(rows.split(dispatch.sizes), weight.unbind(0), strict=True)
    return torch.cat([F.linear(part, expert) for part, expert in parts])


def combine(rows: Tensor, weights: Tensor, dispatch: Dispatch) -> Tensor:
    """[M, H], [N, k] -> [N, H] by `index_add`, experts ascending on a CPU and in any order on a GPU."""
    checking.combine(rows, weights, dispatch)
    scaled = rows * weights.flatten()[dispatch.order].unsqueeze(-1)
    total = torch.zeros(len(weights), rows.shape[1], dtype=scaled.dtype, device=rows.device)
    return total.index_add(0, dispatch.tokens, scaled).to(rows.dtype)
