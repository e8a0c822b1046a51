from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from rlspec.errors import RunError
from rlspec.output import Output, create
from rlspec.progress import LINE


def feed(log: Path, *blocks: bytes) -> tuple[Output, list[bytes]]:
    """The blocks of one command, and the lines that a listener got."""
    lines: list[bytes] = []
    with create(log) as sink:
        output = Output(log, sink, lines.append)
        for block in blocks:
            output.feed(block)
        output.end()
    return output, lines


def test_bad_bytes_colours_and_progress_bars(tmp_path: Path) -> None:
    raw = b"\xff\x00ok\r\n\x1b[31mstep:  4  \x1b[0m\n 1%\r 2%\r 3%\r\x1b[Alast \xc3"
    output, lines = feed(tmp_path / "arm.log", raw)
    assert output.tail() == ("\ufffdok", "step:  4  ", "last \ufffd")
    assert lines == [b"\xff\x00ok", b"\x1b[31mstep:  4  \x1b[0m", b" 1%", b" 2%", b" 3%", b"\x1b[Alast \xc3"]
    assert output.step == 4
    assert (tmp_path / "arm.log").read_bytes() == raw


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_blocks_may_end_anywhere(tmp_path: Path, size: int) -> None:
    raw = b"one\r\ntwo\n\n 1%\r 2%\r\nstep 3/9\nrest"
    output, lines = feed(tmp_path / "arm.log", *(raw[at : at + size] for at in range(0, len(raw), size)))
    assert lines == [b"one", b"two", b" 1%", b" 2%", b"step 3/9", b"rest"]
    assert output.tail() == ("one", "two", " 2%", "step 3/9", "rest")
    assert (tmp_path / "arm.log").read_bytes() == raw


def test_tail_is_the_last_twenty_lines(tmp_path: Path) -> None:
    output, _ = feed(tmp_path / "arm.log", b"".join(b"%d\n" % number for number in range(50)))
    assert output.tail() == tuple(map(str, range(30, 50)))


def test_endless_line_is_logged_and_costs_no_memory(tmp_path: Path) -> None:
    block = b"x" * 2**16
    tracemalloc.start()
    try:
        output, lines = feed(tmp_path / "arm.log", *[block] * 512)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (tmp_path / "arm.log").stat().st_size == 32 * 2**20
    assert [len(line) for line in lines] == [LINE] == [len(line) for line in output.tail()]
    assert peak < 2**20


def test_log_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="cannot write the log .*file/arm.log: "):
        create(tmp_path / "file" / "arm.log")


def test_full_disk_is_said_once_and_lines_are_still_kept(tmp_path: Path) -> None:
    (tmp_path / "arm.log").symlink_to("/dev/full")
    with create(tmp_path / "arm.log") as sink:
        output = Output(tmp_path / "arm.log", sink, None)
        with pytest.raises(RunError, match="cannot write the log .*No space left"):
            output.feed(b"one\n")
        output.feed(b"two\n")
    assert output.tail() == ("two",)
