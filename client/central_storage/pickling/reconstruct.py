"""What comes out of a pickle: the functions that pickles of ``pickler`` name, and what they make.

They run where something is received. What they make of classes is remembered, so a class stays one class per process
however often it comes, and can be found again by its name when a named tuple or an exception refers to it.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import sys
import threading
import weakref
from collections.abc import Callable
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, Literal

import numpy as np

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
    """The class itself stands for the content of a cell that has none."""


class ShippedModule(ModuleType):
    """A module of the user's as sent to a replica: only what the sent code reads of it."""

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
    """Add what the sent code reads of a module."""
    module.__dict__.update(attributes)


def itself(module: ModuleType) -> ModuleType:
    """The module: its stand-in in the sender and the module are one thing here."""
    return module


def new_function(code: CodeType, module: ModuleType, cells: tuple[CellType, ...]) -> FunctionType:
    """A bare function over the globals of ``module``; its cells are filled later, since they may hold it."""
    return FunctionType(code, module.__dict__, closure=cells or None)


def fill_function(function: FunctionType, state: tuple[Any, ...]) -> None:
    """Give a function its attributes, globals and captured values; import packages that it addresses by attribute."""
    attributes, own, found, contents, needed = state
    for name in needed:
        importlib.import_module(name)
    for name, value in attributes.items():
        setattr(function, name, value)
    function.__dict__.update(own)
    function.__globals__.update(found)
    for cell, content in zip(function.__closure__ or (), contents, strict=True):
        if content is not Empty:
            cell.cell_contents = content


class _Classes:
    """The classes that travel by value: by the number that cloudpickle gives a class in the process where it is at
    home, and by ``module:qualname``. At home a class is never filled: the original is what the user has."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.by_tracker: weakref.WeakValueDictionary[str, type] = weakref.WeakValueDictionary()
        self.by_origin: weakref.WeakValueDictionary[str, type] = weakref.WeakValueDictionary()
        self.received: weakref.WeakSet[type] = weakref.WeakSet()
        self.lock = threading.RLock()


class _Here(threading.local):
    """What this thread knows: what its process does, unless it stands for a process of its own."""

    classes = _Classes("")


_here = _Here()
# Between cloudpickle's number of a class and the place where a copy of it is.
_AT = "@"


def keep_classes_apart(place: str) -> None:
    """Let this thread have classes of its own from now on, as a process called ``place`` would have."""
    _here.classes = _Classes(place)


def remember_class(cls: type, tracker: str) -> str:
    """Note that ``cls`` is sent by value: what comes back under its name is this class. The number that it travels
    under, which is the one of its home."""
    known, number = _here.classes, tracker.partition(_AT)[0]
    known.by_tracker[number] = cls
    known.by_origin[f"{cls.__module__}:{cls.__qualname__}"] = cls
    return number


def new_class(make: Callable[..., type], arguments: tuple[Any, ...]) -> type:
    """The class that cloudpickle's ``make`` would build, built at most once in this process."""
    known, number = _here.classes, arguments[-2]
    with known.lock:
        cls = known.by_tracker.get(number)
        if cls is None:
            own = f"{number}{_AT}{known.place}" if known.place else number  # cloudpickle's numbers are the process's
            cls = known.by_tracker[number] = make(*arguments[:-2], own, arguments[-1])
            known.received.add(cls)
        return cls


def fill_class(cls: type, state: tuple[Any, Callable[[type, Any], object], str]) -> None:
    """Give a class the attributes that it was sent with; methods see the captured values of the moment."""
    attributes, fill, qualname = state
    known = _here.classes
    if cls in known.received:
        cls.__qualname__ = qualname
        known.by_origin[f"{cls.__module__}:{qualname}"] = cls
        fill(cls, attributes)


def class_named(origin: str) -> type | None:
    """The class called ``module:qualname`` as far as this process has it: sent or received by value, or in a module
    that is imported already. Runs no code of the user; imports nothing."""
    shipped = _here.classes.by_origin.get(origin)
    if shipped is not None:
        return shipped
    module, _, qualname = origin.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    return found if isinstance(found, type) else None


def array_over(buffer: Any, dtype: Any, shape: tuple[int, ...], order: Literal["C", "F"]) -> np.ndarray:
    """The read-only array over ``buffer``."""
    array: np.ndarray = np.ndarray(shape, dtype, buffer, order=order)
    array.flags.writeable = False
    return array


def read_only_array(make: Callable[..., np.ndarray], arguments: tuple[Any, ...], state: Any) -> np.ndarray:
    """An array that is made in its own way, then made read-only."""
    array = make(*arguments)
    array.__setstate__(state)
    array.flags.writeable = False
    return array


def new_cached_function(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    """A function under ``functools.lru_cache``, with an empty cache."""
    return functools.lru_cache(**parameters)(function)


def new_jitted_function(cls: Any, states: dict[str, Any]) -> Any:
    """A function under ``numba.jit``: numba gives the one it has already made of these parts, compiled."""
    return cls._rebuild(**states)


def new_cached_property(function: Callable[..., Any], name: str | None) -> functools.cached_property[Any]:
    """A ``functools.cached_property`` that knows its name, though no class body has told it."""
    made = functools.cached_property(function)
    made.attrname = name
    return made
