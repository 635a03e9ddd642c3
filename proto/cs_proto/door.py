"""Where peers connect to a ROUTER of ZeroMQ: a few at a time, and none for whom there would be no descriptor.

ZeroMQ accepts whoever connects, in a thread of its own, and ends the process when descriptors run out. So it never has
the socket at which peers arrive. When somebody has connected, another socket takes its place under its path, and only
then ZeroMQ is given the old one: on it wait as many peers as its backlog allows, and no more can come.
"""

from __future__ import annotations

import logging
import os
import select
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeVar

from . import open_files
from .polling import Poller, is_readable

__all__ = ["ASIDE_NBYTES", "Door"]

_log = logging.getLogger("central_storage.door")

#: A socket is made under a name that is this much longer than the one it gets.
ASIDE_NBYTES = 5

# ZMQ_USE_FD: the next endpoint to be bound is this listening socket. ZMQ_LAST_ENDPOINT: what it is called.
_USE_FD, _LAST_ENDPOINT = 89, 32
# How many peers may wait: this share of the descriptors that the process may open, but at most so many.
_WAITING_SHARE, _MOST_WAITING = 32, 64
# Beside what these peers take, this share of all descriptors stays free for everything else.
_FREE_SHARE = 8
_UNKNOWN = -1
# Four hexadecimal digits, of which most are free.
_NUMBERS, _MOST_BATCHES = 1 << 16, 1 << 15


class Listener(Protocol):
    """A stream socket of AF_UNIX."""

    def bind(self, address: str, /) -> None: ...

    def listen(self, backlog: int, /) -> None: ...

    def fileno(self) -> int: ...

    def close(self) -> None: ...


class _Router(Protocol):
    """As of pyzmq."""

    def fileno(self) -> int: ...

    def bind(self, addr: str) -> Any: ...

    def unbind(self, url: Any) -> None: ...

    def setsockopt(self, option: int, value: Any) -> None: ...

    def getsockopt(self, option: int) -> Any: ...


S = TypeVar("S", bound=_Router)


class _Batch:
    """Peers that were let in together. They share a name, that of the socket at which they arrived, and ZeroMQ ends
    their connections with that socket."""

    def __init__(self, name: str, endpoint: Any) -> None:
        self.name = name
        self.endpoint = endpoint


class Door(Generic[S]):
    """The way in to ``router``. Used by the thread that uses the ROUTER."""

    def __init__(self, poller: Poller[S], router: S, path: str, new_socket: Callable[[], Listener]) -> None:
        """Peers can connect from now on, and wait. ``path``, and what has up to ``ASIDE_NBYTES`` bytes more, must be
        names for sockets. Raises OSError where nothing can be made there."""
        #: Whether somebody waits for whom there is no descriptor.
        self.is_full = False
        self._poller = poller
        self._router = router
        self._path = path
        self._new_socket = new_socket
        self._batches: list[_Batch] = []
        #: How many descriptors were free at the last :meth:`open`. Where more are, peers may have gone.
        self._free = _UNKNOWN
        self._number = 0
        self._name, self._listener = self._listening()
        #: What ZeroMQ was given last, as long as it may not have accepted all who waited there.
        self._handed: int | None = None

    def open(self) -> None:
        """Let in who waits and who comes; after the door was full, look again whether there is room. Whoever polls
        passes what is readable to :meth:`look`. To be called every now and then: it also closes the sockets of batches
        that have gone."""
        if self._has_accepted():
            before, self._free = self._free, open_files.free()
            if self._free > before:
                self._sweep()
        self._poller.register(self._listener.fileno(), select.POLLIN)

    def look(self, ready: set[int | S]) -> None:
        """Let in who waits, if somebody does and there is room. Else nobody is let in before :meth:`open`."""
        if self._listener.fileno() not in ready or not self._has_accepted():
            return
        self._free = _UNKNOWN
        why = self._why_full()
        if not why:
            try:
                name, new = self._listening()
            except OSError as error:  # the volume is full
                why = str(error)
        if why:
            self._poller.unregister(self._listener.fileno())
            if not self.is_full:
                _log.warning("%s: nobody is let in: %s", self._path, why)
            self.is_full = True
            return
        self.is_full = False
        # Whoever has not connected by now connects to the new socket, which gets the descriptor that is polled.
        handed = os.dup(self._listener.fileno())
        self._handed = os.dup(handed)
        os.dup2(new.fileno(), self._listener.fileno(), inheritable=False)
        new.close()
        self._router.setsockopt(_USE_FD, handed)
        self._router.bind(f"ipc://{self._path}")
        self._batches.append(_Batch(self._name, self._router.getsockopt(_LAST_ENDPOINT)))
        self._name = name
        self._poller.used(self._router)

    def close(self) -> None:
        """Let nobody in any more."""
        self._listener.close()
        self._forget_handed()

    def _has_accepted(self) -> bool:
        """Whether ZeroMQ has accepted all that it was given."""
        if self._handed is not None and is_readable(self._handed, 0):
            return False
        self._forget_handed()
        return True

    def _forget_handed(self) -> None:
        if self._handed is not None:
            os.close(self._handed)
            self._handed = None

    def _why_full(self) -> str:
        """Why there is no room for those who wait; empty where there is."""
        # The kernel lets one more wait than the backlog. Two descriptors are those of the socket that is handed over.
        needed, free = _backlog() + 3 + open_files.limit() // _FREE_SHARE, open_files.free()
        if len(self._batches) >= _MOST_BATCHES:
            return f"{_MOST_BATCHES} times somebody has been let in who is still there"
        if free >= needed:
            return ""
        return f"{free} of {open_files.limit()} descriptors are free, and {needed} must be"

    def _sweep(self) -> None:
        """Close the sockets of batches all of whose peers have gone."""
        try:
            with open("/proc/net/unix", errors="surrogateescape") as file:
                named = Counter(line.rstrip("\n").split(maxsplit=7)[-1] for line in file)
        except OSError:  # they are kept, which costs a descriptor each
            return
        for batch in [batch for batch in self._batches if named[batch.name] == 1]:  # its socket alone
            self._router.unbind(batch.endpoint)
            self._batches.remove(batch)
        self._poller.used(self._router)

    def _listening(self) -> tuple[str, Listener]:
        """A socket that takes the place of what is at the path, and what it was called before."""
        taken = {batch.name for batch in self._batches}
        while True:
            self._number = (self._number + 1) % _NUMBERS
            if (name := f"{self._path}~{self._number:04x}") not in taken:
                break
        new = self._new_socket()
        try:
            with suppress(FileNotFoundError):  # left by a process that was killed here
                os.unlink(name)
            new.bind(name)
            new.listen(_backlog())
            os.rename(name, self._path)
        except OSError:
            new.close()
            raise
        return name, new


def _backlog() -> int:
    return min(max(1, open_files.limit() // _WAITING_SHARE), _MOST_WAITING)
