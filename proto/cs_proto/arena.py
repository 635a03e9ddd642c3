"""A process's own memory for what is too large for a frame: batches and initial values, results and contributions.

Bytes are placed one after the other and all freed together when the owner knows that every reader is done: the
controller before its next run, worker and server when the next run of the client arrives. For the steps of a series,
several of which are under way at once, it is divided into equal parts that are used in turn; so it grows with the
size of a step and never with their number.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .arrays import INLINE_NBYTES, Array, Location, array_of, bytes_array, dtype_name
from .carried import Carried
from .errors import MemoryPlanError
from .records import Buffer
from .segments import Mapping
from .sizes import in_units

__all__ = ["Arena"]

_ALIGNMENT = 64
# What an arena keeps of freed pages; others are given back, since one large value should not cost memory for ever.
_KEEP_NBYTES = 64 << 20


class Arena:
    """A bump allocator over one writable segment, opened when first needed."""

    def __init__(
        self,
        open_segment: Callable[[], Mapping | Carried],
        used: int = 0,
        find: Callable[[np.ndarray], Array | None] | None = None,
    ) -> None:
        """``used`` bytes at the start belong to somebody: a process before this one. ``find`` says of uint8[n] where it
        lies in another segment, if it does."""
        self._find = find
        self._open = open_segment
        self._mapping: Mapping | Carried | None = None
        self._part, self._parts = 0, 1
        self._used = used  # of the part in use
        # How many bytes are touched, by where the part begins.
        self._touched: dict[int, int] = {0: used}
        # By address and size; the source is kept, so that its address stays its own.
        self._shared: dict[tuple[int, int], tuple[np.ndarray, Array]] = {}

    def place(self, value: np.ndarray) -> Array:
        """A descriptor of ``value``: its bytes in a frame when small, else copied into the arena, once."""
        if value.nbytes <= INLINE_NBYTES or value.dtype.hasobject:
            return array_of(value)
        native = value.dtype.newbyteorder("=")
        return self.put(dtype_name(native), value)

    def put(self, dtype: str, value: np.ndarray) -> Array:
        """A copy of ``value`` in the arena, however small. Raises :class:`MemoryPlanError` as :meth:`new` does."""
        target = self.new(dtype, value.shape)
        assert self._mapping is not None
        self._mapping.write(target, value)
        return target

    def new(self, dtype: str, shape: tuple[int, ...]) -> Array:
        """Room for an array. Raises :class:`MemoryPlanError` where the part in use, or what it lies in, is full."""
        if self._mapping is None:
            self._mapping = self._open()
        nbytes, start = self._part_nbytes, self._start
        array = Array(dtype, shape, Location(self._mapping.name, start + self._used))
        end = self._used + array.nbytes
        if end > nbytes:
            where = self._mapping.name if self._parts == 1 else f"one of {self._parts} parts of {self._mapping.name}"
            raise MemoryPlanError(
                f"{array.nbytes} bytes{in_units(array.nbytes)} do not fit into {where}: {self._used} of {nbytes} bytes"
                f"{in_units(nbytes)} are in use; "
                "send or return less at a time"
            )
        used = -(-end // _ALIGNMENT) * _ALIGNMENT
        touched = self._touched.get(start, 0)
        if used > touched:
            self._mapping.reserve(start + touched, start + end)
            self._touched[start] = used
        self._used = used
        return array

    def share(self, data: Buffer) -> Array:
        """A descriptor of ``data`` as uint8[n]: in a frame when small, else copied into the arena, once however often
        it is shared before it is freed. ``data`` must not change in between. Not copied where it lies in a segment
        already; then it is kept until the arena is freed."""
        view = memoryview(data)
        if view.nbytes <= INLINE_NBYTES:
            return bytes_array(data)
        source = np.frombuffer(view, np.uint8)
        key = (source.ctypes.data, source.nbytes)
        if key not in self._shared:
            target = None if self._find is None else self._find(source)
            if target is None:
                target = self.put("uint8", source)
            self._shared[key] = (source, target)
        return self._shared[key][1]

    def view(self, array: Array) -> np.ndarray:
        """The memory behind a descriptor of this arena."""
        assert self._mapping is not None
        return self._mapping.view(array)

    def mark(self) -> int:
        """How far it is used, to free with :meth:`release` what is placed from now on."""
        return self._used

    def release(self, mark: int) -> None:
        """Free what was placed since :meth:`mark`."""
        self._shared.clear()
        self._used = mark

    def reset(self, part: int = 0, parts: int = 1) -> None:
        """Free what lies in ``part`` of ``parts`` equal ones and place there from now on. What lies in the others stays
        until their turn comes; another number of parts than before frees everything."""
        self._shared.clear()
        is_same = parts == self._parts
        self._part, self._parts, self._used = part, parts, 0
        for start, nbytes in list(self._touched.items()):
            keep = _KEEP_NBYTES // len(self._touched)
            if nbytes > keep and (not is_same or start == self._start):
                assert self._mapping is not None
                self._mapping.discard(start + keep, start + nbytes)
                self._touched[start] = keep

    @property
    def _part_nbytes(self) -> int:
        assert self._mapping is not None
        return self._mapping.nbytes // self._parts // _ALIGNMENT * _ALIGNMENT

    @property
    def _start(self) -> int:
        """Where the part in use begins."""
        return self._part * self._part_nbytes

    def close(self) -> None:
        """Let go of the memory: the service is over. Idempotent."""
        self._mapping = None
