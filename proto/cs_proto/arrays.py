"""Array descriptors (``cs_proto.descriptors``) and the NumPy arrays that they describe."""

from __future__ import annotations

import math

import numpy as np

from .descriptors import (
    DTYPES,
    INLINE_NBYTES,
    Array,
    Location,
    bytes_array,
    is_wire_dtype,
    item_nbytes,
    shape_fault,
)
from .errors import LocalProtocolError
from .records import Frame

__all__ = [
    "DTYPES",
    "INLINE_NBYTES",
    "Array",
    "Location",
    "array_of",
    "bytes_array",
    "dtype_name",
    "frame_view",
    "is_wire_dtype",
    "item_nbytes",
    "rows_of",
    "shape_fault",
    "view_of",
]

_NAMES = {np.dtype(name): name for name in DTYPES}


def dtype_name(dtype: np.dtype[np.generic]) -> str:
    """The wire name of a NumPy dtype (native byte order), e.g. ``float32`` or ``U7``."""
    known = _NAMES.get(dtype)
    if known is not None:
        return known
    if dtype.kind == "U":
        return f"U{dtype.itemsize // 4}"
    return f"S{dtype.itemsize}" if dtype.kind == "S" else dtype.name


def array_of(value: np.ndarray) -> Array:
    """A descriptor that carries the bytes of ``value`` in a frame; copies them only if ``value`` is not C-contiguous.

    Raises :class:`~cs_proto.errors.LocalProtocolError` if the dtype cannot be sent.
    """
    name = dtype_name(value.dtype)
    if not is_wire_dtype(name):
        return Array(name, value.shape, Frame(b""))  # raises, and names the dtype
    contiguous = np.ascontiguousarray(value, None if value.dtype.isnative else value.dtype.newbyteorder("="))
    return Array(name, value.shape, Frame(contiguous.reshape(-1).view(np.uint8).data))


def rows_of(array: Array, first: int, stop: int) -> Array:
    """Rows ``first`` to ``stop`` (exclusive) of an array that lies in a segment, is C-contiguous and has these rows.

    >>> rows_of(Array("float32", (9, 2), Location("slots/1/m/float32", 64)), 3, 5)
    Array(dtype='float32', shape=(2, 2), place=Location(segment='slots/1/m/float32', offset=88))
    """
    assert isinstance(array.place, Location)
    row_nbytes = item_nbytes(array.dtype) * math.prod(array.shape[1:])
    place = Location(array.place.segment, array.place.offset + first * row_nbytes)
    return Array(array.dtype, (stop - first, *array.shape[1:]), place)


def view_of(array: Array, buffer: memoryview | bytes | bytearray) -> np.ndarray:
    """The NumPy view of ``array`` over ``buffer``, which begins where the array's bytes begin. No copy.

    Raises :class:`~cs_proto.errors.LocalProtocolError` if the buffer is too short.
    """
    try:
        flat = np.frombuffer(buffer, array.dtype, count=math.prod(array.shape))
    except ValueError as error:
        raise LocalProtocolError(f"{array} does not fit into {memoryview(buffer).nbytes} bytes") from error
    return flat.reshape(array.shape)


def frame_view(array: Array) -> np.ndarray:
    """The array whose bytes travelled in a frame; a read-only view of that frame."""
    if not isinstance(array.place, Frame):
        raise LocalProtocolError(f"{array} did not travel in a frame")
    view = view_of(array, memoryview(array.place.data))
    view.flags.writeable = False
    return view
