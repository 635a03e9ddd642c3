"""A stand-in for CuPy that needs no GPU: for tests, which put it on PYTHONPATH (``tests/harness/stand_in_gpus.py``).

NumPy computes; memory, streams, events and what may be mixed with what are as on a GPU (``_machine.py`` says how), and
everything is counted: ``counts()``. Names and arguments are CuPy's. What is missing raises AttributeError; add it.
"""

from __future__ import annotations

from typing import Any

import numpy as _np

from . import _arrays, cuda, random
from ._arrays import array, asarray, asnumpy, ndarray
from ._kernels import RawKernel, RawModule
from ._machine import counts

__all__ = ["RawKernel", "RawModule", "array", "asarray", "asnumpy", "counts", "cuda", "ndarray", "random"]
__version__ = "14.0.0"

newaxis = None


def ascontiguousarray(a: Any, dtype: Any = None) -> ndarray:
    """``a`` on the current device, in C order."""
    found = asarray(a, dtype)
    return found if found.flags.c_contiguous else found._contiguous()


def get_array_module(*args: Any) -> Any:
    """This module where one of ``args`` is a device array, else NumPy."""
    import sys

    return sys.modules[__name__] if any(isinstance(arg, ndarray) for arg in args) else _np


def empty(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    """A new array; what it holds is undefined."""
    return ndarray(shape, dtype)


def empty_like(prototype: ndarray, dtype: Any = None) -> ndarray:
    """A new array of that shape."""
    return ndarray(prototype.shape, dtype or prototype.dtype)


def __getattr__(name: str) -> Any:
    found = getattr(_np, name)
    if isinstance(found, type) or not callable(found):
        return found
    return _arrays.function(name, found)
