"""The places of segments' bytes on a GPU, and the handles with which another process opens them.

It holds variables, slots and (if a worker on the same GPU computes into them) gradient buffers of the dtypes of
`memory_plan.GPU_DTYPES`, by the names and offsets of their segments. It knows no updates.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, pairwise

import numpy as np

from cs_proto import segment_names
from cs_proto.memory_plan import GPU_DTYPES
from cs_proto.messages import DevicePlace
from cs_proto.ranges import merged

from .cuda import Block, Gpu

__all__ = ["DeviceMemory", "is_on_device"]

#: Memory is allocated in blocks of at least the first size and a multiple of the second. CUDA may cut a smaller block
#: from a larger allocation, and another process would then open that allocation.
_BLOCK_NBYTES = 8 << 20
_GRAIN_NBYTES = 2 << 20
#: A block begins and ends with random bytes, by which another process recognizes it. The rest is aligned for any use.
_MARK_NBYTES = 16
_HEAD_NBYTES = 256
_FRAME_NBYTES = _HEAD_NBYTES + _MARK_NBYTES


def is_on_device(segment: str) -> bool:
    """Whether the content of a segment lies on the GPU if variables do."""
    kind, _, rest = segment.partition("/")
    is_ours = kind in ("parameters", "slots") or segment_names.is_device_gradients(segment)
    return is_ours and rest.rpartition("/")[2] in GPU_DTYPES


@dataclass
class _Extent:
    """Bytes of a segment, from ``start`` on and up to the next extent, that lie in ``block`` from ``address`` on."""

    start: int
    stop: int
    address: int
    block: Block


class DeviceMemory:
    """The places of segments' bytes on a GPU. Nothing ever moves, and a range that was made as one is contiguous."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._extents: dict[str, list[_Extent]] = {}
        self._starts: dict[str, np.ndarray] = {}
        self._addresses: dict[str, np.ndarray] = {}
        self._made: dict[tuple[str, int], int] = {}
        self._exported: dict[int, tuple[Block, bytes, bytes]] = {}

    def make(self, segment: str, start: int, stop: int, until: float = 0.0) -> None:
        """Allocate bytes ``start`` to ``stop``, with any content. If there is too little memory until that time
        (:meth:`.cuda.Gpu.allocate`), raises DeviceMemoryError and changes nothing."""
        if stop <= start:
            return
        extents = self._extents.setdefault(segment, [])
        if not any(each.start <= start and stop <= each.stop for each in extents):
            block = self._block(_FRAME_NBYTES + stop - start, until)
            kept = [part for each in extents for part in _without(each, start, stop)]
            end = start + block.nbytes - _FRAME_NBYTES
            limit = min((each.start for each in kept if each.start >= stop), default=end)
            new = _Extent(start, min(end, limit), block.address + _HEAD_NBYTES, block)
            self._extents[segment] = sorted([*kept, new], key=lambda each: each.start)
        self._made[segment, start] = stop
        self._note(segment)

    def drop(self, segment: str, start: int) -> int:
        """Drop the range that was made at ``start``; returns its bytes. A block is freed when all of it is dropped,
        unless another process may have opened it."""
        stop = self._made.pop((segment, start), start)
        used = {self._extent(name, first).block.address for name, first in self._made if name == segment}
        used |= self._exported.keys()
        self._extents[segment] = [each for each in self._extents.get(segment, ()) if each.block.address in used]
        self._note(segment)
        return stop - start

    def has(self, segment: str, start: int, stop: int) -> bool:
        """Whether bytes ``start`` to ``stop`` were made as one range."""
        return self._made.get((segment, start), start) >= stop

    def covers(self, segment: str, start: int, stop: int) -> bool:
        """Whether all bytes from ``start`` to ``stop`` were made, as one range or as several that follow each other."""
        return any(first <= start and stop <= last for first, last in merged(self.made(segment)))

    def addresses(self, segment: str, offsets: np.ndarray) -> np.ndarray:
        """The addresses of the bytes at ``offsets`` (int64 [n]) of a segment."""
        starts = self._starts[segment]
        which = np.searchsorted(starts, offsets, side="right") - 1
        found: np.ndarray = self._addresses[segment][which] + (offsets - starts[which])
        return found

    def spans(self, segment: str, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Bytes ``start`` to ``stop`` as contiguous parts (from, to, address)."""
        cuts = [start, *(each for each in self._starts[segment].tolist() if start < each < stop), stop]
        for first, last in pairwise(cuts):
            yield first, last, int(self.addresses(segment, np.array([first]))[0])

    def made(self, segment: str) -> list[tuple[int, int]]:
        """The parts of a segment that were made: ranges of bytes (start, stop)."""
        return [(start, stop) for (name, start), stop in self._made.items() if name == segment]

    def borders(self, names: Iterable[str]) -> np.ndarray:
        """The offsets in these segments, ascending, at which one extent ends and another begins."""
        return np.unique(np.concatenate([self._starts[name] for name in names]))

    def export(self, segment: str, start: int) -> DevicePlace:
        """The handle and offset with which another process finds the byte at ``start``. Raises DeviceError if none
        can."""
        block = self._extent(segment, start).block
        known = self._exported.get(block.address)
        _, handle, mark = known or (block, self._gpu.handle(block), os.urandom(_MARK_NBYTES))
        (address,) = self.addresses(segment, np.array([start])).tolist()
        place = DevicePlace(handle, address - block.address, block.nbytes, mark)
        if known is None:
            for offset in place.marked:
                self._gpu.bring(block.address + offset, np.frombuffer(mark, np.uint8))
            self._gpu.wait()
            self._exported[block.address] = block, handle, mark
        return place

    def close(self) -> None:
        """Free all memory."""
        for extent in chain.from_iterable(self._extents.values()):
            extent.block.free()
        for block, *_ in self._exported.values():
            block.free()

    def _block(self, nbytes: int, until: float) -> Block:
        ample = -(-max(nbytes, _BLOCK_NBYTES) // _GRAIN_NBYTES) * _GRAIN_NBYTES
        return self._gpu.allocate(ample if ample <= self._gpu.available_nbytes() // 2 else nbytes, until)

    def _extent(self, segment: str, start: int) -> _Extent:
        return next(each for each in reversed(self._extents[segment]) if each.start <= start)

    def _note(self, segment: str) -> None:
        extents = self._extents[segment]
        self._starts[segment] = np.array([each.start for each in extents], np.int64)
        self._addresses[segment] = np.array([each.address for each in extents], np.int64)


def _without(extent: _Extent, start: int, stop: int) -> Iterator[_Extent]:
    if extent.start < start:
        yield replace(extent, stop=min(extent.stop, start))
    if extent.stop > stop:
        skipped = max(0, stop - extent.start)
        yield replace(extent, start=extent.start + skipped, address=extent.address + skipped)
