"""A process's own memory for what is too large for a frame: batches and initial values, results and contributions.

Bytes are placed one after the other and all freed together when the owner knows that every reader is done: the
controller before its next run, worker and server when the next run of the client arrives.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .arrays import INLINE_NBYTES, Array, Location, array_of, bytes_array, dtype_name
from .errors import MemoryPlanError
from .records import Buffer
from .segments import Mapping

__all__ = ["Arena"]

_ALIGNMENT = 64
# What an arena keeps between runs; pages beyond are given back, since one large value should not cost memory for ever.
_KEEP_NBYTES = 64 << 20


class Arena:
    """A bump allocator over one writable segment, opened when first needed."""

    def __init__(
        self,
        open_segment: Callable[[], Mapping],
        used: int = 0,
        find: Callable[[np.ndarray], Array | None] | None = None,
    ) -> None:
        """``used`` bytes at the start belong to somebody: a process before this one. ``find`` says of uint8[n] where it
        lies in another segment, if it does."""
        self._find = find
        self._open = open_segment
        self._mapping: Mapping | None = None
        self._used = self._touched = used
        # By address and size; the source is kept, so that its address stays its own.
        self._shared: dict[tuple[int, int], tuple[np.ndarray, Array]] = {}

    def place(self, value: np.ndarray) -> Array:
        """A descriptor of ``value``: its bytes in a frame when small, else copied into the arena, once."""
        if value.nbytes <= INLINE_NBYTES or value.dtype.hasobject:
            return array_of(value)
        native = value.dtype.newbyteorder("=")
        target = self.new(dtype_name(native), value.shape)
        self.view(target)[...] = value
        return target

    def new(self, dtype: str, shape: tuple[int, ...]) -> Array:
        """Room for an array. Raises :class:`MemoryPlanError` where the reservation is used up."""
        if self._mapping is None:
            self._mapping = self._open()
        array = Array(dtype, shape, Location(self._mapping.name, self._used))
        end = self._used + array.nbytes
        if end > self._mapping.nbytes:
            raise MemoryPlanError(
                f"{array.nbytes} bytes do not fit into {self._mapping.name}: {self._used} of "
                f"{self._mapping.nbytes} bytes are in use"
            )
        self._used = -(-end // _ALIGNMENT) * _ALIGNMENT
        self._touched = max(self._touched, self._used)
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
                target = self.new("uint8", source.shape)
                self.view(target)[...] = source
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

    def reset(self) -> None:
        """Free everything."""
        self._shared.clear()
        if self._mapping is not None and self._touched > _KEEP_NBYTES:
            self._mapping.discard(_KEEP_NBYTES, self._touched)
            self._touched = _KEEP_NBYTES
        self._used = 0

    def close(self) -> None:
        """Let go of the memory: the service is over. Idempotent."""
        self._mapping = None
