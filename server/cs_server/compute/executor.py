"""The arithmetic of the engine's commands :class:`~cs_server.events.Compute` and :class:`~cs_server.events.Commit`,
done in place.

The executor decides nothing. A commit is checked before it is commanded and cannot fail halfway, so an exception from
one is a defect, after which no variable can be trusted. If the end of a server interrupts a commit, `undo` has its
progress, and the next server finishes it with the same command. The service calls this module in its one thread; a
large update is spread over threads of this module, which are done when the call returns.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol, TypeVar

import numpy as np

from cs_proto.arithmetic import reduction
from cs_proto.arithmetic.optimizers import Hyperparameters
from cs_proto.arrays import Array, array_of
from cs_proto.errors import InvalidArgumentError
from cs_proto.messages import WriteOp
from cs_proto.scatter import write
from cs_runtime.failpoints import failpoint
from cs_server.events import Apply, Commit, Compute, Dense, Fill, Rows, Write
from cs_server.rules import RULES, Rule, squares, trust_ratio

from .clipping import Clipping, square_of
from .kernels import apply_dense, bound
from .sparse import Merged, Table, merge, write_rows
from .undo import KEPT_NBYTES, NUMBERS, Lane, Undo

__all__ = ["Executor", "Memory", "fill"]

# An update of fewer elements than this finishes before another thread would wake up.
_ELEMENTS_PER_THREAD = 1 << 17
# Ranges are cut between cache lines, whatever the dtype.
_ELEMENTS_PER_CUT = 64
# The number of cached plans. A variable set has one for each dtype and set of gradient buffers.
_PLANS = 256
# Gradients that are clipped are summed in pieces of this many elements, whose squares are added up in order.
_PIECE = 1 << 16

T = TypeVar("T")


class Memory(Protocol):
    """The memory of arrays."""

    def view(self, array: Array) -> np.ndarray:
        """The array behind a descriptor."""

    def elements(self, name: str, dtype: str) -> np.ndarray:
        """A whole segment as a 1-D array of ``dtype``."""

    def discard(self, name: str, start: int, stop: int) -> None:
        """Give the whole pages between two bytes of a segment back; they read as zeros afterwards."""


class Executor:
    """Carries out computations and commits over ``memory``, updates on up to ``threads`` threads."""

    def __init__(
        self,
        memory: Memory,
        threads: int,
        place: Callable[[np.ndarray], Array] = array_of,
        undo: np.ndarray | None = None,
    ) -> None:
        """``place`` stores the result of a computation; ``undo`` is the memory of :class:`~.undo.Undo`."""
        self._memory = memory
        self._place = place
        self._undo = Undo(undo, threads)
        # By the part, the name of the rule, and the number of lanes.
        self._plans: dict[tuple[Dense, str, int], _Plan] = {}
        # By the rule and the place.
        self._tables: dict[tuple[object, ...], Table] = {}
        self._pool = ThreadPoolExecutor(threads - 1, "apply") if threads > 1 else None

    def compute(self, command: Compute) -> tuple[Array, ...]:
        """The results of an all_reduce or all_gather, leaf by leaf.

        Raises the errors of :mod:`cs_proto.arithmetic.reduction`, and :class:`InvalidArgumentError` if the replicas
        bring different numbers of leaves.
        """
        counts = [len(leaves) for leaves in command.components]
        if len(set(counts)) > 1:
            raise InvalidArgumentError(f"every replica must contribute the same number of arrays, not {counts}")
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
        """Carry out every operation, in order. Of an interrupted commit, only the unfinished part is carried out."""
        if self.has_done(command.ticket):
            return
        self._undo.begin(command.ticket)
        for operation in command.operations:
            match operation:
                case Apply():
                    self._apply(operation)
                case Write():
                    self._write(operation)
                case Fill():
                    self._phase([operation], self._fill)
        self._undo.end()

    def has_done(self, ticket: int) -> bool:
        """Whether that commit was the last one, and an earlier server has finished it."""
        return self._undo.is_done(ticket)

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()

    def _apply(self, operation: Apply) -> None:
        rule, given = RULES[operation.rule], dict(operation.hyperparameters)
        dense_parts, sparse_parts = operation.parts()
        sparse = [self._gradients(rows) for rows in operation.sparse]
        clipping = Clipping.of(given) or (Clipping(None, None, None) if rule.direction else None)
        if clipping is None:
            for part, t in dense_parts:
                self._dense(rule, part, given, t)
        else:
            merged = [merge(each, *rows.shape) for each, rows in zip(sparse, operation.sparse, strict=True)]
            self._clipped(rule, dense_parts, merged, given, clipping)
            sparse = [[(gradient.sums, gradient.rows)] for gradient in merged]
        for (rows, t), gradients in zip(sparse_parts, sparse, strict=True):
            table = self._table(rule, rows)
            own: Hyperparameters = given
            if rule.direction:
                self._note(lambda: [trust_ratio(*table.squares(*gradients[0], given, t))])  # noqa: B023
                own = self._trusted(given, 0)
            table.apply(gradients, own, t, self._phase, self._undo.lanes)

    def _table(self, rule: Rule, rows: Rows) -> Table:
        rule = _rule_of(rows, rule)
        key = (rule.name, rows.dtype, rows.first, rows.shape, rows.parameters, rows.slots)
        if key not in self._tables:
            if len(self._tables) >= _PLANS:
                self._tables.clear()
            place = slice(rows.first, rows.first + math.prod(rows.shape))
            parameters, *slots = (
                self._memory.elements(name, rows.dtype)[place].reshape(rows.shape)
                for name in (rows.parameters, *rows.slots)
            )
            self._tables[key] = Table(rule, parameters, tuple(slots))
        return self._tables[key]

    def _gradients(self, rows: Rows) -> list[tuple[np.ndarray, np.ndarray]]:
        return [(self._memory.view(values), self._memory.view(indices)) for values, indices in rows.gradients]

    def _dense(self, rule: Rule, part: Dense, given: Hyperparameters, t: int) -> None:
        rule = _rule_of(part, rule)
        key = (part, rule.name, self._undo.lanes)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _PLANS:
                self._plans.clear()
            plan = self._plans[key] = _Plan(rule, self._arrays(part), _shares(part.ranges, self._undo.lanes))

        def apply(shares: Sequence[int], lane: Lane) -> None:
            for share in shares:  # at most one, and the kernel goes through its pieces itself
                plan.apply(share, lane, given, t)

        self._phase(range(len(plan.shares)), apply)

    def _clipped(
        self,
        rule: Rule,
        parts: Sequence[tuple[Dense, int]],
        merged: Sequence[Merged],
        given: Hyperparameters,
        clipping: Clipping,
    ) -> None:
        """Update with clipped gradients; sparse ones are clipped in place. Every range is one variable."""
        counts = [t for part, t in parts for _ in part.ranges]
        pieces = [
            (number, part, piece)
            for number, (part, (first, last)) in enumerate((part, each) for part, _ in parts for each in part.ranges)
            for piece in _pieces(first, last, _PIECE)
        ]
        for gradient in merged:
            clipping.bound(gradient.sums)
        ranges = len(counts)
        factors = clipping.factors(self._squares(pieces, ranges, merged, clipping))
        for factor, gradient in zip(factors[ranges:], merged, strict=True):
            _scale(gradient.sums, factor)

        def total_of(number: int, gradients: Sequence[np.ndarray], piece: slice) -> np.ndarray:
            total = clipping.total(gradients, piece)
            _scale(total, factors[number])
            return total

        def squared(number: int, part: Dense, piece: slice) -> tuple[float, float]:
            parameters, slots, gradients = self._arrays(part)
            total = total_of(number, gradients, piece)
            return squares(rule, parameters[piece], total, [slot[piece] for slot in slots], given, counts[number])

        def update(mine: Sequence[tuple[int, Dense, slice]], lane: Lane) -> None:
            for number, part, piece in lane.rest(mine):
                parameters, slots, gradients = self._arrays(part)
                total = total_of(number, gradients, piece)
                lane.keep([(array, piece) for array in (parameters, *slots)])
                whole = np.array([[0, len(total)]], np.int64)
                own, t = _rule_of(part, rule), counts[number]
                numbers = self._trusted(given, number % NUMBERS) if rule.direction else given
                apply_dense(own, whole, parameters[piece], tuple(slot[piece] for slot in slots), (total,), numbers, t)

        # The norms of a variable cannot be computed again when a part of it is updated: they are noted before.
        for first in range(0, ranges, NUMBERS) if rule.direction else [0]:
            group = [each for each in pieces if not rule.direction or first <= each[0] < first + NUMBERS]
            if rule.direction:
                self._note(lambda: self._ratios(group, squared))  # noqa: B023
            self._phase(_smaller(group), update)

    def _ratios(
        self,
        pieces: Sequence[tuple[int, Dense, slice]],
        squared: Callable[[int, Dense, slice], tuple[float, float]],
    ) -> list[float]:
        """The trust ratios of the variables of these pieces, which are added up in order."""
        found: list[tuple[float, float]] = [(0.0, 0.0)] * len(pieces)
        lanes = self._undo.lanes

        def share(lane: int) -> None:
            for which in range(lane, len(pieces), lanes):
                found[which] = squared(*pieces[which])

        self._spread(min(lanes, len(pieces)), share)
        sums: dict[int, tuple[float, float]] = {}
        for (number, _, _), (one, other) in zip(pieces, found, strict=True):
            before = sums.get(number, (0.0, 0.0))
            sums[number] = before[0] + one, before[1] + other
        return [trust_ratio(*each) for each in sums.values()]

    def _note(self, numbers: Callable[[], Sequence[float]]) -> None:
        """The next phase of the commit: note numbers, which read what later phases overwrite."""
        if self._undo.opens():
            found = numbers()
            self._undo.numbers[: len(found)] = found
            failpoint("server.phase")
            self._undo.close()

    def _trusted(self, given: Hyperparameters, which: int) -> Hyperparameters:
        """The hyperparameters for a variable, with the ratio that was noted for it."""
        return {**given, "learning_rate": given["learning_rate"] * float(self._undo.numbers[which])}

    def _squares(
        self, pieces: Sequence[tuple[int, Dense, slice]], ranges: int, merged: Sequence[Merged], clipping: Clipping
    ) -> list[float]:
        """The squared norms of the gradients of this many ranges, then of the sparse gradients; zeros if no norm is
        bounded."""
        squares = [0.0] * (ranges + len(merged))
        if not clipping.has_norm:
            return squares
        found = [0.0] * len(pieces)
        lanes = self._undo.lanes

        def share(lane: int) -> None:
            for which in range(lane, len(pieces), lanes):
                _, part, piece = pieces[which]
                found[which] = square_of(clipping.total(self._arrays(part)[2], piece))

        self._spread(min(lanes, len(pieces)), share)
        for (number, _, _), square in zip(pieces, found, strict=True):
            squares[number] += square
        squares[ranges:] = [square_of(gradient.sums) for gradient in merged]
        return squares

    def _arrays(self, part: Dense) -> tuple[np.ndarray, tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
        def elements(names: Sequence[str]) -> tuple[np.ndarray, ...]:
            return tuple(self._memory.elements(name, part.dtype) for name in names)

        return elements([part.parameters])[0], elements(part.slots), elements(part.gradients)

    def _phase(self, items: Sequence[T], work: Callable[[Sequence[T], Lane], None]) -> None:
        """The next phase of the commit: each lane does ``work`` for its share of ``items``."""
        if not self._undo.opens():
            return
        count = self._undo.lanes
        if len(items) == 1:
            work(items, self._undo.lane(0))
        else:
            lanes = [self._undo.lane(which) for which in range(min(count, len(items)))]
            self._spread(len(lanes), lambda which: work(items[which::count], lanes[which]))
        failpoint("server.phase")
        self._undo.close()

    def _spread(self, count: int, share: Callable[[int], None]) -> None:
        """Do the shares 0 to ``count`` (exclusive) with all threads; all shares are done when it returns."""
        if self._pool is None or count <= 1:
            for which in range(count):
                share(which)
            return
        others = {which: self._pool.submit(share, which) for which in range(1, count)}
        try:
            share(0)
            for which in list(others):
                if others[which].cancel():  # no thread has started it, because other processes use the processors
                    del others[which]
                    share(which)
        finally:
            wait(others.values())
        for other in others.values():
            other.result()

    def _fill(self, operations: Sequence[Fill], lane: Lane) -> None:
        """Repeating it gives the same result, so nothing has to be kept."""
        for operation in lane.rest(operations):
            fill(self._memory, operation)

    def _write(self, operation: Write) -> None:
        sources = [self._memory.view(source) for source in operation.sources]
        value = sources[0] if operation.reduce is None else reduction.reduce(operation.reduce, sources)
        target = self._memory.view(operation.target)
        if operation.op in ("assign", "scatter_update"):  # repeating it gives the same result
            indices = None if operation.indices is None else self._memory.view(operation.indices)

            def whole(mine: Sequence[Write], lane: Lane) -> None:
                for _ in lane.rest(mine):
                    write(target, operation.op, value, indices)

            self._phase([operation], whole)
        elif operation.indices is None:
            self._add(target.reshape(-1), operation.op, np.broadcast_to(value, target.shape).reshape(-1))
        else:
            write_rows(target, operation.op, value, self._memory.view(operation.indices), self._phase)

    def _add(self, target: np.ndarray, op: WriteOp, value: np.ndarray) -> None:
        def add(mine: Sequence[slice], lane: Lane) -> None:
            for piece in lane.rest(mine):
                lane.keep([(target, piece)])
                write(target[piece], op, value[piece])

        self._phase(list(_pieces(0, len(target), KEPT_NBYTES // target.itemsize)), add)


@dataclass(frozen=True, eq=False)
class _Plan:
    """The constant data of updates of the same part: its place, the shares, and the kernel of each share."""

    rule: Rule
    arrays: tuple[np.ndarray, tuple[np.ndarray, ...], tuple[np.ndarray, ...]]
    shares: tuple[np.ndarray, ...]
    _updates: dict[int, Callable[[Hyperparameters, int], None]] = field(default_factory=dict)

    def apply(self, share: int, lane: Lane, given: Hyperparameters, t: int) -> None:
        """Update a share. The same lane always has the same share."""
        update = self._updates.get(share)
        if update is None:
            update = self._updates[share] = bound(self.rule, self.shares[share], *self.arrays, lane)
        update(given, t)


def fill(memory: Memory, operation: Fill) -> None:
    """Set the elements of a fill. One that is lazy gives their pages back, which then read as zeros."""
    elements = memory.elements(operation.segment, operation.dtype)[operation.first : operation.last]
    if not operation.is_lazy:
        elements[:] = operation.value
        return
    nbytes = elements.itemsize
    memory.discard(operation.segment, operation.first * nbytes, operation.last * nbytes)
    edge = mmap.PAGESIZE // nbytes  # the neighbours keep their part of a page
    elements[:edge] = 0
    elements[-edge:] = 0


def _rule_of(part: Dense | Rows, rule: Rule) -> Rule:
    """The rule of a part of an update that follows ``rule``."""
    return RULES[part.rule] if part.rule else rule


def _pieces(first: int, last: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, last)) for start in range(first, last, size))


def _smaller(pieces: Sequence[tuple[int, Dense, slice]]) -> list[tuple[int, Dense, slice]]:
    """Pieces whose old values a lane can keep."""
    return [
        (number, part, smaller)
        for number, part, piece in pieces
        for smaller in _pieces(piece.start, piece.stop, min(_PIECE, KEPT_NBYTES // np.dtype(part.dtype).itemsize))
    ]


def _scale(gradient: np.ndarray, factor: float) -> None:
    if factor != 1:
        with np.errstate(all="ignore"):
            gradient *= gradient.dtype.type(factor)


@lru_cache(maxsize=256)
def _shares(ranges: tuple[tuple[int, int], ...], threads: int) -> tuple[np.ndarray, ...]:
    """``ranges`` cut into up to ``threads`` shares of about as many elements, each an int64 array of shape [n, 2].

    The same variable set is updated in every step, so the result is cached.
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
