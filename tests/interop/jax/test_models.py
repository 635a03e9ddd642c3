"""Models of flax and equinox train as with optax alone."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tests.harness.timing import unit

import central_storage as cs
import central_storage.jax as csj

pytestmark = pytest.mark.timeout(unit(200))

STEPS = 8


def batches(columns: int = 4) -> list[tuple[np.ndarray, np.ndarray]]:
    random = np.random.default_rng(2)
    return [
        (random.normal(size=(7, columns)).astype(np.float32), random.integers(0, 3, 7).astype(np.int32))
        for _ in range(STEPS)
    ]


def cross_entropy(scores: Any, y: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(scores, y).mean()


def assert_trained_alike(strategy: cs.CentralStorageStrategy, tree: Any, loss: Any, is_trained: Any = None) -> Any:
    """Train ``tree`` here and with optax alone, and return the tree of variables."""
    trained, rest = eqx.partition(tree, eqx.is_inexact_array if is_trained is None else is_trained)
    transformation = optax.adam(0.01)
    state = transformation.init(trained)
    with strategy.scope():
        model = csj.centralize(tree)
    train = csj.step(model, csj.optim.adam(0.01))(loss)
    for batch in batches():
        value, gradients = jax.value_and_grad(lambda trained, *batch: loss(eqx.combine(trained, rest), *batch))(
            trained, *batch
        )
        updates, state = transformation.update(gradients, state, trained)
        trained = optax.apply_updates(trained, updates)
        assert train(batch) == pytest.approx(float(value), rel=1e-4)
    found = eqx.filter(csj.read(model), eqx.is_inexact_array)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(trained), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-4)
    return model


class Dense(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(3)(nn.gelu(nn.LayerNorm()(nn.Dense(8)(x))))


def test_a_module_of_flax(two: cs.CentralStorageStrategy) -> None:
    net = Dense()
    model = assert_trained_alike(
        two,
        net.init(jax.random.key(0), jnp.zeros((1, 4))),
        lambda parameters, x, y: cross_entropy(net.apply(parameters, x), y),
    )
    assert model["params"]["Dense_0"]["kernel"].name == "params/Dense_0/kernel"


def test_a_module_of_equinox(two: cs.CentralStorageStrategy) -> None:
    net = eqx.nn.MLP(4, 3, 8, 2, activation=jax.nn.gelu, key=jax.random.key(0))
    model = assert_trained_alike(two, net, lambda net, x, y: cross_entropy(jax.vmap(net)(x), y))
    assert isinstance(model, eqx.nn.MLP)
    assert model.layers[0].weight.name == "layers/0/weight"


def test_a_module_of_equinox_with_dropout(two: cs.CentralStorageStrategy) -> None:
    net = eqx.nn.Sequential(
        [eqx.nn.Linear(4, 8, key=jax.random.key(0)), eqx.nn.Dropout(0.5), eqx.nn.Linear(8, 3, key=jax.random.key(1))]
    )
    with two.scope():
        model = csj.centralize(net)

    @csj.step(model, csj.optim.adam(0.01))
    def train(net: Any, x: Any, y: Any) -> Any:
        return cross_entropy(jax.vmap(net)(x, key=jax.random.split(csj.key(), len(x))), y)

    x, y = batches()[0]
    losses = [train((x, y)) for _ in range(40)]
    assert np.mean(losses[-10:]) < np.mean(losses[:10])


def test_modules_of_nnx(two: cs.CentralStorageStrategy) -> None:
    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.first, self.second = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.second(nnx.relu(self.first(x)))

    graph, parameters = nnx.split(Net(nnx.Rngs(0)))
    model = assert_trained_alike(two, parameters, lambda state, x, y: cross_entropy(nnx.merge(graph, state)(x), y))
    assert nnx.merge(graph, csj.read(model))(jnp.ones((1, 4))).shape == (1, 3)


def test_batch_normalization_of_flax_by_aux(two: cs.CentralStorageStrategy) -> None:
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: Any, train: bool) -> Any:
            return nn.Dense(3)(nn.BatchNorm(use_running_average=not train, momentum=0.5)(x))

    net = Net()
    variables = net.init(jax.random.key(0), jnp.zeros((1, 4)), train=False)
    with two.scope():
        model = csj.centralize(variables, trainable={"params": True, "batch_stats": False})

    @csj.step(model, csj.optim.sgd(0.1), has_aux=True)
    def train(model: Any, x: Any, y: Any) -> Any:
        scores, changed = net.apply(model, x, train=True, mutable=["batch_stats"])
        return cross_entropy(scores, y), changed["batch_stats"]

    x, y = np.tile(batches()[0][0][:4], (2, 1)), np.zeros(8, np.int32)  # both shares are alike
    _, statistics = train((x, y))
    jax.tree.map(
        lambda variable, new: variable.assign(two.reduce("MEAN", new, axis=None)), model["batch_stats"], statistics
    )
    mean = model["batch_stats"]["BatchNorm_0"]["mean"].numpy()
    np.testing.assert_allclose(mean, 0.5 * x.mean(axis=0), rtol=1e-5)


class Normalized(nnx.Module):
    def __init__(self) -> None:
        self.norm = nnx.BatchNorm(4, momentum=0.5, rngs=nnx.Rngs(0))

    def __call__(self, x: Any) -> Any:
        return self.norm(x)


def test_statistics_that_the_loss_would_lose_are_named(two: cs.CentralStorageStrategy) -> None:
    with two.scope():
        model = csj.centralize(
            Normalized(),
            trainable=lambda net: jax.tree.map(
                lambda each: isinstance(each, nnx.Param), net, is_leaf=lambda each: isinstance(each, nnx.Variable)
            ),
        )

    def loss(net: Any, x: Any) -> Any:
        return (net(x) ** 2).mean()

    def loss_and_statistics(net: Any, x: Any) -> Any:
        net = nnx.clone(net)
        return loss(net, x), {"mean": net.norm.mean[...]}

    x = np.tile(np.float32([[1, 2, 3, 4], [5, 6, 7, 8]]), (2, 1))
    with pytest.raises(cs.errors.InvalidArgumentError, match="changes norm/mean/value of the model in place"):
        csj.step(model, csj.optim.sgd(0.1))(loss)(x)
    _, changed = csj.step(model, csj.optim.sgd(0.1), has_aux=True)(loss_and_statistics)(x)
    np.testing.assert_allclose(two.reduce("MEAN", changed["mean"], axis=None), [1.5, 2, 2.5, 3])
