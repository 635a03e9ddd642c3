"""Frozen classes are dataclasses to everybody who looks, and cost nothing before."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import subprocess
import sys
from typing import ClassVar

import pytest

from cs_proto.frozen import fields_of, frozen, with_changes


@frozen
class Point:
    """Two numbers."""

    kind: ClassVar[str] = "point"
    x: int
    y: int = 0


@frozen
class Named(Point):
    """One with a name."""

    name: str = ""

    def __repr__(self) -> str:
        return self.name


@frozen(eq=False)
class Positive:
    """One number, which is checked."""

    x: int

    def __post_init__(self) -> None:
        if self.x <= 0:
            raise ValueError(self.x)


@dataclasses.dataclass(frozen=True)
class Plain:
    """The same as Point."""

    x: int
    y: int = 0


def test_objects_are_built_shown_compared_and_hashed_as_those_of_dataclasses() -> None:
    for values, named in (((1,), {}), ((1, 2), {}), ((), {"y": 2, "x": 1})):
        made, plain = Point(*values, **named), Plain(*values, **named)
        assert (made.x, made.y, hash(made)) == (plain.x, plain.y, hash(plain))
        assert repr(made) == repr(plain).replace("Plain", "Point")
    assert Point(1) == Point(1, 0) != Point(2)
    assert Point(1) != Plain(1)
    assert len({Point(1), Point(1), Point(2)}) == 2
    for wrong in ((), (1, 2, 3)):
        with pytest.raises(TypeError) as error:
            Plain(*wrong)
        with pytest.raises(TypeError, match=r"^Point\.__init__\(\)") as ours:
            Point(*wrong)
        assert str(ours.value) == str(error.value).replace("Plain", "Point")


def test_nothing_can_be_changed() -> None:
    point = Point(1)
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'x'"):
        point.x = 2  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot delete field 'x'"):
        del point.x
    assert point == Point(1)


def test_what_a_class_has_itself_is_kept() -> None:
    assert fields_of(Named) == ("x", "y", "name")
    assert repr(Named(1, name="here")) == "here"
    assert Named(1, 2, "a") == Named(1, 2, "a") != Named(1, 2, "b")
    with pytest.raises(ValueError, match="-1"):
        Positive(-1)
    assert Positive(1) != Positive(1)


def test_copies_and_what_asks_for_fields() -> None:
    point = Point(1, 2)
    assert with_changes(point, y=3) == dataclasses.replace(point, y=3) == Point(1, 3)
    assert pickle.loads(pickle.dumps(point)) == copy.deepcopy(point) == point
    assert dataclasses.is_dataclass(Named)
    assert [field.name for field in dataclasses.fields(Named)] == ["x", "y", "name"]  # type: ignore[arg-type]
    assert dataclasses.asdict(Named(1)) == {"x": 1, "y": 0, "name": ""}  # type: ignore[call-overload]
    match point:
        case Point(x, y):
            assert (x, y) == (1, 2)


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="traceback imports dataclasses from Python 3.14 on")
def test_a_supervisor_does_without_dataclasses() -> None:
    code = "import sys, central_storage.launch.background; sys.exit('dataclasses' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
