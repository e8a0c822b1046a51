"""Event files as TensorBoard's format says, written by hand."""

from __future__ import annotations

import struct
from pathlib import Path

from rlspec.recordings import crc32c, masked


def number(value):
    """A varint; a negative int64 is its two's complement."""
    value &= 0xFFFF_FFFF_FFFF_FFFF
    out = b""
    while value >= 0x80:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def message(key, body):
    return number(key << 3 | 2) + number(len(body)) + body


def scalar(tag, value):
    return message(1, message(1, tag.encode()) + b"\x15" + struct.pack("<f", value))


def event(step, *values):
    return b"\x09" + struct.pack("<d", 1.7e9) + (b"\x10" + number(step) if step else b"") + message(5, b"".join(values))


def record(data):
    head = struct.pack("<Q", len(data))
    return head + struct.pack("<I", masked(crc32c(head))) + data + struct.pack("<I", masked(crc32c(data)))


VERSION = record(b"\x09" + struct.pack("<d", 1.7e9) + message(3, b"brain.Event:2"))


def write_events(path: Path, rows, tags=("loss_metrics/global_avg_loss", "grad_norm")):
    """An event file with one event a step and tag, as torch's SummaryWriter makes it."""
    single = ((step, tag, value) for step, values in rows for tag, value in zip(tags, values, strict=True))
    events = [record(event(step, scalar(tag, value))) for step, tag, value in single]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(VERSION + b"".join(events))
    return path
