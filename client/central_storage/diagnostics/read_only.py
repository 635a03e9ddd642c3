"""What an error says about a write to an array that may only be read."""

from __future__ import annotations

import re

__all__ = ["READ_ONLY", "explain"]

READ_ONLY = (
    "Arguments of a replica function, elements of data sets, and variables seen as arrays are read-only, because "
    "others read the same memory. Compute a new array (x = x + 1), or write to a copy: np.array(x) or "
    "variable.numpy(). To change a variable, use variable.assign, assign_add or scatter_update."
)

# NumPy says "output array is read-only", "assignment destination is read-only" and the like, numba "readonly array".
_SAYS_SO = re.compile(r"read-?only|WRITEABLE", re.IGNORECASE)


def explain(error: BaseException) -> None:
    """Add a note with the remedy, if the error is about a write to a read-only array."""
    is_one = isinstance(error, ValueError | TypeError) and _SAYS_SO.search(str(error))
    if is_one and READ_ONLY not in getattr(error, "__notes__", ()):
        error.add_note(READ_ONLY)
