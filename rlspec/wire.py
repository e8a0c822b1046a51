"""The protocol-buffer wire format, as far as event files and W&B's offline files need it."""

from __future__ import annotations

from collections.abc import Iterator

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


def fields(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Field number, integer value and raw bytes of each field of a message, in order.

    The integer is that of a varint, the bytes are those of any other wire type. ValueError where the message is cut
    off or is none.
    """
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == VARINT:
            value, at = varint(data, at)
            yield number, value, b""
            continue
        if kind == BYTES:
            length, at = varint(data, at)
        elif kind in (FIXED64, FIXED32):
            length = 8 if kind == FIXED64 else 4
        else:
            raise ValueError(f"wire type {kind} at byte {at}")
        if at + length > len(data) or not number:
            raise ValueError(f"field {number} at byte {at} is cut off")
        yield number, 0, data[at : at + length]
        at += length


def varint(data: bytes, at: int) -> tuple[int, int]:
    """An unsigned integer of up to 64 bits in base 128, and where it ends."""
    value = shift = 0
    while shift < 64:
        if at >= len(data):
            raise ValueError(f"a number is cut off at byte {at}")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, at
    raise ValueError(f"no number ends before byte {at}")


def signed(value: int) -> int:
    """An int64 field: two's complement."""
    return value - (1 << 64) if value >> 63 else value


def zigzag(value: int) -> int:
    """An sint64 field: the sign is the lowest bit."""
    return (value >> 1) ^ -(value & 1)
