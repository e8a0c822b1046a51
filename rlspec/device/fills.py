"""Inputs as pure functions of logical identity, so that nothing but the operator can differ between layouts.

`published`: the fill of the first closeout; element j of the row of (sample, position) is
(((j + 17·Σord(id) + 13·position + 11·offset) mod 257) − 128) / 1024, which bf16 holds exactly.
`hashed`: near N(0, 1), the sum of four bytes of a 32-bit hash of (seed, sample, position, element, offset).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

FILLS = ("published", "hashed")
_CHUNK = 1 << 26  # elements filled at a time, in int64
_MASK = 0xFFFFFFFF


def rows(
    fill: str, seed: int, sample: str, positions: Sequence[int], width: int, offset: int, device: torch.device
) -> Tensor:
    """fp32 [positions, width] of one sample."""
    made = torch.empty(len(positions), width, device=device)
    at = torch.as_tensor(positions, dtype=torch.int64, device=device).unsqueeze(1)
    element = torch.arange(width, dtype=torch.int64, device=device)
    step = max(1, _CHUNK // width)
    for start in range(0, len(positions), step):
        place = at[start : start + step]
        if fill == "published":
            whole = element + 17 * sum(map(ord, sample)) + 13 * place + 11 * offset
            made[start : start + step] = _published(whole)
        else:
            made[start : start + step] = _normal(
                _hash(element, _hash(place, zlib.crc32(sample.encode()), seed, offset))
            )
    return made


def parameter(
    fill: str, seed: int, shape: Sequence[int], offset: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """`dtype` [shape]: a weight that all samples share."""
    made = torch.empty(shape, device=device, dtype=dtype)
    flat = made.view(-1)
    for start in range(0, flat.numel(), _CHUNK):
        element = torch.arange(start, min(start + _CHUNK, flat.numel()), dtype=torch.int64, device=device)
        flat[start : start + len(element)] = (
            _published(17 * element + 13 * offset)
            if fill == "published"
            else _normal(_hash(element & _MASK, element >> 32, seed, offset))
        ).to(dtype)
    return made


def integers(seed: int, sample: str, positions: Sequence[int], count: int, below: int, offset: int) -> Tensor:
    """int64 [positions, count], each below `below`, without repeats in a row: ids, targets, choices of experts."""
    at = torch.as_tensor(positions, dtype=torch.int64).unsqueeze(1)
    start = _hash(at, zlib.crc32(sample.encode()), seed, offset)
    return (start % below + torch.arange(count) * max(1, below // max(count, 1))) % below


def few_experts(seed: int, sample: str, positions: Sequence[int], count: int, below: int, offset: int) -> Tensor:
    """int64 [positions, count], as `integers`, but half of all choices fall on `count` experts, a quarter on the next.

    Each slot has a share of the experts to itself, of which the last is never chosen, if there are two or more.
    """
    at = torch.as_tensor(positions, dtype=torch.int64).unsqueeze(1)
    start = _hash(at, zlib.crc32(sample.encode()), seed, offset)
    bits = _hash(torch.arange(count), 0, 0) ^ start
    step = sum(((bits & ((1 << place) - 1)) == 0).long() for place in range(1, max(2, below // count - 1)))
    share = (start + torch.arange(count)) % count
    return share * (below // count) + torch.as_tensor(step).clamp(max=max(0, below // count - 2))


def coarse(x: Tensor, step: float = 0.5) -> Tensor:
    """To multiples of ½ of at most 2: sums of products of such numbers are exact in fp32, in any order.

    Of these with multiples of 1/16, up to 2¹⁷ products are.
    """
    return (x / step).round().clamp(-2 / step, 2 / step) * step


# Logits of `tied_experts` lie from 4 to 8, where a unit in the last place of fp32 is this.
TIE = 2.0**-21


def tied_experts(weight: Tensor, scale: float) -> Tensor:
    """Weights [E, H], H > 2, of experts in threes: the second is a TIE of the first apart, the third is its equal.

    For `tied_tokens`, whose first element is -1, 0 or 1 and decides to which side, and whose last is 1.
    """
    number = torch.arange(len(weight), device=weight.device)
    made = coarse(weight.float())[number // 3 * 3] * scale
    made[:, 0] = torch.where(number % 3 == 1, TIE, 0.0)
    made[:, -1] = 6.0
    return made.to(weight.dtype)


def tied_tokens(x: Tensor, positions: Sequence[int]) -> Tensor:
    """Rows [positions, H] for `tied_experts`."""
    made = coarse(x)
    made[:, 0] = torch.as_tensor(positions, device=x.device) % 3 - 1
    made[:, -1] = 1
    return made


def _published(whole: Tensor) -> Tensor:
    return ((whole % 257) - 128) / 1024


def _hash(value: Tensor, *keys: Tensor | int) -> Tensor:
    """32 well-mixed bits of whole numbers, as int64; the finaliser of MurmurHash3 after each key."""
    for key in (0x9E3779B9, *keys):
        value = (value * 0x2545F491 + key) & _MASK
        value = (value ^ (value >> 16)) * 0x85EBCA6B & _MASK
        value = (value ^ (value >> 13)) * 0xC2B2AE35 & _MASK
        value = value ^ (value >> 16)
    return value


def _normal(bits: Tensor) -> Tensor:
    total = (bits & 255) + (bits >> 8 & 255) + (bits >> 16 & 255) + (bits >> 24)
    return (total - 510) * (1 / 147.8)  # no power of two: fp32 sums of such products round, so their order shows
