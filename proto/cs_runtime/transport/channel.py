"""The messages of one process: the only place where a server, a worker or a script waits.

A channel waits for mailboxes, ZeroMQ sockets, the supervisor and a descriptor of signals at the same time. It returns
one record at a time, with the name of its sender. It also opens mailboxes, so it reads the records about these; what
any other record means is up to its owner.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import NamedTuple

import zmq

from cs_proto import messages
from cs_proto.codec import BULK_LIMITS, Limits, encode
from cs_proto.peers import SERVER, SUPERVISOR
from cs_proto.records import Buffer, Record

from .admission import Admission
from .mailboxes import Mailboxes
from .multipart import receive
from .poller import Poller
from .rings import Mark
from .supervisor_link import SupervisorLink

__all__ = ["SERVER", "SUPERVISOR", "Channel", "Read", "ReadMark", "Received"]

_log = logging.getLogger("central_storage.channel")

# A connection that has made no ZeroMQ handshake after this time, in milliseconds, is closed.
_HANDSHAKE = 5000
# The pause before a DEALER connects again, in milliseconds: its peer may be starting.
_RECONNECT = 10
# So many messages of one peer of the ROUTER wait to be heard; a true one has a few under way.
_UNHEARD = 100
# The longest sleep, in seconds: the doorbell of a mailbox could be missed.
_LONGEST_SLEEP = 1.0
# Seconds between two admissions of peers. Those that connect without end wait, so they leave the processors to others.
# Peers that the supervisor has just introduced do not wait behind them. There is a longer pause if descriptors lack.
_ADMISSION_PAUSE, _FULL_PAUSE = 20e-3, 1.0
# Seconds between two looks for connections that have ended.
_SWEEP_EVERY = 1.0
# Guests are strangers, observers, and whoever sends what is no record. When they have taken so many seconds of this
# thread, the ROUTER is not heard for so many seconds: what they send without end stays in their own memory, and the
# processors are left to those that compute.
_GUESTS = 0.2e-3
_REST = 1e-3
# With ``messages_first``, at most this many messages are received before a notice of the supervisor that arrived with
# them.
_BATCH = 64

#: Decodes the parts of a message. None if they are not a record; the sender has then been told, where it can be.
Read = Callable[[bytes, Sequence[Buffer]], Record | None]
#: The record that a mark of a peer stands for, from its number and its bytes. None as for :data:`Read`.
ReadMark = Callable[[bytes, int, bytes], Record | None]


class Received(NamedTuple):
    """A record, its sender, and the parts it was read from (none where the supervisor sent it)."""

    peer: bytes
    record: Record
    parts: Sequence[Buffer] = ()


# The constructor of a NamedTuple is a function of Python; this one is not.
_made_received = partial(tuple.__new__, Received)


class Channel:
    """The sockets of one process. Used by one thread at a time. Peers know this process by the name that the supervisor
    has given it, and it hears only those peers that the supervisor has introduced to it.

    Example::

        channel = Channel(supervisor, wake, trace.note, read, linger=100, patience=300e-6)
        channel.connect(SERVER, server_endpoint("/run"))
        channel.send(SERVER, encode(record))
        received = channel.receive(timeout=1.0)
    """

    # How many messages were dropped.
    _strangers = 0

    def __init__(
        self,
        supervisor: SupervisorLink,
        wake: int,
        moment: Callable[..., object],
        read: Read,
        *,
        linger: int,
        patience: float,
        look_every: float = 10e-3,
        on_wake: Callable[[], object],
        while_asleep: Callable[[], AbstractContextManager[object]] | None = None,
        messages_first: bool = False,
        rings_late: bool = False,
        read_mark: ReadMark | None = None,
    ) -> None:
        """Make a channel without connections.

        Args:
            supervisor: The connection to the supervisor.
            wake: A descriptor. When it is readable, :meth:`receive` calls ``on_wake`` and returns.
            moment: Notes that the process has been woken, or found something (:meth:`cs_runtime.trace.Trace.note`).
            read: Decodes a message.
            linger: Milliseconds that :meth:`close` gives unsent messages.
            patience: Seconds in which the process polls its mailboxes before it sleeps.
            look_every: Seconds between two looks at everything else while mail comes without a pause.
            on_wake: Called when ``wake`` is readable.
            while_asleep: Makes a context manager that is entered for every sleep, if there is one.
            messages_first: Whether messages come before a notice of the supervisor that arrived at the same time.
            rings_late: Whether the owner rings the doorbells of peers that got mail, and :meth:`send` does not.
            read_mark: Reads a mark. None: marks stand for nothing.
        """
        self._supervisor, self._notices = supervisor, supervisor.fileno()
        self._moment, self._while_asleep = moment, while_asleep
        self._read, self._read_mark = read, read_mark
        self._linger = linger
        self._wake, self._on_wake = wake, on_wake
        self._look_every = look_every
        self._messages_first = messages_first
        self._context = zmq.Context()
        self._poller: Poller[zmq.Socket[bytes]] = Poller()
        self._poller.register(self._notices)
        self._poller.register(wake)
        #: The mailboxes, by peer.
        self.mailboxes: Mailboxes[bytes] = Mailboxes(self._poller, patience, rings_late=rings_late)
        self._router: zmq.Socket[bytes] | None = None
        self._router_limits = BULK_LIMITS
        self._admission: Admission | None = None
        self._dealers: dict[bytes, zmq.Socket[bytes]] = {}
        self._peers: dict[zmq.Socket[bytes], tuple[bytes, Limits]] = {}
        # The sockets that may have another message; whether the supervisor has spoken; how many messages come first.
        self._ready: deque[zmq.Socket[bytes]] = deque()
        self._supervisor_speaks, self._before_supervisor = False, 0
        self._looked_at, self._next_look = 0.0, 0.0  # at everything
        # Seconds that guests have taken since the ROUTER rested, and until when it rests; infinite: it is heard.
        self._taken, self._rests_until = 0.0, math.inf
        # When the last message of the ROUTER was fetched, and whether its owner carries it out for an observer.
        self._fetched_at, self._is_guests = 0.0, False
        # When peers may be admitted again (infinite while they may be, and before :meth:`admit`); when to sweep.
        self._next_admission, self._next_sweep = math.inf, math.inf

    # --- connections ----------------------------------------------------------------------------------------------

    def listen(self, path: str, limits: Limits, unread: int, *, strict: bool = False) -> None:
        """Let peers connect at ``path``; they wait until :meth:`admit`. At most ``unread`` messages are kept for a peer
        that does not read. With ``strict``, :meth:`begin_to_send` tells whether a peer has gone, and a new connection
        under a known identity replaces the earlier one. Raises OSError if the path cannot be bound."""
        self._router_limits = limits
        router = self._router = self._socket(zmq.ROUTER, limits, unread)
        router.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE)
        router.setsockopt(zmq.ROUTER_MANDATORY, strict)
        router.setsockopt(zmq.ROUTER_HANDOVER, strict)
        self._admission = Admission(self._poller, router, path)

    def admit(self) -> None:
        """From now on, accept peers that connect."""
        assert self._router is not None
        self._poller.register_socket(self._router)
        self._next_admission = self._next_sweep = 0.0

    def connect(self, peer: bytes, endpoint: str, limits: Limits = BULK_LIMITS) -> None:
        """Connect to ``endpoint``, a peer that is called ``peer`` here. Its messages must keep to ``limits``. The
        supervisor must have given this process its name."""
        socket = self._socket(zmq.DEALER, BULK_LIMITS, 0)
        socket.setsockopt(zmq.IDENTITY, self._supervisor.name)
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT)
        socket.connect(endpoint)
        self._poller.register_socket(socket)
        self._dealers[peer] = socket
        self._peers[socket] = peer, limits

    def disconnect(self, peer: bytes) -> None:
        """Close the connection to ``peer`` and drop the messages for it. Nothing happens if it is not connected."""
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
        """Offer a mailbox to ``peer``, which the supervisor knows as ``name``, if the supervisor makes one. Messages
        that fit into it no longer go over ZeroMQ."""
        offer = self.mailboxes.offer(peer, *self._supervisor.mailbox(messages.MakeMailbox(name)))
        if offer is not None:
            self.send(peer, encode(offer))

    def open_mailbox(self, peer: bytes, offer: messages.Offer) -> messages.MailboxAccepted | None:
        """Use the mailbox that ``peer`` of the ROUTER offers. Return the answer, or None if it was accepted before."""
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
        """Send a message to a peer that this process connected to, or to a peer of the ROUTER. This may block, as in
        ZeroMQ. The parts are copied, so the caller may change them afterwards."""
        if self.mailboxes.post(peer, parts):
            return
        socket = self._dealers.get(peer)
        if socket is not None:
            socket.send_multipart(parts)
        else:
            assert self._router is not None, f"{peer!r} is not connected"
            who = self._supervisor.peers.get(peer)
            if who is None:  # it has gone
                return
            socket = self._router
            socket.send_multipart([who.name, *parts])
        self._poller.used(socket)
        self.mailboxes.sent(peer)

    def post(self, peer: bytes, parts: Sequence[Buffer]) -> bool:
        """Send a message by mailbox. False if it has to go over ZeroMQ."""
        return self.mailboxes.post(peer, parts)

    def begin_to_send(self, peer: bytes) -> bool | None:
        """Whether a peer of the ROUTER, which must be strict, can take a message now. If so, its name has been sent and
        :meth:`finish_sending` must follow. None if the peer has gone."""
        assert self._router is not None
        who = self._supervisor.peers.get(peer)
        if who is None:
            return None
        self._poller.used(self._router)
        for _ in range(2):
            try:
                self._router.send(who.name, zmq.SNDMORE | zmq.NOBLOCK)
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
        """The next record. None after ``timeout`` seconds (None: no limit), or earlier if ``wake`` was readable.

        Mail from the peer ``quiet`` does not end the wait, since its owner cannot act on it before other peers have
        sent something. Raises ShutdownError if the supervisor has gone.
        """
        if self._is_guests:
            self._charge()
        now = time.monotonic()
        deadline = math.inf if timeout is None else now + timeout
        if now < self._next_look and (received := self._at_hand()) is not None:
            return received
        while True:
            is_there = bool(self._supervisor.waiting) or self.mailboxes.comes(quiet, now)
            if is_there:
                now = time.monotonic()
            if is_there and now < self._next_look:
                self._moment("found")
            else:
                ready = self._poll(0.0 if is_there else deadline - now, now)
                self._moment("found" if is_there or not ready else "woken")
                now = self._looked_at
                if self._wake in ready:
                    self._on_wake()
                    return None
            if (received := self._at_hand()) is not None:
                return received
            if self._looked_at >= deadline:
                return None

    def forget(self, peer: bytes) -> list[Received]:
        """Close the mailbox of ``peer`` of the ROUTER, which has gone. Return the mail that has come from it and from
        others so far."""
        self.mailboxes.forget(peer)
        received = []
        while (found := self.mailboxes.take()) is not None:
            if (each := self._received(*found)) is not None:
                received.append(each)
        return received

    def _poll(self, timeout: float, now: float) -> set[int | zmq.Socket[bytes]]:
        """Wait at most ``timeout`` seconds from ``now`` on for anything to read. Note what is ready, and return it."""
        limit = 0.0 if timeout < 0.0 else timeout if timeout < _LONGEST_SLEEP else _LONGEST_SLEEP
        # No function is called for what is not due: a process sleeps once or twice in every step.
        if self._admission is not None and (now >= self._next_sweep or self._next_admission < math.inf):
            self._tend(self._admission, now)
            limit = max(0.0, min(limit, self._next_admission - now))
        if self._rests_until < math.inf:
            limit = min(limit, self._rest(now))
        if self._while_asleep is None:
            ready = self._poller.poll(limit)
        else:
            with self._while_asleep():
                ready = self._poller.poll(limit)
        self.mailboxes.awake(ready)
        if self._ready:
            self._ready.clear()
        for each in ready:
            if not isinstance(each, int):
                self._ready.append(each)
        if self._notices in ready and not self._supervisor_speaks:
            self._supervisor_speaks = True
            self._before_supervisor = _BATCH if self._messages_first else 0
        self._looked_at = time.monotonic()
        self._next_look = self._looked_at + self._look_every
        if self._admission is not None and self._admission.descriptor in ready:
            self._next_admission = self._looked_at + _ADMISSION_PAUSE
            self._admission.admit()
            if self._admission.is_full:
                self._next_admission = self._looked_at + _FULL_PAUSE
        return ready

    def _rest(self, now: float) -> float:
        """The seconds for which the ROUTER still rests. If there are none, it is heard again from now on."""
        if now < self._rests_until:
            return self._rests_until - now
        assert self._router is not None
        self._rests_until = math.inf
        self._poller.register_socket(self._router)
        return math.inf

    def _tend(self, admission: Admission, now: float) -> None:
        """Close what connections have left, and end the pause between two admissions if it is time."""
        if now >= self._next_sweep:
            self._next_sweep = now + _SWEEP_EVERY
            admission.sweep()
        is_pausing = self._next_admission < math.inf
        is_expected = now < self._supervisor.expects_until and not admission.is_full
        if now >= self._next_admission or (is_pausing and is_expected):
            self._next_admission = math.inf
            admission.resume()

    def _at_hand(self) -> Received | None:
        """The next record from whatever the last poll found ready."""
        while True:
            if (self._supervisor.waiting or self._supervisor_speaks) and not self._before_supervisor:
                record = self._supervisor.receive_nowait()
                if record is not None:
                    return Received(SUPERVISOR, record)
                self._supervisor_speaks = False
            found = self.mailboxes.take()
            if found is not None:
                if self._before_supervisor:
                    self._before_supervisor -= 1
                if (received := self._received(*found)) is not None:
                    return received
            elif self._ready:
                self._fetch(self._ready[0])
            elif self._supervisor_speaks or self._supervisor.waiting:
                self._before_supervisor = 0
            else:
                return None

    def _fetch(self, socket: zmq.Socket[bytes]) -> None:
        """Read the next message of a socket. :attr:`mailboxes` keeps its order with the mail of the same sender."""
        is_router = socket is self._router
        if is_router:
            self._fetched_at = time.monotonic()
        peer, limits = (SERVER, self._router_limits) if is_router else self._peers[socket]
        try:
            frames = receive(socket, limits, zmq.NOBLOCK, is_routed=is_router)
        except zmq.Again:
            self._ready.remove(socket)
            return
        self._ready.rotate(-1)  # the other sockets come first next time
        if is_router:
            is_first = not (self._supervisor.waiting or self._supervisor_speaks)
            known = self._supervisor.peer_named(frames.pop(0).bytes)
            if is_first and self._supervisor.waiting:  # they came with this message, which was read by chance
                self._before_supervisor = _BATCH if self._messages_first else 0
            if known is None:
                self._note_stranger()
                return
            peer = known
            self._is_guests = self._supervisor.peers[peer].role == "observer"
        header = [frame.bytes for frame in frames[:1]]
        self._came(peer, [*header, *(frame.buffer for frame in frames[1:])])

    def _note_stranger(self) -> None:
        """A message has come from a process that the supervisor has not introduced. One that never stops does not fill
        the log."""
        self._strangers += 1
        if self._strangers & (self._strangers - 1) == 0:
            _log.warning("dropped messages of processes that the supervisor has not introduced: %d", self._strangers)
        self._charge()

    def _charge(self) -> None:
        """A guest has taken the time since its message was fetched. The ROUTER rests if guests have taken long."""
        self._is_guests = False
        now = time.monotonic()
        self._taken += now - self._fetched_at
        if self._taken >= _GUESTS and self._rests_until == math.inf:
            assert self._router is not None
            self._taken, self._rests_until = 0.0, now + _REST
            self._poller.unregister_socket(self._router)
            if self._router in self._ready:
                self._ready.remove(self._router)

    def _came(self, peer: bytes, parts: Sequence[Buffer]) -> None:
        """A message has come over ZeroMQ."""
        self.mailboxes.came(peer, parts)

    def _received(self, peer: bytes, parts: Sequence[Buffer] | Mark) -> Received | None:
        """The record of a message or of a mark. None if there is none, or if it accepts a mailbox, which is handled
        here."""
        if isinstance(parts, Mark):
            record = None if self._read_mark is None else self._read_mark(peer, *parts)
            return None if record is None else _made_received((peer, record, ()))
        record = self._read(peer, parts)
        if record is None:
            if self._router is not None and peer not in self._dealers:
                self._charge()
            return None
        if type(record) is messages.MailboxAccepted and peer in self._dealers:
            self.mailboxes.taken(peer, record)
            return None
        return _made_received((peer, record, parts))

    def _socket(self, kind: int, limits: Limits, unread: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, self._linger)
        # ZeroMQ closes the connection of a peer that sends a larger part, before it stores any of it.
        socket.setsockopt(zmq.MAXMSGSIZE, limits.part_nbytes)
        socket.setsockopt(zmq.SNDHWM, unread)
        # Whoever sends faster than this process hears keeps what it sends in its own memory.
        socket.setsockopt(zmq.RCVHWM, _UNHEARD if kind == zmq.ROUTER else 0)
        return socket
