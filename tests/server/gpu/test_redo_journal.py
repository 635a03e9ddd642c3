"""A commit that is written down, read by the server after the one that wrote it."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from cs_proto.errors import MemoryPlanError
from cs_proto.segment_names import JOURNAL
from cs_runtime.shared_memory.mapping import Mapping
from cs_server.gpu.dirty_ranges import Change
from cs_server.gpu.redo_journal import RedoJournal

MIB = 1 << 20


class Limited(Mapping):
    """A segment that finds memory for its first ``limit`` bytes."""

    def __init__(self, limit: int) -> None:
        descriptor = os.memfd_create("journal")
        os.ftruncate(descriptor, 64 * MIB)
        super().__init__(JOURNAL, descriptor, 64 * MIB, writable=True)
        self.limit = limit

    def populate(self, start: int, stop: int) -> None:
        if stop > self.limit:
            raise MemoryPlanError(f"{stop} bytes")
        super().populate(start, stop)


def test_what_is_written_down_is_done_by_the_server_after_this_one() -> None:
    mapping = Limited(64 * MIB)
    journal = RedoJournal(lambda nbytes: mapping)
    journal.begin()
    journal.place(Change("parameters/float32", 2, 3), "float32")[:] = [1, 2, 3]
    journal.place(Change("parameters/float32", 8, 2, np.array([0, 3])), "float32")[:] = [4, 5, 6, 7]
    assert RedoJournal(lambda nbytes: mapping).ticket == 0  # not yet whole: nothing has happened
    journal.finish(7)
    found = np.zeros(16, np.float32)
    after = RedoJournal(lambda nbytes: mapping)
    after.replay(lambda segment, dtype: {("parameters/float32", "float32"): found}[segment, dtype])
    assert after.ticket == 7
    assert found.tolist() == [0, 0, 1, 2, 3, 0, 0, 0, 4, 5, 0, 0, 0, 0, 6, 7]


def test_wherever_a_server_ends_while_it_marks_a_commit_the_next_one_does_all_of_it_or_nothing() -> None:
    mapping = Limited(64 * MIB)
    journal = RedoJournal(lambda nbytes: mapping)
    tickets = []

    class Words(np.ndarray):
        def __setitem__(self, where: Any, value: Any) -> None:
            super().__setitem__(where, value)
            found = np.zeros(4, np.float32)
            after = RedoJournal(lambda nbytes: mapping)
            after.replay(lambda segment, dtype: found)
            tickets.append((after.ticket, found.tolist()))

    for ticket, value in ((7, 1.0), (8, 2.0)):
        journal.begin()
        journal.place(Change("parameters/float32", 0, 2), "float32")[:] = value
        journal._head = journal._head.view(Words)
        journal.finish(ticket)
        journal._head = journal._head.view(np.ndarray)
    done = [0.0] * 4
    assert tickets == [(0, done), (7, [1.0, 1.0, 0.0, 0.0]), (0, done), (8, [2.0, 2.0, 0.0, 0.0])]


def test_it_is_extended_with_what_a_commit_may_change() -> None:
    descriptor = os.memfd_create("journal")
    asked: list[int] = []

    def memory(nbytes: int) -> Mapping:
        asked.append(nbytes)
        length = -(-nbytes // MIB) * MIB
        os.ftruncate(descriptor, max(length, os.fstat(descriptor).st_size))
        return Mapping(JOURNAL, os.dup(descriptor), length, writable=True)

    journal = RedoJournal(memory)
    journal.begin()
    first = journal.place(Change("parameters/float32", 0, 2), "float32")
    journal.reserve(4 * MIB)
    journal.place(Change("parameters/float32", 2, MIB // 4), "float32")[:] = 3
    first[:] = [1, 2]
    journal.finish(7)
    found = np.zeros(2 + MIB // 4, np.float32)
    after = RedoJournal(
        lambda nbytes: Mapping(JOURNAL, os.dup(descriptor), os.fstat(descriptor).st_size, writable=True)
    )
    after.replay(lambda segment, dtype: found)
    assert (after.ticket, found[:3].tolist(), found[-1]) == (7, [1, 2, 3], 3)
    assert len(asked) == 2
    os.close(descriptor)


def test_no_more_memory_is_needed_than_was_asked_for() -> None:
    mapping = Limited(17 * MIB + 8192)
    journal = RedoJournal(lambda nbytes: mapping)
    journal.reserve(16 * MIB)
    journal.reserve(17 * MIB)  # an eighth more than before would not fit
    assert len(journal.memory) == 17 * MIB + 4096
    with pytest.raises(MemoryPlanError):
        journal.reserve(18 * MIB)
    assert len(journal.memory) == 17 * MIB + 4096
