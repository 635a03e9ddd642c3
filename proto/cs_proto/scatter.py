"""What the writes of a variable mean: assign and scatter, on the memory where a value lies.

The server commits with :func:`write`, a replica that reads what it has just written does the same to its own copy, and
a variable that no server has yet is written by it in the client; so the three cannot differ. Whether a write fits its
variable is checked before.
"""

from __future__ import annotations

import numpy as np

from .messages import WriteOp

__all__ = ["write"]


def write(target: np.ndarray, op: WriteOp, value: np.ndarray, indices: np.ndarray | None = None) -> None:
    """Change ``target`` in place. ``value`` has its shape or, with ``indices`` (integers ``[k]``), is ``[k, ...]`` and
    goes to these rows: ``scatter_add`` and ``scatter_sub`` add up rows named twice, in order; ``scatter_update``
    takes the last. Rows that ``target`` does not have are left out: whoever brought them has checked."""
    with np.errstate(all="ignore"):  # an overflow or a nan is the training's own affair
        if indices is not None:
            _write_rows(target, op, value, indices)
        elif op == "assign":
            target[...] = value
        elif op == "assign_add":
            np.add(target, value, out=target, casting="unsafe")
        else:
            np.subtract(target, value, out=target, casting="unsafe")


def _write_rows(target: np.ndarray, op: WriteOp, value: np.ndarray, indices: np.ndarray) -> None:
    inside = (indices >= 0) & (indices < len(target))
    if not inside.all():
        indices, value = indices[inside], value[inside]
    if op == "scatter_update":
        _, last = np.unique(indices[::-1], return_index=True)
        last = len(indices) - 1 - last
        target[indices[last]] = value[last]
        return
    change = np.add if op == "scatter_add" else np.subtract
    if len(np.unique(indices)) == len(indices):  # many times faster than `at`, and the same
        target[indices] = change(target[indices], value)
    else:
        change.at(target, indices, value)
