"""What the decoder must know of a model, read from a model entry or a Hugging Face config.json; no torch.

Every key must be one that the decoder implements, one that asks for what it does anyway or for nothing (null), or one
that does not change the model. Any other is refused by its name, so that a model is never silently run as another one.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rlspec import config_json

# Keys of our model entries -> those of config.json.
NAMES = {
    "model_type": "model_type",
    "layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocabulary_size": "vocab_size",
    "tie_word_embeddings": "tie_word_embeddings",
    "rms_norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
    "max_positions": "max_position_embeddings",
}
EXPERTS = {
    "count": "num_experts",
    "top_k": "num_experts_per_tok",
    "intermediate_size": "moe_intermediate_size",
    "normalised": "norm_topk_prob",
}
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")  # how families spell the number of experts
FAMILIES = ("qwen3", "qwen3_moe")
_FIXED: Mapping[str, tuple[Any, ...]] = {
    "model_type": FAMILIES,
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "attention_dropout": (0, None),
    "qk_norm": (True,),
    "rope_scaling": (None,),
    "use_sliding_window": (False, None),
    "mlp_only_layers": ([], None),
    "decoder_sparse_step": (1, None),
    "pretraining_tp": (1,),
    "chunk_size_feed_forward": (0,),
}
WITHOUT_EFFECT = (
    *("$schema", "name", "source", "tokenizer", "load_balance_type"),
    *("architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings", "max_window_layers"),
    *("output_router_logits", "router_aux_loss_coef", "output_attentions", "output_hidden_states", "return_dict"),
    *("id2label", "label2id", "tokenizer_class", "unsloth_version"),
)


class Unimplemented(ValueError):
    """A model that asks for what the decoder does not do, however right it is."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The Qwen3 family; field names as in config.json. `num_experts` 0 means dense."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int = 0
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    rope_theta: float
    rms_norm_eps: float
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every trainable tensor in the order of the forward, named as in transformers.

        The experts of a layer are one tensor, gate above up, as transformers holds them since version 5.
        """
        hidden, width = self.hidden_size, self.head_dim
        queries, keys = self.num_attention_heads * width, self.num_key_value_heads * width
        attention = {
            "input_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (queries, hidden),
            "self_attn.k_proj.weight": (keys, hidden),
            "self_attn.v_proj.weight": (keys, hidden),
            "self_attn.q_norm.weight": (width,),
            "self_attn.k_norm.weight": (width,),
            "self_attn.o_proj.weight": (hidden, queries),
            "post_attention_layernorm.weight": (hidden,),
        }
        dense = {
            "mlp.gate_proj.weight": (self.intermediate_size, hidden),
            "mlp.up_proj.weight": (self.intermediate_size, hidden),
            "mlp.down_proj.weight": (hidden, self.intermediate_size),
        }
        sparse = {
            "mlp.gate.weight": (self.num_experts, hidden),
            "mlp.experts.gate_up_proj": (self.num_experts, 2 * self.moe_intermediate_size, hidden),
            "mlp.experts.down_proj": (self.num_experts, hidden, self.moe_intermediate_size),
        }
        layer = {**attention, **(sparse if self.num_experts else dense)}
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for index in range(self.num_hidden_layers):
            shapes.update({f"model.layers.{index}.{name}": shape for name, shape in layer.items()})
        shapes["model.norm.weight"] = (hidden,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes

    def parameter_count(self) -> int:
        """Elements of all parameters."""
        return sum(map(math.prod, self.parameter_shapes().values()))

    def fingerprint(self) -> str:
        """SHA-256 of the fields as JSON with sorted keys."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


def read(source: Mapping[str, Any] | str | Path) -> Architecture:
    """The architecture of a model entry or of a config.json (a mapping, or the path of a JSON file).

    Raises ValueError with every key that is not implemented, missing or of a wrong type or size; Unimplemented if any
    is of the first kind.
    """
    given = source if isinstance(source, Mapping) else config_json.parse(Path(source).read_bytes())
    config = _flat(given)
    wanted = {field.name: field for field in fields(Architecture)}
    found = [_refusal(key, value) for key, value in config.items() if key not in wanted]
    values = {key: value for key, value in config.items() if key in wanted}
    sizes = {key: value for key, value in values.items() if key in config_json.LIMITS}
    problems = [problem for problem in found if problem]
    problems += _missing(config)
    problems += config_json.oversized(sizes)
    problems += [
        f"{key} is {value!r}, not {wanted[key].type}"
        for key, value in values.items()
        if (key not in sizes or value is None) and not _typed(key, value)
    ]
    problems += _contradictions(given, config)
    if not problems:
        architecture = Architecture(**values)
        problems = _sizes(architecture)
    if problems:
        kind = Unimplemented if any(found) else ValueError
        raise kind("the decoder cannot build this model: " + "; ".join(problems))
    return architecture


def experts(source: Mapping[str, Any]) -> int:
    """How many experts a layer of a model entry or of a config.json has, however it is spelled; 0 means dense."""
    entry = source.get("experts")
    counts = (entry.get("count") if isinstance(entry, Mapping) else None, *(source.get(key) for key in COUNTS))
    return next((count for count in counts if count), 0)


def _flat(source: Mapping[str, Any]) -> dict[str, Any]:
    """One level of keys with the names of config.json; spellings of one thing become one key."""
    config = {NAMES.get(key, key): value for key, value in source.items()}
    if "num_local_experts" in config:
        config["num_experts"] = config.pop("num_local_experts")
    if isinstance(config.get("experts"), Mapping):
        config |= {EXPERTS.get(key, f"experts.{key}"): value for key, value in config.pop("experts").items()}
    if isinstance(config.get("rope_parameters"), Mapping):
        rope = dict(config.pop("rope_parameters"))
        if rope.pop("rope_type", "default") != "default" or set(rope) - {"rope_theta"}:
            config["rope_parameters"] = source["rope_parameters"]
        if "rope_theta" in rope:  # said, whatever else is refused
            config["rope_theta"] = rope["rope_theta"]
    if config.get("rope_scaling") in ({"rope_type": "default"}, {"type": "default"}):
        config["rope_scaling"] = None
    if config.get("sliding_window") is None or config.get("use_sliding_window") is False:
        config.pop("sliding_window", None)
    types = config.get("layer_types")
    if types is None or types == ["full_attention"] * len(types if isinstance(types, list) else ()):
        config.pop("layer_types", None)
    return config


def _contradictions(source: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """Keys of which one says otherwise than another, so that nobody knows which model is meant."""
    rope, entry = source.get("rope_parameters"), source.get("experts")
    said: list[tuple[str, str, Any]] = [(key, NAMES.get(key, key), value) for key, value in source.items()]
    said += [("num_local_experts", "num_experts", source.get("num_local_experts"))]
    if isinstance(rope, Mapping):
        said += [("rope_parameters.rope_theta", "rope_theta", rope.get("rope_theta"))]
    if isinstance(entry, Mapping):
        said += [(f"experts.{key}", EXPERTS.get(str(key), ""), value) for key, value in entry.items()]
    problems = [
        f"{key} {value!r} contradicts {name} {source[name]!r}"
        for key, name, value in said
        if key != name and value is not None and name in source and source[name] != value
    ]
    types = source.get("layer_types")
    if isinstance(types, list) and len(types) != config.get("num_hidden_layers"):
        problems.append(f"layer_types has {len(types)} entries, num_hidden_layers is {config.get('num_hidden_layers')}")
    if config.get("model_type") == "qwen3" and config.get("num_experts"):
        problems.append(f"num_experts {config['num_experts']!r} contradicts model_type qwen3, which is dense")
    return problems


def _refusal(key: str, value: Any) -> str | None:
    if key in WITHOUT_EFFECT or key.startswith("_") or (key in _FIXED and value in _FIXED[key]):
        return None
    if key in _FIXED:
        allowed = " or ".join(json.dumps(each) for each in _FIXED[key])
        return f"{key} {json.dumps(value)} is not implemented, only {allowed}"
    if key in ("sliding_window", "layer_types", "rope_parameters"):
        return f"{key} {json.dumps(value)} is not implemented"
    return None if value is None else f"key {key} is not implemented"


def _missing(config: Mapping[str, Any]) -> list[str]:
    needed = ["model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"]
    needed += ["num_key_value_heads", "head_dim", "rope_theta", "rms_norm_eps"]
    if config.get("model_type") == "qwen3_moe":
        needed += ["num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"]
    else:
        needed += ["intermediate_size"]
    return [f"{key} is missing" for key in needed if config.get(key) is None]


def _typed(key: str, value: Any) -> bool:
    kind = {field.name: field.type for field in fields(Architecture)}[key]
    if kind == "bool":
        return isinstance(value, bool)
    number = isinstance(value, int) or (kind == "float" and isinstance(value, float))
    return number and not isinstance(value, bool) and 0 <= value <= sys.float_info.max


def _sizes(model: Architecture) -> list[str]:
    positive = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    problems = [f"{key} must be at least 1" for key in positive if getattr(model, key) < 1]
    if model.vocab_size == 1:
        problems.append("vocab_size must be at least 2: the log-prob of an only token is 0 whatever the model computes")
    if not model.rope_theta:
        problems.append("rope_theta must be above 0")
    if model.head_dim < 2 or model.head_dim % 2:
        problems.append(f"head_dim {model.head_dim} must be even")
    if model.num_key_value_heads and model.num_attention_heads % model.num_key_value_heads:
        heads = f"num_key_value_heads {model.num_key_value_heads}"
        problems.append(f"{heads} must divide num_attention_heads {model.num_attention_heads}")
    if model.num_experts and not 1 <= model.num_experts_per_tok <= model.num_experts:
        problems.append(f"num_experts_per_tok {model.num_experts_per_tok} must be 1 to num_experts {model.num_experts}")
    if not (model.moe_intermediate_size if model.num_experts else model.intermediate_size):
        problems.append("the width of the feed-forward must be at least 1")
    return problems
