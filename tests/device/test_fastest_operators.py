"""Implementation `fastest` sends each shape to the family that the tables say, and both have the same bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rlspec import fallbacks
from rlspec.device import cuda_operators, fastest_operators, triton_operators
from rlspec.device.operators import CATALOGUE, Operators, Segment, Segments

BF16 = torch.bfloat16


def empty(*shape, dtype=BF16):
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("rows", "columns", "width", "by_cuda"),
    [
        (127, 6144, 4096, False),
        (128, 6144, 4096, True),
        (4096, 4096, 4096, False),
        (4096, 4096, 12288, False),
        (64, 24576, 4096, False),
        (255, 151936, 4096, False),
        (256, 151936, 4096, True),
    ],
)
def test_products_go_by_rows_and_layer(rows, columns, width, by_cuda):
    assert fastest_operators.product(empty(1, rows, width), empty(columns, width)) is by_cuda
    wide = empty(1, rows, width, dtype=torch.float32), empty(columns, width, dtype=torch.float32)
    assert not fastest_operators.product(*wide)


@pytest.mark.parametrize(
    ("queries", "samples", "width", "by_cuda"),
    [(4096, 4, 128, True), (1, 8, 128, True), (1, 9, 128, False), (4096, 9, 128, True), (4096, 4, 256, False)],
)
def test_attention_goes_by_queries_and_samples(queries, samples, width, by_cuda):
    query, key, segments = empty(1, queries, 8, width), empty(1, queries, 2, width), empty(samples, 5)
    assert fastest_operators.attends(query, key, key, segments, scale=1.0, max_query=queries) is by_cuda


def test_the_choice_is_made_at_each_call(monkeypatch):
    called = []
    for name, module in (("cuda", cuda_operators), ("triton", triton_operators)):
        kernel = lambda *_, name=name, **__: called.append(name)  # noqa: E731
        monkeypatch.setattr(module, "KERNELS", replace(module.KERNELS, det_gemm=kernel, matrix_fold=kernel))
    for rows in (1, 4096):
        fastest_operators.KERNELS.det_gemm(empty(rows, 4096), empty(6144, 4096))
    assert called == ["triton", "cuda"]
    for dtype in (BF16, torch.float32):
        x, dy = empty(16, 64, dtype=dtype), empty(16, 32, dtype=dtype)
        fastest_operators.KERNELS.matrix_fold(empty(32, 64, dtype=torch.float32), x, dy)
    assert called[2:] == ["cuda", "triton"]
    assert fastest_operators.KERNELS.attention_backward is triton_operators.KERNELS.attention_backward


def test_it_has_what_both_families_have_and_declares_itself():
    operators = Operators("fastest")
    assert {getattr(operators, operator).backend for operator in CATALOGUE} == {"fastest"}
    assert operators.attention.forward and operators.router.statistics and operators.grouped_gemm.weight_gradient
    assert Operators("triton").router.backend == "triton"


@pytest.mark.parametrize("seen", [{"triton": ["_tiles"]}, {"native": ["det_gemm"]}])
def test_kernels_of_either_family_are_its_own(seen):
    whole = {"triton": [], "native": [], "torch": [], "profiled": None, "calls_without_launch": 0, **seen}
    assert fallbacks.fallback("fastest", whole) is None
    assert "no fastest kernel was launched" in fallbacks.fallback("fastest", {**whole, "triton": [], "native": []})


@pytest.mark.parametrize(("backend", "other"), [("cuda", "triton"), ("triton", "native")])
def test_a_family_may_not_launch_kernels_of_the_other(backend, other):
    whole = {"triton": ["mine"], "native": ["mine"], "torch": [], "profiled": None, "calls_without_launch": 0}
    assert "a kernel of the other backend" in fallbacks.fallback(backend, whole)
    assert fallbacks.fallback(backend, {**whole, other: []}) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_bits_are_those_of_triton():
    fastest, triton = Operators("fastest"), Operators("triton")
    generator = torch.Generator("cuda").manual_seed(1)

    def random(*shape):
        return torch.randn(shape, device="cuda", generator=generator).to(BF16)

    for rows in (1, 130, 1030):
        for columns in (4096, 6144, 24576):
            x, weight = random(1, rows, 4096), random(columns, 4096)
            assert torch.equal(fastest.det_gemm(x, weight), triton.det_gemm(x, weight))
        sums = [torch.zeros(1024, 4096, device="cuda") for _ in range(2)]
        dy = random(rows, 1024)
        for module, total in zip((fastest_operators, triton_operators), sums, strict=True):
            module.KERNELS.matrix_fold(total, x[0], dy)
        assert torch.equal(*sums)
        segments = Segments((Segment(0, 0, rows, 0, rows),), 1, rows, rows, torch.device("cuda"))
        query, key, value = random(1, rows, 32, 128), random(1, rows, 8, 128), random(1, rows, 8, 128)
        ours = fastest.attention(query, key, value, segments, scale=128**-0.5)
        assert torch.equal(ours, triton.attention(query, key, value, segments, scale=128**-0.5))
