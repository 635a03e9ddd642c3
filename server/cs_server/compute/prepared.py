"""Commits that are bound before they are needed: the instructions of a program, which only takes a ticket to run.

Only updates by compiled kernels are prepared: of dense variables, with their bounds, and of the rows of tables, without
bounds and weights. Memory changes as by `Executor.commit`, and a lane's words store by store, so a new server continues
either in the same way. A small commit has one lane; of a larger one, helpers carry out the lanes after the first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cs_proto.arithmetic.optimizers import Hyperparameters
from cs_proto.frozen import frozen, with_changes
from cs_proto.marks import PLACE_WORDS
from cs_server.events import Apply, Dense, Fill, Rows, Write
from cs_server.rules import RULES, Rule

from .clipping import UNBOUNDED, Clipping
from .helpers import Helper
from .norms import Norms, kinds_of
from .object_loader import Bound
from .plans import Arrays, Given, Plan, rule_of
from .prepared_rows import GradientMemory, PreparedRows, kind_of
from .programs import Instruction, Op, Program
from .sparse import Table, is_little
from .undo import Stores, Undo

__all__ = ["Prepared", "PreparedCommits"]

# The most elements that one lane updates before others would have woken up and helped much.
_ELEMENTS_OF_ONE_LANE = 1 << 19
# The number of prepared commits that are kept. One of a step has one for each set of gradient buffers.
_KEPT = 64

_Kind: TypeAlias = tuple[object, ...]
"""The number of lanes, if there are tables. Of each operation: whether gradients are scaled, the bounds of each update,
whether all are bounded together, of each update the rule and the parts, and what counts of each table."""

_Named: TypeAlias = tuple[Rule, Rows, Hyperparameters, int]
"""The update of a table: its rule, the rows, the hyperparameters, and its number."""


@frozen
class _Phase:
    """A plan and what carries out each of its shares; and before it, if the gradients are bounded by norms, these."""

    plan: Plan
    shares: Sequence[Bound]
    norms: Norms | None
    norm_shares: Sequence[Bound]

    def set(self, operation: Apply) -> None:
        """Let the next run make the steps of this operation."""
        steps, has_factors = [], False
        for update in operation.updates:
            if update.dense:
                steps.append((update, dict(update.hyperparameters)))
                has_factors |= update.factor != 1
        if self.norms is None:
            factors: list[float] = []
            if has_factors:
                factors = [update.factor for update, _ in steps for part in update.dense for _ in part.ranges]
            self.plan.set(steps, operation.weights, factors)
            return
        clippings = [Clipping.of(given) or UNBOUNDED for _, given in steps]
        self.norms.set(clippings, [update for update, _ in steps], operation.weights)
        if operation.global_clipnorm is not None:
            self.norms.bound_together(operation.global_clipnorm, operation.clip_epsilon)
        self.plan.set(steps, operation.weights)


class _Stage(NamedTuple):
    """Updates that lanes make at the same time: of each lane those that it makes in turn, each a phase of the commit.
    Before them, if there are ``norms``, what finds these."""

    turns: Sequence[Sequence[Bound]]
    norms: Norms | None = None
    norm_shares: Sequence[Bound] = ()

    @property
    def phases(self) -> int:
        return max(map(len, self.turns), default=1)


@frozen
class _Operation:
    """How an operation is carried out: its dense variables, and its tables."""

    dense: _Phase | None
    tables: Sequence[PreparedRows]

    def set_numbers(self, operation: Apply) -> None:
        """As :meth:`Prepared.set_numbers`."""
        if self.dense is not None:
            self.dense.set(operation)
        if self.tables:
            for table, (_, _, hyperparameters, t) in zip(self.tables, _named(operation), strict=True):
                table.set_numbers(hyperparameters, t)

    def stages(self, lanes: int) -> list[_Stage]:
        """In the order of `Executor.commit` with so many lanes."""
        made = []
        if self.dense is not None:
            made.append(_Stage([[share] for share in self.dense.shares], self.dense.norms, self.dense.norm_shares))
        made += [_Stage([[update] for update in table.updates]) for table in self.tables if not table.size.is_little]
        little = [update for table in self.tables if table.size.is_little for update in table.updates]
        if little:
            made.append(_Stage([little[lane::lanes] for lane in range(min(lanes, len(little)))]))
        return made


class Prepared:
    """A commit as instructions of a program, and the numbers of its next run.

    The program changes memory as `Executor.commit` with so many threads does. Before each run, `Executor.prepare` or
    :meth:`set_numbers` sets the numbers, and `set_ticket` the ticket. It may only begin a commit: whatever has been
    begun, by a program or not, by this server or the one before, is continued by `Executor.commit`. ::

        prepared = executor.prepare(operations)
        program = Program([*before, *prepared.instructions, *after], keep=[prepared])
        prepared.set_ticket(7)
        program.run()  # as executor.commit(Commit(7, operations))
    """

    def __init__(self, undo: Undo, lanes: int, operations: Sequence[_Operation], helpers: Sequence[Helper]) -> None:
        """There is a helper for each lane after the first that has something to do."""
        self._operations, self._helpers = operations, helpers
        #: How many tables have sparse gradients.
        self.tables = sum([len(each.tables) for each in operations])
        stores = Stores(undo, lanes)
        #: What to carry out, in order.
        self.instructions: list[Instruction] = stores.begin()
        # What the helpers are handed: of each share the addresses of the function and of its words.
        self._calls: list[NDArray[np.int64]] = []
        self._turns: list[Program] = []
        phase = 0
        for stage in [stage for each in operations for stage in each.stages(lanes)]:
            if stage.norms is not None:  # they only read, so no word tells how far they are
                self._together(stage.norm_shares)
                self._together([stage.norms.find])
            shares = [self._in_turn(turn, stores, phase, lane) for lane, turn in enumerate(stage.turns)]
            self._together(shares)
            phase += stage.phases
            self.instructions += stores.close(phase - 1)
        self.instructions += stores.end()
        self.set_ticket = stores.set_ticket
        #: The address of `Executor.alarm`.
        self.alarm_address = int(undo.alarm.ctypes.data)

    def _in_turn(self, updates: Sequence[Bound], stores: Stores, phase: int, lane: int) -> Bound | Program:
        """What makes these updates of a lane, each of which is a phase; it enters the first one now."""
        self.instructions += stores.enter(phase, lane)
        if len(updates) == 1:
            return updates[0]
        instructions: list[Instruction] = []
        for number, update in enumerate(updates):
            instructions += stores.enter(phase + number, lane) if number else []
            instructions.append((Op.CALL, *update.call, 0))
        self._turns.append(Program(instructions, [updates]))
        return self._turns[-1]

    def _together(self, shares: Sequence[Bound | Program]) -> None:
        """Carry out all of these, those after the first by helpers."""
        if not shares:
            return
        calls = np.array([share.call for share in shares], np.int64)
        self._calls.append(calls)
        own, *others = calls
        handed = list(zip(self._helpers[: len(others)], others, strict=True))
        self.instructions += [(Op.HAND, helper.address, call.ctypes.data, 0) for helper, call in handed]
        self.instructions.append((Op.CALL, *own.tolist(), 0))
        self.instructions += [(Op.JOIN, helper.address, 0, 0) for helper, _ in handed]

    def set_numbers(self, operations: Sequence[Apply | Write | Fill]) -> None:
        """Let the next run make the steps of these operations, which differ from the prepared ones at most in numbers
        and in where the gradients of tables lie. That is left as it is."""
        for prepared, operation in zip(self._operations, operations, strict=True):
            if isinstance(operation, Apply):
                prepared.set_numbers(operation)

    def set_rows(self, named: Sequence[Sequence[_Named]], memory: GradientMemory) -> None:
        """Let the next run take these gradients of the tables of each operation."""
        for prepared, own in zip(self._operations, named, strict=True):
            for table, (_, rows, *_) in zip(prepared.tables, own, strict=True):
                table.set_rows(rows, memory)

    def take(self, places: Sequence[Sequence[int]]) -> bool:
        """Let the next run take the sparse gradients from elsewhere in their segments: of each replica the words of
        `cs_proto.marks.Place` for each table, in order. False if it must not run, because this commit is not prepared
        for that."""
        tables = [table for each in self._operations for table in each.tables]
        for first, table in zip(range(0, PLACE_WORDS * len(tables), PLACE_WORDS), tables, strict=True):
            if not table.take([words[first : first + PLACE_WORDS] for words in places]):
                return False
        return True


class PreparedCommits:
    """Prepares commits, and finds those that it has prepared for the same places."""

    def __init__(
        self,
        undo: Undo,
        arrays: Callable[[Dense], Arrays],
        table: Callable[[Rule, Rows], Table],
        memory: GradientMemory,
    ) -> None:
        """``arrays`` finds the memory of a part of an update, and ``table`` that of a table; ``memory`` has its
        gradients."""
        self._undo, self._arrays, self._table, self._memory = undo, arrays, table, memory
        self._known: dict[_Kind, Prepared | None] = {}
        self._helpers: list[Helper] = []

    def close(self) -> None:
        """End the helpers. No program of a prepared commit may run afterwards."""
        for helper in self._helpers:
            helper.close()

    def prepare(self, operations: Sequence[Apply | Write | Fill]) -> Prepared | None:
        """See `Executor.prepare`."""
        if not all(isinstance(operation, Apply) and _may_be_prepared(operation) for operation in operations):
            return None
        applies = [operation for operation in operations if isinstance(operation, Apply)]
        steps, named = [list(_steps(each)) for each in applies], [list(_named(each)) for each in applies]
        lanes, kind = self._lanes(steps, named) if any(named) else 0, []
        for operation, own, rows in zip(applies, steps, named, strict=True):
            is_scaled = bool(operation.weights) or any(update.factor != 1 for update, _ in own)
            bounds = kinds_of([Clipping.of(given) for _, given in own]), operation.global_clipnorm is not None
            tables = [(rule.name, kind_of(each, lanes)) for rule, each, *_ in rows]
            if not all(each for _, each in tables):
                return None
            kind.append((is_scaled, *bounds, tuple([(update.rule, update.dense) for update, _ in own]), tuple(tables)))
        key = (lanes, *kind)
        try:
            prepared = self._known[key]
        except KeyError:
            if len(self._known) >= _KEPT:
                self._known.clear()
            prepared = self._known[key] = self._made(applies, steps, named, lanes or self._lanes(steps, named))
        if prepared is not None:
            prepared.set_numbers(applies)
            if prepared.tables:
                prepared.set_rows(named, self._memory)
        return prepared

    def _lanes(self, steps: Sequence[Sequence[Given]], named: Sequence[Sequence[_Named]]) -> int:
        parts = [part for own in steps for update, _ in own for part in update.dense]
        elements = sum(last - first for part in parts for first, last in part.ranges)
        of_rows = sum(
            [math.prod(values.shape) for each in named for _, rows, *_ in each for values, _ in rows.gradients]
        )
        return 1 if elements <= _ELEMENTS_OF_ONE_LANE and is_little(of_rows) else self._undo.limit

    def _made(
        self,
        applies: Sequence[Apply],
        steps: Sequence[Sequence[Given]],
        named: Sequence[Sequence[_Named]],
        lanes: int,
    ) -> Prepared | None:
        operations: list[_Operation] = []
        for operation, own, rows in zip(applies, steps, named, strict=True):
            phase = self._phase(operation, own, lanes) if own else None
            tables = self._tables(rows, lanes)
            if (own and phase is None) or tables is None:
                return None
            operations.append(_Operation(phase, tables))
        stages = [stage for each in operations for stage in each.stages(lanes)]
        needed = max([len(each) for stage in stages for each in (stage.turns, stage.norm_shares)], default=1) - 1
        self._helpers += [Helper() for _ in range(len(self._helpers), needed)]
        return Prepared(self._undo, lanes, operations, self._helpers[: max(0, needed)])

    def _tables(self, named: Sequence[_Named], lanes: int) -> list[PreparedRows] | None:
        """The updates of the tables of an operation. None if one is not done by compiled code alone, or changes other
        rows than those that are named."""
        made: list[PreparedRows] = []
        for rule, rows, given, _ in named:
            bound = self._table(rule, rows).bound_rows(given)
            if bound is None:
                return None
            before = sum(table.size.is_little for table in made)  # these take turns over the lanes
            made.append(PreparedRows(bound, rows, lanes, self._undo.lane_outside, before % lanes))
        return made

    def _phase(self, operation: Apply, steps: Sequence[Given], lanes: int) -> _Phase | None:
        """An operation with these steps. None if it is not done by compiled code alone."""
        updates, kinds = [update for update, _ in steps], kinds_of([Clipping.of(given) for _, given in steps])
        is_bounded, norms = operation.global_clipnorm is not None, None
        if is_bounded or any(of_each or of_all for _, of_each, of_all in kinds):
            norms = Norms(updates, kinds, is_bounded, self._arrays, lanes)
        plan = Plan(updates, self._arrays, lanes, None if norms is None else norms.factors)
        norm_shares = [] if norms is None else [each for each in norms.shares if isinstance(each, Bound)]
        phase = _Phase(plan, [], norms, norm_shares)
        phase.set(operation)
        made = [plan.update(share, self._undo.lane_outside(share)) for share in range(len(plan.shares))]
        shares = [update for update in made if isinstance(update, Bound)]
        return with_changes(phase, shares=shares) if len(shares) == len(made) else None


def _may_be_prepared(operation: Apply) -> bool:
    """Whether compiled code may do all of an operation. It bounds and scales no gradients of rows, adds none to dense
    ones, and changes no other rows than those that are named."""
    is_bounded = bool(operation.weights) or operation.global_clipnorm is not None
    for update in operation.updates:
        rule = RULES[update.rule]
        if rule.direction is not None or any(part.rows for part in update.dense):
            return False
        if update.sparse:
            given = dict(update.hyperparameters)
            if is_bounded or update.factor != 1 or Clipping.of(given):
                return False
            if any(rule_of(rows, rule).moving(given) != "rows" for rows in update.sparse):
                return False
    return True


def _steps(operation: Apply) -> Iterator[Given]:
    """The steps of the optimizers of an operation that update dense variables."""
    for update in operation.updates:
        if update.dense:
            yield update, dict(update.hyperparameters)


def _named(operation: Apply) -> Iterator[_Named]:
    """The updates of the tables of an operation."""
    for update in operation.updates:
        if update.sparse:
            given = dict(update.hyperparameters)
            for rows, t in update.parts()[1]:
                yield RULES[update.rule], rows, given, t
