"""The names by which the user's code still reaches an object, and so keeps it alive.

In a notebook these are names of earlier cells, the results that IPython keeps (``Out``), and the frames of the last
exception.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType, FrameType, FunctionType, ModuleType, TracebackType
from typing import Any

__all__ = ["holders"]

# The search ends after this many objects, so that a large heap does not delay the training.
_MOST_OBJECTS = 200_000
# Values of these types are not searched: they refer to nothing that the user holds, or to every module.
_LEAVES = (str, bytes, int, float, complex, bool, type(None), type, ModuleType, CodeType)
# Names that IPython adds to those of a notebook. The results ``_``, ``__`` and ``_3`` are in ``Out`` as well.
_SHELL = frozenset({"In", "get_ipython", "exit", "quit", "open", "_ih", "_oh", "_dh", "_", "__", "___"})


def holders(target: object, namespace: Mapping[str, Any]) -> list[str]:
    """The names in ``namespace`` from which ``target`` is reached, and the last exception if its traceback reaches it.

    >>> held = object()
    >>> holders(held, {"model": {"layer": [held]}, "other": 1, "Out": {3: held}})
    ['model', 'Out[3]']
    """
    search = _Search(target, namespace)
    found = [name for name, value in _named(namespace) if search.reaches(value)]
    errors = [getattr(sys, name, None) for name in ("last_exc", "last_value", "last_traceback")]
    if any(error is not None and search.reaches(error) for error in errors):
        found.append("the traceback of the last exception (sys.last_value)")
    return found


def _named(namespace: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in list(namespace.items()):
        if name == "Out" and isinstance(value, dict):
            yield from ((f"Out[{number}]", result) for number, result in list(value.items()))
        elif name not in _SHELL and not (name[:1] == "_" and name[1:].isdecimal()) and name[:2] != "_i":
            yield name, value


class _Search:
    """Searches for one object. An object that was searched in vain is not searched again. The search does not enter
    other objects of the target's class, since they share its parts, and not the namespace as a whole."""

    def __init__(self, target: object, namespace: Mapping[str, Any]) -> None:
        self._target = target
        shell = getattr(
            namespace.get("get_ipython"), "__self__", None
        )  # IPython's frames refer to it, and it refers to everything
        # The object is kept so that its id() stays unique.
        self._seen: dict[int, object] = {id(each): each for each in (namespace, shell)}
        self._leaves = (*_LEAVES, type(target)) if type(target) is not object else _LEAVES

    def reaches(self, start: object) -> bool:
        """Whether the target is ``start`` or is reached from it."""
        waiting = [start]
        while waiting and len(self._seen) < _MOST_OBJECTS:
            each = waiting.pop()
            if each is self._target:
                return True
            # isinstance would ask a proxy for its object, which may be gone
            if issubclass(type(each), self._leaves) or id(each) in self._seen:
                continue
            self._seen[id(each)] = each
            waiting += _parts(each)
        return False


def _parts(value: Any) -> Iterable[object]:
    """The objects that ``value`` refers to, without the globals of functions, which would connect all names."""
    kind = type(value)
    if kind is FunctionType:
        return [value.__closure__, value.__defaults__, value.__kwdefaults__, vars(value)]
    if kind is TracebackType:
        return [value.tb_frame, value.tb_next]
    if kind is FrameType:
        return [] if value.f_locals is value.f_globals else list(value.f_locals.values())
    return gc.get_referents(value)
