"""The decoder against transformers, and against itself over layouts, chunks and a cache."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rlspec import catalog
from rlspec.architecture import Unimplemented, read
from rlspec.device.decoder import Decoder, Span, side_by_side
from rlspec.device.operators import Operators, Segment, Segments

IMPLEMENTATIONS = ("reference", "torch")
MODELS = Path(__file__).parents[2] / "specs/models"
DENSE = {
    "model_type": "qwen3",
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}
SPARSE = {
    **DENSE,
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
}
CONFIGS = {"dense": DENSE, "sparse": SPARSE}
QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_30B_A3B = {
    **QWEN3_8B,
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}


def build(config, implementation="torch", dtype=torch.float64, master=None, **options):
    """A decoder whose weights are spread enough for every part to matter; fp64 unless a rounding is the matter."""
    decoder = Decoder(read(config), Operators(implementation), dtype=dtype, master_dtype=master or dtype, **options)
    decoder.initialise(3)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) / 8)
            else:
                parameter.mul_(5)
    return decoder


def ids(*shape, seed=0):
    return torch.randint(0, DENSE["vocab_size"], shape, generator=torch.Generator().manual_seed(seed))


def close(got, want):
    """Both fp64 and a few products deep: 1e-11 is far above their rounding and far below any change of meaning."""
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)
    return True


# transformers


@pytest.fixture
def theirs(tmp_path):
    """Makes (a transformers model with the weights of `build`, the path of its config.json)."""
    transformers = pytest.importorskip("transformers")

    def make(kind, dtype=torch.float32):
        known = {"dense": ("Qwen3Config", "Qwen3ForCausalLM"), "sparse": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM")}
        config_class, model_class = (getattr(transformers, name) for name in known[kind])
        options = {key: value for key, value in CONFIGS[kind].items() if key not in ("model_type", "rope_theta")}
        rope = {"rope_type": "default", "rope_theta": DENSE["rope_theta"]}
        config = config_class(**options, rope_parameters=rope, attn_implementation="sdpa", dtype=dtype)
        if kind == "sparse":
            config._experts_implementation = "eager"
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        assert type(model) is model_class
        ours = build(CONFIGS[kind], dtype=dtype)
        model.load_state_dict(ours.state_dict(), strict=True)
        config.save_pretrained(tmp_path)
        return model, tmp_path / "config.json"

    return make


@pytest.mark.parametrize("profile", ["ws1", "hf"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", CONFIGS)
def test_fp32_logits_are_those_of_transformers(theirs, kind, implementation, profile):
    model, config = theirs(kind)
    ours = Decoder(read(config), Operators(implementation), dtype=torch.float32, profile=profile)
    ours.load_state_dict(model.state_dict())
    tokens = ids(3, 40)
    with torch.no_grad():
        want = model(tokens).logits
        got = ours(tokens).logits
    assert got.dtype == torch.float32
    assert (got - want).abs().max() <= 2e-5 * want.square().mean().sqrt()


@pytest.mark.parametrize("kind", CONFIGS)
def test_profile_hf_rounds_where_transformers_does(theirs, kind):
    """To the bit in bf16, since the operators of `torch` are the calls that transformers makes."""
    model, config = theirs(kind, torch.bfloat16)
    tokens = ids(3, 40)
    with torch.no_grad():
        want = model(tokens).logits
        results = {}
        for profile in ("hf", "ws1"):
            ours = Decoder(read(config), Operators("torch"), dtype=torch.bfloat16, profile=profile)
            ours.load_state_dict(model.state_dict())
            results[profile] = ours(tokens).logits
    assert torch.equal(results["hf"], want)
    assert results["ws1"].dtype == torch.float32
    assert not torch.equal(results["ws1"].bfloat16(), want)


@pytest.mark.parametrize("kind", CONFIGS)
def test_gradients_are_those_of_transformers(theirs, kind):
    model, config = theirs(kind)
    ours = Decoder(read(config), Operators("torch"), dtype=torch.float32)
    ours.load_state_dict(model.state_dict())
    tokens = ids(2, 24)
    model(tokens, labels=tokens).loss.backward()
    logprobs = ours(tokens[:, :-1], targets=tokens[:, 1:]).logprobs
    (-logprobs.mean()).backward()
    want = dict(model.named_parameters())
    for name, parameter in ours.named_parameters():
        size = want[name].grad.square().mean().sqrt()
        # The one row more that transformers computes changes fp32 sums: the limit of the logits holds here too.
        assert (parameter.grad - want[name].grad).abs().max() <= 2e-5 * size, name


def test_router_statistics_give_the_load_balance_loss_of_transformers(theirs):
    module = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
    model, config = theirs("sparse")
    ours = Decoder(read(config), Operators("torch"), dtype=torch.float32)
    ours.load_state_dict(model.state_dict())
    tokens = ids(3, 20)
    router = ours(tokens).router
    with torch.no_grad():
        theirs_logits = model(tokens, output_router_logits=True).router_logits
    want = module.load_balancing_loss_func(theirs_logits, 8, 2)
    rows = router.counts.shape[0] * sum(router.tokens)
    got = 8 * (router.counts.sum((0, 1)) / rows * router.probability_sums.sum((0, 1)) / rows).sum()
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)


# Roundings and gradients


@pytest.mark.parametrize("profile", ["ws1", "hf"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", CONFIGS)
def test_bf16_gradients_reach_every_parameter(kind, implementation, profile):
    decoder = build(CONFIGS[kind], implementation, torch.bfloat16, torch.float32, profile=profile)
    tokens = ids(2, 33)
    out = decoder(tokens[:, :-1], targets=tokens[:, 1:])
    loss = -out.logprobs.mean()
    if out.router is not None:
        loss = loss + 0.01 * (out.router.counts * out.router.probability_sums).mean()
    loss.backward()
    assert out.logprobs.dtype == torch.float32 and out.logits is None
    for name, parameter in decoder.named_parameters():
        assert parameter.grad.dtype == torch.float32, name
        assert parameter.grad.isfinite().all() and parameter.grad.abs().sum() > 0, name


def test_ws1_keeps_stream_scores_and_logits_in_fp32():
    seen = {}
    decoder = build(SPARSE, dtype=torch.bfloat16, master=torch.bfloat16)
    decoder(ids(1, 5), capture=lambda node, tensor: seen.setdefault(node.name, tensor.dtype))
    wide = {name for name, dtype in seen.items() if dtype == torch.float32}
    assert wide == {"self_attn.residual", "mlp.residual", "mlp.gate", "lm_head"}
    assert {dtype for name, dtype in seen.items() if name not in wide} == {torch.bfloat16, torch.int64}


def test_hf_keeps_all_but_router_scores_in_bf16():
    seen = {}
    decoder = build(SPARSE, dtype=torch.bfloat16, master=torch.bfloat16, profile="hf")
    decoder(ids(1, 5), capture=lambda node, tensor: seen.setdefault(node.name, tensor.dtype))
    assert {name for name, dtype in seen.items() if dtype == torch.float32} == {"mlp.gate"}


@pytest.mark.parametrize(("profile", "kept"), [("ws1", torch.float32), ("hf", torch.bfloat16)])
def test_profiles_ask_the_operators_for_their_roundings(profile, kept):
    asked = {}

    class Watched(Decoder):
        def operate(self, at, name, operator, *arguments, **options):
            asked.setdefault(operator, (arguments, options))
            return super().operate(at, name, operator, *arguments, **options)

    decoder = Watched(read(SPARSE), Operators("reference"), dtype=torch.bfloat16, profile=profile)
    decoder.initialise(1)
    decoder(ids(1, 5))
    for norm in ("rms_norm", "qk_norm"):
        assert asked[norm][0][0].dtype == torch.bfloat16
        assert asked[norm][1]["round_before_weight"] is (profile == "hf")
    assert [table.dtype for table in asked["rope"][0][1:]] == [kept, kept]
    assert asked["router"][1]["logits_dtype"] == kept
    assert asked["combine"][0][1].dtype == kept
    assert asked["lm_head"][1]["out_dtype"] == kept
    assert asked["residual_add"][0][0].dtype == kept
    assert ("swiglu" in asked, "silu" in asked) == (profile == "ws1", profile == "hf")


# Layouts


LENGTHS = (11, 16, 13, 19)
WHERE = {
    "packed": ([Span(0, 0, 11), Span(0, 11, 16), Span(0, 27, 13), Span(0, 40, 19)], 1, 59),
    "padded right": ([Span(row, 0, length) for row, length in enumerate(LENGTHS)], 4, 20),
    "padded left": ([Span(row, 20 - length, length) for row, length in enumerate(LENGTHS)], 4, 20),
    "permuted": ([Span(row, 0, length) for row, length in zip((2, 0, 3, 1), LENGTHS, strict=True)], 4, 19),
}


def lay(samples, spans, rows, width, pad):
    grid = torch.full((rows, width), pad)
    for sample, (row, start, length) in zip(samples, spans, strict=True):
        grid[row, start : start + length] = sample
    return grid


@pytest.mark.parametrize("chunk_size", [None, 7])
@pytest.mark.parametrize("layout", WHERE)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", CONFIGS)
def test_layouts_and_chunks_give_what_single_samples_give(kind, implementation, layout, chunk_size):
    """Log-probs, gradients and router statistics. Not to the bit: a CPU's products depend on their number of rows."""
    decoder = build(CONFIGS[kind], implementation)
    samples = [ids(length, seed=length) for length in LENGTHS]
    spans, rows, width = WHERE[layout]
    want, statistics = [], []
    for sample in samples:
        alone = decoder(sample[None], targets=sample.flip(0)[None])
        want.append(alone.logprobs[0])
        statistics.append(alone.router)
    wanted = torch.autograd.grad(torch.cat(want).sum(), list(decoder.parameters()))
    grid = lay(samples, spans, rows, width, pad=60)
    targets = lay([sample.flip(0) for sample in samples], spans, rows, width, pad=0)
    out = decoder(grid, targets=targets, spans=spans, chunk_size=chunk_size)
    got = [out.logprobs[row, start : start + length] for row, start, length in spans]
    for here, there in zip(got, want, strict=True):
        assert close(here, there)
    for here, there in zip(torch.autograd.grad(torch.cat(got).sum(), list(decoder.parameters())), wanted, strict=True):
        assert close(here, there)
    if kind == "sparse":
        assert torch.equal(out.router.counts, torch.cat([each.counts for each in statistics], 1))
        assert close(out.router.probability_sums, torch.cat([each.probability_sums for each in statistics], 1))
        assert out.router.tokens == LENGTHS


def test_neighbours_in_a_packed_row_do_not_see_each_other():
    decoder = build(DENSE)
    spans = [Span(0, 0, 6), Span(0, 6, 4)]
    tokens, other = ids(1, 10), ids(1, 10, seed=1)
    mixed = torch.cat((other[:, :6], tokens[:, 6:]), 1)
    first, second = (decoder(each, spans=spans).logits for each in (tokens, mixed))
    assert torch.equal(first[0, 6:], second[0, 6:])
    assert not torch.equal(decoder(tokens).logits[0, 6:], decoder(mixed).logits[0, 6:])


class Growing:
    """A cache by concatenation: the least that keeps the protocol, one sample a row."""

    def __init__(self):
        self.kept = {}
        self.length = 0

    def begin(self, spans, width):
        self.length += width
        entries = tuple(Segment(row, start, length, 0, self.length) for row, start, length in spans)
        return Segments(entries, len(spans), width, self.length, torch.device("cpu"))

    def extend(self, layer, keys, values):
        before = self.kept.get(layer)
        if before is not None:
            keys, values = (torch.cat(pair, 1) for pair in zip(before, (keys, values), strict=True))
        self.kept[layer] = (keys, values)
        return keys, values


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", CONFIGS)
def test_prefill_and_decode_through_a_cache_give_the_whole(kind, implementation):
    decoder, tokens, cache = build(CONFIGS[kind], implementation), ids(2, 12), Growing()
    with torch.no_grad():
        want = decoder(tokens).logits
        pieces = [tokens[:, :4], tokens[:, 4:7], *tokens[:, 7:].split(1, 1)]
        got = torch.cat([decoder(piece, cache=cache).logits for piece in pieces], 1)
    assert close(got, want)


def test_positions_can_be_given():
    decoder, tokens = build(DENSE), ids(1, 8)
    counted = torch.arange(8)[None]
    assert torch.equal(decoder(tokens, positions=counted).logits, decoder(tokens).logits)
    # Rotary positions are relative, so only unequal steps show.
    assert not torch.allclose(decoder(tokens, positions=2 * counted).logits, decoder(tokens).logits)


# Routing


def test_force_balanced_routing_loads_all_experts_alike():
    decoder = build(SPARSE)
    tokens = ids(4, 16)
    router = decoder(tokens, force_balanced=True).router
    assert (router.counts == 16 * 2 // 8).all()
    assert not (decoder(tokens).router.counts == 4).all()
    share = router.counts.sum(1) / router.counts.sum((1, 2))[:, None]
    loss = 8 * (share * router.probability_sums.sum(1) / sum(router.tokens)).sum(-1)
    assert close(loss, torch.ones(3, dtype=torch.float64))
    chosen = {}
    decoder(tokens, force_balanced=True, capture=lambda node, tensor: chosen.setdefault(node.name, tensor))
    experts = chosen["mlp.gate.choice"]
    assert experts[0, :5].tolist() == [[0, 4], [1, 5], [2, 6], [3, 7], [4, 0]]
    assert experts[1, 1].tolist() == [17 % 8, (17 + 4) % 8]


def test_force_balanced_routing_does_not_depend_on_chunks():
    decoder, tokens = build(SPARSE), ids(2, 16)
    whole, cut = (decoder(tokens, force_balanced=True, chunk_size=size) for size in (None, 5))
    assert torch.equal(whole.router.counts, cut.router.counts)
    assert close(cut.logits, whole.logits)


# Capture and the door


def test_capture_sees_every_operator_in_order_and_by_token():
    decoder, tokens = build(SPARSE, "reference"), ids(2, 10)
    seen, pieces = [], {}
    out = decoder(tokens, targets=tokens, capture=lambda node, tensor: seen.append((node, tensor)))
    order = [node.name for node, _ in seen if node.layer == 1]
    assert order == [
        "input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.q_norm",
        "self_attn.q_rope", "self_attn.k_norm", "self_attn.k_rope", "self_attn", "self_attn.o_proj",
        "self_attn.residual", "post_attention_layernorm", "mlp.gate", "mlp.gate.choice", "mlp.experts.gate_up_proj",
        "mlp.experts.act", "mlp.experts.down_proj", "mlp.experts", "mlp.residual",
    ]  # fmt: skip
    assert [node.name for node, _ in seen if node.layer is None] == [
        "model.embed_tokens", "model.norm", "lm_head", "logprob",
    ]  # fmt: skip
    assert all(tensor.shape[:2] == (2, 10) for _, tensor in seen)
    assert torch.equal(seen[-1][1], out.logprobs)

    decoder(tokens, targets=tokens, chunk_size=4, capture=lambda node, x: pieces.setdefault(node[:3], []).append(x))
    for node, tensor in seen:
        assert close(torch.cat(pieces[node[:3]], 1), tensor)


def test_dense_capture_names_the_activation():
    seen = []
    build(DENSE)(ids(1, 3), capture=lambda node, _: seen.append((node.name, node.operator)))
    assert ("mlp.act", "swiglu") in seen and ("mlp.down_proj", "det_gemm") in seen


def test_a_fault_can_be_planted_at_one_site():
    class Faulty(Decoder):
        def operate(self, at, name, operator, *arguments, **options):
            if at.layer == 1 and name == "post_attention_layernorm":
                options["eps"] = 0.1
            return super().operate(at, name, operator, *arguments, **options)

    right = build(DENSE)
    wrong = Faulty(read(DENSE), Operators("torch"), dtype=torch.float64, master_dtype=torch.float64)
    wrong.load_state_dict(right.state_dict())
    captured = [[], []]
    for decoder, seen in zip((right, wrong), captured, strict=True):
        decoder(ids(1, 6), capture=lambda node, tensor, seen=seen: seen.append((node, tensor)))
    first = next(a[0] for a, b in zip(*captured, strict=True) if not torch.equal(a[1], b[1]))
    assert (first.layer, first.operator, first.name) == (1, "rms_norm", "post_attention_layernorm")


# Construction


def test_qwen3_8b_has_399_trainable_tensors():
    decoder = Decoder(read(QWEN3_8B), Operators("torch"), device="meta", master_dtype=torch.bfloat16)
    names = [name for name, _ in decoder.named_parameters()]
    assert len(names) == 399
    assert names == list(read(QWEN3_8B).parameter_shapes())
    assert sum(parameter.numel() for parameter in decoder.parameters()) * 2 == 16381470720
    assert names[0] == "model.embed_tokens.weight" and names[-2:] == ["model.norm.weight", "lm_head.weight"]


def test_qwen3_30b_a3b_has_its_size():
    shapes = read(QWEN3_30B_A3B).parameter_shapes()
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == 30_532_122_624
    assert shapes["model.layers.47.mlp.experts.gate_up_proj"] == (128, 1536, 2048)


def test_tied_weights_are_one_tensor():
    decoder = build({**DENSE, "tie_word_embeddings": True})
    assert "lm_head.weight" not in dict(decoder.named_parameters())
    decoder(ids(1, 4)).logits.sum().backward()
    assert decoder.get_parameter("model.embed_tokens.weight").grad.abs().sum(1).count_nonzero() == DENSE["vocab_size"]


def test_initialisation():
    architecture = read({**SPARSE, "vocab_size": 997})
    before = torch.get_rng_state()
    one, same, other = (Decoder(architecture, Operators()) for _ in range(3))
    for decoder, seed in ((one, 7), (same, 7), (other, 8)):
        decoder.initialise(seed)
    assert torch.equal(torch.get_rng_state(), before)
    spread = {name: parameter.detach().std().item() for name, parameter in one.named_parameters()}
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, same.get_parameter(name))
        if parameter.dim() == 1:
            assert (parameter == 1).all()
        else:
            assert not torch.equal(parameter, other.get_parameter(name))
    # Within 2 %: the deviation of a sample of 30,000 and more strays by under 0.5 %.
    assert spread["model.embed_tokens.weight"] == pytest.approx(0.02, rel=0.02)
    assert spread["lm_head.weight"] == pytest.approx(0.02, rel=0.02)
    small = [value for name, value in spread.items() if "o_proj" in name or "experts.down_proj" in name]
    assert len(small) == 6
    assert all(value == pytest.approx(0.02 / 6**0.5, rel=0.1) for value in small)


def test_masters_of_another_dtype_hold_the_same_values_rounded():
    wide, narrow = (Decoder(read(DENSE), Operators(), master_dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    wide.initialise(1)
    narrow.initialise(1)
    for name, parameter in narrow.named_parameters():
        assert torch.equal(parameter, wide.get_parameter(name).bfloat16())


# Refusals


REFUSED = {
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
    "rope_parameters": {"rope_type": "llama3", "rope_theta": 1e6, "factor": 8.0},
    "sliding_window": 128,
    "use_sliding_window": True,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "attention_bias": True,
    "attention_dropout": 0.1,
    "hidden_act": "gelu",
    "qk_norm": False,
    "mlp_only_layers": [0],
    "decoder_sparse_step": 2,
    "model_type": "llama",
    "shared_expert_intermediate_size": 512,
    "quantization_config": {"bits": 4},
    "norm_after_attention": True,
    "pretraining_tp": 2,
}


@pytest.mark.parametrize("key", REFUSED)
def test_keys_that_are_not_implemented_are_refused_by_name(key):
    with pytest.raises(Unimplemented, match=rf"\b{key}\b") as caught:
        read({**DENSE, key: REFUSED[key]})
    assert str(caught.value).startswith("the decoder cannot build this model: ")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope_scaling", {"rope_type": "default"}),
        ("quantization_config", None),
        ("unsloth_version", "2026.1"),
        ("_attn_implementation_autoset", True),
        ("id2label", {"0": "LABEL_0"}),
        ("pretraining_tp", 1),
    ],
)
def test_keys_that_ask_for_nothing_change_nothing(key, value):
    assert read({**DENSE, key: value}) == read(DENSE)


def test_all_problems_are_named_at_once():
    bad = {**DENSE, "rope_scaling": {"factor": 2}, "head_dim": "8", "mystery": 1}
    del bad["rms_norm_eps"]
    with pytest.raises(ValueError) as caught:
        read(bad)
    assert str(caught.value) == (
        'the decoder cannot build this model: rope_scaling {"factor": 2} is not implemented, only null;'
        " key mystery is not implemented; rms_norm_eps is missing; head_dim is '8', not int"
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**DENSE, "num_key_value_heads": 3}, "num_key_value_heads 3 must divide num_attention_heads 4"),
        ({**DENSE, "head_dim": 7}, "head_dim 7 must be even"),
        ({**DENSE, "num_hidden_layers": 0}, "num_hidden_layers must be at least 1"),
        ({**SPARSE, "num_experts_per_tok": 9}, "num_experts_per_tok 9 must be 1 to num_experts 8"),
        ({**SPARSE, "norm_topk_prob": None}, "norm_topk_prob is missing"),
        ({**DENSE, "tie_word_embeddings": "no"}, "tie_word_embeddings is 'no', not bool"),
        ({"name": "mystery-model"}, "model_type is missing; vocab_size is missing"),
        ({**DENSE, "num_hidden_layers": 10**30}, "num_hidden_layers 1(0+) is outside 0 to 1024"),
        ({**DENSE, "vocab_size": 1}, "vocab_size must be at least 2"),
        ({**DENSE, "rms_norm_eps": float("inf")}, "rms_norm_eps is inf, not float"),
        ({**DENSE, "rope_theta": 10**400}, "rope_theta is 10+, not float"),
        ({**DENSE, "layer_types": ["full_attention"]}, "layer_types has 1 entries, num_hidden_layers is 3"),
        ({**DENSE, "layer_types": 5}, "layer_types 5 is not implemented"),
        ({**DENSE, "num_experts": 8}, "num_experts 8 contradicts model_type qwen3"),
        ({**DENSE, "layers": 2}, "layers 2 contradicts num_hidden_layers 3"),
        ({**SPARSE, "num_local_experts": 4}, "num_local_experts 4 contradicts num_experts 8"),
        (
            {**DENSE, "rope_parameters": {"rope_type": "default", "rope_theta": 5.0}},
            "rope_parameters.rope_theta 5.0 contradicts rope_theta 10000.0",
        ),
    ],
)
def test_impossible_sizes_are_refused(config, message):
    with pytest.raises(ValueError, match=message) as refused:
        read(config)
    assert isinstance(refused.value, Unimplemented) is ("is not implemented" in message)


def test_an_angle_that_is_not_implemented_still_has_its_theta():
    """Newer transformers hold rope_theta there and nowhere else."""
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}
    with pytest.raises(ValueError, match="is not implemented") as refused:
        read({**{key: value for key, value in DENSE.items() if key != "rope_theta"}, "rope_parameters": rope})
    assert "missing" not in str(refused.value)


def test_a_sliding_window_that_is_switched_off_is_none():
    assert read({**DENSE, "sliding_window": 4096, "use_sliding_window": False}) == read(DENSE)


def test_spellings_of_config_json(tmp_path):
    renamed = {key: value for key, value in SPARSE.items() if key not in ("num_experts", "rope_theta")}
    renamed |= {"num_local_experts": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    (tmp_path / "config.json").write_text(json.dumps(renamed))
    assert read(tmp_path / "config.json") == read(SPARSE)


def test_fingerprint_is_of_the_architecture_alone():
    assert read(DENSE).fingerprint() == read({**DENSE, "name": "x", "transformers_version": "5"}).fingerprint()
    assert read(DENSE).fingerprint() != read({**DENSE, "rope_theta": 10001.0}).fingerprint()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": torch.zeros(4, dtype=torch.int64)}, r"tokens must be int64 \[rows, columns\]"),
        ({"tokens": torch.zeros(0, 4, dtype=torch.int64)}, r"tokens must be int64"),
        ({"tokens": torch.zeros(1, 4)}, "tokens must be int64"),
        ({"targets": torch.zeros(1, 3, dtype=torch.int64)}, r"targets must be int64 \[1, 4\]"),
        ({"positions": torch.zeros(1, 4)}, r"positions must be int64 \[1, 4\]"),
        ({"spans": [Span(0, 2, 3)]}, "does not fit"),
        ({"spans": [Span(0, 0, 3), Span(0, 2, 2)], "chunk_size": 2}, "overlaps"),
        ({"chunk_size": 0}, "chunk_size 0 must be at least 1"),
        ({"chunk_size": 2, "cache": Growing()}, "leave out chunk_size"),
        ({"force_balanced": True}, "this model is dense"),
    ],
)
def test_bad_input_is_refused(arguments, message):
    arguments = {"tokens": torch.zeros(1, 4, dtype=torch.int64), **arguments}
    with pytest.raises(ValueError, match=message):
        build(DENSE)(arguments.pop("tokens"), **arguments)


def test_unknown_profile_lists_the_known():
    with pytest.raises(ValueError, match="unknown rounding profile 'ws2'; known: ws1, hf"):
        Decoder(read(DENSE), Operators(), profile="ws2")


# The shipped models


def entry(name):
    data, problems = catalog.checked("models", MODELS / f"{name}.yaml")
    assert not problems
    return data


@pytest.mark.parametrize(("name", "experts"), [("tiny-dense", 0), ("tiny-moe", 8)])
def test_shipped_tiny_models_build(name, experts):
    architecture = read(entry(name))
    assert (architecture.vocab_size, architecture.num_experts) == (257, experts)
    decoder = Decoder(architecture, Operators(), dtype=torch.float32)
    decoder.initialise(0)
    tokens = torch.arange(257)[None]
    logprobs = decoder(tokens, targets=tokens).logprobs
    # Fresh weights know nothing: about log 257 = 5.55 a byte.
    assert -logprobs.mean().item() == pytest.approx(5.55, abs=0.1)


def test_the_entry_of_qwen3_8b_is_its_config_json():
    assert read(entry("qwen3-8b")) == read(QWEN3_8B)


@pytest.mark.parametrize(
    ("name", "key"),
    [("gpt-oss-20b", "sliding_window"), ("deepseek-v2-lite", "kv_lora_rank"), ("char-gpt", "model_type")],
)
def test_entries_of_other_families_are_refused(name, key):
    with pytest.raises(ValueError, match=rf"\b{key}\b"):
        read(entry(name))


# Where parameters lie


JOINED = (
    [f"self_attn.{name}_proj.weight" for name in "qkv"],
    [f"mlp.{name}_proj.weight" for name in ("gate", "up")],
)


@pytest.mark.parametrize("kind", CONFIGS)
def test_projections_of_the_same_rows_lie_side_by_side(kind):
    architecture = read(CONFIGS[kind])
    for made in (
        Decoder(architecture, Operators("torch")),
        Decoder(architecture, Operators("torch"), device="meta").requires_grad_(False).to_empty(device="cpu"),
    ):
        trained = made.get_parameter("model.norm.weight").requires_grad
        made.initialise(3)
        assert {name: tuple(one.shape) for name, one in made.named_parameters()} == architecture.parameter_shapes()
        assert [name for name, one in made.named_parameters() if one.requires_grad] == list(made.state_dict()) * trained
        for names in JOINED if kind == "dense" else JOINED[:1]:
            parts = [made.get_parameter(f"model.layers.1.{name}") for name in names]
            whole = side_by_side(parts)
            assert torch.equal(whole, torch.cat(parts))
            with torch.no_grad():
                parts[1].add_(1)
            assert torch.equal(whole, torch.cat(parts)) and side_by_side(parts[::-1]) is None
            assert side_by_side([parts[0], parts[1].detach().clone()]) is None
        assert side_by_side([made.get_parameter(f"model.layers.{i}.self_attn.q_proj.weight") for i in range(2)]) is None
