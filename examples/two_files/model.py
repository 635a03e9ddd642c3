"""A model in a module of its own: strategy, variables and the functions that replicas run live at module level."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import central_storage as cs

strategy = cs.CentralStorageStrategy(["cpu:0", "cpu:1"])

with strategy.scope():
    weights = cs.Variable(np.zeros(2, np.float32), name="weights")
    bias = cs.Variable(np.float32(0), name="bias")
    optimizer = cs.optimizers.Adam(learning_rate=0.05)


@dataclass(frozen=True)
class Scaling:
    """Scales every column to mean 0 and deviation 1. Its instances are sent to replicas, like the functions here."""

    mean: np.ndarray
    deviation: np.ndarray

    def __call__(self, x: np.ndarray) -> np.ndarray:
        return (x - self.mean) / self.deviation


def chances(x: np.ndarray) -> np.ndarray:
    """The probability that each row is of class 1, from the present values of the variables."""
    return 1 / (1 + np.exp(-(x @ weights + bias)))


def train_step(batch: tuple[np.ndarray, np.ndarray], rows: int, scaling: Scaling) -> np.float32:
    """One step of logistic regression on this replica's share of a batch of ``rows`` rows. Return its part of the mean
    loss."""
    x, y = batch
    x = scaling(x)
    p = chances(x)
    error = (p - y) / np.float32(rows)
    optimizer.apply_gradients([(x.T @ error, weights), (np.asarray(error.sum()), bias)])
    return -np.log(np.where(y == 1, p, 1 - p)).sum() / np.float32(rows)


def count_right(batch: tuple[np.ndarray, np.ndarray], scaling: Scaling) -> np.ndarray:
    """The number of rows of the whole batch that are classified right; every replica gets the sum."""
    x, y = batch
    right = np.asarray(((chances(scaling(x)) > 0.5) == y).sum())
    return cs.get_replica_context().all_reduce("SUM", right)
