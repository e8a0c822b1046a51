"""CUDA attention on a GPU: its bits over layouts and against Triton's, and its speed beside Triton, cuDNN and flash.

`checks(device)` yields (name, ok, detail); `timings(device)` yields dict(kernel, shape, ours_us, baseline, baseline_us,
floor_us). Method, shapes and counts: tests/bench/kernels_attention.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import median

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from rlspec.device import cuda_attention as cuda
from rlspec.kernels import attention as triton
from tests.bench import gpu
from tests.bench import kernels_attention as bench

BACKENDS = (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION))
# Query heads, key heads, width, dtype, window, sinks.
KINDS: tuple[tuple[int, int, int, torch.dtype, int | None, bool], ...] = (
    (32, 8, 128, torch.bfloat16, None, False),
    (8, 8, 64, torch.float16, None, True),
    (6, 2, 128, torch.bfloat16, 200, True),
    (10, 2, 64, torch.bfloat16, None, False),
    (32, 1, 128, torch.float16, 70, False),
    (4, 2, 16, torch.bfloat16, None, False),
    (12, 4, 32, torch.float16, None, True),
)
BORDERS = (1, 2, 63, 64, 65, 511, 512, 513, 1000, 1024, 1025, 4095, 4096, 4097, 5119, 5120, 5121)
LENGTH = 5300


def checks(device: torch.device) -> Iterator[tuple[str, bool, str]]:
    for kind in KINDS:
        yield from _forward(device, *kind)
        yield from _backward(device, *kind)


def _sample(
    device: torch.device, length: int, heads: int, kv_heads: int, width: int, dtype: torch.dtype
) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(bench.SEED + length + width)
    counts = (heads, kv_heads, kv_heads, heads)
    return [torch.randn(1, length, n, width, device=device, generator=generator).to(dtype) for n in counts]


def _forward(
    device: torch.device, heads: int, kv_heads: int, width: int, dtype: torch.dtype, window: int | None, sunk: bool
) -> Iterator[tuple[str, bool, str]]:
    """One sample alone, against Triton, fp64, chunks, decode, pages, and NaN neighbours on both sides."""
    tag = f"cuda attention {heads}/{kv_heads} {width} {str(dtype)[6:]} window {window} sinks {sunk}"
    q, k, v, _ = _sample(device, LENGTH, heads, kv_heads, width, dtype)
    sinks = torch.linspace(-1, 1, heads, device=device) if sunk else None
    options = {"scale": width**-0.5, "window": window, "sinks": sinks}
    whole = bench._table([(0, 0, LENGTH, 0, LENGTH)], device)
    want = cuda.forward(q, k, v, whole, **options)
    yield f"{tag}: repeats", _same(want, cuda.forward(q, k, v, whole, **options)), ""
    longer = cuda.forward(q, k, v, whole, max_query=LENGTH - 90, **options)
    good = all(
        bool(x[:, -90:].isnan().all()) and _same([x[:, :-90]], [y[:, :-90]]) for x, y in zip(longer, want, strict=True)
    )
    yield f"{tag}: more than promised is NaN", good, ""
    yield f"{tag}: another stream", _same(want, _elsewhere(lambda: cuda.forward(q, k, v, whole, **options))), ""
    yield f"{tag}: equals triton", *_differences(want, triton.forward(q, k, v, whole, **options))
    if heads <= 8:  # the exact formula takes a matrix of scores a head
        short = [x[:, :1500] for x in (q, k, v)]
        exact = bench._exact(*short, width**-0.5, window, sinks)
        error = ((want[0][:, :1500].double() - exact).norm() / exact.norm()).item()
        yield f"{tag}: accuracy", error <= torch.finfo(dtype).eps, f"relative error {error:.2e}"

    bad = []
    for start, stop in ((0, 700), (700, 1301), (1301, 2509), (2509, LENGTH)):
        cell = slice(start, stop)
        table = bench._table([(0, 0, stop - start, 0, stop)], device)
        found = cuda.forward(q[:, cell], k[:, :stop], v[:, :stop], table, **options)
        bad += [] if _same(found, (want[0][:, cell], want[1][:, cell])) else [stop]
    yield f"{tag}: chunks", not bad, f"differs at {bad}"

    bad = []
    for keys in BORDERS:
        count = min(keys, 1 + keys % 8)
        cell = slice(keys - count, keys)
        cache = [torch.full_like(x, torch.nan) for x in (k, v)]
        for full, part in zip(cache, (k, v), strict=True):
            full[:, :keys] = part[:, :keys]
        table = bench._table([(0, 0, count, 0, keys)], device)
        arguments = (q[:, cell], cuda._Cache(*cache, None, 0), table, width**-0.5, count)
        for split, bound in ((True, LENGTH), (False, LENGTH), (None, keys), (None, min(LENGTH, keys + 1500))):
            found = cuda._forward(*arguments, bound, sinks, window, split=split)
            bad += [] if _same(found, (want[0][:, cell], want[1][:, cell])) else [(keys, split, bound)]
    yield f"{tag}: decode of 1..8", not bad, f"differs at {bad}"

    bad = []
    for page in (8, 16, 64, 256):
        stores, order = _paged((k, v), page)
        for count, keys in ((5, LENGTH), (1700, LENGTH), (1, 1030), (2, 3600)):
            table, cell = bench._table([(0, 0, count, 0, keys)], device), slice(keys - count, keys)
            found = cuda.paged(q[:, cell], *stores, order, table, max_key=keys, **options)
            bad += [] if _same(found, (want[0][:, cell], want[1][:, cell])) else [(page, count, keys)]
    yield f"{tag}: pages", not bad, f"differs at {bad}"

    entries, wide = _packed((q, k, v), LENGTH)
    found, marks = cuda.forward(*wide, bench._table(entries, device), **options)
    good = all(
        _same((found[r, s : s + n], marks[r, s : s + n]), (want[0][0, :n], want[1][0, :n])) for r, s, n, _, _ in entries
    )
    good &= not bool(found[0, :33].any()) and bool((marks[2, :900] == -torch.inf).all())
    yield f"{tag}: packed, padded, NaN pads", good, "three rows"


def _backward(
    device: torch.device, heads: int, kv_heads: int, width: int, dtype: torch.dtype, window: int | None, sunk: bool
) -> Iterator[tuple[str, bool, str]]:
    length, tag = 1001, f"cuda attention backward {heads}/{kv_heads} {width} {str(dtype)[6:]} window {window}"
    q, k, v, grad = _sample(device, length, heads, kv_heads, width, dtype)
    whole, options = bench._table([(0, 0, length, 0, length)], device), {"scale": width**-0.5, "window": window}
    out, lse = cuda.forward(q, k, v, whole, **options)
    want = cuda.backward(q, k, v, out, lse, grad, whole, **options)
    yield f"{tag}: repeats", _same(want, cuda.backward(q, k, v, out, lse, grad, whole, **options)), ""
    yield f"{tag}: equals triton", *_differences(want, triton.backward(q, k, v, out, lse, grad, whole, **options))

    double = [x.double().requires_grad_() for x in (q, k, v)]
    exact = torch.autograd.grad(bench._differentiable(*double, width**-0.5, window), double, grad.double())
    errors = [((a.double() - b).norm() / b.norm()).item() for a, b in zip(want, exact, strict=True)]
    yield f"{tag}: accuracy", max(errors) <= 5e-3, " ".join(f"{e:.2e}" for e in errors)

    entries, wide = _packed((q, k, v, grad), length)
    table = bench._table(entries, device)
    found = cuda.backward(*wide[:3], *cuda.forward(*wide[:3], table, **options), wide[3], table, **options)
    good = all(
        _same([x[r, s : s + n] for x in found], [x[0] for x in want]) for r, s, n, _, _ in entries if n == length
    )
    good &= all(not bool(x[0, :33].any()) and not bool(x[2, :900].any()) for x in found)
    yield f"{tag}: packed, padded, NaN pads", good, ""


def _packed(parts: Sequence[Tensor], length: int) -> tuple[list[tuple[int, int, int, int, int]], list[Tensor]]:
    """Three rows of NaN that hold the sample four times: padded on either side, and behind its own first tokens."""
    first = min(length // 3, 900)
    spans = (0, 33, length), (1, 0, first), (1, first, length), (2, 900, length)
    wide = [torch.full((3, length + 900, *x.shape[2:]), torch.nan, dtype=x.dtype, device=x.device) for x in parts]
    for full, part in zip(wide, parts, strict=True):
        for row, start, count in spans:
            full[row, start : start + count] = part[0, :count]
    return [(row, start, count, start, count) for row, start, count in spans], wide


def _paged(parts: Sequence[Tensor], page: int) -> tuple[list[Tensor], Tensor]:
    """The tokens in shuffled pages of NaN, and the list of the pages."""
    length, device = parts[0].shape[1], parts[0].device
    pages = -(-length // page)
    order = torch.randperm(pages + 3, device=device)[:pages]
    stores = []
    for part in parts:
        padded = torch.full((pages * page, *part.shape[2:]), torch.nan, dtype=part.dtype, device=device)
        padded[:length] = part[0]
        stores.append(torch.full((pages + 3, page, *part.shape[2:]), torch.nan, dtype=part.dtype, device=device))
        stores[-1][order] = padded.view(pages, page, *part.shape[2:])
    return stores, order.to(torch.int32)[None]


def _elsewhere(call: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = call()
    torch.cuda.current_stream().wait_stream(stream)
    return found


def _same(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def _differences(left: Sequence[Tensor], right: Sequence[Tensor]) -> tuple[bool, str]:
    counts = [int((a != b).sum()) for a, b in zip(left, right, strict=True)]
    return not any(counts), " ".join(f"{count} of {a.numel()}" for count, a in zip(counts, left, strict=True))


def timings(device: torch.device) -> Iterator[dict[str, object]]:
    for rows, length in bench.PREFILL:
        yield from _prefill(device, rows, length)
    for rows, length in bench.DECODE:
        yield from _decode(device, rows, length)


def _prefill(device: torch.device, rows: int, length: int) -> Iterator[dict[str, object]]:
    q, k, v = bench._sample(device, rows, length, length, 128, torch.bfloat16)
    grad = torch.randn_like(q)
    table = bench._table([(row, 0, length, 0, length) for row in range(rows)], device)
    options = {"scale": 128**-0.5}
    flop = 2 * rows * bench.HEADS * length * length * 128
    out, lse = cuda.forward(q, k, v, table, **options)
    shape = f"B{rows} S{length} H{bench.HEADS}/{bench.KV_HEADS} D128"
    turned = [x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v)]
    forwards = {name: bench._sdpa(turned, backend, True) for name, backend in BACKENDS}
    forwards["triton"] = lambda: triton.forward(q, k, v, table, **options)
    backwards = {name: _sdpa_backward(turned, grad, backend) for name, backend in BACKENDS}
    backwards["triton"] = lambda: triton.backward(q, k, v, out, lse, grad, table, **options)
    for name, call in forwards.items():
        ours, theirs = bench._alternate(lambda: cuda.forward(q, k, v, table, **options), call)
        yield bench._row("cuda attention forward", shape, ours, name, theirs, flop / bench.FLOPS * 1e6)
    for name, call in backwards.items():
        ours, theirs = bench._alternate(lambda: cuda.backward(q, k, v, out, lse, grad, table, **options), call)
        yield bench._row("cuda attention backward", shape, ours, name, theirs, 2.5 * flop / bench.FLOPS * 1e6)


def _sdpa_backward(tensors: list[Tensor], grad: Tensor, backend: SDPBackend) -> Callable[[], object]:
    with sdpa_kernel(backend):
        out = scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True)
    return lambda: torch.autograd.grad(out, tensors, grad.transpose(1, 2), retain_graph=True)


def _decode(device: torch.device, rows: int, length: int) -> Iterator[dict[str, object]]:
    size = 2 * rows * length * bench.KV_HEADS * 128 * 2
    copies = max(2, min(16, -(-200_000_000 // size)))
    sets = [bench._sample(device, rows, 1, length, 128, torch.bfloat16) for _ in range(copies)]
    table = bench._table([(row, 0, 1, 0, length) for row in range(rows)], device)
    shape = f"B{rows} L{length} H{bench.HEADS}/{bench.KV_HEADS} D128"
    turned = [[x.transpose(1, 2) for x in one] for one in sets]
    calls: dict[str, list[Callable[[], object]]] = {
        "cuda": [lambda x=x: cuda.forward(*x, table, scale=128**-0.5) for x in sets],
        "triton": [lambda x=x: triton.forward(*x, table, scale=128**-0.5) for x in sets],
        **{name: [bench._sdpa(one, backend, False) for one in turned] for name, backend in BACKENDS},
    }
    times = {name: median(bench._graph(each) for _ in range(3)) for name, each in calls.items()}
    for name in ("triton", "cudnn", "flash"):
        yield bench._row("cuda attention decode", shape, times["cuda"], name, times[name], size / bench.BYTES * 1e6)


if __name__ == "__main__":
    gpu.needed("kernels are checked and timed on a CUDA device")
    device = torch.device("cuda")
    for name, ok, detail in checks(device):
        print("ok  " if ok else "FAIL", name, detail, flush=True)
    for line in bench.report(timings(device)):
        print(line, flush=True)
