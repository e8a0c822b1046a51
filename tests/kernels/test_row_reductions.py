from __future__ import annotations

import pytest
import torch

from rlspec.kernels import row_reductions as module
from rlspec.kernels.row_reductions import log_softmax, row_mean, row_sum, softmax, spread
from tests.kernels.interpreted import compiled, gpu, hopper, interpreted, spills

SHAPES = ((1, 1), (3, 16), (2, 3, 130), (7,), (2, 4100))
OPERATORS = {
    "row_sum": (row_sum, lambda x: x.sum(-1)),
    "row_mean": (row_mean, lambda x: x.mean(-1)),
    "softmax": (softmax, lambda x: torch.softmax(x, -1)),
    "log_softmax": (log_softmax, lambda x: torch.log_softmax(x, -1)),
    "spread": (lambda x: spread(x[..., :1], 40), lambda x: x[..., :1].expand(*x.shape[:-1], 40)),
}
every = pytest.mark.parametrize("name", OPERATORS)


def inputs(*shape, seed=0, dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 4).to(device, dtype)


def both(operator, x, dy):
    x = x.detach().requires_grad_()
    y = operator(x)
    return y.detach(), torch.autograd.grad(y, x, dy)[0]


def upstream(operator, x):
    return inputs(*operator(x).shape, seed=1, dtype=x.dtype, device=x.device)


@every
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@interpreted
def test_the_formula(name, shape):
    operator, formula = OPERATORS[name]
    x = inputs(*shape)
    dy = upstream(formula, x)
    for ours, gold in zip(both(operator, x, dy), both(formula, x.double(), dy.double()), strict=True):
        torch.testing.assert_close(ours.double(), gold, rtol=2e-6, atol=2e-5)


@every
@interpreted
def test_a_row_keeps_its_bits_in_any_company(name):
    operator, _ = OPERATORS[name]
    x = inputs(9, 2500)
    dy = upstream(operator, x)
    whole = both(operator, x, dy)
    wide = torch.full((18, 2510), torch.nan)
    wide[::2, 3:2503] = x
    for rows in (slice(0, 1), slice(4, 9)):
        for a, b in zip(both(operator, x[rows], dy[rows]), whole, strict=True):
            assert torch.equal(a, b[rows])
    for layout in (wide[::2, 3:2503], x.T.contiguous().T):
        for a, b in zip(both(operator, layout, dy), whole, strict=True):
            assert torch.equal(a, b)
    x[:4] = torch.nan
    for a, b in zip(both(operator, x, dy), whole, strict=True):
        assert torch.equal(a[4:], b[4:])


@interpreted
def test_a_sum_goes_along_the_written_tree():
    x = inputs(1, 300)
    lanes = torch.zeros(64, 8)
    lanes.view(-1)[:300] = x
    while lanes.shape[1] > 1:
        lanes = lanes[:, ::2] + lanes[:, 1::2]
    lanes = lanes[:, 0]
    while len(lanes) > 1:
        lanes = lanes[::2] + lanes[1::2]
    assert torch.equal(row_sum(x), lanes)


@interpreted
def test_a_wide_row_is_cut_at_fixed_columns():
    x = inputs(3, 2 * module.SPAN + 5)
    parts = torch.stack([row_sum(part) for part in x.split(module.SPAN, 1)], 1)
    assert torch.equal(row_sum(x), row_sum(parts))
    assert torch.equal(row_mean(x), row_sum(parts) / x.shape[1])


@interpreted
def test_gradients_that_are_one_number_spread_out():
    for operator in (row_sum, softmax, log_softmax):
        x = inputs(3, 40).requires_grad_()
        y = operator(x)
        y.backward(torch.tensor(1.0).expand(y.shape))
        again = both(operator, x, torch.ones_like(y))[1]
        assert torch.equal(x.grad, again)


@interpreted
def test_infinities_go_as_in_torch():
    inf = torch.inf
    x = torch.tensor([[1.0, -inf, 2.0], [-inf, -inf, -inf], [0.0, inf, 1.0], [1e30, -1e30, 0.0]])
    for name in ("softmax", "log_softmax"):
        operator, formula = OPERATORS[name]
        torch.testing.assert_close(operator(x), formula(x), equal_nan=True)
    dx = both(softmax, x[:1], torch.ones(1, 3))[1]
    assert dx.isfinite().all()


@every
@pytest.mark.parametrize(
    "x, message",
    [
        (torch.ones(3, 2, dtype=torch.float64), "float64"),
        (torch.ones(0, 4), "not empty"),
        (torch.tensor(1.0), "not empty"),
        (torch.ones(3, 2, dtype=torch.bfloat16), "interpreter"),
    ],
    ids=["fp64", "empty", "scalar", "bf16"],
)
@interpreted
def test_what_is_refused(name, x, message):
    operator = {"spread": lambda x: spread(x, 4)}.get(name, OPERATORS[name][0])
    with pytest.raises(ValueError, match=message):
        operator(x)


@interpreted
def test_only_one_column_is_spread():
    with pytest.raises(ValueError, match="spread takes"):
        spread(torch.ones(3, 2), 4)


@compiled
def test_a_cpu_is_refused():
    with pytest.raises(ValueError, match="CUDA"):
        row_sum(torch.ones(3))


@pytest.mark.parametrize("width", (16, 128, 4096))
@compiled
def test_it_compiles_for_hopper_without_spills(width):
    x, y = (torch.empty(4, width, dtype=torch.bfloat16) for _ in range(2))
    stats = torch.empty(2, 4)
    launches = [module._sum_launch(x, y[:, 0].clone(), mean, width) for mean in (False, True)]
    launches += [module._softmax_launch(x, y, *stats, log) for log in (False, True)]
    launches += [module._gradient_launch(x, x, y, *stats, log) for log in (False, True)]
    with hopper():
        for launch in launches:
            assert not spills(launch.kernel.warmup(*launch.args, grid=(1,), **launch.options))


@every
@pytest.mark.parametrize("dtype", module.DTYPES, ids=str)
@gpu
def test_bits_on_a_gpu(name, dtype):
    operator, formula = OPERATORS[name]
    for width in (16, 128, 1000, 4096, 151936):
        x = inputs(67, width, dtype=dtype, device="cuda")
        dy = upstream(operator, x)
        whole = both(operator, x, dy)
        wide = torch.full((134, width + 9), torch.nan, dtype=dtype, device="cuda")
        wide[::2, 3 : width + 3] = x
        for a, b in zip(both(operator, wide[::2, 3 : width + 3], dy), whole, strict=True):
            assert torch.equal(a, b)
        for rows in (slice(0, 1), slice(50, 67), slice(1, 60, 3)):
            for a, b in zip(both(operator, x[rows], dy[rows]), whole, strict=True):
                assert torch.equal(a, b[rows])
        gold = both(formula, x.double(), dy.double())
        for a, b in zip(whole, gold, strict=True):
            assert (a - b).norm() <= {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}[dtype] * b.norm()
