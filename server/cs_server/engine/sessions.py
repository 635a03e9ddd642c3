"""Who is there: workers, clients, and whose word counts.

Owns registration, hello and goodbye, fencing by incarnation, and what is known of deaths. It knows nothing of variables
and runs; ``engine`` tells ``runs`` of the deaths that are found here.
"""

from __future__ import annotations

from cs_proto.errors import ContextError, Fenced, InvalidArgumentError, PeerProtocolError, ReplicaLostError
from cs_proto.failures import error_of
from cs_proto.messages import PROTOCOL, Died, Goodbye, Hello, Refused, Register, Registered, Welcome, Worker
from cs_proto.records import Record, replace
from cs_server.events import Command, Dismiss, Log, Send

from .state import ClientSession, Departure, Tables, WorkerSession

__all__ = ["Sessions"]

# So many controllers that have gone are remembered; the first words of one come right after its end, if they are late.
_DEPARTURES = 8
# So many observers are known. One that was killed has not said goodbye: of more the one that came first is forgotten.
_OBSERVERS = 1000


class Sessions:
    """The peers of the server. Every method that refuses raises, and then nothing has changed."""

    def __init__(
        self, tables: Tables, out: list[Command], replicas: int, parameter_device: str, server_pid: int
    ) -> None:
        self._tables = tables
        self._out = out
        self._replicas = replicas
        self._parameter_device = parameter_device
        self._server_pid = server_pid

    # --- workers ------------------------------------------------------------------------------------------------------

    def register(self, peer: bytes, record: Register) -> None:
        """Register a worker and the place where it listens. A replacement is accepted once the supervisor has told the
        death of the worker before it. Raises InvalidArgumentError, Fenced or PeerProtocolError."""
        self._check_protocol(record.protocol, "worker")
        worker = record.worker
        self.check_exists(worker.replica)
        known, died = self._tables.workers.get(worker.replica), self._tables.deaths.get(worker.replica)
        latest = max(known.worker.incarnation if known else 1, died.incarnation + 1 if died else 1)
        if worker.incarnation < latest:
            raise Fenced(f"worker w{worker.replica}.{worker.incarnation} has been replaced; {latest} is expected")
        if worker.incarnation > latest:
            raise PeerProtocolError(
                f"worker w{worker.replica}.{worker.incarnation} cannot register: the supervisor has not told the death "
                f"of w{worker.replica}.{latest}"
            )
        if known is not None and known.worker.incarnation == worker.incarnation and known.peer != peer:
            raise PeerProtocolError(
                f"worker w{worker.replica}.{worker.incarnation} has registered from another process; its place is taken"
            )
        # Whoever was welcomed already knows the workers of then.
        is_known = known is not None and known.worker == worker
        is_first = worker.incarnation == 1 or self.controller_peer() is None
        is_announced = known.is_announced if known is not None and is_known else is_first
        self._tables.workers[worker.replica] = WorkerSession(peer, worker, is_announced)
        self._tables.deaths.discard(worker.replica)
        self._tell_workers()

    def _tell_workers(self) -> None:
        """Once all have registered, and again when one is replaced: who the workers are."""
        if len(self._tables.workers) == self._replicas:
            registered = Registered(self._replicas, self._parameter_device, self._workers())
            for replica, session in self._tables.workers.items():
                if replica not in self._tables.deaths:
                    self._out.append(Send(session.peer, registered))

    def _workers(self) -> tuple[Worker, ...]:
        return tuple(self._tables.workers[replica].worker for replica in sorted(self._tables.workers))

    def died(self, died: Died) -> Died | None:
        """Note a worker's death, and return it. None where it is none, or of an incarnation that has been replaced. If
        nobody told the death of the registered worker before this one, of a later incarnation, the returned death is
        that of the registered worker."""
        if died.role != "worker" or not 0 <= died.rank < self._replicas:
            return None
        known, before = self._tables.workers.get(died.rank), self._tables.deaths.get(died.rank)
        if (known and died.incarnation < known.worker.incarnation) or (
            before and died.incarnation <= before.incarnation
        ):
            return None
        self._tables.deaths[died.rank] = died
        self._out.append(Log(f"{self.title(died.rank)} died: {died.cause}"))
        for peer, session in self._tables.clients.items():
            if not session.is_welcome and not died.restarts:
                self._out.append(Send(peer, Refused(0, error_of(self._lost(), died.rank))))
                del self._tables.clients[peer]
        if known and not before:
            return replace(died, incarnation=known.worker.incarnation)
        return died

    def check_exists(self, replica: int) -> None:
        """Raise InvalidArgumentError if this service has no such replica."""
        if replica >= self._replicas:
            raise InvalidArgumentError(f"there is no replica {replica}; this service has {self._replicas}")

    def check_replica(self, peer: bytes, replica: int, incarnation: int) -> None:
        """Raise where a message of ``replica`` does not come from its living worker."""
        known = self._tables.workers.get(replica)
        if known is None:
            raise PeerProtocolError(f"no worker has registered as replica {replica}")
        if incarnation < known.worker.incarnation or replica in self._tables.deaths:
            raise Fenced(f"worker w{replica}.{incarnation} has been replaced or is dead; the message was not acted on")
        if incarnation > known.worker.incarnation or peer != known.peer:
            raise PeerProtocolError(f"worker w{replica}.{incarnation} at {peer!r:.80} has not registered")

    def worker_peer(self, replica: int) -> bytes | None:
        """Where the worker of ``replica`` is reached; None where none lives."""
        known = self._tables.workers.get(replica)
        return known.peer if known and replica not in self._tables.deaths else None

    def replica_at(self, peer: bytes) -> int | None:
        """The replica whose registered worker speaks; None where none does."""
        return next((r for r, session in self._tables.workers.items() if session.peer == peer), None)

    def writer(self, peer: bytes) -> str:
        """Under which name segments may be written by ``peer``: ``w0``, ``controller``.

        Raises PeerProtocolError for a stranger and for the worker of an earlier incarnation, ContextError for an
        observer.
        """
        for replica in self._tables.workers:
            if peer == self.worker_peer(replica):
                return f"w{replica}"
        client = self.client(peer)
        if client is None:
            raise PeerProtocolError(f"{peer!r:.80} has not said hello, or has been replaced")
        if client.role == "observer":
            raise ContextError("observers may only get variables")
        return "controller"

    def title(self, replica: int) -> str:
        """``replica 1 (pid 43, w1.2)``, for people."""
        known, died = self._tables.workers.get(replica), self._tables.deaths.get(replica)
        if died is not None:
            return f"replica {replica} (pid {died.pid}, w{replica}.{died.incarnation})"
        return (
            f"replica {replica} (pid {known.worker.pid}, w{replica}.{known.worker.incarnation})"
            if known
            else (f"replica {replica}")
        )

    def _lost(self) -> ReplicaLostError:
        causes = "; ".join(f"{self.title(r)}: {self._tables.deaths[r].cause}" for r in sorted(self._tables.deaths))
        return ReplicaLostError(f"not all workers live: {causes}; make a new CentralStorageStrategy")

    # --- clients ------------------------------------------------------------------------------------------------------

    def hello(self, peer: bytes, record: Hello, now: float) -> bool:
        """A client introduces itself. Observers are welcome at once; a controller when everything is ready. True where
        it is a controller that was welcome before, and may not have heard what a server before this one said."""
        self._check_protocol(record.protocol, "client")
        if record.role == "controller":
            if any(gone.client == record.client for gone in self._tables.departures.values()):
                raise ContextError(f"client {record.client} has gone")
            for other, session in self._tables.clients.items():
                if session.hello.role == "controller" and session.hello.client != record.client:
                    raise ContextError(
                        f"client {session.hello.client} (pid {session.hello.pid}) controls this service; a second "
                        "strategy has to start a service of its own (in a child of a launched script: unset CS_ADDRESS)"
                    )
                if session.hello.client == record.client and other != peer:
                    del self._tables.clients[other]  # the same client over a new socket
        known = self._tables.clients.get(peer)
        is_back = known is not None and known.hello == record and known.is_welcome
        is_lost = not all(died.restarts for died in self._tables.deaths.values())
        if record.role == "controller" and is_lost and not is_back:
            raise self._lost()
        if known is None or known.hello != record:
            is_welcome = record.role == "observer"
            if is_welcome:
                self._forget_observers(_OBSERVERS - 1)
            self._tables.clients[peer] = known = ClientSession(record, is_welcome, now, now)
        if known.is_welcome:
            self._welcome(peer)
        return is_back and record.role == "controller"

    def _forget_observers(self, limit: int) -> None:
        """Forget those that came first, until there are ``limit`` of them."""
        since = {p: s.since for p, s in self._tables.clients.items() if s.hello.role == "observer"}
        for peer in sorted(since, key=lambda peer: since[peer])[: max(0, len(since) - limit)]:
            del self._tables.clients[peer]

    def welcome_waiting(self) -> None:
        """Welcome the controller that waits, if all workers have registered and its predecessor's runs are over."""
        is_complete = len(self._tables.workers) == self._replicas and not len(self._tables.deaths)
        for peer, session in self._tables.clients.items():
            if not session.is_welcome and is_complete and not self._tables.runs:
                self._tables.clients[peer] = replace(session, is_welcome=True)
                self._welcome(peer)

    def goodbye(self, peer: bytes, record: Goodbye) -> bool:
        """A client leaves. True where it was the controller."""
        session = self._tables.clients.get(peer)
        if session is None or session.hello.client != record.client:
            raise PeerProtocolError(f"client {record.client!r:.80} has not said hello from {peer!r:.80}")
        return self._end(peer, session)

    def left(self, client: str) -> bool:
        """A controller has gone, with or without goodbye. True where its runs have to be given up."""
        self._out.append(Dismiss(client))
        if any(gone.client == client for gone in self._tables.departures.values()):
            return False
        self._tables.departures[self._tables.next_ticket()] = Departure(client)
        for ticket in sorted(self._tables.departures)[:-_DEPARTURES]:
            del self._tables.departures[ticket]
        for peer, session in self._tables.clients.items():
            if session.hello.client == client:
                self._out.append(Log(f"client {client} (pid {session.hello.pid}) has gone"))
                return self._end(peer, session)
        return False

    def _end(self, peer: bytes, session: ClientSession) -> bool:
        del self._tables.clients[peer]
        client = session.hello.client
        request = self._tables.requests.get((False, client))
        if request is not None and request.reply is not None:  # else its commit is under way, and still reads it
            del self._tables.requests[False, client]
        return session.hello.role == "controller"

    def controller_peer(self) -> bytes | None:
        """Where the controller is reached; None where there is none."""
        for peer, session in self._tables.clients.items():
            if session.is_welcome and session.hello.role == "controller":
                return peer
        return None

    def client(self, peer: bytes) -> Hello | None:
        """What the client at ``peer`` said of itself, once it is welcome."""
        session = self._tables.clients.get(peer)
        return session.hello if session and session.is_welcome else None

    def check_controller(self, peer: bytes, record: Record) -> None:
        """Raise where it is not the controller that speaks."""
        client = self.client(peer)
        if client is None or client.role != "controller":
            raise PeerProtocolError(f"{type(record).__name__} is the controller's, not for {peer!r:.80}")

    def _welcome(self, peer: bytes) -> None:
        self._out.append(Send(peer, Welcome(self._replicas, self._parameter_device, self._server_pid, self._workers())))

    def _check_protocol(self, protocol: int, who: str) -> None:
        if protocol != PROTOCOL:
            raise PeerProtocolError(
                f"the {who} speaks protocol {protocol}, this server protocol {PROTOCOL}; install the same version of "
                "central-storage on both sides"
            )
