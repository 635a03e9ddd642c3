"""A process's connection to its supervisor: life-line, descriptors of segments, notices of deaths.

Used by workers and clients. One thread at a time. The owner polls :meth:`fileno` at its receive seam and calls
:meth:`receive_nowait`; end-of-file there means that the supervisor is gone and the service with it.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TypeVar

from cs_proto.carried import Carried, Carry
from cs_proto.codec import decode, encode
from cs_proto.errors import LaunchError, ShutdownError, replica_exception_class
from cs_proto.messages import Introduce, OpenSegment, Role, Segment, SegmentRefused
from cs_proto.records import Record
from cs_proto.segments import Mapping

__all__ = ["CARRIED", "PACKET_NBYTES", "Lifeline", "connect"]

R = TypeVar("R", bound=Record)

#: The transport of a process that maps no memory, in words.
CARRIED = "ipc + bytes in frames"
#: Largest packet on the supervisor's socket.
PACKET_NBYTES = 128 * 1024
# The supervisor answers from one loop that never waits; an answer this late means that it is stopped or gone.
_ANSWER_TIMEOUT = 30.0


def connect(run_directory: str) -> socket.socket:
    """A socket to the supervisor of that run directory. Raises :class:`LaunchError` where none listens."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        link.connect(os.path.join(run_directory, "supervisor"))
    except OSError as error:
        link.close()
        raise LaunchError(
            f"no service answers in {run_directory} ({error.strerror}); it has ended, or CS_ADDRESS names the wrong run"
        ) from error
    return link


class Lifeline:
    """The connection, with the segments it has opened."""

    def __init__(self, link: socket.socket, role: Role, rank: int = 0, incarnation: int = 1) -> None:
        """Introduce this process over ``link``, which is owned from here on."""
        self._link = link
        #: What a controller calls itself.
        self.client = secrets.token_hex(4) if role == "controller" else ""
        self._waiting: deque[Record] = deque()
        self._mappings: dict[str, Mapping | Carried] = {}
        #: How this process asks the server; said by its owner before it opens a segment that it may have to carry.
        self.carry: Carry = _no_way
        #: Why the bytes of segments travel in frames; empty where they are mapped.
        self.carried_because = ""
        try:
            self.send(Introduce(role, rank, incarnation, os.getpid(), self.client))
        except ShutdownError:
            link.close()
            raise

    def fileno(self) -> int:
        """The descriptor to poll for reading; -1 once closed."""
        return self._link.fileno()

    def send(self, record: Record) -> None:
        """Send one packet. Raises :class:`ShutdownError` where the supervisor is gone."""
        try:
            self._link.sendall(b"".join(encode(record)))
        except OSError as error:
            raise ShutdownError("the supervisor is gone, and the service with it") from error

    @property
    def has_waiting(self) -> bool:
        """Whether records came while a segment was awaited: polling the descriptor does not show them."""
        return bool(self._waiting)

    def receive_nowait(self) -> Record | None:
        """The next record, or None where none waits. Raises :class:`ShutdownError` at end-of-file."""
        if self._waiting:
            return self._waiting.popleft()
        if not select.select([self._link], [], [], 0)[0]:
            return None
        record, descriptors = self._read()
        for descriptor in descriptors:  # a segment nobody asked for
            os.close(descriptor)
        return record

    def until_end(self, timeout: float) -> Iterator[Record]:
        """Every record until the supervisor hangs up (:class:`ShutdownError`) or ``timeout`` seconds have passed."""
        deadline = time.monotonic() + timeout
        while self._waiting or select.select([self._link], [], [], max(0.0, deadline - time.monotonic()))[0]:
            record = self.receive_nowait()
            if record is not None:
                yield record

    def segment(self, name: str) -> Mapping | Carried:
        """The segment called ``name``, mapped once, with the access the supervisor grants this process. Where that
        fails, this segment and those opened later are carried."""
        mapping = self._mappings.get(name)
        if mapping is None:
            mapping = self._mappings[name] = self._open(name)
        return mapping

    def close(self) -> None:
        """Close the connection. Mapped segments stay valid while something views them."""
        self._link.close()
        self._mappings.clear()

    def _open(self, name: str) -> Mapping | Carried:
        self.send(OpenSegment(name))
        deadline = time.monotonic() + _ANSWER_TIMEOUT
        while select.select([self._link], [], [], max(0.0, deadline - time.monotonic()))[0]:
            record, descriptors = self._read()
            if isinstance(record, Segment) and record.segment == name:
                return self._mapped(record, descriptors)
            if isinstance(record, SegmentRefused) and record.segment == name:
                raise replica_exception_class(record.error.exception)(record.error.message)
            self._waiting.append(record)
        raise ShutdownError(f"the supervisor did not hand out segment {name} within {_ANSWER_TIMEOUT:.0f} s")

    def _mapped(self, segment: Segment, descriptors: list[int]) -> Mapping | Carried:
        if not descriptors:
            self.carried_because = self.carried_because or "the service shares no memory with this process"
        elif self.carried_because:
            os.close(descriptors[0])
        else:
            try:
                return Mapping(segment.segment, descriptors[0], segment.reservation, writable=segment.writable)
            except OSError as error:
                self.carried_because = f"the service's memory cannot be mapped here ({error.strerror})"
        return Carried(segment.segment, segment.reservation, lambda *asked: self.carry(*asked))

    def _read(self) -> tuple[Record, list[int]]:
        try:
            packet, descriptors, _, _ = socket.recv_fds(self._link, PACKET_NBYTES, 1)
        except OSError as error:
            raise ShutdownError("the supervisor is gone, and the service with it") from error
        if not packet:
            raise ShutdownError("the supervisor is gone, and the service with it")
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        return decode([packet]), descriptors


def _no_way(request: Callable[[int], Record], answer: type[R]) -> R:
    raise ShutdownError("a process that cannot map the service's memory has not reached its server yet")
