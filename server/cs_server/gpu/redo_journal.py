"""The redo log of commits on a GPU: it makes a commit atomic.

The memory of variables on a GPU ends with the server. Other processes, and the next server, read their mirror in host
memory. A commit computes on the GPU, copies all its changes into the journal, and sets one word, the commit's ticket:
then it has happened. The copy from the journal to the mirror may be interrupted anywhere, and the next server repeats
it. The journal is a segment, so it outlives this process.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import msgpack
import numpy as np

from cs_proto.errors import MemoryPlanError
from cs_proto.frozen import frozen
from cs_runtime.shared_memory.mapping import Mapping
from cs_server.rules import Array

from .dirty_ranges import Change

__all__ = ["RedoJournal"]

# The ticket of the commit that is written completely, or 0; the place of the index and its length.
_HEAD = struct.Struct("<QQQ")
_HEAD_NBYTES = 4096
_ALIGNMENT = 64
_STEP_NBYTES = 1 << 20


class RedoJournal:
    """The segment. Every commit uses it from the beginning."""

    def __init__(self, memory: Callable[[int], Mapping]) -> None:
        """Read the entries of an earlier server. ``memory`` returns a mapping of at least the given number of bytes of
        the segment. Raises MemoryPlanError if there is no memory for the first page."""
        self._memory = memory
        self._nbytes = 0
        self.reserve(0)
        self._entries: list[_Entry] = []
        self._end = _HEAD_NBYTES
        if self.ticket:
            place, nbytes = map(int, self._head[1:])
            self._entries = [_Entry(*entry) for entry in msgpack.unpackb(self._bytes[place : place + nbytes].tobytes())]

    @property
    def ticket(self) -> int:
        """The commit that is written completely, or 0."""
        return int(self._head[0])

    @property
    def memory(self) -> Array:
        """The bytes whose memory is guaranteed, uint8."""
        return self._bytes[: self._nbytes]

    def reserve(self, nbytes: int) -> None:
        """Guarantee memory for a commit that changes this many bytes. Raises MemoryPlanError."""
        wanted = _HEAD_NBYTES + nbytes
        if wanted > self._nbytes:
            # It grows in few steps, so that it is not page-locked in small parts. The plan allows less than this.
            ample = -(-max(wanted, self._nbytes * 9 // 8) // _STEP_NBYTES) * _STEP_NBYTES
            try:
                self._extend(ample)
            except MemoryPlanError:
                self._extend(wanted)

    def _extend(self, nbytes: int) -> None:
        mapping = self._memory(nbytes)
        mapping.populate(self._nbytes, nbytes)
        self._nbytes = nbytes
        self._bytes = mapping.elements("uint8")
        self._head = self._bytes[: _HEAD.size].view(np.uint64)

    def begin(self) -> None:
        """Begin a commit: the journal is empty."""
        self._head[0] = 0
        self._entries = []
        self._end = _HEAD_NBYTES

    def place(self, change: Change, dtype: str) -> Array:
        """The place for the new values of ``change``, 1-D. Fill it before :meth:`finish`."""
        rows = change.rows
        rows_at = 0
        if rows is not None:
            rows_at, there = self._room(rows.nbytes)
            there.view(np.int64)[:] = rows
        values_at, values = self._room(change.size * np.dtype(dtype).itemsize)
        count = 0 if rows is None else len(rows)
        self._entries.append(_Entry(change.segment, dtype, change.first, change.width, rows_at, count, values_at))
        return values.view(dtype)

    def finish(self, ticket: int) -> None:
        """Mark the journal as complete: the commit has happened."""
        packed = msgpack.packb([tuple(vars(entry).values()) for entry in self._entries])
        place, there = self._room(len(packed))
        there[:] = np.frombuffer(packed, np.uint8)
        self._head[1:] = place, len(packed)
        self._head[0] = ticket

    def replay(self, elements: Callable[[str, str], Array]) -> None:
        """Copy all changes to the mirror; may be repeated. ``elements`` returns a segment as a 1-D array."""
        for entry in self._entries:
            rows = self._at(entry.rows_at, entry.count, "int64") if entry.rows_at else None
            change = Change(entry.segment, entry.first, entry.width, rows)
            change.put(elements(entry.segment, entry.dtype), self._at(entry.values_at, change.size, entry.dtype))

    def _room(self, nbytes: int) -> tuple[int, Array]:
        first = self._end
        self._end = first + -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        self.reserve(self._end - _HEAD_NBYTES)
        return first, self._bytes[first : first + nbytes]

    def _at(self, place: int, count: int, dtype: str) -> Array:
        return self._bytes[place : place + count * np.dtype(dtype).itemsize].view(dtype)


@frozen
class _Entry:
    """One change, with the places of its rows (0 if it has none) and of its values in the segment."""

    segment: str
    dtype: str
    first: int
    width: int
    rows_at: int
    count: int
    values_at: int
