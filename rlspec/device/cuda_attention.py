"""Attention on Hopper through csrc/attention.cu: the functions of `rlspec.kernels.attention`, by name and signature.

The key blocks, the splits, the sums of rows and each rounding are those of the Triton kernel, whose header says what is
promised; the bits are the same. Not here but there, and a ValueError: fp32, width 256, pages of less than 8 tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlspec.device import native
from rlspec.kernels.attention import SCHEDULE, Schedule, _bound, _Cache, _tag  # where splits end is one contract

WIDTHS = (16, 32, 64, 128)
DTYPES = (torch.bfloat16, torch.float16)
BUSY = 128  # with fewer tiles than this (in decode: 16 times as many), the splits of a row are tiles of their own
# Up to so many blocks of threads, the splits of a row are a cluster of at most 8, which folds them. Twice as many were
# in each other's way.
FEW, CLUSTER = 64, 8


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Tensor,
    *,
    scale: float,
    max_query: int | None = None,
    max_key: int | None = None,
    sinks: Tensor | None = None,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """query [B, T, Hq, D], key and value [B, S, Hkv, D] -> out [B, T, Hq, D], lse fp32 [B, T, Hq].

    `segments` int32 [n, 5]: row, query start, query length, key start, key length. The last query stands at the last
    key, query ranges are disjoint; slots in no segment get 0 and -inf. `max_query` and `max_key` are upper bounds on
    the lengths: they size the grid and nothing else; a segment that is longer gets NaN. `sinks` fp32 [Hq]: one more
    logit in each head's denominator. `window`: a query sees that many keys, its own too.
    Raises ValueError for anything that this kernel does not compute.
    """
    check_forward(query, key, value, segments, scale, window, sinks)
    cache = _Cache(_aligned(key), _aligned(value), None, 0)
    max_query = _bound("max_query", max_query, query.shape[1])
    max_key = _bound("max_key", max_key, key.shape[1])
    return _forward(query, cache, segments, scale, max_query, max_key, sinks, window)


def paged(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_table: Tensor,
    segments: Tensor,
    *,
    scale: float,
    max_query: int | None = None,
    max_key: int | None = None,
    sinks: Tensor | None = None,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`forward` over a paged cache: key_pages and value_pages [pages, page, Hkv, D], block_table int32 [n, max_pages].

    Line i of `block_table` lists the pages of segment i from position 0 of its sample; entries past its length are not
    read, nor is the key start of a segment. The page size is a power of two from 8 to the first split.
    """
    _check(query, key_pages, value_pages, segments, scale, window)
    _check_sinks(query, sinks)
    page = key_pages.shape[1]
    if SCHEDULE.early % page or page < 8:
        raise ValueError(f"pages of {page} tokens: a power of two from 8 to {SCHEDULE.early} is needed")
    if block_table.dtype != torch.int32 or block_table.dim() != 2 or len(block_table) != len(segments):
        raise ValueError(f"block_table must be int32 [{len(segments)}, max_pages], not {_tag(block_table)}")
    if block_table.device != query.device or not block_table.is_contiguous() or block_table.shape[1] == 0:
        raise ValueError("block_table must be contiguous, not empty, and on the device of the query")
    cache = _Cache(_aligned(key_pages), _aligned(value_pages), block_table, page)
    max_query = _bound("max_query", max_query, query.shape[1])
    max_key = _bound("max_key", max_key, block_table.shape[1] * page)
    return _forward(query, cache, segments, scale, max_query, max_key, sinks, window)


def _forward(
    query: Tensor,
    cache: _Cache,
    segments: Tensor,
    scale: float,
    max_query: int,
    max_key: int,
    sinks: Tensor | None,
    window: int | None,
    *,
    schedule: Schedule = SCHEDULE,
    split: bool | None = None,
) -> tuple[Tensor, Tensor]:
    # `split` is for tests and benchmarks, False: all splits in one tile. It may not show in the bits.
    query = _aligned(query)
    key, value = cache.key, cache.value
    rows, queries, heads, width = query.shape
    kv_heads = key.shape[2]
    group = heads // kv_heads
    _check_cuda(query)
    splits = schedule.count(max_key)
    share = 0 if split is False else _share(splits, kv_heads * len(segments), max_query * group, width)
    if share:
        split = False
    elif split is None:
        tiles = kv_heads * len(segments) * -(-max_query // (128 // group))
        split = splits > 1 and tiles < (16 * BUSY if max_query * group <= 64 else BUSY)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    lse = torch.empty((rows, queries, heads), dtype=torch.float32, device=query.device)
    part = lse.new_empty((splits, *query.shape)) if split else None
    part_m, part_mass = lse.new_empty((2, splits, *lse.shape)) if split else (None, None)
    taken = None if split or share else lse.new_empty(1, dtype=torch.int32)
    listed = 0 if cache.pages is None else cache.pages.shape[1]
    native.load("attention").call(
        "attention_forward",
        *(query, key, value, segments, cache.pages, None if sinks is None else sinks.contiguous()),
        *(out, lse, taken, part, part_m, part_mass, query.dtype, width, rows, queries, *key.shape[:2], kv_heads, group),
        *(*_strides(query), *_strides(key), *_strides(value), len(segments), max_query, splits, listed, cache.page),
        *(window or 0, *schedule, share, scale * math.log2(math.e)),
    )
    return out, lse


def _share(splits: int, pairs: int, rows: int, width: int) -> int:
    """How many blocks of threads take a split where there are few rows and splits; 0 where there are more of them."""
    blocks = splits * pairs
    if rows > 32 or splits > CLUSTER or blocks > FEW:
        return 0
    return 2 if width == 128 and rows <= 8 and 2 * splits <= CLUSTER and 2 * blocks <= FEW else 1


def backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    segments: Tensor,
    *,
    scale: float,
    max_query: int | None = None,
    max_key: int | None = None,
    window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, in their shapes and dtypes; 0 on slots in no segment.

    `out` and `lse` are those of `forward`, of one call or of several chunks put together; with sinks they hold all
    that is needed of them. To be called on whole samples, whatever the chunks of the forward were. Key ranges of
    different segments must be disjoint. Raises ValueError as `forward` does.
    """
    check_forward(query, key, value, segments, scale, window)
    check_saved(query, out, lse, grad_out)
    max_query = _bound("max_query", max_query, query.shape[1])
    max_key = _bound("max_key", max_key, key.shape[1])
    _check_cuda(query)
    query, key, value, out, grad = (_aligned(x) for x in (query, key, value, out, grad_out))
    rows, queries, heads, width = query.shape
    keys, kv_heads = key.shape[1:3]
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value))
    stats = lse.new_empty((rows, heads, queries, 2))
    native.load("attention").call(
        "attention_backward",
        *(query, key, value, out, lse.contiguous(), grad, segments, stats, dq, dk, dv, query.dtype, width),
        *(rows, queries, keys, kv_heads, heads // kv_heads),
        *(step for x in (query, key, value, out, grad) for step in _strides(x)),
        *(len(segments), max_query, max_key, window or 0, scale * math.log2(math.e), float(scale)),
    )
    return dq, dk, dv


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, query, key, value, segments, scale, max_query, max_key, sinks, window
    ):
        bounds = {"scale": scale, "max_query": max_query, "max_key": max_key, "window": window}
        out, lse = forward(query, key, value, segments, sinks=sinks, **bounds)
        ctx.save_for_backward(query, key, value, out, lse, segments)
        ctx.bounds = bounds
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out):  # type: ignore[no-untyped-def]
        query, key, value, out, lse, segments = ctx.saved_tensors
        grads = backward(query, key, value, out, lse, grad_out, segments, **ctx.bounds)
        return (*grads, None, None, None, None, None, None)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Tensor,
    *,
    scale: float,
    max_query: int | None = None,
    max_key: int | None = None,
    sinks: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """`forward` without the log-sum-exp, differentiable in query, key and value through `backward`.

    Raises ValueError as `forward` does, and for sinks that require a gradient.
    """
    if sinks is not None and sinks.requires_grad and torch.is_grad_enabled():
        raise ValueError("sinks have no gradient here: detach them")
    return _Attention.apply(query, key, value, segments, scale, max_query, max_key, sinks, window)


def check_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Tensor,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Raise what `forward` raises for shapes and dtypes."""
    _check(query, key, value, segments, scale, window)
    if key.shape[0] != query.shape[0]:
        raise ValueError(f"query has {query.shape[0]} rows, key has {key.shape[0]}")
    _check_sinks(query, sinks)


def check_saved(query: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor) -> None:
    """Raise what `backward` raises for shapes and dtypes of what came from `forward`."""
    for name, x in (("out", out), ("grad_out", grad_out)):
        if x.shape != query.shape or x.dtype != query.dtype or x.device != query.device:
            raise ValueError(f"{name} must be as query, {_tag(query)} on {query.device}, not {_tag(x)} on {x.device}")
    if lse.shape != query.shape[:3] or lse.dtype != torch.float32 or lse.device != query.device:
        raise ValueError(f"lse must be fp32 {list(query.shape[:3])} on {query.device}, not {_tag(lse)}")


def _check_sinks(query: Tensor, sinks: Tensor | None) -> None:
    heads = query.shape[2]
    if sinks is not None and (sinks.dtype != torch.float32 or sinks.shape != (heads,) or sinks.device != query.device):
        raise ValueError(f"sinks must be fp32 [{heads}] on {query.device}, not {_tag(sinks)} on {sinks.device}")


def _check(query: Tensor, key: Tensor, value: Tensor, segments: Tensor, scale: float, window: int | None) -> None:
    tags = f"query {_tag(query)}, key {_tag(key)}, value {_tag(value)}"
    if any(x.dim() != 4 for x in (query, key, value)) or 0 in (*query.shape, *key.shape):
        raise ValueError(f"{tags}: attention takes [rows, tokens, heads, width], none of them empty")
    heads, width = query.shape[2:]
    if key.shape != value.shape or key.shape[3] != width or heads % key.shape[2]:
        raise ValueError(f"{tags}: heads or widths do not pair")
    if width not in WIDTHS or heads // key.shape[2] > 64:
        raise ValueError(f"{tags}: widths are {WIDTHS}, with at most 64 query heads a key head; see triton for others")
    if query.dtype not in DTYPES or not query.dtype == key.dtype == value.dtype:
        raise ValueError(f"{tags}: all must be bf16 or all fp16; see triton for fp32")
    if len({x.device for x in (query, key, value, segments)}) > 1:
        raise ValueError(f"{tags}: query, key, value and segments must be on one device")
    if segments.dtype != torch.int32 or segments.dim() != 2 or segments.shape[1] != 5 or not segments.shape[0]:
        raise ValueError(f"segments must be int32 [segments, 5], not {_tag(segments)}")
    if not segments.is_contiguous():
        raise ValueError("segments must be contiguous")
    if not 0 < scale < math.inf:
        raise ValueError(f"scale must be positive and finite, not {scale}")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, not {window}")


def _check_cuda(query: Tensor) -> None:
    if query.device.type != "cuda":
        raise ValueError(f"attention runs on cuda; the query is on {query.device}")


def _aligned(x: Tensor) -> Tensor:
    # What the copy engine takes: rows of 16 bytes, steps of at least as much; else a copy.
    steps = _strides(x)
    if x.data_ptr() % 16 == 0 and x.stride(3) == 1 and all(step > 0 and step % 16 == 0 for step in steps):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _strides(x: Tensor) -> list[int]:
    """Of rows, tokens and heads; where there is only one of them, any step that fits."""
    return [step if size > 1 else x.shape[3] for size, step in zip(x.shape[:3], x.stride()[:3], strict=True)]
