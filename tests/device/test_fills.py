from __future__ import annotations

import math

import pytest
import torch

from rlspec.device import fills

CPU = torch.device("cpu")


def rows(fill="hashed", seed=1, sample="s0", positions=range(4), width=8, offset=0):
    return fills.rows(fill, seed, sample, positions, width, offset, CPU)


# Published


def test_published_rows_against_the_formula_by_hand():
    # "s0": 115 + 48 = 163, and 17 · 163 = 2771 = 10 · 257 + 201; 201 − 128 = 73.
    assert rows("published")[0, :3].tolist() == [73 / 1024, 74 / 1024, 75 / 1024]
    assert rows("published", positions=[3])[0, 0] == (201 + 39 - 128) / 1024
    assert rows("published", offset=2)[0, 5] == (201 + 22 + 5 - 128) / 1024
    # 201 + 13 · 4 + 4 = 257 ≡ 0: the smallest value there is
    assert rows("published", positions=[4])[0, 4] == -128 / 1024


def test_published_rows_against_the_formula_in_integers():
    found = rows("published", sample="s3", positions=range(8, 19), width=600, offset=7)
    for row, position in enumerate(range(8, 19)):
        for element in (0, 1, 255, 256, 257, 599):
            whole = element + 17 * (ord("s") + ord("3")) + 13 * position + 11 * 7
            assert found[row, element] == (whole % 257 - 128) / 1024


def test_published_parameters_against_the_formula_by_hand():
    found = fills.parameter("published", 1, (4, 20), 2, CPU, torch.float32)
    assert found[0, 0] == (26 - 128) / 1024 and found[1, 0] == ((17 * 20 + 26) % 257 - 128) / 1024
    assert found[3, 19] == ((17 * 79 + 26) % 257 - 128) / 1024


def test_published_values_are_exact_in_bf16():
    for found in (rows("published", width=600), fills.parameter("published", 1, (300, 4), 7, CPU, torch.float32)):
        assert torch.equal(found.bfloat16().float(), found) and found.abs().max() <= 0.125
        assert len(found.unique()) > 250


def test_published_values_do_not_follow_the_seed():
    assert torch.equal(rows("published", seed=1), rows("published", seed=2))


# Hashed


def test_rows_are_a_function_of_identity_whatever_else_is_filled():
    together = rows(positions=range(10), width=33)
    for position in (0, 3, 9):
        assert torch.equal(rows(positions=[position], width=33)[0], together[position])
    assert torch.equal(rows(positions=[9, 0], width=33), together[[9, 0]])
    assert torch.equal(rows(positions=range(10), width=5), together[:, :5])


@pytest.mark.parametrize("fill", fills.FILLS)
def test_the_size_of_a_step_does_not_matter(monkeypatch, fill):
    whole = rows(fill, positions=range(10), width=7), fills.parameter(fill, 3, (9, 7), 4, CPU, torch.bfloat16)
    monkeypatch.setattr(fills, "_CHUNK", 20)
    split = rows(fill, positions=range(10), width=7), fills.parameter(fill, 3, (9, 7), 4, CPU, torch.bfloat16)
    assert all(map(torch.equal, whole, split))


@pytest.mark.parametrize("other", [{"seed": 2}, {"sample": "s1"}, {"positions": range(4, 8)}, {"offset": 1}])
def test_another_identity_has_another_content(other):
    a, b = rows(width=4096), rows(**{"width": 4096, **other})
    assert (a == b).float().mean() < 0.02
    correlation = torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1]
    assert abs(correlation) < 5 / math.sqrt(a.numel())


def test_hashed_values_are_near_normal():
    found = rows(positions=range(256), width=1024).double()
    deviation = math.sqrt(4 * (256**2 - 1) / 12) / 147.8  # of four uniform bytes
    count = found.numel()
    assert abs(found.mean()) < 5 * deviation / math.sqrt(count)
    assert abs(found.std() / deviation - 1) < 0.01 and 0.99 < deviation < 1.01
    assert abs(((found / deviation) ** 4).mean() - 2.7) < 0.05  # 3 − 6/5/4 of a sum of four uniforms; 3 of the normal
    assert found.abs().max() <= 510 / 147.8


def test_hashed_values_are_rounded_once_to_bf16():
    found = rows(positions=range(64), width=256)
    assert not torch.equal(found.bfloat16().float(), found)
    wide = fills.parameter("hashed", 3, (64, 64), 4, CPU, torch.float32)
    assert torch.equal(fills.parameter("hashed", 3, (64, 64), 4, CPU, torch.bfloat16), wide.bfloat16())


def test_the_order_of_a_sum_of_hashed_products_shows():
    """Multiples of a power of two would sum exactly in fp32, whatever the order, and no layout could differ."""
    x = rows(positions=range(16), width=1024).bfloat16().float()
    weight = fills.parameter("hashed", 3, (16, 1024), 4, CPU, torch.bfloat16).float()
    products = x * weight
    forth, back = (torch.zeros(16), torch.zeros(16))
    for k in range(1024):
        forth, back = forth + products[:, k], back + products[:, 1023 - k]
    assert (forth != back).sum() >= 12


def test_parameters_depend_on_element_seed_and_offset():
    plain = fills.parameter("hashed", 3, (64, 64), 4, CPU, torch.float32)
    assert torch.equal(
        plain.flatten()[:640].view(10, 64), fills.parameter("hashed", 3, (10, 64), 4, CPU, torch.float32)
    )
    for seed, offset in ((4, 4), (3, 5)):
        assert (fills.parameter("hashed", seed, (64, 64), offset, CPU, torch.float32) == plain).float().mean() < 0.02


# Integers


def test_integers_are_below_without_repeats_in_a_row_and_follow_identity():
    found = fills.integers(1, "s0", range(200), 4, 8, 11)
    assert found.dtype == torch.int64 and found.shape == (200, 4)
    assert found.min() == 0 and found.max() == 7 and all(len(set(row)) == 4 for row in found.tolist())
    assert torch.equal(fills.integers(1, "s0", [7], 4, 8, 11)[0], found[7])
    assert not torch.equal(fills.integers(2, "s0", range(200), 4, 8, 11), found)
    assert not torch.equal(fills.integers(1, "s1", range(200), 4, 8, 11), found)


def test_as_many_integers_as_there_are():
    assert sorted(fills.integers(1, "s0", [3], 8, 8, 0)[0].tolist()) == list(range(8))


# A mixture of experts


def test_few_experts_get_most_and_some_get_none():
    found = fills.few_experts(1, "s0", range(2000), 8, 128, 11)
    load = found.flatten().bincount(minlength=128).view(8, 16).sum(0)
    assert all(len(set(row)) == 8 for row in found.tolist()) and int(found.min()) == 0
    assert load[0] > 7000 and load[1] > 3000 and load[2] > 1000 and load[15] == 0
    assert any(row != sorted(row) for row in found.tolist())  # slots are not in the order of experts
    assert torch.equal(fills.few_experts(1, "s0", range(7, 9), 8, 128, 11), found[7:9])
    assert fills.few_experts(1, "s0", range(9), 2, 3, 0).max() < 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("experts", "width", "scale"), [(128, 2048, 2.0**-7), (8, 64, 2.0**-4)])
def test_tied_logits_are_exact_equal_or_a_unit_of_fp32_apart(experts, width, scale, dtype):
    plain = fills.parameter("hashed", 1, (experts, width), 10, CPU, dtype)
    weight = fills.tied_experts(plain, scale)
    x = fills.tied_tokens(rows(positions=range(60), width=width), range(60)).to(dtype)
    logits = x.double() @ weight.double().T
    assert torch.equal(logits, logits.float().double()) and logits.min() > 4 and logits.max() < 8
    assert torch.equal(logits.float(), (x.float().flip(1) @ weight.float().flip(1).T))  # in any order of the sum
    first, second, third = (logits[:, place : experts - 2 : 3] for place in range(3))
    side = torch.arange(60).unsqueeze(1) % 3 - 1
    assert torch.equal(third, first) and torch.equal((second - first) / fills.TIE, side.expand_as(first).double())
