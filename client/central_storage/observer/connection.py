"""An observer's connection to another machine, over a network that may lose packets or be down."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

__all__ = ["Connection"]

# Seconds that an attempt to connect has, at least. The kernel repeats a lost packet of an attempt after a second, and
# then waits three seconds for whatever is lost next; a new attempt is quicker.
_ATTEMPT = 0.7
# After a connection was lost, an attempt has at least this share of the time since then: the network may be slower now.
_SHARE = 1 / 8


class Connection:
    """A socket's connection over TCP, which is made again as long as it takes."""

    def __init__(self, socket: zmq.Socket[Any], endpoint: str) -> None:
        """Begin to connect."""
        self._socket, self._endpoint = socket, endpoint
        #: Where ZeroMQ says how the connection fares.
        self.events = socket.get_monitor_socket(zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED)
        # Nobody reads them while no question waits. At a limit, ZeroMQ would wait for a reader, and send nothing.
        self.events.setsockopt(zmq.RCVHWM, 0)
        #: Seconds that an attempt took that reached the service, the last one that is known; 0 before.
        self._took = 0.0
        self._is_connected = self._has_connected = False
        self._lost = self._heard = time.monotonic()
        self._begin(self._lost)
        socket.connect(endpoint)

    def connects_again(self) -> bool:
        """Give up an attempt that takes too long, and begin another one. Whether what was sent may be lost, because
        there is another connection since the last call, or another attempt."""
        now, is_another = time.monotonic(), False
        before, self._heard = self._heard, now
        for event in self._news():
            if event == zmq.EVENT_DISCONNECTED:  # ZeroMQ has begun another attempt
                self._is_connected, self._lost = False, now
                self._begin(now)
            elif not self._is_connected:
                is_another = self._has_connected
                self._is_connected = self._has_connected = True
                if now - before < _ATTEMPT:  # otherwise it may have connected long ago
                    self._took = now - self._begun
        if not self._is_connected and now >= self._deadline:
            self._socket.disconnect(self._endpoint)
            self._socket.connect(self._endpoint)
            self._begin(now)
            is_another = True
        return is_another

    def _begin(self, now: float) -> None:
        """An attempt begins. It has as long as all before it, until one has reached the service."""
        missing = now - self._lost
        self._begun = now
        self._deadline = now + max(_ATTEMPT, 2 * self._took, missing * _SHARE if self._has_connected else missing)

    def _news(self) -> Iterator[int]:
        events: zmq.Socket[bytes] = zmq.Socket.shadow(self.events)  # which waits for no event loop
        while events.poll(0):
            yield recv_monitor_message(events)["event"]

    def close(self) -> None:
        """Watch the connection no more; for the socket to be closed. Idempotent."""
        if not self.events.closed:
            self._socket.disable_monitor()  # a socket that nobody watches would wait until its events are read
            self.events.close(linger=0)
