"""Cuts ranges of elements into pieces of work for blocks of threads. It handles only numbers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from cs_proto.frozen import frozen

__all__ = ["PIECE", "Pieces", "contiguous", "cut", "runs", "split"]

#: Elements of one piece of work of a block of threads.
PIECE = 1 << 13


@frozen(eq=False)
class Pieces:
    """Work for blocks of threads, int64 [n] each: ``counts`` elements of a segment from ``starts`` on. ``sources`` are
    the first elements in the gradient, or -1 for a gradient of zero."""

    starts: np.ndarray
    counts: np.ndarray
    sources: np.ndarray

    def __len__(self) -> int:
        return len(self.starts)

    def part(self, which: np.ndarray) -> Pieces:
        """These pieces, by a mask or by numbers."""
        return Pieces(self.starts[which], self.counts[which], self.sources[which])


def split(spans: np.ndarray, borders: np.ndarray) -> np.ndarray:
    """Split spans (start, stop, source) in ascending order, so that none crosses a border."""
    split = []
    for start, stop, source in spans.tolist():
        inside = borders[np.searchsorted(borders, start, side="right") : np.searchsorted(borders, stop)].tolist()
        cuts = [start, *inside, stop]
        split += [(first, last, source + first - start) for first, last in pairwise(cuts)]
    return np.array(split, np.int64).reshape(-1, 3)


def cut(spans: np.ndarray) -> Pieces:
    """Cut spans (start, stop, source or -1) into pieces."""
    lengths = spans[:, 1] - spans[:, 0]
    parts = -(-lengths // PIECE)
    which = np.repeat(np.arange(len(spans)), parts)
    offset = (np.arange(len(which)) - np.repeat(np.cumsum(parts) - parts, parts)) * PIECE
    sources = spans[which, 2]
    return Pieces(
        spans[which, 0] + offset,
        np.minimum(PIECE, lengths[which] - offset),
        np.where(sources < 0, -1, sources + offset),
    )


def runs(pieces: Pieces, window: slice) -> Iterator[tuple[int, int]]:
    """The ranges of elements of the pieces in ``window``; adjacent pieces are merged."""
    starts, counts = pieces.starts[window], pieces.counts[window]
    return ((start, stop) for start, stop, _ in contiguous(starts, counts, np.zeros_like(starts)))


def contiguous(starts: np.ndarray, counts: np.ndarray, offsets: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """(start, stop, offset of the first) of each contiguous range."""
    if not len(starts):
        return
    breaks = np.flatnonzero(starts[1:] != starts[:-1] + counts[:-1]) + 1
    begins, ends = np.concatenate([[0], breaks]), np.concatenate([breaks, [len(starts)]])
    for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
        yield int(starts[begin]), int(starts[end - 1] + counts[end - 1]), int(offsets[begin])
