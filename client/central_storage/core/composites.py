"""Objects made of several variables: metrics and moving averages.

They have no number of their own in the server. Between processes one travels as its class, its attributes and the
handles of its variables; ``pickling.pickler`` and ``wire_values.value_codec`` do the same. There it becomes the one
object of that process that is made of those variables, so ``is`` holds as for a handle. That costs the server nothing.
A class of the user's that derives from one of them travels, too.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backends import Strategy

__all__ = ["Composite", "rebuild"]


class Composite:
    """Base of what is made of variables. Attributes of the instance travel; those of the vocabulary also come back."""

    def adopt(self, strategy: Strategy) -> None:
        """Become an object of ``strategy``, before the variables travel. Raises ContextError where it is another's."""
        raise NotImplementedError

    def _cs_key(self) -> tuple[Hashable, ...]:
        """What makes this object what it is: two of a class with the same key are one. The ``id()`` of a part that
        the object holds, say. Empty where nothing does."""
        raise NotImplementedError

    def _cs_state(self) -> dict[str, Any]:
        """What travels."""
        return dict(vars(self))

    def _cs_update(self, state: dict[str, Any]) -> None:
        """Take over the state of the same object in another process."""
        vars(self).update(state)

    def __reduce_ex__(self, protocol: object) -> tuple[Callable[..., Composite], tuple[type, dict[str, Any]]]:
        _known(self)  # what comes back is this object
        return rebuild, (type(self), self._cs_state())


# By class and key.
_objects: weakref.WeakValueDictionary[tuple[object, ...], Composite] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def rebuild(cls: type[Composite], state: dict[str, Any], update: bool = True) -> Composite:
    """The object of this process that ``state`` describes, made where there is none; with ``update`` its attributes
    become those of ``state``."""
    made = cls.__new__(cls)
    made._cs_update(state)
    found = _known(made)
    if found is not made and update:
        found._cs_update(state)
    return found


def _known(composite: Composite) -> Composite:
    key = composite._cs_key()
    if not key:
        return composite
    with _lock:
        return _objects.setdefault((type(composite), *key), composite)
