"""What replicas send: whose message counts, whether it is a repetition, and what is recorded of it.

``progress`` looks at the same tables and decides what follows. A function that refuses raises, and then nothing of the
message counts.
"""

from __future__ import annotations

from cs_proto.errors import ContextError, PeerProtocolError
from cs_proto.failures import error_of
from cs_proto.messages import (
    ApplyPoint,
    Ask,
    AssignPoint,
    MergeCallReturn,
    Note,
    Point,
    PointFailed,
    Preserve,
    ReadPoint,
    Return,
    RunId,
    StepFinished,
    WriteNote,
)
from cs_proto.records import replace
from cs_server.engine import sessions
from cs_server.engine.catalogue import variables
from cs_server.engine.store.state import State
from cs_server.engine.store.tables import Failure, ReplicaProgress
from cs_server.events import Log, Send

from . import commits, endings, merge, replay_check, runs
from .replay_check import Diverged


def ask(server: State, peer: bytes, record: Ask, now: float) -> None:
    """Record the merge point of a replica, and that it waits. A question that was answered before is answered again."""
    run, replica, point = record.run, record.replica, record.point
    if runs.is_of_another(server, run, record.client) or runs.is_over(server, run, record.series):
        over = error_of(ContextError(f"{runs.name(run)} is over"), replica, point.k)
        server.out.append(Send(peer, PointFailed(run, point.k, over, True)))
        return
    runs.begin(server, run, now, record.series)
    runs.change(server, run, record.changes)
    try:
        _ask(server, peer, record, now)
    except Diverged as error:
        endings.diverged(server, run, replica, error)
        server.out.append(Send(peer, PointFailed(run, point.k, error_of(error, replica, point.k), True)))


def _ask(server: State, peer: bytes, record: Ask, now: float) -> None:
    run, replica, point = record.run, record.replica, record.point
    known = server.tables.stands[run, replica]
    for note in record.notes:
        _note(server, run, replica, note)
    reads = isinstance(point, ReadPoint)
    if isinstance(point, ReadPoint):
        reached = server.tables.stands[run, replica].again
        if point.k > reached:
            raise PeerProtocolError(f"replica {replica} reads after {point.k} merge points but has reached {reached}")
    else:
        _bring(server, run, replica, point)
    stand = server.tables.stands[run, replica]
    if (reads and stand.read == point) or (not reads and stand.waiting == point.k):
        _ask_again(server, peer, record, stand)
        return
    is_new = stand.again > known.again or (reads and stand.returned is None)
    answer = runs.answer(server, run, replica, point.k, reads)
    must_wait = commits.is_busy(server) or runs.is_deferred(server, run)
    if answer is not None and not (is_new and must_wait):
        server.out.append(Send(peer, answer))
    elif is_new:
        inside = server.tables.runs[run].token
        if replica == 0 and inside >= 0 and point.k > inside:
            raise PeerProtocolError(f"replica 0 of {runs.name(run)} asks at {merge.title(point)} inside its merge_call")
        if stand.is_waiting:
            raise PeerProtocolError(
                f"replica {replica} of {runs.name(run)} asks at {merge.title(point)} while it waits"
            )
        if stand.is_replaying and answer is None:
            raise _gone_on(stand, f"waits at {merge.title(point)}")
        server.tables.stands[run, replica] = replace(
            stand,
            since=now,
            waiting=-1 if reads else point.k,
            read=point if isinstance(point, ReadPoint) else None,
            views="preserved" if record.preserved else "live",
        )
        if inside == point.k and not reads:
            runs.tell_holder(server, run, replica)


def _ask_again(server: State, peer: bytes, record: Ask, stand: ReplicaProgress) -> None:
    """Handle an Ask of a replica that already waits at this point. It has preserved its views, or it may have missed
    the Preserve."""
    if record.preserved and stand.views != "preserved":
        server.tables.stands[record.run, record.replica] = replace(stand, views="preserved")
    elif stand.views == "asked":
        server.out.append(Send(peer, Preserve(record.run, record.point.k)))


def returned(server: State, peer: bytes, record: Return, now: float) -> None:
    """Record a replica's result. If the run is finished, repeat the answer."""
    run, replica = record.run, record.replica
    is_of_another = runs.is_of_another(server, run, record.client)
    if is_of_another or runs.is_over(server, run, record.series):
        server.out.append(Log(f"replica {replica} returned from {runs.name(run)}, which is over"))
        if record.series and not is_of_another and not runs.has_gone_on(server, run, replica):
            server.out.append(Send(peer, StepFinished(run, True)))
        return
    runs.begin(server, run, now, record.series)
    runs.change(server, run, record.changes)
    stand = server.tables.stands[run, replica]
    if stand.returned is not None:
        if server.tables.runs[run].is_finished:
            runs.finish(server, run, server.tables.runs[run])
        return
    try:
        for note in record.notes:
            _note(server, run, replica, note)
        stand = server.tables.stands[run, replica]
        if stand.is_replaying and server.tables.runs[run].failure is None:
            raise _gone_on(stand, f"returned after {merge.counted(record.count)}")
    except Diverged as error:
        endings.diverged(server, run, replica, error)
        record = replace(record, count=stand.count)
    stand = server.tables.stands[run, replica]
    # The count of a replica that returns an error does not matter: it was refused or interrupted at a merge point.
    if record.error is None and record.count != stand.count:
        raise PeerProtocolError(
            f"replica {replica} returned from {runs.name(run)} after {record.count} merge points, but sent "
            f"{stand.count} of them"
        )
    server.tables.stands[run, replica] = replace(
        stand, since=now, waiting=-1, read=None, returned=replace(record, notes=())
    )
    server.tables.tally.replica_runs[replica] += 1
    for other in runs.siblings(server, run) if record.series else ():
        if other[0] < run[0] - record.lookahead and not runs.blocks(server, other):
            runs.drop(server, other)
    state = server.tables.runs[run]
    if state.is_finished and record.series:  # a replica was dead before it began
        server.out.append(Send(peer, StepFinished(run, True)))
    if replica == 0 and state.token >= 0:
        inside = PeerProtocolError(f"replica 0 returned from {runs.name(run)} inside its merge_call")
        failure = state.failure or Failure("operation", 0, error_of(inside, 0, state.token))
        server.tables.runs[run] = replace(state, token=-1, failure=failure)


def merge_call_returned(server: State, peer: bytes, record: MergeCallReturn) -> None:
    """The holder returns the token."""
    run, k = record.run, record.k
    state = server.tables.runs.get(run)
    if peer != sessions.worker_peer(server, 0):
        raise PeerProtocolError(f"{peer!r:.80} does not hold a token of {runs.name(run)}")
    if runs.is_over(server, run) or (run, k) in server.tables.outcomes:
        return  # repeated, or too late
    if state is None or state.token != k:
        if state is not None and state.failure is not None:
            return
        raise PeerProtocolError(f"no worker holds the token of merge point {k} of {runs.name(run)}")
    if record.error is None and len(record.values) != len(server.replicas):
        raise PeerProtocolError(
            f"a merge_call returned {len(record.values)} values for {len(server.replicas)} replicas"
        )
    nested = [other for other in server.tables.runs if other[:-2] == run and runs.blocks(server, other)]
    if nested and record.error is None:
        raise PeerProtocolError(f"the merge_call of {runs.name(run)} returned before {runs.name(nested[0])} was over")
    state = replace(state, token=-1)
    if record.error is None:
        server.tables.outcomes[run, k] = record
    elif state.failure is None:
        state = replace(state, failure=Failure("operation", -1, replace(record.error, merge_index=k)))
    server.tables.runs[run] = state


def _gone_on(stand: ReplicaProgress, what: str) -> Diverged:
    return Diverged(
        f"replay diverged: it {what}, but had reached {merge.counted(stand.count)} and sent {stand.writes} "
        "write notes before its worker died"
    )


def _note(server: State, run: RunId, replica: int, note: Note) -> None:
    if isinstance(note, WriteNote):
        _note_write(server, run, replica, note)
        return
    is_checked = note.checked if isinstance(note, AssignPoint) else note.needs_answer
    if is_checked:
        raise PeerProtocolError(f"replica {replica} sent {merge.title(note)} as a note, but it needs an answer")
    _bring(server, run, replica, note)


def _note_write(server: State, run: RunId, replica: int, note: WriteNote) -> None:
    """Record a write that needs no agreement: the next one, or a repetition. Raises if it does not fit its variable."""
    stand = server.tables.stands[run, replica]
    if note.number < stand.writes_again:
        return
    if note.number == stand.writes_again < stand.writes:
        replay_check.check_write(server, run, replica, note)
        server.tables.stands[run, replica] = replace(stand, writes_again=note.number + 1)
        return
    if note.number > stand.writes or note.k != stand.count or stand.returned is not None:
        raise PeerProtocolError(
            f"replica {replica} sent write note {note.number} of {runs.name(run)} after {note.k} merge points, but the "
            f"server has {stand.writes} notes and {stand.count} merge points"
            f"{' and its return' * (stand.returned is not None)}"
        )
    variables.write(server, note.variable, note.op, None, (note.value,), note.indices)
    server.tables.writes[run, replica, note.number] = note
    server.tables.stands[run, replica] = replace(stand, writes=stand.writes + 1, writes_again=stand.writes_again + 1)


def _bring(server: State, run: RunId, replica: int, point: Point) -> None:
    """Record a merge point of a replica: the next one, or a repetition."""
    stand = server.tables.stands[run, replica]
    if point.k == stand.again < stand.count:
        server.tables.points[run, replica, point.k] = replay_check.check_point(server, run, replica, point)
        server.tables.stands[run, replica] = replace(stand, again=stand.again + 1)
        return
    if point.k < stand.again:
        if server.tables.points[run, replica, point.k] != point:
            raise PeerProtocolError(
                f"replica {replica} sent {merge.title(point)} as merge point {point.k} of {runs.name(run)}, but had "
                f"sent {merge.title(server.tables.points[run, replica, point.k])} before"
            )
        return
    if point.k > stand.again:
        raise PeerProtocolError(
            f"replica {replica} sent merge point {point.k} of {runs.name(run)}, but {stand.again} is the next one"
        )
    if stand.returned is not None:
        raise PeerProtocolError(f"replica {replica} sent {merge.title(point)} after its return from {runs.name(run)}")
    if isinstance(point, ApplyPoint):
        for update in point.updates:
            known = server.tables.sets.get(update.variable_set)
            if update.variable_set and (known is None or known.optimizer != update.optimizer):
                raise PeerProtocolError(f"optimizer {update.optimizer} has no set of variables {update.variable_set}")
        server.tables.tally.applies[replica] += 1
    server.tables.tally.points[replica] += 1
    server.tables.points[run, replica, point.k] = point
    server.tables.stands[run, replica] = replace(stand, count=stand.count + 1, again=stand.again + 1)
