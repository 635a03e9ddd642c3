"""Sparse gradients: adds up rows that several replicas, or one replica twice, name, and applies rules by rows.

This module owns the fixed order in which duplicates are added (by replica, then by position), the rows that an update
reads and writes, and the pieces into which it is cut for a commit (`undo`). A rule that changes only the named rows
never reads the others: `kernels` adds up and updates row by row in place, and NumPy code works on rows gathered into
pieces that fit the cache. For any other rule a piece is a range of the table, with a gradient of zero except for the
named rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from cs_proto.arithmetic.optimizers import Hyperparameters
from cs_proto.frozen import frozen
from cs_proto.messages import WriteOp
from cs_proto.scatter import write
from cs_server.rules import Array, Rule, grow, move, squares

from .kernels import BoundRows, apply_dense, has_kernel, merge_kernel
from .undo import KEPT_NBYTES, Lane

__all__ = ["Merged", "Table", "aligned", "as_dense", "is_little", "merge", "shares_for", "weighted", "write_rows"]

#: Elements of one piece: even with three slots, all arrays of a piece stay in the cache.
_PIECE = 1 << 16

Piece: TypeAlias = tuple[slice, slice]
"""Rows and columns of a table: all columns, unless a row is so wide that it is cut."""

Phase: TypeAlias = Callable[[Sequence[Any], Callable[[Sequence[Any], Lane], None]], None]
"""Has some work done for the pieces, or shares, of each lane, by several threads."""


@frozen
class Merged:
    """The summed gradient of a table: int64 ``rows`` [n], each once, in the order in which they were first named, and
    ``sums`` [n, elements of a row]."""

    rows: Array
    sums: Array


def merge(gradients: Sequence[tuple[Array, Array]], height: int, width: int) -> Merged:
    """Add up (values, indices) of all replicas, in replica order. Rows come in the order in which they are first named.

    ``values`` [k, ...] have ``width`` elements a row and one dtype, ``indices`` are int64 [k]. The replicas have
    checked that they lie in [0, height); any other row is skipped, because a commit cannot fail.
    """
    inside = [_inside(values, indices, height) for values, indices in aligned(gradients, width)]
    values, named = [values for values, _ in inside], [indices for _, indices in inside]
    kernel = merge_kernel(values[0].dtype)
    if kernel is None:
        return merge_reference(values, named)
    total = sum(map(len, named))
    rows, sums = np.empty(total, np.int64), np.empty((total, width), values[0].dtype)
    table = np.full(1 << max(4, (2 * total).bit_length()), -1, np.int64)
    addresses = [np.array([part.ctypes.data for part in parts], np.int64) for parts in (values, named)]
    lengths = np.array([len(part) for part in named], np.int64)
    count = kernel(*addresses, lengths, table, rows, sums)
    return Merged(rows[:count], sums[:count])


def merge_reference(values: Sequence[Array], indices: Sequence[Array]) -> Merged:
    """The reference in plain NumPy, which ``merge`` must equal bit for bit."""
    unique, first, place = np.unique(np.concatenate(indices), return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    # Adding to -0.0 changes no number, not even the sign of a zero.
    sums = np.full((len(unique), values[0].shape[1]), -0.0, values[0].dtype)
    with np.errstate(all="ignore"):
        np.add.at(sums, rank[place], np.concatenate(values))
    return Merged(unique[order], sums)


def weighted(gradients: Sequence[tuple[Array, Array]], weights: Sequence[float]) -> list[tuple[Array, Array]]:
    """The gradients of the replicas, as (values, indices), times their weights; without weights, as they are. One whose
    weight is 0 names no row."""
    if not weights:
        return list(gradients)
    found = []
    for (values, indices), weight in zip(gradients, weights, strict=True):
        if weight == 1:
            found.append((values, indices))
        elif values.dtype.type(weight) == 0:
            found.append((values[:0], indices[:0]))
        else:
            real = np.ascontiguousarray(values).view(values.real.dtype)  # as in `scaled`
            with np.errstate(all="ignore"):
                found.append(((real * real.dtype.type(weight)).view(values.dtype), indices))
    return found


def as_dense(values: Array, indices: Array, height: int) -> Array:
    """The same gradient with all rows of a table of this height, in the same dtype. Equal rows are added up in order.

    It is added to dense gradients of other replicas, as TensorFlow does.
    """
    found = np.zeros((height, *values.shape[1:]), values.dtype)
    write(found, "scatter_add", values, indices)
    return found


def is_little(elements: int) -> bool:
    """Whether gradients with so many elements are too few for several threads."""
    return elements < 2 * _PIECE


def shares_for(elements: int, lanes: int) -> int:
    """Among how many of the lanes the rows are shared that gradients with so many elements name."""
    return max(1, min(lanes, elements // _PIECE))


class Table:
    """Parameters and slots, contiguous, of one dtype and shape [height, width], and updates of them. The slot of a rule
    with one number for each row has the shape [height]."""

    def __init__(self, rule: Rule, parameters: Array, slots: tuple[Array, ...]) -> None:
        self._rule, self._parameters, self._slots = rule, parameters, slots

    @cached_property
    def _bound(self) -> BoundRows | None:
        # Compiled when an update first goes by rows. Updates of a rule that changes other rows, too, may never do that.
        is_compiled = has_kernel(self._rule, self._parameters.dtype, is_sparse=True)
        return BoundRows(self._rule, self._parameters, self._slots) if is_compiled else None

    def apply(
        self,
        gradients: Sequence[tuple[Array, Array]],
        hyperparameters: Hyperparameters,
        t: int,
        phase: Phase,
        lanes: int,
    ) -> None:
        """Apply the rule's t-th update under sparse gradients as :func:`merge` takes them, in place.

        ``phase`` spreads the pieces over up to ``lanes`` threads. Rows that no gradient names change as the rule says,
        or not at all if ``lazy`` is set.
        """
        if not self._parameters.size:
            return
        if self._rule.moving(hyperparameters) != "rows":
            self._whole(merge(gradients, *self._parameters.shape), hyperparameters, t, phase)
        elif self._bound is None:
            update = self._gathered if self._rule.row is None else self._by_row
            update(merge(gradients, *self._parameters.shape), hyperparameters, t, phase)
        else:
            self._named(self._bound, gradients, hyperparameters, t, phase, lanes)

    def fits_one(self, gradients: Sequence[tuple[Array, Array]], hyperparameters: Hyperparameters) -> bool:
        """Whether the update has too little to do for several threads, and goes by :meth:`apply_in`."""
        elements = sum(values.size for values, _ in gradients)
        return is_little(elements) and self.bound_rows(hyperparameters) is not None

    def bound_rows(self, hyperparameters: Hyperparameters) -> BoundRows | None:
        """What updates the named rows by compiled code alone, if the rule changes no others."""
        goes_by_rows = self._parameters.size > 0 and self._rule.moving(hyperparameters) == "rows"
        return self._bound if goes_by_rows else None

    def apply_in(
        self, lane: Lane, gradients: Sequence[tuple[Array, Array]], hyperparameters: Hyperparameters, t: int
    ) -> None:
        """The same as :meth:`apply`, by one lane of a phase. Several tables may be updated so at once."""
        assert self._bound is not None
        self._bound.take(aligned(gradients, self._parameters.shape[1]))
        self._bound.apply(0, 1, lane, hyperparameters, t)

    def squares(self, sums: Array, rows: Array, hyperparameters: Hyperparameters, t: int) -> tuple[float, float]:
        """The squared norms of the rows that change under this summed gradient, and of their direction."""
        if self._rule.moving(hyperparameters) == "rows":
            taken = [_rows_of(array, rows) for array in (self._parameters, *self._slots)]
            return squares(self._rule, taken[0], sums, taken[1:], hyperparameters, t)
        order, found = np.argsort(rows), (0.0, 0.0)
        named, height = rows[order], len(self._parameters)
        step = max(1, _PIECE // max(1, self._parameters.shape[1]))
        for first in range(0, height, step):
            piece = slice(first, min(first + step, height))
            parameters, *slots = (array[piece] for array in (self._parameters, *self._slots))
            here = slice(*np.searchsorted(named, (piece.start, piece.stop)))
            gradient = np.zeros(parameters.shape, parameters.dtype)
            gradient[named[here] - first] = sums[order[here]]
            one, other = squares(self._rule, parameters, gradient, slots, hyperparameters, t)
            found = found[0] + one, found[1] + other
        return found

    def _named(
        self,
        bound: BoundRows,
        gradients: Sequence[tuple[Array, Array]],
        hyperparameters: Hyperparameters,
        t: int,
        phase: Phase,
        lanes: int,
    ) -> None:
        taken = aligned(gradients, self._parameters.shape[1])
        bound.take(taken)
        count = shares_for(sum(values.size for values, _ in taken), lanes)

        def named(shares: Sequence[int], lane: Lane) -> None:
            for share in shares:  # at most one, and the kernel goes through its pieces itself
                bound.apply(share, count, lane, hyperparameters, t)

        phase(range(count), named)

    def _gathered(self, gradient: Merged, hyperparameters: Hyperparameters, t: int, phase: Phase) -> None:
        arrays = (self._parameters, *self._slots)

        def gathered(mine: Sequence[Piece], lane: Lane) -> None:
            for piece, columns in lane.rest(mine):
                places = [(array[:, columns], gradient.rows[piece]) for array in arrays]
                lane.give_back(places)
                taken = [_rows_of(array, rows) for array, rows in places]
                lane.note(taken)
                sums = np.ascontiguousarray(gradient.sums[piece, columns])
                _update(self._rule, taken[0], taken[1:], sums, hyperparameters, t)
                for (array, rows), values in zip(places, taken, strict=True):
                    array[rows] = values

        phase(_pieces(len(gradient.rows), arrays[0].shape[1], arrays[0].itemsize), gathered)

    def _by_row(self, gradient: Merged, hyperparameters: Hyperparameters, t: int, phase: Phase) -> None:
        """First the numbers of all rows, from whole rows of parameters as they were; then the parameters."""
        rule, parameters, slot = self._rule, self._parameters, self._slots[0]
        rows, sums, width = gradient.rows, gradient.sums, parameters.shape[1]

        def numbers(mine: Sequence[slice], lane: Lane) -> None:
            for piece in lane.rest(mine):
                lane.keep([(slot, rows[piece])])
                grown = slot[rows[piece]]
                grow(rule, parameters[rows[piece]], sums[piece], grown, hyperparameters, t)
                slot[rows[piece]] = grown

        def step(mine: Sequence[Piece], lane: Lane) -> None:
            for piece, columns in lane.rest(mine):
                part = parameters[:, columns]
                lane.keep([(part, rows[piece])])
                moved = part[rows[piece]]
                move(rule, moved, sums[piece, columns], slot[rows[piece]], hyperparameters, t)
                part[rows[piece]] = moved

        count = max(1, min(_PIECE, KEPT_NBYTES // parameters.itemsize) // width)
        phase([slice(first, min(first + count, len(rows))) for first in range(0, len(rows), count)], numbers)
        phase(_pieces(len(rows), width, parameters.itemsize), step)

    def _whole(self, gradient: Merged, hyperparameters: Hyperparameters, t: int, phase: Phase) -> None:
        rule, arrays, order = self._rule, (self._parameters, *self._slots), np.argsort(gradient.rows)
        height, width = self._parameters.shape
        rows, sums = gradient.rows[order], gradient.sums[order]
        moves = rule.moving(hyperparameters) == "all"

        def stretch(mine: Sequence[Piece], lane: Lane) -> None:
            for piece, columns in lane.rest(mine):
                lane.keep([(array, (piece, columns)) for array in arrays])
                named = slice(*np.searchsorted(rows, (piece.start, piece.stop)))
                places = rows[named] - piece.start
                here, *slots_here = (array[piece, columns] for array in arrays)
                dense = np.zeros(here.shape, here.dtype)
                dense[places] = sums[named, columns]
                updated = here if moves else here.copy()
                _update(rule, updated, slots_here, dense, hyperparameters, t)
                if updated is not here:
                    here[places] = updated[places]

        phase(_pieces(height, width, arrays[0].itemsize), stretch)


def write_rows(target: Array, op: WriteOp, value: Array, indices: Array, phase: Phase) -> None:
    """The same as :func:`cs_proto.scatter.write` for ``scatter_add`` and ``scatter_sub``, with the same bits, in
    pieces: the changes of one row stay together and in order."""
    inside = (indices >= 0) & (indices < len(target))
    named, width = indices[inside], target[:1].size
    if not len(named) or not width:
        return
    values, table = value[inside].reshape(-1, width), target.reshape(-1, width)
    order = np.argsort(named, kind="stable")
    rows, starts = np.unique(named[order], return_index=True)
    ends = np.append(starts, len(named))

    def change(mine: Sequence[Piece], lane: Lane) -> None:
        for piece, columns in lane.rest(mine):
            lane.keep([(table[:, columns], rows[piece])])
            these = order[ends[piece.start] : ends[piece.stop]]
            write(table[:, columns], op, values[these, columns], named[these])

    phase(_pieces(len(rows), width, target.itemsize), change)


def _rows_of(table: Array, rows: Array) -> Array:
    # Ten times as fast, but it would copy the whole of a table that is cut into columns.
    return np.take(table, rows, axis=0) if table.flags.c_contiguous else table[rows]


def _update(
    rule: Rule, parameters: Array, slots: Iterable[Array], gradient: Array, hyperparameters: Hyperparameters, t: int
) -> None:
    whole = np.array([[0, parameters.size]], np.int64)
    apply_dense(
        rule,
        whole,
        parameters.reshape(-1),
        tuple(slot.reshape(-1) for slot in slots),
        (gradient.reshape(-1),),
        hyperparameters,
        t,
    )


def _pieces(height: int, width: int, itemsize: int) -> list[Piece]:
    """A table of that many rows, cut into pieces whose old values a lane can keep."""
    size = min(_PIECE, KEPT_NBYTES // itemsize)
    step = max(1, size // width)
    return [
        (slice(first, min(first + step, height)), slice(left, min(left + size, width)))
        for first in range(0, height, step)
        for left in range(0, width, size)
    ]


def _inside(values: Array, indices: Array, height: int) -> tuple[Array, Array]:
    if not indices.size or 0 <= indices.min() <= indices.max() < height:
        return values, indices
    kept = (indices >= 0) & (indices < height)
    return values[kept], indices[kept]


def aligned(gradients: Sequence[tuple[Array, Array]], width: int) -> list[tuple[Array, Array]]:
    """Values as [k, width], and both arrays in the form that compiled code reads."""
    return [
        (
            np.require(values.reshape(len(indices), width), requirements=["C_CONTIGUOUS", "ALIGNED"]),
            np.require(indices, requirements=["C_CONTIGUOUS", "ALIGNED"]),
        )
        for values, indices in gradients
    ]
