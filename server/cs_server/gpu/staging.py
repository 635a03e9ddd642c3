"""Copies between a GPU's variables and host memory, through the scratch memory of the GPU.

Values are named by their segment, and `memory` gives the places of their parts. Long copies go through the scratch
memory in parts; nothing here allocates after the start.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from .blocks import PIECE, Pieces, cut
from .codegen import loops
from .cuda import Gpu
from .memory import DeviceMemory

__all__ = ["TABLE_NBYTES", "Staging"]

#: Bytes of GPU memory for tables of pieces, and for values in transit.
TABLE_NBYTES = 8 << 20
_STAGE_NBYTES = 32 << 20
# Entries of a piece: at least as many as any kernel reads for one replica.
_WIDTH = 64


class Staging:
    """Copies and launches. They are complete after :meth:`.cuda.Gpu.wait`."""

    def __init__(self, gpu: Gpu, on_device: DeviceMemory, replicas: int, until: float) -> None:
        """Raises DeviceMemoryError if the GPU is full until that time (:meth:`.cuda.Gpu.allocate`)."""
        self._gpu, self._on_device = gpu, on_device
        self._table = gpu.allocate(TABLE_NBYTES, until)
        #: For values in transit that a kernel reads or has written.
        self.stage = gpu.allocate(max(_STAGE_NBYTES, 8 * PIECE * replicas), until)

    def launch(self, source: str, name: str, table: np.ndarray, arguments: Sequence[Any] = ()) -> None:
        """Launch a kernel with a block of threads for each row of ``table``, int64 [n, ...]."""
        self._gpu.bring(self._table.address, np.ascontiguousarray(table))
        self._gpu.launch(source, name, len(table), (self._table.address, *arguments))

    def load(self, source: str, name: str, arguments: Sequence[Any], until: float) -> None:
        """Prepare a kernel for :meth:`launch` (:meth:`.cuda.Gpu.load`) by a launch with a piece without elements."""
        self._gpu.bring(self._table.address, np.zeros(_WIDTH, np.int64))
        self._gpu.load(source, name, (self._table.address, *arguments), until)

    def take(self, segment: str, start: int, raw: np.ndarray, mark: Any = None) -> None:
        """Start a copy of the bytes from ``start`` on to ``raw``, uint8 [n], after ``mark``."""
        mark = self._gpu.mark() if mark is None else mark
        for first, last, address in self._on_device.spans(segment, start, start + raw.nbytes):
            self._gpu.take(raw[first - start : last - start], address, mark)

    def fetch(self, segment: str, first: int, values: np.ndarray) -> None:
        """Copy the current elements from ``first`` on into ``values``, and wait."""
        self.take(segment, first * values.itemsize, values.reshape(-1).view(np.uint8))
        self._gpu.wait()

    def put(self, segment: str, first: int, values: np.ndarray) -> None:
        """Start a copy of ``values`` to the elements from ``first`` on."""
        start, raw = first * values.itemsize, values.reshape(-1).view(np.uint8)
        for begin, end, address in self._on_device.spans(segment, start, start + raw.nbytes):
            self._gpu.bring(address, raw[begin - start : end - start])

    def fetch_rows(self, segment: str, first: int, rows: np.ndarray, values: np.ndarray) -> None:
        """Copy the current ``rows`` of the table that begins at element ``first`` into ``values``, and wait."""
        for pieces, staged, part in self._in_stages(segment, first, rows, values):
            table = np.stack([pieces.counts, self._addresses_of(segment, pieces, values), staged], axis=1)
            self.launch(loops(values.dtype.name), "copy", table)
            self._gpu.take(part, self.stage.address, self._gpu.mark())
            self._gpu.wait()

    def put_rows(self, segment: str, first: int, rows: np.ndarray, values: np.ndarray) -> None:
        """Start a copy of ``values`` to ``rows``, each named once, of the table that begins at element ``first``."""
        for pieces, staged, part in self._in_stages(segment, first, rows, values):
            self._gpu.bring(self.stage.address, part)
            table = np.stack([pieces.counts, staged, self._addresses_of(segment, pieces, values)], axis=1)
            self.launch(loops(values.dtype.name), "copy", table)

    def close(self) -> None:
        """Free the scratch memory."""
        self._table.free()
        self.stage.free()

    def _addresses_of(self, segment: str, pieces: Pieces, values: np.ndarray) -> np.ndarray:
        return self._on_device.addresses(segment, pieces.starts * values.itemsize)

    def _in_stages(
        self, segment: str, first: int, rows: np.ndarray, values: np.ndarray
    ) -> Iterator[tuple[Pieces, np.ndarray, np.ndarray]]:
        """Split ``rows`` into stages that fit the scratch memory: pieces of the table, the place of each in the scratch
        memory, and the part of ``values`` [rows, ...]."""
        width = values.size // len(rows)
        starts = first + rows * width
        pieces = cut(np.stack([starts, starts + width, np.arange(len(rows)) * width], axis=1))
        flat = values.reshape(-1)
        ends = np.cumsum(pieces.counts)
        begin = 0
        while begin < len(pieces):
            before = int(ends[begin - 1]) if begin else 0
            end = int(np.searchsorted(ends, before + self.stage.nbytes // values.itemsize, side="right"))
            end = min(end, begin + TABLE_NBYTES // 24)
            part = Pieces(pieces.starts[begin:end], pieces.counts[begin:end], pieces.sources[begin:end])
            staged = self.stage.address + (part.sources - before) * values.itemsize
            yield part, staged, flat[before : int(ends[end - 1])]
            begin = end
