"""The row kernels of csrc/: no spills where it is hot; on a GPU the bits of Triton, rows alone, small errors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rlspec import nvcc
from rlspec.device import cuda_gemm, cuda_rows
from tests.csrc import row_cases
from tests.csrc.row_cases import BF16, EPS, FP32, Draw, gradients, same
from tests.kernels.interpreted import gpu

SOURCES = ("rms_norm", "rope", "swiglu", "embedding", "logprob", "residual_add", "kv_cache")
# Kernels for any width, number by number, and norms of rows wider than 8192: off the path of the models.
COLD = ("_any", "Li512E")

needs_nvcc = pytest.mark.skipif(nvcc.find() is None, reason="needs nvcc, to compile csrc/")


@needs_nvcc
@pytest.mark.parametrize("source", SOURCES)
def test_hot_kernels_spill_no_registers(source: str) -> None:
    kernels = nvcc.usage(nvcc.build(source).ptxas)
    hot = {name: usage for name, usage in kernels.items() if not any(mark in name for mark in COLD)}
    assert hot and not {name: usage for name, usage in hot.items() if usage.spilled or usage.stack}


X = torch.zeros(2, 3, 4, 8)
REFUSED = {
    "a CPU tensor": (lambda: cuda_rows.silu(X), "x is on cpu: the kernels run on a CUDA device"),
    "fp64": (lambda: cuda_rows.silu(X.double()), "the kernels take bf16, fp16 and fp32"),
    "an empty tensor": (lambda: cuda_rows.silu(X[:0]), "is empty"),
    "another shape": (lambda: cuda_rows.swiglu(X, X[0]), "different shapes"),
    "another dtype": (lambda: cuda_rows.swiglu(X, X.half()), "different dtypes"),
    "a weight that does not fit": (lambda: cuda_rows.rms_norm(X, X[0, 0, 0, :4], eps=EPS), "does not fit"),
    "a table that does not fit": (lambda: cuda_rows.rope(X, X[..., 0, :4], X[..., 0, :3]), "the tables must be"),
    "a wider x": (lambda: cuda_rows.residual_add(X.half(), X), "does not fit into a residual"),
    "targets that do not fit": (lambda: cuda_rows.logprob(X, torch.zeros(2, 3, dtype=torch.int64)), "do not fit"),
    "a sum that does not fit": (lambda: cuda_rows.residual_norm(X.half(), X, X[0, 0, 0], eps=EPS), "does not fit"),
    "heads on a CPU": (
        lambda: cuda_rows.rotated_heads(X, X, *[X[0, 0, 0]] * 2, *[X[..., 0, :4]] * 2, eps=EPS),
        "x is on cpu: the kernels run on a CUDA device",
    ),
    "ids that are no integers": (lambda: cuda_rows.embedding(X[0, 0, 0], X[0, 0]), "must be int64"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    call, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        call()


# ---- GPU ----

PARTS = {one.__name__: one for one in (row_cases.norms, row_cases.together, row_cases.norm_folds, row_cases.gates,
                                       row_cases.ropes, row_cases.lookups, row_cases.logprobs)}  # fmt: skip


@gpu
@pytest.mark.parametrize("part", PARTS)
def test_bits_are_those_of_triton(part: str) -> None:
    wrong = {case.name: found for case in PARTS[part](Draw("cuda")) if (found := case.differing())}
    assert not wrong


def operators(draw: Draw) -> dict[str, tuple[Callable[..., Tensor], list[Tensor], dict[str, Tensor | float]]]:
    """The operator, the tensors with a gradient, first those with a row a token, and the rest; 67 rows."""
    logits, targets = draw(67, 40000) * 4, draw.ids(40000, 67)
    angles = draw(67, 1, 64, dtype=FP32) * 50
    return {
        "rms_norm": (cuda_rows.rms_norm, [draw(67, 4096), draw(4096)], {"eps": EPS}),
        "qk_norm": (cuda_rows.rms_norm, [draw(67, 1, 8, 128), draw(128)], {"eps": EPS}),
        "rope": (cuda_rows.rope, [draw(67, 1, 8, 128)], {"cos": angles.cos(), "sin": angles.sin()}),
        "silu": (cuda_rows.silu, [draw(67, 12288)], {}),
        "swiglu": (cuda_rows.swiglu, [draw(67, 12288), draw(67, 12288)], {}),
        "residual_add": (cuda_rows.residual_add, [draw(67, 4096), draw(67, 4096)], {}),
        "logprob": (cuda_rows.logprob, [logits], {"targets": targets}),
        "batch_invariant_logprob": (cuda_rows.batch_invariant_logprob, [logits], {"targets": targets}),
    }


NAMES = ("rms_norm", "qk_norm", "rope", "silu", "swiglu", "residual_add", "logprob", "batch_invariant_logprob")


def rows_of(one: Tensor | float, part: slice) -> Tensor | float:
    return one[part] if isinstance(one, Tensor) and len(one) == 67 else one


@gpu
@pytest.mark.parametrize("name", NAMES)
def test_a_row_has_its_bits_alone_and_again_and_beside_nan(name: str) -> None:
    draw = Draw("cuda")
    operator, leaves, rest = operators(draw)[name]
    tokens = [one for one in leaves if len(one) == 67]
    dy = draw(*operator(*leaves, **rest).shape, dtype=FP32 if "logprob" in name else BF16)
    whole = gradients(operator, leaves, dy, **rest)[: 1 + len(tokens)]
    again = gradients(operator, leaves, dy, **rest)[: 1 + len(tokens)]
    assert all(same(one, other) for one, other in zip(again, whole, strict=True))
    for part in (slice(0, 1), slice(50, 67), slice(1, 67, 3)):
        few = gradients(operator, [rows_of(one, part) for one in leaves], dy[part],
                        **{key: rows_of(one, part) for key, one in rest.items()})  # fmt: skip
        assert all(same(one, other[part]) for one, other in zip(few[: 1 + len(tokens)], whole, strict=True))
    poisoned = [one.clone() for one in leaves]
    for one in poisoned[: len(tokens)]:
        one[3:40] = float("nan")
    beside = gradients(operator, poisoned, dy, **rest)[: 1 + len(tokens)]
    for part in (slice(0, 3), slice(40, 67)):
        assert all(same(one[part], other[part]) for one, other in zip(beside, whole, strict=True))


@gpu
@pytest.mark.parametrize("name", NAMES)
def test_errors_are_those_of_one_rounding(name: str) -> None:
    draw = Draw("cuda")
    operator, leaves, rest = operators(draw)[name]
    wide = {
        key: one.double() if isinstance(one, Tensor) and one.is_floating_point() else one for key, one in rest.items()
    }
    dy = draw(*operator(*leaves, **rest).shape, dtype=FP32 if "logprob" in name else BF16)
    found = gradients(operator, leaves, dy, **rest)
    gold = gradients(DEFINITIONS[name], [one.double() for one in leaves], dy.double(), **wide)
    for one, other in zip(found, gold, strict=True):
        assert (one - other).norm() / other.norm() < (3e-3 if one.dtype == BF16 else 1e-6)


def norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotated(x: Tensor, *, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    c, s = cos.unsqueeze(2), sin.unsqueeze(2)
    return torch.cat((first * c - second * s, second * c + first * s), -1)


def picked(logits: Tensor, *, targets: Tensor) -> Tensor:
    return torch.log_softmax(logits, -1).gather(-1, targets[:, None])[:, 0]


DEFINITIONS = {
    "rms_norm": norm,
    "qk_norm": norm,
    "rope": rotated,
    "silu": torch.nn.functional.silu,
    "swiglu": lambda gate, up: torch.nn.functional.silu(gate) * up,
    "residual_add": torch.add,
    "logprob": picked,
    "batch_invariant_logprob": picked,
}


@gpu
def test_a_graph_has_the_bits_of_a_launch() -> None:
    draw = Draw("cuda")
    runs = [(operator, leaves, rest, operator(*leaves, **rest)) for operator, leaves, rest in operators(draw).values()]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [operator(*leaves, **rest) for operator, leaves, rest, _ in runs]
    graph.replay()
    assert all(same(one, plain) for one, (*_, plain) in zip(captured, runs, strict=True))


@gpu
def test_a_residual_that_is_read_while_the_product_is_at_work_is_whole() -> None:
    draw = Draw("cuda")
    x, weight, matrix = draw(3, 4096), draw(4096), draw(4096, 4096) / 64

    def stream() -> tuple[Tensor, Tensor]:
        total, normal = x.float(), x
        for _ in range(100):
            product = cuda_gemm.det_gemm(normal, matrix)
            made = cuda_rows.residual_norm(total, product, weight, eps=EPS)
            assert made is not None
            total, normal = made
        return total, normal

    want = stream()
    torch.cuda.synchronize()  # the weights rest
    with cuda_gemm.weights_at_rest():
        assert all(map(same, stream(), want))
