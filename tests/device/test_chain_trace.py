"""Digests a token: the same wherever a token stands, another for any other bit."""

from __future__ import annotations

import math

import pytest
import torch

from rlspec.device.chain_trace import CONSUMER, Key, Trace, backward_divergence, divergence, probes, row_digests
from rlspec.device.gradients import Run

CPU = torch.device("cpu")
ACT, END = Key(0, "mlp.act", "swiglu"), Key(0, "mlp.residual", "residual_add")


def rows(count=5, width=7, seed=0, dtype=torch.float32):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_a_row_has_its_digest_wherever_it_stands():
    x = rows()
    digests = row_digests(x)
    assert len(set(digests.tolist())) == 5
    assert torch.equal(row_digests(x[[3, 1]]), digests[[3, 1]])
    assert torch.equal(row_digests(x.unflatten(1, (7, 1))[2:3]), row_digests(x.unflatten(1, (7, 1)))[2:3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_every_bit_and_its_place_count(dtype):
    x = torch.arange(1, 8, dtype=torch.float32).to(dtype)[None]
    assert row_digests(x) != row_digests(x.flip(1))
    changed = x.clone()
    changed[0, 3] += 1
    assert row_digests(x) != row_digests(changed)


def test_the_sign_of_zero_the_dtype_and_the_shape_count():
    zero = torch.zeros(1, 4)
    assert row_digests(zero) != row_digests(-zero)
    assert row_digests(zero) != row_digests(zero.bfloat16())
    assert row_digests(zero) != row_digests(zero.reshape(1, 2, 2))


def trace(values, key=ACT, pieces=((0, 0, 3), (1, 0, 2)), backward=False, keep="mlp.residual"):
    made = Trace((3, 2), CPU, keep=keep)
    place = 0
    for sample, position, length in pieces:
        made.add(key, [Run(sample, position, length, 0, (3, 2)[sample])], values[place : place + length],
                 backward=backward)  # fmt: skip
        place += length
    return made


def test_layouts_do_not_matter():
    x = rows()
    whole = trace(x)
    cut = trace(x[[3, 4, 0, 1, 2]], pieces=((1, 0, 2), (0, 0, 2), (0, 2, 1)))
    assert whole.digest() == cut.digest()
    assert divergence(cut, whole, "ab", 1)["first"] is None


def test_the_first_token_of_the_first_node_that_differs():
    x = rows()
    want, got = trace(x), trace(x)
    for made, y in ((want, x), (got, x + torch.tensor([0, 0, 0, 0, 1.0])[:, None])):
        made.add(END, [Run(0, 0, 3, 0, 3)], y[:3])
        made.add(END, [Run(1, 0, 2, 0, 2)], y[3:])
    found = divergence(got, want, ["a", "b"], 1)
    place = {"layer": 0, "name": "mlp.residual", "operator": "residual_add", "sample": "b", "position": 1, "tokens": 1}
    assert found["first"] == place and (found["nodes"], found["differing"]) == (2, 1)
    assert 0 < found["depth"][0] < 1  # one token of five moved by 1


def test_a_node_that_is_not_there_differs_and_a_token_that_was_not_computed_does_not():
    x = rows()
    want = trace(x)
    assert divergence(Trace((3, 2), CPU), want, ["a", "b"], 1)["first"]["sample"] == "a"
    assert divergence(trace(x, pieces=((0, 0, 3),)), want, ["a", "b"], 1)["first"] is None


def test_on_the_way_back_the_blame_is_of_the_operator_that_the_result_went_into():
    x = rows()
    key = Key(2, "self_attn.q_rope", "rope")
    found = backward_divergence(trace(x + 1, key, backward=True), trace(x, key, backward=True), ["a", "b"])
    assert (found["layer"], found["operator"], found["by"]) == (2, "attention", "self_attn.q_rope")
    key = Key(2, "mlp.residual", "residual_add")
    found = backward_divergence(trace(x + 1, key, backward=True), trace(x, key, backward=True), ["a", "b"])
    assert (found["layer"], found["name"]) == (3, "input_layernorm")


def test_every_result_of_the_decoder_has_a_consumer():
    from tests.chain_runs import measured

    names = {node[1] for node in measured()["depth"]["nodes"]}
    assert names == set(CONSUMER) - {"mlp.experts"}


def test_probes_are_all_tokens_or_a_few_of_them():
    assert probes(64) == list(range(64)) and len(set(probes(4359))) == 64 and max(probes(4359)) < 4359


def test_not_a_number_is_not_lost():
    x = rows()
    y = x.clone()
    y[0, 0] = math.nan
    assert divergence(trace(y), trace(x), ["a", "b"], 1)["first"]["position"] == 0
