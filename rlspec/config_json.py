"""A Hugging Face config.json as plain data: one object of finite numbers, each key once, sizes of a real model."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

MAX_BYTES = 1 << 20
# Far above any model, and low enough that what lists its parameters by name still ends.
LIMITS: Mapping[str, int] = {
    "num_hidden_layers": 1 << 10,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 24,
    "moe_intermediate_size": 1 << 24,
    "num_attention_heads": 1 << 16,
    "num_key_value_heads": 1 << 16,
    "head_dim": 1 << 16,
    "num_experts": 1 << 16,
    "num_local_experts": 1 << 16,
    "n_routed_experts": 1 << 16,
    "num_experts_per_tok": 1 << 16,
    "vocab_size": 1 << 24,
}


def parse(raw: bytes) -> dict[str, Any]:
    """Raises ValueError for what is no such object, in one line."""
    if len(raw) > MAX_BYTES:
        raise ValueError(f"{len(raw)} bytes; a config.json has at most {MAX_BYTES}")
    try:
        config = json.loads(raw, object_pairs_hook=_once, parse_constant=_finite, parse_float=_finite)
    except RecursionError:
        raise ValueError("nested too deep") from None
    if not isinstance(config, dict):
        raise ValueError("a config.json holds one object")
    return config


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise ValueError(f"key {key!r} stands twice")
        made[key] = value
    return made


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is not a finite number")
    return value


def oversized(config: Mapping[str, Any]) -> list[str]:
    """What is wrong with the sizes that are there; None is a size that is not given."""
    given = {key: config[key] for key in LIMITS if config.get(key) is not None}
    return [problem for key, value in given.items() if (problem := _oversized(key, value))]


def _oversized(key: str, value: Any) -> str | None:
    if not isinstance(value, int) or isinstance(value, bool):
        return f"{key} is {_short(value)}, not int"
    return f"{key} {_short(value)} is outside 0 to {LIMITS[key]}" if not 0 <= value <= LIMITS[key] else None


def _short(value: Any) -> str:
    # Python refuses to write an integer of more than 4,300 digits.
    text = f"a number of {value.bit_length()} bits" if isinstance(value, int) and abs(value) >> 128 else repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
