"""The engine: what the server does, as a function from one event to the commands that follow from it.

Owns the transaction: an event takes effect completely or not at all, and is logged before its commands are returned.
The engine opens nothing, waits for nothing and computes no array. ``service`` turns sockets, clocks and finished
arithmetic into events, and carries the commands out.

An engine that is built again over the same store continues where this one stopped, because messages to peers leave
only after the store has the change. Two kinds of changes may wait for the next write. A message that led to no
command may be lost in a crash: its sender repeats it to the next server. The end of a commit may be lost: the next
server ends the commit again, with the same answers. Decision 19 has the reasons.
"""

from __future__ import annotations

import logging
import traceback

import numpy as np

from cs_proto.arrays import Location
from cs_proto.errors import CentralStorageError, PeerProtocolError
from cs_proto.failures import error_of
from cs_proto.frozen import frozen, with_changes
from cs_proto.messages import (
    Ask,
    Assign,
    AssignAll,
    AssignSlot,
    Cancel,
    Configure,
    Create,
    Describe,
    DescribeSlots,
    Free,
    Get,
    Locate,
    MergeCallReturn,
    PointFailed,
    Reduced,
    Refused,
    Resent,
    Return,
    RunFinished,
    Statistics,
    StepFinished,
    Variable,
    WaitReport,
)
from cs_proto.records import Record, replace
from cs_server.events import (
    Allocate,
    Command,
    Computed,
    Discard,
    Event,
    Finished,
    Needed,
    Received,
    Reserve,
    Reserved,
    Send,
    Tick,
)

from . import dispatch, sessions
from .captured_steps import CapturedSteps, is_small
from .catalogue import optimizers, slabs, variables
from .step_plans import NextStep
from .steps import progress, replay_check, runs
from .store.account import Account, account_nbytes
from .store.control_log import Control
from .store.state import Config, opened

__all__ = ["Config", "Engine"]

_log = logging.getLogger("cs_server.engine")

# A restarted server says these again, and peers ignore the repetition.
_HEARD_TWICE = (RunFinished, StepFinished)
# Records by which the server may first learn of a run.
_BEGINS = (Ask, Return, Cancel, WaitReport, Resent)


class Engine:
    """One service's state and what it does next."""

    def __init__(self, config: Config, control: Control, account: Account | None = None) -> None:
        """Continue from ``control`` and ``account``, or start if they are empty. Without an account no step is carried
        out by a program in a way that another server could continue.

        Raises :class:`~cs_server.engine.store.control_log.ControlDamaged` if it cannot be read.
        """
        self._server = opened(config, control)
        memory = np.zeros(account_nbytes(config.replicas), np.uint8)
        self._captured = CapturedSteps(self._server, account or Account(memory, config.replicas))
        #: The places in the code (file, line) where a message raised an unforeseen exception: each is logged once.
        self._shown: set[tuple[str, int | None]] = set()
        self._unfold()

    def handle(self, event: Event, now: float) -> list[Command]:
        """The commands that follow from ``event``. ``now`` is in seconds, on a clock that survives a restart of the
        server.

        An event that needs memory or a kernel is answered with Reserve first. It comes again in Reserved, when it has
        what it needs or was refused it. A message that is wrong is answered with an error and changes nothing else,
        even if it raises an unforeseen exception. Raises :class:`~.store.control_log.ControlFull` if not even the error
        can be written down.
        """
        commands = self._captured.hear(event, now)
        if commands is not None:
            return commands
        return [*self._unfold(), *self._handle(event, now)]

    def _unfold(self) -> list[Command]:
        """Bring the tables up to date with the captured steps. The messages of a step that is not decided are heard
        now, as if they had just come."""
        return [command for held, then in self._captured.unfold() for command in self._handle(held, then)]

    def _handle(self, event: Event, now: float) -> list[Command]:
        """The general way of :meth:`handle`."""
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

    def next_step(self, base: Return | None = None) -> NextStep | None:
        """The step after the last one, if it may be carried out without the engine, and before it hears anything else:
        each worker returns what it returned in an earlier step, with another value. It is the kind of step in which the
        first worker returns what ``base`` has, or the one that is expected. :meth:`passed` must follow, or
        :meth:`refuse_steps` if no such step can be carried out so; or another call, or any other event."""
        return self._captured.next_step(base)

    def passed(self, now: float) -> Send:
        """What follows when the step of :meth:`next_step` has been carried out."""
        return self._captured.passed(now)

    def refuse_steps(self) -> None:
        """Expect no more steps like that of :meth:`next_step`."""
        self._captured.refuse()

    def resume(self) -> list[Command]:
        """The first commands of a restarted server: open its segments, and repeat what was under way."""
        server, tables = self._server, self._server.tables
        commands: list[Command] = [*slabs.allocations(server), *slabs.discards(server), *slabs.loads(server)]
        commands += optimizers.kernels(server)
        if tables.tally.committing:
            commands.append(dispatch.commit(server, tables.tally.committing))
        commands += [progress.compute(server, ticket) for ticket in sorted(tables.computations)]
        commands += [replay_check.command(server, ticket) for ticket in sorted(tables.checks)]
        return commands

    def write_down(self) -> None:
        """Write everything that this engine knows to the store."""
        self._unfold()
        if self._server.tables.is_ahead:
            self._server.tables.flush()

    def writer(self, peer: bytes) -> str:
        """As :func:`.sessions.writer`."""
        return sessions.writer(self._server, peer)

    def variable(self, number: int) -> Variable:
        """The variable with this number, but for its version. Raises InvalidArgumentError if there is none."""
        return variables.row(self._server, number)

    @property
    def results_nbytes(self) -> int:
        """How many bytes of the server's arena hold recorded results, which a restarted server must not overwrite."""
        outcomes = self._server.tables.outcomes.values()
        recorded = (outcome.arrays for outcome in outcomes if isinstance(outcome, Reduced))
        arrays = (array for arrays in recorded for array in arrays)
        return max((a.place.offset + a.nbytes for a in arrays if isinstance(a.place, Location)), default=0)

    def _attempt(self, asked: Reserved, now: float) -> list[Command]:
        """Act on one event whole or not at all. Return one Reserve if it needs something that it has not been given."""
        server = self._server
        server.refused = dict(asked.refused)
        try:
            if isinstance(asked.event, Received):
                self._check_run(asked.event.peer, asked.event.record)
            if isinstance(asked.event, _Refusal):
                server.tables.tally.messages += 1
                server.out.append(asked.event.answer)
            else:
                dispatch.hear(server, asked.event, now)
            dispatch.settle(server)
            wanted = dict.fromkeys(command for command in server.out if isinstance(command, Needed))
            granted = set(asked.granted)
            missing = tuple(needed for needed in wanted if needed not in granted)
            if missing:
                server.rollback()
                return [Reserve(missing, asked)]
            commands: list[Command] = [command for command in server.out if not isinstance(command, Needed)]
            if self._may_wait(asked.event, commands):
                server.tables.keep()
            else:
                server.tables.flush()
        except BaseException as error:  # after any exception, half an event must not be logged
            server.rollback()
            is_foreseen = isinstance(error, CentralStorageError) or not isinstance(error, Exception)
            if is_foreseen or not isinstance(asked.event, Received):
                raise
            raise self._blamed(asked.event, error) from error
        # Memory that was granted to an operation that was refused the rest.
        idle = [each for each in asked.granted if isinstance(each, Allocate) and each not in wanted]
        commands += [Discard(each.segment, each.start, each.stop) for each in idle if each.stop > each.start]
        server.out.clear()
        return commands

    def _may_wait(self, event: Event | _Refusal, commands: list[Command]) -> bool:
        """Whether the changes of the event may be written with those of the next one. Large changes may not: if the
        store is full, the next event would be refused in their place."""
        match event:
            case Tick():
                return not commands
            case Received(_, Return() as record):
                return not commands and is_small(record)
            case Finished():
                is_told = all(isinstance(each, Send) and isinstance(each.record, _HEARD_TWICE) for each in commands)
                return is_told and not self._server.tables.is_ahead
        return False

    def _check_run(self, peer: bytes, record: Record) -> None:
        """Raise PeerProtocolError if ``record`` is of a run that cannot have begun, and Fenced if its worker has been
        replaced."""
        if isinstance(record, Ask | Return):
            sessions.check_replica(self._server, peer, record.replica, record.incarnation)
        if isinstance(record, _BEGINS):
            runs.check_near(self._server, record.run)

    def _blamed(self, event: Received, error: BaseException) -> PeerProtocolError:
        """The answer to a peer whose message raised ``error``. No message of a peer may end the server."""
        kind = type(event.record).__name__
        last = traceback.extract_tb(error.__traceback__)[-1]
        if (last.filename, last.lineno) not in self._shown:
            self._shown.add((last.filename, last.lineno))
            _log.error("a %s of %r could not be handled", kind, event.peer, exc_info=error)
        return PeerProtocolError(
            f"a {kind} could not be handled ({type(error).__name__}: {error}); nothing was changed"
        )

    def _instead(self, event: Event, error: CentralStorageError) -> Event | _Refusal:
        """The event that replaces one that is wrong, or too large for the store.

        A replica waits for the answer to its merge point, and a run for the returns of its replicas. So these messages
        count as failed: after a mere refusal, a peer would wait forever.
        """
        match event:
            case Computed(ticket, _, None):
                return Computed(ticket, (), error_of(error))
            case Received(peer, Ask(run, replica, _, _, point)) if peer == sessions.worker_peer(self._server, replica):
                failed = PointFailed(run, point.k, error_of(error, replica, point.k), True)
                return _Refusal(Send(peer, failed))
            case Received(peer, Return(replica=replica, count=count) as record) if peer == sessions.worker_peer(
                self._server, replica
            ):
                return Received(
                    peer, replace(record, notes=(), value=None, error=error_of(error, replica, count), changes=())
                )
            case Received(peer, MergeCallReturn(k=k, error=None) as record):
                return Received(peer, replace(record, values=(), error=error_of(error, -1, k)))
            case Received():
                return _refused(event, error)
        raise error


@frozen
class _Refusal:
    """Takes the place of a message that is not acted on."""

    answer: Send


def _refused(event: Received, error: CentralStorageError) -> _Refusal:
    match event.record:
        case Create() | Assign() | AssignAll() | AssignSlot() | Configure() | Free():
            number = event.record.sequence
        case Get() | Describe() | DescribeSlots() | Locate() | Statistics():
            number = event.record.request
        case _:
            number = 0
    return _Refusal(Send(event.peer, Refused(number, error_of(error))))
