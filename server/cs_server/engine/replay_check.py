"""What a replica brought before its worker died, and whether the worker in its place brings it again.

Owns the comparison: records must be equal but for call sites and places in memory, and so must the bytes behind those
places, of which the server makes digests when it hears of the death, before anybody can write there again. Only what
is still to be looked at counts: an operand that was answered may have been overwritten. ``runs`` asks here for each
message of a replay; what follows is decided by ``replays``.
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
    ReducePoint,
    RunId,
    Value,
    WriteNote,
)
from cs_proto.records import replace
from cs_server.events import Command, Fingerprint, Fingerprinted

from . import merge
from .catalogue import Catalogue
from .state import Check, Digest, Point, Tables

__all__ = ["Diverged", "ReplayCheck"]

# In the place of a location: what is compared is what lies there.
_SOMEWHERE = Location("somewhere", 0)


class Diverged(ReplicaLostError):
    """A replay does not bring what was brought before."""


class ReplayCheck:
    """The record of replicas whose workers have died. Asking for a digest is a command; its answer is an event."""

    def __init__(self, tables: Tables, out: list[Command], catalogue: Catalogue) -> None:
        self._tables = tables
        self._out = out
        self._catalogue = catalogue

    def take(self, run: RunId, replica: int) -> None:
        """Have digests made of what ``replica`` has brought to ``run``."""
        state, stand = self._tables.runs[run], self._tables.stands[run, replica]
        for k in range(stand.count):
            point = self._tables.points[run, replica, k]
            # Operands of what was answered are not kept; what was only noted is, until it is committed.
            if k >= state.agreed or (k >= state.committed and isinstance(point, ApplyPoint | AssignPoint)):
                self._ask(Check(run, replica, k, 0), self._of_point(replica, point))
        for (other, writer, number), note in self._tables.writes.items():
            if (other, writer) == (run, replica):
                self._ask(Check(run, replica, -1, number), _of_write(note))

    def point(self, run: RunId, replica: int, point: Point) -> Point:
        """The merge point as it is to be recorded from now on, after the same was brought before. Raises Diverged."""
        before = self._tables.points[run, replica, point.k]
        # The number of a set of variables is known to a worker that has asked for it once, and to no other.
        if (
            isinstance(point, ApplyPoint)
            and isinstance(before, ApplyPoint)
            and self._members(point) == self._members(before)
        ):
            point = replace(point, variable_set=before.variable_set, variables=before.variables)
        if _placeless(point) != _placeless(before):
            raise Diverged(
                f"replay diverged at {merge.title(point)}, merge point {point.k}: before its worker died, the replica "
                f"brought {merge.title(before)}" + " with other values" * (merge.title(point) == merge.title(before))
            )
        self._compare(Check(run, replica, point.k, 0), lambda: self._of_point(replica, point))
        return point

    def write(self, run: RunId, replica: int, note: WriteNote) -> None:
        """A write note was brought again. Raises Diverged."""
        before = self._tables.writes.get((run, replica, note.number))
        if before is not None and _placeless_write(note) != _placeless_write(before):
            raise Diverged(f"replay diverged at {note.op} of variable {note.variable} ({note.site})")
        if before is not None:
            self._tables.writes[run, replica, note.number] = note
            self._compare(Check(run, replica, -1, note.number), lambda: _of_write(note))

    def fingerprinted(self, event: Fingerprinted) -> tuple[Check, Diverged] | None:
        """A digest is made: keep the first of its kind; what is wrong where a later one differs."""
        check = self._tables.checks.get(event.ticket)
        if check is None:
            return None
        del self._tables.checks[event.ticket]
        key = (check.run, check.replica, check.k, check.number)
        known = self._tables.digests.get(key)
        if known is None:
            self._tables.digests[key] = Digest(event.digest)
        elif known.digest != event.digest:
            what = f"write note {check.number}"
            if check.k >= 0:
                what = f"{merge.title(self._tables.points[check.run, check.replica, check.k])}, merge point {check.k}"
            return check, Diverged(f"replay diverged at {what}: its values are not those of before its worker died")
        return None

    def is_checking(self, run: RunId) -> bool:
        """Whether a digest of something of ``run`` is being made."""
        checks = self._tables.checks
        return bool(checks) and any(check.run == run for check in checks.values())

    def command(self, ticket: int) -> Fingerprint:
        """The command for a check: the same however often it is asked for."""
        check = self._tables.checks[ticket]
        if check.k < 0:
            return Fingerprint(ticket, _of_write(self._tables.writes[check.run, check.replica, check.number]))
        point = self._tables.points[check.run, check.replica, check.k]
        return Fingerprint(ticket, self._of_point(check.replica, point))

    def forget(self, run: RunId) -> None:
        """``run`` is over."""
        for key in self._tables.digests:
            if key[0] == run:
                del self._tables.digests[key]
        for ticket, check in self._tables.checks.items():
            if check.run == run:
                del self._tables.checks[ticket]

    def _compare(self, check: Check, arrays: Callable[[], tuple[Array, ...]]) -> None:
        if (check.run, check.replica, check.k, check.number) in self._tables.digests:
            self._ask(check, arrays())

    def _ask(self, check: Check, arrays: tuple[Array, ...]) -> None:
        if arrays:
            ticket = self._tables.next_ticket()
            self._tables.checks[ticket] = check
            self._out.append(Fingerprint(ticket, arrays))

    def _members(self, point: ApplyPoint) -> tuple[int, ...]:
        known = self._tables.sets.get(point.variable_set)
        return known.variables if known is not None else tuple(sorted(point.variables))

    def _of_point(self, replica: int, point: Point) -> tuple[Array, ...]:
        """The arrays of a merge point that lie in a segment, gradient buffers included."""
        if not isinstance(point, ApplyPoint):
            return _located(_arrays_of(point))
        sparse = {gradient.variable: gradient for gradient in point.sparse}
        arrays = [array for gradient in sparse.values() for array in (gradient.values, gradient.indices)]
        for number in self._members(point):
            known = self._tables.variables.get(number)
            if number not in sparse and known is not None:
                arrays.append(self._catalogue.gradient(replica, point.buffers, known.array))
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
            sparse = (replace(g, values=_moved(g.values), indices=_moved(g.indices)) for g in point.sparse)
            return replace(point, sparse=tuple(sparse))
        case AssignPoint() | CreatePoint():
            return replace(point, value=_moved(point.value))
        case ReducePoint() | GatherPoint():
            return replace(point, arrays=tuple(map(_moved, point.arrays)))
        case MergeCallPoint():
            given = point.arguments
            return replace(point, arguments=Value(given.body, tuple(map(_moved, given.arrays))))
    return point


def _placeless_write(note: WriteNote) -> WriteNote:
    indices = None if note.indices is None else _moved(note.indices)
    return replace(note, site="", value=_moved(note.value), indices=indices)


def _moved(array: Array) -> Array:
    return replace(array, place=_SOMEWHERE) if isinstance(array.place, Location) else array
