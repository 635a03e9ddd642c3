"""Services for the system tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import central_storage as cs


@pytest.fixture(scope="module")
def two() -> Iterator[cs.CentralStorageStrategy]:
    """A strategy of two replicas, kept for all tests of a file; none of them may leave it unusable."""
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"]) as strategy:
        strategy.run(_nothing)  # by then every socket is connected, and none is taken for the first test's leftover
        yield strategy


def _nothing() -> None:
    pass


@pytest.fixture
def own() -> Iterator[cs.CentralStorageStrategy]:
    """A strategy of two replicas for one test, which may break it."""
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"]) as strategy:
        yield strategy
