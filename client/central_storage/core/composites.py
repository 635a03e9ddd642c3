"""Objects made of several variables: metrics and moving averages.

A composite has no number of its own in the server. It travels as its class, its attributes and the handles of its
variables, in ``pickling.pickler`` and in ``wire_values.value_codec``. In the receiving process it becomes the one
object that is made of those variables, so ``is`` holds as for a handle. That costs the server nothing. A user's class
that derives from a composite travels, too.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

from .public_objects import Closed

if TYPE_CHECKING:
    from .backends import Strategy

__all__ = ["Composite", "rebuild"]


class Composite(Closed):
    """Base of objects made of variables. All attributes travel to a worker; those of the vocabulary also come back."""

    def adopt(self, strategy: Strategy) -> None:
        """Become an object of ``strategy``, before the variables travel. Raises ContextError if it belongs to another
        one."""
        raise NotImplementedError

    def _cs_key(self) -> tuple[Hashable, ...]:
        """The identity of this object: two objects of a class with the same key are the same one. For example the
        ``id()`` of a part that the object holds. Empty if the object has no identity."""
        raise NotImplementedError

    def _cs_state(self) -> dict[str, Any]:
        """The attributes that travel."""
        return dict(vars(self))

    def _cs_update(self, state: dict[str, Any]) -> None:
        """Take over the state of the same object in another process."""
        vars(self).update(state)

    def __reduce_ex__(self, protocol: object) -> tuple[Callable[..., Composite], tuple[type, dict[str, Any]]]:
        _known(self)  # so that this object is found when it comes back
        return rebuild, (type(self), self._cs_state())


# By class and key.
_objects: weakref.WeakValueDictionary[tuple[object, ...], Composite] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def rebuild(cls: type[Composite], state: dict[str, Any], update: bool = True) -> Composite:
    """The object of this process that ``state`` describes, made if there is none; with ``update`` its attributes
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
