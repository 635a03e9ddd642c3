"""Requests from outside of runs: those of clients, and those of the worker that holds a merge_call token.

Owns the table of requests, which makes a repeated write harmless, and the answers to reads. ``runs`` says whether a
write may happen now.
"""

from __future__ import annotations

from functools import partial

from cs_proto.codec import ANSWER_NBYTES
from cs_proto.errors import CentralStorageError, ContextError, InvalidArgumentError, PeerProtocolError
from cs_proto.failures import error_of
from cs_proto.messages import (
    Assign,
    AssignAll,
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
from cs_server.events import Send, Write

from . import sessions
from .catalogue import assign_all, optimizers, slabs, updates, variables
from .steps import commits, runs, watchdog
from .store import reasons
from .store.state import State
from .store.tables import HeldGet, Job, Request, SlotFill

_Written = Create | Assign | AssignAll | AssignSlot | Configure | Free

# --- writes -------------------------------------------------------------------------------------------------------


def write(server: State, peer: bytes, record: _Written) -> None:
    """Act on a write once. A refusal is a reply like any other: the same request gets it again."""
    key = (_is_token_of(server, peer, record), record.client)
    known = server.tables.requests.get(key)
    if known is not None and record.sequence <= known.sequence:
        if record.sequence < known.sequence:
            raise PeerProtocolError(
                f"request {record.sequence} of {record.client!r:.80} was followed by {known.sequence}; only the "
                "last reply is kept"
            )
        if known.reply is not None:
            server.out.append(Send(peer, known.reply))
        return
    if known is not None and known.reply is None:
        raise PeerProtocolError(
            f"request {known.sequence} of {record.client!r:.80} has no answer yet; send one request at a time"
        )
    holder = None
    reply: Created | Done | Refused | None
    try:
        holder = runs.holder(server)
        if (holder is not None) != key[0]:
            raise ContextError(
                f"only the holder of the merge_call token may send {type(record).__name__} during a merge_call"
                if holder is not None
                else f"a worker may send {type(record).__name__} only while it holds a merge_call token"
            )
        reply = _act(server, key, record)
    except CentralStorageError as error:
        reply = Refused(record.sequence, error_of(error))
    server.tables.requests[key] = Request(
        peer, holder[0] if holder else 0, record.sequence, None if reply else record, reply
    )
    if reply is not None:
        server.out.append(Send(peer, reply))


def operations(server: State, job: Job) -> tuple[Write, ...]:
    """The writes that the commit of a request makes."""
    request = server.tables.requests[job.token, job.client].request
    if isinstance(request, Assign):
        return (variables.write(server, request.variable, request.op, None, (request.value,), request.indices),)
    if isinstance(request, AssignAll):
        return assign_all.writes(server, request)
    if isinstance(request, AssignSlot):
        return (optimizers.write_slot(server, request),)
    if isinstance(request, Create) and request.value is not None:
        return (variables.write(server, job.number, "assign", None, (request.value,)),)
    raise AssertionError(f"job {job} writes nothing")


def done(server: State, job: Job) -> None:
    """The commit of a request is finished: send the reply."""
    request = server.tables.requests[job.token, job.client]
    reply: Created | Done
    if isinstance(request.request, Assign):
        variables.written(server, job.number)
        reply = Done(request.sequence, job.number, variables.get(server, job.number).version)
    elif isinstance(request.request, AssignAll):
        variables.written_together(server, request.request.variables)
        server.decided = None
        reply = Done(request.sequence, assign_all.count(request.request), 0)
    elif isinstance(request.request, AssignSlot):
        reply = Done(request.sequence, job.number, variables.get(server, job.number).version)
    else:
        reply = Created(request.sequence, variables.get(server, job.number))
    server.tables.tally.commits += 1
    server.tables.requests[job.token, job.client] = replace(request, request=None, reply=reply)
    if not _may_repeat(server, job, request):
        del server.tables.requests[job.token, job.client]
    server.out.append(Send(request.peer, reply))


def _may_repeat(server: State, job: Job, request: Request) -> bool:
    """Whether the sender is still there and may repeat the request."""
    if job.token:
        return (request.run,) in server.tables.runs
    return any(session.hello.client == job.client for session in server.tables.clients.values())


def _act(server: State, key: tuple[bool, str], record: _Written) -> Created | Done | None:
    """Carry the request out. None if the reply must wait for a commit."""
    if isinstance(record, Create):
        variable, fills = variables.create(server, record.variable, record.value)
        if record.value is None and not fills:
            return Created(record.sequence, variable)
        if record.value is None:
            commits.submit(server, Job("request", (), 0, variable.number, key[0], key[1], fills))
            return None
        number = variable.number
    elif isinstance(record, Assign):
        variables.write(server, record.variable, record.op, None, (record.value,), record.indices)
        number = record.variable
    elif isinstance(record, AssignAll):
        assign_all.writes(server, record)
        for of, each in assign_all.slotted(record).items():
            _make_slots(server, of, each)
        number = 0
    elif isinstance(record, AssignSlot):
        _make_slots(server, record.optimizer, (record.variable,))
        optimizers.write_slot(server, record)
        number = record.variable
    elif isinstance(record, Free):
        count, renamed = optimizers.free(server, record.variables, record.optimizers)
        return Done(record.sequence, count, 0, renamed)
    else:
        if record.steps:
            _submit(server, optimizers.set_counts(server, record.optimizer, dict(record.steps)))
        optimizer = optimizers.configure(
            server,
            record.optimizer,
            record.kind,
            dict(record.hyperparameters),
            record.schedule,
            record.iterations,
            record.exempt,
        )
        return Done(record.sequence, optimizer.number, optimizer.iterations)
    commits.submit(server, Job("request", (), 0, number, key[0], key[1], ()))
    return None


def _is_token_of(server: State, peer: bytes, record: _Written) -> bool:
    """Whether the sender is a worker. Raises if the peer may not write."""
    client = sessions.hello_of(server, peer)
    if client is not None and client.role == "controller":
        if client.client != record.client:
            raise PeerProtocolError(f"{peer!r:.80} is client {client.client!r:.80}, not {record.client!r:.80}")
        return False
    if peer == sessions.worker_peer(server, 0):
        return True
    raise PeerProtocolError(
        f"only the controller may send {type(record).__name__}; "
        + ("observers may only read" if client else "a worker may send it only while it holds a merge_call token")
    )


# --- reads --------------------------------------------------------------------------------------------------------


def get(server: State, peer: bytes, record: Get) -> None:
    """Answer with places, or with bytes as soon as nothing is being written."""
    _check_known(server, peer, record)
    got = _got(server, record)  # refuses what can be refused now
    if record.frames and commits.is_busy(server):
        _let_go(server, peer)
        server.tables.held[server.tables.next_ticket()] = HeldGet(peer, record)
    else:
        server.out.append(Send(peer, got, record if record.frames else None))


def _let_go(server: State, peer: bytes) -> None:
    """Forget the earlier question of ``peer``: a peer has one question at a time."""
    for ticket, held in server.tables.held.items():
        if held.peer == peer:
            del server.tables.held[ticket]


def answer_held(server: State) -> None:
    """Nothing is being written: answer the held questions for bytes, and those for slots if no slots are being made."""
    for ticket, held in server.tables.held.items():
        if isinstance(held.get, Get):
            server.out.append(Send(held.peer, _got(server, held.get), held.get))
        elif len(server.tables.jobs):
            continue
        else:
            server.out.append(Send(held.peer, _slots(server, held.get)))
        del server.tables.held[ticket]


def describe(server: State, peer: bytes, record: Describe) -> None:
    """Say which variables and optimizers belong to numbers."""
    _check_known(server, peer, record)
    found = tuple(map(partial(variables.get, server), record.variables))
    configured = tuple(map(partial(optimizers.get, server), record.optimizers))
    counts = [optimizers.counts(server, number) for number in record.optimizers]
    slotted = tuple(tuple(sorted(each)) for each in counts)
    steps = tuple(tuple(map(each.__getitem__, numbers)) for each, numbers in zip(counts, slotted, strict=True))
    server.out.append(Send(peer, Described(record.request, found, configured, slotted, steps)))


def locate(server: State, peer: bytes, record: Locate) -> None:
    """Say where variables lie, or gradients of the replica that asks, whose second set of buffers is made if need be.
    Only workers may ask: the answer lets a peer write to a GPU's memory."""
    replica = sessions.replica_at(server, peer)
    if replica is None:
        raise PeerProtocolError("only a worker may send a Locate")
    arrays = [variables.get(server, number).array for number in record.variables]
    if record.buffers >= 0:
        updates.check_dense(server, record.variables)
    if record.buffers == 1:
        slabs.use_second_gradients(server, (array.dtype for array in arrays))
    if record.buffers >= 0:
        arrays = [updates.gradient_place(server, replica, record.buffers + 2, array) for array in arrays]
    server.out.append(Send(peer, Located(record.request, b"", tuple(arrays), (), False)))


def describe_slots(server: State, peer: bytes, record: DescribeSlots) -> None:
    """Say where slots lie, as soon as they are made."""
    _check_known(server, peer, record)
    client = sessions.hello_of(server, peer)
    if client is not None and client.role == "observer":
        raise ContextError("observers may only read, and reading slots can create them")
    _make_slots(server, record.optimizer, (record.variable, *record.others))
    if len(server.tables.jobs):
        _let_go(server, peer)
        server.tables.held[server.tables.next_ticket()] = HeldGet(peer, record)
    else:
        server.out.append(Send(peer, _slots(server, record)))


def _make_slots(server: State, optimizer: int, numbers: tuple[int, ...]) -> None:
    _submit(server, optimizers.make_slots(server, optimizer, numbers))


def _submit(server: State, fills: tuple[SlotFill, ...]) -> None:
    """Have slots made."""
    if fills:
        commits.submit(server, Job("slots", (), 0, 0, False, "", fills))


def _slots(server: State, record: DescribeSlots) -> Slots:
    numbers = (record.variable, *record.others)
    found = [optimizers.slots(server, record.optimizer, number) for number in numbers]
    arrays = tuple(array for slots in found for _, array in slots)
    return Slots(record.request, tuple(name for name, _ in found[0]), arrays)


def statistics(server: State, peer: bytes, record: Statistics, now: float) -> None:
    """Answer with the server's counters."""
    _check_known(server, peer, record)
    tally = server.tables.tally
    replicas = tuple(
        ReplicaStatistics(
            replica,
            session.worker.pid,
            session.worker.device,
            tally.replica_runs[replica],
            tally.points[replica],
            tally.applies[replica],
            node=session.worker.node,
        )
        for replica, session in sorted(server.tables.workers.items())
    )
    counters = Counters(
        request=record.request,
        pid=server.config.pid,
        uptime=now - server.config.started,
        variables=len(server.tables.variables),
        parameter_nbytes=slabs.parameter_nbytes(server),
        slot_nbytes=slabs.slot_nbytes(server),
        commits=tally.commits,
        runs=tally.runs,
        messages=tally.messages,
        replicas=replicas,
        captured=tally.captured,
        uncaptured=tuple((why, count) for why, count in zip(reasons.WORDS, tally.uncaptured, strict=True) if count),
        run=runs.last_finished(server),
        waiting=watchdog.waits(server, now),
        rate=server.rate.at(now, tally.runs),
    )
    server.out.append(Send(peer, counters))


def _got(server: State, record: Get) -> Got:
    found = tuple(map(partial(variables.get, server), record.variables))
    found += tuple(map(partial(variables.named, server), record.names))
    if not record.variables and not record.names:
        found = variables.every(server)
    arrays = tuple(variable.array for variable in found)
    nbytes = sum(array.nbytes for array in arrays) if record.frames else 0
    if nbytes > ANSWER_NBYTES:
        raise InvalidArgumentError(
            f"{nbytes} bytes of variables were asked for at once; one answer holds at most {ANSWER_NBYTES}: ask for "
            "fewer variables at a time, or read them where the service's memory can be mapped"
        )
    return Got(record.request, server.tables.tally.commits, found, arrays)


def _check_known(server: State, peer: bytes, record: Record) -> None:
    if sessions.hello_of(server, peer) is None and sessions.replica_at(server, peer) is None:
        raise PeerProtocolError(f"{type(record).__name__} from {peer!r:.80}, which has not sent a Hello")
