"""A segment that this process cannot map. Its bytes come and go in frames, by way of the server, which maps them all.

A container may forbid shared mappings, or a descriptor may not reach it. Then :class:`RemoteSegment` takes the place of
:class:`~cs_runtime.shared_memory.mapping.Mapping`. Array descriptors stay the same, so no other code sees a difference.
A read gives a copy, current at the time of the question; written data has arrived when :meth:`RemoteSegment.write`
returns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol, TypeVar

import numpy as np

from cs_proto.arrays import Array, Location, array_of, dtype_name, frame_view, item_nbytes
from cs_proto.errors import LocalProtocolError
from cs_proto.messages import Done, Fetch, Fetched, Put
from cs_proto.records import Record

__all__ = ["Carry", "RemoteSegment", "aligned", "aligned_copy"]

R = TypeVar("R", bound=Record)

# A message carries at most this many bytes of an array, unless one row of it is longer.
_AT_ONCE = 16 << 20
# Aligned as in a segment: the last bit of a result may depend on the alignment of an array.
_ALIGNMENT = 64


class Carry(Protocol):
    """How this process asks the server."""

    def __call__(self, request: Callable[[int], Record], answer: type[R]) -> R:
        """Build the request with a new number of this process, send it, and wait for its answer. Raises the server's
        error if the server refuses."""


class RemoteSegment:
    """The segment ``name``, which is not mapped in this process."""

    def __init__(self, name: str, nbytes: int, carry: Carry) -> None:
        self.name = name
        self.nbytes = nbytes
        self._carry = carry

    def view(self, array: Array) -> np.ndarray:
        """A read-only copy of the array, which lies in this segment."""
        start = self._start(array)
        copy = aligned(array.dtype, array.shape)
        flat = copy.reshape(-1).view(np.uint8)
        for first in range(0, array.nbytes, _AT_ONCE):
            piece = flat[first : first + _AT_ONCE]
            piece[...] = self._fetch(Array("uint8", piece.shape, Location(self.name, start + first)), None)
        copy.flags.writeable = False
        return copy

    def rows(self, array: Array, rows: np.ndarray) -> np.ndarray:
        """A copy of these rows of the array; ``rows`` is int64 of any shape, within the array. A row that is named
        several times is fetched once."""
        self._start(array)
        flat, rest = rows.reshape(-1), array.shape[1:]
        asked, places = np.unique(flat, return_inverse=True)
        copy = aligned(array.dtype, (*asked.shape, *rest))
        count = max(1, _AT_ONCE // max(asked.itemsize, math.prod(rest) * item_nbytes(array.dtype)))
        for first in range(0, len(asked), count):
            copy[first : first + count] = self._fetch(array, asked[first : first + count])
        every = aligned(array.dtype, (*flat.shape, *rest))
        np.take(copy, places, 0, out=every, mode="clip")  # "raise" would copy once more
        return every.reshape(*rows.shape, *rest)

    def write(self, array: Array, value: np.ndarray) -> None:
        """Write ``value``, of its shape and dtype, where the array lies.

        Raises MemoryPlanError if the segment's file system has no room for it.
        """
        start = self._start(array)
        flat = np.ascontiguousarray(value, array.dtype).reshape(-1).view(np.uint8)
        for first in range(0, array.nbytes, _AT_ONCE):
            self._put(start + first, array_of(flat[first : first + _AT_ONCE]))

    def take(self, start: int, stop: int, what: str) -> None:
        """Do nothing: the server takes the memory when it writes."""

    def discard(self, start: int, stop: int) -> None:
        """Give whole pages between ``start`` and ``stop`` back; they read as zeros afterwards."""
        whole = Array("uint8", (stop - start,), Location(self.name, start))
        self._carry(lambda number: Put(number, whole, None), Done)

    def _start(self, array: Array) -> int:
        if not isinstance(array.place, Location) or array.place.segment != self.name:
            raise LocalProtocolError(f"{array} does not lie in segment {self.name}")
        return array.place.offset

    def _fetch(self, array: Array, rows: np.ndarray | None) -> np.ndarray:
        named = None if rows is None else array_of(rows)
        return frame_view(self._carry(lambda number: Fetch(number, array, named), Fetched).array)

    def _put(self, start: int, value: Array) -> None:
        target = Array("uint8", value.shape, Location(self.name, start))
        self._carry(lambda number: Put(number, target, value), Done)


def aligned(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """An uninitialized array with the alignment of arrays in a segment."""
    nbytes = item_nbytes(dtype) * math.prod(shape)
    room = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -room.ctypes.data % _ALIGNMENT
    return room[start : start + nbytes].view(dtype).reshape(shape)


def aligned_copy(array: np.ndarray) -> np.ndarray:
    """A writable copy of ``array``, of the same shape and dtype, that begins at a multiple of 64 bytes."""
    copy = aligned(dtype_name(array.dtype), array.shape)
    copy[...] = array
    return copy
