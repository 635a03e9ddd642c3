"""The few operations of TensorFlow that its pages on strategies use; everything else is NumPy's or CuPy's.

Each converts its arguments with :func:`~central_storage.core.devices.placement.convert_to_tensor`, so in a replica on a
GPU the results are CuPy arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from central_storage.core.context import get_array_module
from central_storage.core.devices.placement import convert_to_tensor
from cs_proto.errors import InvalidArgumentError

from .tensor import as_tensor

__all__ = ["add", "constant", "identity", "range", "reshape"]


def constant(value: Any, dtype: Any = None, shape: int | Sequence[int] | None = None, name: str = "Const") -> Any:
    """A new tensor of ``value``.

    Args:
        value: An array, a Python number or text, or a list of them. Floats become float32, ints int32 (int64 where one
            does not fit).
        dtype: The dtype of the result. An int may become a float but not the reverse.
        shape: The shape of the result. A single number fills it; anything else is reshaped.
        name: Accepted; it changes nothing.

    Raises:
        InvalidArgumentError: ``value`` is no array of numbers, bools or strings, or does not fit ``shape`` (a
            ValueError).
        TypeError: A float would become an int.

    Examples:
        >>> import central_storage as cs
        >>> cs.constant([[1], [2]])
        <cs.Tensor: shape=(2, 1), dtype=int32, numpy=
        array([[1],
               [2]], dtype=int32)>
        >>> cs.constant(1.5, shape=(2,)).numpy()
        array([1.5, 1.5], dtype=float32)
    """
    array = convert_to_tensor(value, dtype)
    if shape is None:
        return as_tensor(array.copy())
    if array.size == 1:
        return as_tensor(get_array_module().full(shape, array.reshape(())))
    return as_tensor(_reshaped(array, shape).copy())


def identity(input: Any, name: str | None = None) -> Any:  # noqa: A002  (TensorFlow's name)
    """A new tensor with the same value, for example that of a variable.

    Args:
        input: An array or a variable, or what :func:`constant` takes.
        name: Accepted; it changes nothing.

    Raises:
        InvalidArgumentError: ``input`` is no array of numbers, bools or strings (a ValueError).

    Examples:
        >>> import central_storage as cs
        >>> cs.identity(cs.Variable(2.0))
        <cs.Tensor: shape=(), dtype=float32, numpy=2.0>
    """
    return constant(input)


def reshape(tensor: Any, shape: int | Sequence[int], name: str | None = None) -> Any:
    """The same values in another shape.

    Args:
        tensor: An array or a variable, or what :func:`constant` takes.
        shape: The shape. One axis may be -1: its length follows from the others.
        name: Accepted; it changes nothing.

    Raises:
        InvalidArgumentError: The values do not fill ``shape`` (a ValueError).

    Examples:
        >>> import central_storage as cs
        >>> cs.reshape(cs.range(6), shape=(1, 2, 3)).shape
        (1, 2, 3)
    """
    return as_tensor(_reshaped(convert_to_tensor(tensor), shape))


def range(start: Any, limit: Any = None, delta: Any = 1, dtype: Any = None, name: str = "range") -> Any:  # noqa: A001
    """The numbers from ``start`` up to ``limit``, without it; of ``range(n)`` from 0 up to n.

    Args:
        start: The first number; the limit where ``limit`` is not given.
        limit: The end, which is left out.
        delta: The difference of two numbers that follow each other.
        dtype: The dtype of the result. None: int32 for ints (int64 where one does not fit), float32 for floats.
        name: Accepted; it changes nothing.

    Raises:
        InvalidArgumentError: ``delta`` is 0, or an argument is not one number (a ValueError).
        TypeError: A float would become an int.

    Examples:
        >>> import central_storage as cs
        >>> cs.range(3, 18, 3).numpy().tolist()
        [3, 6, 9, 12, 15]
    """
    first, last = (0, start) if limit is None else (start, limit)
    numbers = [convert_to_tensor(number) for number in (first, last, delta)]
    if any(number.ndim or number.dtype.kind not in "iuf" for number in numbers) or not numbers[2]:
        raise InvalidArgumentError(
            f"range needs one number each, and a delta that is not 0, not start={first!r:.100}, limit={last!r:.100}, "
            f"delta={delta!r:.100}"
        )
    dtypes = [number.dtype for number in numbers]
    floats = [each for each in dtypes if each.kind == "f"]
    kind = np.result_type(*(floats or dtypes)) if dtype is None else np.dtype(dtype)
    for number in numbers:
        convert_to_tensor(number, kind)
    return convert_to_tensor(np.arange(*(number.item() for number in numbers), dtype=kind))


def add(x: Any, y: Any, name: str | None = None) -> Any:
    """``x + y``, element by element; shapes are broadcast.

    Args:
        x: An array or a variable, or what :func:`constant` takes.
        y: The same. Python numbers take the dtype of ``x``.
        name: Accepted; it changes nothing.

    Raises:
        InvalidArgumentError: The dtypes differ, or the shapes do not fit each other (a ValueError).
        TypeError: A Python float would become an int.

    Examples:
        >>> import central_storage as cs
        >>> cs.add([1.0, 2.0], 1)
        <cs.Tensor: shape=(2,), dtype=float32, numpy=array([2., 3.], dtype=float32)>
    """
    if _is_python(x) and not _is_python(y):
        y = convert_to_tensor(y)
        x = convert_to_tensor(x, y.dtype)
    else:
        x = convert_to_tensor(x)
        y = convert_to_tensor(y, x.dtype if _is_python(y) else None)
    if x.dtype != y.dtype:
        raise InvalidArgumentError(f"add takes arrays of one dtype, not {x.dtype} and {y.dtype}; use astype")
    try:
        return as_tensor(get_array_module().add(x, y))
    except ValueError as error:
        raise InvalidArgumentError(f"add cannot broadcast {list(x.shape)} and {list(y.shape)}") from error


def _is_python(value: Any) -> bool:
    return not hasattr(value, "dtype")


def _reshaped(array: Any, shape: int | Sequence[int]) -> Any:
    try:
        return array.reshape(shape)
    except ValueError as error:
        raise InvalidArgumentError(f"an array of shape {list(array.shape)} cannot have the shape {shape!r}") from error
