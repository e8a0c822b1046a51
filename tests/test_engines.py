"""Engines of parity specs: their rendered run files are run in this process, vLLM's and SGLang's on stand-ins."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

from rlspec import contract as contracts
from rlspec import document, engines, linting, logprobs, machine, render, schema
from rlspec.checks import parity
from rlspec.engines import ENGINES
from rlspec.model import Result
from tests.tiny import rlspec, run_folder, save

torch = pytest.importorskip("torch")
ROOT = Path(__file__).parents[1]
SPECS = ROOT / "specs"
CONTROLS = sorted((SPECS / "controls" / "parity" / "engines").glob("*.yaml"))
TOKENS = SPECS / "parity" / "tokens.jsonl"
OWN = {"engine": "rlspec", "settings": {"implementation": "torch", "execution": "full", "batch_size": 6}}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.delenv("RLSPEC_RECORDS", raising=False)
    yield
    torch.set_num_threads(threads)


def spec_of(folder, rollout, train, **changes):
    arms = [{"name": "rollout", "role": "rollout", **rollout}, {"name": "train", "role": "train", **train}]
    data = {"kind": "parity", "question": "Alike?", "model": "tiny-dense", "dtype": "fp32", "tokens": str(TOKENS),
            "weights": {"source": "seeded", "seed": 1}, "arms": arms, **changes}  # fmt: skip
    return save(folder / "spec.yaml", {key: value for key, value in data.items() if value is not None})


def parsed(path):
    assert linting.lint([path])[1] == []
    return parity.parse(document.read(path)[0])


def ran(path, folder):
    """The verdicts by judgment, and the records of both arms; each run file is run as a program."""
    spec = parsed(path)
    contract = contracts.load(spec.contract, spec.path.parent)
    steps = parity.expand(spec, folder, folder)
    render.write(spec, steps, contract)
    for step in steps:
        if step.run_file is not None:
            runpy.run_path(str(step.run_file), run_name="__main__")
    verdicts = parity.judge(spec, [Result(arm=step.arm, records=step.records) for step in steps], contract)
    return {one.judgment: one for one in verdicts}, *(logprobs.read(step.records) for step in steps)


def largest(found):
    return found["max_abs_dlogp"].statistic


# transformers and rlspec's own decoder, for real


@pytest.mark.parametrize("name", ["transformers-decode", "own-decoder"])
def test_shipped_specs_pass(name, tmp_path):
    pytest.importorskip("transformers")
    found, rollout, train = ran(SPECS / "parity" / f"{name}.yaml", tmp_path)
    assert {one.status for one in found.values()} == {"PASS", "MEASURED"}
    assert 0 < largest(found) < 0.01 and len(rollout.logprobs) == 92
    assert rollout.semantics["weights"] == train.semantics["weights"]
    assert rollout.semantics["engine"].startswith(("transformers (", "rlspec ("))


@pytest.mark.parametrize("path", CONTROLS, ids=lambda path: path.stem)
def test_controls_come_out_as_told(path, tmp_path):
    if "transformers" in path.read_text():
        pytest.importorskip("transformers")
    found, *_ = ran(path, tmp_path)
    expect = parsed(path).expect
    assert {name: found[name].status for name in expect.judgments} == dict(expect.judgments)
    assert expect.status in {one.status for one in found.values()}
    wanted = {"shifted": "shifted against the tokens", "other-weights": "different weights",
              "temperature-declared": "different temperature", "loss-mask": "positions differ"}  # fmt: skip
    said = [text for one in found.values() for text in (one.reason, *one.notes)]
    assert any(wanted.get(path.stem, "") in text for text in said)


def test_every_fault_has_a_control():
    faults = schema.load("parity")["properties"]["arms"]["items"]["properties"]["fault"]["enum"]
    text = "".join(path.read_text() for path in CONTROLS)
    assert all(f"fault: {fault}" in text for fault in faults) and len(CONTROLS) == 6


def settings(**given):
    return {"engine": "rlspec", "settings": {"implementation": "canonical", **given}}


def short(tmp_path):
    """Three samples of other lengths."""
    path = tmp_path / "tokens.jsonl"
    samples = [(5, 6), (1, 8), (12, 3)]
    lines = [
        {"sample": f"s{n}", "prompt": [n + 1] * prompt, "response": [7 * (n + p) for p in range(length)]}
        for n, (prompt, length) in enumerate(samples)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_the_canonical_decoder_has_the_same_bits_in_every_layout(tmp_path):
    files = []
    for one, other in (("right", "left"), ("packed", None)):
        train = settings(batch_size=2, **({"padding": other} if other else {"execution": "decode"}))
        rollout = settings(batch_size=3, padding=one, execution="full")
        folder = tmp_path / one
        folder.mkdir()
        found, *both = ran(spec_of(folder, rollout, train, tokens=short(folder), dtype="bf16"), folder)
        assert largest(found) == 0
        files += both
    assert len({tuple(one.logprobs) for one in files}) == 1 and len(set(files[0].logprobs)) > 12


def checkpoint(folder, seed=0):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 257, "rope_theta": 5e5}  # fmt: skip
    config = transformers.Qwen3Config(**sizes, initializer_range=0.3, tie_word_embeddings=True)
    transformers.Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_saved_model_is_scored_alike_by_both(tmp_path, dtype):
    weights = {"source": "huggingface", "path": str(checkpoint(tmp_path / "model"))}
    decoded = {"engine": "rlspec", "settings": {"profile": "hf", "batch_size": 6}}
    path = spec_of(tmp_path, decoded, {"engine": "transformers"}, weights=weights, dtype=dtype, model=None)
    found, rollout, train = ran(path, tmp_path)
    assert 0 < largest(found) <= {"fp32": 1e-5, "bf16": 0.1}[dtype]
    from rlspec.device import weight_files

    digest = weight_files.measure(tmp_path / "model")["content_hash"]
    assert rollout.semantics["weights"] == train.semantics["weights"] == digest
    assert max(rollout.logprobs) - min(rollout.logprobs) > 3


@pytest.mark.parametrize(("rollout", "train"), [("transformers", "rlspec"), ("rlspec", "transformers")])
def test_the_experts_of_a_mixture_stand_in_the_files(tmp_path, rollout, train):
    pytest.importorskip("transformers", minversion="5")
    arms = [{"engine": rollout, "settings": {"execution": "decode", "batch_size": 2}},
            {"engine": train, "settings": {"padding": "left", "batch_size": 3}}]  # fmt: skip
    found, *files = ran(spec_of(tmp_path, *arms, model="tiny-moe", tokens=short(tmp_path)), tmp_path)
    told = found["max_abs_dlogp"].evidence["routing"]
    assert told["flips"] == 0 and told["tokens"] == len(files[0].routing) and len(set(files[0].routing)) > 12
    line = json.loads((tmp_path / "fp32-train.records.jsonl").read_text().splitlines()[0])
    assert {len(layers) for layers in line["routing"]} == {4} and len(line["routing"]) == len(line["token"])
    assert {len(experts) for layers in line["routing"] for experts in layers} == {2}


def damaged(folder, change, **config):
    """A saved model with other tensors; `change` edits a dict of them."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    known = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**known, **config}))
    return {"source": "huggingface", "path": str(folder)}


NORM, BIAS = "model.layers.1.input_layernorm.weight", "model.layers.1.self_attn.q_proj.bias"
HEAD = {"lm_head.weight": torch.ones(257, 32, dtype=torch.bfloat16)}
QUERY = "model.layers.0.self_attn.q_proj.weight"
DAMAGES = {
    "misshapen": (lambda tensors: tensors.update({QUERY: torch.ones(32, 32)}), f"{QUERY} is "),
    "missing": (lambda tensors: tensors.pop(NORM), f"{NORM} is missing"),
    "unknown": (lambda tensors: tensors.update({BIAS: torch.ones(64)}), f"{BIAS} is no parameter of this model"),
    "untied": (lambda tensors: tensors.update(HEAD), "lm_head.weight is not model.embed_tokens.weight, and this model"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_files_that_are_not_the_model_are_refused_for_any_engine(tmp_path, damage):
    from rlspec.device import dumping

    change, message = DAMAGES[damage]
    weights = damaged(checkpoint(tmp_path / "model"), change)
    made = dumping.Dump(str(tmp_path / "run.py"), engine="rlspec", how=(), tokens=str(TOKENS))
    with pytest.raises(ValueError, match=f"the weights in .*model are refused: {message}"):
        made.files(weights)
    assert made.weights is None


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_transformers_draws_at_random_or_leaves_out_is_refused(tmp_path, damage):
    """A key that our decoder does not know, so that transformers alone says what is wrong with the files."""
    change, message = DAMAGES[damage]
    weights = damaged(checkpoint(tmp_path / "model"), change, unknown_to_us=1)
    path = spec_of(tmp_path, {"engine": "transformers"}, {"engine": "transformers"}, weights=weights, model=None)
    with pytest.raises(SystemExit, match=f"^error: the weights in .*model are refused: {message}"):
        ran(path, tmp_path)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("tiny-moe", "model tiny-moe is not the one in model: model_type is qwen3_moe, and qwen3 there"),
        ("tiny-dense", "model tiny-dense is not the one in model: heads is 4, and 2 there"),
        ("tiny-dens", "unknown model 'tiny-dens'"),
        ("./model/config.json", None),
    ],
)
def test_a_declared_model_is_the_one_in_the_folder(tmp_path, model, message):
    (tmp_path / "model").mkdir()
    named = {"layers": "num_hidden_layers", "heads": "num_attention_heads", "vocabulary_size": "vocab_size"}
    sizes = {"model_type": "qwen3", "layers": 4, "hidden_size": 64, "heads": 2, "vocabulary_size": 257}
    (tmp_path / "model" / "config.json").write_text(json.dumps({named.get(key, key): sizes[key] for key in sizes}))
    weights = {"source": "huggingface", "path": "model"}
    path = spec_of(tmp_path, {"engine": "transformers"}, {"engine": "vllm"}, weights=weights, model=model)
    found = linting.lint([path])[1]
    assert [one.message for one in found] == ([message] if message else [])


def test_a_size_that_is_a_text_is_told_as_one(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"num_attention_heads": "4"}')
    weights = {"source": "huggingface", "path": "model"}
    path = spec_of(tmp_path, {"engine": "transformers"}, {"engine": "vllm"}, weights=weights, model="tiny-dense")
    (found,) = linting.lint([path])[1]
    assert found.message == "model tiny-dense is not the one in model: heads is 4, and '4' there"


def test_samples_are_no_longer_than_the_model_in_the_folder(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"max_position_embeddings": 41}')
    weights = {"source": "huggingface", "path": "model"}
    path = spec_of(tmp_path, {"engine": "transformers"}, {"engine": "transformers"}, weights=weights, model=None)
    (found,) = linting.lint([path])[1]
    assert found.message.endswith("jsonl:3: sample s2 has 42 tokens, and the model in model at most 41 positions")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"rms_norm_eps": 2e-6}, "rms_norm_eps is 1e-06 in one and 2e-06 in the other"),
        ({"rms_norm_eps": "1e-06"}, "rms_norm_eps is 1e-06 in one and '1e-06' in the other"),
        ({"sliding_window": 4}, "sliding_window is None in one and 4 in the other"),
        ({"dtype": "float32", "use_cache": False}, None),
    ],
)
def test_folders_of_two_models_are_not_one_because_their_tensors_are(tmp_path, change, told):
    arms = []
    for name, more in (("a", {}), ("b", change)):
        (tmp_path / name).mkdir()
        config = {"rms_norm_eps": 1e-6, "sliding_window": None, "dtype": "bfloat16", "use_cache": True, **more}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        arms.append({"engine": "transformers", "weights": {"source": "huggingface", "path": name}})
    found = linting.lint([spec_of(tmp_path, *arms, weights=None, model=None)])[1]
    assert [(one.rule, one.message) for one in found] == (
        [("RL305", f"a and b hold two models: {told}")] if told else []
    )


def test_two_checkpoints_are_not_compared(tmp_path):
    one, other = (checkpoint(tmp_path / str(seed), seed) for seed in (1, 2))
    arms = [{"engine": "transformers", "weights": {"source": "huggingface", "path": str(p)}} for p in (one, other)]
    found, *_ = ran(spec_of(tmp_path, *arms, weights=None, model=None), tmp_path)
    assert {one.status for one in found.values()} == {"ERROR"}
    assert "different weights" in found["approx_kl"].reason


def test_what_a_rollout_draws_the_trainer_scores(tmp_path):
    pytest.importorskip("transformers")
    prompts = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"sample": f"p{n}", "prompt": [n + 1] * (n + 1), "length": 9}) for n in range(4)]
    prompts.write_text("\n".join(lines))
    draws = {"engine": "transformers", "settings": {"execution": "generate", "batch_size": 3, "seed": 5}}
    path = spec_of(tmp_path, draws, OWN, tokens=str(prompts))
    found, rollout, train = ran(path, tmp_path)
    assert found["max_abs_dlogp"].status == "PASS" and rollout.tokens == train.tokens
    assert len(set(rollout.tokens)) > 20 and list(rollout.positions[:9]) == list(range(1, 10))
    assert ran(path, tmp_path)[1].tokens == rollout.tokens
    (tmp_path / "again").mkdir()
    draws["settings"]["seed"] = 6
    assert ran(spec_of(tmp_path, draws, OWN, tokens=str(prompts)), tmp_path / "again")[1].tokens != rollout.tokens


def test_a_token_that_the_model_does_not_have(tmp_path, monkeypatch):
    monkeypatch.setattr(parity, "_vocabulary", lambda *_: None)  # as where weights alone say what the model is
    tokens = tmp_path / "tokens.jsonl"
    tokens.write_text('{"sample": "s0", "prompt": [1], "response": [257]}\n')
    with pytest.raises(SystemExit, match="^error: sample s0: token 257 is not below the vocabulary, 257"):
        ran(spec_of(tmp_path, OWN, settings(), tokens=str(tokens)), tmp_path)


SMALL = {"model_type": "qwen3", "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1024, "head_dim": 64,
         "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "rope_theta": 1e6,
         "rms_norm_eps": 1e-6}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_a_gpu_triton_decodes_with_the_bits_of_full_sequences(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    more = {"model": "./config.json", "dtype": "bf16", "tokens": short(tmp_path), "requires": {"device": "cuda"}}
    decoded = {"engine": "rlspec", "settings": {"implementation": "triton", "execution": "decode", "batch_size": 2}}
    for padding in ("right", "left", "packed"):
        full = {"engine": "rlspec", "settings": {"implementation": "triton", "batch_size": 3, "padding": padding}}
        found, rollout, train = ran(spec_of(tmp_path, decoded, full, **more), tmp_path)
        assert largest(found) == 0 and rollout.semantics["engine"].endswith("cuda batch 2 right")
        for path in tmp_path.glob("bf16-*"):
            path.unlink()
    hf = [{"engine": "transformers", "settings": {"invariant": True, "batch_size": size}} for size in (3, 1)]
    found, *_ = ran(spec_of(tmp_path, *hf, **more), tmp_path)
    assert largest(found) == 0


def test_a_whole_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    ran(spec_of(tmp_path, OWN, settings(execution="full"), tokens=short(tmp_path)), tmp_path)
    (tmp_path / "fp32-train.records.jsonl").rename("train.jsonl")
    done = rlspec("run", spec_of(tmp_path, OWN, {"records": "train.jsonl"}, tokens=short(tmp_path)))
    assert done.code == 0 and "17 tokens of 3 sequences" in " ".join(done.out.split()), done.out + done.err
    plan = json.loads((run_folder() / "plan.json").read_text())
    assert [arm["run_file_digest"] is None for arm in plan["arms"]] == [False, True]
    assert sorted(path.name for path in run_folder().glob("*.py")) == ["fp32-rollout.py"]


# vLLM and SGLang, on stand-ins that know the names of the real arguments and record what they are given

VLLM = """
from types import SimpleNamespace as Names

CALLS = []


def value(position, token):
    return -(1.0 + position / 64 + token / 4096)


class SamplingParams:
    def __init__(self, *, temperature, top_p, seed, ignore_eos, detokenize, max_tokens, logprobs=None,
                 prompt_logprobs=None, trace_decode_token_ids=None):
        assert (temperature, top_p, ignore_eos, detokenize) == (1.0, 1.0, True, False)
        self.__dict__.update(locals())


class LLM:
    def __init__(self, model, *, dtype, seed, skip_tokenizer_init, logprobs_mode, enforce_eager, enable_prefix_caching,
                 max_num_seqs=256, attention_backend=None, enable_trace_replay=False, gpu_memory_utilization=0.9):
        CALLS.append({key: value for key, value in locals().items() if key != "self"})

    def generate(self, prompts, params):
        params = params if isinstance(params, list) else [params] * len(prompts)
        return [self.one(prompt["prompt_token_ids"], given) for prompt, given in zip(prompts, params, strict=True)]

    def one(self, ids, given):
        scored = None
        if given.prompt_logprobs is not None:
            scored = [None, *({t: Names(logprob=value(p, t))} for p, t in enumerate(ids) if p)]
        drawn = given.trace_decode_token_ids or [(7 * p) % 250 for p in range(given.max_tokens)]
        chances = [{t: Names(logprob=value(len(ids) + p, t))} for p, t in enumerate(drawn)]
        return Names(prompt_logprobs=scored, outputs=[Names(token_ids=drawn, logprobs=chances)])
"""
SGLANG = """
CALLS = []


def value(position, token):
    return -(1.0 + position / 64 + token / 4096)


class Engine:
    def __init__(self, *, model_path, dtype, random_seed, skip_tokenizer_init, disable_cuda_graph, disable_radix_cache,
                 max_running_requests=None, attention_backend=None, mem_fraction_static=None):
        CALLS.append({key: value for key, value in locals().items() if key != "self"})

    def generate(self, *, input_ids, sampling_params, return_logprob, logprob_start_len=None):
        assert return_logprob
        count = len(input_ids)
        params = sampling_params if isinstance(sampling_params, list) else [sampling_params] * count
        starts = [-1] * count if logprob_start_len is None else logprob_start_len
        return [self.one(*each) for each in zip(input_ids, params, starts, strict=True)]

    def one(self, ids, given, start):
        assert (given["temperature"], given["top_p"], given["top_k"], given["ignore_eos"]) == (1.0, 1.0, -1, True)
        first = len(ids) - 1 if start == -1 else start
        scored = [(value(p, t) if p > first else None, t, None) for p, t in enumerate(ids) if p >= first]
        drawn = [(7 * p) % 250 for p in range(given["max_new_tokens"])]
        chances = [(value(len(ids) + p, t), t, None) for p, t in enumerate(drawn)]
        return {"output_ids": drawn, "meta_info": {"input_token_logprobs": scored, "output_token_logprobs": chances}}

    def shutdown(self):
        CALLS.append("shutdown")
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Makes a module of that name, with its text, that can be imported and counts as installed."""

    def make(name, text):
        site = tmp_path / "site"
        (site / f"{name}-1.0.dist-info").mkdir(parents=True)
        (site / f"{name}-1.0.dist-info" / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (site / f"{name}.py").write_text(text)
        monkeypatch.syspath_prepend(str(site))
        monkeypatch.delitem(sys.modules, name, raising=False)
        return lambda: sys.modules[name].CALLS

    yield make
    for name in ("vllm", "sglang"):
        sys.modules.pop(name, None)


def folder_with_weights(tmp_path):
    """Files that have a hash; a stand-in does not read them."""
    made = tmp_path / "weights"
    made.mkdir()
    (made / "config.json").write_text("{}")
    (made / "model.safetensors").write_bytes(b"weights")
    return {"source": "huggingface", "path": str(made)}


def stood_in(tmp_path, engine, execution, **given):
    rollout = {"engine": engine, "settings": {"execution": execution, "batch_size": 4, **given}}
    given = [json.loads(line) for line in TOKENS.read_text().splitlines()]
    path = spec_of(tmp_path, rollout, {"records": "train.jsonl"}, weights=folder_with_weights(tmp_path), dtype="bf16")
    truth = []
    for one in given:
        tokens = one["response"] if execution != "generate" else [(7 * p) % 250 for p in range(len(one["response"]))]
        positions = [len(one["prompt"]) + p for p in range(len(tokens))]
        values = [-(1.0 + p / 64 + t / 4096) for p, t in zip(positions, tokens, strict=True)]
        truth.append({"sample": one["sample"], "position": positions, "token": tokens, "logprob": values})
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in truth))
    return ran(path, tmp_path)


@pytest.mark.parametrize("execution", ["full", "decode", "generate"])
def test_vllm(tmp_path, stand_in, execution):
    calls = stand_in("vllm", VLLM)
    more = {"options": {"gpu_memory_utilization": 0.5, "enforce_eager": False}, "attention": "FLASH_ATTN", "seed": 3}
    found, rollout, _ = stood_in(tmp_path, "vllm", execution, **more)
    assert largest(found) == 0 and found["max_abs_dlogp"].status == "PASS"
    assert calls() == [{
        "model": str(tmp_path / "weights"), "dtype": "bfloat16", "seed": 3, "skip_tokenizer_init": True,
        "logprobs_mode": "raw_logprobs", "enforce_eager": False, "enable_prefix_caching": False, "max_num_seqs": 4,
        "attention_backend": "FLASH_ATTN", "enable_trace_replay": execution == "decode", "gpu_memory_utilization": 0.5,
    }]  # fmt: skip
    said = dict(rollout.semantics)
    assert said.pop("engine").startswith(f"vllm (vllm 1.0) {execution} bf16 dtype=bfloat16 seed=3")
    assert len(said.pop("weights")) == 64
    assert said == {"temperature": 1.0, "top_p": 1.0, "processed": "raw"}


def test_a_trace_that_vllm_does_not_follow(tmp_path, stand_in):
    stand_in("vllm", VLLM.replace("given.trace_decode_token_ids or", ""))
    with pytest.raises(ValueError, match="sample s0: vLLM went another way than the trace"):
        stood_in(tmp_path, "vllm", "decode")


@pytest.mark.parametrize("execution", ["full", "generate"])
def test_sglang(tmp_path, stand_in, execution):
    calls = stand_in("sglang", SGLANG)
    found, rollout, _ = stood_in(tmp_path, "sglang", execution, options={"mem_fraction_static": 0.5})
    assert largest(found) == 0 and found["max_abs_dlogp"].status == "PASS"
    assert calls() == [{
        "model_path": str(tmp_path / "weights"), "dtype": "bfloat16", "random_seed": 0, "skip_tokenizer_init": True,
        "disable_cuda_graph": True, "disable_radix_cache": True, "max_running_requests": 4, "attention_backend": None,
        "mem_fraction_static": 0.5,
    }, "shutdown"]  # fmt: skip
    assert rollout.semantics["processed"] == "raw"


def test_log_probs_of_other_tokens_are_refused(tmp_path, stand_in):
    calls = stand_in("sglang", SGLANG.replace("None, t, None)", "None, t + 1, None)"))
    with pytest.raises(ValueError, match="sample s0: SGLang gave log-probs of other tokens"):
        stood_in(tmp_path, "sglang", "full")
    assert calls()[-1] == "shutdown"


# What is known before anything runs


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_a_missing_package_blocks(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if machine.version(name):
        pytest.skip(f"{name} is installed here")
    done = rlspec("run", SPECS / "parity" / f"{name}-transformers.yaml")
    words = " ".join(done.out.split())
    assert done.code == 5 and f"package '{name}' is not installed here" in words
    assert "models/Qwen3-8B with weights" in words and not (tmp_path / "workspace").exists()


def test_values_enter_as_literals(tmp_path):
    folder = tmp_path / "it's \"odd"
    folder.mkdir()
    spec = parsed(spec_of(folder, {"engine": "transformers", "settings": {"attention": 'x"; 1/0 #'}}, OWN))
    made = render.check(spec, contracts.load("ws1", folder))
    assert set(made) == {"rollout", "train"} and made["rollout"] != made["train"]
    scope = {"__name__": "rendered"}
    exec(compile(made["train"], "train", "exec"), scope)
    assert scope["SPEC_DIR"] == str(folder) and scope["IMPLEMENTATION"] == "torch"


@pytest.mark.parametrize("name", ENGINES)
def test_the_schema_and_the_table_agree(name):
    known = schema.load("parity")
    assert set(known["properties"]["arms"]["items"]["properties"]["engine"]["enum"]) == set(ENGINES)
    allowed = known["definitions"][f"{name}_settings"]["properties"]["execution"]["enum"]
    assert tuple(allowed) == ENGINES[name].executions and set(allowed) <= set(engines.EXECUTIONS)


def test_what_is_usual_for_a_role(tmp_path):
    assert [engines.execution(name, "rollout", {}) for name in ENGINES] == ["decode", "decode", "generate", "decode"]
    assert {engines.execution(name, "train", {}) for name in ENGINES} == {"full"}
    spec = parsed(spec_of(tmp_path, OWN, {"engine": "transformers", "settings": {"device": "cuda"}}))
    assert spec.requires == {"packages": ["torch", "transformers"], "device": "cuda"}
    assert [arm.settings["device"] for arm in spec.arms] == ["cpu", "cuda"]


def test_plan_and_list_name_the_engines(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = spec_of(tmp_path, OWN, {"engine": "transformers", "settings": {"batch_size": 2}})
    words = " ".join(rlspec("plan", path).out.split())
    assert "engine transformers, attention sdpa, batch_size 2, device cpu, dtype fp32, execution full" in words
    assert "requires packages torch, transformers" in words and "fp32-<arm> .py" in words
    assert [line.split()[0] for line in rlspec("list", "engines").out.splitlines()] == list(ENGINES)
    said = rlspec("explain", "sglang").out
    assert "full: one forward" in said and "generate: as decode" in said and "\n  decode:" not in said
