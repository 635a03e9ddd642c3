"""ZeroMQ sockets between the processes of one machine, as the gateway and an outpost use them for other processes.

They are those of :mod:`cs_runtime.transport.channel` without its wait: the gateway and an outpost wait for many things
of several services or processes at once, each with a loop of its own.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import zmq

from cs_proto.codec import BULK_LIMITS, Limits
from cs_proto.records import Buffer
from cs_runtime.transport.multipart import receive

__all__ = ["Sockets", "Wire", "has_input"]

# The pause before a DEALER connects again, in milliseconds: its peer may be starting.
_RECONNECT = 10
# A connection that has made no ZeroMQ handshake after this time, in milliseconds, is closed.
_HANDSHAKE = 5000
# What is being sent gets this long to leave when a socket is closed, in milliseconds.
_LINGER = 100
_POLLIN = int(zmq.POLLIN)  # arithmetic of ZeroMQ's flags takes longer


def has_input(socket: zmq.Socket[Any]) -> bool:
    """Whether a message has come. This takes a fifth of the time in which ``recv`` raises that there is none."""
    return bool(zmq.zmq_poll([(socket, _POLLIN)], 0))


class Wire:
    """One socket, whose messages are taken without waiting."""

    def __init__(self, socket: zmq.Socket[bytes], inputs: zmq.Poller, limits: Limits, *, is_routed: bool) -> None:
        """Take over ``socket``, which ``inputs`` polls until it is closed. Its messages must keep to ``limits``."""
        self.socket = socket
        self._inputs = inputs
        inputs.register(socket, zmq.POLLIN)
        self._limits = limits
        self._is_routed = is_routed

    def fileno(self) -> int:
        """A descriptor that becomes readable when something has happened: then, and after each :meth:`send`, take what
        there is."""
        return int(self.socket.getsockopt(zmq.FD))

    def take(self) -> list[Buffer] | None:
        """The parts of the next message; of a ROUTER behind the name of the sender. None if there is none."""
        if not has_input(self.socket):
            return None
        frames = receive(self.socket, self._limits, zmq.NOBLOCK, is_routed=self._is_routed)
        headers = 1 + self._is_routed
        return [*(frame.bytes for frame in frames[:headers]), *(frame.buffer for frame in frames[headers:])]

    def send(self, parts: Sequence[Buffer]) -> None:
        """Send a message; of a ROUTER the first part names the receiver, and a message to one that is gone is
        dropped."""
        self.socket.send_multipart(parts)

    def close(self) -> None:
        """Close the socket, and give what is unsent a moment. Idempotent."""
        if self.socket in self._inputs:
            self._inputs.unregister(self.socket)
        self.socket.close(linger=_LINGER)


class Sockets:
    """Makes the sockets of one process. ::

    sockets = Sockets()
    server = sockets.dealer("ipc:///run/cs/server", name)
    """

    def __init__(self, context: zmq.Context[Any] | None = None) -> None:
        """With ``context``, its owner closes the sockets and it."""
        self._context: zmq.Context[Any] = context or zmq.Context()
        self._inputs = zmq.Poller()
        self._number = 0

    def have_input(self) -> bool:
        """Whether a message has come for any of them. This takes hardly longer than to ask one."""
        return bool(self._inputs.poll(0))

    def router(self, endpoint: str, limits: Limits = BULK_LIMITS) -> Wire:
        """A ROUTER that listens at ``endpoint``. Raises OSError where nobody can listen there."""
        made = Wire(self._made(zmq.ROUTER, limits), self._inputs, limits, is_routed=True)
        made.socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE)
        path = endpoint.removeprefix("ipc://")
        self._number += 1
        # ZeroMQ removes the name that it was given, at some time after the end of the socket: another socket may listen
        # at this path by then.
        bound = f"{path}~{self._number:x}"
        try:
            made.socket.bind(f"ipc://{bound}")
            os.rename(bound, path)
        except zmq.ZMQError as error:
            made.close()
            raise OSError(error.errno, f"nobody can listen at {endpoint}: {error}") from error
        except OSError:
            made.close()
            raise
        return made

    def dealer(self, endpoint: str, name: bytes, limits: Limits = BULK_LIMITS, unread: int = 0) -> Wire:
        """A DEALER that connects to ``endpoint`` by ``name``. At most ``unread`` messages that have come are kept for
        :meth:`Wire.take` (0: no limit). Raises OSError where there can be no more sockets."""
        made = Wire(self._made(zmq.DEALER, limits), self._inputs, limits, is_routed=False)
        made.socket.setsockopt(zmq.RCVHWM, unread)
        made.socket.setsockopt(zmq.IDENTITY, name)
        made.socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT)
        made.socket.connect(endpoint)
        return made

    def close(self) -> None:
        """Close all sockets."""
        self._context.destroy(linger=_LINGER)

    def _made(self, kind: int, limits: Limits) -> zmq.Socket[bytes]:
        try:
            made: zmq.Socket[bytes] = self._context.socket(kind)
        except zmq.ZMQError as error:  # such as that this process has no descriptors left
            raise OSError(error.errno, f"no socket can be made: {error}") from error
        made.setsockopt(zmq.LINGER, _LINGER)
        made.setsockopt(zmq.MAXMSGSIZE, limits.part_nbytes)
        made.setsockopt(zmq.SNDHWM, 0)
        made.setsockopt(zmq.RCVHWM, 0)
        return made
