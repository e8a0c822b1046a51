"""Keys and values of a call into a cache: keys[block, :, place] = new keys[row, column], and the same for values.

Promise: what is written is what was given, to the bit. Limits: one dtype, whatever it is; the last dimension lies side
by side in all four tensors.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor


def write(keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, table: Tensor) -> None:
    """keys and values [blocks, heads, places, D] of one layout, new ones [B, T, heads, D], in one launch.

    `table` int64 [4, tokens], contiguous: row, column, block and place of each token. Nothing is looked at by the host.
    """
    assert keys.stride() == values.stride() and table.is_contiguous()
    _, heads, _, width = keys.shape
    together = max(1, 1024 // triton.next_power_of_2(heads * width))
    tokens = table.shape[1]
    with _device(keys):
        _write[(triton.cdiv(tokens, together), 2)](
            keys, values, new_keys, new_values, table, tokens, *keys.stride()[:3], *new_keys.stride()[:3],
            *new_values.stride()[:3], heads, width, TOKENS=together, BLOCK=triton.next_power_of_2(heads * width),
            num_warps=4, **_behind(keys),
        )  # fmt: skip


@triton.jit
def _in_turn(BEHIND: tl.constexpr):
    # Launched behind another kernel while that one is at work: wait for it, and let the next one come as near.
    if BEHIND:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def _copy(store, new, table, tokens, block_step, head_step, place_step, row_step, column_step, new_head_step,
          heads, width, TOKENS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS))[:, None]
    number = tl.arange(0, BLOCK)[None, :]
    head, column = number // width, number % width
    known = token < tokens
    row, slot = tl.load(table + token, mask=known), tl.load(table + tokens + token, mask=known)
    block, place = tl.load(table + 2 * tokens + token, mask=known), tl.load(table + 3 * tokens + token, mask=known)
    inside = known & (head < heads)
    value = tl.load(new + row * row_step + slot * column_step + head * new_head_step + column, mask=inside)
    tl.store(store + block * block_step + place * place_step + head * head_step + column, value, mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _write(
    keys, values, new_keys, new_values, table, tokens, block_step, head_step, place_step,
    key_row, key_column, key_head, value_row, value_column, value_head, heads, width,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, BEHIND: tl.constexpr = False,
):  # fmt: skip
    _in_turn(BEHIND)
    if tl.program_id(1) == 0:
        _copy(
            keys, new_keys, table, tokens, block_step, head_step, place_step, key_row, key_column, key_head,
            heads, width, TOKENS, BLOCK,
        )  # fmt: skip
    else:
        _copy(
            values, new_values, table, tokens, block_step, head_step, place_step, value_row, value_column, value_head,
            heads, width, TOKENS, BLOCK,
        )  # fmt: skip


def _behind(x: Tensor) -> dict[str, bool]:
    """Options of a launch that may begin before the kernel in front of it has ended."""
    return {"BEHIND": True, "launch_pdl": True} if x.is_cuda else {}


def _device(x: Tensor) -> AbstractContextManager[object]:
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
