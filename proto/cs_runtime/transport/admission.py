"""Admission of peers to a ROUTER of ZeroMQ: a few at a time, and only while there are descriptors for them.

ZeroMQ accepts every connection, in a thread of its own, and ends the process when descriptors run out. So ZeroMQ never
has the socket at which peers arrive. When a peer has connected, a new socket takes over the path, and ZeroMQ gets the
old one. The peers in its backlog are the only ones that ZeroMQ can accept from it.
"""

from __future__ import annotations

import logging
import os
import select
import socket
from contextlib import suppress
from typing import Any

import zmq

from cs_runtime import open_files

from .poller import Poller
from .readiness import is_readable

__all__ = ["SUFFIX_NBYTES", "Admission"]

_log = logging.getLogger("central_storage.admission")

#: A socket is bound under a name that is this many bytes longer than its path, and is then renamed.
SUFFIX_NBYTES = 5

# The backlog is the limit of descriptors divided by the first number, but at most the second.
_WAITING_SHARE, _MOST_WAITING = 32, 64
# The limit of descriptors divided by this stays free for everything else.
_FREE_SHARE = 8
_UNKNOWN = -1
# Four hexadecimal digits, of which most are free.
_NUMBERS, _MOST_BATCHES = 1 << 16, 1 << 15


class _Batch:
    """Peers that were admitted together. They share the name of the socket at which they arrived. ZeroMQ ends their
    connections when it closes that socket."""

    def __init__(self, name: str, endpoint: Any) -> None:
        self.name = name
        self.endpoint = endpoint


class Admission:
    """Accepts connections to ``router``. Used by the thread that uses the ROUTER."""

    def __init__(self, poller: Poller[zmq.Socket[bytes]], router: zmq.Socket[bytes], path: str) -> None:
        """Listen at ``path``. Peers can connect from now on, and wait for :meth:`resume`. A path that is
        ``SUFFIX_NBYTES`` longer must still be valid for a socket. Raises OSError where no socket can be bound."""
        #: Whether peers wait because there are too few descriptors.
        self.is_full = False
        self._poller = poller
        self._router = router
        self._path = path
        self._batches: list[_Batch] = []
        #: How many descriptors were free at the last :meth:`sweep`. If more are free now, peers may have gone.
        self._free = _UNKNOWN
        self._number = 0
        self._name, self._listener = self._listening()
        #: The descriptor of the listening socket at the path, also of those that replace it.
        self.descriptor = self._listener.fileno()
        #: The socket that ZeroMQ was given last, until ZeroMQ has accepted all peers in its backlog.
        self._handed: int | None = None

    def resume(self) -> None:
        """Wait for connections. The caller polls, and calls :meth:`admit` when :attr:`descriptor` is readable."""
        self._poller.register(self._listener.fileno(), select.POLLIN)

    def admit(self) -> None:
        """Admit the waiting peers, if there is room. No other peer is admitted before the next :meth:`resume`."""
        self._poller.unregister(self._listener.fileno())
        if not self._has_accepted():
            return
        self._free = _UNKNOWN
        why = self._why_full()
        if not why:
            try:
                name, new = self._listening()
            except OSError as error:  # the volume is full
                why = str(error)
        if why:
            if not self.is_full:
                _log.warning("%s: no connection is accepted: %s", self._path, why)
            self.is_full = True
            return
        self.is_full = False
        # Later peers connect to the new socket, which gets the descriptor that is polled.
        handed = os.dup(self._listener.fileno())
        self._handed = os.dup(handed)
        os.dup2(new.fileno(), self._listener.fileno(), inheritable=False)
        new.close()
        self._router.setsockopt(zmq.USE_FD, handed)
        self._router.bind(f"ipc://{self._path}")
        self._batches.append(_Batch(self._name, self._router.getsockopt(zmq.LAST_ENDPOINT)))
        self._name = name
        self._poller.used(self._router)

    def sweep(self) -> None:
        """Close the listening sockets whose peers have all gone. Call this regularly."""
        if not self._has_accepted():
            return
        before, self._free = self._free, open_files.free()
        if self._free <= before:
            return
        named = self._connected()
        for batch in [batch for batch in self._batches if batch.name not in named]:
            self._router.unbind(batch.endpoint)
            self._batches.remove(batch)
        self._poller.used(self._router)

    def close(self) -> None:
        """Accept no more connections."""
        self._listener.close()
        self._forget_handed()

    def _has_accepted(self) -> bool:
        """Whether ZeroMQ has accepted all peers of the last socket that it was given."""
        if self._handed is not None and is_readable(self._handed, 0):
            return False
        self._forget_handed()
        return True

    def _forget_handed(self) -> None:
        if self._handed is not None:
            os.close(self._handed)
            self._handed = None

    def _why_full(self) -> str:
        """Why there is no room for the peers that wait; empty if there is room."""
        # The kernel queues one peer more than the backlog. The socket that is handed over takes two descriptors.
        needed, free = _backlog() + 3 + open_files.limit() // _FREE_SHARE, open_files.free()
        if len(self._batches) >= _MOST_BATCHES:
            return f"{_MOST_BATCHES} listening sockets still have peers"
        if free >= needed:
            return ""
        return f"only {free} of {open_files.limit()} descriptors are free, and {needed} are needed"

    def _connected(self) -> set[object]:
        """The names of the listening sockets at which this process's connections arrived; a connection keeps that name.
        They are not read from /proc/net/unix, which lists a connection in the network namespace of its peer: that may
        be another container's."""
        names: set[object] = set()
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            with suppress(OSError):  # it is not a socket, or is closed by now
                found = socket.socket(fileno=descriptor)
                try:
                    if not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        names.add(found.getsockname())
                finally:
                    found.detach()
        return names

    def _listening(self) -> tuple[str, socket.socket]:
        """A listening socket that replaces the one at the path, and the name that it was bound to."""
        taken = {batch.name for batch in self._batches}
        while True:
            self._number = (self._number + 1) % _NUMBERS
            if (name := f"{self._path}~{self._number:04x}") not in taken:
                break
        new = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
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
