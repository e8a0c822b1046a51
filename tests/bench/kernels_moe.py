"""The part `moe` of bench_kernels.py: router, grouped_gemm and combine at the shapes of Qwen3-30B-A3B, 4096 tokens.

Timing: clock.py, CUDA graphs of eight calls. Weights of 128 experts are larger than the cache, and so are rows. Loads:
`forced`, each expert 256 rows; `even`, random; `skewed`, random with experts of unequal fame. floor: the larger of
operations over 790 TFLOP/s and bytes over 4.3 TB/s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from rlspec.kernels import combine as combining
from rlspec.kernels import grouped_gemm as grouped
from rlspec.kernels import router as routing
from rlspec.kernels.combine import combine
from rlspec.kernels.det_gemm import det_gemm
from rlspec.kernels.grouped_gemm import grouped_gemm
from rlspec.kernels.router import router
from tests.bench.clock import Call, graph, steady, there_and_back

TOKENS, HIDDEN, INNER, EXPERTS, TOP = 4096, 2048, 768, 128, 8
LOADS = ("forced", "even", "skewed")
BF16 = torch.bfloat16
HEAT = (60e3, 40e3)


def checks(device: torch.device) -> Iterator[tuple[str, bool, str]]:
    """Bits over tiles, row counts and expert loads; the dense layer's; cuts of the gradient; graphs; ties."""
    for kind in KINDS:
        yield from kind(device)


def timings(device: torch.device) -> Iterator[dict[str, Any]]:
    for columns, width in ((INNER, HIDDEN), (HIDDEN, INNER)):
        for load in LOADS:
            yield from _products(device, columns, width, load)
        yield from _few(device, columns, width)
        yield _owned(device, columns, width)
    yield from _router(device)
    yield from _combine(device)


def chosen(load: str, tokens: int = TOKENS, device: torch.device | str = "cuda") -> Tensor:
    """int64 [tokens, TOP]."""
    if load == "forced":
        return (torch.arange(tokens).view(-1, 1) + torch.arange(TOP) * (EXPERTS // TOP)).remainder(EXPERTS).to(device)
    generator = torch.Generator().manual_seed(1)
    fame = torch.randn(EXPERTS, generator=generator) * (1.5 if load == "skewed" else 0)
    return (torch.randn(tokens, EXPERTS, generator=generator) + fame).topk(TOP).indices.to(device)


def dispatched(experts: Tensor, count: int = EXPERTS) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Experts of the rows, order, inverse, offsets."""
    flat, order = experts.flatten().sort(stable=True)
    offsets = torch.searchsorted(flat, torch.arange(count + 1, device=flat.device))
    return flat, order, order.argsort(), offsets


def _tiles(device: torch.device) -> Iterator[tuple[str, bool, str]]:
    """Of each tile of the tables, fp32 out, beside the plain kernel: ragged experts, some empty."""
    experts, count = 11, 700
    flat = torch.randint(experts, (count,), device=device).float().pow(2).div(experts).long().sort().values
    offsets = torch.searchsorted(flat, torch.arange(experts + 1, device=device))
    for width, columns in ((520, 424), (4104, 136)):
        x, weight, dy = (
            _random(device, *shape) for shape in ((count, width), (experts, columns, width), (count, columns))
        )
        for along, table in ((False, grouped.TILES), (True, grouped.DATA_TILES)):
            left, out_columns = (dy, width) if along else (x, columns)
            want, bad = torch.full((count, out_columns), float("nan"), device=device), []
            tiles, schedule = grouped._table(count, offsets, grouped.PLAIN)
            schedule(device)
            grouped._plain_product(left, weight, want, offsets, tiles, along)(device)
            for _, tile in table:
                got = torch.full_like(want, float("nan"))
                tiles, schedule = grouped._table(count, offsets, tile)
                schedule(device)
                grouped._product(left, weight, got, offsets, tiles, tile, along)(device)
                bad += [] if torch.equal(got, want) else [tile]
            yield f"grouped: tiles, {width} to {columns}, along {along}", not bad, f"{bad}"
        ways = (grouped.FOLD_TILE, grouped.PLAIN)
        found = [torch.full((experts, columns, width), float("nan"), device=device) for _ in ways]
        for out, tile in zip(found, ways, strict=True):
            grouped._weight_product(dy, x, out, offsets, offsets, 0, False, tile)(device)
        gold = torch.stack([dy[flat == e].double().T @ x[flat == e].double() for e in range(experts)])
        error = float((found[0].double() - gold).norm() / gold.norm())
        same = all(torch.equal(found[0], one) for one in found[1:])
        yield f"grouped: weight gradient, {width} to {columns}", same and error < 1e-5, f"{error:.2e}"


def _loads(device: torch.device) -> Iterator[tuple[str, bool, str]]:
    """A row has the bits of the dense layer with its expert's weight, whatever the load and the number of rows."""
    weight = _random(device, EXPERTS, INNER, HIDDEN) / 32
    tokens = _random(device, TOKENS, HIDDEN)
    for load in LOADS:
        bad = []
        for count in (1, 2, 15, 16, 17, 63, 64, 127, 129, 500, 1000, TOKENS):
            flat, order, _, offsets = dispatched(chosen(load, count, device))
            rows = tokens[order // TOP]
            y = grouped_gemm(rows, weight, offsets)
            expert = int(flat[len(flat) // 2])
            mine = flat == expert
            bad += [] if torch.equal(y[mine], det_gemm(rows[mine], weight[expert])) else [count]
        yield f"grouped: {load}, rows as a dense layer has them", not bad, f"differ at {bad}" if bad else ""
    flat, order, _, offsets = dispatched(chosen("even", 1000, device))
    rows, dy = tokens[order // TOP].requires_grad_(), _random(device, len(flat), INNER)
    (dx,) = torch.autograd.grad(grouped_gemm(rows, weight, offsets), rows, dy)
    part = slice(offsets[5], offsets[6])
    alone = torch.tensor([0] * 6 + [part.stop - part.start] * (EXPERTS - 5), device=device)
    few = rows[part].detach().requires_grad_()
    (dfew,) = torch.autograd.grad(grouped_gemm(few, weight, alone), few, dy[part])
    gold = torch.einsum("mn,mnk->mk", dy[:64].double(), weight[flat[:64]].double())
    error = float((dx[:64].double() - gold).norm() / gold.norm())
    yield "grouped: data gradient of one expert alone", torch.equal(dfew, dx[part]) and error < 3e-3, f"{error:.2e}"


def _cuts(device: torch.device) -> tuple[bool, str]:
    experts = chosen("skewed", 333, device)
    x, dy = _random(device, 333 * TOP, 512), _random(device, 333 * TOP, 256)

    def total(cuts: list[int]) -> Tensor:
        gradient = grouped.Gradient(torch.zeros(EXPERTS, 256, 512, device=device))
        for begin, end in zip(cuts, cuts[1:], strict=False):
            flat, order, _, offsets = dispatched(experts[begin:end])
            gradient.add(x, dy, order + begin * TOP, flat, offsets)
        return gradient.finish()

    whole = total([0, 333])
    bad = [
        cuts
        for cuts in ([0, 1, 333], [0, 16, 40, 41, 200, 333], [*range(0, 330, 5), 333])
        if not torch.equal(total(cuts), whole)
    ]
    leaf = torch.zeros(EXPERTS, 256, 512, device=device, dtype=BF16).requires_grad_()
    flat, order, _, offsets = dispatched(experts)
    (autograd,) = torch.autograd.grad(grouped_gemm(x[order], leaf, offsets), leaf, dy[order])
    bad += [] if torch.equal(autograd, whole.to(BF16)) else ["autograd"]  # type: ignore[list-item]
    return not bad, f"differ: {bad}" if bad else ""


def _routed(device: torch.device) -> Iterator[tuple[str, bool, str]]:
    x, weight = _random(device, TOKENS, HIDDEN), _random(device, EXPERTS, HIDDEN) / 45
    dp, dw = torch.randn(TOKENS, EXPERTS, device=device), torch.randn(TOKENS, TOP, device=device)

    def both(x: Tensor, dp: Tensor, dw: Tensor) -> tuple[Tensor, ...]:
        x = x.detach().requires_grad_()
        found = router(x, weight, top_k=TOP, normalise=True)
        return *(one.detach() for one in found), *torch.autograd.grad(found[:2], x, (dp, dw))

    whole = both(x, dp, dw)
    bad = []
    for count in (1, 2, 15, 16, 17, 31, 33, 64, 127, 500, 1024, 1025):
        part = slice(3, 3 + count)
        few = both(x[part], dp[part], dw[part])
        bad += [] if all(torch.equal(a, b[part]) for a, b in zip(few, whole, strict=True)) else [count]
    yield "router: rows", not bad, f"differ at {bad}" if bad else ""
    logits = x.double() @ weight.double().T
    gold = torch.softmax(logits, -1)
    theirs = torch.softmax(x.float() @ weight.float().T, -1)
    ours, plain = (float((one.double() - gold).norm() / gold.norm()) for one in (whole[0], theirs))
    yield "router: scores as exact as fp32", ours < 2 * plain, f"{ours:.2e}, torch {plain:.2e}"
    weight[:64] = weight[64:]  # each logit twice
    _, _, experts = router(x, weight, top_k=TOP, normalise=True)
    yield "router: of equals the lower first", bool((experts[:, ::2] + 64 == experts[:, 1::2]).all()), ""
    slopes = torch.randn(TOKENS, EXPERTS, device=device)
    blocks = torch.arange(TOKENS, device=device, dtype=torch.int32).view(-1, 16)
    total, cut = torch.zeros(2, EXPERTS, HIDDEN, device=device)
    routing.fold(total, x, slopes, blocks)
    for part in blocks.split([1, 7, 100, 148]):
        routing.fold(cut, x, slopes, part)
    gold = slopes.double().T @ x.double()
    error = float((total.double() - gold).norm() / gold.norm())
    yield "router: weight gradient over cuts", torch.equal(total, cut) and error < 1e-4, f"{error:.2e}"


def _combined(device: torch.device) -> tuple[bool, str]:
    experts = chosen("even", 1000, device)
    rows, weights = _random(device, 1000, TOP, HIDDEN), torch.rand(1000, TOP, device=device)
    dy = _random(device, 1000, HIDDEN)

    def both(part: slice) -> tuple[Tensor, ...]:
        _, order, inverse, _ = dispatched(experts[part])
        leaves = rows[part].flatten(0, 1)[order].requires_grad_(), weights[part].clone().requires_grad_()
        out = combine(*leaves, inverse)
        drows, dweights = torch.autograd.grad(out, leaves, dy[part])
        return out.detach(), drows[inverse].view(-1, TOP, HIDDEN), dweights

    whole = both(slice(0, 1000))
    parts = [slice(n, m) for n, m in ((0, 1), (3, 20), (7, 700))]
    bad = [str(p) for p in parts if not all(torch.equal(a, b[p]) for a, b in zip(both(p), whole, strict=True))]
    gold = (rows.double() * weights.double().unsqueeze(-1)).sum(1)
    error = float((whole[0].double() - gold).norm() / gold.norm())
    return not bad and error < 3e-3, f"differ: {bad}, error {error:.2e}"


def _captured(device: torch.device) -> tuple[bool, str]:
    """A whole mixture of experts, forward and backward, captured; replayed where tokens go elsewhere."""
    x, gate = _random(device, 200, 512), _random(device, 16, 512) / 16
    up, down = _random(device, 16, 256, 512) / 16, _random(device, 16, 512, 256) / 16

    def work() -> list[Tensor]:
        leaves = [one.detach().requires_grad_() for one in (x, gate, up, down)]
        _, weights, experts = router(leaves[0], leaves[1], top_k=4, normalise=True)
        _, order, inverse, offsets = dispatched(experts, 16)
        rows = leaves[0].index_select(0, order // 4)
        out = combine(grouped_gemm(grouped_gemm(rows, leaves[2], offsets), leaves[3], offsets), weights, inverse)
        return [out, *torch.autograd.grad(out.float().square().sum(), leaves[1:])]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = work()
    x.copy_(_random(device, 200, 512))
    gate.copy_(_random(device, 16, 512) / 4)
    graph.replay()
    torch.cuda.synchronize()
    replayed = [one.clone() for one in held]
    bad = [index for index, one in enumerate(work()) if not torch.equal(one, replayed[index])]
    return not bad, f"results {bad} differ" if bad else ""


def _compilations(device: torch.device) -> tuple[bool, str]:
    """Row counts from 1 up must not compile anything anew, once some rows have been seen: those of one tile."""
    modules = (routing, grouped, combining)
    kernels = [one for module in modules for one in vars(module).values() if isinstance(one, triton.JITFunction)]
    gate, weight = _random(device, 16, 512), _random(device, 16, 256, 512)

    def run(count: int) -> int:
        leaves = [one.detach().requires_grad_() for one in (_random(device, count, 512), gate, weight)]
        _, weights, experts = router(leaves[0], leaves[1], top_k=4, normalise=True)
        flat, order, inverse, offsets = dispatched(experts, 16)
        out = combine(grouped_gemm(leaves[0].index_select(0, order // 4), leaves[2], offsets), weights, inverse)
        torch.autograd.grad(out.float().sum(), leaves)
        gradient = grouped.Gradient(torch.zeros(16, 256, 512, device=device))
        for _ in range(2):
            gradient.add(_random(device, 4 * count, 512), _random(device, 4 * count, 256), order, flat, offsets)
        gradient.finish()
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    counts = [run(count) for count in (5, 1, 2, 3, 7, 15, 16)]
    return len(set(counts)) == 1, str(counts)


def _others(device: torch.device) -> Iterator[tuple[str, bool, str]]:
    yield "grouped: gradients over cuts", *_cuts(device)
    yield "combine: rows", *_combined(device)
    yield "graph with other experts", *_captured(device)
    yield "no compilation for a new row count", *_compilations(device)


KINDS = (_tiles, _loads, _routed, _others)


def _products(device: torch.device, columns: int, width: int, load: str) -> Iterator[dict[str, Any]]:
    flat, _, _, offsets = dispatched(chosen(load, device=device))
    sizes, ends, count = offsets.diff().tolist(), offsets[1:].int(), len(flat)
    weight, x, dy = (_random(device, *shape) for shape in ((EXPERTS, columns, width), (count, width), (count, columns)))
    work, shape = 2 * count * columns * width, f"{width} to {columns}, {load}"
    moved = 2 * (count * (columns + width) + EXPERTS * columns * width)
    products = (
        ("grouped", lambda: grouped._forward(x, weight, offsets), x, lambda e: weight[e].t(), weight.transpose(1, 2)),
        ("grouped dx", lambda: grouped._forward(dy, weight, offsets, along=True), dy, lambda e: weight[e], weight),
    )
    for name, ours, left, of_expert, stack in products:
        theirs = _baselines(left, of_expert, stack, sizes, ends)
        yield _best(name, shape, ours, theirs, _floor(work, moved))
    out = torch.empty_like(weight)
    ours = lambda: grouped._weight_gradient(dy, x, out, offsets, offsets, 0, False)  # noqa: E731
    theirs = {"_grouped_mm": lambda: torch._grouped_mm(dy.t(), x, ends)}
    parts = list(zip(dy.split(sizes), x.split(sizes), strict=True))
    theirs["cuBLAS loop"] = lambda: [torch.mm(a.t(), b, out=out[e]) for e, (a, b) in enumerate(parts)]
    yield _best("grouped dw", shape, ours, theirs, _floor(work, moved))


def _few(device: torch.device, columns: int, width: int) -> Iterator[dict[str, Any]]:
    """Few tokens, as in decode: the weights of the experts that they reach are what is read."""
    weight = _random(device, EXPERTS, columns, width)
    for tokens in (1, 16, 64, 256):
        flat, _, _, offsets = dispatched(chosen("even", tokens, device))
        x, ends, reached = _random(device, len(flat), width), offsets[1:].int(), len(flat.unique())
        theirs = {"_grouped_mm": _bind(torch._grouped_mm, x, weight.transpose(1, 2), ends)}
        floor = _floor(2 * len(flat) * columns * width, 2 * (reached * columns * width + len(flat) * (columns + width)))
        ours = _bind(grouped._forward, x, weight, offsets)
        yield _best("grouped", f"{width} to {columns}, {tokens} tokens", ours, theirs, floor)


def _owned(device: torch.device, columns: int, width: int) -> dict[str, Any]:
    """The weight gradient over calls, rows gathered and carried, resumed in fp32; beside a product and an addition."""
    flat, order, _, offsets = dispatched(chosen("even", device=device))
    x, dy = _random(device, len(flat), width), _random(device, len(flat), columns)
    total, ends = torch.zeros(EXPERTS, columns, width, device=device), offsets[1:].int()
    gradient = grouped.Gradient(total)
    theirs = {"_grouped_mm and +=": lambda: total.add_(torch._grouped_mm(dy.t(), x, ends))}
    size = 2 * len(flat) * (columns + width) + 8 * total.numel()
    ours = lambda: gradient.add(x, dy, order, flat, offsets)  # noqa: E731
    floor = _floor(2 * len(flat) * columns * width, size)
    return _best("grouped dw, owned", f"{width} to {columns}, even", ours, theirs, floor)


def _bind(function: Callable[..., Any], *args: Any) -> Call:
    return lambda: function(*args)


def _baselines(
    left: Tensor, of_expert: Callable[[int], Tensor], stack: Tensor, sizes: list[int], ends: Tensor
) -> dict[str, Call]:
    parts, out = left.split(sizes), torch.empty(len(left), stack.shape[2], device=left.device, dtype=left.dtype)
    outs = out.split(sizes)

    def loop() -> None:
        for expert, part in enumerate(parts):
            if len(part):
                torch.mm(part, of_expert(expert), out=outs[expert])

    return {"_grouped_mm": lambda: torch._grouped_mm(left, stack, ends), "cuBLAS loop": loop}


def _best(kernel: str, shape: str, ours: Call, theirs: dict[str, Call], floor_us: float) -> dict[str, Any]:
    """Beside the better baseline; what the others take is in the name of the baseline."""
    graphs = {name: graph([call]) for name, call in theirs.items()}
    times = (
        {name: steady(*side, HEAT) for name, side in graphs.items()} if len(graphs) > 1 else dict.fromkeys(graphs, 0.0)
    )
    best = min(times, key=lambda name: times[name])
    mine, base = there_and_back({"ours": graph([ours]), best: graphs[best]}, HEAT).values()
    said = ", ".join([best, *(f"{name} {took:.0f}" for name, took in times.items() if name != best)])
    row = {"ours_us": mine, "baseline": said, "baseline_us": base}
    return {"kernel": kernel, "shape": shape, **row, "floor_us": floor_us}


def _router(device: torch.device) -> Iterator[dict[str, Any]]:
    weight = _random(device, EXPERTS, HIDDEN) / 45
    for tokens in (64, TOKENS, 4 * TOKENS):
        x = _random(device, tokens, HIDDEN)
        size = 2 * HIDDEN * (tokens + EXPERTS) + 4 * tokens * (EXPERTS + 3 * TOP)

        def theirs() -> Any:
            scores = F.softmax(F.linear(x.float(), weight.float()), -1)  # noqa: B023
            best = scores.topk(TOP, -1)
            return best.values / best.values.sum(-1, keepdim=True)

        ours = lambda: router(x, weight, top_k=TOP, normalise=True)  # noqa: E731, B023
        yield _best("router", f"{tokens} tokens", ours, {"torch in fp32": theirs}, _floor(0, size))
    x = _random(device, TOKENS, HIDDEN)
    logits = routing._scored(x, weight, torch.float32)
    dp, dw = torch.randn_like(logits), torch.randn(TOKENS, TOP, device=device)
    experts, dx, total = chosen("even", device=device), torch.empty_like(x), torch.zeros(EXPERTS, HIDDEN, device=device)

    def back() -> None:
        slopes = routing._slopes_of(logits, experts, dp, dw, (TOP, True, True))
        routing._data_launch(slopes, weight, dx)(device)
        routing._fold_launch(slopes, x, None, total)(device)

    def plain() -> None:
        slopes = torch._softmax_backward_data(dp, logits, -1, torch.float32)
        torch.mm(slopes, weight.float()).to(BF16)
        torch.mm(slopes.t(), x.float())

    size = 4 * HIDDEN * TOKENS + 8 * TOKENS * EXPERTS + 6 * HIDDEN * EXPERTS
    yield _best("router, backward", f"{TOKENS} tokens", back, {"torch in fp32": plain}, _floor(0, size))


def _combine(device: torch.device) -> Iterator[dict[str, Any]]:
    _, order, inverse, _ = dispatched(chosen("even", device=device))
    rows, weights = _random(device, len(order), HIDDEN), torch.rand(TOKENS, TOP, device=device)
    dy, drows, dweights = _random(device, TOKENS, HIDDEN), torch.empty_like(rows), torch.empty_like(weights)
    tokens = order // TOP

    def theirs() -> Tensor:
        scaled = rows * weights.flatten()[order].unsqueeze(-1)
        return torch.zeros(TOKENS, HIDDEN, device=device).index_add(0, tokens, scaled).to(BF16)

    size = 2 * HIDDEN * (len(order) + TOKENS)
    ours = lambda: combine(rows, weights, inverse)  # noqa: E731
    yield _best("combine", f"{TOKENS} tokens", ours, {"index_add": theirs}, _floor(0, size))
    back = combining._backward_launch(rows, weights, inverse, dy, drows, dweights)

    def plain() -> Tensor:
        wide = dy.index_select(0, tokens)
        (rows * wide).sum(-1)
        return wide * weights.flatten()[order].unsqueeze(-1).to(BF16)

    size = 2 * HIDDEN * (2 * len(order) + TOKENS)
    yield _best("combine, backward", f"{TOKENS} tokens", lambda: back(device), {"torch": plain}, _floor(0, size))


def _floor(operations: float, size: float) -> float:
    return max(operations / 790e6, size / 4.3e6)


def _random(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, device=device, dtype=BF16)
