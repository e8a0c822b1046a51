"""rms_norm: the formula, bits over layouts and cuts of the rows, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rlspec.kernels import rms_norm as norm
from rlspec.kernels.residual_add import residual_add
from rlspec.kernels.rms_norm import fold, rms_norm
from rlspec.kernels.rope import rope
from tests.kernels.interpreted import behind, compiled, gpu, hopper, interpreted, spills

BF16 = torch.bfloat16
EPS = 1e-6


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


def exact(x: Tensor, weight: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Value and both gradients in fp64."""
    x, weight = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    value = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight
    return value.detach(), *torch.autograd.grad(value, (x, weight), dy.double())


def error(value: Tensor, wanted: Tensor) -> float:
    return float((value.double() - wanted).norm() / wanted.norm())


def same(one: Tensor, other: Tensor) -> bool:
    integer = {2: torch.int16, 4: torch.int32}[one.element_size()]
    return one.dtype == other.dtype and torch.equal(one.contiguous().view(integer), other.contiguous().view(integer))


def table(rows: list[int]) -> Tensor:
    return torch.tensor(rows + [-1] * (-len(rows) % 16), dtype=torch.int32).reshape(-1, 16)


# ---- CPU, interpreter ----


@pytest.mark.parametrize("shape", [(8,), (1, 100), (37, 256), (2, 19, 4096), (2, 9, 3, 128), (3, 5, 2, 6)])
@interpreted
def test_value_and_gradients_are_the_formula(shape: tuple[int, ...]) -> None:
    x, weight, dy = draw(*shape).requires_grad_(), draw(shape[-1], seed=1).requires_grad_(), draw(*shape, seed=2)
    value = rms_norm(x, weight, eps=EPS)
    found = (value.detach(), *torch.autograd.grad(value, (x, weight), dy))
    wanted = exact(x, weight, dy)
    assert all(error(one, other) < 1e-6 for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("width", [24, 100, 128])
@interpreted
def test_the_norm_of_a_sum_is_the_two_operators(width: int, early: bool) -> None:
    residual, x, weight = draw(2, 19, width), draw(2, 19, width, seed=1), draw(width, seed=2)
    found = norm.residual_norm(residual, x, weight, eps=EPS, round_before_weight=early)
    assert found is not None
    total = residual_add(residual, x)
    assert same(found[0], total)
    assert same(found[1], rms_norm(total, weight, eps=EPS, round_before_weight=early))
    assert norm.residual_norm(residual[..., ::2], x[..., ::2], weight[::2], eps=EPS) is None


@pytest.mark.parametrize(("grid", "heads"), [((1, 1), (4, 2)), ((2, 19), (3, 1))])
@pytest.mark.parametrize("width", [8, 64])
@interpreted
def test_rotated_heads_are_the_two_operators(width: int, grid: tuple[int, int], heads: tuple[int, int]) -> None:
    joined = draw(*grid, sum(heads) + 1, width)
    query, key = joined[:, :, : heads[0]], joined[:, :, heads[0] : -1]
    weights, tables = [draw(width, seed=i) for i in (1, 2)], [draw(*grid, width // 2, seed=i) for i in (3, 4)]
    found = norm.rotated_heads(query, key, *weights, *tables, eps=EPS)
    assert found is not None
    for x, weight, normed, rotated in zip((query, key), weights, found[:2], found[2:], strict=True):
        want = rms_norm(x, weight, eps=EPS)
        assert same(normed, want) and same(rotated, rope(want, *tables))
    assert norm.rotated_heads(query[..., :6], key[..., :6], *[draw(6)] * 2, *[draw(*grid, 3)] * 2, eps=EPS) is None


@interpreted
def test_rotated_keys_and_values_go_into_the_cache_too() -> None:
    joined = draw(2, 5, 5, 16)
    query, key, value = joined[:, :, :2], joined[:, :, 2:3], joined[:, :, 4:]
    given = (query, key, *[draw(16, seed=i) for i in (1, 2)], *[draw(2, 5, 8, seed=i) for i in (3, 4)])
    keys, values = (torch.full((3, 1, 6, 16), float("nan")) for _ in range(2))
    block = torch.tensor([[0, -1, 0, 2, -1], [-1, 1, 1, 1, -1]])
    place = torch.tensor([[3, 9, 0, 5, 9], [9, 1, 2, 3, 9]])
    places = torch.stack((block, place)).flatten(1)
    found = norm.rotated_heads(*given, eps=EPS, value=value, slots=(keys, values, places))
    alone = norm.rotated_heads(*given, eps=EPS)
    assert found is not None and alone is not None and all(map(same, found, alone))
    stored = block >= 0
    for store, new in ((keys, alone[3]), (values, value)):
        want = torch.full_like(store, float("nan"))
        want[block[stored], :, place[stored]] = new[stored]
        assert torch.equal(store.nan_to_num(7), want.nan_to_num(7))
    assert norm.rotated_heads(*given, eps=EPS, value=value[..., ::2], slots=(keys, values, places)) is None


@pytest.mark.parametrize("width", [128, 96])
@interpreted
def test_a_row_has_the_same_bits_in_every_layout(width: int) -> None:
    x, weight, dy = draw(40, 3, width), draw(width, seed=1), draw(40, 3, width, seed=2)

    def both(x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        value = rms_norm(x.detach().requires_grad_(), weight, eps=EPS)
        leaf = x.detach().requires_grad_()
        return value.detach(), torch.autograd.grad(rms_norm(leaf, weight, eps=EPS), leaf, dy)[0]

    whole = both(x, dy)
    fused = torch.full((40, 7, width), float("nan"))
    fused[:, 2:5] = x
    shifted = torch.empty(x.numel() + 1)[1:].view(x.shape).copy_(x)
    for view in (fused[:, 2:5], shifted, x.transpose(0, 1).contiguous().transpose(0, 1)):
        assert all(same(one, other) for one, other in zip(both(view, dy), whole, strict=True))
    for rows in (slice(0, 1), slice(5, 38)):
        assert all(same(one, other[rows]) for one, other in zip(both(x[rows], dy[rows]), whole, strict=True))
    spread = torch.empty(40, 3, 2 * width)[..., :width].copy_(dy)
    assert same(both(x, spread)[1], whole[1])


@pytest.mark.parametrize(("heads", "width"), [(1, 300), (3, 32)])
@interpreted
def test_fold_has_the_same_bits_for_any_cut_and_layout(heads: int, width: int) -> None:
    lengths = (11, 16, 37)
    x, dy = draw(64, heads, width), draw(64, heads, width, seed=1)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    blocks = torch.cat([table(list(range(s, s + n))) for s, n in zip(starts, lengths, strict=True)])
    whole = torch.zeros(width)
    fold(whole, x, dy, blocks, eps=EPS)
    assert error(whole, exact(x, torch.ones(width), dy)[2]) < 1e-6
    cut = torch.zeros(width)
    for block in blocks:
        fold(cut, x, dy, block[None], eps=EPS)
    assert same(cut, whole)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    place = order.argsort().to(torch.int32)
    moved = torch.zeros(width)
    fold(moved, x[order], dy[order], torch.where(blocks < 0, -1, place[blocks.clamp(min=0).long()]), eps=EPS)
    assert same(moved, whole)


@pytest.mark.parametrize("blocks", [1, 128, 300])
@interpreted
def test_blocks_are_added_one_by_one(blocks: int) -> None:
    sums, total = draw(blocks, 40), draw(40, seed=1)
    wanted = total.clone()
    for block in sums:
        wanted += block
    norm._chain_launch(sums, total)(sums.device)
    assert same(total, wanted)


@interpreted
def test_rows_that_the_table_does_not_name_cannot_leak() -> None:
    x, dy, total = draw(20, 2, 32), draw(20, 2, 32, seed=1), torch.zeros(32)
    x[3], dy[19] = float("nan"), float("nan")
    keep = [*range(3), *range(4, 19)]
    fold(total, x, dy, table(keep), eps=0.0)
    assert total.isfinite().all()
    again = torch.zeros(32)
    fold(again, x[keep], dy[keep], table(list(range(18))), eps=0.0)
    assert same(again, total)


@interpreted
def test_the_gradient_of_autograd_is_one_fold_in_the_order_given() -> None:
    x, dy, weight = draw(2, 19, 3, 32), draw(2, 19, 3, 32, seed=1), draw(32, seed=2).requires_grad_()
    (dweight,) = torch.autograd.grad(rms_norm(x, weight, eps=EPS), weight, dy)
    total = torch.zeros(32)
    fold(total, x.view(38, 3, 32), dy.view(38, 3, 32), table(list(range(38))), eps=EPS)
    assert same(dweight, total)


@interpreted
def test_wrong_arguments_are_refused() -> None:
    x, weight, blocks = draw(4, 2, 24), draw(24), table([0, 1])
    for bad_x, bad_weight, words in (
        (x[..., :20], weight, "takes"),
        (x[:0], weight, "empty"),
        (x.half(), weight, "both be"),
        (x.to(BF16), weight.to(BF16), "interpreter"),
        (torch.empty(1, 65537), torch.empty(65537), "65536"),
    ):
        with pytest.raises(ValueError, match=words):
            rms_norm(bad_x, bad_weight, eps=EPS)
    for total, rows, words in (
        (torch.zeros(24), table([0, 4]), "rows -1 to 4"),
        (torch.zeros(24), blocks.long(), "int32"),
        (torch.zeros(20), blocks, "fold takes"),
        (torch.zeros(24).half(), blocks, "accumulator"),
    ):
        with pytest.raises(ValueError, match=words):
            fold(total, x, draw(4, 2, 24), rows, eps=EPS)


# ---- compiled for sm_90 ----


@pytest.mark.parametrize("shape", [(32, 1, 4096), (32, 32, 128)])
@compiled
def test_all_kernels_compile_without_spills(shape: tuple[int, int, int]) -> None:
    x, weight = torch.empty(shape, dtype=BF16), torch.empty(shape[-1], dtype=BF16)
    sums = torch.empty(2, shape[-1])
    launches = (
        norm._forward_launch(x, weight, x, EPS, False),
        norm._data_launch(x, weight, x, x, EPS),
        norm._sums_launch(x, x, torch.empty(2, 16, dtype=torch.int32), sums, EPS),
        norm._chain_launch(sums, torch.empty(shape[-1])),
    )
    with hopper():
        kernels = [warm(launch) for launch in launches]
    assert [spills(kernel) for kernel in kernels] == [0] * 4
    # The row is read 16 bytes at a time.
    assert all(".128" in kernel.asm["sass"] for kernel in kernels[:3])


@compiled
@pytest.mark.parametrize(("width", "dtype"), [(8192, torch.float32), (16384, torch.float32), (65536, BF16)])
def test_wide_rows_fit_into_shared_memory(width: int, dtype: torch.dtype) -> None:
    x, blocks = torch.empty(32, 1, width, dtype=dtype), torch.empty(2, 16, dtype=torch.int32)
    with hopper():
        assert warm(norm._sums_launch(x, x, blocks, torch.empty(2, width), EPS)).metadata.shared <= 232448


@compiled
def test_row_counts_and_strides_do_not_recompile() -> None:
    weight, hashes = torch.empty(128, dtype=BF16), set()
    with hopper():
        for rows, heads in ((1, 1), (16, 4), (17, 5)):
            x = torch.empty(rows, heads + 3, 128, dtype=BF16)[:, :heads]
            hashes.add(warm(norm._forward_launch(x, weight, torch.empty(x.shape, dtype=BF16), EPS, False)).hash)
    assert len(hashes) == 1


def warm(launch: norm.Launch) -> Any:
    return launch.kernel.warmup(*launch.args, grid=launch.grid, **launch.options, **behind(launch.kernel))


# ---- GPU ----


@gpu
@pytest.mark.parametrize("width", [4096, 128, 100, 5120])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_bits_do_not_depend_on_the_layout(width: int, dtype: torch.dtype) -> None:
    x, dy = draw(300, 4, width, dtype=dtype, device="cuda"), draw(300, 4, width, seed=1, dtype=dtype, device="cuda")
    weight = draw(width, seed=2, dtype=dtype, device="cuda").requires_grad_()

    def both(x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        leaf = x.detach().requires_grad_()
        value = rms_norm(leaf, weight, eps=EPS)
        return value.detach(), torch.autograd.grad(value, leaf, dy)[0]

    whole = both(x, dy)
    wanted = exact(x, weight, dy)
    limit = 3e-3 if dtype == BF16 else 1e-6
    assert all(error(one, other) < limit for one, other in zip(whole, wanted, strict=False))
    shifted = torch.empty(x.numel() + 1, dtype=dtype, device="cuda")[1:].view(x.shape).copy_(x)
    fused = torch.full((300, 7, width), float("nan"), dtype=dtype, device="cuda")
    fused[:, 2:6] = x
    for view in (shifted, fused[:, 2:6]):
        assert all(same(one, other) for one, other in zip(both(view, dy), whole, strict=True))
    for rows in (1, 17, 129):
        part = slice(7, 7 + rows)
        assert all(same(one, other[part]) for one, other in zip(both(x[part], dy[part]), whole, strict=True))


@gpu
@pytest.mark.parametrize(("heads", "width"), [(1, 4096), (8, 128)])
def test_fold_on_the_gpu_has_the_same_bits_for_any_cut(heads: int, width: int) -> None:
    x = draw(200, heads, width, dtype=BF16, device="cuda")
    dy = draw(200, heads, width, seed=1, dtype=BF16, device="cuda")
    rows = table(list(range(200))).cuda()
    whole, parts = torch.zeros(2, width, device="cuda")
    fold(whole, x, dy, rows, eps=EPS)
    for block in rows:
        fold(parts, x, dy, block[None], eps=EPS)
    assert same(parts, whole)
    assert error(whole, exact(x, torch.ones(width, device="cuda"), dy)[2]) < 1e-6
    fold(whole, x, dy, rows + 9, eps=EPS)
    assert whole.isnan().all()
