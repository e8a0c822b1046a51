"""Broken operators, one table a fault, each the canonical operator with that fault in it and nothing else.

The controls beside this file say which judgment must catch which. A fault of the value keeps the right gradients, and a
fault of the gradients the right value, so that no other judgment turns red on its account.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from rlspec.device import canonical
from rlspec.device.gradients import reciprocal_rms, tree_sum
from rlspec.device.operators import Dispatch, Routing, Segment, Segments

BLOCK = 16
FEW = 8


class _Instead(Function):
    """`value`, with the gradients of `right`."""

    @staticmethod
    def forward(ctx: Any, right: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        return upstream, None


class _Upstream(Function):
    """x as it is; `change` is done to the gradient on its way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        return ctx.change(upstream), None


def _rows(x: Tensor) -> int:
    return x.numel() // x.shape[-1]


# Values that depend on the layout. `wraps` takes the right weight gradient along.


def _logprob_in_rotated_order(logits: Tensor, targets: Tensor) -> Tensor:
    # Each row's sum in fp32 starts at another id for another number of rows.
    peak = logits.double().amax(-1)
    shares = canonical.exp(logits.double() - peak.unsqueeze(-1)).float().roll(targets.numel(), -1)
    chosen = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1).double()
    value = chosen - peak - canonical.log(tree_sum(shares).double())
    return _Instead.apply(canonical.logprob(logits, targets), value.float())


@wraps(canonical.rms_norm)
def _rms_norm_with_a_kernel_for_few_rows(
    x: Tensor, weight: Tensor, *, eps: float, round_before_weight: bool = False
) -> Tensor:
    return canonical.rms_norm(x, weight, eps=eps, round_before_weight=round_before_weight or _rows(x) < FEW)


@wraps(canonical.lm_head)
def _head_with_splits_by_rows(x: Tensor, weight: Tensor, *, out_dtype: torch.dtype) -> Tensor:
    # The parts meet in the dtype of the result, as where blocks add to it atomically.
    right = canonical.lm_head(x, weight, out_dtype=out_dtype)
    if _rows(x) >= FEW:
        return right
    halves = zip(x.chunk(2, -1), weight.chunk(2, -1), strict=True)
    first, second = (canonical.lm_head(*half, out_dtype=out_dtype) for half in halves)
    return _Instead.apply(right, first + second)


def _silu_with_negative_zeros(x: Tensor) -> Tensor:
    right = canonical.silu(x)
    return _Instead.apply(right, torch.where(right == 0, -0.0, right)) if _rows(x) < FEW else right


def _silu_with_other_zeros_without_gradients(x: Tensor) -> Tensor:
    # As a kernel for inference alone that ends in another instruction.
    right = canonical.silu(x)
    return right if torch.is_grad_enabled() else torch.where(right == 0, -right, right)


def _swiglu_that_ignores_strides(gate: Tensor, up: Tensor) -> Tensor:
    return _Instead.apply(canonical.swiglu(gate, up), canonical.swiglu(_as_contiguous(gate), _as_contiguous(up)))


def _swiglu_that_ignores_the_last_stride(gate: Tensor, up: Tensor) -> Tensor:
    return _Instead.apply(canonical.swiglu(gate, up), canonical.swiglu(_side_by_side(gate), _side_by_side(up)))


def _side_by_side(x: Tensor) -> Tensor:
    return x.detach().as_strided(x.shape, (*x.stride()[:-1], 1), x.storage_offset())


def _as_contiguous(x: Tensor) -> Tensor:
    strides = torch.empty(x.shape, device="meta").stride()
    return x.detach().as_strided(x.shape, strides, x.storage_offset())


def _silu_that_leaves_the_last_row(x: Tensor) -> Tensor:
    # It writes two tokens at a time, and forgets the last of an odd number.
    right = canonical.silu(x)
    value = torch.empty_like(right)
    pairs = _rows(x) // 2 * 2
    value.flatten(0, 1)[:pairs] = right.detach().flatten(0, 1)[:pairs]
    return _Instead.apply(right, value)


# A mixture of experts


@wraps(canonical.router)
def _router_of_equals_the_higher_first(x: Tensor, weight: Tensor, *, top_k: int, **options: Any) -> Routing:
    right = canonical.router(x, weight, top_k=top_k, **options)
    backwards = canonical.router(x.detach(), weight.detach().flip(0), top_k=top_k, **options).experts
    return right._replace(experts=len(weight) - 1 - backwards)


@wraps(canonical.grouped_gemm)
def _experts_with_splits_by_load(rows: Tensor, weight: Tensor, dispatch: Dispatch) -> Tensor:
    right = canonical.grouped_gemm(rows, weight, dispatch)
    pairs = zip(rows.detach().chunk(2, -1), weight.detach().chunk(2, -1), strict=True)
    first, second = (canonical.grouped_gemm(*half, dispatch) for half in pairs)
    sizes = torch.tensor(dispatch.sizes)
    few = (sizes < FEW).repeat_interleave(sizes).unsqueeze(-1)
    return _Instead.apply(right, torch.where(few, first + second, right))


def _combine_as_rows_arrive(rows: Tensor, weights: Tensor, dispatch: Dispatch) -> Tensor:
    # As where blocks add atomically: who is first depends on what else there is to do.
    slots = rows.detach()[dispatch.inverse].reshape(*weights.shape, -1) * weights.detach().unsqueeze(-1)
    value = torch.zeros_like(slots[:, 0])
    for slot in range(weights.shape[1]):
        value = value + slots[:, (slot + len(weights)) % weights.shape[1]]
    return _Instead.apply(canonical.combine(rows, weights, dispatch), value.to(rows.dtype))


ties_by_higher_expert = {"router": _router_of_equals_the_higher_first}
split_k_by_expert_load = {"grouped_gemm": _experts_with_splits_by_load}
combine_in_arrival_order = {"combine": _combine_as_rows_arrive}
layout_sensitive_sum = {"logprob": _logprob_in_rotated_order}
kernel_by_row_count = {"rms_norm": _rms_norm_with_a_kernel_for_few_rows}
split_k_by_rows = {"lm_head": _head_with_splits_by_rows}
zero_flip = {"silu": _silu_with_negative_zeros}
other_zero_without_gradients = {"silu": _silu_with_other_zeros_without_gradients}
strides_ignored = {"swiglu": _swiglu_that_ignores_strides}
last_stride_ignored = {"swiglu": _swiglu_that_ignores_the_last_stride}
stale_output = {"silu": _silu_that_leaves_the_last_row}


# Formulas that are wrong in every layout alike, forward and backward


@wraps(canonical.rms_norm)
def _rms_norm_with_eps_outside(x: Tensor, weight: Tensor, *, eps: float, round_before_weight: bool = False) -> Tensor:
    # 1 / (√mean + eps) is the right factor r of eps 0, divided by 1 + eps·r.
    factor = 1 / (1 + eps * reciprocal_rms(x.detach(), 0.0))
    normal = canonical.rms_norm(x, weight, eps=0.0, round_before_weight=round_before_weight)
    return (normal.double() * factor).to(x.dtype)


def _rope_with_a_base_of_its_own(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    # The slowest pair turns so little that its angle tells the position.
    half = cos.shape[-1]
    pairs = torch.arange(half, device=x.device) / half
    position = (torch.atan2(sin, cos)[..., -1:].double() * 1e4 ** pairs[-1].double()).round()
    angles = position * 1e6 ** -pairs.double()
    return canonical.rope(x, angles.cos().to(cos.dtype), angles.sin().to(sin.dtype))


@wraps(canonical.rms_norm)
def _rms_norm_with_eps_of_its_own(
    x: Tensor, weight: Tensor, *, eps: float, round_before_weight: bool = False
) -> Tensor:
    return canonical.rms_norm(x, weight, eps=1000 * eps, round_before_weight=round_before_weight)


eps_of_its_own = {"rms_norm": _rms_norm_with_eps_of_its_own}
eps_outside_the_root = {"rms_norm": _rms_norm_with_eps_outside}
rope_base = {"rope": _rope_with_a_base_of_its_own}


# Attention that meets the wrong keys. It runs its backward once a sample, as the canonical one does.

Pair = Callable[..., tuple[Tensor, ...]]


class _Attention(Function):
    @staticmethod
    def forward(ctx: Any, forward: Pair, backward: Pair, scale: float, *given: Any) -> Tensor:
        out, lse = forward(*given, scale=scale)
        *of_heads, ctx.segments = given
        ctx.save_for_backward(*of_heads, out, lse)
        ctx.way, ctx.scale = backward, scale
        return out

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *ctx.way(*ctx.saved_tensors, upstream, ctx.segments, scale=ctx.scale), None


def _attention(forward: Pair, backward: Pair) -> Callable[..., Tensor]:
    def attention(query: Tensor, key: Tensor, value: Tensor, segments: Segments, *, scale: float) -> Tensor:
        return _Attention.apply(forward, backward, scale, query, key, value, segments)

    attention.forward = forward  # type: ignore[attr-defined]
    attention.backward = backward  # type: ignore[attr-defined]
    return attention


def _without_lone_keys(segments: Segments) -> Segments:
    """Each query on its own, and where its last block would hold a single key, that block is never met."""
    entries = []
    for row, start, length, first, keys in segments.entries:
        for query in range(length):
            seen = keys - length + query + 1
            entries.append(Segment(row, start + query, 1, first, seen - (seen > 1 and seen % BLOCK == 1)))
    return Segments(tuple(entries), segments.rows, segments.queries, segments.keys, segments.device)


def _edge_forward(*tensors: Any, scale: float) -> tuple[Tensor, ...]:
    *rest, segments = tensors
    return canonical.attention_forward(*rest, _without_lone_keys(segments), scale=scale)


def _edge_backward(*tensors: Any, scale: float) -> tuple[Tensor, ...]:
    *rest, segments = tensors
    return canonical.attention_backward(*rest, _without_lone_keys(segments), scale=scale)


def _interleaved(query: Tensor, key: Tensor) -> tuple[list[int], list[int]]:
    """The query heads by h mod Hkv, where h // (Hq / Hkv) is due, and the way back."""
    heads = range(query.shape[2])
    order = sorted(heads, key=lambda head: (head % key.shape[2], head))
    return order, [order.index(head) for head in heads]


def _group_forward(query: Tensor, key: Tensor, *rest: Any, scale: float) -> tuple[Tensor, ...]:
    order, back = _interleaved(query, key)
    out, lse = canonical.attention_forward(query[:, :, order], key, *rest, scale=scale)
    return out[:, :, back], lse[:, :, back]


def _group_backward(query: Tensor, key: Tensor, value: Tensor, *rest: Any, scale: float) -> tuple[Tensor, ...]:
    order, back = _interleaved(query, key)
    *of_heads, segments = rest
    moved = (one[:, :, order] for one in of_heads)
    dq, dk, dv = canonical.attention_backward(query[:, :, order], key, value, *moved, segments, scale=scale)
    return dq[:, :, back], dk, dv


key_at_a_block_edge = {"attention": _attention(_edge_forward, _edge_backward)}
head_of_a_group = {"attention": _attention(_group_forward, _group_backward)}


# Gradients


def _per_chunk(query: Tensor, key: Tensor, value: Tensor, segments: Segments, *, scale: float) -> Tensor:
    """The canonical attention without its backward of whole samples: autograd runs one a call."""
    return canonical.attention(query, key, value, segments, scale=scale)


def _values_alone(*tensors: Any, scale: float) -> tuple[Tensor, ...]:
    dq, dk, dv = canonical.attention_backward(*tensors, scale=scale)
    return torch.zeros_like(dq), torch.zeros_like(dk), dv


def _logprob_of_one_upstream_value(logits: Tensor, targets: Tensor) -> Tensor:
    return _Upstream.apply(canonical.logprob(logits, targets), lambda upstream: upstream[:1, :1].expand_as(upstream))


def _silu_of_the_first_row(x: Tensor) -> Tensor:
    return _Upstream.apply(canonical.silu(x), lambda upstream: upstream[:1].expand_as(upstream))


def _swiglu_with_zeros(gate: Tensor, up: Tensor) -> Tensor:
    return _Upstream.apply(canonical.swiglu(gate, up), torch.zeros_like)


class _InCallOrder:
    """A weight gradient that adds rows as they come."""

    def __init__(self, weight: Tensor) -> None:
        self.total = torch.zeros(weight.shape, device=weight.device)

    def add(self, x: Tensor, dy: Tensor, identity: Any) -> None:
        for run in identity.runs:
            for row in range(run.row, run.row + run.length):
                self.total += dy[row].float().unsqueeze(-1) * x[row].float()

    def finish(self) -> Tensor:
        return self.total


def _gemm_that_adds_in_call_order(x: Tensor, weight: Tensor) -> Tensor:
    return canonical.det_gemm(x, weight)


_gemm_that_adds_in_call_order.weight_gradient = _InCallOrder  # type: ignore[attr-defined]


def _silu_without_backward(x: Tensor) -> Tensor:
    return canonical.silu(x).detach()


def _rope_without_backward_for_keys(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    # The model has four heads of queries and two of keys.
    out = canonical.rope(x, cos, sin)
    return out.detach() if x.shape[2] == 2 else out


def _attention_with_twice_the_gradients(*given: Any, scale: float) -> Tensor:
    # Where autograd runs through the call; what it promises beside it is right.
    return _Upstream.apply(canonical.attention(*given, scale=scale), lambda upstream: 2 * upstream)


_attention_with_twice_the_gradients.forward = canonical.attention_forward  # type: ignore[attr-defined]
_attention_with_twice_the_gradients.backward = canonical.attention_backward  # type: ignore[attr-defined]

autograd_unlike_its_backward = {"attention": _attention_with_twice_the_gradients}
no_backward_for_keys = {"rope": _rope_without_backward_for_keys}
attention_backward_per_chunk = {"attention": _per_chunk}
attention_backward_of_values_alone = {"attention": _attention(canonical.attention_forward, _values_alone)}
first_upstream_value = {"logprob": _logprob_of_one_upstream_value}
first_batch_row = {"silu": _silu_of_the_first_row}
zero_gradient = {"swiglu": _swiglu_with_zeros}
weight_gradient_in_call_order = {"det_gemm": _gemm_that_adds_in_call_order}
no_backward = {"silu": _silu_without_backward}


# Not even a result


def _silu_that_raises(x: Tensor) -> Tensor:
    raise RuntimeError("planted")


def _silu_in_fp32(x: Tensor) -> Tensor:
    return canonical.silu(x).float()


def _silu_over_its_input(x: Tensor) -> Tensor:
    made = canonical.silu(x)
    x.data.copy_(made.detach())
    return made


_TRANSPOSED: dict[int, Tensor] = {}


@wraps(canonical.det_gemm)
def _gemm_that_keeps_its_weight(x: Tensor, weight: Tensor) -> Tensor:
    kept = _TRANSPOSED.setdefault(weight.data_ptr(), weight.detach().clone())
    return _Instead.apply(canonical.det_gemm(x, weight), canonical.det_gemm(x.detach(), kept))


_RESULTS: dict[torch.Size, Tensor] = {}


def _silu_in_the_memory_of_the_last(x: Tensor) -> Tensor:
    right = canonical.silu(x)
    value = _RESULTS.setdefault(x.shape, torch.empty_like(right)).copy_(right.detach())
    return _Held.apply(right, value)


class _Held(Function):
    """As `_Instead`, in the memory of the value."""

    @staticmethod
    def forward(ctx: Any, right: Tensor, value: Tensor) -> Tensor:
        return value.detach()

    backward = _Instead.backward


gives_its_memory_again = {"silu": _silu_in_the_memory_of_the_last}
keeps_its_weight = {"det_gemm": _gemm_that_keeps_its_weight}
writes_into_its_input = {"silu": _silu_over_its_input}
raises = {"silu": _silu_that_raises, "swiglu": canonical.swiglu}
wrong_dtype = {"silu": _silu_in_fp32}
