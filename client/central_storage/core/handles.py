"""Handles: objects that represent state in the server, and the table that keeps one object for each.

Variables, optimizers and strategies are handles. They own no bytes: between processes they travel as a kind and a
number. A :class:`HandleTable` of the receiver returns the one object for that number, so ``is`` holds. This module
does not know what a kind is. All modules that define, send or receive handles use it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, ParamSpec, TypeVar

from cs_proto.errors import PeerProtocolError, ShutdownError

from .public_objects import Closed

__all__ = ["Forget", "Handle", "HandleTable", "Hold", "handle_id", "weakly"]

#: Called with the kind and the number (for a function, the digest) of an object that is no longer needed. The kind
#: ``handle`` means that a handle is gone; its object in the server may no longer be needed either.
Forget = Callable[[str, Any], object]

P = ParamSpec("P")
T = TypeVar("T")


class Hold:
    """Keeps an object in the server: once this hold is no longer referenced, ``forget`` is called with the kind and the
    number. Every handle has one. Code that needs the object in the server without its handle refers to the hold."""

    def __init__(self, forget: Forget, kind: str, number: int | bytes) -> None:
        weakref.finalize(self, forget, kind, number).atexit = False


class Handle(Closed):
    """Base of every public object that owns state in the server.

    Two handles of one type with equal ids represent the same state, whichever process they come from. Only
    ``pickling.pickler`` and ``wire_values.value_codec`` send one to another process; any other pickler raises
    TypeError, and so does ``copy`` unless a class defines it.
    """

    #: Keeps the object in the server; None if other processes do.
    _cs_hold: Hold | None = None

    def _cs_keep(self, forget: Forget) -> None:
        """Call ``forget`` once the object is no longer needed, and with ``handle`` once this handle is gone."""
        self._cs_hold = Hold(forget, *self._cs_handle())
        weakref.finalize(self, forget, "handle", 0).atexit = False

    def _cs_handle(self) -> tuple[str, int]:
        """(kind, number), e.g. ``("variable", 7)``. Numbers in the server begin at 1; the strategy,
        of which a service has one, is 0."""
        raise NotImplementedError(f"{type(self).__name__} does not define its handle")

    def _cs_code(self) -> object:
        """A function of the user that belongs to the handle and that the client keeps, or None. It travels together
        with the number wherever code travels."""
        return None

    def _cs_parts(self) -> tuple[Any, ...]:
        """A reduce value that makes a readable object in its place, in a replica of another strategy."""
        raise NotImplementedError(f"{type(self).__name__} cannot be read in another strategy's replicas")

    def _cs_take_code(self, code: Any) -> None:
        """In a worker: take the function that came with the number."""

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        what = type(self).__name__
        raise TypeError(
            f"this {what} refers to state in its service and cannot be pickled or copied, except in the functions and "
            "arguments that strategy.run sends; pickle values instead, e.g. v.numpy()"
        )


def handle_id(handle: Handle) -> tuple[str, int]:
    """(kind, number) of ``handle``."""
    return handle._cs_handle()


def weakly(method: Callable[P, T], otherwise: Callable[[], T] | None = None) -> Callable[P, T]:
    """The bound ``method``, without a reference to its object. Once the object is gone, a call calls ``otherwise`` or
    raises ShutdownError.

    A strategy hands out its own methods in this way. Its service then ends as soon as the user drops the strategy,
    without waiting for the garbage collector.
    """
    found = weakref.WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        bound = found()
        if bound is not None:
            return bound(*args, **kwargs)
        if otherwise is not None:
            return otherwise()
        raise ShutdownError("this strategy has been deleted, because nothing referred to it; keep a reference to it")

    return call


class HandleTable:
    """The one object of this process for each (kind, number), for as long as the object is referenced.

    ``factories`` make the object for a new number, by kind. May be used from any thread. A factory runs while other
    threads wait for the table: it may use the table itself, but must not wait for another thread that uses it.
    """

    def __init__(self, factories: Mapping[str, Callable[[int], Handle]] | None = None) -> None:
        self._factories = dict(factories or {})
        self._objects: weakref.WeakValueDictionary[tuple[str, int], Handle] = weakref.WeakValueDictionary()
        self._lock = threading.RLock()

    def get(self, kind: str, number: int) -> Handle | None:
        """The object for (kind, number), if there is one."""
        return self._objects.get((kind, number))

    def add(self, handle: Handle) -> None:
        """Make ``handle`` the object for its id."""
        with self._lock:
            self._objects[handle_id(handle)] = handle

    def of_kind(self, kind: str) -> list[Handle]:
        """The objects of this kind, by number."""
        with self._lock:
            # The garbage collector may free any object meanwhile that is not held.
            found = {number: each for (of, number), each in self._objects.items() if of == kind}
        return [found[number] for number in sorted(found)]

    def resolve(self, kind: str, number: int) -> Handle:
        """The object for (kind, number), made if necessary. Raises PeerProtocolError for an unknown kind."""
        with self._lock:
            found = self._objects.get((kind, number))
            if found is None:
                try:
                    factory = self._factories[kind]
                except KeyError:
                    raise PeerProtocolError(f"a handle of kind {kind!r:.80} is not known to this version") from None
                made = factory(number)
                found = self._objects.setdefault(
                    (kind, number), made
                )  # the factory may have added this object or another one
            return found
