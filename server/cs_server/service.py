"""The server's shell: the channel and the clock on one side, the engine on the other, one plain loop between.

:meth:`Service.turn` is the only place where the server waits. What arrives becomes events; the commands that follow
are carried out in order before anything else is heard. Nothing is decided here. :mod:`.serving` runs it.
"""

from __future__ import annotations

import logging
import mmap
import os
import signal
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from cs_proto import marks, step_times
from cs_proto import segment_names as names
from cs_proto.arrays import Location, array_of
from cs_proto.codec import BULK_LIMITS, LIMITS, Decoder, encode
from cs_proto.errors import (
    CentralStorageError,
    ConfigurationError,
    MemoryPlanError,
    PeerProtocolError,
    ShutdownError,
)
from cs_proto.failures import error_of
from cs_proto.frozen import with_changes
from cs_proto.messages import (
    PROTOCOL,
    ApplyPoint,
    Appoint,
    Ask,
    AssignAll,
    AssignSlot,
    ClientGone,
    Counters,
    Create,
    CreatePoint,
    Describe,
    DescribeSlots,
    Died,
    Fetch,
    Get,
    Got,
    Hello,
    Introduce,
    Kill,
    Locate,
    MadeProgress,
    Note,
    Offer,
    Put,
    Refused,
    Register,
    Return,
    RunFinished,
    ShowStacks,
    Statistics,
    StepFinished,
    Welcome,
    WorkerRestarted,
    run_of,
)
from cs_proto.records import Buffer, Record, replace
from cs_runtime import open_files, trace
from cs_runtime.failpoints import failpoint
from cs_runtime.logs import Complaints
from cs_runtime.transport import channel
from cs_runtime.transport.channel import SUPERVISOR, Channel
from cs_runtime.transport.supervisor_link import SupervisorLink, peer_of

from .command_runner import open_runner
from .config import ServerConfig
from .engine.engine import Engine
from .engine.store import address_budget
from .engine.store.account import Account, account_nbytes
from .engine.store.address_budget import Addresses
from .engine.store.control_log import ControlLog
from .engine.store.state import Config as EngineConfig
from .events import (
    ClientLeft,
    Command,
    Dismiss,
    EndWorker,
    Event,
    Finished,
    Listening,
    Log,
    ProcessDied,
    Received,
    Send,
    Tick,
    TraceWorker,
)
from .large_answers import LARGE_NBYTES, LargeAnswers
from .memory.array_places import arrays_of
from .memory.segment_server import carry
from .memory.segments import Segments
from .numerics import Numerics
from .step_program import StepProgram
from .unsent import Unsent

__all__ = ["Service", "identity_of"]

_log = logging.getLogger("cs_server.service")
_moment = trace.moments("server")

_TICK = 1.0
# The server looks for mail this long before it sleeps, in seconds.
_PATIENCE = 50e-6
# Seconds between two looks at ZeroMQ (as from observers) while mail comes without a pause.
_LOOK_EVERY = 1e-3
# Answers that are being sent when the process ends get this long to leave, in milliseconds.
_LINGER = 200
# Messages that a peer does not take wait in this process, which counts them, and one of them in the socket.
_UNREAD = 1
# The notes of so many Returns of each worker are remembered.
_CHECKED = 32
_QUESTIONS = (Get, Describe, DescribeSlots, Fetch, Locate, Statistics)


class Service:
    """One server's loop. Used by one thread."""

    def __init__(
        self,
        config: ServerConfig,
        supervisor: SupervisorLink,
        segments: Segments,
        wake: int,
    ) -> None:
        """``wake`` is a descriptor from which signal numbers are read.

        Raises ConfigurationError if it cannot listen at the path of ``config``.
        """
        self.is_told_to_end = False
        self._listens = False
        self._config = config
        self._supervisor = supervisor
        self._segments = segments
        self._wake = wake
        self._has_worked = False
        self._is_logged = _log.isEnabledFor(logging.DEBUG)  # a process is told at its start; asked at every message
        addresses = address_budget.divided(config.address_nbytes, config.machine_nbytes, config.replicas)
        self._arena_nbytes = addresses.arena
        account = _open_account(config, segments)
        self._engine = _open_engine(config, segments, addresses, account)
        self._numerics = Numerics(segments, self._engine.variable)
        self._runner = open_runner(config, segments, addresses, self._engine.results_nbytes, self._numerics)
        self._next_tick = time.monotonic() + _TICK
        self._decoder = Decoder()
        self._complaints = Complaints(_log)
        self._channel = _channel(config, supervisor, wake, self._heard, self._mark_of, self._woken)
        self._program = StepProgram(self._channel.mailboxes, self._runner, account, self._passed, self._prepare_other)
        # By worker, the Returns to which its marks may refer.
        self._bases: defaultdict[bytes, marks.Bases] = defaultdict(marks.Bases)
        # By worker, notes whose arrays lie where they may. The decoder finds the same ones again.
        self._checked: dict[bytes, deque[tuple[Note, ...]]] = {}
        # The message that was sent last. Its receivers are woken when all of them have it.
        self._sent: tuple[Record, list[Buffer]] | None = None
        self._unsent = Unsent(self._put)
        # By client, what controllers hear when the workers have been told of them: a Welcome, then replaced workers.
        self._welcomes: dict[str, list[tuple[bytes, Record]]] = {}
        # The last question of each peer that has not taken earlier messages. It is handled at the next try to send.
        self._later: dict[bytes, Record] = {}
        self._retry_at = self._late_pause = 0.0
        self._large = LargeAnswers()

    def prepare(self) -> None:
        """Make what every run needs, and continue the work of an earlier server."""
        self._segments.make(names.controller_arena(), self._arena_nbytes, "controller")
        self._segments.make(names.inputs(), self._arena_nbytes, "controller")
        for replica in range(self._config.replicas):
            self._segments.make(names.arena(replica), self._arena_nbytes, f"w{replica}")
        self._settle(self._carry_out(self._engine.resume()))

    def keep_times(self) -> None:
        """Note the step times of this process from now on, and make the rings of the others. The service must be a
        process of its own: a process has one trace of a server."""
        segments, keeper = self._segments, trace.trace_of("server")
        try:
            segments.make(names.times("server"), step_times.NBYTES, "")
            for process in ["controller", *(f"w{replica}" for replica in range(self._config.replicas))]:
                segments.make(names.times(process), step_times.NBYTES, process)
            ring = segments.get(names.times("server"))
            ring.reserve(0, step_times.NBYTES)
            keeper.attach(ring.memory)
        except MemoryPlanError as error:
            _log.warning("no step times are kept: %s", error)

    def close(self) -> None:
        """Close the listening socket and the mailboxes, end the threads of the arithmetic, and give the GPU back."""
        self._channel.close()
        self._runner.close()

    def listen(self) -> None:
        """Begin to hear workers and clients."""
        self._channel.admit()
        self._listens = True
        self._settle([Listening()])

    def turn(self) -> None:
        """Wait for the next event, and carry out all that follows from it. Raises ShutdownError if the supervisor has
        gone."""
        for event in self._next_events():
            self._program.stop()  # what the engine hears now comes before the step
            if isinstance(event, Received) and _may_plan_memory(event.record):
                self._settle([self._runner.available()])
            self._settle([event])
        if not self._program.is_ready:
            self._prepare_step()

    def _prepare_step(self, base: Return | None = None) -> None:
        """Have the program carry out the next step, if it may: the one in which the first worker names ``base``, or the
        one that is expected."""
        step = self._engine.next_step(base)
        if step is not None and not self._program.prepare(step, self._bases):
            self._engine.refuse_steps()

    def _prepare_other(self, peer: bytes, number: int) -> None:
        """The first worker, ``peer``, names another base than that of the step that is prepared."""
        if (base := self._bases[peer].get(number)) is not None:
            self._prepare_step(base)

    def _passed(self) -> None:
        """The program has carried out a step."""
        if self._channel.mailboxes.unrung:
            self._ring()
        _moment("sent", self._program.run)
        answer = self._engine.passed(time.monotonic())
        self._send(answer.peer, answer.record)
        self._ring()
        self._prepare_step()
        _moment("prepared")

    def _next_events(self) -> Iterator[Event]:
        """The next events: what arrived over any way, and the tick if it is due. A malformed message is refused at once
        and is not an event."""
        self._ring()
        yield from self._tried_again()
        due = min(self._next_tick, self._retry_at) if self._unsent or self._later else self._next_tick
        received = self._channel.receive(max(0.0, due - time.monotonic()))
        if received is not None and received.peer == SUPERVISOR:
            yield from self._notice(received.record)
        elif received is not None:
            yield from self._events(received)
        if time.monotonic() >= self._next_tick:
            self._next_tick = time.monotonic() + _TICK
            if self._listens:  # otherwise a peer that seems silent may have sent something
                yield Tick()

    def _woken(self) -> None:
        if signal.SIGTERM in os.read(self._wake, 64):
            self.is_told_to_end = True

    def _notices(self) -> Iterator[Event]:
        """The notices of the supervisor so far."""
        while (record := self._supervisor.receive_nowait()) is not None:
            yield from self._notice(record)

    def _notice(self, record: Record) -> Iterator[Event]:
        _log.debug("from the supervisor: %.300r", record)
        for held in self._welcomes.pop(record.client, ()) if isinstance(record, Appoint) else ():
            self._transmit(*held)
        if not isinstance(record, Died | ClientGone):
            return
        if isinstance(record, ClientGone) and self._supervisor.is_observer(record.client):
            return
        peer = identity_of(record)
        for received in self._channel.forget(peer):  # mail that it posted before
            yield from self._events(received)
        self._bases.pop(peer, None)
        self._checked.pop(peer, None)
        yield ProcessDied(record) if isinstance(record, Died) else ClientLeft(record.client)

    def _events(self, received: channel.Received) -> Iterator[Event]:
        """The event of a message, if it is one."""
        peer, heard, parts = received
        if isinstance(heard, Offer):
            accepted = self._channel.open_mailbox(peer, heard)
            if accepted is not None:
                self._transmit(peer, accepted)
            return
        failpoint("server.heard")
        if isinstance(heard, Hello | Register) and (why := _why_not(heard, self._supervisor.peers[peer])):
            self._send(peer, Refused(0, error_of(PeerProtocolError(why))))
            return
        if isinstance(heard, Hello) and heard.role == "observer" and not open_files.may_have_guests():
            self._send(peer, Refused(0, error_of(open_files.shortage(f"the server (pid {os.getpid()})"))))
            return
        if isinstance(heard, _QUESTIONS) and self._must_wait(peer, heard):
            return
        if isinstance(heard, Hello | Register):
            yield from self._notices()  # of clients and workers that left or died before
        if isinstance(heard, Put):
            self._send(peer, carry(heard, partial(self._engine.writer, peer), self._segments))
        else:
            yield from self._question(peer, heard, parts)

    def _must_wait(self, peer: bytes, question: Record) -> bool:
        """Whether ``question`` is not to be answered now: its answer is on its way, or its peer has not taken earlier
        messages. A peer has one question at a time, so a new question replaces the older one."""
        if self._large.is_repeated(peer, question, time.monotonic()):
            return True
        if peer in self._unsent or peer in self._later:
            self._later[peer] = question
            return True
        return False

    def _tried_again(self) -> Iterator[Event]:
        """Try again to send the messages that wait, and handle the questions of peers that may take an answer now."""
        if not (self._unsent or self._later) or time.monotonic() < self._retry_at:
            return
        self._unsent.try_again()
        asked = {peer: question for peer, question in self._later.items() if peer not in self._unsent}
        for peer, question in asked.items():
            del self._later[peer]
            yield from self._question(peer, question)
        is_vain = bool(asked) and all(peer in self._later for peer in asked)
        self._late_pause = min(1.0, 2 * self._late_pause) if is_vain else 0.001
        self._retry_at = time.monotonic() + max(self._unsent.pause if self._unsent else 0.0, self._late_pause)

    def _question(self, peer: bytes, question: Record, parts: Sequence[Buffer] = ()) -> Iterator[Event]:
        if isinstance(question, Fetch):
            self._send(peer, carry(question, partial(self._engine.writer, peer), self._segments))
        else:
            yield Received(peer, question, parts)

    def _heard(self, peer: bytes, parts: Sequence[Buffer]) -> Record | None:
        """The record in ``parts``. None if there is none; the peer is then told."""
        try:
            record = self._decoder.decode(parts)
            self._check_places(peer, record)
        except PeerProtocolError as error:
            self._complaints.warn(peer, "refused a message of %r: %s", peer, error)
            self._send(peer, Refused(0, error_of(error)))
            return None
        if self._is_logged:
            _log.debug("from %r: %.300r", peer, record)
        if type(record) is Return:
            self._bases[peer].keep(record)
        if isinstance(record, Ask | Return):
            self._numerics.heard(record)
        _moment("decoded", run_of(record))
        return record

    def _mark_of(self, peer: bytes, run: int, body: bytes) -> Record | None:
        """The Return that a mark stands for, as :meth:`_heard` has the record of a message."""
        try:
            returned = self._bases[peer].returned(run, body)
            if marks.sparse_of(returned.notes):
                self._check_places(peer, returned)
        except PeerProtocolError as error:
            self._complaints.warn(peer, "refused a mark of %r: %s", peer, error)
            self._send(peer, Refused(0, error_of(error)))
            return None
        _log.debug("from %r: the mark of run %d", peer, run)
        _moment("decoded", run)
        self._numerics.heard(returned)
        return returned

    def _check_places(self, peer: bytes, record: Record) -> None:
        """Raise PeerProtocolError if an array of ``record`` lies in a segment that ``peer`` may not write, or outside
        of every segment: a commit that reads the array must not fail."""
        notes = record.notes if type(record) is Return and record.value and not record.value.arrays else ()
        if notes and any(notes is each for each in self._checked.get(peer, ())):
            return  # a segment keeps its writer, and becomes no shorter
        located = [array for array in arrays_of(record) if isinstance(array.place, Location)]
        if not located:
            return
        try:
            writer = self._engine.writer(peer)
        except CentralStorageError:
            return  # the engine refuses all messages of such a peer, with the reason
        for array in located:
            assert isinstance(array.place, Location)
            name = array.place.segment
            if self._segments.writer(name) != writer:
                raise PeerProtocolError(f"{writer} may not write segment {name}, in which an array of its message lies")
            try:
                self._segments.view(array)
            except ShutdownError:
                raise
            except CentralStorageError as error:
                raise PeerProtocolError(str(error)) from error
        if notes:
            self._checked.setdefault(peer, deque(maxlen=_CHECKED)).append(notes)

    def _settle(self, events: Iterable[Event]) -> None:
        """Have the engine hear ``events`` and all that follows from them."""
        pending = deque(events)
        while pending:
            commands = self._engine.handle(pending.popleft(), time.monotonic())
            _moment("decided")
            failpoint("server.decided")
            pending.extend(self._carry_out(commands))

    def _carry_out(self, commands: Iterable[Command]) -> list[Event]:
        """Carry out ``commands`` in order. Return the events about their outcomes."""
        outcomes: list[Event] = []
        for command in commands:
            if type(command) is not Send:
                self._ring()  # it may take long
            match command:
                case Send(peer, record, question):
                    self._say(peer, self._runner.store.prepared(record), question)
                case EndWorker(replica, incarnation, reason):
                    self._supervisor.send(Kill(replica, incarnation, reason))
                case TraceWorker(replica, incarnation):
                    self._supervisor.send(ShowStacks(replica, incarnation))
                case Dismiss(client):
                    self._supervisor.send(ClientGone(client))
                case Log(text, slow):
                    _log.log(logging.WARNING if slow else logging.INFO, "%s", text)
                case _:
                    outcome = self._runner.carry_out(command)
                    outcomes += [] if outcome is None else [outcome]
                    if isinstance(outcome, Finished):
                        self._say_progress()
        self._ring()
        return outcomes

    def _say_progress(self) -> None:
        """Tell the supervisor, once, that this server has made progress."""
        if not self._has_worked:
            self._has_worked = True
            self._supervisor.send(MadeProgress(self._config.incarnation))

    def _say(self, peer: bytes, record: Record, question: Get | None) -> None:
        if question is not None and isinstance(record, Got):
            self._answer(peer, question, record)
        else:
            self._send(peer, record)

    def _send(self, peer: bytes, record: Record) -> None:
        failpoint("server.send")
        if type(record) is Welcome and (client := self._controller_at(peer)):
            # The workers must know the controller before it sends them anything.
            self._welcomes[client] = [(peer, record)]
            self._supervisor.send(Appoint(client))
            return
        if type(record) is WorkerRestarted and (held := self._welcomes.get(self._controller_at(peer))):
            held.append((peer, record))  # without a Welcome, the controller would ignore it
            return
        if type(record) is Counters:
            mail = self._channel.mailboxes
            record = replace(record, posted=mail.posted, doorbells=mail.rung + mail.woken)
            record = self._numerics.counted(record)
        self._transmit(peer, record)

    def _controller_at(self, peer: bytes) -> str:
        who = self._supervisor.peers.get(peer)
        return who.client if who is not None and who.role == "controller" else ""

    def _transmit(self, peer: bytes, record: Record) -> None:
        if self._is_logged:
            _log.debug("to %r: %.300r", peer, record)
        if type(record) is StepFinished and not record.failed and self._channel.mailboxes.mark(peer, record.run[0]):
            _moment("sent", record.run[0])
            return
        if self._sent is None or self._sent[0] is not record:
            if self._channel.mailboxes.unrung:
                self._ring()
            self._sent = record, encode(record, BULK_LIMITS)
        parts = self._sent[1]
        if not self._channel.post(peer, parts):
            is_sent = False if peer in self._unsent else self._put(peer, parts)
            if is_sent is False and self._unsent.add(peer, parts):
                is_sent, self._retry_at = True, 0.0  # later: the first try is due, however long others pause
            if is_sent:
                self._channel.mailboxes.sent(peer)
        _moment("sent", record.run[0] if type(record) is RunFinished else run_of(record))

    def _put(self, peer: bytes, parts: Sequence[Buffer]) -> bool | None:
        """Send over ZeroMQ; False if ``peer`` has not taken earlier messages, None if it is gone."""
        is_begun = self._channel.begin_to_send(peer)
        if is_begun:
            self._channel.finish_sending(parts)
        elif is_begun is None:
            _log.info("%r is gone", peer)
        return is_begun

    def _answer(self, peer: bytes, question: Get, got: Got) -> None:
        """Send variables with their bytes. If a large answer cannot be sent now, or would delay too many steps, nothing
        is copied, and the question is handled again later."""
        if sum(array.nbytes for array in got.arrays) <= LARGE_NBYTES:
            self._send(peer, replace(got, arrays=tuple(array_of(self._segments.view(a).copy()) for a in got.arrays)))
            return
        began = time.monotonic()
        is_observer = (who := self._supervisor.peers.get(peer)) is not None and who.role == "observer"
        must_wait = peer in self._unsent or (is_observer and not self._large.may_be_made(got.commits, began))
        is_begun = False if must_wait else self._channel.begin_to_send(peer)
        if is_begun:
            self._channel.finish_sending(
                encode(replace(got, arrays=tuple(array_of(self._segments.view(a)) for a in got.arrays)), BULK_LIMITS)
            )
            self._channel.mailboxes.sent(peer)
            self._large.made(peer, question, now := time.monotonic())
            if is_observer:
                self._large.made_for_observer(got.commits, began, now)
        elif is_begun is False:
            self._later[peer] = question

    def _ring(self) -> None:
        self._sent = None
        for peer, run in self._channel.mailboxes.ring():
            if run:  # it may not have seen the mark
                self._transmit(peer, StepFinished((run,), failed=False))


def _channel(
    config: ServerConfig,
    supervisor: SupervisorLink,
    wake: int,
    read: channel.Read,
    read_mark: channel.ReadMark,
    on_wake: Callable[[], object],
) -> Channel:
    """A channel that listens where workers and clients find the server."""
    made = Channel(
        supervisor,
        wake,
        _moment,
        read,
        linger=_LINGER,
        patience=_PATIENCE,
        look_every=_LOOK_EVERY,
        on_wake=on_wake,
        messages_first=True,  # messages that a worker sent before its death count
        rings_late=True,
        read_mark=read_mark,
    )
    try:
        made.listen(config.endpoint.removeprefix("ipc://"), LIMITS, _UNREAD, strict=True)
    except OSError as error:
        made.close()
        raise ConfigurationError(f"cannot listen at {config.endpoint}: {error.strerror}") from error
    return made


def _open_account(config: ServerConfig, segments: Segments) -> Account:
    nbytes = account_nbytes(config.replicas)
    segment = segments.make(names.ACCOUNT, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE, "")
    segment.reserve(0, nbytes)
    return Account(segment.elements("uint8"), config.replicas)


def _open_engine(config: ServerConfig, segments: Segments, addresses: Addresses, account: Account) -> Engine:
    """An engine over the control segment and the account, which a server before this one may have left."""
    control = segments.make(names.CONTROL, addresses.control, "")
    control.reserve(0, 2 * names.CONTROL_HEADER_NBYTES)
    versions = segments.make(names.versions(), addresses.versions, "")
    settings = EngineConfig(
        config.replicas,
        config.parameter_device,
        with_changes(addresses, versions=versions.nbytes),  # of a server before this one, if there was one
        os.getpid(),
        time.monotonic(),
        config.step_timeout,
        config.name_after,
    )
    head = names.CONTROL_HEADER_NBYTES
    log = ControlLog(
        control.elements("uint8")[head:],
        reserve=lambda start, stop: control.reserve(head + start, head + stop),
        discard=lambda start, stop: control.discard(head + start, head + stop),
    )
    return Engine(settings, log, account)


def identity_of(gone: Died | ClientGone) -> bytes:
    """What the process that has gone was called here.

    >>> identity_of(ClientGone("9")), identity_of(Died("worker", 0, 1, 43, "SIGKILL", "", True))
    (b'c9', b'w0.1')
    """
    if isinstance(gone, ClientGone):
        return f"c{gone.client}".encode()
    return peer_of(Introduce(PROTOCOL, gone.role, gone.rank, gone.incarnation, gone.pid))


def _why_not(record: Hello | Register, who: Introduce) -> str:
    """Why the process that the supervisor calls ``who`` cannot say this of itself; empty if it can."""
    if isinstance(record, Hello):
        said, known = f"{record.role} {record.client!r:.20}", f"{who.role} {who.client!r:.20}"
    else:
        said = f"worker w{record.worker.replica}.{record.worker.incarnation}"
        known = f"{who.role} w{who.rank}.{who.incarnation}" if who.role == "worker" else f"the {who.role}"
    return "" if said == known else f"the sender says it is {said}, and the supervisor has introduced it as {known}"


def _may_plan_memory(record: Record) -> bool:
    """Whether the engine may have to decide if something fits the memory."""
    if isinstance(record, Ask):
        point = record.point
        return isinstance(point, CreatePoint) or (isinstance(point, ApplyPoint) and point.needs_answer)
    return isinstance(record, Create | DescribeSlots | AssignSlot | AssignAll)
