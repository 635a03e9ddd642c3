"""Frozen classes like those of ``@dataclass(frozen=True)``, which compile their constructor on first use.

A process defines about a hundred such classes at its start and makes objects of twenty. :mod:`dataclasses` would
compile six methods for every class at once, and its import takes a tenth of a supervisor's start. Here all classes
share their methods, except ``__init__``, which is compiled for the first object. ``dataclasses.fields`` and
``dataclasses.replace`` work, and import :mod:`dataclasses` only then.

Defaults are plain values; a class that needs ``field(default_factory=...)`` is a dataclass.
"""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import Any, TypeVar, dataclass_transform, overload

__all__ = ["fields_of", "frozen", "name_fields", "refuse_change", "refuse_deletion", "with_changes"]

T = TypeVar("T")


@overload
@dataclass_transform(frozen_default=True)
def frozen(cls: type[T], /) -> type[T]: ...


@overload
@dataclass_transform(frozen_default=True)
def frozen(*, eq: bool) -> Callable[[type[T]], type[T]]: ...


def frozen(cls: type[T] | None = None, /, *, eq: bool = True) -> Any:
    """Class decorator: as ``dataclass(frozen=True, eq=eq)``. Methods of the class itself are kept; a class with its own
    ``__eq__`` has its own ``__hash__`` or none."""
    if cls is None:
        return lambda made: _made(made, eq)
    return _made(cls, eq)


def _made(cls: type[T], eq: bool) -> type[T]:
    name_fields(cls)
    own = cls.__dict__
    methods: dict[str, Any] = {"__setattr__": refuse_change, "__delattr__": refuse_deletion, "__repr__": _shown}
    if eq and "__eq__" not in own:
        methods |= {"__eq__": _is_equal, "__hash__": _hashed}
    for name, method in methods.items():
        if name not in own:
            setattr(cls, name, method)

    def build(self: T, *values: Any, **named: Any) -> None:
        _compile(cls)
        cls.__init__(self, *values, **named)

    cls.__init__ = build  # type: ignore[assignment, method-assign]
    return cls


def name_fields(cls: type) -> None:
    """Declare the fields of ``cls``: to ``match`` at once, to :mod:`dataclasses` on demand."""
    inherited = dict.fromkeys(name for base in cls.__mro__[:0:-1] for name in base.__dict__.get("__match_args__", ()))
    own = [name for name, kind in cls.__annotations__.items() if "ClassVar[" not in str(kind)]
    cls.__match_args__ = (*inherited, *(name for name in own if name not in inherited))  # type: ignore[attr-defined, misc]
    cls.__dataclass_fields__ = _Fields(cls)  # type: ignore[attr-defined]


def fields_of(cls: type) -> tuple[str, ...]:
    """The names of the fields, in order."""
    names: tuple[str, ...] = cls.__match_args__  # type: ignore[attr-defined]
    return names


class _Fields:
    """The place of ``__dataclass_fields__``, until :mod:`dataclasses` asks for the fields."""

    def __init__(self, cls: type) -> None:
        self._cls = cls

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        from dataclasses import dataclass  # late: no process of a service asks

        dataclass(init=False, repr=False, eq=False)(self._cls)
        return self._cls.__dict__["__dataclass_fields__"]


def _compile(cls: type) -> None:
    known: dict[str, Any] = {}
    parameters = []
    for name in fields_of(cls):
        if hasattr(cls, name):
            known[f"_d_{name}"] = getattr(cls, name)
        parameters.append(f"{name}=_d_{name}" if hasattr(cls, name) else name)
    lines = [f"def __init__(_self, {', '.join(parameters)}):", " _values = _self.__dict__"]
    lines += [f" _values[{name!r}] = {name}" for name in fields_of(cls)]  # not _self.x, which a frozen class refuses
    if hasattr(cls, "__post_init__"):
        lines.append(" _self.__post_init__()")
    # Compiled first: exec of a text loses a Ctrl-C that ends the program.
    exec(compile("\n".join(lines), f"<{cls.__qualname__}>", "exec"), known)
    known["__init__"].__qualname__ = f"{cls.__qualname__}.__init__"
    cls.__init__ = known["__init__"]  # type: ignore[misc]


def with_changes(value: T, /, **changes: Any) -> T:
    """A copy with other values of some fields; as :func:`dataclasses.replace`."""
    return type(value)(**(value.__dict__ | changes))


def refuse_change(self: object, name: str, value: object) -> typing.NoReturn:
    """The ``__setattr__`` of every frozen class."""
    from dataclasses import FrozenInstanceError  # late: no process of a service tries

    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def refuse_deletion(self: object, name: str) -> typing.NoReturn:
    """The ``__delattr__`` of every frozen class."""
    from dataclasses import FrozenInstanceError

    raise FrozenInstanceError(f"cannot delete field {name!r}")


def _is_equal(self: object, other: object) -> bool:
    return self.__dict__ == other.__dict__ if type(other) is type(self) else NotImplemented


def _hashed(self: object) -> int:
    return hash(tuple(self.__dict__.values()))


def _shown(self: object) -> str:
    return f"{type(self).__qualname__}({', '.join(f'{name}={value!r}' for name, value in self.__dict__.items())})"
