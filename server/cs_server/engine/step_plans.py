"""Plans of captured steps: what a program may repeat, and which kind of step is expected after which."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from cs_proto import marks
from cs_proto.codec import MARK_NBYTES
from cs_proto.frozen import frozen
from cs_proto.messages import Return
from cs_proto.records import altered
from cs_server.events import Commit

from .step_kinds import Kind
from .stored_steps import span_of

__all__ = ["NextStep", "Plan", "Plans"]


@frozen
class NextStep:
    """A step that a program may carry out when each worker has left the mark of its run."""

    run: int
    #: The number of its kind, and how many steps of each kind there are with it, as the account has them.
    kind: int
    counts: tuple[int, ...]
    #: Returns that differ from those of the step at most in run, value and the places of rows, by replica.
    returns: tuple[Return, ...]
    #: Whether the workers wait for the mark of its end.
    is_of_series: bool
    #: The peer name of each worker, by replica.
    workers: tuple[bytes, ...]
    commit: Commit | None


class Plan(NamedTuple):
    """The Returns of the last captured step of a kind, by replica. A program may carry out steps that differ from it
    only in runs, values, and the places of the rows of sparse gradients."""

    kind: Kind
    returns: tuple[Return, ...]
    #: The most bytes that such steps bring to the store.
    nbytes: int


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
            self._plans[kind.number] = Plan(kind, tuple(returns), most)

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
