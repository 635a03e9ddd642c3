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
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Protocol, TypeAlias, TypeVar

import numpy as np

from cs_proto.arithmetic import reduction
from cs_proto.arithmetic.optimizers import Hyperparameters, slot_shape
from cs_proto.arrays import Array, array_of
from cs_proto.errors import InvalidArgumentError
from cs_proto.messages import WriteOp
from cs_proto.scatter import write
from cs_runtime.failpoints import failpoint
from cs_server.events import Apply, Commit, Compute, Dense, Fill, Rows, Update, Write
from cs_server.rules import RULES, Rule, computed_in, scaled, squares, trust_ratio

from .clipping import UNBOUNDED, Clipping
from .kernels import apply_dense, has_kernel
from .norms import Kinds, Norms, kinds_of
from .plans import Arrays, Plan, rule_of
from .prepared import Prepared, PreparedCommits
from .sparse import Merged, Table, as_dense, merge, weighted, write_rows
from .undo import KEPT_NBYTES, NUMBERS, Lane, Undo

__all__ = ["Executor", "Memory", "fill", "gradients_of", "spread"]

# The number of cached plans. The variable sets of an apply have one for each set of gradient buffers.
_PLANS = 256
# Gradients that NumPy clips are summed in pieces of this many elements.
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
        # By the rule and the parts of each step, and the number of lanes.
        self._plans: dict[tuple[tuple[tuple[str, tuple[Dense, ...]], ...], int], Plan] = {}
        # By the parts and the bounds of each step, whether all are bounded together, and the number of lanes.
        self._norms: dict[tuple[tuple[tuple[tuple[Dense, ...], int], ...], Kinds, bool, int], Norms] = {}
        # Of the parts with rows of the apply under way: each piece asks for them.
        self._mixed: dict[Dense, Arrays] = {}
        # By the rule and the place.
        self._tables: dict[tuple[object, ...], Table] = {}
        self._prepared = PreparedCommits(self._undo, self._arrays, self._table, memory)
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

    @property
    def alarm(self) -> np.ndarray:
        """One int64, which is not 0 if a sum of gradients in the last commit was not finite; the reader sets it to 0.
        A sum of sparse gradients counts only where compiled code makes it."""
        return self._undo.alarm

    def has_done(self, ticket: int) -> bool:
        """Whether that commit was the last one, and an earlier server has finished it."""
        return self._undo.is_done(ticket)

    def prepare(self, operations: Sequence[Apply | Write | Fill]) -> Prepared | None:
        """What `commit` would do with these operations, as instructions of a program, with the numbers of this step;
        None if they are not all updates by compiled kernels that `prepared` knows.

        For operations on the same places it returns the same object, with their numbers: so a program of it must have
        run before. After many others it makes another one, of which the program must be made anew.
        """
        return self._prepared.prepare(operations)

    def close(self) -> None:
        """End the threads."""
        self._prepared.close()
        if self._pool is not None:
            self._pool.shutdown()

    def _apply(self, operation: Apply) -> None:
        mixed = [part for update in operation.updates for part in update.dense if part.rows]
        self._mixed = {part: self._arrays(part) for part in mixed}
        steps = [self._step(update) for update in operation.updates]
        if operation.global_clipnorm is not None or any(step.is_changed for step in steps):
            self._bound(steps, operation)
        if plain := [step for step in steps if step.update.dense and not step.by_element]:
            self._dense(plain, operation.weights)
        if by_element := [step for step in steps if step.update.dense and step.by_element]:
            self._clipped(by_element, operation.weights)
        if tables := [step for step in steps if step.sparse]:
            self._rows(tables, operation.weights)
        if mixed:
            for known in (self._mixed, self._plans, self._norms):
                known.clear()  # they hold gradients of this apply

    def _step(self, update: Update) -> _Step:
        given = dict(update.hyperparameters)
        sparse = [self._gradients(rows) for rows in update.sparse]
        return _Step(update, RULES[update.rule], given, Clipping.of(given), sparse)

    def _rows(self, steps: Sequence[_Step], weights: tuple[float, ...]) -> None:
        """Update the tables of these steps: those with much to do by all lanes, then the others side by side."""
        lanes, others = self._undo.lanes, []
        for step in steps:
            for (rows, t), gradients in zip(step.update.parts()[1], step.sparse, strict=True):
                table, given = self._table(step.rule, rows), step.given
                if step.rule.direction:
                    self._note(lambda: [trust_ratio(*table.squares(*gradients[0], step.given, t))])  # noqa: B023
                    given = self._trusted(given, 0)
                own = () if step.merged else weights
                if not step.rule.direction and table.fits_one(gradients, given):
                    others.append((table, gradients, own, given, t))
                else:
                    table.apply(weighted(gradients, own), given, t, self._phase, lanes)

        def update(mine: Sequence[_Named], lane: Lane) -> None:
            for table, gradients, own, given, t in lane.in_turn(mine):  # its kernel goes through the pieces itself
                table.apply_in(lane, weighted(gradients, own), given, t)

        if others:
            self._phase(others, update, -(-len(others) // lanes))

    def _bound(self, steps: Sequence[_Step], operation: Apply) -> None:
        """Find the factors of the gradients, and clip the sparse ones."""
        clippings = [step.clipping or UNBOUNDED for step in steps]
        norms = self._norms_of(steps, operation)
        norms.set(clippings, operation.updates, operation.weights)
        if operation.global_clipnorm is not None:
            norms.bound_together(operation.global_clipnorm, operation.clip_epsilon)
        tables = 0
        for step, clipping in zip(steps, clippings, strict=True):
            step.merged = [
                merge(weighted(each, operation.weights), *rows.shape)
                for each, rows in zip(step.sparse, step.update.sparse, strict=True)
            ]
            for gradient in step.merged:
                clipping.bound(gradient.sums)
                norms.add_table(tables, gradient.sums)
                tables += 1
        self._spread(len(norms.shares), lambda share: norms.shares[share]())
        norms.find()
        factors, place = norms.factors.tolist(), 0
        for step in steps:
            count = step.ranges + len(step.merged)
            step.factors, place = factors[place : place + count], place + count
            for factor, gradient in zip(step.factors[step.ranges :], step.merged, strict=True):
                scaled(gradient.sums, factor)
            step.sparse = [[(gradient.sums, gradient.rows)] for gradient in step.merged]

    def _norms_of(self, steps: Sequence[_Step], operation: Apply) -> Norms:
        is_bounded, kinds = operation.global_clipnorm is not None, kinds_of([step.clipping for step in steps])
        parts = tuple([(step.update.dense, len(step.update.sparse)) for step in steps])
        key = (parts, kinds, is_bounded, self._undo.lanes)
        if key not in self._norms:
            if len(self._norms) >= _PLANS:
                self._norms.clear()
            self._norms[key] = Norms(operation.updates, kinds, is_bounded, self._arrays, self._undo.lanes)
        return self._norms[key]

    def _table(self, rule: Rule, rows: Rows) -> Table:
        rule = rule_of(rows, rule)
        key = (rule.name, rows.dtype, rows.first, rows.shape, rows.parameters, rows.slots)
        if key not in self._tables:
            if len(self._tables) >= _PLANS:
                self._tables.clear()

            def array(name: str, shape: tuple[int, ...]) -> np.ndarray:
                elements = self._memory.elements(name, rows.dtype)
                return elements[rows.first : rows.first + math.prod(shape)].reshape(shape)

            slots = tuple(array(name, slot_shape(rule.name, rows.shape)) for name in rows.slots)
            self._tables[key] = Table(rule, array(rows.parameters, rows.shape), slots)
        return self._tables[key]

    def _gradients(self, rows: Rows) -> list[tuple[np.ndarray, np.ndarray]]:
        view, wide, height = self._memory.view, computed_in(rows.dtype), rows.shape[0]
        if all(indices is not None for _, indices in rows.gradients):
            return [(view(values), view(indices)) for values, indices in rows.gradients if indices is not None]
        # A dense one names every row, and is added up in that dtype. Then so are the others.
        dense = [
            view(values) if indices is None else as_dense(view(values), view(indices), height)
            for values, indices in rows.gradients
        ]
        return [(each.astype(wide, copy=False), np.arange(height)) for each in dense]

    def _dense(self, steps: Sequence[_Step], weights: tuple[float, ...]) -> None:
        """Update the dense variables of several optimizers in one phase."""
        key = (tuple([(step.rule.name, step.update.dense) for step in steps]), self._undo.lanes)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _PLANS:
                self._plans.clear()
            plan = self._plans[key] = Plan([step.update for step in steps], self._arrays, self._undo.lanes)

        factors: list[float] = []
        if any(step.factors or step.update.factor != 1 for step in steps):
            factors = [factor for step in steps for factor in step.of_ranges]
        plan.set([(step.update, step.given) for step in steps], weights, factors)

        def apply(shares: Sequence[int], lane: Lane) -> None:
            for share in shares:  # at most one, and the kernels go through its pieces themselves
                plan.update(share, lane)()

        self._phase(range(len(plan.shares)), apply)

    def _clipped(self, steps: Sequence[_Step], weights: tuple[float, ...]) -> None:
        """Update dense variables whose gradients NumPy has to clip, or whose rule needs the norms of each. Every range
        is one variable."""
        if plain := [piece for step in steps if not step.rule.direction for piece in step.pieces]:
            self._pieces(plain, weights)
        # The norms of a variable cannot be computed again when a part of it is updated: they are noted before.
        for step in steps:
            for first in range(0, step.ranges, NUMBERS) if step.rule.direction else ():
                group = [piece for piece in step.pieces if first <= piece.number < first + NUMBERS]
                self._note(lambda: self._ratios(group, weights))  # noqa: B023
                self._pieces(group, weights)

    def _pieces(self, pieces: Sequence[_Piece], weights: tuple[float, ...]) -> None:
        """The next phase of the commit: update these pieces."""

        def update(mine: Sequence[_Piece], lane: Lane) -> None:
            for each in lane.rest(mine):
                piece, rule = each.elements, each.step.rule
                parameters, slots, gradients = self._arrays(each.part)
                total = each.total(gradients, weights, lane.alarm)
                lane.keep([(array, piece) for array in (parameters, *slots)])
                whole = np.array([[0, len(total)]], np.int64)
                given = self._trusted(each.step.given, each.number % NUMBERS) if rule.direction else each.step.given
                own, slots = rule_of(each.part, rule), tuple(slot[piece] for slot in slots)
                apply_dense(own, whole, parameters[piece], slots, (total,), given, each.t)

        self._phase([smaller for piece in pieces for smaller in piece.smaller()], update)

    def _ratios(self, pieces: Sequence[_Piece], weights: tuple[float, ...]) -> list[float]:
        """The trust ratios of the variables of these pieces, which are added up in order."""
        found: list[tuple[float, float]] = [(0.0, 0.0)] * len(pieces)
        lanes = self._undo.lanes

        def share(lane: int) -> None:
            for which in range(lane, len(pieces), lanes):
                each = pieces[which]
                parameters, slots, gradients = self._arrays(each.part)
                values = parameters[each.elements], each.total(gradients, weights)
                of_slots = [slot[each.elements] for slot in slots]
                found[which] = squares(rule_of(each.part, each.step.rule), *values, of_slots, each.step.given, each.t)

        self._spread(min(lanes, len(pieces)), share)
        sums: dict[int, tuple[float, float]] = {}
        for each, (one, other) in zip(pieces, found, strict=True):
            before = sums.get(each.number, (0.0, 0.0))
            sums[each.number] = before[0] + one, before[1] + other
        return [trust_ratio(*each) for each in sums.values()]

    def _note(self, numbers: Callable[[], Sequence[float]]) -> None:
        """The next phase of the commit: note numbers, which read what later phases overwrite."""
        if self._undo.opens():
            found = numbers()
            self._undo.numbers[: len(found)] = found
            self._end_phase()

    def _trusted(self, given: Hyperparameters, which: int) -> Hyperparameters:
        """The hyperparameters for a variable, with the ratio that was noted for it."""
        return {**given, "learning_rate": given["learning_rate"] * float(self._undo.numbers[which])}

    def _arrays(self, part: Dense) -> Arrays:
        if part.rows and (known := self._mixed.get(part)) is not None:
            return known
        whole = slice(*part.ranges[0]) if part.rows else slice(None)

        def elements(names: Sequence[str]) -> tuple[np.ndarray, ...]:
            return tuple(self._memory.elements(name, part.dtype)[whole] for name in names)

        return elements([part.parameters])[0], elements(part.slots), gradients_of(self._memory, part)

    def _phase(self, items: Sequence[T], work: Callable[[Sequence[T], Lane], None], phases: int = 1) -> None:
        """The next phase of the commit: each lane does ``work`` for its share of ``items``. If each item of a lane is a
        phase, there are several ``phases``."""
        if not self._undo.opens(phases):
            return
        count = self._undo.lanes
        if len(items) == 1:
            work(items, self._undo.lane(0))
        else:
            lanes = [self._undo.lane(which) for which in range(min(count, len(items)))]
            self._spread(len(lanes), lambda which: work(items[which::count], lanes[which]))
        self._end_phase(phases)

    def _end_phase(self, phases: int = 1) -> None:
        failpoint("server.phase")
        self._undo.close(phases)

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

        self._phase(list(_cut(0, len(target), KEPT_NBYTES // target.itemsize)), add)


@dataclass(eq=False)
class _Step:
    """The step of one optimizer: what it is made of, and what clipping makes of its gradients."""

    update: Update
    rule: Rule
    given: Hyperparameters
    clipping: Clipping | None
    #: The sparse gradients of each table, as (values, indices) in replica order, without their weights; or their sum,
    #: if there is one in ``merged``.
    sparse: list[list[tuple[np.ndarray, np.ndarray]]]
    merged: list[Merged] = field(default_factory=list)
    #: Of each range, and then of each table. Empty: all are 1.
    factors: list[float] = field(default_factory=list)

    @property
    def is_changed(self) -> bool:
        """Whether something is to be done to the summed gradients of this optimizer alone."""
        return self.clipping is not None or self.update.factor != 1 or self.rule.direction is not None

    @property
    def by_element(self) -> bool:
        """Whether kernels do not clip the dense gradients. Bounds of an optimizer hold for halves in half precision, in
        which no kernel computes. A rule may need the norms of each variable."""
        if self.clipping is None or self.rule.direction is not None:
            return self.rule.direction is not None
        parts = self.update.dense
        if self.clipping.by_element:
            dtypes = [(rule_of(part, self.rule), np.dtype(part.dtype)) for part in parts]
            return not all(has_kernel(*each, is_sparse=False) for each in dtypes)
        return any(part.dtype == "float16" for part in parts)

    @property
    def of_ranges(self) -> list[float]:
        """The factors of the dense gradients."""
        return self.factors[: self.ranges] if self.factors else [self.update.factor] * self.ranges

    @property
    def pieces(self) -> list[_Piece]:
        """The dense gradients in pieces."""
        ranges = [(part, t, each) for part, t in self.update.parts()[0] for each in part.places]
        return [
            _Piece(self, number, part, t, elements)
            for number, (part, t, (first, last)) in enumerate(ranges)
            for elements in _cut(first, last, _PIECE)
        ]

    @property
    def ranges(self) -> int:
        """The number of ranges of the dense gradients."""
        return sum(len(part.ranges) for part in self.update.dense)


@dataclass(frozen=True, eq=False)
class _Piece:
    """Elements of the dense gradients of a step: of its range with this number, which is one variable, for the
    ``t``-th update."""

    step: _Step
    number: int
    part: Dense
    t: int
    elements: slice

    def total(
        self, gradients: Sequence[np.ndarray], weights: tuple[float, ...], alarm: np.ndarray | None = None
    ) -> np.ndarray:
        """The sum of the replicas' gradients, clipped. ``alarm`` is set where it is not finite before that."""
        total = UNBOUNDED.total(gradients, self.elements, weights)
        with np.errstate(all="ignore"):
            # Halves of which each is finite often have a sum that no half can hold.
            if alarm is not None and not np.isfinite(total.sum(dtype=computed_in(total.dtype))):
                alarm[0] = 1
        if self.step.clipping is not None:
            self.step.clipping.bound(total)
        return scaled(total, self.step.factors[self.number])

    def smaller(self) -> Iterator[_Piece]:
        """The same elements in pieces whose old values a lane can keep."""
        most = min(_PIECE, KEPT_NBYTES // np.dtype(self.part.dtype).itemsize)
        for elements in _cut(self.elements.start, self.elements.stop, most):
            yield replace(self, elements=elements)


_Named: TypeAlias = tuple[Table, list[tuple[np.ndarray, np.ndarray]], tuple[float, ...], Hyperparameters, int]
"""A table, its gradients and their weights, the hyperparameters and the number of the update."""


def gradients_of(memory: Memory, part: Dense) -> tuple[np.ndarray, ...]:
    """The gradients of a part in replica order, of which its `places` count."""
    whole = slice(*part.ranges[0]) if part.rows else slice(None)
    return tuple(
        memory.elements(name, part.dtype)[whole] if rows is None else spread(memory, part, *rows)
        for name, rows in zip_longest(part.gradients, part.rows)
    )


def spread(memory: Memory, part: Dense, values: Array, indices: Array) -> np.ndarray:
    """A sparse gradient of the variable of a part as a dense one."""
    ((first, last),) = part.ranges
    height = (last - first) // math.prod(values.shape[1:])
    return as_dense(memory.view(values), memory.view(indices), height).reshape(-1)


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


def _cut(first: int, last: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, last)) for start in range(first, last, size))
