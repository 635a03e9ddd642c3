"""Ranges of bytes, elements or addresses: half open, as pairs of numbers."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["merged", "without"]


def merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The ranges in ascending order, without empty ones; those that overlap or touch are merged.

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


def without(ranges: Iterable[tuple[int, int]], others: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The parts of ``ranges`` that lie in none of ``others``. Both must be as :func:`merged` returns them.

    >>> without([(0, 4), (5, 9), (10, 12)], [(1, 2), (3, 6), (8, 9), (12, 20)])
    [(0, 1), (2, 3), (6, 8), (10, 12)]
    """
    found: list[tuple[int, int]] = []
    taken = list(others)
    for start, stop in ranges:
        left = start
        for first, last in taken:
            if first >= stop:
                break
            if left < first:
                found.append((left, first))
            left = max(left, last)
        if left < stop:
            found.append((left, stop))
    return found
