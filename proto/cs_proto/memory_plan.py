"""How many bytes a service takes: the arithmetic of its layout, without the layout itself.

The server lays out variables, slots and gradient buffers by it. An estimate adds the same numbers up before there is a
server. No function here allocates anything.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np

from cs_proto.arithmetic.optimizers import SLOTS, slot_shape
from cs_proto.arrays import item_nbytes
from cs_proto.messages import VariableSpec

__all__ = [
    "BY_NORM",
    "GPU_DTYPES",
    "KEPT_NBYTES",
    "LOG_GROWTH",
    "LOG_NBYTES",
    "PAGE_NBYTES",
    "Pages",
    "account_nbytes",
    "gradient_nbytes",
    "has_gradients",
    "on_device",
    "room_of",
    "service_nbytes",
    "slot_nbytes",
    "undo_nbytes",
    "value_nbytes",
]

#: The dtypes of variables that may lie on a GPU. Others lie in the machine's memory.
GPU_DTYPES = ("float16", "float32", "float64")

#: Memory is taken in pages of so many bytes. Where the kernel's pages are larger, small segments take more.
PAGE_NBYTES = 4096

#: The rules that need the norms of whole variables. The server updates by them, and by sparse gradients, in pieces of
#: which it keeps the old values; it keeps next to nothing of other dense updates.
BY_NORM = frozenset({"lamb", "lamb_without_decay", "optax_lamb"})

#: Bytes that a lane of a commit can keep of one array of a piece.
KEPT_NBYTES = 256 * 1024

#: The server's log is written anew when it exceeds this many bytes and so many times what counts of it.
LOG_NBYTES, LOG_GROWTH = 64 << 10, 4

# Every variable begins at a multiple of this.
_ALIGNMENT = 64

# What counts in the server's log: of the service, and of each variable with its slots and twice its name. A test
# compares it with a training.
_LIVE_NBYTES, _VARIABLE_NBYTES = 2048, 144
# The server keeps what the workers have returned in this many steps; tests compare the sum with its layout.
_ACCOUNT_STEPS, _ACCOUNT_HEAD_NBYTES, _ACCOUNT_STEP_NBYTES, _ACCOUNT_RETURN_NBYTES = 32, 128, 72, 1032
# The pages at the heads of the segments: of the log, of its tables, and of the undo area.
_HEADS = 3
# Step times that nobody reads: the head of a ring, and the page of its first moment.
_TIMES_PAGES = 2
_VERSION_NBYTES = 8


class Pages:
    """The pages of a segment that take memory. Its ranges come in ascending order.

    >>> pages = Pages()
    >>> pages.take(0, 100)
    >>> pages.take(128, 5000)
    >>> pages.nbytes
    8192
    """

    def __init__(self) -> None:
        #: Bytes of these pages.
        self.nbytes = 0
        self._end = 0

    def take(self, start: int, stop: int) -> None:
        """Bytes ``start`` to ``stop`` are written."""
        end = _in_pages(stop)
        if stop > start and end > self._end:
            self.nbytes += end - max(self._end, start - start % PAGE_NBYTES)
            self._end = end


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


def account_nbytes(replicas: int) -> int:
    """Bytes of the account of the steps that a program of the server has carried out."""
    return _ACCOUNT_HEAD_NBYTES + _ACCOUNT_STEPS * (_ACCOUNT_STEP_NBYTES + replicas * _ACCOUNT_RETURN_NBYTES)


def undo_nbytes(lanes: int, kept: int, pieces: int) -> int:
    """Bytes that so many lanes of commits keep at most, beside the head. ``kept`` is what a lane keeps of the arrays of
    a piece, where they are updated in ``pieces``; a lane that updates in another way keeps a block of each array.

    >>> undo_nbytes(2, 0, 0), undo_nbytes(2, 3 * KEPT_NBYTES, 1)
    (16384, 798720)
    """
    block = 2 * PAGE_NBYTES
    busy = min(lanes, pieces)
    return busy * (_in_pages(kept) + block // 2) + (lanes - busy) * block if busy else lanes * block


def service_nbytes(replicas: int, variables: Collection[VariableSpec]) -> int:
    """Bytes that the server writes down of the service, at most: its log, the account, the versions of variables and
    the heads of the other segments. Values that replica functions return or pass to merge points come beside them.
    """
    live = _LIVE_NBYTES + sum(_VARIABLE_NBYTES + 2 * len(each.name) for each in variables)
    log = max(LOG_NBYTES, LOG_GROWTH * live)
    rings = (replicas + 2) * _TIMES_PAGES * PAGE_NBYTES
    tables = _in_pages(account_nbytes(replicas)) + _in_pages(_VERSION_NBYTES * (len(variables) + 2))
    return _HEADS * PAGE_NBYTES + _in_pages(log) + rings + tables


def _in_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES
