"""Runs: what each replica has brought, and which runs are open.

Owns the records of runs from their first message until they are dropped. It decides who is heard and what is a
repetition; what follows from what the replicas brought is decided by ``progress``, which looks at the same tables.
"""

from __future__ import annotations

from operator import itemgetter

from cs_proto.arrays import Location
from cs_proto.errors import ContextError, PeerProtocolError, ReplicaLostError
from cs_proto.failures import error_of
from cs_proto.messages import (
    MOST_AHEAD,
    Accepted,
    ApplyPoint,
    Ask,
    AssignPoint,
    Cancel,
    Committed,
    Died,
    Error,
    MergeCallPoint,
    MergeCallReturn,
    Merged,
    Note,
    PointFailed,
    Preserve,
    ReadPoint,
    Reduced,
    Return,
    RunFinished,
    RunId,
    StepFinished,
    Token,
    WaitReport,
    WorkerRestarted,
    WriteNote,
)
from cs_proto.records import Record, replace
from cs_server.events import Command, FreeResults, Log, Send

from . import merge
from .catalogue import Catalogue
from .commits import Commits
from .replay_check import Diverged, ReplayCheck
from .sessions import Sessions
from .state import Failure, Point, ReplicaProgress, RunState, Tables

__all__ = ["Runs", "name"]


class Runs:
    """The runs there are. Methods that refuse raise, and the whole message then counts for nothing."""

    def __init__(
        self,
        tables: Tables,
        out: list[Command],
        sessions: Sessions,
        catalogue: Catalogue,
        commits: Commits,
        recollection: ReplayCheck,
        replicas: int,
    ) -> None:
        self._tables = tables
        self._out = out
        self._sessions = sessions
        self._catalogue = catalogue
        self._commits = commits
        self._recollection = recollection
        self._replicas = range(replicas)

    # --- what replicas send -------------------------------------------------------------------------------------------

    def ask(self, peer: bytes, record: Ask, now: float) -> None:
        """Note what a replica brings and that it waits; what was asked and answered before is answered again."""
        run, replica, point = record.run, record.replica, record.point
        if self._is_of_another(run, record.client) or self._is_over(run, record.series):
            over = error_of(ContextError(f"{name(run)} is over"), replica, point.k)
            self._out.append(Send(peer, PointFailed(run, point.k, over, True)))
            return
        self._begin(run, now, record.series)
        try:
            self._ask(peer, record, now)
        except Diverged as diverged:
            self.diverged(run, replica, diverged)
            self._out.append(Send(peer, PointFailed(run, point.k, error_of(diverged, replica, point.k), True)))

    def _ask(self, peer: bytes, record: Ask, now: float) -> None:
        run, replica, point = record.run, record.replica, record.point
        known = self._tables.stands[run, replica]
        for note in record.notes:
            self._note(run, replica, note)
        reads = isinstance(point, ReadPoint)
        if isinstance(point, ReadPoint):
            brought = self._tables.stands[run, replica].again
            if point.k > brought:
                raise PeerProtocolError(f"replica {replica} reads after {point.k} merge points but brought {brought}")
        else:
            self._bring(run, replica, point)
        stand = self._tables.stands[run, replica]
        if (reads and stand.read == point) or (not reads and stand.waiting == point.k):
            self._ask_again(peer, record, stand)
            return
        is_new = stand.again > known.again or (reads and stand.returned is None)
        answer = self.answer(run, replica, point.k, reads)
        must_wait = self._commits.is_busy or self.is_deferred(run)
        if answer is not None and not (is_new and must_wait):
            self._out.append(Send(peer, answer))
        elif is_new:
            inside = self._tables.runs[run].token
            if replica == 0 and inside >= 0 and point.k > inside:
                raise PeerProtocolError(f"replica 0 of {name(run)} asks at {merge.title(point)} inside its merge_call")
            if stand.is_waiting:
                raise PeerProtocolError(f"replica {replica} of {name(run)} asks at {merge.title(point)} while it waits")
            if stand.is_replaying and answer is None:
                raise self._gone_on(stand, f"waits at {merge.title(point)}")
            self._tables.stands[run, replica] = replace(
                stand,
                since=now,
                waiting=-1 if reads else point.k,
                read=point if isinstance(point, ReadPoint) else None,
                views="preserved" if record.preserved else "live",
            )
            if inside == point.k and not reads:
                self.tell_holder(run, replica)

    def _ask_again(self, peer: bytes, record: Ask, stand: ReplicaProgress) -> None:
        """Handle an Ask of a replica that already waits at this point: it has preserved its views, or it may have
        missed the Preserve."""
        if record.preserved and stand.views != "preserved":
            self._tables.stands[record.run, record.replica] = replace(stand, views="preserved")
        elif stand.views == "asked":
            self._out.append(Send(peer, Preserve(record.run, record.point.k)))

    def tell_holder(self, run: RunId, replica: int) -> None:
        """A replica comes to a merge_call whose token is out, so its worker is another than when it was handed out:
        the holder may have to send it the nested run that is open."""
        holder, session = self._sessions.worker_peer(0), self._tables.workers.get(replica)
        if holder is None or session is None or replica == 0:
            return
        nested = sorted(other for other in self._tables.runs if other[:-1] == (*run, self._tables.runs[run].token))
        owed = [other for other in nested if self._tables.stands[other, replica].returned is None]
        first = owed[0][-1] if owed else (nested[-1][-1] + 1 if nested else 0)
        record = WorkerRestarted((*run, self._tables.runs[run].token, first), session.worker)
        self._out.append(Send(holder, record))

    def returned(self, peer: bytes, record: Return, now: float) -> None:
        """Note a replica's result. Of a run that is finished the answer is repeated."""
        run, replica = record.run, record.replica
        if self._is_of_another(run, record.client) or self._is_over(run, record.series):
            self._out.append(Log(f"replica {replica} returned from {name(run)}, which is over"))
            return
        self._begin(run, now, record.series)
        stand = self._tables.stands[run, replica]
        if stand.returned is not None:
            if self._tables.runs[run].is_finished:
                self.finish(run, self._tables.runs[run])
            return
        try:
            for note in record.notes:
                self._note(run, replica, note)
            stand = self._tables.stands[run, replica]
            if stand.is_replaying and self._tables.runs[run].failure is None:
                raise self._gone_on(stand, f"returned after {merge.counted(record.count)}")
        except Diverged as diverged:
            self.diverged(run, replica, diverged)
            record = replace(record, count=stand.count)
        stand = self._tables.stands[run, replica]
        # One that was refused or interrupted at a merge point counts as it likes: it returns an error anyway.
        if record.error is None and record.count != stand.count:
            raise PeerProtocolError(
                f"replica {replica} returned from {name(run)} after {record.count} merge points, of which it brought "
                f"{stand.count}"
            )
        self._tables.stands[run, replica] = replace(
            stand, since=now, waiting=-1, read=None, returned=replace(record, notes=())
        )
        self._tables.tally.replica_runs[replica] += 1
        for other in self._siblings(run) if record.series else ():
            if other[0] < run[0] - record.lookahead and not self.blocks(other):
                self.drop(other)
        state = self._tables.runs[run]
        if state.is_finished and record.series:  # a replica was dead before it began
            self._out.append(Send(peer, StepFinished(run, True)))
        if replica == 0 and state.token >= 0:
            inside = PeerProtocolError(f"replica 0 returned from {name(run)} inside its merge_call")
            failure = state.failure or Failure("operation", 0, error_of(inside, 0, state.token))
            self._tables.runs[run] = replace(state, token=-1, failure=failure)

    def merge_call_returned(self, peer: bytes, record: MergeCallReturn) -> None:
        """The holder of the token gives it back."""
        run, k = record.run, record.k
        state = self._tables.runs.get(run)
        if peer != self._sessions.worker_peer(0):
            raise PeerProtocolError(f"{peer!r:.80} holds no token of {name(run)}")
        if self._is_over(run) or (run, k) in self._tables.outcomes:
            return  # repeated, or too late
        if state is None or state.token != k:
            if state is not None and state.failure is not None:
                return
            raise PeerProtocolError(f"no token of merge point {k} of {name(run)} is out")
        if record.error is None and len(record.values) != len(self._replicas):
            raise PeerProtocolError(f"{len(record.values)} values of a merge_call over {len(self._replicas)} replicas")
        nested = [other for other in self._tables.runs if other[:-2] == run and self.blocks(other)]
        if nested and record.error is None:
            raise PeerProtocolError(f"the merge_call of {name(run)} returned before {name(nested[0])} was over")
        state = replace(state, token=-1)
        if record.error is None:
            self._tables.outcomes[run, k] = record
        elif state.failure is None:
            state = replace(state, failure=Failure("operation", -1, replace(record.error, merge_index=k)))
        self._tables.runs[run] = state

    # --- what ends runs from outside ----------------------------------------------------------------------------------

    def cancel(self, record: Cancel, now: float) -> None:
        """Give a run up, with those nested in it; of steps that were sent ahead, the first that is not over. It may not
        have begun."""
        cancelled = self._to_cancel(record)
        if cancelled is None:
            return
        if len(cancelled) == 1:
            self._begin(cancelled, now)
        for run, state in self._tables.runs.items():
            if run[: len(cancelled)] == cancelled and not state.is_finished:
                error = error_of(KeyboardInterrupt(f"{name(run)} was cancelled"), merge_index=state.agreed)
                self._tables.runs[run] = replace(state, token=-1, failure=Failure("cancelled", -1, error))

    def awaited(self, record: WaitReport, now: float) -> None:
        """The controller has waited for the end of a run. It may not have begun."""
        if self.begin_again(record.run, now, record.series):
            state = self._tables.runs[record.run]
            if not state.awaited:
                self._tables.runs[record.run] = replace(state, awaited=now - record.seconds)

    def give_up_absent(self) -> None:
        """Of a run that cannot go on, nobody carries out the part of a replica whose worker is dead, or is new and has
        not been sent it."""
        for replica in self._replicas:
            session = self._tables.workers.get(replica)
            if session is not None and session.is_announced and replica not in self._tables.deaths:
                continue
            for run, state in self._tables.runs.items():
                stand = self._tables.stands[run, replica]
                if state.failure is not None and stand.returned is None and not stand.is_lost:
                    self._tables.stands[run, replica] = replace(stand, waiting=-1, read=None, is_lost=True)

    def _to_cancel(self, record: Cancel) -> RunId | None:
        for number in range(record.run[0], record.run[0] + record.later + 1):
            run = (number, *record.run[1:])
            state = self._tables.runs.get(run)
            if state is None:
                if not self._is_over(run):
                    return run
            elif not state.is_finished:
                return run
            elif self._verdict(run, state) is not None:
                return None  # the steps after one that failed do not begin
        return None

    def cancel_all(self, now: float) -> None:
        """The controller is gone: give up whatever is open."""
        for run in self._tables.runs:
            if len(run) == 1:
                self.cancel(Cancel(run), now)
                stands = [self._tables.stands[run, replica] for replica in self._replicas]
                if not any(stand.count or stand.is_stopped for stand in stands):
                    self.drop(run)  # cancelled before any replica heard of it

    def forget_left(self) -> None:
        """No controller is there: forget the runs that no replica is in any more."""
        for run, state in self._tables.runs.items():
            if len(run) == 1 and state.is_finished and not self._commits.concerns(run):
                stands = [self._tables.stands[run, replica] for replica in self._replicas]
                if all(stand.returned is not None or stand.is_lost for stand in stands):
                    self.drop(run)

    def lost(self, run: RunId, died: Died, then: str) -> None:
        """A worker is dead and ``run``, from which it has not returned, cannot go on; ``then`` says what now."""
        state, stand = self._tables.runs[run], self._tables.stands[run, died.rank]
        if stand.returned is not None or stand.is_lost:
            return
        self._tables.stands[run, died.rank] = replace(stand, waiting=-1, read=None, is_lost=True)
        if state.failure is None or state.failure.cause == "mismatch":
            stands = self.standing_commits(run)
            lost = ReplicaLostError(
                f"replica {died.rank} (pid {died.pid}, w{died.rank}.{died.incarnation}) was lost in {name(run)}: "
                f"{died.cause}. {stands} commit{'s' * (stands != 1)} of this run stand{'s' * (stands == 1)}, the "
                f"rest was dropped; {then}{_last_lines(died)}"
            )
            state = replace(state, failure=Failure("lost", died.rank, error_of(lost, died.rank, stand.count)))
        self._tables.runs[run] = replace(state, token=-1 if died.rank == 0 else state.token)

    def diverged(self, run: RunId, replica: int, diverged: Diverged) -> None:
        """What a replica brings after its worker's death is not what it brought before: the run cannot go on."""
        state = self._tables.runs[run]
        if state.failure is None:
            lost = ReplicaLostError(
                f"replica {replica} was lost in {name(run)}: {diverged}. Nothing of this run is committed. The "
                "function depends on something that a new worker does not share (time, a file, kept state); the next "
                "run works"
            )
            at = self._tables.stands[run, replica].again
            self._tables.runs[run] = replace(state, failure=Failure("lost", replica, error_of(lost, replica, at)))

    def _gone_on(self, stand: ReplicaProgress, what: str) -> Diverged:
        return Diverged(
            f"replay diverged: it {what}, but had brought {merge.counted(stand.count)} and {stand.writes} write notes "
            "before its worker died"
        )

    # --- what is open -------------------------------------------------------------------------------------------------

    def blocks(self, run: RunId) -> bool:
        """Whether something of ``run`` may still be committed."""
        state = self._tables.runs[run]
        hopeless = state.failure is not None and state.failure.cause in ("cancelled", "lost")
        return not state.is_finished and not (hopeless and not self._commits.concerns(run))

    def is_deferred(self, run: RunId) -> bool:
        """Whether an earlier run of the client must be over first."""
        return len(run) == 1 and any(len(o) == 1 and o < run and self.blocks(o) for o in self._tables.runs)

    def holder(self) -> RunId | None:
        """The run under whose token alone variables may be written from outside replicas; None: the client may.

        Raises ContextError where nobody may, because replicas are at work.
        """
        open_runs = [run for run in self._tables.runs if self.blocks(run)]
        if not open_runs:
            return None
        innermost = max(open_runs, key=lambda run: (len(run), [-part for part in run]))
        if self._tables.runs[innermost].token < 0:
            raise ContextError(f"{name(innermost)} is open; what the controller wants must wait for its end")
        return innermost

    def drop(self, run: RunId) -> None:
        """Forget everything about ``run`` and those nested in it."""
        self._forget_points(run, is_kept=False)
        for other in self._tables.runs:
            if other[: len(run)] == run:
                for replica in self._replicas:
                    del self._tables.stands[other, replica]
                del self._tables.runs[other]
        for key, request in self._tables.requests.items():
            if len(run) == 1 and request.run == run[0] and request.reply is not None:
                del self._tables.requests[key]

    def _forget_points(self, run: RunId, *, is_kept: bool = True) -> None:
        """Forget what was brought to ``run`` and those nested in it, and keep how they ended, unless that goes, too."""
        has_results = False
        for other, state in self._tables.runs.items():
            if other[: len(run)] != run:
                continue
            for replica in self._replicas:
                stand = self._tables.stands[other, replica]
                for k in range(stand.count):
                    del self._tables.points[other, replica, k]
                for number in range(stand.writes):
                    self._tables.writes.discard((other, replica, number))
                if is_kept and (stand.count or stand.writes):
                    self._tables.stands[other, replica] = replace(stand, count=0, writes=0, again=0, writes_again=0)
            for k in range(state.agreed):
                has_results |= lies_in_arena(self._tables.outcomes.get((other, k)))
                self._tables.outcomes.discard((other, k))
            self._recollection.forget(other)
            for ticket, computation in self._tables.computations.items():
                if computation.run == other:
                    del self._tables.computations[ticket]
            if is_kept and state.agreed:
                self._tables.runs[other] = replace(state, agreed=0, committed=0)
        if has_results and len(run) == 1:
            self._out.append(FreeResults())

    # --- answers ------------------------------------------------------------------------------------------------------

    def answer(self, run: RunId, replica: int, k: int, reads: bool) -> Record | None:
        """What a replica that asked at merge point ``k`` is told; None where that is not decided."""
        state = self._tables.runs[run]
        if reads:
            if state.committed >= k:
                return Committed(run, k)
        else:
            outcome = self._tables.outcomes.get((run, k))
            if isinstance(outcome, MergeCallReturn):
                is_replay = self._tables.stands[run, replica].deaths > 0  # the merge function is over
                return Merged(run, k, outcome.values[replica]) if replica or is_replay else self._token(run, k)
            if outcome is not None:
                return outcome
            if state.token == k and replica == 0:
                return self._token(run, k)
        if state.failure is not None:
            return PointFailed(run, k, state.failure.error, True)
        point = None if reads else self._tables.points.get((run, replica, k))
        if isinstance(point, ApplyPoint) and point.variable_set:  # a new worker asks for the number of a known set
            return Accepted(run, k, point.variable_set)
        return None

    def finish(self, run: RunId, state: RunState) -> None:
        """Tell the controller of ``run`` how it ended, and of a step those who wait for its end; said again, it is the
        same."""
        returns = self._returns(run)
        error = self._verdict(run, state)
        for replica, returned in enumerate(returns):
            worker = self._sessions.worker_peer(replica)
            if returned is not None and returned.series and worker is not None:
                self._out.append(Send(worker, StepFinished(run, error is not None)))
        peer = self._sessions.controller_peer() if len(run) == 1 else self._sessions.worker_peer(0)
        if peer is None:
            return
        values = () if error else tuple(r.value for r in returns if r is not None and r.value is not None)
        self._out.append(Send(peer, RunFinished(run, values, error, state.commits)))

    def finish_again(self) -> None:
        """The controller may not have heard how its runs ended: say it of those that are kept."""
        for run, state in sorted(self._tables.runs.items()):
            if len(run) == 1 and state.is_finished:
                self.finish(run, state)

    def _token(self, run: RunId, k: int) -> Token:
        points = [self._tables.points[run, replica, k] for replica in self._replicas]
        return Token(run, k, tuple(point.arguments for point in points if isinstance(point, MergeCallPoint)))

    # --- parts --------------------------------------------------------------------------------------------------------

    def _returns(self, run: RunId) -> list[Return | None]:
        return [self._tables.stands[run, replica].returned for replica in self._replicas]

    def _verdict(self, run: RunId, state: RunState) -> Error | None:
        return merge.verdict(state.failure, [r.error if r else None for r in self._returns(run)])

    def _is_over(self, run: RunId, series: int = 0) -> bool:
        """Whether ``run`` has been dropped since: a later one of its kind has begun, or a step of its series failed."""
        if run in self._tables.runs:
            return False
        siblings = self._siblings(run)
        if any(other > run for other in siblings) or (len(run) > 1 and self._is_over(run[:-2])):
            return True
        return series > 0 and any(self._has_failed_in(series, other) for other in siblings)

    def _is_of_another(self, run: RunId, client: str) -> bool:
        """Whether ``run`` is one of a client that has left and that is over. The server knows nothing of it any more,
        but a worker says its last words again to a server in the place of one that died."""
        peer = self._sessions.controller_peer()
        controller = None if peer is None else self._sessions.client(peer)
        if controller is None:
            return client != "" and run not in self._tables.runs
        return client not in ("", controller.client)

    def _has_failed_in(self, series: int, run: RunId) -> bool:
        failed = self._tables.runs[run].failure is not None or any(r and r.error for r in self._returns(run))
        return failed and self._is_step(run, series)

    def _is_step(self, run: RunId, series: int) -> bool:
        """Whether ``run`` is a step of ``series`` that is over."""
        is_finished = self._tables.runs[run].is_finished
        return is_finished and any(returned and returned.series == series for returned in self._returns(run))

    def _siblings(self, run: RunId) -> list[RunId]:
        """The other runs of the same controller: the client's, or those nested in the same run."""
        return [o for o in self._tables.runs if len(o) == len(run) and o[:-2] == run[:-2] and o != run]

    def _begin(self, run: RunId, now: float, series: int = 0) -> None:
        """Make the records of ``run`` where there are none, and drop those of runs before it; of a step of the same
        ``series`` it is kept how it ended, which the controller may not have heard."""
        if run in self._tables.runs:
            return
        if len(run) > 1:
            parent = self._tables.runs.get(run[:-2])
            if parent is None or parent.token != run[-2]:
                raise PeerProtocolError(f"{name(run)} is nested in a merge_call whose token is not out")
        for other in self._siblings(run):
            if series and self._is_step(other, series):
                self._forget_points(other)
            elif not self.blocks(other):
                self.drop(other)
        failure = None
        for replica in self._replicas:
            died = self._tables.deaths.get(replica)
            died = None if died is not None and died.restarts else died
            self._tables.stands[run, replica] = ReplicaProgress(0, 0.0, -1, None, None, died is not None)
            if died is not None and failure is None:
                lost = ReplicaLostError(
                    f"replica {replica} (pid {died.pid}, w{replica}.{died.incarnation}) is dead: {died.cause}. "
                    f"{name(run).capitalize()} did not begin; make a new CentralStorageStrategy to train on"
                    f"{_last_lines(died)}"
                )
                failure = Failure("lost", replica, error_of(lost, replica))
        self._tables.runs[run] = state = RunState(0, 0, 0, -1, failure, failure is not None, now)
        if failure is not None:
            self._tables.tally.runs += 1
            self.finish(run, state)

    def check_near(self, run: RunId) -> None:
        """Raise PeerProtocolError if a controller cannot have begun ``run`` by now. Otherwise all runs before it would
        count as over."""
        if run in self._tables.runs:
            return
        known = [other[-1] for other in self._siblings(run) if other[:-1] == run[:-1]]
        last = max(known, default=0 if len(run) == 1 else -1)  # the client's runs count from 1, nested ones from 0
        if run[-1] - last > MOST_AHEAD + 1:
            raise PeerProtocolError(
                f"{name(run)} is {run[-1] - last} after the last one known, "
                f"{f'which is {last}' if last >= 0 else 'of which there is none'}; at most {MOST_AHEAD + 1}, since a "
                f"controller sends at most {MOST_AHEAD} ahead"
            )

    def begin_again(self, run: RunId, now: float, series: int) -> bool:
        """Make the records of a run of which nothing may have been heard. False where it is over."""
        if self._is_over(run, series):
            return False
        self._begin(run, now, series)
        return True

    def has_large_results(self, run: RunId) -> bool:
        """Whether a replica returned what lies in its arena."""
        values = (returned.value for returned in self._returns(run) if returned is not None)
        return any(isinstance(a.place, Location) for value in values if value is not None for a in value.arrays)

    def _note(self, run: RunId, replica: int, note: Note) -> None:
        if isinstance(note, WriteNote):
            self._note_write(run, replica, note)
            return
        is_checked = note.checked if isinstance(note, AssignPoint) else note.variable_set == 0
        if is_checked:
            raise PeerProtocolError(f"replica {replica} only noted {merge.title(note)}, which has to be asked")
        self._bring(run, replica, note)

    def _note_write(self, run: RunId, replica: int, note: WriteNote) -> None:
        """Record a write that needs no agreement: the next one, or once more one of before. Raises where it does not
        fit its variable."""
        stand = self._tables.stands[run, replica]
        if note.number < stand.writes_again:
            return
        if note.number == stand.writes_again < stand.writes:
            self._recollection.write(run, replica, note)
            self._tables.stands[run, replica] = replace(stand, writes_again=note.number + 1)
            return
        if note.number > stand.writes or note.k != stand.count or stand.returned is not None:
            raise PeerProtocolError(
                f"replica {replica} brings write note {note.number} of {name(run)} after {note.k} merge points, but "
                f"has brought {stand.writes} and {stand.count}{' and returned' * (stand.returned is not None)}"
            )
        self._catalogue.write(note.variable, note.op, None, (note.value,), note.indices)
        self._tables.writes[run, replica, note.number] = note
        self._tables.stands[run, replica] = replace(stand, writes=stand.writes + 1, writes_again=stand.writes_again + 1)

    def _bring(self, run: RunId, replica: int, point: Point) -> None:
        """Record a merge point of a replica: the next one, or once more the same."""
        stand = self._tables.stands[run, replica]
        if point.k == stand.again < stand.count:
            self._tables.points[run, replica, point.k] = self._recollection.point(run, replica, point)
            self._tables.stands[run, replica] = replace(stand, again=stand.again + 1)
            return
        if point.k < stand.again:
            if self._tables.points[run, replica, point.k] != point:
                raise PeerProtocolError(
                    f"replica {replica} brings {merge.title(point)} as merge point {point.k} of {name(run)}, but "
                    f"brought {merge.title(self._tables.points[run, replica, point.k])} before"
                )
            return
        if point.k > stand.again:
            raise PeerProtocolError(
                f"replica {replica} brings merge point {point.k} of {name(run)}, but {stand.again} is the next one"
            )
        if stand.returned is not None:
            raise PeerProtocolError(f"replica {replica} has returned from {name(run)} and brings {merge.title(point)}")
        if isinstance(point, ApplyPoint):
            known = self._tables.sets.get(point.variable_set)
            if point.variable_set and (known is None or known.optimizer != point.optimizer):
                raise PeerProtocolError(f"optimizer {point.optimizer} has no set of variables {point.variable_set}")
            self._tables.tally.applies[replica] += 1
        self._tables.tally.points[replica] += 1
        self._tables.points[run, replica, point.k] = point
        self._tables.stands[run, replica] = replace(stand, count=stand.count + 1, again=stand.again + 1)

    def standing_commits(self, run: RunId) -> int:
        """How many commits of ``run`` there will have been once those under way are finished."""
        state = self._tables.runs[run]
        decided = max((job.k for job in self._tables.jobs.values() if job.kind == "run" and job.run == run), default=0)
        writes = sum(note.k < decided for _, note in self.writes(run))
        return state.commits + writes + sum(self.changes(run, k) for k in range(state.committed, decided))

    def writes(self, run: RunId) -> list[tuple[tuple[RunId, int, int], WriteNote]]:
        """The write notes of ``run`` that are not committed, each replica's in order, replica 0's first."""
        return sorted((e for e in self._tables.writes.items() if e[0][0] == run), key=itemgetter(0))

    def changes(self, run: RunId, k: int) -> bool:
        """Whether the agreed merge point ``k`` changes variables when it is committed."""
        has_failed = isinstance(self._tables.outcomes.get((run, k)), PointFailed)
        return merge.writes(self._tables.points[run, 0, k]) and not has_failed


def lies_in_arena(outcome: object) -> bool:
    """Whether an outcome is an all_reduce or all_gather that was too large for frames."""
    return isinstance(outcome, Reduced) and any(isinstance(array.place, Location) for array in outcome.arrays)


def name(run: RunId) -> str:
    """``run 5``, or ``run 5.2.0`` for one nested in merge point 2 of run 5."""
    return f"run {'.'.join(map(str, run))}"


def _last_lines(died: Died) -> str:
    return f". Its last lines:\n{died.log}" if died.log else ""
