"""The copy of keys and values into a cache: to the bit, from any layout, and nothing else is touched."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlspec.device import kv_cache as caches
from rlspec.kernels import kv_cache
from tests.kernels.interpreted import behind, compiled, gpu, hopper, interpreted, spills, waits

TABLE = torch.tensor([[0, 0, 1, 1], [1, 3, 0, 2], [2, 2, 0, 1], [4, 0, 3, 3]])


def tensors(heads: int, width: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[Tensor, ...]:
    """Two caches [3, heads, 5, width] full of NaN, and new keys and values as views of a joined product."""
    generator = torch.Generator().manual_seed(heads)
    drawn = torch.randn(2, 4, 3 * heads * width, generator=generator).to(device, dtype)
    keys, values = (
        drawn[..., i * heads * width : (i + 1) * heads * width].unflatten(-1, (heads, width)) for i in (0, 2)
    )
    stores = (torch.full((3, heads, 5, width), float("nan"), dtype=dtype, device=device) for _ in range(2))
    return *stores, keys, values


def check(keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor) -> None:
    row, column, block, place = TABLE.to(keys.device)
    for store, new in ((keys, new_keys), (values, new_values)):
        want = torch.full_like(store, float("nan"))
        want[block, :, place] = new[row, column]
        assert torch.equal(store.nan_to_num(7), want.nan_to_num(7))


@pytest.mark.parametrize(("heads", "width"), [(1, 16), (3, 24), (8, 128)])
@interpreted
def test_every_token_lands_at_its_place(heads: int, width: int) -> None:
    given = tensors(heads, width)
    kv_cache.write(*given, TABLE)
    check(*given)


@compiled
def test_it_compiles_for_hopper() -> None:
    options = {"TOKENS": 1, "BLOCK": 1024, "num_warps": 4, "grid": (1,), **behind(kv_cache._write)}
    types = [torch.bfloat16] * 4 + [torch.int64]
    with hopper():
        kernel = kv_cache._write.warmup(*types, 1, *[131072, 16384, 128], *[6144, 6144, 128] * 2, 8, 128, **options)
        assert spills(kernel) == 0 and waits(kernel)


@gpu
@pytest.mark.parametrize("backend", ["triton", "cuda"])
@pytest.mark.parametrize(("heads", "width"), [(1, 16), (3, 24), (8, 128)])
def test_every_token_lands_at_its_place_on_a_gpu(heads: int, width: int, backend: str) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        keys, values, new_keys, new_values = tensors(heads, width, dtype, "cuda")
        caches._WRITERS[backend](((keys, new_keys), (values, new_values)), TABLE.cuda())
        check(keys, values, new_keys, new_values)
