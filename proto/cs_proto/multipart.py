"""Messages of several parts from a socket of ZeroMQ, of which no more is kept than a receiver accepts."""

from __future__ import annotations

from typing import Any, Protocol

from .codec import Limits

__all__ = ["receive"]

# ZMQ_RCVMORE: whether another part of the same message follows.
_MORE = 13


class _Socket(Protocol):
    """As of pyzmq."""

    def recv(self, flags: int = ..., copy: bool = ...) -> Any: ...

    def getsockopt(self, option: int) -> int | bytes: ...


def receive(
    socket: _Socket, limits: Limits, flags: int = 0, *, copy: bool = True, is_routed: bool = False
) -> list[Any]:
    """The parts of the next message, behind the identity of its sender where ``is_routed``; as bytes or, without
    ``copy``, as frames of pyzmq. Of a message that is beyond ``limits`` only so many parts as show it: the others are
    dropped one by one. Raises what ``recv`` raises."""
    parts = [socket.recv(flags, copy)]
    room = limits.message_nbytes - (0 if is_routed else len(parts[0]))
    most = limits.frames + 2 + is_routed
    while socket.getsockopt(_MORE):
        part = socket.recv(0, copy)
        if room >= 0 and len(parts) < most:
            parts.append(part)
            room -= len(part)
    return parts
