"""Which kernels each operator of a model launches, forward and back, seen operator by operator in one short call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rlspec.device import observe
from rlspec.device.chain_decoder import TrainingDecoder
from rlspec.device.chain_gradients import Ledger
from rlspec.device.chain_inference import InferenceDecoder
from rlspec.device.chain_model import TrainingPass
from rlspec.device.decoder import Site
from rlspec.device.operators import Operators
from rlspec.layouts import Call


class Observer:
    """What each operator was seen to launch, and the dtypes of its tensors."""

    def __init__(self, operators: Operators) -> None:
        self.operators = operators
        self.seen: dict[str, dict[str, Any]] = {}

    def call(self, operator: str, compute: Callable[[], Any], arguments: Sequence[Any]) -> Any:
        """Run it, and note what it did."""
        with observe.watch() as seen, seen.call(launches=True):
            out = compute()
        into = [_dtype(one) for one in arguments if isinstance(one, Tensor)]
        made = [_dtype(one) for one in (out if isinstance(out, tuple) else (out,)) if isinstance(one, Tensor)]
        entry = self.seen.setdefault(
            operator,
            {"backend": getattr(getattr(self.operators, operator), "backend", None), "calls": 0, "dtypes": [],
             "seen": observe.Seen().plain()},
        )  # fmt: skip
        entry["calls"] += 1
        if (told := f"{', '.join(into)} -> {', '.join(made)}") not in entry["dtypes"]:
            entry["dtypes"].append(told)
        for name in ("triton", "native", "torch"):
            entry["seen"][name] += [one for one in getattr(seen, name) if one not in entry["seen"][name]]
        entry["seen"]["calls_without_launch"] += seen.idle
        return out

    def plain(self) -> dict[str, dict[str, Any]]:
        """By operator, as a record holds it."""
        return self.seen

    def profiled(self, parts: Sequence[Callable[[], Any]], device: torch.device) -> list[str] | None:
        """The names of all GPU kernels of these; None where there is no GPU."""
        if device.type != "cuda":
            return None
        seen = observe.Seen(profiling=True)
        for compute in parts:
            with seen.call(launches=False):
                compute()
        return seen.profiled


class ObservedInference(InferenceDecoder):
    """Each operator under an observer."""

    observer: Observer | None = None

    def operate(self, at: Site, name: str, operator: str, *arguments: Any, **options: Any) -> Any:
        def compute() -> Any:
            return super(ObservedInference, self).operate(at, name, operator, *arguments, **options)

        return compute() if self.observer is None else self.observer.call(operator, compute, arguments)


class ObservedDecoder(TrainingDecoder):
    """Each operator's forward, and attention's backward, under an observer."""

    observer: Observer | None = None

    def operate(self, at: Site, name: str, operator: str, *arguments: Any, **options: Any) -> Any:
        def compute() -> Any:
            return super(ObservedDecoder, self).operate(at, name, operator, *arguments, **options)

        return compute() if self.observer is None else self.observer.call(operator, compute, arguments)

    def attention_forward(self, at: Site, *parts: Tensor) -> tuple[Tensor, Tensor]:
        def compute() -> tuple[Tensor, Tensor]:
            return super(ObservedDecoder, self).attention_forward(at, *parts)

        return compute() if self.observer is None else self.observer.call("attention", compute, parts)

    def attention_backward(self, at: Site, *saved: Tensor, **segments: Any) -> tuple[Tensor, Tensor, Tensor]:
        def compute() -> tuple[Tensor, Tensor, Tensor]:
            return super(ObservedDecoder, self).attention_backward(at, *saved, **segments)

        return compute() if self.observer is None else self.observer.call("attention", compute, saved)


class ObservedPass(TrainingPass):
    """One call forward and back, if gradients are asked for, for what it launches alone."""

    decoder_type = ObservedDecoder

    def observe(self, call: Call, observer: Observer | None) -> None:
        """What is summed is thrown away."""
        assert isinstance(self.decoder, ObservedDecoder)
        self.decoder.observer = observer
        self._call(call, Ledger([sample.length for sample in self.tier.samples]), None, None)


def _dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")
