"""Counting descriptors."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from cs_proto.errors import DescriptorLimitError
from cs_runtime import open_files


@pytest.fixture(autouse=True)
def limits() -> Iterator[tuple[int, int]]:
    """What this process may open, soft and hard, which is put back."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def limit_to(soft: int, limits: tuple[int, int]) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, limits[1]))


def test_the_soft_limit_becomes_the_hard_one_and_goes_back(limits: tuple[int, int]) -> None:
    limit_to(200, limits)
    assert open_files.limit() == 200
    assert open_files.raise_limit() == 200
    assert open_files.limit() == min(limits[1], 1 << 20)
    open_files.lower_limit(200)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (200, limits[1])


@pytest.mark.parametrize("hard", [resource.RLIM_INFINITY, 1 << 30])
def test_a_hard_limit_beyond_all_measure_is_not_taken(hard: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: asked.append(limits))
    open_files.raise_limit()
    assert asked == [(1 << 20, hard)]


def test_a_limit_that_is_high_enough_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: pytest.fail("it was changed"))
    open_files.raise_limit()
    assert open_files.limit() == 1 << 20


@pytest.mark.parametrize("size", ["kernel", "before Linux 6.2"])
def test_what_is_opened_is_counted(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if size != "kernel":
        monkeypatch.setattr(open_files.os, "stat", lambda path: os.stat_result([0] * 10))
    before = open_files.free()
    with ExitStack() as stack:
        for _ in range(10):
            stack.enter_context(open(os.devnull))
        assert open_files.free() == before - 10
    assert open_files.free() == before


def test_where_the_count_cannot_be_had_nothing_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> os.stat_result:
        raise OSError

    monkeypatch.setattr(open_files.os, "stat", refuse)
    assert open_files.free() == 0


def test_observers_leave_a_quarter_or_256_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_files, "limit", lambda: 400)
    for free, may in ((100, True), (99, False)):
        monkeypatch.setattr(open_files, "free", lambda free=free: free)
        assert open_files.may_have_guests() is may
    monkeypatch.setattr(open_files, "limit", lambda: 1 << 20)
    for free, may in ((256, True), (255, False)):
        monkeypatch.setattr(open_files, "free", lambda free=free: free)
        assert open_files.may_have_guests() is may


def test_a_shortage_of_descriptors_is_an_error(limits: tuple[int, int]) -> None:
    limit_to(open_files.limit() - open_files.free() + 5, limits)
    open_files.check(5, "an observer")
    words = r"^an observer needs up to 6 descriptors, and this process has \d+ of \d+ open: close .*ulimit -n"
    with pytest.raises(DescriptorLimitError, match=words):
        open_files.check(6, "an observer")
    assert isinstance(open_files.shortage("the server"), OSError)
