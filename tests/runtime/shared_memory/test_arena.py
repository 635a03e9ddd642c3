"""Arenas: what is large is placed once, what is freed is used again, and what does not fit is refused."""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Callable
from typing import TypeVar, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.harness.examples import examples

from cs_proto.arrays import INLINE_NBYTES, Array, Location, frame_view
from cs_proto.errors import MemoryPlanError
from cs_proto.messages import Done, Put
from cs_proto.ranges import merged
from cs_proto.records import Frame, Record
from cs_runtime import machine
from cs_runtime.shared_memory.arena import Arena
from cs_runtime.shared_memory.mapping import Mapping
from cs_runtime.shared_memory.remote_segment import RemoteSegment

R = TypeVar("R", bound=Record)

NBYTES = 16 << 20


def arena(used: int = 0) -> Arena:
    descriptor = os.memfd_create("arena")
    os.ftruncate(descriptor, NBYTES)
    return Arena(lambda: Mapping("arena/test", descriptor, NBYTES, writable=True), used)


def offset(array: Array) -> int:
    assert isinstance(array.place, Location)
    return array.place.offset


def test_small_values_travel_in_frames_and_need_no_segment() -> None:
    made = Arena(lambda: pytest.fail("the segment was opened"))
    assert frame_view(made.place(np.arange(3))).tolist() == [0, 1, 2]
    assert made.share(b"abc") == Array("uint8", (3,), Frame(b"abc"))
    assert made.mark() == 0


def test_large_values_lie_one_after_the_other() -> None:
    made = arena()
    first, second = (made.place(np.full(INLINE_NBYTES + n, n, np.uint8)) for n in (1, 2))
    assert offset(first) == 0
    assert offset(second) >= first.nbytes
    assert offset(second) % 64 == 0
    assert (made.view(first) == 1).all()
    assert (made.view(second) == 2).all()


def test_many_values_lie_in_one_piece() -> None:
    made = arena()
    given = [np.arange(5, dtype=np.int64), np.full((3, 2), 0.5, np.float32), np.empty((0, 4)), np.arange(8)[::2]]
    placed = made.put_all(given)
    for array, value in zip(placed, given, strict=True):
        assert offset(array) % 64 == 0
        np.testing.assert_array_equal(made.view(array), value, strict=True)
    assert offset(made.new("uint8", (1,))) == 192
    (swapped,) = made.put_all([np.arange(3, dtype=">i4")])
    assert made.view(swapped).tolist() == [0, 1, 2]
    assert Arena(lambda: pytest.fail("the segment was opened")).put_all([]) == []


def test_arrays_of_the_same_kind_at_the_same_place_have_one_descriptor() -> None:
    made = arena()
    (first,) = made.put_all([np.zeros(3, np.float32)])
    made.reset()
    (again,) = made.put_all([np.ones(3, np.float32)])
    assert again is first
    assert made.view(again).tolist() == [1, 1, 1]
    made.reset()
    for other in (np.ones(3, np.int32), np.ones((3, 1), np.float32), np.ones(4, np.float32)):
        (placed,) = made.put_all([other])
        made.reset()
        assert placed != first
        np.testing.assert_array_equal(made.view(placed), other, strict=True)


def test_where_memory_is_not_mapped_arrays_of_the_same_kind_are_written_each_time() -> None:
    written = []

    def carry(request: Callable[[int], Record], answer: type[R]) -> R:
        put = request(1)
        assert isinstance(put, Put)
        assert put.value is not None
        written.append(frame_view(put.value).view(np.float32).tolist())
        return cast("R", Done(1, 0, 0))

    made = Arena(lambda: RemoteSegment("arena/test", NBYTES, carry))
    for value in (1.0, 2.0):
        made.put_all([np.full(3, value, np.float32)])
        made.reset()
    assert written == [[1, 1, 1], [2, 2, 2]]


def test_what_is_shared_again_is_placed_once() -> None:
    made = arena()
    data, other = np.zeros(INLINE_NBYTES), np.zeros(INLINE_NBYTES)
    placed = made.share(data.data)
    assert made.share(memoryview(data)) == placed
    assert offset(made.share(other.data)) != offset(placed)
    assert made.view(placed).tobytes() == data.tobytes()


@pytest.mark.parametrize("free", ["reset", "release"])
def test_what_was_freed_is_placed_anew(free: str) -> None:
    made = arena()
    mark = made.mark()
    data = np.zeros(INLINE_NBYTES)
    made.share(data.data)
    data += 1
    made.reset() if free == "reset" else made.release(mark)
    placed = made.share(data.data)
    assert offset(placed) == 0
    assert made.view(placed).tobytes() == data.tobytes()


def test_parts_are_used_in_turn_and_left_alone_in_between() -> None:
    made = arena()
    placed = []
    for step in range(7):
        made.reset(step % 3, 3)
        placed.append(made.place(np.full(INLINE_NBYTES + 1, step, np.uint8)))
        for back, array in enumerate(reversed(placed[-3:])):
            assert (made.view(array) == step - back).all()
    assert {offset(array) for array in placed} == {
        part * (NBYTES // 3 // mmap.PAGESIZE * mmap.PAGESIZE) for part in range(3)
    }
    with pytest.raises(MemoryPlanError, match="do not fit into one of 3 parts of arena/test"):
        made.new("uint8", (NBYTES // 2,))


@pytest.mark.parametrize("parts", [1, 3])
def test_pages_of_one_large_value_are_given_back(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cs_runtime.shared_memory.arena._KEEP_NBYTES", 1 << 20)
    descriptor = os.memfd_create("arena")
    os.ftruncate(descriptor, NBYTES)
    kept = os.dup(descriptor)
    made = Arena(lambda: Mapping("arena/test", descriptor, NBYTES, writable=True))
    try:
        for step in range(2 * parts):
            made.reset(step % parts, parts)
            made.place(np.ones(NBYTES // 4, np.uint8))
        assert os.fstat(kept).st_blocks * 512 >= parts * (NBYTES // 4)
        for step in range(2 * parts):  # the first of them may be about to need as much as the last
            made.reset(step % parts, parts)
        assert os.fstat(kept).st_blocks * 512 <= (1 << 20) + 2 * parts * 4096
        made.place(np.ones(NBYTES // 4, np.uint8))
        made.reset()
        made.reset()
        assert os.fstat(kept).st_blocks * 512 <= (1 << 20) + 2 * (parts + 1) * 4096
    finally:
        os.close(kept)


def test_what_another_process_uses_is_left_alone() -> None:
    assert offset(arena(used=128).new("uint8", (INLINE_NBYTES,))) == 128


def test_what_is_large_begins_a_page() -> None:
    made = arena()
    made.new("uint8", (1,))
    assert offset(made.new("uint8", (INLINE_NBYTES,))) == 64
    assert offset(made.new("uint8", (INLINE_NBYTES + 1,))) == 17 * mmap.PAGESIZE
    assert offset(made.new("uint8", (1,))) == 33 * mmap.PAGESIZE + 64


PAGES = st.lists(st.integers(0, 255), max_size=12).map(
    lambda pages: merged((page * mmap.PAGESIZE, (page + 1) * mmap.PAGESIZE) for page in pages)
)


@settings(max_examples=examples(50))
@given(held=PAGES, sizes=st.lists(st.integers(1, 3 * INLINE_NBYTES), max_size=12), parts=st.integers(1, 2))
def test_what_is_held_is_left_alone(held: list[tuple[int, int]], sizes: list[int], parts: int) -> None:
    made = arena()
    made.new("uint8", (1,))
    for first, stop in held:
        made.view(Array("uint8", (stop - first,), Location("arena/test", first)))[...] = 1
    for part in (parts - 1, 0):
        made.reset(part, parts, held)
        mark = made.mark()
        placed = [made.put("uint8", np.full(size, 2, np.uint8)) for size in sizes]
        begins = part * NBYTES // parts
        assert all(begins <= offset(array) <= begins + NBYTES // parts - array.nbytes for array in placed)
        made.release(mark)
        assert [offset(made.new("uint8", (size,))) for size in sizes] == list(map(offset, placed))
    for first, stop in held:
        assert (made.view(Array("uint8", (stop - first,), Location("arena/test", first))) == 1).all()


def test_pages_that_are_held_are_given_back_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cs_runtime.shared_memory.arena._KEEP_NBYTES", 0)
    descriptor = os.memfd_create("arena")
    os.ftruncate(descriptor, NBYTES)
    made = Arena(lambda: Mapping("arena/test", descriptor, NBYTES, writable=True))
    made.put("uint8", np.ones(NBYTES, np.uint8))
    held = (1 << 20, 3 << 20)
    made.reset(held=[held])
    made.reset(held=[held])
    assert os.fstat(descriptor).st_blocks * 512 == 2 << 20
    assert made.view(Array("uint8", (2 << 20,), Location("arena/test", 1 << 20))).all()
    made.reset()
    assert os.fstat(descriptor).st_blocks == 0


def test_a_refusal_names_what_is_held() -> None:
    made = arena()
    made.put("uint8", np.ones(1, np.uint8))
    made.reset(held=[(NBYTES // 2, NBYTES // 2 + mmap.PAGESIZE)])
    with pytest.raises(MemoryPlanError, match="the script still holds results there"):
        made.new("uint8", (NBYTES // 2 + 1,))
    made.new("uint8", (NBYTES // 2,))


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    made = arena()
    made.place(np.zeros(NBYTES // 2, np.uint8))
    with pytest.raises(MemoryPlanError, match=f"{NBYTES} bytes.* do not fit into arena/test: {NBYTES // 2} of"):
        made.new("uint8", (NBYTES,))
    made.place(np.zeros(NBYTES // 2, np.uint8))


def test_what_lies_in_another_segment_is_named_and_kept() -> None:
    data, other = np.zeros(INLINE_NBYTES), np.zeros(INLINE_NBYTES)
    there = Array("uint8", (data.nbytes,), Location("inputs", 64))
    made = Arena(
        lambda: Mapping("arena/test", os.memfd_create("arena"), 0, writable=True),
        find=lambda source: there if np.shares_memory(source, data) else None,
    )
    before = sys.getrefcount(data)
    assert made.share(data.data) == made.share(data.data) == there
    assert sys.getrefcount(data) > before
    assert made.mark() == 0
    made.reset()
    assert sys.getrefcount(data) == before
    with pytest.raises(OSError):  # goes into the arena, and this one has no memory at all
        made.share(other.data)


def resident(descriptor: int) -> int:
    return os.fstat(descriptor).st_blocks * 512


@pytest.mark.parametrize("others", [0, 20 << 20], ids=["alone", "beside another process"])
def test_what_would_fill_the_memory_is_refused_and_takes_none(others: int, monkeypatch: pytest.MonkeyPatch) -> None:
    nbytes = 256 << 20
    descriptor = os.memfd_create("arena")
    os.ftruncate(descriptor, nbytes)
    made = Arena(lambda: Mapping("arena/0", descriptor, nbytes, writable=True))
    small = made.new("uint8", (4 << 20,))
    # So much is available in all, and others take their part of it after the first look.
    looks = iter([0, *[others] * 100])
    left = (64 << 20) + (70 << 20) + resident(descriptor)
    monkeypatch.setattr(machine, "available_nbytes", lambda: left - resident(descriptor) - next(looks))
    with pytest.raises(MemoryPlanError) as refused:
        made.new("uint8", (80 << 20,))
    available = (70 << 20) - others
    assert str(refused.value) == (
        f"{80 << 20} bytes (80.0 MiB) to be sent or returned in arena/0 need {80 << 20} bytes (80.0 MiB) more memory, "
        f"but {available} bytes ({available >> 20}.0 MiB) are available beside the {64 << 20} bytes that stay free; "
        "send or return less at a time"
    )
    assert resident(descriptor) == 4 << 20
    assert offset(made.new("uint8", (40 << 20,))) == offset(small) + (4 << 20)
    assert resident(descriptor) == 44 << 20
