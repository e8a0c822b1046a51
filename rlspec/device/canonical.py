"""Implementation `canonical`: operators whose bits do not depend on batch, packing, chunk, padding or order of rows.

Formulas: those of `rlspec.device.reference`. Signatures: `rlspec.device.operators`.

Promise. Every result of a row (of a query, in attention) and every gradient by it has the same bits in whatever call
it stands: prefill, chunks and decode agree, pads may hold NaN. What others are compared with where bits count.

How. Only elementwise +, −, × and ÷ are used, in fp64, and the results are rounded at the end (to bf16 by way of fp32,
as torch casts). IEEE 754 defines the bits of these, so they are the same in a vector, in its tail, in a thread's share
and on every device. A library's functions are not so defined: on a CPU, torch's sigmoid of a number differs in the last
bit with the number's place in the tensor, and its root is not the correctly rounded one. So exp, log and the root are
written out. Sums are loops whose order the logical row fixes: `product` adds ascending along the contracted dimension,
`tree_sum` adds neighbours, attention adds keys ascending. Multiply and add are two calls, for a fused pair would round
once in some places and twice in others; and there is no division by a Python number, which CUDA turns into a product.

Limits. Slow: a product is a loop over its contracted dimension, of steps as large as the result. Rotation, the sum
over experts and the residual work in the dtypes they are given, as the catalogue says.

Gradients. Those of inputs are the rows' own. A weight's gradient by autograd is a sum over the rows of one call, in
their order there, and autograd adds up the calls: it depends on the layout as any such sum does. The attribute
`weight_gradient` of an operator gives the sum that does not (`rlspec.device.gradients`). Likewise keys and values of a
sample get gradients of all its queries, so cut into calls they are right, but their bits are those of the cut:
`attention.backward`, once per sample over whole sequences, gives the bits that do not depend on it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from rlspec.device import checking, expert_gradients, gradients
from rlspec.device.gradients import reciprocal_rms, tree_sum
from rlspec.device.operators import Dispatch, Routing, Segment, Segments

VOCABULARY_BLOCK = 128  # ids in a step of the streaming log-prob: fixed, as the bits follow from it
_TERMS = 1 << 18  # terms of small products that are made at once, as the cache of a core holds them; not the bits


def embedding(tokens: Tensor, weight: Tensor) -> Tensor:
    """int64 ids [...], [V, H] -> [..., H]: row lookup. Reads the ids (host sync)."""
    checking.embedding(tokens, weight)
    return _Embedding.apply(tokens, weight)


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, round_before_weight: bool = False) -> Tensor:
    """[..., H], [H] -> [..., H]: x / √(mean(x²) + eps) · weight. Backward leaves out the early rounding."""
    checking.rms_norm(x, weight, eps)
    return _RmsNorm.apply(x, weight, eps, round_before_weight)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[B, T, heads, D], [B, T, D/2] twice -> as x: elementwise as it is, in the wider dtype of x and the tables."""
    checking.rope(x, cos, sin)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    # Widened here, so that the two gradients of each half meet before they are rounded.
    first, second = x.to(torch.promote_types(x.dtype, cos.dtype)).chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def attention(query: Tensor, key: Tensor, value: Tensor, segments: Segments, *, scale: float) -> Tensor:
    """[B, T, Hq, D], [B, S, Hkv, D] twice -> [B, T, Hq, D]: causal softmax(q·kᵀ·scale)·v within each segment."""
    checking.attention(query, key, value, segments, scale)
    return _Attention.apply(query, key, value, segments, scale)


def det_gemm(x: Tensor, weight: Tensor) -> Tensor:
    """[..., K], [N, K] -> [..., N]: x · weightᵀ, K ascending."""
    checking.linear(x, weight)
    return _Linear.apply(x, weight, x.dtype)


def silu(x: Tensor) -> Tensor:
    """x · sigmoid(x)."""
    checking.pointwise(x=x)
    return _Silu.apply(x)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up."""
    checking.pointwise(gate=gate, up=up)
    return _Swiglu.apply(gate, up)


def residual_add(residual: Tensor, x: Tensor) -> Tensor:
    """residual + x, in the dtype of the residual."""
    checking.residual_add(residual, x)
    return residual + x.to(residual.dtype)


def lm_head(x: Tensor, weight: Tensor, *, out_dtype: torch.dtype) -> Tensor:
    """[..., H], [V, H] -> [..., V] in `out_dtype`, H ascending."""
    checking.linear(x, weight, out_dtype)
    return _Linear.apply(x, weight, out_dtype)


def logprob(logits: Tensor, targets: Tensor) -> Tensor:
    """[..., V], [...] int64 -> [...] fp32: the log-sum-exp by a tree over the row. Reads the targets (host sync)."""
    checking.logprob(logits, targets)
    return _LogProb.apply(logits, targets, False)


def batch_invariant_logprob(logits: Tensor, targets: Tensor) -> Tensor:
    """As `logprob`, in one pass over blocks of the vocabulary, with a running maximum and a running sum."""
    checking.logprob(logits, targets)
    return _LogProb.apply(logits, targets, True)


def linear_logprob(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """[..., H], [V, H], [...] int64 -> [...] fp32: `logprob` of x · weightᵀ, which is never rounded. Host sync."""
    checking.linear_logprob(x, weight, targets)
    return _LinearLogProb.apply(x, weight, targets)


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
    """[N, H], [E, H] -> scores, and those of the k highest rounded logits; of equal ones the lower expert."""
    checking.router(x, weight, top_k, logits_dtype, choice, scoring)
    return Routing(*_Router.apply(x, weight, top_k, normalise, logits_dtype, choice, scoring))


def grouped_gemm(rows: Tensor, weight: Tensor, dispatch: Dispatch) -> Tensor:
    """[M, K], [E, N, K] -> [M, N]: each row times the transposed weight of its expert, K ascending."""
    checking.grouped_gemm(rows, weight, dispatch)
    return _GroupedGemm.apply(rows, weight, dispatch)


def combine(rows: Tensor, weights: Tensor, dispatch: Dispatch) -> Tensor:
    """[M, H], [N, k] -> [N, H]: weighted sum, slots ascending, in the wider dtype of rows and weights."""
    checking.combine(rows, weights, dispatch)
    return _Combine.apply(rows, weights, dispatch)


def attention_forward(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, *, scale: float
) -> tuple[Tensor, Tensor]:
    """As `attention`, and the log-sum-exp of each query's scores: fp32 [B, T, Hq], -inf on pads."""
    checking.attention(query, key, value, segments, scale)
    out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    lse = torch.full(query.shape[:3], -torch.inf, dtype=_wide(query.dtype), device=query.device)
    for segment in segments.entries:
        queries, keys = _places(segment)
        scores = _scores(query[queries], key[keys], scale)
        top = scores.amax(-1)
        shares = exp(scores - top.unsqueeze(-1))
        values, group = _heads_first(value[keys]), query.shape[2] // key.shape[2]
        total, mixed = torch.zeros_like(top), torch.zeros_like(_heads_first(query[queries]))
        for position, first in _meetings(segment):
            share = shares[:, first:, position]
            total[:, first:] += share
            mixed[:, first:] += share.unsqueeze(-1) * _repeat(values[:, position], group).unsqueeze(1)
        out[queries] = (mixed / total.unsqueeze(-1)).transpose(0, 1).to(out.dtype)
        lse[queries] = (top + log(total)).transpose(0, 1).to(lse.dtype)
    return out, lse


def attention_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    segments: Segments,
    *,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, each in its shape and dtype; 0 on pads, where grad_out is not read.

    dQ adds keys ascending; dK and dV add the heads of a group ascending and, in each, queries ascending. Call it once
    per sample, over whole sequences. `out` is not needed here: Σ P·dP replaces Σ out·grad_out, which is rounded.
    """
    checking.attention(query, key, value, segments, scale)
    if not query.shape == out.shape == grad_out.shape or lse.shape != query.shape[:3]:
        shapes = f"out {list(out.shape)}, grad_out {list(grad_out.shape)}, lse {list(lse.shape)}"
        raise ValueError(f"{shapes} do not fit query {list(query.shape)}")
    # A sample's keys may be shared by several segments, so those sums are rounded at the end.
    sums = [torch.zeros(x.shape, dtype=torch.float64, device=x.device) for x in (query, key, value)]
    for segment in segments.entries:
        queries, keys = _places(segment)
        inputs = (query[queries], key[keys], value[keys], lse[queries], grad_out[queries])
        parts = _segment_gradients(segment, *inputs, scale)
        for total, place, part in zip(sums, (queries, keys, keys), parts, strict=True):
            total[place] += part.transpose(0, 1)
    dq, dk, dv = sums
    return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype)


def _segment_gradients(
    segment: Segment, query: Tensor, key: Tensor, value: Tensor, lse: Tensor, grad_out: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    group = query.shape[1] // key.shape[1]
    shares = exp(_scores(query, key, scale) - lse.double().transpose(0, 1).unsqueeze(-1))
    upstream, q, k = _heads_first(grad_out), _heads_first(query), _heads_first(key)
    d_shares = product(upstream, _repeat(_heads_first(value), group))
    mean = torch.zeros_like(shares[..., 0])
    for position, first in _meetings(segment):
        mean[:, first:] += shares[:, first:, position] * d_shares[:, first:, position]
    d_scores = shares * (d_shares - mean.unsqueeze(-1)) * scale
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(k)
    for position, first in _meetings(segment):
        dq[:, first:] += d_scores[:, first:, position].unsqueeze(-1) * _repeat(k[:, position], group).unsqueeze(1)
    earlier = segment.key_length - segment.query_length
    for head in range(group):
        for index in range(segment.query_length):
            seen = earlier + index + 1
            dk[:, :seen] += d_scores[head::group, index, :seen].unsqueeze(-1) * q[head::group, index].unsqueeze(1)
            dv[:, :seen] += shares[head::group, index, :seen].unsqueeze(-1) * upstream[head::group, index].unsqueeze(1)
    return dq, dk, dv


def _scores(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """[L, Hq, D], [S, Hkv, D] -> fp64 [Hq, L, S], -inf where the key is later than the query."""
    scores = product(_heads_first(query), _repeat(_heads_first(key), query.shape[1] // key.shape[1])) * scale
    length, keys = scores.shape[1:]
    later = torch.ones(length, keys, dtype=torch.bool, device=query.device).triu(keys - length + 1)
    return scores.masked_fill(later, -torch.inf)


def _meetings(segment: Segment) -> list[tuple[int, int]]:
    """(key, the first query that sees it), keys ascending. Keys that a query does not see are left out of its sums."""
    earlier = segment.key_length - segment.query_length
    return [(position, max(0, position - earlier)) for position in range(segment.key_length)]


def _places(segment: Segment) -> tuple[tuple[int, slice], tuple[int, slice]]:
    row, start, length, first, keys = segment
    return (row, slice(start, start + length)), (row, slice(first, first + keys))


def _heads_first(x: Tensor) -> Tensor:
    return x.double().transpose(0, 1).contiguous()


def _repeat(x: Tensor, group: int) -> Tensor:
    return x.repeat_interleave(group, 0)


# The arithmetic


def product(left: Tensor, right: Tensor) -> Tensor:
    """[..., M, K], [..., N, K] -> fp64 [..., M, N]: left · rightᵀ, one chain over K ascending for each element."""
    ranks = max(left.dim(), right.dim())
    left, right = (x.double()[(None,) * (ranks - x.dim())].movedim(-1, 0).contiguous() for x in (left, right))
    left, right = left.unsqueeze(-1), right.unsqueeze(-2)
    total = left[0] * right[0]
    step = max(1, _TERMS // max(1, total.numel()))
    for first in range(1, len(left), step):
        if step == 1:
            total += left[first] * right[first]
            continue
        for term in (left[first : first + step] * right[first : first + step]).unbind():
            total += term
    return total


def exp(x: Tensor) -> Tensor:
    """e^x of fp64, within a few units in the last place: x = k·ln 2 + r, the Taylor polynomial of e^r, times 2^k."""
    x = x.clamp(-746.0, 710.0)  # to 0 and to infinity; NaN stays
    power = torch.round(x * _LOG2_E)
    rest = (x - power * _LN2_HIGH) - power * _LN2_LOW
    value = torch.full_like(rest, 1 / math.factorial(13))
    for degree in range(12, -1, -1):
        value = value * rest + 1 / math.factorial(degree)
    # In two steps, as 2^k alone would leave the range of normal numbers; NaN has no k.
    whole = torch.nan_to_num(power).long()
    half = whole // 2
    return value * _power_of_two(half) * _power_of_two(whole - half)


def log(x: Tensor) -> Tensor:
    """ln x of positive, normal fp64: x = m·2^e with m near 1, and ln m = 2·artanh((m − 1) / (m + 1)) as a series."""
    mantissa, exponent = torch.frexp(x)
    small = mantissa < math.sqrt(0.5)
    mantissa = torch.where(small, mantissa * 2, mantissa)
    power = (exponent - small.int()).double()
    ratio = (mantissa - 1) / (mantissa + 1)
    square = ratio * ratio
    series = torch.full_like(ratio, 1 / 23)
    for odd in range(21, 0, -2):
        series = series * square + 1 / odd
    return power * _LN2_HIGH + (ratio * series * 2 + power * _LN2_LOW)


_LOG2_E = 1 / math.log(2)
_LN2_HIGH = float.fromhex("0x1.62e42fee00000p-1")  # 33 bits: its product with any exponent is exact
_LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")


def _power_of_two(exponent: Tensor) -> Tensor:
    return ((exponent + 1023) << 52).view(torch.float64)


def _sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + exp(-x))


def _log_sum_exp(x: Tensor) -> Tensor:
    top = x.amax(-1)
    return top + log(tree_sum(exp(x - top.unsqueeze(-1))))


def _streaming_log_sum_exp(x: Tensor) -> Tensor:
    top = torch.full_like(x[..., 0], -torch.inf)
    total = torch.zeros_like(top)
    for block in x.split(VOCABULARY_BLOCK, -1):
        higher = torch.maximum(top, block.amax(-1))
        # So far nothing but -inf: the shift must not be -inf - -inf.
        shift = torch.where(higher == -torch.inf, 0, higher)
        total = total * exp(top - shift) + tree_sum(exp(block - shift.unsqueeze(-1)))
        top = higher
    return top + log(total)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


# Forward and backward of each. `needs_input_grad` spares the weights' sums where nobody asks for them.


class _Embedding(Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, weight)
        return weight.index_select(0, tokens.flatten()).reshape(*tokens.shape, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        tokens, weight = ctx.saved_tensors
        total = torch.zeros(weight.shape, dtype=torch.float64, device=weight.device)
        for id_, row in zip(tokens.flatten().split(1), _flat(upstream).double().split(1), strict=True):
            total.index_add_(0, id_, row)
        return None, total.to(weight.dtype)


class _RmsNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, early: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.early = eps, early
        normal, _ = _normal(x, eps)
        if early:
            normal = normal.to(x.dtype).double()
        return (normal * weight.double()).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        normal, scale = _normal(x, ctx.eps)
        inner = upstream.double() * weight.double()
        mean = tree_sum(inner * normal).unsqueeze(-1) * (1 / x.shape[-1])
        dx = (scale * (inner - normal * mean)).to(x.dtype)
        if not ctx.needs_input_grad[1]:
            return dx, None, None, None
        seen = normal.to(x.dtype).double() if ctx.early else normal
        return dx, tree_sum(_flat(upstream.double() * seen), 0).to(weight.dtype), None, None


def _normal(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """fp64 x / √(mean(x²) + eps) and the factor [..., 1]."""
    scale = reciprocal_rms(x, eps)
    return x.double() * scale, scale


class _Attention(Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float) -> Tensor:
        out, lse = attention_forward(query, key, value, segments, scale=scale)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.segments, ctx.scale = segments, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        found = attention_backward(*ctx.saved_tensors, upstream, ctx.segments, scale=ctx.scale)
        return *found, None, None


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(_flat(x), weight).to(dtype).reshape(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx, dweight = _linear_gradients(_flat(x), weight, _flat(upstream), ctx.needs_input_grad)
        return None if dx is None else dx.reshape(x.shape), dweight, None


def _linear_gradients(
    x: Tensor, weight: Tensor, upstream: Tensor, needed: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    dx = product(upstream, weight.T).to(x.dtype) if needed[0] else None
    return dx, product(upstream.T, x.T).to(weight.dtype) if needed[1] else None


class _GroupedGemm(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, dispatch: Dispatch) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.sizes = dispatch.sizes
        parts = zip(rows.split(dispatch.sizes), weight.unbind(0), strict=True)
        return torch.cat([product(part, expert) for part, expert in parts]).to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        drows, dweight = torch.zeros_like(rows), torch.zeros_like(weight)
        start = 0
        for expert, size in enumerate(ctx.sizes):
            here = slice(start, start + size)
            start += size
            if size:
                drows[here] = product(upstream[here], weight[expert].T).to(rows.dtype)
            if size and ctx.needs_input_grad[1]:
                dweight[expert] = product(upstream[here].T, rows[here].T).to(weight.dtype)
        return drows, dweight if ctx.needs_input_grad[1] else None, None


class _Combine(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, dispatch: Dispatch) -> Tensor:
        ctx.save_for_backward(rows, weights)
        ctx.dispatch = dispatch
        slots = rows[dispatch.inverse].reshape(*weights.shape, -1) * weights.unsqueeze(-1)
        total = slots[:, 0]
        for slot in range(1, weights.shape[1]):
            total = total + slots[:, slot]
        return total.to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights = ctx.saved_tensors
        dispatch, wide = ctx.dispatch, upstream.double()
        drows = wide[dispatch.tokens] * weights.flatten()[dispatch.order].double().unsqueeze(-1)
        slots = rows[dispatch.inverse].reshape(*weights.shape, -1).double()
        return drows.to(rows.dtype), tree_sum(slots * wide.unsqueeze(1)).to(weights.dtype), None


class _Silu(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x.double() * _sigmoid(x.double())).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return (upstream.double() * _silu_slope(x.double())).to(x.dtype)


class _Swiglu(Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return (gate.double() * _sigmoid(gate.double()) * up.double()).to(gate.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        wide, g = upstream.double(), gate.double()
        dgate = wide * up.double() * _silu_slope(g)
        return dgate.to(gate.dtype), (wide * (g * _sigmoid(g))).to(up.dtype)


def _silu_slope(x: Tensor) -> Tensor:
    share = _sigmoid(x)
    return share * (1 + x * (1 - share))


class _LogProb(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, streaming: bool) -> Tensor:
        wide = logits.double()
        lse = _streaming_log_sum_exp(wide) if streaming else _log_sum_exp(wide)
        ctx.save_for_backward(logits, targets, lse)
        return _chosen(wide, targets, lse).to(_wide(logits.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        logits, targets, lse = ctx.saved_tensors
        return _logit_gradients(logits.double(), targets, lse, upstream).to(logits.dtype), None, None


class _LinearLogProb(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        logits = product(_flat(x), weight)
        lse = _log_sum_exp(logits)
        ctx.save_for_backward(x, weight, targets, lse)
        return _chosen(logits, targets.flatten(), lse).to(_wide(x.dtype)).reshape(targets.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, targets, lse = ctx.saved_tensors
        dlogits = _logit_gradients(product(_flat(x), weight), targets.flatten(), lse, upstream.flatten())
        dx, dweight = _linear_gradients(_flat(x), weight, dlogits, ctx.needs_input_grad)
        return None if dx is None else dx.reshape(x.shape), dweight, None


def _chosen(logits: Tensor, targets: Tensor, lse: Tensor) -> Tensor:
    return logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - lse


def _logit_gradients(logits: Tensor, targets: Tensor, lse: Tensor, upstream: Tensor) -> Tensor:
    """upstream · (1 at the target − softmax)."""
    wide = upstream.double().unsqueeze(-1)
    shares = exp(logits - lse.unsqueeze(-1))
    ids = torch.arange(logits.shape[-1], device=logits.device)
    return wide * ((ids == targets.unsqueeze(-1)).double() - shares)


class _Router(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        top_k: int,
        normalise: bool,
        dtype: torch.dtype,
        choice: Tensor | None,
        scoring: str,
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits, shares = _scores_of_experts(x, weight, dtype, scoring)
        rounded = shares.to(_wide(dtype))
        if choice is None:
            choice = _best(logits, top_k)
        weights = shares.gather(-1, choice)
        total = _slot_sum(weights)
        ctx.save_for_backward(x, weight, shares, choice, total)
        ctx.normalise, ctx.scoring = normalise, scoring
        ctx.mark_non_differentiable(choice)
        return rounded, (weights / total if normalise else weights).to(rounded.dtype), choice

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, upstream_weights: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        x, weight, shares, choice, total = ctx.saved_tensors
        divisor = total if ctx.normalise else None
        dlogits = _router_slopes(shares, choice, divisor, upstream, upstream_weights, ctx.scoring)
        dx, dweight = _linear_gradients(x, weight, dlogits, ctx.needs_input_grad)
        return dx, dweight, None, None, None, None, None


def _scores_of_experts(x: Tensor, weight: Tensor, dtype: torch.dtype, scoring: str) -> tuple[Tensor, Tensor]:
    """fp64 [N, E]: logits, rounded to `dtype`, and what softmax or sigmoid makes of them."""
    logits = product(x, weight).to(dtype).double()
    return logits, exp(logits - _log_sum_exp(logits).unsqueeze(-1)) if scoring == "softmax" else _sigmoid(logits)


def _best(logits: Tensor, top_k: int) -> Tensor:
    return logits.sort(dim=-1, descending=True, stable=True).indices[:, :top_k].contiguous()


def _router_slopes(
    shares: Tensor, choice: Tensor, total: Tensor | None, upstream: Tensor, upstream_weights: Tensor, scoring: str
) -> Tensor:
    """fp64 [N, E]: the gradient of the logits; `total` [N, 1] is what the weights were divided by, if they were."""
    dweights = upstream_weights.double()
    if total is not None:
        dweights = (dweights - _slot_sum(dweights * shares.gather(-1, choice) / total)) / total
    dshares = upstream.double()
    for slot in range(choice.shape[1]):  # a choice that was handed in may name an expert twice
        dshares = dshares.scatter_add(-1, choice[:, slot : slot + 1], dweights[:, slot : slot + 1])
    if scoring == "sigmoid":
        return dshares * (shares * (1 - shares))
    return shares * (dshares - tree_sum(shares * dshares).unsqueeze(-1))


def _slot_sum(x: Tensor) -> Tensor:
    return tree_sum(x).unsqueeze(-1)


def _fused_head_gradient(weight: Tensor, lengths: Sequence[int] | None = None) -> gradients.WeightGradient:
    """Of the weight [V, H] of `linear_logprob`: the logits' gradients of each row, then as of a matrix."""

    def fold(accumulator: Tensor, x: Tensor, pairs: Tensor, blocks: Tensor) -> None:
        logits = product(x, weight)
        dlogits = _logit_gradients(logits, pairs[:, 1].long(), _log_sum_exp(logits), pairs[:, 0])
        gradients.fold_matrix(accumulator, x, dlogits.float(), blocks)

    return gradients.LogprobGradient(torch.zeros(weight.shape, device=weight.device), fold, lengths)


def _router_gradient(
    weight: Tensor,
    *,
    top_k: int,
    normalise: bool,
    logits_dtype: torch.dtype,
    scoring: str = "softmax",
    lengths: Sequence[int] | None = None,
) -> expert_gradients.RouterGradient:
    """Of the weight [E, H] of `router`: the forward of each row again, the logits' gradients, then as of a matrix."""

    def fold(accumulator: Tensor, x: Tensor, rows: Tensor, blocks: Tensor) -> None:
        logits, shares = _scores_of_experts(x, weight, logits_dtype, scoring)
        upstream, upstream_weights, choice = expert_gradients.parts(rows, len(weight), top_k)
        choice = _best(logits, top_k) if choice is None else choice
        total = _slot_sum(shares.gather(-1, choice)) if normalise else None
        slopes = _router_slopes(shares, choice, total, upstream, upstream_weights, scoring)
        gradients.fold_matrix(accumulator, x, slopes.float(), blocks)

    return expert_gradients.RouterGradient(torch.zeros(weight.shape, device=weight.device), fold, lengths)


router.weight_gradient = _router_gradient  # type: ignore[attr-defined]
router.statistics = expert_gradients.statistics  # type: ignore[attr-defined]
grouped_gemm.weight_gradient = expert_gradients.grouped_gradient  # type: ignore[attr-defined]
linear_logprob.weight_gradient = _fused_head_gradient  # type: ignore[attr-defined]
det_gemm.weight_gradient = gradients.matrix_gradient  # type: ignore[attr-defined]
lm_head.weight_gradient = gradients.matrix_gradient  # type: ignore[attr-defined]
rms_norm.weight_gradient = gradients.norm_gradient  # type: ignore[attr-defined]
embedding.weight_gradient = gradients.embedding_gradient  # type: ignore[attr-defined]
attention.forward = attention_forward  # type: ignore[attr-defined]
attention.backward = attention_backward  # type: ignore[attr-defined]
