"""Notes with the remedy, for errors of NumPy and CuPy that replica functions meet and whose texts name none."""

from __future__ import annotations

import re
import sys

__all__ = ["CUPY_ARRAYS", "READ_ONLY", "explain"]

READ_ONLY = (
    "Arguments of a replica function, elements of data sets, and variables seen as arrays are read-only, because "
    "others read the same memory. Compute a new array (x = x + 1), or write to a copy: np.array(x) or "
    "variable.numpy(). To change a variable, use variable.assign, assign_add or scatter_update."
)
CUPY_ARRAYS = (
    "Most functions of CuPy take arrays of CuPy alone, and neither variables nor arrays of NumPy. Pass "
    "xp.asarray(variable), with xp = cs.get_array_module(). Operators (x @ variable) take variables as they are."
)

# NumPy says "output array is read-only", "assignment destination is read-only" and the like, numba "readonly array".
_SAYS_READ_ONLY = re.compile(r"read-?only|WRITEABLE", re.IGNORECASE)
_SAYS_CUPY = re.compile(
    r"expected cupy\.\S*_ndarray_base, got|Unsupported type <class '|Only cupy arrays can be concatenated"
)


def explain(error: BaseException) -> None:
    """Add a note with the remedy, if the error is about a write to a read-only array or an argument of CuPy's."""
    if isinstance(error, ValueError | TypeError) and _SAYS_READ_ONLY.search(str(error)):
        _add(error, READ_ONLY)
    elif isinstance(error, TypeError) and "cupy" in sys.modules and _SAYS_CUPY.search(str(error)):
        _add(error, CUPY_ARRAYS)


def _add(error: BaseException, note: str) -> None:
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)
