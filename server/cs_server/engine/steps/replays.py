"""What a worker's death means: the worker in its place replays a run, or the run is lost; and who hears of it.

A run and those nested in it are replayed if nothing of them is committed. The records of the run stay and answer the
replay, ``replay_check`` compares the replay with them, and the other replicas wait. A run that kills the same replica
twice is given up. The sender of runs hears of the new worker when that may begin one. It may not begin one while a step
from which the replica has returned is still to be committed, because variables are read without asking; nor while a run
fails, because the sender knows only at its end which runs never begin.
"""

from __future__ import annotations

from cs_proto.messages import CreatedInRun, Died, Resent, RunId, WorkerRestarted
from cs_proto.records import replace
from cs_server.engine import sessions
from cs_server.engine.store.state import State
from cs_server.events import Fingerprinted, Send

from . import commits, endings, replay_check, runs


def worker_died(server: State, died: Died) -> None:
    """A worker is dead: decide about the runs from which it has not returned."""
    replica = died.rank
    if died.restarts and not _was_in_run(server, died):
        return  # its death changes nothing: it had not begun a run
    for top in [run for run in server.tables.runs if len(run) == 1]:
        stand = server.tables.stands[top, replica]
        if stand.returned is not None or stand.is_lost:
            continue
        why = _cannot_replay(server, top, died)
        for run in _tree(server, top):
            if why is None:
                _begin(server, run, replica)
            else:
                endings.lost(server, run, died, why)


def resent(server: State, record: Resent, now: float) -> None:
    """The controller has sent a run again, to the worker in the place of one that died in it."""
    sessions.check_exists(server, record.replica)
    if len(record.run) == 1 and runs.begin_again(server, record.run, now, record.series):
        stand = server.tables.stands[record.run, record.replica]
        server.tables.stands[record.run, record.replica] = replace(stand, deaths=max(1, stand.deaths))


def fingerprinted(server: State, event: Fingerprinted) -> None:
    """A digest is made. If it shows that a replay differs, the run is lost."""
    found = replay_check.fingerprinted(server, event)
    if found is not None:
        check, diverged = found
        endings.diverged(server, check.run, check.replica, diverged)


def announce(server: State) -> None:
    """Tell the controller of new workers, once they may begin a run."""
    if commits.is_busy(server) or _is_failing(server):
        return
    for replica, session in server.tables.workers.items():
        if session.is_announced or replica in server.tables.deaths or _is_returning(server, replica):
            continue
        server.tables.workers[replica] = replace(session, is_announced=True)
        controller = sessions.controller_peer(server)
        if controller is not None:
            server.out.append(Send(controller, WorkerRestarted((_owes_from(server, replica),), session.worker)))


def announce_again(server: State) -> None:
    """Repeat to the controller which new workers came before this server did: it may not have heard."""
    controller = sessions.controller_peer(server)
    for replica, session in server.tables.workers.items():
        if controller is not None and session.is_announced and session.worker.incarnation > 1:
            server.out.append(Send(controller, WorkerRestarted((_owes_from(server, replica),), session.worker)))
            for run, state in server.tables.runs.items():
                if state.token >= 0 and server.tables.stands[run, replica].waiting == state.token:
                    runs.tell_holder(server, run, replica)


# --- parts --------------------------------------------------------------------------------------------------------


def _cannot_replay(server: State, top: RunId, died: Died) -> str | None:
    """Why the run is lost. None if it is replayed."""
    state, stand = server.tables.runs[top], server.tables.stands[top, died.rank]
    if not died.restarts:
        return "its worker is not restarted; make a new CentralStorageStrategy to continue training"
    if state.failure is not None:
        return "the next run works"
    if stand.deaths > 0:
        return (
            f"it was the second worker of this replica that died in {runs.name(top)}, which is not tried again; look "
            "for what its function does there (memory, native code, os._exit). The next run works"
        )
    has_written = any(request.run == top[0] for request in server.tables.requests.values())
    if has_written or any(_changes(server, run) for run in _tree(server, top)):
        return "what a replica has read of its own update cannot be replayed; the next run works"
    if died.rank == 0 and not all(_can_repeat(server, run) for run in _tree(server, top)[1:]):
        return "runs nested in it that are over cannot be repeated; the next run works"
    return None


def _was_in_run(server: State, died: Died) -> bool:
    """Whether the worker that died may have begun a run. A worker that was being started has not."""
    session = server.tables.workers.get(died.rank)
    if session is None or session.worker.incarnation < died.incarnation:
        return False
    return session.worker.incarnation > died.incarnation or session.is_announced


def _changes(server: State, run: RunId) -> bool:
    """Whether something of ``run`` is committed or being committed. A new variable does not count: the replay finds it,
    with the same value."""
    outcomes = (server.tables.outcomes.get((run, k)) for k in range(server.tables.runs[run].agreed))
    made = sum(isinstance(outcome, CreatedInRun) for outcome in outcomes)
    return runs.standing_commits(server, run) > made


def _can_repeat(server: State, nested: RunId) -> bool:
    """Whether the holder of a token may repeat this nested run. It may not if earlier nested runs are forgotten, or if
    replica 0 received arrays that may have been overwritten since."""
    point = server.tables.runs[nested[:-2]].token
    if nested[-2] != point:
        return True
    return nested[-1] == 0 and not runs.has_large_results(server, nested)


def _begin(server: State, run: RunId, replica: int) -> None:
    """The run is to be replayed: only the record of what the replica brought is kept."""
    stand = server.tables.stands[run, replica]
    if stand.returned is not None or stand.is_lost:
        return
    state = server.tables.runs[run]
    if state.failure is not None or state.is_finished:
        server.tables.stands[run, replica] = replace(stand, waiting=-1, read=None, is_lost=True)
        return
    if not stand.is_replaying:
        replay_check.take(server, run, replica)
    server.tables.stands[run, replica] = replace(
        stand, waiting=-1, read=None, again=0, writes_again=0, deaths=stand.deaths + 1
    )


def _tree(server: State, top: RunId) -> list[RunId]:
    """The run and those nested in it, outermost first."""
    return sorted((run for run in server.tables.runs if run[: len(top)] == top), key=len)


def _is_failing(server: State) -> bool:
    """Whether a run fails and is not over. Nobody may begin a later one, which would end it for those who are in it."""
    return any(len(run) == 1 and s.failure is not None and not s.is_finished for run, s in server.tables.runs.items())


def _is_returning(server: State, replica: int) -> bool:
    """Whether the replica has returned from a run that is not over."""
    return any(
        len(run) == 1 and not state.is_finished and server.tables.stands[run, replica].returned is not None
        for run, state in server.tables.runs.items()
    )


def _owes_from(server: State, replica: int) -> int:
    """The first run of the client that the replica has still to carry out."""
    known = [run for run in server.tables.runs if len(run) == 1]
    owed = [
        run[0]
        for run in known
        if not server.tables.runs[run].is_finished
        and server.tables.stands[run, replica].returned is None
        and not server.tables.stands[run, replica].is_lost
    ]
    return min(owed, default=max((run[0] for run in known), default=0) + 1)
