"""Runs: which are open, what is known of them, and how they end.

Owns the records of runs from their first message until they are dropped. ``replica_messages`` records what replicas
bring, and ``progress`` decides what follows.
"""

from __future__ import annotations

from operator import itemgetter

from cs_proto.arrays import Location
from cs_proto.errors import ContextError, PeerProtocolError, ReplicaLostError
from cs_proto.failures import error_of, last_lines, pid_of
from cs_proto.messages import (
    MOST_AHEAD,
    Accepted,
    ApplyPoint,
    Committed,
    Error,
    MergeCallPoint,
    MergeCallReturn,
    Merged,
    OptimizerChange,
    PointFailed,
    Reduced,
    Return,
    RunFinished,
    RunId,
    StepFinished,
    Token,
    WorkerRestarted,
    WriteNote,
)
from cs_proto.records import Record, replace
from cs_server.engine import sessions
from cs_server.engine.catalogue import optimizers
from cs_server.engine.store import reasons
from cs_server.engine.store.state import State
from cs_server.engine.store.tables import Failure, ReplicaProgress, RunState
from cs_server.events import FreeResults, Send

from . import commits, merge, replay_check

# --- what is open -------------------------------------------------------------------------------------------------


def blocks(server: State, run: RunId) -> bool:
    """Whether something of ``run`` may still be committed."""
    state = server.tables.runs[run]
    hopeless = state.failure is not None and state.failure.cause in ("cancelled", "lost")
    return not state.is_finished and not (hopeless and not commits.concerns(server, run))


def is_deferred(server: State, run: RunId) -> bool:
    """Whether ``run`` must wait for the end of an earlier run of the client."""
    return len(run) == 1 and any(len(o) == 1 and o < run and blocks(server, o) for o in server.tables.runs)


def holder(server: State) -> RunId | None:
    """The run whose token is out: only its holder may write variables from outside of replicas. None if the client may.

    Raises ContextError if nobody may, because replicas are at work.
    """
    open_runs = [run for run in server.tables.runs if blocks(server, run)]
    if not open_runs:
        return None
    innermost = max(open_runs, key=lambda run: (len(run), [-part for part in run]))
    if server.tables.runs[innermost].token < 0:
        raise ContextError(f"{name(innermost)} has not ended; send the request again after it has")
    return innermost


def drop(server: State, run: RunId) -> None:
    """Forget everything about ``run`` and the runs nested in it."""
    _forget_points(server, run, is_kept=False)
    for other in server.tables.runs:
        if other[: len(run)] == run:
            for replica in server.replicas:
                del server.tables.stands[other, replica]
            del server.tables.runs[other]
    for key, request in server.tables.requests.items():
        if len(run) == 1 and request.run == run[0] and request.reply is not None:
            del server.tables.requests[key]


def _forget_points(server: State, run: RunId, *, is_kept: bool = True) -> None:
    """Forget what was brought to ``run`` and the runs nested in it. Unless ``is_kept`` is false, keep how they
    ended."""
    has_results = False
    for other, state in server.tables.runs.items():
        if other[: len(run)] != run:
            continue
        for replica in server.replicas:
            stand = server.tables.stands[other, replica]
            for k in range(stand.count):
                del server.tables.points[other, replica, k]
            for number in range(stand.writes):
                server.tables.writes.discard((other, replica, number))
            if is_kept and (stand.count or stand.writes):
                server.tables.stands[other, replica] = replace(stand, count=0, writes=0, again=0, writes_again=0)
        for k in range(state.agreed):
            has_results |= lies_in_arena(server.tables.outcomes.get((other, k)))
            server.tables.outcomes.discard((other, k))
        replay_check.forget(server, other)
        for ticket, computation in server.tables.computations.items():
            if computation.run == other:
                del server.tables.computations[ticket]
        if is_kept and state.agreed:
            server.tables.runs[other] = replace(state, agreed=0, committed=0)
    if has_results and len(run) == 1:
        server.out.append(FreeResults())


# --- answers ------------------------------------------------------------------------------------------------------


def answer(server: State, run: RunId, replica: int, k: int, reads: bool) -> Record | None:
    """The answer to a replica that asks at merge point ``k``. None if it is not decided."""
    state = server.tables.runs[run]
    if reads:
        if state.committed >= k:
            return Committed(run, k)
    else:
        outcome = server.tables.outcomes.get((run, k))
        if isinstance(outcome, MergeCallReturn):
            is_replay = server.tables.stands[run, replica].deaths > 0  # the merge function is over
            return Merged(run, k, outcome.values[replica]) if replica or is_replay else _token(server, run, k)
        if outcome is not None:
            return outcome
        if state.token == k and replica == 0:
            return _token(server, run, k)
    if state.failure is not None:
        return PointFailed(run, k, state.failure.error, True)
    point = None if reads else server.tables.points.get((run, replica, k))
    if isinstance(point, ApplyPoint) and not point.needs_answer:  # a new worker asks for the numbers of known sets
        return Accepted(run, k, tuple(update.variable_set for update in point.updates))
    return None


def count(server: State, run: RunId, state: RunState) -> None:
    """Count a run that is over, and whether it was captured."""
    tally, reason = server.tables.tally, server.reasons.pop(run, reasons.UNQUIET)
    tally.runs += 1
    if reason == reasons.CAPTURED:
        tally.captured += 1
    else:
        tally.uncaptured[reason if verdict(server, run, state) is None else reasons.FAILED] += 1


def finish(server: State, run: RunId, state: RunState) -> None:
    """Tell the controller of ``run`` how it ended, and its workers if it is a step of a series. Repeated, it says the
    same."""
    returns = _returns(server, run)
    error = verdict(server, run, state)
    for replica, returned in enumerate(returns):
        worker = sessions.worker_peer(server, replica)
        if returned is not None and returned.series and worker is not None:
            server.out.append(Send(worker, StepFinished(run, error is not None)))
    peer = sessions.controller_peer(server) if len(run) == 1 else sessions.worker_peer(server, 0)
    if peer is None:
        return
    values = () if error else tuple(r.value for r in returns if r is not None and r.value is not None)
    server.out.append(Send(peer, RunFinished(run, values, error, state.commits)))


def tell_holder(server: State, run: RunId, replica: int) -> None:
    """A replica comes to a merge_call whose token is already out, so its worker is new. The holder of the token may
    have to send it the open nested run."""
    peer, session = sessions.worker_peer(server, 0), server.tables.workers.get(replica)
    if peer is None or session is None or replica == 0:
        return
    nested = sorted(other for other in server.tables.runs if other[:-1] == (*run, server.tables.runs[run].token))
    owed = [other for other in nested if server.tables.stands[other, replica].returned is None]
    first = owed[0][-1] if owed else (nested[-1][-1] + 1 if nested else 0)
    record = WorkerRestarted((*run, server.tables.runs[run].token, first), session.worker)
    server.out.append(Send(peer, record))


def finish_again(server: State) -> None:
    """Repeat to the controller how the kept runs ended: it may not have heard."""
    for run, state in sorted(server.tables.runs.items()):
        if len(run) == 1 and state.is_finished:
            finish(server, run, state)


def last_finished(server: State) -> int:
    """The number of the controller's last finished run, of which the tables may keep only those that follow it. 0 if
    there is none, or if the controller has left."""
    known = [(run[0], state.is_finished) for run, state in server.tables.runs.items() if len(run) == 1]
    before_open = min((number for number, is_finished in known if not is_finished), default=1) - 1
    return max((number for number, is_finished in known if is_finished), default=before_open)


def _token(server: State, run: RunId, k: int) -> Token:
    points = [server.tables.points[run, replica, k] for replica in server.replicas]
    return Token(run, k, tuple(point.arguments for point in points if isinstance(point, MergeCallPoint)))


# --- which runs there are -----------------------------------------------------------------------------------------


def _returns(server: State, run: RunId) -> list[Return | None]:
    return [server.tables.stands[run, replica].returned for replica in server.replicas]


def verdict(server: State, run: RunId, state: RunState) -> Error | None:
    """The error with which ``run`` ends. None if it ends well."""
    return merge.verdict(state.failure, [r.error if r else None for r in _returns(server, run)])


def is_spoiled(server: State, run: RunId) -> bool:
    """Whether a replica has returned that a variable was written in place, or that a gradient is not finite: what the
    run computed from wrong numbers does not count."""
    returns = _returns(server, run)
    return any(r is not None and r.error is not None and r.error.exception in merge.SPOILING for r in returns)


def is_over(server: State, run: RunId, series: int = 0) -> bool:
    """Whether ``run`` was dropped: a later run has begun, or an earlier step of its series failed."""
    if run in server.tables.runs:
        return False
    others = siblings(server, run)
    if any(other > run for other in others) or (len(run) > 1 and is_over(server, run[:-2])):
        return True
    return series > 0 and any(_has_failed_in(server, series, other) for other in others)


def has_gone_on(server: State, run: RunId, replica: int) -> bool:
    """Whether ``replica`` is in a later run than ``run``, or was. Else it may have missed the end of ``run``."""
    later = (server.tables.stands[other, replica] for other in siblings(server, run) if other > run)
    return any(stand.count or stand.is_waiting or stand.returned is not None for stand in later)


def is_of_another(server: State, run: RunId, client: str) -> bool:
    """Whether ``run`` belongs to a client that has left. The server has forgotten such a run, but a worker repeats its
    last message to a restarted server."""
    peer = sessions.controller_peer(server)
    controller = None if peer is None else sessions.hello_of(server, peer)
    if controller is None:
        return client != "" and run not in server.tables.runs
    return client not in ("", controller.client)


def _has_failed_in(server: State, series: int, run: RunId) -> bool:
    failed = server.tables.runs[run].failure is not None or any(r and r.error for r in _returns(server, run))
    return failed and _is_step(server, run, series)


def _is_step(server: State, run: RunId, series: int) -> bool:
    """Whether ``run`` is a step of ``series`` that is over."""
    is_finished = server.tables.runs[run].is_finished
    return is_finished and any(returned and returned.series == series for returned in _returns(server, run))


def siblings(server: State, run: RunId) -> list[RunId]:
    """The other runs of the same controller: the client's, or those nested in the same run."""
    return [o for o in server.tables.runs if len(o) == len(run) and o[:-2] == run[:-2] and o != run]


def begin(server: State, run: RunId, now: float, series: int = 0, *, is_cancelled: bool = False) -> None:
    """Make the records of ``run`` if there are none, and drop the runs before it. Of earlier steps of the same
    ``series`` keep the outcome: the controller may still ask for it. A Cancel, which does not name the series, keeps
    all outcomes."""
    if run in server.tables.runs:
        return
    if len(run) > 1:
        parent = server.tables.runs.get(run[:-2])
        if parent is None or parent.token != run[-2]:
            raise PeerProtocolError(f"{name(run)} is nested in a merge_call that no worker is running")
    for other in siblings(server, run):
        is_kept = is_cancelled and server.tables.runs[other].is_finished
        if is_kept or (series and _is_step(server, other, series)):
            _forget_points(server, other)
        elif not blocks(server, other):
            drop(server, other)
    failure = None
    for replica in server.replicas:
        died = server.tables.deaths.get(replica)
        died = None if died is not None and died.restarts else died
        server.tables.stands[run, replica] = ReplicaProgress(0, 0.0, -1, None, None, died is not None)
        if died is not None and failure is None:
            lost = ReplicaLostError(
                f"replica {replica} ({pid_of(died)}, w{replica}.{died.incarnation}) is dead: {died.cause}. "
                f"{name(run).capitalize()} was not started; make a new CentralStorageStrategy to continue training"
                f"{last_lines(died)}"
            )
            failure = Failure("lost", replica, error_of(lost, replica))
    is_over, client = failure is not None, sessions.controlling_client(server)
    server.tables.runs[run] = state = RunState(0, 0, 0, -1, failure, is_over, now, client=client)
    if failure is not None:
        count(server, run, state)
        finish(server, run, state)


def change(server: State, run: RunId, changes: tuple[OptimizerChange, ...]) -> None:
    """Take over the hyperparameters that ``run`` brings, once. Raises InvalidArgumentError."""
    state = server.tables.runs[run]
    if not changes or state.has_changed:
        return
    for optimizer in optimizers.changed(server, changes):
        server.tables.optimizers[optimizer.number] = optimizer
    server.tables.runs[run] = replace(state, has_changed=True)


def check_near(server: State, run: RunId) -> None:
    """Raise PeerProtocolError if no controller can have begun ``run`` by now. All runs before it would count as
    over."""
    if run in server.tables.runs:
        return
    known = [other[-1] for other in siblings(server, run) if other[:-1] == run[:-1]]
    before = server.tables.tally.last_run if len(run) == 1 else -1  # nested runs count from 0
    last = max(known, default=before)
    if run[-1] - last > MOST_AHEAD + 1:
        known_one = last if last >= 0 else "there is none"
        raise PeerProtocolError(
            f"{name(run)} is {run[-1] - last} runs after the last known one ({known_one}); at "
            f"most {MOST_AHEAD + 1} are allowed, because a controller sends at most {MOST_AHEAD} runs ahead"
        )


def begin_again(server: State, run: RunId, now: float, series: int) -> bool:
    """Make the records of a run of which nothing may have been heard. False if it is over."""
    if is_over(server, run, series):
        return False
    begin(server, run, now, series)
    return True


def has_large_results(server: State, run: RunId) -> bool:
    """Whether a replica returned an array that lies in its arena."""
    values = (returned.value for returned in _returns(server, run) if returned is not None)
    return any(isinstance(a.place, Location) for value in values if value is not None for a in value.arrays)


def standing_commits(server: State, run: RunId) -> int:
    """How many commits ``run`` will have made when those under way are finished."""
    state = server.tables.runs[run]
    jobs = [job for job in server.tables.jobs.values() if job.kind in ("run", "rest") and job.run == run]
    decided = max((job.k for job in jobs), default=0)
    noted = max((job.end_of_writes for job in jobs), default=0)
    written = sum(note.k < noted for _, note in writes(server, run))
    return state.commits + written + sum(changes(server, run, k) for k in range(state.committed, decided))


def writes(server: State, run: RunId) -> list[tuple[tuple[RunId, int, int], WriteNote]]:
    """The write notes of ``run`` that are not committed: those of replica 0 first, each replica's in order."""
    return sorted((e for e in server.tables.writes.items() if e[0][0] == run), key=itemgetter(0))


def changes(server: State, run: RunId, k: int) -> bool:
    """Whether the agreed merge point ``k`` changes variables when it is committed."""
    has_failed = isinstance(server.tables.outcomes.get((run, k)), PointFailed)
    return merge.writes(server.tables.points[run, 0, k]) and not has_failed


def lies_in_arena(outcome: object) -> bool:
    """Whether an outcome is an all_reduce or all_gather that is too large for frames."""
    return isinstance(outcome, Reduced) and any(isinstance(array.place, Location) for array in outcome.arrays)


def name(run: RunId) -> str:
    """``run 5``, or ``run 5.2.0`` for one nested in merge point 2 of run 5."""
    return f"run {'.'.join(map(str, run))}"
