from __future__ import annotations

import pytest
import torch

from rlspec.kernels import rope as module
from rlspec.kernels.rope import rope
from tests.kernels.interpreted import behind, compiled, gpu, hopper, interpreted, spills, waits

SHAPES = ((1, 1, 1, 2), (2, 3, 5, 8), (1, 7, 2, 20), (3, 2, 33, 128))


def inputs(*shape, dtype=torch.float32, table=torch.float32, device="cpu"):
    """x, cos, sin and dy."""
    rows, tokens, _, width = shape
    generator = torch.Generator().manual_seed(0)
    x, dy = torch.randn(2, *shape, generator=generator).to(device, dtype)
    angles = torch.rand(rows, tokens, width // 2, generator=generator) * 7
    return x, angles.cos().to(device, table), angles.sin().to(device, table), dy


def both(x, cos, sin, dy):
    x = x.detach().requires_grad_()
    y = rope(x, cos, sin)
    return y.detach(), torch.autograd.grad(y, x, dy)[0]


def exact(x, cos, sin, dy):
    x, cos, sin = (one.double().detach() for one in (x, cos[:, :, None], sin[:, :, None]))
    first, second = x.requires_grad_().chunk(2, -1)
    y = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    return y.detach(), torch.autograd.grad(y, x, dy.double())[0]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@interpreted
def test_the_formula(shape):
    given = inputs(*shape)
    for ours, gold in zip(both(*given), exact(*given), strict=True):
        torch.testing.assert_close(ours.double(), gold, rtol=1e-6, atol=1e-6)


@interpreted
def test_both_products_are_rounded():
    x, cos, sin, _ = inputs(2, 3, 5, 8)
    first, second = x.chunk(2, -1)
    c, s = cos[:, :, None], sin[:, :, None]
    assert torch.equal(rope(x, cos, sin), torch.cat((first * c - second * s, second * c + first * s), -1))


@interpreted
def test_a_token_keeps_its_bits_in_any_company():
    x, cos, sin, dy = inputs(2, 6, 3, 8)
    whole = both(x, cos, sin, dy)
    fused = torch.full((4, 6, 40), torch.nan)
    fused[::2, :, 8:32] = x.flatten(2)
    inside = fused[::2, :, 8:32].unflatten(2, (3, 8))
    for rows, tokens in ((slice(1, 2), slice(0, 6)), (slice(0, 2), slice(5, 6)), (slice(0, 2), slice(0, 6))):
        for source in (x, inside):
            part = [one[rows, tokens] for one in (source, cos, sin, dy)]
            for a, b in zip(both(*part), whole, strict=True):
                assert torch.equal(a, b[rows, tokens])
    packed = [one.flatten(0, 1)[None] for one in (x, cos, sin, dy)]
    for a, b in zip(both(*packed), whole, strict=True):
        assert torch.equal(a[0], b.flatten(0, 1))


@interpreted
def test_tables_of_one_row_for_all():
    x, cos, sin, dy = inputs(2, 6, 3, 8)
    shared = [one[:1].expand(2, -1, -1) for one in (cos, sin)]
    for a, b in zip(both(x, *shared, dy), both(x, *(one.contiguous() for one in shared), dy), strict=True):
        assert torch.equal(a, b)


X, TABLE = torch.ones(1, 2, 3, 4), torch.ones(1, 2, 2)


@pytest.mark.parametrize(
    "x, cos, message",
    [
        (X, torch.ones(1, 2, 4), "D/2"),
        (torch.ones(1, 2, 3, 5), TABLE, "even D"),
        (X[0], TABLE, "heads"),
        (X.double(), TABLE, "float64"),
        (X[:, :0], TABLE[:, :0], "empty"),
        (X, TABLE.clone().requires_grad_(), "gradient"),
    ],
    ids=("width", "odd", "rank", "double", "empty", "gradient"),
)
def test_what_is_refused(x, cos, message):
    with pytest.raises(ValueError, match=message):
        rope(x, cos, cos)


@compiled
def test_a_cpu_is_refused():
    with pytest.raises(ValueError, match="CUDA"):
        rope(X, TABLE, TABLE)


@compiled
@pytest.mark.parametrize("dtype", module.DTYPES, ids=str)
@pytest.mark.parametrize("heads, half", [(32, 64), (8, 64), (16, 32), (8, 128)], ids=str)
def test_it_compiles_for_hopper(dtype, heads, half):
    with hopper():
        kernel = module._kernel.warmup(
            dtype, torch.float32, torch.float32, dtype, heads * half * 2, half * 2, half, half, 1000, heads, half,
            BACK=True, TOKENS=max(1, 2048 // (heads * half)), HEADS=min(heads, 2048 // half), PAIRS=half,
            num_warps=4, enable_fp_fusion=False, grid=(1,), **behind(module._kernel),
        )  # fmt: skip
        assert waits(kernel)
        assert spills(kernel) == 0 and "LDG.E.128" in kernel.asm["sass"] and "STG.E.128" in kernel.asm["sass"]


@gpu
@pytest.mark.parametrize("dtype", module.DTYPES, ids=str)
@pytest.mark.parametrize("table", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_gpu(dtype, table):
    given = inputs(3, 130, 12, 128, dtype=dtype, table=table, device="cuda")
    whole = both(*given)
    tolerance = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    for ours, gold in zip(whole, exact(*given), strict=True):
        torch.testing.assert_close(ours.double(), gold, rtol=tolerance, atol=tolerance)
    fused = torch.zeros(3, 130, 20 * 128, dtype=dtype, device="cuda")
    fused[:, :, 256 : 14 * 128] = given[0].flatten(2)
    for x in (given[0], fused[:, :, 256 : 14 * 128].unflatten(2, (12, 128))):
        for part in ((slice(1, 2), slice(0, 130)), (slice(0, 3), slice(7, 8)), (slice(0, 3, 2), slice(0, 130, 3))):
            for a, b in zip(both(*(one[part] for one in (x, *given[1:]))), whole, strict=True):
                assert torch.equal(a, b[part])
