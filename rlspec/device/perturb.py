"""The smallest change that the weights can hold: what it grows into is the floor of a bit-reproducible stack."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rlspec.device.decoder import Decoder


def apply(model: Decoder, asked: Mapping[str, Any]) -> None:
    """`asked` as an arm says it: {weights: 1ulp, seed: 1}. Raises ValueError for any other kind."""
    if asked.get("weights") != "1ulp":
        raise ValueError(f"perturb: weights are moved by 1ulp, not by {asked.get('weights')!r}")
    one_ulp(model, asked["seed"])


def one_ulp(model: Decoder, seed: int) -> None:
    """Move every fp32 parameter to the next number above or below, as `seed` tosses; the same on every device and mesh.

    Raises ValueError for parameters of another dtype: next to bf16 values, rounding-level faults would disappear.
    """
    wrong = sorted({str(p.dtype) for p in model.parameters()} - {"torch.float32"})
    if wrong:
        raise ValueError(f"perturb: 1ulp moves fp32 master weights; these are {', '.join(wrong)}: master_dtype: fp32")
    generator = torch.Generator("cpu").manual_seed(seed)
    with torch.no_grad():
        for _, shape, parameter, rows in model.laid_out():
            up = torch.randint(0, 2, shape, generator=generator, dtype=torch.bool)
            if parameter is not None:
                towards = torch.where(up[rows], torch.inf, -torch.inf).to(parameter)
                parameter.copy_(torch.nextafter(parameter, towards))
