"""Workers that live for a module, since starting one costs more than most tests, and an arena without one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.worker.stand_in import Service

from cs_runtime.shared_memory.arena import Arena
from cs_runtime.shared_memory.mapping import Mapping


@pytest.fixture(scope="module")
def one_worker() -> Iterator[Service]:
    with Service(1) as service:
        yield _connected(service)


@pytest.fixture(scope="module")
def two_workers() -> Iterator[Service]:
    with Service(2) as service:
        yield _connected(service)


def _connected(service: Service) -> Service:
    """Open, and no connection is still being made: it would be left by the first test."""
    service.open()
    service.settle()
    return service


@pytest.fixture
def alone(one_worker: Service) -> Iterator[Service]:
    """A service of one replica, idle before and after."""
    yield one_worker
    one_worker.settle()


@pytest.fixture
def pair(two_workers: Service) -> Iterator[Service]:
    """A service of two replicas, idle before and after."""
    yield two_workers
    two_workers.settle()


@pytest.fixture
def arena(tmp_path: Path) -> Arena:
    """An arena of 1 MiB."""

    def open_segment() -> Mapping:
        descriptor = os.open(tmp_path / "arena", os.O_RDWR | os.O_CREAT)
        os.ftruncate(descriptor, 1 << 20)
        return Mapping("arena/0", descriptor, 1 << 20, writable=True)

    return Arena(open_segment)
