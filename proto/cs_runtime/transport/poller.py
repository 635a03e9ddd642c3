"""One system call that waits for descriptors and ZeroMQ sockets together.

The descriptor of a ZeroMQ socket is edge-triggered: it does not report messages that arrived while the socket was in
use. So :class:`Poller` asks a socket for its events after each use, which the owner reports with :meth:`Poller.used`. A
socket that is not used costs nothing, for example while mailboxes carry all messages.
"""

from __future__ import annotations

import select
from typing import Generic, Protocol, TypeVar

import zmq

__all__ = ["Poller"]


class _Socket(Protocol):
    """The part of pyzmq's Socket that is used here."""

    def fileno(self) -> int: ...

    def getsockopt(self, option: int) -> int | bytes: ...


S = TypeVar("S", bound=_Socket)


class Poller(Generic[S]):
    """Descriptors and sockets that may have input. Used by one thread at a time."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._sockets: dict[int, S] = {}
        self._used: set[S] = set()

    def register(self, descriptor: int, flags: int = select.POLLIN) -> None:
        """Wait for ``descriptor``, too."""
        self._poll.register(descriptor, flags)

    def unregister(self, descriptor: int) -> None:
        """Stop waiting for ``descriptor``."""
        self._poll.unregister(descriptor)

    def register_socket(self, socket: S) -> None:
        """Wait for ``socket``, too."""
        descriptor = socket.fileno()
        self._poll.register(descriptor, select.POLLIN)
        self._sockets[descriptor] = socket
        self._used.add(socket)

    def unregister_socket(self, socket: S) -> None:
        """Stop waiting for ``socket``. Call this before the socket is closed."""
        descriptor = socket.fileno()
        self._poll.unregister(descriptor)
        del self._sockets[descriptor]
        self._used.discard(socket)

    def used(self, socket: S) -> None:
        """Report that ``socket`` has sent. Call this after every send; after :meth:`poll` returned the socket,
        receiving needs no report."""
        if socket in self._sockets.values():
            self._used.add(socket)

    def poll(self, timeout: float | None) -> set[int | S]:
        """The descriptors and sockets that have input within ``timeout`` seconds (None: no limit). It may return early,
        with an empty set."""
        ready: set[int | S] = set()
        if self._used:
            self._used = {socket for socket in self._used if _has_input(socket)}
            ready.update(self._used)
        for descriptor, _ in self._poll.poll(0 if ready else None if timeout is None else 1000 * timeout):
            if descriptor not in self._sockets:
                ready.add(descriptor)
            elif _has_input(socket := self._sockets[descriptor]):
                self._used.add(socket)
                ready.add(socket)
        return ready


def _has_input(socket: _Socket) -> bool:
    events = socket.getsockopt(zmq.EVENTS)
    assert isinstance(events, int)
    return bool(events & zmq.POLLIN)
