from __future__ import annotations

import pytest
import torch

from rlspec.kernels import silu as module
from rlspec.kernels.silu import silu
from tests.kernels.interpreted import compiled, gpu, hopper, interpreted, spills

SHAPES = ((1, 5), (3, 16), (2, 3, 130), (7,), (2, 4100))


def inputs(*shape, seed=0, dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 4).to(device, dtype)


def both(x, dy):
    x = x.detach().requires_grad_()
    y = silu(x)
    return y.detach(), torch.autograd.grad(y, x, dy)[0]


def exact(x, dy):
    x = x.double().detach().requires_grad_()
    y = x * torch.sigmoid(x)
    return y.detach(), torch.autograd.grad(y, x, dy.double())[0]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@interpreted
def test_the_formula(shape):
    x, dy = inputs(*shape), inputs(*shape, seed=1)
    for ours, gold in zip(both(x, dy), exact(x, dy), strict=True):
        torch.testing.assert_close(ours.double(), gold, rtol=1e-6, atol=1e-6)


@interpreted
def test_the_ends_of_the_range():
    x = torch.tensor([-torch.inf, -200.0, -88.0, -0.0, 0.0, 88.0, 200.0, torch.inf, torch.nan])
    y, dx = both(x, torch.ones_like(x))
    assert y[0].isnan() and y[8].isnan() and y[7] == torch.inf
    torch.testing.assert_close(y[1:7], torch.tensor([0.0, -0.0, -0.0, 0.0, 88.0, 200.0]))
    torch.testing.assert_close(dx[1:7], torch.tensor([0.0, 0.0, 0.5, 0.5, 1.0, 1.0]))


@interpreted
def test_a_row_keeps_its_bits_in_any_company():
    x, dy = inputs(9, 130), inputs(9, 130, seed=1)
    whole = both(x, dy)
    wide = torch.full((18, 140), torch.nan)
    wide[::2, 3:133] = x
    for rows in (slice(0, 1), slice(4, 9)):
        for a, b in zip(both(x[rows], dy[rows]), whole, strict=True):
            assert torch.equal(a, b[rows])
    for a, b in zip(both(wide[::2, 3:133], dy), whole, strict=True):
        assert torch.equal(a, b)
    for a, b in zip(both(x.T, dy.T), whole, strict=True):
        assert torch.equal(a, b.T)


@interpreted
def test_a_gradient_that_is_one_number_spread_out():
    x = inputs(3, 40).requires_grad_()
    silu(x).sum().backward()
    assert torch.equal(x.grad, both(x, torch.ones(3, 40))[1])


@pytest.mark.parametrize(
    "x, message", [(torch.ones(3, dtype=torch.float64), "float64"), (torch.ones(0, 4), "empty")], ids=str
)
def test_what_is_refused(x, message):
    with pytest.raises(ValueError, match=message):
        silu(x)


@compiled
def test_a_cpu_is_refused():
    with pytest.raises(ValueError, match="CUDA"):
        silu(torch.ones(3))


@compiled
@pytest.mark.parametrize("dtype", module.DTYPES, ids=str)
def test_it_compiles_for_hopper(dtype):
    options = {"BLOCK": 2048, "num_warps": 4, "enable_fp_fusion": False, "grid": (1,)}
    with hopper():
        there = module._forward.warmup(dtype, dtype, 4096, 4096, 2, **options)
        back = module._backward.warmup(dtype, dtype, dtype, 4096, 4096, 4096, 2, **options)
        assert spills(there) == spills(back) == 0
        assert "LDG.E.128" in there.asm["sass"] and "STG.E.128" in there.asm["sass"]


@gpu
@pytest.mark.parametrize("dtype", module.DTYPES, ids=str)
def test_on_a_gpu(dtype):
    x, dy = (inputs(1000, 4100, seed=seed, dtype=dtype, device="cuda") for seed in (0, 1))
    whole = both(x, dy)
    tolerance = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    for ours, gold in zip(whole, exact(x, dy), strict=True):
        torch.testing.assert_close(ours.double(), gold, rtol=tolerance, atol=1e-4)
    for a, b in zip(both(x, dy), whole, strict=True):
        assert torch.equal(a, b)
    wide = torch.full((1000, 4101), torch.nan, dtype=dtype, device="cuda")
    wide[:, 1:] = x
    for rows in (slice(0, 1), slice(3, 20), slice(0, 1000, 2)):
        for source in (x, wide[:, 1:]):
            for a, b in zip(both(source[rows], dy[rows]), whole, strict=True):
                assert torch.equal(a, b[rows])
