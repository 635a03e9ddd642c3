"""Finds the first number of an array that is not finite, or that is too large to be added up.

One pass over memory says of nearly every array that there is none. Only the others are looked at number by number.
This module knows arrays of NumPy and of CuPy, and no variables.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Bad", "are_fine_on_device", "copied_fine", "first_bad", "is_fine", "limit_of"]

# Elements that are looked at in one go: what NumPy makes of them stays in the cache.
_PIECE = 1 << 16
# Bytes that are copied before they are looked at: they are still in the cache.
_COPIED_NBYTES = 1 << 18
# At about this size the C library begins to copy past the cache, which saves as much as to look in pieces.
_LARGE_NBYTES = 32 << 20
# All bits of a half but the sign.
_MAGNITUDE = np.uint16(0x7FFF)


class Bad(NamedTuple):
    """The first bad number of an array in C order."""

    place: tuple[int, ...]
    value: complex


@functools.lru_cache
def limit_of(dtype: np.dtype[Any], replicas: int, weight: float = 1.0, rows: int = 1) -> float:
    """The largest magnitude of gradients of which the sum over the replicas, each times its ``weight``, is certainly
    finite. ``rows``: so many numbers of one replica may fall on one place. Infinity: the gradient is left out of the
    sum, because its weight is 0 in this dtype, so nothing of it is bad.

    >>> f"{limit_of(np.dtype('float32'), 2):.4g}"
    '1.701e+38'
    """
    own = np.finfo(dtype)
    # The server weighs dense halves in single precision, and adds up sparse and bounded ones in half precision.
    weighed = np.float32 if dtype == np.float16 else own.dtype.type
    if not weighed(weight):
        return math.inf
    most = min(float(own.max), float(own.max) / max(1, rows) / replicas / weight)
    rounded = own.dtype.type(most)  # so that arrays of the dtype can be compared with it
    return float(rounded if float(rounded) <= most else np.nextafter(rounded, own.dtype.type(0)))


def is_fine(values: np.ndarray, limit: float) -> bool:
    """Whether no number of the array is bad, as far as one pass tells: False means that it has to be looked at. NumPy's
    warnings are the caller's to switch off.

    >>> is_fine(np.float32([1, 2]), 1e38), is_fine(np.float32([1, np.nan]), 1e38)
    (True, False)
    """
    if limit == math.inf:
        return True
    flat = _parts(values)
    if flat.dtype == np.float16:
        # Without their signs, the bits of halves are integers in the same order, and those of NaN come after infinity:
        # NumPy compares integers many times as fast.
        bits, largest = flat.view(np.uint16), _bits_of_half(limit)
        pieces = (bits[first : first + _PIECE] for first in range(0, flat.size, _PIECE))
        return all(int((piece & _MAGNITUDE).max()) <= largest for piece in pieces)
    # The rounded sum of squares is not smaller than any of them, and NaN stays: nothing reads memory faster.
    square = float(np.dot(flat, flat))
    return square <= limit * limit and square < math.inf


def copied_fine(target: np.ndarray, source: np.ndarray, limit: float) -> bool:
    """Copy an array to one of the same shape and dtype, and say of it what :func:`is_fine` says. Each piece is looked
    at while it is in the cache."""
    is_whole = not (target.flags.c_contiguous and source.flags.c_contiguous) or target.nbytes > _LARGE_NBYTES
    if is_whole or limit == math.inf:
        np.copyto(target, source)
        return is_fine(target, limit)
    ours, theirs = target.reshape(-1), source.reshape(-1)
    count, fine = _COPIED_NBYTES // target.itemsize, True
    for first in range(0, ours.size, count):
        piece = ours[first : first + count]
        np.copyto(piece, theirs[first : first + count])
        fine = fine and is_fine(piece, limit)
    return fine


@functools.lru_cache
def _bits_of_half(limit: float) -> int:
    """The bits of a half."""
    return int(np.float16(limit).view(np.uint16))


def first_bad(values: np.ndarray, limit: float) -> Bad | None:
    """The first number, in C order, that is not finite or of a magnitude over ``limit``; None if there is none. Of a
    complex number both parts count.

    >>> first_bad(np.float32([[1, 2], [np.inf, np.nan]]), 1e38)
    Bad(place=(1, 0), value=inf)
    """
    flat = values.reshape(-1)
    for first in range(0, flat.size, _PIECE):
        piece = flat[first : first + _PIECE]
        is_bad = ~(np.abs(_parts(piece)) <= limit)
        if is_bad.any():
            place = first + int(np.argmax(is_bad)) // (2 if flat.dtype.kind == "c" else 1)
            return Bad(tuple(map(int, np.unravel_index(place, values.shape))), flat[place].item())
    return None


def are_fine_on_device(module: ModuleType, arrays: Sequence[tuple[Any, float]]) -> bool:
    """Whether no number of these arrays of a device is bad, each with its limit. One number is copied to the host."""
    found = [
        (module.abs(part) <= limit).all()
        for array, limit in arrays
        for part in ((array.real, array.imag) if array.dtype.kind == "c" else (array,))
    ]
    return not found or bool(module.stack(found).all())


def _parts(values: np.ndarray) -> np.ndarray:
    """The real numbers of an array in one row; a copy where they do not lie so."""
    flat = values.reshape(-1)
    if flat.dtype.kind != "c":
        return flat
    return np.ascontiguousarray(flat).view(flat.real.dtype)
