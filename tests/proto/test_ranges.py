"""Every number in a record declares what it may be, and what is not in that range is refused where bytes come in."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any

import msgpack
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.harness.record_strategies import records

from cs_proto.codec import decode, encode
from cs_proto.errors import LocalProtocolError, PeerProtocolError
from cs_proto.messages import Cancel, Register, Resent, Run, Statistics, Worker
from cs_proto.records import RECORDS, Count, Frames, Range, Record, from_wire, record

KINDS = [kind for _, kind in sorted(RECORDS.items()) if kind.__module__.startswith("cs_proto.")]
# What msgpack can carry, and what is no number that anybody means.
WILD = [-(1 << 63), -2, -1, 0, 1 << 31, (1 << 62), (1 << 63) - 1, (1 << 64) - 1]
WILD_FLOATS = [-math.inf, math.inf, math.nan, -1.0, 1e300]

Step = int | None  # into a tuple at its number, or at any of its places


def numbers(hint: Any, path: tuple[Step, ...] = ()) -> Iterator[tuple[tuple[Step, ...], type, Range | None]]:
    """The numbers in a field of this type: where they are in it, of what class, and what they may be."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in (int, float):
        yield path, hint, None
    elif origin is Annotated:
        yield path, arguments[0], arguments[1]
    elif origin is tuple and arguments[1:] == (Ellipsis,):
        yield from numbers(arguments[0], (*path, None))
    elif origin is tuple:
        for place, argument in enumerate(arguments):
            yield from numbers(argument, (*path, place))
    else:
        for argument in arguments:
            yield from numbers(argument, path)


def fields(kind: type[Record]) -> list[tuple[str, tuple[Step, ...], type, Range | None]]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return [(name, *each) for name in (f.name for f in dataclasses.fields(kind)) for each in numbers(hints[name])]  # type: ignore[arg-type]


NUMBERS = [(kind, *each) for kind in KINDS for each in fields(kind)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_number_declares_its_range(kind: type[Record]) -> None:
    for name, _, number, allowed in fields(kind):
        assert isinstance(allowed, Range), f"{kind.__name__}.{name} has no range"
        assert type(allowed.least) is type(allowed.most) is number, f"{kind.__name__}.{name}"
        assert allowed.least < allowed.most
        assert all(map(math.isfinite, (allowed.least, allowed.most)))


def test_there_are_as_many_as_one_would_think() -> None:
    assert len(NUMBERS) > 100
    assert {number for _, _, _, number, _ in NUMBERS} == {int, float}


@cache
def example(kind: type[Record]) -> Record:
    """Some valid record of that kind."""
    found: list[Record] = []

    @settings(max_examples=1, phases=[Phase.generate], database=None, deadline=None)
    @given(records(kind))
    def draw(drawn: Record) -> None:
        found.append(drawn)

    draw()
    return found[-1]


def put(value: Any, path: tuple[Step, ...], wild: object) -> Any:
    """``value`` as on the wire, with ``wild`` at that place of it."""
    if not path:
        return wild
    if path[0] is None:
        return [put(None, path[1:], wild)]
    there = list(value) if isinstance(value, list) else ["x"] * (path[0] + 1)
    there += [0] * (max(2, path[0] + 1) - len(there))
    there[path[0]] = put(there[path[0]], path[1:], wild)
    return there


@pytest.mark.parametrize(
    ("kind", "name", "path", "number", "allowed"), NUMBERS, ids=lambda value: getattr(value, "__name__", str(value))
)
def test_what_is_out_of_range_is_refused(
    kind: type[Record], name: str, path: tuple[Step, ...], number: type, allowed: Range
) -> None:
    header, *frames = [bytes(part) for part in encode(example(kind))]
    wire = msgpack.unpackb(header)
    place = 1 + [field.name for field in dataclasses.fields(kind)].index(name)  # type: ignore[arg-type]
    wild = [each for each in (WILD if number is int else WILD_FLOATS) if not allowed.least <= each <= allowed.most]
    assert len(wild) >= 2
    for each in wild:
        told = [*wire[:place], put(wire[place], path, each), *wire[place + 1 :]]
        with pytest.raises(PeerProtocolError, match=rf"{kind.__name__}\.{name} must be|frame|header names"):
            decode([msgpack.packb(told), *frames])


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: Resent((1,), -5), r"Resent.replica must be int from 0 to 1023, not -5"),
        (lambda: Resent((1,), 1024), r"Resent.replica must be int from 0 to 1023, not 1024"),
        (lambda: Worker(0, 1 << 62, 1, "cpu:0"), r"Worker.incarnation must be int from 1 to 2147483647, not"),
        (lambda: Cancel((1,), 1 << 40), r"Cancel.later must be int from 0 to 64"),
        (lambda: Cancel((-1,)), r"Cancel.run must be a tuple of int from 0 to"),
        (lambda: Cancel((1, 2, -1)), r"Cancel.run must be a tuple of int from 0 to"),
    ],
)
def test_the_error_says_what_may_be_and_what_was(build: Any, said: str) -> None:
    with pytest.raises(LocalProtocolError, match=said):
        build()


@pytest.mark.parametrize("hint", ["int", "float", "tuple[int, ...]", "int | None", "tuple[str, float]"])
def test_a_record_whose_number_has_no_range_cannot_be_built_or_read(hint: str) -> None:
    late = type("Late", (Record,), {"__annotations__": {"number": hint}, "__module__": __name__})
    try:
        kind = record(255)(late)
        with pytest.raises(TypeError, match=r"Late\.number: a number declares its range"):
            kind(1)  # type: ignore[call-arg]
        with pytest.raises(TypeError, match=r"Late\.number: a number declares its range"):
            from_wire([255, 1], Frames([]))
    finally:
        del RECORDS[255]


@given(st.integers(-(1 << 63), (1 << 64) - 1))
def test_a_number_is_taken_exactly_where_it_is_in_range(number: int) -> None:
    allowed = typing.get_args(Count)[1]
    if allowed.least <= number <= allowed.most:
        assert Statistics(number).request == number
    else:
        with pytest.raises(LocalProtocolError, match=r"Statistics\.request must be int from 0"):
            Statistics(number)


def test_nested_records_are_checked_too() -> None:
    header, *frames = encode(Register(1, Worker(0, 1, 1, "cpu:0")))
    wire = msgpack.unpackb(header)
    wire[2][2] = 1 << 62
    with pytest.raises(PeerProtocolError, match=r"Worker\.incarnation must be int from 1 to 2147483647"):
        decode([msgpack.packb(wire), *frames])
    assert Run((1,), 1, 0, 0, bytes(16), None, False, b"", ()).part == (0, 1)
