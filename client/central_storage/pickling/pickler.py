"""Functions and arguments on their way to a replica: pickled by value, handles by number.

This is the only module that uses a pickler. Code goes from the client to workers, and from the holder of a merge_call
token to the other workers, never back. Functions, classes and modules of the user travel by value, so a worker never
imports the training script; of a module, only the names that the sent code reads are sent. A class stays one class per
process however often it is sent. The same function with unchanged captures gives the same bytes. The caller decides
what a handle is in the server (``adopt``, ``resolve``) and where large buffers go (``place``).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import linecache
import pickle
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, Literal, TypeVar

import cloudpickle
import numpy as np
from cloudpickle import cloudpickle as by_value

from central_storage.core.composites import Composite
from central_storage.core.handles import Handle
from central_storage.core.tensors.tensor import Tensor
from central_storage.data.distributed import DistributedDataset, DistributedFromFunction, DistributedIterator, elsewhere
from cs_proto.arrays import INLINE_NBYTES
from cs_proto.errors import CentralStorageError, ShippingError, ShutdownError
from cs_proto.records import Buffer

from . import reconstruct, unpicklable
from .code_analysis import Reads, is_importable, is_users, reads_of, submodules

__all__ = [
    "CLASS_PARTS",
    "Adopt",
    "ClassParts",
    "Resolve",
    "are_plain",
    "digest",
    "dump_arguments",
    "dump_function",
    "load_arguments",
    "load_function",
]

P = TypeVar("P")

_NO_ARGUMENTS = pickle.dumps(((), {}), 5)
# The last byte of a pickle that names nothing of the user's and no handle; other pickles end with the usual STOP.
_PLAIN = b"!"

#: Returns (kind, number) of a handle, and may make its object in the server. The parts of a composite travel, so for a
#: composite only the latter matters.
Adopt = Callable[[Handle | Composite], tuple[str, int]]
#: Returns the object of this process for (kind, number).
Resolve = Callable[[str, int], object]
#: What a library knows of a class that travels by value: the names that the body of the class needs when its metaclass
#: or its bases look at it, and calls that follow when the class has its attributes, each a function of the class and
#: more arguments.
ClassParts = Callable[[type], tuple[dict[str, Any], list[tuple[Any, ...]]]]
#: The packages for frameworks add to it.
CLASS_PARTS: list[ClassParts] = []


def dump_function(fn: Callable[..., Any], adopt: Adopt) -> bytes:
    """Pickle ``fn`` by value.

    Raises :class:`ShippingError`, which names the captured object that cannot be sent, and the errors of ``adopt`` for
    a handle (a handle whose strategy is shut down is a ShippingError, too).
    """
    return _dump(fn, _Plan(adopt))


def load_function(data: bytes | memoryview, resolve: Resolve) -> Any:
    """A new function from ``data``. Imports the modules that it refers to by name.

    Raises :class:`ShippingError` if an import or the user's own unpickling code fails, and the errors of ``resolve``.
    """
    return _load(data, (), resolve)


def dump_arguments(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], adopt: Adopt, place: Callable[[memoryview], P]
) -> tuple[bytes, tuple[P, ...]]:
    """The pickled arguments of one replica, and the places of their large buffers.

    Contiguous buffers of more than ``INLINE_NBYTES`` are handed to ``place`` in order, each once, after everything
    else has been pickled; other arrays are made contiguous. Raises as :func:`dump_function` does, and the errors of
    ``place``.
    """
    if not args and not kwargs:
        return _NO_ARGUMENTS, ()
    root = (tuple(args), dict(kwargs))
    buffers: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    try:
        _PlainPickler(file, protocol=5, buffer_callback=buffers.append).dump(root)
    except Exception:  # noqa: BLE001  (of whatever it is: what is not plain is pickled, and blamed, below)
        pass
    else:
        file.write(_PLAIN)
        return file.getvalue(), tuple([place(buffer.raw()) for buffer in buffers]) if buffers else ()
    plan = _Plan(adopt, buffers=[])
    data = _dump(root, plan)
    return data, tuple(place(buffer.raw()) for buffer in plan.buffers or ())


def load_arguments(
    data: Buffer, buffers: Sequence[memoryview], resolve: Resolve
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) from ``data`` over ``buffers``, in the order in which they were placed; no copy.

    All NumPy arrays in the arguments are read-only, however small, because large ones lie in memory of the sender.
    Raises as :func:`load_function` does.
    """
    if data == _NO_ARGUMENTS:
        return (), {}
    args, kwargs = _load(data, buffers, resolve)
    return args, kwargs


def are_plain(data: Buffer) -> bool:
    """Whether the arguments in ``data`` are numbers, text and arrays in containers. To load them runs no code of the
    user's, and asks nobody."""
    return data[-1:] == _PLAIN or data == _NO_ARGUMENTS


def digest(data: bytes) -> bytes:
    """The name of a pickled function: 16 bytes."""
    return hashlib.blake2b(data, digest_size=16).digest()


# --- sending ------------------------------------------------------------------------------------------------------


class _Plan:
    """The state of one dump, over all passes until every module is sent with all names that are read of it."""

    def __init__(self, adopt: Adopt, buffers: list[pickle.PickleBuffer] | None = None) -> None:
        self._adopt = adopt
        self._ids: dict[
            int, tuple[Handle, tuple[str, int]]
        ] = {}  # the handle is kept alive, so that its id() stays unique
        self._mentioned: set[int] = set()
        self._spaces: dict[int, _Space] = {}
        self.buffers = buffers  # None for a function, whose arrays are writable
        self.names: set[str] = set()
        self.refused: Exception | None = None  # the error of ``adopt``

    def identify(self, handle: Handle) -> tuple[str, int]:
        """The (kind, number) of ``handle``. Asked for once and the same tuple each time, so that equal dumps have equal
        memos."""
        found = self._ids.get(id(handle))
        if found is None:
            found = self._ids[id(handle)] = (handle, self.ask(handle))
        return found[1]

    def adopt_composite(self, composite: Composite) -> None:
        """Let the strategy take over a composite; its parts are sent then."""
        self.ask(composite)

    def ask(self, owner: Handle | Composite) -> tuple[str, int]:
        """Call ``adopt`` and remember its error."""
        try:
            return self._adopt(owner)
        except Exception as error:
            self.refused = error
            raise

    def mention(self, handle: Handle) -> tuple[Any, ...]:
        """The value that is sent for ``handle``: its (kind, number) and, the first time, its code, which may refer to
        it."""
        number = self.identify(handle)
        code = handle._cs_code()  # noqa: SLF001  (shipping is who it is for)
        if code is None or id(handle) in self._mentioned:
            return number
        self._mentioned.add(id(handle))
        return (*number, code)

    def space(self, values: dict[str, Any]) -> _Space:
        """The stand-in for the module whose globals are ``values``."""
        found = self._spaces.get(id(values))
        if found is None:
            found = self._spaces[id(values)] = _Space(values, self.names)
        return found

    def read(self, name: str, value: Any, reads: Reads) -> Any:
        """The value to pickle for a variable of a function. A module of the user is replaced by a stand-in with the
        attributes that are read of it; everything else is pickled as it is."""
        if not _is_users_module(value):
            return value
        for chain in reads.chains.get(name, ()):
            self._need(value, chain)
        space = self.space(value.__dict__)
        space.escapes |= name in reads.escaping
        return space

    def _need(self, module: ModuleType, chain: tuple[str, ...]) -> None:
        for attribute in chain:
            self.space(module.__dict__).needed.add(attribute)
            module = module.__dict__.get(attribute)  # type: ignore[assignment]
            if not _is_users_module(module):
                return
        self.space(module.__dict__).escapes = True

    def keep(self, buffer: pickle.PickleBuffer) -> bool:
        """Whether ``buffer`` goes into the pickle; a large one is sent separately. (This is not a method of the
        pickler: the sent objects would then live until the garbage collector finds the cycle.)"""
        if memoryview(buffer).nbytes <= INLINE_NBYTES:
            return True
        assert self.buffers is not None
        self.buffers.append(buffer)
        return False

    def begin_pass(self) -> None:
        self._mentioned.clear()
        for space in self._spaces.values():
            space.sent.clear()
        if self.buffers is not None:
            self.buffers.clear()

    def is_complete(self) -> bool:
        return all(space.sent.issuperset(space.wanted()) for space in self._spaces.values())


class _Space:
    """The globals of a module while they are being sent. In the worker they become a module with the sent names."""

    def __init__(self, values: dict[str, Any], names: set[str]) -> None:
        self._values = values
        self._names = names
        self.needed: set[str] = set()
        self.escapes = False  # passed on as a whole, so the code may read every attribute that it names
        self.sent: set[str] = set()

    def wanted(self) -> set[str]:
        """The names that the module in the worker must have."""
        return (self.needed | self._names if self.escapes else self.needed) & self._values.keys()

    def reduce(self, plan: _Plan) -> tuple[Any, ...]:
        basics = {key: self._values[key] for key in ("__package__", "__path__", "__file__") if key in self._values}
        attributes = {}
        for name in sorted(self.wanted()):
            value = attributes[name] = self._values[name]
            if _is_users_module(value) and not self.escapes:
                attributes[name] = plan.space(value.__dict__)
        self.sent.update(attributes)
        return (
            reconstruct.new_module,
            (str(self._values.get("__name__", "")), basics),
            attributes,
            None,
            None,
            reconstruct.fill_module,
        )


class _Cell:
    """A closure's cell while it is being sent: made empty, and filled when the functions that share it exist."""

    def __reduce__(self) -> tuple[Any, ...]:
        return CellType, ()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle, but handles are sent as numbers and everything of the user's modules by value."""

    def __init__(self, file: io.BytesIO, plan: _Plan) -> None:
        arguments = plan.buffers is not None
        super().__init__(file, protocol=5, buffer_callback=plan.keep if arguments else None)
        self._plan = plan
        self._cells: dict[int, _Cell] = {}

    def persistent_id(self, obj: Any) -> tuple[Any, ...] | None:
        if type(obj) in _PARTS:  # this runs for every object
            return None
        if isinstance(obj, Composite):
            self._plan.adopt_composite(obj)  # so that its variables are in the server
        if not isinstance(obj, Handle):
            return None
        mentioned = self._plan.mention(obj)
        return None if mentioned[0] == "foreign" else mentioned

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if isinstance(obj, Handle):
            return obj._cs_parts()  # noqa: SLF001  (only a foreign one has no persistent id)
        if kind is FunctionType:
            by_name = obj in _ARRIVALS or (is_importable(obj) and not is_users(obj.__module__ or ""))
            return NotImplemented if by_name else self._function(obj)
        if kind is _Space:
            return obj.reduce(self._plan)
        if issubclass(kind, type):
            return self._class(obj)
        if issubclass(kind, np.ndarray) and self._plan.buffers is not None:
            return _array_parts(obj)
        if issubclass(kind, ModuleType):
            return self._module(obj)
        special = _SPECIAL.get(kind)
        if special is not None:
            return special(obj)
        if hasattr(kind, "_reduce_states"):
            return _jitted_function(obj)
        if unpicklable.is_unsendable(obj):
            if obj is sys.stdout or obj is sys.stderr:
                return getattr, (sys, "stdout" if obj is sys.stdout else "stderr")
            raise TypeError("it refers to something that exists only in this process")
        return super().reducer_override(obj)

    def _function(self, function: FunctionType) -> tuple[Any, ...]:
        plan, reads, values = self._plan, reads_of(function.__code__), function.__globals__
        plan.names |= reads.names
        found: dict[str, Any] = {}
        module: Any = _library_of(values)  # a library's closure shares the state of the library, in the worker as here
        if module is None:
            module = plan.space(values)
            found = {name: plan.read(name, values[name], reads) for name in reads.global_names if name in values}
            module.sent.update(found)
        cells = function.__closure__ or ()
        contents = tuple(
            plan.read(name, _content(cell), reads)
            for name, cell in zip(function.__code__.co_freevars, cells, strict=True)
        )
        packages = [v for v in (*found.values(), *contents) if isinstance(v, ModuleType) and hasattr(v, "__path__")]
        needed = [name for package in packages for name in submodules(package, reads.names)]
        attributes = {name: getattr(function, name) for name in _FUNCTION_ATTRIBUTES}
        stand_ins = tuple(self._cells.setdefault(id(cell), _Cell()) for cell in cells)
        state = (attributes, dict(function.__dict__), found, contents, needed, _source(function.__code__, reads))
        return (
            reconstruct.new_function,
            (function.__code__, module, stand_ins),
            state,
            None,
            None,
            reconstruct.fill_function,
        )

    def _class(self, cls: type) -> Any:
        if is_users(str(cls.__module__)):
            reduced = by_value._dynamic_class_reduce(cls)  # noqa: SLF001  (the public way is a setting of the process)
        else:
            reduced = super().reducer_override(cls)
        if not isinstance(reduced, tuple) or len(reduced) < 6:
            return reduced
        make, arguments, state, _, _, fill = reduced
        arguments = (*arguments[:-2], reconstruct.remember_class(cls, arguments[-2]), arguments[-1])
        known = [find(cls) for find in CLASS_PARTS]
        return (
            reconstruct.new_class,
            (make, arguments, [body for body, _ in known if body]),
            (state, fill, cls.__qualname__, [call for _, calls in known for call in calls]),
            None,
            None,
            reconstruct.fill_class,
        )

    def _module(self, module: ModuleType) -> Any:
        if not _is_users_module(module):
            return NotImplemented
        space = self._plan.space(module.__dict__)
        space.escapes = True
        return reconstruct.itself, (space,)


class _PlainPickler(pickle.Pickler):
    """Python's own pickler, for containers of numbers, text and arrays of numbers. It calls back only for arrays, while
    cloudpickle calls back for every object. For anything else it raises _NotPlain."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not np.ndarray and type(obj) is not Tensor:
            if obj is reconstruct.array_over:
                return NotImplemented
            raise _NotPlain
        dtype = obj.dtype
        name = _NUMBERS.get(id(dtype))
        if name is not None and obj.nbytes <= INLINE_NBYTES and obj.flags.c_contiguous:  # the usual case
            return reconstruct.array_over, (obj.tobytes(), name, obj.shape, "C")
        if dtype.hasobject or not dtype.itemsize or dtype.names or dtype.metadata:  # which may hold anything
            raise _NotPlain
        return _array_parts(obj)


class _NotPlain(Exception):
    """The value contains something else than arrays, numbers and text in containers."""


#: The text of each dtype that has only one object, by the ``id()`` of that.
_NUMBERS = {id(np.dtype(code)): np.dtype(code).str for code in "?bBhHiIlLqQefdFD"}
#: Types that are neither handles nor composites, and the functions that rebuild arrays.
_PARTS = frozenset({tuple, list, dict, str, bytes, int, float, bool, type(None), np.ndarray, Tensor})
_ARRIVALS = frozenset({reconstruct.array_over, reconstruct.read_only_array})
# The place of the name of the file in the arguments of CodeType.
_FILENAME = 10

_FUNCTION_ATTRIBUTES = (
    "__name__",
    "__qualname__",
    "__module__",
    "__doc__",
    "__defaults__",
    "__kwdefaults__",
    "__annotations__",
)


def _source(code: CodeType, reads: Reads) -> tuple[str, int, list[str]] | None:
    """The lines of a function that is in no file, such as one of a notebook's cell: the name under which this process
    knows them, the number of the first one, and the lines. A worker shows them in its tracebacks."""
    known: tuple[Any, ...] = linecache.cache.get(code.co_filename, ())
    if len(known) != 4 or known[1] is not None:  # a file has a time
        return None
    first = code.co_firstlineno
    return code.co_filename, first, list(known[2][first - 1 : reads.last_line])


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return reconstruct.Empty


def _library_of(values: dict[str, Any]) -> ModuleType | None:
    """The module whose globals are ``values``, if a worker imports it."""
    name = values.get("__name__", "")
    module = sys.modules.get(name)
    return module if module is not None and vars(module) is values and not is_users(name) else None


def _is_users_module(value: Any) -> bool:
    return isinstance(value, ModuleType) and (isinstance(value, reconstruct.ShippedModule) or is_users(value.__name__))


def _array_parts(array: np.ndarray) -> tuple[Any, ...]:
    """The pickled form of an array argument, which arrives read-only: plain arrays as a buffer, others in their own
    way."""
    dtype = array.dtype
    if type(array) not in (np.ndarray, Tensor, np.memmap) or dtype.hasobject or not dtype.itemsize:
        reduced: Any = array.__reduce__()
        return reconstruct.read_only_array, tuple(reduced[:3])
    order: Literal["C", "F"] = "F" if array.flags.fnc else "C"
    buffer: Any
    if array.nbytes <= INLINE_NBYTES:
        buffer = array.tobytes(order)
    else:
        plain: Any = np.ascontiguousarray(array.T if order == "F" else array).reshape(-1).view(np.uint8)
        buffer = pickle.PickleBuffer(plain)
    return reconstruct.array_over, (
        buffer,
        dtype.str if dtype.metadata is None and _has_text(dtype) else dtype,
        array.shape,
        order,
    )


@functools.lru_cache(64)
def _has_text(dtype: np.dtype[Any]) -> bool:
    """Whether the dtype can be rebuilt from its ``str``, metadata apart."""
    return bool(np.dtype(dtype.str) == dtype)


def _dump(root: object, plan: _Plan) -> bytes:
    try:
        while True:
            plan.begin_pass()
            file = io.BytesIO()
            _Pickler(file, plan).dump(root)
            if plan.is_complete():
                return file.getvalue()
    except MemoryError:
        raise
    except Exception as error:
        is_refusal = error is plan.refused  # compared now, because the search for the culprit calls ``adopt`` again
        culprit = unpicklable.find(root, _fails_with(plan), error)
        if not is_refusal or isinstance(error, ShutdownError):
            raise ShippingError(culprit.sentence) from error
        error.add_note(culprit.where)
        raise


def _fails_with(plan: _Plan) -> Callable[[object], Exception | None]:
    """A function that returns why something cannot be sent, or None if it can."""

    def fails(part: object) -> Exception | None:
        trial = _Plan(plan.ask, None if plan.buffers is None else [])
        try:
            _Pickler(io.BytesIO(), trial).dump(part)
        except Exception as error:  # noqa: BLE001  (the user's classes may raise whatever they like)
            return error
        return None

    return fails


# --- receiving ----------------------------------------------------------------------------------------------------


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, buffers: Sequence[memoryview], resolve: Resolve) -> None:
        super().__init__(file, buffers=buffers)
        self._resolve = resolve

    def persistent_load(self, pid: Any) -> object:
        kind, number, *code = pid
        found = self._resolve(kind, number)
        if code and isinstance(found, Handle):
            found._cs_take_code(code[0])  # noqa: SLF001
        return found


def _load(data: Buffer, buffers: Sequence[memoryview], resolve: Resolve) -> Any:
    try:
        if data[-1:] == _PLAIN:
            return pickle.loads(data, buffers=buffers)
        return _Unpickler(io.BytesIO(data), buffers, resolve).load()
    except (CentralStorageError, MemoryError):
        raise
    except ImportError as error:
        raise ShippingError(
            f"the function or its arguments need {error.name or 'a module'}, which this replica cannot import "
            f"({error}): install it where the workers run or, if it is optional, import it inside the function"
        ) from error
    except Exception as error:
        raise ShippingError(
            f"the function or its arguments cannot be unpickled in this replica: {type(error).__name__}: {error}"
        ) from error


# --- objects whose own pickle would import the user's module, or lose their type ------------------------------------


def _cached_function(obj: Any) -> Any:
    if is_importable(obj) and not is_users(obj.__module__):
        return NotImplemented
    return reconstruct.new_cached_function, (obj.__wrapped__, obj.cache_parameters())


def _jitted_function(obj: Any) -> Any:
    """numba has a pickler of its own for compiled functions; here their parts are sent like all others."""
    return reconstruct.new_jitted_function, (obj._reduce_class(), obj._reduce_states())  # noqa: SLF001


def _code(obj: CodeType) -> Any:
    """cloudpickle from 3.1.3 on leaves the name of the file out, which the tracebacks of a worker show."""
    make, arguments = by_value._code_reduce(obj)  # noqa: SLF001
    before, after = arguments[:_FILENAME], arguments[_FILENAME + 1 :]
    return make, (*before, "".join(obj.co_filename), *after)  # a copy: the bytes do not depend on who shares the name


def _cached_property(obj: functools.cached_property[Any]) -> Any:
    return reconstruct.new_cached_property, (obj.func, obj.attrname)


def _type_variable(obj: typing.TypeVar) -> Any:
    if not is_users(obj.__module__ or ""):
        return NotImplemented
    return by_value._make_typevar, by_value._decompose_typevar(obj)  # noqa: SLF001


def _without_data(obj: Any) -> Any:
    return elsewhere, (type(obj),)


def _sentinel(name: str) -> Callable[[Any], Any]:
    return lambda _: (getattr, (dataclasses, name))


_SPECIAL: dict[type, Callable[[Any], Any]] = {
    type(functools.lru_cache(lambda: None)): _cached_function,
    CodeType: _code,
    functools.cached_property: _cached_property,
    typing.TypeVar: _type_variable,
    **dict.fromkeys((DistributedDataset, DistributedFromFunction, DistributedIterator), _without_data),
    # compared by identity when a class is made from another one
    **{type(getattr(dataclasses, name)): _sentinel(name) for name in ("MISSING", "KW_ONLY")},
}
