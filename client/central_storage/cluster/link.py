"""Both ends of the link between a gateway and the outpost of a worker on another machine, over TCP with CURVE.

:class:`Link` is the outpost's end: it connects, and connects again after a cut. :class:`Links` are the gateway's ends,
one for each key of a worker, on a socket that is not theirs: the gateway hands them what comes from such a key, so who
speaks is known from the key and never from what a peer says. A session ends if one end closes it, or hears nothing of
the other one for ``return_timeout``.
"""

from __future__ import annotations

import itertools
import logging
import os
import select
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any, Literal, Self

import zmq
from zmq.utils.monitor import recv_monitor_message

from cs_proto.codec import BULK_LIMITS, LIMITS, decode, encode
from cs_proto.errors import (
    CentralStorageError,
    ConfigurationError,
    Fenced,
    LaunchError,
    NoAnswerError,
    PeerProtocolError,
    ShutdownError,
    replica_exception_class,
)
from cs_proto.failures import error_of, text_of
from cs_proto.messages import PROTOCOL, SESSION_NBYTES, CloseLink, Envelope, Error, LinkOpened, OpenLink, Refused
from cs_proto.records import Buffer, Record
from cs_runtime.logs import Complaints
from cs_runtime.transport.curve import WorkerKeys, check_endpoint, protect_client
from cs_runtime.transport.multipart import receive

from .session import Item, Session
from .sockets import has_input

__all__ = ["Item", "Link", "Links", "Outcome", "WorkerLink"]

_log = logging.getLogger("central_storage.cluster")
_complaints = Complaints(_log)

#: What becomes of a message: it is on its way, its peer has not taken earlier ones, or its peer is not connected.
Outcome = Literal["sent", "full", "gone"]

# Seconds in which TCP must connect, and in which the gateway must answer then: in the first attempt, how much longer
# after each attempt that took too long there, and at most. The kernel repeats what a network has lost at growing
# intervals, so another attempt is quicker. On a slow network a later attempt has enough time.
_CONNECTS, _ANSWERS = (1.0, 0.25, 3.0), (2.5, 2.5, 5.0)
# Seconds in which a connection that only tries whether somebody listens must be made.
_KNOCK = 1.0
# Milliseconds after which the kernel gives up a connection over which nothing of what was sent arrives.
_UNACKNOWLEDGED = 5000
# Seconds without a sign of life after which a connection is given up even so. A sign of life waits behind an envelope,
# which takes its time if many workers share a slow network.
_SILENCE = 20.0
# Seconds before the next attempt, and before a peer that is full is tried again.
_PAUSE, _RETRY = 0.2, 0.02
# Milliseconds in which ZeroMQ must have agreed with the gateway on keys.
_HANDSHAKE = 5000
# Milliseconds for the last message of a session.
_LINGER = 500
# Beats of a peer that are sent within the time in which it must be heard.
_BEATS = 4
# Milliseconds after which ZeroMQ would connect a socket again: never. With -1 it would end the pipe of the socket
# instead, maybe between two parts of a message that is being received, and then it ends the process.
_NEVER = 1 << 30

_AUTHENTICATION_FAILED = zmq.EVENT_HANDSHAKE_FAILED_AUTH
_CUT = zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_CUT |= zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_CONNECT_RETRIED


class _End:
    """What both ends have: items that wait to be sent, and items that have arrived."""

    def __init__(self, session: Session) -> None:
        #: For this module only, as what carries the envelopes.
        self.session = session
        #: Why the session is over; None while it is not.
        self.reason: CentralStorageError | None = None
        self._received: list[Item] = []

    @property
    def is_over(self) -> bool:
        """Whether nothing is sent and received any more, because of :attr:`reason`."""
        return self.reason is not None

    @property
    def waiting(self) -> int:
        """Bytes of items that the other end has not heard."""
        return self.session.waiting

    def put(self, kind: bytes, parts: Sequence[Buffer]) -> None:
        """Queue an item; it is dropped if the session is over. What is not ``bytes`` is copied when it is sent for the
        first time, and may not change until then."""
        if self.reason is None:
            self.session.put(kind, parts)

    def received(self) -> list[Item]:
        """The items that have arrived since the last call, in order, each once."""
        items, self._received = self._received, []
        return items

    def keep(self, items: list[Item]) -> None:
        """Keep what has arrived until somebody asks for it."""
        self._received += items


class _Connection:
    """One attempt to reach the gateway: a socket, and what reports what becomes of it."""

    _numbers = itertools.count()

    def __init__(self, context: zmq.Context[Any], endpoint: str, keys: WorkerKeys, deadline: float) -> None:
        """TCP must connect before ``deadline``. Raises ZMQError if the system refuses."""
        #: When it is given up unless it is open.
        self.deadline = deadline
        #: Whether TCP has connected, and whether the gateway has answered.
        self.is_connected = self.is_open = False
        self._is_broken = False
        self.socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        with ExitStack() as undo:  # else the context would wait for what is open without end
            undo.callback(self.socket.close)
            self.events: zmq.Socket[bytes] = self._open(endpoint, keys, undo)
            undo.pop_all()

    def _open(self, endpoint: str, keys: WorkerKeys, undo: ExitStack) -> zmq.Socket[bytes]:
        """Begin to connect. Returns what reports how that goes; ``undo`` closes it."""
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.IDENTITY, b"w" + os.urandom(15)),  # nobody can know it, and take its place
            (zmq.IPV6, int("[" in endpoint)),
            (zmq.HANDSHAKE_IVL, _HANDSHAKE),
            (zmq.TCP_MAXRT, _UNACKNOWLEDGED),
            (zmq.RECONNECT_IVL, _NEVER),  # a new connection is a new socket, so nothing of the old one comes over it
            (zmq.MAXMSGSIZE, LIMITS.part_nbytes),
        ):
            self.socket.setsockopt(option, value)
        protect_client(self.socket, keys)
        monitor = f"inproc://link-{next(self._numbers)}"
        events: zmq.Socket[bytes] = self.socket.get_monitor_socket(
            _CUT | _AUTHENTICATION_FAILED | zmq.EVENT_CONNECTED, monitor
        )
        undo.callback(events.close, linger=0)
        undo.callback(self.socket.disable_monitor)
        self.socket.connect(endpoint)
        return events

    def news(self) -> Literal["", "connected", "cut", "refused"]:
        """What has become of it since the last call: nothing, TCP has connected, it is cut, or the gateway does not
        admit the key."""
        if not has_input(self.events):
            return "cut" if self._is_broken else ""
        event = recv_monitor_message(self.events, zmq.NOBLOCK)["event"]
        if event == zmq.EVENT_CONNECTED:
            return "connected"
        return "refused" if event == _AUTHENTICATION_FAILED else "cut"

    def has_input(self) -> bool:
        return not self._is_broken and has_input(self.socket)

    def receive(self) -> list[zmq.Frame]:
        """The parts of the next message. If the connection ends in its midst, there are none, and it counts as cut."""
        try:
            return receive(self.socket, LIMITS, zmq.NOBLOCK)
        except zmq.Again:
            self._is_broken = True
            return []

    def close(self, linger: int) -> None:
        self.socket.disable_monitor()
        self.events.close(linger=0)
        self.socket.close(linger=linger)


class Link(_End):
    """The outpost's end. Used by one thread, which waits for :meth:`fileno`, at most for :meth:`timeout`. ::

    link = Link.connect("tcp://192.0.2.7:5600", WorkerKeys.read("keys"), timeout=60.0)
    poll.register(link)
    while not link.is_over:
        poll.poll(1000 * (link.timeout() or 0))
        link.turn()
        for kind, parts in link.received():
            link.put(kind, parts)
    """

    @classmethod
    def connect(cls, endpoint: str, keys: WorkerKeys, timeout: float) -> Self:
        """A link to the gateway at ``endpoint``, which :meth:`turn` connects. ``timeout`` is the time in seconds for
        the first answer; afterwards the gateway's ``return_timeout`` holds.

        Raises ConfigurationError for an endpoint that is not ``tcp://ADDRESS:PORT``.
        """
        _, port = check_endpoint(endpoint, "--join")
        if port == 0:
            raise ConfigurationError(f"{endpoint} names no port; cs-launch --listen prints the address with the port")
        return cls(endpoint, keys, timeout)

    def __init__(self, endpoint: str, keys: WorkerKeys, timeout: float) -> None:
        """As :meth:`connect`, without its checks."""
        now = time.monotonic()
        super().__init__(Session(os.urandom(SESSION_NBYTES), now, BULK_LIMITS))
        self.endpoint = endpoint
        #: Whether the gateway has answered once.
        self.is_open = False
        self._keys = keys
        self._timeout = timeout
        self._context: zmq.Context[Any] = zmq.Context()
        self._epoll = select.epoll()
        self._connection: _Connection | None = None
        self._next_attempt = now
        self._connections = 0
        # Attempts since the last open connection in which TCP was too slow to connect, and the gateway to answer.
        self._unconnected = self._unanswered = 0
        self._is_full = False

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection now, as far as is known."""
        return self._connection is not None and self._connection.is_open

    def fileno(self) -> int:
        """A descriptor that is readable if there is something to do for :meth:`turn`. It is always the same."""
        return self._epoll.fileno()

    def timeout(self) -> float | None:
        """Seconds until :meth:`turn` has something to do even so; None if the session is over."""
        if self.reason is not None:
            return None
        now = time.monotonic()
        due = self._timeout - self.session.silence(now)
        if self._connection is None:
            due = min(due, self._next_attempt - now)
        elif self._connection.is_open:
            due = min(due, self._silence - self.session.silence(now))
            due = min(due, _RETRY if self._is_full else self.session.due(now))
        else:
            due = min(due, self._connection.deadline - now)
        return max(0.0, due)

    def turn(self) -> None:
        """Receive what has come, send what was put, and connect or connect again. Call it after :meth:`put`, before the
        next wait."""
        try:
            while self.reason is None and self._turn(time.monotonic()):
                pass
        except CentralStorageError as error:
            self._end(error)
        except (OSError, zmq.ZMQError) as error:  # such as that this process has no descriptors left
            self._end(LaunchError(f"the link to {self.endpoint} cannot go on: {error}"))

    def close(self, patience: float = 0.0) -> None:
        """End the session, and say so to the gateway. If the connection is cut, it is made again for that, in at most
        ``patience`` seconds; else the gateway would have to wait for its ``return_timeout``. Idempotent."""
        if self._epoll.closed:
            return
        deadline = time.monotonic() + patience
        while self.is_open and self.reason is None and not self.is_connected and time.monotonic() < deadline:
            self._epoll.poll(min(self.timeout() or 0.0, max(0.0, deadline - time.monotonic())))
            self.turn()
        if self.reason is None:
            self._end(ShutdownError(f"the outpost of {self._keys.role} has ended"))
        self._epoll.close()
        self._context.term()

    @property
    def _silence(self) -> float:
        """Seconds without a sign of life after which the connection counts as cut."""
        return min(_SILENCE, self._timeout / 2)

    def _turn(self, now: float) -> bool:
        """Whether there is more to do."""
        if self._connection is not None:
            self._receive(self._connection, now)
        if self.session.silence(now) >= self._timeout:
            raise self._no_answer()
        if self._connection is not None:
            self._look(self._connection, now)
        if self._connection is None and now >= self._next_attempt:
            self._connect(now)
            return True  # its events are looked at once, because before that its descriptor tells of none
        if self._connection is None:
            return False
        if self._connection.is_open:
            self._send(self._connection, now)
        return self._connection.has_input()

    def _connect(self, now: float) -> None:
        deadline = now + _limit(_CONNECTS, self._unconnected)
        made = self._connection = _Connection(self._context, self.endpoint, self._keys, deadline)
        for each in (made.socket, made.events):
            self._epoll.register(each, select.EPOLLIN)
        self._connections += 1
        opening = OpenLink(PROTOCOL, self.session.name, not self.is_open, self.session.heard, self._connections)
        with suppress(zmq.Again):  # it is cut already, which is reported soon
            made.socket.send_multipart(encode(opening), zmq.NOBLOCK)

    def _look(self, connection: _Connection, now: float) -> None:
        """Hang up if the connection is cut, or there is no sign of life."""
        while (news := connection.news()) == "connected":
            connection.is_connected, connection.deadline = True, now + _limit(_ANSWERS, self._unanswered)
        if news == "refused":
            raise ConfigurationError(
                f"the service at {self.endpoint} does not admit the key {self._keys.path}: its directory of keys "
                f"needs the {self._keys.role}.key that was made with it"
            )
        is_quiet = self.session.silence(now) >= self._silence if connection.is_open else now >= connection.deadline
        if news == "cut" or is_quiet:
            if is_quiet and not connection.is_open:
                self._unconnected += not connection.is_connected
                self._unanswered += connection.is_connected
            _log.info("the connection to %s is cut", self.endpoint)
            self._hang_up(0)
            self._next_attempt = now if is_quiet else now + _PAUSE

    def _receive(self, connection: _Connection, now: float) -> None:
        while connection.has_input():
            if frames := connection.receive():
                self._hear(connection, decode([frames[0].bytes, *(frame.buffer for frame in frames[1:])], LIMITS), now)

    def _hear(self, connection: _Connection, record: Record, now: float) -> None:
        if isinstance(record, Refused):
            self._hang_up(0)  # it wants no answer
            raise _raised(record.error)
        if not isinstance(record, LinkOpened | Envelope) or record.session != self.session.name:
            raise PeerProtocolError(f"a gateway does not send such a {type(record).__name__} to an outpost")
        if isinstance(record, LinkOpened):
            self.session.resume(record.heard, now)
            self._timeout = record.return_timeout
            self.session.beat = min(self.session.beat, self._silence / _BEATS)
            self.is_open = connection.is_open = True
            self._unconnected = self._unanswered = 0
        elif connection.is_open:
            self.keep(self.session.hear(record, now))
        else:
            raise PeerProtocolError("a gateway sends envelopes after it has opened the link, not before")

    def _send(self, connection: _Connection, now: float) -> None:
        self._is_full = False
        for message in self.session.envelopes(now):
            try:
                connection.socket.send_multipart(message, zmq.NOBLOCK)
            except zmq.Again:
                self._is_full = True
                return

    def _hang_up(self, linger: int) -> None:
        if self._connection is not None:
            for each in (self._connection.socket, self._connection.events):
                with suppress(OSError):  # the system may have refused to watch it
                    self._epoll.unregister(each)
            self._connection.close(linger)
            self._connection = None

    def _end(self, reason: CentralStorageError) -> None:
        """The session is over; tell the gateway if it can be told."""
        self.reason = reason
        if self._connection is not None:
            with suppress(zmq.ZMQError):
                closing = CloseLink(self.session.name, error_of(reason))
                self._connection.socket.send_multipart(encode(closing), zmq.NOBLOCK)
        self._hang_up(_LINGER)

    def _no_answer(self) -> CentralStorageError:
        if self.is_open:
            return NoAnswerError(f"nothing was heard from the gateway at {self.endpoint} for {self._timeout:g} s")
        return LaunchError(
            f"no gateway answered at {self.endpoint} within {self._timeout:g} s (--start-timeout): "
            f"{self.why_not_open()}"
        )

    def why_not_open(self) -> str:
        """What a connection of its own says about an endpoint at which no gateway answers; it takes up to a second."""
        try:
            socket.create_connection(check_endpoint(self.endpoint, "--join"), _KNOCK).close()
        except TimeoutError:
            return (
                "what is sent there gets no answer at all, so it is the address of no machine that is up, or a "
                "firewall drops what is sent to this port"
            )
        except socket.gaierror as error:
            return f"that is the name of no machine that is known here ({error.strerror})"
        except OSError as error:
            return f"nothing listens there ({error.strerror or error})"
        return (
            "what listens there is no gateway, or one that is still starting, or that of another service than the one "
            "of service.key"
        )


class WorkerLink(_End):
    """The gateway's end of one session."""

    def __init__(self, role: str, session: Session) -> None:
        super().__init__(session)
        #: Whose key the outpost has, such as ``worker-n1``.
        self.role = role
        #: Of the connection; empty while there is none. For this module only.
        self.identity = b""
        #: Its number. For this module only.
        self.connection = 0
        #: Whether the peer has not taken earlier messages. For this module only.
        self.is_full = False
        #: The address from which the outpost has connected.
        self.node = ""

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection now, as far as is known."""
        return bool(self.identity)

    def close(self, reason: CentralStorageError) -> None:
        """End the session. The outpost is told ``reason``; what has not been heard is lost."""
        if self.reason is None:
            self.reason = reason


class Links:
    """The gateway's ends: at most one live session for each key of a worker. Used by one thread."""

    def __init__(self, send: Callable[[bytes, Sequence[Buffer]], Outcome], return_timeout: float) -> None:
        """``send`` sends a message to the peer with an identity, without waiting. Nothing is heard for at most
        ``return_timeout`` seconds."""
        self._send = send
        self._return_timeout = return_timeout
        self._links: dict[str, WorkerLink] = {}

    def __iter__(self) -> Iterator[WorkerLink]:
        """The sessions that are not over."""
        return iter([link for link in self._links.values() if link.reason is None])

    def hear(self, role: str, identity: bytes, parts: Sequence[Buffer], now: float, node: str = "") -> None:
        """A message of a peer at the address ``node`` with the key of a worker. What does not fit is refused: it ends
        the session of the connection it came over, and changes nothing for any other peer."""
        link = self._links.get(role)
        try:
            record = decode(parts, LIMITS)
            if isinstance(record, OpenLink):
                self._open(role, identity, record, now, node)
            elif isinstance(record, Envelope | CloseLink):
                self._heard(self._session_of(link, identity, record.session), record, now)
            else:
                raise PeerProtocolError(f"an outpost does not send a {type(record).__name__} to a gateway")
        except CentralStorageError as error:
            _complaints.warn(role, "refused a message of %s: %s", role, error)
            if link is not None and link.identity == identity:
                link.close(error)
            else:
                self._send(identity, encode(Refused(0, error_of(error))))

    def turn(self, now: float) -> bool:
        """Send what was put, and end the sessions of which nothing was heard for too long. Returns whether a session is
        over since the last call."""
        before = len(self._links)
        for link in list(self._links.values()):
            if link.session.silence(now) >= self._return_timeout:
                link.close(NoAnswerError(f"nothing was heard from {link.role} for {self._return_timeout:g} s"))
            if link.reason is not None:
                self._remove(link, link.reason)
            elif link.identity:
                self._flush(link, now)
        return len(self._links) < before

    def timeout(self, now: float) -> float | None:
        """Seconds until :meth:`turn` has something to do; None if nothing is to come."""
        return min((self._due(link, now) for link in self._links.values()), default=None)

    @property
    def _silence(self) -> float:
        """As that of an outpost."""
        return min(_SILENCE, self._return_timeout / 2)

    def close(self, reason: CentralStorageError) -> None:
        """End all sessions; the outposts are told ``reason``."""
        for link in list(self._links.values()):
            link.close(reason)
            self._remove(link, reason)

    def _due(self, link: WorkerLink, now: float) -> float:
        if link.reason is not None:
            return 0.0
        due = self._return_timeout - link.session.silence(now)
        if link.identity:
            due = min(due, _RETRY if link.is_full else link.session.due(now))
        return max(0.0, due)

    def _session_of(self, link: WorkerLink | None, identity: bytes, session: bytes) -> WorkerLink:
        """The session that a message belongs to. Raises Fenced if there is none."""
        if link is None or link.reason is not None or link.session.name != session or link.identity != identity:
            raise Fenced("this session is over, or has another connection now")
        return link

    def _open(self, role: str, identity: bytes, record: OpenLink, now: float, node: str) -> None:
        """Begin a session, or go on with one over a new connection."""
        if record.protocol != PROTOCOL:
            raise PeerProtocolError(
                f"the outpost of {role} speaks protocol {record.protocol}, this gateway protocol {PROTOCOL}; install "
                "the same version of central-storage on both sides"
            )
        link = self._links.get(role)
        if link is not None and link.reason is None and link.session.name == record.session:
            if record.connection < link.connection:  # the network has brought it late
                raise Fenced("this connection was given up, and there is a later one")
            link.session.resume(record.heard, now)
        elif not record.is_new:
            raise Fenced(f"the gateway knows no such session of {role}: it was started again, or has given it up")
        else:
            if link is not None:
                self._make_room(link, now)
            link = self._links[role] = WorkerLink(role, Session(record.session, now))
            link.session.beat = min(link.session.beat, self._silence / _BEATS)
        link.identity, link.connection, link.is_full, link.node = identity, record.connection, False, node
        self._send(identity, encode(LinkOpened(record.session, link.session.heard, self._return_timeout)))

    def _make_room(self, link: WorkerLink, now: float) -> None:
        """End a session whose outpost has gone. Raises LaunchError if it is still connected."""
        is_heard = link.reason is None and link.identity and link.session.silence(now) < self._silence
        if is_heard and self._send(link.identity, link.session.beat_message()) != "gone":
            raise LaunchError(
                f"another outpost is connected with the key of {link.role}; every machine needs a key of its own: "
                "cs-launch keys DIR --worker NAME"
            )
        link.close(Fenced(f"another outpost has come with the key of {link.role}"))
        assert link.reason is not None
        self._remove(link, link.reason)

    def _heard(self, link: WorkerLink, record: Envelope | CloseLink, now: float) -> None:
        if isinstance(record, Envelope):
            link.keep(link.session.hear(record, now))
        else:
            link.reason = _raised(record.error)
            link.identity = b""  # it wants no answer

    def _flush(self, link: WorkerLink, now: float) -> None:
        link.is_full = False
        for message in link.session.envelopes(now):
            outcome = self._send(link.identity, message)
            if outcome != "sent":
                link.is_full = outcome == "full"
                link.identity = link.identity if link.is_full else b""
                return

    def _remove(self, link: WorkerLink, reason: CentralStorageError) -> None:
        _log.info("the session of %s is over: %s", link.role, reason)
        if link.identity:
            self._send(link.identity, encode(Refused(0, error_of(reason))))
            link.identity = b""
        if self._links.get(link.role) is link:
            del self._links[link.role]


def _limit(limits: tuple[float, float, float], late: int) -> float:
    """The seconds of an attempt after ``late`` ones that took too long."""
    first, longer, longest = limits
    return min(first + longer * late, longest)


def _raised(error: Error) -> CentralStorageError:
    """The error that the other end has sent. Raises PeerProtocolError if it is none."""
    try:
        made = replica_exception_class(error.exception)(text_of(error))
    except TypeError as failure:  # a class that is not made from a text, which nobody sends
        raise PeerProtocolError(f"an error cannot be a {error.exception} with a text alone: {failure}") from failure
    assert isinstance(made, CentralStorageError)  # as is every class of the table
    return made
