"""Lines, tails, log files, and a console that never blocks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from central_storage.launch.supervisor.loop import Loop
from central_storage.launch.supervisor.output import Console, Lines, LogFiles, Screen, Tail
from cs_proto.errors import ConfigurationError


@pytest.mark.parametrize(
    ("pieces", "lines", "rest"),
    [
        ([b"one\ntwo\n"], ["one", "two"], []),
        ([b"on", b"e", b"\nt"], ["one"], ["t"]),
        ([b"a\r\nb\r", b"\nc\rd"], ["a", "b", "c\r"], ["d"]),
        ([b"a\r\r\nb\r", b"\r", b"\n"], ["a", "b"], []),
        ([b"10%\r20%\r"], ["10%\r"], ["20%"]),
        ([b"\r10%", b"\r20%", b"\n"], ["10%\r", "20%"], []),
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


def test_a_line_that_has_begun_is_drawn_once_and_comes_again_as_a_whole() -> None:
    cutter = Lines()
    assert cutter.feed(b"load") == []
    assert [cutter.flush(), cutter.flush()] == [["load\r"], []]
    assert cutter.feed(b"ing") == []
    assert cutter.flush() == ["loading\r"]
    assert cutter.feed(b"\r50%") == []
    assert cutter.flush() == ["50%\r"]
    assert cutter.feed(b"\nover\n") == ["50%", "over"]


class Shown:
    """A sink that keeps what it is given."""

    full = False

    def __init__(self) -> None:
        self.on_room: Callable[[], None] = lambda: None
        self.text = ""

    def write(self, stream: str, text: str) -> None:
        self.text += text


def test_lines_carry_their_process() -> None:
    sink = Shown()
    Screen(sink).write("stdout", "w0", ["a", ""])
    assert sink.text == "[w0] a\n[w0] \n"


def test_a_progress_bar_is_drawn_in_one_line_that_other_lines_leave_whole() -> None:
    sink = Shown()
    screen = Screen(sink)
    screen.write("stderr", "w0", ["10%\r", "20%\r"])
    screen.write("stderr", "w1", ["5\r"])  # over that of the other replica
    screen.write("stdout", "w0", ["a line"])
    screen.write("stderr", "w1", ["7\r"])
    screen.write("stderr", "w1", ["100%"])
    bars = "[w0] 10%\r[w0] 20%\r[w1] 5  \r"
    assert sink.text == f"{bars}\n[w0] a line\n[w1] 7\r[w1] 100%\n"


def test_what_is_drawn_over_is_in_no_file_and_in_no_report(tmp_path: Path) -> None:
    tail, logs = Tail(), LogFiles(str(tmp_path))
    tail.add(["10%\r", "done"])
    logs.write("w0", ["10%\r", "done"])
    logs.close()
    assert [tail.text(), (tmp_path / "w0.log").read_text()] == ["done", "done\n"]


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


def test_log_files_outlive_a_run_directory_beside_them(tmp_path: Path) -> None:
    """As with CS_LOG_DIR=/tmp, where a run directory is made, too."""
    (tmp_path / "cs-01234567").mkdir()
    (tmp_path / "link").symlink_to(tmp_path)
    for parent in (tmp_path, tmp_path / "link"):
        logs = LogFiles.under(str(parent), str(tmp_path / "cs-01234567"))
        assert os.path.samefile(logs.directory, tmp_path / "cs-01234567-logs")


def test_a_pipe_in_the_place_of_a_log_file_holds_up_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logs = LogFiles(str(tmp_path))
    os.mkfifo(tmp_path / "w0.log")
    logs.write("w0", ["lost"])
    logs.close()
    assert f"nothing more is written to {tmp_path}/w0.log" in caplog.text


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
