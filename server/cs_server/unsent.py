"""Messages that wait for peers that have not taken earlier ones, up to a limit for each peer.

A socket holds at most one message that its peer has not read, so a peer that never reads costs no more than the limit
here. This module owns the order of the messages and the times of the attempts; it knows no socket.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence

from cs_proto.records import Buffer

__all__ = ["Unsent"]

_log = logging.getLogger("cs_server.service")

# If this many messages or bytes wait for a peer, it has stopped reading, and further messages for it are dropped.
_MESSAGES = 10_000
_NBYTES = 64 << 20
# Seconds between two attempts: the first value is doubled each time, up to the second.
_PAUSE, _LONGEST_PAUSE = 0.001, 1.0


class Unsent:
    """The messages that wait, by peer. Used by one thread."""

    def __init__(self, send: Callable[[bytes, Sequence[Buffer]], bool | None]) -> None:
        """``send`` returns False if the peer has not taken earlier messages, and None if it is gone."""
        self._send = send
        self._waiting: dict[bytes, deque[list[bytes]]] = {}
        self._nbytes: dict[bytes, int] = {}
        self._dropping: set[bytes] = set()
        self._pause = _PAUSE

    def __contains__(self, peer: bytes) -> bool:
        return peer in self._waiting

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def pause(self) -> float:
        """Seconds to wait before :meth:`try_again`."""
        return self._pause

    def add(self, peer: bytes, parts: Sequence[Buffer]) -> bool:
        """Keep a copy of a message until ``peer`` takes it. Returns False if the limit is reached: it is dropped."""
        waiting = self._waiting.setdefault(peer, deque())
        if len(waiting) >= _MESSAGES or self._nbytes.get(peer, 0) >= _NBYTES:
            if peer not in self._dropping:
                self._dropping.add(peer)
                _log.warning(
                    "%r does not read its messages: %d messages of %d bytes wait, and further ones are dropped",
                    *(peer, len(waiting), self._nbytes[peer]),
                )
            return False
        kept = [bytes(part) for part in parts]
        waiting.append(kept)
        self._nbytes[peer] = self._nbytes.get(peer, 0) + sum(map(len, kept))
        self._pause = _PAUSE
        return True

    def try_again(self) -> None:
        """Send as many messages as the peers take now."""
        has_sent = False
        for peer, waiting in list(self._waiting.items()):
            while waiting and self._send(peer, waiting[0]) is not False:
                self._nbytes[peer] -= sum(map(len, waiting.popleft()))
                has_sent = True
            if not waiting:
                del self._waiting[peer], self._nbytes[peer]
                self._dropping.discard(peer)
        self._pause = _PAUSE if has_sent else min(2 * self._pause, _LONGEST_PAUSE)
