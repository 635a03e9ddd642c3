"""A process's own memory for arrays that are too large for a frame: batches, initial values, results, contributions.

The arena places bytes one after the other and frees all of them together, when the owner knows that every reader is
done. For the controller that is before its next run; for worker and server it is when the client's next run arrives.
The steps of a series overlap, so for them the arena is divided into equal parts that are used in turn: it grows with
the size of a step and not with the number of steps. If a reader still holds some ranges, the owner is told these
ranges and places around them.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence

import numpy as np

from cs_proto.arrays import INLINE_NBYTES, Array, Location, array_of, bytes_array, dtype_name, item_nbytes
from cs_proto.errors import MemoryPlanError
from cs_proto.ranges import merged, without
from cs_proto.records import Buffer
from cs_proto.sizes import in_units

from .mapping import Mapping
from .remote_segment import RemoteSegment

__all__ = ["Arena"]

_ALIGNMENT = 64
# An arena keeps this much of its freed pages, or as much as it used last if that is more. It gives the others back, so
# that one large value does not cost memory for ever.
_KEEP_NBYTES = 64 << 20
# The descriptors of so many arrays are kept.
_KNOWN = 1024


class Arena:
    """A bump allocator over one writable segment, opened when first needed."""

    def __init__(
        self,
        open_segment: Callable[[], Mapping | RemoteSegment],
        used: int = 0,
        find: Callable[[np.ndarray], Array | None] | None = None,
    ) -> None:
        """``used`` bytes at the start belong to a former process. ``find`` tells where a uint8[n] lies in another
        segment, if it lies in one."""
        self._find = find
        self._open = open_segment
        self._mapping: Mapping | RemoteSegment | None = None
        self._part, self._parts = 0, 1
        self._used = used  # in the current part
        self._held: Sequence[tuple[int, int]] = ()
        self._touched: list[tuple[int, int]] = []  # the pages that take memory
        #: Bytes of these pages.
        self.touched_nbytes = 0
        self._note_touched([_pages(0, used)] if used else [])
        # By address and size. The source is kept alive, so that no other array gets its address.
        self._shared: dict[tuple[int, int], tuple[np.ndarray, Array]] = {}
        # By dtype, shape and offset: what a step places comes again in later steps. Each with the memory behind it, if
        # that is mapped.
        self._known: dict[tuple[str, tuple[int, ...], int], tuple[Array, np.ndarray | None]] = {}

    def place(self, value: np.ndarray) -> Array:
        """A descriptor of ``value``. Small values travel in a frame, large ones are copied into the arena, once."""
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

    def put_all(self, values: Sequence[np.ndarray]) -> list[Array]:
        """Copies of these arrays in one piece of the arena, none of which has pages of its own. For arrays like earlier
        ones, at the same places, the descriptors are the same objects while they are kept. Raises
        :class:`MemoryPlanError` as :meth:`new` does."""
        if not values:
            return []
        starts, total = [], 0
        for value in values:
            starts.append(total)
            total += -(-value.nbytes // _ALIGNMENT) * _ALIGNMENT
        whole, placed = self._room(total), []
        assert self._mapping is not None
        for value, start in zip(values, starts, strict=True):
            key = (dtype_name(value.dtype), value.shape, whole + start)
            array, memory = self._known.get(key) or self._learnt(*key)
            if memory is None:
                self._mapping.write(array, value)
            else:
                memory[...] = value
            placed.append(array)
        return placed

    def _learnt(self, dtype: str, shape: tuple[int, ...], offset: int) -> tuple[Array, np.ndarray | None]:
        """The descriptor of an array there, and the memory behind it, for later steps."""
        assert self._mapping is not None
        if len(self._known) >= _KNOWN:
            self._known.clear()
        array = Array(dtype, shape, Location(self._mapping.name, offset))
        memory = self._mapping.view(array) if isinstance(self._mapping, Mapping) else None
        found = self._known[dtype, shape, offset] = array, memory
        return found

    def new(self, dtype: str, shape: tuple[int, ...]) -> Array:
        """Room for an array. A large array begins on a new page, so that a reader can hold the pages of this array
        only. Raises :class:`MemoryPlanError` if the current part or the segment's file system is full, or the machine
        has too little memory left."""
        offset = self._room(item_nbytes(dtype) * math.prod(shape))
        assert self._mapping is not None
        return Array(dtype, shape, Location(self._mapping.name, offset))

    def _room(self, nbytes: int) -> int:
        """The offset of room for so many bytes, as :meth:`new` says."""
        if self._mapping is None:
            self._mapping = self._open()
        alignment = mmap.PAGESIZE if nbytes > INLINE_NBYTES else _ALIGNMENT
        part_nbytes = self._part_nbytes
        part_start = self._part * part_nbytes
        start = -(-(part_start + self._used) // alignment) * alignment
        for first, stop in self._held:
            if start + nbytes <= first:
                break
            start = max(start, stop)
        end = start + nbytes - part_start
        if end > part_nbytes:
            where = self._mapping.name if self._parts == 1 else f"one of {self._parts} parts of {self._mapping.name}"
            raise MemoryPlanError(
                f"{nbytes} bytes{in_units(nbytes)} do not fit into {where}: {self._used} of {part_nbytes} bytes"
                f"{in_units(part_nbytes)} are in use; send or return less at a time"
                + ("; the script still holds results there" if self._held else "")
            )
        touched = _pages(start, start + nbytes)
        if missing := without([touched], self._touched):
            self._grow(nbytes, missing)
            self._note_touched(merged([*self._touched, touched]))
        self._used = end
        return start

    def _note_touched(self, pages: list[tuple[int, int]]) -> None:
        self._touched, self.touched_nbytes = pages, sum(stop - start for start, stop in pages)

    def _grow(self, nbytes: int, missing: Sequence[tuple[int, int]]) -> None:
        """Take memory for these pages, which an array of ``nbytes`` needs; for all of them or for none."""
        assert self._mapping is not None
        what = f"{nbytes} bytes{in_units(nbytes)} to be sent or returned in {self._mapping.name} need"
        for number, (first, stop) in enumerate(missing):
            try:
                self._mapping.take(first, stop, what)
            except MemoryPlanError as error:
                for pages in missing[:number]:
                    self._mapping.discard(*pages)
                raise MemoryPlanError(f"{error}; send or return less at a time") from error

    def share(self, data: Buffer) -> Array:
        """A descriptor of ``data`` as uint8[n]: in a frame if it is small, otherwise copied into the arena.

        It is copied only once, however often it is shared before it is freed; ``data`` must not change in between.
        If it lies in a segment already, it is not copied, and is kept until the arena is freed.
        """
        if type(data) is bytes and len(data) <= INLINE_NBYTES:
            return bytes_array(data)
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
        """The current position. :meth:`release` frees what is placed after it."""
        return self._used

    def release(self, mark: int) -> None:
        """Free everything that was placed since :meth:`mark`."""
        self._shared.clear()
        self._used = mark

    def reset(self, part: int = 0, parts: int = 1, held: Sequence[tuple[int, int]] = ()) -> None:
        """Free ``part`` of ``parts`` equal parts, and place there from now on.

        The other parts keep their content until their turn comes; a change of ``parts`` frees everything. The ranges
        in ``held`` (whole pages of the arena, ascending) keep their content in every case.
        """
        if self._shared:
            self._shared.clear()
        is_same, used = parts == self._parts, self._used
        self._part, self._parts, self._used, self._held = part, parts, 0, held
        keep = max(_KEEP_NBYTES // parts, used)
        if self._mapping is None or self.touched_nbytes <= keep:
            return
        start, nbytes = part * self._part_nbytes, self._part_nbytes
        first, last = (start, start + nbytes) if is_same else (0, self._mapping.nbytes)
        gone = []
        for start, stop in without(self._touched, merged([(0, first), (last, self._mapping.nbytes), *held])):
            kept = min(stop, start + keep // mmap.PAGESIZE * mmap.PAGESIZE)
            keep -= kept - start
            if kept < stop:
                self._mapping.discard(kept, stop)
                gone.append((kept, stop))
        self._note_touched(without(self._touched, gone))

    @property
    def _part_nbytes(self) -> int:
        assert self._mapping is not None
        return self._mapping.nbytes // self._parts // mmap.PAGESIZE * mmap.PAGESIZE

    def close(self) -> None:
        """Release the memory: the service is over. Idempotent."""
        self._mapping = None
        self._known.clear()


def _pages(start: int, stop: int) -> tuple[int, int]:
    """The pages that bytes ``start`` to ``stop`` lie in."""
    return start - start % mmap.PAGESIZE, -(-stop // mmap.PAGESIZE) * mmap.PAGESIZE
