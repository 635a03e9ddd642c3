"""Checks of optimizers: hyperparameters are numbers, and gradients fit their variables."""

from __future__ import annotations

from typing import Any

import numpy as np

from central_storage.core.context import get_array_module
from central_storage.core.tensors.live_number import LiveNumber
from central_storage.core.values import IndexedSlices, convert_to_tensor
from central_storage.variables.checks import dense_refused
from central_storage.variables.variable import Variable
from cs_proto.arithmetic.optimizers import is_flag
from cs_proto.errors import InvalidArgumentError

__all__ = ["as_given", "as_number", "fitting", "fitting_rows"]


def as_number(kind: str, key: str, value: object) -> float:
    """A hyperparameter as a Python number, from any type of number. Its range is checked later, with all the others."""
    if isinstance(value, LiveNumber):
        value = value.assigned
    if isinstance(value, (np.number, np.bool_)) or (isinstance(value, np.ndarray) and value.ndim == 0):
        value = value.item()
    if isinstance(value, bool) and not is_flag(kind, key):
        raise InvalidArgumentError(f"{kind}: {key} must be a number, not {value!r}")
    if not isinstance(value, (bool, int, float)):
        raise InvalidArgumentError(f"{kind}: {key} must be a finite number, not {value!r}")
    try:
        return float(value)
    except OverflowError:
        raise InvalidArgumentError(f"{kind}: {key} must be a finite number, not {value!r:.40}") from None


def as_given(kind: str, key: str, value: float) -> float | bool:
    """A hyperparameter as users give it: a flag is True or False."""
    return bool(value) if is_flag(kind, key) else value


def fitting(gradient: Any, variable: Variable) -> Any:
    if variable.sparse:
        raise dense_refused(variable.name)
    array = _array(gradient)
    if array.shape != variable.shape:
        raise InvalidArgumentError(
            f"the gradient of {variable.name} has shape {array.shape}, but the variable has shape {variable.shape}"
        )
    _check_dtype(array, variable)
    return array


def fitting_rows(gradient: IndexedSlices, variable: Variable) -> tuple[np.ndarray, np.ndarray]:
    """Values and indices (int64) of a sparse gradient."""
    values, indices, shape = _array(gradient.values), convert_to_tensor(gradient.indices), variable.shape
    if not shape:
        raise InvalidArgumentError(f"the gradient of {variable.name} is an IndexedSlices, but the variable has no rows")
    if gradient.dense_shape is not None and gradient.dense_shape != shape:
        raise InvalidArgumentError(
            f"the gradient of {variable.name} has dense_shape {gradient.dense_shape}, but the variable has shape "
            f"{shape}"
        )
    if values.shape[1:] != shape[1:]:
        raise InvalidArgumentError(
            f"the gradient of {variable.name} has rows of shape {values.shape[1:]}, but those of the variable have "
            f"shape {shape[1:]}"
        )
    _check_dtype(values, variable)
    if indices.size:
        for index in (indices.min(), indices.max()):
            if not 0 <= index < shape[0]:
                raise InvalidArgumentError(
                    f"the gradient of {variable.name} names row {index}, but the variable has {shape[0]} rows"
                )
    return values, indices.astype(np.int64, copy=False)


def _array(value: Any) -> Any:
    """``value`` as an array. An array on a replica's GPU stays there: the worker copies it without waiting."""
    if hasattr(value, "__cuda_array_interface__") and get_array_module() is not np:
        return get_array_module().asarray(value)
    return convert_to_tensor(value)


def _check_dtype(array: np.ndarray, variable: Variable) -> None:
    if array.dtype != variable.dtype:
        raise InvalidArgumentError(
            f"the gradient of {variable.name} has dtype {array.dtype}, the variable {variable.dtype}; convert it with "
            f"astype('{variable.dtype}'), or compute it from {variable.dtype} arrays"
        )
