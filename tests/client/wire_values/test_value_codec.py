"""What comes back from a replica: the closed vocabulary, its refusals, hostile bodies, exceptions."""

import builtins
import collections
import contextlib
import dataclasses
import enum
import math
import pickle
import re
import sys
import traceback
import types
from collections import OrderedDict, defaultdict, namedtuple
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from central_storage.core.handles import Handle, HandleTable
from central_storage.core.tensors.tensor import Tensor
from central_storage.core.values import (
    IndexedSlices,
    Mirrored,
    PerReplica,
    ReduceOp,
    VariableAggregation,
    VariableSynchronization,
    shared_parts,
)
from central_storage.pickling.pickler import dump_function
from central_storage.pickling.reconstruct import class_named
from central_storage.wire_values import body_codec
from central_storage.wire_values.body_codec import Tag
from central_storage.wire_values.value_codec import from_value, to_error, to_exception, to_value
from cs_proto import errors
from cs_proto.arrays import DTYPES, INLINE_NBYTES, Array, Location, array_of, frame_view
from cs_proto.codec import decode, encode
from cs_proto.errors import CODES, MemoryPlanError, PeerProtocolError, ReplicaError, ResultError
from cs_proto.failures import TEXT_LENGTH
from cs_proto.messages import Error, Return, Value
from cs_proto.records import Frame, shown


class Weight(Handle):
    def __init__(self, number: int, kind: str = "variable") -> None:
        self.kind, self.number = kind, number

    def _cs_handle(self) -> tuple[str, int]:
        return (self.kind, self.number)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        raise AssertionError("a handle travels by number")


TABLE = HandleTable({"variable": Weight, "strategy": lambda number: Weight(number, "strategy")})


def view(array: Array) -> np.ndarray:
    return np.array(frame_view(array))


def resolve(kind: str, number: int) -> object:
    return TABLE.resolve(kind, number)


def carried(value: Value) -> Value:
    """``value`` after a journey in a message."""
    message = decode(list(map(bytes, encode(Return((1,), 0, 1, (), 0, value, None)))))
    assert isinstance(message, Return)
    assert message.value is not None
    return message.value


def back(obj: object) -> Any:
    return from_value(carried(to_value(obj, array_of)), view, resolve)


Point = namedtuple("Point", ["x", "y"])


class Pair(NamedTuple):
    left: Any
    right: Any = 5

    class Inner(NamedTuple):
        z: int


def short(value: object) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", shown(value))[:40]


def same(got: Any, expected: Any) -> bool:
    """Equal in type, structure and value, NaN and arrays included; an array arrives as a Tensor."""
    if isinstance(expected, np.ndarray):
        return (
            type(got) is Tensor
            and got.dtype == expected.dtype
            and got.shape == expected.shape
            and got.tobytes() == expected.tobytes()
        )
    if type(got) is not type(expected):
        return False
    if isinstance(expected, dict):
        return (
            len(got) == len(expected)
            and all(map(same, got, expected))
            and all(map(same, got.values(), expected.values()))
        )
    if isinstance(expected, list | tuple):
        return len(got) == len(expected) and all(map(same, got, expected))
    if isinstance(expected, PerReplica | Mirrored):
        return same(got.values, expected.values)
    if isinstance(expected, IndexedSlices):
        return all(same(getattr(got, name), getattr(expected, name)) for name in ("values", "indices", "dense_shape"))
    if isinstance(expected, float | complex):
        return repr(got) == repr(expected)
    return bool(got == expected)


# --- values -----------------------------------------------------------------------------------------------------


def test_parts_that_all_replicas_got_alike_are_marked():
    result = {0.5: [None, 7, "text"], "array": np.ones(3), "own": PerReplica([1.5, 2.5]), "number": 2.5}
    assert sorted(shared_parts(4, result).values()) == [(4, 3), (4, 4)]
    got = from_value(carried(to_value(result, array_of, shared=shared_parts(4, result))), view, resolve)
    assert (got["array"].key, got["number"].key) == ((4, 3), (4, 4))
    assert same([got["array"].value, got["number"].value, got[0.5]], [result["array"], 2.5, [None, 7, "text"]])


def test_a_number_that_is_a_key_and_a_marked_part():
    number = 0.5
    result = {number: number, (number, 1): [number]}
    got = from_value(carried(to_value(result, array_of, shared=shared_parts(0, result))), view, resolve)
    assert list(got) == [0.5, (0.5, 1)]
    assert got[0.5].value == got[0.5, 1][0].value == 0.5


SCALARS = [
    None,
    True,
    False,
    0,
    -1,
    2**63,
    2**64 - 1,
    2**64,
    -(2**63),
    -(2**63) - 1,
    10**5000,
    0.0,
    -0.0,
    1e300,
    math.inf,
    math.nan,
    1 + 2j,
    complex(math.nan, -math.inf),
    "",
    "text ä 漢 \0",
    "lone \ud800 surrogate",
    b"",
    b"\0\xff",
    *ReduceOp,
    *VariableAggregation,
    *VariableSynchronization,
    np.dtype("float32"),
    np.dtype("U7"),
]
CONTAINERS = [
    [],
    (),
    {},
    [1, [2, (3, "x")]],
    {"a": 1, 2: "b", 3.5: None, None: 4, True: 5, b"k": 6, (1, ("x", None)): 7, 10**30: 8},
    OrderedDict([("z", 1), ("a", [2])]),
    Point(1, [2]),
    Pair(Point(1, 2)),
    Pair.Inner(3),
    PerReplica([1, "a", (2,)]),
    PerReplica([np.zeros(2)]),
    Mirrored([np.ones(2), np.ones(2)]),
    IndexedSlices(np.ones((2, 3), np.float32), np.array([4, 1]), (9, 3)),
    IndexedSlices(np.ones((0, 3)), np.zeros(0, np.int32)),
    {"nested": [({"deep": (PerReplica([{"x": [1]}]),)},)]},
]


@pytest.mark.parametrize("value", [*SCALARS, *CONTAINERS], ids=short)
def test_a_value_comes_back_as_it_is(value: object) -> None:
    assert same(back(value), value)
    assert same(back({"k": [value]}), {"k": [value]})


def test_a_default_dict_comes_back_without_its_factory() -> None:
    got = back(defaultdict(list, {"a": [1]}))
    assert type(got) is defaultdict
    assert got == {"a": [1]}
    assert got.default_factory is None


@pytest.mark.parametrize("dtype", [*DTYPES, "U3", "S3"])
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (4,), (3, 500)], ids=str)
def test_an_array_of_every_dtype(dtype: str, shape: tuple[int, ...]) -> None:
    array = (np.arange(math.prod(shape)) % 3).astype(dtype).reshape(shape)
    assert same(back(array), array)
    assert same(back([array, 1, array])[2], array)


def test_arrays_that_are_laid_out_otherwise() -> None:
    array = np.arange(24.0).reshape(4, 6)
    for other in (
        array.T,
        array[::2, ::-1],
        np.asfortranarray(array),
        array.astype(">f8"),
        array[:0],
        array.view(np.matrix),
    ):
        assert same(back(other), np.ascontiguousarray(other, "=f8").view(np.ndarray))


@pytest.mark.parametrize(
    "scalar", [np.float32(1.5), np.int64(-3), np.bool_(True), np.complex64(1j), np.str_("ab"), np.bytes_(b"a")]
)
def test_a_numpy_scalar_is_an_array_of_rank_0(scalar: np.generic) -> None:
    got = back(scalar)
    assert type(got) is Tensor
    assert got.shape == ()
    assert got == scalar
    assert got.dtype == scalar.dtype


def test_small_arrays_are_copies_that_may_be_written() -> None:
    value = to_value(np.zeros(3), array_of)
    assert value.arrays == ()
    first, second = (from_value(value, view, resolve) for _ in range(2))
    first += 1
    assert second.tolist() == [0, 0, 0]


def test_larger_arrays_go_where_place_says() -> None:
    placed = []

    def place(array: np.ndarray) -> Array:
        placed.append(array)
        return Array("float64", (1000,), Location("arena/w0", 64))

    value = to_value({"a": np.zeros(2), "b": (large := np.ones(1000))}, place)
    assert [array.place for array in value.arrays] == [Location("arena/w0", 64)]
    assert placed[0] is large
    assert np.shares_memory(from_value(value, lambda array: large, resolve)["b"], large)


@pytest.mark.parametrize(
    "big", ["x" * 100_000, b"y" * 100_000, list(range(20_000)), [np.float32(n) for n in range(5000)]]
)
def test_a_body_that_is_too_large_for_a_header_is_an_array(big: object) -> None:
    value = to_value(big, array_of)
    assert len(value.body) < 100
    assert [array.dtype for array in value.arrays] == ["uint8"]
    assert same(back(big), big if not isinstance(big, list) or isinstance(big[0], int) else list(map(np.asarray, big)))
    both = {"big": big, "array": np.arange(INLINE_NBYTES)}
    assert same(back(both)["array"], both["array"])


def test_the_same_value_gives_the_same_record() -> None:
    value = {"a": [1, np.zeros(3)], "b": Point(1, 2)}
    assert to_value(value, array_of) == to_value(value, array_of)


class Exporting:
    """An array of another library: ``__array__`` or ``__dlpack__`` and what else it may have."""

    def __init__(self, array: np.ndarray, **attributes: Any) -> None:
        self.array = array
        vars(self).update(attributes)


class ByArray(Exporting):
    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if getattr(self, "requires_grad", False):
            raise RuntimeError("call detach() first")
        return self.array

    def detach(self) -> "ByArray":
        return ByArray(self.array)


class ByDlpack(Exporting):
    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


class OnGpu(ByDlpack):
    __cuda_array_interface__: dict[str, Any] = {}

    def get(self) -> np.ndarray:
        return self.array


class OnGpuOfAnother(ByArray):
    __cuda_array_interface__: dict[str, Any] = {}

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        raise TypeError("can't convert a cuda tensor")


@pytest.mark.parametrize("kind", [ByArray, ByDlpack, OnGpu])
def test_arrays_of_other_libraries(kind: type[Exporting]) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert same(back(kind(array)), array)


def test_a_tensor_that_requires_a_gradient_is_detached() -> None:
    assert same(back(ByArray(np.ones(2), requires_grad=True)), np.ones(2))


def test_a_handle_comes_back_as_the_one_object() -> None:
    weight, strategy = TABLE.resolve("variable", 7), TABLE.resolve("strategy", 0)
    got = back([weight, {"s": strategy}, weight])
    assert got[0] is weight is got[2]
    assert got[1]["s"] is strategy


def test_a_named_tuple_of_a_class_that_was_sent_by_value() -> None:
    Local = namedtuple("Local", ["a"])
    dump_function(lambda: Local, lambda handle: ("", 0))
    assert class_named(f"{Local.__module__}:Local") is Local
    assert same(back(Local(1)), Local(1))


def test_a_named_tuple_that_is_not_here_is_named() -> None:
    value = to_value([namedtuple("Elsewhere", ["a"])(1)], array_of)
    with pytest.raises(ResultError, match=rf"named tuple {__name__}:Elsewhere of \('a',\).* return a dict"):
        from_value(value, view, resolve)


def test_a_named_tuple_of_other_fields_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    value = to_value(Point(1, 2), array_of)
    monkeypatch.setattr(sys.modules[__name__], "Point", namedtuple("Point", ["x", "z"]))
    with pytest.raises(ResultError, match="Point"):
        from_value(value, view, resolve)


def test_a_named_tuple_runs_no_code_of_its_class() -> None:
    class Loud(Pair):
        def __new__(cls, *args: Any) -> Any:
            raise AssertionError("called")

    dump_function(lambda: Loud, lambda handle: ("", 0))
    assert back(tuple.__new__(Loud, (1, 2))) == (1, 2)


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.complex_numbers() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=20,
)


@given(json_like)
def test_any_nest_comes_back(nest: object) -> None:
    assert same(back(nest), nest)


# --- refusals ---------------------------------------------------------------------------------------------------


class Color(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


class Text(str):
    pass


@dataclasses.dataclass
class Config:
    size: int


@pytest.mark.parametrize(
    ("value", "match"),
    [
        ({1, 2}, "a set, .* return a sorted list"),
        (frozenset({1}), "a frozenset, .* return a sorted list"),
        (bytearray(b"a"), r"a bytearray, .* return bytes\(x\)"),
        (memoryview(b"a"), r"a memoryview, .* return bytes\(x\)"),
        (range(3), r"a range, .* return list\(x\)"),
        (iter([1]), r"a list_iterator, .* return list\(x\)"),
        (Color.RED, "Color, .* return its .value"),
        (Level.LOW, "Level, .* return its .value"),
        (Text("a"), r"Text, .* return str\(x\)"),
        (collections.Counter("a"), r"collections.Counter, .* return dict\(x\)"),
        (sys.float_info, r"sys.float_info, .* return tuple\(x\)"),
        (Config(1), r"Config, .* return dataclasses.asdict\(x\)"),
        (print, "a builtin_function_or_method, .* return data"),
        (lambda: 1, "a function, .* return data"),
        (Config, r"a class \(.*Config\), .* return data"),
        (np.float32, r"a class \(numpy.float32\), .* return data"),
        (object(), "a object, .* return numbers, strings or arrays"),
        (Decimal(1), r"a decimal.Decimal, .* return float\(x\)"),
        (Fraction(1), r"a fractions.Fraction, .* return float\(x\)"),
        (Path("x"), "return numbers, strings or arrays"),
        (ValueError("x"), "a ValueError, "),
        (sys, "a module, "),
        (np.array([None]), r"array of dtype object, .*\(astype"),
        (np.array(["2020"], "M8[D]"), r"array of dtype datetime64\[D\]"),
        (np.zeros(2, [("a", "f4")]), "array of dtype"),
        (np.longdouble(1), "array of dtype (float128|longdouble|float96)"),
        (np.ma.array([1], mask=[1]), r"masked array; return its .filled"),
        (np.dtype("M8[D]"), "the dtype datetime64"),
        (np.zeros((1,) * 33), "an array that cannot be sent: .*shape"),
        (Weight(0, "optimizer"), "an optimizer that the server does not know"),
        (
            OnGpuOfAnother(np.ones(2)),
            r"OnGpuOfAnother that cannot become an array here \(TypeError: can't.* its .cpu\(\)",
        ),
        ({np.int64(1): 2}, r"has the key .*1.*, a numpy.int64; keys must be .*\.item\(\)"),
        ({(1, Color.RED): 2}, "has the key .*, a tuple; keys must be"),
    ],
    ids=short,
)
def test_what_is_not_in_the_vocabulary_is_named(value: Any, match: str) -> None:
    with pytest.raises(ResultError, match=rf"(?s)^result .*{match}"):
        to_value(value, array_of)
    with pytest.raises(ResultError, match=rf"(?s)^result\['a'\]\[1\] .*{match}"):
        to_value({"a": [0, value]}, array_of)


def test_the_way_to_it_is_named() -> None:
    for value, way in (
        (Point(1, {1}), r"\.y"),
        (PerReplica([1, {1}]), r"\.values\[1\]"),
        (OrderedDict(k=({1},)), r"\['k'\]\[0\]"),
        ([[0, {1}]], r"\[0\]\[1\]"),
    ):
        with pytest.raises(ResultError, match=rf"^result{way} is a set"):
            to_value(value, array_of)
    with pytest.raises(ResultError, match=r"^merge_call's arguments\[0\] is a set"):
        to_value(({1},), array_of, "merge_call's arguments")


def test_cycles_and_depth() -> None:
    cycle: list[Any] = [1]
    cycle.append({"again": cycle})
    with pytest.raises(ResultError, match=r"^result\[1\]\['again'\] contains itself"):
        to_value(cycle, array_of)
    nest: Any = 1
    for _ in range(64):
        nest = [nest]
    assert same(back(nest), nest)
    with pytest.raises(ResultError, match="nested more than 64 deep"):
        to_value([nest], array_of)


def test_one_part_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = [1, 2]
    assert back([shared, shared]) == [shared, shared]
    nest: Any = []
    for _ in range(60):
        nest = [nest] * 4
    monkeypatch.setattr(body_codec, "_MAX_ITEMS", 1000)
    with pytest.raises(ResultError, match="beyond the limit of 1000 parts"):
        to_value(nest, array_of)


# --- hostile bodies ---------------------------------------------------------------------------------------------


class Trap:
    def __reduce__(self) -> Any:
        return (pytest.fail, ("unpickled",))


@pytest.mark.parametrize(
    "wire",
    [
        [],
        [0],
        [99, 1],
        ["x"],
        [True, 1],
        [1.0, 1],
        [[1]],
        [Tag.ARRAY],
        [Tag.ARRAY, 1],
        [Tag.ARRAY, -1],
        [Tag.ARRAY, True],
        [Tag.ARRAY, "0"],
        [Tag.SMALL_ARRAY, "float32", [2], b"1234"],
        [Tag.SMALL_ARRAY, "object", [1], b"12345678"],
        [Tag.SMALL_ARRAY, "float32", [-1], b""],
        [Tag.SMALL_ARRAY, "float32", ["1"], b"1234"],
        [Tag.SMALL_ARRAY, "float32", [1 << 62], b""],
        [Tag.SMALL_ARRAY, "float32", 1, b"1234"],
        [Tag.INT, "0x"],
        [Tag.INT, "12"],
        [Tag.INT, "__import__('os')"],
        [Tag.INT, "0x1\n"],
        [Tag.COMPLEX, 1.0],
        [Tag.COMPLEX, "1", "2"],
        [Tag.ENUM, "ReduceOp", "__class__"],
        [Tag.ENUM, "Color", "RED"],
        [Tag.DTYPE, "object"],
        [Tag.DTYPE, "f4,O"],
        [Tag.DICT, "a"],
        [Tag.DICT, "a", 1, "a", 2],
        [Tag.DICT, [Tag.LIST, 1], 1],
        [Tag.DICT, [Tag.TUPLE, [Tag.LIST]], 1],
        [Tag.ORDERED_DICT, "a"],
        [Tag.DEFAULT_DICT, [Tag.HANDLE, "variable", 1], 1],
        [Tag.NAMED_TUPLE],
        [Tag.NAMED_TUPLE, 1, [], []],
        [Tag.NAMED_TUPLE, "a:b", ["x"]],
        [Tag.NAMED_TUPLE, "a:b", "xy", 1, 2],
        [Tag.SLICES, 1, 2],
        [Tag.SLICES, 1, 2, None],
        [Tag.SLICES, [Tag.ARRAY, 0], [Tag.ARRAY, 0], [Tag.TUPLE, -1]],
        [Tag.SLICES, [Tag.ARRAY, 0], [Tag.ARRAY, 0], None],
        [Tag.PER_REPLICA],
        [Tag.MIRRORED],
        [Tag.HANDLE, "variable", -1],
        [Tag.HANDLE, "spaceship", 1],
        [Tag.HANDLE, 1, "variable"],
        [Tag.LIST, [Tag.BODY, 0]],
        [Tag.BODY],
        [Tag.BODY, 7],
        [Tag.BODY, 0, 0],
        {"a": 1},
        msgpack.Timestamp(1),
        msgpack.ExtType(1, b"x"),
    ],
    ids=repr,
)
def test_what_nobody_writes_is_the_peers_fault(wire: object) -> None:
    value = Value(msgpack.packb(wire), (array_of(np.ones((2, 2))),))
    with pytest.raises(PeerProtocolError):
        from_value(value, view, resolve)


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", b"\x91", b"\x01\x01", b"\xa2\xff\xfe", b"\x91" * 5000 + b"\x01", pickle.dumps(Trap())]
)
def test_bytes_that_are_no_body(body: bytes) -> None:
    with pytest.raises(PeerProtocolError):
        from_value(Value(body, ()), view, resolve)


def test_a_body_nested_too_deep() -> None:
    wire: Any = 1
    for _ in range(100):
        wire = [Tag.LIST, wire]
    with pytest.raises(PeerProtocolError):
        from_value(Value(msgpack.packb(wire), ()), view, resolve)


@pytest.mark.parametrize(
    "origin",
    ["builtins:dict", "os:system", "builtins:tuple", "nowhere:Point", "", ":", f"{__name__}:TABLE", "xml.dom:minidom"],
)
def test_a_named_tuple_is_a_named_tuple(origin: str) -> None:
    before = set(sys.modules)
    wire = [Tag.NAMED_TUPLE, origin, ["x", "y"], 1, 2]
    with pytest.raises(ResultError):
        from_value(Value(msgpack.packb(wire), ()), view, resolve)
    assert set(sys.modules) == before


def test_looking_up_a_class_calls_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("lazy")
    module.__getattr__ = pytest.fail  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "lazy", module)
    assert class_named("lazy:Anything") is None


@given(st.binary(max_size=60))
def test_random_bodies(body: bytes) -> None:
    with contextlib.suppress(PeerProtocolError, ResultError):
        from_value(Value(body, (array_of(np.ones((2, 2))),)), view, resolve)


# --- exceptions -------------------------------------------------------------------------------------------------


def raised(exc: BaseException) -> BaseException:
    """``exc`` with a traceback that begins in a module of the project."""
    code = compile("raiser()", sys.modules["central_storage"].__file__ or "", "exec")
    with pytest.raises(BaseException) as caught:
        exec(code, {"raiser": lambda: _raise(exc), "__name__": "central_storage"})
    return caught.value.with_traceback(caught.tb.tb_next)


def _raise(exc: BaseException) -> None:
    raise exc


def journey(exc: BaseException, replica: int = 1, merge_index: int = 2) -> BaseException:
    error = to_error(raised(exc), replica, merge_index, array_of)
    parts = encode(Return((1,), 0, 1, (), 0, None, error))
    message = decode(list(map(bytes, parts)))
    assert isinstance(message, Return)
    assert message.error is not None
    return to_exception(message.error, view, resolve)


def original(code: str) -> type[BaseException]:
    return getattr(errors, code[3:]) if code.startswith("cs.") else getattr(builtins, code)


ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "UnicodeDecodeError": ("utf-8", b"\xff", 0, 1, "bad"),
    "UnicodeEncodeError": ("utf-8", "\ud800", 0, 1, "bad"),
    "UnicodeTranslateError": ("x", 0, 1, "bad"),
    "SystemExit": (3,),
    **dict.fromkeys(("SyntaxError", "IndentationError", "TabError"), ("text", ("f.py", 1, 2, "code"))),
}


@pytest.mark.parametrize("code", CODES)
def test_every_class_of_the_table(code: str) -> None:
    kind = original(code)
    for arguments in (ARGUMENTS.get(code, ("text", 5)), ARGUMENTS.get(code, ())):
        exc = kind(*arguments)
        got = journey(exc)
        assert isinstance(got, kind)
        assert type(got) is CODES[code]
        assert got.args == exc.args
        assert (got.replica, got.merge_index) == (1, 2)  # type: ignore[attr-defined]
        assert isinstance(got, ReplicaError) != code.startswith("cs.")
        for name in ("code", "errno", "strerror", "filename", "encoding", "object", "start", "end", "reason", "value"):
            assert getattr(got, name, None) == getattr(exc, name, None)


@pytest.mark.parametrize("code", CODES)
def test_a_second_journey_changes_nothing(code: str) -> None:
    once = journey(original(code)(*ARGUMENTS.get(code, ("text",))), replica=0)
    twice = journey(once, replica=1)
    assert type(twice) is type(once)
    assert twice.args == once.args
    assert "in replica 1 (merge point 2)" in twice.__notes__[0]
    assert "in replica 0 (merge point 2)" in twice.__notes__[0]


def test_the_original_type_is_caught() -> None:
    with pytest.raises(KeyError) as caught:
        raise journey(KeyError("w", (1, np.zeros(2))))
    assert caught.value.args[0] == "w"
    assert caught.value.args[1][1].tolist() == [0, 0]


def test_exceptions_of_the_system_keep_their_number_and_file() -> None:
    exc = journey(FileNotFoundError(2, "No such file", "a.txt", None, "b.txt"))
    assert isinstance(exc, FileNotFoundError)
    assert (exc.errno, exc.strerror, exc.filename, exc.filename2) == (2, "No such file", "a.txt", "b.txt")
    assert exc.args == (2, "No such file")
    assert str(exc) == "[Errno 2] No such file: 'a.txt' -> 'b.txt'"


def test_exit_codes_are_kept() -> None:
    assert journey(SystemExit()).code is None  # type: ignore[attr-defined]
    assert journey(SystemExit("bye")).code == "bye"  # type: ignore[attr-defined]
    assert journey(SystemExit(1, 2)).code == (1, 2)  # type: ignore[attr-defined]


class Diverged(ArithmeticError):
    def __init__(self, step: int, loss: float) -> None:
        super().__init__(f"loss {loss} at step {step}")
        self.step = step


class Doubling(Exception):
    def __init__(self, step: int) -> None:
        super().__init__(f"at {step}")
        self.step = step


class Nothing(Exception):
    def __new__(cls, secret: str) -> "Nothing":
        if secret != "open":
            raise RuntimeError("refused")
        return super().__new__(cls)

    def __init__(self, secret: str) -> None:
        super().__init__("another")


class MyFileError(OSError):
    def __init__(self, name: str) -> None:
        super().__init__(5, "broken", name)
        self.extra = {"name": name, "lock": object()}


class WithReplica(Exception):
    replica = "mine"


class Stop(BaseException):
    pass


class BadText(ValueError):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_a_class_of_the_user_comes_back_as_itself() -> None:
    exc = journey(Diverged(3, 0.5))
    assert type(exc) is Diverged
    assert str(exc) == "loss 0.5 at step 3"
    assert exc.step == 3
    assert (exc.replica, exc.merge_index) == (1, 2)  # type: ignore[attr-defined]


def test_a_constructor_that_makes_its_own_message_does_not_make_it_twice() -> None:
    exc = journey(Doubling(4))
    assert type(exc) is Doubling
    assert (exc.args, exc.step) == (("at 4",), 4)


def test_attributes_outside_the_vocabulary_are_left_out() -> None:
    exc = Doubling(4)
    exc.lock, exc.data = object(), np.arange(3)  # type: ignore[attr-defined]
    got: Any = journey(exc)
    assert not hasattr(got, "lock")
    assert got.data.tolist() == [0, 1, 2]


def test_a_subclass_of_oserror() -> None:
    exc = journey(MyFileError("f.txt"))
    assert type(exc) is MyFileError
    assert (exc.errno, exc.strerror, exc.filename, exc.args) == (5, "broken", "f.txt", (5, "broken"))


def test_exceptions_of_libraries() -> None:
    with pytest.raises(np.exceptions.AxisError) as caught:
        np.sum(np.zeros(2), axis=5)
    exc = journey(caught.value)
    assert type(exc) is np.exceptions.AxisError
    assert str(exc) == "axis 5 is out of bounds for array of dimension 1"


def test_a_class_that_refuses_becomes_its_nearest_listed_base() -> None:
    exc = journey(Nothing("open"))
    assert type(exc) is ReplicaError
    assert exc.args == ("another",)


def test_a_class_that_is_not_here_becomes_its_nearest_listed_base() -> None:
    class Local(Diverged):
        pass

    exc = journey(Local(3, 0.5))
    assert type(exc) is CODES["ArithmeticError"]
    assert exc.args == ("loss 0.5 at step 3",)


def test_a_local_class_that_was_sent_by_value_comes_back_as_itself() -> None:
    class Local(KeyError):
        pass

    dump_function(lambda: Local, lambda handle: ("", 0))
    exc = journey(Local("k"))
    assert type(exc) is Local
    assert exc.args == ("k",)


def test_what_is_no_exception_is_not_made() -> None:
    assert type(journey(Stop("x"))) is ReplicaError
    for origin in ("builtins:dict", "subprocess:Popen", f"{__name__}:Stop", f"{__name__}:Diverged"):
        error = dataclasses.replace(to_error(ValueError("x"), 0, 0, array_of), origin=origin)
        assert type(to_exception(error, view, resolve)) is CODES["ValueError"]


def test_groups_become_the_nearest_listed_base() -> None:
    exc = journey(ExceptionGroup("several", [ValueError("a"), KeyError("b")]))
    assert type(exc) is ReplicaError
    assert exc.args == ("several (2 sub-exceptions)",)
    assert "ValueError: a" in exc.__notes__[0]


def test_an_attribute_of_the_users_is_left_alone() -> None:
    exc = journey(WithReplica("x"))
    assert exc.replica == "mine"  # type: ignore[attr-defined]


def test_arguments_outside_the_vocabulary_become_text() -> None:
    exc = journey(ValueError("bad", {1, 2}))
    assert exc.args == ("('bad', {1, 2})",)
    exc = journey(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), replica=-1, merge_index=0)
    assert isinstance(exc, UnicodeDecodeError)


def test_a_unicode_error_of_a_message_alone() -> None:
    error = dataclasses.replace(
        to_error(ValueError("x"), 0, 0, array_of), exception="UnicodeDecodeError", arguments=None
    )
    exc = to_exception(error, view, resolve)
    assert type(exc) is CODES["UnicodeError"]
    assert exc.args == ("x",)


def test_an_error_without_arguments_has_its_message() -> None:
    error = Error("cs.ShutdownError", "it ended", None, "x:y", -1, 0, "")
    exc = to_exception(error, view, resolve)
    assert type(exc) is errors.ShutdownError
    assert exc.args == ("it ended",)
    assert not hasattr(exc, "__notes__")


def test_arguments_that_only_the_sender_can_read_become_the_message() -> None:
    exc = journey(ValueError(namedtuple("Elsewhere", ["a"])(1)))
    assert exc.args == ("Elsewhere(a=1)",)


def test_a_class_whose_text_fails() -> None:
    exc = journey(BadText(1))
    assert type(exc) is CODES["ValueError"]
    assert exc.args == (1,)


def test_memory_that_is_full_does_not_hide_the_error() -> None:
    def full(array: np.ndarray) -> Array:
        raise MemoryPlanError("no room")

    error = to_error(ValueError(np.zeros(1000)), 0, 0, full)
    assert "0." in str(to_exception(error, view, resolve).args[0])


@pytest.mark.parametrize(
    "arguments",
    [None, 1, (), [("x",), {}], (["x"], {}), (("x",), {1: 2}), (("x",), []), (("x",), {}, 1)],
    ids=repr,
)
def test_arguments_of_another_form_are_the_peers_fault(arguments: object) -> None:
    error = dataclasses.replace(to_error(ValueError("x"), 0, 0, array_of), arguments=to_value(arguments, array_of))
    with pytest.raises(PeerProtocolError):
        to_exception(error, view, resolve)


def test_a_code_that_is_not_in_the_table() -> None:
    error = dataclasses.replace(to_error(ValueError("x"), 0, 0, array_of), exception="os.system")
    with pytest.raises(PeerProtocolError, match=r"os\.system"):
        to_exception(error, view, resolve)


# --- tracebacks -------------------------------------------------------------------------------------------------


def test_the_traceback_is_a_note_and_begins_with_the_users_code() -> None:
    exc = journey(KeyError("w"))
    (note,) = exc.__notes__
    assert note.startswith('in replica 1 (merge point 2):\nTraceback (most recent call last):\n  File "')
    assert "central_storage" not in note.splitlines()[2]
    assert "in _raise" in note
    assert "KeyError: 'w'" not in note  # it is the line above it
    assert "in replica 1" in "".join(traceback.format_exception(exc))


def test_a_traceback_of_the_project_alone_is_kept() -> None:
    file = sys.modules["central_storage"].__file__ or ""
    with pytest.raises(ZeroDivisionError) as caught:
        exec(compile("1 / 0", file, "exec"), {"__name__": "central_storage"})
    error = to_error(caught.value.with_traceback(caught.tb.tb_next), 0, 0, array_of)
    assert file in error.traceback


def test_causes_are_part_of_it_and_trimmed_too() -> None:
    try:
        raise raised(ValueError("first"))
    except ValueError as cause:
        try:
            raise RuntimeError("second") from cause
        except RuntimeError as exc:
            text = to_error(exc, 0, 0, array_of).traceback
    assert "ValueError: first" in text
    assert "The above exception was the direct cause" in text
    assert text.endswith("RuntimeError: second\n")


def test_a_chain_that_is_very_long() -> None:
    exc: BaseException = ValueError("0")
    for number in range(1, 3000):
        following = ValueError(str(number))
        following.__context__ = exc
        exc = following
    text = to_error(exc, 0, 0, array_of).traceback
    assert len(text) == TEXT_LENGTH
    assert text.endswith("ValueError: 2999\n")


def test_deep_recursion_has_a_short_traceback() -> None:
    def recurse() -> None:
        recurse()

    with pytest.raises(RecursionError) as caught:
        recurse()
    exc = journey(caught.value)
    assert isinstance(exc, RecursionError)
    assert "Previous line repeated" in exc.__notes__[0]


def test_text_is_limited() -> None:
    error = to_error(ValueError("x" * 10**6), 0, 0, array_of)
    assert len(error.message) == TEXT_LENGTH
    assert len(error.traceback) == TEXT_LENGTH
    exc = to_exception(error, view, resolve)
    assert exc.args == ("x" * 10**6,)


def test_an_error_of_no_replica() -> None:
    assert journey(ValueError("x"), replica=-1).__notes__[0].startswith("in the service:\nTraceback")
    error = dataclasses.replace(to_error(ValueError("x"), 3, 1, array_of), traceback="")
    assert to_exception(error, view, resolve).__notes__ == ["in replica 3 (merge point 1)"]


def test_to_value_is_what_a_frame_can_hold() -> None:
    value = to_value(np.zeros(2000, np.uint8), array_of)
    assert isinstance(value.arrays[0].place, Frame)
    assert value.arrays[0].place.nbytes == 2000
