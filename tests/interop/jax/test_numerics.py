"""``check_numerics`` with models of JAX, where the loss is finite and a gradient is not: such a step changes nothing,
and the training goes on as if it had not been."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.harness.timing import unit
from tests.interop.jax.test_step import assert_close, in_optax, mean_loss, parameters, rows_of

import central_storage as cs
import central_storage.jax as csj
from central_storage.errors import NumericsError

pytestmark = pytest.mark.timeout(unit(200))


@pytest.fixture
def raising(two: cs.CentralStorageStrategy, monkeypatch: pytest.MonkeyPatch) -> cs.CentralStorageStrategy:
    monkeypatch.setattr(two.controller, "check_numerics", "raise")
    return two


def loss_of(tree: Any, x: Any, y: Any, scale: Any) -> Any:
    """A loss with a root, whose derivative is infinite for a row of scale 0."""
    scores = jnp.tanh(x @ tree["first"]["w"] + tree["first"]["b"]).sum(1)
    return mean_loss(tree, x, y) + jnp.sqrt((scores * scale) ** 2).mean()


def batch(seed: int, bad: int | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A batch, of which the row ``bad`` makes gradients NaN."""
    scale = np.ones(8, np.float32)
    if bad is not None:
        scale[bad] = 0
    return *rows_of(seed, 8), scale


def bytes_of(model: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(csj.read(model))]


@pytest.mark.parametrize("bad", [0, -1])
def test_a_bad_batch_is_skipped(raising: cs.CentralStorageStrategy, bad: int) -> None:
    data = [batch(number) for number in range(6)]
    with raising.scope():
        model = csj.centralize(parameters())
    train = csj.step(model, csj.optim.adam(0.05))(loss_of)
    losses = []
    for number, good in enumerate(data):
        if number in (0, 4):  # before the server knows the step, and in the midst
            before = bytes_of(model)
            named = rf"gradient of '.+' has nan at \[.*\], in step .* on replica {0 if bad == 0 else 1} "
            with pytest.raises(NumericsError, match=named):
                train(batch(number, bad))
            assert bytes_of(model) == before
        losses.append(train(good))
    expected, in_one = in_optax(data, optax.adam(0.05), loss_of)
    np.testing.assert_allclose(losses, in_one, rtol=2e-5)
    assert_close(model, expected, 2e-5)


def test_steps_ahead_end_with_the_bad_one(raising: cs.CentralStorageStrategy) -> None:
    data = [batch(number) for number in range(4)]
    with raising.scope():
        model = csj.centralize(parameters())
    train = csj.step(model, csj.optim.sgd(0.1))(loss_of)
    with pytest.raises(NumericsError, match="has nan"):
        list(train.ahead(csj.batches(raising, [*data, batch(4, bad=0), batch(5)])))
    assert_close(model, in_optax(data, optax.sgd(0.1), loss_of)[0])


def test_a_warning_does_not_hold_the_update_back(
    two: cs.CentralStorageStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(two.controller, "check_numerics", "warn")
    with two.scope():
        model = csj.centralize(parameters())
    train = csj.step(model, csj.optim.sgd(0.1))(loss_of)
    assert np.isfinite(train(batch(0, bad=0)))
    assert np.isnan(csj.read(model)["first"]["w"]).any()
