"""How an operator behaves between calls, which one call at a time, whose results are copied at once, does not show.

Few calls of a tier of its own, once a form of an operator: three of one size with other content, one of more rows than
kernels for few rows take, one of a single row. Raises ValueError unless

- inputs, upstream gradients and what `forward` gave stay as they are, in calls of few rows too;
- autograd through the call has the bits of `backward`, and gradients of inputs are the same where the weight has one;
- a weight that changed in place is read again, by the forward, the gradient of inputs and that of the weight;
- a result lies in no memory of an earlier one, as long as that is held;
- results and gradients stay as they are while other calls run, whatever runs before a backward: forward, forward,
  backward, backward, and weight gradients that are summed at the same time;
- the backward takes an expanded upstream gradient, as that of `y.sum()`: all of its strides are 0.

An operator that is not repeatable by itself is left to the comparisons of layouts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from rlspec import layouts
from rlspec.architecture import Architecture
from rlspec.device import cases, comparing, gradients, grids
from rlspec.device.autograd import differentiate
from rlspec.device.cases import Tensors
from rlspec.device.execution import ALONE, NoBackward, Results, Subject, handed_over, overlap, run
from rlspec.device.observe import Seen
from rlspec.device.operators import Segments
from rlspec.layouts import Call, Layout
from rlspec.nodes import NODES, Node
from rlspec.workloads import Sample, Workload

FEW, MANY, KEYS = 5, 17, 9  # rows of a call; keys of the one query that is decoded
_ALIKE = ("first", "second", "third")  # neither what was kept last nor what was kept first is that of the second
_WEIGHTED = (0, 1)  # calls with weight gradients of their own, each as large as the weight

Near = Callable[[str, Tensor, Tensor], str | None]
"""near(name, got, want): why a gradient is not another one's within the row of the contract, or None."""


def small(one: Subject, workload: Workload, model: Architecture, dtype: torch.dtype) -> Subject:
    """The same operator with the same weights on few tokens."""
    decode = KEYS - 1 if NODES[one.case.operator].of_keys else 0
    samples = (
        *(Sample(id=name, length=FEW, prompt=0) for name in _ALIKE),
        Sample(id="many", length=MANY, prompt=0),
        Sample(id="single", length=decode + 1, prompt=0, first=decode),
    )
    tier = replace(one.tier, samples=samples, company=(), layouts=())
    upstream = {
        name: cases.upstream(out.shape[1:], tier, workload, out.dtype, one.device, index)
        for index, (name, out) in enumerate(one.like.items())
        if out.is_floating_point()
    }
    tables = cases.logical(one.case, tier, workload, model, dtype, one.device)
    return replace(one, tier=tier, tables=tables, upstream=upstream)


def alone(one: Subject) -> Layout:
    """Each sample in a call of its own."""
    calls = tuple(layouts.alone(index, sample) for index, sample in enumerate(one.tier.samples))
    return Layout(name=ALONE, calls=calls)


def called(operator: Callable[..., Any]) -> Callable[..., Any]:
    """The operator without what else it promises: autograd runs through the call."""
    return lambda *arguments, **options: operator(*arguments, **options)


def check(one: Subject, seen: Seen, *, backward: bool, both: bool, near: Near) -> str | None:
    """Of a `small` subject, all that the head of the module says.

    Gives where a forward with gradients first differs from one without, in a sentence.
    Raises ValueError, NoBackward where no gradient flows through the call, and whatever the operator raises.
    """
    node, layout = NODES[one.case.operator], alone(one)
    found = run(one, layout, seen, backward=backward, both=both)
    if one.weights:
        with doubled(one.weights):
            other = run(one, layout, seen, backward=backward, both=both)
        for index, sample in enumerate(one.tier.samples):
            reads_weights(node, *(_of_sample(each, one, index) for each in (found, other)), f"{sample.queries} tokens")
    calls = _Calls(one, layout, seen, backward, both)
    unlike = calls.apart_and_together(found)
    if backward:
        calls.summed(near)
    return found.apart or unlike


def promises(one: Subject) -> bool:
    """Whether there is a gradient beside that of autograd."""
    return any(hasattr(one.operator, name) for name in ("backward", "weight_gradient"))


def same_by_autograd(found: Results, bare: Results, place: str) -> None:
    """Gradients of tokens; a weight's is summed in another order there, and compared by the row of the contract."""
    for name, gradient in found.gradients.items():
        if name not in found.accumulated_by:
            _as_promised(name, bare.gradients[name], gradient, place)


def _as_promised(name: str, got: Tensor, want: Tensor, place: str) -> None:
    if comparing.identical(got, want):
        return
    count = int((comparing.bits(got) != comparing.bits(want)).sum())
    raise ValueError(
        f"autograd through the call, for all of its gradients, gives another {name} than the operator promises: "
        f"{count:,} of {want.numel():,} elements ({place})"
    )


# Weights that change in place


class doubled:
    """Inside, the weights hold twice their values, at the same addresses."""

    def __init__(self, weights: Tensors) -> None:
        self.weights = weights

    def __enter__(self) -> None:
        for weight in self.weights.values():
            weight.mul_(2)

    def __exit__(self, *_: object) -> None:
        for weight in self.weights.values():
            weight.div_(2)


def reads_weights(node: Node, before: Results, after: Results, place: str) -> None:
    """Of the same calls before and after the weight was doubled in place."""
    said = "with the weight doubled in place"
    if all(comparing.identical(out, before.outputs[name]) for name, out in after.outputs.items()):
        raise ValueError(f"{said}, the result is what it was: is one kept? ({place})")
    for name, out in after.outputs.items():
        if node.linear and not _twice(out, before.outputs[name]):
            raise ValueError(f"{said}, {name} is not twice what it was: is one kept? ({place})")
    for name, gradient in after.gradients.items():
        old = before.gradients[name]
        if name.removeprefix("d") in node.parameters and node.linear:
            continue  # it does not depend on the weight
        if old.any() and comparing.identical(gradient, old):
            raise ValueError(f"{said}, {name} is what it was: is one kept? ({place})")
        if node.linear and not _twice(gradient, old):
            raise ValueError(f"{said}, {name} is not twice what it was: is one kept? ({place})")


def _twice(new: Tensor, old: Tensor) -> bool:
    """Where the old one is no subnormal number, which was rounded more coarsely."""
    normal = old.abs() > torch.finfo(old.dtype).tiny
    return torch.equal(torch.where(normal, new, 0), torch.where(normal, old * 2, 0))


def _of_sample(found: Results, one: Subject, index: int) -> Results:
    """The part of one sample; weight gradients are of all."""
    node = NODES[one.case.operator]

    def part(name: str, x: Tensor) -> Tensor:
        if name.removeprefix("d") in node.parameters:
            return x
        keys = name.removeprefix("d") in node.of_keys
        lengths = [sample.length if keys else sample.queries for sample in one.tier.samples]
        return x[sum(lengths[:index]) : sum(lengths[: index + 1])]

    outputs, found_gradients = (
        {name: part(name, x) for name, x in each.items()} for each in (found.outputs, found.gradients)
    )
    return Results(outputs=outputs, gradients=found_gradients)


# Calls whose results are kept


@dataclass
class _State:
    """One call: what it was given and, by name, what came of it so far."""

    call: Call
    tokens: Tensors
    segments: Segments
    upstream: Tensors
    weighted: bool
    leaves: Tensors = field(default_factory=dict)
    outputs: Tensors = field(default_factory=dict)
    saved: tuple[Tensor, Tensor] | None = None
    found: dict[str, Tensor] = field(default_factory=dict)


_Found = list[dict[str, Tensor]]  # by call and name


class _Calls:
    def __init__(self, one: Subject, layout: Layout, seen: Seen, backward: bool, both: bool) -> None:
        self.one, self.layout, self.seen, self.backward = one, layout, seen, backward
        self.plain = both or not backward
        self.node, self.operator = NODES[one.case.operator], one.operator
        self.owned = getattr(one.operator, "weight_gradient", None) if self.node.parameters and backward else None
        self.halves = backward and hasattr(one.operator, "forward") and hasattr(one.operator, "backward")
        self.held: list[Tensor] = []  # all results, so that what an operator gives in turn comes round

    def apart_and_together(self, found: Results) -> str | None:
        """What differs must differ twice alike, or the operator is not repeatable by itself.

        `found`: the same calls as they are judged. Gives where attention is another one without gradients.
        """
        apart = self._apart()
        unlike = self._as_promised(apart, found) if self.owned or self.halves else None
        first = self._differing(apart, self._together())
        again = self._differing(self._together(), self._apart()) if first else {}  # what alternates must not agree
        for (call, name), bits in first.items():
            if (call, name) in again and all(map(comparing.identical, bits, reversed(again[call, name]))):
                raise ValueError(
                    f"{name} of {self._size(call)} is another one where more calls run before it is used: does the "
                    "operator keep something between calls, or give the same memory twice?"
                )
        return unlike

    def _as_promised(self, apart: _Found, found: Results) -> str | None:
        """Gradients by autograd, all at once, beside those that are judged; likewise forwards of attention."""
        tokens, unlike = 0, None
        for index, made in enumerate(apart):
            width = self.layout.calls[index].width
            here, tokens = slice(tokens, tokens + width), tokens + width
            for name in self.node.tensors:
                beside = made.get(f"d{name} of `backward`", found.gradients[f"d{name}"][here].unsqueeze(0))
                _as_promised(f"d{name}", made[f"d{name}"], beside, self._size(index))
            if "out without gradients" in made and not comparing.identical(made["out"], made["out without gradients"]):
                unlike = unlike or f"out in {ALONE}, {self._size(index)}: other bits without gradients than with them"
        return unlike

    def _size(self, index: int) -> str:
        return f"a call of 1 × {self.layout.calls[index].width} tokens"

    def _differing(self, one: _Found, other: _Found) -> dict[tuple[int, str], tuple[Tensor, Tensor]]:
        return {
            (call, name): (x, theirs[name])
            for call, (mine, theirs) in enumerate(zip(one, other, strict=True))
            for name, x in mine.items()
            if not comparing.identical(x, theirs[name])
        }

    def _apart(self) -> _Found:
        """One call after the other, each result copied at once."""
        results = []
        for index in range(len(self.layout.calls)):
            state = self._forward(index)
            self._backward(state)
            self._sum([state])
            results.append({name: x.detach().clone() for name, x in state.found.items()})
        return results

    def _together(self) -> _Found:
        """All forwards before the first backward, those of one size last; then the backward of the second of these."""
        with _placed("where several calls run before the first backward"):
            more = [self._forward(index) for index in range(len(_ALIKE), len(self.layout.calls))]
            first, second, *last = (self._forward(index) for index in range(len(_ALIKE)))
            states = [first, second, *last, *more]
            for state in (second, first, *last, *more):
                self._backward(state)
        with _placed("where several weight gradients are summed at a time"):
            self._sum(states)
        return [state.found for state in states]

    def _forward(self, index: int, *, plain: bool = True) -> _State:
        one, call = self.one, self.layout.calls[index]
        upstream = {name: grids.upstream(x, self.layout, call, one.tier) for name, x in one.upstream.items()}
        tokens = {
            name: grids.physical(made, one.tables[name], self.layout, call, one.tier)
            for name, made in one.case.inputs.items()
        }
        segments = grids.segments_of(call, one.device)
        state = _State(call, tokens, segments, upstream, weighted=self.backward and index in _WEIGHTED)
        if self.plain and plain:
            with torch.no_grad():
                outputs = self._call(state, one.weights)
            state.found |= {f"{name} without gradients": out for name, out in outputs.items()}
        if self.backward:
            self._forward_with_gradients(state)
        return state

    def _forward_with_gradients(self, state: _State) -> None:
        weights = self.one.weights
        state.leaves = {name: state.tokens[name].requires_grad_() for name in self.node.tensors}
        if state.weighted:
            weights = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
            state.leaves = {**state.leaves, **weights}
        with torch.enable_grad():
            state.outputs = self._call(state, weights)
        state.found |= state.outputs
        if self.halves:
            with torch.no_grad(), self.seen.call(launches=True):
                state.saved = self.operator.forward(*self._plain(state), state.segments, **self.one.case.options)  # type: ignore[attr-defined]
            state.found |= {"out of `forward`": state.saved[0], "lse of `forward`": state.saved[1]}
            self._hold({"out of `forward`": state.saved[0], "lse of `forward`": state.saved[1]}, state)

    def _call(self, state: _State, weights: Tensors) -> dict[str, Tensor]:
        outputs = self.one.case.call(self._watched, state.tokens, weights, state.segments, None)
        self._hold(outputs, state)
        return outputs

    def _hold(self, made: Tensors, state: _State) -> None:
        given = [x for x in state.tokens.values() if not x.is_floating_point()]
        made = {name: out for name, out in made.items() if not any(overlap(out, x) for x in given)}  # as it was given
        for name, out in made.items():
            if any(overlap(out, earlier) for earlier in self.held):
                place = f"a call of 1 × {state.call.width} tokens"
                raise ValueError(f"{name} of {place} lies in the memory of an earlier result, which is still held")
        self.held += [out.detach() for out in made.values()]

    def _watched(self, *arguments: Any, **options: Any) -> Any:
        with self.seen.call(launches=True):
            return self.operator(*arguments, **options)

    def _plain(self, state: _State) -> list[Tensor]:
        return [x.detach() for x in state.tokens.values()]

    def _backward(self, state: _State) -> None:
        if self.backward:
            state.found |= self._gradients(state, state.upstream)

    def _gradients(self, state: _State, upstream: Tensors) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        if state.leaves:
            outputs = [state.outputs[name] for name in upstream]
            if not all(out.requires_grad for out in outputs):
                raise NoBackward("an output has no gradient function")
            with self.seen.call(launches=not self.node.backward_moves):
                got = differentiate(outputs, [*state.leaves.values()], [*upstream.values()])
            found = {f"d{name}": _there(name, x) for name, x in zip(state.leaves, got, strict=True)}
        if state.saved is not None:
            given = (*self._plain(state), *state.saved, upstream["out"], state.segments)
            with self.seen.call(launches=True):
                parts = self.operator.backward(*given, **self.one.case.options)  # type: ignore[attr-defined]
            found |= {f"d{name} of `backward`": x for name, x in zip(self.node.tensors, parts, strict=True)}
        return found

    def _sum(self, states: Sequence[_State]) -> None:
        """Weight gradients that are begun before the first of them is finished."""
        states = [state for state in states if state.weighted and self.owned]
        owners = [self._owner() for _ in states]
        for owner, state in zip(owners, states, strict=True):
            self._add(owner, state, state.upstream)
        for owner, state in zip(owners, states, strict=True):
            with self.seen.call(launches=False):
                state.found["dweight of `weight_gradient`"] = owner.finish()

    def _owner(self) -> Any:
        assert self.owned is not None
        return self.owned(self.one.weights["weight"], **self.one.case.options)

    def _add(self, owner: Any, state: _State, upstream: Tensors) -> None:
        x, dy, more = handed_over(self.node, state.tokens, upstream)
        rows = state.call.slots
        with self.seen.call(launches=False):
            owner.add(x, dy, gradients.Identity((gradients.Run(0, 0, rows, 0, rows),), rows), **more)

    # The upstream gradient of y.sum()

    def summed(self, near: Near) -> None:
        """Once with ones that lie side by side, and once with a single one that is expanded."""
        for index in (1, len(_ALIKE)):
            dense = self._of_ones(index, spread=False)
            with _placed("for an expanded upstream gradient, as that of y.sum()"):
                expanded = self._of_ones(index, spread=True)
            for name, want in dense.items():
                got = expanded[name]
                if not comparing.identical(got, want) and (problem := near(name, got, want)):
                    raise ValueError(
                        f"{name} of {self._size(index)} is wrong for an expanded upstream gradient: {problem}"
                    )

    def _of_ones(self, index: int, *, spread: bool) -> dict[str, Tensor]:
        state = self._forward(index, plain=False)
        ones = {
            name: x.new_ones(()).expand(x.shape) if spread else torch.ones_like(x) for name, x in state.upstream.items()
        }
        found = self._gradients(state, ones)
        if state.weighted and self.owned:
            owner = self._owner()
            self._add(owner, state, ones)
            found["dweight of `weight_gradient`"] = owner.finish()
        return found


@contextlib.contextmanager
def _placed(place: str) -> Iterator[None]:
    """What an operator raises inside is told with this place."""
    try:
        yield
    except Exception as error:
        error.place = place  # type: ignore[attr-defined]
        raise


def _there(name: str, gradient: Tensor | None) -> Tensor:
    if gradient is None:
        raise NoBackward(f"no gradient reaches {name}")
    return gradient
