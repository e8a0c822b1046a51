"""Row operators of CUDA and Triton side by side, on widths, dtypes and layouts that take every path of the kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlspec.device import cuda_rows
from rlspec.kernels import embedding, logprob, residual_add, rms_norm, rope, silu, swiglu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (BF16, FP16, FP32)
EPS = 1e-6
# Around packs of 8 and 4, powers of two, and where more warps or rounds begin.
WIDTHS = (3, 20, 100, 128, 512, 1000, 1030, 2048, 4096, 5120, 8192)
# Here the weight's gradient of Triton wants more shared memory than there is.
WIDE = (16384, 20000, 65536)
# In fp32 the compiler of Triton contracts the first two products of some narrower rows the other way round.
NARROWEST_FP32_FOLD = 512

Results = tuple[Tensor, ...]


@dataclass(frozen=True)
class Case:
    """`ours` and `theirs` give the same tensors, to the bit."""

    name: str
    ours: Callable[[], Results]
    theirs: Callable[[], Results]

    def differing(self) -> list[str]:
        """Each result that differs: how many numbers, and by how much at most."""
        pairs = zip(self.ours(), self.theirs(), strict=True)
        return [text for number, (one, other) in enumerate(pairs) if (text := _difference(number, one, other))]


def same(one: Tensor, other: Tensor) -> bool:
    """Of one dtype and shape, with the same bytes."""
    return not _difference(0, one, other)


def _difference(number: int, one: Tensor, other: Tensor) -> str:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return f"result {number}: {one.dtype} {list(one.shape)}, not {other.dtype} {list(other.shape)}"
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    unequal = one.contiguous().view(integer) != other.contiguous().view(integer)
    if not unequal.any():
        return ""
    gap = (one.double() - other.double()).abs()[unequal].max().item()
    return f"result {number}: {int(unequal.sum())} of {one.numel()} differ, by {gap:.2e} at most"


def cases(device: torch.device | str = "cuda") -> Iterator[Case]:
    """All operators, forward, gradients and folds."""
    draw = Draw(device)
    yield from norms(draw)
    yield from together(draw)
    yield from norm_folds(draw)
    yield from gates(draw)
    yield from ropes(draw)
    yield from lookups(draw)
    yield from logprobs(draw)


class Draw:
    """Random tensors, a new one each time."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.generator = torch.Generator(self.device).manual_seed(0)

    def __call__(self, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device).to(dtype)

    def ids(self, limit: int, *shape: int) -> Tensor:
        return torch.randint(limit, shape, generator=self.generator, device=self.device)

    def special(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """With NaN, infinities, zeros of both signs, and numbers large and small among the others."""
        odd = torch.tensor(
            [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-30, -1e-39, 90.0, -90.0, 3e4, -105.0],
            device=self.device,
        )
        x = self(*shape, dtype=FP32) * 8
        return torch.where(self.ids(3, *shape) == 0, odd[self.ids(len(odd), *shape)], x).to(dtype)


def layouts(draw: Draw, rows: int, width: int, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """[rows, width] contiguous, in a wider buffer of NaN, and from an odd address."""
    yield "", draw(rows, width, dtype=dtype)
    wide = torch.full((rows, 2 * width + 8), float("nan"), dtype=dtype, device=draw.device)
    wide[:, 8 : width + 8] = draw(rows, width, dtype=dtype)
    yield " strided", wide[:, 8 : width + 8]
    yield (
        " odd",
        torch.empty(rows * width + 1, dtype=dtype, device=draw.device)[1:]
        .view(rows, width)
        .copy_(wide[:, 8 : width + 8]),
    )


def gradients(operator: Callable[..., Tensor], leaves: list[Tensor], dy: Tensor, **options: Any) -> Results:
    """The result and the gradient of each tensor."""
    leaves = [one.detach().requires_grad_() for one in leaves]
    y = operator(*leaves, **options)
    return y.detach(), *torch.autograd.grad(y, leaves, dy)


def _pair(name: str, ours: Any, theirs: Any, *args: Any, **options: Any) -> Case:
    return Case(name, partial(gradients, ours, *args, **options), partial(gradients, theirs, *args, **options))


def norms(draw: Draw) -> Iterator[Case]:
    for dtype in DTYPES:
        for width in (*WIDTHS, *WIDE):
            for layout, x in layouts(draw, 37 if width < 8192 else 5, width, dtype):
                weight, dy = draw(width, dtype=dtype), draw(*x.shape, dtype=dtype)
                name, options = f"rms_norm {dtype} {width}{layout}", {"eps": EPS}
                leaves = [x, weight]
                if width in WIDE or _odd(dtype, width):
                    leaves, options = [x], {"eps": EPS, "weight": weight}
                yield _pair(name, cuda_rows.rms_norm, rms_norm.rms_norm, leaves, dy, **options)
        x, weight = draw(2, 9, 5, 128, dtype=dtype)[:, :, 1:4], draw(128, dtype=dtype)
        for inner in (False, True):
            name, dy = f"qk_norm {dtype} inner rounding {inner}", draw(2, 9, 3, 128, dtype=dtype)
            options = {"eps": EPS, "round_before_weight": inner}
            yield _pair(name, cuda_rows.rms_norm, rms_norm.rms_norm, [x, weight], dy, **options)


def _odd(dtype: torch.dtype, width: int) -> bool:
    return dtype == FP32 and width < NARROWEST_FP32_FOLD


def together(draw: Draw) -> Iterator[Case]:
    """Several operators at once, ours and Triton's, beside Triton's one by one."""
    for dtype in DTYPES:
        for width in (64, 128, 1000, 2048, 4096, 8192):
            for stream in {dtype, FP32}:
                for rows, inner in ((1, False), (37, True)):
                    residual, x = draw(rows, width, dtype=stream), draw(rows, width, dtype=dtype)
                    given = (residual, x, draw(width, dtype=dtype))
                    name = f"residual_norm {stream} + {dtype} {rows} x {width}, inner rounding {inner}"
                    yield from _beside(name, "residual_norm", residual_then_norm, given, inner)
        for width in (16, 64, 128, 256):
            if width * dtype.itemsize > 512:
                continue
            for (batch, tokens), inner in (((1, 1), False), ((2, 19), True)):
                whole = draw(batch, tokens, 12 * width, dtype=dtype).unflatten(-1, (12, width))
                angles = draw(batch, tokens, width // 2, dtype=FP32) * 50
                for table in {dtype, FP32}:
                    weights = draw(width, dtype=dtype), draw(width, dtype=dtype)
                    given = (
                        whole[:, :, :7],
                        whole[:, :, 7:10],
                        *weights,
                        angles.cos().to(table),
                        angles.sin().to(table),
                    )
                    name = f"rotated_heads {dtype} {table} {batch} x {tokens} x {width}, inner rounding {inner}"
                    yield from _beside(name, "rotated_heads", norm_then_rope, given, inner)
                    yield from _into_a_cache(name, given, whole[:, :, 9:], inner)


def _beside(name: str, function: str, one_by_one: Any, given: Results, inner: bool) -> Iterator[Case]:
    options = {"eps": EPS, "round_before_weight": inner}
    want = partial(one_by_one, *given, **options)
    for family in (cuda_rows, rms_norm):
        yield Case(f"{name}, {family.__name__}", partial(getattr(family, function), *given, **options), want)


def _into_a_cache(name: str, given: Results, others: Tensor, inner: bool) -> Iterator[Case]:
    """`rotated_heads` that stores keys and values as well: its results, then both stores."""
    query, key, *rest = given
    batch, tokens, heads, width = key.shape
    value = others[:, :, :heads]
    order = torch.arange(batch * tokens, device=key.device)
    places = torch.stack((torch.where(order % 3 == 2, -1, order % 2), order // 2))

    def stored(family: Any) -> Results:
        stores = [key.new_full((2, heads, batch * tokens, width), float("nan")) for _ in range(2)]
        options = {"eps": EPS, "round_before_weight": inner, "value": value, "slots": (*stores, places)}
        return *family.rotated_heads(query, key, *rest, **options), *(store.nan_to_num(7) for store in stores)

    def one_by_one() -> Results:
        made = norm_then_rope(query, key, *rest, eps=EPS, round_before_weight=inner)
        stores = [key.new_full((2, heads, batch * tokens, width), 7) for _ in range(2)]
        block, place = places[:, places[0] >= 0]
        for store, new in zip(stores, (made[3], value), strict=True):
            store[block, :, place] = new.flatten(0, 1)[places[0] >= 0]
        return *made, *stores

    for family in (cuda_rows, rms_norm):
        yield Case(f"{name}, into a cache, {family.__name__}", partial(stored, family), one_by_one)


def residual_then_norm(residual: Tensor, x: Tensor, weight: Tensor, **options: Any) -> Results:
    total = residual_add.residual_add(residual, x)
    return total, rms_norm.rms_norm(total.to(x.dtype), weight, **options)


def norm_then_rope(
    query: Tensor, key: Tensor, query_weight: Tensor, key_weight: Tensor, cos: Tensor, sin: Tensor, **options: Any
) -> Results:
    pairs = ((query, query_weight), (key, key_weight))
    normed = [rms_norm.rms_norm(x, weight, **options) for x, weight in pairs]
    return *normed, *(rope.rope(x, cos, sin) for x in normed)


def norm_folds(draw: Draw) -> Iterator[Case]:
    for dtype in DTYPES:
        for width in WIDTHS:
            for heads in () if _odd(dtype, width) else (1, 2, 3, 8, 40) if width <= 256 else (1,):
                rows = 100
                x, dy = draw(rows, heads, width, dtype=dtype), draw(rows, heads, width, dtype=dtype)
                order = torch.randperm(96, device=draw.device, generator=draw.generator)
                blocks = torch.where(order % 7 == 3, -1, order).int().view(-1, 16)
                start = draw(width, dtype=FP32)

                def fold(
                    by: Any, x: Tensor = x, dy: Tensor = dy, blocks: Tensor = blocks, start: Tensor = start
                ) -> Results:
                    total = start.clone()
                    by(total, x, dy, blocks, eps=EPS)
                    return (total,)

                yield Case(
                    f"norm_fold {dtype} {width} x {heads}",
                    partial(fold, cuda_rows.norm_fold),
                    partial(fold, rms_norm.fold),
                )


def gates(draw: Draw) -> Iterator[Case]:
    for dtype in DTYPES:
        for width in (1, 7, 128, 2048, 12288):
            for layout, gate in layouts(draw, 9, width, dtype):
                up, dy = draw(9, width, dtype=dtype), draw(9, width, dtype=dtype)
                yield _pair(f"swiglu {dtype} {width}{layout}", cuda_rows.swiglu, swiglu.swiglu, [gate, up], dy)
                yield _pair(f"silu {dtype} {width}{layout}", cuda_rows.silu, silu.silu, [gate], dy)
        odd = [draw.special(64, 1024, dtype=dtype) for _ in range(3)]
        yield _pair(f"swiglu {dtype} special", cuda_rows.swiglu, swiglu.swiglu, odd[:2], odd[2])
        yield _pair(f"silu {dtype} special", cuda_rows.silu, silu.silu, odd[:1], odd[2])
        for other in {dtype, FP32}:
            for layout, x in layouts(draw, 9, 1000, dtype):
                residual = draw.special(9, 1000, dtype=other)
                name, dy = f"residual_add {other} + {dtype}{layout}", draw(9, 1000, dtype=other)
                yield _pair(name, cuda_rows.residual_add, residual_add.residual_add, [residual, x], dy)


def ropes(draw: Draw) -> Iterator[Case]:
    for dtype in DTYPES:
        for table in (FP32, dtype):
            for heads, width in ((32, 128), (8, 128), (5, 128), (1, 64), (3, 96), (3, 6), (70, 256)):
                whole, dy = draw(2, 19, heads + 2, width, dtype=dtype), draw(2, 19, heads, width, dtype=dtype)
                angles = draw(2, 19, width // 2, dtype=FP32) * 50
                tables = {"cos": angles.cos().to(table), "sin": angles.sin().to(table)}
                for layout, x in (("", whole[:, :, :heads].contiguous()), (" strided", whole[:, :, 1 : heads + 1])):
                    yield _pair(
                        f"rope {dtype} {table} {heads} x {width}{layout}", cuda_rows.rope, rope.rope, [x], dy, **tables
                    )


def lookups(draw: Draw) -> Iterator[Case]:
    for dtype in DTYPES:
        for width in (3, 128, 4096):
            weight, tokens, dy = draw(50, width, dtype=dtype), draw.ids(50, 4, 40), draw(4, 40, width, dtype=dtype)
            tokens[0, 3], tokens[1, 5] = -1, 50
            tokens[:, 10:30] = 7

            def look(by: Any, weight: Tensor, tokens: Tensor = tokens) -> Tensor:
                return by(tokens, weight)

            yield _pair(
                f"embedding {dtype} {width}",
                partial(look, cuda_rows.embedding),
                partial(look, embedding.embedding),
                [weight],
                dy,
            )
            blocks = torch.randperm(160, device=draw.device, generator=draw.generator).int().view(-1, 16)
            blocks[2, 3:9] = -1
            start = draw(50, width, dtype=FP32)

            def fold(
                by: Any, tokens: Tensor = tokens, dy: Tensor = dy, blocks: Tensor = blocks, start: Tensor = start
            ) -> Results:
                total = start.clone()
                by(total, tokens.flatten(), dy.flatten(0, 1), blocks)
                return (total,)

            yield Case(
                f"embedding_fold {dtype} {width}",
                partial(fold, cuda_rows.embedding_fold),
                partial(fold, embedding.fold),
            )


def logprobs(draw: Draw) -> Iterator[Case]:
    ways = {name: (getattr(cuda_rows, name), getattr(logprob, name)) for name in ("logprob", "batch_invariant_logprob")}
    for dtype in DTYPES:
        for width in (1, 5, 2048, 2056, 32768, 40000, 151936):
            for layout, logits in layouts(draw, 11, width, dtype):
                targets, dy = draw.ids(width, 11), draw(11, dtype=FP32)
                targets[2], targets[3], targets[4] = -100, -1, width
                logits = logits * 4
                if width > 1:
                    logits[5, 1:], logits[6], logits[7, 0], logits[8, 0] = (
                        -float("inf"),
                        -float("inf"),
                        float("inf"),
                        float("nan"),
                    )
                for name, (ours, theirs) in ways.items():
                    yield _pair(f"{name} {dtype} {width}{layout}", ours, theirs, [logits], dy, targets=targets)
