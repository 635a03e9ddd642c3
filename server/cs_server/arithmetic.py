"""The arithmetic behind the engine's commands: what :class:`~cs_server.events.Compute` and
:class:`~cs_server.events.Commit` ask for, on the memory where it lies.

It decides nothing: a commit was checked before it was commanded and cannot fail halfway, so an exception out of one is
a defect, after which no variable can be trusted. Called by the service, in its one thread; a large update is
spread over threads of its own, which are done when the call returns.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Protocol

import numpy as np

from cs_proto import reduction
from cs_proto.arrays import Array, array_of
from cs_proto.errors import InvalidArgumentError
from cs_proto.writing import write

from .events import Apply, Commit, Compute, Fill, Write
from .kernels import apply_dense
from .updates import resolve

__all__ = ["Arithmetic", "Memory"]

# An update of fewer elements than this is done before another thread has woken up.
_ELEMENTS_PER_THREAD = 1 << 17
# Ranges are cut between cache lines, whatever the dtype.
_ELEMENTS_PER_CUT = 64


class Memory(Protocol):
    """Where arrays lie."""

    def view(self, array: Array) -> np.ndarray:
        """The array behind a descriptor."""

    def elements(self, name: str, dtype: str) -> np.ndarray:
        """A whole segment as a 1-D array of ``dtype``."""


class Arithmetic:
    """Carries out computations and commits over ``memory``, updates on up to ``threads`` threads."""

    def __init__(self, memory: Memory, threads: int, place: Callable[[np.ndarray], Array] = array_of) -> None:
        """``place`` says where the result of a computation goes."""
        self._memory = memory
        self._place = place
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads - 1, "apply") if threads > 1 else None

    def compute(self, command: Compute) -> tuple[Array, ...]:
        """The results of an all_reduce or all_gather, leaf by leaf.

        Raises what :mod:`cs_proto.reduction` raises, and :class:`InvalidArgumentError` where the replicas bring
        different numbers of leaves.
        """
        counts = [len(leaves) for leaves in command.components]
        if len(set(counts)) > 1:
            raise InvalidArgumentError(f"the replicas bring nests of different numbers of arrays: {counts}")
        combine: Callable[[list[np.ndarray]], np.ndarray]
        if command.reduce is not None:
            op = command.reduce
            combine = lambda arrays: reduction.reduce(op, arrays)  # noqa: E731
        else:
            combine = lambda arrays: reduction.gather(arrays, command.axis)  # noqa: E731
        return tuple(
            self._place(combine([self._memory.view(array) for array in leaf]))
            for leaf in zip(*command.components, strict=True)
        )

    def commit(self, command: Commit) -> None:
        """Carry out every operation, in order."""
        for operation in command.operations:
            match operation:
                case Apply():
                    self._apply(operation)
                case Write():
                    self._write(operation)
                case Fill():
                    elements = self._memory.elements(operation.segment, operation.dtype)
                    elements[operation.first : operation.last] = operation.value

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()

    def _apply(self, operation: Apply) -> None:
        hyperparameters = dict(operation.hyperparameters)
        rule = resolve(operation.kind, hyperparameters)
        parameters = self._memory.elements(operation.parameters, operation.dtype)
        slots = tuple(self._memory.elements(name, operation.dtype) for name in operation.slots)
        gradients = tuple(self._memory.elements(name, operation.dtype) for name in operation.gradients)

        def apply(ranges: np.ndarray) -> None:
            apply_dense(rule, ranges, parameters, slots, gradients, hyperparameters, operation.t)

        shares = _shares(operation.ranges, self._threads)
        if self._pool is None or len(shares) == 1:
            for share in shares:
                apply(share)
            return
        others = [self._pool.submit(apply, share) for share in shares[1:]]
        apply(shares[0])
        for other in others:
            other.result()

    def _write(self, operation: Write) -> None:
        sources = [self._memory.view(source) for source in operation.sources]
        value = sources[0] if operation.reduce is None else reduction.reduce(operation.reduce, sources)
        indices = None if operation.indices is None else self._memory.view(operation.indices)
        write(self._memory.view(operation.target), operation.op, value, indices)


@lru_cache(maxsize=256)
def _shares(ranges: tuple[tuple[int, int], ...], threads: int) -> tuple[np.ndarray, ...]:
    """``ranges`` cut into up to ``threads`` shares of about as many elements, each an int64 array of shape [n, 2].

    The same set of variables is updated in every step, so the cutting is remembered.
    """
    total = sum(last - first for first, last in ranges)
    count = max(1, min(threads, total // _ELEMENTS_PER_THREAD))
    size = -(-total // count)
    shares: list[list[tuple[int, int]]] = [[]]
    room = size
    for first, last in ranges:
        while last - first > room and len(shares) < count:
            # A cut lies between cache lines, so no two threads ever write one; it may fall where the range begins.
            cut = max(first, (first + room) // _ELEMENTS_PER_CUT * _ELEMENTS_PER_CUT)
            if cut > first:
                shares[-1].append((first, cut))
            shares.append([])
            first, room = cut, size
        shares[-1].append((first, last))
        room -= last - first
    return tuple(np.array(share, np.int64).reshape(-1, 2) for share in shares)
