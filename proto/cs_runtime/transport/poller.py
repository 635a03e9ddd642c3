"""What a process waits with at its receive seam: descriptors, and sockets of ZeroMQ, by one call of the kernel.

A socket of ZeroMQ has a descriptor, too, but one that tells of news only: what came while the socket was used is not
told again. So a socket is looked at after it was used, which its owner says, and else left alone: where mailboxes carry
the messages, waiting costs as much as without any socket.
"""

from __future__ import annotations

import select
from typing import Generic, Protocol, TypeVar

import zmq

__all__ = ["Poller"]


class _Socket(Protocol):
    """As of pyzmq."""

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
        """Not any more."""
        self._poll.unregister(descriptor)

    def register_socket(self, socket: S) -> None:
        """Wait for ``socket``, too."""
        descriptor = socket.fileno()
        self._poll.register(descriptor, select.POLLIN)
        self._sockets[descriptor] = socket
        self._used.add(socket)

    def unregister_socket(self, socket: S) -> None:
        """Not any more. To be called before it is closed."""
        descriptor = socket.fileno()
        self._poll.unregister(descriptor)
        del self._sockets[descriptor]
        self._used.discard(socket)

    def used(self, socket: S) -> None:
        """Something is sent by ``socket``: to be called each time. What :meth:`poll` names may be received from."""
        if socket in self._sockets.values():
            self._used.add(socket)

    def poll(self, timeout: float | None) -> set[int | S]:
        """What has input within ``timeout`` seconds (None: no limit). It may come back earlier, with nothing."""
        ready: set[int | S] = set()
        if self._used:
            self._used = {socket for socket in self._used if _has_input(socket)}
            ready.update(self._used)
        for descriptor, _ in self._poll.poll(0 if ready else None if timeout is None else 1000 * timeout):
            socket = self._sockets.get(descriptor)
            if socket is None:
                ready.add(descriptor)
            elif _has_input(socket):
                self._used.add(socket)
                ready.add(socket)
        return ready


def _has_input(socket: _Socket) -> bool:
    events = socket.getsockopt(zmq.EVENTS)
    assert isinstance(events, int)
    return bool(events & zmq.POLLIN)
