"""Pipelined runs: the client's account of one series of steps, which are sent before earlier ones are over.

A :class:`Series` remembers the steps that were sent and their outcomes, and asks its :class:`Carrier` (the link) to
send and to wait. A plain run is a series of one step. ``run_steps`` turns elements of a data set into steps, and
outcomes into the results of its loop; this module knows neither data sets nor sockets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

from cs_proto.function_cache import HeldFunctions
from cs_proto.messages import RunId

__all__ = ["Arguments", "Carrier", "Changes", "Sent", "Series", "made_sent"]

#: (args, kwargs) of each replica.
Arguments = Sequence[tuple[tuple[Any, ...], dict[str, Any]]]


#: New hyperparameters, each with the number of its optimizer.
Changes = Sequence[tuple[int, Mapping[str, float]]]


class Sent(NamedTuple):
    """A run that was sent and is not answered yet, with everything needed to send it again: the ``name`` of its
    function, the values of its ``Run`` by replica, the pickled ``function``, and the pickled ``arguments`` with their
    buffers. ``held``, for a step: the functions that each worker held before."""

    run: RunId
    name: str
    said: list[tuple[Any, ...]]
    function: bytes
    arguments: Sequence[tuple[bytes, tuple[memoryview, ...]]]
    held: list[HeldFunctions]


#: Makes a Sent of a tuple of its fields. The constructor of a NamedTuple is a function of Python; this one is not.
made_sent = partial(tuple.__new__, Sent)


class Carrier(Protocol):
    """Sends the steps of a series, and receives their outcomes."""

    def send_step(self, series: Series, function: Callable[..., Any], arguments: Arguments, changes: Changes) -> None:
        """Send the next step, with ``changes`` that hold from it on, and wait until at most ``lookahead`` are not over.
        Raises as ``run`` does if something cannot be sent, and then nothing was sent."""

    def settle(self, series: Series, left: int = 0, *, cancel: bool = False) -> None:
        """Wait until at most ``left`` of the steps that were sent are not over; ``cancel`` those that are not."""


@dataclass
class Series:
    """Steps in order: the ``unanswered`` ones, and the ``outcomes`` (a list of results, or the exception) of earlier
    ones that were not taken yet. ``number`` is the run of the first step; it is 0 before that."""

    carrier: Carrier
    lookahead: int
    number: int = 0
    #: The number of steps that have begun, and of those that have succeeded.
    begun: int = 0
    succeeded: int = 0
    #: The number of steps whose outcome was asked for.
    taken: int = 0
    has_failed: bool = False
    unanswered: deque[Sent] = field(default_factory=deque)
    outcomes: deque[list[Any] | BaseException] = field(default_factory=deque)

    @property
    def ahead(self) -> int:
        """The number of steps that were sent and are not known to be over."""
        return len(self.unanswered)

    def send(self, function: Callable[..., Any], arguments: Arguments, changes: Changes = ()) -> None:
        """Send the next step, and wait until at most ``lookahead`` are not over; not after one has failed."""
        self.carrier.send_step(self, function, arguments, changes)

    def take(self) -> list[Any]:
        """The results, in replica order, of the first step whose outcome was not taken. Waits for it; raises what the
        step raised."""
        self.taken += 1
        if not self.outcomes:
            self.carrier.settle(self, max(0, len(self.unanswered) - 1))
        outcome = self.outcomes.popleft()
        try:
            if type(outcome) is list:
                return outcome
            raise outcome  # type: ignore[misc]
        finally:
            del outcome  # its traceback refers to this frame, and would keep it and its callers alive

    def drop(self) -> BaseException | None:
        """The exception of the first step whose outcome was not taken, which is known; None if it has succeeded."""
        self.taken += 1
        outcome = self.outcomes.popleft()
        return outcome if isinstance(outcome, BaseException) else None

    def settle(self, *, cancel: bool = False) -> None:
        """Wait for all that were sent, or ``cancel`` those that are not over. Raises KeyboardInterrupt for a Ctrl-C."""
        if self.unanswered:
            self.carrier.settle(self, cancel=cancel)

    def answered(self, outcome: list[Any] | BaseException) -> None:
        """The first of the unanswered steps has succeeded, even if its results cannot be read."""
        self.unanswered.popleft()
        self.begun += 1
        self.succeeded += 1
        self.outcomes.append(outcome)

    def failed(self, error: BaseException) -> list[Sent]:
        """The first of the unanswered steps has failed. Returns the later ones, which never begin."""
        self.has_failed = True
        self.begun += 1
        self.outcomes.append(error)
        _, *dropped = self.unanswered
        self.unanswered.clear()
        return dropped
