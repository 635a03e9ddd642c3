"""Which memory of the machine a process has page-locked for its GPUs: one rule for server and workers.

CUDA locks ranges of whole pages, each once, and makes no copy across the border of a range. So what is not locked yet
is locked, in as few ranges as there are gaps, and a copy is made in :meth:`PageLocks.parts`; a kernel may read across
borders. A lock keeps pages in memory, and where a page of a segment is given back and a new one takes its place, it
keeps the old one: so what is freed is unlocked first. Knows no device: its calls come as arguments.
"""

from __future__ import annotations

import bisect
import mmap
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Protocol

from cs_proto.ranges import merged

__all__ = ["PageLocks"]

# cudaHostRegisterPortable and -Mapped: for all devices, and for kernels. cudaHostRegisterReadOnly: of a mapping that
# may not be written. CuPy has no names for them.
_LOCKED, _READ_ONLY = 1 | 2, 8


class Runtime(Protocol):
    """What is needed of CUDA's runtime, under CuPy's names."""

    CUDARuntimeError: type[Exception]

    def hostRegister(self, address: int, nbytes: int, flags: int) -> None:  # noqa: N802
        """Lock pages."""

    def hostUnregister(self, address: int) -> None:  # noqa: N802
        """Unlock what was locked from that address on."""


class PageLocks:
    """Page-locked ranges of this process. Used by one thread."""

    def __init__(self, runtime: Runtime, wait: Callable[[], None], say: Callable[[str], None]) -> None:
        """``wait`` returns when no copy is under way: a range cannot be unlocked while one uses it. ``say`` is told why
        memory cannot be locked, once."""
        self._runtime = runtime
        self._wait = wait
        self._say = say
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._refused: set[int] = set()

    def lock(self, spans: Iterable[tuple[int, int]], *, writable: bool = True) -> bool:
        """Lock the pages of the bytes from and to these addresses, as far as they are not; whether they are now. Where
        that is refused copies are slower and otherwise the same."""
        flags = _LOCKED if writable else _LOCKED | _READ_ONLY
        wanted = merged(_pages(start, stop) for start, stop in spans if start < stop)
        for low, high in [gap for start, stop in wanted for gap in self._gaps(start, stop)]:
            if flags in self._refused:
                return False
            try:
                self._runtime.hostRegister(low, high - low, flags)
            except self._runtime.CUDARuntimeError as error:
                self._refused.add(flags)
                # The text alone: an error that is kept would keep memory by its frames.
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
        """The bytes from an address on as (from, to), counted from there: what may be one copy each."""
        if nbytes:
            first, last = self._overlapping(start, start + nbytes)
            borders = {*self._starts[first:last], *self._stops[first:last]}
            cuts = sorted({start, start + nbytes, *(each for each in borders if start < each < start + nbytes)})
            yield from ((low - start, high - start) for low, high in pairwise(cuts))

    def unlock(self, start: int, stop: int) -> None:
        """Unlock every range that has pages in common with these bytes."""
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
        """What of it is not locked."""
        first, last = self._overlapping(start, stop)
        for low, high in zip(self._starts[first:last], self._stops[first:last], strict=True):
            if start < low:
                yield start, low
            start = high
        if start < stop:
            yield start, stop

    def _overlapping(self, start: int, stop: int) -> tuple[int, int]:
        """Which ranges, from and to, have bytes in common with these."""
        return bisect.bisect_right(self._stops, start), bisect.bisect_left(self._starts, stop)


def _pages(start: int, stop: int) -> tuple[int, int]:
    return start - start % mmap.PAGESIZE, stop + -stop % mmap.PAGESIZE
