"""Log-probs of eight samples under a Qwen3 model of transformers with random weights: one by one, or in one batch.

    python dump.py OUT --samples {alone,batch} [--invariant]

The numerics are those of the model as it is, or inside `invariant_mode()`. Samples and weights follow from seeds, so
that two calls have the same; only how the samples are put together differs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from rlspec.device.invariant_mode import invariant_mode

LENGTHS = {"small": (17, 300, 64, 1001, 130, 33, 512, 255), "tiny": (3, 9, 6)}
SIZES = {
    "small": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 32000,
    },
    "tiny": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 40,
    },
}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def main() -> None:
    parser = argparse.ArgumentParser(description="Log-probs of random samples.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--samples", choices=("alone", "batch"), required=True)
    parser.add_argument("--invariant", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--size", choices=SIZES, default="small")
    given = parser.parse_args()

    torch.manual_seed(0)
    config = Qwen3Config(**SIZES[given.size], initializer_range=0.05, attn_implementation="sdpa")
    model = Qwen3ForCausalLM(config).to(given.device, DTYPES[given.dtype]).eval()
    samples = [torch.randint(config.vocab_size, (length,)).to(given.device) for length in LENGTHS[given.size]]
    groups = [[sample] for sample in samples] if given.samples == "alone" else [samples]
    with torch.no_grad(), invariant_mode() if given.invariant else contextlib.nullcontext():
        rows = [row for group in groups for row in logprobs(model, group)]
    with given.out.open("w", encoding="utf-8") as file:
        for number, (sample, row) in enumerate(zip(samples, rows, strict=True)):
            file.write(line(number, sample, row, given.samples) + "\n")


def logprobs(model: PreTrainedModel, samples: list[Tensor]) -> Iterator[Tensor]:
    """Of each sample, the log-probs of its tokens but the first; the samples are padded on the left if they must be."""
    width = max(map(len, samples))
    ids = torch.stack([F.pad(sample, (width - len(sample), 0)) for sample in samples])
    mask = torch.stack([F.pad(torch.ones_like(sample), (width - len(sample), 0)) for sample in samples])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    for sample, row in zip(samples, logits, strict=True):
        scores = F.log_softmax(row[width - len(sample) : -1].float(), -1)
        yield scores.gather(-1, sample[1:, None])[:, 0]


def line(number: int, sample: Tensor, row: Tensor, engine: str) -> str:
    columns = {"position": list(range(1, len(sample))), "token": sample[1:].tolist(), "logprob": row.tolist()}
    return json.dumps({"sample": f"s{number}", **columns, "engine": engine, "temperature": 1.0})


if __name__ == "__main__":
    main()
