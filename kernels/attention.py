"""Causal grouped-query attention whose bits depend on the sample alone: packed, padded, chunked, paged, decoded.

    out_i = Σ_j p_ij v_j,   p_ij = exp(scale·q_i·k_j - lse_i),   lse_i = log(Σ_j exp(scale·q_i·k_j) [+ exp(sink)])

over the keys j <= i of the same sample, with a window only those with i - j < window.
Online softmax: Milakov and Gimelshein 2018, arXiv:1805.02867. Backward: Dao et al. 2022, arXiv:2205.14135, app. B.
Splits over keys: Dao et al. 2023 (Flash-Decoding). Sinks: the gpt-oss model file (one more logit per head).

What is promised, to the bit, on one device with one build:
- A row of `out` and `lse` depends on its query, on the keys and values up to it, and on constants of (width, dtype).
  Prefill, chunked prefill, decode, packed, padded, contiguous and paged layouts agree.
- `backward` called on a whole sample depends on that sample alone, not on batch, packing, padding or how the forward
  was chunked. No atomics; two runs agree.

Where the order comes from:
- Key blocks of 64 start at position 0 of the sample. Within a block the matrix unit chains the keys upward in groups
  of 16 on one fp32 accumulator; its bits do not depend on the tile, so tiles are chosen for speed (fp32 inputs use
  fused multiply-adds in one tile).
- Blocks are gathered into splits whose borders depend on the position alone, see `Schedule`. Each split starts from
  the empty state; finished splits are folded upward. A prefill program folds in place, decode runs one split a
  program and folds in a second kernel, with the same expression.
- Row sums go through the matrix unit as p·1, for a shuffle tree would follow the thread layout. Row maxima are exact
  in any order.
- A maximum that did not move rescales by exp2(0) = 1. Maxima are kept scaled, so the difference is exact. Keys that a
  row does not see leave its state as it was: skipping a block or computing it is the same.
- Keys past the end and neighbours are never read: what stands there may be NaN.
- fma is written where a compiler might or might not contract.

Limits: widths 16, 32, 64, 128, 256; bf16, fp16, fp32 (the interpreter: fp32 and fp16); at most 64 query heads a key
head. Values of a sample must be finite: 0·inf reaches earlier rows of the same block. `backward` needs key ranges of
different segments to be disjoint. There is no gradient for sinks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar, copy_context
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton.tools.tensor_descriptor import TensorDescriptor

KEYS = 64  # keys a block, part of the contract
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
WIDTHS = (16, 32, 64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SPREAD = 128  # with fewer programs than this, the splits of a row go to programs of their own


class Schedule(NamedTuple):
    """Borders between splits: every `early` keys up to position `change`, every `late` keys after it."""

    early: int
    change: int
    late: int

    def count(self, keys: int) -> int:
        """How many splits `keys` keys have."""
        last = keys - 1
        if last < self.change:
            return last // self.early + 1
        return self.change // self.early + (last - self.change) // self.late + 1


class Tile(NamedTuple):
    """Rows of queries (backward of keys: rows of keys), warps and pipeline stages of a program. Never the bits."""

    rows: int
    warps: int
    stages: int


SCHEDULE = Schedule(512, 4096, 1024)

_AT_REST = ContextVar("cache at rest", default=False)


@contextmanager
def cache_at_rest() -> Iterator[None]:
    """A promise: inside, `segments` and the keys and values before each segment's first query are at rest.

    That is, they were written before a kernel that lets nothing start before it has ended, as `embedding` is one, and
    no kernel since writes them. Decode then reads them before its turn. The bits are the same.
    """
    token = _AT_REST.set(True)
    try:
        yield
    finally:
        _AT_REST.reset(token)


# ---------------------------------------------------------------------------------------------------------------------
# Splits


@triton.jit
def _split_of(position, EARLY: tl.constexpr, CHANGE: tl.constexpr, LATE: tl.constexpr):
    late = CHANGE // EARLY + (position - CHANGE) // LATE
    return tl.where(position < CHANGE, position // EARLY, late)


@triton.jit
def _split_start(split, EARLY: tl.constexpr, CHANGE: tl.constexpr, LATE: tl.constexpr):
    late = CHANGE + (split - CHANGE // EARLY) * LATE
    return tl.where(split < CHANGE // EARLY, split * EARLY, late)


# ---------------------------------------------------------------------------------------------------------------------
# One kernel behind the other


@triton.jit
def _in_turn(BEHIND: tl.constexpr):
    # Launched behind another kernel while that one is at work: wait for it, and let the next one come as near.
    if BEHIND:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def _near(x, rows, tokens, row, token, head, x_row, x_token, x_head, live, D: tl.constexpr):
    # Into the cache of the device, where no write of another kernel can make it stale; of what is not there, nothing.
    LINES: tl.constexpr = max(1, D * x.dtype.element_ty.primitive_bitwidth // 1024)
    there = live & (row >= 0) & (row < rows) & (token >= 0) & (token < tokens)
    start = tl.where(there, row, 0).to(tl.int64) * x_row + tl.where(there, token, 0).to(tl.int64) * x_token
    places = x + start[:, None] + tl.cast(head, tl.int64) * x_head + (tl.arange(0, LINES) * (D // LINES))[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [places], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _split_near(
    K, V, TABLE, PAGES, k_row, k_token, k_head, v_row, v_token, v_head, key_rows, key_tokens, pages, segments, splits,
    tiles, KV: tl.constexpr, D: tl.constexpr, N: tl.constexpr, PAGE: tl.constexpr,
    EARLY: tl.constexpr, CHANGE: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    # The keys and values of a program's split. An earlier kernel may still be at work on the table: what it says now,
    # past the cache of this multiprocessor, is good enough for what comes near.
    program = tl.program_id(0)
    head, segment = program % KV, (program // KV) % segments
    split = splits - 1 - program // KV // segments // tiles
    row = tl.load(TABLE + segment * 5, cache_modifier=".cg")
    k_start = tl.load(TABLE + segment * 5 + 3, cache_modifier=".cg")
    k_length = tl.load(TABLE + segment * 5 + 4, cache_modifier=".cg")
    begin = _split_start(split, EARLY, CHANGE, LATE)
    end = tl.minimum(k_length, _split_start(split + 1, EARLY, CHANGE, LATE))
    for first in range(begin, end, N):
        place = first + tl.arange(0, N)
        live = place < end
        if PAGE == 0:
            rows, tokens = row + tl.zeros_like(place), k_start + place
        else:
            listed = live & (place // PAGE < pages)
            rows = tl.load(PAGES + segment * pages + place // PAGE, mask=listed, other=-1, cache_modifier=".cg")
            tokens = place % PAGE
        _near(K, key_rows, key_tokens, rows, tokens, head, k_row, k_token, k_head, live, D)
        _near(V, key_rows, key_tokens, rows, tokens, head, v_row, v_token, v_head, live, D)


# ---------------------------------------------------------------------------------------------------------------------
# The state of a row: its scaled maximum m, its mass, the sum of exp2(scores - m), the sum acc of exp2(scores - m)·v


@triton.jit
def _tokens(X, PAGES, start, stop, stride, page_stride, D: tl.constexpr, N: tl.constexpr, PAGE: tl.constexpr,
            CUT: tl.constexpr):
    # [N, D]: tokens start.. of one head; with CUT those from `stop` on are zero and not read
    offsets = tl.arange(0, N)
    columns = tl.arange(0, D)[None, :]
    if PAGE == 0:
        pointers = X + tl.cast(start, tl.int64) * stride + offsets[:, None] * stride + columns
    elif PAGE % N == 0:
        page = tl.load(PAGES + start // PAGE).to(tl.int64)
        page_base = X + page * page_stride + tl.cast(start % PAGE, tl.int64) * stride
        pointers = page_base + offsets[:, None] * stride + columns
    else:
        positions = start + offsets
        page = tl.load(PAGES + positions // PAGE, mask=positions < stop, other=0).to(tl.int64)
        pointers = X + page[:, None] * page_stride + (positions % PAGE)[:, None] * stride + columns
    if CUT:
        return tl.load(pointers, mask=(start + offsets < stop)[:, None], other=0.0)
    return tl.load(pointers)


@triton.jit
def _empty(M: tl.constexpr, D: tl.constexpr):
    return tl.full((M,), -float("inf"), tl.float32), tl.zeros((M, 8), tl.float32), tl.zeros((M, D), tl.float32)


@triton.jit
def _absorb(m, mass, acc, q, k, v, ones, positions, start, full, scale, N: tl.constexpr, WINDOW: tl.constexpr):
    # One key block on top of the state. scale holds log2(e) too.
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if start >= full:
        keys = start + tl.arange(0, N)
        seen = keys[None, :] <= positions[:, None]
        if WINDOW > 0:
            seen = seen & (positions[:, None] - keys[None, :] < WINDOW)
        scores = tl.where(seen, scores, -float("inf"))
    top = tl.maximum(m, tl.max(scores, 1) * scale)
    base = tl.where(top == -float("inf"), 0.0, top)
    p = tl.exp2(tl.fma(scores, scale, -base[:, None])).to(v.dtype)
    rescale = tl.exp2(m - base)[:, None]
    mass = tl.dot(p, ones, mass * rescale, input_precision="ieee")
    acc = tl.dot(p, v, acc * rescale, input_precision="ieee")
    return top, mass, acc


@triton.jit
def _fold(total_m, total_mass, total, m, mass, acc):
    # A finished split on top of the splits before it; a split in which the row saw nothing changes nothing.
    top = tl.maximum(total_m, m)
    base = tl.where(top == -float("inf"), 0.0, top)
    before = tl.exp2(total_m - base)
    now = tl.exp2(m - base)
    empty = m == -float("inf")
    total_mass = tl.where(empty, total_mass, tl.fma(total_mass, before, mass * now))
    total = tl.where(empty[:, None], total, tl.fma(total, before[:, None], acc * now[:, None]))
    return top, total_mass, total


@triton.jit
def _finish(m, mass, acc, sink, SINKS: tl.constexpr):
    # The output row and its log-sum-exp; `sink` [rows] joins the denominator alone.
    if SINKS:
        logit = sink * LOG2E
        top = tl.maximum(m, logit)
        before = tl.exp2(m - top)
        mass = tl.fma(mass, before, tl.exp2(logit - top))
        acc = acc * before[:, None]
        m = top
    return acc * tl.div_rn(1.0, mass)[:, None], (m + tl.log2(mass)) * LN2


# ---------------------------------------------------------------------------------------------------------------------
# Forward


@triton.jit(do_not_specialize=["segments", "tiles", "splits", "queries", "slots", "pages", "key_rows", "key_tokens"])
def _forward_kernel(
    Q, K, V, TABLE, PAGES, SINK, OUT, LSE, PART, PART_M, PART_L,
    q_row, q_token, q_head, k_row, k_token, k_head, v_row, v_token, v_head,
    scale, segments, tiles, splits, queries, slots, pages, key_rows, key_tokens,
    KV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, SINKS: tl.constexpr, SPLIT: tl.constexpr,
    EARLY: tl.constexpr, CHANGE: tl.constexpr, LATE: tl.constexpr, STAGES: tl.constexpr, BULK: tl.constexpr,
    BEHIND: tl.constexpr = False,
):  # fmt: skip
    if BEHIND:
        _split_near(
            K, V, TABLE, PAGES, k_row, k_token, k_head, v_row, v_token, v_head, key_rows, key_tokens, pages, segments,
            splits, tiles, KV, D, N, PAGE, EARLY, CHANGE, LATE,
        )  # fmt: skip
    _in_turn(BEHIND)
    # Heads vary fastest; the longest rows (with SPLIT, the latest splits) start first. A sample's tiles run side by
    # side, so that its keys and values stay in L2; splits are of all samples at once, since there are few tiles.
    program = tl.program_id(0)
    head = program % KV
    rest = program // KV
    if SPLIT:
        segment = rest % segments
        rest = rest // segments
    else:
        segment = rest // tiles
    tile = tiles - 1 - rest % tiles
    entry = TABLE + segment * 5
    row = tl.load(entry).to(tl.int64)
    q_start = tl.load(entry + 1)
    q_length = tl.load(entry + 2)
    k_start = tl.load(entry + 3).to(tl.int64)
    k_length = tl.load(entry + 4)

    # Rows of a tile: the GROUP query heads of M // GROUP neighbouring queries.
    SPAN: tl.constexpr = M // GROUP
    if tile * SPAN >= q_length:
        return
    rows = tl.arange(0, M)
    query = tile * SPAN + rows // GROUP
    live = (query < q_length) & (rows // GROUP < SPAN)
    positions = k_length - q_length + tl.minimum(query, q_length - 1)
    lowest = k_length - q_length + tile * SPAN
    stop = tl.minimum(lowest + SPAN, k_length)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(lowest - WINDOW + 1, 0) // N * N
    if SPLIT:
        split = splits - 1 - rest // tiles
        begin = _split_start(split, EARLY, CHANGE, LATE)
        end = _split_start(split + 1, EARLY, CHANGE, LATE)
        first = tl.maximum(first, begin)
        stop = tl.minimum(stop, end)
        if first >= stop:
            return
    full = first  # blocks before it are seen whole by every row
    if WINDOW == 0:
        full = tl.maximum(first, tl.minimum((lowest + 1) // N * N, stop // N * N))

    slot = row * queries + q_start + query
    q_head_of = head * GROUP + rows % GROUP
    columns = tl.arange(0, D)
    q_pointers = Q + row * q_row + (q_start + query).to(tl.int64)[:, None] * q_token
    q_pointers += q_head_of.to(tl.int64)[:, None] * q_head + columns[None, :]
    q = tl.load(q_pointers, mask=live[:, None], other=0.0)
    if PAGE == 0:
        k_base = K + row * k_row + k_start * k_token + head.to(tl.int64) * k_head
        v_base = V + row * v_row + k_start * v_token + head.to(tl.int64) * v_head
        page_list = PAGES
    else:
        k_base = K + head.to(tl.int64) * k_head
        v_base = V + head.to(tl.int64) * v_head
        page_list = PAGES + segment.to(tl.int64) * pages

    if BULK:  # the copy engine: no addresses in registers, and zeros past the last key without reading them
        k_block = tl.make_tensor_descriptor(k_base, [k_length, D], [k_token, 1], [N, D])
        v_block = tl.make_tensor_descriptor(v_base, [k_length, D], [v_token, 1], [N, D])
    ones = tl.full((N, 8), 1.0, V.dtype.element_ty)
    m, mass, acc = _empty(M, D)
    total_m, total_mass, total = m, tl.max(mass, 1), acc
    begin = first
    while begin < stop:
        end = stop
        if not SPLIT:
            end = _split_start(_split_of(begin, EARLY, CHANGE, LATE) + 1, EARLY, CHANGE, LATE)
            end = tl.minimum(end, stop)
        m, mass, acc = _empty(M, D)
        for start in tl.range(begin, end, N, num_stages=STAGES):
            if BULK:
                k = k_block.load([start, 0])
                v = v_block.load([start, 0])
            else:
                k = _tokens(k_base, page_list, start, stop, k_token, k_row, D, N, PAGE, True)
                v = _tokens(v_base, page_list, start, stop, v_token, v_row, D, N, PAGE, True)
            m, mass, acc = _absorb(m, mass, acc, q, k, v, ones, positions, start, full, scale, N, WINDOW)
        if not SPLIT:
            total_m, total_mass, total = _fold(total_m, total_mass, total, m, tl.max(mass, 1), acc)
        begin = end

    cell = slot * (KV * GROUP) + q_head_of
    if SPLIT:
        cell += tl.cast(split, tl.int64) * slots * (KV * GROUP)
        tl.store(PART_M + cell, m, mask=live)
        tl.store(PART_L + cell, tl.max(mass, 1), mask=live)
        tl.store(PART + cell[:, None] * D + columns[None, :], acc, mask=live[:, None])
    else:
        sink = total_m
        if SINKS:
            sink = tl.load(SINK + q_head_of)
        out, lse = _finish(total_m, total_mass, total, sink, SINKS)
        tl.store(OUT + cell[:, None] * D + columns[None, :], out.to(OUT.dtype.element_ty), mask=live[:, None])
        tl.store(LSE + cell, lse, mask=live)


# Splits of few queries whose keys and values are at rest. The compiler puts the first loads of a pipelined loop before
# it, so if the query is waited for inside, keys and values are on their way while it is made. Whole groups of blocks
# before the first query come so; what is left of the earlier keys comes into the cache of the device meanwhile, and is
# read with the call's own keys when these are there, block by block.


@triton.jit
def _wait():
    # As `gdc_wait`, with which later versions of Triton would not pipeline a loop.
    tl.inline_asm_elementwise("griddepcontrol.wait; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _picked(x, number: tl.constexpr, AXES: tl.constexpr):
    # x[:, number], which the compiler finds in registers.
    here = (tl.arange(0, x.shape[1]) == number)[None, :]
    if AXES == 3:
        here = here[:, :, None]
    return tl.xor_sum(tl.where(here, x.to(tl.int32, bitcast=True), 0), 1).to(tl.float32, bitcast=True)


@triton.jit
def _absorb_whole(
    m, mass, acc, q, k, values, row, token, head, ones, scale, D: tl.constexpr, N: tl.constexpr, BLOCKS: tl.constexpr
):
    # As `_absorb` of BLOCKS blocks that every row sees whole, one after the other. All scores come first, as maxima are
    # exact in any order: warps wait for one another, and do so once for several blocks.
    M: tl.constexpr = q.shape[0]
    scores = tl.reshape(tl.dot(q, tl.trans(k), input_precision="ieee"), (M, BLOCKS, N))
    tops = tl.max(scores, 2) * scale
    numbers = tl.arange(0, BLOCKS)[None, :]
    before = tl.zeros_like(tops)
    bases = tl.zeros_like(tops)
    for block in tl.static_range(BLOCKS):
        before = tl.where(numbers == block, m[:, None], before)
        m = tl.maximum(m, _picked(tops, block, 2))
        bases = tl.where(numbers == block, m[:, None], bases)
    bases = tl.where(bases == -float("inf"), 0.0, bases)
    p = tl.exp2(tl.fma(scores, scale, -bases[:, :, None]))
    rescales = tl.exp2(before - bases)
    for block in tl.static_range(BLOCKS):
        v = values.load([row, token + block * N, head, 0]).reshape(N, D)
        part = _picked(p, block, 3).to(v.dtype)
        rescale = _picked(rescales, block, 2)[:, None]
        mass = tl.dot(part, ones, mass * rescale, input_precision="ieee")
        acc = tl.dot(part, v, acc * rescale, input_precision="ieee")
    return m, mass, acc


@triton.jit(do_not_specialize=["segments", "splits", "queries", "slots", "key_rows", "key_tokens"])
def _ahead_kernel(
    Q, K, V, keys, values, TABLE, PART, PART_M, PART_L,
    q_row, q_token, q_head, k_row, k_token, k_head, v_row, v_token, v_head,
    scale, segments, splits, queries, slots, key_rows, key_tokens,
    KV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, BLOCKS: tl.constexpr,
    EARLY: tl.constexpr, CHANGE: tl.constexpr, LATE: tl.constexpr, STAGES: tl.constexpr, BEHIND: tl.constexpr = False,
):  # fmt: skip
    """As `_forward_kernel` with SPLIT, of rows, without a window, for at most M // GROUP queries.

    A box of `keys` has BLOCKS · N tokens of K, one of `values` N of V.
    """
    if BEHIND:
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    head = program % KV
    segment = program // KV % segments
    split = splits - 1 - program // KV // segments
    entry = TABLE + segment * 5
    row = tl.load(entry)
    q_start = tl.load(entry + 1)
    q_length = tl.load(entry + 2)
    k_start = tl.load(entry + 3)
    k_length = tl.load(entry + 4)
    old = k_length - q_length
    first = _split_start(split, EARLY, CHANGE, LATE)
    stop = tl.minimum(k_length, _split_start(split + 1, EARLY, CHANGE, LATE))
    whole = first + tl.maximum(tl.minimum(stop, old) - first, 0) // (BLOCKS * N) * (BLOCKS * N)
    if BEHIND:
        place = whole + tl.arange(0, BLOCKS * N)
        near = place < tl.minimum(stop, old)
        rows, tokens = row + tl.zeros_like(place), k_start + place
        _near(K, key_rows, key_tokens, rows, tokens, head, k_row, k_token, k_head, near, D)
        _near(V, key_rows, key_tokens, rows, tokens, head, v_row, v_token, v_head, near, D)

    row64 = row.to(tl.int64)
    member = tl.arange(0, M)
    query = member // GROUP
    live = (query < q_length) & (query < M // GROUP)
    positions = old + tl.minimum(query, q_length - 1)
    q_head_of = head * GROUP + member % GROUP
    columns = tl.arange(0, D)
    q_pointers = Q + row64 * q_row + (q_start + query).to(tl.int64)[:, None] * q_token
    q_pointers += q_head_of.to(tl.int64)[:, None] * q_head + columns[None, :]
    ones = tl.full((N, 8), 1.0, V.dtype.element_ty)
    m, mass, acc = _empty(M, D)
    q = tl.zeros((M, D), Q.dtype.element_ty)
    for start in tl.range(first, whole, BLOCKS * N, num_stages=STAGES):
        k = keys.load([row, k_start + start, head, 0]).reshape(BLOCKS * N, D)
        if start == first:
            if BEHIND:
                _wait()
            q = tl.load(q_pointers, mask=live[:, None], other=0.0)
        m, mass, acc = _absorb_whole(
            m, mass, acc, q, k, values, row, k_start + start, head, ones, scale, D, N, BLOCKS
        )  # fmt: skip
    if BEHIND:
        tl.extra.cuda.gdc_wait()
    if first >= stop:
        return
    if whole < stop:
        q = tl.load(q_pointers, mask=live[:, None], other=0.0)
        k_base = K + row64 * k_row + k_start.to(tl.int64) * k_token + head.to(tl.int64) * k_head
        v_base = V + row64 * v_row + k_start.to(tl.int64) * v_token + head.to(tl.int64) * v_head
        for start in tl.range(whole, stop, N, num_stages=2):
            k = _tokens(k_base, TABLE, start, stop, k_token, k_row, D, N, 0, True)
            v = _tokens(v_base, TABLE, start, stop, v_token, v_row, D, N, 0, True)
            m, mass, acc = _absorb(m, mass, acc, q, k, v, ones, positions, start, 0, scale, N, 0)
    slot = row64 * queries + q_start + query
    cell = slot * (KV * GROUP) + q_head_of + tl.cast(split, tl.int64) * slots * (KV * GROUP)
    tl.store(PART_M + cell, m, mask=live)
    tl.store(PART_L + cell, tl.max(mass, 1), mask=live)
    tl.store(PART + cell[:, None] * D + columns[None, :], acc, mask=live[:, None])


@triton.jit(do_not_specialize=["segments", "queries", "slots", "splits", "limit"])
def _fold_kernel(
    PART, PART_M, PART_L, TABLE, SINK, OUT, LSE, segments, queries, slots, splits, limit,
    HEADS: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
    EARLY: tl.constexpr, CHANGE: tl.constexpr, LATE: tl.constexpr, DEPTH: tl.constexpr, AT_REST: tl.constexpr,
    BEHIND: tl.constexpr = False,
):  # fmt: skip
    # AT_REST: no kernel that may be at work writes the table, which is read before this one's turn.
    if BEHIND:
        tl.extra.cuda.gdc_launch_dependents()
        if not AT_REST:
            tl.extra.cuda.gdc_wait()
    # One program a query head of a slot: find the segment, fold its splits upward. A pad gets 0 and -inf.
    program = tl.program_id(0)
    head = program % HEADS
    slot = (program // HEADS).to(tl.int64)
    row = slot // queries
    token = (slot % queries).to(tl.int32)
    found = -1
    for start in range(0, segments, 128):
        number = start + tl.arange(0, 128)
        entry = TABLE + number * 5
        inside = number < segments
        begin = tl.load(entry + 1, mask=inside, other=0)
        length = tl.load(entry + 2, mask=inside, other=0)
        hit = inside & (tl.load(entry, mask=inside, other=-1) == row) & (token >= begin) & (token < begin + length)
        found = tl.maximum(found, tl.max(tl.where(hit, number, -1), 0))

    columns = tl.arange(0, D)[None, :]
    cells = slot * HEADS + head + tl.zeros((1,), tl.int64)
    out_pointers = OUT + cells[:, None] * D + columns
    if found < 0:
        if BEHIND and AT_REST:
            tl.extra.cuda.gdc_wait()
        tl.store(out_pointers, tl.zeros((1, D), OUT.dtype.element_ty))
        tl.store(LSE + cells, tl.full((1,), -float("inf"), tl.float32))
        return
    entry = TABLE + found * 5
    query = token - tl.load(entry + 1)
    position = tl.load(entry + 4) - tl.load(entry + 2) + query
    first = 0
    if WINDOW > 0:
        first = _split_of(tl.maximum(position - WINDOW + 1, 0), EARLY, CHANGE, LATE)
    last = _split_of(position, EARLY, CHANGE, LATE)
    total_m = tl.full((1,), -float("inf"), tl.float32)
    total_mass = tl.zeros((1,), tl.float32)
    total = tl.zeros((1, D), tl.float32)
    end = tl.minimum(last + 1, splits)
    if BEHIND and AT_REST:
        tl.extra.cuda.gdc_wait()
    for start in range(first, end, DEPTH):
        for ahead in tl.static_range(DEPTH):
            split = start + ahead
            there = cells + tl.cast(split, tl.int64) * slots * HEADS
            some = (split + tl.zeros((1,), tl.int32)) < end
            m = tl.load(PART_M + there, mask=some, other=-float("inf"))
            mass = tl.load(PART_L + there, mask=some, other=0.0)
            acc = tl.load(PART + there[:, None] * D + columns, mask=some[:, None], other=0.0)
            total_m, total_mass, total = _fold(total_m, total_mass, total, m, mass, acc)
    sink = total_m
    if SINKS:
        sink = tl.load(SINK + head + tl.zeros((1,), tl.int32))
    out, lse = _finish(total_m, total_mass, total, sink, SINKS)
    if (last >= splits) | (query >= limit):  # more keys or queries than promised
        out = out * float("nan")
        lse = lse * float("nan")
    tl.store(out_pointers, out.to(OUT.dtype.element_ty))
    tl.store(LSE + cells, lse)


@triton.jit(do_not_specialize=["segments", "length", "limit"])
def _pads_kernel(
    X, LSE, TABLE, segments, length, limit,
    HEADS: tl.constexpr, D: tl.constexpr, COLUMN: tl.constexpr, WITH_LSE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    # Slots of [rows, length, HEADS, D] in no segment get 0 (and -inf); slots past a promised length get NaN.
    blocks = tl.cdiv(length, ROWS)
    row = tl.program_id(0) // blocks
    slots = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    place = tl.full((ROWS,), -1, tl.int32)
    for start in range(0, segments, 64):
        number = start + tl.arange(0, 64)
        entry = TABLE + number * 5
        inside = number < segments
        begin = tl.load(entry + COLUMN, mask=inside, other=0)
        count = tl.load(entry + COLUMN + 1, mask=inside, other=0)
        here = inside & (tl.load(entry, mask=inside, other=-1) == row)
        offset = slots[:, None] - begin[None, :]
        hit = here[None, :] & (offset >= 0) & (offset < count[None, :])
        place = tl.maximum(place, tl.max(tl.where(hit, offset, -1), 1))
    wrong = place >= limit
    write = (slots < length) & (wrong | (place < 0))
    if tl.max(write.to(tl.int32), 0) > 0:
        cells = (row.to(tl.int64) * length + slots) * HEADS
        fill = tl.where(wrong, float("nan"), 0.0)[:, None] + tl.zeros((ROWS, D), tl.float32)
        for head in range(HEADS):
            pointers = X + (cells + head)[:, None] * D + tl.arange(0, D)[None, :]
            tl.store(pointers, fill.to(X.dtype.element_ty), mask=write[:, None])
            if WITH_LSE:
                tl.store(LSE + cells + head, tl.where(wrong, float("nan"), -float("inf")), mask=write)


# ---------------------------------------------------------------------------------------------------------------------
# Backward: with dp_ij = dout_i·v_j and delta_i = dout_i·out_i,
#     dv_j = Σ_i p_ij dout_i,  ds_ij = p_ij (dp_ij - delta_i),  dk_j = scale Σ_i ds_ij q_i,  dq_i = scale Σ_j ds_ij k_j


@triton.jit(do_not_specialize=["queries"])
def _delta_kernel(
    OUT, GRAD, LSE, STATS, o_row, o_token, o_head, g_row, g_token, g_head, queries,
    HEADS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    # -log2(e)·lse and delta side by side, [rows, heads, tokens, 2], for the kernels below. One tile shape a width and
    # always the same alignment, so the tree of this sum is fixed.
    program = tl.program_id(0)
    head = program % HEADS
    blocks = tl.cdiv(queries, ROWS)
    row = (program // HEADS // blocks).to(tl.int64)
    token = program // HEADS % blocks * ROWS + tl.arange(0, ROWS)
    live = token < queries
    columns = tl.arange(0, D)[None, :]
    tokens = token.to(tl.int64)[:, None]
    out = tl.load(OUT + row * o_row + head.to(tl.int64) * o_head + tokens * o_token + columns, mask=live[:, None])
    grad = tl.load(GRAD + row * g_row + head.to(tl.int64) * g_head + tokens * g_token + columns, mask=live[:, None])
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    lse = tl.load(LSE + (row * queries + token) * HEADS + head, mask=live)
    stats = STATS + ((row * HEADS + head) * queries + token) * 2
    tl.store(stats, -(lse * LOG2E), mask=live)
    tl.store(stats + 1, delta, mask=live)


@triton.jit
def _absorb_dq(dq, q, grad, k, v, minus, delta, positions, start, full, scale, N: tl.constexpr, WINDOW: tl.constexpr):
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    p = tl.exp2(tl.fma(scores, scale, minus[:, None]))
    if start >= full:
        keys = start + tl.arange(0, N)
        seen = keys[None, :] <= positions[:, None]
        if WINDOW > 0:
            seen = seen & (positions[:, None] - keys[None, :] < WINDOW)
        p = tl.where(seen, p, 0.0)
    dp = tl.dot(grad, tl.trans(v), input_precision="ieee")
    ds = p * (dp - delta[:, None])
    return tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")


@triton.jit(do_not_specialize=["segments", "tiles", "queries"])
def _dq_kernel(
    Q, K, V, GRAD, STATS, DQ, TABLE,
    q_row, q_token, q_head, k_row, k_token, k_head, v_row, v_token, v_head, g_row, g_token, g_head,
    scale, factor, segments, tiles, queries,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    WINDOW: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # A block of queries of one head over its key blocks, upward.
    program = tl.program_id(0)
    head = (program % HEADS).to(tl.int64)
    entry = TABLE + program // HEADS // tiles * 5  # the tiles of a sample side by side, for L2
    tile = tiles - 1 - program // HEADS % tiles
    row = tl.load(entry).to(tl.int64)
    q_start = tl.load(entry + 1).to(tl.int64)
    q_length = tl.load(entry + 2)
    k_start = tl.load(entry + 3).to(tl.int64)
    k_length = tl.load(entry + 4)
    if tile * M >= q_length:
        return
    query = tile * M + tl.arange(0, M)
    live = query < q_length
    lowest = k_length - q_length + tile * M
    positions = k_length - q_length + query
    stop = tl.minimum(lowest + M, k_length)
    first = 0
    full = tl.minimum((lowest + 1) // N * N, stop // N * N)
    if WINDOW > 0:
        first = tl.maximum(lowest - WINDOW + 1, 0) // N * N
        full = first

    q_base = Q + row * q_row + q_start * q_token + head * q_head
    g_base = GRAD + row * g_row + q_start * g_token + head * g_head
    q = _tokens(q_base, TABLE, tile * M, q_length, q_token, 0, D, M, 0, True)
    grad = _tokens(g_base, TABLE, tile * M, q_length, g_token, 0, D, M, 0, True)
    stats = STATS + ((row * HEADS + head) * queries + q_start + query) * 2
    minus = tl.load(stats, mask=live, other=0.0)
    delta = tl.load(stats + 1, mask=live, other=0.0)
    k_base = K + row * k_row + k_start * k_token + head // GROUP * k_head
    v_base = V + row * v_row + k_start * v_token + head // GROUP * v_head
    dq = tl.zeros((M, D), tl.float32)
    for start in tl.range(first, stop, N, num_stages=STAGES):
        k = _tokens(k_base, TABLE, start, stop, k_token, 0, D, N, 0, True)
        v = _tokens(v_base, TABLE, start, stop, v_token, 0, D, N, 0, True)
        dq = _absorb_dq(dq, q, grad, k, v, minus, delta, positions, start, full, scale, N, WINDOW)
    cell = (row * queries + q_start + query) * HEADS + head
    pointers = DQ + cell[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(pointers, (dq * factor).to(DQ.dtype.element_ty), mask=live[:, None])


@triton.jit(do_not_specialize=["segments", "queries", "keys"])
def _dkv_kernel(
    Q, K, V, GRAD, STATS, DK, DV, TABLE,
    q_row, q_token, q_head, k_row, k_token, k_head, v_row, v_token, v_head, g_row, g_token, g_head,
    scale, factor, segments, queries, keys,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    WINDOW: tl.constexpr, STAGES: tl.constexpr, BULK: tl.constexpr,
):  # fmt: skip
    # A block of M keys: the heads of its group upward, in each the blocks of N queries upward from the first that
    # sees a key. Query blocks start at multiples of N from position 0 of the sample.
    KV: tl.constexpr = HEADS // GROUP
    program = tl.program_id(0)
    kv_head = (program % KV).to(tl.int64)
    tiles = tl.num_programs(0) // KV // segments
    entry = TABLE + program // KV // tiles * 5  # the tiles of a sample side by side, for L2
    tile = program // KV % tiles
    row = tl.load(entry).to(tl.int64)
    q_start = tl.load(entry + 1).to(tl.int64)
    q_length = tl.load(entry + 2)
    k_start = tl.load(entry + 3).to(tl.int64)
    k_length = tl.load(entry + 4)
    if tile * M >= k_length:
        return
    k_base = K + row * k_row + k_start * k_token + kv_head * k_head
    v_base = V + row * v_row + k_start * v_token + kv_head * v_head
    k = _tokens(k_base, TABLE, tile * M, k_length, k_token, 0, D, M, 0, True)
    v = _tokens(v_base, TABLE, tile * M, k_length, v_token, 0, D, M, 0, True)
    key = tile * M + tl.arange(0, M)
    before = k_length - q_length  # keys before the first query
    begin = tl.maximum(tile * M, before) // N
    end = tl.cdiv(k_length, N)
    if WINDOW > 0:
        end = tl.minimum(end, tl.cdiv(tile * M + M - 1 + WINDOW, N))
    offsets = tl.arange(0, N)
    columns = tl.arange(0, D)[None, :]
    q_base = Q + row * q_row + (q_start - before) * q_token
    g_base = GRAD + row * g_row + (q_start - before) * g_token
    if BULK:
        q_block = tl.make_tensor_descriptor(
            q_base + before * q_token, [HEADS, q_length, D], [q_head, q_token, 1], [1, N, D]
        )
        g_block = tl.make_tensor_descriptor(
            g_base + before * g_token, [HEADS, q_length, D], [g_head, g_token, 1], [1, N, D]
        )
    q_offsets = offsets[:, None] * q_token + columns
    g_offsets = offsets[:, None] * g_token + columns
    stats = STATS + (row * HEADS * queries + q_start - before) * 2
    both = offsets[:, None] * 2 + tl.arange(0, 2)[None, :]
    dk = tl.zeros((M, D), tl.float32)
    dv = tl.zeros((M, D), tl.float32)
    for member in range(GROUP):
        head = kv_head * GROUP + member
        q_head_base = q_base + head * q_head
        g_head_base = g_base + head * g_head
        head_stats = stats + head * queries * 2
        for start in tl.range(begin * N, end * N, N, num_stages=STAGES):
            first = tl.cast(start, tl.int64)
            position = start + offsets
            live = (position - before).to(tl.uint32) < q_length.to(tl.uint32)  # both ends in one comparison
            if BULK:
                q = q_block.load([head.to(tl.int32), start - before, 0]).reshape(N, D)
            else:
                q = tl.load(q_head_base + first * q_token + q_offsets, mask=live[:, None], other=0.0)
            # 128 numbers, so that the compiler spreads the load over the threads
            pair = tl.load(head_stats + start * 2 + both, mask=live[:, None], other=0.0)
            minus, delta = tl.split(pair)
            scores = tl.dot(k, tl.trans(q), input_precision="ieee")
            p = tl.exp2(tl.fma(scores, scale, minus[None, :]))  # queries that do not exist: 1, times 0
            if WINDOW > 0:
                apart = position[None, :] - key[:, None]
                p = tl.where((apart >= 0) & (apart < WINDOW), p, 0.0)
            elif start < tile * M + M:
                p = tl.where(position[None, :] >= key[:, None], p, 0.0)
            if BULK:
                grad = g_block.load([head.to(tl.int32), start - before, 0]).reshape(N, D)
            else:
                grad = tl.load(g_head_base + first * g_token + g_offsets, mask=live[:, None], other=0.0)
            dv = tl.dot(p.to(grad.dtype), grad, dv, input_precision="ieee")
            dp = tl.dot(v, tl.trans(grad), input_precision="ieee")
            ds = p * (dp - delta[None, :])
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    cell = ((row * keys + k_start + key) * KV + kv_head)[:, None] * D + columns
    tl.store(DK + cell, (dk * factor).to(DK.dtype.element_ty), mask=(key < k_length)[:, None])
    tl.store(DV + cell, dv.to(DV.dtype.element_ty), mask=(key < k_length)[:, None])


# ---------------------------------------------------------------------------------------------------------------------
# Tiles: measured on an H200, see tests/bench/results/kernels-attention-h200.md


def _forward_tile(dtype: torch.dtype, width: int, group: int, queries: int, split: bool, deep: bool) -> Tile:
    if dtype == torch.float32:
        return Tile(64, 4, 1)
    rows = max(16, min(64, triton.next_power_of_2(max(group, queries * group))))
    if split:
        return Tile(rows, 4, 2 if width == 256 else 5 if deep else 3)
    if width == 256:
        return Tile(rows, 8 if rows == 64 else 4, 2)
    return Tile(rows, 4, 3)


AHEAD_ROWS = 16  # all that `_ahead_kernel` serves


def _ahead_tile(width: int) -> tuple[Tile, int]:
    # With how many blocks of keys at a time.
    return (Tile(AHEAD_ROWS, 8, 3), 1) if width == 256 else (Tile(AHEAD_ROWS, 4, 3), 2)


def _dq_tile(dtype: torch.dtype, width: int) -> Tile:
    if dtype == torch.float32:
        return Tile(32 if width == 256 else 64, 4, 1)
    return Tile(64, 4, 2) if width == 256 else Tile(128, 8, 3)


def _dkv_tile(dtype: torch.dtype, width: int) -> Tile:
    if dtype == torch.float32:
        return Tile(32 if width == 256 else 64, 4, 1)
    return Tile(64, 8, 1) if width == 256 else Tile(64, 4, 2)


# ---------------------------------------------------------------------------------------------------------------------
# Launchers


class _Cache(NamedTuple):
    """Keys and values, and where they stand: rows of tokens, or (pages not None) pages of `page` tokens.

    `copied`: by the call itself, so that they are not at rest.
    """

    key: Tensor
    value: Tensor
    pages: Tensor | None
    page: int
    copied: bool = False


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

    `segments` int32 [n, 5] on the same device: row, query start, query length, key start, key length, as the tables of
    `rlspec.device.operators.Segments`, which are not checked again. The last query stands at the last key, query
    ranges are disjoint; slots in no segment get 0 and -inf. `max_query` and `max_key` are upper bounds on the lengths
    (T and S if left out): they size the grid and nothing else; a segment that is longer gets NaN.
    `sinks` fp32 [Hq]: one more logit in each head's denominator. `window`: a query sees that many keys, its own too.
    Raises ValueError for anything that this kernel does not compute.
    """
    _check(query, key, value, segments, scale, window)
    if key.shape[0] != query.shape[0]:
        raise ValueError(f"query has {query.shape[0]} rows, key has {key.shape[0]}")
    cache = _Cache(_aligned(key), _aligned(value), None, 0)
    cache = cache._replace(copied=cache.key is not key or cache.value is not value)
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
    read, nor is the key start of a segment. The page size divides or is a multiple of 64, and divides the splits.
    """
    _check(query, key_pages, value_pages, segments, scale, window)
    page = key_pages.shape[1]
    if SCHEDULE.early % page:
        raise ValueError(f"pages of {page} tokens do not divide the splits of {SCHEDULE.early} keys")
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
    tile: Tile | None = None,
    bulk: bool | None = None,
    ahead: bool | None = None,
) -> tuple[Tensor, Tensor]:
    # `split`, `tile`, `bulk` and `ahead` are for tests and benchmarks: no choice of theirs may show in the bits
    query = _aligned(query)
    key, value = cache.key, cache.value
    rows, queries, heads, width = query.shape
    kv_heads = key.shape[2]
    group = heads // kv_heads
    if sinks is not None and (sinks.dtype != torch.float32 or sinks.shape != (heads,) or sinks.device != query.device):
        raise ValueError(f"sinks must be fp32 [{heads}] on {query.device}, not {_tag(sinks)} on {sinks.device}")
    sinks = None if sinks is None else sinks.contiguous()
    splits = schedule.count(max_key)
    # As many programs as are at work side by side may start before their turn.
    aside = kv_heads * len(segments) * splits <= SPREAD
    able = window is None and cache.pages is None and not cache.copied and max_query * group <= AHEAD_ROWS
    if ahead is None:
        ahead = able and aside and split is not False and _AT_REST.get() and _bulk(query)
    if split is None:
        span = max(1, 64 // group)
        split = ahead or (splits > 1 and kv_heads * len(segments) * triton.cdiv(max_query, span) < SPREAD)
    assert (able and split) or not ahead
    early = split and aside
    tile = tile or _forward_tile(query.dtype, width, group, max_query, split, early and splits > 4)
    tiles = triton.cdiv(max_query, tile.rows // group)
    bulk = _bulk(query) if bulk is None else bulk
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    lse = torch.empty((rows, queries, heads), dtype=torch.float32, device=query.device)
    part = part_m = part_l = lse
    if split:
        part = lse.new_empty((splits, *query.shape))
        part_m, part_l = lse.new_empty((2, splits, *lse.shape))
    pages = 0 if cache.pages is None else cache.pages.shape[1]
    borders = {"EARLY": schedule.early, "CHANGE": schedule.change, "LATE": schedule.late}
    options = {"D": width, "WINDOW": window or 0, "SINKS": sinks is not None, **borders}
    sink = lse if sinks is None else sinks
    behind = _behind(query) if early else {}
    with _on(query):
        if ahead:
            _launch_ahead(query, key, value, segments, part, part_m, part_l, scale, splits, borders | behind)
        else:
            grid = (kv_heads * len(segments) * tiles * (splits if split else 1),)
            _launch(
                _forward_kernel[grid],
                query, key, value, segments, segments if cache.pages is None else cache.pages, sink, out, lse,
                part, part_m, part_l, *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
                scale * math.log2(math.e), len(segments), tiles, splits, queries, rows * queries, pages,
                *key.shape[:2],
                KV=kv_heads, GROUP=group, M=tile.rows, N=KEYS, PAGE=cache.page, SPLIT=split, STAGES=tile.stages,
                BULK=bulk and not split and cache.pages is None,
                num_warps=tile.warps, **behind, **options,
            )  # fmt: skip
        if split:
            _fold_kernel[(rows * queries * heads,)](
                part, part_m, part_l, segments, sink, out, lse, len(segments), queries, rows * queries, splits,
                max_query, HEADS=heads, DEPTH=8, AT_REST=ahead, num_warps=1, **behind, **options,
            )  # fmt: skip
        else:
            _clear_pads(out, lse, segments, 1, max_query)
    return out, lse


def _launch_ahead(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Tensor,
    part: Tensor,
    part_m: Tensor,
    part_l: Tensor,
    scale: float,
    splits: int,
    options: dict[str, Any],
) -> None:
    (rows, queries, heads, width), kv_heads = query.shape, key.shape[2]
    tile, blocks = _ahead_tile(width)
    boxes = [
        TensorDescriptor(x, list(x.shape), list(x.stride()), [1, tokens, 1, width])
        for x, tokens in ((key, blocks * KEYS), (value, KEYS))
    ]
    _ahead_kernel[(kv_heads * len(segments) * splits,)](
        query, key, value, *boxes, segments, part, part_m, part_l,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
        scale * math.log2(math.e), len(segments), splits, queries, rows * queries, *key.shape[:2],
        KV=kv_heads, GROUP=heads // kv_heads, D=width, M=tile.rows, N=KEYS, BLOCKS=blocks,
        STAGES=tile.stages, num_warps=tile.warps, **options,
    )  # fmt: skip


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
    _check(query, key, value, segments, scale, window)
    if key.shape[0] != query.shape[0]:
        raise ValueError(f"query has {query.shape[0]} rows, key has {key.shape[0]}")
    for name, x in (("out", out), ("grad_out", grad_out)):
        if x.shape != query.shape or x.dtype != query.dtype or x.device != query.device:
            raise ValueError(f"{name} must be as query, {_tag(query)} on {query.device}, not {_tag(x)} on {x.device}")
    if lse.shape != query.shape[:3] or lse.dtype != torch.float32 or lse.device != query.device:
        raise ValueError(f"lse must be fp32 {list(query.shape[:3])} on {query.device}, not {_tag(lse)}")
    max_query = _bound("max_query", max_query, query.shape[1])
    max_key = _bound("max_key", max_key, key.shape[1])
    return _backward(query, key, value, out, lse, grad_out, segments, scale, max_query, max_key, window)


def _backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    segments: Tensor,
    scale: float,
    max_query: int,
    max_key: int,
    window: int | None,
    *,
    dq_tile: Tile | None = None,
    dkv_tile: Tile | None = None,
    bulk: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value, out, grad = (_aligned(x) for x in (query, key, value, out, grad_out))
    lse = lse.contiguous()
    rows, queries, heads, width = query.shape
    keys, kv_heads = key.shape[1:3]
    dq_tile = dq_tile or _dq_tile(query.dtype, width)
    dkv_tile = dkv_tile or _dkv_tile(query.dtype, width)
    bulk = _bulk(query) if bulk is None else bulk
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value))
    stats = lse.new_empty((rows, heads, queries, 2))
    strides = [step for x in (query, key, value, grad) for step in x.stride()[:3]]
    factors = scale * math.log2(math.e), scale
    options = {"HEADS": heads, "GROUP": heads // kv_heads, "D": width, "N": KEYS, "WINDOW": window or 0}
    with _on(query):
        _delta_kernel[(rows * triton.cdiv(queries, 64) * heads,)](
            out, grad, lse, stats, *out.stride()[:3], *grad.stride()[:3], queries, HEADS=heads, D=width, ROWS=64
        )
        grid = (kv_heads * len(segments) * triton.cdiv(max_key, dkv_tile.rows),)
        _launch(
            _dkv_kernel[grid],
            query, key, value, grad, stats, dk, dv, segments, *strides, *factors, len(segments), queries, keys,
            M=dkv_tile.rows, STAGES=dkv_tile.stages, BULK=bulk, num_warps=dkv_tile.warps, **options,
        )  # fmt: skip
        tiles = triton.cdiv(max_query, dq_tile.rows)
        _dq_kernel[(heads * len(segments) * tiles,)](
            query, key, value, grad, stats, dq, segments, *strides, *factors, len(segments), tiles, queries,
            M=dq_tile.rows, STAGES=dq_tile.stages, num_warps=dq_tile.warps, **options,
        )  # fmt: skip
        _clear_pads(dq, None, segments, 1, max_query)
        _clear_pads(dk, None, segments, 3, max_key)
        _clear_pads(dv, None, segments, 3, max_key)
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


# ---------------------------------------------------------------------------------------------------------------------
# Host helpers


def _bulk(x: Tensor) -> bool:
    # fp32 products take their operands from registers, and the interpreter gains nothing
    return x.is_cuda and x.dtype != torch.float32 and torch.cuda.get_device_capability(x.device) >= (9, 0)


def _launch(launch: Callable[..., Any], query: Tensor, *args: Any, **kwargs: Any) -> None:
    # Descriptors made on the device need scratch memory. The allocator is set for this launch and no other.
    def scratch(size: int, alignment: int, stream: int | None) -> Tensor:
        return torch.empty(size, dtype=torch.int8, device=query.device)

    def scoped() -> None:
        triton.set_allocator(scratch)
        launch(query, *args, **kwargs)

    copy_context().run(scoped)


def _clear_pads(x: Tensor, lse: Tensor | None, segments: Tensor, column: int, limit: int) -> None:
    rows, length, heads, width = x.shape
    _pads_kernel[(rows * triton.cdiv(length, 64),)](
        x, x if lse is None else lse, segments, len(segments), length, limit,
        HEADS=heads, D=width, COLUMN=column, WITH_LSE=lse is not None, ROWS=64,
    )  # fmt: skip


def _check(query: Tensor, key: Tensor, value: Tensor, segments: Tensor, scale: float, window: int | None) -> None:
    tags = f"query {_tag(query)}, key {_tag(key)}, value {_tag(value)}"
    if any(x.dim() != 4 for x in (query, key, value)) or 0 in (*query.shape, *key.shape):
        raise ValueError(f"{tags}: attention takes [rows, tokens, heads, width], none of them empty")
    heads, width = query.shape[2:]
    if key.shape != value.shape or key.shape[3] != width or heads % key.shape[2]:
        raise ValueError(f"{tags}: heads or widths do not pair")
    if width not in WIDTHS or heads // key.shape[2] > 64:
        raise ValueError(f"{tags}: widths are {WIDTHS}, with at most 64 query heads a key head")
    if query.dtype not in DTYPES or not query.dtype == key.dtype == value.dtype:
        raise ValueError(f"{tags}: all must be bf16, all fp16 or all fp32")
    if len({x.device for x in (query, key, value, segments)}) > 1:
        raise ValueError(f"{tags}: query, key, value and segments must be on one device")
    if query.device.type != "cuda":
        _check_interpreter(query)
    if segments.dtype != torch.int32 or segments.dim() != 2 or segments.shape[1] != 5 or not len(segments):
        raise ValueError(f"segments must be int32 [segments, 5], not {_tag(segments)}")
    if not segments.is_contiguous():
        raise ValueError("segments must be contiguous")
    if not 0 < scale < math.inf:
        raise ValueError(f"scale must be positive and finite, not {scale}")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, not {window}")


def _check_interpreter(query: Tensor) -> None:
    if query.device.type != "cpu" or isinstance(_forward_kernel, triton.JITFunction):
        raise ValueError(f"attention runs on cuda, or on cpu under TRITON_INTERPRET=1; the query is on {query.device}")
    if query.dtype == torch.bfloat16:
        raise ValueError("the interpreter computes bf16 wrongly: use fp32")


def _bound(name: str, bound: int | None, length: int) -> int:
    if bound is None:
        return length
    if not 0 < bound <= length:
        raise ValueError(f"{name} must lie in 1..{length}, not {bound}")
    return bound


def _aligned(x: Tensor) -> Tensor:
    # Rows of 16 bytes, so that one compiled kernel, with one order of sums, serves every tensor; else a copy.
    whole = x.data_ptr() % 16 == 0 and all(step % 16 == 0 for step in x.stride()[:3])
    if whole and x.stride(3) == 1 and x.stride(1) < 1 << 24:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _tag(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


def _behind(x: Tensor) -> dict[str, bool]:
    """Options of a launch that may begin before the kernel in front of it has ended."""
    return {"BEHIND": True, "launch_pdl": True} if x.is_cuda else {}


def _on(x: Tensor) -> AbstractContextManager[object]:
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
