"""A decoder that is trained: its backward hands the rows of every weight to a `Ledger`, and parameters get no `.grad`.

Weights. Each use of a weight takes it without a graph. If its operator owns the weight's gradient, a hook on the result
hands over the operator's input and the gradient that arrives; if not, the use gets a leaf of its own, whose gradient
is added to an fp32 sum and forgotten. Either way a call leaves nothing behind but the sums.

Attention. One autograd function a layer over all chunks: forward in each chunk, backward once a sample on whole
sequences, put together from the chunks. If the operator does not offer that, autograd goes back chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from rlspec.device.autograd import accumulate
from rlspec.device.chain_gradients import Ledger, Use
from rlspec.device.decoder import Cache, Decoder, Site, Span, check_result
from rlspec.device.execution import NoBackward
from rlspec.device.gradients import Identity, WeightGradient
from rlspec.device.operators import Operators, Routing, Segment, Segments

# Operators whose second argument is a parameter: of rows as the call has them, and of a mixture of experts.
ROWS = ("embedding", "rms_norm", "qk_norm", "det_gemm", "lm_head")
ROUTED = ("router", "grouped_gemm")

Self = TypeVar("Self", bound="TrainingDecoder")
Samples = Sequence[tuple[Span, Segments]]
"""Where each sample of a call stands, and its queries and keys when it is alone."""


class TrainingDecoder(Decoder):
    """See the module. `begin` comes before each forward; each forward is followed by its backward, if `backward`.

    Doors to override: those of `Decoder`, and `attention_forward` and `attention_backward`. With `recompute` an
    operator that owns nothing keeps its arguments alone, of a weight the parameter that it comes from, and runs again
    on the way back.
    """

    ledger: Ledger
    recompute: bool
    backward: bool = True  # whether one follows, so that an operator without one must not be
    samples: Samples
    stored: torch.dtype

    @classmethod
    def of(
        cls: type[Self],
        decoder: Decoder,
        operators: Operators,
        *,
        dtype: torch.dtype | None = None,
        recompute: bool = False,
    ) -> Self:
        """On the parameters and in the profile of `decoder`, with working dtype `dtype` if that is to be another."""
        made = cls(decoder.architecture, operators, dtype=dtype or decoder.dtype, device="meta")
        made.profile, made.stored, made.recompute = decoder.profile, decoder.dtype, recompute
        for name, parameter in decoder.named_parameters():
            path, _, last = name.rpartition(".")
            made.get_submodule(path).register_parameter(last, parameter)
        return made

    def begin(self, ledger: Ledger, chunks: Sequence[Identity], spans: Sequence[Span]) -> None:
        """Before each call: where its gradients go, which rows its chunks have, where its samples stand."""
        ledger.begin(chunks)
        self.ledger = ledger
        # Once for all layers: the table in the segments is a copy to the device, for which the host waits.
        device, lengths = next(self.parameters()).device, {span.length for span in spans}
        alone = {n: Segments((Segment(0, 0, n, 0, n),), 1, n, n, device) for n in lengths}
        self.samples = [(span, alone[span.length]) for span in spans]

    def weight(self, name: str) -> Tensor:
        """A parameter as the decoder that it is of works with it, in this one's working dtype; without a graph."""
        return self.get_parameter(name).detach().to(self.stored).to(self.dtype)

    def operate(self, at: Site, name: str, operator: str, *arguments: Any, **options: Any) -> Any:
        call = partial(super().operate, at, name, operator, **options)
        if operator not in ROWS + ROUTED:
            found = _recomputed(call, arguments) if self.recompute else call(*arguments)
            return self._flowing(at, name, operator, found, arguments)
        promise = getattr(getattr(self.operators, operator), "weight_gradient", None)
        if promise is None:
            return self._by_autograd(self._use(at, name), call, *arguments)
        if operator == "router":
            return self._routed(at, self._use(at, name), call(*arguments), arguments, options, promise)
        if operator == "grouped_gemm":
            return self._grouped(at, self._use(at, name), call(*arguments), arguments, promise)
        x, weight = arguments
        known = {"lengths": self.ledger.lengths} | {key: options[key] for key in ("eps",) if key in options}
        return self._owned(at, self._use(at, name), call(x, weight), x, partial(promise, weight, **known))

    def attend(
        self, sites: Sequence[Site], parts: Sequence[tuple[Tensor, Tensor, Tensor]], cache: Cache | None
    ) -> list[Tensor]:
        """Backward once a sample, if the operator offers it; else autograd goes back chunk by chunk."""
        operator = self.operators.attention
        if not (hasattr(operator, "forward") and hasattr(operator, "backward")):
            return super().attend(sites, parts, cache)
        found = _Attention.apply(self, sites, self.samples, *(x for part in parts for x in part))
        for at, out in zip(sites, found, strict=True):
            at.show("self_attn", "attention", out)
        return list(found)

    def _flowing(self, at: Site, name: str, operator: str, found: Any, arguments: Sequence[Any]) -> Any:
        """The result, which passes a gradient on where an argument takes one; else the operators before it starve."""
        due = self.backward and torch.is_grad_enabled() and isinstance(found, Tensor) and not found.requires_grad
        if due and any(isinstance(one, Tensor) and one.requires_grad for one in arguments):
            raise NoBackward(f"{at.named(name, operator)}: no gradient flows through it")
        return found

    def attention_forward(self, at: Site, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """A chunk's queries [B, T, Hq, D] and all keys up to its end -> out and log-sum-exp [B, T, Hq]."""
        operator: Any = self.operators.attention
        try:
            found = operator.forward(query, key, value, at.chunk.segments, scale=self._scale)
            if not (isinstance(found, tuple) and len(found) == 2):
                pair = "attention.forward gives a pair, out and log-sum-exp"
                raise ValueError(f"{pair}, and here a {type(found).__name__}")
            if ":" in self.operators.implementations["attention"]:
                check_result("attention", found[0], (query,), {})
        except Exception as error:
            at.blame("self_attn", "attention", error)
            raise
        return found

    def attention_backward(self, at: Site, *saved: Tensor, segments: Segments) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key, value, out, log-sum-exp and the gradient of out of one whole sample -> dq, dk, dv."""
        operator: Any = self.operators.attention
        return operator.backward(*saved, segments, scale=self._scale)  # type: ignore[no-any-return]

    @property
    def _scale(self) -> float:
        return self.architecture.head_dim**-0.5

    def _use(self, at: Site, name: str) -> Use:
        full = name if at.layer is None else f"model.layers.{at.layer}.{name}"
        full += "" if name.startswith("mlp.experts.") else ".weight"
        tied = full == "lm_head.weight" and self.architecture.tie_word_embeddings
        return Use("model.embed_tokens.weight" if tied else full, full)

    def _owned(self, at: Site, use: Use, out: Tensor, x: Tensor, make: Callable[[], WeightGradient]) -> Tensor:
        if not x.is_floating_point():
            out = out.detach().requires_grad_()  # nothing is behind an embedding
        if not out.requires_grad:
            if not self.backward:
                return out
            raise NoBackward(f"{use.name}: no gradient flows through its operator")
        held = [(x.detach(), make)]

        def hand(dy: Tensor) -> None:
            x, make = held.pop()  # so that neither is kept until the whole graph goes
            self.ledger.hand(use, make, at.chunk.index, x, dy)

        out.register_hook(hand)
        return out

    def _routed(
        self, at: Site, use: Use, found: Routing, arguments: Sequence[Any], options: dict[str, Any], promise: Any
    ) -> Routing:
        x, weight = arguments
        grid, choice = _grid(at), options.get("choice")
        named = {key: value for key, value in options.items() if key != "choice"}
        make = partial(promise, weight, lengths=self.ledger.lengths, **named)

        def hand(dy: Tensor, dweights: Tensor) -> None:
            more = {"dweights": dweights} | ({} if choice is None else {"choice": choice})
            rows = {key: one.unflatten(0, grid) for key, one in more.items()}
            self.ledger.hand(use, make, at.chunk.index, x.detach().unflatten(0, grid), dy.unflatten(0, grid), **rows)

        return found._replace(**dict(zip(Routing._fields, _Handed.apply(hand, *found[:2]), strict=False)))

    def _grouped(self, at: Site, use: Use, out: Tensor, arguments: Sequence[Any], promise: Any) -> Tensor:
        x, weight, dispatch = arguments
        make = partial(promise, weight, lengths=self.ledger.lengths)
        slots = (*_grid(at), dispatch.top_k)

        def hand(dy: Tensor) -> None:
            placed = (rows.index_select(0, dispatch.inverse).unflatten(0, slots) for rows in (x.detach(), dy))
            self.ledger.hand(use, make, at.chunk.index, *placed, experts=dispatch.experts.view(slots))

        return _Handed.apply(hand, out)[0]  # type: ignore[no-any-return]

    def _by_autograd(self, use: Use, call: Callable[..., Any], x: Tensor, weight: Tensor, *others: Any) -> Any:
        def run(fetch: Callable[[], Tensor], x: Tensor, *others: Any) -> Any:
            leaf = fetch().detach().requires_grad_()
            leaf.register_post_accumulate_grad_hook(partial(self.ledger.take, use))
            return call(x, leaf, *others)

        if self.recompute:
            return _recomputed(partial(run, partial(self.weight, use.parameter)), (x, *others))
        return run(lambda: weight, x, *others)


class _Attention(Function):
    """Query, key and value of every chunk of a layer -> out of every chunk; on the way back one sample at a time."""

    @staticmethod
    def forward(ctx: Any, decoder: TrainingDecoder, sites: Sequence[Site], samples: Samples, *parts: Tensor) -> Any:
        query, key, value = (_columns(parts[slot::3]) for slot in range(3))
        found = []
        for at, chunk_query in zip(sites, parts[0::3], strict=True):
            stop = at.chunk.stop
            found.append(decoder.attention_forward(at, chunk_query, key[:, :stop], value[:, :stop]))
        outs, sums = zip(*found, strict=True)
        ctx.save_for_backward(query, key, value, _columns(outs), _columns(sums))
        ctx.decoder, ctx.sites, ctx.samples = decoder, sites, samples
        return outs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
        whole = (*ctx.saved_tensors, _columns(upstream))
        totals = [torch.zeros_like(x) for x in whole[:3]]
        for (row, start, length), alone in ctx.samples:
            place = slice(row, row + 1), slice(start, start + length)
            found = ctx.decoder.attention_backward(ctx.sites[0], *(x[place] for x in whole), segments=alone)
            for total, part in zip(totals, found, strict=True):
                total[place] = part
        columns = [slice(at.chunk.start, at.chunk.stop) for at in ctx.sites]
        return None, None, None, *(total[:, chunk] for chunk in columns for total in totals)


class _Recomputed(Function):
    """compute(*arguments) again on the way back, so that the graph keeps the arguments and nothing in between."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[..., Any], anchor: Tensor, *arguments: Any) -> Any:
        tensors = [one for one in arguments if isinstance(one, Tensor)]
        ctx.save_for_backward(*tensors)
        ctx.compute, ctx.rest = compute, [None if isinstance(one, Tensor) else one for one in arguments]
        ctx.tensors = [index for index, one in enumerate(arguments) if isinstance(one, Tensor)]
        out = compute(*arguments)
        if not isinstance(out, Tensor):
            ctx.mark_non_differentiable(*(one for one in out if not one.is_floating_point()))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
        arguments = list(ctx.rest)
        for index, tensor in zip(ctx.tensors, ctx.saved_tensors, strict=True):
            arguments[index] = tensor.detach().requires_grad_(ctx.needs_input_grad[2 + index])
        with torch.enable_grad():
            found = ctx.compute(*arguments)
        outs = (found,) if isinstance(found, Tensor) else found
        pairs = [(out, dy) for out, dy in zip(outs, upstream, strict=True) if out.requires_grad]
        if not pairs:
            raise NoBackward("no gradient flows through an operator that is computed again")
        accumulate(*zip(*pairs, strict=True))
        return None, None, *(one.grad if isinstance(one, Tensor) else None for one in arguments)


def _recomputed(compute: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    anchor = torch.empty(0, requires_grad=True)  # an embedding's ids ask for no gradient
    out = _Recomputed.apply(compute, anchor, *arguments)
    return out if isinstance(out, Tensor) else Routing(*out)


class _Handed(Function):
    """The tensors as they are; on the way back their gradients are handed over together, zeros where none arrives."""

    @staticmethod
    def forward(ctx: Any, hand: Callable[..., None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.hand = hand
        return tuple(one.view_as(one) for one in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        ctx.hand(*upstream)
        return None, *upstream


def _grid(at: Site) -> tuple[int, int]:
    return at.chunk.segments.rows, at.chunk.stop - at.chunk.start


def _columns(chunks: Sequence[Tensor]) -> Tensor:
    return chunks[0] if len(chunks) == 1 else torch.cat(list(chunks), 1)
