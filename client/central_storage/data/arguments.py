"""The arguments of data sets' methods, checked."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import optree

from central_storage.diagnostics.remedies import explain
from cs_proto.errors import InvalidArgumentError

from .element_spec import TensorSpec

__all__ = ["at_least", "can_take", "check_flag", "check_unused", "index_of", "signature_of", "spread"]


def signature_of(types: Any, shapes: Any, signature: Any) -> Any:
    """The nest of TensorSpec that the arguments of ``from_generator`` describe; None if there are none. Raises
    TypeError if they contradict each other."""
    if signature is not None:
        if types is not None or shapes is not None:
            raise TypeError("from_generator takes output_signature, or output_types and output_shapes, not both")
        leaves = optree.tree_leaves(signature, is_leaf=_is_list, none_is_leaf=True)
        if not all(isinstance(leaf, TensorSpec) for leaf in leaves):
            raise TypeError(
                "from_generator: output_signature must be a TensorSpec, or a tuple or dict of them, not "
                f"{signature!r:.200}{_no_list(leaves)}"
            )
        return signature
    if types is None:
        if shapes is not None:
            raise TypeError("from_generator with output_shapes needs output_types as well")
        return None
    dtypes, treespec = optree.tree_flatten(types, is_leaf=_is_list, none_is_leaf=True)
    if any(map(_is_list, dtypes)):
        raise TypeError(
            f"from_generator: output_types must be a dtype, or a tuple or dict of them, not {types!r:.200}"
            f"{_no_list(dtypes)}"
        )
    each: list[Any] = [None] * len(dtypes) if shapes is None else treespec.flatten_up_to(shapes)
    return treespec.unflatten(TensorSpec(shape, dtype) for shape, dtype in zip(each, dtypes, strict=True))


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _no_list(leaves: list[Any]) -> str:
    return "; use a tuple, since a list stands for one array" if any(map(_is_list, leaves)) else ""


def spread(function: Callable[..., Any], where: str) -> Callable[[Any], Any]:
    """``function`` as a function of one element: the members of a tuple become its arguments. Raises TypeError, which
    names ``where``, if it cannot be called."""
    if not callable(function):
        raise TypeError(f"{where} needs a function, not {function!r:.200}")

    def of_element(element: Any) -> Any:
        try:
            return function(*element) if type(element) is tuple else function(element)
        except Exception as error:
            explain(error)
            raise

    return of_element


def at_least(minimum: int, value: int, name: str) -> int:
    """``value`` as an int. Raises TypeError if it is not one, InvalidArgumentError if it is below ``minimum``."""
    number = index_of(value, name)
    if number < minimum:
        raise InvalidArgumentError(f"{name} must be at least {minimum}, not {number}")
    return number


def index_of(value: int, name: str) -> int:
    """``value`` as an int. Raises TypeError if it is not one."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, not {value!r}") from None


def check_flag(value: Any, name: str) -> bool:
    """``value`` as a bool. Raises TypeError if it is not one."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be a bool, not {value!r:.100}")
    return bool(value)


def check_unused(where: str, *, name: str | None, num_parallel_calls: int | None = None, **flags: bool | None) -> None:
    """Check TensorFlow's arguments that have no effect here. Raises TypeError for another type, InvalidArgumentError
    for a number of calls that is neither at least 1 nor AUTOTUNE (-1)."""
    if name is not None and not isinstance(name, str):
        raise TypeError(f"{where}: name must be a str, not {name!r:.100}")
    if isinstance(num_parallel_calls, bool):
        raise TypeError(f"{where}: num_parallel_calls must be an int, not {num_parallel_calls!r}")
    if num_parallel_calls is not None and at_least(-1, num_parallel_calls, f"{where}: num_parallel_calls") == 0:
        raise InvalidArgumentError(f"{where}: num_parallel_calls must be at least 1, or AUTOTUNE, not 0")
    for flag, value in flags.items():
        if value is not None:
            check_flag(value, f"{where}: {flag}")


def can_take(function: Callable[..., Any], count: int) -> bool:
    """Whether the parts of a batch can be the first ``count`` positional arguments of a function."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return True
    if any(each.kind is each.VAR_POSITIONAL for each in parameters):
        return True
    positional = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    required = [each for each in positional if each.default is each.empty]
    return count <= len(positional) and (count >= len(required) or count != 1)
