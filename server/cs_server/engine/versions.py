"""The segment by which a worker knows, without asking, which variables have changed since it last copied them.

At 0 it counts the starts of the server, with each of which a GPU's memory is another.
Counted in the middle of a commit, so a commit that is done again after a crash counts once more, which costs its
readers a copy and nothing else. Called by the service.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from cs_server.events import Commit, Fill

__all__ = ["Versions", "page_of"]

_PAGE_NBYTES = 4096
_NUMBER_NBYTES = 8
# Of so many variables one by one is faster.
_FEW = 16


class Versions:
    """What changes, by variable number."""

    def __init__(self, versions: np.ndarray) -> None:
        """``versions``: uint64, the whole segment, in which the first page can be written."""
        self._versions = versions
        self._words = self._versions.data
        self._versions[0] += np.uint64(1)  # variables are numbered from 1

    def count(self, commit: Commit) -> None:
        """Every variable that ``commit`` changes has another number from now on."""
        for operation in commit.operations:
            if not isinstance(operation, Fill) and operation.variables:
                if len(operation.variables) <= _FEW:
                    for number in operation.variables:
                        self._words[number] += 1
                else:
                    self._versions[_places(operation.variables)] += np.uint64(1)


def page_of(number: int) -> tuple[int, int] | None:
    """Bytes from and to that must find memory before the variable of that number is made; None where they did for an
    earlier one."""
    start = number * _NUMBER_NBYTES
    return None if start % _PAGE_NBYTES else (start, start + _PAGE_NBYTES)


@lru_cache(maxsize=256)
def _places(variables: tuple[int, ...]) -> np.ndarray:
    """The set of an update comes again with every step."""
    return np.array(sorted(variables))
