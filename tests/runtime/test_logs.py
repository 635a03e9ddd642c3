"""Log lines: nothing in them steers a terminal, peers cannot flood them, and their files are private."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from cs_proto import records
from cs_proto.errors import ConfigurationError
from cs_proto.messages import Value
from cs_runtime.logs import Complaints, Formatter, MessagesFile, asked_level

LOG = logging.getLogger("central_storage.test_logs")


@pytest.fixture(autouse=True)
def no_bytes() -> Iterator[None]:
    yield
    records.show_bytes(False)


def line_of(message: str, *values: object, error: BaseException | None = None) -> str:
    trace = None if error is None else (type(error), error, error.__traceback__)
    return Formatter().format(logging.LogRecord("log", logging.WARNING, "file", 1, message, values, trace))


def test_a_line_steers_no_terminal_and_looks_like_no_other() -> None:
    line = line_of("w %s", "\x1b[2J\x9b\u202e\n[server] ready")
    assert line.endswith(" log: w \\x1b[2J\\x9b\\u202e\n    [server] ready")
    error = line_of("w", error=ValueError("\x1b[2J\n[server] ready"))
    assert error.endswith("ValueError: \\x1b[2J\n    [server] ready")


def test_only_the_owner_may_read_the_file_of_messages(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        file = MessagesFile(str(tmp_path / "made"), "server")
    finally:
        os.umask(before)
    file.emit(logging.LogRecord("log", logging.WARNING, "file", 1, "a \udce4", (), None))
    file.close()
    path = tmp_path / "made" / f"server.{os.getpid()}.messages"
    assert path.read_text().endswith("a \\udce4\n")
    assert [stat.S_IMODE(each.stat().st_mode) for each in (path.parent, path)] == [0o700, 0o600]


def test_bytes_are_shown_only_if_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    value = Value(b"hunter2", ())
    assert repr(value) == "Value(body=<7 bytes>, arrays=())"
    monkeypatch.setenv("CS_LOG_VALUES", "on")
    monkeypatch.setenv("CS_LOG", "error")
    assert asked_level(logging.WARNING) == logging.ERROR
    assert repr(value) == "Value(body=b'hunter2', arrays=())"
    monkeypatch.setenv("CS_LOG_VALUES", "of")
    with pytest.raises(ConfigurationError, match="CS_LOG_VALUES must be on or off, not 'of'"):
        asked_level(logging.WARNING)


def test_a_peer_gets_one_line_a_second_and_all_get_four(caplog: pytest.LogCaptureFixture) -> None:
    now = [100.0]
    complaints = Complaints(LOG, lambda: now[0])
    for number in range(1000):
        complaints.warn(b"x", "refused %d", number)
    assert caplog.messages == ["refused 0"]
    for number in range(100_000):
        complaints.warn(number, "refused %d", number)
    assert caplog.messages[1] == "refused 0 (left out 999 lines like this)"
    assert len(caplog.messages) == 4
    assert len(complaints._said) <= 4
    now[0] += 1
    complaints.warn(b"x", "refused %d", 1000)
    assert caplog.messages[4:] == ["refused 1000 (left out 99997 lines like this)"]
