"""linear_logprob: the formula, ignored rows, bits over layouts, the cut of the vocabulary, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rlspec.kernels import linear_logprob as fused
from rlspec.kernels.linear_logprob import linear_logprob
from tests.kernels.interpreted import compiled, gpu, hopper, interpreted, spills

BF16 = torch.bfloat16


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


def pick(rows: int, vocabulary: int, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(vocabulary, (rows,), generator=generator).to(device)


def exact(x: Tensor, weight: Tensor, targets: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities and both gradients in fp64; -100 is ignored."""
    x, weight = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    active = targets != -100
    value = torch.log_softmax(x @ weight.t(), -1).gather(-1, targets.clamp(min=0)[:, None])[:, 0]
    value = torch.where(active, value, 0)
    return value.detach(), *torch.autograd.grad(value, (x, weight), gradient.double())


def error(value: Tensor, wanted: Tensor) -> float:
    return float((value.double() - wanted).norm() / wanted.norm())


def same(one: Tensor, other: Tensor) -> bool:
    integer = {2: torch.int16, 4: torch.int32}[one.element_size()]
    return one.dtype == other.dtype and torch.equal(one.contiguous().view(integer), other.contiguous().view(integer))


# ---- CPU, interpreter ----


@pytest.mark.parametrize(("rows", "width", "vocabulary"), [(1, 16, 40), (5, 24, 200), (70, 16, 131)])
@interpreted
def test_value_and_gradients_are_the_formula(rows: int, width: int, vocabulary: int) -> None:
    x, weight = draw(rows, width).requires_grad_(), draw(vocabulary, width, seed=1).requires_grad_()
    targets, gradient = pick(rows, vocabulary), draw(rows, seed=2)
    targets[::3] = -100 if rows > 1 else targets[0]
    wanted = exact(x, weight, targets, gradient)
    value = linear_logprob(x, weight, targets)
    found = (value.detach(), *torch.autograd.grad(value, (x, weight), gradient))
    assert value.dtype == torch.float32
    assert all(error(one, other) < 2e-6 for one, other in zip(found, wanted, strict=True))


@interpreted
def test_the_cut_of_the_vocabulary_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = draw(5, 16).requires_grad_(), draw(200, 16, seed=1).requires_grad_()
    targets, gradient, found = pick(5, 200), draw(5, seed=2), []
    for chunk in (64, 128, 256):
        monkeypatch.setattr(fused, "_chunk", lambda rows, chunk=chunk: chunk)
        found.append(torch.autograd.grad(linear_logprob(x, weight, targets), (x, weight), gradient))
    assert all(same(one, other) for later in found[1:] for one, other in zip(found[0], later, strict=True))


@interpreted
def test_ignored_rows_may_hold_anything() -> None:
    x, weight = draw(2, 5, 16), draw(60, 16, seed=1).requires_grad_()
    targets, gradient = pick(10, 60).view(2, 5), draw(2, 5, seed=2)
    x[0, 1], targets[0, 1], gradient[0, 1] = float("nan"), -100, float("inf")
    x.requires_grad_()
    value = linear_logprob(x, weight, targets)
    dx, dweight = torch.autograd.grad(value, (x, weight), gradient)
    assert value[0, 1] == 0 and not dx[0, 1].any()
    assert value.isfinite().all() and dx.isfinite().all() and dweight.isfinite().all()
    keep = (targets != -100).view(-1)
    rows = x.detach().view(10, 16)[keep]
    wanted = exact(rows, weight, targets.view(-1)[keep], gradient.view(-1)[keep])
    assert error(dweight, wanted[2]) < 2e-6


@interpreted
def test_another_index_can_be_the_ignored_one() -> None:
    x, weight, targets = draw(4, 16), draw(60, 16, seed=1), torch.tensor([0, 5, 0, 7])
    value = linear_logprob(x, weight, targets, ignore_index=0)
    assert value[[0, 2]].eq(0).all() and value[[1, 3]].lt(0).all()


@interpreted
def test_minus_infinity_and_nan_logits() -> None:
    x = torch.ones(2, 16)
    x[1] = float("nan")
    weight = draw(200, 16, seed=1)
    weight[64:128] = float("-inf")
    value = linear_logprob(x, weight, torch.tensor([3, 3]))
    wanted = torch.log_softmax((torch.ones(1, 16) @ weight.t()).double(), -1)[0, 3]
    assert abs(float(value[0] - wanted)) < 1e-5
    assert value[1].isnan()


@interpreted
def test_wrong_arguments_are_refused() -> None:
    x, weight, targets = draw(4, 16), draw(60, 16), torch.tensor([0, 1, 2, 59])
    for bad_x, bad_weight, bad_targets, words in (
        (x[:, :12], weight, targets, "takes"),
        (x, weight, targets[:3], "takes"),
        (x, weight, targets.int(), "int64"),
        (x, weight, targets + 1, "target 60"),
        (x[:0], weight, targets[:0], "empty"),
        (x.half(), weight, targets, "both be"),
        (x.to(BF16), weight.to(BF16), targets, "interpreter"),
        (draw(4, 15), draw(60, 15), targets, "16 bytes"),
    ):
        with pytest.raises(ValueError, match=words):
            linear_logprob(bad_x, bad_weight, bad_targets)


# ---- compiled for sm_90 ----


@compiled
def test_all_kernels_compile_with_their_registers() -> None:
    x, weight, flat = torch.empty(256, 512, dtype=BF16), torch.empty(2048, 512, dtype=BF16), torch.empty(256)
    targets, partial = torch.empty(256, dtype=torch.int64), torch.empty(256, 8)
    dlogits = torch.empty(256, 2048, dtype=BF16)
    launches = (
        fused._partial_launch(x, weight, targets, flat, partial, partial),
        fused._dlogits_launch(x, weight, targets, flat, flat, dlogits, 0, -100),
        fused._resumed_launch(dlogits, weight, torch.empty(256, 512), across=False, resume=True),
        fused._resumed_launch(dlogits, weight, torch.empty(256, 512), across=False),
        fused._resumed_launch(dlogits, x, weight, across=True),
    )
    with hopper():
        kernels = [warm(launch) for launch in launches]
    # Some assemblers save one register a tile, outside the loop that multiplies.
    assert max(spills(kernel) for kernel in kernels) <= 2
    assert max(kernel.metadata.shared for kernel in kernels) <= 232448


def warm(launch: fused.Launch) -> Any:
    return launch.kernel.warmup(*launch.args, grid=launch.grid, **launch.options)


@interpreted
def test_the_weight_gradient_is_resumed_over_any_cut() -> None:
    x, weight, targets, gradient = draw(48, 24), draw(131, 24, seed=1), pick(48, 131), draw(48, seed=2)
    table = torch.arange(48, dtype=torch.int32).reshape(3, 16)
    table[2, 11:] = -1
    x[43:] = float("nan")  # rows that no block names
    kept = slice(0, 43)
    wanted = exact(x[kept], weight, targets[kept], gradient[kept])[2]
    sums = []
    for cuts in ((3,), (1, 2), (2, 1), (1, 1, 1)):
        total, start = torch.zeros(131, 24), 0
        for count in cuts:
            fused.fold(total, x, weight, targets, gradient, table[start : start + count])
            start += count
        sums.append(total)
    # Bits are for the matrix unit: the interpreter's products of numpy may move with a row's place in a tile.
    assert all(error(total, wanted) < 2e-6 for total in sums)


@interpreted
def test_the_weight_gradient_refuses_what_does_not_fit() -> None:
    x, weight, targets, gradient = draw(16, 24), draw(131, 24, seed=1), pick(16, 131), draw(16, seed=2)
    table, total = torch.arange(16, dtype=torch.int32).reshape(1, 16), torch.zeros(131, 24)
    with pytest.raises(ValueError, match="the accumulator must be fp32"):
        fused.fold(total.double(), x, weight, targets, gradient, table)
    with pytest.raises(ValueError, match="fold takes"):
        fused.fold(total, x, weight, targets, gradient[:15], table)
    for wrong in (table.reshape(2, 8), table.long(), table[:0]):
        with pytest.raises(ValueError, match=r"rows come as int32 \[B, 16\]"):
            fused.fold(total, x, weight, targets, gradient, wrong)
    for row in (-5, 16):
        with pytest.raises(ValueError, match="blocks name rows"):
            fused.fold(total, x, weight, targets, gradient, torch.where(table == 3, row, table))
    with pytest.raises(ValueError, match="target 131 is not in the vocabulary of 131"):
        fused.fold(total, x, weight, torch.full_like(targets, 131), gradient, table)
    with pytest.raises(ValueError, match="fold takes"):
        fused.fold(total, x[:, :16].contiguous(), weight, targets, gradient, table)
    assert not total.any()


# ---- GPU ----


@gpu
def test_the_weight_gradient_is_resumed_on_the_matrix_unit_too() -> None:
    x, weight = draw(64, 512, dtype=BF16, device="cuda"), draw(20000, 512, seed=1, dtype=BF16, device="cuda") / 16
    targets, gradient = pick(64, 20000, "cuda"), draw(64, seed=2, device="cuda")
    table = torch.arange(64, dtype=torch.int32).reshape(4, 16)
    whole, parts = (torch.zeros(20000, 512, device="cuda") for _ in range(2))
    fused.fold(whole, x, weight, targets, gradient, table)
    for block in table:
        fused.fold(parts, x, weight, targets, gradient, block[None])
    assert same(whole, parts) and error(whole, exact(x, weight, targets, gradient)[2]) < 4e-3


@gpu
def test_bits_do_not_depend_on_rows_or_neighbours() -> None:
    x, weight = draw(300, 512, dtype=BF16, device="cuda"), draw(20000, 512, seed=1, dtype=BF16, device="cuda") / 16
    targets = pick(300, 20000, "cuda")
    x.requires_grad_()
    whole = linear_logprob(x, weight, targets)
    gradient = draw(300, seed=2, device="cuda")
    (dx,) = torch.autograd.grad(whole, x, gradient)
    for rows in (1, 16, 17, 127, 129):
        part = x.detach()[9 : 9 + rows].requires_grad_()
        value = linear_logprob(part, weight, targets[9 : 9 + rows])
        (dpart,) = torch.autograd.grad(value, part, gradient[9 : 9 + rows])
        assert same(value.detach(), whole.detach()[9 : 9 + rows]) and same(dpart, dx[9 : 9 + rows]), rows


@gpu
def test_it_is_as_near_to_the_formula_as_the_dtype_allows() -> None:
    x, weight = draw(300, 512, dtype=BF16, device="cuda"), draw(20000, 512, seed=1, dtype=BF16, device="cuda") / 16
    targets, gradient = pick(300, 20000, "cuda"), draw(300, seed=2, device="cuda")
    targets[::5] = -100
    x.requires_grad_(), weight.requires_grad_()
    wanted = exact(x, weight, targets, gradient)
    value = linear_logprob(x, weight, targets)
    dx, dweight = torch.autograd.grad(value, (x, weight), gradient)
    assert error(value.detach(), wanted[0]) < 1e-6
    assert error(dx, wanted[1]) < 4e-3 and error(dweight, wanted[2]) < 4e-3


@gpu
def test_a_target_outside_the_vocabulary_shows() -> None:
    x, weight = draw(2, 64, dtype=BF16, device="cuda").requires_grad_(), draw(100, 64, dtype=BF16, device="cuda")
    value = linear_logprob(x, weight, torch.tensor([100, 3], device="cuda"))
    (dx,) = torch.autograd.grad(value.sum(), x)
    assert value.isnan().tolist() == [True, False]
    assert dx.isnan().any(1).tolist() == [True, False]
