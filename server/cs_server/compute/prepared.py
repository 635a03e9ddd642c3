"""Commits that are bound before they are needed: the instructions of a program, which only takes a ticket to run.

Only what takes one lane is prepared: small updates of dense variables by compiled kernels. Memory changes as by
`Executor.commit`, store by store, so a new server continues either in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from cs_server.events import Apply, Dense, Fill, Write
from cs_server.rules import RULES

from .clipping import Clipping
from .object_loader import Bound
from .plans import Arrays, Given, Plan
from .programs import Instruction, Op
from .undo import Stores, Undo

__all__ = ["Prepared", "PreparedCommits"]

# The most elements of a prepared commit: what one lane updates before others would have woken up and helped much.
_MOST_ELEMENTS = 1 << 19
# The number of prepared commits that are kept. One of a step has one for each set of gradient buffers.
_KEPT = 64

_Kind: TypeAlias = tuple[tuple[bool, tuple[tuple[str, tuple[Dense, ...]], ...]], ...]
"""Of each operation: whether gradients are scaled, and of each update the rule and the parts."""


class Prepared:
    """A commit as instructions of a program, and the numbers of its next run.

    The program changes memory as `Executor.commit` with one thread does. Before each run, `Executor.prepare` sets the
    numbers, and `set_ticket` the ticket. It may only begin a commit: whatever has been begun, by a program or not, by
    this server or the one before, is continued by `Executor.commit`. ::

        prepared = executor.prepare(operations)
        program = Program([*before, *prepared.instructions, *after], keep=[prepared])
        prepared.set_ticket(7)
        program.run()  # as executor.commit(Commit(7, operations))
    """

    def __init__(self, undo: Undo, operations: Sequence[tuple[Plan, Bound] | None]) -> None:
        """Of each operation its plan and what carries it out, or None if there is nothing to do."""
        self._stores, self._operations = Stores(undo), operations
        calls = [each[1].call for each in operations if each is not None]
        #: What to carry out, in order.
        self.instructions: list[Instruction] = self._stores.begin()
        for phase, (function, words) in enumerate(calls):
            self.instructions += [
                *self._stores.enter(phase),
                (Op.CALL, function, words, 0),
                *self._stores.close(phase),
            ]
        self.instructions += self._stores.end()
        self.set_ticket = self._stores.set_ticket

    def set_numbers(self, steps: Sequence[Sequence[Given]], weights: Sequence[tuple[float, ...]]) -> None:
        """Let the next run make these steps of each operation, with these weights."""
        for operation, own, weight in zip(self._operations, steps, weights, strict=True):
            if operation is not None:
                operation[0].set(own, weight)


class PreparedCommits:
    """Prepares commits, and finds those that it has prepared for the same places."""

    def __init__(self, undo: Undo, arrays: Callable[[Dense], Arrays]) -> None:
        """``arrays`` finds the memory of a part of an update."""
        self._undo, self._arrays = undo, arrays
        self._known: dict[_Kind, Prepared | None] = {}

    def prepare(self, operations: Sequence[Apply | Write | Fill]) -> Prepared | None:
        """See `Executor.prepare`."""
        kind, steps, weights = [], [], []
        for operation in operations:
            if not isinstance(operation, Apply) or operation.global_clipnorm is not None:
                return None
            own: list[Given] = []
            is_scaled = bool(operation.weights)
            for update in operation.updates:
                given = dict(update.hyperparameters)
                if update.sparse or RULES[update.rule].direction is not None or Clipping.of(given) is not None:
                    return None
                if update.dense:
                    own.append((update, given, update.factor))
                    is_scaled |= update.factor != 1
            kind.append((is_scaled, tuple([(update.rule, update.dense) for update, *_ in own])))
            steps.append(own)
            weights.append(operation.weights)
        key = tuple(kind)
        try:
            prepared = self._known[key]
        except KeyError:
            if len(self._known) >= _KEPT:
                self._known.clear()
            prepared = self._known[key] = self._made(steps, weights)
            return prepared
        if prepared is not None:
            prepared.set_numbers(steps, weights)
        return prepared

    def _made(self, steps: Sequence[Sequence[Given]], weights: Sequence[tuple[float, ...]]) -> Prepared | None:
        parts = [part for own in steps for update, *_ in own for part in update.dense]
        if sum(last - first for part in parts for first, last in part.ranges) > _MOST_ELEMENTS:
            return None
        operations: list[tuple[Plan, Bound] | None] = []
        for own, weight in zip(steps, weights, strict=True):
            if not own:
                operations.append(None)
                continue
            plan = Plan([update for update, *_ in own], self._arrays, 1)
            plan.set(own, weight)
            update = plan.update(0, self._undo.lane_outside(0))
            if not isinstance(update, Bound):
                return None
            operations.append((plan, update))
        return Prepared(self._undo, operations)
