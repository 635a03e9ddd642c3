"""What the service trains is what one process would: the same bits as NumPy in one process, replica by replica.

The reference computes each replica's gradient on that replica's share, sums them in replica order and applies the
reference rule. A second one, in float64 on whole batches, shows that sharing a batch is the same mathematics.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.harness.services import connected
from threadpoolctl import threadpool_limits

import central_storage as cs
from cs_proto.arithmetic.optimizers import rule_of
from cs_server.rules import RULES, reference

ROWS, BATCH, STEPS = 61, 20, 50  # the last batch of an epoch is one row: most replicas get an empty share
SHAPES = ((6, 16), (16,), (16, 3), (3,))

#: The parameters after all steps, and the loss of every step.
Trained = tuple[list[np.ndarray], list[float]]

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"learning_rate": 0.3, "momentum": 0.0, "nesterov": False}),
    "momentum": ("SGD", {"learning_rate": 0.1, "momentum": 0.9, "nesterov": False}),
    "adam": (
        "Adam",
        {"learning_rate": 0.01, "beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7, "amsgrad": False},
    ),
}


def data(dtype: str = "float32") -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(7)
    x = random.normal(size=(ROWS, 6)).astype(np.float32)
    return x.astype(dtype), random.integers(0, 3, ROWS)


def initial(dtype: str = "float32") -> list[np.ndarray]:
    random = np.random.default_rng(8)
    return [random.normal(0, 0.5, shape).astype(np.float32).astype(dtype) for shape in SHAPES]


def batches(dtype: str = "float32") -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The batches of all steps, epoch after epoch."""
    x, y = data(dtype)
    starts = range(0, ROWS, BATCH)
    for step in range(STEPS):
        start = starts[step % len(starts)]
        yield x[start : start + BATCH], y[start : start + BATCH]


def share(batch: tuple[np.ndarray, np.ndarray], replica: int, replicas: int) -> tuple[np.ndarray, np.ndarray]:
    size = math.ceil(len(batch[0]) / replicas)
    part = slice(replica * size, (replica + 1) * size)
    return batch[0][part], batch[1][part]


def gradients_into(
    out: list[np.ndarray], batch: tuple[np.ndarray, np.ndarray], rows: int, parameters: list[np.ndarray]
) -> np.ndarray:
    """The gradients of this share's part of the mean cross-entropy; returns that part."""
    x, y = batch
    w1, b1, w2, b2 = parameters
    hidden = np.tanh(x @ w1 + b1)
    chances = np.exp(hidden @ w2 + b2)
    chances /= chances.sum(axis=1, keepdims=True)
    loss = -np.log(chances[np.arange(len(y)), y]).sum() / rows
    chances[np.arange(len(y)), y] -= 1
    chances /= rows
    back = (chances @ w2.T) * (1 - hidden * hidden)
    np.matmul(x.T, back, out=out[0])
    back.sum(axis=0, out=out[1])
    np.matmul(hidden.T, chances, out=out[2])
    chances.sum(axis=0, out=out[3])
    return np.asarray(loss)


def trained_here(optimizer: str, replicas: int, dtype: str = "float32") -> Trained:
    """Train in this process."""
    kind, hyperparameters = OPTIMIZERS[optimizer]
    rule = RULES[rule_of(kind, hyperparameters)]
    parameters = initial(dtype)
    slots = [tuple(np.full_like(p, value) for value in rule.initial(hyperparameters)) for p in parameters]
    losses = []
    with threadpool_limits(1):
        for t, batch in enumerate(batches(dtype), 1):
            brought, parts = [], []
            for replica in range(replicas):
                out = [np.empty_like(p) for p in parameters]
                parts.append(gradients_into(out, share(batch, replica, replicas), len(batch[0]), parameters))
                brought.append(out)
            for index, parameter in enumerate(parameters):
                reference(rule, parameter, [out[index] for out in brought], slots[index], hyperparameters, t)
            losses.append(float(sum(parts[1:], parts[0])))
    return parameters, losses


def trained_by(strategy: cs.CentralStorageStrategy, optimizer: str, *, in_place: bool = True) -> Trained:
    """Train by the service."""
    kind, hyperparameters = OPTIMIZERS[optimizer]
    with strategy.scope():
        variables = [cs.Variable(value) for value in initial()]
        rule = getattr(cs.optimizers, kind)(**hyperparameters)

    @cs.function
    def step(batch: tuple[np.ndarray, np.ndarray], rows: int) -> np.ndarray:
        parameters = [np.asarray(v) for v in variables]
        out = cs.gradient_buffers(variables) if in_place else [np.empty_like(p) for p in parameters]
        loss = gradients_into(out, batch, rows, parameters)
        rule.apply_gradients(zip(out, variables, strict=True))
        return loss

    losses = []
    for batch in batches():
        [distributed] = strategy.experimental_distribute_dataset([batch])
        parts = strategy.run(step, args=(distributed, len(batch[0])))
        losses.append(float(strategy.reduce("SUM", parts, axis=None)))
    assert rule.iterations == STEPS
    return [v.numpy() for v in variables], losses


def start(replicas: int) -> cs.CentralStorageStrategy:
    return cs.CentralStorageStrategy([f"cpu:{r}" for r in range(replicas)])


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Linear algebra on one thread in every process, so that a product has the same bits in all of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(
    scope="module", params=[*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2)), 3], ids="replicas={}".format
)
def strategy(request: pytest.FixtureRequest, one_thread: None) -> Iterator[cs.CentralStorageStrategy]:
    """One service for each number of replicas, kept for all tests of it."""
    with start(request.param) as strategy:
        yield connected(strategy)


def assert_same_bits(found: Trained, expected: Trained) -> None:
    for one, other in zip(found[0], expected[0], strict=True):
        assert one.dtype == other.dtype
        assert one.tobytes() == other.tobytes()
    assert found[1] == expected[1]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_same_bits_as_one_process(strategy: cs.CentralStorageStrategy, optimizer: str) -> None:
    found = trained_by(strategy, optimizer)
    assert_same_bits(found, trained_here(optimizer, strategy.num_replicas_in_sync))
    exact = trained_here(optimizer, 1, "float64")
    for one, other in zip(found[0], exact[0], strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-4)
    assert exact[1][-2] < 0.7 * exact[1][0]  # it learns: bits of something that stands still would prove little


def test_same_bits_when_gradients_are_copied_in(strategy: cs.CentralStorageStrategy) -> None:
    expected = trained_here("adam", strategy.num_replicas_in_sync)
    assert_same_bits(trained_by(strategy, "adam", in_place=False), expected)


@pytest.mark.slow
def test_same_bits_from_another_service(one_thread: None) -> None:
    with start(2) as another:  # the first has those of one process, as above
        assert_same_bits(trained_by(another, "momentum"), trained_here("momentum", 2))
