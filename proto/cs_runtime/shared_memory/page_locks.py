"""The host memory that a process has page-locked for its GPUs; server and workers use the same rule.

CUDA locks ranges of whole pages, each page once, and cannot copy across the border of two ranges. So this module locks
only the gaps between locked ranges, and splits a copy at the borders (:meth:`PageLocks.parts`); a kernel may read
across borders. If a page of a segment is given back and replaced, the lock still holds the old page, so memory is
unlocked before it is freed. This module knows no device: the calls are arguments.
"""

from __future__ import annotations

import bisect
import mmap
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Protocol

from cs_proto.ranges import merged

__all__ = ["PageLocks"]

# cudaHostRegisterPortable and -Mapped: for all devices, and for kernels. cudaHostRegisterReadOnly: for a mapping that
# may not be written. CuPy has no names for them.
_LOCKED, _READ_ONLY = 1 | 2, 8


class Runtime(Protocol):
    """The calls of CUDA's runtime that are needed, under CuPy's names."""

    CUDARuntimeError: type[Exception]

    def hostRegister(self, address: int, nbytes: int, flags: int) -> None:  # noqa: N802
        """Lock pages."""

    def hostUnregister(self, address: int) -> None:  # noqa: N802
        """Unlock the range that was locked at that address."""


class PageLocks:
    """Page-locked ranges of this process. Used by one thread."""

    def __init__(self, runtime: Runtime, wait: Callable[[], None], say: Callable[[str], None]) -> None:
        """``wait`` returns when no copy is under way, because a range cannot be unlocked while a copy uses it. ``say``
        is called once, with the reason, if memory cannot be locked."""
        self._runtime = runtime
        self._wait = wait
        self._say = say
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._refused: set[int] = set()

    def lock(self, spans: Iterable[tuple[int, int]], *, writable: bool = True) -> bool:
        """Lock the pages between these addresses that are not locked yet, and return whether all are locked now. If the
        driver refuses, copies are slower and otherwise the same."""
        flags = _LOCKED if writable else _LOCKED | _READ_ONLY
        wanted = merged(_pages(start, stop) for start, stop in spans if start < stop)
        for low, high in [gap for start, stop in wanted for gap in self._gaps(start, stop)]:
            if flags in self._refused:
                return False
            try:
                self._runtime.hostRegister(low, high - low, flags)
            except self._runtime.CUDARuntimeError as error:
                self._refused.add(flags)
                # Only the text: an error object would keep memory alive through its frames.
                self._say(f"shared memory cannot be page-locked ({error!s})")
                return False
            place = bisect.bisect(self._starts, low)
            self._starts.insert(place, low)
            self._stops.insert(place, high)
        return True

    def covers(self, start: int, stop: int) -> bool:
        """Whether all bytes between two addresses are locked."""
        return stop <= start or next(self._gaps(start, stop), None) is None

    def parts(self, start: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """Split the bytes from an address on into ranges (from, to), counted from there, that one copy each can
        carry."""
        if nbytes:
            first, last = self._overlapping(start, start + nbytes)
            borders = {*self._starts[first:last], *self._stops[first:last]}
            cuts = sorted({start, start + nbytes, *(each for each in borders if start < each < start + nbytes)})
            yield from ((low - start, high - start) for low, high in pairwise(cuts))

    def unlock(self, start: int, stop: int) -> None:
        """Unlock every range that shares pages with these bytes."""
        first, last = self._overlapping(*_pages(start, stop))
        if first < last:
            self._wait()
            for low in self._starts[first:last]:
                self._runtime.hostUnregister(low)
            del self._starts[first:last], self._stops[first:last]

    def close(self) -> None:
        """Unlock everything."""
        if self._starts:
            self.unlock(self._starts[0], self._stops[-1])

    def _gaps(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The parts of it that are not locked."""
        first, last = self._overlapping(start, stop)
        for low, high in zip(self._starts[first:last], self._stops[first:last], strict=True):
            if start < low:
                yield start, low
            start = high
        if start < stop:
            yield start, stop

    def _overlapping(self, start: int, stop: int) -> tuple[int, int]:
        """The index range (from, to) of the locked ranges that overlap these bytes."""
        return bisect.bisect_right(self._stops, start), bisect.bisect_left(self._starts, stop)


def _pages(start: int, stop: int) -> tuple[int, int]:
    return start - start % mmap.PAGESIZE, stop + -stop % mmap.PAGESIZE
