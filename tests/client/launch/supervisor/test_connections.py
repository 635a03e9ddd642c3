"""One connection of the supervisor, at whose other end is a program that breaks off, floods, or reads nothing."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest

from central_storage.launch.supervisor.connections import Peer
from central_storage.launch.supervisor.loop import Loop
from cs_proto.messages import Segment
from cs_proto.records import Record


class Flooded(socket.socket):
    """A socket whose other end sends a packet whenever one is read."""

    other: socket.socket
    reads = 0

    def recv(self, *arguments: int) -> bytes:  # type: ignore[override]
        self.reads += 1
        assert self.reads < 10_000, "whoever never stops sending is read without end"
        with suppress(OSError):
            self.other.send(b"more")
        return super().recv(*arguments)


class Connection:
    """Both ends of a connection."""

    def __init__(self) -> None:
        here, self.other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        link = Flooded(fileno=here.detach())
        link.other = self.other
        self.ended = 0
        self.peer = Peer(Loop(), link, self._record, self._end)

    def _record(self, peer: Peer, record: Record) -> None:
        raise AssertionError(f"nothing was sent, but {record} came")

    def _end(self, peer: Peer) -> None:
        self.ended += 1


@pytest.fixture
def connection() -> Iterator[Connection]:
    made = Connection()
    yield made
    made.peer.close()
    made.other.close()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_whoever_never_stops_sending_does_not_hold_up_the_end(connection: Connection) -> None:
    connection.other.send(b"first")
    connection.peer.close()
    assert connection.peer.closed
    with pytest.raises(BrokenPipeError):
        connection.other.send(b"after the end")
    assert connection.other.recv(100) == b""  # and no error, which would hide a last record


def test_whoever_reads_nothing_holds_few_descriptors(connection: Connection, caplog: pytest.LogCaptureFixture) -> None:
    before, most, asked = descriptors(), 0, 0
    while not connection.peer.closed and asked < 5000:
        connection.peer.send(Segment("parameters/float32", 1 << 20, False), os.open("/dev/null", os.O_RDONLY))
        most, asked = max(most, descriptors() - before), asked + 1
    assert connection.ended == 1
    assert most <= 70
    assert descriptors() < before  # its own has gone, too
    assert "does not read; its connection is closed" in caplog.text


def test_whoever_reads_gets_every_descriptor(connection: Connection) -> None:
    before = descriptors()
    for number in range(500):
        connection.peer.send(Segment(f"s{number}", 1, False), os.open("/dev/null", os.O_RDONLY))
        packet, (sent,), *_ = socket.recv_fds(connection.other, 1000, 3)
        assert f"s{number}".encode() in packet
        os.close(sent)
    assert (connection.ended, descriptors()) == (0, before)
