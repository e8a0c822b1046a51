"""Seeded weights, and weights from files, in decoders of a few kilobytes."""

from __future__ import annotations

import math
import zlib

import pytest
import torch

from rlspec.architecture import read
from rlspec.device import fills, weight_files
from rlspec.device.decoder import Decoder
from rlspec.device.operators import Operators
from rlspec.device.weights import fingerprint, load, seeded
from tests.device.test_decoder import CONFIGS, DENSE, QWEN3_8B, QWEN3_30B_A3B, SPARSE, ids
from tests.device.test_weight_files import write
from tests.kernels.interpreted import gpu

TIED = {**DENSE, "tie_word_embeddings": True}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def decoder(config=DENSE, master=torch.bfloat16, **options):
    return Decoder(read(config), Operators("torch"), master_dtype=master, **options)


def filled(config=DENSE, seed=1, **options):
    made = decoder(config, **options)
    seeded(made, seed)
    return made


def parameters(made):
    return {name: parameter.detach() for name, parameter in made.named_parameters()}


def saved(made, dtype=torch.bfloat16):
    return {name: x.to(dtype) for name, x in parameters(made).items()}


def apart(tensors):
    """The experts of each layer as one tensor each, named as in the files of the hub."""
    result = {}
    for name, x in tensors.items():
        prefix, _, kind = name.rpartition(".")
        if kind == "gate_up_proj":
            for expert, both in enumerate(x):
                gate, up = both.chunk(2)
                result |= {f"{prefix}.{expert}.gate_proj.weight": gate, f"{prefix}.{expert}.up_proj.weight": up}
        elif kind == "down_proj":
            result |= {f"{prefix}.{expert}.down_proj.weight": each for expert, each in enumerate(x)}
        else:
            result[name] = x
    return result


def halves(tensors):
    """Two shards; the tensors stand in another order than in the model."""
    names = sorted(tensors, key=lambda name: zlib.crc32(name.encode()))
    return [{name: tensors[name] for name in part} for part in (names[::2], names[1::2])]


# Seeded


@pytest.mark.parametrize("config", [DENSE, SPARSE, TIED])
def test_seeded_weights_have_the_spread_that_is_told(config):
    made = filled({**config, "vocab_size": 997}, master=torch.float32)
    for name, x in parameters(made).items():
        unit = 1 if "norm" in name else 0
        spread = 2**-6 if unit else 0.02 / math.sqrt(6) if "o_proj" in name or "down_proj" in name else 0.02
        # five deviations of the mean, and of the spread of near-normal numbers
        assert abs(x.mean() - unit) < 5 * spread / math.sqrt(x.numel()), name
        assert abs(x.std() / spread - 1) < 5 / math.sqrt(2 * x.numel()) + 0.01, name
        assert ((x - unit).abs() < 3.5 * spread).all(), name
        assert torch.equal(x.bfloat16().float(), x), name
    assert (HEAD in parameters(made)) != config.get("tie_word_embeddings", False)


def test_an_element_by_hand():
    """Element 5 of the first o: one hash of (5, 0, seed, CRC-32 of the name), the sum of its bytes."""
    name, mask = "model.layers.0.self_attn.o_proj.weight", 0xFFFFFFFF
    value = 5
    for key in (0x9E3779B9, 0, 7, zlib.crc32(name.encode())):
        value = (value * 0x2545F491 + key) & mask
        value = (value ^ value >> 16) * 0x85EBCA6B & mask
        value = (value ^ value >> 13) * 0xC2B2AE35 & mask
        value ^= value >> 16
    normal = (sum(value.to_bytes(4, "little")) - 510) / 147.8
    got = parameters(filled(seed=7))[name].flatten()[5].item()
    assert got == pytest.approx(normal * 0.02 / math.sqrt(6), rel=2**-8)


def test_a_value_follows_from_seed_name_and_element_alone(monkeypatch):
    want = parameters(filled())
    other = parameters(filled(seed=2))
    for name, x in want.items():
        assert (x == other[name]).float().mean() < 0.35, name  # norms have few values in bf16
    shallow = parameters(filled({**DENSE, "num_hidden_layers": 2}))
    same = [name for name in shallow if "o_proj" not in name and "down_proj" not in name]
    assert len(same) == len(shallow) - 4 and all(torch.equal(shallow[name], want[name]) for name in same)
    wide = parameters(filled(master=torch.float32))
    assert all(torch.equal(wide[name], x.float()) for name, x in want.items())
    monkeypatch.setattr(fills, "_CHUNK", 100)
    assert fingerprint(filled()) == fingerprint(decoder_with(want))


def decoder_with(tensors):
    made = decoder()
    made.load_state_dict(tensors)
    return made


def test_no_two_parameters_are_alike():
    layers = parameters(filled())
    q = [layers[f"model.layers.{i}.self_attn.q_proj.weight"].float().flatten() for i in range(3)]
    assert torch.corrcoef(torch.stack(q)).triu(1).abs().max() < 5 / math.sqrt(q[0].numel())
    for config in (QWEN3_8B, QWEN3_30B_A3B):
        names = list(read(config).parameter_shapes())
        assert len({zlib.crc32(name.encode()) for name in names}) == len(names)


@gpu
@pytest.mark.parametrize("config", [DENSE, SPARSE])
def test_a_gpu_makes_the_same_bits(config):
    assert fingerprint(filled(config, device="cuda")) == fingerprint(filled(config))


@pytest.mark.parametrize("seed", [-1, 1 << 32])
def test_seeds_have_32_bits(seed):
    with pytest.raises(ValueError, match="must be 0 to"):
        filled(seed=seed)


def test_nothing_is_seeded_on_meta():
    with pytest.raises(ValueError, match="model.embed_tokens.weight is on meta"):
        filled(device="meta")


# Fingerprint


def test_fingerprint_is_of_every_bit_name_and_dtype():
    want = fingerprint(filled())
    assert len(want) == 64 and fingerprint(filled()) == want
    assert fingerprint(filled(master=torch.float32)) != want
    for name, _ in decoder().named_parameters():
        made = filled()
        made.get_parameter(name).data.view(torch.int16).flatten()[-1] ^= 1
        assert fingerprint(made) != want, name
    made = filled()
    one, two = (made.get_parameter(f"model.layers.{layer}.mlp.up_proj.weight").data for layer in (0, 1))
    kept = one.clone()
    one.copy_(two), two.copy_(kept)
    assert fingerprint(made) != want


# Files


@pytest.mark.parametrize("layout", ["fused", "apart"])
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("master", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", CONFIGS)
def test_what_was_saved_is_loaded(tmp_path, kind, master, shards, layout):
    want = filled(CONFIGS[kind], master=master)
    tensors = apart(saved(want)) if layout == "apart" else saved(want)
    pins = write(tmp_path, *(halves(tensors) if shards == 2 else [tensors]))
    got = decoder(CONFIGS[kind], master)
    load(got, tmp_path, pins)
    assert fingerprint(got) == fingerprint(want)


@pytest.mark.parametrize("stored", [torch.float16, torch.float32])
def test_other_dtypes_are_loaded_where_they_fit(tmp_path, stored):
    want = filled(master=torch.float32)
    tensors = saved(want, stored)
    pins = write(tmp_path, tensors)
    got = decoder(master=torch.float32)
    load(got, tmp_path, pins)
    assert all(torch.equal(x, tensors[name].float()) for name, x in parameters(got).items())
    with pytest.raises(ValueError, match=rf"{EMBEDDING} is {stored} and would be rounded to torch.bfloat16"):
        load(decoder(), tmp_path, pins)


def test_a_decoder_on_meta_is_allocated_after_all_checks(tmp_path):
    want = filled()
    pins = write(tmp_path, saved(want))
    got = decoder(device="meta")
    with pytest.raises(ValueError, match="content hash"):
        load(got, tmp_path, {**pins, "content_hash": ""}, device="cpu")
    assert all(x.is_meta for x in parameters(got).values())
    load(got, tmp_path, pins, device="cpu")
    assert fingerprint(got) == fingerprint(want)
    for made, device in ((decoder(device="meta"), None), (decoder(), "cpu")):
        with pytest.raises(ValueError, match="a decoder on meta is loaded to a device"):
            load(made, tmp_path, pins, device=device)


def changed(config, change):
    tensors = apart(saved(filled(config))) if config is SPARSE else saved(filled(config))
    change(tensors)
    return tensors


EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
FUSED = "model.layers.1.mlp.experts.gate_up_proj"
REFUSED = {
    "missing": (DENSE, lambda t: t.pop("model.norm.weight"), "model.norm.weight is missing$"),
    "extra": (DENSE, lambda t: t.update(x=torch.zeros(1)), "x is no parameter of this model"),
    "shape": (DENSE, lambda t: t.update({HEAD: torch.zeros(32, 61)}), rf"{HEAD} is \[32, 61\], not \[61, 32\]"),
    "no head": (DENSE, lambda t: t.pop(HEAD), f"{HEAD} is missing, and this model does not tie its head"),
    "tied": (DENSE, lambda t: t.update({HEAD: t[EMBEDDING]}), f"{HEAD} is {EMBEDDING} to the bit, and this model does"),
    "untied": (TIED, lambda t: t.update({HEAD: t[EMBEDDING] + 1}), f"{HEAD} is not {EMBEDDING}, and this model ties"),
    "an expert": (SPARSE, lambda t: t.pop(EXPERT), f"refused: {EXPERT} is missing$"),
    "one more": (
        SPARSE,
        lambda t: t.update({EXPERT.replace("3", "8"): t[EXPERT]}),
        "experts.8.up_proj.weight is no par",
    ),
    "both": (
        SPARSE,
        lambda t: t.update({FUSED: torch.zeros(8, 32, 32)}),
        r"layers.1.mlp.experts.0.gate_proj.weight is no",
    ),
    "all experts": (
        SPARSE,
        lambda t: [t.pop(name) for name in list(t) if "layers.1.mlp.experts" in name and "down" not in name],
        f"refused: {FUSED} is missing$",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_anything_is_changed(tmp_path, name):
    config, change, message = REFUSED[name]
    pins = write(tmp_path, changed(config, change))
    got = filled(config, seed=5, master=torch.float32)
    before = fingerprint(got)
    with pytest.raises(ValueError, match=message) as caught:
        load(got, tmp_path, pins)
    assert str(caught.value).startswith(f"the weights in {tmp_path} are refused: ")
    assert fingerprint(got) == before


def test_a_tied_model_takes_files_with_and_without_its_head(tmp_path):
    want = filled(TIED)
    for tensors in (saved(want), {**saved(want), HEAD: saved(want)[EMBEDDING]}):
        got = decoder(TIED)
        load(got, tmp_path, write(tmp_path, tensors))
        assert fingerprint(got) == fingerprint(want)


# transformers


@pytest.mark.parametrize("shard", ["10KB", "1GB"])
@pytest.mark.parametrize("kind", [*CONFIGS, "tied"])
def test_a_model_that_transformers_saved(tmp_path, kind, shard):
    transformers = pytest.importorskip("transformers")
    config = TIED if kind == "tied" else CONFIGS[kind]
    made = {"qwen3": transformers.Qwen3Config, "qwen3_moe": transformers.Qwen3MoeConfig}[config["model_type"]]
    options = {key: value for key, value in config.items() if key not in ("model_type", "rope_theta")}
    rope = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    theirs = made(**options, rope_parameters=rope, dtype=torch.float32, attn_implementation="sdpa")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(theirs, dtype=torch.float32).eval()
    model.save_pretrained(tmp_path, max_shard_size=shard)
    pins = weight_files.measure(tmp_path)
    assert (len(pins["shards"]) > 1) is (shard == "10KB")
    ours = Decoder(read(tmp_path / "config.json"), Operators("torch"), dtype=torch.float32)
    load(ours, tmp_path, pins)
    tokens = ids(2, 12)
    with torch.no_grad():
        want, got = model(tokens).logits, ours(tokens).logits
    assert (got - want).abs().max() <= 2e-5 * want.square().mean().sqrt()  # the row of test_decoder.py
