"""The lines of records.jsonl that a chain writes: numbers and digests, never verdicts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

import torch
from torch import Tensor

from rlspec.chains import REFERENCE
from rlspec.device import comparing
from rlspec.layouts import CANONICAL

Place = Callable[[int], dict[str, Any]]  # flat index of an element -> sample, position, …
Yardstick = Mapping[str, float | str]


@dataclass
class Lines:
    """A file of records. `limits`: judgment -> limits of its accuracy row, None where it has none."""

    file: TextIO
    limits: Mapping[str, Mapping[str, float] | None]
    count: int = 0

    def line(self, record: str, **line: Any) -> None:
        """One record, at once on disk."""
        self.file.write(json.dumps({"record": record, **line}, allow_nan=False) + "\n")
        self.file.flush()
        self.count += 1

    def logprobs(self, execution: str, values: Tensor) -> None:
        """fp32 of the active tokens, samples in order, positions ascending."""
        plain = [comparing.number(value) for value in values.tolist()]
        self.line("logprobs", execution=execution, values=plain, digest=comparing.fingerprint(values))

    def trace(self, judgment: str, configuration: str, found: Mapping[str, Any]) -> None:
        """Where two runs part, as `chain_trace.divergence` says."""
        self.line("trace", judgment=judgment, configuration=configuration, **found)

    def bits(
        self,
        judgment: str,
        configuration: str,
        tensor: str,
        got: Tensor,
        want: Tensor,
        *,
        against: str = CANONICAL,
        place: Place | None = None,
        pairs: Sequence[tuple[float, float]] = (),
    ) -> bool:
        """Whether both are equal to the bit. `pairs`: log-probs that the contract may judge instead."""
        found = comparing.same_bits(got, want, comparing.fingerprint(want))
        if place and found["first"]:
            found["first"] |= place(found["first"]["index"])
        more = {"dlogp": [[comparing.number(value) for value in pair] for pair in pairs]} if pairs else {}
        self.comparison(judgment, configuration, tensor, against, got, want, {**found, **more})
        return bool(found["differing"] == 0)

    def near(
        self,
        judgment: str,
        configuration: str,
        tensor: str,
        got: Tensor,
        want: Tensor,
        yardstick: Yardstick,
        place: Place | None = None,
    ) -> None:
        """What `got` errs by, beside what plain torch does."""
        line = self.errors(judgment, got, want, yardstick)
        line |= {"digest": comparing.fingerprint(got), "against_digest": comparing.fingerprint(want)}
        if place and line["first"]:
            line["first"] |= place(line["first"]["index"])
        self.comparison(judgment, configuration, tensor, REFERENCE, got, want, line, self.limits[judgment])

    def errors(self, judgment: str, got: Tensor, want: Tensor, yardstick: Yardstick) -> dict[str, Any]:
        """The figures of `near`, to be written later."""
        limits = self.limits[judgment] or {}
        found = comparing.errors(got, want, limits.get("atol", 0.0), limits.get("rtol", 0.0)).plain()
        return {**found, "yardstick": dict(yardstick)}

    def comparison(
        self,
        judgment: str,
        configuration: str,
        tensor: str,
        against: str,
        got: Tensor,
        want: Tensor,
        found: Mapping[str, Any],
        limits: Mapping[str, float] | None = None,
    ) -> None:
        """One tensor of one pair, with what was found."""
        line = {
            "judgment": judgment,
            "configuration": configuration,
            "tensor": tensor,
            "against": against,
            "shape": list(want.shape),
            "dtype": dtype_name(got.dtype),
            "against_dtype": dtype_name(want.dtype),
            "elements": want.numel(),
            "limits": None if limits is None else dict(limits),
        }
        self.line("comparison", **{**line, **found})


def yardstick(plain: Tensor, want: Tensor) -> dict[str, float | str]:
    """What plain torch errs by, and what one rounding to its dtype does."""
    found = comparing.errors(plain, want, 0.0, 0.0)
    peak, rms = comparing.rounding(want, plain.dtype)
    return {
        "torch_rms": comparing.number(found.rms),
        "torch_max_abs": comparing.number(found.max_abs),
        "rounding_rms": comparing.number(rms),
        "rounding_max_abs": comparing.number(peak),
    }


def dtype_name(dtype: torch.dtype) -> str:
    """As records hold it."""
    return str(dtype).removeprefix("torch.")
