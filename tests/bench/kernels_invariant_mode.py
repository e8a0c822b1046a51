"""The part `invariant_mode` of bench_kernels.py: a Qwen3 model of transformers outside and inside the mode, and the row
reductions that the mode brings along.

Timings: the model as it is against the model inside the mode, so that what Python adds to each call is in the figure,
and a forward in a CUDA graph, where it is not. Row reductions at 16384 rows against torch; floor: bytes over 4.3 TB/s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlspec.device.invariant_mode import invariant_mode
from rlspec.kernels import row_reductions as rows
from tests.bench.clock import steady, there_and_back

LENGTHS = (17, 300, 64, 1, 130, 33, 512, 255)
VOCABULARY = 32000
BYTES_PER_US = 4.3e6
HEAT = (50e3, 100e3)
OPERATORS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "row_sum": (rows.row_sum, lambda x: x.sum(-1)),
    "row_mean": (rows.row_mean, lambda x: x.mean(-1)),
    "softmax": (rows.softmax, lambda x: torch.softmax(x, -1)),
    "log_softmax": (rows.log_softmax, lambda x: torch.log_softmax(x, -1)),
}

Sample = tuple[Tensor, ...]


def checks(device: torch.device) -> Iterator[tuple[str, bool, str]]:
    """Row reductions, the model in all its layouts inside the mode, and its difference outside."""
    for kind in KINDS:
        yield from kind(device)


def _layouts(device: torch.device) -> Iterator[tuple[str, bool, str]]:
    model = _qwen3(device)
    samples = _samples(device)
    alone = [_results(model, [sample])[0] for sample in samples]
    layouts = {left: _results(model, samples, left) for left in (False, True)}
    apart = [_differing(one, other) for one, other in zip(layouts[True], alone, strict=True)]
    yield "outside the mode a sample is not the same in a batch", any(map(sum, apart)), str(apart)
    with invariant_mode():
        alone = [_results(model, [sample])[0] for sample in samples]
        again = [_results(model, [sample])[0] for sample in samples]
        layouts = {left: _results(model, samples, left) for left in (False, True)}
        some = {left: _results(model, samples[2:5], left) for left in (False, True)}
        decoded = _decoded(model, samples[2])
    plain = [_results(model, [sample])[0] for sample in samples]
    yield "it repeats", not any(sum(_differing(*pair)) for pair in zip(again, alone, strict=True)), ""
    for left in (False, True):
        for name, found, gold in (("8", layouts[left], alone), ("3", some[left], alone[2:5])):
            apart = [_differing(one, other) for one, other in zip(found, gold, strict=True)]
            side = "left" if left else "right"
            what = f"logits, log-probs, input gradients: {name} samples padded on the {side} as alone"
            yield what, not any(map(sum, apart)), f"differing elements a sample: {apart}"
    yield "decoding with a cache as the whole", torch.equal(decoded, alone[2][0][-len(decoded) :]), ""
    for place, name in enumerate(("logits", "log-probs", "input gradients")):
        error = max(_relative(one[place], other[place]) for one, other in zip(alone, plain, strict=True))
        yield f"{name}: near those outside the mode", error <= 1e-1, f"{error:.2e}"


def timings(device: torch.device) -> Iterator[dict[str, Any]]:
    """A forward, and a forward with backward, in and out of the mode; in a graph; row reductions."""
    model, samples = _qwen3(device), _samples(device)
    for name, batch in (("8 padded samples", samples), ("1 sample of 512", samples[6:7])):
        ids, mask, positions = _padded(batch, left=True)

        def forward(ids: Tensor = ids, mask: Tensor = mask, positions: Tensor = positions) -> Tensor:
            return model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits

        def both(run: Callable[[], Tensor] = forward) -> None:
            run().square().sum().backward()

        for what, run in (("forward", torch.no_grad()(forward)), ("forward + backward", both)):
            outside = steady(run, heat=HEAT)
            with invariant_mode():
                inside = steady(run, heat=HEAT)
            yield _row(f"qwen3, 4 layers, {what}", name, inside, "outside the mode", outside, None)
    ids = samples[6][None]
    outside = steady(_captured(model, ids))
    with invariant_mode():
        replay = _captured(model, ids)
    inside = steady(replay)
    yield _row("qwen3, 4 layers, forward in a graph", "1 sample of 512", inside, "outside the mode", outside, None)
    for width in (128, 4096):
        x = torch.randn(16384 * 4096 // width, width, device=device)
        for name, ways in OPERATORS.items():
            moved = x.numel() * 4 * (2 if "softmax" in name else 1)
            calls = [partial(way, x) for way in ways]
            times = there_and_back({"ours": (calls[0], 1), "torch": (calls[1], 1)}, HEAT)
            shape = f"{x.shape[0]} x {width} fp32"
            yield _row(name, shape, times["ours"], "torch", times["torch"], moved / BYTES_PER_US)


def _captured(model: Any, ids: Tensor) -> Callable[[], Any]:
    """The replay of a forward: what the kernels take, without Python.

    transformers that is given no mask makes one in a capture, and the mode would have to read it there.
    """
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril()[None, None]
    with torch.no_grad():
        with torch.cuda.stream(side):
            model(input_ids=ids, attention_mask=mask, use_cache=False)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            model(input_ids=ids, attention_mask=mask, use_cache=False)
    return graph.replay


def _reductions(device: torch.device) -> Iterator[tuple[str, bool, str]]:
    for dtype in (torch.bfloat16, torch.float32):
        for width in (128, 1024, 4096, 32000):
            x = torch.randn(300, width, device=device).to(dtype)
            for name, (ours, torchs) in OPERATORS.items():
                whole, slope = _with_slope(ours, x)
                shifted = torch.full((300, width + 3), torch.nan, device=device, dtype=dtype)
                shifted[:, 1 : width + 1] = x
                parts = [x[:1], x[299:], x[7:150:3], shifted[20:90, 1 : width + 1]]
                golds = [slice(0, 1), slice(299, 300), slice(7, 150, 3), slice(20, 90)]
                pairs = [(_with_slope(ours, part), (whole[at], slope[at])) for part, at in zip(parts, golds)]  # noqa: B905
                ok = all(torch.equal(a, b) for found, gold in pairs for a, b in zip(found, gold, strict=True))
                error = _relative(whole, torchs(x.double()))
                limit = 4e-3 if dtype == torch.bfloat16 else 1e-6
                yield f"{name}, {width} columns of {dtype}: bits and error", ok and error <= limit, f"{error:.2e}"
    kernels = rows._sum, rows._softmax, rows._softmax_gradient

    def compiled(count: int) -> int:
        for ours, _ in OPERATORS.values():
            _with_slope(ours, torch.randn(count, 1024, device=device))
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    counts = [compiled(count) for count in (5, 1, 2, 16, 17, 64)]
    yield "row reductions: no compilation for a new row count", len(set(counts)) == 1, str(counts)


KINDS = (_reductions, _layouts)


def _with_slope(operator: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    y = operator(x)
    dy = torch.cos(y.detach().float() * 3).to(y.dtype)
    return y.detach(), torch.autograd.grad(y, x, dy)[0]


def _qwen3(device: torch.device) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=8,
        head_dim=128, vocab_size=VOCABULARY, initializer_range=0.05, attn_implementation="sdpa",
    )  # fmt: skip
    return Qwen3ForCausalLM(config).to(device, torch.bfloat16).eval()


def _samples(device: torch.device) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randint(VOCABULARY, (length,)).to(device) for length in LENGTHS]


def _padded(samples: list[Tensor], left: bool) -> Sample:
    """Ids, mask and positions [B, T]."""
    width = max(map(len, samples))
    places = [(width - len(one), 0) if left else (0, width - len(one)) for one in samples]
    ids = torch.stack([F.pad(one, place) for one, place in zip(samples, places, strict=True)])
    mask = torch.stack([F.pad(torch.ones_like(one), place) for one, place in zip(samples, places, strict=True)])
    return ids, mask, (mask.cumsum(-1) - 1).clamp(min=0)


def _results(model: Any, samples: list[Tensor], left: bool = True) -> list[Sample]:
    """Logits, log-probs of the tokens, and the gradient of the embedded inputs of each sample, without its pads."""
    ids, mask, positions = _padded(samples, left)
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    logits = model(inputs_embeds=embedded, attention_mask=mask, position_ids=positions, use_cache=False).logits
    scores = F.log_softmax(logits.float(), -1)
    live = mask.bool()
    upstream, chosen = torch.zeros_like(logits), []
    for row, sample in enumerate(samples):
        generator = torch.Generator(logits.device).manual_seed(len(sample))
        noise = torch.randn(len(sample), VOCABULARY, device=logits.device, generator=generator)
        upstream[row, live[row]] = noise.to(logits.dtype)
        chosen.append(scores[row, live[row]].gather(-1, sample[:, None]).detach())
    (slope,) = torch.autograd.grad(logits, embedded, upstream)
    return [
        (logits[row, live[row]].detach(), chosen[row], slope[row, live[row]]) for row in range(len(samples))
    ]  # fmt: skip


def _decoded(model: Any, sample: Tensor) -> Tensor:
    """Logits of the last 16 tokens, one at a time, in a batch of two of which the other has a pad on the left."""
    ids, mask, positions = _padded([sample, sample[1:]], left=True)
    start, found = len(sample) - 16, []
    with torch.no_grad():
        made = model(
            input_ids=ids[:, :start], attention_mask=mask[:, :start], position_ids=positions[:, :start], use_cache=True
        )
        for place in range(start, len(sample)):
            at = slice(place, place + 1)
            made = model(
                input_ids=ids[:, at], attention_mask=mask[:, : place + 1], position_ids=positions[:, at],
                past_key_values=made.past_key_values, use_cache=True,
            )  # fmt: skip
            found.append(made.logits[0, 0])
    return torch.stack(found)


def _differing(one: Sample, other: Sample) -> tuple[int, ...]:
    return tuple(int((a != b).sum()) for a, b in zip(one, other, strict=True))


def _relative(found: Tensor, gold: Tensor) -> float:
    return ((found.double() - gold.double()).norm() / gold.double().norm()).item()


def _row(
    kernel: str, shape: str, ours: float, baseline: str, theirs: float, floor: float | None
) -> dict[str, Any]:  # fmt: skip
    return {"kernel": kernel, "shape": shape, "ours_us": ours, "baseline": baseline, "baseline_us": theirs,
            "floor_us": floor}  # fmt: skip
