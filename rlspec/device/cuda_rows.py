"""The row operators of `csrc/`, differentiable: norms, rope, gates, embedding, log-probs, residual.

Same names, signatures and bits as in `rlspec.kernels.rms_norm`, `rope`, `silu`, `swiglu`, `embedding`, `logprob` and
`residual_add`, whose files say what each promises. CUDA tensors in bf16, fp16 or fp32 alone; rows with strides of their
own are read in place, other layouts from a copy. Nothing here waits for the device, unless `validate` asks for it.

Raises ValueError for other dtypes, for shapes or devices that do not fit, for empty tensors and for CPU tensors, and
what `rlspec.device.native` raises.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlspec.device import checking, cuda_gemm, native

WIDEST = 65536  # of a normed row
GROUP = 16  # positions in a block of a weight's gradient
SPAN = 32768  # columns that one block of threads reads of a row of logits


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, round_before_weight: bool = False) -> Tensor:
    """x / √(mean(x²) + eps) · weight. x [..., H], weight [H] -> [..., H]. The weight's gradient is one `norm_fold`."""
    checking.rms_norm(x, weight, eps)
    _known(x=x)
    _narrow(x)
    return _RmsNorm.apply(x, weight, float(eps), round_before_weight)


def norm_fold(accumulator: Tensor, x: Tensor, dy: Tensor, blocks: Tensor, *, eps: float) -> None:
    """accumulator fp32 [H] += Σ dy · x · r over the rows of x and dy [R, heads, H] that blocks int32 [B, 16] names.

    -1 is a zero row; a table on a CPU is checked and copied, one on the device is not looked at.
    """
    checking.pointwise(x=x, dy=dy)
    _known(x=x)
    if x.dim() != 3 or tuple(accumulator.shape) != (x.shape[2],):
        shapes = f"accumulator {list(accumulator.shape)}, x {list(x.shape)}"
        raise ValueError(f"{shapes}: fold takes [H], [R, heads, H] and [R, heads, H]")
    _narrow(x)
    _accumulates(accumulator, x)
    _add_norm(accumulator, x, dy, _table(blocks, x), float(eps))


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, T, heads, D], cos and sin [B, T, D/2] -> as x. The tables get no gradient."""
    checking.rope(x, cos, sin)
    _known(x=x, cos=cos)
    if cos.requires_grad or sin.requires_grad:
        raise ValueError("rope gives no gradient to cos and sin")
    return _Rope.apply(x, cos, sin)


def silu(x: Tensor) -> Tensor:
    """x · sigmoid(x), any shape."""
    checking.pointwise(x=x)
    _known(x=x)
    return _Silu.apply(x)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up, one shape and dtype."""
    checking.pointwise(gate=gate, up=up)
    _known(gate=gate)
    return _Swiglu.apply(gate, up)


def residual_add(residual: Tensor, x: Tensor) -> Tensor:
    """residual + x, one shape; x as the residual, or narrower than a residual of fp32."""
    checking.residual_add(residual, x)
    _known(residual=residual, x=x)
    return _ResidualAdd.apply(residual, x)


def embedding(tokens: Tensor, weight: Tensor, *, validate: bool = False) -> Tensor:
    """tokens int64 [...], weight [V, H] -> [..., H]. An id outside gives NaN, or ValueError with `validate`."""
    checking.embedding(tokens, weight, sync=validate)
    _known(weight=weight)
    return _Embedding.apply(tokens, weight)


def embedding_fold(accumulator: Tensor, tokens: Tensor, dy: Tensor, blocks: Tensor) -> None:
    """accumulator fp32 [V, H] += rows of dy [R, H] at their tokens int64 [R], one by one in the order of the blocks."""
    _known(dy=dy)
    if accumulator.dim() != 2 or tokens.dim() != 1 or dy.shape != (*tokens.shape, accumulator.shape[1]):
        shapes = f"accumulator {list(accumulator.shape)}, tokens {list(tokens.shape)}, dy {list(dy.shape)}"
        raise ValueError(f"fold takes an accumulator [V, H], tokens [R], dy [R, H], not {shapes}")
    if tokens.dtype != torch.int64 or tokens.device != dy.device or not dy.numel():
        raise ValueError(f"tokens {tokens.dtype} {list(tokens.shape)} on {tokens.device} do not fit dy on {dy.device}")
    _accumulates(accumulator, dy)
    rows = _table(blocks, dy).flatten()
    ids = torch.where(rows < 0, len(accumulator), tokens.index_select(0, rows.clamp(min=0)))
    _add_rows(accumulator, ids, rows, dy, resume=True)


def logprob(logits: Tensor, targets: Tensor, *, ignore_index: int = -100, validate: bool = False) -> Tensor:
    """logits [..., V], targets int64 [...] -> fp32 [...], in spans of 32768 columns that run side by side.

    0 where the target is `ignore_index`; NaN where it is outside [0, V), or ValueError with `validate`.
    """
    return _logprob(logits, targets, ignore_index, validate, False)


def batch_invariant_logprob(
    logits: Tensor, targets: Tensor, *, ignore_index: int = -100, validate: bool = False
) -> Tensor:
    """As `logprob`, by streaming each row from left to right: the least traffic where there are many rows."""
    return _logprob(logits, targets, ignore_index, validate, True)


def _logprob(logits: Tensor, targets: Tensor, ignored: int, validate: bool, stream: bool) -> Tensor:
    checking.logprob(logits, targets, sync=False)
    _known(logits=logits)
    if validate:
        wrong = (targets != ignored) & ((targets < 0) | (targets >= logits.shape[-1]))
        if wrong.any():
            raise ValueError(f"target {int(targets[wrong][0])} for logits of {logits.shape[-1]} columns")
    return _Logprob.apply(logits, targets, ignored, stream)


# Several operators at once, without gradients

OF_SUM, ROTATED = "rms_norm_of_sum", "rms_norm_rotated"


def residual_norm(
    residual: Tensor, x: Tensor, weight: Tensor, *, eps: float, round_before_weight: bool = False
) -> tuple[Tensor, Tensor] | None:
    """total = residual + x, and the norm of the total rounded to the dtype of x; None where no kernel does it."""
    checking.residual_add(residual, x)
    _known(residual=residual, x=x)
    a, b = _rows(residual), _rows(x)
    packs = 16 // x.element_size()
    whole = x.shape[-1] % packs == a.stride(0) % packs == 0 and _packed(a, b, weight)
    if weight.dtype != x.dtype or _block(x) > 8192 or not whole:
        return None
    total, y = _empty(residual), _empty(x)
    native.load("rms_norm").call(
        OF_SUM, a, b, weight, total, y, residual.dtype, x.dtype, *b.shape, a.stride(0), b.stride(0),
        float(eps), round_before_weight, cuda_gemm.rests(),
    )  # fmt: skip
    return total, y


def rotated_heads(
    query: Tensor,
    key: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    eps: float,
    round_before_weight: bool = False,
    value: Tensor | None = None,
    slots: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """The norms of the heads of queries and keys [B, T, heads, D], then those rotated; None where no kernel does it.

    `slots`: rotated keys and `value`, which is as key, are also stored in the cache: see `rlspec.device.kv_cache`.
    """
    for x in (query, key):
        checking.rope(x, cos, sin)
        _known(x=x, cos=cos)
    width, most = query.shape[-1], 32 * 16 // query.element_size()
    heads = [one.reshape(-1, *one.shape[2:]) for one in (query, key)]
    tables = [one.reshape(-1, one.shape[2]) for one in (cos, sin)]
    fits = width == _block(query) <= most and width * query.element_size() >= 32
    same = query.dtype == key.dtype == query_weight.dtype == key_weight.dtype and query.shape[:2] == key.shape[:2]
    if not (fits and same and _packed(*heads, *tables, query_weight, key_weight)):
        return None
    made = _empty(query), _empty(key), _empty(query), _empty(key)
    cache: tuple[Tensor | None, ...] = (None,) * 4
    steps: tuple[int, ...] = (0,) * 5
    if slots is not None:
        assert value is not None and value.shape == key.shape and value.dtype == key.dtype == slots[0].dtype
        values = value.reshape(-1, *value.shape[2:])
        if not _packed(values, *slots[:2]):
            return None
        cache, steps = (values, *slots), (*values.stride()[:2], *slots[0].stride()[:3])
    native.load("rms_norm").call(
        ROTATED, *heads, query_weight, key_weight, *tables, *made, *cache, query.dtype, cos.dtype, len(heads[0]),
        query.shape[2], key.shape[2], width, *heads[0].stride()[:2], *heads[1].stride()[:2], *steps,
        *(one.stride(0) for one in tables), float(eps), round_before_weight,
    )  # fmt: skip
    return made


# Autograd


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, round_before_weight: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        y, rows = _empty(x), _heads(x)
        native.load("rms_norm").call(
            "rms_norm_forward", rows, weight.contiguous(), y, x.dtype, rows.shape[0] * rows.shape[1], *rows.shape[1:],
            *rows.stride()[:2], eps, round_before_weight,
        )  # fmt: skip
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        dx = dweight = None
        if ctx.needs_input_grad[0]:
            dx = _norm_data_gradient(x, weight, dy, ctx.eps)
        if ctx.needs_input_grad[1]:
            total = torch.zeros(weight.shape, device=weight.device)
            _add_norm(total, _positions(x), _positions(dy), None, ctx.eps)
            dweight = total.to(weight.dtype)
        return dx, dweight, None, None


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _rotate(grad, *ctx.saved_tensors, True), None, None


class _Silu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        y, rows = _empty(x), _rows(x)
        native.load("swiglu").call("silu_forward", rows, y, x.dtype, *rows.shape, rows.stride(0))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        dx, rows, dy = _empty(x), _rows(x), _rows(grad)
        native.load("swiglu").call(
            "silu_backward", rows, dy, dx, x.dtype, *rows.shape, rows.stride(0), dy.stride(0)
        )  # fmt: skip
        return dx


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        y, (g, u) = _empty(gate), map(_rows, (gate, up))
        native.load("swiglu").call("swiglu_forward", g, u, y, gate.dtype, *g.shape, g.stride(0), u.stride(0))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        dgate, dup, (g, u, dy) = _empty(gate), _empty(up), map(_rows, (gate, up, grad))
        native.load("swiglu").call(
            "swiglu_backward", g, u, dy, dgate, dup, gate.dtype, *g.shape, g.stride(0), u.stride(0), dy.stride(0)
        )  # fmt: skip
        return dgate, dup


class _ResidualAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, residual: Tensor, x: Tensor) -> Tensor:
        ctx.dtype = x.dtype
        out, (a, b) = _empty(residual), map(_rows, (residual, x))
        native.load("residual_add").call(
            "residual_add_forward", a, b, out, residual.dtype, x.dtype, *a.shape, a.stride(0), b.stride(0)
        )  # fmt: skip
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.to(ctx.dtype)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.weight = weight.shape, weight.dtype
        table, ids = _rows(weight), tokens.contiguous()
        out = torch.empty(*tokens.shape, table.shape[1], dtype=weight.dtype, device=weight.device)
        native.load("embedding").call(
            "embedding_forward", ids, table, out, weight.dtype, ids.numel(), *table.shape, table.stride(0)
        )  # fmt: skip
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        (tokens,) = ctx.saved_tensors
        shape, dtype = ctx.weight
        total = torch.zeros(shape, dtype=dtype, device=grad.device)
        rows = torch.arange(tokens.numel(), dtype=torch.int32, device=grad.device)
        _add_rows(total, tokens.flatten(), rows, grad.reshape(-1, shape[1]), resume=False)
        return None, total


class _Logprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ignored: int, stream: bool) -> Tensor:
        x, t = _rows(logits), targets.contiguous().flatten()
        rows, width = x.shape
        found, top, scale = (torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(3))
        numbers = (x.dtype, rows, width, x.stride(0), ignored)
        if stream:
            native.load("logprob").call("logprob_stream", x, t, found, top, scale, *numbers)
        else:
            places = rows * -(-width // SPAN)
            highs, totals = (torch.empty(places, dtype=torch.float32, device=x.device) for _ in range(2))
            native.load("logprob").call("logprob_spans", x, t, highs, totals, found, top, scale, *numbers)
        ctx.save_for_backward(logits, t, top, scale)
        ctx.ignored = ignored
        return found.view(targets.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        logits, t, top, scale = ctx.saved_tensors
        x, dx, dy = _rows(logits), _empty(logits), grad.reshape(-1).contiguous()
        native.load("logprob").call(
            "logprob_backward", x, t, top, scale, dy, dx, x.dtype, *x.shape, x.stride(0), ctx.ignored
        )  # fmt: skip
        return dx, None, None, None


# Launches


def _norm_data_gradient(x: Tensor, weight: Tensor, dy: Tensor, eps: float) -> Tensor:
    dx, rows, above = _empty(x), _heads(x), _heads(dy)
    native.load("rms_norm").call(
        "rms_norm_data_gradient", rows, weight.contiguous(), above, dx, x.dtype, rows.shape[0] * rows.shape[1],
        *rows.shape[1:], *rows.stride()[:2], *above.stride()[:2], eps,
    )  # fmt: skip
    return dx


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    out = _empty(x)
    rows, c, s = (_dense_last(one.reshape(-1, *one.shape[2:])) for one in (x, cos, sin))
    native.load("rope").call(
        "rope_rotate", rows, c, s, out, x.dtype, cos.dtype, sin.dtype, *rows.shape[:2], c.shape[1],
        *rows.stride()[:2], c.stride(0), s.stride(0), back,
    )  # fmt: skip
    return out


def _add_norm(accumulator: Tensor, x: Tensor, dy: Tensor, table: Tensor | None, eps: float) -> None:
    """The sums of the blocks, side by side; then the blocks one after the other."""
    positions, heads, width = x.shape
    blocks = -(-positions // GROUP) if table is None else len(table)
    x, dy = _dense_last(x), _dense_last(dy)
    sums = torch.empty(blocks, width, dtype=torch.float32, device=x.device)
    library = native.load("rms_norm")
    library.call(
        "rms_norm_block_sums", x, dy, table, sums, x.dtype, blocks, positions, heads, width,
        *x.stride()[:2], *dy.stride()[:2], eps,
    )  # fmt: skip
    library.call("rms_norm_chain", sums, accumulator, blocks, width)


def _add_rows(total: Tensor, ids: Tensor, rows: Tensor, dy: Tensor, *, resume: bool) -> None:
    """total[ids[k]] += dy[rows[k]] for k ascending; without `resume` from 0, for the ids that occur."""
    vocabulary, width = total.shape
    dy = _dense_last(dy)
    ids, order = ids.sort(stable=True)
    ends = torch.searchsorted(ids, ids, right=True)
    native.load("embedding").call(
        "embedding_add", total, ids, ends, rows.index_select(0, order), dy, total.dtype, dy.dtype, len(ids),
        vocabulary, width, dy.stride(0), resume,
    )  # fmt: skip


# Layouts


def _empty(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


def _dense_last(x: Tensor) -> Tensor:
    """With the columns side by side: a view where there is one."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _rows(x: Tensor) -> Tensor:
    """[..., width] -> [rows, width]."""
    return _dense_last(x.reshape(-1, x.shape[-1] if x.dim() else 1))


def _block(x: Tensor) -> int:
    """The power of two that a row is filled up to."""
    return 1 << (x.shape[-1] - 1).bit_length()


def _packed(*tensors: Tensor) -> bool:
    """Columns side by side, and every row from a multiple of 16 bytes on."""
    return all(
        one.data_ptr() % 16 == 0
        and one.stride(-1) == 1
        and not any(stride * one.element_size() % 16 for stride in one.stride()[:-1])
        for one in tensors
    )


def _heads(x: Tensor) -> Tensor:
    """[..., width] -> [outer, inner, width]; the last dimension before the width is the inner one."""
    return _dense_last(x.reshape(-1, x.shape[-2] if x.dim() > 1 else 1, x.shape[-1]))


def _positions(x: Tensor) -> Tensor:
    """[..., width] -> [positions, heads, width]: four dimensions are [B, T, heads, D], fewer have one head."""
    return x.reshape(-1, x.shape[-2] if x.dim() == 4 else 1, x.shape[-1])


# What is refused


def check_dtypes(**tensors: Tensor) -> None:
    """Raise ValueError for what no kernel here takes."""
    for name, x in tensors.items():
        if x.dtype not in native.DTYPES:
            raise ValueError(f"{name} is {x.dtype}: the kernels take bf16, fp16 and fp32")


def _known(**tensors: Tensor) -> None:
    check_dtypes(**tensors)
    for name, x in tensors.items():
        if not x.is_cuda:
            raise ValueError(f"{name} is on {x.device}: the kernels run on a CUDA device")


def _narrow(x: Tensor) -> None:
    if x.shape[-1] > WIDEST or x.numel() // x.shape[-1] >= 2**31:
        raise ValueError(f"x {list(x.shape)}: rows up to {WIDEST} wide, fewer than 2**31 of them")


def _accumulates(accumulator: Tensor, x: Tensor) -> None:
    if accumulator.dtype != torch.float32 or not accumulator.is_contiguous() or accumulator.device != x.device:
        raise ValueError("accumulator: fold adds into a contiguous fp32 tensor on the device of its rows")


def _table(blocks: Tensor, x: Tensor) -> Tensor:
    """On the device of x, contiguous."""
    if blocks.dtype != torch.int32 or blocks.dim() != 2 or blocks.shape[1] != GROUP or not len(blocks):
        raise ValueError(f"blocks {blocks.dtype} {list(blocks.shape)}: rows come as int32 [B, {GROUP}]")
    if blocks.device.type == "cpu":
        low, high = int(blocks.min()), int(blocks.max())
        if low < -1 or high >= len(x):
            raise ValueError(f"blocks name rows {low} to {high} of {len(x)}; -1 is a zero row")
        blocks = blocks.pin_memory().to(x.device, non_blocking=True)
    if blocks.device != x.device:
        raise ValueError(f"blocks are on {blocks.device}, their rows on {x.device}")
    return blocks.contiguous()
