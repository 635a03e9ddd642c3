"""The first cause as data: what an exception or a death says, and the file of it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from central_storage.diagnostics.error_report import ENVIRONMENT, Failure, died_failure, note_uncaught, read, write
from cs_proto.errors import LaunchError, ReplicaLostError, ShutdownError, replica_exception_class
from cs_proto.messages import Died, Worker

KILLED = Died("worker", 1, 1, 55, "SIGKILL", "its last line", False)


@dataclass
class Link:
    """What a link knows of its service."""

    workers: tuple[Worker, ...] = tuple(Worker(rank, 1, 50 + rank, "cpu:0") for rank in range(2))
    last_death: Died | None = None


def of_replica(error: Exception, replica: int) -> Exception:
    vars(error).update(replica=replica, merge_index=0)
    return error


@pytest.fixture
def uncaught(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Failure | None]:
    """What an exception leaves that ends a script with such a link."""
    shown: list[BaseException] = []

    def end(error: BaseException, link: Link | None = None) -> Failure | None:
        monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "error"))
        monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: shown.append(error))
        note_uncaught([link or Link()])
        sys.excepthook(type(error), error, None)
        assert shown == [error]  # as without the file
        return read(str(tmp_path / "error"))

    return end


@pytest.mark.parametrize(
    ("error", "link", "words", "facts"),
    [
        (ValueError("mine"), Link(), "the script (pid {own}) raised ValueError: mine", ("script", None)),
        (
            of_replica(replica_exception_class("KeyError")("k"), 1),
            Link(),
            "replica 1, worker w1 (pid 51) raised KeyError: 'k'",
            ("worker", 1),
        ),
        (
            of_replica(ZeroDivisionError(), 0),
            Link(),
            "replica 0, worker w0 (pid 50) raised ZeroDivisionError",
            ("worker", 0),
        ),
        (
            ReplicaLostError("two lines\nof it"),
            Link(last_death=KILLED),
            "worker w1 (pid 55) ended by SIGKILL",
            ("worker", 1),
        ),
        (
            ReplicaLostError("replay diverged"),
            Link(last_death=replace(KILLED, restarts=True)),
            "worker w1 (pid 55) ended by SIGKILL",
            ("worker", 1),
        ),
        (
            ShutdownError("this strategy was shut down"),
            Link(last_death=replace(KILLED, restarts=True)),
            "the script (pid {own}) raised ShutdownError: this strategy was shut down",
            ("script", None),
        ),
        (LaunchError("no place\nat all"), Link(), "no place\nat all", ("launcher", None)),
    ],
)
def test_an_exception_says_whose_it_is(
    uncaught: Callable[..., Failure | None],
    error: Exception,
    link: Link,
    words: str,
    facts: tuple[str, int | None],
) -> None:
    failure = uncaught(error, link)
    assert failure is not None
    assert str(failure).startswith(words.format(own=os.getpid()))
    assert (failure.role, failure.rank) == facts
    assert failure.message == str(error)
    assert type(error).__name__ in failure.traceback


def test_ctrl_c_is_no_failure(uncaught: Callable[..., Failure | None]) -> None:
    assert uncaught(KeyboardInterrupt()) is None


def test_without_the_variable_nothing_is_hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    before = sys.excepthook
    note_uncaught([])
    assert sys.excepthook is before


@pytest.mark.parametrize(
    ("died", "words"),
    [
        (
            KILLED,
            "worker w1 (pid 55) ended by SIGKILL (if no person or program sent it, the kernel did, for lack of "
            "memory: see dmesg)",
        ),
        (Died("server", 0, 1, 9, "exit code 3", ""), "server (pid 9) ended by exit code 3"),
        (
            Died("worker", 0, 1, 9, "exit code 0", ""),
            "worker w0 (pid 9) ended by exit code 0 (it was not asked to end: something in it called exit)",
        ),
    ],
)
def test_a_death_in_words(died: Died, words: str) -> None:
    assert str(died_failure(died)) == words


def test_the_file_is_json_and_comes_back(tmp_path: Path) -> None:
    failure = replace(died_failure(KILLED), log="a" * 20_000 + "the end \udcff")
    write(str(tmp_path / "error"), failure, 4)
    record = json.loads((tmp_path / "error").read_text())
    assert record["format"] == 1
    assert record["exit_code"] == 4
    assert {name: record[name] for name in ("kind", "role", "rank", "pid", "cause")} == {
        "kind": "death",
        "role": "worker",
        "rank": 1,
        "pid": 55,
        "cause": "SIGKILL",
    }
    assert len(record["log"]) == 16_384
    assert read(str(tmp_path / "error")) == replace(failure, log=record["log"])
    assert [path.name for path in tmp_path.iterdir()] == ["error"]


def test_a_file_that_cannot_be_written_is_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(str(tmp_path / "none" / "error"), died_failure(KILLED), 4)
    assert f"the error file {tmp_path}/none/error could not be written: No such file" in caplog.text


@pytest.mark.parametrize("text", [None, "", "[]", "{}", "{}}"])
def test_what_is_no_such_file_is_nothing(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "error").write_text(text)
    assert read(str(tmp_path / "error")) is None
