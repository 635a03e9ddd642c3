"""Freed blocks are used again, and the kernel does not have to clear their pages anew."""

from __future__ import annotations

import mmap
import subprocess
import sys

import pytest

_PROGRAM = """
import resource
from cs_runtime import heap

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

if {keeps}:
    heap.keep_freed_blocks()
for times in range(12):
    if times == 2:
        before = faults()
    blocks = [b"x" * (1 << 20) for _ in range(8)]
    del blocks
print(faults() - before)
"""


def faults(*, keeps: bool) -> int:
    """The pages that the kernel had to provide, while 80 MiB were allocated and freed."""
    command = [sys.executable, "-c", _PROGRAM.format(keeps=keeps)]
    return int(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc alone has these options")
def test_freed_blocks_are_kept() -> None:
    pages = (80 << 20) // mmap.PAGESIZE
    assert faults(keeps=False) > pages // 2
    assert faults(keeps=True) < pages // 50
