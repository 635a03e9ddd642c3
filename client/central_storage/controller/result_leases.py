"""Large results, which stay in the arena of the worker that returned them for as long as the script holds them.

The link owns one :class:`ResultLeases` for each worker and tells the worker with every run which pages are held, around
which it places; so the script may write into what it holds as into any array. What is beyond the limits is the link's
to copy. Decision 20 has the reasons.
"""

from __future__ import annotations

import functools
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable

import numpy as np

from cs_proto.arrays import Array, Location
from cs_proto.ranges import merged
from cs_runtime.shared_memory.mapping import Mapping
from cs_runtime.shared_memory.remote_segment import RemoteSegment

__all__ = ["MOST", "ResultLeases"]

# Smaller ones are copied sooner than held.
_LEAST_NBYTES = 512 << 10
#: So many are held of each worker, since every run says where they are.
MOST = 256
# Of all workers together, of what an arena and the file system that it lies in have room for.
_SHARE = 1 / 8

_lock = threading.RLock()  # another thread may fork at any time: then all that is held becomes this process's own
_all: weakref.WeakSet[ResultLeases] = weakref.WeakSet()


class ResultLeases:
    """The results in one arena that somebody in this process holds. One thread at a time, a fork apart."""

    def __init__(self, arena: str, open_arena: Callable[[], Mapping | RemoteSegment], replicas: int) -> None:
        """``replicas`` have arenas like the one of that name."""
        self._arena = arena
        self._open = open_arena
        self._replicas = replicas
        self._mapping: Mapping | None = None
        #: Where each that is held begins, and ends with its last page.
        self.ranges: dict[int, int] = {}
        self._own: set[int] = set()  # where those of them begin that are copies where they lie
        # Where those began that nobody holds any more. The collector may add to it in the middle of anything, so it
        # takes no lock.
        self._freed: deque[int] = deque()
        _watch_forks()
        _all.add(self)

    def take(self, array: Array) -> np.ndarray | None:
        """The array, writable, where it lies; None where it has to be copied. It is held until nothing views it."""
        place = array.place
        if not isinstance(place, Location) or place.segment != self._arena or array.nbytes < _LEAST_NBYTES:
            return None
        start = place.offset
        stop = -(-(start + array.nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        # One array that was returned twice is two here, as what is small is.
        if start % mmap.PAGESIZE or start in self.ranges or len(self.ranges) >= MOST:
            return None
        mapping = self._mapping or self._open()
        if isinstance(mapping, RemoteSegment):
            return None
        self._mapping = mapping
        with _lock:
            nbytes = sum(last - first for first, last in self.ranges.items()) + stop - start
            if nbytes > mapping.room_nbytes * _SHARE / self._replicas:
                return None
            view = mapping.view(array)
            self.ranges[start] = stop
        # Every array made of this one holds the one at its base, which nobody else has. This object lives as long, too:
        # a fork has to find it after the strategy is gone.
        weakref.finalize(view.base, self._free, start).atexit = False
        return view

    def held(self) -> tuple[tuple[int, int], ...]:
        """The pages that are held, which the worker must leave alone until it is told others."""
        if not self.ranges:
            return ()
        with _lock:
            while self._freed:
                start = self._freed.popleft()
                stop = self.ranges.pop(start)
                if start in self._own:
                    assert self._mapping is not None
                    self._mapping.attach(start, stop)
                    self._own.remove(start)
            return tuple(merged(self.ranges.items()))

    def _free(self, start: int) -> None:
        self._freed.append(start)

    def own(self) -> None:
        """Make copies of what is held, where it lies, since the arena is not left alone by all. Raises
        :class:`~cs_proto.errors.MemoryPlanError` where there is no memory for that."""
        with _lock:
            self.held()
            for start, stop in self.ranges.items():
                if start not in self._own:
                    assert self._mapping is not None
                    self._mapping.detach(start, stop)
                    self._own.add(start)


@functools.cache
def _watch_forks() -> None:
    """A child keeps what this process holds, and nobody would wait for it to let go."""
    os.register_at_fork(before=_before_fork, after_in_parent=_lock.release, after_in_child=_in_child)


def _before_fork() -> None:
    _lock.acquire()
    for results in list(_all):
        results.own()


def _in_child() -> None:
    _all.clear()
    _lock.release()
