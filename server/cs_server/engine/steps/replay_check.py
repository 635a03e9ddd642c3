"""Whether a new worker brings what its replica brought before its first worker died.

Owns the comparison. Records must be equal except for call sites and places in memory, and the bytes at those places
must be equal, too. The server makes digests of these bytes when it hears of the death, before anybody can write there
again. Only bytes that are still needed are compared: the operand of a point that was answered may have been
overwritten. ``replica_messages`` asks here for each message of a replay; ``replays`` decides what follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from cs_proto.arrays import Array, Location
from cs_proto.errors import ReplicaLostError
from cs_proto.messages import (
    ApplyPoint,
    AssignPoint,
    CreatePoint,
    GatherPoint,
    MergeCallPoint,
    OptimizerUpdate,
    Point,
    ReducePoint,
    RunId,
    Value,
    WriteNote,
)
from cs_proto.records import replace
from cs_server.engine.catalogue import updates
from cs_server.engine.store.state import State
from cs_server.engine.store.tables import Check, Digest
from cs_server.events import Fingerprint, Fingerprinted

from . import merge

# Takes the place of every location: the bytes there are compared, not the location.
_SOMEWHERE = Location("somewhere", 0)


class Diverged(ReplicaLostError):
    """A replay differs from the run before the worker's death."""


def take(server: State, run: RunId, replica: int) -> None:
    """Have digests made of all merge points and writes that ``replica`` has sent in ``run``."""
    state, stand = server.tables.runs[run], server.tables.stands[run, replica]
    for k in range(stand.count):
        point = server.tables.points[run, replica, k]
        # The operands of an answered point are gone; those of a noted point stay until it is committed.
        if k >= state.agreed or (k >= state.committed and isinstance(point, ApplyPoint | AssignPoint)):
            _ask(server, Check(run, replica, k, 0), _of_point(server, replica, point))
    for (other, writer, number), note in server.tables.writes.items():
        if (other, writer) == (run, replica):
            _ask(server, Check(run, replica, -1, number), _of_write(note))


def check_point(server: State, run: RunId, replica: int, point: Point) -> Point:
    """Compare a merge point with the recorded one; return it as it is recorded from now on. Raises Diverged."""
    before = server.tables.points[run, replica, point.k]
    if isinstance(point, ApplyPoint) and isinstance(before, ApplyPoint):
        point = _named_as(server, point, before)
    if _placeless(point) != _placeless(before):
        raise Diverged(
            f"replay diverged at {merge.title(point)}, merge point {point.k}: before its worker died, the replica "
            f"reached {merge.title(before)}" + " with other values" * (merge.title(point) == merge.title(before))
        )
    _compare(server, Check(run, replica, point.k, 0), lambda: _of_point(server, replica, point))
    return point


def check_write(server: State, run: RunId, replica: int, note: WriteNote) -> None:
    """Compare a write note with the recorded one. Raises Diverged."""
    before = server.tables.writes.get((run, replica, note.number))
    if before is not None and _placeless_write(note) != _placeless_write(before):
        raise Diverged(f"replay diverged at {note.op} of variable {note.variable} ({note.site})")
    if before is not None:
        server.tables.writes[run, replica, note.number] = note
        _compare(server, Check(run, replica, -1, note.number), lambda: _of_write(note))


def fingerprinted(server: State, event: Fingerprinted) -> tuple[Check, Diverged] | None:
    """Keep the first digest of its kind. Return the check and the error if a later digest differs."""
    check = server.tables.checks.get(event.ticket)
    if check is None:
        return None
    del server.tables.checks[event.ticket]
    key = (check.run, check.replica, check.k, check.number)
    known = server.tables.digests.get(key)
    if known is None:
        server.tables.digests[key] = Digest(event.digest)
    elif known.digest != event.digest:
        what = f"write note {check.number}"
        if check.k >= 0:
            what = f"{merge.title(server.tables.points[check.run, check.replica, check.k])}, merge point {check.k}"
        return check, Diverged(f"replay diverged at {what}: its values differ from those before the worker died")
    return None


def is_checking(server: State, run: RunId) -> bool:
    """Whether a digest of something of ``run`` is being made."""
    checks = server.tables.checks
    return bool(checks) and any(check.run == run for check in checks.values())


def command(server: State, ticket: int) -> Fingerprint:
    """The command for a check. It is the same however often it is asked for."""
    check = server.tables.checks[ticket]
    if check.k < 0:
        return Fingerprint(ticket, _of_write(server.tables.writes[check.run, check.replica, check.number]))
    point = server.tables.points[check.run, check.replica, check.k]
    return Fingerprint(ticket, _of_point(server, check.replica, point))


def forget(server: State, run: RunId) -> None:
    """``run`` is over: forget its digests."""
    for key in server.tables.digests:
        if key[0] == run:
            del server.tables.digests[key]
    for ticket, check in server.tables.checks.items():
        if check.run == run:
            del server.tables.checks[ticket]


def _compare(server: State, check: Check, arrays: Callable[[], tuple[Array, ...]]) -> None:
    if (check.run, check.replica, check.k, check.number) in server.tables.digests:
        _ask(server, check, arrays())


def _ask(server: State, check: Check, arrays: tuple[Array, ...]) -> None:
    if arrays:
        ticket = server.tables.next_ticket()
        server.tables.checks[ticket] = check
        server.out.append(Fingerprint(ticket, arrays))


def _named_as(server: State, point: ApplyPoint, before: ApplyPoint) -> ApplyPoint:
    """``point`` with its sets of variables named as in ``before``: only a worker that has asked for the number of a
    set knows it."""
    if len(point.updates) != len(before.updates):
        return point
    updates = tuple(
        replace(update, variable_set=known.variable_set, variables=known.variables)
        if _members(server, update) == _members(server, known)
        else update
        for update, known in zip(point.updates, before.updates, strict=True)
    )
    return replace(point, updates=updates)


def _members(server: State, update: OptimizerUpdate) -> tuple[int, ...]:
    known = server.tables.sets.get(update.variable_set)
    return known.variables if known is not None else tuple(sorted(update.variables))


def _of_point(server: State, replica: int, point: Point) -> tuple[Array, ...]:
    """The arrays of a merge point that lie in a segment, gradient buffers included."""
    if not isinstance(point, ApplyPoint):
        return _located(_arrays_of(point))
    arrays = []
    for update in point.updates:
        sparse = {gradient.variable: gradient for gradient in update.sparse}
        arrays += [array for gradient in sparse.values() for array in (gradient.values, gradient.indices)]
        for number in _members(server, update):
            known = server.tables.variables.get(number)
            if number not in sparse and known is not None and not known.spec.sparse:
                arrays.append(updates.gradient_place(server, replica, point.buffers, known.array))
    return _located(arrays)


def _arrays_of(point: Point) -> tuple[Array, ...]:
    match point:
        case AssignPoint() | CreatePoint():
            return (point.value,)
        case ReducePoint() | GatherPoint():
            return point.arrays
        case MergeCallPoint():
            return point.arguments.arrays
    return ()


def _of_write(note: WriteNote) -> tuple[Array, ...]:
    return _located([note.value] if note.indices is None else [note.value, note.indices])


def _located(arrays: Iterable[Array]) -> tuple[Array, ...]:
    return tuple(array for array in arrays if isinstance(array.place, Location) and array.nbytes)


def _placeless(point: Point) -> Point:
    point = replace(point, site="")
    match point:
        case ApplyPoint():
            return replace(point, updates=tuple(map(_placeless_update, point.updates)))
        case AssignPoint() | CreatePoint():
            return replace(point, value=_moved(point.value))
        case ReducePoint() | GatherPoint():
            return replace(point, arrays=tuple(map(_moved, point.arrays)))
        case MergeCallPoint():
            given = point.arguments
            return replace(point, arguments=Value(given.body, tuple(map(_moved, given.arrays))))
    return point


def _placeless_update(update: OptimizerUpdate) -> OptimizerUpdate:
    sparse = (replace(g, values=_moved(g.values), indices=_moved(g.indices)) for g in update.sparse)
    return replace(update, sparse=tuple(sparse))


def _placeless_write(note: WriteNote) -> WriteNote:
    indices = None if note.indices is None else _moved(note.indices)
    return replace(note, site="", value=_moved(note.value), indices=indices)


def _moved(array: Array) -> Array:
    return replace(array, place=_SOMEWHERE) if isinstance(array.place, Location) else array
