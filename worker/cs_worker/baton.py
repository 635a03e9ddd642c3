"""Whose code runs now: turns of replicas that are threads of one script.

Python's and NumPy's generators belong to the process, and so do a terminal and whoever sits at it; so of all such
replicas one runs at a time, as in TensorFlow. It hands the baton on when it waits or returns, in replica order, and
its random state goes and comes with it. A worker that is a process needs none of this: its replica may always run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import inf
from typing import Protocol

from cs_proto.messages import RunId

from .randomness.seeds import kept_random_state

__all__ = ["Baton", "ProcessBaton", "ThreadBaton"]

# Who takes turns: the run directory of the service, and the replica.
_Key = tuple[str, int]
# How far a replica has got: the path of a run and a merge point in it; -1 is its beginning.
_Position = tuple[float, ...]

# Replicas go on after a merge point in replica order. One that does not come for its turn within this many seconds
# (its run was cancelled, say) holds up nobody: the order is for the eye, results do not depend on it.
_PATIENCE = 1.0

_NOTHING = nullcontext()


class Baton(Protocol):
    """What a worker asks before its replica's code goes on."""

    def taken(self, run: RunId) -> AbstractContextManager[None]:
        """A block in which the replica runs: a run of the controller."""

    def paused(self) -> AbstractContextManager[None]:
        """A block that only waits."""

    def pass_point(self, run: RunId, k: int) -> None:
        """The replica goes on after merge point ``k``, or begins a nested run (-1): after those before it."""


class ProcessBaton:
    """The replica is alone in its process."""

    def taken(self, run: RunId) -> AbstractContextManager[None]:
        """As :meth:`Baton.taken`."""
        return _NOTHING

    def paused(self) -> AbstractContextManager[None]:
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
        """Wait for the baton, at the beginning of ``position`` for the replicas before this one, too. False where
        ``has_ended``, after :meth:`wake`, says that there is no use any more."""
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
        """A replica that will take no turn any more."""
        with self._changed:
            self._reached.pop(key, None)
            self._changed.notify_all()

    def wake(self) -> None:
        """Have those who wait look whether they have ended."""
        with self._changed:
            self._changed.notify_all()

    def _may_pass(self, key: _Key, position: _Position) -> bool:
        service, replica = key
        return not replica or self._reached.get((service, replica - 1), ()) >= position

    def _note(self, key: _Key, position: _Position) -> None:
        self._reached[key] = max(self._reached.get(key, ()), position)

    def _next(self) -> _Key:
        return min(self._wanted, key=lambda key: (key <= self._last, key))


# One for the process, whatever services it runs: so are the generators.
_baton = _Baton()


class ThreadBaton:
    """The turns of one replica that is a thread. Used by that thread, but for what says otherwise."""

    def __init__(self, run_directory: str, replica: int) -> None:
        self._key = (run_directory, replica)
        self._ended = False
        #: Puts the random state of the replica's device aside, where it has one.
        self.keep_device: Callable[[], Callable[[], None]] | None = None
        # Puts back the random state of who ran before; None while this replica has no turn.
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
        """Take no more turns, and wait for none. May be called from any thread."""
        self._ended = True
        _baton.wake()

    def leave(self) -> None:
        """The turn that this replica has is over, too. May be called from any thread, of which the replica's may not
        answer any more."""
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
