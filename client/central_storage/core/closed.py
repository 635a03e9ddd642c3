"""Public objects refuse attributes that they do not have: a misspelt name is an error, not a value nobody reads."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

__all__ = ["Closed"]

_PACKAGE = str(Path(__file__).parents[1])


class Closed:
    """Base of every public class with attributes.

    Only this package adds public attributes to its objects. A class of the user's that derives from one of ours may add
    its own, but none whose name differs only in case and underscores from one that can be set.
    """

    __slots__ = ()

    def __setattr__(self, name: str, value: Any) -> None:
        cls = type(self)
        if not name.startswith("_") and not hasattr(cls, name) and not self._may_add(name, sys._getframe(1)):  # noqa: SLF001  (the caller)
            raise AttributeError(unknown(cls, name))
        object.__setattr__(self, name, value)

    def _may_add(self, name: str, caller: Any) -> bool:
        if name in getattr(self, "__dict__", ()) or caller.f_code.co_filename.startswith(_PACKAGE):
            return True
        cls = type(self)
        is_ours = cls.__module__.partition(".")[0] == __name__.partition(".")[0] and (
            getattr(sys.modules[cls.__module__], cls.__name__, None) is cls  # not so where a docstring defines it
        )
        return not is_ours and all(_bare(name) != _bare(known) for known in settable(cls))


def settable(cls: type) -> list[str]:
    """The public properties of ``cls`` that can be set."""
    return [name for name in dir(cls) if name[0] != "_" and getattr(getattr(cls, name, None), "fset", None)]


def unknown(cls: type, name: str) -> str:
    """What an error says about an attribute that objects of ``cls`` do not have."""
    import difflib  # late: only mistakes need it

    known = settable(cls)
    public = [*known, *(each for each in dir(cls) if each[0] != "_" and each not in known)]
    near = difflib.get_close_matches(name, public, 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    can = f"; what can be set: {', '.join(known)}" if known else ""
    return f"{cls.__name__} has no attribute {name!r}{hint}{can}"


def _bare(name: str) -> str:
    return name.replace("_", "").lower()
