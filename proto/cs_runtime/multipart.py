"""Multipart messages from a socket of ZeroMQ, of which no more is kept than the receiver accepts."""

from __future__ import annotations

from typing import Any

import zmq

from cs_proto.codec import Limits

__all__ = ["receive"]


def receive(
    socket: zmq.Socket[bytes], limits: Limits, flags: int = 0, *, copy: bool = True, is_routed: bool = False
) -> list[Any]:
    """The parts of the next message, as bytes or, without ``copy``, as frames of pyzmq. With ``is_routed`` the first
    part is the identity of the sender.

    Of a message beyond ``limits`` only enough parts are kept to show that; the others are dropped one by one, so that
    :func:`~cs_proto.codec.decode` refuses it. Raises what ``recv`` raises.
    """
    parts = [socket.recv(flags, copy)]
    room = limits.message_nbytes - (0 if is_routed else len(parts[0]))
    most = limits.frames + 2 + is_routed
    while socket.getsockopt(zmq.RCVMORE):
        part = socket.recv(0, copy)
        if room >= 0 and len(parts) < most:
            parts.append(part)
            room -= len(part)
    return parts
