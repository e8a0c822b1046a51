"""Models inside the mode: on CPU through the interpreter in fp32; what is promised to the bit, on a GPU."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from rlspec import logprobs
from rlspec.device import observe
from rlspec.device.invariant_mode import NotInvariant, invariant_mode
from tests.kernels.interpreted import ROOT, compiled, gpu, interpreted

COMPUTED = {
    *("mm", "bmm", "addmm", "mv", "dot", "mean", "_softmax", "_log_softmax", "nll_loss_forward", "logsumexp"),
    *("_softmax_backward_data", "_log_softmax_backward_data", "_fused_rms_norm"),
}


def normal(*shape, seed=0, dtype=torch.float32, device="cpu"):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def off(found, gold):
    """The difference, as a part of what it should be."""
    return ((found.double() - gold.double()).norm() / gold.double().norm().clamp(min=1e-30)).item()


def gradients(call, *tensors):
    """The result of the call, and the gradients of the tensors for an upstream gradient of its own."""
    tensors = [one.detach().requires_grad_() for one in tensors]
    y = call(*tensors)
    return y.detach(), *torch.autograd.grad(y, tensors, normal(*y.shape, seed=99, dtype=y.dtype, device=y.device))


def agree(call, *tensors, kernels=(), sums=True):
    """Whether inside, the kernels ran and torch computed none of COMPUTED; results and gradients agree with outside.

    Sums by torch are allowed for where integers are counted, and over the batch, in gradients of parameters.
    """
    gold = gradients(call, *tensors)
    with observe.watch() as seen, invariant_mode(), seen.call(launches=True):
        found = gradients(call, *tensors)
    for a, b in zip(found, gold, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype and off(a, b) < 1e-5
    assert not COMPUTED & set(seen.torch) and (sums or "sum" not in seen.torch), seen.torch
    return bool(seen.triton) and set(kernels) <= set(seen.triton)


# Calls

X, W, B = (normal(*shape, seed=seed) for seed, shape in enumerate(((2, 5, 32), (48, 32), (48,))))
CALLS = {
    "linear": (lambda x, w: F.linear(x, w), X, W),
    "linear of a vector": (lambda x, w: F.linear(x, w), X[0, 0], W),
    "linear with a bias": (lambda x, w, b: F.linear(x, w, b), X, W, B),
    "mm": (lambda x, w: torch.mm(x, w), X[0], W.t()),
    "Tensor.mm": (lambda x, w: x.mm(w.t()), X[0], W),
    "addmm": (lambda b, x, w: torch.addmm(b, x, w), B, X[0], W.t()),
    "matmul": (lambda x, w: torch.matmul(x, w), X, W.t()),
    "@": (lambda x, w: x @ w, X, W.t()),
    "a vector @": (lambda x, w: x @ w, X[0, 0], W.t()),
    "@ a vector": (lambda x, w: x @ w, X, W[0]),
    "mv": (lambda x, w: torch.mv(x, w), X[0], W[0]),
    "rms_norm": (lambda x, w: F.rms_norm(x, (32,), w, 1e-6), X, W[0]),
    "rms_norm without a weight": (lambda x: F.rms_norm(x, (32,)), X),
    "RMSNorm": (lambda x: nn.RMSNorm(32, eps=1e-6)(x), X),
    "log_softmax": (lambda x: F.log_softmax(x, -1), X),
    "Tensor.log_softmax": (lambda x: x.log_softmax(2), X),
    "softmax": (lambda x: F.softmax(x, -1, dtype=torch.float32), X),
    "torch.softmax": (lambda x: torch.softmax(x, dim=-1), X),
    "mean": (lambda x: x.mean(-1, keepdim=True), X),
    "mean of all": (lambda x: torch.mean(x), X),
    "mean over the middle": (lambda x: x.mean(dim=1), X),
    "mean over two": (lambda x: x.mean(dim=(0, 2), keepdim=True), X),
    "sum": (lambda x: x.sum(-1), X),
    "narrow times wide": (lambda x, y: x * y, X[..., :1], X),
    "wide minus narrow": (lambda x, y: x - y, X, X[..., :1]),
    "cross_entropy": (lambda x: F.cross_entropy(x, torch.tensor([3, -100, 0, 31, 7])), X[0]),
    "cross_entropy, sum": (lambda x: F.cross_entropy(x, torch.arange(5), ignore_index=2, reduction="sum"), X[0]),
    "cross_entropy, none": (lambda x: F.cross_entropy(x, torch.arange(5), reduction="none"), X[0]),
    "cross_entropy of a row": (lambda x: F.cross_entropy(x, torch.tensor(4)), X[0, 0]),
}


@pytest.mark.parametrize("name", CALLS)
@interpreted
def test_a_call_is_honoured(name):
    call, *tensors = CALLS[name]
    assert agree(call, *tensors, sums=len(tensors) == 3 or "cross_entropy" in name)


def written_out(x, w):
    """The norm of transformers."""
    wide = x.to(torch.float32)
    variance = wide.pow(2).mean(-1, keepdim=True)
    return w * (wide * torch.rsqrt(variance + 1e-6)).to(x.dtype)


@interpreted
def test_a_norm_written_out_sums_its_rows_by_kernels_both_ways():
    assert agree(lambda x: written_out(x, W[0]), X, kernels=["_sum"], sums=False)


@interpreted
def test_the_backward_pass_may_come_after_the_mode():
    x = X.detach().requires_grad_()
    gold = torch.autograd.grad(written_out(x, W[0]).sum(), x)[0]
    with invariant_mode():
        y = written_out(x, W[0])
    with observe.watch() as seen, seen.call(launches=True):
        found = torch.autograd.grad(y, x, torch.ones_like(y))[0]
    assert off(found, gold) < 1e-5 and "sum" not in seen.torch


# Attention

Q, K, V = (normal(2, heads, 6, 16, seed=seed) for seed, heads in enumerate((4, 2, 2)))
CAUSAL = torch.ones(6, 6, dtype=torch.bool).tril()


def padded(*ranges, keys=6):
    """[B, 1, T, T]: causal, and keys outside of the range of the row masked."""
    places = torch.arange(keys)
    inside = torch.stack([(places >= start) & (places < stop) for start, stop in ranges])
    return CAUSAL & inside[:, None, None, :]


def repeated(x):
    return x[:, :, None].expand(2, 2, 2, 6, 16).reshape(2, 4, 6, 16)


ATTENTION = {
    "is_causal": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
    "scale": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.5, enable_gqa=True),
    "a mask": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, CAUSAL, enable_gqa=True),
    "a float mask": lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, torch.zeros(1, 1, 6, 6).masked_fill(~CAUSAL, -torch.inf), enable_gqa=True
    ),
    "one query": lambda q, k, v: F.scaled_dot_product_attention(q[:, :, -1:], k, v, enable_gqa=True),
    "one query, padded on the left": lambda q, k, v: F.scaled_dot_product_attention(
        q[:, :, -1:], k, v, padded((2, 6), (0, 6))[:, :, -1:], enable_gqa=True
    ),
    "one query, its heads folded": lambda q, k, v: F.scaled_dot_product_attention(
        q[:, :, -1:].reshape(2, 2, 2, 16), k, v, padded((2, 6), (0, 6))[:, :, -1:]
    ),
    "a chunk": lambda q, k, v: F.scaled_dot_product_attention(
        q[:, :, 3:], k, v, padded((2, 6), (0, 6))[:, :, 3:], enable_gqa=True
    ),
    "repeated heads": lambda q, k, v: F.scaled_dot_product_attention(q, repeated(k), repeated(v), is_causal=True),
    "interleaved heads": lambda q, k, v: F.scaled_dot_product_attention(
        q, k.repeat_interleave(2, 1), v.repeat_interleave(2, dim=1), is_causal=True
    ),
}


@pytest.mark.parametrize("name", ATTENTION)
@interpreted
def test_attention_is_honoured(name):
    assert agree(ATTENTION[name], Q, K, V, kernels=["_forward_kernel", "_dkv_kernel"])


@pytest.mark.parametrize("ranges", [((0, 4), (0, 6)), ((2, 6), (5, 6)), ((1, 4), (0, 1)), ((0, 0), (0, 6))], ids=str)
@interpreted
def test_pads_on_either_side(ranges):
    mask = padded(*ranges)
    live = torch.zeros(2, 1, 6, 1)
    for row, (start, stop) in enumerate(ranges):
        live[row, :, start:stop] = 1

    def call(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).nan_to_num() * live

    assert agree(call, Q, K, V)
    with invariant_mode():
        out = F.scaled_dot_product_attention(Q, K, V, mask, enable_gqa=True)
    assert not out[(live == 0).expand_as(out)].any()


@interpreted
def test_repeated_heads_are_grouped_unless_they_were_changed():
    def shapes(change):
        with observe.watch() as seen, invariant_mode(), seen.call(launches=True):
            k = K.clone().requires_grad_()
            wide = repeated(k)
            change(wide)
            F.scaled_dot_product_attention(Q, wide, repeated(V), is_causal=True).backward(torch.ones_like(Q))
        return "sum" in seen.torch, k.grad

    with invariant_mode():
        k = K.clone().requires_grad_()
        F.scaled_dot_product_attention(Q, k, V, is_causal=True, enable_gqa=True).backward(torch.ones_like(Q))
    grouped, found = shapes(lambda wide: None)
    assert not grouped and torch.equal(found, k.grad)
    assert shapes(lambda wide: wide.mul_(2))[0]


@interpreted
def test_a_mask_that_changed_is_looked_at_again():
    mask = padded((0, 6), (0, 6)).clone()
    gold = F.scaled_dot_product_attention(Q, K, V, padded((0, 6), (0, 4)), enable_gqa=True)
    with invariant_mode():
        F.scaled_dot_product_attention(Q, K, V, mask, enable_gqa=True)
        mask &= padded((0, 6), (0, 4))
        found = F.scaled_dot_product_attention(Q, K, V, mask, enable_gqa=True)
    assert off(found[1, :, :4], gold[1, :, :4]) < 1e-5 and not found[1, :, 4:].any()


# Refusals

REFUSED = {
    "fp64": (lambda: F.linear(X.double(), W.double()), "linear: .*float64.*outside invariant_mode"),
    "a batch of weights": (lambda: X @ X.transpose(1, 2), "matmul: .*attn_implementation='sdpa'"),
    "bmm": (lambda: torch.bmm(X, X.transpose(1, 2)), "torch.bmm: .*must be a matrix"),
    "einsum": (lambda: torch.einsum("btk,nk->btn", X, W), "einsum: aten.bmm"),
    "conv1d": (lambda: F.conv1d(X, normal(4, 5, 3)), r"conv1d: aten.convolution"),
    "layer_norm": (lambda: F.layer_norm(X, (32,)), "layer_norm: aten.native_layer_norm"),
    "logsumexp": (lambda: X.logsumexp(-1), "logsumexp: aten.logsumexp"),
    "var": (lambda: X.var(-1), "var: aten.var"),
    "norm": (lambda: X.norm(dim=-1), "norm: aten.linalg_vector_norm"),
    "logcumsumexp": (lambda: X.logcumsumexp(-1), "logcumsumexp: aten.logcumsumexp"),
    "another library": (lambda: another_library(X), "an operator of another library"),
    "nll_loss": (lambda: F.nll_loss(X[0], torch.arange(5)), "nll_loss: aten.nll_loss_forward"),
    "addmm with beta": (lambda: torch.addmm(B, X[0], W.t(), beta=2), "addmm: beta=2"),
    "out=": (lambda: torch.mm(X[0], W.t(), out=torch.empty(5, 48)), "mm: out="),
    "log_softmax over rows": (lambda: F.log_softmax(X, 0), "log_softmax: dim=0"),
    "a norm over two": (lambda: F.rms_norm(X, (5, 32)), "rms_norm: normalized_shape"),
    "label smoothing": (
        lambda: F.cross_entropy(X[0], torch.arange(5), label_smoothing=0.1),
        "cross_entropy: class weights and label smoothing",
    ),
    "class weights": (lambda: F.cross_entropy(X[0], torch.arange(5), torch.ones(32)), "cross_entropy: class weights"),
    "probabilities": (lambda: F.cross_entropy(X[0], X[0]), "cross_entropy: .*indices"),
    "dropout": (lambda: F.dropout(X, 0.1), "dropout: p=0.1"),
    "index_add": (lambda: X[0].index_add(0, torch.tensor([0]), X[0, :1]), "index_add: rows are added"),
    "dropout of attention": (
        lambda: F.scaled_dot_product_attention(Q, Q, Q, dropout_p=0.1, is_causal=True),
        "scaled_dot_product_attention: dropout_p=0.1. .*attention_dropout=0",
    ),
    "heads that differ": (lambda: F.scaled_dot_product_attention(Q, K, V, is_causal=True), "enable_gqa=True"),
    "queries that see all": (
        lambda: F.scaled_dot_product_attention(*(normal(1, 1, 65, 16),) * 3),
        "65 queries that all see all keys",
    ),
    "everything seen, by a mask": (
        lambda: F.scaled_dot_product_attention(Q, Q, Q, torch.ones(6, 6, dtype=torch.bool)),
        "not causal",
    ),
    "a window": (lambda: F.scaled_dot_product_attention(Q, Q, Q, CAUSAL.triu(-2)), "sliding windows"),
    "packed samples": (
        lambda: F.scaled_dot_product_attention(Q, Q, Q, torch.block_diag(CAUSAL[:3, :3], CAUSAL[:3, :3]).bool()),
        "packed samples",
    ),
    "keys padded, for any query": (
        lambda: F.scaled_dot_product_attention(Q[:, :, :3], Q, Q, (torch.arange(6) < 4).expand(2, 1, 3, 6)),
        "not causal",
    ),
    "numbers to add": (lambda: F.scaled_dot_product_attention(Q, Q, Q, normal(6, 6)), "numbers to add"),
    "a mask for each head": (
        lambda: F.scaled_dot_product_attention(Q, Q, Q, CAUSAL.repeat(2, 4, 1, 1)),
        "of its own for each head",
    ),
    "a gradient of another shape": (
        lambda: F.linear(X.clone().requires_grad_(), W).backward(normal(3, 2, 5, 48)),
        r"gradient of a result \[2, 5, 48\] has the shape \[3, 2, 5, 48\]",
    ),
    "a subclass": (lambda: F.linear(X.as_subclass(Other), W), "Other"),
    "autocast": (lambda: cast(), "linear: autocast is on"),
}


@functools.cache
def _library():
    library = torch.library.Library("tests_of_invariant_mode", "FRAGMENT")
    library.define("whole(Tensor x) -> Tensor")
    library.impl("whole", lambda x: x.cumsum(-1), "CompositeExplicitAutograd")
    return library


def another_library(x):
    _library()
    return torch.ops.tests_of_invariant_mode.whole(x)


class Other(torch.Tensor):
    pass


def cast():
    with torch.autocast("cpu", torch.bfloat16):
        return F.linear(X, W)


@pytest.mark.parametrize("name", REFUSED)
@interpreted
def test_what_is_refused(name):
    call, message = REFUSED[name]
    with pytest.raises(NotInvariant, match=message), invariant_mode():
        call()


@interpreted
def test_a_backward_pass_that_torch_would_reduce_is_refused():
    x = X.detach().requires_grad_()
    y = F.linear(x, W).sum()
    with pytest.raises(NotInvariant, match="aten.mm"), invariant_mode():
        y.backward()
    y = torch.where(X > 0, x[..., :1], 0.0).sum()
    with pytest.raises(NotInvariant, match="sum along rows, as the gradient"), invariant_mode():
        y.backward()


@pytest.mark.parametrize("reentrant", [False, True])
@interpreted
def test_what_was_checkpointed_is_computed_again_by_kernels(reentrant):
    def block(x):
        return F.linear(written_out(x, W[0]), W[:32])

    def slope(call):
        x = X.detach().requires_grad_()
        call(x).sum().backward()
        return x.grad

    with observe.watch() as seen, invariant_mode(), seen.call(launches=True):
        found = slope(lambda x: checkpoint(block, x, use_reentrant=reentrant))
        gold = slope(block)
    assert torch.equal(found, gold) and not COMPUTED & set(seen.torch)


@interpreted
def test_what_is_no_sum_passes():
    with invariant_mode():
        ids = torch.arange(6).view(2, 3)
        assert ids.sum() == 15 and ids.cumsum(-1)[1, 2] == 12 and (X > 0).sum() == int((X > 0).sum())
        assert torch.equal(F.dropout(X, 0.0), X) and torch.equal(F.dropout(X, 0.5, training=False), X)
        assert X.max() == X.amax() and torch.equal(F.silu(X).exp(), F.silu(X).exp())
        angles = normal(2, 8, 1) @ normal(2, 1, 5)
    assert torch.equal(angles, normal(2, 8, 1) * normal(2, 1, 5))


def sees_kernels():
    with observe.watch() as seen:
        F.linear(X, W)
    return bool(seen.triton)


@interpreted
def test_it_nests_and_ends():
    assert not sees_kernels()
    with invariant_mode():
        with invariant_mode():
            assert sees_kernels()
        assert sees_kernels()
        with pytest.raises(KeyError), invariant_mode():
            raise KeyError
        assert sees_kernels()
    assert not sees_kernels()
    with pytest.raises(NotInvariant), invariant_mode():
        F.layer_norm(X, (32,))
    F.layer_norm(X, (32,))


@interpreted
def test_it_is_of_its_thread():
    found = []

    def other():
        found.append(sees_kernels())
        with invariant_mode():
            found.append(sees_kernels())
        found.append(sees_kernels())

    with invariant_mode():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert sees_kernels()
    assert found == [False, True, False]


@interpreted
def test_compiled_code_is_refused():
    double = torch.compile(lambda x: F.linear(x, W), backend="eager")
    with pytest.raises(NotInvariant, match="torch.compile.*eager"), invariant_mode():
        double(X)
    assert double(X).shape == (2, 5, 48)
    with pytest.raises(NotInvariant, match="torch.compile"), invariant_mode():
        double(X)


# A model of transformers


def qwen3(device="cpu", dtype=torch.float32, **sizes):
    transformers = pytest.importorskip("transformers")
    sizes = {
        **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 40, "max_position_embeddings": 512},
        **sizes,
    }
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**sizes, attn_implementation="sdpa", initializer_range=0.2)
    return transformers.Qwen3ForCausalLM(config).to(device, dtype).eval()


def batch(lengths, vocabulary, left=False, device="cpu"):
    """Ids, mask and positions [B, T] of random samples, padded on one side."""
    width = max(lengths)
    ids, mask = torch.zeros(2, len(lengths), width, dtype=torch.int64)
    for row, length in enumerate(lengths):
        place = slice(width - length, width) if left else slice(length)
        generator = torch.Generator().manual_seed(row)
        ids[row, place] = torch.randint(vocabulary, (length,), generator=generator)
        mask[row, place] = 1
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device), "position_ids": positions.to(device)}


def logits_and_slope(model, ids, attention_mask, position_ids):
    """Logits and the gradient of the embedded inputs, of each sample without its pads, with targets of its own."""
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    logits = model(
        inputs_embeds=embedded, attention_mask=attention_mask, position_ids=position_ids, use_cache=False
    ).logits
    live = attention_mask.bool()
    dlogits = torch.zeros_like(logits)
    for row in range(len(ids)):
        count = int(live[row].sum())
        dlogits[row, live[row]] = normal(count, logits.shape[-1], seed=count).to(logits)
    (slope,) = torch.autograd.grad(logits, embedded, dlogits)
    return [(logits[row, live[row]].detach(), slope[row, live[row]]) for row in range(len(ids))]


@interpreted
def test_a_model_of_transformers_runs_on_kernels_alone():
    model, inputs = qwen3(), batch([7], 40)
    labels = inputs["input_ids"]

    def run():
        model.zero_grad()
        made = model(**inputs, labels=labels, use_cache=False)
        made.loss.backward()
        return made.loss.detach(), made.logits.detach(), *(one.grad for one in model.parameters())

    gold = run()
    with observe.watch() as seen, invariant_mode(), seen.call(launches=True):
        found = run()
    for a, b in zip(found, gold, strict=True):
        assert off(a, b) < 1e-5
    assert not COMPUTED & set(seen.torch)
    assert {"_plain", "_sum", "_forward_kernel", "_dq_kernel", "_dkv_kernel", "_spans", "_backward"} <= set(seen.triton)


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@interpreted
def test_a_padded_batch_of_a_model_is_its_samples(left):
    model, inputs = qwen3(num_hidden_layers=1), batch([3, 5, 1], 40, left)
    with invariant_mode():
        together = logits_and_slope(model, inputs.pop("input_ids"), **inputs)
        alone = [logits_and_slope(model, one.pop("input_ids"), **one)[0] for one in singles([3, 5, 1], 40)]
    for one, other in zip(together, alone, strict=True):
        assert all(off(a, b) < 1e-5 for a, b in zip(one, other, strict=True))


def singles(lengths, vocabulary, device="cpu"):
    for row, length in enumerate(lengths):
        ids = torch.randint(vocabulary, (1, length), generator=torch.Generator().manual_seed(row)).to(device)
        places = torch.arange(length, device=device)[None]
        yield {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": places}


@interpreted
def test_decoding_with_a_cache_is_the_whole():
    model, inputs = qwen3(num_hidden_layers=1), batch([6, 4], 40, left=True)
    steps = []
    with torch.no_grad(), invariant_mode():
        whole = model(**inputs, use_cache=False).logits
        start = {name: one[:, :4] for name, one in inputs.items()}
        made = model(**start, use_cache=True)
        for place in (4, 5):
            step = {name: one[:, place : place + 1] for name, one in inputs.items() if name != "attention_mask"}
            mask = inputs["attention_mask"][:, : place + 1]
            made = model(**step, attention_mask=mask, past_key_values=made.past_key_values, use_cache=True)
            steps.append(made.logits[:, 0])
    assert off(torch.stack(steps, 1), whole[:, 4:]) < 1e-5


@interpreted
def test_eager_attention_is_told_where_to_go():
    model = qwen3()
    model.set_attn_implementation("eager")
    with pytest.raises(NotInvariant, match="attn_implementation='sdpa'"), invariant_mode():
        model(**batch([4], 40))


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@gpu
def test_bits_of_a_padded_batch_of_a_model(left):
    lengths = [5, 64, 17, 130, 1, 99, 128, 33]
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "vocab_size": 1000}
    model = qwen3("cuda", torch.bfloat16, **sizes)
    inputs = batch(lengths, 1000, left, "cuda")
    with invariant_mode():
        together = logits_and_slope(model, inputs.pop("input_ids"), **inputs)
        alone = [logits_and_slope(model, one.pop("input_ids"), **one)[0] for one in singles(lengths, 1000, "cuda")]
        for (logits, slope), (other, other_slope) in zip(together, alone, strict=True):
            assert torch.equal(logits, other) and torch.equal(slope, other_slope)
            assert torch.equal(F.log_softmax(logits.float(), -1), F.log_softmax(other.float(), -1))


# The example, judged by rlspec

EXAMPLE = ROOT / "specs" / "examples" / "invariant-mode"


def python(*words, cwd, **environment):
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, **environment}
    return subprocess.run(
        [sys.executable, *map(str, words)], cwd=cwd, env=environment, capture_output=True, text=True
    )  # fmt: skip


# Several calls of a script in one process, which imports transformers once.
SCRIPT = """
import json, runpy, sys
from tests.kernels.interpreted import swift

with swift():
    for sys.argv in json.loads(sys.argv[1]):
        runpy.run_path(sys.argv[0], run_name="__main__")
"""


@compiled
def test_the_example_writes_the_same_samples_alone_and_in_a_batch(tmp_path):
    pytest.importorskip("transformers")
    tiny = ("--device", "cpu", "--dtype", "fp32", "--size", "tiny")
    calls = []
    for samples, *invariant in (("alone", "--invariant"), ("batch", "--invariant"), ("batch",)):
        file = tmp_path / f"{len(calls)}.jsonl"
        calls.append([str(EXAMPLE / "dump.py"), str(file), "--samples", samples, *invariant, *tiny])
    done = python("-c", SCRIPT, json.dumps(calls), cwd=tmp_path, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    files = [logprobs.read(Path(call[1])) for call in calls]
    first, *others = files
    assert len(first.logprobs) == 15 and len(first.spans) == 3
    for other in others:
        assert other.tokens == first.tokens and other.spans == first.spans
        assert max(abs(a - b) for a, b in zip(other.logprobs, first.logprobs, strict=True)) < 1e-5


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@compiled
def test_the_example_is_blocked_without_a_gpu(tmp_path):
    shutil.copytree(EXAMPLE, tmp_path / "example")
    for name, status in (("before", "FAIL"), ("after", "PASS")):
        done = python("-m", "rlspec", "run", f"{name}.yaml", cwd=tmp_path / "example")
        assert done.returncode == 5 and f"expected {status}, got BLOCKED" in done.stdout, done.stdout + done.stderr


@gpu
def test_the_example_comes_out_as_told(tmp_path):
    pytest.importorskip("transformers")
    shutil.copytree(EXAMPLE, tmp_path / "example")
    done = python("-m", "rlspec", "run", "before.yaml", "after.yaml", cwd=tmp_path / "example")
    assert done.returncode == 0, done.stdout + done.stderr
