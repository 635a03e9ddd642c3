"""The arrays of a record that the server, or a process that gets them from it, will read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from cs_proto.arrays import Array
from cs_proto.messages import (
    ApplyPoint,
    Ask,
    Assign,
    AssignAll,
    AssignPoint,
    AssignSlot,
    Create,
    CreatePoint,
    GatherPoint,
    MergeCallPoint,
    MergeCallReturn,
    Note,
    ReducePoint,
    Return,
    WriteNote,
)
from cs_proto.records import Record

if TYPE_CHECKING:
    pass

__all__ = ["arrays_of"]


def _rows(point: ApplyPoint) -> Iterator[Array]:
    for update in point.updates:
        for gradient in update.sparse:
            yield gradient.values
            yield gradient.indices


def arrays_of(record: Record) -> Iterator[Array]:
    """The arrays of ``record`` that the server, or a process that gets them from it, will read."""
    match record:
        case Return(notes=notes, value=value):
            yield from _noted(notes)
            if value is not None:
                yield from value.arrays
        case MergeCallReturn(values=values):
            for value in values:
                yield from value.arrays
        case AssignSlot(value=value) | AssignAll(value=value):
            yield value
        case Assign(value=value, indices=indices):
            yield value
            if indices is not None:
                yield indices
        case Create(value=Array() as value):
            yield value
        case Ask(point=point):
            yield from _noted(record.notes)
            match point:
                case ApplyPoint():
                    yield from _rows(point)
                case ReducePoint(arrays=arrays) | GatherPoint(arrays=arrays):
                    yield from arrays
                case AssignPoint(value=value) | CreatePoint(value=value):
                    yield value
                case MergeCallPoint(arguments=arguments):
                    yield from arguments.arrays


def _noted(notes: Iterable[Note]) -> Iterator[Array]:
    for note in notes:
        if isinstance(note, ApplyPoint):
            yield from _rows(note)
        else:
            yield note.value
        if isinstance(note, WriteNote) and note.indices is not None:
            yield note.indices
