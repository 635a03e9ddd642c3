"""Losses over a global batch, and look-ups in tables: the functions of ``tf.nn`` that depend on replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cs_proto.arithmetic.reduction import mean_dtype
from cs_proto.errors import ContextError, InvalidArgumentError

from .core.context import (
    get_array_module,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from .core.tensors.tensor import as_tensor
from .core.values import DistributedValues, ReduceOp, convert_to_tensor
from .diagnostics.tensorflow_names import attributes
from .nest import flatten
from .variables.variable import Variable

__all__ = ["compute_average_loss", "embedding_lookup", "global_batch_size", "scale_regularization_loss"]

if not TYPE_CHECKING:
    __getattr__ = attributes(__name__, "tf.nn")


def compute_average_loss(per_example_loss: Any, sample_weight: Any = None, global_batch_size: Any = None) -> Any:
    """This replica's part of the mean loss of a global batch: ``sum(per_example_loss * sample_weight) / size``.

    Summed over the replicas (as gradients are) the parts make the mean of the whole batch. Nothing divided by a size of
    0 is 0.

    Args:
        per_example_loss: Numbers of shape ``[rows, …]``.
        sample_weight: A scalar, or weights of a shape that fits. They do not enter the denominator.
        global_batch_size: The number of rows of all replicas together. None: this replica's rows times the number of
            replicas, which is right for even shares only. :func:`global_batch_size` counts them.

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
    return as_tensor((total / (size or 1)).astype(mean_dtype(dtype)) * bool(size))


def global_batch_size(batch: Any) -> int:
    """The number of rows of all replicas together in one element of a distributed data set.

    The last batch of a data set is often smaller than the others, and replicas may get different numbers of rows. A
    loss that is divided by this number has the gradient of the whole batch in every step. Count in the script and pass
    the number to the replica function. In a replica all replicas must call it: they add their numbers, which takes a
    message each.

    Args:
        batch: A nest of arrays or of :class:`PerReplica` values, whose first axis is the rows.

    Raises:
        InvalidArgumentError: The nest is empty, a part is a scalar, or parts have different numbers of rows (a
            ValueError).

    Examples:
        >>> import numpy as np
        >>> import central_storage as cs
        >>> with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], in_process=True) as strategy:
        ...     data = cs.data.Dataset.from_tensor_slices(np.zeros((5, 2))).batch(3)
        ...     for batch in strategy.experimental_distribute_dataset(data):
        ...         print(cs.nn.global_batch_size(batch))
        3
        2
    """
    counts = [
        tuple(_leading(part) for part in (leaf.values if isinstance(leaf, DistributedValues) else (leaf,)))
        for leaf in flatten(batch)
    ]
    if not counts or any(count != counts[0] for count in counts):
        raise InvalidArgumentError(f"batch must have parts with the same number of rows; the numbers are {counts}")
    context = get_replica_context()
    if context is None or not has_strategy():
        return sum(counts[0])
    return int(context.all_reduce(ReduceOp.SUM, np.asarray(sum(counts[0]))))


def _leading(part: Any) -> int:
    shape = np.shape(part)
    if not shape:
        raise InvalidArgumentError("batch has a part that is a scalar; every part must have rows as its first axis")
    return int(shape[0])


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
    return as_tensor(loss.sum(dtype=loss.dtype) / get_strategy().num_replicas_in_sync)


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
    return as_tensor(get_array_module().take(var, indices, axis=0))


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
