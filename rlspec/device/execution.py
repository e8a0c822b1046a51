"""One operator through all calls of one layout, forward and backward, its results restored to logical identity."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlspec import layouts
from rlspec.device import comparing, gradients, grids
from rlspec.device.autograd import differentiate
from rlspec.device.cases import Case, Tensors
from rlspec.device.grids import segments_of
from rlspec.device.observe import Seen
from rlspec.device.operators import Segments
from rlspec.layouts import Call, Layout
from rlspec.nodes import NODES, Node
from rlspec.workloads import Tier

ALONE = "each sample alone"  # a layout beside those of the tier, in which inputs are looked at as in the canonical one

# x, its upstream gradient, other token inputs by name, which rows are which, and how many rows there are.
Handed = tuple[Tensor, Tensor, dict[str, Tensor], list[gradients.Run], int]


class NoBackward(Exception):
    """The operator gave a result that no gradient flows through."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is run: an operator on the tables of a case, with the upstream gradients of its outputs.

    `like`: tensors of whose dtype and shape a token its outputs must be; `wide`: the dtype of a reference.
    """

    case: Case
    tier: Tier
    operator: Callable[..., Any]
    tables: Tensors
    weights: Tensors
    upstream: Tensors
    device: torch.device
    like: Tensors = field(default_factory=dict)
    wide: torch.dtype | None = None


@dataclass(kw_only=True)
class Results:
    """By name, `d` before gradients; tokens as [tokens, ...] in canonical order, parameters whole.

    `accumulated_by`: who summed a parameter's gradient over calls, the operator itself or plain fp32 additions.
    `apart`: where a forward with gradients first differs from one without, in a sentence.
    """

    outputs: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    accumulated_by: dict[str, str] = field(default_factory=dict)
    apart: str | None = None


def run(subject: Subject, layout: Layout, seen: Seen, *, backward: bool, both: bool = False) -> Results:
    """`both`: every call runs with gradients and without, as a trainer and an engine call it; `outputs` are the latter.

    Raises NoBackward, ValueError for outputs of a wrong shape, and whatever the operator raises.
    """
    return _Execution(subject, layout, seen, backward, both).run()


class _Execution:
    def __init__(self, subject: Subject, layout: Layout, seen: Seen, backward: bool, both: bool) -> None:
        self.subject, self.layout, self.seen, self.backward, self.both = subject, layout, seen, backward, both
        self.node = NODES[subject.case.operator]
        self.results = Results()
        operator = subject.operator
        self.whole_backward = hasattr(operator, "backward") and hasattr(operator, "forward")
        self.owned = getattr(operator, "weight_gradient", None) if self.node.parameters and layout.parameters else None
        self.handed: list[Handed] = []
        self.owner: Any = None
        self.saved: dict[str, Tensor] = {}

    def run(self) -> Results:
        with _stream(self.layout, self.subject.device):
            for call in self.layout.calls:
                try:
                    self._call(call)
                except Exception as error:
                    error.place = f"in {self.layout.name}, a call of {call.rows} × {call.width} tokens"  # type: ignore[attr-defined]
                    raise
            if self.backward and self.whole_backward and not self._whole_samples():
                self._backward_by_sample()
            if self.backward and self.owned is not None:
                self._finish_weight()
        return self.results

    def _call(self, call: Call) -> None:
        subject, case = self.subject, self.subject.case
        tokens = {name: self._physical(name, call) for name in case.inputs}
        weights = dict(subject.weights)
        leaves: dict[str, Tensor] = {}
        if (self.backward or self.both) and not self.whole_backward:
            leaves = {name: tokens[name].requires_grad_() for name in self.node.tensors}
            if self.owned is None and self.layout.parameters:
                weights = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
                leaves |= weights
        segments = segments_of(call, subject.device)
        inferred = self._inferred(call, tokens, segments) if self.both and leaves else None
        with torch.set_grad_enabled(bool(leaves)):
            if self.whole_backward:
                with self.seen.call(launches=subject.wide is None):
                    out, lse = subject.operator.forward(*tokens.values(), segments, **case.options)  # type: ignore[attr-defined]
                outputs = {"out": out}
                self._same_as_call(out, case.call(self._operator, tokens, weights, segments, None)["out"])
            else:
                outputs = case.call(self._operator, tokens, weights, segments, subject.wide)
        self._check(outputs, call)
        self._apart_from_given(outputs, tokens)
        self._untouched(tokens, call)
        if inferred is not None:
            self._same_without_gradients(outputs, inferred, call)
        for name, out in (inferred or outputs).items():
            self._restore(self.results.outputs, name, out.detach(), call, keys=False)
        if self.whole_backward:
            self._restore(self.saved, "lse", lse, call, keys=False)
        if not self.backward:
            return
        upstream = {name: self._upstream(name, call) for name in self.node.outputs if outputs[name].is_floating_point()}
        if self.whole_backward:
            if self._whole_samples():
                self._attention_backward(call, tokens, out, lse, upstream["out"], segments)
            return
        self._autograd(call, outputs, upstream, leaves)
        if self.owned is not None:
            self._hand_over(call, tokens, upstream)
        self._kept(upstream, call)
        self._untouched(tokens, call)

    def _inferred(self, call: Call, tokens: Tensors, segments: Segments) -> dict[str, Tensor]:
        """What the call gives without gradients, where an operator may take another way.

        Copied, for an operator may give the same memory again.
        """
        plain = {name: x.detach() for name, x in tokens.items()}
        with torch.no_grad():
            outputs = self.subject.case.call(self._operator, plain, self.subject.weights, segments, self.subject.wide)
        self._check(outputs, call)
        self._apart_from_given(outputs, tokens)
        return {name: out.clone() for name, out in outputs.items()}

    def _same_without_gradients(self, trained: Tensors, inferred: Tensors, call: Call) -> None:
        """Pads may hold anything, so only where the grids differ are the tokens picked out of them."""
        for name, out in inferred.items():
            grid = trained[name].detach()
            if self.results.apart or comparing.identical(out, grid):
                continue
            mine: dict[str, Tensor] = {}
            theirs: dict[str, Tensor] = {}
            self._restore(mine, name, out, call, keys=False)
            self._restore(theirs, name, grid, call, keys=False)
            self.results.apart = self._apart(name, mine[name], theirs[name], call)

    def _apart(self, name: str, mine: Tensor, theirs: Tensor, call: Call) -> str | None:
        if comparing.identical(mine, theirs):
            return None
        place = f"{name} in {self.layout.name}, a call of {call.rows} × {call.width} tokens"
        if mine.dtype != theirs.dtype:
            return f"{place}: {_told(mine)} without gradients, {_told(theirs)} with them"
        count = int((comparing.bits(mine) != comparing.bits(theirs)).sum())
        return f"{place}: {count:,} of {mine.numel():,} elements are others without gradients than with them"

    def _operator(self, *arguments: Any, **options: Any) -> Any:
        """The operator, watched; what the case does before and after it is not its own."""
        with self.seen.call(launches=self.subject.wide is None):
            return self.subject.operator(*arguments, **options)

    def _autograd(self, call: Call, outputs: Tensors, upstream: Tensors, leaves: Tensors) -> None:
        if not leaves:
            return
        differentiable = [outputs[name] for name in upstream]
        launches = self.subject.wide is None and not self.node.backward_moves
        if not all(out.requires_grad for out in differentiable):
            raise NoBackward("an output has no gradient function")
        with self.seen.call(launches=launches):
            found = differentiate(differentiable, list(leaves.values()), list(upstream.values()))
        for (name, leaf), gradient in zip(leaves.items(), found, strict=True):
            if gradient is None:
                raise NoBackward(f"no gradient reaches {name}")
            if gradient.shape != leaf.shape:
                raise ValueError(f"the gradient of {name} has shape {list(gradient.shape)}, not {list(leaf.shape)}")
            if name in self.node.parameters:
                self._accumulate(f"d{name}", gradient)
            else:
                self._add(f"d{name}", gradient, call, keys=name in self.node.of_keys)

    def _accumulate(self, name: str, gradient: Tensor) -> None:
        wide = torch.promote_types(gradient.dtype, torch.float32)
        if name not in self.results.gradients:
            self.results.gradients[name] = torch.zeros(gradient.shape, dtype=wide, device=gradient.device)
        self.results.gradients[name] += gradient
        self.results.accumulated_by[name] = "autograd"

    def _add(self, name: str, gradient: Tensor, call: Call, *, keys: bool) -> None:
        """Token gradients: a key that several calls meet gets the sum of its parts in call order, in fp32."""
        found = self.results.gradients
        if not (keys and len(self.layout.calls) > 1 and not self._whole_samples()):
            self._restore(found, name, gradient, call, keys=keys)
            return
        wide = torch.promote_types(gradient.dtype, torch.float32)
        part: dict[str, Tensor] = {}
        self._restore(part, name, gradient.to(wide), call, keys=keys, poison=0.0)
        total = found.get(name, torch.zeros_like(part[name])).to(wide) + part[name]
        found[name] = total if call is not self.layout.calls[-1] else total.to(gradient.dtype)

    # Gradients that the operator itself sums

    def _hand_over(self, call: Call, tokens: Tensors, upstream: Tensors) -> None:
        samples = self.subject.tier.samples
        runs = [
            gradients.Run(
                run.sample, run.position, run.length, run.row * call.width + run.column, samples[run.sample].length
            )
            for run in call.runs
            if run.sample < len(samples)
        ]
        self.handed.append((*handed_over(self.node, tokens, upstream), runs, call.slots))
        if self.layout.ordered:
            self._give(self.handed.pop())

    def _give(self, handed: Handed) -> None:
        x, dy, more, runs, rows = handed
        with self.seen.call(launches=False):
            self._gradient().add(x, dy, gradients.Identity(tuple(runs), rows), **more)

    def _gradient(self) -> Any:
        if self.owner is None:
            assert self.owned is not None
            self.owner = self.owned(self.subject.weights["weight"], **self.subject.case.options)
        return self.owner

    def _finish_weight(self) -> None:
        if self.handed:  # the calls interleave samples: all of their rows at once
            runs, row = [], 0
            for *_, of_call, rows in self.handed:
                runs += [run._replace(row=run.row + row) for run in of_call]
                row += rows
            x, dy = (torch.cat([one[slot] for one in self.handed]) for slot in (0, 1))
            more = {name: torch.cat([one[2][name] for one in self.handed]) for name in self.handed[0][2]}
            self._give((x, dy, more, runs, row))
        with self.seen.call(launches=False):
            total = self._gradient().finish()
        due = self.subject.weights["weight"].shape
        if total.shape != due or total.dtype != torch.float32:
            raise ValueError(f"the weight gradient is {_told(total)}; fp32 {list(due)} is due")
        self.results.gradients["dweight"] = total
        self.results.accumulated_by["dweight"] = "operator"

    # Attention that runs its backward once a sample

    def _whole_samples(self) -> bool:
        samples = (*self.subject.tier.samples, *self.subject.tier.company)
        return all(run.length == samples[run.sample].queries for call in self.layout.calls for run in call.runs)

    def _attention_backward(
        self, call: Call, tokens: Tensors, out: Tensor, lse: Tensor, dy: Tensor, segments: Segments
    ) -> None:
        operator: Any = self.subject.operator
        before = (out.clone(), lse.clone()) if self._watched else (out, lse)
        with self.seen.call(launches=True):
            found = operator.backward(*tokens.values(), out, lse, dy, segments, **self.subject.case.options)
        self._kept({"out": dy}, call)
        self._untouched(tokens, call)
        if not all(map(comparing.identical, (out, lse), before)):
            raise ValueError("the backward writes into what `forward` gave")
        for name, gradient in zip(self.node.tensors, found, strict=True):
            if gradient.shape != tokens[name].shape or gradient.dtype != tokens[name].dtype:
                raise ValueError(f"the gradient of {name} is {_told(gradient)}; {_told(tokens[name])} is due")
            self._restore(self.results.gradients, f"d{name}", gradient, call, keys=name in self.node.of_keys)

    def _backward_by_sample(self) -> None:
        start = 0
        for index, sample in enumerate(self.subject.tier.samples):
            call = layouts.alone(index, sample)
            tokens = {name: self._physical(name, call) for name in self.subject.case.inputs}
            part = slice(start, start + sample.queries)
            out, lse = self.results.outputs["out"][part].unsqueeze(0), self.saved["lse"][part].unsqueeze(0)
            segments = segments_of(call, self.subject.device)
            self._attention_backward(call, tokens, out, lse, self._upstream("out", call), segments)
            start += sample.queries

    def _same_as_call(self, out: Tensor, called: Tensor) -> None:
        if not comparing.identical(out, called):
            raise ValueError("the operator called and its `forward` differ to the bit")

    @property
    def _watched(self) -> bool:
        return self.layout.name in (layouts.CANONICAL, ALONE) and self.subject.wide is None

    def _kept(self, upstream: Tensors, call: Call) -> None:
        for name, dy in upstream.items() if self._watched else ():
            if not comparing.identical(dy, self._upstream(name, call)):
                raise ValueError(f"the backward writes into the upstream gradient of {name}")

    def _untouched(self, tokens: Tensors, call: Call) -> None:
        for name, x in tokens.items() if self._watched else ():
            if not comparing.identical(x.detach(), self._physical(name, call)):
                raise ValueError(f"the operator writes into its input {name}")

    def _apart_from_given(self, outputs: Tensors, tokens: Tensors) -> None:
        """A result that lies in an input or a weight changes with it; a choice of experts may be given back."""
        given = {
            **{name: f"its input {name}" for name in tokens},
            **{name: f"its {name}" for name in self.subject.weights},
        }
        tensors = {**tokens, **self.subject.weights}
        checked = {name: out for name, out in outputs.items() if out.is_floating_point() and self.subject.wide is None}
        for name, out in checked.items():
            for other, said in given.items():
                if overlap(out, tensors[other]):
                    raise ValueError(f"{name} lies in the memory of {said}, and changes with it: a copy is due")

    def _physical(self, name: str, call: Call) -> Tensor:
        subject = self.subject
        return grids.physical(subject.case.inputs[name], subject.tables[name], self.layout, call, subject.tier)

    def _upstream(self, name: str, call: Call) -> Tensor:
        return grids.upstream(self.subject.upstream[name], self.layout, call, self.subject.tier)

    def _restore(
        self, into: dict[str, Tensor], name: str, grid: Tensor, call: Call, *, keys: bool, poison: float = float("nan")
    ) -> None:
        grids.restore(into, name, grid, call, self.subject.tier, keys=keys, poison=poison)

    def _check(self, outputs: Mapping[str, Tensor], call: Call) -> None:
        for name, out in outputs.items():
            if not isinstance(out, Tensor):
                raise ValueError(f"the result {name} is no tensor but a {type(out).__name__}")
            if out.shape[:2] != (call.rows, call.width):
                grid = f"{call.rows} rows of {call.width} tokens"
                raise ValueError(f"the result {name} has shape {list(out.shape)} for {grid}")
            due = self.subject.like.get(name)
            if due is not None and out.dtype != due.dtype:
                raise ValueError(f"the result {name} is {out.dtype}, {due.dtype} is due")
            if due is not None and out.shape[2:] != due.shape[1:]:
                raise ValueError(f"the result {name} has {list(out.shape[2:])} a token, {list(due.shape[1:])} is due")
            if out.device != self.subject.device:
                raise ValueError(f"the result {name} lies on {out.device}, the inputs on {self.subject.device}")


def handed_over(node: Node, tokens: Tensors, upstream: Tensors) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """What a weight gradient takes of a call: the first input, its upstream gradient, and the others by name."""
    x, *_ = tokens.values()
    dy, *_ = upstream.values()
    more = {name: tokens[name].flatten(0, 1) for name in list(tokens)[1:] if name not in node.tensors}
    more |= {f"d{name}": upstream[name].flatten(0, 1) for name in list(upstream)[1:]}
    return x.detach().flatten(0, 1), dy.flatten(0, 1), more


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether the memory from the first to the last element of each has a part in common."""
    if not (one.numel() and other.numel()) or one.device != other.device:
        return False
    first, second = _extent(one), _extent(other)
    return first[0] < second[1] and second[0] < first[1]


def _extent(x: Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


def _told(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


@contextlib.contextmanager
def _stream(layout: Layout, device: torch.device) -> Iterator[None]:
    if layout.how != "other_stream":
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(device).wait_stream(stream)
