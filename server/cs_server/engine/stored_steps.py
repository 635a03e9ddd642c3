"""Captured steps as the control store has them: as the messages of their replicas."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from cs_proto import codec, marks
from cs_proto.errors import PeerProtocolError
from cs_proto.messages import Return
from cs_proto.records import replace
from cs_server.events import Event, Finished, Received

from . import dispatch, sessions
from .catalogue import optimizers, variables
from .step_kinds import Kind, kind_of, shape_of
from .store import reasons
from .store.account import Account
from .store.control_log import ControlDamaged
from .store.state import State
from .store.tables import CapturedStep, joined, parted

__all__ = ["count", "replay", "returned", "with_account"]


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
    try:
        record = parted(message)
    except (PeerProtocolError, ValueError, struct.error) as error:
        raise ControlDamaged(f"a message in the control store does not read back: {error}") from error
    if not isinstance(record, Return):
        raise ControlDamaged(f"the control store has a {type(record).__name__} for a Return")
    return record


def replay(server: State, is_committing: bool) -> None:
    """Hear those captured steps in the general way that a peer may still ask for: the last one, and as many of its
    series before it as the client sends ahead. Other steps are only counted. The commit of the last step stays under
    way if ``is_committing``."""
    entries = server.tables.captured.items()
    steps = [(number, step, list(map(returned, step.heard))) for (number, _), step in entries]
    steps.sort(key=lambda each: each[2][0].run)
    *_, last, heard = steps[-1]
    first, series = heard[0].run[0] - (heard[0].lookahead if heard[0].series else 0), heard[0].series
    known = [each for each in steps if each[2][0].run[0] >= first and each[2][0].series == series]
    for number, step, heard in {each[0]: each for each in steps}.values():  # the last one of each kind
        repeated = sum(each[0] == number for each in known)
        returns = sorted(heard, key=lambda record: record.replica)
        count(server, kind_of(number, [shape_of(record) or () for record in returns]), step.count - repeated)
    for _, step, heard in known:
        reasons.note(server.reasons, heard[0].run, reasons.CAPTURED)
        for now, record in zip(step.since, heard, strict=True):
            peer = sessions.worker_peer(server, record.replica)
            _hear(server, Received(peer or b"", record), now)
        if server.tables.tally.committing and not (step is last and is_committing):
            _hear(server, Finished(server.tables.tally.committing), step.since[-1])


def _hear(server: State, event: Event, now: float) -> None:
    """Bring the tables up to date with one event. It was answered before, so its commands are dropped."""
    dispatch.hear(server, event, now)
    dispatch.settle(server)
    server.out.clear()


def count(server: State, kind: Kind, steps: int) -> None:
    """Count finished steps of a kind in the tables."""
    tally = server.tables.tally
    tally.messages += steps * len(server.replicas)
    tally.runs += steps
    tally.captured += steps
    tally.commits += steps * kind.commits
    tally.tickets += steps * bool(kind.commits)
    for replica in server.replicas:
        tally.replica_runs[replica] += steps
        tally.points[replica] += steps * kind.points
        tally.applies[replica] += steps * kind.applies
    if steps:
        for number in kind.sets:
            optimizers.applied(server, number, steps)
        for number in kind.written:
            variables.written(server, number, steps)
