"""The meaning of SUM, MEAN and gather: the arithmetic over the components of a per-replica value.

The server uses these functions for ``all_reduce`` and ``all_gather``, the client for ``Strategy.reduce`` and
``Strategy.gather``, so the two cannot differ. Components are NumPy arrays in replica order. They are combined in that
order, whatever order they arrived in, because in floating point the order decides the rounding. This module knows no
replicas, per-replica values or sparse slices.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Literal, SupportsIndex

import numpy as np

from cs_proto.errors import InvalidArgumentError
from cs_proto.printable import counted

__all__ = ["Axis", "Op", "divide", "gather", "gather_axis", "mean_dtype", "reduce", "reduce_axis"]

Op = Literal["SUM", "MEAN"]
Axis = SupportsIndex | tuple[SupportsIndex, ...]

# The lower half of an integer of 64 bits.
_LOW = 0xFFFFFFFF


def reduce(op: Op, components: Sequence[np.ndarray]) -> np.ndarray:
    """The element-wise sum or mean of ``components``, as a new array of their shape.

    SUM keeps the dtype (integers wrap around); MEAN divides the sum, in which integers do not wrap around, by the
    number of components and has the dtype of :func:`mean_dtype`. Nothing is broadcast: components of different shape
    or dtype, and components that cannot be added (bool, strings), are an :class:`InvalidArgumentError`.
    """
    _check_op(op)
    arrays = [np.asarray(component) for component in components]
    for replica, array in enumerate(arrays):
        if array.dtype.kind not in "iufc":
            raise InvalidArgumentError(f"{op} of {array.dtype} (component {replica}): only numbers can be added")
    total = _add(arrays)
    return total if op == "SUM" else _mean(total, arrays, [()] * len(arrays), len(arrays))


def reduce_axis(op: Op, components: Sequence[np.ndarray], axis: Axis) -> np.ndarray:
    """The sum or mean over ``axis`` (an int, or a tuple of them) and over all components; the axes disappear.

    MEAN weighs every element alike: it is the sum of all local sums divided by the sum of all local lengths of
    ``axis``, so components may differ in length there; without any element it is NaN. Raises
    :class:`InvalidArgumentError` for an axis that is out of range or named twice and for components whose other axes,
    rank or dtype differ, and TypeError for an axis of another type and for bool and strings.
    """
    _check_op(op)
    arrays = [np.asarray(component) for component in components]
    sums: list[np.ndarray] = []
    axes_of: list[tuple[int, ...]] = []
    length = 0
    for replica, array in enumerate(arrays):
        if array.dtype.kind not in "iufc":
            raise TypeError(f"{op} over axis {axis} of {array.dtype} (component {replica}): only numbers can be added")
        axes = _axes(axis, array.ndim)
        with np.errstate(over="ignore", invalid="ignore"):
            sums.append(np.asarray(array.sum(axis=axes, dtype=array.dtype)))
        axes_of.append(axes)
        length += math.prod(array.shape[a] for a in axes)
    total = _add(sums)
    return total if op == "SUM" else _mean(total, arrays, axes_of, length)


def gather(components: Sequence[np.ndarray], axis: SupportsIndex) -> np.ndarray:
    """The components one after the other along ``axis``, as a new array of their dtype (any dtype).

    Lengths along ``axis`` may differ. Raises :class:`InvalidArgumentError` if rank, dtype or another axis
    differs, for scalars, and for an axis that is out of range or a tuple; ValueError for None and TypeError for an
    axis of another type.
    """
    number = gather_axis(axis)
    arrays = [np.asarray(component) for component in components]
    if not arrays:
        raise InvalidArgumentError("gather needs at least one component")
    first = arrays[0]
    if first.ndim == 0:
        raise InvalidArgumentError(
            "gather cannot join scalars, which have no axis; give each replica's value one: x[None]"
        )
    if not -first.ndim <= number < first.ndim:
        raise InvalidArgumentError(
            f"gather cannot join along axis {number}: the arrays have {counted(first.ndim, 'axis', 'axes')}"
        )
    across = number % first.ndim
    for replica, array in enumerate(arrays[1:], start=1):
        same_dtype = array.dtype == first.dtype or (array.dtype.kind == first.dtype.kind and first.dtype.kind in "US")
        if not same_dtype or _without(array.shape, across) != _without(first.shape, across):
            raise InvalidArgumentError(
                f"gather over axis {number}: component {replica} is {_title(array)}, component 0 {_title(first)}; "
                "only that axis may differ"
            )
    return np.concatenate(arrays, axis=across)


def gather_axis(axis: object) -> int:
    """``axis`` of a gather as an int. Raises as :func:`gather` does if it cannot be an axis of any array."""
    if axis is None:
        raise InvalidArgumentError("gather needs an axis, not None; to combine element by element, use reduce")
    if isinstance(axis, tuple | list):
        raise InvalidArgumentError(f"gather takes one axis, not {axis!r}")
    return _index(axis)


def divide(total: np.ndarray, count: int) -> np.ndarray:
    """``total / count`` as a true division, in the dtype of :func:`mean_dtype`; 0/0 is NaN."""
    return _divide(total, count, mean_dtype(total.dtype))


def _divide(total: np.ndarray, count: int, result: np.dtype[np.generic]) -> np.ndarray:
    # In float16 a count above 65504 would be infinite.
    work = np.dtype(np.float32) if result == np.float16 else result
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return np.asarray(np.true_divide(total.astype(work), work.type(count)), dtype=result)


def mean_dtype(dtype: np.dtype[np.generic]) -> np.dtype[np.generic]:
    """The dtype of a mean: floats and complex keep theirs, integers of 8 and 16 bits give float32, others float64."""
    if dtype.kind in "iu":
        return np.dtype(np.float32 if dtype.itemsize <= 2 else np.float64)
    return dtype


def _add(arrays: list[np.ndarray]) -> np.ndarray:
    """The sum in the order given, in the common dtype, as a new array."""
    if not arrays:
        raise InvalidArgumentError("a reduction needs at least one component")
    first = arrays[0]
    for replica, array in enumerate(arrays[1:], start=1):
        if array.shape != first.shape or array.dtype != first.dtype:
            raise InvalidArgumentError(
                f"component {replica} is {_title(array)}, component 0 {_title(first)}; shape and dtype must agree"
            )
    total = first.copy()
    with np.errstate(over="ignore", invalid="ignore"):
        for array in arrays[1:]:
            np.add(total, array, out=total)
    return total


def _mean(total: np.ndarray, arrays: Sequence[np.ndarray], axes: Sequence[tuple[int, ...]], count: int) -> np.ndarray:
    """The mean of ``count`` numbers. ``total`` is the sum of the arrays over the ``axes`` of each; that of integers may
    have wrapped around."""
    exact = _exact(arrays, axes) if total.dtype.kind in "iu" else total
    return _divide(exact, count, mean_dtype(total.dtype))


def _exact(arrays: Sequence[np.ndarray], axes: Sequence[tuple[int, ...]]) -> np.ndarray:
    """The sum of arrays of integers over the ``axes`` of each, as float64, rounded once. No integer has enough bits."""
    high = low = np.zeros((), np.int64)
    for array, own in zip(arrays, axes, strict=True):
        wide = array if array.dtype.itemsize == 8 else array.astype(np.int64)
        number = wide.dtype.type  # before NumPy 2 a Python int would change the dtype of a scalar
        high = high + np.right_shift(wide, number(32)).astype(np.int64).sum(axis=own)
        low = low + np.bitwise_and(wide, number(_LOW)).astype(np.int64).sum(axis=own)
    return np.asarray((high + (low >> 32)) * 2.0**32 + (low & _LOW))


def _axes(axis: Axis, rank: int) -> tuple[int, ...]:
    axes: list[int] = []
    for number in map(_index, axis if isinstance(axis, tuple) else (axis,)):
        if not -rank <= number < rank:
            raise InvalidArgumentError(f"there is no axis {number}: the component has {counted(rank, 'axis', 'axes')}")
        axes.append(number % rank)
    if len(set(axes)) < len(axes):
        raise InvalidArgumentError(f"axis {axis!r} names an axis twice")
    return tuple(axes)


def _index(axis: object) -> int:
    try:
        if isinstance(axis, bool):
            raise TypeError
        return operator.index(axis)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"axis must be an int (or, in reduce, a tuple of ints), not {axis!r}") from None


def _check_op(op: str) -> None:
    if op not in ("SUM", "MEAN"):
        raise InvalidArgumentError(f"a reduction must be 'SUM' or 'MEAN', not {op!r}")


def _without(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return (len(shape), *shape[:axis], *shape[axis + 1 :])


def _title(array: np.ndarray) -> str:
    return f"{array.dtype}{list(array.shape)}"
