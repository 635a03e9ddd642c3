"""What a script waits for, as the controller's core keeps account of it: an answer, or the end of runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from central_storage.core.pipeline import Series
from cs_proto import messages
from cs_proto.messages import Refused
from cs_proto.pace import Pace
from cs_proto.records import Record

__all__ = ["Question", "Settling", "Wait", "number_of"]

# A server that is asked which replicas a run waits for gets this long to say so before the wait is named without it.
_WHOM_WITHIN = 2.0


class Wait:
    """One thing that the script waits for."""

    is_run = False
    is_over = False
    #: The Exception of a signal's handler that is raised in place of KeyboardInterrupt.
    raised: Exception | None = None
    #: What another server is asked again, as long as this is waited for.
    asked: Sequence[Record] = ()

    #: When it began.
    started: float
    #: When the time begins after which it is named.
    counted_from: float

    def __init__(self, pace: Pace) -> None:
        self.pace = pace

    def restart(self, now: float) -> None:
        """Count its time from ``now`` on."""
        self.started = self.counted_from = now

    @property
    def due(self) -> float:
        """When it is named."""
        return self.counted_from + self.pace.after

    def is_due(self, now: float) -> bool:
        """Whether it is to be named now."""
        return self.pace.is_due(now - self.counted_from)

    def what(self, server_pid: int) -> str:
        """What is waited for, in words."""
        raise NotImplementedError


class Question(Wait):
    """The answer of the server to ``request``: a ``kind`` with the ``number`` of the request, or a Refused."""

    def __init__(self, request: Record, number: int, kind: type[Record], now: float, pace: Pace) -> None:
        super().__init__(pace)
        self.restart(now)
        self.request = request
        self.number = number
        self.kind = kind
        self.answer: Any = None

    def what(self, server_pid: int) -> str:
        """As :meth:`Wait.what`."""
        if self.kind is messages.Welcome:
            return "the server's welcome"
        return f"the answer of the server (pid {server_pid}) to {type(self.request).__name__}"

    def answers(self, record: Record) -> bool:
        """Whether ``record`` is the answer."""
        if isinstance(record, Refused):
            return 0 < record.number == self.number
        return type(record) is self.kind and number_of(record) == self.number


class Settling(Wait):
    """The end of runs, until at most ``left`` of ``series`` are unanswered; of all, once they are ``cancelled``."""

    is_run = True

    #: Whether the results of the first unanswered run are being read.
    is_reading = False
    #: The number of the question behind the Cancel; 0 before that. Its answer says that the server has heard.
    cancelled = 0
    #: Whether the workers have been told of the Cancel, too.
    workers_know = False
    #: Whether Ctrl-C, or what a handler has raised, has to be raised when all is over.
    was_interrupted = False

    def __init__(self, series: Series, left: int, reports: bool, now: float, pace: Pace) -> None:
        """``reports``: the server is told of a wait that lasts."""
        self.pace = pace
        self._reports = self.is_unreported = reports
        self.started, self.counted_from = now, now + _WHOM_WITHIN if reports else now  # as restart, at every step
        self.series = series
        self.left = left

    def restart(self, now: float) -> None:
        """As :meth:`Wait.restart`: the next run is waited for."""
        self.started = now
        #: Whether the server has yet to be told of this wait.
        self.is_unreported = self._reports
        self.counted_from = now + _WHOM_WITHIN if self._reports else now

    def what(self, server_pid: int) -> str:
        """As :meth:`Wait.what`."""
        end = f" to end{' after Ctrl-C' * self.is_after_ctrl_c}" if self.cancelled else ""
        return f"run {self.series.unanswered[0].run[0]}{end}"

    @property
    def is_after_ctrl_c(self) -> bool:
        """Whether the user has pressed it."""
        return self.was_interrupted and self.raised is None

    @property
    def cancel(self) -> messages.Cancel:
        """What cancels the runs that are unanswered."""
        unanswered = self.series.unanswered
        return messages.Cancel(unanswered[0].run, len(unanswered) - 1)


def number_of(record: Record) -> int:
    """The number of a request or of its answer; 0 where it has none."""
    number: int = getattr(record, "sequence", getattr(record, "request", 0))
    return number
