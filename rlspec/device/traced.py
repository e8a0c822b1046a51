"""Functions that `torch.compile` and `torch.export` take as one operator each, without looking inside.

A function whose kernels torch knows nothing of cannot be traced: there is no data behind the tensors of a graph. Here
such a function becomes an operator of `torch.ops.rlspec_cuda` with a stand-in that knows dtypes and shapes alone, and
with a gradient. Outside of a graph the function itself is called, so nothing changes there.

Promise: the bits of a compiled graph are those of the function. Limits: in a graph, the backward runs its forward once
more, as it goes through the function's own autograd; gradients of gradients do not exist.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

NAMESPACE = "rlspec_cuda"

Function = TypeVar("Function", bound=Callable[..., Any])


def traced(
    name: str, function: Function, schema: str, fake: Callable[..., Any], tensors: Sequence[str] = ()
) -> Function:
    """`function`, which a graph meets as the operator `name` with this schema, and with `fake` in place of kernels.

    `tensors`: the parameters with a gradient; with none the operator is not differentiable in a graph. Any other that
    wants a gradient is a ValueError: a graph would leave it without one, and say nothing.
    """
    parameters = [one.name for one in torch._C.parse_schema(f"{name}{schema}").arguments]

    def by_name(*args: Any) -> Any:
        return function(**dict(zip(parameters, args, strict=False)))

    operator = torch.library.custom_op(f"{NAMESPACE}::{name}", by_name, mutates_args=(), schema=schema)
    operator.register_fake(fake)
    if tensors:
        _differentiate(name, operator, by_name, schema, [parameters.index(one) for one in tensors])
    overload = getattr(getattr(torch.ops, NAMESPACE), name)

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if not torch.compiler.is_compiling():
            return function(*args, **options)
        if tensors and torch.is_grad_enabled():
            for parameter, one in (*zip(parameters, args, strict=False), *options.items()):
                if parameter not in tensors and isinstance(one, Tensor) and one.requires_grad:
                    raise ValueError(f"{name} gives no gradient to {parameter}: detach it")
        return overload(*args, **options)

    return call  # type: ignore[return-value]


def _differentiate(name: str, operator: Any, function: Callable[..., Any], schema: str, places: Sequence[int]) -> None:
    """A second operator: from the arguments and the gradient of the result to the gradients of those at `places`."""

    def gradients(*args: Any) -> list[Tensor]:
        given, dy = list(args[:-1]), args[-1]
        with _autograd():
            for place in places:
                given[place] = given[place].detach().requires_grad_()
            found = torch.autograd.grad(function(*given), [given[place] for place in places], dy)
        return [one.clone() if one.data_ptr() == dy.data_ptr() else one for one in found]

    parameters = re.sub(r"=[^,)]+", "", schema.partition(" -> ")[0].strip("()"))  # the upstream one has no default
    taken = f"({parameters}, Tensor upstream) -> Tensor[]"
    backward = torch.library.custom_op(f"{NAMESPACE}::{name}_gradients", gradients, mutates_args=(), schema=taken)
    backward.register_fake(lambda *args: [like(args[place]) for place in places])

    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*(one for one in inputs if isinstance(one, Tensor)))
        ctx.rest = tuple(None if isinstance(one, Tensor) else (one,) for one in inputs)

    def passed(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        saved = iter(ctx.saved_tensors)
        inputs = [next(saved) if one is None else one[0] for one in ctx.rest]
        found = dict(zip(places, backward(*inputs, dy), strict=True))
        return tuple(found.get(place) for place in range(len(inputs)))

    operator.register_autograd(passed, setup_context=save)


@contextlib.contextmanager
def _autograd() -> Iterator[None]:
    """Within an operator torch has switched its autograd off, twice: by the mode, and for its dispatcher."""
    included, none = torch._C._dispatch_tls_local_include_set(), torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)
    with torch._C._ForceDispatchKeyGuard(included, none), torch.enable_grad():
        yield


def like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)
