"""Names every long wait: who waits, where, and for whom. Ends workers that keep others waiting for too long.

Owns the sentences and their pace, and the step timeout. The engine calls it once a tick.
"""

from __future__ import annotations

from collections.abc import Iterable

from cs_proto.messages import RunId, WaitingFor, WaitReport
from cs_proto.pace import Pace
from cs_proto.records import replace
from cs_server.engine import sessions
from cs_server.engine.store.state import State
from cs_server.engine.store.tables import ReplicaProgress, RunState
from cs_server.events import EndWorker, Log, Send, TraceWorker

from . import merge, runs

#: Seconds after which the controller is told what it waits for, and told again; fewer where it names waits sooner.
NAME_EVERY = 10.0
# The same for a run that was cancelled: who pressed Ctrl-C wants to know.
_NAME_CANCELLED_EVERY = 1.0


# A wait of this many seconds makes the workers that are awaited show their stacks: if other replicas wait, and if only
# the controller waits, because a step may take long.
_STACKS_AFTER, _ALONE_STACKS_AFTER = 2 * NAME_EVERY, 6 * NAME_EVERY
# The kinds of waits, each of which has a pace over the whole life of the service.
_RUN, _CLIENT, _STACKS, _ALONE_STACKS = range(4)


def patience(server: State) -> float:
    """The seconds of a wait in a run that is not cancelled before which a tick does nothing about it."""
    named, timeout = min(NAME_EVERY, server.config.name_after), server.config.step_timeout
    return named if timeout is None else min(named, timeout)


def tick(server: State, now: float) -> None:
    """Name what waits for long: to the controller that waits for it, often enough to name it, else in the log, at
    growing intervals."""
    for run, state in server.tables.runs.items():
        if not state.is_finished:
            _tick_run(server, run, state, now)
            has_nested = any(o[:-2] == run and not s.is_finished for o, s in server.tables.runs.items())
            if server.config.step_timeout is not None and not has_nested:
                _end_silent(server, run, state, now, server.config.step_timeout)
    for peer, session in server.tables.clients.items():
        if not session.is_welcome and now - session.named >= NAME_EVERY:
            server.tables.clients[peer] = replace(session, named=now)
            missing = [sessions.title(server, r) for r in server.replicas if sessions.worker_peer(server, r) is None]
            what = f"{' and '.join(missing)} to register" if missing else "the runs of the client before it to end"
            client = f"client {session.hello.client} (pid {session.hello.pid})"
            if _is_due(server, _CLIENT, now - session.since):
                server.out.append(Log(f"{client}: waiting {now - session.since:.0f} s for {what}", slow=True))


def _tick_run(server: State, run: RunId, state: RunState, now: float) -> None:
    stands = [server.tables.stands[run, replica] for replica in server.replicas]
    stopped = _waiting(state, stands)
    is_cancelled = state.failure is not None and state.failure.cause == "cancelled"
    every = _NAME_CANCELLED_EVERY if is_cancelled else min(NAME_EVERY, server.config.name_after)
    if not stopped or now - max(min(stopped), state.named) < every:
        return
    server.tables.runs[run] = replace(state, named=now)
    working = _working(stands)
    since, whom = f"{now - min(stopped):.0f} s", _whom(server, run, state, stands, now)
    controller = sessions.controller_peer(server)
    if state.awaited and controller is not None:  # which names it to the user
        server.out.append(Send(controller, WaitingFor(run, whom)))
    elif _is_due(server, _RUN, now - min(stopped)):
        server.out.append(Log(f"{runs.name(run)}: waiting {since} for {whom}", slow=True))
    waiting = [stand.since for stand in stands if stand.is_stopped and not stand.is_lost]
    if waiting:
        shows_stacks = _is_due(server, _STACKS, now - min(waiting), _STACKS_AFTER)
    else:
        shows_stacks = _is_due(server, _ALONE_STACKS, now - state.awaited, _ALONE_STACKS_AFTER)
    if shows_stacks:
        _show_stacks(server, {*working, 0} if state.token >= 0 else working)


def _working(stands: list[ReplicaProgress]) -> list[int]:
    """The replicas that others wait for."""
    return [replica for replica, stand in enumerate(stands) if not stand.is_stopped or stand.is_preserving]


def _whom(server: State, run: RunId, state: RunState, stands: list[ReplicaProgress], now: float) -> str:
    """For whom a run waits, and where its replicas are."""
    seen, working = server.tables.tally.seen, _working(stands)
    awaited = [
        f"{sessions.title(server, r)}, {'being started again' if r in server.tables.deaths else 'last seen'}"
        + f" {now - seen[r]:.0f} s ago" * (r not in server.tables.deaths)
        for r in working
    ]
    if state.token >= 0:
        awaited.append(f"the merge function of {merge.title(server.tables.points[run, 0, state.token])}")
    if not working:
        awaited = [f"commit {server.tables.tally.committing}" if server.tables.tally.committing else "the service"]
    where = [_where(server, run, replica, stand) for replica, stand in enumerate(stands) if stand.is_stopped]
    where = where or ["no replica has come to a merge point"]
    return f"{' and '.join(awaited)}; {'; '.join(where)}"


def waits(server: State, now: float) -> tuple[str, ...]:
    """What each open run has waited for, and for how long."""
    found = []
    for run, state in sorted(server.tables.runs.items()):
        stands = [server.tables.stands[run, replica] for replica in server.replicas]
        stopped = [] if state.is_finished else _waiting(state, stands)
        if stopped:
            whom = _whom(server, run, state, stands, now)
            found.append(f"{runs.name(run)}: waiting {now - min(stopped):.1f} s for {whom}")
    return tuple(found)


def _is_due(server: State, kind: int, waited: float, after: float = 0.0) -> bool:
    """Whether a wait is to be named that has lasted ``waited`` seconds; the first of its kind after ``after``, if
    waits are named so soon."""
    named = server.tables.tally.name_after
    pace = Pace(named[kind] or max(server.config.name_after, after))
    is_due = pace.is_due(waited)
    if is_due:
        named[kind] = pace.after
    return is_due


def _show_stacks(server: State, replicas: Iterable[int]) -> None:
    for replica in sorted(replicas):
        session = server.tables.workers.get(replica)
        if session is not None and replica not in server.tables.deaths:
            server.out.append(TraceWorker(replica, session.worker.incarnation))


def _waiting(state: RunState, stands: list[ReplicaProgress]) -> list[float]:
    """The times since when replicas and the controller have waited for the others."""
    since = [stand.since for stand in stands if stand.is_stopped and not stand.is_lost]
    return [*since, state.awaited] if state.awaited else since


def _end_silent(server: State, run: RunId, state: RunState, now: float, timeout: float) -> None:
    """End the workers that others wait for and that were silent for ``timeout`` seconds."""
    stands = [server.tables.stands[run, replica] for replica in server.replicas]
    waiting = _waiting(state, stands)
    for replica, stand in enumerate(stands):
        session = server.tables.workers.get(replica)
        # With the merge function, too.
        is_at_work = not stand.is_stopped or stand.is_preserving or (replica == 0 and state.token >= 0)
        if not is_at_work or not waiting or session is None or replica in server.tables.deaths:
            continue
        seen = server.tables.tally.seen
        if now - max(seen[replica], min(waiting)) > timeout:
            seen[replica] = now
            what = "preserve what it has read" if stand.is_preserving else "come to its next merge point"
            reason = f"it did not {what} within {timeout:g} s in {runs.name(run)}"
            server.out.append(Log(f"{sessions.title(server, replica)} is ended: {reason}", slow=True))
            server.out.append(EndWorker(replica, session.worker.incarnation, reason))


def _where(server: State, run: RunId, replica: int, stand: ReplicaProgress) -> str:
    if stand.read is not None:
        return f"replica {replica} waits at {merge.title(stand.read)}"
    if stand.waiting >= 0:
        return f"replica {replica} waits at {merge.title(server.tables.points[run, replica, stand.waiting])}"
    if stand.returned is not None:
        return f"replica {replica} returned after {merge.counted(stand.returned.count)}"
    return f"replica {replica} is lost"


def note_wait(server: State, record: WaitReport, now: float) -> None:
    """The controller waits for the end of a run, which may not have begun."""
    if runs.begin_again(server, record.run, now, record.series):
        state = server.tables.runs[record.run]
        if not state.awaited:
            server.tables.runs[record.run] = replace(state, awaited=now - record.seconds)
