"""The body of a ``Value`` record: a nest of the closed vocabulary as msgpack, written and read.

None, bool, int of 64 bits, float, str and bytes are written as they are; anything else is a list that begins with its
:class:`Tag`. Arrays of up to a kilobyte lie in the body, larger ones are indices into ``Value.arrays``; a body that is
too large for a message header is an array itself. A body that is read comes from a peer: it is checked item by item,
and nothing is unpickled, imported or called. Only ``central_storage.wire_values.value_codec`` uses this module.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgpack
import numpy as np

from central_storage.core.composites import Composite, rebuild
from central_storage.core.handles import Handle, handle_id
from central_storage.core.tensors.live_number import LiveNumber
from central_storage.core.tensors.tensor import Tensor, as_tensor
from central_storage.core.values import (
    IndexedSlices,
    Mirrored,
    PerReplica,
    ReduceOp,
    Shared,
    VariableAggregation,
    VariableSynchronization,
    unshared,
)
from central_storage.pickling.reconstruct import class_named
from cs_proto.arrays import DTYPES, Array, dtype_name, is_wire_dtype, item_nbytes, view_of
from cs_proto.errors import InvalidArgumentError, LocalProtocolError, PeerProtocolError, ResultError
from cs_proto.messages import Value
from cs_proto.records import Frame, shown

__all__ = ["Place", "Resolve", "Tag", "View", "from_value", "origin_of", "to_value"]

Place = Callable[[np.ndarray], Array]
View = Callable[[Array], np.ndarray]
Resolve = Callable[[str, int], object]


class Tag(enum.IntEnum):
    """The kind of a list in a body. The comments name the items after the tag."""

    LIST = 1  # items
    TUPLE = 2  # items
    DICT = 3  # key, value, key, value, ...
    ORDERED_DICT = 4  # as DICT
    DEFAULT_DICT = 5  # as DICT
    NAMED_TUPLE = 6  # module:qualname, [field names], items
    ARRAY = 7  # number in Value.arrays
    SMALL_ARRAY = 8  # dtype, [shape], bytes in C order
    INT = 9  # hexadecimal text
    COMPLEX = 10  # real, imaginary
    ENUM = 11  # class, member
    DTYPE = 12  # name
    SLICES = 13  # values, indices, dense shape as a tuple or nil
    PER_REPLICA = 14  # components
    MIRRORED = 15  # components
    HANDLE = 16  # kind, number
    BODY = 17  # number in Value.arrays of the body itself
    COMPOSITE = 18  # module:qualname, name of an attribute, value, name, value, ...
    SHARED = 19  # merge point, number of the part, value


_MAX_DEPTH = 64
# A nest that refers to one part many times can have more items than memory holds.
_MAX_ITEMS = 1 << 20
# Arrays of up to the first size lie in the body, bodies of up to the second size in the message's header.
_SMALL_NBYTES = 1024
_SMALL_ARRAY = int(Tag.SMALL_ARRAY)
_FIXED = frozenset(DTYPES)
_BODY_NBYTES = 16 * 1024
_ENUMS: dict[str, type[enum.Enum]] = {
    kind.__name__: kind for kind in (ReduceOp, VariableAggregation, VariableSynchronization)
}
_MAPPINGS: dict[type, Tag] = {dict: Tag.DICT, OrderedDict: Tag.ORDERED_DICT, defaultdict: Tag.DEFAULT_DICT}
_PLAIN = {type(None), bool, float, str, bytes}
_NUMBERS = {type(None), bool, float}
_SCALARS = {np.dtype(name).type: name for name in ("float32", "float64", "int32", "int64", "bool")}
_INT = re.compile(r"-?0x[0-9a-f]+")


def to_value(
    obj: object, place: Place, name: str = "result", shared: Mapping[int, tuple[int, int]] | None = None
) -> Value:
    """``obj`` as data. ``place`` decides where a larger array goes; errors call ``obj`` by ``name``. Parts whose
    ``id()`` is in ``shared`` arrive as ``values.Shared`` with the key found there.

    Raises :class:`ResultError` (a TypeError) that names a part which does not belong to the vocabulary, contains
    itself, or is nested more than 64 deep; and the errors of ``place``.
    """
    if not shared or id(obj) not in shared:  # most results are a loss or None
        if obj is None:
            return _NOTHING
        if type(obj) in _NUMBERS:
            return Value(_packer.pack(obj), ())
        if (scalar := _SCALARS.get(type(obj))) is not None:
            return Value(_packer.pack([_SMALL_ARRAY, scalar, [], obj.tobytes()]), ())  # type: ignore[attr-defined]
    writer = _Writer(place, shared or {})
    try:
        body = _packed(writer.write(obj, 0))
    except _Refused as refused:
        raise ResultError(f"{name}{''.join(refused.way)} {refused}") from refused.__cause__
    if len(body) > _BODY_NBYTES:
        writer.arrays.append(place(np.frombuffer(body, np.uint8)))
        body = _packed([Tag.BODY, len(writer.arrays) - 1])
    return Value(body, tuple(writer.arrays))


def from_value(value: Value, view: View, resolve: Resolve) -> Any:
    """The object that ``value`` describes. ``view`` returns the larger arrays, ``resolve`` the objects of handles;
    small arrays are copies. A defaultdict has lost its factory.

    Raises :class:`PeerProtocolError` for anything that :func:`to_value` does not make, :class:`ResultError` for a named
    tuple whose class this process does not have, and the errors of ``view`` and ``resolve``.
    """
    if value.body == _NONE:  # what most steps return
        return None
    wire = _unpack(value.body)
    if type(wire) in _NUMBERS:
        return wire
    reader = _Reader(value.arrays, view, resolve)
    match wire:
        case [Tag.BODY, number]:
            wire = _unpack(reader.array(number).tobytes())
    return reader.read(wire, 0)


def _packed(wire: Any) -> bytes:
    """``wire`` in msgpack.

    There is one packer for all threads, because making one costs more than most results. It calls no Python code
    while it packs. It keeps the buffer of the largest result, so the size of that is limited.
    """
    global _packer
    packed: bytes = _packer.pack(wire)
    if len(packed) > _KEPT_NBYTES:
        _packer = _new_packer()
    return packed


def _new_packer() -> msgpack.Packer:
    return msgpack.Packer(unicode_errors="surrogatepass")


_packer = _new_packer()
_NONE = _packer.pack(None)
_NOTHING = Value(_NONE, ())
_KEPT_NBYTES = 1 << 20


class _Refused(Exception):
    """A part does not belong to the vocabulary. Its text continues the name of the part, to which ``way`` leads."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.way: list[str] = []


#: The label of a part in its container: ``.field``, or the key or number of an item.
Label = str | tuple[object]


class _Writer:
    """Converts one object into values that msgpack can pack, and collects its larger arrays."""

    def __init__(self, place: Place, shared: Mapping[int, tuple[int, int]]) -> None:
        self.arrays: list[Array] = []
        self._place = place
        self._shared = shared
        self._left = _MAX_ITEMS
        self._open: list[int] = []  # id() of every container that is being written

    def write(self, obj: Any, depth: int) -> Any:
        key = self._shared.get(id(obj))
        return self._write(obj, depth) if key is None else [Tag.SHARED, *key, self._write(obj, depth)]

    def _write(self, obj: Any, depth: int) -> Any:
        kind = type(obj)
        self._left -= 1
        if self._left < 0:
            raise _Refused(f"is beyond the limit of {_MAX_ITEMS} parts in a result; return arrays")
        if kind in _PLAIN:
            return obj
        if kind is int:
            return obj if -(1 << 63) <= obj < 1 << 64 else [Tag.INT, hex(obj)]
        if kind is complex:
            return [Tag.COMPLEX, obj.real, obj.imag]
        if isinstance(obj, np.ndarray | np.generic):
            return self._array(obj)
        if _ENUMS.get(kind.__name__) is kind:
            return [Tag.ENUM, kind.__name__, obj.name]
        if isinstance(obj, np.dtype):
            return _write_dtype(obj)
        if isinstance(obj, Handle):
            return _write_handle(obj)
        if isinstance(obj, LiveNumber):
            return self._write(obj.number, depth)
        parts = _parts(obj, kind)
        return self._array(_as_array(obj)) if parts is None else self._container(obj, *parts, depth)

    def _container(self, obj: Any, head: list[Any], items: Iterable[tuple[Label, Any]], depth: int) -> list[Any]:
        if id(obj) in self._open:
            raise _Refused("contains itself; return a structure without cycles")
        if depth >= _MAX_DEPTH:
            raise _Refused(f"is nested more than {_MAX_DEPTH} deep; return a flatter structure")
        self._open.append(id(obj))
        for label, item in items:
            try:
                head.append(self.write(item, depth + 1))
            except _Refused as refused:
                refused.way.insert(0, label if isinstance(label, str) else f"[{shown(label[0])}]")
                raise
        self._open.pop()
        return head

    def _array(self, obj: np.ndarray | np.generic) -> list[Any]:
        array = np.asarray(obj)
        if isinstance(obj, np.ma.MaskedArray):
            raise _Refused("is a masked array; return its .filled(...), or .data and .mask")
        if not is_wire_dtype(dtype_name(array.dtype)):
            raise _Refused(
                f"is an array of dtype {array.dtype}, which cannot be sent; return it as numbers, bools or fixed-width "
                "strings (astype)"
            )
        try:
            if array.nbytes <= _SMALL_NBYTES:
                native = array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
                small = Array(dtype_name(native.dtype), native.shape, Frame(data := native.tobytes()))
                return [Tag.SMALL_ARRAY, small.dtype, list(small.shape), data]
            self.arrays.append(self._place(array))
        except LocalProtocolError as error:
            raise _Refused(f"is an array that cannot be sent: {error}") from error
        return [Tag.ARRAY, len(self.arrays) - 1]


def _parts(obj: Any, kind: type) -> tuple[list[Any], Iterable[tuple[Label, Any]]] | None:
    """The beginning of a container's list, and its parts with their labels; None if ``obj`` is not a container."""
    if kind is list or kind is tuple:
        return [Tag.LIST if kind is list else Tag.TUPLE], (((n,), item) for n, item in enumerate(obj))
    if kind in _MAPPINGS:
        return [_MAPPINGS[kind]], _pairs(obj)
    fields = getattr(kind, "_fields", None)
    if isinstance(obj, tuple) and isinstance(fields, tuple):
        labels = (f".{field}" for field in fields)
        return [Tag.NAMED_TUPLE, origin_of(kind), list(fields)], zip(labels, obj, strict=True)
    if kind is PerReplica or kind is Mirrored:
        tag = Tag.PER_REPLICA if kind is PerReplica else Tag.MIRRORED
        return [tag], ((f".values[{n}]", item) for n, item in enumerate(obj.values))
    if isinstance(obj, Composite):
        return [Tag.COMPOSITE, origin_of(kind)], _attributes(obj._cs_state())
    if kind is IndexedSlices:
        return [Tag.SLICES], ((f".{part}", getattr(obj, part)) for part in ("values", "indices", "dense_shape"))
    return None


def _pairs(mapping: dict[Any, Any]) -> Iterator[tuple[Label, Any]]:
    for key, value in mapping.items():
        if not _is_key(key):
            raise _Refused(
                f"has the key {shown(key)}, a {_title(key)}; keys must be str, int, float, bool, None, bytes or "
                "tuples of those (for a NumPy scalar use .item())"
            )
        yield (key,), key
        yield (key,), value


def _attributes(state: dict[str, Any]) -> Iterator[tuple[Label, Any]]:
    for name, value in state.items():
        if not isinstance(value, LiveNumber):  # the receiver's follows its optimizer
            yield f".{name}", name
            yield f".{name}", value


def _write_dtype(dtype: np.dtype[Any]) -> list[Any]:
    if not is_wire_dtype(dtype_name(dtype)):
        raise _Refused(f"is the dtype {dtype}, whose arrays cannot be sent; return its name")
    return [Tag.DTYPE, dtype_name(dtype)]


def _write_handle(handle: Handle) -> list[Any]:
    kind, number = handle_id(handle)
    if number <= 0 and kind != "strategy":
        raise _Refused(
            f"is {'an' if kind[0] in 'aeiou' else 'a'} {kind} that the server does not know: it was made in this "
            "replica or belongs to another strategy; make it in the script and let the function capture it, or "
            "return values"
        )
    return [Tag.HANDLE, kind, number]


def _is_key(key: object) -> bool:
    return type(key) in _PLAIN or type(key) is int or (type(key) is tuple and all(map(_is_key, key)))


def _as_array(obj: Any) -> np.ndarray:
    """``obj`` as an array in this process's memory, if it is like an array."""
    if isinstance(obj, type) or not any(hasattr(obj, way) for way in _WAYS):
        raise _refusal(obj)
    try:
        if getattr(obj, "requires_grad", False):
            obj = obj.detach()
        if hasattr(obj, "__cuda_array_interface__") and hasattr(obj, "get"):
            return np.asarray(obj.get())
        return np.asarray(obj) if hasattr(obj, "__array__") else np.from_dlpack(obj)
    except Exception as error:
        raise _Refused(
            f"is a {_title(obj)} that cannot become an array here ({type(error).__name__}: {error}); return one in "
            "this process's memory, e.g. its .cpu()"
        ) from error


_WAYS = ("__array__", "__dlpack__", "__cuda_array_interface__")


def _is_instance_of(*classes: type) -> Callable[[Any], bool]:
    return lambda obj: isinstance(obj, classes)


_REMEDIES: list[tuple[Callable[[Any], bool], str]] = [
    (_is_instance_of(enum.Enum), "return its .value or .name"),
    (_is_instance_of(set, frozenset), "return a sorted list or an array"),
    (_is_instance_of(bytearray, memoryview), "return bytes(x)"),
    *((_is_instance_of(base), f"return {base.__name__}(x)") for base in (str, bytes, int, float, dict, list, tuple)),
    (lambda obj: isinstance(obj, type) or callable(obj), "code cannot be returned; return data"),
    (dataclasses.is_dataclass, "return dataclasses.asdict(x)"),
    (lambda obj: hasattr(obj, "__next__") or isinstance(obj, range), "return list(x)"),
    (lambda obj: hasattr(obj, "__float__"), "return float(x) or str(x)"),
]


def _refusal(obj: Any) -> _Refused:
    fitting = (remedy for fits, remedy in _REMEDIES if fits(obj))
    remedy = next(fitting, "return numbers, strings or arrays, alone or in lists, tuples and dicts")
    return _Refused(f"is a {_title(obj)}, which cannot be returned from a replica; {remedy}")


def _title(obj: object) -> str:
    kind = obj if isinstance(obj, type) else type(obj)
    text = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    return f"class ({text})" if isinstance(obj, type) else text


def origin_of(cls: type) -> str:
    """The name under which :func:`~central_storage.pickling.reconstruct.class_named` finds ``cls``."""
    return f"{cls.__module__}:{cls.__qualname__}"


def _unpack(body: bytes) -> Any:
    try:
        return msgpack.unpackb(body, unicode_errors="surrogatepass", max_map_len=0, max_ext_len=0)
    except Exception as error:  # msgpack has several families of them
        raise PeerProtocolError(f"a value that is not msgpack: {type(error).__name__}: {error}") from error


class _Reader:
    """Converts unpacked msgpack values into objects, and refuses everything that a writer does not write."""

    def __init__(self, arrays: tuple[Array, ...], view: View, resolve: Resolve) -> None:
        self._arrays = arrays
        self._view = view
        self._resolve = resolve

    def read(self, wire: Any, depth: int) -> Any:
        if type(wire) in _PLAIN or type(wire) is int:
            return wire
        if not isinstance(wire, list) or not wire or type(wire[0]) is not int or depth > _MAX_DEPTH:
            raise _malformed(wire)
        if wire[0] == _SMALL_ARRAY and len(wire) == 4 and wire[2] == [] and type(wire[3]) is bytes:
            scalar = _scalar(wire[1], wire[3])  # many results are scalars
            if scalar is not None:
                return scalar
        tag, *rest = wire
        make = _CONTAINERS.get(tag)
        if make is not None:
            return make(self._items(rest, depth))
        match tag, rest:
            case Tag.SMALL_ARRAY, [str(dtype), [*shape], bytes(data)]:
                return _small_array(dtype, tuple(shape), data)
            case Tag.ARRAY, [number]:
                return self.array(number)
            case Tag.INT, [str(text)] if _INT.fullmatch(text):
                return int(text, 16)
            case Tag.COMPLEX, [float(real), float(imaginary)]:
                return complex(real, imaginary)
            case Tag.ENUM, [str(kind), str(member)] if kind in _ENUMS and member in _ENUMS[kind].__members__:
                return _ENUMS[kind][member]
            case Tag.DTYPE, [str(name)] if is_wire_dtype(name):
                return np.dtype(name)
            case Tag.HANDLE, [str(kind), int(number)] if number >= 0:
                return self._resolve(kind, number)
            case Tag.NAMED_TUPLE, [str(origin), [*fields], *items] if len(fields) == len(items):
                return _named_tuple(origin, tuple(fields), self._items(items, depth))
            case Tag.SHARED, [int(point), int(part), value]:
                return Shared((point, part), self.read(value, depth + 1))
            case Tag.COMPOSITE, [str(origin), *items]:
                return _composite(origin, _dict(self._items(items, depth)))
        raise _malformed(wire)

    def array(self, number: Any) -> Any:
        if type(number) is not int or not 0 <= number < len(self._arrays):
            raise PeerProtocolError(f"a value names array {shown(number)} of {len(self._arrays)}")
        return as_tensor(self._view(self._arrays[number]))

    def _items(self, items: list[Any], depth: int) -> list[Any]:
        return [self.read(item, depth + 1) for item in items]


def _malformed(wire: object) -> PeerProtocolError:
    return PeerProtocolError(f"{shown(wire)} is not a value")


def _small_array(dtype: str, shape: tuple[Any, ...], data: bytes) -> Any:
    try:
        return as_tensor(view_of(Array(dtype, shape, Frame(data)), bytearray(data)))
    except LocalProtocolError as error:
        raise PeerProtocolError(str(error)) from error


def _scalar(dtype: object, data: bytes) -> np.ndarray | None:
    """The array without axes; None if the general way must read it."""
    if type(dtype) is not str or dtype not in _FIXED or item_nbytes(dtype) != len(data):
        return None
    return np.ndarray.__new__(Tensor, (), dtype, bytearray(data))


def _dict(items: list[Any]) -> dict[Any, Any]:
    # A number may be both a key of a merge function's result and a part of it.
    keys = [unshared(key) if isinstance(key, Shared | tuple) else key for key in items[::2]]
    values = items[1::2]
    if len(keys) != len(values) or not all(map(_is_key, keys)) or len(set(keys)) != len(keys):
        raise PeerProtocolError(f"{shown(keys)} with {len(values)} values are not a dict")
    return dict(zip(keys, values, strict=True))


def _components(kind: type[PerReplica | Mirrored], items: list[Any]) -> PerReplica | Mirrored:
    if not items:
        raise PeerProtocolError(f"a {kind.__name__} without components")
    return kind(items)


def _slices(items: list[Any]) -> IndexedSlices:
    match items:
        case [np.ndarray() as values, np.ndarray() as indices, None | tuple() as shape] if all(
            type(length) is int and length >= 0 for length in shape or ()
        ):
            try:
                return IndexedSlices(values, indices, shape)
            except InvalidArgumentError as error:
                raise PeerProtocolError(f"IndexedSlices that do not fit: {error}") from error
    raise PeerProtocolError(f"{shown(items)} are not the parts of IndexedSlices")


_CONTAINERS: dict[int, Callable[[list[Any]], Any]] = {
    Tag.LIST: lambda items: items,
    Tag.TUPLE: tuple,
    Tag.DICT: _dict,
    Tag.ORDERED_DICT: lambda items: OrderedDict(_dict(items)),
    Tag.DEFAULT_DICT: lambda items: defaultdict(None, _dict(items)),
    Tag.SLICES: _slices,
    Tag.PER_REPLICA: lambda items: _components(PerReplica, items),
    Tag.MIRRORED: lambda items: _components(Mirrored, items),
}


def _named_tuple(origin: str, fields: tuple[Any, ...], items: list[Any]) -> Any:
    cls = class_named(origin)
    if cls is None or not issubclass(cls, tuple) or getattr(cls, "_fields", None) != fields:
        raise ResultError(
            f"a result holds a named tuple {origin} of {fields}, which this process does not have; define it in a "
            "module that the script imports, or return a dict"
        )
    return tuple.__new__(cls, items)  # not cls(...), which the user may have defined


def _composite(origin: str, state: dict[Any, Any]) -> Composite:
    cls = class_named(origin)
    if cls is None or not issubclass(cls, Composite):
        raise ResultError(
            f"a result holds a {origin}, which this process does not have as a metric or moving average; define it in "
            "a module that the script imports"
        )
    if not all(type(name) is str for name in state):
        raise PeerProtocolError(f"{shown(list(state))} are not the names of attributes")
    return rebuild(cls, state, update=False)
