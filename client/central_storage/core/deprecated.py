"""Warnings for names that still work but have a better one."""

from __future__ import annotations

import weakref

from central_storage.diagnostics.callers import warn

__all__ = ["warn_deprecated"]

_said: weakref.WeakKeyDictionary[object, set[str]] = weakref.WeakKeyDictionary()


def warn_deprecated(owner: object, name: str, instead: str) -> None:
    """Warn the user, once for each ``owner``, that ``name`` is deprecated and ``instead`` replaces it."""
    said = _said.setdefault(owner, set())
    if name not in said:
        said.add(name)
        warn(f"{name} is deprecated; use {instead}", DeprecationWarning)
