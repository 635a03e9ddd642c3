"""Which memory is page-locked."""

from __future__ import annotations

import mmap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cs_runtime.shared_memory.page_locks import PageLocks

PAGE = mmap.PAGESIZE
PAGES = 16
START = 1 << 20  # no call of this file's touches memory


class Runtime:
    """CUDA's calls, over numbers."""

    class CUDARuntimeError(RuntimeError):
        pass

    def __init__(self, refused: int = 0) -> None:
        self.ranges: dict[int, int] = {}
        self.flags: list[int] = []
        self.calls = 0
        self._refused = refused

    def hostRegister(self, start: int, nbytes: int, flags: int) -> None:  # noqa: N802
        self.calls += 1
        if flags == self._refused:
            raise self.CUDARuntimeError("not supported")
        assert start % PAGE == nbytes % PAGE == 0 < nbytes
        assert not any(low < start + nbytes and start < high for low, high in self.ranges.items())
        self.ranges[start] = start + nbytes
        self.flags.append(flags)

    def hostUnregister(self, start: int) -> None:  # noqa: N802
        del self.ranges[start]

    @property
    def shown(self) -> list[tuple[int, int]]:
        return sorted(((low - START) // PAGE, (high - START) // PAGE) for low, high in self.ranges.items())


class Locks:
    """Page locks over bytes that are counted from START."""

    def __init__(self, refused: int = 0) -> None:
        self.runtime = Runtime(refused)
        self.waits = 0
        self.said: list[str] = []
        self.locks = PageLocks(self.runtime, self._wait, self.said.append)

    def _wait(self) -> None:
        self.waits += 1

    def lock(self, start: int, stop: int, *, writable: bool = True) -> bool:
        return self.locks.lock([(START + start, START + stop)], writable=writable)

    def covers(self, start: int, stop: int) -> bool:
        return self.locks.covers(START + start, START + stop)

    def unlock(self, start: int, stop: int) -> None:
        self.locks.unlock(START + start, START + stop)

    def parts(self, start: int, nbytes: int) -> list[tuple[int, int]]:
        return list(self.locks.parts(START + start, nbytes))


@pytest.fixture
def locks() -> Locks:
    return Locks()


def test_gaps_alone_are_locked_and_no_copy_crosses_a_border(locks: Locks) -> None:
    spans = [(3 * PAGE, 4 * PAGE - 1), (10, 20), (PAGE - 1, PAGE)]
    assert locks.locks.lock((START + start, START + stop) for start, stop in spans)
    assert locks.lock(5, 5)
    assert locks.runtime.shown == [(0, 1), (3, 4)]
    assert locks.lock(100, 5 * PAGE)
    assert locks.runtime.shown == [(0, 1), (1, 3), (3, 4), (4, 5)]
    assert locks.covers(0, 5 * PAGE)
    assert not locks.covers(PAGE, 5 * PAGE + 1)
    assert locks.parts(PAGE - 10, 20) == [(0, 10), (10, 20)]
    assert locks.parts(5 * PAGE - 1, 2) == [(0, 1), (1, 2)]
    assert locks.parts(PAGE, PAGE) == [(0, PAGE)]
    assert locks.parts(9 * PAGE, 7) == [(0, 7)]
    assert locks.parts(0, 0) == []
    assert (locks.runtime.calls, locks.waits) == (4, 0)


def test_what_is_freed_is_unlocked_with_what_was_locked_with_it_when_nothing_is_under_way(locks: Locks) -> None:
    locks.lock(10, 2 * PAGE)
    locks.lock(4 * PAGE, 5 * PAGE)
    locks.unlock(2 * PAGE, 4 * PAGE)
    assert locks.waits == 0
    locks.unlock(20, 30)
    assert (locks.runtime.shown, locks.waits) == ([(4, 5)], 1)
    assert not locks.covers(PAGE, PAGE + 1)
    locks.locks.close()
    assert (locks.runtime.shown, locks.waits) == ([], 2)
    locks.locks.close()


def test_read_only_memory_is_locked_as_such_and_a_refusal_is_said_once() -> None:
    locks = Locks(refused=1 | 2 | 8)
    assert not locks.lock(0, PAGE, writable=False)
    assert not locks.lock(0, PAGE, writable=False)
    assert locks.lock(2 * PAGE, 3 * PAGE)
    assert (locks.runtime.shown, locks.runtime.flags, locks.runtime.calls) == ([(2, 3)], [1 | 2], 2)
    assert not locks.covers(0, PAGE)
    assert locks.said == ["shared memory cannot be page-locked (not supported)"]


spans = st.tuples(st.integers(0, PAGES * PAGE), st.integers(0, PAGES * PAGE)).map(sorted)


@given(st.lists(st.tuples(st.booleans(), spans), max_size=6), spans)
def test_what_was_locked_last_is_covered_and_copies_keep_within_ranges(
    steps: list[tuple[bool, list[int]]], copied: list[int]
) -> None:
    locks = Locks()
    for is_lock, (start, stop) in steps:
        if is_lock:
            assert locks.lock(start, stop)
            assert locks.covers(start, stop)
        else:
            locks.unlock(start, stop)
            assert start == stop or not any(locks.covers(byte, byte + 1) for byte in (start, stop - 1))
    parts = locks.parts(copied[0], copied[1] - copied[0])
    assert [low for low, _ in parts] + [copied[1] - copied[0]] * bool(parts) == [0] * bool(parts) + [
        h for _, h in parts
    ]
    for low, high in parts:
        first, last = START + copied[0] + low, START + copied[0] + high
        assert all(
            (begin <= first and last <= end) or last <= begin or end <= first
            for begin, end in locks.runtime.ranges.items()
        )
