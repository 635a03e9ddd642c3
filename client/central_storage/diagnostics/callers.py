"""The line of the user's program that called this project, for messages and warnings."""

from __future__ import annotations

import functools
import sys
import warnings
import weakref
from types import FrameType
from typing import Any

from cs_proto.printable import printable

__all__ = ["OURS", "call_site", "is_ours", "root_package", "warn", "warn_deprecated"]

#: The packages of this project.
OURS = frozenset({"central_storage", "cs_proto", "cs_runtime", "cs_server", "cs_worker"})
_said: weakref.WeakKeyDictionary[object, set[str]] = weakref.WeakKeyDictionary()


def is_ours(frame: FrameType) -> bool:
    """Whether the frame runs code of this project. An example in a docstring has the globals of its module, and is a
    user's code all the same."""
    return root_package(frame) in OURS and not frame.f_code.co_filename.startswith("<doctest")


def root_package(frame: FrameType) -> str:
    """The package of the frame's module, without its sub-packages."""
    return _root_of(str(frame.f_globals.get("__name__")))


@functools.lru_cache(1024)
def _root_of(module: str) -> str:
    return module.partition(".")[0]


#: By file, what Python's filters know of the warnings shown. Globals hold it elsewhere, and a replica's function has
#: new globals in every run.
_shown: dict[str, dict[object, object]] = {}


def call_site() -> str:
    """``file:line`` of the nearest caller outside this project."""
    frame = _caller()
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def warn(message: str, category: type[Warning]) -> None:
    """``warnings.warn`` at the line of the nearest caller outside this project.

    A ``stacklevel`` would count this project's frames, whose number depends on how a public name was reached.
    """
    frame = _caller()
    name = frame.f_code.co_filename
    registry: dict[Any, Any] = _shown.setdefault(name, {})
    warnings.warn_explicit(
        printable(message, lines=True), category, name, frame.f_lineno, frame.f_globals.get("__name__"), registry
    )


def warn_deprecated(owner: object, name: str, instead: str) -> None:
    """Warn the user, once for each ``owner``, that ``name`` is deprecated and ``instead`` replaces it."""
    said = _said.setdefault(owner, set())
    if name not in said:
        said.add(name)
        warn(f"{name} is deprecated; use {instead}", DeprecationWarning)


def _caller() -> FrameType:
    frame = sys._getframe(1)  # noqa: SLF001  (the one way to a caller without building a whole stack)
    while frame.f_back is not None and is_ours(frame):
        frame = frame.f_back
    return frame
