"""Captured steps as the control store has them: as the messages of their replicas."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import TypeAlias

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

__all__ = ["OPEN", "Place", "count", "opened", "place_of", "replay", "span_of", "with_account"]

#: The number of a kind, and a number that tells some of its steps apart.
Place: TypeAlias = tuple[int, int]

#: In place of the number of a kind: what the replicas have asked in a step of which not all have returned. Each round
#: of questions has a place.
OPEN = -1


def with_account(
    captured: Mapping[Place, CapturedStep],
    place: Place,
    account: Account,
    returns: Mapping[int, Sequence[Return]],
    now: float,
) -> dict[Place, CapturedStep]:
    """The captured steps that change by the steps of the account, which follow the one at ``place``. Each of these
    brings what the last captured step of its kind has brought: ``returns`` has the Returns of such steps, as far as
    they are known. Raises ControlDamaged if there is no such step."""
    last: dict[int, Place] = {}  # of each kind
    for where, step in captured.items():
        if where[0] not in last or step.count > captured[last[where[0]]].count:
            last[where[0]] = where

    def brought(kind: int) -> Sequence[Return]:
        if kind in returns:
            return returns[kind]
        if kind not in last:
            raise ControlDamaged(f"the account has a step of kind {kind}, and the control store has none")
        return [_returned(message) for message in captured[last[kind]].heard]

    made = {place: replace(captured[place], account=0)}
    first = _returned(captured[place].heard[-1]).run[0]
    end = first + account.begun
    newest, counts = account.kind(end)
    behind = set(last)
    for run in range(max(first + 1, end + 1 - span_of(brought(newest)[0])), end + 1):
        kind, known = account.kind(run)
        bodies = account.bodies(run)
        ended = [marks.returned(record, run, bodies[record.replica]) for record in brought(kind)]
        heard = tuple([joined(codec.encode(record)) for record in ended])
        made[place_of(kind, ended[0])] = CapturedStep(known[kind], (now,) * len(heard), heard)
        behind.discard(kind)
    for kind in behind - {OPEN}:  # no peer asks for their steps any more, so these are only counted
        where = last[kind]
        if counts[kind] > captured[where].count:
            made[where] = replace(made.get(where, captured[where]), count=counts[kind])
    return made


def place_of(kind: int, record: Return) -> Place:
    """The place of a step. Those of a series that a peer may still ask for have places of their own."""
    return kind, record.run[0] % span_of(record)


def span_of(record: Return) -> int:
    """For the results of how many steps a peer may ask."""
    return 1 + record.lookahead if record.series else 1


def _returned(message: bytes) -> Return:
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
