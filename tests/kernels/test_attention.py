"""Attention: against an fp64 formula, to the bit over layouts, splits and tiles, compiled for Hopper, on a GPU."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from rlspec.kernels import attention as kernel
from tests.kernels.interpreted import INTERPRETING, compiled, gpu, hopper, interpreted, spills, waits

Entry = tuple[int, int, int, int, int]
SHORT = kernel.Schedule(64, 128, 128)
BOTH = pytest.mark.parametrize(("window", "sinks"), [(None, False), (70, True)])


@pytest.fixture(autouse=True)
def ordered_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted products go through BLAS, whose bits depend on the place of a row; here each is a chain over k."""
    if not INTERPRETING:
        return
    from triton.runtime import interpreter

    def chain(self: object, a: Any, b: Any, d: Any, *_: object) -> Any:
        total = d.data.copy()
        for left, right in zip(a.data.T, b.data, strict=True):
            total += left[:, None] * right[None, :]
        return interpreter.TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", chain)


def sample(length: int, heads: int = 4, kv_heads: int = 2, width: int = 16, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    counts = (heads, kv_heads, kv_heads)
    return [torch.randn(1, length, count, width, generator=generator) for count in counts]


def table(*entries: Entry) -> Tensor:
    return torch.tensor(entries, dtype=torch.int32)


def same(left: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def formula(
    q: Tensor, k: Tensor, v: Tensor, entries: list[Entry], scale: float, window: int | None, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The header's formula in fp64, a segment at a time."""
    q, k, v = q.double(), k.double(), v.double()
    out, lse = torch.zeros_like(q), torch.full(q.shape[:3], -math.inf, dtype=torch.float64)
    for row, start, length, first, keys in entries:
        group = q.shape[2] // k.shape[2]
        keyed, valued = (x[row, first : first + keys].repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[row, start : start + length], keyed) * scale
        apart = torch.arange(keys - length, keys)[:, None] - torch.arange(keys)
        seen = (apart >= 0) & (apart < (window or keys))
        scores = scores.masked_fill(~seen, -math.inf)
        total = torch.logsumexp(scores, -1)
        if sinks is not None:
            total = torch.logaddexp(total, sinks.double()[:, None])
        out[row, start : start + length] = torch.einsum("hqk,khd->qhd", torch.exp(scores - total[..., None]), valued)
        lse[row, start : start + length] = total.T
    return out, lse


def sink_of(asked: bool, heads: int = 4) -> Tensor | None:
    return torch.linspace(-1, 1, heads) if asked else None


@BOTH
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(4, 2, 16), (3, 1, 32)])
@interpreted
def test_forward_and_gradients_follow_the_formula(
    heads: int, kv_heads: int, width: int, window: int | None, sinks: bool
) -> None:
    entries = [(0, 0, 66, 0, 66), (0, 66, 30, 66, 30), (1, 3, 97, 0, 97)]
    parts = [sample(100, heads, kv_heads, width, seed) for seed in (1, 2)]
    q, k, v = (torch.cat(pair).requires_grad_() for pair in zip(*parts, strict=True))
    sink = sink_of(sinks, heads)
    out = kernel.attention(q, k, v, table(*entries), scale=0.3, sinks=sink, window=window)
    lse = kernel.forward(q.detach(), k.detach(), v.detach(), table(*entries), scale=0.3, sinks=sink, window=window)[1]
    double = [x.detach().double().requires_grad_() for x in (q, k, v)]
    want, total = formula(*double, entries, 0.3, window, sink)
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(out.double(), want, rtol=0, atol=4e-6)
    torch.testing.assert_close(lse.double(), total.detach(), rtol=0, atol=4e-6)
    found = torch.autograd.grad(out, (q, k, v), grad)
    exact = torch.autograd.grad(want, double, grad.double())
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=0, atol=2e-5)


@BOTH
@interpreted
def test_layouts_agree_to_the_bit(window: int | None, sinks: bool) -> None:
    length, sink = 260, sink_of(sinks, 2)
    q, k, v = sample(length, 2, 1)
    alone = run(q, k, v, [(0, 0, length, 0, length)], window, sink)
    cuts = ((0, 90), (90, length))
    parts = [run(q[:, a:b], k[:, :b], v[:, :b], [(0, 0, b - a, 0, b)], window, sink) for a, b in cuts]
    assert same(tuple(torch.cat(pair, 1) for pair in zip(*parts, strict=True)), alone)

    for keys, count in ((1, 1), (64, 1), (65, 2), (128, 8), (129, 3), (257, 1), (260, 5)):
        cell = slice(keys - count, keys)
        cache = poisoned((1, 280), [(0, 0, keys)], k, v)
        one = run(q[:, cell], *cache, [(0, 0, count, 0, keys)], window, sink)
        assert same(one, (alone[0][:, cell], alone[1][:, cell])), keys

    spans = [(0, 11, length), (1, 0, 75), (1, 75, length), (2, 90, length)]
    wide = poisoned((3, length + 90), spans, q, k, v)
    out, lse = run(*wide, [(row, start, count, start, count) for row, start, count in spans], window, sink)
    for row, start, count in spans:
        cell = slice(start, start + count)
        assert same((out[row, cell], lse[row, cell]), (alone[0][0, :count], alone[1][0, :count])), row
    assert not out[2, :90].any() and bool((lse[2, :90] == -math.inf).all())
    assert not out[1, 75 + length :].any()


def run(
    q: Tensor, k: Tensor, v: Tensor, entries: list[Entry], window: int | None, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Folded in place; a few queries in a second kernel too, which must agree."""
    cache = kernel._Cache(k, v, None, 0)
    arguments = (q, cache, table(*entries), 0.25, q.shape[1], k.shape[1], sinks, window)
    folded = kernel._forward(*arguments, schedule=SHORT, split=False)
    if q.shape[1] <= 8:
        assert same(kernel._forward(*arguments, schedule=SHORT, split=True), folded)
    return folded


def poisoned(shape: tuple[int, int], spans: list[tuple[int, int, int]], *parts: Tensor) -> list[Tensor]:
    """Grids of NaN that hold the first `count` tokens of a sample at each (row, start, count)."""
    grids = [torch.full((*shape, *part.shape[2:]), math.nan) for part in parts]
    for grid, part in zip(grids, parts, strict=True):
        for row, start, count in spans:
            grid[row, start : start + count] = part[0, :count]
    return grids


@interpreted
def test_the_default_schedule_folds_at_its_borders() -> None:
    length = kernel.SCHEDULE.early + 70
    q, k, v = sample(length, 1, 1)
    cache = kernel._Cache(k, v, None, 0)
    at = slice(length - 5, length)
    arguments = (q[:, at], cache, table((0, 0, 5, 0, length)), 0.25, 5, length, None, None)
    folded, split = (kernel._forward(*arguments, split=split) for split in (False, True))
    assert same(folded, split)
    want, _ = formula(q[:, at], k, v, [(0, 0, 5, 0, length)], 0.25, None, None)
    torch.testing.assert_close(folded[0].double(), want, rtol=0, atol=4e-6)


@pytest.mark.parametrize(("heads", "width", "sinks"), [(4, 16, True), (6, 32, False), (10, 256, False)])
@interpreted
def test_splits_ahead_of_their_turn_agree(
    heads: int, width: int, sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches, launch = [], kernel._launch_ahead
    monkeypatch.setattr(kernel, "_launch_ahead", lambda *arguments: launches.append(1) or launch(*arguments))
    q, k, v = sample(700, heads, 2, width)
    around = [torch.full((2, 720, *x.shape[2:]), math.nan) for x in (k, v)]
    sizes = [(129, 2), (700, 32 // heads)]
    if width == 16:
        sizes += [(1, 1), (64, 1), (65, 3), (128, 1), (129, 1), (193, 1), (320, 3), (577, 1)]
    chosen = {"schedule": kernel.Schedule(192, 384, 320)}
    for length, queries in sizes:
        for full, part in zip(around, (k, v), strict=True):
            full.fill_(math.nan)
            full[1, 9 : 9 + length] = part[0, :length]
        one = torch.cat((torch.zeros_like(q[:, :queries]), q[:, length - queries : length]))
        cache, entry = kernel._Cache(*around, None, 0), table((1, 0, queries, 9, length))
        for longest in (192, 700)[length > 192 :]:  # 192: a single split
            bounds = (0.25, queries, longest, sink_of(sinks, heads), None)
            choices = ({"split": True, "ahead": ahead} for ahead in (False, True))
            found = [kernel._forward(one, cache, entry, *bounds, **chosen, **choice) for choice in choices]
            whole = kernel._forward(one, cache, entry, *bounds, **chosen, split=False)
            assert same(*found) and same(found[0], whole), (length, queries, longest)
            assert not whole[0].isnan().any(), (length, queries, longest)
    assert len(launches) == sum(1 + (length <= 192) for length, _ in sizes)


@pytest.mark.parametrize("page", [16, 64, 128])
@interpreted
def test_pages_agree_with_rows(page: int) -> None:
    q, k, v = sample(200)
    order = torch.tensor([4, 1, 14, 0, 9, 3, 12, 2, 10, 8, 5, 13, 6])[: -(-200 // page)]
    stores = [torch.full((15, page, 2, 16), math.nan) for _ in "kv"]
    for store, part in zip(stores, (k, v), strict=True):
        for number, place in enumerate(order.tolist()):
            piece = part[0, number * page : (number + 1) * page]
            store[place, : len(piece)] = piece
    listed = torch.cat((order, torch.tensor([999]))).to(torch.int32)[None]  # past the end, not read
    for count in (3, 90):
        entry = table((0, 0, count, 0, 200))
        want = kernel.forward(q[:, -count:], k, v, entry, scale=0.25)
        assert same(kernel.paged(q[:, -count:], *stores, listed, entry, scale=0.25), want)


@pytest.mark.parametrize("window", [None, 70])
@interpreted
def test_gradients_depend_on_the_sample_alone(window: int | None) -> None:
    length = 150
    q, k, v = sample(length, 2, 1)
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(9))
    options = {"scale": 0.25, "window": window}
    whole = table((0, 0, length, 0, length))
    out, lse = kernel.forward(q, k, v, whole, **options)
    want = kernel.backward(q, k, v, out, lse, grad, whole, **options)

    cuts = ((0, 40), (40, length))
    chunks = [kernel.forward(q[:, a:b], k[:, :b], v[:, :b], table((0, 0, b - a, 0, b)), **options) for a, b in cuts]
    out, lse = (torch.cat(pair, 1) for pair in zip(*chunks, strict=True))
    assert same(kernel.backward(q, k, v, out, lse, grad, whole, **options), want)

    spans = [(0, 21, length), (1, 0, 45), (1, 45, length), (2, 60, length)]
    wide = poisoned((3, length + 60), spans, q, k, v, grad)
    entries = table(*((row, start, count, start, count) for row, start, count in spans))
    out, lse = kernel.forward(*wide[:3], entries, **options)
    found = kernel.backward(*wide[:3], out, lse, wide[3], entries, **options)
    for row, start, count in spans:
        if count == length:
            assert same(tuple(x[row, start : start + count] for x in found), tuple(x[0] for x in want)), row
    assert not any(x[0, :21].any() or x[2, :60].any() for x in found)


@interpreted
def test_strides_and_copies_agree() -> None:
    q, k, v = sample(70)
    entry = table((0, 0, 70, 0, 70))
    want = kernel.forward(q, k, v, entry, scale=0.25)
    fused = torch.cat((q, k, v), 2)
    assert same(kernel.forward(fused[:, :, :4], fused[:, :, 4:6], fused[:, :, 6:], entry, scale=0.25), want)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert same(kernel.forward(*turned, entry, scale=0.25), want)
    odd = [torch.zeros(1, 70, x.shape[2], 17)[..., 1:].copy_(x) for x in (q, k, v)]
    assert same(kernel.forward(*odd, entry, scale=0.25), want)


@interpreted
def test_a_broken_promise_is_nan() -> None:
    q, k, v = sample(100)
    entry = table((0, 0, 100, 0, 100))
    out, lse = kernel.forward(q, k, v, entry, scale=0.25, max_query=90)
    assert out[:, 90:].isnan().all() and lse[:, 90:].isnan().all() and not out[:, :90].isnan().any()
    cache = kernel._Cache(k, v, None, 0)
    last = (q[:, 60:70], cache, table((0, 0, 10, 0, 70)), 0.25, 10, 64, None, None)
    out, _ = kernel._forward(*last, schedule=SHORT, split=True)
    assert out[:, 4:].isnan().all() and not out[:, :4].isnan().any()
    out, lse = kernel.forward(q, k, v, entry, scale=0.25)
    dq, dk, dv = kernel.backward(q, k, v, out, lse, q, entry, scale=0.25, max_query=90, max_key=64)
    assert dq[:, 90:].isnan().all() and dk[:, 64:].isnan().all() and dv[:, 64:].isnan().all()


ENTRY = table((0, 0, 8, 0, 8))
REFUSED: dict[str, tuple[Callable[[list[Tensor]], Any], str]] = {
    "width": (lambda x: kernel.forward(*(y[..., :8] for y in x), ENTRY, scale=1.0), "widths are"),
    "heads": (lambda x: kernel.forward(x[0][:, :, :3], *x[1:], ENTRY, scale=1.0), "do not pair"),
    "empty": (lambda x: kernel.forward(x[0][:, :0], *x[1:], ENTRY, scale=1.0), "none of them empty"),
    "dtype": (lambda x: kernel.forward(x[0].double(), *x[1:], ENTRY, scale=1.0), "all must be bf16"),
    "bf16": (lambda x: kernel.forward(*(y.bfloat16() for y in x), ENTRY, scale=1.0), "computes bf16 wrongly"),
    "rows": (lambda x: kernel.forward(x[0].expand(2, -1, -1, -1), *x[1:], ENTRY, scale=1.0), "query has 2 rows"),
    "table": (lambda x: kernel.forward(*x, ENTRY.long(), scale=1.0), "segments must be int32"),
    "no segment": (lambda x: kernel.forward(*x, ENTRY[:0], scale=1.0), "segments must be int32"),
    "scale": (lambda x: kernel.forward(*x, ENTRY, scale=-1.0), "scale must be positive"),
    "window": (lambda x: kernel.forward(*x, ENTRY, scale=1.0, window=0), "window must be at least 1"),
    "max_query": (lambda x: kernel.forward(*x, ENTRY, scale=1.0, max_query=9), "max_query must lie in 1..8"),
    "sinks": (lambda x: kernel.forward(*x, ENTRY, scale=1.0, sinks=torch.zeros(3)), "sinks must be fp32"),
    "sinks' gradient": (
        lambda x: kernel.attention(*x, ENTRY, scale=1.0, sinks=torch.zeros(4, requires_grad=True)),
        "sinks have no gradient",
    ),
    "page": (lambda x: kernel.paged(*x, torch.zeros(1, 1, dtype=torch.int32), ENTRY[:, :5], scale=1.0), "pages of 7"),
    "grad_out": (
        lambda x: kernel.backward(*x, x[0], torch.zeros(1, 8, 4), x[0][:, :4], ENTRY, scale=1.0),
        "grad_out must be as query",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@interpreted
def test_refusals(name: str) -> None:
    call, message = REFUSED[name]
    q, k, v = sample(8)
    if name == "page":
        k, v = k[:, :7], v[:, :7]
    with pytest.raises(ValueError, match=message):
        call([q, k, v])


@compiled
def test_cpu_tensors_need_the_interpreter() -> None:
    with pytest.raises(ValueError, match="TRITON_INTERPRET"):
        kernel.forward(*sample(8), ENTRY, scale=1.0)


FORWARD = ("_forward_kernel", "_ahead_kernel", "_fold_kernel", "_pads_kernel")
KERNELS = (*FORWARD, "_delta_kernel", "_dq_kernel", "_dkv_kernel")


@contextmanager
def compiling(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Launches compile for Hopper and do nothing; the compiled kernels by name."""
    found: dict[str, Any] = {}

    class Compiling:
        def __init__(self, name: str) -> None:
            self.name, self.kernel = name, getattr(kernel, name)

        def __getitem__(self, _: object) -> Callable[..., None]:
            return self.launch

        def launch(self, *args: Any, **kwargs: Any) -> None:
            found[self.name] = self.kernel.warmup(*args, grid=(1,), **kwargs)

    for name in KERNELS:
        monkeypatch.setattr(kernel, name, Compiling(name))
    with hopper():
        yield found


@pytest.mark.parametrize("width", [64, 128, 256])
@compiled
def test_kernels_compile_for_hopper(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (x.bfloat16() for x in sample(1024, 8, 2, width))
    cache, entry = kernel._Cache(k, v, None, 0), table((0, 0, 1024, 0, 1024))
    with compiling(monkeypatch) as found:
        kernel._backward(q, k, v, q, torch.zeros(q.shape[:3]), q, entry, 0.1, 1024, 1024, None, bulk=True)
        kernel._forward(q[:, :1], cache, entry, 0.1, 1, 1024, None, None, split=True)
        decode = found.pop("_forward_kernel")
        kernel._forward(q[:, :1], cache, entry, 0.1, 1, 1024, None, None, split=True, ahead=True)
        kernel._forward(q, cache, entry, 0.1, 1024, 1024, None, None, split=False, bulk=True)
    assert set(found) == set(KERNELS)
    assert all(one.metadata.shared <= 232448 for one in (decode, *found.values()))
    assert not any(map(waits, (decode, *found.values())))
    for one in (decode, found["_ahead_kernel"]):
        assert spills(one) == 0 and "HMMA" in one.asm["sass"]
    for name in ("_forward_kernel", "_dq_kernel", "_dkv_kernel"):
        sass = found[name].asm["sass"]
        # ptxas waits after each product when it cannot keep several in flight: few waits, many products
        assert 2 * sass.count("WARPGROUP.DEPBAR") <= sass.count("HGMMA"), name
    hot = {64: 3, 128: 2, 256: 1}[width]  # dK and dV spill a little outside the loop at 128, within it at 256
    assert [spills(found[name]) for name in ("_forward_kernel", "_dq_kernel", "_dkv_kernel")[:hot]] == [0] * hot


@pytest.mark.parametrize("page", [0, 16, 64])
@compiled
def test_splits_that_start_early_wait_before_they_read(page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (x.bfloat16() for x in sample(4096, 8, 2, 128))
    cache = kernel._Cache(k, v, None, 0)
    if page:
        pages = [x.unflatten(1, (-1, page)).flatten(0, 1) for x in (k, v)]
        cache = kernel._Cache(*pages, torch.zeros(1, 4096 // page, dtype=torch.int32), page)
    monkeypatch.setattr(kernel, "_behind", lambda _: {"BEHIND": True, "launch_pdl": True})
    with compiling(monkeypatch) as found:
        for keys in (1024, 4096):
            kernel._forward(q[:, :1], cache, table((0, 0, 1, 0, keys)), 0.1, 1, keys, None, None)
            for one in (found["_forward_kernel"], found["_fold_kernel"]):
                before = one.asm["sass"].split("ACQBULK")[0]
                assert waits(one) and spills(one) == 0 and not re.search(r"\b(STG|LDGSTS|UTMALDG)\b", before)
                assert all("STRONG.GPU" in read for read in re.findall(r"\bLDG[.\w]*", before))
            assert "CCTL.E.PF2" in found["_forward_kernel"].asm["sass"].split("ACQBULK")[0]


@compiled
def test_keys_and_values_at_rest_come_before_the_turn_of_their_split(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (x.bfloat16() for x in sample(1024, 8, 2, 128))
    cache, entry = kernel._Cache(k, v, None, 0), table((0, 0, 1, 0, 1024))
    monkeypatch.setattr(kernel, "_behind", lambda _: {"BEHIND": True, "launch_pdl": True})
    monkeypatch.setattr(kernel, "_bulk", lambda _: True)
    with compiling(monkeypatch) as found:
        kernel._forward(q[:, :1], cache, entry, 0.1, 1, 1024, None, None)
        with kernel.cache_at_rest():
            kernel._forward(q[:, :8], cache, entry, 0.1, 8, 1024, None, None)
            kernel._forward(q[:, :1], cache, entry, 0.1, 1, 1024, None, 70)
            kernel._forward(q[:, :1], cache._replace(copied=True), entry, 0.1, 1, 1024, None, None)
            kernel._forward(q[:, :1], cache, entry.repeat(64, 1), 0.1, 1, 1024, None, None)
            assert "_ahead_kernel" not in found
            kernel._forward(q[:, :1], cache, entry, 0.1, 1, 40, None, None)
            assert found.pop("_ahead_kernel") and found.pop("_fold_kernel")  # of a single split, too
            kernel._forward(q[:, :1], cache, entry, 0.1, 1, 1024, None, None)
    ahead, fold = (found[name].asm["sass"] for name in ("_ahead_kernel", "_fold_kernel"))
    # Before its turn a program reads the five numbers of its segment, keys and values, and writes nothing on any path.
    assert re.findall(r"\b(LDGSTS|LDG|STG)\b", ahead.split("ACQBULK")[0]) == ["LDG"] * 5
    assert "UTMALDG" in ahead.split("ACQBULK")[0]
    assert ahead.count("ACQBULK") == 2 and ahead.rindex("ACQBULK") < ahead.index("STG")
    assert fold.count("ACQBULK") == 2 and "LDG" in fold.split("ACQBULK")[0]
    assert re.findall(r"\b(ACQBULK|STG)\b", fold) == 2 * ["ACQBULK", "STG", "STG"]


@gpu
def test_on_a_gpu() -> None:
    from tests.bench.kernels_attention import checks

    failed = [(name, detail) for name, ok, detail in checks(torch.device("cuda")) if not ok]
    assert not failed
