"""Losses over a global batch, and look-ups in tables: the functions of ``tf.nn`` that depend on replicas."""

from __future__ import annotations

from typing import Any

import numpy as np

from cs_proto.arithmetic.reduction import mean_dtype
from cs_proto.errors import ContextError, InvalidArgumentError

from .core.context import get_array_module, get_strategy, in_cross_replica_context
from .core.values import convert_to_tensor
from .variables.variable import Variable

__all__ = ["compute_average_loss", "embedding_lookup", "scale_regularization_loss"]


def compute_average_loss(per_example_loss: Any, sample_weight: Any = None, global_batch_size: Any = None) -> Any:
    """This replica's part of the mean loss of a global batch: ``sum(per_example_loss * sample_weight) / size``.

    Summed over the replicas (as gradients are) the parts make the mean of the whole batch. Nothing divided by a size of
    0 is 0.

    Args:
        per_example_loss: Numbers of shape ``[rows, …]``.
        sample_weight: A scalar, or weights of a shape that fits. They do not enter the denominator.
        global_batch_size: The number of rows of all replicas together. None: this replica's rows times the number of
            replicas, which is right for even shares only.

    Returns:
        A scalar of the dtype of the losses; of integers float32 (8 and 16 bits) or float64.

    Raises:
        ValueError: The loss is a scalar or no number, the weights do not fit, or the size is no scalar or negative.
        TypeError: The size is no integer.
        RuntimeError: Called in a cross-replica context without ``global_batch_size``.

    Examples:
        >>> import central_storage as cs
        >>> float(cs.nn.compute_average_loss([1.0, 2.0, 3.0], global_batch_size=4))
        1.5
    """
    loss = _array(per_example_loss)
    dtype = loss.dtype
    if loss.ndim == 0:
        raise InvalidArgumentError("per_example_loss must have at least one axis, the examples; it is a scalar")
    if dtype.kind not in "iufc":
        raise InvalidArgumentError(f"per_example_loss must hold numbers, not {dtype}")
    if sample_weight is not None:
        weight = fit_weights(loss, _array(sample_weight))
        try:
            loss = (loss * weight).astype(dtype)
        except ValueError as error:
            raise InvalidArgumentError(
                f"sample_weight {list(weight.shape)} does not fit per_example_loss {list(loss.shape)}"
            ) from error
    size = _rows(loss) if global_batch_size is None else _size(global_batch_size)
    total = loss.sum(dtype=dtype)
    return (total / (size or 1)).astype(mean_dtype(dtype)) * bool(size)


def scale_regularization_loss(regularization_loss: Any) -> Any:
    """This replica's part of a loss that every replica computes alike: its sum divided by the number of replicas.

    Args:
        regularization_loss: Numbers of any shape.

    Returns:
        A scalar of their dtype (of float64 for integers).

    Raises:
        RuntimeError: Called in a cross-replica context.

    Examples:
        >>> import central_storage as cs
        >>> float(cs.nn.scale_regularization_loss([1.0, 2.0]))
        3.0
    """
    _require_replica("scale_regularization_loss")
    loss = _array(regularization_loss)
    return loss.sum(dtype=loss.dtype) / get_strategy().num_replicas_in_sync


def embedding_lookup(var: Any, ids: Any) -> Any:
    """A copy of some rows of a table.

    Only those rows move: in a replica they are taken from the server's own memory, elsewhere the server sends them. The
    gradient of the rows is ``IndexedSlices(gradient_of_rows, ids, var.shape)``.

    Args:
        var: A variable or an array, with at least one axis.
        ids: The numbers of the rows: integers of any shape, also repeated.

    Returns:
        An array of shape ``[*ids.shape, *var.shape[1:]]``, of the variable's dtype.

    Raises:
        InvalidArgumentError: The ids are no integers, or outside ``[0, rows)`` (a ValueError).

    Examples:
        >>> import numpy as np
        >>> import central_storage as cs
        >>> cs.nn.embedding_lookup(np.array([[1, 2], [3, 4]]), [1, 1]).tolist()
        [[3, 4], [3, 4]]
    """
    indices = _array(ids)
    if indices.size == 0 and indices.dtype.kind == "f":  # what an empty list becomes
        indices = indices.astype(np.int32)
    if indices.dtype.kind not in "iu":
        raise InvalidArgumentError(f"ids must be integers, not {indices.dtype}")
    rows = var.shape[:1]
    if not rows:
        raise InvalidArgumentError("embedding_lookup needs a table with at least one axis, the rows")
    if isinstance(var, Variable):
        return var._read_rows("embedding_lookup", indices)  # noqa: SLF001  (sparse_read under another name)
    wrong = indices[(indices < 0) | (indices >= rows[0])]
    if wrong.size:
        raise InvalidArgumentError(f"id {int(wrong[0])} is outside [0, {rows[0]})")
    return get_array_module().take(var, indices, axis=0)


def fit_weights(values: Any, weight: Any) -> Any:
    """``weight`` with its rank brought to that of ``values`` where they differ by a last axis."""
    if weight.ndim and weight.ndim == values.ndim - 1:
        return weight[..., None]
    if weight.ndim == values.ndim + 1:
        if weight.shape[-1] != 1:
            raise InvalidArgumentError(
                f"weights {list(weight.shape)} have more axes than the values {list(values.shape)}"
            )
        return weight[..., 0]
    return weight


def _rows(loss: Any) -> int:
    _require_replica("compute_average_loss without global_batch_size")
    return int(loss.shape[0]) * get_strategy().num_replicas_in_sync


def _size(global_batch_size: Any) -> int:
    size = convert_to_tensor(global_batch_size)
    if size.dtype.kind not in "iu":
        raise TypeError(f"global_batch_size must be an integer, not {global_batch_size!r}")
    if size.ndim or size < 0:
        raise InvalidArgumentError(f"global_batch_size must be one integer, at least 0, not {global_batch_size!r}")
    return int(size)


def _require_replica(what: str) -> None:
    if in_cross_replica_context():
        raise ContextError(f"{what} must be called in a replica: the cross-replica context has no share of a batch")


def _array(value: Any) -> Any:
    """``value`` as an array; one of a device stays there."""
    if hasattr(value, "__cuda_array_interface__"):
        return value
    return get_array_module().asarray(convert_to_tensor(value))
