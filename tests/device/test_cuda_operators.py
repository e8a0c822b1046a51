"""Implementation `cuda` without a GPU: what each operator promises, and how a graph meets it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from rlspec import nodes
from rlspec.device import cuda_operators, triton_operators
from rlspec.device.operators import CATALOGUE, Segment, Segments, resolve
from rlspec.device.traced import traced
from tests.kernels.interpreted import gpu

BF16 = torch.bfloat16
DENSE = tuple(name for name in CATALOGUE if not nodes.NODES[name].experts)


@pytest.mark.parametrize("name", DENSE)
def test_it_promises_what_triton_does(name: str) -> None:
    cuda, triton = resolve(name, "cuda"), resolve(name, "triton")
    assert cuda.backend == "cuda" and triton.backend == "triton"
    promised = {key for key in vars(triton) if not key.startswith("__")}
    assert promised == {key for key in vars(cuda) if not key.startswith("__")}


def test_there_is_none_for_experts() -> None:
    for name in set(CATALOGUE) - set(DENSE):
        with pytest.raises(ValueError, match=f"{name!r} has no implementation 'cuda'; it has: .*triton"):
            resolve(name, "cuda")


def test_both_families_have_the_same_operators() -> None:
    assert set(cuda_operators.OPERATORS) == set(triton_operators.OPERATORS) == set(DENSE) - {"qk_norm"}
    for name, operator in cuda_operators.OPERATORS.items():
        assert getattr(cuda_operators, name) is operator


def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype)


class Layers(torch.nn.Module):
    """Every operator but attention, on ids [2, 3]."""

    def __init__(self) -> None:
        super().__init__()
        shapes = ((50, 64), (64,), (128, 64))
        self.table, self.norm, self.up = (torch.nn.Parameter(torch.randn(shape, dtype=BF16)) for shape in shapes)

    def forward(self, tokens: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ours = cuda_operators
        x = ours.embedding(tokens, self.table)
        gate, up = ours.det_gemm(ours.rms_norm(x, self.norm, eps=1e-6), self.up).chunk(2, -1)
        x = ours.residual_add(x, ours.silu(ours.swiglu(gate, up)))
        x = ours.rope(x.unflatten(-1, (4, 16)), cos, sin).flatten(-2)
        logits = ours.lm_head(x, self.table, out_dtype=torch.float32)
        both = ours.logprob(logits, tokens) + ours.batch_invariant_logprob(logits, tokens)
        return both + ours.linear_logprob(x, self.table, tokens)


class Attention(torch.nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, segments: Tensor) -> Tensor:
        return cuda_operators.KERNELS.attention(query, key, value, segments, scale=0.1)


def test_a_graph_takes_any_number_of_rows() -> None:
    rows, tokens, segments = map(torch.export.Dim, ("rows", "tokens", "segments"))
    heads = [torch.randn(2, 6, count, 64).to(BF16) for count in (4, 2, 2)]
    for module, inputs, dims in (
        (Layers(), (torch.randint(50, (2, 3)), *torch.randn(2, 2, 3, 8)), [{0: rows}] * 3),
        (Attention(), (*heads, empty(3, 5, dtype=torch.int32)), [{0: rows, 1: tokens}] * 3 + [{0: segments}]),
    ):
        exported = torch.export.export(module, inputs, dynamic_shapes=tuple(dims), strict=False)
        (result,) = [node.args[0][0] for node in exported.graph.nodes if node.op == "output"]
        assert isinstance(result.meta["val"].shape[0], torch.SymInt)


@pytest.mark.parametrize("strict", [True, False])
def test_export_takes_each_operator_as_one(strict: bool) -> None:
    inputs = torch.randint(50, (2, 3)), torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    exported = torch.export.export(Layers(), inputs, strict=strict)
    called = {str(node.target) for node in exported.graph.nodes}
    wanted = {f"rlspec_cuda.{name}.default" for name in cuda_operators.OPERATORS if name != "attention"}
    assert wanted <= called and not any("rlspec_cuda" in name for name in called - wanted)
    (result,) = [node.args[0][0] for node in exported.graph.nodes if node.op == "output"]
    assert result.meta["val"].shape == (2, 3) and result.meta["val"].dtype == torch.float32


def test_compile_takes_attention_as_one() -> None:
    segments = Segments((Segment(0, 0, 6, 0, 6),), 1, 6, 6, torch.device("cpu"))
    met: list[str] = []

    def keep(graph: Any, inputs: Any) -> Any:
        met.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return lambda *args: (torch.zeros(1, 6, 4, 64),)  # there is nothing to run it on

    heads = [torch.randn(1, 6, count, 64, dtype=torch.bfloat16) for count in (4, 2, 2)]
    table = segments.table
    call = torch.compile(
        lambda q, k, v: cuda_operators.KERNELS.attention(q, k, v, table, scale=0.1, max_query=6, max_key=6),
        backend=keep, fullgraph=True,
    )  # fmt: skip
    call(*heads)
    assert met == ["rlspec_cuda.attention"]


def test_stand_ins_know_shapes_and_dtypes() -> None:
    with FakeTensorMode():
        query, key = (torch.empty(2, 5, heads, 64, dtype=torch.bfloat16) for heads in (8, 4))
        table = torch.empty(2, 5, dtype=torch.int32)
        out, lse = torch.ops.rlspec_cuda.attention_forward(query, key, key, table, 0.1, 5, 5)
        assert (out.shape, out.dtype) == (query.shape, torch.bfloat16)
        assert (lse.shape, lse.dtype) == ((2, 5, 8), torch.float32)
        grads = torch.ops.rlspec_cuda.attention_backward(query, key, key, out, lse, out, table, 0.1, 5, 5)
        assert [one.shape for one in grads] == [query.shape, key.shape, key.shape]


IDS, SEGMENTS = empty(2, dtype=torch.int64), empty(2, 5, dtype=torch.int32)
HEADS, KEYS, SUMS = empty(2, 6, 8, 64), empty(2, 6, 4, 64), empty(2, 6, 8, dtype=torch.float32)
REFUSED = {
    "embedding": ((IDS.int(), empty(9, 8)), "tokens must be int64"),
    "rms_norm": ((empty(2, 8), empty(9), 1e-6), "does not fit"),
    "rms_norm of fp64": ((empty(2, 8).double(), empty(8).double(), 1e-6), "the kernels take"),
    "rope": ((HEADS, empty(2, 6, 31), empty(2, 6, 32)), "the tables must be"),
    "silu": ((empty(2, 8).double(),), "the kernels take"),
    "swiglu": ((empty(2, 8), empty(2, 9)), "different shapes"),
    "residual_add": ((empty(2, 8), empty(2, 8).float()), "does not fit into a residual"),
    "det_gemm": ((empty(2, 3, 8), empty(5, 9)), "det_gemm takes"),
    "det_gemm of two dtypes": ((empty(2, 8), empty(5, 8).float()), "both be"),
    "lm_head": ((empty(2, 8), empty(5, 8), torch.float64), "out_dtype"),
    "logprob": ((empty(3, 8), IDS), "do not fit"),
    "batch_invariant_logprob": ((empty(2, 8), IDS.int()), "targets must be int64"),
    "linear_logprob": ((empty(3, 8), empty(9, 8), IDS), "linear_logprob takes"),
    "attention": ((HEADS, KEYS[:1], KEYS[:1], SEGMENTS, 0.1), "query has 2 rows"),
    "attention_forward": ((HEADS, KEYS, KEYS, SEGMENTS, 0.1, None, None, SUMS[0, 0, :2]), r"sinks must be fp32 \[8\]"),
    "attention_backward": ((HEADS, KEYS, KEYS, HEADS, SUMS[:1], HEADS, SEGMENTS, 0.1), "lse must be fp32"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_stand_ins_refuse_what_the_kernels_refuse(name: str) -> None:
    arguments, words = REFUSED[name]
    operator = getattr(torch.ops.rlspec_cuda, name.split()[0])
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(ValueError, match=words):
        operator(*arguments)


def test_every_stand_in_refuses_something() -> None:
    halves = {"attention_forward", "attention_backward"}
    assert {name.split()[0] for name in REFUSED} == halves | set(cuda_operators.OPERATORS)


@pytest.mark.parametrize("name", ["rope", "attention"])
def test_a_graph_refuses_the_gradients_that_the_kernels_refuse(name: str) -> None:
    def rope(x: Tensor, table: Tensor) -> Tensor:
        return cuda_operators.KERNELS.rope(x, table.cos(), table.sin())

    def attention(x: Tensor, sinks: Tensor) -> Tensor:
        return cuda_operators.KERNELS.attention(x, x, x, SEGMENTS, scale=0.1, sinks=sinks)

    call, shape = {"rope": (rope, (2, 6, 32)), "attention": (attention, (8,))}[name]
    x, other = empty(2, 6, 8, 64).requires_grad_(), empty(*shape, dtype=torch.float32)
    torch.compile(call, backend=lambda graph, inputs: lambda *args: (x,), fullgraph=True)(x, other)
    with pytest.raises(Exception, match=f"{name} gives no gradient to (cos|sinks)"):
        torch.compile(call, backend="aot_eager", fullgraph=True)(x, other.requires_grad_())


def scaled(x: Tensor, weight: Tensor, *, factor: float) -> Tensor:
    return (x.reshape(-1, 4) * weight * factor).reshape(x.shape).clone()


def test_a_compiled_graph_has_the_bits_and_gradients_of_the_function() -> None:
    schema = "(Tensor x, Tensor weight, float factor) -> Tensor"
    ours = traced("scaled", scaled, schema, lambda x, *rest: torch.empty_like(x), ("x", "weight"))
    x, weight = torch.randn(2, 3, 4, requires_grad=True), torch.randn(4, requires_grad=True)
    met = []

    def graph(module: Any, inputs: Any) -> Any:
        met.extend(str(node.target) for node in module.graph.nodes if node.op == "call_function")
        return module

    compiled = torch.compile(lambda x, weight: torch.sin(ours(x, weight, factor=2.0)), backend=graph, fullgraph=True)
    found, plain = compiled(x, weight), scaled(x, weight, factor=2.0).sin()
    assert met[0] == "rlspec_cuda.scaled" and len(met) == 2 and torch.equal(found, plain)
    pairs = (torch.autograd.grad(one.sum(), [x, weight]) for one in (found, plain))
    assert all(torch.equal(one, other) for one, other in zip(*pairs, strict=True))
    # Outside of a graph it is the function itself, down to its autograd.
    assert ours(x, weight, factor=2.0).grad_fn.name() == scaled(x, weight, factor=2.0).grad_fn.name()


@gpu
def test_a_compiled_layer_has_the_bits_and_gradients_of_launches() -> None:
    def layer(x: Tensor, weight: Tensor, up: Tensor) -> Tensor:
        gate, other = cuda_operators.det_gemm(cuda_operators.rms_norm(x, weight, eps=1e-6), up).chunk(2, -1)
        return cuda_operators.swiglu(gate, other)

    leaves = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in ((2, 9, 128), (128,), (256, 128))]
    leaves = [one.requires_grad_() for one in leaves]
    found, plain = torch.compile(layer, backend="aot_eager", fullgraph=True)(*leaves), layer(*leaves)
    assert torch.equal(found, plain)
    pairs = (torch.autograd.grad(one.float().square().sum(), leaves) for one in (found, plain))
    assert all(torch.equal(one, other) for one, other in zip(*pairs, strict=True))
