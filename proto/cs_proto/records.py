"""The framework of messages: frozen records that check themselves, and their form as msgpack values.

A record's field annotations are its wire types, and it cannot be changed. Building one checks every field, so a
half-valid record never exists. An invalid one raises :class:`LocalProtocolError`, which the codec turns into a
:class:`PeerProtocolError` if the bytes came from a peer. :class:`Frame` fields hold bulk bytes; on the wire a frame is
a message part of its own, and the header holds its number.

Every message is built, written and read, so these methods are compiled for each class: straight-line code over the
fields, with the checks of plain types inline. They are compiled when the first record of a class is built or read,
because no process uses all of the hundred classes, and compiling one takes as long as a thousand messages.

The types a field may have: ``bool``, ``str``, ``bytes``, ``Annotated[int, Range(...)]`` and the same of ``float``,
``Literal[...]`` of strings, :class:`Frame`, a record class, ``tuple[T, ...]``, ``tuple[A, B]``, and unions of these
with ``None``. A number without a range is a type only of records that are not checked.
"""

from __future__ import annotations

import reprlib
import sys
import types
import typing
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar, Union, dataclass_transform

from .errors import LocalProtocolError
from .frozen import fields_of, frozen, hash_of, name_fields, refuse_change, refuse_deletion

__all__ = [
    "RECORDS",
    "Buffer",
    "Count",
    "Finite",
    "Frame",
    "Frames",
    "NotNegative",
    "Range",
    "Record",
    "Seconds",
    "altered",
    "from_wire",
    "record",
    "replace",
    "show_bytes",
    "shown",
]

Buffer = bytes | bytearray | memoryview

#: Wire code -> record class, filled by :func:`record`.
RECORDS: dict[int, type[Record]] = {}


@frozen
class Range:
    """The values that a number in a record may have: from ``least`` to ``most``, both included. NaN is in no range."""

    least: float
    most: float

    def __str__(self) -> str:
        is_finite = self.most == -self.least == sys.float_info.max
        return "that is finite" if is_finite else f"from {self.least!r} to {self.most!r}"


#: A count, or an index.
Count: TypeAlias = Annotated[int, Range(0, (1 << 62) - 1)]
#: Any number but NaN and infinities.
Finite: TypeAlias = Annotated[float, Range(-sys.float_info.max, sys.float_info.max)]
#: Any number from 0 on but NaN and infinity.
NotNegative: TypeAlias = Annotated[float, Range(0.0, sys.float_info.max)]
#: A time, or how long something lasts, in seconds.
Seconds: TypeAlias = Annotated[float, Range(0.0, 1e12)]

# The integers that msgpack can carry.
_WIRE_INT = Range(-(1 << 63), (1 << 64) - 1)


class Frame:
    """Bulk bytes that travel as a message part of their own. Frames are equal if their bytes are."""

    __slots__ = ("data",)
    data: Buffer

    def __init__(self, data: Buffer) -> None:
        object.__setattr__(self, "data", data)

    __setattr__ = refuse_change
    __delattr__ = refuse_deletion

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return len(self.data) if type(self.data) is bytes else memoryview(self.data).nbytes

    def to_wire(self, frames: list[Buffer]) -> object:
        """As :meth:`Record.to_wire`."""
        frames.append(self.data)
        return {"frame": len(frames) - 1}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Frame) and bytes(self.data) == bytes(other.data)

    def __hash__(self) -> int:
        return hash(bytes(self.data))

    def __repr__(self) -> str:
        return f"<{self.nbytes} bytes>"


# Whether the ``repr`` of a record shows its bytes.
_bytes_are_shown = False


def show_bytes(wanted: bool) -> None:
    """Say whether the ``repr`` of a record shows its bytes, which hold arguments and results. It does not until then,
    so that log files hold none of them."""
    global _bytes_are_shown
    _bytes_are_shown = wanted


class Record:
    """Base of every record. Subclasses add :meth:`check` for rules that types cannot express."""

    __slots__ = ()

    code: ClassVar[int]
    #: Whether building a record checks it.
    is_checked: ClassVar[bool] = True
    #: The same as :meth:`to_wire` without building the record: takes ``frames`` and the value of every field. The
    #: values must have been checked before.
    wire_of: ClassVar[Callable[..., object]]
    _from_wire: ClassVar[Callable[[list[Any], Frames], Record]]

    def to_wire(self, frames: list[Buffer]) -> object:
        """The value for msgpack: a list that begins with the code. Records inside it have the same form. A frame
        becomes ``{"frame": number}``, and its bytes are appended to ``frames``."""
        raise NotImplementedError

    __setattr__ = refuse_change
    __delattr__ = refuse_deletion

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.__dict__ == other.__dict__

    __hash__ = hash_of

    def __repr__(self) -> str:
        return f"{type(self).__qualname__}({', '.join(f'{name}={_shown(each)}' for name, each in vars(self).items())})"

    def check(self) -> None:
        """Raise :class:`LocalProtocolError` if the fields do not fit each other."""

    def refuse(self, reason: str) -> typing.NoReturn:
        """Raise the error of a failed :meth:`check`."""
        raise LocalProtocolError(f"{type(self).__name__}: {reason}")


def _shown(value: object) -> str:
    """The ``repr`` of a field."""
    if type(value) is bytes and not _bytes_are_shown:
        return f"<{len(value)} bytes>"
    if type(value) is tuple:
        return f"({', '.join(map(_shown, value))}{',' * (len(value) == 1)})"
    return repr(value)


R = TypeVar("R", bound=Record)


@dataclass_transform(frozen_default=True)
def record(code: int) -> Callable[[type[R]], type[R]]:
    """Class decorator: a frozen record with wire number ``code`` (1-255, unique, never reused)."""

    def build(cls: type[R]) -> type[R]:
        if not 1 <= code <= 255:
            raise LocalProtocolError(f"code {code} of {cls.__name__} is not between 1 and 255")
        if code in RECORDS:
            raise LocalProtocolError(f"code {code} already belongs to {RECORDS[code].__name__}")
        name_fields(cls)
        cls.code = code
        _compile_at_first_use(cls)
        RECORDS[code] = cls
        return cls

    return build


def _compile_at_first_use(cls: type[Record]) -> None:
    def build(self: Record, *values: Any, **named: Any) -> None:
        _compile(cls)
        cls.__init__(self, *values, **named)

    def read(wire: list[Any], frames: Frames) -> Record:
        _compile(cls)
        return cls._from_wire(wire, frames)

    def write(frames: list[Buffer], *values: Any) -> object:
        _compile_values(cls)
        return cls.wire_of(frames, *values)

    cls.__init__ = build  # type: ignore[assignment]
    cls.wire_of = staticmethod(write)
    cls._from_wire = read


def replace(record: R, /, **changes: Any) -> R:
    """A copy with other values of some fields; as :func:`dataclasses.replace`, and checked as any other."""
    kind = type(record)
    values = record.__dict__ | changes
    if len(values) > len(record.__dict__):
        raise TypeError(f"a {kind.__name__} has no field {', '.join(changes.keys() - record.__dict__.keys())}")
    if kind.is_checked:
        return kind(**values)
    made = object.__new__(kind)
    made.__dict__.update(values)
    return made


def altered(record: R, /, **changes: Any) -> R:
    """As :func:`replace`, but without checks: the new values must be valid."""
    made = object.__new__(type(record))
    made.__dict__.update(record.__dict__, **changes)
    return made


def _compile(cls: type[Record]) -> None:
    """Give a class its ``__init__``, its ``to_wire`` and its reader, each as straight-line code over the fields.
    Raises TypeError if a field has a type that cannot be sent."""
    hints = typing.get_type_hints(cls, include_extras=True)
    known: dict[str, Any] = {"_cls": cls, "_wrong": _wrong, "_wrong_length": _wrong_length, "_nothing": ()}
    parameters, checks, stores, written, read = [], [], [], [str(cls.code)], []
    for number, name in enumerate(fields_of(cls)):
        kind = _type_of(hints[name])  # no name begins with _
        if cls.is_checked and _is_unbounded(hints[name]):
            raise TypeError(f"{cls.__name__}.{name}: a number declares its range, as in Annotated[int, Range(0, 3)]")
        known |= {f"t_{name}": kind, f"c_{name}": kind.classes, f"h_{name}": kind.holds}
        known |= {f"w_{name}": kind.write, f"r_{name}": kind.read, f"p_{name}": kind.plain}
        has_default = hasattr(cls, name)
        if has_default:
            known[f"d_{name}"] = getattr(cls, name)
        parameters.append(f"{name}=d_{name}" if has_default else name)
        checks.append(f" if not ({kind.test(name)}): _wrong(_cls, {name!r}, t_{name}, {name})")
        stores.append(f" _values[{name!r}] = {name}")
        written.append(kind.written(f"self.{name}", f"w_{name}", f"p_{name}"))
        read.append(kind.reading(f"wire[{number + 1}]", f"r_{name}", f"p_{name}"))
    last = [" self.check()"] if cls.is_checked and cls.check is not Record.check else []
    lines = [f"def __init__(self, {', '.join(parameters)}):", *(checks if cls.is_checked else ())]
    lines += [" _values = self.__dict__", *stores, *last]  # not self.x, which a frozen class refuses
    lines += ["def to_wire(self, frames):", f" return ({', '.join(written)},)"]
    lines += [
        "def from_wire(wire, frames):",
        f" if len(wire) != {len(read) + 1}: _wrong_length(_cls, {len(read)}, wire)",
    ]
    lines += [f" return _cls({', '.join(read)})"]
    # Compiled first: exec of a text loses a Ctrl-C that ends the program, which may be sending its last message.
    exec(compile("\n".join(lines), f"<{cls.__qualname__}>", "exec"), known)
    cls._from_wire = known["from_wire"]
    for name in (
        "to_wire",
        "__init__",
    ):  # in this order: another thread may build a record after the second
        known[name].__qualname__ = f"{cls.__qualname__}.{name}"
        setattr(cls, name, known[name])


def _compile_values(cls: type[Record]) -> None:
    """Give a class its ``wire_of``."""
    hints = typing.get_type_hints(cls, include_extras=True)
    kinds = {name: _type_of(hints[name]) for name in fields_of(cls)}
    known: dict[str, Any] = {f"_w_{name}": kind.write for name, kind in kinds.items()}
    known |= {f"_p_{name}": kind.plain for name, kind in kinds.items()}
    parameters = [f"_{name}" for name in kinds]
    written = [str(cls.code), *(kind.written(f"_{name}", f"_w_{name}", f"_p_{name}") for name, kind in kinds.items())]
    lines = [f"def wire_of({', '.join(['frames', *parameters])}):", f" return ({', '.join(written)},)"]
    exec(compile("\n".join(lines), f"<{cls.__qualname__}>", "exec"), known)
    cls.wire_of = staticmethod(known["wire_of"])


def _wrong(cls: type[Record], name: str, kind: _Type, value: object) -> typing.NoReturn:
    raise LocalProtocolError(f"{cls.__name__}.{name} must be {kind.title}, not {shown(value)}")


def _wrong_length(cls: type[Record], count: int, wire: list[Any]) -> typing.NoReturn:
    raise LocalProtocolError(f"{cls.__name__} has {count} fields, not {len(wire) - 1}")


class Frames:
    """The frames of one message, taken in the order in which the header names them, each once."""

    __slots__ = ("_parts", "taken")

    def __init__(self, parts: Sequence[Buffer]) -> None:
        self._parts = parts
        self.taken = 0

    def take(self, wire: object) -> Frame:
        """The frame that ``wire`` names, which must be the next one."""
        number = self.taken
        if type(wire) is not dict or wire != {"frame": number} or type(wire["frame"]) is not int:
            raise LocalProtocolError(f"frame number {number} must come next, not {shown(wire)}")
        if number >= len(self._parts):
            raise LocalProtocolError(f"frame {number} of a message with {len(self._parts)} frames")
        self.taken = number + 1
        return Frame(self._parts[number])


def from_wire(wire: object, frames: Frames, allowed: tuple[type[Record], ...] = ()) -> Record:
    """The record that ``wire`` encodes, one of ``allowed`` if given. Raises :class:`LocalProtocolError`."""
    if type(wire) is not list or not wire or type(wire[0]) is not int:
        raise LocalProtocolError(f"a record is a list that begins with its code, not {shown(wire)}")
    cls = RECORDS.get(wire[0])
    if cls is None:
        raise LocalProtocolError(f"there is no record with code {wire[0]}")
    if allowed and cls not in allowed:
        raise LocalProtocolError(f"a {cls.__name__} does not belong here")
    return cls._from_wire(wire, frames)


def shown(value: object) -> str:
    """A short ``repr`` for an error message, whatever the size and depth of ``value``."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # it contains an int of thousands of digits
        return f"<{type(value).__name__}>"


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother, _SHORT.maxtuple, _SHORT.maxlist = 3, 80, 80, 8, 8


@frozen(eq=False)
class _Type:
    """One field type.

    A value has this type if its class is one of ``classes`` or if ``holds(value)`` is true. ``read`` converts a value
    that msgpack has read, where the two differ, and returns a value of the wrong type unchanged. ``write`` converts
    a value into one that msgpack can write, where the two differ. ``number`` and ``range`` are the class and the range
    of a number; with ``is_many`` they are those of the members of the tuple. Values of the classes in ``plain`` are
    written and read as they are, although others are not. ``record`` is the only class of the values, if that is one.
    """

    title: str
    classes: frozenset[type]
    holds: Callable[[object], bool]
    read: Callable[[Any, Frames], object] | None = None
    write: Callable[[Any, list[Buffer]], object] | None = None
    is_many: bool = False
    #: With ``is_many``: as ``write``, for a member.
    write_one: Callable[[Any, list[Buffer]], object] | None = None
    number: Any = None
    range: Range | None = None
    plain: frozenset[type] = frozenset()
    record: type[Record] | None = None

    def test(self, name: str) -> str:
        """An expression that tells whether the field ``name`` has this type."""
        if self.is_many:
            holds = f"{name} is _nothing or h_{name}({name})"
            if self.number is None:
                return holds
            one = self._is_in_range(f"{name}[0]")  # the usual case of runs and shapes
            return f"type({name}) is tuple and len({name}) == 1 and {one} or {holds}"
        if self.number is not None:
            return self._is_in_range(name)
        if self.holds is not _never:
            return f"type({name}) in c_{name} or h_{name}({name})"
        [only] = self.classes if len(self.classes) == 1 else [None]
        return f"type({name}) is {only.__name__}" if only in (bool, float, str, bytes) else f"type({name}) in c_{name}"

    def _is_in_range(self, value: str) -> str:
        assert self.number is not None
        assert self.range is not None
        return f"type({value}) is {self.number.__name__} and {self.range.least!r} <= {value} <= {self.range.most!r}"

    def reading(self, wire: str, read: str, plain: str) -> str:
        """An expression for the value read from ``wire``; ``read`` is the name of the reading function, ``plain`` that
        of the plain classes."""
        if self.read is None:
            return wire
        if self.is_many and self.number is int:
            return f"(tuple({wire}) if type({wire}) is list else {wire})"
        if self.is_many:
            return f"(_nothing if {wire} == [] else {read}({wire}, frames))"
        others = f"{read}({wire}, frames)"
        return f"({wire} if type({wire}) in {plain} else {others})" if self.plain else others

    def written(self, value: str, write: str, plain: str) -> str:
        """An expression for the value to write for ``value``; ``write`` is the name of the writing function, ``plain``
        that of the plain classes."""
        if self.write is None:
            return value
        if self.write is _write_part:  # the usual ones are written in line
            return f"(None if {value} is None else {value}.to_wire(frames))"
        if self.write_one is _write_part:
            return f"([None if one is None else one.to_wire(frames) for one in {value}] if {value} else ())"
        if self.is_many:
            return f"({write}({value}, frames) if {value} else ())"
        others = f"{write}({value}, frames)"
        return f"({value} if type({value}) in {plain} else {others})" if self.plain else others


def _never(_value: object) -> bool:
    return False


def _number_type(number: Any, allowed: Range, title: str) -> _Type:
    least, most = allowed.least, allowed.most

    def holds(value: Any) -> bool:
        return type(value) is number and least <= value <= most

    return _Type(title, frozenset(), holds, _read_float if number is float else None, number=number, range=allowed)


def _is_unbounded(hint: Any) -> bool:
    """Whether the type ``hint`` is, or contains, a number without a range."""
    if typing.get_origin(hint) is Annotated:
        return False
    return hint in (int, float) or any(map(_is_unbounded, typing.get_args(hint)))


def _read_float(wire: object, _frames: Frames) -> object:
    return float(wire) if type(wire) is int else wire


def _read_frame(wire: object, frames: Frames) -> object:
    return frames.take(wire) if type(wire) is dict else wire


def _write_part(value: Any, frames: list[Buffer]) -> object:
    """The wire value of a record, a frame, or None."""
    return None if value is None else value.to_wire(frames)


_SCALARS: dict[object, _Type] = {
    bool: _Type("bool", frozenset({bool}), _never),
    int: _number_type(int, _WIRE_INT, "int"),
    float: _Type("float", frozenset({float}), _never, _read_float),
    str: _Type("str", frozenset({str}), _never),
    bytes: _Type("bytes", frozenset({bytes}), _never),
    type(None): _Type("None", frozenset({type(None)}), _never),
    Frame: _Type("Frame", frozenset({Frame}), _never, _read_frame, _write_part),
}


def _type_of(hint: Any) -> _Type:
    if hint in _SCALARS:
        return _SCALARS[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated and arguments[0] in (int, float) and isinstance(arguments[1], Range):
        return _number_type(arguments[0], arguments[1], f"{arguments[0].__name__} {arguments[1]}")
    if origin is Literal and all(type(a) is str for a in arguments):
        return _Type(f"one of {arguments}", frozenset(), lambda v: type(v) is str and v in arguments)
    if origin is tuple:
        return _tuple_type(arguments)
    if origin in (Union, types.UnionType):
        return _union_type(arguments)
    if isinstance(hint, type) and issubclass(hint, Record):
        return _Type(hint.__name__, frozenset({hint}), _never, _record_reader((hint,)), _write_part, record=hint)
    raise TypeError(f"a record field cannot be {hint!r}")


def _record_reader(allowed: tuple[type[Record], ...]) -> Callable[[Any, Frames], object]:
    [only] = allowed
    code = only.code

    def read(wire: Any, frames: Frames) -> object:
        if type(wire) is list and wire and wire[0] == code and type(wire[0]) is int:
            return only._from_wire(wire, frames)  # noqa: SLF001  (as from_wire does)
        return wire if wire is None else from_wire(wire, frames, allowed)

    return read


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

    def write(value: tuple[Any, ...], frames: list[Buffer]) -> object:
        return [v if i.write is None else i.write(v, frames) for i, v in zip(items, value, strict=True)]

    writes = any(item.write is not None for item in items)
    title = f"a tuple ({', '.join(item.title for item in items)})"
    return _Type(title, frozenset(), holds, read, write if writes else None)


def _many_type(item: _Type) -> _Type:
    classes, item_holds, item_read, item_write, only = item.classes, item.holds, item.read, item.write, item.record

    def holds(value: object) -> bool:
        if type(value) is not tuple:
            return False
        for member in value:  # noqa: SIM110  (a generator costs more than the few members)
            if type(member) not in classes and not item_holds(member):
                return False
        return True

    def read(wire: object, frames: Frames) -> object:
        if type(wire) is not list:
            return wire
        return tuple(wire) if item_read is None else tuple([item_read(member, frames) for member in wire])

    def read_records(wire: object, frames: Frames) -> object:
        if type(wire) is not list:
            return wire
        assert only is not None
        assert item_read is not None
        members = []
        for member in wire:  # those that are right as _record_reader reads them
            is_right = type(member) is list and member and member[0] == only.code and type(member[0]) is int
            members.append(only._from_wire(member, frames) if is_right else item_read(member, frames))  # noqa: SLF001
        return tuple(members)

    def write(value: tuple[Any, ...], frames: list[Buffer]) -> object:
        assert item_write is not None
        return [item_write(member, frames) for member in value]

    def holds_numbers(value: Any) -> bool:
        if type(value) is not tuple:
            return False
        for member in value:  # noqa: SIM110  (as above)
            if type(member) is not number or not least <= member <= most:
                return False
        return True

    number, allowed = (None, None) if item.is_many else (item.number, item.range)
    if allowed is not None:
        holds, least, most = holds_numbers, allowed.least, allowed.most
    title, writes = f"a tuple of {item.title}", item_write is not None
    reader = read if only is None else read_records
    return _Type(title, frozenset(), holds, reader, write if writes else None, True, item_write, number, allowed)


def _union_type(arguments: tuple[Any, ...]) -> _Type:
    members = tuple(_type_of(argument) for argument in arguments)
    records = tuple(a for a in arguments if isinstance(a, type) and issubclass(a, Record))
    others = tuple(m for a, m in zip(arguments, members, strict=True) if a not in records and a is not type(None))
    plain = frozenset().union(*(m.classes for m in members if m.read is None and m.write is None))

    def union_holds(value: object) -> bool:
        return any(_is_of(member, value) for member in others)

    def read(wire: object, frames: Frames) -> object:
        if records and type(wire) is list:
            return from_wire(wire, frames, records)
        if type(wire) in plain:
            return wire
        for member in others:
            value = wire if member.read is None else member.read(wire, frames)
            if _is_of(member, value):
                return value
        return wire

    def write(value: Any, frames: list[Buffer]) -> object:
        if type(value) in plain:
            return value
        if isinstance(value, Record | Frame):
            return value.to_wire(frames)
        writer = next((m.write for m in others if m.write is not None and _is_of(m, value)), None)
        return value if writer is None else writer(value, frames)

    classes: frozenset[type] = frozenset().union(*(member.classes for member in members))
    holds = union_holds if any(member.holds is not _never for member in others) else _never
    writes = any(member.write is not None for member in members)
    if writes and not others:
        write = _write_part
    title = " or ".join(member.title for member in members)
    return _Type(title, classes, holds, read, write if writes else None, plain=plain)


def _is_of(kind: _Type, value: object) -> bool:
    return type(value) in kind.classes or kind.holds(value)
