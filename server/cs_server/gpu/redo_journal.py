"""What a commit changes, written down before the variables' memory is: the commit is whole or has not been.

For variables on a GPU, whose memory ends with the server. What the other processes read, and a server after this one
begins with, is their mirror in the machine's memory. A commit computes on the GPU, brings everything it changed here,
and sets one word, the commit's ticket: from then on it has happened. The copy from here to the mirror may end anywhere
and is done again by the next server. The memory is a segment, so it outlives this process.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import msgpack
import numpy as np

from cs_proto.errors import MemoryPlanError
from cs_proto.frozen import frozen
from cs_runtime.mapping import Mapping
from cs_server.rules import Array

from .dirty_ranges import Change

__all__ = ["RedoJournal"]

# The ticket of the commit that is written down whole, or 0; where the index is and how long.
_HEAD = struct.Struct("<QQQ")
_HEAD_NBYTES = 4096
_ALIGNMENT = 64
_STEP_NBYTES = 1 << 20


class RedoJournal:
    """The segment, laid out anew by every commit."""

    def __init__(self, memory: Callable[[int], Mapping]) -> None:
        """Take up the entries of an earlier server. ``memory`` returns a mapping of at least so many bytes of the
        segment. Raises MemoryPlanError if there is no memory for the first page."""
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
        """The commit that is written down whole, or 0."""
        return int(self._head[0])

    @property
    def memory(self) -> Array:
        """The bytes that are sure to find memory, uint8."""
        return self._bytes[: self._nbytes]

    def reserve(self, nbytes: int) -> None:
        """Make sure that a commit that changes so many bytes finds memory. Raises MemoryPlanError."""
        wanted = _HEAD_NBYTES + nbytes
        if wanted > self._nbytes:
            # In few steps, so that what is page-locked is not in small parts. What the plan allows is less.
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
        """A commit begins: nothing is written down any more."""
        self._head[0] = 0
        self._entries = []
        self._end = _HEAD_NBYTES

    def place(self, change: Change, dtype: str) -> Array:
        """Where the new values of ``change`` go, 1-D; to be filled before :meth:`finish`."""
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
        """All is written down: the commit has happened."""
        packed = msgpack.packb([tuple(vars(entry).values()) for entry in self._entries])
        place, there = self._room(len(packed))
        there[:] = np.frombuffer(packed, np.uint8)
        self._head[1:] = place, len(packed)
        self._head[0] = ticket

    def replay(self, elements: Callable[[str, str], Array]) -> None:
        """Copy everything to where it belongs, once more if need be: ``elements`` gives a segment as 1-D array."""
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
    """One change: its rows, if it has any (a place of 0: it has none), and its values lie at places of the segment."""

    segment: str
    dtype: str
    first: int
    width: int
    rows_at: int
    count: int
    values_at: int
