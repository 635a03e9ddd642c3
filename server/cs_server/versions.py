"""The segment by which a worker knows, without asking, which variables have changed since it last copied them.

At 0 it counts the starts of the server, with each of which a GPU's memory is another.
Counted in the middle of a commit, so a commit that is done again after a crash counts once more, which costs its
readers a copy and nothing else. Called by the service.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from cs_proto.segments import Mapping

from .events import Commit, Fill

__all__ = ["NBYTES", "Versions"]

#: Address range of the segment: a uint64 for each variable that there ever was, of which touched pages take memory.
NBYTES = 8 << 30
_PAGE_NBYTES = 4096


class Versions:
    """What changes, by variable number."""

    def __init__(self, segment: Mapping) -> None:
        self._segment = segment
        self._versions = segment.elements("uint64")
        self._reserved = 0
        self._reserve(0)
        self._versions[0] += np.uint64(1)  # variables are numbered from 1

    def count(self, commit: Commit) -> None:
        """Every variable that ``commit`` changes has another number from now on.

        Raises MemoryPlanError where what the segment lies in has no room left.
        """
        for operation in commit.operations:
            if not isinstance(operation, Fill) and operation.variables:
                places = _places(operation.variables)
                self._reserve(int(places[-1]))
                self._versions[places] += np.uint64(1)

    def _reserve(self, place: int) -> None:
        stop = (place + 1) * self._versions.itemsize
        if stop > self._reserved:
            stop = -(-stop // _PAGE_NBYTES) * _PAGE_NBYTES
            self._segment.reserve(self._reserved, stop)
            self._reserved = stop


@lru_cache(maxsize=256)
def _places(variables: tuple[int, ...]) -> np.ndarray:
    """The set of an update comes again with every step."""
    return np.array(sorted(variables))
