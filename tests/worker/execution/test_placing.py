"""Where the arrays of one message go."""

from __future__ import annotations

import numpy as np
import pytest

from cs_proto.arrays import INLINE_NBYTES, Location, frame_view
from cs_proto.errors import InvalidArgumentError, MemoryPlanError
from cs_proto.records import Frame
from cs_runtime.shared_memory.arena import Arena
from cs_worker.execution.outgoing import FRAMES, Placing


def test_small_arrays_lie_in_frames(arena: Arena) -> None:
    array = Placing(arena)(np.arange(3.0))
    assert isinstance(array.place, Frame)
    assert frame_view(array).tolist() == [0.0, 1.0, 2.0]


def test_large_arrays_lie_in_the_arena(arena: Arena) -> None:
    value = np.arange(INLINE_NBYTES // 8 + 1)
    array = Placing(arena)(value)
    assert isinstance(array.place, Location)
    assert np.array_equal(arena.view(array), value)


def test_one_array_is_placed_once(arena: Arena) -> None:
    value = np.arange(INLINE_NBYTES)
    placing = Placing(arena)
    assert placing(value) == placing(value)
    assert placing(value.copy()) != placing(value)


def test_a_message_has_a_limited_number_of_frames(arena: Arena) -> None:
    placing = Placing(arena)
    placed = [placing(np.float32(n).reshape(())) for n in range(FRAMES + 2)]
    assert sum(isinstance(array.place, Frame) for array in placed) == FRAMES
    assert arena.view(placed[-1]) == FRAMES + 1


def test_a_message_has_a_limited_number_of_arrays(arena: Arena) -> None:
    placing, value = Placing(arena), np.zeros(1)
    for _ in range(30_000):
        placing(value)
    with pytest.raises(InvalidArgumentError, match="more than 30000 arrays in one message; stack them"):
        placing(value)


def test_a_dtype_that_cannot_travel(arena: Arena) -> None:
    with pytest.raises(InvalidArgumentError, match="dtype object cannot be sent"):
        Placing(arena)(np.array([None]))


def test_an_arena_that_is_full(arena: Arena) -> None:
    with pytest.raises(MemoryPlanError, match="do not fit into arena/0"):
        Placing(arena)(np.zeros(1 << 20))


def test_a_mark_frees_what_came_after_it(arena: Arena) -> None:
    kept = Placing(arena)(np.ones(INLINE_NBYTES))
    mark = arena.mark()
    first = Placing(arena)(np.zeros(INLINE_NBYTES // 4))
    arena.release(mark)
    assert Placing(arena)(np.zeros(INLINE_NBYTES // 4)).place == first.place
    assert arena.view(kept).all()
