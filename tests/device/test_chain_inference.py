"""What inference does in fewer kernels: the bits, the nodes and the doors are those of the operators one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rlspec.device import cuda_gemm, observe
from rlspec.device.chain_inference import InferenceDecoder
from rlspec.device.comparing import identical
from rlspec.device.decoder import Decoder, Site, Span
from rlspec.device.kv_cache import ContiguousCache, PagedCache
from rlspec.device.operators import Operators, Segments
from rlspec.kernels import attention, det_gemm, swiglu
from tests.device.test_chain_kernels import ordered_products  # noqa: F401
from tests.device.test_chain_model import model
from tests.kernels.interpreted import gpu, interpreted

IDS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


class Lost(ContiguousCache):
    """Stores zeros for the values of layer 0."""

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        super().write(layer, keys, values if layer else values * 0)


class Moved(ContiguousCache):
    """Writes all keys and values when they are asked for."""

    def _grid(self, store: Tensor) -> Tensor:
        return super()._grid(store.mul_(1))


class Late(InferenceDecoder):
    """Writes keys just before attention reads them."""

    def operate(self, at: Site, name: str, operator: str, *arguments: Any, **options: Any) -> Any:
        if operator == "attention":
            arguments[1].mul_(1)
        return super().operate(at, name, operator, *arguments, **options)


class OneByOne(Decoder):
    """As training calls the operators."""

    of = classmethod(InferenceDecoder.of.__func__)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the products that are computed, as they are."""
    names, operate = [], Decoder.operate

    def counting(self: Decoder, at: Site, name: str, operator: str, *arguments: Any, **options: Any) -> Any:
        names.extend([name] * (operator == "det_gemm"))
        return operate(self, at, name, operator, *arguments, **options)

    monkeypatch.setattr(Decoder, "operate", counting)
    return names


def shown(
    kind: type[Decoder], decoder: Decoder, implementation: str | Operators, ids: Tensor = IDS
) -> dict[Any, Tensor]:
    """Every node's result, then the logits."""
    operators = implementation if isinstance(implementation, Operators) else Operators(implementation)
    made, nodes = kind.of(decoder, operators), {}
    with torch.no_grad():
        out = made(ids, capture=lambda node, tensor: nodes.update({node: tensor.clone()}))
    return nodes | {"logits": out.logits}


def stepped(
    kind: type[Decoder], decoder: Decoder, implementation: str, cache: type[Any] = ContiguousCache, ids: Tensor = IDS
) -> dict[Any, Tensor]:
    """Every node's result in two calls through a cache, the second of one token, and what the cache holds then."""
    made, found = kind.of(decoder, Operators(implementation)), {}
    room: dict[str, Any] = {"pages": 8, "page_size": 2} if cache is PagedCache else {"samples": 2, "positions": 8}
    options = {"dtype": decoder.dtype, "device": ids.device, "backend": implementation}
    held = cache(made.architecture, **room, **options)
    held.open(0, 1)
    spans = [Span(0, 0, 5), Span(1, 1, 4)]
    with torch.no_grad():
        for step, (tokens, places) in enumerate(((ids, spans), (ids[:, :1], [Span(0, 0, 1), Span(1, 0, 1)]))):
            made(
                tokens,
                spans=places,
                cache=held.of(0, 1),
                capture=lambda node, tensor, step=step: found.update({(step, node): _of(places, tensor)}),  # noqa: B023
            )
    assert held.lengths == {0: 6, 1: 5} and held.strays() == 0
    return found | {"keys": held.keys.nan_to_num(7), "values": held.values.nan_to_num(7)}


def _of(spans: list[Span], grid: Tensor) -> Tensor:
    return torch.cat([grid[row, start : start + length] for row, start, length in spans])


def same(got: dict[Any, Tensor], want: dict[Any, Tensor]) -> bool:
    assert list(got) == list(want)
    assert [key for key in want if not identical(got[key].contiguous(), want[key])] == []
    return True


def on_gpu(decoder: Decoder) -> Decoder:
    """On a GPU, with parameters that lie side by side as they do here."""
    made = Decoder(
        decoder.architecture, decoder.operators, dtype=decoder.dtype, master_dtype=decoder.dtype, device="cuda"
    )
    made.load_state_dict(decoder.state_dict())
    return made.requires_grad_(False)


@pytest.mark.parametrize("implementation", ["canonical", "torch"])
def test_projections_of_the_same_rows_are_one_product_where_its_columns_are_apart(
    implementation: str, products: list[str]
) -> None:
    decoder = model(layers=2)
    got = shown(InferenceDecoder, decoder, implementation)
    assert len(products) == 2 * (4 if implementation == "canonical" else 7)
    assert same(got, shown(OneByOne, decoder, implementation))


def test_parameters_that_do_not_lie_side_by_side_are_multiplied_one_by_one(products: list[str]) -> None:
    decoder = model(layers=2)
    moved = decoder.get_submodule("model.layers.1.self_attn.k_proj")
    moved.weight = torch.nn.Parameter(moved.weight.detach().clone())
    got = shown(InferenceDecoder, decoder, "canonical")
    assert len(products) == 4 + 6
    assert same(got, shown(OneByOne, decoder, "canonical"))


def other(kind: type[Decoder], change: str) -> type[Decoder]:
    """A decoder with a fault at one door."""

    class Other(kind):
        def operate(self, at: Site, name: str, operator: str, *arguments: Any, **options: Any) -> Any:
            if at.layer == 1 and name in ("input_layernorm", "self_attn.k_norm") and change == "option":
                options["eps"] = 1e-3
            made = super().operate(at, name, operator, *arguments, **options)
            if at.layer == 0 and name == change:
                return made.mul_(1.5) if name.endswith(("residual", "up_proj")) else made * 1.5
            if at.layer == 0 and (name, change) == ("self_attn.k_rope", "in place"):
                made.mul_(1.5)
            return made

        def weight(self, name: str) -> Tensor:
            made = super().weight(name)
            return made * 2 if change == "weight" and name.endswith("0.mlp.up_proj.weight") else made

    return Other


@pytest.mark.parametrize("change", ["self_attn.k_proj", "mlp.up_proj", "self_attn.residual", "weight"])
def test_a_fault_at_any_door_has_its_effect(change: str) -> None:
    decoder = model(layers=2)
    want = shown(other(OneByOne, change), decoder, "canonical")
    assert same(shown(other(InferenceDecoder, change), decoder, "canonical"), want)
    assert not identical(want["logits"], shown(OneByOne, decoder, "canonical")["logits"])


def test_an_operator_that_was_put_in_its_place_is_called_each_time(products: list[str]) -> None:
    operators, calls = Operators("canonical"), []
    whole = operators.det_gemm
    operators.det_gemm = lambda *arguments: calls.append(1) or whole(*arguments)
    shown(InferenceDecoder, model(layers=2), operators)
    assert len(calls) == len(products) == 2 * 7


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
        got = shown(InferenceDecoder, decoder, "triton")
    assert {"_of_sum", "_rotated"} <= set(seen.triton)
    assert same(got, shown(OneByOne, decoder, "triton"))
    with observe.watch() as seen, seen.call(launches=True):
        shown(OneByOne, decoder, "triton")
    assert not {"_of_sum", "_rotated"} & set(seen.triton)


@pytest.fixture
def gated_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted kernels are right for fp32 alone, which tensor memory access would not be asked for."""
    monkeypatch.setattr(det_gemm, "_through_tma", lambda *tensors: all(map(det_gemm._suits, tensors)))


@interpreted
def test_gate_up_and_swiglu_are_one_kernel(
    ordered_products: None,  # noqa: F811
    gated_in_fp32: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder, launches, launch = model(layers=2), [], swiglu._launch
    monkeypatch.setattr(swiglu, "_launch", lambda *arguments: launches.append(1) or launch(*arguments))
    with observe.watch() as seen:
        got = shown(InferenceDecoder, decoder, "triton")
    assert det_gemm.GATED in seen.triton and not launches
    assert same(got, shown(OneByOne, decoder, "triton")) and len(launches) == 2


@pytest.mark.parametrize("cache", [ContiguousCache, PagedCache])
@interpreted
def test_keys_and_values_are_stored_where_they_are_made(ordered_products: None, cache: type[Any]) -> None:  # noqa: F811
    decoder = model(layers=2)
    with observe.watch() as seen, seen.call(launches=True):
        got = stepped(InferenceDecoder, decoder, "triton", cache)
    assert "_rotated" in seen.triton and "_write" not in seen.triton
    with observe.watch() as seen, seen.call(launches=True):
        want = stepped(OneByOne, decoder, "triton", cache)
    assert "_write" in seen.triton and same(got, want)


@pytest.mark.parametrize("much", [False, True])
@interpreted
def test_all_weights_rest_but_that_of_o_where_much_is_read_ahead(monkeypatch: pytest.MonkeyPatch, much: bool) -> None:
    decoder, rests, forward = model(layers=1), [], det_gemm._forward

    def told(*arguments: Any) -> Tensor:
        rests.append(det_gemm._AT_REST.get())
        return forward(*arguments)

    monkeypatch.setattr(det_gemm, "_forward", told)
    assert cuda_gemm.MUCH_AHEAD and not det_gemm.MUCH_AHEAD
    monkeypatch.setattr(det_gemm, "MUCH_AHEAD", much)
    shown(InferenceDecoder, decoder, "triton", IDS[:, :1])
    assert rests == [True, not much, True, True, True]  # q, k and v; o; gate and up; down; the head
    rests.clear()
    shown(OneByOne, decoder, "triton", IDS[:, :1])
    assert rests == [False] * 8


@interpreted
def test_attention_reads_ahead_what_earlier_calls_left_in_a_cache(
    ordered_products: None,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder, rests, forward = model(layers=1), [], attention._forward

    def told(*arguments: Any, **options: Any) -> Any:
        rests.append(attention._AT_REST.get())
        return forward(*arguments, **options)

    monkeypatch.setattr(attention, "_forward", told)
    stepped(InferenceDecoder, decoder, "triton")
    assert rests == [True] * 2 and not attention._AT_REST.get()
    rests.clear()
    stepped(InferenceDecoder, decoder, "triton", PagedCache)  # gathers pages in the call
    shown(InferenceDecoder, decoder, "triton")
    stepped(InferenceDecoder, decoder, "triton", Lost)
    stepped(InferenceDecoder, decoder, "triton", Moved)
    stepped(Late, decoder, "triton")
    stepped(OneByOne, decoder, "triton")
    assert rests == [False] * (2 + 1 + 4 * 2)
    monkeypatch.setattr(Segments, "keys_are_shared", True)
    stepped(InferenceDecoder, decoder, "triton")
    assert rests == [False] * (2 + 1 + 5 * 2)


@pytest.mark.parametrize("change", ["self_attn.k_norm", "self_attn.k_rope", "self_attn.v_proj", "in place", "cache"])
@interpreted
def test_what_is_changed_on_its_way_into_the_cache_is_stored_changed(ordered_products: None, change: str) -> None:  # noqa: F811
    decoder, cache = model(layers=1), Lost if change == "cache" else ContiguousCache
    want = stepped(other(OneByOne, change), decoder, "triton", cache)
    assert same(stepped(other(InferenceDecoder, change), decoder, "triton", cache), want)
    right = stepped(OneByOne, decoder, "triton")
    assert not identical(want["keys"], right["keys"]) or not identical(want["values"], right["values"])


@interpreted
def test_an_attention_that_does_not_store_leaves_nothing_behind(ordered_products: None) -> None:  # noqa: F811
    def of(kind: type[Decoder]) -> type[Decoder]:
        class Doubled(kind):
            def attend(self, sites: Any, parts: Any, cache: Any) -> Any:
                return super().attend(sites, [(query, key * 2, value) for query, key, value in parts], cache)

        return Doubled

    decoder = model(layers=1)
    want = stepped(of(OneByOne), decoder, "triton")
    assert same(stepped(of(InferenceDecoder), decoder, "triton"), want)


@interpreted
def test_a_call_that_was_not_foreseen_is_computed(ordered_products: None, gated_in_fp32: None) -> None:  # noqa: F811
    decoder = model(layers=2)
    right = shown(OneByOne, decoder, "triton")["logits"]
    # Of other projections: `test_a_fault_at_any_door_has_its_effect`.
    for change in ("option", "self_attn.residual", "mlp.gate_proj", "mlp.up_proj"):
        want = shown(other(OneByOne, change), decoder, "triton")
        assert same(shown(other(InferenceDecoder, change), decoder, "triton"), want)
        assert not identical(want["logits"], right)


# ---- GPU ----


@gpu
@pytest.mark.parametrize("implementation", ["triton", "cuda"])
def test_the_bits_on_a_gpu(implementation: str, products: list[str]) -> None:
    decoder = on_gpu(model(layers=2, dtype=torch.bfloat16))
    got = shown(InferenceDecoder, decoder, implementation, IDS.cuda())
    assert len(products) == 2 * (4 if implementation == "cuda" else 3)  # 10 rows: more than gate and up at once take
    assert same(got, shown(OneByOne, decoder, implementation, IDS.cuda()))


@gpu
@pytest.mark.parametrize("implementation", ["triton", "cuda"])
def test_few_rows_on_a_gpu_have_gate_up_and_swiglu_in_one_kernel(implementation: str, products: list[str]) -> None:
    decoder, ids = on_gpu(model(layers=2, dtype=torch.bfloat16)), IDS[:, :4].cuda()
    with observe.watch() as seen:
        got = shown(InferenceDecoder, decoder, implementation, ids)
    assert len(products) == 2 * 3 and {det_gemm.GATED, cuda_gemm.GATED} & {*seen.triton, *seen.native}
    assert same(got, shown(OneByOne, decoder, implementation, ids))
    for change in ("mlp.gate_proj", "mlp.up_proj", "weight"):
        want = shown(other(OneByOne, change), decoder, implementation, ids)
        assert same(shown(other(InferenceDecoder, change), decoder, implementation, ids), want)


@gpu
@pytest.mark.parametrize("implementation", ["triton", "cuda"])
def test_a_step_between_two_calls_is_seen_whole(implementation: str) -> None:
    decoder, ids = on_gpu(model(layers=2, dtype=torch.bfloat16)), IDS[:, :1].cuda()
    made, plain = (kind.of(decoder, Operators(implementation)) for kind in (InferenceDecoder, OneByOne))
    with torch.no_grad():
        for turn in range(50):
            for parameter in decoder.parameters():
                parameter.mul_(1.25 if turn % 2 else 0.75)
            assert identical(made(ids).logits, plain(ids).logits)


@gpu
@pytest.mark.parametrize("implementation", ["triton", "cuda"])
def test_a_graph_of_a_token_gives_the_bits_of_a_call(implementation: str) -> None:
    decoder = on_gpu(model(layers=2, dtype=torch.bfloat16))
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


@gpu
@pytest.mark.parametrize("cache", [ContiguousCache, PagedCache])
@pytest.mark.parametrize("implementation", ["triton", "cuda"])
def test_keys_and_values_are_stored_where_they_are_made_on_a_gpu(implementation: str, cache: type[Any]) -> None:
    decoder = on_gpu(model(layers=2, dtype=torch.bfloat16))
    want = stepped(OneByOne, decoder, implementation, cache, IDS.cuda())
    with observe.watch() as seen:
        assert same(stepped(InferenceDecoder, decoder, implementation, cache, IDS.cuda()), want)
    assert not {"_write", "kv_cache_write"} & {*seen.triton, *seen.native}
