"""Where variables lie: in the machine's memory or on a GPU, behind one protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from cs_proto.arrays import Array
from cs_proto.records import Record

from .compute.executor import Executor
from .compute.prepared import Prepared
from .config import ServerConfig
from .events import Apply, Commit, Fill, Write
from .memory.segments import Segments

__all__ = ["HostStore", "VariableStore", "open_store"]


class VariableStore(Protocol):
    """Variables, their slots and their gradients. Used by one thread."""

    def available_nbytes(self) -> int:
        """Bytes of the GPU that variables and slots may still take; -1 where they lie on none."""

    def make(self, segment: str, start: int, stop: int, *, load: bool = False) -> None:
        """Make place for a variable or slot at bytes ``start`` to ``stop`` of a segment, whose memory is there: zeros
        or, with ``load``, what the segment holds. Raises DeviceMemoryError or MemoryPlanError where there is none."""

    def load_kernel(self, rule: str, dtype: str) -> None:
        """Have ready what updates of ``dtype`` variables by ``rule`` need. Raises DeviceMemoryError or DeviceError."""

    def discard(self, segment: str, start: int, stop: int) -> None:
        """Give these bytes of a segment back, which nobody needs any more; they read as zeros afterwards."""

    def view(self, array: Array) -> np.ndarray:
        """The values of an array, to be read."""

    def prepared(self, answer: Record) -> Record:
        """``answer`` with all that a peer needs to use the arrays that it names."""

    def commit(self, command: Commit) -> None:
        """Carry out every operation, in order; of a commit that was under way, what is not done."""

    def prepare(self, operations: Sequence[Apply | Write | Fill]) -> Prepared | None:
        """A commit of these operations that a program can carry out. None if none can."""

    def close(self) -> None:
        """Give everything back; nothing may be asked of it any more."""


class HostStore:
    """Variables in the machine's memory: the segments are all there is."""

    def __init__(self, segments: Segments, arithmetic: Executor) -> None:
        self._segments = segments
        self._arithmetic = arithmetic

    def available_nbytes(self) -> int:
        return -1

    def make(self, segment: str, start: int, stop: int, *, load: bool = False) -> None:
        """The segment is the place."""

    def load_kernel(self, rule: str, dtype: str) -> None:
        """The kernels of the machine are loaded before there is a service."""

    def discard(self, segment: str, start: int, stop: int) -> None:
        self._segments.discard(segment, start, stop)

    def view(self, array: Array) -> np.ndarray:
        return self._segments.view(array)

    def prepared(self, answer: Record) -> Record:
        return answer

    def commit(self, command: Commit) -> None:
        for operation in command.operations:
            if type(operation) is Write and operation.op == "assign":
                self._segments.use_huge_pages(operation.target)
        self._arithmetic.commit(command)

    def prepare(self, operations: Sequence[Apply | Write | Fill]) -> Prepared | None:
        return self._arithmetic.prepare(operations)

    def close(self) -> None:
        self._arithmetic.close()


def open_store(config: ServerConfig, segments: Segments, arithmetic: Executor, journal_nbytes: int) -> VariableStore:
    """The store on the parameter device of ``config``. It does its part of a commit with ``arithmetic``, and closes it;
    the journal of a GPU begins with ``journal_nbytes``. Raises DeviceError where a GPU cannot be used."""
    if not config.parameter_device.startswith("gpu:"):
        return HostStore(segments, arithmetic)
    from .gpu.opening import open_gpu_store  # a server without a GPU has nothing to do with one

    return open_gpu_store(config, segments, arithmetic, journal_nbytes)
