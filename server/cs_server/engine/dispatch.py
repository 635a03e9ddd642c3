"""The dispatch of events to the parts of the engine, and the order in which the parts go on after each event."""

from __future__ import annotations

from cs_proto.errors import PeerProtocolError
from cs_proto.messages import (
    Ask,
    Assign,
    AssignAll,
    AssignSlot,
    Cancel,
    ClientGone,
    Configure,
    Create,
    Describe,
    DescribeSlots,
    Free,
    Get,
    Goodbye,
    Hello,
    Locate,
    MergeCallReturn,
    Register,
    Resent,
    Return,
    Statistics,
    WaitReport,
)
from cs_proto.records import Record
from cs_server.events import (
    Apply,
    ClientLeft,
    Commit,
    Computed,
    Event,
    Fill,
    Fingerprinted,
    Finished,
    Listening,
    MemoryAvailable,
    ProcessDied,
    Received,
    Tick,
    Write,
)

from . import requests, sessions
from .steps import commits, endings, progress, replays, replica_messages, runs, watchdog
from .store.state import State
from .store.tables import Job


def hear(server: State, event: Event, now: float) -> None:
    """Record what ``event`` says. Raises if a peer may not say it."""
    match event:
        case Received(peer, record):
            server.tables.tally.messages += 1
            _receive(server, peer, record, now)
        case ProcessDied(died):
            if (news := sessions.note_death(server, died)) is not None:
                replays.worker_died(server, news)
        case ClientLeft(client):
            if sessions.left(server, client):
                endings.cancel_all(server, now)
        case MemoryAvailable(nbytes, device_nbytes):
            server.tables.tally.available_nbytes = nbytes
            server.tables.tally.device_nbytes = device_nbytes
        case Computed():
            progress.computed(server, event)
        case Fingerprinted():
            replays.fingerprinted(server, event)
        case Finished(ticket):
            job = commits.finished(server, ticket)
            if job is not None:
                _finished(server, job)
        case Tick():
            watchdog.tick(server, now)
        case Listening():  # no replica has been silent yet
            server.tables.tally.seen = [now] * len(server.replicas)


def settle(server: State) -> None:
    """Do everything that has become possible."""
    endings.give_up_absent(server)
    progress.advance(server)
    if not commits.is_busy(server):
        requests.answer_held(server)
    if sessions.controller_peer(server) is None:
        endings.forget_left(server)
        sessions.welcome_waiting(server)
    replays.announce(server)
    if (ticket := commits.next_to_start(server)) is not None:
        server.out.append(commit(server, ticket))


def commit(server: State, ticket: int) -> Commit:
    """The command for a job. It is the same however often it is asked for, until the job is finished."""
    return Commit(ticket, _operations(server, server.tables.jobs[ticket]))


def _receive(server: State, peer: bytes, record: Record, now: float) -> None:
    if not isinstance(record, Ask | Return) and (replica := sessions.replica_at(server, peer)) is not None:
        server.tables.tally.seen[replica] = now  # the holder of a token sends no Ask while it works
    match record:
        case Ask() | Return():
            sessions.check_replica(server, peer, record.replica, record.incarnation)
            seen = server.tables.tally.seen
            seen[record.replica] = max(seen[record.replica], now)  # a held message is heard later than it came
            if isinstance(record, Ask):
                replica_messages.ask(server, peer, record, now)
            else:
                replica_messages.returned(server, peer, record, now)
        case MergeCallReturn():
            replica_messages.merge_call_returned(server, peer, record)
        case Create() | Assign() | AssignAll() | AssignSlot() | Configure() | Free():
            requests.write(server, peer, record)
        case Locate():
            requests.locate(server, peer, record)
        case DescribeSlots():
            requests.describe_slots(server, peer, record)
        case Get():
            requests.get(server, peer, record)
        case Describe():
            requests.describe(server, peer, record)
        case Statistics():
            requests.statistics(server, peer, record, now)
        case Cancel():
            sessions.check_controller(server, peer, record)
            endings.cancel(server, record, now)
        case WaitReport():
            sessions.check_controller(server, peer, record)
            watchdog.note_wait(server, record, now)
        case Resent():
            sessions.check_controller(server, peer, record)
            replays.resent(server, record, now)
        case Register():
            sessions.register(server, peer, record)
            server.tables.tally.seen[record.worker.replica] = now
        case Hello():
            if sessions.hello(server, peer, record, now):
                runs.finish_again(server)
                replays.announce_again(server)
        case Goodbye():
            if sessions.goodbye(server, peer, record):
                endings.cancel_all(server, now)
        case ClientGone():
            endings.dropped(server, peer, record)
        case _:
            raise PeerProtocolError(f"a {type(record).__name__} is not a message for the server")


def _operations(server: State, job: Job) -> tuple[Apply | Write | Fill, ...]:
    """What a commit consists of."""
    if job.fills:
        return tuple(Fill(f.segment, f.dtype, f.first, f.last, f.value, f.is_lazy) for f in job.fills)
    if job.kind in ("run", "rest"):
        return progress.operations(server, job)
    return (progress.creation(server, job),) if job.kind == "create" else requests.operations(server, job)


def _finished(server: State, job: Job) -> None:
    """What follows from a commit that is finished."""
    if job.kind in ("run", "rest"):
        progress.committed(server, job)
    elif job.kind == "create":
        progress.created(server, job)
    elif job.kind == "request":
        requests.done(server, job)
