"""Commits that are bound before they are needed: the instructions of a program, which only takes a ticket to run.

Only updates of dense variables by compiled kernels are prepared. Memory changes as by `Executor.commit`, and a lane's
words store by store, so a new server continues either in the same way. A small commit has one lane; of a larger one,
helpers carry out the lanes after the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from cs_server.events import Apply, Dense, Fill, Write
from cs_server.rules import RULES

from .clipping import Clipping
from .helpers import Helper
from .object_loader import Bound
from .plans import Arrays, Given, Plan
from .programs import Instruction, Op
from .undo import Stores, Undo

__all__ = ["Prepared", "PreparedCommits"]

# The most elements that one lane updates before others would have woken up and helped much.
_ELEMENTS_OF_ONE_LANE = 1 << 19
# The number of prepared commits that are kept. One of a step has one for each set of gradient buffers.
_KEPT = 64

_Kind: TypeAlias = tuple[tuple[bool, tuple[tuple[str, tuple[Dense, ...]], ...]], ...]
"""Of each operation: whether gradients are scaled, and of each update the rule and the parts."""

_Phase: TypeAlias = tuple[Plan, Sequence[Bound]]
"""A plan, and what carries out each of its shares."""


class Prepared:
    """A commit as instructions of a program, and the numbers of its next run.

    The program changes memory as `Executor.commit` with so many threads does. Before each run, `Executor.prepare` sets
    the numbers, and `set_ticket` the ticket. It may only begin a commit: whatever has been begun, by a program or not,
    by this server or the one before, is continued by `Executor.commit`. ::

        prepared = executor.prepare(operations)
        program = Program([*before, *prepared.instructions, *after], keep=[prepared])
        prepared.set_ticket(7)
        program.run()  # as executor.commit(Commit(7, operations))
    """

    def __init__(self, undo: Undo, lanes: int, operations: Sequence[_Phase | None], helpers: Sequence[Helper]) -> None:
        """Of each operation its plan and what carries out each share, or None if there is nothing to do. There is a
        helper for each share after the first."""
        self._operations, self._kept = operations, helpers
        stores = Stores(undo, lanes)
        #: What to carry out, in order.
        self.instructions: list[Instruction] = stores.begin()
        #: What the helpers are handed: of each share the addresses of the function and of its words.
        self._calls = [np.array([share.call for share in each[1]], np.int64) for each in operations if each is not None]
        for phase, calls in enumerate(self._calls):
            own, *others = calls
            handed = list(zip(helpers[: len(others)], others, strict=True))
            for lane in range(len(calls)):
                self.instructions += stores.enter(phase, lane)
            self.instructions += [(Op.HAND, helper.address, call.ctypes.data, 0) for helper, call in handed]
            self.instructions.append((Op.CALL, *own.tolist(), 0))
            self.instructions += [(Op.JOIN, helper.address, 0, 0) for helper, _ in handed]
            self.instructions += stores.close(phase)
        self.instructions += stores.end()
        self.set_ticket = stores.set_ticket

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
        self._helpers: list[Helper] = []

    def close(self) -> None:
        """End the helpers. No program of a prepared commit may run afterwards."""
        for helper in self._helpers:
            helper.close()

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
        elements = sum(last - first for part in parts for first, last in part.ranges)
        lanes = 1 if elements <= _ELEMENTS_OF_ONE_LANE else self._undo.limit
        operations: list[_Phase | None] = []
        for own, weight in zip(steps, weights, strict=True):
            if not own:
                operations.append(None)
                continue
            plan = Plan([update for update, *_ in own], self._arrays, lanes)
            plan.set(own, weight)
            updates = [plan.update(share, self._undo.lane_outside(share)) for share in range(len(plan.shares))]
            shares = [update for update in updates if isinstance(update, Bound)]
            if len(shares) < len(updates):
                return None
            operations.append((plan, shares))
        needed = max([len(phase[1]) for phase in operations if phase is not None], default=1) - 1
        self._helpers += [Helper() for _ in range(len(self._helpers), needed)]
        return Prepared(self._undo, lanes, operations, self._helpers[:needed])
