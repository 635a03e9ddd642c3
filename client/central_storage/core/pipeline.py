"""Runs that are sent before those ahead of them are over: the client's account of one series of steps.

A :class:`Series` remembers what was sent and what came of it, and asks its :class:`Carrier` (the link) to send and to
wait. A plain run is a series of its own that is never ahead. ``run_steps`` turns data sets into steps and outcomes into
what its loop gets; here is neither a data set nor a socket.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from cs_proto.function_cache import HeldFunctions
from cs_proto.messages import RunId

__all__ = ["Arguments", "Carrier", "Sent", "Series"]

#: (args, kwargs) of each replica.
Arguments = Sequence[tuple[tuple[Any, ...], dict[str, Any]]]


class Sent(NamedTuple):
    """A run that was sent and has not been answered. What its messages said by replica, the values of a ``Run``, and
    the pickled ``function``, with which it can be sent again; its pickled ``arguments`` and their buffers are kept
    until then. ``held``, by replica, of a step: which functions workers held before."""

    run: RunId
    said: list[tuple[Any, ...]]
    function: bytes
    arguments: Sequence[tuple[bytes, tuple[memoryview, ...]]]
    held: list[HeldFunctions]


class Carrier(Protocol):
    """Who sends the steps of a series, and hears what came of them."""

    def send_step(self, series: Series, function: Callable[..., Any], arguments: Arguments) -> None:
        """Send the next step and wait until at most ``lookahead`` are not over. Raises as ``run`` does for what cannot
        be sent, and then nothing was."""

    def settle(self, series: Series, left: int = 0, *, cancel: bool = False) -> None:
        """Wait until at most ``left`` of the steps that were sent are not over; ``cancel`` those that are not."""


@dataclass
class Series:
    """Steps in order: ``unanswered`` ones, and the ``outcomes`` (a list of results, or what to raise) of those before
    them that nobody has taken. ``number`` is the run of the first step, 0 before it."""

    carrier: Carrier
    lookahead: int
    number: int = 0
    #: How many have begun, and how many of those succeeded.
    begun: int = 0
    succeeded: int = 0
    has_failed: bool = False
    unanswered: deque[Sent] = field(default_factory=deque)
    outcomes: deque[list[Any] | BaseException] = field(default_factory=deque)

    @property
    def ahead(self) -> int:
        """How many have been sent and are not known to be over."""
        return len(self.unanswered)

    def send(self, function: Callable[..., Any], arguments: Arguments) -> None:
        """Send the next step, and wait until at most ``lookahead`` are not over; not after one has failed."""
        self.carrier.send_step(self, function, arguments)

    def take(self) -> list[Any]:
        """The results, in replica order, of the first step whose outcome was not taken. Waits for it; raises what the
        step raised."""
        if not self.outcomes:
            self.carrier.settle(self, max(0, len(self.unanswered) - 1))
        outcome = self.outcomes.popleft()
        try:
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome
        finally:
            del outcome  # its traceback has this frame, and would keep it and those around it

    def settle(self, *, cancel: bool = False) -> None:
        """Wait for all that were sent, or ``cancel`` those that are not over. Raises KeyboardInterrupt for a Ctrl-C."""
        if self.unanswered:
            self.carrier.settle(self, cancel=cancel)

    def answered(self, outcome: list[Any] | BaseException) -> None:
        """The first of the unanswered steps has succeeded, though its results may be nothing that can be read."""
        self.unanswered.popleft()
        self.begun += 1
        self.succeeded += 1
        self.outcomes.append(outcome)

    def failed(self, error: BaseException) -> list[Sent]:
        """The first of the unanswered steps has failed; those after it, which never begin."""
        self.has_failed = True
        self.begun += 1
        self.outcomes.append(error)
        _, *dropped = self.unanswered
        self.unanswered.clear()
        return dropped
