"""The kinds of captured steps: what steps have in common whose replicas bring the same things."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from cs_proto.frozen import frozen
from cs_proto.messages import ApplyPoint, AssignPoint, Return, WriteNote

__all__ = ["Kind", "Shape", "kind_of", "shape_of"]

#: What counts of the notes of one replica, in order: of an apply its sets and the bound on the gradients, of an assign
#: the variable and the operation, of a write note the variable.
Shape: TypeAlias = tuple[Any, ...]


@frozen
class Kind:
    """What all steps have in common in which the replicas bring notes of the same shapes."""

    number: int
    #: How many merge points there are, and how many of them are applies.
    points: int
    applies: int
    #: How many write notes the replicas bring together.
    notes: int
    #: The variable sets that are updated, and the variables that are written, with repetitions.
    sets: tuple[int, ...]
    written: tuple[int, ...]
    #: How many commits such a step counts as.
    commits: int


def shape_of(record: Return) -> Shape | None:
    """The shape of the notes of a Return. None if one needs an answer or is not the next one."""
    parts: list[Any] = []
    k = writes = 0
    for note in record.notes:
        if note.k != k:
            return None
        if type(note) is ApplyPoint:
            sets = [
                (each.optimizer, each.variable_set, tuple([g.variable for g in each.sparse]) if each.sparse else ())
                for each in note.updates
            ]
            for _, number, _ in sets:
                if not number:  # the replica would wait for it
                    return None
            parts.append((tuple(sets), note.global_clipnorm, note.clip_epsilon))
            k += 1
        elif type(note) is AssignPoint:
            if note.checked:
                return None
            parts.append((note.variable, note.op))
            k += 1
        elif type(note) is WriteNote:
            if note.number != writes:
                return None
            parts.append(note.variable)
            writes += 1
    return tuple(parts) if record.count == k else None


def kind_of(number: int, shapes: Sequence[Shape]) -> Kind:
    """The kind of steps in which the replicas bring notes of these shapes, by replica."""
    points = [part for part in shapes[0] if type(part) is tuple]
    applies = [part[0] for part in points if len(part) == 3]
    notes = [part for shape in shapes for part in shape if type(part) is int]
    return Kind(
        number,
        len(points),
        len(applies),
        len(notes),
        tuple(variable_set for sets in applies for _, variable_set, _ in sets),
        (*(part[0] for part in points if len(part) == 2), *notes),
        len(points) + len(notes),
    )
