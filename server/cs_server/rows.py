"""Sparse gradients: rows named by several replicas, or twice by one, become one gradient a row, and rules by rows.

Owns the fixed order in which duplicates are added (by replica, then by position) and which rows an update reads and
writes. The rule itself is that of `kernels`, over pieces that fit the cache: gathered rows, or a stretch of the table
whose gradient is zero but for the rows that are named. A rule that moves named rows only never looks at the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from cs_proto.optimizers import Hyperparameters

from .kernels import apply_dense, merge_kernel
from .updates import Array, Rule

__all__ = ["Merged", "apply_rows", "merge"]

#: Elements of one piece: of a rule with three slots all arrays of a piece stay in the cache.
_PIECE = 1 << 16

Each: TypeAlias = Callable[[Callable[[Any], None], Sequence[Any]], None]
"""Does a piece of work for each of some items, in any order and by several threads."""


@dataclass(frozen=True)
class Merged:
    """The summed gradient of a table: int64 ``rows`` [n], each once, in the order in which they were first named, and
    ``sums`` [n, elements of a row]."""

    rows: Array
    sums: Array


def merge(gradients: Sequence[tuple[Array, Array]], height: int, width: int) -> Merged:
    """Add up (values, indices) of all replicas, in replica order: of every row first named first.

    ``values`` [k, ...] have ``width`` elements a row and one dtype, ``indices`` are int64 [k]. The replicas have
    checked that they lie in [0, height); a row that does not is left out, since a commit cannot fail.
    """
    inside = [_inside(values.reshape(len(indices), width), indices, height) for values, indices in gradients]
    values, named = [_aligned(values) for values, _ in inside], [_aligned(indices) for _, indices in inside]
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
    """What ``merge`` must equal bit for bit, in plain NumPy."""
    unique, first, place = np.unique(np.concatenate(indices), return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    # Adding to -0.0 changes no number, not even the sign of a zero.
    sums = np.full((len(unique), values[0].shape[1]), -0.0, values[0].dtype)
    with np.errstate(all="ignore"):
        np.add.at(sums, rank[place], np.concatenate(values))
    return Merged(unique[order], sums)


def apply_rows(
    rule: Rule,
    parameters: Array,
    slots: tuple[Array, ...],
    gradient: Merged,
    hyperparameters: Hyperparameters,
    t: int,
    each: Each,
) -> None:
    """Apply the rule's t-th update under a sparse gradient, in place.

    Parameters and slots are 2-D, contiguous, of one dtype and shape [height, width]; ``each`` spreads the pieces over
    threads. Rows that the gradient does not name move as the rule says, or not at all where ``lazy`` is set.
    """
    height, width = parameters.shape
    if not height or not width:
        return
    step = max(1, _PIECE // width)
    if rule.moves == "rows" or hyperparameters.get("lazy"):

        def named(piece: slice) -> None:
            rows = gradient.rows[piece]
            gathered = [np.take(array, rows, axis=0) for array in (parameters, *slots)]
            _update(rule, gathered[0], gathered[1:], gradient.sums[piece], hyperparameters, t)
            for array, values in zip((parameters, *slots), gathered, strict=True):
                array[rows] = values

        each(named, list(_pieces(len(gradient.rows), step)))
        return
    order = np.argsort(gradient.rows)
    rows, sums = gradient.rows[order], gradient.sums[order]

    def stretch(piece: slice) -> None:
        mine = slice(*np.searchsorted(rows, (piece.start, piece.stop)))
        places = rows[mine] - piece.start
        dense = np.zeros((piece.stop - piece.start, width), parameters.dtype)
        dense[places] = sums[mine]
        here = parameters[piece]
        updated = here if rule.moves == "all" else here.copy()
        _update(rule, updated, [slot[piece] for slot in slots], dense, hyperparameters, t)
        if updated is not here:
            here[places] = updated[places]

    each(stretch, list(_pieces(height, step)))


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


def _pieces(length: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, length)) for start in range(0, length, step))


def _inside(values: Array, indices: Array, height: int) -> tuple[Array, Array]:
    if not indices.size or 0 <= indices.min() <= indices.max() < height:
        return values, indices
    kept = (indices >= 0) & (indices < height)
    return values[kept], indices[kept]


def _aligned(array: Array) -> Array:
    return np.require(array, requirements=["C_CONTIGUOUS", "ALIGNED"])
