"""CUDA attention: what the compiler made of it, what it refuses, and on a GPU its bits beside those of Triton."""

from __future__ import annotations

import functools
import itertools
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from rlspec import nvcc
from rlspec.device import cuda_attention as cuda
from rlspec.kernels import attention as in_triton

KERNELS = ("forward", "decode", "fold", "pads", "delta", "dkv", "dq")
MATRIX = ("forward", "dkv", "dq")
needs_nvcc = pytest.mark.skipif(nvcc.find() is None, reason="needs nvcc")
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@needs_nvcc
def test_the_compiler_spills_nothing_and_keeps_products_in_flight() -> None:
    built = nvcc.build("attention")
    assert "C75" not in built.ptxas, "ptxas serializes products"
    found = {re.search(r"attention_(\w+?)_kernel", name)[1]: usage for name, usage in nvcc.usage(built.ptxas).items()}
    assert set(found) == set(KERNELS)
    assert not [name for name, usage in nvcc.usage(built.ptxas).items() if usage.spilled or usage.stack]


@functools.cache
def disassembly() -> list[str]:
    """The machine code of each kernel, name first."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    command = [str(tool), "-sass", str(nvcc.build("attention").path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("Function : ")[1:]


def disassembled(kernel: str) -> list[str]:
    """The machine code of each variant of a kernel."""
    found = [part for part in disassembly() if f"attention_{kernel}_kernel" in part.split("\n", 1)[0]]
    assert found, kernel
    return found


@needs_nvcc
def test_products_run_on_the_warpgroup_matrix_unit() -> None:
    for name in MATRIX:
        for part in disassembled(name):
            assert "HGMMA.64x64x16.F32" in part and "UTMALDG.4D" in part, name


@needs_nvcc
def test_few_queries_are_the_columns_of_products_of_keys_and_values() -> None:
    for part in disassembled("decode"):
        widths = set(re.findall(r"HGMMA\.(64x\d+)x16\.F32", part))
        assert widths in ({"64x8"}, {"64x32"}) and "UTMALDG.4D" in part


@needs_nvcc
def test_maxima_are_taken_while_sums_are_in_flight_and_multiplications_run_among_exponentials() -> None:
    for part in disassembled("forward"):
        maxima, behind = part.split("WARPGROUP.DEPBAR.LE gsb0, 0x1", 1)[1].split("WARPGROUP.DEPBAR.LE gsb0, 0x0", 1)
        assert maxima.count("FMNMX") >= 32, "the wait for the sums was moved up before the maxima"
        loop = behind.split("WARPGROUP", 1)[0]
        codes = re.findall(r"^\s+/\*\w+\*/\s+(?:@\S+ )?(\w+)", loop, re.MULTILINE)
        mixed = sum(pair == ("MUFU", "FMUL") for pair in itertools.pairwise(codes))
        assert mixed >= 5, "the sums are rescaled in front of the exponentials or behind them"


@needs_nvcc
def test_kernels_of_the_forward_wait_before_they_touch_memory() -> None:
    for name in ("forward", "decode", "fold", "pads"):
        for part in disassembled(name):
            before = part.split("ACQBULK", 1)  # griddepcontrol.wait
            assert len(before) == 2, f"{name} may start early and does not wait"
            assert not re.search(r"\b(STG|RED|ATOMG|UTMALDG)\b", before[0]), name
            reads = set(re.findall(r"\bLDG[.\w]*", before[0]))  # two look up a segment, past L1
            assert all("STRONG" in read for read in reads) and (name in ("decode", "fold") or not reads), (name, reads)


def test_the_contract_is_that_of_triton() -> None:
    assert cuda.SCHEDULE is in_triton.SCHEDULE
    source = Path(__file__).parents[2] / "csrc" / "attention.cuh"
    assert f"constexpr int KEYS = {in_triton.KEYS};" in source.read_text(encoding="utf-8")
    for name in ("forward", "paged", "backward", "attention"):
        ours, theirs = (getattr(module, name).__annotations__ for module in (cuda, in_triton))
        assert ours == theirs, name


def test_few_blocks_of_threads_share_the_splits_of_a_row() -> None:
    pairs = 8  # of a key head and a sample
    assert [cuda._share(splits, pairs, 4, 128) for splits in (1, 4, 5, 8, 9)] == [2, 2, 1, 1, 0]
    assert [cuda._share(3, n * pairs, 4, 128) for n in (1, 2, 3)] == [2, 1, 0]
    assert [cuda._share(3, pairs, rows, 128) for rows in (8, 9, 32, 33)] == [2, 1, 1, 0]
    assert cuda._share(3, pairs, 4, 64) == 1


def sample(length: int = 8, width: int = 64, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    return [torch.zeros(1, length, heads, width, dtype=dtype) for heads in (4, 2, 2)]


ENTRY = torch.tensor([[0, 0, 8, 0, 8]], dtype=torch.int32)
REFUSED: dict[str, tuple[Callable[[list[Tensor]], Any], str]] = {
    "device": (lambda x: cuda.forward(*x, ENTRY, scale=1.0), "runs on cuda"),
    "width": (lambda x: cuda.forward(*(y[..., :24] for y in x), ENTRY, scale=1.0), "see triton"),
    "dtype": (lambda x: cuda.forward(*(y.float() for y in x), ENTRY, scale=1.0), "see triton for fp32"),
    "heads": (lambda x: cuda.forward(x[0][:, :, :3], *x[1:], ENTRY, scale=1.0), "do not pair"),
    "empty": (lambda x: cuda.forward(x[0][:, :0], *x[1:], ENTRY, scale=1.0), "none of them empty"),
    "rows": (lambda x: cuda.forward(x[0].expand(2, -1, -1, -1), *x[1:], ENTRY, scale=1.0), "query has 2 rows"),
    "table": (lambda x: cuda.forward(*x, ENTRY.long(), scale=1.0), "segments must be int32"),
    "no segment": (lambda x: cuda.forward(*x, ENTRY[:0], scale=1.0), "segments must be int32"),
    "scale": (lambda x: cuda.forward(*x, ENTRY, scale=-1.0), "scale must be positive"),
    "window": (lambda x: cuda.forward(*x, ENTRY, scale=1.0, window=0), "window must be at least 1"),
    "max_query": (lambda x: cuda.forward(*x, ENTRY, scale=1.0, max_query=9), "max_query must lie in 1..8"),
    "sinks": (lambda x: cuda.forward(*x, ENTRY, scale=1.0, sinks=torch.zeros(3)), "sinks must be fp32"),
    "sinks' gradient": (
        lambda x: cuda.attention(*x, ENTRY, scale=1.0, sinks=torch.zeros(4, requires_grad=True)),
        "sinks have no gradient",
    ),
    "page": (
        lambda x: cuda.paged(x[0], *(y[:, :7] for y in x[1:]), torch.zeros(1, 1, dtype=torch.int32), ENTRY, scale=1.0),
        "pages of 7",
    ),
    "pages": (lambda x: cuda.paged(*x, torch.zeros(2, 1, dtype=torch.int32), ENTRY, scale=1.0), "block_table must be"),
    "grad_out": (
        lambda x: cuda.backward(*x, x[0], torch.zeros(1, 8, 4), x[0][:, :4], ENTRY, scale=1.0),
        "grad_out must be as query",
    ),
    "lse": (lambda x: cuda.backward(*x, x[0], torch.zeros(1, 8, 3), x[0], ENTRY, scale=1.0), "lse must be fp32"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        call(sample())


def test_steps_that_the_copy_engine_does_not_take_are_copied() -> None:
    x = torch.zeros(1, 8, 2, 64)
    assert cuda._aligned(x) is x
    assert cuda._strides(x) == [64, 128, 64]
    assert cuda._aligned(x.transpose(1, 2)).data_ptr() == x.data_ptr()
    for odd in (x[:, :1].expand(1, 8, 2, 64), torch.zeros(1, 8, 2, 65)[..., 1:], torch.zeros(1, 8, 2, 65)[..., :64]):
        assert cuda._aligned(odd).is_contiguous()


@pytest.mark.gpu
@gpu
def test_on_a_gpu() -> None:
    from tests.bench.kernels_cuda_attention import checks

    failed = [(name, detail) for name, ok, detail in checks(torch.device("cuda")) if not ok]
    assert not failed


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize(("rows", "length"), [(1, 300), (1, 1025), (2, 1500), (1, 4096)])
def test_decodes_one_behind_the_other_have_the_bits_of_one_alone(rows: int, length: int) -> None:
    shapes = ((rows, 1, 32, 128), (rows, length, 8, 128), (rows, length, 8, 128))
    query, key, value = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    entries = [[row, 0, 1, 0, length - row] for row in range(rows)]
    given = (query, cuda._Cache(key, value, None, 0), torch.tensor(entries, dtype=torch.int32, device="cuda"), 0.1, 1)
    want = cuda._forward(*given, length, None, None, split=False)
    assert cuda._share(cuda.SCHEDULE.count(length), 8 * rows, 4, 128)
    cuda._forward(*given, length, None, None)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [cuda._forward(*given, length, None, None) for _ in range(10)]
    for _ in range(20):
        for out, lse in found:
            out.fill_(0.5)
            lse.fill_(0.5)
        graph.replay()
        assert all(torch.equal(x, y) for one in found for x, y in zip(one, want, strict=True))
