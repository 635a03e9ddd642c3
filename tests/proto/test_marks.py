"""Marks: they stand for the Return that was said, wherever the rows of its gradients lie."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cs_proto import marks
from cs_proto.arrays import Array, Location, array_of
from cs_proto.errors import PeerProtocolError
from cs_proto.marks import Bases, Place
from cs_proto.messages import ApplyPoint, AssignPoint, Note, OptimizerUpdate, Return, SparseGradient, Value
from cs_proto.records import replace

DENSE = OptimizerUpdate(1, 1, ())
PLACES = [Place(3, 64, 128), Place(0, 256, 256), Place(1 << 40, 320, 384)]


def gradient(variable: int, place: Place, width: int = 4, arena: str = "arena/0") -> SparseGradient:
    values = Array("float32", (place.rows, width), Location(arena, place.values))
    return SparseGradient(variable, values, Array("int64", (place.rows,), Location(arena, place.indices)))


def noted(places: list[Place], **changes: Any) -> tuple[Note, ...]:
    """Two applies: of a dense optimizer and one with two tables, and of one with another table."""
    first, second, third = (gradient(number, place, **changes) for number, place in enumerate(places, 1))
    both = OptimizerUpdate(2, 2, (), (first, second))
    return (
        ApplyPoint(0, "train.py:1", (DENSE, both), 0),
        ApplyPoint(1, "train.py:2", (OptimizerUpdate(3, 3, (), (third,)),), 0),
    )


def returned(run: int, notes: tuple[Note, ...], value: bytes = b"", name: str = "") -> Return:
    return Return((run,), 0, 1, notes, len(notes), Value(value, ()), None, name=name)


@pytest.mark.parametrize("name", ["", "train"])
def test_a_mark_stands_for_the_return_with_its_places(name: str) -> None:
    bases, before = Bases(), [Place(9, 0, 512)] * 3
    assert bases.keep(returned(5, noted(before), name=name))
    base = bases.find(0, 0, noted(PLACES), 2, name)
    assert base is not None
    body = marks.marked(5, b"value", 21 if name else None, list(marks.places_of(noted(PLACES))))
    assert list(marks.places_of(noted(PLACES))) == PLACES
    expected = returned(7, noted(PLACES), b"value", name)
    assert bases.returned(7, body) == (replace(expected, offset=14) if name else expected)
    assert [*marks.places_of(bases.returned(7, body).notes)] == PLACES
    assert body[marks.value_at(base) :] == b"value"
    assert base == returned(5, noted(before), name=name)


def test_a_mark_that_ends_too_early_or_has_huge_numbers_is_still_a_return() -> None:
    bases = Bases()
    assert bases.keep(returned(5, noted(PLACES)))
    assert [*marks.places_of(bases.returned(7, marks.marked(5, b"\1")).notes)] == [
        Place(1, 0, 0),
        *[Place(0, 0, 0)] * 2,
    ]
    most = (1 << 62) - 1
    assert {*marks.places_of(bases.returned(7, marks.marked(5, b"\xff" * 72)).notes)} == {Place(most, most, most)}


def test_a_mark_without_its_base_is_refused() -> None:
    with pytest.raises(PeerProtocolError, match="the mark of run 7 names a base that is none of the last Returns"):
        Bases().returned(7, marks.marked(5, b""))


def with_second(update: OptimizerUpdate) -> tuple[Note, ...]:
    return noted(PLACES)[0], ApplyPoint(1, "train.py:2", (update,), 0)


OTHERS: dict[str, tuple[Note, ...]] = {
    "wider rows": noted(PLACES, width=5),
    "another segment": noted(PLACES, arena="arena/1"),
    "fewer notes": noted(PLACES)[:1],
    "another site": (replace(noted(PLACES)[0], site="train.py:3"), noted(PLACES)[1]),
    "another weight": (replace(noted(PLACES)[0], weight=0.5), noted(PLACES)[1]),
    "another set": with_second(OptimizerUpdate(3, 4, (), (gradient(3, PLACES[2]),))),
    "another table": with_second(OptimizerUpdate(3, 3, (), (gradient(4, PLACES[2]),))),
    "without rows": with_second(OptimizerUpdate(3, 3, ())),
    "an assign": (noted(PLACES)[0], AssignPoint(1, "train.py:2", 3, "assign", array_of(np.ones(1)), False)),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_notes_that_differ_in_more_than_places_are_not_alike(other: tuple[Note, ...]) -> None:
    assert marks.are_alike(noted(PLACES), noted([Place(1, 0, 0)] * 3))
    assert not marks.are_alike(noted(PLACES), other)
    assert not marks.are_alike(other, noted(PLACES))


def test_rows_in_a_message_are_of_no_base() -> None:
    inline = SparseGradient(1, array_of(np.ones((1, 2))), array_of(np.zeros(1, np.int64)))
    notes = (ApplyPoint(0, "", (OptimizerUpdate(1, 1, (), (inline,)),), 0),)
    assert not marks.is_base(returned(5, notes))
    elsewhere = (ApplyPoint(0, "", (OptimizerUpdate(1, 1, (), (gradient(1, PLACES[0], 2),)),), 0),)
    assert marks.is_base(returned(5, elsewhere))
    assert not marks.are_alike(elsewhere, notes)
