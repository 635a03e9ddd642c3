"""The kinds of captured steps: what steps have in common whose replicas bring the same things."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from cs_proto.frozen import frozen
from cs_proto.messages import ApplyPoint, Ask, AssignPoint, GatherPoint, ReducePoint, Return, WriteNote
from cs_proto.records import Record

__all__ = ["Kind", "Shape", "do_meet", "kind_of", "shape_of", "shapes_of"]

#: What counts of the notes and questions of one replica, in order: of an apply its sets, the bound on the gradients and
#: the call site, of an assign the variable and the operation, of a write note the variable, and of a question its kind.
Shape: TypeAlias = tuple[Any, ...]


@frozen
class Kind:
    """What all steps have in common in which the replicas bring notes of the same shapes."""

    number: int
    #: How many merge points there are, how many of them are applies, and how many are questions.
    points: int
    applies: int
    questions: int
    #: How many write notes the replicas bring together.
    notes: int
    #: The variable sets that are updated, and the variables that are written, with repetitions.
    sets: tuple[int, ...]
    written: tuple[int, ...]
    #: How many commits such a step counts as.
    commits: int


def shape_of(record: Ask | Return, before: Shape = ()) -> Shape | None:
    """The shape of what a replica has brought with a message, and ``before`` it in the same run. None if a note needs
    an answer, something is not the next one, or a question is not of all_reduce or all_gather."""
    parts: list[Any] = [*before]
    writes = sum(type(part) is int for part in before)
    k = len(before) - writes
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
            parts.append((tuple(sets), note.global_clipnorm, note.clip_epsilon, note.site))
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
    if type(record) is Return:
        return tuple(parts) if record.count == k else None
    assert isinstance(record, Ask)
    if type(record.point) not in (ReducePoint, GatherPoint) or record.point.k != k:
        return None
    return (*parts, type(record.point).__name__)


def shapes_of(heard: Sequence[Record]) -> tuple[Shape, ...]:
    """The shapes of a step of which these messages were heard, by replica."""
    found: dict[int, Shape] = {}
    for record in heard:
        if isinstance(record, Ask | Return):
            found[record.replica] = shape_of(record, found.get(record.replica, ())) or ()
    return tuple([found[replica] for replica in sorted(found)])


def do_meet(shapes: Sequence[Shape]) -> bool:
    """Whether the replicas have brought the same merge points. Their call sites may differ."""
    points = [[part for part in shape if type(part) is not int] for shape in shapes]
    return len({tuple([part[:3] if type(part) is tuple else part for part in each]) for each in points}) == 1


def kind_of(number: int, shapes: Sequence[Shape]) -> Kind:
    """The kind of steps in which the replicas bring notes of these shapes, by replica."""
    questions = sum(type(part) is str for part in shapes[0])
    points = [part for part in shapes[0] if type(part) is tuple]
    applies = [part[0] for part in points if len(part) == 4]
    notes = [part for shape in shapes for part in shape if type(part) is int]
    return Kind(
        number,
        len(points) + questions,
        len(applies),
        questions,
        len(notes),
        tuple(variable_set for sets in applies for _, variable_set, _ in sets),
        (*(part[0] for part in points if len(part) == 2), *notes),
        len(points) + len(notes),
    )
