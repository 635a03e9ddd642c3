"""An observer: a process that may read a running service, and nothing else.

It reads values in place (``seqlock_reader``). If that is impossible, or commits come too fast, the server copies the
bytes between commits and sends them in frames. Any process of the same user can be an observer. :class:`Session` makes
the messages and matches the answers; :class:`Observer` here waits, and ``central_storage.aio`` waits in coroutines.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import zmq

from central_storage.core.public_objects import Closed
from cs_proto import messages
from cs_proto.codec import BULK_LIMITS, decode, encode
from cs_proto.errors import (
    ConfigurationError,
    InvalidArgumentError,
    LaunchError,
    NoAnswerError,
    PeerProtocolError,
    ShutdownError,
    replica_exception_class,
)
from cs_proto.failures import text_of
from cs_proto.frozen import frozen
from cs_proto.records import Record
from cs_runtime import open_files
from cs_runtime.transport import supervisor_link
from cs_runtime.transport.multipart import receive
from cs_runtime.transport.supervisor_link import CARRIED, SupervisorLink
from cs_runtime.waits import pace_of

from .places import Place, place_of

if TYPE_CHECKING:  # they take longer to import than all the rest, and who asks for counters only needs no values
    import numpy as np

    from cs_proto.descriptors import Array

    from .seqlock_reader import SeqlockReader

__all__ = ["LOOK_EVERY", "Observer", "Patience", "Question", "Session", "connect"]

T = TypeVar("T")

#: Seconds between two checks, during a wait, whether the service still exists.
LOOK_EVERY = 0.2
# A question without an answer is sent again after the first number of seconds, and then after twice as long each time,
# up to the second number: the server may have died with it, or may be making a large answer.
_ASK_AGAIN = (1.0, 4.0)
# The descriptors that an observer needs: a ZeroMQ context with a socket, and the connection to the supervisor. The
# loop of asyncio takes more.
_DESCRIPTORS = 16

_log = logging.getLogger("central_storage.observer")


def connect(
    address: str | None = None, timeout: float = 10.0, *, keys: str | os.PathLike[str] | None = None
) -> Observer:
    """An observer of a running service. Close it, or use it in a ``with`` block.

    Args:
        address: The run directory of the service, ``strategy.address``, or ``tcp://HOST:PORT`` of a service that was
            started with ``cs-launch --listen``. None: the environment variable ``CS_ADDRESS``.
        timeout: Seconds that this and every later question may take.
        keys: For an address over TCP: a directory with the public key of the service and the secret key of this
            observer, which ``cs-launch keys`` makes. Everything is encrypted by CURVE.

    Returns:
        An observer with ``variables()``, ``get(name)``, ``get_all(names)``, ``statistics()`` and ``close()``.

    Raises:
        ConfigurationError: There is no address, the timeout is invalid, or the keys are missing or open to others.
        LaunchError: There is no service in the run directory.
        NoAnswerError: The service does not answer in time (a TimeoutError), or does not admit the key.
        DescriptorLimitError: This process or the server has no descriptors left for another observer (an OSError).

    Examples:
        >>> import central_storage as cs
        >>> with cs.CentralStorageStrategy(in_process=True) as strategy:
        ...     with strategy.scope():
        ...         w = cs.Variable([1.0, 2.0], name="w")
        ...     with cs.connect(strategy.address) as observer:
        ...         print([record.spec.name for record in observer.variables()], observer.get("w"))
        ['w'] [1. 2.]
    """
    return Observer(Session(address, timeout, keys=keys))


@frozen
class Question(Generic[T]):
    """A request, and the function that reads its answer."""

    request: Record
    number: int
    answer: type[Record]
    meaning: Callable[[Any], T]


class Session:
    """The messages of an observer, without the waiting."""

    def __init__(
        self,
        address: str | None,
        timeout: float,
        *,
        maps: bool = True,
        keys: str | os.PathLike[str] | None = None,
    ) -> None:
        """Without ``maps``, the server is asked for every value, also where its memory could be read. ``keys``: as for
        :func:`connect`."""
        address = address or os.environ.get("CS_ADDRESS")
        if not address:
            raise ConfigurationError("connect needs the run directory of a service: strategy.address, or CS_ADDRESS")
        if not 0 < timeout < 1e6:
            raise ConfigurationError(
                f"timeout must be a number of seconds, more than 0 and less than 1e6, not {timeout!r}"
            )
        self.address = address
        self.timeout = timeout
        self._place = place_of(address, keys)
        self._requests = 0
        #: The transport of values, as text: an observer need not share memory with the service.
        self.transport = self._place.transport
        self._sight: SeqlockReader | None = None
        self._has_looked = not (maps and self._place.may_map)
        self._is_forgotten = False
        self._repeated: Question[Any] | None = None
        open_files.check(_DESCRIPTORS, "an observer")
        #: The connection to the supervisor; None if the service is on another machine, behind a gateway.
        self._lifeline = _introduced(address, timeout) if self._place.may_map else None
        self._client = os.urandom(4).hex() if self._lifeline is None else self._lifeline.client
        self._name = f"o{self._client}".encode() if self._lifeline is None else self._lifeline.name

    def open(self, context: zmq.Context[Any], *, is_shared: bool = False) -> Any:
        """A socket of ``context`` to the server; closed with the context. ``is_shared``: the context has other sockets,
        and the caller closes this one."""
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, BULK_LIMITS.part_nbytes)
        if self._lifeline is not None:  # a gateway names each connection: it may not know yet that the last one is cut
            socket.setsockopt(zmq.IDENTITY, self._name)
        self._place.connect(socket)
        # The garbage collector may find an unclosed observer as a whole; a context would then wait for ever for its
        # socket.
        if not is_shared:
            weakref.finalize(self, _let_go, context, socket, self._place, self._lifeline).atexit = False
        return socket

    def hello(self) -> Question[int]:
        """The first question; the answer is the number of replicas."""
        request = messages.Hello(messages.PROTOCOL, "observer", self._client, os.getpid())
        return Question(request, 0, messages.Welcome, lambda welcome: welcome.replicas)

    def variables(self) -> Question[tuple[messages.Variable, ...]]:
        """Every variable's record."""
        number = self._next()
        return Question(messages.Get(number, (), (), False), number, messages.Got, lambda got: got.variables)

    def get(self, name: str) -> Question[np.ndarray]:
        """The value of one variable."""
        number = self._next()
        request = messages.Get(number, (), (name,), True)
        return Question(request, number, messages.Got, lambda got: _copied(got.arrays[0]))

    def get_all(self, names: Sequence[str]) -> Question[list[np.ndarray]]:
        """The values of several variables; at least one."""
        if not names or isinstance(names, str):
            raise InvalidArgumentError(f"get_all needs the names of the variables, in a list; not {names!r}")
        number = self._next()
        request = messages.Get(number, (), tuple(names), True)
        return Question(request, number, messages.Got, lambda got: [_copied(array) for array in got.arrays])

    def unknown(self, names: Sequence[str]) -> Question[None] | None:
        """The question to ask before these variables can be :meth:`seen`; None if there is none."""
        if not self._has_looked:
            self._has_looked = True
            if self._lifeline is not None:
                from .seqlock_reader import open_sight

                self._sight = open_sight(self._lifeline)
            if self._sight is not None:
                self.transport = f"shared memory, else {CARRIED}"
        sight = self._sight
        if sight is None or sight.knows(names):
            return None
        number, layout = self._next(), sight.layout
        request = messages.Get(number, (), tuple(names), False)
        return Question(request, number, messages.Got, lambda got: sight.learn(layout, got.variables))

    def seen(self, names: Sequence[str]) -> list[np.ndarray] | None:
        """Copies of values from shared memory, all as of one commit; None if the server must be asked."""
        if self._sight is None:
            return None
        try:
            self._hear_supervisor()
            return self._sight.read(names)
        except ShutdownError:  # the supervisor is gone, or no longer shares memory
            self._sight = None
            return None

    def fileno(self) -> int:
        """The descriptor of the connection to the supervisor; -1 if there is none."""
        return -1 if self._lifeline is None else self._lifeline.fileno()

    @property
    def is_introduced(self) -> bool:
        """Whether the supervisor that introduced this process is there. False if there was none."""
        try:
            self._hear_supervisor()
        except ShutdownError:
            return False
        return self._lifeline is not None

    def _hear_supervisor(self) -> None:
        while self._lifeline is not None and self._lifeline.receive_nowait() is not None:
            pass  # deaths and restarts change nothing here

    def _stay_introduced(self) -> None:
        """Introduce this process to the next supervisor, if the last one is gone and there is one."""
        try:
            self._hear_supervisor()
        except ShutdownError:
            before, self._sight = self._lifeline, None
            with suppress(LaunchError, NoAnswerError, ShutdownError):
                self._lifeline = _introduced(self.address, LOOK_EVERY, before)
                if before is not None:
                    before.close()

    def close(self, context: zmq.Context[Any] | None = None) -> None:
        """Close the session, and the context that has only its socket. Idempotent."""
        self._place.close()  # first: a socket waits for whoever watches its connection
        if context is not None:
            context.destroy(linger=self.linger())
        if self._lifeline is not None:
            self._lifeline.close()
        self._sight = None

    def statistics(self) -> Question[messages.Counters]:
        """The server's counters."""
        number = self._next()
        return Question(messages.Statistics(number), number, messages.Counters, lambda counters: counters)

    def goodbye(self) -> list[Any]:
        """The parts of the last message, which is not answered."""
        return list(encode(messages.Goodbye(self._client)))

    def answer(self, question: Question[T], frames: Sequence[zmq.Frame]) -> tuple[T] | None:
        """The answer in a message to ``question``; None if it answers another one, or if :meth:`repeats` must be sent.
        Raises the error with which the server refuses."""
        record = decode([frames[0].bytes, *(frame.buffer for frame in frames[1:])], BULK_LIMITS)
        # A refusal without a number answers a Hello, which may have been repeated.
        if isinstance(record, messages.Refused) and record.number in (0, question.number):
            error = replica_exception_class(record.error.exception)(text_of(record.error))
            if not isinstance(error, PeerProtocolError) or self._repeated is question:
                raise error
            self._is_forgotten = True
            return None
        if isinstance(record, question.answer) and getattr(record, "request", question.number) == question.number:
            return (question.meaning(record),)
        return None

    def repeats(self, question: Question[Any]) -> list[list[Any]]:
        """The messages to send after a message that was no answer. Usually there are none; but the server knows a
        limited number of observers, and if it has forgotten this one, they are Hello and the question again."""
        if not self._is_forgotten:
            return []
        self._is_forgotten, self._repeated = False, question
        return [list(encode(self.hello().request)), list(encode(question.request))]

    def check_waiting(self, question: Question[Any], patience: Patience) -> bool:
        """Name a long wait. Raise if waiting on is pointless: the service has ended, or the answer is late. Whether to
        send the question again."""
        self._stay_introduced()
        if self._place.has_ended:
            raise ShutdownError(f"the service in {self.address} has ended")
        if time.monotonic() >= patience.deadline:
            raise NoAnswerError(
                f"the server in {self.address} did not answer within {self.timeout:g} s{self._place.doubts}"
            )
        if waited := patience.named():
            asked = type(question.request).__name__
            _log.warning("waiting %.0f s for the server in %s to answer a %s", waited, self.address, asked)
        return self._place.connects_again() or patience.asks_again()

    def linger(self) -> int:
        """Milliseconds that the last message may take; 0 if its receiver is gone."""
        return 0 if self._place.has_ended else 100

    def closed(self) -> ShutdownError:
        """The error for the use of a closed observer."""
        return ShutdownError(f"this observer of {self.address} was closed")

    def _next(self) -> int:
        self._requests += 1
        return self._requests


class Patience:
    """Decides when to check on a question that was just sent, when to send it again, and when to give up."""

    def __init__(self, timeout: float) -> None:
        self._begun = time.monotonic()
        self.deadline = self._begun + timeout
        self._pause = _ASK_AGAIN[0]
        self._again = self._begun + self._pause

    @property
    def milliseconds(self) -> int:
        """Milliseconds to wait before the next check."""
        return int(max(0.0, min(self.deadline - time.monotonic(), LOOK_EVERY)) * 1000) + 1

    def named(self) -> float | None:
        """The seconds waited, if it is time to name the wait; None otherwise."""
        waited = time.monotonic() - self._begun
        return waited if pace_of("observer").is_due(waited) else None

    def asks_again(self) -> bool:
        """Whether it is time to send the question again."""
        if time.monotonic() < self._again:
            return False
        self._pause = min(2 * self._pause, _ASK_AGAIN[1])
        self._again = time.monotonic() + self._pause
        return True


def _introduced(address: str, timeout: float, before: SupervisorLink | None = None) -> SupervisorLink:
    """The connection of an observer that the supervisor has accepted, under the name that it had ``before``. Raises
    LaunchError if there is no service, and what the supervisor refuses with."""
    name, client = (before.name, before.client) if before is not None else (b"", "")
    link = SupervisorLink(supervisor_link.connect(address, timeout), "observer", name=name, client=client)
    try:
        link.await_name(timeout)
    except ShutdownError as error:
        link.close()
        raise LaunchError(f"no service answers in {address}; it has ended") from error
    except BaseException:  # also Ctrl-C: no connection is left, and the error goes on
        link.close()
        raise
    return link


def _copied(array: Array) -> np.ndarray:
    """A copy of the array in a frame."""
    import numpy as np

    from cs_proto.arrays import frame_view

    return np.array(frame_view(array))


def _let_go(context: zmq.Context[Any], socket: zmq.Socket[Any], place: Place, lifeline: SupervisorLink | None) -> None:
    if lifeline is not None:
        lifeline.close()
    place.close()
    socket.close(0)
    context.term()


class Observer(Closed):
    """A read-only session with a service. Every question raises NoAnswerError (a TimeoutError) if the answer does
    not come in time, ShutdownError (a RuntimeError) if the service has ended or the observer was closed."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.address = session.address
        self._context = zmq.Context()
        self._socket = session.open(self._context)
        try:
            self.replicas = self._ask(session.hello())
        except BaseException:  # Ctrl-C, too, leaves no socket behind
            self.close()
            raise

    @property
    def transport(self) -> str:
        """The transport of values, as text."""
        return self._session.transport

    def variables(self) -> tuple[messages.Variable, ...]:
        """Every variable's record, in the order of creation."""
        return self._ask(self._session.variables())

    def get(self, name: str) -> np.ndarray:
        """A copy of a variable's value as of one commit. Raises InvalidArgumentError for an unknown name."""
        seen = self._see([name])
        return self._ask(self._session.get(name)) if seen is None else seen[0]

    def get_all(self, names: Sequence[str]) -> list[np.ndarray]:
        """Copies of several variables' values, all as of the same commit, in the order of ``names``. Raises
        InvalidArgumentError for an unknown name, or none."""
        question = self._session.get_all(names)
        seen = self._see(names)
        return self._ask(question) if seen is None else seen

    def statistics(self) -> messages.Counters:
        """The server's counters."""
        return self._ask(self._session.statistics())

    def close(self) -> None:
        """Say goodbye. Idempotent."""
        if not self._context.closed:
            self._socket.send_multipart(self._session.goodbye())
            self._session.close(self._context)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Observer of {self.address}{' (closed)' if self._context.closed else ''}>"

    def _see(self, names: Sequence[str]) -> list[np.ndarray] | None:
        if self._context.closed:
            raise self._session.closed()
        question = self._session.unknown(names)
        if question is not None:
            self._ask(question)
        return self._session.seen(names)

    def _ask(self, question: Question[T]) -> T:
        if self._context.closed:
            raise self._session.closed()
        self._socket.send_multipart(encode(question.request))
        patience = Patience(self._session.timeout)
        while True:
            if not self._socket.poll(patience.milliseconds):
                if self._session.check_waiting(question, patience):
                    self._socket.send_multipart(encode(question.request))
            elif found := self._session.answer(question, receive(self._socket, BULK_LIMITS)):
                return found[0]
            else:
                for message in self._session.repeats(question):
                    self._socket.send_multipart(message)
