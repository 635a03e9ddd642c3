"""Services for the system tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.harness.services import connected

import central_storage as cs


@pytest.fixture(scope="module")
def two() -> Iterator[cs.CentralStorageStrategy]:
    """A strategy of two replicas, kept for all tests of a file; none of them may leave it unusable."""
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"]) as strategy:
        yield connected(strategy)


@pytest.fixture
def own() -> Iterator[cs.CentralStorageStrategy]:
    """A strategy of two replicas for one test, which may break it."""
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"]) as strategy:
        yield strategy
