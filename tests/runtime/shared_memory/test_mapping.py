"""A segment in a file has its bytes before anybody writes them: a store into a full file system ends the process."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from cs_proto.errors import MemoryPlanError
from cs_runtime.shared_memory.mapping import Mapping

PAGE = 1 << 16


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of sixteen pages that takes none of them."""
    made = tmp_path / "segment"
    with made.open("wb") as file:
        file.truncate(16 * PAGE)
    return made


@pytest.fixture
def mapping(path: Path) -> Mapping:
    return Mapping("parameters/float32", os.open(path, os.O_RDWR), 16 * PAGE, writable=True)


def test_what_is_reserved_is_allocated_and_nothing_else(mapping: Mapping, path: Path) -> None:
    assert path.stat().st_blocks == 0
    mapping.reserve(4 * PAGE, 4 * PAGE)
    assert path.stat().st_blocks == 0
    mapping.reserve(4 * PAGE, 6 * PAGE)
    assert path.stat().st_blocks * 512 == 2 * PAGE
    assert path.stat().st_size == 16 * PAGE


def test_a_full_file_system_is_an_error_that_names_both_numbers(
    mapping: Mapping, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_full(descriptor: int, start: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", is_full)
    said = rf"parameters/float32: {PAGE} bytes planned.* has {mapping.free_nbytes} bytes .*No space left.*larger"
    monkeypatch.setattr(type(mapping), "free_nbytes", mapping.free_nbytes)
    with pytest.raises(MemoryPlanError, match=said):
        mapping.reserve(0, PAGE)
