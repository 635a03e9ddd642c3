"""``cs.function``: a function whose captured values are frozen when a strategy first runs it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["Function", "Pickled", "function"]


class Pickled(NamedTuple):
    """A pickled function, the digest by which both ends know it, and the handles that it has met, by identity: held,
    so that what they stand for is there for as long as it is sent."""

    data: bytes
    digest: bytes
    handles: dict[int, object]


class Function:
    """A replica function that is sent once. Called outside ``run`` it just runs."""

    def __init__(self, python_function: Callable[..., Any]) -> None:
        if not callable(python_function):
            raise TypeError(f"cs.function takes a function, not {python_function!r}")
        self.python_function = python_function
        functools.update_wrapper(self, python_function)
        self._pickles: weakref.WeakKeyDictionary[object, Pickled] = weakref.WeakKeyDictionary()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.python_function(*args, **kwargs)

    def pickle_for(self, owner: object, dump: Callable[[Callable[..., Any]], Pickled]) -> Pickled:
        """The pickle that ``owner`` (a service) sends: made at its first call, the same ever after."""
        if owner not in self._pickles:
            self._pickles[owner] = dump(self.python_function)
        return self._pickles[owner]

    def __reduce__(self) -> tuple[Any, ...]:
        return (Function, (self.python_function,))


def function(fn: Callable[..., Any]) -> Function:
    """Decorate a replica function: captured values are those of the first ``run`` of each strategy, the function is
    sent once, and what it mutates lives in each worker until that worker is restarted.

    The counterpart of ``tf.function`` in the API pages; nothing is traced.
    """
    return fn if isinstance(fn, Function) else Function(fn)
