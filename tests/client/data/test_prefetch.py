"""Reading ahead: how far, when the thread starts and ends, and where errors come out."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.harness.timing import unit

from central_storage.data import prefetch
from central_storage.data.prefetch import ReadAhead
from cs_proto.errors import ContextError
from cs_proto.pace import Pace


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "cs-read-ahead"]


class Source:
    """0, 1, 2, …: notes what was read, and in which threads; can be made to wait; says when it is freed."""

    def __init__(self, end: int = 1 << 30) -> None:
        self.end = end
        self.read: list[int] = []
        self.threads: set[str] = set()
        self.reached: dict[int, threading.Event] = {}
        self.closed = threading.Event()

    def at(self, item: int) -> threading.Event:
        """Set when ``item`` is being read."""
        return self.reached.setdefault(item, threading.Event())

    def items(self) -> Iterator[int]:
        try:
            for item in range(self.end):
                self.read.append(item)
                self.threads.add(threading.current_thread().name)
                self.at(item).set()
                yield item
        finally:
            self.closed.set()


@given(st.integers(0, 20), st.integers(1, 5))
def test_the_items_in_their_order(end: int, size: int) -> None:
    assert list(ReadAhead(iter(range(end)), size)) == list(range(end))


def test_nothing_is_read_before_the_first_is_asked_for() -> None:
    source = Source()
    iterator = ReadAhead(source.items(), 2)
    assert (source.read, readers()) == ([], [])
    iterator.close()
    assert list(iterator) == []


def test_no_further_than_its_size() -> None:
    source = Source()
    iterator = ReadAhead(source.items(), 2)
    assert next(iterator) == 0
    assert source.at(2).wait(unit(10))
    assert next(iterator) == 1
    assert source.at(3).wait(unit(10))
    # Two lie ready, and nothing more is read until one is taken: the thread waits for room, not in the source.
    assert source.read == [0, 1, 2, 3]
    assert source.threads == {"cs-read-ahead"}
    iterator.close()
    assert source.closed.is_set()
    assert readers() == []


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("taken", [1, 2, 5])
def test_left_half_way_it_has_read_exactly_its_size_further(size: int, taken: int) -> None:
    for _ in range(20):
        source = Source()
        iterator = ReadAhead(source.items(), size)
        for _ in range(taken):
            next(iterator)
        del iterator
        assert source.closed.is_set()
        assert source.read == list(range(taken + size))


def test_the_end_ends_the_thread() -> None:
    source = Source(3)
    iterator = ReadAhead(source.items(), 1)
    assert [*iterator, *iterator] == [0, 1, 2]
    iterator.close()
    assert source.closed.is_set()
    assert readers() == []


def test_an_exception_comes_out_at_its_item_once_and_frees_the_source() -> None:
    freed = threading.Event()

    def items() -> Iterator[int]:
        try:
            yield from range(3)
        finally:
            freed.set()

    def sixth(item: int) -> int:
        return 6 // (1 - item)

    iterator = ReadAhead(map(sixth, items()), 5)
    assert next(iterator) == 6
    with pytest.raises(ZeroDivisionError) as caught:
        next(iterator)
    assert [entry.name for entry in caught.traceback][-1] == "sixth"
    with pytest.raises(StopIteration):
        next(iterator)
    assert freed.wait(unit(10))


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, MemoryError])
def test_whatever_the_source_raises_is_the_callers(kind: type[BaseException]) -> None:
    def items() -> Iterator[int]:
        yield 1
        raise kind("of the source")

    iterator = ReadAhead(items(), 2)
    assert next(iterator) == 1
    with pytest.raises(kind, match="of the source"):
        next(iterator)


def left_by_break(iterator: Any) -> None:
    for _ in iterator:
        break


def left_in_a_cycle(iterator: Any) -> None:
    next(iterator)
    cycle: list[Any] = [iterator]
    cycle.append(cycle)


@pytest.mark.parametrize("leave", [left_by_break, left_in_a_cycle])
def test_left_half_way(leave: Callable[[Any], None]) -> None:
    source = Source()
    leave(ReadAhead(source.items(), 1))
    gc.collect()
    assert source.closed.is_set()
    assert readers() == []


@pytest.mark.parametrize(("end", "taken"), [(1, 0), (5, 0), (5, 4), (0, 0), (2, 2)])
def test_ctrl_c_at_any_instant_of_a_take_leaves_it_readable(end: int, taken: int) -> None:
    """It may cost the item that is being taken; nobody waits for what was lost."""
    step, reached = 0, True
    while reached:
        with closing(ReadAhead(iter(range(end)), 1)) as items:
            assert [next(items) for _ in range(taken)] == list(range(taken))
            reached = _interrupted_at(step, items)
            left = list(items)
            assert left in (list(range(taken + lost, end)) for lost in (0, 1))
        step += 1
    assert step > 20


def _interrupted_at(step: int, items: ReadAhead) -> bool:
    """Take one, with a KeyboardInterrupt before the given bytecode of it; whether there are as many."""
    left = step

    def count(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        frame.f_trace_opcodes = frame.f_code.co_name == "take"
        if event == "opcode":
            left -= 1
            if left == -1:
                raise KeyboardInterrupt
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        next(items)
    except KeyboardInterrupt:
        return True
    except StopIteration:
        pass
    finally:
        sys.settrace(before)
    return False


def test_items_are_not_kept() -> None:
    class Item:
        alive = 0

        def __init__(self) -> None:
            Item.alive += 1

        def __del__(self) -> None:
            Item.alive -= 1

    most = 0
    for item in ReadAhead((Item() for _ in range(200)), 2):
        most = max(most, Item.alive)
        del item
    # Two ready, the caller's, and one on its way in each direction.
    assert most <= 5
    assert Item.alive == 0


def test_the_errstate_of_the_caller_holds_in_the_source() -> None:
    with np.errstate(divide="raise"):
        iterator = ReadAhead(iter(np.ones(1) / zero for zero in (np.zeros(1),)), 1)
        with pytest.raises(FloatingPointError):
            next(iterator)


def test_a_source_that_waits_for_ever_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(prefetch, "_STOP_TIMEOUT", 0.01)
    asked, go_on = threading.Event(), threading.Event()

    def items() -> Iterator[int]:
        yield 0
        asked.set()
        go_on.wait()
        yield 1

    iterator = ReadAhead(items(), 1)
    assert next(iterator) == 0
    assert asked.wait(unit(10))
    iterator.close()
    assert "it ends when the element arrives" in caplog.text
    (thread,) = readers()
    go_on.set()
    thread.join(unit(10))
    assert not thread.is_alive()


def test_a_long_wait_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(prefetch, "pace_of", lambda _: Pace(0.01))
    named = threading.Event()

    class Tells(prefetch.logging.Handler):
        def emit(self, record: Any) -> None:
            named.set()

    handler = Tells()
    prefetch._log.addHandler(handler)
    try:
        assert list(ReadAhead((named.wait(unit(10)) for _ in range(1)), 1)) == [True]
    finally:
        prefetch._log.removeHandler(handler)
    assert "for the next element of a data set" in caplog.text


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # Python 3.12's, for forking beside a thread
def test_a_forked_child_cannot_read_on_and_ends() -> None:
    iterator = ReadAhead(iter(range(9)), 1)
    assert next(iterator) == 0
    child = os.fork()
    if child == 0:
        try:
            next(iterator)
        except ContextError:
            iterator.close()
            del iterator
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert next(iterator) == 1
    iterator.close()


@pytest.mark.parametrize("waits", ["threading.Event().wait(0)", "threading.Event().wait()"])
def test_a_script_ends_with_an_iteration_half_way(waits: str) -> None:
    script = f"""
        import threading
        from central_storage.data import prefetch
        prefetch._STOP_TIMEOUT = 0.1

        def items():
            try:
                yield 0
                {waits}
                while True:
                    yield 1
            finally:
                print("freed", flush=True)

        iterator = prefetch.ReadAhead(items(), 1)
        print(next(iterator), flush=True)
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=unit(30), check=True
    )
    said = ended.stdout.split()
    assert said == ["0", "freed"] if "wait(0)" in waits else said[0] == "0"
