"""Batches on their way to the replicas: a segment that the client writes and all workers map.

The thread that reads a data set ahead puts elements there while the replicas compute; a run then says where they lie
and copies nothing. The link owns one :class:`InputSegment`; which element is put there when is not known here.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque

import numpy as np

from cs_proto.arrays import INLINE_NBYTES, Array, Location
from cs_proto.errors import MemoryPlanError
from cs_runtime.shared_memory.mapping import Mapping, address_of

__all__ = ["InputSegment"]

_ALIGNMENT = 64
# What is kept of free memory; pages beyond are given back when nothing lies in the segment.
_KEEP_NBYTES = 64 << 20


class InputSegment:
    """Arrays in one segment, each as long as something views it. May be used from any thread."""

    def __init__(self, mapping: Mapping) -> None:
        self._mapping = mapping
        self._bytes = np.frombuffer(mapping.memory, np.uint8)
        self._address = address_of(self._bytes)
        self._lock = threading.Lock()
        self._used: list[tuple[int, int]] = []  # (start, end), ascending
        self._touched = 0
        # Where blocks were that nothing views any more. The collector may add to it in the middle of anything, so it
        # takes no lock.
        self._freed: deque[int] = deque()

    def carry(self, array: np.ndarray) -> np.ndarray:
        """A copy of ``array``: in the segment where it is large, which :meth:`find` tells, else in ordinary memory.
        Objects, records and dtypes of other libraries are always in ordinary memory."""
        # NumPy would take what lay there before for references to objects, and end the process.
        is_plain = array.dtype.kind in "biufcUSmM"
        start = self._room(array.nbytes) if is_plain and array.nbytes > INLINE_NBYTES else None
        if start is None:
            return array.copy()
        block = _Block(self._bytes, self._address + start, array)
        weakref.finalize(block, self._freed.append, start).atexit = False
        copy = np.asarray(block)
        copy[...] = array
        return copy

    def find(self, data: np.ndarray) -> Array | None:
        """The place of ``data`` (uint8[n]) where it lies in the segment. Whoever tells others of it keeps ``data``
        until they are done."""
        offset = address_of(data) - self._address
        if not 0 <= offset < len(self._bytes):
            return None
        return Array("uint8", data.shape, Location(self._mapping.name, offset))

    def _room(self, nbytes: int) -> int | None:
        """Where ``nbytes`` lie from now on; None where there is no room. The lowest place, so that pages are used
        again."""
        with self._lock:
            self._collect()
            start = 0
            for index, (first, end) in enumerate([*self._used, (len(self._bytes), 0)]):
                if start + nbytes <= first:
                    try:
                        self._mapping.reserve(start, start + nbytes)
                    except MemoryPlanError:
                        return None
                    self._used.insert(index, (start, start + nbytes))
                    self._touched = max(self._touched, start + nbytes)
                    return start
                start = -(-end // _ALIGNMENT) * _ALIGNMENT
        return None

    def _collect(self) -> None:
        freed = {self._freed.popleft() for _ in range(len(self._freed))}
        self._used = [block for block in self._used if block[0] not in freed]
        if not self._used and self._touched > _KEEP_NBYTES:
            self._mapping.discard(_KEEP_NBYTES, self._touched)
            self._touched = _KEEP_NBYTES


class _Block:
    """What the arrays over one place hold: when it goes, the place is free."""

    def __init__(self, memory: np.ndarray, address: int, like: np.ndarray) -> None:
        self._memory = memory
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": like.shape,
            "typestr": like.dtype.str,
        }
