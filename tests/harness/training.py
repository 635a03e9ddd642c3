"""What replicas of several tests compute, on whichever device they have."""

from __future__ import annotations

from typing import Any

import numpy as np

import central_storage as cs

__all__ = ["linear"]


def linear(x: Any, w: cs.Variable, b: cs.Variable, *, into_buffers: bool) -> tuple[Any, Any, float]:
    """How far ``x @ w + b`` is from ones, float32 [rows, n]: the gradients of w [m, n] and b [n], in the buffers of
    the variables or in arrays of their own, and the sum of the squares."""
    xp = cs.get_array_module()
    error = x @ w + b - np.float32(1)
    if into_buffers:
        of_w, of_b = cs.gradient_buffers([w, b])
        xp.matmul(x.T, error, out=of_w)
        xp.sum(error, axis=0, out=of_b)
    else:
        of_w, of_b = x.T @ error, error.sum(axis=0)
    return of_w, of_b, float((error**2).sum())
