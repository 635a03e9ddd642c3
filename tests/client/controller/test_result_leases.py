"""Results that stay in an arena: which do, for how long, and whose they are after a fork or a parting."""

from __future__ import annotations

import gc
import mmap
import os
import pickle
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.harness.examples import examples

from central_storage.controller import result_leases as module
from central_storage.controller.result_leases import ResultLeases
from cs_proto.arrays import Array, Location
from cs_proto.errors import MemoryPlanError
from cs_proto.messages import Done, Fetch
from cs_runtime.shared_memory.arena import Arena
from cs_runtime.shared_memory.mapping import Mapping
from cs_runtime.shared_memory.remote_segment import RemoteSegment

NBYTES = 16 << 20
LARGE = 512 << 10


class Both:
    """An arena as its worker places in it, and as the script holds what lies there."""

    def __init__(self, nbytes: int = NBYTES, replicas: int = 1) -> None:
        self.file = os.memfd_create("arena")
        os.ftruncate(self.file, nbytes)
        self.nbytes = nbytes
        self.arena = Arena(self._map)
        self.results = ResultLeases("arena/0", self._map, replicas)

    def _map(self) -> Mapping:
        return Mapping("arena/0", os.dup(self.file), self.nbytes, writable=True)

    def place(self, *values: np.ndarray) -> list[Array]:
        """What a run returns."""
        self.arena.reset(0, 1, self.results.held())
        return [self.arena.place(value) for value in values]

    def returned(self, value: np.ndarray) -> np.ndarray:
        taken = self.results.take(self.place(value)[0])
        assert taken is not None
        return taken

    def __del__(self) -> None:
        os.close(self.file)


def large(number: int, nbytes: int = LARGE) -> np.ndarray:
    return np.full(nbytes, number, np.uint8)


@pytest.mark.parametrize(
    "value",
    [
        np.arange(200_000, dtype=np.float32).reshape(100, 2000),
        np.arange(200_000, dtype=np.int64).reshape(2, -1).T,
        np.array(["text", "other"] * 15_000),
        np.ones((100_000, 2), np.complex64)[::2],
        np.arange(LARGE) % 3 == 0,
    ],
)
def test_a_large_result_is_held_and_like_any_array(value: np.ndarray) -> None:
    both = Both()
    (array,) = both.place(value)
    taken = both.results.take(array)
    assert taken is not None
    assert (taken.dtype, taken.shape) == (value.dtype, value.shape)
    assert np.array_equal(taken, value)
    taken[...] = taken[::-1].copy()
    assert np.array_equal(taken, value[::-1])
    assert np.array_equal(pickle.loads(pickle.dumps(taken)), value[::-1])


def test_one_is_held_until_nothing_views_it() -> None:
    both = Both()
    first = both.returned(large(1))
    row = memoryview(first.reshape(8, -1).view(np.int8)[1:2])
    ((start, stop),) = both.results.held()
    assert (start, stop) == (0, LARGE)
    del first
    second = both.returned(large(2))
    assert both.results.held() == ((0, 2 * LARGE),)
    assert set(row.tobytes()) == {1}
    del row
    assert both.results.held() == ((LARGE, 2 * LARGE),)
    third = both.returned(large(3))
    assert both.results.held() == ((0, 2 * LARGE),)
    assert second.min() == second.max() == 2
    assert third.min() == third.max() == 3


def test_whole_pages_are_held() -> None:
    both = Both()
    taken = both.returned(large(1, LARGE + 1))
    assert both.results.held() == ((0, LARGE + mmap.PAGESIZE),)
    assert taken.nbytes == LARGE + 1


def test_what_is_returned_twice_is_two_arrays() -> None:
    both = Both()
    (array,) = both.place(large(1))
    first, second = both.results.take(array), both.results.take(array)
    assert first is not None
    assert second is None  # the link copies it


def _small() -> ResultLeases | None:
    both = Both()
    return None if both.results.take(both.place(large(1, LARGE - 1))[0]) is None else both.results


def _unaligned() -> ResultLeases | None:
    both = Both()
    array = Array("uint8", (LARGE,), Location("arena/0", 64))
    return None if both.results.take(array) is None else both.results


def _elsewhere() -> ResultLeases | None:
    both = Both()
    array = Array("uint8", (LARGE,), Location("arena/1", 0))
    return None if both.results.take(array) is None else both.results


def _carried() -> ResultLeases | None:
    def carry(request: Callable[[int], Fetch], answer: type[Done]) -> Done:
        raise AssertionError("nothing is fetched")

    carried = ResultLeases("arena/0", lambda: RemoteSegment("arena/0", NBYTES, carry), 1)
    return None if carried.take(Array("uint8", (LARGE,), Location("arena/0", 0))) is None else carried


@pytest.mark.parametrize("kind", [_small, _unaligned, _elsewhere, _carried])
def test_others_are_to_be_copied(kind: Callable[[], ResultLeases | None]) -> None:
    assert kind() is None


@pytest.mark.parametrize(("replicas", "count"), [(1, 4), (2, 2)])
def test_no_more_than_a_share_of_the_room_is_held(replicas: int, count: int) -> None:
    both = Both(replicas=replicas)  # an eighth of 16 MiB is four
    kept = [both.returned(large(number)) for number in range(count)]
    (array,) = both.place(large(9))
    assert both.results.take(array) is None
    del kept[0]
    both.results.held()
    assert both.results.take(array) is not None


def test_no_more_than_a_run_can_say_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST", 2)
    both = Both()
    kept = [both.returned(large(number)) for number in range(2)]
    assert both.results.take(both.place(large(9))[0]) is None
    assert [array[0] for array in kept] == [0, 1]


def test_what_is_used_stays_bounded_when_results_are_dropped() -> None:
    both = Both()
    kept = both.returned(large(0))
    for number in range(100):
        kept = both.returned(large(number))
    assert kept[0] == 99
    assert os.fstat(both.file).st_blocks * 512 <= 2 * LARGE


@settings(max_examples=examples(30))
@given(
    steps=st.lists(
        st.tuples(
            st.lists(st.integers(LARGE, 2 * LARGE), min_size=1, max_size=2), st.sets(st.integers(0, 9)), st.booleans()
        ),
        max_size=12,
    )
)
def test_nothing_is_overwritten_while_it_is_held(steps: list[tuple[list[int], set[int], bool]]) -> None:
    both = Both(256 << 20)
    held: list[tuple[np.ndarray, int]] = []
    for step, (sizes, dropped, forks) in enumerate(steps):
        for array in both.place(*(large(step, size) for size in sizes)):
            taken = both.results.take(array)
            assert taken is not None
            held.append((taken, step))
        del taken
        held = [each for number, each in enumerate(held) if number not in dropped]
        if forks:
            both.results.own()
        look_and_write(held)


def look_and_write(held: list[tuple[np.ndarray, int]]) -> None:
    for view, number in held:
        assert view.min() == view.max() == number
    for change in (100, -100):
        for view, _ in held:
            view += np.uint8(change % 256)


def test_what_a_child_holds_stays_what_it_is() -> None:
    both = Both()
    taken, other = both.returned(large(1)), both.returned(large(2))
    goes_on, said = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.read(goes_on[0], 1)
        whole = taken.min() == taken.max() == 1
        taken[...] = 7
        os.write(said[1], b"y" if whole else b"n")
        os._exit(0)
    del taken
    third = both.returned(large(3))
    assert both.results.held() == ((0, 2 * LARGE),)
    other += 1
    os.write(goes_on[1], b"x")
    assert os.read(said[0], 1) == b"y"
    os.waitpid(child, 0)
    assert third.min() == third.max() == other.min() == other.max() == 3
    assert np.shares_memory(third, both.results._mapping.elements("uint8"))
    third += 1
    assert both.arena.view(Array("uint8", (LARGE,), Location("arena/0", 0))).max() == 4  # not detached any more
    for end in (*goes_on, *said):
        os.close(end)


def test_a_child_has_its_own_also_where_only_the_array_is_left() -> None:
    both = Both()
    taken = both.returned(large(1))
    del both
    gc.collect()
    child = os.fork()
    if not child:
        taken[...] = 7
        os._exit(0)
    os.waitpid(child, 0)
    assert taken.min() == taken.max() == 1


def test_what_became_ones_own_is_the_arenas_again_when_it_is_dropped() -> None:
    both = Both()
    taken = both.returned(large(1))
    both.results.own()
    both.arena.view(Array("uint8", (LARGE,), Location("arena/0", 0)))[...] = 9
    assert taken.min() == taken.max() == 1
    taken[...] = 5
    del taken
    again = both.returned(large(2))
    assert both.results.held() == ((0, LARGE),)
    assert again.min() == again.max() == 2


def test_where_there_is_no_memory_to_own_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    both = Both()
    taken = both.returned(large(1))

    def refuse(*_: object) -> None:
        raise MemoryPlanError("no memory")

    monkeypatch.setattr(Mapping, "_touch", refuse)
    with pytest.raises(MemoryPlanError, match="no memory"):
        both.results.own()
    assert taken.min() == taken.max() == 1
