"""The placement of arrays: ``device`` sets it for a block of code, and ``convert_to_tensor`` follows it.

An array on a CPU is a NumPy array in host memory, whatever the number of the CPU; only a GPU has other memory.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from central_storage.core import context, values
from central_storage.core.tensors.tensor import as_tensor
from cs_proto.errors import DeviceError

from .device_names import existing

__all__ = ["convert_to_tensor", "device"]


class _Names(threading.local):
    """The devices of the ``device`` blocks this thread is in, in short form; None is the default."""

    def __init__(self) -> None:
        self.stack: list[str | None] = []


_names = _Names()


@contextmanager
def device(name: str | None) -> Iterator[None]:
    """Let :func:`convert_to_tensor` put arrays on a device for the length of the block.

    Args:
        name: The device. None means the default: the replica's first device, outside a replica the CPU.

    Raises:
        DeviceError: This machine has no such device (a ValueError).

    Examples:
        >>> import central_storage as cs
        >>> with cs.device("cpu:0"):
        ...     cs.convert_to_tensor([1, 2])
        <cs.Tensor: shape=(2,), dtype=int32, numpy=array([1, 2], dtype=int32)>
    """
    _names.stack.append(None if name is None else existing(name))
    try:
        yield
    finally:
        _names.stack.pop()


def convert_to_tensor(value: Any, dtype: Any = None) -> Any:
    """``value`` as an array on the current :func:`device`. Arrays keep their dtype and are not copied needlessly.

    Python numbers and lists of them: float becomes float32, int int32 (int64 where one does not fit), bool bool,
    complex complex128.

    Args:
        value: An array, a Python number or text, or a list of them.
        dtype: The dtype of the result. An int may become a float but not the reverse.

    Raises:
        InvalidArgumentError: ``value`` is no array of numbers, bools or strings (None, dicts, uneven lists, a
            PerReplica), or an integer does not fit (a ValueError).
        TypeError: A float would become an int.
        DeviceError: The device is a GPU, outside a replica (a ValueError).

    Examples:
        >>> import central_storage as cs
        >>> cs.convert_to_tensor([1.5, 2]).dtype
        dtype('float32')
    """
    name = _names.stack[-1] if _names.stack else None
    replica = context.replica_here()
    is_on_gpu = hasattr(value, "__cuda_array_interface__")
    array = value if is_on_gpu and dtype is None and replica is not None else values.convert_to_tensor(value, dtype)
    if replica is not None:
        return as_tensor(replica.place(array, name or replica.devices[0]))
    if name is not None and name.startswith("gpu:"):
        raise DeviceError(
            f"arrays on {name} can be made only inside a replica function; here arrays are in host memory"
        )
    return as_tensor(array)
