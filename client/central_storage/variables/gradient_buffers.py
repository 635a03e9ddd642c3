"""Gradient buffers, in the memory where the server reads gradients."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from central_storage.core.context import current_replica
from cs_proto.errors import ContextError

from .checks import dense_refused
from .variable import Variable

__all__ = ["gradient_buffers"]


def gradient_buffers(variables: Sequence[Variable]) -> list[np.ndarray]:
    """Writable arrays that lie where the server reads this replica's gradients.

    Compute into them (``np.matmul(x.T, d, out=buffer)``) and hand them to ``apply_gradients``: then nothing is copied.
    Their content is undefined until written; after ``apply_gradients`` they are read-only. There are two for each
    variable. A third call in one run waits for the update by the first and returns the same memory, so copy a gradient
    that you want to read later.

    Args:
        variables: Variables of one strategy.

    Returns:
        One array for each variable, of its shape and dtype.

    Raises:
        ContextError: Called outside a replica, or with variables of different strategies (a RuntimeError).
        InvalidArgumentError: A variable is ``sparse`` and has none (a ValueError).

    Examples:
        >>> import numpy as np
        >>> import central_storage as cs
        >>> with cs.CentralStorageStrategy(in_process=True) as strategy:
        ...     with strategy.scope():
        ...         w, sgd = cs.Variable(np.zeros(2, np.float32)), cs.optimizers.SGD(1.0)
        ...
        ...     def step():
        ...         (buffer,) = cs.gradient_buffers([w])
        ...         np.multiply(2, np.float32([1, 2]), out=buffer)
        ...         sgd.apply_gradients([(buffer, w)])
        ...
        ...     strategy.run(step)
        ...     print(w.numpy())
        [-2. -4.]
    """
    if not variables:
        return []
    strategy = variables[0].strategy
    replica = current_replica(strategy)
    if replica is None or strategy is None:
        raise ContextError("gradient_buffers must be called inside a replica function (strategy.run)")
    found = strategy.variable_sets.find(variables)
    if found is None:
        foreign = [v.name for v in variables if v.strategy is not strategy]
        if foreign:
            raise ContextError(f"the variables {', '.join(foreign)} belong to another strategy")
        for variable in variables:
            if variable.sparse:
                raise dense_refused(variable.name)
        found = strategy.variable_sets.add(variables)
    return replica.gradient_buffers(found.numbers)
