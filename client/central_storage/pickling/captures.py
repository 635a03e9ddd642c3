"""The objects that a frozen function captures by name, and whether a name has been given another object since.

When a notebook's cell runs again, its names get new variables, models and functions. A function that was frozen before
would continue to train the old ones unnoticed. Numbers and arrays stay as they were frozen.
"""

from __future__ import annotations

import builtins
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

from central_storage.core.composites import Composite
from central_storage.core.handles import Handle

from .code_analysis import is_users, reads_of

__all__ = ["Captures"]

# At most this many parts of a value are searched for variables.
_MOST_PARTS = 10_000
_LEAVES = (str, bytes, int, float, complex, type(None), type, ModuleType, CodeType, FunctionType, Handle, Composite)
# So deep are lists, tuples and dicts searched in each other.
_CONTAINERS, _MOST_KEYS = (list, tuple, dict), 8


class _Missing:
    """In place of the object of a name that has none yet, or no longer."""


_MISSING = _Missing()


class Captures:
    """The names by which a function reads variables, optimizers, objects that hold these, and functions. The user's
    functions that it calls are searched, too, and so are the names that it reads of the user's modules."""

    def __init__(self, function: Callable[..., Any]) -> None:
        # What global variables and cells refer to, if that can be referred to weakly, as most can; and the others.
        self._globals: list[tuple[dict[str, Any], str, weakref.ref[Any]]] = []
        self._cells: list[tuple[CellType, weakref.ref[Any]]] = []
        # Cells of lists, tuples and dicts: the ``id()`` of these, and what is in them.
        self._containers: list[tuple[CellType, int, _Content]] = []
        self._names: list[_Name] = []
        seen, left = set[int](), [function]
        while left:
            each = left.pop()
            plain = getattr(each, "python_function", each)
            plain = plain.__func__ if isinstance(plain, MethodType) else plain
            if not isinstance(plain, FunctionType):  # such as one that is compiled
                plain = getattr(plain, "__wrapped__", plain)
            if not isinstance(plain, FunctionType) or id(plain) in seen:
                continue
            seen.add(id(plain))
            for home, name, value in _read_by(plain):
                if value is _MISSING:
                    self._keep(home, name, value, None)
                elif not _is_code(value):
                    if (handle := _handle_in(value)) is not None:
                        self._keep(home, name, value, handle)
                elif is_users(getattr(value, "__module__", None) or ""):
                    left.append(value)
                    self._keep(home, name, value, None)

    def _keep(self, home: dict[str, Any] | CellType, name: str, value: Any, handle: object) -> None:
        if value is not _MISSING:
            with suppress(TypeError):  # a list, tuple or dict
                if isinstance(home, dict):
                    self._globals.append((home, name, weakref.ref(value)))
                else:
                    self._cells.append((home, weakref.ref(value)))
                return
            if handle is not None and not isinstance(home, dict):
                self._containers.append((home, id(value), _Content(value, handle)))
                return
        self._names.append(_Name(home, name, value, handle))

    def hold(self) -> bool:
        """Whether every name still refers to the same object."""
        for home, name, known in self._globals:
            value = home.get(name)
            if value is None or value is not known():  # which is None if the object is gone
                return False
        try:
            for cell, known in self._cells:
                if (value := cell.cell_contents) is None or value is not known():  # as above
                    return False
            for cell, known_id, content in self._containers:
                if id(value := cell.cell_contents) != known_id or not content.holds(value):
                    return False
        except ValueError:  # it is empty
            return False
        for each in self._names:  # noqa: SIM110  (a generator costs more than the few names, at every step)
            if not each.holds():
                return False
        return True


class _Name:
    """A name and the object that it referred to. The object is not kept alive."""

    def __init__(self, home: dict[str, Any] | CellType, name: str, value: Any, handle: object) -> None:
        self._home = home
        self._name = name
        self._id = id(value)
        try:
            self._value: Callable[[], Any] | None = weakref.ref(value)
        except TypeError:  # a list, tuple or dict
            self._value = None if handle is not None else lambda: value
            self._content = _Content(value, _MISSING if handle is None else handle)

    def holds(self) -> bool:
        home = self._home
        value = home.get(self._name, _MISSING) if isinstance(home, dict) else _value_of(home, self._name)
        if self._value is not None:
            return value is not None and value is self._value()  # which is None if the object is gone
        return id(value) == self._id and self._content.holds(value)


class _Content:
    """What a list, tuple or dict has: a new one may have the ``id()`` of the old one, and then has something else.

    One part is kept, and the keys that lead to it: a variable, optimizer or composite, or an object that holds one.
    """

    def __init__(self, value: Any, handle: object) -> None:
        self._keys: list[Any] = []
        part = value
        while issubclass(type(part), _CONTAINERS) and len(self._keys) < _MOST_KEYS:  # it may contain itself
            pairs = part.items() if issubclass(type(part), dict) else enumerate(part)
            with_handle = (pair for pair in reversed([*pairs]) if _handle_in(pair[1]) is not None)
            key, part = next(with_handle, (None, handle))
            self._keys.append(key)
        try:
            self._part: weakref.ref[Any] = weakref.ref(part)
        except TypeError:  # an object with slots
            self._part = weakref.ref(handle)

    def holds(self, value: Any) -> bool:
        """Whether ``value`` has that part, at the same place or, if it was changed itself, at another. One that was
        emptied holds, too: the function goes on with what it was frozen with."""
        part, known = value, self._part()
        try:
            for key in self._keys:
                part = part[key]
        except (LookupError, TypeError):
            part = None
        is_there = known is not None and (part is known or any(each is known for each in _parts_of(value)))
        return is_there or _handle_in(value) is None


_Found: TypeAlias = "tuple[dict[str, Any] | CellType, str, Any]"


def _read_by(function: FunctionType) -> Iterator[_Found]:
    names, reads = function.__globals__, reads_of(function.__code__)
    found: list[_Found] = [
        (names, name, names.get(name, _MISSING))
        for name in reads.global_names
        if name in names or not hasattr(builtins, name)
    ]
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        found.append((cell, name, _value_of(cell, name)))
    for home, name, value in found:
        yield home, name, value
        yield from _read_of(value, reads.chains.get(name, frozenset()))


def _read_of(module: object, chains: Iterable[tuple[str, ...]]) -> Iterator[_Found]:
    """The names of a module of the user, which travels by value, that are read in these chains of attributes."""
    if isinstance(module, ModuleType) and is_users(module.__name__):
        for name, *rest in chains:
            value = vars(module).get(name, _MISSING)
            yield vars(module), name, value
            if rest:
                yield from _read_of(value, [tuple(rest)])


def _value_of(home: dict[str, Any] | CellType, name: str) -> Any:
    if isinstance(home, dict):
        return home.get(name, _MISSING)
    try:
        return home.cell_contents
    except ValueError:  # it is empty
        return _MISSING


def _is_code(value: Any) -> bool:
    """Whether ``value`` is a function or class, or a function that a decorator has compiled or wrapped."""
    return isinstance(value, FunctionType | type) or hasattr(value, "python_function") or hasattr(value, "__wrapped__")


def _handle_in(value: object) -> object | None:
    """A variable, optimizer or composite in ``value``; None if there is none."""
    return next((each for each in _parts_of(value) if issubclass(type(each), Handle | Composite)), None)


def _parts_of(value: object) -> Iterator[object]:
    """``value`` and what it holds, but not what variables, optimizers and composites hold."""
    seen, left = set[int](), [value]
    while left and len(seen) < _MOST_PARTS:
        each = left.pop()
        yield each
        kind = type(each)  # isinstance would ask a proxy for its object, which may be gone
        if id(each) not in seen and not issubclass(kind, _LEAVES):
            seen.add(id(each))
            left += gc.get_referents(each)
