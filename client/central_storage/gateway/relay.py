"""The relay between observers on other machines and the server: it forwards what an observer may ask, and nothing else.

ZeroMQ admits only peers whose key is known. Each of them gets a connection to the server as an observer of this
machine. What a peer sends is decoded, and only questions that read are forwarded, so no peer can change anything. The
relay holds at most a few answers for each peer, and drops what a peer does not take: observers ask again. An answer
that was sent arrives, or its connection ends. So a Get that comes again over the same connection is not answered again:
the answer may take longer than the observer waits before it repeats the question.

What comes from a key of a worker is not forwarded, but handed to :attr:`Relay.links`. The key alone decides that, so an
observer cannot speak for a worker.
"""

from __future__ import annotations

import logging
import math
import socket
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import zmq

from central_storage.cluster.link import Links, Outcome
from central_storage.observer.blocking import Session
from cs_proto import messages
from cs_proto.codec import LIMITS, answered, decode, encode
from cs_proto.errors import CentralStorageError, PeerProtocolError
from cs_proto.failures import error_of
from cs_proto.records import Buffer, Record, replace
from cs_runtime.logs import Complaints
from cs_runtime.transport.curve import WORKER_ROLES, ServiceKeys, ZapHandler, protect_server
from cs_runtime.transport.multipart import receive

__all__ = ["Relay"]

_log = logging.getLogger("central_storage.gateway")
_complaints = Complaints(_log)

_QUESTIONS = (messages.Hello, messages.Get, messages.Statistics, messages.Goodbye)
# A peer that has made no handshake after this time, in milliseconds, is disconnected. It takes three round trips, of up
# to five seconds each.
_HANDSHAKE = 15000
# Milliseconds after which the kernel gives up a connection over which nothing of what was sent arrives, as at the other
# end: what is sent again over it after a cut of several seconds comes later than over a new connection.
_UNACKNOWLEDGED = 5000
# A peer is asked so often for a sign of life, and counts as gone after so long without one, in milliseconds.
_BEAT, _BEATS = 5000, 15000
# Messages that ZeroMQ keeps for a peer that does not read, and of one that writes faster than it is answered.
_UNREAD, _UNANSWERED = 2, 16
# Observers at a time. One that has asked nothing for so many seconds makes room for another.
_MOST, _IDLE = 64, 60.0
# The longest time, in seconds, in which the supervisor introduces a new peer to the server; the others wait meanwhile.
_TIMEOUT = 1.0


class _Peer:
    """An observer on another machine, and its connection to the server."""

    def __init__(self, identity: bytes, run_directory: str, context: zmq.Context[Any]) -> None:
        """Raises LaunchError if there is no service, and NoAnswerError if its supervisor does not answer."""
        self.identity = identity
        self.session = Session(run_directory, _TIMEOUT, maps=False)
        self.socket: zmq.Socket[bytes] = self.session.open(context, is_shared=True)
        self.used = time.monotonic()
        #: The number of the last Get whose answer was sent.
        self.answered: int | None = None


class Relay:
    """The relay of one service. Used by one thread. ::

    with Relay(run_directory, ServiceKeys.read("keys"), listener) as relay:
        while True:
            relay.turn()
    """

    def __init__(
        self, run_directory: str, keys: ServiceKeys, listener: socket.socket, return_timeout: float = 60.0
    ) -> None:
        """``listener`` listens at a TCP address; ZeroMQ takes its descriptor. A worker of which nothing is heard for
        ``return_timeout`` seconds is given up."""
        #: Of all sockets here.
        self.context: zmq.Context[Any] = zmq.Context()
        #: The links to workers on other machines.
        self.links = Links(self._deliver, return_timeout)
        self._run_directory = run_directory
        self._peers: dict[bytes, _Peer] = {}
        self._watched: dict[zmq.Socket[bytes] | int, Callable[[], object]] = {}
        self._poller = zmq.Poller()
        self._zap = ZapHandler(self.context, keys)
        self._front: zmq.Socket[bytes] = self.context.socket(zmq.ROUTER)
        self._open(keys, listener)

    def turn(self, timeout: float | None = None) -> None:
        """Send what the links have, and forward what has come, or wait for it for at most ``timeout`` seconds (None: no
        limit)."""
        now = time.monotonic()
        is_one_over = self.links.turn(now)  # whoever uses the links has to hear of that, so nothing is waited for
        due = 0.0 if is_one_over else self.links.timeout(now)
        limits = [each for each in (timeout, due) if each is not None]
        ready = dict(self._poller.poll(math.ceil(1000 * min(limits)) if limits else None))
        if self._zap.socket in ready:
            self._zap.answer()
        for watched, call in list(self._watched.items()):
            if watched in ready and watched in self._watched:
                call()
        for peer in [peer for peer in self._peers.values() if peer.socket in ready]:
            self._answer(peer)
        for peer in [peer for peer in self._peers.values() if peer.session.fileno() in ready]:
            if not peer.session.is_introduced:  # the next question of the peer introduces it to the next supervisor
                self._drop(peer)
        if self._front in ready:
            self._hear()

    def watch(self, what: zmq.Socket[bytes] | int, call: Callable[[], object]) -> None:
        """Call ``call`` in a turn in which this socket or descriptor has input."""
        self._poller.register(what, zmq.POLLIN)
        self._watched[what] = call

    def unwatch(self, what: zmq.Socket[bytes] | int) -> None:
        """Watch it no more. Call this before it is closed."""
        self._poller.unregister(what)
        del self._watched[what]

    def close(self) -> None:
        """Close all connections."""
        for peer in list(self._peers.values()):
            self._drop(peer)
        self.context.destroy(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _open(self, keys: ServiceKeys, listener: socket.socket) -> None:
        front = self._front
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.HANDSHAKE_IVL, _HANDSHAKE),
            (zmq.TCP_MAXRT, _UNACKNOWLEDGED),
            (zmq.HEARTBEAT_IVL, _BEAT),
            (zmq.HEARTBEAT_TIMEOUT, _BEATS),
            (zmq.MAXMSGSIZE, LIMITS.part_nbytes),
            (zmq.SNDHWM, _UNREAD),
            (zmq.RCVHWM, _UNANSWERED),
            (zmq.ROUTER_MANDATORY, 1),
        ):
            front.setsockopt(option, value)
        protect_server(front, keys)
        host, port = listener.getsockname()[:2]
        if listener.family == socket.AF_INET6:
            front.setsockopt(zmq.IPV6, 1)
            host = f"[{host}]"
        front.setsockopt(zmq.USE_FD, listener.detach())
        front.bind(f"tcp://{host}:{port}")
        self._poller.register(self._zap.socket, zmq.POLLIN)
        self._poller.register(front, zmq.POLLIN)

    def _hear(self) -> None:
        """Hand over one message of a worker; forward one question of another peer, or refuse it."""
        frames = receive(self._front, LIMITS, zmq.NOBLOCK, is_routed=True)
        identity, parts = frames[0].bytes, frames[1:]
        # The role of the key: ZeroMQ sets it, over whatever a peer says of itself.
        role = str(parts[0].get("User-Id"))
        if role.startswith(WORKER_ROLES):
            pieces: list[Buffer] = [parts[0].bytes, *(frame.buffer for frame in parts[1:])]
            self.links.hear(role, identity, pieces, time.monotonic(), str(parts[0].get("Peer-Address")))
            return
        try:
            record = decode([frame.bytes for frame in parts], LIMITS)
            if not isinstance(record, _QUESTIONS) or (isinstance(record, messages.Hello) and record.role != "observer"):
                raise PeerProtocolError(f"an observer may only ask, and {type(record).__name__} is no question")
            self._forward(identity, record)
        except CentralStorageError as error:
            _complaints.warn(identity, "refused a message of %s: %s", role, error)
            self._send(identity, encode(messages.Refused(0, error_of(error))))

    def _forward(self, identity: bytes, record: Record) -> None:
        peer = self._peers.get(identity)
        if isinstance(record, messages.Goodbye):
            if peer is not None:
                self._drop(peer)
            return
        if peer is None:
            peer = self._add(identity)
        peer.used = time.monotonic()
        if isinstance(record, messages.Get) and record.request == peer.answered:
            return
        hello = peer.session.hello().request
        assert isinstance(hello, messages.Hello)
        if isinstance(record, messages.Hello):
            # The protocol is the peer's: the server refuses another version, and names both.
            record = replace(hello, protocol=record.protocol)
        peer.socket.send_multipart(encode(record))

    def _add(self, identity: bytes) -> _Peer:
        """Connect a new peer to the server. It may have been here before, so the server hears a Hello first."""
        if len(self._peers) >= _MOST:
            oldest = min(self._peers.values(), key=lambda peer: peer.used)
            if time.monotonic() - oldest.used < _IDLE:
                raise PeerProtocolError(f"{_MOST} observers of other machines are connected; no more are admitted")
            self._drop(oldest)
        peer = self._peers[identity] = _Peer(identity, self._run_directory, self.context)
        peer.socket.setsockopt(zmq.RCVHWM, _UNREAD)
        self._poller.register(peer.socket, zmq.POLLIN)
        self._poller.register(peer.session.fileno(), zmq.POLLIN)
        peer.socket.send_multipart(encode(peer.session.hello().request))
        return peer

    def _answer(self, peer: _Peer) -> None:
        """Forward one answer of the server. A peer that has gone gets no more."""
        parts = peer.socket.recv_multipart(copy=False)
        number = answered(parts[0].buffer)
        outcome = self._send(peer.identity, parts)
        if outcome == "gone":
            self._drop(peer)
        elif outcome == "sent" and number is not None:
            peer.answered = number

    def _send(self, identity: bytes, parts: Sequence[Any]) -> Outcome:
        """Send a message, or drop it if the peer has not taken earlier ones."""
        outcome = self._deliver(identity, parts)
        if outcome == "full":
            _log.debug("%r has not taken earlier answers", identity)
        return outcome

    def _deliver(self, identity: bytes, parts: Sequence[Any]) -> Outcome:
        """Send a message unless its peer has gone, or has not taken earlier ones."""
        try:
            self._front.send_multipart([identity, *parts], zmq.NOBLOCK)
        except zmq.Again:
            return "full"
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return "gone"
        return "sent"

    def _drop(self, peer: _Peer) -> None:
        del self._peers[peer.identity]
        self._poller.unregister(peer.socket)
        self._poller.unregister(peer.session.fileno())
        peer.socket.send_multipart(peer.session.goodbye())
        peer.socket.close(linger=peer.session.linger())
        peer.session.close()
