"""Functions and arguments on their way to a replica: a script that sends and a process that receives, and one process
that does both."""

import collections
import contextlib
import enum
import functools
import json
import pickle
import sys
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from tests.harness.processes import run

from central_storage.core.handles import Handle, HandleTable
from central_storage.core.tensors.tensor import Tensor
from central_storage.pickling import pickler
from central_storage.pickling.pickler import digest, dump_arguments, dump_function, load_arguments, load_function
from central_storage.pickling.reconstruct import keep_classes_apart
from cs_proto.arrays import INLINE_NBYTES, Array, Location
from cs_proto.errors import ContextError, MemoryPlanError, ShippingError


class Weight(Handle):
    def __init__(self, number: int) -> None:
        self.number = number

    def _cs_handle(self) -> tuple[str, int]:
        return ("variable", self.number)


def adopt(handle: Handle) -> tuple[str, int]:
    return handle._cs_handle()


def resolve(kind: str, number: int) -> object:
    return f"{kind} {number}"


def there_and_back(function: Any) -> Any:
    return load_function(dump_function(function, adopt), resolve)


# --- a script with modules of its own, and a replica ------------------------------------------------------------

HANDLES = """
from central_storage.core.handles import Handle

class Thing(Handle):
    def __init__(self, kind, number): self.kind, self.number = kind, number
    def _cs_handle(self): return (self.kind, self.number)
"""

MODEL = """
import enum, functools, sys, typing
from collections import namedtuple
from dataclasses import KW_ONLY, dataclass, field
from abc import ABC, abstractmethod
from things import Thing
from pkg import layers

if "no_strategy" in sys.argv: raise RuntimeError("the training script was imported in a replica")

strategy, w, optimizer = Thing("strategy", 0), Thing("variable", 7), Thing("optimizer", 2)
log = open(__file__)
counter = 0
rate = 0.5

def forward(x): return layers.dense(x) * rate + counter
def bump():
    global counter
    counter += 1
    return counter
def even(n): return True if n == 0 else odd(n - 1)
def odd(n): return False if n == 0 else even(n - 1)

class Color(enum.Enum):
    RED = 1
    BLUE = 2

Point = namedtuple("Point", ["x", "y"])

class Pair(typing.NamedTuple):
    left: int
    right: int = 5

@dataclass
class Config:
    size: int
    tags: list = field(default_factory=list)
    _: KW_ONLY = None
    name: str = "c"

@dataclass(frozen=True)
class Slotted:
    __slots__ = ("value",)
    value: int

class Shape(ABC):
    @abstractmethod
    def area(self): ...

T = typing.TypeVar("T")

class Box(typing.Generic[T]):
    class Lid:
        weight = 3
    def __init__(self, x: T) -> None: self.x = x
    @functools.cached_property
    def double(self): return self.x * 2
    @property
    def half(self): return self.x / 2
    @staticmethod
    def unit(): return Box(1)
    @classmethod
    def of(cls, x): return cls(x)

class Square(Shape):
    def __init__(self, side):
        super().__init__()
        self.side = side
    def area(self): return self.side ** 2

class Diverged(Exception):
    def __init__(self, step, loss):
        super().__init__(f"loss {loss} at step {step}")
        self.step = step

@functools.lru_cache(maxsize=4)
def cached(x): return x + rate
"""

LAYERS = """
import threading
lock = threading.Lock()
scale = 2.0
unused = open(__file__)
def dense(x): return helper(x) * scale
def helper(x): return x + 1
"""

SCRIPT = """
import json, pickle, sys
import xml.etree.ElementTree
import model, pkg, pkg.layers
from model import Box, Color, Config, Diverged, Pair, Point, Slotted, Square, T, strategy, w
from central_storage.pickling.pickler import dump_function

functions = {}
def send(function):
    functions[function.__name__] = function
    return function

@send
def module(): return model.forward(2.0)
@send
def package(): return pkg.layers.dense(3)
@send
def handles(): return [model.w is w, model.strategy is strategy, [h.number for h in (w, strategy, model.optimizer)]]
@send
def module_state(): return [model.bump(), model.bump(), model.counter]
@send
def escaping(): return pass_on(model)
def pass_on(m): return m.forward(1.0)
@send
def module_as_default(m=model): return m.even(10)
@send
def mutual(): return [model.even(7), model.odd(7)]
@send
def unread():
    try: getattr(model, "".join(["opti", "mizer"]))
    except AttributeError as error: return str(error)
@send
def not_imported(): return sorted({"model", "pkg", "pkg.layers", "things_of_the_script"} & set(sys.modules))
@send
def submodule(): return xml.etree.ElementTree.fromstring("<a/>").tag
@send
def enums(): return [Color(1) is Color.RED, Color["BLUE"].value, Color.RED in {Color.RED: 1}]
@send
def tuples(): return [Point(1, 2).x, Point._fields, Pair(1), Pair(1)._asdict()]
@send
def dataclasses_():
    from dataclasses import MISSING, dataclass, fields, replace
    @dataclass
    class Larger(Config):
        more: int = 1
    return [repr(Config(1)), repr(replace(Config(1), size=2)), repr(Larger(2, more=3)),
            fields(Config)[0].default is MISSING, Slotted(4) == Slotted(4)]
@send
def classes():
    box = Box.of(3)
    return [box.double, box.double, box.half, Box.unit().x, isinstance(Square(2), model.Shape), Square(3).area(),
            Box.Lid.__qualname__, Box.Lid.weight, Box[int](5).x]
@send
def abstract():
    try: model.Shape()
    except TypeError: return "abstract"
@send
def caches(): return [model.cached(1), model.cached(1), model.cached.cache_info().hits]
@send
def make_box():
    import builtins
    builtins.kept = (Box(1), Config(1), Color.RED, Point(1, 2), Diverged(3, 0.5), Box)
@send
def know_box():
    import builtins
    box, config, color, point, error, cls = builtins.kept
    return [isinstance(box, Box), isinstance(config, Config), color is Color.RED, isinstance(point, Point),
            isinstance(error, Diverged), cls is Box, box.double]

def counters():
    count = 0
    def up():
        nonlocal count
        count += 1
    def get(): return count
    @send
    def shared_cells():
        up(); up()
        return get()
    def fact(n): return 1 if n < 2 else n * fact(n - 1)
    @send
    def recursion(): return fact(5)
    @send
    def empty_cell():
        try: return later
        except NameError: return "no later"
    if False: later = 1
counters()

class Trainer:
    rate = 0.25
    def __init__(self): self.weight = w
    def step(self, x): return [self.weight is w, self.rate * x]
    def __call__(self): return self.step(4)
send(Trainer().step).__func__
functions["method"] = __import__("functools").partial(Trainer().step, 8)
del functions["step"]
functions["callable_object"] = Trainer()

data = [(name, dump_function(function, lambda h: h._cs_handle())) for name, function in functions.items()]
again = [(name, dump_function(function, lambda h: h._cs_handle())) for name, function in functions.items()]
pickle.dump({"functions": data, "same": data == again}, open(sys.argv[1], "wb"))
"""

REPLICA = """
import json, pickle, sys
from central_storage.core.handles import Handle, HandleTable
from central_storage.pickling.pickler import dump_function, load_function

class Thing(Handle):
    def __init__(self, kind, number): self.kind, self.number = kind, number
    def _cs_handle(self): return (self.kind, self.number)

kinds = ("strategy", "variable", "optimizer")
table = HandleTable({kind: lambda number, kind=kind: Thing(kind, number) for kind in kinds})
sent = pickle.load(open(sys.argv[1], "rb"))
results = {"same": sent["same"]}
for way in ("first", "second", "relayed"):
    for name, data in sent["functions"]:
        function = load_function(data, table.resolve)
        if way == "relayed":
            function = load_function(dump_function(function, lambda h: h._cs_handle()), table.resolve)
        results[f"{name} {way}"] = function()
json.dump(results, open(sys.argv[2], "w"))
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the functions of a script returned in another process: each sent once, loaded twice, passed on once."""
    script, replica = tmp_path_factory.mktemp("script"), tmp_path_factory.mktemp("replica")
    (script / "pkg").mkdir()
    for name, text in {
        "things.py": HANDLES,
        "model.py": MODEL,
        "pkg/__init__.py": "from . import layers",
        "pkg/layers.py": LAYERS,
        "main.py": SCRIPT,
    }.items():
        (script / name).write_text(text)
    (replica / "replica.py").write_text(REPLICA)
    run(script / "main.py", replica / "sent", directory=script).ok()
    # The worker could import the script's modules, as a real one can.
    path = {"PYTHONPATH": str(script)}
    run(
        replica / "replica.py", replica / "sent", replica / "got", "no_strategy", directory=replica, environment=path
    ).ok()
    got: dict[str, Any] = json.loads((replica / "got").read_text())
    return got


EXPECTED: dict[str, Any] = {
    "module": 3.0,
    "package": 8.0,
    "handles": [True, True, [7, 0, 2]],
    "module_state": [1, 2, 2],
    "escaping": 2.0,
    "module_as_default": True,
    "mutual": [False, True],
    "not_imported": [],
    "submodule": "a",
    "enums": [True, 2, True],
    "tuples": [1, ["x", "y"], [1, 5], {"left": 1, "right": 5}],
    "dataclasses_": [
        "Config(size=1, tags=[], name='c')",
        "Config(size=2, tags=[], name='c')",
        "dataclasses_.<locals>.Larger(size=2, tags=[], name='c', more=3)",
        True,
        True,
    ],
    "classes": [6, 6, 1.5, 1, True, 9, "Box.Lid", 3, 5],
    "abstract": "abstract",
    "caches": [1.5, 1.5, 1],
    "know_box": [True] * 6 + [2],
    "shared_cells": 2,
    "recursion": 120,
    "empty_cell": "no later",
    "method": [True, 2.0],
    "callable_object": [True, 1.0],
}


@pytest.mark.parametrize("way", ["first", "second", "relayed"])
@pytest.mark.parametrize("name", EXPECTED)
def test_a_function_of_a_script_runs_elsewhere(results: dict[str, Any], name: str, way: str) -> None:
    assert results[f"{name} {way}"] == EXPECTED[name]


def test_what_the_function_does_not_read_of_a_module_is_not_sent(results: dict[str, Any]) -> None:
    text = results["unread first"]
    assert "of module 'model', only the names that the function uses were sent" in text
    assert "write model.optimizer in the function" in text


def test_every_function_gives_the_same_bytes_again(results: dict[str, Any]) -> None:
    assert results["same"] is True


# --- in one process ---------------------------------------------------------------------------------------------

rate = 0.5
names = {"b", "a", "c"}
weight = Weight(3)


def with_globals(x: float) -> Any:
    return x * rate, sorted(names), weight, np.sum([x]), json.dumps(x), len(names)


def test_handles_by_number_and_values_of_the_moment() -> None:
    scale = [2.0]
    closure = lambda: (scale, weight)  # noqa: E731
    sent = dump_function(closure, adopt)
    scale[0] = 3.0
    assert load_function(sent, resolve)() == ([2.0], "variable 3")
    assert there_and_back(closure)() == ([3.0], "variable 3")
    assert there_and_back(with_globals)(2.0) == (1.0, ["a", "b", "c"], "variable 3", 2.0, "2.0", 3)


def test_a_handle_is_adopted_once_and_decodes_to_one_object() -> None:
    asked = []
    captured = Weight(1)

    def adopting(handle: Handle) -> tuple[str, int]:
        asked.append(handle)
        return ("variable", 9)

    data = dump_function(lambda: (captured, [captured]), adopting)
    table = HandleTable({"variable": Weight})
    first, (second,) = load_function(data, table.resolve)()
    assert asked == [captured]
    assert first is second
    assert first.number == 9


def closure_over(*captured: Any) -> Any:
    return lambda: captured


@pytest.mark.parametrize(
    "function",
    [
        with_globals,
        closure_over(1, "a", 2.5, None, (1, 2), {"x": [1]}, {"s", "t"}, frozenset("uv"), np.arange(3), weight),
        functools.partial(with_globals, 2.0),
        json.dumps,
        np.linalg.norm,
        Weight.__init__,
    ],
    ids=["globals", "closure", "partial", "stdlib", "numpy", "method"],
)
def test_the_same_function_gives_the_same_bytes(function: Any) -> None:
    first = dump_function(function, adopt)
    assert dump_function(function, adopt) == first
    assert digest(first) == digest(dump_function(function, adopt))


def test_functions_and_those_within_them_keep_the_name_of_their_file() -> None:
    def outer() -> Any:
        return lambda: None

    arrived = there_and_back(outer)
    assert arrived.__code__.co_filename == arrived().__code__.co_filename == __file__


def test_a_changed_capture_gives_other_bytes() -> None:
    captured = np.zeros(3)
    function = lambda: captured  # noqa: E731
    before = digest(dump_function(function, adopt))
    captured[1] = 1
    assert digest(dump_function(function, adopt)) != before
    assert len(before) == 16


def test_library_functions_go_by_name() -> None:
    assert there_and_back(json.dumps) is json.dumps
    assert there_and_back(np.linalg.norm) is np.linalg.norm
    assert len(dump_function(np.linalg.norm, adopt)) < 100


@contextlib.contextmanager
def doubled(x: float) -> Iterator[float]:
    yield 2 * x


def test_a_closure_of_a_library_keeps_the_librarys_globals() -> None:
    def step(x: float) -> float:
        with doubled(x) as y:
            return y

    loaded = there_and_back(doubled)
    assert loaded is not doubled
    assert loaded.__globals__ is vars(contextlib)
    assert there_and_back(step)(3.0) == 6.0


@dataclass
class Config:
    size: int
    count = 0


class Color(enum.Enum):
    RED = 1


class Noting(type):
    """A metaclass that notes the names that a class body has."""

    def __new__(mcs, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> Any:
        cls: Any = super().__new__(mcs, name, bases, body)
        if "size" in body:
            cls.made_with = sorted(key for key in body if not key.startswith("__"))
        return cls


def test_what_a_library_knows_of_a_class_travels_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def known(cls: type) -> tuple[dict[str, Any], list[tuple[Any, ...]]]:
        return ({"size": 1, "tags": 2}, [(setattr, "told", "later")]) if cls.__name__ == "Parts" else ({}, [])

    monkeypatch.setattr(pickler, "CLASS_PARTS", [known])

    class Parts(metaclass=Noting):
        tags = 3

    data = dump_function(lambda: Parts, adopt)
    with ThreadPoolExecutor(1) as elsewhere:
        elsewhere.submit(keep_classes_apart, "elsewhere").result()
        copy: Any = elsewhere.submit(load_function, data, resolve).result()()
    assert copy is not Parts
    assert copy.made_with == ["size", "tags"]
    assert (copy.tags, copy.told, hasattr(copy, "size"), hasattr(Parts, "told")) == (3, "later", False, False)


def test_classes_stay_what_they_are_in_the_process_they_come_from() -> None:
    method = Config.__init__
    color, config = there_and_back(lambda: (Color.RED, Config(3)))()
    assert color is Color.RED
    assert type(config) is Config
    assert Config.__init__ is method


@numba.njit
def jitted(x):
    return x + 1


def test_compiled_functions_stay_compiled_and_bring_no_import() -> None:
    def step() -> Any:
        return jitted

    data = dump_function(step, adopt)
    assert load_function(data, resolve)() is load_function(data, resolve)()
    assert dump_function(step, adopt) == data
    assert b"new_jitted_function" in data
    assert b"CustomPickled" not in data  # numba's own way, whose pickler would name this module


def test_standard_streams_go_by_name() -> None:
    stream = sys.stderr
    assert there_and_back(lambda: stream)() is sys.stderr


def test_a_module_made_by_hand_is_sent_with_what_is_read_of_it() -> None:
    module = types.ModuleType("by_hand")
    module.__dict__.update(a=1, b=open(__file__))  # noqa: SIM115
    try:
        assert there_and_back(lambda: module.a)() == 1
        with pytest.raises(ShippingError, match=r"'module.b' \(an open file"):
            dump_function(lambda: module.b, adopt)
    finally:
        module.b.close()


# --- refusals ---------------------------------------------------------------------------------------------------


def test_what_adopt_raises_is_raised_with_the_name() -> None:
    def refuse(handle: Handle) -> tuple[str, int]:
        raise ContextError("it belongs to another strategy")

    def step() -> Any:
        return weight

    with pytest.raises(ContextError, match="another strategy") as caught:
        dump_function(step, refuse)
    assert "function 'step' captures 'weight'" in caught.value.__notes__  # from Python 3.14 on pickle adds its own


def test_memory_that_is_not_there_stays_a_memory_error() -> None:
    def refuse(handle: Handle) -> tuple[str, int]:
        raise MemoryPlanError("8 bytes too many")

    with pytest.raises(MemoryPlanError):
        dump_function(lambda: weight, refuse)


def test_a_module_that_the_replica_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("only_here")
    module.__file__ = "/usr/lib/python3/dist-packages/only_here.py"
    monkeypatch.setitem(sys.modules, "only_here", module)
    data = dump_function(closure_over(module), adopt)
    monkeypatch.delitem(sys.modules, "only_here")
    with pytest.raises(ShippingError, match="arguments need only_here, which this replica cannot import"):
        load_function(data, resolve)


class Fussy:
    def __reduce__(self) -> Any:
        return (int, ("not a number",))


def test_unpickling_that_fails_is_a_shipping_error() -> None:
    with pytest.raises(ShippingError, match="ValueError: invalid literal"):
        load_function(dump_function(closure_over(Fussy()), adopt), resolve)
    with pytest.raises(ShippingError, match="cannot be unpickled"):
        load_function(b"not a pickle", resolve)


def test_what_resolve_raises_is_raised() -> None:
    def refuse(kind: str, number: int) -> object:
        raise ContextError("not known here")

    with pytest.raises(ContextError, match="not known"):
        load_function(dump_function(lambda: weight, adopt), refuse)


# --- arguments --------------------------------------------------------------------------------------------------


class Memory:
    """What ``place`` puts buffers into."""

    def __init__(self) -> None:
        self.buffers: list[bytes] = []

    def place(self, data: memoryview) -> Array:
        assert data.contiguous
        assert data.format == "B"
        self.buffers.append(bytes(data))
        return Array("uint8", (data.nbytes,), Location("controller", 64 * len(self.buffers)))


TABLE = HandleTable({"variable": Weight})


def argument(value: Any, memory: Memory | None = None) -> Any:
    """``value`` as a replica gets it, nested and by keyword."""
    memory = memory or Memory()
    data, places = dump_arguments(({"a": [value]},), {"k": value}, adopt, memory.place)
    assert [array.nbytes for array in places] == list(map(len, memory.buffers))
    args, kwargs = load_arguments(data, [memoryview(buffer) for buffer in memory.buffers], TABLE.resolve)
    assert args[0]["a"][0] is kwargs["k"]
    return kwargs["k"]


LARGE = INLINE_NBYTES // 8 + 1
RECORD = np.dtype([("x", np.float32), ("n", np.int64, (2,))])


@pytest.mark.parametrize(
    ("array", "placed"),
    [
        (np.arange(12.0).reshape(3, 4), 0),
        (np.arange(float(INLINE_NBYTES // 8)), 0),
        (np.arange(float(LARGE)), 1),
        (np.arange(2.0 * LARGE).reshape(2, LARGE), 1),
        (np.asfortranarray(np.arange(2.0 * LARGE).reshape(2, LARGE)), 1),
        (np.arange(2.0 * LARGE)[::2], 1),
        (np.arange(4.0 * LARGE).reshape(4, LARGE)[:, ::3], 1),
        (np.arange(2.0 * LARGE)[::-1], 1),
        (np.zeros((0, 3), np.float32), 0),
        (np.array(3.5), 0),
        (np.array(True), 0),
        (np.arange(5, dtype=">i4"), 0),
        (np.array(["a", "bcd"]), 0),
        (np.array([b"a", b"bcd"]), 0),
        (np.array(["2020-01-01", "NaT"], "M8[D]"), 0),
        (np.arange(LARGE).astype("m8[ns]"), 1),
        (np.zeros(3, RECORD), 0),
        (np.zeros(LARGE, RECORD), 1),
        (np.zeros((3,), "V5"), 0),
        (np.array([1, "a", None, [2]], object), 0),
        (np.zeros(2, np.dtype([("o", object)])), 0),
        (np.zeros(3, "U0"), 0),
    ],
    ids=str,
)
def test_arrays_arrive_as_they_are_but_read_only(array: np.ndarray, placed: int) -> None:
    memory = Memory()
    got = argument(array, memory)
    assert len(memory.buffers) == placed
    assert type(got) is (np.ndarray if array.dtype.hasobject else Tensor)
    assert got.dtype == array.dtype
    assert got.shape == array.shape
    np.testing.assert_array_equal(got, array)
    assert not got.flags.writeable
    assert array.ndim < 2 or got.flags.f_contiguous == array.flags.f_contiguous or placed == 1


def test_a_fortran_array_keeps_its_order() -> None:
    assert argument(np.asfortranarray(np.ones((2, 3)))).flags.f_contiguous
    assert argument(np.asfortranarray(np.ones((2, LARGE)))).flags.f_contiguous


def test_a_large_array_is_not_copied_by_the_receiver() -> None:
    memory = Memory()
    got = argument(np.ones(LARGE), memory)
    assert np.shares_memory(got, np.frombuffer(memory.buffers[0], np.uint8))


def test_arrays_of_other_classes() -> None:
    masked = argument(np.ma.array([1, 2, 3], mask=[0, 1, 0]))
    assert masked.tolist() == [1, None, 3]
    assert not masked.flags.writeable
    matrix = argument(np.ones((2, 2)).view(np.matrix))
    assert type(matrix) is np.matrix
    assert not matrix.flags.writeable


def test_a_memory_map_is_sent_as_its_content(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "file", np.float32, "w+", shape=(LARGE,))
    mapped[:] = 2
    got = argument(mapped)
    assert type(got) is Tensor
    assert (got == 2).all()


def test_a_large_array_named_twice_is_placed_once() -> None:
    memory, array = Memory(), np.ones(LARGE)
    data, places = dump_arguments((array, array, [array]), {}, adopt, memory.place)
    assert len(places) == 1
    args, _ = load_arguments(data, [memoryview(buffer) for buffer in memory.buffers], resolve)
    assert args[0] is args[1] is args[2][0]


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.arange(12)[::2],
        np.array(2.5),
        np.zeros((0, 3)),
        np.zeros(2, RECORD),
        np.array(["2020-01-01"], "datetime64[D]"),
        np.ones((LARGE, 2), order="F"),
    ],
    ids=["C", "Fortran", "strided", "no axes", "empty", "records", "dates", "large"],
)
def test_arrays_among_plain_values_arrive_as_those_beside_functions(array: np.ndarray) -> None:
    memory = Memory()
    for others in ((1, "text", [None]), (lambda: 0,)):
        data, _ = dump_arguments((array, *others), {}, adopt, memory.place)
        got = load_arguments(data, [memoryview(buffer) for buffer in memory.buffers], resolve)[0][0]
        memory.buffers.clear()
        np.testing.assert_array_equal(got, array)
        assert (got.dtype, got.flags.f_contiguous, got.flags.writeable) == (
            array.dtype,
            array.flags.f_contiguous or array.size < 2 or array.ndim == 1,
            False,
        )


@pytest.mark.parametrize("of_field", [False, True])
def test_what_a_dtype_says_of_itself_arrives(of_field: bool) -> None:
    dtype = np.dtype("f4", metadata={"unit": lambda: "m"})
    got = argument(np.zeros(2, [("length", dtype)] if of_field else dtype))
    said = (got.dtype["length"] if of_field else got.dtype).metadata
    assert said is not None
    assert said["unit"]() == "m"


def test_plain_values_of_many_parts_and_within_themselves() -> None:
    many = list(range(10_000))
    assert argument(many) == many
    endless: list[Any] = []
    endless.append(endless)
    got = argument(endless)
    assert got[0] is got


@pytest.mark.parametrize("other", [Color.RED, np.float32(2), np.dtype("f4"), np.zeros, len, {1}, 2 + 1j, Weight(3)])
def test_what_is_not_plain_arrives_from_among_what_is(other: Any) -> None:
    array, parts, text = argument([np.ones(3), {"k": (1, other)}, "text"])
    assert (array.tolist(), array.flags.writeable, text) == ([1, 1, 1], False, "text")
    got = parts["k"][1]
    assert got.number == 3 if isinstance(other, Weight) else got == other


def test_buffers_come_in_order() -> None:
    memory = Memory()
    first, second, third = (np.full(LARGE, n) for n in (1.0, 2.0, 3.0))
    data, _ = dump_arguments((first, second), {"z": third}, adopt, memory.place)
    args, kwargs = load_arguments(data, [memoryview(buffer) for buffer in memory.buffers], resolve)
    assert [args[0][0], args[1][0], kwargs["z"][0]] == [1.0, 2.0, 3.0]


def test_other_objects_with_large_buffers() -> None:
    class Holder:
        def __init__(self, data: bytearray) -> None:
            self.data = data

        def __reduce_ex__(self, protocol: Any) -> Any:
            return bytes, (pickle.PickleBuffer(self.data),)

    memory = Memory()
    assert argument(Holder(bytearray(b"small")), memory) == b"small"
    assert not memory.buffers
    assert argument(Holder(bytearray(INLINE_NBYTES + 1)), memory) == bytes(INLINE_NBYTES + 1)
    assert len(memory.buffers) == 1


def test_arguments_of_all_kinds() -> None:
    Point = collections.namedtuple("Point", "x y")
    value = {"point": Point(1, 2), "config": Config(4), "color": Color.RED, "text": "t", "set": {1}, "none": None}
    got = argument(value)
    assert got == value
    assert type(got["config"]) is Config
    assert argument(weight).number == 3
    assert argument(lambda x: x + rate)(1) == 1.5
    assert argument(np.float32(1.5)).dtype == np.float32


def test_functions_among_arguments_bring_their_modules() -> None:
    module = types.ModuleType("by_hand")
    exec("def use(m): return m.answer()\ndef answer(): return 42", module.__dict__)
    memory = Memory()
    data, places = dump_arguments((lambda: module.use(module), np.ones(LARGE)), {}, adopt, memory.place)
    args, _ = load_arguments(data, [memoryview(buffer) for buffer in memory.buffers], resolve)
    assert args[0]() == 42
    assert len(places) == 1


def test_nothing_is_placed_where_something_cannot_be_sent() -> None:
    memory = Memory()
    with pytest.raises(ShippingError, match=r"argument 'args\[1\]' \(a running generator"):
        dump_arguments((np.ones(LARGE), (n for n in range(3))), {}, adopt, memory.place)
    assert not memory.buffers


def test_captured_arrays_may_be_written() -> None:
    captured = np.zeros(3)

    def add() -> np.ndarray:
        captured[0] += 1
        return captured

    assert there_and_back(add)().tolist() == [1.0, 0.0, 0.0]
    assert captured.tolist() == [0.0, 0.0, 0.0]


def test_the_pieces_of_cloudpickle_that_are_not_public() -> None:
    pieces = {"_code_reduce", "_dynamic_class_reduce", "_make_typevar", "_decompose_typevar"}
    assert pieces <= vars(pickler.by_value).keys()
    make, arguments, *_, fill = pickler.by_value._dynamic_class_reduce(Config)
    assert callable(make)
    assert callable(fill)
    assert isinstance(arguments[-2], str)
