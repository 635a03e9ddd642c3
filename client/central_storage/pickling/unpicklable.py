"""Finds why an object cannot be sent to a replica: the smallest part that cannot, with the names that lead to it.

``pickler`` calls it only after a pickle has failed, because it tries every part on its own, which is slow. This module
knows nothing of pickling.
"""

from __future__ import annotations

import contextlib
import functools
import io
import socket
import subprocess
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import (
    AsyncGeneratorType,
    CoroutineType,
    FrameType,
    FunctionType,
    GeneratorType,
    MethodType,
    ModuleType,
    TracebackType,
)
from typing import Any

from central_storage.core.handles import Handle
from cs_proto.frozen import frozen
from cs_proto.records import shown

from .code_analysis import is_users, reads_of

__all__ = ["Culprit", "find", "is_unsendable"]

# (classes, their description, the remedy). The first match counts.
_KINDS: list[tuple[tuple[type, ...], str, str]] = [
    ((io.BytesIO, io.StringIO), "", ""),
    ((io.IOBase,), "an open file", "open it inside the function, or pass its data instead"),
    (
        (GeneratorType, AsyncGeneratorType, CoroutineType),
        "a running generator",
        "pass what it yields (a list or an array) as an argument",
    ),
    (
        (threading.Thread,),
        "a thread",
        "replicas are other processes; start it inside the function",
    ),
    (
        (
            type(threading.Lock()),
            type(threading.RLock()),
            threading.Condition,
            threading.Event,
            threading.Semaphore,
            threading.Barrier,
        ),
        "a lock",
        "it does not work across processes, and replicas are processes; make it inside the function",
    ),
    ((threading.local,), "thread-local data", "pass the values instead"),
    ((socket.socket,), "a socket", "connect inside the function"),
    ((subprocess.Popen,), "a child process", "start it inside the function, or pass its output"),
    ((FrameType, TracebackType), "a stack frame", "pass its text (the traceback module) instead"),
    ((weakref.ref, weakref.ProxyType), "a weak reference", "pass the object itself"),
]
_ITERATOR = ("a running iterator", "every run would get a copy that begins at its current position; pass its elements")
_ELSEWHERE = {
    "zmq": ("a ZeroMQ context or socket", "connect inside the function"),
    "concurrent": ("a pool or a future", "make it inside the function, or pass the results"),
    "multiprocessing": ("an object of multiprocessing", "make it inside the function"),
    "asyncio": ("a part of an event loop", "pass results instead"),
    "sqlite3": ("a database connection", "connect inside the function"),
    "ssl": ("a connection", "connect inside the function"),
}
_FALLBACK = "make it inside the function, or pass plain data instead"


@frozen
class Culprit:
    """The object that cannot be sent: ``where`` says how it is reached, ``sentence`` is the error text."""

    where: str
    sentence: str


def is_unsendable(obj: Any) -> bool:
    """Whether ``obj`` must not be sent even if a pickler could: the copy of an iterator would start again in each
    run."""
    return _kind_of(type(obj)) is not None


def find(root: Any, fails: Callable[[object], Exception | None], error: Exception | None = None) -> Culprit:
    """The smallest part of ``root`` that ``fails``. ``root`` is a function or a pair (args, kwargs)."""
    is_pair = isinstance(root, tuple)
    way = [_Step("", root, error, _parts_of_arguments(root) if is_pair else _parts(root))]
    tried: dict[int, tuple[object, bool]] = {id(root): (root, True)}  # kept alive, so that every id() stays unique
    while not way[-1].is_the_end:
        step = way[-1]
        for label, part in step.parts:
            if id(part) in tried:
                step.is_cyclic |= tried[id(part)][1]
                continue
            failed = fails(part)
            tried[id(part)] = (part, failed is not None)
            if failed is not None:
                way.append(_Step(label, part, failed, _parts(part)))
                break
        else:
            if not step.is_cyclic or len(way) == 1:
                break
            way.pop()  # it fails because of an object that contains it, which is still being searched
    where = _in_words("" if is_pair else _title(root), [step.label for step in way[1:]])
    return Culprit(where, where + _reason(way[-1].part, way[-1].error))


@dataclass
class _Step:
    """A part that cannot be sent, on the way from the root to the culprit."""

    label: str
    part: Any
    error: Exception | None
    parts: Iterator[tuple[str, object]]
    is_cyclic: bool = False

    @property
    def is_the_end(self) -> bool:
        """Whether a search inside would find nothing."""
        if isinstance(self.part, Handle) or _known(self.part) is not None:
            return True
        return bool(self.label) and _is_too_deep(self.error)


def _in_words(title: str, labels: list[str]) -> str:
    """The way from the object ``title`` to the culprit along ``labels``, in words. ``.attribute`` and ``[item]`` belong
    to the name before them; other labels are names that code uses."""
    names: list[str] = []
    for label in labels:
        if names and label[0] in ".[":
            names[-1] += label
        else:
            names.append(label.lstrip("."))
    if not names:
        return title or "this call"
    reached = ", which captures ".join(map(repr, names))
    return f"{title} captures {reached}" if title else f"argument {reached}"


def _title(root: Any) -> str:
    if isinstance(root, functools.partial):
        return f"partial of {_title(root.func)}"
    kind = "method" if isinstance(root, MethodType) else "function" if isinstance(root, FunctionType) else "callable"
    return f"{kind} {getattr(root, '__qualname__', type(root).__qualname__).rpartition('<locals>.')[2]!r}"


def _reason(culprit: Any, error: Exception | None) -> str:
    name = f"{type(culprit).__module__}.{type(culprit).__qualname__}".removeprefix("builtins.")
    if isinstance(culprit, Handle):
        return f" (a {name}), which cannot be sent to a replica: {error}"
    if _is_too_deep(error):
        return f" (a {name}), which is nested too deeply to be sent to a replica; pass it in a flatter form"
    known = _known(culprit)
    if known is not None:
        what, remedy = known
        return f" ({what}, {name}): it cannot be sent to a replica; {remedy}"
    return f" (a {name}): it cannot be sent to a replica; {_FALLBACK} ({type(error).__name__}: {error})"


def _is_too_deep(error: BaseException | None) -> bool:
    return isinstance(error, RecursionError) or isinstance(getattr(error, "__cause__", None), RecursionError)


def _known(part: Any) -> tuple[str, str] | None:
    return _kind_of(type(part)) or _ELSEWHERE.get(type(part).__module__.partition(".")[0])


_kinds: weakref.WeakKeyDictionary[type, tuple[str, str] | None] = weakref.WeakKeyDictionary()


def _kind_of(cls: type) -> tuple[str, str] | None:
    if cls not in _kinds:
        _kinds[cls] = _look_up(cls)
    return _kinds[cls]


def _look_up(cls: type) -> tuple[str, str] | None:
    for classes, what, remedy in _KINDS:
        if issubclass(cls, classes):
            return (what, remedy) if what else None
    if cls.__module__ in ("builtins", "itertools") and hasattr(cls, "__next__"):
        return _ITERATOR
    return None


# --- the parts of objects, with their labels: ``.attribute``, ``[item]``, or a name in code -------------------------


def _parts(owner: Any) -> Iterator[tuple[str, object]]:
    kind = type(owner)
    if kind is FunctionType:
        yield from _parts_of_function(owner)
    elif kind is MethodType:
        yield "self", owner.__self__
        yield from _parts_of_function(owner.__func__)
    elif isinstance(owner, type):
        yield from ((f".{name}", value) for name, value in vars(owner).items())
    elif kind in (staticmethod, classmethod):
        yield ".__func__", owner.__func__
    elif kind is property:
        yield from ((f".{name}", getattr(owner, name)) for name in ("fget", "fset", "fdel"))
    elif kind in (list, tuple, set, frozenset):
        yield from ((f"[{n}]", value) for n, value in enumerate(owner))
    elif kind is dict:
        yield from _parts_of_dict(owner.items())
    elif kind is functools.partial:
        yield ".func", owner.func
        yield from ((f".args[{n}]", value) for n, value in enumerate(owner.args))
        yield from ((f".keywords[{shown(key)}]", value) for key, value in owner.keywords.items())
    else:
        yield from _parts_by_reduce(owner)


def _parts_of_arguments(root: tuple[tuple[Any, ...], dict[str, Any]]) -> Iterator[tuple[str, object]]:
    args, kwargs = root
    yield from ((f"args[{n}]", value) for n, value in enumerate(args))
    yield from ((f"kwargs[{shown(key)}]", value) for key, value in kwargs.items())


def _parts_of_function(function: Any) -> Iterator[tuple[str, object]]:
    code, reads = function.__code__, reads_of(function.__code__)
    variables = {name: function.__globals__[name] for name in reads.global_names if name in function.__globals__}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # an empty cell
            variables[name] = cell.cell_contents
    for name, value in variables.items():
        if isinstance(value, ModuleType) and is_users(value.__name__):
            chains = set(reads.chains.get(name, ()))
            if name in reads.escaping:
                chains |= {(attribute,) for attribute in reads.names & vars(value).keys()}
            for chain in sorted(chains):
                yield _end_of_chain(name, value, chain)
        else:
            yield name, value
    defaults = function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    yield from zip((f"the default of {name}" for name in names), defaults, strict=True)
    yield from ((f"the default of {name}", value) for name, value in (function.__kwdefaults__ or {}).items())
    yield from ((f"the annotation of {name}", value) for name, value in function.__annotations__.items())
    yield from ((f".{name}", value) for name, value in vars(function).items())


def _end_of_chain(name: str, value: Any, chain: tuple[str, ...]) -> tuple[str, object]:
    """Follow attributes as long as they lead through the user's modules: ``pkg.model.w`` of ``pkg.model.w.numpy``."""
    for attribute in chain:
        if not isinstance(value, ModuleType):
            break
        name, value = f"{name}.{attribute}", vars(value).get(attribute)
    return name, value


def _parts_of_dict(items: Iterable[tuple[Any, Any]]) -> Iterator[tuple[str, object]]:
    for key, value in items:
        yield f"[{shown(key)}]", value
        yield f"[key {shown(key)}]", key


def _parts_by_reduce(owner: Any) -> Iterator[tuple[str, object]]:
    """The parts that a pickle of ``owner`` would have; none if it refuses to be pickled, because then it is the
    culprit."""
    try:
        reduced = owner.__reduce_ex__(4)
    except Exception:  # noqa: BLE001  (the user's classes may raise whatever they like)
        return
    if not isinstance(reduced, tuple):
        return
    _, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
    for part in arguments:
        yield ".__class__" if isinstance(part, type) else "[...]", part
    states = state if isinstance(state, tuple) else (state,)
    for part in states:
        if isinstance(part, dict):
            yield from ((f".{name}", value) for name, value in part.items())
        elif part is not None:
            yield "[...]", part
    yield from ((f"[{n}]", value) for n, value in enumerate(items or ()))
    yield from _parts_of_dict(pairs or ())
