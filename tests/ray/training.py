"""The training that runs alone, in an actor and in a trial: its bits are the same everywhere.

python tests/ray/training.py RATE...    # trains alone, once for each rate, and prints the digests
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

import central_storage as cs

DEVICES = ["cpu:0", "cpu:1"]
STEPS = 12
BATCH = 12


class Training:
    """A dense variable and a table, which Adam trains for STEPS steps."""

    def __init__(
        self,
        strategy: cs.CentralStorageStrategy,
        rate: float,
        elements: Iterable[Any] | None = None,
        find: Callable[[Any], Any] = lambda batch: batch,
    ) -> None:
        """``elements`` are those of :func:`batches`, or what ``find`` makes them of in a replica."""
        start = np.random.default_rng(7)
        with strategy.scope():
            w = cs.Variable(start.standard_normal((16, 4)).astype(np.float32), name="w")
            table = cs.Variable(start.standard_normal((50, 16)).astype(np.float32), name="table")
            optimizer = cs.optimizers.Adam(rate)

        @cs.function
        def step(batch: Any) -> np.ndarray:
            rows = find(batch)
            x = cs.nn.embedding_lookup(table, rows).numpy()
            error = x @ w.numpy() - 1
            of_rows = cs.IndexedSlices(error @ w.numpy().T, rows, (50, 16))
            optimizer.apply_gradients([(x.T @ error, w), (of_rows, table)])
            return (error**2).sum()

        self._batches = strategy.experimental_distribute_dataset(batches() if elements is None else elements)
        self._strategy, self._step, self._variables = strategy, step, (w, table)
        self.optimizer = optimizer
        #: All that a later trial needs to go on.
        self.checkpoint = cs.train.Checkpoint(w=w, table=table, optimizer=optimizer, data=self._batches)

    def run(self, after: Callable[[int], Any] = lambda count: None, lookahead: int = 64) -> str:
        """Make the steps that are left, call ``after`` with the number of results after each, and return the digest of
        all variables."""
        is_over = self._batches.epoch > 0  # the checkpoint is from after the last step
        steps = () if is_over else self._strategy.run_steps(self._step, self._batches, lookahead=lookahead)
        for count, _ in enumerate(steps, 1):
            after(count)
        digest = hashlib.sha256()
        for variable in self._variables:
            digest.update(variable.numpy().tobytes())
        return digest.hexdigest()


def batches() -> list[np.ndarray]:
    """The rows of the table that each step takes."""
    draws = np.random.default_rng(8)
    return [draws.integers(0, 50, BATCH) for _ in range(STEPS)]


def main(rates: list[str]) -> None:
    """Train with each of the rates."""
    for rate in rates:
        with cs.CentralStorageStrategy(DEVICES) as strategy:
            print(Training(strategy, float(rate)).run(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
