"""What inference does in fewer kernels: the bits, the nodes and the doors are those of the operators one by one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from rlspec.device import observe
from rlspec.device.chain_inference import InferenceDecoder
from rlspec.device.comparing import identical
from rlspec.device.decoder import Decoder, Site, Span
from rlspec.device.kv_cache import ContiguousCache
from rlspec.device.operators import Operators
from tests.device.test_chain_kernels import ordered_products  # noqa: F401
from tests.device.test_chain_model import model
from tests.kernels.interpreted import gpu, interpreted

IDS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


class OneByOne(Decoder):
    """As training calls the operators."""

    of = classmethod(InferenceDecoder.of.__func__)


class Counting(InferenceDecoder):
    """How often each operator was called, and what for."""

    def operate(self, at: Site, name: str, operator: str, *arguments: Any, **options: Any) -> Any:
        self.calls.append((operator, name))
        return super().operate(at, name, operator, *arguments, **options)


def shown(kind: type[Decoder], decoder: Decoder, implementation: str, ids: Tensor = IDS) -> dict[Any, Tensor]:
    """Every node's result, then the logits."""
    made, nodes = kind.of(decoder, Operators(implementation)), {}
    made.calls = []
    with torch.no_grad():
        out = made(ids, capture=lambda node, tensor: nodes.update({node: tensor.clone()}))
    return nodes | {"logits": out.logits, "calls": made.calls}


def same(got: dict[Any, Tensor], want: dict[Any, Tensor]) -> bool:
    assert list(got) == list(want)
    assert [key for key in want if key != "calls" and not identical(got[key].contiguous(), want[key])] == []
    return True


@pytest.mark.parametrize("implementation", ["canonical", "torch"])
def test_projections_of_the_same_rows_are_one_product_where_its_columns_are_apart(implementation: str) -> None:
    decoder = model(layers=2)
    got = shown(Counting, decoder, implementation)
    assert same(got, shown(OneByOne, decoder, implementation))
    products = [name for operator, name in got["calls"] if operator == "det_gemm"]
    assert len(products) == 2 * (4 if implementation == "canonical" else 7)


def test_parameters_that_do_not_lie_side_by_side_are_multiplied_one_by_one() -> None:
    decoder = model(layers=2)
    want = shown(OneByOne, decoder, "canonical")
    moved = decoder.get_submodule("model.layers.1.self_attn.k_proj")
    moved.weight = torch.nn.Parameter(moved.weight.detach().clone())
    got = shown(Counting, decoder, "canonical")
    assert same(got, want) and [operator for operator, _ in got["calls"]].count("det_gemm") == 4 + 6


def test_gradients_flow_where_they_are_asked_for() -> None:
    decoder = model(layers=1)
    made = InferenceDecoder.of(decoder, Operators("canonical"))
    made(IDS).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in decoder.parameters())


def test_a_change_of_one_parameter_is_seen() -> None:
    decoder = model(layers=1)
    before = shown(InferenceDecoder, decoder, "canonical")
    with torch.no_grad():
        decoder.get_parameter("model.layers.0.self_attn.v_proj.weight").mul_(1.25)
    after = shown(InferenceDecoder, decoder, "canonical")
    changed = [
        node.name for node in before if getattr(node, "layer", None) == 0 and not identical(before[node], after[node])
    ]
    assert changed[0] == "self_attn.v_proj" and not {"self_attn.q_proj", "self_attn.k_proj"} & set(changed)


@interpreted
def test_kernels_of_several_operators_give_the_bits_of_each(ordered_products: None) -> None:  # noqa: F811
    decoder = model(layers=2)
    with observe.watch() as seen:
        got = shown(Counting, decoder, "triton")
    assert {"_of_sum", "_rotated"} <= set(seen.triton)
    assert same(got, shown(OneByOne, decoder, "triton"))
    with observe.watch() as seen, seen.call(launches=True):
        shown(OneByOne, decoder, "triton")
    assert not {"_of_sum", "_rotated"} & set(seen.triton)


@interpreted
def test_a_call_that_was_not_foreseen_is_computed(ordered_products: None) -> None:  # noqa: F811
    decoder = model(layers=2)

    def other(kind: type[Decoder]) -> type[Decoder]:
        class Other(kind):
            def operate(self, at: Site, name: str, operator: str, *arguments: Any, **options: Any) -> Any:
                if at.layer == 1 and name in ("input_layernorm", "self_attn.k_norm"):
                    options["eps"] = 1e-3
                return super().operate(at, name, operator, *arguments, **options)

        return Other

    want = shown(other(OneByOne), decoder, "triton")
    assert same(shown(other(InferenceDecoder), decoder, "triton"), want)
    assert not identical(want["logits"], shown(OneByOne, decoder, "triton")["logits"])


# ---- GPU ----


@gpu
@pytest.mark.parametrize("implementation", ["triton", "cuda"])
def test_the_bits_on_a_gpu(implementation: str) -> None:
    decoder = copy.deepcopy(model(layers=2, dtype=torch.bfloat16)).cuda()
    assert same(
        shown(Counting, decoder, implementation, IDS.cuda()), shown(OneByOne, decoder, implementation, IDS.cuda())
    )


@gpu
@pytest.mark.parametrize("implementation", ["triton", "cuda"])
def test_a_step_between_two_calls_is_seen_whole(implementation: str) -> None:
    decoder, ids = copy.deepcopy(model(layers=2, dtype=torch.bfloat16)).cuda(), IDS[:, :1].cuda()
    made, plain = (kind.of(decoder, Operators(implementation)) for kind in (InferenceDecoder, OneByOne))
    with torch.no_grad():
        for turn in range(50):
            for parameter in decoder.parameters():
                parameter.mul_(1.25 if turn % 2 else 0.75)
            assert identical(made(ids).logits, plain(ids).logits)


@gpu
@pytest.mark.parametrize("implementation", ["triton", "cuda"])
def test_a_graph_of_a_token_gives_the_bits_of_a_call(implementation: str) -> None:
    decoder = copy.deepcopy(model(layers=2, dtype=torch.bfloat16)).cuda()
    made, ids = InferenceDecoder.of(decoder, Operators(implementation)), IDS[:1].cuda()
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda", "backend": implementation}
    caches = [ContiguousCache(made.architecture, samples=1, positions=6, **options) for _ in range(2)]
    with torch.no_grad():
        for cache in caches:
            cache.open(0)
            made(ids, cache=cache)
        want = made(ids[:, :1], cache=caches[0]).logits

        class Held:
            segments = caches[1].begin([Span(0, 0, 1)], 1)
            extend = staticmethod(caches[1].extend)

            def begin(self, spans: Any, width: int) -> Any:
                caches[1]._next = 0
                return self.segments

        side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            made(ids[:, :1], cache=Held())
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            got = made(ids[:, :1], cache=Held()).logits
    for _ in range(2):
        got.fill_(float("nan"))
        graph.replay()
        assert identical(got, want)
