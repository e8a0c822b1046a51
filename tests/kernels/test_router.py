"""router: scores, choices, weights and gradients against the formula; ties; cuts of the gradient; load statistics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rlspec.kernels import router as routing
from rlspec.kernels.router import fold, load_balance, router, slopes
from tests.kernels.interpreted import compiled, gpu, hopper, interpreted, spills

BF16 = torch.bfloat16


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def error(value: Tensor, exact: Tensor) -> float:
    return float((value.double() - exact).norm() / exact.norm())


def table(rows: list[int]) -> Tensor:
    return torch.tensor(rows + [-1] * (-len(rows) % 16), dtype=torch.int32).reshape(-1, 16)


def formula(
    x: Tensor, weight: Tensor, top_k: int, normalise: bool, scoring: str, choice: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    logits = x.double() @ weight.double().T
    scores = torch.softmax(logits, -1) if scoring == "softmax" else torch.sigmoid(logits)
    if choice is None:
        choice = logits.detach().sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(-1, choice)
    return scores, weights / weights.sum(-1, keepdim=True) if normalise else weights, choice


# ---- CPU, interpreter ----


@pytest.mark.parametrize(
    ("scoring", "normalise", "given"),
    [("softmax", True, False), ("softmax", False, True), ("sigmoid", False, False), ("sigmoid", True, True)],
)
@interpreted
def test_results_and_gradients_are_the_formula(scoring: str, normalise: bool, given: bool) -> None:
    x, weight, top_k = draw(19, 70), draw(10, 70, seed=1) / 8, 3
    choice = torch.arange(19 * 3).view(19, 3) % 10 if given else None
    if choice is not None:
        choice[5] = torch.tensor([4, 4, 7])  # an expert twice
    leaves, exact = (
        [one.clone().to(dtype).requires_grad_() for one in (x, weight)] for dtype in (x.dtype, torch.float64)
    )
    found = router(*leaves, top_k=top_k, normalise=normalise, scoring=scoring, choice=choice)
    gold = formula(*exact, top_k, normalise, scoring, choice)
    up = draw(19, 10, seed=2), draw(19, 3, seed=3)
    gradients = torch.autograd.grad(found[:2], leaves, up)
    due = torch.autograd.grad(gold[:2], exact, [one.double() for one in up])
    assert torch.equal(found[2], gold[2]) and {one.dtype for one in found[:2]} == {torch.float32}
    for a, b in zip(
        (*(one.detach() for one in found[:2]), *gradients), (*(one.detach() for one in gold[:2]), *due), strict=True
    ):
        assert error(a, b) < 1e-6


@interpreted
def test_of_equal_logits_the_lower_expert_comes_first_and_zeros_have_no_sign() -> None:
    weight = torch.zeros(9, 4)
    weight[[2, 5, 7]] = 1.0
    _, _, experts = router(torch.ones(2, 4), weight, top_k=5, normalise=True)
    assert experts.tolist() == [[2, 5, 7, 0, 1]] * 2
    weight[1] = -0.0
    x = torch.tensor([[-1.0, 0, 0, 0]])
    assert router(x, weight, top_k=4, normalise=True)[2].tolist() == [[0, 1, 3, 4]]


@interpreted
def test_a_unit_in_the_last_place_of_a_logit_decides() -> None:
    # 6 and 6 + 2⁻²¹; the exponentials of both differ by less than fp16 keeps.
    weight = torch.full((4, 16), 0.0)
    weight[:, 1] = 6.0
    weight[2, 0] = 2.0**-21
    x = torch.zeros(3, 16)
    x[:, 1] = 1.0
    x[:, 0] = torch.tensor([1.0, 0.0, -1.0])
    experts = router(x, weight, top_k=4, normalise=True)[2]
    assert experts.tolist() == [[2, 0, 1, 3], [0, 1, 2, 3], [0, 1, 3, 2]]
    assert router(x, weight, top_k=4, normalise=True, logits_dtype=torch.float16)[2].tolist() == [[0, 1, 2, 3]] * 3


@interpreted
def test_large_logits_and_rows_of_nan() -> None:
    x, weight = draw(4, 16), draw(6, 16, seed=1) * 60
    x[1] = float("nan")
    for scoring in ("softmax", "sigmoid"):
        scores, weights, experts = router(x, weight, top_k=2, normalise=False, scoring=scoring)
        gold = formula(x, weight, 2, False, scoring, None)
        keep = [0, 2, 3]
        assert error(scores[keep], gold[0][keep]) < 1e-5 and torch.equal(experts[keep], gold[2][keep])
        assert bool(((experts >= 0) & (experts < 6)).all()) and not weights[keep].isnan().any()


@interpreted
def test_the_weight_gradient_has_the_same_bits_for_any_cut() -> None:
    options: dict[str, Any] = {"top_k": 2, "normalise": True, "scoring": "softmax"}
    x, weight = draw(37, 24), draw(8, 24, seed=1) / 5
    up = draw(37, 8, seed=2), draw(37, 2, seed=3)
    found = slopes(x, weight, *up, **options)
    x[36] = float("nan")
    rows = list(range(36))
    whole, cut = torch.zeros(8, 24), torch.zeros(8, 24)
    fold(whole, x, found, table(rows))
    for block in table(rows):
        fold(cut, x, found, block[None])
    assert torch.equal(whole, cut) and error(whole, found[:36].double().T @ x[:36].double()) < 1e-6


@interpreted
def test_load_statistics_are_chains_over_rows_and_differentiable() -> None:
    scores, chosen = torch.rand(12, 40, generator=torch.Generator().manual_seed(0)), torch.arange(24).view(12, 2) % 40
    scores[4] = float("nan")  # a pad
    pieces = torch.tensor([[5, 6], [0, 4]], dtype=torch.int32)
    leaf = scores.clone().requires_grad_()
    counts, sums = load_balance(leaf, chosen, pieces, together=False)
    for group, (first, length) in enumerate(pieces.tolist()):
        total = torch.zeros(40)
        for row in range(first, first + length):
            total = total + scores[row]
        assert torch.equal(sums[group].detach(), total)
        assert counts[group].tolist() == chosen[first : first + length].flatten().bincount(minlength=40).tolist()
    up = draw(2, 40)
    (gradient,) = torch.autograd.grad(sums, leaf, up)
    assert torch.equal(gradient[5], up[0]) and torch.equal(gradient[3], up[1]) and not gradient[[4, 11]].any()
    both, one = load_balance(leaf, chosen, pieces, together=True)
    assert torch.equal(both[0], counts.sum(0)) and error(one[0].detach(), sums.detach().double().sum(0)) < 1e-6
    moved = torch.cat((scores[5:11], scores[:4]))
    again = load_balance(
        moved, torch.cat((chosen[5:11], chosen[:4])), torch.tensor([[0, 6], [6, 4]], dtype=torch.int32), together=True
    )
    assert torch.equal(again[1], one.detach())


@interpreted
def test_wrong_arguments_are_refused() -> None:
    x, weight = draw(4, 24), draw(8, 24)
    for bad_x, bad_weight, named, words in (
        (x[:, :20], weight, {}, "takes"),
        (x[:0], weight, {}, "empty"),
        (x.half(), weight, {}, "both be"),
        (x.to(BF16), weight.to(BF16), {}, "interpreter"),
        (x, weight, {"top_k": 9}, "top_k 9"),
        (x, weight, {"scoring": "relu"}, "scoring relu"),
        (x, weight, {"logits_dtype": torch.float64}, "logits in"),
        (x, weight, {"choice": torch.zeros(4, 3, dtype=torch.int64)}, r"int64 \[4, 2\]"),
        (x, weight, {"choice": torch.full((4, 2), 8)}, "in 0 … 7"),
    ):
        with pytest.raises(ValueError, match=words):
            router(bad_x, bad_weight, **{"top_k": 2, "normalise": True, **named})
    total, found = torch.zeros(8, 24), draw(4, 8)
    for slope, rows, words in (
        (found[:, :7], table([0]), "fold takes"),
        (found, table([4]), "rows -1 to 4"),
        (found.double(), table([0]), "fp32"),
    ):
        with pytest.raises(ValueError, match=words):
            fold(total, x, slope, rows)
    with pytest.raises(ValueError, match="fp32, int64 and int32"):
        load_balance(found, torch.zeros(4, 2, dtype=torch.int64), torch.tensor([[0, 4]]), together=True)


# ---- compiled for sm_90 ----


@compiled
def test_cpu_tensors_are_refused_without_the_interpreter() -> None:
    with pytest.raises(ValueError, match="run on CUDA"):
        router(draw(4, 24), draw(8, 24), top_k=2, normalise=True)


@compiled
def test_every_kernel_compiles_without_spills() -> None:
    x, weight = torch.empty(2048, 2048, dtype=BF16), torch.empty(128, 2048, dtype=BF16)
    logits, weights, chosen = torch.empty(2048, 128), torch.empty(2048, 8), torch.empty(2048, 8, dtype=torch.int64)
    how = (8, True, True)
    with hopper():
        for launch in (
            routing._logits_launch(x, weight, logits, torch.float32),
            routing._logits_launch(x[:16], weight, logits, BF16),
            routing._route_launch(logits, None, (logits, weights, chosen), how),
            routing._slopes_launch(logits, chosen, logits, weights, logits, how),
            routing._data_launch(logits, weight, x),
            routing._fold_launch(logits, x, torch.empty(2, 16, dtype=torch.int32), logits),
        ):
            assert spills(launch.kernel.warmup(*launch.args, grid=(1,), **launch.options)) == 0


# ---- CUDA ----


@gpu
def test_scores_are_as_exact_as_fp32_and_free_of_other_rows() -> None:
    x, weight = draw(1500, 2048, dtype=BF16, device="cuda"), draw(128, 2048, seed=1, dtype=BF16, device="cuda") / 45
    scores, weights, experts = router(x, weight, top_k=8, normalise=True)
    gold = torch.softmax(x.double() @ weight.double().T, -1)
    plain = torch.softmax(x.float() @ weight.float().T, -1)
    assert error(scores, gold) < 2 * error(plain, gold)
    for count in (1, 16, 33, 1024, 1025):
        few = router(x[7 : 7 + count], weight, top_k=8, normalise=True)
        for a, b in zip(few, (scores, weights, experts), strict=True):
            assert torch.equal(a, b[7 : 7 + count])
