"""``cs.function``: a function whose captured values are frozen when a strategy first runs it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any, NamedTuple

from central_storage.core.handles import Hold

__all__ = ["Function", "Pickled", "function"]


class Pickled(NamedTuple):
    """A pickled function, its digest, and what keeps the variables and optimizers in it, for as long as the function is
    sent."""

    data: bytes
    digest: bytes
    holds: set[Hold]


class Function:
    """A replica function that is sent once. A call outside ``run`` simply calls the function."""

    def __init__(self, python_function: Callable[..., Any]) -> None:
        if not callable(python_function):
            raise TypeError(f"cs.function takes a function, not {python_function!r}")
        self.python_function = python_function
        functools.update_wrapper(self, python_function)
        self._key = f"cs.function {getattr(python_function, '__qualname__', '')}"
        self._pickles: weakref.WeakKeyDictionary[object, Pickled] = weakref.WeakKeyDictionary()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.python_function(*args, **kwargs)

    def __set_name__(self, owner: type, name: str) -> None:
        self._key = f"cs.function {owner.__module__}.{owner.__qualname__}.{name}"

    def __get__(self, instance: object, owner: type | None = None) -> Function:
        """As a method: one function for each object, stored in its ``__dict__`` so that it lives as long as the
        object."""
        if instance is None:
            return self
        method = MethodType(self.python_function, instance)
        bound = vars(instance).get(self._key)
        if (
            not isinstance(bound, Function) or bound.python_function != method
        ):  # a copied object has the function of the original
            bound = vars(instance)[self._key] = Function(method)
        return bound

    def pickle_for(self, owner: object, dump: Callable[[Callable[..., Any]], Pickled]) -> Pickled:
        """The pickle that ``owner`` (a service) sends: made at its first call, and the same from then on."""
        if owner not in self._pickles:
            self._pickles[owner] = dump(self.python_function)
        return self._pickles[owner]

    def __reduce__(self) -> tuple[Any, ...]:
        return (Function, (self.python_function,))


def function(fn: Callable[..., Any]) -> Function:
    """Decorate a replica function, so that it is sent once.

    Its captured values are those of the first ``run`` of each strategy, and what it mutates lives in each worker until
    that worker is restarted. A method is one function for each object, and ``self`` is a captured value. It takes the
    place of ``tf.function`` in TensorFlow's examples; nothing is traced.

    Args:
        fn: The function.

    Raises:
        TypeError: ``fn`` cannot be called.

    Examples:
        >>> import central_storage as cs
        >>> @cs.function
        ... def step(x):
        ...     return x + 1
        >>> with cs.CentralStorageStrategy(in_process=True) as strategy:
        ...     strategy.run(step, (1,))
        2
    """
    return fn if isinstance(fn, Function) else Function(fn)
