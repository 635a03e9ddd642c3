"""Which memory is page-locked."""

from __future__ import annotations

import mmap
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cs_worker.locking import PageLocks

PAGE = mmap.PAGESIZE
PAGES = 16
_memory = mmap.mmap(-1, PAGES * PAGE)
BYTES = np.frombuffer(_memory, np.uint8)
START = BYTES.__array_interface__["data"][0]


class Runtime:
    """CUDA's calls, over ranges of BYTES."""

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


class Waits:
    count = 0

    def __call__(self) -> None:
        self.count += 1


@pytest.fixture
def runtime() -> Runtime:
    return Runtime()


def locks_over(runtime: Runtime, wait: Waits | None = None) -> PageLocks:
    return PageLocks(SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)), wait or Waits())


def test_arrays_that_share_a_page_are_locked_as_one(runtime: Runtime) -> None:
    locks = locks_over(runtime)
    locks.lock([BYTES[10:20], BYTES[PAGE - 1 : PAGE + 1], BYTES[5 * PAGE : 6 * PAGE], BYTES[3:3]])
    assert runtime.shown == [(0, 2), (5, 6)]
    assert locks.covers(BYTES[: 2 * PAGE])
    assert not locks.covers(BYTES[PAGE : 2 * PAGE + 1])
    locks.lock([BYTES[100:200]])
    assert runtime.calls == 2


def test_what_grows_is_locked_anew_when_nothing_is_under_way(runtime: Runtime) -> None:
    wait = Waits()
    locks = locks_over(runtime, wait)
    locks.lock([BYTES[:10]])
    locks.lock([BYTES[PAGE : PAGE + 1]])
    assert (runtime.shown, wait.count) == ([(0, 1), (1, 2)], 0)
    locks.lock([BYTES[PAGE - 10 : 2 * PAGE + 10]])
    assert (runtime.shown, wait.count) == ([(0, 3)], 1)


def test_what_is_freed_is_unlocked_with_its_neighbours(runtime: Runtime) -> None:
    locks = locks_over(runtime)
    locks.lock([BYTES[:10], BYTES[20:30], BYTES[4 * PAGE : 5 * PAGE]])
    locks.unlock([BYTES[20:30]])
    assert runtime.shown == [(4, 5)]
    assert not locks.covers(BYTES[:10])
    locks.close()
    assert runtime.shown == []


def test_read_only_memory_is_locked_as_such_and_may_be_refused(caplog: pytest.LogCaptureFixture) -> None:
    runtime = Runtime(refused=9)
    locks = locks_over(runtime)
    read_only = BYTES[:PAGE].view()
    read_only.flags.writeable = False
    with caplog.at_level("INFO", "central_storage.worker"):
        locks.lock([read_only])
        locks.lock([read_only, BYTES[2 * PAGE : 3 * PAGE]])
    assert (runtime.shown, runtime.flags, runtime.calls) == ([(2, 3)], [1], 2)
    assert not locks.covers(read_only)
    assert [record.message for record in caplog.records] == [
        "shared memory cannot be page-locked (not supported): copies to and from the GPU are slower"
    ]


spans = st.tuples(st.integers(0, PAGES * PAGE), st.integers(0, PAGES * PAGE)).map(sorted)


@given(st.lists(st.tuples(st.booleans(), st.lists(spans, max_size=4)), max_size=6))
def test_what_was_locked_last_is_covered_whatever_came_before(steps: list[tuple[bool, list[list[int]]]]) -> None:
    runtime = Runtime()
    locks = locks_over(runtime)
    for is_lock, pieces in steps:
        arrays = [BYTES[start:stop] for start, stop in pieces if start < stop]
        (locks.lock if is_lock else locks.unlock)(arrays)
        if is_lock:
            assert all(map(locks.covers, arrays))
        else:
            assert not any(map(locks.covers, arrays))
