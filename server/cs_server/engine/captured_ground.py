"""What captured steps rely on: nothing is under way, and all workers and one client are there."""

from __future__ import annotations

from cs_proto.frozen import frozen

from . import sessions
from .steps import runs
from .store.state import State

__all__ = ["Ground", "ground_of"]


@frozen
class Ground:
    """What holds as long as nothing but captured steps is heard."""

    #: The peer name and the incarnation of each worker, by replica.
    workers: tuple[tuple[bytes, int], ...]
    #: The peer names alone.
    peers: tuple[bytes, ...]
    controller: bytes
    client: str
    #: The number of the last run, its series and its lookahead.
    last: tuple[int, int, int]


def ground_of(server: State) -> Ground | None:
    """The ground for steps from now on. None if something else is going on."""
    tables = server.tables
    for run, state in tables.runs.items():
        if not state.is_finished or state.failure is not None:
            return None
        for replica in server.replicas:
            returned = tables.stands[run, replica].returned
            if returned is None or returned.error is not None:
                return None
    others = (tables.jobs, tables.held, tables.deaths, tables.writes, tables.computations)
    if any(others) or tables.checks or tables.digests or len(tables.workers) < len(server.replicas):
        return None
    if any(map(runs.lies_in_arena, tables.outcomes.values())):
        return None
    workers = [tables.workers[replica] for replica in server.replicas]
    controller = sessions.controller_peer(server)
    hello = None if controller is None else sessions.hello_of(server, controller)
    if controller is None or hello is None or not all(worker.is_announced for worker in workers):
        return None
    if not all(session.is_welcome for session in tables.clients.values()):
        return None
    number = max((run[0] for run in tables.runs if len(run) == 1), default=tables.tally.last_run)
    returned = tables.stands[(number,), 0].returned if (number,) in tables.runs else None
    last = (number, 0, 0) if returned is None else (number, returned.series, returned.lookahead)
    known = tuple((worker.peer, worker.worker.incarnation) for worker in workers)
    return Ground(known, tuple(worker.peer for worker in workers), controller, hello.client, last)
