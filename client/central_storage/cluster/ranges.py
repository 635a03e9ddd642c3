"""The bytes in segments that records stand for, so that they are brought to the other machine before the record.

A record names memory in two ways. The first is an :class:`~cs_proto.descriptors.Array` that lies in a segment. All
records are searched for these by their field types, so a new field of that type is found, too. The second is what a
record means: an ApplyPoint stands for gradients at the offsets of its variables. A :class:`Catalogue` learns these
offsets from the records that pass.

A test lists every field of every record and what it stands for; whoever adds one has to say so there. The module opens
nothing and reads no memory.
"""

from __future__ import annotations

import re
import typing
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, TypeAlias, TypeVar

from cs_proto import segment_names
from cs_proto.descriptors import Array, Location
from cs_proto.errors import PeerProtocolError
from cs_proto.frozen import fields_of, frozen
from cs_proto.messages import (
    Accepted,
    ApplyPoint,
    Ask,
    Fetch,
    Forget,
    Got,
    Located,
    OptimizerUpdate,
    Put,
    Return,
    Variable,
)
from cs_proto.ranges import without
from cs_proto.records import Record, altered

__all__ = [
    "GAP_NBYTES",
    "PLACES_ONLY",
    "Catalogue",
    "Known",
    "Range",
    "arrays_in",
    "comes_down",
    "for_node",
    "joined",
    "outside",
    "variables_in",
]

Range: TypeAlias = tuple[str, int, int]
"""The name of a segment, and the bytes from and to."""

R = TypeVar("R", bound=Record)

#: The fields with arrays of which a record says only where they lie. A Fetch and a Put name what the server reads and
#: writes. What a Got and a Located name are variables, which the mirror brings, or gradients, which the worker writes.
PLACES_ONLY: Mapping[type[Record], tuple[str, ...]] = {
    Fetch: ("array",),
    Put: ("array",),
    Got: ("arrays",),
    Located: ("arrays",),
}

#: Variables begin at multiples of 64 bytes, so nothing lies in a gap of so many bytes between two of them.
GAP_NBYTES = 63
# What the records for a worker may name: memory of others that it only reads, and its own results.
_COMES_DOWN = re.compile(
    r"inputs|arena/(server|controller|[0-9]{1,4})|parameters/[a-z0-9]+|slots/[0-9]+/[a-z0-9_.-]+/[a-z0-9]+"
)
# The last buffers of gradients that are segments.
_LAST_BUFFERS = 1


def arrays_in(record: Record) -> list[Array]:
    """The arrays of ``record`` whose bytes its receiver may read in a segment."""
    return [array for array in _found(record, Array) if type(array.place) is Location]


def variables_in(record: Record) -> list[Variable]:
    """The variables whose places ``record`` tells."""
    return _found(record, Variable)


def comes_down(segment: str) -> bool:
    """Whether bytes of this segment may be brought to a worker on another machine. Those of sparse variables may not:
    the worker fetches their rows."""
    return _COMES_DOWN.fullmatch(segment) is not None


def for_node(record: Record) -> Record:
    """What a worker on another machine is told in the place of ``record``: no handles of GPU memory."""
    if isinstance(record, Located) and (record.uuid or record.places):
        return altered(record, uuid=b"", places=())
    return record


def joined(ranges: Iterable[Range], gap: int = 0) -> list[Range]:
    """The ranges in order, without empty ones. Those that overlap, touch, or are at most ``gap`` bytes apart, are one.

    >>> joined([("a", 8, 12), ("b", 0, 4), ("a", 0, 8), ("a", 20, 20), ("a", 13, 14)])
    [('a', 0, 12), ('a', 13, 14), ('b', 0, 4)]
    """
    found: list[Range] = []
    for segment, start, stop in sorted(ranges):
        if start >= stop:
            continue
        if found and found[-1][0] == segment and start <= found[-1][2] + gap:
            found[-1] = segment, found[-1][1], max(stop, found[-1][2])
        else:
            found.append((segment, start, stop))
    return found


def outside(ranges: Iterable[Range], segment: str, parts: Sequence[tuple[int, int]]) -> list[Range]:
    """What of the ranges lies in none of these parts of one segment, which are as :func:`cs_proto.ranges.merged`
    returns them.

    >>> outside([("a", 0, 9), ("b", 0, 9)], "a", [(2, 4)])
    [('a', 0, 2), ('a', 4, 9), ('b', 0, 9)]
    """
    found: list[Range] = []
    for name, start, stop in ranges:
        left = without([(start, stop)], parts) if name == segment else [(start, stop)]
        found += [(name, first, last) for first, last in left]
    return found


@frozen(eq=False)
class Known:
    """Where a variable lies. Another object each time it is learned anew."""

    number: int
    dtype: str
    is_sparse: bool
    #: Its bytes in the segment of its slab.
    range: Range


class Catalogue:
    """What the records that pass one worker, in both directions, tell about variables and sets of them.

    Each end has one of its own for each incarnation of the worker. It learns from a record before it is asked about it.
    """

    def __init__(self, replica: int) -> None:
        """``replica`` is that of the worker."""
        #: The variables by number.
        self.variables: dict[int, Known] = {}
        #: Counts the changes of :attr:`variables`.
        self.revision = 0
        self._replica = replica
        self._arena = segment_names.arena(replica)
        # The variables by segment, ascending by place. No two overlap.
        self._slabs: dict[str, list[Known]] = {}
        self._sets: dict[int, tuple[int, ...]] = {}
        # Variables that were freed after the worker was told of them. A replica whose run was given up may still name
        # them.
        self._freed: set[int] = set()
        # The segments to which the worker writes through the server, because it cannot map them: what lies at its
        # machine is not what it has written.
        self._put: set[str] = set()
        # The last question of the replica, if its answer numbers sets of variables: the run, the point and its updates.
        self._asked: tuple[tuple[int, ...], int, tuple[OptimizerUpdate, ...]] | None = None
        # The gradients of applies by what names them.
        self._gradients: dict[object, list[Range]] = {}
        # The Returns of the last run of a script, by client and run, its nested runs too.
        self._returned: set[tuple[str, tuple[int, ...]]] = set()

    def learn(self, record: Record) -> None:
        """Take in what ``record`` tells. Raises PeerProtocolError if it contradicts itself."""
        for variable in variables_in(record):
            self._learn(variable)
        if isinstance(record, Ask):
            point, self._asked = record.point, None
            if isinstance(point, ApplyPoint) and point.needs_answer:
                self._asked = record.run, point.k, point.updates
        elif isinstance(record, Accepted) and self._asked is not None and self._asked[:2] == (record.run, record.k):
            updates = self._asked[2]
            if len(updates) != len(record.variable_sets):
                raise PeerProtocolError(f"{len(record.variable_sets)} numbers of sets answer {len(updates)} updates")
            for update, number in zip(updates, record.variable_sets, strict=True):
                if update.variables:
                    self._sets[number] = update.variables
            self._asked = None
            self._gradients.clear()
        elif isinstance(record, Forget):
            self._forget(number for number in record.variables if number in self.variables)
        elif isinstance(record, Put):
            self._put.add(_segment_of(record.array))

    def up(self, record: Record) -> list[Range]:
        """What is brought to the service before this ``record`` of the worker: arrays in its own arena, and the
        gradients of applies. Arrays elsewhere, and what the worker has put, are there already.

        Raises PeerProtocolError if the gradients of an apply cannot be found: its variables or its set are unknown, it
        names a sparse variable without rows, or buffers on a GPU.
        """
        found = [_range_of(array) for array in arrays_in(record) if _segment_of(array) == self._arena]
        for point in _found(record, ApplyPoint):
            found += self._gradients_of(point)
        return joined(each for each in found if each[0] not in self._put)

    def is_repeated(self, record: Record) -> bool:
        """Whether the worker repeats a Return about which this was asked before, because the server was started again.
        Nothing is brought again then: the script may have the results, and may have written to them."""
        if not isinstance(record, Return):
            return False
        said = record.client, record.run
        if said in self._returned:
            return True
        of_one_run = {each for each in self._returned if (each[0], each[1][:1]) == (record.client, record.run[:1])}
        self._returned = {*of_one_run, said}
        return False

    def down(self, record: Record) -> list[Range]:
        """What is brought to the worker before this ``record`` for it, apart from variables, which the mirror brings.

        Raises PeerProtocolError if the record names memory that no worker reads.
        """
        found = []
        for array in arrays_in(record):
            name = _segment_of(array)
            if segment_names.is_sparse(name):
                continue  # the worker fetches it
            if not comes_down(name):
                raise PeerProtocolError(f"a {type(record).__name__} names an array in {name}, which no worker reads")
            found.append(_range_of(array))
        return joined(found)

    def _gradients_of(self, point: ApplyPoint) -> Sequence[Range]:
        if point.buffers > _LAST_BUFFERS:
            raise PeerProtocolError(
                f"an apply of replica {self._replica} has gradients in buffers {point.buffers} of a GPU, but its "
                "worker is on another machine"
            )
        named = [(each.variable_set, each.variables, [row.variable for row in each.sparse]) for each in point.updates]
        key = (point.buffers, *((number, variables, *rows) for number, variables, rows in named))
        found = self._gradients.get(key)
        if found is None:
            ranges = [
                self._gradient(number, point.buffers)
                for variable_set, variables, rows in named
                for number in self._members(variable_set, variables)
                if number not in rows and number not in self._freed  # which the server refuses
            ]
            found = self._gradients[key] = joined(ranges, GAP_NBYTES)
        return found

    def _members(self, variable_set: int, variables: tuple[int, ...]) -> tuple[int, ...]:
        if not variable_set:
            return variables
        if variable_set not in self._sets:
            raise PeerProtocolError(
                f"an apply of replica {self._replica} names set {variable_set} of variables, which the server has not "
                "numbered for it"
            )
        return self._sets[variable_set]

    def _gradient(self, number: int, buffers: int) -> Range:
        known = self.variables.get(number)
        if known is None:
            raise PeerProtocolError(
                f"an apply of replica {self._replica} names variable {number}, of which its worker was not told where "
                "it lies"
            )
        if known.is_sparse:
            raise PeerProtocolError(
                f"an apply of replica {self._replica} names all of the sparse variable {number}, which has no gradient "
                "buffers"
            )
        return segment_names.gradients(self._replica, buffers, known.dtype), known.range[1], known.range[2]

    def _learn(self, variable: Variable) -> None:
        spec, (name, start, stop) = variable.spec, _range_of(variable.array)
        if name != segment_names.parameters(segment_names.slab(spec.dtype, sparse=spec.sparse)):
            raise PeerProtocolError(f"variable {variable.number} of dtype {spec.dtype} lies in {name}")
        before = self.variables.get(variable.number)
        if before is not None and (before.range, before.dtype) == ((name, start, stop), spec.dtype):
            return
        self._freed.discard(variable.number)
        self._drop(variable.number)
        slab = self._slabs.setdefault(name, [])
        first = bisect_right(slab, start, key=_stop_of)
        others = slab[first : bisect_left(slab, stop, first, key=_start_of)] if start < stop else []
        # A place passes from a variable that was freed to one that was made after it. Numbers are not used again.
        if any(other.number > variable.number for other in others):
            self._forget([variable.number])
            return
        if others:
            self._forget([other.number for other in others])
        known = Known(variable.number, spec.dtype, spec.sparse, (name, start, stop))
        self.variables[variable.number] = known
        if start < stop:
            slab.insert(bisect_left(slab, start, key=_start_of), known)
        self.revision += 1

    def _forget(self, numbers: Iterable[int]) -> None:
        gone = set(numbers) - self._freed
        self._freed |= gone
        for number in gone:
            self._drop(number)
        for number, members in self._sets.items():
            if not gone.isdisjoint(members) and self._freed.issuperset(members):
                self._sets[number] = ()

    def _drop(self, number: int) -> None:
        """Know no longer where the variable lies."""
        self._gradients.clear()
        self.revision += 1
        known = self.variables.pop(number, None)
        if known is not None and known.range[1] < known.range[2]:
            self._slabs[known.range[0]].remove(known)


def _start_of(known: Known) -> int:
    return known.range[1]


def _stop_of(known: Known) -> int:
    return known.range[2]


def _segment_of(array: Array) -> str:
    assert isinstance(array.place, Location)
    return array.place.segment


def _range_of(array: Array) -> Range:
    assert isinstance(array.place, Location)
    return array.place.segment, array.place.offset, array.place.offset + array.nbytes


# --- the search in records ------------------------------------------------------------------------------------------


def _found(record: Record, wanted: type[R]) -> list[R]:
    """The records of the class ``wanted`` in ``record``, in the order of the fields."""
    found: list[R] = []
    _search(record, wanted, found)
    return found


def _search(value: Any, wanted: type[R], found: list[R]) -> None:
    if type(value) is wanted:
        found.append(value)
    elif type(value) is tuple:
        for member in value:
            _search(member, wanted, found)
    elif isinstance(value, Record):
        for name in _fields_with(type(value), wanted):
            _search(getattr(value, name), wanted, found)


# What :func:`_fields_with` has found.
_fields: dict[tuple[type[Record], type[Record]], tuple[str, ...]] = {}


def _fields_with(kind: type[Record], wanted: type[Record]) -> tuple[str, ...]:
    """The fields of a record of class ``kind`` in which there may be a ``wanted``."""
    found = _fields.get((kind, wanted))
    if found is None:
        hints, named = typing.get_type_hints(kind, include_extras=True), PLACES_ONLY.get(kind, ())
        found = tuple(name for name in fields_of(kind) if name not in named and _may_hold(hints[name], wanted))
        _fields[kind, wanted] = found
    return found


def _may_hold(hint: Any, wanted: type[Record]) -> bool:
    """Whether a value of the type ``hint`` may be a ``wanted``, or have one in it."""
    if typing.get_origin(hint) is Annotated:
        return False  # a number
    if isinstance(hint, type) and issubclass(hint, Record):
        return hint is wanted or bool(_fields_with(hint, wanted))
    return any(_may_hold(argument, wanted) for argument in typing.get_args(hint))
