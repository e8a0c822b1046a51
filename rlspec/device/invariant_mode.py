"""`invariant_mode()`: within it, a model of torch or `transformers` runs on the kernels of `rlspec.kernels`, unedited.

Replaced, forward and backward: mm, addmm, matmul and `@` with a matrix of weights, F.linear, F.rms_norm, F.log_softmax
and F.softmax over the last dimension, F.cross_entropy, F.scaled_dot_product_attention, and sums and means of floats.
What is elementwise passes through. The other products and reductions of torch that are known here, and operators of
other libraries, are refused, never left to run: `NotInvariant` names the call and a remedy. A second net lies below
autograd, for what functions of torch call inside. Gathers pass, and the sums of their backward are torch's.

What is as in torch, and what is not:

- A bias is added to the fp32 sum of the product, and the result is rounded once.
- The quotient of F.cross_entropy and sums over tokens follow the written tree of `rlspec.kernels.row_reductions`.
- Attention is causal from a mask too, if that is causal with pads on either side: booleans, or floats of 0 and the
  lowest number. A query whose own key is masked is a pad: it gets 0, and passes no gradient. A mask is looked at on the
  host, once for each tensor. Key heads repeated by `expand` and `reshape`, or by `repeat_interleave`, count as grouped.
- eps of F.rms_norm is that of fp32 if none is given.

Gradients of activations do not depend on the batch; those of parameters are sums over it, by torch where they are not
weights of products. Leave the mode after the backward pass, so that it is watched too; checkpoints need that, and
`loss.backward()` rather than torch.autograd.grad.
Modes are of a thread, and nest. Under torch.compile, autocast, and on subclasses of tensors the mode refuses.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._dynamo import eval_frame
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from rlspec.kernels.attention import attention
from rlspec.kernels.det_gemm import det_gemm
from rlspec.kernels.logprob import logprob
from rlspec.kernels.rms_norm import rms_norm
from rlspec.kernels.row_reductions import log_softmax, row_mean, row_sum, softmax, spread

OUTSIDE = "Compute it outside invariant_mode()"
_BATCHED = "Weights must be a matrix; for attention use scaled_dot_product_attention (attn_implementation='sdpa')"
_COMPILED = "torch.compile: invariant_mode() takes eager code only. Call the model as it was before compilation"
_PLAIN_TYPES = (Tensor, torch.nn.Parameter)
_LIBRARIES = ("aten", "prim", "prims", "profiler", "rlspec")
# Operators of torch whose sums follow the shape of the batch. Sums and means are looked at one by one.
_REFUSED = re.compile(
    r"^(mm|bmm|addmm|addbmm|baddbmm|mv|addmv|dot|vdot|linear|matmul|linalg_\w+|_?addmm_\w+|\w*scaled_mm\w*"
    r"|\w*grouped_mm\w*|\w*convolution\w*|\w*conv_\w+|_?scaled_dot_product\w*|_flash_attention\w*|_fused_sdp\w*"
    r"|_efficient_attention\w*|_cudnn_attention\w*|\w*multi_head_attention\w*|_transformer_encoder_layer_fwd"
    r"|_?softmax\w*|_?log_softmax\w*|_\w*softmax_backward_data|logsumexp|_logcumsumexp|_fused_rms_norm\w*"
    r"|\w*(layer|group|batch)_norm\w*|nll_loss\w*|\w*loss|native_dropout|mean|nanmean|nansum|norm|var\w*|std\w*|prod"
    r"|cumsum|cumprod|renorm|_[cp]dist\w*|_fft_\w+|_trilinear|\w*(lstm|gru|rnn)\w*|\w*avg_pool\w*|_embedding_bag\w*"
    r"|\w*cross_entropy\w*|logcumsumexp|trace|segment_reduce|index_reduce|_?sparse\w*|upsample_\w+|col2im)_?$"
)


class NotInvariant(ValueError):
    """A call that the mode cannot honour. The message names the call, and says what to do instead."""


@contextmanager
def invariant_mode() -> Iterator[None]:
    """Within, this thread's calls of torch use kernels whose bits do not depend on the batch. See the module.

    Raises NotInvariant, a ValueError, at a call that it cannot honour, and when torch.compile traces it.
    """
    if torch.compiler.is_compiling() or eval_frame.get_eval_frame_callback():
        raise NotInvariant(_COMPILED)
    with _Operators(), _Functions():
        yield


class _Operators(TorchDispatchMode):
    """The net below autograd: refuses what functions of torch, or the backward pass, would let torch reduce."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        problem, is_sum = _known(func)
        if problem and _floats(args):
            raise NotInvariant(problem)
        if is_sum and _along_rows(*args[:2]):
            raise NotInvariant(
                "aten.sum: torch would sum along rows, as the gradient of a narrow tensor or inside a function. Use "
                f"torch.sum, and spread narrow tensors with * or +. {OUTSIDE}"
            )
        return func(*args, **(kwargs or {}))


@cache
def _known(func: Any) -> tuple[str, bool]:
    """Why an operator may not take floats, or nothing, and whether it is a sum; there are as many as torch has."""
    library, _, name = func._schema.name.partition("::")
    if library not in _LIBRARIES:
        return f"{library}.{name}: an operator of another library. {OUTSIDE}", False
    if _REFUSED.match(name):
        remedy = _BATCHED if "bmm" in name else OUTSIDE
        return f"aten.{name}: torch would reduce in an order that follows the batch. {remedy}", False
    return "", name == "sum"


class _Functions(TorchFunctionMode):
    """Calls of torch from Python go to the kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.layouts: Any = WeakTensorKeyDictionary()  # mask -> its version and _Layout
        self.expanded: Any = WeakTensorKeyDictionary()  # [B, H, n, S, D] -> [B, H, 1, S, D] before
        self.repeated: Any = WeakTensorKeyDictionary()  # [B, H·n, S, D] -> its version and [B, H, S, D] before
        self.noting: Mapping[Any, Callable[..., Any]] = {
            F.scaled_dot_product_attention: self._attention,
            Tensor.expand: self._expand,
            Tensor.reshape: self._reshape,
            torch.reshape: self._reshape,
            Tensor.repeat_interleave: self._repeat,
            torch.repeat_interleave: self._repeat,
            Tensor.backward: self._backward,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_dynamo_compiling() or eval_frame.get_eval_frame_callback():
            raise NotInvariant(_COMPILED)
        kwargs = kwargs or {}
        replacement = _REPLACED.get(func) or self.noting.get(func)
        try:
            if replacement is None:
                return func(*args, **kwargs)
            if func not in _SPREADING and func not in _FORM:
                _check_call(args, kwargs)
                kwargs.pop("out", None)
            made = replacement(*args, **kwargs)
            return func(*args, **kwargs) if made is NotImplemented else made
        except NotInvariant as error:
            raise NotInvariant(f"{resolve_name(func) or func}: {error}") from None
        except ValueError as error:
            if replacement is None:
                raise
            raise NotInvariant(f"{resolve_name(func) or func}: {error}. {OUTSIDE}") from error

    def _backward(
        self,
        loss: Tensor,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        if create_graph:
            raise NotInvariant("create_graph=True: the kernels have no second derivative")
        if gradient is None and loss.numel() != 1:
            raise NotInvariant(f"a result {list(loss.shape)} without its gradient. Pass it, or reduce to a number")
        wanted = () if inputs is None else (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
        given = torch.ones_like(loss) if gradient is None else gradient
        if given.shape != loss.shape:  # torch's own front refuses it, the engine would sum what broadcasts
            raise NotInvariant(f"the gradient of a result {list(loss.shape)} has the shape {list(given.shape)}")
        # Every function of torch takes the mode off while it runs; what was checkpointed must be computed again in it.
        with self:
            _engine_run_backward(
                (loss,), (given,), bool(retain_graph), False, wanted, allow_unreachable=True, accumulate_grad=True
            )

    def _expand(self, x: Tensor, *sizes: Any, **named: Any) -> Tensor:
        wide = x.expand(*sizes, **named)
        if wide.dim() == x.dim() == 5 and x.shape[2] == 1 and _same_but(x, wide, 2) and not wide.is_inference():
            self.expanded[wide] = x
        return wide

    def _reshape(self, x: Tensor, *sizes: Any, **named: Any) -> Tensor:
        made = x.reshape(*sizes, **named)
        narrow = self.expanded.get(x)
        if narrow is not None and made.shape == (x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:]):
            self.repeated[made] = made._version, narrow.squeeze(2)
        return made

    def _repeat(self, x: Tensor, repeats: Any, dim: int | None = None, **named: Any) -> Tensor:
        made = torch.repeat_interleave(x, repeats, dim, **named)
        if isinstance(repeats, int) and x.dim() == 4 and dim in (1, -3) and not made.is_inference():
            self.repeated[made] = made._version, x
        return made

    def _grouped(self, x: Tensor) -> Tensor:
        version, narrow = self.repeated.get(x, (None, None))
        return x if narrow is None or version != x._version else narrow

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if dropout_p:
            raise NotInvariant(f"dropout_p={dropout_p}. Use 0: model.eval(), or attention_dropout=0 in the config")
        if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
            raise NotInvariant("query, key and value must be [B, heads, T, D]. Give them four dimensions")
        if query.shape[1] != key.shape[1] and not enable_gqa:
            raise NotInvariant("heads of query and key differ. Pass enable_gqa=True")
        grouped = self._grouped(key), self._grouped(value)
        if grouped[0].shape == grouped[1].shape:
            key, value = grouped
        scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        if is_causal and (attn_mask is not None or query.shape[2] != key.shape[2]):
            raise NotInvariant("is_causal takes no mask, and as many queries as keys. Pass a causal mask instead")
        if not is_causal and (attn_mask is None or attn_mask.shape[-2] == 1):
            return _seen_alike(query, key, value, self._layout(attn_mask, key, 1), scale)
        layout = self._layout(attn_mask, key, query.shape[2])
        sides = (x.transpose(1, 2) for x in (query, key, value))
        return attention(*sides, layout.table, scale=scale, **layout.longest).transpose(1, 2)

    def _layout(self, mask: Tensor | None, key: Tensor, queries: int) -> _Layout:
        rows, keys = key.shape[0], key.shape[2]
        if mask is None:
            return _whole(rows, queries, keys, key.device)
        version = None if mask.is_inference() else mask._version
        known, layout = self.layouts.get(mask, (None, None))
        if version is None or known != version or layout.grid != (rows, queries, keys):
            layout = _read_mask(mask, rows, queries, keys)
            self.layouts[mask] = version, layout
        return layout


# ---- attention ----


class _Layout(NamedTuple):
    """Which queries meet which keys: int32 [segments, 5] as in `rlspec.kernels.attention`, bounds, and the grid."""

    table: Tensor
    longest: dict[str, int]
    grid: tuple[int, int, int]


def _whole(rows: int, queries: int, keys: int, device: torch.device) -> _Layout:
    """Every row from its first slot to its last; made on the device, as a capture of a graph asks."""
    table = torch.zeros(rows, 5, dtype=torch.int32, device=device)
    table[:, 0] = torch.arange(rows, device=device)
    table[:, 2] = queries
    table[:, 4] = keys
    return _Layout(table, {"max_query": queries, "max_key": keys}, (rows, queries, keys))


def _seen_alike(query: Tensor, key: Tensor, value: Tensor, layout: _Layout, scale: float) -> Tensor:
    """All queries see the same keys, so they are as many heads of one query: decoding, with its heads folded or not."""
    rows, heads, queries, width = query.shape
    if queries * heads // key.shape[1] > 64:
        raise NotInvariant(
            f"{queries} queries that all see all keys. Only causal attention is honoured: pass is_causal=True, "
            "or a causal mask"
        )
    folded = query.reshape(rows, 1, heads * queries, width)
    out = attention(
        folded, key.transpose(1, 2), value.transpose(1, 2), layout.table, scale=scale, **layout.longest
    )  # fmt: skip
    return out.reshape(query.shape)


def _read_mask(mask: Tensor, rows: int, queries: int, keys: int) -> _Layout:
    seen = _as_booleans(mask, rows, queries, keys)
    counts = seen.sum(-1)
    first = seen.any(1).int().argmax(-1)
    slots = torch.arange(keys, device=mask.device)
    start = first[:, None, None]
    same = ((slots >= start) & (slots < start + counts[:, :, None])) == seen
    *lines, known = torch.cat((torch.cat((counts, first[:, None]), 1).flatten(), same.all().view(1))).tolist()
    step = queries + 1
    found = [_segment(row, lines[row * step : row * step + queries], lines[row * step + queries], keys)
             for row in range(rows)]  # fmt: skip
    segments = [one for one in found if one]
    if not known or None in found or not segments:
        raise NotInvariant(
            f"a mask {list(mask.shape)} that is not causal with pads on the left or right. Pass such a mask, or "
            "is_causal=True; sliding windows and packed samples have kernels of their own: rlspec.kernels.attention"
        )
    table = torch.tensor(segments, dtype=torch.int32, device=mask.device)
    longest = {"max_query": max(one[2] for one in segments), "max_key": max(one[4] for one in segments)}
    return _Layout(table, longest, (rows, queries, keys))


def _as_booleans(mask: Tensor, rows: int, queries: int, keys: int) -> Tensor:
    """[rows, queries, keys]: the query sees the key."""
    if mask.dim() > 4 or mask.dim() < 2:
        raise NotInvariant(f"a mask {list(mask.shape)}. Give it as [B, 1, T, S]")
    if mask.dim() == 4:
        if mask.shape[1] > 1 and mask.stride(1):
            raise NotInvariant(f"a mask {list(mask.shape)} of its own for each head. Give one for all, [B, 1, T, S]")
        mask = mask[:, 0]
    elif mask.dim() == 3 and mask.shape[0] > 1:
        raise NotInvariant(f"a mask {list(mask.shape)} of its own for each head. Give one for all, [B, 1, T, S]")
    if mask.dtype != torch.bool:
        seen = mask == 0
        if not (seen | (mask <= torch.finfo(mask.dtype).min)).all():
            raise NotInvariant("a mask with numbers to add. Only 0 and the lowest number, or booleans, are honoured")
        mask = seen
    try:
        return mask.expand(rows, queries, keys)
    except RuntimeError:
        raise NotInvariant(
            f"a mask {list(mask.shape)} for {rows} rows of {queries} queries and {keys} keys. Give it as [B, 1, T, S]"
        ) from None


def _segment(row: int, counts: Sequence[int], start: int, keys: int) -> tuple[int, ...] | None:
    """Line of the table for a row whose queries see so many keys from `start`; () for none, None if it is not causal.

    Queries before the first that sees a key are pads. Each one sees a key more than the one before it; those that see
    no more than the last have their own key masked, as the pads on the right of a square mask do, and are pads too.
    """
    first = next((place for place, count in enumerate(counts) if count), None)
    if first is None:
        return ()
    length = 1
    while first + length < len(counts) and counts[first + length] == counts[first] + length:
        length += 1
    last = counts[first + length - 1]
    square = len(counts) == keys
    aligned = start + counts[first] - 1 == first if square else first + length == len(counts)
    if not aligned or any(count != last for count in counts[first + length :]):
        return None
    return row, first, length, start, last


# ---- products ----


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if weight.dim() != 2:
        raise NotInvariant(f"a weight {list(weight.shape)}. {_BATCHED}")
    if bias is None:
        return _product(input, weight)
    return (_product(input, weight, torch.float32) + bias.float()).to(input.dtype)


def _product(x: Tensor, weight: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    return det_gemm(x, weight, out_dtype) if x.dim() > 1 else det_gemm(x[None], weight, out_dtype)[0]


def _mm(input: Tensor, mat2: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    if input.dim() != 2 or mat2.dim() != 2:
        raise NotInvariant("mm takes two matrices")
    return det_gemm(input, mat2.t(), out_dtype)


def _addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    if beta != 1 or alpha != 1:
        raise NotInvariant(f"beta={beta}, alpha={alpha}. Multiply before, or after")
    return _linear(mat1, mat2.t(), input)


def _matmul(input: Tensor, other: Tensor) -> Tensor:
    if other.dim() > 2:
        return _bmm(input, other)
    if other.dim() == 1:
        return _product(input, other[None]).squeeze(-1)
    return _product(input, other.t())


def _rmatmul(other: Tensor, input: Tensor) -> Tensor:
    return _matmul(input, other)


def _bmm(input: Tensor, mat2: Tensor) -> Tensor:
    """One product an element is no sum: the angles of rotary embeddings are such an outer product."""
    if input.dim() > 1 and input.shape[-1] == 1 and mat2.shape[-2] == 1 and not (_wants(input) or _wants(mat2)):
        return input * mat2
    raise NotInvariant(f"{list(input.shape)} by {list(mat2.shape)}, a batch of weights. {_BATCHED}")


def _refuse_batched(*_: Any, **__: Any) -> Tensor:
    raise NotInvariant(f"a batch of weights. {_BATCHED}")


# ---- norms, reductions, losses ----


def _rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    if tuple(normalized_shape) != tuple(input.shape[-1:]):
        raise NotInvariant(f"normalized_shape {list(normalized_shape)}. Only the last dimension is honoured")
    weight = input.new_ones(input.shape[-1]) if weight is None else weight
    return rms_norm(input, weight, eps=torch.finfo(torch.float32).eps if eps is None else eps)


def _over_last(operator: Callable[[Tensor], Tensor], x: Tensor, dim: int | None, dtype: torch.dtype | None) -> Tensor:
    if dim is None or dim % max(1, x.dim()) != x.dim() - 1:
        raise NotInvariant(f"dim={dim}. Only the last dimension is honoured: move it there")
    return operator(x if dtype is None else x.to(dtype))


def _softmax(input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Tensor:
    return _over_last(softmax, input, dim, dtype)


def _log_softmax(
    input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Tensor:
    return _over_last(log_softmax, input, dim, dtype)


def _tensor_softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    return _over_last(softmax, input, dim, dtype)


def _tensor_log_softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    return _over_last(log_softmax, input, dim, dtype)


def _mean(input: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, axis: Any = None) -> Tensor:
    return _reduced(row_mean, input, dim if axis is None else axis, keepdim, dtype)


def _sum(input: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, axis: Any = None) -> Tensor:
    return _reduced(row_sum, input, dim if axis is None else axis, keepdim, dtype)


def _reduced(operator: Callable[[Tensor], Tensor], x: Tensor, dim: Any, keepdim: bool, dtype: Any) -> Tensor:
    """Any dimensions, as one row a result; numbers that are no floats are summed without rounding, by torch."""
    if not (dtype or x.dtype).is_floating_point and not x.is_complex():
        return NotImplemented
    x = x if dtype is None else x.to(dtype)
    dims = [dim] if isinstance(dim, int) else list(dim or range(x.dim()))
    dims = sorted(one % max(1, x.dim()) for one in dims)
    kept = [one for one in range(x.dim()) if one not in dims]
    made = operator(x.permute(*kept, *dims).reshape(*(x.shape[one] for one in kept), -1))
    return made.reshape([1 if one in dims else x.shape[one] for one in range(x.dim())]) if keepdim else made


def _cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    if weight is not None or label_smoothing:
        raise NotInvariant("class weights and label smoothing are not honoured. Leave them out")
    if size_average is not None or reduce is not None or reduction not in ("mean", "sum", "none"):
        raise NotInvariant("say reduction='mean', 'sum' or 'none'")
    if target.is_floating_point() or input.dim() != target.dim() + 1 or input.dim() > 2:
        shapes = f"{list(input.shape)} and {list(target.shape)}"
        raise NotInvariant(f"{shapes}. Only logits [N, V] and indices [N] are honoured: flatten them")
    losses = 0.0 - logprob(input, target, ignore_index=ignore_index)
    if reduction != "none":
        losses = row_sum(losses.reshape(-1))
    if reduction == "mean":
        losses = losses / (target != ignore_index).sum()
    return losses.to(input.dtype)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if training and p:
        raise NotInvariant(f"p={p}: what is dropped follows the place in the batch. Use p=0, or model.eval()")
    return NotImplemented


def _refuse_adding(input: Tensor, *_: Any, **__: Any) -> Tensor:
    if input.is_floating_point():
        raise NotInvariant(f"rows are added in the order in which threads arrive. {OUTSIDE}, or sum without an index")
    return NotImplemented


def _spreading(func: Callable[..., Any]) -> Callable[..., Any]:
    """An operator whose narrow operand [..., 1] gets its gradient from the kernel that sums along rows."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if len(args) < 2 or not (isinstance(args[0], Tensor) and isinstance(args[1], Tensor)):
            return NotImplemented
        one, other = args[:2]
        if not (one.dim() and other.dim()) or one.shape[-1] == other.shape[-1]:
            return NotImplemented
        if one.shape[-1] == 1 and _wants(one):
            return func(spread(one, other.shape[-1]), other, *args[2:], **kwargs)
        if other.shape[-1] == 1 and _wants(other):
            return func(one, spread(other, one.shape[-1]), *args[2:], **kwargs)
        return NotImplemented

    return call


_SPREADING = frozenset(
    getattr(place, name)
    for place, names in (
        (torch, "mul multiply add sub subtract div divide true_divide"),
        (Tensor, "mul multiply add sub subtract div divide true_divide mul_ add_ sub_ div_ __mul__ __rmul__ __imul__"),
        (Tensor, "__add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __truediv__ __rtruediv__ __itruediv__"),
    )
    for name in names.split()
)
_FORM = frozenset(
    (Tensor.expand, Tensor.reshape, torch.reshape, Tensor.repeat_interleave, torch.repeat_interleave, Tensor.backward)
)
_REPLACED: Mapping[Any, Callable[..., Any]] = {
    F.linear: _linear,
    torch.mm: _mm,
    Tensor.mm: _mm,
    torch.addmm: _addmm,
    Tensor.addmm: _addmm,
    torch.matmul: _matmul,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
    Tensor.__rmatmul__: _rmatmul,
    torch.mv: _matmul,
    Tensor.mv: _matmul,
    torch.bmm: _bmm,
    Tensor.bmm: _bmm,
    torch.baddbmm: _refuse_batched,
    Tensor.baddbmm: _refuse_batched,
    F.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
    F.softmax: _softmax,
    F.log_softmax: _log_softmax,
    torch.softmax: _tensor_softmax,
    Tensor.softmax: _tensor_softmax,
    torch.log_softmax: _tensor_log_softmax,
    Tensor.log_softmax: _tensor_log_softmax,
    torch.special.softmax: _tensor_softmax,
    torch.special.log_softmax: _tensor_log_softmax,
    torch.mean: _mean,
    Tensor.mean: _mean,
    torch.sum: _sum,
    Tensor.sum: _sum,
    F.cross_entropy: _cross_entropy,
    F.dropout: _dropout,
    torch.dropout: _dropout,
    torch.index_add: _refuse_adding,
    Tensor.index_add: _refuse_adding,
    Tensor.index_add_: _refuse_adding,
    torch.scatter_add: _refuse_adding,
    Tensor.scatter_add: _refuse_adding,
    Tensor.scatter_add_: _refuse_adding,
    torch.scatter_reduce: _refuse_adding,
    Tensor.scatter_reduce: _refuse_adding,
    Tensor.scatter_reduce_: _refuse_adding,
    **{func: _spreading(func) for func in _SPREADING},
}


def _check_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    if kwargs.get("out") is not None:
        raise NotInvariant("out= is not honoured. Copy the result where it belongs")
    tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
    strange = next((type(one) for one in tensors if type(one) not in _PLAIN_TYPES), None)
    if strange is not None:
        raise NotInvariant(f"a {strange.__name__}, where only plain tensors are honoured. {OUTSIDE}")
    if any(torch.is_autocast_enabled(kind) for kind in {one.device.type for one in tensors}):
        raise NotInvariant("autocast is on. Cast the model itself, model.to(torch.bfloat16), and leave autocast")


def _wants(x: Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


def _same_but(one: Tensor, other: Tensor, place: int) -> bool:
    return all(a == b for at, (a, b) in enumerate(zip(one.shape, other.shape, strict=True)) if at != place)


def _floats(args: Sequence[Any]) -> bool:
    return any(isinstance(one, Tensor) and (one.is_floating_point() or one.is_complex()) for one in args)


def _along_rows(x: Any, dims: Any = None) -> bool:
    """A sum over the last dimension and not over the first; over the first, it is over the batch."""
    if not dims or not x.is_floating_point() or x.shape[-1] == 1:
        return False
    places = {one % x.dim() for one in dims}
    return x.dim() - 1 in places and 0 not in places
