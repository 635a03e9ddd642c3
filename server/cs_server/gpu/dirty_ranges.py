"""The ranges that a commit on a GPU has changed, so that only these are copied to the mirror."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from cs_proto.frozen import frozen
from cs_proto.ranges import merged
from cs_server.rules import Array

__all__ = ["Change", "Changed", "of_rows", "united"]

# The whole table is copied if its rows are short, or if a large share of its rows has changed.
_SHORT_ROW_NBYTES = 32
_MANY_ROWS = 4


@frozen(eq=False)
class Change:
    """Elements of a segment: ``width`` elements from ``first`` on, or the ``rows`` of the table that begins there."""

    segment: str
    first: int
    width: int
    rows: Array | None = None

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.width * (1 if self.rows is None else len(self.rows))

    def put(self, elements: Array, values: Array) -> None:
        """Write the new values, 1-D, into the whole segment."""
        if self.rows is None:
            elements[self.first : self.first + self.width] = values
            return
        height = (len(elements) - self.first) // self.width
        table = elements[self.first : self.first + height * self.width].reshape(height, self.width)
        table[self.rows] = values.reshape(len(self.rows), self.width)


#: A change, its dtype, and the mark on the GPU after which it is complete.
Changed = tuple[Change, str, Any]


def of_rows(segment: str, dtype: str, first: int, shape: tuple[int, int], rows: np.ndarray) -> Change:
    """These rows of a table as a change, or the whole table if that is less work."""
    height, width = shape
    if _MANY_ROWS * len(rows) >= height or width * np.dtype(dtype).itemsize < _SHORT_ROW_NBYTES:
        return Change(segment, first, height * width)
    return Change(segment, first, width, rows)


def united(changes: Iterable[Changed], mark: Any) -> list[Changed]:
    """The same changes with overlapping ones merged, all after ``mark``."""
    spans: dict[tuple[str, str], list[tuple[int, int]]] = {}
    tables: dict[tuple[str, str, int, int], list[np.ndarray]] = {}
    for change, dtype, _ in changes:
        if change.rows is None:
            spans.setdefault((change.segment, dtype), []).append((change.first, change.first + change.width))
        else:
            tables.setdefault((change.segment, dtype, change.first, change.width), []).append(change.rows)
    found: list[Changed] = []
    for (segment, dtype), of_segment in spans.items():
        found += [(Change(segment, first, last - first), dtype, mark) for first, last in merged(of_segment)]
    for (segment, dtype, first, width), rows in tables.items():
        found.append((Change(segment, first, width, np.unique(np.concatenate(rows))), dtype, mark))
    return found
