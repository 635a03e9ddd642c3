"""A supervisor reduced to what the server needs of one: it makes memory, hands out descriptors, and can be gone.

It speaks the records of the supervisor's socket from a thread of its own. The memory it holds outlives the server
under test, so a test can start a second server over it, and can map any segment itself.
"""

from __future__ import annotations

import os
import queue
import selectors
import socket
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from cs_proto.codec import decode, encode
from cs_proto.errors import InvalidArgumentError
from cs_proto.failures import error_of
from cs_proto.messages import (
    Appoint,
    ExtendSegment,
    Introduce,
    Mailbox,
    MakeMailbox,
    MakeSegment,
    OpenMailbox,
    OpenSegment,
    Segment,
    SegmentRefused,
)
from cs_proto.records import Record, replace
from cs_runtime.shared_memory.mapping import Mapping
from cs_runtime.transport import supervisor_link
from cs_runtime.transport.supervisor_link import SupervisorLink

from .introduced import introduction
from .timing import unit

__all__ = ["StandInSupervisor", "server_link"]


def server_link(run_directory: Path, incarnation: int) -> SupervisorLink:
    """The connection of a server to the supervisor there."""
    return SupervisorLink(supervisor_link.connect(str(run_directory)), "server", 0, incarnation)


@dataclass
class _Kept:
    reservation: int
    writer: str
    descriptor: int


class StandInSupervisor:
    """Listens at ``<run directory>/supervisor`` for the length of a ``with`` block. It grants everybody writing."""

    def __init__(self, run_directory: Path) -> None:
        self.run_directory = run_directory
        #: What was said that was no question, in order: Introduce, Ready.
        self.said: queue.Queue[Record] = queue.Queue()
        #: Sent before the answer to the next MakeSegment.
        self.before_next_answer: list[Record] = []
        #: Whether an Appoint is answered; if not, it is put into ``said``.
        self.appoints = True
        #: Names of segments that will not be made.
        self.refused: set[str] = set()
        self._segments: dict[str, _Kept] = {}
        self._introduced: dict[bytes, Introduce] = {}
        self._connections: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(run_directory / "supervisor"))
        self._listener.listen()
        self._stop, self._stopped = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name="stand-in supervisor")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.close()
        self._thread.join()
        for each in (self._stopped, self._listener, *self._connections):
            each.close()
        for kept in self._segments.values():
            os.close(kept.descriptor)

    def next(self, timeout: float | None = None) -> Record:
        """The next record that was said and is no question."""
        return self.said.get(timeout=unit(50) if timeout is None else timeout)

    def tell(self, record: Record) -> None:
        """Send a record to everybody connected."""
        for connection in self._connections:
            connection.sendall(b"".join(encode(record)))

    def introduce(self, name: bytes) -> None:
        """Tell everybody, and who comes later, of the process that has this name and that it says."""
        if name not in self._introduced:
            self._introduced[name] = introduction(name)
            self.tell(self._introduced[name])

    def hang_up(self) -> None:
        """Close every connection, as the end of the supervisor does."""
        for connection in self._connections:
            connection.shutdown(socket.SHUT_RDWR)

    def names(self) -> dict[str, str]:
        """Every segment there is, with its writer."""
        return {name: kept.writer for name, kept in self._segments.items()}

    def mapping(self, name: str) -> Mapping:
        """A segment, mapped for writing into the test's own process."""
        kept = self._segments[name]
        return Mapping(name, os.dup(kept.descriptor), kept.reservation, writable=True)

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._stopped, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    source = key.fileobj
                    assert isinstance(source, socket.socket)
                    if source is self._stopped:
                        return
                    if source is self._listener:
                        connection, _ = source.accept()
                        self._connections.append(connection)
                        selector.register(connection, selectors.EVENT_READ)
                    elif not self._answer(source):
                        selector.unregister(source)
                        self._connections.remove(source)
                        source.close()

    def _answer(self, connection: socket.socket) -> bool:
        """Hear one packet. False at the end of the connection, whoever has hung up."""
        try:
            return self._has_answered(connection)
        except ConnectionError:
            return False

    def _has_answered(self, connection: socket.socket) -> bool:
        packet = connection.recv(1 << 17)
        if not packet:
            return False
        record = decode([packet])
        if isinstance(record, MakeMailbox | OpenMailbox):
            connection.sendall(b"".join(encode(Mailbox(0, False, "this one makes none"))))
            return True
        if isinstance(record, Appoint) and self.appoints:
            connection.sendall(b"".join(encode(record)))
            return True
        if not isinstance(record, MakeSegment | ExtendSegment | OpenSegment):
            if isinstance(record, Introduce):
                for each in (replace(record, name=b"s"), *self._introduced.values()):
                    connection.sendall(b"".join(encode(each)))
            self.said.put(record)
            return True
        name = record.segment
        for earlier in self.before_next_answer:
            connection.sendall(b"".join(encode(earlier)))
        self.before_next_answer.clear()
        if isinstance(record, MakeSegment) and name not in self._segments and name not in self.refused:
            descriptor = os.memfd_create(name)
            os.ftruncate(descriptor, record.reservation)
            self._segments[name] = _Kept(record.reservation, record.writer, descriptor)
        kept = self._segments.get(name)
        if isinstance(record, ExtendSegment) and kept is not None and kept.reservation < record.reservation:
            os.ftruncate(kept.descriptor, record.reservation)
            kept.reservation = record.reservation
        if kept is None:
            error = error_of(InvalidArgumentError(f"there is no segment {name!r}"))
            connection.sendall(b"".join(encode(SegmentRefused(name, error))))
        else:
            answer = b"".join(encode(Segment(name, kept.reservation, True)))
            socket.send_fds(connection, [answer], [kept.descriptor])
        return True
