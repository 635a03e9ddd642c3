"""Ranges of bytes, elements or addresses: half open, as pairs of numbers."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["merged"]


def merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ascending, without empty ones, what overlaps or follows each other as one.

    >>> merged([(5, 7), (0, 2), (2, 4), (3, 3), (6, 9)])
    [(0, 4), (5, 9)]
    """
    found: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        elif start < stop:
            found.append((start, stop))
    return found
