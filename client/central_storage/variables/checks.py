"""What a variable refuses: initial values, assigned values and row numbers that do not fit it."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from central_storage.core.context import get_strategy, has_strategy
from central_storage.core.values import (
    DistributedValues,
    PerReplica,
    VariableAggregation,
    VariableSynchronization,
    convert_to_tensor,
)
from central_storage.diagnostics.callers import warn
from cs_proto.arrays import dtype_name, is_wire_dtype
from cs_proto.errors import ContextError, InvalidArgumentError
from cs_proto.messages import VARIABLE_NAME, VariableSpec, is_variable_name

__all__ = [
    "check_aggregation",
    "check_arguments",
    "check_fits",
    "check_may_write",
    "check_sparse",
    "dense_refused",
    "initial_array",
    "row_numbers",
    "say_foreign",
    "warn_on_read",
]

_log = logging.getLogger("central_storage.variables")


def initial_array(initial_value: Any, dtype: Any, shape: tuple[int, ...] | None) -> np.ndarray:
    """The value that a variable begins with. Raises InvalidArgumentError, also where it has not this ``shape``, or
    TypeError for a ``dtype`` that cannot hold it."""
    value = initial_value() if callable(initial_value) else initial_value
    if isinstance(value, DistributedValues):
        raise InvalidArgumentError("the initial value of a variable must be one value, not one per replica")
    array = convert_to_tensor(value, dtype)
    if not is_wire_dtype(dtype_name(array.dtype)) or array.dtype.kind in "US":
        raise InvalidArgumentError(f"a variable cannot have dtype {array.dtype}")
    if shape is not None and tuple(shape) != array.shape:
        raise InvalidArgumentError(f"shape {tuple(shape)} was asked for, but the initial value has shape {array.shape}")
    return array


def check_arguments(
    name: object,
    trainable: bool | None,
    synchronization: object,
    aggregation: object,
    constraint: object,
    validate_shape: object,
    variable_def: object,
) -> None:
    """Raise TypeError or InvalidArgumentError for an argument of the constructor that makes no variable."""
    if not isinstance(aggregation, VariableAggregation):
        raise TypeError(
            f"aggregation must be a VariableAggregation such as cs.VariableAggregation.SUM, not {aggregation!r}"
        )
    if not isinstance(synchronization, VariableSynchronization):
        raise InvalidArgumentError(f"synchronization must be a VariableSynchronization, not {synchronization!r}")
    if trainable and synchronization is VariableSynchronization.ON_READ:
        raise InvalidArgumentError("a variable with synchronization ON_READ is not trainable")
    if constraint is not None and not callable(constraint):
        raise TypeError(f"constraint must be a function of the value, not {constraint!r}")
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name must be a str, not {name!r:.100}")
    if name and not is_variable_name(name):
        raise InvalidArgumentError(f"{name!r:.100} is not a variable name: {VARIABLE_NAME}")
    if not validate_shape:
        raise InvalidArgumentError(
            "validate_shape=False would let the variable take values of other shapes, but it keeps the shape of its "
            "initial value; leave validate_shape out, and make another variable for another shape"
        )
    if variable_def is not None:
        raise InvalidArgumentError(
            "variable_def belongs to TensorFlow's graphs, which do not exist here; leave it out, and give the value "
            "as initial_value"
        )


def check_aggregation(spec: VariableSpec, op: str, value: Any) -> None:
    """What can be said of an assign in one of several replicas before they are compared."""
    if spec.aggregation == VariableAggregation.NONE.value:
        raise InvalidArgumentError(
            f"{spec.name}.{op} in a replica: its aggregation is NONE, so replicas cannot agree on a value; make "
            "the variable with aggregation=cs.VariableAggregation.SUM, MEAN or ONLY_FIRST_REPLICA"
        )
    if spec.aggregation == VariableAggregation.SUM.value and isinstance(value, list | tuple):
        raise InvalidArgumentError(
            f"{spec.name}.{op} of a {type(value).__name__} in a replica: its aggregation is SUM, which adds up "
            "arrays; wrap it with numpy.asarray"
        )


def check_may_write(name: str, op: str, value: object, is_foreign: bool, strategy: object) -> None:
    """Raise where the variable of ``strategy`` (None: of none yet) cannot be written here, or not with ``value``.
    ``is_foreign``: it is what a replica has of another strategy's variable."""
    if isinstance(value, PerReplica):
        raise InvalidArgumentError(
            f"{name}.{op} cannot take a PerReplica, which has a value for each replica; reduce it first"
        )
    if is_foreign:
        raise ContextError(f"variable {name} belongs to another strategy: a replica of this one may only read it")
    if strategy is not None and has_strategy() and get_strategy() is not strategy:
        raise ContextError(f"variable {name} of one strategy cannot be written inside the scope of another")


def check_sparse(name: str, value: np.ndarray, trainable: bool, constraint: object) -> None:
    """Raise InvalidArgumentError where such a variable cannot be trained by gradients of its rows."""
    if not trainable:
        raise InvalidArgumentError(
            f"variable {name}: sparse=True is for a table that is trained; leave out sparse=True or trainable=False"
        )
    if not value.ndim or value.dtype.kind not in "fc":
        raise InvalidArgumentError(
            f"variable {name}: sparse=True is for a table of rows with a floating-point or complex dtype, but the "
            f"value is {value.dtype}{list(value.shape)}; leave out sparse=True"
        )
    if constraint is not None:
        raise InvalidArgumentError(
            f"variable {name}: a constraint needs dense gradients, and with sparse=True there are none; leave out one "
            "of the two"
        )


def dense_refused(name: str) -> InvalidArgumentError:
    """The error that refuses a dense gradient of the sparse variable called ``name``."""
    return InvalidArgumentError(
        f"variable {name} was made with sparse=True, so it has no gradient buffers: pass the gradient of its rows as "
        "cs.IndexedSlices(values, rows), or make the variable without sparse=True"
    )


def check_fits(spec: VariableSpec, dtype: np.dtype[Any], op: str, array: np.ndarray, shape: tuple[int, ...]) -> None:
    """Raise InvalidArgumentError where ``array``, to be written to a variable of ``dtype``, has not that and
    ``shape``."""
    if array.dtype != dtype:
        raise InvalidArgumentError(
            f"{spec.name}.{op}: the variable has dtype {dtype}, but the value has {array.dtype}; convert it with "
            f"astype('{dtype}')"
        )
    if array.shape != shape:
        raise InvalidArgumentError(
            f"{spec.name}.{op}: the variable has shape {spec.shape}, so the value must have shape {shape}, not "
            f"{array.shape}; there is no broadcasting"
        )


def row_numbers(spec: VariableSpec, what: str, indices: Any) -> np.ndarray:
    """``indices`` as int64. Raises InvalidArgumentError, which speaks of ``what``, for rows that do not exist."""
    if not spec.shape:
        raise InvalidArgumentError(f"{spec.name}.{what}: the variable has no axes and therefore no rows")
    array = convert_to_tensor(indices)
    if array.size and array.dtype.kind not in "iu":
        raise InvalidArgumentError(f"{spec.name}.{what}: indices must be integers, not {array.dtype}")
    if array.size and not 0 <= int(array.min()) <= int(array.max()) < spec.shape[0]:
        wrong = array[(array < 0) | (array >= spec.shape[0])].flat[0]
        raise InvalidArgumentError(f"{spec.name}.{what}: row {wrong} is outside [0, {spec.shape[0]})")
    return array.astype(np.int64, copy=False)


def warn_on_read(replicas: int, aggregation: VariableAggregation) -> None:
    """What TensorFlow's central strategy does in silence: with ON_READ a replica has no value of its own."""
    if replicas > 1:
        warn(
            "synchronization=ON_READ has no effect here, as in TensorFlow's CentralStorageStrategy: the variable has "
            f"one value, and aggregation={aggregation.name} makes one value of what the replicas assign in a step, so "
            "contributions may be dropped. To add up those of all replicas, use aggregation=SUM with assign_add and "
            "arrays, or cs.metrics; to keep one value per replica, return it from strategy.run",
            UserWarning,
        )


def say_foreign(name: str) -> None:
    """Log that a function reads a variable of another service."""
    _log.warning(
        "variable %s belongs to another service than the strategy that runs this function: its replicas read a copy of "
        "the value of now, which no update changes; make the variable under this strategy's scope, or pass "
        "variable.numpy()",
        name,
    )
