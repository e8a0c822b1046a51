"""Two tensors compared: to the bit, or within a row of the contract. Numbers only; the host decides.

Bits: dtype and shape are equal, −0 is not +0, and NaN on either side is a difference. Accuracy: candidate c against
reference r, an element holds if |c − r| ≤ atol + rtol·|r|, written so that NaN does not hold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 26
ULPS = (0, 1, 2, 4, 16)


def bits(x: Tensor) -> Tensor:
    """The same bytes as whole numbers."""
    return x.contiguous().view(_SAME_SIZE[x.element_size()]) if x.is_floating_point() else x.contiguous()


def fingerprint(x: Tensor) -> str:
    """128 bits that tell tensors of other dtype, shape or bytes apart, computed where the tensor lies."""
    flat, sums = bits(x).view(-1), [0, 0]
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK].long()
        place = torch.arange(start, start + len(part), device=x.device)
        for lane, (a, b) in enumerate(((0x9E3779B97F4A7C15 - 2**64, 0x2127599BF4325C37), (0x6C62272E07BB0142, 31))):
            mixed = (part ^ (place * a)) * b
            mixed = (mixed ^ shifted(mixed, 29)) * a
            sums[lane] += int((mixed ^ shifted(mixed, 32)).sum())
    head = f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}".replace(" ", "")
    return head + "".join(f"{total % 2**64:016x}" for total in sums)


def shifted(x: Tensor, bits: int) -> Tensor:
    """int64 shifted right as if it had no sign: with its sign, x and ~x would be mixed alike."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def identical(got: Tensor, want: Tensor) -> bool:
    """Whether dtype, shape and all bytes are equal, in one pass."""
    return got.dtype == want.dtype and got.shape == want.shape and torch.equal(bits(got), bits(want))


def same_bits(got: Tensor, want: Tensor, want_digest: str) -> dict[str, Any]:
    """`differing` elements, the lowest of them as `first` (flat index, both values), and both fingerprints."""
    equal = identical(got, want)
    digests = {"digest": want_digest if equal else fingerprint(got), "against_digest": want_digest}
    if equal and not (got.is_floating_point() and got.isnan().any()):
        return {"differing": 0, "first": None, **digests}
    if got.dtype != want.dtype or got.shape != want.shape:
        return {"differing": max(got.numel(), want.numel(), 1), "first": None, **digests}
    a, b = bits(got).view(-1), bits(want).view(-1)
    x, y = got.reshape(-1), want.reshape(-1)
    count, first = 0, None
    for start in range(0, a.numel(), _CHUNK):
        part = slice(start, start + _CHUNK)
        wrong = a[part] != b[part]
        if got.is_floating_point():
            wrong = wrong | x[part].isnan() | y[part].isnan()
        found = int(wrong.sum())
        if found and first is None:
            first = _element(start + int(wrong.int().argmax()), x, y)
        count += found
    return {"differing": count, "first": first, **digests}


def _element(index: int, got: Tensor, want: Tensor) -> dict[str, Any]:
    return {"index": index, "got": _plain(got[index]), "want": _plain(want[index])}


def _plain(x: Tensor) -> float | str | int:
    """A number that JSON holds; the sign of zero and what is not finite as text."""
    value = x.item()
    if isinstance(value, float) and (not math.isfinite(value) or (value == 0 and math.copysign(1, value) < 0)):
        return repr(value)
    return value  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Errors:
    """Of one candidate against one reference; `first`: the first element outside `atol + rtol·|r|`, else the worst."""

    elements: int
    nonfinite: int
    violations: int
    excess: float
    max_abs: float
    rms: float
    reference_rms: float
    reference_peak: float
    cosine: float
    ulps: Mapping[str, int]
    first: Mapping[str, Any] | None

    def plain(self) -> dict[str, Any]:
        """For a record: relative figures beside the absolute ones."""
        return {
            "elements": self.elements,
            "nonfinite": self.nonfinite,
            "violations": self.violations,
            "excess": number(self.excess),
            "max_abs": number(self.max_abs),
            "rms": number(self.rms),
            "relative_rms": number(_over(self.rms, self.reference_rms)),
            "relative_peak": number(_over(self.max_abs, self.reference_peak)),
            "cosine": number(self.cosine),
            "ulps": dict(self.ulps),
            "first": self.first,
        }


def _over(value: float, scale: float) -> float:
    return value / scale if scale else (0.0 if value == 0 else math.inf)


def number(value: float) -> float | str:
    """As JSON holds it, and as `rlspec.records` writes it: what is not finite as text."""
    return value if math.isfinite(value) else repr(value)


def errors(got: Tensor, want: Tensor, atol: float, rtol: float) -> Errors:
    """Both of one shape, `want` fp32 or fp64. `excess`: the largest |c − r| − (atol + rtol·|r|)."""
    if got.shape != want.shape:
        raise ValueError(f"the result has shape {list(got.shape)}, the reference {list(want.shape)}")
    x, y = got.reshape(-1), want.reshape(-1)
    nonfinite = violations = 0
    excess, peak, first, worst = -math.inf, 0.0, None, (-math.inf, 0)
    sums = torch.zeros(4, dtype=torch.float64, device=got.device)
    ulps = torch.zeros(len(ULPS) + 1, dtype=torch.int64, device=got.device)
    largest = 0.0
    for start in range(0, x.numel(), _CHUNK):
        c, r = x[start : start + _CHUNK].double(), y[start : start + _CHUNK].double()
        gap = (c - r).abs()
        over = gap - (atol + rtol * r.abs())
        wrong = ~(over <= 0)
        found = int(wrong.sum())
        if found and first is None and (atol or rtol):
            first = _element(start + int(wrong.int().argmax()), x, y)
        violations += found
        nonfinite += int((~c.isfinite()).sum())
        ranked = over.nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf)
        top = int(ranked.argmax())
        worst = max(worst, (float(ranked[top]), start + top), key=lambda one: one[0])
        excess = max(excess, float(ranked[top]))
        largest = max(largest, float(gap.nan_to_num(nan=math.inf, posinf=math.inf).max()))
        peak = max(peak, float(r.abs().max()))
        sums += torch.stack(((gap * gap).sum(), (r * r).sum(), (c * c).sum(), (c * r).sum()))
        ulps += _histogram(got.dtype, c, r, gap)
    square, of_r, of_c, product = (float(value) for value in sums)
    count = max(x.numel(), 1)
    return Errors(
        elements=x.numel(),
        nonfinite=nonfinite,
        violations=violations,
        excess=excess,
        max_abs=largest,
        rms=math.sqrt(square / count) if square == square else math.inf,
        reference_rms=math.sqrt(of_r / count),
        reference_peak=peak,
        cosine=product / (math.sqrt(of_r) * math.sqrt(of_c)) if of_r > 0 and of_c > 0 else float(of_r == of_c),
        ulps=dict(zip([*(f"<= {n}" for n in ULPS), "more"], ulps.tolist(), strict=True)),
        first=first if first is not None else _element(worst[1], x, y) if x.numel() else None,
    )


def _histogram(dtype: torch.dtype, got: Tensor, want: Tensor, gap: Tensor) -> Tensor:
    """How many elements are how many units in the last place (of the candidate's dtype, at the reference) off."""
    if not dtype.is_floating_point:
        unit = torch.ones_like(want)
    else:
        info = torch.finfo(dtype)
        exponent = torch.frexp(want.abs().clamp_min(info.tiny)).exponent - 1
        unit = torch.ldexp(torch.full_like(want, info.eps), exponent)
    steps = (gap / unit).round().nan_to_num(nan=math.inf)
    upto = torch.stack([(steps <= edge).sum() for edge in ULPS] + [torch.tensor(steps.numel(), device=got.device)])
    return upto.diff(prepend=upto.new_zeros(1))


def rounding(want: Tensor, dtype: torch.dtype) -> tuple[float, float]:
    """Largest and RMS error of the reference itself once it is rounded to `dtype`."""
    if not dtype.is_floating_point:
        return 0.0, 0.0
    found = errors(want.to(dtype), want, 0.0, 0.0)
    return found.max_abs, found.rms


def wrong_candidates(got: Tensor) -> dict[str, Tensor]:
    """What no accuracy row may pass: nothing at all, the right values in the wrong places, the wrong sign.

    Where all values are equal there are no wrong places, unless they are zero.
    """
    made = {"zero": torch.zeros_like(got), "sign_flipped": -got}
    shuffled = _shuffled(got)
    return made if torch.equal(shuffled, got) and got.any() else {**made, "shuffled": shuffled}


def _shuffled(x: Tensor) -> Tensor:
    return x.roll(1, 0) if x.dim() > 1 and x.shape[0] > 1 else x.reshape(-1).roll(1).reshape(x.shape)
