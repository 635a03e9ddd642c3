"""Steps of JAX in replicas on GPUs, which are stand-ins: JAX computes over copies of their memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.harness.services import connected
from tests.harness.stand_in_gpus import stand_in_gpus
from tests.harness.timing import unit

import central_storage as cs
import central_storage.jax as csj

pytestmark = pytest.mark.timeout(unit(120))


def _take_stand_ins() -> None:
    """In a worker: DLPack between JAX and the stand-in, which has no memory that another library could take over."""
    xp: Any = cs.get_array_module()

    def to_jax(value: Any) -> jax.Array:
        assert not isinstance(value, np.ndarray | jax.Array)
        array = xp.asarray(value)
        assert array.flags.c_contiguous
        return jnp.asarray(array.get(), array.dtype)

    def to_cupy(value: Any) -> Any:
        assert isinstance(value, jax.Array)
        return xp.asarray(np.asarray(value))

    jax.dlpack.from_dlpack = to_jax  # type: ignore[assignment]
    xp.from_dlpack = to_cupy


@pytest.fixture(scope="module")
def two() -> Iterator[cs.CentralStorageStrategy]:
    with stand_in_gpus(2, nbytes=1 << 20), cs.CentralStorageStrategy(["gpu:0", "gpu:1"]) as strategy:
        strategy.run(_take_stand_ins)
        yield connected(strategy)


def test_a_model_trains_as_on_cpus(two: cs.CentralStorageStrategy) -> None:
    """Batches of float64 and int64 become what JAX computes with, as on a CPU; bfloat16 has a float32 variable."""
    random = np.random.default_rng(1)
    start = {
        "w": jnp.asarray(random.normal(size=(4, 3)), jnp.float32),
        "b": jnp.zeros(3, jnp.bfloat16),
    }
    batches = [(random.normal(size=(7, 4)), random.integers(0, 3, 7)) for _ in range(5)]

    def trained(strategy: cs.CentralStorageStrategy) -> tuple[list[float], Any]:
        with strategy.scope():
            model = csj.centralize(start)

        @csj.step(model, csj.optim.adam(0.1))
        def train(model: Any, x: Any, y: Any) -> Any:
            scores = x @ model["w"] + model["b"]
            return -jnp.mean(jax.nn.log_softmax(scores)[jnp.arange(len(y)), y])

        return [train(batch) for batch in batches], jax.tree.map(np.asarray, csj.read(model))

    losses, found = trained(two)
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], in_process=True) as on_cpus:
        expected_losses, expected = trained(on_cpus)
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name].astype("float32"), value.astype("float32"), rtol=1e-5)


def test_a_worker_leaves_memory_of_the_gpu_to_others(two: cs.CentralStorageStrategy) -> None:
    found = two.run(lambda: os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"])
    assert set(two.experimental_local_results(found)) == {"false"}
