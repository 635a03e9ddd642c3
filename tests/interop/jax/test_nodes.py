"""Classes of pytrees that the script defines are pytrees in the replicas, too."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import tree_util
from tests.harness.timing import unit

import central_storage as cs
import central_storage.jax as csj

pytestmark = pytest.mark.timeout(unit(200))


@flax.struct.dataclass
class Struct:
    w: Any
    power: int = flax.struct.field(pytree_node=False)


class Node(flax.struct.PyTreeNode):
    w: Any
    power: int = flax.struct.field(pytree_node=False)


@tree_util.register_dataclass
@dataclasses.dataclass
class Data:
    w: Any
    power: int = dataclasses.field(metadata={"static": True})


@tree_util.register_dataclass
@dataclasses.dataclass(slots=True)
class Slotted:
    w: Any
    power: int = dataclasses.field(metadata={"static": True})


class Plain:
    def __init__(self, w: Any, power: int) -> None:
        self.w, self.power = w, power


class Keyed(Plain):
    pass


@tree_util.register_pytree_with_keys_class
class KeyedClass(Plain):
    def tree_flatten_with_keys(self) -> Any:
        return ((tree_util.GetAttrKey("w"), self.w),), self.power

    @classmethod
    def tree_unflatten(cls, power: int, children: Any) -> KeyedClass:
        return cls(*children, power)


@tree_util.register_pytree_node_class
class PlainClass(Plain):
    def tree_flatten(self) -> Any:
        return (self.w,), self.power

    @classmethod
    def tree_unflatten(cls, power: int, children: Any) -> PlainClass:
        return cls(*children, power)


tree_util.register_pytree_node(Plain, lambda node: ((node.w,), node.power), lambda power, w: Plain(*w, power))
tree_util.register_pytree_with_keys(
    Keyed, lambda node: (((tree_util.GetAttrKey("w"), node.w),), node.power), lambda power, w: Keyed(*w, power)
)


class Module(eqx.Module):
    w: jax.Array
    act: Callable[[Any], Any] = eqx.field(static=True, default=jax.nn.tanh)
    power: int = eqx.field(static=True, default=1)
    none: Any = None

    def __init__(self, w: Any, power: int) -> None:
        self.w, self.act, self.power, self.none = w, jax.nn.tanh, power, None


class Nested(Module):
    inner: Module

    def __init__(self, w: Any, power: int) -> None:
        super().__init__(w, power)
        self.inner = Module(2 * w, 1)


KINDS = [Struct, Node, Data, Slotted, Plain, Keyed, KeyedClass, PlainClass, Module, Nested]
WITHOUT_NAMES = (Plain, PlainClass)


def loss(model: Any, x: Any) -> Any:
    """Every array in the model counts, and by its name."""
    made = jax.tree.map(lambda leaf: leaf, type(model)(model.w, model.power))  # of this class, in the replica
    assert jax.tree.structure(made) == jax.tree.structure(model)
    _, total = jax.lax.scan(lambda carry, _: (carry, carry.w.sum()), made, jnp.zeros(2))
    value = total.sum()
    for path, leaf in tree_util.tree_flatten_with_path(model)[0]:
        if eqx.is_inexact_array(leaf):
            value += len(tree_util.keystr(path)) * (leaf**model.power).sum()
    return value * x.mean()


@pytest.mark.parametrize("kind", KINDS)
def test_a_class_of_the_script_trains_as_in_optax(two: cs.CentralStorageStrategy, kind: Any) -> None:
    trained, rest = eqx.partition(kind(jnp.arange(3.0), 2), eqx.is_inexact_array)
    transformation, batch = optax.sgd(0.01), np.float32([1, 2, 3])
    with two.scope():
        model = csj.centralize(eqx.combine(trained, rest))
    train = csj.step(model, csj.optim.sgd(0.01))(loss)
    state = transformation.init(trained)
    for _ in range(2):
        value, gradients = jax.value_and_grad(lambda tree: loss(eqx.combine(tree, rest), batch))(trained)
        updates, state = transformation.update(gradients, state)
        trained = optax.apply_updates(trained, updates)
        assert train(batch) == pytest.approx(float(value))
    assert type(model) is kind
    for found, wanted in zip(
        jax.tree.leaves(csj.read(model)), jax.tree.leaves(eqx.combine(trained, rest)), strict=True
    ):
        if eqx.is_array(wanted):
            np.testing.assert_allclose(found, wanted, rtol=1e-5)
    if kind not in WITHOUT_NAMES:
        assert model.w.name == "w"


def test_a_class_travels_to_threads_and_comes_again(two: cs.CentralStorageStrategy) -> None:
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], in_process=True) as threads:
        for strategy in (threads, two):
            with strategy.scope():
                model = csj.centralize(Data(jnp.arange(3.0), 2))
            for factor in (1.0, 2.0):  # another function, so the class is sent anew
                train = csj.step(model, csj.optim.sgd(0.0))(lambda model, x, f=factor: f * loss(model, x))
                assert train(np.ones(2, np.float32)) == factor * float(loss(Data(jnp.arange(3.0), 2), jnp.ones(2)))


def test_a_derivative_of_the_script_travels(two: cs.CentralStorageStrategy) -> None:
    @jax.custom_vjp
    def backward(x: Any) -> Any:
        return x**2

    backward.defvjp(lambda x: (x**2, x), lambda x, gradient: (3 * gradient,))

    @jax.custom_jvp
    def forward(x: Any) -> Any:
        return x**2

    forward.defjvp(lambda primals, tangents: (primals[0] ** 2, 5 * tangents[0]))
    with two.scope():
        model = csj.centralize({"w": jnp.full((), 2.0)})
    train = csj.step(model, csj.optim.sgd(1.0))(lambda tree, x: backward(tree["w"]) + forward(tree["w"]) + x.mean() * 0)
    assert train(np.ones(2, np.float32)) == 8
    assert model["w"].numpy() == 2 - 3 - 5
