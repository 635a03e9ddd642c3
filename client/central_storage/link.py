"""The client's link to its service: the controller's side of every conversation.

This is the only module of the client that imports zmq and, in :meth:`ServiceLink.receive`, the only place where it
waits. It implements :class:`~central_storage.backend.ControllerBackend`.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
import zmq

from cs_proto import messages, segments
from cs_proto.arena import Arena
from cs_proto.arrays import INLINE_NBYTES, Array, Location
from cs_proto.codec import BULK_LIMITS, decode, encode
from cs_proto.errors import ContextError, LaunchError, PeerProtocolError, ReplicaLostError, ShutdownError
from cs_proto.messages import AssignOp, Counters, Died, Output, RunFinished, Serving, VariableSpec, WriteOp
from cs_proto.recent import HELD_FUNCTIONS, Recent
from cs_proto.records import Record
from cs_proto.schedules import Schedule
from cs_proto.segments import frame_view

from .ahead import Carriage
from .composites import Composite
from .diagnosis import show
from .function import Function, Pickled
from .handles import Handle
from .inputs import Inputs
from .interrupts import Interrupts
from .lifeline import CARRIED, Lifeline
from .listener import IdleListener
from .series import Arguments, Sent, Series
from .shipping import Adopt, digest, dump_arguments, dump_function
from .vocabulary import from_value, to_exception

__all__ = ["ServiceLink"]

_log = logging.getLogger("central_storage.link")

R = TypeVar("R", bound=Record)

# After a worker's death the living replicas get this long to notice before the run is given up without them.
_LOST_TIMEOUT = 2.5
# A wait this long is named, and again after as long.
_NAME_WAIT_EVERY = 10.0
# The supervisor gets this long to say who was not ready in time.
_SAY_SO = 5.0
# The supervisor kills what has not ended 3 s after it was asked to, and hangs up then.
_LAST_WORDS = 5.0
# Variables named in one request to free them.
_FREED_AT_ONCE = 10_000


def _name_wait(seconds: float, what: str) -> None:
    _log.warning("waiting %.0f s for %s", seconds, what)


class Threads(Protocol):
    """A service of this process, whose replicas are threads."""

    def interrupt(self, replica: int) -> None:
        """What SIGINT is to a process."""

    @property
    def hanging(self) -> list[tuple[int, str]]:
        """The replicas that were interrupted or told to end and have not heard it, with ``file:line`` of each."""


class ServiceLink:
    """One controller session. Operations of several threads come one after the other."""

    def __init__(
        self,
        lifeline: Lifeline,
        serving: Serving,
        *,
        seed: int,
        stop: Callable[[], None] | None,
        threads: Threads | None = None,
    ) -> None:
        """Say hello to the server behind ``serving``. ``stop`` ends the service; None where it is a launcher's.
        ``threads``: it is one of this process."""
        self._lifeline = lifeline
        self._threads = threads
        self._stop = stop
        self._seed = seed
        self._client = secrets.token_hex(4)
        self._lock = threading.RLock()  # adopting an optimizer while a function is pickled is an operation in another
        self._process = os.getpid()
        self._sequence = 0
        self._runs = 0
        self._answered = 0  # the last run whose end is known
        self._hello = messages.Hello(messages.PROTOCOL, "controller", self._client, os.getpid())
        self._asked: list[Record] = []  # what another server is asked again
        self._ended: str | None = None
        self._died: dict[int, Died] = {}
        #: The death that matters: the first for good, else the last.
        self.last_death: Died | None = None
        self._restarting: dict[int, Died] = {}
        self.workers: tuple[messages.Worker, ...] = ()
        self._optimizers: dict[int, messages.Optimizer] = {}
        self._resolve: Callable[[str, int], object] = _nothing_known
        self._adopt: Adopt = _nothing_adopted
        self._is_held: Callable[[str, int], object] = _nothing_held
        self._forgotten: deque[int] = deque()  # a thread may add to it at any time, in the midst of an operation too
        self._inputs: Inputs | None = None
        self._arena = Arena(lambda: lifeline.segment(segments.controller_arena()), find=self._find_input)
        self._interrupts = Interrupts()
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._poller.register(lifeline.fileno(), zmq.POLLIN)
        self._poller.register(self._interrupts.fileno(), zmq.POLLIN)
        lifeline.carry = self._carry
        self._server = self._connect(serving.endpoint)
        self._send(self._server, self._hello)
        welcome = self._wait("the server's welcome", lambda r: r if isinstance(r, messages.Welcome) else None)
        self.replicas = welcome.replicas
        self.parameter_device = welcome.parameter_device
        self.compute_devices = tuple(worker.device for worker in welcome.workers)
        self.server_pid = welcome.server_pid
        self.address = serving.run_directory
        self.workers = welcome.workers
        lifeline.segment(segments.controller_arena())
        #: Whether this process maps no memory of the service, and how they talk, in words.
        self.carries = bool(lifeline.carried_because)
        self.transport = f"{CARRIED}: {lifeline.carried_because}" if self.carries else serving.transport
        self._worker_sockets = [self._connect(worker.endpoint) for worker in welcome.workers]
        self._held = [Recent(HELD_FUNCTIONS) for _ in welcome.workers]
        self._frozen: list[set[bytes]] = [set() for _ in welcome.workers]
        self._prepared: messages.Prepare | None = None
        self._latest: Series | None = None  # the one of which runs may be unanswered
        self._sent: deque[Sent] = deque()  # its unanswered ones
        self._cancelling: Series | None = None  # the one whose replicas have been told to give up
        self._early: dict[messages.RunId, RunFinished] = {}
        # A launcher shows what its service prints itself.
        self._listener = None if stop is None else IdleListener(lifeline.fileno(), self._lock, self._listen)

    def resolve_handles(
        self, resolve: Callable[[str, int], object], adopt: Adopt, is_held: Callable[[str, int], object]
    ) -> None:
        """How handles become objects and back, and which object somebody holds; said once by the strategy over this
        link."""
        self._resolve = resolve
        self._is_held = is_held
        self._adopt = adopt

    # --- ControllerBackend --------------------------------------------------------------------------------------

    def run(
        self, function: Callable[..., Any], arguments: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]
    ) -> list[Any]:
        """Run ``function`` once per replica with that replica's (args, kwargs); the results in replica order."""
        with self._operation():
            alone = Series(self, 0)
            self._send_run(alone, function, arguments)
            self._settle(alone)
            return alone.take()

    def series(self, lookahead: int) -> Series:
        """Steps of which ``lookahead`` may be sent before those ahead of them are over."""
        return Series(self, lookahead)

    def send_step(self, series: Series, function: Callable[..., Any], arguments: Arguments) -> None:
        """Send the next step of ``series`` where there is room: at most its lookahead are unanswered."""
        with self._operation(series):
            self._settle(series, series.lookahead)
            if not series.has_failed:
                self._send_run(series, function, arguments)
            if self._threads is not None:  # nothing of the script's runs beside replicas that share its random state
                self._settle(series)

    def settle(self, series: Series, left: int = 0, *, cancel: bool = False) -> None:
        """Wait until at most ``left`` steps of ``series`` are unanswered."""
        with self._lock:
            if self._interrupts.is_entered:
                return  # the garbage collector left a loop in the midst of an operation, which waits for the steps
            if self._ended is not None and series.unanswered:
                series.failed(ShutdownError(self._why_ended()))
                return
            with self._operation(series):
                self._settle(series, left, cancel=cancel)

    def create(self, spec: VariableSpec, value: np.ndarray, site: str) -> messages.Variable:
        """Make a variable. The server checks the plan before a byte of a large value is copied anywhere."""
        with self._operation():
            inline = self._inline(value)
            sequence = self._next_sequence()
            request = messages.Create(self._client, sequence, spec, inline)
            record = self._ask(request, sequence, messages.Created).variable
            if inline is None:
                self._assign(record.number, "assign", value)
            return record

    def assign(self, number: int, op: AssignOp, value: np.ndarray, site: str, *, scalar: bool) -> None:
        """Write a variable once."""
        with self._operation():
            self._assign(number, op, value)

    def write(self, number: int, op: WriteOp, value: np.ndarray, rows: np.ndarray | None, site: str) -> None:
        """Write a variable once, or rows of it."""
        with self._operation():
            self._assign(number, op, value, rows)

    def read(self, number: int) -> np.ndarray:
        """A copy of the variable's current value."""
        with self._operation():
            return self._copy(self._place(number))

    def read_rows(self, number: int, rows: np.ndarray) -> np.ndarray:
        """A copy of these rows of the variable's current value."""
        with self._operation():
            array = self._place(number)
            assert isinstance(array.place, Location)
            return self._lifeline.segment(array.place.segment).rows(array, rows)

    def forget(self, number: int) -> None:
        """Free the variable before the next operation, unless somebody got a handle of it again."""
        self._forgotten.append(number)

    def configure(
        self,
        number: int,
        kind: str,
        hyperparameters: Mapping[str, float],
        schedule: Schedule | None,
        iterations: int,
    ) -> int:
        """Make an optimizer (``number`` 0) or change one; its number."""
        with self._operation():
            sequence = self._next_sequence()
            pairs = tuple(hyperparameters.items())
            request = messages.Configure(self._client, sequence, number, kind, pairs, schedule, iterations)
            return self._ask(request, sequence, messages.Done).number

    def slot(self, optimizer: int, variable: int, slot: str) -> np.ndarray:
        """A copy of what an optimizer keeps beside a variable."""
        with self._operation():
            sequence = self._next_sequence()
            found = self._ask(messages.DescribeSlots(sequence, optimizer, variable), sequence, messages.Slots)
            return self._copy(found.arrays[found.names.index(slot)])

    def assign_slot(self, optimizer: int, variable: int, slot: str, value: np.ndarray) -> None:
        """Write a slot once."""
        with self._operation():
            self._arena.reset()
            sequence = self._next_sequence()
            placed = self._arena.place(value)
            request = messages.AssignSlot(self._client, sequence, optimizer, variable, slot, placed)
            self._ask(request, sequence, messages.Done)

    def variable(self, number: int) -> messages.Variable:
        """The variable's record as it stands."""
        with self._operation():
            sequence = self._next_sequence()
            return self._ask(messages.Describe(sequence, (number,), ()), sequence, messages.Described).variables[0]

    def variables(self) -> tuple[messages.Variable, ...]:
        """Every variable's record, in the order in which they were made."""
        with self._operation():
            sequence = self._next_sequence()
            return self._ask(messages.Get(sequence, (), (), False), sequence, messages.Got).variables

    @contextmanager
    def exclusively(self) -> Iterator[None]:
        """Operations of other threads wait for the end of the block."""
        with self._lock:
            yield

    def optimizer(self, number: int) -> messages.Optimizer:
        """The optimizer's record as it stands."""
        with self._operation():
            return self._describe_optimizer(number).optimizers[0]

    def slotted(self, optimizer: int) -> tuple[int, ...]:
        """The numbers of the variables beside which an optimizer has slots."""
        with self._operation():
            return self._describe_optimizer(optimizer).slotted[0]

    def carrier(self) -> Carriage:
        """What copies an array to where all workers read it; plain memory where there is none. Beside replicas
        in this process no thread reads: a data set that draws random numbers would draw theirs."""
        if self._inputs is None and not self.carries:
            with suppress(ShutdownError), self._operation():
                shared = self._lifeline.segment(segments.inputs())
                if isinstance(shared, segments.Mapping):
                    self._inputs = Inputs(shared)
        return Carriage(np.copy if self._inputs is None else self._inputs.carry, in_thread=self._threads is None)

    def _find_input(self, data: np.ndarray) -> Array | None:
        return None if self._inputs is None else self._inputs.find(data)

    def statistics(self) -> Counters:
        """The server's counters."""
        with self._operation():
            sequence = self._next_sequence()
            return self._ask(messages.Statistics(sequence), sequence, Counters)

    def close(self) -> None:
        """Say goodbye, stop the service where it is ours, let go of everything. Idempotent."""
        if os.getpid() != self._process:
            return
        with self._lock:
            try:
                if self._ended is None:
                    with suppress(ReplicaLostError, ShutdownError), self._operation():
                        pass  # but wait for steps that were sent ahead
            finally:
                if self._ended is None:
                    self._ended = "this strategy was shut down"
                    with suppress(ShutdownError):
                        self._send(self._server, messages.Goodbye(self._client))
                self._release()
        if self._listener is not None:
            self._listener.join()

    # --- the receive seam -----------------------------------------------------------------------------------------

    def receive(self, timeout: float) -> Record | None:
        """The next record for this client, whatever carried it, or None after ``timeout`` seconds.

        Raises KeyboardInterrupt for a Ctrl-C, ShutdownError where the service is gone, ReplicaLostError where the
        server died.
        """
        has_waiting = self._lifeline.has_waiting
        ready = dict(self._poller.poll(0 if has_waiting else int(max(0.0, timeout) * 1000) + 1))
        self._interrupts.raise_pending()
        if has_waiting or self._lifeline.fileno() in ready:
            try:
                return self._hear()
            except ShutdownError as error:
                raise ShutdownError(self._end(f"{error}; {self._first_death()}")) from error
        for socket in ready:
            if isinstance(socket, zmq.Socket):
                return self._read(socket)
        return None

    def _hear(self) -> Record | None:
        """What the supervisor says next; lines of output are shown and deaths noted here."""
        record = self._lifeline.receive_nowait()
        if isinstance(record, Output):
            show(record.stream, record.text)
        elif isinstance(record, Died):
            if self.last_death is None or self.last_death.restarts:
                self.last_death = record
            self._note_death(record)
        elif isinstance(record, Serving):  # another server, which may not have heard what the one before it was told
            for asked in (self._hello, *self._asked):
                self._send(self._server, asked)
        return record

    def _listen(self) -> bool:
        """Between operations: as in one, but what is wrong is for the next operation to raise."""
        if self._ended is None:
            try:
                self._hear()
            except ShutdownError as error:
                self._end(f"{error}; {self._first_death()}")
            except ReplicaLostError:
                return False  # the server is dead, which ends this link
        return self._ended is None

    def _read(self, socket: zmq.Socket[bytes]) -> Record | None:
        frames = socket.recv_multipart(copy=False)
        try:
            record = decode([frames[0].bytes, *(frame.buffer for frame in frames[1:])], BULK_LIMITS)
        except PeerProtocolError as error:
            _log.error("dropped a malformed message: %s", error)
            return None
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("received %.300r", record)
        return record

    def _wait(
        self,
        what: str,
        wanted: Callable[[Record], R | None],
        lost: Callable[[], float] | None = None,
        name: Callable[[float, str], None] = _name_wait,
    ) -> R:
        started = named = time.monotonic()
        while True:
            record = self.receive(_NAME_WAIT_EVERY if lost is None else min(_NAME_WAIT_EVERY, lost()))
            if isinstance(record, messages.WorkerRestarted):
                self._take_up(record)
                continue
            if record is not None and (found := wanted(record)) is not None:
                return found
            if isinstance(record, RunFinished) and record.run > (self._answered,):  # of a step after the one at hand
                self._early[record.run] = record
            if isinstance(record, messages.Welcome):
                self.server_pid = record.server_pid
            if isinstance(record, messages.Refused) and record.number == 0:  # a message that has no number of its own
                raise to_exception(record.error, self._copy, self._resolve)
            now = time.monotonic()
            if now - named >= _NAME_WAIT_EVERY:
                named = now
                name(now - started, what + self._restarts_named())

    def _restarts_named(self) -> str:
        """Who is being started again, which is what the wait is for."""
        return "".join(
            f"; worker w{replica} (pid {died.pid}) ended by {died.cause} and is being started again"
            for replica, died in self._restarting.items()
        )

    def _ask(self, request: Record, number: int, answer: type[R]) -> R:
        def wanted(record: Record) -> Record | None:
            if isinstance(record, messages.Refused) and record.number == number:
                raise to_exception(record.error, self._copy, self._resolve)
            if isinstance(record, answer) and getattr(record, "sequence", getattr(record, "request", None)) == number:
                return record
            return None

        self._send(self._server, request)
        self._asked.append(request)
        try:
            return self._wait(f"the server's answer to {type(request).__name__}", wanted)  # type: ignore[return-value]
        finally:
            self._asked.remove(request)

    def _send(self, socket: zmq.Socket[bytes], record: Record) -> None:
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("send %.300r", record)
        # Copied: without that pyzmq starts a thread and a context of its own for frames from 64 KiB on, and the user's
        # arrays behind a frame may change. Large ones are in the arena.
        socket.send_multipart(encode(record))

    # --- parts of a run -------------------------------------------------------------------------------------------

    def _pickle(self, function: Callable[..., Any]) -> Pickled:
        if isinstance(function, Function):
            return function.pickle_for(self, self._pickle)
        handles: dict[int, object] = {}
        data = dump_function(function, partial(self._adopt_into, handles))
        return Pickled(data, digest(data), handles)

    def _adopt_into(self, handles: dict[int, object], handle: Handle | Composite) -> tuple[str, int]:
        handles[id(handle)] = handle
        return self._adopt(handle)

    def _send_run(self, series: Series, function: Callable[..., Any], arguments: Arguments) -> None:
        self._refuse_after_death()
        data, name, handles = self._pickle(function)
        # A frozen function lives on in the workers, where it may keep what it is given.
        adopt = partial(self._adopt_into, handles) if isinstance(function, Function) else self._adopt
        # Placed when all is pickled: what is adopted meanwhile may be brought by way of the arena, too.
        pickles = [dump_arguments(args, kwargs, adopt, _in_place) for args, kwargs in arguments]
        self._runs += 1
        run, parts = (self._runs,), series.lookahead + 1
        series.number = series.number or run[0]
        self._arena.reset((run[0] - series.number) % parts, parts)
        kept = [buffer for _, buffers in pickles for buffer in buffers]
        step = (series.number, series.lookahead) if series.lookahead else (0, 0)
        sent = Sent(run, [], data, kept, [], [])
        if series.lookahead:
            sent = Sent(run, [], data, kept, list(map(copy, self._held)), list(map(copy, self._frozen)))
        frozen = isinstance(function, Function)
        prepare = messages.Prepare(tuple(map(str, sys.path)), os.getcwd())
        for replica, (socket, (pickled, buffers)) in enumerate(zip(self._worker_sockets, pickles, strict=True)):
            if prepare != self._prepared and self._threads is None:  # threads have the script's own path
                self._send(socket, prepare)
            carried = None if self._is_function_held(replica, name, frozen) else self._arena.share(data)
            placed = tuple(map(self._arena.share, buffers))
            what = (name, carried, frozen, self._arena.share(pickled), placed)
            sent.messages.append(messages.Run(run, replica, self._seed, *what, *step))
            self._send(socket, sent.messages[-1])
        self._prepared = prepare
        series.unanswered.append(sent)
        self._latest, self._sent = series, series.unanswered

    def _is_function_held(self, replica: int, name: bytes, frozen: bool) -> bool:
        """Whether a worker has the bytes of a function already; it has them from now on."""
        if not frozen:
            return self._held[replica].touch(name)
        is_held = name in self._frozen[replica]
        self._frozen[replica].add(name)
        return is_held

    def _take_up(self, restarted: messages.WorkerRestarted) -> None:
        """A worker is in the place of one that died: send it what it has to carry out yet, from the run on that the
        server names. Arguments still lie where they were; it holds no function."""
        worker = restarted.worker
        replica = worker.replica
        if worker.incarnation <= self.workers[replica].incarnation:
            return
        _log.info("worker w%d (pid %d) takes the place of one that died", replica, worker.pid)
        self._restarting.pop(replica, None)
        self.workers = (*self.workers[:replica], worker, *self.workers[replica + 1 :])
        self._poller.unregister(self._worker_sockets[replica])
        self._worker_sockets[replica].close(linger=0)
        socket = self._worker_sockets[replica] = self._connect(worker.endpoint)
        self._held[replica], self._frozen[replica] = Recent(HELD_FUNCTIONS), set()
        if self._prepared is not None and self._threads is None:
            self._send(socket, self._prepared)
        is_first = True
        for sent in self._sent:
            if sent.held:
                sent.held[replica], sent.frozen[replica] = copy(self._held[replica]), copy(self._frozen[replica])
            if sent.run < restarted.run:
                continue
            if is_first:
                self._send(self._server, messages.Resent(sent.run, replica))
            is_first = False
            run = sent.messages[replica]
            is_held = self._is_function_held(replica, run.digest, run.frozen)
            self._send(socket, replace(run, function=None if is_held else self._arena.share(sent.function)))
        if self._cancelling is not None and self._cancelling.unanswered:
            self._send(socket, _cancel_of(self._cancelling))
            self._lifeline.send(messages.Interrupt(replica))

    def _settle(self, series: Series, left: int = 0, *, cancel: bool = False) -> None:
        """Wait until at most ``left`` runs of ``series`` are unanswered. Ctrl-C cancels the first of them and waits for
        all; a second one ends the service.

        The server hears of a Ctrl-C first, and the replicas when it has: if their interrupted returns came before the
        Cancel, it would commit what they agreed on.
        """
        try:
            self._wait_for_runs(series, left, cancel)
        finally:
            self._asked.clear()  # nobody is to hear of a Cancel again

    def _wait_for_runs(self, series: Series, left: int, cancel: bool) -> None:
        heard = 0  # number of the question whose answer says that the server has got the Cancel
        if cancel and series.unanswered:
            heard = self._cancel(series)
        while len(series.unanswered) > (0 if heard else left):
            run = series.unanswered[0].run
            answer: Record | None
            try:
                answer = self._early.pop(run, None)
                if answer is None:
                    named = _name_wait if self._threads is None else self._name_hanging
                    wanted = partial(_ends_or_answers, run, heard)
                    answer = self._wait(f"run {run[0]}", wanted, self._until_lost, named)
            except KeyboardInterrupt:
                if heard:
                    self._end("a second Ctrl-C shut it down")
                    raise
                heard, cancel = self._cancel(series), False
            except Exception as error:
                series.failed(error)
                if self._ended is not None:
                    raise
            else:
                if isinstance(answer, RunFinished):
                    self._record(series, answer)
                else:
                    self._interrupt_workers(series)
        self._cancelling = None
        if heard and not cancel:
            raise KeyboardInterrupt

    def _record(self, series: Series, finished: RunFinished) -> None:
        """What came of the first unanswered run of ``series``, copied: the memory in which it lies is used again."""
        self._answered = finished.run[0]
        self._latest = None  # a handle among the results may be asked for in an operation that waits for no step
        try:
            outcome = self._read_outcome(finished)
        finally:
            self._latest = series
        if finished.error is None:
            series.answered(outcome)
            return
        assert isinstance(outcome, BaseException)
        for sent in series.failed(outcome)[:1]:  # workers drop it and the rest, with the functions these brought
            self._held, self._frozen = sent.held, sent.frozen

    def _read_outcome(self, finished: RunFinished) -> list[Any] | BaseException:
        """The results, or what to raise in their place."""
        try:
            if finished.error is None:
                return [from_value(value, self._copy, self._resolve) for value in finished.values]
            if finished.error.exception == "SystemExit":  # uncaught, it ends the script without a word
                _log.warning("replica %d left run %d by sys.exit", finished.error.replica, finished.run[0])
            return to_exception(finished.error, self._copy, self._resolve)
        except Exception as error:  # noqa: BLE001  (raised where the results would have come)
            return error

    def _cancel(self, series: Series) -> int:
        """Tell the server to give up what is not over; the number of a question that it answers when it has heard."""
        heard = self._next_sequence()
        self._asked = [_cancel_of(series), messages.Statistics(heard)]
        for asked in self._asked:
            self._send(self._server, asked)
        return heard

    def _interrupt_workers(self, series: Series) -> None:
        self._cancelling = series
        for socket in self._worker_sockets:
            self._send(socket, _cancel_of(series))
        for worker in self.workers:
            if worker.replica in self._died or worker.replica in self._restarting:
                continue
            if self._threads is not None:
                self._threads.interrupt(worker.replica)
                continue
            self._lifeline.send(messages.Interrupt(worker.replica))  # who started it can signal it, wherever it runs

    def _name_hanging(self, seconds: float, what: str) -> None:
        """Of replicas in this process: a wait for one at a debugger's prompt must not write to it, but who does not
        hear Ctrl-C is named."""
        assert self._threads is not None
        for replica, place in self._threads.hanging:
            _log.warning(
                "replica %d does not react to Ctrl-C: it is at %s, in code that does not come back to Python. Press "
                "Ctrl-C again to shut down",
                replica,
                place,
            )
        _log.info("waiting %.0f s for %s", seconds, what)

    def _until_lost(self) -> float:
        if not self._died:
            return _NAME_WAIT_EVERY
        left = self._lost_deadline - time.monotonic()
        if left <= 0:
            self._refuse_after_death()
        return left

    # --- parts of the other operations ----------------------------------------------------------------------------

    def _assign(self, number: int, op: WriteOp, value: np.ndarray, rows: np.ndarray | None = None) -> None:
        mark = self._arena.mark()  # of a run that is being sent: it may be what takes a local variable along
        try:
            sequence = self._next_sequence()
            place = self._arena.place
            indices = None if rows is None else place(rows)
            self._ask(
                messages.Assign(self._client, sequence, number, op, place(value), indices), sequence, messages.Done
            )
        finally:
            self._arena.release(mark)

    def _free_forgotten(self) -> None:
        numbers = []
        for number in [self._forgotten.popleft() for _ in range(min(len(self._forgotten), _FREED_AT_ONCE))]:
            handle = self._is_held("variable", number)
            if handle is None:
                numbers.append(number)
            else:  # it came back, as the result of a run
                weakref.finalize(handle, self.forget, number).atexit = False
        if numbers:
            sequence = self._next_sequence()
            self._ask(messages.Free(self._client, sequence, tuple(numbers)), sequence, messages.Done)
            for socket in self._worker_sockets:
                self._send(socket, messages.Forget(tuple(numbers)))

    def _describe_optimizer(self, number: int) -> messages.Described:
        sequence = self._next_sequence()
        return self._ask(messages.Describe(sequence, (), (number,)), sequence, messages.Described)

    def _inline(self, value: np.ndarray) -> Array | None:
        return self._arena.place(value) if value.nbytes <= INLINE_NBYTES else None

    def _carry(self, request: Callable[[int], Record], answer: type[R]) -> R:
        with self._interrupts.deferred():
            sequence = self._next_sequence()
            return self._ask(request(sequence), sequence, answer)

    def _place(self, number: int) -> Array:
        sequence = self._next_sequence()
        return self._ask(messages.Get(sequence, (number,), (), False), sequence, messages.Got).arrays[0]

    def _copy(self, array: Array) -> np.ndarray:
        return np.array(self._view(array))

    def _view(self, array: Array) -> np.ndarray:
        place = array.place
        return self._lifeline.segment(place.segment).view(array) if isinstance(place, Location) else frame_view(array)

    def _next_sequence(self) -> int:
        self._sequence += 1
        return self._sequence

    # --- life and death -------------------------------------------------------------------------------------------

    @contextmanager
    def _operation(self, series: Series | None = None) -> Iterator[None]:
        """One operation: the lock, the check that the link lives, and Ctrl-C only at safe points. It comes after the
        steps that were sent ahead, unless it is one of the same ``series``."""
        # Asked before the lock: a thread that the child does not have may hold the child's copy of it.
        if os.getpid() != self._process:
            raise ShutdownError("this strategy belongs to the process that made it; a forked child cannot use it")
        with self._lock:
            if self._ended is not None:
                raise ShutdownError(self._why_ended())
            with self._interrupts:
                if self._latest is not None and self._latest is not series:
                    self._settle(self._latest)
                if self._forgotten and series is None:
                    self._free_forgotten()
                yield

    def _why_ended(self) -> str:
        return f"{self._ended}; make a new CentralStorageStrategy"

    def _refuse_after_death(self) -> None:
        for died in self._died.values():
            raise ReplicaLostError(
                f"replica {died.rank} (worker w{died.rank}, pid {died.pid}) ended by {died.cause}. Updates that were "
                "committed before stand and variables can still be read; make a new CentralStorageStrategy to train on"
                f"{_tail(died)}"
            )

    def _note_death(self, died: Died) -> None:
        if died.role == "server" and died.restarts:
            return  # the supervisor has said so to everybody
        if died.role == "server":
            cause = self._end(f"the server (pid {died.pid}) ended by {died.cause}")
            raise ReplicaLostError(
                f"{cause} and is not started again (server_recovery is off, or max_restarts are used up); its "
                f"variables are gone with it. Make a new CentralStorageStrategy{_tail(died)}"
            )
        if died.restarts:
            known = next((worker for worker in self.workers if worker.replica == died.rank), None)
            if known is None or known.incarnation <= died.incarnation:  # else the server was quicker
                self._restarting[died.rank] = died
            return
        self._restarting.pop(died.rank, None)
        self._died[died.rank] = died
        self._lost_deadline = time.monotonic() + _LOST_TIMEOUT

    def _first_death(self) -> str:
        for died in self._died.values():
            return f"worker w{died.rank} (pid {died.pid}) had ended by {died.cause}"
        return "nothing was said about why"

    def _end(self, reason: str) -> str:
        """Mark the link as ended because of ``reason`` and let go of everything; returns the reason."""
        self._ended = f"its service has ended: {reason}"
        self._release()
        for replica, place in self._threads.hanging if self._threads is not None else ():
            self._ended += f"; replica {replica} still hangs in a thread of this script, at {place}"
        return reason

    def _release(self) -> None:
        if not self._context.closed:
            self._context.destroy(linger=100)
            if self._listener is not None:
                self._listener.stop()
            try:
                if self._stop is not None:
                    self._hear_last_words()
            finally:
                self._lifeline.close()
                self._arena.close()
                self._inputs = None
                self._interrupts.close()
                if self._stop is not None:
                    self._stop()

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

    def _connect(self, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 100)
        socket.setsockopt(zmq.IDENTITY, f"c{self._client}".encode())
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, 10)  # the peer may be being started again
        socket.connect(endpoint)
        self._poller.register(socket, zmq.POLLIN)
        return socket


def _cancel_of(series: Series) -> messages.Cancel:
    return messages.Cancel(series.unanswered[0].run, len(series.unanswered) - 1)


def _in_place(data: memoryview) -> memoryview:
    return data


def _ends_or_answers(run: messages.RunId, number: int, record: Record) -> RunFinished | Counters | None:
    if isinstance(record, RunFinished) and record.run == run:
        return record
    return record if isinstance(record, Counters) and record.request == number else None


def _tail(died: Died) -> str:
    return f". Its last lines:\n{died.log}" if died.log else ""


def _nothing_known(kind: str, number: int) -> object:
    raise PeerProtocolError(f"{kind} {number} is not known here")


def _nothing_held(kind: str, number: int) -> object:
    return None


def _nothing_adopted(handle: Handle | Composite) -> tuple[str, int]:
    raise ContextError(f"{handle!r} cannot be sent before its strategy is made")


def wait_until_serving(lifeline: Lifeline, timeout: float) -> Serving:
    """The supervisor's word that the service is up. Raises :class:`LaunchError` with the reason where it is not.

    The supervisor keeps to the same ``timeout`` (seconds) and can say who is late, so it is given a little longer.
    """
    poller = zmq.Poller()
    poller.register(lifeline.fileno(), zmq.POLLIN)
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
