"""What a script hears and says: its channel to the server, the workers and the supervisor.

What is said, and what an answer means, is known in the modules over it (``runs.py``, ``operations.py``).
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np

from central_storage.diagnostics.logging_setup import show
from central_storage.wire_values.value_codec import to_exception
from cs_proto import messages, segment_names
from cs_proto.arrays import Array, Location, frame_view
from cs_proto.codec import BULK_LIMITS, decode, encode, encode_values
from cs_proto.errors import LaunchError, MemoryPlanError, PeerProtocolError, ReplicaLostError, ShutdownError
from cs_proto.messages import Died, Output, Serving
from cs_proto.records import Buffer, Record
from cs_runtime import open_files
from cs_runtime.arena import Arena
from cs_runtime.channel import SERVER, SUPERVISOR, Channel
from cs_runtime.supervisor_link import CARRIED, SupervisorLink
from cs_runtime.trace import moments

from .input_segment import InputSegment
from .interrupts import Interrupts
from .liveness import Liveness, last_lines
from .output_listener import OutputListener
from .result_leases import ResultLeases

__all__ = ["Seam", "Threads", "log", "moment", "name_wait", "wait_until_serving"]

#: Named after the whole link, whichever part of it speaks.
log = logging.getLogger("central_storage.link")

#: Notes where in a step this process is.
moment = moments("client", time.perf_counter_ns)

R = TypeVar("R", bound=Record)

# After this long the server is told of a wait for a run.
_LATE_AFTER = 1.0
# A wait this long is named, and again after as long.
_NAME_WAIT_EVERY = 10.0
# Where the server is asked whom it waits for, it gets this long to say so before the wait is named without it.
_WHOM_WITHIN = 2.0
# The script looks for mail this long before it sleeps, in seconds: longer than a small step takes.
_PATIENCE = 300e-6
# What is being sent at the end gets this long to leave, in milliseconds.
_LINGER = 100
# A strategy needs so many descriptors at first. A context of ZeroMQ ends the process if it cannot open its own.
_DESCRIPTORS = 16
# The supervisor gets this long to say who was not ready in time.
_SAY_SO = 5.0
# The supervisor kills what has not ended 3 s after it was asked to, and hangs up then.
_LAST_WORDS = 5.0


def name_wait(seconds: float, what: str) -> None:
    """Say on stderr what has been waited for, for so long."""
    log.warning("waiting %.0f s for %s", seconds, what)


class Threads(Protocol):
    """A service of this process, whose replicas are threads."""

    def interrupt(self, replica: int) -> None:
        """What SIGINT is to a process."""

    @property
    def hanging(self) -> list[tuple[int, str]]:
        """The replicas that were interrupted or told to end and have not heard it, with ``file:line`` of each."""


class Seam(ABC):
    """The conversation of one controller with its service, from the server's welcome to the end."""

    def __init__(
        self,
        lifeline: SupervisorLink,
        serving: Serving,
        stop: Callable[[], None] | None,
        threads: Threads | None,
    ) -> None:
        """Say hello to the server behind ``serving``. ``stop`` and ``threads`` as in :class:`ServiceLink`.

        Raises DescriptorLimitError if this process may open too few files.
        """
        open_files.check(_DESCRIPTORS, "a strategy")
        self._lifeline = lifeline
        self._threads = threads
        self._stop = stop
        self._client = lifeline.client
        self._lock = threading.RLock()  # adopting an optimizer while a function is pickled is an operation in another
        self._process = os.getpid()
        self._sequence = 0
        self._hello = messages.Hello(messages.PROTOCOL, "controller", self._client, os.getpid())
        self._asked: list[Record] = []  # what another server is asked again
        # What it is told again before that, as long as the run is unanswered.
        self._told: list[messages.Resent | messages.WaitReport] = []
        # A write that Ctrl-C left unanswered, its number and the kind of its answer.
        self._left_off: tuple[Record, int, type[Record]] | None = None
        self._ended: str | None = None
        self._deaths = Liveness()
        self.workers: tuple[messages.Worker, ...] = ()
        self._resolve: Callable[[str, int], object] = _nothing_known
        self._results: list[ResultLeases] = []
        self._inputs: InputSegment | None = None
        self._arena = Arena(lambda: lifeline.segment(segment_names.controller_arena()), find=self._find_input)
        self._interrupts = Interrupts()
        self._channel = Channel(
            lifeline,
            self._interrupts.fileno(),
            "client",
            self._read,
            linger=_LINGER,
            patience=_PATIENCE,
            on_wake=self._interrupts.raise_pending,
        )
        lifeline.carry = self._carry
        lifeline.while_waiting = self._interrupts.raise_pending
        self._channel.connect(SERVER, serving.endpoint, self._identity)
        try:
            self._send(SERVER, self._hello)
            welcome = self._wait("the server's welcome", lambda r: r if isinstance(r, messages.Welcome) else None)
        except BaseException:  # as garbage the context would wait for ever for sockets that nobody closes
            self._channel.close()
            self._interrupts.close()
            raise
        self.replicas = welcome.replicas
        self.parameter_device = welcome.parameter_device
        self.compute_devices = tuple(worker.device for worker in welcome.workers)
        self.server_pid = welcome.server_pid
        self.address = serving.run_directory
        self.workers = welcome.workers
        lifeline.segment(segment_names.controller_arena())
        arenas = [segment_names.arena(replica) for replica in range(self.replicas)]
        self._results = [ResultLeases(arena, partial(lifeline.segment, arena), self.replicas) for arena in arenas]
        #: Whether this process maps no memory of the service, and how they talk, in words.
        self.carries = bool(lifeline.carried_because)
        self.transport = f"{CARRIED}: {lifeline.carried_because}" if self.carries else serving.transport
        self._channel.offer_mailbox(SERVER, "server")
        self._worker_peers = [self._connect_worker(worker) for worker in welcome.workers]
        # A launcher shows what its service prints itself. The supervisor after it wants to be met in time.
        listens = stop is not None or lifeline.may_return
        self._listener = OutputListener(lifeline.fileno(), self._lock, self._listen) if listens else None

    @abstractmethod
    def _take_up(self, restarted: messages.WorkerRestarted) -> None:
        """A worker is in the place of one that died."""

    @abstractmethod
    def _keep(self, record: Record) -> None:
        """Take note of what nobody waited for."""

    @property
    def last_death(self) -> Died | None:
        """The death that matters: the first for good, else the last."""
        return self._deaths.last

    # --- the receive seam -----------------------------------------------------------------------------------------

    def receive(self, timeout: float) -> Record | None:
        """The next record for this client, whatever carried it, or None after ``timeout`` seconds.

        Raises KeyboardInterrupt for a Ctrl-C, ShutdownError where the service is gone, ReplicaLostError where the
        server died.
        """
        self._interrupts.raise_pending()
        try:
            received = self._channel.receive(timeout)
            if received is None:
                return None
            if received.peer == SUPERVISOR:
                self._hear(received.record)
        except ShutdownError as error:
            raise ShutdownError(self._end(f"{error}; {self._deaths.first()}")) from error
        return received.record

    def _hear(self, record: Record | None) -> None:
        """What the supervisor says; lines of output are shown and deaths noted here."""
        if isinstance(record, Output):
            show(record.stream, record.text)
        elif isinstance(record, Died):
            self._deaths.hear(record)
            self._note_death(record)
        elif isinstance(record, Serving):
            self._deaths.server_serves()
            self._channel.offer_mailbox(SERVER, "server")
            # Another server may not have heard what the one before it was told.
            for asked in (self._hello, *self._told, *self._asked):
                self._send(SERVER, asked)

    def _listen(self) -> bool:
        """Between operations: as in one, but what is wrong is for the next operation to raise."""
        if self._ended is None:
            try:
                self._hear(self._lifeline.receive_nowait())
                while self._lifeline.has_waiting:  # what came while a mailbox was awaited
                    self._hear(self._lifeline.receive_nowait())
            except ShutdownError as error:
                self._end(f"{error}; {self._deaths.first()}")
            except ReplicaLostError:
                return False  # the server is dead, which ends this link
        return self._ended is None

    def _read(self, peer: bytes, parts: Sequence[Buffer]) -> Record | None:
        try:
            record = decode(parts, BULK_LIMITS)
        except PeerProtocolError as error:
            log.error("dropped a malformed message: %s", error)
            return None
        moment("decoded")
        if log.isEnabledFor(logging.DEBUG):
            log.debug("received %.300r", record)
        return record

    def _wait(
        self,
        what: str,
        wanted: Callable[[Record], R | None],
        lost: Callable[[], float] | None = None,
        name: Callable[[float, str], None] = name_wait,
        late: Callable[[float], None] | None = None,
    ) -> R:
        started = named = time.monotonic()
        if late is not None and self._threads is None:
            named += _WHOM_WITHIN
        while True:
            due = named + _NAME_WAIT_EVERY if late is None else started + _LATE_AFTER
            pause = max(0.0, due - time.monotonic())
            record = self.receive(pause if lost is None else min(pause, lost()))
            if isinstance(record, messages.WorkerRestarted):
                self._take_up(record)
                continue
            if record is not None and (found := wanted(record)) is not None:
                return found
            if record is not None:
                self._keep(record)
            if isinstance(record, messages.Welcome):
                self.server_pid = record.server_pid
            if isinstance(record, messages.Refused) and record.number == 0:  # a message that has no number of its own
                raise to_exception(record.error, self._copy, self._resolve)
            now = time.monotonic()
            if late is not None and now - started >= _LATE_AFTER:
                late(now - started)
                late = None
            if now - named >= _NAME_WAIT_EVERY:
                named = now
                name(now - started, what + self._whom())

    def _whom(self) -> str:
        """Of whom is known that a wait is for them, to end its name with."""
        return self._deaths.restarts_named()

    def _ask(self, request: Record, number: int, answer: type[R]) -> R:
        self._send(SERVER, request)
        self._asked.append(request)
        found = self._wait_for_answer(request, number, answer)
        if isinstance(found, messages.Refused):
            raise to_exception(found.error, self._copy, self._resolve)
        return found

    def _wait_for_answer(self, request: Record, number: int, answer: type[R]) -> R | messages.Refused:
        def wanted(record: Record) -> Record | None:
            if isinstance(record, messages.Refused) and record.number == number:
                return record
            if isinstance(record, answer) and getattr(record, "sequence", getattr(record, "request", None)) == number:
                return record
            return None

        self._left_off = None
        what = f"the answer of the server (pid {self.server_pid}) to {type(request).__name__}"
        try:
            return self._wait(what, wanted)  # type: ignore[return-value]
        except KeyboardInterrupt:
            if hasattr(request, "sequence"):
                self._left_off = (request, number, answer)
            raise
        finally:
            if self._left_off is None:
                self._asked.remove(request)

    def _send(self, peer: bytes, record: Record) -> None:
        if log.isEnabledFor(logging.DEBUG):
            log.debug("send %.300r", record)
        self._channel.send(peer, encode(record))

    def _encoded(self, kind: type[Record], values: Sequence[Any]) -> list[Buffer]:
        """The parts of the message ``kind(*values)``, which need not be built."""
        if log.isEnabledFor(logging.DEBUG):
            log.debug("send %.300r", kind(*values))
        return encode_values(kind, values)

    def _carry(self, request: Callable[[int], Record], answer: type[R]) -> R:
        with self._interrupts.deferred():
            sequence = self._next_sequence()
            return self._ask(request(sequence), sequence, answer)

    def _copy(self, array: Array) -> np.ndarray:
        return np.array(self._view(array))

    def _view(self, array: Array) -> np.ndarray:
        return self._lifeline.segment_of(array).view(array) if isinstance(array.place, Location) else frame_view(array)

    def _next_sequence(self) -> int:
        self._sequence += 1
        return self._sequence

    def _find_input(self, data: np.ndarray) -> Array | None:
        return None if self._inputs is None else self._inputs.find(data)

    # --- life and death -------------------------------------------------------------------------------------------

    def _why_ended(self) -> str:
        return f"{self._ended}; make a new CentralStorageStrategy"

    def _note_death(self, died: Died) -> None:
        if died.role == "server" and died.restarts:
            self._deaths.of_server(died)
            return
        if died.role == "server":
            cause = self._end(f"the server (pid {died.pid}) ended by {died.cause}")
            raise ReplicaLostError(
                f"{cause} and is not started again (server_recovery is off, or max_restarts are used up); its "
                f"variables are gone with it. Make a new CentralStorageStrategy{last_lines(died)}"
            )
        self._deaths.of_worker(died, self.workers)

    def _end(self, reason: str) -> str:
        """Mark the link as ended because of ``reason`` and let go of everything; returns the reason."""
        self._ended = f"its service has ended: {reason}"
        self._release()
        for replica, place in self._threads.hanging if self._threads is not None else ():
            self._ended += f"; replica {replica} still hangs in a thread of this script, at {place}"
        return reason

    def _release(self) -> None:
        if not self._channel.is_closed:
            self._channel.close()
            if self._listener is not None:
                self._listener.stop()
            try:
                self._own_results()
                if self._stop is not None:
                    self._hear_last_words()
            finally:
                self._lifeline.close()
                self._arena.close()
                self._inputs = None
                self._interrupts.close()
                if self._stop is not None:
                    self._stop()

    def _own_results(self) -> None:
        """Where the service of others goes on, its workers place what the next script gets."""
        for results in self._results if self._stop is None else ():
            try:
                results.own()
            except MemoryPlanError as error:
                log.warning("results that the script holds may change when the next script runs: %s", error)

    def _hear_last_words(self) -> None:
        """Ask for the end of the service, and show what its processes print until then."""
        with suppress(ShutdownError):
            self._lifeline.send(messages.Shutdown(self._ended or "shut down"))
            for record in self._lifeline.until_end(_LAST_WORDS):
                if isinstance(record, Output):
                    show(record.stream, record.text)

    def forget_in_child(self) -> None:
        """In a forked child: close the life-line, so that the parent's death is seen at once."""
        self._lifeline.close()
        self._inputs = None  # the parent says what lies there

    def _connect_worker(self, worker: messages.Worker) -> bytes:
        """Connect to a worker, in the place of one before it; its name as a peer."""
        name = f"w{worker.replica}"
        peer = name.encode()
        self._channel.disconnect(peer)
        self._channel.connect(peer, worker.endpoint, self._identity)
        self._channel.offer_mailbox(peer, name)
        return peer

    @property
    def _identity(self) -> bytes:
        """How server and workers know this script."""
        return f"c{self._client}".encode()


def _nothing_known(kind: str, number: int) -> object:
    raise PeerProtocolError(f"{kind} {number} is not known here")


def wait_until_serving(lifeline: SupervisorLink, timeout: float) -> Serving:
    """The supervisor's word that the service is up. Raises :class:`LaunchError` with the reason where it is not.

    The supervisor keeps to the same ``timeout`` (seconds) and can say who is late, so it is given a little longer.
    """
    poller = select.poll()
    poller.register(lifeline.fileno(), select.POLLIN)
    deadline = time.monotonic() + timeout + _SAY_SO
    while poller.poll(int(max(0.0, deadline - time.monotonic()) * 1000)):
        try:
            record = lifeline.receive_nowait()
        except ShutdownError as error:
            raise LaunchError("the supervisor ended before the service was up") from error
        if isinstance(record, Serving):
            return record
        if isinstance(record, messages.StartFailed):
            raise to_exception(record.error, frame_view, _nothing_known)
    raise LaunchError(f"the service was not up within {timeout:.0f} s; raise start_timeout, or see CS_LOG=debug")
