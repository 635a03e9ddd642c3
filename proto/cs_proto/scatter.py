"""The meaning of writes to a variable: assign and scatter, on the memory of its value.

:func:`write` is used by the server in a commit, by a replica on its own copy when it reads what it has just written,
and by the client for a variable that no server has yet; so the three cannot differ. The caller checks that a write
fits its variable.
"""

from __future__ import annotations

import numpy as np

from .messages import WriteOp

__all__ = ["write"]


def write(target: np.ndarray, op: WriteOp, value: np.ndarray, indices: np.ndarray | None = None) -> None:
    """Change ``target`` in place.

    ``value`` has its shape or, with ``indices`` (integers ``[k]``), the shape ``[k, ...]``, and goes to these rows. If
    a row is named twice, ``scatter_add`` and ``scatter_sub`` add up its values in order, and ``scatter_update`` takes
    the last one. Rows that ``target`` does not have are skipped, because the sender has checked them.
    """
    with np.errstate(all="ignore"):  # an overflow or a NaN belongs to the training
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
    if len(np.unique(indices)) == len(indices):  # many times faster than `at`, with the same result
        target[indices] = change(target[indices], value)
    else:
        change.at(target, indices, value)
