"""Reads multipart messages from a ZeroMQ socket, and keeps no more of one than the receiver accepts."""

from __future__ import annotations

import zmq

from cs_proto.codec import Limits

__all__ = ["receive"]


def receive(socket: zmq.Socket[bytes], limits: Limits, flags: int = 0, *, is_routed: bool = False) -> list[zmq.Frame]:
    """The parts of the next message. With ``is_routed`` the first part is the identity of the sender.

    If a message exceeds ``limits``, only as many parts are kept as :func:`~cs_proto.codec.decode` needs to refuse it;
    the others are dropped one by one. Raises what ``recv`` raises, also between two parts: if a socket connects only
    once, ZeroMQ drops the rest of a message with the connection. The socket cannot be used any more then.
    """
    parts = [socket.recv(flags, copy=False)]
    room = limits.message_nbytes - (0 if is_routed else len(parts[0]))
    most = limits.frames + 2 + is_routed
    part = parts[0]
    while part.more:
        part = socket.recv(flags, copy=False)
        if room >= 0 and len(parts) < most:
            parts.append(part)
            room -= len(part)
    return parts
