"""Tables reach the slots of every layout's calls, and what comes back stands where it stood."""

from __future__ import annotations

import pytest
import torch

from rlspec.device import comparing, grids
from rlspec.device.cases import Input
from tests import benches

TIER = benches.tier()
NAN = float("nan")
TOKENS = 11  # of the samples that are judged
TABLE = torch.arange(1.0, 2 * TOKENS + 1).outer(torch.ones(3))  # a second copy, of changed content, behind the first
TABLE = torch.cat((TABLE, torch.zeros(1, 3)))


@pytest.mark.parametrize(
    "name", ["BN/full", "B1/full", *(f"BN/{name}" for name in benches.LAYOUTS if name != "singletons")]
)
def test_what_goes_into_a_layout_comes_back(name):
    layout, found = benches.layout(name, TIER), {}
    for call in layout.calls:
        grid = grids.physical(Input(shape=(3,)), TABLE, layout, call, TIER)
        assert grid.shape == (call.rows, call.width, 3)
        grids.restore(found, "x", grid, call, TIER, keys=False)
    assert torch.equal(found["x"], TABLE[:TOKENS])


def test_pads_and_strides():
    for name, where, count, value in (
        ("BN/padded_right", slice(1, None), 6, 0.0),
        ("BN/padded_nan", slice(0, -1), 7, NAN),
    ):
        layout = benches.layout(name, TIER)
        (call,) = layout.calls
        pads = grids.physical(Input(shape=(3,)), TABLE, layout, call, TIER)[1, where]  # beside a sample of one token
        assert comparing.identical(pads, torch.full((count, 3), value))
    layout = benches.layout("BN/strided", TIER)
    (call,) = layout.calls
    assert not grids.physical(Input(shape=(3,)), TABLE, layout, call, TIER).is_contiguous()
    assert not grids.upstream(TABLE, layout, call, TIER).is_contiguous()


def test_what_no_call_writes_is_poison():
    found = {}
    layout = benches.layout("BN/chunked", TIER)
    grid = torch.ones(layout.calls[0].rows, layout.calls[0].width)
    grids.restore(found, "x", grid, layout.calls[0], TIER, keys=False)
    assert 0 < found["x"].isnan().sum() < TOKENS


def test_queries_of_a_chunk_meet_the_keys_before_them():
    _, call = benches.layout("BN/chunked", TIER).calls
    segments = grids.segments_of(call, torch.device("cpu"))
    assert [(one.query_length, one.key_length) for one in segments.entries] == [(2, 6)]
