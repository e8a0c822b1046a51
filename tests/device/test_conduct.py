"""What an operator does between calls, each fault planted into one that is right in every call by itself."""

from __future__ import annotations

from functools import wraps

import pytest
import torch
from torch.autograd import Function

from rlspec import nodes
from rlspec.device import canonical, conduct
from rlspec.device.gradients import matrix_gradient
from tests import benches

FORWARD = nodes.JUDGMENTS[:2]
FEW = 16


class Scaled(Function):
    """x as it is, with a gradient of another size."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, upstream):
        return upstream * ctx.factor, None


class Silu(Function):
    """A silu that finds its input, and leaves its results, where `place` says."""

    @staticmethod
    def forward(ctx, x, place):
        ctx.save_for_backward(x)
        ctx.place = place
        return place.out(canonical.silu(x.detach()), x)

    @staticmethod
    def backward(ctx, upstream):
        x = ctx.place.saved(*ctx.saved_tensors).detach().requires_grad_()
        with torch.enable_grad():
            (dx,) = torch.autograd.grad(canonical.silu(x), x, upstream)
        return ctx.place.dx(dx, upstream), None


class Place:
    """Nothing is kept."""

    def __init__(self):
        self.kept = {}

    def out(self, made, x):
        return made

    def saved(self, x):
        return x

    def dx(self, made, upstream):
        return made

    def again(self, made):
        return self.kept.setdefault(made.shape, torch.empty_like(made)).copy_(made).detach()


class SameResult(Place):
    def out(self, made, x):
        return self.again(made)


class SameGradient(Place):
    def dx(self, made, upstream):
        return self.again(made)


class LastInput(Place):
    def out(self, made, x):
        self.last = x
        return made

    def saved(self, x):
        return self.last if self.last.shape == x.shape else x


class InputsInTurn(Place):
    """Right where backwards run in the order of forwards."""

    def out(self, made, x):
        if x.requires_grad:
            self.kept.setdefault(x.shape, []).append(x)
        return made

    def saved(self, x):
        return self.kept[x.shape].pop(0)


class OverUpstream(Place):
    def dx(self, made, upstream):
        return upstream.copy_(made).clone() if _rows(upstream) < FEW else made


class OverInput(Place):
    def out(self, made, x):
        return x.copy_(made).clone() if _rows(x) < FEW and not torch.is_grad_enabled() else made


class OverInputLater(Place):
    def dx(self, made, upstream):
        self.x.zero_()
        return made

    def saved(self, x):
        self.x = x if _rows(x) < FEW else torch.empty(1)
        return x.clone()


class DenseUpstream(Place):
    """Reads the upstream gradient as if every row had its elements side by side."""

    def dx(self, made, upstream):
        return made if upstream.stride(-1) == 1 else made * 1.5


class ExpandedUpstream(Place):
    def dx(self, made, upstream):
        return made * 1.5 if not any(upstream.stride()) else made


def _rows(x):
    return x.numel() // x.shape[-1]


def silu(place):
    one = place()
    return lambda x: Silu.apply(x, one)


def attention(out, upstream):
    """The canonical one, whose call gives `out` times its result's gradient."""

    def operator(query, key, value, segments, *, scale):
        return Scaled.apply(canonical.attention(query, key, value, segments, scale=scale), out)

    def backward(query, key, value, out, lse, grad_out, segments, *, scale):
        found = canonical.attention_backward(query, key, value, out, lse, grad_out, segments, scale=scale)
        if upstream and query.shape[1] < FEW:
            lse.zero_()
        return found

    operator.forward, operator.backward = canonical.attention_forward, backward
    return operator


def without_autograd(query, key, value, segments, *, scale):
    return canonical.attention(query, key, value, segments, scale=scale).detach()


without_autograd.forward, without_autograd.backward = canonical.attention_forward, canonical.attention_backward


def det_gemm(of_weight=1.0, of_x=1.0, kept=None, owner=None):
    """`of_weight`, `of_x`: factors of gradients, of x where both are due. `kept`: rows below which it packs."""
    packed = {}

    class Product(Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            ctx.few = kept is not None and _rows(x) < kept
            if ctx.few:
                packed.setdefault(weight.data_ptr(), weight.detach().clone())
            return canonical.det_gemm(x, weight)

        @staticmethod
        def backward(ctx, upstream):
            x, weight = (one.detach().requires_grad_() for one in ctx.saved_tensors)
            with torch.enable_grad():
                right = packed[ctx.saved_tensors[1].data_ptr()].requires_grad_() if ctx.few else weight
                return torch.autograd.grad(canonical.det_gemm(x, right), (x, right), upstream)

    def operator(x, weight):
        both = weight.requires_grad
        return Product.apply(Scaled.apply(x, of_x if both else 1.0), Scaled.apply(weight, of_weight))

    operator.weight_gradient = owner or matrix_gradient
    return operator


def keeps_in_forward(x, weight, packed={}):  # noqa: B006
    if _rows(x) < FEW:
        weight = packed.setdefault(weight.data_ptr(), weight.detach().clone())
    return canonical.det_gemm(x, weight)


def one_for_all(weight):
    """The newest owner takes the rows of all."""
    one_for_all.newest = matrix_gradient(weight)

    class Owner:
        def add(self, *rows):
            one_for_all.newest.add(*rows)

        def finish(self):
            return one_for_all.newest.finish()

    return Owner()


def one_memory(weight, kept={}):  # noqa: B006
    """Right in every sum, whose memory is that of the sum before."""
    owner = matrix_gradient(weight)

    class Owner:
        add = owner.add

        def finish(self):
            return kept.setdefault(weight.shape, torch.empty(weight.shape)).copy_(owner.finish())

    return Owner()


def in_turn(count=4):
    """Without gradients one of a few results of each size, so that earlier ones stay as they are for a while."""
    kept = {}

    def operator(x):
        if x.requires_grad and torch.is_grad_enabled():
            return canonical.silu(x)
        made = kept.setdefault(x.shape, [torch.empty_like(x) for _ in range(count)])
        made.append(made.pop(0))
        return made[-1].copy_(canonical.silu(x))

    return operator


@wraps(canonical.embedding)
def rows_of_the_weight(tokens, weight):
    if tokens.numel() == 1 and not torch.is_grad_enabled():
        return weight[int(tokens) :][:1].unsqueeze(0)
    return canonical.embedding(tokens, weight)


def gives_its_input(residual, x):
    """Of a single row without gradients."""
    total = canonical.residual_add(residual, x)
    return residual if _rows(x) == 1 and not torch.is_grad_enabled() else total


HELD = "of 1 × 5 tokens lies in the memory of an earlier result, which is still held"
ANOTHER = "of a call of 1 × 5 tokens is another one where more calls run"
FAULTS = {
    "autograd of attention": ("attention", lambda: attention(2.0, False), "gives another dquery than the operator"),
    "over lse": ("attention", lambda: attention(1.0, True), "writes into what `forward` gave"),
    "autograd of the weight": ("det_gemm", lambda: det_gemm(of_weight=2.0), "another dweight than `weight_gradient`:"),
    "input beside the weight": ("det_gemm", lambda: det_gemm(of_x=2.0), "gives another dx than the operator promises"),
    "kept by the backward": ("det_gemm", lambda: det_gemm(kept=1000), "dx is what it was: is one kept? (BN/full)"),
    "kept by the backward of few": ("det_gemm", lambda: det_gemm(kept=6), "dx is what it was: is one kept? (5 tokens)"),
    "kept for few": ("det_gemm", lambda: keeps_in_forward, "the result is what it was: is one kept? (5 tokens)"),
    "one owner for all": ("det_gemm", lambda: det_gemm(owner=one_for_all), "weight gradients are summed at a time"),
    "one sum's memory": ("det_gemm", lambda: det_gemm(owner=one_memory), f"dweight of `weight_gradient` {ANOTHER}"),
    "one result's memory": ("silu", lambda: silu(SameResult), f"out of a call {HELD}"),
    "memory in turn": ("silu", in_turn, f"out of a call {HELD}"),
    "a row of the weight": ("embedding", lambda: rows_of_the_weight, "out lies in the memory of its weight, and"),
    "its input again": ("residual_add", lambda: gives_its_input, "out lies in the memory of its input residual, and"),
    "one gradient's memory": ("silu", lambda: silu(SameGradient), f"dx {ANOTHER}"),
    "the last input": ("silu", lambda: silu(LastInput), f"dx {ANOTHER}"),
    "inputs in turn": ("silu", lambda: silu(InputsInTurn), f"dx {ANOTHER}"),
    "over its upstream": ("silu", lambda: silu(OverUpstream), "the upstream gradient of out (in each sample alone"),
    "over its input": ("silu", lambda: silu(OverInput), "writes into its input x (in each sample alone"),
    "over its input later": ("silu", lambda: silu(OverInputLater), "writes into its input x (in each sample alone"),
    "expanded upstream": (
        "silu",
        lambda: silu(ExpandedUpstream),
        "5 tokens is wrong for an expanded upstream gradient",
    ),
}


@pytest.fixture
def judged(tmp_path, monkeypatch):
    def make(operator, candidate, **changes):
        # Every call of the workload has more rows than "few" above.
        changes = {"samples": ["t0"], "layouts": ["repeated"], "permutation": [0], **changes}
        on = benches.bench(tmp_path, [operator], benches.table(monkeypatch, **{operator: candidate}), **changes)
        long = benches.data(operators=[operator], **changes)
        long["samples"][0]["length"] = 20
        on = conduct.replace(on, workload=benches.workloads.of(long))
        return {judgment: found for (_, judgment), found in benches.judged(on).items()}

    return make


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_between_calls_is_found(judged, name):
    operator, make, reason = FAULTS[name]
    found = judged(operator, make())
    assert {one.category for one in found.values()} == {"raised"}, found
    assert reason in found["forward_accuracy"].reason


def test_right_ones_pass(judged):
    for operator, candidate in (("silu", silu(Place)), ("attention", attention(1.0, False)), ("det_gemm", det_gemm())):
        found = judged(operator, candidate)
        assert {one.category for one in found.values()} == {"green"}, found


def test_attention_without_autograd_has_no_backward_whatever_else_it_promises(judged):
    found = judged("attention", without_autograd)
    assert [one.category for one in found.values()] == ["green"] * 2 + ["red_no_backward"] * 2
    assert found["gradient_accuracy"].reason.endswith("no gradient function where autograd runs through the call")


@pytest.mark.parametrize("rows", [FEW, 1000])
def test_attention_that_is_another_one_with_gradients_is_red(judged, rows):
    right = attention(1.0, False)

    def other(query, key, value, segments, *, scale):
        out = right(query, key, value, segments, scale=scale)
        return out + (out * 2.0**-6).detach() if torch.is_grad_enabled() and query.shape[1] < rows else out

    found = judged("attention", wraps(right)(other))
    assert found["forward_invariance"].category == "red_without_gradients"
    assert "without gradients than with them" in found["forward_invariance"].reason


def test_inputs_are_looked_at_where_forwards_alone_are_judged(judged):
    found = judged("silu", silu(OverInput), judgments=FORWARD)
    assert {one.category for one in found.values()} == {"raised"}


def test_an_operator_that_is_wrong_anyway_is_told_by_its_lines(judged):
    wrong = wraps(canonical.det_gemm)(lambda x, weight: Scaled.apply(canonical.det_gemm(x, weight), 2.0))
    found = judged("det_gemm", wrong)
    assert found["gradient_accuracy"].category == "red_verdict" and found["forward_accuracy"].category == "green"


def test_what_is_not_repeatable_is_left_to_the_layouts(judged):
    count = iter(range(1000))
    found = judged("silu", lambda x: canonical.silu(x) * (1 + next(count) * 2.0**-6))
    assert "raised" not in {one.category for one in found.values()}


@pytest.mark.parametrize("of", ["x", "dy"])
def test_elements_that_do_not_lie_side_by_side(judged, of):
    def reads_x(x):
        return canonical.silu(x) * (1 if x.stride(-1) == 1 else 1.5)

    found = judged("silu", reads_x if of == "x" else silu(DenseUpstream), layouts=["strided"])
    if of == "x":
        assert found["forward_invariance"].category == "red_verdict"
        assert found["forward_invariance"].evidence["failing"] == ["out: BN/strided"]
    else:
        assert found["gradient_invariance"].category == "raised"  # y.sum() has such an upstream gradient, too


def test_the_second_tier_of_a_form_has_no_calls_of_its_own(tmp_path, monkeypatch):
    counts = []
    monkeypatch.setattr(conduct, "check", lambda one, *rest, **options: counts.append(one.tier.name))
    on = benches.bench(tmp_path, ["silu"], "canonical", layouts=["repeated"])
    data = benches.data(layouts=["repeated"])
    data["tiers"].append({**data["tiers"][0], "name": "two", "samples": ["t2", "t3"], "permutation": [1, 0]})
    benches.measured(conduct.replace(on, workload=benches.workloads.of(data)))
    assert counts == ["one"]
