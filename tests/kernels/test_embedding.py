from __future__ import annotations

import pytest
import torch

from rlspec.kernels import embedding as module
from rlspec.kernels.embedding import embedding, fold
from tests.kernels.interpreted import compiled, gpu, hopper, interpreted, spills


def inputs(rows, width, vocabulary=11, dtype=torch.float32, device="cpu"):
    """Tokens, of which a third are one id, weight and dy."""
    generator = torch.Generator().manual_seed(rows)
    tokens = torch.randint(vocabulary, (rows,), generator=generator)
    tokens[torch.rand(rows, generator=generator) < 0.33] = 4
    weight = torch.randn(vocabulary, width, generator=generator)
    dy = torch.randn(rows, width, generator=generator)
    return tokens.to(device), weight.to(device, dtype), dy.to(device, dtype)


def chain(accumulator, tokens, dy, order):
    """The sums of `fold` by their definition."""
    total = accumulator.clone()
    for row in order:
        if row >= 0:
            total[tokens[row]] += dy[row].float()
    return total


def gradient(tokens, weight, dy):
    weight = weight.detach().requires_grad_()
    return torch.autograd.grad(embedding(tokens, weight), weight, dy.reshape(*tokens.shape, -1))[0]


@pytest.mark.parametrize("rows, width", [(1, 5), (6, 16), (41, 130), (3, 1100)], ids=str)
@interpreted
def test_lookup_and_gradient(rows, width):
    tokens, weight, dy = inputs(rows, width)
    assert torch.equal(embedding(tokens, weight), weight[tokens])
    assert torch.equal(embedding(tokens[None], weight), weight[tokens][None])
    assert torch.equal(gradient(tokens, weight, dy), chain(torch.zeros_like(weight), tokens, dy, range(rows)))


@interpreted
def test_an_id_without_a_row_gives_nan_and_takes_nothing():
    _, weight, dy = inputs(4, 16)
    tokens = torch.tensor([2, 11, -1, 2])
    y = embedding(tokens, weight)
    assert y[1:3].isnan().all() and torch.equal(y[[0, 3]], weight[[2, 2]])
    expected = torch.zeros_like(weight)
    expected[2] = dy[0] + dy[3]
    assert torch.equal(gradient(tokens, weight, dy), expected)
    for wrong in (torch.tensor([2, 11]), torch.tensor([-1, 2])):
        with pytest.raises(ValueError, match="11 rows"):
            embedding(wrong, weight, validate=True)
    assert torch.equal(embedding(tokens[:1], weight, validate=True), weight[2:3])


@interpreted
def test_the_rows_of_a_wide_table():
    tokens, weight, _ = inputs(9, 16)
    wide = torch.full((11, 40), torch.nan)
    wide[:, 8:24] = weight
    assert torch.equal(embedding(tokens, wide[:, 8:24]), weight[tokens])
    assert torch.equal(embedding(tokens[::2], weight), weight[tokens[::2]])


@interpreted
def test_fold_adds_in_the_order_of_the_blocks_however_it_is_cut():
    tokens, weight, dy = inputs(41, 130)
    order = torch.randperm(41, generator=torch.Generator().manual_seed(1)).to(torch.int32)
    places = torch.full((64,), -1, dtype=torch.int32)
    places[:16], places[17:26], places[40:56] = order[:16], order[16:25], order[25:]
    blocks = places.view(4, 16)
    expected = chain(weight, tokens, dy, places.tolist())
    for cuts in ([4], [1, 3], [2, 1, 1]):
        total = weight.clone()
        for part in blocks.split(cuts):
            fold(total, tokens, dy, part)
        assert torch.equal(total, expected)
    assert not torch.equal(chain(weight, tokens, dy, sorted(places.tolist())), expected), "the order must matter here"


@interpreted
def test_fold_reads_no_row_that_stands_in_no_block():
    tokens, weight, dy = inputs(5, 16)
    dy[2:] = torch.nan
    tokens[2:] = 10**9
    places = torch.full((1, 16), -1, dtype=torch.int32)
    places[0, 3:5] = torch.tensor([1, 0])
    total = weight.clone()
    fold(total, tokens, dy, places)
    assert torch.equal(total, chain(weight, tokens, dy, [1, 0]))


TOKENS, WEIGHT = torch.zeros(2, dtype=torch.int64), torch.ones(3, 4)


@pytest.mark.parametrize(
    "tokens, weight, message",
    [
        (TOKENS.int(), WEIGHT, "int32"),
        (TOKENS, WEIGHT.double(), "float64"),
        (TOKENS, WEIGHT[0], "V, H"),
        (TOKENS, WEIGHT.T, "side by side"),
        (TOKENS[:0], WEIGHT, "empty"),
    ],
    ids=("int32", "double", "rank", "transposed", "empty"),
)
def test_what_is_refused(tokens, weight, message):
    with pytest.raises(ValueError, match=message):
        embedding(tokens, weight)


BLOCKS = torch.zeros(1, 16, dtype=torch.int32)


@pytest.mark.parametrize(
    "accumulator, dy, blocks, message",
    [
        (WEIGHT.half(), torch.ones(2, 4), BLOCKS, "float16"),
        (WEIGHT, torch.ones(2, 5), BLOCKS, "dy"),
        (WEIGHT, torch.ones(2, 4), BLOCKS.long(), "int64"),
        (WEIGHT, torch.ones(2, 4), BLOCKS[:, :8], "16"),
        (WEIGHT, torch.ones(2, 4), BLOCKS[:0], "empty"),
    ],
    ids=("narrow sum", "width", "wide blocks", "block", "no block"),
)
def test_what_fold_refuses(accumulator, dy, blocks, message):
    with pytest.raises(ValueError, match=message):
        fold(accumulator, TOKENS, dy, blocks)


@compiled
def test_a_cpu_is_refused():
    with pytest.raises(ValueError, match="CUDA"):
        embedding(TOKENS, WEIGHT)
    with pytest.raises(ValueError, match="CUDA"):
        fold(WEIGHT, TOKENS, torch.ones(2, 4), BLOCKS)


@compiled
@pytest.mark.parametrize("dtype", module.DTYPES, ids=str)
def test_it_compiles_for_hopper(dtype):
    options = {"num_warps": 4, "enable_fp_fusion": False, "grid": (1,)}
    with hopper():
        there = module._forward.warmup(torch.int64, dtype, dtype, 4096, 151936, 4096, 1, BLOCK=4096, **options)
        assert spills(there) == 0 and "LDG.E.128" in there.asm["sass"] and "STG.E.128" in there.asm["sass"]
        for total, resume in ((torch.float32, True), (dtype, False)):
            back = module._backward.warmup(
                total, torch.int64, torch.int64, torch.int32, dtype, 4096, 151936, 4096, 16,
                RESUME=resume, BLOCK=256, **{**options, "num_warps": 1},
            )  # fmt: skip
            assert spills(back) == 0 and "LDG.E.128" in back.asm["sass"]


@gpu
@pytest.mark.parametrize("dtype", module.DTYPES, ids=str)
def test_on_a_gpu(dtype):
    tokens, weight, dy = inputs(1500, 2100, 97, dtype, "cuda")
    assert torch.equal(embedding(tokens, weight), weight[tokens])
    zeros = torch.zeros(97, 2100)
    expected = chain(zeros, tokens.cpu(), dy.cpu(), range(1500))
    assert torch.equal(gradient(tokens, weight, dy).cpu(), expected.to(dtype))
    places = torch.full((1504,), -1, dtype=torch.int32, device="cuda")
    places[:1500] = torch.randperm(1500, device="cuda")
    expected = chain(zeros, tokens.cpu(), dy.cpu(), places.tolist())
    for cuts in ([94], [1, 30, 63]):
        total = zeros.cuda()
        for part in places.view(94, 16).split(cuts):
            fold(total, tokens, dy, part)
        assert torch.equal(total.cpu(), expected)
