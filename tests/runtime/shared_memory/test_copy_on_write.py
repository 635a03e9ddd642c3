"""A mapping whose pages become copies of this process when native code writes to them."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cs_proto.arrays import Array, Location
from cs_proto.errors import MemoryPlanError
from cs_runtime.shared_memory import mapping as mappings
from cs_runtime.shared_memory.mapping import Mapping, address_of, read_only_at
from cs_runtime.shared_memory.pagemap import Pagemap

PAGE = mmap.PAGESIZE
PAGES = 8
NBYTES = PAGES * PAGE


@pytest.fixture
def file() -> Iterator[int]:
    """A segment's file; every byte is its page's number and one."""
    descriptor = os.memfd_create("segment")
    os.pwrite(descriptor, b"".join(bytes([page + 1]) * PAGE for page in range(PAGES)), 0)
    yield descriptor
    os.close(descriptor)


def private(file: int) -> Mapping:
    descriptor = os.open(f"/proc/self/fd/{file}", os.O_RDONLY)
    return Mapping("parameters/float32", descriptor, NBYTES, writable=False, may_preserve=True, copies_on_write=True)


def write(mapping: Mapping, *pages: int) -> None:
    """As native code does that knows of no read-only memory."""
    for page in pages:
        ctypes.memset(address_of(mapping.elements("uint8")) + page * PAGE + 5, 200, 8)


def shown(mapping: Mapping) -> list[int]:
    """The byte of each page where :func:`write` writes."""
    return mapping.elements("uint8")[5::PAGE].tolist()


def own(mapping: Mapping) -> list[tuple[int, int]]:
    return [(first // PAGE, last // PAGE) for first, last in mapping.own_pages(Pagemap(), [(0, NBYTES)])]


def rights(mapping: Mapping, page: int = 0) -> str:
    address = address_of(mapping.elements("uint8")) + page * PAGE
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(end, 16) for end in line.split()[0].split("-"))
        if start <= address < stop:
            return line.split()[1]
    raise AssertionError("nothing is mapped there")


def test_a_write_stays_in_the_mapping_and_hides_later_ones_until_it_is_given_back(file: int) -> None:
    mine, other = private(file), private(file)
    assert shown(mine) == [1, 2, 3, 4, 5, 6, 7, 8]
    write(mine, 0, 3)
    assert shown(mine) == [200, 2, 3, 200, 5, 6, 7, 8]
    assert shown(other) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert os.pread(file, NBYTES, 0)[5::PAGE] == bytes([1, 2, 3, 4, 5, 6, 7, 8])
    os.pwrite(file, bytes([9] * NBYTES), 0)
    assert shown(mine) == [200, 9, 9, 200, 9, 9, 9, 9]
    assert (own(mine), own(other)) == ([(0, 1), (3, 4)], [])
    mine.restore([(3 * PAGE + 5, 3 * PAGE + 6)])
    assert shown(mine) == [200, 9, 9, 9, 9, 9, 9, 9]
    assert own(mine) == [(0, 1)]
    mine.restore([(0, NBYTES)])
    assert shown(mine) == [9] * 8
    assert own(mine) == []


def test_numpy_and_dlpack_take_it_for_read_only(file: int) -> None:
    view = private(file).view(Array("float32", (4,), Location("parameters/float32", 64)))
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        view.flags.writeable = True
    assert not np.from_dlpack(view).flags.writeable
    with pytest.raises(TypeError, match="read-only memory"):
        private(file).memory[0] = 1


@pytest.mark.parametrize("cause", ["overcommit", "no setting", "limit", "no pagemap", "refused"])
def test_where_no_memory_is_granted_it_stays_unwritable(
    file: int, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cause == "overcommit":
        (tmp_path / "setting").write_text("2\n")
        monkeypatch.setattr(mappings, "_OVERCOMMIT", str(tmp_path / "setting"))
    elif cause == "no setting":
        monkeypatch.setattr(mappings, "_OVERCOMMIT", str(tmp_path / "missing"))
    elif cause == "limit":
        monkeypatch.setattr(resource, "getrlimit", lambda which: (1 << 40, resource.RLIM_INFINITY))
    elif cause == "no pagemap":
        monkeypatch.setattr(mappings, "_are_copies_told", mappings._are_copies_told.__wrapped__)
        monkeypatch.setattr(mappings, "Pagemap", lambda: os.open(tmp_path / "missing", os.O_RDONLY))
    else:
        mapped = mappings._mapped

        def refuse(descriptor: int, nbytes: int, protection: int, kind: int) -> tuple[mmap.mmap, int]:
            if protection & mmap.PROT_WRITE:
                raise OSError(12, "Cannot allocate memory")
            return mapped(descriptor, nbytes, protection, kind)

        monkeypatch.setattr(mappings, "_mapped", refuse)
    mine = private(file)
    assert not mine.copies_on_write
    assert rights(mine) == "r--p"
    mine.preserve([(0, PAGE)])
    os.pwrite(file, bytes([9] * NBYTES), 0)
    assert shown(mine) == [1, 9, 9, 9, 9, 9, 9, 9]
    assert rights(mine) == "r--p"


def test_it_is_writable_for_native_code_where_memory_is_granted(file: int) -> None:
    mine = private(file)
    assert mine.copies_on_write
    assert rights(mine) == "rw-p"


@pytest.mark.parametrize("is_old_kernel", [False, True])
def test_what_was_written_is_preserved_and_what_is_preserved_may_be_written(
    file: int, is_old_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_old_kernel:
        monkeypatch.setattr(mappings, "_MADV_POPULATE_WRITE", 9999)  # EINVAL, as before Linux 5.14
    mine = private(file)
    write(mine, 1)
    mine.preserve([(PAGE, 3 * PAGE)])
    os.pwrite(file, bytes([9] * NBYTES), 0)
    assert shown(mine) == [9, 200, 3, 9, 9, 9, 9, 9]
    write(mine, 2)
    assert shown(mine) == [9, 200, 200, 9, 9, 9, 9, 9]


def test_a_protected_page_is_unwritable_also_after_it_was_preserved_and_restored(file: int) -> None:
    mine = private(file)
    mine.protect([(2 * PAGE + 9, 2 * PAGE + 10), (3 * PAGE, 4 * PAGE)])
    assert [rights(mine, page) for page in range(5)] == ["rw-p", "rw-p", "r--p", "r--p", "rw-p"]
    mine.preserve([(PAGE, 3 * PAGE)])
    assert [rights(mine, page) for page in range(5)] == ["rw-p", "rw-p", "r--p", "r--p", "rw-p"]
    os.pwrite(file, bytes([9] * NBYTES), 0)
    assert shown(mine)[:4] == [9, 2, 3, 9]
    mine.restore([(0, NBYTES)])
    assert rights(mine, 2) == "r--p"
    assert read_only_at(address_of(mine.elements("uint8")) + 2 * PAGE) == ("parameters/float32", 2 * PAGE)


def test_what_cannot_be_protected_is_an_error(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = private(file)
    monkeypatch.setattr(mappings, "_mprotect", lambda *_: -1)
    with pytest.raises(MemoryPlanError, match=rf"bytes 0 to {PAGE} of segment .* could not be protected"):
        mine.protect([(0, 1)])
