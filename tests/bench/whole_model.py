"""The sides of `bench_chain.py`: ours and transformers, on one set of weights, and how a call is timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlspec import architecture, catalog, chains, workloads
from rlspec.device import weights
from rlspec.device.chain_inference import InferenceDecoder
from rlspec.device.chain_model import TrainingPass
from rlspec.device.decoder import Decoder, Span
from rlspec.device.kv_cache import ContiguousCache
from rlspec.device.operators import Operators

ROOT = Path(__file__).parents[2]
ROWS, LENGTH, SEED, BYTES_PER_MS = 4, 1024, 20260812, 4.3e9
CONTEXTS, CAPTURES = (128, 512, 1024), 3
DEVICE = torch.device("cuda")


def rows(model: str, implementations: Sequence[str]) -> Iterator[dict[str, Any]]:
    """What was measured of each implementation, as soon as it is there."""
    entry = catalog.model(model, ROOT / "specs")
    decoder = Decoder(architecture.read(entry), Operators("triton"), master_dtype=torch.bfloat16, device=DEVICE)
    weights.seeded(decoder, SEED)
    theirs = _transformers(decoder)
    for name in implementations:
        for row in _beside(decoder, Operators(name), theirs):
            yield {"implementation": name, **row}


def _beside(decoder: Decoder, operators: Operators, model: Any) -> Iterator[dict[str, Any]]:
    ids = torch.randint(decoder.architecture.vocab_size, (ROWS, LENGTH), device=DEVICE)
    ours = InferenceDecoder.of(decoder, operators)

    @torch.no_grad()
    def prefill() -> None:
        ours(ids)

    @torch.no_grad()
    def their_prefill() -> None:
        model(ids, use_cache=False)

    yield {"what": f"prefill {ROWS} x {LENGTH}", **_compared(prefill, their_prefill)}
    yield {"what": f"training {ROWS} x {LENGTH}", **_compared(*_training(decoder, operators, model, ids))}
    read = sum(p.numel() * 2 for name, p in decoder.named_parameters() if "embed" not in name)
    for context in CONTEXTS:
        # The same graph captured again takes some 0.3 % more or less, of short contexts up to 1 %.
        times = sorted(_steady(_decode(ours, ids[:1, :context]), seconds=0.5) for _ in range(CAPTURES))
        told = {"ours_ms": times[len(times) // 2], "captures_ms": times, "floor_ms": read / BYTES_PER_MS}
        yield {"what": f"decode 1 x 1 behind {context}, graph", **told}


def _transformers(decoder: Decoder) -> Any:
    """The same model on the same parameters."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model = decoder.architecture
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    sizes = {name: getattr(model, name) for name in (*names, "head_dim", "intermediate_size", "rms_norm_eps")}
    config = Qwen3Config(
        **sizes, tie_word_embeddings=model.tie_word_embeddings, attn_implementation="sdpa",
        rope_parameters={"rope_type": "default", "rope_theta": model.rope_theta}, rope_theta=model.rope_theta,
        max_position_embeddings=4 * LENGTH,
    )  # fmt: skip
    with torch.device("meta"):
        made = Qwen3ForCausalLM(config).to(torch.bfloat16)
    # Parameters of their own for the gradients, on the memory of ours.
    shared = {name: p.detach().requires_grad_() for name, p in decoder.named_parameters()}
    made.load_state_dict(shared, assign=True)
    made.model.rotary_emb = type(made.model.rotary_emb)(config).to(DEVICE)
    return made.train()


def _training(
    decoder: Decoder, operators: Operators, model: Any, ids: Tensor
) -> tuple[Callable[[], None], Callable[[], None]]:
    names = [f"s{row}" for row in range(ROWS)]
    workload = workloads.of(
        {
            "name": "bench", "seed": 1, "fill": "hashed", "pad_token": 0, "operators": ["det_gemm"],
            "samples": [{"id": name, "length": LENGTH, "prompt": 1} for name in names],
            "tiers": [{"name": "whole", "samples": names, "layouts": ["singletons"]}],
            "chain": {"tier": "whole", "cells": ["B1/full"], "decode": [{"name": "none", "samples": names[:1]}]},
        }
    )  # fmt: skip
    tier = workload.tiers[0]
    layout = chains.cells(chains.asked(workload))[0].layout
    training = TrainingPass(decoder, operators, tier, ids.tolist())

    def ours() -> None:
        training.run(layout)

    def theirs() -> None:
        model.zero_grad(set_to_none=True)
        logits = model(ids, use_cache=False).logits[:, :-1]
        F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten()).backward()
        model.zero_grad(set_to_none=True)

    return ours, theirs


class _Held:
    """A cache whose next slot was reserved beforehand, so that a graph can capture a call: always the same."""

    def __init__(self, cache: ContiguousCache) -> None:
        self.cache, self.segments = cache, cache.of(0).begin([Span(0, 0, 1)], 1)
        assert self.segments.table.is_cuda and self.segments.positions.is_cuda

    def begin(self, spans: Sequence[Span], width: int) -> Any:
        self.cache._next = 0
        return self.segments

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)


def _decode(ours: InferenceDecoder, ids: Tensor) -> Callable[[], None]:
    options: dict[str, Any] = {"dtype": ours.dtype, "device": DEVICE}
    options["backend"] = ours.operators.implementations["attention"]
    cache = ContiguousCache(ours.architecture, samples=1, positions=ids.shape[1] + 1, **options)
    cache.open(0)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        ours(ids, cache=cache.of(0))
        held = _Held(cache)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            ours(ids[:, -1:], cache=held)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            ours(ids[:, -1:], cache=held)

    def replay() -> None:
        assert held.segments is not None  # its keys and values live as long as the graph that reads them
        graph.replay()

    return replay


def _compared(ours: Callable[[], None], theirs: Callable[[], None]) -> dict[str, float]:
    memory = [_peak(call) for call in (ours, theirs)]
    first, second, third, last = (_steady(call) for call in (ours, theirs, theirs, ours))
    mine, other = (first + last) / 2, (second + third) / 2
    return {
        "ours_ms": mine, "transformers_ms": other, "ratio": mine / other,
        "ours_gib": memory[0], "transformers_gib": memory[1], "memory_ratio": memory[0] / memory[1],
    }  # fmt: skip


def _peak(call: Callable[[], None]) -> float:
    call()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 2**30


def _steady(call: Callable[[], None], seconds: float = 1.5) -> float:
    """Milliseconds a call, alone, after a warm-up as long as the measurement."""
    call()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    marks[0].record()
    call()
    marks[1].record()
    torch.cuda.synchronize()
    count = max(2, int(seconds * 1e3 / max(marks[0].elapsed_time(marks[1]), 1e-3)))
    for _ in range(count):
        call()
    marks[0].record()
    for _ in range(count):
        call()
    marks[1].record()
    torch.cuda.synchronize()
    return marks[0].elapsed_time(marks[1]) / count
