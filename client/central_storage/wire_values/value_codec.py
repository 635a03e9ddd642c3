"""Results of a replica: data of a closed vocabulary, never code.

Results, the arguments of merge_call and exceptions travel as ``Value`` and ``Error`` records. The vocabulary: None,
bool, int, float, complex, str, bytes, the enums of ``central_storage.core.values``, NumPy dtypes; list, tuple, dict,
OrderedDict, defaultdict (without its factory), named tuples that the receiver has; IndexedSlices, PerReplica, Mirrored
and handles; objects that are like arrays of a dtype that can be sent. NumPy scalars are arrays of rank 0. Anything else
raises a :class:`~cs_proto.errors.ResultError` that names it. This module never unpickles, imports or calls anything
that a peer names, with one exception: it builds an exception of the user's class if this process already has that
class.
"""

from __future__ import annotations

import contextlib
import traceback
from typing import Any

from central_storage.diagnostics.tracebacks import shorten
from central_storage.pickling.reconstruct import class_named
from cs_proto.arrays import array_of
from cs_proto.errors import (
    CODES,
    MemoryPlanError,
    PeerProtocolError,
    ReplicaError,
    ResultError,
    code_of,
    replica_exception_class,
)
from cs_proto.failures import error_of, text_of
from cs_proto.messages import Error
from cs_proto.printable import printable
from cs_proto.records import replace

from .body_codec import Place, Resolve, View, from_value, to_value

__all__ = ["from_value", "to_error", "to_exception", "to_value"]


def to_error(exc: BaseException, replica: int, merge_index: int, place: Place) -> Error:
    """``exc`` as data: the nearest listed class, its arguments, and its traceback without frames of this project.

    Arguments that do not belong to the vocabulary are replaced by ``str(exc)``; such attributes of a user's class are
    left out. ``merge_index`` is the number of merge points that ``replica`` had passed.
    """
    arguments: tuple[Any, ...] = exc.args
    if isinstance(exc, OSError):
        reduced: Any = exc.__reduce__()
        arguments = reduced[1]  # with the names of files, which args lacks
    error = error_of(exc, replica, merge_index, "".join(traceback.format_exception(shorten(exc))))
    if _is_data(arguments):
        error = replace(error, exception=code_of(type(exc)))
    else:
        arguments = (error.message,)
    attributes = {name: value for name, value in vars(exc).items() if name[:2] != "__" and _is_data({name: value})}
    try:
        value = to_value((arguments, attributes), place)
    except MemoryPlanError:  # no room for large arrays among the arguments must not hide the exception
        value = to_value(((error.message,), {}), array_of)
    return replace(error, arguments=value)


def to_exception(error: Error, view: View, resolve: Resolve, node: str = "") -> BaseException:
    """The exception to raise for ``error``, with its traceback as a note that names the replica's ``node``.

    If its original class is not in the closed table and this process has that class, the exception is of that class.
    Otherwise it is of the table's class, or of a base class that takes the arguments. ``replica`` and ``merge_index``
    are set unless the class has such attributes of its own. Raises :class:`PeerProtocolError` for a code that is not in
    the table.
    """
    arguments, attributes = _read_arguments(error, view, resolve)
    exc = _as_raised(error, arguments, attributes) or _as_listed(error.exception, arguments)
    if isinstance(exc, ReplicaError) or not hasattr(exc, "replica"):
        vars(exc).update(replica=error.replica, merge_index=error.merge_index)
    place = f"in replica {error.replica}{f' on {node}' if node else ''}"
    where = f"{place} (merge point {error.merge_index})" if error.replica >= 0 else "in the service"
    if error.replica >= 0 or error.traceback:
        trace = printable(_without_last(error.traceback, exc), lines=True)
        exc.add_note(f"{where}:\n{trace}".rstrip(":\n"))
    return exc


def _without_last(remote: str, exc: BaseException) -> str:
    """The traceback without its last line, if Python prints the same line right above it as that of ``exc``."""
    name = type(exc).__name__.removeprefix("Replica")
    return remote.removesuffix(f"\n{name}: {exc}\n" if str(exc) else f"\n{name}\n")


def _is_data(obj: object) -> bool:
    try:
        to_value(obj, array_of, "argument")
    except ResultError:
        return False
    return True


def _read_arguments(error: Error, view: View, resolve: Resolve) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if error.arguments is None:
        return (text_of(error),), {}
    try:
        parts = from_value(error.arguments, view, resolve)
    except ResultError:  # a named tuple that only the sender has
        return (text_of(error),), {}
    if type(parts) is tuple and list(map(type, parts)) == [tuple, dict] and all(type(name) is str for name in parts[1]):
        return parts
    raise PeerProtocolError(f"the arguments of a {error.exception} are not a tuple and attributes by name")


def _as_raised(error: Error, arguments: tuple[Any, ...], attributes: dict[str, Any]) -> Exception | None:
    """The exception in its original class; None if the table decides the class, or if it cannot be built."""
    cls = class_named(error.origin)
    if cls is None or not issubclass(cls, Exception) or cls.__module__ == "builtins" or cls in CODES.values():
        return None
    if code_of(cls) != error.exception:
        return None
    for make in (_construct, _restore):
        try:
            exc = make(cls, arguments)
            if not isinstance(exc, OSError):
                exc.args = arguments
            vars(exc).update(attributes)
            str(exc)
        except Exception:  # noqa: BLE001  (the user's constructor, called with what is left of its arguments)
            continue
        if type(exc) is cls:
            return exc
    return None


def _construct(cls: type[Exception], arguments: tuple[Any, ...]) -> Exception:
    return cls(*arguments)


def _restore(cls: type[Exception], arguments: tuple[Any, ...]) -> Exception:
    """An exception whose constructor takes other arguments than it has passed to its base: built by its base."""
    exc = cls.__new__(cls, *arguments)
    base = next(ancestor for ancestor in cls.__mro__ if ancestor.__module__ == "builtins")
    base.__init__(exc, *arguments)  # type: ignore[misc]
    return exc


def _as_listed(code: str, arguments: tuple[Any, ...]) -> BaseException:
    kind = replica_exception_class(code)
    bases = [CODES[base.__name__] for base in kind.__mro__ if CODES.get(base.__name__) not in (None, kind)]
    for cls in (kind, *bases):
        with contextlib.suppress(TypeError):  # a UnicodeDecodeError needs more than a message
            exc = cls(*arguments)
            if isinstance(exc, SystemExit):
                SystemExit.__init__(exc, *arguments)  # which Exception.__init__ hides
            return exc
    return ReplicaError(*arguments)
