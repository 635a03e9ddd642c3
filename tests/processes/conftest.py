"""Services for the system tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from tests.harness.services import connected

import central_storage as cs

#: Gives the strategy of that name, and makes it with these arguments where there is none that works.
Strategies = Callable[..., cs.CentralStorageStrategy]


@pytest.fixture(scope="session")
def strategies() -> Iterator[Strategies]:
    """Strategies that the tests of all files share: to start their processes takes longer than most tests. A file that
    finds one unusable, for a test that failed, gets a new one."""
    made: dict[str, cs.CentralStorageStrategy] = {}
    with ExitStack() as stack:

        def find(name: str, *devices: str, **options: Any) -> cs.CentralStorageStrategy:
            if name in made:
                try:
                    return connected(made[name])
                except cs.errors.CentralStorageError:
                    made[name].shutdown()
            made[name] = stack.enter_context(cs.CentralStorageStrategy(devices, **options))
            return connected(made[name])

        yield find


@pytest.fixture(scope="module")
def two(strategies: Strategies) -> cs.CentralStorageStrategy:
    """A strategy of two replicas; no test may leave it unusable, or count what others have made in it."""
    return strategies("two", "cpu:0", "cpu:1")


@pytest.fixture(scope="module")
def three(strategies: Strategies) -> cs.CentralStorageStrategy:
    """As ``two``, of three replicas."""
    return strategies("three", "cpu:0", "cpu:1", "cpu:2", parameter_device="cpu:1")


@pytest.fixture(scope="module")
def mortal(strategies: Strategies) -> cs.CentralStorageStrategy:
    """As ``two``, with workers that may die as often as the tests like."""
    return strategies("mortal", "cpu:0", "cpu:1", max_restarts=1000)


@pytest.fixture
def own() -> Iterator[cs.CentralStorageStrategy]:
    """A strategy of two replicas for one test, which may break it."""
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"]) as strategy:
        yield strategy
