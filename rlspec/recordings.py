"""Binary files that trainers leave beside their logs: TensorBoard's event files, W&B's offline files.

Both are records with checksums around protocol buffers. A record that is cut off at the end of a file is what a killed
run leaves: it is noted, and the missing steps are for the judgment. A checksum that does not match is a fault.
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlspec.errors import SpecError
from rlspec.formats import BadLine, Format, Line
from rlspec.printed import Token
from rlspec.wire import fields, signed, zigzag

_POLYNOMIAL = 0x82F63B78  # CRC-32C (Castagnoli), bits reversed
_MASK = 0xA282EAD8
_WANDB_BLOCK = 32768
_WANDB_HEADER = 7  # bytes, of the file and of each chunk
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_FLOAT, _DOUBLE = 1, 2  # DataType of a TensorProto


class Recording(Format):
    """A format of whole files, not of text lines. `lines` yields the values in the order of the file."""

    stripped = True

    def __init__(self) -> None:
        self._notes: list[str] = []

    def parse(self, text: str) -> Line | None:
        return None

    @abstractmethod
    def files(self, path: Path) -> Sequence[Path]:
        """The files that a folder, or the only one below it, stands for. SpecError where it is not clear which."""

    @abstractmethod
    def lines(self, path: Path) -> Iterator[Line]:
        """The values of a file or of the files of a folder. Raises BadLine where a record is damaged, OSError."""

    def notes(self) -> list[str]:
        return self._notes


def crc32c(data: bytes) -> int:
    """The checksum of TensorBoard's records."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def masked(crc: int) -> int:
    """As stored beside the data, so that a checksum of data that holds checksums says something."""
    return (((crc >> 15) | (crc << 17)) + _MASK) & 0xFFFFFFFF


def _entry(byte: int) -> int:
    for _ in range(8):
        byte = (byte >> 1) ^ (_POLYNOMIAL if byte & 1 else 0)
    return byte


_TABLE = tuple(_entry(byte) for byte in range(256))


class EventFiles(Recording):
    """TensorBoard's `events.out.tfevents.*`: scalars by tag, as float32, at the step that the trainer gave."""

    float32 = True

    def recognises(self, head: str) -> bool:
        return "brain.Event:" in head

    def files(self, path: Path) -> Sequence[Path]:
        if not path.is_dir():
            return [path]
        folders = sorted({file.parent for file in path.rglob("*tfevents*")})
        if len(folders) != 1 and path not in folders:
            named = f", but {len(folders)} folders with some: name one, such as {folders[0]}" if folders else ""
            raise SpecError(f"{path} holds no event file (*tfevents*){named}")
        found = sorted((path if path in folders else folders[0]).glob("*tfevents*"))
        if len(found) > 1:
            self._notes.append(f"{len(found)} event files of one folder are read as one run")
        return found

    def lines(self, path: Path) -> Iterator[Line]:
        for file in self.files(path):
            for number, record in enumerate(self._records(file)):
                try:
                    yield from _scalars(record)
                except (ValueError, struct.error) as error:
                    raise BadLine("*", f"record {number} of {file.name} is no event: {error}") from error

    def _records(self, file: Path) -> Iterator[bytes]:
        with file.open("rb") as stream:
            number = 0
            while head := stream.read(12):
                size = struct.unpack("<Q", head[:8])[0] if len(head) == 12 else 0
                if len(head) == 12 and struct.unpack("<I", head[8:])[0] != masked(crc32c(head[:8])):
                    what = "has a damaged length" if number else "is no event file"
                    raise BadLine("*", f"{file.name} {what} (the checksum of record {number} does not match)")
                body = stream.read(size + 4) if len(head) == 12 else b""
                if len(body) < size + 4 or len(head) < 12:
                    self._notes.append(f"{file.name} ends within record {number}: the writer was cut off")
                    return
                if struct.unpack("<I", body[size:])[0] != masked(crc32c(body[:size])):
                    raise BadLine("*", f"record {number} of {file.name} is damaged: its checksum does not match")
                yield body[:size]
                number += 1


def _scalars(event: bytes) -> Iterator[Line]:
    """The scalar values of one Event message: `step` is field 2, `summary` field 5, whose field 1 repeats."""
    step, values = 0, []
    for number, integer, raw in fields(event):
        if number == 2:
            step = signed(integer)
        elif number == 5:
            values += [_tagged(value) for key, _, value in fields(raw) if key == 1]
    for tag, value in values:
        if value is not None:
            yield Line(str(step), {tag: Token(repr(value))})


def _tagged(value: bytes) -> tuple[str, float | None]:
    """Tag and scalar of a Summary.Value: `tag` 1, `simple_value` 2, `tensor` 8; None for images and the like."""
    tag, scalar = "", None
    for number, _, raw in fields(value):
        if number == 1:
            tag = raw.decode("utf-8", "replace")
        elif number == 2:
            scalar = struct.unpack("<f", raw)[0]
        elif number == 8:
            scalar = _tensor(raw)
    return tag, scalar


def _tensor(proto: bytes) -> float | None:
    """The value of a TensorProto of one element: `dtype` 1, `tensor_content` 4, `float_val` 5, `double_val` 6."""
    dtype, content = 0, b""
    for number, integer, raw in fields(proto):
        if number == 1:
            dtype = integer
        elif number in (4, 5, 6):
            content = raw
    letter = {_FLOAT: "<f", _DOUBLE: "<d"}.get(dtype, "")
    if not letter or len(content) != struct.calcsize(letter):
        return None
    return float(struct.unpack(letter, content)[0])


class WandbFiles(Recording):
    """W&B's `run-<id>.wandb`, written online and offline: LevelDB's log framing around protocol buffers.

    The step is W&B's own, which counts from 0 unless the trainer gives one.
    """

    def recognises(self, head: str) -> bool:
        return head.startswith(":W&B")

    def files(self, path: Path) -> Sequence[Path]:
        if not path.is_dir():
            return [path]
        found = sorted(path.rglob("run-*.wandb"))  # W&B puts wandb/offline-run-…/ below the folder that it is given
        if len(found) != 1:
            names = [file.relative_to(path).as_posix() for file in found]
            named = f": name one of {', '.join(names)}" if found else ""
            raise SpecError(f"{path} holds {len(found) or 'no'} files run-*.wandb{named}")
        return found

    def lines(self, path: Path) -> Iterator[Line]:
        (file,) = self.files(path)
        for number, record in enumerate(self._records(file)):
            try:
                for key, _, history in fields(record):
                    if key == 2:
                        yield _history(history)
            except ValueError as error:
                raise BadLine("*", f"record {number} of {file.name} is no history: {error}") from error

    def _records(self, file: Path) -> Iterator[bytes]:
        raw = file.read_bytes()
        if raw[:4] != b":W&B":
            raise BadLine("*", f"{file.name} is no file of W&B")
        at, kept = _WANDB_HEADER, b""
        while at < len(raw):
            left = _WANDB_BLOCK - at % _WANDB_BLOCK
            if left < _WANDB_HEADER:
                at += left
                continue
            if at + _WANDB_HEADER > len(raw):
                break
            checksum, length, kind = struct.unpack("<IHB", raw[at : at + _WANDB_HEADER])
            if kind == 0:
                if any(raw[at : at + left]):
                    raise BadLine("*", f"{file.name} is damaged at byte {at}: a record of no kind")
                at += left  # the writer filled up its block
                continue
            body = raw[at + _WANDB_HEADER : at + _WANDB_HEADER + length]
            if len(body) < length:
                break
            if zlib.crc32(body, zlib.crc32(bytes([kind]))) != checksum:
                raise BadLine("*", f"{file.name} is damaged at byte {at}: a checksum does not match")
            at += _WANDB_HEADER + length
            kept = body if kind in (_FULL, _FIRST) else kept + body
            if kind in (_FULL, _LAST):
                yield kept
                kept = b""
        if at < len(raw) or kept:
            self._notes.append(f"{file.name} ends within a record: the run was cut off")


def _history(message: bytes) -> Line:
    """One step: `item` 1 repeats, `step` 2 holds its number. Numbers of items that are no scalars are left out."""
    step, values = "0", dict[str, str | None]()
    for number, _, raw in fields(message):
        if number == 1:
            name, value = _item(raw)
            if name == "_step" and value is not None:
                step = value
            elif value is not None and not name.startswith("_"):
                values[name] = value
        elif number == 2:
            step = next((str(signed(integer)) for key, integer, _ in fields(raw) if key == 1), step)
    return Line(step, values)


def _item(raw: bytes) -> tuple[str, str | None]:
    """Name and number of a HistoryItem: `key` 1 or `nested_key` 2, `integer` 5, `number` 6, or `value_json` 16."""
    keys, value = list[str](), None
    for number, integer, body in fields(raw):
        if number in (1, 2) and body:
            keys.append(body.decode("utf-8", "replace"))
        elif number == 5:
            value = str(zigzag(integer))
        elif number == 6:
            value = repr(struct.unpack("<d", body)[0])
        elif number in (7, 8, 16):
            value = _json_number(body.decode("utf-8", "replace"))
    return "/".join(keys), None if value is None else Token(value)


def _json_number(text: str) -> str | None:
    found = json.loads(text, parse_float=Token, parse_int=Token, parse_constant=Token) if text else None
    if isinstance(found, Token):
        return found
    odd = isinstance(found, str) and re.fullmatch(r"-?(?:nan|inf|infinity)", found, re.IGNORECASE)
    return str(found) if odd else None
