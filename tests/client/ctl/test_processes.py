"""The memory of a process, as its page tables show it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from central_storage.ctl import processes

NBYTES = 8 << 20
#: It stops twice, so that another process can look: before and after it touches memory.
PROGRAM = """
import mmap, os, sys
name, first, second = sys.argv[1:]
descriptor, ones = os.memfd_create(name), bytes([1]) * {nbytes}
os.ftruncate(descriptor, 2 * {nbytes})
for part in (first, second):
    exec(part)
    print(flush=True)
    sys.stdin.readline()
"""


def looks(segment: str, first: str, second: str) -> tuple[processes.Memory, processes.Memory]:
    """The memory of a process with ``ones`` and the segment ``descriptor``, after each part of its program."""
    command = (sys.executable, "-c", PROGRAM.format(nbytes=NBYTES), f"cs-1f3a22bb-{segment}", first, second)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        found = []
        for _ in range(2):
            assert process.stdout.readline() == "\n"
            memory = processes.memory(process.pid)
            assert memory is not None
            found.append(memory)
            process.stdin.write("\n")
            process.stdin.flush()
    assert process.returncode == 0
    before, after = found
    return before, after


def test_memory_counts_by_kind_of_segment_and_what_is_private() -> None:
    before, after = looks(
        "parameters/float32",
        "shared, own = mmap.mmap(descriptor, 2 * len(ones)), mmap.mmap(-1, len(ones), mmap.MAP_PRIVATE)",
        "shared[: len(ones)] = own[:] = ones",  # the other half is not touched
    )
    assert before.shared == dict.fromkeys(processes.KINDS, 0)
    assert after.shared == before.shared | {"parameters": NBYTES}
    assert after.private - before.private == pytest.approx(NBYTES, rel=0.2)
    assert after.resident - before.resident == pytest.approx(2 * NBYTES, rel=0.2)


def test_pages_of_a_segment_that_a_process_has_copied_are_private() -> None:
    before, after = looks(
        "slots/0",
        "os.write(descriptor, ones); copied = mmap.mmap(descriptor, len(ones), mmap.MAP_PRIVATE)",
        "copied[:] = ones",
    )
    assert (before.shared["slots"], after.shared["slots"]) == (0, 0)
    assert after.private - before.private == pytest.approx(NBYTES, rel=0.2)


def test_a_process_that_has_ended_has_no_memory() -> None:
    pid = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(pid, 0)
    assert processes.memory(pid) is None
