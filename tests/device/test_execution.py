"""One operator through the calls of a layout: what reaches it, and what its results become."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import Function

from rlspec.device import bench as device_bench
from rlspec.device import canonical, execution, observe
from rlspec.device.execution import NoBackward
from rlspec.device.gradients import WeightGradient
from tests import benches

EVERY = (
    *benches.LAYOUTS,
    "singletons_chunked",
    "padded_left",
    "padded_more",
    "groups_of_2",
    "decode",
    "batched_decode",
)
TOKENS = 11


def subject(tmp_path, operator, candidate, variant="", **changes):
    on = benches.bench(tmp_path, [operator], **changes)
    (tier,) = on.workload.tiers
    return device_bench.subject(on, operator, tier, variant, candidate)


def run(one, layout, backward=False):
    return execution.run(one, benches.layout(layout, one.tier), observe.Seen(), backward=backward)


@pytest.fixture
def silu(tmp_path):
    """Run a silu of one's own through a layout."""

    def through(candidate, layout="BN/full", backward=False, **changes):
        return run(subject(tmp_path, "silu", candidate, **changes), layout, backward)

    return through


# What reaches the operator


@pytest.mark.parametrize(
    ("layout", "grids"),
    [
        ("BN/full", [(1, 11)]),
        ("BN/chunked", [(1, 9), (1, 2)]),
        ("B1/full", [(1, 6), (1, 1), (1, 4)]),
        ("B1/chunked", [(1, 4), (1, 2), (1, 1), (1, 4)]),
        ("BN/permuted", [(1, 11)]),
        ("BN/padded_right", [(3, 7)]),
        ("BN/padded_more", [(3, 20)]),
        ("BN/neighbours", [(1, 11), (1, 11)]),
        ("B2/full", [(1, 7), (1, 4)]),
        ("B1/decode", [(1, 1)] * 11),
        ("BN/decode", [(3, 1), (2, 1), (2, 1), (2, 1), (1, 1), (1, 1)]),
        ("BN/repeated", [(1, 11)]),
    ],
)
def test_the_operator_is_called_as_the_layout_says(silu, layout, grids):
    seen = []
    silu(lambda x: seen.append(tuple(x.shape[:2])) or F.silu(x), layout, layouts=EVERY)
    assert seen == grids


def test_pads_reach_the_operator_as_zero_large_or_nan(silu):
    seen = {}
    for name in ("right", "left", "more", "nan"):
        silu(lambda x, name=name: seen.update({name: x}) or F.silu(x), f"BN/padded_{name}", layouts=EVERY)
    width = 64 * 3
    assert not seen["right"][1, 1:].any() and not seen["left"][1, :-1].any() and seen["right"][:, 0].any()
    assert (seen["more"] == 1000).sum() == (3 * 20 - TOKENS) * width
    assert seen["nan"].isnan().sum() == (3 * 8 - TOKENS) * width


def test_keys_and_values_of_pads_are_nan_and_none_is_seen(tmp_path):
    seen = []

    def attention(query, key, value, segments, *, scale):
        seen.append((query.isnan().sum(), key.isnan().sum(), value.isnan().sum()))
        return canonical.attention(query, key, value, segments, scale=scale)

    found = run(subject(tmp_path, "attention", attention), "BN/padded_nan", backward=True)
    assert all(count > 0 for count in seen[0])
    assert not any(x.isnan().any() for x in (*found.outputs.values(), *found.gradients.values()))


def test_strided_tensors_are_not_contiguous_and_hold_the_same(tmp_path):
    seen = []

    class Copy(Function):
        @staticmethod
        def forward(ctx, x):
            seen.append(x)
            return x.clone(memory_format=torch.contiguous_format)

        @staticmethod
        def backward(ctx, upstream):
            seen.append(upstream)
            return upstream.clone(memory_format=torch.contiguous_format)

    one = subject(tmp_path, "silu", lambda x: Copy.apply(x))
    run(one, "BN/full", backward=True)
    run(one, "BN/strided", backward=True)
    x, dy, strided_x, strided_dy = seen
    assert x.is_contiguous() and not strided_x.is_contiguous() and not strided_dy.is_contiguous()
    assert torch.equal(x, strided_x) and torch.equal(dy, strided_dy)
    assert strided_x.untyped_storage().nbytes() >= 2 * x.untyped_storage().nbytes()


def test_strided_ids_and_heads(tmp_path):
    seen = []
    one = subject(tmp_path, "embedding", lambda ids, weight: seen.append(ids) or F.embedding(ids, weight))
    run(one, "BN/strided")
    query = subject(tmp_path, "attention", lambda *args, scale: seen.append(args[0]) or args[0].clone())
    run(query, "BN/strided")
    assert not any(x.is_contiguous() for x in seen)


def test_changed_neighbours_hold_other_content_and_the_judged_do_not(silu):
    seen = []
    silu(lambda x: seen.append(x[0]) or F.silu(x), "BN/neighbours")
    silu(lambda x: seen.append(x[0]) or F.silu(x), "BN/full")
    first, second, plain = seen
    whole = [slice(0, 6), slice(6, 7), slice(7, 11)]
    for sample, part in enumerate(whole):
        kept, changed = (first, second) if sample % 2 == 0 else (second, first)
        assert torch.equal(kept[part], plain[part]) and not torch.equal(changed[part], plain[part])


@pytest.mark.parametrize("operator", ["silu", "rope", "residual_add", "logprob"])
@pytest.mark.parametrize("layout", ["BN/permuted", "BN/padded_left", "BN/chunked", "B1/decode"])
def test_inputs_are_the_same_in_every_layout(tmp_path, operator, layout):
    def first(*tensors):
        if operator == "logprob":
            return tensors[0].gather(-1, tensors[1].unsqueeze(-1)).squeeze(-1).float()
        return tensors[0] * 1

    one = subject(tmp_path, operator, first, variant="scale 1" if operator == "logprob" else "", layouts=EVERY)
    assert torch.equal(run(one, layout).outputs["out"], run(one, "BN/full").outputs["out"])


# Results by logical identity


@pytest.mark.parametrize("name", EVERY)
def test_results_and_gradients_come_back_in_canonical_order(tmp_path, name):
    one = subject(tmp_path, "silu", lambda x: x * 1, layouts=[name])
    layout = benches.layouts.of(one.tier)[1]
    found = execution.run(one, layout, observe.Seen(), backward=True)
    assert torch.equal(found.outputs["out"], one.tables["x"][:TOKENS])
    assert torch.equal(found.gradients["dx"], one.upstream["out"][:TOKENS])


def test_upstream_gradients_are_the_fill_on_active_tokens_over_the_active_count_of_all(tmp_path):
    upstream = subject(tmp_path, "silu", F.silu, fill="published", layouts=["singletons"]).upstream["out"]
    active = [False] * 2 + [True] * 4 + [True] + [False] + [True] * 3
    assert [bool(row.any()) for row in upstream[:TOKENS]] == active and not upstream[TOKENS:].any()
    whole = 0 + 17 * (ord("t") + ord("0")) + 13 * 2 + 11 * 3
    assert upstream[2, 0] == torch.tensor((whole % 257 - 128) / 1024 / 8).bfloat16()
    assert upstream.dtype == torch.bfloat16 and len(upstream[2].unique()) > 100


def test_what_is_not_written_is_nan(silu):
    def forgetful(x):
        out = torch.empty_like(x)
        out[:, ::2] = x[:, ::2]
        return out

    found = silu(forgetful).outputs["out"]
    assert found[1::2].isnan().all() and not found[0::2].isnan().any()


@pytest.mark.parametrize("make", [torch.Tensor.new_empty, lambda x, shape: torch.empty(shape, dtype=x.dtype)])
def test_a_gradient_that_is_not_written_is_nan(silu, make):
    class Forgetful(Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, upstream):
            return make(upstream, upstream.shape)

    assert silu(Forgetful.apply, backward=True).gradients["dx"].isnan().all()


# What is refused


@pytest.mark.parametrize(
    ("candidate", "message"),
    [
        (lambda x: x.float(), "the result out is torch.float32, torch.bfloat16 is due"),
        (lambda x: x[:, 1:], r"the result out has shape \[1, 10, 192\] for 1 rows of 11 tokens"),
        (lambda x: x.flatten(0, 1), r"the result out has shape \[11, 192\] for 1 rows of 11 tokens"),
        (lambda x: x.tolist(), "the result out is no tensor but a list"),
        (lambda x: None, "the result out is no tensor but a NoneType"),
        (lambda x: x.to("meta"), "the result out lies on meta, the inputs on cpu"),
    ],
)
def test_results_that_do_not_fit(silu, candidate, message):
    with pytest.raises(ValueError, match=message):
        silu(candidate)


def test_a_gradient_of_another_shape(silu):
    class Wrong(Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, upstream):
            return upstream[:, :3]

    with pytest.raises((ValueError, RuntimeError), match="shape"):
        silu(Wrong.apply, backward=True)


def test_a_result_without_a_gradient_is_no_backward_and_no_traceback(silu, tmp_path):
    with pytest.raises(NoBackward, match="an output has no gradient function"):
        silu(lambda x: F.silu(x.detach()), backward=True)
    half = subject(tmp_path, "swiglu", lambda gate, up: F.silu(gate))
    with pytest.raises(NoBackward, match="no gradient reaches up"):
        run(half, "BN/full", backward=True)
    assert silu(lambda x: F.silu(x.detach())).outputs["out"].any()


# Who sums parameter gradients


class _Told(Function):
    """A product whose weight gradient is what `values` says, call by call."""

    values: list[float] = []

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, upstream):
        x, weight = ctx.saved_tensors
        return torch.zeros_like(x), torch.full_like(weight, _Told.values.pop(0))


@pytest.mark.parametrize(
    ("values", "total"),
    [([2.0**25, 1.0, -(2.0**25)], 0.0), ([2.0**25, -(2.0**25), 1.0], 1.0), ([0.5, 1.5, 3.0], 5.0)],
)
def test_without_an_owner_calls_are_added_in_fp32_in_call_order(tmp_path, values, total):
    one = subject(tmp_path, "det_gemm", _Told.apply, variant="k")
    _Told.values = [*values]
    found = run(one, "B1/full", backward=True)
    assert found.gradients["dweight"].dtype == torch.float32 and (found.gradients["dweight"] == total).all()
    assert found.accumulated_by == {"dweight": "autograd"} and not _Told.values


class Owner:
    """Records what it is given; its sum is whatever it likes."""

    def __init__(self, weight, **options):
        self.shape, self.rows = weight.shape, []
        Owner.last = self

    def add(self, x, dy, identity):
        self.rows.append([(run.sample, run.position, run.length, run.row) for run in identity.runs])
        self.x, self.dy = x, dy

    def finish(self):
        return torch.full(self.shape, 42.0)


def owned(tmp_path):
    def det_gemm(x, weight):
        return F.linear(x, weight)

    det_gemm.weight_gradient = Owner
    return subject(tmp_path, "det_gemm", det_gemm, variant="k", layouts=EVERY)


@pytest.mark.parametrize(
    ("layout", "rows"),
    [
        ("BN/full", [[(0, 0, 6, 0), (1, 0, 1, 6), (2, 0, 4, 7)]]),
        ("B1/full", [[(0, 0, 6, 0)], [(1, 0, 1, 0)], [(2, 0, 4, 0)]]),
        ("B1/chunked", [[(0, 0, 4, 0)], [(0, 4, 2, 0)], [(1, 0, 1, 0)], [(2, 0, 4, 0)]]),
        ("BN/permuted", [[(2, 0, 4, 0), (0, 0, 6, 4), (1, 0, 1, 10)]]),
        ("BN/padded_left", [[(0, 0, 6, 1), (1, 0, 1, 13), (2, 0, 4, 17)]]),
        # interleaved: all calls at once, for the owner to put in order
        ("BN/chunked", [[(0, 0, 4, 0), (1, 0, 1, 4), (2, 0, 4, 5), (0, 4, 2, 9)]]),
    ],
)
def test_an_owner_is_handed_the_rows_and_its_sum_is_the_gradient(tmp_path, layout, rows):
    found = run(owned(tmp_path), layout, backward=True)
    assert Owner.last.rows == rows
    assert (found.gradients["dweight"] == 42).all() and found.accumulated_by == {"dweight": "operator"}
    assert len(Owner.last.x) == len(Owner.last.dy)


def test_beside_changed_neighbours_no_owner_is_asked(tmp_path):
    found = run(owned(tmp_path), "BN/neighbours", backward=True)
    assert set(found.gradients) == {"dx"}


def test_a_real_owner_refuses_rows_that_come_late(tmp_path, monkeypatch):
    one = subject(tmp_path, "det_gemm", canonical.det_gemm, variant="k")
    assert isinstance(canonical.det_gemm.weight_gradient(one.weights["weight"]), WeightGradient)
    bits = [run(one, name, backward=True).gradients["dweight"] for name in ("BN/full", "B1/full", "BN/chunked")]
    assert torch.equal(bits[0], bits[1]) and torch.equal(bits[0], bits[2])
    monkeypatch.setattr(execution.Layout, "ordered", True)
    with pytest.raises(Exception, match="has not come"):
        run(one, "BN/chunked", backward=True)


# Attention that runs its backward once a sample


@pytest.mark.parametrize("layout", ["BN/full", "BN/chunked", "B1/full", "BN/padded_left", "BN/permuted", "BN/decode"])
def test_attention_backward_meets_each_sample_once_and_whole(tmp_path, layout):
    forwards, lengths = [], []

    def attention(query, key, value, segments, *, scale):
        assert not torch.is_grad_enabled()  # called for its bits alone
        return canonical.attention(query, key, value, segments, scale=scale)

    def forward(query, key, value, segments, *, scale):
        forwards.append(query.shape[:2])
        return canonical.attention_forward(query, key, value, segments, scale=scale)

    def backward(query, key, value, out, lse, grad_out, segments, *, scale):
        lengths.extend((entry.query_length, entry.key_length) for entry in segments.entries)
        return canonical.attention_backward(query, key, value, out, lse, grad_out, segments, scale=scale)

    attention.forward, attention.backward = forward, backward
    one = subject(tmp_path, "attention", attention, layouts=EVERY)
    found = run(one, layout, backward=True)
    assert len(forwards) == len(benches.layout(layout, one.tier).calls)
    assert sorted(lengths) == [(1, 1), (4, 4), (6, 6)]
    assert torch.equal(found.gradients["dkey"], run(one, "BN/full", backward=True).gradients["dkey"])


def test_a_call_and_its_forward_must_agree(tmp_path):
    def attention(query, key, value, segments, *, scale):
        return canonical.attention(query, key, value, segments, scale=scale) * 1.5

    attention.forward, attention.backward = canonical.attention_forward, canonical.attention_backward
    with pytest.raises(ValueError, match="called and its `forward` differ"):
        run(subject(tmp_path, "attention", attention), "BN/full", backward=True)


def test_without_such_a_backward_keys_get_the_sum_of_their_parts(tmp_path):
    def attention(query, key, value, segments, *, scale):
        return canonical.attention(query, key, value, segments, scale=scale)

    one = subject(tmp_path, "attention", attention, dtype="fp32")
    whole, parts = (run(one, name, backward=True).gradients for name in ("BN/full", "BN/chunked"))
    for name in ("dquery", "dkey", "dvalue"):
        error = (whole[name] - parts[name]).abs().max() / whole[name].abs().max()
        assert error < 8 * torch.finfo(torch.float32).eps, name
    assert not torch.equal(whole["dkey"], parts["dkey"])


# Segments


def test_segments_of_a_chunk_see_the_keys_before_it(tmp_path):
    call = benches.layout("BN/chunked").calls[1]
    made = execution.segments_of(call, torch.device("cpu"))
    assert made.entries == ((0, 0, 2, 0, 6),) and made.positions.tolist() == [[4, 5]]
    padded = execution.segments_of(benches.layout("BN/padded_nan").calls[0], torch.device("cpu"))
    assert padded.entries == ((0, 2, 6, 2, 6), (1, 7, 1, 7, 1), (2, 4, 4, 4, 4))
