"""Updates of tables in a prepared commit: bound before it is known where their gradients lie, and how many rows they
have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from cs_proto.arithmetic.optimizers import Hyperparameters
from cs_proto.arrays import Array, Location
from cs_server.events import Rows

from .kernels import BoundRows
from .object_loader import Bound
from .sparse import aligned, is_little, shares_for
from .undo import Lane

__all__ = ["GradientMemory", "PreparedRows", "Size", "kind_of", "size_of"]

# A commit is prepared for at least so many rows of a table, so that a few more do not take another one, and for at most
# so many: the memory to find them stays.
_LEAST_ROOM, _MOST_ROOM = 1 << 10, 1 << 16
# The kernels read arrays that begin at such bytes.
_ALIGNMENT = 16


class GradientMemory(Protocol):
    """The memory of sparse gradients."""

    def view(self, array: Array) -> np.ndarray:
        """The array behind a descriptor."""

    def elements(self, name: str, dtype: str) -> np.ndarray:
        """A whole segment as a 1-D array of ``dtype``."""


class Size(NamedTuple):
    """How large the gradients of a table are, as far as it decides how its update is prepared."""

    #: Whether its update is one of those that lanes make side by side.
    is_little: bool
    #: How many lanes share its rows.
    shares: int
    #: The most rows that the replicas may name together.
    room: int


def size_of(rows: int, width: int, lanes: int) -> Size:
    """The size of gradients with so many rows of so many elements, in a commit with so many lanes."""
    room = max(_LEAST_ROOM, 1 << rows.bit_length())
    return Size(True, 1, room) if is_little(rows * width) else Size(False, shares_for(rows * width, lanes), room)


def kind_of(rows: Rows, lanes: int) -> tuple[object, ...] | None:
    """What commits have in common that are prepared alike for this table. None if its update cannot be prepared."""
    named, segments = 0, []
    for values, indices in rows.gradients:
        if indices is None:
            return None
        named += indices.shape[0]
        segments.append((_segment_of(values), _segment_of(indices)))
    size = size_of(named, rows.shape[1], lanes)
    if size.room > _MOST_ROOM:
        return None
    return rows.dtype, rows.first, rows.shape, rows.parameters, rows.slots, rows.rule, tuple(segments), size


class PreparedRows:
    """The update of one table, in shares for some lanes."""

    def __init__(self, bound: BoundRows, rows: Rows, lanes: int, lane: Callable[[int], Lane], own: int) -> None:
        """``lane`` finds a lane of the commit, which has so many ``lanes``. A little update is made by its ``own``
        lane, and the shares of another one by the first lanes."""
        self._bound, self._width, self._lanes = bound, rows.shape[1], lanes
        self._row_nbytes = self._width * np.dtype(rows.dtype).itemsize
        replicas = len(rows.gradients)
        self._segments = [(_segment_of(values), _segment_of(indices)) for values, indices in rows.gradients]
        named = sum([values.shape[0] for values, _ in rows.gradients])
        #: How large the gradients are.
        self.size = size_of(named, self._width, lanes)
        by = [own] if self.size.is_little else range(self.size.shares)
        self._shares = [bound.share(lane(which), replicas, self.size.room) for which in by]
        # Of each replica the addresses and the lengths of the segments with values and indices.
        self._memory: list[tuple[int, int, int, int]] = []
        # What the shares and these addresses read.
        self._held: object = None

    @property
    def updates(self) -> list[Bound]:
        """What makes each share of an update."""
        return [share.update for share in self._shares]

    def set_numbers(self, hyperparameters: Hyperparameters, t: int) -> None:
        """Let the next update be the t-th of the rule."""
        for which, share in enumerate(self._shares):
            self._bound.set(share, which, len(self._shares), hyperparameters, t)

    def set_rows(self, rows: Rows, memory: GradientMemory) -> None:
        """Let the next update take these gradients, or others that lie in the same segments: see :meth:`take`."""
        views = [
            (memory.view(values), memory.view(indices)) for values, indices in rows.gradients if indices is not None
        ]
        gradients = aligned(views, self._width)
        self._bound.take(gradients)
        for share in self._shares:
            share.where[:] = self._bound.where
        whole: list[list[NDArray[np.uint8]]] = []
        if all(segment for both in self._segments for segment in both):
            whole = [[memory.elements(segment, "uint8") for segment in both] for both in self._segments]
        self._memory = [(*_span(values), *_span(indices)) for values, indices in whole]
        # A segment may be mapped anew for another commit, and :meth:`take` finds rows in this mapping.
        self._held = gradients, whole

    def take(self, places: Sequence[Sequence[int]]) -> bool:
        """Let the next update take the gradients from these places in their segments, by replica, as in
        `cs_proto.marks.Place`. False if they do not lie there as compiled code reads them, or another commit has to be
        prepared for so many rows. It must not be made then."""
        if len(places) != len(self._memory):
            return False
        where, total = [], 0
        for (rows, values, indices), memory in zip(places, self._memory, strict=True):
            first, nbytes, first_index, indices_nbytes = memory
            if (values | indices) % _ALIGNMENT:
                return False
            if values + rows * self._row_nbytes > nbytes or indices + rows * 8 > indices_nbytes:
                return False
            where.append((first + values, first_index + indices, rows))
            total += rows
        size = size_of(total, self._width, self._lanes)
        if total > self.size.room or size[:2] != self.size[:2]:
            return False
        for share in self._shares:
            share.where[:] = np.array(where, np.int64).T
        return True


def _segment_of(array: Array | None) -> str:
    """Empty for an array that lies in none."""
    return array.place.segment if array is not None and isinstance(array.place, Location) else ""


def _span(elements: NDArray[np.uint8]) -> tuple[int, int]:
    return elements.__array_interface__["data"][0], len(elements)
