"""Plans of captured steps: what a program may repeat, and which kind of step is expected after which."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from cs_proto import marks
from cs_proto.codec import MARK_NBYTES
from cs_proto.frozen import frozen, with_changes
from cs_proto.messages import Optimizer, Return, RunFinished, Value
from cs_proto.records import altered
from cs_server.events import Apply, Commit

from .catalogue import updates
from .step_kinds import Kind
from .steps import progress
from .store.state import State
from .stored_steps import span_of

__all__ = ["NextStep", "Plan", "Plans"]


@frozen
class NextStep:
    """A step that a program may carry out when each worker has left the mark of its run."""

    run: int
    #: The number of its kind, and how many steps of each kind there are with it, as the account has them.
    kind: int
    counts: Sequence[int]
    #: Returns that differ from those of the step at most in run, value and the places of rows, by replica.
    returns: tuple[Return, ...]
    #: Whether the workers wait for the mark of its end.
    is_of_series: bool
    #: The peer name of each worker, by replica.
    workers: tuple[bytes, ...]
    commit: Commit | None
    #: The same object in steps of which only runs, values and the numbers of their commits differ.
    alike: object


class Plan:
    """The Returns of the last captured step of a kind, by replica. A program may carry out steps that differ from it
    only in runs, values, and the places of the rows of sparse gradients."""

    def __init__(self, kind: Kind, returns: Sequence[Return], nbytes: int) -> None:
        """``nbytes``: the most that such steps bring to the store."""
        self.kind, self.returns, self.nbytes = kind, tuple(returns), nbytes
        #: What the controller hears of such a step, but for run and values.
        self.finished = RunFinished((1,), (), None, kind.commits)
        #: As in a step of it. Another object once commits differ in more than numbers.
        self.alike = object()
        self._values_at = [marks.value_at(record) for record in returns]
        self._points: list[Any] = list(zip(*[record.notes for record in returns], strict=True))
        # Of the commits so far, and of each update the optimizer and what its variables have been updated more.
        self._operations: list[Apply] = []
        self._made_of: list[tuple[Optimizer, tuple[int, ...]]] = []

    def values(self, bodies: Sequence[bytes]) -> tuple[Value, ...]:
        """What the replicas return in such a step, of which these are the bytes of their marks."""
        return tuple([Value(body[at:], ()) for body, at in zip(bodies, self._values_at, strict=True)])

    def commit_after(
        self, server: State, before: defaultdict[int, int], applied: defaultdict[int, int], ticket: int
    ) -> Commit | None:
        """The commit of the next such step; the gradients of tables lie in it where those of the plan do. ``before``
        has the steps of each variable set that the tables do not count yet. The new ones are added to ``applied``,
        which is a copy."""
        if not self._points:
            return None
        sets, optimizers = server.tables.sets, server.tables.optimizers
        numbers = list[updates.Numbers]()
        made_of: list[tuple[Optimizer, tuple[int, ...]]] = []
        for first, *_ in self._points:
            steps = updates.by_optimizer(server, applied)
            for update in first.updates:
                optimizer = optimizers[sets[update.variable_set].optimizer]
                of_update = updates.numbers_of(server, update.variable_set, optimizer, steps, applied)
                made_of.append((optimizer, of_update[2]))
                numbers.append(of_update)
            for update in first.updates:
                applied[update.variable_set] += 1
        if made_of == self._made_of:
            self._operations = _renumbered(self._operations, numbers)
        else:
            made = progress.make(server, self._points, (), before.copy())
            self._operations = [each for each in made if type(each) is Apply]
            self._made_of, self.alike = made_of, object()
        return Commit(ticket, tuple(self._operations))


def _renumbered(operations: Sequence[Apply], numbers: Sequence[updates.Numbers]) -> list[Apply]:
    """The same operations with other numbers, of each update in turn."""
    made, which = [], 0
    for operation in operations:
        renumbered = []
        for update in operation.updates:
            hyperparameters, t, _ = numbers[which]
            which += 1
            counts = tuple([count + t - update.t for count in update.counts]) if update.counts else ()
            renumbered.append(with_changes(update, hyperparameters=hyperparameters, t=t, counts=counts))
        made.append(with_changes(operation, updates=tuple(renumbered)))
    return made


class Plans:
    """The plans of the kinds that have one."""

    def __init__(self) -> None:
        self._plans: dict[int, Plan] = {}  # by kind
        self._followers: dict[int, int] = {}  # of each kind, the one that came after it last
        self._refused: set[int] = set()

    def decided(self, kind: Kind, returns: Sequence[Return], size: int, *, by_marks: bool) -> None:
        """A step with so many bytes of messages is the last captured one of its kind. It becomes the plan of the kind
        if all its Returns came ``by_marks`` and bring nothing but gradients. Otherwise the kind has no plan."""
        self._plans.pop(kind.number, None)
        only_applies = kind.points == kind.applies and not kind.notes and not returns[0].changes
        if by_marks and only_applies and kind.number not in self._refused:
            # One step for each place, with bodies as long as marks can be.
            most = span_of(returns[0]) * (size + len(returns) * MARK_NBYTES)
            self._plans[kind.number] = Plan(kind, returns, most)

    def follow(self, before: Kind | None, kind: Kind) -> None:
        """A step of a kind came after one of the kind ``before``."""
        if before is not None:
            self._followers[before.number] = kind.number

    def expected(self, after: Kind) -> Plan | None:
        """The plan of the step that is expected after a step of a kind."""
        return self._plans.get(self._followers.get(after.number, after.number))

    def alike(self, base: Return) -> Plan | None:
        """The plan of the steps in which the first replica returns what ``base`` has, but for run, value and places."""
        for plan in self._plans.values():
            first = plan.returns[0]
            is_like = altered(first, run=base.run, value=base.value, notes=()) == altered(base, notes=())
            if is_like and marks.are_alike(first.notes, base.notes):
                return plan
        return None

    def refuse(self, number: int) -> None:
        """No program carries out steps of the kind with this number."""
        self._refused.add(number)
        self._plans.pop(number, None)

    @property
    def nbytes(self) -> int:
        """The most bytes that steps of all plans bring to the store."""
        return sum([plan.nbytes for plan in self._plans.values()])

    @property
    def returns(self) -> dict[int, tuple[Return, ...]]:
        """The Returns of each plan, by kind."""
        return {number: plan.returns for number, plan in self._plans.items()}
