"""The pages that a process has written itself, as the kernel tells."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator

import numpy as np
import pytest

from cs_runtime.shared_memory import pagemap as pagemaps
from cs_runtime.shared_memory.pagemap import Pagemap

PAGE = mmap.PAGESIZE
PAGES = 16


@pytest.fixture
def private() -> Iterator[mmap.mmap]:
    """A private mapping of a file of sixteen pages, which nothing has touched."""
    file = os.memfd_create("segment")
    os.ftruncate(file, PAGES * PAGE)
    mapped = mmap.mmap(file, PAGES * PAGE, mmap.MAP_PRIVATE)
    os.close(file)
    with mapped:
        yield mapped


def start_of(mapped: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapped))


def own(mapped: mmap.mmap, first: int = 0, last: int = PAGES) -> list[tuple[int, int]]:
    """The own pages between two, by their numbers."""
    start = start_of(mapped)
    found = Pagemap().own_pages(start + first * PAGE, start + last * PAGE)
    return [((low - start) // PAGE, (high - start) // PAGE) for low, high in found]


def test_a_page_is_own_once_it_is_written_and_not_when_it_is_read(private: mmap.mmap) -> None:
    assert own(private) == []
    assert not any(private[:])
    assert own(private) == []
    for page in (0, 3, 4, 5, 9, PAGES - 1):
        private[page * PAGE + 7] = 1
    assert own(private) == [(0, 1), (3, 6), (9, 10), (15, 16)]
    assert own(private, 4, 9) == [(4, 6)]
    assert own(private, 6, 6) == []


def test_a_page_that_was_given_back_is_own_no_more(private: mmap.mmap) -> None:
    private[:] = bytes(range(256)) * (len(private) // 256)
    private.madvise(mmap.MADV_DONTNEED, 2 * PAGE, 3 * PAGE)
    assert own(private) == [(0, 2), (5, 16)]


@pytest.mark.parametrize("at_once", [1, 3, PAGES])
def test_pages_are_found_across_the_pieces_that_are_read(
    private: mmap.mmap, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    private[2 * PAGE] = private[3 * PAGE] = private[11 * PAGE] = 1
    monkeypatch.setattr(pagemaps, "_AT_ONCE", at_once)
    found = np.zeros(PAGES, bool)
    for first, last in own(private):
        assert not found[first:last].any()
        found[first:last] = True
    assert np.flatnonzero(found).tolist() == [2, 3, 11]


def may_have_own(mapped: mmap.mmap, *pages: tuple[int, int]) -> bool:
    """Whether there may be an own page in these ranges of numbers of pages."""
    start = start_of(mapped)
    return Pagemap().may_have_own([(start + first * PAGE, start + last * PAGE) for first, last in pages])


def test_of_pages_that_were_only_read_none_may_be_own(private: mmap.mmap) -> None:
    assert not any(private[:])
    assert not may_have_own(private)
    assert not may_have_own(private, (0, PAGES))
    private[11 * PAGE] = 1
    assert may_have_own(private, (0, 3), (11, 12))
    assert may_have_own(private, (11, 12), (0, 3))
    assert not may_have_own(private, (0, 11), (12, PAGES))


def test_where_pages_are_many_or_the_kernel_does_not_say_they_may_be_own(
    private: mmap.mmap, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: int, nbytes: int, offset: int) -> bytes:
        raise PermissionError(13, "Permission denied")

    pagemap, pages = Pagemap(), [(start_of(private), start_of(private) + PAGES * PAGE)]
    assert not pagemap.may_have_own(pages)
    with monkeypatch.context() as patch:
        patch.setattr(pagemaps, "_AT_ONCE", PAGES - 1)
        assert pagemap.may_have_own(pages)
    monkeypatch.setattr(os, "pread", lambda *_: bytes(8))
    assert pagemap.may_have_own(pages)
    monkeypatch.setattr(os, "pread", refuse)
    assert pagemap.may_have_own(pages)


def test_a_piece_that_is_cut_off_is_an_error(private: mmap.mmap, monkeypatch: pytest.MonkeyPatch) -> None:
    pagemap, start = Pagemap(), start_of(private)
    monkeypatch.setattr(os, "pread", lambda *_: bytes(8))
    with pytest.raises(OSError, match="only 8 bytes for 16 pages"):
        pagemap.own_pages(start, start + PAGES * PAGE)


def test_a_kernel_that_does_not_tell_whose_a_page_is_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pread", lambda file, nbytes, offset: bytes(nbytes))
    with pytest.raises(OSError, match="does not tell the pages"):
        Pagemap()


def test_a_process_that_may_not_look_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, flags: int) -> int:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(PermissionError, match="/proc/self/pagemap"):
        Pagemap()
