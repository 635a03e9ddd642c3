"""Contents of the worker's messages: arrays, in frames or in the arena, and exceptions of the user's code."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from central_storage.wire_values.value_codec import to_error
from cs_proto.arrays import INLINE_NBYTES, Array, array_of, dtype_name, is_wire_dtype
from cs_proto.errors import InvalidArgumentError
from cs_proto.failures import error_of
from cs_proto.messages import Error, SparseGradient
from cs_runtime.shared_memory.arena import Arena

__all__ = ["FRAMES", "Placing", "raised_error", "row_gradients"]

#: A message of the worker has at most this many arrays in frames; receivers take a few times as many.
FRAMES = 1000
# A message has at most so many arrays in all: a descriptor is three lists, and receivers take 2**17 lists.
_ARRAYS = 30_000


class Placing:
    """Places the arrays of one message. Call it with each."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._count = 0
        # By the identity of the array, which is held so that no other array gets it.
        self._in_arena: dict[int, tuple[np.ndarray, Array]] = {}

    def __call__(self, value: np.ndarray) -> Array:
        """The array as a descriptor. A small array is not copied until the message is sent.

        Raises InvalidArgumentError for a dtype that cannot travel and for too many arrays, MemoryPlanError where the
        arena is full.
        """
        name = dtype_name(value.dtype)
        if not is_wire_dtype(name):
            raise InvalidArgumentError(
                f"an array of dtype {value.dtype} cannot be sent to another process; convert it to numbers, bools or "
                "strings"
            )
        self._count += 1
        if self._count > _ARRAYS:
            raise InvalidArgumentError(f"more than {_ARRAYS} arrays in one message; stack them into fewer, larger ones")
        if value.nbytes <= INLINE_NBYTES and self._count <= FRAMES:
            return array_of(value)
        if id(value) not in self._in_arena:
            self._in_arena[id(value)] = value, self._arena.put(name, value)
        return self._in_arena[id(value)][1]


def raised_error(raised: BaseException, replica: int, merge_index: int, arena: Arena) -> Error:
    """``raised`` as a record, with its arguments and the user's traceback as far as these can be told."""
    try:
        return to_error(raised, replica, merge_index, Placing(arena))
    except Exception as untold:  # noqa: BLE001  (the user's class may raise whatever it likes when asked for its text)
        substitute = RuntimeError(
            f"the replica function raised a {type(raised).__name__} that cannot be described, because its str() raises "
            f"a {type(untold).__name__}"
        )
        return error_of(substitute, replica, merge_index)


def row_gradients(numbers: Sequence[int], placed: Sequence[Array]) -> tuple[SparseGradient, ...]:
    """The sparse gradients of these variables, whose values and indices take turns in ``placed``."""
    return tuple(map(SparseGradient, numbers, placed[::2], placed[1::2]))
