"""The line of the user's program that called this project, for messages and warnings."""

from __future__ import annotations

import functools
import sys
import warnings
import weakref
from types import CodeType, FrameType
from typing import Any

from cs_proto.printable import printable

__all__ = ["OURS", "call_site", "is_ours", "root_package", "warn", "warn_deprecated"]

#: The packages of this project.
OURS = frozenset({"central_storage", "cs_proto", "cs_runtime", "cs_server", "cs_worker"})
_said: weakref.WeakKeyDictionary[object, set[str]] = weakref.WeakKeyDictionary()


def is_ours(frame: FrameType) -> bool:
    """Whether the frame runs code of this project. An example in a docstring has the globals of its module, and is a
    user's code all the same."""
    return _is_of_project(str(frame.f_globals.get("__name__")), frame.f_code.co_filename)


def root_package(frame: FrameType) -> str:
    """The package of the frame's module, without its sub-packages."""
    return str(frame.f_globals.get("__name__")).partition(".")[0]


@functools.lru_cache(1024)
def _is_of_project(module: str, file: str) -> bool:
    return module.partition(".")[0] in OURS and not file.startswith("<doctest")


#: The texts of the last call sites, by the identity of the code, which is held so that no other code gets it, and the
#: place of the call in it.
_sites: dict[tuple[int, int], tuple[CodeType, str]] = {}
_SITES = 256

#: By file, what Python's filters know of the warnings shown. Globals hold it elsewhere, and a replica's function has
#: new globals in every run.
_shown: dict[str, dict[object, object]] = {}


def call_site() -> str:
    """``file:line`` of the nearest caller outside this project."""
    frame = _caller()
    code = frame.f_code
    key = (id(code), frame.f_lasti)
    known = _sites.get(key)
    if known is None:
        if len(_sites) >= _SITES:
            _sites.clear()
        known = _sites[key] = code, f"{code.co_filename}:{frame.f_lineno}"
    return known[1]


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
    outer = frame.f_back
    try:
        # What :func:`is_ours` says, without a call for each frame.
        while outer is not None and _is_of_project(str(frame.f_globals["__name__"]), frame.f_code.co_filename):
            frame, outer = outer, outer.f_back
    except KeyError:  # a user's code without a module
        pass
    return frame
