"""How many bytes a service takes: the arithmetic of its layout, without the layout itself.

The server lays out variables, slots and gradient buffers by it. An estimate adds the same numbers up before there is a
server. No function here allocates anything.
"""

from __future__ import annotations

import math

import numpy as np

from cs_proto.arithmetic.optimizers import SLOTS, slot_shape
from cs_proto.arrays import item_nbytes
from cs_proto.messages import VariableSpec

__all__ = [
    "GPU_DTYPES",
    "gradient_nbytes",
    "has_gradients",
    "on_device",
    "room_of",
    "slot_nbytes",
    "value_nbytes",
]

#: The dtypes of variables that may lie on a GPU. Others lie in the machine's memory.
GPU_DTYPES = ("float16", "float32", "float64")

# Every variable begins at a multiple of this.
_ALIGNMENT = 64


def value_nbytes(spec: VariableSpec) -> int:
    """Bytes of the variable's value.

    >>> value_nbytes(VariableSpec("w", "float32", (3, 5), True, 0, 0))
    60
    """
    return item_nbytes(spec.dtype) * math.prod(spec.shape)


def room_of(nbytes: int) -> int:
    """Bytes that a variable of ``nbytes`` takes of its slab.

    >>> room_of(60), room_of(65)
    (64, 128)
    """
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def has_gradients(spec: VariableSpec) -> bool:
    """Whether variables of this slab may have dense gradients."""
    return np.dtype(spec.dtype).kind in "fc" and not spec.sparse


def gradient_nbytes(spec: VariableSpec, nbytes: int) -> int:
    """Bytes that each replica may need for the dense gradient of a variable of ``nbytes``."""
    return nbytes if spec.trainable and has_gradients(spec) else 0


def slot_nbytes(rule: str, spec: VariableSpec) -> int:
    """Bytes that all slots of an optimizer of this rule take beside the variable, each in a segment of its own.

    >>> slot_nbytes("adam", VariableSpec("w", "float32", (3, 5), True, 0, 0))
    128
    """
    return len(SLOTS[rule]) * room_of(item_nbytes(spec.dtype) * math.prod(slot_shape(rule, spec.shape)))


def on_device(parameter_device: str, dtype: str, nbytes: int) -> int:
    """How many of ``nbytes`` of this dtype lie on a GPU."""
    return nbytes if parameter_device.startswith("gpu") and dtype in GPU_DTYPES else 0
