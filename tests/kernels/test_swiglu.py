from __future__ import annotations

import pytest
import torch

from rlspec.kernels import swiglu as module
from rlspec.kernels.swiglu import swiglu
from tests.kernels.interpreted import behind, compiled, gpu, hopper, interpreted, spills, waits

SHAPES = ((1, 5), (3, 16), (2, 3, 130), (2, 2100))


def inputs(*shape, dtype=torch.float32, device="cpu"):
    """Gate, up and dy."""
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(3, *shape, generator=generator) * 4).to(device, dtype).unbind()


def both(gate, up, dy):
    leaves = [one.detach().requires_grad_() for one in (gate, up)]
    y = swiglu(*leaves)
    return y.detach(), *torch.autograd.grad(y, leaves, dy)


def exact(gate, up, dy):
    gate, up = (one.double().detach().requires_grad_() for one in (gate, up))
    y = gate * torch.sigmoid(gate) * up
    return y.detach(), *torch.autograd.grad(y, (gate, up), dy.double())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@interpreted
def test_the_formula(shape):
    given = inputs(*shape)
    for ours, gold in zip(both(*given), exact(*given), strict=True):
        torch.testing.assert_close(ours.double(), gold, rtol=2e-6, atol=2e-6)


@interpreted
def test_a_row_keeps_its_bits_in_any_company():
    gate, up, dy = inputs(9, 130)
    whole = both(gate, up, dy)
    fused = torch.full((18, 260), torch.nan)
    fused[::2] = torch.cat((gate, up), 1)
    for rows in (slice(0, 1), slice(4, 9)):
        for a, b in zip(both(gate[rows], up[rows], dy[rows]), whole, strict=True):
            assert torch.equal(a, b[rows])
    for a, b in zip(both(fused[::2, :130], fused[::2, 130:], dy), whole, strict=True):
        assert torch.equal(a, b)
    for a, b in zip(both(gate.T, up.T, dy.T), whole, strict=True):
        assert torch.equal(a, b.T)


@pytest.mark.parametrize(
    "gate, up, message",
    [
        (torch.ones(3), torch.ones(4), "does not match"),
        (torch.ones(3), torch.ones(3).half(), "float16"),
        (torch.ones(3).double(), torch.ones(3).double(), "float64"),
        (torch.ones(0), torch.ones(0), "empty"),
    ],
    ids=("shape", "mixed", "double", "empty"),
)
def test_what_is_refused(gate, up, message):
    with pytest.raises(ValueError, match=message):
        swiglu(gate, up)


@compiled
def test_a_cpu_is_refused():
    with pytest.raises(ValueError, match="CUDA"):
        swiglu(torch.ones(3), torch.ones(3))


@compiled
@pytest.mark.parametrize("dtype", module.DTYPES, ids=str)
def test_it_compiles_for_hopper(dtype):
    options = {"BLOCK": 2048, "num_warps": 4, "enable_fp_fusion": False, "grid": (1,)}
    with hopper():
        there = module._forward.warmup(*[dtype] * 3, *[12288] * 3, 6, **options, **behind(module._forward))
        assert waits(there)
        back = module._backward.warmup(*[dtype] * 5, *[12288] * 4, 6, **options)
        assert spills(there) == spills(back) == 0
        assert "LDG.E.128" in there.asm["sass"] and "STG.E.128" in back.asm["sass"]


@gpu
@pytest.mark.parametrize("dtype", module.DTYPES, ids=str)
def test_on_a_gpu(dtype):
    gate, up, dy = inputs(1000, 2100, dtype=dtype, device="cuda")
    whole = both(gate, up, dy)
    tolerance = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    for ours, gold in zip(whole, exact(gate, up, dy), strict=True):
        torch.testing.assert_close(ours.double(), gold, rtol=tolerance, atol=1e-4)
    fused = torch.cat((gate, up), 1)
    for rows in (slice(0, 1), slice(3, 20), slice(0, 1000, 2)):
        for g, u in ((gate, up), (fused[:, :2100], fused[:, 2100:])):
            for a, b in zip(both(g[rows], u[rows], dy[rows]), whole, strict=True):
                assert torch.equal(a, b[rows])
