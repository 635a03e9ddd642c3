"""JAX reads variables where they lie: by ``device_put`` of the view, because every view begins at a multiple of 64.

Only the worker imports JAX: its threads would make a fork of the test process a warning.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from tests.harness.services import connected
from tests.harness.timing import unit

import central_storage as cs

pytestmark = pytest.mark.timeout(unit(300))  # a process imports JAX
F32 = np.float32


@pytest.fixture(scope="module")
def one() -> Iterator[cs.CentralStorageStrategy]:
    with cs.CentralStorageStrategy(["cpu:0"]) as strategy:
        yield connected(strategy)


@pytest.mark.parametrize("shape", [(), (3,), (7, 5), (300, 400)])
def test_device_put_of_a_view_shares_its_memory(one: cs.CentralStorageStrategy, shape: tuple[int, ...]) -> None:
    with one.scope():
        cs.Variable(np.ones(5, F32))
        w = cs.Variable(np.full(shape, 3, F32))

    def look() -> tuple[bool, bool, float]:
        import jax

        view = np.asarray(w)
        array = jax.device_put(view)
        address = view.__array_interface__["data"][0]
        return array.unsafe_buffer_pointer() == address, address % 64 == 0, float(array.sum())

    assert one.run(look) == (True, True, 3 * np.prod(shape))


def test_what_a_replica_has_noted_to_write_is_shared_too(one: cs.CentralStorageStrategy) -> None:
    with one.scope():
        w = cs.Variable(np.zeros((50, 3), F32))

    def look() -> tuple[bool, float]:
        import jax

        w.scatter_add(cs.IndexedSlices(np.ones((1, 3), F32), np.array([2])))
        view = np.asarray(w)
        array = jax.device_put(view)
        return array.unsafe_buffer_pointer() == view.__array_interface__["data"][0], float(array.sum())

    assert one.run(look) == (True, 3)


def test_from_dlpack_copies_once(one: cs.CentralStorageStrategy) -> None:
    with one.scope():
        w = cs.Variable(np.full((300, 400), 3, F32))

    def look() -> tuple[bool, float]:
        import jax.numpy as jnp

        class Seen:
            """The variable as a producer, which tells the address of what it exports."""

            def __dlpack__(self, **options: object) -> object:
                self.array = np.from_dlpack(w, copy=True)
                return self.array.__dlpack__()

            def __dlpack_device__(self) -> tuple[int, int]:
                return w.__dlpack_device__()

        seen = Seen()
        array = jnp.from_dlpack(seen)
        return array.unsafe_buffer_pointer() == seen.array.__array_interface__["data"][0], float(array.sum())

    assert one.run(look) == (True, 360_000)
