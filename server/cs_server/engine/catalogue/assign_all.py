"""Setting many variables and slots in one commit, as the restore of a checkpoint does.

The module knows nothing of runs and peers; ``requests`` calls it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from cs_proto.arithmetic.optimizers import slot_shape
from cs_proto.arrays import Array, Location, item_nbytes
from cs_proto.errors import InvalidArgumentError
from cs_proto.memory_plan import room_of
from cs_proto.messages import AssignAll
from cs_server.engine.store.state import State
from cs_server.events import Write

from . import optimizers, slabs, variables


def slotted(record: AssignAll) -> dict[int, tuple[int, ...]]:
    """By optimizer, the variables of which slots are set."""
    found: dict[int, dict[int, None]] = {}
    for optimizer, _, numbers in record.slots:
        found.setdefault(optimizer, {}).update(dict.fromkeys(numbers))
    return {optimizer: tuple(numbers) for optimizer, numbers in found.items()}


def count(record: AssignAll) -> int:
    """How many variables and slots are set."""
    return len(record.variables) + sum(len(numbers) for _, _, numbers in record.slots)


def writes(server: State, record: AssignAll) -> tuple[Write, ...]:
    """The operations that set the variables and slots. What lies side by side is one operation.

    Raises InvalidArgumentError if there is no such variable or slot, one is named twice, an optimizer cannot update a
    variable, or ``value`` has another length than all of them together.
    """
    for optimizer, numbers in slotted(record).items():
        optimizers.members(server, optimizer, numbers)
    targets = [_variable(server, number) for number in record.variables]
    for optimizer, slot, numbers in record.slots:
        targets += _slots(server, optimizer, slot, numbers)
    named = {(0, "", number) for number in record.variables}
    named |= {(optimizer, slot, number) for optimizer, slot, numbers in record.slots for number in numbers}
    if len(named) < len(targets):
        raise InvalidArgumentError("an AssignAll names a variable or a slot twice")
    if (given := record.value.shape[0]) != (need := sum(room_of(target.nbytes) for target in targets)):
        raise InvalidArgumentError(f"an AssignAll has {given} bytes, but its variables and slots need {need}")
    made: list[_Piece] = []
    start = 0
    for target in targets:
        if not made or not made[-1].takes(server, target):
            made.append(_Piece(target, start))
        made[-1].add(target)
        start += room_of(target.nbytes)
    return tuple(piece.write(record.value) for piece in made if piece.nbytes)


class _Target(NamedTuple):
    """Where a variable or slot lies: as an Array, which takes longer to make. ``number`` is 0 for a slot."""

    segment: str
    offset: int
    nbytes: int
    dtype: str
    number: int


def _variable(server: State, number: int) -> _Target:
    row = variables.row(server, number)
    nbytes = item_nbytes(row.spec.dtype) * math.prod(row.spec.shape)
    return _Target(row.place.segment, row.place.offset, nbytes, row.spec.dtype, number)


def _slots(server: State, optimizer: int, slot: str, numbers: tuple[int, ...]) -> Iterator[_Target]:
    """The slots of one name that an optimizer has, or would have, beside these variables."""
    record = optimizers.get(server, optimizer)
    place = optimizers.place_of_slot(record, slot)
    segments: dict[str, str] = {}  # by that of the variable: looked up once for each slab
    for number in numbers:
        row = variables.row(server, number)
        dtype, of = row.spec.dtype, row.place
        if of.segment not in segments:
            segments[of.segment] = optimizers.slot_segments(server, record, slabs.slab_of(row.spec))[place]
        nbytes = item_nbytes(dtype) * math.prod(slot_shape(record.rule, row.spec.shape))
        yield _Target(segments[of.segment], of.offset, nbytes, dtype, 0)


class _Piece:
    """Arrays of one dtype that follow each other in their segment, and in the value from byte ``start`` on."""

    def __init__(self, first: _Target, start: int) -> None:
        self._first = first
        self._start = start
        self._numbers: list[int] = []
        #: The bytes of the arrays, with what lies between them.
        self.nbytes = 0
        self._room = 0

    def takes(self, server: State, target: _Target) -> bool:
        """Whether ``target`` begins where the piece ends. On a GPU each array has memory of its own."""
        is_next = target.offset == self._first.offset + self._room and target.segment == self._first.segment
        return is_next and not slabs.on_device(server, target.dtype, 1)

    def add(self, target: _Target) -> None:
        """Append a variable or slot."""
        self.nbytes = self._room + target.nbytes
        self._room += room_of(target.nbytes)
        if target.number:
            self._numbers.append(target.number)

    def write(self, value: Array) -> Write:
        """The operation that sets the piece."""
        dtype = self._first.dtype
        shape = (self.nbytes // item_nbytes(dtype),)
        target = Array(dtype, shape, Location(self._first.segment, self._first.offset))
        assert isinstance(value.place, Location)
        source = Array(dtype, shape, Location(value.place.segment, value.place.offset + self._start))
        return Write(target, "assign", None, (source,), variables=tuple(self._numbers))
