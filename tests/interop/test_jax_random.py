"""A key of JAX in a replica, with the library itself.

Only workers import JAX: its threads would make a fork of the test process, as a torch DataLoader's, a warning.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import central_storage as cs


def test_a_key_draws_what_it_draws_again() -> None:
    def step() -> Any:
        import jax

        keys = [cs.random.jax_key(), cs.random.jax_key(), cs.random.jax_key(5), cs.random.jax_key(0)]
        return np.stack([np.asarray(jax.random.normal(key, (3,))) for key in keys])

    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"]) as strategy:
        first = strategy.experimental_local_results(strategy.run(step))
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"]) as strategy:
        again = strategy.experimental_local_results(strategy.run(step))
    np.testing.assert_array_equal(first, again)
    assert len({row.tobytes() for share in first for row in share}) == 8
