"""Variables on a GPU: how a commit changes them, and their mirror in host memory.

Owns variables and slots of the dtypes of `GPU_DTYPES`. Integer and complex variables stay in host memory, and
`compute.executor` does their part of a commit. The segments mirror the memory of the GPU (`memory`): after each commit
both hold the same values. So workers, clients and checkpoints read the segments as usual, and the next server starts
from them. The mirror changes only after the `redo_journal` holds the whole commit. Without a journal, no server can
replace this one; then each commit mirrors only the variables, and slots are mirrored when a peer asks for them.

A commit launches kernels (`updates`) and copies (`staging`) and waits once, at its end. It allocates nothing.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Sequence

import numpy as np

from cs_proto import segment_names
from cs_proto.arithmetic import reduction
from cs_proto.arrays import Array, Location
from cs_proto.errors import DeviceError, DeviceMemoryError
from cs_proto.messages import DevicePlace, Located, Slots
from cs_proto.records import Record, replace
from cs_proto.scatter import write
from cs_runtime.shared_memory.mapping import Mapping
from cs_server.compute.executor import Executor, Memory, fill
from cs_server.compute.prepared import Prepared
from cs_server.events import Apply, Commit, Fill, Write
from cs_server.rules import RULES, computed_in

from .blocks import PIECE
from .codegen import loops
from .cuda import Gpu
from .dirty_ranges import Change, Changed, of_rows, united
from .memory import DeviceMemory, is_on_device
from .redo_journal import RedoJournal
from .staging import Staging
from .updates import DeviceUpdates

__all__ = ["GpuStore"]

_log = logging.getLogger("cs_server.service")

#: The most blocks of one launch, as in `updates`, so that later work does not wait long.
_FILL_BLOCKS = 2048
#: Bytes of the journal for the alignment and the index entry of a change.
_ENTRY_NBYTES = 256
_NOWHERE = DevicePlace(b"", 0, 0, b"")


class GpuStore:
    """Variables on one GPU. Used by one thread."""

    def __init__(
        self,
        name: str,
        replicas: int,
        memory: Memory,
        arithmetic: Executor,
        journal: RedoJournal | None,
        patience: float = 0.0,
    ) -> None:
        """``arithmetic`` does the part of a commit that concerns no GPU. The mirror gets the content of the journal.
        For the next ``patience`` seconds, allocations may wait for GPU memory that a killed server still holds.

        Raises DeviceError for a GPU that cannot be used, DeviceMemoryError for one that is full.
        """
        self._until = time.monotonic() + patience
        self._gpu = gpu = Gpu(name)
        self._memory, self._arithmetic, self._journal = memory, arithmetic, journal
        self._on_device = DeviceMemory(gpu)
        self._staging = Staging(gpu, self._on_device, replicas, self._until)
        keeps = journal is not None
        self._updates = DeviceUpdates(gpu, self._on_device, self._staging, memory, self._until, keeps=keeps)
        self._made_nbytes = 0
        self._exports = True
        if journal is not None:
            journal.replay(memory.elements)

    def export(self, array: Array) -> DevicePlace:
        """The place of a variable or gradient buffer, for another process to open. A gradient buffer is made if there
        is ample memory. The place of an array that is not on the GPU has no handle."""
        assert isinstance(array.place, Location)
        segment, start = array.place.segment, array.place.offset
        if not self._exports or not array.nbytes or not is_on_device(segment):
            return _NOWHERE
        if not self._on_device.has(segment, start, start + array.nbytes):
            if not segment_names.is_device_gradients(segment) or 2 * array.nbytes > self.available_nbytes():
                return _NOWHERE
            try:
                self._on_device.make(segment, start, start + array.nbytes)
            except DeviceMemoryError:
                return _NOWHERE
            self._updates.forget()
        try:
            return self._on_device.export(segment, start)
        except DeviceError as error:
            self._exports = False
            _log.warning("transport staging: %s", str(error))  # text, because a kept exception keeps memory alive
            return _NOWHERE

    def view(self, array: Array) -> np.ndarray:
        """The value of an array, read-only. For a gradient on the GPU it is a copy."""
        if not isinstance(array.place, Location) or not segment_names.is_device_gradients(array.place.segment):
            return self._memory.view(array)
        segment, start = array.place.segment, array.place.offset
        if not self._on_device.has(segment, start, start + array.nbytes):
            in_memory = Location(segment_names.host_gradients(segment), start)
            return self._memory.view(replace(array, place=in_memory))
        copy = np.empty(array.shape, array.dtype)
        self._staging.fetch(segment, start // copy.itemsize, copy)
        return copy

    def available_nbytes(self) -> int:
        """The bytes of GPU memory that are left for variables and slots."""
        return self._gpu.available_nbytes()

    def make(self, segment: str, start: int, stop: int, *, load: bool = False) -> None:
        """Allocate memory for a variable or slot, at bytes ``start`` to ``stop`` of a segment. It holds zeros or, with
        ``load``, the content of the mirror. Does nothing for a segment that does not belong on the GPU.

        Raises DeviceMemoryError if the GPU has no memory left for it or for the kernels that it needs, MemoryPlanError
        if the machine has none.
        """
        if not is_on_device(segment) or stop <= start:
            return
        until = self._until if load else 0.0
        self._updates.load(segment.rpartition("/")[2], until=until)
        self._on_device.make(segment, start, stop, until)
        self._made_nbytes += _in_journal(stop - start)
        if self._journal is not None:
            self._journal.reserve(self._made_nbytes)
            self._lock(self._journal.memory, 0, len(self._journal.memory))
        elif segment.startswith("parameters/"):
            self._lock(self._memory.elements(segment, "uint8"), start, stop)
        for first, last, address in self._on_device.spans(segment, start, stop):
            if load:
                self._gpu.bring(address, self._memory.elements(segment, "uint8")[first:last])
            else:
                self._gpu.zero(address, last - first)
        self._gpu.wait()
        self._updates.forget()

    def extended(self, before: Mapping, after: Mapping) -> None:
        """A segment was extended and is now mapped at another address: page-lock there what was page-locked before."""
        self._updates.forget()  # the remembered gradients are views of the old mapping
        first = before.elements("uint8").ctypes.data
        self._gpu.page_unlock(first, first + before.nbytes)
        if self._journal is None and before.name.startswith("parameters/"):
            for start, stop in self._on_device.made(before.name):
                if stop <= before.nbytes:
                    self._lock(after.elements("uint8"), start, stop)

    def load_kernel(self, rule: str, dtype: str) -> None:
        """Load the kernels that update ``dtype`` variables by ``rule``, so that a commit loads nothing.

        Raises DeviceMemoryError if the GPU has no memory left for them, DeviceError if the GPU cannot be used.
        """
        self._updates.load(dtype, RULES[rule], self._until)

    def discard(self, segment: str, start: int, stop: int) -> None:
        """Free these bytes of a segment, on the GPU and in host memory."""
        if segment.partition("/")[0] in ("parameters", "slots", "gradients"):
            self._updates.forget()
            first = self._memory.elements(segment, "uint8").ctypes.data
            self._gpu.page_unlock(first + start, first + stop)
            if is_on_device(segment):
                if dropped := self._on_device.drop(segment, start):
                    self._made_nbytes -= _in_journal(dropped)
            elif segment.startswith("gradients/"):
                self._on_device.drop(segment_names.device_gradients(segment), start)
        self._memory.discard(segment, start, stop)

    def prepare(self, operations: Sequence[Apply | Write | Fill]) -> Prepared | None:
        """Nothing: a program cannot start the kernels of a GPU."""
        return None

    def commit(self, command: Commit) -> None:
        """Carry out every operation, in order; the mirror holds the outcome when it returns."""
        if self._arithmetic.has_done(command.ticket):
            return
        ours: list[Apply | Write | Fill] = []
        others: list[Apply | Write | Fill] = []
        for operation in command.operations:
            if isinstance(operation, Apply):
                here, there = self._updates.divided(operation)
                ours += here
                others += there
            elif is_on_device(operation.segment if isinstance(operation, Fill) else _segment(operation.target)):
                ours.append(operation)
            else:
                others.append(operation)
        if ours and (self._journal is None or self._journal.ticket != command.ticket):
            if self._journal is not None:
                self._journal.begin()
            changed: list[Changed] = []
            for operation in ours:
                match operation:
                    case Apply():
                        changed += self._updates.apply(operation)
                    case Write():
                        changed += self._write(operation)
                    case Fill():
                        self._fill(operation)
            if len(ours) > 1:  # a single operation changes nothing twice, and its first results can be copied first
                changed = united(changed, self._gpu.mark())
            self._publish(changed, command.ticket)
        self._arithmetic.commit(Commit(command.ticket, tuple(others)))  # it also records the ticket as done

    def prepared(self, answer: Record) -> Record:
        """Complete an answer that names arrays, so that a peer can use them. A Located gets the places of variables and
        gradients on the GPU. For a Slots, the slots' present values are copied to host memory."""
        if isinstance(answer, Slots):
            self.mirror(answer.arrays)
        if isinstance(answer, Located):
            places = tuple(map(self.export, answer.arrays))
            # With a journal another server may replace this one; it needs the gradients in host memory, too.
            return replace(answer, uuid=self._gpu.uuid, places=places, keeps=self._journal is not None)
        return answer

    def mirror(self, arrays: Iterable[Array]) -> None:
        """Make the segments hold the present values of these arrays."""
        if self._journal is not None:
            return
        for array in arrays:
            if isinstance(array.place, Location) and is_on_device(array.place.segment) and array.nbytes:
                self._staging.take(
                    array.place.segment, array.place.offset, self._memory.view(array).reshape(-1).view(np.uint8)
                )
        self._gpu.wait()

    def close(self) -> None:
        """Free everything. No other method may be called afterwards."""
        self._arithmetic.close()
        self._gpu.close()
        self._on_device.close()
        self._updates.close()
        self._staging.close()

    # --- writes -------------------------------------------------------------------------------------------------------

    def _write(self, operation: Write) -> list[Changed]:
        sources = [self._memory.view(source) for source in operation.sources]
        value = sources[0] if operation.reduce is None else reduction.reduce(operation.reduce, sources)
        target, segment = operation.target, _segment(operation.target)
        if not target.nbytes:
            return []
        assert isinstance(target.place, Location)
        first, size = target.place.offset // np.dtype(target.dtype).itemsize, math.prod(target.shape)
        if operation.indices is None:
            new = np.empty(target.shape, target.dtype)
            if operation.op != "assign":
                self._staging.fetch(segment, first, new)
            write(new, operation.op, value)
            self._staging.put(segment, first, new)
            return [(Change(segment, first, size), target.dtype, self._gpu.mark())]
        height, width = target.shape[0], size // target.shape[0]
        indices = self._memory.view(operation.indices)
        inside = (indices >= 0) & (indices < height)
        named, places = np.unique(indices[inside].astype(np.int64), return_inverse=True)
        if not len(named):
            return []
        new = np.empty((len(named), *target.shape[1:]), target.dtype)
        self._staging.fetch_rows(segment, first, named, new)
        write(new, operation.op, value[inside], places)
        self._staging.put_rows(segment, first, named, new)
        changed = of_rows(segment, target.dtype, first, (height, width), named)
        return [(changed, target.dtype, self._gpu.mark())]

    def _fill(self, operation: Fill) -> None:
        """Fill new memory. No peer has seen it yet, so the mirror changes at once."""
        itemsize = np.dtype(operation.dtype).itemsize
        start, stop = operation.first * itemsize, operation.last * itemsize
        for first, last, address in self._on_device.spans(operation.segment, start, stop):
            if operation.value == 0:
                self._gpu.zero(address, last - first)
                continue
            count = (last - first) // itemsize
            blocks = min(-(-count // PIECE), _FILL_BLOCKS)
            value = computed_in(operation.dtype).type(operation.value)
            self._gpu.launch(loops(operation.dtype), "fill", blocks, (address, np.int64(count), value))
        if self._journal is None and operation.segment.startswith("slots/"):
            return
        fill(self._memory, operation)

    # --- the mirror ---------------------------------------------------------------------------------------------------

    def _publish(self, changes: list[Changed], ticket: int) -> None:
        """Copy the changes to the mirror: all of them, or none if this process dies."""
        if self._journal is None:
            changes = [each for each in changes if each[0].segment.startswith("parameters/")]
        # A contiguous change is copied right behind its kernel. Rows are collected after all kernels.
        late: list[tuple[Change, str, np.ndarray]] = []
        for change, dtype, mark in changes:
            if self._journal is not None:
                place = self._journal.place(change, dtype)
            elif change.rows is None:
                place = self._memory.elements(change.segment, dtype)[change.first : change.first + change.width]
            else:
                place = np.empty(change.size, dtype)
            if change.rows is None:
                self._staging.take(change.segment, change.first * place.itemsize, place.view(np.uint8), mark)
            else:
                late.append((change, dtype, place))
        for change, dtype, place in late:
            assert change.rows is not None
            self._staging.fetch_rows(
                change.segment, change.first, change.rows, place.reshape(len(change.rows), change.width)
            )
            if self._journal is None:
                change.put(self._memory.elements(change.segment, dtype), place)
        self._gpu.wait()
        if self._journal is not None:
            self._journal.finish(ticket)
            self._journal.replay(self._memory.elements)

    def _lock(self, raw: np.ndarray, start: int, stop: int) -> None:
        """Page-lock bytes ``start`` to ``stop`` of a segment."""
        first = raw.ctypes.data
        self._gpu.page_lock(first + start, first + stop)


def _in_journal(nbytes: int) -> int:
    """The bytes of the journal for ``nbytes`` of a variable or slot. A change may be recorded piece by piece, and an
    element has at least two bytes."""
    return nbytes + _ENTRY_NBYTES * (1 + nbytes // (2 * PIECE))


def _segment(array: Array) -> str:
    assert isinstance(array.place, Location)
    return array.place.segment
