"""The whole model trained: the same log-probs and gradients, to the bit, however the samples are laid out."""

from __future__ import annotations

import gc
import weakref
from functools import cache, partial
from pathlib import Path

import pytest
import torch

from rlspec import catalog, workloads
from rlspec.architecture import read
from rlspec.device import canonical as exact
from rlspec.device import chain_model
from rlspec.device.chain_decoder import TrainingDecoder
from rlspec.device.chain_gradients import Ledger
from rlspec.device.chain_model import TrainingPass, logical_weights, reference
from rlspec.device.comparing import identical
from rlspec.device.decoder import Decoder
from rlspec.device.execution import NoBackward
from rlspec.device.operators import Operators
from rlspec.errors import RunError
from rlspec.layouts import Call, Layout, Run

ROOT = Path(__file__).parents[2]
BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
LENGTHS, PROMPTS = (11, 5, 16, 17), (8, 1, 3, 9)  # blocks of 16 positions: not full, full, and one more
TOKENS = [[(37 * i + 11 * j * j + 5) % 90 for j in range(length)] for i, length in enumerate(LENGTHS)]
COMPANY = [(7 * j) % 90 for j in range(6)]  # beside them, as a fifth sample
SAMPLES = [[0], [1], [2], [3]]
OF_EXPERTS = ("mlp.gate.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def tier(**changes):
    samples = [{"id": f"s{i}", "length": n, "prompt": p} for i, (n, p) in enumerate(zip(LENGTHS, PROMPTS, strict=True))]
    one = {"name": "one", "samples": [sample["id"] for sample in samples], "layouts": [], **changes}
    samples += [{"id": "c0", "length": len(COMPANY)}, {"id": "late", "length": 9, "prompt": 4, "queries": 3}]
    data = {"name": "chain", "seed": 3, "fill": "hashed", "pad_token": 0, "operators": [], "samples": samples}
    return workloads.of({**data, "tiers": [one]}).tiers[0]


def call(rows, width=None, left=False, lengths=(*LENGTHS, 6)):
    """Samples by row of a grid, packed where several stand in one."""
    width = width or max(sum(lengths[index] for index in row) for row in rows)
    runs = []
    for number, row in enumerate(rows):
        column = width - sum(lengths[index] for index in row) if left else 0
        for index in row:
            runs.append(Run(index, 0, lengths[index], number, column))
            column += lengths[index]
    return Call(rows=len(rows), width=width, runs=tuple(runs), key_width=width, key_runs=tuple(runs))


def layout(*calls, **changes):
    return Layout(name="made", calls=calls, **changes)


FULL = layout(call(SAMPLES))
SINGLE = layout(*(call([row]) for row in SAMPLES))
MICRO = layout(call([[0]]), call([[1], [2]]), call([[3]]))
PACKED = layout(call([[0, 1, 2, 3]]))
LEFT = layout(call(SAMPLES, 20, left=True))
CELLS = {
    "packed": (PACKED, None),
    "permuted": (layout(call([[2, 0, 3, 1]])), None),
    "two rows, permuted": (layout(call([[3, 1], [2, 0]], 40)), None),
    "padded right": (layout(call(SAMPLES, 20)), None),
    "padded left": (LEFT, None),
    "singletons": (SINGLE, None),
    "micro-batches": (MICRO, None),
    "in chunks of 7": (FULL, 7),
    "in chunks of 1": (FULL, 1),
    "padded left in chunks of 16": (LEFT, 16),
    "permuted in chunks of 5": (layout(call([[2, 0, 3, 1]])), 5),
    "singletons in chunks of 4": (SINGLE, 4),
    "micro-batches in chunks of 10": (MICRO, 10),
}


@cache
def model(name="tiny-dense", dtype=FP32, tied=False, layers=2):
    """Weights spread enough for every part to matter."""
    entry = {**catalog.model(name, ROOT), "tie_word_embeddings": tied, "layers": layers}
    decoder = Decoder(read(entry), Operators("torch"), dtype=dtype, master_dtype=dtype)
    decoder.initialise(3)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) / 8)
            else:
                parameter.mul_(5)
    return decoder


def training(decoder, implementation="canonical", of=TrainingPass, **options):
    return of(decoder, Operators(implementation), tier(), TOKENS, **options)


@cache
def canonical(**options):
    return training(model(**options)).run(FULL)


def differing(got, want):
    return [name for name in want.gradients if not identical(got.gradients[name], want.gradients[name])]


def plainly(decoder, dtype, weights, implementation="reference"):
    """A trainer as one would write it: a call a sample, its share of the loss, backward by autograd, sums in fp32."""
    plain = Decoder(decoder.architecture, Operators(implementation), dtype=dtype, master_dtype=dtype)
    plain.load_state_dict(decoder.state_dict())
    wide = torch.promote_types(dtype, FP32)
    sums = {name: torch.zeros(parameter.shape, dtype=wide) for name, parameter in plain.named_parameters()}
    for row, prompt, shares in zip(TOKENS, PROMPTS, weights, strict=True):
        ids = torch.tensor([row])
        logprobs = plain(ids, targets=ids.roll(-1)).logprobs[0, prompt - 1 : -1]
        loss = -(logprobs * (torch.tensor(shares[prompt:], dtype=FP64) / tier().active).to(wide)).sum()
        for total, found in zip(sums.values(), torch.autograd.grad(loss, list(plain.parameters())), strict=True):
            total += found
    return sums


def distance(got, want):
    return {name: (got[name].double() - want[name].double()).norm() for name in want}


@pytest.fixture(autouse=True)
def one_thread():
    """Many small operators: threads would wait for each other for most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# The promise


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("cell", CELLS)
def test_dense_training_has_the_same_bits_in_every_layout(cell, dtype):
    made, size = CELLS[cell]
    got, want = training(model(dtype=dtype), pad_token=77).run(made, chunk_size=size), canonical(dtype=dtype)
    assert identical(got.logprobs, want.logprobs) and not differing(got, want)
    assert set(got.accumulated_by.values()) == {"operator"}


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
def test_every_parameter_has_a_gradient_that_is_not_nothing(dtype):
    found = canonical(dtype=dtype)
    shapes = model(dtype=dtype).architecture.parameter_shapes()
    assert list(found.gradients) == list(shapes) and len(shapes) == 3 + 2 * 11
    for name, gradient in found.gradients.items():
        assert gradient.dtype == FP32 and tuple(gradient.shape) == shapes[name]
        assert gradient.isfinite().all() and gradient.any()
    assert found.logprobs.dtype == FP32 and found.logprobs.shape == (tier().active,)
    assert all(parameter.grad is None for parameter in model(dtype=dtype).parameters())


@pytest.mark.parametrize("cell", ["permuted", "singletons", "padded left in chunks of 16", "micro-batches"])
def test_tied_weights_are_two_sums_added_once(cell):
    made, size = CELLS[cell]
    options = {"dtype": BF16, "tied": True}
    got, want = training(model(**options)).run(made, chunk_size=size), canonical(**options)
    assert identical(got.logprobs, want.logprobs) and not differing(got, want)
    assert "lm_head.weight" not in got.gradients


@pytest.mark.parametrize("cell", ["permuted", "singletons", "in chunks of 7", "padded left in chunks of 16"])
def test_a_mixture_of_experts_has_the_same_bits(cell):
    made, size = CELLS[cell]
    options = {"name": "tiny-moe", "dtype": BF16}
    got, want = training(model(**options)).run(made, chunk_size=size), canonical(**options)
    assert identical(got.logprobs, want.logprobs) and not differing(got, want)
    assert set(got.accumulated_by) == set(want.gradients) and set(got.accumulated_by.values()) == {"operator"}
    assert len([name for name in want.gradients if name.endswith(OF_EXPERTS)]) == 2 * 3


def test_company_stands_beside_and_is_not_trained_on():
    accompanied = TrainingPass(model(dtype=BF16), Operators("canonical"), tier(company=["c0"]), [*TOKENS, COMPANY]).run(
        layout(call([[4, 0, 1], [2, 3]])), chunk_size=9
    )
    want = canonical(dtype=BF16)
    assert identical(accompanied.logprobs, want.logprobs) and not differing(accompanied, want)


def test_attention_goes_back_once_a_sample_and_layer():
    lengths, tables = [], []

    class Counting(TrainingDecoder):
        def attention_backward(self, at, *saved, segments):
            lengths.append(saved[0].shape[1])
            tables.append(segments)
            return super().attention_backward(at, *saved, segments=segments)

    class Pass(TrainingPass):
        decoder_type = Counting

    for made, size in CELLS.values():
        lengths.clear(), tables.clear()
        training(model(dtype=BF16), of=Pass).run(made, chunk_size=size)
        assert sorted(lengths) == sorted(LENGTHS * 2)
        # The layers share what says where the samples are: on a GPU the host waits for each copy of it.
        assert len({id(one) for one in tables}) == sum(len({run.length for run in call.runs}) for call in made.calls)


# The numbers


@pytest.mark.parametrize("options", [{}, {"tied": True}, {"name": "tiny-moe"}], ids=["dense", "tied", "experts"])
def test_gradients_are_those_of_the_loss(options):
    """Against autograd in fp64, no further off than three times what plain autograd in fp32 is off."""
    decoder = model(**options)
    weights = logical_weights(tier())
    exact, plain = (plainly(decoder, dtype, weights) for dtype in (FP64, FP32))
    allowed = distance(plain, exact)
    cells = {
        "canonical": training(decoder, loss_weights=weights).run(FULL, chunk_size=7),
        "torch": training(decoder, "torch", loss_weights=weights).run(MICRO, chunk_size=7),
        "reference whole": training(decoder, "reference", loss_weights=weights).run(FULL, chunk_size=7),
        "reference": reference(decoder, tier(), TOKENS, PACKED, loss_weights=weights),
    }
    for found in cells.values():
        off = distance(found.gradients, exact)
        assert {name: (off[name], allowed[name]) for name in off if not off[name] <= 3 * allowed[name]} == {}


def test_log_probs_are_those_of_the_active_tokens():
    decoder = model()
    want = []
    for ids, prompt in zip(TOKENS, PROMPTS, strict=True):
        with torch.no_grad():
            scores = decoder(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        want += [scores[position - 1, ids[position]] for position in range(prompt, len(ids))]
    got = reference(decoder, tier(), TOKENS, LEFT).logprobs
    assert ((got.double() - torch.stack(want)).abs() <= 2**-24 * 64 * torch.stack(want).abs()).all()


def test_the_reference_is_fp32_on_the_weights_that_the_model_works_with():
    decoder = Decoder(model().architecture, Operators("torch"), dtype=BF16, master_dtype=FP32)
    decoder.load_state_dict(model().state_dict())
    rounded = Decoder(model().architecture, Operators("reference"), dtype=FP32, master_dtype=FP32)
    rounded.load_state_dict({name: weight.to(BF16).to(FP32) for name, weight in model().state_dict().items()})
    got = reference(decoder, tier(), TOKENS, FULL)
    want = training(rounded, "reference", recompute=True).run(FULL)
    assert identical(got.logprobs, want.logprobs) and not differing(got, want)


def test_operators_that_promise_nothing_are_summed_as_in_a_trainer():
    decoder = model(dtype=BF16)
    got = training(decoder, "torch").run(SINGLE)
    assert set(got.accumulated_by.values()) == {"autograd"}
    want = plainly(decoder, BF16, [[1.0] * length for length in LENGTHS], "torch")
    assert all(identical(got.gradients[name], want[name]) for name in want)


def test_an_operator_alone_may_own_its_sum():
    owned = {"lm_head": "canonical", "embedding": "torch"}
    got = TrainingPass(model(), Operators(owned, default="torch"), tier(), TOKENS).run(FULL)
    assert {name for name, by in got.accumulated_by.items() if by == "operator"} == {"lm_head.weight"}
    tied = TrainingPass(model(tied=True), Operators(owned, default="torch"), tier(), TOKENS).run(FULL)
    assert set(tied.accumulated_by.values()) == {"autograd"}
    close = distance(tied.gradients, canonical(tied=True).gradients)
    assert close["model.embed_tokens.weight"] <= 2**-16 * tied.gradients["model.embed_tokens.weight"].norm()


def test_logical_weights_differ_from_token_to_token_and_reach_the_gradients():
    weights = logical_weights(tier())
    assert [len(row) for row in weights] == list(LENGTHS)
    assert all(0.875 <= one <= 1.125 for row in weights for one in row)
    assert all(one != other for row in weights for one, other in zip(row, row[1:], strict=False))
    weighted = training(model(dtype=BF16), loss_weights=weights)
    want = weighted.run(FULL)
    assert set(differing(want, canonical(dtype=BF16))) == set(want.gradients)
    assert not differing(weighted.run(MICRO, chunk_size=6), want)


# Captured results


def captured(made, size, **options):
    rows, order = {}, []

    def keep(node, runs, tensor):
        assert tensor.grad_fn is None and len(tensor) == sum(run.length for run in runs)
        assert list(runs) == sorted(runs)
        key = node[:3]
        order.append(key)
        for run in runs:
            for step in range(run.length):
                assert rows.setdefault((key, run.sample, run.position + step), tensor[run.row + step]) is not None

    training(model(dtype=BF16, **options)).run(made, chunk_size=size, capture=keep)
    return rows, list(dict.fromkeys(order))


@pytest.mark.parametrize("options", [{}, {"name": "tiny-moe"}], ids=["dense", "experts"])
@pytest.mark.parametrize("cell", ["permuted", "singletons", "padded left in chunks of 16"])
def test_what_is_captured_is_of_logical_tokens(cell, options):
    (want, order), (got, other) = captured(FULL, None, **options), captured(*CELLS[cell], **options)
    assert order == other and (0, "self_attn", "attention") in order
    assert set(got) == set(want) and len(want) == len(order) * sum(LENGTHS)
    last = {(sample, length - 1) for sample, length in enumerate(LENGTHS)}
    for (node, sample, position), row in want.items():
        predicts = node[1] != "logprob" or (sample, position) not in last
        assert identical(got[node, sample, position], row) or not predicts


# Faults


class Dropping(Ledger):
    """Forgets what it is handed of one weight, in the calls that are named."""

    name, calls = "model.layers.1.mlp.up_proj.weight", ()

    def begin(self, chunks):
        self.number = getattr(self, "number", -1) + 1
        super().begin(chunks)

    def hand(self, use, *others, **more):
        if use.name != self.name or self.number not in self.calls:
            super().hand(use, *others, **more)


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ((0, 1, 2, 3), "no gradient of model.layers.1.mlp.up_proj.weight ever came"),
        ((3,), r"model.layers.1.mlp.up_proj.weight: sample 3, position 0 never came"),
        ((1,), r"model.layers.1.mlp.up_proj.weight: sample 1, position 0 has not come"),
    ],
)
def test_a_weight_that_is_not_handed_over_is_noticed(monkeypatch, calls, message):
    monkeypatch.setattr(chain_model, "Ledger", type("Fault", (Dropping,), {"calls": calls}))
    with pytest.raises(RunError, match=message):
        training(model()).run(SINGLE)


def test_half_of_a_tied_table_that_is_not_handed_over_is_noticed(monkeypatch):
    fault = type("Fault", (Dropping,), {"name": "lm_head.weight", "calls": (3,)})
    monkeypatch.setattr(chain_model, "Ledger", fault)
    with pytest.raises(RunError, match="lm_head.weight: sample 3, position 0 never came"):
        training(model(tied=True)).run(SINGLE)


def test_a_chunk_that_never_comes_is_noticed(monkeypatch):
    class Fault(Ledger):
        def hand(self, use, make, chunk, *rows):
            if (use.name, chunk) != ("model.norm.weight", 1):
                super().hand(use, make, chunk, *rows)

    monkeypatch.setattr(chain_model, "Ledger", Fault)
    with pytest.raises(RunError, match="model.norm.weight: chunk 1 of the call never came"):
        training(model()).run(FULL, chunk_size=6)


def test_chunks_handed_over_as_they_come_are_out_of_order(monkeypatch):
    class Fault(Ledger):
        def begin(self, chunks):
            self.parts = chunks

        def hand(self, use, make, chunk, x, dy):
            super().begin(self.parts[chunk : chunk + 1])
            super().hand(use, make, 0, x, dy)

    monkeypatch.setattr(chain_model, "Ledger", Fault)
    with pytest.raises(RunError, match="lm_head.weight: sample 0, position 0 has not come"):
        training(model()).run(FULL, chunk_size=7)


@pytest.mark.parametrize("order", [(1, 0, 2, 3), (0, 1, 3, 2)])
def test_calls_out_of_order_are_refused(order):
    with pytest.raises(
        RunError, match="lm_head.weight: sample . position 0 has not come, and sample".replace(" . ", " .*")
    ):
        training(model()).run(layout(*(call([[index]]) for index in order)))


def test_a_mean_over_the_active_tokens_of_a_call_differs():
    class Local(TrainingPass):
        def denominator(self, call):
            return sum(run.length - PROMPTS[run.sample] for run in call.runs)

    wrong = training(model(dtype=BF16), of=Local)
    assert not differing(wrong.run(FULL), canonical(dtype=BF16))
    found = wrong.run(MICRO)
    assert identical(found.logprobs, canonical(dtype=BF16).logprobs)
    assert set(differing(found, canonical(dtype=BF16))) == set(found.gradients)


def test_an_attention_that_goes_back_chunk_by_chunk_differs():
    class ChunkByChunk(TrainingDecoder):
        def attend(self, sites, parts, cache):
            return Decoder.attend(self, sites, parts, cache)

    class Pass(TrainingPass):
        decoder_type = ChunkByChunk

    wrong = training(model(dtype=BF16), of=Pass)
    assert not differing(wrong.run(FULL), canonical(dtype=BF16))
    found = wrong.run(FULL, chunk_size=7)
    assert identical(found.logprobs, canonical(dtype=BF16).logprobs)
    assert "model.layers.0.self_attn.k_proj.weight" in differing(found, canonical(dtype=BF16))


def test_another_token_changes_the_gradients():
    other = [list(ids) for ids in TOKENS]
    other[1][-1] += 1
    found = TrainingPass(model(), Operators("canonical"), tier(), other).run(FULL)
    assert set(differing(found, canonical())) == set(found.gradients)


# Memory


@pytest.mark.parametrize("options", [{"implementation": "canonical"}, {"implementation": "torch"}, {"recompute": True}])
def test_no_earlier_graph_is_alive(options):
    """Without the cycle collector: the graph of a call goes when the call ends."""
    alive, before = [], []

    class Watched(TrainingDecoder):
        def begin(self, *arguments):
            before.append(sum(one() is not None for one in alive))
            super().begin(*arguments)

        def operate(self, at, name, operator, *arguments, **kept):
            out = super().operate(at, name, operator, *arguments, **kept)
            alive.append(weakref.ref(out))
            return out

    class Pass(TrainingPass):
        decoder_type = Watched

    gc.collect()
    gc.disable()
    try:
        kept = {"implementation": "reference", **options}
        training(model(), of=Pass, **kept).run(SINGLE, chunk_size=6)
    finally:
        gc.enable()
    assert before == [0, 0, 0, 0] and len(alive) > 4 * 2 * 14


@pytest.mark.parametrize("name", ["tiny-dense", "tiny-moe"])
def test_what_is_recomputed_is_not_kept(name):
    """The graph of the reference holds weights as they are stored, and of activations what operators are given."""
    sizes, weights, alive = {}, [], {}

    class Watched(TrainingDecoder):
        def weight(self, name):
            made = super().weight(name)
            weights.append(weakref.ref(made.untyped_storage()))
            return made

        def forward(self, *arguments, **options):
            def pack(x):
                sizes[self.recompute, x.data_ptr()] = x.nbytes
                return x

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
                out = super().forward(*arguments, **options)
            alive[self.recompute] = sum(storage() is not None for storage in weights)
            return out

    class Pass(TrainingPass):
        decoder_type = Watched

    for again in (False, True):
        weights.clear()
        training(model(name, BF16), "reference", of=Pass, dtype=FP32, recompute=again).run(FULL)
    assert alive[False] > 0 and alive[True] == 0
    kept = {again: sum(size for (kind, _), size in sizes.items() if kind == again) for again in alive}
    assert kept[True] < kept[False]


def test_an_activation_goes_as_soon_as_its_rows_are_handed_over():
    """Of the rows of a layer that has gone back, nothing is kept until the call ends."""
    norms, seen = {}, {}

    class Watched(TrainingDecoder):
        def operate(self, at, name, operator, *arguments, **kept):
            out = super().operate(at, name, operator, *arguments, **kept)
            if name == "mlp.act":
                norms[at.layer] = weakref.ref(out.untyped_storage())
            return out

        def attention_backward(self, at, *saved, segments):
            seen[at.layer] = [layer for layer, storage in norms.items() if storage() is not None]
            return super().attention_backward(at, *saved, segments=segments)

    class Pass(TrainingPass):
        decoder_type = Watched

    training(model(layers=4), of=Pass).run(PACKED)
    assert seen == {3: [0, 1, 2], 2: [0, 1], 1: [0], 0: []}


def test_a_gradient_of_autograd_goes_as_soon_as_it_is_added(monkeypatch):
    kept = []

    class Watched(Ledger):
        def take(self, use, leaf):
            super().take(use, leaf)
            kept.append(leaf.grad)

    monkeypatch.setattr(chain_model, "Ledger", Watched)
    found = training(model(), "torch").run(FULL)
    assert kept == [None] * len(found.gradients)


# Bad input


def shortened(ids):
    return [ids[0][:-1], *ids[1:]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": TOKENS[:3]}, "3 rows of tokens for 4 samples"),
        ({"tokens": shortened(TOKENS)}, "sample s0: 10 token ids for 11 positions"),
        ({"tokens": [[257, *TOKENS[0][1:]], *TOKENS[1:]]}, "sample s0: a token id is not below the vocabulary, 257"),
        ({"pad_token": 257}, "pad_token 257 is not below the vocabulary, 257"),
        ({"loss_weights": [[1.0]] * 4}, "one number for each position"),
        ({"loss_weights": [[float("nan")] * length for length in LENGTHS]}, "must be finite"),
        ({"tier": partial(tier, samples=["c0"]), "tokens": [COMPANY]}, "sample c0: training needs a prompt"),
        ({"tier": partial(tier, samples=["late"]), "tokens": [[1] * 9]}, "sample late: .* queries of all positions"),
    ],
)
def test_samples_that_do_not_fit_are_refused(changes, message):
    whole = {"tier": tier, "tokens": TOKENS, **changes}
    made, tokens = whole.pop("tier")(), whole.pop("tokens")
    with pytest.raises(ValueError, match=message):
        TrainingPass(model(), Operators("canonical"), made, tokens, **whole)


def halves():
    whole = call([[3]]).runs[0]
    first, second = whole._replace(length=8), whole._replace(position=8, length=9, column=8)
    calls = [call([[0], [1], [2]]), Call(rows=1, width=17, runs=(first, second), key_width=17, key_runs=(whole,))]
    return layout(*calls)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (halves(), "is a part of its sample; training takes whole samples"),
        (layout(call([[0], [1], [2]])), "sample 3 position 0 is missing"),
        (layout(call(SAMPLES), call([[0]])), "sample 0 position 0 stands twice"),
        (layout(call(SAMPLES), pads="nan"), "are of tensors, not tokens"),
        (layout(call(SAMPLES), how="strided"), "are of tensors, not tokens"),
    ],
)
def test_layouts_that_training_cannot_take_are_refused(made, message):
    with pytest.raises(ValueError, match=message):
        training(model()).run(made)


def test_chunks_of_nothing_are_refused():
    with pytest.raises(ValueError, match="chunk_size 0 must be at least 1"):
        training(model()).run(FULL, chunk_size=0)


@pytest.mark.parametrize("operator", ["det_gemm", "logprob"])
def test_an_operator_that_passes_no_gradient_on_is_named(operator):
    operators = Operators("canonical")
    whole = getattr(operators, operator)

    def cut_off(*arguments):
        return whole(*arguments).detach()

    if operator == "det_gemm":
        cut_off.weight_gradient = whole.weight_gradient
    setattr(operators, operator, cut_off)
    with pytest.raises(NoBackward, match=r"q_proj.weight: no gradient|logprob \(logprob\): no gradient"):
        TrainingPass(model(), operators, tier(), TOKENS).run(FULL)


def wide_gate(gate, up):
    return exact.swiglu(gate, up).double()


def narrow_gate(gate, up):
    return exact.swiglu(gate, up)[..., :-1]


def still_rope(x, cos, sin):
    return exact.rope(x.detach(), cos, sin)


def still_attention(query, key, value, segments, *, scale):
    return exact.attention(query.detach(), key.detach(), value.detach(), segments, scale=scale)


def no_rope(x, cos, sin):
    raise RuntimeError("no angle today")


@pytest.mark.parametrize(
    ("operator", "given", "error", "reason"),
    [
        ("swiglu", "wide_gate", ValueError, r"layer 0, mlp.act \(swiglu\): the result is in float64, float32 is due"),
        ("swiglu", "narrow_gate", ValueError, r"layer 0, mlp.act \(swiglu\): the result has shape \[.*\] is due"),
        ("rope", "no_rope", RuntimeError, r"layer 0, self_attn.q_rope \(rope\): no angle today"),
        ("rope", "still_rope", NoBackward, r"layer 0, self_attn.q_rope \(rope\): no gradient flows through it"),
        ("attention", "still_attention", NoBackward, r"layer 0, self_attn \(attention\): no gradient flows through it"),
    ],
)
def test_an_operator_of_ones_own_is_blamed_itself_and_not_the_next(operator, given, error, reason):
    with pytest.raises(error, match=reason):
        TrainingPass(model(), Operators({operator: f"{__name__}:{given}"}), tier(), TOKENS).run(FULL)
