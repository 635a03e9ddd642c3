"""The arguments of data sets' methods, checked."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import optree

from cs_proto.errors import InvalidArgumentError

from .element_spec import TensorSpec

__all__ = ["at_least", "index_of", "signature_of", "spread"]


def signature_of(types: Any, shapes: Any, signature: Any) -> Any:
    """The nest of TensorSpec that the three ways of saying it mean; None where nothing was said. Raises
    TypeError where they do not fit together."""
    if signature is not None:
        if types is not None or shapes is not None:
            raise TypeError("from_generator takes output_signature, or output_types and output_shapes, not both")
        if not all(isinstance(leaf, TensorSpec) for leaf in optree.tree_leaves(signature, none_is_leaf=True)):
            raise TypeError(f"from_generator: output_signature must be a nest of TensorSpec, not {signature!r:.200}")
        return signature
    if types is None:
        if shapes is not None:
            raise TypeError("from_generator with output_shapes needs output_types as well")
        return None
    dtypes, treespec = optree.tree_flatten(types, none_is_leaf=True)
    each: list[Any] = [None] * len(dtypes) if shapes is None else treespec.flatten_up_to(shapes)
    return treespec.unflatten(TensorSpec(shape, dtype) for shape, dtype in zip(each, dtypes, strict=True))


def spread(function: Callable[..., Any], where: str) -> Callable[[Any], Any]:
    """``function`` as one of an element: the members of a tuple are its arguments. Raises TypeError, which names
    ``where``, for what cannot be called."""
    if not callable(function):
        raise TypeError(f"{where} needs a function, not {function!r:.200}")
    return lambda element: function(*element) if type(element) is tuple else function(element)


def at_least(minimum: int, value: int, name: str) -> int:
    """``value`` as an int. Raises TypeError for what is none, InvalidArgumentError where it is too small."""
    number = index_of(value, name)
    if number < minimum:
        raise InvalidArgumentError(f"{name} must be at least {minimum}, not {number}")
    return number


def index_of(value: int, name: str) -> int:
    """``value`` as an int. Raises TypeError for what is none."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, not {value!r}") from None
