"""Captured steps as the control store has them: as the messages of their replicas."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from operator import itemgetter

from cs_proto import codec, marks
from cs_proto.errors import PeerProtocolError
from cs_proto.messages import Ask, Reduced, Return
from cs_proto.records import replace
from cs_server.events import Computed, Event, Finished, Received

from . import dispatch, sessions
from .catalogue import optimizers, variables
from .step_kinds import Kind, kind_of, shapes_of
from .store import reasons
from .store.account import Account
from .store.control_log import ControlDamaged
from .store.state import State
from .store.tables import CapturedStep, Tables, joined, parted

__all__ = ["OPEN", "count", "opened", "replay", "returned", "with_account"]

#: In place of the number of a kind: what the replicas have asked in a step of which not all have returned. Each round
#: of questions has a place.
OPEN = -1


def with_account(
    place: tuple[int, int], step: CapturedStep, returns: Sequence[Return], account: Account, now: float
) -> dict[tuple[int, int], CapturedStep]:
    """The captured steps, by place, that take the place of ``step`` and the steps of the account. ``returns`` are those
    of one of them."""
    first, series = returned(step.heard[0]).run[0], returns[0].series
    span = 1 + returns[0].lookahead if series else 1
    made = {place: replace(step, account=0)}
    for number in range(max(1, account.begun + 1 - span), account.begun + 1):
        run = first + number
        bodies = account.bodies(run)
        brought = [marks.returned(record, run, bodies[record.replica]) for record in returns]
        heard = tuple([joined(codec.encode(record)) for record in brought])
        made[place[0], run % span if series else 0] = CapturedStep(step.count + number, (now,) * len(heard), heard)
    return made


def returned(message: bytes) -> Return:
    """The Return in a message of a captured step. Raises ControlDamaged if it does not read back."""
    record = _read(message)
    if not isinstance(record, Return):
        raise ControlDamaged(f"the control store has a {type(record).__name__} for a Return")
    return record


def _read(message: bytes) -> Return | Ask | Reduced:
    """The record in a message of a captured step. Raises ControlDamaged if it does not read back."""
    try:
        record = parted(message)
    except (PeerProtocolError, ValueError, struct.error) as error:
        raise ControlDamaged(f"a message in the control store does not read back: {error}") from error
    if not isinstance(record, Return | Ask | Reduced):
        raise ControlDamaged(f"the control store has a {type(record).__name__} among the messages of a step")
    return record


def replay(server: State, is_committing: bool) -> None:
    """Hear those captured steps in the general way that a peer may still ask for: the last one, as many of its series
    before it as the client sends ahead, and the open one. Other steps are only counted. The commit of the last step
    stays under way if ``is_committing``."""
    entries = server.tables.captured.items()
    steps = [(place[0], step, list(map(_read, step.heard))) for place, step in entries if place[0] != OPEN]
    steps.sort(key=lambda each: each[2][0].run)
    if steps:
        _replay_decided(server, steps, is_committing)
    for step in opened(server.tables):
        _replay_step(server, step)


def opened(tables: Tables) -> list[CapturedStep]:
    """What the replicas have asked in the step of which not all have returned, round by round."""
    return [step for place, step in sorted(tables.captured.items(), key=itemgetter(0)) if place[0] == OPEN]


def _replay_decided(
    server: State, steps: Sequence[tuple[int, CapturedStep, list[Return | Ask | Reduced]]], is_committing: bool
) -> None:
    *_, last, heard = steps[-1]
    end = heard[-1]
    assert isinstance(end, Return)
    first, series = end.run[0] - (end.lookahead if end.series else 0), end.series
    known = [each for each in steps if each[2][-1].run[0] >= first and _series(each[2]) == series]
    for number, step, heard in {each[0]: each for each in steps}.values():  # the last one of each kind
        repeated = sum(each[0] == number for each in known)
        count(server, kind_of(number, shapes_of(heard)), step.count - repeated)
    for _, step, heard in known:
        reasons.note(server.reasons, heard[0].run, reasons.CAPTURED)
        _replay_step(server, step)
        if server.tables.tally.committing and not (step is last and is_committing):
            _hear(server, Finished(server.tables.tally.committing), step.since[-1])


def _series(heard: Sequence[Return | Ask | Reduced]) -> int:
    end = heard[-1]
    return end.series if isinstance(end, Return) else 0


def _replay_step(server: State, step: CapturedStep) -> None:
    for now, message in zip(step.since, step.heard, strict=True):
        record = _read(message)
        if isinstance(record, Reduced):
            (ticket,) = server.tables.computations
            _hear(server, Computed(ticket, record.arrays, None), now)
        else:
            _hear(server, Received(sessions.worker_peer(server, record.replica) or b"", record), now)


def _hear(server: State, event: Event, now: float) -> None:
    """Bring the tables up to date with one event. It was answered before, so its commands are dropped."""
    dispatch.hear(server, event, now)
    dispatch.settle(server)
    server.out.clear()


def count(server: State, kind: Kind, steps: int) -> None:
    """Count finished steps of a kind in the tables."""
    tally = server.tables.tally
    tally.messages += steps * len(server.replicas) * (1 + kind.questions)
    tally.runs += steps
    tally.captured += steps
    tally.commits += steps * kind.commits
    tally.tickets += steps * ((kind.commits > 0) + kind.questions)
    for replica in server.replicas:
        tally.replica_runs[replica] += steps
        tally.points[replica] += steps * kind.points
        tally.applies[replica] += steps * kind.applies
    if steps:
        for number in kind.sets:
            optimizers.applied(server, number, steps)
        for number in kind.written:
            variables.written(server, number, steps)
