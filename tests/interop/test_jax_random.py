"""A key of JAX in a replica, with the library itself where it is installed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import central_storage as cs

jax = pytest.importorskip("jax")


def test_a_key_draws_what_it_draws_again() -> None:
    def step() -> Any:
        keys = [cs.random.jax_key(), cs.random.jax_key(), cs.random.jax_key(5), cs.random.jax_key(0)]
        return np.stack([np.asarray(jax.random.normal(key, (3,))) for key in keys])

    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], in_process=True) as strategy:
        first = strategy.experimental_local_results(strategy.run(step))
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], in_process=True) as strategy:
        again = strategy.experimental_local_results(strategy.run(step))
    np.testing.assert_array_equal(first, again)
    assert len({row.tobytes() for share in first for row in share}) == 8
