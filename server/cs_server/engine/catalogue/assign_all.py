"""Setting many variables and slots in one commit, as the restore of a checkpoint does.

The module knows nothing of runs and peers; ``requests`` calls it.
"""

from __future__ import annotations

import itertools
import math
from functools import cache, partial
from typing import NamedTuple

from cs_proto.arithmetic.optimizers import ROWWISE
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
    if server.decided is None or server.decided[0] is not record:
        server.decided = record, _writes(server, record)
    return server.decided[1]


def _writes(server: State, record: AssignAll) -> tuple[Write, ...]:
    named: dict[tuple[int, str], list[int]] = {(0, ""): [*record.variables]}
    for optimizer, slot, numbers in record.slots:
        named.setdefault((optimizer, slot), []).extend(numbers)
    if any(len(set(numbers)) < len(numbers) for numbers in named.values()):
        raise InvalidArgumentError("an AssignAll names a variable or a slot twice")
    for optimizer, beside in slotted(record).items():
        optimizers.members(server, optimizer, beside)
    lie = cache(partial(_pieces, server))  # slots lie as their variables do
    pieces = [*lie(record.variables, is_rowwise=False)]
    for optimizer, slot, numbers in record.slots:
        known = optimizers.get(server, optimizer)
        place = optimizers.place_of_slot(known, slot)
        for piece in lie(numbers, is_rowwise=known.rule in ROWWISE):
            slab = slabs.slab_of(variables.row(server, piece.changed[0]).spec)
            segment = optimizers.slot_segments(server, known, slab)[place]
            pieces.append(_Piece(segment, piece.offset, piece.nbytes, piece.room, piece.dtype, ()))
    if (given := record.value.shape[0]) != (need := sum(piece.room for piece in pieces)):
        raise InvalidArgumentError(f"an AssignAll has {given} bytes, but its variables and slots need {need}")
    starts = itertools.accumulate((piece.room for piece in pieces), initial=0)
    return tuple(piece.write(record.value, start) for piece, start in zip(pieces, starts, strict=False) if piece.nbytes)


class _Piece(NamedTuple):
    """Variables or slots that follow each other in their segment. ``changed`` are the variables, of slots none."""

    segment: str
    offset: int
    nbytes: int
    #: The bytes to the end of the room of the last one: there, and in the value.
    room: int
    dtype: str
    changed: tuple[int, ...]

    def write(self, value: Array, start: int) -> Write:
        """The operation that sets the piece to the bytes of ``value`` from ``start`` on."""
        shape = (self.nbytes // item_nbytes(self.dtype),)
        assert isinstance(value.place, Location)
        target = Array(self.dtype, shape, Location(self.segment, self.offset))
        source = Array(self.dtype, shape, Location(value.place.segment, value.place.offset + start))
        return Write(target, "assign", None, (source,), None, self.changed)


def _pieces(server: State, numbers: tuple[int, ...], *, is_rowwise: bool) -> list[_Piece]:
    """Where variables lie, or slots that begin where they do. On a GPU each has memory of its own."""
    found: list[_Piece] = []
    segment, dtype, is_apart = "", "", False
    offset = last = end = 0
    changed: list[int] = []
    sizes: dict[tuple[str, tuple[int, ...]], tuple[int, int]] = {}  # bytes and room of each dtype and shape

    def finish() -> None:
        if changed:
            found.append(_Piece(segment, offset, last - offset, end - offset, dtype, tuple(changed)))

    for number, row in zip(numbers, variables.rows(server, numbers), strict=True):
        spec, place = row.spec, row.place
        first, kind = place.offset, (spec.dtype, spec.shape)
        if (size := sizes.get(kind)) is None:
            nbytes = item_nbytes(spec.dtype) * math.prod(spec.shape[:1] if is_rowwise else spec.shape)
            size = sizes[kind] = nbytes, room_of(nbytes)
        if first != end or place.segment != segment or is_apart:
            finish()
            segment, offset, dtype, changed = place.segment, first, spec.dtype, []
            is_apart = slabs.on_device(server, dtype, 1) > 0
        changed.append(number)
        last, end = first + size[0], first + size[1]
    finish()
    return found
