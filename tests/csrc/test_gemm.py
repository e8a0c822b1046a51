"""CUDA matrix products: what the compiler made of them, what they refuse, and on a GPU their bits beside Triton's."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from rlspec import nvcc
from rlspec.device import cuda_gemm as cuda
from rlspec.device import cuda_rows
from rlspec.kernels import det_gemm as triton_gemm
from rlspec.kernels import linear_logprob as triton_head

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SOURCES = ("det_gemm", "linear_logprob")
# Kernels without the warpgroup matrix unit: of any strides, of tables of rows, and of rows of partial sums.
OTHERS = ("5plain", "12place_blocks", "4join")
TILES = (*cuda.FEW, *cuda.MANY)
needs_nvcc = pytest.mark.skipif(nvcc.find() is None, reason="needs nvcc")


def gpu(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")(test))


# ---- the compiler's work ----


@needs_nvcc
@pytest.mark.parametrize("source", SOURCES)
def test_nothing_spills_and_products_stay_in_flight(source: str) -> None:
    built = nvcc.build(source)
    assert "C75" not in built.ptxas, "ptxas serializes products, or ignores the registers asked for"
    assert not [name for name, usage in nvcc.usage(built.ptxas).items() if usage.spilled or usage.stack]


@needs_nvcc
@pytest.mark.parametrize("source", SOURCES)
def test_products_run_on_the_warpgroup_matrix_unit(source: str) -> None:
    kernels = dict(_machine_code(source))
    matrix = {name: code for name, code in kernels.items() if not any(other in name for other in OTHERS)}
    assert matrix and len(kernels) - len(matrix) == {"det_gemm": 4, "linear_logprob": 1}[source]
    assert not [name for name, code in matrix.items() if "HGMMA" not in code or "UTMALDG" not in code]
    # A first stage and a loop: the products of a stage do not wait for one another.
    assert not [name for name, code in matrix.items() if code.count("WARPGROUP.ARRIVE") > 2]


def _machine_code(source: str) -> Iterator[tuple[str, str]]:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    command = [str(tool), "-sass", str(nvcc.build(source).path)]
    for part in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("Function : ")[1:]:
        name, _, code = part.partition("\n")
        yield name, code


def test_every_tile_of_the_table_is_built() -> None:
    kernels = (nvcc.SOURCES / "det_gemm.cu").read_text(encoding="utf-8")
    for function, tiles in (("forward", TILES), ("along", [tile for tile in TILES if tile.along])):
        body = kernels[kernels.index(f"cudaError_t {function}(int64_t tile") :].split("\n}\n")[0]
        built = [
            [part.strip(" )") for part in line.split("(")[1].split(",")]
            for line in body.splitlines()
            if "TILE(" in line
        ]
        assert sorted(int(words[0]) for words in built) == sorted(tile.number for tile in tiles), function
        for number, swapped, *sizes in built:
            tile = next(tile for tile in tiles if tile.number == int(number))
            shape = (tile.rows, tile.columns)
            assert tuple(map(int, sizes[:2])) == (shape[::-1] if swapped == "true" else shape), tile
    lean = [line.split("(")[1].split(",") for line in kernels.splitlines() if line.startswith("        LEAN(")]
    assert [(int(number), int(columns)) for number, columns, *_ in lean] == [(t.number, t.columns) for t in cuda.LEAN]


def test_the_tile_is_the_one_that_measures_best() -> None:
    for rows, columns, wanted in (
        *((1, 4096, (8, 32)), (1, 6144, (8, 48)), (8, 12288, (8, 96)), (1, 24576, (8, 192)), (1, 151936, (8, 192))),
        *((9, 6144, (16, 64)), (16, 4096, (16, 64)), (32, 24576, (32, 64))),
        *((64, 4096, (64, 64)), (128, 6144, (64, 96)), (256, 4096, (64, 128)), (256, 6144, (64, 192))),
        *((512, 4096, (128, 128)), (512, 6144, (128, 192)), (1024, 4096, (128, 256)), (1024, 6144, (256, 192))),
        *((4096, 4096, (128, 256)), (4096, 24576, (256, 192)), (4096, 151936, (256, 192))),
    ):
        assert cuda._tile(rows, columns, 132)[1:3] == wanted, (rows, columns)
    assert cuda._tile(1, 4096, 132, along=True).along and cuda._tile(512, 12288, 132, along=True)[1:3] == (256, 192)


# ---- what is refused ----


def rows(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.ones(shape, dtype=dtype)


def odd(*shape: int) -> Tensor:
    """A sum that starts at an odd element, as in a flat buffer behind a gradient of an odd size."""
    return torch.zeros(1 + math.prod(shape))[1:].view(shape)


BLOCKS = torch.tensor([[0, 1, *[-1] * 14]], dtype=torch.int32)
TARGETS = torch.zeros(4, dtype=torch.int64)
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "device": (lambda: cuda.det_gemm(rows(4, 24), rows(8, 24)), "run on CUDA"),
    "widths": (lambda: cuda.det_gemm(rows(4, 16), rows(8, 24)), "takes"),
    "no rows": (lambda: cuda.det_gemm(rows(0, 24), rows(8, 24)), "empty"),
    "a number": (lambda: cuda.det_gemm(rows(), rows(8, 24)), "takes"),
    "dtypes": (lambda: cuda.det_gemm(rows(4, 24), rows(8, 24, dtype=FP16)), "both be"),
    "fp64": (lambda: cuda.det_gemm(rows(4, 24).double(), rows(8, 24).double()), "both be"),
    "out_dtype": (lambda: cuda.lm_head(rows(4, 24), rows(8, 24), out_dtype=torch.float64), "out_dtype"),
    "gates": (lambda: cuda.gate_up(rows(4, 24), rows(7, 24)), "gate_up takes"),
    "gates, device": (lambda: cuda.gate_up(rows(4, 24), rows(8, 24)), "run on CUDA"),
    "fold, device": (lambda: cuda.fold(torch.zeros(8, 24), rows(4, 24), rows(4, 8), BLOCKS), "run on CUDA"),
    "fold, rows": (lambda: cuda.fold(torch.zeros(8, 24), rows(4, 24), rows(5, 8), BLOCKS), "fold takes"),
    "fold, shape": (lambda: cuda.fold(torch.zeros(8, 20), rows(4, 24), rows(4, 8), BLOCKS), "fold takes"),
    "fold, sum": (lambda: cuda.fold(torch.zeros(8, 24).half(), rows(4, 24), rows(4, 8), BLOCKS), "accumulator"),
    "fold, start": (lambda: cuda.fold(odd(8, 24), rows(4, 24), rows(4, 8), BLOCKS), "multiple of 8 bytes"),
    "fold, start of an odd width": (lambda: cuda.fold(odd(8, 23), rows(4, 23), rows(4, 8), BLOCKS), "run on CUDA"),
    "fold, row": (lambda: cuda.fold(torch.zeros(8, 24), rows(1, 24), rows(1, 8), BLOCKS), "rows -1 to 1 of 1"),
    "fold, table": (lambda: cuda.fold(torch.zeros(8, 24), rows(4, 24), rows(4, 8), BLOCKS.long()), "int32"),
    "fold, no block": (lambda: cuda.fold(torch.zeros(8, 24), rows(4, 24), rows(4, 8), BLOCKS[:0]), "int32"),
    "head, device": (lambda: cuda.linear_logprob(rows(4, 24), rows(8, 24), TARGETS), "run on CUDA"),
    "head, fp32": (lambda: cuda.linear_logprob(rows(4, 24).float(), rows(8, 24).float(), TARGETS), "triton"),
    "head, targets": (lambda: cuda.linear_logprob(rows(4, 24), rows(8, 24), TARGETS.int()), "int64"),
    "head, shapes": (lambda: cuda.linear_logprob(rows(5, 24), rows(8, 24), TARGETS), "takes"),
    "head, rows": (lambda: cuda.linear_logprob(rows(4, 20), rows(8, 20), TARGETS), "16 bytes"),
    "head, sum": (
        lambda: cuda.fold_logprob(torch.zeros(8, 16), rows(4, 24), rows(8, 24), TARGETS, torch.ones(4), BLOCKS),
        "accumulator",
    ),
    "head, start": (
        lambda: cuda.fold_logprob(odd(8, 24), rows(4, 24), rows(8, 24), TARGETS, torch.ones(4), BLOCKS),
        "multiple of 8 bytes",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    call, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        call()


def test_gate_and_up_of_many_rows_or_fp32_have_no_kernel() -> None:
    assert cuda.gate_up(rows(9, 24), rows(8, 24)) is None
    assert cuda.gate_up(rows(4, 24, dtype=FP32), rows(8, 24, dtype=FP32)) is None
    assert cuda.gate_up(rows(4, 20), rows(8, 20)) is None


def test_signatures_are_those_of_triton() -> None:
    for name, ours, theirs in (
        ("det_gemm", cuda.det_gemm, triton_gemm.det_gemm),
        ("lm_head", cuda.lm_head, triton_gemm.lm_head),
        ("gate_up", cuda.gate_up, triton_gemm.gate_up),
        ("fold", cuda.fold, triton_gemm.fold),
        ("linear_logprob", cuda.linear_logprob, triton_head.linear_logprob),
        ("fold_logprob", cuda.fold_logprob, triton_head.fold),
    ):
        assert ours.__annotations__ == theirs.__annotations__, name
        assert ours.__defaults__ == theirs.__defaults__, name


# ---- bits, on a GPU ----


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = FP32, spread: float = 0.0) -> Tensor:
    """Normal numbers; rows scaled by 2 to the power of a normal number times `spread`."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    scale = torch.exp2(torch.randn((*shape[:-1], 1), generator=generator) * spread)
    return (values * scale).to("cuda", dtype)


def same(one: Tensor, other: Tensor) -> bool:
    integer = {2: torch.int16, 4: torch.int32}[one.element_size()]
    return one.dtype == other.dtype and torch.equal(one.contiguous().view(integer), other.contiguous().view(integer))


def table(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers + [-1] * (-len(numbers) % 16), dtype=torch.int32).reshape(-1, 16)


def error(value: Tensor, exact: Tensor) -> float:
    return float((value.double() - exact).norm() / exact.norm())


@gpu
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("width", [4096, 4104, 5000])
@pytest.mark.parametrize("count", [1, 7, 33, 200])
def test_every_tile_has_the_bits_of_triton(count: int, width: int, seed: int) -> None:
    for dtype in (BF16, FP16):
        x = draw(count, width, seed=seed, dtype=dtype, spread=2.0 * (seed == 2))
        weight = draw(416, width, seed=seed + 10, dtype=dtype, spread=2.0 * (seed == 2))
        wanted = torch.empty(count, 416, device="cuda")
        triton_gemm._plain_product(x, weight, wanted)(x.device)
        assert error(wanted, x.double() @ weight.double().t()) < 2e-5
        for tile in (*TILES, *(cuda.LEAN if count <= 8 else ())):
            for out_dtype in (dtype, FP32):
                out = torch.full((count, 416), float("nan"), dtype=out_dtype, device="cuda")
                cuda._product(x, weight, out, tile)
                assert same(out, wanted.to(out_dtype)), (tile, dtype, out_dtype)


@gpu
@pytest.mark.parametrize("width", [24, 264, 4096])
@pytest.mark.parametrize("count", [1, 8, 16, 40])
def test_a_weight_at_rest_gives_the_same_bits(count: int, width: int) -> None:
    x, weights = draw(count, width, dtype=BF16), [draw(600, width, seed=i, dtype=BF16) for i in (1, 2)]
    used, ids = torch.empty_like(weights[0]), torch.arange(count, device="cuda")
    wanted = [cuda.det_gemm(x, weight) for weight in weights]
    for turn in range(50):
        used.copy_(weights[turn % 2])
        rows = cuda_rows.embedding(ids, x)  # behind it the weight rests
        with cuda.weights_at_rest():
            found = [cuda.det_gemm(rows, used), cuda.det_gemm(cuda_rows.residual_add(rows, rows), used)]
            both = cuda.gate_up(rows, used)
        assert same(found[0], wanted[turn % 2]) and same(found[1], wanted[turn % 2] * 2)
        assert both is None if count > 8 else same(both[0], wanted[turn % 2])


@gpu
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize(("columns", "width"), [(12288, 4096), (1001, 520), (33, 136), (200, 4104), (7, 8)])
def test_gate_and_up_at_once_have_the_bits_of_the_operators(columns: int, width: int, dtype: torch.dtype) -> None:
    weight = draw(2 * columns, width, seed=1, dtype=dtype) / 8
    for count in range(1, 9):
        x = draw(count, width, dtype=dtype)
        wanted = triton_gemm.det_gemm(x, weight)
        activated = cuda_rows.swiglu(wanted[:, :columns], wanted[:, columns:])
        assert all(map(same, cuda.gate_up(x[:, None], weight), (wanted[:, None], activated[:, None])))
        for tile in cuda.LEAN:
            made = torch.full_like(wanted, float("nan")), torch.full_like(activated, float("nan"))
            cuda._gated_product(x, weight, *made, tile)
            assert same(made[0], wanted) and same(made[1], activated), (count, tile)


@gpu
def test_a_weight_that_the_kernel_before_has_made_is_whole() -> None:
    x, made, weight = draw(4, 512, dtype=BF16), draw(700, 256, seed=1, dtype=BF16), draw(512, 256, seed=2, dtype=BF16)
    wanted = triton_gemm.det_gemm(x, triton_gemm.det_gemm(made, weight))
    for _ in range(50):
        assert same(cuda.det_gemm(x, cuda.det_gemm(made, weight)), wanted)


@gpu
@pytest.mark.parametrize("count", [1, 37, 300])
def test_every_tile_of_the_data_gradient_has_the_bits_of_triton(count: int) -> None:
    for dtype in (BF16, FP16):
        dy, weight = draw(count, 1000, dtype=dtype), draw(1000, 416, seed=1, dtype=dtype)
        wanted = torch.empty(count, 416, dtype=dtype, device="cuda")
        triton_gemm._plain_product(dy, weight.t(), wanted)(dy.device)
        for tile in (tile for tile in TILES if tile.along):
            out = torch.full_like(wanted, float("nan"))
            cuda._product(dy, weight, out, tile, along=True)
            assert same(out, wanted), (tile, dtype)


@gpu
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("shape", [(5, 33, 70), (70, 64, 130), (130, 512, 1000), (1030, 1024, 2048)])
def test_the_operator_and_its_gradients_have_the_bits_of_triton(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    count, width, columns = shape
    x, weight = draw(count, width, dtype=dtype), draw(columns, width, seed=1, dtype=dtype)
    dy = draw(count, columns, seed=2, dtype=dtype)
    found = []
    for module in (cuda, triton_gemm):
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        y = module.det_gemm(*leaves)
        logits = module.lm_head(x, weight, out_dtype=FP32)
        found.append((y.detach(), logits, *torch.autograd.grad(y, leaves, dy)))
    assert all(same(ours, theirs) for ours, theirs in zip(*found, strict=True))


@gpu
def test_bits_do_not_depend_on_rows_or_neighbours() -> None:
    x, weight = draw(1030, 4096, dtype=BF16), draw(6144, 4096, seed=1, dtype=BF16)
    whole = cuda.det_gemm(x, weight)
    for count in (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1000):
        assert same(cuda.det_gemm(x[5 : 5 + count], weight), whole[5 : 5 + count]), count


@gpu
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("shape", [(1000, 768, 512), (100, 200, 328), (16, 64, 64), (16, 8, 8), (65, 6152, 4104)])
def test_the_fold_has_the_bits_of_triton_for_any_cut_and_table(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    count, columns, width = shape
    x, dy = draw(count, width, dtype=dtype), draw(count, columns, seed=1, dtype=dtype)
    before, blocks = draw(columns, width, seed=2), table(list(range(count)))
    wanted = before.clone()
    triton_gemm.fold(wanted, x, dy, blocks)
    for cut in (1, 3, 28, len(blocks)):
        for on_device in (False, True):
            total = before.clone()
            for first in range(0, len(blocks), cut):
                part = blocks[first : first + cut]
                cuda.fold(total, x, dy, part.cuda() if on_device else part)
            assert same(total, wanted), (cut, on_device)


@gpu
def test_the_fold_into_a_weight_whose_rows_are_no_multiple_of_8_has_the_bits_of_triton() -> None:
    x, dy, before = draw(100, 328, dtype=BF16), draw(100, 72, seed=1, dtype=BF16)[:, :70], draw(70, 328, seed=2)
    totals = [before.clone() for _ in range(2)]
    for module, total in zip((triton_gemm, cuda), totals, strict=True):
        for rows in (slice(48), slice(48, None)):
            module.fold(total, x[rows], dy[rows])
    assert same(*totals)


@gpu
def test_the_fold_of_scattered_and_ragged_rows_has_the_bits_of_triton() -> None:
    x, dy = draw(1000, 512, dtype=BF16), draw(1000, 768, seed=1, dtype=BF16)
    x[700], dy[700] = float("inf"), float("nan")  # of no block
    order = torch.randperm(600, generator=torch.Generator().manual_seed(0)).tolist()
    blocks = torch.cat((table(order[:333]), table(list(range(200, 700))), table(list(range(701, 1000)))))
    totals = torch.zeros(2, 768, 512, device="cuda")
    triton_gemm.fold(totals[0], x, dy, blocks)
    cuda.fold(totals[1], x, dy, blocks)
    assert same(totals[1], totals[0])


@gpu
def test_a_row_that_does_not_exist_shows() -> None:
    x, dy, total = draw(16, 64, dtype=BF16), draw(16, 64, seed=1, dtype=BF16), torch.zeros(64, 64, device="cuda")
    cuda.fold(total, x, dy, table([0, 16]).cuda())
    assert total.isnan().all()


@gpu
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("shape", [(5, 70, 64), (200, 600, 512), (33, 1000, 72), (130, 40000, 256), (16, 151936, 64)])
def test_linear_logprob_has_the_bits_of_triton(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    count, vocabulary, width = shape
    x, weight = draw(count, width, dtype=dtype), (draw(vocabulary, width, seed=1) / 8).to(dtype)
    targets = torch.arange(count, device="cuda") * 7919 % vocabulary
    x[1], targets[1] = float("nan"), -100
    gradient, blocks = draw(count, seed=3), table(list(range(0, count, 2)))
    found = []
    for module, fold in ((cuda, cuda.fold_logprob), (triton_head, triton_head.fold)):
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        y = module.linear_logprob(*leaves, targets)
        total = torch.ones(vocabulary, width, device="cuda")
        fold(total, x, weight, targets, gradient, blocks)
        found.append((y.detach(), *torch.autograd.grad(y, leaves, gradient), total))
    assert all(same(ours, theirs) for ours, theirs in zip(*found, strict=True))


@gpu
@pytest.mark.parametrize("tiles", [1, 2, 3, 5, 16, 31, 33, 64, 65, 128, 129, 250, 300, 594, 1025])
def test_the_tree_over_parts_of_a_row_is_that_of_triton(tiles: int) -> None:
    peaks, sums, picked = draw(64, tiles) * 5, draw(64, tiles, seed=1).abs() * 100 + 1, draw(64, seed=2)
    targets, found = torch.zeros(64, dtype=torch.int64, device="cuda"), torch.empty(4, 64, device="cuda")
    tensors = (targets, picked, peaks, sums)
    cuda.native.load("linear_logprob").call("linear_logprob_join", *tensors, found[0], found[1], 64, tiles, -100)
    args = (*tensors, found[2], found[3], tiles, -100, triton.next_power_of_2(tiles))
    triton_head.Launch(triton_head._join, (64,), args, {"num_warps": 4})(targets.device)
    assert same(found[0], found[2]) and same(found[1], found[3])


@gpu
def test_a_graph_captures_all_of_it() -> None:
    x, weight, head = draw(40, 512, dtype=BF16), draw(1000, 512, seed=1, dtype=BF16), draw(512, 512, seed=2, dtype=BF16)
    targets, total, blocks = torch.arange(40, device="cuda"), torch.zeros(512, 512, device="cuda"), table([*range(40)])

    def work() -> list[Tensor]:
        leaves = [one.detach().requires_grad_() for one in (x, weight, head)]
        y = cuda.det_gemm(leaves[0], leaves[2])
        cuda.fold(total.zero_(), x, y.detach(), blocks)
        return [total, *torch.autograd.grad(cuda.linear_logprob(y, leaves[1], targets).sum(), leaves)]

    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = work()
    x.copy_(draw(40, 512, seed=5, dtype=BF16))
    graph.replay()
    replayed = [one.clone() for one in held]
    assert all(same(one, other) for one, other in zip(work(), replayed, strict=True))
