"""One connection on the supervisor's socket. It reads packets as records and sends records, and never blocks.

Owns the descriptor and a queue for a peer that reads slowly. Records are always queued. Lines of output are dropped
when too much waits, and a later line says how many. The supervisor decides what records mean.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import cast

import msgpack

from central_storage.launch.plan import label
from cs_proto.codec import PACKET_NBYTES, decode, encode
from cs_proto.errors import PeerProtocolError
from cs_proto.failures import error_of
from cs_proto.messages import PROTOCOL, Introduce, Join, Output, StartFailed
from cs_proto.printable import counted
from cs_proto.records import Record
from cs_runtime.logs import Complaints

from .loop import Loop
from .output import Stream

__all__ = ["OwnerSink", "Peer"]

_log = logging.getLogger("central_storage.launch")
_complaints = Complaints(_log)

# Output is cut into records of at most this many characters, so that every packet fits the socket's buffer.
_OUTPUT_LIMIT = 8192
# Lines are dropped while more bytes than this wait.
_QUEUE_NBYTES = 1 << 20
# When this many records wait, the peer counts as one that never reads again.
_QUEUE_RECORDS = 10_000
# So does a peer for which this many descriptors wait. A process asks for the next segment when it has the one before.
_QUEUE_DESCRIPTORS = 64


class Peer:
    """A connected process. ``pid`` and ``uid`` are those that the kernel saw when it connected."""

    def __init__(
        self, loop: Loop, link: socket.socket, on_record: Callable[[Peer, Record], None], on_end: Callable[[Peer], None]
    ) -> None:
        """Take over ``link``. ``on_end`` is called once, when the peer has gone or was cut off by an error."""
        self.introduction: Introduce | None = None
        self.pid, self.uid = _credentials(link)
        self._loop = loop
        self._link = link
        self._on_record = on_record
        self._on_end = on_end
        self._queue: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self._queued_nbytes = 0
        self._queued_descriptors = 0
        self._dropped = 0
        link.setblocking(False)
        loop.on_readable(link.fileno(), self._read)

    @property
    def label(self) -> str:
        """The name by its introduction: ``server``, ``w0``, ``controller``; ``stranger`` before that."""
        who = self.introduction
        return label(who.role, who.rank) if who is not None else "stranger"

    @property
    def closed(self) -> bool:
        """Whether the connection is closed."""
        return self._link.fileno() < 0

    @property
    def waiting(self) -> bool:
        """Whether records are still queued."""
        return bool(self._queue)

    def send(self, record: Record, *descriptors: int) -> None:
        """Send ``record`` with ``descriptors``, which are closed here afterwards."""
        if _log.isEnabledFor(logging.DEBUG) and not isinstance(record, Output):
            _log.debug("supervisor -> %s: %.300r", self.label, record)
        self._post(b"".join(encode(record)), descriptors)

    def output(self, stream: Stream, text: str) -> None:
        """Send whole lines, or drop them if too much waits already."""
        if self.is_slow:
            self._dropped += text.count("\n")
            return
        for start in range(0, len(text), _OUTPUT_LIMIT):
            self._post(b"".join(encode(Output(stream, text[start : start + _OUTPUT_LIMIT]))))

    @property
    def is_slow(self) -> bool:
        """Whether so much waits that lines of output should be dropped."""
        return self._queued_nbytes > _QUEUE_NBYTES

    def close(self) -> None:
        """Hang up. Idempotent."""
        if self.closed:
            return
        self._loop.forget(self._link.fileno())
        with suppress(OSError):  # unread packets would give the peer an error instead of our last records
            self._link.shutdown(socket.SHUT_RD)  # a peer that never stops sending would keep us here
            while self._link.recv(PACKET_NBYTES):
                pass
        self._link.close()
        for _, descriptors in self._queue:
            _close(descriptors)
        self._queue.clear()
        self._queued_nbytes = self._queued_descriptors = 0

    def _post(self, packet: bytes, descriptors: tuple[int, ...] = ()) -> None:
        if self.closed:
            _close(descriptors)
            return
        self._enqueue(packet, descriptors)
        if len(self._queue) > _QUEUE_RECORDS or self._queued_descriptors > _QUEUE_DESCRIPTORS:
            self._end("does not read")
        else:
            self._flush()

    def _enqueue(self, packet: bytes, descriptors: tuple[int, ...] = ()) -> None:
        self._queue.append((packet, descriptors))
        self._queued_nbytes += len(packet)
        self._queued_descriptors += len(descriptors)

    def _flush(self) -> None:
        while self._queue:
            packet, descriptors = self._queue[0]
            try:
                socket.send_fds(self._link, [packet], descriptors, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                self._loop.on_writable(self._link.fileno(), self._flush)
                return
            except (BrokenPipeError, ConnectionResetError):  # it has just ended
                self._end("")
                return
            except OSError as error:
                self._end(f"cannot be written to: {error.strerror}")
                return
            self._queue.popleft()
            self._queued_nbytes -= len(packet)
            self._queued_descriptors -= len(descriptors)
            _close(descriptors)
            if self._dropped and self._queued_nbytes < _QUEUE_NBYTES // 2:
                notice = f"[supervisor] dropped {counted(self._dropped, 'line')}, not read by the script in time\n"
                self._dropped = 0
                self._enqueue(b"".join(encode(Output("stderr", notice))))
        self._loop.on_writable(self._link.fileno(), None)

    def _read(self) -> None:
        try:
            packet, _, flags, _ = self._link.recvmsg(PACKET_NBYTES)  # no room for descriptors: the kernel closes them
        except BlockingIOError:
            return
        except ConnectionResetError:  # the peer ended without reading all our records
            self._end("")
            return
        except OSError as error:
            self._end(f"cannot be read: {error.strerror}")
            return
        if not packet:
            self._end("")
            return
        if self.introduction is None and (why := _why_skewed(packet)):
            self._turn_away(PeerProtocolError(f"process {self.pid} {why}"))
            return
        try:
            if flags & socket.MSG_TRUNC:
                raise PeerProtocolError(f"a packet of more than {PACKET_NBYTES} bytes")
            record = decode([packet])
        except PeerProtocolError as error:
            _complaints.warn(self.pid, "dropped a packet of %s: %s", self.label, error)
            if self.introduction is None and _is_first(packet):
                self._turn_away(error)
            return
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("%s -> supervisor: %.300r", self.label, record)
        try:
            self._on_record(self, record)
        except Exception:  # noqa: BLE001  (no record of a peer may end the supervisor, which holds all memory)
            _log.exception("dropped a %s of %s, which could not be acted on", type(record).__name__, self.label)

    def _turn_away(self, error: PeerProtocolError) -> None:
        self.send(StartFailed(error_of(error)))
        if not self.closed:
            self._end(f"is refused: {error}")

    def _end(self, reason: str) -> None:
        if reason:
            _complaints.warn(self.pid, "%s %s; its connection is closed", self.label, reason)
        self.close()
        self._on_end(self)


def _first_fields(packet: bytes) -> list[object]:
    """The fields of a packet that another version of this package may have sent, as far as they can be read."""
    try:
        fields = msgpack.unpackb(packet)
    except Exception:  # noqa: BLE001  (msgpack raises whatever it finds, and the caller only looks for a number)
        return []
    return fields if isinstance(fields, list) else []


def _is_first(packet: bytes) -> bool:
    """Whether a process introduces itself by this packet, in whatever version."""
    return _first_fields(packet)[:1] in ([Introduce.code], [Join.code])


def _why_skewed(packet: bytes) -> str:
    """What is wrong with a first packet of another protocol; empty if it is of this one."""
    if not _is_first(packet):
        return ""
    (protocol,) = _first_fields(packet)[1:2] or (None,)
    if protocol == PROTOCOL and type(protocol) is int:
        return ""
    spoken = f"protocol {protocol}" if type(protocol) is int else "a protocol from before these had numbers"
    return (
        f"speaks {spoken}, this service protocol {PROTOCOL}; install the same version of central-storage on both sides"
    )


def _close(descriptors: tuple[int, ...]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _credentials(link: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process at the other end."""
    pid, uid, _ = cast(
        tuple[int, int, int],
        struct.unpack("iII", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("iII"))),
    )
    return pid, uid


class OwnerSink:
    """The owner's connection as a sink. It is never full: a script that computes reads nothing, and drops instead."""

    full = False

    def __init__(self) -> None:
        self.on_room: Callable[[], None] = lambda: None
        self.peer: Peer | None = None

    def write(self, stream: Stream, text: str) -> None:
        """Send ``text`` to the owner."""
        if self.peer is not None:
            self.peer.output(stream, text)
