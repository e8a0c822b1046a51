"""Gradients of experts' weights over calls: the same bits for any cut, in canonical order; what is refused."""

from __future__ import annotations

import pytest
import torch

from rlspec.device import canonical, expert_gradients, reference
from rlspec.device.gradients import Identity
from rlspec.device.operators import Dispatch
from rlspec.errors import RunError

LENGTHS = (3, 21, 1)
ROWS = sum(LENGTHS)
EXPERTS, TOP, WIDTH, INNER = 5, 2, 6, 4
PLACES = [(sample, position, length) for sample, length in enumerate(LENGTHS) for position in range(length)]
OPTIONS = {"top_k": TOP, "normalise": True, "logits_dtype": torch.float32, "scoring": "softmax"}
CUTS = ([0, 3, ROWS], [0, 1, 5, 12, 20, 24, ROWS], list(range(ROWS + 1)))


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def identity(rows):
    """Of a call with these logical rows; None is a pad."""
    return Identity.of(*zip(*[PLACES[row] if row is not None else (-1, 0, 0) for row in rows], strict=True))


EXPERTS_OF = torch.stack(
    [torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(n))[:TOP] for n in range(ROWS)]
)


def grouped(calls):
    x, dy = normal(ROWS, TOP, WIDTH), normal(ROWS, TOP, INNER, seed=1)
    gradient = canonical.grouped_gemm.weight_gradient(normal(EXPERTS, INNER, WIDTH, seed=2), lengths=LENGTHS)
    for rows in calls:
        kept = [row if row is not None else 0 for row in rows]
        pads = torch.tensor([row is None for row in rows]).view(-1, 1, 1)
        part = [torch.where(pads, torch.nan, one[kept]) for one in (x, dy)]
        gradient.add(*part, identity(rows), experts=EXPERTS_OF[kept])
    return gradient.finish()


def test_an_expert_s_gradient_is_that_of_autograd():
    x, dy = normal(ROWS, TOP, WIDTH), normal(ROWS, TOP, INNER, seed=1)
    weight = normal(EXPERTS, INNER, WIDTH, seed=2).double().requires_grad_()
    dispatch = Dispatch.of(EXPERTS_OF, EXPERTS)
    y = reference.grouped_gemm(x.flatten(0, 1)[dispatch.order].double(), weight, dispatch)
    (gold,) = torch.autograd.grad(y, weight, dy.flatten(0, 1)[dispatch.order].double())
    found = grouped([list(range(ROWS))])
    assert float((found - gold).norm() / gold.norm()) < 1e-6


@pytest.mark.parametrize("cuts", CUTS)
def test_any_cut_has_the_same_bits(cuts):
    calls = [list(range(begin, end)) for begin, end in zip(cuts, cuts[1:], strict=False)]
    assert torch.equal(grouped(calls), grouped([list(range(ROWS))]))


def test_order_of_rows_and_pads_do_not_matter():
    shuffled = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1)).tolist()
    padded = [*range(5), None, None, *range(5, ROWS), None]
    for rows in (shuffled, padded):
        assert torch.equal(grouped([rows]), grouped([list(range(ROWS))]))


def test_the_chain_of_an_expert_goes_on_over_samples_in_blocks_of_16():
    # Row 16 of a single expert starts a block: 1 + 2⁻²⁴ is 1, and 2⁻²⁴ + … (16 of them) is not lost.
    lengths = (10, 22)
    x = torch.full((32, 1, 1), 2.0**-12)
    dy = torch.full((32, 1, 1), 2.0**-12)
    x[:16], dy[:16] = 0.25, 0.25
    places = [(sample, position, length) for sample, length in enumerate(lengths) for position in range(length)]
    gradient = expert_gradients.grouped_gradient(torch.zeros(1, 1, 1), lengths=lengths)
    gradient.add(x, dy, Identity.of(*zip(*places, strict=True)), experts=torch.zeros(32, 1, dtype=torch.int64))
    assert gradient.finish().item() == 1 + 2.0**-20


def test_the_router_s_gradient_has_the_same_bits_for_any_cut_and_is_that_of_autograd():
    x, weight = normal(ROWS, WIDTH), normal(EXPERTS, WIDTH, seed=1)
    dp, dw = normal(ROWS, EXPERTS, seed=2), normal(ROWS, TOP, seed=3)

    def total(cuts, choice=None):
        gradient = canonical.router.weight_gradient(weight, lengths=LENGTHS, **OPTIONS)
        for begin, end in zip(cuts, cuts[1:], strict=False):
            rows = slice(begin, end)
            named = {} if choice is None else {"choice": choice[rows]}
            gradient.add(x[rows], dp[rows], identity(range(begin, end)), dweights=dw[rows], **named)
        return gradient.finish()

    for choice in (None, EXPERTS_OF):
        whole = total([0, ROWS], choice)
        assert all(torch.equal(total(cuts, choice), whole) for cuts in CUTS[:2])
        leaf = weight.double().requires_grad_()
        options = {**OPTIONS, "logits_dtype": torch.float64}
        found = reference.router(x.double(), leaf, choice=choice, **options)
        (gold,) = torch.autograd.grad((found.probabilities, found.weights), leaf, (dp.double(), dw.double()))
        assert float((whole - gold).norm() / gold.norm()) < 1e-6


def test_rows_that_come_twice_or_never_are_refused():
    x, dy = normal(ROWS, TOP, WIDTH), normal(ROWS, TOP, INNER)
    gradient = expert_gradients.grouped_gradient(torch.zeros(EXPERTS, INNER, WIDTH), lengths=LENGTHS)
    with pytest.raises(ValueError, match="are due"):
        gradient.add(x, dy, identity(range(ROWS)), experts=EXPERTS_OF[:, :1])
    for outside in (-1, EXPERTS):
        with pytest.raises(ValueError, match=f"experts must be in 0 … {EXPERTS - 1}, and there is {outside}"):
            gradient.add(x, dy, identity(range(ROWS)), experts=torch.full_like(EXPERTS_OF, outside))
    gradient.add(x[:4], dy[:4], identity(range(4)), experts=EXPERTS_OF[:4])
    with pytest.raises(RunError, match="came twice"):
        gradient.add(x[:4], dy[:4], identity(range(4)), experts=EXPERTS_OF[:4])
    with pytest.raises(RunError, match="sample 1, position 1 never came"):
        gradient.finish()


def test_statistics_are_chains_over_rows():
    scores = torch.softmax(normal(ROWS, EXPERTS), -1)
    counts, sums = expert_gradients.statistics(scores, EXPERTS_OF, [(3, 21), (0, 3)], together=False)
    due = [EXPERTS_OF[rows].flatten().bincount(minlength=EXPERTS).tolist() for rows in (slice(3, 24), slice(0, 3))]
    assert counts.tolist() == due and torch.equal(sums[1], (scores[0] + scores[1]) + scores[2])
    both, one = expert_gradients.statistics(scores, EXPERTS_OF, [(3, 21), (0, 3)], together=True)
    assert both[0].tolist() == counts.sum(0).tolist()
    assert torch.equal(one[0], ((sums[0] + scores[0]) + scores[1]) + scores[2])
