"""Attention on a GPU: its bits over tiles, layouts and batches, and its speed beside cuDNN and flash SDPA.

`checks(device)` yields (name, ok, detail) of Triton's kernels; `timings(device)` yields rows of both families, Triton
and CUDA, beside the same readings of cuDNN and flash. Timing: clock.py; decode in a CUDA graph over copies of the cache
that do not fit into L2. TFLOP/s count the causal half, 2 products forward, 5 backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from rlspec.device import cuda_attention, native
from rlspec.kernels import attention as kernel
from tests.bench import clock, gpu

HEADS, KV_HEADS = 32, 8
FLOPS, BYTES = 790e12, 4.3e12  # what this chip reaches
PREFILL = ((1, 4096), (4, 4096), (1, 16384))
DECODE = ((1, 4096), (32, 4096), (1, 32768))
PEERS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
SEED = 20261129


def checks(device: torch.device) -> Iterator[tuple[str, bool, str]]:
    for kind in KINDS:
        yield from kind(device)


def _sample(device: torch.device, rows: int, queries: int, keys: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(SEED + keys + width)
    shapes = (rows, queries, HEADS), (rows, keys, KV_HEADS), (rows, keys, KV_HEADS)
    return [torch.randn(*s, width, device=device, generator=generator).to(dtype) for s in shapes]


def _table(entries: list[tuple[int, int, int, int, int]], device: torch.device) -> Tensor:
    return torch.tensor(entries, dtype=torch.int32, device=device)


def _same(left: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def _layouts(
    device: torch.device, width: int, dtype: torch.dtype, window: int | None
) -> Iterator[tuple[str, bool, str]]:
    """One sample of 5000 keys alone, against chunks, decode, paged decode, and NaN neighbours on both sides."""
    length, tag = 5000, f"attention {width} {str(dtype)[6:]} window {window}"
    q, k, v = _sample(device, 1, length, length, width, dtype)
    sinks = torch.linspace(-1, 1, HEADS, device=device)
    options = {"scale": width**-0.5, "window": window, "sinks": sinks}
    out, lse = kernel.forward(q, k, v, _table([(0, 0, length, 0, length)], device), **options)

    want, peak = _exact(q, k, v, width**-0.5, window, sinks), torch.finfo(dtype).eps
    error = ((out.double() - want).norm() / want.norm()).item()
    yield f"{tag}: accuracy", error <= max(4e-6, peak), f"relative error {error:.2e}"

    at = 0
    good = True
    for size in (700, 1201, 2608, 491):
        at += size
        cell, table = slice(at - size, at), _table([(0, 0, size, 0, at)], device)
        chunk = kernel.forward(q[:, cell], k[:, :at], v[:, :at], table, **options)
        good &= _same(chunk, (out[:, cell], lse[:, cell]))
    yield f"{tag}: chunks", good, "700, 1201, 2608, 491"

    bad = []
    for keys in (1, 2, 63, 64, 65, 511, 512, 513, 1000, 1024, 1025, 4095, 4096, 4097, 4999):
        count = min(keys, 1 + keys % 8)
        one = q[:, keys - count : keys]
        cell = slice(keys - count, keys)
        cache = [torch.full_like(x[:, :4999], torch.nan) for x in (k, v)]
        for full, part in zip(cache, (k, v), strict=True):
            full[:, :keys] = part[:, :keys]
        table = _table([(0, 0, count, 0, keys)], device)
        found = [kernel.forward(one, *cache, table, **options)]
        paged = kernel._Cache(*cache, None, 0)
        for split in (False, True):
            found.append(kernel._forward(one, paged, table, width**-0.5, count, 4999, sinks, window, split=split))
        if dtype != torch.float32 and window is None and count * HEADS // KV_HEADS <= kernel.AHEAD_ROWS:
            chosen = {"split": True, "ahead": True}
            found.append(kernel._forward(one, paged, table, width**-0.5, count, 4999, sinks, window, **chosen))
        if not all(_same(x, (out[:, cell], lse[:, cell])) for x in found):
            bad.append(keys)
    yield f"{tag}: decode of 1..8", not bad, f"differs at {bad}"

    for page in (16, 64, 256):
        pages = -(-length // page)
        order = torch.randperm(pages + 3, device=device)[:pages].to(torch.int32)
        store = [torch.full((pages + 3, page, KV_HEADS, width), torch.nan, dtype=dtype, device=device) for _ in "kv"]
        for full, part in zip(store, (k, v), strict=True):
            for number, place in enumerate(order.tolist()):
                piece = part[0, number * page : (number + 1) * page]
                full[place, : len(piece)] = piece
        good = True
        for count in (5, 3000):
            table = _table([(0, 0, count, 0, length)], device)
            found = kernel.paged(q[:, -count:], *store, order[None], table, **options)
            good &= _same(found, (out[:, -count:], lse[:, -count:]))
        yield f"{tag}: pages of {page}", good, "decode of 5 and a chunk of 3000"

    wide = [torch.full((3, length + 900, *x.shape[2:]), torch.nan, dtype=dtype, device=device) for x in (q, k, v)]
    for full, part in zip(wide, (q, k, v), strict=True):
        full[0, 33 : 33 + length] = part[0]
        full[1, :777] = part[0, :777]
        full[1, 777 : 777 + length] = part[0]
        full[2, 900:] = part[0]
    spans = (0, 33, length), (1, 0, 777), (1, 777, length), (2, 900, length)
    entries = [(row, start, count, start, count) for row, start, count in spans]
    found, marks = kernel.forward(*wide, _table(entries, device), **options)
    good = all(_same((found[r, s : s + n], marks[r, s : s + n]), (out[0, :n], lse[0, :n])) for r, s, n, _, _ in entries)
    good &= not bool(found[0, :33].any()) and not bool(found[1, 777 + length :].any())
    good &= bool((marks[2, :900] == -torch.inf).all())
    yield f"{tag}: packed, padded, NaN pads", good, "three rows"


def _exact(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, sinks: Tensor | None) -> Tensor:
    length, out = q.shape[1], torch.empty(q.shape, dtype=torch.float64, device=q.device)
    group = q.shape[2] // k.shape[2]
    place = torch.arange(length, device=q.device)
    apart = place[:, None] - place[None, :]
    seen = (apart >= 0) if window is None else (apart >= 0) & (apart < window)
    for head in range(q.shape[2]):
        scores = q[0, :, head].double() @ k[0, :, head // group].double().T * scale
        scores = scores.masked_fill(~seen, -torch.inf)
        total = torch.logsumexp(scores, -1)
        if sinks is not None:
            total = torch.logaddexp(total, sinks[head].double())
        out[0, :, head] = torch.exp(scores - total[:, None]) @ v[0, :, head // group].double()
    return out


def _tiles(device: torch.device, width: int) -> Iterator[tuple[str, bool, str]]:
    """Every tile and both ways to fold."""
    q, k, v = _sample(device, 2, 1300, 1300, width, torch.bfloat16)
    table = _table([(0, 0, 1300, 0, 1300), (1, 0, 1300, 0, 1300)], device)
    cache = kernel._Cache(k, v, None, 0)
    want = None
    bad = []
    tiles = [(16, 4, 2), (16, 2, 3), (32, 4, 2), (64, 4, 2), (64, 8, 2)] + [(128, 8, 2), (64, 4, 3)] * (width < 256)
    for tile in tiles:
        for split in (False, True):
            for bulk in {not split, False}:
                chosen = {"split": split, "bulk": bulk, "tile": kernel.Tile(*tile)}
                found = kernel._forward(q, cache, table, width**-0.5, 1300, 1300, None, None, **chosen)
                want = want or found
                if not _same(found, want):
                    bad.append((*tile, split, bulk))
    yield f"attention {width}: tiles", not bad, f"{len(tiles)} tiles three times, differ: {bad}"


def _backward(device: torch.device, width: int, window: int | None) -> Iterator[tuple[str, bool, str]]:
    length, tag = 1001, f"attention backward {width} window {window}"
    q, k, v = _sample(device, 1, length, length, width, torch.bfloat16)
    grad = torch.randn(q.shape, device=device, generator=torch.Generator(device).manual_seed(7)).to(q.dtype)
    table, scale = _table([(0, 0, length, 0, length)], device), width**-0.5
    options = {"scale": scale, "window": window}
    out, lse = kernel.forward(q, k, v, table, **options)
    want = kernel.backward(q, k, v, out, lse, grad, table, **options)
    again = kernel.backward(q, k, v, out, lse, grad, table, **options)
    yield f"{tag}: repeats", _same(want, again), ""

    double = [x.double().requires_grad_() for x in (q, k, v)]
    exact = torch.autograd.grad(_differentiable(*double, scale, window), double, grad.double())
    errors = [((a.double() - b).norm() / b.norm()).item() for a, b in zip(want, exact, strict=True)]
    yield f"{tag}: accuracy", max(errors) <= 5e-3, " ".join(f"{e:.2e}" for e in errors)

    parts = (q, k, v, grad)
    wide = [torch.full((3, 2 * length + 50, *x.shape[2:]), torch.nan, dtype=x.dtype, device=device) for x in parts]
    spans = [(0, 37, length), (1, 0, 500), (1, 500, length), (2, length + 50, length)]
    for full, part in zip(wide, parts, strict=True):
        for row, start, count in spans:
            full[row, start : start + count] = part[0, :count]
    entries = _table([(r, s, n, s, n) for r, s, n in spans], device)
    out2, lse2 = kernel.forward(*wide[:3], entries, **options)
    found = kernel.backward(*wide[:3], out2, lse2, wide[3], entries, **options)
    whole = [(row, slice(start, start + count)) for row, start, count in spans if count == length]
    good = all(torch.equal(a[r, cell], b[0]) for r, cell in whole for a, b in zip(found, want, strict=True))
    good &= all(not bool(x[0, :37].any()) and not bool(x[2, : length + 50].any()) for x in found)
    yield f"{tag}: packed, padded, NaN pads", good, ""

    bad = []
    tiles = [(64, 4, 1), (64, 8, 1)] + [(64, 4, 2), (64, 4, 3), (128, 8, 2), (128, 8, 3)] * (width < 256)
    for one in tiles:
        chosen = {"dq_tile": kernel.Tile(*one), "dkv_tile": kernel.Tile(64, *one[1:])}
        for bulk in (False, True):
            found = kernel._backward(q, k, v, out, lse, grad, table, scale, length, length, window, bulk=bulk, **chosen)
            if not _same(found, want):
                bad.append((*one, bulk))
    yield f"{tag}: tiles", not bad, f"{len(tiles)} tiles twice, differ: {bad}"


def _graphs(device: torch.device) -> Iterator[tuple[str, bool, str]]:
    yield "attention: captured in a graph", *_captured(device)


def _captured(device: torch.device) -> tuple[bool, str]:
    """Prefill of a packed batch, decode and backward in one graph, replayed on other inputs."""
    length, scale = 1001, 128**-0.5
    q, k, v = _sample(device, 2, length, length, 128, torch.bfloat16)
    table = _table([(0, 0, 300, 0, 300), (0, 300, 701, 300, 701), (1, 5, 900, 5, 900)], device)
    one = _table([(0, 0, 1, 300, 701), (1, 0, 1, 5, 900)], device)

    def work() -> list[Tensor]:
        out, lse = kernel.forward(q, k, v, table, scale=scale)
        decoded = kernel.forward(q[:, :1], k, v, one, scale=scale)
        return [out, lse, *decoded, *kernel.backward(q, k, v, out, lse, q, table, scale=scale)]

    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = work()
    for tensor in (q, k, v):
        tensor.copy_(torch.randn_like(tensor))
    graph.replay()
    bad = [number for number, (a, b) in enumerate(zip(work(), held, strict=True)) if not torch.equal(a, b)]
    return not bad, f"results {bad} differ" if bad else ""


def _differentiable(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    group = q.shape[2] // k.shape[2]
    k, v = (x[0].repeat_interleave(group, 1) for x in (k, v))
    place = torch.arange(q.shape[1], device=q.device)
    apart = place[:, None] - place[None, :]
    seen = (apart >= 0) if window is None else (apart >= 0) & (apart < window)
    scores = torch.einsum("qhd,khd->hqk", q[0], k) * scale
    return torch.einsum("hqk,khd->qhd", torch.softmax(scores.masked_fill(~seen, -torch.inf), -1), v)[None]


KINDS: tuple[Callable[[torch.device], Iterator[tuple[str, bool, str]]], ...] = (
    *(partial(_layouts, width=width, dtype=torch.bfloat16, window=None) for width in (64, 128, 256)),
    partial(_layouts, width=128, dtype=torch.float16, window=None),
    partial(_layouts, width=64, dtype=torch.float32, window=None),
    partial(_layouts, width=128, dtype=torch.bfloat16, window=200),
    *(partial(_tiles, width=width) for width in (64, 128, 256)),
    *(partial(_backward, width=width, window=window) for width, window in ((128, None), (64, 200), (256, None))),
    _graphs,
)


def timings(device: torch.device) -> Iterator[dict[str, object]]:
    families = {"triton": kernel} | ({} if native.missing(device) else {"cuda": cuda_attention})
    for rows, length in PREFILL:
        yield from _prefill(device, families, rows, length)
    for rows, length in DECODE:
        yield from _decode(device, families, rows, length)


def _prefill(device: torch.device, families: dict[str, Any], rows: int, length: int) -> Iterator[dict[str, object]]:
    q, k, v = _sample(device, rows, length, length, 128, torch.bfloat16)
    grad = torch.randn_like(q)
    table = _table([(row, 0, length, 0, length) for row in range(rows)], device)
    scale, flop = 128**-0.5, 2 * rows * HEADS * length * length * 128
    out, lse = kernel.forward(q, k, v, table, scale=scale)
    shape = f"B{rows} S{length} H{HEADS}/{KV_HEADS} D128"
    theirs = [x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v)]
    ours = {name: partial(one.forward, q, k, v, table, scale=scale) for name, one in families.items()}
    peers = {name: _sdpa(theirs, backend, True) for name, backend in PEERS.items()}
    yield from _beside("attention forward", shape, ours, peers, flop / FLOPS * 1e6)
    ours = {name: partial(one.backward, q, k, v, out, lse, grad, table, scale=scale) for name, one in families.items()}
    peers = {name: _sdpa_backward(theirs, grad, backend) for name, backend in PEERS.items()}
    yield from _beside("attention backward", shape, ours, peers, 2.5 * flop / FLOPS * 1e6)


def _sdpa_backward(tensors: list[Tensor], grad: Tensor, backend: SDPBackend) -> Callable[[], object]:
    with sdpa_kernel(backend):
        out = scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True)
    return lambda: torch.autograd.grad(out, tensors, grad.transpose(1, 2), retain_graph=True)


def _decode(device: torch.device, families: dict[str, Any], rows: int, length: int) -> Iterator[dict[str, object]]:
    size = 2 * rows * length * KV_HEADS * 128 * 2
    copies = max(2, min(16, -(-200_000_000 // size)))
    sets = [_sample(device, rows, 1, length, 128, torch.bfloat16) for _ in range(copies)]
    turned = [[x.transpose(1, 2) for x in one] for one in sets]
    table = _table([(row, 0, 1, 0, length) for row in range(rows)], device)
    ours = {name: [partial(one.forward, *x, table, scale=128**-0.5) for x in sets] for name, one in families.items()}
    peers = {name: [_sdpa(one, backend, False) for one in turned] for name, backend in PEERS.items()}
    shape = f"B{rows} L{length} H{HEADS}/{KV_HEADS} D128"
    yield from _beside("attention decode", shape, ours, peers, size / BYTES * 1e6)


def _beside(
    kernel_name: str, shape: str, ours: dict[str, Any], peers: dict[str, Any], floor: float
) -> Iterator[dict[str, object]]:
    """A row for each family and peer; lists of calls run in a graph."""
    sides = {**ours, **peers}
    times = clock.there_and_back(
        {name: clock.graph(call) if isinstance(call, list) else (call, 1) for name, call in sides.items()}
    )
    for name in ours:
        for peer in peers:
            yield {"backend": name, **_row(kernel_name, shape, times[name], peer, times[peer], floor)}


def _sdpa(tensors: list[Tensor], backend: SDPBackend, causal: bool) -> Callable[[], object]:
    def call() -> object:
        with sdpa_kernel(backend), torch.no_grad():
            return scaled_dot_product_attention(*tensors, is_causal=causal, enable_gqa=True)

    return call


def _row(kernel_name: str, shape: str, ours: float, baseline: str, theirs: float, floor: float) -> dict[str, object]:
    return {
        "kernel": kernel_name,
        "shape": shape,
        "ours_us": ours,
        "baseline": baseline,
        "baseline_us": theirs,
        "floor_us": floor,
    }


def _alternate(ours: Callable[[], object], theirs: Callable[[], object]) -> tuple[float, float]:
    times = clock.there_and_back({"ours": (ours, 1), "theirs": (theirs, 1)})
    return times["ours"], times["theirs"]


def _graph(calls: list[Callable[[], object]]) -> float:
    return clock.steady(*clock.graph(calls))


def report(rows: Iterable[dict[str, object]]) -> Iterator[str]:
    """Lines of a markdown table."""
    yield "| kernel | shape | ours us | baseline | us | time ratio | floor us |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        ratio = row["ours_us"] / row["baseline_us"]  # type: ignore[operator]
        numbers = row["ours_us"], row["baseline"], row["baseline_us"], ratio, row["floor_us"]
        yield (
            f"| {row['kernel']} | {row['shape']} | "
            + " | ".join(x if isinstance(x, str) else f"{x:.2f}" for x in numbers)
            + " |"
        )


if __name__ == "__main__":
    gpu.needed("kernels are checked and timed on a CUDA device")
    device = torch.device("cuda")
    for name, ok, detail in checks(device):
        print("ok  " if ok else "FAIL", name, detail, flush=True)
    for line in report(timings(device)):
        print(line, flush=True)
