"""The norms of the gradients of an apply, and the factors that the bounds make of them.

They are made once for the places of an apply, as plans are. Norms only read gradients, which stay as they are until the
commit is done: so a server that continues a commit finds the same factors again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from cs_proto.frozen import frozen
from cs_server.events import Dense, Update

from . import norm_kernels
from .clipping import UNBOUNDED, Clipping, square_of
from .kernels import in_turn
from .object_loader import Bound
from .plans import Arrays, lanes_for

__all__ = ["Kinds", "Norms", "kinds_of"]

# The squares of a gradient are added up in pieces of this many elements, and those of the pieces in order.
_PIECE = 1 << 16

Kinds: TypeAlias = tuple[tuple[bool, bool, bool], ...]
"""Which bounds each optimizer has, in the order of the fields of `Clipping`."""


def kinds_of(clippings: Sequence[Clipping | None]) -> Kinds:
    """Which bounds optimizers with this clipping have."""
    found = [clipping or UNBOUNDED for clipping in clippings]
    return tuple([(c.clipvalue is not None, c.clipnorm is not None, c.global_clipnorm is not None) for c in found])


@frozen
class _Piece:
    """Elements of a part of an update."""

    #: The number of the update, and that of its part among all dense parts.
    update: int
    part: int
    first: int
    last: int


class Norms:
    """What finds the factors of the next apply: by :meth:`set`, then each of :attr:`shares`, in any order or at once,
    then :attr:`find`. The result is in :attr:`factors`. ::

        norms = Norms(operation.updates, kinds_of(clippings), True, arrays, lanes)
        norms.set(clippings, operation)
        for share in norms.shares:
            share()
        norms.find()
    """

    def __init__(
        self,
        updates: Sequence[Update],
        kinds: Kinds,
        is_bounded_together: bool,
        arrays: Callable[[Dense], Arrays],
        lanes: int,
    ) -> None:
        """``arrays`` finds the memory of a part of the updates. ``is_bounded_together``: one norm of all gradients is
        bounded, too."""
        self._kinds = kinds
        self._pieces: list[_Piece] = []
        self._gradients: list[tuple[np.ndarray, ...]] = []  # of each dense part
        #: Of each table the number of the piece that is its square, or -1 if none is needed.
        self._tables: list[int] = []
        ends: list[int] = []
        groups: list[tuple[int, int]] = []
        for number, (update, kind) in enumerate(zip(updates, kinds, strict=True)):
            begin, is_needed = len(ends), is_bounded_together or kind[1] or kind[2]
            self._add(number, update, is_needed, arrays, ends)
            if kind[1]:
                groups += [(place + 1, norm_kernels.OF_EACH) for place in range(begin, len(ends))]
            else:
                groups.append((len(ends), norm_kernels.OF_ALL if kind[2] else norm_kernels.NO_BOUND))
        #: What the summed gradient of each range, and of each table, of each update is multiplied by.
        self.factors: NDArray[np.float64] = np.ones(len(ends))
        self._squares = np.zeros(len(self._pieces))
        self._groups = np.array(groups, np.int64).reshape(-1, 2)
        self._bounds, self._others = np.zeros(len(groups)), np.ones(len(ends))
        self._together = np.zeros(2 if is_bounded_together else 0)
        given = (self._squares, np.array(ends, np.int64), self._groups, self._bounds, self._others, self._together)
        #: What finds the factors.
        self.find: Bound = norm_kernels.factors()(*given, self.factors)
        self._clippings: Sequence[Clipping] = ()
        self._weights: tuple[float, ...] = ()
        # Of each part its update, and the weights and the bound of each element in its dtype.
        self._numbers = {
            piece.part: (piece.update, *_numbers(self._gradients[piece.part]))
            for piece in self._pieces
            if piece.part >= 0
        }
        #: What adds up the squares, by lane. Empty if no norm is needed.
        self.shares: list[Callable[[], None]] = self._shared(lanes)

    def set(self, clippings: Sequence[Clipping], updates: Sequence[Update], weights: tuple[float, ...]) -> None:
        """Let the next factors be those of these bounds, updates and weights of the replicas. The kinds of the bounds
        are as they were."""
        self._clippings, self._weights = clippings, weights
        for number, of_replicas, limit in self._numbers.values():
            bound = clippings[number].clipvalue
            with np.errstate(over="ignore"):
                of_replicas[:] = weights or 1.0
                limit[:] = math.inf if bound is None else bound
        group = place = 0
        for clipping, update, kind in zip(clippings, updates, self._kinds, strict=True):
            count = sum(len(part.ranges) for part in update.dense) + len(update.sparse)
            groups = count if kind[1] else 1
            self._bounds[group : group + groups] = clipping.clipnorm or clipping.global_clipnorm or 0.0
            self._others[place : place + count] = update.factor
            group, place = group + groups, place + count

    def bound_together(self, bound: float, epsilon: float) -> None:
        """Let the bound of all gradients together be this one."""
        self._together[:] = bound, epsilon

    def add_table(self, number: int, sums: np.ndarray) -> None:
        """Let this be the summed gradient of a table, which count through all updates."""
        if self._tables[number] >= 0:
            self._squares[self._tables[number]] = square_of(sums)

    def _add(
        self, number: int, update: Update, is_needed: bool, arrays: Callable[[Dense], Arrays], ends: list[int]
    ) -> None:
        """Note the pieces of an update."""
        for part in update.dense:
            self._gradients.append(arrays(part)[2])
            for start, stop in part.places:
                cuts = range(start, stop, _PIECE) if is_needed else ()
                own = [_Piece(number, len(self._gradients) - 1, first, min(first + _PIECE, stop)) for first in cuts]
                self._pieces += own
                ends.append(len(self._pieces))
        for _ in update.sparse:
            self._tables.append(len(self._pieces) if is_needed else -1)
            self._pieces += [_Piece(number, -1, 0, 0)] if is_needed else []
            ends.append(len(self._pieces))

    def _shared(self, lanes: int) -> list[Callable[[], None]]:
        """The pieces in shares of about as many elements, by lane."""
        total, before = sum(piece.last - piece.first for piece in self._pieces), 0
        count = lanes_for(total, lanes)
        # Of each share, the pieces of one part that follow one another, by the number of the first one.
        shares: list[dict[int, list[_Piece]]] = [{} for _ in range(count)]
        last: tuple[int, int] | None = None
        for number, piece in enumerate(self._pieces):
            share = min(before * count // total, count - 1) if total else 0
            before += piece.last - piece.first
            if piece.part < 0:
                last = None
                continue
            if last != (share, piece.part):
                last, first = (share, piece.part), number
                shares[share][first] = []
            shares[share][first].append(piece)
        return [in_turn([self._sum(*each) for each in share.items()]) for share in shares if share]

    def _sum(self, first: int, pieces: Sequence[_Piece]) -> Callable[[], None]:
        """What computes the squares of pieces of one part, of which the first one has this number."""
        part, squares = pieces[0].part, self._squares[first : first + len(pieces)]
        gradients, (update, *numbers) = self._gradients[part], self._numbers[part]
        if gradients[0].dtype in norm_kernels.COMPILED:
            addresses = np.array([each.ctypes.data for each in gradients], np.int64)
            places = np.array([(piece.first, piece.last) for piece in pieces], np.int64)
            return norm_kernels.squares(gradients[0].dtype)(addresses, *numbers, places, squares)

        def by_reference() -> None:
            for number, piece in enumerate(pieces):
                elements = slice(piece.first, piece.last)
                squares[number] = square_of(self._clippings[update].total(gradients, elements, self._weights))

        return by_reference


def _numbers(gradients: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    real = gradients[0].real.dtype
    return np.ones(len(gradients), real), np.full(1, np.inf, real)
