"""Which host memory is page-locked for the GPUs of a replica.

CUDA locks whole ranges, each once, and copies between a device and host memory that lies wholly in one of them, so
ranges that share a page are locked as one. A lock keeps pages in memory, and where the server gives a page of the
segment back and takes a new one in its place, it keeps the old one: so what is freed is unlocked.
"""

from __future__ import annotations

import bisect
import logging
import mmap
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

__all__ = ["PageLocks"]

_log = logging.getLogger("central_storage.worker")

# cudaHostRegisterPortable: for all devices. cudaHostRegisterReadOnly: of a mapping that may not be written.
_PORTABLE, _READ_ONLY = 1, 8


class PageLocks:
    """Page-locked ranges of this process."""

    def __init__(self, cupy: Any, wait: Callable[[], None]) -> None:
        """``wait`` returns when no copy is under way: a range cannot be unlocked while one uses it."""
        self._runtime = cupy.cuda.runtime
        self._wait = wait
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._refused: set[int] = set()

    def covers(self, array: np.ndarray) -> bool:
        """Whether an array lies wholly in one range."""
        start, stop = _bounds(array)
        place = bisect.bisect_right(self._starts, start) - 1
        return place >= 0 and stop <= self._stops[place]

    def lock(self, arrays: Sequence[np.ndarray]) -> None:
        """Lock what these C-contiguous arrays lie in, as far as it is not. Where that is refused, say so once in the
        log and go on: copies are slower then and otherwise the same."""
        wanted: dict[bool, list[tuple[int, int]]] = {False: [], True: []}
        for array in arrays:
            if array.nbytes and not self.covers(array):
                wanted[array.flags.writeable].append(_pages(*_bounds(array)))
        for is_writable, ranges in wanted.items():
            for start, stop in _merged(ranges):
                self._lock(start, stop, _PORTABLE if is_writable else _PORTABLE | _READ_ONLY)

    def close(self) -> None:
        """Unlock everything."""
        for start, stop in list(zip(self._starts, self._stops, strict=True)):
            self._give_up(start, stop)

    def unlock(self, arrays: Sequence[np.ndarray]) -> None:
        """Unlock every range in which some of these lie."""
        for array in arrays:
            self._give_up(*_pages(*_bounds(array)))

    def _lock(self, start: int, stop: int, flags: int) -> None:
        if flags in self._refused:
            return
        for low, high in self._give_up(start, stop):
            start, stop = min(start, low), max(stop, high)
        try:
            self._runtime.hostRegister(start, stop - start, flags)
        except self._runtime.CUDARuntimeError as error:
            self._refused.add(flags)
            _log.warning("shared memory cannot be page-locked (%s): copies to and from the GPU are slower", error)
            return
        place = bisect.bisect(self._starts, start)
        self._starts.insert(place, start)
        self._stops.insert(place, stop)

    def _give_up(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Unlock the ranges that have pages in common with this one; which they are."""
        first, last = bisect.bisect_right(self._stops, start), bisect.bisect_left(self._starts, stop)
        found = list(zip(self._starts[first:last], self._stops[first:last], strict=True))
        if found:
            self._wait()
            del self._starts[first:last], self._stops[first:last]
            for low, _ in found:
                self._runtime.hostUnregister(low)
        return found


def _bounds(array: np.ndarray) -> tuple[int, int]:
    start = int(array.__array_interface__["data"][0])
    return start, start + array.nbytes


def _pages(start: int, stop: int) -> tuple[int, int]:
    return start - start % mmap.PAGESIZE, stop + -stop % mmap.PAGESIZE


def _merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ascending, those that have pages in common as one."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if merged and start < merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return merged
