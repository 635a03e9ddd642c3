"""A commit that is written down, read by the server after the one that wrote it."""

from __future__ import annotations

import os

import numpy as np
import pytest

from cs_proto.errors import MemoryPlanError
from cs_proto.segments import JOURNAL, Mapping
from cs_server.changes import Change
from cs_server.journal import Journal

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
    journal = Journal(mapping)
    journal.begin()
    journal.place(Change("parameters/float32", 2, 3), "float32")[:] = [1, 2, 3]
    journal.place(Change("parameters/float32", 8, 2, np.array([0, 3])), "float32")[:] = [4, 5, 6, 7]
    assert Journal(mapping).ticket == 0  # not yet whole: nothing has happened
    journal.finish(7)
    found = np.zeros(16, np.float32)
    after = Journal(mapping)
    after.replay(lambda segment, dtype: {("parameters/float32", "float32"): found}[segment, dtype])
    assert after.ticket == 7
    assert found.tolist() == [0, 0, 1, 2, 3, 0, 0, 0, 4, 5, 0, 0, 0, 0, 6, 7]


def test_no_more_memory_is_needed_than_was_asked_for() -> None:
    mapping = Limited(17 * MIB + 8192)
    journal = Journal(mapping)
    journal.reserve(16 * MIB)
    journal.reserve(17 * MIB)  # an eighth more than before would not fit
    assert len(journal.memory) == 17 * MIB + 4096
    with pytest.raises(MemoryPlanError):
        journal.reserve(18 * MIB)
    assert len(journal.memory) == 17 * MIB + 4096
