"""The adapters against the reference, through the interpreter and therefore in fp32, at small sizes."""

from __future__ import annotations

import pytest
import torch

from rlspec.device import canonical, reference
from rlspec.device import triton_operators as ours
from rlspec.device.gradients import Identity
from rlspec.device.operators import Dispatch, Segment, Segments
from tests.kernels.interpreted import compiled, interpreted

OWNERS = ("embedding", "rms_norm", "det_gemm", "lm_head")
LENGTHS = (3, 18)
ROWS = sum(LENGTHS)
CPU = torch.device("cpu")


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ids(*shape, below, seed=0):
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed))


def two_segments():
    """A whole row, and one with a pad on its left and one on its right."""
    return Segments((Segment(0, 0, 6, 0, 6), Segment(1, 1, 4, 1, 4)), 2, 6, 6, CPU)


def cases():
    """Tensors, of which the floating ones get a gradient, the rest of the arguments, and those by name."""
    tables = normal(2, 3, 4, seed=1), normal(2, 3, 4, seed=2)
    heads = [normal(2, 6, count, 64, seed=seed) for seed, count in enumerate((4, 2, 2))]
    return {
        "embedding": ([ids(2, 3, below=7), normal(7, 16)], [], {}),
        "rms_norm": ([normal(2, 3, 4, 16), normal(16, seed=1)], [], {"eps": 1e-6}),
        "rope": ([normal(2, 3, 4, 8)], tables, {}),
        "attention": (heads, [two_segments()], {"scale": 0.125}),
        "det_gemm": ([normal(2, 3, 32), normal(48, 32, seed=1)], [], {}),
        "silu": ([normal(2, 3, 40)], [], {}),
        "swiglu": ([normal(2, 3, 40), normal(2, 3, 40, seed=1)], [], {}),
        "residual_add": ([normal(2, 3, 40), normal(2, 3, 40, seed=1)], [], {}),
        "lm_head": ([normal(2, 3, 32), normal(48, 32, seed=1)], [], {"out_dtype": torch.float32}),
        "logprob": ([normal(2, 3, 40), ids(2, 3, below=40)], [], {}),
        "batch_invariant_logprob": ([normal(2, 3, 40), ids(2, 3, below=40)], [], {}),
        "linear_logprob": ([normal(2, 3, 32), normal(48, 32, seed=1), ids(2, 3, below=48)], [], {}),
    }


def run(operator, tensors, rest, named):
    """The result and the gradients, for an upstream gradient that depends on nothing."""
    tensors = [one.detach().requires_grad_() if one.is_floating_point() else one for one in tensors]
    y = operator(*tensors, *rest, **named)
    dy = normal(*y.shape, seed=9).to(y.dtype)
    return y.detach(), *torch.autograd.grad(y, [one for one in tensors if one.requires_grad], dy)


OPERATORS = tuple(cases())


def definition(name):
    return getattr(reference, "logprob" if name == "batch_invariant_logprob" else name)


@pytest.mark.parametrize("name", OPERATORS)
@interpreted
def test_results_and_gradients_are_those_of_the_reference(name):
    tensors, rest, named = cases()[name]
    found = run(getattr(ours, name), tensors, rest, named)
    gold = run(definition(name), tensors, rest, named)
    for a, b in zip(found, gold, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)


def test_what_each_promises():
    for name in OPERATORS:
        operator = getattr(ours, name)
        owns = name in (*OWNERS, "linear_logprob")
        assert operator.backend == "triton" and hasattr(operator, "weight_gradient") == owns
        assert hasattr(operator, "forward") == hasattr(operator, "backward") == (name == "attention")


@interpreted
def test_the_two_halves_of_attention():
    tensors, (segments,), named = cases()["attention"]
    out, lse = ours.attention.forward(*tensors, segments, **named)
    assert torch.equal(out, ours.attention(*tensors, segments, **named))
    assert lse.shape == (2, 6, 4) and lse.dtype == torch.float32
    assert torch.equal(lse.isneginf(), ~segments.covered[:, :, None].expand_as(lse))
    dy = normal(*out.shape, seed=9)
    found = ours.attention.backward(*tensors, out, lse, dy, segments, **named)
    for a, b in zip(found, run(ours.attention, tensors, [segments], named)[1:], strict=True):
        assert torch.equal(a, b)


def rows_of(name):
    """Weight, x and dy [ROWS, ...], options of `weight_gradient`."""
    match name:
        case "embedding":
            return normal(7, 16), ids(ROWS, below=7), normal(ROWS, 16, seed=2), {}
        case "rms_norm":
            return normal(16), normal(ROWS, 16, seed=1), normal(ROWS, 16, seed=2), {"eps": 1e-6}
        case "qk_norm":
            return normal(16), normal(ROWS, 3, 16, seed=1), normal(ROWS, 3, 16, seed=2), {"eps": 1e-6}
    return normal(48, 32), normal(ROWS, 32, seed=1), normal(ROWS, 48, seed=2), {}


@pytest.mark.parametrize("name", [*OWNERS, "qk_norm"])
@interpreted
def test_the_gradient_of_a_weight_over_calls(name):
    weight, x, dy, options = rows_of(name)
    operator = getattr(ours, "rms_norm" if name == "qk_norm" else name)
    samples = [number for number, length in enumerate(LENGTHS) for _ in range(length)]
    positions = [position for length in LENGTHS for position in range(length)]
    lengths = [LENGTHS[sample] for sample in samples]

    def total(cuts):
        gradient = operator.weight_gradient(weight, lengths=LENGTHS, **options)
        for begin, end in zip(cuts, cuts[1:], strict=False):
            part = slice(begin, end)
            gradient.add(x[part], dy[part], Identity.of(samples[part], positions[part], lengths[part]))
        return gradient.finish()

    whole = total([0, ROWS])
    for cuts in ([0, 3, ROWS], [0, 5, 12, 20, ROWS]):
        assert torch.equal(total(cuts), whole)
    leaf = weight.clone().requires_grad_()
    y = definition("rms_norm" if name == "qk_norm" else name)(x, leaf, **options, **wide(name))
    torch.testing.assert_close(whole, torch.autograd.grad(y, leaf, dy)[0], rtol=2e-5, atol=2e-5)


def wide(name):
    return {"out_dtype": torch.float32} if name == "lm_head" else {}


@pytest.mark.parametrize("name", ["logprob", "batch_invariant_logprob", "linear_logprob", "embedding"])
@pytest.mark.parametrize("wrong", [-100, -1, 48])
@interpreted
def test_an_id_outside_is_refused_where_the_host_can_see_it(name, wrong):
    tensors, rest, named = cases()[name]
    at = 0 if name == "embedding" else -1
    tensors[at] = torch.full_like(tensors[at], wrong)
    with pytest.raises(ValueError, match=str(wrong)):
        getattr(ours, name)(*tensors, *rest, **named)


EXPERTS, TOP = 5, 2
ROUTER = {"top_k": TOP, "normalise": True, "logits_dtype": torch.float32}


def chosen():
    generators = (torch.Generator().manual_seed(n) for n in range(ROWS))
    return torch.stack([torch.randperm(EXPERTS, generator=one)[:TOP] for one in generators])


def experts(operators, x, gate, weight):
    """Weights and experts of the router; what combine makes of a grouped product."""
    found = operators.router(x, gate, **ROUTER)
    dispatch = Dispatch.of(found.experts, EXPERTS)
    rows = operators.grouped_gemm(x[dispatch.tokens], weight, dispatch)
    return found.probabilities, operators.combine(rows, found.weights, dispatch)


@interpreted
def test_a_mixture_of_experts_is_that_of_the_reference():
    tensors = [normal(ROWS, 16), normal(EXPERTS, 16, seed=1), normal(EXPERTS, 24, 16, seed=2)]
    results = []
    for operators in (ours, reference):
        leaves = [one.clone().requires_grad_() for one in tensors]
        out = experts(operators, *leaves)
        results.append([*out, *torch.autograd.grad(out, leaves, [normal(*one.shape, seed=9) for one in out])])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)
    assert {getattr(ours, name).backend for name in ("router", "grouped_gemm", "combine")} == {"triton"}


@interpreted
def test_the_gradients_of_experts_over_calls():
    x, gate, weight = normal(ROWS, 16), normal(EXPERTS, 16, seed=1), normal(EXPERTS, 24, 16, seed=2)
    dp, dw, rows, dy = (normal(ROWS, *shape, seed=3) for shape in ((EXPERTS,), (TOP,), (TOP, 16), (TOP, 24)))
    places = [(sample, position, length) for sample, length in enumerate(LENGTHS) for position in range(length)]

    def total(cuts, operators):
        both = (
            operators.router.weight_gradient(gate, lengths=LENGTHS, **ROUTER),
            operators.grouped_gemm.weight_gradient(weight, lengths=LENGTHS),
        )
        for begin, end in zip(cuts, cuts[1:], strict=False):
            here, identity = slice(begin, end), Identity.of(*zip(*places[begin:end], strict=True))
            both[0].add(x[here], dp[here], identity, dweights=dw[here])
            both[1].add(rows[here], dy[here], identity, experts=chosen()[here])
        return [one.finish() for one in both]

    whole = total([0, ROWS], ours)
    cut = total([0, 5, 12, ROWS], ours)
    # The router's forward runs again, and the interpreter's product is not invariant.
    assert torch.equal(cut[1], whole[1])
    for got, want in zip([cut[0], *whole], [whole[0], *total([0, ROWS], canonical)], strict=True):
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


@interpreted
def test_load_statistics_have_the_bits_of_the_plain_ones():
    scores, pieces = torch.softmax(normal(ROWS, EXPERTS), -1), [(3, 18), (0, 3)]
    for together in (False, True):
        found, due = (one.router.statistics(scores, chosen(), pieces, together=together) for one in (ours, canonical))
        assert all(torch.equal(got, want) for got, want in zip(found, due, strict=True))


def test_gradients_of_keys_that_two_segments_share_are_refused():
    query, key, value = (normal(1, length, 2, 16) for length in (4, 6, 6))
    shared = Segments((Segment(0, 0, 2, 0, 3), Segment(0, 2, 2, 0, 6)), 1, 4, 6, CPU)
    apart = Segments((Segment(0, 0, 2, 0, 3), Segment(0, 2, 2, 3, 3)), 1, 4, 6, CPU)
    assert shared.keys_are_shared and not apart.keys_are_shared and not two_segments().keys_are_shared
    with pytest.raises(ValueError, match="share keys"):
        ours.attention(query, key.requires_grad_(), value, shared, scale=0.25)
    with pytest.raises(ValueError, match="share keys"):
        ours.attention.backward(query, key, value, query, query[..., 0], query, shared, scale=0.25)


@interpreted
def test_segments_of_another_grid_are_refused():
    tensors, _, named = cases()["attention"]
    other = Segments((Segment(0, 0, 5, 0, 5),), 2, 5, 5, CPU)
    for call in (ours.attention, ours.attention.forward):
        with pytest.raises(ValueError, match="the segments are for"):
            call(*tensors, other, **named)


@compiled
@pytest.mark.parametrize("name", OPERATORS)
def test_no_operator_runs_elsewhere(name):
    tensors, rest, named = cases()[name]
    with pytest.raises(ValueError):
        getattr(ours, name)(*tensors, *rest, **named)
