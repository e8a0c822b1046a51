"""grouped_gemm: the formula by expert, every tile, loads and empty experts, cuts of the gradient, what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlspec.kernels import grouped_gemm as grouped
from rlspec.kernels.grouped_gemm import Gradient, Tile, grouped_gemm
from tests.kernels.interpreted import compiled, gpu, hopper, interpreted, spills

BF16 = torch.bfloat16
SMALL = (Tile(16, 32, 32, 4, 2, swap=True), Tile(32, 32, 32, 4, 2), Tile(32, 64, 32, 4, 2, half=True))
TABLE = sorted(
    {(tile, along) for along, table in ((False, grouped.TILES), (True, grouped.DATA_TILES)) for _, tile in table}
)
# Rows of each expert: none, one, whole tiles and blocks, and one more.
SIZES = (0, 1, 16, 33, 0, 15)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def error(value: Tensor, exact: Tensor) -> float:
    return float((value.double() - exact).norm() / exact.norm())


def offsets_of(sizes: tuple[int, ...], device: str = "cpu") -> Tensor:
    return torch.tensor((0, *sizes), device=device).cumsum(0)


def experts_of(sizes: tuple[int, ...]) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))


def case(sizes: tuple[int, ...], width: int, columns: int) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
    """x, weight, dy, and what is due in fp64: y, dx, dweight."""
    x, weight, dy = draw(sum(sizes), width), draw(len(sizes), columns, width, seed=1), draw(sum(sizes), columns, seed=2)
    exact = [one.double().requires_grad_() for one in (x, weight)]
    y = torch.einsum("mk,mnk->mn", exact[0], exact[1][experts_of(sizes)])
    return x, weight, dy, (y.detach(), *torch.autograd.grad(y, exact, dy.double()))


# ---- CPU, interpreter ----


@pytest.mark.parametrize(("sizes", "width", "columns"), [((0, 1, 0), 20, 24), (SIZES, 33, 70)])
@interpreted
def test_forward_and_gradients_are_the_formula(sizes: tuple[int, ...], width: int, columns: int) -> None:
    x, weight, dy, gold = case(sizes, width, columns)
    leaves = x.requires_grad_(), weight.requires_grad_()
    y = grouped_gemm(*leaves, offsets_of(sizes))
    found = (y.detach(), *torch.autograd.grad(y, leaves, dy))
    assert all(error(a, b) < 1e-6 for a, b in zip(found, gold, strict=True))
    assert not found[2][0].any()  # of an expert without rows


@pytest.mark.parametrize("tile", SMALL, ids=lambda tile: "swap" if tile.swap else "half" if tile.half else "whole")
@interpreted
def test_each_kind_of_tile_through_tensor_memory_access(tile: Tile) -> None:
    x, weight, dy, gold = case(SIZES, 36, 72)
    offsets = offsets_of(SIZES)
    for along, left, due in ((False, x, gold[0]), (True, dy, gold[1])):
        out = torch.full(due.shape, float("nan"))
        tiles, schedule = grouped._table(len(x), offsets, tile)
        schedule(x.device)
        grouped._product(left, weight, out, offsets, tiles, tile, along)(x.device)
        assert error(out, due) < 1e-6
    out = torch.full(weight.shape, float("nan"))
    grouped._weight_product(dy, x, out, offsets, offsets, 0, False, tile)(x.device)
    assert error(out, gold[2]) < 1e-6


@interpreted
def test_the_table_has_every_tile_once_and_no_more() -> None:
    for sizes in (SIZES, (0, 0, 40), (1,) * 5, (70,)):
        tiles, schedule = grouped._table(sum(sizes), offsets_of(sizes), SMALL[0])
        schedule(torch.device("cpu"))
        start, due = 0, []
        for expert, size in enumerate(sizes):
            due += [(expert, start + row) for row in range(0, size, 16)]
            start += size
        found = [pair for pair in zip(tiles.experts.tolist(), tiles.rows.tolist(), strict=True) if pair[0] >= 0]
        assert found == due and len(due) <= tiles.most


@interpreted
def test_rows_of_other_experts_cannot_leak() -> None:
    x, weight, dy, _ = case(SIZES, 36, 72)
    offsets = offsets_of(SIZES)

    def results() -> tuple[Tensor, ...]:
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        y = grouped_gemm(*leaves, offsets)
        through = torch.full(weight.shape, float("nan"))
        grouped._weight_product(dy, x, through, offsets, offsets, 0, False, SMALL[1])(x.device)
        return y.detach(), *torch.autograd.grad(y, leaves, dy), through

    want = results()
    x[1:17], weight[2], dy[1:17] = float("nan"), float("nan"), float("nan")
    keep, others = [0, *range(17, sum(SIZES))], [0, 1, 3, 4, 5]
    found = results()
    for a, b in zip(found[:2], want[:2], strict=True):
        assert torch.equal(a[keep], b[keep])
    for a, b in zip(found[2:], want[2:], strict=True):
        assert torch.equal(a[others], b[others])


@interpreted
def test_the_weight_gradient_over_calls_has_the_same_bits_for_any_cut() -> None:
    tokens, count = 45, 3
    experts = torch.randint(count, (tokens,), generator=torch.Generator().manual_seed(3)).square() // count
    x, dy = draw(tokens, 24), draw(tokens, 20, seed=1)

    def total(cuts: list[int], shift: int = 0) -> Tensor:
        gradient = Gradient(torch.zeros(count, 20, 24))
        for begin, end in zip(cuts, cuts[1:], strict=False):
            chosen, order = experts[begin:end].sort(stable=True)
            offsets = torch.searchsorted(chosen, torch.arange(count + 1))
            rows = order + begin
            gradient.add(x.roll(shift, 0), dy.roll(shift, 0), (rows + shift) % tokens, chosen, offsets)
        return gradient.finish()

    whole = total([0, tokens])
    gold = torch.stack([dy[experts == e].double().T @ x[experts == e].double() for e in range(count)])
    assert error(whole, gold) < 1e-6
    assert torch.equal(total([0, 1, tokens]), whole) and torch.equal(total([0, 16, 20, tokens], shift=7), whole)


@interpreted
def test_wrong_arguments_are_refused() -> None:
    x, weight, offsets = draw(6, 24), draw(3, 8, 24), offsets_of((1, 2, 3))
    for bad, words in (
        ((x[:, :20], weight, offsets), "takes"),
        ((x[:0], weight, offsets), "takes"),
        ((x, weight[0], offsets), "takes"),
        ((x.half(), weight, offsets), "both be"),
        ((x.to(BF16), weight.to(BF16), offsets), "interpreter"),
        ((x, weight, offsets[:3]), r"int64 \[4\]"),
        ((x, weight, offsets.int()), r"int64 \[4\]"),
        ((x, weight, offsets_of((1, 2, 2))), "ascend from 0 to all rows"),
        ((x, weight, offsets + torch.tensor([1, 0, 0, 0])), "ascend from 0"),
        ((x, weight, offsets + torch.tensor([0, 3, 0, 0])), "ascend from 0"),
    ):
        with pytest.raises(ValueError, match=words):
            grouped_gemm(*bad)
    with pytest.raises(ValueError, match="contiguous fp32"):
        Gradient(torch.zeros(8, 24))
    gradient, rows = Gradient(torch.zeros(3, 8, 24)), torch.arange(6)
    for dy, chosen, words in (
        (draw(6, 7), rows, "do not fit"),
        (draw(6, 8), rows[:5], "are due"),
        (draw(6, 8), rows.int(), "int64"),
    ):
        with pytest.raises(ValueError, match=words):
            gradient.add(x, dy, rows, chosen, offsets)
    with pytest.raises(ValueError, match="ascend from 0 to all rows"):
        gradient.add(x, draw(6, 8), rows, rows, offsets_of((1, 2, 2)))


# ---- compiled for sm_90 ----


@compiled
def test_cpu_tensors_are_refused_without_the_interpreter() -> None:
    with pytest.raises(ValueError, match="run on CUDA"):
        grouped_gemm(draw(6, 24), draw(3, 8, 24), offsets_of((1, 2, 3)))


def warm(launch: grouped.Launch) -> int:
    return spills(launch.kernel.warmup(*launch.args, grid=(1,), **launch.options))


@pytest.mark.parametrize(("tile", "along"), TABLE)
@compiled
def test_every_tile_compiles_without_spills(tile: Tile, along: bool) -> None:
    x, weight, offsets = (torch.empty(*shape, dtype=BF16) for shape in ((256, 512), (4, 512, 512), (5,)))
    with hopper():
        tiles, _ = grouped._table(256, offsets.long(), tile)
        assert warm(grouped._product(x, weight, x, offsets.long(), tiles, tile, along)) == 0


@compiled
def test_the_weight_gradient_and_the_rest_compile_without_spills() -> None:
    x, offsets, total = torch.empty(256, 512, dtype=BF16), torch.empty(5, dtype=torch.int64), torch.empty(4, 512, 512)
    carried = torch.empty(4, dtype=torch.int32)
    with hopper():
        assert warm(grouped._weight_product(x, x, total, offsets, carried, 1, True, grouped.FOLD_TILE)) == 0
        assert warm(grouped._weight_product(x, x, total.to(BF16), offsets, carried, 0, False, grouped.FOLD_TILE)) == 0
        assert warm(grouped._gather_launch(x, offsets, offsets, carried, x)) == 0
        assert warm(grouped._table(256, offsets, grouped.PLAIN)[1]) == 0


# ---- CUDA ----


@gpu
def test_a_row_has_the_bits_of_a_dense_layer_whatever_the_load() -> None:
    from rlspec.kernels.det_gemm import det_gemm

    weight = draw(16, 424, 520, seed=1, dtype=BF16, device="cuda")
    for sizes in ((0,) * 15 + (700,), (0, 1, 2, 15, 16, 17, 64, 129, 300, 0, 3, 0, 0, 8, 31, 33), (1,) + (0,) * 15):
        x, offsets = draw(sum(sizes), 520, dtype=BF16, device="cuda"), offsets_of(sizes, "cuda")
        y, first = grouped_gemm(x, weight, offsets), 0
        for expert, size in enumerate(sizes):
            mine = slice(first, first + size)
            assert not size or torch.equal(y[mine], det_gemm(x[mine], weight[expert]))
            first += size


@gpu
def test_every_tile_gives_the_bits_of_the_plain_kernel() -> None:
    sizes = (0, 1, 33, 129, 0, 300, 64)
    x, weight = draw(sum(sizes), 520, dtype=BF16, device="cuda"), draw(7, 520, 520, seed=1, dtype=BF16, device="cuda")
    offsets = offsets_of(sizes, "cuda")
    for along in (False, True):
        want = torch.empty(len(x), 520, device="cuda")
        tiles, schedule = grouped._table(len(x), offsets, grouped.PLAIN)
        schedule(x.device)
        grouped._plain_product(x, weight, want, offsets, tiles, along)(x.device)
        for tile in (tile for tile, way in TABLE if way == along):
            got = torch.full_like(want, float("nan"))
            tiles, schedule = grouped._table(len(x), offsets, tile)
            schedule(x.device)
            grouped._product(x, weight, got, offsets, tiles, tile, along)(x.device)
            assert torch.equal(got, want), tile
