"""The control store: what both kinds promise, and that the log survives being cut off at any byte."""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.harness.examples import examples

from cs_proto.errors import MemoryPlanError
from cs_server.engine.store.control_log import Control, ControlDamaged, ControlFull, ControlLog, ControlMemory

KINDS: list[Callable[[], Control]] = [ControlMemory, lambda: ControlLog(np.zeros(4096, np.uint8), turnover=256)]


@pytest.fixture(params=KINDS, ids=["memory", "log"])
def store(request: pytest.FixtureRequest) -> Control:
    made: Control = request.param()
    return made


def test_holds_what_was_written_last(store: Control) -> None:
    store.write({b"a": b"1", b"b": b"2"})
    store.write({b"a": b"3", b"c": b""})
    assert dict(store.items()) == {b"a": b"3", b"b": b"2", b"c": b""}


def test_removes_keys_and_ignores_missing_ones(store: Control) -> None:
    store.write({b"a": b"1", b"b": b"2"})
    store.write({b"a": None, b"z": None})
    assert dict(store.items()) == {b"b": b"2"}


CHANGES = st.dictionaries(st.binary(max_size=4), st.none() | st.binary(max_size=90), max_size=4)


@given(st.lists(CHANGES, max_size=30))
@settings(max_examples=examples(60))
def test_both_kinds_and_a_reopened_log_agree(script: list[dict[bytes, bytes | None]]) -> None:
    # Keys of up to 4 bytes in 8 KiB: the log is rewritten often and never full.
    memory, buffer = ControlMemory(), np.zeros(64 + 2 * 8192, np.uint8)
    log = ControlLog(buffer, turnover=512)
    for changes in script:
        memory.write(changes)
        log.write(changes)
        assert dict(log.items()) == dict(memory.items())
        assert dict(ControlLog(buffer, turnover=512).items()) == dict(memory.items())


def test_is_rewritten_into_the_other_half_long_before_it_is_full() -> None:
    buffer = np.zeros(1 << 20, np.uint8)
    log = ControlLog(buffer, turnover=1024)
    for number in range(1000):
        log.write({b"key": number.to_bytes(8, "little")})
    touched = np.flatnonzero(buffer)
    half = 64 + (len(buffer) - 64) // 2 // 8 * 8
    assert touched[touched < half].max() <= 64 + 1024
    assert half <= touched.max() <= half + 1024
    assert dict(ControlLog(buffer).items()) == {b"key": (999).to_bytes(8, "little")}


def test_a_full_log_says_so_and_stands_as_before() -> None:
    log = ControlLog(np.zeros(1024, np.uint8))
    log.write({b"a": bytes(300)})
    with pytest.raises(ControlFull, match=r"full: \d+ bytes are needed, 480 available") as refused:
        log.write({b"a": bytes(100), b"b": bytes(400)})
    assert isinstance(refused.value, MemoryPlanError)
    assert dict(log.items()) == {b"a": bytes(300)}
    log.write({b"a": None, b"b": bytes(400)})
    assert dict(log.items()) == {b"b": bytes(400)}


class Cut(Exception):
    """The process died here."""


class FragileLog(ControlLog):
    """A log whose process dies after so many single stores; a store of bytes may be cut at any of them."""

    left = -1

    def _store(self, start: int, data: bytes | memoryview) -> None:
        if 0 <= self.left < len(data):
            super()._store(start, data[: self.left])
            raise Cut
        self.left -= len(data)
        super()._store(start, data)

    def _publish(self, word: int, value: int) -> None:
        if self.left == 0:
            raise Cut
        self.left -= 1
        super()._publish(word, value)


@pytest.mark.parametrize("nbytes", [1024, 400], ids=["appended", "rewritten"])
def test_cut_off_anywhere_it_is_as_before_or_as_after(nbytes: int) -> None:
    before = {b"a": b"one", b"b": bytes(20), b"gone": b"x"}
    changes: dict[bytes, bytes | None] = {b"a": b"two", b"gone": None, b"new": bytes(range(40))}
    after = {b"a": b"two", b"b": bytes(20), b"new": bytes(range(40))}
    seen = []
    for stores in range(1000):
        buffer = np.zeros(nbytes, np.uint8)
        FragileLog(buffer).write(before)
        log = FragileLog(buffer)
        log.left = stores
        try:
            log.write(changes)
        except Cut:
            state = dict(ControlLog(buffer).items())
            assert state in (before, after)
            seen.append(state == after)
            # The next write over the remains of the one that was cut off.
            ControlLog(buffer).write({b"z": b"26"})
            assert dict(ControlLog(buffer).items()) == {**state, b"z": b"26"}
        else:
            assert dict(ControlLog(buffer).items()) == after
            assert buffer[16] == (nbytes == 400)  # which half counts
            break
    assert len(seen) >= 100
    assert not any(seen)  # only the last store makes it count


def test_cut_off_while_it_is_made_it_is_made_again() -> None:
    for stores in range(3):
        buffer = np.zeros(1024, np.uint8)
        log = FragileLog.__new__(FragileLog)
        log.left = stores
        with suppress(Cut):
            log.__init__(buffer)  # type: ignore[misc]
        assert dict(ControlLog(buffer).items()) == {}


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda buffer: buffer[:8].fill(7), "not a control store"),
        (lambda buffer: buffer[8:16].fill(1), "not a control store"),
        (lambda buffer: buffer[16:24].fill(9), "half"),
        (lambda buffer: buffer[24:32].fill(255), "ends at byte"),
        (lambda buffer: buffer[64 + 20 :].fill(3), "does not read back"),
        (lambda buffer: buffer[64 + 8 : 64 + 16].fill(200), "does not read back"),
    ],
    ids=["magic", "size", "active half", "tail", "contents", "length"],
)
def test_damage_is_found(spoil: Callable[[NDArray[np.uint8]], None], reason: str) -> None:
    buffer = np.zeros(1024, np.uint8)
    ControlLog(buffer).write({b"key": b"value"})
    spoil(buffer)
    with pytest.raises(ControlDamaged, match=reason):
        ControlLog(buffer)


@pytest.mark.parametrize(
    "buffer",
    [np.zeros(1024, np.int8), np.zeros((2, 512), np.uint8), np.zeros(2048, np.uint8)[::2], np.zeros(64, np.uint8)],
    ids=["dtype", "rank", "strided", "too small"],
)
def test_a_buffer_that_cannot_hold_a_store_is_refused(buffer: NDArray[np.uint8]) -> None:
    with pytest.raises(ControlDamaged):
        ControlLog(buffer)


def test_a_read_only_buffer_is_refused() -> None:
    buffer = np.zeros(1024, np.uint8)
    buffer.flags.writeable = False
    with pytest.raises(ControlDamaged, match="writable"):
        ControlLog(buffer)


def test_room_is_asked_for_before_anything_is_written() -> None:
    asked: list[tuple[int, int]] = []

    def reserve(start: int, stop: int) -> None:
        asked.append((start, stop))
        if sum(stop - start for start, stop in asked) > 1500:
            raise MemoryPlanError("1500 bytes available")

    buffer = np.zeros(4096, np.uint8)
    log = ControlLog(buffer, turnover=512, reserve=reserve)
    held = 0
    while sum(stop - start for start, stop in asked) + 240 <= 1500:
        held += 1
        log.write({b"key": bytes([held]) * 100})
    with pytest.raises(ControlFull, match="1500 bytes available"):
        log.write({b"key": bytes(1000)})
    assert dict(ControlLog(buffer, turnover=512).items()) == {b"key": bytes([held]) * 100}
    written = np.flatnonzero(buffer)
    allowed = np.concatenate([np.arange(64), *(np.arange(*room) for room in asked[:-1])])
    assert set(written.tolist()) <= set(allowed.tolist())


def test_the_memory_of_the_half_that_counts_no_more_is_given_back() -> None:
    buffer = np.zeros(64 + 2 * 2048, np.uint8)
    given: list[tuple[int, int]] = []

    def discard(start: int, stop: int) -> None:
        given.append((start, stop))
        buffer[start:stop] = 0

    log = ControlLog(buffer, turnover=512, discard=discard)
    for count in range(40):
        log.write({b"key": bytes([count]) * 100})
        assert dict(ControlLog(buffer, turnover=512).items()) == {b"key": bytes([count]) * 100}
        assert np.count_nonzero(buffer[64:]) <= 512
    assert [start for start, _ in given[:3]] == [64, 64 + 2048, 64]


def test_a_file_system_that_takes_no_memory_back_changes_nothing() -> None:
    buffer = np.zeros(64 + 2 * 2048, np.uint8)
    asked: list[tuple[int, int]] = []

    def discard(start: int, stop: int) -> None:
        asked.append((start, stop))
        raise OSError(errno.EOPNOTSUPP, "not supported")

    log = ControlLog(buffer, turnover=512, discard=discard)
    for count in range(40):
        log.write({b"key": bytes([count]) * 100})
        assert dict(ControlLog(buffer, turnover=512).items()) == {b"key": bytes([count]) * 100}
    assert asked
