"""``cs.function``: a function whose captured values are frozen when a strategy first runs it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any, NamedTuple, TypeAlias, overload

from central_storage.core.handles import Hold

from .captures import Captures

__all__ = ["Function", "Pickled", "Pickles", "drop_stale", "function"]


class Pickled(NamedTuple):
    """A pickled function, its digest, and what keeps the variables and optimizers in it, for as long as the function is
    sent; the name under which its runs are counted, where they are."""

    data: bytes
    digest: bytes
    holds: set[Hold]
    name: str = ""


#: By service, what was sent of a function, and by which names it captured what is in there.
Pickles: TypeAlias = "weakref.WeakKeyDictionary[object, tuple[Pickled, Captures]]"


def drop_stale(pickles: Pickles, owner: object) -> None:
    """Drop what ``owner`` would send anew anyway: it holds what nobody can reach any more."""
    known = pickles.get(owner)
    if known is not None and not known[1].hold():
        del pickles[owner]


class _Bound:
    """The method of one object. It does not hold the object, so the object needs no garbage collector to go, and what
    it holds in the server goes with it."""

    def __init__(self, instance: object = None, python_function: Callable[..., Any] | None = None) -> None:
        self._instance = None if instance is None else weakref.ref(instance)
        self._python_function = python_function
        self._bound: Callable[[], Function | None] = _gone
        self._pickles: Pickles = weakref.WeakKeyDictionary()

    def is_of(self, instance: object, python_function: Callable[..., Any]) -> bool:
        """Whether it belongs to this object: a copied object has that of the original."""
        return self._instance is not None and self._instance() is instance and self._python_function is python_function

    def function(self, instance: object) -> Function:
        """The function that calls the method of ``instance``."""
        found = self._bound()
        if found is None:
            assert self._python_function is not None
            found = Function(MethodType(self._python_function, instance), self._pickles)
            self._bound = weakref.ref(found)
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return _Bound, ()


def _gone() -> None:
    return None


class Function:
    """A replica function that is sent once. A call outside ``run`` simply calls the function."""

    def __init__(
        self,
        python_function: Callable[..., Any],
        pickles: Pickles | None = None,
    ) -> None:
        if not callable(python_function):
            raise TypeError(f"cs.function takes a function, not {python_function!r}")
        self.python_function = python_function
        functools.update_wrapper(self, python_function)
        self._key = f"cs.function {getattr(python_function, '__qualname__', '')}"
        #: What was sent of it.
        self.pickles: Pickles = weakref.WeakKeyDictionary() if pickles is None else pickles

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.python_function(*args, **kwargs)

    def __set_name__(self, owner: type, name: str) -> None:
        self._key = f"cs.function {owner.__module__}.{owner.__qualname__}.{name}"

    def __get__(self, instance: object, owner: type | None = None) -> Function:
        """As a method: one function for each object. The ``__dict__`` of the object has what was sent of it."""
        if instance is None:
            return self
        known = vars(instance).get(self._key)
        if not isinstance(known, _Bound) or not known.is_of(instance, self.python_function):
            known = vars(instance)[self._key] = _Bound(instance, self.python_function)
        return known.function(instance)

    def pickle_for(self, owner: object, dump: Callable[[Callable[..., Any]], Pickled]) -> Pickled:
        """The pickle that ``owner`` (a service) sends: made at its first call, and the same from then on, while its
        :class:`Captures` hold."""
        pickled, captures = self.pickles.get(owner, (None, None))
        if pickled is None or captures is None or not captures.hold():
            pickled = dump(self.python_function)
            self.pickles[owner] = pickled, Captures(self.python_function)
        return pickled

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
    that worker is restarted. If a name that it reads gets another variable, optimizer, model, function or class, or its
    first value, as when a notebook's cell is run or a module of yours is reloaded, it is sent anew. The names that
    functions and modules of yours read or hold count, too; numbers and arrays, and attributes of objects, do not. A
    method is one function for each object, and ``self`` is a captured
    value. It takes the place of ``tf.function`` in TensorFlow's examples. Nothing is traced or compiled, so the
    keywords of ``tf.function`` are accepted and change nothing.

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
