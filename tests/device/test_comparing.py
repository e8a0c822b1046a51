from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rlspec import chain_truth, records
from rlspec.device import comparing, dtypes

NAN, INF = float("nan"), float("inf")
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@pytest.fixture(params=[None, 3])
def small_steps(request, monkeypatch):
    """Once as it is, once in steps of three elements."""
    if request.param:
        monkeypatch.setattr(comparing, "_CHUNK", request.param)


def same(got, want):
    return comparing.same_bits(got, want, comparing.fingerprint(want))


def differing(got, want):
    return same(got, want)["differing"]


def tensor(*values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype)


# Bits


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_bits(dtype):
    x = torch.arange(-4, 4).to(dtype).view(2, 4)
    found = same(x, x.clone())
    assert found["differing"] == 0 and found["first"] is None and found["digest"] == found["against_digest"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sign_of_zero_counts(dtype):
    found = same(tensor(1, -0.0, dtype=dtype), tensor(1, 0.0, dtype=dtype))
    assert found["differing"] == 1 and found["first"] == {"index": 1, "got": "-0.0", "want": 0.0}
    assert found["digest"] != found["against_digest"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_unit_in_the_last_place_counts(dtype):
    one = tensor(1, 2, dtype=dtype)
    assert differing(one, one * (1 + torch.finfo(dtype).eps)) == 2


@pytest.mark.parametrize("sides", [(NAN, 1.0), (1.0, NAN), (NAN, NAN)])
def test_nan_on_either_side_differs(sides):
    got, want = (tensor(0, one) for one in sides)
    found = same(got, want)
    assert (
        found["differing"] == 1
        and found["first"]["index"] == 1
        and "nan" in (found["first"]["got"], found["first"]["want"])
    )


def test_identical_is_of_dtype_shape_and_all_bytes():
    x = tensor(0.0, NAN, INF)
    assert comparing.identical(x, x.clone()) and differing(x, x.clone()) == 1  # NaN: the same bytes, and never equal
    for other in (tensor(-0.0, NAN, INF), tensor(0.0, 1.0, INF), x.double(), x.view(3, 1), x[:2]):
        assert not comparing.identical(x, other)


def test_equal_infinities_are_equal():
    assert differing(tensor(INF, -INF), tensor(INF, -INF)) == 0 and differing(tensor(INF), tensor(-INF)) == 1


def test_another_dtype_or_shape_differs_everywhere():
    x = torch.zeros(2, 3)
    for other in (x.double(), x.view(3, 2), x.view(6), x.bfloat16(), torch.zeros(2, 2)):
        found = same(other, x)
        assert found["differing"] == 6 and found["first"] is None and found["digest"] != found["against_digest"]
    assert differing(x[:0], x[:0].double()) == 1  # even of nothing


def test_the_first_element_is_the_lowest(small_steps):
    want = torch.zeros(11)
    got = want.clone()
    got[[4, 8, 9]] = torch.tensor([1.0, 100.0, 5.0])
    assert same(got, want)["first"] == {"index": 4, "got": 1.0, "want": 0.0}
    assert same(got, want)["differing"] == 3


@pytest.mark.parametrize("index", range(11))
def test_no_element_is_overlooked_at_the_border_of_a_step(small_steps, index):
    want = torch.ones(11)
    got = want.clone()
    got[index] = 2
    assert same(got, want)["first"]["index"] == index and differing(got, want) == 1


def test_integers_and_views_are_compared_as_they_are():
    x = torch.arange(12).view(3, 4)
    assert differing(x.t(), x.t().contiguous()) == 0 and differing(x, x + (x == 5)) == 1
    base = torch.arange(12.0)
    assert differing(base[::2], base[::2].clone()) == 0


# Fingerprints


@pytest.mark.parametrize("dtype", (*DTYPES, torch.int64))
def test_a_fingerprint_tells_any_change_apart(small_steps, dtype):
    x = torch.arange(24).to(dtype).view(4, 6)
    seen = {comparing.fingerprint(x)}
    for index in range(24):
        changed = x.clone()
        changed.view(-1)[index] += 1
        seen.add(comparing.fingerprint(changed))
    for other in (x.flip(0), x.roll(1, 1), x.view(6, 4), x.t(), x[:3], torch.zeros_like(x), x.view(24)):
        seen.add(comparing.fingerprint(other))
    assert len(seen) == 25 + 7


def test_a_fingerprint_tells_dtypes_and_zeros_apart():
    zeros = torch.zeros(4)
    kinds = (zeros, -zeros, zeros.double(), zeros.bfloat16(), zeros.half(), zeros.long(), zeros.int())
    assert len({comparing.fingerprint(x) for x in kinds}) == len(kinds)


def test_swapped_rows_have_another_fingerprint():
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    for a, b in ((0, 1), (3, 60)):
        swapped = x.clone()
        swapped[[a, b]] = x[[b, a]]
        assert comparing.fingerprint(swapped) != comparing.fingerprint(x)


def test_a_fingerprint_does_not_depend_on_steps_or_strides(monkeypatch):
    x = torch.randn(7, 5, generator=torch.Generator().manual_seed(0)).bfloat16()
    whole = comparing.fingerprint(x)
    monkeypatch.setattr(comparing, "_CHUNK", 4)
    assert comparing.fingerprint(x) == whole == comparing.fingerprint(x.t().contiguous().t())
    assert whole.startswith("bfloat16[7,5]") and len(whole) == len("bfloat16[7,5]") + 32


# Accuracy


def test_figures_against_numpy_in_fp64(small_steps):
    draw = torch.Generator().manual_seed(1)
    want = torch.randn(17, 3, generator=draw, dtype=torch.float64)
    got = (want + 0.01 * torch.randn(17, 3, generator=draw, dtype=torch.float64)).bfloat16()
    found = comparing.errors(got, want, 0.01, 0.005)
    c, r = got.double().numpy().ravel(), want.numpy().ravel()
    over = np.abs(c - r) - (0.01 + 0.005 * np.abs(r))
    assert found.elements == 51 and found.nonfinite == 0 and found.violations == int((over > 0).sum()) > 0
    assert found.first["index"] == int(np.argmax(over > 0)) and found.excess == over.max()
    exact = {"max_abs": np.abs(c - r).max(), "reference_peak": np.abs(r).max()}
    rounded = {"rms": np.sqrt(np.mean((c - r) ** 2)), "reference_rms": np.sqrt(np.mean(r**2)),
               "cosine": c @ r / np.sqrt((c @ c) * (r @ r))}  # fmt: skip
    assert {name: getattr(found, name) for name in exact} == exact
    assert {name: getattr(found, name) for name in rounded} == pytest.approx(rounded, rel=1e-13)
    plain = found.plain()
    assert plain["relative_rms"] == found.rms / found.reference_rms
    assert plain["relative_peak"] == found.max_abs / found.reference_peak


def test_the_tolerance_grows_with_the_reference_and_not_with_the_candidate():
    found = comparing.errors(tensor(0.0, 2.0), tensor(1.0, 1.0).double(), 0.0, 0.5)
    assert found.violations == 2 and found.excess == 0.5
    assert comparing.errors(tensor(1.0), tensor(2.0).double(), 0.0, 0.5).violations == 0
    assert comparing.errors(tensor(2.0), tensor(1.0).double(), 0.0, 0.5).violations == 1


def test_within_the_tolerance_the_worst_element_is_named(small_steps):
    found = comparing.errors(tensor(1.0, 1.1, 1.2, 1.05, 1.0), torch.ones(5).double(), 0.5, 0.0)
    assert found.violations == 0 and found.excess < 0 and found.first["index"] == 2


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_what_is_not_finite_fails_whatever_the_tolerance(small_steps, bad):
    found = comparing.errors(tensor(0, 0, 0, bad, 0), torch.zeros(5).double(), 1e30, 0.9)
    assert found.nonfinite == 1 and found.violations == 1 and found.excess == INF and found.max_abs == INF
    plain = found.plain()
    assert plain["max_abs"] == "inf" and plain["excess"] == "inf" and plain["first"]["index"] == 3


def test_a_reference_that_is_not_finite_fails():
    for bad in (NAN, INF):
        assert comparing.errors(tensor(1.0), tensor(bad).double(), 1e30, 0.5).violations == 1


def test_zero_against_zero_and_against_something():
    nothing = torch.zeros(3)
    assert comparing.errors(nothing, nothing.double(), 0.0, 0.0).plain()["relative_rms"] == 0
    found = comparing.errors(tensor(1, 0, 0), nothing.double(), 0.0, 0.0).plain()
    assert found["relative_rms"] == "inf" and found["cosine"] == 0


def test_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"the result has shape \[2, 3\], the reference \[3, 2\]"):
        comparing.errors(torch.zeros(2, 3), torch.zeros(3, 2), 1.0, 0.1)


def test_units_in_the_last_place(small_steps):
    unit = 2.0**-7  # of bf16 between 1 and 2
    steps = [0, 1, 2, 3, 4, 5, 16, 17]
    got = tensor(*(1 + unit * step for step in steps), dtype=torch.bfloat16)
    found = comparing.errors(got, torch.ones(8).double(), 0.0, 0.0)
    assert found.ulps == {"<= 0": 1, "<= 1": 1, "<= 2": 1, "<= 4": 2, "<= 16": 2, "more": 1}
    half = comparing.errors(tensor(1.0, dtype=torch.bfloat16), tensor(1 + 0.49 * unit).double(), 0.0, 0.0)
    assert half.ulps["<= 0"] == 1
    assert comparing.errors(tensor(NAN), tensor(1.0).double(), 0.0, 0.0).ulps["more"] == 1


def test_rounding_is_the_error_of_the_best_possible_candidate():
    want = tensor(1.0, 1 + 2.0**-9).double()
    assert comparing.rounding(want, torch.bfloat16) == (2.0**-9, math.sqrt(2.0**-18 / 2))
    assert comparing.rounding(want, torch.float64) == comparing.rounding(want, torch.int64) == (0.0, 0.0)


# Candidates that no row may pass


def test_wrong_candidates_are_wrong():
    x = torch.arange(1.0, 13).view(4, 3)
    wrong = comparing.wrong_candidates(x)
    assert set(wrong) == {"zero", "shuffled", "sign_flipped"} and not wrong["zero"].any()
    assert torch.equal(wrong["shuffled"][1:], x[:-1]) and torch.equal(wrong["sign_flipped"], -x)
    assert all(one.shape == x.shape and one.dtype == x.dtype and (one != x).all() for one in wrong.values())


def test_one_row_is_shuffled_within():
    assert comparing.wrong_candidates(torch.arange(3.0).view(1, 3))["shuffled"].tolist() == [[2, 0, 1]]
    assert comparing.wrong_candidates(torch.arange(3.0))["shuffled"].tolist() == [2, 0, 1]


# What the host has of the same, since neither side imports the other


@pytest.mark.parametrize("value", [0.5, -0.0, NAN, INF, -INF])
def test_records_of_both_sides_hold_the_same_numbers(value):
    assert repr(comparing.number(value)) == repr(records.number(value))


def test_both_sides_know_the_same_dtypes():
    assert {name: str(dtype).removeprefix("torch.") for name, dtype in dtypes.DTYPES.items()} == chain_truth.NAMES
