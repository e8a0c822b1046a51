"""Gradients from given ones are those of torch.autograd."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlspec.device.autograd import accumulate, differentiate

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys, torch
from rlspec.device.autograd import differentiate

x = torch.ones(2).requires_grad_()
assert differentiate([2 * x], [x], [torch.ones(2)])[0].tolist() == [2, 2]
assert not {"sympy", "torch._dynamo"} & sys.modules.keys()
"""


def leaves():
    torch.manual_seed(0)
    return [torch.randn(3, 4, requires_grad=True) for _ in range(3)]


def results(x, y):
    return [x * y, (x + y).tanh().sum(1)]


def test_differentiate_gives_what_torch_gives():
    x, y, unused = leaves()
    upstream = [torch.randn(3, 4), torch.randn(3)]
    want = torch.autograd.grad(results(x, y), [x, y, unused], upstream, allow_unused=True)
    found = differentiate(results(x, y), [x, y, unused], upstream)
    assert torch.equal(found[0], want[0]) and torch.equal(found[1], want[1]) and found[2] is want[2] is None
    assert x.grad is None and y.grad is None


def test_accumulate_adds_what_torch_adds():
    (x, y, _), (a, b, unused) = leaves(), leaves()
    upstream = [torch.randn(3, 4), torch.randn(3)]
    for _ in range(2):
        torch.autograd.backward(results(x, y), upstream)
        accumulate(results(a, b), upstream)
    assert torch.equal(x.grad, a.grad) and torch.equal(y.grad, b.grad) and unused.grad is None


@pytest.mark.parametrize("shape", [(2, 3, 4), (3, 1), (4, 3)])
def test_a_gradient_of_another_shape_is_refused(shape):
    x, y, _ = leaves()
    with pytest.raises(ValueError, match=r"result of shape \[3, 4\] has shape"):
        differentiate([x * y], [x], [torch.ones(shape)])
    with pytest.raises(ValueError, match=r"result of shape \[3, 4\] has shape"):
        accumulate([x * y], [torch.ones(shape)])
    assert x.grad is None


def test_a_result_without_a_graph_is_refused():
    x = leaves()[0]
    with pytest.raises(RuntimeError, match="does not require grad"):
        differentiate([x.detach()], [x], [torch.ones(3, 4)])


def test_the_compiler_is_not_imported():
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
