from __future__ import annotations

import pytest
import torch

from rlspec.kernels import residual_add as module
from rlspec.kernels.residual_add import residual_add
from tests.kernels.interpreted import behind, compiled, gpu, hopper, interpreted, spills, waits

PAIRS = [(dtype, dtype) for dtype in module.DTYPES] + [(torch.float32, dtype) for dtype in module.DTYPES[:2]]


def inputs(*shape, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, *shape, generator=generator).to(device).unbind()


@pytest.mark.parametrize("shape", [(1, 5), (2, 3, 130), (2, 4100)], ids=str)
@interpreted
def test_the_sum_and_its_gradients(shape):
    residual, x, dy = inputs(*shape)
    leaves = residual.clone().requires_grad_(), x.clone().requires_grad_()
    y = residual_add(*leaves)
    assert torch.equal(y, residual + x)
    for grad in torch.autograd.grad(y, leaves, dy):
        assert torch.equal(grad, dy)


@interpreted
def test_strides_and_rows():
    residual, x, _ = inputs(9, 130)
    wide = torch.full((18, 140), torch.nan)
    wide[::2, 3:133] = x
    assert torch.equal(residual_add(residual[4:], wide[::2, 3:133][4:]), (residual + x)[4:])
    assert torch.equal(residual_add(residual.T, x.T), (residual + x).T)


@interpreted
def test_the_gradient_of_a_narrow_x_is_rounded_once():
    residual, x, dy = inputs(3, 40)
    x = x.bfloat16().requires_grad_()
    y = residual_add(residual, x)
    assert y.dtype == torch.float32 and torch.equal(y, residual + x.float())
    assert torch.equal(torch.autograd.grad(y, x, dy)[0], dy.bfloat16())


@pytest.mark.parametrize(
    "residual, x, message",
    [
        (torch.ones(3), torch.ones(1), "does not match"),
        (torch.ones(3), torch.ones(3).double(), "float64"),
        (torch.ones(3).half(), torch.ones(3), "float32 does not fit"),
        (torch.ones(3).half(), torch.ones(3).bfloat16(), "bfloat16 does not fit"),
        (torch.ones(0), torch.ones(0), "empty"),
    ],
    ids=("shape", "double", "wide x", "other x", "empty"),
)
def test_what_is_refused(residual, x, message):
    with pytest.raises(ValueError, match=message):
        residual_add(residual, x)


@compiled
def test_a_cpu_is_refused():
    with pytest.raises(ValueError, match="CUDA"):
        residual_add(torch.ones(3), torch.ones(3))


@compiled
@pytest.mark.parametrize("residual, x", PAIRS, ids=str)
def test_it_compiles_for_hopper(residual, x):
    options = {"BLOCK": 4096, "num_warps": 4, "enable_fp_fusion": False, "grid": (1,), **behind(module._forward)}
    with hopper():
        kernel = module._forward.warmup(residual, x, residual, 4096, 4096, 4096, 1, **options)
        assert waits(kernel)
        assert spills(kernel) == 0 and "LDG.E.128" in kernel.asm["sass"] and "STG.E.128" in kernel.asm["sass"]


@gpu
@pytest.mark.parametrize("residual, x", PAIRS, ids=str)
def test_on_a_gpu(residual, x):
    a, b, dy = inputs(1000, 2100, device="cuda")
    leaves = a.to(residual).requires_grad_(), b.to(x).requires_grad_()
    dy = dy.to(residual)
    y = residual_add(*leaves)
    assert torch.equal(y, (leaves[0].float() + leaves[1].float()).to(residual))
    for grad, leaf in zip(torch.autograd.grad(y, leaves, dy), leaves, strict=True):
        assert torch.equal(grad, dy.to(leaf.dtype))
    for rows in (slice(0, 1), slice(3, 20), slice(0, 1000, 2)):
        assert torch.equal(residual_add(*(one[rows] for one in leaves)), y[rows])
