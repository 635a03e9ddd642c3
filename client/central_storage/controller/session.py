"""The script's conversation with its service as the operating system sees it: the channel, the lock, Ctrl-C, memory.

What is said and when is decided in ``core.py``. A :class:`Session` gives the core what it hears and carries out its
commands.
"""

from __future__ import annotations

import logging
import os
import re
import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np

from central_storage.diagnostics.bars import Ticking
from central_storage.diagnostics.logging_setup import show
from central_storage.wire_values.value_codec import from_value, to_exception
from cs_proto import messages, segment_names
from cs_proto.arrays import Array, Location, frame_view
from cs_proto.codec import BULK_LIMITS, WORK_LIMITS, decode, decode_finished, encode
from cs_proto.errors import LaunchError, MemoryPlanError, PeerProtocolError, ReplicaLostError, ShutdownError
from cs_proto.messages import Output, RunFinished, Serving
from cs_proto.peers import SERVER, SUPERVISOR, server_endpoint, worker_endpoint
from cs_proto.records import Buffer, Record, replace
from cs_runtime import open_files
from cs_runtime.shared_memory.arena import Arena
from cs_runtime.trace import Trace
from cs_runtime.transport.channel import Channel
from cs_runtime.transport.supervisor_link import CARRIED, SupervisorLink, checked
from cs_runtime.waits import name_waits_after

from .commands import (
    Command,
    Connect,
    Deliver,
    End,
    Fail,
    Interrupt,
    NameWait,
    OfferMailbox,
    Post,
    Raise,
    Refuse,
    worker_name,
)
from .core import ControllerCore
from .input_segment import InputSegment
from .interrupts import Interrupted, Interrupts
from .output_listener import OutputListener
from .result_leases import ResultLeases
from .waits import Settling, Wait

__all__ = ["Session", "Threads", "log", "wait_until_serving"]

#: Named after the whole link, whichever part of it speaks.
log = logging.getLogger("central_storage.link")

R = TypeVar("R", bound=Record)

# The script looks for mail this long before it sleeps, in seconds: longer than a small step takes.
_PATIENCE = 300e-6
# What is being sent at the end gets this long to leave, in milliseconds.
_LINGER = 100
# A strategy needs so many descriptors at first. A context of ZeroMQ ends the process if it cannot open its own.
_DESCRIPTORS = 16
#: What the server says when an update waits for a kernel.
_COMPILING = re.compile(r"compiling \w+ for \w+(?=, which takes seconds)")
# The supervisor gets this long to say who was not ready in time.
_SAY_SO = 5.0
# It never blocks, so it says this quickly who is late, if it is asked. Seconds.
_REPORTS_WITHIN = 5.0
# The most processes that are named if a service is not up in time.
_NAMED = 8
# The supervisor kills what has not ended 3 s after it was asked to, and hangs up then.
_LAST_WORDS = 5.0


class Threads(Protocol):
    """A service of this process, whose replicas are threads."""

    def interrupt(self, replica: int) -> None:
        """What SIGINT is to a process."""

    @property
    def hanging(self) -> list[tuple[int, str]]:
        """The replicas that were interrupted or told to end and have not heard it, with ``file:line`` of each."""


class Session:
    """The conversation of one controller with its service, from the server's welcome to the end."""

    def __init__(
        self,
        lifeline: SupervisorLink,
        serving: Serving,
        *,
        stop: Callable[[], None] | None = None,
        threads: Threads | None = None,
    ) -> None:
        """Prepare to talk to the server behind ``serving``; :meth:`open` does. ``stop`` ends the service; None where it
        is a launcher's. ``threads``: it is one of this process.

        Raises DescriptorLimitError if this process may open too few files, LaunchError if the run directory is not this
        user's alone.
        """
        open_files.check(_DESCRIPTORS, "a strategy")
        self.core = ControllerCore(
            lifeline.client, os.getpid(), in_process=threads is not None, name_after=name_waits_after()
        )
        self.lifeline = lifeline
        self.threads = threads
        #: Adopting an optimizer while a function is pickled is an operation in another.
        self.lock = threading.RLock()
        self.interrupts = Interrupts()
        #: What ended the service, in words; None while it lives.
        self.ended: str | None = None
        #: How numbers in values become handles; said once by the strategy over this session.
        self.resolve: Callable[[str, int], object] = _nothing_known
        #: By replica: the results in the arena of its worker that the script holds.
        self.results: list[ResultLeases] = []
        self._takes: list[Callable[[Array], np.ndarray]] = []  # by replica: what gives the arrays in its results
        #: Where data that is read ahead lies; None before that is asked for.
        self.inputs: InputSegment | None = None
        self.arena = Arena(lambda: lifeline.segment(segment_names.controller_arena()), find=self._find_input)
        #: Notes where in a step this process is.
        self.trace = Trace()
        self._serving = serving
        self._directory = lifeline.run_directory or checked(serving.run_directory)
        self._stop = stop
        self._process = os.getpid()
        self._channel = Channel(
            lifeline,
            self.interrupts.fileno(),
            self.trace.note,
            self._read,
            linger=_LINGER,
            patience=_PATIENCE,
            on_wake=self.interrupts.woken,
            rings_late=True,
        )
        self._listener: OutputListener | None = None
        #: Shown while the server compiles something that this process waits for.
        self._compiling: Ticking | None = None
        self._is_waiting = False
        # Whether messages are logged, as it was when one was sent last.
        self._is_logging = False

    def open(self) -> None:
        """Say hello to the server and connect to the workers. The caller delays Ctrl-C, which must not come between the
        making of a socket and the note of it: the channel would wait for ever for a socket that it does not know.
        Where it fails, the caller lets go of everything."""
        lifeline = self.lifeline
        lifeline.carry = self._carry
        lifeline.while_waiting = self.interrupts.hear
        self._channel.connect(SERVER, server_endpoint(self._directory))
        self.wait(*self.core.hello(time.monotonic()))
        replicas = len(self.core.workers)
        lifeline.segment(segment_names.controller_arena())
        arenas = map(segment_names.arena, range(replicas))
        self.results = [ResultLeases(arena, partial(lifeline.segment, arena), replicas) for arena in arenas]
        self._takes = [partial(self._take, results) for results in self.results]
        lifeline.keep_times(self.trace, "controller")
        self._channel.offer_mailbox(SERVER, "server")
        for worker in self.core.workers:
            self._connect_worker(worker)
        # A launcher shows what its service prints itself. The supervisor after it wants to be met in time.
        if self._stop is not None or lifeline.may_return:
            self._listener = OutputListener(lifeline.fileno(), self.lock, self._listen)

    @property
    def carries(self) -> bool:
        """Whether this process maps no memory of the service."""
        return bool(self.lifeline.carried_because)

    @property
    def transport(self) -> str:
        """How it talks with the service, in words."""
        return f"{CARRIED}: {self.lifeline.carried_because}" if self.carries else self._serving.transport

    @property
    def run_directory(self) -> str:
        """Where the service is found."""
        return self._serving.run_directory

    @property
    def rung(self) -> int:
        """How many sleeping workers this process has woken by a doorbell."""
        return self._channel.mailboxes.rung

    # --- what is heard -----------------------------------------------------------------------------------------

    def receive(self, timeout: float) -> Record | None:
        """The next record of the server or a worker, or None after ``timeout`` seconds, and earlier where the
        supervisor said something, which is heard here.

        Raises KeyboardInterrupt for a Ctrl-C, ShutdownError where the service is gone, ReplicaLostError where the
        server died.
        """
        self.interrupts.hear()
        try:
            received = self._channel.receive(timeout)
            if received is None or received.peer != SUPERVISOR:
                return None if received is None else received.record
            self._hear(received.record)
        except ShutdownError as error:
            reason = f"{error}; {self.core.first_death()}"
            self.end(reason)
            raise ShutdownError(reason) from error
        return None

    def _hear(self, record: Record | None) -> None:
        """What the supervisor says."""
        if isinstance(record, Output):
            show(record.stream, record.text)
            if self._is_waiting and self._compiling is None and (found := _COMPILING.search(record.text)):
                self._compiling = Ticking(found[0], "kernels")
        elif record is not None:
            self.carry_out(self.core.hear(record, time.monotonic()))

    def _listen(self) -> bool:
        """Between operations: as in one, but what is wrong is for the next operation to raise."""
        if self.ended is None:
            try:
                self._hear(self.lifeline.receive_nowait())
                while self.lifeline.waiting:  # what came while a mailbox was awaited
                    self._hear(self.lifeline.receive_nowait())
            except ShutdownError as error:
                self.end(f"{error}; {self.core.first_death()}")
            except ReplicaLostError:
                return False  # the server is dead, which ends this link
        return self.ended is None

    def _read(self, peer: bytes, parts: Sequence[Buffer]) -> Record | None:
        try:
            record = decode_finished(parts, BULK_LIMITS)
        except PeerProtocolError as error:
            log.error("dropped a malformed message: %s", error)
            return None
        if self.trace.watched[0]:
            self.trace.note("decoded", record.run[0] if isinstance(record, RunFinished) else 0)
        if self._is_logging:
            log.debug("received %.300r", record)
        return record

    # --- waiting, and what the core commands -------------------------------------------------------------------------

    def wait(self, wait: Wait, commands: Sequence[Command] = ()) -> None:
        """Carry out ``commands``, and wait until ``wait`` is over. Raises what the core says, such as KeyboardInterrupt
        for a Ctrl-C, what :meth:`receive` raises, and what handlers of signals raise."""
        core, interrupts = self.core, self.interrupts
        was_waiting, self._is_waiting = self._is_waiting, True
        try:
            now = wait.started
            if commands:
                self.carry_out(commands)
                now = time.monotonic()
            while not wait.is_over:
                if interrupts.pending and isinstance(wait, Settling):
                    self._call_handlers(wait)
                    now = time.monotonic()
                    continue
                pause = core.pause(now)
                if pause == 0.0:
                    self.carry_out(core.tick(now))
                else:
                    try:
                        record = self.receive(pause)
                    except KeyboardInterrupt:
                        self.carry_out(core.interrupt(time.monotonic()))
                    else:
                        if record is not None:
                            self.carry_out(core.hear(record, time.monotonic()))
                if not wait.is_over:
                    now = time.monotonic()
        finally:
            core.leave(wait)
            self._is_waiting = was_waiting
            if self._compiling is not None and not was_waiting:
                self._compiling.close()
                self._compiling = None

    def _call_handlers(self, wait: Settling) -> None:
        """Call the handlers of the signals that have come. They may begin operations, which then wait for the runs
        first. An Exception of a handler cancels the runs, as Ctrl-C does, and is raised when they are over; anything
        else, such as SystemExit, is raised at once."""
        core = self.core
        try:
            self.interrupts.call_handlers()
        except KeyboardInterrupt:
            self.carry_out(core.interrupt(time.monotonic()))
        except Exception as error:  # noqa: BLE001  (raised at the end)
            self.carry_out(core.interrupt(time.monotonic(), error))
        self.require_service()
        if not wait.is_over:
            self.carry_out(core.tick(time.monotonic()))

    def ask(self, request: Record, answer: type[R]) -> R:
        """Ask the server, and wait for its answer. Raises what it refuses with."""
        question, commands = self.core.ask(request, answer, time.monotonic())
        self.wait(question, commands)
        if isinstance(question.answer, messages.Refused):
            raise to_exception(question.answer.error, self.copy, self.resolve)
        found: R = question.answer
        return found

    def carry_out(self, commands: Sequence[Command]) -> None:
        """Do what the core commands, in order. Peers are woken when all of it is done, because a woken peer may preempt
        this process, and the others would wait for their messages."""
        may_ring = False
        try:
            for command in commands:
                if type(command) is Deliver:  # of every step, and no message
                    outcome = self._read_outcome(command.finished)
                    if self.trace.watched[0]:
                        self.trace.note("over", command.finished.run[0])
                    if following := self.core.delivered(outcome, time.monotonic()):
                        self.carry_out(following)
                else:
                    may_ring = True
                    self._do(command)
        finally:
            if may_ring:
                self._channel.mailboxes.ring()

    def _do(self, command: Command) -> None:
        """Do one thing that the core commands, but wake nobody."""
        match command:
            case Post(peer, message, function):
                self._post(peer, self._encoded(message, function))
            case Fail(kind, why):
                raise kind(why) if why else kind()
            case Raise(error):
                raise Interrupted(error)
            case Refuse(error):
                raise to_exception(error, self.copy, self.resolve)
            case Interrupt(replica):
                if self.threads is not None:
                    self.threads.interrupt(replica)
                else:  # who started it can signal it, wherever it runs
                    self.lifeline.send(messages.Interrupt(replica))
            case NameWait():
                self._name_wait(command)
            case Connect(worker):
                log.info("worker w%d (pid %d) takes the place of one that died", worker.replica, worker.pid)
                self._connect_worker(worker)
            case OfferMailbox():
                self._channel.offer_mailbox(SERVER, "server")
            case End(reason):
                self.end(reason)

    def send_run(self, encoded: Sequence[tuple[bytes, list[Buffer]]]) -> None:
        """Send each worker its Run, and then wake them, as in :meth:`carry_out`."""
        self._is_logging = log.isEnabledFor(logging.DEBUG)
        run, send = self.core.run, self._post if self._is_logging else self._channel.send
        try:
            for peer, parts in encoded:
                send(peer, parts)
                if self.trace.watched[0]:
                    self.trace.note("sent", run)
        finally:
            self._channel.mailboxes.ring()

    def _encoded(self, record: Record, function: bytes | None) -> list[Buffer]:
        if function is not None:
            record = replace(record, function=self.arena.share(function))
        return encode(record)

    def _name_wait(self, wait: NameWait) -> None:
        """Of replicas in this process: a wait for one at a debugger's prompt must not write to it, but who does not
        hear Ctrl-C is named."""
        if self.threads is None or not wait.is_run:
            log.warning("waiting %.0f s for %s", wait.seconds, wait.what)
            return
        for replica, place in self.threads.hanging:
            log.warning(
                "replica %d does not react to Ctrl-C: it is at %s, in code that does not come back to Python. Press "
                "Ctrl-C again to shut down",
                replica,
                place,
            )
        log.info("waiting %.0f s for %s", wait.seconds, wait.what)

    def _read_outcome(self, finished: RunFinished) -> list[Any] | BaseException:
        """The results, copied or held since the memory in which they lie is used again; or what to raise in their
        place."""
        try:
            if finished.error is None:
                return [
                    from_value(value, take, self.resolve)
                    for value, take in zip(finished.values, self._takes, strict=True)
                ]
            if finished.error.exception == "SystemExit":  # uncaught, it ends the script without a word
                log.warning("replica %d left run %d by sys.exit", finished.error.replica, finished.run[0])
            replica = finished.error.replica
            node = self.core.workers[replica].node if replica >= 0 else ""
            return to_exception(finished.error, self.copy, self.resolve, node)
        except Exception as error:  # noqa: BLE001  (raised where the results would have come)
            return error

    def _take(self, results: ResultLeases, array: Array) -> np.ndarray:
        taken = results.take(array)
        return self.copy(array) if taken is None else taken

    def copy(self, array: Array) -> np.ndarray:
        """A copy of an array of the service."""
        return np.array(self.view(array))

    def view(self, array: Array) -> np.ndarray:
        """An array of the service, which is to be read at once."""
        return self.lifeline.segment_of(array).view(array) if isinstance(array.place, Location) else frame_view(array)

    def _carry(self, request: Callable[[int], Record], answer: type[R]) -> R:
        with self.interrupts.deferred():
            return self.ask(request(self.core.next_sequence()), answer)

    def _find_input(self, data: np.ndarray) -> Array | None:
        return None if self.inputs is None else self.inputs.find(data)

    def _post(self, peer: bytes, parts: Sequence[Buffer]) -> None:
        self._is_logging = log.isEnabledFor(logging.DEBUG)
        if self._is_logging:
            log.debug("send %.300r", decode(parts, WORK_LIMITS))
        self._channel.send(peer, parts)

    def _connect_worker(self, worker: messages.Worker) -> None:
        """Connect to a worker, in the place of one before it."""
        peer = worker_name(worker.replica)
        self._channel.disconnect(peer)
        self._channel.connect(peer, worker_endpoint(self._directory, worker.replica, worker.incarnation))
        self._channel.offer_mailbox(peer, peer.decode())

    # --- life and death -------------------------------------------------------------------------------------------

    def require_process(self) -> None:
        """Raise ShutdownError in a forked child. To be asked before the lock is taken: a thread that the child does not
        have may hold the child's copy of it."""
        if os.getpid() != self._process:
            raise ShutdownError("this strategy belongs to the process that made it; a forked child cannot use it")

    def require_service(self) -> None:
        """Raise ShutdownError where the service has ended."""
        if self.ended is not None:
            raise ShutdownError(f"{self.ended}; make a new CentralStorageStrategy")

    def end(self, reason: str) -> None:
        """Mark the service as ended because of ``reason`` and let go of everything."""
        self.ended = f"its service has ended: {reason}"
        self.release()
        for replica, place in self.threads.hanging if self.threads is not None else ():
            self.ended += f"; replica {replica} still hangs in a thread of this script, at {place}"

    def say_goodbye(self) -> None:
        """The strategy is shut down: the next script may be served as soon as the server hears this."""
        self.ended = "this strategy was shut down"
        self._own_results()
        with suppress(ShutdownError):
            self.carry_out([Post(SERVER, messages.Goodbye(self.lifeline.client))])

    def release(self) -> None:
        """Let go of everything, and stop the service where it is ours. Idempotent."""
        if not self._channel.is_closed:
            self._channel.close()
            self.trace.detach()
            if self._listener is not None:
                self._listener.stop()
            try:
                self._own_results()
                if self._stop is not None:
                    self._hear_last_words()
            finally:
                self.lifeline.close()
                self.arena.close()
                self.inputs = None
                self.interrupts.close()
                if self._stop is not None:
                    self._stop()

    def leave_to_listener(self, close: Callable[[], None]) -> None:
        """Let the thread that listens call ``close``. The link to a launcher's service stays."""
        if self._listener is not None and self._stop is not None and os.getpid() == self._process:
            self._listener.finish(close)

    def join(self) -> None:
        """Wait for the end of the thread that listens; the caller must not hold the lock."""
        if self._listener is not None:
            self._listener.join()

    def _own_results(self) -> None:
        """Where the service of others goes on, its workers place what the next script gets."""
        for results in self.results if self._stop is None else ():
            try:
                results.own()
            except MemoryPlanError as error:
                log.warning("results that the script holds may change when the next script runs: %s", error)

    def _hear_last_words(self) -> None:
        """Ask for the end of the service, and show what its processes print until then."""
        with suppress(ShutdownError):
            self.lifeline.send(messages.Shutdown(self.ended or "shut down"))
            for record in self.lifeline.until_end(_LAST_WORDS):
                if isinstance(record, Output):
                    show(record.stream, record.text)

    def forget_in_child(self) -> None:
        """In a forked child: close the life-line, so that the parent's death is seen at once."""
        self.lifeline.close()
        self.inputs = None  # the parent says what lies there


def _nothing_known(kind: str, number: int) -> object:
    raise PeerProtocolError(f"{kind} {number} is not known here")


def wait_until_serving(lifeline: SupervisorLink, timeout: float) -> Serving:
    """The supervisor's word that the service is up. Raises :class:`LaunchError` with the reason where it is not.

    The supervisor keeps to the same ``timeout`` (seconds) for the processes that it has started and can say who is
    late, so it is given a little longer. For workers that join it waits without end.
    """
    for record in _heard(lifeline, timeout + _SAY_SO):
        if isinstance(record, Serving):
            return record
    awaited = f"the service was not up within {timeout:.0f} s"
    lifeline.send(messages.ShowService())
    for record in _heard(lifeline, _REPORTS_WITHIN):
        if isinstance(record, Serving):
            return record
        if isinstance(record, messages.ServiceReport):
            awaited += _awaited(record)
            break
    raise LaunchError(f"{awaited}; raise start_timeout, or see CS_LOG=debug")


def _awaited(report: messages.ServiceReport) -> str:
    """For whom a service that is starting waits."""
    late = [each for each in report.processes if each.state == "starting"]
    named = [f"worker {each.rank}" if each.role == "worker" else "the server" for each in late]
    more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
    has_joined = all(each.pid for each in late)
    remedy = "" if has_joined else ": start what is missing with cs-launch --join"
    return f", and waits for {', '.join(named[:_NAMED])}{more}{remedy}" if named else ""


def _heard(lifeline: SupervisorLink, timeout: float) -> Iterator[Record]:
    """What the supervisor says within ``timeout`` seconds while the service is starting. Raises :class:`LaunchError` if
    it has failed."""
    poller = select.poll()
    poller.register(lifeline.fileno(), select.POLLIN)
    deadline = time.monotonic() + timeout
    while poller.poll(int(max(0.0, deadline - time.monotonic()) * 1000)):
        try:
            record = lifeline.receive_nowait()
        except ShutdownError as error:
            raise LaunchError("the supervisor ended before the service was up") from error
        if isinstance(record, Output):  # a server that compiles says so
            show(record.stream, record.text)
        if isinstance(record, messages.StartFailed):
            raise to_exception(record.error, frame_view, _nothing_known)
        if record is not None:
            yield record
