"""Batches in the segment of inputs: where they lie, for how long, and what they look like."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from central_storage.controller import input_segment
from central_storage.controller.input_segment import InputSegment
from cs_proto.arrays import INLINE_NBYTES, Location
from cs_runtime.shared_memory.mapping import Mapping

NBYTES = 16 * INLINE_NBYTES


def made(nbytes: int = NBYTES) -> InputSegment:
    descriptor = os.memfd_create("inputs")
    os.ftruncate(descriptor, nbytes)
    return InputSegment(Mapping("inputs", descriptor, nbytes, writable=True))


def place(inputs: InputSegment, array: np.ndarray) -> int | None:
    """The offset of ``array`` in the segment."""
    found = inputs.find(array.reshape(-1).view(np.uint8))
    if found is None:
        return None
    assert (found.dtype, found.shape, found.nbytes) == ("uint8", (array.nbytes,), array.nbytes)
    assert isinstance(found.place, Location)
    assert found.place.segment == "inputs"
    return found.place.offset


def large(number: int = 1) -> np.ndarray:
    return np.full(INLINE_NBYTES + number, number, np.uint8)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(40_000, dtype=np.float32).reshape(100, 400),
        np.arange(40_000, dtype=">i4").reshape(2, -1).T,
        np.array(["text", "other"] * 9000),
        np.zeros((40_000, 2), np.complex64)[::2],
        np.frombuffer(bytes(INLINE_NBYTES + 1), np.uint8),
    ],
)
def test_a_large_array_is_copied_into_the_segment(array: np.ndarray) -> None:
    into = made()
    copy = into.carry(array)
    assert copy.dtype == array.dtype
    assert np.array_equal(copy, array)
    assert not np.shares_memory(copy, array)
    assert place(into, copy) == 0
    assert place(into, copy[1:]) == copy[:1].nbytes
    assert copy.flags.writeable


def test_what_is_small_or_elsewhere_is_not_in_the_segment() -> None:
    into = made()
    small = np.arange(3)
    copy = into.carry(small)
    assert not np.shares_memory(copy, small)
    assert place(into, copy) is place(into, large()) is None


@pytest.mark.parametrize(
    "array",
    [np.array([f"text {number}" for number in range(40_000)], object), np.zeros(40_000, [("a", "f4"), ("b", "i2", 3)])],
)
def test_objects_and_records_never_lie_where_numbers_lay(array: np.ndarray) -> None:
    into = made()
    into.carry(np.full(array.nbytes, 0x51, np.uint8))  # which is no reference to an object
    copy = into.carry(array)
    assert copy.dtype == array.dtype
    assert np.array_equal(copy, array)
    assert not np.shares_memory(copy, array)
    assert place(into, into.carry(large())) == 0


def test_a_place_is_free_when_nothing_views_it() -> None:
    into = made()
    first, second = into.carry(large(1)), into.carry(large(2))
    row = second[:1]
    places = place(into, first), place(into, second)
    del first, second
    assert place(into, into.carry(large(3))) == places[0]
    other = into.carry(large(4))
    assert place(into, other) == places[0]
    assert place(into, third := into.carry(large(5))) not in places
    assert row[0] == 2
    assert (other == 4).all()
    assert (third == 5).all()


def test_what_does_not_fit_is_copied_elsewhere() -> None:
    into = made()
    kept = [into.carry(large()) for _ in range(30)]
    places = [place(into, array) for array in kept]
    assert None in places
    assert places[0] == 0
    assert all((array == 1).all() for array in kept)


def test_free_pages_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_segment, "_KEEP_NBYTES", 4096)
    into = made()

    def resident() -> int:  # KiB
        with open("/proc/self/smaps") as lines:
            text = lines.read().partition("memfd:inputs")[2]
        return int(text.partition("Rss:")[2].split()[0])

    before = into.carry(np.ones(NBYTES // 2, np.uint8))
    assert resident() >= NBYTES // 2 // 1024
    del before
    into.carry(large())
    assert resident() <= (INLINE_NBYTES + 8192) // 1024


@given(st.lists(st.integers(0, 9), max_size=30))
def test_blocks_never_overlap(order: list[int]) -> None:
    """Each number carries an array of that many pieces, or drops one that is alive."""
    into = made()
    alive: list[tuple[int, Any]] = []
    for step, number in enumerate(order):
        if number % 2 and alive:
            alive.pop(number % len(alive))
        else:
            fill = step % 251
            alive.append((fill, into.carry(np.full(INLINE_NBYTES // 2 * (number + 3), fill, np.uint8))))
        assert all((array == fill).all() for fill, array in alive)
