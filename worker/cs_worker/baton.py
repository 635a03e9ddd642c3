"""A baton: replicas that are threads of one script take turns.

Python's and NumPy's random generators belong to the process, and so does the terminal. So one of these replicas runs
at a time, as in TensorFlow. It hands the baton on when it waits or returns, in replica order, and its random state goes
and comes with it. A worker that is a process needs none of this: its replica may always run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from math import inf
from typing import Protocol

from cs_proto.messages import RunId

from .randomness.seeds import kept_random_state

__all__ = ["Baton", "ProcessBaton", "ThreadBaton"]

# A replica that takes turns: the run directory of its service, and its number.
_Key = tuple[str, int]
# How far a replica has got: the path of a run and a merge point in it; -1 is its beginning.
_Position = tuple[float, ...]

# Replicas go on after a merge point in replica order. A replica that does not come for its turn within so many seconds
# (for example, because its run was cancelled) delays nobody: results do not depend on the order.
_PATIENCE = 1.0

# Unlike a nullcontext, it is entered and left without Python code. No other thread takes it.
_NOTHING = threading.RLock()


class Baton(Protocol):
    """A worker's permission to run its replica's code."""

    #: Whether other code of this process has random states of its own between two turns.
    is_shared: bool

    def taken(self, run: RunId) -> AbstractContextManager[object]:
        """A block in which the replica runs: a run of the controller."""

    def paused(self) -> AbstractContextManager[object]:
        """A block that only waits; other replicas run meanwhile."""

    def pass_point(self, run: RunId, k: int) -> None:
        """The replica goes on after merge point ``k``, or begins a nested run (-1), once those before it have."""


class ProcessBaton:
    """The replica is alone in its process."""

    is_shared = False

    def taken(self, run: RunId) -> AbstractContextManager[object]:
        """As :meth:`Baton.taken`."""
        return _NOTHING

    def paused(self) -> AbstractContextManager[object]:
        """As :meth:`Baton.paused`."""
        return _NOTHING

    def pass_point(self, run: RunId, k: int) -> None:
        """As :meth:`Baton.pass_point`."""


class _Baton:
    """Held by at most one replica."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._holder: _Key | None = None
        self._last: _Key = ("", 0)
        self._wanted: set[_Key] = set()
        self._reached: dict[_Key, _Position] = {}

    def take(self, key: _Key, has_ended: Callable[[], bool], position: _Position = ()) -> bool:
        """Wait for the baton and, at ``position``, for the replicas before this one. False if ``has_ended`` says so,
        which is looked at after :meth:`wake`."""
        with self._changed:
            self._changed.wait_for(lambda: has_ended() or self._may_pass(key, position), _PATIENCE)
            self._wanted.add(key)
            self._changed.wait_for(lambda: has_ended() or (self._holder is None and self._next() == key))
            self._wanted.remove(key)
            self._changed.notify_all()
            if has_ended():
                return False
            self._holder = self._last = key
            self._note(key, position)
            return True

    def give(self, key: _Key, position: _Position = ()) -> None:
        """Hand the baton on. ``position`` is how far this replica has got, for those who wait for it."""
        with self._changed:
            if self._holder == key:
                self._holder = None
            self._note(key, position)
            self._changed.notify_all()

    def pass_point(self, key: _Key, position: _Position) -> bool:
        """Note that the holder goes on, unless a replica before it has to go first."""
        with self._changed:
            if not self._may_pass(key, position):
                return False
            self._note(key, position)
            self._changed.notify_all()
            return True

    def forget(self, key: _Key) -> None:
        """Forget a replica that will take no more turns."""
        with self._changed:
            self._reached.pop(key, None)
            self._changed.notify_all()

    def wake(self) -> None:
        """Have every waiting replica look whether it has ended."""
        with self._changed:
            self._changed.notify_all()

    def _may_pass(self, key: _Key, position: _Position) -> bool:
        service, replica = key
        return not replica or self._reached.get((service, replica - 1), ()) >= position

    def _note(self, key: _Key, position: _Position) -> None:
        self._reached[key] = max(self._reached.get(key, ()), position)

    def _next(self) -> _Key:
        return min(self._wanted, key=lambda key: (key <= self._last, key))


# There is one for the process, whatever services it runs, as there is one set of generators.
_baton = _Baton()


class ThreadBaton:
    """The turns of one replica that is a thread. Only that thread calls a method, unless the method says otherwise."""

    is_shared = True

    def __init__(self, run_directory: str, replica: int) -> None:
        self._key = (run_directory, replica)
        self._ended = False
        #: Keeps the random state of the replica's device, if it has one; the result restores it.
        self.keep_device: Callable[[], Callable[[], None]] | None = None
        # Restores the random state of the code that ran before; None while this replica has no turn.
        self._restore: Callable[[], None] | None = None

    @contextmanager
    def taken(self, run: RunId) -> Iterator[None]:
        """As :meth:`Baton.taken`. Raises SystemExit where the worker is to end."""
        self._take((*run, -1))
        try:
            yield
        finally:
            self._give((*run, inf))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """As :meth:`Baton.paused`. Raises SystemExit where the worker is to end."""
        if self._restore is None:
            yield
            self._check()
            return
        own = kept_random_state(self.keep_device)
        self._give()
        try:
            yield
        finally:
            self._take()
            own()

    def pass_point(self, run: RunId, k: int) -> None:
        """As :meth:`Baton.pass_point`. Raises SystemExit where the worker is to end."""
        position = (*run, k)
        if not _baton.pass_point(self._key, position):
            own = kept_random_state(self.keep_device)
            self._give()
            self._take(position)
            own()

    def end(self) -> None:
        """Take no more turns and wait for none. Any thread may call this."""
        self._ended = True
        _baton.wake()

    def leave(self) -> None:
        """As :meth:`end`, and the replica's present turn is over. Any thread may call this; the replica's own thread
        may hang."""
        self.end()
        self._give()
        _baton.forget(self._key)

    def _take(self, position: _Position = ()) -> None:
        if not _baton.take(self._key, lambda: self._ended, position):
            raise SystemExit(0)
        self._restore = kept_random_state(self.keep_device)

    def _give(self, position: _Position = ()) -> None:
        restore, self._restore = self._restore, None
        if restore is not None:
            restore()
            _baton.give(self._key, position)

    def _check(self) -> None:
        if self._ended:
            raise SystemExit(0)
