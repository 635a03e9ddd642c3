"""The supervisor's event loop: descriptors, timers and signals in one thread.

A small layer of callbacks over ``selectors``. It uses ``poll``, because standard output may be a regular file, which
``epoll`` refuses.
"""

from __future__ import annotations

import heapq
import itertools
import os
import selectors
import signal
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self

__all__ = ["Call", "Loop", "Signals", "Timer"]

Call = Callable[[], None]


class Timer:
    """A call that is due at a time, unless it is cancelled."""

    def __init__(self, call: Call) -> None:
        self.call: Call | None = call

    def cancel(self) -> None:
        """Cancel the call. Idempotent, also after the call."""
        self.call = None


class _Watch:
    def __init__(self) -> None:
        self.readable: Call | None = None
        self.writable: Call | None = None


class Loop:
    """Runs callbacks when they are due, one after the other. Callbacks must not block."""

    def __init__(self) -> None:
        self._selector = selectors.PollSelector()
        self._watches: dict[int, _Watch] = {}
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()

    def on_readable(self, descriptor: int, call: Call | None) -> None:
        """Call ``call`` whenever ``descriptor`` is readable; None ends that."""
        self._watch(descriptor).readable = call
        self._update(descriptor)

    def on_writable(self, descriptor: int, call: Call | None) -> None:
        """Call ``call`` whenever ``descriptor`` is writable; None ends that."""
        self._watch(descriptor).writable = call
        self._update(descriptor)

    def forget(self, descriptor: int) -> None:
        """Stop watching ``descriptor``. Call this before the descriptor is closed."""
        self.on_readable(descriptor, None)
        self.on_writable(descriptor, None)

    def call_later(self, delay: float, call: Call) -> Timer:
        """Call ``call`` once after ``delay`` seconds."""
        timer = Timer(call)
        heapq.heappush(self._timers, (time.monotonic() + delay, next(self._order), timer))
        return timer

    def turn(self, timeout: float | None = None) -> None:
        """Wait until something is due, at most ``timeout`` seconds, and call it."""
        while self._timers and self._timers[0][2].call is None:
            heapq.heappop(self._timers)
        if self._timers:
            due = max(0.0, self._timers[0][0] - time.monotonic())
            timeout = due if timeout is None else min(due, timeout)
        for key, events in self._selector.select(timeout):
            watch: _Watch = key.data  # an earlier callback of this turn may have removed its calls
            if events & selectors.EVENT_READ and watch.readable is not None:
                watch.readable()
            if events & selectors.EVENT_WRITE and watch.writable is not None:
                watch.writable()
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            timer = heapq.heappop(self._timers)[2]
            call, timer.call = timer.call, None
            if call is not None:
                call()

    def _watch(self, descriptor: int) -> _Watch:
        return self._watches.setdefault(descriptor, _Watch())

    def _update(self, descriptor: int) -> None:
        watch = self._watches[descriptor]
        events = selectors.EVENT_READ if watch.readable is not None else 0
        events |= selectors.EVENT_WRITE if watch.writable is not None else 0
        known = descriptor in self._selector.get_map()
        if events and known:
            self._selector.modify(descriptor, events, watch)
        elif events:
            self._selector.register(descriptor, events, watch)
        else:
            if known:
                self._selector.unregister(descriptor)
            del self._watches[descriptor]


class Signals:
    """Signals as callbacks of the loop, within a ``with`` block in the main thread. There they are not blocked, and
    neither are they in a child that is started: an actor of Ray blocks SIGINT, which workers need."""

    def __init__(self, loop: Loop, numbers: Iterable[int], call: Callable[[int], None]) -> None:
        """Call ``call(number)`` for each of ``numbers``, except those that are ignored already: a shell ignores SIGINT
        for background jobs."""
        self._loop = loop
        self._call = call
        self._numbers = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]

    def __enter__(self) -> Self:
        self._reader, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._previous_wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._previous = {number: signal.signal(number, lambda *_: None) for number in self._numbers}
        self._blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, self._numbers)
        self._loop.on_readable(self._reader, self._read)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._loop.forget(self._reader)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._blocked)
        for number, previous in self._previous.items():
            signal.signal(number, previous)
        signal.set_wakeup_fd(self._previous_wakeup)
        os.close(self._reader)
        os.close(self._writer)

    def _read(self) -> None:
        for number in os.read(self._reader, 512):
            self._call(number)
