"""combine: the formula, the order of slots, bits free of where rows lie, what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlspec.kernels import combine as combining
from rlspec.kernels.combine import combine
from tests.kernels.interpreted import compiled, gpu, hopper, interpreted, spills

BF16 = torch.bfloat16


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def error(value: Tensor, exact: Tensor) -> float:
    return float((value.double() - exact).norm() / exact.norm())


def both(slots: Tensor, weights: Tensor, dy: Tensor, order: Tensor) -> tuple[Tensor, ...]:
    """out, and the gradients of slots [N, k, H] and weights, of rows that lie in this order."""
    inverse = order.argsort()
    leaves = slots.flatten(0, 1)[order].requires_grad_(), weights.clone().requires_grad_()
    out = combine(*leaves, inverse)
    drows, dweights = torch.autograd.grad(out, leaves, dy)
    return out.detach(), drows[inverse].view_as(slots), dweights


def permutation(count: int, seed: int = 0, device: str = "cpu") -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed)).to(device)


@pytest.mark.parametrize("shape", [(1, 1, 5), (7, 3, 130)])
@interpreted
def test_forward_and_gradients_are_the_formula(shape: tuple[int, int, int]) -> None:
    tokens, top_k, width = shape
    slots, weights, dy = draw(*shape), draw(tokens, top_k, seed=1), draw(tokens, width, seed=2)
    found = both(slots, weights, dy, permutation(tokens * top_k))
    exact = [one.double().requires_grad_() for one in (slots, weights)]
    out = (exact[0] * exact[1].unsqueeze(-1)).sum(1)
    gold = (out.detach(), *torch.autograd.grad(out, exact, dy.double()))
    assert all(error(a, b) < 1e-6 for a, b in zip(found, gold, strict=True))


@interpreted
def test_slots_are_added_in_their_order_wherever_rows_lie() -> None:
    # 1 + 2⁻²⁴ + 2⁻²⁴ is 1 from the left, and more from the right.
    slots = torch.tensor([1.0, 2.0**-24, 2.0**-24]).view(1, 3, 1).expand(2, 3, 4).contiguous()
    slots[1] = slots[1].flip(0)
    weights, dy = torch.ones(2, 3), draw(2, 4)
    wholes = [both(slots, weights, dy, permutation(6, seed)) for seed in range(3)]
    assert wholes[0][0][0].eq(1).all() and wholes[0][0][1].gt(1).all()
    assert all(torch.equal(a, b) for one in wholes[1:] for a, b in zip(one, wholes[0], strict=True))


@interpreted
def test_rows_of_other_tokens_cannot_leak() -> None:
    slots, weights, dy = draw(3, 2, 8), draw(3, 2, seed=1), draw(3, 8, seed=2)
    want = both(slots, weights, dy, permutation(6))
    slots[1], weights[1], dy[1] = float("nan"), float("nan"), float("nan")
    for a, b in zip(both(slots, weights, dy, permutation(6)), want, strict=True):
        assert torch.equal(a[[0, 2]], b[[0, 2]])


@interpreted
def test_wrong_arguments_are_refused() -> None:
    rows, weights, inverse = draw(6, 8), draw(3, 2), permutation(6)
    for bad, words in (
        ((rows[:5], weights, inverse), "takes"),
        ((rows, weights, inverse[:5]), "takes"),
        ((rows[:0], weights, inverse), "takes"),
        ((rows, weights.double(), inverse), "are due"),
        ((rows, weights, inverse.int()), "are due"),
        ((rows.to(BF16), weights, inverse), "interpreter"),
    ):
        with pytest.raises(ValueError, match=words):
            combine(*bad)


@compiled
def test_cpu_tensors_are_refused_without_the_interpreter() -> None:
    with pytest.raises(ValueError, match="run on CUDA"):
        combine(draw(6, 8), draw(3, 2), permutation(6))


@compiled
def test_both_kernels_compile_without_spills() -> None:
    rows, weights, inverse = torch.empty(32, 2048, dtype=BF16), torch.empty(4, 8), torch.empty(32, dtype=torch.int64)
    out = torch.empty(4, 2048, dtype=BF16)
    with hopper():
        for launch in (
            combining._forward_launch(rows, weights, inverse, out),
            combining._backward_launch(rows, weights, inverse, out, rows, weights),
        ):
            assert spills(launch.kernel.warmup(*launch.args, grid=(1,), **launch.options)) == 0


@gpu
def test_a_token_has_the_same_bits_in_every_call() -> None:
    slots, weights = draw(300, 8, 2048, dtype=BF16, device="cuda"), draw(300, 8, seed=1, device="cuda")
    dy = draw(300, 2048, seed=2, dtype=BF16, device="cuda")
    whole = both(slots, weights, dy, permutation(2400, device="cuda"))
    for part in (slice(0, 1), slice(3, 20), slice(50, 300)):
        count = part.stop - part.start
        few = both(slots[part], weights[part], dy[part], permutation(8 * count, 1, "cuda"))
        assert all(torch.equal(a, b[part]) for a, b in zip(few, whole, strict=True))
    assert error(whole[0], (slots.double() * weights.double().unsqueeze(-1)).sum(1)) < 3e-3
