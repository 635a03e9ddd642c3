"""The counters of what commits change."""

from __future__ import annotations

import mmap

import numpy as np

from cs_proto.arrays import array_of
from cs_server.engine.store.versions import Versions
from cs_server.events import Apply, Commit, Fill, Update, Write


def test_every_variable_that_a_commit_changes_counts_on() -> None:
    counts = np.zeros(4 * mmap.PAGESIZE // 8, np.uint64)
    value = array_of(np.zeros(1))
    write = Write(value, "assign", None, (value,), None, (2,))
    of_slot = Write(value, "assign", None, (value,))
    step = Apply((Update("sgd", (), 1, (), ()),), (1, 3, 600))
    kept = Versions(counts)
    kept.count(Commit(1, (write, step, of_slot, Fill("slots/1/m/float32", "float32", 0, 1, 0.0))))
    kept.count(Commit(2, (step,)))
    assert {int(n): int(counts[n]) for n in np.flatnonzero(counts)} == {0: 1, 1: 2, 2: 1, 3: 2, 600: 2}
    Versions(counts).count(Commit(2, (step,)))  # by the server after this one
    assert (counts[0], counts[600]) == (2, 3)
