"""Weights of a decoder: seeded, or from safetensors files that are checked before anything is allocated for them.

Seeded. The value of an element is a pure function of (seed, name of the parameter, flat index): N(0, 0.02) from
`rlspec.device.fills`, which is a sum of four uniforms and ends at 3.45 deviations; o and down ÷ √(2·layers); norms
1 + N(0, 1)·2⁻⁶. It is computed in fp32 of whole numbers and rounded to bf16 as published weights are, so a device,
a dtype of the masters that holds bf16, and the other parameters do not move a bit.

Files. What `rlspec.device.weight_files` has nothing against; then every parameter exactly once, in its shape and in a
dtype that the masters hold, and nothing else. Nothing is rounded, tied or left out in silence.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rlspec.architecture import Architecture
from rlspec.device import comparing, fills, weight_files
from rlspec.device.decoder import Decoder

DEVIATION = 0.02
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def seeded(decoder: Decoder, seed: int) -> None:
    """Fill all parameters where they are. Raises ValueError for a seed outside 32 bits and for a decoder on meta."""
    if not 0 <= seed < 1 << 32:
        raise ValueError(f"seed {seed} must be 0 to 2^32 - 1")
    into_stream = DEVIATION / math.sqrt(2 * decoder.architecture.num_hidden_layers)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if parameter.is_meta:
                raise ValueError(f"{name} is on meta: there is nothing to fill")
            key = zlib.crc32(name.encode())
            made = fills.parameter("hashed", seed, parameter.shape, key, parameter.device, torch.float32)
            if parameter.dim() == 1:
                made.mul_(2**-6).add_(1)
            else:
                made.mul_(into_stream if "o_proj" in name or "down_proj" in name else DEVIATION)
            parameter.copy_(made.bfloat16())


def fingerprint(decoder: Decoder) -> str:
    """SHA-256 over the lines "name TAB fingerprint NEWLINE" of all parameters in order; their dtype counts."""
    whole = hashlib.sha256()
    for name, parameter in decoder.named_parameters():
        whole.update(f"{name}\t{comparing.fingerprint(parameter.detach())}\n".encode())
    return whole.hexdigest()


def load(
    decoder: Decoder, folder: str | Path, pins: Mapping[str, Any], *, device: torch.device | str | None = None
) -> None:
    """Fill all parameters from the files of `folder`, once nothing is found against them.

    `pins`: keys as of `weight_files.measure`. A decoder that was built on meta is allocated on `device` after that.
    Names are those of transformers; the experts of a layer may be one tensor, as here, or one each.
    Raises ValueError with everything that is wrong.
    """
    embedding = decoder.get_parameter(_EMBEDDING)
    if embedding.is_meta != (device is not None):
        raise ValueError("a decoder on meta is loaded to a device, and any other where it is")
    folder = Path(folder)
    weight_files.verify(folder, pins)
    files, plan = check(decoder.architecture, folder, pins, embedding.dtype)
    if device is not None:
        decoder.to_empty(device=device)
    with torch.no_grad():
        for source in plan:
            target = decoder.get_parameter(source.parameter)[source.where]
            target.copy_(files[source.name].to(target.device))  # as it is stored, then widened there


def check(
    model: Architecture, folder: Path, pins: Mapping[str, Any], master: torch.dtype
) -> tuple[weight_files.Files, list[Source]]:
    """The files of `folder`, and which of their tensors goes where, if they hold the model's parameters and no more.

    Raises ValueError with every tensor that is missing, unknown, of another shape or tied otherwise than the model.
    """
    files = weight_files.Files(folder, weight_files.entries(folder, pins["shards"]))
    plan = _plan(model, files.entries, master, folder)
    _check_tie(model, files, folder)
    return files, plan


class Source(NamedTuple):
    """A tensor of the files that fills `parameter[where]`."""

    name: str
    shape: tuple[int, ...]
    parameter: str
    where: tuple[int | slice, ...]


def _plan(
    model: Architecture, entries: Mapping[str, weight_files.Entry], master: torch.dtype, folder: Path
) -> list[Source]:
    """Which tensor goes where, so that each parameter is filled once."""
    plan, problems, narrow = [], [], []
    for parameter, shape in model.parameter_shapes().items():
        whole = Source(parameter, shape, parameter, ())
        split = [] if parameter in entries else _of_experts(parameter, shape)
        plan += split if any(source.name in entries for source in split) else [whole]
    for source in plan:
        entry = entries.get(source.name)
        if entry is None:
            untied = ", and this model does not tie its head" if source.name == _HEAD else ""
            problems.append(f"{source.name} is missing{untied}")
        elif entry.shape != source.shape:
            problems.append(f"{source.name} is {list(entry.shape)}, not {list(source.shape)}")
        elif torch.promote_types(entry.dtype, master) != master:
            narrow.append(f"{source.name} is {entry.dtype}")
    if narrow:
        others = f", and so are {len(narrow) - 1} others" if len(narrow) > 1 else ""
        problems.append(f"{narrow[0]} and would be rounded to {master}{others}; `dtype: fp32` takes them as they are")
    used = {source.name for source in plan}
    used |= {_HEAD} if model.tie_word_embeddings else set()  # some files hold it all the same, see `_check_tie`
    problems += [f"{name} is no parameter of this model, or stands there twice" for name in entries if name not in used]
    weight_files.refuse(folder, problems)
    return plan


def _of_experts(parameter: str, shape: Sequence[int]) -> list[Source]:
    """The names that files with one tensor an expert have for a fused parameter; none for any other."""
    prefix, _, name = parameter.rpartition(".")
    if name == "down_proj":
        return [Source(f"{prefix}.{e}.down_proj.weight", tuple(shape[1:]), parameter, (e,)) for e in range(shape[0])]
    if name != "gate_up_proj":
        return []
    half = shape[1] // 2
    return [
        Source(f"{prefix}.{e}.{part}_proj.weight", (half, shape[2]), parameter, (e, place))
        for e in range(shape[0])
        for part, place in (("gate", slice(half)), ("up", slice(half, None)))
    ]


def _check_tie(model: Architecture, files: weight_files.Files, folder: Path) -> None:
    """The head is the embedding, to the bit, if and only if the model says so."""
    if _HEAD not in files.entries:
        return
    equal = comparing.identical(files[_HEAD], files[_EMBEDDING])
    if equal and not model.tie_word_embeddings:
        weight_files.refuse(folder, [f"{_HEAD} is {_EMBEDDING} to the bit, and this model does not tie them"])
    if model.tie_word_embeddings and not equal:
        weight_files.refuse(folder, [f"{_HEAD} is not {_EMBEDDING}, and this model ties them"])
