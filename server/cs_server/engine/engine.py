"""The engine: what the server does, as a function from one event to the commands that follow from it.

Owns the order of things within an event: hear, advance, begin a commit, write down, answer. It opens nothing, waits
for nothing and computes no array; ``service`` turns sockets, clocks and finished arithmetic into events and carries
the commands out. What it knows is in the control store before commands are handed over that let anybody know of it, so
an engine built anew over the same store goes on as this one would have. What nobody can know of yet is written with
what comes next: of a message from which nothing follows it is as if it had not been heard (who sent it says it again to
another server), and a commit that ends is ended once more, with the same answers. Decision 19 has the reasons.
"""

from __future__ import annotations

import logging
import traceback

from cs_proto.arrays import Location
from cs_proto.errors import CentralStorageError, PeerProtocolError
from cs_proto.failures import error_of
from cs_proto.frozen import frozen, with_changes
from cs_proto.messages import (
    Ask,
    Assign,
    AssignSlot,
    Cancel,
    Configure,
    Create,
    Describe,
    DescribeSlots,
    Free,
    Get,
    Goodbye,
    Hello,
    Locate,
    MergeCallReturn,
    PointFailed,
    Reduced,
    Refused,
    Register,
    Resent,
    Return,
    RunFinished,
    Statistics,
    StepFinished,
    WaitReport,
)
from cs_proto.records import Record, replace
from cs_server.events import (
    Allocate,
    ClientLeft,
    Command,
    Computed,
    Discard,
    Event,
    Fill,
    Fingerprinted,
    Finished,
    Listening,
    MemoryAvailable,
    Needed,
    ProcessDied,
    Received,
    Reserve,
    Reserved,
    Send,
    Tick,
)

from .address_budget import Addresses
from .catalogue import Catalogue
from .commits import Commits, Operations
from .control_log import Control
from .fast_path import FastPath, is_small
from .progress import Progress
from .replay_check import ReplayCheck
from .replays import Replays
from .requests import Requests
from .runs import Runs
from .sessions import Sessions
from .state import Job, Tables
from .watchdog import Watchdog

__all__ = ["Config", "Engine"]

_log = logging.getLogger("cs_server.engine")

# What another server says once more, and peers take it as once.
_HEARD_TWICE = (RunFinished, StepFinished)
# Records by which the server may first learn of a run.
_BEGINS = (Ask, Return, Cancel, WaitReport, Resent)


@frozen
class Config:
    """What does not change while a server runs: ``addresses`` are the lengths of segments; ``started`` is the time, on
    the clock of ``now``, at which the server began. A replica for which others wait and that was not heard for
    ``step_timeout`` seconds is ended; None never."""

    replicas: int
    parameter_device: str
    addresses: Addresses
    pid: int
    started: float
    step_timeout: float | None = None


class Engine:
    """One service's state and what it does next."""

    def __init__(self, config: Config, control: Control) -> None:
        """Take up what ``control`` holds, or begin where it is empty.

        Raises :class:`~cs_server.engine.control_log.ControlDamaged` where it cannot be read.
        """
        self._config = config
        self._out: list[Command] = []
        self._tables = tables = Tables(control, config.replicas)
        n, out = config.replicas, self._out
        self._sessions = Sessions(tables, out, n, config.parameter_device, config.pid)
        self._catalogue = Catalogue(tables, out, n, config.addresses, config.parameter_device)
        self._commits = Commits(tables, out, self._operations)
        self._recollection = ReplayCheck(tables, out, self._catalogue)
        self._runs = Runs(tables, out, self._sessions, self._catalogue, self._commits, self._recollection, n)
        self._replays = Replays(tables, out, self._sessions, self._commits, self._runs, self._recollection)
        self._requests = Requests(tables, out, self._sessions, self._catalogue, self._commits, self._runs)
        self._progress = Progress(
            tables, out, self._sessions, self._catalogue, self._commits, self._runs, self._recollection, n
        )
        self._waits = Watchdog(tables, out, self._sessions, n, config.step_timeout)
        self._plain = FastPath(tables, self._sessions, self._catalogue, n, self._hear_again)
        self._plain.unfold()
        #: The places in the code (file, line) where a message raised an unforeseen exception: each is logged once.
        self._shown: set[tuple[str, int | None]] = set()

    def handle(self, event: Event, now: float) -> list[Command]:
        """What follows from ``event``; ``now`` in seconds of a clock that survives a restart of the server.

        An event that needs memory or a kernel is not acted on before it has that, or is refused it: Reserve asks, and
        the event comes again in its answer. Whatever a peer says wrongly is answered with an error and changes nothing
        else, also if a check is missing and an unforeseen exception is raised. Raises
        :class:`~cs_server.engine.control_log.ControlFull` where not even that can be written down.
        """
        commands = self._plain.hear(event, now)
        if commands is not None:
            return commands
        self._plain.unfold()
        asked = event if isinstance(event, Reserved) else Reserved(event)
        event = asked.event
        try:
            return self._attempt(asked, now)
        except CentralStorageError as error:
            instead = self._instead(event, error)
        try:
            return self._attempt(with_changes(asked, event=instead), now)
        except CentralStorageError as error:
            if not isinstance(event, Received) or isinstance(instead, _Refusal):
                raise
            return self._attempt(with_changes(asked, event=_refused(event, error)), now)

    def resume(self) -> list[Command]:
        """What a server that was restarted has to do first: segments opened, and what was under way done again."""
        catalogue = self._catalogue
        commands: list[Command] = [*catalogue.allocations(), *catalogue.discards(), *catalogue.loads()]
        commands += catalogue.kernels()
        if self._tables.tally.committing:
            commands.append(self._commits.command(self._tables.tally.committing))
        commands += [self._progress.compute(ticket) for ticket in sorted(self._tables.computations)]
        commands += [self._recollection.command(ticket) for ticket in sorted(self._tables.checks)]
        return commands

    def write_down(self) -> None:
        """Have the store know what this engine knows, as every event but a few does."""
        self._plain.unfold()
        if self._tables.is_ahead:
            self._tables.flush()

    def writer(self, peer: bytes) -> str:
        """As :meth:`.sessions.Sessions.writer`."""
        return self._sessions.writer(peer)

    @property
    def results_nbytes(self) -> int:
        """How much of the server's arena the recorded outcomes need: a server that takes up must leave it alone."""
        recorded = (outcome.arrays for _, outcome in self._tables.outcomes.items() if isinstance(outcome, Reduced))
        arrays = (array for arrays in recorded for array in arrays)
        return max((a.place.offset + a.nbytes for a in arrays if isinstance(a.place, Location)), default=0)

    def _attempt(self, asked: Reserved, now: float) -> list[Command]:
        """Handle one event whole or not at all; a Reserve where it needs something that it has not been given."""
        self._catalogue.refused = dict(asked.refused)
        try:
            if isinstance(asked.event, Received):
                self._check_run(asked.event.peer, asked.event.record)
            self._hear(asked.event, now)
            self._settle()
            wanted = dict.fromkeys(command for command in self._out if isinstance(command, Needed))
            granted = set(asked.granted)
            missing = tuple(needed for needed in wanted if needed not in granted)
            if missing:
                self._undo()
                return [Reserve(missing, asked)]
            commands: list[Command] = [command for command in self._out if not isinstance(command, Needed)]
            if self._may_wait(asked.event, commands):
                self._tables.keep()
            else:
                self._tables.flush()
        except BaseException as error:  # whatever it is, half an event is not written down
            self._undo()
            is_foreseen = isinstance(error, CentralStorageError) or not isinstance(error, Exception)
            if is_foreseen or not isinstance(asked.event, Received):
                raise
            raise self._blamed(asked.event, error) from error
        # What was allocated for an operation that is refused the rest.
        idle = [each for each in asked.granted if isinstance(each, Allocate) and each not in wanted]
        commands += [Discard(each.segment, each.start, each.stop) for each in idle if each.stop > each.start]
        self._out.clear()
        return commands

    def _hear_again(self, event: Event, now: float) -> None:
        """Have the tables know of an event what follows from it. It was answered before, and could not fail."""
        self._hear(event, now)
        self._settle()
        self._out.clear()

    def _may_wait(self, event: Event | _Refusal, commands: list[Command]) -> bool:
        """Whether what the event has changed may be written with what comes next. Not where it is much, since then that
        would be refused in its place when the store is full."""
        match event:
            case Tick():
                return not commands
            case Received(_, Return() as record):
                return not commands and is_small(record)
            case Finished():
                is_told = all(isinstance(each, Send) and isinstance(each.record, _HEARD_TWICE) for each in commands)
                return is_told and not self._tables.is_ahead
        return False

    def _check_run(self, peer: bytes, record: Record) -> None:
        """Raise PeerProtocolError if ``record`` is of a run that cannot have begun. A worker that was replaced gets
        Fenced instead."""
        if isinstance(record, Ask | Return):
            self._sessions.check_replica(peer, record.replica, record.incarnation)
        if isinstance(record, _BEGINS):
            self._runs.check_near(record.run)

    def _blamed(self, event: Received, error: BaseException) -> PeerProtocolError:
        """The answer to a peer whose message raised ``error``: no message of a peer may end the server."""
        kind = type(event.record).__name__
        last = traceback.extract_tb(error.__traceback__)[-1]
        if (last.filename, last.lineno) not in self._shown:
            self._shown.add((last.filename, last.lineno))
            _log.error("a %s of %r could not be acted on", kind, event.peer, exc_info=error)
        return PeerProtocolError(
            f"a {kind} could not be acted on ({type(error).__name__}: {error}); it changed nothing"
        )

    def _undo(self) -> None:
        with self._catalogue.undoing():
            self._tables.rollback()
        self._out.clear()

    def _instead(self, event: Event, error: CentralStorageError) -> Event | _Refusal:
        """What is heard in the place of an event that is wrong, or too large for the store.

        A replica waits for the answer to its point and for nothing else, and a run for what its replicas return, so
        these are answered and counted as failed; a refusal would leave somebody waiting for ever.
        """
        match event:
            case Computed(ticket, _, None):
                return Computed(ticket, (), error_of(error))
            case Received(peer, Ask(run, replica, _, _, point)) if peer == self._sessions.worker_peer(replica):
                failed = PointFailed(run, point.k, error_of(error, replica, point.k), True)
                return _Refusal(Send(peer, failed))
            case Received(peer, Return(replica=replica, count=count) as record) if peer == self._sessions.worker_peer(
                replica
            ):
                return Received(peer, replace(record, notes=(), value=None, error=error_of(error, replica, count)))
            case Received(peer, MergeCallReturn(k=k, error=None) as record):
                return Received(peer, replace(record, values=(), error=error_of(error, -1, k)))
            case Received():
                return _refused(event, error)
        raise error

    def _settle(self) -> None:
        """Everything that may have become possible."""
        self._runs.give_up_absent()
        self._progress.advance()
        if not self._commits.is_busy:
            self._requests.answer_held()
        if self._sessions.controller_peer() is None:
            self._runs.forget_left()
            self._sessions.welcome_waiting()
        self._replays.announce()
        self._commits.start()

    def _hear(self, event: Event | _Refusal, now: float) -> None:
        match event:
            case Received(peer, record):
                self._tables.tally.messages += 1
                self._receive(peer, record, now)
            case _Refusal(answer):
                self._tables.tally.messages += 1
                self._out.append(answer)
            case ProcessDied(died):
                if (news := self._sessions.died(died)) is not None:
                    self._replays.died(news)
            case ClientLeft(client):
                if self._sessions.left(client):
                    self._runs.cancel_all(now)
            case MemoryAvailable(nbytes, device_nbytes):
                self._tables.tally.available_nbytes = nbytes
                self._tables.tally.device_nbytes = device_nbytes
            case Computed():
                self._progress.computed(event)
            case Fingerprinted():
                self._replays.fingerprinted(event)
            case Finished(ticket):
                job = self._commits.finished(ticket)
                if job is not None:
                    self._finished(job)
            case Tick():
                self._waits.tick(now)
            case Listening():  # nobody has been silent yet
                self._tables.tally.seen = [now] * self._config.replicas

    def _receive(self, peer: bytes, record: Record, now: float) -> None:
        if not isinstance(record, Ask | Return) and (replica := self._sessions.replica_at(peer)) is not None:
            self._tables.tally.seen[replica] = now  # the holder of a token is at work
        match record:
            case Ask() | Return():
                self._sessions.check_replica(peer, record.replica, record.incarnation)
                self._tables.tally.seen[record.replica] = now
                if isinstance(record, Ask):
                    self._runs.ask(peer, record, now)
                else:
                    self._runs.returned(peer, record, now)
            case MergeCallReturn():
                self._runs.merge_call_returned(peer, record)
            case Create() | Assign() | AssignSlot() | Configure() | Free():
                self._requests.write(peer, record)
            case Locate():
                self._requests.locate(peer, record)
            case DescribeSlots():
                self._requests.describe_slots(peer, record)
            case Get():
                self._requests.get(peer, record)
            case Describe():
                self._requests.describe(peer, record)
            case Statistics():
                self._requests.statistics(peer, record, self._config.pid, now - self._config.started)
            case Cancel():
                self._sessions.check_controller(peer, record)
                self._runs.cancel(record, now)
            case WaitReport():
                self._sessions.check_controller(peer, record)
                self._runs.awaited(record, now)
            case Resent():
                self._sessions.check_controller(peer, record)
                self._replays.resent(record, now)
            case Register():
                self._sessions.register(peer, record)
                self._tables.tally.seen[record.worker.replica] = now
            case Hello():
                if self._sessions.hello(peer, record, now):
                    self._runs.finish_again()
                    self._replays.announce_again()
            case Goodbye():
                if self._sessions.goodbye(peer, record):
                    self._runs.cancel_all(now)
            case _:
                raise PeerProtocolError(f"a {type(record).__name__} is not for the server")

    def _operations(self, job: Job) -> Operations:
        """What a commit consists of."""
        if job.fills:
            return tuple(Fill(f.segment, f.dtype, f.first, f.last, f.value, f.is_lazy) for f in job.fills)
        if job.kind in ("run", "writes"):
            return self._progress.operations(job)
        return (self._progress.creation(job) if job.kind == "create" else self._requests.operation(job),)

    def _finished(self, job: Job) -> None:
        """What follows from a commit that is finished."""
        if job.kind == "run":
            self._progress.committed(job.run, job.k)
        elif job.kind == "writes":
            self._progress.written(job.run, job.k + 1)
        elif job.kind == "create":
            self._progress.created(job)
        elif job.kind == "request":
            self._requests.done(job)


@frozen
class _Refusal:
    """In the place of a message that is not acted on."""

    answer: Send


def _refused(event: Received, error: CentralStorageError) -> _Refusal:
    match event.record:
        case Create() | Assign() | AssignSlot() | Configure() | Free():
            number = event.record.sequence
        case Get() | Describe() | DescribeSlots() | Locate() | Statistics():
            number = event.record.request
        case _:
            number = 0
    return _Refusal(Send(event.peer, Refused(number, error_of(error))))
