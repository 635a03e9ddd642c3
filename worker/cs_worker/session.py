"""The worker's sockets: the only module of the worker that imports zmq and, in :meth:`Link.receive`, the only place
where a worker waits.

A ROUTER takes runs from the controller and from the holder of a merge_call token, a DEALER talks to the server,
further DEALERs to other workers while this one holds the token, and the life-line to the supervisor. With server and
controller there are mailboxes, too, which carry what they have room for. What a record
means and who may send it is :mod:`cs_worker.session_core`'s business.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

import zmq

from cs_proto import messages
from cs_proto.codec import BULK_LIMITS, WORK_LIMITS, Decoder, Limits, encode
from cs_proto.errors import ConfigurationError, ContextError, PeerProtocolError, ShutdownError
from cs_proto.failures import error_of
from cs_proto.records import Buffer, Record
from cs_runtime.admission import Admission
from cs_runtime.mailboxes import Mailboxes
from cs_runtime.multipart import receive
from cs_runtime.poller import Poller
from cs_runtime.supervisor_link import SupervisorLink
from cs_runtime.trace import moments

from .baton import Baton
from .config import Config

__all__ = ["COLLEAGUE", "SERVER", "SUPERVISOR", "Link", "moment"]

_log = logging.getLogger("central_storage.worker")

#: Notes where in a step this process is.
moment = moments("worker", time.perf_counter_ns)

# Who sent a record: one of these, or the identity of a peer at the ROUTER. An identity that a peer chose is neither
# empty nor begins with a zero, and one that libzmq made has five bytes.
SERVER = b""
SUPERVISOR = b"\0s"
COLLEAGUE = b"\0w"

_OF_MAILBOXES = frozenset({messages.Offer, messages.MailboxAccepted})

# The most answers that wait for a peer of the ROUTER that does not read; it can do without the others.
_UNREAD = 1000
# What is being sent when the process ends gets this long to leave, in milliseconds.
_LINGER = 100
# A connection without a ZeroMQ handshake within so many milliseconds is closed.
_HANDSHAKE = 5000
# So long it looks for mail before it sleeps, seconds: longer than a client or server takes to answer.
_PATIENCE = 300e-6
# While mail comes without a pause, what else there may be is looked at so often; and in the longest sleep, seconds.
_LOOK_EVERY = 10e-3
_LONGEST_SLEEP = 1.0


class Link:
    """The sockets of one worker. Used by the thread that is the worker only."""

    def __init__(
        self, config: Config, lifeline: SupervisorLink, gone: Callable[[], NoReturn], doorbell: int, turns: Baton
    ) -> None:
        """Listen and connect. ``gone`` is called where the supervisor is gone, and must not return; the descriptor
        ``doorbell`` is readable after a signal, whose handler then runs here; ``turns`` hears of every wait."""
        self._config = config
        self._lifeline = lifeline
        self._gone = gone
        self._turns = turns
        self._process = os.getpid()
        self._context = zmq.Context()
        self._poller: Poller[zmq.Socket[bytes]] = Poller()
        self._doorbell = doorbell
        self._mail: Mailboxes[bytes] = Mailboxes(self._poller, _PATIENCE)
        self._server_decoder, self._decoder = Decoder(BULK_LIMITS), Decoder(WORK_LIMITS)
        self._next_look = 0.0
        self._early: deque[tuple[bytes, Record]] = deque()
        self._poller.register(lifeline.fileno())
        self._poller.register(doorbell)
        self._router = self._socket(zmq.ROUTER, WORK_LIMITS, _UNREAD)
        self._router.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE)
        self._colleagues: dict[str, zmq.Socket[bytes]] = {}
        path = config.endpoint.removeprefix("ipc://")
        try:
            self._admission = Admission(self._poller, self._router, path)
        except OSError as error:
            self._context.destroy(linger=0)
            raise ConfigurationError(f"cannot listen at {config.endpoint}: {error.strerror}") from error
        self._next_open = 0.0
        self._server = self._connect(config.name.encode(), config.server_endpoint)

    @property
    def is_inherited(self) -> bool:
        """Whether the user's code forked this process from the worker: nothing that is sent here would ever leave."""
        return os.getpid() != self._process

    def receive(self, timeout: float | None, quiet: bytes | None = None) -> tuple[bytes, Record] | None:
        """The next record and who sent it, whatever carried it; None after ``timeout`` seconds (None: no limit). What
        ``quiet`` posts wakes nobody: nothing can be done with it before others have spoken.

        Bytes that are no record are dropped with a logged line. Does not return where the supervisor is gone.
        """
        if self._early:
            return self._early.popleft()
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            has_waiting = self._lifeline.has_waiting
            found = None if has_waiting or time.monotonic() >= self._next_look else self._mail.take()
            if found is not None:
                moment("found")
            else:
                is_there = has_waiting or self._mail.is_there(quiet)
                now = time.monotonic()
                ready: set[int | zmq.Socket[bytes]] = set()
                if not is_there or now >= self._next_look:
                    ready = self._poll(0.0 if is_there else deadline - now)
                    if not ready and not is_there and time.monotonic() >= deadline:
                        return None
                moment("woken" if ready and not is_there else "found")
                if self._doorbell in ready:
                    os.read(self._doorbell, 64)
                if has_waiting or self._lifeline.fileno() in ready:
                    try:
                        notice = self._lifeline.receive_nowait()
                    except ShutdownError:
                        self._gone()
                    if isinstance(notice, messages.Serving):  # another server, which has another mailbox
                        self.offer_mailbox()
                    if notice is not None:
                        return SUPERVISOR, notice
                for socket in ready:
                    if not isinstance(socket, int):
                        self._fetch(socket)
                found = self._mail.take()
            while found is not None:
                received = self._read(*found)
                if received is not None and not (type(received[1]) in _OF_MAILBOXES and self._is_of_mailbox(*received)):
                    return received
                found = self._mail.take()

    def _poll(self, timeout: float) -> set[int | zmq.Socket[bytes]]:
        """What is readable within ``timeout`` seconds; nobody sleeps long who could miss a doorbell."""
        if time.monotonic() >= self._next_open:
            self._next_open = time.monotonic() + _LONGEST_SLEEP
            self._admission.resume()
        pause = min(timeout, _LONGEST_SLEEP) if self._mail or self._admission.is_full else timeout
        with self._turns.paused():
            ready = self._poller.poll(None if pause == math.inf else max(0.0, pause))
        self._mail.awake(ready)
        self._admission.admit(ready)
        self._next_look = time.monotonic() + _LOOK_EVERY
        return ready

    def offer_mailbox(self) -> None:
        """Have what fits there go to the server by mailbox, where the supervisor makes one."""
        offer = self._mail.offer(SERVER, *self._ask_mailbox(messages.MakeMailbox("server")))
        if offer is not None:
            self.send_server(offer)

    def _ask_mailbox(self, request: messages.MakeMailbox | messages.OpenMailbox) -> tuple[messages.Mailbox, list[int]]:
        try:
            return self._lifeline.mailbox(request)
        except ShutdownError:
            self._gone()

    def _is_of_mailbox(self, sender: bytes, record: Record) -> bool:
        """Whether it is about a mailbox of somebody who has one here, and so done with."""
        if isinstance(record, messages.MailboxAccepted) and sender == SERVER:
            self._mail.taken(SERVER, record)
        elif isinstance(record, messages.Offer) and sender[:1] == b"c":
            if record.mailbox != self._mail.number(sender):
                for peer in self._mail.peers():
                    if peer not in (SERVER, sender):  # there is one controller at a time
                        self._mail.forget(peer)
                opened = self._ask_mailbox(messages.OpenMailbox(record.mailbox))
                self.send_peer(sender, self._mail.open(sender, *opened))
        else:
            return False
        return True

    def put_back(self, received: Iterable[tuple[bytes, Record]]) -> None:
        """Have :meth:`receive` give these once more."""
        self._early.extend(received)

    def send_server(self, record: Record) -> None:
        """Send to the server. Raises LocalProtocolError where the record is too large to travel."""
        self._send(self._server, SERVER, record)

    def send_server_parts(self, parts: Sequence[Buffer]) -> None:
        """As :meth:`send_server`, of a record that is encoded."""
        self._post(self._server, SERVER, parts)

    def send_peer(self, identity: bytes, record: Record) -> None:
        """Answer a peer of the ROUTER; dropped where it has gone."""
        self._send(self._router, identity, record)

    def send_worker(self, endpoint: str, record: Record) -> None:
        """Send to another worker, as the holder of a token."""
        socket = self._colleagues.get(endpoint)
        if socket is None:
            socket = self._colleagues[endpoint] = self._connect(self._config.holder_identity, endpoint)
        self._send(socket, COLLEAGUE, record)

    def forget_worker(self, endpoint: str) -> None:
        """Another worker is gone, and what was to be sent to it with it."""
        socket = self._colleagues.pop(endpoint, None)
        if socket is not None:
            self._poller.unregister_socket(socket)
            socket.close(linger=0)

    def give_up(self, reason: str) -> NoReturn:
        """End this worker at once: another has its place."""
        _log.error("%s ends: %s", self._config.name, reason)
        self._gone()

    def send_supervisor(self, record: Record) -> None:
        """Send to the supervisor."""
        try:
            self._lifeline.send(record)
        except ShutdownError:
            self._gone()

    def close(self) -> None:
        """Close the sockets."""
        if not self.is_inherited:
            self._admission.close()
            self._mail.close()
            self._context.destroy(linger=_LINGER)

    def _connect(self, identity: bytes, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._socket(zmq.DEALER, BULK_LIMITS, 0)
        socket.setsockopt(zmq.IDENTITY, identity)
        socket.setsockopt(zmq.RECONNECT_IVL, 10)  # the peer may still be starting
        socket.connect(endpoint)
        return socket

    def _socket(self, kind: int, limits: Limits, unread: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, _LINGER)
        socket.setsockopt(zmq.MAXMSGSIZE, limits.part_nbytes)
        socket.setsockopt(zmq.SNDHWM, unread)
        socket.setsockopt(zmq.RCVHWM, 0)
        self._poller.register_socket(socket)
        return socket

    def _send(self, socket: zmq.Socket[bytes], peer: bytes, record: Record) -> None:
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("send %.300r", record)
        self._post(socket, peer, encode(record))

    def _post(self, socket: zmq.Socket[bytes], peer: bytes, parts: Sequence[Buffer]) -> None:
        if self.is_inherited:
            raise ContextError(
                "a process that a replica function forks is no replica; use variables, optimizers and the context in "
                "the function itself"
            )
        # Copied: the user's arrays behind a frame may change as soon as this returns. Large ones are in an arena.
        if not self._mail.post(peer, parts):
            socket.send_multipart([peer, *parts] if socket is self._router else parts)
            self._poller.used(socket)
            self._mail.sent(peer)
        moment("sent")

    def _fetch(self, socket: zmq.Socket[bytes]) -> None:
        """Take the next message of a socket, behind what was posted before it."""
        peer, limits = (SERVER, BULK_LIMITS) if socket is self._server else (COLLEAGUE, WORK_LIMITS)
        frames = receive(socket, limits, copy=False, is_routed=socket is self._router)
        if socket is self._router:
            peer = frames.pop(0).bytes
        self._mail.came(peer, [frame.buffer for frame in frames])

    def _read(self, sender: bytes, parts: Sequence[Buffer]) -> tuple[bytes, Record] | None:
        try:
            record = (self._server_decoder if sender == SERVER else self._decoder).decode(parts)
        except PeerProtocolError as error:
            _log.warning("%s: dropped a malformed message from %r: %s", self._config.name, sender, error)
            if sender not in (SERVER, COLLEAGUE):
                self.send_peer(sender, messages.Refused(0, error_of(error)))
            return None
        moment("decoded")
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("received from %r: %.300r", sender, record)
        return sender, record


def register(link: Link, config: Config, device: str) -> messages.Registered:
    """Make this worker known to the server, wait until all workers are, and tell the supervisor.

    Raises :class:`ConfigurationError` where the server refuses. There is no time limit here: the supervisor has one.
    """
    worker = messages.Worker(config.replica, config.incarnation, os.getpid(), device, config.endpoint)
    register = messages.Register(messages.PROTOCOL, worker)
    link.offer_mailbox()
    link.send_server(register)
    _log.debug("%s waits for the server to register it", config.name)
    early = []  # of a client that has heard of this worker before this worker has heard from the server
    while True:
        received = link.receive(None)
        if received is None:
            continue
        sender, record = received
        if sender == SUPERVISOR and isinstance(record, messages.Serving):  # another server, which may not have heard it
            link.send_server(register)
        if sender != SERVER:
            early.append(received)
            continue
        if isinstance(record, messages.Refused):
            raise ConfigurationError(f"the server refuses worker {config.name}: {record.error.message}")
        if isinstance(record, messages.Registered):
            link.send_supervisor(messages.Ready(config.endpoint))
            link.put_back(early)
            return record
