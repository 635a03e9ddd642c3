"""The fast path: most steps of a training are decided in one pass, when all replicas have returned.

A plain step is a run in which every replica brings gradients of the same variable sets as in the step before, nothing
else, and returns a small value. What follows from such a step is known. So only its messages are written down, as they
came, and the other tables do not change. Before anything else needs those tables, :meth:`FastPath.unfold` brings them
up to date: it hears the messages again in the general way. A server that takes the place of this one does the same.
``engine`` asks here before every event. Decision 21 has the reasons.
"""

from __future__ import annotations

import struct
from collections import Counter
from operator import attrgetter
from typing import TypeAlias

from cs_proto import codec
from cs_proto.errors import InvalidArgumentError, PeerProtocolError
from cs_proto.frozen import frozen
from cs_proto.messages import MOST_AHEAD, ApplyPoint, Return, RunFinished, StepFinished
from cs_server.events import Command, Commit, Event, Finished, Received, Send

from . import dispatch, sessions
from .catalogue import optimizers, updates
from .store.control_log import ControlDamaged, ControlFull
from .store.state import State
from .store.tables import PlainStep, joined, parted

__all__ = ["FastPath", "is_small"]

# A larger result is not written at once.
_SMALL_NBYTES = 4096
# The most bytes of all messages of a plain step, which are written down as one record.
_STEP_NBYTES = 1 << 20
# The longest lookahead: at every tick that many steps are heard again.
_MOST_AHEAD = 16


#: The optimizer, its set of variables, and those of them whose gradients are sparse.
_Set: TypeAlias = tuple[int, int, tuple[int, ...]]


@frozen
class _Kind:
    """What a merge point of a plain step is: the sets that it updates, and the bound on their gradients."""

    sets: tuple[_Set, ...]
    global_clipnorm: float | None
    clip_epsilon: float


@frozen
class _Ground:
    """What holds as long as nothing but plain steps of one kind is heard: the peers, and what every step brings."""

    #: The peer name and the incarnation of each worker, by replica.
    workers: tuple[tuple[bytes, int], ...]
    controller: bytes
    client: str
    series: int
    lookahead: int
    #: The merge points.
    kinds: tuple[_Kind, ...]


class FastPath:
    """The steps that were decided and that the other tables do not have yet, and the returns of the current step."""

    def __init__(self, server: State) -> None:
        self._server = server
        self._may_begin = False
        self._forget()

    def _forget(self) -> None:
        """The other tables have everything."""
        self._ground: _Ground | None = None
        self._held: list[tuple[Received, float]] = []
        self._run = 0  # the last one
        self._returns: list[Return] = []  # of the last one, in replica order
        self._committing = 0  # the ticket of its commit
        self._count = 0  # of steps that the other tables do not have
        self._applied: Counter[int] = Counter()  # in them, by variable set

    def hear(self, event: Event, now: float) -> list[Command] | None:
        """The commands that follow from ``event``. None if the event needs the general way."""
        if type(event) is Received and type(event.record) is Return:
            if not self._committing and self._fits(event.peer, event.record):
                self._held.append((event, now))
                if len(self._held) < len(self._server.replicas):
                    return []
                if (commands := self._decide()) is not None:
                    return commands
                self._held.pop()
            self._may_begin = True
        elif type(event) is not Finished:
            self._may_begin = False  # worth it only if plain steps follow each other directly
        elif event.ticket == self._committing:
            self._committing = 0
            return self._answers()
        return None

    def unfold(self) -> None:
        """Bring the other tables up to date, as if everything had been heard in the general way. What the store lacks
        is kept for the next flush."""
        tables, held = self._server.tables, self._held
        if held or tables.plain:
            # A server that took over cannot know whether the last commit had begun: it takes it as under way.
            is_committing = self._committing != 0 or self._ground is None
            self._replay(sorted(tables.plain.values(), key=attrgetter("count")), is_committing)
            for event, now in held:
                self._hear_again(event, now)
            for key in tables.plain:
                del tables.plain[key]
            tables.keep()
        self._forget()

    def _replay(self, steps: list[PlainStep], is_committing: bool) -> None:
        """Hear recorded steps in the general way. Steps that are further back than the lookahead are only counted. The
        commit of the last step stays under way if ``is_committing``."""
        heard = [[_returned(message) for message in step.heard] for step in steps]
        if not heard:
            return
        last = heard[-1][0]
        first = last.run[0] - (last.lookahead if last.series else 0)
        known = [(step.since, each) for step, each in zip(steps, heard, strict=True) if each[0].run[0] >= first]
        self._skip(steps[-1].count - len(known), last)
        tables = self._server.tables
        for times, returns in known:
            for now, record in zip(times, returns, strict=True):
                self._hear_again(Received(sessions.worker_peer(self._server, record.replica) or b"", record), now)
            if tables.tally.committing and not (returns is heard[-1] and is_committing):
                self._hear_again(Finished(tables.tally.committing), times[-1])

    def _hear_again(self, event: Event, now: float) -> None:
        """Bring the tables up to date with one event. It was answered before, so its commands are dropped."""
        dispatch.hear(self._server, event, now)
        dispatch.settle(self._server)
        self._server.out.clear()

    def _skip(self, count: int, record: Return) -> None:
        """Count ``count`` steps like that of ``record``, of which nothing else is known any more."""
        tally, points = self._server.tables.tally, len(record.notes)
        tally.messages += count * len(self._server.replicas)
        tally.runs += count
        tally.commits += count * points
        tally.tickets += count * bool(points)
        for replica in self._server.replicas:
            tally.replica_runs[replica] += count
            tally.points[replica] += count * points
            tally.applies[replica] += count * points
        for kind in _kinds(record) or ():
            for _, number, _ in kind.sets:
                optimizers.applied(self._server, number, count)

    # --- what is plain ------------------------------------------------------------------------------------------------

    def _fits(self, peer: bytes, record: Return) -> bool:
        """Whether ``record`` is what the next plain step brings."""
        ground = self._ground or self._look(record)
        if ground is None or not 0 <= record.replica < len(self._server.replicas):
            return False
        is_next = self._run < record.run[0] <= self._run + 1 + MOST_AHEAD and len(record.run) == 1
        for held, _ in self._held:
            other = held.record
            assert isinstance(other, Return)
            is_next = is_next and other.run == record.run and other.replica != record.replica
            is_next = is_next and other.changes == record.changes
        fits = (
            is_next
            and (peer, record.incarnation) == ground.workers[record.replica]
            and record.series == ground.series
            and record.lookahead == ground.lookahead
            and record.client in ("", ground.client)
            and is_small(record)
            and record.count == len(record.notes)
            and _kinds(record) == ground.kinds
            and self._are_gradients(record)
        )
        if fits and self._ground is None:
            self._ground = ground
        return fits

    def _are_gradients(self, record: Return) -> bool:
        """Whether its gradients fit their variables, and lie in buffers that exist."""
        points = [note for note in record.notes if isinstance(note, ApplyPoint)]
        try:
            updates.check_gradients(self._server, points)
        except InvalidArgumentError:
            return False
        return True

    def _look(self, record: Return) -> _Ground | None:
        """What plain steps like that of ``record`` may rely on. None if something else is going on."""
        if not self._may_begin:
            return None
        tables = self._server.tables
        for run, state in tables.runs.items():
            if not state.is_finished or state.failure is not None or len(run) > 1:
                return None
            for replica in self._server.replicas:
                returned = tables.stands[run, replica].returned
                if returned is None or returned.error is not None:
                    return None
        others = (tables.jobs, tables.outcomes, tables.held, tables.deaths, tables.writes, tables.computations)
        if any(others) or tables.checks or tables.digests or len(tables.workers) < len(self._server.replicas):
            return None
        workers = [tables.workers[replica] for replica in self._server.replicas]
        controller = sessions.controller_peer(self._server)
        hello = None if controller is None else sessions.hello_of(self._server, controller)
        if controller is None or hello is None or not all(worker.is_announced for worker in workers):
            return None
        kinds = _kinds(record)
        if kinds is None or not 0 <= record.lookahead <= _MOST_AHEAD:
            return None
        for kind in kinds:
            for optimizer, number, _ in kind.sets:
                known = tables.sets.get(number)
                if known is None or known.optimizer != optimizer:
                    return None
        self._run = max((run[0] for run in tables.runs), default=-1)
        return _Ground(
            tuple((worker.peer, worker.worker.incarnation) for worker in workers),
            controller,
            hello.client,
            record.series,
            record.lookahead,
            kinds,
        )

    # --- what follows -------------------------------------------------------------------------------------------------

    def _decide(self) -> list[Command] | None:
        """All replicas have returned: write the step down and begin its commit. None if the step is too large, or the
        store is full."""
        ground, tables = self._ground, self._server.tables
        assert ground is not None
        by_replica = sorted(self._held, key=lambda each: each[0].record.replica)  # type: ignore[attr-defined]
        returns = [event.record for event, _ in by_replica if isinstance(event.record, Return)]
        run = returns[0].run[0]
        heard = tuple(joined(event.parts or codec.encode(event.record)) for event, _ in self._held)
        if sum(map(len, heard)) > _STEP_NBYTES:
            return None
        step = PlainStep(self._count + 1, tuple(now for _, now in self._held), heard)
        try:
            changed = optimizers.changed(self._server, returns[0].changes)
            if tables.is_ahead:
                tables.flush()
            tables.write_plain(run % (1 + ground.lookahead) if ground.series else 0, step)
        except (ControlFull, InvalidArgumentError):
            return None
        if changed:
            # The next step writes them. Until then the message of this one has them, and whoever hears it again, and
            # those after it, finds the same numbers.
            for optimizer in changed:
                tables.optimizers[optimizer.number] = optimizer
            tables.keep()
        self._count += 1
        self._run, self._returns, self._held = run, returns, []
        if not ground.kinds:
            return self._answers()
        operations = []
        for k, kind in enumerate(ground.kinds):
            points = [record.notes[k] for record in returns]
            applies = [point for point in points if isinstance(point, ApplyPoint)]
            numbers = [number for _, number, _ in kind.sets]
            operations.append(updates.apply(self._server, numbers, applies, self._applied))
            self._applied.update(numbers)
        self._committing = tables.tally.tickets + self._count
        return [Commit(self._committing, tuple(operations))]

    def _answers(self) -> list[Command]:
        ground, returns = self._ground, self._returns
        assert ground is not None
        run = returns[0].run
        commands: list[Command] = []
        if ground.series:
            finished = StepFinished(run, False)
            commands += [Send(peer, finished) for peer, _ in ground.workers]
        values = tuple([record.value for record in returns if record.value is not None])
        commands.append(Send(ground.controller, RunFinished(run, values, None, len(ground.kinds))))
        return commands


def is_small(record: Return) -> bool:
    """Whether a record is so small that an error in its place would need as much room."""
    value = record.value
    if value is None or not all(isinstance(note, ApplyPoint) for note in record.notes):
        return False
    return len(value.body) + sum(array.nbytes for array in value.arrays) <= _SMALL_NBYTES


def _kinds(record: Return) -> tuple[_Kind, ...] | None:
    """What the notes of a Return are. None if a note is anything else than gradients of known sets."""
    kinds = []
    for k, note in enumerate(record.notes):
        if type(note) is not ApplyPoint or note.k != k or note.needs_answer:
            return None
        sets = [
            (each.optimizer, each.variable_set, tuple([g.variable for g in each.sparse]) if each.sparse else ())
            for each in note.updates
        ]
        kinds.append(_Kind(tuple(sets), note.global_clipnorm, note.clip_epsilon))
    return tuple(kinds)


def _returned(message: bytes) -> Return:
    try:
        record = parted(message)
    except (PeerProtocolError, ValueError, struct.error) as error:
        raise ControlDamaged(f"a message in the control store does not read back: {error}") from error
    if not isinstance(record, Return):
        raise ControlDamaged(f"the control store has a {type(record).__name__} for a Return")
    return record
