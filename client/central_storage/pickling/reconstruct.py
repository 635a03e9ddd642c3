"""The functions that the pickles of ``pickler`` call when they are loaded.

They run in the receiver. They remember the classes that they make, so a class stays one class per process however often
it arrives, and a named tuple or an exception can refer to it by name.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import linecache
import sys
import threading
import weakref
from collections.abc import Callable
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, Literal

import numpy as np

from central_storage.core.tensors.tensor import Tensor

__all__ = [
    "Empty",
    "ShippedModule",
    "array_over",
    "class_named",
    "fill_class",
    "fill_function",
    "fill_module",
    "itself",
    "keep_classes_apart",
    "new_cached_function",
    "new_cached_property",
    "new_class",
    "new_function",
    "new_jitted_function",
    "new_module",
    "read_only_array",
    "remember_class",
]


class Empty:
    """The class itself is the marker for an empty cell."""


class ShippedModule(ModuleType):
    """A module of the user as sent to a replica: only the names that the sent code reads."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"of module {self.__name__!r}, only the names that the function uses were sent to this replica, and "
            f"{name!r} is not among them; write {self.__name__.rpartition('.')[2]}.{name} in the function",
            name=name,
            obj=self,
        )


def new_module(name: str, basics: dict[str, Any]) -> ModuleType:
    """An empty module that stands for the one called ``name`` in the sender."""
    module = ShippedModule(name)
    module.__dict__.update(basics, __builtins__=builtins)
    return module


def fill_module(module: ModuleType, attributes: dict[str, Any]) -> None:
    """Add the names that the sent code reads of a module."""
    module.__dict__.update(attributes)


def itself(module: ModuleType) -> ModuleType:
    """Return the module: here it takes the place of the sender's stand-in."""
    return module


def new_function(code: CodeType, module: ModuleType, cells: tuple[CellType, ...]) -> FunctionType:
    """A bare function over the globals of ``module``; its cells are filled later, since they may hold it."""
    return FunctionType(code, module.__dict__, closure=cells or None)


def fill_function(function: FunctionType, state: tuple[Any, ...]) -> None:
    """Give a function its attributes, globals and captured values; import packages that it addresses by attribute."""
    attributes, own, found, contents, needed, source = state
    if source is not None:
        _show_in_tracebacks(*source)
    for name in needed:
        importlib.import_module(name)
    for name, value in attributes.items():
        setattr(function, name, value)
    function.__dict__.update(own)
    function.__globals__.update(found)
    for cell, content in zip(function.__closure__ or (), contents, strict=True):
        if content is not Empty:
            cell.cell_contents = content


def _show_in_tracebacks(name: str, first: int, lines: list[str]) -> None:
    """Let tracebacks show the lines of a function that is in no file of this process."""
    known = linecache.cache.get(name, ())
    text: list[str] = list(known[2]) if len(known) == 4 else []
    text += ["\n"] * (first - 1 + len(lines) - len(text))
    text[first - 1 : first - 1 + len(lines)] = lines
    linecache.cache[name] = (sum(map(len, text)), None, text, name)


class _Classes:
    """The classes that travel by value, by the number that cloudpickle gives a class in its home process, and by
    ``module:qualname``. The home process never fills a class, because the user has the original."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.by_tracker: weakref.WeakValueDictionary[str, type] = weakref.WeakValueDictionary()
        self.by_origin: weakref.WeakValueDictionary[str, type] = weakref.WeakValueDictionary()
        self.received: weakref.WeakSet[type] = weakref.WeakSet()
        self.lock = threading.RLock()


class _Here(threading.local):
    """The classes of this thread: those of its process, unless the thread acts as a process of its own."""

    classes = _Classes("")


_here = _Here()
# Separates cloudpickle's number of a class from the place of a copy.
_AT = "@"


def keep_classes_apart(place: str) -> None:
    """Give this thread its own classes from now on, like a process with the name ``place``."""
    _here.classes = _Classes(place)


def remember_class(cls: type, tracker: str) -> str:
    """Remember that ``cls`` is sent by value, so that its name leads back to this class. Returns the number that it is
    sent with, which is the one of its home process."""
    known, number = _here.classes, tracker.partition(_AT)[0]
    known.by_tracker[number] = cls
    known.by_origin[f"{cls.__module__}:{cls.__qualname__}"] = cls
    return number


def new_class(make: Callable[..., type], arguments: tuple[Any, ...], bodies: list[dict[str, Any]]) -> type:
    """The class that cloudpickle's ``make`` would build, built at most once in this process. While it is made it has
    the names in ``bodies``, too."""
    known, number = _here.classes, arguments[-2]
    with known.lock:
        cls = known.by_tracker.get(number)
        if cls is None:
            own = (
                f"{number}{_AT}{known.place}" if known.place else number
            )  # cloudpickle numbers the classes of a process
            for body in bodies:
                arguments[3].update(body)  # of a skeleton: its attributes
            cls = known.by_tracker[number] = make(*arguments[:-2], own, arguments[-1])
            for body in bodies:
                for name in body.keys() & vars(cls).keys():
                    delattr(cls, name)
            known.received.add(cls)
        return cls


def fill_class(cls: type, state: tuple[Any, Callable[[type, Any], object], str, list[tuple[Any, ...]]]) -> None:
    """Give a class the attributes that it was sent with; its methods see the latest captured values."""
    attributes, fill, qualname, calls = state
    known = _here.classes
    if cls in known.received:
        cls.__qualname__ = qualname
        known.by_origin[f"{cls.__module__}:{qualname}"] = cls
        fill(cls, attributes)
        for function, *more in calls:
            function(cls, *more)


def class_named(origin: str) -> type | None:
    """The class ``module:qualname``, if this process has it: sent or received by value, or in an imported module.
    Runs no code of the user and imports nothing."""
    shipped = _here.classes.by_origin.get(origin)
    if shipped is not None:
        return shipped
    module, _, qualname = origin.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    return found if isinstance(found, type) else None


def array_over(buffer: Any, dtype: Any, shape: tuple[int, ...], order: Literal["C", "F"]) -> Tensor:
    """The read-only array over ``buffer``."""
    array: Tensor = np.ndarray.__new__(Tensor, shape, dtype, buffer, order=order)
    array.flags.writeable = False
    return array


def read_only_array(make: Callable[..., np.ndarray], arguments: tuple[Any, ...], state: Any) -> np.ndarray:
    """Make an array in its own way, then make it read-only."""
    array = make(*arguments)
    array.__setstate__(state)
    array.flags.writeable = False
    return array


def new_cached_function(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    """A function under ``functools.lru_cache``, with an empty cache."""
    return functools.lru_cache(**parameters)(function)


def new_jitted_function(cls: Any, states: dict[str, Any]) -> Any:
    """A function under ``numba.jit``. If numba has compiled these parts already, it returns that function."""
    return cls._rebuild(**states)


def new_cached_property(function: Callable[..., Any], name: str | None) -> functools.cached_property[Any]:
    """A ``functools.cached_property`` with its name, which normally the class body sets."""
    made = functools.cached_property(function)
    made.attrname = name
    return made
