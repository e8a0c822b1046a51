"""All implementations against the definition; fp64 inputs throughout, so that what remains is a few units of 2⁻⁵³."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import sys
import types

import pytest
import torch

from rlspec.device import operators
from rlspec.device.operators import CATALOGUE, Dispatch, Operators, Segment, Segments, resolve

IMPLEMENTATIONS = ("reference", "torch", "canonical")
ALWAYS_WIDE = ("lm_head", "logprob", "batch_invariant_logprob", "linear_logprob", "router")
CPU = torch.device("cpu")
NARROW = torch.bfloat16


def close(got, want):
    """Sums of at most a few hundred fp64 terms of size one: 1e-12 is four digits above their rounding."""
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    return True


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def segments(entries, rows, queries, keys=None):
    return Segments(tuple(Segment(*entry) for entry in entries), rows, queries, keys or queries, CPU)


def whole(rows, width):
    return segments([(row, 0, width, 0, width) for row in range(rows)], rows, width)


@pytest.fixture(params=IMPLEMENTATIONS)
def ops(request):
    return Operators(request.param)


# The catalogue


@pytest.mark.parametrize("operator", CATALOGUE)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_catalogue_resolves(operator, implementation):
    assert callable(resolve(operator, implementation))
    assert f"\n    {operator}" in operators.__doc__ or f"{operator}(" in operators.__doc__


def test_unknown_operator_lists_the_known():
    with pytest.raises(ValueError, match="unknown operator 'attn'; known: embedding, rms_norm, .*combine"):
        Operators({"attn": "reference"})


def test_unknown_implementation_lists_the_known():
    known = "known: reference, canonical, torch, triton, cuda"
    with pytest.raises(ValueError, match=f"unknown implementation 'refrence' of 'rope'; {known}"):
        Operators({"rope": "refrence"})
    with pytest.raises(ValueError, match="unknown implementation 'fast'"):
        Operators("fast")


def test_misspelt_attribute_lists_the_known():
    with pytest.raises(AttributeError, match="unknown operator 'atention'; known: .*attention"):
        Operators("torch").atention  # noqa: B018


def test_map_selects_one_operator():
    chosen = Operators({"attention": "reference"})
    assert chosen.attention is resolve("attention", "reference")
    assert chosen.rope is resolve("rope", "torch")
    assert chosen.implementations["attention"] == "reference"
    assert set(chosen.implementations.values()) == {"reference", "torch"}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_has_the_same_implementations(copied):
    chosen = Operators({"attention": "reference"}, default="canonical")
    assert chosen.rope is resolve("rope", "canonical")
    assert copied(chosen).implementations == chosen.implementations
    assert copied(chosen).rope is chosen.rope


def test_users_table_and_function(monkeypatch):
    mine = types.ModuleType("my_kernels")
    mine.silu = lambda x: x
    mine.table = {"silu": mine.silu, "rope": "not a function"}
    monkeypatch.setitem(sys.modules, "my_kernels", mine)
    assert Operators("my_kernels:table").silu is mine.silu
    assert Operators({"silu": "my_kernels:silu"}).silu is mine.silu
    with pytest.raises(ValueError, match="my_kernels:table has no operator 'attention'; it has: rope, silu"):
        Operators("my_kernels:table").attention  # noqa: B018
    with pytest.raises(ValueError, match="not callable for operator 'rope', but a str"):
        Operators("my_kernels:table").rope  # noqa: B018
    with pytest.raises(ValueError, match="module 'my_kernels' has no 'tabel'"):
        Operators("my_kernels:tabel").silu  # noqa: B018
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        Operators("no_such_module:table").silu  # noqa: B018


def test_import_error_inside_a_users_module_is_theirs(monkeypatch, tmp_path):
    (tmp_path / "half_built.py").write_text("import math\nmath.tau2\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(AttributeError, match="tau2"):
        resolve("silu", "half_built:table")


# Against the definition


def test_embedding(ops):
    table, ids = normal(7, 3), torch.tensor([[0, 6], [6, 2]])
    assert torch.equal(ops.embedding(ids, table), table[ids])
    for outside in (7, -1):
        with pytest.raises(ValueError, match="tokens must be in 0 … 6"):
            ops.embedding(torch.tensor([[outside]]), table)


def test_rms_norm(ops):
    x, weight = normal(5, 16), normal(16, seed=1)
    want = torch.stack([row / math.sqrt(sum(v * v for v in row.tolist()) / 16 + 1e-2) * weight for row in x])
    for name in ("rms_norm", "qk_norm"):
        for early in (False, True):
            assert close(getattr(ops, name)(x, weight, eps=1e-2, round_before_weight=early), want)


def test_rms_norm_roundings_differ_where_they_should(ops):
    x, weight = normal(64, 32, dtype=NARROW), normal(32, seed=1, dtype=NARROW)
    exact = Operators("reference").rms_norm(x.float(), weight.float(), eps=1e-6)
    once, early = (ops.rms_norm(x, weight, eps=1e-6, round_before_weight=early) for early in (False, True))
    plain = (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(NARROW)
    assert torch.equal(once, exact.to(NARROW))
    assert torch.equal(early, weight * plain)
    assert not torch.equal(once, early)


def test_rope_is_a_complex_rotation(ops):
    x, angles = normal(2, 5, 3, 8), normal(2, 5, 4, seed=1)
    pairs = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angles), angles).unsqueeze(-2)
    assert close(ops.rope(x, angles.cos(), angles.sin()), torch.cat((pairs.real, pairs.imag), -1))


def test_attention_by_scalar_loops(ops):
    q, k, v = normal(1, 3, 4, 2), normal(1, 3, 2, 2, seed=1), normal(1, 3, 2, 2, seed=2)
    want = torch.zeros_like(q)
    for t in range(3):
        for head in range(4):
            pair = head // 2
            weights = [math.exp(0.3 * float(q[0, t, head] @ k[0, s, pair])) for s in range(t + 1)]
            for s in range(t + 1):
                want[0, t, head] += weights[s] / sum(weights) * v[0, s, pair]
    assert close(ops.attention(q, k, v, whole(1, 3), scale=0.3), want)


def test_small_operators(ops):
    x, y, w = normal(4, 6), normal(4, 6, seed=1), normal(5, 6, seed=2)
    assert close(ops.det_gemm(x, w), torch.einsum("ik,nk->in", x, w))
    assert close(ops.lm_head(x, w, out_dtype=torch.float64), torch.einsum("ik,nk->in", x, w))
    assert close(ops.silu(x), x / (1 + torch.exp(-x)))
    assert close(ops.swiglu(x, y), x / (1 + torch.exp(-x)) * y)
    assert close(ops.residual_add(x, y), x + y)
    targets = torch.tensor([0, 5, 3, 3])
    assert close(ops.logprob(x, targets), torch.log(torch.exp(x)[range(4), targets] / torch.exp(x).sum(-1)))


def test_logprob_of_a_target_outside_raises(ops):
    for outside in (6, -1, -100):
        with pytest.raises(ValueError, match="targets must be in 0 … 5"):
            ops.logprob(normal(1, 6), torch.tensor([outside]))


def route(ops, x, weight, **changes):
    options = {"top_k": 2, "normalise": True, "logits_dtype": torch.float64, **changes}
    return ops.router(x, weight, **options)


def test_router(ops):
    x, weight = normal(9, 4), normal(5, 4, seed=1)
    scores = torch.exp(x @ weight.T) / torch.exp(x @ weight.T).sum(-1, keepdim=True)
    best = [sorted(range(5), key=lambda e, row=row: -row[e])[:2] for row in scores.tolist()]
    for normalise in (True, False):
        routing = route(ops, x, weight, normalise=normalise)
        assert routing.experts.tolist() == best
        assert close(routing.probabilities, scores)
        chosen = scores.gather(-1, routing.experts)
        assert close(routing.weights, chosen / chosen.sum(-1, keepdim=True) if normalise else chosen)


def test_router_by_sigmoid(ops):
    x, weight = normal(9, 4), normal(5, 4, seed=1)
    scores = 1 / (1 + torch.exp(-(x @ weight.T)))
    routing = route(ops, x, weight, scoring="sigmoid")
    best = torch.tensor([sorted(range(5), key=lambda e, row=row: -row[e])[:2] for row in scores.tolist()])
    chosen = scores.gather(-1, best)
    assert torch.equal(routing.experts, best) and close(routing.probabilities, scores)
    assert close(routing.weights, chosen / chosen.sum(-1, keepdim=True))
    leaf = x.clone().requires_grad_()
    again = route(ops, leaf, weight, scoring="sigmoid", normalise=False)
    (gradient,) = torch.autograd.grad(again.weights.sum(), leaf)
    slope = torch.zeros_like(scores).scatter(-1, best, 1.0) * scores * (1 - scores)
    assert close(gradient, slope @ weight)
    with pytest.raises(ValueError, match="unknown scoring 'relu'; known: softmax, sigmoid"):
        route(ops, x, weight, scoring="relu")


def test_router_takes_a_choice(ops):
    x, weight = normal(3, 4), normal(5, 4, seed=1)
    choice = torch.tensor([[0, 1], [4, 0], [2, 3]])
    routing = route(ops, x, weight, choice=choice, normalise=False)
    assert torch.equal(routing.experts, choice)
    assert close(routing.weights, routing.probabilities.gather(-1, choice))


def test_statistics_of_a_router(ops):
    scores = torch.softmax(normal(9, 4), -1).requires_grad_()
    experts = torch.tensor([[0, 1], [1, 2], [3, 0], [3, 1], [0, 2], [0, 1], [0, 1], [2, 3], [1, 2]])
    counts, sums = ops.router.statistics(scores, experts, [(5, 3), (0, 4)], together=False)
    assert counts.tolist() == [[2, 2, 1, 1], [2, 3, 1, 2]]
    assert close(sums, torch.stack((scores[5:8].sum(0), scores[:4].sum(0))))
    (gradient,) = torch.autograd.grad(sums[0, 2], scores)
    assert gradient.nonzero().tolist() == [[5, 2], [6, 2], [7, 2]] and gradient.sum() == 3
    both, one = ops.router.statistics(scores, experts, [(5, 3), (0, 4)], together=True)
    assert both.tolist() == [[4, 5, 2, 3]] and close(one, sums.sum(0, keepdim=True))


def test_router_of_equal_scores_takes_the_lower_expert_first():
    weight = torch.zeros(40, 4, dtype=torch.float64)
    weight[[5, 17, 30]] = 1.0
    routing = route(Operators("reference"), torch.ones(6, 4, dtype=torch.float64), weight, top_k=5)
    assert routing.experts.tolist() == [[5, 17, 30, 0, 1]] * 6


def test_experts_by_loops(ops):
    tokens, first, second = normal(6, 4), normal(3, 5, 4, seed=1), normal(3, 4, 5, seed=2)
    experts = torch.tensor([[2, 0], [0, 2], [2, 0], [0, 2], [2, 0], [0, 2]])
    weights = normal(6, 2, seed=3)
    dispatch = Dispatch.of(experts, 3)
    assert dispatch.sizes == (6, 0, 6)
    rows = ops.grouped_gemm(ops.grouped_gemm(tokens[dispatch.tokens], first, dispatch), second, dispatch)
    want = torch.stack([
        sum(weights[n, j] * (second[e] @ (first[e] @ tokens[n])) for j, e in enumerate(experts[n].tolist()))
        for n in range(6)
    ])  # fmt: skip
    assert close(ops.combine(rows, weights, dispatch), want)


def test_dispatch_orders_by_expert_then_token():
    experts = torch.tensor([[3, 1], [1, 0], [3, 2]])
    dispatch = Dispatch.of(experts, 5)
    assert experts.flatten()[dispatch.order].tolist() == [0, 1, 1, 2, 3, 3]
    assert dispatch.tokens.tolist() == [1, 0, 1, 2, 0, 2]
    assert dispatch.sizes == (1, 2, 1, 2, 0)
    assert dispatch.order[dispatch.inverse].tolist() == list(range(6))


def unlooked(experts, count):
    """A dispatch to experts that may be outside, as of a device where nobody looks."""
    whole = Dispatch.of(torch.tensor(experts), 1 + torch.tensor(experts).max())
    return dataclasses.replace(whole, offsets=whole.offsets[: count + 1])


def test_rows_of_experts_outside_are_counted_where_sizes_are_looked_at():
    with pytest.raises(ValueError, match="experts must be in 0 … 1, and those of 1 rows are not"):
        _ = unlooked([[0, 2], [1, 0]], 2).sizes


# Gradients, dtypes and roundings


def calls(ops, dtype=torch.float64):
    """Operator -> (a call, its differentiable inputs)."""
    x, y = normal(1, 6, 8, dtype=dtype), normal(1, 6, 8, seed=1, dtype=dtype)
    heads, keys, values = (normal(2, 6, n, 4, seed=n, dtype=dtype) for n in (4, 2, 2))
    matrix, vector, angles = normal(5, 8, seed=2, dtype=dtype), normal(8, seed=3, dtype=dtype), normal(2, 6, 2, seed=4)
    if dtype == NARROW:
        angles = angles.float()
    flat, stack = normal(6, 8, seed=5, dtype=dtype), normal(5, 3, 8, seed=6, dtype=dtype)
    wide = torch.promote_types(dtype, torch.float32)
    experts = Dispatch.of(torch.tensor([[0, 1], [3, 0], [1, 4]]), 5)
    gates = normal(3, 2, seed=7).to(wide)
    ids = torch.tensor([[0, 4, 4], [1, 2, 0]])
    padded = segments([(0, 0, 6, 0, 6), (1, 2, 4, 2, 4)], 2, 6)
    return {
        "embedding": (lambda w: ops.embedding(ids, w), [matrix]),
        "rms_norm": (lambda a, w: ops.rms_norm(a, w, eps=1e-6), [x, vector]),
        "qk_norm": (lambda a, w: ops.qk_norm(a, w, eps=1e-6), [heads, vector[:4].clone()]),
        "rope": (lambda a: ops.rope(a, angles.cos(), angles.sin()), [heads]),
        "attention": (lambda q, k, v: ops.attention(q, k, v, padded, scale=0.5), [heads, keys, values]),
        "det_gemm": (ops.det_gemm, [x, matrix]),
        "silu": (ops.silu, [x]),
        "swiglu": (ops.swiglu, [x, y]),
        "residual_add": (ops.residual_add, [x, y]),
        "lm_head": (lambda a, w: ops.lm_head(a, w, out_dtype=wide), [x, matrix]),
        "logprob": (lambda a: ops.logprob(a, torch.tensor([[0, 7, 3, 3, 1, 2]])), [x]),
        "batch_invariant_logprob": (lambda a: ops.batch_invariant_logprob(a, torch.tensor([[0, 7, 3, 3, 1, 2]])), [x]),
        "linear_logprob": (lambda a, w: ops.linear_logprob(a, w, torch.tensor([[0, 4, 3, 3, 1, 2]])), [x, matrix]),
        "router": (lambda a, w: route(ops, a, w, logits_dtype=wide).weights, [flat, matrix]),
        "grouped_gemm": (lambda a, w: ops.grouped_gemm(a, w, experts), [flat, stack]),
        "combine": (lambda a, w: ops.combine(a, w, experts), [flat, gates]),
    }


@pytest.mark.parametrize("operator", CATALOGUE)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[1:])
def test_gradients_are_those_of_the_reference(operator, implementation):
    results = []
    for name in (implementation, "reference"):
        call, inputs = calls(Operators(name))[operator]
        inputs = [each.clone().requires_grad_() for each in inputs]
        out = call(*inputs)
        upstream = normal(*out.shape, seed=99)
        results.append((out.detach(), *torch.autograd.grad(out, inputs, upstream)))
    for got, want in zip(*results, strict=True):
        assert want.abs().sum() > 0
        assert close(got, want)


@pytest.mark.parametrize("operator", CATALOGUE)
def test_reference_rounds_once(operator):
    """Fed bf16, it gives its own fp32 result rounded to bf16; log-probs, routing weights and logits stay fp32."""
    reference = Operators("reference")
    call, inputs = calls(reference, NARROW)[operator]
    got, exact = call(*inputs), call(*(each.float() for each in inputs))
    assert exact.dtype == torch.float32
    assert got.dtype == (torch.float32 if operator in ALWAYS_WIDE else NARROW)
    assert torch.equal(got, exact.to(got.dtype))


@pytest.mark.parametrize("operator", CATALOGUE)
def test_all_keep_the_dtypes_of_the_reference(operator):
    for dtype in (NARROW, torch.float32, torch.float64):
        kinds = []
        for name in IMPLEMENTATIONS:
            call, inputs = calls(Operators(name), dtype)[operator]
            kinds.append(call(*inputs).dtype)
        assert len(set(kinds)) == 1


def test_narrow_tables_and_weights_mean_narrow_arithmetic(ops):
    x, angles = normal(1, 6, 2, 8, dtype=NARROW), normal(1, 6, 4, seed=1)
    cos, sin = angles.cos().to(NARROW), angles.sin().to(NARROW)
    first, second = x.chunk(2, -1)
    c, s = cos.unsqueeze(-2), sin.unsqueeze(-2)
    assert torch.equal(ops.rope(x, cos, sin), torch.cat((first * c - second * s, second * c + first * s), -1))
    rows, dispatch = normal(8, 16, dtype=NARROW), Dispatch.of(torch.tensor([[0, 1]] * 4), 2)
    weights = normal(4, 2, seed=2, dtype=NARROW)
    assert torch.equal(ops.combine(rows, weights, dispatch), rows[:4] * weights[:, :1] + rows[4:] * weights[:, 1:])


BAD = {
    "embedding": (
        lambda ops, x, w: ops.embedding(torch.empty(0, 2, dtype=torch.int64), w),
        lambda ops, x, w: ops.embedding(torch.tensor([1.0]), w),
        lambda ops, x, w: ops.embedding(torch.tensor([1]), w[0]),
    ),
    "rms_norm": (
        lambda ops, x, w: ops.rms_norm(x, w[0, :5], eps=1e-6),
        lambda ops, x, w: ops.rms_norm(x, w[:1], eps=1e-6),
        lambda ops, x, w: ops.rms_norm(x, w[0].float(), eps=1e-6),
        lambda ops, x, w: ops.rms_norm(x, w[0], eps=math.nan),
    ),
    "qk_norm": (
        lambda ops, x, w: ops.qk_norm(x[:0], w[0], eps=1e-6),
        lambda ops, x, w: ops.qk_norm(x, w[0, :3], eps=1e-6),
    ),
    "rope": (
        lambda ops, x, w: ops.rope(x.reshape(1, 2, 2, 6), w[:2, :3][None], w[:2, :2][None]),
        lambda ops, x, w: ops.rope(x.reshape(1, 2, 4, 3), w[:2, :1][None], w[:2, :1][None]),
        lambda ops, x, w: ops.rope(x.reshape(1, 2, 2, 6), w[:2, :3][None], w[:2, :3][None].float()),
    ),
    "attention": (
        lambda ops, x, w: ops.attention(*[x.reshape(1, 4, 1, 6)] * 3, whole(1, 4), scale=math.inf),
        lambda ops, x, w: ops.attention(*[x.reshape(1, 4, 1, 6).long()] * 3, whole(1, 4), scale=1.0),
        lambda ops, x, w: ops.attention(*[x[None, :, None]] * 2, x.to("meta")[None, :, None], whole(1, 4), scale=1.0),
    ),
    "det_gemm": (
        lambda ops, x, w: ops.det_gemm(x, w[:, :5]),
        lambda ops, x, w: ops.det_gemm(x, w.float()),
        lambda ops, x, w: ops.det_gemm(x[:0], w),
        lambda ops, x, w: ops.det_gemm(x, w.to("meta")),
        lambda ops, x, w: ops.det_gemm(x, w[0]),
    ),
    "silu": (lambda ops, x, w: ops.silu(x.long()), lambda ops, x, w: ops.silu(x[:0])),
    "swiglu": (lambda ops, x, w: ops.swiglu(x, x[:1]), lambda ops, x, w: ops.swiglu(x, x.float())),
    "residual_add": (
        lambda ops, x, w: ops.residual_add(x, x[:1]),
        lambda ops, x, w: ops.residual_add(x.float(), x),
    ),
    "lm_head": (
        lambda ops, x, w: ops.lm_head(x, w[:, :5], out_dtype=x.dtype),
        lambda ops, x, w: ops.lm_head(x, w, out_dtype=torch.int64),
    ),
    "logprob": (
        lambda ops, x, w: ops.logprob(x, torch.zeros(4)),
        lambda ops, x, w: ops.logprob(x, torch.zeros(3, dtype=torch.int64)),
        lambda ops, x, w: ops.logprob(x[:0], torch.zeros(0, dtype=torch.int64)),
    ),
    "batch_invariant_logprob": (
        lambda ops, x, w: ops.batch_invariant_logprob(x, torch.full((4,), 6)),
        lambda ops, x, w: ops.batch_invariant_logprob(x.long(), torch.zeros(4, dtype=torch.int64)),
    ),
    "linear_logprob": (
        lambda ops, x, w: ops.linear_logprob(x, w, torch.full((4,), 5)),
        lambda ops, x, w: ops.linear_logprob(x, w.float(), torch.zeros(4, dtype=torch.int64)),
        lambda ops, x, w: ops.linear_logprob(x, w, torch.zeros(4, 1, dtype=torch.int64)),
    ),
    "router": (
        lambda ops, x, w: route(ops, x, w, top_k=6),
        lambda ops, x, w: route(ops, x, w, top_k=0),
        lambda ops, x, w: route(ops, x, w, choice=torch.zeros(4, 3, dtype=torch.int64)),
        lambda ops, x, w: route(ops, x, w, choice=torch.full((4, 2), 5)),
        lambda ops, x, w: route(ops, x[None], w),
    ),
    "grouped_gemm": (
        lambda ops, x, w: ops.grouped_gemm(x, w[None], Dispatch.of(torch.tensor([[0, 1], [1, 0]]), 2)),
        lambda ops, x, w: ops.grouped_gemm(x[:3], torch.stack((w, w)), Dispatch.of(torch.tensor([[0, 1], [1, 0]]), 2)),
        lambda ops, x, w: ops.grouped_gemm(x, torch.stack((w, w)), Dispatch.of(torch.tensor([[0, 2], [1, 0]]), 2)),
        lambda ops, x, w: ops.grouped_gemm(x, torch.stack((w, w)), Dispatch.of(torch.tensor([[0, -1], [1, 0]]), 2)),
        lambda ops, x, w: ops.grouped_gemm(x, torch.stack((w, w)), unlooked([[0, 2], [1, 0]], 2)),
    ),
    "combine": (
        lambda ops, x, w: ops.combine(x, w[:2, :1], Dispatch.of(torch.tensor([[0, 1], [1, 0]]), 2)),
        lambda ops, x, w: ops.combine(x, w[:2, :2].long(), Dispatch.of(torch.tensor([[0, 1], [1, 0]]), 2)),
    ),
}


@pytest.mark.parametrize("operator", CATALOGUE)
def test_what_does_not_fit_is_refused(ops, operator):
    for call in BAD[operator]:
        with pytest.raises(ValueError, match=r"\w+ \w+"):
            call(ops, normal(4, 6), normal(5, 6, seed=1))


# Layouts of attention


def samples(lengths, dtype=torch.float32):
    return [
        tuple(normal(1, n, heads, 8, seed=100 * n + part, dtype=dtype) for part, heads in enumerate((4, 2, 2)))
        for n in lengths
    ]


def grid_of(parts, places, rows, width, fill=0.0):
    """Lay the samples' tensors into a grid at (row, start)."""
    grids = [torch.full((rows, width, *part.shape[2:]), fill, dtype=part.dtype) for part in parts[0]]
    for sample, (row, start) in zip(parts, places, strict=True):
        for grid, part in zip(grids, sample, strict=True):
            grid[row, start : start + part.shape[1]] = part[0]
    return grids


def placed(places, lengths, rows, width):
    entries = [(row, start, length, start, length) for (row, start), length in zip(places, lengths, strict=True)]
    return segments(entries, rows, width)


LAYOUTS = {
    "packed": ([(0, 0), (0, 5), (0, 12)], 1, 15),
    "padded right": ([(0, 0), (1, 0), (2, 0)], 3, 9),
    "padded left": ([(0, 4), (1, 2), (2, 6)], 3, 9),
    "permuted": ([(2, 0), (0, 0), (1, 0)], 3, 7),
    "packed with gaps": ([(0, 1), (0, 8), (1, 3)], 2, 16),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_reference_attention_of_any_layout_has_the_bits_of_single_samples(layout):
    """Exact: each segment is computed from the same numbers by calls of the same shapes. NaN stands in every pad."""
    places, rows, width = LAYOUTS[layout]
    parts = samples((5, 7, 3))
    attention = Operators("reference").attention
    grids = [grid.requires_grad_() for grid in grid_of(parts, places, rows, width, fill=math.nan)]
    here = placed(places, (5, 7, 3), rows, width)
    out = attention(*grids, here, scale=0.3)
    upstream = torch.full_like(out, math.nan)
    upstream_of = [normal(1, p[0].shape[1], 4, 8, seed=n, dtype=torch.float32) for n, p in enumerate(parts)]
    for (row, start), up in zip(places, upstream_of, strict=True):
        upstream[row, start : start + up.shape[1]] = up[0]
    gradients = torch.autograd.grad(out, grids, upstream)
    for (row, start), sample, up in zip(places, parts, upstream_of, strict=True):
        length = sample[0].shape[1]
        leaves = [each.clone().requires_grad_() for each in sample]
        alone = attention(*leaves, whole(1, length), scale=0.3)
        assert torch.equal(out[row, start : start + length], alone[0])
        for got, want in zip(gradients, torch.autograd.grad(alone, leaves, up), strict=True):
            assert torch.equal(got[row, start : start + length], want[0])
    assert torch.equal(out[~here.covered], torch.zeros_like(out[~here.covered]))
    assert torch.equal(gradients[1][~here.covered], torch.zeros_like(gradients[1][~here.covered]))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[1:])
def test_attention_agrees_in_every_layout(layout, implementation):
    places, rows, width = LAYOUTS[layout]
    parts = samples((5, 7, 3), torch.float64)
    grids = grid_of(parts, places, rows, width)
    here = placed(places, (5, 7, 3), rows, width)
    got, want = (Operators(name).attention(*grids, here, scale=0.3) for name in (implementation, "reference"))
    assert close(got, want)


def test_attention_over_earlier_keys(ops):
    """Chunks and decode: the last queries over all keys are the last rows of the whole."""
    (q, k, v), (other,) = samples((9,), torch.float64)[0], [normal(1, 9, 4, 8, seed=5)]
    full = ops.attention(q, k, v, whole(1, 9), scale=0.3)
    for first in (1, 4, 8):
        part = segments([(0, 0, 9 - first, 0, 9)], 1, 9 - first, 9)
        assert close(ops.attention(q[:, first:], k, v, part, scale=0.3), full[:, first:])
    wrong = ops.attention(other, k, v, whole(1, 9), scale=0.3)
    assert not torch.allclose(wrong, full)


def test_segments_describe_the_grid():
    here = segments([(1, 1, 2, 0, 3), (0, 0, 3, 1, 3)], 2, 3, 4)
    assert here.table.tolist() == [[1, 1, 2, 0, 3], [0, 0, 3, 1, 3]] and here.table.dtype == torch.int32
    assert here.positions.tolist() == [[0, 1, 2], [0, 1, 2]]
    assert here.covered.tolist() == [[True] * 3, [False, True, True]]
    assert here.mask.int().tolist() == [
        [[0, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1]],
        [[0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]],
    ]
    assert not here.whole and whole(3, 2).whole


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([(2, 0, 1, 0, 1)], "does not fit"),
        ([(0, 3, 2, 0, 4)], "does not fit"),
        ([(0, 0, 4, 2, 4)], "does not fit"),
        ([(0, 0, 2, 0, 1)], "fewer keys than queries"),
        ([(0, 0, 0, 0, 1)], "does not fit"),
        ([(0, -1, 2, 0, 2)], "does not fit"),
        ([(0, 0, 3, 0, 3), (0, 2, 2, 0, 2)], "overlaps"),
    ],
)
def test_impossible_segments_are_refused(entries, message):
    with pytest.raises(ValueError, match=message):
        segments(entries, 2, 4, 5)


def test_attention_refuses_tensors_of_another_grid(ops):
    q, k, v = samples((4,))[0]
    for bad, message in (
        ((q[:, :3], k, v), "segments are for 1 rows, 4 queries, 4 keys"),
        ((q, k[:, :3], v[:, :3]), "segments are for"),
        ((q[:, :, :3], k, v), "do not pair"),
        ((q, k, v[..., :4]), "do not pair"),
        ((q, k.double(), v), "differ in dtype"),
        ((q[0], k, v), r"takes \[rows, tokens, heads, width\]"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.attention(*bad, whole(1, 4), scale=0.3)
