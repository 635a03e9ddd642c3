"""``strategy.run_steps``: one step for each element of a data set, sent before the loop has the earlier results.

This module turns elements into steps and outcomes into the results of the loop, and gives unused elements back. The
series (``core/pipeline.py``) sends and waits.
"""

from __future__ import annotations

import logging
from _thread import interrupt_main
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Protocol, Self

from central_storage.core import between_steps
from central_storage.core.options import RunOptions
from central_storage.core.pipeline import Arguments, Changes
from central_storage.core.public_objects import Closed, presented
from central_storage.core.values import regroup
from central_storage.data.dataset import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from central_storage.data.distributed import DistributedDataset, DistributedFromFunction, DistributedIterator
from central_storage.data.places import length_of
from central_storage.data.plan import END
from cs_proto.errors import InvalidArgumentError
from cs_proto.messages import MOST_AHEAD
from cs_proto.printable import counted

from .rates import Rates
from .step_bar import StepBar

__all__ = ["LOOKAHEAD", "LocalSeries", "StepSeries", "Steps", "check", "keeps_per_replica", "steps_of"]

_log = logging.getLogger("central_storage.run_steps")

#: The number of steps that are sent before the next result of the loop is there.
LOOKAHEAD = 2


def _nothing() -> None:
    pass


def _unknown_length() -> int:
    raise TypeError("the number of steps is not known")


class StepSeries(Protocol):
    """Carries out the steps: :class:`~central_storage.core.pipeline.Series`, or :class:`LocalSeries`."""

    lookahead: int
    begun: int
    succeeded: int
    taken: int
    has_failed: bool

    @property
    def ahead(self) -> int:
        """The number of steps that were sent and are not known to be over."""

    def send(self, function: Callable[..., Any], arguments: Arguments, changes: Changes = ()) -> None:
        """Send the next step, with ``changes`` of optimizers."""

    def take(self) -> list[Any]:
        """The results of the next step, in replica order; raises the exception of the step."""

    def drop(self) -> BaseException | None:
        """The exception of the next step, which is over; None if it has succeeded."""

    def settle(self, *, cancel: bool = False) -> None:
        """Wait for all that were sent, or ``cancel`` them."""


@presented
class Steps(Closed):
    """What ``run_steps`` returns: an iterator over the results, in order.

    It ends with the data set, after ``steps`` steps, with the first step that fails, and when it is left: by ``break``,
    where nothing else holds it, by ``close()``, or at the end of its ``with`` block. Then it waits for the steps that
    were sent ahead. An element whose step did not begin goes back to the iterator it came from.
    """

    def __init__(
        self,
        series: StepSeries,
        elements: DistributedIterator,
        is_own: bool,
        limit: int | None,
        send: Callable[[Any], None],
        keep_per_replica: bool = False,
        rates: Rates | None = None,
        length: Callable[[], int] = _unknown_length,
        bar: StepBar | None = None,
        passed: Callable[[], object] = _nothing,
    ) -> None:
        """``is_own``: only this object uses ``elements``. ``send`` sends the step of an element. ``keep_per_replica``:
        every result is a PerReplica. ``rates``, if there are any, learn which steps have begun. ``length`` is the
        number of steps in all. ``bar`` shows them. ``passed`` is called for each whose results are there, while
        anybody wants to know (:data:`between_steps.after_step`)."""
        self._passed = passed
        self._rates = rates
        self._length = length
        self._bar = bar
        self._keep_per_replica = keep_per_replica
        self._series = series
        self._elements = elements
        self._is_own = is_own
        self._limit = limit
        self._send = send
        self._used: deque[Any] = deque()  # elements whose results were not taken yet
        self._at_end: Exception | None = None  # the exception to raise after the remaining results
        self._is_open = True
        elements.lend(self._unbegun)

    @property
    def steps(self) -> int:
        """The number of steps that have succeeded. Waits for those that were sent ahead, and counts them."""
        self._series.settle()
        return self._series.succeeded

    def __len__(self) -> int:
        """The number of steps of the whole series. TypeError if the data set does not know its length."""
        return self._length()

    def __bool__(self) -> bool:
        """True: a series is something, however many steps it has."""
        return True

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        if not self._is_open:
            raise StopIteration
        try:
            between_steps.within.depth += 1  # as its with block, whose two calls would come at every step
            try:
                self._send_ahead()
                is_more = bool(self._used)
                if is_more:
                    if self._rates is not None:
                        self._rates.begun()
                    self._used.popleft()
                    results = regroup(self._series.take(), self._keep_per_replica)
            finally:
                between_steps.within.depth -= 1
            if is_more:
                if between_steps.after_step:
                    self._passed()
                if self._bar is not None:
                    self._bar.passed(results)
                return results
            if self._at_end is not None:
                raise self._at_end
        except KeyboardInterrupt:
            self._series.settle(cancel=True)
            self.close()
            raise
        except BaseException:  # after any exception the loop gets no more results
            self.close()
            raise
        self.close()
        raise StopIteration

    def close(self) -> None:
        """Send no more, and wait for the steps that were sent ahead: their updates stand. Idempotent.

        If one of them fails, it is only logged, because its result was not asked for.
        """
        if not self._is_open:
            return
        self._is_open = False
        try:
            self._series.settle()
        finally:
            unused = list(self._used)[len(self._used) - self._count_unbegun() :]
            self._used.clear()
            self._elements.end_lending(self._unbegun)
            if self._is_own:
                self._elements.close()
            else:
                self._elements.give_back(unused)
            if self._bar is not None:
                self._bar.close()
        while self._series.taken < self._series.begun:
            if self._rates is not None:
                self._rates.begun()
            error = self._series.drop()
            if error is not None and not isinstance(error, KeyboardInterrupt):  # which it has if it was cancelled
                _log.warning("step %d failed after its loop was left: %s", self._series.taken, repr(error))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        try:
            with suppress(Exception):  # the service may be gone, and that was reported already
                self.close()
        except KeyboardInterrupt:  # Python would print it, and the script would go on
            _CtrlCAgain()

    def _unbegun(self) -> int:
        """The number of last elements whose steps have not begun. Waits for the steps that were sent ahead."""
        self._series.settle()
        return self._count_unbegun()

    def _count_unbegun(self) -> int:
        return len(self._used) - (self._series.begun + self._series.ahead - self._series.taken)

    def _send_ahead(self) -> None:
        """Take elements and send their steps, up to the limit of steps under way."""
        series, used = self._series, self._used
        ahead = len(used)
        while ahead <= series.lookahead and not series.has_failed and self._at_end is None:
            pulled = series.taken + ahead
            if pulled == self._limit:
                return
            try:
                element = self._elements.take()
            except Exception as error:  # noqa: BLE001  (raised where the element would have come)
                self._at_end = error
                return
            if element is END:
                self._limit = pulled
                return
            used.append(element)
            ahead += 1
            sent = series.begun + series.ahead
            try:
                self._send(element)
            except Exception as error:
                if series.has_failed or series.begun + series.ahead > sent:  # of a handler of a signal
                    raise
                self._at_end = error
                self._elements.give_back([used.pop()])
                return


class _CtrlCAgain:
    """Presses Ctrl-C again when it is dropped. A function that makes one and calls nothing after it has no place left
    at which Python raises, so KeyboardInterrupt is raised in the caller."""

    __del__ = staticmethod(interrupt_main)


class LocalSeries:
    """Steps of the default strategy: each one runs in this process when its result is asked for."""

    lookahead = ahead = 0

    def __init__(self, call: Callable[[Callable[..., Any], Arguments], list[Any]]) -> None:
        """``call`` calls a function with the arguments of each replica."""
        self._call = call
        self.begun = self.succeeded = self.taken = 0
        self.has_failed = False
        self._next: deque[Callable[[], list[Any]]] = deque()

    def send(self, function: Callable[..., Any], arguments: Arguments, changes: Changes = ()) -> None:
        """Remember the step. No server has to be told of changes."""
        self._next.append(lambda: self._call(function, arguments))

    def take(self) -> list[Any]:
        """Call the function."""
        self.begun += 1
        self.taken += 1
        self.has_failed = True
        result = self._next.popleft()()
        self.has_failed = False
        self.succeeded += 1
        return result

    def drop(self) -> None:
        """Every step that has begun was taken."""

    def settle(self, *, cancel: bool = False) -> None:
        """Nothing is under way between two steps."""


def steps_of(
    dataset: DistributedDataset | DistributedFromFunction | DistributedIterator, limit: int | None
) -> Callable[[], int]:
    """A function that returns how many elements an iteration that begins now has, at most ``limit``. It raises
    TypeError if that is infinite or unknown."""
    data: Any = dataset
    source, begin = (data.data, data.position) if isinstance(data, DistributedIterator) else (data, data.next_position)

    def steps() -> int:
        found = UNKNOWN_CARDINALITY if source is None else int(source.cardinality)
        if limit is not None and (found == INFINITE_CARDINALITY or 0 <= limit <= found - begin):
            return limit
        return max(0, length_of(found) - begin)

    return steps


def keeps_per_replica(options: RunOptions | None) -> bool:
    """Whether results never come back bare. Raises TypeError for ``options`` that are no RunOptions."""
    if options is None:
        return False
    if not isinstance(options, RunOptions):
        raise TypeError(f"options must be a cs.RunOptions, not {options!r:.100}")
    return bool(options.keep_per_replica)


def check(fn: object, dataset: object, replicas: int, steps: object, kwargs: object, lookahead: object) -> None:
    """Raise TypeError or InvalidArgumentError for invalid arguments of ``run_steps`` over this many ``replicas``."""
    if not callable(fn):
        raise TypeError(f"fn must be callable, not {fn!r}")
    if not isinstance(dataset, DistributedDataset | DistributedFromFunction | DistributedIterator):
        raise TypeError(
            f"run_steps takes a distributed data set or an iterator of one, not a {type(dataset).__name__}; use "
            "strategy.experimental_distribute_dataset(dataset)"
        )
    if dataset.replicas != replicas:
        raise InvalidArgumentError(
            f"the data set is split over {counted(dataset.replicas, 'replica')}, this strategy has {replicas}; "
            "distribute it with this strategy"
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"kwargs must be a mapping, not {type(kwargs).__name__}")
    for name, value in (("steps", steps), ("lookahead", lookahead)):
        if name == "steps" and value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an int, not {value!r}")
        if value < 0:
            raise InvalidArgumentError(f"{name} must not be negative, but is {value}")
        if name == "lookahead" and value > MOST_AHEAD:
            raise InvalidArgumentError(f"lookahead must be at most {MOST_AHEAD}, but is {value}")
