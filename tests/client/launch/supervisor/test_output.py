"""Lines, tails, log files, and a console that never blocks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from central_storage.launch.supervisor.loop import Loop
from central_storage.launch.supervisor.output import Console, Lines, LogFiles, Tail, prefixed
from cs_proto.errors import ConfigurationError


@pytest.mark.parametrize(
    ("pieces", "lines", "rest"),
    [
        ([b"one\ntwo\n"], ["one", "two"], []),
        ([b"on", b"e", b"\nt"], ["one"], ["t"]),
        ([b"a\r\nb\r", b"\nc\rd"], ["a", "b", "c"], ["d"]),
        ([b"10%\r20%\r"], ["10%"], ["20%"]),
        (["\u00e4\u20ac".encode()[:3], "\u00e4\u20ac".encode()[3:], b"\n"], ["\u00e4\u20ac"], []),
        ([b"\xff\xfe!\n\xe2\x82"], ["\ufffd\ufffd!"], ["\ufffd"]),
        ([b"\n\n"], ["", ""], []),
    ],
)
def test_bytes_become_lines_wherever_they_are_cut(pieces: list[bytes], lines: list[str], rest: list[str]) -> None:
    cutter = Lines()
    assert [line for piece in pieces for line in cutter.feed(piece)] == lines
    assert cutter.finish() == rest
    assert cutter.finish() == []


def test_output_without_line_ends_is_cut_and_loses_nothing() -> None:
    cutter = Lines()
    lines = cutter.feed(b"x" * 100_000)
    assert len(lines) > 10
    assert "".join([*lines, *cutter.finish()]) == "x" * 100_000


def test_the_tail_is_the_last_twenty_lines() -> None:
    tail = Tail()
    tail.add(str(number) for number in range(100))
    tail.add(["y" * 10_000])
    lines = tail.text().splitlines()
    assert lines[:2] == ["81", "82"]
    assert len(lines) == 20
    assert len(lines[-1]) == 500


def test_the_last_line_with_a_prefix() -> None:
    tail = Tail()
    assert tail.last_line_with_prefix("SIGSEGV: ") == ""
    tail.add(["SIGSEGV: one", "SIGSEGV: two", "and SIGSEGV: three", ""])
    assert tail.last_line_with_prefix("SIGSEGV: ") == "SIGSEGV: two"


def test_lines_carry_their_process() -> None:
    assert prefixed("w0", ["a", ""]) == "[w0] a\n[w0] \n"


def test_log_files_hold_everything(tmp_path: Path) -> None:
    logs = LogFiles.under(str(tmp_path / "logs"), "/run/cs-01234567")
    logs.write("w0", ["one"])
    logs.write("server", ["s"])
    logs.write("w0", ["two"])
    logs.close()
    directory = tmp_path / "logs" / "cs-01234567"
    assert logs.directory == str(directory)
    assert (directory / "w0.log").read_text() == "one\ntwo\n"
    assert (directory / "server.log").read_text() == "s\n"


def test_log_files_that_cannot_be(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=f"cannot be written to {tmp_path}/file/x: Not a directory"):
        LogFiles(str(tmp_path / "file" / "x"))
    logs = LogFiles(str(tmp_path / "logs"))
    (tmp_path / "logs" / "w0.log").mkdir()
    logs.write("w0", ["lost"])
    logs.write("w0", ["lost too"])
    logs.close()
    assert [record.getMessage() for record in caplog.records] == [
        f"nothing more is written to {tmp_path}/logs/w0.log: Is a directory"
    ]


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    for descriptor in (reader, writer):
        os.close(descriptor)


def test_a_console_that_nobody_reads_is_full_and_then_has_room(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    loop = Loop()
    console = Console(loop, {"stdout": writer, "stderr": writer})
    rooms: list[bool] = []
    console.on_room = lambda: rooms.append(console.full)
    text = "".join(f"line {number}\n" for number in range(40_000))
    console.write("stdout", text)
    for _ in range(1000):  # far more than the pipe takes: this ends, since no write blocks
        loop.turn(0)
    assert console.full
    assert not rooms
    read = bytearray()
    while len(read) < len(text):
        read += os.read(reader, 1 << 16)
        for _ in range(100):
            loop.turn(0)
    assert read.decode() == text
    assert console.empty
    assert rooms == [False]


def test_a_console_whose_reader_has_gone_is_empty() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    loop = Loop()
    console = Console(loop, {"stdout": writer, "stderr": writer})
    console.write("stdout", "to nobody\n")
    loop.turn(1.0)
    assert console.empty
    os.close(writer)


def test_a_console_may_be_a_file(tmp_path: Path) -> None:
    with open(tmp_path / "out", "wb") as file:
        loop = Loop()
        console = Console(loop, {"stdout": file.fileno(), "stderr": file.fileno()})
        console.write("stderr", "ä" * 10_000)
        while not console.empty:
            loop.turn(1.0)
    assert (tmp_path / "out").read_text() == "ä" * 10_000
