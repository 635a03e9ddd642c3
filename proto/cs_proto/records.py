"""What a message is made of: frozen records that check themselves, and how they become msgpack values.

A record is a frozen dataclass whose field annotations are its wire types. Building one checks every field, so a
half-valid record never exists: a wrong one is a :class:`LocalProtocolError` where it is built, and the codec turns
that into a :class:`PeerProtocolError` when the bytes came from outside. Bulk bytes are held in :class:`Frame`
fields; on the wire a frame is its own message part and the header holds its number.

The types a field may have: ``bool``, ``int``, ``float``, ``str``, ``bytes``, ``Literal[...]`` of strings,
:class:`Frame`, a record class, ``tuple[T, ...]``, ``tuple[A, B]``, and unions of these with ``None``.
"""

from __future__ import annotations

import operator
import reprlib
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, TypeVar, Union, dataclass_transform

from .errors import LocalProtocolError

__all__ = ["RECORDS", "Buffer", "Frame", "Frames", "Record", "from_wire", "record", "shown", "to_wire"]

Buffer = bytes | bytearray | memoryview

#: Wire code -> record class, filled by :func:`record`.
RECORDS: dict[int, type[Record]] = {}

# Record class -> what reads the values of all its fields at once.
_VALUES: dict[type[Record], Callable[[Record], tuple[object, ...]]] = {}
# Wire integers are what msgpack can carry.
_INT_MIN, _INT_MAX = -(1 << 63), (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Frame:
    """Bulk bytes that travel as a message part of their own. Equal when the bytes are."""

    data: Buffer

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return memoryview(self.data).nbytes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Frame) and bytes(self.data) == bytes(other.data)

    def __hash__(self) -> int:
        return hash(bytes(self.data))

    def __repr__(self) -> str:
        return f"<{self.nbytes} bytes>"


class Record:
    """Base of every record. Subclasses add :meth:`check` for rules that types cannot say."""

    __slots__ = ()

    code: ClassVar[int]
    wire_fields: ClassVar[tuple[tuple[str, _Type], ...]]

    def __post_init__(self) -> None:
        for name, kind in self.wire_fields:
            value = getattr(self, name)
            if type(value) not in kind.classes and not kind.holds(value):
                raise LocalProtocolError(f"{type(self).__name__}.{name} must be {kind.title}, not {shown(value)}")
        self.check()

    def check(self) -> None:
        """Raise :class:`LocalProtocolError` where the fields do not fit each other."""

    def refuse(self, reason: str) -> typing.NoReturn:
        """Raise the error of a failed :meth:`check`."""
        raise LocalProtocolError(f"{type(self).__name__}: {reason}")


R = TypeVar("R", bound=Record)


@dataclass_transform(frozen_default=True)
def record(code: int) -> Callable[[type[R]], type[R]]:
    """Class decorator: a frozen record with wire number ``code`` (1-255, unique, never reused)."""

    def build(cls: type[R]) -> type[R]:
        if not 1 <= code <= 255:
            raise LocalProtocolError(f"code {code} of {cls.__name__} is not between 1 and 255")
        if code in RECORDS:
            raise LocalProtocolError(f"code {code} is taken by {RECORDS[code].__name__}")
        made = dataclass(frozen=True)(cls)
        hints = typing.get_type_hints(made)
        names = [field.name for field in fields(made)]  # type: ignore[arg-type]
        made.code = code
        made.wire_fields = tuple((name, _type_of(hints[name])) for name in names)
        _VALUES[made] = _values_of(names)
        RECORDS[code] = made
        return made

    return build


def _values_of(names: list[str]) -> Callable[[Record], tuple[object, ...]]:
    getter = operator.attrgetter(*names)
    return getter if len(names) > 1 else lambda record: (getter(record),)


class Frames:
    """The frames of one message, taken in the order in which the header names them, each once."""

    __slots__ = ("_parts", "taken")

    def __init__(self, parts: Sequence[Buffer]) -> None:
        self._parts = parts
        self.taken = 0

    def take(self, wire: object) -> Frame:
        """The frame that ``wire`` names, which must be the next."""
        number = self.taken
        if type(wire) is not dict or wire != {"frame": number} or type(wire["frame"]) is not int:
            raise LocalProtocolError(f"frame number {number} must come next, not {shown(wire)}")
        if number >= len(self._parts):
            raise LocalProtocolError(f"frame {number} of a message with {len(self._parts)} frames")
        self.taken = number + 1
        return Frame(self._parts[number])


def to_wire(frames: list[Buffer]) -> Callable[[object], object]:
    """How msgpack is to write what it does not know (its ``default``): records as lists that begin with their code,
    frames as ``{"frame": number}``, their bytes appended to ``frames``. Everything else in a record it knows."""

    def write(value: object) -> object:
        if isinstance(value, Record):
            return (value.code, *_VALUES[type(value)](value))
        if isinstance(value, Frame):
            frames.append(value.data)
            return {"frame": len(frames) - 1}
        raise LocalProtocolError(f"{shown(value)} is neither a record nor in one")

    return write


def from_wire(wire: object, frames: Frames, allowed: tuple[type[Record], ...] = ()) -> Record:
    """The record that ``wire`` spells, one of ``allowed`` where given. Raises :class:`LocalProtocolError`."""
    if type(wire) is not list or not wire or type(wire[0]) is not int:
        raise LocalProtocolError(f"a record is a list that begins with its code, not {shown(wire)}")
    cls = RECORDS.get(wire[0])
    if cls is None:
        raise LocalProtocolError(f"there is no record with code {wire[0]}")
    if allowed and cls not in allowed:
        raise LocalProtocolError(f"a {cls.__name__} does not belong here")
    if len(wire) - 1 != len(cls.wire_fields):
        raise LocalProtocolError(f"{cls.__name__} has {len(cls.wire_fields)} fields, not {len(wire) - 1}")
    values = wire[1:]
    for index, (_, kind) in enumerate(cls.wire_fields):
        if kind.read is not None:
            values[index] = kind.read(values[index], frames)
    return cls(*values)


def shown(value: object) -> str:
    """A short ``repr`` for an error message, whatever the size and depth of ``value``."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # an int of thousands of digits, somewhere in it
        return f"<{type(value).__name__}>"


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother, _SHORT.maxtuple, _SHORT.maxlist = 3, 80, 80, 8, 8


@dataclass(frozen=True, slots=True)
class _Type:
    """One field type. A value is of it when its class is one of ``classes`` or when it ``holds``; ``read`` turns what
    msgpack read into such a value where that differs, and leaves what does not fit as it is."""

    title: str
    classes: frozenset[type]
    holds: Callable[[object], bool]
    read: Callable[[Any, Frames], object] | None = None


def _never(_value: object) -> bool:
    return False


def _is_int(value: object) -> bool:
    return type(value) is int and _INT_MIN <= value <= _INT_MAX


def _read_float(wire: object, _frames: Frames) -> object:
    return float(wire) if type(wire) is int else wire


def _read_frame(wire: object, frames: Frames) -> object:
    return frames.take(wire) if type(wire) is dict else wire


_SCALARS: dict[object, _Type] = {
    bool: _Type("bool", frozenset({bool}), _never),
    int: _Type("int", frozenset(), _is_int),
    float: _Type("float", frozenset({float}), _never, _read_float),
    str: _Type("str", frozenset({str}), _never),
    bytes: _Type("bytes", frozenset({bytes}), _never),
    type(None): _Type("None", frozenset({type(None)}), _never),
    Frame: _Type("Frame", frozenset({Frame}), _never, _read_frame),
}


def _type_of(hint: Any) -> _Type:
    if hint in _SCALARS:
        return _SCALARS[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal and all(type(a) is str for a in arguments):
        return _Type(f"one of {arguments}", frozenset(), lambda v: type(v) is str and v in arguments)
    if origin is tuple:
        return _tuple_type(arguments)
    if origin in (Union, types.UnionType):
        return _union_type(arguments)
    if isinstance(hint, type) and issubclass(hint, Record):
        return _Type(hint.__name__, frozenset({hint}), _never, _record_reader((hint,)))
    raise TypeError(f"a record field cannot be {hint!r}")


def _record_reader(allowed: tuple[type[Record], ...]) -> Callable[[Any, Frames], object]:
    return lambda wire, frames: wire if wire is None else from_wire(wire, frames, allowed)


def _tuple_type(arguments: tuple[Any, ...]) -> _Type:
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return _many_type(_type_of(arguments[0]))
    items = tuple(_type_of(argument) for argument in arguments)

    def holds(value: object) -> bool:
        return type(value) is tuple and len(value) == len(items) and all(map(_is_of, items, value))

    def read(wire: object, frames: Frames) -> object:
        if type(wire) is not list or len(wire) != len(items):
            return wire
        return tuple([w if i.read is None else i.read(w, frames) for i, w in zip(items, wire, strict=True)])

    return _Type(f"a tuple ({', '.join(item.title for item in items)})", frozenset(), holds, read)


def _many_type(item: _Type) -> _Type:
    classes, item_holds, item_read = item.classes, item.holds, item.read

    def holds(value: object) -> bool:
        return type(value) is tuple and all(type(member) in classes or item_holds(member) for member in value)

    def read(wire: object, frames: Frames) -> object:
        if type(wire) is not list:
            return wire
        return tuple(wire) if item_read is None else tuple([item_read(member, frames) for member in wire])

    return _Type(f"a tuple of {item.title}", frozenset(), holds, read)


def _union_type(arguments: tuple[Any, ...]) -> _Type:
    members = tuple(_type_of(argument) for argument in arguments)
    records = tuple(a for a in arguments if isinstance(a, type) and issubclass(a, Record))
    others = tuple(m for a, m in zip(arguments, members, strict=True) if a not in records and a is not type(None))

    def holds(value: object) -> bool:
        return any(_is_of(member, value) for member in others)

    def read(wire: object, frames: Frames) -> object:
        if records and type(wire) is list:
            return from_wire(wire, frames, records)
        for member in others:
            value = wire if member.read is None else member.read(wire, frames)
            if _is_of(member, value):
                return value
        return wire

    classes = frozenset().union(*(member.classes for member in members))
    return _Type(" or ".join(member.title for member in members), classes, holds, read)


def _is_of(kind: _Type, value: object) -> bool:
    return type(value) in kind.classes or kind.holds(value)
