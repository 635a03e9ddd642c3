"""``cs.function``: a function whose captured values are frozen when a strategy first runs it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any, NamedTuple, overload

__all__ = ["Function", "Pickled", "function"]


class Pickled(NamedTuple):
    """A pickled function, its digest, and the handles in it by identity. The handles are held, so that their variables
    exist for as long as the function is sent."""

    data: bytes
    digest: bytes
    handles: dict[int, object]


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


#: Keywords of tf.function in older and newer versions, which change nothing here.
_EXPERIMENTAL = frozenset(
    f"experimental_{name}"
    for name in ["attributes", "autograph_options", "compile", "follow_type_hints", "implements", "relax_shapes"]
)


@overload
def function(fn: Callable[..., Any]) -> Function: ...
@overload
def function(
    fn: None = None,
    *,
    input_signature: object = None,
    jit_compile: bool | None = None,
    autograph: bool = True,
    reduce_retracing: bool = False,
    **experimental: object,
) -> Callable[[Callable[..., Any]], Function]: ...
@overload
def function(
    fn: Callable[..., Any] | None,
    *,
    input_signature: object = None,
    jit_compile: bool | None = None,
    autograph: bool = True,
    reduce_retracing: bool = False,
    **experimental: object,
) -> Any: ...
def function(
    fn: Callable[..., Any] | None = None,
    *,
    input_signature: object = None,
    jit_compile: bool | None = None,
    autograph: bool = True,
    reduce_retracing: bool = False,
    **experimental: object,
) -> Any:
    """Decorate a replica function, so that it is sent once: ``@cs.function`` or ``@cs.function()``.

    Its captured values are those of the first ``run`` of each strategy, and what it mutates lives in each worker until
    that worker is restarted. A method is one function for each object, and ``self`` is a captured value. It takes the
    place of ``tf.function`` in TensorFlow's examples. Nothing is traced or compiled, so the keywords of ``tf.function``
    are accepted and change nothing.

    Args:
        fn: The function. None: what is returned is the decorator.
        input_signature: Accepted, such as the ``element_spec`` of a data set.
        jit_compile: Accepted.
        autograph: Accepted.
        reduce_retracing: Accepted.
        **experimental: Accepted, where ``tf.function`` has such a keyword, for example ``experimental_relax_shapes``.

    Raises:
        TypeError: ``fn`` cannot be called, or ``tf.function`` has no such keyword.

    Examples:
        >>> import central_storage as cs
        >>> @cs.function
        ... def step(x):
        ...     return x + 1
        >>> with cs.CentralStorageStrategy(in_process=True) as strategy:
        ...     strategy.run(step, (1,))
        2
    """
    for keyword in experimental.keys() - _EXPERIMENTAL:
        raise TypeError(f"cs.function() got an unexpected keyword argument {keyword!r}")
    if fn is None:
        return function
    return fn if isinstance(fn, Function) else Function(fn)
