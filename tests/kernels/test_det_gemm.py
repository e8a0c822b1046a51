"""det_gemm: the formula, bits over layouts and cuts of the rows, every tile of the table, what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rlspec.kernels import det_gemm as gemm
from rlspec.kernels.det_gemm import Tile, det_gemm, fold, lm_head
from rlspec.kernels.embedding import embedding
from rlspec.kernels.residual_add import residual_add
from rlspec.kernels.swiglu import swiglu
from tests.kernels.interpreted import behind, compiled, gpu, hopper, interpreted, spills

BF16 = torch.bfloat16
TMA = "cp.async.bulk.tensor"
TABLE = sorted({tile for entries in gemm.TILES.values() for _, tile in entries})
SMALL = (
    Tile("stripe", 16, 32, 32, 4, 2, swap=True),
    Tile("stripe", 32, 32, 32, 4, 2),
    Tile("single", 32, 64, 32, 4, 2),
    Tile("steady", 32, 64, 32, 4, 2),
    Tile("thirds", 32, 96, 32, 4, 2),
)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


def error(value: Tensor, exact: Tensor) -> float:
    return float((value.double() - exact).norm() / exact.norm())


def same(one: Tensor, other: Tensor) -> bool:
    integer = {2: torch.int16, 4: torch.int32}[one.element_size()]
    return one.dtype == other.dtype and torch.equal(one.contiguous().view(integer), other.contiguous().view(integer))


def table(rows: list[int]) -> Tensor:
    return torch.tensor(rows + [-1] * (-len(rows) % 16), dtype=torch.int32).reshape(-1, 16)


# ---- CPU, interpreter ----


@pytest.mark.parametrize("shape", [(1, 24, 20), (5, 33, 70), (70, 64, 130)])
@interpreted
def test_forward_and_gradients_are_the_formula(shape: tuple[int, int, int]) -> None:
    rows, width, columns = shape
    x, weight, dy = draw(rows, width), draw(columns, width, seed=1), draw(rows, columns, seed=2)
    y = det_gemm(x.requires_grad_(), weight.requires_grad_())
    dx, dweight = torch.autograd.grad(y, (x, weight), dy)
    assert error(y.detach(), x.double() @ weight.double().t()) < 1e-6
    assert error(dx, dy.double() @ weight.double()) < 1e-6
    assert error(dweight, dy.double().t() @ x.double()) < 1e-6


@interpreted
def test_a_row_has_the_same_bits_in_every_layout() -> None:
    # Integers, whose sums are exact: the interpreter's own product of tiles is not invariant.
    x, weight = draw(70, 48).mul(4).round(), draw(40, 48, seed=1).mul(4).round()
    whole = det_gemm(x, weight)
    padded = torch.full((2, 50, 60), float("nan"))
    padded[0, 7:42, :48], padded[1, 10:45, :48] = x[:35], x[35:]
    view = det_gemm(padded[..., :48], weight)
    assert same(det_gemm(x[3:4], weight), whole[3:4])
    assert same(det_gemm(x.flip(0), weight).flip(0), whole)
    assert same(torch.cat((view[0, 7:42], view[1, 10:45])), whole)
    assert same(det_gemm(x.t().contiguous().t(), weight), whole)


@pytest.mark.parametrize("tile", SMALL, ids=lambda tile: f"{tile.kind}-{'swap' if tile.swap else 'plain'}")
@pytest.mark.parametrize("rows", [1, 33, 70])
@interpreted
def test_each_kind_of_tile_is_the_product(tile: Tile, rows: int) -> None:
    x, weight, out = draw(rows, 72), draw(200, 72, seed=1), torch.full((rows, 200), float("nan"))
    gemm._product(x, weight, out, tile)(x.device)
    assert error(out, x.double() @ weight.double().t()) < 1e-6


@pytest.mark.parametrize("rows", [1, 16])
@interpreted
def test_gate_and_up_are_their_products_and_swiglu_is_of_them(rows: int) -> None:
    # Integers, as above. 40 columns each are a whole tile and a part of one, whose box of gates reaches into the ups.
    x, weight = draw(rows, 72).mul(2).round(), draw(80, 72, seed=1).mul(2).round()
    both, activated = torch.full((rows, 80), float("nan")), torch.full((rows, 40), float("nan"))
    gemm._gated_product(x, weight, both, activated, Tile("gated", 16, 32, 32, 4, 2))(x.device)
    assert same(both, det_gemm(x, weight))
    assert same(activated, swiglu(both[:, :40], both[:, 40:]))


@interpreted
def test_gate_and_up_of_many_rows_or_fp32_have_no_kernel() -> None:
    assert gemm.gate_up(draw(1, 64), draw(128, 64)) is None
    with pytest.raises(ValueError, match="gate_up takes"):
        gemm.gate_up(draw(1, 64), draw(127, 64))


@pytest.mark.parametrize("tile", SMALL[2:4], ids=lambda tile: tile.kind)
@interpreted
def test_each_kind_of_tile_is_the_data_gradient(tile: Tile) -> None:
    dy, weight, out = draw(37, 200), draw(200, 72, seed=1), torch.full((37, 72), float("nan"))
    gemm._product(dy, weight, out, tile, along=True)(dy.device)
    assert error(out, dy.double() @ weight.double()) < 1e-6


@pytest.mark.parametrize("resume", [False, True])
@interpreted
def test_the_weight_gradient_through_tensor_memory_access(resume: bool) -> None:
    dy, x, before = draw(50, 40), draw(50, 72, seed=1), draw(40, 72, seed=2)
    out = before.clone() if resume else torch.full((40, 72), float("nan"))
    gemm._weight_product(dy, x, out, resume, Tile("single", 32, 64, 16, 4, 2))(x.device)
    assert error(out, dy.double().t() @ x.double() + before.double() * resume) < 1e-6


@interpreted
def test_fold_has_the_same_bits_for_any_cut_and_layout() -> None:
    lengths, width, columns = (11, 16, 37), 24, 20
    x, dy = draw(sum(lengths), width), draw(sum(lengths), columns, seed=1)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    blocks = torch.cat([table(list(range(s, s + n))) for s, n in zip(starts, lengths, strict=True)])
    whole = torch.zeros(columns, width)
    fold(whole, x, dy, blocks)
    assert error(whole, dy.double().t() @ x.double()) < 1e-6
    cut = torch.zeros(columns, width)
    for block in blocks:
        fold(cut, x, dy, block[None])
    assert same(cut, whole)
    alone = torch.zeros(columns, width)
    for s, n in zip(starts, lengths, strict=True):
        fold(alone, x[s : s + n], dy[s : s + n], table(list(range(n))))
    assert same(alone, whole)
    order = torch.randperm(sum(lengths), generator=torch.Generator().manual_seed(0))
    place = order.argsort().to(torch.int32)
    moved = torch.zeros(columns, width)
    fold(moved, x[order], dy[order], torch.where(blocks < 0, -1, place[blocks.clamp(min=0).long()]))
    assert same(moved, whole)


@interpreted
def test_rows_that_the_table_does_not_name_cannot_leak() -> None:
    x, dy = draw(40, 24), draw(40, 20, seed=1)
    x[10:13], dy[39] = float("nan"), float("nan")
    total = torch.zeros(20, 24)
    fold(total, x, dy, table([*range(10), *range(13, 39)]))
    keep = [*range(10), *range(13, 39)]
    assert error(total, dy[keep].double().t() @ x[keep].double()) < 1e-6


@interpreted
def test_the_gradient_of_autograd_is_one_fold_in_the_order_given() -> None:
    x, weight, dy = draw(2, 19, 24), draw(20, 24, seed=1).requires_grad_(), draw(2, 19, 20, seed=2)
    (dweight,) = torch.autograd.grad(det_gemm(x, weight), weight, dy)
    total = torch.zeros(20, 24)
    fold(total, x.view(-1, 24), dy.view(-1, 20), table(list(range(38))))
    assert same(dweight, total)


@interpreted
def test_contiguous_tables_are_not_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    x, dy, total = draw(40, 24), draw(40, 20, seed=1), torch.zeros(20, 24)
    monkeypatch.setattr(gemm, "_gathered", lambda *_: pytest.fail("gathered"))
    fold(total, x, dy, table(list(range(3, 40))))
    assert error(total, dy[3:].double().t() @ x[3:].double()) < 1e-6
    fold(total, x, dy, torch.full((2, 16), -1, dtype=torch.int32))


@interpreted
def test_lm_head_gives_the_dtype_that_is_asked_for() -> None:
    x, weight = draw(3, 24), draw(40, 24, seed=1)
    assert lm_head(x, weight, out_dtype=torch.float16).dtype == torch.float16
    assert same(lm_head(x, weight, out_dtype=torch.float32), det_gemm(x, weight))


@interpreted
def test_wrong_arguments_are_refused() -> None:
    x, weight, blocks = draw(4, 24), draw(8, 24), table([0, 1])
    for bad_x, bad_weight, words in (
        (x[:, :20], weight, "takes"),
        (x[:0], weight, "empty"),
        (x.half(), weight, "both be"),
        (x.double(), weight.double(), "both be"),
        (x.to(BF16), weight.to(BF16), "interpreter"),
        (x, weight[None], "takes"),
    ):
        with pytest.raises(ValueError, match=words):
            det_gemm(bad_x, bad_weight)
    with pytest.raises(ValueError, match="out_dtype"):
        lm_head(x, weight, out_dtype=torch.float64)
    for total, rows, words in (
        (torch.zeros(8, 24), table([0, 4]), "rows 0 to 4|rows -1 to 4"),
        (torch.zeros(8, 24), blocks - 1, "rows -2"),
        (torch.zeros(8, 24), blocks.long(), "int32"),
        (torch.zeros(8, 24), blocks[:0], "int32"),
        (torch.zeros(8, 20), blocks, "fold takes"),
        (torch.zeros(8, 24).half(), blocks, "accumulator"),
    ):
        with pytest.raises(ValueError, match=words):
            fold(total, x, draw(4, 8), rows)


# ---- compiled for sm_90 ----


@compiled
def test_cpu_tensors_are_refused_without_the_interpreter() -> None:
    with pytest.raises(ValueError, match="run on CUDA"):
        det_gemm(draw(4, 24), draw(8, 24))


@pytest.mark.parametrize("tile", TABLE, ids=lambda tile: "-".join(map(str, tile)))
@compiled
def test_every_tile_compiles_without_spills(tile: Tile) -> None:
    x, weight = torch.empty(256, 512, dtype=BF16), torch.empty(256, 512, dtype=BF16)
    with hopper():
        compiled_one = warm(gemm._product(x, weight, torch.empty(256, 256, dtype=BF16), tile))
    assert spills(compiled_one) == 0
    assert compiled_one.metadata.shared <= 232448
    # The assembler did not make each step of the matrix unit wait for the one before.
    steps = compiled_one.asm["sass"].count("HGMMA")
    assert not steps or compiled_one.asm["sass"].count("WARPGROUP.ARRIVE") < steps


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("rest", [True, False])
@compiled
def test_the_product_of_gate_and_up_reads_a_weight_at_rest_before_its_turn(rows: int, rest: bool) -> None:
    x, weight = torch.empty(rows, 512, dtype=BF16), torch.empty(256, 512, dtype=BF16)
    with hopper(), gemm.weights_at_rest(rest):
        out, activated = torch.empty(rows, 256, dtype=BF16), torch.empty(rows, 128, dtype=BF16)
        made = warm(gemm._gated_product(x, weight, out, activated))
    assert spills(made) == 0 and loads_before_its_turn(made) == (2 if rest else 0)
    assert loads_before_its_loop(made) >= 3 * (gemm.GATED_TILE.stages - 1)


@pytest.mark.parametrize("family", ["square", "wider", "wide", "vocabulary"])
@pytest.mark.parametrize("rows", [1, 17, 33])
@pytest.mark.parametrize("rest", [True, False])
@compiled
def test_a_product_of_few_rows_reads_a_weight_at_rest_before_its_turn(family: str, rows: int, rest: bool) -> None:
    x, weight = torch.empty(rows, 512, dtype=BF16), torch.empty(256, 512, dtype=BF16)
    tile = gemm._tile(family, rows)
    with hopper(), gemm.weights_at_rest(rest):
        made = warm(gemm._product(x, weight, torch.empty(rows, 256, dtype=BF16), tile))
    assert spills(made) == 0
    if tile.kind == "stripe":
        assert loads_before_its_turn(made) == (1 if rest else 0)
        assert loads_before_its_loop(made) >= 2 * (tile.stages - 1)
    else:
        assert "ACQBULK" not in made.asm["sass"]  # starts when all before it has ended


def loads_before_its_turn(kernel: Any) -> int:
    """Boxes asked for before the kernel waits for the one in front, all of the weight; nothing else may be there."""
    before, *behind_it = kernel.asm["sass"].split("ACQBULK")
    assert behind_it and not re.search(r"\b(?:LDG|LDGSTS|STG|UTMASTG)\b", before)
    early, late = kernel.asm["ptx"].split("griddepcontrol.wait", 1)
    x, weight = (boxes(kernel.asm["ptx"], number) for number in (0, 1))
    assert (early.count(TMA), late.count(TMA)) == (weight(early), x(late) + weight(late)) and x(late) and weight(late)
    return before.count("UTMALDG")


def boxes(ptx: str, number: int) -> Callable[[str], int]:
    """How many boxes a piece of a kernel asks for by a descriptor among its parameters: 0 that of x, 1 the weight's."""
    names = {re.findall(r"\.param \.align 64 \.b8 (\w+)\[128\]", ptx)[number]}
    for to, source in re.findall(r"\b(?:mov|cvta?)\.\S+\s+(%\w+), (%?\w+);", ptx):
        if source in names:
            names.add(to)
    box = re.compile(rf"{re.escape(TMA)}[^\[]*\[[^\]]*\], \[(%\w+)")
    return lambda piece: sum(name in names for name in box.findall(piece))


def loads_before_its_loop(kernel: Any) -> int:
    """Boxes asked for in front of it: of all stages but one, where it is pipelined."""
    return int(kernel.asm["sass"].split("SYNCS.PHASECHK")[0].count("UTMALDG"))


@pytest.mark.parametrize("resume", [True, False])
@compiled
def test_the_fold_compiles_without_spills(resume: bool) -> None:
    dy, x = torch.empty(256, 512, dtype=BF16), torch.empty(256, 512, dtype=BF16)
    with hopper():
        assert spills(warm(gemm._weight_product(dy, x, torch.empty(512, 512), resume))) == 0


@compiled
def test_row_counts_do_not_recompile() -> None:
    tile, keys = TABLE[-1], set()
    with hopper():
        for rows in (1, 16, 17, 1024):
            x, weight = torch.empty(rows, 512, dtype=BF16), torch.empty(256, 512, dtype=BF16)
            keys.add(warm(gemm._product(x, weight, torch.empty(rows, 256, dtype=BF16), tile)).hash)
    assert len(keys) == 1


def warm(launch: gemm.Launch) -> Any:
    return launch.kernel.warmup(*launch.args, grid=launch.grid, **launch.options, **behind(launch.kernel))


# ---- GPU ----


@gpu
@pytest.mark.parametrize("width", [4096, 4104, 5000])
@pytest.mark.parametrize("rows", [1, 7, 33, 200])
def test_bits_do_not_depend_on_the_tile(rows: int, width: int) -> None:
    x = draw(rows, width, dtype=BF16, device="cuda") * torch.exp2(draw(rows, 1, seed=5, device="cuda").to(BF16))
    weight = draw(416, width, seed=1, dtype=BF16, device="cuda")
    wanted = torch.empty(rows, 416, device="cuda")
    gemm._plain_product(x, weight, wanted)(x.device)
    assert error(wanted, x.double() @ weight.double().t()) < 2e-5
    for tile in TABLE:
        for out_dtype in (BF16, torch.float32):
            out = torch.full((rows, 416), float("nan"), dtype=out_dtype, device="cuda")
            gemm._product(x, weight, out, tile)(x.device)
            assert same(out, wanted.to(out_dtype)), (tile, out_dtype)


@gpu
@pytest.mark.parametrize("width", [24, 264, 4096])
@pytest.mark.parametrize("columns", [4000, 6000, 17000, 66000])
@pytest.mark.parametrize("rows", [1, 5, 16, 17, 33, 65, 128])
def test_a_weight_at_rest_gives_the_same_bits(rows: int, columns: int, width: int) -> None:
    x = draw(rows, width, dtype=BF16, device="cuda")
    weights = [draw(columns, width, seed=seed, dtype=BF16, device="cuda") for seed in (1, 2)]
    used, ids = torch.empty_like(weights[0]), torch.arange(rows, device="cuda")
    wanted = [det_gemm(x, weight) for weight in weights]
    for turn in range(50):
        used.copy_(weights[turn % 2])
        same_x = embedding(ids, x)  # behind it the weight rests
        with gemm.weights_at_rest():
            found = [det_gemm(same_x, used), det_gemm(residual_add(same_x, same_x), used)]
        assert same(found[0], wanted[turn % 2]) and same(found[1], wanted[turn % 2] * 2)


@gpu
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize(("columns", "width"), [(12288, 4096), (1001, 520), (33, 136), (7, 8)])
def test_gate_and_up_at_once_have_the_bits_of_the_operators(columns: int, width: int, dtype: torch.dtype) -> None:
    weight = draw(2 * columns, width, seed=1, dtype=dtype, device="cuda") / 8
    for rows in (1, 2, 3, 8, 9, 16):
        x = draw(rows, 1, width, dtype=dtype, device="cuda")
        want = det_gemm(x, weight)
        for rest in (False, True):
            with gemm.weights_at_rest(rest):
                made = gemm.gate_up(x, weight)
            assert made is not None and same(made[0], want)
            assert same(made[1], swiglu(want[..., :columns], want[..., columns:]))
    assert gemm.gate_up(draw(17, width, dtype=dtype, device="cuda"), weight) is None


@gpu
@pytest.mark.parametrize("rows", [1, 37, 300])
def test_bits_of_the_data_gradient_do_not_depend_on_the_tile(rows: int) -> None:
    dy = draw(rows, 1000, dtype=BF16, device="cuda")
    weight = draw(1000, 416, seed=1, dtype=BF16, device="cuda")
    wanted = torch.empty(rows, 416, dtype=BF16, device="cuda")
    gemm._plain_product(dy, weight.t(), wanted)(dy.device)
    for tile in TABLE:
        if tile.kind in ("single", "steady"):
            out = torch.full((rows, 416), float("nan"), dtype=BF16, device="cuda")
            gemm._product(dy, weight, out, tile, along=True)(dy.device)
            assert same(out, wanted), tile


@gpu
def test_bits_do_not_depend_on_rows_or_neighbours() -> None:
    x = draw(1030, 4096, dtype=BF16, device="cuda")
    weight = draw(6144, 4096, seed=1, dtype=BF16, device="cuda")
    whole = det_gemm(x, weight)
    for rows in (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 257, 513, 1000):
        assert same(det_gemm(x[5 : 5 + rows], weight), whole[5 : 5 + rows]), rows


@gpu
def test_fold_on_the_gpu_has_the_same_bits_for_any_cut() -> None:
    x, dy = draw(1000, 512, dtype=BF16, device="cuda"), draw(1000, 768, seed=1, dtype=BF16, device="cuda")
    rows = table(list(range(1000)))
    whole, device, plain = (torch.zeros(768, 512, device="cuda") for _ in range(3))
    fold(whole, x, dy, rows)
    fold(device, x, dy, rows.cuda())
    gemm._plain_product(dy.t(), x.t(), plain, resume=True)(x.device)
    assert same(device, whole) and same(plain, whole)
    assert error(whole, dy.double().t() @ x.double()) < 1e-5
    for cut in (1, 4, 28, 32):
        parts = torch.zeros(768, 512, device="cuda")
        for first in range(0, len(rows), cut):
            fold(parts, x, dy, rows[first : first + cut])
        assert same(parts, whole), cut


@gpu
def test_a_row_that_does_not_exist_shows() -> None:
    x, dy = draw(16, 64, dtype=BF16, device="cuda"), draw(16, 64, seed=1, dtype=BF16, device="cuda")
    total = torch.zeros(64, 64, device="cuda")
    fold(total, x, dy, table([0, 16]).cuda())
    assert total.isnan().all()
