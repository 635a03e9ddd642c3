"""Writing bytes of a checkpoint, and what messages say about its directory."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from cs_proto.sizes import in_units

__all__ = ["SUFFIX", "newest_in", "room", "write_at"]

SUFFIX = ".safetensors"

# Bytes that are written at a time.
_PART = 16 << 20


def write_at(file: int, data: memoryview, offset: int, advance: Callable[[int], None] = lambda count: None) -> int:
    """Write all of ``data``; returns the offset of its end. ``advance`` is told of each part."""
    while data:
        count = os.pwrite(file, data[:_PART], offset)
        data, offset = data[count:], offset + count
        advance(count)
    return offset


def room(directory: str) -> str:
    """The free space for this user in the file system of ``directory``, which may not exist yet."""
    while directory not in ("/", ".") and not os.path.isdir(directory):
        directory = os.path.dirname(directory) or "."
    try:
        found = os.statvfs(directory)
    except OSError as error:
        return f"the free space is unknown ({error.strerror})"
    free = found.f_bavail * found.f_frsize
    return f"{free}{in_units(free)} are free"


def newest_in(directory: str) -> str:
    """A hint for a user who passes a directory instead of a file."""
    if not os.path.isdir(directory):
        return ""
    newest = max(Path(directory).glob(f"*{SUFFIX}"), key=os.path.getmtime, default="none")
    return f"; {directory} is a directory, but restore takes a file; the newest one in it is {newest}"
