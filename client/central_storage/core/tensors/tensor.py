"""``cs.Tensor``: the NumPy array that is used where TensorFlow has a tensor.

Results of the service, elements of data sets and arguments of replica functions are of this class. Every decision about
the type is in this module: the other modules call :func:`as_tensor` where they hand an array to the user.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NoReturn, Self

import numpy as np
import optree

__all__ = ["Tensor", "array_text", "as_tensor", "tensors_in"]


def _on_numbers(change: Callable[[Any, Any], Any], compute: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """An operator such as ``+=``. NumPy's would change a number under its other names, too."""
    return lambda self, other: change(self, other) if self.ndim else as_tensor(compute(self[()], other))


class Tensor(np.ndarray):
    """A NumPy array that also has :meth:`numpy`.

    Data sets, ``run``, ``reduce``, ``gather`` and ``convert_to_tensor`` give it. It is an array in every other way:
    NumPy, torch and JAX take it as one, and ``np.asarray`` gives the plain array over the same memory. Slices and
    reshaped views are tensors, the results of operators and ufuncs are plain arrays and NumPy numbers. A tensor pickles
    as a tensor. A read-only tensor without axes, such as ``replica_id_in_sync_group``, can be the key of a dict.

    ``x += y`` changes a tensor with axes in place, under all its names, as NumPy does. Without axes a tensor is a
    number: ``x += y`` gives ``x`` another tensor.

    Raises:
        TypeError: ``hash`` of a tensor that has axes or can be written to. ``Tensor(...)``: use :func:`constant`.

    Examples:
        >>> import central_storage as cs
        >>> loss = cs.convert_to_tensor([1.0, 3.0])
        >>> loss
        <cs.Tensor: shape=(2,), dtype=float32, numpy=array([1., 3.], dtype=float32)>
        >>> loss.numpy()
        array([1., 3.], dtype=float32)
        >>> loss + 1
        array([2., 4.], dtype=float32)
    """

    __slots__ = ()
    # Below that of a plain array (0), so that NumPy makes a plain array of a tensor and an array without asking us.
    __array_priority__ = -1.0

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        """Refuse: NumPy's constructor would take values for a shape, and leave the memory as it is."""
        raise TypeError("Tensor is not made by a call; use cs.constant(value) or cs.convert_to_tensor(value)")

    def numpy(self) -> Any:
        """A copy as a plain NumPy array, which may be written to; without axes, a NumPy number."""
        return np.array(self) if self.ndim else self[()]

    __iadd__ = _on_numbers(np.ndarray.__iadd__, operator.add)
    __isub__ = _on_numbers(np.ndarray.__isub__, operator.sub)
    __imul__ = _on_numbers(np.ndarray.__imul__, operator.mul)
    __itruediv__ = _on_numbers(np.ndarray.__itruediv__, operator.truediv)
    __ifloordiv__ = _on_numbers(np.ndarray.__ifloordiv__, operator.floordiv)
    __imod__ = _on_numbers(np.ndarray.__imod__, operator.mod)
    __ipow__ = _on_numbers(np.ndarray.__ipow__, operator.pow)
    __iand__ = _on_numbers(np.ndarray.__iand__, operator.and_)
    __ior__ = _on_numbers(np.ndarray.__ior__, operator.or_)
    __ixor__ = _on_numbers(np.ndarray.__ixor__, operator.xor)
    __ilshift__ = _on_numbers(np.ndarray.__ilshift__, operator.lshift)
    __irshift__ = _on_numbers(np.ndarray.__irshift__, operator.rshift)

    def __round__(self, digits: int | None = None) -> Any:
        return round(np.asarray(self)[()], digits)  # type: ignore[call-overload]

    def __len__(self) -> int:
        if not self.ndim:
            raise TypeError("a tensor without axes has no len(); for its number use int(x), float(x) or x.item()")
        return len(np.asarray(self))

    def __array_wrap__(self, array: np.ndarray, context: Any = None, return_scalar: bool = False) -> Any:
        return array[()] if return_scalar and not array.ndim else array

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        number = None if self.ndim or self.flags.writeable else self[()]
        # Of a scalar as_tensor makes a tensor that can be the key of a dict, as this one.
        return as_tensor, (number if isinstance(number, np.generic) else np.asarray(self),)

    def __deepcopy__(self, memo: dict[int, Any] | None) -> Any:
        is_key = not (self.ndim or self.flags.writeable or self.dtype.hasobject)
        return self if is_key else super().__deepcopy__(memo)

    def __hash__(self) -> int:  # type: ignore[override]
        if self.ndim or self.flags.writeable:
            _refuse_to_hash(self)
        return hash(self.item())

    def __repr__(self) -> str:
        return f"<cs.Tensor: shape={self.shape}, dtype={self.dtype}, {array_text(self)}>"


def as_tensor(value: Any) -> Any:
    """``value`` as a tensor over the same memory, if it is a plain array or a NumPy scalar; anything else unchanged."""
    if type(value) is np.ndarray:
        return value.view(Tensor)
    if isinstance(value, np.generic):
        number = np.asarray(value).view(Tensor)
        number.flags.writeable = False  # as the scalar
        return number
    return value


def tensors_in(nest: Any) -> Any:
    """``nest`` with tensors in place of its plain arrays and NumPy scalars."""
    kind = type(nest)
    if kind is np.ndarray:  # most elements are one array or a tuple of arrays, which need no walk
        return nest.view(Tensor)
    if kind is tuple and _ARRAY.issuperset(map(type, nest)):
        return tuple([array.view(Tensor) for array in nest])
    return optree.tree_map(as_tensor, nest, none_is_leaf=True)


_ARRAY = frozenset({np.ndarray})


def array_text(array: np.ndarray) -> str:
    """The value in the text of a tensor or variable, as TensorFlow writes it."""
    plain = np.asarray(array)
    if not plain.ndim:
        return f"numpy={repr(plain.item()) if plain.dtype.kind in 'US' else plain}"
    text = repr(plain)
    return f"numpy=\n{text}" if "\n" in text else f"numpy={text}"


def _refuse_to_hash(array: np.ndarray) -> NoReturn:
    why = f"has the axes {array.shape}" if array.ndim else "can be written to"
    raise TypeError(f"unhashable: a Tensor that {why}; use its .item(), or a tuple made of its .tolist()")
