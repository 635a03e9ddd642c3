"""Memory at the two ends of a link to another machine: pieces of segments are read here and written there.

At the service, which has the segments, a :class:`HeadMemory` lets the other machine write what its worker may write
here: its own arena and its own gradients. At the worker's machine a :class:`NodeMemory` has a segment of the same name
and length for each that the worker maps, and gives it descriptors, as a supervisor does. All workers of a machine share
one that has the dense variables (:func:`is_shared`), and each has one of its own for the rest.

A piece is a view of memory. The session copies it when it makes the envelope, which is before the one with the record
that stands for it: nobody may change these bytes then, as on one machine nobody may before the record has been heeded.
Whatever lies outside a segment is refused with PeerProtocolError before a byte is written.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from cs_proto import segment_names
from cs_proto.errors import InvalidArgumentError, MemoryPlanError, PeerProtocolError
from cs_proto.ranges import merged, without
from cs_proto.records import Buffer
from cs_proto.sizes import in_units
from cs_runtime.shared_memory.mapping import Mapping

from .ranges import Range, comes_down

__all__ = ["PIECE_NBYTES", "HeadMemory", "NodeMemory", "Piece", "is_shared", "writable_from"]

#: The most bytes of a piece.
PIECE_NBYTES = 1 << 20


class Piece(NamedTuple):
    """Bytes of a segment, and where they belong. ``reservation`` is the length of the segment at the sender, in
    bytes."""

    segment: str
    reservation: int
    offset: int
    data: Buffer


def writable_from(replica: int) -> re.Pattern[str]:
    """The names of the segments of a service that the machine of the worker ``replica`` may write.

    >>> [bool(writable_from(1).fullmatch(name)) for name in ("arena/1", "gradients/1/0/float32", "arena/11", "control")]
    [True, True, False, False]
    """
    return re.compile(rf"arena/{replica}|gradients/{replica}/[01]/[a-z0-9]+")


def is_shared(segment: str) -> bool:
    """Whether the workers of one machine share this segment there: it has dense variables, or the words that count
    their changes.

    >>> [is_shared(name) for name in ("parameters/float32", "versions", "arena/1", "inputs", "slots/1/m/float32")]
    [True, True, False, False, False]
    """
    return segment == segment_names.versions() or (segment.startswith("parameters/") and comes_down(segment))


class _Memory:
    """Segments that are read and written by range."""

    def __init__(self, whose: str) -> None:
        self._whose = whose
        # The pages that have been written, by segment. They take memory already.
        self._taken: dict[str, list[tuple[int, int]]] = {}

    def pieces(self, ranges: Iterable[Range]) -> Iterator[Piece]:
        """The bytes of the ranges, in order: views of the memory. Raises PeerProtocolError if a range ends behind its
        segment."""
        for name, start, stop in ranges:
            mapping = self._mapped(name, start, stop)
            for first in range(start, stop, PIECE_NBYTES):
                last = min(stop, first + PIECE_NBYTES)
                yield Piece(name, mapping.nbytes, first, mapping.memory[first:last])

    def write(self, piece: Piece) -> None:
        """Write a piece that came over the link.

        Raises PeerProtocolError if the other end may not write there, MemoryPlanError if this machine has too little
        memory. Nothing is written then.
        """
        name, start, stop = piece.segment, piece.offset, piece.offset + len(piece.data)
        if not self._may_write(name):
            raise PeerProtocolError(f"the other end of the link of {self._whose} may not write {name!r:.120}")
        self._prepare(piece)
        mapping = self._mapped(name, start, stop)
        if not mapping.writable:
            raise PeerProtocolError(f"segment {name} of {self._whose} cannot be written here")
        self._take(mapping, start, stop)
        mapping.memory[start:stop] = piece.data

    def _may_write(self, name: str) -> bool:
        raise NotImplementedError

    def _prepare(self, piece: Piece) -> None:
        """Have room for a piece."""

    def _open(self, name: str, stop: int) -> Mapping:
        """The segment, mapped up to byte ``stop`` if it is that long."""
        raise NotImplementedError

    def _mapped(self, name: str, start: int, stop: int) -> Mapping:
        mapping = self._open(name, stop)
        if not 0 <= start <= stop <= mapping.nbytes:
            raise PeerProtocolError(f"bytes {start} to {stop} of segment {name}, which has {mapping.nbytes}")
        return mapping

    def _take(self, mapping: Mapping, start: int, stop: int) -> None:
        """Take memory for pages that are written for the first time."""
        name, page = mapping.name, mmap.PAGESIZE
        pages = start - start % page, min(-(-stop // page) * page, mapping.nbytes)
        taken = self._taken.get(name, [])
        missing = without([pages], taken)
        for first, last in missing:  # all are checked, because another machine could send small pieces for ever
            what = f"what the link of {self._whose} brings to {name} needs"
            mapping.take(first, last, what, is_checked=True)
        if missing:
            self._taken[name] = merged([*taken, pages])


class HeadMemory(_Memory):
    """The segments of a service, for the machine of one worker."""

    def __init__(self, replica: int, open_segment: Callable[[str, int], Mapping]) -> None:
        """``open_segment`` maps a segment with the rights of that worker, at least up to a byte if it is that long."""
        super().__init__(f"worker {replica}")
        self._open_segment = open_segment
        self._writable = writable_from(replica)

    def _may_write(self, name: str) -> bool:
        return self._writable.fullmatch(name) is not None

    def _open(self, name: str, stop: int) -> Mapping:
        return self._open_segment(name, stop)


class NodeMemory(_Memory):
    """Memory of one worker on this machine, or of all of them: anonymous memory of the kernel under the names of
    segments. It is sealed, so that it never becomes shorter."""

    def __init__(self, whose: str) -> None:
        """``whose`` memory it is, for messages: ``worker 1``."""
        super().__init__(whose)
        self._descriptors: dict[str, int] = {}
        self._mappings: dict[str, Mapping] = {}

    def hold(self, name: str, reservation: int) -> None:
        """Have a segment of at least ``reservation`` bytes under this name: a new one, of zeros, or a longer one.
        Mappings of it stay valid.

        Raises MemoryPlanError if the kernel refuses.
        """
        mapping = self._mappings.get(name)
        if mapping is not None and mapping.nbytes >= reservation:
            return
        try:
            descriptor = self._descriptors.get(name)
            if descriptor is None:
                descriptor = os.memfd_create(f"cs-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                self._descriptors[name] = descriptor
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
                os.fchmod(descriptor, 0o400)  # so that no reader opens it again for writing by mistake
            if os.fstat(descriptor).st_size < reservation:
                os.ftruncate(descriptor, reservation)
            self._mappings[name] = Mapping(name, os.dup(descriptor), reservation, writable=True)
        except (OSError, ValueError, OverflowError) as error:
            raise MemoryPlanError(f"segment {name} of {reservation} bytes{in_units(reservation)}: {error}") from error

    def reservation(self, name: str) -> int:
        """The length of a segment, in bytes. Raises InvalidArgumentError if there is none of this name."""
        return self._held(name).nbytes

    def descriptor(self, name: str, *, writable: bool) -> int:
        """A descriptor of a segment, for a worker. The caller closes it. Raises InvalidArgumentError if there is none
        of this name, OSError if the process has no descriptors left."""
        self._held(name)
        if writable:
            return os.dup(self._descriptors[name])
        return os.open(f"/proc/self/fd/{self._descriptors[name]}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Release the memory; what workers map stays while they do. Idempotent, and may be filled anew."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()
        self._mappings.clear()
        self._taken.clear()

    def _may_write(self, name: str) -> bool:
        return comes_down(name) or name == segment_names.versions()

    def _prepare(self, piece: Piece) -> None:
        self.hold(piece.segment, piece.reservation)

    def _open(self, name: str, stop: int) -> Mapping:
        mapping = self._mappings.get(name)
        if mapping is None:
            raise PeerProtocolError(f"{self._whose} names segment {name}, which it has not opened")
        return mapping

    def _held(self, name: str) -> Mapping:
        mapping = self._mappings.get(name)
        if mapping is None:
            known = ", ".join(list(self._mappings)[:20]) or "none at all"
            raise InvalidArgumentError(f"there is no segment {name!r:.120}; there are {known}")
        return mapping
