"""The peers of the server: workers and clients, and whose messages count.

Owns registration, hello and goodbye, fencing by incarnation, and the deaths of workers. It knows nothing of variables
and runs. A function that refuses raises, and then nothing has changed.
"""

from __future__ import annotations

from cs_proto.errors import ContextError, Fenced, InvalidArgumentError, PeerProtocolError, ReplicaLostError
from cs_proto.failures import error_of, pid_of
from cs_proto.messages import PROTOCOL, Died, Goodbye, Hello, Refused, Register, Registered, Welcome, Worker
from cs_proto.records import Record, replace
from cs_server.events import Dismiss, Log, Send

from .store.state import State
from .store.tables import ClientSession, Departure, WorkerSession

# The server remembers this many controllers that have gone. A late first message comes right after the end.
_DEPARTURES = 8
# The server knows at most this many observers and forgets the oldest: one that was killed never said goodbye.
_OBSERVERS = 1000


# --- workers ------------------------------------------------------------------------------------------------------


def register(server: State, peer: bytes, record: Register) -> None:
    """Register a worker and the place where it listens. A replacement is accepted once the supervisor has reported the
    death of the worker before it. Raises InvalidArgumentError, Fenced or PeerProtocolError."""
    _check_protocol(record.protocol, "worker")
    worker = record.worker
    check_exists(server, worker.replica)
    known, died = server.tables.workers.get(worker.replica), server.tables.deaths.get(worker.replica)
    latest = max(known.worker.incarnation if known else 1, died.incarnation + 1 if died else 1)
    if worker.incarnation < latest:
        raise Fenced(f"worker w{worker.replica}.{worker.incarnation} has been replaced; {latest} is expected")
    if worker.incarnation > latest:
        raise PeerProtocolError(
            f"worker w{worker.replica}.{worker.incarnation} cannot register: the supervisor has not reported the death "
            f"of w{worker.replica}.{latest}"
        )
    if known is not None and known.worker.incarnation == worker.incarnation and known.peer != peer:
        raise PeerProtocolError(
            f"worker w{worker.replica}.{worker.incarnation} has registered from another process; its place is taken"
        )
    # A controller that was welcomed knows the workers of that time.
    is_known = known is not None and known.worker == worker
    is_first = worker.incarnation == 1 or controller_peer(server) is None
    is_announced = known.is_announced if known is not None and is_known else is_first
    server.tables.workers[worker.replica] = WorkerSession(peer, worker, is_announced)
    server.tables.deaths.discard(worker.replica)
    _tell_workers(server)


def _tell_workers(server: State) -> None:
    """Tell all workers who the workers are: once all have registered, and again when one is replaced."""
    if len(server.tables.workers) == len(server.replicas):
        registered = Registered(len(server.replicas), server.config.parameter_device, _workers(server))
        for replica, session in server.tables.workers.items():
            if replica not in server.tables.deaths:
                server.out.append(Send(session.peer, registered))


def _workers(server: State) -> tuple[Worker, ...]:
    return tuple(server.tables.workers[replica].worker for replica in sorted(server.tables.workers))


def note_death(server: State, died: Died) -> Died | None:
    """Note a worker's death, and return it. None if it is not a worker, or its incarnation has been replaced. If the
    death of the registered worker was never reported and a later incarnation has died, return the death of the
    registered one."""
    if died.role != "worker" or not 0 <= died.rank < len(server.replicas):
        return None
    known, before = server.tables.workers.get(died.rank), server.tables.deaths.get(died.rank)
    if (known and died.incarnation < known.worker.incarnation) or (before and died.incarnation <= before.incarnation):
        return None
    server.tables.deaths[died.rank] = died
    server.out.append(Log(f"{title(server, died.rank)} died: {died.cause}"))
    for peer, session in server.tables.clients.items():
        if not session.is_welcome and not died.restarts:
            server.out.append(Send(peer, Refused(0, error_of(_lost(server), died.rank))))
            del server.tables.clients[peer]
    if known and not before:
        return replace(died, incarnation=known.worker.incarnation)
    return died


def check_exists(server: State, replica: int) -> None:
    """Raise InvalidArgumentError if this service has no such replica."""
    if replica >= len(server.replicas):
        raise InvalidArgumentError(f"there is no replica {replica}; this service has {len(server.replicas)}")


def check_replica(server: State, peer: bytes, replica: int, incarnation: int) -> None:
    """Raise if a message of ``replica`` does not come from its living worker."""
    known = server.tables.workers.get(replica)
    if known is None:
        raise PeerProtocolError(f"no worker has registered as replica {replica}")
    if incarnation < known.worker.incarnation or replica in server.tables.deaths:
        raise Fenced(f"worker w{replica}.{incarnation} has been replaced or is dead; the message was not acted on")
    if incarnation > known.worker.incarnation or peer != known.peer:
        raise PeerProtocolError(f"worker w{replica}.{incarnation} at {peer!r:.80} has not registered")


def worker_peer(server: State, replica: int) -> bytes | None:
    """The peer name of the worker of ``replica``. None if it is dead or has not registered."""
    known = server.tables.workers.get(replica)
    return known.peer if known and replica not in server.tables.deaths else None


def replica_at(server: State, peer: bytes) -> int | None:
    """The replica whose registered worker is ``peer``. None if there is none."""
    return next((r for r, session in server.tables.workers.items() if session.peer == peer), None)


def writer(server: State, peer: bytes) -> str:
    """The name under which ``peer`` may write segments: ``w0``, ``controller``.

    Raises PeerProtocolError for a stranger and for the worker of an earlier incarnation, ContextError for an observer.
    """
    for replica in server.tables.workers:
        if peer == worker_peer(server, replica):
            return f"w{replica}"
    known = hello_of(server, peer)
    if known is None:
        raise PeerProtocolError(f"{peer!r:.80} has not sent a Hello, or has been replaced")
    if known.role == "observer":
        raise ContextError("observers may only get variables")
    return "controller"


def title(server: State, replica: int) -> str:
    """``replica 1 (pid 43, w1.2)``, for people."""
    known, died = server.tables.workers.get(replica), server.tables.deaths.get(replica)
    if died is not None:
        return f"replica {replica} ({pid_of(died)}, w{replica}.{died.incarnation})"
    return (
        f"replica {replica} ({pid_of(known.worker)}, w{replica}.{known.worker.incarnation})"
        if known
        else (f"replica {replica}")
    )


def _lost(server: State) -> ReplicaLostError:
    causes = "; ".join(f"{title(server, r)}: {server.tables.deaths[r].cause}" for r in sorted(server.tables.deaths))
    return ReplicaLostError(f"this service has lost workers: {causes}; make a new CentralStorageStrategy")


# --- clients ------------------------------------------------------------------------------------------------------


def hello(server: State, peer: bytes, record: Hello, now: float) -> bool:
    """A client introduces itself. An observer is welcome at once, a controller when everything is ready. True if it is
    a controller that was welcome before: it may have missed what an earlier server said."""
    _check_protocol(record.protocol, "client")
    if record.role == "controller":
        if any(gone.client == record.client for gone in server.tables.departures.values()):
            raise ContextError(f"client {record.client} has gone")
        for other, session in server.tables.clients.items():
            if session.hello.role == "controller" and session.hello.client != record.client:
                raise ContextError(
                    f"process {session.hello.pid} controls this service; a second strategy needs a service of its own "
                    "(in a child of a launched script: unset CS_ADDRESS)"
                )
            if session.hello.client == record.client and other != peer:
                del server.tables.clients[other]  # the same client over a new socket
    known = server.tables.clients.get(peer)
    is_back = known is not None and known.hello == record and known.is_welcome
    is_lost = not all(died.restarts for died in server.tables.deaths.values())
    if record.role == "controller" and is_lost and not is_back:
        raise _lost(server)
    if known is None or known.hello != record:
        is_welcome = record.role == "observer"
        if is_welcome:
            _forget_observers(server, _OBSERVERS - 1)
        server.tables.clients[peer] = known = ClientSession(record, is_welcome, now, now)
    if known.is_welcome:
        _welcome(server, peer)
    return is_back and record.role == "controller"


def _forget_observers(server: State, limit: int) -> None:
    """Forget the oldest observers until there are ``limit``."""
    since = {p: s.since for p, s in server.tables.clients.items() if s.hello.role == "observer"}
    for peer in sorted(since, key=lambda peer: since[peer])[: max(0, len(since) - limit)]:
        del server.tables.clients[peer]


def welcome_waiting(server: State) -> None:
    """Welcome the controller that waits, if all workers have registered and its predecessor's runs are over."""
    is_complete = len(server.tables.workers) == len(server.replicas) and not len(server.tables.deaths)
    for peer, session in server.tables.clients.items():
        if not session.is_welcome and is_complete and not server.tables.runs:
            server.tables.clients[peer] = replace(session, is_welcome=True)
            _welcome(server, peer)


def goodbye(server: State, peer: bytes, record: Goodbye) -> bool:
    """A client leaves. True if it was the controller."""
    session = server.tables.clients.get(peer)
    if session is None or session.hello.client != record.client:
        raise PeerProtocolError(f"client {record.client!r:.80} has not sent a Hello from {peer!r:.80}")
    return _end(server, peer, session)


def left(server: State, client: str) -> bool:
    """A controller has gone, with or without goodbye. True if its runs have to be given up."""
    server.out.append(Dismiss(client))
    if any(gone.client == client for gone in server.tables.departures.values()):
        return False
    server.tables.departures[server.tables.next_ticket()] = Departure(client)
    for ticket in sorted(server.tables.departures)[:-_DEPARTURES]:
        del server.tables.departures[ticket]
    for peer, session in server.tables.clients.items():
        if session.hello.client == client:
            server.out.append(Log(f"client {client} (pid {session.hello.pid}) has gone"))
            return _end(server, peer, session)
    return False


def _end(server: State, peer: bytes, session: ClientSession) -> bool:
    del server.tables.clients[peer]
    client = session.hello.client
    if session.hello.role == "controller":
        server.tables.tally.last_run = max([server.tables.tally.last_run, *(run[0] for run in server.tables.runs)])
    request = server.tables.requests.get((False, client))
    if request is not None and request.reply is not None:  # else its commit is under way, and still reads it
        del server.tables.requests[False, client]
    return session.hello.role == "controller"


def controller_peer(server: State) -> bytes | None:
    """The peer name of the controller. None if there is none."""
    for peer, session in server.tables.clients.items():
        if session.is_welcome and session.hello.role == "controller":
            return peer
    return None


def controlling_client(server: State) -> str:
    """The name of the controller; empty if there is none."""
    peer = controller_peer(server)
    return "" if peer is None else server.tables.clients[peer].hello.client


def hello_of(server: State, peer: bytes) -> Hello | None:
    """What the client at ``peer`` said of itself. None if it is not welcome yet."""
    session = server.tables.clients.get(peer)
    return session.hello if session and session.is_welcome else None


def check_controller(server: State, peer: bytes, record: Record) -> None:
    """Raise PeerProtocolError if ``peer`` is not the controller."""
    known = hello_of(server, peer)
    if known is None or known.role != "controller":
        raise PeerProtocolError(f"only the controller may send {type(record).__name__}, not {peer!r:.80}")


def _welcome(server: State, peer: bytes) -> None:
    device, last_run = server.config.parameter_device, server.tables.tally.last_run
    welcome = Welcome(len(server.replicas), device, server.config.pid, _workers(server), last_run)
    server.out.append(Send(peer, welcome))


def _check_protocol(protocol: int, who: str) -> None:
    if protocol != PROTOCOL:
        raise PeerProtocolError(
            f"the {who} speaks protocol {protocol}, this server protocol {PROTOCOL}; install the same version of "
            "central-storage on both sides"
        )
