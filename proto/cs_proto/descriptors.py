"""Array descriptors: what an array is (dtype, shape) and where its bytes lie, without the bytes.

Only the dtypes of a closed list may cross a process boundary; there is no object dtype. A descriptor checks itself, so
a header cannot lie about the length of its frame. This module does not need NumPy, because the supervisor works without
it; ``cs_proto.arrays`` exports the same names and adds the arrays.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache

from .records import Buffer, Count, Frame, Record, record, shown

__all__ = [
    "DTYPES",
    "INLINE_NBYTES",
    "Array",
    "Location",
    "bytes_array",
    "is_wire_dtype",
    "item_nbytes",
    "shape_fault",
]

#: Arrays up to this many bytes travel in a frame; larger ones are put into a segment if one is shared.
INLINE_NBYTES = 64 * 1024

#: Names of the fixed-size dtypes that can be sent. ``U<n>`` and ``S<n>`` (fixed-width strings) can, too.
DTYPES = [
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
]
_ITEM_NBYTES = {name: 1 if name == "bool" else int(re.sub(r"\D", "", name)) // 8 for name in DTYPES}
_STRING = re.compile(r"[US][1-9][0-9]{0,6}")
_SEGMENT = re.compile(r"[a-z0-9][a-z0-9._/-]{0,99}")
_MAX_RANK = 32
_MAX_NBYTES = 1 << 62


def is_wire_dtype(name: str) -> bool:
    """Whether arrays of the dtype ``name`` can be sent."""
    return name in _ITEM_NBYTES or _STRING.fullmatch(name) is not None


@lru_cache(1024)
def _is_segment(name: str) -> bool:
    return _SEGMENT.fullmatch(name) is not None and ".." not in name


@record(1)
class Location(Record):
    """A byte ``offset`` inside the segment called ``segment``."""

    segment: str
    offset: Count

    def check(self) -> None:
        if not _is_segment(self.segment):
            self.refuse(f"{self.segment!r} is not a segment name")


@record(2)
class Array(Record):
    """A C-contiguous array: its dtype by name, its shape, and where its bytes are."""

    dtype: str
    shape: tuple[Count, ...]
    place: Frame | Location

    def check(self) -> None:
        shape, place = self.shape, self.place
        known = _ITEM_NBYTES.get(self.dtype)
        if known is not None and len(shape) <= _MAX_RANK and (not shape or min(shape) > 0):
            nbytes = known * math.prod(shape)
            if nbytes < _MAX_NBYTES and (type(place) is not Frame or place.nbytes == nbytes):
                return  # the usual case
        if not is_wire_dtype(self.dtype):
            self.refuse(f"dtype {shown(self.dtype)} cannot be sent; these can: {', '.join(DTYPES)}, U<n>, S<n>")
        if fault := shape_fault(self.dtype, self.shape):
            self.refuse(fault)
        if isinstance(self.place, Frame) and self.place.nbytes != self.nbytes:
            self.refuse(
                f"{self.dtype}{list(self.shape)} has {self.nbytes} bytes, but its frame has {self.place.nbytes}"
            )

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return item_nbytes(self.dtype) * math.prod(self.shape)


def shape_fault(dtype: str, shape: tuple[int, ...]) -> str:
    """The fault in ``shape`` for elements of ``dtype``; empty if there is none."""
    if len(shape) > _MAX_RANK or (shape and min(shape) < 0):
        return f"{shown(shape)} is not a shape"
    if 0 < item_nbytes(dtype) * math.prod(shape) < _MAX_NBYTES:
        return ""
    # NumPy also refuses a shape of no elements whose other lengths alone are too large.
    if item_nbytes(dtype) * math.prod(length or 1 for length in shape) >= _MAX_NBYTES:
        return f"shape {shown(shape)} is too large"
    return ""


def item_nbytes(name: str) -> int:
    """Size in bytes of one element of the dtype called ``name``."""
    known = _ITEM_NBYTES.get(name)
    return known if known is not None else int(name[1:]) * (4 if name[0] == "U" else 1)


def bytes_array(data: Buffer) -> Array:
    """A descriptor of ``data`` as uint8[n], in a frame."""
    frame = Frame(data)
    return Array("uint8", (frame.nbytes,), frame)
