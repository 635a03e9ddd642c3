"""Commits that are bound before they are needed: the instructions of a program, which only takes a ticket to run.

Only updates of dense variables by compiled kernels are prepared, with their bounds. Memory changes as by
`Executor.commit`, and a lane's words store by store, so a new server continues either in the same way. A small commit
has one lane; of a larger one, helpers carry out the lanes after the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from cs_proto.frozen import frozen, with_changes
from cs_server.events import Apply, Dense, Fill, Write
from cs_server.rules import RULES

from .clipping import UNBOUNDED, Clipping
from .helpers import Helper
from .norms import Kinds, Norms, kinds_of
from .object_loader import Bound
from .plans import Arrays, Given, Plan
from .programs import Instruction, Op
from .undo import Stores, Undo

__all__ = ["Prepared", "PreparedCommits"]

# The most elements that one lane updates before others would have woken up and helped much.
_ELEMENTS_OF_ONE_LANE = 1 << 19
# The number of prepared commits that are kept. One of a step has one for each set of gradient buffers.
_KEPT = 64

_Kind: TypeAlias = tuple[tuple[bool, Kinds, bool, tuple[tuple[str, tuple[Dense, ...]], ...]], ...]
"""Of each operation: whether gradients are scaled, the bounds of each update, whether all are bounded together, and of
each update the rule and the parts."""


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

    def __init__(self, undo: Undo, lanes: int, operations: Sequence[_Phase | None], helpers: Sequence[Helper]) -> None:
        """Of each operation its plan and what carries out each share, or None if there is nothing to do. There is a
        helper for each share after the first."""
        self._operations, self._kept = operations, helpers
        stores = Stores(undo, lanes)
        #: What to carry out, in order.
        self.instructions: list[Instruction] = stores.begin()
        # What the helpers are handed: of each share the addresses of the function and of its words.
        self._calls: list[NDArray[np.int64]] = []
        for phase, each in enumerate(each for each in operations if each is not None):
            if each.norms is not None:  # they only read, so no word tells how far they are
                self._together(each.norm_shares)
                self._together([each.norms.find])
            for lane in range(len(each.shares)):
                self.instructions += stores.enter(phase, lane)
            self._together(each.shares)
            self.instructions += stores.close(phase)
        self.instructions += stores.end()
        self.set_ticket = stores.set_ticket
        #: The address of `Executor.alarm`.
        self.alarm_address = int(undo.alarm.ctypes.data)

    def _together(self, shares: Sequence[Bound]) -> None:
        """Carry out all of these, those after the first by helpers."""
        if not shares:
            return
        calls = np.array([share.call for share in shares], np.int64)
        self._calls.append(calls)
        own, *others = calls
        handed = list(zip(self._kept[: len(others)], others, strict=True))
        self.instructions += [(Op.HAND, helper.address, call.ctypes.data, 0) for helper, call in handed]
        self.instructions.append((Op.CALL, *own.tolist(), 0))
        self.instructions += [(Op.JOIN, helper.address, 0, 0) for helper, _ in handed]

    def set_numbers(self, operations: Sequence[Apply | Write | Fill]) -> None:
        """Let the next run make the steps of these operations, which differ from the prepared ones at most in
        numbers."""
        for phase, operation in zip(self._operations, operations, strict=True):
            if phase is not None and isinstance(operation, Apply):
                phase.set(operation)


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
        kind, applies, steps = [], [], []
        for operation in operations:
            if not isinstance(operation, Apply):
                return None
            own: list[Given] = []
            is_scaled = bool(operation.weights)
            for update in operation.updates:
                if update.sparse or RULES[update.rule].direction is not None:
                    return None
                if update.dense:
                    own.append((update, dict(update.hyperparameters)))
                    is_scaled |= update.factor != 1
            bounds = kinds_of([Clipping.of(given) for _, given in own]), operation.global_clipnorm is not None
            kind.append((is_scaled, *bounds, tuple([(update.rule, update.dense) for update, _ in own])))
            applies.append(operation)
            steps.append(own)
        key = tuple(kind)
        try:
            prepared = self._known[key]
        except KeyError:
            if len(self._known) >= _KEPT:
                self._known.clear()
            prepared = self._known[key] = self._made(applies, steps)
            return prepared
        if prepared is not None:
            prepared.set_numbers(applies)
        return prepared

    def _made(self, applies: Sequence[Apply], steps: Sequence[Sequence[Given]]) -> Prepared | None:
        parts = [part for own in steps for update, *_ in own for part in update.dense]
        elements = sum(last - first for part in parts for first, last in part.ranges)
        lanes = 1 if elements <= _ELEMENTS_OF_ONE_LANE else self._undo.limit
        operations: list[_Phase | None] = []
        for operation, own in zip(applies, steps, strict=True):
            phase = self._phase(operation, own, lanes) if own else None
            if own and phase is None:
                return None
            operations.append(phase)
        phases = [phase for phase in operations if phase is not None]
        needed = max([len(each) for phase in phases for each in (phase.shares, phase.norm_shares)], default=1) - 1
        self._helpers += [Helper() for _ in range(len(self._helpers), needed)]
        return Prepared(self._undo, lanes, operations, self._helpers[:needed])

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
