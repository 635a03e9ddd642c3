"""Two replicas that have imported JAX, shared by the tests of a file."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
from tests.harness.services import connected

import central_storage as cs

#: The tests import them at the top.
_NEEDED = ("jax", "optax", "flax", "equinox")
collect_ignore_glob = [] if all(map(importlib.util.find_spec, _NEEDED)) else ["test_*.py"]


@pytest.fixture(scope="module")
def two() -> Iterator[cs.CentralStorageStrategy]:
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], seed=7) as strategy:
        strategy.run(lambda: bool(__import__("jax").devices()))
        yield connected(strategy)


@pytest.fixture(scope="module")
def one() -> Iterator[cs.CentralStorageStrategy]:
    with cs.CentralStorageStrategy(["cpu:0"], seed=7) as strategy:
        strategy.run(lambda: bool(__import__("jax").devices()))
        yield connected(strategy)
