"""Tracebacks that show the user's own frames: an exception that leaves this project loses the project's frames.

Users look for a line of their own. The project's frames help only its maintainers, and in a notebook they keep objects
alive until the next exception. ``CS_TRACEBACK=full`` keeps the frames. They also stay if the exception shows a mistake
in the project's own code.
"""

from __future__ import annotations

import dis
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, TypeVar

from .callers import is_ours, root_package

__all__ = ["ENVIRONMENT", "shorten", "shortened"]

F = TypeVar("F", bound=Callable[..., Any])

#: The environment variable that keeps all frames if it is ``full``.
ENVIRONMENT = "CS_TRACEBACK"
_RAISE = dis.opmap["RAISE_VARARGS"]
# In these methods, NumPy refuses an operation of the user.
_ON_VALUES = frozenset({"__array__", "__array_ufunc__", "__array_function__", "__getitem__"})
# Errors of the operating system, which this project lets pass.
_OF_OTHERS = (OSError, MemoryError)


def shortened(function: F) -> F:
    """``function``, with exceptions that show no frame of this project.

    >>> from central_storage import nest
    >>> import traceback
    >>> try:
    ...     shortened(nest.map_structure)(lambda each: 1 / each, [0])
    ... except ZeroDivisionError as error:
    ...     [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    ['<module>', '<lambda>']
    """
    if inspect.isgeneratorfunction(function):

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return (yield from function(*args, **kwargs))
            except BaseException as error:
                _leaving(error)
                raise

    elif inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return await function(*args, **kwargs)
            except BaseException as error:
                _leaving(error)
                raise

    else:

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except BaseException as error:
                _leaving(error)
                raise  # which adds no frame to the traceback

    return call  # type: ignore[return-value]


def _leaving(error: BaseException) -> None:
    """Shorten ``error`` if the wrapper that calls this was called from outside this project."""
    caller = sys._getframe(1).f_back  # noqa: SLF001  (the one way to a caller); None at exit and in a new thread
    if caller is None or not is_ours(caller):
        shorten(error)


def shorten(error: BaseException) -> BaseException:
    """``error``, without this project's frames in its traceback and in those of its causes and parts."""
    if os.environ.get(ENVIRONMENT) == "full" or _is_unforeseen(error):
        return error
    seen, left = set[int](), [error]
    while left:
        each = left.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        each.__traceback__ = _without_ours(each.__traceback__)
        left += [other for other in (each.__cause__, each.__context__) if other is not None]
        if isinstance(each, BaseExceptionGroup):
            left += each.exceptions
    return error


def _is_unforeseen(error: BaseException) -> bool:
    """Whether the error shows a mistake in this project: a line of it failed and did not raise or pass on an error."""
    entries = _entries(error.__traceback__)
    if not entries or not is_ours(entries[-1].tb_frame) or not isinstance(error, Exception):
        return False
    innermost = entries[-1]
    if type(error) is AssertionError:  # of an assert statement, which raises it, too; a class of ours is on purpose
        return True
    code = innermost.tb_frame.f_code
    is_raised = code.co_code[innermost.tb_lasti] == _RAISE
    return not is_raised and not isinstance(error, _OF_OTHERS) and code.co_name not in _ON_VALUES


def _without_ours(traceback: TracebackType | None) -> TracebackType | None:
    """Also without the frames of the standard library between two of ours."""
    entries = _entries(traceback)
    ours = [place for place, entry in enumerate(entries) if is_ours(entry.tb_frame)]
    kept: TracebackType | None = None
    for place, entry in reversed(list(enumerate(entries))):
        is_between = ours and ours[0] < place < ours[-1]
        if not (place in ours or (is_between and root_package(entry.tb_frame) in sys.stdlib_module_names)):
            kept = TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return kept


def _entries(traceback: TracebackType | None) -> list[TracebackType]:
    def entries() -> Iterator[TracebackType]:
        entry = traceback
        while entry is not None:
            yield entry
            entry = entry.tb_next

    return list(entries())
