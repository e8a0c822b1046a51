from __future__ import annotations

import re

import pytest
import torch

from rlspec.kernels import logprob as module
from rlspec.kernels.logprob import batch_invariant_logprob, logprob
from tests.kernels.interpreted import INTERPRETING, compiled, gpu, hopper, interpreted, spills

WAYS = pytest.mark.parametrize("way", [logprob, batch_invariant_logprob], ids=lambda way: way.__name__)
IGNORED = -100

if INTERPRETING:
    module.SPAN = 4096  # several spans in rows that an interpreter can read


def inputs(rows, width, scale=4.0, dtype=torch.float32, device="cpu"):
    """Logits, targets, and gradients of the log-probability and the entropy."""
    generator = torch.Generator().manual_seed(rows * width)
    logits = torch.randn(rows, width, generator=generator) * scale
    targets = torch.randint(width, (rows,), generator=generator)
    targets[::3] = 0
    targets[2::3] = width - 1
    grads = torch.randn(2, rows, generator=generator)
    return logits.to(device, dtype), targets.to(device), *grads.to(device)


def everything(way, logits, targets, dy, dh):
    """Log-probability, entropy, and the gradients by the first alone and by both."""
    logits = logits.detach().requires_grad_()
    alone = torch.autograd.grad(way(logits, targets), logits, dy)[0]
    found, entropy = way(logits, targets, entropy=True)
    return found.detach(), entropy.detach(), alone, torch.autograd.grad((found, entropy), logits, (dy, dh))[0]


def exact(logits, targets, dy, dh):
    logits = logits.double().detach().requires_grad_()
    logs = torch.log_softmax(logits, -1)
    found = logs.gather(-1, targets[..., None])[..., 0]
    probabilities = logs.exp()
    entropy = -(probabilities * logs.clamp(min=-1e300)).sum(-1)
    alone = torch.autograd.grad(found, logits, dy.double(), retain_graph=True)[0]
    both = torch.autograd.grad((found, entropy), logits, (dy.double(), dh.double()))[0]
    return found.detach(), entropy.detach(), alone, both


def equal(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@WAYS
@pytest.mark.parametrize(
    "rows, width, scale", [(1, 1, 0.5), (3, 2, 30.0), (2, 2049, 30.0), (2, 10001, 0.5), (1, 10001, 30.0)], ids=str
)
@interpreted
def test_the_formula(way, rows, width, scale):
    given = inputs(rows, width, scale)
    for ours, gold in zip(everything(way, *given), exact(*given), strict=True):
        torch.testing.assert_close(ours.double(), gold, rtol=3e-6, atol=4e-6)


@WAYS
@interpreted
def test_a_row_keeps_its_bits_in_any_company(way):
    logits, targets, dy, dh = inputs(7, 9001)
    whole = everything(way, logits, targets, dy, dh)
    for rows in (slice(0, 1), slice(3, 7), slice(0, 7, 2)):
        part = everything(way, logits[rows], targets[rows], dy[rows], dh[rows])
        assert equal(part, [one[rows] for one in whole])
    wide = torch.full((14, 9004), torch.nan)
    wide[::2, 1:9002] = logits
    assert equal(everything(way, wide[::2, 1:9002], targets, dy, dh), whole)
    assert equal(everything(way, logits.T.contiguous().T, targets, dy, dh), whole)
    again = everything(way, logits[None], targets[None], dy[None], dh[None])
    assert equal([one[0] for one in again], whole)


@WAYS
@interpreted
def test_an_ignored_row_gives_zero_and_is_not_read(way):
    logits, targets, dy, dh = inputs(4, 9001)
    whole = everything(way, logits, targets, dy, dh)
    targets[1] = IGNORED
    logits[1] = torch.nan
    for ours, before in zip(everything(way, logits, targets, dy, dh), whole, strict=True):
        assert torch.equal(ours[1], torch.zeros_like(ours[1])) and equal(ours[[0, 2, 3]], before[[0, 2, 3]])
    targets[0] = 7
    assert way(logits, targets, ignore_index=7)[0] == 0


@WAYS
@interpreted
def test_a_target_outside_gives_nan_and_harms_no_other_row(way):
    logits, targets, dy, dh = inputs(4, 300)
    whole = everything(way, logits, targets, dy, dh)
    targets[1], targets[2] = 300, -1
    for ours, before in zip(everything(way, logits, targets, dy, dh), whole, strict=True):
        assert ours[1:3].isnan().all() and equal(ours[[0, 3]], before[[0, 3]])
    with pytest.raises(ValueError, match="target 300 for logits of 300 columns"):
        way(logits, targets, validate=True)
    targets[1:3] = IGNORED
    assert way(logits, targets, validate=True)[1] == 0


@WAYS
@interpreted
def test_masked_columns_are_as_good_as_absent(way):
    logits, targets, dy, dh = inputs(3, 3000)
    targets = targets.clamp(2100, 2900)
    logits[:, :2100], logits[0, 2950:] = -torch.inf, -torch.inf
    found, entropy, alone, both = everything(way, logits, targets, dy, dh)
    for row, end in ((0, 2950), (1, 3000)):
        gold = exact(logits[row, 2100:end], targets[row] - 2100, dy[row], dh[row])
        torch.testing.assert_close(found[row].double(), gold[0], rtol=3e-6, atol=3e-6)
        torch.testing.assert_close(entropy[row].double(), gold[1], rtol=3e-6, atol=3e-6)
        for ours, theirs in ((alone, gold[2]), (both, gold[3])):
            assert not ours[row, :2100].any()
            torch.testing.assert_close(ours[row, 2100 : 2100 + len(theirs)].double(), theirs, rtol=3e-6, atol=3e-6)


@WAYS
@interpreted
def test_rows_that_have_no_value(way):
    logits, targets, _, _ = inputs(4, 2500)
    logits[0] = -torch.inf
    logits[1, 2400] = torch.nan
    logits[2, 2400] = torch.inf
    found, entropy = way(logits, targets, entropy=True)
    assert found[:3].isnan().all() and entropy[:3].isnan().all() and found[3].isfinite() and entropy[3].isfinite()


@WAYS
@interpreted
def test_no_large_tensor_is_saved_in_fp32(way):
    logits, targets, _, _ = inputs(3, 2100)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(one) or one, lambda one: one):
        way(logits.bfloat16().requires_grad_(), targets, entropy=True)
    assert sorted(one.numel() for one in saved if one.dtype == torch.float32) == [3, 3, 3]


X, T = torch.ones(2, 5), torch.zeros(2, dtype=torch.int64)


@WAYS
@pytest.mark.parametrize(
    "logits, targets, message",
    [
        (X.double(), T, "float64"),
        (X, T.int(), "int32"),
        (X, T[:1], "match"),
        (X[:0], T[:0], "empty"),
        (X[:, :0], T, "empty"),
    ],
    ids=("double", "int32", "rows", "no rows", "no columns"),
)
def test_what_is_refused(way, logits, targets, message):
    with pytest.raises(ValueError, match=message):
        way(logits, targets)


@WAYS
@compiled
def test_a_cpu_is_refused(way):
    with pytest.raises(ValueError, match="CUDA"):
        way(X, T)


@compiled
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("entropy", [False, True], ids=("plain", "entropy"))
def test_it_compiles_for_hopper(dtype, entropy):
    floats, integers, width = torch.float32, torch.int64, 151936
    options = {"ENTROPY": entropy, "num_warps": 4, "enable_fp_fusion": False, "grid": (1,)}
    reading = {"LANES": 256, "STAGES": 4, **options}
    with hopper():
        streamed = module._stream.warmup(dtype, integers, *[floats] * 4, width, width, IGNORED, **reading)
        spans = module._spans.warmup(dtype, integers, *[floats] * 3, width, width, 5, IGNORED, SPAN=32768, **reading)
        back = module._backward.warmup(
            dtype, integers, *[floats] * 5, dtype, width, width, 75, IGNORED, BLOCK=2048, **options
        )
        for kernel in (streamed, spans, back):
            assert spills(kernel) == 0 and re.search(r"LDG(STS)?\.E[.\w]*\.128", kernel.asm["sass"])
        module._join.warmup(
            dtype, integers, *[floats] * 7, width, width, 5, IGNORED, SPANS=8, DEPTH=3, **{**options, "num_warps": 1}
        )


@gpu
@WAYS
@pytest.mark.parametrize("dtype", module.DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 50257, 151936], ids=str)
def test_on_a_gpu(way, dtype, width):
    given = inputs(40, width, 8.0, dtype, "cuda")
    whole = everything(way, *given)
    gold = exact(*given)
    for ours, theirs in zip(whole[:2], gold[:2], strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=3e-6, atol=6e-6)
    tolerance = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    for ours, theirs in zip(whole[2:], gold[2:], strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=1e-6)
    assert equal(everything(way, *given), whole)
    logits, targets, dy, dh = given
    shifted = torch.full((80, width + 3), torch.nan, dtype=dtype, device="cuda")
    shifted[::2, 1 : width + 1] = logits
    for source in (logits, shifted[::2, 1 : width + 1]):
        for rows in (slice(0, 1), slice(7, 40), slice(1, 40, 3)):
            part = everything(way, source[rows], targets[rows], dy[rows], dh[rows])
            assert equal(part, [one[rows] for one in whole])
