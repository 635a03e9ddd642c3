"""The segment from which a worker reads, without asking, which variables have changed since it last copied them.

Entry 0 counts the starts of the server: with each start the memory of a GPU is new. A version is raised in the middle
of a commit. A commit that is repeated after a crash raises it once more, which costs the readers one copy.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from cs_server.events import Commit, Fill

__all__ = ["Versions", "page_of"]

_PAGE_NBYTES = 4096
_NUMBER_NBYTES = 8
# For so few variables a loop is faster than NumPy.
_FEW = 16


class Versions:
    """The version of each variable, by its number."""

    def __init__(self, versions: np.ndarray) -> None:
        """``versions``: uint64, the whole segment, in which the first page can be written."""
        self._versions = versions
        self._words = self._versions.data
        self._versions[0] += np.uint64(1)  # variables are numbered from 1

    def addresses(self, commit: Commit) -> list[int]:
        """The addresses of the versions that :meth:`count` raises."""
        first = self._versions.__array_interface__["data"][0]
        numbers = [each.variables for each in commit.operations if not isinstance(each, Fill)]
        return [first + _NUMBER_NBYTES * number for of_one in numbers for number in of_one]

    def count(self, commit: Commit) -> None:
        """Raise the version of every variable that ``commit`` changes."""
        for operation in commit.operations:
            if not isinstance(operation, Fill) and operation.variables:
                if len(operation.variables) <= _FEW:
                    for number in operation.variables:
                        self._words[number] += 1
                else:
                    self._versions[_places(operation.variables)] += np.uint64(1)


def page_of(number: int) -> tuple[int, int] | None:
    """The bytes, from and to, that must have memory before the variable of that number is made. None if an earlier
    variable has had them made."""
    start = number * _NUMBER_NBYTES
    return None if start % _PAGE_NBYTES else (start, start + _PAGE_NBYTES)


@lru_cache(maxsize=256)
def _places(variables: tuple[int, ...]) -> np.ndarray:
    """The set of an update comes again with every step."""
    return np.array(sorted(variables))
