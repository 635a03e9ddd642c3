"""What clients ask for outside of runs, and the holder of a merge_call token in the client's place.

Owns the table of requests, which makes a repeated write harmless, and the answers to reads. Variables and optimizers
are the catalogue's; whether a write may happen now is asked of ``runs``.
"""

from __future__ import annotations

from cs_proto.codec import ANSWER_NBYTES
from cs_proto.errors import CentralStorageError, ContextError, InvalidArgumentError, PeerProtocolError
from cs_proto.failures import error_of
from cs_proto.messages import (
    Assign,
    AssignSlot,
    Configure,
    Counters,
    Create,
    Created,
    Describe,
    Described,
    DescribeSlots,
    Done,
    Free,
    Get,
    Got,
    Locate,
    Located,
    Refused,
    ReplicaStatistics,
    Slots,
    Statistics,
)
from cs_proto.records import Record, replace
from cs_server.events import Command, Send, Write

from .catalogue import Catalogue
from .commits import Commits
from .runs import Runs
from .sessions import Sessions
from .state import HeldGet, Job, Request, Tables

__all__ = ["Requests"]


class Requests:
    """Reads and writes of clients."""

    def __init__(
        self,
        tables: Tables,
        out: list[Command],
        sessions: Sessions,
        catalogue: Catalogue,
        commits: Commits,
        runs: Runs,
    ) -> None:
        self._tables = tables
        self._out = out
        self._sessions = sessions
        self._catalogue = catalogue
        self._commits = commits
        self._runs = runs

    # --- writes -------------------------------------------------------------------------------------------------------

    def write(self, peer: bytes, record: Create | Assign | AssignSlot | Configure | Free) -> None:
        """Act on a write once. A refusal is a reply like any other: repeated, it stays one."""
        key = (self._is_token_of(peer, record), record.client)
        known = self._tables.requests.get(key)
        if known is not None and record.sequence <= known.sequence:
            if record.sequence < known.sequence:
                raise PeerProtocolError(
                    f"request {record.sequence} of {record.client!r:.80} was followed by {known.sequence}; only the "
                    "last reply is kept"
                )
            if known.reply is not None:
                self._out.append(Send(peer, known.reply))
            return
        if known is not None and known.reply is None:
            raise PeerProtocolError(
                f"request {known.sequence} of {record.client!r:.80} is not answered yet; one at a time"
            )
        holder = None
        reply: Created | Done | Refused | None
        try:
            holder = self._runs.holder()
            if (holder is not None) != key[0]:
                raise ContextError(
                    f"{type(record).__name__} is for the holder of the merge_call token, which is out"
                    if holder is not None
                    else f"{type(record).__name__} in a replica is only for the holder of a merge_call token"
                )
            reply = self._act(key, record)
        except CentralStorageError as error:
            reply = Refused(record.sequence, error_of(error))
        self._tables.requests[key] = Request(
            peer, holder[0] if holder else 0, record.sequence, None if reply else record, reply
        )
        if reply is not None:
            self._out.append(Send(peer, reply))

    def operation(self, job: Job) -> Write:
        """What the commit of a request writes."""
        request = self._tables.requests[job.token, job.client].request
        if isinstance(request, Assign):
            return self._catalogue.write(request.variable, request.op, None, (request.value,), request.indices)
        if isinstance(request, AssignSlot):
            return self._catalogue.write_slot(request.optimizer, request.variable, request.slot, request.value)
        if isinstance(request, Create) and request.value is not None:
            return self._catalogue.write(job.number, "assign", None, (request.value,))
        raise AssertionError(f"job {job} writes nothing")

    def done(self, job: Job) -> None:
        """The commit of a request is finished: reply."""
        request = self._tables.requests[job.token, job.client]
        reply: Created | Done
        if isinstance(request.request, Assign):
            reply = Done(request.sequence, job.number, self._catalogue.written(job.number))
        elif isinstance(request.request, AssignSlot):
            reply = Done(request.sequence, job.number, self._catalogue.variable(job.number).version)
        else:
            reply = Created(request.sequence, self._catalogue.variable(job.number))
        self._tables.tally.commits += 1
        self._tables.requests[job.token, job.client] = replace(request, request=None, reply=reply)
        if not self._may_repeat(job, request):
            del self._tables.requests[job.token, job.client]
        self._out.append(Send(request.peer, reply))

    def _may_repeat(self, job: Job, request: Request) -> bool:
        """Whether whoever asked is still there, and might ask the same again."""
        if job.token:
            return (request.run,) in self._tables.runs
        return any(session.hello.client == job.client for session in self._tables.clients.values())

    def _act(
        self, key: tuple[bool, str], record: Create | Assign | AssignSlot | Configure | Free
    ) -> Created | Done | None:
        """Do it. None where the reply has to wait for a commit."""
        if isinstance(record, Create):
            variable, fills = self._catalogue.create(record.variable, record.value)
            if record.value is None and not fills:
                return Created(record.sequence, variable)
            if record.value is None:
                self._commits.submit(Job("request", (), 0, variable.number, key[0], key[1], fills))
                return None
            number = variable.number
        elif isinstance(record, Assign):
            self._catalogue.write(record.variable, record.op, None, (record.value,), record.indices)
            number = record.variable
        elif isinstance(record, AssignSlot):
            self._make_slots(record.optimizer, record.variable)
            self._catalogue.write_slot(record.optimizer, record.variable, record.slot, record.value)
            number = record.variable
        elif isinstance(record, Free):
            return Done(record.sequence, self._catalogue.free(record.variables), 0)
        else:
            optimizer = self._catalogue.configure(
                record.optimizer, record.kind, dict(record.hyperparameters), record.schedule, record.iterations
            )
            return Done(record.sequence, optimizer.number, optimizer.iterations)
        self._commits.submit(Job("request", (), 0, number, key[0], key[1], ()))
        return None

    def _is_token_of(self, peer: bytes, record: Create | Assign | AssignSlot | Configure | Free) -> bool:
        """Whether a worker speaks. Raises where the peer may not write."""
        client = self._sessions.client(peer)
        if client is not None and client.role == "controller":
            if client.client != record.client:
                raise PeerProtocolError(f"{peer!r:.80} is client {client.client!r:.80}, not {record.client!r:.80}")
            return False
        if peer == self._sessions.worker_peer(0):
            return True
        raise PeerProtocolError(
            f"{type(record).__name__} is the controller's; "
            + ("observers may only read" if client else "a worker may use it while it holds a merge_call token")
        )

    # --- reads --------------------------------------------------------------------------------------------------------

    def get(self, peer: bytes, record: Get) -> None:
        """Answer with places, or with bytes as soon as nothing is being written."""
        self._check_known(peer, record)
        got = self._got(record)  # refuses what can be refused now
        if record.frames and self._commits.is_busy:
            self._let_go(peer)
            self._tables.held[self._tables.next_ticket()] = HeldGet(peer, record)
        else:
            self._out.append(Send(peer, got, record if record.frames else None))

    def _let_go(self, peer: bytes) -> None:
        """Forget the earlier question of ``peer``: a peer has one question at a time."""
        for ticket, held in self._tables.held.items():
            if held.peer == peer:
                del self._tables.held[ticket]

    def answer_held(self) -> None:
        """Nothing is being written: answer those who wait for bytes or, where no slots are being made, for slots."""
        for ticket, held in self._tables.held.items():
            if isinstance(held.get, Get):
                self._out.append(Send(held.peer, self._got(held.get), held.get))
            elif len(self._tables.jobs):
                continue
            else:
                self._out.append(Send(held.peer, self._slots(held.get)))
            del self._tables.held[ticket]

    def describe(self, peer: bytes, record: Describe) -> None:
        """Say what stands behind numbers."""
        self._check_known(peer, record)
        variables = tuple(map(self._catalogue.variable, record.variables))
        optimizers = tuple(map(self._catalogue.optimizer, record.optimizers))
        slotted = tuple(map(self._catalogue.slotted, record.optimizers))
        self._out.append(Send(peer, Described(record.request, variables, optimizers, slotted)))

    def locate(self, peer: bytes, record: Locate) -> None:
        """Say where variables lie, or gradients of the replica that asks. The second set of gradients is made first.
        The answer lets a peer write to a GPU's memory, so only workers may ask."""
        replica = self._sessions.replica_at(peer)
        if replica is None:
            raise PeerProtocolError("a Locate is a worker's")
        arrays = [self._catalogue.variable(number).array for number in record.variables]
        if record.buffers == 1:
            self._catalogue.use_second_gradients(array.dtype for array in arrays)
        if record.buffers >= 0:
            arrays = [self._catalogue.gradient(replica, record.buffers + 2, array) for array in arrays]
        self._out.append(Send(peer, Located(record.request, b"", tuple(arrays), (), False)))

    def describe_slots(self, peer: bytes, record: DescribeSlots) -> None:
        """Say where slots lie, as soon as they are made."""
        self._check_known(peer, record)
        client = self._sessions.client(peer)
        if client is not None and client.role == "observer":
            raise ContextError("observers may only read, and slots may have to be made")
        self._make_slots(record.optimizer, record.variable)
        if len(self._tables.jobs):
            self._let_go(peer)
            self._tables.held[self._tables.next_ticket()] = HeldGet(peer, record)
        else:
            self._out.append(Send(peer, self._slots(record)))

    def _make_slots(self, optimizer: int, variable: int) -> None:
        _, fills = self._catalogue.slots(optimizer, variable)
        if fills:
            self._commits.submit(Job("slots", (), 0, 0, False, "", fills))

    def _slots(self, record: DescribeSlots) -> Slots:
        slots, _ = self._catalogue.slots(record.optimizer, record.variable)
        return Slots(record.request, tuple(name for name, _ in slots), tuple(array for _, array in slots))

    def statistics(self, peer: bytes, record: Statistics, server_pid: int, uptime: float) -> None:
        """Say what was counted."""
        self._check_known(peer, record)
        tally = self._tables.tally
        replicas = tuple(
            ReplicaStatistics(
                replica,
                session.worker.pid,
                session.worker.device,
                tally.replica_runs[replica],
                tally.points[replica],
                tally.applies[replica],
            )
            for replica, session in sorted(self._tables.workers.items())
        )
        counters = Counters(
            request=record.request,
            pid=server_pid,
            uptime=uptime,
            variables=len(self._tables.variables),
            parameter_nbytes=self._catalogue.parameter_nbytes(),
            slot_nbytes=self._catalogue.slot_nbytes(),
            commits=tally.commits,
            runs=tally.runs,
            messages=tally.messages,
            replicas=replicas,
        )
        self._out.append(Send(peer, counters))

    def _got(self, record: Get) -> Got:
        variables = tuple(map(self._catalogue.variable, record.variables))
        variables += tuple(map(self._catalogue.named, record.names))
        if not record.variables and not record.names:
            variables = self._catalogue.variables()
        arrays = tuple(variable.array for variable in variables)
        nbytes = sum(array.nbytes for array in arrays) if record.frames else 0
        if nbytes > ANSWER_NBYTES:
            raise InvalidArgumentError(
                f"{nbytes} bytes of variables at once; at most {ANSWER_NBYTES} travel in one answer: ask for fewer "
                "variables at a time, or read them where the service's memory can be mapped"
            )
        return Got(record.request, self._tables.tally.commits, variables, arrays)

    def _check_known(self, peer: bytes, record: Record) -> None:
        if self._sessions.client(peer) is None and self._sessions.replica_at(peer) is None:
            raise PeerProtocolError(f"{type(record).__name__} from {peer!r:.80}, which has not said hello")
