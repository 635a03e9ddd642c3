"""How runs end from outside: the controller cancels them or leaves, a worker dies, or its replay diverges."""

from __future__ import annotations

from cs_proto.errors import PeerProtocolError, ReplicaLostError
from cs_proto.failures import error_of, last_lines, pid_of
from cs_proto.messages import Cancel, ClientGone, Died, RunId
from cs_proto.records import replace
from cs_server.engine import sessions
from cs_server.engine.store.state import State
from cs_server.engine.store.tables import Failure

from . import commits, runs
from .replay_check import Diverged


def cancel(server: State, record: Cancel, now: float) -> None:
    """Give up a run and the runs nested in it. Of steps that were sent ahead, this is the first that is not over. The
    run may not have begun."""
    cancelled = _to_cancel(server, record)
    if cancelled is None:
        return
    if len(cancelled) == 1:
        runs.begin(server, cancelled, now, is_cancelled=True)
    for run, state in server.tables.runs.items():
        if run[: len(cancelled)] == cancelled and not state.is_finished:
            error = error_of(KeyboardInterrupt(f"{runs.name(run)} was cancelled"), merge_index=state.agreed)
            server.tables.runs[run] = replace(state, token=-1, failure=Failure("cancelled", -1, error))


def give_up_absent(server: State) -> None:
    """Count a replica as lost in every run that cannot go on, if its worker is dead, or is new and was not sent the
    run."""
    for replica in server.replicas:
        session = server.tables.workers.get(replica)
        if session is not None and session.is_announced and replica not in server.tables.deaths:
            continue
        _give_up(server, replica)


def dropped(server: State, peer: bytes, record: ClientGone) -> None:
    """A worker has dropped the runs of a client that has gone. Count it as lost in those from which it has not
    returned: it may not have been sent them."""
    replica = sessions.replica_at(server, peer)
    if replica is None:
        raise PeerProtocolError("only a worker may send a ClientGone to the server")
    _give_up(server, replica, record.client)


def _give_up(server: State, replica: int, client: str | None = None) -> None:
    """Count a replica as lost in every run that cannot go on, or in those of ``client``."""
    for run, state in server.tables.runs.items():
        stand = server.tables.stands[run, replica]
        is_of_client = client is None or state.client == client
        if is_of_client and state.failure is not None and stand.returned is None and not stand.is_lost:
            server.tables.stands[run, replica] = replace(stand, waiting=-1, read=None, is_lost=True)


def _to_cancel(server: State, record: Cancel) -> RunId | None:
    for number in range(record.run[0], record.run[0] + record.later + 1):
        run = (number, *record.run[1:])
        state = server.tables.runs.get(run)
        if state is None:
            if not runs.is_over(server, run):
                return run
        elif not state.is_finished:
            return run
        elif runs.verdict(server, run, state) is not None:
            return None  # the steps after one that failed do not begin
    return None


def cancel_all(server: State, now: float) -> None:
    """The controller is gone: give up every open run."""
    for run in server.tables.runs:
        if len(run) == 1:
            cancel(server, Cancel(run), now)
            stands = [server.tables.stands[run, replica] for replica in server.replicas]
            if not any(stand.count or stand.is_stopped for stand in stands):
                runs.drop(server, run)  # cancelled before any replica heard of it


def forget_left(server: State) -> None:
    """No controller is there: forget the finished runs that every replica has left."""
    for run, state in server.tables.runs.items():
        if len(run) == 1 and state.is_finished and not commits.concerns(server, run):
            stands = [server.tables.stands[run, replica] for replica in server.replicas]
            if all(stand.returned is not None or stand.is_lost for stand in stands):
                runs.drop(server, run)


def lost(server: State, run: RunId, died: Died, then: str) -> None:
    """A worker is dead and has not returned from ``run``, which cannot go on. ``then`` says what the user can do
    now."""
    state, stand = server.tables.runs[run], server.tables.stands[run, died.rank]
    if stand.returned is not None or stand.is_lost:
        return
    server.tables.stands[run, died.rank] = replace(stand, waiting=-1, read=None, is_lost=True)
    if state.failure is None or state.failure.cause == "mismatch":
        count = runs.standing_commits(server, run)
        kept = "1 commit of this run is kept" if count == 1 else f"{count} commits of this run are kept"
        error = ReplicaLostError(
            f"replica {died.rank} ({pid_of(died)}, w{died.rank}.{died.incarnation}) was lost in {runs.name(run)}: "
            f"{died.cause}. {kept}, the rest was dropped; {then}{last_lines(died)}"
        )
        state = replace(state, failure=Failure("lost", died.rank, error_of(error, died.rank, stand.count)))
    server.tables.runs[run] = replace(state, token=-1 if died.rank == 0 else state.token)


def diverged(server: State, run: RunId, replica: int, difference: Diverged) -> None:
    """A replay differs from the run before the worker's death, so the run cannot go on."""
    state = server.tables.runs[run]
    if state.failure is None:
        error = ReplicaLostError(
            f"replica {replica} was lost in {runs.name(run)}: {difference}. Nothing of this run is committed. The "
            "function depends on something that a new worker does not share (time, a file, kept state). The next run "
            "works"
        )
        at = server.tables.stands[run, replica].again
        server.tables.runs[run] = replace(state, failure=Failure("lost", replica, error_of(error, replica, at)))
