"""Where arrays are put: ``device`` says it for a block of code, ``convert_to_tensor`` obeys.

An array on a CPU is a NumPy array in host memory, whichever number the CPU has; only a GPU is another memory.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cs_proto.errors import DeviceError

from . import context, values
from .devices import existing

__all__ = ["convert_to_tensor", "device"]


class _Names(threading.local):
    """The devices of the ``device`` blocks this thread is in, in short form; None is the default."""

    def __init__(self) -> None:
        self.stack: list[str | None] = []


_names = _Names()


@contextmanager
def device(name: str | None) -> Iterator[None]:
    """Let :func:`convert_to_tensor` put arrays on the device called ``name`` for the length of the block.

    None means the default: the replica's first device, outside a replica the CPU. Raises DeviceError (a ValueError)
    for what is no device of this machine.
    """
    _names.stack.append(None if name is None else existing(name))
    try:
        yield
    finally:
        _names.stack.pop()


def convert_to_tensor(value: Any, dtype: Any = None) -> Any:
    """``value`` as an array on the current :func:`device`. Arrays keep their dtype and are not copied needlessly.

    Python numbers and lists of them: float becomes float32, int int32 (int64 where one does not fit), bool bool,
    complex complex128. With ``dtype``, an int may become a float but not the reverse (TypeError). Raises
    InvalidArgumentError (a ValueError) for what is no array of numbers, bools or strings (None, dicts, uneven lists,
    a PerReplica) and for integers that do not fit, DeviceError for a GPU outside a replica.
    """
    name = _names.stack[-1] if _names.stack else None
    replica = context.replica_here()
    is_on_gpu = hasattr(value, "__cuda_array_interface__")
    array = value if is_on_gpu and dtype is None and replica is not None else values.convert_to_tensor(value, dtype)
    if replica is not None:
        return replica.place(array, name or replica.devices[0])
    if name is not None and name.startswith("gpu:"):
        raise DeviceError(f"arrays on {name} are made inside a replica function; here they are in host memory")
    return array
