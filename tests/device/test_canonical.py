"""The bits of `canonical` in every layout, and its numbers against the reference in fp64. NaN stands in every pad."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from rlspec.device import canonical
from rlspec.device.gradients import Identity
from rlspec.device.operators import CATALOGUE, Dispatch, Operators, Segment, Segments

CPU = torch.device("cpu")
LENGTHS = (11, 16, 13, 19)
CHUNK = 7
ROWS = [(sample, position) for sample, length in enumerate(LENGTHS) for position in range(length)]
PAD = len(ROWS)
GRIDS_RIGHT = [[*range(ROWS.index((s, 0)), ROWS.index((s, 0)) + n)] for s, n in enumerate(LENGTHS)]
DTYPES = (torch.bfloat16, torch.float32)
EXACT = (*DTYPES, torch.float64)  # in which no rounding at the end hides another order
OPS = Operators("canonical")


def normal(*shape, seed=0, dtype=torch.float32, scale=1.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def same(got, want):
    assert got.dtype == want.dtype and got.shape == want.shape and not got.isnan().any()
    width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    return torch.equal(got.contiguous().view(width), want.contiguous().view(width))


# Layouts: calls, each a grid [rows, columns] of logical rows, PAD where there is none


def grid(samples, width=None, left=False):
    width = width or max(len(sample) for sample in samples)
    fill = [[PAD] * (width - len(sample)) for sample in samples]
    return torch.tensor([pad + rows if left else rows + pad for rows, pad in zip(samples, fill, strict=True)])


def packed(samples):
    return torch.tensor([sum(samples, [])])


def cut(call, size=CHUNK):
    return list(call.split(size, 1))


PERMUTED = [GRIDS_RIGHT[sample] for sample in (2, 0, 3, 1)]
LAYOUTS = {
    "packed": [packed(GRIDS_RIGHT)],
    "packed in chunks": cut(packed(GRIDS_RIGHT)),
    "singletons": [torch.tensor([rows]) for rows in GRIDS_RIGHT],
    "singletons in chunks": [part for rows in GRIDS_RIGHT for part in cut(torch.tensor([rows]))],
    "token by token": [torch.tensor([[row]]) for row in range(PAD)],
    "packed permuted": [packed(PERMUTED)],
    "batch permuted": [grid(PERMUTED)],
    "batch": [grid(GRIDS_RIGHT)],
    "padded right": [grid(GRIDS_RIGHT, 20)],
    "padded right in chunks": cut(grid(GRIDS_RIGHT, 20)),
    "padded left": [grid(GRIDS_RIGHT, 20, left=True)],
    "padded left in chunks": cut(grid(GRIDS_RIGHT, 20, left=True)),
    "pads between": [torch.tensor([sum([[PAD, *rows, PAD] for rows in PERMUTED], [])])],
}


def place(table, call):
    """[logical rows, ...] -> [rows, columns, ...], NaN (a valid id 0) on pads."""
    pad = torch.full((1, *table.shape[1:]), math.nan if table.is_floating_point() else 0).to(table.dtype)
    slots = call.flatten().to(table.device)
    return torch.cat((table, pad.to(table.device)))[slots].reshape(*call.shape, *table.shape[1:])


def restore(parts, calls):
    """The results of the calls -> [logical rows, ...]; each logical row comes once."""
    flat = torch.cat([part.flatten(0, 1).cpu() for part in parts])
    slots = torch.cat([call.flatten() for call in calls])
    assert sorted(slots[slots != PAD].tolist()) == list(range(PAD))
    out = torch.empty(PAD, *flat.shape[1:], dtype=flat.dtype)
    out[slots[slots != PAD]] = flat[slots != PAD]
    return out


@dataclass(frozen=True)
class Case:
    """`call(*inputs)` of [rows, columns, ...] gives the outputs, each [rows, columns, ...]; the last are `tables`."""

    call: Callable
    inputs: tuple
    tables: int = 0


def cases(ops, dtype, cast=None, width=33, out=20, vocabulary=257, device=CPU):
    """Operator -> its case on numbers that `dtype` holds, given in `cast`."""

    def make(*shape, seed, dtype=dtype, scale=1.0):
        numbers = normal(*shape, seed=seed, dtype=dtype, scale=scale)
        return numbers.to(device) if cast is None else numbers.to(device, cast)

    matrix, vector = make(out, width, seed=1), make(width, seed=2)
    table, stack = make(vocabulary, width, seed=3), make(5, out, width, seed=4)
    x, y, z = (make(PAD, width, seed=seed, scale=2.0) for seed in (5, 6, 7))
    heads, angles = make(PAD, 3, 10, seed=8), normal(PAD, 5, seed=9)
    cos, sin = (each.to(device, cast) for each in (angles.cos(), angles.sin()))
    logits = make(PAD, vocabulary, seed=10, scale=4.0)
    ids = torch.arange(PAD).square() % vocabulary
    pairs = torch.stack([torch.randperm(5, generator=torch.Generator().manual_seed(n))[:2] for n in range(PAD)])
    ids, pairs = ids.to(device), pairs.to(device)
    slots, gates = make(PAD, 2, width, seed=11), make(PAD, 2, seed=12, dtype=torch.float32)
    head_weight, wide = make(10, seed=13), torch.promote_types(x.dtype, torch.float32)

    def router(a):
        found = ops.router(a.flatten(0, 1), matrix[:5], top_k=2, normalise=True, logits_dtype=wide)
        return [each.unflatten(0, a.shape[:2]) for each in (found.weights, found.probabilities, found.experts)]

    def grouped_gemm(experts, rows):
        dispatch = Dispatch.of(experts.flatten(0, 1), 5)
        found = ops.grouped_gemm(rows.flatten(0, 2)[dispatch.order], stack, dispatch)[dispatch.inverse]
        return [found.unflatten(0, (*rows.shape[:2], 2))]

    def combine(experts, rows, weights):
        dispatch = Dispatch.of(experts.flatten(0, 1), 5)
        found = ops.combine(rows.flatten(0, 2)[dispatch.order], weights.flatten(0, 1), dispatch)
        return [found.unflatten(0, rows.shape[:2])]

    return {
        "embedding": Case(lambda t: [ops.embedding(t, table)], (ids,)),
        "rms_norm": Case(lambda a: [ops.rms_norm(a, vector, eps=1e-6)], (x,)),
        "rms_norm, early": Case(lambda a: [ops.rms_norm(a, vector, eps=1e-6, round_before_weight=True)], (x,)),
        "qk_norm": Case(lambda a: [ops.qk_norm(a, head_weight, eps=1e-6)], (heads,)),
        "rope": Case(lambda a, c, s: [ops.rope(a, c, s)], (heads, cos, sin), tables=2),
        "det_gemm": Case(lambda a: [ops.det_gemm(a, matrix)], (x,)),
        "silu": Case(lambda a: [ops.silu(a)], (x,)),
        "swiglu": Case(lambda a, b: [ops.swiglu(a, b)], (x, y)),
        "residual_add": Case(lambda a, b: [ops.residual_add(a, b)], (z.to(wide), x)),
        "lm_head": Case(lambda a: [ops.lm_head(a, table, out_dtype=wide)], (x,)),
        "logprob": Case(lambda a, t: [ops.logprob(a, t)], (logits, ids)),
        "batch_invariant_logprob": Case(lambda a, t: [ops.batch_invariant_logprob(a, t)], (logits, ids)),
        "linear_logprob": Case(lambda a, t: [ops.linear_logprob(a, table, t)], (x, ids)),
        "router": Case(router, (x,)),
        "grouped_gemm": Case(grouped_gemm, (pairs, slots)),
        "combine": Case(combine, (pairs, slots, gates)),
    }


NAMES = list(cases(OPS, torch.float32))
WIDTHS = [(33, 20, 257), (1, 5, 2), (7, 5, 3), (64, 64, 128), (65, 31, 130)]


def test_all_operators_are_covered():
    assert {name.split(",")[0] for name in NAMES} | {"attention"} == set(CATALOGUE)


def run(case, calls, cast=None):
    """Outputs and gradients of inputs by logical row; what flows back is a function of the logical row."""
    outputs, gradients = [], []
    for call in calls:
        inputs = [place(table, call) for table in case.inputs]
        trained = [each for each in inputs[: len(inputs) - case.tables] if each.is_floating_point()]
        for each in trained:
            each.requires_grad_()
        found = case.call(*inputs)
        outputs.append([each.detach() for each in found])
        flowing = [each for each in found if each.requires_grad]
        if flowing:
            ups = [place(upstream(each, seed), call) for seed, each in enumerate(flowing)]
            gradients.append(torch.autograd.grad(flowing, trained, ups))
    lists = (zip(*outputs, strict=True), zip(*gradients, strict=True))
    return [restore(parts, calls) for results in lists for parts in results]


def upstream(like, seed):
    """For results `like` [rows, columns, ...] one [logical rows, ...], of sizes 2⁻⁸ to 1, held by bf16."""
    sizes = torch.exp2(-(torch.arange(PAD) % 9.0)).reshape(-1, *[1] * (like.dim() - 2))
    return (normal(PAD, *like.shape[2:], seed=100 + seed, dtype=torch.bfloat16) * sizes).bfloat16().to(like)


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("name", NAMES)
def test_every_layout_has_the_same_bits(name, dtype):
    case = cases(OPS, dtype)[name]
    want = run(case, LAYOUTS["packed"])
    assert len(want) > 1 or name == "embedding"
    for layout, calls in LAYOUTS.items():
        for got, expected in zip(run(case, calls), want, strict=True):
            assert same(got, expected), layout


@pytest.mark.parametrize("widths", WIDTHS[1:], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_every_width_has_the_same_bits(name, widths):
    case = cases(OPS, torch.float64, None, *widths)[name]
    want = run(case, LAYOUTS["packed"])
    for layout in ("token by token", "padded left in chunks"):
        for got, expected in zip(run(case, LAYOUTS[layout]), want, strict=True):
            assert same(got, expected), layout


# Units of fp32 of the largest result: what is allowed beside the one rounding of each result. With fp32 tables and
# weights, rotation and the sum over experts add in fp32; the router rounds its logits to fp32.
BESIDE = {"rope": 2.0, "combine": 2.0, "router": 32.0}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("name", [name for name in NAMES if "early" not in name])
def test_accuracy(name, widths, dtype):
    """One rounding away from the reference in fp64: forward, and gradients of inputs."""
    got = run(cases(OPS, dtype, None, *widths)[name], LAYOUTS["padded left"])
    want = run(cases(Operators("reference"), dtype, torch.float64, *widths)[name], LAYOUTS["packed"])
    for mine, exact in zip(got, want, strict=True):
        if not exact.is_floating_point():
            assert torch.equal(mine, exact)
            continue
        unit = torch.finfo(mine.dtype).eps
        beside = BESIDE.get(name, 0) * 2**-23 + 1e-10
        limit = unit / 2 * 1.001 * exact.abs() + beside * exact.abs().amax()
        assert bool(((mine - exact).abs() <= limit).all())


@pytest.mark.parametrize("name", ["embedding", "rms_norm", "det_gemm", "lm_head", "linear_logprob", "router"])
def test_weight_gradients_by_autograd_are_right(name):
    """They are no more than right: their bits depend on the calls."""
    ids = torch.arange(PAD) % 6
    x, weight = normal(PAD, 12, seed=1), normal(9, 12, seed=2)
    results = []
    for ops, dtype in ((OPS, torch.float32), (Operators("reference"), torch.float64)):
        leaf = (weight[0] if name == "rms_norm" else weight).to(dtype).detach().requires_grad_()
        a = x.to(dtype)
        out = {
            "embedding": lambda ops=ops, w=leaf: ops.embedding(ids, w),
            "rms_norm": lambda ops=ops, w=leaf, a=a: ops.rms_norm(a, w, eps=1e-6),
            "det_gemm": lambda ops=ops, w=leaf, a=a: ops.det_gemm(a, w),
            "lm_head": lambda ops=ops, w=leaf, a=a: ops.lm_head(a, w, out_dtype=a.dtype),
            "linear_logprob": lambda ops=ops, w=leaf, a=a: ops.linear_logprob(a, w, ids),
            "router": lambda ops=ops, w=leaf, a=a: ops.router(
                a, w, top_k=2, normalise=False, logits_dtype=a.dtype
            ).weights,
        }[name]()
        results.append(torch.autograd.grad(out, leaf, normal(*out.shape, seed=3).to(dtype))[0])
    torch.testing.assert_close(results[0].double(), results[1], rtol=1e-6, atol=1e-5)


# Weight gradients


OWNED = {
    "det_gemm": (normal(20, 33), (33,), (20,), {}),
    "lm_head": (normal(257, 33), (33,), (257,), {}),
    "rms_norm": (normal(33), (33,), (33,), {"eps": 1e-6}),
    "qk_norm": (normal(10), (3, 10), (3, 10), {"eps": 1e-6}),
    "embedding": (normal(257, 33), None, (33,), {}),
}


def test_the_owned_weights():
    owned = {name for name in CATALOGUE if hasattr(getattr(OPS, name), "weight_gradient")}
    assert owned == {*OWNED, "linear_logprob", "router", "grouped_gemm"}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OWNED)
def test_owned_weight_gradients_have_the_same_bits(name, layout):
    weight, of_x, of_dy, options = OWNED[name]
    x = torch.arange(PAD) % 5 if of_x is None else normal(PAD, *of_x, seed=1, dtype=torch.bfloat16)
    dy = upstream(torch.empty(1, 1, *of_dy, dtype=torch.bfloat16), 2)

    def gradient(calls):
        total = getattr(OPS, name).weight_gradient(weight, lengths=LENGTHS, **options)
        for call in calls:
            places = [(*ROWS[row], LENGTHS[ROWS[row][0]]) if row != PAD else (-1, 0, 0) for row in call.flatten()]
            identity = Identity.of(*zip(*places, strict=True))
            total.add(place(x, call).flatten(0, 1), place(dy, call).flatten(0, 1), identity)
        return total.finish()

    calls = LAYOUTS[layout]
    if "padded" in layout and "chunks" in layout:  # a batch cut into columns: put together again first
        calls = [torch.cat(calls, 1)]
    assert same(gradient(calls), gradient(LAYOUTS["packed"]))


# Attention


SCALE = 10**-0.5
WHOLE = {
    "packed": (LAYOUTS["packed"][0], None),
    "packed in chunks": (LAYOUTS["packed"][0], CHUNK),
    "packed permuted": (LAYOUTS["packed permuted"][0], None),
    "batch": (LAYOUTS["batch"][0], None),
    "batch permuted": (LAYOUTS["batch permuted"][0], None),
    "padded right": (LAYOUTS["padded right"][0], None),
    "padded right in chunks": (LAYOUTS["padded right"][0], CHUNK),
    "padded left": (LAYOUTS["padded left"][0], None),
    "padded left in chunks": (LAYOUTS["padded left"][0], CHUNK),
    "pads between": (LAYOUTS["pads between"][0], None),
    "pads between in chunks": (LAYOUTS["pads between"][0], 5),
    "decode": (LAYOUTS["batch"][0], 1),
    "decode, padded left": (LAYOUTS["padded left"][0], 1),
}


def segments_of(whole, start, stop):
    """The queries of columns start … stop − 1 over all keys up to there."""
    entries = []
    for row, slots in enumerate(whole.tolist()):
        seen = [ROWS[slot][0] if slot != PAD else None for slot in slots[:stop]]
        for sample in dict.fromkeys(seen[start:]):
            if sample is not None:
                first, last = seen.index(sample), len(seen) - seen[::-1].index(sample)
                begin = max(first, start)
                entries.append(Segment(row, begin - start, last - begin, first, last - first))
    return Segments(tuple(entries), len(whole), stop - start, stop, CPU)


def qkv(dtype):
    return [normal(PAD, heads, 10, seed=20 + part, dtype=dtype) for part, heads in enumerate((6, 2, 2))]


def attend(tables, whole, size):
    """Out and lse of the whole grid, by chunks of columns; keys that are still to come are NaN."""
    query, key, value = (place(table, whole) for table in tables)
    width, outs, lses = whole.shape[1], [], []
    for start in range(0, width, size or width):
        stop = min(start + (size or width), width)
        args = (query[:, start:stop], key[:, :stop], value[:, :stop], segments_of(whole, start, stop))
        out, lse = OPS.attention.forward(*args, scale=SCALE)
        assert same(OPS.attention(*args, scale=SCALE), out)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs, 1), torch.cat(lses, 1)


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("layout", WHOLE)
def test_attention_has_the_same_bits(layout, dtype):
    """Forward in this layout and its chunks; one backward on the whole; autograd where the layout is not cut."""
    tables, up = qkv(dtype), upstream(torch.empty(1, 1, 6, 10, dtype=dtype), 30)

    def results(whole, size):
        out, lse = attend(tables, whole, size)
        pads = whole == PAD
        assert not out[pads].any() and bool((lse[pads] == -math.inf).all())
        assert lse.dtype == torch.promote_types(dtype, torch.float32)
        leaves = [place(table, whole).requires_grad_() for table in tables]
        here, dy = segments_of(whole, 0, whole.shape[1]), place(up, whole)
        back = OPS.attention.backward(*leaves, out, lse, dy, here, scale=SCALE)
        assert not any(each[pads].any() for each in back)
        by_autograd = torch.autograd.grad(OPS.attention(*leaves, here, scale=SCALE), leaves, dy)
        assert all(same(got, want) for got, want in zip(by_autograd, back, strict=True))
        return [restore([each], [whole]) for each in (out, lse, *back)]

    for got, want in zip(results(*WHOLE[layout]), results(*WHOLE["packed"]), strict=True):
        assert same(got, want)


def test_attention_of_single_samples_has_the_same_bits():
    tables = qkv(torch.bfloat16)
    want = restore([attend(tables, *WHOLE["packed"])[0]], [WHOLE["packed"][0]])
    for size in (None, 3):
        parts = [attend(tables, call, size)[0] for call in LAYOUTS["singletons"]]
        assert same(restore(parts, LAYOUTS["singletons"]), want)


def test_attention_does_not_see_what_comes_later():
    whole = LAYOUTS["singletons"][1]
    tables = [place(table, whole) for table in qkv(torch.float64)]
    here = segments_of(whole, 0, 16)
    want = OPS.attention.forward(*tables, here, scale=SCALE)
    for poisoned in tables:
        poisoned[:, 5:] = math.nan
    for got, expected in zip(OPS.attention.forward(*tables, here, scale=SCALE), want, strict=True):
        assert same(got[:, :5], expected[:, :5])


def test_a_backward_for_each_chunk_has_other_bits():
    """The control: dK of keys whose queries lie in two chunks is summed in another order, and rounded twice."""
    tables, whole = qkv(torch.bfloat16), WHOLE["padded right"][0]
    leaves = [place(table, whole).requires_grad_() for table in tables]
    outs = []
    for start in range(0, 20, CHUNK):
        stop = min(start + CHUNK, 20)
        parts = (leaves[0][:, start:stop], leaves[1][:, :stop], leaves[2][:, :stop])
        outs.append(OPS.attention(*parts, segments_of(whole, start, stop), scale=SCALE))
    dy = place(upstream(torch.empty(1, 1, 6, 10, dtype=torch.bfloat16), 30), whole)
    dq, dk, _ = torch.autograd.grad(torch.cat(outs, 1), leaves, dy)
    out, lse = attend(tables, whole, None)
    want = OPS.attention.backward(*leaves, out, lse, dy, segments_of(whole, 0, 20), scale=SCALE)
    assert same(dq, want[0]) and not same(dk, want[1])
    torch.testing.assert_close(dk, want[1], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_accuracy_of_attention(dtype):
    whole, unit = WHOLE["padded left"][0], torch.finfo(dtype).eps
    dy = place(upstream(torch.empty(1, 1, 6, 10, dtype=dtype), 30), whole)
    here, results = segments_of(whole, 0, 20), []
    for name, wide in (("canonical", dtype), ("reference", torch.float64)):
        leaves = [place(table, whole).to(wide).requires_grad_() for table in qkv(dtype)]
        out = Operators(name).attention(*leaves, here, scale=SCALE)
        results.append((out.detach(), *torch.autograd.grad(out, leaves, dy.to(wide))))
    for got, want in zip(*results, strict=True):
        # One rounding each; the log-sum-exp that backward reads is fp32.
        limit = unit / 2 * 1.001 * want.abs() + 2**-21 * want.abs().amax()
        assert bool(((got - want).abs() <= limit).all())


def test_the_log_sum_exp_of_attention():
    whole = WHOLE["packed"][0]
    query, key, value = (place(table, whole) for table in qkv(torch.float64))
    _, lse = OPS.attention.forward(query, key, value, segments_of(whole, 0, PAD), scale=SCALE)
    first, last = ROWS.index((1, 0)), ROWS.index((1, 9))
    scores = torch.einsum("hd,shd->hs", query[0, last], key[0, first : last + 1].repeat_interleave(3, 1)) * SCALE
    torch.testing.assert_close(lse[0, last], torch.logsumexp(scores, -1), rtol=1e-13, atol=1e-13)


def test_attention_backward_refuses_other_shapes():
    tables, whole = qkv(torch.float32), WHOLE["packed"][0]
    out, lse = attend(tables, whole, None)
    leaves, here = [place(table, whole) for table in tables], segments_of(whole, 0, PAD)
    for bad in ((out, lse[..., :1], out), (out[:, 1:], lse, out), (out, lse, out[..., 1:])):
        with pytest.raises(ValueError, match="do not fit query"):
            OPS.attention.backward(*leaves, *bad, here, scale=SCALE)


# Ties, ends of the range, the functions written out


def test_equal_scores_go_to_the_lower_expert():
    weight = torch.zeros(40, 4)
    weight[[5, 17, 30]] = 1.0
    found = OPS.router(torch.ones(6, 4), weight, top_k=5, normalise=True, logits_dtype=torch.float32)
    assert found.experts.tolist() == [[5, 17, 30, 0, 1]] * 6


def test_logits_that_are_masked_out():
    logits = normal(3, 600, dtype=torch.float32)
    logits[:, :300] = -math.inf
    ids = torch.tensor([300, 450, 599])
    for operator in (OPS.logprob, OPS.batch_invariant_logprob):
        assert torch.equal(operator(logits, ids), operator(logits[:, 300:], ids - 300))
        assert operator(logits, torch.zeros(3, dtype=torch.int64)).tolist() == [-math.inf] * 3


def test_large_numbers():
    x = torch.tensor([-1e30, -1000.0, -0.0, 1000.0, 1e30])
    assert OPS.silu(x).tolist() == [0.0, 0.0, 0.0, 1000.0, x[4].item()]
    logits = torch.tensor([[1e6, -1e30, 1e6]])
    for operator in (OPS.logprob, OPS.batch_invariant_logprob):
        assert operator(logits, torch.tensor([0])).item() == pytest.approx(-math.log(2), rel=1e-7)


def test_exp_and_log_are_right_to_a_few_units():
    x = torch.cat((torch.linspace(-700, 700, 4001, dtype=torch.float64), normal(2000, dtype=torch.float64)))
    want = torch.exp(x)
    assert float(((canonical.exp(x) - want) / want).abs().amax()) < 4 * 2**-52
    y = torch.cat((want[3000:], 1 + normal(999, dtype=torch.float64).abs() * 1e-3))
    error = (canonical.log(y) - torch.log(y)).abs() / torch.log(y).abs()
    assert float(error.amax()) < 4 * 2**-52
    ends = torch.tensor([-math.inf, -800.0, -745.0, 0.0, 709.7, 710.0, math.inf, math.nan], dtype=torch.float64)
    torch.testing.assert_close(canonical.exp(ends), torch.exp(ends), rtol=1e-15, atol=5e-324, equal_nan=True)
    assert canonical.log(torch.ones(1, dtype=torch.float64)).item() == 0.0


@pytest.mark.parametrize("function", [canonical.exp, canonical.log])
def test_exp_and_log_do_not_depend_on_the_place(function):
    x = normal(1031, dtype=torch.float64).abs() * 20
    full = function(x)
    assert same(torch.cat([function(each) for each in x.split(1)]), full)
    assert same(torch.cat([function(each) for each in x[3:].split(37)]), full[3:])


GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("function", [canonical.exp, canonical.log])
def test_devices_agree_on_exp_and_log(function):
    x = normal(5000, dtype=torch.float64).abs() * 20
    assert same(function(x.cuda()).cpu(), function(x))


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_devices_agree(name, dtype):
    want = run(cases(OPS, dtype)[name], LAYOUTS["packed"])
    case = cases(OPS, dtype, device=torch.device("cuda"))[name]
    for layout in ("packed", "padded left in chunks", "singletons"):
        for got, expected in zip(run(case, LAYOUTS[layout]), want, strict=True):
            assert same(got, expected), layout


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("dtype", DTYPES)
def test_devices_agree_on_attention(dtype):
    whole, found = WHOLE["padded left"][0], []
    for device in ("cpu", "cuda"):
        leaves = [place(table, whole).to(device).requires_grad_() for table in qkv(dtype)]
        here = Segments(segments_of(whole, 0, 20).entries, len(whole), 20, 20, torch.device(device))
        out, lse = OPS.attention.forward(*leaves, here, scale=SCALE)
        dy = place(upstream(out, 30), whole)
        back = OPS.attention.backward(*leaves, out, lse, dy, here, scale=SCALE)
        lse = torch.where(lse == -math.inf, 0, lse)
        found.append([each.detach().cpu() for each in (out, lse, *back)])
    assert all(same(got, want) for got, want in zip(*found, strict=True))
