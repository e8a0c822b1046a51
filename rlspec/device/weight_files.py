"""Files of weights: what they must be (pins), where in them each tensor is, and its bytes.

`model.safetensors`, or shards and the index that says which tensor is in which. A file is a u64 length, a JSON header
(tensor -> dtype, shape, first and last byte), then the bytes, little-endian, without gaps.
Format: https://huggingface.co/docs/safetensors.

`python -m rlspec.device.weight_files FOLDER` prints the pins of files that you trust, as
`specs/models/pins/NAME.yaml` holds them.

Everything that is wrong is a ValueError that names folder, file and tensor. Nothing is downloaded, and files are mapped
into memory: nothing is allocated for them.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import reprlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHOWN = 8  # problems in a message
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


# Pins: what the files must be


def measure(folder: str | Path) -> dict[str, Any]:
    """The pins of files as they are. Raises ValueError for files that are not there, and for an index that is none.

    `index_sha256`: None where there is one file and no index. `shards`: file -> `sha256`, `bytes`. `content_hash`.
    """
    folder = Path(folder)
    indexed = (folder / INDEX).is_file()
    names = sorted(set(_weight_map(folder).values())) if indexed else [SINGLE]
    problems = [f"{name} is missing" for name in names if not (folder / name).is_file()]
    if problems == [f"{SINGLE} is missing"] and not indexed and any(folder.glob("model-?????-of-?????.safetensors")):
        problems = [f"{INDEX} is missing, which says what is in which of the shards"]
    if SINGLE not in names and (folder / SINGLE).is_file():  # transformers would load it, and leave the shards alone
        problems.append(f"{SINGLE} is beside {INDEX}, which does not name it: remove one of the two")
    refuse(folder, problems)
    with ThreadPoolExecutor() as pool:
        hashes = pool.map(_sha256, [folder / name for name in names])
    sizes = [(folder / name).stat().st_size for name in names]
    shards = {name: {"sha256": sha, "bytes": size} for name, sha, size in zip(names, hashes, sizes, strict=True)}
    index = _sha256(folder / INDEX) if indexed else None
    return {"index_sha256": index, "shards": shards, "content_hash": content_hash(shards)}


def content_hash(shards: Mapping[str, Mapping[str, Any]]) -> str:
    """SHA-256 over the sorted lines "file TAB sha256 TAB bytes NEWLINE"."""
    lines = sorted(f"{name}\t{pin['sha256']}\t{pin['bytes']}\n" for name, pin in shards.items())
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def written(pins: Mapping[str, Any]) -> str:
    """Pins as a file of `specs/models/pins/` holds them."""
    lines = [f"index_sha256: {pins['index_sha256'] or 'null'}", "shards:"]
    for name, pin in pins["shards"].items():
        lines += [f"  {name}:", f"    sha256: {pin['sha256']}", f"    bytes: {pin['bytes']}"]
    return "\n".join([*lines, f"content_hash: {pins['content_hash']}"]) + "\n"


def verify(folder: str | Path, pins: Mapping[str, Any]) -> None:
    """Raise ValueError with each way in which the files differ from the pins (keys as of `measure`).

    Hashes may be written in upper case.
    """
    missing = [key for key in ("index_sha256", "shards", "content_hash") if key not in pins]
    if missing:
        raise ValueError(f"the pins have no {' and no '.join(missing)}")
    folder = Path(folder)
    shards = {name: {**pin, "sha256": pin["sha256"].lower()} for name, pin in pins["shards"].items()}
    pinned_index, pinned_content = pins["index_sha256"] and pins["index_sha256"].lower(), pins["content_hash"].lower()
    problems = []
    for name, pin in shards.items():
        size = (folder / name).stat().st_size if (folder / name).is_file() else None
        if size is None:
            problems.append(f"{name} is missing")
        elif size != pin["bytes"]:
            problems.append(f"{name} has {size} bytes, not {pin['bytes']}")
    index = _sha256(folder / INDEX) if (folder / INDEX).is_file() else None
    if index is None and pinned_index:
        problems.append(f"{INDEX} is missing")
    elif index and not pinned_index:
        problems.append(f"{INDEX} is there, and none is pinned")
    elif index != pinned_index:
        problems.append(f"{INDEX} has the SHA-256 {index}, not {pinned_index}")
    refuse(folder, problems)  # what is cheap to see, before all is hashed
    found = measure(folder)
    for name in sorted({*found["shards"], *shards}):
        if name not in shards or name not in found["shards"]:
            problems.append(f"{name} is {'not pinned' if name not in shards else 'not in the index'}")
        elif found["shards"][name]["sha256"] != shards[name]["sha256"]:
            problems.append(f"{name} has the SHA-256 {found['shards'][name]['sha256']}, not {shards[name]['sha256']}")
    if found["content_hash"] != pinned_content:
        problems.append(f"the content hash is {found['content_hash']}, not {pinned_content}")
    refuse(folder, problems)


def _sha256(path: Path) -> str:
    whole = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            whole.update(block)
    return whole.hexdigest()


def _weight_map(folder: Path) -> dict[str, str]:
    """Tensor -> file, as the index says."""
    found = _json(INDEX, (folder / INDEX).read_bytes()).get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
        raise ValueError(f"{INDEX} has no weight_map of tensors to files")
    return found


def _json(file: str, text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text, object_pairs_hook=_once)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    except RecursionError:
        raise ValueError(f"{file}: nested too deep") from None
    if not isinstance(found, dict):
        raise ValueError(f"{file}: not a JSON object")
    return found


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"{next(key for key in keys if keys.count(key) > 1)} stands there twice")
    return made


def refuse(folder: Path, problems: Sequence[str]) -> None:
    """Raise ValueError with the first problems, if there are any."""
    if problems:
        more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise ValueError(f"the weights in {folder} are refused: " + "; ".join(problems[:SHOWN]) + more)


# Headers: where each tensor is


class Entry(NamedTuple):
    """A tensor in a file; `start` counts the bytes from the start of the file."""

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


def entries(folder: Path, files: Iterable[str]) -> dict[str, Entry]:
    """All tensors of the files by name."""
    found: dict[str, Entry] = {}
    problems = []
    for file in files:
        for name, entry in _header(folder / file).items():
            if name in found:
                problems.append(f"{name} is in {found[name].file} and in {file}")
            found[name] = entry
    if (folder / INDEX).is_file():
        listed, held = _weight_map(folder), {name: entry.file for name, entry in found.items()}
        for name in sorted({*listed, *held}):
            if listed.get(name) != held.get(name):
                problems.append(
                    f"{name} is in {held.get(name, 'no file')}, the index says {listed.get(name, 'nothing')}"
                )
    refuse(folder, problems)
    return found


def _header(path: Path) -> dict[str, Entry]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(f"{path.name}: a header of {length} bytes does not fit into {size}")
        header = _json(path.name, file.read(length))
    header.pop("__metadata__", None)
    told = sorted((_told(path.name, name, one) for name, one in header.items()), key=lambda one: one[3:])
    entries, end = {}, 0
    for name, code, shape, start, stop in told:
        dtype = _DTYPES[code]
        if start != end or stop - start != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{path.name}: {name} {list(shape)} does not fill its bytes {start} to {stop} after {end}")
        entries[name], end = Entry(path.name, dtype, shape, 8 + length + start), stop
    if end != size - 8 - length:
        raise ValueError(f"{path.name}: the tensors end at byte {end} of {size - 8 - length}")
    return entries


def _told(file: str, name: str, one: Any) -> tuple[str, str, tuple[int, ...], int, int]:
    """Name, dtype, shape, first and last byte of a header's entry, as it says."""
    if not isinstance(one, dict):
        raise ValueError(f"{file}: the header's entry {name} is {reprlib.repr(one)}, not a mapping")
    if missing := [key for key in ("dtype", "shape", "data_offsets") if key not in one]:
        raise ValueError(f"{file}: the header's entry {name} has no {' and no '.join(missing)}")
    code, shape, offsets = one["dtype"], one["shape"], one["data_offsets"]
    if not isinstance(code, str) or code not in _DTYPES:
        shown = code if isinstance(code, str) else reprlib.repr(code)
        raise ValueError(f"{file}: {name} is {shown:.60}, and only {', '.join(_DTYPES)} are read")
    if not _counts(shape):
        raise ValueError(f"{file}: the shape of {name} is {reprlib.repr(shape)}, not a list of whole numbers from 0")
    if not _counts(offsets) or len(offsets) != 2:
        shown = reprlib.repr(offsets)
        raise ValueError(f"{file}: the data_offsets of {name} are {shown}, not two whole numbers from 0")
    return name, code, tuple(shape), offsets[0], offsets[1]


def _counts(given: Any) -> bool:
    return isinstance(given, list) and all(type(one) is int and one >= 0 for one in given)


# Bytes


class Files:
    """The tensors of the files, mapped into memory and never written."""

    def __init__(self, folder: Path, entries: Mapping[str, Entry]) -> None:
        self.entries = entries
        self.maps = {}
        for name in {entry.file for entry in entries.values()}:
            with (folder / name).open("rb") as file:
                self.maps[name] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def __getitem__(self, name: str) -> Tensor:
        file, dtype, shape, start = self.entries[name]
        flat = torch.frombuffer(self.maps[file], dtype=dtype, count=math.prod(shape), offset=start)
        return flat.view(shape)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m rlspec.device.weight_files FOLDER")
    try:
        print(written(measure(sys.argv[1])), end="")
    except ValueError as error:
        sys.exit(f"error: {error}")
