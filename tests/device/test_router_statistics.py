from __future__ import annotations

import pytest
import torch

from rlspec.device import canonical, expert_gradients, router_statistics, torch_operators
from tests import benches

CPU = torch.device("cpu")


def check(statistics, backward=True):
    router_statistics.check(statistics, benches.tier(), 8, 2, CPU, backward=backward)


@pytest.mark.parametrize("module", [canonical, torch_operators])
def test_the_statistics_of_the_catalogue_keep_their_promise(module):
    check(module.router.statistics)


def _changed(counts=lambda x: x, sums=lambda x: x):
    def statistics(probabilities, experts, pieces, *, together):
        found = expert_gradients.statistics(probabilities, experts, pieces, together=together)
        return counts(found[0]), sums(found[1])

    return statistics


def _places(probabilities, experts, pieces, *, together):
    """Sums that begin where the row stands in the call."""
    counts, sums = expert_gradients.statistics(probabilities, experts, pieces, together=together)
    return counts, sums * (1 + 2.0**-20 * (pieces[0][0] > 0))


def _physical(probabilities, experts, pieces, *, together):
    return expert_gradients.statistics(probabilities, experts, sorted(pieces), together=together)


@pytest.mark.parametrize(
    ("statistics", "message"),
    [
        (_changed(sums=torch.zeros_like), "statistics(together=False): the sums are not those of the scores"),
        (_changed(counts=torch.zeros_like), "the counts are not those of the choices"),
        (_changed(sums=lambda x: x.bfloat16().float()), "the sums are not those of the scores"),
        (_changed(sums=torch.Tensor.double), "the sums are torch.float64 [3, 8], torch.float32 [3, 8] is due"),
        (_changed(sums=torch.Tensor.detach), "no gradient flows through the sums"),
        (_changed(sums=lambda x: x.detach() + (x - x.detach()) * 2), "the gradient of the sums is not that of each"),
        (_places, "the sums follow where the rows of the samples lie"),
        (_physical, "statistics(together=False): the counts follow where the rows of the samples lie"),
    ],
)
def test_what_is_not_right_is_told(statistics, message):
    with pytest.raises(ValueError) as told:
        check(statistics)
    assert message in str(told.value)


def test_gradients_are_asked_for_only_where_they_are_judged():
    check(_changed(sums=torch.Tensor.detach), backward=False)


def test_it_is_judged_where_the_router_is(tmp_path, monkeypatch):
    def router(*arguments, **options):
        return canonical.router(*arguments, **options)

    router.statistics = _changed(sums=torch.zeros_like)
    table = benches.table(monkeypatch, router=router)
    asked = {"model": "tiny-moe", "cases": 3, "layouts": ["repeated"], "judgments": ["forward_accuracy"]}
    found = benches.judged(benches.bench(tmp_path, ["router"], table, **asked))["router", "forward_accuracy"]
    assert (found.category, found.status) == ("raised", "ERROR") and "the sums are not those" in found.reason
