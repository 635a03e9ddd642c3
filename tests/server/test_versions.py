"""The counters of what commits change."""

from __future__ import annotations

import mmap
import os

import numpy as np

from cs_proto.arrays import array_of
from cs_proto.segments import Mapping, versions
from cs_server.events import Apply, Commit, Fill, Write
from cs_server.versions import Versions


def test_every_variable_that_a_commit_changes_counts_on() -> None:
    nbytes = 4 * mmap.PAGESIZE
    descriptor = os.memfd_create("versions")
    os.ftruncate(descriptor, nbytes)
    mapping = Mapping(versions(), descriptor, nbytes, writable=True)
    counts = mapping.elements("uint64")
    value = array_of(np.zeros(1))
    write = Write(value, "assign", None, (value,), None, (2,))
    of_slot = Write(value, "assign", None, (value,))
    step = Apply("sgd", (), 1, (), (), (1, 3, 600))
    kept = Versions(mapping)
    kept.count(Commit(1, (write, step, of_slot, Fill("slots/1/m/float32", "float32", 0, 1, 0.0))))
    kept.count(Commit(2, (step,)))
    assert {int(n): int(counts[n]) for n in np.flatnonzero(counts)} == {0: 1, 1: 2, 2: 1, 3: 2, 600: 2}
    Versions(mapping).count(Commit(2, (step,)))  # by the server after this one
    assert (counts[0], counts[600]) == (2, 3)
