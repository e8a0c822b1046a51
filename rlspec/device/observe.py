"""What really ran: Triton launches, native launches, torch operators, and on a GPU the profiler's list of kernels.

Nothing here is copied from a declaration. What could not be observed is None. Operators of a user's own library are
looked into, and threads that are started while somebody watches are seen too; one that ran before is not.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_ACCUMULATING = ("index_put", "index_put_", "_index_put_impl_")
_UNINITIALISED = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


@dataclass(eq=False)
class Seen:
    """What one stretch of calls launched, in the order of first appearance; `idle` calls launched no own kernel."""

    triton: list[str] = field(default_factory=list)
    native: list[str] = field(default_factory=list)
    torch: list[str] = field(default_factory=list)
    profiled: list[str] | None = None
    idle: int = 0
    profiling: bool = False
    calling: bool = False
    _count: int = 0

    def launched(self, where: list[str], name: str) -> None:
        self._count += 1
        if name not in where:
            where.append(name)

    def repeated(self) -> None:
        self._count += 1

    @contextlib.contextmanager
    def call(self, *, launches: bool) -> Iterator[None]:
        """Inside, operators of torch are seen too, and empty tensors hold NaN.

        With `launches`, a call without a kernel of its own counts as idle.
        """
        before = self._count
        if self.profiling:
            with _profiler(self):
                yield
            return
        with _Operators(lambda: (self,)), self._called():
            yield
        self.idle += launches and self._count == before

    @contextlib.contextmanager
    def _called(self) -> Iterator[None]:
        self.calling = True
        try:
            yield
        finally:
            self.calling = False

    def plain(self) -> dict[str, Any]:
        return {"triton": self.triton, "native": self.native, "torch": self.torch, "profiled": self.profiled,
                "calls_without_launch": self.idle}  # fmt: skip


class _Recording:
    """Apart from the mode: in that class torch would wrap it for its compiler, which takes a second to import.

    The compiler leaves alone what runs under such a mode, wrapped or not.
    """

    watching: Callable[[], Sequence[Seen]]
    within = 0  # operators of a user's library that are running

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not (watching := self.watching()):
            return func(*args, **kwargs)
        if self.within and func.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd):
            with self:  # type: ignore[attr-defined]  # elsewhere autograd takes such an operator apart
                return func.decompose(*args, **kwargs)
        namespace, _, name = func._schema.name.partition("::")
        full = _told(name, args, kwargs) if namespace == "aten" else f"{namespace}::{name}"
        made = func(*args, **kwargs) if namespace == "aten" else self._looked_into(func, args, kwargs)
        new = [seen for seen in watching if full not in seen.torch]
        # Whole numbers alone are tables of rows, counted and looked through; they are in no result.
        if new and _numbers((args, kwargs, made)):
            for seen in new:
                seen.torch.append(full)
        if name in _UNINITIALISED and made.is_floating_point():
            made.fill_(float("nan"))  # what an operator forgets to write is seen, whatever the allocator had there
        return made

    def _looked_into(self, func: Any, args: Any, kwargs: Any) -> Any:
        """With the kernel of the operator under this mode, which torch has put aside for the call."""
        if (keys := _kernel(func, (args, kwargs))) is None:
            return func(*args, **kwargs)
        self.within += 1
        try:
            with self:  # type: ignore[attr-defined]
                return func.redispatch(keys, *args, **kwargs)
        finally:
            self.within -= 1


class _Operators(_Recording, TorchDispatchMode):
    """What runs in one thread, told to those that `watching` gives at that moment."""

    def __init__(self, watching: Callable[[], Sequence[Seen]]) -> None:
        super().__init__()
        self.watching = watching


def _calling() -> list[Seen]:
    """Whose call is on: for a thread that a call has started, or one before it."""
    return [seen for seen in _WATCHING if seen.calling]


def _kernel(func: Any, given: Any) -> DispatchKeySet | None:
    """Where an operator's kernel is found, past the modes; None for tensors of a class that dispatches itself."""
    held = [torch._C._dispatch_keys(one) for one in tree_leaves(given) if isinstance(one, torch.Tensor)]
    if any(keys.has(DispatchKey.Python) for keys in held):
        return None
    chooses = not held and func.has_kernel_for_dispatch_key(DispatchKey.BackendSelect)
    none = DispatchKeySet(DispatchKey.BackendSelect if chooses else DispatchKey.Undefined)
    return functools.reduce(operator.or_, held, none) & torch._C._dispatch_keyset_full_after(DispatchKey.Python)


def _told(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """An operator of torch; one that moves data or adds it up, as it is told, has two names."""
    adds = name in _ACCUMULATING and (any(args[3:4]) or kwargs.get("accumulate"))
    return f"{name} (accumulate)" if adds else name


def _numbers(*values: Any) -> bool:
    """Whether there is a tensor that is not of whole numbers or truth values; or none at all."""
    tensors = [one for one in tree_leaves(values) if isinstance(one, torch.Tensor)]
    return not tensors or any(one.is_floating_point() or one.is_complex() for one in tensors)


_WATCHING: list[Seen] = []  # `watch` alone enters and leaves it; launchers outside Triton have no hook of their own


def native(name: str) -> None:
    """A launcher of CUDA kernels tells of each launch, so that what has `backend = "cuda"` is seen to run."""
    for seen in _WATCHING:
        seen.launched(seen.native, name)


def again(kernel: str | None, *, native: bool) -> None:
    """One kernel does the work of several operators: told at the call of each, after the one that launched it.

    `kernel` None: one of the same operator, whose name is known from that call.
    """
    for seen in _WATCHING:
        if kernel is None:
            seen.repeated()
        else:
            seen.launched(seen.native if native else seen.triton, kernel)


@contextlib.contextmanager
def watch() -> Iterator[Seen]:
    """Record what is launched inside, in this process, whichever thread launches it."""
    seen = Seen()
    with _triton(lambda name: seen.launched(seen.triton, name)), _threads():
        _WATCHING.append(seen)
        try:
            yield seen
        finally:
            _WATCHING.remove(seen)


@contextlib.contextmanager
def _triton(report: Callable[[str], None]) -> Iterator[None]:
    try:
        from triton import knobs
        from triton.runtime import interpreter
    except ImportError:
        yield
        return

    def entered(metadata: Any) -> None:
        report(metadata.get()["name"])

    original = interpreter.GridExecutor.__call__

    def interpreted(self: Any, *args: Any, **kwargs: Any) -> Any:
        report(self.fn.__name__)
        return original(self, *args, **kwargs)

    knobs.runtime.launch_enter_hook.add(entered)
    interpreter.GridExecutor.__call__ = interpreted
    try:
        yield
    finally:
        knobs.runtime.launch_enter_hook.remove(entered)
        interpreter.GridExecutor.__call__ = original


@contextlib.contextmanager
def _threads() -> Iterator[None]:
    """Threads that start inside are seen as long as they live: a mode of torch is that of one thread."""
    if _WATCHING:
        yield
        return
    original = threading.Thread.start

    def start(self: threading.Thread) -> None:
        run = self.run

        def watched() -> None:
            with _Operators(_calling):
                run()

        self.run = watched  # type: ignore[method-assign]
        original(self)

    threading.Thread.start = start  # type: ignore[method-assign]
    try:
        yield
    finally:
        threading.Thread.start = original  # type: ignore[method-assign]


@contextlib.contextmanager
def _profiler(seen: Seen) -> Iterator[None]:
    """Names of the GPU kernels inside, as the profiler lists them; `profiled` stays None where it lists nothing."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        yield
        torch.cuda.synchronize()
    events = (event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA)
    names = [_short(event.name) for event in events if not event.name.startswith(("Memcpy", "Memset"))]
    if names:
        seen.profiled = list(dict.fromkeys([*(seen.profiled or ()), *names]))


def _short(name: str) -> str:
    """A kernel's name without its return type and template arguments."""
    plain = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    return re.split(r"[<(]", plain, maxsplit=1)[0][:100]


def switches(device: torch.device) -> dict[str, bool]:
    """What must be off: TF32 in products of fp32, and autocast."""
    return {
        "tf32": bool(torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32),
        "autocast": torch.is_autocast_enabled(device.type),
    }


def environment(device: torch.device) -> dict[str, Any]:
    """Where and under which switches the operators ran."""
    here: dict[str, Any] = {
        "device": str(device),
        "torch": torch.__version__,
        **switches(device),
        "reduced_precision_reductions": bool(torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "grad_enabled": torch.is_grad_enabled(),
        "onednn": bool(torch.backends.mkldnn.enabled),
        "threads": torch.get_num_threads(),
        "name": None,
        "capability": None,
    }
    if device.type == "cuda":
        here["name"] = torch.cuda.get_device_name(device)
        here["capability"] = ".".join(map(str, torch.cuda.get_device_capability(device)))
    return here
