"""The whole model trained on the Triton kernels: the bits of every layout on a GPU, and of two of them interpreted."""

from __future__ import annotations

import copy

import pytest
import torch

from rlspec.device.chain_model import TrainingPass
from rlspec.device.comparing import identical
from rlspec.device.operators import Operators
from rlspec.layouts import Layout
from tests.device.test_chain_model import CELLS, FULL, TOKENS, call, model, tier, training
from tests.kernels.interpreted import gpu, interpreted


def same(got, want):
    assert list(got.gradients) == list(want.gradients) and set(got.accumulated_by.values()) == {"operator"}
    assert identical(got.logprobs, want.logprobs)
    assert [name for name in want.gradients if not identical(got.gradients[name], want.gradients[name])] == []
    return True


@pytest.fixture
def ordered_products(monkeypatch):
    """Interpreted products go through BLAS, whose bits depend on the place of a row; here each is a chain over k."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")

    def chain(self, a, b, d, *_):
        total = d.data.copy()
        for left, right in zip(a.data.T, b.data, strict=True):
            total += left[:, None] * right[None, :]
        return interpreter.TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", chain)


@interpreted
def test_kernels_train_to_the_same_bits_interpreted(ordered_products):
    two = tier(samples=["s1", "s3"])
    small = [TOKENS[1], TOKENS[3]]
    whole, chunked = (
        Layout(name="made", calls=(call(rows, width, lengths=[5, 17]),))
        for rows, width in (([[0], [1]], None), ([[1, 0]], 24))
    )
    decoder = model(layers=1)
    training_pass = TrainingPass(decoder, Operators("triton"), two, small)
    want = training_pass.run(whole)
    assert same(training_pass.run(chunked, chunk_size=13), want)
    plain = TrainingPass(decoder, Operators("canonical"), two, small).run(whole)
    off = {name: (want.gradients[name] - plain.gradients[name]).norm() for name in plain.gradients}
    # fp32 sums of at most 257 terms, a dozen operators deep there and back
    assert all(off[name] <= 2**-24 * 257 * plain.gradients[name].norm() for name in off)


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_kernels_train_to_the_same_bits_on_a_gpu(dtype):
    decoder = copy.deepcopy(model(dtype=dtype)).cuda()
    want = training(decoder, "triton").run(FULL)
    for made, size in CELLS.values():
        assert same(training(decoder, "triton", pad_token=77).run(made, chunk_size=size), want)
