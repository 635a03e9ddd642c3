"""Gradients born where the server reads them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from central_storage.core.context import current_replica
from cs_proto.errors import ContextError

from .variable import Variable

__all__ = ["gradient_buffers"]


def gradient_buffers(variables: Sequence[Variable]) -> list[np.ndarray]:
    """Writable arrays of the variables' shapes and dtypes that lie where the server reads this replica's gradients.

    Compute into them (``np.matmul(x.T, d, out=buffer)``) and hand them to ``apply_gradients``: then nothing is copied.
    Their content is undefined until written; after ``apply_gradients`` they are read-only. There are two for each
    variable. A third call in one run waits for the update by the first and returns the same memory, so copy a gradient
    that you want to read later. Raises ContextError (a RuntimeError)
    outside a replica and for variables of different strategies.
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
        found = strategy.variable_sets.add(variables)
    return replica.gradient_buffers(found.numbers)
