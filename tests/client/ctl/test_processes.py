"""The memory of a process, as its page tables show it."""

from __future__ import annotations

import gc
import mmap
import os

import pytest

from central_storage.ctl import processes

NBYTES = 8 << 20


def test_memory_counts_by_kind_of_segment_and_what_is_private() -> None:
    descriptor = os.memfd_create("cs-1f3a22bb-parameters/float32")
    try:
        os.ftruncate(descriptor, 2 * NBYTES)
        gc.collect()  # so that nothing of an earlier test goes while this one measures
        before = processes.memory(os.getpid())
        with mmap.mmap(descriptor, 2 * NBYTES) as segment, mmap.mmap(-1, NBYTES, mmap.MAP_PRIVATE) as own:
            segment[:NBYTES] = bytes(NBYTES)  # the other half is not touched
            own[:] = bytes(NBYTES)
            after = processes.memory(os.getpid())
    finally:
        os.close(descriptor)
    assert before is not None
    assert after is not None
    # Services of earlier tests may be mapped in this process, too.
    assert after.shared == before.shared | {"parameters": before.shared["parameters"] + NBYTES}
    assert after.private - before.private == pytest.approx(NBYTES, rel=0.2)
    assert after.resident - before.resident == pytest.approx(2 * NBYTES, rel=0.2)


def test_pages_of_a_segment_that_a_process_has_copied_are_private() -> None:
    descriptor = os.memfd_create("cs-1f3a22bb-slots/0")
    try:
        os.write(descriptor, bytes(NBYTES))
        with mmap.mmap(descriptor, NBYTES, mmap.MAP_PRIVATE) as copied:
            gc.collect()
            before = processes.memory(os.getpid())
            copied[:] = bytes(NBYTES)
            after = processes.memory(os.getpid())
    finally:
        os.close(descriptor)
    assert before is not None
    assert after is not None
    assert after.shared == before.shared
    assert after.private - before.private == pytest.approx(NBYTES, rel=0.2)


def test_a_process_that_has_ended_has_no_memory() -> None:
    pid = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(pid, 0)
    assert processes.memory(pid) is None
