"""The server's end of the supervisor's socket, and the segments that come through it.

Owns the connection (the server's life-line: end-of-file means that the supervisor is gone) and every mapping. It
knows no variables and no messages of workers or clients. The service polls :meth:`Segments.fileno`, takes notices of
deaths from :meth:`Segments.receive_nowait`, and has memory made and looked at here.
"""

from __future__ import annotations

import mmap
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np

from cs_proto.arrays import Array, Location, frame_view
from cs_proto.codec import PACKET_NBYTES, decode, encode
from cs_proto.errors import LaunchError, MemoryPlanError, ShutdownError, replica_exception_class
from cs_proto.messages import (
    ExtendSegment,
    Introduce,
    MadeProgress,
    Mailbox,
    MakeSegment,
    OpenMailbox,
    OpenSegment,
    Ready,
    Segment,
    SegmentRefused,
)
from cs_proto.records import Record
from cs_proto.sizes import in_units
from cs_runtime import machine
from cs_runtime.mapping import Mapping
from cs_runtime.readiness import is_readable

__all__ = ["Segments"]

# The supervisor answers from a loop that never waits; an answer this late means that it is stopped or gone.
_ANSWER_TIMEOUT = 30.0
# A mailbox has three.
_DESCRIPTORS = 3


class Segments:
    """The connection and what it has brought, for the length of a ``with`` block."""

    def __init__(self, run_directory: str, incarnation: int) -> None:
        """Connect and introduce this process. Raises :class:`LaunchError` where no supervisor listens."""
        #: Called with the old and the new mapping of a segment that was extended.
        self.on_extended: Callable[[Mapping, Mapping], None] = _nothing
        self._mappings: dict[str, Mapping] = {}
        self._writers: dict[str, str] = {}
        self._elements: dict[tuple[str, str], np.ndarray] = {}
        self._kept: deque[Record] = deque()
        self._incarnation = incarnation
        self._has_worked = False
        self._link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = os.path.join(run_directory, "supervisor")
        try:
            self._link.connect(path)
        except OSError as error:
            self._link.close()
            raise LaunchError(
                f"no supervisor listens at {path} ({error.strerror}); a server is started by cs-launch or by a script "
                "that makes a CentralStorageStrategy"
            ) from error
        try:
            self.send(Introduce("server", 0, incarnation, os.getpid()))
        except ShutdownError:
            self._link.close()
            raise

    def fileno(self) -> int:
        """The descriptor to poll for reading."""
        return self._link.fileno()

    def ready(self, endpoint: str) -> None:
        """Tell the supervisor that this server listens."""
        self.send(Ready(endpoint))

    def send(self, record: Record) -> None:
        """Tell the supervisor something. Raises :class:`ShutdownError` where it is gone."""
        try:
            self._link.sendall(b"".join(encode(record)))
        except OSError as error:
            raise _gone() from error

    def worked(self) -> None:
        """Tell the supervisor, once, that this server has done what it is for."""
        if not self._has_worked:
            self._has_worked = True
            self.send(MadeProgress(self._incarnation))

    @property
    def has_kept(self) -> bool:
        """Whether records came while an answer was awaited: polling the descriptor does not show them."""
        return bool(self._kept)

    def receive_nowait(self) -> Record | None:
        """The next record that is no answer, or None where none waits. Raises :class:`ShutdownError` at end-of-file."""
        if self._kept:
            return self._kept.popleft()
        if not is_readable(self.fileno(), 0):
            return None
        record, descriptors = self._read()
        for descriptor in descriptors:  # the late answer to a question that is over
            os.close(descriptor)
        return record

    def make(self, name: str, reservation: int, writer: str, stop: int = 0) -> Mapping:
        """The segment of that name, made if it does not exist, and extended to ``reservation`` bytes if it is shorter
        than ``stop`` bytes. Older mappings stay valid. Raises the error with which the supervisor refuses, and
        :class:`~cs_proto.errors.MemoryPlanError` if it cannot be mapped."""
        self._writers[name] = writer
        if name not in self._mappings:
            _check_addresses(name, reservation)
            self._map(MakeSegment(name, reservation, writer))
        if self._mappings[name].nbytes < stop:
            _check_addresses(name, reservation)
            self._map(ExtendSegment(name, reservation))
        return self._mappings[name]

    def get(self, name: str, stop: int = 0) -> Mapping:
        """The segment of that name, made earlier by this server or one before it. At least its first ``stop`` bytes are
        mapped, if it is that long.

        Raises :class:`~cs_proto.errors.InvalidArgumentError` where there is none.
        """
        if name not in self._mappings or self._mappings[name].nbytes < stop:
            self._map(OpenSegment(name))
        return self._mappings[name]

    def __contains__(self, name: str) -> bool:
        """Whether a segment of that name is mapped."""
        return name in self._mappings

    def mailbox(self, number: int) -> tuple[Mailbox, list[int]]:
        """What the supervisor says of a mailbox that this server was offered, with its descriptors, which are the
        caller's."""
        self.send(OpenMailbox(number))
        for record, descriptors in self._answers():
            if isinstance(record, Mailbox):
                return record, descriptors
            self._kept.append(record)
        return Mailbox(number, False, f"the supervisor did not hand it out within {_ANSWER_TIMEOUT:.0f} s"), []

    def writer(self, name: str) -> str:
        """Who beside the server may write the segment of that name: ``controller``, ``w0``, or empty for nobody."""
        return self._writers.get(name, "")

    def view(self, array: Array) -> np.ndarray:
        """The array behind a descriptor: of a frame read-only, of a segment what lies there now."""
        if isinstance(array.place, Location):
            return self.get(array.place.segment, array.place.offset + array.nbytes).view(array)
        return frame_view(array)

    def elements(self, name: str, dtype: str) -> np.ndarray:
        """A whole segment, as long as it is now, as a 1-D array of ``dtype``."""
        key = (name, dtype)
        if key not in self._elements:
            self._elements[key] = self.get(name).elements(dtype)
        return self._elements[key]

    def discard(self, name: str, start: int, stop: int) -> None:
        """Give the whole pages between two bytes of a segment back; they read as zeros afterwards. Bytes beyond the
        mapping, which could not be extended, were never touched."""
        mapping = self.get(name)
        mapping.discard(start, min(stop, mapping.nbytes))

    def close(self) -> None:
        """Close the connection. Mapped memory stays while something views it."""
        self._link.close()
        self._mappings.clear()
        self._elements.clear()

    def _map(self, request: MakeSegment | ExtendSegment | OpenSegment) -> None:
        self.send(request)
        for record, descriptors in self._answers():
            if isinstance(record, Segment) and record.segment == request.segment and descriptors:
                self._take(record, descriptors[0])
                return
            for descriptor in descriptors:
                os.close(descriptor)
            if isinstance(record, SegmentRefused) and record.segment == request.segment:
                raise replica_exception_class(record.error.exception)(record.error.message)
            self._kept.append(record)
        raise MemoryPlanError(
            f"the supervisor did not hand out segment {request.segment} within {_ANSWER_TIMEOUT:.0f} s; is it stopped?"
        )

    def _take(self, segment: Segment, descriptor: int) -> None:
        """Map the whole segment, unless it is mapped already."""
        name, nbytes = segment.segment, segment.reservation
        before = self._mappings.get(name)
        if before is not None and before.nbytes >= nbytes:
            os.close(descriptor)
            return
        try:
            mapping = Mapping(name, descriptor, nbytes, writable=segment.writable)
        except OSError as error:
            raise _cannot_map(name, nbytes, error) from error
        self._mappings[name] = mapping
        if before is not None:
            self._elements = {key: elements for key, elements in self._elements.items() if key[0] != name}
            self.on_extended(before, mapping)

    def _answers(self) -> Iterator[tuple[Record, list[int]]]:
        deadline = time.monotonic() + _ANSWER_TIMEOUT
        while is_readable(self.fileno(), max(0.0, deadline - time.monotonic())):
            yield self._read()

    def _read(self) -> tuple[Record, list[int]]:
        try:
            packet, descriptors, _, _ = socket.recv_fds(self._link, PACKET_NBYTES, _DESCRIPTORS)
        except OSError as error:
            raise _gone() from error
        if not packet:
            raise _gone()
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        return decode([packet]), descriptors


def _nothing(before: Mapping, after: Mapping) -> None:
    pass


def _check_addresses(name: str, nbytes: int) -> None:
    """Raise MemoryPlanError if this process has fewer than ``nbytes`` addresses free: a segment cannot be made shorter
    again, and every process maps all of it."""
    try:
        mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ).close()
    except OSError as error:
        raise _cannot_map(name, nbytes, error) from error


def _cannot_map(name: str, nbytes: int, error: OSError) -> MemoryPlanError:
    return MemoryPlanError(
        f"the server cannot map segment {name} of {nbytes} bytes{in_units(nbytes)} ({error.strerror}): "
        f"{machine.addresses_left()}; shared mappings must be allowed; raise the limit of addresses (ulimit -v) where "
        "there is one, or use smaller variables, fewer replicas or fewer optimizers"
    )


def _gone() -> ShutdownError:
    return ShutdownError("the supervisor is gone, and the service with it")
