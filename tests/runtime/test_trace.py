"""A process notes moments in a ring, and a reader sees each of them whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.harness.rings import read

import central_storage as cs
from central_storage.timeline.rings import GAP, Moment, Ring
from cs_proto import step_times as layout
from cs_proto.errors import ConfigurationError
from cs_runtime import trace
from cs_runtime.trace import Trace


def written(memory: memoryview, *names: str, clock: Any = None) -> Trace:
    made = Trace(clock or count(5).__next__)
    made.attach(memory)
    for run, name in enumerate(names, 1):
        made.note(name, run)
    return made


def empty(is_watched: bool = True) -> memoryview:
    memory = memoryview(bytearray(layout.NBYTES))
    memory.cast("Q")[layout.WATCHED] = is_watched
    return memory


def test_moments_have_their_time_their_name_and_their_run() -> None:
    memory = empty()
    made = written(memory, "called", "returned")
    made.note("sent", (1 << 40) + 7)
    made.note("woken")
    moments, lost = read(Ring(memory))
    assert not lost
    assert [(each.name, each.run) for each in moments] == [
        ("started", os.getpid()),
        ("called", 1),
        ("returned", 2),
        ("sent", 7),
        ("woken", 0),
    ]
    assert [each.when for each in moments] == sorted(each.when for each in moments)


def test_its_owner_sees_whether_somebody_reads() -> None:
    memory, made = empty(is_watched=False), Trace()
    words = memory.cast("Q")
    seen = [made.watched[0]]
    made.attach(memory)
    for is_watched in (False, True, False, True):
        words[layout.WATCHED] = is_watched
        seen.append(made.watched[0])
    made.detach()
    assert [*seen, made.watched[0]] == [0, 0, 1, 0, 1, 0]


def test_nothing_is_noted_while_nobody_reads() -> None:
    memory = empty(is_watched=False)
    words = memory.cast("Q")
    made = written(memory, "called")
    made.note_span("forward", layout.BEGINS)
    ring = Ring(memory)
    assert [each.name for each in read(ring)[0]] == ["started"]
    words[layout.WATCHED] = 1
    made.note("returned", 2)
    words[layout.WATCHED] = 0
    made.note("sent", 2)
    assert [each.name for each in read(ring)[0]] == ["returned"]


def test_each_moment_is_read_once() -> None:
    memory = empty()
    made = written(memory)
    ring = Ring(memory, from_now=True)
    assert read(ring) == ([], 0)
    made.note("called", 3)
    assert [each.name for each in read(ring)[0]] == ["called"]
    assert read(ring) == ([], 0)


def test_another_process_goes_on_where_one_was_killed() -> None:
    memory = empty()
    made = written(memory, "called")
    made.note_span("forward", layout.BEGINS)
    again = written(memory, "called", clock=count(50).__next__)
    again.note_span("backward", layout.BEGINS)
    moments, _ = read(Ring(memory))
    assert [each.name for each in moments] == ["started", "called", "forward", "started", "called", "backward"]


def test_a_ring_without_a_writer_is_empty_and_one_of_another_layout_is_refused() -> None:
    memory = empty()
    ring = Ring(memory)
    assert read(ring) == ([], 0)
    written(memory)
    memory.cast("Q")[layout.VERSION] = 99
    with pytest.raises(ConfigurationError, match="layout 99"):
        read(ring)


def test_what_was_overwritten_is_counted_and_leaves_a_gap() -> None:
    memory = empty()
    made = written(memory)
    ring = Ring(memory)
    for run in range(layout.CAPACITY + 10):
        made.note("sent", run)
    moments, lost = read(ring)
    assert lost == 12  # with "started", and one that could be in the midst of being overwritten
    assert moments[0] == Moment(moments[1].when, GAP, 0)
    assert [each.run for each in moments[1:]] == list(range(11, layout.CAPACITY + 10))


def test_spans_have_names_until_the_table_is_full() -> None:
    memory = empty()
    made = written(memory)
    for number in range(layout.MOST_NAMES + 20):
        made.note_span(f"span {number}", layout.BEGINS)
        made.note_span(f"span {number}", layout.ENDS)
    spans = [each for each in read(Ring(memory))[0] if each.edge]
    assert [each.edge for each in spans] == [1, -1] * (layout.MOST_NAMES + 20)
    names = [each.name for each in spans[::2]]
    kept = layout.MOST_NAMES - 1
    assert names == [f"span {number}" for number in range(kept)] + [layout.OTHER_SPANS] * 21


def test_several_threads_lose_no_moment() -> None:
    memory = empty()
    made = Trace()
    made.attach(memory)
    begin = threading.Barrier(4)

    def note(thread: int) -> None:
        begin.wait()
        for _ in range(10_000):
            made.note("called", thread)

    threads = [threading.Thread(target=note, args=(thread,)) for thread in range(1, 5)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    finally:
        sys.setswitchinterval(before)
    moments, lost = read(Ring(memory))
    assert not lost
    runs = [each.run for each in moments[1:]]
    assert [runs.count(thread) for thread in range(1, 5)] == [10_000] * 4


class Stores:
    """Words that are not stored yet."""

    def __init__(self, words: memoryview) -> None:
        self.words = words
        self.waiting: list[tuple[int, int]] = []

    def __getitem__(self, place: int) -> int:
        return self.words[place]

    def __setitem__(self, place: int, value: int) -> None:
        self.waiting.append((place, value))

    def store(self, number: int) -> None:
        for place, value in self.waiting[:number]:
            self.words[place] = value
        del self.waiting[:number]


@given(st.integers(0, 12), st.integers(0, 40), st.lists(st.integers(0, 9), min_size=1))
def test_no_reader_sees_a_torn_moment(before: int, notes: int, pauses: list[int]) -> None:
    """The writer's stores fall between any two loads of a reader of a ring of four places."""
    patch = pytest.MonkeyPatch()
    with patch.context() as patched:
        patched.setattr(layout, "CAPACITY", 4)
        memory = empty()
        numbers = count(1)
        made = Trace(lambda: next(numbers))
        made.attach(memory)
        for _ in range(before):
            made.note("sent", next(numbers) + 1)  # of every moment but the first, the time is the run
        ring = Ring(memory)
        stores = Stores(made._words)
        made._write_to(stores, 4, before + 1)  # type: ignore[arg-type]
        for _ in range(notes):
            made.note("sent", next(numbers) + 1)
        patched.setattr(ring, "_words", Interleaved(ring._words, stores, pauses))
        patched.setattr(ring, "_moments", Interleaved(ring._moments, stores, pauses))
        seen: list[Moment] = []
        lost = 0
        while stores.waiting:
            moments, missing = read(ring)
            seen += moments
            lost += missing
            stores.store(1)
        moments, missing = read(ring)
    seen, lost = seen + moments, lost + missing
    noted = [each for each in seen if each.name != GAP]
    assert all(each.when == each.run for each in noted if each.name == "sent")
    assert [each.when for each in noted] == sorted({each.when for each in noted})
    assert len(noted) + lost == 1 + before + notes


class Interleaved:
    """An array, between whose loads other stores happen."""

    def __init__(self, array: Any, stores: Stores, pauses: list[int]) -> None:
        self.array, self.stores, self.pauses = array, stores, pauses
        self.loads = 0

    def _pause(self) -> None:
        self.stores.store(self.pauses[self.loads % len(self.pauses)])
        self.loads += 1

    def __getitem__(self, places: Any) -> Any:
        if isinstance(places, int):
            self._pause()
            return self.array[places]
        found = self.array[places]
        for row, place in enumerate(places):
            for word in range(2):
                self._pause()
                found[row, word] = self.array[place, word]
        return found


PROGRAM = """
import mmap, os, sys
from cs_runtime.trace import Trace
memory = mmap.mmap(int(sys.argv[1]), 0)
numbers = iter(range(1, 1 << 30))
trace = Trace(numbers.__next__)
trace.attach(memoryview(memory))
print(flush=True)
for run in range(2, 400_000):
    trace.note("sent", run)
"""


def test_a_reader_beside_a_writer_sees_whole_moments() -> None:
    """Of every moment the time is the run and one, and the ring is filled several times meanwhile."""
    import mmap

    descriptor = os.memfd_create("ring")
    os.ftruncate(descriptor, layout.NBYTES)
    with mmap.mmap(descriptor, 0) as memory:
        view = memoryview(memory)
        view.cast("Q")[layout.WATCHED] = 1
        ring = Ring(view)
        with subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(descriptor)], stdout=subprocess.PIPE, pass_fds=[descriptor]
        ) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            seen: list[Moment] = []
            lost, is_over = 0, False
            while not is_over:
                is_over = writer.poll() is not None
                moments, missing = read(ring)
                seen, lost = seen + moments[-1000:], lost + missing
                assert all(each.when - 1 == each.run for each in moments if each.name == "sent")
        del ring, moments
        view.release()
    os.close(descriptor)
    assert seen[-1].run == 399_999


def test_a_forked_child_notes_nothing() -> None:
    memory = empty()
    made = written(memory)
    pid = os.fork()
    if not pid:
        made.note("called")
        trace.note_span("forward", layout.BEGINS)
        os._exit(0 if Ring(memory)._written == 1 else 1)
    assert os.waitpid(pid, 0)[1] == 0
    trace.note_span("forward", layout.BEGINS)
    assert Ring(memory)._written == 2
    made.detach()


def test_spans_are_noted_in_the_rings_of_all_services() -> None:
    """The end of one service, also of the last one, leaves the others theirs."""
    rings = [empty(), empty()]
    first, second = map(written, rings)
    with cs.span("forward"):
        second.detach()
    with cs.span("backward"):
        pass
    first.detach()
    with cs.span("nobody sees it"):
        pass
    named = [[each.name for each in read(Ring(ring))[0][1:]] for ring in rings]
    assert named == [["forward", "forward", "backward", "backward"], ["forward"]]


def test_nothing_is_noted_without_a_ring_or_where_it_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Trace()
    made.note("called")
    made.note_span("forward", layout.BEGINS)
    memory = empty()
    made.attach(memory)
    made.detach()
    made.note("called")
    assert [each.name for each in read(Ring(memory))[0]] == ["started"]
    assert trace.is_on()
    monkeypatch.setenv("CS_TIMES", "off")
    assert not trace.is_on()
    ended = subprocess.run(
        [sys.executable, "-c", "from cs_runtime import trace; print(trace.moments('worker').__name__)"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert ended.stdout == "_nothing\n"
    monkeypatch.setenv("CS_TIMES", "yes")
    with pytest.raises(ConfigurationError, match="CS_TIMES must be on or off, not 'yes'"):
        trace.is_on()


def test_names_that_begin_alike_are_one_also_for_the_next_process() -> None:
    """The table has 63 bytes of each name."""
    memory, long = empty(), "x" * 63
    first = written(memory)
    for name in (long + "a", long + "b", "short"):
        first.note_span(name, layout.BEGINS)
    second = written(memory)
    for name in ("new", long + "c", "short"):
        second.note_span(name, layout.BEGINS)
    assert [each.name for each in read(Ring(memory))[0]] == [
        *("started", long, long, "short"),
        *("started", "new", long, "short"),
    ]
