"""Services for the tests of ``central_storage.torch``, which share them: each of their processes imports torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.harness.services import connected

import central_storage as cs


def _service(*devices: str) -> Iterator[cs.CentralStorageStrategy]:
    with cs.CentralStorageStrategy(devices, max_restarts=1000) as strategy:
        strategy.run(lambda: __import__("torch").get_num_threads())
        yield connected(strategy)


@pytest.fixture(scope="session")
def two() -> Iterator[cs.CentralStorageStrategy]:
    """A strategy of two replicas, whose workers may die."""
    yield from _service("cpu:0", "cpu:1")


@pytest.fixture(scope="session")
def three() -> Iterator[cs.CentralStorageStrategy]:
    """A strategy of three replicas."""
    yield from _service("cpu:0", "cpu:1", "cpu:2")
