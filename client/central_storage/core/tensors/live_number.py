"""Numbers of an optimizer that are read anew at every use, as TensorFlow's variables are."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, NoReturn, Protocol, Self

import numpy as np

from central_storage.core.public_objects import Closed

from .tensor import Tensor

__all__ = ["Change", "LiveNumber"]


class _Owner(Protocol):
    """What a number knows of its optimizer."""

    name: str

    def number_of(self, key: str) -> int | float:
        """The present value of ``iterations`` or of a hyperparameter."""


_Operator = Callable[["LiveNumber", Any], Any]


def _both(function: Callable[[Any, Any], Any]) -> tuple[_Operator, _Operator]:
    """An operator with the number on its left, and with it on its right."""
    return lambda self, other: function(self.number, other), lambda self, other: function(other, self.number)


def _in_place(function: Callable[[Any, Any], Any]) -> Callable[[LiveNumber, Any], Change]:
    """An operator such as ``+=``."""
    return lambda self, other: Change(self, function(self.number, other))


class LiveNumber(Closed):
    """``optimizer.iterations``, ``optimizer.learning_rate`` or another hyperparameter: a number that follows its
    optimizer, wherever it is kept.

    Every use reads the present value: arithmetic, comparisons, ``int()``, ``float()``, formatting, NumPy's functions,
    and ``range`` or an index for ``iterations``. Results are plain numbers. ``int(x)`` or ``float(x)`` is the value of
    this moment, for a dict's key, for JSON, or to keep. It travels into replica functions and follows there, too; a
    replica that returns it returns the number of that moment.

    Examples:
        >>> import central_storage as cs
        >>> optimizer = cs.optimizers.SGD(0.5)
        >>> step, rate = optimizer.iterations, optimizer.lr
        >>> optimizer.iterations = 7
        >>> _ = rate.assign(0.25)
        >>> int(step), step < 8, step.assign_add(1) % 3, rate * 2, f"{step:03d}"
        (7, True, 2, 0.5, '008')
    """

    __slots__ = ("_key", "_optimizer")

    def __init__(self, optimizer: _Owner, key: str) -> None:
        self._optimizer = optimizer
        self._key = key

    @property
    def number(self) -> int | float:
        """The present value, a Python number."""
        return self._optimizer.number_of(self._key)

    @property
    def assigned(self) -> int | float:
        """The number that an assignment of this object means."""
        return self.number

    @property
    def is_count(self) -> bool:
        """Whether it is ``iterations``, an int."""
        return self._key == "iterations"

    @property
    def name(self) -> str:
        """The optimizer's name and its own: ``Adam/iterations``."""
        return f"{self._optimizer.name}/{self._key}"

    @property
    def dtype(self) -> np.dtype[Any]:
        """int64 for ``iterations``, float64 for a hyperparameter."""
        return np.dtype(np.int64 if self.is_count else np.float64)

    @property
    def shape(self) -> tuple[()]:
        """No axes."""
        return ()

    @property
    def trainable(self) -> bool:
        """False."""
        return False

    def value(self) -> np.ndarray:
        """The present value as a tensor without axes."""
        return np.array(self.number, self.dtype).view(Tensor)

    read_value = value

    def numpy(self) -> Any:
        """The present value as a NumPy scalar."""
        return self.dtype.type(self.number)

    def assign(self, value: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True) -> Self:
        """Set the number of the optimizer. In the script only, between runs.

        Args:
            value: A number.
            use_locking: Accepted; it changes nothing.
            name: Accepted; it changes nothing.
            read_value: Accepted; it changes nothing.

        Raises:
            InvalidArgumentError: The number is out of its range (a ValueError).
            TypeError: ``iterations`` is to be something else than an integer.
            ContextError: Called in a replica (a RuntimeError).

        Examples:
            >>> import central_storage as cs
            >>> optimizer = cs.optimizers.SGD(0.5)
            >>> _ = optimizer.learning_rate.assign(0.25)
            >>> float(optimizer.learning_rate)
            0.25
        """
        setattr(self._optimizer, self._key, value)
        return self

    def assign_add(
        self, delta: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True
    ) -> Self:
        """Add to the number of the optimizer: as :meth:`assign`.

        Args:
            delta: A number.
            use_locking: Accepted; it changes nothing.
            name: Accepted; it changes nothing.
            read_value: Accepted; it changes nothing.

        Raises:
            Exception: As :meth:`assign`.

        Examples:
            >>> import central_storage as cs
            >>> int(cs.optimizers.SGD(0.5).iterations.assign_add(2))
            2
        """
        return self.assign(self.number + delta)

    def assign_sub(
        self, delta: Any, use_locking: bool = False, name: str | None = None, read_value: bool = True
    ) -> Self:
        """Subtract from the number of the optimizer: as :meth:`assign`.

        Args:
            delta: A number.
            use_locking: Accepted; it changes nothing.
            name: Accepted; it changes nothing.
            read_value: Accepted; it changes nothing.

        Raises:
            Exception: As :meth:`assign`.

        Examples:
            >>> import central_storage as cs
            >>> float(cs.optimizers.SGD(0.5).learning_rate.assign_sub(0.25))
            0.25
        """
        return self.assign(self.number - delta)

    # --- as a number ------------------------------------------------------------------------------------------

    def __int__(self) -> int:
        return int(self.number)

    def __float__(self) -> float:
        return float(self.number)

    def __complex__(self) -> complex:
        return complex(self.number)

    def __index__(self) -> int:
        return operator.index(self.number)  # type: ignore[arg-type]  # a float has the error that it always has

    def __bool__(self) -> bool:
        return bool(self.number)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.number, self.dtype if dtype is None else dtype)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """NumPy's functions see a Python number, whose dtype the other operand decides."""
        plain = [x.number if isinstance(x, LiveNumber) else x for x in inputs]
        return getattr(ufunc, method)(*plain, **kwargs)

    __add__, __radd__ = _both(operator.add)
    __sub__, __rsub__ = _both(operator.sub)
    __mul__, __rmul__ = _both(operator.mul)
    __truediv__, __rtruediv__ = _both(operator.truediv)
    __floordiv__, __rfloordiv__ = _both(operator.floordiv)
    __mod__, __rmod__ = _both(operator.mod)
    __pow__, __rpow__ = _both(operator.pow)
    __divmod__, __rdivmod__ = _both(divmod)
    __lshift__, __rlshift__ = _both(operator.lshift)
    __rshift__, __rrshift__ = _both(operator.rshift)
    __and__, __rand__ = _both(operator.and_)
    __or__, __ror__ = _both(operator.or_)
    __xor__, __rxor__ = _both(operator.xor)
    __lt__, __gt__ = _both(operator.lt)
    __le__, __ge__ = _both(operator.le)
    __iadd__ = _in_place(operator.add)
    __isub__ = _in_place(operator.sub)
    __imul__ = _in_place(operator.mul)
    __itruediv__ = _in_place(operator.truediv)
    __ifloordiv__ = _in_place(operator.floordiv)
    __imod__ = _in_place(operator.mod)
    __ipow__ = _in_place(operator.pow)

    def __eq__(self, other: object) -> Any:
        return self.number == other

    def __ne__(self, other: object) -> Any:
        return self.number != other

    def __hash__(self) -> int:
        raise TypeError(
            f"{self.name} changes, so it cannot be a key; use {'int' if self.is_count else 'float'}(x) for the number "
            "of this moment"
        )

    def __neg__(self) -> int | float:
        return -self.number

    def __pos__(self) -> int | float:
        return self.number

    def __abs__(self) -> int | float:
        return abs(self.number)

    def __round__(self, digits: int | None = None) -> int | float:
        return round(self.number, digits)

    def __trunc__(self) -> int:
        return math.trunc(self.number)

    def __floor__(self) -> int:
        return math.floor(self.number)

    def __ceil__(self) -> int:
        return math.ceil(self.number)

    def __format__(self, spec: str) -> str:
        return format(self.number, spec)

    def __str__(self) -> str:
        return str(self.number)

    def __repr__(self) -> str:
        return repr(self.number)


class Change(LiveNumber):
    """What ``+=`` and its kin make: ``optimizer.learning_rate *= 0.5`` assigns it. A name that is bound to it by
    ``step += 1`` would no longer follow the optimizer, so it cannot be used."""

    __slots__ = ("_result",)

    def __init__(self, changed: LiveNumber, result: int | float) -> None:
        super().__init__(changed._optimizer, changed._key)  # noqa: SLF001  (one class with its base)
        self._result = result

    @property
    def number(self) -> NoReturn:
        """No number."""
        raise RuntimeError(self._why())

    @property
    def assigned(self) -> int | float:
        """The number after the change."""
        return self._result

    def _why(self) -> str:
        return (
            f"`x += n` made of {self.name} a number that no longer follows the optimizer; use x.assign_add(n) to "
            f"change the optimizer, or begin with {'int' if self.is_count else 'float'}(x) for a number of your own"
        )

    def __repr__(self) -> str:
        return f"<{self._why()}>"

    __str__ = __repr__
