"""Implementation `reference`: the plain mathematics of each operator in fp32 (fp64 for fp64 inputs), one rounding last.

What the other implementations are judged against: feed it upcast inputs and its results are not rounded at all.
No tensor is reused, nothing is fused, autograd derives every backward. Ids and targets are looked at (host sync).
Signatures: `rlspec.device.operators`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlspec.device import checking
from rlspec.device.operators import Dispatch, Routing, Segments


def embedding(tokens: Tensor, weight: Tensor) -> Tensor:
    """[B, T] int64, [V, H] -> [B, T, H]: row lookup."""
    checking.embedding(tokens, weight)
    return weight.index_select(0, tokens.flatten()).reshape(*tokens.shape, weight.shape[1])


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, round_before_weight: bool = False) -> Tensor:
    """[..., H], [H] -> [..., H]: x / sqrt(mean(x²) + eps) · weight. Zhang and Sennrich 2019, arXiv:1910.07467.

    `round_before_weight` rounds to the dtype of x before the weight too, as transformers does.
    """
    checking.rms_norm(x, weight, eps)
    wide = _wide(x)
    normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if round_before_weight:
        normal = normal.to(x.dtype)
    return (_wide(normal) * _wide(weight)).to(x.dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[B, T, heads, D], [B, T, D/2] twice -> as x: rotates the pairs (i, i + D/2). Su et al. 2021, arXiv:2104.09864.

    Products are taken in the wider dtype of x and the tables, so narrow tables mean narrow arithmetic.
    """
    checking.rope(x, cos, sin)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def attention(query: Tensor, key: Tensor, value: Tensor, segments: Segments, *, scale: float) -> Tensor:
    """[B, T, Hq, D], [B, S, Hkv, D] twice -> [B, T, Hq, D]: causal softmax(q·kᵀ·scale)·v within each segment.

    Query head h reads key head h // (Hq / Hkv). Pads are never read and get 0.
    """
    checking.attention(query, key, value, segments, scale)
    group = query.shape[2] // key.shape[2]
    out = torch.zeros_like(query)
    for row, start, length, first, keys in segments.entries:
        q = _wide(query[row, start : start + length])
        k = _wide(key[row, first : first + keys]).repeat_interleave(group, 1)
        v = _wide(value[row, first : first + keys]).repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        later = torch.ones(length, keys, dtype=torch.bool, device=q.device).triu(keys - length + 1)
        weights = torch.softmax(scores.masked_fill(later, -torch.inf), -1)
        out[row, start : start + length] = torch.einsum("hqk,khd->qhd", weights, v).to(query.dtype)
    return out


def det_gemm(x: Tensor, weight: Tensor) -> Tensor:
    """[..., K], [N, K] -> [..., N]: x · weightᵀ."""
    checking.linear(x, weight)
    return (_wide(x) @ _wide(weight).T).to(x.dtype)


def silu(x: Tensor) -> Tensor:
    """x · sigmoid(x)."""
    checking.pointwise(x=x)
    wide = _wide(x)
    return (wide * torch.sigmoid(wide)).to(x.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up. Shazeer 2020, arXiv:2002.05202."""
    checking.pointwise(gate=gate, up=up)
    wide = _wide(gate)
    return (wide * torch.sigmoid(wide) * _wide(up)).to(gate.dtype)


def residual_add(residual: Tensor, x: Tensor) -> Tensor:
    """residual + x."""
    checking.residual_add(residual, x)
    return (_wide(residual) + _wide(x)).to(residual.dtype)


def lm_head(x: Tensor, weight: Tensor, *, out_dtype: torch.dtype) -> Tensor:
    """[..., H], [V, H] -> [..., V]: the logits, rounded to `out_dtype`."""
    checking.linear(x, weight, out_dtype)
    return (_wide(x) @ _wide(weight).T).to(out_dtype)


def logprob(logits: Tensor, targets: Tensor) -> Tensor:
    """[..., V], [...] int64 -> [...] fp32: logit of the target less the log-sum-exp of its row."""
    checking.logprob(logits, targets)
    wide = _wide(logits)
    return wide.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - torch.logsumexp(wide, -1)


batch_invariant_logprob = logprob  # in what order the vocabulary is walked is no part of the definition


def linear_logprob(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """[..., H], [V, H], [...] int64 -> [...] fp32: `logprob` of x · weightᵀ, whose logits are not rounded."""
    checking.linear_logprob(x, weight, targets)
    return logprob(_wide(x) @ _wide(weight).T, targets)


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
    """[N, H], [E, H] -> softmax or sigmoid of E logits, the k highest and their scores; of equal ones the lower expert.

    `choice` [N, k] replaces the best k. `normalise` divides the chosen scores by their sum. The best are sought among
    the logits, whose order the scores keep: rounded exponentials would make equals of near ties.
    """
    checking.router(x, weight, top_k, logits_dtype, choice, scoring)
    logits = (_wide(x) @ _wide(weight).T).to(logits_dtype)
    probabilities = torch.softmax(_wide(logits), -1) if scoring == "softmax" else torch.sigmoid(_wide(logits))
    if choice is None:
        choice = logits.detach().sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = probabilities.gather(-1, choice)
    if normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return Routing(probabilities, weights, choice)


def router_statistics(
    probabilities: Tensor, experts: Tensor, pieces: Sequence[tuple[int, int]], *, together: bool
) -> tuple[Tensor, Tensor]:
    """What load-balance losses are made of: counts int64 [G, E] of choices, and summed scores [G, E].

    `pieces`: first row and length of each sequence in canonical order; other rows are pads. A loss by sequence takes
    G = n, one by micro-batch `together`, G = 1. One by global batch takes the latter and adds up the counts of all
    micro-batches and ranks.
    """
    count = probabilities.shape[1]
    rows = [slice(first, first + length) for first, length in pieces]
    counts = torch.stack([experts[here].flatten().bincount(minlength=count) for here in rows])
    sums = torch.stack([probabilities[here].sum(0) for here in rows])
    return (counts.sum(0, keepdim=True), sums.sum(0, keepdim=True)) if together else (counts, sums)


router.statistics = router_statistics  # type: ignore[attr-defined]


def grouped_gemm(rows: Tensor, weight: Tensor, dispatch: Dispatch) -> Tensor:
    """[M, K], [E, N, K] -> [M, N]: each row times the transposed weight of its expert."""
    checking.grouped_gemm(rows, weight, dispatch)
    parts = zip(rows.split(dispatch.sizes), weight.unbind(0), strict=True)
    return torch.cat([(_wide(part) @ _wide(expert).T).to(rows.dtype) for part, expert in parts])


def combine(rows: Tensor, weights: Tensor, dispatch: Dispatch) -> Tensor:
    """[M, H], [N, k] -> [N, H]: the weighted sum of each token's rows, slots ascending.

    Sums in the wider dtype of rows and weights, so narrow weights mean narrow arithmetic.
    """
    checking.combine(rows, weights, dispatch)
    slots = rows[dispatch.inverse].reshape(*weights.shape, -1) * weights.unsqueeze(-1)
    total = slots[:, 0]
    for slot in range(1, weights.shape[1]):
        total = total + slots[:, slot]
    return total.to(rows.dtype)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
