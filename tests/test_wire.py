from __future__ import annotations

import pytest

from rlspec import wire
from tests.recorded import message, number


def test_fields_of_every_wire_type():
    data = b"\x08" + number(300) + b"\x11" + bytes(range(8)) + message(3, b"abc") + b"\x25" + b"wxyz"
    assert list(wire.fields(data)) == [(1, 300, b""), (2, 0, bytes(range(8))), (3, 0, b"abc"), (4, 0, b"wxyz")]
    assert list(wire.fields(b"")) == []


def test_signs():
    assert wire.signed(wire.varint(number(-3), 0)[0]) == -3 and wire.signed(7) == 7
    assert [wire.zigzag(value) for value in (0, 1, 2, 3, 4)] == [0, -1, 1, -2, 2]


@pytest.mark.parametrize("data", [b"\x08", b"\x08\x80", b"\x0a\x05abc", b"\x15abc", b"\x0b", b"\x02\x00", b"\x80" * 11])
def test_what_is_cut_off_or_no_message_is_refused(data):
    with pytest.raises(ValueError, match="byte"):
        list(wire.fields(data))
