"""What one process hears and says: the only place where a server, a worker or a script waits.

A channel waits for mailboxes, sockets of ZeroMQ, the supervisor and a descriptor of signals at the same time, and
gives one record after the other with the name of its sender. It makes mailboxes. It does not know what the other
records mean.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import zmq

from cs_proto import messages
from cs_proto.codec import BULK_LIMITS, Limits, encode
from cs_proto.peers import SERVER, SUPERVISOR
from cs_proto.records import Buffer, Record
from cs_runtime.trace import moments

from .admission import Admission
from .mailboxes import Mailboxes
from .multipart import receive
from .poller import Poller
from .supervisor_link import SupervisorLink

__all__ = ["SERVER", "SUPERVISOR", "Channel", "Read", "Received"]

# A connection without a ZeroMQ handshake within so many milliseconds is closed.
_HANDSHAKE = 5000
# The pause before a DEALER connects again, in milliseconds: its peer may be starting.
_RECONNECT = 10
# With mailboxes, or where peers wait for admission, no sleep is longer, in seconds: a doorbell could be missed.
_LONGEST_SLEEP = 1.0
# With ``messages_first``, at most so many messages come before what the supervisor said at the same time.
_BATCH = 64

#: Makes a record of the parts of a message; None where they are none and the sender has been told, if it can be.
Read = Callable[[bytes, Sequence[Buffer]], Record | None]


class Received(NamedTuple):
    """A record, its sender, and the parts it was read from (none where the supervisor sent it)."""

    peer: bytes
    record: Record
    parts: Sequence[Buffer] = ()


class Channel:
    """The sockets of one process. Used by one thread at a time.

    Example::

        channel = Channel(supervisor, wake, "worker", read, linger=100, patience=300e-6)
        channel.connect(SERVER, "ipc:///run/server", b"w0.1")
        channel.send(SERVER, encode(record))
        received = channel.receive(timeout=1.0)
    """

    def __init__(
        self,
        supervisor: SupervisorLink,
        wake: int,
        role: str,
        read: Read,
        *,
        linger: int,
        patience: float,
        look_every: float = 10e-3,
        on_wake: Callable[[], object],
        while_asleep: Callable[[], AbstractContextManager[object]] = nullcontext,
        messages_first: bool = False,
        rings_late: bool = False,
    ) -> None:
        """``wake`` is a descriptor: when it is readable, :meth:`receive` calls ``on_wake`` and returns. ``role`` names
        this process where it notes moments (:mod:`.trace`).

        ``linger``: milliseconds that messages get to leave at :meth:`close`. ``patience``: seconds of looking for mail
        before the process sleeps. ``look_every``: while mail comes without a pause, seconds between two looks at
        everything else. ``while_asleep`` makes a context manager around every sleep. ``messages_first``: what
        the supervisor says comes after the messages that arrived at the same time, instead of before them.
        ``rings_late``: the owner rings the doorbells of the peers that got mail, instead of every :meth:`send`.
        """
        self._supervisor = supervisor
        self._wake = wake
        self._moment = moments(role, time.perf_counter_ns)
        self._read = read
        self._linger = linger
        self._on_wake = on_wake
        self._look_every = look_every
        self._while_asleep = while_asleep
        self._messages_first = messages_first
        self._context = zmq.Context()
        self._poller: Poller[zmq.Socket[bytes]] = Poller()
        self._poller.register(supervisor.fileno())
        self._poller.register(wake)
        #: The mailboxes, by peer.
        self.mailboxes: Mailboxes[bytes] = Mailboxes(self._poller, patience, rings_late=rings_late)
        self._router: zmq.Socket[bytes] | None = None
        self._router_limits = BULK_LIMITS
        self._admission: Admission | None = None
        self._dealers: dict[bytes, zmq.Socket[bytes]] = {}
        self._peers: dict[zmq.Socket[bytes], tuple[bytes, Limits]] = {}
        # The sockets that may have another message, and whether and after how many messages the supervisor is heard.
        self._ready: deque[zmq.Socket[bytes]] = deque()
        self._supervisor_speaks = False
        self._before_supervisor = 0
        self._next_look = 0.0
        # When peers are let in next; never, before :meth:`admit`.
        self._next_admission = math.inf

    # --- connections ----------------------------------------------------------------------------------------------

    def listen(self, path: str, limits: Limits, unread: int, *, strict: bool = False) -> None:
        """Let peers connect at ``path``; they wait until :meth:`admit`. At most ``unread`` messages wait for a peer
        that does not read. ``strict``: :meth:`begin_to_send` says whether a peer is gone, and a peer that connects
        again under its identity is that peer. Raises OSError where the path cannot be bound."""
        self._router_limits = limits
        router = self._router = self._socket(zmq.ROUTER, limits, unread)
        router.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE)
        router.setsockopt(zmq.ROUTER_MANDATORY, strict)
        router.setsockopt(zmq.ROUTER_HANDOVER, strict)
        self._admission = Admission(self._poller, router, path)

    def admit(self) -> None:
        """Let the peers in that have connected, from now on."""
        assert self._router is not None
        self._poller.register_socket(self._router)
        self._next_admission = 0.0

    def connect(self, peer: bytes, endpoint: str, identity: bytes, limits: Limits = BULK_LIMITS) -> None:
        """Connect to ``endpoint``, whose name is ``peer`` here and which knows this process as ``identity``. What it
        sends is held to ``limits``."""
        socket = self._socket(zmq.DEALER, BULK_LIMITS, 0)
        socket.setsockopt(zmq.IDENTITY, identity)
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT)
        socket.connect(endpoint)
        self._poller.register_socket(socket)
        self._dealers[peer] = socket
        self._peers[socket] = peer, limits

    def disconnect(self, peer: bytes) -> None:
        """``peer`` is gone, and so is what was to be sent to it. Nothing happens where it is not connected."""
        socket = self._dealers.pop(peer, None)
        if socket is not None:
            self.mailboxes.forget(peer)
            self._poller.unregister_socket(socket)
            if socket in self._ready:
                self._ready.remove(socket)
            del self._peers[socket]
            socket.close(linger=0)

    def is_connected(self, peer: bytes) -> bool:
        """Whether :meth:`connect` was called for ``peer``."""
        return peer in self._dealers

    def offer_mailbox(self, peer: bytes, name: str) -> None:
        """Have what fits there go to ``peer``, which the supervisor knows as ``name``, by mailbox, where the supervisor
        makes one."""
        offer = self.mailboxes.offer(peer, *self._supervisor.mailbox(messages.MakeMailbox(name)))
        if offer is not None:
            self.send(peer, encode(offer))

    def open_mailbox(self, peer: bytes, offer: messages.Offer) -> messages.MailboxAccepted | None:
        """Use the mailbox that ``peer`` of the ROUTER offers. What to answer; None if it was accepted before."""
        if offer.mailbox == self.mailboxes.number(peer):
            return None
        return self.mailboxes.open(peer, *self._supervisor.mailbox(messages.OpenMailbox(offer.mailbox)))

    @property
    def is_closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._context.closed

    def close(self) -> None:
        """Close all sockets and mailboxes. Idempotent."""
        if self.is_closed:
            return
        if self._admission is not None:
            self._admission.close()
        self.mailboxes.close()
        self._context.destroy(linger=self._linger)

    # --- what is said ---------------------------------------------------------------------------------------------

    def send(self, peer: bytes, parts: Sequence[Buffer]) -> None:
        """Send a message to a peer that this process connected to, or to one of the ROUTER. It may wait, as ZeroMQ
        does. The parts are copied: the caller may change them afterwards."""
        if self.post(peer, parts):
            return
        socket = self._dealers.get(peer)
        if socket is not None:
            socket.send_multipart(parts)
        else:
            assert self._router is not None, f"{peer!r} is not connected"
            socket = self._router
            socket.send_multipart([peer, *parts])
        self._poller.used(socket)
        self.mailboxes.sent(peer)

    def post(self, peer: bytes, parts: Sequence[Buffer]) -> bool:
        """Send a message by mailbox. False where it has to go over ZeroMQ."""
        return self.mailboxes.post(peer, parts)

    def begin_to_send(self, peer: bytes) -> bool | None:
        """Whether a peer of the ROUTER, which must be strict, takes a message now: then its name has been sent, and
        :meth:`finish_sending` must follow. None if the peer is gone."""
        assert self._router is not None
        self._poller.used(self._router)
        for _ in range(2):
            try:
                self._router.send(peer, zmq.SNDMORE | zmq.NOBLOCK)
            except zmq.Again:
                self._router.getsockopt(zmq.EVENTS)  # lets the socket notice that the peer has read
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                return None
            else:
                return True
        return False

    def finish_sending(self, parts: Sequence[Buffer]) -> None:
        """Send the parts of a message to the peer of :meth:`begin_to_send`."""
        assert self._router is not None
        self._router.send_multipart(parts)

    # --- what is heard --------------------------------------------------------------------------------------------

    def receive(self, timeout: float | None, quiet: bytes | None = None) -> Received | None:
        """The next record; None after ``timeout`` seconds (None: no limit), and earlier where ``wake`` was readable.
        What ``quiet`` posts wakes nobody: nothing can be done with it before others have spoken.

        Raises ShutdownError where the supervisor is gone.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            if time.monotonic() < self._next_look and (received := self._at_hand()) is not None:
                return received
            is_there = self._supervisor.has_waiting or self.mailboxes.is_there(quiet)
            now = time.monotonic()
            if is_there and now < self._next_look:
                self._moment("found")
                continue
            ready = self._poll(0.0 if is_there else deadline - now)
            self._moment("found" if is_there or not ready else "woken")
            if self._wake in ready:
                self._on_wake()
                return None
            if (received := self._at_hand()) is not None:
                return received
            if not ready and not is_there and time.monotonic() >= deadline:
                return None

    def forget(self, peer: bytes) -> list[Received]:
        """``peer`` of the ROUTER is gone: what it had posted, and what others had by now."""
        self.mailboxes.forget(peer)
        received = []
        while (found := self.mailboxes.take()) is not None:
            if (each := self._received(*found)) is not None:
                received.append(each)
        return received

    def _poll(self, timeout: float) -> set[int | zmq.Socket[bytes]]:
        """Wait ``timeout`` seconds at most, and note what has come. The answer is empty if nothing has."""
        if time.monotonic() >= self._next_admission:
            self._next_admission = time.monotonic() + _LONGEST_SLEEP
            assert self._admission is not None
            self._admission.resume()
        if self.mailboxes or (self._admission is not None and self._admission.is_full):
            timeout = min(timeout, _LONGEST_SLEEP)
        with self._while_asleep():
            ready = self._poller.poll(None if timeout == math.inf else max(0.0, timeout))
        self.mailboxes.awake(ready)
        if self._admission is not None:
            self._admission.admit(ready)
        self._ready = deque(socket for socket in ready if isinstance(socket, zmq.Socket))
        if self._supervisor.fileno() in ready and not self._supervisor_speaks:
            self._supervisor_speaks = True
            self._before_supervisor = _BATCH if self._messages_first else 0
        self._next_look = time.monotonic() + self._look_every
        return ready

    def _at_hand(self) -> Received | None:
        """The next record of what has come, without another look at sockets that had nothing."""
        while True:
            if self._supervisor.has_waiting or (self._supervisor_speaks and not self._before_supervisor):
                record = self._supervisor.receive_nowait()
                if record is not None:
                    return Received(SUPERVISOR, record)
                self._supervisor_speaks = False
            found = self.mailboxes.take()
            if found is None and self._ready:
                self._fetch(self._ready[0])
                continue
            if found is None and not self._supervisor_speaks:
                return None
            self._before_supervisor = 0 if found is None else max(0, self._before_supervisor - 1)
            if found is not None and (received := self._received(*found)) is not None:
                return received

    def _fetch(self, socket: zmq.Socket[bytes]) -> None:
        """Take the next message of a socket in: :attr:`mailboxes` gives it behind what its sender posted before."""
        is_router = socket is self._router
        peer, limits = (SERVER, self._router_limits) if is_router else self._peers[socket]
        try:
            frames = receive(socket, limits, zmq.NOBLOCK, is_routed=is_router)
        except zmq.Again:
            self._ready.remove(socket)
            return
        self._ready.rotate(-1)  # the others first, next time
        if is_router:
            peer = frames.pop(0).bytes
        header = [frame.bytes for frame in frames[:1]]
        self._came(peer, [*header, *(frame.buffer for frame in frames[1:])])

    def _came(self, peer: bytes, parts: Sequence[Buffer]) -> None:
        """A message has come over ZeroMQ."""
        self.mailboxes.came(peer, parts)

    def _received(self, peer: bytes, parts: Sequence[Buffer]) -> Received | None:
        """The record of a message; None where it is none, or only says that a mailbox is accepted."""
        record = self._read(peer, parts)
        if record is None:
            return None
        if isinstance(record, messages.MailboxAccepted) and peer in self._dealers:
            self.mailboxes.taken(peer, record)
            return None
        return Received(peer, record, parts)

    def _socket(self, kind: int, limits: Limits, unread: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, self._linger)
        # One larger part ends the connection of its sender before a byte of it is stored.
        socket.setsockopt(zmq.MAXMSGSIZE, limits.part_nbytes)
        socket.setsockopt(zmq.SNDHWM, unread)
        socket.setsockopt(zmq.RCVHWM, 0)
        return socket
